"""Templates of mixtures of experts: routing and the experts themselves."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Any

from ...circuit.types import TensorType
from ...plan.ir import Group, Plan, Scratch
from ..base import Kernel, kernel, within
from .shared import packing, refuse_storages, shape_of
from .sizes import row_stride


@kernel
class Route(Kernel):
    """The router's product in one launch, then each row's choice among the scores."""

    name = "cpu.route"
    patterns = ("route",)

    @dataclass(frozen=True)
    class Params:
        """block: experts of a task of the product."""

        block: int = within(16, 1, 256)

    @staticmethod
    def refuse(plan: Plan, group: Group, params: Any) -> str | None:
        return refuse_storages(plan, group)

    @staticmethod
    def scratch(plan: Plan, group: Group, params: Any) -> tuple[Scratch, ...]:
        experts, _ = shape_of(plan, group.anchors[0].inputs[1])
        return (Scratch.own("logits", TensorType("f32", (plan.rows, experts))), packing(plan, group))

    @staticmethod
    def emit(env, group: Group, params: Any) -> None:
        from . import emission

        emission.emit_router(env, group, params.block)


@kernel
class Experts(Kernel):
    """Rows gathered by expert; the weights of each activated expert are streamed once for all its rows."""

    name = "cpu.experts"
    patterns = ("experts",)

    @dataclass(frozen=True)
    class Params:
        """block, down_block: inner and hidden columns of a task."""

        block: int = within(16, 1, 256)
        down_block: int = within(32, 1, 256)

    @staticmethod
    def refuse(plan: Plan, group: Group, params: Any) -> str | None:
        return refuse_storages(plan, group, (3, 4, 5))

    @staticmethod
    def scratch(plan: Plan, group: Group, params: Any) -> tuple[Scratch, ...]:
        _, ids, _, down = group.anchors[0].inputs[:4]
        experts, hidden, inner = shape_of(plan, down)
        pairs = prod(shape_of(plan, ids))
        return tuple(
            Scratch.own(name, TensorType(dtype, shape))
            for name, dtype, shape in (
                ("first", "i32", (experts + 1,)),
                ("cursor", "i32", (experts,)),
                ("order", "i32", (pairs,)),
                ("active", "i32", (experts + 1,)),
                ("x", "f32", (plan.rows, row_stride(hidden))),
                ("inner", "f32", (pairs, row_stride(inner))),
                ("mixed", "f32", (plan.rows, hidden)),
            )
        )

    @staticmethod
    def emit(env, group: Group, params: Any) -> None:
        from . import emission

        emission.emit_mixture(env, group, params.block, params.down_block)
