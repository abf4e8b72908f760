"""Greedy verification: which drafts the target would have chosen itself."""

from __future__ import annotations

import operator
from collections.abc import Sequence

from circuitgraph.errors import Fault, RuntimeUseError

from .arguments import shown


def accept_greedy(drafts: Sequence[int], target: Sequence[int]) -> tuple[int, int]:
    """How many drafts are accepted, and the token that the target adds after them.

    Args:
        drafts: d_1..d_k, as proposed.
        target: the target's greedy choice after the last token and after each draft: k + 1 tokens.

    Raises:
        RuntimeUseError: another number of choices, or what is no token.

    >>> accept_greedy([5, 6, 7], [5, 6, 9, 1])
    (2, 9)
    """
    try:
        drafts, target = ([operator.index(token) for token in tokens] for tokens in (drafts, target))
    except TypeError:
        got = f"{shown(drafts)} and {shown(target)}"
        raise RuntimeUseError(Fault("takes tokens", where="accept_greedy", expected="two sequences of ints", got=got)) from None
    if len(target) != len(drafts) + 1:
        message = f"{len(drafts)} drafts need {len(drafts) + 1} choices of the target"
        raise RuntimeUseError(Fault(message, where="accept_greedy", subject="target", got=str(len(target))))
    accepted = 0
    while accepted < len(drafts) and drafts[accepted] == target[accepted]:
        accepted += 1
    return accepted, target[accepted]
