"""Matrix products of many rows on tensor cores: tiles of x and weights through a ring in shared memory.

A block makes one tile of the result. Sums go through shared memory once more at the end, so that the epilogue is a small
loop over elements, whatever it computes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tvm.backend.cuda.lang.alloc_pool import SMEMPool
from tvm.tirx.script import builder as T

from .plain import Best, Logits, Partials, Projection
from .values import COPY, LOAD, do, hold, put, register, wide, zeros

DEPTH = 64
"""Columns of x and weights in one stage: 128 bytes, 8 chunks of 16."""

WARPS = (2, 4)
"""Warps of a block, along the rows and along the weights."""


@dataclass(frozen=True)
class Tile:
    """rows of x, weight rows, and stages of the ring."""

    rows: int
    weights: int
    stages: int

    @property
    def shared_bytes(self) -> int:
        ring = self.stages * (self.rows + self.weights) * DEPTH * 2
        return max(ring, self.rows * (self.weights + 4) * 4)


class Tiles:
    """One launch. x: [rows, K / 2] words; weights: [columns, K / 2] words; one or two weights a projection."""

    def __init__(self, env: Any, tile: Tile, x: Any, kind: str, projections: Sequence[Projection]):
        self.env, self.tile, self.x, self.kind, self.projections = env, tile, x, kind, projections
        self.mma = f"mma.sync.aligned.m16n8k16.row.col.f32.{kind}.{kind}.f32"
        self.matrices = len(projections[0].weights)
        self.width = tile.weights // self.matrices
        self.counts = [-(-projection.columns // self.width) for projection in projections]
        self.rows, self.depth = env.plan.rows, int(x.shape[1]) * 2
        self.row_tiles = -(-self.rows // tile.rows)
        self.parts = (tile.rows // WARPS[0] // 16, tile.weights // WARPS[1] // 16)

    @property
    def columns_of_tiles(self) -> int:
        return sum(self.counts)

    def emit(self, *, best: Partials | None = None, logits: Logits | None = None) -> None:
        """best: keep the best column of every row and tile instead of finishing elements."""
        tile = self.tile
        with self.env.kernel(self.columns_of_tiles * self.row_tiles, WARPS[0] * WARPS[1]) as at:
            self.at, self.thread = at, hold(at.warp * 32 + at.lane, "int32")
            pool = SMEMPool()
            memory = pool.alloc((tile.shared_bytes // 4,), "uint32", align=128)
            pool.commit()
            self._declare(memory)
            self.results = T.decl_buffer((tile.rows, tile.weights + 4), "float32", data=memory.data, scope="shared.dyn")
            # Row tiles of the same weights run side by side: weights are read from memory once.
            self.first_row = hold(T.floormod(at.block, self.row_tiles) * tile.rows, "int32")
            self.place = hold(T.floordiv(at.block, self.row_tiles), "int32")
            self._find_sources()
            self._multiply()
            self._share()
            if best is None:
                self._finish()
            else:
                self._keep_best(best, logits)

    # -- the ring ----------------------------------------------------------------------------------------------

    def _declare(self, memory: Any) -> None:
        """Views of shared memory."""
        shape = (self.tile.stages, self.tile.rows + self.tile.weights, 8, 4)
        self.ring = T.decl_buffer(shape, "uint32", data=memory.data, scope="shared.dyn")

    def _find_sources(self) -> None:
        """Addresses of the chunks that this thread copies in every stage: one chunk column of every 32nd row."""
        tile, threads = self.tile, WARPS[0] * WARPS[1] * 32
        self.lines = (tile.rows + tile.weights) * 8 // threads
        self.sources = register("uint64", self.lines, "source")
        self.chunk = self.thread % 8
        for index in range(self.lines):
            line = index * (threads // 8) + T.floordiv(self.thread, 8)
            if index * (threads // 8) < tile.rows:
                row = T.min(self.first_row + line, T.int32(self.rows - 1))
                address = T.reinterpret("uint64", self.x.ptr_to([wide(row), self.chunk * 4]))
            else:
                address = self._weight_address(hold(line - tile.rows, "int32"))
            put(self.sources, address, index)

    def _weight_address(self, line: Any) -> Any:
        address, first = None, self.columns_of_tiles
        for projection, count in reversed(list(zip(self.projections, self.counts, strict=True))):
            first -= count
            within = line if self.matrices == 1 else T.floormod(line, self.width)
            row = T.min((self.place - first) * self.width + within, T.int32(projection.columns - 1))
            row = T.max(row, T.int32(0))
            places = [T.reinterpret("uint64", weight.ptr_to([wide(row), self.chunk * 4])) for weight in projection.weights]
            place = places[0] if self.matrices == 1 else T.if_then_else(line < self.width, places[0], places[1])
            address = place if address is None else T.if_then_else(self.place < first + count, place, address)
        return address

    def _copy(self, stage: Any, slot: Any) -> None:
        threads = WARPS[0] * WARPS[1] * 32
        with T.If(stage < self.depth // DEPTH), T.Then():
            for index in range(self.lines):
                line = index * (threads // 8) + T.floordiv(self.thread, 8)
                source = T.reinterpret("handle", self.sources[index] + T.Cast("uint64", stage) * T.uint64(DEPTH * 2))
                chunk = T.bitwise_xor(self.chunk, T.bitwise_and(line, 7))
                do(T.ptx[COPY](self.ring.ptr_to([slot, line, chunk, 0]), source, 16))
        do(T.ptx.cp.async_.commit_group())

    # -- arithmetic --------------------------------------------------------------------------------------------

    def _multiply(self) -> None:
        stages, (m, n) = self.tile.stages, self.parts
        self.sums = register("float32", m * n * 8, "sums")
        zeros(self.sums, m * n * 8)
        for stage in range(stages - 1):
            self._copy(T.int32(stage), stage)
        slot = register("int32")
        put(slot, T.int32(0))
        with T.serial(0, self.depth // DEPTH) as stage:
            do(T.ptx.cp.async_.wait_group(stages - 2))
            self._ready(stage, slot[0])
            do(T.cuda.cta_sync())
            behind = hold(T.Select(T.EQ(slot[0], 0), T.int32(stages - 1), slot[0] - 1), "int32")
            self._copy(stage + (stages - 1), behind)
            for step in range(DEPTH // 16):
                self._step(stage, slot[0], step)
            put(slot, T.Select(T.EQ(slot[0], stages - 1), T.int32(0), slot[0] + 1))
        do(T.ptx.cp.async_.wait_group(0))
        do(T.cuda.cta_sync())

    def _ready(self, stage: Any, slot: Any) -> None:
        """What a thread does with its own copies of a stage before all threads use them."""

    def _weights(self, stage: Any, slot: Any) -> tuple[Any, Any, int]:
        """(buffer, slot, first line) of a stage's weights."""
        return self.ring, slot, self.tile.rows

    def _step(self, stage: Any, slot: Any, step: int) -> None:
        """16 columns: fragments of x by 16 rows and of weights by 16, and their products."""
        (m, n), lane = self.parts, self.at.lane
        x, w = register("uint32", m * 4, "x"), register("uint32", n * 4, "weights")
        for i in range(m):
            line = self._row_start() + i * 16 + lane % 16
            self._load(x, i, self.ring, slot, line, step * 2 + T.floordiv(lane, 16))
        weights, place, first = self._weights(stage, slot)
        for j in range(n):
            line = first + self._column_start() + j * 16 + T.floordiv(lane, 16) * 8 + lane % 8
            self._load(w, j, weights, place, line, step * 2 + T.floormod(T.floordiv(lane, 8), 2))
        for i in range(m):
            for j in range(n):
                for half in range(2):
                    c = [self.sums[((i * n + j) * 2 + half) * 4 + k] for k in range(4)]
                    a = [x[i * 4 + k] for k in range(4)]
                    do(T.ptx[self.mma](*c, *a, w[j * 4 + half * 2], w[j * 4 + half * 2 + 1], *c))

    def _load(self, target: Any, index: int, buffer: Any, slot: Any, line: Any, chunk: Any) -> None:
        place = [slot, line, T.bitwise_xor(chunk, T.bitwise_and(line, 7)), 0]
        do(T.ptx[LOAD](*(target[index * 4 + i] for i in range(4)), buffer.ptr_to(place)))

    def _row_start(self) -> Any:
        return T.floordiv(self.at.warp, WARPS[1]) * (self.tile.rows // WARPS[0])

    def _column_start(self) -> Any:
        return T.floormod(self.at.warp, WARPS[1]) * (self.tile.weights // WARPS[1])

    # -- results -----------------------------------------------------------------------------------------------

    def _total(self, projection: Projection, matrix: int, column: Any, total: Any) -> Any:
        """The finished sum of a weight row."""
        return total

    def _share(self) -> None:
        (m, n), lane = self.parts, self.at.lane
        for i in range(m):
            for j in range(n):
                for half in range(2):
                    for k in range(4):
                        row = self._row_start() + i * 16 + T.floordiv(lane, 4) + k // 2 * 8
                        column = self._column_start() + j * 16 + half * 8 + lane % 4 * 2 + k % 2
                        T.buffer_store(self.results, self.sums[((i * n + j) * 2 + half) * 4 + k], [row, column])
        do(T.cuda.cta_sync())

    def _finish(self) -> None:
        threads = WARPS[0] * WARPS[1] * 32
        first = 0
        for projection, count in zip(self.projections, self.counts, strict=True):
            with T.If(T.And(self.place >= first, self.place < first + count)), T.Then():
                start = hold((self.place - first) * self.width, "int32")
                with T.serial(0, self.tile.rows * self.width // threads) as turn:
                    element = hold(turn * threads + self.thread, "int32")
                    line, within = T.floordiv(element, self.width), T.floormod(element, self.width)
                    row, column = hold(self.first_row + line, "int32"), hold(start + within, "int32")
                    with T.If(T.And(row < self.rows, column < projection.columns)), T.Then():
                        totals = [self.results[line, within + matrix * self.width] for matrix in range(self.matrices)]
                        sums = [hold(self._total(projection, matrix, column, total)) for matrix, total in enumerate(totals)]
                        projection.finish(row, column, sums)
            first += count

    def _keep_best(self, best: Partials, logits: Any) -> None:
        """A warp a row of the tile."""
        (head,) = self.projections
        columns, warps = head.columns, WARPS[0] * WARPS[1]
        with T.serial(0, self.tile.rows // warps) as turn:
            line = hold(turn * warps + self.at.warp, "int32")
            row = T.min(self.first_row + line, T.int32(self.rows - 1))
            state = Best()
            for index in range(self.width // 32):
                within = index * 32 + self.at.lane
                column = hold(self.place * self.width + within, "int32")
                with T.If(column < columns), T.Then():
                    logits.take(state, row, column, self._total(head, 0, column, self.results[line, within]))
            state.merge_lanes((16, 8, 4, 2, 1))
            with T.If(T.And(self.at.lane < 1, self.first_row + line < self.rows)), T.Then():
                state.write(best, self.place, self.first_row + line)
