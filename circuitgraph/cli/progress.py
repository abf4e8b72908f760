"""Progress on stderr: a bar on a terminal; elsewhere (a log, CI) a line now and then, so that long work is seen to go on."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from .common import notes

Report = Callable[[str, int, int], None]
"""(what is done now, steps done, steps in all)"""


LINE_SECONDS = 5.0
"""Between two lines."""


@contextmanager
def bar(title: str) -> Iterator[Report]:
    """A bar that long work reports to; it is gone when the work is done."""
    if not notes().is_terminal:
        yield _lines(title)
        return
    columns = (TextColumn("{task.fields[title]}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    what = TextColumn("{task.description}")
    with Progress(*columns, what, console=notes(), transient=True) as shown:
        task = shown.add_task("", total=None, title=title)
        yield lambda what, done, total: shown.update(task, description=what, completed=done, total=total)


def _lines(title: str) -> Report:
    started = told = time.monotonic()

    def report(what: str, done: int, total: int) -> None:
        nonlocal told
        now = time.monotonic()
        if now - told >= LINE_SECONDS:
            told = now
            notes().print(f"{title}: {done} of {total} after {now - started:.0f} s; {what}", markup=False, soft_wrap=True)

    return report


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
