"""A drafter of every kind with values that other people's code computed: runners, and the fixtures as a server sees them."""

from __future__ import annotations

import functools
import tempfile
from dataclasses import dataclass
from pathlib import Path

import torch

import circuitgraph
from circuitgraph.checkpoint import bind
from circuitgraph.runtime import DraftRunner, ReferenceRunner, load
from tests.fixture_cases import FIXTURES, fixture_tensors, target_of

CHAINS = ("eagle1_llama", "eagle3_llama")
NAMES = (*CHAINS, "medusa1", "dflash_qwen3")
POSITIONS = 64


@functools.cache
def reference(name: str, positions: int = POSITIONS) -> ReferenceRunner:
    bound = bind("auto", model=FIXTURES / name, target_model=target_of(name))
    return ReferenceRunner(bound.circuit, bound.load_weights(positions=positions))


ENTRIES = {
    "eagle3_llama": ("first", "draft", "first_masked", "draft_masked", "context"),
    "medusa1": ("draft", "logits"),
    "dflash_qwen3": ("draft", "logits", "context"),
}


@functools.cache
def artifact(name: str) -> Path:
    """Programs for one sequence and for three, those that masks need among them."""
    out = Path(tempfile.mkdtemp()) / name
    model, target = FIXTURES / name, target_of(name)
    circuitgraph.compile("auto", model=model, target_model=target, out=out, widths=(3,), context_rows=(4,), entries=ENTRIES[name])
    return out


@functools.cache
def compiled(name: str, positions: int = POSITIONS) -> DraftRunner:
    return load(artifact(name), model=FIXTURES / name, target_model=target_of(name), max_position=positions, threads=1)


RUNNERS = {"reference": reference, "compiled": compiled}
CASES = [(name, kind) for name in NAMES for kind in RUNNERS if kind == "reference" or name in ENTRIES]


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
