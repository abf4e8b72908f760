"""From states to a runner's arguments: tokens, positions, slots, tables, in memory that is kept from call to call."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from circuitgraph.errors import Fault, RuntimeUseError
from circuitgraph.ops import PagedKV

from .pool import BlockPool
from .proposer import Hiddens
from .runner import ChainRows, DraftChain, DraftRunner, Drafts
from .state import MtpProposerState

KEPT_VIEWS = 64
"""Views of a column up to this length are kept: the sizes of drafting, which come again with every step."""
Slots = tuple[list[int], Mapping[int, Sequence[int]]]
"""The slot of each sequence's first row, and all of those whose rows do not lie side by side: `BlockPool.slots_of`."""
TURNS = 4
"""Copies of a column's host memory for a GPU."""


class Column:
    """A growing int32 tensor written like a list: filling it from Python integers allocates nothing on the host.

    For a GPU the integers lie in page-locked memory, of which several copies take turns, so that the host goes on while one
    is being read.
    """

    def __init__(self, device: torch.device):
        self.device = device
        self._turns = [_Cells(64, pinned=device.type == "cuda") for _ in range(TURNS if device.type == "cuda" else 1)]
        self._turn = 0

    def fill(self, values: Sequence[int]) -> torch.Tensor:
        """The values as int32[len(values)]: for a GPU a fresh tensor, else memory that the next fill writes again."""
        self._turn = (self._turn + 1) % len(self._turns)
        cells = self._turns[self._turn]
        if len(values) > len(cells.cells):
            cells = self._turns[self._turn] = _Cells(2 * len(values), pinned=cells.read is not None)
        if cells.read is None:
            return cells.fill(values)
        if torch.cuda.is_current_stream_capturing():
            hint = "Capture `DraftRunner.chain` instead, with tensors on the device."
            raise RuntimeUseError(Fault("a proposer cannot be part of a graph: it counts on the host", hint=hint))
        if not cells.read.query():  # as a rule it is long past
            cells.read.synchronize()
        made = cells.fill(values).to(self.device, non_blocking=True)
        cells.read.record(torch.cuda.current_stream(self.device))
        return made


class _Cells:
    """Host memory for a number of integers. read: for page-locked memory, when the device has read what it was filled with."""

    def __init__(self, size: int, *, pinned: bool):
        self._host = torch.zeros(size, dtype=torch.int32, pin_memory=pinned)
        self.cells = (ctypes.c_int32 * size).from_address(self._host.data_ptr())
        self.read = torch.cuda.Event() if pinned else None
        self._views: dict[int, torch.Tensor] = {}

    def fill(self, values: Sequence[int]) -> torch.Tensor:
        count = len(values)
        self.cells[:count] = values
        view = self._views.get(count)
        if view is None:
            view = self._host[:count]
            if count <= KEPT_VIEWS:
                self._views[count] = view
        return view


class Batch:
    """Builds a call's tensors from states and runs it.

    on_device: integers are brought to the runner's device here, also for a runner that would do it itself.
    """

    def __init__(self, runner: DraftRunner, pool: BlockPool, *, on_device: bool = False):
        self.pool, self.on_device = pool, on_device
        self.use(runner)

    def use(self, runner: DraftRunner) -> None:
        """Columns lie where the runner takes integers."""
        self.runner = runner
        columns = [Column(runner.device if self.on_device else runner.integers_on) for _ in range(7)]
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
        rows = self._rows(tokens, hiddens, positions, states, counts, ahead)
        masked = {} if allowed is None else {"allowed": allowed}
        recycled = {"recycled": True} if ahead else {}
        return self.runner.chain(*rows, **masked, **recycled)

    def scores(
        self,
        tokens: Sequence[int],
        hiddens: Hiddens,
        positions: Sequence[int],
        states: Sequence[MtpProposerState],
        counts: Sequence[int],
    ) -> torch.Tensor:
        """As `chain`, of a drafter whose drafts come all at once: what they are chosen from, [n, steps, V]."""
        return self.runner.scores(*self._rows(tokens, hiddens, positions, states, counts, 0))

    def _rows(self, tokens, hiddens, positions, states, counts, ahead: int) -> tuple[Any, ...]:
        """The arguments of `DraftRunner.chain`."""
        steps, kind, limit = max(counts), self.runner.kind, self.runner.max_position
        first = [state.rows + ahead for state in states]
        rows = [
            self.pool.slots(state.lease, row, kind.writes(count, position, limit))
            for state, row, count, position in zip(states, first, counts, positions, strict=True)
        ]
        depth = kind.slot_rows(steps)
        written = [row[step] if step < len(row) else -1 for step in range(depth) for row in rows]
        slots = self.slot.fill(written).view(depth, len(states))
        caches = self.caches(states, range(len(states)), [row + 1 for row in first], slots[0]) if depth else {}
        return steps, self.token.fill(tokens), stacked([hiddens]), self.position.fill(positions), caches, slots

    def launch(
        self,
        tokens: list[int],
        hiddens: Hiddens,
        positions: list[int],
        states: Sequence[MtpProposerState],
        counts: list[int],
        before: list[int],
        slots: Slots | None,
        *,
        allowed: torch.Tensor | None = None,
    ) -> Callable[[], Drafts]:
        """As `chain`, not waited for: what is returned waits, and gives drafts and logprobs, one list a row, of which the
        first counts[i] mean something. before: rows that the states have. slots: of the rows after them, where known."""
        if self.runner.kind.at_once:
            return self.chain(tokens, hiddens, positions, states, counts).read
        leases = [state.lease for state in states]
        if slots is None:
            own = enumerate(zip(leases, before, counts, strict=True))
            apart = {place: self.pool.slots(lease, first, count) for place, (lease, first, count) in own}
            slots = [row[0] for row in apart.values()], apart
        rows = ChainRows(tokens, positions, before, counts, *slots, leases)
        hidden = hiddens if isinstance(hiddens, torch.Tensor) else stacked([hiddens])
        wait = self.runner.start_chain(max(counts), rows, hidden, self.pool.storage, allowed)
        if wait is not None:
            return wait
        return self.chain(tokens, hiddens, positions, states, counts, allowed=allowed).read

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

    def table(self, states: Sequence[MtpProposerState]) -> torch.Tensor:
        """int32[sequences, blocks of the longest]."""
        width = max(len(state.lease.blocks) for state in states)
        blocks: list[int] = []
        for state in states:
            blocks += state.lease.blocks
            blocks += [0] * (width - len(state.lease.blocks))  # beyond the sequence's length: never read
        return self.block.fill(blocks).view(len(states), width)


def stacked(parts: Sequence[Hiddens]) -> torch.Tensor:
    """All hiddens as one [n, H]; a single tensor is passed on as it is."""
    tensors = [part if isinstance(part, torch.Tensor) else _together(part) for part in parts]
    return tensors[0] if len(tensors) == 1 else torch.cat(tensors)


def _together(rows: Sequence[torch.Tensor]) -> torch.Tensor:
    return rows[0][None] if len(rows) == 1 else torch.stack(list(rows))
