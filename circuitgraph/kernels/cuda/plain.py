"""Matrix products for every shape and dtype: a warp a weight row, fp32 sums without tensor cores. The last resort."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from tvm.tirx.script import builder as T

from .formats import Scales, number, of_row
from .values import LOWEST, from_lane_beside, hold, load, load_int, put, register, store, wide, zeros

WARPS = 8
NOTHING = 0x7FFFFFFF
"""The id while no logit has been taken in."""

IN_FLIGHT = 8
"""Parts of a top-1 whose loads a lane starts before it merges the first of them."""

ROWS = 8
"""Rows that a warp serves with one reading of its weights."""


@dataclass(frozen=True)
class Pairs:
    """Columns of a result that one thread finishes together: column c of every head of `dim` with c + `apart(c)`. Halves of the
    first `turned` columns are pairs, which are rotated, and so are halves of the rest."""

    dim: int
    turned: int

    @property
    def parts(self) -> tuple[int, ...]:
        """Sizes of both parts of a head that are not empty."""
        return tuple(size for size in (self.turned, self.dim - self.turned) if size)

    def apart(self, column: Any) -> Any:
        """How far the partner of a column of a head lies, of the first half of a part."""
        if len(self.parts) == 1:
            return self.dim // 2
        return T.Select(column < self.turned, T.int32(self.turned // 2), T.int32((self.dim - self.turned) // 2))

    def first(self, tile: Any, width: int) -> Any:
        """The first column of a tile that has `width` pairs."""
        each, turned = self.dim // 2 // width, self.turned // 2 // width
        head, inside = T.floordiv(tile, each), T.floormod(tile, each)
        if len(self.parts) > 1:
            inside = T.Select(inside < turned, inside, inside + turned)
        return head * self.dim + inside * width


@dataclass(frozen=True)
class Projection:
    """Weights whose sums meet in one epilogue: `finish(row, column, sums)` stores the results of one element.

    quantised: what belongs to each weight's values, None for those that are no quantised ones; empty: none is.
    pairs: of one weight, where `finish` gets the sums of a column and of its partner.
    """

    weights: tuple[Any, ...]
    finish: Callable[[Any, Any, list[Any]], None]
    quantised: tuple[Scales | None, ...] = ()
    pairs: Pairs | None = None

    @property
    def scales(self) -> tuple[Scales | None, ...]:
        """`quantised`, one for each weight."""
        return self.quantised or (None,) * len(self.weights)

    @property
    def columns(self) -> int:
        return int(self.weights[0].shape[0])


def chunks_of(rows: int) -> int:
    return -(-rows // ROWS)


def emit_plain(env: Any, x: Any, projections: Sequence[Projection], *, blocks_per_processor: int) -> None:
    """x: [rows, K]; every weight [columns, K]."""
    rows, chunks = env.plan.rows, chunks_of(env.plan.rows)
    total = sum(projection.columns for projection in projections)
    blocks = min(-(-total // WARPS), env.processors * blocks_per_processor)
    with env.kernel(blocks * chunks, WARPS) as at:
        first_row = hold(T.floormod(at.block, chunks) * ROWS, "int32")
        column = register("int32")
        put(column, T.floordiv(at.block, chunks) * WARPS + at.warp)
        with T.While(column[0] < total):
            start = 0
            for projection in projections:
                inside = T.And(column[0] >= start, column[0] < start + projection.columns)
                with T.If(inside), T.Then():
                    local = hold(column[0] - start, "int32")
                    sums = [
                        dot(x, weight, local, first_row, rows, at.lane, scales)
                        for weight, scales in zip(projection.weights, projection.scales, strict=True)
                    ]
                    with T.If(T.And(at.lane < ROWS, first_row + at.lane < rows)), T.Then():
                        projection.finish(first_row + at.lane, local, sums)
                start += projection.columns
            put(column, column[0] + blocks * WARPS)


def dot(x: Any, weight: Any, column: Any, first_row: Any, rows: int, lane: Any, scales: Scales | None = None) -> Any:
    """Lane r gets weight[column] . x[first_row + r]. scales: of a quantised weight."""
    length = int(x.shape[1])
    sums = register("float32", ROWS)
    zeros(sums, ROWS)

    def step(k):
        value = number(weight, scales, column, k) if scales else load(weight, [wide(column), k], constant=True)
        for r in range(ROWS):
            row = T.min(first_row + r, T.int32(rows - 1))
            put(sums, sums[r] + value * load(x, [row, k]), r)

    with T.serial(0, length // 32) as i:
        step(i * 32 + lane)
    if length % 32:
        with T.If(lane < length % 32), T.Then():
            step(lane + length // 32 * 32)
    mine = register("float32")
    put(mine, T.float32(0))
    for r in range(ROWS):
        whole = hold(T.cuda.warp_sum(sums[r]))
        put(mine, T.Select(T.EQ(lane, r), whole, mine[0]))
    factor = of_row(scales, column)
    return mine[0] if factor is None else hold(mine[0] * factor)


@dataclass(frozen=True)
class Partials:
    """Scratch of a top-1: [parts, rows] each of the largest logit, its id, and the sum of exp(logit - largest)."""

    best: Any
    index: Any
    total: Any


@dataclass(frozen=True)
class Logits:
    """What happens to a head's sums: bias [columns], and a mask `allowed` [rows, words] of 32 columns a word. Either may be
    None."""

    bias: Any = None
    allowed: Any = None

    def take(self, state: Best, row: Any, column: Any, total: Any) -> None:
        """One sum into the running best."""
        logit = hold(total if self.bias is None else total + load(self.bias, [column], constant=True))
        if self.allowed is None:
            return state.absorb(logit, column)
        word = load_int(self.allowed, [row, T.shift_right(column, T.int32(5))])
        bit = T.bitwise_and(T.shift_right(word, T.bitwise_and(column, T.int32(31))), T.int32(1))
        with T.If(bit > 0), T.Then():
            state.absorb(logit, column)


class Best:
    """The running best of one row, in a thread's registers. Ids arrive in rising order, or with `merge` in any."""

    def __init__(self) -> None:
        self.best, self.total = register("float32", name="best"), register("float32", name="total")
        self.index = register("int32", name="index")
        put(self.best, T.float32(LOWEST))
        put(self.total, T.float32(0))
        put(self.index, T.int32(NOTHING))

    def absorb(self, logit: Any, index: Any) -> None:
        """Take in one logit. NaN and minus infinity are no choice."""
        with T.If(logit > T.float32(LOWEST)), T.Then():
            self.merge(logit, index, T.float32(1))

    def merge(self, best: Any, index: Any, total: Any) -> None:
        """Take in another running best; the lower id wins a tie."""
        wins = T.Or(best > self.best[0], T.And(T.EQ(best, self.best[0]), index < self.index[0]))
        put(self.index, T.Select(wins, index, self.index[0]))
        largest = hold(T.max(best, self.best[0]))
        put(self.total, self.total[0] * T.exp(self.best[0] - largest) + total * T.exp(best - largest))
        put(self.best, largest)

    def merge_lanes(self, steps: Sequence[int]) -> None:
        """Join with the lanes that lie `steps` apart, one after the other."""
        for step in steps:
            self.merge(*(from_lane_beside(part, step) for part in (self.best, self.index, self.total)))

    def write(self, partials: Partials, part: Any, row: Any) -> None:
        for buffer, value in ((partials.best, self.best), (partials.index, self.index), (partials.total, self.total)):
            store(buffer, [part, row], value[0])


