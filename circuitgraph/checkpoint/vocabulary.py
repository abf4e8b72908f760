"""`--draft-vocab`: the tokens that a head is restricted to, as a number or a file of ids."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from ..errors import CheckpointError, Fault
from .pickled import why_unreadable

_NUMBER = re.compile("-?[0-9]{1,18}")
_FORMS = "a number of tokens, or a file of ids"


def draft_vocabulary(given: int | str | Path | Sequence[int], vocab_size: int) -> tuple[int, ...]:
    """The ids, rising: of the first `given` tokens, listed by the caller, or listed in a file.

    A file is text (ids between spaces, commas or line ends; `#` begins a comment), a .json list, or one tensor of integers in
    a .safetensors, .pt or .bin file.

    Raises:
        CheckpointError: a file that cannot be read; what is no id of the vocabulary, an id twice, or none.
    """
    if isinstance(given, bool) or not isinstance(given, int | str | Path | Sequence):
        raise _refused(None, "is no number of tokens and no list", _FORMS, repr(given))
    if isinstance(given, int) or (isinstance(given, str) and _NUMBER.fullmatch(given.strip())):
        count = int(given)
        if not 1 <= count <= vocab_size:
            raise _refused(None, "is no number of tokens", f"1 to {vocab_size}", str(count))
        return tuple(range(count))
    where = str(given) if isinstance(given, str | Path) else None
    ids = _read(Path(given)) if isinstance(given, str | Path) else list(given)
    if not ids:
        raise _refused(where, "lists no token", "ids", "none")
    seen: dict[int, int] = {}
    for place, token in enumerate(ids):
        if isinstance(token, bool) or not isinstance(token, int):
            raise _refused(where, f"entry {place} is no token id", "a whole number", repr(token))
        if not 0 <= token < vocab_size:
            hint = "Is the list of another tokenizer?"
            raise _refused(where, f"entry {place} is no token of the target", f"0 to {vocab_size - 1}", str(token), hint)
        if token in seen:
            raise _refused(where, f"entries {seen[token]} and {place} are the same token", "each once", str(token))
        seen[token] = place
    return tuple(sorted(ids))


def _read(path: Path) -> list[Any]:
    where = str(path)
    try:
        if path.suffix in (".safetensors", ".pt", ".bin"):
            return _from_tensor(path)
        text = path.read_text(encoding="utf-8")
        if path.suffix == ".json":
            ids = json.loads(text)
            if not isinstance(ids, list):
                raise _refused(where, "is no list of token ids", "a JSON list", type(ids).__name__)
            return ids
    except (OSError, ValueError, RecursionError, SafetensorError) as problem:  # RecursionError: nested without end
        raise _refused(where, f"cannot be read: {problem}", _FORMS, None) from None
    words = [(number, word) for number, line in enumerate(text.splitlines(), 1) for word in _words(line)]
    for number, word in words:
        if not _NUMBER.fullmatch(word):
            raise _refused(f"{where}:{number}", "is no token id", "a whole number", repr(word))
    return [int(word) for _, word in words]


def _words(line: str) -> list[str]:
    return line.partition("#")[0].replace(",", " ").split()


def _from_tensor(path: Path) -> list[int]:
    if path.suffix == ".safetensors":
        with safe_open(path, framework="pt", device="cpu") as opened:
            found: Any = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118 (safe_open is no mapping)
    else:
        found = _unpickled(path)
    if isinstance(found, dict):
        if len(found) != 1:
            raise _refused(str(path), "is to hold one tensor, of token ids", "one", ", ".join(map(str, found)) or "none")
        (found,) = found.values()
    if isinstance(found, list):
        return found
    if not isinstance(found, torch.Tensor) or found.dim() != 1 or found.dtype not in (torch.int16, torch.int32, torch.int64):
        tensor = isinstance(found, torch.Tensor)
        got = f"{str(found.dtype).removeprefix('torch.')}{list(found.shape)}" if tensor else type(found).__name__
        raise _refused(str(path), "is no list of token ids", "int32[N] or int64[N]", got)
    return found.tolist()


def _unpickled(path: Path) -> Any:
    """By the loader that runs no code."""
    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except OSError:
        raise
    except Exception as problem:  # a damaged file raises whatever it trips the unpickler over
        raise ValueError(why_unreadable(problem)) from None


def _refused(where: str | None, message: str, expected: str, got: str | None, hint: str | None = None) -> CheckpointError:
    return CheckpointError(Fault(message, where=where, subject="draft vocabulary", expected=expected, got=got, hint=hint))
