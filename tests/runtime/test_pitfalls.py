"""Faults that drafters had elsewhere, by kind: KV, positions, rejection; memory. And the rules that no other file names."""

from __future__ import annotations

import gc
from pathlib import Path

import pytest
import torch

from circuitgraph import programs
from circuitgraph.language import Bindings, resolve
from circuitgraph.language.load import load_program
from circuitgraph.runtime import PoolExhausted, ReferenceRunner
from tests.circuits import SMALL, random_weights
from tests.runtime.dense import KEPT
from tests.runtime.grammars import words_of
from tests.runtime.helpers import POSITIONS, Script, drafter, oracle, proposer_of
from tests.runtime.test_proposer import accept, prefilled, propose, rows_of

# -- KV, positions, rejection --------------------------------------------------------------------------------------


@pytest.mark.shows("pitfall own hiddens kept")
def test_kv_of_the_drafters_own_hiddens_is_overwritten_by_the_targets():
    """Every accepted token's row is rebuilt, not only the last one's."""
    proposer, script = proposer_of(), Script(0)
    state = prefilled(proposer, script, 5)
    propose(proposer, script, 5, 4, state)
    assert accept(proposer, script, state, 5, 4) == 10
    fresh = prefilled(proposer, script, 10)
    for kept, rebuilt in zip(rows_of(proposer, state), rows_of(proposer, fresh), strict=True):
        torch.testing.assert_close(kept, rebuilt)


@pytest.mark.shows("pitfall map of another layout")
def test_sequences_of_unequal_length_read_their_own_cache_at_every_step():
    """A token-to-request map of one layout used for another showed at batch > 1 and K > 1 only."""
    scripts, prompts = [Script(seed) for seed in range(4)], [1, 40, 3, 17]
    for order in ([0, 1, 2, 3], [3, 1, 0, 2]):
        proposer = proposer_of()
        states = [prefilled(proposer, scripts[i], prompts[i]) for i in order]
        tokens = [scripts[i].tokens[prompts[i]] for i in order]
        hiddens = [scripts[i].hiddens[prompts[i] - 1] for i in order]
        drafts = proposer.propose_batch(tokens, hiddens, [prompts[i] for i in order], 5, states)
        assert drafts == [oracle(drafter(), scripts[i], prompts[i], 5) for i in order]


