"""What attention of any kind does over a paged cache: a running softmax over tiles of rows, where these lie, and its pieces."""

from tvm.tirx.script import builder as T

from ...ops.cache import EVERYTHING
from . import vector as v

HEADS_TOGETHER = 4
"""Query heads that share one pass over a tile of the cache."""


def row_bounds(bounds, sequence, start, length, row, *, n=1, sight=EVERYTHING):
    """bounds = [first, last) visible rows; an idle row (length 0) has none, whatever its sequence index says.

    sight: which rows there are to be seen, of a call of `n` rows; bounds then needs three elements.
    """
    T.buffer_store(bounds, T.int32(0), [0])
    T.buffer_store(bounds, T.BufferLoad(length, [row]), [1])
    with T.If(T.BufferLoad(length, [row]) > 0), T.Then():
        T.buffer_store(bounds, T.max(T.BufferLoad(start, [T.BufferLoad(sequence, [row])]), T.int32(0)), [0])
        if sight.limited:
            _limit(bounds, sequence, length, row, n, sight)


def _limit(bounds, sequence, length, row, n, sight):
    """What a window and causality leave of the bounds of a row that is not idle. bounds[2]: behind the row's own."""
    T.buffer_store(bounds, T.BufferLoad(length, [row]), [2])
    if sight.block > 1:
        stop = T.bind(T.min((T.floordiv(row, sight.block) + 1) * sight.block, T.int32(n)))
        with T.serial(row + 1, stop) as other:
            mine = T.EQ(T.BufferLoad(sequence, [other]), T.BufferLoad(sequence, [row]))
            behind = T.And(mine, T.BufferLoad(length, [other]) > 0)
            T.buffer_store(bounds, T.BufferLoad(bounds, [2]) - T.Cast("int32", behind), [2])
    if sight.window:
        first = T.max(T.BufferLoad(bounds, [0]), T.BufferLoad(bounds, [2]) - sight.window)
        T.buffer_store(bounds, first, [0])
    if sight.causal:
        T.buffer_store(bounds, T.BufferLoad(bounds, [2]), [1])


def piece_of(first, last, split, splits, split_rows):
    """(begin, end) of piece `split` of the visible rows; no piece is shorter than `split_rows`, so the last may be empty."""
    piece = T.bind(T.max(T.floordiv(last - first + (splits - 1), splits), T.int32(split_rows)))
    begin = T.bind(first + split * piece)
    return begin, T.bind(T.min(begin + piece, last))


