"""What every refusal of the project looks like: where, what was expected, what came, what to do.

Stages collect `Fault`s and raise them together, so one run shows every fault of a file.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Location:
    """A place in a text file; `line` and `column` count from 1."""

    file: str
    line: int | None = None
    column: int | None = None

    def __str__(self) -> str:
        return self.file if self.line is None else f"{self.file}:{self.line}"


@dataclass(frozen=True)
class Fault:
    """One thing that is wrong, told so that a reader can mend it without reading our source."""

    message: str
    where: Location | str | None = None
    subject: str | None = None
    expected: str | None = None
    got: str | None = None
    hint: str | None = None

    def __str__(self) -> str:
        head = ": ".join(str(part) for part in (self.where, self.subject) if part)
        text = f"{head}: {self.message}" if head else self.message
        if self.expected is not None:
            text += f"; expected {self.expected}"
        if self.got is not None:
            text += f"; got {self.got}"
        if self.hint:
            text += f". {self.hint}"
        return text


class CircuitgraphError(Exception):
    """Base of every error that the project raises on purpose. `faults` holds at least one."""

    def __init__(self, faults: Fault | str | Iterable[Fault]):
        if isinstance(faults, str):
            faults = Fault(faults)
        self.faults: tuple[Fault, ...] = (faults,) if isinstance(faults, Fault) else tuple(faults)
        super().__init__("\n".join(str(fault) for fault in self.faults))


class ProgramError(CircuitgraphError):
    """A program, block or family file that does not load, resolve or type-check."""


class CircuitError(CircuitgraphError):
    """An intermediate form that its verifier refuses: a fault of the compiler or of a hand-made graph."""


class ScheduleError(CircuitgraphError):
    """A schedule file that does not load, or a group that no rule accepts."""


class CheckpointError(CircuitgraphError):
    """A checkpoint whose config or tensors do not fit the program."""


class BuildError(CircuitgraphError):
    """Code generation or the system compiler failed."""


class ArtifactError(CircuitgraphError):
    """An artifact that cannot be written, read or trusted here."""


class RuntimeUseError(CircuitgraphError, ValueError):
    """A call of the runtime with arguments that cannot be served. Nothing was changed by it."""


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """'Did you mean x?' for a near miss, else the list of what there is."""
    options: Sequence[str] = sorted(set(known))
    many = len(options) > _MANY
    close = _close_by_kind(name, options) if many else difflib.get_close_matches(name, options, n=1)
    if close:
        return f"Did you mean '{close[0]}'?"
    return f"Known: {', '.join(options)}." if options and not many else ""


_MANY = 1000
"""More names than somebody reads; to compare each of a large checkpoint's with another takes seconds."""


def _close_by_kind(name: str, options: Sequence[str]) -> list[str]:
    """Of names that differ in their numbers alone one is compared; the one with the most numbers in common is then named."""
    kinds: dict[str, list[str]] = {}
    for option in options:
        kinds.setdefault(_NUMBER.sub("0", option), []).append(option)
    close = difflib.get_close_matches(_NUMBER.sub("0", name), kinds, n=1)
    wanted = _NUMBER.findall(name)

    def common(option: str) -> int:
        return sum(one == other for one, other in zip(wanted, _NUMBER.findall(option), strict=False))

    return [max(kinds[kind], key=common) for kind in close]


_NUMBER = re.compile(r"\d+")
