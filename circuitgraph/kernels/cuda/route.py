"""Which experts a row goes to: a warp chooses for a row, and a block brings together the rows of each expert.

Scores are compared as integers in the order of floats, turned round so that the smallest is the best: one instruction finds
a warp's minimum. A second one finds the lowest expert among equals.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tvm.backend.cuda.lang.alloc_pool import SMEMPool
from tvm.tirx.script import builder as T

from ...ops.moe import SMALLEST_SUM
from .values import do, hold, load, put, register, sigmoid, store

ALL = 0xFFFFFFFF
"""All lanes of a warp; and the key of an expert that is not to be chosen."""
NOBODY = 0x7FFFFFFF


@dataclass(frozen=True)
class Choosing:
    """The attributes of a `route`, and its correction [experts] or None."""

    experts: int
    top: int
    softmax: bool
    renormalise: bool
    factor: float
    groups: int
    kept: int
    correction: Any

    @property
    def words(self) -> int:
        """Of a warp's memory while it chooses: keys, scores, and keys of groups."""
        return 2 * self.experts + (2 * self.groups if self.groups > 1 else 0)


def choosing_of(node: Any, experts: int, correction: Any) -> Choosing:
    attrs = node.attr
    names = ("top", "renormalise", "factor", "groups", "kept")
    return Choosing(
        experts, softmax=attrs["scoring"] == "softmax", correction=correction, **{name: attrs[name] for name in names}
    )


def key_of(value: Any) -> Any:
    """A uint32 that is the smaller the larger the float is; NaN counts as the largest, as torch sorts it."""
    bits = hold(T.cuda.float_as_uint(value), "uint32")
    negative = T.shift_right(bits, T.uint32(31)) > T.uint32(0)
    return hold(T.Select(negative, bits, T.bitwise_xor(bits, T.uint32(0x7FFFFFFF))), "uint32")


def value_of(key: Any) -> Any:
    negative = T.shift_right(key, T.uint32(31)) > T.uint32(0)
    return hold(T.cuda.uint_as_float(hold(T.Select(negative, key, T.bitwise_xor(key, T.uint32(0x7FFFFFFF))), "uint32")))


def popc(word: Any) -> Any:
    count = register("uint32")
    do(T.ptx["popc.b32"](count[0], word))
    return hold(T.Cast("int32", count[0]), "int32")


def least(value: Any) -> Any:
    """The warp's smallest uint32."""
    return hold(T.cuda.reduce_min_sync_u32(T.uint32(ALL), value), "uint32")


