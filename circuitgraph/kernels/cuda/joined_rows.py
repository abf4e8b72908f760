"""Nodes after products in parts, in the launch that adds the parts: it has whole rows, or whole heads, so norms, RoPE and append
are no launches of their own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ...plan.fuse import QKV
from ...plan.ir import Group, Plan
from .row_program import Place, emit_rows, refuse_rows, sinks_of
from .values import hold, load

WARPS, BLOCKS = 16, 2
"""Of a block that joins a row, and of the cluster that shares one: a thread has few columns, of many parts."""


def warps_of(columns: int) -> int:
    """Of a block: so many that every thread has as many columns, if there are."""
    return next((warps for warps in (WARPS, WARPS // 2, WARPS // 4) if columns % (warps * 32 * BLOCKS) == 0), WARPS)


def refuse_joined_rows(plan: Plan, group: Group) -> str | None:
    """Why what follows the products cannot be done by rows, or None."""
    sinks, made = sinks_of(plan, group, (*group.anchors, *group.epilogue)), {node.name: node for node in group.epilogue}
    if anchors := [name for name in sinks if name not in made]:
        return f"stores what follows the products alone, got {', '.join(anchors)}"
    if group.pattern == QKV and (others := [name for name in sinks if made[name].op != "rope"]):
        return f"stores rotated queries alone, got {', '.join(others)}"
    positions = {node.inputs[1] for node in group.epilogue if node.op == "rope"}
    if positions - {item.name for item in plan.circuit.inputs}:
        return "rotates at positions that are given"  # others have a launch of their own, as the whole end would have
    return refuse_rows(plan, group.epilogue, sinks)


def emit_joined_rows(env: Any, group: Group, joined: Callable[[int, Any, Any], Any]) -> None:
    """joined(which product, row, column): its sum, of all parts."""

    def known(number: int, bias: Any) -> Callable[[Place], Any]:
        def value(place: Place) -> Any:
            total = joined(number, place.row, place.column)
            return total if bias is None else hold(total + load(bias, [place.column], constant=True))

        return value

    biases = [env.buffer(anchor.inputs[2]) if len(anchor.inputs) == 3 else None for anchor in group.anchors]
    sums = {anchor.name: known(number, bias) for number, (anchor, bias) in enumerate(zip(group.anchors, biases, strict=True))}
    sinks = sinks_of(env.plan, group, group.epilogue)
    warps = warps_of(int(env.plan.circuit.types[group.anchors[0].name].shape[1]))
    emit_rows(env, group.epilogue, sinks, warps=warps, known=sums, together=BLOCKS)
