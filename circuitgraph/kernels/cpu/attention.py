"""Paged decode attention with grouped query heads, and the cache write that goes before it."""

import math

from tvm.tirx.script import builder as T

from ...ops.cache import EVERYTHING
from . import vector as v
from .softmax import HEADS_TOGETHER, RunningSoftmax, TileAddresses, combine, piece_of, prefetch_rows, row_bounds, safe_inverse


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
    sight=EVERYTHING,
):
    """out[i, h] = softmax(scale * q[i, h] . K) V over the rows of row i's sequence that `sight` leaves of
    start[sequence[i]] .. length[i] - 1.

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
        bounds = v.registers(3 if sight.limited else 2, "int32")
        row_bounds(bounds, sequence, start, length, row, n=n, sight=sight)
        first, last = T.BufferLoad(bounds, [0]), T.BufferLoad(bounds, [1])
        if splits > 1:
            begin, end = piece_of(first, last, split, splits, split_rows)
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


class _Heads(RunningSoftmax):
    """The query heads that share one kv head. Keys and values are read from the cache where they are needed."""

    def __init__(self, q, k_cache, v_cache, group, dim, lanes, scale):
        super().__init__(group, (dim,), lanes, together=min(group, HEADS_TOGETHER))
        self.q, self.k_cache, self.v_cache, self.query_scale = q, k_cache, v_cache, scale
        self.vectors = -(-dim // lanes)
        self.query = v.local_array((group, self.vectors * lanes), "float32")  # zeros beyond dim
        self.sums = v.local_array((group, dim), "float32")

    def reset(self):
        for g in range(self.heads):
            self.reset_head(g)

    def run(self, row, kv_head, block_table, sequence, begin, end):
        for g in range(self.heads):
            v.store(self.query, [g, (self.vectors - 1) * self.lanes], v.splat(0.0, self.lanes), self.lanes)
            self.each_column(lambda d, width, g=g: self._scale_query(row, kv_head, g, d, width))
        self.kv_head = kv_head
        self.over_tiles(TileAddresses(block_table, sequence, self.k_cache.shape[2], self.lanes, begin, end), begin, end)

    def _scale_query(self, row, kv_head, g, d, width):
        value = v.load(self.q, [row, kv_head * self.heads + g, d], width) * v.splat(self.query_scale, width)
        v.store(self.query, [g, d], value, width)

    def take(self, places):
        self.at = [(block, self.kv_head, slot) for block, slot in places]

    def prefetch(self, places):
        prefetch_rows((self.k_cache, self.v_cache), [(block, self.kv_head, slot) for block, slot in places])

    def absorb_all(self, valid):
        for start in range(0, self.heads, HEADS_TOGETHER):
            self.absorb(range(start, min(start + HEADS_TOGETHER, self.heads)), valid)

    def query_of(self, part, g, column, rest):
        return v.load(self.query, [g, column], self.lanes)

    def key_of(self, part, t, column, rest):
        place = [*self.at[t], column]
        return v.load_rest(self.k_cache, place, rest, self.lanes) if rest else v.load(self.k_cache, place, self.lanes)

    def value_of(self, t, column, width):
        return v.load(self.v_cache, [*self.at[t], column], width)

    def sum_at(self, g, column):
        return [g, column]

    def write(self, g, out, at):
        """The finished head; zeros where no row was visible."""
        inverse = v.hold(safe_inverse(self.total_of(g)))
        self.each_column(
            lambda d, width: v.store(out, [*at, d], v.load(self.sums, [g, d], width) * v.splat(inverse, width), width)
        )

    def write_partial(self, g, stats, partial, at):
        self.write_stats(g, stats, at)
        self.each_column(lambda d, width: v.store(partial, [*at, d], v.load(self.sums, [g, d], width), width))


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
