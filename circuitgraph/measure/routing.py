"""Rows whose experts are beyond doubt. Where two experts are as good, another rounding takes the other one, and nothing after
it is comparable: neither is wrong."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch

from ..circuit.ir import Circuit
from ..interpreter import interpret
from ..ops import PagedKV
from ..ops.moe import Route

ROUNDING = {"f32": 1e-4, "f16": 5e-3, "bf16": 3e-2}
"""What rounding may change a logit of a router by, generously, in standard deviations of a row's logits."""


def sure_rows(
    circuit: Circuit,
    inputs: Mapping[str, torch.Tensor],
    weights: Mapping[str, torch.Tensor],
    states: Mapping[str, PagedKV] | None = None,
) -> torch.Tensor:
    """bool[n]: which rows every router of the circuit sends to the same experts however its x was rounded. States are written
    in place, as by `interpret`."""
    nodes = [node for node in circuit.nodes if node.op == "route"]
    seen = _values(circuit, [node.inputs[0] for node in nodes], inputs, weights, states)
    like = next(iter(inputs.values()))
    sure = torch.ones(len(like), dtype=torch.bool, device=like.device)
    for node, x in zip(nodes, seen, strict=True):
        sure &= Route.margin([x, *(weights[name] for name in node.inputs[1:])], node.attr) > ROUNDING[circuit.act]
    return sure


def chosen_experts(
    circuit: Circuit,
    inputs: Mapping[str, torch.Tensor],
    weights: Mapping[str, torch.Tensor],
    states: Mapping[str, PagedKV] | None = None,
) -> dict[str, int]:
    """How many experts each stack of them has rows for, by the name of each weight of a stack."""
    nodes = [node for node in circuit.nodes if node.op == "experts"]
    seen = _values(circuit, [node.inputs[1] for node in nodes], inputs, weights, states)
    counts = [len(ids.unique()) for ids in seen]
    return {name: count for node, count in zip(nodes, counts, strict=True) for name in node.inputs[3:]}


def _values(
    circuit: Circuit,
    names: list[str],
    inputs: Mapping[str, torch.Tensor],
    weights: Mapping[str, torch.Tensor],
    states: Mapping[str, PagedKV] | None,
) -> list[torch.Tensor]:
    """Interior values, as the interpreter computes them."""
    if not names:
        return []
    outputs = {f"value of {name}": name for name in names}
    whole = replace(circuit, outputs=(*circuit.outputs, *outputs.items()))
    made = interpret(whole, inputs=inputs, weights=weights, states=states, outputs=list(outputs))
    return list(made.values())
