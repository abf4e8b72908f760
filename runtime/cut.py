"""Which drafts of a batch are worth verifying: the most confident ones, across sequences."""

from __future__ import annotations

import math
from collections.abc import Sequence

from circuitgraph.errors import Fault, RuntimeUseError

from .arguments import is_whole, shown


def cut_drafts(confidences: Sequence[Sequence[float]], ratio: float = 1.0, budget: int | None = None) -> list[int]:
    """How many drafts of each sequence to verify.

    Positions of depth 2 and more are ranked across the batch by the running sum of their log-probabilities, and the best
    are kept, so that every sequence keeps a prefix. Depth 1 always stays. Ties go to the shallower, then the earlier one.

    Args:
        confidences: log-probabilities of each sequence's drafts (`propose_batch`'s out_confidence); NaN, an unmeasured
            one, counts as certain.
        ratio: share of the positions of depth >= 2 to keep at most, 0 to 1.
        budget: drafts to keep at most in the whole batch, those of depth 1 included; None: no such limit.

    Raises:
        RuntimeUseError: another ratio or budget, or confidences that are no lists of numbers.

    Pass what you verify, and what of it was accepted to `after_verify`, as ever.

    >>> cut_drafts([[-0.1, -0.1, -3.0], [-0.5, -2.0, -0.1]], ratio=0.5)
    [2, 2]
    """
    number = isinstance(ratio, float) or is_whole(ratio)
    if not number or not 0 <= ratio <= 1 or (budget is not None and (not is_whole(budget) or budget < 0)):
        got = f"ratio {shown(ratio)}, budget {shown(budget)}"
        expected = "ratio 0..1, budget a whole number or None"
        raise RuntimeUseError(Fault("is no cut", where="cut_drafts", expected=expected, got=got))
    try:
        confidences = [[float(score) for score in row] for row in confidences]
    except (TypeError, ValueError):
        expected = "a list of log-probabilities for each sequence"
        fault = Fault("are none", where="cut_drafts", subject="confidences", expected=expected, got=shown(confidences))
        raise RuntimeUseError(fault) from None
    kept = [min(len(row), 1) for row in confidences]
    ranked = []
    for index, row in enumerate(confidences):
        total = 0.0
        for depth, confidence in enumerate(row, start=1):
            total += 0.0 if math.isnan(confidence) else min(confidence, 0.0)  # rounding may exceed 0
            if depth >= 2:
                ranked.append((-total, depth, index))
    # 1e-9: a ratio of 0.3 of 10 is 3, whatever the fraction's last bit says.
    room = math.floor(ratio * len(ranked) + 1e-9)
    if budget is not None:
        room = min(room, max(budget - sum(kept), 0))
    for _, _, index in sorted(ranked)[:room]:
        kept[index] += 1
    return kept
