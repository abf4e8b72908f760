"""Calling one compiled function directly, with memory of one's own for everything that it may touch."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
import tvm_ffi

from ..artifact.manifest import Function
from ..ops import TORCH_DTYPES, PagedKV

_DTYPES = {**TORCH_DTYPES, "i8": torch.int8}


def workspace_of(function: Function, device: torch.device) -> torch.Tensor:
    """Memory for a function's intermediates, zero at first, as runners allocate it."""
    return torch.zeros(function.workspace_bytes, dtype=torch.uint8, device=device)


class PreparedCall:
    """A function with its arguments converted: what a GPU's times are taken of. `outputs` are overwritten by every call.

    Outputs and workspace hold NaN (integers: -1) before the first call, so what is not written shows. A workspace may be
    given, for calls that share theirs as a runner's do.
    """

    def __init__(
        self,
        function: Function,
        code: Callable[..., Any],
        *,
        inputs: Mapping[str, torch.Tensor],
        caches: Mapping[str, PagedKV],
        weights: Mapping[str, torch.Tensor],
        workspace: torch.Tensor | None = None,
    ):
        self._code = code
        self.device = next(iter({**inputs, **weights}.values())).device
        self.outputs: dict[str, torch.Tensor] = {}
        self._arguments = []
        for arg in function.args:
            if arg.role == "workspace" and workspace is not None:
                tensor = workspace
            elif arg.role in ("workspace", "output"):
                tensor = _poisoned([int(dim) for dim in arg.shape], arg.dtype, self.device)
                if arg.role == "output":
                    self.outputs[arg.name] = tensor
            elif arg.role == "state":
                state, _, part = arg.name.rpartition(".")
                tensor = getattr(caches[state], part)
            else:
                tensor = inputs[arg.name] if arg.role == "input" else weights[arg.name]
            self._arguments.append(tvm_ffi.from_dlpack(tensor))

    def __call__(self) -> None:
        with on_stream(self.device):
            self._code(*self._arguments)


def call_function(
    function: Function,
    code: Callable[..., Any],
    *,
    inputs: Mapping[str, torch.Tensor],
    caches: Mapping[str, PagedKV],
    weights: Mapping[str, torch.Tensor],
) -> dict[str, torch.Tensor]:
    """Outputs by name; see `PreparedCall`. The caches' storage is written in place."""
    call = PreparedCall(function, code, inputs=inputs, caches=caches, weights=weights)
    call()
    return call.outputs


@contextlib.contextmanager
def on_stream(device: torch.device) -> Iterator[None]:
    """Compiled functions launch on torch's current stream of `device`; nothing to do on the CPU."""
    if device.type != "cuda":
        yield
        return
    stream = torch.cuda.current_stream(device).cuda_stream
    with torch.cuda.device(device), tvm_ffi.use_raw_stream(tvm_ffi.device(f"cuda:{device.index or 0}"), stream):
        yield


def _poisoned(shape: list[int], dtype: str, device: torch.device) -> torch.Tensor:
    """NaN, or bytes that make any float read from them NaN."""
    kind = _DTYPES[dtype]
    value = float("nan") if kind.is_floating_point else 255 if dtype == "u8" else -1
    return torch.full(shape, value, dtype=kind, device=device)
