"""Where the rows of a device-form call go, computed on the device: accept counts never reach the host.

Every sequence has a *cell* on the device, int32[3]: the rows it had before its last propose, the position of that propose's
own token, and how many drafts it made whose verify is not accounted for yet.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

from .trim import TRIM

CELL = 3


class Placed(NamedTuple):
    """Addressing of the rows to run, and the cells after them. All int32; slot is -1 for a row that is left out."""

    position: torch.Tensor
    length: torch.Tensor
    slot: torch.Tensor
    live: torch.Tensor
    cells: torch.Tensor


def place_chain(
    cells: torch.Tensor,
    accepted: torch.Tensor | None,
    position: torch.Tensor,
    counts: torch.Tensor,
    table: torch.Tensor,
    *,
    steps: int,
    trim: str,
    block_size: int,
    limit: int | None,
) -> Placed:
    """Rows of a propose of counts[i] <= steps drafts at position[i]: slot and live [steps, n], position and length [n]."""
    rows, _, _ = _accounted(cells, accepted, trim)
    step = torch.arange(steps, dtype=torch.int32, device=cells.device)[:, None]
    live = step < counts
    if limit is not None:
        live = live & (position + step < limit)
    slot = _slots(table, rows + step, live, block_size)
    first = live[0]
    after = torch.stack([rows, position, live.sum(0, dtype=torch.int32)], dim=1)
    return Placed(position * first, (rows + 1) * first, slot, live, after)


def place_block(
    place_chain: Callable[..., Placed],
    gamma: int,
    cells: torch.Tensor,
    accepted: torch.Tensor | None,
    position: torch.Tensor,
    counts: torch.Tensor,
    table: torch.Tensor,
    *,
    steps: int,
    trim: str,
    block_size: int,
    limit: int | None,
) -> Placed:
    """As `place_chain`, of block drafters: slot and live [1 + gamma, n], of the newest hidden's row and of the block's.

    A block has its rows whatever `counts` and `steps` are; without a draft below the limit there is none.
    """
    drafts = counts > 0
    if limit is not None:
        drafts = drafts & (position + 1 < limit)
    rows = drafts * (1 + gamma)
    where = {"steps": 1 + gamma, "trim": trim, "block_size": block_size, "limit": limit}
    placed = place_chain(cells, accepted, position - 1, rows.to(torch.int32), table, **where)
    drafted = torch.minimum(counts, placed.live.sum(0, dtype=torch.int32) - 2).clamp(min=0)
    after = torch.stack([placed.cells[:, 0], position, drafted], dim=1)
    return placed._replace(position=position * drafts, cells=after)


def place_accepted(
    cells: torch.Tensor,
    accepted: torch.Tensor,
    table: torch.Tensor,
    *,
    first: int,
    columns: int,
    trim: str,
    block_size: int,
    limit: int | None,
) -> Placed:
    """Rows of the tokens at `first`.. after each propose's own: those that the verify left missing. All [n, columns]."""
    rows, start, taken = _accounted(cells, accepted, trim)
    kept = rows - cells[:, 0]
    lowest = start + kept.clamp(min=first)
    highest = start + taken
    if limit is not None:
        highest = highest.clamp(max=limit - 1)
    position = start[:, None] + torch.arange(first, first + columns, dtype=torch.int32, device=cells.device)
    live = (position >= lowest[:, None]) & (position <= highest[:, None])
    row = rows[:, None] + position - lowest[:, None]
    slot = _slots(table, row.T, live.T, block_size).T
    after = torch.stack([rows + live.sum(1, dtype=torch.int32), start + taken, torch.zeros_like(rows)], dim=1)
    return Placed(position * live, (row + 1) * live, slot, live, after)


def _accounted(cells: torch.Tensor, accepted: torch.Tensor | None, trim: str) -> tuple[torch.Tensor, ...]:
    """Rows that stay of each sequence, the position of its last propose, and how many drafts of it were accepted."""
    rows, start, drafted = cells.unbind(1)
    if accepted is None:
        return rows, start, torch.zeros_like(rows)
    taken = torch.minimum(accepted.clamp(min=0), drafted)
    kept = TRIM[trim](drafted, taken)
    return rows + torch.where(drafted > 0, kept, torch.zeros_like(rows)), start, taken  # type: ignore[call-overload]


def _slots(table: torch.Tensor, row: torch.Tensor, live: torch.Tensor, block_size: int) -> torch.Tensor:
    """Storage slots of row[k, i] of sequence i, -1 where it is left out."""
    block = (row // block_size).clamp(0, table.shape[1] - 1)
    found = torch.gather(table.T, 0, block.long()) * block_size + row % block_size
    return torch.where(live, found, torch.full_like(found, -1)).to(torch.int32)
