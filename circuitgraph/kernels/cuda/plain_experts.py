"""Experts in every shape and dtype: a warp a weight row of a pair, fp32 without tensor cores. The last resort.

A pair is a row and one of its experts. Weights are read once for each pair, not once for all rows of an expert.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tvm.tirx.script import builder as T

from .plain import WARPS
from .values import hold, load, load_int, put, register, silu, store, wide

BLOCKS_PER_PROCESSOR = 4


def emit_plain_experts(env: Any, node: Any, made: Any) -> None:
    """made: [pairs, inner] float32, scratch."""
    x, share, out = env.flat(node.inputs[0]), env.buffer(node.inputs[2]), env.flat(node.name)
    ids, down, gate = (env.buffer(name) for name in (node.inputs[1], *node.inputs[3:5]))
    up = env.buffer(node.inputs[5]) if len(node.inputs) > 5 else None
    rows, top = (int(size) for size in ids.shape)
    hidden, inner = int(down.shape[1]), int(down.shape[2])

    def pair(item, lane):
        place, column = hold(T.floordiv(item, inner), "int32"), hold(T.floormod(item, inner), "int32")
        row = hold(T.floordiv(place, top), "int32")
        expert = load_int(ids, [row, T.floormod(place, top)])
        sources = [(gate, column), (gate, column + inner) if up is None else (up, column)]
        value = lambda k: load(x, [row, k])  # noqa: E731
        sums = [_dot(lambda k, w=w, c=c: load(w, [wide(expert), c, k], constant=True), value, hidden, lane) for w, c in sources]
        with T.If(lane < 1), T.Then():
            store(made, [place, column], hold(silu(sums[0]) * sums[1]))

    def result(item, lane):
        row, column = hold(T.floordiv(item, hidden), "int32"), hold(T.floormod(item, hidden), "int32")
        total = register("float32", name="total")
        put(total, T.float32(0))
        with T.serial(0, top) as turn:
            expert = load_int(ids, [row, turn])
            weight = lambda k: load(down, [wide(expert), column, k], constant=True)  # noqa: E731
            part = _dot(weight, lambda k: load(made, [row * top + turn, k]), inner, lane)
            put(total, total[0] + part * load(share, [row, turn]))
        with T.If(lane < 1), T.Then():
            store(out, [row, column], total[0])

    _each(env, rows * top * inner, pair)
    _each(env, rows * hidden, result)


def _each(env: Any, count: int, body: Callable[[Any, Any], None]) -> None:
    """A launch: body(item, lane) for every item, a warp each."""
    blocks = min(-(-count // WARPS), env.processors * BLOCKS_PER_PROCESSOR)
    with env.kernel(blocks, WARPS) as at:
        item = register("int32", name="item")
        put(item, at.block * WARPS + at.warp)
        with T.While(item[0] < count):
            body(item[0], at.lane)
            put(item, item[0] + blocks * WARPS)


def _dot(first: Callable[[Any], Any], second: Callable[[Any], Any], length: int, lane: Any) -> Any:
    """Sum of first(k) * second(k), in every lane."""
    total = register("float32", name="total")
    put(total, T.float32(0))
    with T.serial(0, length // 32) as i:
        k = hold(i * 32 + lane, "int32")
        put(total, total[0] + first(k) * second(k))
    if length % 32:
        with T.If(lane < length % 32), T.Then():
            k = hold(lane + length // 32 * 32, "int32")
            put(total, total[0] + first(k) * second(k))
    return hold(T.cuda.warp_sum(total[0]))
