"""What a server plots: drafted, accepted, where calls ran, what was refused and how full the pool is."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

from .pool import Ledger


@dataclass
class Metrics:
    """Counters of one proposer since it was made (or `reset`), and its pool as it is now.

    A *draft* is one sequence in one verify that had at least one drafted token, as vLLM counts it.
    """

    drafts: int = 0
    drafted: int = 0
    accepted: int = 0
    accepted_per_position: list[int] = field(default_factory=list)
    drafted_per_position: list[int] = field(default_factory=list)
    context_rows: int = 0
    refusals: Counter[str] = field(default_factory=Counter)
    """Reason to count: sequences that got no draft, or calls that wrote no rows, without an error."""
    peak_blocks: int = 0
    paths: Counter[str] = field(default_factory=Counter)
    """How proposes ran (`DraftRunner.serves`): n-row, split, single, reference."""
    skipped_rows: int = 0
    """Rows that were never handed over before a later one was written: holes, which cost accepted length."""
    ledger: Callable[[], Ledger] | None = field(default=None, repr=False, compare=False)

    @property
    def mean_accepted_length(self) -> float:
        """Tokens a verify yields: 1 (the target's own) + accepted drafts per draft. 1.0 before the first verify."""
        return 1.0 + (self.accepted / self.drafts if self.drafts else 0.0)

    @property
    def acceptance(self) -> list[float]:
        """Share of drafts accepted at each position, of those that drafted so far."""
        pairs = zip(self.accepted_per_position, self.drafted_per_position, strict=True)
        return [accepted / drafted for accepted, drafted in pairs]

    def count_verify(self, drafted: int, accepted: int) -> None:
        if drafted == 0:
            return
        missing = drafted - len(self.drafted_per_position)
        self.drafted_per_position.extend([0] * missing)
        self.accepted_per_position.extend([0] * missing)
        self.drafts += 1
        self.drafted += drafted
        self.accepted += accepted
        for position in range(drafted):
            self.drafted_per_position[position] += 1
            self.accepted_per_position[position] += position < accepted

    def snapshot(self) -> dict[str, Any]:
        """Plain data, for JSON."""
        return {
            **{name: value for name, value in vars(self).items() if name not in ("refusals", "paths", "ledger")},
            "accepted_per_position": list(self.accepted_per_position),
            "drafted_per_position": list(self.drafted_per_position),
            "refusals": dict(self.refusals),
            "paths": dict(self.paths),
            "pool": asdict(self.ledger()) if self.ledger else None,
            "mean_accepted_length": self.mean_accepted_length,
            "acceptance": self.acceptance,
        }

    def reset(self) -> None:
        self.__init__(ledger=self.ledger)  # type: ignore[misc]
