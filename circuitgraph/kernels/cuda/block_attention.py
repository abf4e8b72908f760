"""Paged attention of blocks: rows that lie side by side and, as a rule, are of one sequence, read its cache once.

A block of threads has the rows of one block, one KV head and a part of the context. The rows of its products are the queries of
all those rows and of all query heads that share the KV head, 16 a warp; tiles of 64 cache rows go through a ring that all warps
share. Four warps or more multiply by `wgmma`, which reads a tile once for four of them; two by `mma`.

Each row has its own end, and in layers with a window its own start. Rows of several sequences are taken one sequence after the
other: nothing is assumed of them but that values are finite, since those of hidden rows are multiplied by 0. Where ends differ,
parts are cut by the farthest one.

The parts are a cluster of thread blocks, which read each other's sums from shared memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from tvm.backend.cuda.lang.alloc_pool import SMEMPool
from tvm.tirx.script import builder as T

from .attention import Query, some_of_block
from .latent import SWIZZLE_128, power_of_two
from .paged import LOAD_TRANSPOSED
from .values import COPY, COPY_ONCE, LOAD, LOG2_E, LOWEST, cluster_sync, do, from_lane, hold, load_int, put, register, wide, zeros

TILE = 64
"""Cache rows of a tile."""
FLOOR = LOWEST / 2
"""The largest score so far of a row that has seen nothing: a hidden row's weight beside it is zero."""
KEEP = """
__forceinline__ __device__ void circuitgraph_keep(float* value) { asm volatile("" : "+f"(*value) :: "memory"); }
"""
BEHIND = """
__forceinline__ __device__ int circuitgraph_behind(int sequence, int lane) {
  return __popc(__match_any_sync(0xffffffffu, sequence) & (0xfffffffeu << lane));
}
"""
"""Lanes behind this one that have the same sequence."""
SLACK = 8.0
"""Powers of two by which weights may exceed 1."""
PANEL = TILE * 128
"""Bytes of the 64 columns of a tile that `wgmma` reads as one: rows of 128 bytes, whose 16-byte chunks are swizzled by row."""
SPARE = 8
"""Floats between the sums of one query and of the next, against bank conflicts."""
EACH = 4
"""Columns side by side that a thread joins."""


def warps_of(block: int, group: int) -> int:
    """Of a thread block: 16 queries each."""
    return block * group // 16


def keeps_queries(dim: int, block: int, group: int) -> bool:
    """Do queries stay in shared memory? Where both `wgmma` of a tile have one shape, ptxas 13.0 would write the weights over
    queries in registers, which the next tile needs again."""
    return dim == TILE and block * group % 64 == 0


def shared_bytes(dim: int, block: int, group: int, stages: int) -> int:
    queries = block * group
    kept = queries * dim * 2 if keeps_queries(dim, block, group) else 0
    return max(stages * 2 * TILE * dim * 2, queries * (dim + SPARE) * 4) + kept + queries * 2 * 4


def rolled(count: int) -> Any:
    """A loop that stays one."""
    return T.serial(0, count, annotations={"disable_unroll": True})


