"""A second GPU: what a library sets up once per process must not be set up for the first GPU alone."""

from __future__ import annotations

import pytest
import torch

from circuitgraph.runtime import load
from tests.gpu.calls import Kept, artifact_folder, chain_slots, check, recorded, reference, run, same, situation, varied


@pytest.mark.parametrize("name", ["few_bf16", "odd_f32", "wide_bf16"])
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_a_second_gpu(name):
    """A runner on cuda:0 that has recorded its graphs, then one on cuda:1, called while cuda:0 is the current device: as it
    comes, recorded, replayed, with other inputs every time; then the first once more."""
    runners = [load(artifact_folder(name), device=f"cuda:{index}") for index in range(2)]
    for index in (0, 1, 0):
        runner = runners[index]
        assert torch.cuda.current_device() == 0
        for n in runner.widths[:2]:
            for entry in ("draft", "context"):
                rows = n if entry == "draft" else runner.context_rows[0]
                case = situation(runner, entry, rows, 1)
                kept = Kept(runner, case)
                for turn in range(3):
                    now = varied(runner, case, turn)
                    check(runner, now, entry, run(runner, now, entry, kept), reference(runner, now, entry))
                assert entry == "context" or recorded(runner)
            case = situation(runner, "draft", n, 1)
            kept = Kept(runner, case)
            for turn in range(3):
                now = varied(runner, case, turn)
                inputs = (now.inputs["token"], now.inputs["hidden"], now.inputs["position"])
                made = runner.chain(3, *inputs, kept.caches(now), chain_slots(now, 3))
                single, _ = run(runner, now, "draft")
                live = chain_slots(now, 3)[0] >= 0
                assert torch.equal(made.drafts[live, 0], single["draft"][live])
                assert same(made.logprobs[live, 0], single["logprob"][live])
                assert made.drafts.device == runner.device
