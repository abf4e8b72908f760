"""One row of x times weights of four bits: scales go to sums.

One row leaves seven of the eight columns of an `mma` idle. So each block of a step's columns that has a scale of its own gets
a column of x, zero elsewhere, and a lane's sums come out as those of the blocks that it has itself: then the scales are
multiplied with 4 sums a step instead of with 64 numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from tvm.tirx.script import builder as T

from .formats import Format
from .values import do, from_lane, hold, put, register, zeros


def fits(format: Format, rows: int) -> bool:
    """Are so many rows multiplied like this?"""
    return rows == 1 and format.scaled == "numbers"


def owned(format: Format, lane: Any, index: int) -> Any:
    """Is the lane's column of x that of the scale of its own `index`th word of weights? Otherwise its words of x are zeros."""
    column = T.floordiv(lane, 4)
    return T.And(T.EQ(T.floordiv(column, 2), lane % 4), T.EQ(column % 2, index * format.lane_scales // 4))


def multiply(
    format: Format,
    lane: Any,
    sums: Any,
    piece: Sequence[Any],
    scales: Sequence[Any],
    x: Callable[[int], Sequence[Any]],
    whole: Any = None,
) -> None:
    """Add a step to the sums 0 and 2, of the lane's part of both weight rows.

    piece: eight words of weights; scales: the words of both halves' scales; x(index): the four words of x that go with a word,
    zeros where it is not `owned`; whole: a scale over all.
    """
    mma = f"mma.sync.aligned.m16n8k16.row.col.f32.{format.kind}.{format.kind}.f32"
    factors = [format.scale_floats(word, lane) for word in scales]
    step = register("float32", 4, "step")
    zeros(step, 4)
    c = [step[i] for i in range(4)]
    for index in range(4):
        words = x(index)
        upper, lower = (format.unscaled(piece[half * 4 + index]) for half in range(2))
        for pair in (0, 2):
            do(T.ptx[mma](*c, upper[pair], lower[pair], upper[pair + 1], lower[pair + 1], words[pair], words[pair + 1], *c))
    for half in range(2):
        total = sums[half * 2] if whole is None else T.float32(0)
        for number, factor in enumerate(factors[half]):
            total = hold(total + step[half * 2 + number] * factor)
        put(sums, total if whole is None else sums[half * 2] + total * whole, half * 2)


def gather(sums: Any, lane: Any) -> None:
    """The four lanes that share a weight row add up what they have of it."""
    for half in (0, 2):
        for step in (1, 2):
            put(sums, sums[half] + from_lane(sums[half], T.bitwise_xor(lane, step), "float32"), half)
