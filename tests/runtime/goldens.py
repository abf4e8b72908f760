"""The fixtures' values as a server sees them: texts with hiddens, and the drafts after them. Needs no compiler."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from tests.fixture_cases import fixture_tensors
from tests.runtime.audited import Audited


@dataclass(frozen=True)
class Text:
    """tokens: the newest of which the target has chosen and not been fed. hiddens: of all tokens before it."""

    tokens: list[int]
    hiddens: torch.Tensor
    drafts: list[int]
    scores: torch.Tensor


@dataclass(frozen=True)
class Golden:
    """one: a text and the drafts after it. three: of unequal length, drafted together. after: `one` with two drafts accepted
    and a token of the target's, whose newest rows the catch-up brings."""

    one: Text
    three: list[Text]
    after: Text


def golden(name: str) -> Golden:
    want = fixture_tensors(name)

    def text(tokens: torch.Tensor, hiddens: torch.Tensor, drafts: torch.Tensor, logits: torch.Tensor) -> Text:
        return Text(tokens.tolist(), hiddens, drafts.tolist(), logits.log_softmax(-1).amax(-1))

    of = {"medusa1": "hiddens", "eagle1_llama": "hiddens"}.get(name, "aux")
    tokens, hiddens = want["ctx.tokens"], want[f"ctx.{of}"]
    if name == "medusa1":  # the context ends with the token that was fed last
        tokens = torch.cat([tokens, want["a.next_token"][None]])
        three = []
        for i in range(3):
            context, rows = torch.cat([want[f"c.{i}.tokens"], want[f"c.{i}.next_token"][None]]), torch.zeros(18, 64)
            rows[len(context) - 2] = want[f"c.{i}.hidden"]
            drafts, logits = want[f"c.{i}.draft_tokens"], want[f"c.{i}.draft_logits"]
            three.append(text(context, rows[: len(context) - 1], drafts, logits))
    else:
        three = [text(*(want[f"c.{i}.{what}"] for what in ("tokens", of, "draft_tokens", "draft_logits"))) for i in range(3)]
    block = name == "dflash_qwen3"
    one = text(tokens, hiddens, want["a.argmax" if block else "b.tokens"], want["a.logits" if block else "b.logits"])
    more = torch.tensor([*one.drafts[:2], int(want["d.bonus"])])
    after = text(torch.cat([tokens, more]), torch.cat([hiddens, want[f"d.{of}"]]), want["d.draft_tokens"], want["d.draft_logits"])
    return Golden(one, three, after)


def prefilled(proposer: Audited, text: Text, chunk: int = 99):
    """The state of a sequence whose newest hidden and token are left to the propose."""
    state, fed = proposer.alloc_state(), len(text.tokens) - 1
    hiddens = text.hiddens.to(proposer.runner.device)
    for first in range(0, fed - 1, chunk):
        last = min(first + chunk, fed - 1)
        proposer.prefill_drafter(text.tokens[first : last + 1], hiddens[first:last], state, first_pos=first)
    return state


def propose(proposer: Audited, texts: list[Text], states: list, num_drafts: int) -> tuple[list[list[int]], list[list[float]]]:
    """(drafts, their log-probabilities) after each text."""
    scores: list[list[float]] = []
    drafts = proposer.propose_batch(
        [text.tokens[-1] for text in texts],
        [text.hiddens[len(text.tokens) - 2].to(proposer.runner.device) for text in texts],
        [len(text.tokens) - 1 for text in texts],
        num_drafts,
        states,
        out_confidence=scores,
    )
    assert isinstance(drafts, list)
    return drafts, scores
