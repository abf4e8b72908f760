"""The device form: proposes and catch-ups whose accept counts lie on the device, and what the host knows meanwhile.

The host counts with upper bounds (`MtpProposerState.most_rows`) until `settle` tells it what was accepted; the device's own
cells (see `device_rows`) are exact throughout. No call here waits for the device.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from .batch import Batch, Column, stacked
from .device_rows import CELL
from .proposer import Hiddens
from .state import MtpProposerState, Unsettled
from .trim import TRIM


class DeviceForm:
    """Cells of a proposer's sequences, and the launches that read and write them."""

    def __init__(self, batch: Batch, trim: str):
        self.batch, self.trim = batch, trim
        device = batch.runner.device
        self._cells = torch.zeros(0, CELL, dtype=torch.int32, device=device)
        self._free: list[int] = []
        self._host, self._index, self._count, self._position = (Column(device) for _ in range(4))

    # -- launches ----------------------------------------------------------------------------------------------

    def propose(
        self,
        tokens: torch.Tensor,
        hiddens: Hiddens,
        positions: torch.Tensor | Sequence[int],
        steps: int,
        counts: Sequence[int],
        states: Sequence[MtpProposerState],
        accepted: torch.Tensor | None,
        out: torch.Tensor,
    ) -> torch.Tensor:
        """Drafts into out[n, steps], -1 where there is none; returns their log-probabilities. Blocks are there already."""
        batch = self.batch
        index, cells = self._gather(states)
        if not isinstance(positions, torch.Tensor):
            positions = self._position.fill(positions)
        table = batch.table(states)
        count = self._count.fill(counts)
        placed = batch.runner.place_chain(cells, accepted, positions, count, table, steps=steps, **self._geometry())
        caches = batch.caches(states, range(len(states)), placed.length, placed.slot[0], table=table)
        token = tokens * placed.live[0]
        chain = batch.runner.chain(steps, token, stacked([hiddens]), placed.position, caches, placed.slot)
        self._cells[index] = placed.cells
        out.copy_(chain.drafts)
        return chain.logprobs

    def skip(
        self, positions: torch.Tensor | Sequence[int], states: Sequence[MtpProposerState], accepted: torch.Tensor | None
    ) -> None:
        """A propose that no sequence has room for: the last verify is accounted for all the same."""
        index, cells = self._gather(states)
        if not isinstance(positions, torch.Tensor):
            positions = self._position.fill(positions)
        count, nowhere = self._count.fill([0] * len(states)), self.batch.block.fill([0] * len(states)).view(-1, 1)
        placed = self.batch.runner.place_chain(cells, accepted, positions, count, nowhere, steps=1, **self._geometry())
        self._cells[index] = placed.cells

    def catch_up(
        self, tokens: torch.Tensor, hiddens: torch.Tensor, states: Sequence[MtpProposerState], accepted: torch.Tensor, first: int
    ) -> None:
        """Rows of tokens[i][j], at `first` + j after the last propose of states[i], as far as the verify left them missing."""
        batch, (n, columns) = self.batch, tokens.shape
        index, cells = self._gather(states)
        table = batch.table(states)
        placed = batch.runner.place_accepted(cells, accepted, table, first=first, columns=columns, **self._geometry())
        seq = [row for row in range(n) for _ in range(columns)]
        caches = batch.caches(states, seq, placed.length.flatten(), placed.slot.flatten(), table=table)
        token = (tokens * placed.live).flatten()
        batch.runner.context(token, hiddens.flatten(0, 1), placed.position.flatten(), caches)
        self._cells[index] = placed.cells

    def _geometry(self) -> dict:
        return {"trim": self.trim, "block_size": self.batch.pool.block_size, "limit": self.batch.runner.max_position}

    # -- cells -------------------------------------------------------------------------------------------------

    def _gather(self, states: Sequence[MtpProposerState]) -> tuple[torch.Tensor, torch.Tensor]:
        """The cells of the states, written from the host's knowledge where it has it."""
        for state in states:
            if state.cell is None:
                state.cell = self._take()
        index = self._index.fill([state.cell for state in states]).long()  # type: ignore[misc]
        told = self._host.fill([value for state in states for value in self._told(state)]).view(len(states), CELL + 1)
        cells = torch.where(told[:, :1] > 0, told[:, 1:], self._cells[index])
        return index, cells

    @staticmethod
    def _told(state: MtpProposerState) -> tuple[int, int, int, int]:
        """Whether the host knows, and the cell if so."""
        if state.last_drafts:  # a host-form propose whose verify stayed on the device
            assert state.proposed_at is not None
            return 1, state.rows - len(state.last_drafts), state.proposed_at, len(state.last_drafts)
        if state.unsettled:
            return 0, 0, 0, 0
        return 1, state.rows, state.next_token - 1, 0

    def _take(self) -> int:
        if not self._free:
            have = self._cells.shape[0]
            more = max(have, 64)
            self._cells = torch.cat([self._cells, torch.zeros(more, CELL, dtype=torch.int32, device=self._cells.device)])
            self._free = list(reversed(range(have, have + more)))
        return self._free.pop()

    def release(self, state: MtpProposerState) -> None:
        """The state needs no cell any more."""
        if state.cell is not None:
            self._free.append(state.cell)
            state.cell = None


def started(state: MtpProposerState) -> None:
    """A host-form propose whose accept count the host will learn by `settle`: as if it had been made in the device form."""
    if state.last_drafts:
        drafted = len(state.last_drafts)
        state.unsettled.append(Unsettled(drafted, position=state.proposed_at))
        state.history.keep(state.rows - drafted)
        state.last_drafts, state.proposed_at = [], None


def outcome(state: MtpProposerState, limit: int | None) -> tuple[int, int]:
    """(position, drafts) of the oldest unsettled propose, now that what came before it is known."""
    step = state.unsettled[0]
    position = state.next_token if step.position is None else step.position
    return position, step.count if limit is None else max(min(step.count, limit - position), 0)


def settled(state: MtpProposerState, accepted: int, trim: str, limit: int | None) -> tuple[int, int]:
    """Account for the oldest unsettled propose as the device did (`device_rows`); returns its drafts, and how many rows
    before it a sequence with rows will never have."""
    position, drafted = outcome(state, limit)
    skipped = max(position - state.next_position, 0) if state.rows and drafted else 0
    step = state.unsettled.popleft()
    kept = TRIM[trim](drafted, accepted) if drafted else 0
    assert isinstance(kept, int)
    state.history.append(position, kept)
    if step.caught_up is not None:
        first, columns = step.caught_up
        lowest = position + max(kept, first)
        highest = position + min(accepted, first + columns - 1)
        highest = highest if limit is None else min(highest, limit - 1)
        state.history.append(lowest, max(highest - lowest + 1, 0))
    state.next_token = position + accepted + 1
    return drafted, skipped
