"""The tensor files of a model folder: names, dtypes and shapes first, data only when asked for, memory-mapped.

Safetensors, or PyTorch's pickles (`pickled`) where a folder has nothing better; one file, or shards with an index.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from ..errors import CheckpointError, Fault, did_you_mean
from .pickled import NOT_WEIGHTS, SUFFIXES, read_pickle

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
PICKLED_INDEX = "pytorch_model.bin.index.json"
PICKLED_SINGLE = "pytorch_model.bin"

DTYPES = {"F32": "f32", "BF16": "bf16", "F16": "f16", "I32": "i32", "I64": "i64"}
"""safetensors' dtype names to ours; others (quantised formats) keep their own."""

TORCH_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.float8_e8m0fnu: "F8_E8M0",
}
"""What safetensors calls the dtypes that a pickle may hold."""


STACKED = "{expert}"
"""In a tensor's name: this is the stack of all experts' tensors, which the file holds one by one."""


@dataclass(frozen=True)
class TensorInfo:
    """What a file's header says of one tensor."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    file: Path

    def __str__(self) -> str:
        return f"{self.dtype}[{', '.join(str(size) for size in self.shape)}]"


class TensorFiles:
    """Tensors by name over one file or a set of shards. Shards are opened when one of their tensors is asked for."""

    def __init__(self, folder: Path, file_of: dict[str, Path], index: str | None = None):
        self.folder = folder
        self._file_of = file_of
        self._index = index
        self._headers: dict[Path, dict[str, TensorInfo]] = {}
        self._pickles: dict[Path, dict[str, torch.Tensor]] = {}

    @staticmethod
    def open(folder: str | Path) -> TensorFiles:
        """Find the tensor files of `folder`: an index and its shards, `model.safetensors`, the same of PyTorch's names, or
        the only file of another name. A file itself is taken, whatever lies beside it.

        Files that merely lie beside the weights are never read. A shard that is absent matters when it is needed.

        Raises:
            CheckpointError: no or no single candidate, an unreadable index, an unreadable single file.
        """
        folder = Path(folder)
        if folder.is_file():
            return TensorFiles._of(folder.parent, folder)
        for index, single in ((INDEX, SINGLE), (PICKLED_INDEX, PICKLED_SINGLE)):
            if (folder / index).is_file():
                file_of = _read_index(folder / index)
                if (folder / single).is_file() and folder / single not in file_of.values():
                    hint = "Which of them is it? Move the other away: loaders differ in which they take."
                    got = f"{single}, and {index}, which does not name it"
                    raise CheckpointError(Fault("several model weights", str(folder), None, f"{single} or {index}", got, hint))
                return TensorFiles(folder, file_of, index)
            if (folder / single).is_file():
                return TensorFiles._of(folder, folder / single)
        pickled = [file for file in sorted(folder.iterdir()) if _is_pickle(file)] if folder.is_dir() else []
        for found, single in ((sorted(folder.glob("*.safetensors")), SINGLE), (pickled, PICKLED_SINGLE)):
            if len(found) == 1:
                return TensorFiles._of(folder, found[0])
            if found:
                names, expected = ", ".join(path.name for path in found), f"{single} or an index of shards"
                hint = f"Which of them is it? Call it {single}."
                raise CheckpointError(Fault("several model weights", where=str(folder), expected=expected, got=names, hint=hint))
        expected = f"{SINGLE} or {INDEX}, or PyTorch's {PICKLED_SINGLE}"
        raise CheckpointError(Fault("no model weights here", where=str(folder), expected=expected))

    @staticmethod
    def _of(folder: Path, file: Path) -> TensorFiles:
        """A single file, whose header has all names."""
        files = TensorFiles(folder, {})
        files._file_of = dict.fromkeys(files._header(file), file)
        return files

    @cached_property
    def names(self) -> frozenset[str]:
        return frozenset(self._file_of)

    def __contains__(self, name: str) -> bool:
        return name.replace(STACKED, "0") in self._file_of

    def parts(self, name: str) -> list[str]:
        """The tensors that a name stands for: itself, or one per expert where it says `{expert}`."""
        if STACKED not in name:
            return [name]
        before, after = name.split(STACKED)
        numbers = (other[len(before) : len(other) - len(after)] for other in self._file_of if other.startswith(before))
        known = [int(number) for number in numbers if number.isdigit() and f"{before}{number}{after}" in self._file_of]
        return [f"{before}{index}{after}" for index in range(max(known, default=-1) + 1)]

    def __iter__(self) -> Iterator[str]:
        return iter(sorted(self._file_of))

    def info(self, name: str) -> TensorInfo:
        """Dtype and shape, from the header alone.

        Raises:
            CheckpointError: no such tensor, an unreadable shard, or a shard that lacks what the index says it has.
        """
        if STACKED in name and name in self:
            return self._stacked_info(name)
        if name not in self._file_of:
            raise CheckpointError(Fault(f"no tensor '{name}'", where=str(self.folder), hint=did_you_mean(name, self._file_of)))
        file = self._file_of[name]
        if self._index is not None and not file.is_file():
            raise CheckpointError(
                Fault(
                    f"the index puts the tensor into a shard that is absent: {file.name}",
                    where=str(self.folder / self._index),
                    subject=name,
                    hint="Download it, or correct the index.",
                )
            )
        header = self._header(file)
        if name not in header:
            raise CheckpointError(
                Fault(
                    f"{self._index} puts the tensor into {file.name}, which does not have it",
                    where=str(self.folder / str(self._index)),
                    subject=name,
                    hint="Index and shards are of different versions: download both again.",
                )
            )
        return header[name]

    def _stacked_info(self, name: str) -> TensorInfo:
        """Of the stack; its parts must be equal in dtype and shape."""
        parts = self.parts(name)
        if absent := [part for part in parts if part not in self._file_of]:
            expected, hint = f"one for each of {len(parts)} experts", "Download or export the checkpoint again."
            raise CheckpointError(Fault("an expert lacks this tensor", str(self.folder), absent[0], expected, hint=hint))
        first, *others = (self.info(part) for part in parts)
        for other in others:
            if (other.dtype, other.shape) != (first.dtype, first.shape):
                expected = f"{first} as in '{first.name}'"
                hint = "The experts of a layer are read as one tensor: export them alike."
                fault = Fault("experts differ", str(other.file), other.name, expected, str(other), hint)
                raise CheckpointError(fault)
        return TensorInfo(name, first.dtype, (len(others) + 1, *first.shape), first.file)

    def glance(self, name: str) -> TensorInfo | None:
        """`info` of a tensor whose file has been opened already; nothing is opened for it."""
        return self._headers.get(self._file_of[name], {}).get(name)

    def _header(self, file: Path) -> dict[str, TensorInfo]:
        if file not in self._headers:
            if file.suffix in SUFFIXES:
                # A pickle has no header: its tensors are mapped at once, which reads none of their data.
                self._pickles[file] = read_pickle(file)
                self._headers[file] = {name: _info(name, tensor, file) for name, tensor in self._pickles[file].items()}
            else:
                self._headers[file] = _read_header(file)
        return self._headers[file]

    def load(self, names: Iterable[str]) -> dict[str, torch.Tensor]:
        """The tensors, memory-mapped on the CPU: pages are read when touched, and nothing is copied, but for strided views
        and old files among PyTorch's.

        Data starts at any multiple of 8 bytes of a file, so pointers are aligned to no more than that. Stacks of experts
        that are stored one by one are copied into one tensor.

        Raises:
            CheckpointError: as `info`.
        """
        wanted: dict[Path, list[str]] = {}
        names = list(names)
        for part in (part for name in names for part in self.parts(name)):
            wanted.setdefault(self.info(part).file, []).append(part)
        tensors: dict[str, torch.Tensor] = {}
        for file, inside in wanted.items():
            if file in self._pickles:
                tensors.update((name, self._pickles[file][name].contiguous()) for name in inside)
                continue
            with safe_open(file, framework="pt", device="cpu") as opened:
                tensors.update((name, opened.get_tensor(name)) for name in inside)
        for name in names:
            if STACKED in name:
                tensors[name] = torch.stack([tensors.pop(part) for part in self.parts(name)])
        return tensors


def _is_pickle(file: Path) -> bool:
    return file.suffix in SUFFIXES and file.is_file() and not file.name.startswith(NOT_WEIGHTS)


def _info(name: str, tensor: torch.Tensor, file: Path) -> TensorInfo:
    dtype = TORCH_NAMES.get(tensor.dtype, str(tensor.dtype))
    return TensorInfo(name, DTYPES.get(dtype, dtype), tuple(tensor.shape), file)


def _read_index(path: Path) -> dict[str, Path]:
    """The file of every tensor. Whether the files are there is not looked at."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"), object_pairs_hook=unique_keys)
    except (OSError, ValueError, RecursionError) as problem:
        reason = f"{type(problem).__name__}: {problem}"
        hint = "Download it again."
        raise CheckpointError(Fault(f"not a readable shard index: {reason}", where=str(path), hint=hint)) from None
    weight_map = data.get("weight_map") if isinstance(data, dict) else None
    if not isinstance(weight_map, dict):
        got = "none" if weight_map is None else type(weight_map).__name__
        expected, hint = "an object of the file of each tensor", "Download it again."
        message = "not a readable shard index"
        raise CheckpointError(Fault(message, where=str(path), subject="weight_map", expected=expected, got=got, hint=hint))
    shard_of = {str(name): str(shard) for name, shard in weight_map.items()}
    suffixes = SUFFIXES if path.name == PICKLED_INDEX else (".safetensors",)
    faults = []
    for name, shard in shard_of.items():
        if Path(shard).name != shard or not shard.endswith(suffixes):
            expected = f"a {' or '.join(suffixes)} file of the same folder"
            faults.append(Fault("the index names no such file", where=str(path), subject=name, expected=expected, got=shard))
    if faults:
        raise CheckpointError(faults)
    return {name: path.parent / shard for name, shard in shard_of.items()}


def unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object without two values for a key, of which one would win silently."""
    data = dict(pairs)
    if len(data) != len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"'{next(name for name in names if names.count(name) > 1)}' is in it twice")
    return data


def _read_header(file: Path) -> dict[str, TensorInfo]:
    try:
        with safe_open(file, framework="pt", device="cpu") as opened:
            header = {}
            for name in opened.keys():  # noqa: SIM118 (safe_open is no mapping)
                view = opened.get_slice(name)
                dtype = str(view.get_dtype())
                header[name] = TensorInfo(name, DTYPES.get(dtype, dtype), tuple(view.get_shape()), file)
            return header
    except (SafetensorError, OSError) as problem:
        size = file.stat().st_size if file.is_file() else 0
        raise CheckpointError(
            Fault(
                f"not a readable safetensors file: {problem}",
                where=str(file),
                got=f"{size} bytes",
                hint="Truncated or overwritten? Download it again.",
            )
        ) from None
