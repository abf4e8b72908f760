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


class Groups:
    """The chosen experts and their rows, in shared memory of one block."""

    def __init__(self, sizes: Sizes, pool: SMEMPool, warps: int):
        self.sizes, self.warps, self.threads = sizes, warps, warps * 32
        make = lambda shape, dtype: pool.alloc(shape, dtype, align=16)  # noqa: E731
        self.bits = make((sizes.rows * sizes.banks,), "uint32")
        self.pair_expert, self.pair_share = make((sizes.pairs,), "int32"), make((sizes.pairs,), "float32")
        self.rows_of, self.first_of = make((sizes.banks * 32, sizes.mask_words), "uint32"), make((sizes.banks * 32,), "int32")
        self.bank_experts, self.bank_pairs = make((sizes.banks,), "int32"), make((sizes.banks,), "int32")
        self.expert, self.first, self.count = (make((sizes.most + 1,), "int32") for _ in range(3))
        self.rows = make((sizes.most + 1, sizes.mask_words), "uint32")
        self.share, self.row = make((sizes.pairs,), "float32"), make((sizes.pairs + sizes.rows,), "int32")

    def choose(self, choosing: Choosing, logits: Any, keys: Any, scores: Any, at: Any) -> None:
        """A warp a row."""
        sizes = self.sizes
        turns = -(-sizes.rows // self.warps)
        with T.serial(0, turns) as turn:
            row = hold(turn * self.warps + at.warp, "int32", "row")
            with T.If(row < sizes.rows), T.Then():
                chooser = Chooser(choosing, keys, scores, hold(at.warp * choosing.words, "int32"), at.lane)
                expert, share = chooser.choose(logits, row)
                with T.If(at.lane < sizes.top), T.Then():
                    T.buffer_store(self.pair_expert, expert, [row * sizes.top + at.lane])
                    T.buffer_store(self.pair_share, share, [row * sizes.top + at.lane])
                do(T.cuda.warp_sync())
                # A bit for each expert: lane b collects those of bank b.
                for first in range(0, sizes.banks, 32):
                    word = register("uint32", name="chosen")
                    put(word, T.uint32(0))
                    with T.unroll(0, sizes.top) as place:
                        other = hold(self.pair_expert[row * sizes.top + place], "int32")
                        bit = T.shift_left(T.uint32(1), T.Cast("uint32", T.bitwise_and(other, T.int32(31))))
                        mine = T.EQ(T.shift_right(other, T.int32(5)), at.lane + first)
                        put(word, T.bitwise_or(word[0], T.Select(mine, bit, T.uint32(0))))
                    with T.If(at.lane + first < sizes.banks), T.Then():
                        T.buffer_store(self.bits, word[0], [row * sizes.banks + at.lane + first])
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
            for word in masks[chunk]:
                put(word, T.uint32(0))
            with T.If(bank < sizes.banks), T.Then():
                for index, word in enumerate(masks[chunk]):
                    with T.unroll(0, min(32, sizes.rows - index * 32)) as row:
                        bits = hold(self.bits[(row + index * 32) * sizes.banks + bank], "uint32")
                        bit = T.bitwise_and(T.shift_right(bits, T.Cast("uint32", at.lane)), T.uint32(1))
                        put(word, T.bitwise_or(word[0], T.shift_left(bit, T.Cast("uint32", row))))
                pairs = register("int32", name="pairs")
                put(pairs, T.int32(0))
                for word in masks[chunk]:
                    put(pairs, pairs[0] + popc(word[0]))
                active = hold(T.cuda.ballot_sync(T.uint32(ALL), T.Cast("int32", pairs[0] > 0)), "uint32")
                put(experts_before[chunk], popc(hold(T.bitwise_and(active, below(at.lane)), "uint32")))
                through = register("int32", name="through")
                put(through, pairs[0])
                for step in (1, 2, 4, 8, 16):
                    other = from_lane_before(through[0], step, "int32")
                    put(through, through[0] + T.Select(at.lane >= step, other, T.int32(0)))
                put(pairs_before[chunk], through[0] - pairs[0])
                with T.If(T.EQ(at.lane, 31)), T.Then():
                    T.buffer_store(self.bank_experts, popc(active), [bank])
                    T.buffer_store(self.bank_pairs, through[0], [bank])
        do(T.cuda.cta_sync())
        self.total = register("int32", name="chosen_experts")
        put(self.total, T.int32(0))
        for other in range(sizes.banks):
            put(self.total, self.total[0] + self.bank_experts[other])
        for chunk in range(chunks):
            bank = hold(chunk * self.warps + at.warp, "int32", "bank")
            with T.If(bank < sizes.banks), T.Then():
                place, first = register("int32", name="place"), register("int32", name="first")
                put(place, experts_before[chunk][0])
                put(first, pairs_before[chunk][0])
                for other in range(sizes.banks - 1):
                    put(place, place[0] + T.Select(bank > other, self.bank_experts[other], T.int32(0)))
                    put(first, first[0] + T.Select(bank > other, self.bank_pairs[other], T.int32(0)))
                expert, pairs = hold(bank * 32 + at.lane, "int32"), register("int32", name="pairs")
                put(pairs, T.int32(0))
                for index, word in enumerate(masks[chunk]):
                    T.buffer_store(self.rows_of, word[0], [expert, index])
                    put(pairs, pairs[0] + popc(word[0]))
                T.buffer_store(self.first_of, first[0], [expert])
                with T.If(pairs[0] > 0), T.Then():
                    for target, value in ((self.expert, expert), (self.first, first[0]), (self.count, pairs[0])):
                        T.buffer_store(target, value, [place[0]])
                    for index, word in enumerate(masks[chunk]):
                        T.buffer_store(self.rows, word[0], [place[0], index])
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
        """The list for the next launch, by one block."""
        sizes = self.sizes
        for turn in range(-(-(sizes.most + 1) // self.threads)):
            place = hold(thread + turn * self.threads, "int32")
            with T.If(place < self.total[0]), T.Then():
                words = [T.reinterpret("int32", self.rows[place, i]) for i in range(sizes.mask_words)]
                for index, value in enumerate((self.expert[place], self.first[place], *words)):
                    store(listed, [place, index], hold(value, "int32"))
            with T.If(T.EQ(place, sizes.most)), T.Then():
                store(listed, [place, 0], self.total[0])
