"""Which compiled programs serve n rows when none has exactly n."""

from __future__ import annotations

from functools import lru_cache


@lru_cache(maxsize=4096)
def cover(n: int, widths: tuple[int, ...]) -> tuple[int, ...]:
    """The fewest programs whose widths sum to at least n, and among those the smallest sum; widest first.

    Only the last part can have idle rows, and it has at least one real one.

    >>> cover(5, (1, 2, 4)), cover(7, (1, 2, 3, 4, 8)), cover(9, (4, 5, 8))
    ((4, 1), (8,), (5, 4))
    """
    if n in widths:
        return (n,)
    widest = max(widths)
    # Far from the end the widest is never wrong: it leaves the count at ceil(n / widest), which is the least.
    whole = max((n - 4 * widest) // widest, 0)
    rest = n - whole * widest
    # best[rows] = (programs, sum of widths, the widths) for the last `rows` rows.
    best: list[tuple[int, int, tuple[int, ...]]] = [(0, 0, ())]
    for rows in range(1, rest + 1):
        options = []
        for width in widths:
            count, total, parts = best[max(rows - width, 0)]
            options.append((count + 1, total + width, tuple(sorted((*parts, width), reverse=True))))
        best.append(min(options))
    return (widest,) * whole + best[rest][2]
