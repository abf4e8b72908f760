"""What a proposer must not take: numbers that are none, text that contradicts its rows, hiddens that are not finite."""

from __future__ import annotations

import pytest
import torch

from circuitgraph.errors import RuntimeUseError
from circuitgraph.runtime import DraftRunner
from tests.runtime.helpers import Script, proposer_of
from tests.runtime.test_compiled import compiled


def prefilled(runner: DraftRunner | None = None):
    proposer, script = proposer_of(runner), Script(0)
    state = proposer.alloc_state()
    proposer.prefill_drafter(script.tokens[:10], script.hiddens[:9], state)
    return proposer, script, state


@pytest.mark.parametrize("kind", ["reference", "compiled"])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_hiddens_that_are_not_finite_draft_nothing_and_harm_nobody(kind, value):
    """Not even their own later drafts: the rows that they made are not kept."""
    proposer, script, broken = prefilled(compiled()[0] if kind == "compiled" else None)
    sound = proposer.alloc_state()
    proposer.prefill_drafter(script.tokens[:10], script.hiddens[:9], sound)
    token, hidden = script.tokens[10], script.hiddens[9]
    want = proposer.propose(token, hidden, 10, 3, sound)
    proposer.after_verify(0, sound)
    again = proposer.alloc_state()
    proposer.prefill_drafter(script.tokens[:10], script.hiddens[:9], again)
    bad = torch.full_like(hidden, value)
    confidences: list[list[float]] = []
    made = proposer.propose_batch([token] * 2, [bad, hidden], [10, 10], 3, [broken, again], out_confidence=confidences)
    assert made == [[], want]
    assert confidences[0] == []
    assert proposer.metrics.refusals["not_finite"] == 1
    assert proposer.propose(token, hidden, 10, 3, broken) == want


@pytest.mark.parametrize("count", [True, False, 2.5, "3", None])
def test_numbers_of_drafts_are_integers(count):
    proposer, script, state = prefilled()
    with pytest.raises(RuntimeUseError, match="num_drafts"):
        proposer.propose(script.tokens[10], script.hiddens[9], 10, count, state)


@pytest.mark.parametrize("position", [2**31 + 10, 2**32 + 10])
def test_positions_fit_their_integers(position):
    proposer, script, state = prefilled()
    with pytest.raises(RuntimeUseError, match="out of reach"):
        proposer.propose(script.tokens[10], script.hiddens[9], position, 3, state)


@pytest.mark.parametrize("target", [(), "", {}, torch.zeros(1)])
def test_confidences_go_into_a_list_or_nothing_happens(target):
    proposer, script, state = prefilled()
    with pytest.raises(RuntimeUseError, match="out_confidence"):
        proposer.propose_batch([script.tokens[10]], [script.hiddens[9]], [10], 2, [state], out_confidence=target)
    assert state.last_drafts == []
    assert state.rows == 9


def test_a_prompt_does_not_rewrite_the_text_of_rows():
    proposer, script, state = prefilled()
    other = (script.tokens[9] + 1) % proposer.runner.vocab_size
    for first, token in ((3, script.tokens[3]), (-5, other), ("x", other)):
        with pytest.raises(RuntimeUseError, match="first_pos"):
            proposer.prefill_drafter([token], [], state, first_pos=first)
    with pytest.raises(RuntimeUseError, match="another token than its row"):
        proposer.prefill_drafter([other], [], state, first_pos=9)
    assert list(state.history.text) == list(script.tokens[:10])


def test_one_matcher_follows_one_sequence():
    from tests.runtime.grammars import CountingMatcher

    proposer, script, state = prefilled()
    second = proposer.alloc_state()
    proposer.prefill_drafter(script.tokens[:10], script.hiddens[:9], second)
    matcher = CountingMatcher(proposer.runner.vocab_size, {0: [1, 2]})
    arguments = ([script.tokens[10]] * 2, [script.hiddens[9]] * 2, [10] * 2, 2, [state, second])
    with pytest.raises(RuntimeUseError, match="two sequences"):
        proposer.propose_batch(*arguments, grammars=[matcher, matcher])


@pytest.mark.parametrize("mask", [[True] * 131, [1.5] * 5, [2**40] * 5, {1: 2}])
def test_lists_of_something_else_are_no_masks(mask):
    proposer, script, state = prefilled()
    with pytest.raises(RuntimeUseError, match="is no bitmask"):
        proposer.propose(script.tokens[10], script.hiddens[9], 10, 1, state, grammar=mask)
