"""The lifecycle against a dense cache: random interleavings (`machine`) on the reference and on compiled programs, for a head
that drafts step by step, and, shorter, for the other kinds of drafters."""

from __future__ import annotations

import functools
import json
import tempfile
from collections import Counter
from pathlib import Path

import pytest

import circuitgraph
from circuitgraph.runtime import DraftRunner, ReferenceRunner, load
from tests.cli.conftest import TINY
from tests.runtime import families
from tests.runtime.dense import KEPT
from tests.runtime.helpers import drafter
from tests.runtime.machine import LIMIT, machine_of


@functools.cache
def reference() -> tuple[DraftRunner, DraftRunner]:
    whole = drafter()
    short = {name: tensor[:LIMIT] if name.startswith("rope.") else tensor for name, tensor in whole.weights.items()}
    runner = ReferenceRunner(whole.circuit, short)
    return runner, runner


@functools.cache
def compiled() -> tuple[DraftRunner, DraftRunner]:
    """Programs for 1 and 2 rows, so that 3 and 4 run in two parts, and prompts in chunks of 8 rows."""
    folder = Path(tempfile.mkdtemp())
    config = folder / "config.json"
    config.write_text(json.dumps(TINY))
    entries = ("draft", "draft_masked", "context")
    out = folder / "head"
    circuitgraph.compile("auto", model=config, out=out, widths=(2,), context_rows=(8,), entries=entries, wt="f32")
    runner = load(out, max_position=LIMIT, threads=1)
    return runner, ReferenceRunner(runner.circuit, runner.weights)


RUNNERS = {"Reference": (reference, 1000), "Compiled": (compiled, 2800)}
CASES = [
    machine_of(f"{name}{trim.title()}", make, operations, trim=trim)
    for trim in KEPT
    for name, (make, operations) in RUNNERS.items()
]


def family(name: str, kind: str) -> tuple[DraftRunner, DraftRunner]:
    runner = families.RUNNERS[kind](name, LIMIT)
    return runner, ReferenceRunner(runner.circuit, runner.weights)


FAMILIES = [
    machine_of(f"{kind}_{name}_{trim}", functools.partial(family, name, kind), 1600, trim=trim)
    for name, kind in families.CASES
    for trim in (("exact", "valid", "seed") if (name, kind) == ("eagle3_llama", "reference") else ("exact",))
    if name != "eagle1_llama"  # as the others above, and in `test_families`
]


@pytest.mark.shows("goal random interleavings", "rule 1", "rule 2", "rule 3")
@pytest.mark.parametrize("case", [*CASES, *FAMILIES], ids=lambda case: case.__name__.removesuffix(".TestCase"))
def test_random_operations(case):
    case("runTest").runTest()


EVENTS = (
    "drafts", "drafts under a mask", "cut", "no room", "limit", "rows caught up", "admission refused", "refused",
    "device drafts", "device, no room", "device, limit", "device rows caught up", "settled",
    "installed", "installed in part", "not installed",
)  # fmt: skip


@pytest.mark.parametrize("name", families.ENTRIES)
def test_the_machine_gets_everywhere_with(name: str):
    events = sum((case.events for case in FAMILIES if f"_{name}_" in case.__name__), Counter())
    if "operations" not in events:
        pytest.skip("runs with the machines only")
    never = {"no room", "device, no room", "limit", "device, limit", "rows caught up", "admission refused"}
    never |= {"installed", "installed in part", "not installed"}
    assert {event for event in EVENTS if not events[event]} == (never if name == "medusa1" else set())


@pytest.mark.shows("goal random interleavings")
def test_the_machine_gets_everywhere():
    """Counts over the runs above, which come first in this file: a machine that never gets there proves nothing."""
    events = sum((case.events for case in CASES), Counter())
    if "operations" not in events:
        pytest.skip("runs with the machines only")
    assert events["operations"] >= 10_000
    assert [name for name in EVENTS if not events[name]] == []
    for trim in KEPT:
        verified = [case for case in events if case.startswith(f"{trim}: ")]
        assert len(verified) >= 5, "all, none and some of several numbers of drafts were accepted"
