"""The proposer on the GPU: the state machine of tests/runtime, and that the device form waits for nothing."""

from __future__ import annotations

import pytest
import torch

from circuitgraph.runtime import BlockPool, MtpProposer, ReferenceRunner

MACHINES = ("odd_f32",)
"""Artifacts whose drafts are compared token by token: fp32, so that the reference rounds alike."""
OPERATIONS = 650
"""Of each trim policy: some 600 of them are run, 2,000 and more in all."""


def short(runner):
    """The runner with RoPE tables of the machine's length."""
    from tests.runtime.machine import LIMIT

    tables = {name: tensor[:LIMIT].contiguous() for name, tensor in runner.weights.items() if name.startswith("rope.")}
    runner.rebind(tables)
    return runner


@pytest.mark.parametrize("trim", ["exact", "seed", "seed_refeed", "valid"])
def test_state_machine(artifact, trim, runners):
    if artifact.name not in MACHINES:
        pytest.skip("one artifact of every kind is enough")
    pytest.importorskip("hypothesis")
    from tests.runtime.machine import machine_of

    runner = runners(artifact)
    tables = {name: tensor for name, tensor in runner.weights.items() if name.startswith("rope.")}
    try:
        short(runner)
        reference = ReferenceRunner(runner.circuit, runner.weights)
        case = machine_of("OnGpu", lambda: (runner, reference), OPERATIONS, trim=trim)
        case("runTest").runTest()
    finally:
        runner.rebind(tables)
    assert case.events["operations"] >= 500
    assert case.events["drafts"]
    assert case.events["device drafts"]


def test_the_device_form_waits_for_nothing(artifact, runners):
    """Between the verify and the drafts: no synchronisation in a profiler trace, and none that CUDA would complain about."""
    runner = runners(artifact)
    if not artifact.name.startswith(("few", "odd")):
        pytest.skip("one of every kind is enough")
    n, steps, size = runner.widths[-1], 3, runner.hidden_size
    pool = BlockPool(runner.circuit, blocks=40 * n, block_size=16, device=runner.device)
    proposer = MtpProposer(runner, pool)
    states = [proposer.alloc_state() for _ in range(n)]
    prompt = torch.randn(9, size, device=runner.device)
    for state in states:
        proposer.prefill_drafter(list(range(9)), prompt, state)
    ints = lambda *shape: torch.ones(shape, dtype=torch.int32, device=runner.device)  # noqa: E731
    tokens, accepted, out = ints(n), ints(n), ints(n, steps)
    hiddens, rows = torch.randn(n, size, device=runner.device), torch.randn(n, steps, size, device=runner.device)
    position = ints(n) * 9

    def step(position, accepted):
        proposer.propose_batch(tokens, hiddens, position, steps, states, accepted=accepted, out=out)
        proposer.catchup_accepted(out, rows, states, ints(n))

    step(position, None)
    for turn in range(1, 4):  # recorded, then replayed
        step(position + 2 * turn, accepted)
    torch.cuda.synchronize()
    now = position + 8
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    torch.cuda.set_sync_debug_mode("error")
    try:
        with torch.profiler.profile(activities=activities) as trace:
            step(now, accepted)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    # The profiler itself ends with a cudaDeviceSynchronize; events of page-locked memory are long past.
    names = [event.key for event in trace.key_averages()]
    assert [name for name in names if "StreamSynchronize" in name or name in ("aten::item", "aten::_local_scalar_dense")] == []
    for _ in range(5):
        proposer.settle(states, [1] * n)
    assert [proposer.drafter_rows(state) for state in states] == [8 + 5 * 2] * n
