"""A streamed product of so few tiles that a team has one at most: a tile's columns are shared by a cluster of blocks.

Every block of a product reads x: with eight rows as many bytes from L2 as four-bit weights of a narrow layer are. A cluster's
blocks each read a part of its columns, and take more tiles for it. A tile's sums meet in the shared memory of one of them, which
finishes it: no second launch adds the parts, as it does for those of `stream`. Teams take turns in which block that is.
"""

from __future__ import annotations

from typing import Any

from tvm.backend.cuda.lang.alloc_pool import SMEMPool
from tvm.tirx.script import builder as T

from . import one_row
from .stream import Stream
from .stream_scales import scales_for
from .values import do, hold, put, register, zeros

AHEAD = 2
"""Steps whose weights are decoded while x is on its way."""


class JoinedStream(Stream):
    """One launch, as `Stream`; without a norm, of projections."""

    def emit(self, **_: Any) -> None:
        cut, warps = self.cut, self.cut.teams * self.cut.warps
        with self.env.kernel(self.blocks, warps, early=True, cluster=cut.k_parts, once=True) as at:
            self.at = at
            do(T.ptx.barrier.cluster.arrive.release.aligned())  # of blocks that have begun
            self.team, self.warp = T.floordiv(at.warp, cut.warps), T.floormod(at.warp, cut.warps)
            self.thread = self.warp * 32 + at.lane
            pool = SMEMPool()
            self.ring = pool.alloc((warps, cut.stages, 2, 32, 4), "uint32", align=128)
            self.scales = scales_for(self, pool)
            self.shared = pool.alloc((1, cut.k_parts * warps, cut.together * cut.rows * 16), "float32", align=16)
            self.x_shared = pool.alloc((cut.x_columns // cut.step, 4, cut.x_pitch), "uint32", align=128)
            pool.commit()
            self.part = hold(T.floormod(at.block, cut.k_parts), "int32")
            self.word = hold(self._shared_word(), "int32")
            self.weight_word = hold(self._word(self.format.columns), "int32")
            self.turn = 0
            tile = hold(self._first_tile(T.floordiv(at.block, cut.k_parts)), "int32", "tile")
            here = register("uint64", 2, "here")
            self._find(tile, here)
            if self.scales:
                self.scales.begin(tile)
            for step in range(cut.first_stages):
                self._fill(step, tile, 0, here, here)
            self.env.wait()
            self._load_x()
            for step in range(cut.first_stages, cut.stages):
                self._fill(step, tile, 0, here, here)
            ready = [self._ahead(step, here) for step in range(0 if self.one_row else AHEAD)]
            self._order_x()
            self._share_x()
            do(T.cuda.cta_sync())
            factors = self._factors(tile, 0)
            do(T.ptx.barrier.cluster.wait.acquire.aligned())
            with T.If(tile < self.tiles), T.Then():
                self._steps(ready, here)
            do(T.ptx.barrier.cluster.arrive.release.aligned())
            do(T.ptx.barrier.cluster.wait.acquire.aligned())
            mine = T.And(tile < self.tiles, T.EQ(self.part, self._finisher()))
            with T.If(T.And(mine, self.thread < cut.together * cut.rows * self.width)), T.Then():
                sums = self._sums()
                if factors is not None:
                    sums = [hold(total * factor) for total, factor in zip(sums, factors, strict=True)]
                self._finish(tile, 0, sums, None, None, None)

    def _take(self, step: int, here: Any) -> tuple[Any, list[Any] | None]:
        """Weights of a step, whose slot is filled again, and their scales."""
        cut, at, piece = self.cut, self.at, register("uint32", 8, "weights")
        do(T.ptx.cp.async_.wait_group(cut.stages - 1))
        for half in range(2):
            with T.vectorized(0, 4) as v:
                T.buffer_store(piece, self.ring[at.warp, step % cut.stages, half, at.lane, v], [half * 4 + v])
        words = self.scales.of_step(0, step) if self.scales else None
        if step + cut.stages < cut.steps:
            self._copy(step % cut.stages, here, step + cut.stages)
        do(T.ptx.cp.async_.commit_group())
        return piece, words

    def _ahead(self, step: int, here: Any) -> list[tuple[list[Any], list[Any]]]:
        decode = self._decoded(*self._take(step, here))
        return [decode(index) for index in range(4)]

    def _steps(self, ready: list[Any], here: Any) -> None:
        """All steps of the tile."""
        cut = self.cut
        sums = [register("float32", cut.row_blocks * 4, "sums") for _ in range(self._chains())]
        for chain in sums:
            zeros(chain, cut.row_blocks * 4)
        for step in range(cut.steps):
            if step < len(ready):
                self._multiply_pairs(sums, ready[step].__getitem__, None, step)
                continue
            piece, words = self._take(step, here)
            if self.one_row:
                one_row.multiply(self.format, self.at.lane, sums[0], [piece[i] for i in range(8)], words, self._x_owned(step))
            else:
                self._multiply_decoded(sums, piece, words, step)
        for chain in sums[1:]:
            for i in range(cut.row_blocks * 4):
                put(sums[0], sums[0][i] + chain[i], i)
        if self.one_row:
            one_row.gather(sums[0], self.at.lane)
        self._share(sums[0], 0)

    def _finisher(self) -> Any:
        """The part whose block finishes this team's tile."""
        return T.floormod(self.team, self.cut.k_parts)

    def _team(self) -> list[Any]:
        """Where the sums of a tile lie: those of all parts."""
        warps = self.cut.teams * self.cut.warps
        return [part * warps + warp for part in range(self.cut.k_parts) for warp in super(JoinedStream, self)._team()]

    def _share(self, sums: Any, more: int) -> None:
        cut, lane = self.cut, self.at.lane
        line = self.part * (cut.teams * cut.warps) + self.at.warp
        first = lane % 4 * 32 + T.floordiv(lane, 4) + more * cut.rows * 16
        address = register("uint32", name="there")
        window = T.cuda.cvta_generic_to_shared(self.shared.ptr_to([0, line, first]))
        do(T.ptx.mapa.shared__cluster.u32(address[0], window, T.Cast("uint32", self._finisher())))
        for block in range(cut.row_blocks):
            for i in range(4):
                place = address[0] + T.uint32(4 * (block * 128 + i % 2 * 16 + i // 2 * 8))
                if block * 8 + 8 <= cut.rows:
                    do(T.ptx["st.shared::cluster.f32"](place, sums[block * 4 + i]))
                else:
                    with T.If(block * 8 + lane % 4 * 2 + i % 2 < cut.rows), T.Then():
                        do(T.ptx["st.shared::cluster.f32"](place, sums[block * 4 + i]))
