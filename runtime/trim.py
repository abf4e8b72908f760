"""Trim policies: how many of the rows that a propose wrote stay, once the target has verified its drafts."""

from __future__ import annotations

from collections.abc import Callable

TRIM: dict[str, Callable[[int, int], int]] = {
    # Row 0 was built from the target's hidden and stays; catch-up rebuilds the accepted ones from the target's too.
    "exact": lambda drafted, accepted: min(drafted, 1),
}
"""Policy to (drafted, accepted) -> rows kept of the `drafted` rows, 0 <= accepted <= drafted."""


def rows_missing(drafted: int, accepted: int, kept: int) -> int:
    """Rows that the accepted tokens should have and, `kept` rows staying, do not: row 0 and one per accepted draft."""
    return accepted + 1 - kept if drafted else 0
