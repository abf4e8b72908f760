"""What a proposer keeps per sequence."""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from .pool import Lease

DEFERRED = -1
"""Stands for a draft whose id is still on the device alone."""


class ProposerState:
    """One sequence's drafter state, opaque to the server. Made and freed by one proposer, never shared between calls."""


class History:
    """Which tokens a sequence's rows depend on.

    positions: of each row's token, in row order, rising; the row's pair key is one less. text: the tokens of the positions
    0, 1, ... as far as the server handed over every one of them: a row can be vouched for only inside it.
    """

    def __init__(self) -> None:
        self.positions = array("i")
        self.text = array("i")

    def read(self, first: int, tokens: Iterable[int]) -> None:
        """The server said which tokens are at `first` and after; what it said of later ones before no longer holds."""
        if first <= len(self.text):
            del self.text[first:]
            self.text.extend(tokens)

    def append(self, first: int, count: int) -> None:
        """`count` more rows, of the tokens at `first` and after."""
        self.positions.extend(range(first, first + count))

    def keep(self, rows: int) -> None:
        del self.positions[rows:]


@dataclass
class Unsettled:
    """A device-form propose whose accepted drafts the host does not know yet.

    count: drafts asked for. caught_up: the window (first, size) of tokens whose rows the device-form catch-up could write,
    counted from the propose's own token; None before it.
    """

    count: int
    caught_up: tuple[int, int] | None = None


@dataclass(eq=False)
class MtpProposerState(ProposerState):
    """Rows of a drafter with a KV cache, one per (hidden, next token) pair.

    owner: the proposer that made it. lease: its KV blocks, in row order; closed when freed. history: what its rows are of.
    last_drafts: of the last propose, cleared by `after_verify`; the newest len(last_drafts) rows are theirs.
    pending_catchup: rows that are missing since the last verify; 0 when the rows are complete.
    next_token: position of the token that is proposed or handed over next, if none is left out.
    unsettled: device-form proposes since the host last knew the rows, oldest first; `history` is as before them.
    """

    owner: Any
    lease: Lease
    history: History = field(default_factory=History)
    last_drafts: list[int] = field(default_factory=list)
    last_confidence: float | None = None
    pending_catchup: int = 0
    next_token: int = 1
    unsettled: deque[Unsettled] = field(default_factory=deque)
    freed: bool = False

    @property
    def rows(self) -> int:
        """Rows held: rows 0..rows-1 are the drafter's context."""
        return len(self.history.positions)

    @property
    def last_pair_key(self) -> int | None:
        """Position of the newest row's hidden."""
        return self.history.positions[-1] - 1 if self.history.positions else None

    @property
    def next_position(self) -> int:
        """Position of the token whose row would follow without a gap."""
        return self.history.positions[-1] + 1 if self.history.positions else 1

    @property
    def last_num_drafted(self) -> int:
        return len(self.last_drafts)

    @property
    def most_rows(self) -> int:
        """Rows at most, whatever the target accepted: a verify adds its token's row and one per accepted draft."""
        return self.rows + sum(step.count + 1 for step in self.unsettled)

    def clear(self) -> None:
        """As freshly allocated, the lease apart."""
        self.history = History()
        self.last_drafts, self.last_confidence, self.pending_catchup, self.next_token = [], None, 0, 1
        self.unsettled.clear()
