"""A mixture's experts: out[i] = sum over j of share[i, j] * down_e(silu(gate_e(x[i])) * up_e(x[i])) with e = ids[i, j].

Rows are gathered by expert, so the weights of an expert that several rows go to are read once, and those of others not at
all. A list of (row, choice) pairs by expert comes first; then one loop over the activated experts' inner columns; then one
over hidden columns, whose tasks pass over the activated experts in rising order. What a row gets is so summed in an order
that neither threads nor other rows change.
"""

from dataclasses import dataclass, replace

from tvm.tirx.script import builder as T

from . import vector as v
from .linear import PARALLEL_PACKING, DotBlock, as_weight, last_apart
from .packed import Part
from .sizes import experts_tile, rows_on_stack


@dataclass(frozen=True)
class ExpertsScratch:
    """Workspace of `emit_experts`; a pair is one choice of one row: row * top + choice."""

    first: object  # int32 [E + 1]: where an expert's pairs begin in `order`
    cursor: object  # int32 [E]
    order: object  # int32 [n * top]: pairs by expert, rising within each
    active: object  # int32 [E + 1]: the activated experts, rising; behind them, at E, their number
    x: object  # float32 [n, row_stride(H)]
    inner: object  # float32 [n * top, row_stride(I)]: by pair
    mixed: object  # float32 [n, H]


