"""What a propose can be told beside its rows: confidence stop, deferred last draft, hidden stack; and cutting drafts."""

from __future__ import annotations

import math

import pytest
import torch

from circuitgraph.errors import RuntimeUseError
from circuitgraph.runtime import DEFERRED, CompiledRunner, DraftChain, cut_drafts
from tests.runtime.helpers import InterpretedLibrary, Script, drafter, manifest_of, oracle, proposer_of
from tests.runtime.test_proposer import accept, prefilled, propose, snapshot, unchanged

EMBED = drafter().weights["embed_tokens"]


def scored(proposer, script, state, steps=4):
    """(drafts, their log-probabilities)"""
    scores: list = []
    drafts = proposer.propose_batch([script.tokens[6]], script.hiddens[5:6], [6], steps, [state], out_confidence=scores)
    return drafts[0], scores[0]


@pytest.mark.shows("method last_confidence", "method propose")
def test_a_chain_ends_after_the_first_draft_below_the_threshold():
    proposer, script = proposer_of(block_size=1), Script(3)
    drafts, scores = scored(proposer, script, prefilled(proposer, script, 6))
    for threshold in (0.0, 1.0, *(math.exp(score) * 1.001 for score in scores), *(math.exp(score) * 0.999 for score in scores)):
        fresh = proposer_of(block_size=1)
        state = prefilled(fresh, script, 6)
        below = [index for index, score in enumerate(scores) if score < (math.log(threshold) if threshold else -math.inf)]
        expected = drafts[: below[0] + 1] if below else drafts
        assert propose(fresh, script, 6, 4, state, stop_confidence=threshold) == expected
        assert fresh.drafter_rows(state) == fresh.pool.held == 5 + len(expected)
        assert fresh.last_confidence(state) == pytest.approx(math.exp(min(scores[: len(expected)])), rel=1e-4)


def test_an_unmeasured_confidence_never_stops():
    runner = drafter()

    class Silent(type(runner)):
        def chain(self, *args, **kwargs):
            made = super().chain(*args, **kwargs)
            return DraftChain(made.drafts, torch.full_like(made.logprobs, math.nan), made.next_hidden)

    proposer, script = proposer_of(Silent(runner.circuit, runner.weights)), Script(3)
    state = prefilled(proposer, script, 6)
    assert len(propose(proposer, script, 6, 4, state, stop_confidence=1.0)) == 4
    assert proposer.last_confidence(state) is None, "not computed"


@pytest.mark.shows("rule 10")
def test_chains_wait_for_the_host_only_where_a_stop_asks_for_it():
    """Rule 10: one call of the runner a chain; one a step with a confidence stop or a matcher."""
    runner = drafter()
    calls = []

    class Counted(type(runner)):
        def chain(self, steps, *args, **kwargs):
            calls.append(steps)
            return super().chain(steps, *args, **kwargs)

    proposer, script = proposer_of(Counted(runner.circuit, runner.weights)), Script(3)
    for options, expected in (
        ({}, [4]), ({"stop_ids": {1, 2, 3}}, [4]), ({"grammar": torch.full((5,), -1, dtype=torch.int32)}, [4]),
        ({"draft_embed_target": torch.zeros(48)}, [4]), ({"stop_confidence": 0.0}, [1] * 4),
    ):  # fmt: skip
        calls.clear()
        propose(proposer, script, 6, 4, prefilled(proposer, script, 6), **options)
        assert calls == expected, options


@pytest.mark.shows("method read_deferred_draft_token")
@pytest.mark.parametrize("steps", [1, 2, 4])
@pytest.mark.parametrize("threshold", [None, 0.0])
def test_the_last_draft_may_stay_on_the_device(steps, threshold):
    proposer, script, row = proposer_of(), Script(3), torch.zeros(48, dtype=torch.bfloat16)
    state = prefilled(proposer, script, 6)
    expected = oracle(drafter(), script, 6, steps)
    drafts = propose(proposer, script, 6, steps, state, draft_embed_target=row, stop_confidence=threshold)
    assert drafts == [*expected[:-1], DEFERRED]
    assert torch.equal(row, EMBED[expected[-1]].bfloat16())
    assert (proposer.last_confidence(state) is None) == (steps == 1), "a deferred draft is not measured"
    assert proposer.drafter_rows(state) == 5 + steps
    assert proposer.read_deferred_draft_token() == proposer.read_deferred_draft_token() == expected[-1]
    assert state.last_drafts == expected
    proposer.after_verify(steps, state)
    assert state.history.text.tolist() == [*script.tokens[:7], *expected]


def test_a_deferred_draft_that_was_not_read_can_be_verified():
    proposer, script = proposer_of(), Script(3)
    state = prefilled(proposer, script, 6)
    propose(proposer, script, 6, 2, state, draft_embed_target=torch.zeros(48))
    position = accept(proposer, script, state, 6, 2)
    assert propose(proposer, script, position, 3, state) == oracle(drafter(), script, position, 3)


def test_a_chain_that_ends_early_defers_nothing():
    proposer, script, row = proposer_of(), Script(4), torch.zeros(48)
    expected = oracle(drafter(), script, 6, 4)
    assert expected[0] != expected[1]
    drafts = propose(proposer, script, 6, 4, prefilled(proposer, script, 6), draft_embed_target=row, stop_ids={expected[1]})
    assert drafts == expected[:2]
    assert torch.equal(row, EMBED[expected[1]])
    drafts = propose(proposer, script, 6, 4, prefilled(proposer, script, 6), draft_embed_target=row, stop_confidence=1.0)
    assert drafts == expected[:1]
    assert torch.equal(row, EMBED[expected[0]])
    with pytest.raises(RuntimeUseError, match="no draft was left on the device"):
        proposer.read_deferred_draft_token()


