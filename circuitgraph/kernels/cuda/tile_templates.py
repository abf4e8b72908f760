"""Templates for products of many rows on tensor cores (see tiles.py)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ...plan.ir import Group, Plan, Scratch
from ..base import Kernel, kernel, within
from .architectures import architecture_of, fitting
from .epilogue import refuse_epilogue
from .formats import Format
from .plain import Projection
from .quantised_tiles import QuantisedTile, QuantisedTiles
from .shared import (
    PROLOGUE_WARPS,
    emit_chosen,
    emit_prologue,
    format_of,
    logits_of,
    partial_scratch,
    partials_of,
    projection_of,
    projections_of,
    prologue_scratch,
    refuse_dtypes,
    refuse_meeting,
    refuse_prologue,
    refuse_quantised,
    refuse_top1,
)
from .tiles import DEPTH, Tile, Tiles


@dataclass(frozen=True)
class TileParams:
    """rows, weights: of one tile, multiples of 32 and 64; stages: of the ring."""

    rows: int = within(128, 32, 256)
    weights: int = within(128, 64, 256)
    stages: int = within(4, 2, 8)

    def tile(self, plan: Plan, group: Group) -> Tile:
        format = format_of(plan, group)
        tiles: list[Tile] = [Tile(self.rows, self.weights, stages) for stages in range(self.stages, 1, -1)]
        if format.storage is not None:
            more = (4 * format.columns, bool(format.scaled))
            tiles = [QuantisedTile(tile.rows, tile.weights, tile.stages, *more) for tile in tiles]
        return fitting(plan, tiles, lambda tile: tile.shared_bytes)


def refuse_tiles(plan: Plan, group: Group, params: TileParams) -> str | None:
    quantised = refuse_quantised(plan, group)
    if quantised:
        return quantised
    columns = int(plan.circuit.types[group.anchors[0].inputs[0]].shape[1])  # type: ignore[union-attr]
    if params.rows % 32 or params.weights % 64:
        return f"tiles are multiples of 32 rows and 64 weights, got {params}"
    if columns % DEPTH:
        return f"{columns} columns are no whole number of stages of {DEPTH}"
    tile = params.tile(plan, group)
    if tile.shared_bytes > architecture_of(plan).shared_bytes:
        return f"needs {tile.shared_bytes} B of shared memory"
    reason = refuse_dtypes(plan, group) or refuse_meeting(group) or refuse_prologue(plan, group)
    return reason or refuse_scales(format_of(plan, group), columns)


def refuse_scales(format: Format, columns: int) -> str | None:
    """Why scales cannot be copied beside the pieces of a stage, or None."""
    if format.scaled == "sums" and format.scale_columns % (4 * format.columns):
        return f"scales of {format.storage} change within {4 * format.columns} columns"
    if format.scaled == "numbers" and columns % format.scale_columns:
        return f"{columns} columns are no whole number of words of scales"
    return format.refuse()


def tiles_of(env: Any, group: Group, params: TileParams, projections: list[Projection]) -> Tiles:
    emit_prologue(env, group, PROLOGUE_WARPS)
    x, tile, format = env.words(group.anchors[0].inputs[0]), params.tile(env.plan, group), format_of(env.plan, group)
    if isinstance(tile, QuantisedTile):
        return QuantisedTiles(env, tile, x, format, projections)
    return Tiles(env, tile, x, format.kind, projections)


@kernel
class LinearTiles(Kernel):
    """Projections of many rows in bf16 or f16, with quantised weights or not, a block a tile of the result; the prologue by
    rows before it."""

    name = "cuda.linear_tiles"
    patterns = ("project", "gated")
    Params = TileParams

    @staticmethod
    def refuse(plan: Plan, group: Group, params: Any) -> str | None:
        return refuse_epilogue(plan, group) or refuse_tiles(plan, group, params)

    @staticmethod
    def scratch(plan: Plan, group: Group, params: Any) -> tuple[Scratch, ...]:
        return prologue_scratch(plan, group)

    @staticmethod
    def emit(env, group: Group, params: Any) -> None:
        tiles_of(env, group, params, projections_of(env, group)).emit()


@kernel
class Top1Tiles(Kernel):
    """lm_head, quantised or not, top-1 and log-probability of many rows in bf16 or f16; every tile keeps the best of its
    columns."""

    name = "cuda.top1_tiles"
    patterns = ("head",)
    Params = TileParams

    @staticmethod
    def refuse(plan: Plan, group: Group, params: Any) -> str | None:
        return refuse_top1(group) or refuse_tiles(plan, group, params)

    @staticmethod
    def scratch(plan: Plan, group: Group, params: Any) -> tuple[Scratch, ...]:
        columns = int(plan.circuit.types[group.anchors[0].inputs[1]].shape[0])  # type: ignore[union-attr]
        return (*prologue_scratch(plan, group), *partial_scratch(-(-columns // params.weights), plan.rows))

    @staticmethod
    def emit(env, group: Group, params: Any) -> None:
        (linear,) = group.anchors
        partials = partials_of(env)
        tiles_of(env, group, params, [projection_of(env, [linear], lambda *_: None)]).emit(
            best=partials, logits=logits_of(env, group)
        )
        emit_chosen(env, group, partials)
