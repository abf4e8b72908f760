"""The CUDA kernel templates that schedules/cuda.yaml chooses from: groups of nodes to the emitters beside this file."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from ...plan.fuse import CACHE, OWN_ROW, ROWS
from ...plan.ir import Group, Plan, Scratch
from ..base import Kernel, kernel, refuse_packed, within
from .architectures import architecture_of, at_once, fitting
from .attention import emit_combine, emit_plain_attention
from .block_templates import AttendBlocks
from .epilogue import refuse_epilogue
from .experts_templates import MixturePlain, MixtureStream
from .head_templates import HeadPlain, HeadStream
from .latent_templates import LatentPlain, LatentWarpgroups
from .own_row import OwnRow, refuse_own_row
from .paged import CLUSTER, PagedAttention, groups_of, shared_bytes
from .plain import WARPS, emit_plain, emit_plain_top1
from .row_program import emit_rows, refuse_rows, sinks_of
from .shared import (
    attend_end,
    attend_end_of_some,
    attend_facts,
    attend_scratch,
    emit_chosen,
    emit_copy,
    emit_prologue,
    logits_of,
    partial_scratch,
    partials_of,
    projection_of,
    projections_of,
    prologue_scratch,
    query_of,
    refuse_attend,
    refuse_prologue,
    refuse_quantised,
    refuse_top1,
)
from .stream_templates import LinearStream, QkvStream, Top1Stream
from .tile_templates import LinearTiles, Top1Tiles
from .warpgroup_templates import JoinedWarpgroups, LinearWarpgroups, Top1Warpgroups

__all__ = [
    "Attend",
    "AttendBlocks",
    "AttendPaged",
    "HeadPlain",
    "HeadStream",
    "JoinedWarpgroups",
    "LatentPlain",
    "LatentWarpgroups",
    "LinearPlain",
    "LinearStream",
    "LinearTiles",
    "LinearWarpgroups",
    "MixturePlain",
    "MixtureStream",
    "QkvStream",
    "Rows",
    "Top1Plain",
    "Top1Stream",
    "Top1Tiles",
    "Top1Warpgroups",
    "emit_copy",
]


@kernel
class Rows(Kernel):
    """Row-wise nodes in one or two launches: gather, norms, RoPE, cache append."""

    name = "cuda.rows"
    patterns = (ROWS, CACHE)

    @dataclass(frozen=True)
    class Params:
        """warps: of a block that has one row without heads."""

        warps: int = within(16, 1, 32)

    @staticmethod
    def refuse(plan: Plan, group: Group, params: Any) -> str | None:
        return refuse_packed(plan, group) or refuse_rows(plan, group.nodes, sinks_of(plan, group, group.nodes))

    @staticmethod
    def emit(env, group: Group, params: Any) -> None:
        emit_rows(env, group.nodes, sinks_of(env.plan, group, group.nodes), warps=params.warps)


@kernel
class LinearPlain(Kernel):
    """Projections of any shape and dtype, a warp a weight row; the prologue by rows before it."""

    name = "cuda.linear_plain"
    patterns = ("project", "gated")

    @dataclass(frozen=True)
    class Params:
        """blocks_per_processor: that stay and take column after column. warps: of the prologue's blocks."""

        blocks_per_processor: int = within(4, 1, 16)
        warps: int = within(16, 1, 32)

    @staticmethod
    def refuse(plan: Plan, group: Group, params: Any) -> str | None:
        return refuse_quantised(plan, group) or refuse_prologue(plan, group) or refuse_epilogue(plan, group)

    @staticmethod
    def scratch(plan: Plan, group: Group, params: Any) -> tuple[Scratch, ...]:
        return prologue_scratch(plan, group)

    @staticmethod
    def emit(env, group: Group, params: Any) -> None:
        emit_prologue(env, group, params.warps)
        x = env.flat(group.anchors[0].inputs[0])
        emit_plain(env, x, projections_of(env, group, words=False), blocks_per_processor=params.blocks_per_processor)