@pytest.mark.shows("rule 3", "pitfall lookahead rows leak")
@pytest.mark.parametrize("trim", sorted(KEPT))
def test_lookahead_rows_are_reserved_and_counted_when_released(trim):
    """Blocks leak per step otherwise: a thousand steps of partial accepts in a pool of one sequence's size."""
    proposer, script = proposer_of(blocks=POSITIONS // 4, block_size=4, trim=trim), Script(0)
    for text in range(12):
        state, position = proposer.alloc_state_for(POSITIONS), 5
        proposer.prefill_drafter(script.tokens[:5], script.hiddens[:5], state)
        for step in range(30):
            drafts = propose(proposer, script, position, 4, state)
            accepted = (step + text) % (len(drafts) + 1)
            proposer.after_verify(accepted, state)
            position += accepted + 1
            assert proposer.pool.held == proposer.pool.blocks_for(proposer.drafter_rows(state))
            if position >= POSITIONS:
                break
        proposer.free_state(state)
    assert proposer.pool.ledger.free == proposer.pool.total
    assert proposer.metrics.refusals["pool_exhausted"] == 0


@pytest.mark.shows("pitfall carry kept once")
def test_nothing_is_carried_over_from_sequence_to_sequence():
    """The pending pair kept once for all; leaks on slot reuse: the blocks of a freed sequence serve the next one."""
    proposer, scripts = proposer_of(blocks=6, block_size=4), [Script(0), Script(1)]
    for script in (*scripts, *scripts):
        state = prefilled(proposer, script, 9)
        drafts = propose(proposer, script, 9, 3, state)
        assert drafts == oracle(drafter(), script, 9, 3)
        proposer.after_verify(1, state)  # and no catch-up: it leaves a pending row
        assert state.pending_catchup == 1
        proposer.free_state(state)
        assert proposer.alloc_state().pending_catchup == 0


@pytest.mark.shows("pitfall first rows")
@pytest.mark.parametrize("block_size", [1, 8])
@pytest.mark.parametrize("prompt", [1, 2, 7, 8, 9])
def test_first_rows_and_block_edges(block_size, prompt):
    """Position 0, one-token prompts, prompts of a block and one more or less."""
    proposer, script = proposer_of(block_size=block_size, blocks=128 // block_size), Script(5)
    state = prefilled(proposer, script, prompt)
    assert proposer.last_pair_key(state) == (prompt - 2 if prompt > 1 else None)
    position = prompt
    for accepted in (0, 2, 1):
        assert propose(proposer, script, position, 2, state) == oracle(drafter(), script, position, 2)
        position = accept(proposer, script, state, position, accepted)


@pytest.mark.shows("pitfall chunk edges")
@pytest.mark.parametrize("chunk", [1, 5, 8])
def test_the_last_row_of_a_chunk_pairs_with_the_first_token_of_the_next(chunk):
    proposer, script, state = proposer_of(), Script(5), None
    state = proposer.alloc_state()
    for first in range(0, 20, chunk):
        last = min(first + chunk, 20)
        assert (
            proposer.prefill_drafter(script.tokens[first : last + 1], script.hiddens[first:last], state, first_pos=first)
            == last - first
        )
    assert propose(proposer, script, 21, 3, state) == oracle(drafter(), script, 21, 3)


@pytest.mark.shows("pitfall hiddens never given", "method rows_behind")
def test_hiddens_that_were_never_handed_over_are_visible():
    """Prefix-cached tokens, skipped steps: rows held < rows expected, and the metric counts holes."""
    proposer, script = proposer_of(), Script(5)
    state = proposer.alloc_state()
    assert proposer.rows_behind(state, 20) == 19
    proposer.prefill_drafter(script.tokens[10:20], script.hiddens[10:20], state, first_pos=10)
    assert proposer.drafter_rows(state) == 9 < 19
    assert proposer.rows_behind(state, 22) == 2
    propose(proposer, script, 22, 2, state)
    assert proposer.metrics.skipped_rows == 2
    assert proposer.metrics.snapshot()["skipped_rows"] == 2


# -- memory --------------------------------------------------------------------------------------------------------


@pytest.mark.shows("pitfall pool size", "pitfall pool ran out")
def test_the_pool_is_sized_by_what_sequences_need_and_counted_once():
    """Not for one sequence, nor for the global ceiling times n: bytes per row and per token are published."""
    proposer = proposer_of(blocks=6, block_size=8)
    pool = proposer.pool
    stored = sum(part.nbytes for parts in pool.storage.values() for part in parts)
    assert stored == pool.total * pool.bytes_per_block == 48 * pool.bytes_per_row
    assert pool.bytes_per_token == pool.bytes_per_row == 2 * 2 * 16 * 4
    assert pool.bytes_for(17) == 3 * pool.bytes_per_block
    states = [proposer.alloc_state_for(16) for _ in range(3)]  # far below the limit of 96 positions each
    assert proposer.pool.ledger.promised == 6
    with pytest.raises(PoolExhausted, match="cannot promise 1 rows; expected at most 0"):
        proposer.alloc_state_for(1)
    assert proposer.pool.held == 0, "a promise takes no block"
    for state in states:
        proposer.free_state(state)


@pytest.mark.shows("pitfall pool ran out", "rule 4")
def test_the_pool_runs_out_without_a_crash_and_without_evicting_anybody():
    proposer, scripts = proposer_of(blocks=4, block_size=4), [Script(0), Script(1)]
    one, two = prefilled(proposer, scripts[0], 9), prefilled(proposer, scripts[1], 8)
    before = rows_of(proposer, two)
    assert propose(proposer, scripts[0], 9, 4, one) == oracle(drafter(), scripts[0], 9, 0) == []
    assert proposer.catchup_batch([[1]], [scripts[0].hiddens[:1]], [9], [one]) == 0
    assert proposer.metrics.refusals == {"pool_exhausted": 2}
    assert all(torch.equal(old, new) for old, new in zip(before, rows_of(proposer, two), strict=True))
    proposer.free_state(two)
    proposer.after_verify(0, one)
    assert propose(proposer, scripts[0], 9, 4, one) == oracle(drafter(), scripts[0], 9, 4)


# -- rules ---------------------------------------------------------------------------------------------------------


@pytest.mark.shows("rule 7")
def test_rule_7_ids_of_a_reduced_vocabulary_are_target_ids_and_so_is_the_mask(tmp_path):
    """A head over the first 40 tokens only; the mask speaks of all 131."""
    text = (Path(programs.__file__).parent / "mtp_dense.yaml").read_text()
    file = tmp_path / "reduced.yaml"
    file.write_text(text.replace('lm_head: "wt[V, H]"', 'lm_head: "wt[40, H]"').replace("program: mtp_dense", "program: reduced"))
    circuit = resolve(load_program(file), Bindings(SMALL, {}, act="f32", wt="f32", kv="f32"))
    runner = ReferenceRunner(circuit, random_weights(circuit, torch.Generator().manual_seed(0), POSITIONS))
    proposer, script = proposer_of(runner), Script(0)
    assert max(propose(proposer, script, 9, 4, prefilled(proposer, script, 9))) < 40
    mask = words_of({33, 35, 90, 120}, 131)
    assert set(propose(proposer, script, 9, 4, prefilled(proposer, script, 9), grammar=mask)) <= {33, 35}
    beyond = words_of({90, 120}, 131)
    assert propose(proposer, script, 9, 4, prefilled(proposer, script, 9), grammar=beyond) == []


@pytest.mark.shows("rule 9")
def test_rule_9_same_inputs_give_the_same_bits_whatever_else_is_there():
    script, others = Script(0), [Script(1), Script(2)]
    made = []
    for noise in range(3):
        proposer = proposer_of(blocks=64)
        for part in proposer.pool.storage["kv"]:
            part.fill_(float("nan") if noise == 1 else noise)
        _ = [prefilled(proposer, other, 5 + noise) for other in others]
        neighbour = prefilled(proposer, others[noise % 2], 9)
        state = prefilled(proposer, script, 9)
        hiddens = torch.stack([others[noise % 2].hiddens[8], script.hiddens[8]])
        scores: list = []
        drafts = proposer.propose_batch(
            [others[noise % 2].tokens[9], script.tokens[9]], hiddens, [9, 9], 4, [neighbour, state], out_confidence=scores
        )
        made.append((drafts[1], scores[1]))
    assert made[0] == made[1] == made[2]


@pytest.mark.shows("goal no tensors")
def test_bookkeeping_allocates_no_tensors(monkeypatch):
    """Before the runner is called, and around a verify: as many tensors for 8 sequences as for 2, views of kept memory."""
    few, many = (tensors_of_a_call(monkeypatch, n) for n in (2, 8))
    assert few == many <= 8


def tensors_of_a_call(monkeypatch, n: int) -> int:
    proposer, scripts = proposer_of(blocks=200), [Script(seed) for seed in range(n)]
    states = [prefilled(proposer, script, 6) for script in scripts]
    hiddens = torch.stack([script.hiddens[5] for script in scripts])
    tokens = [script.tokens[6] for script in scripts]
    chain, seen = proposer.runner.chain, []
    monkeypatch.setattr(proposer.runner, "chain", lambda *args, **kwargs: seen.append(live()) or chain(*args, **kwargs))
    for step in range(3):  # the first one sizes what is kept
        gc.collect()
        before = live()
        proposer.propose_batch(tokens, hiddens, [6 + step] * n, 3, states)
        after = live()
        for state in states:
            proposer.after_verify(0, state)
        assert live() == after
    monkeypatch.undo()
    return seen[-1] - before


def live() -> int:
    return sum(type(item) is torch.Tensor for item in gc.get_objects())


def test_metrics_say_what_happened():
    proposer, script = proposer_of(blocks=10, block_size=4), Script(0)
    state = prefilled(proposer, script, 6)
    propose(proposer, script, 6, 3, state)
    accept(proposer, script, state, 6, 2)
    snapshot = proposer.metrics.snapshot()
    assert (snapshot["drafted"], snapshot["accepted"], snapshot["accepted_per_position"]) == (3, 2, [1, 1, 0])
    assert snapshot["paths"] == {"reference": 1}
    assert snapshot["pool"] == {"total": 10, "free": 8, "held": 2, "loaned": 0, "promised": 0}
    assert (snapshot["peak_blocks"], snapshot["context_rows"], snapshot["refusals"]) == (2, 7, {})
    proposer.metrics.reset()
    assert proposer.metrics.snapshot()["pool"]["total"] == 10
    assert proposer.metrics.drafted == 0
