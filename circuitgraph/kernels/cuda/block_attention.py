"""Paged attention of blocks: rows that lie side by side and, as a rule, are of one sequence, read its cache once.

A block of threads has the rows of one block, one KV head and a part of the context. The rows of its products are the queries of
all those rows and of all query heads that share the KV head, 16 a warp; tiles of 64 cache rows go through a ring that all warps
share. Four warps or more multiply by `wgmma`, which reads a tile once for four of them; two by `mma`.

Each row has its own end. Rows of several sequences are taken one sequence after the other: nothing is assumed of them but that
values are finite, since those of hidden rows are multiplied by 0. Where ends differ, parts are cut by the farthest one.

The parts are a cluster of thread blocks, which read each other's sums from shared memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from tvm.backend.cuda.lang.alloc_pool import SMEMPool
from tvm.tirx.script import builder as T

from .attention import Query, cluster_sync, some_of_block
from .latent import SWIZZLE_128, power_of_two
from .paged import LOAD_TRANSPOSED
from .values import COPY_ONCE, LOAD, LOG2_E, LOWEST, do, from_lane, hold, load_int, put, register, wide, zeros

TILE = 64
"""Cache rows of a tile."""
FLOOR = LOWEST / 2
"""The largest score so far of a row that has seen nothing: a hidden row's weight beside it is zero."""
PANEL = TILE * 128
"""Bytes of the 64 columns of a tile that `wgmma` reads as one: rows of 128 bytes, whose 16-byte chunks are swizzled by row."""
SPARE = 8
"""Floats between the sums of one query and of the next, against bank conflicts."""
EACH = 4
"""Columns side by side that a thread joins."""


def warps_of(block: int, group: int) -> int:
    """Of a thread block: 16 queries each."""
    return block * group // 16


def shared_bytes(dim: int, block: int, group: int, stages: int) -> int:
    queries = block * group
    return max(stages * 2 * TILE * dim * 2, queries * (dim + SPARE) * 4) + queries * 2 * 4


