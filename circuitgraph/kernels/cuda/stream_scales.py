"""Scales of blocks of a streamed weight's columns. They are few, so they are fetched a tile at a time, for the tile after the
one that is multiplied: a copy for every step would take as long as the weights' own."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

from tvm.tirx.script import builder as T

from .formats import Scales
from .values import COPY_ONCE, COPY_WORD_ONCE, do, from_lane, hold, put, register, wide

if TYPE_CHECKING:
    from .stream import Stream


class BlockScales(Protocol):
    """What a stream asks for, in this order: `begin`, then in every tile `fetch`, `of_step` for its steps, `turn`; where a team
    has one tile, `begin` and `of_step` alone."""

    def begin(self, tile: Any) -> None:
        """Fetch those of the first tile."""

    def fetch(self, tile: Any) -> None:
        """Fetch those of the tile after this one, which may not exist."""

    def of_step(self, group: int, step: int) -> list[Any]:
        """Of the lane's pieces in both halves of the 16 weight rows; the step's copies have arrived."""
        ...

    def turn(self) -> None:
        """The next tile begins."""


def scales_for(stream: Stream, pool: Any) -> BlockScales | None:
    """pool: of shared memory."""
    kinds = {"numbers": LineScales, "sums": StepScales}
    return kinds[stream.format.scaled](stream, pool) if stream.format.scaled else None


def _select(stream: Stream, tile: Any, address: Callable[[Any], Any]) -> Any:
    """address(segment) of the segment that the tile is in."""
    found = None
    for segment in reversed(stream.segments):
        here = address(segment)
        found = here if found is None else T.if_then_else(tile < segment.first + segment.tiles, here, found)
    return found


class StepScales:
    """One fp32 scale for all of a tile's rows in a step of a warp: lane by lane those of its steps, 16 for each matrix."""

    STEPS = 16

    def __init__(self, stream: Stream, pool: Any):
        self.stream = stream

    def begin(self, tile: Any) -> None:
        self.here, self.ahead = register("float32", name="scale"), register("float32", name="scale_ahead")
        self._load(tile, self.here)

    def fetch(self, tile: Any) -> None:
        self._load(tile, self.ahead)

    def _load(self, tile: Any, target: Any) -> None:
        stream, cut = self.stream, self.stream.cut
        step = T.min(stream.at.lane % self.STEPS, T.int32(cut.steps - 1))
        column = stream.part * (cut.columns // cut.k_parts) + cut.column(stream.warp) + step * cut.stride
        column = hold(T.floordiv(column, stream.format.scale_columns), "int32")

        def address(segment: Any) -> Any:
            first = (tile - segment.first) * (segment.width * cut.groups)
            row = T.max(T.min(first, T.int32(segment.projection.columns - 1)), T.int32(0))
            places = [self._place(scales, row, column) for scales in segment.projection.scales]
            return places[0] if len(places) == 1 else T.if_then_else(stream.at.lane < self.STEPS, places[0], places[1])

        source = T.reinterpret("handle", hold(_select(stream, tile, address), "uint64"))
        do(T.ptx["ld.global.nc.f32"](target[0], source))

    def _place(self, scales: Scales, row: Any, column: Any) -> Any:
        high = scales.storage.block[0]
        return T.reinterpret("uint64", scales.scales.ptr_to([wide(T.floordiv(row, high)) if high else T.int64(0), wide(column)]))

    def of_step(self, group: int, step: int) -> list[Any]:
        first = from_lane(self.here[0], step, "float32")
        return [first, first if self.stream.matrices == 1 else from_lane(self.here[0], self.STEPS + step, "float32")]

    def turn(self) -> None:
        put(self.here, self.ahead[0])


class LineScales:
    """Scales of single weight rows, four bytes a word: a tile's lie in shared memory, a line for each row with those of all
    steps of the warp, whose columns are neighbours."""

    def __init__(self, stream: Stream, pool: Any):
        self.stream, cut = stream, stream.cut
        self.words, self.lines = cut.steps * cut.scale_words, cut.groups * 16
        self.buffer = pool.alloc((cut.teams * cut.warps, cut.sides, self.lines, cut.scale_pitch), "uint32", align=16)
        self.size = next(size for size in (4, 2, 1) if self.words % size == 0)
        self.side = register("int32", name="side")

    def begin(self, tile: Any) -> None:
        put(self.side, T.int32(0))
        at, side = self.stream.at, T.uint32(4 * self.lines * self.stream.cut.scale_pitch)
        # From the lane itself, which ptxas 13.0 does not see: for an address in two parts, one of them the same for all lanes, it
        # makes a copy with a policy of L2 that the GPU refuses.
        begin = T.cuda.cvta_generic_to_shared(self.buffer.ptr_to([at.warp, 0, 0, 0]))
        self.target = register("uint32", name="target")
        put(self.target, from_lane(begin + T.Cast("uint32", self._piece(0)[2]) * T.uint32(4), at.lane, "uint32"))
        self.targets = hold(self.target[0] * T.uint32(2) + side, "uint32")
        self._copy(tile)
        put(self.target, self.target[0] + side)
        if self.words == 16:
            self._begin_pieces()

    def _begin_pieces(self) -> None:
        """Where the lane's words of each piece of a turned line lie, which no step has to work out then."""
        lane, cut = self.stream.at.lane, self.stream.cut
        self.pieces = register("int32", 4, "pieces")
        line = T.floordiv(lane, 4)
        for piece in range(4):
            word = piece * 4 + T.floordiv(lane % 4 * cut.scale_words, 4)
            put(self.pieces, line * cut.scale_pitch + self._turned(line, word), piece)

    def fetch(self, tile: Any) -> None:
        with T.If(tile < self.stream.tiles), T.Then():
            self._copy(tile)

    def turn(self) -> None:
        put(self.side, T.bitwise_xor(self.side[0], 1))
        put(self.target, self.targets - self.target[0])
        if self.words == 16:
            for piece in range(4):
                put(self.pieces, T.bitwise_xor(self.pieces[piece], self.lines * self.stream.cut.scale_pitch), piece)

    def _copy(self, tile: Any) -> None:
        """They arrive with the tile's first step at the latest, since the ring is no longer than a tile."""
        stream, cut = self.stream, self.stream.cut
        begin = stream.part * (cut.warps * self.words) + stream.warp * self.words
        for index in range(-(-self.lines * self.words // (32 * self.size))):
            line, piece, place = self._piece(index)
            with T.If(line < self.lines), T.Then():
                source = _select(
                    stream, tile, lambda segment, line=line, piece=piece: self._place(segment, tile, line, begin + piece)
                )
                copy = COPY_ONCE if self.size == 4 else COPY_WORD_ONCE
                target = self.target[0] + self._beyond(index, place)
                do(T.ptx[copy](target, T.reinterpret("handle", hold(source, "uint64")), 4 * self.size, stream.at.once))

    def _piece(self, index: int) -> tuple[Any, Any, Any]:
        """(line, word of it, where that lies) of the `index`th piece that the lane copies of a tile."""
        pieces, number = self.words // self.size, index * 32 + self.stream.at.lane
        line, piece = hold(T.floordiv(number, pieces), "int32"), hold(T.floormod(number, pieces) * self.size, "int32")
        return line, piece, hold(line * self.stream.cut.scale_pitch + self._turned(line, piece), "int32")

    def _beyond(self, index: int, place: Any) -> Any:
        """Bytes from the lane's first piece to this one."""
        lines, rest = divmod(32 * self.size, self.words)
        if rest or (self.words == 16 and lines % 8):
            return T.Cast("uint32", place - self._piece(0)[2]) * T.uint32(4)
        return T.uint32(4 * index * lines * self.stream.cut.scale_pitch)

    def _place(self, segment: Any, tile: Any, line: Any, word: Any) -> Any:
        stream = self.stream
        first = (tile - segment.first) * (segment.width * stream.cut.groups)
        row = first + line if stream.matrices == 1 else first + T.floordiv(line, 16) * 8 + line % 8
        row = T.max(T.min(row, T.int32(segment.projection.columns - 1)), T.int32(0))
        places = [T.reinterpret("uint64", one.words.ptr_to([wide(row), wide(word)])) for one in segment.projection.scales]
        return places[0] if len(places) == 1 else T.if_then_else(line % 16 < 8, places[0], places[1])

    def of_step(self, group: int, step: int) -> list[Any]:
        stream, cut = self.stream, self.stream.cut
        if group == step == 0:
            do(T.cuda.warp_sync())  # lanes have copied for each other
        lane = stream.at.lane
        if self.words == 16:
            piece, rest = divmod(step * cut.scale_words, 4)
            places = [self.pieces[piece] + ((group * 16 + half * 8) * cut.scale_pitch + rest) for half in range(2)]
            return [hold(self.buffer[stream.at.warp, 0, 0, place], "uint32") for place in places]
        word = step * cut.scale_words + T.floordiv(lane % 4 * cut.scale_words, 4)
        lines = [group * 16 + half * 8 + T.floordiv(lane, 4) for half in range(2)]
        return [hold(self.buffer[stream.at.warp, self.side[0], line, self._turned(line, word)], "uint32") for line in lines]

    def _turned(self, line: Any, word: Any) -> Any:
        """Where a word of a line lies. Lines of sixteen words begin in two banks alone, so each pair of lines has its pieces
        of four words in another order."""
        return T.bitwise_xor(word, T.floordiv(line, 2) % 4 * 4) if self.words == 16 else word
