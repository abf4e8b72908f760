"""Drafting under a grammar: fixed masks and matchers, alone and in batches, on the reference and on compiled programs."""

from __future__ import annotations

import math

import pytest
import torch

from circuitgraph.errors import RuntimeUseError
from circuitgraph.runtime import CompiledRunner
from tests.runtime.dense import Dense
from tests.runtime.grammars import CountingMatcher, bits_of, words_of
from tests.runtime.helpers import InterpretedLibrary, Script, drafter, manifest_of, proposer_of

VOCAB = 131


def compiled() -> CompiledRunner:
    manifest = manifest_of(drafter().circuit, masked=(1, 2))
    return CompiledRunner(manifest, InterpretedLibrary(manifest).functions, drafter().weights)


RUNNERS = {"reference": drafter, "compiled": compiled}


@pytest.fixture(params=RUNNERS)
def runner(request):
    return RUNNERS[request.param]()


def prefilled(proposer, script, length=6):
    state = proposer.alloc_state()
    proposer.prefill_drafter(script.tokens[:length], script.hiddens[:length], state)
    return state


def propose(proposer, script, state, count=4, **options):
    return proposer.propose(script.tokens[6], script.hiddens[5], 6, count, state, **options)


def follow(script, drafts, masks, scores=None):
    dense = Dense(drafter(), "exact")
    dense.append(1, script.tokens[1:6], script.hiddens)
    dense.follow(script.tokens[6], script.hiddens[5], 6, drafts, scores, masks)


@pytest.mark.shows("rule 6")
def test_a_fixed_mask_holds_for_every_draft_with_one_warning(runner, caplog):
    script, mask = Script(0), words_of(range(0, VOCAB, 7), VOCAB)
    proposer = proposer_of(runner)
    for _ in range(2):
        state = prefilled(proposer, script)
        drafts = propose(proposer, script, state, grammar=mask)
        assert len(drafts) == 4
        assert all(draft % 7 == 0 for draft in drafts)
        follow(script, drafts, [bits_of(mask, VOCAB)] * 4)
    assert [record.levelname for record in caplog.records if "fixed mask" in record.getMessage()] == ["WARNING"]
    assert propose(proposer, script, prefilled(proposer, script)) != drafts, "the mask did nothing"


@pytest.mark.parametrize("kind", ["tensor", "rows", "array", "list", "unsigned"])
def test_forms_of_a_mask(kind):
    script, mask = Script(0), words_of(range(0, VOCAB, 7), VOCAB)
    forms = {"tensor": mask, "rows": mask[None], "array": mask.numpy(), "list": mask.tolist()}
    forms["unsigned"] = [word % 2**32 for word in mask.tolist()]
    drafts = [propose(p := proposer_of(), script, prefilled(p, script), grammar=form) for form in (mask, forms[kind])]
    assert drafts[0] == drafts[1]


@pytest.mark.shows("rule 6")
def test_tokens_past_the_last_word_are_not_allowed():
    script = Script(0)
    mask = torch.full((2,), -1, dtype=torch.int32)
    proposer = proposer_of()
    drafts = propose(proposer, script, prefilled(proposer, script), grammar=mask)
    assert max(drafts) < 64
    longer = torch.full((50,), -1, dtype=torch.int32)  # the target's vocabulary is padded further than the drafter's
    assert propose(proposer, script, prefilled(proposer, script), grammar=longer) == propose(
        proposer, script, prefilled(proposer, script)
    )


@pytest.mark.shows("rule 6")
def test_a_matcher_gives_a_mask_for_each_draft_and_is_rolled_back(runner):
    proposer, script, matcher = proposer_of(runner), Script(1), CountingMatcher(VOCAB, 1)
    drafts = propose(proposer, script, prefilled(proposer, script), grammar=matcher)
    assert len(drafts) == 4
    assert matcher.history == []
    assert matcher.fills == 4
    assert [draft % 3 for draft in drafts[:2]] == [1, 2]
    follow(script, drafts, [bits_of(words, VOCAB) for words in matcher.along(drafts)])


def test_a_matcher_at_its_end_is_not_asked():
    proposer, script = proposer_of(), Script(1)
    assert len(propose(proposer, script, prefilled(proposer, script), grammar=CountingMatcher(VOCAB, 1, ends=2))) == 2
    assert proposer.metrics.refusals == {}
    ended = CountingMatcher(VOCAB, 1, ends=0)
    state = prefilled(proposer, script)
    assert propose(proposer, script, state, grammar=ended) == []
    assert ended.fills == 0
    assert proposer.metrics.refusals == {"grammar": 1}
    assert proposer.rows_behind(state, 6) == 0, "no row was kept"