def emit_plain_top1(env: Any, x: Any, head: Projection, logits: Logits, partials: Partials) -> None:
    """The best of every warp's columns; `emit_top1_final` joins them."""
    (weight,), (scales,) = head.weights, head.scales
    rows, chunks, columns = env.plan.rows, chunks_of(env.plan.rows), int(weight.shape[0])
    parts = int(partials.best.shape[0])
    with env.kernel(parts // WARPS * chunks, WARPS) as at:
        first_row = hold(T.floormod(at.block, chunks) * ROWS, "int32")
        part = hold(T.floordiv(at.block, chunks) * WARPS + at.warp, "int32")
        state = Best()
        column = register("int32")
        put(column, part)
        with T.While(column[0] < columns):
            total = dot(x, weight, column[0], first_row, rows, at.lane, scales)
            logits.take(state, T.min(first_row + at.lane, T.int32(rows - 1)), column[0], total)
            put(column, column[0] + parts)
        with T.If(T.And(at.lane < ROWS, first_row + at.lane < rows)), T.Then():
            state.write(partials, part, first_row + at.lane)


def emit_top1_final(env: Any, partials: Partials, token: Any, logprob: Any, offsets: Any = None) -> None:
    """Token and log-probability of every row from the partial results: a block of one warp a row. offsets: what is added to
    each token, or None."""
    parts = int(partials.best.shape[0])
    with env.kernel(env.plan.rows, 1) as at:
        state = Best()

        def fetch(first: int) -> tuple[Any, Any, Any]:
            place = [hold(T.min(at.lane + first, T.int32(parts - 1)), "int32"), at.block]
            return load(partials.best, place), load_int(partials.index, place), load(partials.total, place)

        firsts = range(0, parts, 32)
        for chunk in range(0, len(firsts), IN_FLIGHT):
            for first, (best, index, total) in [(first, fetch(first)) for first in firsts[chunk : chunk + IN_FLIGHT]]:
                if first + 32 > parts:  # no branch: the loads would be moved into it
                    more = at.lane < parts - first
                    best = hold(T.Select(more, best, T.float32(LOWEST)))
                    index = hold(T.Select(more, index, T.int32(NOTHING)), "int32")
                    total = hold(T.Select(more, total, T.float32(0)))
                state.merge(best, index, total)
        state.merge_lanes((16, 8, 4, 2, 1))
        with T.If(at.lane < 1), T.Then():
            # A row without any choice, all NaN, gives token 0: the next step gathers its embedding.
            nothing = T.EQ(state.index[0], T.int32(NOTHING))
            chosen = hold(T.Select(nothing, T.int32(0), state.index[0]), "int32")
            if offsets is not None:
                chosen = hold(chosen + load_int(offsets, [chosen], constant=True), "int32")
            store(token, [at.block], chosen)
            # The best logit's own term is exp(0), so its log-softmax is -log(total).
            score = T.Select(nothing, T.cuda.uint_as_float(T.uint32(0xFF800000)), T.float32(0) - T.log(state.total[0]))
            store(logprob, [at.block], hold(score))
