"""Trim policies: how many of the rows that a propose wrote stay, once the target has verified its drafts.

A propose of K drafts at position P writes the rows of the tokens at P (the newest token, with the target's own hidden) and
P+1..P+K-1 (drafts, with the drafter's own hiddens). With `a` drafts accepted, the rows of the tokens P..P+a are wanted.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

Count = int | torch.Tensor
"""A number, or int32 numbers on a device: the policies are the same arithmetic on both."""

TRIM: dict[str, Callable[[Count, Count], Count]] = {
    # Row 0 was built from the target's hidden and stays; catch-up rebuilds the accepted ones from the target's too.
    "exact": lambda drafted, accepted: _smaller(drafted, 1),
    # Every row of a token that is in the text stays, approximate hiddens or not.
    "valid": lambda drafted, accepted: _smaller(drafted, accepted + 1),
    # As many rows as accepted drafts: one valid row is dropped, unless all drafts were accepted.
    "seed": lambda drafted, accepted: accepted,
    # The seed with its refeed lever: of several accepted drafts, the rows are rebuilt, too.
    "seed_refeed": lambda drafted, accepted: _smaller(accepted, 1),
}
"""Policy to (drafted, accepted) -> rows kept of the `drafted` rows, 0 <= accepted <= drafted."""


def _smaller(left: Count, right: Count) -> Count:
    if isinstance(left, torch.Tensor):
        return torch.minimum(left, right) if isinstance(right, torch.Tensor) else left.clamp(max=right)
    return min(left, right)  # type: ignore[type-var]
