"""Paged decode attention on tensor cores: a block for every (row, KV head, part), a ring of cache tiles for every warp.

A tile is 16 cache rows, in whatever blocks they lie; lane i keeps the address of row i % 16 of the tile that is fetched
next. The query heads that share a KV head are the rows of the `mma`, so K and V are read once for all of them. An `mma` has 16
rows: up to 8 heads leave the lower half out, more than 16 are cut into groups that have blocks of their own.

The parts of a row are a cluster of blocks, which read each other's sums from shared memory; without clusters a second launch
joins them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tvm.backend.cuda.lang.alloc_pool import SMEMPool
from tvm.tirx.script import builder as T

from .attention import Query, joined_columns, of_block, some_of_block
from .own_row import PADDING, OwnRow
from .row_program import for_each
from .values import COPY_ONCE, LOAD, LOG2_E, LOWEST, cluster_sync, do, from_lane, hold, put, register, store, wide, zeros

TILE = 16

CLUSTER = 8
"""Blocks of a cluster that every GPU with clusters takes."""

LOAD_TRANSPOSED = "ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16"


def groups_of(heads: int, kv_heads: int) -> tuple[int, int] | None:
    """(groups of a KV head, query heads of each), None where they cannot be cut evenly."""
    each = heads // kv_heads
    groups = -(-each // TILE)
    return None if heads % kv_heads or each % groups else (groups, each // groups)


def shared_bytes(dim: int, group: int, warps: int, stages: int, *, own: bool = False) -> int:
    """own: with a row that it makes itself."""
    row = (group + 2) * (dim + PADDING) * 2 if own else 0
    return warps * (stages * 2 * TILE * dim * 2 + group * (dim + 2) * 4) + group * 8 + row


class PagedAttention:
    """One launch. words: q as [rows, heads * dim / 2] words; kind: bf16 or f16, of q and cache. own: makes the row itself."""

    def __init__(self, env: Any, query: Query, words: Any, kind: str, *, warps: int, stages: int, own: OwnRow | None = None):
        self.env, self.query, self.words, self.own = env, query, words, own
        self.warps, self.stages, self.kind = warps, stages, kind
        self.rows, self.heads, self.dim = query.shape
        cut = groups_of(self.heads, query.keys.heads)
        assert cut is not None, f"{self.heads} query heads over {query.keys.heads}"
        self.groups, self.group = cut
        self.kv_heads = query.keys.heads * self.groups  # a KV head counts once for each of its groups
        self.halves = -(-self.group // 8)  # of the rows of an `mma`
        self.chunks = self.dim // 8
        self.mma = f"mma.sync.aligned.m16n8k16.row.col.f32.{kind}.{kind}.f32"

    def emit(self, finish: Callable[[Any, Any, Any, list[Any]], None] | None = None) -> None:
        """finish(row, head, column, values): what to do with the joined parts of four columns; without it they are left in the
        scratch."""
        query, parts = self.query, self.query.parts
        cluster = parts if finish else 1
        joins, blocks = finish is not None, self.rows * self.kv_heads * parts
        with self.env.kernel(blocks, self.warps, early=True, cluster=cluster, fence=joins, once=True) as at:
            self.at = at
            pool = SMEMPool()
            self.ring = pool.alloc((self.warps, self.stages, 2, TILE * self.chunks, 4), "uint32", align=128)
            self.shared_sums = pool.alloc((self.warps, self.group, self.dim), "float32", align=16)
            self.shared_stats = pool.alloc((self.warps, self.group, 2), "float32", align=16)
            self.part_stats = pool.alloc((self.group, 2), "float32", align=16)
            if self.own:
                self.own.share_memory(pool, self.group, self.warps)
            pool.commit()
            self.row = hold(T.floordiv(at.block, self.kv_heads * parts), "int32", "row")
            self.kv_head = hold(T.floormod(T.floordiv(at.block, parts), self.kv_heads), "int32", "kv_head")
            self.part = hold(T.floormod(at.block, parts), "int32", "part")
            new = self.own.begin(at, self.row) if self.own else None
            self.sequence, self.first, self.end = query.span(self.row)
            self.stored, self.newest = self.end, self.end - 1  # rows before the one, up to the other, lie in the cache
            if new is not None:
                self.stored = hold(T.Select(new >= 0, self.end - 1, self.end), "int32", "stored")
                self.newest = T.max(self.stored - 1, T.int32(0))
            tile, ahead, slot, found = (register("int32", name=name) for name in ("tile", "ahead", "slot", "line"))
            first_tile = T.floordiv(self.first, TILE)
            # A row that starts behind its end has no tile: a tile without visible rows would count them all alike.
            last_tile = T.Select(self.first < self.end, T.floordiv(self.end + (TILE - 1), TILE), first_tile)
            last_tile = hold(last_tile, "int32")
            each = T.floordiv(T.max(last_tile - first_tile, T.int32(0)) + (parts - 1), parts)
            put(tile, first_tile + self.part * each + at.warp)
            self.stop = hold(T.min(tile[0] - at.warp + each, last_tile), "int32")
            if self.own:
                self._find_own(first_tile, last_tile, hold(T.max(each, T.int32(1)), "int32"))
                kv_head = self.kv_head if self.groups == 1 else hold(T.floordiv(self.kv_head, self.groups), "int32")
                self.own.fetch(self.kv_head * self.group, kv_head, self.appends > 0)
            self._fill(tile, ahead, found)
            self._load_query(self.env.release if joins else lambda: None)
            self._reset()
            put(slot, T.int32(0))
            with T.While(tile[0] < self.stop):
                do(T.ptx.cp.async_.wait_group(self.stages - 1))
                do(T.cuda.warp_sync())
                if self.own:
                    self._place_own(self.own, tile[0], slot[0])
                self._score(tile[0], slot[0])
                self._add_values(slot[0])
                do(T.cuda.warp_sync())
                self._copy(slot[0], ahead[0], found[0])
                do(T.ptx.cp.async_.commit_group())
                put(ahead, ahead[0] + self.warps)
                self._find(ahead[0], found)
                put(tile, tile[0] + self.warps)
                put(slot, T.Select(T.EQ(slot[0], self.stages - 1), T.int32(0), slot[0] + 1))
            self._join_warps(finish is not None)
            if finish is not None:
                self._join_parts(finish)

    # -- the ring ----------------------------------------------------------------------------------------------

    def _fill(self, tile: Any, ahead: Any, found: Any) -> None:
        """Start the first tiles; their addresses are looked up together. Rows that the kernel before may be writing come last,
        all others before the wait, half a tile after the other: what that kernel still loads shall not queue behind them."""
        lines = [register("int32") for _ in range(self.stages)]
        for stage, line in enumerate(lines):
            self._find(tile[0] + stage * self.warps, line)
        numbers = [hold(tile[0] + stage * self.warps, "int32") for stage in range(self.stages)]
        settled = [self._settled(number) for number in numbers] if self.query.fresh is not None else []
        for half, (stage, early) in ((half, item) for item in enumerate(settled) for half in range(2)):
            if stage or half:
                do(T.ptx.cp.async_.wait_group(1))
            with T.If(early), T.Then():
                self._copy(stage, numbers[stage], lines[stage][0], half)
            do(T.ptx.cp.async_.commit_group())
        self.env.wait()
        for stage, line in enumerate(lines):
            if not settled:
                self._copy(stage, numbers[stage], line[0])
            else:
                with T.If(T.Not(settled[stage])), T.Then():
                    self._copy(stage, numbers[stage], line[0])
            do(T.ptx.cp.async_.commit_group())
        put(ahead, tile[0] + self.stages * self.warps)
        self._find(ahead[0], found)

    def _settled(self, tile: Any) -> Any:
        """Has the tile no row that a kernel of this program writes? The row of its own is not copied."""
        return T.bool(True) if self.own else (tile + 1) * TILE <= self.end - self.query.fresh

    def _find_own(self, first_tile: Any, last_tile: Any, each: Any) -> None:
        """Does the block have the tile of the row of its own, if there is one?"""
        tile = hold(T.max(last_tile - first_tile - 1, T.int32(0)), "int32")
        mine = T.And(self.stored < self.end, T.EQ(T.floordiv(tile, each), self.part))
        self.appends = hold(T.Cast("int32", mine), "int32", "appends")

    def _place_own(self, own: OwnRow, tile: Any, slot: Any) -> None:
        """The row of its own into its tile; over all rows of the tile where no other row is visible, since none was copied."""

        def place(part: Any, row: Any, chunk: Any) -> Any:
            line = row * self.chunks + T.bitwise_xor(chunk, T.bitwise_and(row, 7))
            return self.ring.ptr_to([self.at.warp, slot, part, line, 0])

        with T.If(T.And(self.appends > 0, T.EQ(tile, T.floordiv(self.stored, TILE)))), T.Then():  # one warp has that tile
            alone = self.first >= self.stored
            first = hold(T.Select(alone, T.int32(0), T.floormod(self.stored, TILE)), "int32")
            own.place(place, first, hold(T.Select(alone, T.int32(TILE), T.int32(1)), "int32"))

    def _find(self, tile: Any, target: Any) -> None:
        """The cache line of the lane's row of a tile. Rows that are not visible are replaced by one that is: their score
        is masked, and nothing unknown is read."""
        put(target, T.int32(0))
        with T.If(tile < self.stop), T.Then():
            token = T.min(T.max(tile * TILE + self.at.lane % TILE, self.first), self.newest)
            kv_head = self.kv_head if self.groups == 1 else T.floordiv(self.kv_head, self.groups)
            put(target, T.Cast("int32", self.query.line(self.sequence, hold(token, "int32"), kv_head)))

    def _copy(self, slot: Any, tile: Any, found: Any, part: int | None = None) -> None:
        """Start the copies of a tile's keys and values: 16 bytes a lane, chunks swizzled by row against bank conflicts. part:
        of its rows the first or the second half alone."""
        turns = self.chunks // 2
        with T.If(T.And(tile < self.stop, self.first < self.stored) if self.own else tile < self.stop), T.Then():
            for index in range(turns) if part is None else range(part * turns // 2, (part + 1) * turns // 2):
                piece = index * 32 + self.at.lane
                row, chunk = T.floordiv(piece, self.chunks), T.floormod(piece, self.chunks)
                line = from_lane(found, row, "int32")
                place = row * self.chunks + T.bitwise_xor(chunk, T.bitwise_and(row, 7))
                for half, cache in enumerate((self.query.keys, self.query.values)):
                    source = cache.lines.ptr_to([wide(line), wide(chunk * 8)])
                    do(T.ptx[COPY_ONCE](self.ring.ptr_to([self.at.warp, slot, half, place, 0]), source, 16, self.at.once))

    # -- one tile ----------------------------------------------------------------------------------------------

    def _member(self, half: int) -> Any:
        """The query head of the group that the lane has a row of, in each half of the rows."""
        row = T.floordiv(self.at.lane, 4)
        return row + 8 * half if half else row

    def _load_query(self, release: Callable[[], None]) -> None:
        """The next kernel starts only then: it fills the memory's queues with weights, and the one before had values to fetch."""
        if self.own:
            self.own.make(release)
        load = self.own.fragments if self.own else self._load_half
        self.q = [load(half) for half in range(self.halves)]
        if not self.own:
            release()

    def _load_half(self, half: int) -> Any:
        q = register("uint32", self.dim // 8, "q")
        for index in range(self.dim // 8):
            put(q, T.uint32(0), index)
        member = self._member(half)
        with T.If(member < self.group), T.Then():
            first = hold((self.kv_head * self.group + member) * (self.dim // 2) + self.at.lane % 4, "int32")
            for index in range(self.dim // 8):
                do(T.ptx["ld.global.b32"](q[index], self.words.ptr_to([self.row, first + index * 4])))
        return q

    def _reset(self) -> None:
        self.sums = register("float32", self.dim // 2, "sums")
        self.scores = register("float32", 8, "scores")
        self.largest, self.total = ([register("float32", name=name) for _ in range(self.halves)] for name in ("largest", "total"))
        self.weights = register("uint32", 2 * self.halves, "weights")
        zeros(self.sums, self.dim // 2)
        for largest, total in zip(self.largest, self.total, strict=True):
            put(largest, T.float32(LOWEST))
            put(total, T.float32(0))

    def _rows(self, of: Callable[[int, int], Any]) -> tuple[Any, ...]:
        """The left operand of an `mma`: of(half, index) of both halves of the rows, zero for one that has no heads."""
        zero = T.uint32(0)
        return tuple(of(half, index) if half < self.halves else zero for index in range(2) for half in range(2))

    def _score(self, tile: Any, slot: Any) -> None:
        """Scores of 16 cache rows, the running largest, and the weights as fragments of the next product."""
        lane, piece = self.at.lane, register("uint32", 4)
        zeros(self.scores, 8)
        for half in range(2):
            c = [self.scores[half * 4 + i] for i in range(4)]
            for step in range(self.dim // 32):
                place = (half * 8 + lane % 8) * self.chunks + T.bitwise_xor(step * 4 + T.floordiv(lane, 8), lane % 8)
                do(T.ptx[LOAD](*(piece[i] for i in range(4)), self.ring.ptr_to([self.at.warp, slot, 0, place, 0])))
                for part in range(2):
                    q = self._rows(lambda half, i, first=step * 4 + part * 2: self.q[half][first + i])
                    do(T.ptx[self.mma](*c, *q, piece[part * 2], piece[part * 2 + 1], *c))
        scale = T.float32(self.query.scale * LOG2_E)
        for part in range(2):
            for i in range(2):
                token = tile * TILE + part * 8 + lane % 4 * 2 + i
                visible = T.And(token >= self.first, token < self.end)
                for index in (part * 4 + half * 2 + i for half in range(self.halves)):
                    put(self.scores, T.Select(visible, self.scores[index] * scale, T.float32(LOWEST)), index)
        for half in range(self.halves):
            self._weigh(half)

    def _weigh(self, half: int) -> None:
        """Scores of one half of the heads become weights; what has been summed so far shrinks with the largest."""
        largest, total = self.largest[half], self.total[half]
        seen = [half * 2 + index for index in (0, 1, 4, 5)]
        top = self.scores[seen[0]]
        for index in seen[1:]:
            top = T.max(top, self.scores[index])
        top = hold(T.max(largest[0], T.cuda.warp_max(hold(top), 4)))
        shrink = hold(T.exp2(largest[0] - top))
        put(largest, top)
        put(total, total[0] * shrink)
        for index in seen:
            put(self.scores, T.exp2(self.scores[index] - top), index)
            put(total, total[0] + self.scores[index])
        for part in range(2):
            low, high = self.scores[part * 4 + half * 2], self.scores[part * 4 + half * 2 + 1]
            do(T.ptx[f"cvt.rn.{self.kind}x2.f32"](self.weights[half * 2 + part], high, low))
        for index in range(self.dim // 8):
            for i in range(2):
                place = index * 4 + half * 2 + i
                put(self.sums, self.sums[place] * shrink, place)

    def _add_values(self, slot: Any) -> None:
        lane, piece = self.at.lane, register("uint32", 4)
        for step in range(self.dim // 16):
            row = T.floormod(T.floordiv(lane, 8), 2) * 8 + lane % 8
            place = row * self.chunks + T.bitwise_xor(step * 2 + T.floordiv(lane, 16), lane % 8)
            do(T.ptx[LOAD_TRANSPOSED](*(piece[i] for i in range(4)), self.ring.ptr_to([self.at.warp, slot, 1, place, 0])))
            for part in range(2):
                c = [self.sums[(step * 2 + part) * 4 + i] for i in range(4)]
                weights = self._rows(lambda half, i: self.weights[half * 2 + i])
                do(T.ptx[self.mma](*c, *weights, piece[part * 2], piece[part * 2 + 1], *c))

    # -- the end -----------------------------------------------------------------------------------------------

    def _join_warps(self, keep: bool) -> None:
        """The sum of all warps' tiles, as one part of the row's result; `keep` leaves it in shared memory."""
        for half in range(self.halves):
            self._leave_sums(half)
        do(T.cuda.cta_sync())
        at, threads = self.at, self.warps * 32

        # A loop, not written out: the code of a kernel comes from memory once in every step.
        with T.serial(0, -(-self.group * self.dim // (4 * threads))) as turn:
            index = hold((turn * threads + at.warp * 32 + at.lane) * 4, "int32", "index")
            with T.If(index < self.group * self.dim), T.Then():
                self._join_columns(hold(T.floordiv(index, self.dim), "int32"), hold(T.floormod(index, self.dim), "int32"), keep)

    def _leave_sums(self, half: int) -> None:
        at, member, largest, total = self.at, self._member(half), self.largest[half], self.total[half]
        put(total, T.cuda.warp_sum(total[0], 4))
        with T.If(member < self.group), T.Then():
            for index in range(self.dim // 8):
                for i in range(2):
                    column = index * 8 + at.lane % 4 * 2 + i
                    T.buffer_store(self.shared_sums, self.sums[index * 4 + half * 2 + i], [at.warp, member, column])
            with T.If(at.lane % 4 < 1), T.Then():
                T.buffer_store(self.shared_stats, largest[0], [at.warp, member, 0])
                T.buffer_store(self.shared_stats, total[0], [at.warp, member, 1])

    def _join_columns(self, member: Any, d: Any, keep: bool) -> None:
        """Sums over the warps of four columns; the thread of column 0 joins the head's statistics, too."""
        top, total = (register("float32", name=name) for name in ("top", "joined"))
        values, part = register("float32", 4, "values"), register("float32", 4, "part")
        put(top, T.float32(LOWEST))
        put(total, T.float32(0))
        zeros(values, 4)
        for warp in range(self.warps):
            put(top, T.max(top[0], self.shared_stats[warp, member, 0]))
        for warp in range(self.warps):
            share = hold(T.exp2(self.shared_stats[warp, member, 0] - top[0]))
            put(total, total[0] + share * self.shared_stats[warp, member, 1])
            with T.vectorized(0, 4) as v:
                T.buffer_store(part, self.shared_sums[warp, member, d + v], [v])
            for i in range(4):
                put(values, values[i] + share * part[i], i)
        if keep:  # this thread alone reads the columns
            with T.vectorized(0, 4) as v:
                T.buffer_store(self.shared_sums, values[v], [0, member, d + v])
        else:
            head = self.kv_head * self.group + member
            for i in range(4):
                store(self.query.sums, [self.row, head, self.part, d + i], values[i])
        with T.If(d < 1), T.Then():
            for index, number in enumerate((top, total)):
                if keep:
                    T.buffer_store(self.part_stats, number[0], [member, index])
                else:
                    store(self.query.stats, [self.row, head, self.part, index], number[0])

    def _join_parts(self, finish: Callable[[Any, Any, Any, list[Any]], None]) -> None:
        """Every block of the cluster finishes some of the elements, with all blocks' sums; zero where a row sees nothing."""
        at, parts, count = self.at, self.query.parts, self.group * self.dim
        cluster_sync(self.query.parts)

        def columns(turn: Any) -> None:
            index = hold(turn * 4, "int32")
            member, d = hold(T.floordiv(index, self.dim), "int32"), hold(T.floormod(index, self.dim), "int32")
            stats = [[of_block(parts, part, self.part_stats.ptr_to([member, i])) for i in range(2)] for part in range(parts)]
            sums = [some_of_block(parts, part, self.shared_sums.ptr_to([0, member, d]), 4) for part in range(parts)]
            head = hold(self.kv_head * self.group + member, "int32")
            finish(self.row, head, d, joined_columns(stats, sums))

        threads = self.warps * 32
        for_each(count // 4, hold(self.part * threads + at.warp * 32 + at.lane, "int32"), parts * threads, columns)
        if parts > 1:
            cluster_sync(self.query.parts)  # the others may still be reading this block's sums
