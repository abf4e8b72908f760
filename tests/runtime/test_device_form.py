"""The device form: accept counts that stay on the device, and what the host knows meanwhile. See `machine` for more."""

from __future__ import annotations

import pytest
import torch

from circuitgraph.errors import RuntimeUseError
from circuitgraph.runtime import CompiledRunner
from tests.runtime.dense import KEPT
from tests.runtime.helpers import POSITIONS, InterpretedLibrary, Script, drafter, manifest_of, proposer_of
from tests.runtime.test_proposer import prefilled, rows_of, snapshot, unchanged

K = 3
ACCEPTED = [[3, 0, 1], [2, 3, 0], [0, 3, 3], [1, 1, 2]]
"""Of three sequences, step by step."""


def ints(values):
    return torch.tensor(values, dtype=torch.int32)


def compiled():
    manifest = manifest_of(drafter().circuit, draft=(1, 2))
    return CompiledRunner(manifest, InterpretedLibrary(manifest).functions, drafter().weights)


class Texts:
    """Three sequences whose target accepts what ACCEPTED says; `tokens` grow."""

    def __init__(self, proposer):
        self.scripts, prompts = [Script(seed) for seed in range(3)], (7, 8, 17)
        self.states = [prefilled(proposer, script, prompt) for script, prompt in zip(self.scripts, prompts, strict=True)]
        self.tokens = [script.tokens[: prompt + 1] for script, prompt in zip(self.scripts, prompts, strict=True)]

    @property
    def newest(self):
        return [text[-1] for text in self.tokens]

    @property
    def positions(self):
        return [len(text) - 1 for text in self.tokens]

    @property
    def hiddens(self):
        return torch.stack([script.hiddens[at - 1] for script, at in zip(self.scripts, self.positions, strict=True)])

    def verified(self, drafts, accepted):
        """(tokens [3, K + 1], hiddens [3, K + 1, H]) that the target was fed."""
        fed = ints([[text[-1], *row] for text, row in zip(self.tokens, drafts, strict=True)])
        rows = torch.stack([s.hiddens[at - 1 : at + K] for s, at in zip(self.scripts, self.positions, strict=True)])
        for text, script, row, count in zip(self.tokens, self.scripts, drafts, accepted, strict=True):
            text += [*row[:count], script.tokens[len(text) + 30]]
        return fed, rows


def host_loop(proposer):
    texts, made = Texts(proposer), []
    for accepted in ACCEPTED:
        positions = texts.positions
        drafts = proposer.propose_batch(texts.newest, texts.hiddens, positions, K, texts.states)
        made.append(drafts)
        fed, rows = texts.verified(drafts, accepted)
        for row, (state, count) in enumerate(zip(texts.states, accepted, strict=True)):
            proposer.after_verify(count, state)
            first = KEPT[proposer.trim](K, count)
            tokens = fed[row, first : count + 1].tolist()
            proposer.catchup_batch([tokens], [rows[row, first : count + 1]], [positions[row] + first], [state])
    return texts, made


def device_loop(proposer, settle_late: int, positions_of=ints):
    texts, made, accepted, told = Texts(proposer), [], None, []
    for now in ACCEPTED:
        out = torch.full((3, K), -7, dtype=torch.int32)
        where = positions_of(texts.positions)
        assert (
            proposer.propose_batch(ints(texts.newest), texts.hiddens, where, K, texts.states, accepted=accepted, out=out) is out
        )
        made.append(out.tolist())
        accepted = ints(now)
        fed, rows = texts.verified(made[-1], now)
        assert proposer.catchup_accepted(fed, rows, texts.states, accepted, first=0)
        told.append(now)
        if len(told) > settle_late:
            proposer.settle(texts.states, told.pop(0))
    while told:
        proposer.settle(texts.states, told.pop(0))
    return texts, made


@pytest.mark.shows("method settle", "method catchup_accepted", "method propose_batch", "goal device form")
@pytest.mark.parametrize("trim", sorted(KEPT))
@pytest.mark.parametrize("settle_late", [0, 1, 9])
@pytest.mark.parametrize("make", [drafter, compiled])
def test_drafts_rows_and_bookkeeping_are_the_host_forms(trim, settle_late, make):
    host, device = (proposer_of(make(), trim=trim, block_size=4, blocks=100) for _ in range(2))
    (texts, wanted), (others, made) = host_loop(host), device_loop(device, settle_late)
    assert made == wanted
    assert others.tokens == texts.tokens
    for mine, theirs in zip(others.states, texts.states, strict=True):
        assert mine.history.positions == theirs.history.positions
        assert (mine.next_token, len(mine.lease.blocks)) == (theirs.next_token, len(theirs.lease.blocks))
        for got, want in zip(rows_of(device, mine), rows_of(host, theirs), strict=True):
            torch.testing.assert_close(got, want)
    assert device.metrics.accepted_per_position == host.metrics.accepted_per_position
    assert device.metrics.drafted == host.metrics.drafted


