"""Tables of measurements: data first, and how a terminal shows them without any package."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any


def microseconds(value: float) -> str:
    return f"{value:.1f}" if value < 10_000 else f"{value:.0f}"


def ratio(value: float) -> str:
    return f"{value:.2f}x"


def percent(value: float) -> str:
    return f"{value:.1%}"


@dataclass(frozen=True)
class Column:
    """One column of a table: `key` of the rows; where a row lacks it, the cell is empty."""

    header: str
    key: str
    show: Callable[[Any], str] = str


FLOOR = (
    Column("MB", "bytes", lambda value: f"{value / 1e6:.0f}"),
    Column("GFLOP", "flops", lambda value: f"{value / 1e9:.1f}"),
    Column("experts", "experts"),
    Column("of read", "of_read", percent),
    Column("floor us", "floor_us", microseconds),
    Column("of floor", "of_floor", percent),
)
"""Of steps: what they move and multiply, and what that takes at the ceilings; see `Ceiling.shares`."""


@dataclass(frozen=True)
class Section:
    """One table. `said` tells what was compared with what; rows keep full precision and units in their keys."""

    title: str
    said: str
    columns: tuple[Column, ...] = field(repr=False)
    rows: tuple[Mapping[str, Any], ...]

    def shown(self) -> list[Column]:
        """The columns that some row fills."""
        return [column for column in self.columns if any(column.key in row for row in self.rows)]

    def cells(self) -> list[list[str]]:
        shown = self.shown()
        return [[column.show(row[column.key]) if column.key in row else "" for column in shown] for row in self.rows]

    def to_json(self) -> dict[str, Any]:
        return {"title": self.title, "said": self.said, "rows": [dict(row) for row in self.rows]}


def plain_table(headers: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Right-aligned columns under their headers.

    >>> print(plain_table(["n", "us"], [["1", "405.0"], ["16", "440.0"]]))
     n     us
     1  405.0
    16  440.0
    """
    table = [list(headers), *map(list, rows)]
    widths = [max(len(row[index]) for row in table) for index in range(len(headers))]
    return "\n".join("  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in table)
