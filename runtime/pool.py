"""The drafter's KV memory: paged storage, a free list, promises, and a ledger that always balances.

A block holds `block_size` rows of *every* state of the circuit: one block id addresses them all. Storage tensors
never move or grow, so compiled programs and device graphs may keep their addresses.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch

from circuitgraph.circuit.ir import Circuit, State
from circuitgraph.errors import Fault, RuntimeUseError
from circuitgraph.ops import TORCH_DTYPES


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


class Lease:
    """The blocks of one sequence, in row order, and how many the pool has promised it. Made by `BlockPool.open`."""

    def __init__(self, promised: int):
        self.blocks: list[int] = []
        self.version = 0
        """Of `blocks`: who copied them knows by it whether the copy is still true."""
        self.promised = promised

    @property
    def outstanding(self) -> int:
        """Promised blocks not taken yet."""
        return max(self.promised - len(self.blocks), 0)


class BlockPool:
    """Paged KV of one drafter on one device.

    Args:
        circuit: whose states are stored. One without states needs no blocks: any number of bytes gives none.
        blocks, memory_bytes: the size, in exactly one of the two.
        block_size: rows a block.

    Raises:
        RuntimeUseError: no size, two sizes, or a size below one block.
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
        self.block_size = block_size
        self.bytes_per_row = sum(state.bytes_per_row() for state in circuit.states)
        self.bytes_per_block = self.bytes_per_row * block_size
        self.total = self._size(blocks, memory_bytes)
        self.device = torch.device(device)
        self.storage: Mapping[str, tuple[torch.Tensor, torch.Tensor]] = MappingProxyType(
            {state.name: (self._allocate(state, state.dims[0]), self._allocate(state, state.dims[1])) for state in circuit.states}
        )
        """State name to (keys, values), each dtype[layers, blocks, heads, block_size, dim]."""
        self._free = list(reversed(range(self.total)))
        self._leases: set[Lease] = set()
        self._loaned: set[int] = set()
        self._owner: Any = lambda: None
        self._promised = 0  # kept as leases change: admission and growth look at it for every sequence of every step

    def _size(self, blocks: int | None, memory_bytes: int | None) -> int:
        if self.block_size < 1:
            raise RuntimeUseError(Fault("a block holds at least one row", subject="block_size", got=str(self.block_size)))
        if (blocks is None) == (memory_bytes is None):
            raise RuntimeUseError("a pool is sized either in blocks or in bytes: give one of blocks=, memory_bytes=")
        if blocks is None:
            if not self.bytes_per_block:
                return 0
            blocks = memory_bytes // self.bytes_per_block  # type: ignore[operator]
        if blocks < 1:
            expected = f"at least one block ({self.bytes_per_block} bytes)"
            raise RuntimeUseError(Fault("the pool would be empty", expected=expected, got=f"{memory_bytes or blocks}"))
        return blocks

    def _allocate(self, state: State, dim: int) -> torch.Tensor:
        shape = (state.layers, self.total, state.heads, self.block_size, dim)
        with torch.inference_mode(False):  # it outlives the mode of whoever makes it
            return torch.zeros(shape, dtype=TORCH_DTYPES[state.dtype], device=self.device)

    def claim(self, owner: Any) -> None:
        """Make `owner` the one user of this pool, for as long as it lives.

        Raises:
            RuntimeUseError: another one uses it.
        """
        current = self._owner()
        if current not in (None, owner):
            raise RuntimeUseError(Fault("the pool belongs to another proposer", got=repr(current), hint="Make a pool for each."))
        self._owner = weakref.ref(owner)

    # -- what there is -----------------------------------------------------------------------------------------

    def blocks_for(self, rows: int) -> int:
        """Blocks that `rows` rows of one sequence take."""
        return -(-rows // self.block_size)

    @property
    def bytes_per_token(self) -> int:
        """Bytes that a token of a sequence takes, whole blocks apart: it has one row."""
        return self.bytes_per_row

    def bytes_for(self, tokens: int) -> int:
        """Bytes that one sequence of `tokens` tokens takes, rounded up to whole blocks."""
        return self.blocks_for(tokens) * self.bytes_per_block

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
        """Storage slots (block * block_size + offset) of rows first..first+count-1."""
        size, blocks = self.block_size, lease.blocks
        index, offset = divmod(first, size)
        if count and offset + count <= size:  # in one block, as a propose's rows are as a rule
            start = blocks[index] * size + offset
            return range(start, start + count)
        return [blocks[row // size] * size + row % size for row in range(first, first + count)]

    # -- leases ------------------------------------------------------------------------------------------------

    def open(self, promised_rows: int = 0) -> Lease:
        """A lease without blocks; `promised_rows` rows are kept available for it until it is closed.

        Raises:
            PoolExhausted: the free blocks that nobody else was promised do not cover the promise.
        """
        lease = Lease(self.blocks_for(promised_rows))
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
        wanted = [(self._own(lease), max(self.blocks_for(rows) - len(lease.blocks), 0)) for lease, rows in needs]
        beyond = sum(max(count - lease.outstanding, 0) for lease, count in wanted)
        if beyond > len(self._free) - self._promised:
            return False
        for lease, count in wanted:
            self._set_blocks(lease, lease.blocks + [self._free.pop() for _ in range(count)])
        return True

    def shrink(self, lease: Lease, rows: int) -> None:
        """Give back the blocks that rows 0..rows-1 do not need."""
        keep = self.blocks_for(rows)
        blocks = self._own(lease).blocks
        if len(blocks) > keep:
            self._free.extend(reversed(blocks[keep:]))
            self._set_blocks(lease, blocks[:keep])

    def close(self, lease: Lease) -> None:
        """Give everything back, the promise too. Closing twice does nothing."""
        if lease in self._leases:
            self.shrink(lease, 0)
            self._leases.remove(lease)
            self._promised -= lease.outstanding

    def _set_blocks(self, lease: Lease, blocks: list[int]) -> None:
        before = lease.outstanding
        lease.blocks, lease.version = blocks, next(_VERSIONS)
        self._promised += lease.outstanding - before

    def _own(self, lease: Lease) -> Lease:
        if lease not in self._leases:
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
        lease.blocks, lease.version = [], next(_VERSIONS)
        self._promised += lease.outstanding - before
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
        self._set_blocks(lease, list(blocks))

    def free(self, blocks: Sequence[int]) -> None:
        """Give loaned blocks back.

        Raises:
            RuntimeUseError: a block that is not on loan: freed before, adopted, or never lent. Nothing is freed then.
        """
        self._check_loaned(blocks)
        self._loaned.difference_update(blocks)
        self._free.extend(reversed(blocks))

    def _check_loaned(self, blocks: Sequence[int]) -> None:
        stray = sorted(set(blocks) - self._loaned)
        if stray:
            raise RuntimeUseError(Fault(f"blocks {stray} are not on loan", hint="Were they given back before?"))
        if len(set(blocks)) != len(blocks):
            raise RuntimeUseError(Fault("a block is listed twice", got=str(list(blocks))))
