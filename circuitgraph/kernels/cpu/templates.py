"""The CPU kernel templates that schedules/cpu.yaml chooses from: what each accepts, its tunables and its scratch.

How they emit is in `emission`, which is imported when something is emitted: plans can be made without TVM.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ...circuit.types import TensorType
from ...plan.fuse import CACHE, ROWS
from ...plan.ir import VIEWS, Group, Plan, Scratch
from ..base import Kernel, kernel, meeting, refuse_packed, within
from .latent_templates import AttendLatent, HeadProject
from .moe_templates import Experts, Route
from .shared import ROW_OPS, VECTOR_OPS, columns_of, inner_values, packing, refuse_storages, shape_of, state_of
from .sizes import Tile, attention_scratch_floats, attention_splits, default_tile, top1_tasks

__all__ = ["Attend", "AttendLatent", "Experts", "HeadProject", "Linear", "LinearTop1", "Route", "Rows"]

MOST_SUMS = 128
"""Vectors that the inner loop of a projection may sum in: no machine has more than 32 registers for them."""


@kernel
class Rows(Kernel):
    """Row-wise nodes one after the other: the generic fallback, and the home of what is too small to split."""

    name = "cpu.rows"
    patterns = (ROWS, CACHE)

    @dataclass(frozen=True)
    class Params:
        pass

    @staticmethod
    def refuse(plan: Plan, group: Group, params: Any) -> str | None:
        foreign = sorted({node.op for node in group.nodes} - set(ROW_OPS) - set(VIEWS))
        return f"no row-wise emitter for {', '.join(foreign)}" if foreign else refuse_packed(plan, group)

    @staticmethod
    def scratch(plan: Plan, group: Group, params: Any) -> tuple[Scratch, ...]:
        return inner_values(plan, group, group.nodes)

    @staticmethod
    def emit(env, group: Group, params: Any) -> None:
        from . import emission

        emission.emit_rows(env, group.nodes)


@kernel
class Linear(Kernel):
    """Projections that share one input: the prologue by rows, then every weight streamed once in one launch."""

    name = "cpu.linear"
    patterns = ("project", "gated")

    @dataclass(frozen=True)
    class Params:
        """block: output columns of a task. The others: see `linear.Tile`; 0 takes the measured default for the rows."""

        block: int = within(16, 1, 256)
        tile_columns: int = within(0, 0, 16)
        tile_rows: int = within(0, 0, 32)
        unroll: int = within(0, 0, 16)
        chains: int = within(0, 0, 16)
        prefetch: int = within(0, 0, 1 << 20)

    @staticmethod
    def refuse(plan: Plan, group: Group, params: Any) -> str | None:
        foreign = sorted({node.op for node in group.epilogue} - set(VECTOR_OPS) - set(VIEWS))
        if foreign:
            return f"no vector form of {', '.join(foreign)} in the epilogue"
        foreign = sorted({node.op for node in group.prologue} - set(ROW_OPS) - set(VIEWS))
        if foreign:
            return f"no row-wise emitter for {', '.join(foreign)} in the prologue"
        if any(node.op == "scale_rows" and node.inputs[1] in group.made for node in group.epilogue):
            return "makes the factor of a scale_rows itself"
        packed = refuse_storages(plan, group)
        if packed:
            return packed
        for anchors, _ in meeting(group):
            shapes = {shape_of(plan, anchor.inputs[1]) for anchor in anchors}
            if len(shapes) > 1:
                return f"weights that meet in one epilogue have different shapes {sorted(shapes)}"
        weights = max(len(anchors) for anchors, _ in meeting(group))
        tile = _tile(plan, group, params, 16)
        sums = weights * tile.columns * tile.rows * tile.chains
        if sums > MOST_SUMS:
            return f"a tile of {sums} running sums, more than {MOST_SUMS}; make tile_columns, tile_rows or chains smaller"
        return None

    @staticmethod
    def scratch(plan: Plan, group: Group, params: Any) -> tuple[Scratch, ...]:
        return (
            *inner_values(plan, group, group.prologue),
            packing(plan, group, lambda lanes: _tile(plan, group, params, lanes)),
        )

    @staticmethod
    def emit(env, group: Group, params: Any) -> None:
        from . import emission

        emission.emit_projections(env, group, meeting(group), params.block, _tile(env.plan, group, params, env.lanes))


@kernel
class LinearTop1(Kernel):
    """lm_head, top-1 (under a mask, where one is given) and log-probability; logits are reduced where they arise."""

    name = "cpu.linear_top1"
    patterns = ("head",)

    @dataclass(frozen=True)
    class Params:
        """task_columns: vocabulary entries of a task; block: those reduced together. Both multiples of 32."""

        task_columns: int = within(512, 32, 1 << 20)
        block: int = within(32, 32, 1024)

    @staticmethod
    def refuse(plan: Plan, group: Group, params: Any) -> str | None:
        if params.block % 32 or params.task_columns % params.block:
            return f"block {params.block} must be a multiple of 32 and divide task_columns {params.task_columns}"
        shape = [node.op for node in (*group.anchors, *group.epilogue)]
        fits = shape in (["linear", "top1"], ["linear", "masked_top1"])
        return refuse_storages(plan, group) if fits else f"expected linear and top1 or masked_top1, got {shape}"

    @staticmethod
    def scratch(plan: Plan, group: Group, params: Any) -> tuple[Scratch, ...]:
        vocabulary, _ = shape_of(plan, group.anchors[0].inputs[1])
        partial = (top1_tasks(vocabulary, params.task_columns), plan.rows)
        parts = (("best", "f32"), ("index", "i32"), ("total", "f32"))
        partials = tuple(Scratch.own(name, TensorType(dtype, partial)) for name, dtype in parts)
        return (*inner_values(plan, group, group.prologue), packing(plan, group), *partials)

    @staticmethod
    def emit(env, group: Group, params: Any) -> None:
        from . import emission

        emission.emit_head(env, group, params.task_columns, params.block)


@kernel
class Attend(Kernel):
    """Paged attention of each row over its sequence, then the element-wise rest by rows."""

    name = "cpu.attention"
    patterns = ("attend",)

    @dataclass(frozen=True)
    class Params:
        """splits: pieces of a row's context, 0 chooses by rows and heads; split_rows: least cache rows of a piece."""

        splits: int = within(0, 0, 64)
        split_rows: int = within(64, 1, 1 << 20)

    @staticmethod
    def refuse(plan: Plan, group: Group, params: Any) -> str | None:
        return refuse_packed(plan, group) if len(group.anchors) == 1 else "one attention at a time"

    @staticmethod
    def scratch(plan: Plan, group: Group, params: Any) -> tuple[Scratch, ...]:
        _, heads, dim = shape_of(plan, group.anchors[0].inputs[0])
        splits = _splits(plan, group, params)
        floats = attention_scratch_floats(plan.rows, heads, dim, splits) if splits > 1 else 0
        pieces = (Scratch.own("pieces", TensorType("f32", (floats,))),) if floats else ()
        return (*inner_values(plan, group, group.nodes), *pieces)

    @staticmethod
    def emit(env, group: Group, params: Any) -> None:
        from . import emission

        emission.emit_attend(env, group, _splits(env.plan, group, params), params.split_rows)


def _tile(plan: Plan, group: Group, params: Any, lanes: int) -> Tile:
    """The measured default, with what the schedule sets in its place."""
    weights = max(len(anchors) for anchors, _ in meeting(group))
    measured = default_tile(plan.rows, weights, lanes, columns_of(plan, group))
    return Tile(
        columns=params.tile_columns or measured.columns,
        rows=min(plan.rows, params.tile_rows or measured.rows),
        unroll=params.unroll or measured.unroll,
        chains=params.chains or measured.chains,
        prefetch=params.prefetch or measured.prefetch,
    )


def _splits(plan: Plan, group: Group, params: Any) -> int:
    name = state_of(plan, group.anchors[0])
    kv_heads = next(state.heads for state in plan.circuit.states if state.name == name)
    return params.splits or attention_splits(plan.rows, kv_heads)
