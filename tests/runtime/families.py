"""A drafter of every kind that there are golden values of (`goldens`): interpreted, and compiled for the CPU."""

from __future__ import annotations

import functools
import tempfile
from pathlib import Path

import circuitgraph
from circuitgraph.checkpoint import bind
from circuitgraph.runtime import DraftRunner, ReferenceRunner, load
from tests.fixture_cases import FIXTURES, target_of

EAGLE3_HEADS = ("eagle3_llama", "eagle3_llama_narrow")
CHAINS = ("eagle1_llama", *EAGLE3_HEADS)
NAMES = (*CHAINS, "medusa1", "dflash_qwen3")
POSITIONS = 64


@functools.cache
def reference(name: str, positions: int = POSITIONS) -> ReferenceRunner:
    bound = bind("auto", model=FIXTURES / name, target_model=target_of(name))
    return ReferenceRunner(bound.circuit, bound.load_weights(positions=positions))


ENTRIES = {
    **dict.fromkeys(EAGLE3_HEADS, ("first", "draft", "first_masked", "draft_masked", "context")),
    "medusa1": ("draft", "logits"),
    "dflash_qwen3": ("draft", "logits", "context"),
}


@functools.cache
def artifact(name: str) -> Path:
    """Programs for one sequence and for three, those that masks need among them."""
    out = Path(tempfile.mkdtemp()) / name
    model, target = FIXTURES / name, target_of(name)
    circuitgraph.compile("auto", model=model, target_model=target, out=out, widths=(3,), context_rows=(4,), entries=ENTRIES[name])
    return out


@functools.cache
def compiled(name: str, positions: int = POSITIONS) -> DraftRunner:
    return load(artifact(name), model=FIXTURES / name, target_model=target_of(name), max_position=positions, threads=1)


RUNNERS = {"reference": reference, "compiled": compiled}
CASES = [(name, kind) for name in NAMES for kind in RUNNERS if kind == "reference" or name in ENTRIES]
