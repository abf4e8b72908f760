"""`circuitgraph generate`: text, plain and speculative side by side."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.markup import escape

from ..places import check_artifact, check_model, check_target, check_tokenizer
from .common import out, print_json, table
from .options import AsJson, FloatType, Threads
from .progress import bar

if TYPE_CHECKING:
    from .side_by_side import Pair


def generate(
    model: Annotated[Path, typer.Option("--model", metavar="TARGET", help="The target: a model folder (safetensors or GGUF).")],
    artifact: Annotated[Path, typer.Option("--artifact", metavar="OUT", help="The drafter's artifact.")],
    prompts: Annotated[list[str], typer.Option("--prompt", metavar="TEXT", help="A prompt; repeatable.")],
    drafter: Annotated[
        Path | None,
        typer.Option("--drafter", metavar="DIR", help="The drafter's checkpoint, if it moved since the artifact was compiled."),
    ] = None,
    num_drafts: Annotated[int, typer.Option("--drafts", min=1, help="Drafts per verify step (K).")] = 3,
    max_new_tokens: Annotated[int, typer.Option("--max-new-tokens", min=1)] = 128,
    chat: Annotated[bool, typer.Option("--chat/--raw", help="Prompts are a chat's user turn, or text to go on with.")] = True,
    dtype: Annotated[FloatType, typer.Option("--dtype", help="Of the target. Texts are surely identical in f32 only.")] = "f32",
    threads: Threads = None,
    as_json: AsJson = False,
) -> None:
    """Generate text twice, with and without the drafter: same ids? tokens/s, accepted length, acceptance per position.

    Exit status 1 when a text differs with the target in f32. In bf16 and f16 a verify of several rows rounds differently
    from one of a single row, so near-ties between two tokens may fall the other way.

    \b
    circuitgraph generate --model llm/ --artifact drafter.cg --prompt "Why is the sky blue?"
    """
    check_artifact(artifact)
    check_target(model)
    check_tokenizer(model)
    check_model(drafter)
    from ..artifact.store import read_artifact
    from ..measure.weights import folder_of, target_tensors
    from ..runtime import load
    from .side_by_side import decode_pairs, summary
    from .target import load_target

    set_threads(threads)
    manifest = read_artifact(artifact).manifest
    with bar("generate") as report:
        report("loading the target", 0, 1 + 2 * len(prompts))
        target = load_target(model, dtype)
        runner = load(
            artifact, model=folder_of(manifest, "model", drafter), weights=target_tensors(manifest, target.model), threads=threads
        )
        pairs = decode_pairs(
            target, runner, prompts, num_drafts=num_drafts, max_new_tokens=max_new_tokens, chat=chat, report=report
        )
    totals = summary(pairs)
    if as_json:
        print_json({**totals, "texts": [pair.to_json() for pair in pairs]})
    else:
        for pair in pairs:
            out().print(f"[bold]{escape(pair.prompt)}[/bold]\n{escape(pair.text)}\n")
        print_pairs(pairs, totals)
    if dtype == "f32" and totals["identical"] < len(pairs):
        raise typer.Exit(1)


def set_threads(threads: int | None) -> None:
    if threads:
        import torch

        torch.set_num_threads(threads)


def print_pairs(pairs: Sequence[Pair], totals: dict[str, Any]) -> None:
    """One line per prompt and one for all."""
    out().print("greedy decoding in tokens/s, plain and speculative, by the same loop")
    shown = table()
    shown.add_column("prompt", no_wrap=True, overflow="ellipsis", max_width=20)
    for name in ("tokens", "plain", "drafted", "faster", "length", "accepted %", "same"):
        shown.add_column(name, justify="right", no_wrap=True)
    for pair in pairs:
        record = pair.to_json()
        speeds = record["tokens_per_second"]
        speedup = speeds["speculative"] / speeds["plain"] if speeds["plain"] else 0.0
        same = "yes" if pair.identical else "[red]NO[/red]"
        shown.add_row(escape(pair.prompt), str(record["tokens"]), *_numbers(speeds, speedup, record), same)
    shown.add_section()
    tokens = sum(len(pair.plain.ids) for pair in pairs)
    same = f"{totals['identical']}/{len(pairs)}"
    shown.add_row("all", str(tokens), *_numbers(totals["tokens_per_second"], totals["speedup"], totals), same)
    out().print(shown)
    out().print("length: tokens that a verify yields on average; accepted %: of the drafts at each position; same: equal ids")


def _numbers(speeds: dict[str, float], speedup: float, record: dict[str, Any]) -> tuple[str, ...]:
    shares = " ".join(f"{100 * share:.0f}" for share in record["acceptance"])
    length = f"{record['mean_accepted_length']:.2f}"
    return f"{speeds['plain']:.1f}", f"{speeds['speculative']:.1f}", f"{speedup:.2f}x", length, shares
