"""Skinny matrix products: y[n, N] = x[n, K] @ W[N, K]^T for few rows n, each weight streamed from memory once.

A task owns `block` adjacent output columns. For each `tile.columns` weight rows of them it runs over the activation
rows in groups of `tile.rows`; the weight rows come from memory for the first group and from the L1 cache for the
others. A dot product is kept as one vector of partial sums, first in registers, then in a local array: the sums of
a whole vector of columns are then formed together, so the epilogue sees whole vectors of columns whatever the tile.

More than one activation row, or any in 16 bits, is first packed as fp32 so that what one step along K needs is
adjacent: rows whose distance is a multiple of 4 KB would otherwise fight for the same few lines of the L1 cache.

One weight row at a time is best while memory is the limit: the hardware prefetchers follow one sequential stream
much better than several interleaved ones (27 against 20 GB/s for 49152x576 on a 2-core EPYC Milan).
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

from tvm.tirx.script import builder as T

from . import vector as v
from .packed import Plain, Weight
from .sizes import default_tile, rows_on_stack

# Elements of x from which packing it pays for a launch of its own.
PARALLEL_PACKING = 65536


@dataclass(frozen=True)
class Projection:
    """Weights of one shape [N, K] (buffers, or `packed.Weight`) whose outputs at the same column meet in one epilogue.

    `epilogue(row, column, width, sums)` emits what happens to output columns column..column+width-1 of one row:
    `sums` has one fp32 vector of `width` lanes per weight. `row` and `column` are int32 expressions; `width` is the
    Python int lanes or 1.
    """

    weights: tuple[Any, ...]
    epilogue: Callable


class Activations:
    """The rows of x as the inner loop reads them: fp32 vectors of `lanes`, zero beyond K, in groups of `rows`.

    Made outside the parallel loop. `scratch`: a float32 buffer of `linear_scratch_floats` elements; without one,
    each call takes memory from the launcher. One fp32 row of whole vectors is read in place.
    """

    def __init__(self, x, *, n, lanes, rows, scratch=None):
        self.n, self.k, self.lanes, self.rows = n, int(x.shape[1]), lanes, min(rows, n)
        self.vectors = -(-self.k // lanes)
        groups = -(-n // self.rows)
        shape = (groups, self.vectors, self.rows, lanes)
        if n == 1 and v.dtype_of(x) == "float32" and self.k % lanes == 0:
            self.packed = T.decl_buffer(shape, "float32", data=x.data, elem_offset=x.elem_offset)
            return
        if scratch is None:
            self.packed = T.alloc_buffer(shape, "float32")
        else:
            self.packed = T.decl_buffer(shape, "float32", data=scratch.data, elem_offset=scratch.elem_offset)
        self._pack(v.bits_of(x))

    def _pack(self, x):
        loop = T.parallel if self.n * self.k >= PARALLEL_PACKING else T.serial
        with loop(0, self.n) as row:
            group, member = T.floordiv(row, self.rows), T.floormod(row, self.rows)
            put = lambda i, vector: v.store(self.packed, [group, i, member, 0], vector, self.lanes)  # noqa: E731
            v.load_row(x, [row, 0], self.k, self.lanes, put)

    def readers(self, group, count):
        """For each of the first `count` rows of a group, what loads one vector of it. Made once per tile."""

        def reader(member):
            return lambda vector: v.load(self.packed, [group, vector, member, 0], self.lanes)

        return [reader(member) for member in range(count)]


def emit_linear(x, projections, *, n, lanes, block=16, tile=None, scratch=None):
    """All `projections` of x in one parallel launch.

    x: [n, K] float32/float16/bfloat16; weights: [N, K] of any of these or quantised, N may differ between projections.
    scratch: see `Activations`. Without `tile`, the default for the projection with the most weights.
    """
    k = int(x.shape[1])
    tile = tile or default_tile(n, max(len(projection.weights) for projection in projections), lanes, k)
    activations = Activations(x, n=n, lanes=lanes, rows=tile.rows, scratch=scratch)
    jobs = []
    first_block = 0
    for projection in projections:
        weights = [as_weight(weight, lanes) for weight in projection.weights]
        columns = weights[0].rows
        for weight in weights:
            assert (weight.rows, weight.columns) == (columns, k), f"weight {weight.buffer.shape}, expected [{columns}, {k}]"
        blocks = -(-columns // block)
        jobs.append((first_block, blocks, columns, weights, projection.epilogue))
        first_block += blocks

    most = max(len(projection.weights) for projection in projections)
    width_of_blocks = min(block, max(columns for _, _, columns, _, _ in jobs))
    together = rows_on_stack(n, most * width_of_blocks * lanes * 4, activations.rows)

    def emit_job(index, task, partial):
        first, blocks, columns, weights, epilogue = jobs[index]
        if index + 1 < len(jobs):
            with T.If(task < first + blocks):
                with T.Then():
                    emit_blocks(task - first, blocks, columns, weights, epilogue, partial)
                with T.Else():
                    emit_job(index + 1, task, partial)
        else:
            emit_blocks(task - first, blocks, columns, weights, epilogue, partial)

    def emit_blocks(index, blocks, columns, weights, epilogue, partial):
        def emit_block(width):
            def emit_some(first_row, count):
                sums = DotBlock(activations, weights, width, tile, partial)
                sums.emit(index * block, first_row, count)
                with T.serial(0, count) as row:
                    v.for_columns(
                        width,
                        lanes,
                        lambda column, group: epilogue(
                            first_row + row, index * block + column, group, sums.take(row, column, group)
                        ),
                    )

            for_rows(n, together, emit_some)

        last_apart(index, columns, block, emit_block)

    with T.parallel(0, first_block) as task:
        emit_job(0, task, v.local_array((most, together, width_of_blocks), v.vector_type("float32", lanes)))


def last_apart(index, extent, block, body):
    """`body(width)` for block `index` of `extent` columns, of which the last may be narrower; `width` is a Python int."""
    blocks = -(-extent // block)
    last = extent - (blocks - 1) * block
    if blocks == 1 or last == block:
        body(last)
        return
    with T.If(index < blocks - 1):
        with T.Then():
            body(block)
        with T.Else():
            body(last)


def for_rows(n, together, body):
    """Emit `body(first row, count)` until all n rows are done, at most `together` at a time; `count` is a Python int."""
    whole, rest = divmod(n, together)
    if whole == 1:
        body(0, together)
    else:
        with T.serial(0, whole) as i:
            body(i * together, together)
    if rest:
        body(whole * together, rest)


class DotBlock:
    """The dot products of some rows of x with `width` adjacent rows of each weight, inside one task.

    The caller passes `weights` as buffers or `packed.Weight`, and as `partial` a local array [weights, rows, width] or
    larger of fp32 vectors. `emit(first, first_row, count)` computes columns first..first+width-1 of `count` rows, of
    which the first begins a group of `activations`; `take(row, column, group)` then reads `group` of them (lanes or 1),
    `column` counted from `first` and `row` from `first_row`, as one fp32 vector per weight.
    """

    def __init__(self, activations, weights, width, tile, partial):
        self.x, self.width, self.partial = activations, width, partial
        self.k, self.lanes = activations.k, activations.lanes
        self.weights = [as_weight(weight, self.lanes) for weight in weights]
        self.tile = replace(tile, rows=activations.rows)
        # 64-bit: a weight may hold more than 2^31 elements.
        self.wide = self.k * self.weights[0].rows >= 2**31

    def emit(self, first, first_row, count):
        self.first_group = first_row // self.tile.rows if isinstance(first_row, int) else T.floordiv(first_row, self.tile.rows)
        whole, rest = divmod(self.width, self.tile.columns)
        if whole:
            with T.serial(0, whole) as i:
                self._emit_rows(first, i * self.tile.columns, self.tile, count)
        if rest:
            with T.serial(0, rest) as i:
                self._emit_rows(first, whole * self.tile.columns + i, replace(self.tile, columns=1), count)

    def take(self, row, column, group):
        return [
            v.lane_sums([T.bind(T.BufferLoad(self.partial, [w, row, column + i])) for i in range(group)])
            for w in range(len(self.weights))
        ]

    def _emit_rows(self, first, column, tile, count):
        """One tile of columns for all rows, in groups of tile.rows; later groups find the weights in the cache."""
        groups, rest = divmod(count, tile.rows)
        cached = replace(tile, prefetch=0)
        if groups:
            self._emit_tile(first, column, 0, tile)
        if groups == 2:
            self._emit_tile(first, column, 1, cached)
        elif groups > 2:
            with T.serial(1, groups) as group:
                self._emit_tile(first, column, group, cached)
        if rest:
            self._emit_tile(first, column, groups, replace(cached, rows=rest))

    def _emit_tile(self, first, column, group, tile):
        """Accumulate along K for every (weight, row, column) of the tile, and keep the partial sums."""
        keys = list(product(range(len(self.weights)), range(tile.rows), range(tile.columns)))
        slots = {key: i for i, key in enumerate(product(range(tile.chains), keys))}
        accumulators = v.registers(len(slots), "float32", self.lanes)
        for slot in slots.values():
            T.buffer_store(accumulators, v.splat(0.0, self.lanes), [slot])
        at = first + column
        at = T.bind(T.Cast("int64", at)) if self.wide else at
        activations = self.x.readers(self.first_group + group, tile.rows)

        def step(vector, chain, load):
            values = {
                (w, c): T.bind(load(weight, [at + c], vector * self.lanes))
                for w, weight in enumerate(self.weights)
                for c in range(tile.columns)
            }
            for m, read in enumerate(activations):
                activation = T.bind(read(vector))
                for (w, c), value in values.items():
                    slot = slots[chain, (w, m, c)]
                    total = T.BufferLoad(accumulators, [slot]) + value * activation
                    T.buffer_store(accumulators, total, [slot])

        whole, rest = divmod(self.k, self.lanes)
        rounds = whole // tile.unroll
        if rounds:
            with T.serial(0, rounds) as i:
                if tile.prefetch:
                    self._prefetch(at, i * (tile.unroll * self.lanes), tile)
                for u in range(tile.unroll):
                    step(i * tile.unroll + u, u % tile.chains, self._load)
        for vector in range(rounds * tile.unroll, whole):
            step(vector, vector % tile.chains, self._load)
        if rest:
            step(whole, 0, lambda weight, row, column: weight.load_rest(row, column, rest))

        factors = {(w, c): weight.factor([at + c]) for w, weight in enumerate(self.weights) for c in range(tile.columns)}
        for w, m, c in keys:
            total = T.BufferLoad(accumulators, [slots[0, (w, m, c)]])
            for chain in range(1, tile.chains):
                total = total + T.BufferLoad(accumulators, [slots[chain, (w, m, c)]])
            if factors[w, c] is not None:
                total = total * v.splat(factors[w, c], self.lanes)
            T.buffer_store(self.partial, total, [w, group * self.tile.rows + m, column + c])

    def _load(self, weight, row, column):
        return weight.load(row, column)

    def _prefetch(self, row, position, tile):
        """Ask for what lies tile.prefetch bytes ahead; the address may lie past the end, so it is never loaded."""
        for weight in self.weights:
            line = self.k * weight.bits // 8
            for c in range(tile.columns):
                start = weight.flat([row + c]) * line + _bytes(T.Cast("int64", position), weight.bits)
                for offset in range(0, tile.unroll * self.lanes * weight.bits // 8, 64):
                    v.prefetch(T.handle_add_byte_offset(weight.buffer.data, start + (tile.prefetch + offset)))


def _bytes(elements, bits):
    return elements >> 1 if bits == 4 else elements * (bits // 8)


def as_weight(weight, lanes):
    """A `packed.Weight` of a float buffer; any other as it is."""
    return weight if isinstance(weight, Weight) else Plain(weight, lanes)
