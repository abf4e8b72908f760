"""Paged decode attention with grouped query heads, and the cache write that goes before it."""

import math

from tvm.tirx.script import builder as T

from . import vector as v

# Query heads that share one pass over a tile of the cache.
HEADS_TOGETHER = 4


def emit_attention(
    q,
    k_cache,
    v_cache,
    block_table,
    sequence,
    start,
    length,
    out,
    *,
    n,
    lanes,
    scale=None,
    splits=1,
    scratch=None,
    split_rows=64,
):
    """out[i, h] = softmax(scale * q[i, h] . K) V over rows start[sequence[i]] .. length[i] - 1 of row i's sequence.

    q, out: [n, heads, dim]; k_cache, v_cache: [blocks, kv_heads, block_size, dim]; block_table: int32 [s, max_blocks];
    sequence, length: int32 [n]; start: int32 [s]. Row r of a sequence lies in block block_table[s, r / block_size],
    slot r % block_size; `blocks`, `block_size`, `s` and `max_blocks` may be symbolic. Query head h reads kv head
    h / (heads / kv_heads). A row without visible rows gives zeros and reads neither table nor cache.
    scale: default 1/sqrt(dim). splits: see `attention_splits`; with more than one, `scratch` is a float32 buffer of
    `attention_scratch_floats` elements, and no piece is shorter than `split_rows`.
    """
    heads, dim = int(q.shape[1]), int(q.shape[2])
    kv_heads = int(k_cache.shape[1])
    group = heads // kv_heads
    assert heads == group * kv_heads, f"{heads} query heads over {kv_heads} kv heads"
    scale = 1 / math.sqrt(dim) if scale is None else scale
    q, k_cache, v_cache, out = (v.bits_of(buffer) for buffer in (q, k_cache, v_cache, out))
    if splits > 1:
        stats = T.decl_buffer((n, heads, splits, 2), "float32", data=scratch.data, elem_offset=scratch.elem_offset)
        partial = T.decl_buffer(
            (n, heads, splits, dim),
            "float32",
            data=scratch.data,
            elem_offset=scratch.elem_offset + n * heads * splits * 2,
        )

    with T.parallel(0, n * kv_heads * splits) as task:
        row = T.bind(T.floordiv(task, kv_heads * splits))
        split = T.bind(T.floormod(T.floordiv(task, kv_heads), splits))
        kv_head = T.bind(T.floormod(task, kv_heads))
        bounds = v.registers(2, "int32")
        row_bounds(bounds, sequence, start, length, row)
        first, last = T.BufferLoad(bounds, [0]), T.BufferLoad(bounds, [1])
        if splits > 1:
            piece = T.bind(T.max(T.floordiv(last - first + (splits - 1), splits), T.int32(split_rows)))
            begin = T.bind(first + split * piece)
            end = T.bind(T.min(begin + piece, last))
        else:
            begin, end = T.bind(first), T.bind(last)
        head = _Heads(q, k_cache, v_cache, group, dim, lanes, scale)
        head.reset()
        with T.If(begin < end), T.Then():
            head.run(row, kv_head, block_table, T.bind(T.BufferLoad(sequence, [row])), begin, end)
        for g in range(group):
            query_head = kv_head * group + g
            if splits == 1:
                head.write(g, out, [row, query_head])
            else:
                head.write_partial(g, stats, partial, [row, query_head, split])

    if splits > 1:
        with T.parallel(0, n * heads) as task:
            combine(stats, partial, out, T.floordiv(task, heads), T.floormod(task, heads), splits, dim, lanes)


def row_bounds(bounds, sequence, start, length, row):
    """bounds = [first, last) visible rows; an idle row (length 0) has none, whatever its sequence index says."""
    T.buffer_store(bounds, T.int32(0), [0])
    T.buffer_store(bounds, T.BufferLoad(length, [row]), [1])
    with T.If(T.BufferLoad(length, [row]) > 0), T.Then():
        T.buffer_store(bounds, T.max(T.BufferLoad(start, [T.BufferLoad(sequence, [row])]), T.int32(0)), [0])


