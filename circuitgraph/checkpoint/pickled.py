"""PyTorch's own files (`.bin`, `.pt`): a pickle, of which tensors are taken and nothing else.

Unpickling can run code, so the weights-only loader reads them: a file that asks for anything but tensors and plain
containers is refused. Newer ones are zip files, whose tensors are memory-mapped.
"""

from __future__ import annotations

import pickle
import re
import warnings
import zipfile
from pathlib import Path
from typing import Any

import torch

from ..errors import CheckpointError, Fault

SUFFIXES = (".bin", ".pt", ".pth")

NOT_WEIGHTS = ("training_args", "optimizer", "scheduler", "scaler", "rng_state", "trainer_state")
"""How files that trainers leave beside the weights begin."""

_WRAPPERS = ("state_dict", "model_state_dict", "model", "module")
"""Where training scripts put the weights among other things."""


def read_pickle(file: Path) -> dict[str, torch.Tensor]:
    """The tensors of a file by name.

    Raises:
        CheckpointError: a file that is damaged, needs code to be read, or holds something else than named tensors.
    """
    where = str(file)
    try:
        with warnings.catch_warnings(action="ignore"):  # of deprecated storage classes that old files name
            data = torch.load(file, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(file))
    except Exception as problem:  # a damaged file raises whatever it trips the unpickler over
        raise CheckpointError(_unreadable(where, file, problem)) from None
    if not isinstance(data, dict):
        hint = "Save the model's state_dict: names and tensors."
        raise CheckpointError(Fault("does not hold named tensors", where=where, got=type(data).__name__, hint=hint))
    faults = [_no_tensor(where, name, value) for name, value in data.items() if not _is_tensor(name, value)]
    if faults:
        raise CheckpointError(faults)
    return {name: value.detach() for name, value in data.items()}


def _is_tensor(name: Any, value: Any) -> bool:
    dense = isinstance(value, torch.Tensor) and value.layout == torch.strided and not value.is_quantized
    return isinstance(name, str) and dense and value.device.type == "cpu"


def _no_tensor(where: str, name: Any, value: Any) -> Fault:
    if not isinstance(name, str):
        hint = "Save the model's state_dict: names and tensors."
        return Fault(
            "is no name of a tensor", where=where, subject=str(name), expected="a text", got=type(name).__name__, hint=hint
        )
    if isinstance(value, torch.Tensor):
        got, hint = f"{value.dtype} of layout {value.layout} on {value.device}", "Save it as an ordinary tensor."
    else:
        got, hint = type(value).__name__, "Remove the entry, or convert the file to safetensors."
    if isinstance(value, dict) and name in _WRAPPERS:
        hint = f"Save what is under '{name}' alone, best as safetensors."
    return Fault("is no tensor", where=where, subject=name, expected="a dense tensor", got=got, hint=hint)


def _unreadable(where: str, file: Path, problem: Exception) -> Fault:
    """PyTorch's text advises to read such a file without protection, so only the name of what it asks for is passed on."""
    asked = re.search(r"GLOBAL (\w+(?:\.\w+)+)", str(problem))
    if asked is not None:
        hint = "Only weights are read, never code. Where you trust the file, convert it to safetensors."
        return Fault("the file runs code when it is read", where=where, subject=asked[1], hint=hint)
    size = file.stat().st_size if file.is_file() else 0
    hint = "Truncated or overwritten? Download it again, or convert it to safetensors where you trust it."
    return Fault(f"not a readable PyTorch file: {why_unreadable(problem)}", where=where, got=f"{size} bytes", hint=hint)


def why_unreadable(problem: Exception) -> str:
    """PyTorch's reason, without its advice to read the file in another way, which would run its code."""
    told = re.search(r"WeightsUnpickler error:\s*(.+)", str(problem))
    if told is not None:
        return told[1]
    for kind in ("TorchScript", ".tar"):
        if kind in str(problem) and "weights_only" in str(problem):
            return f"it is a {kind} archive, which the weights-only loader refuses"
    if isinstance(problem, pickle.UnpicklingError) or "weights_only" in str(problem):
        return "the weights-only loader refuses it"
    return str(problem).partition("\n")[0] or type(problem).__name__
