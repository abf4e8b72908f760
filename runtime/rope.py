"""RoPE tables from the parameters that a model's config gives. Imports torch only: a serving box computes them at load."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from ..errors import Fault, RuntimeUseError

KINDS: dict[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "dynamic": ("factor",),
    "yarn": ("factor", "original_max_position_embeddings"),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
}
"""Every kind and the scaling parameters that it cannot do without."""

OPTIONAL = ("attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate")
"""Scaling parameters (all of yarn) that have defaults."""


@dataclass(frozen=True)
class RopeSpec:
    """What a table is computed from.

    dim: rotated columns of a head. max_position: the config's `max_position_embeddings`, None when it gives none.
    scaling: the parameters of `kind`, by their names in configs.
    """

    kind: str
    theta: float
    dim: int
    max_position: int | None = None
    scaling: tuple[tuple[str, float], ...] = ()

    @property
    def limit(self) -> int | None:
        """Most rows that a fixed table can have, None where any number is right.

        The `dynamic` kind changes every frequency once a sequence outgrows `max_position`, which no table can follow.
        """
        return self.max_position if self.kind == "dynamic" else None

    def to_json(self) -> dict[str, Any]:
        return {**vars(self), "scaling": dict(self.scaling)}

    @staticmethod
    def from_json(data: Mapping[str, Any]) -> RopeSpec:
        """Inverse of `to_json`."""
        return RopeSpec(**{**data, "scaling": tuple(data["scaling"].items())})


def rope_tables(spec: RopeSpec, positions: int, device: torch.device | str | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosines and sines, f32[positions, dim / 2] each; row p belongs to position p.

    Raises:
        RuntimeUseError: more positions than the kind allows, or a kind that is not known.
    """
    if spec.limit is not None and positions > spec.limit:
        raise RuntimeUseError(
            Fault(
                f"a '{spec.kind}' RoPE table cannot hold {positions} positions",
                expected=f"at most {spec.limit}",
                hint="Stop drafting at that length.",
            )
        )
    frequencies, amplitude = _frequencies(spec)
    # fp32 as in the models' own code: a more exact angle would differ from what the weights were trained with.
    angle = torch.arange(positions, dtype=torch.float32)[:, None] * frequencies[None]
    return (angle.cos() * amplitude).to(device), (angle.sin() * amplitude).to(device)


def _frequencies(spec: RopeSpec) -> tuple[torch.Tensor, float]:
    """Angle per position f32[dim / 2], and the factor on cosines and sines."""
    scaling = dict(spec.scaling)
    plain = 1.0 / spec.theta ** (torch.arange(0, spec.dim, 2, dtype=torch.float32) / spec.dim)
    if spec.kind in ("default", "dynamic"):
        return plain, 1.0
    if spec.kind == "linear":
        return plain / scaling["factor"], 1.0
    if spec.kind == "llama3":
        return _llama3(plain, scaling), 1.0
    if spec.kind == "yarn":
        return _yarn(plain, spec, scaling)
    raise RuntimeUseError(Fault(f"unknown RoPE kind '{spec.kind}'", expected=", ".join(KINDS)))


def _llama3(plain: torch.Tensor, scaling: Mapping[str, float]) -> torch.Tensor:
    """Llama 3.1: long waves are slowed by `factor`, short ones kept, those between blended."""
    factor, low, high = scaling["factor"], scaling["low_freq_factor"], scaling["high_freq_factor"]
    turns = scaling["original_max_position_embeddings"] * plain / (2 * math.pi)
    blend = ((turns - low) / (high - low)).clamp(0.0, 1.0)
    return (1 - blend) * plain / factor + blend * plain


def _yarn(plain: torch.Tensor, spec: RopeSpec, scaling: Mapping[str, float]) -> tuple[torch.Tensor, float]:
    """Peng et al. 2023: a ramp over the columns from kept to slowed frequencies, and a scale on the result."""
    factor, original = scaling["factor"], scaling["original_max_position_embeddings"]

    def column(turns: float) -> float:
        """The column whose wave turns that often over the original context."""
        return spec.dim * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(spec.theta))

    low, high = column(scaling.get("beta_fast", 32)), column(scaling.get("beta_slow", 1))
    if scaling.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, spec.dim - 1)
    width = high - low or 0.001
    slowed = ((torch.arange(spec.dim // 2, dtype=torch.float32) - low) / width).clamp(0.0, 1.0)
    frequencies = plain / factor * slowed + plain * (1 - slowed)
    amplitude = scaling.get("attention_factor")
    if amplitude is None:
        mscale, all_dim = scaling.get("mscale"), scaling.get("mscale_all_dim")
        amplitude = yarn_mscale(factor, mscale) / yarn_mscale(factor, all_dim) if mscale and all_dim else yarn_mscale(factor, 1.0)
    return frequencies, amplitude


def yarn_mscale(factor: float, weight: float) -> float:
    """YaRN's amplitude for a scaling by `factor`; 1 without any."""
    return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0
