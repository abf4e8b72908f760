"""A streamed product of so few tiles that a team has one at most: a tile's columns are shared by a cluster of blocks.

Every block of a product reads x: with eight rows as many bytes from L2 as four-bit weights of a narrow layer are. A cluster's
blocks each read a part of its columns, and take more tiles for it. A tile's sums meet in the shared memory of one of them, which
finishes it: no second launch adds the parts, as it does for those of `stream`. Teams take turns in which block that is.
"""

from __future__ import annotations

from typing import Any

from tvm.backend.cuda.lang.alloc_pool import SMEMPool
from tvm.tirx.script import builder as T

from .stream import Stream
from .stream_scales import scales_for
from .values import do, hold, put, register, zeros

FIRST_STAGES = 1
"""Stages of the ring that are filled before x is asked for; others come behind it."""

AHEAD = 2
"""Steps whose weights are decoded while x is on its way."""


class JoinedStream(Stream):
    """One launch, as `Stream`: projections of up to 8 rows, without a norm."""

    def emit(self, *, settles: bool = False, **_: Any) -> None:
        cut, warps = self.cut, self.cut.teams * self.cut.warps
        with self.env.kernel(self.blocks, warps, early=True, cluster=cut.k_parts, fence=settles, once=True) as at:
            self.at = at
            do(T.ptx.barrier.cluster.arrive.release.aligned())  # of blocks that have begun
            self.team, self.warp = T.floordiv(at.warp, cut.warps), T.floormod(at.warp, cut.warps)
            self.thread = self.warp * 32 + at.lane
            pool = SMEMPool()
            self.ring = pool.alloc((warps, cut.stages, 2, 32, 4), "uint32", align=128)
            self.scales = scales_for(self, pool)
            self.shared = pool.alloc((1, cut.k_parts * warps, cut.rows * 16), "float32", align=16)
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
            for step in range(cut.stages):
                if step == FIRST_STAGES:
                    self.env.wait(release=settles)
                    self._load_x()
                with T.If(tile < self.tiles), T.Then():
                    self._copy(step, here, step)
                do(T.ptx.cp.async_.commit_group())
            ready = [self._ahead(step, here) for step in range(AHEAD)]
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
            with T.If(T.And(mine, self.thread < cut.rows * self.width)), T.Then():
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
        """Pairs of a step, of each word of both halves of the weight rows."""
        decode = self._decoded(*self._take(step, here))
        return [decode(index) for index in range(4)]

    def _steps(self, ready: list[Any], here: Any) -> None:
        """All steps of the tile."""
        cut = self.cut
        sums = [register("float32", 4, "sums") for _ in range(self._chains())]
        for chain in sums:
            zeros(chain, 4)
        for step in range(cut.steps):
            if step < len(ready):
                self._multiply_pairs(sums, ready[step].__getitem__, None, step)
                continue
            self._multiply_decoded(sums, *self._take(step, here), step)
        for chain in sums[1:]:
            for i in range(4):
                put(sums[0], sums[0][i] + chain[i], i)
        self._share(sums[0], 0)

    def _finisher(self) -> Any:
        """The part whose block finishes this team's tile."""
        return T.floormod(self.team, self.cut.k_parts)

    def _team(self) -> list[Any]:
        """Where the sums of a tile lie: those of all parts."""
        warps = self.cut.teams * self.cut.warps
        return [part * warps + warp for part in range(self.cut.k_parts) for warp in super(JoinedStream, self)._team()]

    def _share(self, sums: Any, more: int) -> None:
        """Leave the warp's sums where they are finished, as `Stream` does."""
        cut, lane = self.cut, self.at.lane
        line = self.part * (cut.teams * cut.warps) + self.at.warp
        first = lane % 4 * 32 + T.floordiv(lane, 4)
        address = register("uint32", name="there")
        window = T.cuda.cvta_generic_to_shared(self.shared.ptr_to([0, line, first]))
        do(T.ptx.mapa.shared__cluster.u32(address[0], window, T.Cast("uint32", self._finisher())))
        for i in range(4):
            with T.If(lane % 4 * 2 + i % 2 < cut.rows), T.Then():
                place = address[0] + T.uint32(4 * (i % 2 * 16 + i // 2 * 8))
                do(T.ptx["st.shared::cluster.f32"](place, sums[i]))
