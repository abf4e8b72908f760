"""Random weights for a circuit without a checkpoint: seeded by name, and scaled so that activations stay near 1."""

from __future__ import annotations

import zlib

import torch

from ..circuit.ir import Circuit, Weight
from ..ops.base import TORCH_DTYPES


def random_weight(circuit: Circuit, weight: Weight, seed: int = 0) -> torch.Tensor:
    """One weight in its circuit's dtype. Depends on `seed` and the weight's name and shape, on nothing else."""
    generator = torch.Generator().manual_seed(zlib.crc32(f"{seed}:{weight.name}".encode()))
    noise = torch.randn(weight.type.shape, generator=generator)  # type: ignore[arg-type]
    return (_shift(circuit, weight) + _scale(weight) * noise).to(TORCH_DTYPES[weight.type.dtype])


def _shift(circuit: Circuit, weight: Weight) -> float:
    """Where values lie around: norms multiply by about 1, whatever the flavour."""
    norms = [node for node in circuit.consumers(weight.name) if node.op == "rms_norm"]
    return 1.0 if any(node.attr["flavour"] == "plain" for node in norms) else 0.0


def _scale(weight: Weight) -> float:
    """Vectors vary a little; matrices keep the size of what they project. An embedding may be the lm_head too (tied)."""
    if weight.type.rank == 1:
        return 0.1
    return float(weight.type.shape[-1]) ** -0.5
