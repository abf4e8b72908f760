"""Mean accepted length with a quantised or restricted lm_head, of compiled programs.

For each choice the drafter is compiled for this machine's CPU as `circuitgraph compile --quantize` does it, and drafts in a
server's loop over the target's greedy text (see `walked`). The text is the target's own whatever the drafter does; how much
of it is drafted right may change.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from common import HERE, encode, load_target, prompt_lines
from safetensors.torch import save_file
from tqdm import tqdm
from walked import Comparison, Depth, Head, Limit, Most, Prompts, Target, quantiles, texts_of

import circuitgraph

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
    head: Head = HERE / "head",
    prompts: Prompts = HERE / "prompts_eval.txt",
    target: Target = None,
    depth: Depth = 3,
    limit: Limit = 128,
    most: Most = None,
    only: Annotated[list[str] | None, typer.Option(help="Only this choice beside f32; repeatable.")] = None,
) -> None:
    """Print the table, and the numbers as JSON. Differences are against the head in fp32."""
    model, tokenizer = load_target(target, torch.float32)
    texts = texts_of(model, [encode(tokenizer, line) for line in prompt_lines(prompts, most)], limit)
    comparison = Comparison(texts, depth)
    results = {}
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
            row, means, _ = comparison.measure(runner)
            results[name] = {
                **row,
                "change": quantiles(means / comparison.base - 1, (0.025, 0.5, 0.975), 4),
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
