"""Progress bars on stderr; silent where nobody watches."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from .common import notes

Report = Callable[[str, int, int], None]
"""(what is done now, steps done, steps in all)"""


@contextmanager
def bar(title: str) -> Iterator[Report]:
    """A bar that long work reports to; it is gone when the work is done."""
    columns = (TextColumn("{task.fields[title]}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    console, what = notes(), TextColumn("{task.description}")
    with Progress(*columns, what, console=console, transient=True, disable=not console.is_terminal) as shown:
        task = shown.add_task("", total=None, title=title)
        yield lambda what, done, total: shown.update(task, description=what, completed=done, total=total)


class CompileProgress:
    """The pipeline's observer. How much there is to do is known once the program has been checked."""

    STAGES_PER_PIECE = 5  # slice, specialize, fuse, schedule, place
    STAGES_PER_TARGET = 2  # lower, build; and pack in the end

    def __init__(self, report: Report, count_pieces: Callable[[Any], int], targets: int = 1):
        self.report, self.count_pieces, self.targets = report, count_pieces, targets
        self.done, self.total = 0, 1

    def __call__(self, stage: str, subject: str, result: Any, seconds: float) -> None:
        self.done += 1
        if stage == "check":
            each = self.STAGES_PER_PIECE * self.count_pieces(result) + self.STAGES_PER_TARGET
            self.total = self.done + self.targets * each + 1
        self.report(f"{stage} {subject}", self.done, max(self.total, self.done))
