"""What a proposer keeps per sequence."""

from __future__ import annotations

import hashlib
import math
from array import array
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Iterable, Sequence
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

    def common(self, prefix: Sequence[int]) -> int:
        """How many of the first tokens are those of `prefix`."""
        pairs = zip(self.text, prefix, strict=False)
        return next((at for at, (old, new) in enumerate(pairs) if old != new), min(len(self.text), len(prefix)))

    def vouched(self, tokens: int) -> int:
        """Rows that the first `tokens` tokens vouch for: those of these tokens, whose hiddens saw nothing else."""
        return bisect_left(self.positions, min(tokens, len(self.text)))

    def digest(self) -> str:
        text = hashlib.sha256(self.text.tobytes()).digest()
        return hashlib.sha256(text + self.positions.tobytes()).hexdigest()


@dataclass
class Unsettled:
    """A device-form propose whose accepted drafts the host does not know yet.

    count: drafts asked for. position: of its own token; None: the one after all that came before.
    caught_up: the window (first, size) of tokens whose rows the device-form catch-up could write, counted from the
    propose's own token; None before it.
    """

    count: int
    position: int | None = None
    caught_up: tuple[int, int] | None = None


@dataclass(eq=False)
class MtpProposerState(ProposerState):
    """Rows of a drafter with a KV cache, one per (hidden, next token) pair.

    owner: the proposer that made it. model: digest of what wrote its rows, from the first one on.
    lease: its KV blocks, in row order; closed when freed. history: what its rows are of.
    last_drafts: of the last propose, cleared by `after_verify`; the newest len(last_drafts) rows are theirs.
    last_scores: log-probabilities of the last propose's drafts.
    next_token: position of the token that is proposed or handed over next, if none is left out.
    proposed_at: position of the last propose's own token, until `after_verify`.
    unsettled: device-form proposes since the host last knew the rows, oldest first; `history` is as before them.
    cell: where the device keeps its own count of the rows, once a device-form call was made.
    keeps_rows: False for a drafter that has none.
    """

    owner: Any
    lease: Lease
    model: str = ""
    history: History = field(default_factory=History)
    last_drafts: list[int] = field(default_factory=list)
    last_scores: Sequence[float] = ()
    next_token: int = 1
    proposed_at: int | None = None
    unsettled: deque[Unsettled] = field(default_factory=deque)
    cell: int | None = None
    keeps_rows: bool = True
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
    def pending_catchup(self) -> int:
        """Rows that are missing before the one of the next token: of the newest token and its accepted drafts."""
        return max(self.next_token - self.next_position, 0) if self.keeps_rows else 0

    @property
    def last_confidence(self) -> float | None:
        """Smallest probability of the last propose's drafts, None where none was measured."""
        measured = [score for score in self.last_scores if not math.isnan(score)]
        return math.exp(min(measured)) if measured else None

    @property
    def last_num_drafted(self) -> int:
        return len(self.last_drafts)

    @property
    def most_rows(self) -> int:
        """Rows at most, whatever the target accepted: a verify adds its token's row and one per accepted draft."""
        return self.rows + sum(step.count + 1 for step in self.unsettled) if self.keeps_rows else 0

    def read(self, first: int, tokens: Sequence[int]) -> None:
        """The server said which tokens are at `first` and after."""
        self.history.read(first, tokens)
        self.next_token = max(self.next_token, first + len(tokens))

    def clear(self) -> None:
        """As freshly allocated, the lease apart."""
        self.history, self.model = History(), ""
        self.last_drafts, self.last_scores = [], ()
        self.next_token, self.proposed_at = 1, None
        self.unsettled.clear()


class Entry:
    """What a propose says of its sequences: each one's token, and a row for each draft. Made while a device drafts, before
    anyone knows which drafts there will be, so it can be taken back.

    gaps: of each sequence that drafts, the rows before its first that were never handed over.
    """

    def __init__(self, states: Sequence[MtpProposerState], tokens: Sequence[int], positions: Sequence[int]):
        self.states, self.tokens, self.positions = states, tokens, positions
        self.gaps: list[int] = []
        self.made: list[tuple[MtpProposerState, int, array[int], str, int, int | None, Sequence[float]]] = []

    def make(self, drafting: Sequence[int], counts: Sequence[int], digest: Callable[[], str]) -> None:
        """counts[i] rows for sequence drafting[i]; digest: of what writes them."""
        for state, token, position in zip(self.states, self.tokens, self.positions, strict=True):
            history = state.history
            later = history.text[position:] if position < len(history.text) else _NONE
            before = (state.model, state.next_token, state.proposed_at, state.last_scores)
            self.made.append((state, len(history.positions), later, *before))
            history.read(position, (token,))
            state.next_token = state.proposed_at = position
        for place, count in zip(drafting, counts, strict=True):
            state, position = self.states[place], self.positions[place]
            rows = state.history.positions
            if rows:
                self.gaps.append(position - rows[-1] - 1)
            else:
                self.gaps.append(0)
                state.model = digest()
            rows.extend(range(position, position + count))

    def undo(self) -> None:
        # An interrupt may have come between any two lines of `make`.
        for made, position in zip(self.made, self.positions, strict=False):
            state, rows, later, model, next_token, proposed_at, scores = made
            history = state.history
            history.keep(rows)
            if position < len(history.text):
                del history.text[position:]
            history.text.extend(later)
            state.model, state.next_token, state.proposed_at, state.last_scores = model, next_token, proposed_at, scores


_NONE = array("i")
