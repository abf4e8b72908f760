"""Skinny matrix products on tensor cores at the speed of memory: every weight is read once, for up to 32 rows.

One block a multiprocessor stays and takes tile after tile of 16 weight rows. A tile's columns are split over the block's
warps in steps of 64 bytes. Each lane copies exactly the two 16-byte pieces that it will use itself into its own slots of a
ring in shared memory, so the stream needs no barrier; in bf16, 16 weights x 32 columns and 8 rows of x are one step of two
`mma`. The columns are permuted the same way in weights and x, which makes a lane's 16 bytes two fragments as they lie. The
ring is filled before the kernel waits for its predecessor: weights do not depend on it. It is filled at a pace: the full rings
of all blocks are a queue of 3.7 us on an H200, behind which the last stores of the kernel before, and then x, would wait.

Quantised weights (see `formats`) have 64 or 128 columns a step, which are decoded between ring and `mma`. Scales of blocks
are fetched once a tile, for the next one: `stream_scales`. Those of four bits are multiplied with numbers, and with sums where
there is one row: `one_row`.

Where a warp's share of a tile would be short, the block's warps are parted into teams, each of which takes tiles of its own:
then fewer warps wait for each other, and the others go on meanwhile. x lies in shared memory then, since one of fewer warps
has too many columns for its registers.

With k_parts > 1 the columns are split over blocks too; a second launch adds the parts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from tvm.backend.cuda.lang.alloc_pool import SMEMPool
from tvm.tirx.script import builder as T

from . import one_row
from .architectures import architecture_of
from .formats import Format, of_row
from .plain import Best, Logits, Partials, Projection
from .stream_scales import BlockScales, scales_for
from .values import COPY_ONCE, do, hold, load, put, register, store, wide, zeros

STEP_WORDS = 16
"""Words of a weight row in one step of a warp: a lane has four, and four lanes share a row."""

PACE = 2
"""Stages that a warp waits for at most while it fills its ring: 16 warps then have 48 KB under way, which keeps an H200 busy."""

EARLY_REGISTERS = (40, 96)
"""Up to so many of a thread hold a norm's weights while x is waited for, and these and x together; more would be spilled."""


