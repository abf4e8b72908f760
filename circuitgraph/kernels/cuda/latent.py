"""Paged latent attention (DeepSeek-V2) on Hopper's tensor cores: one latent row of the cache is key and value of all heads.

128 heads do some 240 operations for each byte of the cache, as many as the chip does in the time that the byte takes. So the
products are `wgmma`, which reads its operands from shared memory, and a block has 64 heads: the rows of one `wgmma`.

A block takes tiles of 64 cache rows, in whatever blocks of the cache they lie. Two warpgroups multiply and one copies: the
first forms scores and weights, both add weights times latents, each for half of the columns. A tile is key and value
at once; where its rotated part lay, the weights are left for the other warpgroup.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tvm.backend.cuda.lang.alloc_pool import SMEMPool
from tvm.tirx.script import builder as T

from .attention import Query
from .row_program import for_each
from .values import COPY, LOG2_E, LOWEST, do, from_lane, hold, load, put, register, store, wide, zeros

HEADS = 64
"""Heads of a block."""
TILE = 64
"""Cache rows of a tile."""
LATENT, ROTATED = 512, 64
"""Columns that the kernel is made for: two halves that fill the registers of a warpgroup, and one panel."""
PANELS = (LATENT + ROTATED) // 64
PANEL = 64 * 128
"""Bytes of a panel: 64 rows of 128 bytes, whose 16-byte chunks are swizzled by row as `wgmma` reads them."""
STAGES = 2
GROUPS = 2
"""Warpgroups that multiply; one more copies."""
WARPS = 4 * (GROUPS + 1)
REGISTERS = (232, 40)
"""Of a thread that multiplies, and of one that copies: 504 of the 512 that three warps of a quarter have."""
SHARED_BYTES = (1 + STAGES) * PANELS * PANEL + STAGES * (HEADS * 4 + 16)

SWIZZLE_128 = 3
"""The name that descriptors have for that swizzle."""


@dataclass(frozen=True)
class LatentQuery:
    """A latent attention. query: its keys are the rotated parts, its values the latents, `q` the latent part of the queries;
    rotated: [rows, heads, R]."""

    query: Query
    rotated: Any

    @property
    def rows(self) -> int:
        return self.query.shape[0]

    @property
    def heads(self) -> int:
        return self.query.shape[1]

    @property
    def latent(self) -> int:
        return self.query.shape[2]


def tiles_of(first: Any, end: Any, parts: int) -> tuple[Any, Any, Any]:
    """(first tile, one behind the last, tiles of a part) of the cache rows first..end-1."""
    first_tile = hold(T.floordiv(first, TILE), "int32")
    # A row that starts behind its end has no tile: a tile without visible rows would count them all alike.
    last_tile = hold(T.Select(first < end, T.floordiv(end + (TILE - 1), TILE), first_tile), "int32")
    return first_tile, last_tile, hold(T.floordiv(last_tile - first_tile + (parts - 1), parts), "int32")


def power_of_two(value: Any) -> Any:
    """Denormal results are zero: three instructions less than exp2, which matters where a thread needs 32 of them in a row."""
    result = register("float32")
    do(T.ptx["ex2.approx.ftz.f32"](result[0], value))
    return result[0]


class LatentAttention:
    """One launch; leaves the parts in the query's scratch, those alone that have a tile. `emit_latent_combine` adds them."""

    def __init__(self, env: Any, latent: LatentQuery, words: tuple[Any, Any], kind: str):
        """words: latent and rotated queries as [rows, heads * columns / 2] words."""
        self.env, self.latent, self.query, self.words = env, latent, latent.query, words
        self.blocks = -(-latent.heads // HEADS)
        self.scores_mma = f"wgmma.mma_async.sync.aligned.m64n{TILE}k16.f32.{kind}.{kind}"
        self.values_mma = f"wgmma.mma_async.sync.aligned.m64n{LATENT // 2}k16.f32.{kind}.{kind}"
        self.kind = kind

    def emit(self) -> None:
        query, parts = self.query, self.query.parts
        blocks = self.latent.rows * parts * self.blocks
        bound = T.attr(0, "tirx.launch_bounds_min_blocks_per_sm", 1)  # without it registers cannot move between warps
        with self.env.kernel(blocks, WARPS, early=True) as at, bound:
            self.at = at
            self._share()
            # The blocks of the same cache rows lie side by side: the second finds them in L2.
            self.head = hold(T.floormod(at.block, self.blocks) * HEADS, "int32", "head")
            self.part = hold(T.floormod(T.floordiv(at.block, self.blocks), parts), "int32", "part")
            self.row = hold(T.floordiv(at.block, self.blocks * parts), "int32", "row")
            self.sequence, self.first, self.end = query.span(self.row)
            first_tile, last_tile, each = tiles_of(self.first, self.end, parts)
            self.tile, self.stage, self.phase = (register("int32", name=name) for name in ("tile", "stage", "phase"))
            put(self.tile, first_tile + self.part * each)
            self.stop = hold(T.min(self.tile[0] + each, last_tile), "int32")
            put(self.stage, T.int32(0))
            put(self.phase, T.int32(0))
            self.env.wait()  # the newest row of the cache is of the kernel before
            with T.If(at.warp >= GROUPS * 4):
                with T.Then():
                    do(T.ptx["setmaxnreg.dec.sync.aligned.u32"](REGISTERS[1]))
                    self._copy_tiles()
                with T.Else():
                    do(T.ptx["setmaxnreg.inc.sync.aligned.u32"](REGISTERS[0]))
                    with T.If(self.tile[0] < self.stop), T.Then():
                        self._multiply()

    def _share(self) -> None:
        pool = SMEMPool()
        self.q = pool.alloc((PANELS, PANEL // 16, 4), "uint32", align=1024)
        self.tiles = pool.alloc((STAGES, PANELS, PANEL // 16, 4), "uint32", align=1024)
        self.shrink = pool.alloc((STAGES, HEADS), "float32", align=16)
        self.full = pool.alloc((STAGES,), "uint64", align=8)
        self.empty = pool.alloc((STAGES,), "uint64", align=8)
        pool.commit()
        with T.If(T.And(T.EQ(self.at.warp, 0), T.EQ(self.at.lane, 0))), T.Then():
            for stage in range(STAGES):
                do(T.ptx.mbarrier.init.shared.b64(self.full.ptr_to([stage]), T.uint32(4 * 32)))
                do(T.ptx.mbarrier.init.shared.b64(self.empty.ptr_to([stage]), T.uint32(4 * GROUPS)))
            do(T.ptx.fence.mbarrier_init.release.cluster())
        do(T.cuda.cta_sync())

    def _advance(self) -> None:
        put(self.tile, self.tile[0] + 1)
        put(self.phase, T.Select(T.EQ(self.stage[0], STAGES - 1), 1 - self.phase[0], self.phase[0]))
        put(self.stage, T.Select(T.EQ(self.stage[0], STAGES - 1), T.int32(0), self.stage[0] + 1))

    # -- the warps that copy -----------------------------------------------------------------------------------

    def _copy_tiles(self) -> None:
        """A quarter of a tile's rows for each warp. Rows that are not visible are replaced by one that is: their weight is
        zero, and nothing unknown is read."""
        lane, line = self.at.lane, register("int32", name="line")
        before = hold((self.at.warp - GROUPS * 4) * (TILE // 4), "int32", "before")
        with T.While(self.tile[0] < self.stop):
            token = T.min(T.max(self.tile[0] * TILE + before + lane % (TILE // 4), self.first), self.end - 1)
            put(line, T.Cast("int32", self.query.line(self.sequence, hold(token, "int32"), 0)))
            do(T.cuda.mbarrier_wait(self.empty.ptr_to([self.stage[0]]), 1 - self.phase[0]))
            with T.serial(0, TILE // 4 // 8) as eight:
                for i in range(8):
                    of_row = from_lane(line[0], eight * 8 + i, "int32")
                    place = (before + eight * 8 + i) * 8 + T.bitwise_xor(lane % 8, i)
                    for quarter in range(LATENT // 256):
                        panel = quarter * 4 + T.floordiv(lane, 8)
                        source = self.query.values.lines.ptr_to([wide(of_row), wide(quarter * 256 + lane * 8)])
                        do(T.ptx[COPY](self.tiles.ptr_to([self.stage[0], panel, place, 0]), source, 16))
                for i in range(0, 8, 4):
                    row = hold(i + T.floordiv(lane, 8), "int32")
                    of_row = from_lane(line[0], eight * 8 + row, "int32")
                    place = (before + eight * 8 + row) * 8 + T.bitwise_xor(lane % 8, row)
                    source = self.query.keys.lines.ptr_to([wide(of_row), wide(lane % 8 * 8)])
                    do(T.ptx[COPY](self.tiles.ptr_to([self.stage[0], PANELS - 1, place, 0]), source, 16))
            do(T.ptx["cp.async.mbarrier.arrive.noinc.shared.b64"](self.full.ptr_to([self.stage[0]])))
            self._advance()

    # -- the warpgroups that multiply --------------------------------------------------------------------------

    def _multiply(self) -> None:
        at = self.at
        self.group = hold(T.floordiv(at.warp, 4), "int32", "group")
        self.head_row = hold(at.warp % 4 * 16 + T.floordiv(at.lane, 4), "int32", "head_row")
        self._load_query()
        self.sums = register("float32", LATENT // 4, "sums")
        self.scores = register("float32", TILE // 2, "scores")
        self.largest, self.total = register("float32", 2, "largest"), register("float32", 2, "total")
        zeros(self.sums, LATENT // 4)
        zeros(self.largest, 2, LOWEST)
        zeros(self.total, 2)
        queries = self._descriptor(self.q.ptr_to([0, 0, 0]))
        keys = self._descriptor(self.tiles.ptr_to([0, 0, 0, 0]))
        values = self._descriptor(self.tiles.ptr_to([0, 0, 0, 0]), panels=True)
        with T.While(self.tile[0] < self.stop):
            do(T.cuda.mbarrier_wait(self.full.ptr_to([self.stage[0]]), self.phase[0]))
            do(T.ptx.fence.proxy.async_.shared__cta())
            before = hold(T.Cast("uint64", self.stage[0]) * T.uint64(PANELS * PANEL // 16), "uint64")
            with T.If(T.EQ(self.group, 0)), T.Then():
                self._score(queries, keys + before)
                self._weigh()
                do(T.ptx.fence.proxy.async_.shared__cta())
            do(T.ptx.bar.sync(1, GROUPS * 128))
            weights = keys + before + T.uint64((PANELS - 1) * PANEL // 16)
            self._add_values(weights, values + before)
            with T.If(at.lane < 1), T.Then():
                do(T.ptx.mbarrier.arrive.shared.b64(self.empty.ptr_to([self.stage[0]]), T.uint32(1)))
            self._advance()
        self._leave()

    def _load_query(self) -> None:
        """Heads that there are not are replaced by the last one and left out at the end."""
        thread, threads = self.at.warp * 32 + self.at.lane, GROUPS * 128
        for words, columns, first_panel in ((self.words[0], LATENT, 0), (self.words[1], ROTATED, PANELS - 1)):
            chunks = columns // 8

            def copy(piece: Any, words=words, columns=columns, chunks=chunks, first_panel=first_panel) -> None:
                row, chunk = T.floordiv(piece, chunks), T.floormod(piece, chunks)
                head = T.min(self.head + row, T.int32(self.latent.heads - 1))
                place = row * 8 + T.bitwise_xor(chunk % 8, row % 8)
                source = words.ptr_to([self.row, head * (columns // 2) + chunk * 4])
                do(T.ptx[COPY](self.q.ptr_to([first_panel + T.floordiv(chunk, 8), place, 0]), source, 16))

            for_each(HEADS * chunks, hold(thread, "int32"), threads, copy)
        do(T.ptx.cp.async_.commit_group())
        do(T.ptx.cp.async_.wait_group(0))
        do(T.ptx.fence.proxy.async_.shared__cta())
        do(T.ptx.bar.sync(1, threads))

    def _descriptor(self, address: Any, *, panels: bool = False) -> Any:
        """Of a matrix in panels: rows as they lie, or with `panels` its transpose, 64 columns a panel. In units of 16 bytes."""
        made = register("uint64")
        place = T.address_of(made[0])
        do(T.cuda.wgmma.encode_matrix_descriptor(place, address, PANEL // 16 if panels else 1, 64, SWIZZLE_128))
        return made[0]

    def _ordered(self, target: Any, count: int) -> None:
        """Keep what comes before and after on its side: `wgmma` writes registers while the code goes on."""
        for index in range(count):
            do(T.ptx["mov.b32"](target[index], target[index]))

    def _score(self, queries: Any, keys: Any) -> None:
        do(T.ptx.wgmma.fence.sync.aligned())
        scores = [self.scores[i] for i in range(TILE // 2)]
        for step in range(PANELS * 4):
            ahead = T.uint64((step // 4 * PANEL + step % 4 * 32) // 16)
            do(T.ptx[self.scores_mma](*scores, queries + ahead, keys + ahead, T.bool(step > 0), 1, 1, 0, 0))
        do(T.ptx.wgmma.commit_group.sync.aligned())
        do(T.ptx.wgmma.wait_group.sync.aligned(0))
        self._ordered(self.scores, TILE // 2)

    def _weigh(self) -> None:
        """The running largest of two heads a thread, and their weights where the rotated part lay."""
        at, scale = self.at, T.float32(self.query.scale * LOG2_E)
        for half in range(2):
            mine = [block * 4 + half * 2 + i for block in range(TILE // 8) for i in range(2)]
            top = self.largest[half]
            for index in mine:
                token = self.tile[0] * TILE + index // 4 * 8 + at.lane % 4 * 2 + index % 2
                visible = T.And(token >= self.first, token < self.end)
                put(self.scores, T.Select(visible, self.scores[index] * scale, T.float32(LOWEST)), index)
                top = T.max(top, self.scores[index])
            top = hold(top)
            top = hold(T.cuda.warp_max(top, 4))
            shrink = power_of_two(self.largest[half] - top)
            put(self.largest, top, half)
            put(self.total, self.total[half] * shrink, half)
            row = self.head_row + half * 8
            with T.If(at.lane % 4 < 1), T.Then():
                T.buffer_store(self.shrink, shrink, [self.stage[0], row])
            for index in mine:
                put(self.scores, power_of_two(self.scores[index] - top), index)
                put(self.total, self.total[half] + self.scores[index], half)
            for block in range(TILE // 8):
                pair, word = mine[block * 2], register("uint32")
                do(T.ptx[f"cvt.rn.{self.kind}x2.f32"](word[0], self.scores[pair + 1], self.scores[pair]))
                place = row * 8 + T.bitwise_xor(row % 8, block)
                T.buffer_store(self.tiles, word[0], [self.stage[0], PANELS - 1, place, at.lane % 4])

    def _add_values(self, weights: Any, values: Any) -> None:
        shrink = [hold(self.shrink[self.stage[0], self.head_row + half * 8]) for half in range(2)]
        moved = T.Or(shrink[0] < T.float32(1), shrink[1] < T.float32(1))
        with T.If(T.cuda.any_sync(T.uint32(0xFFFFFFFF), T.Cast("int32", moved)) > 0), T.Then():
            for index in range(LATENT // 4):
                put(self.sums, self.sums[index] * shrink[index // 2 % 2], index)
        self._ordered(self.sums, LATENT // 4)
        do(T.ptx.wgmma.fence.sync.aligned())
        sums = [self.sums[i] for i in range(LATENT // 4)]
        half = hold(values + T.Cast("uint64", self.group) * T.uint64(LATENT // 128 * PANEL // 16), "uint64")
        for step in range(TILE // 16):
            across, down = T.uint64(step * 32 // 16), T.uint64(step * 16 * 128 // 16)
            do(T.ptx[self.values_mma](*sums, weights + across, half + down, T.bool(True), 1, 1, 0, 1))
        do(T.ptx.wgmma.commit_group.sync.aligned())
        do(T.ptx.wgmma.wait_group.sync.aligned(0))
        self._ordered(self.sums, LATENT // 4)

    def _leave(self) -> None:
        at, query = self.at, self.query
        for half in range(2):
            head = hold(self.head + self.head_row + half * 8, "int32")
            total = hold(T.cuda.warp_sum(self.total[half], 4))
            with T.If(head < self.latent.heads), T.Then():
                with T.If(T.And(T.EQ(self.group, 0), at.lane % 4 < 1)), T.Then():
                    store(query.stats, [self.row, head, self.part, 0], self.largest[half])
                    store(query.stats, [self.row, head, self.part, 1], total)
                for block in range(LATENT // 16):
                    column = self.group * (LATENT // 2) + block * 8 + at.lane % 4 * 2
                    pair = [self.sums[block * 4 + half * 2 + i] for i in range(2)]
                    do(T.ptx["st.global.v2.f32"](query.sums.ptr_to([self.row, head, self.part, column]), *pair))


COMBINE_GROUPS = 4
"""Groups of warps that add up every fourth part: what one thread does in a row is short."""
COMBINE_WARPS = COMBINE_GROUPS * LATENT // 4 // 32


def emit_latent_combine(env: Any, latent: LatentQuery, finish: Callable[[Any, Any, Any, Any], None]) -> None:
    """finish(row, head, column, value) with the sum of the parts that have a tile; zero where there is none. A block for each
    row and head, four columns of every fourth part a thread."""
    query, rows, heads, parts = latent.query, latent.rows, latent.heads, latent.query.parts
    with env.kernel(rows * heads, COMBINE_WARPS, early=True) as at:
        shared = T.alloc_buffer((COMBINE_GROUPS, LATENT), "float32", scope="shared")
        row, head = hold(T.floordiv(at.block, heads), "int32"), hold(T.floormod(at.block, heads), "int32")
        _, first, end = query.span(row)
        first_tile, last_tile, each = tiles_of(first, end, parts)
        live = hold(T.floordiv(last_tile - first_tile + each - 1, T.max(each, T.int32(1))), "int32", "live")
        thread = hold(at.warp * 32 + at.lane, "int32")
        group, column = hold(T.floordiv(thread, LATENT // 4), "int32"), hold(thread % (LATENT // 4) * 4, "int32")
        env.wait()
        turns = -(-parts // 32)
        tops, shares = register("float32", turns, "tops"), register("float32", turns, "shares")
        top, total = register("float32", name="top"), register("float32", name="joined")
        zeros(tops, turns, LOWEST)
        zeros(shares, turns)
        for turn in range(turns):
            with T.If(at.lane + turn * 32 < live), T.Then():
                put(tops, load(query.stats, [row, head, at.lane + turn * 32, 0]), turn)
                put(shares, load(query.stats, [row, head, at.lane + turn * 32, 1]), turn)
        put(top, tops[0])
        for turn in range(1, turns):
            put(top, T.max(top[0], tops[turn]))
        put(top, T.cuda.warp_max(top[0]))
        put(total, T.float32(0))
        for turn in range(turns):
            put(tops, T.exp2(tops[turn] - top[0]), turn)
            put(total, total[0] + tops[turn] * shares[turn])
        put(total, T.cuda.warp_sum(total[0]))
        sums = register("float32", 4, "sums")
        zeros(sums, 4)
        unrolled = min(-(-parts // COMBINE_GROUPS), 8)
        with T.serial(0, T.floordiv(live + (COMBINE_GROUPS * unrolled - 1), COMBINE_GROUPS * unrolled)) as several:
            found = []
            for i in range(unrolled):
                number = hold((several * unrolled + i) * COMBINE_GROUPS + group, "int32")
                part, values = hold(T.min(number, live - 1), "int32"), register("float32", 4)
                place = query.sums.ptr_to([row, head, part, column])
                do(T.ptx["ld.global.v4.f32"](*(values[c] for c in range(4)), place))
                found.append((number, part, values))
            for number, part, values in found:
                share = from_lane(tops[0], T.floormod(part, 32), "float32")
                for turn in range(1, turns):
                    other = from_lane(tops[turn], T.floormod(part, 32), "float32")
                    share = hold(T.Select(part < turn * 32, share, other))
                share = hold(T.Select(number < live, share, T.float32(0)))
                for c in range(4):
                    put(sums, sums[c] + share * values[c], c)
        for c in range(4):
            T.buffer_store(shared, sums[c], [group, column + c])
        do(T.cuda.cta_sync())

        def element(index: Any) -> None:
            value = shared[0, index]
            for other in range(1, COMBINE_GROUPS):
                value = value + shared[other, index]
            finish(row, head, index, hold(T.Select(live > 0, value / total[0], T.float32(0))))

        for_each(LATENT, thread, COMBINE_WARPS * 32, element)


PLAIN_WARPS = 4


def emit_plain_latent(env: Any, latent: LatentQuery) -> None:
    """A warp for every (row, head, part), which takes every `parts`-th cache row. For any sizes and dtypes."""
    query, rows, heads = latent.query, latent.rows, latent.heads
    sizes = (latent.latent, int(latent.rotated.shape[2]))
    with env.kernel(-(-rows * heads * query.parts // PLAIN_WARPS), PLAIN_WARPS) as at:
        unit = hold(at.block * PLAIN_WARPS + at.warp, "int32")
        with T.If(unit < rows * heads * query.parts), T.Then():
            part = hold(T.floormod(unit, query.parts), "int32")
            head = hold(T.floormod(T.floordiv(unit, query.parts), heads), "int32")
            row = hold(T.floordiv(unit, query.parts * heads), "int32")
            sequence, first, end = query.span(row)
            counts = [-(-size // 32) for size in sizes]
            queries = [register("float32", count, "q") for count in counts]
            keys, sums = register("float32", counts[0], "latent"), register("float32", counts[0], "sums")
            for target, count in zip((*queries, keys, sums), (*counts, counts[0], counts[0]), strict=True):
                zeros(target, count)

            def columns(size: int, body: Callable[[int, Any], None]) -> None:
                """body(register index, column) for the lane's columns."""
                for index in range(-(-size // 32)):
                    with T.If(at.lane + 32 * index < size), T.Then():
                        body(index, at.lane + 32 * index)

            scale = T.float32(query.scale * LOG2_E)
            for buffer, size, kept in zip((query.q, latent.rotated), sizes, queries, strict=True):
                columns(size, lambda i, d, b=buffer, q=kept: put(q, load(b, [row, head, d]) * scale, i))
            largest, total, token = register("float32"), register("float32"), register("int32")
            put(largest, T.float32(LOWEST))
            put(total, T.float32(0))
            put(token, first + part)
            with T.While(token[0] < end):
                line = hold(query.line(sequence, token[0], 0), "int64")
                score = register("float32")
                put(score, T.float32(0))
                columns(sizes[0], lambda i, d: put(keys, load(query.values.lines, [line, wide(d)]), i))
                for index in range(counts[0]):
                    put(score, score[0] + queries[0][index] * keys[index])
                columns(sizes[1], lambda i, d: put(score, score[0] + queries[1][i] * load(query.keys.lines, [line, wide(d)])))
                put(score, T.cuda.warp_sum(score[0]))
                top = hold(T.max(largest[0], score[0]))
                shrink, weight = hold(T.exp2(largest[0] - top)), hold(T.exp2(score[0] - top))
                put(largest, top)
                put(total, total[0] * shrink + weight)
                for index in range(counts[0]):
                    put(sums, sums[index] * shrink + weight * keys[index], index)
                put(token, token[0] + query.parts)
            columns(sizes[0], lambda i, d: store(query.sums, [row, head, part, d], sums[i]))
            with T.If(at.lane < 1), T.Then():
                store(query.stats, [row, head, part, 0], largest[0])
                store(query.stats, [row, head, part, 1], total[0])
