"""Greedy speculative decoding of a Hugging Face model: the text is the target's own, whatever the drafter."""

from __future__ import annotations

import pytest
import torch

from circuitgraph.errors import RuntimeUseError
from circuitgraph.runtime import TRIM, accept_greedy
from tests.runtime.helpers import Audited, Rehearsed, drafter, proposer_of

transformers = pytest.importorskip("transformers")

from circuitgraph.runtime.integrations.transformers import HiddenTap, as_custom_generate, generate  # noqa: E402


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        hidden_size=48, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=12,
        vocab_size=131, max_position_embeddings=256, initializer_range=0.3, eos_token_id=None, bos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config).eval()


def prompt(length, seed=0):
    return torch.randint(0, 131, (1, length), generator=torch.Generator().manual_seed(seed))


def plain(model, ids, count, **options):
    return generate(model, ids, max_new_tokens=count, **options).ids


def rehearsed_for(ids, text, miss=10**9, **switches):
    proposer = proposer_of(drafter(**switches), kind=Rehearsed)
    proposer.texts, proposer.miss = [ids[0].tolist() + text], miss
    return proposer


@pytest.mark.parametrize("length", [1, 2, 9])
def test_plain_equals_transformers(model, length):
    ids = prompt(length)
    theirs = model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=20)[0, length:].tolist()
    assert plain(model, ids, 20) == theirs


