"""Which tests there are for an artifact, and what a record has to say about them. Needs no GPU and no artifacts."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Any

Functions = Mapping[str, tuple[str, int]]
"""The programs of an artifact: symbol to (entry, rows)."""

SMALL = ("odd_bf16", "narrow_bf16")
"""Artifacts that NVIDIA's sanitizer gets to see: it takes a hundred times as long."""

ALONE = {"product": "products_", "mixture": "mixture_", "direct": "direct_"}
"""What the names of artifacts begin with that the tests of runners leave out: some products, the FFN of a mixture of experts, and
what is called function by function. Of the latter, tests that name them drive the fixtures' drafters through the proposer."""

LIFECYCLE = "lifecycle_f32"

BENCHED = ("dense8b",)
"""Artifacts that lie beside the others for the bench alone."""

NOT_RUN: tuple[str, ...] = ()
"""Cases that have not all run on a GPU yet: the record need not have them. To be shortened by the next run."""

MAY_SKIP = {
    "test_devices.py::test_a_second_gpu[few_bf16]": "needs two GPUs",
    "test_devices.py::test_a_second_gpu[odd_f32]": "needs two GPUs",
    "test_devices.py::test_a_second_gpu[wide_bf16]": "needs two GPUs",
}
"""All tests that a record may have as skipped, and why."""


def units(fixture: str, name: str, functions: Functions) -> list[tuple[str, tuple[Any, ...]]]:
    """(id, values after the artifact's folder) of what `fixture` stands for with one artifact: `artifact` itself, only a
    `golden` or `small` one, every `program`, or every way to `call` it; of those that are no drafters, every `product` or
    `mixture`, of those that are called function by function, every `direct` program."""
    alone = next((kind for kind, start in ALONE.items() if name.startswith(start)), None)
    if alone != (fixture if fixture in ALONE else None):
        return []
    if fixture in ("program", *ALONE):
        return [(f"{name}-{symbol}", pair) for symbol, pair in functions.items()]
    if fixture == "entry":
        return [(f"{name}-{entry}", (entry,)) for entry in (*dict.fromkeys(entry for entry, _ in functions.values()), "chain")]
    wanted = {"artifact": True, "golden": name.startswith("fixture_"), "small": name in SMALL}
    return [(name, ())] if wanted[fixture] else []


FIXTURES = ("artifact", "golden", "small", "program", "entry", *ALONE)


def tests_of(name: str, functions: Functions) -> Iterator[str]:
    """The ids of all tests that an artifact has."""
    for test, function in _functions():
        for fixture in FIXTURES:
            if fixture in inspect.signature(function).parameters:
                for unit, _ in units(fixture, name, functions):
                    yield from _ids(test, [unit], function)


def tests_without_artifact() -> Iterator[str]:
    for test, function in _functions():
        if not set(FIXTURES) & set(inspect.signature(function).parameters):
            yield from _ids(test, [], function)


def artifact_of(test: str) -> str:
    """What the first of a test's parameters names."""
    return test.partition("[")[2].rstrip("]").split("-")[0]


def passed(outcomes: Mapping[str, str], tests: Iterable[str]) -> bool:
    return all(outcomes.get(test) == "passed" or (outcomes.get(test) == "skipped" and test in MAY_SKIP) for test in tests)


def recorded(outcomes: Mapping[str, str], artifacts: Mapping[str, Functions]) -> list[str]:
    """The artifacts whose generated code may be recorded: all their tests have run, and passed."""
    lifecycle = [test for test in tests_without_artifact() if test.startswith("test_lifecycle.py::")]
    names = []
    for name, functions in artifacts.items():
        tests = [*tests_of(name, functions), *(lifecycle if name == LIFECYCLE else ())]
        named = [test for test in (*tests_without_artifact(), *outcomes) if artifact_of(test) == name]
        if passed(outcomes, [*tests, *named]):
            names.append(name)
    return names


def _functions() -> Iterator[tuple[str, Any]]:
    """(file::name, function) of every test."""
    for file in sorted(Path(__file__).parent.glob("test_*.py")):
        module = importlib.import_module(f"{__package__}.{file.stem}")
        for name, function in vars(module).items():
            if name.startswith("test_") and inspect.isfunction(function) and function.__module__ == module.__name__:
                yield f"{file.name}::{name}", function


def _ids(test: str, first: Sequence[str], function: Any) -> Iterator[str]:
    """As pytest makes them: generated parameters first, then those of the marks, the closest first."""
    marks = [mark for mark in getattr(function, "pytestmark", []) if mark.name == "parametrize"]
    for values in product(*(mark.args[1] for mark in marks)):
        parts = [*first, *map(str, values)]
        yield f"{test}[{'-'.join(parts)}]" if parts else test