class BlockAttention:
    """One launch. words: q as [rows, heads * dim / 2] words; kind: bf16 or f16, of q and cache; block: rows that lie together."""

    def __init__(self, env: Any, query: Query, words: Any, kind: str, *, block: int, stages: int):
        self.env, self.query, self.words, self.kind = env, query, words, kind
        self.block, self.stages = block, stages
        self.rows, self.heads, self.dim = (int(size) for size in query.q.shape)
        self.kv_heads = query.keys.heads
        self.group = self.heads // self.kv_heads
        self.queries, self.warps = block * self.group, warps_of(block, self.group)
        self.chunks, self.each = self.dim // 8, TILE // self.warps
        """16 bytes of a cache row; rows of a tile that a warp copies."""
        self.mma = f"mma.sync.aligned.m16n8k16.row.col.f32.{kind}.{kind}.f32"
        self.wgmma = f"wgmma.mma_async.sync.aligned.m64n{{}}k16.f32.{kind}.{kind}" if self.warps % 4 == 0 else ""

    def emit(self, finish: Callable[[Any, Any, Any, Any], None]) -> None:
        """finish(row, head, column, value): what to do with the results; zero where a row sees nothing."""
        parts = self.query.parts
        blocks = -(-self.rows // self.block) * self.kv_heads * parts
        with self.env.kernel(blocks, self.warps, early=True, cluster=parts, once=True) as at:
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
                self.first = from_lane(self.row_start[0], lead[0], "int32")
                self._attend(sequence)
                put(open_rows, T.Select(T.EQ(self.row_sequence[0], sequence), T.int32(0), open_rows[0]))
                put(lead, self._first_open(open_rows[0]))
            self.env.wait()  # where there is no row to attend for, too
            self._join(finish)

    def _share(self) -> None:
        pool = SMEMPool()
        words = max(self.stages * 2 * TILE * self.chunks * 4, self.queries * (self.dim + SPARE))
        self.memory = pool.alloc((words,), "uint32", align=1024)
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
        self.sequences, self.ends = register("int32", 2, "sequences"), register("int32", 2, "ends")
        for half in range(2):
            row = hold(T.floordiv(self._place(half), self.group), "int32")
            put(self.sequences, from_lane(self.row_sequence[0], row, "int32"), half)
            put(self.ends, from_lane(self.row_end[0], row, "int32"), half)

    def _place(self, half: int) -> Any:
        """One of a thread's two queries, among those of the block."""
        return self.at.warp * 16 + half * 8 + T.floordiv(self.at.lane, 4)

    def _first_open(self, open_rows: Any) -> Any:
        """The first row that has not been attended to, or 32."""
        return hold(T.cuda.warp_min(hold(T.Select(open_rows > 0, self.at.lane, T.int32(32)), "int32")), "int32")

    def _load_queries(self) -> None:
        """As fragments of the scores' product. Rows that there are not are replaced by the last one: they see nothing."""
        lane = self.at.lane
        self.q = register("uint32", self.dim // 4, "q")
        for half in range(2):
            place = self._place(half)
            row = hold(T.min(self.first_row + T.floordiv(place, self.group), T.int32(self.rows - 1)), "int32")
            head = self.kv_head * self.group + T.floormod(place, self.group)
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
        found = [self._find_lines(sequence, tile[0] + stage) for stage in range(stages)]
        self.env.wait()  # the newest rows of the cache are of the kernel before; where all lie is known earlier
        for stage, lines in enumerate(found[:-1]):
            self._copy(lines[0], tile[0] + stage, stage)
        lines = found[-1]
        self._load_queries()
        with T.While(tile[0] < self.stop):
            do(T.ptx.cp.async_.wait_group(stages - 2))
            if self.wgmma:
                do(T.ptx.fence.proxy.async_.shared__cta())
            do(T.cuda.cta_sync())
            behind = hold(T.Select(T.EQ(slot[0], 0), T.int32(stages - 1), slot[0] - 1), "int32")
            self._copy(lines[0], tile[0] + (stages - 1), behind)
            put(lines, self._find_lines(sequence, tile[0] + stages)[0])
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

    def _find_lines(self, sequence: Any, tile: Any) -> Any:
        """Lane i's is of the i-th row of a tile that a warp copies. Rows that nobody sees are replaced by one that somebody does:
        nothing unknown is read."""
        found = register("int32", name="found")
        put(found, T.int32(0))
        with T.If(tile < self.stop), T.Then():
            token = tile * TILE + self.at.warp * self.each + self.at.lane % self.each
            token = hold(T.min(T.max(token, self.first), self.longest - 1), "int32")
            put(found, T.Cast("int32", self.query.line(sequence, token, self.kv_head)))
        return found

    def _copy(self, found: Any, tile: Any, slot: Any) -> None:
        """Start the copies of a warp's rows of a tile: 16 bytes a lane, chunks swizzled by row against bank conflicts."""
        before = self.at.warp * self.each
        with T.If(tile < self.stop), T.Then():
            for index in range(self.each * self.chunks // 32):
                piece = index * 32 + self.at.lane
                row, chunk = hold(T.floordiv(piece, self.chunks), "int32"), T.floormod(piece, self.chunks)
                line = from_lane(found, row, "int32")
                place = self._in_tile(before + row, chunk)
                for half, cache in enumerate((self.query.keys, self.query.values)):
                    source = cache.lines.ptr_to([wide(line), wide(chunk * 8)])
                    do(T.ptx[COPY_ONCE](self.ring.ptr_to([slot, half, place, 0]), source, 16, self.at.once))
        do(T.ptx.cp.async_.commit_group())

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
        """The running largest of the scores, and the weights in their place."""
        scale = T.float32(self.query.scale * LOG2_E)
        for index in range(TILE // 2):
            put(self.scores, self.scores[index] * scale, index)
        with T.If(T.Or(tile * TILE < self.first, tile * TILE + TILE > self.shortest)), T.Then():
            self._hide(tile)
        for half in range(2):
            mine = [eight * 4 + half * 2 + i for eight in range(TILE // 8) for i in range(2)]
            top = self.largest[half]
            for index in mine:
                top = T.max(top, self.scores[index])
            top = hold(T.cuda.warp_max(hold(top), 4))
            shrink = power_of_two(self.largest[half] - top)
            put(self.largest, top, half)
            put(self.total, self.total[half] * shrink, half)
            for index in mine:
                put(self.scores, power_of_two(self.scores[index] - top), index)
                put(self.total, self.total[half] + self.scores[index], half)
            for index in range(self.dim // 8):
                for i in range(2):
                    put(self.sums, self.sums[index * 4 + half * 2 + i] * shrink, index * 4 + half * 2 + i)

    def _hide(self, tile: Any) -> None:
        """Scores of cache rows that a query does not see."""
        first = hold(tile * TILE + self.at.lane % 4 * 2, "int32")
        for index in range(TILE // 2):
            token = first + (index // 4 * 8 + index % 2)
            seen = T.And(token >= self.first, token < self.visible[index % 4 // 2])
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
            keys = self._descriptor(slot, 0)
            for step in range(self.dim // 16):
                q = [self.q[step * 4 + i] for i in range(4)]
                ahead = T.uint64((step // 4 * PANEL + step % 4 * 32) // 16)
                do(T.ptx[self.wgmma.format(TILE)](*scores, *q, keys + ahead, T.bool(step > 0), 1, 1, 0))

    def _multiply_values(self, slot: Any) -> None:
        """The sums of one product are the fragments of the next."""
        sums, weights = [self.sums[i] for i in range(self.dim // 2)], register("uint32", TILE // 4, "weights")
        for index in range(TILE // 4):
            self._pair(weights[index], index * 2)
        with self._multiplying(self.sums, self.dim // 2):
            values = self._descriptor(slot, 1)
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
            do(T.ptx["mov.b32"](target[index], target[index]))

    def _descriptor(self, slot: Any, half: int) -> Any:
        """Of a tile's keys as they lie, or of its values transposed, 64 columns a panel."""
        made, start = register("uint64", name="descriptor"), self.ring.ptr_to([slot, half, 0, 0])
        apart = PANEL // 16 if half else 1
        do(T.cuda.wgmma.encode_matrix_descriptor(T.address_of(made[0]), start, apart, 64, SWIZZLE_128))
        return made[0]

    # -- the end -----------------------------------------------------------------------------------------------

    def _join(self, finish: Callable[[Any, Any, Any, Any], None]) -> None:
        """Every block of the cluster finishes some of the elements, with all blocks' sums."""
        at, parts = self.at, self.query.parts
        for half in range(2):
            put(self.total, T.cuda.warp_sum(self.total[half], 4), half)
            place = self._place(half)
            for index in range(self.dim // 8):
                for i in range(2):
                    column = index * 8 + at.lane % 4 * 2 + i
                    T.buffer_store(self.sums_of_block, self.sums[index * 4 + half * 2 + i], [place, column])
            with T.If(at.lane % 4 < 1), T.Then():
                T.buffer_store(self.stats, self.largest[half], [place, 0])
                T.buffer_store(self.stats, self.total[half], [place, 1])
        cluster_sync(parts)
        units, threads = self.queries * self.dim // EACH, self.warps * 32
        turns = -(-units // (parts * threads))
        everything = [self._found((turn * parts + self.part) * threads + self.thread) for turn in range(turns)]
        for place, column, found in everything:
            shares = self._shares([stats for stats, _ in found])
            row = hold(self.first_row + T.floordiv(place, self.group), "int32")
            head = hold(self.kv_head * self.group + T.floormod(place, self.group), "int32")
            values = [hold(sum(share * sums[i] for share, (_, sums) in zip(shares, found, strict=True))) for i in range(EACH)]
            with T.If(T.And(place < self.queries, row < self.rows)), T.Then():
                for i, value in enumerate(values):
                    finish(row, head, hold(column + i, "int32"), value)
        if parts > 1:
            cluster_sync(parts)  # the others may still be reading this block's sums

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
