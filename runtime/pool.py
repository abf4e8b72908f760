"""The drafter's KV memory: paged storage, a free list, promises, and a ledger that always balances.

A block holds `block_size` rows of *every* state of the circuit: one block id addresses them all. Storage tensors
never move or grow, so compiled programs and device graphs may keep their addresses.
"""

from __future__ import annotations

import itertools
import logging
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch

from circuitgraph.circuit.ir import Circuit, State
from circuitgraph.errors import Fault, RuntimeUseError
from circuitgraph.ops import TORCH_DTYPES

from .arguments import device_of, is_whole, of_kind, shown, whole

if TYPE_CHECKING:
    from .runner import DraftRunner

log = logging.getLogger("circuitgraph.runtime")


class PoolExhausted(RuntimeUseError):
    """Admission refused: the pool cannot promise what was asked for."""


@dataclass(frozen=True)
class Ledger:
    """Where every block is. `promised` counts free blocks that are spoken for; it is a part of `free`."""

    total: int
    free: int
    held: int
    loaned: int
    promised: int

    @property
    def balances(self) -> bool:
        return self.free + self.held + self.loaned == self.total and 0 <= self.promised <= self.free


_VERSIONS = itertools.count(1)
WHERE = "BlockPool"
"""In errors."""


class Lease:
    """The blocks of one sequence, in row order, and how many the pool has promised it. Made by `BlockPool.open`."""

    def __init__(self, promised: int):
        self.blocks: list[int] = []
        self.version = 0
        """Of `blocks`: who copied them knows by it whether the copy is still true."""
        self.since = 0
        """The version that was copied last; of its blocks, the leading `steady` ones are still there."""
        self.steady = 0
        self.promised = promised

    @property
    def outstanding(self) -> int:
        """Promised blocks not taken yet."""
        return max(self.promised - len(self.blocks), 0)

    def copied(self) -> None:
        """`blocks` were copied as they are."""
        self.since, self.steady = self.version, len(self.blocks)


def _call_all(callbacks: Mapping[Any, Callable[[], None]]) -> None:
    for callback in list(callbacks.values()):
        callback()


