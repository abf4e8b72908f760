"""Templates for skinny products on tensor cores (see stream.py): what they accept, and how a group maps to launches."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from ...circuit.ir import FOUR_BIT, Node
from ...circuit.types import TensorType
from ...plan.fuse import CACHE, OWN_ROW, QKV
from ...plan.ir import Group, Plan, Scratch
from ..base import Kernel, kernel, meeting, within
from .architectures import ARCHITECTURES, DEFAULT, architecture_of, fitting
from .epilogue import refuse_epilogue
from .formats import Format
from .joined_stream import JoinedStream
from .plain import Projection
from .qkv import HeadEnds, ends_of, refuse_ends
from .row_program import Evaluator, Place, sinks_of
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
from .stream import PACE, Early, Geometry, Norm, Stream, emit_add_parts, geometry, tiles_of
from .stream_scales import StepScales
from .values import store

TEAM_STAGES = 5
"""Of the ring of a warp in a team: 0.3 to 1.2 us of 150 faster on an H200 than four."""


JOINED_ROWS = range(2, 9)
"""Rows of x for which pairs of blocks share a tile's columns: in a step of an 8B head eight gain 10 us, four 5, two 2; one
loses 4."""


@dataclass(frozen=True)
class StreamParams:
    """warps: of a block; stages: of the ring, about; k_parts: parts of the columns over blocks, 0 for the fewest that fit;
    registers: of a thread for x; fold_norm: apply an RMSNorm inside instead of in a launch of its own; teams: that the warps are
    parted into at most where weights have four bits; pace: stages that are under way at most while a ring is filled,
    but for pairs of blocks (`joined_stream`)."""

    warps: int = within(16, 1, 16)
    stages: int = within(8, 4, 16)
    k_parts: int = within(0, 0, 16)
    registers: int = within(96, 4, 160)
    fold_norm: bool = True
    teams: int = within(4, 1, 4)
    pace: int = within(PACE, 1, 16)


def cut_of(plan: Plan, group: Group, params: StreamParams) -> Geometry | str:
    types = plan.circuit.types
    columns = int(types[group.anchors[0].inputs[0]].shape[1])  # type: ignore[union-attr]
    anchors = together_in(group)
    heights = [int(types[together[0].inputs[1]].shape[0]) for together in anchors]  # type: ignore[union-attr]

    def work(groups: int, parts: int, teams: int = 1) -> float:
        """Row groups that the busiest team takes, for tiles of so many groups, and so many parts of the columns."""
        tiles = [tiles_of(height, 16 // len(anchors[0]), groups) for height in heights]
        takers = architecture_of(plan).processors // parts * teams
        return math.inf if None in tiles else -(-sum(count or 0 for count in tiles) // takers) * groups

    format = format_of(plan, group)

    def cut(warps: int, stages: int) -> Geometry | str:
        return geometry(plan.rows, columns, warps, stages, params.k_parts, params.registers, work, format)

    if format.storage is None:
        cuts = [cut(warps, n) for warps in (params.warps, -(-params.warps // 2)) for n in range(params.stages, 3, -1)]
        sizes = [one for one in cuts if isinstance(one, Geometry)]
        return cuts[0] if isinstance(cuts[0], str) else fitting(plan, sizes, lambda one: one.shared_bytes)
    # A step of so many columns divides fewer numbers of them: then fewer warps have longer rings.
    tried = [(params.warps // less, params.stages * less) for less in (1, 2, 4) if params.warps % less == 0]
    cuts = [cut(warps, n) for warps, stages in tried for n in range(min(stages, 16), 3, -1)]
    found = [one for one in cuts if isinstance(one, Geometry)]
    if format.name in FOUR_BIT and params.k_parts < 2:
        pairs = [] if params.k_parts else joined(plan, group, columns, params, work, format)
        found = [*pairs, *parted(plan.rows, columns, params, work, format), *found]
    sizes = [one for some in found for one in shared_together(some, 16 // len(anchors[0]))]
    if architecture_of(plan) is not ARCHITECTURES[DEFAULT]:  # which may have no room for padding
        sizes = [way for one in sizes for way in ((one, replace(one, padded=False)) if one.teams > 1 else (one,))]
    sizes = [one for one in sizes if one.shared_bytes <= ARCHITECTURES[DEFAULT].shared_bytes]
    return fitting(plan, sizes, lambda one: one.shared_bytes) if sizes else str(cuts[0])


def together_in(group: Group) -> list[tuple[Node, ...]]:
    """Products whose weights share a tile. Keys and values meet in the cache alone."""
    return [(anchor,) for anchor in group.anchors] if group.pattern == QKV else [anchors for anchors, _ in meeting(group)]


def parted(rows: int, columns: int, params: StreamParams, work: Callable[..., float], format: Format) -> list[Geometry]:
    """Cuts whose warps are parted into teams, most of them first, as long as no warp has more steps for it.

    work: see `cut_of`.
    """
    cuts = []
    for teams in range(params.teams, 0, -1):
        of_teams, warps = partial(work, teams=teams), params.warps // teams
        cut = geometry(rows, columns, warps, TEAM_STAGES, 1, params.registers * teams, of_teams, format)
        if params.warps % teams == 0 and isinstance(cut, Geometry) and cut.steps % teams == 0 and rows * 16 <= warps * 32:
            cuts.append(replace(cut, teams=teams))
    steps = [work(cut.groups, 1, teams=cut.teams) * cut.steps for cut in cuts]
    return [cut for cut, count in zip(cuts, steps, strict=True) if cut.teams > 1 and count == min(steps)]


def joined(
    plan: Plan, group: Group, columns: int, params: StreamParams, work: Callable[..., float], format: Format
) -> list[Geometry]:
    """Cuts whose tiles are those of pairs of blocks, where a team has one at most. A norm that may be folded in wants whole rows.

    work: see `cut_of`.
    """
    may_fold, products = len(group.prologue) == 1, group.pattern in ("project", "gated")
    if plan.rows not in JOINED_ROWS or may_fold or not products or not architecture_of(plan).clusters:
        return []
    cuts = []
    for teams in (4, 2):
        of_teams, warps = partial(work, teams=teams), params.warps // teams
        if teams > params.teams or params.warps % teams or plan.rows * 16 > warps * 32 or work(1, 2, teams=teams) > 1:
            continue
        cut = geometry(plan.rows, columns, warps, TEAM_STAGES, 2, params.registers * teams, of_teams, format, tiles_ahead=1)
        if isinstance(cut, Geometry) and cut.groups == 1 and cut.steps % teams == 0:
            cuts.append(replace(cut, teams=teams, joined=True))
    return cuts


def shared_together(cut: Geometry, width: int) -> list[Geometry]:
    """The cut with as many row groups shared together as half of the threads can finish, and with fewer: in a group of
    quantised weights there is little to do between two barriers, and the other warps go on."""
    fits = [n for n in (8, 4, 2) if cut.groups % n == 0 and cut.steps * n <= 8 and cut.rows * width * n <= cut.warps * 16]
    return [replace(cut, together=n) for n in (*fits, 1)]


def refuse_stream(plan: Plan, group: Group, params: StreamParams) -> str | None:
    """Why the tensor cores cannot take this group's products, or None."""
    types = plan.circuit.types
    reason = refuse_quantised(plan, group) or refuse_dtypes(plan, group) or refuse_prologue(plan, group)
    if reason or (group.pattern != QKV and (reason := refuse_meeting(group))):
        return reason
    format = format_of(plan, group)
    cut = format.refuse() or cut_of(plan, group, params)
    if isinstance(cut, str):
        return cut
    width = 16 // len(together_in(group)[0])
    for anchor in group.anchors:
        if tiles_of(int(types[anchor.inputs[1]].shape[0]), width, cut.groups) is None:  # type: ignore[union-attr]
            return f"{types[anchor.inputs[1]].shape[0]} weight rows do not split into tiles of {width * cut.groups}"  # type: ignore[union-attr]
    if format.scaled == "sums" and refuse_blocks(format, cut, width):
        return refuse_blocks(format, cut, width)
    if cut.rows * width > cut.warps * 32:
        return f"{cut.rows} rows need {cut.rows * width} finishing threads"
    if cut.shared_bytes > architecture_of(plan).shared_bytes:
        return f"needs {cut.shared_bytes} B of shared memory"
    return None


