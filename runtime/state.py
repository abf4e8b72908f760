"""What a proposer keeps per sequence."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from .pool import Lease


class ProposerState:
    """One sequence's drafter state, opaque to the server. Made and freed by one proposer, never shared between calls."""


@dataclass(eq=False)
class MtpProposerState(ProposerState):
    """Rows of a drafter with a KV cache, one per (hidden, next token) pair.

    owner: the proposer that made it. lease: its KV blocks, in row order; closed when freed.
    rows: rows held, rows 0..rows-1 are the drafter's context. last_pair_key: position of the newest row's hidden.
    last_drafts: of the last propose, cleared by `after_verify`; the newest len(last_drafts) rows are theirs.
    pending_catchup: accepted drafts whose rows are still to be rebuilt; 0 when the rows are complete.
    """

    owner: Any
    lease: Lease
    rows: int = 0
    last_pair_key: int | None = None
    last_drafts: list[int] = field(default_factory=list)
    last_confidence: float | None = None
    pending_catchup: int = 0
    freed: bool = False

    @property
    def next_position(self) -> int:
        """Position of the token whose row would follow without a gap."""
        return 1 if self.last_pair_key is None else self.last_pair_key + 2

    @property
    def last_num_drafted(self) -> int:
        return len(self.last_drafts)
