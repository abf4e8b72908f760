"""Templates of mixtures of experts: routing and the experts themselves."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ...circuit.types import TensorType
from ...plan.ir import Group, Plan, Scratch
from ..base import Kernel, kernel, within
from .shared import columns_of, packing, refuse_storages
from .sizes import Tile, default_tile, row_stride


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
        weight = plan.circuit.types[group.anchors[0].inputs[1]]
        assert isinstance(weight, TensorType)
        logits = TensorType("f32", (plan.rows, int(weight.shape[0])))
        return (Scratch.own("logits", logits), packing(plan, group, lambda lanes: _route_tile(plan, group, lanes)))

    @staticmethod
    def emit(env, group: Group, params: Any) -> None:
        from . import emission

        emission.emit_router(env, group, params.block, _route_tile(env.plan, group, env.lanes))


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
        _, ids, _, down = (plan.circuit.types[name] for name in group.anchors[0].inputs[:4])
        assert isinstance(ids, TensorType)
        assert isinstance(down, TensorType)
        experts, hidden, inner = (int(size) for size in down.shape)
        pairs = int(ids.elements())
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


def _route_tile(plan: Plan, group: Group, lanes: int) -> Tile:
    return default_tile(plan.rows, 1, lanes, columns_of(plan, group))