def emit_experts(x, ids, share, down, gate, up, out, scratch, *, n, lanes, block=16, down_block=32):
    """x, out: [n, H]; ids: int32 [n, top]; share: [n, top]; down: [E, H, I]; gate, up: [E, I, H], or gate [E, 2 * I, H]
    with the ups behind the gates and `up` None. Floats are float32, float16 or bfloat16; weights are buffers of these or
    `packed.Weight`.

    block, down_block: adjacent inner and hidden columns of a task. Every row counts, whether a sequence's or only filling
    up a batch; a choice outside 0..E-1 adds nothing and reads no weight.
    """
    down, gate, up = (None if weight is None else as_weight(weight, lanes) for weight in (down, gate, up))
    experts, hidden, inner = int(down.buffer.shape[0]), down.rows, down.columns
    top = int(ids.shape[1])
    _emit_lists(ids, scratch, experts, n * top)
    _emit_packing(v.bits_of(x), scratch.x, n, hidden, lanes)
    if inner % lanes:  # vectors reach past the columns; the weights there count as 0, which NaN would not stand
        with T.serial(0, n * top) as pair:
            v.store(scratch.inner, [pair, inner // lanes * lanes], v.splat(0.0, lanes), lanes)
    active = T.bind(T.BufferLoad(scratch.active, [experts]))
    share, out = v.bits_of(share), v.bits_of(out)

    blocks = -(-inner // block)
    gathered = _Gathered(scratch, scratch.x, hidden, n, lanes, weights=2, row_of=lambda pair: T.floordiv(pair, top))
    with T.parallel(0, active * blocks) as task:
        expert = T.bind(T.BufferLoad(scratch.active, [T.floordiv(task, blocks)]))
        index = T.bind(T.floormod(task, blocks))
        sums = _ExpertBlock(gathered, [(gate, 0), (gate, inner) if up is None else (up, 0)], min(block, inner))

        def activate(column, width):
            def emit(pair, at, group, products):
                g, u = products
                v.store(scratch.inner, [pair, column + at], v.silu(g, group) * u, group)

            sums.emit_expert(expert, column, width, emit)

        last_apart(index, inner, block, lambda width: activate(index * block, width))

    blocks = -(-hidden // down_block)
    gathered = _Gathered(scratch, scratch.inner, inner, n, lanes, weights=1, row_of=lambda pair: pair)
    with T.parallel(0, blocks) as index:
        sums = _ExpertBlock(gathered, [(down, 0)], min(down_block, hidden))

        def mix(column, width):
            def each(row, emit):
                v.for_columns(width, lanes, lambda at, group: emit([row, column + at], group))

            with T.serial(0, n) as row:
                each(row, lambda at, group: v.store(scratch.mixed, at, v.splat(0.0, group), group))
            with T.serial(0, active) as place:
                expert = T.bind(T.BufferLoad(scratch.active, [place]))

                def add(pair, at, group, products):
                    where = [T.floordiv(pair, top), column + at]
                    part = v.splat(v.load(share, [T.floordiv(pair, top), T.floormod(pair, top)]), group)
                    v.store(scratch.mixed, where, v.load(scratch.mixed, where, group) + part * products[0], group)

                sums.emit_expert(expert, column, width, add)
            with T.serial(0, n) as row:
                each(row, lambda at, group: v.store(out, at, v.load(scratch.mixed, at, group), group))

        last_apart(index, hidden, down_block, lambda width: mix(index * down_block, width))


def _emit_lists(ids, scratch, experts, pairs):
    """Pairs sorted by expert, and which experts there are: a counting sort."""
    first, cursor, order, active = scratch.first, scratch.cursor, scratch.order, scratch.active
    ids = T.decl_buffer((pairs,), "int32", data=ids.data, elem_offset=ids.elem_offset)
    count = v.registers(1, "int32")

    def each_pair(body):
        with T.serial(0, pairs) as pair:
            expert = T.bind(T.BufferLoad(ids, [pair]))
            with T.If(T.And(expert >= 0, expert < experts)), T.Then():
                body(pair, expert)

    def add_one(buffer, at):
        T.buffer_store(buffer, T.BufferLoad(buffer, at) + 1, at)

    with T.serial(0, experts + 1) as expert:
        T.buffer_store(first, T.int32(0), [expert])
    each_pair(lambda _, expert: add_one(first, [expert + 1]))
    T.buffer_store(count, T.int32(0), [0])
    with T.serial(0, experts) as expert:
        with T.If(T.BufferLoad(first, [expert + 1]) > 0), T.Then():
            T.buffer_store(active, expert, [T.BufferLoad(count, [0])])
            add_one(count, [0])
        begin = T.bind(T.BufferLoad(first, [expert]))
        T.buffer_store(cursor, begin, [expert])
        T.buffer_store(first, T.BufferLoad(first, [expert + 1]) + begin, [expert + 1])
    T.buffer_store(active, T.BufferLoad(count, [0]), [experts])

    def put(pair, expert):
        T.buffer_store(order, pair, [T.BufferLoad(cursor, [expert])])
        add_one(cursor, [expert])

    each_pair(put)


def _emit_packing(x, packed, n, k, lanes):
    """The rows of x as fp32, zero up to the next whole vector."""
    loop = T.parallel if n * k >= PARALLEL_PACKING else T.serial
    with loop(0, n) as row:
        v.load_row(x, [row, 0], k, lanes, lambda i, vector: v.store(packed, [row, i * lanes], vector, lanes))


class _Gathered:
    """Rows of `packed` in the order of an expert's list: what `Activations` is to products of all rows.

    The last row stands in for rows that a tile has and the expert has not.
    """

    def __init__(self, scratch, packed, k, n, lanes, *, weights, row_of):
        self.scratch, self.packed, self.row_of = scratch, packed, row_of
        self.n, self.k, self.lanes = n, k, lanes
        self.tile = experts_tile(n, weights, lanes)
        self.rows = self.tile.rows

    def between(self, begin, end):
        """The pairs order[begin:end] are read from now on."""
        self.begin, self.end = begin, end

    def pair(self, index):
        return T.bind(T.BufferLoad(self.scratch.order, [self.begin + index]))

    def readers(self, group, count):
        def reader(member):
            last = self.end - self.begin - 1
            row = T.bind(self.row_of(self.pair(T.min(group * self.rows + member, last))))
            return lambda vector: v.load(self.packed, [row, vector * self.lanes], self.lanes)

        return [reader(member) for member in range(count)]


class _ExpertBlock(DotBlock):
    """A `DotBlock` of one expert's rows, of which the task learns how many there are."""

    def __init__(self, gathered, stacks, widest):
        """stacks: each with the row at which an expert's matrix begins in it."""
        rows, lanes = gathered.rows, gathered.lanes
        # As many rows as there are pairs only if an expert is chosen twice by a row.
        self.together = -(-rows_on_stack(gathered.n, len(stacks) * widest * lanes * 4, rows) // rows) * rows
        sums = v.local_array((len(stacks), self.together, widest), v.vector_type("float32", lanes))
        super().__init__(gathered, [stack for stack, _ in stacks], widest, gathered.tile, sums)
        self.stacks = stacks

    def emit_expert(self, expert, first, width, finish):
        """`finish(pair, column, group, products)` for columns 0..width-1 of all its pairs: matrix rows from `first` on."""
        self.width = width
        self.weights = [Part(stack, expert, start) for stack, start in self.stacks]
        self.wide = False  # the expert's place in the stack is wide where it has to be
        begin = T.bind(T.BufferLoad(self.x.scratch.first, [expert]))
        end = T.bind(T.BufferLoad(self.x.scratch.first, [expert + 1]))
        with T.serial(0, T.floordiv(end - begin + (self.together - 1), self.together)) as part:
            start = T.bind(begin + part * self.together)
            count = T.bind(T.min(end - start, self.together))
            self.x.between(start, start + count)
            self.emit(first, 0, count)
            with T.serial(0, count) as row:
                pair = self.x.pair(row)
                v.for_columns(width, self.lanes, lambda column, group: finish(pair, column, group, self.take(row, column, group)))

    def _emit_rows(self, first, column, tile, count):
        """Whole groups, then a tile that fits the rest: each row's sums are formed alike in all of them."""
        groups = T.bind(T.floordiv(count, tile.rows))
        with T.serial(0, groups) as group:
            self._emit_tile(first, column, group, tile)
        rest = T.bind(count - groups * tile.rows)
        sizes = sorted({size for size in (1, 2, tile.rows - 1) if 0 < size < tile.rows})

        def emit_rest(sizes):
            size, *larger = sizes
            if not larger:
                self._emit_tile(first, column, groups, replace(tile, rows=size))
                return
            with T.If(rest <= size):
                with T.Then():
                    self._emit_tile(first, column, groups, replace(tile, rows=size))
                with T.Else():
                    emit_rest(larger)

        if sizes:
            with T.If(rest > 0), T.Then():
                emit_rest(sizes)
