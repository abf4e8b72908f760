"""One emitter per row-wise op: the generic fallback for what no fused kernel covers.

Buffers are [n, ...] with compile-time shapes, in float32, float16 or bfloat16 unless a dtype is given; arithmetic is
fp32. Work is split over threads by rows, and only when there is enough of it to pay for a launch.
"""

from contextlib import contextmanager

from tvm.tirx.script import builder as T

from . import vector as v

# A launch costs about as much as this many fp32 operations on one core (2 us).
PARALLEL_ELEMENTS = 16384


@contextmanager
def rows_of(rows, elements):
    """A loop over rows that runs in parallel if the whole op touches many elements."""
    loop = T.parallel if rows > 1 and rows * elements >= PARALLEL_ELEMENTS else T.serial
    with loop(0, rows) as row:
        yield row


def shape_of(buffer):
    return tuple(int(size) for size in buffer.shape)


def _flat(buffer):
    """A buffer as [rows, columns]: the leading axes folded together, the last one kept."""
    shape = shape_of(buffer)
    rows = 1
    for size in shape[:-1]:
        rows *= size
    return _view(buffer, (rows, shape[-1]))


def _view(buffer, shape, strides=None):
    """The same memory with another shape; bfloat16 becomes bits (see vector.bits_of)."""
    dtype = "uint16" if v.dtype_of(buffer) == "bfloat16" else v.dtype_of(buffer)
    return T.decl_buffer(shape, dtype, data=buffer.data, elem_offset=buffer.elem_offset, strides=strides)


def _emit_map(out, inputs, lanes, function):
    """out = function(width, *fp32 inputs), element by element."""
    elements = 1
    for size in shape_of(out):
        elements *= size
    for buffer in inputs:
        assert shape_of(buffer) == shape_of(out), f"{shape_of(buffer)} against {shape_of(out)}"
    out, *inputs = (_flat(buffer) for buffer in (out, *inputs))
    rows, columns = shape_of(out)

    def body(row, column, width):
        values = [v.load(buffer, [row, column], width) for buffer in inputs]
        v.store(out, [row, column], function(width, *values), width)

    with rows_of(rows, columns) as row:
        v.for_columns(columns, lanes, lambda column, width: body(row, column, width))


def emit_add(a, b, out, *, lanes):
    """out = a + b, one shape."""
    _emit_map(out, (a, b), lanes, lambda width, x, y: x + y)


def emit_mul(a, b, out, *, lanes):
    """out = a * b, one shape."""
    _emit_map(out, (a, b), lanes, lambda width, x, y: x * y)


def emit_silu(x, out, *, lanes):
    """out = x * sigmoid(x)."""
    _emit_map(out, (x,), lanes, lambda width, value: v.silu(value, width))


def emit_sigmoid(x, out, *, lanes):
    """out = 1 / (1 + e^-x)."""
    _emit_map(out, (x,), lanes, lambda width, value: v.sigmoid(value, width))


def emit_copy(x, out, *, lanes):
    """out = x in row-major order, converted; shapes may differ (a reshape), the element counts not."""
    elements = 1
    for size in shape_of(out):
        elements *= size
    _emit_map(_view_as(out, (1, elements)), (_view_as(x, (1, elements)),), lanes, lambda width, value: value)


def _view_as(buffer, shape):
    return T.decl_buffer(shape, v.dtype_of(buffer), data=buffer.data, elem_offset=buffer.elem_offset)


def emit_slice(x, out, start, *, lanes):
    """out = x[..., start : start + out.shape[-1]]."""
    x, out = _flat(x), _flat(out)
    rows, columns = shape_of(out)
    with rows_of(rows, columns) as row:
        v.for_columns(
            columns,
            lanes,
            lambda column, width: v.store(out, [row, column], v.load(x, [row, start + column], width), width),
        )


def emit_concat(inputs, out, *, lanes):
    """out = the inputs joined on the last axis."""
    inputs, out = [_flat(buffer) for buffer in inputs], _flat(out)
    rows, columns = shape_of(out)
    assert columns == sum(shape_of(buffer)[1] for buffer in inputs)
    with rows_of(rows, columns) as row:
        start = 0
        for buffer in inputs:

            def copy(column, width, buffer=buffer, start=start):
                v.store(out, [row, start + column], v.load(buffer, [row, column], width), width)

            v.for_columns(shape_of(buffer)[1], lanes, copy)
            start += shape_of(buffer)[1]