@pytest.mark.shows("goal same text")
@pytest.mark.parametrize("num_drafts", [1, 2, 3, 4, 5])
@pytest.mark.parametrize(("length", "block_size"), [(1, 1), (2, 8), (8, 8), (17, 16)])
def test_a_random_drafter_changes_nothing(model, num_drafts, length, block_size):
    ids = prompt(length, seed=length)
    proposer = proposer_of(block_size=block_size, blocks=128 // block_size)
    result = generate(model, ids, proposer=proposer, num_drafts=num_drafts, max_new_tokens=18)
    assert result.ids == plain(model, ids, 18)
    assert result.stats.new_tokens == 18
    assert proposer.pool.ledger.free == proposer.pool.total


@pytest.mark.shows("goal same text")
@pytest.mark.parametrize("trim", sorted(TRIM))
@pytest.mark.parametrize("miss", [2, 10**9, None])
def test_every_trim_policy_leaves_the_text(model, trim, miss):
    """With drafts that are mostly right, and with a drafter of random weights."""
    ids = prompt(3)
    expected = plain(model, ids, 30)
    proposer = proposer_of(kind=Rehearsed if miss else Audited, trim=trim)
    proposer.texts, proposer.miss = [ids[0].tolist() + expected], miss
    assert generate(model, ids, proposer=proposer, num_drafts=4, max_new_tokens=30).ids == expected
    assert proposer.metrics.skipped_rows == 0, "catch-up follows the policy"


@pytest.mark.parametrize("switches", [{}, {"target_hidden": "pre_norm", "rope_position": "hidden"}])
@pytest.mark.parametrize("miss", [2, 3, 5, 10**9])
def test_accepted_drafts_change_nothing_either(model, miss, switches):
    ids = prompt(3)
    expected = plain(model, ids, 30)
    proposer = rehearsed_for(ids, expected, miss, **switches)
    result = generate(model, ids, proposer=proposer, num_drafts=4, max_new_tokens=30)
    assert result.ids == expected
    assert result.stats.steps < 29
    assert result.stats.mean_accepted_length > 1.3
    assert proposer.metrics.accepted == sum(result.stats.accepted_at)
    assert proposer.metrics.refusals == {}
    # Acceptance would not show a wrong hidden here, so each is compared with one forward over the whole text.
    ids = ids[0].tolist() + expected
    with torch.no_grad(), HiddenTap(model, proposer.runner.hidden_source) as tap:
        model(torch.tensor([ids]))
    (state,) = proposer.pairs
    proposer.check(state, ids, tap.hidden[0])


def test_it_stops_at_an_end_token_inside_accepted_drafts(model):
    ids = prompt(3)
    text = plain(model, ids, 30)
    end = next(token for index, token in enumerate(text) if index > 4 and token not in text[:index])
    expected = text[: text.index(end) + 1]
    assert plain(model, ids, 30, eos_ids=[end]) == expected
    assert generate(model, ids, proposer=rehearsed_for(ids, text), num_drafts=4, max_new_tokens=30, eos_ids=[end]).ids == expected


@pytest.mark.parametrize("count", [1, 2, 3, 4, 5, 6])
def test_it_never_exceeds_the_room(model, count):
    ids = prompt(3)
    text = plain(model, ids, 30)
    assert generate(model, ids, proposer=rehearsed_for(ids, text), num_drafts=4, max_new_tokens=count).ids == text[:count]


def test_a_drafter_that_runs_out_leaves_the_text(model):
    ids = prompt(5)
    for proposer in (proposer_of(blocks=2, block_size=4), proposer_of(blocks=1, block_size=1)):
        assert generate(model, ids, proposer=proposer, max_new_tokens=30).ids == plain(model, ids, 30)
        assert proposer.metrics.refusals["pool_exhausted"] > 0
    long = prompt(80)
    proposer = proposer_of(blocks=256, block_size=1)
    assert generate(model, long, proposer=proposer, max_new_tokens=30).ids == plain(model, long, 30)
    assert proposer.metrics.refusals["position_limit"] > 0


def test_a_warm_cache_continues_the_text(model):
    ids = prompt(4)
    first = plain(model, ids, 6)
    cache = transformers.DynamicCache(config=model.config)
    assert plain(model, ids, 6, cache=cache) == first
    longer = torch.cat([ids, torch.tensor([first]), prompt(3, seed=5)], dim=1)
    expected = plain(model, longer, 12)
    proposer = proposer_of()
    assert generate(model, longer, proposer=proposer, max_new_tokens=12, cache=cache).ids == expected
    with pytest.raises(RuntimeUseError, match="holds the whole prompt"):
        generate(model, longer, max_new_tokens=2, cache=cache)


class Recorder:
    def __init__(self):
        self.items, self.ended = [], False

    def put(self, value):
        self.items.append(value.flatten().tolist())

    def end(self):
        self.ended = True


def test_streamer_gets_prompt_tokens_and_end(model):
    ids, streamer = prompt(3), Recorder()
    result = generate(model, ids, proposer=proposer_of(), max_new_tokens=7, streamer=streamer)
    assert streamer.items == [ids[0].tolist(), *[[token] for token in result.ids]]
    assert streamer.ended


def test_as_custom_generate(model):
    ids, streamer = prompt(3), Recorder()
    expected = ids[0].tolist() + plain(model, ids, 20)
    custom = as_custom_generate(proposer_of(), num_drafts=3, streamer=streamer)
    options = {"attention_mask": torch.ones_like(ids), "custom_generate": custom, "max_new_tokens": 20}
    assert model.generate(ids, do_sample=False, **options)[0].tolist() == expected
    assert streamer.ended
    end = expected[8]
    stopped = model.generate(ids, do_sample=False, eos_token_id=end, **options)[0].tolist()
    assert stopped == expected[: expected.index(end, 3) + 1]
    for wrong in ({"do_sample": True}, {"do_sample": False, "repetition_penalty": 1.5}, {"num_beams": 2, "do_sample": False}):
        with pytest.raises(RuntimeUseError, match="greedy drafting does not support"):
            model.generate(ids, **wrong, **options)


def test_what_cannot_be_decoded_is_refused(model):
    for ids in (torch.zeros(2, 3, dtype=torch.long), torch.zeros(1, 0, dtype=torch.long), torch.zeros(3, dtype=torch.long)):
        with pytest.raises(RuntimeUseError, match="one prompt at a time"):
            generate(model, ids)
    with pytest.raises(RuntimeUseError, match="max_new_tokens"):
        generate(model, prompt(2), max_new_tokens=0)
    with pytest.raises(RuntimeUseError, match="pre_norm"):
        HiddenTap(model, "aux")


def test_the_tap_takes_what_it_says_and_leaves(model):
    ids = prompt(5)
    with torch.no_grad(), HiddenTap(model, "post_norm") as post, HiddenTap(model, "pre_norm") as pre:
        out = model(ids)
        torch.testing.assert_close(model.lm_head(post.hidden), out.logits)
        torch.testing.assert_close(model.model.norm(pre.hidden), post.hidden)
    assert not model.model.norm._forward_hooks


def test_accept_greedy():
    assert accept_greedy([], [4]) == (0, 4)
    assert accept_greedy([4, 5], [4, 5, 6]) == (2, 6)
    assert accept_greedy([4, 5], [3, 5, 6]) == (0, 3)
    with pytest.raises(ValueError, match="3 choices"):
        accept_greedy([4, 5], [4, 5])
