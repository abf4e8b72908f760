"""The two ends of a chain of draft steps, one launch each: what every step is given, and what the caller gets.

Rows and steps are open: a library has each function once. `stops`: a row whose slot is -1 has stopped and sees nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tvm
from tvm.tirx.script import builder as T

from .environment import launch
from .values import hold, load, load_int, put, register, store

WARPS = 8


def _tensor(name: str, shape: tuple[Any, ...], dtype: str) -> Any:
    return T.arg(name, T.buffer(shape, dtype, buffer_name=name))


def _each(overlap: bool, steps: Any, rows: Any, body: Callable[[Any, Any], None]) -> None:
    """body(step, row) for all of them, by one block."""
    with launch(1, WARPS, overlap) as at:
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
    """drafts and logprobs of all steps as [rows, steps]; -1 and NaN where a row had stopped."""
    steps, rows = (tvm.tirx.Var(name, "int32") for name in ("steps", "rows"))
    made, scores = _tensor("made", (steps, rows), "int32"), _tensor("scores", (steps, rows), "float32")
    slots = _tensor("slots", (steps, rows), "int32")
    drafts, logprobs = _tensor("drafts", (rows, steps), "int32"), _tensor("logprobs", (rows, steps), "float32")
    stops = T.arg("stops", tvm.tirx.Var("stops", "int32"))

    def body(step: Any, row: Any) -> None:
        stopped = T.And(stops > 0, load_int(slots, [step, row]) < 0)
        store(drafts, [row, step], hold(T.Select(stopped, T.int32(-1), load_int(made, [step, row])), "int32"))
        nan = T.cuda.uint_as_float(T.uint32(0x7FC00000))
        store(logprobs, [row, step], hold(T.Select(stopped, nan, load(scores, [step, row]))))

    _each(overlap, steps, rows, body)


CHAIN_FUNCTIONS = {"circuitgraph_chain_begin": emit_begin, "circuitgraph_chain_end": emit_end}
