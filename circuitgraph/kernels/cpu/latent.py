"""Attention over a paged cache of latents: one row is key and value of all heads (DeepSeek-V2, absorbed form).

A task takes a piece of one row's context, tile by tile. A tile's cache rows are read and converted once, into the L1 cache;
then all heads pass over it, some at a time, so that a vector of queries or of sums meets several cache rows while it is in a
register. The sums lie in the workspace, and the pieces are joined at the end.
"""

from tvm.tirx.script import builder as T

from . import vector as v
from .softmax import HEADS_TOGETHER, RunningSoftmax, TileAddresses, combine, piece_of, prefetch_rows, row_bounds


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
        begin, end = piece_of(first, last, split, splits, split_rows)
        tiles = _Tiles((latent, rotated), (q_latent, q_rotated), sums, (row, split), lanes, scale)
        tiles.reset()
        with T.If(begin < end), T.Then():
            tiles.run(block_table, T.bind(T.BufferLoad(sequence, [row])), begin, end)
        tiles.write(stats)
    with T.parallel(0, n * heads) as task:
        combine(stats, sums, out, T.floordiv(task, heads), T.floormod(task, heads), splits, columns, lanes)


class _Tiles(RunningSoftmax):
    """All heads of one row. A tile's cache rows are read and converted once, for all of them."""

    def __init__(self, caches, queries, sums, at, lanes, scale):
        super().__init__(int(queries[0].shape[1]), [int(q.shape[2]) for q in queries], lanes, together=HEADS_TOGETHER)
        self.caches, self.queries, self.sums, self.scale = caches, queries, sums, scale
        self.row, self.split = at
        # Both parts of the tile's rows, each zero up to whole vectors.
        self.tiles = [v.local_array((lanes, -(-int(cache.shape[3]) // lanes) * lanes), "float32") for cache in caches]

    def reset(self):
        with T.serial(0, self.heads) as head:
            self.reset_head(head)

    def write(self, stats):
        with T.serial(0, self.heads) as head:
            self.write_stats(head, stats, [self.row, head, self.split])

    def run(self, block_table, sequence, begin, end):
        addresses = TileAddresses(block_table, sequence, self.caches[0].shape[2], self.lanes, begin, end)
        self.over_tiles(addresses, begin, end)

    def take(self, places):
        """The only place that reads the cache."""
        lanes = self.lanes
        for cache, tile in zip(self.caches, self.tiles, strict=True):
            for t, (block, slot) in enumerate(places):
                put = lambda i, vector, tile=tile, t=t: v.store(tile, [t, i * lanes], vector, lanes)  # noqa: E731
                v.load_row(cache, [block, 0, slot, 0], int(cache.shape[3]), lanes, put)

    def prefetch(self, places):
        for cache in self.caches:
            prefetch_rows((cache,), [(block, 0, slot) for block, slot in places])

    def absorb_all(self, valid):
        whole, rest = divmod(self.heads, HEADS_TOGETHER)
        if whole:
            with T.serial(0, whole) as group:
                self.absorb([group * HEADS_TOGETHER + g for g in range(HEADS_TOGETHER)], valid)
        if rest:
            self.absorb([T.int32(whole * HEADS_TOGETHER + g) for g in range(rest)], valid)

    def query_of(self, part, head, column, rest):
        query, place = self.queries[part], [self.row, head, column]
        return v.load_rest(query, place, rest, self.lanes) if rest else v.load(query, place, self.lanes)

    def key_of(self, part, t, column, rest):
        return v.load(self.tiles[part], [t, column], self.lanes)

    def value_of(self, t, column, width):
        return v.load(self.tiles[0], [t, column], width)

    def sum_at(self, head, column):
        return [self.row, head, self.split, column]