class Chooser:
    """Chooses for one row, by one warp with `words` of shared memory from `first` on, given as keys and as scores of the same
    bytes (uint32 and float32)."""

    def __init__(self, choosing: Choosing, keys: Any, scores: Any, first: Any, lane: Any):
        self.choosing, self.lane = choosing, lane
        self.keys, self.scores, self.first = keys, scores, first

    def choose(self, logits: Any, row: Any) -> tuple[Any, Any]:
        """(expert int32, share float32) of the choice that has this lane's number. logits: [rows, experts] float32."""
        c, lane = self.choosing, self.lane
        self._score(logits, row)
        if c.groups > 1:
            self._drop_groups()
        do(T.cuda.warp_sync())
        mine, share, total = register("int32", name="mine"), register("float32", name="share"), register("float32", name="total")
        for target, zero in ((mine, T.int32(0)), (share, T.float32(0)), (total, T.float32(0))):
            put(target, zero)
        with T.serial(0, c.top) as turn:
            expert = self._best(0, c.experts)
            score = hold(self.scores[self.first + c.experts + expert])
            put(total, total[0] + score)
            put(mine, T.Select(T.EQ(lane, turn), expert, mine[0]))
            put(share, T.Select(T.EQ(lane, turn), score, share[0]))
            self._take(expert)
        if c.renormalise:
            put(share, share[0] / (total[0] + T.float32(SMALLEST_SUM)))
        return mine[0], hold(share[0] * T.float32(c.factor))

    def _each(self, count: int, body: Any) -> None:
        """body(place) for the places lane, lane + 32, ... below `count`."""
        if count // 32:
            with T.unroll(0, count // 32) if count <= 512 else T.serial(0, count // 32) as i:
                body(hold(i * 32 + self.lane, "int32"))
        if count % 32:
            with T.If(self.lane < count % 32), T.Then():
                body(hold(self.lane + count // 32 * 32, "int32"))

    def _score(self, logits: Any, row: Any) -> None:
        """Keys of what is chosen by, and scores."""
        c = self.choosing
        place_of = lambda expert: self.first + c.experts + expert  # noqa: E731
        largest, total = register("float32", name="largest"), register("float32", name="total")
        put(largest, T.float32(-3.0e38))
        put(total, T.float32(0))

        def fetch(expert):
            logit = load(logits, [row, expert])
            put(largest, T.max(largest[0], logit))
            T.buffer_store(self.scores, logit, [place_of(expert)])

        self._each(c.experts, fetch)
        if c.softmax:
            put(largest, T.cuda.warp_max(largest[0]))

            def power(expert):
                raised = hold(T.exp(self.scores[place_of(expert)] - largest[0]))
                put(total, total[0] + raised)
                T.buffer_store(self.scores, raised, [place_of(expert)])

            self._each(c.experts, power)
            put(total, T.float32(1) / T.cuda.warp_sum(total[0]))

        def finish(expert):
            value = hold(self.scores[place_of(expert)])
            score = hold(value * total[0]) if c.softmax else sigmoid(value)
            T.buffer_store(self.scores, score, [place_of(expert)])
            choice = score if c.correction is None else hold(score + load(c.correction, [expert], constant=True))
            T.buffer_store(self.keys, key_of(choice), [self.first + expert])

        self._each(c.experts, finish)

    def _drop_groups(self) -> None:
        """Leave the experts of the best groups alone in the choice."""
        c = self.choosing
        size, sums = c.experts // c.groups, 2 * c.experts
        do(T.cuda.warp_sync())

        def add_up(group):
            best, second = register("uint32", name="best"), register("uint32", name="second")
            put(best, T.uint32(ALL))
            put(second, T.uint32(ALL))
            with T.serial(0, size) as i:
                key = hold(self.keys[self.first + group * size + i], "uint32")
                put(second, T.min(second[0], T.max(best[0], key)))
                put(best, T.min(best[0], key))
            key = key_of(hold(value_of(best[0]) + value_of(second[0])))
            T.buffer_store(self.keys, key, [self.first + sums + group])
            T.buffer_store(self.keys, T.uint32(0), [self.first + sums + c.groups + group])

        self._each(c.groups, add_up)
        do(T.cuda.warp_sync())
        with T.serial(0, c.kept):
            group = self._best(sums, c.groups)
            with T.If(self.lane < 1), T.Then():
                T.buffer_store(self.keys, T.uint32(ALL), [self.first + sums + group])
                T.buffer_store(self.keys, T.uint32(1), [self.first + sums + c.groups + group])
            do(T.cuda.warp_sync())

        def drop(expert):
            kept = self.keys[self.first + sums + c.groups + T.floordiv(expert, size)]
            with T.If(T.EQ(kept, T.uint32(0))), T.Then():
                T.buffer_store(self.keys, T.uint32(ALL), [self.first + expert])

        self._each(c.experts, drop)

    def _best(self, start: int, count: int) -> Any:
        """The place of the smallest of `count` keys, the lowest where there are several."""
        best, place = register("uint32", name="best"), register("int32", name="place")
        put(best, T.uint32(ALL))
        put(place, T.int32(NOBODY))

        def look(index):
            key = hold(self.keys[self.first + start + index], "uint32")
            put(place, T.Select(key < best[0], index, place[0]))
            put(best, T.min(best[0], key))

        self._each(count, look)
        own = T.Select(T.EQ(best[0], least(best[0])), T.Cast("uint32", place[0]), T.uint32(NOBODY))
        return hold(T.min(T.Cast("int32", least(hold(own, "uint32"))), T.int32(count - 1)), "int32")

    def _take(self, expert: Any) -> None:
        """Nobody chooses it again."""
        do(T.cuda.warp_sync())
        with T.If(self.lane < 1), T.Then():
            T.buffer_store(self.keys, T.uint32(ALL), [self.first + expert])
        do(T.cuda.warp_sync())


def memory_views(memory: Any, words: int) -> tuple[Any, Any]:
    """Shared memory as uint32 and as float32."""
    return tuple(seen_as(memory, (words,), dtype) for dtype in ("uint32", "float32"))


def seen_as(memory: Any, shape: tuple[int, ...], dtype: str) -> Any:
    """Shared memory of 32-bit words under another shape and type."""
    return T.decl_buffer(shape, dtype, data=memory.data, elem_offset=memory.elem_offset, scope="shared.dyn")


def emit_route(env: Any, choosing: Choosing, logits: Any, ids: Any, share: Any) -> None:
    """A launch of a warp a row. ids, share: [rows, top]."""
    with env.kernel(env.plan.rows, 1) as at:
        pool = SMEMPool()
        memory = pool.alloc((choosing.words,), "uint32", align=16)
        pool.commit()
        keys, scores = memory_views(memory, choosing.words)
        expert, part = Chooser(choosing, keys, scores, 0, at.lane).choose(logits, at.block)
        with T.If(at.lane < choosing.top), T.Then():
            store(ids, [at.block, at.lane], expert)
            store(share, [at.block, at.lane], part)
