"""What a proposer must not take: numbers that are none, text that contradicts its rows, hiddens that are not finite, calls
out of order; and what is left when a life ends early."""

from __future__ import annotations

import gc
import threading
import weakref

import pytest
import torch

from circuitgraph.errors import RuntimeUseError
from circuitgraph.runtime import BlockPool, DraftRunner, Ledger, MtpProposer
from tests.runtime.grammars import CountingMatcher
from tests.runtime.helpers import Script, drafter, proposer_of
from tests.runtime.test_compiled import compiled
from tests.runtime.test_proposer import snapshot, unchanged


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
    with pytest.raises(
        RuntimeUseError, match=r"embed_tokens: does not fit; expected contiguous f32\[131, 48\] on cpu; got f32\[1, 48\]"
    ):
        runner.rebind({"embed_tokens": before["embed_tokens"][:1]})
    assert all(runner.weights[key] is value for key, value in before.items())


# -- calls out of order --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("where", ["fill_next_token_bitmask", "accept_token", "rollback", "is_terminated"])
def test_a_matcher_cannot_begin_another_call(where):
    """From inside of a propose every call would find one half done: rows reserved, not written."""
    proposer, script, state = prefilled()
    other = proposer.alloc_state()
    calls = {
        "propose": lambda: proposer.propose(script.tokens[1], script.hiddens[0], 1, 2, other),
        "propose_batch": lambda: proposer.propose_batch([], [], [], 2, []),
        "prefill_drafter": lambda: proposer.prefill_drafter(script.tokens[:3], script.hiddens[:3], other),
        "catchup_batch": lambda: proposer.catchup_batch([], [], [], []),
        "after_verify": lambda: proposer.after_verify(0, state),
        "alloc_state": proposer.alloc_state,
        "free_state": lambda: proposer.free_state(state),
        "take_drafter_kv": lambda: proposer.take_drafter_kv(state),
        "set_circuit_draft": lambda: proposer.set_circuit_draft(None),
        "drafter_rows": lambda: proposer.drafter_rows(state),
    }
    for name, call in calls.items():
        fresh = prefilled_state(proposer, script)
        matcher = CountingMatcher(131, 0)
        original = getattr(matcher, where)

        def again(*given, _call=call, _original=original):
            _call()
            return _original(*given)

        setattr(matcher, where, again)
        before = snapshot(proposer, fresh, state, other)
        with pytest.raises(RuntimeUseError, match="MtpProposer: a call of this proposer is under way in this thread"):
            proposer.propose(script.tokens[10], script.hiddens[9], 10, 2, fresh, grammar=matcher)
        # A step that ran before it has written the row after the last one, which nobody holds.
        assert before[:3] == snapshot(proposer, fresh, state, other)[:3], name
        assert proposer.metrics.refusals == {}
        plain = proposer.propose(script.tokens[10], script.hiddens[9], 10, 2, fresh, grammar=CountingMatcher(131, 0))
        assert len(plain) == 2, "the proposer goes on"
        proposer.free_state(fresh)


def prefilled_state(proposer, script):
    state = proposer.alloc_state()
    proposer.prefill_drafter(script.tokens[:10], script.hiddens[:9], state)
    return state


@pytest.mark.shows("rule 12")
def test_other_threads_wait_and_are_not_refused():
    proposer, script, state = prefilled()
    other, made, inside = prefilled_state(proposer, script), [], threading.Event()

    class Slow(CountingMatcher):
        def fill_next_token_bitmask(self, bitmask, index=0):
            inside.set()
            thread.join(0.05)
            return super().fill_next_token_bitmask(bitmask, index)

    def second():
        inside.wait()
        made.append(proposer.propose(script.tokens[10], script.hiddens[9], 10, 3, other))

    thread = threading.Thread(target=second)
    thread.start()
    proposer.propose(script.tokens[10], script.hiddens[9], 10, 3, state, grammar=Slow(131, 0))
    thread.join()
    assert len(made[0]) == 3


