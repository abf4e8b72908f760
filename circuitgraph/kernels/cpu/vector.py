"""Vector helpers that the CPU emitters are written with: typed loads and stores, column loops, reductions, exp.

Every emitter computes in fp32 vectors of `lanes` elements (see `build.vector_lanes`). Buffers may be float32,
float16 or bfloat16; `load` and `store` convert. The helpers are called inside an open IRBuilder frame.
"""

import math

import tvm
from tvm import tirx
from tvm.tirx.script import builder as T

NEGATIVE_INFINITY = float("-inf")


def vector_type(dtype, width):
    return dtype if width == 1 else f"{dtype}x{width}"


def splat(value, width, dtype="float32"):
    """A scalar (Python number or expression) repeated `width` times."""
    if isinstance(value, int | float):
        value = T.float32(value) if dtype == "float32" else tirx.const(value, dtype)
    return value if width == 1 else T.Broadcast(value, width)


def columns(start, width):
    """The index of `width` adjacent elements from `start`."""
    return start if width == 1 else T.Ramp(start, 1, width)


def iota(start, width):
    """int32 [start, start + 1, ...]."""
    return start if width == 1 else T.Ramp(start, 1, width)


def dtype_of(buffer):
    return str(buffer.dtype)


def bits_of(buffer):
    """A bfloat16 buffer seen as uint16; other buffers as they are.

    LLVM's own bf16 conversions are slow or missing on most CPUs, so bf16 is loaded and stored as bits. Call this
    once per buffer, outside the loops that use it.
    """
    if dtype_of(buffer) != "bfloat16":
        return buffer
    return T.decl_buffer(buffer.shape, "uint16", data=buffer.data, elem_offset=buffer.elem_offset)


def load(buffer, indices, width=1):
    """`width` adjacent elements of the last axis as fp32. A bfloat16 buffer is passed through `bits_of` first."""
    value = T.BufferLoad(buffer, [*indices[:-1], columns(indices[-1], width)])
    if dtype_of(buffer) == "float32":
        return value
    if dtype_of(buffer) == "uint16":
        bits = T.Cast(vector_type("uint32", width), value) << splat(16, width, "uint32")
        return T.reinterpret(vector_type("float32", width), bits)
    return T.Cast(vector_type("float32", width), value)


def load_rest(buffer, indices, count, lanes):
    """The last `count` < lanes elements of a row as fp32, filled up with zeros; reads nothing behind them."""
    values = [load(buffer, [*indices[:-1], indices[-1] + i]) for i in range(count)]
    return T.Shuffle(values + [T.float32(0)] * (lanes - count), list(range(lanes)))


def load_row(buffer, indices, count, lanes, put):
    """`count` elements from `indices` on as fp32 vectors, the last filled up with zeros; put(vector's number, vector)."""
    whole = count // lanes
    if whole:
        with T.serial(0, whole) as i:
            put(i, load(buffer, [*indices[:-1], indices[-1] + i * lanes], lanes))
    if count % lanes:
        put(whole, load_rest(buffer, [*indices[:-1], indices[-1] + whole * lanes], count % lanes, lanes))


def store(buffer, indices, value, width=1):
    """Store fp32 `value` as `width` adjacent elements, rounded to nearest even."""
    if dtype_of(buffer) == "uint16":
        value = _bf16_bits(value, width)
    elif dtype_of(buffer) != "float32":
        value = T.Cast(vector_type(dtype_of(buffer), width), value)
    T.buffer_store(buffer, value, [*indices[:-1], columns(indices[-1], width)])


def _bf16_bits(value, width):
    value = hold(value)
    bits = hold(T.reinterpret(vector_type("uint32", width), value))

    def const(number):
        return splat(number, width, "uint32")

    rounded = (bits + const(0x7FFF) + ((bits >> const(16)) & const(1))) >> const(16)
    quiet_nan = (bits >> const(16)) | const(0x40)
    bits16 = T.Select(is_nan(value, width), quiet_nan, rounded)
    return T.Cast(vector_type("uint16", width), bits16)


def prefetch(pointer):
    """Ask for the cache line at `pointer`, to be read soon; an address outside all memory is harmless."""
    T.evaluate(T.call_intrin("void", "tirx.prefetch", pointer, 0, 3, 1))


def is_nan(value, width=1):
    """Lanes of bool, by the bits: TVM's simplifier folds `x != x` to false. Do not T.bind vectors of bool."""
    bits = T.reinterpret(vector_type("uint32", width), value)
    return (bits & splat(0x7FFFFFFF, width, "uint32")) > splat(0x7F800000, width, "uint32")


def registers(count, dtype, width=1):
    """`count` mutable locals of `width` lanes; with constant indices LLVM keeps them in registers."""
    return T.alloc_buffer((count,), vector_type(dtype, width), scope="local", annotations={"disable_lower_builtin": True})


