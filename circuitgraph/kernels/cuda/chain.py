"""The two ends of a chain of draft steps, one launch each: what every step is given, and what the caller gets. A chain
whose integers come from the host does without them.

Rows and steps are open: a library has each function once. `stops`: a row whose slot is -1 has stopped and sees nothing.

The steps' kernels read positions and the addressing of caches before they wait for the kernel before them. So the kernel
that writes those must let no other start before it has ended: `begin` is a fence, and so is whatever else is launched
without programmatic overlap, copies by torch for example.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tvm
from tvm.tirx.script import builder as T

from .environment import launch
from .values import hold, load_int, put, register, store

WARPS = 8


def _tensor(name: str, shape: tuple[Any, ...], dtype: str) -> Any:
    return T.arg(name, T.buffer(shape, dtype, buffer_name=name))


def _each(overlap: bool, steps: Any, rows: Any, body: Callable[[Any, Any], None]) -> None:
    """body(step, row) for all of them, by one block."""
    with launch(1, WARPS, overlap, fence=True) as at:
        index = register("int32")
        put(index, at.warp * 32 + at.lane)
        with T.While(index[0] < steps * rows):
            body(hold(T.floordiv(index[0], rows), "int32"), hold(T.floormod(index[0], rows), "int32"))
            put(index, index[0] + WARPS * 32)


def emit_begin(overlap: bool) -> None:
    """positions[k, i] = position[i] + k and lengths[k, i] = length[i] + k; both 0 for a row that has stopped."""
    steps, rows = (tvm.tirx.Var(name, "int32") for name in ("steps", "rows"))
    position, length = (_tensor(name, (rows,), "int32") for name in ("position", "length"))
    slots, positions, lengths = (_tensor(name, (steps, rows), "int32") for name in ("slots", "positions", "lengths"))
    stops = T.arg("stops", tvm.tirx.Var("stops", "int32"))

    def body(step: Any, row: Any) -> None:
        stopped = T.And(stops > 0, load_int(slots, [step, row]) < 0)
        for source, target in ((position, positions), (length, lengths)):
            store(target, [step, row], hold(T.Select(stopped, T.int32(0), load_int(source, [row]) + step), "int32"))

    _each(overlap, steps, rows, body)


def emit_end(overlap: bool) -> None:
    """drafts[k, i] = -1 and logprobs[k, i] = NaN where a row had stopped."""
    steps, rows = (tvm.tirx.Var(name, "int32") for name in ("steps", "rows"))
    slots, drafts = (_tensor(name, (steps, rows), "int32") for name in ("slots", "drafts"))
    logprobs = _tensor("logprobs", (steps, rows), "float32")
    stops = T.arg("stops", tvm.tirx.Var("stops", "int32"))

    def body(step: Any, row: Any) -> None:
        with T.If(T.And(stops > 0, load_int(slots, [step, row]) < 0)), T.Then():
            store(drafts, [step, row], T.int32(-1))
            store(logprobs, [step, row], T.cuda.uint_as_float(T.uint32(0x7FC00000)))

    _each(overlap, steps, rows, body)


CHAIN_FUNCTIONS = {"circuitgraph_chain_begin": emit_begin, "circuitgraph_chain_end": emit_end}
