"""Templates for products of some rows on Hopper's tensor cores (see warpgroups.py)."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

from ...circuit.types import TensorType
from ...plan.fuse import NORMED, OWN_ROW, QKV
from ...plan.ir import Group, Plan, Scratch
from ..base import Kernel, kernel, within
from .architectures import architecture_of
from .epilogue import meeting, refuse_epilogue
from .formats import Format
from .joined_heads import JoinedHeads, refuse_joined_heads
from .joined_rows import emit_joined_rows, refuse_joined_rows
from .plain import Projection
from .quantised_warpgroups import QuantisedWarpgroups, QuantisedWarpgroupTile
from .shared import (
    PROLOGUE_WARPS,
    emit_chosen,
    emit_prologue,
    format_of,
    logits_of,
    partial_scratch,
    partials_of,
    projection_of,
    prologue_scratch,
    refuse_dtypes,
    refuse_meeting,
    refuse_prologue,
    refuse_quantised,
    refuse_top1,
)
from .stream_templates import appends_next, together_in
from .tile_templates import refuse_scales
from .turned_warpgroups import GROUP, TurnedTile, TurnedWarpgroups
from .warpgroups import DEPTH, ROWS, STAGES, UNIT, Ahead, WarpgroupTile, WarpgroupTiles

MOST_PARTS = 8
MOST_TURNED_PARTS = 4
"""More parts of tiles that are turned were no faster: their sums are read while the next weights come."""
HEIGHTS = range(64, 192 + 1, GROUP)
"""Of tiles that are turned. Of 232 rows a head has fewer tiles, and was as fast."""
JOIN = 530
"""What one launch more takes, in the same unit; the sums themselves are written, read and waited for."""


def sizes_of(plan: Plan, group: Group) -> tuple[int, int, int]:
    """(weight rows of all products, columns of x, weights that meet)."""
    types = plan.circuit.types
    rows = sum(int(types[anchor.inputs[1]].shape[0]) for anchor in group.anchors)  # type: ignore[union-attr]
    columns = int(types[group.anchors[0].inputs[0]].shape[1])  # type: ignore[union-attr]
    return rows, columns, len(together_in(group)[0])


def tile_rows(plan: Plan) -> int:
    """Rows of x in a tile: all of them, or as few tiles of at most 128 as there have to be, of equal size."""
    tiles = -(-plan.rows // ROWS)
    return -(-plan.rows // tiles // 8) * 8


@dataclass(frozen=True)
class WarpgroupParams:
    """units: of 64 weight rows in a tile, 1 to 3; parts: blocks that share the columns of a tile. 0: what is reckoned to
    take least time. stages: of the ring, at most; fewer where shared memory is full. plain: for weights that are not quantised
    alone; columns: of so many columns or more alone."""

    units: int = within(0, 0, 3)
    parts: int = within(0, 0, MOST_PARTS)
    stages: int = within(STAGES, 2, STAGES)
    plain: bool = False
    columns: int = within(0, 0, 1 << 20)

    def tile(self, plan: Plan, group: Group, *, head: bool = False) -> WarpgroupTile:
        weights, columns, _ = sizes_of(plan, group)
        rows, available = tile_rows(plan), architecture_of(plan)
        units = [self.units] if self.units else [3, 2, 1]
        parts = [1] if head else [self.parts] if self.parts else range(1, MOST_PARTS + 1)
        fit = partial(self._fit, format_of(plan, group), rows=rows, available=available.shared_bytes)
        choices = [fit(units=unit, parts=part) for unit in units for part in parts]
        choices = self._turned(plan, group, parts) or choices

        def time(tile: WarpgroupTile) -> float:
            """In lines of weights that a block copies, 3.75 ns on an H200. x is in L2 and counts a quarter, until there is so
            much of it that L2 is the limit."""
            tiles = -(-weights // tile.weights) * -(-plan.rows // tile.rows)
            turns = -(-tiles * tile.parts // available.processors)
            lines = max(tile.weights + tile.rows / 4, 0.65 * (tile.weights + tile.rows))
            lines *= turns * -(-columns // DEPTH // tile.parts)
            sums = 4 * weights * plan.rows * tile.parts / available.processors / (DEPTH * 2)
            return lines + (JOIN + 4 * sums) * (tile.parts > 1)

        return min(choices, key=time)

    def _turned(self, plan: Plan, group: Group, parts: Iterable[int]) -> list[WarpgroupTile]:
        """Tiles with x as the rows of `wgmma`, where these are nearly a whole number of 64 and columns one of 8. Masked heads
        have none."""
        rows = -(-tile_rows(plan) // UNIT) * UNIT
        types, (_, _, matrices) = plan.circuit.types, sizes_of(plan, group)
        widths = [int(types[anchor.inputs[1]].shape[0]) for anchor in group.anchors]  # type: ignore[union-attr]
        odd = tile_rows(plan) * 8 < rows * 7 or any(width % GROUP for width in widths)
        odd |= any(node.op == "masked_top1" for node in group.epilogue)
        if odd or self.units or format_of(plan, group).storage is not None:
            return []
        step = GROUP * matrices * (ROWS // rows)
        heights = [height for height in HEIGHTS if height % step == 0]
        sizes = [(height, part) for height in heights for part in parts if part <= MOST_TURNED_PARTS]
        choices = [[TurnedTile(2, rows, part, stages, height) for stages in range(self.stages, 1, -1)] for height, part in sizes]
        available = architecture_of(plan).shared_bytes
        return [next(tile for tile in tiles if tile.shared_bytes <= available) for tiles in choices]

    def _fit(self, format: Format, units: int, rows: int, parts: int, available: int) -> WarpgroupTile:
        sizes = [(units, rows, parts, stages) for stages in range(self.stages, 1, -1)]
        tiles = [WarpgroupTile(*size) for size in sizes]
        if format.storage is not None:
            tiles = [QuantisedWarpgroupTile(*size, 4 * format.columns, bool(format.scaled)) for size in sizes]
        return next((tile for tile in tiles if tile.shared_bytes <= available), tiles[-1])


def refuse_warpgroups(plan: Plan, group: Group, params: WarpgroupParams) -> str | None:
    arch = architecture_of(plan)
    if not arch.warpgroups:
        return f"{arch.name} has no wgmma"
    if reason := refuse_quantised(plan, group) or refuse_dtypes(plan, group):
        return reason
    if group.pattern != QKV and (reason := refuse_meeting(group)):
        return reason
    _, columns, _ = sizes_of(plan, group)
    if params.plain and format_of(plan, group).storage is not None:
        return "for plain weights: quantised ones of few rows are streamed"
    if columns < params.columns:
        return f"for {params.columns} columns and more, got {columns}"
    if columns % DEPTH:
        return f"{columns} columns are no whole number of stages of {DEPTH}"
    if columns // DEPTH < 8:
        return f"{columns} columns do not split into 8 parts"
    return refuse_prologue(plan, group) or refuse_scales(format_of(plan, group), columns)


def emit_tiles(env: Any, group: Group, tile: WarpgroupTile, projections: list[Projection]) -> WarpgroupTiles:
    emit_prologue(env, group, PROLOGUE_WARPS)
    name = group.anchors[0].inputs[0]
    x, format = env.words(name), format_of(env.plan, group)
    if isinstance(tile, QuantisedWarpgroupTile):
        return QuantisedWarpgroups(env, tile, x, format, projections)
    if isinstance(tile, TurnedTile):
        return TurnedWarpgroups(env, tile, x, format.kind, projections)
    return WarpgroupTiles(env, tile, x, format.kind, projections)


def settles(plan: Plan, group: Group) -> bool:
    """Does attention follow that will ask for cache rows early? See `Stream.emit`."""
    return (group.pattern == QKV or appends_next(plan, group)) and any(
        other.pattern in ("attend", OWN_ROW) for other in plan.groups
    )


@kernel
class LinearWarpgroups(Kernel):
    """Projections of some rows in bf16 or f16 by `wgmma`, with quantised weights or not, a block a tile of weights and a part of
    the columns; the prologue by rows before it, the sum of the parts after it."""

    name = "cuda.linear_warpgroups"
    patterns = ("project", "gated")
    Params = WarpgroupParams

    @staticmethod
    def refuse(plan: Plan, group: Group, params: Any) -> str | None:
        return refuse_epilogue(plan, group) or refuse_warpgroups(plan, group, params)

    @staticmethod
    def scratch(plan: Plan, group: Group, params: Any) -> tuple[Scratch, ...]:
        tile, (weights, _, _) = params.tile(plan, group), sizes_of(plan, group)
        sums = Scratch.own("sums", TensorType("f32", (tile.parts, plan.rows, weights)))
        return (*prologue_scratch(plan, group), *((sums,) if tile.parts > 1 else ()))

    @staticmethod
    def emit(env, group: Group, params: Any) -> None:
        tile = params.tile(env.plan, group)
        projections = [projection_of(env, anchors, Ahead(env, group, anchors, nodes)) for anchors, nodes in meeting(group)]
        sums = env.scratch("sums") if tile.parts > 1 else None
        emit_tiles(env, group, tile, projections).emit(sums, settles=settles(env.plan, group))


@dataclass(frozen=True)
class JoinedParams(WarpgroupParams):
    """blocks: in entries of blocks alone, and for no norm that a stream would take in."""

    blocks: bool = False


@kernel
class JoinedWarpgroups(Kernel):
    """Projections as `LinearWarpgroups`, in parts. The launch that adds them does what follows, too: the norm of what comes next;
    or norms of heads, RoPE and append."""

    name = "cuda.joined_warpgroups"
    patterns = (NORMED, QKV)
    Params = JoinedParams

    @staticmethod
    def refuse(plan: Plan, group: Group, params: Any) -> str | None:
        if params.blocks and (reason := JoinedWarpgroups.refuse_few(plan, group)):
            return reason
        reason = refuse_warpgroups(plan, group, params) or refuse_joined_rows(plan, group)
        return reason or ("columns in one part, which no second launch adds" if params.tile(plan, group).parts == 1 else None)

    @staticmethod
    def refuse_few(plan: Plan, group: Group) -> str | None:
        """Why few rows, which could be streamed, are better streamed, or None."""
        if plan.circuit.entry(plan.entry).rows != "block":
            return "for entries of blocks"
        return "for x that is there: a stream takes in its norm" if [node.op for node in group.prologue] == ["rms_norm"] else None

    @staticmethod
    def scratch(plan: Plan, group: Group, params: Any) -> tuple[Scratch, ...]:
        return LinearWarpgroups.scratch(plan, group, params)

    @staticmethod
    def emit(env, group: Group, params: Any) -> None:
        tile, sums = params.tile(env.plan, group), env.scratch("sums")
        projections = [projection_of(env, [anchor], lambda *_: None) for anchor in group.anchors]
        tiles = emit_tiles(env, group, tile, projections)
        tiles.emit(sums, settles=settles(env.plan, group), joins=False)
        if group.pattern == QKV and refuse_joined_heads(env.plan, group) is None:
            return JoinedHeads(env, group, sums).emit()
        emit_joined_rows(env, group, lambda number, row, column: tiles.joined(sums, number, row, column))


@kernel
class Top1Warpgroups(Kernel):
    """lm_head, quantised or not, top-1 and log-probability of some rows in bf16 or f16 by `wgmma`; a block takes tile after tile
    and keeps the best of their columns."""

    name = "cuda.top1_warpgroups"
    patterns = ("head",)
    Params = WarpgroupParams

    @staticmethod
    def refuse(plan: Plan, group: Group, params: Any) -> str | None:
        if params.parts > 1:
            return f"a head's columns are not shared by blocks, got {params.parts} parts"
        return refuse_top1(group) or refuse_warpgroups(plan, group, params)

    @staticmethod
    def blocks(plan: Plan, group: Group, tile: WarpgroupTile) -> int:
        """Of a row tile: as many as run at once, each with at least one tile of weights."""
        tiles = -(-sizes_of(plan, group)[0] // tile.weights)
        at_once = max(1, architecture_of(plan).processors // -(-plan.rows // tile.rows))
        return -(-tiles // -(-tiles // at_once))

    @staticmethod
    def scratch(plan: Plan, group: Group, params: Any) -> tuple[Scratch, ...]:
        blocks = Top1Warpgroups.blocks(plan, group, params.tile(plan, group, head=True))
        return (*prologue_scratch(plan, group), *partial_scratch(blocks, plan.rows))

    @staticmethod
    def emit(env, group: Group, params: Any) -> None:
        (linear,) = group.anchors
        partials, tile = partials_of(env), params.tile(env.plan, group, head=True)
        head = [projection_of(env, [linear], lambda *_: None)]
        emit_tiles(env, group, tile, head).emit_best(partials, logits_of(env, group))
        emit_chosen(env, group, partials)
