"""Every family through the proposer, against values that other people's code computed: interpreted and compiled."""

from __future__ import annotations

import pytest
import torch

from circuitgraph.runtime import BlockPool
from tests.fixture_cases import fixture_tensors
from tests.runtime.audited import Audited
from tests.runtime.families import CASES, NAMES, RUNNERS, Text, golden

cases = pytest.mark.parametrize(("name", "kind"), CASES)
families = pytest.mark.parametrize("name", NAMES)


def proposer_for(name: str, kind: str = "reference", *, blocks: int = 32, block_size: int = 4, **options) -> Audited:
    runner = RUNNERS[kind](name)
    return Audited(runner, BlockPool(runner.circuit, blocks=blocks, block_size=block_size), **options)


def prefilled(proposer: Audited, text: Text, chunk: int = 99):
    state, fed = proposer.alloc_state(), len(text.tokens) - 1
    for first in range(0, fed - 1, chunk):
        last = min(first + chunk, fed - 1)
        proposer.prefill_drafter(text.tokens[first : last + 1], text.hiddens[first:last], state, first_pos=first)
    return state


def propose(proposer: Audited, texts: list[Text], states: list, num_drafts: int) -> tuple[list[list[int]], list[list[float]]]:
    scores: list[list[float]] = []
    drafts = proposer.propose_batch(
        [text.tokens[-1] for text in texts],
        [text.hiddens[len(text.tokens) - 2] for text in texts],
        [len(text.tokens) - 1 for text in texts],
        num_drafts,
        states,
        out_confidence=scores,
    )
    assert isinstance(drafts, list)
    return drafts, scores


def close(got, want: torch.Tensor, bound: float = 1e-4) -> None:
    torch.testing.assert_close(torch.as_tensor(got).float(), want.float(), rtol=0, atol=bound)


def rows_of(proposer: Audited, state, first: int, last: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values of some rows, [layers, rows, heads, dim]."""
    slots = torch.tensor(proposer.pool.slots(state.lease, first, last - first))
    block, offset = slots // proposer.pool.block_size, slots % proposer.pool.block_size
    return tuple(part[:, block, :, offset].transpose(0, 1) for part in proposer.pool.storage["kv"])  # type: ignore[return-value]


# -- golden values -------------------------------------------------------------------------------------------------


@cases
@pytest.mark.parametrize("chunk", [99, 5])
def test_drafts_after_a_prompt(name: str, kind: str, chunk: int) -> None:
    proposer, text = proposer_for(name, kind), golden(name).one
    state = prefilled(proposer, text, chunk)
    drafts, scores = propose(proposer, [text], [state], len(text.drafts))
    assert drafts == [text.drafts]
    close(scores[0], text.scores)
    alone = proposer_for(name, kind)
    state = prefilled(alone, text)
    assert alone.propose(text.tokens[-1], text.hiddens[-1], len(text.tokens) - 1, 2, state) == text.drafts[:2]


@cases
def test_three_sequences_of_unequal_length_at_once(name: str, kind: str) -> None:
    proposer, texts = proposer_for(name, kind), golden(name).three
    states = [prefilled(proposer, text) for text in texts]
    drafts, scores = propose(proposer, texts, states, len(texts[0].drafts))
    assert drafts == [text.drafts for text in texts]
    for made, text in zip(scores, texts, strict=True):
        close(made, text.scores)
    assert set(proposer.metrics.paths) == {"reference" if kind == "reference" else "n-row"}


@cases
def test_catching_up_after_a_verify(name: str, kind: str) -> None:
    """Two drafts accepted: their rows come from the target's hiddens, and the next proposal goes on from there."""
    proposer, cases = proposer_for(name, kind), golden(name)
    before, after = cases.one, cases.after
    state = prefilled(proposer, before)
    propose(proposer, [before], [state], 4)
    proposer.after_verify(2, state)
    start, newest = len(before.tokens), len(after.tokens) - 1
    missing = proposer.rows_behind(state, newest)
    assert missing == (0 if name == "medusa1" else 2)
    wrote = proposer.catchup_batch([after.tokens[start:newest]], [after.hiddens[start - 1 : newest - 1]], [start], [state])
    assert wrote == missing
    drafts, scores = propose(proposer, [after], [state], len(after.drafts))
    assert drafts == [after.drafts]
    close(scores[0], after.scores)
    if name != "medusa1":
        want, (keys, values) = fixture_tensors(name), rows_of(proposer, state, start - 1, newest - 1)
        for key, made in {"d.k": keys, "d.k_tpos": keys, "d.v": values}.items():
            if key in want:
                rows = want[key][..., :2, :, :]
                close(made.reshape(rows.shape), rows, 1e-5)
