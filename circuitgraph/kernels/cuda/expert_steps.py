"""One step of a warp: 16 weight rows times rows of x, and the ring that its weights come through."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from tvm.backend.cuda.lang.alloc_pool import SMEMPool
from tvm.tirx.script import builder as T

from . import one_row
from .formats import Format
from .values import COPY, COPY_ONCE, COPY_WORD_ONCE, do, hold, put, register, zeros


class Product:
    """A lane's pieces of 16 weight rows times x: one step of a warp."""

    def __init__(self, format: Format, lane: Any, rows: int):
        """rows: of x, at most."""
        self.format, self.lane = format, lane
        self.one_row = one_row.fits(format, rows)
        self.factor = format.sums_factor if self.one_row else format.factor
        self.mma = f"mma.sync.aligned.m16n8k16.row.col.f32.{format.kind}.{format.kind}.f32"

    def take(self, piece: Any, scales: Sequence[Any] | None = None, whole: Any = None, mine: Any = None) -> None:
        """Eight words of weights. scales: the words of both halves' scales, where there are any; whole: a scale over all. mine:
        of a block of rows and of the lane's even or odd one, whether its sums count."""
        self.piece, self.factors, self.mine = piece, None if whole is None else [whole, whole], mine
        self.of_numbers: list[Any] = [None, None]
        self.decoded: list[list[Any]] = [[], []]
        if self.one_row:
            self.scales, self.whole = scales, whole
        elif scales and self.format.scaled == "numbers":
            self.of_numbers = [self.format.scale_pairs(word, self.lane) for word in scales]
        elif scales:
            self.factors = [hold(T.cuda.uint_as_float(word)) for word in scales]

    def decode(self) -> None:
        """All words at once, for `multiply`."""
        self.decoded = [[pair for i in range(4) for pair in self._pairs(half, i)] for half in range(2)]

    def _pairs(self, half: int, index: int) -> list[Any]:
        scales = self.of_numbers[half]
        return self.format.decode(self.piece[half * 4 + index], scales and scales[index * len(scales) // 4])

    def order(self, x: list[Any]) -> list[Any]:
        """The words of x for a step, in the order that products take them."""
        each = len(x) // 4
        return [word for i in range(4) for word in self.format.order(x[i * each : i * each + each])]

    def owned(self, x: list[Any]) -> list[Any]:
        """Words of one row of x, in order, as `multiply_all` takes them."""
        kept = [one_row.owned(self.format, self.lane, index) for index in range(4)]
        return [hold(T.Select(kept[i // 4], self.format.lifted(word), T.uint32(0)), "uint32") for i, word in enumerate(x)]

    def gather(self, sums: Any) -> None:
        """Before sums are read: those of one row lie in several lanes."""
        if self.one_row:
            one_row.gather(sums, self.lane)

    def place(self, column: Any) -> Any:
        """Where a column goes in rows that are kept in this order."""
        if self.format.storage is None:
            return column
        each = self.format.columns
        within = column % each
        return column - within + within % (each // 2) * 2 + T.floordiv(within, each // 2)

    def multiply(self, sums: Any, block: int, x: list[Any]) -> None:
        """Add the products with eight rows of x to the `block`th four sums."""
        (totals,) = self._begin(sums, [block])
        for pair in range(0, len(x), 2):
            self._mma(totals, [self.decoded[half][pair + i] for i in range(2) for half in range(2)], x[pair : pair + 2])
        self._end(sums, [block], [totals])

    def multiply_all(self, sums: Any, blocks: list[list[Any]]) -> None:
        """The same with all blocks of rows; few words are decoded at a time, which saves registers. Of one row see `owned`."""
        if self.one_row:
            (x,) = blocks
            pieces = [self.piece[i] for i in range(8)]
            one_row.multiply(
                self.format, self.lane, sums, pieces, self.scales, lambda index: x[index * 4 : index * 4 + 4], self.whole
            )
            return
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
        """Where products are added up: where they stay, or apart where they are scaled first, or some do not count."""
        if self.factors is None and self.mine is None:
            return [[sums[block * 4 + i] for i in range(4)] for block in blocks]
        totals = register("float32", 4 * len(blocks), "step")
        zeros(totals, 4 * len(blocks))
        return [[totals[index * 4 + i] for i in range(4)] for index in range(len(blocks))]

    def _mma(self, c: list[Any], a: list[Any], x: list[Any]) -> None:
        do(T.ptx[self.mma](*c, *a, *x, *c))

    def _end(self, sums: Any, blocks: list[int], totals: list[list[Any]]) -> None:
        if self.factors is None and self.mine is None:
            return
        for block, total in zip(blocks, totals, strict=True):
            terms = [total[i] * self.factors[i // 2] if self.factors else total[i] for i in range(4)]
            if self.mine is None:
                self._add(sums, block, terms, range(4))
                continue
            for odd in range(2):
                with T.If(self.mine(block, odd)), T.Then():
                    self._add(sums, block, terms, (odd, odd + 2))

    def _add(self, sums: Any, block: int, terms: list[Any], places: Sequence[int]) -> None:
        for i in places:
            put(sums, sums[block * 4 + i] + terms[i], block * 4 + i)


class Ring:
    """A warp's stages: a lane's own pieces of weights, and of what they are multiplied by; and scales, (lines, words of each)."""

    def __init__(self, pool: SMEMPool, warps: int, stages: int, factors: int, at: Any, scales: tuple[int, int] = (0, 0)):
        self.at, self.pieces, (self.lines, self.words) = at, 2 + factors, scales
        self.memory = pool.alloc((warps, stages, self.pieces, 32, 4), "uint32", align=128)
        if self.lines:
            self.scale_memory = pool.alloc((warps, stages, self.lines, self.words), "uint32", align=16)

    def copy(self, slot: Any, addresses: Any, offset: int = 0) -> None:
        """Start copying both pieces of weights."""
        for half in range(2):
            source = T.reinterpret("handle", addresses[half] + T.uint64(offset))
            do(T.ptx[COPY_ONCE](self.memory.ptr_to([self.at.warp, slot, half, self.at.lane, 0]), source, 16, self.at.once))

    def copy_scales(self, slot: Any, address: Callable[[Any], Any]) -> None:
        """Start copying a step's scales, a line by each of the first lanes. A copy of few bytes costs a lane as much as one of
        many, so no lane copies what another has. address(line): uint64."""
        if self.lines:
            do(T.cuda.warp_sync())  # all have read the scales that were there
            with T.If(self.at.lane < self.lines), T.Then():
                source = T.reinterpret("handle", address(self.at.lane if self.lines > 1 else 0))
                place = self.scale_memory.ptr_to([self.at.warp, slot, self.at.lane if self.lines > 1 else 0, 0])
                do(T.ptx[COPY_WORD_ONCE](place, source, 4 * self.words, self.at.once))

    def copy_factor(self, slot: Any, index: int, source: Any, *size: Any) -> None:
        """Start copying a piece of what weights are multiplied by; with a size, zeros follow so many bytes."""
        do(T.ptx[COPY](self.memory.ptr_to([self.at.warp, slot, 2 + index, self.at.lane, 0]), source, 16, *size))

    def read(self, slot: Any) -> Any:
        """The words of all pieces."""
        piece = register("uint32", 4 * self.pieces, "weights")
        for part in range(self.pieces):
            with T.vectorized(0, 4) as v:
                T.buffer_store(piece, self.memory[self.at.warp, slot, part, self.at.lane, v], [part * 4 + v])
        return piece

    def read_scales(self, slot: Any) -> list[Any] | None:
        """The words with the lane's scales in both halves of the weight rows, None where there are none."""
        if not self.lines:
            return None
        do(T.cuda.warp_sync())  # each lane has waited for its own copies
        return lines_of(self.scale_memory, [self.at.warp, slot], (self.lines, self.words), self.at.lane)


def lines_of(memory: Any, place: list[Any], scales: tuple[int, int], lane: Any, first: Any = 0, line: int = 0) -> list[Any]:
    """The words with a lane's scales in both halves of 16 weight rows. memory: [*place, lines, words] words; scales: (lines,
    words of each) of a step, from the word `first` and the line `line` on."""
    lines, words = scales
    word = first + (T.floordiv(lane % 4 * words, 4) if words > 1 else 0)
    if lines == 1:
        found = hold(memory[(*place, line, word)], "uint32")
        return [found, found]
    numbers = [half * 8 + T.floordiv(lane, 4) if lines == 16 else half for half in range(2)]
    return [hold(memory[(*place, line + number, word)], "uint32") for number in numbers]