def in_device_form(proposer, script, state, position, accepted):
    out = torch.zeros(1, 3, dtype=torch.int32)
    token = torch.tensor([script.tokens[position]], dtype=torch.int32)
    told = None if accepted is None else torch.tensor([accepted], dtype=torch.int32)
    proposer.propose_batch(token, script.hiddens[position - 1 : position], [position], 3, [state], accepted=told, out=out)


def test_counts_are_told_in_the_order_of_the_proposes():
    """Proposes at 10, 11 and 15: after the first none was accepted, after the second all."""
    proposer, script, state = prefilled()
    for position, accepted in ((10, None), (11, 0), (15, 3)):
        in_device_form(proposer, script, state, position, accepted)
    before = snapshot(proposer, state)
    with pytest.raises(RuntimeUseError, match=r"accepted: is not of the oldest propose; .* at 11; got one .* at 14"):
        proposer.settle([state], [3])
    assert unchanged(before, snapshot(proposer, state))
    proposer.settle([state], [0])
    proposer.settle([state], [3])
    proposer.settle([state], [2])
    assert state.next_token == 18
    assert proposer.metrics.accepted == 5
    assert proposer.metrics.skipped_rows == 3, "of the accepted drafts of the second, which nobody caught up with"


def test_a_count_that_leaves_a_gap_is_counted_as_one():
    proposer, script, state = prefilled()
    for position, accepted in ((10, None), (13, 2)):
        in_device_form(proposer, script, state, position, accepted)
    proposer.settle([state], [0])
    proposer.settle([state], [0])
    assert proposer.metrics.skipped_rows == 2


def test_device_form_positions_go_on_from_the_propose_before():
    proposer, script, state = prefilled()
    in_device_form(proposer, script, state, 12, None)
    before = snapshot(proposer, state)
    for position in (10, 12):
        with pytest.raises(RuntimeUseError, match="expected 13 or more"):
            in_device_form(proposer, script, state, position, 0)
    assert unchanged(before, snapshot(proposer, state))
    in_device_form(proposer, script, state, 13, 0)


# -- lives that end early ------------------------------------------------------------------------------------------


def test_what_a_proposer_leaves_behind_comes_back_to_its_pool(caplog):
    proposer, script, state = prefilled()
    pool, runner = proposer.pool, proposer.runner
    promised = proposer.alloc_state_for(30)
    carried = proposer.take_drafter_kv(prefilled_state(proposer, script))
    assert (pool.ledger.held, pool.ledger.loaned) == (2, 2)
    assert pool.ledger.promised > 0
    gone = weakref.ref(proposer)
    del proposer, state, promised, carried
    gc.collect()
    assert gone() is None
    second = MtpProposer(runner, pool)
    assert pool.ledger == Ledger(total=64, free=64, held=0, loaned=0, promised=0)
    assert sorted(pool._free) == list(range(64))
    assert "without freeing 3 states: 2 blocks held, 2 lent came back" in caplog.text
    caplog.clear()
    state = prefilled_state(second, script)
    assert len(second.propose(script.tokens[10], script.hiddens[9], 10, 3, state)) == 3
    second.free_state(state)
    del second, state
    gc.collect()
    MtpProposer(runner, pool)
    assert not caplog.records, "nothing was left"


def test_a_pool_tells_each_runner_once_that_it_is_gone(monkeypatch):
    told = []

    class Told(type(drafter())):
        def release(self, storage):
            return lambda name=self.name: told.append(name)

    def named(name):
        runner = Told(drafter().circuit, drafter().weights)
        runner.name = name
        return runner

    own, other = named("own"), named("other")
    proposer = MtpProposer(own, BlockPool(own.circuit, blocks=4))
    gc.collect()
    before = len(weakref.finalize._registry)
    for _ in range(50):
        proposer.set_circuit_draft(other)
        proposer.set_circuit_draft(None)
        proposer.set_circuit_draft(named("short-lived"))
    proposer.set_circuit_draft(None)
    gc.collect()
    assert len(weakref.finalize._registry) == before
    assert len(proposer.pool._releases) == 2
    del proposer
    gc.collect()
    assert sorted(told) == ["other", "own"]