class _Heads:
    """Online softmax of the query heads that share one kv head, over tiles of `lanes` cache rows.

    A tile's scores are formed together, so exp works on whole vectors, and a few heads share each load and
    conversion of the cache. Tiles run across block borders: blocks of one row cost no more than any others.
    """

    def __init__(self, q, k_cache, v_cache, group, dim, lanes, scale):
        self.q, self.k_cache, self.v_cache = q, k_cache, v_cache
        self.group, self.dim, self.lanes, self.scale = group, dim, lanes, scale
        self.vectors = -(-dim // lanes)
        self.query = v.local_array((group, self.vectors * lanes), "float32")  # zeros beyond dim
        self.sums = v.local_array((group, dim), "float32")
        self.shares = v.local_array((group, lanes), "float32")
        self.largest = v.local_array((group,), "float32")
        self.total = v.local_array((group, lanes), "float32")  # per lane; added up at the end

    def reset(self):
        for g in range(self.group):
            T.buffer_store(self.largest, T.float32(v.NEGATIVE_INFINITY), [g])
            v.store(self.total, [g, 0], v.splat(0.0, self.lanes), self.lanes)
            self._each_column(lambda d, width, g=g: v.store(self.sums, [g, d], v.splat(0.0, width), width))

    def run(self, row, kv_head, block_table, sequence, begin, end):
        for g in range(self.group):
            v.store(self.query, [g, (self.vectors - 1) * self.lanes], v.splat(0.0, self.lanes), self.lanes)
            self._each_column(lambda d, width, g=g: self._scale_query(row, kv_head, g, d, width))
        tiles = TileAddresses(block_table, sequence, self.k_cache.shape[2], self.lanes, begin, end)
        tiles.advance(begin)
        with T.serial(0, T.floordiv(end - begin + (self.lanes - 1), self.lanes)) as tile:
            first = T.bind(begin + tile * self.lanes)
            at = [(block, kv_head, slot) for block, slot in tiles.current()]
            tiles.advance(first + self.lanes)
            for block, slot in tiles.current():
                self._prefetch([block, kv_head, slot])
            valid = v.iota(first, self.lanes) < v.splat(end, self.lanes)
            for start in range(0, self.group, HEADS_TOGETHER):
                self._absorb_tile(range(start, min(start + HEADS_TOGETHER, self.group)), at, valid)

    def _prefetch(self, at):
        """Blocks lie anywhere in memory, so the hardware does not foresee the next tile."""
        for cache in (self.k_cache, self.v_cache):
            for d in range(0, self.dim, 64 // cache.dtype.itemsize):
                v.prefetch(T.address_of(T.BufferLoad(cache, [*at, d])))

    def _scale_query(self, row, kv_head, g, d, width):
        value = v.load(self.q, [row, kv_head * self.group + g, d], width) * v.splat(self.scale, width)
        v.store(self.query, [g, d], value, width)

    def _each_column(self, body):
        v.for_columns(self.dim, self.lanes, body)

    def _absorb_tile(self, heads, at, valid):
        lanes = self.lanes
        for g, dots in zip(heads, self._dots(heads, at), strict=True):
            scores = v.hold(T.Select(valid, v.lane_sums(dots), v.splat(v.NEGATIVE_INFINITY, lanes)))
            peak = v.lane_fold(scores, T.max)
            with T.If(peak > T.BufferLoad(self.largest, [g])), T.Then():
                self._raise_largest(g, peak)
            shares = v.exp(scores - v.splat(T.BufferLoad(self.largest, [g]), lanes), lanes)
            v.store(self.shares, [g, 0], shares, lanes)
            v.store(self.total, [g, 0], v.load(self.total, [g, 0], lanes) + shares, lanes)

        def add_values(d, width):
            sums = v.registers(len(heads), "float32", width)
            for i, g in enumerate(heads):
                T.buffer_store(sums, v.load(self.sums, [g, d], width), [i])
            for t, (block, kv_head, slot) in enumerate(at):
                value = T.bind(v.load(self.v_cache, [block, kv_head, slot, d], width))
                for i, g in enumerate(heads):
                    share = v.splat(T.BufferLoad(self.shares, [g, t]), width)
                    T.buffer_store(sums, T.BufferLoad(sums, [i]) + value * share, [i])
            for i, g in enumerate(heads):
                v.store(self.sums, [g, d], T.BufferLoad(sums, [i]), width)

        self._each_column(add_values)

    def _raise_largest(self, g, peak):
        """Rescale what was summed so far to a new largest score: rare after the first few tiles."""
        shrink = v.exp(T.BufferLoad(self.largest, [g]) - peak)

        def scale(buffer, d, width):
            v.store(buffer, [g, d], v.load(buffer, [g, d], width) * v.splat(shrink, width), width)

        scale(self.total, 0, self.lanes)
        self._each_column(lambda d, width: scale(self.sums, d, width))
        T.buffer_store(self.largest, peak, [g])

    def _dots(self, heads, at):
        """Per head, per row of the tile, the vector of partial sums of query . K."""
        lanes = self.lanes
        together = rows_together(len(heads), lanes)
        whole = self.dim // lanes
        results = [[] for _ in heads]
        for start in range(0, lanes, together):
            rows = at[start : start + together]
            dots = v.registers(len(heads) * together, "float32", lanes)
            for i in range(len(heads) * together):
                T.buffer_store(dots, v.splat(0.0, lanes), [i])

            def step(vector, load, rows=rows, dots=dots):
                queries = [T.bind(v.load(self.query, [g, vector * lanes], lanes)) for g in heads]
                for t, (block, kv_head, slot) in enumerate(rows):
                    key = T.bind(load(self.k_cache, [block, kv_head, slot, vector * lanes]))
                    for i, query in enumerate(queries):
                        index = i * together + t
                        T.buffer_store(dots, T.BufferLoad(dots, [index]) + key * query, [index])

            if whole:
                with T.serial(0, whole) as vector:
                    step(vector, lambda cache, indices: v.load(cache, indices, lanes))
            if rest := self.dim - whole * lanes:
                step(whole, lambda cache, indices, rest=rest: v.load_rest(cache, indices, rest, lanes))
            for i, result in enumerate(results):
                result += [T.bind(T.BufferLoad(dots, [i * together + t])) for t in range(together)]
        return results

    def write(self, g, out, at):
        """The finished head; zeros where no row was visible."""
        inverse = v.hold(safe_inverse(self._sum_of_total(g)))
        self._each_column(
            lambda d, width: v.store(out, [*at, d], v.load(self.sums, [g, d], width) * v.splat(inverse, width), width)
        )

    def write_partial(self, g, stats, partial, at):
        T.buffer_store(stats, T.BufferLoad(self.largest, [g]), [*at, 0])
        T.buffer_store(stats, self._sum_of_total(g), [*at, 1])
        self._each_column(lambda d, width: v.store(partial, [*at, d], v.load(self.sums, [g, d], width), width))

    def _sum_of_total(self, g):
        return v.hold(v.lane_sum(T.bind(v.load(self.total, [g, 0], self.lanes))))


class TileAddresses:
    """Where the rows of one tile lie: (block, slot) of `lanes` successive rows, computed without divisions.

    Past the end the last row stands in: its score is masked, and nothing unknown is read.
    """

    def __init__(self, block_table, sequence, block_size, lanes, begin, end):
        self.block_table, self.sequence, self.block_size, self.lanes, self.end = block_table, sequence, block_size, lanes, end
        self.blocks = v.registers(lanes, "int64")  # 64-bit: a cache may hold more than 2^31 elements
        self.slots = v.registers(lanes, "int32")
        self.cursor = v.registers(2, "int32")  # place in the table, slot in the block
        T.buffer_store(self.cursor, T.floordiv(begin, block_size), [0])
        T.buffer_store(self.cursor, T.floormod(begin, block_size), [1])

    def advance(self, first):
        """Move on to the rows from `first`, where the cursor stands."""
        for t in range(self.lanes):
            place, slot = (T.bind(T.BufferLoad(self.cursor, [i])) for i in range(2))
            T.buffer_store(self.blocks, T.Cast("int64", T.BufferLoad(self.block_table, [self.sequence, place])), [t])
            T.buffer_store(self.slots, slot, [t])
            more = v.hold(T.Cast("int32", first + (t + 1) < self.end))
            wraps = v.hold(more * T.Cast("int32", slot + 1 >= self.block_size))
            T.buffer_store(self.cursor, place + wraps, [0])
            T.buffer_store(self.cursor, T.Select(T.NE(wraps, 0), T.int32(0), slot + more), [1])

    def current(self):
        return [(T.bind(T.BufferLoad(self.blocks, [t])), T.bind(T.BufferLoad(self.slots, [t]))) for t in range(self.lanes)]


def rows_together(heads, lanes):
    """Cache rows whose dot products with all `heads` fit in the registers: a power of two, at most `lanes`."""
    registers = 24 if lanes == 16 else 12
    together = lanes
    while together > 1 and together * heads > registers:
        together //= 2
    return together


def safe_inverse(total):
    """1 / total, and 0 for 0. NaN passes through."""
    return T.Select(T.EQ(total, T.float32(0)), T.float32(0), T.float32(1) / total)


def combine(stats, partial, out, row, head, splits, dim, lanes):
    """Join the pieces of one head: each is rescaled to the largest score of all."""
    maxima = [T.bind(T.BufferLoad(stats, [row, head, s, 0])) for s in range(splits)]
    largest = maxima[0]
    for value in maxima[1:]:
        largest = v.hold(T.max(largest, value))
    # An empty piece has -inf and total 0; exp(-inf - largest) is 0, but for an empty row it would be NaN.
    empty = T.bind(T.EQ(largest, T.float32(v.NEGATIVE_INFINITY)))
    factors = [v.hold(T.Select(empty, T.float32(0), v.exp(T.Select(empty, T.float32(0), value - largest)))) for value in maxima]
    total = T.float32(0)
    for s, factor in enumerate(factors):
        total = total + T.BufferLoad(stats, [row, head, s, 1]) * factor
    inverse = v.hold(safe_inverse(v.hold(total)))

    def emit(d, width):
        value = v.splat(0.0, width)
        for s, factor in enumerate(factors):
            value = value + v.load(partial, [row, head, s, d], width) * v.splat(factor, width)
        v.store(out, [row, head, d], value * v.splat(inverse, width), width)

    v.for_columns(dim, lanes, emit)


def emit_kv_append(k, value, k_cache, v_cache, slot, *, n, lanes):
    """Write row i's k and value [kv_heads, dim] at slot[i] = block * block_size + offset; -1 writes nothing.

    k, value: [n, kv_heads, dim]; k_cache, v_cache: [blocks, kv_heads, block_size, dim]; slot: int32 [n]. Keys and values
    may differ in dim. Slots at or past the end of the cache write nothing either.
    """
    kv_heads = int(k.shape[1])
    blocks, block_size = k_cache.shape[0], k_cache.shape[2]
    pairs = [(v.bits_of(k), v.bits_of(k_cache)), (v.bits_of(value), v.bits_of(v_cache))]
    with T.serial(0, n) as row:
        target = T.bind(T.BufferLoad(slot, [row]))
        block = T.bind(T.floordiv(target, block_size))
        with T.If(T.And(target >= 0, block < blocks)), T.Then():
            offset = T.bind(target - block * block_size)
            block = T.bind(T.Cast("int64", block))
            with T.serial(0, kv_heads) as head:
                for source, cache in pairs:
                    v.for_columns(
                        int(source.shape[2]),
                        lanes,
                        lambda d, width, source=source, cache=cache: v.store(
                            cache, [block, head, offset, d], v.load(source, [row, head, d], width), width
                        ),
                    )
