"""The plan as stable text, with a digest: what golden files pin and `show --stage plan` prints."""

from __future__ import annotations

import hashlib
from typing import Any

from ..circuit.text import format_node
from ..ops.cache import Sight
from .ir import Group, Plan

CONTEXT_FOR_COST = 1024
"""Cache rows per sequence that the printed bytes and FLOPs assume."""


def format_groups(plan: Plan) -> str:
    """What `fuse` and `schedule` decided, group by group."""
    lines = []
    for index, group in enumerate(plan.groups):
        choice = plan.choices[index] if plan.choices else None
        head = f"{group.name} {group.pattern}"
        if choice:
            params = ", ".join(f"{name}={value}" for name, value in choice.params)
            head += f" -> {choice.kernel}({params})  [{choice.rule}]"
            cost = plan.cost(group, CONTEXT_FOR_COST)
            head += f"  {cost.bytes} B, {cost.flops} FLOP"
        lines.append(head)
        for part, nodes in (("prologue", group.prologue), ("anchor", group.anchors), ("epilogue", group.epilogue)):
            lines += [f"    {part:8} {format_node(node)} : {', '.join(str(v.type) for v in node.outputs)}" for node in nodes]
        crossing = plan.crossing(group)
        if crossing:
            lines.append(f"    makes    {', '.join(crossing)}")
    return "\n".join(lines) + "\n"


def plan_records(plan: Plan) -> list[dict[str, Any]]:
    """Why each group got its kernel, as plain data: what `explain` tells, of a program or of an artifact.

    `bytes` and `flops` are those without context; each cache row of every sequence adds `bytes_per_row`, `flops_per_row`, up to
    `most_rows` of them where the group has a sliding window.
    """
    records = []
    for group, choice in zip(plan.groups, plan.choices, strict=True):
        alone, with_row = plan.cost(group, 0), plan.cost(group, 1)
        records.append(
            {
                "group": group.name,
                "pattern": group.pattern,
                "nodes": [f"{node.name} = {node.op}" for node in group.nodes],
                "rule": choice.rule,
                "kernel": choice.kernel,
                "params": dict(choice.params),
                "refusals": [list(refusal) for refusal in choice.refusals],
                "bytes": alone.bytes,
                "flops": alone.flops,
                "bytes_per_row": with_row.bytes - alone.bytes,
                "flops_per_row": with_row.flops - alone.flops,
                **_window(group),
            }
        )
    return records


def _window(group: Group) -> dict[str, int]:
    """{most_rows: cache rows of a sequence that count at most}; empty where all do."""
    sights = [Sight.of(node.attr) for node in group.nodes if node.op == "attention"]
    most = [sight.read(sight.window + sight.block) for sight in sights if sight.window]
    return {"most_rows": max(most)} if most else {}


def format_plan(plan: Plan) -> str:
    """Groups, kernels, parameters, workspace, bytes, launches; the last line is the digest of the rest."""
    cost = [plan.cost(group, CONTEXT_FOR_COST) for group in plan.groups]
    facts = ", ".join(f"{name}={value}" for name, value in plan.circuit.facts)
    dtypes = ", ".join(f"{name}={dtype}" for name, dtype in plan.circuit.dtypes)
    lines = [
        f"plan {plan.circuit.name}.{plan.entry} rows={plan.rows} target={plan.target}",
        f"dtypes {dtypes}",
        f"facts {facts}",
        f"kernels {len(plan.groups)}",
        f"bytes {sum(item.bytes for item in cost)} (context {CONTEXT_FOR_COST})",
        f"flops {sum(item.flops for item in cost)}",
        f"workspace {plan.workspace_bytes}",
        "",
        format_groups(plan),
        "workspace offsets",
    ]
    lines += [f"    {slot.offset:>9} {slot.bytes:>9} {name}" for name, slot in plan.slots.items()]
    outputs = ", ".join(f"{public}={name}" for public, name in plan.circuit.outputs)
    lines.append(f"outputs {outputs}")
    body = "\n".join(lines) + "\n"
    return f"{body}digest {hashlib.sha256(body.encode()).hexdigest()[:16]}\n"
