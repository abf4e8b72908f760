"""Paged decode attention with grouped query heads, and the cache write that goes before it."""

import math

from tvm.tirx.script import builder as T

from . import vector as v


def attention_splits(n, kv_heads, target_tasks=16, most=8):
    """Into how many pieces a row's context is cut, so that few rows still occupy all threads."""
    return max(1, min(most, -(-target_tasks // (n * kv_heads))))


def attention_scratch_floats(n, heads, dim, splits):
    """float32 elements of workspace `emit_attention` needs; none for one split."""
    return 0 if splits == 1 else n * heads * splits * (dim + 2)


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
        _row_bounds(bounds, sequence, start, length, row)
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
            _combine(stats, partial, out, T.floordiv(task, heads), T.floormod(task, heads), splits, dim, lanes)


def _row_bounds(bounds, sequence, start, length, row):
    """bounds = [first, last) visible rows; an idle row (length 0) has none, whatever its sequence index says."""
    T.buffer_store(bounds, T.int32(0), [0])
    T.buffer_store(bounds, T.BufferLoad(length, [row]), [1])
    with T.If(T.BufferLoad(length, [row]) > 0), T.Then():
        T.buffer_store(bounds, T.max(T.BufferLoad(start, [T.BufferLoad(sequence, [row])]), T.int32(0)), [0])


class _Heads:
    """Online softmax of the query heads that share one kv head, over tiles of `lanes` cache rows.

    A tile's scores are formed together, so exp works on whole vectors, and each cache row is converted from L1.
    Tiles run across block borders: a block of one row costs no more than any other.
    """

    def __init__(self, q, k_cache, v_cache, group, dim, lanes, scale):
        self.q, self.k_cache, self.v_cache = q, k_cache, v_cache
        self.group, self.dim, self.lanes, self.scale = group, dim, lanes, scale
        self.query = v.local_array((group, dim), "float32")
        self.sums = v.local_array((group, dim), "float32")
        self.largest = v.local_array((group,), "float32")
        self.total = v.local_array((group,), "float32")

    def reset(self):
        for g in range(self.group):
            T.buffer_store(self.largest, T.float32(v.NEGATIVE_INFINITY), [g])
            T.buffer_store(self.total, T.float32(0), [g])
            self._each_column(lambda d, width, g=g: v.store(self.sums, [g, d], v.splat(0.0, width), width))

    def run(self, row, kv_head, block_table, sequence, begin, end):
        for g in range(self.group):
            self._each_column(lambda d, width, g=g: self._scale_query(row, kv_head, g, d, width))
        block_size = self.k_cache.shape[2]
        lanes = self.lanes
        blocks = v.local_array((lanes,), "int32")
        slots = v.local_array((lanes,), "int32")
        cursor = v.registers(2, "int32")  # block number in the table, slot in the block
        T.buffer_store(cursor, T.floordiv(begin, block_size), [0])
        T.buffer_store(cursor, T.floormod(begin, block_size), [1])
        with T.serial(0, T.floordiv(end - begin + (lanes - 1), lanes)) as tile:
            first = T.bind(begin + tile * lanes)
            for t in range(lanes):
                # Past the end the last row stands in: its score is masked, and nothing unknown is read.
                block, slot = T.bind(T.BufferLoad(cursor, [0])), T.bind(T.BufferLoad(cursor, [1]))
                T.buffer_store(blocks, T.BufferLoad(block_table, [sequence, block]), [t])
                T.buffer_store(slots, slot, [t])
                more = v.hold(T.Cast("int32", first + (t + 1) < end))
                wraps = v.hold(more * T.Cast("int32", slot + 1 >= block_size))
                T.buffer_store(cursor, block + wraps, [0])
                T.buffer_store(cursor, T.Select(T.NE(wraps, 0), T.int32(0), slot + more), [1])
            # 64-bit: a cache may hold more than 2^31 elements.
            row_blocks = [T.bind(T.Cast("int64", T.BufferLoad(blocks, [t]))) for t in range(lanes)]
            row_slots = [T.bind(T.BufferLoad(slots, [t])) for t in range(lanes)]
            valid = v.iota(first, lanes) < v.splat(end, lanes)
            at = [(row_blocks[t], kv_head, row_slots[t]) for t in range(lanes)]
            for g in range(self.group):
                self._absorb_tile(g, at, valid)

    def _scale_query(self, row, kv_head, g, d, width):
        value = v.load(self.q, [row, kv_head * self.group + g, d], width) * v.splat(self.scale, width)
        v.store(self.query, [g, d], value, width)

    def _each_column(self, body):
        v.for_columns(self.dim, self.lanes, body)

    def _absorb_tile(self, g, at, valid):
        lanes = self.lanes
        scores = v.hold(T.Select(valid, self._scores(g, at), v.splat(v.NEGATIVE_INFINITY, lanes)))
        old = T.bind(T.BufferLoad(self.largest, [g]))
        new = v.hold(T.max(old, v.lane_fold(scores, T.max)))
        # A tile has a valid row, so `new` is finite unless scores are not; exp(-inf - finite) is zero.
        weights = v.exp(scores - v.splat(new, lanes), lanes)
        shrink = v.exp(old - new)
        T.buffer_store(self.largest, new, [g])
        T.buffer_store(self.total, T.BufferLoad(self.total, [g]) * shrink + v.lane_sum(weights), [g])
        shares = [v.hold(v.lane(weights, t)) for t in range(lanes)]

        def add_values(d, width):
            total = v.load(self.sums, [g, d], width) * v.splat(shrink, width)
            for share, (block, kv_head, slot) in zip(shares, at, strict=True):
                total = total + v.load(self.v_cache, [block, kv_head, slot, d], width) * v.splat(share, width)
            v.store(self.sums, [g, d], total, width)

        self._each_column(add_values)

    def _scores(self, g, at):
        """query . K of the tile's rows as one vector."""
        lanes = self.lanes
        whole = self.dim // lanes * lanes
        dots = v.registers(lanes, "float32", lanes)
        for t in range(lanes):
            T.buffer_store(dots, v.splat(0.0, lanes), [t])
        with T.serial(0, whole // lanes) as i:
            query = T.bind(v.load(self.query, [g, i * lanes], lanes))
            for t, (block, kv_head, slot) in enumerate(at):
                key = v.load(self.k_cache, [block, kv_head, slot, i * lanes], lanes)
                T.buffer_store(dots, T.BufferLoad(dots, [t]) + key * query, [t])
        scores = v.lane_sums([T.bind(T.BufferLoad(dots, [t])) for t in range(lanes)])
        if whole == self.dim:
            return scores
        tails = v.registers(lanes, "float32")
        for t in range(lanes):
            T.buffer_store(tails, T.float32(0), [t])
        with T.serial(whole, self.dim) as d:
            query = T.bind(v.load(self.query, [g, d]))
            for t, (block, kv_head, slot) in enumerate(at):
                key = v.load(self.k_cache, [block, kv_head, slot, d])
                T.buffer_store(tails, T.BufferLoad(tails, [t]) + key * query, [t])
        return scores + T.Shuffle([T.BufferLoad(tails, [t]) for t in range(lanes)], list(range(lanes)))

    def write(self, g, out, at):
        """The finished head; zeros where no row was visible."""
        total = T.bind(T.BufferLoad(self.total, [g]))
        inverse = v.hold(_safe_inverse(total))
        self._each_column(
            lambda d, width: v.store(out, [*at, d], v.load(self.sums, [g, d], width) * v.splat(inverse, width), width)
        )

    def write_partial(self, g, stats, partial, at):
        T.buffer_store(stats, T.BufferLoad(self.largest, [g]), [*at, 0])
        T.buffer_store(stats, T.BufferLoad(self.total, [g]), [*at, 1])
        self._each_column(lambda d, width: v.store(partial, [*at, d], v.load(self.sums, [g, d], width), width))


def _safe_inverse(total):
    """1 / total, and 0 for 0. NaN passes through."""
    return T.Select(T.EQ(total, T.float32(0)), T.float32(0), T.float32(1) / total)


def _combine(stats, partial, out, row, head, splits, dim, lanes):
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
    inverse = v.hold(_safe_inverse(v.hold(total)))

    def emit(d, width):
        value = v.splat(0.0, width)
        for s, factor in enumerate(factors):
            value = value + v.load(partial, [row, head, s, d], width) * v.splat(factor, width)
        v.store(out, [row, head, d], value * v.splat(inverse, width), width)

    v.for_columns(dim, lanes, emit)


def emit_kv_append(k, value, k_cache, v_cache, slot, *, n, lanes):
    """Write row i's k and value [kv_heads, dim] at slot[i] = block * block_size + offset; -1 writes nothing.

    k, value: [n, kv_heads, dim]; k_cache, v_cache: [blocks, kv_heads, block_size, dim]; slot: int32 [n]. Slots at or
    past the end of the cache write nothing either.
    """
    kv_heads, dim = int(k.shape[1]), int(k.shape[2])
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
                        dim,
                        lanes,
                        lambda d, width, source=source, cache=cache: v.store(
                            cache, [block, head, offset, d], v.load(source, [row, head, d], width), width
                        ),
                    )