@pytest.mark.shows("rule 6")
def test_nothing_allowed_is_no_draft(runner):
    proposer, script = proposer_of(runner, block_size=1), Script(1)
    state, nothing = prefilled(proposer, script), words_of((), VOCAB)
    assert propose(proposer, script, state, grammar=nothing) == []
    assert proposer.drafter_rows(state) == proposer.pool.held == 5
    assert proposer.last_confidence(state) is None
    assert proposer.metrics.refusals == {"grammar": 1}

    class Dead(CountingMatcher):
        def allowed(self, depth):
            return super().allowed(depth) if depth < 1 else set()

    assert len(propose(proposer, script, prefilled(proposer, script), grammar=Dead(VOCAB, 0))) == 1


@pytest.mark.shows("rule 6")
def test_masks_of_a_batch_are_each_rows_own(runner):
    proposer, scripts = proposer_of(runner), [Script(seed) for seed in range(4)]
    states = [prefilled(proposer, script) for script in scripts]
    mask, matcher = words_of(range(5, VOCAB, 11), VOCAB), CountingMatcher(VOCAB, 2)
    tokens, hiddens = [s.tokens[6] for s in scripts], [s.hiddens[5] for s in scripts]
    for grammars in ([mask, None, words_of((), VOCAB), mask], [mask, None, words_of((), VOCAB), matcher]):
        confidence: list = []
        drafts = proposer.propose_batch(tokens, hiddens, [6] * 4, 3, states, grammars=grammars, out_confidence=confidence)
        assert [len(row) for row in drafts] == [len(row) for row in confidence] == [3, 3, 0, 3]
        assert all(draft % 11 == 5 for draft in drafts[0])
        masks = [[bits_of(mask, VOCAB)] * 3, None, [], [bits_of(mask, VOCAB)] * 3]
        if matcher in grammars:
            masks[3] = [bits_of(words, VOCAB) for words in matcher.along(drafts[3])]
        for script, row, scores, allowed in zip(scripts, drafts, confidence, masks, strict=True):
            follow(script, row, allowed, scores)
        assert matcher.history == []
        for state, row in zip(states, drafts, strict=True):
            assert proposer.last_confidence(state) == (
                None if not row else pytest.approx(math.exp(min(confidence[states.index(state)])))
            )
            proposer.after_verify(0, state)
        states = [prefilled(proposer, script) for script in scripts]


def test_a_batch_without_grammars_runs_the_plain_programs():
    runner = compiled()
    proposer, script = proposer_of(runner), Script(0)
    states = [prefilled(proposer, script) for _ in range(2)]
    drafts = proposer.propose_batch(
        [script.tokens[6]] * 2, script.hiddens[5:6].expand(2, -1), [6] * 2, 2, states, grammars=[None] * 2
    )
    assert drafts == [propose(p := proposer_of(), script, prefilled(p, script), 2)] * 2
    assert runner.paths == {"n-row": 1}


def test_what_is_no_grammar_is_refused_and_changes_nothing():
    proposer, script = proposer_of(), Script(0)
    state = prefilled(proposer, script)
    for wrong in (torch.zeros(5), torch.zeros(5, dtype=torch.int64), torch.zeros(2, 5, dtype=torch.int32), object(), ["a"]):
        with pytest.raises(RuntimeUseError, match="grammar: is no bitmask; expected int32"):
            propose(proposer, script, state, grammar=wrong)
    with pytest.raises(RuntimeUseError, match="unequal length"):
        proposer.propose_batch([1], script.hiddens[:1], [6], 2, [state], grammars=[None, None])
    with pytest.raises(RuntimeUseError, match="does not go with a grammar"):
        propose(proposer, script, state, grammar=CountingMatcher(VOCAB, 0), draft_embed_target=torch.zeros(48))
    assert (state.rows, state.last_drafts, proposer.pool.held) == (5, [], 1)


def test_a_matcher_that_fails_is_rolled_back_and_nothing_changes():
    proposer, script = proposer_of(block_size=1), Script(0)
    state = prefilled(proposer, script)

    class Failing(CountingMatcher):
        def fill_next_token_bitmask(self, bitmask, index=0):
            if self.depth == 1:
                raise OSError("the matcher is gone")
            return super().fill_next_token_bitmask(bitmask, index)

    matcher = Failing(VOCAB, 0)
    with pytest.raises(OSError, match="the matcher is gone"):
        propose(proposer, script, state, grammar=matcher)
    assert matcher.history == []
    assert (state.rows, state.last_drafts, proposer.pool.held) == (5, [], 5)


def test_programs_without_a_mask_say_how_to_get_one():
    manifest = manifest_of(drafter().circuit)
    runner = CompiledRunner(manifest, InterpretedLibrary(manifest).functions, drafter().weights)
    assert runner.serves(1, masked=True) is None
    proposer, script = proposer_of(runner), Script(0)
    state = prefilled(proposer, script)
    with pytest.raises(RuntimeUseError, match=r"no program drafts under a mask.*Compile with --with draft_masked"):
        propose(proposer, script, state, grammar=words_of((1,), VOCAB))
    assert len(propose(proposer, script, state)) == 4
