"""Matrix products of some rows on Hopper's tensor cores: every weight is read once, whatever the number of rows.

A block multiplies `units` * 64 weight rows by a tile of up to 128 rows of x. A warpgroup has 64 weight rows, of one `wgmma`,
and x is the other operand, so that few rows waste nothing. Both come through one ring in shared memory, 64 columns a
stage, by warps that only copy. Every block reads x from L2, so the more weight rows a block has, the less of that.

`parts` blocks share the columns of one tile, so that narrow layers fill the GPU, too; they leave their sums in memory, and a
second launch adds them. A head has many more tiles than there are blocks: each block takes several, one after the other,
and its ring runs on while the best of a tile are found.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from tvm.backend.cuda.lang.alloc_pool import SMEMPool
from tvm.tirx.script import builder as T

from .epilogue import Epilogue
from .latent import SWIZZLE_128, power_of_two
from .plain import NOTHING, Logits, Partials, Projection
from .values import COPY, COPY_ONCE, LOG2_E, LOWEST, do, hold, load, load_int, put, register, store, wide, zeros

DEPTH = 64
"""Columns of a stage: 128 bytes, 8 chunks of 16, whose order is swizzled by row as `wgmma` reads them."""
UNIT = 64
"""Weight rows of one `wgmma`."""
ROWS = 128
"""Rows of x in a tile, at most: 64 sums a thread and unit."""
OVERLAPPED = 64
"""Rows of x in a tile up to which a stage's products go on while the next ones begin. Of more, few stages fit the ring."""
STAGES = 24
"""Of the ring, at most."""
PACE = 40 * 1024
"""Bytes of weights that are on their way when a block asks for a further stage, before it waits: enough to keep the memory busy.
More would be in the way of the kernel before, of x, and of all that small kernels read."""
STEADY_PACE = 72 * 1024
"""The same of a block that multiplies. With all of a long ring under way, some processors get half as much as others."""
COPIERS = 4
"""Warps that copy: two weights, two x."""
LINES = 8
"""Of a stage that two warps copy at once."""
LANES = 8
"""Of a warp that have other columns of the same rows: those that differ in their upper three bits."""
JOIN_WARPS = 8
"""Of a block that adds parts."""
TOGETHER = 4
"""Elements that a thread finishes at once: what they read from memory is on its way together."""


@dataclass(frozen=True)
class WarpgroupTile:
    """What a block has. units: warpgroups that multiply, 64 weight rows each; rows: of x, a multiple of 8; parts: blocks that
    share the columns of a tile; stages: of the ring."""

    units: int
    rows: int
    parts: int
    stages: int

    @property
    def weights(self) -> int:
        return self.units * UNIT

    @property
    def warps(self) -> int:
        return self.units * 4 + COPIERS

    @property
    def threads(self) -> int:
        """That multiply."""
        return self.units * 128

    @property
    def across(self) -> int:
        """What one `wgmma` has on its other side."""
        return self.rows

    @property
    def weight_bytes(self) -> int:
        """Of weights in a stage."""
        return self.weights * DEPTH * 2

    @property
    def stage_bytes(self) -> int:
        return (self.weights + self.rows) * DEPTH * 2

    @property
    def ring_bytes(self) -> int:
        return self.stages * self.stage_bytes

    @property
    def memory_bytes(self) -> int:
        """The ring, or what lies there at the end: the best of every warp."""
        return max(self.ring_bytes, self.rows * self.units * 4 * 3 * 4)

    @property
    def shared_bytes(self) -> int:
        return self.memory_bytes + self.stages * 16


def quick_sigmoid(x: Any) -> Any:
    """To two units in the last place, without the branches of an exact division: many elements are in work at once."""
    made = register("float32")
    do(T.ptx["rcp.approx.ftz.f32"](made[0], T.float32(1) + power_of_two(x * T.float32(-LOG2_E))))
    return made[0]