def emit_embedding(ids, table, out, *, lanes):
    """out[i] = table[ids[i]]; an id outside the table gives zeros. ids: int32 [n]; table: [V, H]; out: [n, H]."""
    vocabulary, columns = shape_of(table)
    table, out = v.bits_of(table), v.bits_of(out)
    rows = shape_of(out)[0]
    with rows_of(rows, columns) as row:
        index = T.bind(T.BufferLoad(ids, [row]))
        known = T.And(index >= 0, index < vocabulary)
        with T.If(known):
            with T.Then():
                # 64-bit: a table may hold more than 2^31 elements.
                source = T.bind(T.Cast("int64", index))
                v.for_columns(
                    columns,
                    lanes,
                    lambda column, width: v.store(out, [row, column], v.load(table, [source, column], width), width),
                )
            with T.Else():
                v.for_columns(
                    columns,
                    lanes,
                    lambda column, width: v.store(out, [row, column], v.splat(0.0, width), width),
                )


def emit_zero_rows(x, marks, value, out, *, lanes):
    """out[i] = 0 where marks[i] == value, else x[i]. x, out: [n, ...]; marks: int32 [n]. `out` may be `x` itself."""
    rows = shape_of(x)[0]
    x, out = (_fold_after_first(buffer) for buffer in (x, out))
    columns = shape_of(x)[1]
    with rows_of(rows, columns) as row, T.If(T.EQ(T.BufferLoad(marks, [row]), T.int32(value))):
        with T.Then():
            v.for_columns(
                columns,
                lanes,
                lambda column, width: v.store(out, [row, column], v.splat(0.0, width), width),
            )
        with T.Else():
            v.for_columns(
                columns,
                lanes,
                lambda column, width: v.store(out, [row, column], v.load(x, [row, column], width), width),
            )


def _fold_after_first(buffer):
    shape = shape_of(buffer)
    columns = 1
    for size in shape[1:]:
        columns *= size
    return _view(buffer, (shape[0], columns))


def emit_rms_norm(x, weight, out, *, eps, lanes, plus_one=False):
    """out = x / sqrt(mean(x^2) + eps) * weight over the last axis; with plus_one, * (1 + weight).

    x, out: [n, C] or [n, heads, dim] (one norm per head); weight: [last axis]. `out` may be `x` itself.
    """
    x, out, weight = _flat(x), _flat(out), v.bits_of(weight)
    rows, columns = shape_of(x)
    with rows_of(rows, columns) as row:
        squares = v.registers(1, "float32", lanes)
        rest = v.registers(1, "float32")
        T.buffer_store(squares, v.splat(0.0, lanes), [0])
        T.buffer_store(rest, T.float32(0), [0])

        def add_square(column, width):
            into = squares if width == lanes else rest
            value = T.bind(v.load(x, [row, column], width))
            T.buffer_store(into, T.BufferLoad(into, [0]) + value * value, [0])

        v.for_columns(columns, lanes, add_square)
        total = v.lane_sum(T.bind(T.BufferLoad(squares, [0]))) + T.BufferLoad(rest, [0])
        factor = T.bind(T.float32(1) / T.sqrt(total / T.float32(columns) + T.float32(eps)))

        def scale(column, width):
            gain = v.load(weight, [column], width)
            if plus_one:
                gain = gain + v.splat(1.0, width)
            v.store(out, [row, column], v.load(x, [row, column], width) * v.splat(factor, width) * gain, width)

        v.for_columns(columns, lanes, scale)


