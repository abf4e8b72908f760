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


def test_a_deferred_draft_is_of_the_last_propose_or_of_none():
    proposer, script, state = prefilled()
    row = torch.zeros(proposer.runner.embed_size)
    arguments = (script.tokens[10], script.hiddens[9], 10)
    proposer.propose(*arguments, 2, state, draft_embed_target=row)
    assert proposer.read_deferred_draft_token() >= 0
    proposer.after_verify(0, state)
    proposer.propose(script.tokens[11], script.hiddens[10], 11, 2, state)
    with pytest.raises(RuntimeUseError, match="left on the device"):
        proposer.read_deferred_draft_token()
    proposer.after_verify(0, state)
    proposer.propose(script.tokens[12], script.hiddens[11], 12, 2, state, draft_embed_target=row)
    proposer.free_state(state)
    with pytest.raises(RuntimeUseError, match="left on the device"):
        proposer.read_deferred_draft_token()


def test_weights_that_do_not_fit_leave_those_that_do():
    """On a GPU alignment counts, too; `rebind` asks before it changes anything."""
    from circuitgraph.runtime.cuda import check_alignment

    memory = torch.zeros(64, dtype=torch.bfloat16)
    check_alignment({"norm": memory[:8]}, "head")
    with pytest.raises(RuntimeUseError, match=r"head: norm: kernels read 16 bytes at a time; .* got one that is 2 bytes beyond"):
        check_alignment({"norm": memory[1:9]}, "head")
    runner = compiled()[0]
    before = dict(runner.weights)
    name = next(iter(before))
    with pytest.raises(RuntimeUseError):
        runner.rebind({name: before[name][:1]})
    assert all(runner.weights[key] is value for key, value in before.items())
