"""The safetensors files of a model folder: names, dtypes and shapes first, data only when asked for, memory-mapped."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from ..errors import CheckpointError, Fault, did_you_mean

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"

DTYPES = {"F32": "f32", "BF16": "bf16", "F16": "f16", "I32": "i32", "I64": "i64"}
"""safetensors' dtype names to ours; others (quantised formats) keep their own."""


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

    def __init__(self, folder: Path, file_of: dict[str, Path], indexed: bool):
        self.folder = folder
        self._file_of = file_of
        self._indexed = indexed
        self._headers: dict[Path, dict[str, TensorInfo]] = {}

    @staticmethod
    def open(folder: str | Path) -> TensorFiles:
        """Find the tensor files of `folder`: an index and its shards, `model.safetensors`, or the only other one.

        Files that merely lie beside the weights are never read.

        Raises:
            CheckpointError: no or no single candidate, an unreadable index, a shard that is absent.
        """
        folder = Path(folder)
        if (folder / INDEX).is_file():
            return TensorFiles(folder, _read_index(folder / INDEX), indexed=True)
        file = folder / SINGLE
        if not file.is_file():
            found = sorted(folder.glob("*.safetensors"))
            if len(found) != 1:
                names = ", ".join(path.name for path in found) or "none"
                expected, got = f"{SINGLE} or {INDEX}", f"{names} of *.safetensors"
                raise CheckpointError(Fault("no model weights here", where=str(folder), expected=expected, got=got))
            file = found[0]
        header = _read_header(file)
        files = TensorFiles(folder, dict.fromkeys(header, file), indexed=False)
        files._headers[file] = header
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
        if file not in self._headers:
            self._headers[file] = _read_header(file)
        header = self._headers[file]
        if name not in header:
            raise CheckpointError(
                Fault(
                    f"{INDEX} puts the tensor into {file.name}, which does not have it",
                    where=str(self.folder / INDEX),
                    subject=name,
                    hint="Index and shards are of different versions: download both again.",
                )
            )
        return header[name]

    def _stacked_info(self, name: str) -> TensorInfo:
        """Of the stack; its parts must be equal in dtype and shape."""
        first, *others = (self.info(part) for part in self.parts(name))
        for other in others:
            if (other.dtype, other.shape) != (first.dtype, first.shape):
                expected = f"{first} as in '{first.name}'"
                fault = Fault("experts differ", where=str(other.file), subject=other.name, expected=expected, got=str(other))
                raise CheckpointError(fault)
        return TensorInfo(name, first.dtype, (len(others) + 1, *first.shape), first.file)

    def load(self, names: Iterable[str]) -> dict[str, torch.Tensor]:
        """The tensors, memory-mapped on the CPU: pages are read when touched, and nothing is copied.

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
            with safe_open(file, framework="pt", device="cpu") as opened:
                tensors.update((name, opened.get_tensor(name)) for name in inside)
        for name in names:
            if STACKED in name:
                tensors[name] = torch.stack([tensors.pop(part) for part in self.parts(name)])
        return tensors


def _read_index(path: Path) -> dict[str, Path]:
    try:
        weight_map = json.loads(path.read_text(encoding="utf-8"))["weight_map"]
        file_of = {str(name): path.parent / str(shard) for name, shard in weight_map.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as problem:
        reason = f"{type(problem).__name__}: {problem}"
        raise CheckpointError(Fault(f"not a readable shard index: {reason}", where=str(path))) from None
    faults = []
    for shard in sorted(set(file_of.values())):
        if not shard.is_file():
            inside = [name for name, file in file_of.items() if file == shard]
            faults.append(
                Fault(
                    f"the index names a shard that is absent: {shard.name}",
                    where=str(path),
                    got=f"{len(inside)} tensors in it, '{inside[0]}' first",
                    hint="Download it, or correct the index.",
                )
            )
    if faults:
        raise CheckpointError(faults)
    return file_of


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
