"""Gate and up of the chosen experts and of the shared one: one launch, see `experts`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tvm.backend.cuda.lang.alloc_pool import SMEMPool
from tvm.tirx.script import builder as T

from .expert_groups import Groups, rank_in
from .expert_one import OneRow
from .expert_scales import TileScales
from .expert_steps import Product, Ring
from .experts import STEP_WORDS, Between, Matrix, Sizes, UpCut, Weights
from .formats import Format
from .route import Choosing, memory_views, seen_as
from .values import do, hold, load, put, register, sigmoid, silu, store, zeros

SUMS_LEFT, SUMS_READ = 1, 3
"""Numbers of barriers."""


@dataclass(frozen=True)
class _Tile:
    """place: in the list of experts, 0 for the shared one; number: among the expert's tiles; first: its first pair; count: its
    rows."""

    index: Any
    of_shared: Any
    place: Any
    number: Any
    first: Any
    count: Any


class Up:
    """One launch. x: [rows, hidden / 2] words, logits: [rows, experts] float32, gate: [rows, 1] float32 of the shared expert's
    gate before its sigmoid, or None."""

    def __init__(
        self,
        env: Any,
        sizes: Sizes,
        cut: UpCut,
        format: Format,
        choosing: Choosing,
        weights: Weights,
        between: Between,
        alone: bool,
    ):
        """alone: one row, whose experts are chosen by whole blocks."""
        self.env, self.sizes, self.cut, self.format = env, sizes, cut, format
        self.choosing, self.weights, self.between, self.alone = choosing, weights, between, alone
        self.high = cut.groups * 8  # rows of gate, and of up, in a tile
        self.shared_tiles, self.expert_tiles = sizes.shared // self.high, sizes.inner // self.high
        self.tiles_ahead = cut.tiles_ahead
        self.later = format.scaled == "numbers" and sizes.rows <= 8 and cut.buffers == 2 and cut.warps > 2
        self.blocks = min(env.processors, self.shared_tiles + sizes.most * self.expert_tiles)

    def emit(self, x: Any, logits: Any, gate: Any) -> None:
        sizes, cut = self.sizes, self.cut
        self.x, self.gate = x, gate
        # `Down` reads the list before it waits, so it starts only when that is there.
        with self.env.kernel(self.blocks, cut.warps, early=True, fence=True, once=True) as at:
            self.at, self.thread = at, hold(at.warp * 32 + at.lane, "int32", "thread")
            pool = SMEMPool()
            self.ring, self.product = Ring(pool, cut.warps, cut.stages, 0, at), Product(self.format, at.lane, sizes.rows)
            self.scales = TileScales(sizes, cut, pool, at)
            self.addresses = 2 + self.scales.addresses
            words = cut.scratch_words(sizes, self.choosing.words)
            memory = pool.alloc((words,), "uint32", align=16)
            self.groups = Groups(sizes, pool, cut.warps)
            one = OneRow(self.choosing, pool, cut.warps) if self.alone else None
            pool.commit()
            keys, scores = memory_views(memory, words)
            shape = (cut.buffers, cut.warps, cut.groups * sizes.rows * 16)
            self.shared = seen_as(memory, shape, "float32")
            self.column = hold(at.warp * (sizes.step * cut.spread) + at.lane % 4 * (sizes.step // 4), "int32", "column")
            self.word = hold(at.warp * (STEP_WORDS * cut.spread) + at.lane % 4 * 4, "int32", "word")
            self.tile, self.turn, self.ring_turn = (register("int32", name=name) for name in ("tile", "turn", "ring_turn"))
            put(self.tile, at.block)
            put(self.turn, T.int32(0))
            put(self.ring_turn, T.int32(0))
            self.scales.begin()
            here, ahead = (register("uint64", self.addresses, name) for name in ("here", "ahead"))
            for number in range(self.tiles_ahead if self.shared_tiles else 0):
                tile = self.tile[0] + number * self.blocks
                with T.If(tile < self.shared_tiles), T.Then():
                    self._find_shared(tile, here)
                    self._fill(number, here)
            if one is None:
                self.groups.clear(self.thread)
            self.env.wait()
            if cut.resident:
                self._load_x()
            if one:
                self.groups.list_one(one, logits, at)
            else:
                self.groups.choose(self.choosing, logits, keys, scores, at)
                self.groups.gather(at)
            with T.If(T.EQ(at.block, self.blocks - 1)), T.Then():  # which has the fewest tiles
                self.groups.publish(self.between.listed, self.thread)
            self.env.release()
            self.tiles = hold(self.groups.total[0] * self.expert_tiles + self.shared_tiles, "int32", "tiles")
            for number in range(self.tiles_ahead):
                tile = hold(self.tile[0] + number * self.blocks, "int32")
                listed = T.And(tile >= self.shared_tiles, tile < self.tiles)
                with T.If(listed), T.Then():
                    self._find_listed(tile, here)
                self._fill(number, here, listed)
            if cut.all_steps > cut.stages:
                self._find(self.tile[0], here)
            if self.later:
                self._begin_turns()
            with T.While(self.tile[0] < self.tiles):
                self._find(hold(self.tile[0] + self.tiles_ahead * self.blocks, "int32", "far"), ahead)
                self._tile(here, ahead)
                if cut.all_steps > cut.stages:
                    for index in range(self.addresses):
                        put(here, ahead[index], index)
                put(self.tile, self.tile[0] + self.blocks)
            if self.later:
                self._finish_before(self._factors_before())

    # -- weights -----------------------------------------------------------------------------------------------

    def _find(self, tile: Any, target: Any) -> None:
        """Addresses of the lane's pieces of a tile's first step, in gate and in up; of no tile, none."""
        if self.shared_tiles:
            with T.If(tile < self.shared_tiles), T.Then():
                self._find_shared(tile, target)
        with T.If(T.And(tile >= self.shared_tiles, tile < self.tiles)), T.Then():
            self._find_listed(tile, target)

    def _find_shared(self, tile: Any, target: Any) -> None:
        row = hold(tile * self.high + T.floordiv(self.at.lane, 4), "int32")
        self._find_pair(self._lines(None, row), None, target)
        self.scales.find(self._lines(None, tile * self.high), None, target, 2)

    def _lines(self, expert: Any, row: Any) -> list[tuple[Matrix, Any]]:
        """(matrix, line) of a row of gate and of up, of the shared expert without one."""
        if expert is None:
            return [(weight, row) for weight in self.weights.shared[:2]]  # type: ignore[index]
        gate, up = self.weights.gate, self.weights.up
        return [(gate, row), (gate, row + self.sizes.inner) if up is None else (up, row)]

    def _find_pair(self, pair: Any, expert: Any, target: Any) -> None:
        """Addresses of (matrix, line) of both halves."""
        for half, (matrix, line) in enumerate(pair):
            put(target, matrix.piece(expert, line, self.word), half)

    def _place_of(self, tile: Any) -> tuple[Any, Any]:
        """(place in the list, number among the expert's tiles) of a routed expert's tile."""
        tile = hold(tile - self.shared_tiles, "int32")
        return hold(T.floordiv(tile, self.expert_tiles), "int32"), hold(T.floormod(tile, self.expert_tiles), "int32")

    def _find_listed(self, tile: Any, target: Any) -> None:
        place, number = self._place_of(tile)
        expert = hold(self.groups.expert[place], "int32")
        row = hold(number * self.high + T.floordiv(self.at.lane, 4), "int32")
        self._find_pair(self._lines(expert, row), expert, target)
        self.scales.find(self._lines(expert, number * self.high), expert, target, 2)

    def _fill(self, number: int, addresses: Any, late: Any = None) -> None:
        """Start all copies of the `number`th tile that the ring holds at first; `late`: where that holds, a group each stage.
        What was copied before is in the first group."""
        for stage in range(self.cut.stages):
            tile, step = divmod(stage, self.cut.all_steps)
            if tile != number:
                continue
            if late is None:
                self._begin_copy(stage, addresses, step, number)
                continue
            with T.If(late), T.Then():
                self._begin_copy(stage, addresses, step, number)
            do(T.ptx.cp.async_.commit_group())

    def _begin_copy(self, slot: int, addresses: Any, step: int, number: int) -> None:
        if step == 0:
            self.scales.start(number, addresses, 2)
        self._copy(slot, addresses, step)

    def _copy(self, slot: Any, addresses: Any, step: int) -> None:
        group, step = divmod(step, self.cut.steps)
        line = self.sizes.hidden // self.format.columns  # words
        self.ring.copy(slot, addresses, 4 * (group * 8 * line + step * self.cut.stride * STEP_WORDS))

    # -- a tile ------------------------------------------------------------------------------------------------

    def _tile_at(self, index: Any) -> _Tile:
        of_shared = index < self.shared_tiles
        place, number = self._place_of(index)
        place = hold(T.Select(of_shared, T.int32(0), place), "int32")
        first = hold(T.Select(of_shared, T.int32(self.sizes.pairs), self.groups.first[place]), "int32", "first")
        count = hold(T.Select(of_shared, T.int32(self.sizes.rows), self.groups.count[place]), "int32", "count")
        return _Tile(index, of_shared, place, number, first, count)

    def _tile(self, here: Any, ahead: Any) -> None:
        cut, sizes, tile = self.cut, self.sizes, self._tile_at(self.tile[0])
        sums = self._zeros()
        if not cut.resident:
            self._find_rows(tile.first, tile.count)
        far = hold(self.tile[0] + self.tiles_ahead * self.blocks, "int32")
        x = self._row_words(0, 0) if not cut.resident else []
        factors = self._factors_before() if self.later else self._factors(tile, self.thread < cut.groups * sizes.rows * 8)
        if self.scales.addresses:
            with T.If(far < self.tiles), T.Then():
                self.scales.start(self.scales.last(), ahead, 2)
        steps = cut.all_steps
        for step in range(steps):
            slot = step % cut.stages if cut.stages <= steps else hold(self.ring_turn[0] * steps + step, "int32")
            do(T.ptx.cp.async_.wait_group(cut.stages - 1))
            if step == 0:
                self.scales.arrived()
            self.product.take(self.ring.read(slot), self.scales.of_step(step))
            if self.product.one_row and not cut.resident:
                now, x = x, self._row_words(0, step + 1) if step + 1 < cut.steps else []
                self.product.multiply_all(sums, [now])
            elif cut.resident:
                self.product.multiply_all(sums, [self._fragment(block, step % cut.steps) for block in range(sizes.row_blocks)])
            else:
                self.product.decode()
                now, x = x, self._row_words(0, step + 1) if step + 1 < cut.steps else []
                self.product.multiply(sums, 0, now)
                for block in range(1, sizes.row_blocks):
                    with T.If(block * 8 < tile.count), T.Then():
                        self.product.multiply(sums, block, self._row_words(block, step))
            later = step + cut.stages
            if later < steps:
                self._copy(slot, here, later)
            else:
                with T.If(far < self.tiles), T.Then():
                    self._copy(slot, ahead, later % steps if cut.stages <= steps else step)
            do(T.ptx.cp.async_.commit_group())
            if (step + 1) % cut.steps == 0 and step + 1 < steps:
                self._leave(sums, tile.count, step // cut.steps)
                sums = self._zeros()
        if cut.stages > steps:
            following = self.ring_turn[0] + 1
            put(self.ring_turn, T.Select(T.EQ(following, self.tiles_ahead), T.int32(0), following))
        self._leave(sums, tile.count, cut.groups - 1)
        if self.later:
            self._finish_before(factors)
            put(self.before, self.tile[0])
            put(self.rank, T.Select(T.EQ(self.rank[0], cut.warps - 1), T.int32(0), self.rank[0] + 1))
        else:
            do(T.cuda.cta_sync())
            self._finish(tile, factors, self.turn[0], self.thread, cut.warps * 32)
        self.scales.turn()
        if cut.buffers == 1:
            do(T.cuda.cta_sync())
        else:
            put(self.turn, T.bitwise_xor(self.turn[0], 1))

    # -- finishing a tile later: no warp waits for the others but the one whose turn it is, after its steps of the next tile ---

    def _begin_turns(self) -> None:
        """before: the tile to finish, -1 for none; rank: how many tiles ago it was the warp's turn."""
        self.before, self.rank = (register("int32", name=name) for name in ("before", "rank"))
        put(self.before, T.int32(-1))
        put(self.rank, T.Select(T.EQ(self.at.warp, 0), T.int32(0), self.cut.warps - self.at.warp))

    def _barrier(self, kind: Any, first: int, turn: Any) -> None:
        """Of all warps, first: `SUMS_LEFT` or `SUMS_READ`; each has one for either half of the sums' memory."""
        do(kind(T.Cast("uint32", turn + first), T.uint32(self.cut.warps * 32)))

    def _leave(self, sums: Any, count: Any, group: int) -> None:
        """Share the sums of a group of a tile's rows."""
        self.product.gather(sums)
        if self.later and group == 0:  # the tile before the last has been finished, perhaps by this warp
            with T.If(T.And(self.tile[0] >= 2 * self.blocks, T.Not(T.EQ(self.rank[0], 2)))), T.Then():
                self._barrier(T.ptx.bar.sync, SUMS_READ, self.turn[0])
        self._share(sums, count, group)
        if self.later and group == self.cut.groups - 1:
            with T.If(T.Not(T.EQ(self.rank[0], 0))), T.Then():
                self._barrier(T.ptx.bar.arrive, SUMS_LEFT, self.turn[0])

    def _turn_before(self) -> Any:
        return T.And(self.before[0] >= 0, T.EQ(self.rank[0], 1))

    def _factors_before(self) -> list[Any] | None:
        return self._factors(self._tile_at(T.max(self.before[0], 0)), self._turn_before()) if self._has_factors() else None

    def _finish_before(self, factors: list[Any] | None) -> None:
        """Finish the tile before, if it is this warp's turn."""
        with T.If(self._turn_before()), T.Then():
            turn = T.bitwise_xor(self.turn[0], 1)
            self._barrier(T.ptx.bar.sync, SUMS_LEFT, turn)
            self._finish(self._tile_at(self.before[0]), factors, turn, self.at.lane, 32)
            self._barrier(T.ptx.bar.arrive, SUMS_READ, turn)

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
                    for i, word in enumerate(self._ordered(self._fragment(block, step))):
                        put(self.fragments, word, (block * cut.steps + step) * each + i)

    def _load_words(self, targets: list[Any], row: Any, step: int) -> None:
        word = T.floordiv(self.column, 2) + step * self.cut.stride * (self.sizes.step // 2)
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
        return self._ordered(targets)

    def _ordered(self, x: list[Any]) -> list[Any]:
        ordered = self.product.order(x)
        return self.product.owned(ordered) if self.product.one_row else ordered

    def _zeros(self) -> Any:
        sums = register("float32", self.sizes.row_blocks * 4, "sums")
        zeros(sums, self.sizes.row_blocks * 4)
        return sums

    def _share(self, sums: Any, count: Any, group: int) -> None:
        """Leave the warp's sums as [group][row or rank][gate or up]."""
        most = self.sizes.rows
        for block in range(self.sizes.row_blocks):
            for i in range(4):
                row = hold(block * 8 + self.at.lane % 4 * 2 + i % 2, "int32")
                place = (group * most + row) * 16 + T.floordiv(self.at.lane, 4) + i // 2 * 8
                limit = most if self.cut.resident else count
                with T.If(row < limit), T.Then():
                    T.buffer_store(self.shared, sums[block * 4 + i], [self.turn[0], self.at.warp, place])

    def _has_factors(self) -> bool:
        return self.weights.gate.scales is not None and bool(self.sizes.storage.whole or not self.format.scaled)  # type: ignore[union-attr]

    def _factors(self, tile: _Tile, mine: Any) -> list[Any] | None:
        """What the sums of the thread's column in gate and in up are multiplied by, None where that is nothing; asked for
        before a tile is multiplied. mine: does the thread finish some?"""
        if not self._has_factors():
            return None
        found = [register("float32", name="factor") for _ in range(2)]

        def of(expert: Any, row: Any) -> None:
            for target, (matrix, line) in zip(found, self._lines(expert, row), strict=True):
                put(target, matrix.factor(expert, line))

        with T.If(mine), T.Then():
            if self.shared_tiles:
                with T.If(tile.of_shared), T.Then():
                    of(None, tile.index * self.high + self.thread % 8)
            with T.If(T.Not(tile.of_shared)), T.Then():
                of(hold(self.groups.expert[tile.place], "int32"), tile.number * self.high + self.thread % 8)
        return [target[0] for target in found]

    def _finish(self, tile: _Tile, factors: list[Any] | None, turn: Any, thread: Any, threads: int) -> None:
        """share * silu(gate) * up of the expert's rows."""
        sizes, cut = self.sizes, self.cut
        for chunk in range(-(-cut.groups * sizes.rows * 8 // threads)):
            line = hold(T.floordiv(thread + chunk * threads, 8), "int32", "item")
            group, item = (0, line) if cut.groups == 1 else (T.floordiv(line, sizes.rows), T.floormod(line, sizes.rows))
            column = thread % 8
            place = group * 8 + self.product.place(column)
            if cut.resident:
                words = [hold(self.groups.rows[tile.place, i], "uint32") for i in range(sizes.mask_words)]
                rank, bit = rank_in(words, hold(T.min(item, T.int32(sizes.rows - 1)), "int32"))
                mine = T.And(line < cut.groups * sizes.rows, T.Or(tile.of_shared, bit > T.uint32(0)))
            else:
                rank, mine = item, item < tile.count
            with T.If(mine), T.Then():
                totals = [register("float32", name=name) for name in ("gate", "up")]
                for matrix, total in enumerate(totals):
                    put(total, T.float32(0))
                    for warp in range(cut.warps):
                        put(total, total[0] + self.shared[turn, warp, line * 16 + matrix * 8 + column])
                gate, up = (total[0] if self.product.factor == 1 else total[0] * self.product.factor for total in totals)
                if factors:
                    gate, up = (hold(total * factor) for total, factor in zip((gate, up), factors, strict=True))
                value = hold(silu(hold(gate)) * up)
                if self.product.one_row:  # `Down` takes it so
                    value = hold(value * self.format.lift)
                if self.shared_tiles:
                    with T.If(tile.of_shared), T.Then():
                        scaled = value
                        if self.gate is not None:
                            scaled = hold(value * sigmoid(load(self.gate, [item, 0])))
                        store(self.between.shared_elements, [item, tile.index * self.high + place], scaled)
                with T.If(T.Not(tile.of_shared)), T.Then():
                    pair = hold(tile.first + rank, "int32")
                    shared = hold(value * self.groups.share[pair])
                    store(self.between.made_elements, [pair, tile.number * self.high + place], shared)
