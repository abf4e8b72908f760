"""Down of the chosen experts and of the shared one, and their sums: one launch, see `experts`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tvm.backend.cuda.lang.alloc_pool import SMEMPool
from tvm.tirx.script import builder as T

from .expert_groups import rank_in
from .expert_steps import Product, Ring
from .experts import STEP_WORDS, Between, DownCut, Sizes, Weights, down_scales
from .formats import Format
from .route import ALL
from .values import do, hold, load, put, register, zeros


class Cursor:
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

    def __init__(
        self,
        env: Any,
        sizes: Sizes,
        cut: DownCut,
        format: Format,
        weights: Weights,
        between: Between,
    ):
        self.env, self.sizes, self.cut, self.format, self.weights, self.between = env, sizes, cut, format, weights, between
        self.tiles = sizes.hidden // 16
        self.shared_units, self.expert_units = sizes.shared // sizes.step, sizes.inner // sizes.step
        self.factors = cut.factors(sizes)
        self.has_wholes = weights.down.scales is not None and weights.down.scales.whole is not None
        self.blocks = min(env.processors, self.tiles)

    def emit(self, finish: Callable[[Any, Any, list[Any]], None]) -> None:
        cut = self.cut
        with self.env.kernel(self.blocks, cut.warps, early=True, once=True) as at:
            self.at, self.thread = at, hold(at.warp * 32 + at.lane, "int32", "thread")
            pool = SMEMPool()
            self.product = Product(self.format, at.lane, self.sizes.rows)
            self._allocate(pool)
            pool.commit()
            names = ("tile", "ahead_tile", "slot")
            self.tile, self.ahead_tile, self.slot = (register("int32", name=name) for name in names)
            self.here, self.ahead = self._cursors()
            put(self.tile, at.block)
            put(self.slot, T.int32(0))
            addresses = register("uint64", 2, "source")
            self._begin(addresses)
            with T.While(self.tile[0] < self.tiles):
                self._tile(addresses)
                if cut.kept == 1:
                    do(T.cuda.cta_sync())
                    self._finish(finish, self.tile[0])
                    do(T.cuda.cta_sync())
                put(self.tile, self.tile[0] + self.blocks)
            if cut.kept > 1:
                do(T.cuda.cta_sync())
                self._finish(finish, at.block)

    def _allocate(self, pool: SMEMPool) -> None:
        sizes, cut = self.sizes, self.cut
        self.ring = Ring(pool, cut.warps, cut.stages, self.factors, self.at, down_scales(self.format))
        self.shared = pool.alloc((cut.kept, cut.warps, sizes.rows * 16), "float32", align=16)
        self.listed = pool.alloc((sizes.most, 4), "int32", align=16)
        self.wholes = pool.alloc((sizes.experts + 1,), "float32", align=16) if self.has_wholes else None

    def _cursors(self) -> tuple[Any, Any]:
        """Of what is multiplied, and of what is copied."""
        return Cursor(self, "place", "step"), Cursor(self, "ahead_place", "ahead_step")

    def _begin(self, addresses: Any) -> None:
        """Fill the ring before the wait, the shared expert's weights before the list is there."""
        cut, at = self.cut, self.at
        self._ask_for_list()
        for stage in range(cut.stages if self.shared_units else 0):
            unit = hold(at.warp + stage * cut.warps, "int32")
            with T.If(unit < self.shared_units), T.Then():
                self._start_weights(stage, None, self.tile[0], unit, addresses)
        self._fetch_wholes()
        self._enter_list()
        self._each_stage(lambda stage: self._start(stage, addresses, T.EQ(self.ahead_tile[0], at.block), factors=False))
        self.env.wait()
        self._each_stage(lambda stage: self._start(stage, addresses, weights=False), commit=True)

    def _each_stage(self, body: Callable[[int], None], *, commit: bool = False) -> None:
        """body(stage) for the steps that the ring holds at first, the copying cursor at each."""
        put(self.ahead_tile, self.at.block)
        self.ahead.begin()
        for stage in range(self.cut.stages):
            with T.If(T.And(self.ahead_tile[0] < self.tiles, self.ahead.inside)), T.Then():
                body(stage)
            if commit:
                do(T.ptx.cp.async_.commit_group())
            self._advance()

    def _enter_list(self) -> None:
        def enter(place: Any, words: Any) -> None:
            for index in range(4):
                T.buffer_store(self.listed, words[index], [place, index])

        self._each_listed(enter)
        self.total = self.total[0]

    def _ask_for_list(self) -> None:
        """The list is there before this kernel starts, though not all that `Up` makes: so it comes from L2."""
        sizes, threads = self.sizes, self.cut.warps * 32
        self.total = register("int32", name="chosen_experts")
        do(T.ptx["ld.relaxed.gpu.global.b32"](self.total[0], self.between.listed.ptr_to([sizes.most, 0])))
        self.lines = []
        for turn in range(-(-sizes.most // threads)):
            place, words = hold(self.thread + turn * threads, "int32"), register("int32", 4, "line")
            self.lines.append((place, words))
            with T.If(place < sizes.most), T.Then():
                do(T.ptx["ld.relaxed.gpu.global.v4.b32"](*(words[i] for i in range(4)), self.between.listed.ptr_to([place, 0])))

    def _each_listed(self, enter: Callable[[Any, Any], None]) -> None:
        """enter(place, the line's words) for every place of the list that was asked for."""
        for place, words in self.lines:
            with T.If(place < T.min(self.total[0], T.int32(self.sizes.most))), T.Then():
                enter(place, words)
        do(T.cuda.cta_sync())

    def _fetch_wholes(self) -> None:
        """The scales over each expert's whole matrix; that of the shared one is the last."""
        if self.wholes is None:
            return
        sizes, threads = self.sizes, self.cut.warps * 32
        for turn in range(-(-sizes.experts // threads)):
            expert = hold(self.thread + turn * threads, "int32")
            with T.If(expert < sizes.experts), T.Then():
                T.buffer_store(self.wholes, load(self.weights.down.scales.whole, [expert], constant=True), [expert])  # type: ignore[union-attr]
        if self.weights.shared:
            with T.If(T.EQ(self.thread, 0)), T.Then():
                whole = load(self.weights.shared[2].scales.whole, [0], constant=True)  # type: ignore[union-attr]
                T.buffer_store(self.wholes, whole, [sizes.experts])

    # -- the ring ----------------------------------------------------------------------------------------------

    def _advance(self) -> None:
        """The copying cursor goes to the warp's next step, of the next tile after the last."""
        self.ahead.move()
        with T.If(T.Not(self.ahead.inside)), T.Then():
            put(self.ahead_tile, self.ahead_tile[0] + self.blocks)
            self.ahead.begin()

    def _start_weights(self, slot: Any, expert: Any, tile: Any, step: Any, addresses: Any) -> None:
        """Copies of an expert's weights and scales of a step; of the shared expert's without one."""
        assert self.weights.shared or expert is not None
        matrix = self.weights.down if expert is not None else self.weights.shared[2]  # type: ignore[index]
        for half in range(2):
            line = tile * 16 + half * 8 + T.floordiv(self.at.lane, 4)
            put(addresses, matrix.piece(expert, line, step * STEP_WORDS + self.at.lane % 4 * 4), half)
        self.ring.copy(slot, addresses)
        self.ring.copy_scales(slot, lambda line: matrix.scale(expert, tile * 16 + line, step * self.sizes.step))

    def _word(self, step: Any) -> Any:
        """Where the lane's columns of a step begin in a row of words of two elements."""
        return step * (self.sizes.step // 2) + self.at.lane % 4 * (self.sizes.step // 8)

    def _start(self, slot: Any, addresses: Any, early: Any = None, *, weights: bool = True, factors: bool = True) -> None:
        """Copies of the unit at the copying cursor, of weights and of what they are multiplied by. early: where that holds, the
        shared expert's weights are on their way."""
        place, step = self.ahead.place[0], self.ahead.step[0]
        if self.shared_units:
            with T.If(place < 0), T.Then():
                self._start_shared(slot, step, addresses, early, weights=weights, factors=factors)
        with T.If(place >= 0), T.Then():
            if weights:
                self._start_weights(slot, hold(self.listed[place, 0], "int32"), self.ahead_tile[0], step, addresses)
            for block in range(self.sizes.row_blocks if self.factors and factors else 0):
                row = hold(block * 8 + T.floordiv(self.at.lane, 4), "int32")
                rank, bit = rank_in([T.reinterpret("uint32", self.listed[place, 2])], row)
                pair = hold(T.min(self.listed[place, 1] + rank, T.int32(self.sizes.pairs - 1)), "int32")
                size = hold(bit * T.uint32(16), "uint32")  # nothing is read for other rows: zeros
                self._start_factors(slot, block, self.between.made, pair, step, size)

    def _start_shared(self, slot: Any, unit: Any, addresses: Any, early: Any, *, weights: bool, factors: bool) -> None:
        if weights and early is None:
            self._start_weights(slot, None, self.ahead_tile[0], unit, addresses)
        elif weights:
            with T.If(T.Not(early)), T.Then():
                self._start_weights(slot, None, self.ahead_tile[0], unit, addresses)
        for block in range(self.sizes.row_blocks if self.factors and factors else 0):
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
            piece = self.ring.read(self.slot[0])
            self.product.take(piece, self.ring.read_scales(self.slot[0]), self._whole())
            if self.factors:
                each = sizes.step // 8
                words = [[piece[8 + block * each + i] for i in range(each)] for block in range(sizes.row_blocks)]
                self.product.multiply_all(sums, words)
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

    def _whole(self) -> Any:
        """The scale over all of the expert's matrix, None where there is none."""
        if self.wholes is None:
            return None
        place = self.here.place[0]
        expert = self.listed[T.max(place, T.int32(0)), 0]
        if self.shared_units:
            expert = T.Select(place < 0, T.int32(self.sizes.experts), expert)
        return hold(self.wholes[hold(expert, "int32")])

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
                self.product.multiply(sums, block, words_of_x)

    def _share(self, sums: Any) -> None:
        slot = hold(T.floordiv(self.tile[0], self.blocks), "int32", "slot") if self.cut.kept > 1 else 0
        for block in range(self.sizes.row_blocks):
            for i in range(4):
                row = hold(block * 8 + self.at.lane % 4 * 2 + i % 2, "int32")
                place = row * 16 + T.floordiv(self.at.lane, 4) + i // 2 * 8
                with T.If(row < self.sizes.rows), T.Then():
                    T.buffer_store(self.shared, sums[block * 4 + i], [slot, self.at.warp, place])

    def _finish(self, finish: Callable[[Any, Any, list[Any]], None], first: Any) -> None:
        """Of the tile `first`, and of those after it that are kept."""
        threads, each = self.cut.warps * 32, self.sizes.rows * 16
        for chunk in range(-(-self.cut.kept * each // threads)):
            element = hold(self.thread + chunk * threads, "int32")
            slot, tile, there = 0, first, element < each
            if self.cut.kept > 1:
                slot, element = hold(T.floordiv(element, each), "int32"), hold(T.floormod(element, each), "int32")
                tile = hold(first + slot * self.blocks, "int32", "tile")
                there = T.And(slot < self.cut.kept, tile < self.tiles)
            with T.If(there), T.Then():
                total = register("float32", name="total")
                put(total, T.float32(0))
                for warp in range(self.cut.warps):
                    put(total, total[0] + self.shared[slot, warp, element])
                row, column = hold(T.floordiv(element, 16), "int32"), hold(tile * 16 + element % 16, "int32")
                finish(row, column, [total[0] if self.product.factor == 1 else total[0] * self.product.factor])
