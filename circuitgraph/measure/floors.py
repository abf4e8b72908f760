"""What one step has to move and to multiply, counted from its circuit and from the routes of the run."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from ..circuit.ir import Circuit
from ..circuit.narrow import slice_entry, specialize
from ..circuit.types import StateType
from ..ops import TABLE
from ..ops.cache import Sight


def step_bytes(
    circuit: Circuit,
    weights: Mapping[str, torch.Tensor],
    n: int,
    context: int,
    experts: Mapping[str, int] | None = None,
    *,
    block: int = 1,
) -> int:
    """Every weight once (of an embedding n rows), the cache rows of each sequence, which has `block` of the step's n rows, and
    the new ones.

    experts: how many of a stack of experts have rows, by the weight's name; the others are not read.
    """
    gathered = {node.inputs[1] for node in circuit.nodes if node.op == "embed"}
    projected = {name for node in circuit.nodes if node.op != "embed" for name in node.inputs}
    moved = 0
    counted = set()
    for weight in circuit.weights:
        tensor = weights[weight.name]
        if weight.storage is not None:
            moved += _part(circuit.stored_bytes(weight.name), tensor, (experts or {}).get(weight.name))
        elif weight.name in gathered and weight.name not in projected:
            moved += n * tensor.shape[-1] * tensor.element_size()
        elif tensor.data_ptr() not in counted:
            counted.add(tensor.data_ptr())
            moved += _part(tensor.nbytes, tensor, (experts or {}).get(weight.name))
    for state in circuit.states:
        attending = [node for node in circuit.nodes if StateType(state.name) in (circuit.types[name] for name in node.inputs)]
        read = [Sight.of(node.attr).read(context) for node in attending if node.op in ("attention", "latent_attention")]
        moved += state.bytes_per_row() * n + state.bytes_per_row() // state.layers * (n // block) * sum(read)
    return moved


def step_flops(circuit: Circuit, entry: str, n: int, context: int, *, block: int = 1) -> int:
    """Operations of a step of n rows, each of which attends to `context` cache rows and its block; two for a product and its
    sum. Experts count for the rows that they have, which is what a row chooses, whichever they are."""
    step = specialize(slice_entry(circuit, entry), n)
    total = 0
    for node in step.nodes:
        made = [value.type for value in node.outputs]
        total += TABLE[node.op].flops([step.types[name] for name in node.inputs], made, node.attr, context + block)
    return total


def _part(whole: int, stack: torch.Tensor, count: int | None) -> int:
    """Bytes of so many of a stack's matrices; of all of a weight that is no stack of experts."""
    return whole if count is None else whole // len(stack) * count
