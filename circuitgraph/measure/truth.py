"""Whether a program computes what its circuit means, on its own device: asked before anything is timed."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

import torch

from ..circuit.ir import Circuit
from ..circuit.narrow import slice_entry
from ..errors import CircuitgraphError, Fault
from ..interpreter import interpret
from ..ops import PagedKV
from .cases import Case

CHUNK = 512
"""Context rows that the interpreter takes at once: a later layer's scores grow with the square."""

LIMITS = {"f32": 1e-4, "f16": 4e-3, "bf16": 2.5e-2}
"""Largest norm(made - meant) / norm(meant), by the type of activations: they are rounded at other places."""


def relative_error(made: torch.Tensor, meant: torch.Tensor) -> float:
    made, meant = made.double(), meant.double()
    return float((made - meant).norm() / meant.norm().clamp(min=1e-30))


def judged(circuit: Circuit, entry: str) -> Circuit:
    """The slice of an entry; one that drafts also has the logits, which tell a tie from a wrong token."""
    whole = circuit.entry(entry)
    more = ("logits",) if whole.outputs and "logits" in dict(circuit.outputs) and "logits" not in whole.outputs else ()
    widened = replace(whole, outputs=(*whole.outputs, *more))
    return slice_entry(replace(circuit, entries=(widened,)), entry)


def reference(
    circuit: Circuit, entry: str, case: Case, weights: Mapping[str, torch.Tensor], caches: Mapping[str, PagedKV]
) -> dict[str, torch.Tensor]:
    """What an entry means, by the interpreter, and its logits where it drafts; writes into `caches`."""
    with torch.no_grad():
        return interpret(judged(circuit, entry), inputs=case.inputs, weights=weights, states=caches, entry=entry)


def check_draft(
    subject: str,
    act: str,
    made: Mapping[str, torch.Tensor],
    meant: Mapping[str, torch.Tensor],
    sure: torch.Tensor | None = None,
) -> dict[str, float]:
    """{equal_drafts, error} of a step against the reference.

    A draft may be another token than the reference's where the logits of both are within rounding, if there are any.

    Args:
        sure: bool[n], the rows to compare; all when left out. See `routing.sure_rows`.

    Raises:
        CircuitgraphError: the hidden is off, or a draft is not among the best tokens.
    """
    limit = LIMITS[act]
    equal = int((made["draft"] == meant["draft"]).sum())
    if sure is not None:
        made, meant = ({name: value[sure] for name, value in values.items()} for values in (made, meant))
        if not len(made["draft"]):
            return {"equal_drafts": equal, "error": float("nan")}
    error = relative_error(made["next_hidden"], meant["next_hidden"])
    logits = meant["logits"].float() if "logits" in meant else None
    draft = made["draft"].long()
    if logits is None:
        close = bool((draft == meant["draft"]).all())
    else:
        known = bool(((draft >= 0) & (draft < logits.shape[1])).all())
        gap = logits.amax(-1) - logits.gather(1, draft.clamp(0, logits.shape[1] - 1)[:, None])[:, 0]
        close = known and bool((gap <= 8 * limit * logits.std(-1)).all())
    if not error < limit or not close:  # NaN fails, too
        got = f"error {error:.2g}, drafts {made['draft'].tolist()}"
        expected = f"error below {limit:g}, drafts {meant['draft'].tolist()}"
        hint = "Nothing was timed: a program that is wrong may be fast."
        raise CircuitgraphError(Fault("differs from the reference", where=subject, expected=expected, got=got, hint=hint))
    return {"equal_drafts": equal, "error": error}


def check_context(
    subject: str, act: str, circuit: Circuit, weights: Mapping[str, torch.Tensor], case: Case, before: Mapping[str, PagedKV]
) -> float:
    """Relative error of the cache rows that a call of context rows wrote into `case`'s caches.

    Args:
        before: copies of the caches before that call; the reference writes into them.

    Raises:
        CircuitgraphError: they are off, or are not numbers.
    """
    for first in range(0, case.rows, CHUNK):
        rows = slice(first, first + CHUNK)
        caches = {
            name: replace(cache, slot=cache.slot[rows], seq=cache.seq[rows], length=cache.length[rows])
            for name, cache in before.items()
        }
        part = Case({name: tensor[rows] for name, tensor in case.inputs.items()}, caches, case.spans)
        reference(circuit, "context", part, weights, caches)
    worst = 0.0
    for name, made in case.caches.items():
        slot = made.slot[made.slot >= 0].long()
        block, offset = slot // made.block_size, slot % made.block_size
        for k_or_v in ("k", "v"):
            ours, meant = (getattr(cache, k_or_v)[:, block, :, offset] for cache in (made, before[name]))
            error = relative_error(ours, meant)
            if not error < LIMITS[act]:  # NaN fails, too
                expected = f"error below {LIMITS[act]:g}"
                fault = Fault("differs from the reference", subject, f"{name}.{k_or_v}", expected, f"error {error:.2g}")
                raise CircuitgraphError(fault)
            worst = max(worst, error)
    return worst


def check_chain(subject: str, made: Iterable[torch.Tensor], steps: Iterable[torch.Tensor]) -> None:
    """Raises CircuitgraphError unless a chain's (drafts, logprobs, next_hidden) are those of its steps, bit for bit."""
    for name, ours, meant in zip(("drafts", "logprobs", "next_hidden"), made, steps, strict=True):
        if not torch.equal(ours, meant):
            expected, got = (str(tensor.flatten()[:8].tolist()) for tensor in (meant, ours))
            raise CircuitgraphError(Fault("a chain is not what its steps are", subject, name, expected, got))
