"""Products of some rows with quantised weights: `warpgroups`, with a conversion between the ring and the `wgmma`.

The bytes go through the ring as they are stored, in pieces of 16, the scales of blocks beside them. A warpgroup turns its 64 rows
of a stage into pairs where its `wgmma` reads them; meanwhile others multiply. Scales of blocks are multiplied in here, and
the products of 8-bit numbers rounded as a dequantised weight is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tvm.tirx.script import builder as T

from .formats import Format, of_row
from .plain import Projection
from .values import COPY_ONCE, COPY_WORD_ONCE, do, hold, register, wide
from .warpgroups import DEPTH, UNIT, WarpgroupTile, WarpgroupTiles

COPYING = 64
"""Threads that copy weights."""


@dataclass(frozen=True)
class QuantisedWarpgroupTile(WarpgroupTile):
    """piece_columns: of 16 bytes of weights; scales: of blocks of columns, which go through the ring."""

    piece_columns: int = 16
    scales: bool = False

    @property
    def pieces(self) -> int:
        """Of a stage of weights."""
        return self.weights * DEPTH // self.piece_columns

    @property
    def weight_bytes(self) -> int:
        return self.pieces * (20 if self.scales else 16)

    @property
    def words(self) -> dict[str, int]:
        """32-bit words of shared memory: converted weights of one stage, x and raw weights of all, scales."""
        lines = {"converted": self.weights * DEPTH // 2, "x": self.stages * self.rows * DEPTH // 2}
        return {**lines, "raw": self.stages * self.pieces * 4, "scales": self.stages * self.pieces * self.scales}

    @property
    def ring_bytes(self) -> int:
        return 4 * sum(self.words.values())


class QuantisedWarpgroups(WarpgroupTiles):
    """One launch, see `WarpgroupTiles`. Weights: [columns, words], all of one storage."""

    tile: QuantisedWarpgroupTile

    def __init__(self, env: Any, tile: QuantisedWarpgroupTile, x: Any, format: Format, projections: Sequence[Projection]):
        super().__init__(env, tile, x, format.kind, projections)
        self.format = format
        self.of_line = DEPTH // tile.piece_columns
        """Pieces of a weight row in a stage."""

    def _declare(self) -> None:
        tile, first, views = self.tile, 0, {}
        shapes = {
            "converted": (tile.weights, 8, 4),
            "x": (tile.stages, tile.rows, 8, 4),
            "raw": (tile.stages, tile.pieces, 4),
            "scales": (tile.stages, tile.pieces),
        }
        for name, words in tile.words.items():
            if words:
                views[name] = T.decl_buffer(shapes[name], "uint32", data=self.memory.data, elem_offset=first, scope="shared.dyn")
            first += words
        self.converted, self.ring, self.raw = (views[name] for name in ("converted", "x", "raw"))
        self.scale_ring = views.get("scales")
        self.first_line = 0

    # -- the warps that copy -----------------------------------------------------------------------------------

    def _begin_copying(self) -> None:
        count = self.tile.pieces // COPYING
        self.sources = register("uint64", count, "sources")
        self.scale_sources = register("uint64", count, "scale_sources") if self.tile.scales else None

    def _piece(self, index: int) -> tuple[Any, Any, Any]:
        """(number, line of the tile, place within the line) of a copying thread's piece."""
        number = hold(index * COPYING + self.copier * 32 + self.at.lane, "int32")
        return number, hold(T.floordiv(number, self.of_line), "int32"), T.floormod(number, self.of_line)

    def _find_weights(self) -> None:
        for index in range(self.tile.pieces // COPYING):
            _, line, piece = self._piece(index)

            def places(projection: Projection, matrix: int, row: Any, piece: Any = piece) -> tuple[Any, ...]:
                address = T.reinterpret("uint64", projection.weights[matrix].ptr_to([wide(row), piece * 4]))
                if not self.tile.scales:
                    return (address,)
                scales = projection.scales[matrix]
                assert scales is not None
                high = scales.storage.block[0]
                buffer = scales.words if self.format.scaled == "numbers" else scales.scales
                of_row = buffer.ptr_to([wide(T.floordiv(row, high)) if high else T.int64(0), T.int64(0)])
                return address, T.reinterpret("uint64", of_row)

            for target, address in zip((self.sources, self.scale_sources), self._of_line(line, places), strict=False):
                T.buffer_store(target, address, [index])

    def _copy_weight_chunks(self) -> None:
        step = T.uint64(DEPTH * 4 // self.format.columns)
        for index in range(self.tile.pieces // COPYING):
            number, _, piece = self._piece(index)
            source = T.reinterpret("handle", self.sources[index] + T.Cast("uint64", self.stage[0]) * step)
            do(T.ptx[COPY_ONCE](self.raw.ptr_to([self.slot[0], number, 0]), source, 16, self.at.once))
            if self.scale_sources is not None:
                column = self.stage[0] * DEPTH + piece * self.tile.piece_columns
                word = T.Cast("uint64", T.floordiv(column, self.format.scale_columns))
                source = T.reinterpret("handle", self.scale_sources[index] + word * T.uint64(4))
                do(T.ptx[COPY_WORD_ONCE](self.scale_ring.ptr_to([self.slot[0], number]), source, 4, self.at.once))

    # -- the warps that multiply -------------------------------------------------------------------------------

    def _matrices(self) -> tuple[Any, Any]:
        return self.converted.ptr_to([T.floordiv(self.at.warp, 4) * UNIT, 0, 0]), self.ring.ptr_to([0, 0, 0, 0])

    def _steps(self) -> tuple[int, int]:
        return 0, self.tile.rows * DEPTH * 2

    def _ready(self, stage: Any) -> None:
        """Convert the warpgroup's 64 rows, when its `wgmma` of the stage before has ended."""
        self._end()
        thread, group = self.at.warp % 4 * 32 + self.at.lane, hold(T.floordiv(self.at.warp, 4), "int32")
        for index in range(-(-UNIT * self.of_line // 128)):
            number = hold(group * (UNIT * self.of_line) + index * 128 + thread, "int32")
            self._convert(stage, number)
        do(T.ptx.fence.proxy.async_.shared__cta())
        do(T.ptx.bar.sync(T.Cast("uint32", group + 2), T.uint32(128)))

    def _convert(self, stage: Any, number: Any) -> None:
        line, piece = hold(T.floordiv(number, self.of_line), "int32"), T.floormod(number, self.of_line)
        words = register("uint32", 4, "raw")
        with T.vectorized(0, 4) as v:
            T.buffer_store(words, self.raw[self.slot[0], number, v], [v])
        scale = hold(self.scale_ring[self.slot[0], number], "uint32") if self.scale_ring is not None else None
        pairs = self.format.scale_pairs(scale, stage * 2 + piece) if self.format.scaled == "numbers" else None
        each = self.format.columns // 2
        made = register("uint32", 4 * each, "converted")
        for word in range(4):
            numbers = self.format.decode(words[word], pairs[word * len(pairs) // 4] if pairs else None)
            for place, pair in enumerate(self.format.natural(numbers)):
                if self.format.scaled == "sums":
                    pair = self.format.rescaled(pair, T.cuda.uint_as_float(scale) * T.float32(self.format.factor))
                T.buffer_store(made, pair, [word * each + place])
        for part in range(each):
            chunk = T.bitwise_xor(piece * each + part, T.bitwise_and(line, 7))
            with T.vectorized(0, 4) as v:
                T.buffer_store(self.converted, made[part * 4 + v], [line, chunk, v])

    def _factor(self, projection: Projection, matrix: int, column: Any) -> Any:
        factor = of_row(projection.scales[matrix], column)
        left = 1.0 if self.format.scaled == "sums" else self.format.factor
        if left == 1.0:
            return factor
        return T.float32(left) if factor is None else hold(factor * T.float32(left))