class Ahead(Epilogue):
    """An epilogue of several elements at once: what they need from memory is fetched before the first is finished."""

    ops = {**Epilogue.ops, "sigmoid": quick_sigmoid, "silu": lambda x: hold(x * quick_sigmoid(x))}
    found: dict[tuple[str, str], Any]
    made: list[tuple[Any, Any]]

    def fetch(self, row: Any, column: Any) -> dict[tuple[str, str], Any]:
        made = {value.name for node in (*self.anchors, *self.nodes) for value in node.outputs}
        return {
            (node.name, name): super(Ahead, self)._fetch(node, name, row, column)
            for node in self.nodes
            for name in node.inputs
            if name not in made
        }

    def finish(self, row: Any, column: Any, sums: list[Any], found: dict[tuple[str, str], Any]) -> list[tuple[Any, Any]]:
        """(where, value) of all that is to be stored."""
        self.found, self.made = found, []
        self(row, column, sums)
        return self.made

    def _put(self, target: Any, row: Any, column: Any, value: Any) -> None:
        self.made.append((target, value))

    def _fetch(self, node: Any, name: str, row: Any, column: Any) -> Any:
        return self.found[node.name, name]


class WarpgroupTiles:
    """One launch. x: [rows, K / 2] words; weights: [columns, K / 2] words; one weight a projection, or two for all."""

    def __init__(self, env: Any, tile: WarpgroupTile, x: Any, kind: str, projections: Sequence[Projection]):
        self.env, self.tile, self.x, self.projections = env, tile, x, projections
        self.mma = f"wgmma.mma_async.sync.aligned.m64n{tile.across}k16.f32.{kind}.{kind}"
        self.matrices = len(projections[0].weights)
        self.width = tile.weights // self.matrices
        self.columns = sum(projection.columns for projection in projections)
        self.count = -(-self.columns // self.width)
        self.rows, self.stages_of_all = env.plan.rows, int(x.shape[1]) * 2 // DEPTH
        self.row_tiles = -(-self.rows // tile.rows)

    # -- launches ----------------------------------------------------------------------------------------------

    def emit(self, sums: Any = None, *, settles: bool = False, joins: bool = True) -> None:
        """A block a tile and part; the row tiles of the same weights side by side. sums: fp32 [parts, rows, weight rows], where
        there are several parts. settles: let the next kernel start only when all before this one are complete. joins: a second
        launch adds the parts."""
        tile, parts = self.tile, self.tile.parts
        self.settles = settles
        with self.env.kernel(self.count * self.row_tiles * parts, tile.warps, early=True, fence=settles, once=True) as at:
            self.at = at
            self.first_row = hold(T.floormod(at.block, self.row_tiles) * tile.rows, "int32", "first_row")
            part = hold(T.floormod(T.floordiv(at.block, self.row_tiles), parts), "int32", "part")
            place = hold(T.floordiv(at.block, parts * self.row_tiles), "int32", "place")
            self.first = hold(T.floordiv(part * self.stages_of_all, parts), "int32", "first")
            self.end = hold(T.floordiv((part + 1) * self.stages_of_all, parts), "int32", "end")
            with self._multiplying(place, place + 1):
                with T.serial(0, self.end - self.first) as stage:
                    self._multiply(self.first + stage)
                self._end()
                if parts > 1:
                    self._leave(sums, part, place)
                else:
                    self._finish(place)
        if parts > 1 and joins:
            self._add_parts(sums)

    def emit_best(self, best: Partials, logits: Logits) -> None:
        """Keep the best column of every row and block instead of finishing elements. best: of [blocks of a row tile, rows]."""
        tile, blocks = self.tile, int(best.best.shape[0])
        self.settles = False
        each = -(-self.count // blocks)
        with self.env.kernel(blocks * self.row_tiles, tile.warps, early=True, once=True) as at:
            self.at = at
            self.first_row = hold(T.floormod(at.block, self.row_tiles) * tile.rows, "int32", "first_row")
            block = hold(T.floordiv(at.block, self.row_tiles), "int32", "block")
            stop = hold(T.min((block + 1) * each, T.int32(self.count)), "int32", "stop")
            self.first, self.end = T.int32(0), T.int32(self.stages_of_all)
            with self._multiplying(block * each, stop):
                self._reset_best()
                place = register("int32", name="place")
                put(place, block * each)
                with T.While(place[0] < stop):
                    zeros(self.sums, self.each)
                    self._ordered()
                    with T.serial(0, self.stages_of_all) as stage:
                        self._multiply(stage)
                    self._end()
                    self._take(place[0], logits)
                    put(place, place[0] + 1)
                self._join_best(best, block)

    @contextmanager
    def _multiplying(self, place: Any, stop: Any) -> Iterator[None]:
        """The body is of the warps that multiply; the others meanwhile copy all stages of the tiles place..stop-1.

        Weights are asked for before the kernel waits for those before it, which do not write them, and by warps of their own,
        so that no stage of x waits for the weights of a later one.
        """
        at, tile = self.at, self.tile
        self.thread = hold(at.warp * 32 + at.lane, "int32", "thread")
        self._share_memory()
        self.place, self.stage = register("int32", name="place"), register("int32", name="stage")
        self.slot, self.phase = register("int32", name="slot"), register("int32", name="phase")
        put(self.place, place)
        put(self.stage, self.first)
        put(self.slot, T.int32(0))
        put(self.phase, T.int32(0))
        self.stop = stop
        self.copier = hold(at.warp - tile.units * 4, "int32", "copier")
        self.line, self.chunk = hold(self.copier % 2 * 4 + T.floordiv(at.lane, 8), "int32", "line"), at.lane % 8
        self._begin_copying()
        with T.If(T.And(self.copier >= 0, self.copier < 2)), T.Then():
            self._find_weights()
            with T.serial(0, tile.stages), T.If(self.place[0] < stop), T.Then():
                self._copy_at_pace(PACE)
        self.env.wait(release=self.settles)
        with T.If(self.copier >= 0):
            with T.Then(), T.If(self.copier < 2):
                with T.Then(), T.While(self.place[0] < stop):
                    self._await_empty()
                    self._copy_at_pace(STEADY_PACE)
                with T.Else(), T.While(self.place[0] < stop):
                    self._await_empty()
                    self._copy_rows()
            with T.Else():
                self._begin()
                yield

    def _share_memory(self) -> None:
        tile, pool = self.tile, SMEMPool()
        self.memory = pool.alloc((tile.memory_bytes // 4,), "uint32", align=1024)
        self.full = pool.alloc((tile.stages,), "uint64", align=8)
        self.empty = pool.alloc((tile.stages,), "uint64", align=8)
        pool.commit()
        self._declare()
        with T.If(T.And(T.EQ(self.at.warp, 0), T.EQ(self.at.lane, 0))), T.Then():
            for stage in range(tile.stages):
                do(T.ptx.mbarrier.init.shared.b64(self.full.ptr_to([stage]), T.uint32(COPIERS * 32)))
                do(T.ptx.mbarrier.init.shared.b64(self.empty.ptr_to([stage]), T.uint32(tile.units * 4)))
            do(T.ptx.fence.mbarrier_init.release.cluster())
        do(T.cuda.cta_sync())

    def _declare(self) -> None:
        """Views of shared memory."""
        shape = (self.tile.stages, self.tile.weights + self.tile.rows, 8, 4)
        self.ring, self.first_line = T.decl_buffer(shape, "uint32", data=self.memory.data, scope="shared.dyn"), self.tile.weights
        """Of a stage: weights, then x."""

    # -- the warps that copy -----------------------------------------------------------------------------------

    def _begin_copying(self) -> None:
        self.sources = register("uint64", self.tile.weights // LINES, "sources")

    def _find_weights(self) -> None:
        """Addresses of the chunks of a tile that this thread copies in every stage. Most tiles lie within one projection: the
        first copies do not wait until every line has looked for its own."""

        def place(projection: Projection, matrix: int, row: Any) -> tuple[Any]:
            return (T.reinterpret("uint64", projection.weights[matrix].ptr_to([wide(row), self.chunk * 4])),)

        base, start, first = register("uint64", self.matrices, "base"), hold(self.place[0] * self.width, "int32", "start"), 0
        put(base, T.uint64(0))
        for projection in self.projections:
            last = first + projection.columns
            with T.If(T.And(start >= first, start + self.width <= last)), T.Then():
                for matrix in range(self.matrices):
                    put(base, *place(projection, matrix, start - first + self.line), matrix)
            first = last
        step = LINES * int(self.projections[0].weights[0].shape[1]) * 4
        with T.If(base[0] > T.uint64(0)):
            with T.Then():
                for index in range(self.tile.weights // LINES):
                    put(self.sources, base[index % self.matrices] + T.uint64(index // self.matrices * step), index)
            with T.Else():
                for index in range(self.tile.weights // LINES):
                    put(self.sources, *self._of_line(hold(index * LINES + self.line, "int32"), place), index)

    def _of_line(self, line: Any, place: Callable[[Projection, int, Any], tuple[Any, ...]]) -> tuple[Any, ...]:
        """place(projection, which of its weights, row) for a line of the tile, which may have the last columns of one projection
        and the first of the next. What there is not is replaced by the last column."""
        within, which = self._weight(line)
        column = hold(T.min(self.place[0] * self.width + within, T.int32(self.columns - 1)), "int32")
        found: tuple[Any, ...] = ()
        first = self.columns
        for projection in reversed(self.projections):
            first -= projection.columns
            row = T.max(column - first, T.int32(0))
            if len(self.projections) > 1:  # a column of a later projection: its address is not used
                row = T.min(row, T.int32(projection.columns - 1))
            here = [place(projection, matrix, row) for matrix in range(self.matrices)]
            chosen_here = (
                here[0]
                if self.matrices == 1
                else tuple(T.if_then_else(T.EQ(which, 0), *pair) for pair in zip(*here, strict=True))
            )
            inside = column < first + projection.columns
            pairs = zip(chosen_here, found, strict=True) if found else ()
            found = tuple(T.if_then_else(inside, one, other) for one, other in pairs) or chosen_here
        return found

    def _copy_at_pace(self, pace: int) -> None:
        do(T.ptx.cp.async_.wait_group(max(1, pace // self.tile.weight_bytes)))
        self._copy_weights()
        do(T.ptx.cp.async_.commit_group())

    def _copy_weights(self) -> None:
        self._copy_weight_chunks()
        with self._copied(), T.If(self.place[0] < self.stop), T.Then():
            self._find_weights()

    @contextmanager
    def _copied(self) -> Iterator[None]:
        """One stage further; the body is emitted where the next tile begins."""
        do(T.ptx["cp.async.mbarrier.arrive.noinc.shared.b64"](self.full.ptr_to([self.slot[0]])))
        self._advance()
        put(self.stage, self.stage[0] + 1)
        with T.If(self.stage[0] >= self.end), T.Then():
            put(self.stage, self.first)
            put(self.place, self.place[0] + 1)
            yield

    def _copy_weight_chunks(self) -> None:
        for index in range(self.tile.weights // LINES):
            source = self.sources[index] + T.Cast("uint64", self.stage[0]) * T.uint64(DEPTH * 2)
            self._copy(COPY_ONCE, T.reinterpret("handle", source), index * LINES + self.line, self.at.once)

    def _copy_rows(self) -> None:
        """Rows that there are not are replaced by the last one."""
        for index in range(self.tile.rows // LINES):
            line = hold(index * LINES + self.line, "int32")
            row = T.min(self.first_row + line, T.int32(self.rows - 1))
            source = self.x.ptr_to([wide(row), wide(self.stage[0] * (DEPTH // 2) + self.chunk * 4)])
            self._copy(COPY, source, self.first_line + line)
        with self._copied():
            pass

    def _copy(self, kind: str, source: Any, line: Any, *policy: Any) -> None:
        chunk = T.bitwise_xor(self.chunk, T.bitwise_and(self.line, 7))  # the lines of a thread are eight apart
        do(T.ptx[kind](self.ring.ptr_to([self.slot[0], line, chunk, 0]), source, 16, *policy))

    def _await_empty(self) -> None:
        do(T.cuda.mbarrier_wait(self.empty.ptr_to([self.slot[0]]), 1 - self.phase[0]))

    def _advance(self) -> None:
        last = T.EQ(self.slot[0], self.tile.stages - 1)
        put(self.phase, T.Select(last, 1 - self.phase[0], self.phase[0]))
        put(self.slot, T.Select(last, T.int32(0), self.slot[0] + 1))

    # -- the warps that multiply -------------------------------------------------------------------------------

    def _begin(self) -> None:
        self.each = self.tile.across // 2
        """Sums of a thread."""
        self.sums = register("float32", self.each, "sums")
        zeros(self.sums, self.each)
        self._ordered()
        self.read = register("int32", name="read")
        """The slot whose products may still go on; -1 where there are none."""
        put(self.read, T.int32(-1))
        self.descriptors = register("uint64", 2, "descriptors")
        for index, matrix in enumerate(self._matrices()):
            place = T.address_of(self.descriptors[index])
            do(T.cuda.wgmma.encode_matrix_descriptor(place, matrix, 1, 64, SWIZZLE_128))

    def _matrices(self) -> tuple[Any, Any]:
        """Where the weights of the warpgroup and x lie in the first slot."""
        return self.ring.ptr_to([0, T.floordiv(self.at.warp, 4) * UNIT, 0, 0]), self.ring.ptr_to([0, self.tile.weights, 0, 0])

    def _steps(self) -> tuple[int, int]:
        """Bytes from one slot to the next of both."""
        return self.tile.stage_bytes, self.tile.stage_bytes

    def _ready(self, stage: Any) -> None:
        """What a warpgroup does with its weights of a stage that has arrived, before they are multiplied."""

    def _multiply(self, stage: Any) -> None:
        """One stage, which is the columns' `stage`-th. Its products may go on while those of the next one begin: see `_end`."""
        do(T.cuda.mbarrier_wait(self.full.ptr_to([self.slot[0]]), self.phase[0]))
        self._ready(stage)
        do(T.ptx.fence.proxy.async_.shared__cta())
        do(T.ptx.wgmma.fence.sync.aligned())
        sums = [self.sums[i] for i in range(self.each)]
        slot, matrices = T.Cast("uint64", self.slot[0]), []
        for index, step in enumerate(self._steps()):
            moved = self.descriptors[index] + slot * T.uint64(step // 16) if step else self.descriptors[index]
            matrices.append(hold(moved, "uint64"))
        for step in range(DEPTH // 16):
            a, b = (matrix + T.uint64(step * 32 // 16) for matrix in matrices)
            do(T.ptx[self.mma](*sums, a, b, T.bool(True), 1, 1, 0, 0))
        do(T.ptx.wgmma.commit_group.sync.aligned())
        if self.tile.rows > OVERLAPPED:  # warpgroups fill each other's gaps, and the slot is filled again sooner
            do(T.ptx.wgmma.wait_group.sync.aligned(0))
            put(self.read, self.slot[0])
            self._free()
            put(self.read, T.int32(-1))
        else:
            do(T.ptx.wgmma.wait_group.sync.aligned(1))
            self._free()
            put(self.read, self.slot[0])
        self._advance()

    def _end(self) -> None:
        """All products so far have ended."""
        do(T.ptx.wgmma.wait_group.sync.aligned(0))
        self._ordered()
        self._free()
        put(self.read, T.int32(-1))

    def _free(self) -> None:
        """The slot whose products have ended may be filled again."""
        with T.If(T.And(self.at.lane < 1, self.read[0] >= 0)), T.Then():
            do(T.ptx.mbarrier.arrive.shared.b64(self.empty.ptr_to([self.read[0]]), T.uint32(1)))

    def _ordered(self) -> None:
        """Keep what comes before and after on its side: `wgmma` writes registers while the code goes on."""
        for index in range(self.each):
            do(T.ptx["mov.b32"](self.sums[index], self.sums[index]))

    def _sync(self) -> None:
        """Of the warps that multiply: the others may be gone."""
        do(T.ptx.bar.sync(1, self.tile.threads))

    def _factor(self, projection: Projection, matrix: int, column: Any) -> Any:
        """What the sum of a weight row is multiplied by, None where that is nothing."""

    def _weight_row(self) -> Any:
        """The first of a thread's two weight rows within the tile; the other is 8 further."""
        return self.at.warp * 16 + T.floordiv(self.at.lane, 4)

    # -- results of elements -----------------------------------------------------------------------------------

    def _weight(self, line: Any) -> tuple[Any, Any]:
        """(column within the tile, which matrix) of a weight row of the tile. Of two matrices, rows that meet lie eight apart:
        one thread gets the sums of both."""
        if self.matrices == 1:
            return line, T.int32(0)
        return T.floordiv(line, 16) * 8 + T.floormod(line, 8), T.floormod(T.floordiv(line, 8), 2)

    def _finish(self, place: Any) -> None:
        """All elements of a tile, from registers: eight lanes have eight columns side by side."""
        start, first = hold(place * self.width, "int32", "start"), 0
        for projection in self.projections:
            last = first + projection.columns
            for half in range(2 // self.matrices):
                column = hold(start - first + self._weight(self._weight_row() + half * 8)[0], "int32", "column")
                with T.If(T.And(column >= 0, column < projection.columns)), T.Then():
                    for item in range(0, self.each // 2, TOGETHER):
                        items = range(item, min(item + TOGETHER, self.each // 2))
                        self._finish_all(projection, [self._element(item, half, column) for item in items])
            first = last

    def _element(self, item: int, half: int, column: Any) -> tuple[Any, Any, Any, list[Any]]:
        """(visible, row, column, sums): what a thread has of its `item`-th row."""
        row = hold(self.first_row + item // 2 * 8 + self.at.lane % 4 * 2 + item % 2, "int32", "row")
        visible = hold(T.Cast("int32", row < self.rows), "int32") if self.rows % self.tile.rows else None
        sums = [self.sums[item // 2 * 4 + (half + matrix) * 2 + item % 2] for matrix in range(self.matrices)]
        return visible, row, column, sums

    def _finish_all(self, projection: Projection, elements: list[tuple[Any, Any, Any, list[Any]]]) -> None:
        """(visible or None for yes, row, column, sums) each: what they read is on its way together, then all are computed."""
        found, made = [], []
        for _, row, column, _ in elements:
            nearest = hold(T.min(column, T.int32(projection.columns - 1)), "int32")
            factors = [self._factor(projection, matrix, nearest) for matrix in range(self.matrices)]
            found.append((nearest, factors, projection.finish.fetch(T.min(row, T.int32(self.rows - 1)), nearest)))
        for (_, row, _, sums), (nearest, factors, ahead) in zip(elements, found, strict=True):
            totals = [hold(total if factor is None else total * factor) for total, factor in zip(sums, factors, strict=True)]
            made.append(projection.finish.finish(row, nearest, totals, ahead))
        self._store_all(elements, made)

    def _store_all(self, elements: list[Any], made: list[list[tuple[Any, Any]]]) -> None:
        for (visible, row, column, _), values in zip(elements, made, strict=True):
            with T.If(T.bool(True) if visible is None else visible > 0), T.Then():
                for target, value in values:
                    store(target, [row, column], value)

    # -- parts -------------------------------------------------------------------------------------------------

    def _leave(self, sums: Any, part: Any, place: Any) -> None:
        """This part's sums, from registers: eight lanes have eight columns side by side, a sector."""
        lane, tile = self.at.lane, self.tile
        for half in range(2):
            line = hold(self._weight_row() + half * 8, "int32")
            within, which = self._weight(line)
            column = hold(place * self.width + within, "int32")
            target = hold(column + which * self.columns, "int32")
            with T.If(column < self.columns), T.Then():
                for item in range(tile.rows // 4):
                    row = self.first_row + item // 2 * 8 + lane % 4 * 2 + item % 2
                    value = self.sums[item // 2 * 4 + half * 2 + item % 2]
                    if self.rows % tile.rows:
                        with T.If(row < self.rows), T.Then():
                            store(sums, [part, row, target], value)
                    else:
                        store(sums, [part, row, target], value)

    def _add_parts(self, sums: Any) -> None:
        """The second launch: a block some columns of a row."""
        each = JOIN_WARPS * 32 * TOGETHER
        counts = [-(-projection.columns // each) for projection in self.projections]
        with self.env.kernel(self.rows * sum(counts), JOIN_WARPS) as at:
            thread = hold(at.warp * 32 + at.lane, "int32", "thread")
            row = hold(T.floordiv(at.block, sum(counts)), "int32", "row")
            place = hold(T.floormod(at.block, sum(counts)), "int32", "place")
            first = start = 0
            for projection, count in zip(self.projections, counts, strict=True):
                with T.If(T.And(place >= first, place < first + count)), T.Then():
                    columns = [hold((place - first) * each + i * (JOIN_WARPS * 32) + thread, "int32") for i in range(TOGETHER)]
                    found = [
                        [
                            self._parts_of(sums, row, start + T.min(column, T.int32(projection.columns - 1)), matrix)
                            for matrix in range(self.matrices)
                        ]
                        for column in columns
                    ]
                    elements = [
                        (
                            hold(T.Cast("int32", column < projection.columns), "int32"),
                            row,
                            column,
                            [hold(sum(p[1:], p[0])) for p in parts],
                        )
                        for column, parts in zip(columns, found, strict=True)
                    ]
                    self._finish_all(projection, elements)
                first, start = first + count, start + projection.columns

    def joined(self, sums: Any, number: int, row: Any, column: Any) -> Any:
        """The whole sum of a column of a projection, for a launch after this one. One weight a projection."""
        start = sum(projection.columns for projection in self.projections[:number])
        parts = self._parts_of(sums, row, hold(start + column, "int32"), 0)
        factor = self._factor(self.projections[number], 0, column)
        total = hold(sum(parts[1:], parts[0]))
        return total if factor is None else hold(total * factor)

    def _parts_of(self, sums: Any, row: Any, column: Any, matrix: int) -> list[Any]:
        """Those of one sum, on their way."""
        return [load(sums, [part, row, column + matrix * self.columns]) for part in range(self.tile.parts)]

    # -- the best of a head ------------------------------------------------------------------------------------

    def _reset_best(self) -> None:
        """Eight lanes have the same rows of x: each keeps one of eight."""
        self.kept = -(-self.tile.rows // 4 // LANES)
        self.best = register("float32", self.kept, "best")
        self.total = register("float32", self.kept, "total")
        self.index = register("int32", self.kept, "index")
        for index in range(self.kept):
            put(self.best, T.float32(LOWEST), index)
            put(self.total, T.float32(0), index)
            put(self.index, T.int32(NOTHING), index)

    def _take(self, place: Any, logits: Logits) -> None:
        """A tile's logits into the running best: of a thread's two columns, then of eight lanes by halves."""
        (head,), lane = self.projections, self.at.lane
        first = hold(place * self.width + self._weight_row(), "int32")
        columns = [first, hold(first + 8, "int32")]
        factors = [self._factor(head, 0, T.min(column, T.int32(head.columns - 1))) for column in columns]
        biases = [
            load(logits.bias, [T.min(column, T.int32(head.columns - 1))], constant=True) if logits.bias is not None else None
            for column in columns
        ]
        for index in range(self.kept):
            items = range(index * LANES, min((index + 1) * LANES, self.tile.rows // 4))
            states = [self._logit(item, columns, factors, biases, logits) for item in items]
            while LANES // 2 < len(states) < LANES:
                states.append((T.float32(LOWEST), T.int32(NOTHING), T.float32(0)))
            for step in (16, 8, 4):
                if len(states) == 1:  # fewer rows than lanes: several keep the same
                    states = [merged(states[0], beside(states[0], step))]
                    continue
                upper = hold(T.Cast("int32", T.bitwise_and(lane, T.int32(step)) > 0), "int32")
                middle, halves = len(states) // 2, []
                for low, high in zip(states[:middle], states[middle:], strict=True):
                    sent, mine = chosen(upper, low, high), chosen(upper, high, low)
                    halves.append(merged(mine, beside(sent, step)))
                states = halves
            joined = merged((self.best[index], self.index[index], self.total[index]), states[0])
            for target, value in zip((self.best, self.index, self.total), joined, strict=True):
                put(target, value, index)

    def _logit(self, item: int, columns: list[Any], factors: list[Any], biases: list[Any], logits: Logits) -> State:
        """The better of a thread's two columns for one of its rows of x."""
        (head,), pair = self.projections, []
        row = self.first_row + item // 2 * 8 + self.at.lane % 4 * 2 + item % 2
        for half, column in enumerate(columns):
            logit = self.sums[item // 2 * 4 + half * 2 + item % 2]
            logit = logit if factors[half] is None else hold(logit * factors[half])
            logit = logit if biases[half] is None else hold(logit + biases[half])
            visible = T.And(column < head.columns, logit > T.float32(LOWEST))  # NaN is no choice
            if logits.allowed is not None:
                seen = (T.min(row, T.int32(self.rows - 1)), T.shift_right(T.min(column, T.int32(head.columns - 1)), T.int32(5)))
                word = load_int(logits.allowed, list(seen))
                bit = T.bitwise_and(T.shift_right(word, T.bitwise_and(column, T.int32(31))), T.int32(1))
                visible = T.And(visible, bit > 0)
            kept = hold(T.Select(visible, logit, T.float32(LOWEST)))
            number = hold(T.Select(kept > T.float32(LOWEST), column, T.int32(NOTHING)), "int32")
            pair.append((kept, number, hold(T.Select(kept > T.float32(LOWEST), T.float32(1), T.float32(0)))))
        return merged(*pair)

    def _kept_row(self, index: int) -> Any:
        """The row within the tile of what a lane keeps; behind the tile for what only filled up."""
        count = min(self.tile.rows // 4 - index * LANES, LANES)
        count, item = count if count <= LANES // 2 else LANES, T.int32(index * LANES)
        for step in (16, 8, 4):
            if count > 1:
                count //= 2
                item = item + T.Select(T.bitwise_and(self.at.lane, T.int32(step)) > 0, T.int32(count), T.int32(0))
        item = hold(item, "int32")
        return hold(T.floordiv(item, 2) * 8 + self.at.lane % 4 * 2 + item % 2, "int32")

    def _join_best(self, partials: Partials, block: Any) -> None:
        """The best of all warps, through shared memory."""
        tile, warps = self.tile, self.tile.units * 4
        size = warps * tile.rows
        made = [
            T.decl_buffer((warps, tile.rows), dtype, data=self.memory.data, elem_offset=offset * size, scope="shared.dyn")
            for offset, dtype in enumerate(("float32", "int32", "float32"))
        ]
        self._sync()
        for index in range(self.kept):
            row = self._kept_row(index)
            with T.If(row < tile.rows), T.Then():
                for buffer, value in zip(made, (self.best, self.index, self.total), strict=True):
                    T.buffer_store(buffer, value[index], [self.at.warp, row])
        self._sync()
        with T.If(T.And(self.thread < tile.rows, self.first_row + self.thread < self.rows)), T.Then():
            state = tuple(hold(buffer[0, self.thread], dtype) for buffer, dtype in zip(made, KINDS, strict=True))
            for warp in range(1, warps):
                other = tuple(hold(buffer[warp, self.thread], dtype) for buffer, dtype in zip(made, KINDS, strict=True))
                state = merged(state, other)
            for buffer, value in zip((partials.best, partials.index, partials.total), state, strict=True):
                store(buffer, [block, self.first_row + self.thread], value)


KINDS = ("float32", "int32", "float32")
State = tuple[Any, Any, Any]
"""A best so far: (logit, column, sum of exp(logit - best))."""


def merged(one: State, other: State) -> State:
    """Both as one, to the last bit whichever is named first: a row's place decides that. The lower column wins a tie. A logit
    that is no number makes the sum none."""
    wins = T.Or(other[0] > one[0], T.And(T.EQ(other[0], one[0]), other[1] < one[1]))
    index = hold(T.Select(wins, other[1], one[1]), "int32")
    best = hold(T.max(one[0], other[0]))
    higher = hold(T.Cast("int32", other[0] > one[0]), "int32")
    least, most = (hold(T.Select(higher > 0, a, b)) for a, b in ((one[2], other[2]), (other[2], one[2])))
    below = T.Select(higher > 0, one[0] - other[0], other[0] - one[0])
    return best, index, hold(most + least * power_of_two(below * T.float32(LOG2_E)))


def chosen(condition: Any, yes: State, no: State) -> State:
    values = zip(yes, no, KINDS, strict=True)
    return tuple(hold(T.Select(condition > 0, a, b), dtype) for a, b, dtype in values)  # type: ignore[return-value]


def beside(state: State, step: int) -> State:
    """The state of the lane whose number differs by the bit `step`."""
    full = T.uint32(0xFFFFFFFF)
    values = zip(state, KINDS, strict=True)
    return tuple(hold(T.cuda.__shfl_xor_sync(full, value, step, 32), dtype) for value, dtype in values)  # type: ignore[return-value]
