"""Carried KV: a conversation's rows between two turns."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from circuitgraph.errors import RuntimeUseError
from circuitgraph.runtime import CompiledRunner
from tests.runtime.helpers import InterpretedLibrary, Script, drafter, manifest_of, oracle, proposer_of
from tests.runtime.test_proposer import propose, rows_of, snapshot, unchanged


def turn(proposer, script, length=20, budget=None):
    """A state that has read `length` tokens."""
    state = proposer.alloc_state_for(budget)
    assert proposer.prefill_drafter(script.tokens[:length], script.hiddens[:length], state) == length - 1
    return state


@pytest.mark.shows("method take_drafter_kv", "method install_drafter_kv", "goal two turns")
def test_two_turns_draft_as_one_prefill_of_everything():
    """Turn two drafts from its first token without prefilling turn one again."""
    proposer, script = proposer_of(), Script(0)
    carried = proposer.take_drafter_kv(turn(proposer, script))
    assert carried is not None
    assert (carried.rows, carried.last_pair_key, carried.tokens) == (19, 18, script.tokens[:20])
    written = proposer.metrics.context_rows
    state = proposer.alloc_state_for(60)
    prompt = script.tokens[:31]
    assert proposer.install_drafter_kv(state, carried, prefix=prompt)
    assert proposer.drafter_rows(state) == 19
    first = proposer.last_pair_key(state) + 1
    assert proposer.prefill_drafter(prompt[first:], script.hiddens[first:31], state, first_pos=first) == 11
    assert proposer.metrics.context_rows - written == 11
    whole = turn(proposer, script, 31)
    for kept, fresh in zip(rows_of(proposer, state), rows_of(proposer, whole), strict=True):
        torch.testing.assert_close(kept, fresh)
    assert propose(proposer, script, 31, 4, state) == propose(proposer, script, 31, 4, whole) == oracle(drafter(), script, 31, 4)


@pytest.mark.shows("method take_drafter_kv", "method free_drafter_kv")
def test_a_state_is_as_fresh_after_taking_and_freeing_it_frees_nothing():
    proposer, script = proposer_of(), Script(0)
    state = turn(proposer, script)
    carried = proposer.take_drafter_kv(state)
    assert (proposer.drafter_rows(state), proposer.last_pair_key(state), proposer.last_confidence(state)) == (0, None, None)
    assert proposer.pool.ledger.loaned == 3
    assert proposer.take_drafter_kv(state) is None, "there is nothing more"
    assert proposer.prefill_drafter(script.tokens[:5], script.hiddens[:5], state) == 4
    assert propose(proposer, script, 5, 3, state) == oracle(drafter(), script, 5, 3)
    proposer.free_state(state)
    assert (proposer.pool.ledger.held, proposer.pool.ledger.loaned) == (0, 3)
    proposer.free_drafter_kv(carried)
    assert proposer.pool.ledger.free == proposer.pool.total


@pytest.mark.shows("method install_drafter_kv", "pitfall KV of another life")
@pytest.mark.parametrize("differs", [1, 8, 9, 15, 16, 17, 19])
def test_only_the_common_prefix_is_kept(differs):
    """Pitfall: carried KV installed past the common prefix."""
    proposer, script = proposer_of(), Script(0)
    carried = proposer.take_drafter_kv(turn(proposer, script))
    prompt = [*script.tokens[:differs], (script.tokens[differs] + 1) % 131, 7, 8]
    state = proposer.alloc_state()
    assert proposer.install_drafter_kv(state, carried, prefix=prompt) == (differs > 1)
    if differs == 1:
        assert proposer.metrics.refusals == {"carry_prefix": 1}
        proposer.free_drafter_kv(carried)
        return
    # The row of the token at `differs` - 1 is the last whose hidden and token are of this text.
    assert proposer.drafter_rows(state) == differs - 1
    assert proposer.pool.held == -(-(differs - 1) // 8)
    assert proposer.pool.ledger.loaned == 0


def test_rows_behind_a_token_that_was_never_told_are_not_vouched_for():
    proposer, script = proposer_of(), Script(0)
    state = turn(proposer, script, 10)
    propose(proposer, script, 10, 0, state)  # told
    proposer.catchup_batch([script.tokens[12:14]], [script.hiddens[11:13]], [12], [state])  # 11 was not
    carried = proposer.take_drafter_kv(state)
    assert carried.tokens == script.tokens[:11]
    fresh = proposer.alloc_state()
    assert proposer.install_drafter_kv(fresh, carried, prefix=script.tokens[:30])
    assert proposer.drafter_rows(fresh) == 9
    late = proposer.alloc_state()
    proposer.prefill_drafter(script.tokens[5:15], script.hiddens[5:15], late, first_pos=5)
    carried = proposer.take_drafter_kv(late)
    assert not proposer.install_drafter_kv(proposer.alloc_state(), carried, prefix=script.tokens[:30])
    assert proposer.install_drafter_kv(proposer.alloc_state(), carried), "the caller vouches"


def test_accepted_drafts_are_a_part_of_the_text():
    proposer, script = proposer_of(), Script(0)
    state = turn(proposer, script, 10)
    drafts = propose(proposer, script, 10, 3, state)
    proposer.after_verify(2, state)
    carried = proposer.take_drafter_kv(state)
    assert carried.tokens == script.tokens[:11] + drafts[:2]


def compiled():
    manifest = manifest_of(drafter().circuit)
    return CompiledRunner(manifest, InterpretedLibrary(manifest).functions, drafter().weights)


def occupied(proposer, script, carried):
    return turn(proposer, script, 5), carried


def of_another_proposer(proposer, script, carried):
    stranger = proposer_of()
    return proposer.alloc_state(), stranger.take_drafter_kv(turn(stranger, script))


def of_other_weights(proposer, script, carried):
    other = drafter(seed=1).weights
    proposer.runner.rebind({"lm_head": other["lm_head"]})
    return proposer.alloc_state(), carried


def of_weights_that_changed_under_it(proposer, script, carried):
    state = turn(proposer, script, 5)
    proposer.runner.rebind({"lm_head": drafter(seed=1).weights["lm_head"]})
    return proposer.alloc_state(), proposer.take_drafter_kv(state)


def edited(proposer, script, carried):
    carried.history.text[3] += 1
    return proposer.alloc_state(), carried


def installed_before(proposer, script, carried):
    assert proposer.install_drafter_kv(proposer.alloc_state(), carried)
    return proposer.alloc_state(), carried


def freed_before(proposer, script, carried):
    proposer.free_drafter_kv(carried)
    proposer.take_drafter_kv(turn(proposer, script))  # the same blocks are on loan again, to somebody else
    return proposer.alloc_state(), carried


def a_copy(proposer, script, carried):
    return proposer.alloc_state(), replace(carried)


REFUSALS = {
    "occupied": occupied, "owner": of_another_proposer, "model": of_other_weights,
    "model, rebound": of_weights_that_changed_under_it, "digest": edited,
    "gone": installed_before, "gone, lent again": freed_before, "gone, a copy": a_copy,
}  # fmt: skip


@pytest.mark.shows("pitfall KV of another life")
@pytest.mark.parametrize("reason", REFUSALS)
def test_kv_under_another_model_session_or_text_is_refused(reason):
    """Pitfall: taken-out KV installed where it does not belong. False leaves it with the caller, and changes nothing."""
    proposer, script = proposer_of(compiled()), Script(0)
    state, carried = REFUSALS[reason](proposer, script, proposer.take_drafter_kv(turn(proposer, script)))
    before = snapshot(proposer, state)
    assert not proposer.install_drafter_kv(state, carried, prefix=script.tokens[:30])
    assert unchanged(before, snapshot(proposer, state))
    assert proposer.metrics.refusals == {f"carry_{reason.partition(',')[0]}": 1}


@pytest.mark.shows("method free_drafter_kv")
def test_loose_blocks_are_freed_once():
    proposer, script = proposer_of(), Script(0)
    carried = proposer.take_drafter_kv(turn(proposer, script))
    proposer.free_drafter_kv(carried)
    before = snapshot(proposer)
    for again in (carried, [0, 1], None):
        with pytest.raises(RuntimeUseError, match="is not on loan from this pool"):
            proposer.free_drafter_kv(again)
    assert unchanged(before, snapshot(proposer))


def test_taking_waits_for_the_verify():
    proposer, script = proposer_of(), Script(0)
    state = turn(proposer, script)
    propose(proposer, script, 20, 3, state)
    before = snapshot(proposer, state)
    with pytest.raises(RuntimeUseError, match="drafts are waiting for after_verify"):
        proposer.take_drafter_kv(state)
    assert unchanged(before, snapshot(proposer, state))


def test_promises_go_with_the_blocks():
    """A full pool whose sequence is taken out and comes back into a promised state."""
    proposer, script = proposer_of(blocks=8, block_size=4), Script(0)
    state = turn(proposer, script, 10, budget=32)
    carried = proposer.take_drafter_kv(state)
    assert proposer.pool.ledger.promised == 8 - 3
    proposer.free_state(state)
    assert proposer.pool.ledger.promised == 0
    again = proposer.alloc_state_for(20)
    assert proposer.install_drafter_kv(again, carried)
    assert proposer.pool.ledger.promised == 5 - 3
    assert proposer.prefill_drafter(script.tokens[9:20], script.hiddens[9:20], again, first_pos=9) == 10
