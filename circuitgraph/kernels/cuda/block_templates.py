"""The template for attention of blocks (see block_attention.py)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ...plan.ir import Group, Plan
from ..base import Kernel, kernel, within
from .architectures import CLUSTERS_OF_HALVES, architecture_of, at_once, fitting
from .block_attention import TILE, BlockAttention, keeps_queries, shared_bytes, warps_of
from .paged import CLUSTER
from .shared import attend_end_of_some, attend_facts, query_of, refuse_attend


@kernel
class AttendBlocks(Kernel):
    """Paged attention of an entry of blocks on tensor cores: a cluster for each block of rows and KV head, which reads the cache
    once for all of them."""

    name = "cuda.attention_blocks"
    patterns = ("attend",)

    @dataclass(frozen=True)
    class Params:
        """parts: thread blocks of a cluster, which share the context; 0: as many as run at once. stages: of the ring, at most."""

        parts: int = within(0, 0, CLUSTER)
        stages: int = within(3, 2, 4)

    @staticmethod
    def refuse(plan: Plan, group: Group, params: Any) -> str | None:
        arch = architecture_of(plan)
        if not arch.warpgroups:
            return f"made for clusters of sm_90a, got {arch.name}"
        if plan.circuit.entry(plan.entry).rows != "block":
            return "for entries of blocks, whose rows are of one sequence"
        heads, dim, kv_heads, dtypes = attend_facts(plan, group)
        if len(dtypes) > 1 or "f32" in dtypes:
            return f"needs queries and cache in bf16 or f16, both the same, got {', '.join(sorted(dtypes))}"
        block = plan.circuit.block_size
        if dim != 128 and not keeps_queries(dim, block, heads // kv_heads):
            return f"head size {dim}"
        if heads % kv_heads or block > 32 or (block * heads // kv_heads) % 16:
            return f"{heads} query heads over {kv_heads}, of blocks of {block} rows"
        if warps_of(block, heads // kv_heads) not in (2, 4, 8, 16):
            return f"{warps_of(block, heads // kv_heads)} warps do not split tiles of {TILE} cache rows"
        parts = AttendBlocks.parts(plan, group, params)
        used = shared_bytes(dim, block, heads // kv_heads, AttendBlocks.stages(plan, group, params))
        if used > arch.shared_bytes:
            return f"needs {used} B of shared memory"
        return refuse_attend(plan, group, parts)

    @staticmethod
    def stages(plan: Plan, group: Group, params: Any) -> int:
        heads, dim, kv_heads, _ = attend_facts(plan, group)
        sizes = (dim, plan.circuit.block_size, heads // kv_heads)
        return fitting(plan, list(range(params.stages, 1, -1)), lambda stages: shared_bytes(*sizes, stages))

    @staticmethod
    def parts(plan: Plan, group: Group, params: Any) -> int:
        """As many as run at once: two thread blocks a processor of up to four warps, whose registers leave room for no more."""
        heads, _, kv_heads, _ = attend_facts(plan, group)
        clusters = -(-plan.rows // plan.circuit.block_size) * kv_heads
        if params.parts:
            return params.parts
        if warps_of(plan.circuit.block_size, heads // kv_heads) <= 4:
            return next((parts for parts, fit in CLUSTERS_OF_HALVES.items() if clusters <= fit), 1)
        processors = architecture_of(plan).processors
        return next((p for p in range(CLUSTER, 1, -1) if clusters * p <= processors and at_once(clusters, p)), 1)

    @staticmethod
    def emit(env, group: Group, params: Any) -> None:
        q = group.anchors[0].inputs[0]
        query = query_of(env, group, AttendBlocks.parts(env.plan, group, params), joined=True)
        kind, stages = env.plan.circuit.types[q].dtype, AttendBlocks.stages(env.plan, group, params)
        block = env.plan.circuit.block_size
        BlockAttention(env, query, env.words(q), kind, block=block, stages=stages).emit(attend_end_of_some(env, group, query))
