"""`circuitgraph bench`: how fast, against what the memory allows and against torch."""

from __future__ import annotations

import contextlib
import json
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..measure import shapes
from ..places import check_artifact, check_model, check_target
from .common import out, parse_widths, print_json, table
from .options import AsJson, Model, TargetModel, Threads
from .progress import CompileProgress, bar

if TYPE_CHECKING:
    from ..measure.bench import BenchReport
    from ..measure.cuda import CudaReport


def bench(
    artifact: Annotated[
        Path | None, typer.Argument(metavar="OUT", help="An artifact that 'compile' wrote; or give --shape.")
    ] = None,
    model: Model = None,
    target_model: TargetModel = None,
    entries: Annotated[list[str] | None, typer.Option("--entry", help="CPU: only this entry; repeatable.")] = None,
    widths: Annotated[str | None, typer.Option("--widths", metavar="1,4", help="Only these widths.")] = None,
    context: Annotated[
        int | None, typer.Option("--context", min=0, help="Cache rows of every sequence; 256, on a GPU 1000.")
    ] = None,
    peers: Annotated[bool, typer.Option("--peers/--no-peers", help="Also time torch eager and torch.compile.")] = True,
    threads: Threads = None,
    seconds: Annotated[float, typer.Option("--seconds", min=0.01, help="CPU: of measuring, per program and competitor.")] = 1.0,
    shape: Annotated[
        str | None,
        typer.Option("--shape", help=f"Random weights in this shape: {', '.join(shapes.SHAPES)}."),
    ] = None,
    target: Annotated[
        str | None, typer.Option("--target", help="Without OUT: what to compile the shape for; left out, the GPU here.")
    ] = None,
    peer_widths: Annotated[
        str | None, typer.Option("--peer-widths", metavar="1,8", help="GPU: torch for these widths alone.")
    ] = None,
    peer_modes: Annotated[
        str | None, typer.Option("--peer-modes", metavar="MODE,...", help="GPU: of torch.compile, in place of two.")
    ] = None,
    steps: Annotated[int, typer.Option("--steps", min=1, help="GPU: draft steps of a chain.")] = 3,
    rounds: Annotated[int, typer.Option("--rounds", min=1, help="GPU: replays of each, whose median counts.")] = 40,
    parts: Annotated[
        str | None, typer.Option("--parts", metavar="PART,...", help="GPU: beside steps: proposer, prefill; '' is none.")
    ] = None,
    as_json: AsJson = False,
    file: Annotated[Path | None, typer.Option("--out", metavar="FILE", help="Also write the JSON document there.")] = None,
) -> None:
    """Time every compiled program, beside torch eager and torch.compile of the same head on the same device.

    Medians of one run in which all competitors take turns. GB/s counts each weight once; the percentage is of the read
    bandwidth measured in between. torch.compile builds for each width first, which takes a while. On a GPU also chains,
    the proposer around them, prefill, and runs of the single-row program; 'of floor' is of the longer of what a step's bytes
    and its operations take at the ceilings measured in the same run, and of experts only those count that had rows. There,
    steps and prefill are compared with the reference before they are timed, chains with their steps, torch's heads, too.

    \b
    circuitgraph bench drafter.cg --model drafter/ --target-model llm/
    circuitgraph bench random.cg --widths 1,4 --json > bench.json
    circuitgraph bench --shape dense8b --out dense8b.json
    """
    chosen = parse_widths(widths) if widths else None
    chosen_peers = parse_widths(peer_widths, "'--peer-widths'") if peer_widths else None
    if artifact is None and shape is None:
        raise typer.BadParameter("say what to measure: an artifact, or --shape", param_hint="'OUT'")
    if artifact is not None and target is not None:
        raise typer.BadParameter("an artifact has its own target", param_hint="'--target'")

    if artifact is not None:
        check_artifact(artifact)
    check_model(model)
    check_target(target_model)
    from ..measure import bench as cpu

    with contextlib.ExitStack() as stack:
        if artifact is None:
            artifact = stack.enter_context(_compiled(shape or "", target, chosen))
        elif shape is not None:
            shapes.check_shape(shapes.find_shape(shape), artifact)
        report = stack.enter_context(bar("bench"))
        result = cpu.bench(
            artifact,
            model=model,
            target_model=target_model,
            entries=entries,
            widths=chosen,
            context=cpu.DEFAULT_CONTEXT if context is None else context,
            peers=peers,
            threads=threads,
            seconds=seconds,
            random=shape is not None,
            gpu=_gpu_plan(chosen, context, peers, chosen_peers, peer_modes, steps, rounds, parts),
            observer=report,
        )
    data = result.to_json()
    if file is not None:
        file.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
    if as_json:
        print_json(data)
    else:
        print_report(result)


