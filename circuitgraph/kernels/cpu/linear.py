"""Skinny matrix products: y[n, N] = x[n, K] @ W[N, K]^T for few rows n, each weight streamed from memory once.

A task owns `block` adjacent output columns. For each `tile.columns` weight rows of them it runs over the activation
rows in groups of `tile.rows`; the weight rows come from memory for the first group and from the L1 cache for the
others. A dot product is kept as one vector of partial sums, first in registers, then in a local array: the sums of
a whole vector of columns are then formed together, so the epilogue sees whole vectors of columns whatever the tile.

One weight row at a time is best while memory is the limit: the hardware prefetchers follow one sequential stream
much better than several interleaved ones (27 against 20 GB/s for 49152x576 on a 2-core EPYC Milan).
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from tvm.tirx.script import builder as T

from . import vector as v


@dataclass(frozen=True)
class Projection:
    """Weights of one shape [N, K] whose outputs at the same column meet in one epilogue.

    `epilogue(row, column, width, sums)` emits what happens to output columns column..column+width-1 of one row:
    `sums` has one fp32 vector of `width` lanes per weight. `row` and `column` are int32 expressions; `width` is the
    Python int lanes or 1.
    """

    weights: tuple[Any, ...]
    epilogue: Callable


@dataclass(frozen=True)
class Tile:
    """The inner loop: `columns` weight rows by `rows` activation rows of accumulators, each split in `chains`.

    Chains hide the latency of dependent adds where there are few accumulators. `unroll` counts vectors along K,
    a multiple of chains. `prefetch` is the distance in bytes of the software prefetch, 0 for none.
    """

    columns: int
    rows: int
    unroll: int = 4
    chains: int = 1
    prefetch: int = 4096


def default_tile(n, weights, lanes):
    """The tile that measured best for n rows and `weights` weights per projection."""
    registers = 24 if lanes == 16 else 12
    if n <= 8:
        rows = min(n, max(1, 8 // weights))
        return Tile(columns=1, rows=_even_groups(n, rows), chains=max(1, 4 // (rows * weights)))
    columns = max(1, 2 // weights)
    return Tile(columns=columns, rows=_even_groups(n, registers // (columns * weights)), unroll=2)


def _even_groups(n, limit):
    """The rows of one group, where n rows are cut into as few groups of at most `limit` as possible."""
    groups = -(-n // limit)
    return -(-n // groups)


def emit_linear(x, projections, *, n, lanes, block=16, tile=None):
    """All `projections` of x in one parallel launch.

    x: [n, K] float32/float16/bfloat16; weights: [N, K] of any of these, N may differ between projections.
    """
    k = int(x.shape[1])
    x = v.bits_of(x)
    jobs = []
    first_block = 0
    for projection in projections:
        weights = [v.bits_of(weight) for weight in projection.weights]
        columns = int(weights[0].shape[0])
        for weight in weights:
            assert [int(s) for s in weight.shape] == [columns, k], f"weight {weight.shape}, expected [{columns}, {k}]"
        blocks = -(-columns // block)
        jobs.append((first_block, blocks, columns, weights, projection.epilogue))
        first_block += blocks

    def emit_job(index, task):
        first, blocks, columns, weights, epilogue = jobs[index]
        if index + 1 < len(jobs):
            with T.If(task < first + blocks):
                with T.Then():
                    emit_blocks(task - first, blocks, columns, weights, epilogue)
                with T.Else():
                    emit_job(index + 1, task)
        else:
            emit_blocks(task - first, blocks, columns, weights, epilogue)

    def emit_blocks(index, blocks, columns, weights, epilogue):
        def emit_block(width):
            sums = DotBlock(x, weights, width, n=n, k=k, lanes=lanes, tile=tile)
            sums.emit(index * block)
            with T.serial(0, n) as row:
                v.for_columns(
                    width,
                    lanes,
                    lambda column, group: epilogue(row, index * block + column, group, sums.take(row, column, group)),
                )

        last = columns - (blocks - 1) * block
        if blocks == 1 or last == block:
            emit_block(last)
        else:
            with T.If(index < blocks - 1):
                with T.Then():
                    emit_block(block)
                with T.Else():
                    emit_block(last)

    with T.parallel(0, first_block) as task:
        emit_job(0, task)


class DotBlock:
    """The dot products of all n rows of x with `width` adjacent rows of each weight, inside one task.

    `x` and `weights` are passed through `vector.bits_of` by the caller. `emit(first)` computes columns
    first..first+width-1; `take(row, column, group)` then reads `group` of them (lanes or 1), `column` counted from
    `first`, as one fp32 vector per weight.
    """

    def __init__(self, x, weights, width, *, n, k, lanes, tile=None):
        self.x, self.weights, self.width = x, weights, width
        self.n, self.k, self.lanes = n, k, lanes
        tile = tile or default_tile(n, len(weights), lanes)
        self.tile = replace(tile, rows=min(tile.rows, n))
        self.partial = v.local_array((len(weights), n, width), v.vector_type("float32", lanes))

    def emit(self, first):
        whole, rest = divmod(self.width, self.tile.columns)
        if whole:
            with T.serial(0, whole) as i:
                self._emit_rows(first, i * self.tile.columns, self.tile)
        if rest:
            with T.serial(0, rest) as i:
                self._emit_rows(first, whole * self.tile.columns + i, replace(self.tile, columns=1))

    def take(self, row, column, group):
        return [
            v.lane_sums([T.bind(T.BufferLoad(self.partial, [w, row, column + i])) for i in range(group)])
            for w in range(len(self.weights))
        ]

    def _emit_rows(self, first, column, tile):
        """One tile of columns for all rows, in groups of tile.rows; later groups find the weights in the cache."""
        groups, rest = divmod(self.n, tile.rows)
        cached = replace(tile, prefetch=0)
        self._emit_tile(first, column, 0, tile)
        if groups == 2:
            self._emit_tile(first, column, tile.rows, cached)
        elif groups > 2:
            with T.serial(1, groups) as group:
                self._emit_tile(first, column, group * tile.rows, cached)
        if rest:
            self._emit_tile(first, column, groups * tile.rows, replace(cached, rows=rest))

    def _emit_tile(self, first, column, row, tile):
        whole = self.k // self.lanes * self.lanes
        keys = [
            (w, m, c) for w in range(len(self.weights)) for m in range(tile.rows) for c in range(tile.columns)
        ]
        totals = dict.fromkeys(keys)
        if whole:
            totals = self._accumulate(first + column, row, tile, keys, 0, whole, self.lanes)
        if whole < self.k:
            tails = self._accumulate(first + column, row, tile, keys, whole, self.k, 1)
            for key, tail in tails.items():
                tail = _in_lane_zero(tail, self.lanes)
                totals[key] = totals[key] + tail if whole else tail
        for (w, m, c), total in totals.items():
            T.buffer_store(self.partial, total, [w, row + m, column + c])

    def _accumulate(self, column, row, tile, keys, start, stop, width):
        """Partial sums over K from start to stop in vectors of `width`, for each (weight, row, column) of the tile."""
        steps = (stop - start) // width
        unroll, chains = (tile.unroll, tile.chains) if width > 1 else (1, 1)
        slots = {(key, chain): i for i, (chain, key) in enumerate((h, key) for h in range(chains) for key in keys)}
        accumulators = v.registers(len(slots), "float32", width)
        for slot in slots.values():
            T.buffer_store(accumulators, v.splat(0.0, width), [slot])

        wide = self.k * int(self.weights[0].shape[0]) >= 2**31
        column = T.bind(T.Cast("int64", column)) if wide else column

        def step(position, chain):
            values = {
                (w, c): T.bind(v.load(weight, [column + c, position], width))
                for w, weight in enumerate(self.weights)
                for c in range(tile.columns)
            }
            for m in range(tile.rows):
                activation = T.bind(v.load(self.x, [row + m, position], width))
                for (w, c), value in values.items():
                    slot = slots[(w, m, c), chain]
                    total = T.BufferLoad(accumulators, [slot]) + value * activation
                    T.buffer_store(accumulators, total, [slot])

        rounds = steps // unroll
        if rounds:
            with T.serial(0, rounds) as i:
                if tile.prefetch and width > 1:
                    self._prefetch(column, start + i * (unroll * width), unroll * width, tile)
                for u in range(unroll):
                    step(start + (i * unroll + u) * width, u % chains)
        for u in range(rounds * unroll, steps):
            step(start + u * width, u % chains)
        return {
            key: sum((T.BufferLoad(accumulators, [slots[key, h]]) for h in range(1, chains)),
                     T.BufferLoad(accumulators, [slots[key, 0]]))
            for key in keys
        }

    def _prefetch(self, column, position, elements, tile):
        """Ask for what lies tile.prefetch bytes ahead; the address may lie past the end, so it is never loaded."""
        for weight in self.weights:
            size = weight.dtype.itemsize
            for c in range(tile.columns):
                start = T.Cast("int64", column + c) * (self.k * size) + T.Cast("int64", position) * size
                for offset in range(0, elements * size, 64):
                    at = start + (tile.prefetch + offset)
                    pointer = T.handle_add_byte_offset(weight.data, at)
                    T.evaluate(T.call_intrin("void", "tirx.prefetch", pointer, 0, 3, 1))


def _in_lane_zero(value, lanes):
    zero = T.float32(0)
    return value if lanes == 1 else T.Shuffle([value] + [zero] * (lanes - 1), list(range(lanes)))
