"""CUDA graphs: recording one, and integers that travel to it in one copy."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Mapping
from typing import TypeVar

import torch

Made = TypeVar("Made")

RECORDING = threading.Lock()
"""One graph of ours at a time is recorded in a process: torch's allocator takes part."""


def record(launch: Callable[[], Made], stream: torch.cuda.Stream) -> tuple[torch.cuda.CUDAGraph, Made]:
    """A graph of what `launch` launches, and what it returned, which every replay writes again.

    Takes milliseconds; the device is not waited for, and a failure leaves nothing behind. stream: of the caller's, for
    recording on.
    """
    graph = torch.cuda.CUDAGraph()
    stream.wait_stream(torch.cuda.current_stream(stream.device))
    with RECORDING, torch.cuda.stream(stream):
        graph.capture_begin(capture_error_mode="thread_local")
        try:
            made = launch()
        except BaseException:
            with contextlib.suppress(Exception):  # it would hide what went wrong
                graph.capture_end()
            raise
        graph.capture_end()
    return graph, made


def packed(shapes: Mapping[str, tuple[int, ...]], device: torch.device) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """Integer tensors side by side in one memory, and that memory; page-locked on the host."""
    sizes = {name: torch.Size(shape).numel() for name, shape in shapes.items()}
    memory = torch.zeros(sum(sizes.values()), dtype=torch.int32, device=device, pin_memory=device.type == "cpu")
    views, offset = {}, 0
    for name, shape in shapes.items():
        views[name] = memory[offset : offset + sizes[name]].view(shape)
        offset += sizes[name]
    return views, memory
