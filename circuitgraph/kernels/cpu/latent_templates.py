"""Templates of latent attention: the product of each head's own matrix, and the attention over latents."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ...circuit.ir import Node
from ...circuit.types import TensorType
from ...plan.ir import Group, Plan, Scratch
from ..base import Kernel, kernel, refuse_packed, within
from .shared import LANES, inner_values, refuse_storages, shape_of
from .sizes import attention_scratch_floats, attention_splits, head_scratch_floats


@kernel
class HeadProject(Kernel):
    """A product of each head with its own matrix, whose rows are streamed once; a slice before it is read in place."""

    name = "cpu.head_linear"
    patterns = ("head_project",)

    @dataclass(frozen=True)
    class Params:
        """block: weight rows of a task into heads; columns: those of a task into latent, a multiple of 16."""

        block: int = within(16, 1, 256)
        columns: int = within(512, 16, 4096)

    @staticmethod
    def refuse(plan: Plan, group: Group, params: Any) -> str | None:
        if params.columns % max(LANES):
            return f"columns {params.columns} must be a multiple of {max(LANES)}"
        return refuse_storages(plan, group)

    @staticmethod
    def scratch(plan: Plan, group: Group, params: Any) -> tuple[Scratch, ...]:
        (node,) = group.anchors
        inner = () if slice_of(plan, group) else inner_values(plan, group, group.prologue)
        if node.attr["into"] == "latent":
            return inner
        _, heads, columns = shape_of(plan, node.inputs[0])
        floats = max(head_scratch_floats(plan.rows, heads, columns, lanes) for lanes in LANES)
        return (*inner, Scratch.own("packed", TensorType("f32", (floats,))))

    @staticmethod
    def emit(env, group: Group, params: Any) -> None:
        from . import emission

        emission.emit_head_project(env, group, slice_of(env.plan, group), params.block, params.columns)


def slice_of(plan: Plan, group: Group) -> Node | None:
    """The slice that is read in place: the whole prologue, and nobody else's input."""
    (node,) = group.prologue if len(group.prologue) == 1 else (None,)
    return None if node is None or node.name in plan.crossing(group) else node


@kernel
class AttendLatent(Kernel):
    """Each row's attention over latents, which are read once for the keys and values of all heads."""

    name = "cpu.latent_attention"
    patterns = ("attend_latent",)

    @dataclass(frozen=True)
    class Params:
        """splits: pieces of a row's context, 0 chooses by rows; split_rows: least cache rows of a piece."""

        splits: int = within(0, 0, 64)
        split_rows: int = within(32, 1, 1 << 20)

    @staticmethod
    def refuse(plan: Plan, group: Group, params: Any) -> str | None:
        return refuse_packed(plan, group)

    @staticmethod
    def scratch(plan: Plan, group: Group, params: Any) -> tuple[Scratch, ...]:
        _, heads, columns = shape_of(plan, group.anchors[0].inputs[0])
        splits = _splits(plan, params)
        # One piece needs its sums in memory, too: those of all heads are no stack's size.
        floats = attention_scratch_floats(plan.rows, heads, columns, splits)
        return (Scratch.own("pieces", TensorType("f32", (floats,))),)

    @staticmethod
    def emit(env, group: Group, params: Any) -> None:
        from . import emission

        emission.emit_attend_latent(env, group, _splits(env.plan, params), params.split_rows)


def _splits(plan: Plan, params: Any) -> int:
    return params.splits or attention_splits(plan.rows, 1)
