"""Matrix products of many rows with quantised weights: `tiles`, with a conversion between the ring and the fragments.

A thread converts the pieces of 16 bytes that it copied itself, so their ring needs no barrier; the converted weights of a
stage lie in one of two buffers, which the barrier of every stage hands over. Scales of blocks are copied beside each piece.
Those of 8-bit numbers are multiplied in here, and the products rounded as a dequantised weight is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tvm.tirx.script import builder as T

from .formats import Format, Scales, of_row
from .plain import Projection
from .tiles import DEPTH, WARPS, Tile, Tiles
from .values import COPY, COPY_WORD, do, hold, register, wide

THREADS = WARPS[0] * WARPS[1] * 32


@dataclass(frozen=True)
class QuantisedTile(Tile):
    """piece_columns: of 16 bytes of weights; scales: of blocks of columns, which go through the ring."""

    piece_columns: int = 16
    scales: bool = False

    @property
    def pieces(self) -> int:
        """That a thread copies in every stage; the last threads of few have none."""
        return -(-self.weights * DEPTH // self.piece_columns // THREADS)

    @property
    def words(self) -> dict[str, int]:
        """32-bit words of shared memory: x and raw weights of all stages, scales, and two stages of converted weights."""
        lines = {"x": self.stages * self.rows * DEPTH // 2, "raw": self.stages * self.pieces * THREADS * 4}
        return {**lines, "scales": self.stages * self.pieces * THREADS * self.scales, "converted": self.weights * DEPTH}

    @property
    def shared_bytes(self) -> int:
        return max(4 * sum(self.words.values()), self.rows * (self.weights + 4) * 4)


class QuantisedTiles(Tiles):
    """One launch, see `Tiles`. Weights: [columns, words], all of one storage."""

    tile: QuantisedTile

    def __init__(self, env: Any, tile: QuantisedTile, x: Any, format: Format, projections: Sequence[Projection]):
        super().__init__(env, tile, x, format.kind, projections)
        self.format = format

    def _declare(self, memory: Any) -> None:
        tile, first = self.tile, 0
        shapes = {
            "x": (tile.stages, tile.rows, 8, 4),
            "raw": (tile.stages, tile.pieces, THREADS, 4),
            "scales": (tile.stages, tile.pieces, THREADS),
            "converted": (2, tile.weights, 8, 4),
        }
        views = {}
        for name, words in tile.words.items():
            if words:
                views[name] = T.decl_buffer(shapes[name], "uint32", data=memory.data, elem_offset=first, scope="shared.dyn")
            first += words
        self.ring, self.raw, self.converted = views["x"], views["raw"], views["converted"]
        self.scale_ring = views.get("scales")

    # -- the ring ----------------------------------------------------------------------------------------------

    def _find_sources(self) -> None:
        tile = self.tile
        self.lines = tile.rows * 8 // THREADS
        self.sources = register("uint64", self.lines, "source")
        self.chunk = self.thread % 8
        for index in range(self.lines):
            line = index * (THREADS // 8) + T.floordiv(self.thread, 8)
            row = T.min(self.first_row + line, T.int32(self.rows - 1))
            T.buffer_store(self.sources, T.reinterpret("uint64", self.x.ptr_to([wide(row), self.chunk * 4])), [index])
        self.weight_sources = register("uint64", tile.pieces, "weight_source")
        self.scale_sources = register("uint64", tile.pieces, "scale_source") if tile.scales else None
        for index in range(tile.pieces):
            line, piece = self._piece(index)
            address, scale = self._addresses(T.min(line, T.int32(tile.weights - 1)), piece)
            T.buffer_store(self.weight_sources, address, [index])
            if self.scale_sources is not None:
                T.buffer_store(self.scale_sources, scale, [index])

    def _piece(self, index: int) -> tuple[Any, Any]:
        """(weight row of the tile, piece of its 64 columns) of the thread's piece `index`."""
        number, each = index * THREADS + self.thread, DEPTH // self.tile.piece_columns
        return hold(T.floordiv(number, each), "int32"), hold(T.floormod(number, each), "int32")

    def _has(self, index: int) -> Any:
        return index * THREADS + self.thread < self.tile.weights * DEPTH // self.tile.piece_columns

    def _addresses(self, line: Any, piece: Any) -> tuple[Any, Any]:
        """Of a piece in the first stage, and of the first scales of its row."""
        address = scale = None
        first = self.columns_of_tiles
        for projection, count in reversed(list(zip(self.projections, self.counts, strict=True))):
            first -= count
            within = line if self.matrices == 1 else T.floormod(line, self.width)
            row = T.min((self.place - first) * self.width + within, T.int32(projection.columns - 1))
            row = hold(T.max(row, T.int32(0)), "int32")
            places = [T.reinterpret("uint64", weight.ptr_to([wide(row), piece * 4])) for weight in projection.weights]
            scales = [self._scale_row(one, row) for one in projection.scales]
            here, beside = (
                pair[0] if self.matrices == 1 else T.if_then_else(line < self.width, pair[0], pair[1])
                for pair in (places, scales)
            )
            inside = self.place < first + count
            address = here if address is None else T.if_then_else(inside, here, address)
            scale = beside if scale is None else T.if_then_else(inside, beside, scale)
        return address, scale

    def _scale_row(self, scales: Scales | None, row: Any) -> Any:
        if not self.tile.scales:
            return T.uint64(0)
        assert scales is not None
        high = scales.storage.block[0]
        buffer = scales.words if self.format.scaled == "numbers" else scales.scales
        return T.reinterpret("uint64", buffer.ptr_to([wide(T.floordiv(row, high)) if high else T.int64(0), T.int64(0)]))

    def _copy(self, stage: Any, slot: Any) -> None:
        with T.If(stage < self.depth // DEPTH), T.Then():
            for index in range(self.lines):
                line = index * (THREADS // 8) + T.floordiv(self.thread, 8)
                source = T.reinterpret("handle", self.sources[index] + T.Cast("uint64", stage) * T.uint64(DEPTH * 2))
                chunk = T.bitwise_xor(self.chunk, T.bitwise_and(line, 7))
                do(T.ptx[COPY](self.ring.ptr_to([slot, line, chunk, 0]), source, 16))
            for index in range(self.tile.pieces):
                with T.If(self._has(index)), T.Then():
                    self._copy_piece(stage, slot, index)
        do(T.ptx.cp.async_.commit_group())

    def _copy_piece(self, stage: Any, slot: Any, index: int) -> None:
        step = T.uint64(DEPTH * 4 // self.format.columns)
        source = T.reinterpret("handle", self.weight_sources[index] + T.Cast("uint64", stage) * step)
        do(T.ptx[COPY](self.raw.ptr_to([slot, index, self.thread, 0]), source, 16))
        if self.scale_sources is not None:
            column = stage * DEPTH + self._piece(index)[1] * self.tile.piece_columns
            word = T.Cast("uint64", T.floordiv(column, self.format.scale_columns))
            source = T.reinterpret("handle", self.scale_sources[index] + word * T.uint64(4))
            do(T.ptx[COPY_WORD](self.scale_ring.ptr_to([slot, index, self.thread]), source, 4))

    # -- conversion --------------------------------------------------------------------------------------------

    def _ready(self, stage: Any, slot: Any) -> None:
        """Convert the thread's own pieces of a stage that has arrived."""
        for index in range(self.tile.pieces):
            with T.If(self._has(index)), T.Then():
                self._convert(stage, slot, index)

    def _convert(self, stage: Any, slot: Any, index: int) -> None:
        line, piece = self._piece(index)
        words = register("uint32", 4, "raw")
        with T.vectorized(0, 4) as v:
            T.buffer_store(words, self.raw[slot, index, self.thread, v], [v])
        scale = hold(self.scale_ring[slot, index, self.thread], "uint32") if self.scale_ring is not None else None
        pairs = self.format.scale_pairs(scale, stage * 2 + piece) if self.format.scaled == "numbers" else None
        each = self.format.columns // 2
        made = register("uint32", 4 * each, "converted")
        for word in range(4):
            numbers = self.format.decode(words[word], pairs[word * len(pairs) // 4] if pairs else None)
            for place, number in enumerate(self.format.natural(numbers)):
                if self.format.scaled == "sums":
                    number = self.format.rescaled(number, T.cuda.uint_as_float(scale) * T.float32(self.format.factor))
                T.buffer_store(made, number, [word * each + place])
        buffer = T.bitwise_and(stage, 1)
        for part in range(each):
            chunk = T.bitwise_xor(piece * each + part, T.bitwise_and(line, 7))
            with T.vectorized(0, 4) as v:
                T.buffer_store(self.converted, made[part * 4 + v], [buffer, line, chunk, v])

    def _weights(self, stage: Any, slot: Any) -> tuple[Any, Any, int]:
        return self.converted, T.bitwise_and(stage, 1), 0

    # -- results -----------------------------------------------------------------------------------------------

    def _total(self, projection: Projection, matrix: int, column: Any, total: Any) -> Any:
        factor = of_row(projection.scales[matrix], column)
        left = 1.0 if self.format.scaled == "sums" else self.format.factor
        total = total if factor is None else total * factor
        return total if left == 1.0 else total * T.float32(left)
