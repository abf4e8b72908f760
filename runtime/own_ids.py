"""Vocabularies of a drafter's own: which token of the target's each id is, as offsets (EAGLE-3's `d2t`, restricted heads)."""

from __future__ import annotations

import torch

from circuitgraph.circuit.ir import Circuit
from circuitgraph.errors import Fault
from circuitgraph.ops import OpContext
from circuitgraph.ops.linear import MaskedTop1, OwnMask
from circuitgraph.ops.rows import TargetIds

BITS = 32
"""Tokens that one word of a mask stands for."""


def map_of(circuit: Circuit) -> str | None:
    """The weight that maps the circuit's own ids to the target's, None where they are the target's."""
    return next((node.inputs[1] for node in circuit.nodes if node.op == "target_ids"), None)


def takes_own_masks(circuit: Circuit) -> bool:
    """Whether masks are to be brought to own ids before the program: it maps drafts, and no mask."""
    return map_of(circuit) is not None and not any(node.op == "own_mask" for node in circuit.nodes)


def fault_of(where: str, name: str, offsets: torch.Tensor, vocab: int) -> Fault | None:
    """What is wrong with a map: each own id is one of `vocab` tokens. Its values are read when a checkpoint is bound, and
    at load."""
    ids = torch.arange(len(offsets)) + offsets.cpu().long()
    outside = ((ids < 0) | (ids >= vocab)).nonzero()
    if not len(outside):
        return None
    own = int(outside[0])
    got = f"own id {own} with offset {int(offsets[own])} is {int(ids[own])}; {len(outside)} of {len(ids)} are out of range"
    hint = "The map belongs to another target, or holds ids instead of offsets."
    message, expected = "leads out of the target's vocabulary", f"ids 0..{vocab - 1}"
    return Fault(message, where=where, subject=name, expected=expected, got=got, hint=hint)


def narrowed(allowed: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    """A mask in the target's ids, int32[n, words], as one in own ids."""
    return OwnMask.reference([allowed, offsets], {}, _NO_CONTEXT)[0]


def best_allowed(scores: torch.Tensor, allowed: torch.Tensor, offsets: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    """(drafts int32[n], logprobs f32[n]) of scores [n, V] under masks; both in the target's ids, whatever those of scores."""
    if offsets is None:
        return MaskedTop1.reference([scores, allowed], {}, _NO_CONTEXT)
    own, logprobs = MaskedTop1.reference([scores, narrowed(allowed, offsets)], {}, _NO_CONTEXT)
    return TargetIds.reference([own, offsets], {}, _NO_CONTEXT)[0], logprobs


_NO_CONTEXT = OpContext("f32")
