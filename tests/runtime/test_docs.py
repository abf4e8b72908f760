"""docs/embedding.md, run: its code blocks in order, around a small random target."""

from __future__ import annotations

import inspect
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from circuitgraph.runtime import BlockPool, accept_greedy
from tests.runtime.helpers import Rehearsed, drafter, proposer_of

transformers = pytest.importorskip("transformers")

from circuitgraph.runtime.integrations.transformers import generate  # noqa: E402

PAGE = Path(__file__).parents[2] / "docs" / "embedding.md"


@dataclass
class Sequence:
    tokens: list[int]
    hidden: torch.Tensor
    state: Any
    cache: Any
    limit: int


class Target:
    """What the page asks of a server's model."""

    def __init__(self, model):
        self.model = model
        self.cache_name = "cache" if "cache" in inspect.signature(model.model.forward).parameters else "past_key_values"

    def _feed(self, cache, tokens):
        with torch.no_grad():
            out = self.model.model(input_ids=torch.tensor([tokens]), use_cache=True, **{self.cache_name: cache})
            hidden = out.last_hidden_state[0]
            return hidden, self.model.lm_head(hidden).argmax(-1).tolist()

    def prefill(self, prompt):
        cache = transformers.DynamicCache(config=self.model.config)
        return *self._feed(cache, prompt), cache

    def verify(self, cache, tokens):
        return self._feed(cache, tokens)

    def forget(self, cache, rows):
        if rows:
            cache.crop(-rows)


def test_the_page_runs_and_gives_the_targets_text():
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        hidden_size=48, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=131, initializer_range=0.3, eos_token_id=None, bos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config).eval()
    input_ids = torch.tensor([[5, 6, 7]])
    page = {
        "BlockPool": BlockPool,
        "MtpProposer": Rehearsed,
        "Sequence": Sequence,
        "accept_greedy": accept_greedy,
        "input_ids": input_ids,
        "load_runner": drafter,
        "model": model,
        "target": Target(model),
    }
    blocks = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    assert len(blocks) == 3
    # Set-up and loop around three sequences, then the last block with a random drafter.
    *first, last = [compile(block, str(PAGE), "exec") for block in blocks]
    for block in first:
        exec(block, page)
    prompts = [[1, 2, 3], [4], list(range(20))]
    texts = [prompt + generate(model, torch.tensor([prompt]), max_new_tokens=25).ids for prompt in prompts]
    page["proposer"].texts = texts
    sequences = [page["admit"](prompt, 25) for prompt in prompts]
    running = list(sequences)
    while running:
        page["step"](running, 3)
        for sequence in [s for s in running if len(s.tokens) == s.limit]:
            page["finish"](sequence)
            running.remove(sequence)
    for text, sequence in zip(texts, sequences, strict=True):
        assert sequence.tokens == text
        hiddens, _, _ = page["target"].prefill(sequence.tokens)
        page["proposer"].check(sequence.state, sequence.tokens, hiddens)
    assert page["pool"].ledger.free == page["pool"].total
    assert page["proposer"].metrics.mean_accepted_length > 1.5
    page["proposer"] = proposer_of()
    exec(last, page)
    assert page["result"].ids == page["plain"].ids == page["ids"][0, 3:].tolist()