def test_a_stack_of_one_hidden_is_that_hidden():
    proposer, script = proposer_of(), Script(3)
    stack = script.hiddens[5:6]
    drafts = proposer.propose(script.tokens[6], None, 6, 3, prefilled(proposer, script, 6), target_hidden_stack=stack)
    assert drafts == oracle(drafter(), script, 6, 3)
    state = prefilled(proposer, script, 6)
    before = snapshot(proposer, state)
    for wrong in (script.hiddens[:3], script.hiddens[0], [stack]):
        with pytest.raises(RuntimeUseError, match=r"this drafter takes one layer's hidden.*EAGLE-3"):
            proposer.propose(script.tokens[6], None, 6, 3, state, target_hidden_stack=wrong)
    with pytest.raises(RuntimeUseError, match="hiddens: do not fit"):
        proposer.propose(script.tokens[6], None, 6, 3, state)
    for wrong in (-0.1, 1.5, math.nan, "high"):
        with pytest.raises(RuntimeUseError, match="is no probability"):
            propose(proposer, script, 6, 3, state, stop_confidence=wrong)
    for wrong in (torch.zeros(47), torch.zeros(48, dtype=torch.int32), 5):
        with pytest.raises(RuntimeUseError, match="draft_embed_target: does not fit"):
            propose(proposer, script, 6, 3, state, draft_embed_target=wrong)
    assert unchanged(before, snapshot(proposer, state))


@pytest.mark.shows("rule 11")
def test_confidences_are_the_scored_log_probabilities_on_every_path():
    """Rule 11, from the n-row program too."""
    manifest = manifest_of(drafter().circuit, draft=(1, 2))
    scores = []
    for n, runner in ((1, drafter()), (2, CompiledRunner(manifest, InterpretedLibrary(manifest).functions, drafter().weights))):
        proposer, script = proposer_of(runner), Script(3)
        states = [prefilled(proposer, script, 6) for _ in range(n)]
        row: list = []
        proposer.propose_batch([script.tokens[6]] * n, [script.hiddens[5]] * n, [6] * n, 3, states, out_confidence=row)
        scores += row
    for other in scores[1:]:
        assert other == pytest.approx(scores[0], abs=1e-5)
    assert all(-math.log(131) <= score < 0 for score in scores[0][:1])


# -- cutting -------------------------------------------------------------------------------------------------------

NAN = math.nan


@pytest.mark.shows("rule 11")
@pytest.mark.parametrize(
    ("confidences", "ratio", "budget", "kept"),
    [
        ([], 0.5, None, []),
        ([[], [-1.0]], 0.0, 0, [0, 1]),  # depth 1 always stays
        ([[-0.1, -0.1, -0.1], [-3.0, -0.1, -0.1]], 1.0, None, [3, 3]),
        ([[-0.1, -0.1, -0.1], [-3.0, -0.1, -0.1]], 0.5, None, [3, 1]),
        ([[-0.1, -0.1, -5.0], [-0.5, -0.5, -0.1]], 0.5, None, [2, 2]),
        ([[-0.1, -0.1, -5.0], [-0.5, -0.5, -0.1]], 0.75, None, [2, 3]),
        ([[-0.1, -0.1, -5.0], [-0.5, -0.5, -0.1]], 1.0, 3, [2, 1]),
        ([[-0.1, -0.1, -5.0], [-0.5, -0.5, -0.1]], 1.0, 1, [1, 1]),
        ([[NAN, NAN, NAN], [-0.1, -0.1, -0.1]], 0.5, None, [3, 1]),  # unmeasured counts as certain
        ([[-1.0, -1.0], [-1.0, -1.0]], 0.5, None, [2, 1]),  # a tie goes to the earlier one
        ([[-math.inf, -1.0, -1.0], [-1.0, -math.inf, -1.0]], 0.5, None, [2, 2]),
        ([[-0.2] * 11], 0.3, None, [4]),
    ],
)
def test_cut_drafts(confidences, ratio, budget, kept):
    assert cut_drafts(confidences, ratio, budget) == kept


def test_cut_drafts_keeps_the_most_likely_prefixes():
    generator = torch.Generator().manual_seed(0)
    for _ in range(50):
        rows = [(-torch.rand(int(n), generator=generator)).tolist() for n in torch.randint(0, 6, (5,), generator=generator)]
        ratio = float(torch.rand(1, generator=generator))
        kept = cut_drafts(rows, ratio)
        sums = sorted((sum(row[:depth]) for row in rows for depth in range(2, len(row) + 1)), reverse=True)
        mine = sorted(
            (sum(row[:depth]) for row, count in zip(rows, kept, strict=True) for depth in range(2, count + 1)), reverse=True
        )
        assert mine == pytest.approx(sums[: math.floor(ratio * len(sums) + 1e-9)])


def test_a_cut_that_is_none_is_refused():
    for ratio, budget in ((1.5, None), (-0.1, None), (math.nan, None), (0.5, -1)):
        with pytest.raises(RuntimeUseError, match="is no cut"):
            cut_drafts([[-1.0]], ratio, budget)


@pytest.mark.shows("pitfall trim skipped")
def test_a_server_that_cuts_drafts_trims_all_the_same():
    """Pitfall: a trim skipped when the server truncated the drafts."""
    proposer, script = proposer_of(), Script(3)
    state = prefilled(proposer, script, 6)
    _, scores = scored(proposer, script, state)
    (count,) = cut_drafts([scores], ratio=0.4)
    assert count == 2
    position = accept(proposer, script, state, 6, count)
    assert proposer.drafter_rows(state) == position - 1
    assert propose(proposer, script, position, 3, state) == oracle(drafter(), script, position, 3)
