"""From states to a runner's arguments: tokens, positions, slots, tables, in memory that is kept from call to call."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch

from circuitgraph.ops import PagedKV

from .pool import BlockPool
from .proposer import Hiddens
from .runner import ChainRows, DraftChain, DraftRunner
from .state import MtpProposerState

TURNS = 4
KEPT_VIEWS = 64
"""Views of a column up to this length are kept: the sizes of drafting, which come again with every step."""


class Column:
    """A growing int32 tensor written like a list: filling it from Python integers allocates nothing on the host.

    For a GPU the host's side is page-locked, and there are several that take turns: the host runs ahead of the copies.
    """

    def __init__(self, device: torch.device):
        self.device = device
        self._sides = [_Side(device) for _ in range(TURNS if device.type == "cuda" else 1)]
        self._turn = 0

    def fill(self, values: Sequence[int]) -> torch.Tensor:
        """The values as int32[len(values)] on the device, valid until the next fill."""
        self._turn = (self._turn + 1) % len(self._sides)
        return self._sides[self._turn].fill(values)


class _Side:
    """One copy of a column's values on the host."""

    def __init__(self, device: torch.device):
        self.device = device
        self._copied = torch.cuda.Event() if device.type == "cuda" else None
        self._resize(64)

    def _resize(self, size: int) -> None:
        self._views: dict[int, torch.Tensor] = {}
        self._host = torch.zeros(size, dtype=torch.int32, pin_memory=self._copied is not None)
        self._cells = (ctypes.c_int32 * size).from_address(self._host.data_ptr())

    def fill(self, values: Sequence[int]) -> torch.Tensor:
        count = len(values)
        if self._copied is not None and not self._copied.query():
            self._copied.synchronize()  # the copy of TURNS fills ago has not left this memory
        if count > len(self._cells):
            self._resize(2 * count)
        self._cells[:count] = values
        view = self._views.get(count)
        if view is None:
            view = self._host[:count]
            if count <= KEPT_VIEWS:
                self._views[count] = view
        if self._copied is None:
            return view
        made = view.to(self.device, non_blocking=True)
        self._copied.record()
        return made


class Batch:
    """Builds a call's tensors from states and runs it."""

    def __init__(self, runner: DraftRunner, pool: BlockPool):
        self.pool = pool
        self.use(runner)

    def use(self, runner: DraftRunner) -> None:
        """Columns lie where the runner takes integers."""
        self.runner = runner
        columns = [Column(runner.integers_on) for _ in range(7)]
        self.token, self.position, self.seq, self.length, self.slot, self.start, self.block = columns

    def chain(
        self,
        tokens: Sequence[int],
        hiddens: Hiddens,
        positions: Sequence[int],
        states: Sequence[MtpProposerState],
        counts: Sequence[int],
        *,
        ahead: int = 0,
        allowed: torch.Tensor | None = None,
    ) -> DraftChain:
        """counts[i] drafts for states[i], whose rows have blocks already; `ahead` rows of this propose are written."""
        steps = max(counts)
        first = [state.rows + ahead for state in states]
        rows = [self.pool.slots(s.lease, row, count) for s, row, count in zip(states, first, counts, strict=True)]
        written = [row[step] if step < len(row) else -1 for step in range(steps) for row in rows]
        slots = self.slot.fill(written).view(steps, len(states))
        caches = self.caches(states, range(len(states)), [row + 1 for row in first], slots[0])
        token, position = self.token.fill(tokens), self.position.fill(positions)
        masked = {} if allowed is None else {"allowed": allowed}
        return self.runner.chain(steps, token, stacked([hiddens]), position, caches, slots, **masked)

    def chain_lists(
        self,
        tokens: Sequence[int],
        hiddens: Hiddens,
        positions: Sequence[int],
        states: Sequence[MtpProposerState],
        counts: Sequence[int],
        *,
        allowed: torch.Tensor | None = None,
    ) -> tuple[list[list[int]], list[list[float]]]:
        """As `chain`: (drafts, logprobs), one list a row, of which the first counts[i] mean something."""
        before = [len(state.history.positions) for state in states]
        slots = [self.pool.slots(s.lease, row, count) for s, row, count in zip(states, before, counts, strict=True)]
        rows = ChainRows(tokens, positions, before, slots, [state.lease for state in states])
        made = self.runner.chain_packed(max(counts), rows, stacked([hiddens]), self.pool.storage, allowed)
        if made is not None:
            return made
        chain = self.chain(tokens, hiddens, positions, states, counts, allowed=allowed)
        return chain.drafts.tolist(), chain.logprobs.tolist()

    def context(
        self,
        tokens: Sequence[Sequence[int]],
        hiddens: Sequence[Hiddens],
        first_pos: Sequence[int],
        states: Sequence[MtpProposerState],
        counts: Sequence[int],
    ) -> None:
        """Append the first counts[i] rows of every sequence, whose blocks are there already."""
        ids: list[int] = []
        positions: list[int] = []
        seq: list[int] = []
        lengths: list[int] = []
        slots: list[int] = []
        for index, (state, count) in enumerate(zip(states, counts, strict=True)):
            ids += tokens[index][:count]
            positions += range(first_pos[index], first_pos[index] + count)
            seq += [index] * count
            lengths += range(state.rows + 1, state.rows + count + 1)
            slots += self.pool.slots(state.lease, state.rows, count)
        hidden = stacked([rows[:count] for rows, count in zip(hiddens, counts, strict=True) if count])
        caches = self.caches(states, seq, lengths, self.slot.fill(slots))
        self.runner.context(self.token.fill(ids), hidden, self.position.fill(positions), caches)

    def caches(
        self,
        states: Sequence[MtpProposerState],
        seq: Sequence[int],
        lengths: Sequence[int] | torch.Tensor,
        slot: torch.Tensor,
        *,
        table: torch.Tensor | None = None,
    ) -> dict[str, PagedKV]:
        """One cache a state of the circuit. `lengths` and `table` may be on the device already."""
        length = lengths if isinstance(lengths, torch.Tensor) else self.length.fill(lengths)
        table = self.table(states) if table is None else table
        addressing = (slot, self.seq.fill(seq), table, self.start.fill([0] * len(states)), length)
        return {name: PagedKV(k, v, *addressing) for name, (k, v) in self.pool.storage.items()}

    def table(self, states: Sequence[MtpProposerState], column: Column | None = None) -> torch.Tensor:
        """int32[sequences, blocks of the longest], in `column` where another is wanted than this one's."""
        width = max(len(state.lease.blocks) for state in states)
        blocks: list[int] = []
        for state in states:
            blocks += state.lease.blocks
            blocks += [0] * (width - len(state.lease.blocks))  # beyond the sequence's length: never read
        return (column or self.block).fill(blocks).view(len(states), width)


def stacked(parts: Sequence[Hiddens]) -> torch.Tensor:
    """All hiddens as one [n, H]; a single tensor is passed on as it is."""
    tensors = [part if isinstance(part, torch.Tensor) else torch.stack(list(part)) for part in parts]
    return tensors[0] if len(tensors) == 1 else torch.cat(tensors)
