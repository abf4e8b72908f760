"""Attention over a paged cache of latents: one row is key and value of all heads (DeepSeek-V2, absorbed form).

A task takes a piece of one row's context, tile by tile. A tile's cache rows are read and converted once, into the L1 cache;
then all heads pass over it, some at a time, so that a vector of queries or of sums meets several cache rows while it is in a
register. The sums lie in the workspace, and the pieces are joined at the end.
"""

from tvm.tirx.script import builder as T

from . import vector as v
from .attention import HEADS_TOGETHER, TileAddresses, combine, row_bounds, rows_together


def emit_latent_attention(
    q_latent,
    q_rotated,
    rotated,
    latent,
    block_table,
    sequence,
    start,
    length,
    out,
    *,
    n,
    lanes,
    scale,
    splits,
    scratch,
    split_rows,
):
    """out[i, h] = softmax(scale * (q_latent[i, h] . c + q_rotated[i, h] . r)) c over the visible cache rows (c, r).

    q_latent, out: [n, heads, L]; q_rotated: [n, heads, R]; rotated: [blocks, 1, block_size, R] and latent: [blocks, 1,
    block_size, L] are the cache. Which rows are visible, and the other arguments: as `attention.emit_attention`. A row
    without visible rows gives zeros. scratch: float32, `attention_scratch_floats` elements.
    """
    heads, columns = int(q_latent.shape[1]), int(q_latent.shape[2])
    q_latent, q_rotated, rotated, latent, out = (v.bits_of(b) for b in (q_latent, q_rotated, rotated, latent, out))

    def part(shape, offset):
        return T.decl_buffer(shape, "float32", data=scratch.data, elem_offset=scratch.elem_offset + offset)

    stats = part((n, heads, splits, 2), 0)
    sums = part((n, heads, splits, columns), n * heads * splits * 2)
    with T.parallel(0, n * splits) as task:
        row, split = T.bind(T.floordiv(task, splits)), T.bind(T.floormod(task, splits))
        bounds = v.registers(2, "int32")
        row_bounds(bounds, sequence, start, length, row)
        first, last = T.BufferLoad(bounds, [0]), T.BufferLoad(bounds, [1])
        piece = T.bind(T.max(T.floordiv(last - first + (splits - 1), splits), T.int32(split_rows)))
        begin = T.bind(first + split * piece)
        end = T.bind(T.min(begin + piece, last))
        tiles = _Tiles((latent, rotated), (q_latent, q_rotated), sums, (row, split), lanes, scale)
        tiles.reset()
        with T.If(begin < end), T.Then():
            tiles.run(block_table, T.bind(T.BufferLoad(sequence, [row])), begin, end)
        tiles.write(stats)
    with T.parallel(0, n * heads) as task:
        combine(stats, sums, out, T.floordiv(task, heads), T.floormod(task, heads), splits, columns, lanes)


