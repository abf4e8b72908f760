"""Paged decode attention: pieces of a row's context side by side, then their sum."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from tvm.tirx.script import builder as T

from ...ops.cache import EVERYTHING, Sight
from .row_program import for_each
from .values import LOG2_E, LOWEST, do, hold, load, load_int, put, register, store, wide, zeros

WARPS = 4


@dataclass(frozen=True)
class Query:
    """One attention node. shape: [rows, heads, dim], of its queries `q`, which are None where the kernel makes them; `sums`
    [rows, heads, parts, dim] and `stats` [rows, heads, parts, 2] (largest score in units of log2, sum of weights) are fp32
    scratch, where the parts of a row are joined by another launch.

    fresh: how many of a sequence's newest rows the program itself may write; all before them are complete when the kernel
    starts. None: who knows. sight: which rows of its sequence a row sees."""

    shape: tuple[int, int, int]
    q: Any
    keys: Any
    values: Any
    layer: int
    table: Any
    seq: Any
    start: Any
    length: Any
    scale: float
    parts: int
    fresh: int | None = None
    sums: Any = None
    stats: Any = None
    sight: Sight = EVERYTHING

    def span(self, row: Any) -> tuple[Any, Any, Any]:
        """(sequence, first, end) of the cache rows that a row sees. A row of length 0 is idle: its sequence means nothing."""
        sequence, first = register("int32", name="sequence"), register("int32", name="first")
        put(first, T.int32(0))
        end, named = load_int(self.length, [row]), load_int(self.seq, [row])  # both on their way at once
        put(sequence, T.Select(end > 0, named, T.int32(0)))
        with T.If(end > 0), T.Then():
            put(first, T.max(load_int(self.start, [sequence[0]]), T.int32(0)))
        if not self.sight.limited:
            return sequence[0], first[0], end
        own = self._own_end(row, sequence[0], end)
        if self.sight.window:
            put(first, T.max(first[0], own - self.sight.window))
        return sequence[0], first[0], own if self.sight.causal else end

    def _own_end(self, row: Any, sequence: Any, end: Any) -> Any:
        """Behind a row's own place in the cache: before the rows behind it in its block that are of its sequence."""
        own, block = register("int32", name="own"), self.sight.block
        put(own, end)
        if block > 1:
            stop = T.min((T.floordiv(row, block) + 1) * block, T.int32(self.shape[0]))
            with T.serial(0, block - 1) as behind, T.If(row + 1 + behind < stop), T.Then():
                other = hold(row + 1 + behind, "int32")
                mine = T.And(T.EQ(load_int(self.seq, [other]), sequence), load_int(self.length, [other]) > 0)
                put(own, own[0] - T.Cast("int32", mine))
        return own[0]

    def line(self, sequence: Any, token: Any, kv_head: Any) -> Any:
        """int64 index of the cache line of one row of a sequence."""
        return self.line_in(self.block(sequence, token), token, kv_head)

    def block(self, sequence: Any, token: Any) -> Any:
        """The cache's block that one row of a sequence lies in."""
        return load_int(self.table, [sequence, T.floordiv(token, self.keys.block_size)])

    def line_in(self, block: Any, token: Any, kv_head: Any) -> Any:
        """int64 index of the cache line of a row that lies in this block."""
        return self.keys.line(self.layer, block, kv_head, T.floormod(token, self.keys.block_size))


