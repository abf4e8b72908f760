"""The lifecycle on the reference runner, against a dense cache without pool or runner."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from circuitgraph.errors import RuntimeUseError
from circuitgraph.runtime import BlockPool, MtpProposer, PoolExhausted
from tests.runtime.helpers import POSITIONS, Script, drafter, oracle, proposer_of

BLOCK_SIZES = (1, 8, 16)


def prefilled(proposer, script, prompt):
    """A state whose prompt is tokens[:prompt]; the target has chosen tokens[prompt]."""
    state = proposer.alloc_state()
    assert proposer.prefill_drafter(script.tokens[:prompt], script.hiddens[:prompt], state) == prompt - 1
    return state


def propose(proposer, script, position, steps, state, **options):
    return proposer.propose(script.tokens[position], script.hiddens[position - 1], position, steps, state, **options)


def accept(proposer, script, state, position, accepted):
    """The target accepted `accepted` drafts, i.e. they are the script's tokens; catch up with its hiddens."""
    proposer.after_verify(accepted, state)
    end = position + accepted
    tokens = script.tokens[position + 1 : end + 1]
    assert proposer.catchup_batch([tokens], [script.hiddens[position:end]], [position + 1], [state]) == accepted
    return end + 1


def rows_of(proposer, state):
    """The bytes of a state's rows, in row order."""
    slots = torch.tensor(list(proposer.pool.slots(state.lease, 0, state.rows)))
    size = proposer.pool.block_size
    return [part[:, slots // size, :, slots % size].clone() for parts in proposer.pool.storage.values() for part in parts]


@pytest.mark.shows(
    "method alloc_state", "method propose", "method prefill_drafter", "method drafter_rows", "method last_pair_key"
)
@pytest.mark.parametrize("block_size", BLOCK_SIZES)
@pytest.mark.parametrize("prompt", [1, 2, 7, 8, 9, 16, 17])
def test_drafts_after_prefill_are_the_oracles(block_size, prompt):
    proposer, script = proposer_of(block_size=block_size, blocks=256 // block_size), Script(prompt)
    state = prefilled(proposer, script, prompt)
    assert propose(proposer, script, prompt, 5, state) == oracle(drafter(), script, prompt, 5)
    assert proposer.drafter_rows(state) == prompt - 1 + 5
    assert proposer.last_pair_key(state) == prompt - 1 + 4


@pytest.mark.shows("method catchup_batch", "method after_verify")
@pytest.mark.parametrize("switches", [{}, {"rope_position": "hidden", "mask_first": True, "recycle": "pre_norm"}])
@pytest.mark.parametrize("block_size", BLOCK_SIZES)
def test_drafts_after_verify_and_catchup_equal_those_of_a_fresh_prefill(block_size, switches):
    runner = drafter(**switches)
    proposer, script = proposer_of(runner, block_size=block_size, blocks=400 // block_size), Script(3)
    state, position = prefilled(proposer, script, 5), 5
    for accepted in (0, 3, 1, 2, 3, 0, 1):
        assert propose(proposer, script, position, 3, state) == oracle(runner, script, position, 3)
        position = accept(proposer, script, state, position, accepted)
        assert proposer.drafter_rows(state) == position - 1
        assert proposer.last_pair_key(state) == position - 2
        fresh = prefilled(proposer, script, position)
        for kept, rebuilt in zip(rows_of(proposer, state), rows_of(proposer, fresh), strict=True):
            torch.testing.assert_close(kept, rebuilt)
        proposer.free_state(fresh)


def test_skipping_catchup_changes_rows_and_drafts():
    """The control of the test above: without catch-up, the accepted drafts have no rows."""
    proposer, script = proposer_of(), Script(3)
    state = prefilled(proposer, script, 5)
    propose(proposer, script, 5, 3, state)
    proposer.after_verify(3, state)
    assert state.pending_catchup == 3
    assert proposer.drafter_rows(state) == 5 < 8
    assert propose(proposer, script, 9, 3, state) != oracle(drafter(), script, 9, 3)


@pytest.mark.shows("method propose_batch", "method last_confidence")
@pytest.mark.parametrize("block_size", BLOCK_SIZES)
def test_a_batch_drafts_what_each_sequence_drafts_alone(block_size):
    proposer = proposer_of(block_size=block_size, blocks=512 // block_size)
    scripts, prompts = [Script(seed) for seed in range(5)], [1, 2, 8, 9, 17]
    states = [prefilled(proposer, s, p) for s, p in zip(scripts, prompts, strict=True)]
    confidence: list = []
    drafts = proposer.propose_batch(
        [s.tokens[p] for s, p in zip(scripts, prompts, strict=True)],
        [s.hiddens[p - 1] for s, p in zip(scripts, prompts, strict=True)],
        prompts, 4, states, out_confidence=confidence,
    )  # fmt: skip
    assert drafts == [oracle(drafter(), s, p, 4) for s, p in zip(scripts, prompts, strict=True)]
    assert [len(row) for row in confidence] == [4] * 5
    for state, row in zip(states, confidence, strict=True):
        assert proposer.last_confidence(state) == pytest.approx(torch.tensor(row).min().exp().item())
    alone = proposer_of(block_size=block_size, blocks=512 // block_size)
    for script, prompt, expected in zip(scripts, prompts, drafts, strict=True):
        assert propose(alone, script, prompt, 4, prefilled(alone, script, prompt)) == expected


@pytest.mark.shows("rule 2")
def test_batched_catchup_keeps_sequences_apart():
    proposer, scripts, accepted = proposer_of(), [Script(seed) for seed in range(3)], [2, 0, 3]
    states = [prefilled(proposer, script, 6) for script in scripts]
    proposer.propose_batch([s.tokens[6] for s in scripts], [s.hiddens[5] for s in scripts], [6] * 3, 3, states)
    for state, count in zip(states, accepted, strict=True):
        proposer.after_verify(count, state)
    tokens = [s.tokens[7 : 7 + a] for s, a in zip(scripts, accepted, strict=True)]
    hiddens = [s.hiddens[6 : 6 + a] for s, a in zip(scripts, accepted, strict=True)]
    assert proposer.catchup_batch(tokens, hiddens, [7] * 3, states) == 5
    for script, state, count in zip(scripts, states, accepted, strict=True):
        position = 7 + count
        assert propose(proposer, script, position, 3, state) == oracle(drafter(), script, position, 3)


def test_prefill_in_chunks_loses_no_pair():
    proposer, script = proposer_of(), Script(1)
    state = proposer.alloc_state()
    for first, last in ((0, 8), (8, 9), (9, 20)):
        tokens, hiddens = script.tokens[first : last + 1], script.hiddens[first:last]
        assert proposer.prefill_drafter(tokens, hiddens, state, first_pos=first) == last - first
    assert propose(proposer, script, 21, 3, state) == oracle(drafter(), script, 21, 3)


def test_hiddens_may_be_strided_or_of_another_float_dtype():
    proposer, script = proposer_of(), Script(1)
    wide = torch.zeros(script.hiddens.shape[0], 96)
    wide[:, ::2] = script.hiddens
    state = proposer.alloc_state()
    proposer.prefill_drafter(script.tokens[:9], wide[:9, ::2], state)
    assert proposer.propose(script.tokens[9], wide[8, ::2].double(), 9, 3, state) == oracle(drafter(), script, 9, 3)


def test_rows_that_never_arrive_are_tolerated_and_visible():
    """A prefix that the server had cached: the rows start late, the positions do not."""
    proposer, script = proposer_of(), Script(1)
    state = proposer.alloc_state()
    assert proposer.prefill_drafter(script.tokens[10:20], script.hiddens[10:19], state, first_pos=10) == 9
    assert proposer.drafter_rows(state) == 9
    assert proposer.last_pair_key(state) == 18
    assert len(propose(proposer, script, 20, 3, state)) == 3


@pytest.mark.shows("rule 8")
def test_stop_id_ends_the_chain_and_its_surplus_rows_go():
    proposer, script = proposer_of(block_size=1), Script(1)
    state = prefilled(proposer, script, 4)
    expected = oracle(drafter(), script, 4, 4)
    drafts = propose(proposer, script, 4, 4, state, stop_ids={expected[1]})
    assert drafts == expected[: expected.index(expected[1]) + 1]
    assert proposer.drafter_rows(state) == 3 + len(drafts)
    assert proposer.pool.held == 3 + len(drafts)


# -- running out ---------------------------------------------------------------------------------------------------


@pytest.mark.shows("rule 4")
def test_exhausted_pool_gives_no_drafts_and_counts_it():
    proposer, script = proposer_of(blocks=2, block_size=4), Script(1)
    state = prefilled(proposer, script, 7)
    assert propose(proposer, script, 7, 3, state) == oracle(drafter(), script, 7, 2), "as many as fit"
    assert proposer.metrics.refusals == {}
    position = accept(proposer, script, state, 7, 1)
    before = rows_of(proposer, state)
    assert propose(proposer, script, position, 3, state) == []
    assert proposer.metrics.refusals == {"pool_exhausted": 1}
    assert proposer.last_confidence(state) is None
    assert all(torch.equal(a, b) for a, b in zip(before, rows_of(proposer, state), strict=True))
    proposer.after_verify(0, state)


def test_a_budget_of_the_whole_pool_drafts_to_its_end():
    proposer, script = proposer_of(blocks=4, block_size=4), Script(1)
    state, position = proposer.alloc_state_for(16), 5
    proposer.prefill_drafter(script.tokens[:5], script.hiddens[:5], state)
    while position < 15:
        useful = 16 - position - 2  # the target adds a token of its own
        drafts = propose(proposer, script, position, 4, state)
        assert drafts == oracle(drafter(), script, position, len(drafts))
        assert len(drafts) >= min(useful, 4)
        position = accept(proposer, script, state, position, min(1, len(drafts)))
    assert proposer.metrics.refusals == {}


@pytest.mark.shows("method rows_behind")
def test_a_step_without_drafts_is_seen_and_caught_up():
    proposer, script = proposer_of(), Script(1)
    state = prefilled(proposer, script, 5)
    assert proposer.rows_behind(state, 5) == 0
    assert propose(proposer, script, 5, 0, state) == []
    proposer.after_verify(0, state)
    assert proposer.rows_behind(state, 6) == 1
    assert proposer.catchup_batch([script.tokens[5:6]], [script.hiddens[4:5]], [5], [state]) == 1
    assert proposer.rows_behind(state, 6) == 0
    assert propose(proposer, script, 6, 3, state) == oracle(drafter(), script, 6, 3)


def test_tokens_may_be_arrays():
    import numpy

    script = Script(1)
    for kind in (torch.tensor, numpy.array, tuple):
        proposer = proposer_of()
        state = proposer.alloc_state()
        assert proposer.prefill_drafter(kind(script.tokens[:5]), script.hiddens[:5], state) == 4
        assert proposer.catchup_batch([kind(script.tokens[5:7])], [script.hiddens[4:6]], [5], [state]) == 2
        drafts = proposer.propose_batch(kind(script.tokens[7:8]), script.hiddens[6:7], [7], 3, [state])
        assert drafts == [oracle(drafter(), script, 7, 3)]
        proposer.after_verify(0, state)
        for wrong in ([kind(script.tokens[:5])], [0.5] * 5):
            with pytest.raises(RuntimeUseError, match="tokens: are not integers in a row"):
                proposer.prefill_drafter(wrong, script.hiddens[: len(wrong)], state)


def test_prefill_and_catchup_are_all_or_nothing():
    proposer, script = proposer_of(blocks=3, block_size=4), Script(1)
    state = proposer.alloc_state()
    assert proposer.prefill_drafter(script.tokens[:20], script.hiddens[:20], state) == 0
    assert proposer.pool.held == proposer.drafter_rows(state) == 0
    one, two = prefilled(proposer, script, 9), proposer.alloc_state()
    rows = [script.tokens[9:10], script.tokens[1:7]], [script.hiddens[8:9], script.hiddens[:6]]
    assert proposer.catchup_batch(*rows, [9, 1], [one, two]) == 0
    assert (proposer.drafter_rows(one), proposer.drafter_rows(two)) == (8, 0)
    assert proposer.metrics.refusals["pool_exhausted"] == 3


@pytest.mark.shows("rule 4")
def test_one_row_out_of_room_does_not_stop_the_others():
    proposer, scripts = proposer_of(blocks=5, block_size=4), [Script(0), Script(1), Script(2)]
    states = [prefilled(proposer, script, prompt) for script, prompt in zip(scripts, (5, 5, 5), strict=True)]
    drafts = proposer.propose_batch([s.tokens[5] for s in scripts], [s.hiddens[4] for s in scripts], [5] * 3, 4, states)
    expected = [oracle(drafter(), script, 5, 4) for script in scripts]
    assert drafts == [expected[0], expected[1], []]
    assert proposer.pool.held == 5


@pytest.mark.shows("rule 5")
def test_drafting_stops_at_the_position_limit():
    proposer, script = proposer_of(), Script(1, length=POSITIONS + 4)
    last = POSITIONS - 2
    state, other = prefilled(proposer, script, last), prefilled(proposer, script, 3)
    tokens, hiddens = [script.tokens[last], script.tokens[3]], [script.hiddens[last - 1], script.hiddens[2]]
    drafts = proposer.propose_batch(tokens, hiddens, [last, 3], 4, [state, other])
    assert drafts == [oracle(drafter(), script, last, 2), oracle(drafter(), script, 3, 4)]
    position = accept(proposer, script, state, last, 2 - 1)
    assert position == POSITIONS
    assert propose(proposer, script, position, 4, state) == []
    assert proposer.metrics.refusals == {"position_limit": 1}
    proposer.after_verify(0, state)
    # The target goes on beyond the table: rows there are dropped, not clamped.
    assert proposer.catchup_batch([script.tokens[position : position + 2]], [script.hiddens[:2]], [position], [state]) == 0


@pytest.mark.shows("method alloc_state_for")
def test_a_promised_budget_is_kept_and_refused_up_front():
    proposer, script = proposer_of(blocks=10, block_size=4), Script(1)
    promised = proposer.alloc_state_for(24)
    greedy = proposer.alloc_state()
    assert proposer.prefill_drafter(script.tokens[:20], script.hiddens[:20], greedy) == 0
    assert proposer.prefill_drafter(script.tokens[:17], script.hiddens[:17], greedy) == 16
    assert propose(proposer, script, 17, 1, greedy) == []
    with pytest.raises(PoolExhausted, match=r"cannot promise 4 rows; expected at most 0"):
        proposer.alloc_state_for(4)
    assert proposer.prefill_drafter(script.tokens[:20], script.hiddens[:20], promised) == 19
    assert propose(proposer, script, 20, 3, promised) == oracle(drafter(), script, 20, 3)
    proposer.free_state(greedy)
    proposer.free_state(proposer.alloc_state_for(16))


# -- refusals change nothing -----------------------------------------------------------------------------------


def snapshot(proposer, *states):
    fields = [
        (list(s.lease.blocks), s.lease.promised, list(s.history.positions), list(s.history.text), list(s.last_drafts),
         s.next_token, s.proposed_at, s.last_confidence, len(s.unsettled))
        for s in states
    ]  # fmt: skip
    storage = [part.clone() for parts in proposer.pool.storage.values() for part in parts]
    return fields, list(proposer.pool._free), proposer.pool.ledger, storage


def unchanged(before, after):
    return before[:3] == after[:3] and all(torch.equal(a, b) for a, b in zip(before[3], after[3], strict=True))


def wrong_calls():
    """Name to (call(proposer, script, state, other), message)."""
    hidden = torch.zeros(48)
    return {
        "unequal lists": (lambda p, s, a, b: p.propose_batch([1], torch.zeros(2, 48), [5, 5], 3, [a, b]), "unequal length"),
        "a state twice": (lambda p, s, a, b: p.propose_batch([1, 1], torch.zeros(2, 48), [5, 5], 3, [a, a]), "twice"),
        "token too large": (lambda p, s, a, b: p.propose(131, hidden, 5, 3, a), "outside the vocabulary"),
        "token negative": (lambda p, s, a, b: p.propose_batch([1, -1], torch.zeros(2, 48), [5, 5], 3, [a, b]), r"got -1"),
        "hidden of another size": (lambda p, s, a, b: p.propose(1, torch.zeros(47), 5, 3, a), "hiddens: do not fit"),
        "hidden of integers": (lambda p, s, a, b: p.propose(1, hidden.int(), 5, 3, a), "hiddens: do not fit"),
        "position drafted before": (lambda p, s, a, b: p.propose(1, hidden, 4, 3, a), r"expected 5 or more; got 4"),
        "negative drafts": (lambda p, s, a, b: p.propose(1, hidden, 5, -1, a), "no number of drafts"),
        "half a draft": (lambda p, s, a, b: p.propose(1, hidden, 5, 2.5, a), "no number of drafts"),
        "no budget": (lambda p, s, a, b: p.alloc_state_for(float("nan")), "needs room for a token"),
        "more accepted than drafted": (lambda p, s, a, b: p.after_verify(1, a), r"expected 0\.\.0; got 1"),
        "catch-up without a hidden": (lambda p, s, a, b: p.catchup_batch([[1, 2]], [hidden[None]], [5], [a]), "needs its hidden"),
        "catch-up behind": (lambda p, s, a, b: p.catchup_batch([[1]], [hidden[None]], [4], [a]), "has a row already"),
        "catch-up, second one bad": (
            lambda p, s, a, b: p.catchup_batch([[1], [999]], [hidden[None]] * 2, [5, 5], [a, b]), "outside the vocabulary"
        ),
        "prefill with too few hiddens": (lambda p, s, a, b: p.prefill_drafter(s.tokens[:9], s.hiddens[:5], a), "8 or 9 rows"),
        "prefill again": (lambda p, s, a, b: p.prefill_drafter(s.tokens[:5], s.hiddens[:5], a), "has a row already"),
        "a state of nobody": (lambda p, s, a, b: p.propose(1, hidden, 5, 3, object()), "belongs to another proposer"),
    }  # fmt: skip


@pytest.mark.shows("rule 1")
@pytest.mark.parametrize("name", wrong_calls())
def test_a_refused_call_changes_nothing(name):
    call, message = wrong_calls()[name]
    proposer, script = proposer_of(), Script(0)
    one, two = prefilled(proposer, script, 5), prefilled(proposer, script, 5)
    before = snapshot(proposer, one, two)
    with pytest.raises(RuntimeUseError, match=message):
        call(proposer, script, one, two)
    assert unchanged(before, snapshot(proposer, one, two))
    assert proposer.metrics.refusals == {}


def test_proposing_and_catching_up_wait_for_the_verify():
    proposer, script = proposer_of(), Script(0)
    state = prefilled(proposer, script, 5)
    propose(proposer, script, 5, 2, state)
    before = snapshot(proposer, state)
    waiting, more = "drafts are waiting for after_verify", "num_accepted: more drafts accepted than there were; expected 0..2"
    for call, told in (
        (lambda: propose(proposer, script, 8, 2, state), waiting),
        (lambda: proposer.catchup_batch([[1]], [script.hiddens[:1]], [8], [state]), waiting),
        (lambda: proposer.after_verify(3, state), more),
        (lambda: proposer.after_verify(-1, state), more),
    ):
        with pytest.raises(RuntimeUseError, match=told):
            call()
        assert unchanged(before, snapshot(proposer, state))


@pytest.mark.shows("method free_state")
def test_foreign_and_freed_states_are_refused():
    proposer, stranger, script = proposer_of(), proposer_of(), Script(0)
    foreign, freed = prefilled(stranger, script, 5), prefilled(proposer, script, 5)
    proposer.free_state(freed)
    proposer.free_state(freed)
    assert proposer.pool.ledger.free == proposer.pool.total
    mine = prefilled(proposer, script, 5)
    before = snapshot(proposer, mine), snapshot(stranger, foreign)
    for state, message in ((foreign, "another proposer"), (freed, "was freed")):
        for call in (
            lambda s: propose(proposer, script, 5, 3, s),
            lambda s: proposer.propose_batch([1, 1], torch.zeros(2, 48), [5, 5], 3, [mine, s]),
            lambda s: proposer.after_verify(0, s),
            lambda s: proposer.drafter_rows(s),
            lambda s: proposer.catchup_batch([[1]], [script.hiddens[:1]], [5], [s]),
        ):
            with pytest.raises(RuntimeUseError, match=message):
                call(state)
    with pytest.raises(RuntimeUseError, match="another proposer"):
        proposer.free_state(foreign)
    assert unchanged(before[0], snapshot(proposer, mine))
    assert unchanged(before[1], snapshot(stranger, foreign))


@pytest.mark.shows("rule 1")
def test_a_runner_that_fails_leaves_state_and_ledger(monkeypatch):
    proposer, script = proposer_of(block_size=1), Script(0)
    state = prefilled(proposer, script, 5)
    before = snapshot(proposer, state)

    def fail(*args, **kwargs):
        raise OSError("device lost")

    monkeypatch.setattr(proposer.runner.__class__, "chain", fail)
    monkeypatch.setattr(proposer.runner.__class__, "context", fail)
    with pytest.raises(OSError, match="device lost"):
        propose(proposer, script, 5, 3, state)
    with pytest.raises(OSError, match="device lost"):
        proposer.catchup_batch([script.tokens[5:7]], [script.hiddens[4:6]], [5], [state])
    assert unchanged(before, snapshot(proposer, state))


@pytest.mark.shows("rule 2")
def test_nobody_elses_rows_change():
    proposer, scripts = proposer_of(block_size=8), [Script(0), Script(1)]
    states = [prefilled(proposer, script, 6) for script in scripts]
    before = rows_of(proposer, states[0])
    propose(proposer, scripts[1], 6, 4, states[1])
    accept(proposer, scripts[1], states[1], 6, 2)
    proposer.free_state(states[1])
    assert all(torch.equal(a, b) for a, b in zip(before, rows_of(proposer, states[0]), strict=True))


def test_empty_batches_launch_nothing():
    proposer = proposer_of()
    confidence = [[0.5]]
    assert proposer.propose_batch([], torch.zeros(0, 48), [], 3, [], out_confidence=confidence) == []
    assert proposer.catchup_batch([], [], [], []) == 0
    assert confidence == []
    state = proposer.alloc_state()
    assert propose(proposer, Script(0), 1, 0, state) == []
    assert sum(proposer.metrics.refusals.values()) == 0


@pytest.mark.shows("method catchup_drafter")
def test_catchup_drafter_writes_at_the_end_only():
    proposer, script = proposer_of(), Script(0)
    state = prefilled(proposer, script, 5)
    assert proposer.catchup_drafter(script.tokens[5:7], script.hiddens[4:6], 3, 5, state) == 0
    assert proposer.catchup_drafter(script.tokens[5:7], script.hiddens[4:6], 4, 5, state) == 2
    assert propose(proposer, script, 7, 3, state) == oracle(drafter(), script, 7, 3)


def test_metrics_count_what_was_verified():
    proposer, script = proposer_of(), Script(0)
    state, position = prefilled(proposer, script, 5), 5
    for accepted in (2, 0, 3):
        propose(proposer, script, position, 3, state)
        position = accept(proposer, script, state, position, accepted)
    metrics = proposer.metrics
    assert (metrics.drafts, metrics.drafted, metrics.accepted) == (3, 9, 5)
    assert metrics.accepted_per_position == [2, 2, 1]
    assert metrics.mean_accepted_length == pytest.approx(1 + 5 / 3)
    assert metrics.snapshot()["acceptance"] == pytest.approx([2 / 3, 2 / 3, 1 / 3])
    assert proposer.runner.paths["reference"] > 0
    metrics.reset()
    assert metrics.mean_accepted_length == 1.0


def test_what_does_not_fit_together_is_refused():
    runner = drafter()
    with pytest.raises(RuntimeUseError, match=r"no trim policy 'exakt'. Did you mean 'exact'\?"):
        MtpProposer(runner, proposer_of().pool, trim="exakt")
    proposer = proposer_of()
    with pytest.raises(RuntimeUseError, match="the pool belongs to another proposer"):
        MtpProposer(runner, proposer.pool)
    wide = replace(runner.circuit, states=(replace(runner.circuit.states[0], dim=32),))
    with pytest.raises(
        RuntimeUseError, match=r"kv: storage does not fit; expected contiguous f32\[1, blocks, 2, block_size, 16\]"
    ):
        MtpProposer(runner, BlockPool(wide, blocks=4))
    with pytest.raises(RuntimeUseError, match="made for another circuit"):
        MtpProposer(runner, BlockPool(replace(runner.circuit, states=()), blocks=4))
    pool = BlockPool(runner.circuit, blocks=4)
    for _ in range(2):  # one after the other
        MtpProposer(runner, pool)
    with pytest.raises(RuntimeUseError, match="budget_tokens"):
        proposer.alloc_state_for(0)
    assert proposer.propose_batch_max() >= 1
    assert proposer.prefill_hidden_rows(10_000) == POSITIONS
    assert proposer.prefill_hidden_rows(10) == 10
