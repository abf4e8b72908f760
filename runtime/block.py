"""The rows of block drafters' calls: one of the target's newest hidden, then a block of each sequence."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch

from circuitgraph.ops import PagedKV

from .kinds import Block


def context_rows(kv: Mapping[str, PagedKV], slots: torch.Tensor) -> dict[str, PagedKV]:
    """Caches whose next row of each sequence is that of its newest hidden: slots[0]."""
    return {name: replace(cache, slot=slots[0]) for name, cache in kv.items()}


def block_rows(
    kind: Block, token: torch.Tensor, position: torch.Tensor, kv: Mapping[str, PagedKV], slots: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, dict[str, PagedKV]]:
    """(token, position, caches) of n x gamma rows, sequence by sequence, for the newest token of n sequences.

    slots int32[1 + gamma, n]: of the newest hidden's row and of the block's; -1 where a block ends early. Lengths of `kv` are
    the rows before the block; every row of a block sees all of that and the block to its end.
    """
    written = slots[1:].T.contiguous()  # [n, gamma]
    live = written >= 0
    ramp = torch.arange(kind.gamma, dtype=torch.int32, device=position.device)
    tokens = torch.where(ramp == 0, token[:, None], kind.mask) * live
    positions = (position[:, None] + ramp) * live
    count = live.sum(1, dtype=torch.int32)
    caches = {
        name: replace(
            cache,
            slot=written.flatten(),
            seq=cache.seq[:, None].expand_as(written).flatten(),
            length=((cache.length + count)[:, None] * live).flatten(),
        )
        for name, cache in kv.items()
    }
    return tokens.to(torch.int32).flatten(), positions.flatten(), caches


def ended(slots: torch.Tensor, steps: int) -> torch.Tensor:
    """bool[n, steps]: whether draft k has no row, its block having ended before."""
    return slots[2 : 2 + steps].T < 0
