"""The runner around the programs: golden values, streams, a caller's own graph, host integers, other widths."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch

from circuitgraph.errors import RuntimeUseError
from tests.fixture_cases import Rows, cases_class, fixture_tensors
from tests.gpu.calls import (
    ADDRESSING,
    Kept,
    call,
    chain_slots,
    has_entry,
    host_arguments,
    recorded,
    run,
    same_caches,
    same_results,
    situation,
    varied,
)


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
def test_golden_cases(golden, case, runners):
    runner = runners(golden)
    name = golden.name.removeprefix("fixture_")
    getattr(cases_class(name)(fixture_tensors(name), runner.circuit.states[0], OnDevice(runner)), f"check_{case}")()


def test_integers_may_come_from_the_host(artifact, runners):
    """Of every call; drafts thrice: as they come, recorded, replayed, with other inputs every time."""
    runner = runners(artifact)
    n = runner.widths[-1] if runner.widths[-1] <= 16 else 16
    for entry in [entry for entry in ("draft", "draft_masked", "logits", "context") if has_entry(runner, entry)]:
        for seed in range(3):
            case = situation(runner, entry, n, seed)
            wanted = [run(runner, varied(runner, case, turn), entry) for turn in range(3)]
            kept = Kept(runner, case)
            for turn, (want, want_caches) in enumerate(wanted):
                now = varied(runner, case, turn)
                caches = kept.caches(now)
                token, hidden, position, host = host_arguments(now.inputs, caches)
                got = call(runner, entry, {**now.inputs, "token": token, "hidden": hidden, "position": position}, host)
                assert same_results(got, want, now)
                assert same_caches(caches, want_caches)
            assert not entry.startswith("draft") or recorded(runner)


def test_widths_that_were_not_compiled(artifact, runners):
    """`cover` serves any number of rows, with idle rows that change nothing."""
    runner = runners(artifact)
    n = runner.widths[-1] + 2 if runner.widths[-1] <= 16 else 7
    for seed in range(3):
        case = situation(runner, "draft", n, seed)
        got, _ = run(runner, case, "draft")
        alone = torch.cat([run(runner, case.only([row]), "draft")[0]["logprob"] for row in range(case.live)])
        assert (got["logprob"][: case.live] - alone).abs().max() < 0.3


def test_inside_the_callers_own_graph(entry, runners):
    """Every call becomes part of a graph that reads its inputs, addressing and caches anew with every replay."""
    folder, name = entry
    runner = runners(folder)
    rows = runner.context_rows[0] if name == "context" else runner.widths[1]
    case = situation(runner, "draft" if name == "chain" else name, rows, 2)

    def slots_of(now):
        return chain_slots(now, 3) if name == "chain" else None

    turns = [varied(runner, case, turn) for turn in range(3)]
    wanted = []
    for now in turns:
        caches = now.copy_caches()
        wanted.append((call(runner, name, now.inputs, caches, slots_of(now)), caches))
    kept = Kept(runner, case)
    inputs = {key: tensor.clone() for key, tensor in case.inputs.items()}
    static = {
        key: replace(cache, **{part: getattr(cache, part).clone() for part in ADDRESSING}) for key, cache in kept.caches().items()
    }
    slots = slots_of(case)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        made = call(runner, name, inputs, static, slots)
    assert not runner._graphs, "a graph of the runner's own inside the caller's"
    for now, (want, want_caches) in zip((*turns, turns[0]), (*wanted, wanted[0]), strict=True):
        kept.caches(now)
        for key, tensor in now.inputs.items():
            inputs[key].copy_(tensor)
        for key, cache in now.caches.items():
            for part in ADDRESSING:
                getattr(static[key], part).copy_(getattr(cache, part))
        if slots is not None:
            slots.copy_(slots_of(now))
        graph.replay()
        torch.cuda.synchronize()
        assert same_results(made, want, now, slots)
        assert same_caches(static, want_caches)


def test_host_integers_inside_a_graph_are_refused(entry, runners):
    """Replays would read memory of the host that has long been something else."""
    folder, name = entry
    runner = runners(folder)
    rows = runner.context_rows[0] if name == "context" else runner.widths[1]
    case = situation(runner, "draft" if name == "chain" else name, rows, 2)
    caches = case.copy_caches()
    token, _, position, host = host_arguments(case.inputs, caches)
    slots = chain_slots(case, 3) if name == "chain" else None
    host_slots = None if slots is None else slots.cpu()
    whole = {**case.inputs, "token": token, "position": position}
    value = torch.zeros(1, device=runner.device).add_(0)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        value.add_(1)
        with pytest.raises(RuntimeUseError):
            call(runner, name, whole, host, host_slots)
        with pytest.raises(RuntimeUseError):  # one alone
            call(runner, name, {**case.inputs, "position": position}, caches, slots)
    graph.replay()
    torch.cuda.synchronize()
    assert value.item() == 1, "the caller's graph was spoilt"
    assert same_caches(caches, case.caches)


def test_two_runners_on_two_streams(artifact, runners):
    """Own workspaces and staging: chains that are replayed at the same time don't disturb each other."""
    from circuitgraph.runtime.compiled import CHAIN_FUNCTIONS

    first = runners(artifact)
    functions = {program.spec.symbol: program.call for program in first._programs.values()}
    functions |= dict(zip(CHAIN_FUNCTIONS, first.chain_functions, strict=True))
    second = type(first)(first.manifest, functions, first.weights, device=first.device)
    pair = (first, second)
    n = first.widths[-1] if first.widths[-1] <= 16 else 16
    cases = [situation(first, "draft", n, seed) for seed in (0, 1)]
    turns = [[varied(first, case, turn) for turn in range(3)] for case in cases]
    slots = [[chain_slots(now, 3) for now in each] for each in turns]
    wanted = []
    for index in range(2):
        for now, written in zip(turns[index], slots[index], strict=True):
            caches = now.copy_caches()
            wanted.append((call(first, "chain", now.inputs, caches, written), caches))
    kept = [Kept(runner, case) for runner, case in zip(pair, cases, strict=True)]

    def chain(index: int, turn: int):
        now = turns[index][turn]
        caches = kept[index].caches(now)
        made = call(pair[index], "chain", now.inputs, caches, slots[index][turn])
        return made, {name: replace(cache, k=cache.k.clone(), v=cache.v.clone()) for name, cache in caches.items()}

    for index in range(2):
        for turn in range(2):
            chain(index, turn)
        assert recorded(pair[index])
    torch.cuda.synchronize()
    streams = [torch.cuda.Stream() for _ in range(2)]
    made: list[list] = [[], []]
    for stream in streams:  # both wait while the host fills their queues
        with torch.cuda.stream(stream):
            torch.cuda._sleep(40_000_000)
    for step in range(12):
        for index, stream in enumerate(streams):
            with torch.cuda.stream(stream):
                made[index].append(chain(index, step % 3))
    torch.cuda.synchronize()
    for index in range(2):
        for step, (got, caches) in enumerate(made[index]):
            want, want_caches = wanted[3 * index + step % 3]
            assert same_results(got, want, cases[index], slots[index][step % 3])
            assert same_caches(caches, want_caches)
