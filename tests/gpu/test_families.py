"""EAGLE-3, Medusa-1 and DFlash through the proposer on a GPU: golden values as the host gets them, in the device form and from a
caller's own graph, and random interleavings. Their functions one by one are test_direct's."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Mapping

import pytest
import torch

from circuitgraph.ops import PagedKV
from circuitgraph.runtime import BlockPool, CompiledRunner, ReferenceRunner, load
from tests.fixture_cases import FIXTURES, target_of
from tests.gpu.calls import ADDRESSING, artifact_folder, recorded
from tests.gpu.direct import perturbed
from tests.program_cases import close
from tests.runtime.audited import Audited
from tests.runtime.goldens import Text, golden, prefilled, propose
from tests.runtime.machine import LIMIT, machine_of

PREFIX = "direct_fixture_"
NAMES = tuple(PREFIX + name for name in ("eagle3_llama", "medusa1", "dflash_qwen3"))
"""Artifacts, which the first parameter of every test names: what it shows is recorded with them."""

families = pytest.mark.parametrize("name", NAMES)

WIDTH = 8
"""Blocks in a table, enough for every text."""


def open_runner(name: str, weights: Mapping[str, torch.Tensor] | None = None) -> CompiledRunner:
    fixture = name.removeprefix(PREFIX)
    folder, model, target = artifact_folder(name), FIXTURES / fixture, target_of(fixture)
    return load(folder, model=model, target_model=target, weights=weights, max_position=LIMIT)


runner_of = functools.cache(open_runner)


def proposer_of(runner: CompiledRunner) -> Audited:
    return Audited(runner, BlockPool(runner.circuit, blocks=64, block_size=4, device=runner.device))


def texts_of(name: str):
    return golden(name.removeprefix(PREFIX))


def check_golden(proposer: Audited, name: str, turns: int) -> None:
    """One sequence, what follows its verify, three sequences, and two, which no program has the width of.

    Drafts run as they come in the first turn, are recorded in the second, and replayed in those after.
    """
    cases = texts_of(name)
    one, after, three = cases.one, cases.after, cases.three
    start, newest = len(one.tokens), len(after.tokens) - 1
    for _ in range(turns):
        state = prefilled(proposer, one)
        drafts, scores = propose(proposer, [one], [state], len(one.drafts))
        assert drafts == [one.drafts]
        close(torch.tensor(scores[0]), one.scores)
        proposer.after_verify(2, state)
        hiddens = after.hiddens[start - 1 : newest - 1].to(proposer.runner.device)
        proposer.catchup_batch([after.tokens[start:newest]], [hiddens], [start], [state])
        drafts, scores = propose(proposer, [after], [state], len(after.drafts))
        assert drafts == [after.drafts]
        close(torch.tensor(scores[0]), after.scores)
        proposer.free_state(state)
        for texts in (three, three[:2]):
            states = [prefilled(proposer, text) for text in texts]
            drafts, scores = propose(proposer, texts, states, len(texts[0].drafts))
            assert drafts == [text.drafts for text in texts]
            for made, text in zip(scores, texts, strict=True):
                close(torch.tensor(made), text.scores)
            for state in states:
                proposer.free_state(state)


@families
def test_golden_drafts(name):
    runner = runner_of(name)
    proposer = proposer_of(runner)
    torch.cuda.synchronize(runner.device)
    runner._graphs.clear()
    check_golden(proposer, name, turns=4)
    assert recorded(runner)
    assert set(proposer.metrics.paths) == {"n-row", "split"}
    assert proposer.pool.ledger.free == proposer.pool.total


WRONG = {"eagle3_llama": "fc", "medusa1": "head_0.lm_head", "dflash_qwen3": "fc"}


@families
def test_a_wrong_weight_gives_other_drafts(name):
    """The control: with the rows of one weight in another order."""
    wrong = WRONG[name.removeprefix(PREFIX)]
    runner = open_runner(name, {wrong: perturbed(runner_of(name).weights, wrong)[wrong]})
    with pytest.raises(AssertionError):
        check_golden(proposer_of(runner), name, turns=1)


class OnDevice:
    """A proposer's device form, of lists."""

    def __init__(self, proposer: Audited):
        self.proposer, self.device = proposer, proposer.runner.device

    def ints(self, values) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32, device=self.device)

    def propose(self, texts: list[Text], states: list, count: int, accepted: torch.Tensor | None = None) -> torch.Tensor:
        out = torch.full((len(texts), count), -7, dtype=torch.int32, device=self.device)
        newest = [len(text.tokens) - 1 for text in texts]
        hiddens = torch.stack([text.hiddens[place - 1] for text, place in zip(texts, newest, strict=True)]).to(self.device)
        tokens = self.ints([text.tokens[-1] for text in texts])
        made = self.proposer.propose_batch(tokens, hiddens, self.ints(newest), count, states, accepted=accepted, out=out)
        assert made is out
        return out


