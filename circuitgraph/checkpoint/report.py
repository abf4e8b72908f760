"""The account of a binding as text: what every tensor is used for, and why those that are not may stay unused."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from .account import ReportRow


def format_report(rows: Sequence[ReportRow]) -> str:
    """A line a tensor, in columns, and a line that counts them."""
    table = [(row.status, row.source, row.tensor, row.type, _purpose(row)) for row in rows]
    widths = [max((len(line[column]) for line in table), default=0) for column in range(4)]
    lines = []
    for *cells, purpose in table:
        padded = [cell.ljust(width) for cell, width in zip(cells, widths, strict=True)]
        lines.append("  ".join([*padded, purpose]).rstrip())
    return "\n".join([*lines, summary(rows)]) + "\n"


def summary(rows: Sequence[ReportRow]) -> str:
    """`12 tensors used, 2 borrowed, 1 waived`."""
    counts = Counter(row.status for row in rows)
    first, *rest = counts.items()
    return ", ".join([f"{first[1]} tensors {first[0]}", *(f"{count} {status}" for status, count in rest)])


def _purpose(row: ReportRow) -> str:
    if not row.weight:
        return row.reason
    return f"{row.weight}: {row.reason}" if row.reason else row.weight