def local_array(shape, dtype):
    """A small array on the stack of the running task."""
    return T.alloc_buffer(shape, dtype, scope="local", annotations={"disable_lower_builtin": True})


def hold(value):
    """A value kept in a register variable, for those used several times in a chain of such values.

    T.bind is not enough: TVM's analyser looks through the binding of a pure value, and its work then grows
    exponentially with the length of the chain. It does not look through a load.
    """
    width = lanes_of(value)
    register = registers(1, element_type(value), width)
    T.buffer_store(register, value, [0])
    return T.bind(T.BufferLoad(register, [0]))


def for_columns(extent, lanes, body, start=0):
    """Emit `body(column, width)` over columns start..start+extent: whole vectors first, then single elements."""
    whole = extent // lanes
    if whole == 1:
        body(start, lanes)
    elif whole:
        with T.serial(0, whole) as i:
            body(start + i * lanes, lanes)
    rest = extent - whole * lanes
    if rest:
        with T.serial(0, rest) as i:
            body(start + whole * lanes + i, 1)


def pairwise_sum(vector, other=None):
    """Sums of neighbours: [v0+v1, v2+v3, ...], continued by those of `other` if given."""
    parts = [hold(vector)] if other is None else [hold(vector), hold(other)]
    total = sum(lanes_of(part) for part in parts)
    even = T.Shuffle(parts, list(range(0, total, 2)))
    odd = T.Shuffle(parts, list(range(1, total, 2)))
    return even + odd


def lanes_of(vector):
    return tvm.DataType(vector.ty.dtype).lanes


def element_type(vector):
    return str(vector.ty.dtype).partition("x")[0]


def lane_sums(vectors):
    """[sum(v) for v in vectors] as one vector; their number is a power of two, at most the lane count."""
    count = len(vectors)
    assert count & (count - 1) == 0
    assert count <= max(lanes_of(vectors[0]), 1)
    while len(vectors) > 1:
        vectors = [pairwise_sum(a, b) for a, b in zip(vectors[::2], vectors[1::2], strict=True)]
    (result,) = vectors
    while lanes_of(result) > count:
        result = pairwise_sum(result)
    return hold(result)


def lane_sum(vector):
    """Sum of the lanes, as a scalar."""
    return vector if lanes_of(vector) == 1 else lane_sums([vector])


def lane_fold(vector, combine):
    """Fold the lanes of a vector with a commutative `combine` (T.max, T.min), as a scalar."""
    while (width := lanes_of(vector)) > 1:
        vector = hold(vector)
        low = T.Shuffle([vector], list(range(width // 2)))
        high = T.Shuffle([vector], list(range(width // 2, width)))
        vector = combine(low, high)
    return hold(vector)


def lane(vector, index):
    """One lane as a scalar."""
    return vector if lanes_of(vector) == 1 else T.Shuffle([vector], [index])


def exp(value, width=1):
    """exp in fp32 to about 2 ulp, vectorised; T.exp calls libm once per lane.

    x = k ln2 + r with |r| <= ln2/2 and a degree-6 polynomial for e^r (Cephes coefficients). Results under 2^-126
    flush to zero, NaN stays NaN, large x gives inf.
    """

    def const(number):
        return splat(number, width)

    value = hold(value)
    clamped = hold(T.min(T.max(value, const(-104.0)), const(89.0)))
    k = hold(T.floor(clamped * const(math.log2(math.e)) + const(0.5)))
    # ln2 in two parts, the first exact in few bits, so that k*ln2 loses nothing.
    r = hold(clamped - k * const(0.693359375) - k * const(-2.12194440e-4))
    poly = const(1.9875691500e-4)
    for coefficient in (1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1):
        poly = poly * r + const(coefficient)
    poly = poly * (r * r) + r + const(1.0)
    # 2^k as the product of two halves: k reaches 128, whose biased exponent alone would overflow.
    k_int = hold(T.Cast(vector_type("int32", width), k))
    half = hold(k_int >> splat(1, width, "int32"))
    scaled = poly * _power_of_two(half, width) * _power_of_two(k_int - half, width)
    return hold(T.Select(is_nan(value, width), value, scaled))


def _power_of_two(k, width):
    biased = (k + splat(127, width, "int32")) << splat(23, width, "int32")
    return T.reinterpret(vector_type("float32", width), biased)


def sigmoid(value, width=1):
    """1 / (1 + e^-x)."""
    return hold(splat(1.0, width) / (splat(1.0, width) + exp(splat(0.0, width) - value, width)))


def silu(value, width=1):
    """x * sigmoid(x)."""
    value = hold(value)
    return hold(value * sigmoid(value, width))