@families
def test_the_device_form(name):
    """The host learns nothing of two drafts being accepted before the next propose. Then three sequences, which are asked for
    more drafts than some drafters have."""
    runner, cases = runner_of(name), texts_of(name)
    proposer = proposer_of(runner)
    device = OnDevice(proposer)
    one, after, three = cases.one, cases.after, cases.three
    newest, count = len(one.tokens) - 1, len(one.drafts)
    for turn in range(3):
        state = prefilled(proposer, one)
        made = device.propose([one], [state], count)
        fed = torch.cat([device.ints([one.tokens[-1:]]), made], dim=1)
        hiddens = torch.randn(1, count + 1, runner.hidden_size, generator=torch.Generator().manual_seed(turn))
        hiddens[0, :3] = after.hiddens[newest - 1 : newest + 2]  # of what was accepted
        taken = device.ints([2])
        assert proposer.catchup_accepted(fed, hiddens.to(runner.device), [state], taken, first=0)
        then = device.propose([after], [state], len(after.drafts), accepted=taken)
        assert (made.tolist(), then.tolist()) == ([one.drafts], [after.drafts])
        proposer.settle([state], [2])
        proposer.settle([state], [0])
        proposer.free_state(state)

        states, known = [prefilled(proposer, text) for text in three], len(three[0].drafts)
        asked = known + 2
        made = device.propose(three, states, asked)
        assert made[:, :known].tolist() == [text.drafts for text in three]
        most = runner.kind.most_drafts or asked
        assert (made[:, :most] >= 0).all()
        assert (made[:, most:] == -1).all()
        fed = torch.cat([device.ints([[text.tokens[-1]] for text in three]), made.clamp(min=0)], dim=1)
        hiddens = torch.randn(3, asked, runner.hidden_size, device=runner.device)
        assert proposer.catchup_accepted(fed[:, 1:].contiguous(), hiddens, states, device.ints([1, 0, 2]))
        proposer.settle(states, [1, 0, 2])
        rows = [len(text.tokens) - 1 + accepted for text, accepted in zip(three, (1, 0, 2), strict=True)]
        assert [proposer.drafter_rows(state) for state in states] == (rows if runner.kind.keeps_rows else [0, 0, 0])
        for state in states:
            proposer.free_state(state)
    assert proposer.pool.ledger.free == proposer.pool.total


def chain_arguments(proposer: Audited, text: Text, steps: int) -> tuple:
    """(token, hidden, position, caches, slots) of `chain` for a sequence that has its prompt, on the device."""
    runner, pool, state = proposer.runner, proposer.pool, prefilled(proposer, text)
    newest, ints = len(text.tokens) - 1, OnDevice(proposer).ints
    rows = runner.kind.writes(steps, newest, runner.max_position)
    assert pool.grow([(state.lease, state.rows + rows)])
    slots = ints(list(pool.slots(state.lease, state.rows, rows))).view(rows, 1)
    blocks = [*state.lease.blocks, *[0] * (WIDTH - len(state.lease.blocks))]
    caches = {
        key: PagedKV(
            *parts, slot=slots[0].clone(), seq=ints([0]), table=ints([blocks]), start=ints([0]), length=ints([state.rows + 1])
        )
        for key, parts in pool.storage.items()
    }
    return ints(text.tokens[-1:]), text.hiddens[-1:].to(runner.device, copy=True), ints([newest]), caches, slots


def tensors(arguments: tuple) -> list[torch.Tensor]:
    """What differs from call to call."""
    token, hidden, position, caches, slots = arguments
    return [token, hidden, position, slots, *(getattr(cache, part) for cache in caches.values() for part in ADDRESSING)]


@families
def test_inside_the_callers_own_graph(name):
    """It reads tokens, hiddens and addressing anew with every replay: each text has its own drafts."""
    runner, texts = runner_of(name), texts_of(name).three
    proposer, steps = proposer_of(runner), len(texts[0].drafts)
    assert len({tuple(text.drafts) for text in texts}) == len(texts)
    turns = [chain_arguments(proposer, text, steps) for text in texts]
    static = chain_arguments(proposer, texts[-1], steps)
    runner.chain(steps, *static)
    torch.cuda.synchronize(runner.device)
    own, graph = list(runner._graphs), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        made = runner.chain(steps, *static)
    assert list(runner._graphs) == own, "a graph of the runner's own inside the caller's"
    for text, turn in zip((*texts, texts[0]), (*turns, turns[0]), strict=True):
        for there, now in zip(tensors(static), tensors(turn), strict=True):
            there.copy_(now)
        graph.replay()
        torch.cuda.synchronize(runner.device)
        assert made.drafts.tolist() == [text.drafts]
        close(made.logprobs[0].cpu(), text.scores)


@families
def test_random_interleavings(name):
    """Three times, since each has operations of its own that it does often, and others that it hardly does."""
    runner, events = runner_of(name), Counter()
    for turn in range(3):
        case = machine_of(f"Machine_{name}_{turn}", lambda: (runner, ReferenceRunner(runner.circuit, runner.weights)), 400)
        case("runTest").runTest()
        events += case.events
    assert events["operations"] >= 700
    for event in ("drafts", "drafts under a mask", "device drafts"):
        assert events[event], event
