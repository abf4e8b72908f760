"""What a matrix product does with its sums before anything reaches memory: bias, residual, gate, activation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ...circuit.ir import Node
from ...plan.ir import VIEWS, Group, Plan
from ..base import meeting
from .row_program import ELEMENTWISE, sinks_of
from .values import hold, load, store

OPS = {**ELEMENTWISE, "scale_rows": ELEMENTWISE["mul"]}
"""The factor of `scale_rows` is made outside: the fusing rule sees to that."""


class Epilogue:
    """Evaluates the nodes after some anchors for one element, and stores what others read.

    Called as finish(row, column, sums) with one fp32 sum for each anchor.
    """

    ops = OPS

    def __init__(self, env: Any, group: Group, anchors: Sequence[Node], nodes: Sequence[Node]):
        self.anchors, self.nodes = anchors, nodes
        made = {value.name for node in group.nodes for value in node.outputs}
        self.biases = [env.buffer(anchor.inputs[2]) if len(anchor.inputs) == 3 else None for anchor in anchors]
        self.outside = {name: env.flat(name) for node in nodes for name in node.inputs if name not in made}
        self.targets = {name: env.flat(name) for name in sinks_of(env.plan, group, (*anchors, *nodes))}

    def __call__(self, row: Any, column: Any, sums: list[Any]) -> None:
        values: dict[str, Any] = {}
        for anchor, bias, total in zip(self.anchors, self.biases, sums, strict=True):
            self._keep(values, anchor, row, column, total if bias is None else total + load(bias, [column], constant=True))
        for node in self.nodes:
            operands = [values[n] if n in values else self._fetch(node, n, row, column) for n in node.inputs]
            self._keep(values, node, row, column, operands[0] if node.op in VIEWS else self.ops[node.op](*operands))

    def _fetch(self, node: Node, name: str, row: Any, column: Any) -> Any:
        factor = node.op == "scale_rows" and name == node.inputs[1]
        return load(self.outside[name], [row, 0 if factor else column])

    def _keep(self, values: dict[str, Any], node: Node, row: Any, column: Any, value: Any) -> None:
        values[node.name] = hold(value)
        if node.name in self.targets and node.op not in VIEWS:
            self._put(self.targets[node.name], row, column, values[node.name])

    def _put(self, target: Any, row: Any, column: Any, value: Any) -> None:
        store(target, [row, column], value)


def refuse_ops(group: Group) -> str | None:
    """Why `Epilogue` has no form of what comes after the anchors, or None."""
    foreign = sorted({node.op for node in group.epilogue} - {*OPS, *VIEWS})
    return f"no form of {', '.join(foreign)} in the epilogue" if foreign else None


def refuse_epilogue(plan: Plan, group: Group) -> str | None:
    """Why `Epilogue` cannot evaluate what comes after the products of a group, or None."""
    if reason := refuse_ops(group):
        return reason
    for anchors, _ in meeting(group):
        shapes = {plan.circuit.types[anchor.inputs[1]].shape for anchor in anchors}  # type: ignore[union-attr]
        if len(shapes) > 1:
            return f"weights that meet in one epilogue have different shapes {sorted(shapes)}"
    return None