@dataclass(frozen=True)
class Geometry:
    """How a product is cut. warps: that share a tile; steps: of one of them per row group; groups: of 16 weight rows in a
    tile; stages: of the ring, which divide the steps of a tile, so that slots are constants, or are those of two tiles. step:
    columns of one. together: groups whose sums are shared at once, where a group is short. scale_words: of a weight row in one
    step of a warp, 0 where they take no shared memory; such a warp's steps lie side by side. teams: of `warps` each in a block;
    with more than one, x lies in shared memory. padded: so that it has no bank conflicts. joined: the parts of a tile are a
    cluster of blocks, see `joined_stream`."""

    rows: int
    columns: int
    warps: int
    k_parts: int
    steps: int
    groups: int
    stages: int
    step: int = 32
    together: int = 1
    scale_words: int = 0
    teams: int = 1
    padded: bool = True
    joined: bool = False

    @property
    def row_blocks(self) -> int:
        return -(-self.rows // 8)

    @property
    def tiles_ahead(self) -> int:
        """Tiles that the ring holds: it is filled for the one after them."""
        return max(1, self.stages // (self.steps * self.groups))

    @property
    def shared_bytes(self) -> int:
        scales = self.sides * self.groups * 16 * self.scale_pitch * 4
        sums = (self.k_parts if self.joined else 2) * self.rows * 64 * self.together
        each = self.stages * 1024 + scales + sums + self.row_blocks * 32
        return self.teams * self.warps * each + (self.x_columns // self.step * 16 * self.x_pitch if self.teams > 1 else 0)

    @property
    def sides(self) -> int:
        """Tiles whose scales lie in shared memory."""
        return 1 if self.joined else 2

    @property
    def x_columns(self) -> int:
        """Of x in a block."""
        return self.columns // self.k_parts

    @property
    def scale_pitch(self) -> int:
        """Words from a weight row's scales to the next's. Eight rows are read at once, from different banks: sixteen words
        are turned round instead (`LineScales`)."""
        words = self.steps * self.scale_words
        return words + 4 if words % 8 == 0 and words != 16 else words

    @property
    def x_pitch(self) -> int:
        """Words of shared memory for what a word of each lane's weights is multiplied by: four lanes' pieces of all rows, and, if
        padded, a piece more, so that lanes that hold neighbouring pieces of a row store them to different banks."""
        return self.rows * 16 + (4 if self.padded else 0)

    @property
    def x_steps(self) -> int:
        """Steps of x that a warp loads: its own, or its share of what all teams multiply."""
        return self.steps // self.teams

    @property
    def stride(self) -> int:
        """Columns from one step of a warp to its next."""
        return self.step if self.scale_words else self.warps * self.step

    def column(self, warp: Any) -> Any:
        """Where a warp's first step begins in its part of the columns."""
        return warp * (self.steps * self.step if self.scale_words else self.step)


def geometry(
    rows: int,
    columns: int,
    warps: int,
    stages: int,
    k_parts: int,
    registers: int,
    work: Callable[[int, int], float] = lambda groups, parts: 0,
    format: Format | None = None,
    tiles_ahead: int = 2,
) -> Geometry | str:
    """The cut of a product over `columns`, or why there is none.

    Args:
        stages: how many the ring should have about.
        k_parts: parts of the columns, 0 for the fewest whose x fits `registers` registers of a thread.
        work: row groups that the busiest block takes, for tiles of so many groups and so many parts. Where smaller tiles
            spread a narrow layer better, a shorter ring is accepted for them.
        format: of quantised weights.
        tiles_ahead: 1 where a ring may not hold two tiles: such a ring lets short tiles spread a layer evenly.
    """
    step = STEP_WORDS * (format.columns if format else 2)
    if rows > 32:
        return f"at most 32 rows, got {rows}"
    for parts in (k_parts,) if k_parts else (1, 2, 3, 4, 5, 6, 8, 10):
        if columns % (parts * step * warps):
            continue
        steps = columns // (parts * step * warps)
        if steps * (step // 8) * -(-rows // 8) > registers:
            continue
        cuts = []
        for groups in (1, 2, 4, 8):
            rings = [d for d in range(4, stages + 4) if steps * groups % d == 0]
            if groups == 1 and tiles_ahead > 1 and not (format and format.storage) and steps >= 4 and 2 * steps <= stages:
                rings.append(2 * steps)
            if rings:
                ring = min(rings, key=lambda d: abs(d - stages))
                cuts.append((work(groups, parts), ring < stages - 3, ring > steps * groups, groups, ring))
        if cuts:
            *_, groups, ring = min(cuts)
            words = step // format.scale_columns if format and format.scaled == "numbers" else 0
            return Geometry(rows, columns, warps, parts, steps, groups, ring, step, scale_words=words)
    return f"{columns} columns do not split into steps of {step * warps} that fit {registers} registers"


@dataclass(frozen=True)
class Norm:
    """An RMSNorm of x that is folded in. weight: 32-bit words. finish(row, column, inverse): stores an element of what is
    normed."""

    weight: Any
    eps: float
    zero_centred: bool
    finish: Callable[[Any, Any, Any], None] | None


class Early(Protocol):
    """What the end of a product reads besides its sums, asked for ahead: of one row a thread."""

    def begin(self, row: Any) -> None:
        """Before the wait: what no kernel before makes."""
        ...

    def fetch(self, projection: int, column: Any) -> None:
        """Before a tile is multiplied of which the thread will finish this column."""
        ...

    def finish(self, sums: list[Any]) -> None:
        """Instead of the projection's own: of the column that was fetched for."""
        ...


@dataclass(frozen=True)
class _Segment:
    """Tiles of one projection: `first` counts tiles of the whole launch, `width` weight rows of each matrix in a group."""

    projection: Projection
    first: int
    tiles: int
    width: int


def tiles_of(columns: int, width: int, groups: int) -> int | None:
    """Tiles of a matrix, None where it does not fit: only tiles of one group may be cut at the end."""
    if columns % (width * groups) and groups > 1:
        return None
    return -(-columns // (width * groups))


class Stream:
    """One launch. x: [rows, columns / 2] words of two elements. Either projections, or one weight and `best`.

    Weights are [columns of the result, words]; quantised ones are all of one storage. pace: see `PACE`.
    """

    def __init__(
        self,
        env: Any,
        cut: Geometry,
        x: Any,
        kind: str,
        projections: Sequence[Projection],
        norm: Norm | None = None,
        early: Early | None = None,
        pace: int = PACE,
    ):
        self.env, self.cut, self.x, self.kind, self.norm, self.early, self.pace = env, cut, x, kind, norm, early, pace
        scales = projections[0].scales[0]
        self.format = Format(kind, scales.storage if scales else None, architecture_of(env.plan).multiply)
        self.one_row = one_row.fits(self.format, cut.rows)
        self.factor = self.format.sums_factor if self.one_row else self.format.factor
        self.mma = f"mma.sync.aligned.m16n8k16.row.col.f32.{kind}.{kind}.f32"
        self.matrices = len(projections[0].weights)
        self.sums = 2 if projections[0].pairs else self.matrices  # that a thread finishes together
        self.width = 16 // self.sums
        self.segments: list[_Segment] = []
        first = 0
        for projection in projections:
            tiles = tiles_of(projection.columns, 16 // self.matrices, cut.groups)
            assert tiles is not None
            self.segments.append(_Segment(projection, first, tiles, self.width))
            first += tiles
        self.tiles = first
        self.blocks = env.processors // cut.k_parts * cut.k_parts

    def emit(
        self, *, partial: Any = None, best: Partials | None = None, logits: Logits | None = None, settles: bool = False
    ) -> None:
        """partial: [k_parts * rows, all columns] fp32, where the sums go instead of to the projections' `finish`. settles: let
        the next kernel start only when all before this one are complete."""
        cut = self.cut
        warps = cut.teams * cut.warps
        with self.env.kernel(self.blocks, warps, early=True, fence=settles, once=True) as at:
            self.at = at
            self.team = T.floordiv(at.warp, cut.warps) if cut.teams > 1 else 0
            self.warp = T.floormod(at.warp, cut.warps) if cut.teams > 1 else at.warp
            self.thread = self.warp * 32 + at.lane
            pool = SMEMPool()
            self.ring = pool.alloc((warps, cut.stages, 2, 32, 4), "uint32", align=128)
            self.scales: BlockScales | None = scales_for(self, pool)
            self.shared = pool.alloc((2, warps, cut.together * cut.rows * 16), "float32", align=16)
            self.squares = pool.alloc((warps, cut.row_blocks * 8), "float32", align=16)
            if cut.teams > 1:
                self.x_shared = pool.alloc((cut.x_columns // cut.step, 4, cut.x_pitch), "uint32", align=128)
            pool.commit()
            self.part = hold(T.floormod(at.block, cut.k_parts), "int32") if cut.k_parts > 1 else 0
            self.word = hold(self._word(2) if cut.teams == 1 else self._shared_word(), "int32")
            self.weight_word = self.word if self.format.storage is None else hold(self._word(self.format.columns), "int32")
            tile, turn = register("int32", name="tile"), register("int32", name="turn")
            stride = self.blocks // cut.k_parts * cut.teams
            first = T.floordiv(at.block, cut.k_parts)
            put(tile, self._first_tile(first))
            put(turn, T.int32(0))
            here, ahead = register("uint64", 2, "here"), register("uint64", 2, "ahead")
            self._find(tile[0], here)
            if cut.tiles_ahead > 1:
                self._find(tile[0] + stride, ahead)
            if self.scales:
                self.scales.begin(tile[0])
            paced = cut.tiles_ahead == 1 and self.tiles > stride  # rings that hold all are late enough
            for step in range(cut.stages):
                number, rest = divmod(step, cut.steps * cut.groups)
                if paced and step > self.pace:
                    do(T.ptx.cp.async_.wait_group(self.pace))
                with T.If(tile[0] + number * stride < self.tiles), T.Then():
                    self._copy(step, ahead if number else here, rest)
                do(T.ptx.cp.async_.commit_group())
            weights = self._norm_weights()
            if self.early:
                self.early.begin(hold(T.min(self._line()[1], T.int32(cut.rows - 1)), "int32"))
            self.env.wait(release=settles)
            inverse = self._prepare_x(weights)
            state = Best() if best else None
            with T.While(tile[0] < self.tiles):
                following = hold(tile[0] + cut.tiles_ahead * stride, "int32", "following")
                self._find(following, ahead)
                if self.scales:
                    self.scales.fetch(following)
                for group in range(0, cut.groups, cut.together):
                    self.turn = turn[0]
                    factors = self._factors(tile[0], group)
                    if self.early:
                        self._fetch(self.early, tile[0], group)
                    for more in range(cut.together):
                        self._multiply(group + more, here, ahead, following)
                    self._meet()
                    with T.If(self.thread < cut.together * cut.rows * self.width), T.Then():
                        sums = self._sums()
                        if inverse is not None:
                            sums = [hold(total * inverse) for total in sums]
                        if factors is not None:
                            sums = [hold(total * factor) for total, factor in zip(sums, factors, strict=True)]
                        self._finish(tile[0], group, sums, partial, state, logits)
                    put(turn, T.bitwise_xor(turn[0], 1))
                for half in range(2):
                    put(here, ahead[half], half)
                put(tile, following if cut.tiles_ahead == 1 else tile[0] + stride)
                if self.scales:
                    self.scales.turn()
            if state is not None and best is not None:
                state.merge_lanes((8, 4, 2, 1))
                if cut.together * cut.teams > 1:
                    self._merge_together(state)
                with T.If(T.And(at.lane % 16 < 1, self._first(self.thread < cut.rows * 16))), T.Then():
                    state.write(best, at.block, T.floordiv(self.thread, 16))

    def _first_tile(self, block: Any) -> Any:
        """Of a team. Neighbours are one block's, unless some teams have none: then all blocks have as many, or one less."""
        cut, blocks = self.cut, self.blocks // self.cut.k_parts
        if cut.teams == 1:
            return block
        return block + self.team * blocks if self.tiles < blocks * cut.teams else block * cut.teams + self.team

    def _team(self) -> list[Any]:
        """The warps that share a tile with this one."""
        return [self.team * self.cut.warps + warp if self.cut.teams > 1 else warp for warp in range(self.cut.warps)]

    def _first(self, condition: Any) -> Any:
        """The condition, of the first team alone."""
        return condition if self.cut.teams == 1 else T.And(condition, T.EQ(self.team, 0))

    def _meet(self) -> None:
        """All warps that share a tile are here. The first barrier of a block is that of all its threads."""
        if self.cut.teams == 1:
            do(T.cuda.cta_sync())
        else:
            do(T.ptx.bar.sync(T.Cast("uint32", self.team + 1), T.uint32(self.cut.warps * 32)))

    # -- weights -----------------------------------------------------------------------------------------------

    def _word(self, columns: int) -> Any:
        """Where the lane's first piece begins in a row of words of so many columns."""
        cut = self.cut
        first = self.part * (cut.columns // cut.k_parts // columns)
        return first + self.warp * (cut.column(1) // columns) + self.at.lane % 4 * (cut.step // columns // 4)

    def _find(self, tile: Any, target: Any) -> None:
        """Addresses of the lane's pieces of a tile's first step, for both halves of the 16 weight rows."""
        for half in range(2):
            address = None
            for segment in reversed(self.segments):
                weights = segment.projection.weights
                weight = weights[half] if self.matrices == 2 else weights[0]
                row = self._first_row(segment, tile, half) + T.floordiv(self.at.lane, 4)
                row = T.max(T.min(row, T.int32(segment.projection.columns - 1)), T.int32(0))
                place = T.reinterpret("uint64", weight.ptr_to([wide(row), wide(self.weight_word)]))
                address = place if address is None else T.if_then_else(tile < segment.first + segment.tiles, place, address)
            put(target, address, half)

    def _first_row(self, segment: _Segment, tile: Any, half: int) -> Any:
        """Of the weight rows of a tile that the upper or lower half of its fragments are."""
        tile, pairs, width = tile - segment.first, segment.projection.pairs, segment.width * self.cut.groups
        if pairs is None:
            return tile * width + (half * 8 if self.sums == 1 else 0)
        first = pairs.first(tile, width)
        return first + pairs.apart(T.floormod(first, pairs.dim)) if half else first

    def _copy(self, slot: Any, addresses: Any, step: int) -> None:
        """Start the copies of one step of a tile into a slot of the ring."""
        group, step = divmod(step, self.cut.steps)
        offset = 4 * (group * self.width * self.cut.columns + step * self.cut.stride) // self.format.columns
        for half in range(2):
            source = T.reinterpret("handle", addresses[half] + T.uint64(offset))
            do(T.ptx[COPY_ONCE](self.ring.ptr_to([self.at.warp, slot, half, self.at.lane, 0]), source, 16, self.at.once))

    def _multiply(self, group: int, here: Any, ahead: Any, following: Any) -> None:
        """The steps of one row group; every slot is filled again as soon as it has been read."""
        cut, at = self.cut, self.at
        sums = [register("float32", cut.row_blocks * 4, "sums") for _ in range(self._chains())]
        piece = register("uint32", 8, "weights")
        for chain in sums:
            zeros(chain, cut.row_blocks * 4)
        for step in range(cut.steps):
            number = group * cut.steps + step
            slot = number % cut.stages if cut.tiles_ahead == 1 else hold(self.turn * cut.steps + step, "int32", "slot")
            do(T.ptx.cp.async_.wait_group(cut.stages - 1))
            for half in range(2):
                with T.vectorized(0, 4) as v:
                    T.buffer_store(piece, self.ring[at.warp, slot, half, at.lane, v], [half * 4 + v])
            if self.format.storage is None:
                for block in range(cut.row_blocks):
                    c = [sums[0][block * 4 + i] for i in range(4)]
                    x = self._x(block, step)
                    do(T.ptx[self.mma](*c, piece[0], piece[4], piece[1], piece[5], x[0], x[1], *c))
                    do(T.ptx[self.mma](*c, piece[2], piece[6], piece[3], piece[7], x[2], x[3], *c))
            elif self.format.scaled == "numbers":
                words = self.scales.of_step(group, step) if self.scales else None
                self._refill(slot, number, here, ahead, following)  # long before the decoding is done
                if self.one_row:
                    one_row.multiply(self.format, at.lane, sums[0], [piece[i] for i in range(8)], words, self._x_owned(step))
                else:
                    self._multiply_decoded(sums, piece, words, step)
                continue
            else:
                words = self.scales.of_step(group, step) if self.scales else None
                self._multiply_decoded(sums, piece, words, step)
            self._refill(slot, number, here, ahead, following)
        for chain in sums[1:]:
            for i in range(cut.row_blocks * 4):
                put(sums[0], sums[0][i] + chain[i], i)
        if self.one_row:
            one_row.gather(sums[0], at.lane)
        self._share(sums[0], group % cut.together)

    def _refill(self, slot: Any, number: int, here: Any, ahead: Any, following: Any) -> None:
        """Start the copies of the step that comes to this slot after the tile's step `number`."""
        whole = self.cut.steps * self.cut.groups
        later, rest = divmod(number + self.cut.stages, whole) if self.cut.tiles_ahead == 1 else (1, number)
        if later:
            with T.If(following < self.tiles), T.Then():
                self._copy(slot, ahead, rest)
        else:
            self._copy(slot, here, rest)
        do(T.ptx.cp.async_.commit_group())

    def _chains(self) -> int:
        """Sums that take turns, where a product would wait for the one before: decoding leaves no time to hide that."""
        return 2 if self.format.scaled == "numbers" and self.cut.row_blocks == 1 and not self.one_row else 1

    def _x_owned(self, step: int) -> Callable[[int], list[Any]]:
        """The words of one row of x in a step, zeros where they are not the lane's: see `one_row`."""

        def words(index: int) -> list[Any]:
            if self.cut.teams == 1:
                return self._x(0, step)[index * 4 : index * 4 + 4]
            with T.If(one_row.owned(self.format, self.at.lane, index)), T.Then(), T.vectorized(0, 4) as v:
                place = [self.warp * self.cut.steps + step, index, self.at.lane % 4 * 4 + v]
                T.buffer_store(self.owned, self.x_shared[*place], [index * 4 + v])
            return [self.owned[index * 4 + i] for i in range(4)]

        return words

    def _decoded(self, piece: Any, words: list[Any] | None) -> Callable[[int], tuple[list[Any], list[Any]]]:
        """decode(word): the pairs of a word of the upper weight rows and of the lower ones."""
        format = self.format
        scales = [format.scale_pairs(word, self.at.lane) for word in words] if words and format.scaled == "numbers" else None

        def decode(index: int) -> tuple[list[Any], list[Any]]:
            upper, lower = (
                format.decode(piece[half * 4 + index], scales[half][index * len(scales[half]) // 4] if scales else None)
                for half in range(2)
            )
            return upper, lower

        return decode

    def _multiply_decoded(self, sums: Sequence[Any], piece: Any, words: list[Any] | None, step: int) -> None:
        """One step of quantised weights: word after word is decoded and multiplied."""
        self._multiply_pairs(sums, self._decoded(piece, words), words, step)

    def _multiply_pairs(self, sums: Sequence[Any], decode: Callable[[int], Any], words: list[Any] | None, step: int) -> None:
        """decode: see `_decoded`."""
        cut, format = self.cut, self.format
        own = format.scaled == "sums"
        totals = [register("float32", cut.row_blocks * 4, "step")] if own else sums
        if own:
            zeros(totals[0], cut.row_blocks * 4)
        for index in range(4):
            columns = [self._x_word_of(block, step, index) for block in range(cut.row_blocks)] if cut.teams > 1 else None
            upper, lower = decode(index)
            for pair in range(0, len(upper), 2):
                a = (upper[pair], lower[pair], upper[pair + 1], lower[pair + 1])
                for block in range(cut.row_blocks):
                    c = [totals[index % len(totals)][block * 4 + i] for i in range(4)]
                    x = (columns[block] if columns else self._x(block, step)[index * len(upper) :])[pair:]
                    do(T.ptx[self.mma](*c, *a, x[0], x[1], *c))
        if own and words:
            for i in range(cut.row_blocks * 4):
                put(sums[0], sums[0][i] + totals[0][i] * words[i % 4 // 2], i)

    def _share(self, sums: Any, more: int) -> None:
        """Leave the warp's sums where the finishing threads find them, as [group][row of x][weight row]."""
        for block in range(self.cut.row_blocks):
            for i in range(4):
                row = block * 8 + self.at.lane % 4 * 2 + i % 2
                place = row * 16 + T.floordiv(self.at.lane, 4) + i // 2 * 8 + more * self.cut.rows * 16
                if block * 8 + 8 <= self.cut.rows:
                    T.buffer_store(self.shared, sums[block * 4 + i], [self.turn, self.at.warp, place])
                else:
                    with T.If(row < self.cut.rows), T.Then():
                        T.buffer_store(self.shared, sums[block * 4 + i], [self.turn, self.at.warp, place])

    def _sums(self) -> list[Any]:
        """The finished sums of this thread's element, one for each matrix."""
        results = []
        for matrix in range(self.sums):
            place = self.thread if self.sums == 1 else T.floordiv(self.thread, 8) * 16 + self.thread % 8 + matrix * 8
            total = register("float32", name="total")
            put(total, T.float32(0))
            for warp in self._team():
                put(total, total[0] + self.shared[self.turn, warp, place])
            results.append(total[0])
        return results

    def _line(self) -> tuple[Any, Any]:
        """(group of those that are shared together, row of x) that this thread finishes."""
        line = T.floordiv(self.thread, self.width)
        if self.cut.together == 1:
            return 0, line
        return T.floordiv(line, self.cut.rows), T.floormod(line, self.cut.rows)

    def _column(self, segment: _Segment, tile: Any, group: int) -> Any:
        """Of the result that this thread finishes, or makes no use of: weight row of the segment."""
        more, _ = self._line()
        first = self._first_row(segment, tile, 0) + group * self.width
        return first + self.thread % self.width + more * self.width

    def _fetch(self, early: Early, tile: Any, group: int) -> None:
        """What this thread's sums will meet is on its way before they are there."""
        with T.If(self.thread < self.cut.together * self.cut.rows * self.width), T.Then():
            for index, segment in enumerate(self.segments):
                with T.If(T.And(tile >= segment.first, tile < segment.first + segment.tiles)), T.Then():
                    early.fetch(index, hold(self._column(segment, tile, group), "int32"))

    def _factors(self, tile: Any, group: int) -> list[Any] | None:
        """What this thread's sums will be multiplied by, loaded before they are needed; one for each matrix."""
        if self.format.storage is None:
            return None
        factors = [register("float32", name="factor") for _ in range(self.matrices)]
        for factor in factors:
            put(factor, T.float32(self.factor))
        if self.format.storage.block[1] and not self.format.storage.whole:
            return [factor[0] for factor in factors] if self.factor != 1 else None
        for segment in self.segments:
            with T.If(T.And(tile >= segment.first, tile < segment.first + segment.tiles)), T.Then():
                row = T.min(self._column(segment, tile, group), T.int32(segment.projection.columns - 1))
                for factor, scales in zip(factors, segment.projection.scales, strict=True):
                    put(factor, of_row(scales, hold(row, "int32")) * T.float32(self.factor))
        return [factor[0] for factor in factors]

    def _merge_together(self, state: Best) -> None:
        """Bests of one row that threads of different groups and teams keep, into that of the first group's in the first team."""
        cut = self.cut
        lines = cut.together * cut.rows
        first = self._team()[0]
        self._meet()  # the last sums have been read
        with T.If(T.And(self.at.lane % 16 < 1, self.thread < lines * 16)), T.Then():
            for part, value in enumerate((state.best, state.index, state.total)):
                bits = value[0] if part != 1 else T.reinterpret("float32", value[0])
                T.buffer_store(self.shared, bits, [0, first, part * lines + T.floordiv(self.thread, 16)])
        do(T.cuda.cta_sync())
        with T.If(self._first(self.thread < cut.rows * 16)), T.Then():
            for more in range(1, cut.teams * cut.together):
                team, group = divmod(more, cut.together)
                place = group * cut.rows + T.floordiv(self.thread, 16)
                best, index, total = (hold(self.shared[0, team * cut.warps, part * lines + place]) for part in range(3))
                state.merge(best, T.reinterpret("int32", index), total)

    def _finish(self, tile: Any, group: int, sums: list[Any], partial: Any, state: Best | None, logits: Any) -> None:
        if self.early:
            return self.early.finish(sums)
        row = hold(self._line()[1], "int32")
        before = 0
        for segment in self.segments:
            mine = T.And(tile >= segment.first, tile < segment.first + segment.tiles)
            with T.If(mine), T.Then():
                column = hold(self._column(segment, tile, group), "int32")
                columns = segment.projection.columns
                with T.If(column < columns), T.Then():
                    if state is not None:
                        logits.take(state, row, column, sums[0])
                    elif partial is not None:
                        for matrix, total in enumerate(sums):
                            place = before + matrix * columns + column
                            store(partial, [self.part * self.cut.rows + row, place], total)
                    else:
                        segment.projection.finish(row, column, sums)
            before += segment.projection.columns * self.matrices

    # -- x and its norm ----------------------------------------------------------------------------------------

    def _prepare_x(self, weights: Any) -> Any:
        """Load x, times its norm's weights, and leave it where products find it.

        Returns 1 / rms of the row that this thread finishes, None without a norm.
        """
        cut, norm = self.cut, self.norm
        self._load_x()
        if norm:
            self._fold_norm(weights)
        self._order_x()
        if cut.teams > 1:
            self._share_x()
        if norm or cut.teams > 1:
            do(T.cuda.cta_sync())
        if norm is None:
            return None
        inverse = self._inverse(T.min(self._line()[1], T.int32(cut.rows - 1)))
        if norm.finish:
            self._store_normed(norm.finish)
        return inverse

    def _load_x(self) -> None:
        cut = self.cut
        self.each = cut.step // 8  # words of a lane's x in a step
        self.fragments = register("uint32", cut.row_blocks * cut.x_steps * self.each, "x")
        for block in range(cut.row_blocks):
            row = T.min(block * 8 + T.floordiv(self.at.lane, 4), T.int32(cut.rows - 1))
            for step in range(cut.x_steps):
                x = self._x(block, step)
                for first in range(0, self.each, 4):
                    do(T.ptx["ld.global.v4.b32"](*x[first : first + 4], self.x.ptr_to([row, self._x_word(step, first)])))

    def _x(self, block: int, step: int) -> list[Any]:
        """The lane's words of 8 rows of x that go with a step's weights."""
        return [self.fragments[(block * self.cut.x_steps + step) * self.each + i] for i in range(self.each)]

    def _x_word(self, step: int, word: int) -> Any:
        """Where four of the lane's words of x lie in a row. Of what goes to shared memory, neighbouring lanes load neighbouring
        pieces: otherwise every load takes four times as many cycles."""
        return self.word + (step * (self.cut.stride // 2) + word * (4 if self.cut.teams > 1 else 1))

    def _order_x(self) -> None:
        """Bring x to the order in which weights are decoded."""
        if self.format.storage is None:
            return
        each = self.format.columns // 2
        for first in range(0, self.cut.row_blocks * self.cut.x_steps * self.each, each):
            for index, pair in enumerate(self.format.order([self.fragments[first + i] for i in range(each)])):
                if self.one_row:
                    pair = self.format.lifted(pair)
                if self.one_row and self.cut.teams == 1:
                    pair = T.Select(one_row.owned(self.format, self.at.lane, first // each % 4), pair, T.uint32(0))
                put(self.fragments, pair, first + index)

    def _shared_word(self) -> Any:
        """As `_word`, of the columns whose x this warp loads for all teams."""
        cut = self.cut
        return self.part * (cut.x_columns // 2) + self.at.warp * (cut.x_steps * cut.step // 2) + self.at.lane % 4 * 4

    def _share_x(self) -> None:
        """Leave the warp's part of x, in the order of decoded weights, where all warps find it."""
        cut, lane = self.cut, self.at.lane
        for block in range(cut.row_blocks):
            row = hold(block * 8 + T.floordiv(lane, 4), "int32")
            with T.If(row < cut.rows), T.Then():
                for step in range(cut.x_steps):
                    for index in range(4):
                        with T.vectorized(0, 4) as v:
                            first = (block * cut.x_steps + step) * self.each + index * 4
                            place = [self.at.warp * cut.x_steps + step, lane % 4, row * 16 + index * 4 + v]
                            T.buffer_store(self.x_shared, self.fragments[first + v], place)
        if self.one_row:
            self.owned = register("uint32", 16, "x")
            for index in range(16):
                put(self.owned, T.uint32(0), index)

    def _x_word_of(self, block: int, step: int, index: int) -> Any:
        """The words of x, of up to 8 rows, that go with one word of weights."""
        x = register("uint32", 4, "x")
        row = T.min(block * 8 + T.floordiv(self.at.lane, 4), T.int32(self.cut.rows - 1))
        with T.vectorized(0, 4) as v:
            T.buffer_store(x, self.x_shared[self.warp * self.cut.steps + step, index, row * 16 + self.at.lane % 4 * 4 + v], [v])
        return [x[i] for i in range(4)]

    def _norm_weights(self) -> Any:
        if self.norm is None:
            return None
        each = self.cut.step // 8
        own = self.cut.x_steps * each
        weights = register("uint32", own, "norm_weights")
        few = own <= EARLY_REGISTERS[0] and (self.cut.row_blocks + 1) * own <= EARLY_REGISTERS[1]
        early = self.cut.teams == 1 and few
        load = "ld.global.v4.b32" if early else "ld.global.nc.v4.b32"  # the compiler moves what is constant behind x
        for step in range(self.cut.x_steps):
            for first in range(0, each, 4):
                words = [weights[step * each + first + i] for i in range(4)]
                do(T.ptx[load](*words, self.norm.weight.ptr_to([self._x_word(step, first)])))
        return weights

    def _fold_norm(self, weights: Any) -> None:
        """Multiply x by the norm's weight and leave its sums of squares: 1 / rms is applied to finished sums.

        They are the diagonal of x x^T, from the same fragments. Two sums take turns, since each would wait for the one before.
        """
        cut, at, norm = self.cut, self.at, self.norm
        assert norm is not None
        sums, others = (register("float32", 4, "squares") for _ in range(2))
        for block in range(cut.row_blocks):
            zeros(sums, 4)
            zeros(others, 4)
            for word in range(0, cut.x_steps * self.each, 2):
                low, high = (self.fragments[block * cut.x_steps * self.each + word + i] for i in range(2))
                c = [(others if word % 4 else sums)[i] for i in range(4)]
                do(T.ptx[self.mma](*c, low, T.uint32(0), high, T.uint32(0), low, high, *c))
            for odd in range(2):
                put(sums, sums[odd] + others[odd], odd)
            for odd in range(2):
                with T.If(T.EQ(T.floordiv(at.lane, 4), at.lane % 4 * 2 + odd)), T.Then():
                    T.buffer_store(self.squares, sums[odd], [at.warp, block * 8 + T.floordiv(at.lane, 4)])
        for block in range(cut.row_blocks):
            for index in range(cut.x_steps * self.each):
                x = self.fragments[block * cut.x_steps * self.each + index]
                if norm.zero_centred:
                    do(T.ptx[f"fma.rn.{self.kind}x2"](x, x, weights[index], x))
                elif self.kind == "f16" or architecture_of(self.env.plan).multiply:
                    do(T.ptx[f"mul.rn.{self.kind}x2"](x, x, weights[index]))
                else:  # x * w + -0 is x * w, zeros included
                    do(T.ptx["fma.rn.bf16x2"](x, x, weights[index], T.uint32(0x80008000)))

    def _inverse(self, row: Any) -> Any:
        assert self.norm is not None
        total = register("float32")
        put(total, T.float32(0))
        for warp in range(self.cut.teams * self.cut.warps):
            put(total, total[0] + self.squares[warp, row])
        return hold(T.rsqrt(total[0] * T.float32(1.0 / self.cut.columns) + T.float32(self.norm.eps)))

    def _store_normed(self, finish: Callable[[Any, Any, Any], None]) -> None:
        """An element for each thread of as many blocks as it takes, from the last on, which have the fewest tiles; now, while L1
        has x. A whole row for each block, after its tiles, made those blocks the last ones by far."""
        cut, at = self.cut, self.at
        threads, count = cut.teams * cut.warps * 32, cut.rows * cut.columns
        for first in range(0, count, self.blocks * threads):
            number = hold(first + (self.blocks - 1 - at.block) * threads + at.warp * 32 + at.lane, "int32")
            with T.If(number < count), T.Then():
                row = hold(T.floordiv(number, cut.columns), "int32")
                finish(row, hold(T.floormod(number, cut.columns), "int32"), self._inverse(row))


def emit_add_parts(env: Any, cut: Geometry, projections: Sequence[Projection], partial: Any) -> None:
    """The second launch of a product in parts: every element's parts in order, then its epilogue."""
    rows, columns = cut.rows, sum(projection.columns for projection in projections)
    warps = 4
    with env.kernel(-(-rows * columns // (warps * 32)), warps) as at:
        index = hold(at.block * warps * 32 + at.warp * 32 + at.lane, "int32")
        with T.If(index < rows * columns), T.Then():
            row, place = hold(T.floordiv(index, columns), "int32"), hold(T.floormod(index, columns), "int32")
            first = before = 0
            for projection in projections:
                with T.If(T.And(place >= first, place < first + projection.columns)), T.Then():
                    column = hold(place - first, "int32")
                    sums = []
                    for matrix in range(len(projection.weights)):
                        at_column = before + matrix * projection.columns + column
                        parts = [load(partial, [part * rows + row, at_column]) for part in range(cut.k_parts)]
                        total = parts[0]
                        for part in parts[1:]:
                            total = hold(total + part)
                        sums.append(total)
                    projection.finish(row, column, sums)
                first += projection.columns
                before += projection.columns * len(projection.weights)