def emit_rope(x, cos, sin, positions, out, *, lanes, interleaved=False):
    """Rotate the first R dims of every head by its row's position; the others are copied.

    x, out: [n, heads, dim]; cos, sin: float32 [P, R / 2] with P symbolic or not; positions: int32 [n], clamped to
    the table. Half-split pairs dim i with i + R/2; interleaved pairs 2i with 2i + 1. `out` may be `x` itself.
    """
    rows, heads, dim = shape_of(x)
    half = int(cos.shape[1])
    assert 2 * half <= dim, f"rope over {2 * half} dims of a head of {dim}"
    x, out = v.bits_of(x), v.bits_of(out)

    def rotate(row, head, position, i, width, first, second):
        c, s = T.bind(v.load(cos, [position, i], width)), T.bind(v.load(sin, [position, i], width))
        a = T.bind(v.load(x, [row, head, first], width))
        b = T.bind(v.load(x, [row, head, second], width))
        v.store(out, [row, head, first], a * c - b * s, width)
        v.store(out, [row, head, second], b * c + a * s, width)

    with rows_of(rows, heads * dim) as row:
        last = cos.shape[0] - 1
        position = T.bind(T.max(T.min(T.BufferLoad(positions, [row]), last), T.int32(0)))
        with T.serial(0, heads) as head:
            if interleaved:
                with T.serial(0, half) as i:
                    rotate(row, head, position, i, 1, 2 * i, 2 * i + 1)
            else:
                v.for_columns(half, lanes, lambda i, width: rotate(row, head, position, i, width, i, half + i))
            v.for_columns(
                dim - 2 * half,
                lanes,
                lambda d, width: v.store(out, [row, head, d], v.load(x, [row, head, d], width), width),
                start=2 * half,
            )


def emit_shift(x, amount, out):
    """out = x + amount. x, out: int32 [n]; amount: Python int."""
    with T.serial(0, shape_of(out)[0]) as row:
        T.buffer_store(out, T.BufferLoad(x, [row]) + T.int32(amount), [row])


def emit_columns(inputs, out):
    """out[row, j] = inputs[j][row], whatever the dtype. inputs: [n] each; out: [n, inputs]."""
    with T.serial(0, shape_of(out)[0]) as row:
        for column, buffer in enumerate(inputs):
            T.buffer_store(out, T.BufferLoad(buffer, [row]), [row, column])


def emit_own_mask(allowed, offsets, out):
    """Bit c of out = bit c + offsets[c] of allowed, a word a step; offsets that lead out of the mask give 0.

    allowed: int32 [n, words]; offsets: [V]; out: int32 [n, ceil(V / 32)].
    """
    rows, words = shape_of(out)
    with T.parallel(0, rows * words) as task:
        row, word = T.floordiv(task, words), T.floormod(task, words)
        bits = v.registers(1, "uint32")
        T.buffer_store(bits, T.uint32(0), [0])
        with T.serial(0, 32) as bit:
            own = T.bind(word * 32 + bit)
            with T.If(own < shape_of(offsets)[0]), T.Then():
                target = T.bind(own + T.Cast("int32", T.BufferLoad(offsets, [own])))
                with T.If(T.And(target >= 0, target < shape_of(allowed)[1] * 32)), T.Then():
                    source = T.Cast("uint32", T.BufferLoad(allowed, [row, target >> 5]))
                    found = (source >> T.Cast("uint32", target & 31)) & T.uint32(1)
                    T.buffer_store(bits, T.BufferLoad(bits, [0]) | (found << T.Cast("uint32", bit)), [0])
        T.buffer_store(out, T.Cast("int32", T.BufferLoad(bits, [0])), [row, word])


def emit_target_ids(ids, offsets, out):
    """out = ids + offsets[ids], where that is inside the table; other ids stay. ids, out: int32 [n]; offsets: [V]."""
    with T.serial(0, shape_of(ids)[0]) as row:
        index = T.bind(T.BufferLoad(ids, [row]))
        known = T.And(index >= 0, index < shape_of(offsets)[0])
        with T.If(known):
            with T.Then():
                T.buffer_store(out, index + T.Cast("int32", T.BufferLoad(offsets, [index])), [row])
            with T.Else():
                T.buffer_store(out, index, [row])


def emit_scale_rows(x, factor, out, *, lanes):
    """out[i] = x[i] * factor[i, 0]. x, out: [n, C]; factor: [n, 1]."""
    rows, columns = shape_of(out)
    x, factor, out = (v.bits_of(buffer) for buffer in (x, factor, out))
    with rows_of(rows, columns) as row:
        by = T.bind(v.load(factor, [row, 0]))
        v.for_columns(
            columns,
            lanes,
            lambda column, width: v.store(out, [row, column], v.load(x, [row, column], width) * v.splat(by, width), width),
        )