@kernel
class Top1Plain(Kernel):
    """lm_head, top-1 and log-probability of any shape and dtype; logits are reduced where they arise."""

    name = "cuda.top1_plain"
    patterns = ("head",)

    @dataclass(frozen=True)
    class Params:
        """blocks_per_processor: that stay and take column after column. warps: of the prologue's blocks."""

        blocks_per_processor: int = within(2, 1, 16)
        warps: int = within(16, 1, 32)

    @staticmethod
    def refuse(plan: Plan, group: Group, params: Any) -> str | None:
        return refuse_quantised(plan, group) or refuse_prologue(plan, group) or refuse_top1(group)

    @staticmethod
    def scratch(plan: Plan, group: Group, params: Any) -> tuple[Scratch, ...]:
        columns = int(plan.circuit.types[group.anchors[0].inputs[1]].shape[0])  # type: ignore[union-attr]
        blocks = min(-(-columns // WARPS), architecture_of(plan).processors * params.blocks_per_processor)
        return (*prologue_scratch(plan, group), *partial_scratch(blocks * WARPS, plan.rows))

    @staticmethod
    def emit(env, group: Group, params: Any) -> None:
        emit_prologue(env, group, params.warps)
        (linear,) = group.anchors
        partials = partials_of(env)
        head = projection_of(env, [linear], lambda *_: None, words=False)
        emit_plain_top1(env, env.flat(linear.inputs[0]), head, logits_of(env, group), partials)
        emit_chosen(env, group, partials)


@kernel
class AttendPaged(Kernel):
    """Paged attention on tensor cores, a block a (row, KV head, part); then the sum of the parts."""

    name = "cuda.attention_paged"
    patterns = ("attend", OWN_ROW)

    @dataclass(frozen=True)
    class Params:
        """parts: blocks that share one row and KV head, 0 fills the GPU once; warps: of a block; stages: of each warp's ring.
        cluster: the parts are one cluster of at most 8 blocks, where the GPU has those, and join their sums through shared
        memory; without, a second launch joins them."""

        parts: int = within(0, 0, 64)
        warps: int = within(8, 1, 16)
        stages: int = within(2, 2, 8)
        cluster: bool = True

    @staticmethod
    def refuse(plan: Plan, group: Group, params: Any) -> str | None:
        heads, dim, kv_heads, dtypes = attend_facts(plan, group)
        if len(dtypes) > 1 or "f32" in dtypes:
            return f"needs queries and cache in bf16 or f16, both the same, got {', '.join(sorted(dtypes))}"
        if dim not in (64, 128, 256):
            return f"head size {dim}"
        if group.pattern == OWN_ROW and (reason := refuse_own_row(plan, group)):
            return reason
        cut = groups_of(heads, kv_heads)
        if cut is None:
            return f"{heads} query heads over {kv_heads}"
        used = shared_bytes(dim, cut[1], *AttendPaged.cut(plan, group, params), own=group.pattern == OWN_ROW)
        if used > architecture_of(plan).shared_bytes:
            return f"needs {used} B of shared memory"
        parts = AttendPaged.parts(plan, group, params)
        if AttendPaged.joins(plan, params) and parts > CLUSTER:
            return f"a cluster has at most {CLUSTER} blocks, got {parts} parts"
        return refuse_attend(plan, group, parts)

    @staticmethod
    def joins(plan: Plan, params: Any) -> bool:
        """Is there a cluster, where the GPU has them?"""
        return params.cluster and architecture_of(plan).clusters

    @staticmethod
    def cut(plan: Plan, group: Group, params: Any) -> tuple[int, int]:
        """(warps, stages): fewer stages, then fewer warps, where shared memory is small."""
        heads, dim, kv_heads, _ = attend_facts(plan, group)
        cuts = [(params.warps, stages) for stages in range(params.stages, 1, -1)]
        cuts += [(params.warps >> shift, 2) for shift in range(1, 3) if params.warps >> shift]
        _, members = groups_of(heads, kv_heads) or (1, heads // kv_heads)
        return fitting(plan, cuts, lambda cut: shared_bytes(dim, members, *cut, own=group.pattern == OWN_ROW))

    @staticmethod
    def parts(plan: Plan, group: Group, params: Any) -> int:
        most = CLUSTER if AttendPaged.joins(plan, params) else 32
        heads, _, kv_heads, _ = attend_facts(plan, group)
        groups, _ = groups_of(heads, kv_heads) or (1, 0)
        pairs = plan.rows * kv_heads * groups
        share = architecture_of(plan).processors / pairs
        parts = params.parts or max(1, min(most, 1 << round(math.log2(max(share, 1)))))
        if AttendPaged.joins(plan, params) and not params.parts:
            return next(fewer for fewer in range(parts, 0, -1) if at_once(pairs, fewer))
        return parts

    @staticmethod
    def scratch(plan: Plan, group: Group, params: Any) -> tuple[Scratch, ...]:
        return () if AttendPaged.joins(plan, params) else attend_scratch(plan, group, AttendPaged.parts(plan, group, params))

    @staticmethod
    def emit(env, group: Group, params: Any) -> None:
        q = group.anchors[0].inputs[0]
        own = group.pattern == OWN_ROW
        joins = AttendPaged.joins(env.plan, params)
        query = query_of(env, group, AttendPaged.parts(env.plan, group, params), joined=joins)
        warps, stages = AttendPaged.cut(env.plan, group, params)
        kind = env.plan.circuit.types[q].dtype
        words, made = (None, OwnRow(env, group, kind)) if own else (env.words(q), None)
        attention = PagedAttention(env, query, words, kind, warps=warps, stages=stages, own=made)
        if joins:
            attention.emit(attend_end_of_some(env, group, query))
        else:
            attention.emit()
            emit_combine(env, query, attend_end(env, group, query))


@kernel
class Attend(Kernel):
    """Paged attention of any head size, dtype and block size, a warp a (row, head, part); then the sum of the parts."""

    name = "cuda.attention_plain"
    patterns = ("attend",)

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
        query = query_of(env, group, params.parts)
        emit_plain_attention(env, query)
        emit_combine(env, query, attend_end(env, group, query))
