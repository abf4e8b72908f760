"""Random weights for a circuit without a checkpoint: seeded by name, and scaled so that activations stay near 1."""

from __future__ import annotations

import math
import zlib

import torch

from ..circuit.ir import Circuit, Weight
from ..ops.base import TORCH_DTYPES


def seeded(weight: Weight, seed: int) -> torch.Generator:
    """What one weight is made from: depends on `seed` and its name, on nothing else."""
    return torch.Generator().manual_seed(zlib.crc32(f"{seed}:{weight.name}".encode()))


def random_weight(circuit: Circuit, weight: Weight, generator: torch.Generator) -> torch.Tensor:
    """One weight in its circuit's dtype."""
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


def random_packed(weight: Weight, generator: torch.Generator) -> list[torch.Tensor]:
    """The tensors of a quantised weight, on the generator's device: any bytes that are numbers, scaled as a plain matrix is.

    Scales vary by half, so that one that is applied to the wrong block shows.
    """
    storage, device = weight.storage, generator.device
    assert storage is not None
    values, scales, *whole = ([int(dim) for dim in value.type.shape] for value in weight.tensors())  # type: ignore[union-attr]
    made = torch.randint(0, 256, values, generator=generator, dtype=torch.uint8, device=device)
    if storage.format == "fp8":
        made -= (made & 127 == 127).to(torch.uint8)  # the two that are NaN; in place, also in stacks of gigabytes
    elif storage.format == "int8":
        made[made == 128] = 127  # -128 is no number of a symmetric format
    aim = _scale(weight) / ROOT_MEAN_SQUARE[storage.format]
    if storage.format == "mxfp4":
        exponent = round(math.log2(aim))
        shared = torch.randint(126 + exponent, 128 + exponent, scales, generator=generator, dtype=torch.uint8, device=device)
        return [made, shared]
    shared = torch.empty(scales, device=device).uniform_(0.75, 1.25, generator=generator)
    if storage.format == "nvfp4":
        shared = shared.to(torch.float8_e4m3fn).view(torch.uint8)
    else:
        shared *= aim
    return [made, shared, *(torch.full(shape, aim, device=device) for shape in whole)]


ROOT_MEAN_SQUARE = {"fp8": 100.1, "int8": 73.6, "nvfp4": 2.93, "mxfp4": 2.93}
"""Of all numbers of a format, each as likely."""