@contextlib.contextmanager
def _compiled(name: str, target: str | None, widths: tuple[int, ...] | None) -> Iterator[Path]:
    """The shape as an artifact, for as long as it is measured."""
    shape = shapes.find_shape(name)
    target = target or shapes.target_here()
    with tempfile.TemporaryDirectory() as folder:
        artifact = Path(folder) / f"{name}.cg"
        with bar(f"compile {name}") as report:
            observer = CompileProgress(report, lambda circuit: len(shape.pieces(circuit, widths)))
            shapes.compile_shape(shape, artifact, target, widths=widths, observer=observer)
        yield artifact


def _gpu_plan(widths, context, peers, peer_widths, modes, steps, rounds, parts) -> Any:
    from ..measure.gpu_plan import GpuPlan

    given: dict[str, Any] = {"context": context, "modes": modes and modes.split(","), "parts": parts}
    if parts is not None:
        given["parts"] = [part for part in parts.split(",") if part]
    given = {name: value for name, value in given.items() if value is not None}
    return GpuPlan(widths=widths, peer_widths=peer_widths if peers else (), steps=steps, rounds=rounds, **given)


def print_report(result: BenchReport | CudaReport) -> None:
    from ..measure.bench import BenchReport

    if isinstance(result, BenchReport):
        _print_cpu(result)
    else:
        _print_gpu(result)


def _print_gpu(result: CudaReport) -> None:
    console = out()
    console.print(f"{result.program}, {result.context} cache rows a sequence, medians")
    for section in result.sections.values():
        console.print(f"\n{section.title}", style="bold")
        console.print(section.said, markup=False)
        shown = table()
        for column in section.shown():
            shown.add_column(column.header, justify="right")
        for cells in section.cells():
            shown.add_row(*cells)
        console.print(shown)
    for line in result.lines():
        console.print(line, soft_wrap=True, markup=False)


def _print_cpu(result: BenchReport) -> None:
    console = out()
    peers = list(dict.fromkeys(peer for row in result.rows for peer in row.peers))
    console.print(f"{result.program}, {result.context} cache rows a sequence, medians")
    shown = table()
    for name in ("program", "time", "MB", "GB/s", "of read"):
        shown.add_column(name, justify="left" if name == "program" else "right")
    for peer in peers:
        shown.add_column(peer.replace(".", " "), justify="right")  # breaks into two short lines
        shown.add_column("ours", justify="right")
    for row in result.rows:
        cells = [
            f"{row.entry} {row.rows}",
            f"{row.seconds * 1e3:.2f} ms",
            f"{row.bytes / 1e6:.1f}",
            f"{row.bytes_per_second / 1e9:.1f}",
            f"{row.fraction:.0%}",
        ]
        for peer in peers:
            speedup = row.speedup(peer)
            cells += [f"{row.peers[peer] * 1e3:.2f} ms", f"{speedup:.2f}x"] if speedup else ["", ""]
        shown.add_row(*cells)
    console.print(shown)
    machine = result.machine
    versions = ", ".join(f"{name} {version}" for name, version in machine["versions"].items())
    threads = f"{machine['threads']} threads, {machine['processor']}"
    console.print(f"read bandwidth {result.read_bandwidth / 1e9:.1f} GB/s on {threads}")
    console.print(f"{versions}; {result.date}; {result.command}", soft_wrap=True)