def test_positions_may_be_the_hosts():
    assert device_loop(proposer_of(), 0, positions_of=list)[1] == host_loop(proposer_of())[1]


def test_without_catch_up_the_accept_counts_go_to_the_next_propose():
    host, device = proposer_of(trim="valid"), proposer_of(trim="valid")
    texts, others, accepted = Texts(host), Texts(device), None
    for now in ACCEPTED:
        drafts = host.propose_batch(texts.newest, texts.hiddens, texts.positions, K, texts.states)
        out = torch.zeros(3, K, dtype=torch.int32)
        device.propose_batch(
            ints(others.newest), others.hiddens, ints(others.positions), K, others.states, accepted=accepted, out=out
        )
        assert out.tolist() == drafts
        accepted = ints(now)
        texts.verified(drafts, now)
        others.verified(drafts, now)
        for state, count in zip(texts.states, now, strict=True):
            host.after_verify(count, state)


@pytest.mark.parametrize("positions_of", [ints, list])
@pytest.mark.parametrize("catch_up", [True, False])
def test_a_host_form_propose_may_be_verified_on_the_device(positions_of, catch_up):
    proposer, reference = proposer_of(), proposer_of()
    texts, others = Texts(proposer), Texts(reference)
    drafts = [p.propose_batch(t.newest, t.hiddens, t.positions, K, t.states) for p, t in ((proposer, texts), (reference, others))]
    fed, rows = texts.verified(drafts[0], ACCEPTED[0])
    fed, rows = others.verified(drafts[1], ACCEPTED[0])
    if catch_up:
        assert proposer.catchup_accepted(fed, rows, texts.states, ints(ACCEPTED[0]), first=0)
    for row, (state, count) in enumerate(zip(others.states, ACCEPTED[0], strict=True)):
        reference.after_verify(count, state)
        if not catch_up:
            continue
        first = others.positions[row] - count
        reference.catchup_batch([fed[row, 1 : count + 1].tolist()], [rows[row, 1 : count + 1]], [first], [state])
    out, accepted = torch.zeros(3, K, dtype=torch.int32), ints(ACCEPTED[0])
    where = positions_of(texts.positions)
    proposer.propose_batch(ints(texts.newest), texts.hiddens, where, K, texts.states, accepted=accepted, out=out)
    assert out.tolist() == reference.propose_batch(others.newest, others.hiddens, others.positions, K, others.states)
    proposer.settle(texts.states, ACCEPTED[0])
    assert [state.history.positions for state in texts.states] == [
        state.history.positions[: state.rows - K] for state in others.states
    ]


def test_near_the_position_limit_drafts_stop_on_the_device():
    proposer, script = proposer_of(), Script(1, length=POSITIONS + 4)
    state, out = prefilled(proposer, script, POSITIONS - 2), ints([[0] * 4])
    at = POSITIONS - 2
    proposer.propose_batch(ints([script.tokens[at]]), script.hiddens[at - 1 : at], ints([at]), 4, [state], out=out)
    assert (out[0] >= 0).tolist() == [True, True, False, False]
    with pytest.raises(RuntimeUseError, match=r"expected 0\.\.2; got 3"):
        proposer.settle([state], [3])
    proposer.settle([state], [2])
    assert state.next_token == POSITIONS + 1


def test_upper_bounds_cost_drafts_until_the_host_is_told():
    proposer, script = proposer_of(blocks=4, block_size=4), Script(1)
    state, accepted = prefilled(proposer, script, 5), None
    made = []
    for step in range(3):
        out = ints([[0] * 4])
        at = 5 + step
        proposer.propose_batch(
            ints([script.tokens[at]]), script.hiddens[at - 1 : at], ints([at]), 4, [state], accepted=accepted, out=out
        )
        made.append(int((out >= 0).sum()))
        accepted = ints([0])
    assert made == [4, 4, 2], "16 rows: 4, then at most 4 + 5, then at most 4 + 5 + 5"
    proposer.settle([state], [0])
    proposer.settle([state], [0])
    proposer.settle([state], [0])
    assert proposer.drafter_rows(state) == 7
    assert proposer.pool.held == 2
    assert len(proposer.propose(script.tokens[8], script.hiddens[7], 8, 4, state)) == 4