class RunningSoftmax:
    """Online softmax of some heads of one row, over tiles of `lanes` cache rows.

    A tile's scores are formed together, so exp works on whole vectors, and a few heads share each load and conversion of the
    cache. Tiles run across block borders: blocks of one row cost no more than any others.

    A subclass says where things lie. `take` gets the places of a tile's rows; `query_of` and `key_of` give vectors of the parts
    whose products a score adds up (`parts`: columns of each), or, at a part's end, its last `rest` columns filled up with zeros;
    `value_of` gives those of the values, which are as wide as the first part. The weighted values are summed in `sums`, a head's
    column at `sum_at`. `absorb_all` has the heads absorbed, `prefetch` asks for the next tile.
    """

    scale = None
    """What scores are to be multiplied by; None where the queries are already."""

    def __init__(self, heads, parts, lanes, *, together):
        """together: most heads that one `absorb` is given."""
        self.heads, self.parts, self.lanes = heads, parts, lanes
        self.shares = v.local_array((together, lanes), "float32")
        self.largest = v.local_array((heads,), "float32")
        self.total = v.local_array((heads, lanes), "float32")  # per lane; added up at the end

    def each_column(self, body):
        v.for_columns(self.parts[0], self.lanes, body)

    def reset_head(self, head):
        T.buffer_store(self.largest, T.float32(v.NEGATIVE_INFINITY), [head])
        v.store(self.total, [head, 0], v.splat(0.0, self.lanes), self.lanes)
        self.each_column(lambda c, width: v.store(self.sums, self.sum_at(head, c), v.splat(0.0, width), width))

    def total_of(self, head):
        return v.lane_sum(T.bind(v.load(self.total, [head, 0], self.lanes)))

    def write_stats(self, head, stats, at):
        """What `combine` needs beside the sums."""
        T.buffer_store(stats, T.BufferLoad(self.largest, [head]), [*at, 0])
        T.buffer_store(stats, self.total_of(head), [*at, 1])

    def over_tiles(self, addresses, begin, end):
        lanes = self.lanes
        addresses.advance(begin)
        with T.serial(0, T.floordiv(end - begin + (lanes - 1), lanes)) as tile:
            first = T.bind(begin + tile * lanes)
            self.take(addresses.current())
            addresses.advance(first + lanes)
            self.prefetch(addresses.current())
            self.absorb_all(v.iota(first, lanes) < v.splat(end, lanes))

    def absorb(self, heads, valid):
        """Take the tile's rows into the sums of `heads`."""
        lanes = self.lanes
        for g, (head, dots) in enumerate(zip(heads, self._dots(heads), strict=True)):
            scores = v.lane_sums(dots)
            scores = scores if self.scale is None else scores * v.splat(self.scale, lanes)
            scores = v.hold(T.Select(valid, scores, v.splat(v.NEGATIVE_INFINITY, lanes)))
            peak = v.lane_fold(scores, T.max)
            with T.If(peak > T.BufferLoad(self.largest, [head])), T.Then():
                self._raise_largest(head, peak)
            shares = v.exp(scores - v.splat(T.BufferLoad(self.largest, [head]), lanes), lanes)
            v.store(self.shares, [g, 0], shares, lanes)
            v.store(self.total, [head, 0], v.load(self.total, [head, 0], lanes) + shares, lanes)

        def add_values(c, width):
            sums = v.registers(len(heads), "float32", width)
            for g, head in enumerate(heads):
                T.buffer_store(sums, v.load(self.sums, self.sum_at(head, c), width), [g])
            for t in range(lanes):
                value = T.bind(self.value_of(t, c, width))
                for g in range(len(heads)):
                    share = v.splat(T.BufferLoad(self.shares, [g, t]), width)
                    T.buffer_store(sums, T.BufferLoad(sums, [g]) + value * share, [g])
            for g, head in enumerate(heads):
                v.store(self.sums, self.sum_at(head, c), T.BufferLoad(sums, [g]), width)

        self.each_column(add_values)

    def _raise_largest(self, head, peak):
        """Rescale what was summed so far to a new largest score: rare after the first few tiles."""
        shrink = v.exp(T.BufferLoad(self.largest, [head]) - peak)

        def scale(buffer, at, width):
            v.store(buffer, at, v.load(buffer, at, width) * v.splat(shrink, width), width)

        scale(self.total, [head, 0], self.lanes)
        self.each_column(lambda c, width: scale(self.sums, self.sum_at(head, c), width))
        T.buffer_store(self.largest, peak, [head])

    def _dots(self, heads):
        """Per head, per row of the tile, the vector of partial sums of query . key."""
        lanes = self.lanes
        together = rows_together(len(heads), lanes)
        results = [[] for _ in heads]
        for start in range(0, lanes, together):
            dots = v.registers(len(heads) * together, "float32", lanes)
            for i in range(len(heads) * together):
                T.buffer_store(dots, v.splat(0.0, lanes), [i])

            def step(part, vector, rest, start=start, dots=dots):
                queries = [T.bind(self.query_of(part, head, vector * lanes, rest)) for head in heads]
                for t in range(together):
                    key = T.bind(self.key_of(part, start + t, vector * lanes, rest))
                    for i, query in enumerate(queries):
                        index = i * together + t
                        T.buffer_store(dots, T.BufferLoad(dots, [index]) + key * query, [index])

            for part, columns in enumerate(self.parts):
                whole, rest = divmod(columns, lanes)
                if whole:
                    with T.serial(0, whole) as vector:
                        step(part, vector, 0)
                if rest:
                    step(part, whole, rest)
            for i, result in enumerate(results):
                result += [T.bind(T.BufferLoad(dots, [i * together + t])) for t in range(together)]
        return results


def prefetch_rows(caches, places):
    """Ask for the rows at `places`. Blocks lie anywhere in memory, so the hardware does not foresee the next tile."""
    for place in places:
        for cache in caches:
            for column in range(0, int(cache.shape[3]), 64 // cache.dtype.itemsize):
                v.prefetch(T.address_of(T.BufferLoad(cache, [*place, column])))


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
