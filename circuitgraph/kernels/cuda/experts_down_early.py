"""Down of quantised experts, up to 16 rows. Decoding is the limit, so a warp's step is spared what `Down` does in each: where an
expert's weights, scales and rows begin lies in a table, the shared expert is the first in it, and what weights are multiplied by
is read a step before, into registers, instead of through the ring, where it would take as much room as they."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tvm.backend.cuda.lang.alloc_pool import SMEMPool
from tvm.tirx.script import builder as T

from . import one_row
from .expert_groups import rank_in
from .expert_steps import Ring
from .experts import STEP_WORDS, down_scales
from .experts_down import Cursor, Down
from .values import COPY_ONCE, COPY_WORD_ONCE, do, hold, put, register, zeros


class _Walk(Cursor):
    """Where a warp is among the steps of a tile: of the expert `place` in the table, where the shared one stands, too."""

    down: EarlyDown

    def begin(self) -> None:
        put(self.place, T.int32(0))
        put(self.step, self._first(T.int32(0)))
        self._settle()

    def move(self) -> None:
        if self.down.once:
            self._next()
        else:
            super().move()

    def _settle(self) -> None:
        down = self.down
        if down.once:
            return
        behind = self.step[0] >= down.of_place(self.place[0], down.shared_units, down.expert_units)
        if down.even:
            with T.If(behind), T.Then():
                self._next()
        else:
            with T.While(T.And(self.inside, behind)):
                self._next()

    def _first(self, place: Any) -> Any:
        """See `Cursor`: which steps of an expert are a warp's depends on the expert's number alone."""
        down = self.down
        if down.even:
            return down.at.warp
        expert = down.numbers[T.min(place, T.int32(down.places - 1))]
        return T.floormod(down.at.warp + expert * (-down.expert_units % down.cut.warps), down.cut.warps)


class EarlyDown(Down):
    """One launch, as `Down`. A step is `cut.together` steps of 16 weight rows, side by side."""

    def _allocate(self, pool: SMEMPool) -> None:
        sizes, cut, each = self.sizes, self.cut, self.cut.together
        self.shared_units, self.expert_units = self.shared_units // each, self.expert_units // each
        self.even = not (self.shared_units % cut.warps or self.expert_units % cut.warps)
        # A step of every expert for each warp.
        self.once = {self.expert_units, self.shared_units or cut.warps} == {cut.warps}
        self.first = 1 if self.shared_units else 0
        self.places = sizes.most + self.first
        self.ring = Ring(pool, cut.warps, cut.stages, 2 * each - 2, self.at, down_scales(self.format))
        self.shared = pool.alloc((cut.kept, cut.warps, sizes.rows * 16), "float32", align=16)
        self.table = pool.alloc((self.places, 8), "uint32", align=16)
        self.numbers = pool.alloc((self.places,), "int32", align=16)
        self.wholes = pool.alloc((sizes.experts + 1,), "float32", align=16) if self.has_wholes else None

    def of_place(self, place: Any, shared: int, routed: int) -> Any:
        """A number that is another for the shared expert."""
        return routed if shared == routed or not self.first else T.Select(T.EQ(place, 0), T.int32(shared), T.int32(routed))

    def _cursors(self) -> tuple[Any, Any]:
        return _Walk(self, "place", "step"), _Walk(self, "ahead_place", "ahead_step")

    def _begin(self, addresses: Any) -> None:
        """Fill the ring before the wait, the shared expert's weights before the list is there."""
        sizes, cut, at = self.sizes, self.cut, self.at
        self._ask_for_list()
        self.x = register("uint32", sizes.row_blocks * cut.together * sizes.step // 8, "x")
        if self.product.one_row:
            for index in range(sizes.step // 8):
                put(self.x, T.uint32(0), index)
        self.whole = register("float32", name="whole") if self.has_wholes else None
        self.rows = register("uint32", name="rows")
        line = self._line(T.int32(0))
        if isinstance(line, int):
            self.lane_bytes = hold(T.floordiv(at.lane, 4) * line + at.lane % 4 * 16, "int32", "lane_bytes")
        self._fetch_wholes()
        do(T.cuda.cta_sync())
        if self.first:
            with T.If(T.EQ(self.thread, 0)), T.Then():
                matrix = self.weights.shared[2]  # type: ignore[index]
                whole = self.wholes[sizes.experts] if self.has_wholes else None  # type: ignore[index]
                self._enter(0, matrix, None, 0, T.uint32((1 << sizes.rows) - 1), whole, 0)
            do(T.cuda.cta_sync())
            for stage in range(cut.stages):
                unit = hold(at.warp + stage * cut.warps, "int32")
                with T.If(unit < self.shared_units), T.Then():
                    self._copy(stage, T.int32(0), unit, self.tile[0])
        self._enter_list()
        self._each_stage(self._fill)
        self.env.wait()
        self._begin_tile()
        for _ in range(cut.stages):
            do(T.ptx.cp.async_.commit_group())

    def _fill(self, stage: int) -> None:
        """Copies at the copying cursor, if they are none of those that were started first."""
        early = T.And(T.EQ(self.ahead_tile[0], self.at.block), self.ahead.place[0] < self.first)
        with T.If(T.Not(early)), T.Then():
            self._copy(stage, self.ahead.place[0], self.ahead.step[0], self.ahead_tile[0])

    def _enter_list(self) -> None:
        def enter(place: Any, words: Any) -> None:
            whole = self.wholes[words[0]] if self.has_wholes else None  # type: ignore[index]
            rows = T.reinterpret("uint32", words[2])
            self._enter(place + self.first, self.weights.down, words[0], words[1], rows, whole, words[0])

        self._each_listed(enter)
        self.total = hold(self.total[0] + self.first, "int32", "chosen_experts")

    def _enter(self, place: Any, matrix: Any, expert: Any, first: Any, rows: Any, whole: Any, number: Any) -> None:
        """A line of the table. first: pair of the expert, among those that `Up` made."""
        addresses = [matrix.piece(expert, 0, 0), matrix.scale(expert, 0, 0)]
        for index, address in enumerate(addresses):
            address = hold(address, "uint64")
            T.buffer_store(self.table, T.Cast("uint32", address), [place, index * 2])
            T.buffer_store(self.table, T.Cast("uint32", T.shift_right(address, T.uint64(32))), [place, index * 2 + 1])
        T.buffer_store(self.table, T.Cast("uint32", first), [place, 4])
        T.buffer_store(self.table, rows, [place, 6])
        T.buffer_store(self.table, T.uint32(0) if whole is None else T.cuda.float_as_uint(whole), [place, 7])
        T.buffer_store(self.numbers, number, [place])

    def _entry(self, place: Any, half: int) -> list[Any]:
        """Words of a half of a line of the table: where weights and scales begin; first pair, nothing, rows, the whole scale."""
        words = register("uint32", 4, "entry")
        with T.vectorized(0, 4) as v:
            T.buffer_store(words, self.table[place, half * 4 + v], [v])
        return [words[i] for i in range(4)]

    # -- copies ------------------------------------------------------------------------------------------------

    def _copy(self, slot: Any, place: Any, step: Any, tile: Any) -> None:
        """Copies of weights and scales of a step."""
        sizes, each, lane, storage = self.sizes, self.cut.together, self.at.lane, self.format.storage
        entry = self._entry(place, 0)
        line = self._line(place)
        within = self.lane_bytes if isinstance(line, int) else T.floordiv(lane, 4) * line + lane % 4 * 16
        offset = within + tile * 16 * line + step * (each * STEP_WORDS * 4)
        begin = hold(_address(entry[0], entry[1]) + T.Cast("uint64", hold(offset, "int32")), "uint64")
        for part in range(each):
            for half in range(2):
                source = T.reinterpret("handle", begin + T.Cast("uint64", half * 8 * line + part * STEP_WORDS * 4))
                target = self.ring.memory.ptr_to([self.at.warp, slot, part * 2 + half, lane, 0])
                do(T.ptx[COPY_ONCE](target, source, 16, self.at.once))
        high, across = storage.block  # type: ignore[union-attr]
        bytes = 1 if self.format.scaled == "numbers" else 4
        columns = [-(-size // across) if across else 1 for size in (sizes.shared, sizes.inner)]
        row = tile * 16 + (lane if self.ring.lines > 1 else 0)
        row = T.floordiv(row, high) if high else 0
        column = T.floordiv(step * (each * sizes.step), across) if across else 0
        offset = (row * self.of_place(place, *columns) + column) * bytes
        do(T.cuda.warp_sync())  # all have read the scales that were there
        with T.If(lane < self.ring.lines), T.Then():
            source = _address(entry[2], entry[3]) + T.Cast("uint64", hold(offset, "int32"))
            target = self.ring.scale_memory.ptr_to([self.at.warp, slot, lane if self.ring.lines > 1 else 0, 0])
            do(T.ptx[COPY_WORD_ONCE](target, T.reinterpret("handle", source), 4 * self.ring.words, self.at.once))

    def _line(self, place: Any) -> Any:
        """Bytes of a weight row of the expert."""
        columns = self.of_place(place, self.sizes.shared, self.sizes.inner)
        each = self.format.columns
        return columns // each * 4 if isinstance(columns, int) else T.floordiv(columns, each) * 4

    def _load_x(self) -> None:
        """Ask for what the weights of the step at the cursor are multiplied by; for rows that the expert does not have, another
        of its rows: their sums are left out."""
        sizes, each, lane = self.sizes, self.sizes.step // 8, self.at.lane
        count = self.cut.together * each
        place, step = self.here.place[0], self.here.step[0]
        entry = self._entry(place, 1)
        if self.whole is not None:
            put(self.whole, T.cuda.uint_as_float(entry[3]))
        begin = T.reinterpret("uint64", self.between.made.ptr_to([0, 0]))
        if self.first:
            begin = T.if_then_else(T.EQ(place, 0), T.reinterpret("uint64", self.between.shared.ptr_to([0, 0])), begin)
        begin = hold(begin, "uint64")
        if self.product.one_row:
            return self._load_one(begin, place, entry[0], step)
        stride = self.of_place(place, sizes.shared * 2, sizes.inner * 2)
        put(self.rows, entry[2])
        for block in range(sizes.row_blocks):
            row = hold(block * 8 + T.floordiv(lane, 4), "int32")
            rank, bit = rank_in([entry[2]], row)
            rank = T.Select(bit > T.uint32(0), rank, T.int32(0))
            offset = (
                (T.Cast("int32", entry[0]) + rank) * stride
                + step * (self.cut.together * sizes.step * 2)
                + lane % 4 * (sizes.step // 2)
            )
            source = hold(begin + T.Cast("uint64", hold(offset, "int32")), "uint64")
            for part in range(self.cut.together):
                for first in range(0, each, 4):
                    targets = [self.x[block * count + part * each + first + i] for i in range(4)]
                    there = T.reinterpret("handle", source + T.uint64(part * sizes.step * 2 + 4 * first))
                    do(T.ptx["ld.global.v4.b32"](*targets, there))

    def _mine(self) -> Callable[[int, int], Any] | None:
        """(block, odd): does the expert have this row of the lane's sums? None where there is one row."""
        if self.product.one_row:
            return None
        rows = hold(T.shift_right(self.rows[0], T.Cast("uint32", self.at.lane % 4 * 2)), "uint32")
        return lambda block, odd: T.bitwise_and(rows, T.uint32(1 << block * 8 + odd)) > T.uint32(0)

    def _load_one(self, begin: Any, place: Any, pair: Any, step: Any) -> None:
        """The lane's words of one row: the others stay zero."""
        sizes, lane = self.sizes, self.at.lane
        stride = self.of_place(place, sizes.shared * 2, sizes.inner * 2)
        offset = T.Cast("int32", pair) * stride + step * (sizes.step * 2) + lane % 4 * (sizes.step // 2)
        source = hold(begin + T.Cast("uint64", hold(offset, "int32")), "uint64")
        for index in range(4):
            with T.If(one_row.owned(self.format, lane, index)), T.Then():
                there = T.reinterpret("handle", source + T.uint64(16 * index))
                do(T.ptx["ld.global.v4.b32"](*(self.x[index * 4 + i] for i in range(4)), there))

    # -- a tile ------------------------------------------------------------------------------------------------

    def _begin_tile(self) -> None:
        """The cursor goes to a tile's first step, whose x is asked for."""
        self.here.begin()
        with T.If(self.here.inside), T.Then():
            self._load_x()

    def _tile(self, addresses: Any) -> None:
        cut, sizes, each = self.cut, self.sizes, self.sizes.step // 8
        sums = register("float32", sizes.row_blocks * 4, "sums")
        zeros(sums, sizes.row_blocks * 4)
        with T.While(self.here.inside):
            do(T.ptx.cp.async_.wait_group(cut.stages - 1))
            piece = self.ring.read(self.slot[0])
            scales = self.ring.read_scales(self.slot[0])
            for part in range(cut.together):
                whole = None if self.whole is None else self.whole[0]
                self.product.take([piece[part * 8 + i] for i in range(8)], scales, whole, self._mine())
                places = [(block * cut.together + part) * each for block in range(sizes.row_blocks)]
                self.product.multiply_all(sums, [[self.x[place + i] for i in range(each)] for place in places])
            self.here.move()
            with T.If(self.here.inside), T.Then():
                self._load_x()
            with T.If(T.And(self.ahead_tile[0] < self.tiles, self.ahead.inside)), T.Then():
                self._copy(self.slot[0], self.ahead.place[0], self.ahead.step[0], self.ahead_tile[0])
            do(T.ptx.cp.async_.commit_group())
            self._advance()
            put(self.slot, T.Select(T.EQ(self.slot[0] + 1, cut.stages), T.int32(0), self.slot[0] + 1))
        self.product.gather(sums)
        self._share(sums)
        self._begin_tile()


def _address(low: Any, high: Any) -> Any:
    return T.bitwise_or(T.shift_left(T.Cast("uint64", high), T.uint64(32)), T.Cast("uint64", low))
