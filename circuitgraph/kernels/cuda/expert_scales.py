"""Scales along the columns of gate and up. They are few, so a warp fetches those of a whole tile at once, with the first step of
the tile's weights: a copy for every step would take as long as the weights' own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tvm.backend.cuda.lang.alloc_pool import SMEMPool
from tvm.tirx.script import builder as T

from .expert_steps import lines_of
from .experts import Matrix, Sizes, UpCut, up_scales
from .values import COPY_ONCE, COPY_WORD_ONCE, do, hold, put, register


class TileScales:
    """Of the tile that is multiplied and of those in the ring: a line for each weight row, or one for gate and one for up, with
    the words of all steps of the warp. A lane copies the pieces lane, lane + 32, ... of those lines.

    In this order: `begin`, `start` for the tiles that the ring is filled with; then in every tile `start` for the one after
    them, `arrived`, `of_step` for its steps, `turn`.
    """

    def __init__(self, sizes: Sizes, cut: UpCut, pool: SMEMPool, at: Any):
        self.sizes, self.cut, self.at = sizes, cut, at
        self.lines, self.each = up_scales(sizes.format)
        self.words = self.each * cut.steps
        # Of four bits' scales a warp has as many neighbours as steps. Others are fetched step by step, one may be for several.
        self.size = next(size for size in (4, 2, 1) if self.words % size == 0) if cut.beside else 1
        self.pieces = self.words // self.size
        self.addresses = -(-self.lines * self.pieces // 32)
        self.slots = cut.tiles_ahead + 1
        storage = sizes.storage
        self.line_bytes = sizes.hidden // storage.block[1] if storage and cut.groups > 1 else 0  # scales of four bits are bytes
        if self.lines:
            self.memory = pool.alloc((cut.warps, self.slots, cut.groups * self.lines, self.words), "uint32", align=16)

    def begin(self) -> None:
        if self.lines:
            self.slot = register("int32", name="scale_slot")
            put(self.slot, T.int32(0))

    def find(self, pair: Sequence[tuple[Matrix, Any]], expert: Any, target: Any, first: int) -> None:
        """Addresses of the lane's pieces in a tile. pair: (matrix, the tile's first line) of gate and of up."""
        for index in range(self.addresses):
            line, piece = self._place(index)
            half, row = (T.floordiv(line, 8), line % 8) if self.lines == 16 else (line, 0)
            step = T.floordiv(piece, self.each)
            column = (self.at.warp * self.cut.spread + (0 if self.cut.beside else step * self.cut.stride)) * self.sizes.step
            within = T.Cast("uint64", piece * (4 * self.size)) if self.cut.beside else T.uint64(0)
            gate, up = (matrix.scale(expert, begin + row, column) for matrix, begin in pair)
            put(target, T.if_then_else(T.EQ(half, 0), gate, up) + within, first + index)

    def _place(self, index: int) -> tuple[Any, Any]:
        """(line, piece of it) that the lane's `index`th is; lines beyond the last do not exist."""
        number = hold(index * 32 + self.at.lane, "int32")
        return hold(T.floordiv(number, self.pieces), "int32"), hold(T.floormod(number, self.pieces), "int32")

    def start(self, slot: Any, addresses: Any, first: int) -> None:
        """Start copying them."""
        copy = COPY_ONCE if self.size == 4 else COPY_WORD_ONCE
        for group in range(self.cut.groups):
            for index in range(self.addresses):
                line, piece = self._place(index)
                with T.If(line < self.lines), T.Then():
                    target = self.memory.ptr_to([self.at.warp, slot, group * self.lines + line, piece * self.size])
                    source = addresses[first + index]
                    if group:
                        source = source + T.uint64(group * 8 * self.line_bytes)
                    do(T.ptx[copy](target, T.reinterpret("handle", source), 4 * self.size, self.at.once))

    def last(self) -> Any:
        """The slot that is free while a tile is multiplied."""
        return T.Select(T.EQ(self.slot[0], 0), T.int32(self.slots - 1), self.slot[0] - 1)

    def arrived(self) -> None:
        """Copies of the tile's first step have; lanes have copied for each other."""
        if self.lines:
            do(T.cuda.warp_sync())

    def of_step(self, step: int) -> list[Any] | None:
        """The words with the lane's scales in gate and in up."""
        if not self.lines:
            return None
        group, step = divmod(step, self.cut.steps)
        place, scales = [self.at.warp, self.slot[0]], (self.lines, self.each)
        return lines_of(self.memory, place, scales, self.at.lane, step * self.each, group * self.lines)

    def turn(self) -> None:
        """The next tile begins."""
        if self.lines:
            put(self.slot, T.Select(T.EQ(self.slot[0], self.slots - 1), T.int32(0), self.slot[0] + 1))
