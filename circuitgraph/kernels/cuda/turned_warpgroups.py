"""`warpgroups` with x as the 64 rows of a `wgmma` and weights as its other side: for 64 or 128 rows of x, or a few less.

A tile may then have any multiple of 8 weight rows, so that tiles divide among the processors. Two warpgroups multiply: of 128
rows each has 64, of 64 each has all, and half of the weights. A thread has many columns of two rows, so it keeps the best of a
head for itself until the last tile is done, and stores columns side by side together.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tvm.tirx.script import builder as T

from .latent import power_of_two
from .plain import NOTHING, Logits, Partials
from .values import LOG2_E, LOWEST, do, dtype_of, hold, load, put, register, store
from .warpgroups import KINDS, UNIT, WarpgroupTile, WarpgroupTiles, beside, merged

FLOOR = LOWEST / 2
"""What logits are relative to, at least: `LOWEST` beside it counts nothing."""
GROUP = 8
"""Columns of a `wgmma` of which four lanes have two each."""


@dataclass(frozen=True)
class TurnedTile(WarpgroupTile):
    """height: weight rows. rows: 64 or 128. units: warpgroups, 2."""

    height: int = 0

    @property
    def weights(self) -> int:
        return self.height

    @property
    def sides(self) -> int:
        """Warpgroups that share the weights of a tile."""
        return self.units * UNIT // self.rows

    @property
    def across(self) -> int:
        return self.height // self.sides


class TurnedWarpgroups(WarpgroupTiles):
    """One launch, see `WarpgroupTiles`."""

    tile: TurnedTile

    def _matrices(self) -> tuple[Any, Any]:
        """Where the warpgroup's rows of x and its weights lie in the first slot."""
        lines = (self.tile.weights + self._row_group() * UNIT, self._side() * self.tile.across)
        return self.ring.ptr_to([0, lines[0], 0, 0]), self.ring.ptr_to([0, lines[1], 0, 0])

    def _row_group(self) -> Any:
        """Which 64 rows the warpgroup has."""
        return T.int32(0) if self.tile.sides > 1 else T.floordiv(self.at.warp, 4)

    def _side(self) -> Any:
        """Which part of the tile's weights it has."""
        return T.int32(0) if self.tile.sides == 1 else T.floordiv(self.at.warp, 4)

    def _row(self, half: int) -> Any:
        """Within the tile: one of a thread's two rows."""
        return self._row_group() * UNIT + self.at.warp % 4 * 16 + T.floordiv(self.at.lane, 4) + half * 8

    def _rows_of_thread(self) -> list[tuple[Any, Any]]:
        """(row, is it there, or None for yes) of both."""
        rows = [hold(self.first_row + self._row(half), "int32", "row") for half in range(2)]
        partly = self.rows % self.tile.rows
        return [(row, hold(T.Cast("int32", row < self.rows), "int32") if partly else None) for row in rows]

    def _columns_of(self, place: Any, group: int) -> Any:
        """The first of a thread's two columns in a group, of all matrices alike."""
        width = self._side() * (self.tile.across // self.matrices) + group * GROUP + self.at.lane % 4 * 2
        return hold(place * self.width + width, "int32", "column")

    def _sums_of(self, group: int, half: int, item: int) -> list[Any]:
        """Those that meet in one element: of groups side by side."""
        return [self.sums[(group * self.matrices + matrix) * 4 + half * 2 + item] for matrix in range(self.matrices)]

    # -- results of elements -----------------------------------------------------------------------------------

    def _finish(self, place: Any) -> None:
        rows = self._rows_of_thread()
        for group in range(self.each // 4 // self.matrices):
            column, first = self._columns_of(place, group), 0
            for projection in self.projections:
                within = hold(column - first, "int32")
                with T.If(T.And(within >= 0, within < projection.columns)), T.Then():
                    elements = [
                        (visible, row, hold(within + item, "int32"), self._sums_of(group, half, item))
                        for half, (row, visible) in enumerate(rows)
                        for item in range(2)
                    ]
                    self._finish_all(projection, elements)
                first += projection.columns

    def _store_all(self, elements: list[Any], made: list[list[tuple[Any, Any]]]) -> None:
        """Columns side by side together."""
        if len(made) % 2 or any(dtype_of(target) == "float32" for target, _ in made[0]) or self.tile.parts > 1:
            return super()._store_all(elements, made)
        for (visible, row, column, _), *pair in zip(elements[::2], made[::2], made[1::2], strict=True):
            with T.If(T.bool(True) if visible is None else visible > 0), T.Then():
                for (target, low), (_, high) in zip(*pair, strict=True):
                    kind, word = "bf16" if dtype_of(target) == "bfloat16" else "f16", register("uint32")
                    do(T.ptx[f"cvt.rn.{kind}x2.f32"](word[0], high, low))
                    do(T.ptx["st.global.b32"](target.ptr_to([row, column]), word[0]))

    def _leave(self, sums: Any, part: Any, place: Any) -> None:
        rows = self._rows_of_thread()
        for group in range(self.each // 4 // self.matrices):
            column = self._columns_of(place, group)
            with T.If(column < self.columns), T.Then():
                for half, (row, visible) in enumerate(rows):
                    pairs = list(zip(*(self._sums_of(group, half, item) for item in range(2)), strict=True))
                    with T.If(T.bool(True) if visible is None else visible > 0), T.Then():
                        for matrix, pair in enumerate(pairs):
                            target = sums.ptr_to([part, row, column + matrix * self.columns])
                            do(T.ptx["st.global.v2.f32"](target, *pair))

    # -- the best of a head ------------------------------------------------------------------------------------

    def _reset_best(self) -> None:
        """Of a thread's columns of its two rows."""
        self.best, self.total = register("float32", 2, "best"), register("float32", 2, "total")
        self.index = register("int32", 2, "index")
        for half in range(2):
            put(self.best, T.float32(LOWEST), half)
            put(self.total, T.float32(0), half)
            put(self.index, T.int32(NOTHING), half)

    def _take(self, place: Any, logits: Logits) -> None:
        """A tile's logits into the running best."""
        (head,) = self.projections
        first = self._columns_of(place, 0)
        if logits.bias is not None:
            self._add_bias(first, logits.bias)
        for index in range(self.each):  # NaN is no choice
            put(self.sums, T.max(self.sums[index], T.float32(LOWEST)), index)
        if head.columns % self.width:
            with T.If((place + 1) * self.width > head.columns), T.Then():
                for index in range(self.each):
                    outside = first + (index // 4 * GROUP + index % 2) >= head.columns
                    put(self.sums, T.Select(outside, T.float32(LOWEST), self.sums[index]), index)
        for half in range(2):
            self._take_row(first, half)

    def _take_row(self, first: Any, half: int) -> None:
        mine = [(index, index // 4 * GROUP + index % 2) for index in range(self.each) if index % 4 // 2 == half]
        tops = [register("float32") for _ in range(2)]
        for top in tops:
            put(top, T.float32(LOWEST))
        for number, (index, _) in enumerate(mine):
            put(tops[number % 2], T.max(tops[number % 2][0], self.sums[index]))
        top = hold(T.max(tops[0][0], tops[1][0]))
        best = hold(T.max(top, self.best[half]))
        base = hold(T.max(best, T.float32(FLOOR)))
        shrink = power_of_two((T.max(self.best[half], T.float32(FLOOR)) - base) * T.float32(LOG2_E))
        below = hold(T.float32(0) - base * T.float32(LOG2_E))
        totals = [register("float32") for _ in range(2)]
        put(totals[0], self.total[half] * shrink)
        put(totals[1], T.float32(0))
        for number, (index, _) in enumerate(mine):
            relative = register("float32")
            do(T.ptx["fma.rn.f32"](relative[0], self.sums[index], T.float32(LOG2_E), below))
            put(totals[number % 2], totals[number % 2][0] + power_of_two(relative[0]))
        put(self.total, totals[0][0] + totals[1][0], half)
        with T.If(top > self.best[half]), T.Then():
            found = register("int32")
            put(found, T.int32(0))
            for index, column in reversed(mine):  # the lowest column wins a tie
                put(found, T.Select(T.EQ(self.sums[index], top), T.int32(column), found[0]))
            put(self.index, first + found[0], half)
        put(self.best, best, half)

    def _add_bias(self, first: Any, bias: Any) -> None:
        (head,) = self.projections
        for index in range(self.each // 2):
            column = hold(T.min(first + (index // 2 * GROUP + index % 2), T.int32(head.columns - 1)), "int32")
            value = load(bias, [column], constant=True)
            for half in range(2):
                at = index // 2 * 4 + half * 2 + index % 2
                put(self.sums, self.sums[at] + value, at)

    def _join_best(self, partials: Partials, block: Any) -> None:
        """The best of four lanes, and of both warpgroups that have the same rows."""
        tile = self.tile
        size = tile.sides * tile.rows
        made = [
            T.decl_buffer((tile.sides, tile.rows), dtype, data=self.memory.data, elem_offset=offset * size, scope="shared.dyn")
            for offset, dtype in enumerate(KINDS)
        ]
        self._sync()
        for half in range(2):
            state = (self.best[half], self.index[half], self.total[half])
            for step in (1, 2):
                state = merged(state, beside(state, step))
            with T.If(self.at.lane % 4 < 1), T.Then():
                for buffer, value in zip(made, state, strict=True):
                    T.buffer_store(buffer, value, [self._side(), self._row(half)])
        self._sync()
        with T.If(T.And(self.thread < tile.rows, self.first_row + self.thread < self.rows)), T.Then():
            states = [
                tuple(hold(buffer[side, self.thread], dtype) for buffer, dtype in zip(made, KINDS, strict=True))
                for side in range(tile.sides)
            ]
            state = merged(*states) if len(states) > 1 else states[0]  # type: ignore[arg-type]
            for buffer, value in zip((partials.best, partials.index, partials.total), state, strict=True):
                store(buffer, [block, self.first_row + self.thread], value)
