"""What the commands share: how errors end, how values are spelled, where text goes."""

from __future__ import annotations

import functools
import json
import sys
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import typer
from rich import box
from rich.console import Console
from rich.table import Table

from ..errors import CircuitgraphError

Command = TypeVar("Command", bound=Callable[..., None])

MAX_WIDTH = 1024


UNBROKEN = 10_000
"""Columns of a pipe or file: what reads it wants whole lines, and a table is as wide as its content."""


def out() -> Console:
    """Results. Made anew for each use: tests and pipes replace sys.stdout."""
    return Console(file=sys.stdout, highlight=False, width=None if sys.stdout.isatty() else UNBROKEN)


def notes() -> Console:
    """Progress and remarks; standard output stays clean for scripts."""
    return Console(file=sys.stderr, highlight=False)


def table() -> Table:
    """A table that fits a terminal of 80 columns where its content does."""
    return Table(box=box.SIMPLE_HEAD, padding=(0, 0, 0, 1), show_edge=False)


def guarded(command: Command) -> Command:
    """Errors that the project raises on purpose become their faults on stderr and exit status 1, without a traceback."""

    @functools.wraps(command)
    def run(*args: Any, **kwargs: Any) -> None:
        try:
            command(*args, **kwargs)
        except CircuitgraphError as error:
            for fault in error.faults:
                print(f"error: {fault}", file=sys.stderr)
            raise typer.Exit(1) from None
        except OSError as error:  # a path that may not be read or written, a full disk
            print(f"error: {error}", file=sys.stderr)
            raise typer.Exit(1) from None

    return run  # type: ignore[return-value]


def print_json(data: Any) -> None:
    """One JSON document on standard output and nothing else."""
    typer.echo(json.dumps(data, indent=2))


def parse_widths(text: str, option: str = "'--widths'") -> tuple[int, ...]:
    """Widths as people write them, ascending, each once.

    >>> parse_widths("1-4,8")
    (1, 2, 3, 4, 8)

    Raises:
        typer.BadParameter: anything else than numbers from 1 to MAX_WIDTH, and ranges of them.
    """
    widths: set[int] = set()
    for part in text.split(","):
        first, dash, last = (piece.strip() for piece in part.partition("-"))
        if not first.isascii() or not first.isdigit() or (dash and not (last.isascii() and last.isdigit())):
            raise typer.BadParameter(f"'{part.strip()}' is neither a width nor a range; write widths as 1-4,8", param_hint=option)
        low, high = int(first), int(last) if dash else int(first)
        if low > high:
            raise typer.BadParameter(f"the range '{part.strip()}' runs backwards; write {high}-{low}", param_hint=option)
        if low < 1 or high > MAX_WIDTH:
            raise typer.BadParameter(f"widths lie between 1 and {MAX_WIDTH}, got '{part.strip()}'", param_hint=option)
        widths.update(range(low, high + 1))
    return tuple(sorted(widths))


def parse_formats(items: Sequence[str]) -> dict[str, str]:
    """`--quantize name=format` options.

    Raises:
        typer.BadParameter: an item without '=', or one name twice.
    """
    formats: dict[str, str] = {}
    for item in items:
        name, equals, value = (piece.strip() for piece in item.partition("="))
        if not equals or not name or not value:
            raise typer.BadParameter(f"'{item}' does not say NAME=FORMAT", param_hint="'--quantize'")
        if name in formats:
            raise typer.BadParameter(f"'{name}' is given twice", param_hint="'--quantize'")
        formats[name] = value
    return formats


def parse_switches(items: Sequence[str]) -> dict[str, bool | str]:
    """`--set name=value` options; true and false become booleans.

    Raises:
        typer.BadParameter: an item without '=', or one switch set twice.
    """
    switches: dict[str, bool | str] = {}
    for item in items:
        name, equals, value = (piece.strip() for piece in item.partition("="))
        if not equals or not name or not value:
            raise typer.BadParameter(f"'{item}' does not say switch=value", param_hint="'--set'")
        if name in switches:
            raise typer.BadParameter(f"switch '{name}' is set twice", param_hint="'--set'")
        switches[name] = {"true": True, "false": False}.get(value, value)
    return switches
