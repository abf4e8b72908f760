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
from .values import do, from_lane, hold, load, put, register, sigmoid, store

ALL = 0xFFFFFFFF
"""All lanes of a warp; and the key of an expert that is not to be chosen."""
NOBODY = 0x7FFFFFFF
CANDIDATES = 32
"""A lane each: more are chosen from one after the other."""
MOST = 1024
"""Experts: a lane keeps 32 in registers, and there are as many groups at most."""


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
    def chosen_alone(self) -> bool:
        """Do the chosen experts' logits alone make their shares, without a softmax over all?"""
        return self.softmax and self.renormalise and self.correction is None and self.groups == 1

    @property
    def words(self) -> int:
        """Of a warp's memory while it chooses: scores, keys where groups are added up, and candidates."""
        return self.experts * (2 if self.groups > 1 else 1) + CANDIDATES * 2


def refuse_route(node: Any, experts: int) -> str | None:
    """Why a warp cannot choose so, or None."""
    if node.attr["top"] > 32 or experts > MOST or node.attr["groups"] > 32:
        return f"at most 32 of {MOST} experts in 32 groups, got {node.attr['top']} of {experts} in {node.attr['groups']}"
    return None


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
    """Chooses for one row, by one warp: a lane has the experts lane, lane + 32, ... in registers. `words` of shared memory from
    `first` on, given as keys and as scores of the same bytes (uint32 and float32), hold what other lanes ask for."""

    def __init__(self, choosing: Choosing, keys: Any, scores: Any, first: Any, lane: Any):
        self.choosing, self.lane, self.first = choosing, lane, first
        self.shared_keys, self.scores = keys, scores
        self.lists = first + (choosing.words - 2 * CANDIDATES)
        self.count = -(-choosing.experts // 32)
        self.keys = register("uint32", self.count, "key")

    def choose(self, logits: Any, row: Any) -> tuple[Any, Any]:
        """(expert int32, share float32) of the choice that has this lane's number. logits: [rows, experts] float32."""
        c, lane = self.choosing, self.lane
        self._score(logits, row)
        if c.groups > 1:
            self._drop_groups()
        do(T.cuda.warp_sync())
        mine, share = self._chosen(), register("float32", name="share")
        put(share, T.float32(0))
        with T.If(lane < c.top), T.Then():
            put(share, self.scores[self.first + mine])
        if c.chosen_alone:
            best = from_lane(share[0], 0, "float32")
            put(share, T.Select(lane < c.top, T.exp(share[0] - best), T.float32(0)))
        if c.renormalise:
            put(share, share[0] / (hold(T.cuda.warp_sum(share[0])) + T.float32(SMALLEST_SUM)))
        return mine, hold(share[0] * T.float32(c.factor))

    def _chosen(self) -> Any:
        """The expert of the choice that has this lane's number. Candidates are ranked side by side; if they are too many, or too
        few, as where keys are alike, one is chosen after the other."""
        top, lane, mine = self.choosing.top, self.lane, register("int32", name="mine")
        put(mine, T.int32(0))
        count, key, expert = self._candidates()
        ranked = hold(T.Cast("int32", T.And(count >= top, count <= CANDIDATES)), "int32", "ranked")
        with T.If(ranked > 0), T.Then():
            rank = self._rank(key, expert)
            with T.If(rank < top), T.Then():
                T.buffer_store(self.shared_keys, T.Cast("uint32", expert), [self.lists + rank])
            do(T.cuda.warp_sync())
            with T.If(lane < top), T.Then():
                put(mine, T.Cast("int32", self.shared_keys[self.lists + lane]))
        with T.If(ranked < 1), T.Then(), T.serial(0, top) as turn:
            best = self._best(self.keys, self.count, self.choosing.experts)
            put(mine, T.Select(T.EQ(lane, turn), best, mine[0]))
            self._drop(self.keys, self.count, best)
        return mine[0]

    def _candidates(self) -> tuple[Any, Any, Any]:
        """How many experts are as good as the best of the lane that `top` - 1 lanes are before; and one of them for each lane, as
        (key, expert), if they are no more than lanes."""
        lane, count = self.lane, register("int32", name="candidates")
        best = hold(_tree(T.min, [self.keys[index] for index in range(self.count)]), "uint32")
        bound = least(hold(T.Select(T.EQ(self._rank(best), self.choosing.top - 1), best, T.uint32(ALL)), "uint32"))
        put(count, T.int32(0))
        for index in range(self.count):
            is_one = hold(T.Cast("int32", T.And(self.keys[index] < T.uint32(ALL), self.keys[index] <= bound)), "int32")
            those = hold(T.cuda.ballot_sync(T.uint32(ALL), is_one), "uint32")
            before = T.bitwise_and(those, T.shift_left(T.uint32(1), T.Cast("uint32", lane)) - T.uint32(1))
            place = hold(count[0] + popc(hold(before, "uint32")), "int32")
            with T.If(T.And(is_one > 0, place < CANDIDATES)), T.Then():
                T.buffer_store(self.shared_keys, self.keys[index], [self.lists + place])
                T.buffer_store(self.shared_keys, T.Cast("uint32", lane + index * 32), [self.lists + CANDIDATES + place])
            put(count, count[0] + popc(those))
        do(T.cuda.warp_sync())
        key, number = (hold(self.shared_keys[self.lists + first + lane], "uint32") for first in (0, CANDIDATES))
        there = lane < count[0]
        expert = hold(T.Select(there, T.Cast("int32", number), T.int32(NOBODY)), "int32")
        return count[0], hold(T.Select(there, key, T.uint32(ALL)), "uint32"), expert

    def _rank(self, key: Any, number: Any = None) -> Any:
        """How many lanes have a better key, or the same and a lower number: the lane's own, if none is given."""
        rank = register("int32", name="rank")
        put(rank, T.int32(0))
        with T.serial(0, 4) as eight:  # all at once would take more registers than the products
            for within in range(8):
                other = hold(eight * 8 + within, "int32", "other")
                its = from_lane(key, other, "uint32")
                lower = other < self.lane if number is None else from_lane(number, other, "int32") < number
                put(rank, rank[0] + T.Cast("int32", T.Or(its < key, T.And(T.EQ(its, key), lower))))
        return rank[0]

    def _each(self, body: Any) -> None:
        """body(index, expert) for every expert of this lane's."""
        for index in range(self.count):
            expert = hold(self.lane + index * 32, "int32")
            if index * 32 + 32 <= self.choosing.experts:
                body(index, expert)
            else:
                with T.If(expert < self.choosing.experts), T.Then():
                    body(index, expert)

    def _score(self, logits: Any, row: Any) -> None:
        """Scores, and keys of what is chosen by."""
        c, values = self.choosing, register("float32", self.count, "score")
        for index in range(self.count):
            put(values, T.float32(-3.0e38), index)
            put(self.keys, T.uint32(ALL), index)
        self._each(lambda index, expert: put(values, load(logits, [row, expert]), index))
        whole_softmax = c.softmax and not c.chosen_alone
        if whole_softmax:
            largest = hold(T.cuda.warp_max(_tree(T.max, [values[index] for index in range(self.count)])))
            for index in range(self.count):
                put(values, T.exp(values[index] - largest), index)
            whole = T.cuda.warp_sum(_tree(lambda a, b: a + b, [values[index] for index in range(self.count)]))
            inverse = hold(T.float32(1) / whole)

        def finish(index, expert):
            score = hold(values[index] * inverse) if whole_softmax else values[index] if c.softmax else sigmoid(values[index])
            T.buffer_store(self.scores, score, [self.first + expert])
            choice = score if c.correction is None else hold(score + load(c.correction, [expert], constant=True))
            put(self.keys, key_of(choice), index)

        self._each(finish)

    def _drop_groups(self) -> None:
        """Leave the experts of the best groups alone in the choice. A lane adds up a group."""
        c, lane = self.choosing, self.lane
        size, place = c.experts // c.groups, self.first + c.experts
        self._each(lambda index, expert: T.buffer_store(self.shared_keys, self.keys[index], [place + expert]))
        do(T.cuda.warp_sync())
        sums, kept = register("uint32", name="group"), register("uint32", name="kept")
        put(sums, T.uint32(ALL))
        put(kept, T.uint32(0))
        with T.If(lane < c.groups), T.Then():
            best, second = register("uint32", name="best"), register("uint32", name="second")
            put(best, T.uint32(ALL))
            put(second, T.uint32(ALL))
            with T.serial(0, size) as i:
                key = hold(self.shared_keys[place + lane * size + i], "uint32")
                put(second, T.min(second[0], T.max(best[0], key)))
                put(best, T.min(best[0], key))
            put(sums, key_of(hold(value_of(best[0]) + value_of(second[0]))))
        do(T.cuda.warp_sync())
        with T.serial(0, c.kept):
            group = self._best(sums, 1, c.groups)
            put(kept, T.bitwise_or(kept[0], T.shift_left(T.uint32(1), T.Cast("uint32", group))))
            self._drop(sums, 1, group)

        def leave(index, expert):
            bit = T.bitwise_and(T.shift_right(kept[0], T.Cast("uint32", T.floordiv(expert, size))), T.uint32(1))
            put(self.keys, T.Select(bit > T.uint32(0), self.keys[index], T.uint32(ALL)), index)

        self._each(leave)

    def _best(self, keys: Any, count: int, most: int) -> Any:
        """Whose key is the smallest, the lowest where there are several; below `most`."""
        best = hold(_tree(T.min, [keys[index] for index in range(count)]), "uint32")
        whole = least(best)
        places = [T.Select(T.EQ(keys[index], whole), T.uint32(index * 32), T.uint32(NOBODY)) for index in range(count)]
        own = hold(_tree(T.min, places), "uint32")
        lowest = least(hold(own + T.Cast("uint32", self.lane), "uint32"))
        return hold(T.Cast("int32", T.min(lowest, T.uint32(most - 1))), "int32")

    def _drop(self, keys: Any, count: int, chosen: Any) -> None:
        """Nobody chooses it again."""
        for index in range(count):
            put(keys, T.Select(T.EQ(chosen, self.lane + index * 32), T.uint32(ALL), keys[index]), index)


def _tree(join: Any, values: list[Any]) -> Any:
    """All values joined, in as few steps after each other as can be."""
    dtype = str(values[0].dtype) if hasattr(values[0], "dtype") else str(values[0].ty.dtype)
    while len(values) > 1:
        pairs = [hold(join(*values[i : i + 2]), dtype) for i in range(0, len(values) - 1, 2)]
        values = pairs + values[len(pairs) * 2 :]
    return values[0]


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
