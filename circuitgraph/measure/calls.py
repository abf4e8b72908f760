"""Calling one compiled function directly, with memory of one's own for everything that it may touch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import tvm_ffi

from ..artifact.manifest import Function
from ..ops import TORCH_DTYPES, PagedKV

_DTYPES = {**TORCH_DTYPES, "u8": torch.uint8, "i8": torch.int8}


def call_function(
    function: Function,
    code: Callable[..., Any],
    *,
    inputs: Mapping[str, torch.Tensor],
    caches: Mapping[str, PagedKV],
    weights: Mapping[str, torch.Tensor],
) -> dict[str, torch.Tensor]:
    """Outputs by name. Outputs and workspace hold NaN (integers: -1) before the call, so what is not written shows.

    The caches' storage is written in place.
    """
    outputs: dict[str, torch.Tensor] = {}
    arguments = []
    for arg in function.args:
        if arg.role in ("workspace", "output"):
            tensor = _poisoned([int(dim) for dim in arg.shape], arg.dtype)
            if arg.role == "output":
                outputs[arg.name] = tensor
        elif arg.role == "state":
            state, _, part = arg.name.rpartition(".")
            tensor = getattr(caches[state], part)
        else:
            tensor = inputs[arg.name] if arg.role == "input" else weights[arg.name]
        arguments.append(tvm_ffi.from_dlpack(tensor))
    code(*arguments)
    return outputs


def _poisoned(shape: list[int], dtype: str) -> torch.Tensor:
    """NaN, or bytes that make any float read from them NaN."""
    kind = _DTYPES[dtype]
    return torch.full(shape, float("nan") if kind.is_floating_point else 255 if dtype == "u8" else -1, dtype=kind)