class BlockPool:
    """Paged KV of one drafter on one device.

    Args:
        circuit: whose states are stored. One without states needs no blocks: any number of bytes gives none.
        blocks, memory_bytes: the size, in exactly one of the two.
        block_size: rows a block.

    Raises:
        RuntimeUseError: no size, two sizes, a size below one block, or more than there is memory for.
    """

    def __init__(
        self,
        circuit: Circuit,
        *,
        blocks: int | None = None,
        memory_bytes: int | None = None,
        block_size: int = 16,
        device: torch.device | str = "cpu",
    ):
        of_kind(circuit, Circuit, "circuit", WHERE, "a Circuit")
        self.block_size = whole(block_size, "block_size", WHERE, least=1, message="a block holds at least one row")
        self.bytes_per_row = sum(state.bytes_per_row() for state in circuit.states)
        self.bytes_per_block = self.bytes_per_row * block_size
        self.total = self._size(blocks, memory_bytes)
        self.device = device_of(device, WHERE)
        self.storage: Mapping[str, tuple[torch.Tensor, torch.Tensor]] = MappingProxyType(
            {state.name: (self._allocate(state, state.dims[0]), self._allocate(state, state.dims[1])) for state in circuit.states}
        )
        """State name to (keys, values), each dtype[layers, blocks, heads, block_size, dim]."""
        self._free = list(reversed(range(self.total)))
        self._leases: set[Lease] = set()
        self._loaned: set[int] = set()
        self._owner: weakref.ref[Any] | None = None
        self._releases: weakref.WeakKeyDictionary[Any, Callable[[], None]] = weakref.WeakKeyDictionary()
        weakref.finalize(self, _call_all, self._releases)
        self._promised = 0  # kept as leases change: admission and growth look at it for every sequence of every step

    def _size(self, blocks: int | None, memory_bytes: int | None) -> int:
        if (blocks is None) == (memory_bytes is None):
            raise RuntimeUseError("a pool is sized either in blocks or in bytes: give one of blocks=, memory_bytes=")
        if blocks is None:
            if not self.bytes_per_block:
                whole(memory_bytes, "memory_bytes", WHERE, message="is no size")
                return 0
            blocks = whole(memory_bytes, "memory_bytes", WHERE, message="is no size") // self.bytes_per_block
        if whole(blocks, "blocks", WHERE, message="is no size") < 1:
            expected = f"at least one block ({self.bytes_per_block} bytes)"
            got = str(blocks if memory_bytes is None else memory_bytes)
            raise RuntimeUseError(Fault("the pool would be empty", where=WHERE, expected=expected, got=got))
        return blocks

    def _allocate(self, state: State, dim: int) -> torch.Tensor:
        shape = (state.layers, self.total, state.heads, self.block_size, dim)
        try:
            with torch.inference_mode(False):  # it outlives the mode of whoever makes it
                return torch.zeros(shape, dtype=TORCH_DTYPES[state.dtype], device=self.device)
        except (RuntimeError, AssertionError, TypeError, OverflowError) as problem:  # no memory, no such GPU, no such number
            got = f"{self.total} blocks of {self.bytes_per_block} bytes"
            reason = str(problem).partition("\n")[0]
            fault = Fault(f"cannot be allocated on {self.device}: {reason}", where=WHERE, subject=state.name, got=got)
            raise RuntimeUseError(fault) from problem

    def claim(self, owner: Any) -> None:
        """Make `owner` the one user of this pool, for as long as it lives. What an owner that is gone left behind comes back.

        Raises:
            RuntimeUseError: another one uses it.
        """
        current = self._owner() if self._owner else None
        if current not in (None, owner):
            fault = Fault("the pool belongs to another proposer", where=WHERE, got=repr(current), hint="Make a pool for each.")
            raise RuntimeUseError(fault)
        if self._owner and current is None:
            self._reclaim()
        self._owner = weakref.ref(owner)

    def _reclaim(self) -> None:
        """What the owner left behind: nobody can free it, since states and carried KV name an owner that is gone."""
        left = len(self._leases), self.held, len(self._loaned)
        for lease in list(self._leases):
            self.close(lease)
        self._free.extend(sorted(self._loaned, reverse=True))
        self._loaned.clear()
        if any(left):
            log.warning("a proposer went without freeing %d states: %d blocks held, %d lent came back", *left)

    def used_by(self, runner: DraftRunner) -> None:
        """`runner` is told, once, when this pool's storage is no longer used."""
        if not callable(getattr(runner, "release", None)):
            raise RuntimeUseError(Fault("is none", where=WHERE, subject="runner", expected="a DraftRunner", got=shown(runner)))
        if runner not in self._releases:
            self._releases[runner] = runner.release(self.storage)

    # -- what there is -----------------------------------------------------------------------------------------

    def blocks_for(self, rows: int) -> int:
        """Blocks that `rows` rows of one sequence take."""
        return self._blocks(whole(rows, "rows", WHERE))

    def _blocks(self, rows: int) -> int:
        return -(-rows // self.block_size)

    @property
    def bytes_per_token(self) -> int:
        """Bytes that a token of a sequence takes, whole blocks apart: it has one row."""
        return self.bytes_per_row

    def bytes_for(self, tokens: int) -> int:
        """Bytes that one sequence of `tokens` tokens takes, rounded up to whole blocks."""
        return self._blocks(whole(tokens, "tokens", WHERE)) * self.bytes_per_block

    @property
    def ledger(self) -> Ledger:
        return Ledger(
            total=self.total,
            free=len(self._free),
            held=sum(len(lease.blocks) for lease in self._leases),
            loaned=len(self._loaned),
            promised=sum(lease.outstanding for lease in self._leases),
        )

    @property
    def held(self) -> int:
        """Blocks that sequences hold."""
        return self.total - len(self._free) - len(self._loaned)

    def room(self, lease: Lease) -> int:
        """Rows that the lease can hold now, those it has among them."""
        beyond = max(len(self._free) - self._promised, 0)
        return (len(self._own(lease).blocks) + lease.outstanding + beyond) * self.block_size

    def slots(self, lease: Lease, first: int, count: int) -> Sequence[int]:
        """Storage slots (block * block_size + offset) of rows first..first+count-1, which the lease holds: not checked."""
        blocks, size = lease.blocks, self.block_size
        return [blocks[row // size] * size + row % size for row in range(first, first + count)]

    def slots_of(self, leases: Sequence[Lease], firsts: Sequence[int], count: int) -> tuple[list[int], dict[int, Sequence[int]]]:
        """Slots of `count` rows of each lease, from row firsts[i] on, which the lease holds: not checked. The first one's of
        each lease, and all of those leases, by place, whose rows go over to another block."""
        size, starts, apart = self.block_size, [], {}
        for lease, first in zip(leases, firsts, strict=True):
            offset = first % size
            if offset + count > size:
                apart[len(starts)] = self.slots(lease, first, count)
            starts.append(lease.blocks[first // size] * size + offset)
        return starts, apart

    # -- leases ------------------------------------------------------------------------------------------------

    def open(self, promised_rows: int = 0) -> Lease:
        """A lease without blocks; `promised_rows` rows are kept available for it until it is closed.

        Raises:
            PoolExhausted: the free blocks that nobody else was promised do not cover the promise.
        """
        lease = Lease(self._blocks(whole(promised_rows, "promised_rows", WHERE)))
        available = len(self._free) - self._promised
        if lease.promised > available:
            raise PoolExhausted(
                Fault(
                    f"the drafter's KV pool cannot promise {promised_rows} rows",
                    expected=f"at most {available * self.block_size} ({available} of {self.total} blocks are unpromised)",
                    got=f"{lease.promised} blocks of {self.block_size} rows",
                    hint="Admit the sequence later, give it a smaller budget, or size the pool larger.",
                )
            )
        self._leases.add(lease)
        self._promised += lease.promised
        return lease

    def grow(self, needs: Sequence[tuple[Lease, int]]) -> bool:
        """Give every lease the blocks for so many rows: all of them, or, returning False, nothing.

        A lease's own promise is honoured first; beyond it, only blocks that nobody was promised are given.
        """
        try:
            needs = [(lease, whole(rows, "rows", WHERE)) for lease, rows in needs]
        except (TypeError, ValueError) as problem:
            if isinstance(problem, RuntimeUseError):
                raise
            fault = Fault("are none", where=WHERE, subject="needs", expected="pairs (lease, rows)", got=shown(needs))
            raise RuntimeUseError(fault) from None
        return self._take([(self._own(lease), self._blocks(rows) - len(lease.blocks)) for lease, rows in needs])

    def cover(self, leases: Sequence[Lease], rows: Sequence[int], more: int) -> bool:
        """As `grow`, for `more` rows beyond rows[i] of each lease. Nothing is checked: part of every propose."""
        size, wanted = self.block_size, []
        for lease, held in zip(leases, rows, strict=True):
            lacks = held + more - len(lease.blocks) * size
            if lacks > 0:
                wanted.append((lease, -(-lacks // size)))
        return not wanted or self._take(wanted)

    def _take(self, wanted: Sequence[tuple[Lease, int]]) -> bool:
        """So many free blocks to each lease: all or, returning False, none."""
        free = self._free
        beyond = sum([max(count - lease.outstanding, 0) for lease, count in wanted])
        if beyond > len(free) - self._promised:
            return False
        try:
            for lease, count in wanted:
                if count > 0:
                    before = lease.outstanding
                    lease.blocks += [free.pop() for _ in range(count)]
                    self._changed(lease, before)
        except BaseException:
            self._recount()
            raise
        return True

    def shrink(self, lease: Lease, rows: int) -> None:
        """Give back the blocks that rows 0..rows-1 do not need."""
        keep = self._blocks(whole(rows, "rows", WHERE))
        blocks = self._own(lease).blocks
        if len(blocks) > keep:
            lease.steady = min(lease.steady, keep)
            before, dropped = lease.outstanding, blocks[keep:]
            try:
                del blocks[keep:]
                self._free.extend(reversed(dropped))
                self._changed(lease, before)
            except BaseException:
                self._recount()
                raise

    def close(self, lease: Lease) -> None:
        """Give everything back, the promise too. Closing twice does nothing."""
        of_kind(lease, Lease, "lease", WHERE, "a Lease of `open`")
        if lease in self._leases:
            self.shrink(lease, 0)
            self._leases.remove(lease)
            self._promised -= lease.outstanding

    def _recount(self) -> None:
        """After an interrupt between two lines: what is free and promised follows from who has what."""
        taken = {block for lease in self._leases for block in lease.blocks} | self._loaned
        self._free[:] = [block for block in reversed(range(self.total)) if block not in taken]
        self._promised = sum(lease.outstanding for lease in self._leases)
        for lease in self._leases:
            lease.version = next(_VERSIONS)

    def _changed(self, lease: Lease, before: int) -> None:
        """The lease has other blocks than when `before` were outstanding."""
        lease.version = next(_VERSIONS)
        self._promised += lease.outstanding - before

    def _own(self, lease: Lease) -> Lease:
        if not isinstance(lease, Lease) or lease not in self._leases:
            raise RuntimeUseError("this lease was closed, or belongs to another pool")
        return lease

    # -- loans -------------------------------------------------------------------------------------------------

    def lend(self, lease: Lease) -> list[int]:
        """Move the lease's blocks out of it, into the caller's hands (a conversation between two turns).

        What the lease was promised shrinks by as many blocks: nobody else's free blocks can stand in for them.
        """
        blocks = self._own(lease).blocks
        before = lease.outstanding
        lease.promised -= min(len(blocks), lease.promised)
        lease.blocks, lease.steady = [], 0
        self._changed(lease, before)
        self._loaned.update(blocks)
        return blocks

    def adopt(self, lease: Lease, blocks: Sequence[int]) -> None:
        """Inverse of `lend`, into a lease without blocks.

        Raises:
            RuntimeUseError: blocks that are not on loan, or a lease that holds some already.
        """
        if self._own(lease).blocks:
            raise RuntimeUseError(Fault("the lease already holds blocks", got=str(len(lease.blocks)), expected="none"))
        self._check_loaned(blocks)
        self._loaned.difference_update(blocks)
        before = lease.outstanding
        lease.blocks = list(blocks)
        self._changed(lease, before)

    def free(self, blocks: Sequence[int]) -> None:
        """Give loaned blocks back.

        Raises:
            RuntimeUseError: a block that is not on loan: freed before, adopted, or never lent. Nothing is freed then.
        """
        self._check_loaned(blocks)
        self._loaned.difference_update(blocks)
        self._free.extend(reversed(blocks))

    def _check_loaned(self, blocks: Sequence[int]) -> None:
        if not isinstance(blocks, Sequence) or not all(map(is_whole, blocks)):
            raise RuntimeUseError(Fault("are none", where=WHERE, subject="blocks", expected="a list of ints", got=shown(blocks)))
        stray = sorted(set(blocks) - self._loaned)
        if stray:
            raise RuntimeUseError(Fault(f"blocks {stray} are not on loan", hint="Were they given back before?"))
        if len(set(blocks)) != len(blocks):
            raise RuntimeUseError(Fault("a block is listed twice", got=str(list(blocks))))
