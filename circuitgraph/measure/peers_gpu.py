"""The torch heads of `peers` as CUDA graphs: the same kernels without the time that Python takes to launch them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from .gpu import record

EAGER = "torch eager"


def peer_name(mode: str) -> str:
    return f"torch.compile {mode.removesuffix('-no-cudagraphs')}"


def graphed_peers(
    head: torch.nn.Module, arguments: Sequence[torch.Tensor], modes: Sequence[str]
) -> dict[str, Callable[[], object]]:
    """Name to graph replay, for eager and each mode of torch.compile. Compiling takes from seconds to minutes a mode."""

    def call_of(module: Callable[..., object]) -> Callable[[], object]:
        def call() -> object:
            with torch.no_grad():
                return module(*arguments)

        return call

    replays = {EAGER: record(call_of(head))}
    torch.compiler.reset()  # one compilation for each width: no dynamic shapes, no recompilation limit
    for mode in modes:
        compiled = call_of(torch.compile(head, dynamic=False, mode=mode))
        compiled()
        replays[peer_name(mode)] = record(compiled)
    return replays