def test_a_sequence_without_room_gets_none_and_the_others_go_on():
    proposer, scripts = proposer_of(blocks=5, block_size=4), [Script(0), Script(1)]
    states = [prefilled(proposer, script, prompt) for script, prompt in zip(scripts, (8, 13), strict=True)]
    out = torch.zeros(2, 2, dtype=torch.int32)
    hiddens = torch.stack([scripts[0].hiddens[7], scripts[1].hiddens[12]])
    for accepted, live in ((None, [True, False]), (ints([0, 0]), [False, False])):
        positions = [state.next_token + len(state.unsettled) for state in states]
        tokens = ints([script.tokens[at] for script, at in zip(scripts, positions, strict=True)])
        proposer.propose_batch(tokens, hiddens, ints(positions), 2, states, accepted=accepted, out=out)
        if live == [True, False]:
            assert (out[:, 0] >= 0).tolist() == live
    assert proposer.metrics.refusals["pool_exhausted"] >= 2
    for _ in range(2):
        proposer.settle(states, [0, 0])
    assert [proposer.drafter_rows(state) for state in states][1] == 12


def test_what_needs_the_host_is_refused():
    proposer = proposer_of()
    texts = Texts(proposer)
    out = torch.zeros(3, K, dtype=torch.int32)
    before = snapshot(proposer, *texts.states)
    good = {"accepted": None, "out": out}
    tokens, positions = ints(texts.newest), ints(texts.positions)
    calls = {
        "stop_ids: needs the host": {"stop_ids": {1}},
        "grammars: needs the host": {"grammars": [None] * 3},
        "out_confidence: needs the host": {"out_confidence": []},
        "out: does not fit": {"out": torch.zeros(3, K + 1, dtype=torch.int32)},
        "accepted: does not fit": {"accepted": torch.zeros(3)},
        "accepted: belongs to the device form": {"accepted": ints([0] * 3), "out": None},
    }
    for message, change in calls.items():
        with pytest.raises(RuntimeUseError, match=message):
            proposer.propose_batch(tokens, texts.hiddens, positions, K, texts.states, **{**good, **change})
    with pytest.raises(RuntimeUseError, match="last_tokens: does not fit"):
        proposer.propose_batch(texts.newest, texts.hiddens, positions, K, texts.states, out=out)
    with pytest.raises(RuntimeUseError, match="has nothing to settle"):
        proposer.settle(texts.states, [0] * 3)
    with pytest.raises(RuntimeUseError, match="has no verify to catch up with"):
        proposer.catchup_accepted(out, torch.zeros(3, K, 48), texts.states, ints([0] * 3))
    assert unchanged(before, snapshot(proposer, *texts.states))
    proposer.propose_batch(tokens, texts.hiddens, positions, K, texts.states, out=out)
    before = snapshot(proposer, *texts.states)
    state = texts.states[0]
    asked, known = (
        "accepted: drafts were verified, with what result",
        "its rows are known to the device only; expected settle first",
    )
    more = f"more drafts accepted than there were; expected 0..{K}; got {K + 1}"
    for call, told in (
        (lambda: proposer.propose_batch(tokens, texts.hiddens, positions, K, texts.states, out=out), asked),
        (lambda: proposer.propose(1, texts.hiddens[0], 60, 2, state), known),
        (lambda: proposer.after_verify(0, state), known),
        (lambda: proposer.catchup_batch([[1]], [texts.hiddens[:1]], [60], [state]), known),
        (lambda: proposer.take_drafter_kv(state), known),
        (lambda: proposer.settle(texts.states, [0, 0, K + 1]), more),
    ):
        with pytest.raises(RuntimeUseError, match=told):
            call()
        assert unchanged(before, snapshot(proposer, *texts.states))
    proposer.free_state(state)  # an abort is possible at any time
    assert proposer.propose_batch(
        ints([]), torch.zeros(0, 48), ints([]), K, [], out=torch.zeros(0, K, dtype=torch.int32)
    ).shape == (0, K)


def test_an_exhausted_pool_refuses_the_catch_up_and_the_counts_still_hold():
    proposer, script = proposer_of(blocks=2, block_size=4), Script(1)
    state, out = prefilled(proposer, script, 6), ints([[0] * K])
    proposer.propose_batch(ints([script.tokens[6]]), script.hiddens[5:6], ints([6]), K, [state], out=out)
    before = snapshot(proposer, state)
    assert not proposer.catchup_accepted(out, torch.zeros(1, K, 48), [state], ints([3]))
    assert unchanged(before, snapshot(proposer, state))
    assert proposer.metrics.refusals["pool_exhausted"] == 1
    proposer.settle([state], [3])
    assert proposer.drafter_rows(state) == 6
