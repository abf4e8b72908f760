"""Greedy verification: which drafts the target would have chosen itself."""

from __future__ import annotations

from collections.abc import Sequence


def accept_greedy(drafts: Sequence[int], target: Sequence[int]) -> tuple[int, int]:
    """How many drafts are accepted, and the token that the target adds after them.

    Args:
        drafts: d_1..d_k, as proposed.
        target: the target's greedy choice after the last token and after each draft: k + 1 tokens.

    >>> accept_greedy([5, 6, 7], [5, 6, 9, 1])
    (2, 9)
    """
    if len(target) != len(drafts) + 1:
        raise ValueError(f"{len(drafts)} drafts need {len(drafts) + 1} choices of the target, got {len(target)}")
    accepted = 0
    while accepted < len(drafts) and drafts[accepted] == target[accepted]:
        accepted += 1
    return accepted, target[accepted]
