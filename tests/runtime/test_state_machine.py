"""The lifecycle against a dense cache: random interleavings (`machine`) on the reference and on compiled programs."""

from __future__ import annotations

import functools
import json
import tempfile
from pathlib import Path

import circuitgraph
from circuitgraph.runtime import DraftRunner, ReferenceRunner, load
from tests.cli.conftest import TINY
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
    """Programs for 1, 2 and 3 rows, so that 4 run in two parts, and prompts in chunks of 4 and 16 rows."""
    folder = Path(tempfile.mkdtemp())
    config = folder / "config.json"
    config.write_text(json.dumps(TINY))
    entries = ("draft", "draft_masked", "context")
    circuitgraph.compile(
        "auto", model=config, out=folder / "head", widths=(2, 3), context_rows=(4, 16), entries=entries, wt="f32"
    )
    runner = load(folder / "head", max_position=LIMIT, threads=1)
    return runner, ReferenceRunner(runner.circuit, runner.weights)


TestReference = machine_of("OnReference", reference, 2500)
TestCompiled = machine_of("OnCompiled", compiled, 7500)


def test_the_machine_gets_everywhere():
    """Counts over the runs above, which run first in this file."""
    for case in (TestReference, TestCompiled):
        print(dict(case.events))