class _Tiles:
    """Online softmax of all heads of one row over tiles of `lanes` cache rows."""

    def __init__(self, caches, queries, sums, at, lanes, scale):
        self.caches, self.queries, self.sums, self.lanes, self.scale = caches, queries, sums, lanes, scale
        self.row, self.split = at
        self.heads, self.columns = int(queries[0].shape[1]), int(queries[0].shape[2])
        # Both parts of the tile's rows, each zero up to whole vectors.
        self.tiles = [v.local_array((lanes, -(-int(cache.shape[3]) // lanes) * lanes), "float32") for cache in caches]
        self.shares = v.local_array((HEADS_TOGETHER, lanes), "float32")
        self.largest = v.local_array((self.heads,), "float32")
        self.total = v.local_array((self.heads, lanes), "float32")  # per lane; added up at the end

    def reset(self):
        with T.serial(0, self.heads) as head:
            T.buffer_store(self.largest, T.float32(v.NEGATIVE_INFINITY), [head])
            v.store(self.total, [head, 0], v.splat(0.0, self.lanes), self.lanes)
            self._each_column(lambda c, width: v.store(self.sums, self._sum(head, c), v.splat(0.0, width), width))

    def write(self, stats):
        with T.serial(0, self.heads) as head:
            total = v.lane_sum(T.bind(v.load(self.total, [head, 0], self.lanes)))
            T.buffer_store(stats, T.BufferLoad(self.largest, [head]), [self.row, head, self.split, 0])
            T.buffer_store(stats, total, [self.row, head, self.split, 1])

    def run(self, block_table, sequence, begin, end):
        lanes = self.lanes
        addresses = TileAddresses(block_table, sequence, self.caches[0].shape[2], lanes, begin, end)
        addresses.advance(begin)
        with T.serial(0, T.floordiv(end - begin + (lanes - 1), lanes)) as index:
            first = T.bind(begin + index * lanes)
            self._read_tile(addresses.current())
            addresses.advance(first + lanes)
            self._prefetch(addresses.current())
            valid = v.iota(first, lanes) < v.splat(end, lanes)
            whole, rest = divmod(self.heads, HEADS_TOGETHER)
            if whole:
                with T.serial(0, whole) as group:
                    self._absorb([group * HEADS_TOGETHER + g for g in range(HEADS_TOGETHER)], valid)
            if rest:
                self._absorb([T.int32(whole * HEADS_TOGETHER + g) for g in range(rest)], valid)

    def _read_tile(self, at):
        """The only place that reads the cache."""
        lanes = self.lanes
        for cache, tile in zip(self.caches, self.tiles, strict=True):
            columns = int(cache.shape[3])
            whole = columns // lanes
            for t, (block, slot) in enumerate(at):
                with T.serial(0, whole) as i:
                    v.store(tile, [t, i * lanes], v.load(cache, [block, 0, slot, i * lanes], lanes), lanes)
                if rest := columns - whole * lanes:
                    v.store(tile, [t, whole * lanes], v.load_rest(cache, [block, 0, slot, whole * lanes], rest, lanes), lanes)

    def _prefetch(self, at):
        """Blocks lie anywhere in memory, so the hardware does not foresee the next tile."""
        for cache in self.caches:
            for block, slot in at:
                for c in range(0, int(cache.shape[3]), 64 // cache.dtype.itemsize):
                    v.prefetch(T.address_of(T.BufferLoad(cache, [block, 0, slot, c])))

    def _absorb(self, heads, valid):
        lanes = self.lanes
        for g, (head, dots) in enumerate(zip(heads, self._dots(heads), strict=True)):
            scaled = v.lane_sums(dots) * v.splat(self.scale, lanes)
            scores = v.hold(T.Select(valid, scaled, v.splat(v.NEGATIVE_INFINITY, lanes)))
            peak = v.lane_fold(scores, T.max)
            with T.If(peak > T.BufferLoad(self.largest, [head])), T.Then():
                self._raise_largest(head, peak)
            shares = v.exp(scores - v.splat(T.BufferLoad(self.largest, [head]), lanes), lanes)
            v.store(self.shares, [g, 0], shares, lanes)
            v.store(self.total, [head, 0], v.load(self.total, [head, 0], lanes) + shares, lanes)

        def add_values(c, width):
            sums = v.registers(len(heads), "float32", width)
            for g, head in enumerate(heads):
                T.buffer_store(sums, v.load(self.sums, self._sum(head, c), width), [g])
            for t in range(lanes):
                value = T.bind(v.load(self.tiles[0], [t, c], width))
                for g in range(len(heads)):
                    share = v.splat(T.BufferLoad(self.shares, [g, t]), width)
                    T.buffer_store(sums, T.BufferLoad(sums, [g]) + value * share, [g])
            for g, head in enumerate(heads):
                v.store(self.sums, self._sum(head, c), T.BufferLoad(sums, [g]), width)

        self._each_column(add_values)

    def _raise_largest(self, head, peak):
        """Rescale what was summed so far to a new largest score: rare after the first few tiles."""
        shrink = v.exp(T.BufferLoad(self.largest, [head]) - peak)

        def scale(buffer, at, width):
            v.store(buffer, at, v.load(buffer, at, width) * v.splat(shrink, width), width)

        scale(self.total, [head, 0], self.lanes)
        self._each_column(lambda c, width: scale(self.sums, self._sum(head, c), width))
        T.buffer_store(self.largest, peak, [head])

    def _dots(self, heads):
        """Per head, per row of the tile, the vector of partial sums of both parts of query . key."""
        lanes = self.lanes
        together = rows_together(len(heads), lanes)
        results = [[] for _ in heads]
        for start in range(0, lanes, together):
            dots = v.registers(len(heads) * together, "float32", lanes)
            for i in range(len(heads) * together):
                T.buffer_store(dots, v.splat(0.0, lanes), [i])

            def step(vector, query_of, tile, start=start, dots=dots):
                queries = [T.bind(query_of([self.row, head, vector * lanes])) for head in heads]
                for t in range(together):
                    key = T.bind(v.load(tile, [start + t, vector * lanes], lanes))
                    for i, query in enumerate(queries):
                        index = i * together + t
                        T.buffer_store(dots, T.BufferLoad(dots, [index]) + key * query, [index])

            for query, tile in zip(self.queries, self.tiles, strict=True):
                columns = int(query.shape[2])
                if whole := columns // lanes:
                    with T.serial(0, whole) as vector:
                        step(vector, lambda at, query=query: v.load(query, at, lanes), tile)
                if rest := columns % lanes:
                    step(whole, lambda at, query=query, rest=rest: v.load_rest(query, at, rest, lanes), tile)
            for i, result in enumerate(results):
                result += [T.bind(T.BufferLoad(dots, [i * together + t])) for t in range(together)]
        return results

    def _each_column(self, body):
        v.for_columns(self.columns, self.lanes, body)

    def _sum(self, head, column):
        return [self.row, head, self.split, column]
