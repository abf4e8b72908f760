"""Every program of an artifact once, and a chain: `compute-sanitizer python -m tests.gpu.sanitized build/gpu/NAME`.

What is compared elsewhere is not compared here: the sanitizer watches memory and races.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch

from circuitgraph.runtime import load
from tests.gpu.calls import run, situation
from tests.gpu.test_programs import chain_slots, on_host


def main(folder: Path) -> None:
    runner = load(folder)
    for function in runner.manifest.functions.values():
        run(runner, situation(runner, function.entry, function.rows, 1), function.entry)
    for n in [width for width in runner.widths if width <= 8]:
        case = situation(runner, "draft", n, 2)
        inputs, slots = (case.inputs["token"], case.inputs["hidden"], case.inputs["position"]), chain_slots(case, 2)
        for _ in range(2):  # as it comes, and recorded
            runner.chain(2, *inputs, case.copy_caches(), slots)
        host = {name: on_host(cache) for name, cache in case.copy_caches().items()}
        runner.chain(2, inputs[0].cpu(), inputs[1], inputs[2].cpu(), host, slots.cpu())
    torch.cuda.synchronize()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