class BlockAttention:
    """One launch. words: q as [rows, heads * dim / 2] words; kind: bf16 or f16, of q and cache; block: rows that lie together."""

    def __init__(self, env: Any, query: Query, words: Any, kind: str, *, block: int, stages: int):
        self.env, self.query, self.words, self.kind = env, query, words, kind
        self.block, self.stages = block, stages
        self.rows, self.heads, self.dim = query.shape
        self.kv_heads = query.keys.heads
        self.group = self.heads // self.kv_heads
        self.queries, self.warps = block * self.group, warps_of(block, self.group)
        self.chunks, self.each = self.dim // 8, TILE // self.warps
        """16 bytes of a cache row; rows of a tile that a warp copies."""
        self.mma = f"mma.sync.aligned.m16n8k16.row.col.f32.{kind}.{kind}.f32"
        self.wgmma = f"wgmma.mma_async.sync.aligned.m64n{{}}k16.f32.{kind}.{kind}" if self.warps % 4 == 0 else ""

    def emit(self, finish: Callable[[Any, Any, Any, list[Any]], None]) -> None:
        """finish(row, head, column, values): what to do with the results of some columns from this one on; zero where a row sees
        nothing."""
        parts = self.query.parts
        blocks = -(-self.rows // self.block) * self.kv_heads * parts
        with self.env.kernel(blocks, self.warps, early=True, cluster=parts, fence=True, once=True) as at:
            self.at, self.thread = at, hold(at.warp * 32 + at.lane, "int32", "thread")
            self._share()
            self.first_row = hold(T.floordiv(at.block, self.kv_heads * parts) * self.block, "int32", "first_row")
            self.kv_head = hold(T.floormod(T.floordiv(at.block, parts), self.kv_heads), "int32", "kv_head")
            self.part = hold(T.floormod(at.block, parts), "int32", "part")
            self._find_rows()
            self._reset()
            open_rows, lead = register("int32", name="open"), register("int32", name="lead")
            put(open_rows, T.Select(self.row_end[0] > 0, T.int32(1), T.int32(0)))
            put(lead, self._first_open(open_rows[0]))
            with T.While(lead[0] < 32):
                sequence = from_lane(self.row_sequence[0], lead[0], "int32")
                self._find_first(sequence, lead[0])
                self._attend(sequence)
                put(open_rows, T.Select(T.EQ(self.row_sequence[0], sequence), T.int32(0), open_rows[0]))
                put(lead, self._first_open(open_rows[0]))
            self.env.wait()  # where there is no row to attend for, too
            self._join(finish)

    def _share(self) -> None:
        pool = SMEMPool()
        words = max(self.stages * 2 * TILE * self.chunks * 4, self.queries * (self.dim + SPARE))
        self.memory = pool.alloc((words,), "uint32", align=1024)
        kept = keeps_queries(self.dim, self.block, self.group)
        self.kept = pool.alloc((self.queries * self.chunks, 4), "uint32", align=1024) if kept else None
        self.stats = pool.alloc((self.queries, 2), "float32", align=16)
        pool.commit()
        shape, sums = (self.stages, 2, TILE * self.chunks, 4), (self.queries, self.dim + SPARE)
        self.ring = T.decl_buffer(shape, "uint32", data=self.memory.data, scope="shared.dyn")
        self.sums_of_block = T.decl_buffer(sums, "float32", data=self.memory.data, scope="shared.dyn")

    def _in_tile(self, row: Any, chunk: Any) -> Any:
        """Where 16 bytes of a tile's row lie."""
        return T.floordiv(chunk, 8) * (TILE * 8) + row * 8 + T.bitwise_xor(T.floormod(chunk, 8), T.bitwise_and(row, 7))

    # -- the rows of the block ---------------------------------------------------------------------------------

    def _find_rows(self) -> None:
        """Lane i of every warp keeps the sequence, the start and the end of row i of the block, and each thread those of its two
        queries."""
        lane = self.at.lane
        self.row_sequence, self.row_end = register("int32", name="row_sequence"), register("int32", name="row_end")
        self.row_start = register("int32", name="row_start")
        put(self.row_sequence, T.int32(-1))
        put(self.row_end, T.int32(0))
        put(self.row_start, T.int32(0))
        with T.If(T.And(lane < self.block, self.first_row + lane < self.rows)), T.Then():
            put(self.row_end, load_int(self.query.length, [self.first_row + lane]))
            # A row of length 0 is idle: its sequence means nothing.
            with T.If(self.row_end[0] > 0), T.Then():
                put(self.row_sequence, load_int(self.query.seq, [self.first_row + lane]))
                put(self.row_start, T.max(load_int(self.query.start, [self.row_sequence[0]]), T.int32(0)))
        if self.query.sight.limited:
            self._limit_rows()
        self.sequences, self.ends = register("int32", 2, "sequences"), register("int32", 2, "ends")
        self.starts = register("int32", 2, "starts") if self.query.sight.window else None
        for half in range(2):
            row = hold(T.floordiv(self._place(half), self.group), "int32")
            put(self.sequences, from_lane(self.row_sequence[0], row, "int32"), half)
            put(self.ends, from_lane(self.row_end[0], row, "int32"), half)
            if self.starts is not None:
                put(self.starts, from_lane(self.row_start[0], row, "int32"), half)

    def _limit_rows(self) -> None:
        """What a window and causality leave to each row. Idle rows have no sequence, so they are behind nobody."""
        sight, own = self.query.sight, register("int32", name="own")
        named = (self.row_sequence[0], self.at.lane)
        put(own, self.row_end[0] - T.cuda.func_call("circuitgraph_behind", *named, source_code=BEHIND, return_type="int32"))
        with T.If(self.row_end[0] > 0), T.Then():
            if sight.window:
                put(self.row_start, T.max(self.row_start[0], own[0] - sight.window))
            if sight.causal:
                put(self.row_end, own[0])

    def _find_first(self, sequence: Any, lead: Any) -> None:
        """The first cache row that some row of the sequence sees, and, with a window, the last first one."""
        self.first = from_lane(self.row_start[0], lead, "int32")
        if self.starts is not None:
            mine = hold(T.Cast("int32", T.EQ(self.row_sequence[0], sequence)), "int32")
            self.first = hold(T.cuda.warp_min(hold(T.Select(mine > 0, self.row_start[0], self.first), "int32")), "int32", "first")
            self.last_first = hold(T.cuda.warp_max(hold(T.Select(mine > 0, self.row_start[0], self.first), "int32")), "int32")

    def _place(self, half: int) -> Any:
        """One of a thread's two queries, among those of the block."""
        return self.at.warp * 16 + half * 8 + T.floordiv(self.at.lane, 4)

    def _first_open(self, open_rows: Any) -> Any:
        """The first row that has not been attended to, or 32."""
        return hold(T.cuda.warp_min(hold(T.Select(open_rows > 0, self.at.lane, T.int32(32)), "int32")), "int32")

    def _query(self, place: Any) -> tuple[Any, Any]:
        """(row, head) of a query of the block. Rows that there are not are replaced by the last one: they see nothing."""
        row = hold(T.min(self.first_row + T.floordiv(place, self.group), T.int32(self.rows - 1)), "int32")
        return row, hold(self.kv_head * self.group + T.floormod(place, self.group), "int32")

    @property
    def _staged(self) -> bool:
        """Do the queries fit the slot of the ring that is filled last?"""
        return self.queries <= 2 * TILE or self.kept is not None

    def _in_stage(self, row: Any, chunk: Any) -> Any:
        """Where 16 bytes of one of a warp's queries lie until they are fragments."""
        place = (self.at.warp * 16 + row) * self.chunks + T.bitwise_xor(chunk, T.bitwise_and(row, 7))
        if self.kept is not None:
            return self.kept.ptr_to([place, 0])
        half = T.floordiv(place, TILE * self.chunks)
        return self.ring.ptr_to([self.stages - 1, half, T.floormod(place, TILE * self.chunks), 0])

    def _start_queries(self) -> None:
        """Start the copies of a warp's queries, 16 bytes a lane."""
        for index in range(16 * self.chunks // 32 if self._staged else 0):
            piece = index * 32 + self.at.lane
            place, chunk = hold(T.floordiv(piece, self.chunks), "int32"), T.floormod(piece, self.chunks)
            row, head = self._query(self.at.warp * 16 + place)
            source = self.words.ptr_to([row, head * (self.dim // 2) + chunk * 4])
            do(T.ptx[COPY](self._in_stage(place, chunk), source, 16))
        do(T.ptx.cp.async_.commit_group())

    def _load_queries(self) -> None:
        """As fragments of the scores' product."""
        if self.kept is not None:
            return
        lane = self.at.lane
        self.q = register("uint32", self.dim // 4, "q")
        if self._staged:
            do(T.ptx.cp.async_.wait_group(self.stages - 1))
            do(T.cuda.warp_sync())
            for step in range(self.dim // 16):
                source = self._in_stage(T.floormod(lane, 16), step * 2 + T.floordiv(lane, 16))
                do(T.ptx[LOAD](*(self.q[step * 4 + i] for i in range(4)), source))
            return
        for half in range(2):
            row, head = self._query(self._place(half))
            first = hold(head * (self.dim // 2) + lane % 4, "int32")
            for index in range(self.dim // 8):
                target = self.q[index // 2 * 4 + index % 2 * 2 + half]
                do(T.ptx["ld.global.b32"](target, self.words.ptr_to([row, first + index * 4])))

    def _reset(self) -> None:
        self.sums = register("float32", self.dim // 2, "sums")
        self.scores = register("float32", TILE // 2, "scores")
        self.largest, self.total = register("float32", 2, "largest"), register("float32", 2, "total")
        zeros(self.sums, self.dim // 2)
        zeros(self.largest, 2, FLOOR)
        zeros(self.total, 2)

    # -- one sequence ------------------------------------------------------------------------------------------

    def _attend(self, sequence: Any) -> None:
        """All tiles of this part of a sequence's context, for the rows that are of it."""
        mine = T.Select(T.EQ(self.row_sequence[0], sequence), self.row_end[0], T.int32(0))
        self.longest = hold(T.cuda.warp_max(hold(mine, "int32")), "int32", "longest")
        self.visible = register("int32", 2, "visible")
        for half in range(2):
            put(self.visible, T.Select(T.EQ(self.sequences[half], sequence), self.ends[half], T.int32(0)), half)
        shortest = hold(T.min(self.visible[0], self.visible[1]), "int32")
        self.shortest = hold(T.cuda.warp_min(shortest), "int32", "shortest")
        parts, stages = self.query.parts, self.stages
        tile, slot = register("int32", name="tile"), register("int32", name="slot")
        first_tile = hold(T.floordiv(self.first, TILE), "int32")
        last_tile = T.Select(self.first < self.longest, T.floordiv(self.longest + (TILE - 1), TILE), first_tile)
        last_tile = hold(last_tile, "int32")
        each = hold(T.floordiv(last_tile - first_tile + (parts - 1), parts), "int32")
        put(tile, first_tile + self.part * each)
        self.stop = hold(T.min(tile[0] + each, last_tile), "int32", "stop")
        put(slot, T.int32(0))
        self._fill(sequence, tile[0])
        ahead = self._find(sequence, tile[0] + (stages - 1))
        with T.While(tile[0] < self.stop):
            do(T.ptx.cp.async_.wait_group(stages - 2))
            if self.wgmma:
                do(T.ptx.fence.proxy.async_.shared__cta())
            do(T.cuda.cta_sync())
            behind = hold(T.Select(T.EQ(slot[0], 0), T.int32(stages - 1), slot[0] - 1), "int32")
            self._copy(ahead[0], tile[0] + (stages - 1), behind)
            do(T.ptx.cp.async_.commit_group())
            put(ahead, self._find(sequence, tile[0] + stages)[0])
            if self.wgmma:
                self._multiply_keys(slot[0])
                self._weigh(tile[0])
                self._multiply_values(slot[0])
            else:
                self._score(slot[0])
                self._weigh(tile[0])
                self._add_values(slot[0])
            put(tile, tile[0] + 1)
            put(slot, T.Select(T.EQ(slot[0], stages - 1), T.int32(0), slot[0] + 1))
        do(T.ptx.cp.async_.wait_group(0))
        do(T.cuda.cta_sync())

    def _token(self, tile: Any) -> Any:
        """Of lane i: the i-th row of a tile that its warp copies. Rows that nobody sees are replaced by one that somebody does:
        nothing unknown is read."""
        token = tile * TILE + self.at.warp * self.each + self.at.lane % self.each
        return hold(T.min(T.max(token, self.first), self.longest - 1), "int32", "token")

    def _find(self, sequence: Any, tile: Any) -> Any:
        """The cache's block with the lane's row of a tile. It is used later: several are on their way at once."""
        found = register("int32", name="found")
        put(found, T.int32(0))
        with T.If(tile < self.stop), T.Then():
            put(found, self.query.block(sequence, self._token(tile)))
        return found

    def _fill(self, sequence: Any, first: Any) -> None:
        """Start the first tiles and load the queries. Rows that the kernel before may be writing come last, all others before
        the wait. Loops, not written out: the code of a kernel comes from memory once in every step."""
        fresh, stages = self.query.fresh, self.stages - 1
        settled = first if fresh is None else hold(T.floordiv(self.longest - fresh, TILE), "int32", "settled")
        if fresh is not None:
            with rolled(stages) as stage, T.If(first + stage < settled), T.Then():
                self._copy(self._find(sequence, first + stage)[0], first + stage, stage)
        self.env.wait()
        self._start_queries()
        with rolled(stages) as stage:
            with T.If(first + stage >= settled), T.Then():
                self._copy(self._find(sequence, first + stage)[0], first + stage, stage)
            do(T.ptx.cp.async_.commit_group())
        self.env.release()  # only now: the next kernel fills the memory's queues with weights
        self._load_queries()

    def _copy(self, found: Any, tile: Any, slot: Any) -> None:
        """Start the copies of a warp's rows of a tile: 16 bytes a lane, chunks swizzled by row against bank conflicts."""
        before = self.at.warp * self.each
        with T.If(tile < self.stop), T.Then():
            lines = hold(T.Cast("int32", self.query.line_in(found, self._token(tile), self.kv_head)), "int32", "lines")
            for index in range(self.each * self.chunks // 32):
                piece = index * 32 + self.at.lane
                row, chunk = hold(T.floordiv(piece, self.chunks), "int32"), T.floormod(piece, self.chunks)
                line = from_lane(lines, row, "int32")
                place = self._in_tile(before + row, chunk)
                for half, cache in enumerate((self.query.keys, self.query.values)):
                    source = cache.lines.ptr_to([wide(line), wide(chunk * 8)])
                    do(T.ptx[COPY_ONCE](self.ring.ptr_to([slot, half, place, 0]), source, 16, self.at.once))

    def _score(self, slot: Any) -> None:
        """The products of 64 cache rows by `mma`."""
        lane, pieces = self.at.lane, register("uint32", TILE // 2, "pieces")
        zeros(self.scores, TILE // 2)
        for step in range(self.dim // 32):
            for eight in range(TILE // 8):  # all on their way before the first is used
                place = self._in_tile(eight * 8 + lane % 8, step * 4 + T.floordiv(lane, 8))
                do(T.ptx[LOAD](*(pieces[eight * 4 + i] for i in range(4)), self.ring.ptr_to([slot, 0, place, 0])))
            for part in range(2):
                for eight in range(TILE // 8):
                    c = [self.scores[eight * 4 + i] for i in range(4)]
                    q = [self.q[(step * 2 + part) * 4 + i] for i in range(4)]
                    do(T.ptx[self.mma](*c, *q, pieces[eight * 4 + part * 2], pieces[eight * 4 + part * 2 + 1], *c))

    def _weigh(self, tile: Any) -> None:
        """The weights, in place of the scores. They are relative to a score that was the largest not long ago: only where a new
        one is greater by `SLACK` are the sums so far made smaller."""
        scale, before = T.float32(self.query.scale * LOG2_E), register("float32", 2, "before")
        first = self.first if self.starts is None else self.last_first
        with T.If(T.Or(tile * TILE < first, tile * TILE + TILE > self.shortest)), T.Then():
            self._hide(tile)
        for half in range(2):
            mine = [eight * 4 + half * 2 + i for eight in range(TILE // 8) for i in range(2)]
            top = self.largest[half]
            for index in mine:
                top = T.max(top, self.scores[index])
            top = hold(T.cuda.warp_max(hold(top), 4))
            put(before, self.largest[half], half)
            put(self.largest, T.Select((top - self.largest[half]) * scale > T.float32(SLACK), top, self.largest[half]), half)
        self._shrink(before, scale)
        for half in range(2):
            mine = [eight * 4 + half * 2 + i for eight in range(TILE // 8) for i in range(2)]
            top = hold(self.largest[half] * scale)
            for index in mine:
                put(self.scores, power_of_two(self.scores[index] * scale - top), index)
                put(self.total, self.total[half] + self.scores[index], half)

    def _shrink(self, before: Any, scale: Any) -> None:
        """What has been summed up relative to `before`, where a row of the warp has a new largest score; others stay."""
        grown = T.Or(self.largest[0] > before[0], self.largest[1] > before[1])
        with T.If(T.cuda.any_sync(T.uint32(0xFFFFFFFF), T.Cast("int32", grown)) > 0), T.Then():
            for half in range(2):
                shrink = hold(power_of_two((before[half] - self.largest[half]) * scale))
                put(self.total, self.total[half] * shrink, half)
                for index in range(self.dim // 8):
                    for i in range(2):
                        put(self.sums, self.sums[index * 4 + half * 2 + i] * shrink, index * 4 + half * 2 + i)

    def _hide(self, tile: Any) -> None:
        """Scores of cache rows that a query does not see."""
        first = hold(tile * TILE + self.at.lane % 4 * 2, "int32")
        for index in range(TILE // 2):
            token = first + (index // 4 * 8 + index % 2)
            half = index % 4 // 2
            seen = T.And(token >= (self.first if self.starts is None else self.starts[half]), token < self.visible[half])
            put(self.scores, T.Select(seen, self.scores[index], T.float32(LOWEST)), index)

    def _add_values(self, slot: Any) -> None:
        lane, weights = self.at.lane, register("uint32", 4, "weights")
        pieces = register("uint32", self.dim // 4, "pieces")
        for sixteen in range(TILE // 16):
            row = sixteen * 16 + T.floormod(T.floordiv(lane, 8), 2) * 8 + lane % 8
            for step in range(self.dim // 16):
                place = self._in_tile(row, step * 2 + T.floordiv(lane, 16))
                target = (pieces[step * 4 + i] for i in range(4))
                do(T.ptx[LOAD_TRANSPOSED](*target, self.ring.ptr_to([slot, 1, place, 0])))
            for index in range(4):  # the sums of one product are the fragments of the next
                pair = (sixteen * 2 + index // 2) * 4 + index % 2 * 2
                self._pair(weights[index], pair)
            for eight in range(self.dim // 8):
                c = [self.sums[eight * 4 + i] for i in range(4)]
                a = [weights[i] for i in range(4)]
                do(T.ptx[self.mma](*c, *a, pieces[eight * 2], pieces[eight * 2 + 1], *c))

    def _pair(self, target: Any, first: int) -> None:
        do(T.ptx[f"cvt.rn.{self.kind}x2.f32"](target, self.scores[first + 1], self.scores[first]))

    # -- products by wgmma -------------------------------------------------------------------------------------

    def _multiply_keys(self, slot: Any) -> None:
        scores = [self.scores[i] for i in range(TILE // 2)]
        with self._multiplying(self.scores, TILE // 2):
            keys, kept = self._descriptor(self.ring.ptr_to([slot, 0, 0, 0]), 1), None
            if self.kept is not None:
                kept = self._descriptor(self.kept.ptr_to([T.floordiv(self.at.warp, 4) * 64 * self.chunks, 0]), 1)
            for step in range(self.dim // 16):
                ahead, more = T.uint64((step // 4 * PANEL + step % 4 * 32) // 16), T.bool(step > 0)
                if kept is None:
                    q = [self.q[step * 4 + i] for i in range(4)]
                    do(T.ptx[self.wgmma.format(TILE)](*scores, *q, keys + ahead, more, 1, 1, 0))
                else:
                    do(T.ptx[self.wgmma.format(TILE)](*scores, kept + ahead, keys + ahead, more, 1, 1, 0, 0))

    def _multiply_values(self, slot: Any) -> None:
        """The sums of one product are the fragments of the next."""
        sums, weights = [self.sums[i] for i in range(self.dim // 2)], register("uint32", TILE // 4, "weights")
        for index in range(TILE // 4):
            self._pair(weights[index], index * 2)
        with self._multiplying(self.sums, self.dim // 2):
            values = self._descriptor(self.ring.ptr_to([slot, 1, 0, 0]), PANEL // 16)
            for step in range(TILE // 16):
                a = [weights[step * 4 + i] for i in range(4)]
                do(T.ptx[self.wgmma.format(self.dim)](*sums, *a, values + T.uint64(step * 16 * 128 // 16), T.bool(True), 1, 1, 1))

    @contextmanager
    def _multiplying(self, target: Any, count: int) -> Iterator[None]:
        """`wgmma` writes registers while the code goes on: what comes before and after is kept on its side."""
        self._ordered(target, count)
        do(T.ptx.wgmma.fence.sync.aligned())
        yield
        do(T.ptx.wgmma.commit_group.sync.aligned())
        do(T.ptx.wgmma.wait_group.sync.aligned(0))
        self._ordered(target, count)

    def _ordered(self, target: Any, count: int) -> None:
        for index in range(count):
            do(T.cuda.func_call("circuitgraph_keep", T.address_of(target[index]), source_code=KEEP))

    def _descriptor(self, start: Any, apart: int) -> Any:
        """Of a tile's keys or of queries as they lie, or of its values transposed, 64 columns a panel, `apart` 16 bytes."""
        made = register("uint64", name="descriptor")
        do(T.cuda.wgmma.encode_matrix_descriptor(T.address_of(made[0]), start, apart, 64, SWIZZLE_128))
        return made[0]

    # -- the end -----------------------------------------------------------------------------------------------

    def _join(self, finish: Callable[[Any, Any, Any, list[Any]], None]) -> None:
        """Every block of the cluster finishes some of the elements, with all blocks' sums."""
        at, parts = self.at, self.query.parts
        for half in range(2):
            put(self.total, T.cuda.warp_sum(self.total[half], 4), half)
            place = self._place(half)
            for index in range(self.dim // 8):
                target = self.sums_of_block.ptr_to([place, index * 8 + at.lane % 4 * 2])
                do(T.ptx["st.shared.v2.f32"](target, self.sums[index * 4 + half * 2], self.sums[index * 4 + half * 2 + 1]))
            with T.If(at.lane % 4 < 1), T.Then():
                T.buffer_store(self.stats, self.largest[half] * T.float32(self.query.scale * LOG2_E), [place, 0])
                T.buffer_store(self.stats, self.total[half], [place, 1])
        cluster_sync(parts)
        units, threads = self.queries * self.dim // EACH, self.warps * 32
        turns = -(-units // (parts * threads))
        everything = [self._found((turn * parts + self.part) * threads + self.thread) for turn in range(turns)]
        joined = []
        for place, column, found in everything:
            shares = self._shares([stats for stats, _ in found])
            values = register("float32", EACH, "values")
            for i in range(EACH):
                put(values, sum(share * sums[i] for share, (_, sums) in zip(shares, found, strict=True)), i)
            joined.append((place, column, values))
        if parts > 1:
            # A release would wait for all memory. What is added up has come from the others, which is enough: the additions have
            # to be issued before the arrival. Nothing in PTX says so; a test reads the SASS.
            for _, _, values in joined:
                self._ordered(values, EACH)
            do(T.ptx.barrier.cluster.arrive.relaxed.aligned())
        for place, column, values in joined:
            row = hold(self.first_row + T.floordiv(place, self.group), "int32")
            head = hold(self.kv_head * self.group + T.floormod(place, self.group), "int32")
            with T.If(T.And(place < self.queries, row < self.rows)), T.Then():
                finish(row, head, column, [values[i] for i in range(EACH)])
        if parts > 1:  # the others may still be reading this block's sums
            do(T.ptx.barrier.cluster.wait.acquire.aligned())

    def _found(self, unit: Any) -> tuple[Any, Any, list[tuple[Any, Any]]]:
        """(query, first column, what every block has of them: largest and total, sums) of some columns, on its way."""
        place = hold(T.floordiv(unit, self.dim // EACH), "int32")
        column = hold(T.floormod(unit, self.dim // EACH) * EACH, "int32")
        nearest, found = T.min(place, T.int32(self.queries - 1)), []
        for part in range(self.query.parts):
            stats = some_of_block(self.query.parts, part, self.stats.ptr_to([nearest, 0]), 2)
            found.append((stats, some_of_block(self.query.parts, part, self.sums_of_block.ptr_to([nearest, column]), EACH)))
        return place, column, found

    def _shares(self, stats: list[Any]) -> list[Any]:
        """What each part of a query's context counts: zero where there is nothing to see."""
        top, total = register("float32", name="top"), register("float32", name="joined")
        put(top, T.float32(FLOOR))
        put(total, T.float32(0))
        for largest in stats:
            put(top, T.max(top[0], largest[0]))
        shares = [hold(T.exp2(largest[0] - top[0])) for largest in stats]
        for share, of_part in zip(shares, stats, strict=True):
            put(total, total[0] + share * of_part[1])
        over = hold(T.Select(total[0] > T.float32(0), T.float32(1) / total[0], T.float32(0)))
        return [hold(share * over) for share in shares]
