"""The proposer on a GPU: the random interleavings of tests/runtime/machine, and the device form, which waits for nothing."""

from __future__ import annotations

import functools
from pathlib import Path

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from circuitgraph.runtime import BlockPool, DraftRunner, MtpProposer, ReferenceRunner, load
from tests.gpu import calls
from tests.runtime.machine import LIMIT, machine_of

NAME = "lifecycle_f32"
"""Plain kernels in fp32, so that drafts can be compared one by one; graphs, staging and addressing are those of any artifact."""


def artifact() -> Path:
    folder = Path(calls.ARTIFACTS or "", NAME)
    if not (calls.ARTIFACTS and folder.is_dir() and torch.cuda.is_available()):
        pytest.skip("needs a GPU and --artifacts")
    return folder


@functools.cache
def on_gpu() -> tuple[DraftRunner, DraftRunner]:
    runner = load(artifact(), max_position=LIMIT)
    return runner, ReferenceRunner(runner.circuit, runner.weights)


needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU and --artifacts")


@needs_gpu
@pytest.mark.parametrize("trim", ["exact", "seed", "seed_refeed", "valid"])
def test_random_interleavings(trim):
    """More than 2,000 operations in all."""
    case = machine_of("OnGpu", on_gpu, 650, trim=trim)
    case("runTest").runTest()
    assert case.events["operations"] >= 500
    assert case.events["drafts"]
    assert case.events["device drafts"]


class Loop:
    """The device form as a server runs it: propose, a verify on the device, catch-up; the host learns nothing."""

    def __init__(self, n: int, drafts: int):
        runner = load(artifact(), max_position=400)
        pool = BlockPool(runner.circuit, blocks=40 * n, block_size=8, device=runner.device)
        self.proposer = MtpProposer(runner, pool)
        self.states = [self.proposer.alloc_state() for _ in range(n)]
        generator = torch.Generator().manual_seed(0)
        size, device = runner.hidden_size, runner.device
        for row, state in enumerate(self.states):
            tokens = torch.randint(0, runner.vocab_size, (20 + row,), generator=generator).tolist()
            self.proposer.prefill_drafter(tokens, torch.randn(len(tokens) - 1, size, generator=generator).to(device), state)
        self.n, self.drafts, self.device, self.size = n, drafts, device, size
        self.tokens = torch.ones(n, dtype=torch.int32, device=device)
        self.positions = torch.tensor([20 + row for row in range(n)], dtype=torch.int32, device=device)
        self.accepted: torch.Tensor | None = None
        self.hiddens = torch.randn(n, drafts + 1, size, generator=generator).to(device)

    def step(self) -> torch.Tensor:
        out = torch.empty(self.n, self.drafts, dtype=torch.int32, device=self.device)
        self.proposer.propose_batch(
            self.tokens, self.hiddens[:, 0], self.positions, self.drafts, self.states, accepted=self.accepted, out=out
        )
        # A verify that accepts what is even, up to the first that is not.
        taken = (out % 2 == 0).to(torch.int32).cumprod(1).sum(1, dtype=torch.int32)
        fed = torch.cat([self.tokens[:, None], out], 1)
        self.proposer.catchup_accepted(fed, self.hiddens, self.states, taken, first=0)
        self.tokens = fed.gather(1, taken[:, None].long())[:, 0] + 1
        self.positions = self.positions + taken + 1
        self.accepted = taken
        return out


@needs_gpu
def test_the_device_form_never_waits():
    """Between a verify and the drafts after it the host makes no call that waits for the device; torch refuses those that it
    knows of, the trace shows the rest."""
    loop = Loop(3, 3)
    for _ in range(4):  # programs as they come, then recorded
        loop.step()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as trace:
            for _ in range(3):
                loop.step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    names = {event.name for event in trace.events()}
    assert "cudaGraphLaunch" in names
    waits = {name for name in names if name.startswith("cuda") and "Synchronize" in name} - {"cudaDeviceSynchronize"}
    assert not waits, waits  # the profiler itself ends with a cudaDeviceSynchronize
    copies = [event for event in trace.events() if "DtoH" in event.name]
    assert not copies, [event.name for event in copies]


@needs_gpu
def test_the_control_waits():
    """The host form must show up in the same trace, or the test above proves nothing."""
    loop = Loop(3, 3)
    hiddens = loop.hiddens[:, 0]
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as trace:
        loop.proposer.propose_batch([1] * 3, hiddens, [20, 21, 22], 3, loop.states)
    names = {event.name for event in trace.events()}
    assert "cudaStreamSynchronize" in names
    assert any("DtoH" in name for name in names)
