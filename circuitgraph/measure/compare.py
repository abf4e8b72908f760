"""Comparisons of one call: outputs, tokens, cache rows."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import torch

from ..ops import PagedKV
from .cases import Case

TOLERANCE = {torch.float32: 1e-4, torch.float16: 4e-3, torch.bfloat16: 3e-2}
"""By the type that values are rounded to. fp32 programs differ from the reference by the order of sums alone. Half
types round intermediates at other places than the reference does: a few units of their last place."""


@dataclass(frozen=True)
class Comparison:
    error: float
    tolerance: float
    detail: str = ""

    def worse_than(self, other: Comparison) -> bool:
        return self.error > other.error

    @staticmethod
    def worst(comparisons: Iterable[Comparison]) -> Comparison:
        """The one that is furthest beyond its tolerance."""
        return max(comparisons, key=lambda item: item.error / max(item.tolerance, 1e-9))


def error_of(made: torch.Tensor, wanted: torch.Tensor) -> float:
    """The largest difference, in units of max(1, the reference's root mean square); infinite where one has a NaN."""
    if made.shape != wanted.shape:
        return float("inf")
    if wanted.numel() == 0:
        return 0.0
    made, wanted = made.double(), wanted.double()
    difference = (made - wanted).abs().masked_fill(made == wanted, 0.0)  # equal infinities
    if not bool(difference.isfinite().all()):
        return float("inf")
    return float(difference.max()) / max(1.0, float(wanted.square().mean().sqrt()))


def compare_outputs(
    made: Mapping[str, torch.Tensor], wanted: Mapping[str, torch.Tensor], live: int, act: torch.dtype
) -> Iterator[tuple[str, Comparison]]:
    """Every output of the call over its live rows. `wanted` may have `logits` beside them, to judge tokens by."""
    for name, tensor in made.items():
        ours, theirs = tensor[:live], wanted[name][:live]
        if tensor.dtype.is_floating_point:
            # Log-probabilities are fp32 whatever `act` is, but come from activations rounded to it.
            yield name, Comparison(error_of(ours, theirs), TOLERANCE[act])
        else:
            logits = wanted["logits"][:live].double() if "logits" in wanted else None
            yield name, _compare_tokens(ours, theirs, logits, TOLERANCE[act])


def _compare_tokens(made: torch.Tensor, wanted: torch.Tensor, logits: torch.Tensor | None, tolerance: float) -> Comparison:
    """Tokens are equal, or the reference scores them so closely that rounding decides.

    The error is how far below the best the chosen token scores; infinite for a token that does not exist.
    """
    different = made != wanted
    if not bool(different.any()):
        return Comparison(0.0, tolerance)
    if logits is None or bool((made < 0).any()) or bool((made >= logits.shape[1]).any()):
        return Comparison(float("inf"), tolerance, f"tokens {made.tolist()} instead of {wanted.tolist()}")
    scale = max(1.0, float(logits.square().mean().sqrt()))
    chosen = logits.gather(1, made.long()[:, None])[:, 0]
    gap = float((logits.max(1).values - chosen).max()) / scale
    return Comparison(gap, tolerance, f"{int(different.sum())} of {len(made)} tokens differ, by {gap:.2g}")


def compare_caches(case: Case, made: Mapping[str, PagedKV], wanted: Mapping[str, PagedKV]) -> Iterator[tuple[str, Comparison]]:
    """The rows that had to be written, and that no other byte of the pool changed."""
    for name, before in case.caches.items():
        ours, theirs = made[name], wanted[name]
        slot = before.slot[before.slot >= 0].long()
        index = (slice(None), slot // before.block_size, slice(None), slot % before.block_size)
        rows = [error_of(getattr(ours, part)[index], getattr(theirs, part)[index]) for part in ("k", "v")]
        yield f"{name} rows", Comparison(max(rows), TOLERANCE[before.k.dtype])
        changed = 0
        for part in ("k", "v"):
            old, new = getattr(before, part).clone(), getattr(ours, part).clone()
            old[index] = new[index] = 0
            changed += int((_bits(old) != _bits(new)).sum())
        yield f"{name} rest", Comparison(float(changed), 0.0, f"{changed} foreign values changed" if changed else "")


def compare_same_bits(made: Mapping[str, torch.Tensor], other: Mapping[str, torch.Tensor], row: int) -> Comparison:
    """Row `row` of two calls of one program, bit for bit; the error counts values that differ."""
    different = sum(int((_bits(tensor[row]) != _bits(other[name][row])).sum()) for name, tensor in made.items())
    return Comparison(float(different), 0.0, f"{different} values depend on other rows" if different else "")


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view({2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()])