def refuse_blocks(format: Format, cut: Geometry, width: int) -> str | None:
    """Why a step and tile do not lie in one block that shares a scale, or None."""
    assert format.storage is not None
    high = format.storage.block[0]
    if format.scale_columns % cut.step:
        return f"scales of {format.storage} change within a step of {cut.step} columns"
    if cut.steps > StepScales.STEPS:
        return f"{cut.steps} steps of a warp have more scales than {StepScales.STEPS}"
    if high % (width * cut.groups):
        return f"scales of {format.storage} change within a tile of {width * cut.groups} weight rows"
    return None


def folded_norm(plan: Plan, group: Group, params: StreamParams) -> Node | None:
    """The norm that the products can take in: the whole prologue, and of the activations' dtype."""
    cut = cut_of(plan, group, params)
    if not params.fold_norm or len(group.prologue) != 1 or isinstance(cut, str) or cut.k_parts > 1:
        return None
    (node,) = group.prologue
    types = plan.circuit.types
    whole = node.op == "rms_norm" and node.name == group.anchors[0].inputs[0]
    return node if whole and len({types[name].dtype for name in (node.name, *node.inputs)}) == 1 else None  # type: ignore[union-attr]


def norm_of(env: Any, node: Node, stored: bool) -> Norm:
    """stored: the normed rows are written, too."""

    def finish(row, column, inverse):
        evaluator = Evaluator(env, (node,))
        evaluator.prepared[node.name] = inverse
        store(env.flat(node.name), [row, column], evaluator.at(node.name, Place(row, 0, column)))

    return Norm(
        env.words(node.inputs[1]), float(node.attr["eps"]), node.attr["flavour"] == "zero_centred", finish if stored else None
    )


