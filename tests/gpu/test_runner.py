"""The runner around the programs: golden values, streams, a caller's own graph, host integers, other widths."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch

from tests.fixture_cases import Cases, Rows, fixture_tensors
from tests.gpu.calls import run, situation


@dataclass
class OnDevice:
    """A runner as a `Forward` of the fixtures' cases, whose tensors are on the host."""

    runner: object

    def _call(self, method: str, rows: Rows):
        device = self.runner.device
        cache = replace(rows.kv, **{part: tensor.to(device) for part, tensor in vars(rows.kv).items()})
        arguments = [tensor.to(device) for tensor in (rows.token, rows.hidden, rows.position)]
        made = getattr(self.runner, method)(*arguments, {"kv": cache})
        rows.kv.k.copy_(cache.k)
        rows.kv.v.copy_(cache.v)
        return [] if made is None else [tensor.cpu() for tensor in made]

    def draft(self, rows):
        return self._call("draft", rows)

    def logits(self, rows):
        return self._call("logits", rows)

    def context(self, rows):
        self._call("context", rows)


@pytest.mark.parametrize("case", ["a", "b", "c", "d"])
def test_golden_cases(artifact, case, runners):
    if not artifact.name.startswith("fixture_"):
        pytest.skip("has no golden values")
    runner = runners(artifact)
    tensors = fixture_tensors(artifact.name.removeprefix("fixture_"))
    getattr(Cases(tensors, runner.circuit.states[0], OnDevice(runner)), f"check_{case}")()


def test_integers_may_come_from_the_host(artifact, runners):
    runner = runners(artifact)
    n = runner.widths[-1] if runner.widths[-1] <= 16 else 16
    for seed in range(3):
        case = situation(runner, "draft", n, seed)
        want, _ = run(runner, case, "draft")
        caches = {
            name: replace(c, **{part: getattr(c, part).cpu() for part in ("slot", "seq", "length", "table", "start")})
            for name, c in case.copy_caches().items()
        }
        got = runner.draft(case.inputs["token"].cpu(), case.inputs["hidden"], case.inputs["position"].cpu(), caches)
        assert torch.equal(got.draft, want["draft"])
        assert torch.equal(got.logprob, want["logprob"])


def test_widths_that_were_not_compiled(artifact, runners):
    """`cover` serves any number of rows, with idle rows that change nothing."""
    runner = runners(artifact)
    n = runner.widths[-1] + 2 if runner.widths[-1] <= 16 else 7
    for seed in range(3):
        case = situation(runner, "draft", n, seed)
        got, _ = run(runner, case, "draft")
        alone = torch.cat([run(runner, case.only([row]), "draft")[0]["logprob"] for row in range(case.live)])
        assert (got["logprob"][: case.live] - alone).abs().max() < 0.3


def test_inside_the_callers_own_graph(artifact, runners):
    runner = runners(artifact)
    case = situation(runner, "draft", runner.widths[1], 2)
    want, _ = run(runner, case, "draft")
    caches = case.copy_caches()
    arguments = (case.inputs["token"], case.inputs["hidden"], case.inputs["position"], caches)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        made = runner.draft(*arguments)
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(made.draft, want["draft"])


def test_two_runners_on_two_streams(artifact, runners):
    """Own workspaces and staging: calls that overlap don't disturb each other."""
    from circuitgraph.runtime.compiled import CHAIN_FUNCTIONS

    first = runners(artifact)
    functions = {program.spec.symbol: program.call for program in first._programs.values()}
    functions |= dict(zip(CHAIN_FUNCTIONS, first.chain_functions, strict=True))
    second = type(first)(first.manifest, functions, first.weights, device=first.device)
    n = first.widths[-1] if first.widths[-1] <= 16 else 16
    cases = [situation(first, "draft", n, seed) for seed in (0, 1)]
    want = [run(first, case, "draft")[0] for case in cases]
    torch.cuda.synchronize()
    streams = [torch.cuda.Stream() for _ in range(2)]
    made = [[], []]
    for _ in range(5):
        for index, (runner, stream) in enumerate(zip((first, second), streams, strict=True)):
            with torch.cuda.stream(stream):
                made[index].append(run(runner, cases[index], "draft")[0])
    torch.cuda.synchronize()
    for index in range(2):
        assert all(torch.equal(step["draft"], want[index]["draft"]) for step in made[index])
