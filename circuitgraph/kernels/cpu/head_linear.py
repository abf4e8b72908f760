"""A matrix for each head: rows start..start+size-1 of the head's block W_h of a weight [heads * block, L].

Every weight row is read once for all rows of x. Into heads, W_h x: dot products as of any matrix. Into latent, x W_h: each
weight row is scaled and added up, a few at a time, in sums that stay in the cache.
"""

from tvm.tirx.script import builder as T

from . import vector as v
from .linear import DotBlock, as_weight, for_rows, last_apart
from .sizes import lone_tile, rows_on_stack

WEIGHT_ROWS = 8
"""Weight rows that are added up together: as many vectors of them as registers hold beside the sum."""


def emit_into_heads(x, weight, out, *, n, lanes, start, packed, skip=0, block=16):
    """out[i, h] = W_h x[i, h, skip : skip + L]. x: [n, heads, skip + L or more]; out: [n, heads, size].

    weight: [heads * rows, L], a buffer or a `packed.Weight`, of which a head's rows start..start+size-1 are W_h. packed: a
    float32 buffer of `head_scratch_floats` elements. block: adjacent rows of W_h of a task.
    """
    weight = as_weight(weight, lanes)
    heads, size, k = int(out.shape[1]), int(out.shape[2]), weight.columns
    tile = lone_tile(n, lanes, k)
    activations = _HeadActivations(v.bits_of(x), packed, n, heads, k, lanes, tile.rows, skip)
    out = v.bits_of(out)
    rows, blocks = weight.rows // heads, -(-size // block)
    width_of_blocks = min(block, size)
    together = rows_on_stack(n, width_of_blocks * lanes * 4, tile.rows)
    with T.parallel(0, heads * blocks) as task:
        head, index = T.bind(T.floordiv(task, blocks)), T.bind(T.floormod(task, blocks))
        partial = v.local_array((1, together, width_of_blocks), v.vector_type("float32", lanes))
        activations.head = head

        def emit_block(width):
            def emit_some(first_row, count):
                sums = DotBlock(activations, [weight], width, tile, partial)
                sums.emit(head * rows + (start + index * block), first_row, count)

                def write(row, column, group):
                    (value,) = sums.take(row, column, group)
                    v.store(out, [first_row + row, head, index * block + column], value, group)

                with T.serial(0, count) as row:
                    v.for_columns(width, lanes, lambda column, group: write(row, column, group))

            for_rows(n, together, emit_some)

        last_apart(index, size, block, emit_block)


class _HeadActivations:
    """`linear.Activations` of x [n, heads, skip + K], head by head; `head` says whose rows are read."""

    def __init__(self, x, packed, n, heads, k, lanes, rows, skip):
        self.n, self.k, self.lanes, self.rows = n, k, lanes, min(rows, n)
        vectors = -(-k // lanes)
        shape = (-(-n // self.rows), heads, vectors, self.rows, lanes)
        self.packed = T.decl_buffer(shape, "float32", data=packed.data, elem_offset=packed.elem_offset)
        with T.parallel(0, n * heads) as task:
            row, head = T.bind(T.floordiv(task, heads)), T.bind(T.floormod(task, heads))
            group, member = T.floordiv(row, self.rows), T.floormod(row, self.rows)
            put = lambda i, vector: v.store(self.packed, [group, head, i, member, 0], vector, lanes)  # noqa: E731
            v.load_row(x, [row, head, skip], k, lanes, put)

    def readers(self, group, count):
        def reader(member):
            return lambda vector: v.load(self.packed, [group, self.head, vector, member, 0], self.lanes)

        return [reader(member) for member in range(count)]


def emit_into_latent(x, weight, out, *, n, lanes, start, size, skip=0, columns=512):
    """out[i, h] = x[i, h, skip : skip + size] W_h. x: [n, heads, skip + size or more]; out: [n, heads, L].

    weight: as in `emit_into_heads`. columns: adjacent columns of W_h of a task, a multiple of `lanes`.
    """
    weight = as_weight(weight, lanes)
    heads, latent = int(out.shape[1]), int(out.shape[2])
    x, out = v.bits_of(x), v.bits_of(out)
    rows, blocks = weight.rows // heads, -(-latent // columns)
    widest = -(-min(columns, latent) // lanes) * lanes
    together = rows_on_stack(n, (widest + lanes + size) * 4, 1)
    # 64-bit: a weight may hold more than 2^31 elements.
    wide = weight.rows * latent >= 2**31
    with T.parallel(0, heads * blocks) as task:
        head, index = T.bind(T.floordiv(task, blocks)), T.bind(T.floormod(task, blocks))
        sums = v.local_array((together, widest + lanes), "float32")  # rows are no multiple of 4 KB apart
        factors = v.local_array((together, size), "float32")
        base = head * rows + start
        base = T.bind(T.Cast("int64", base)) if wide else T.bind(base)

        def add(first, number, width, count):
            """Weight rows first..first+number-1 to the sums of `count` rows."""

            def some(column, load):
                values = []
                for d in range(number):
                    row = [base + (first + d)]
                    factor, value = weight.factor(row), load(row)
                    values.append(T.bind(value if factor is None else value * v.splat(factor, lanes)))
                with T.serial(0, count) as row:
                    total = v.load(sums, [row, column], lanes)
                    for d, value in enumerate(values):
                        total = total + value * v.splat(T.BufferLoad(factors, [row, first + d]), lanes)
                    v.store(sums, [row, column], total, lanes)

            whole, rest = divmod(width, lanes)
            if whole:
                with T.serial(0, whole) as i:
                    some(i * lanes, lambda row: weight.load(row, index * columns + i * lanes))
            if rest:
                some(whole * lanes, lambda row: weight.load_rest(row, index * columns + whole * lanes, rest))

        def emit_columns(width):
            def emit_some(first_row, count):
                with T.serial(0, count) as row:
                    v.for_columns(widest, lanes, lambda c, group: v.store(sums, [row, c], v.splat(0.0, group), group))
                    v.for_columns(
                        size,
                        lanes,
                        lambda d, group: v.store(factors, [row, d], v.load(x, [first_row + row, head, skip + d], group), group),
                    )
                whole, rest = divmod(size, WEIGHT_ROWS)
                if whole:
                    with T.serial(0, whole) as i:
                        add(i * WEIGHT_ROWS, WEIGHT_ROWS, width, count)
                if rest:
                    add(whole * WEIGHT_ROWS, rest, width, count)
                with T.serial(0, count) as row:
                    v.for_columns(
                        width,
                        lanes,
                        lambda c, group: v.store(
                            out, [first_row + row, head, index * columns + c], v.load(sums, [row, c], group), group
                        ),
                    )

            for_rows(n, together, emit_some)

        last_apart(index, latent, columns, emit_columns)
