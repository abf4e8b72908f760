"""The trim policies: what they keep, what is then missing, and that drafts are what a dense cache of these rows gives."""

from __future__ import annotations

import pytest
import torch

from circuitgraph.errors import RuntimeUseError
from circuitgraph.runtime import TRIM
from circuitgraph.runtime.device_rows import place_chain
from tests.runtime.dense import KEPT, Dense
from tests.runtime.helpers import Script, drafter, proposer_of

POLICIES = sorted(KEPT)
CASES = [(drafted, accepted) for drafted in range(1, 6) for accepted in range(drafted + 1)]


def test_policies_keep_what_the_specification_says():
    assert sorted(TRIM) == POLICIES
    for name in POLICIES:
        for drafted, accepted in CASES:
            assert TRIM[name](drafted, accepted) == KEPT[name](drafted, accepted), (name, drafted, accepted)


@pytest.mark.parametrize("trim", POLICIES)
def test_policies_are_the_same_on_the_device(trim):
    drafted, accepted = (torch.tensor(column, dtype=torch.int32) for column in zip(*CASES, strict=True))
    cells = torch.stack([torch.full_like(drafted, 10), torch.full_like(drafted, 5), drafted], dim=1)
    table = torch.arange(len(CASES) * 20, dtype=torch.int32).view(len(CASES), 20)
    placed = place_chain(
        cells, accepted, cells[:, 1], drafted, table, steps=1, trim=trim, block_size=1, limit=None
    )  # fmt: skip
    assert placed.cells[:, 0].tolist() == [10 + KEPT[trim](*case) for case in CASES]


@pytest.mark.shows("method after_verify", "method drafter_rows", "method last_pair_key")
@pytest.mark.parametrize("trim", POLICIES)
@pytest.mark.parametrize("accepted", [0, 1, 2, 3])
def test_rows_keys_and_catchup_after_a_verify(trim, accepted):
    proposer, script = proposer_of(trim=trim), Script(0)
    state = proposer.alloc_state()
    proposer.prefill_drafter(script.tokens[:6], script.hiddens[:6], state)
    drafts = proposer.propose(script.tokens[6], script.hiddens[5], 6, 3, state)
    proposer.after_verify(accepted, state)
    kept = KEPT[trim](3, accepted)
    assert proposer.drafter_rows(state) == 5 + kept
    assert proposer.last_pair_key(state) == 4 + kept
    missing = accepted + 1 - kept
    assert state.pending_catchup == proposer.rows_behind(state, 7 + accepted) == missing
    fed, first = [script.tokens[6], *drafts], 6 + kept
    rows = script.hiddens[first - 1 : 6 + accepted]
    assert proposer.catchup_batch([fed[kept : accepted + 1]], [rows], [first], [state]) == missing
    assert state.pending_catchup == proposer.rows_behind(state, 7 + accepted) == 0


@pytest.mark.parametrize("trim", POLICIES)
def test_drafts_of_a_long_text_are_a_dense_caches(trim):
    proposer, script, dense = proposer_of(trim=trim, block_size=4), Script(2), Dense(drafter(), trim)
    state, text = proposer.alloc_state(), script.tokens[:6]
    proposer.prefill_drafter(text[:5], script.hiddens[:5], state)
    dense.append(1, text[1:5], script.hiddens)
    for step, accepted in enumerate((3, 0, 2, 3, 1, 3, 3, 0, 2)):
        position = len(text) - 1
        drafts = proposer.propose(text[-1], script.hiddens[position - 1], position, 3, state)
        dense.follow(text[-1], script.hiddens[position - 1], position, drafts)
        proposer.after_verify(accepted, state)
        dense.verified(3, accepted)
        fed = [text[-1], *drafts]
        text += [*drafts[:accepted], script.tokens[40 + step]]
        first = dense.next_position
        rows = fed[first - position : accepted + 1], script.hiddens[first - 1 : position + accepted]
        assert proposer.catchup_batch([rows[0]], [rows[1]], [first], [state]) == len(rows[0])
        dense.append(first, *rows)
        assert proposer.drafter_rows(state) == len(dense.positions) == len(text) - 2


def test_policies_differ():
    """The control: the same text, other rows."""
    made = {}
    for trim in POLICIES:
        proposer, script = proposer_of(trim=trim), Script(0)
        state = proposer.alloc_state()
        proposer.prefill_drafter(script.tokens[:6], script.hiddens[:6], state)
        proposer.propose(script.tokens[6], script.hiddens[5], 6, 4, state)
        proposer.after_verify(2, state)
        made[trim] = proposer.drafter_rows(state)
    assert made == {"exact": 6, "valid": 8, "seed": 7, "seed_refeed": 6}


def test_an_unknown_policy_is_refused():
    with pytest.raises(RuntimeUseError, match=r"no trim policy 'vald'. Did you mean 'valid'\?"):
        proposer_of(trim="vald")
