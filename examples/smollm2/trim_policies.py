"""Mean accepted length of each trim policy, and a conversation's second turn with carried KV.

See `walked` for how texts and intervals are made.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
import typer
from common import HERE, encode, load_head, load_target, prompt_lines
from interpreted import CIRCUIT_NAMES, InterpretedHead
from tqdm import tqdm
from walked import Comparison, Depth, Head, Limit, Most, Prompts, Target, Text, quantiles, texts_of

from circuitgraph import load_circuit
from circuitgraph.runtime import TRIM, BlockPool, MtpProposer, ReferenceRunner


def reference(head: Path, target) -> ReferenceRunner:
    """The shipped head, interpreted in fp32."""
    weights, config = load_head(head)
    circuit = load_circuit("mtp_dense", "llama_mtp", config, act="f32", wt="f32", kv="f32")
    embed = target.lm_head.weight.detach()
    named = {name: weights[stored] for name, stored in CIRCUIT_NAMES.items()}
    tables = InterpretedHead(config, embed).tables
    return ReferenceRunner(circuit, {**named, **tables, "embed_tokens": embed, "lm_head": embed})


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
    head: Head = HERE / "head",
    prompts: Prompts = HERE / "prompts_eval.txt",
    target: Target = None,
    depth: Depth = 3,
    limit: Limit = 128,
    most: Most = None,
) -> None:
    """Print the table, and the numbers as JSON."""
    model, tokenizer = load_target(target, torch.float32)
    encoded = [encode(tokenizer, line) for line in prompt_lines(prompts, most)]
    texts = texts_of(model, encoded, limit)
    runner = reference(head, model)
    comparison = Comparison(texts, depth)
    ways = [*((trim, trim, True) for trim in TRIM), ("exact, never caught up", "exact", False)]
    results = {}
    for name, trim, catch_up in tqdm(ways, desc="policies"):
        row, means, proposer = comparison.measure(runner, trim=trim, catch_up=catch_up)
        metrics = proposer.metrics.snapshot()
        results[name] = {
            **row,
            "against_exact": quantiles(means - comparison.base),
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
