"""Who goes where: the chosen experts of all rows, listed with their rows in shared memory of one block."""

from __future__ import annotations

from typing import Any

from tvm.backend.cuda.lang.alloc_pool import SMEMPool
from tvm.tirx.script import builder as T

from .expert_one import OneRow
from .experts import Sizes
from .route import ALL, Chooser, Choosing, popc
from .values import do, from_lane_before, hold, put, register, store


def below(row: Any) -> Any:
    """The bits of a word that belong to rows before this one; row 0..31."""
    return T.shift_left(T.uint32(1), T.Cast("uint32", row)) - T.uint32(1)


def rank_in(words: list[Any], row: Any) -> tuple[Any, Any]:
    """(how many rows before `row` have a bit, whether it has one itself). words: one or two uint32."""
    if len(words) == 1:
        bit = T.bitwise_and(T.shift_right(words[0], T.Cast("uint32", row)), T.uint32(1))
        return popc(hold(T.bitwise_and(words[0], below(row)), "uint32")), hold(bit, "uint32")
    late = hold(row // 32, "int32") > 0
    word = hold(T.Select(late, words[1], words[0]), "uint32")
    count, bit = rank_in([word], hold(row % 32, "int32"))
    before = popc(words[0])
    return hold(count + T.Select(late, before, T.int32(0)), "int32"), bit


def _sum(value: Any) -> Any:
    """Of a warp's int32, none of them negative."""
    return hold(T.Cast("int32", T.cuda.reduce_add_sync_u32(T.uint32(ALL), T.Cast("uint32", value))), "int32")


class Groups:
    """The chosen experts and their rows, in shared memory of one block."""

    def __init__(self, sizes: Sizes, pool: SMEMPool, warps: int):
        self.sizes, self.warps, self.threads = sizes, warps, warps * 32
        make = lambda shape, dtype: pool.alloc(shape, dtype, align=16)  # noqa: E731
        self.pair_expert, self.pair_share = make((sizes.pairs,), "int32"), make((sizes.pairs,), "float32")
        self.rows_of, self.first_of = make((sizes.banks * 32, sizes.mask_words), "uint32"), make((sizes.banks * 32,), "int32")
        self.bank_experts, self.bank_pairs = make((sizes.banks,), "int32"), make((sizes.banks,), "int32")
        self.expert, self.first, self.count = (make((sizes.most + 1,), "int32") for _ in range(3))
        self.rows = make((sizes.most + 1, sizes.mask_words), "uint32")
        self.share, self.row = make((sizes.pairs,), "float32"), make((sizes.pairs + sizes.rows,), "int32")

    def clear(self, thread: Any) -> None:
        """Nobody has chosen: before `choose`."""
        count = self.sizes.banks * 32
        for turn in range(-(-count // self.threads)):
            expert = hold(thread + turn * self.threads, "int32")
            with T.If(expert < count), T.Then():
                for index in range(self.sizes.mask_words):
                    T.buffer_store(self.rows_of, T.uint32(0), [expert, index])
        do(T.cuda.cta_sync())

    def choose(self, choosing: Choosing, logits: Any, keys: Any, scores: Any, at: Any) -> None:
        """A warp a row."""
        sizes, old = self.sizes, register("uint32", name="old")
        turns = -(-sizes.rows // self.warps)
        with T.serial(0, turns) as turn:
            row = hold(turn * self.warps + at.warp, "int32", "row")
            with T.If(row < sizes.rows), T.Then():
                chooser = Chooser(choosing, keys, scores, hold(at.warp * choosing.words, "int32"), at.lane)
                expert, share = chooser.choose(logits, row)
                with T.If(at.lane < sizes.top), T.Then():
                    T.buffer_store(self.pair_expert, expert, [row * sizes.top + at.lane])
                    T.buffer_store(self.pair_share, share, [row * sizes.top + at.lane])
                    bit = T.shift_left(T.uint32(1), T.Cast("uint32", T.floormod(row, 32)))
                    do(T.ptx["atom.shared.or.b32"](old[0], self.rows_of.ptr_to([expert, T.floordiv(row, 32)]), bit))
                do(T.cuda.warp_sync())
        do(T.cuda.cta_sync())

    def gather(self, at: Any) -> None:
        """Lists of experts and pairs; the shared expert, which every row goes to, is the last of the list's places."""
        sizes = self.sizes
        chunks = -(-sizes.banks // self.warps)
        masks = [[register("uint32", name="rows") for _ in range(sizes.mask_words)] for _ in range(chunks)]
        experts_before = [register("int32", name="experts_before") for _ in range(chunks)]
        pairs_before = [register("int32", name="pairs_before") for _ in range(chunks)]
        for chunk in range(chunks):
            bank = hold(chunk * self.warps + at.warp, "int32", "bank")
            with T.If(bank < sizes.banks), T.Then():
                for index, word in enumerate(masks[chunk]):
                    put(word, self.rows_of[bank * 32 + at.lane, index])
                pairs = self._pairs(masks[chunk])
                active = hold(T.cuda.ballot_sync(T.uint32(ALL), T.Cast("int32", pairs > 0)), "uint32")
                put(experts_before[chunk], popc(hold(T.bitwise_and(active, below(at.lane)), "uint32")))
                through = register("int32", name="through")
                put(through, pairs)
                for step in (1, 2, 4, 8, 16):
                    other = from_lane_before(through[0], step, "int32")
                    put(through, through[0] + T.Select(at.lane >= step, other, T.int32(0)))
                put(pairs_before[chunk], through[0] - pairs)
                with T.If(T.EQ(at.lane, 31)), T.Then():
                    T.buffer_store(self.bank_experts, popc(active), [bank])
                    T.buffer_store(self.bank_pairs, through[0], [bank])
        do(T.cuda.cta_sync())
        counts = [self.bank_experts, self.bank_pairs]
        place, there = T.min(at.lane, sizes.banks - 1), at.lane < sizes.banks  # at most 32 banks, of 1024 experts
        experts, pairs = (hold(T.Select(there, count[place], T.int32(0)), "int32") for count in counts)
        self.total = register("int32", name="chosen_experts")
        put(self.total, _sum(experts))
        for chunk in range(chunks):
            bank = hold(chunk * self.warps + at.warp, "int32", "bank")
            with T.If(bank < sizes.banks), T.Then():
                before = [_sum(hold(T.Select(at.lane < bank, count, T.int32(0)), "int32")) for count in (experts, pairs)]
                inside = experts_before[chunk][0], pairs_before[chunk][0]
                place, first = (hold(a + b, "int32") for a, b in zip(before, inside, strict=True))
                expert, own = hold(bank * 32 + at.lane, "int32"), self._pairs(masks[chunk])
                T.buffer_store(self.first_of, first, [expert])
                with T.If(own > 0), T.Then():
                    for target, value in ((self.expert, expert), (self.first, first), (self.count, own)):
                        T.buffer_store(target, value, [place])
                    for index, word in enumerate(masks[chunk]):
                        T.buffer_store(self.rows, word[0], [place, index])
        do(T.cuda.cta_sync())
        thread = at.warp * 32 + at.lane
        for turn in range(-(-sizes.pairs // self.threads)):
            pair = hold(thread + turn * self.threads, "int32", "pair")
            with T.If(pair < sizes.pairs), T.Then():
                expert, row = hold(self.pair_expert[pair], "int32"), hold(T.floordiv(pair, sizes.top), "int32")
                rank, _ = rank_in([hold(self.rows_of[expert, i], "uint32") for i in range(sizes.mask_words)], row)
                place = hold(self.first_of[expert] + rank, "int32")
                T.buffer_store(self.share, self.pair_share[pair], [place])
                T.buffer_store(self.row, row, [place])
        for turn in range(-(-sizes.rows // self.threads)):
            row = hold(thread + turn * self.threads, "int32", "row")
            with T.If(row < sizes.rows), T.Then():
                T.buffer_store(self.row, row, [sizes.pairs + row])
        do(T.cuda.cta_sync())

    def _pairs(self, words: list[Any]) -> Any:
        """How many rows an expert has."""
        count = popc(words[0][0])
        for word in words[1:]:
            count = hold(count + popc(word[0]), "int32")
        return count

    def list_one(self, one: OneRow, logits: Any, at: Any) -> None:
        """`choose` and `gather` where there is one row, which is pair after pair's."""
        sizes = self.sizes
        one.choose(logits, at)
        with T.If(T.EQ(at.warp, 0)), T.Then():
            expert, share, place = one.shares(at.lane)
            with T.If(at.lane < sizes.top), T.Then():
                for target, value in ((self.expert, expert), (self.first, place), (self.count, T.int32(1)), (self.share, share)):
                    T.buffer_store(target, value, [place])
                T.buffer_store(self.rows, T.uint32(1), [place, 0])
            with T.If(at.lane <= sizes.pairs), T.Then():
                T.buffer_store(self.row, T.int32(0), [at.lane])
        self.total = register("int32", name="chosen_experts")
        put(self.total, T.int32(sizes.top))
        do(T.cuda.cta_sync())

    def publish(self, listed: Any, thread: Any) -> None:
        """The list for the next launch, by one block; it is where all see it when this returns."""
        sizes = self.sizes
        for turn in range(-(-(sizes.most + 1) // self.threads)):
            place = hold(thread + turn * self.threads, "int32")
            with T.If(place < self.total[0]), T.Then():
                words = [T.reinterpret("int32", self.rows[place, i]) for i in range(sizes.mask_words)]
                for index, value in enumerate((self.expert[place], self.first[place], *words)):
                    store(listed, [place, index], hold(value, "int32"))
            with T.If(T.EQ(place, sizes.most)), T.Then():
                store(listed, [place, 0], self.total[0])
            with T.If(place <= sizes.most), T.Then():
                do(T.cuda.thread_fence())
        do(T.cuda.cta_sync())
