"""Every program of an artifact, and chains: `compute-sanitizer python -m tests.gpu.sanitized build/gpu/NAME`. Of a mixture, or a
drafter that is called function by function, the programs of few rows.

Chains are called thrice: as they come, recorded, replayed. What is compared elsewhere is not compared here: the sanitizer
watches memory and races.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch

from circuitgraph.artifact import Function, Manifest
from circuitgraph.measure.cases import Span
from circuitgraph.runtime import load
from tests.gpu.calls import Kept, Table, chain_slots, host_arguments, plain_rows, recorded, run, situation
from tests.gpu.direct import open_direct
from tests.gpu.test_mixtures import Mixture

FEW = 16


def main(folder: Path) -> None:
    runner = load(folder)
    for function in runner.manifest.functions.values():
        run(runner, situation(runner, function.entry, function.rows, 1), function.entry)
    for n in runner.widths[:3]:
        case = situation(runner, "draft", n, 2)
        inputs, slots = (case.inputs["token"], case.inputs["hidden"], case.inputs["position"]), chain_slots(case, 2)
        kept = Kept(runner, case)
        for _ in range(3):
            runner.chain(2, *inputs, kept.caches(), slots)
        assert recorded(runner)
        kept = Kept(runner, case)
        for _ in range(3):
            runner.chain(2, *host_arguments(case.inputs, kept.caches()), slots.cpu())
        assert recorded(runner)
        packed(runner, n)
    torch.cuda.synchronize()


def mixture(folder: Path) -> None:
    opened = Mixture(folder)
    for function in few(opened.manifest):
        opened.made(function.entry, opened.situation("any", function.rows))


def direct(folder: Path) -> None:
    """Contexts of several tiles for every part of it."""
    opened = open_direct(folder)
    for function in few(opened.manifest):
        entry = opened.entry(function.entry)
        opened.call(function.entry, situation(entry, function.entry, function.rows, 1, spans=[Span(1100, function.rows)]))


def few(manifest: Manifest) -> list[Function]:
    return [function for function in manifest.functions.values() if function.rows <= FEW]


def packed(runner, n: int) -> None:
    spans = [Span(5 + i) for i in range(n)]
    case = situation(runner, "draft", n, 1, spans=spans)
    blocks = [Table(row.tolist(), version) for version, row in enumerate(case.caches["kv"].table, 1)]
    rows = plain_rows(case, [span.context for span in spans], chain_slots(case, 2), blocks)
    kept = Kept(runner, case)
    for _ in range(3):
        runner.start_chain(2, rows, case.inputs["hidden"], {name: (c.k, c.v) for name, c in kept.caches().items()})()
    assert recorded(runner)


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    {"mixture": mixture, "direct": direct}.get(folder.name.partition("_")[0], main)(folder)
