"""Checks of this example that need no target: the two forwards agree, drafting all places at once equals drafting one."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from common import HERE, Corpus, Rows, head_depth, head_shapes, load_head, shifted
from evaluate import Acceptance, accepted_runs
from generate_data import cut_loop
from interpreted import InterpretedHead
from torch import Tensor

CONFIG = {
    "model_type": "llama_mtp",
    "hidden_act": "silu",
    "num_nextn_predict_layers": 1,
    "tie_word_embeddings": True,
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size": 50,
    "rms_norm_eps": 1e-5,
    "rope_theta": 100000.0,
    "max_position_embeddings": 64,
}
DEPTH = 3


@pytest.fixture
def case() -> tuple[dict[str, Tensor], Tensor, Tensor, Tensor]:
    """Random weights, embedding, ids [2, 13] and hiddens."""
    torch.manual_seed(0)
    weights = {}
    for name, shape in head_shapes(CONFIG).items():
        weights[name] = torch.rand(shape) + 0.5 if len(shape) == 1 else torch.randn(shape) * 0.3
    return weights, torch.randn(50, 24), torch.randint(0, 50, (2, 13)), torch.randn(2, 13, 24)


def test_interpreter_and_plain_torch_agree(case):
    weights, embed, ids, hidden = case
    for w in weights.values():
        w.requires_grad_(True)
    head = InterpretedHead(CONFIG, embed)
    y, cache = head.exact(weights, ids, hidden)
    sequence, place = torch.tensor([0, 0, 1, 1, 1]), torch.tensor([0, 7, 3, 9, 4])
    kv = head.chains(cache, sequence, place, DEPTH)
    current, rows, plain = y[sequence, place], Rows([], []), hidden
    gradients = []
    for depth in range(1, DEPTH + 1):
        plain = head_depth(weights, CONFIG, F.embedding(shifted(ids, depth), embed), plain, rows)
        if depth == 1:
            torch.testing.assert_close(y, plain[:, :-1])
        else:
            current, kv = head.deeper(weights, ids[sequence, place + depth], current, place + depth, kv)
        torch.testing.assert_close(current, plain[sequence, place], rtol=1e-4, atol=1e-5)
    for result in (current, plain[sequence, place]):
        gradients.append(torch.autograd.grad(result.square().sum(), list(weights.values()), retain_graph=True))
    for a, b in zip(*gradients, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-4)


def draft_one(weights: dict[str, Tensor], embed: Tensor, ids: Tensor, hidden: Tensor) -> list[int]:
    """Drafts after ids [1, L + 1] with exact hiddens [1, L]: grow the text by each draft, keep only the last row's chain."""
    drafts: list[int] = []
    start = hidden.shape[1] - 1
    for depth in range(1, DEPTH + 1):
        rows, current = Rows([], []), hidden
        for d in range(1, depth + 1):
            token = [*ids[0].tolist(), *drafts]
            row = torch.tensor([[token[min(i + d, len(token) - 1)] for i in range(start + 1)]])
            current = head_depth(weights, CONFIG, F.embedding(row, embed), current, rows)
        drafts.append(int(F.linear(current[0, start], embed).argmax()))
    return drafts


def test_all_places_at_once_equal_one_place_after_the_other(case):
    weights, embed, ids, hidden = case
    runs = accepted_runs(weights, CONFIG, embed, ids, hidden, DEPTH)
    right = 0
    for b in range(2):
        for i in range(ids.shape[1] - 2):
            drafts = draft_one(weights, embed, ids[b : b + 1, : i + 2], hidden[b : b + 1, : i + 1])
            follows = ids[b, i + 2 : i + 2 + DEPTH].tolist()
            expected = 0
            while expected < len(follows) and drafts[expected] == follows[expected]:
                expected += 1
            assert runs[b, i] == expected
            # A text that continues as drafted has all of it accepted.
            text = torch.cat([ids[b, : i + 2], torch.tensor(drafts)])[None]
            longer = torch.cat([hidden[b : b + 1, : i + 1], torch.randn(1, DEPTH + 1, 24)], 1)
            right += int(accepted_runs(weights, CONFIG, embed, text, longer, DEPTH)[0, i])
    assert right == DEPTH * 2 * (ids.shape[1] - 2)


def test_walk_counts_like_a_server():
    acceptance = Acceptance(3)
    # Prompt of 2, text of 9: token 2 comes with the prompt; then 3 drafts + bonus, 0 + bonus, and one left to draft.
    acceptance.add(np.array([0, 3, 0, 0, 0, 0, 1, 0, 0]), 2, 9)
    assert (acceptance.steps, acceptance.accepted) == (3, [2, 1, 1])
    assert acceptance.mean_length == pytest.approx(1 + 4 / 3)


def test_cut_loop_keeps_two_copies():
    period = [5, 6, 7, 8, 9, 10, 11, 12, 13, 14]
    text = np.array([1, 2, 3, *period * 6])
    assert cut_loop(text).tolist() == [1, 2, 3, *period * 2]
    assert cut_loop(np.arange(200)).tolist() == list(range(200))


def test_corpus_round_trip(tmp_path: Path):
    corpus = Corpus.of([np.array([1, 2, 3]), np.array([40000, 5]), np.array([6])], [1, 1, 1])
    assert len(corpus.save(tmp_path / "train", shard_tokens=4)) == 2
    back = Corpus.load(tmp_path / "train")
    assert [back.chat(s).tolist() for s in range(3)] == [[1, 2, 3], [40000, 5], [6]]
    assert back.prompt_len.tolist() == [1, 1, 1]


@pytest.mark.skipif(not (HERE / "head" / "model.safetensors").is_file(), reason="the head is not here")
def test_committed_head_is_complete():
    weights, config = load_head(HERE / "head")
    assert {n: tuple(t.shape) for n, t in weights.items()} == head_shapes(config)
    assert all(torch.isfinite(t).all() for t in weights.values())
    assert (HERE / "head" / "model.safetensors").stat().st_size < 16e6
    assert json.loads((HERE / "head" / "training.json").read_text())["seed"]
