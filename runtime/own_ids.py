"""Vocabularies of a drafter's own: which token of the target's each of its ids is (EAGLE-3's `d2t`, as offsets)."""

from __future__ import annotations

import torch

from circuitgraph.circuit.ir import Circuit
from circuitgraph.errors import Fault

BITS = 32
"""Tokens that one word of a mask stands for."""


def map_of(circuit: Circuit) -> str | None:
    """The weight that maps the circuit's own ids to the target's, None where they are the target's."""
    return next((node.inputs[1] for node in circuit.nodes if node.op == "target_ids"), None)


def target_ids(offsets: torch.Tensor) -> torch.Tensor:
    """int64[V]: the target's id of each own id."""
    return torch.arange(len(offsets), device=offsets.device) + offsets


def fault_of(circuit: Circuit, name: str, offsets: torch.Tensor) -> Fault | None:
    """What is wrong with a map: each own id is a token of the target's. Its values are read once, at load."""
    embed = next(node for node in circuit.nodes if node.op == "embed")
    vocab = int(circuit.types[embed.inputs[1]].shape[0])  # type: ignore[union-attr]
    ids = target_ids(offsets.cpu().long())
    outside = ((ids < 0) | (ids >= vocab)).nonzero()
    if len(outside):
        own = int(outside[0])
        got = f"own id {own} with offset {int(offsets[own])} is {int(ids[own])}; {len(outside)} of {len(ids)} are out of range"
        hint = "The map belongs to another target, or holds ids instead of offsets."
        message, expected = "leads out of the target's vocabulary", f"ids 0..{vocab - 1}"
        return Fault(message, where=circuit.name, subject=name, expected=expected, got=got, hint=hint)
    return None


def narrowed(allowed: torch.Tensor, offsets: torch.Tensor, words: int) -> torch.Tensor:
    """A mask in the target's ids, int32[n, mask_words], as one in own ids, int32[n, words]."""
    ids = target_ids(offsets)
    bits = (allowed[:, ids // BITS] >> (ids % BITS).to(torch.int32)) & 1
    bits = torch.nn.functional.pad(bits, (0, words * BITS - len(ids))).unflatten(1, (words, BITS)).long()
    packed = (bits << torch.arange(BITS, device=bits.device)).sum(-1)
    return torch.where(packed < 2**31, packed, packed - 2**32).to(torch.int32)
