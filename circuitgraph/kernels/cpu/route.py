"""Routing: the best experts of each row, chosen as the op `route` says, in fp32.

Scores are compared as integers in the same order, so that NaN has a place (above all, as torch sorts it), equals are equal, and
what has been taken lies below anything: ids are always different ones and inside the table.
"""

from tvm.tirx.script import builder as T

from ...ops.moe import SMALLEST_SUM
from . import vector as v
from .linear import Projection, emit_linear
from .rows import rows_of

TAKEN = -(2**31)
"""Below the key of every number."""
_SIGN = 0x7FFFFFFF
_LOWEST = -(2**31) + 0x7FFFFF
"""The key of -inf: what experts of groups that are not kept get."""
_BEYOND = 2**31 - 1


def emit_route(x, weight, correction, ids, share, logits, *, n, lanes, attrs, block=16, packed=None):
    """ids: int32 [n, top], best first; share: float32 [n, top].

    x: [n, H]; weight: [E, H], as `emit_linear` takes it; correction: [E] or None; logits: float32 scratch [n, E]. attrs:
    those of the op. packed: the scratch of `emit_linear`.
    """

    def keep(row, column, width, sums):
        v.store(logits, [row, column], sums[0], width)

    emit_linear(x, [Projection((weight,), keep)], n=n, lanes=lanes, block=block, scratch=packed)
    experts, top = int(logits.shape[1]), attrs["top"]
    correction = None if correction is None else v.bits_of(correction)
    with rows_of(n, experts * (top + 4)) as row:
        scores, keys = v.local_array((experts,), "float32"), v.local_array((experts,), "int32")
        _emit_scores(logits, row, scores, experts, lanes, attrs["scoring"])

        def to_keys(column, width):
            value = v.load(scores, [column], width)
            if correction is not None:
                value = value + v.load(correction, [column], width)
            T.buffer_store(keys, _key(value, width), [v.columns(column, width)])

        v.for_columns(experts, lanes, to_keys)
        if attrs["groups"] > 1:
            _drop_groups(keys, experts, attrs["groups"], attrs["kept"], lanes)
        total = v.registers(1, "float32")
        T.buffer_store(total, T.float32(0), [0])
        with T.serial(0, top) as place:
            expert = _take_best(keys, experts, lanes)
            score = T.bind(T.BufferLoad(scores, [expert]))
            T.buffer_store(ids, expert, [row, place])
            T.buffer_store(share, score, [row, place])
            T.buffer_store(total, T.BufferLoad(total, [0]) + score, [0])
        with T.serial(0, top) as place:
            value = T.BufferLoad(share, [row, place])
            if attrs["renormalise"]:
                value = value / (T.BufferLoad(total, [0]) + T.float32(SMALLEST_SUM))
            T.buffer_store(share, value * T.float32(attrs["factor"]), [row, place])


def _emit_scores(logits, row, scores, experts, lanes, scoring):
    if scoring == "sigmoid":
        v.for_columns(
            experts, lanes, lambda c, width: v.store(scores, [c], v.sigmoid(v.load(logits, [row, c], width), width), width)
        )
        return
    largest = _fold(experts, lanes, lambda c, width: v.load(logits, [row, c], width), T.max, v.NEGATIVE_INFINITY)

    def power(c, width):
        v.store(scores, [c], v.exp(v.load(logits, [row, c], width) - v.splat(largest, width), width), width)

    v.for_columns(experts, lanes, power)
    total = _fold(experts, lanes, lambda c, width: v.load(scores, [c], width), lambda a, b: a + b, 0.0)
    v.for_columns(
        experts, lanes, lambda c, width: v.store(scores, [c], v.load(scores, [c], width) / v.splat(total, width), width)
    )


def _drop_groups(keys, experts, groups, kept, lanes):
    """Experts count as -inf outside the `kept` groups whose two best sum highest."""
    size = experts // groups
    of_groups = v.local_array((groups,), "int32")
    best = v.registers(2, "int32")
    with T.serial(0, groups) as group:
        for place in range(2):
            T.buffer_store(best, T.int32(TAKEN), [place])
        with T.serial(0, size) as member:
            key = T.bind(T.BufferLoad(keys, [group * size + member]))
            first, second = (T.bind(T.BufferLoad(best, [place])) for place in range(2))
            T.buffer_store(best, T.max(second, T.min(first, key)), [1])
            T.buffer_store(best, T.max(first, key), [0])
        first, second = (_number(T.BufferLoad(best, [place])) for place in range(2))
        T.buffer_store(of_groups, _key(first + second, 1), [group])
    with T.serial(0, kept):
        _take_best(of_groups, groups, lanes)
    with T.serial(0, experts) as expert:
        left = T.NE(T.BufferLoad(of_groups, [T.floordiv(expert, size)]), T.int32(TAKEN))
        with T.If(left), T.Then():
            T.buffer_store(keys, T.int32(_LOWEST), [expert])


def _take_best(keys, count, lanes):
    """The lowest index among the largest keys, which is marked as taken."""

    def load(c, width):
        return T.BufferLoad(keys, [v.columns(c, width)])

    best = _fold(count, lanes, load, T.max, TAKEN, "int32")

    def index_of(c, width):
        hit = T.EQ(load(c, width), v.splat(best, width))
        return T.Select(hit, v.iota(c, width), v.splat(_BEYOND, width, "int32"))

    index = _fold(count, lanes, index_of, T.min, _BEYOND, "int32")
    T.buffer_store(keys, T.int32(TAKEN), [index])
    return index


def _fold(count, lanes, value, combine, start, dtype="float32"):
    """`value(column, width)` of all columns folded with `combine`, as a scalar."""
    many, one = v.registers(1, dtype, lanes), v.registers(1, dtype)
    T.buffer_store(many, v.splat(start, lanes, dtype), [0])
    T.buffer_store(one, v.splat(start, 1, dtype), [0])

    def take(column, width):
        into = many if width == lanes else one
        T.buffer_store(into, combine(T.BufferLoad(into, [0]), value(column, width)), [0])

    v.for_columns(count, lanes, take)
    return v.hold(combine(v.lane_fold(T.BufferLoad(many, [0]), combine), T.BufferLoad(one, [0])))


def _key(value, width):
    """int32 in the order of the floats, the same for all NaN: above all others."""
    value = v.hold(value)
    bits = v.hold(T.reinterpret(v.vector_type("int32", width), value))
    ordered = T.Select(bits >= v.splat(0, width, "int32"), bits, bits ^ v.splat(_SIGN, width, "int32"))
    return v.hold(T.Select(v.is_nan(value, width), v.splat(_SIGN, width, "int32"), ordered))


def _number(key):
    """The float whose key it is."""
    key = v.hold(key)
    return v.hold(T.reinterpret("float32", T.Select(key >= 0, key, key ^ T.int32(_SIGN))))
