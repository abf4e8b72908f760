"""Templates for latent attention (see latent.py)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ...plan.ir import Group, Plan, Scratch
from ..base import Kernel, kernel, within
from .architectures import architecture_of
from .attention import emit_combine
from .latent import (
    HEADS,
    LATENT,
    ROTATED,
    SHARED_BYTES,
    LatentAttention,
    LatentQuery,
    emit_latent_combine,
    emit_plain_latent,
)
from .shared import attend_end, attend_scratch, query_of, refuse_attend, state_of


def latent_query(env: Any, group: Group, parts: int) -> LatentQuery:
    return LatentQuery(query_of(env, group, parts), env.buffer(group.anchors[0].inputs[1]))


@kernel
class LatentWarpgroups(Kernel):
    """Latent attention by `wgmma`, a block for 64 heads of a row and a part of its context; then the sum of the parts."""

    name = "cuda.latent_warpgroups"
    patterns = ("attend_latent",)

    @dataclass(frozen=True)
    class Params:
        """parts: of a row's context, 0 fills the GPU once."""

        parts: int = within(0, 0, 64)

    @staticmethod
    def refuse(plan: Plan, group: Group, params: Any) -> str | None:
        arch = architecture_of(plan)
        if not arch.warpgroups:
            return f"{arch.name} has no wgmma"
        if arch.shared_bytes < SHARED_BYTES:
            return f"needs {SHARED_BYTES} B of shared memory"
        (node,) = group.anchors[:1]
        q, rotated = (plan.circuit.types[name] for name in node.inputs[:2])
        state = next(state for state in plan.circuit.states if state.name == state_of(plan, node))
        dtypes = {q.dtype, rotated.dtype, state.dtype}  # type: ignore[union-attr]
        if len(dtypes) > 1 or "f32" in dtypes:
            return f"needs queries and cache in bf16 or f16, both the same, got {', '.join(sorted(dtypes))}"
        sizes = (q.shape[2], rotated.shape[2])  # type: ignore[union-attr]
        if sizes != (LATENT, ROTATED):
            return f"a latent of {sizes[0]} and a rotated part of {sizes[1]}, made for {LATENT} and {ROTATED}"
        return refuse_attend(plan, group, LatentWarpgroups.parts(plan, group, params))

    @staticmethod
    def parts(plan: Plan, group: Group, params: Any) -> int:
        heads = int(plan.circuit.types[group.anchors[0].inputs[0]].shape[1])  # type: ignore[union-attr]
        blocks = plan.rows * -(-heads // HEADS)
        return params.parts or max(1, min(64, architecture_of(plan).processors // blocks))

    @staticmethod
    def scratch(plan: Plan, group: Group, params: Any) -> tuple[Scratch, ...]:
        return attend_scratch(plan, group, LatentWarpgroups.parts(plan, group, params))

    @staticmethod
    def emit(env, group: Group, params: Any) -> None:
        latent = latent_query(env, group, LatentWarpgroups.parts(env.plan, group, params))
        names = group.anchors[0].inputs[:2]
        words = (env.words(names[0]), env.words(names[1]))
        LatentAttention(env, latent, words, env.plan.circuit.types[names[0]].dtype).emit()
        emit_latent_combine(env, latent, attend_end(env, group, latent.query))


@kernel
class LatentPlain(Kernel):
    """Latent attention of any sizes and dtypes, a warp a (row, head, part); then the sum of the parts."""

    name = "cuda.latent_plain"
    patterns = ("attend_latent",)

    @dataclass(frozen=True)
    class Params:
        """parts: warps that share one row and head."""

        parts: int = within(16, 1, 64)

    @staticmethod
    def refuse(plan: Plan, group: Group, params: Any) -> str | None:
        return refuse_attend(plan, group, params.parts)

    @staticmethod
    def scratch(plan: Plan, group: Group, params: Any) -> tuple[Scratch, ...]:
        return attend_scratch(plan, group, params.parts)

    @staticmethod
    def emit(env, group: Group, params: Any) -> None:
        latent = latent_query(env, group, params.parts)
        emit_plain_latent(env, latent)
        emit_combine(env, latent.query, attend_end(env, group, latent.query))
