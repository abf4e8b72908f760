"""What `MtpProposer`'s calls share: reserving blocks and giving them back, and what is counted."""

from __future__ import annotations

from collections.abc import Sequence

from .metrics import Metrics
from .mtp_checks import Checks
from .pool import BlockPool, Lease
from .state import MtpProposerState


class Memory(Checks):
    """Part of `MtpProposer`."""

    pool: BlockPool
    metrics: Metrics

    def _below_limit(self, rows: int) -> int:
        """So many rows, or as many as a sequence can have: each is of a position of its own below the limit, scratch too."""
        limit = self.runner.max_position
        return rows if limit is None else min(rows, limit)

    def _reserve(self, needs: Sequence[tuple[MtpProposerState, int]]) -> bool:
        """Blocks for so many rows of each: all or, counted and returning False, none."""
        if not self.pool.grow([(state.lease, rows) for state, rows in needs]):
            self.metrics.refusals["pool_exhausted"] += len(needs)
            return False
        self.metrics.peak_blocks = max(self.metrics.peak_blocks, self.pool.held)
        return True

    def _cover(self, leases: Sequence[Lease], rows: Sequence[int], more: int) -> bool:
        """Blocks for `more` rows beyond rows[i] of each: all or, not counted as a refusal, none."""
        covered = self.pool.cover(leases, rows, more)
        if covered:
            self.metrics.peak_blocks = max(self.metrics.peak_blocks, self.pool.held)
        return covered

    def _give_back(self, states: Sequence[MtpProposerState], held: Sequence[int]) -> None:
        """After a failed call: every state has the blocks that it had before."""
        for state, blocks in zip(states, held, strict=True):
            self.pool.shrink(state.lease, blocks * self.pool.block_size)

    def _count_path(self, n: int, *, masked: bool = False) -> None:
        path = self.runner.serves(n, masked=True) if masked else self.runner.serves(n)
        self.metrics.paths[str(path)] += 1

    def _begin(self, state: MtpProposerState, position: int) -> None:
        """A row at `position` comes next: rows before it that a sequence with rows lacks will never be there."""
        if state.rows:
            self.metrics.skipped_rows += max(position - state.next_position, 0)
        else:
            state.model = self.runner.model_digest()