def emit_plain_attention(env: Any, query: Query) -> None:
    """A warp for every (row, query head, part), which takes every `parts`-th cache row. For any dim, dtype and block size."""
    rows, heads, dim = query.shape
    group = heads // query.keys.heads
    each = -(-dim // 32)
    with env.kernel(-(-rows * heads * query.parts // WARPS), WARPS) as at:
        unit = hold(at.block * WARPS + at.warp, "int32")
        with T.If(unit < rows * heads * query.parts), T.Then():
            part = hold(T.floormod(unit, query.parts), "int32")
            head = hold(T.floormod(T.floordiv(unit, query.parts), heads), "int32")
            row = hold(T.floordiv(unit, query.parts * heads), "int32")
            sequence, first, end = query.span(row)
            q, sums = register("float32", each), register("float32", each)
            zeros(q, each)
            zeros(sums, each)

            def columns(body: Callable[[int, Any], None]) -> None:
                """body(register index, column) for the lane's columns."""
                for index in range(each):
                    column = at.lane + 32 * index
                    with T.If(column < dim), T.Then():
                        body(index, column)

            columns(lambda i, d: put(q, load(query.q, [row, head, d]) * T.float32(query.scale * LOG2_E), i))
            largest, total, token = register("float32"), register("float32"), register("int32")
            put(largest, T.float32(LOWEST))
            put(total, T.float32(0))
            put(token, first + part)
            with T.While(token[0] < end):
                line = hold(query.line(sequence, token[0], T.floordiv(head, group)), "int64")
                score = register("float32")
                put(score, T.float32(0))
                columns(lambda i, d: put(score, score[0] + q[i] * load(query.keys.lines, [line, wide(d)])))
                put(score, T.cuda.warp_sum(score[0]))
                top = hold(T.max(largest[0], score[0]))
                shrink, weight = hold(T.exp2(largest[0] - top)), hold(T.exp2(score[0] - top))
                put(largest, top)
                put(total, total[0] * shrink + weight)
                columns(lambda i, d: put(sums, sums[i] * shrink + weight * load(query.values.lines, [line, wide(d)]), i))
                put(token, token[0] + query.parts)
            columns(lambda i, d: store(query.sums, [row, head, part, d], sums[i]))
            with T.If(at.lane < 1), T.Then():
                store(query.stats, [row, head, part, 0], largest[0])
                store(query.stats, [row, head, part, 1], total[0])


def joined(found: Sequence[tuple[Any, Any, Any]]) -> Any:
    """The sum of parts, each (largest score, sum of weights, weighted sum); zero where no part has seen a row."""
    (value,) = joined_columns([(top, weight) for top, weight, _ in found], [[partial] for *_, partial in found])
    return value


def joined_columns(stats: Sequence[Sequence[Any]], sums: Sequence[Sequence[Any]]) -> list[Any]:
    """As `joined`, of some columns of a head. stats: (largest score, sum of weights) of each part, sums: of the columns."""
    largest, total = (register("float32", name=name) for name in ("top", "joined"))
    values = register("float32", len(sums[0]), "value")
    put(largest, T.float32(LOWEST))
    put(total, T.float32(0))
    zeros(values, len(sums[0]))
    for top, _ in stats:
        put(largest, T.max(largest[0], top))
    for (top, weight), columns in zip(stats, sums, strict=True):
        share = hold(T.exp2(top - largest[0]))
        put(total, total[0] + share * weight)
        for index, partial in enumerate(columns):
            put(values, values[index] + share * partial, index)
    inverse = hold(T.Select(T.EQ(total[0], T.float32(0)), T.float32(0), T.float32(1) / total[0]))
    return [hold(values[index] * inverse) for index in range(len(sums[0]))]


def emit_combine(env: Any, query: Query, finish: Callable[[Any, Any, Any, Any], None]) -> None:
    """finish(row, head, column, value) with the sum of all parts; zero where a row sees nothing. A block per row and head."""
    rows, heads, parts, dim = (int(size) for size in query.sums.shape)
    warps = -(-dim // 32)
    with env.kernel(rows * heads, warps) as at:
        row, head = hold(T.floordiv(at.block, heads), "int32"), hold(T.floormod(at.block, heads), "int32")

        def column(d: Any) -> None:
            # All loads first, so that they are in flight together.
            found = [
                (load(query.stats, [row, head, p, 0]), load(query.stats, [row, head, p, 1]), load(query.sums, [row, head, p, d]))
                for p in range(parts)
            ]
            finish(row, head, d, joined(found))

        for_each(dim, at.warp * 32 + at.lane, warps * 32, column)


def of_block(parts: int, part: int, place: Any) -> Any:
    """A float of the same place in the shared memory of another part's block."""
    value, address = register("float32"), register("uint32")
    if parts == 1:
        do(T.ptx["ld.shared.f32"](value[0], place))
    else:
        window = T.cuda.cvta_generic_to_shared(place)
        do(T.ptx.mapa.shared__cluster.u32(address[0], window, T.uint32(part)))
        do(T.ptx["ld.shared::cluster.f32"](value[0], address[0]))
    return value[0]


def some_of_block(parts: int, part: int, place: Any, count: int) -> list[Any]:
    """Two or four floats that lie there and behind; see `of_block`."""
    values, address = register("float32", count), register("uint32")
    targets = [values[i] for i in range(count)]
    if parts == 1:
        do(T.ptx[f"ld.shared.v{count}.f32"](*targets, place))
    else:
        window = T.cuda.cvta_generic_to_shared(place)
        do(T.ptx.mapa.shared__cluster.u32(address[0], window, T.uint32(part)))
        do(T.ptx[f"ld.shared::cluster.v{count}.f32"](*targets, address[0]))
    return targets
