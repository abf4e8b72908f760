"""One row's experts, chosen by a whole block, and listed as expert_groups.py lists those of several rows: with one row the
choice is what a launch waits for longest.

A thread has an expert or two. The best keys of as many warps as experts are chosen bound those from below, so a few candidates
remain, and a warp finds out how many of them are better than one.
"""

from __future__ import annotations

from typing import Any

from tvm.backend.cuda.lang.alloc_pool import SMEMPool
from tvm.tirx.script import builder as T

from ...ops.moe import SMALLEST_SUM
from .route import ALL, Choosing, key_of, least, popc, value_of
from .values import do, from_lane, hold, load, put, register, sigmoid


def fits(choosing: Choosing, rows: int, warps: int) -> bool:
    """Can a block of so many warps choose this way? A softmax is left out where the chosen experts' shares do not need it."""
    plain = not choosing.softmax or (choosing.renormalise and choosing.correction is None)
    return rows == 1 and choosing.top <= warps and plain and (choosing.groups == 1 or not choosing.softmax)


def shared_words(experts: int) -> int:
    """At most 32 warps."""
    return 3 * experts + 2 * 32 + 2 * 32 + 4 + 6 * 4


class OneRow:
    """logits: [1, experts] float32."""

    def __init__(self, choosing: Choosing, pool: SMEMPool, warps: int):
        self.choosing, self.warps = choosing, warps
        make = lambda count, dtype: pool.alloc((count,), dtype, align=16)  # noqa: E731
        self.best, self.count = make(warps, "uint32"), make(4, "uint32")
        self.keys, self.experts = make(choosing.experts, "uint32"), make(choosing.experts, "int32")
        self.scores, self.groups = make(choosing.experts, "float32"), make(choosing.groups, "uint32")
        self.expert, self.score = make(32, "int32"), make(32, "float32")

    def choose(self, logits: Any, at: Any) -> None:
        """The chosen experts with their scores, the best first, in shared memory."""
        c, threads = self.choosing, self.warps * 32
        thread = hold(at.warp * 32 + at.lane, "int32", "thread")
        turns = -(-c.experts // threads)
        keys, scores = register("uint32", turns, "key"), register("float32", turns, "score")
        for turn in range(turns):
            put(keys, T.uint32(ALL), turn)
            put(scores, T.float32(0), turn)
            expert = self._expert(at, turn)
            with T.If(expert < c.experts), T.Then():
                logit = load(logits, [0, expert])
                score = logit if c.softmax else sigmoid(logit)  # the largest logit has the largest share
                choice = score if c.correction is None else hold(score + load(c.correction, [expert], constant=True))
                put(scores, score, turn)
                put(keys, key_of(choice), turn)
        with T.If(T.EQ(thread, 0)), T.Then():
            T.buffer_store(self.count, T.uint32(0), [0])
        with T.If(thread < 32), T.Then():  # whatever the keys are, experts that exist are chosen
            T.buffer_store(self.expert, T.int32(0), [thread])
            T.buffer_store(self.score, T.float32(0), [thread])
        if c.groups > 1:
            self._drop_groups(keys, at)
        best = keys[0]
        for turn in range(1, turns):
            best = T.min(best, keys[turn])
        best = least(hold(best, "uint32"))
        with T.If(T.EQ(at.lane, 0)), T.Then():
            T.buffer_store(self.best, best, [at.warp])
        do(T.cuda.cta_sync())
        bound = self._bound(at.lane)
        for turn in range(turns):
            self._collect(keys[turn], scores[turn], self._expert(at, turn), bound, at.lane)
        do(T.cuda.cta_sync())
        self._rank(at)
        do(T.cuda.cta_sync())

    def _expert(self, at: Any, turn: int) -> Any:
        """The thread's; neighbours go to different warps, so that all warps have some."""
        return hold((at.lane + turn * 32) * self.warps + at.warp, "int32")

    def _drop_groups(self, keys: Any, at: Any) -> None:
        """Leave the experts of the best groups alone in the choice: ALL is no expert's key. A warp adds up a group."""
        c, size = self.choosing, self.choosing.experts // self.choosing.groups
        for turn in range(-(-c.experts // (self.warps * 32))):
            expert = self._expert(at, turn)
            with T.If(expert < c.experts), T.Then():
                T.buffer_store(self.keys, keys[turn], [expert])
        do(T.cuda.cta_sync())
        for first in range(0, c.groups, self.warps):
            group = hold(at.warp + first, "int32", "group")
            with T.If(group < c.groups), T.Then():
                best, second = register("uint32", name="best"), register("uint32", name="second")
                put(best, T.uint32(ALL))
                put(second, T.uint32(ALL))
                for start in range(0, size, 32):
                    with T.If(at.lane + start < size), T.Then():
                        key = hold(self.keys[group * size + start + at.lane], "uint32")
                        put(second, T.min(second[0], T.max(best[0], key)))
                        put(best, T.min(best[0], key))
                whole = least(best[0])
                holders = hold(T.cuda.ballot_sync(T.uint32(ALL), T.Cast("int32", T.EQ(best[0], whole))), "uint32")
                alone = T.And(T.EQ(best[0], whole), T.EQ(popc(holders), 1))
                several = hold(T.Select(alone, second[0], best[0]), "uint32")
                after = least(several)
                with T.If(T.EQ(at.lane, 0)), T.Then():
                    T.buffer_store(self.groups, key_of(hold(value_of(whole) + value_of(after))), [group])
        do(T.cuda.cta_sync())
        for turn in range(-(-c.experts // (self.warps * 32))):
            group = hold(T.floordiv(T.min(self._expert(at, turn), T.int32(c.experts - 1)), size), "int32")
            mine, rank = hold(self.groups[group], "uint32"), register("int32", name="rank")
            put(rank, T.int32(0))
            for other in range(c.groups):
                key = hold(self.groups[other], "uint32")
                put(rank, rank[0] + T.Cast("int32", T.Or(key < mine, T.And(T.EQ(key, mine), T.int32(other) < group))))
            put(keys, T.Select(rank[0] < c.kept, keys[turn], T.uint32(ALL)), turn)
        do(T.cuda.cta_sync())  # the keys' memory is the candidates' from here on

    def _bound(self, lane: Any) -> Any:
        """The key that at least `top` experts are as good as: the `top`th of the warps' best."""
        mine, rank = register("uint32", name="mine"), register("int32", name="rank")
        put(mine, T.uint32(ALL))
        put(rank, T.int32(0))
        with T.If(lane < self.warps), T.Then():
            put(mine, self.best[lane])
            for other in range(self.warps):
                key = hold(self.best[other], "uint32")
                put(rank, rank[0] + T.Cast("int32", T.Or(key < mine[0], T.And(T.EQ(key, mine[0]), T.int32(other) < lane))))
        return least(
            hold(T.Select(T.And(lane < self.warps, T.EQ(rank[0], self.choosing.top - 1)), mine[0], T.uint32(ALL)), "uint32")
        )

    def _collect(self, key: Any, score: Any, expert: Any, bound: Any, lane: Any) -> None:
        """Candidates side by side, in any order."""
        is_one = hold(T.Cast("int32", T.And(key < T.uint32(ALL), T.And(expert < self.choosing.experts, key <= bound))), "int32")
        those = hold(T.cuda.ballot_sync(T.uint32(ALL), is_one), "uint32")
        with T.If(those > T.uint32(0)), T.Then():
            first = register("uint32", name="first")
            put(first, T.uint32(0))
            with T.If(T.EQ(lane, 0)), T.Then():
                do(T.ptx["atom.shared.add.u32"](first[0], self.count.ptr_to([0]), T.Cast("uint32", popc(those))))
            begin = from_lane(first[0], 0, "uint32")
            before = T.bitwise_and(those, T.shift_left(T.uint32(1), T.Cast("uint32", lane)) - T.uint32(1))
            place = hold(T.Cast("int32", begin) + popc(hold(before, "uint32")), "int32")
            with T.If(is_one > 0), T.Then():
                T.buffer_store(self.keys, key, [place])
                T.buffer_store(self.experts, expert, [place])
                T.buffer_store(self.scores, score, [place])

    def _rank(self, at: Any) -> None:
        """A warp counts for a candidate how many are better, the lower expert among equals; the best get their places."""
        total = hold(T.Cast("int32", self.count[0]), "int32", "candidates")
        candidate, rank, chunk = (register("int32", name=name) for name in ("candidate", "rank", "chunk"))
        put(candidate, at.warp)
        with T.While(candidate[0] < total):
            key, expert = hold(self.keys[candidate[0]], "uint32"), hold(self.experts[candidate[0]], "int32")
            put(rank, T.int32(0))
            put(chunk, T.int32(0))
            with T.While(chunk[0] < total):
                other = hold(T.min(chunk[0] + at.lane, total - 1), "int32")
                its, whose = hold(self.keys[other], "uint32"), hold(self.experts[other], "int32")
                better = T.And(chunk[0] + at.lane < total, T.Or(its < key, T.And(T.EQ(its, key), whose < expert)))
                put(rank, rank[0] + popc(hold(T.cuda.ballot_sync(T.uint32(ALL), T.Cast("int32", better)), "uint32")))
                put(chunk, chunk[0] + 32)
            with T.If(T.And(T.EQ(at.lane, 0), rank[0] < self.choosing.top)), T.Then():
                T.buffer_store(self.expert, expert, [rank[0]])
                T.buffer_store(self.score, self.scores[candidate[0]], [rank[0]])
            put(candidate, candidate[0] + self.warps)

    def shares(self, lane: Any) -> tuple[Any, Any, Any]:
        """(expert, share, how many chosen experts have lower numbers) of the choice that has this lane's number; for one warp."""
        c = self.choosing
        mine, share, place = register("int32", name="mine"), register("float32", name="share"), register("int32", name="place")
        put(mine, T.int32(0))
        put(share, T.float32(0))
        put(place, T.int32(0))
        with T.If(lane < c.top), T.Then():
            put(mine, self.expert[lane])
            score = hold(self.score[lane])
            put(share, hold(T.exp(score - self.score[0])) if c.softmax else score)
            for other in range(c.top):
                expert = hold(self.expert[other], "int32")
                before = T.Or(expert < mine[0], T.And(T.EQ(expert, mine[0]), T.int32(other) < lane))
                put(place, place[0] + T.Cast("int32", before))
        if c.renormalise:
            put(share, share[0] / (hold(T.cuda.warp_sum(share[0])) + T.float32(SMALLEST_SUM)))
        return mine[0], hold(share[0] * T.float32(c.factor)), place[0]