def stream_of(env: Any, group: Group, params: StreamParams, projections: list[Projection], early: Early | None = None) -> Stream:
    """Emits the prologue where it is a launch of its own."""
    cut = cut_of(env.plan, group, params)
    assert isinstance(cut, Geometry)
    node = folded_norm(env.plan, group, params)
    if node is None:
        emit_prologue(env, group, PROLOGUE_WARPS)
    source = group.anchors[0].inputs[0] if node is None else node.inputs[0]
    kind = env.plan.circuit.types[source].dtype
    norm = norm_of(env, node, bool(sinks_of(env.plan, group, (node,)))) if node else None
    stream = JoinedStream if cut.joined else Stream
    return stream(env, cut, env.words(source), kind, projections, norm, early, params.pace)


def appends_next(plan: Plan, group: Group) -> bool:
    """Does the group after this one write cache rows, which attention after it will ask for?"""
    index = plan.groups.index(group) + 1
    return index < len(plan.groups) and plan.groups[index].pattern in (CACHE, OWN_ROW)


@kernel
class LinearStream(Kernel):
    """Projections of few rows in bf16 or f16: weights, quantised ones as they are stored, streamed once through tensor cores,
    norm and epilogue inside."""

    name = "cuda.linear_stream"
    patterns = ("project", "gated")
    Params = StreamParams

    @staticmethod
    def refuse(plan: Plan, group: Group, params: Any) -> str | None:
        return refuse_epilogue(plan, group) or refuse_stream(plan, group, params)

    @staticmethod
    def scratch(plan: Plan, group: Group, params: Any) -> tuple[Scratch, ...]:
        cut = cut_of(plan, group, params)
        assert isinstance(cut, Geometry)
        own = () if folded_norm(plan, group, params) else prologue_scratch(plan, group)
        if cut.k_parts == 1 or cut.joined:
            return own
        columns = sum(int(plan.circuit.types[anchor.inputs[1]].shape[0]) for anchor in group.anchors)  # type: ignore[union-attr]
        return (*own, Scratch.own("partial", TensorType("f32", (cut.k_parts * plan.rows, columns))))

    @staticmethod
    def emit(env, group: Group, params: Any) -> None:
        projections = projections_of(env, group)
        stream = stream_of(env, group, params, projections)
        if stream.cut.k_parts == 1 or stream.cut.joined:
            stream.emit(settles=appends_next(env.plan, group))
        else:
            partial = env.scratch("partial")
            stream.emit(partial=partial)
            emit_add_parts(env, stream.cut, projections, partial)


@kernel
class QkvStream(Kernel):
    """Queries, keys and values of few rows in bf16 or f16, as `LinearStream`: a thread finishes both columns of a rotated pair.
    Queries are stored rotated; keys and values go to the cache."""

    name = "cuda.qkv_stream"
    patterns = (QKV,)
    Params = StreamParams

    @staticmethod
    def refuse(plan: Plan, group: Group, params: Any) -> str | None:
        if reason := refuse_stream(plan, group, params):
            return reason
        cut = cut_of(plan, group, params)
        assert isinstance(cut, Geometry)
        if cut.k_parts > 1 or format_of(plan, group).storage:
            return "ends whole sums of plain weights"
        return refuse_ends(plan, group, 8 * cut.groups)

    @staticmethod
    def scratch(plan: Plan, group: Group, params: Any) -> tuple[Scratch, ...]:
        return () if folded_norm(plan, group, params) else prologue_scratch(plan, group)

    @staticmethod
    def emit(env, group: Group, params: Any) -> None:
        ends = ends_of(env.plan, group)
        assert not isinstance(ends, str)
        projections = [replace(projection_of(env, [end.anchor], lambda *_: None), pairs=end.pairs) for end in ends]
        sequences = env.plan.circuit.entry(env.plan.entry).rows == "sequences"
        stream_of(env, group, params, projections, HeadEnds(env, ends)).emit(settles=sequences)


@kernel
class Top1Stream(Kernel):
    """lm_head, quantised or not, top-1 and log-probability of few rows in bf16 or f16; a block keeps the best of its columns."""

    name = "cuda.top1_stream"
    patterns = ("head",)
    Params = StreamParams

    @staticmethod
    def refuse(plan: Plan, group: Group, params: Any) -> str | None:
        reason = refuse_top1(group) or refuse_stream(plan, group, params)
        cut = cut_of(plan, group, params)
        if reason is None and isinstance(cut, Geometry) and cut.k_parts > 1:
            return "a logit in parts cannot be reduced where it arises"
        return reason

    @staticmethod
    def scratch(plan: Plan, group: Group, params: Any) -> tuple[Scratch, ...]:
        own = () if folded_norm(plan, group, params) else prologue_scratch(plan, group)
        return (*own, *partial_scratch(architecture_of(plan).processors, plan.rows))

    @staticmethod
    def emit(env, group: Group, params: Any) -> None:
        (linear,) = group.anchors
        stream = stream_of(env, group, params, [projection_of(env, [linear], lambda *_: None)])
        partials = partials_of(env)
        stream.emit(best=partials, logits=logits_of(env, group))
        emit_chosen(env, group, partials)
