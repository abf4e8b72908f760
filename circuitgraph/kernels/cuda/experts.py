"""A mixture of experts at the speed of memory: two launches that read the weights of every chosen expert once.

`Up`: every block chooses the rows' experts from the router's logits, all alike, and lists the experts that are chosen with
their rows (`Groups`). Then blocks take tile after tile of 8 rows of gate and 8 of up, first of the shared expert, whose
weights are known before the kernel waits for its predecessor, then of the listed ones, and leave share * silu(gate) * up.
`Down`: a block makes 16 columns of the result. Its warps go through the same 16 weight rows of all listed experts, 32 columns
at a time, and add up in registers: every row's sum has the order of its experts' numbers, whatever rows are beside it.

Both copy weights as `stream` does: a lane's own 16 bytes of a ring, and where weights are quantised (see `formats`) the scale
that they have. A pair is a row and one of its experts; pairs are ordered by expert, then by row, so the pairs of an expert
lie side by side.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tvm.backend.cuda.lang.alloc_pool import SMEMPool
from tvm.tirx.script import builder as T

from .formats import Format, Scales
from .route import ALL, Chooser, Choosing, memory_views, popc, seen_as
from .values import COPY, COPY_WORD, do, from_lane_before, hold, load, load_int, put, register, sigmoid, silu, store, wide, zeros

STEP_WORDS = 16
"""Words of a weight row in one step of a warp: a lane has four, and four lanes share a row."""


@dataclass(frozen=True)
class Sizes:
    """rows of x [rows, hidden]; inner columns of a routed expert, shared of the shared one (0 without)."""

    rows: int
    hidden: int
    inner: int
    shared: int
    experts: int
    top: int
    step: int = 32
    """Columns of one step of a warp: of `STEP_WORDS` words."""
    scale_lines: int = 0
    """Different scales of eight weight rows in a step, which go through the rings too: 8, or 1 where those share theirs."""

    @property
    def scaled(self) -> bool:
        return self.scale_lines > 0

    @property
    def stage_bytes(self) -> int:
        """Of a warp's stage: weights and their scales."""
        return 1024 + 8 * self.scale_lines

    @property
    def pairs(self) -> int:
        return self.rows * self.top

    @property
    def most(self) -> int:
        """Experts that can be chosen at once."""
        return min(self.experts, self.pairs)

    @property
    def row_blocks(self) -> int:
        return -(-self.rows // 8)

    @property
    def mask_words(self) -> int:
        """32-bit words that hold a bit of every row."""
        return -(-self.rows // 32)

    @property
    def banks(self) -> int:
        """Groups of 32 experts."""
        return -(-self.experts // 32)


@dataclass(frozen=True)
class UpCut:
    """steps: of a warp in a tile; stages: of the ring, a multiple or a part of the steps. resident: x stays in registers;
    otherwise its rows are read for each tile, only those that the expert has. buffers: for sums, 1 waits twice a tile."""

    warps: int
    steps: int
    stages: int
    resident: bool
    buffers: int

    def scratch_words(self, sizes: Sizes, choosing_words: int) -> int:
        """Of the memory that choosing and adding up take turns in."""
        return max(self.buffers * self.warps * sizes.rows * 16, min(self.warps, sizes.rows) * choosing_words)

    def shared_bytes(self, sizes: Sizes, choosing_words: int) -> int:
        ring = self.warps * self.stages * sizes.stage_bytes
        return ring + 4 * self.scratch_words(sizes, choosing_words) + Groups.shared_bytes(sizes) + 1024


@dataclass(frozen=True)
class DownCut:
    warps: int
    stages: int

    def factors(self, sizes: Sizes) -> int:
        """16-byte pieces that a lane has of what a stage's weights are multiplied by, beside the two of weights. None where
        there are more than 16 rows."""
        return sizes.row_blocks * sizes.step // 32 if sizes.rows <= 16 else 0

    def shared_bytes(self, sizes: Sizes) -> int:
        ring = self.warps * self.stages * (sizes.stage_bytes + 512 * self.factors(sizes))
        return ring + 4 * self.warps * sizes.rows * 16 + 16 * sizes.most + 1024


@dataclass(frozen=True)
class Between:
    """Scratch from `Up` to `Down`. made: [pairs, inner / 2] words, shared: [rows, shared / 2] words or None; the same as 16-bit
    floats to store to. listed: [most + 1, 4] int32: expert, first pair, two words of rows; the last line: how many."""

    made: Any
    shared: Any
    made_elements: Any
    shared_elements: Any
    listed: Any


@dataclass(frozen=True)
class Matrix:
    """A weight, or one for each expert, as words: [lines, columns / elements of a word], or [experts, all of a matrix]."""

    words: Any
    columns: int
    elements: int
    scales: Scales | None = None

    def piece(self, expert: Any, line: Any, word: Any) -> Any:
        """uint64 address of a word of a line. expert: None where there is but one matrix."""
        if expert is None:
            return T.reinterpret("uint64", self.words.ptr_to([wide(line), wide(word)]))
        place = wide(line) * (self.columns // self.elements) + wide(word)
        return T.reinterpret("uint64", self.words.ptr_to([wide(expert), place]))

    def scale(self, expert: Any, line: Any, column: Any) -> Any:
        """uint64 address of the scale of a line from this column on."""
        assert self.scales is not None
        high, across = self.scales.storage.block
        place = [T.floordiv(line, high) if high else 0, T.floordiv(column, across) if across else 0]
        return T.reinterpret("uint64", self.scales.scales.ptr_to(place if expert is None else [expert, *place]))


@dataclass(frozen=True)
class Weights:
    """gate, up: [experts, inner, hidden], down: [experts, hidden, inner]; up is None where gate has both one after the other.
    shared: gate and up [shared, hidden], and down [hidden, shared], or None."""

    gate: Matrix
    up: Matrix | None
    down: Matrix
    shared: tuple[Matrix, Matrix, Matrix] | None


class Product:
    """A lane's pieces of 16 weight rows times x: one step of a warp."""

    def __init__(self, format: Format, lane: Any):
        self.format, self.lane = format, lane
        self.mma = f"mma.sync.aligned.m16n8k16.row.col.f32.{format.kind}.{format.kind}.f32"

    def take(self, piece: Any, scales: Any) -> None:
        """Eight words of weights, and two scales as words where there are any."""
        self.piece, self.scales = piece, scales
        self.decoded: list[list[Any]] = [[], []]

    def decode(self) -> None:
        """All words at once, for `multiply`."""
        self.decoded = [[pair for i in range(4) for pair in self._pairs(half, i)] for half in range(2)]

    def _pairs(self, half: int, index: int) -> list[Any]:
        return self.format.decode(self.piece[half * 4 + index])

    def order(self, x: list[Any]) -> list[Any]:
        """The words of x for a step, in the order that products take them."""
        each = len(x) // 4
        return [word for i in range(4) for word in self.format.order(x[i * each : i * each + each])]

    def multiply(self, sums: Any, block: int, x: list[Any]) -> None:
        """Add the products with eight rows of x to the `block`th four sums."""
        (totals,) = self._begin(sums, [block])
        for pair in range(0, len(x), 2):
            self._mma(totals, [self.decoded[half][pair + i] for i in range(2) for half in range(2)], x[pair : pair + 2])
        self._end(sums, [block], [totals])

    def multiply_all(self, sums: Any, blocks: list[list[Any]]) -> None:
        """The same with all blocks of rows; few words are decoded at a time, which saves registers."""
        totals = self._begin(sums, list(range(len(blocks))))
        together = 2 if self.format.columns == 2 else 1  # words that make a whole product
        for first in range(0, 4, together):
            upper, lower = ([pair for i in range(together) for pair in self._pairs(half, first + i)] for half in range(2))
            start = first * len(blocks[0]) // 4
            for pair in range(0, len(upper), 2):
                a = [upper[pair], lower[pair], upper[pair + 1], lower[pair + 1]]
                for total, x in zip(totals, blocks, strict=True):
                    self._mma(total, a, x[start + pair : start + pair + 2])
        self._end(sums, list(range(len(blocks))), totals)

    def _begin(self, sums: Any, blocks: list[int]) -> list[list[Any]]:
        """Where products are added up: where they stay, or apart where they are scaled first."""
        if self.scales is None:
            return [[sums[block * 4 + i] for i in range(4)] for block in blocks]
        totals = register("float32", 4 * len(blocks), "step")
        zeros(totals, 4 * len(blocks))
        return [[totals[index * 4 + i] for i in range(4)] for index in range(len(blocks))]

    def _mma(self, c: list[Any], a: list[Any], x: list[Any]) -> None:
        do(T.ptx[self.mma](*c, *a, *x, *c))

    def _end(self, sums: Any, blocks: list[int], totals: list[list[Any]]) -> None:
        if self.scales is not None:
            factors = [hold(T.cuda.uint_as_float(self.scales[half])) for half in range(2)]
            for block, total in zip(blocks, totals, strict=True):
                for i in range(4):
                    put(sums, sums[block * 4 + i] + total[i] * factors[i // 2], block * 4 + i)


class Ring:
    """A warp's stages: a lane's own pieces of weights, of what they are multiplied by, and their scales."""

    def __init__(self, pool: SMEMPool, sizes: Sizes, warps: int, stages: int, factors: int, at: Any):
        self.at, self.pieces, self.lines = at, 2 + factors, sizes.scale_lines
        self.memory = pool.alloc((warps, stages, self.pieces, 32, 4), "uint32", align=128)
        if self.lines:
            self.scale_memory = pool.alloc((warps, stages, self.lines, 2), "uint32", align=16)

    def copy(self, slot: Any, addresses: Any, offset: int = 0, scale_offset: int = 0) -> None:
        """Start copying both pieces of weights, and their scales. addresses: of two pieces, then of two scales."""
        for half in range(2):
            source = T.reinterpret("handle", addresses[half] + T.uint64(offset))
            do(T.ptx[COPY](self.memory.ptr_to([self.at.warp, slot, half, self.at.lane, 0]), source, 16))
        if self.lines:
            do(T.cuda.warp_sync())  # all have read the scales that were there
            # A copy of few bytes costs a lane as much as one of many: only lanes copy whose scale no other has.
            with T.If(T.EQ(self.at.lane % (32 // self.lines), 0)), T.Then():
                for half in range(2):
                    source = T.reinterpret("handle", addresses[2 + half] + T.uint64(scale_offset))
                    place = self.scale_memory.ptr_to([self.at.warp, slot, self._line(), half])
                    do(T.ptx[COPY_WORD](place, source, 4))

    def _line(self) -> Any:
        return T.floordiv(self.at.lane, 32 // self.lines)

    def copy_factor(self, slot: Any, index: int, source: Any, *size: Any) -> None:
        """Start copying a piece of what weights are multiplied by; with a size, zeros follow so many bytes."""
        do(T.ptx[COPY](self.memory.ptr_to([self.at.warp, slot, 2 + index, self.at.lane, 0]), source, 16, *size))

    def read(self, slot: Any) -> tuple[Any, Any]:
        """(words of all pieces, two scales or None)."""
        piece, scales = register("uint32", 4 * self.pieces, "weights"), None
        for part in range(self.pieces):
            with T.vectorized(0, 4) as v:
                T.buffer_store(piece, self.memory[self.at.warp, slot, part, self.at.lane, v], [part * 4 + v])
        if self.lines:
            do(T.cuda.warp_sync())  # each lane has waited for its own copies
            scales = register("uint32", 2, "scales")
            with T.vectorized(0, 2) as v:
                T.buffer_store(scales, self.scale_memory[self.at.warp, slot, self._line(), v], [v])
        return piece, scales


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

    @staticmethod
    def shared_bytes(sizes: Sizes) -> int:
        words = sizes.rows * sizes.banks + 4 * sizes.pairs + sizes.rows + (sizes.mask_words + 1) * sizes.banks * 32
        return 4 * (words + 2 * sizes.banks + (3 + sizes.mask_words) * (sizes.most + 1)) + 13 * 16

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


class Up:
    """One launch. x: [rows, hidden / 2] words, logits: [rows, experts] float32, gate: [rows, 1] float32 of the shared expert's
    gate before its sigmoid, or None."""

    def __init__(
        self, env: Any, sizes: Sizes, cut: UpCut, format: Format, choosing: Choosing, weights: Weights, between: Between
    ):
        self.env, self.sizes, self.cut, self.format = env, sizes, cut, format
        self.choosing, self.weights, self.between = choosing, weights, between
        self.addresses = 4 if sizes.scaled else 2
        self.shared_tiles, self.expert_tiles = sizes.shared // 8, sizes.inner // 8
        self.tiles_ahead = max(1, cut.stages // cut.steps)
        self.blocks = min(env.processors, self.shared_tiles + sizes.most * self.expert_tiles)

    def emit(self, x: Any, logits: Any, gate: Any) -> None:
        sizes, cut = self.sizes, self.cut
        self.x, self.gate = x, gate
        with self.env.kernel(self.blocks, cut.warps, early=True) as at:
            self.at, self.thread = at, hold(at.warp * 32 + at.lane, "int32", "thread")
            pool = SMEMPool()
            self.ring, self.product = Ring(pool, sizes, cut.warps, cut.stages, 0, at), Product(self.format, at.lane)
            words = cut.scratch_words(sizes, self.choosing.words)
            memory = pool.alloc((words,), "uint32", align=16)
            self.groups = Groups(sizes, pool, cut.warps)
            pool.commit()
            keys, scores = memory_views(memory, words)
            shape = (cut.buffers, cut.warps, sizes.rows * 16)
            self.shared = seen_as(memory, shape, "float32")
            self.column = hold(at.warp * sizes.step + at.lane % 4 * (sizes.step // 4), "int32", "column")
            self.word = hold(at.warp * STEP_WORDS + at.lane % 4 * 4, "int32", "word")
            self.tile, self.turn, self.ring_turn = (register("int32", name=name) for name in ("tile", "turn", "ring_turn"))
            put(self.tile, at.block)
            put(self.turn, T.int32(0))
            put(self.ring_turn, T.int32(0))
            here, ahead = (register("uint64", self.addresses, name) for name in ("here", "ahead"))
            for number in range(self.tiles_ahead if self.shared_tiles else 0):
                tile = self.tile[0] + number * self.blocks
                with T.If(tile < self.shared_tiles), T.Then():
                    self._find_shared(tile, here)
                    self._fill(number, here)
            self.env.wait()
            if cut.resident:
                self._load_x()
            self.groups.choose(self.choosing, logits, keys, scores, at)
            self.groups.gather(at)
            self.tiles = hold(self.groups.total[0] * self.expert_tiles + self.shared_tiles, "int32", "tiles")
            for number in range(self.tiles_ahead):
                tile = hold(self.tile[0] + number * self.blocks, "int32")
                listed = T.And(tile >= self.shared_tiles, tile < self.tiles)
                with T.If(listed), T.Then():
                    self._find_listed(tile, here)
                self._fill(number, here, listed)
            with T.If(T.EQ(at.block, self.blocks - 1)), T.Then():  # which has the fewest tiles
                self.groups.publish(self.between.listed, self.thread)
            if cut.steps > cut.stages:
                self._find(self.tile[0], here)
            with T.While(self.tile[0] < self.tiles):
                self._find(hold(self.tile[0] + self.tiles_ahead * self.blocks, "int32", "far"), ahead)
                self._tile(here, ahead)
                if cut.steps > cut.stages:
                    for index in range(self.addresses):
                        put(here, ahead[index], index)
                put(self.tile, self.tile[0] + self.blocks)

    # -- weights -----------------------------------------------------------------------------------------------

    def _find(self, tile: Any, target: Any) -> None:
        """Addresses of the lane's pieces of a tile's first step, in gate and in up; of no tile, none."""
        if self.shared_tiles:
            with T.If(tile < self.shared_tiles), T.Then():
                self._find_shared(tile, target)
        with T.If(T.And(tile >= self.shared_tiles, tile < self.tiles)), T.Then():
            self._find_listed(tile, target)

    def _find_shared(self, tile: Any, target: Any) -> None:
        row = hold(tile * 8 + T.floordiv(self.at.lane, 4), "int32")
        self._find_pair([(weight, row) for weight in self.weights.shared[:2]], None, target)  # type: ignore[index]

    def _find_pair(self, pair: Any, expert: Any, target: Any) -> None:
        """Addresses of (matrix, line) of both halves."""
        for half, (matrix, line) in enumerate(pair):
            put(target, matrix.piece(expert, line, self.word), half)
            if self.sizes.scaled:
                put(target, matrix.scale(expert, line, self.column), 2 + half)

    def _place_of(self, tile: Any) -> tuple[Any, Any]:
        """(place in the list, number among the expert's tiles) of a routed expert's tile."""
        tile = hold(tile - self.shared_tiles, "int32")
        return hold(T.floordiv(tile, self.expert_tiles), "int32"), hold(T.floormod(tile, self.expert_tiles), "int32")

    def _find_listed(self, tile: Any, target: Any) -> None:
        place, number = self._place_of(tile)
        expert = hold(self.groups.expert[place], "int32")
        row = hold(number * 8 + T.floordiv(self.at.lane, 4), "int32")
        gate, up, later = self.weights.gate, self.weights.up, row + self.sizes.inner
        self._find_pair([(gate, row), (gate, later) if up is None else (up, row)], expert, target)

    def _fill(self, number: int, addresses: Any, late: Any = None) -> None:
        """Start all copies of the `number`th tile that the ring holds at first; `late`: where that holds, a group each stage.
        What was copied before is in the first group."""
        for stage in range(self.cut.stages):
            tile, step = divmod(stage, self.cut.steps)
            if tile != number:
                continue
            if late is None:
                self._copy(stage, addresses, step)
                continue
            with T.If(late), T.Then():
                self._copy(stage, addresses, step)
            do(T.ptx.cp.async_.commit_group())

    def _copy(self, slot: Any, addresses: Any, step: int) -> None:
        scales, columns = self.weights.gate.scales, step * self.cut.warps * self.sizes.step
        across = scales.storage.block[1] if scales else 0
        self.ring.copy(slot, addresses, 4 * step * self.cut.warps * STEP_WORDS, 4 * columns // across if across else 0)

    # -- a tile ------------------------------------------------------------------------------------------------

    def _tile(self, here: Any, ahead: Any) -> None:
        cut, sizes = self.cut, self.sizes
        self.of_shared = self.tile[0] < self.shared_tiles
        place, number = self._place_of(self.tile[0])
        put_place = hold(T.Select(self.of_shared, T.int32(0), place), "int32")
        first = hold(T.Select(self.of_shared, T.int32(sizes.pairs), self.groups.first[put_place]), "int32", "first")
        count = hold(T.Select(self.of_shared, T.int32(sizes.rows), self.groups.count[put_place]), "int32", "count")
        sums = register("float32", sizes.row_blocks * 4, "sums")
        zeros(sums, sizes.row_blocks * 4)
        if not cut.resident:
            self._find_rows(first, count)
        far = hold(self.tile[0] + self.tiles_ahead * self.blocks, "int32")
        x = self._row_words(0, 0) if not cut.resident else []
        for step in range(cut.steps):
            slot = step % cut.stages if cut.stages <= cut.steps else hold(self.ring_turn[0] * cut.steps + step, "int32")
            do(T.ptx.cp.async_.wait_group(cut.stages - 1))
            self.product.take(*self.ring.read(slot))
            if cut.resident:
                self.product.multiply_all(sums, [self._fragment(block, step) for block in range(sizes.row_blocks)])
            else:
                self.product.decode()
                now, x = x, self._row_words(0, step + 1) if step + 1 < cut.steps else []
                self.product.multiply(sums, 0, now)
                for block in range(1, sizes.row_blocks):
                    with T.If(block * 8 < count), T.Then():
                        self.product.multiply(sums, block, self._row_words(block, step))
            later = step + cut.stages
            if later < cut.steps:
                self._copy(slot, here, later)
            else:
                with T.If(far < self.tiles), T.Then():
                    self._copy(slot, ahead, later % cut.steps if cut.stages <= cut.steps else step)
            do(T.ptx.cp.async_.commit_group())
        if cut.stages > cut.steps:
            following = self.ring_turn[0] + 1
            put(self.ring_turn, T.Select(T.EQ(following, self.tiles_ahead), T.int32(0), following))
        self._share(sums, count)
        do(T.cuda.cta_sync())
        self._finish(put_place, number, first, count)
        if cut.buffers == 1:
            do(T.cuda.cta_sync())
        else:
            put(self.turn, T.bitwise_xor(self.turn[0], 1))

    def _fragment(self, block: int, step: int) -> list[Any]:
        each = self.sizes.step // 8
        return [self.fragments[(block * self.cut.steps + step) * each + i] for i in range(each)]

    def _load_x(self) -> None:
        """All of the lane's columns of x, in registers for good."""
        cut, sizes = self.cut, self.sizes
        self.fragments = register("uint32", sizes.row_blocks * cut.steps * sizes.step // 8, "x")
        for block in range(sizes.row_blocks):
            row = T.min(block * 8 + T.floordiv(self.at.lane, 4), T.int32(sizes.rows - 1))
            for step in range(cut.steps):
                self._load_words(self._fragment(block, step), row, step)
        if sizes.step > 32:
            for block in range(sizes.row_blocks):
                for step in range(cut.steps):
                    each = sizes.step // 8
                    for i, word in enumerate(self.product.order(self._fragment(block, step))):
                        put(self.fragments, word, (block * cut.steps + step) * each + i)

    def _load_words(self, targets: list[Any], row: Any, step: int) -> None:
        word = T.floordiv(self.column, 2) + step * self.cut.warps * (self.sizes.step // 2)
        for first in range(0, len(targets), 4):
            do(T.ptx["ld.global.v4.b32"](*targets[first : first + 4], self.x.ptr_to([row, word + first])))

    def _find_rows(self, first: Any, count: Any) -> None:
        """Which rows of x the lane has in each block of eight that the expert has."""
        self.rows = register("int32", self.sizes.row_blocks, "row")
        for block in range(self.sizes.row_blocks):
            rank = T.min(block * 8 + T.floordiv(self.at.lane, 4), count - 1)
            put(self.rows, self.groups.row[first + rank], block)

    def _row_words(self, block: int, step: int) -> list[Any]:
        words = register("uint32", self.sizes.step // 8, "x")
        targets = [words[i] for i in range(self.sizes.step // 8)]
        self._load_words(targets, self.rows[block], step)
        return self.product.order(targets)

    def _share(self, sums: Any, count: Any) -> None:
        """Leave the warp's sums as [row or rank][gate or up]."""
        most = self.sizes.rows
        for block in range(self.sizes.row_blocks):
            for i in range(4):
                row = hold(block * 8 + self.at.lane % 4 * 2 + i % 2, "int32")
                place = row * 16 + T.floordiv(self.at.lane, 4) + i // 2 * 8
                limit = most if self.cut.resident else count
                with T.If(row < limit), T.Then():
                    T.buffer_store(self.shared, sums[block * 4 + i], [self.turn[0], self.at.warp, place])

    def _finish(self, place: Any, number: Any, first: Any, count: Any) -> None:
        """share * silu(gate) * up of the expert's rows."""
        sizes, cut = self.sizes, self.cut
        threads = cut.warps * 32
        for chunk in range(-(-sizes.rows * 8 // threads)):
            item = hold(T.floordiv(self.thread + chunk * threads, 8), "int32", "item")
            column = self.thread % 8
            if cut.resident:
                words = [hold(self.groups.rows[place, i], "uint32") for i in range(sizes.mask_words)]
                rank, bit = rank_in(words, hold(T.min(item, T.int32(sizes.rows - 1)), "int32"))
                mine = T.And(item < sizes.rows, T.Or(self.of_shared, bit > T.uint32(0)))
            else:
                rank, mine = item, item < count
            with T.If(mine), T.Then():
                totals = [register("float32", name=name) for name in ("gate", "up")]
                for matrix, total in enumerate(totals):
                    put(total, T.float32(0))
                    for warp in range(cut.warps):
                        put(total, total[0] + self.shared[self.turn[0], warp, item * 16 + matrix * 8 + column])
                gate, up = (total[0] if self.format.factor == 1 else total[0] * self.format.factor for total in totals)
                value = hold(silu(hold(gate)) * up)
                if self.shared_tiles:
                    with T.If(self.of_shared), T.Then():
                        scaled = value
                        if self.gate is not None:
                            scaled = hold(value * sigmoid(load(self.gate, [item, 0])))
                        store(self.between.shared_elements, [item, self.tile[0] * 8 + column], scaled)
                with T.If(T.Not(self.of_shared)), T.Then():
                    pair = hold(first + rank, "int32")
                    store(self.between.made_elements, [pair, number * 8 + column], hold(value * self.groups.share[pair]))


class _Cursor:
    """Where a warp is among the steps of a tile: of the expert `place` in the list, -1 for the shared one, step `step`.

    Which steps of an expert are a warp's depends on the expert's number, not on its place: so a row's sums are rounded in
    the same way whatever other rows choose.
    """

    def __init__(self, down: Down, *names: str):
        self.down = down
        self.place, self.step = (register("int32", name=name) for name in names)

    @property
    def inside(self) -> Any:
        """Is there a step?"""
        return self.place[0] < self.down.total

    def begin(self) -> None:
        down = self.down
        put(self.place, T.int32(-1 if down.shared_units else 0))
        put(self.step, down.at.warp if down.shared_units else self._first(T.int32(0)))
        self._settle()

    def move(self) -> None:
        put(self.step, self.step[0] + self.down.cut.warps)
        self._settle()

    def _settle(self) -> None:
        """From behind an expert's last step to the next expert that has one for the warp."""
        down = self.down
        if down.shared_units:
            with T.If(T.And(self.place[0] < 0, self.step[0] >= down.shared_units)), T.Then():
                self._next()
        behind = T.And(self.place[0] >= 0, T.And(self.inside, self.step[0] >= down.expert_units))
        if down.expert_units >= down.cut.warps:
            with T.If(behind), T.Then():
                self._next()
        else:
            with T.While(behind):
                self._next()

    def _next(self) -> None:
        put(self.place, self.place[0] + 1)
        put(self.step, self._first(self.place[0]))

    def _first(self, place: Any) -> Any:
        """The warp's first step of an expert: experts begin at different warps, so that all have as much to do."""
        down = self.down
        expert = down.listed[T.min(place, T.int32(down.sizes.most - 1)), 0]
        return T.floormod(down.at.warp + expert * (-down.expert_units % down.cut.warps), down.cut.warps)


class Down:
    """One launch. finish(row, column, [sum]) stores the results of one element."""

    def __init__(self, env: Any, sizes: Sizes, cut: DownCut, format: Format, weights: Weights, between: Between):
        self.env, self.sizes, self.cut, self.format, self.weights, self.between = env, sizes, cut, format, weights, between
        self.tiles = sizes.hidden // 16
        self.shared_units, self.expert_units = sizes.shared // sizes.step, sizes.inner // sizes.step
        self.factors = cut.factors(sizes)
        self.blocks = min(env.processors, self.tiles)

    def emit(self, finish: Callable[[Any, Any, list[Any]], None]) -> None:
        sizes, cut = self.sizes, self.cut
        with self.env.kernel(self.blocks, cut.warps, early=True) as at:
            self.at, self.thread = at, hold(at.warp * 32 + at.lane, "int32", "thread")
            pool = SMEMPool()
            self.ring = Ring(pool, sizes, cut.warps, cut.stages, self.factors, at)
            self.product = Product(self.format, at.lane)
            self.shared = pool.alloc((cut.warps, sizes.rows * 16), "float32", align=16)
            self.listed = pool.alloc((sizes.most, 4), "int32", align=16)
            pool.commit()
            names = ("tile", "ahead_tile", "slot")
            self.tile, self.ahead_tile, self.slot = (register("int32", name=name) for name in names)
            self.here, self.ahead = _Cursor(self, "place", "step"), _Cursor(self, "ahead_place", "ahead_step")
            put(self.tile, at.block)
            put(self.slot, T.int32(0))
            addresses = register("uint64", 4 if sizes.scaled else 2, "source")
            for stage in range(cut.stages if self.shared_units else 0):
                unit = hold(at.warp + stage * cut.warps, "int32")
                with T.If(unit < self.shared_units), T.Then():
                    self._find(None, self.tile[0], unit, addresses)
                    self.ring.copy(stage, addresses)
            self.env.wait()
            self._fetch_list()
            put(self.ahead_tile, at.block)
            self.ahead.begin()
            for stage in range(cut.stages):
                with T.If(T.And(self.ahead_tile[0] < self.tiles, self.ahead.inside)), T.Then():
                    self._start(stage, addresses, T.EQ(self.ahead_tile[0], at.block))
                do(T.ptx.cp.async_.commit_group())
                self._advance()
            with T.While(self.tile[0] < self.tiles):
                self._tile(addresses)
                do(T.cuda.cta_sync())
                self._finish(finish)
                do(T.cuda.cta_sync())
                put(self.tile, self.tile[0] + self.blocks)

    def _fetch_list(self) -> None:
        sizes, threads = self.sizes, self.cut.warps * 32
        total = load_int(self.between.listed, [sizes.most, 0])
        for turn in range(-(-sizes.most // threads)):
            place = hold(self.thread + turn * threads, "int32")
            with T.If(place < sizes.most), T.Then():
                words = register("int32", 4, "line")
                do(T.ptx["ld.global.v4.b32"](*(words[i] for i in range(4)), self.between.listed.ptr_to([place, 0])))
                for index in range(4):
                    T.buffer_store(self.listed, words[index], [place, index])
        do(T.cuda.cta_sync())
        self.total = hold(total, "int32", "chosen_experts")

    # -- the ring ----------------------------------------------------------------------------------------------

    def _advance(self) -> None:
        """The copying cursor goes to the warp's next step, of the next tile after the last."""
        self.ahead.move()
        with T.If(T.Not(self.ahead.inside)), T.Then():
            put(self.ahead_tile, self.ahead_tile[0] + self.blocks)
            self.ahead.begin()

    def _find(self, expert: Any, tile: Any, step: Any, target: Any) -> None:
        """Addresses of the lane's pieces of an expert's step, and of their scales; of the shared expert's without one."""
        assert self.weights.shared or expert is not None
        matrix = self.weights.down if expert is not None else self.weights.shared[2]  # type: ignore[index]
        for half in range(2):
            line = tile * 16 + half * 8 + T.floordiv(self.at.lane, 4)
            put(target, matrix.piece(expert, line, step * STEP_WORDS + self.at.lane % 4 * 4), half)
            if self.sizes.scaled:
                put(target, matrix.scale(expert, line, step * self.sizes.step), 2 + half)

    def _word(self, step: Any) -> Any:
        """Where the lane's columns of a step begin in a row of words of two elements."""
        return step * (self.sizes.step // 2) + self.at.lane % 4 * (self.sizes.step // 8)

    def _start(self, slot: Any, addresses: Any, early: Any = None) -> None:
        """Copies of the unit at the copying cursor. early: where that holds, its weights are on their way."""
        place, step = self.ahead.place[0], self.ahead.step[0]
        if self.shared_units:
            with T.If(place < 0), T.Then():
                self._start_shared(slot, step, addresses, early)
        with T.If(place >= 0), T.Then():
            self._find(hold(self.listed[place, 0], "int32"), self.ahead_tile[0], step, addresses)
            self.ring.copy(slot, addresses)
            for block in range(self.sizes.row_blocks if self.factors else 0):
                row = hold(block * 8 + T.floordiv(self.at.lane, 4), "int32")
                rank, bit = rank_in([T.reinterpret("uint32", self.listed[place, 2])], row)
                pair = hold(T.min(self.listed[place, 1] + rank, T.int32(self.sizes.pairs - 1)), "int32")
                size = hold(bit * T.uint32(16), "uint32")  # nothing is read for other rows: zeros
                self._start_factors(slot, block, self.between.made, pair, step, size)

    def _start_shared(self, slot: Any, unit: Any, addresses: Any, early: Any) -> None:
        def weights():
            self._find(None, self.ahead_tile[0], unit, addresses)
            self.ring.copy(slot, addresses)

        if early is None:
            weights()
        else:
            with T.If(T.Not(early)), T.Then():
                weights()
        for block in range(self.sizes.row_blocks if self.factors else 0):
            row = hold(T.min(block * 8 + T.floordiv(self.at.lane, 4), T.int32(self.sizes.rows - 1)), "int32")
            self._start_factors(slot, block, self.between.shared, row, unit)

    def _start_factors(self, slot: Any, block: int, source: Any, row: Any, step: Any, *size: Any) -> None:
        each = self.sizes.step // 32
        for index in range(each):
            self.ring.copy_factor(slot, block * each + index, source.ptr_to([row, self._word(step) + index * 4]), *size)

    # -- a tile ------------------------------------------------------------------------------------------------

    def _tile(self, addresses: Any) -> None:
        """The warp's steps of 16 columns of the result."""
        cut, sizes = self.cut, self.sizes
        sums = register("float32", sizes.row_blocks * 4, "sums")
        zeros(sums, sizes.row_blocks * 4)
        self.here.begin()
        with T.While(self.here.inside):
            do(T.ptx.cp.async_.wait_group(cut.stages - 1))
            piece, scales = self.ring.read(self.slot[0])
            self.product.take(piece, scales)
            if self.factors:
                each = sizes.step // 8
                words = [[piece[8 + block * each + i] for i in range(each)] for block in range(sizes.row_blocks)]
                self.product.multiply_all(sums, [self.product.order(block) for block in words])
            else:
                self.product.decode()
                self._multiply_rows(sums)
            with T.If(T.And(self.ahead_tile[0] < self.tiles, self.ahead.inside)), T.Then():
                self._start(self.slot[0], addresses)
            do(T.ptx.cp.async_.commit_group())
            self._advance()
            put(self.slot, T.Select(T.EQ(self.slot[0] + 1, cut.stages), T.int32(0), self.slot[0] + 1))
            self.here.move()
        self._share(sums)

    def _multiply_rows(self, sums: Any) -> None:
        """More than eight rows: of every eight, if the expert has one of them."""
        sizes, lane = self.sizes, self.at.lane
        base, stride = register("uint64", name="base"), register("uint64", name="stride")
        words = [register("uint32", name="rows") for _ in range(sizes.mask_words)]
        place, step = self.here.place[0], self.here.step[0]
        if self.shared_units:
            with T.If(place < 0), T.Then():
                for word in words:
                    put(word, T.uint32(ALL))
                put(base, T.reinterpret("uint64", self.between.shared.ptr_to([0, self._word(step)])))
                put(stride, T.uint64(sizes.shared * 2))
        with T.If(place >= 0), T.Then():
            for index, word in enumerate(words):
                put(word, T.reinterpret("uint32", self.listed[place, 2 + index]))
            put(base, T.reinterpret("uint64", self.between.made.ptr_to([self.listed[place, 1], self._word(step)])))
            put(stride, T.uint64(sizes.inner * 2))
        for block in range(sizes.row_blocks):
            rows = T.bitwise_and(T.shift_right(words[block // 4][0], T.uint32(block % 4 * 8)), T.uint32(255))
            with T.If(rows > T.uint32(0)), T.Then():
                row = hold(block * 8 + T.floordiv(lane, 4), "int32")
                rank, bit = rank_in([word[0] for word in words], row)
                x = register("uint32", sizes.step // 8, "x")
                words_of_x = [x[index] for index in range(sizes.step // 8)]
                for index in range(sizes.step // 8):
                    put(x, T.uint32(0), index)
                with T.If(T.And(bit > T.uint32(0), row < sizes.rows)), T.Then():
                    place = base[0] + T.Cast("uint64", rank) * stride[0]
                    for first in range(0, len(words_of_x), 4):
                        source = T.reinterpret("handle", place + T.uint64(4 * first))
                        do(T.ptx["ld.global.v4.b32"](*words_of_x[first : first + 4], source))
                do(T.cuda.warp_sync())
                self.product.multiply(sums, block, self.product.order(words_of_x))

    def _share(self, sums: Any) -> None:
        for block in range(self.sizes.row_blocks):
            for i in range(4):
                row = hold(block * 8 + self.at.lane % 4 * 2 + i % 2, "int32")
                place = row * 16 + T.floordiv(self.at.lane, 4) + i // 2 * 8
                with T.If(row < self.sizes.rows), T.Then():
                    T.buffer_store(self.shared, sums[block * 4 + i], [self.at.warp, place])

    def _finish(self, finish: Callable[[Any, Any, list[Any]], None]) -> None:
        threads = self.cut.warps * 32
        for chunk in range(-(-self.sizes.rows * 16 // threads)):
            element = hold(self.thread + chunk * threads, "int32")
            with T.If(element < self.sizes.rows * 16), T.Then():
                total = register("float32", name="total")
                put(total, T.float32(0))
                for warp in range(self.cut.warps):
                    put(total, total[0] + self.shared[warp, element])
                row, column = hold(T.floordiv(element, 16), "int32"), hold(self.tile[0] * 16 + element % 16, "int32")
                finish(row, column, [total[0] if self.format.factor == 1 else total[0] * self.format.factor])
