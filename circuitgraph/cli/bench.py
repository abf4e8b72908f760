"""`circuitgraph bench`: how fast, against what the memory allows and against torch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from .common import out, parse_widths, print_json, table
from .options import Artifact, AsJson, Model, TargetModel, Threads
from .progress import bar

if TYPE_CHECKING:
    from ..measure.bench import BenchReport


def bench(
    artifact: Artifact,
    model: Model = None,
    target_model: TargetModel = None,
    entries: Annotated[list[str] | None, typer.Option("--entry", help="Only this entry; repeatable.")] = None,
    widths: Annotated[str | None, typer.Option("--widths", metavar="1,4", help="Only these widths.")] = None,
    context: Annotated[int, typer.Option("--context", min=0, help="Cache rows of every sequence.")] = 256,
    peers: Annotated[bool, typer.Option("--peers/--no-peers", help="Also time torch eager and torch.compile.")] = True,
    threads: Threads = None,
    seconds: Annotated[float, typer.Option("--seconds", min=0.01, help="Of measuring, per program and competitor.")] = 1.0,
    as_json: AsJson = False,
) -> None:
    """Time every compiled program, beside torch eager and torch.compile of the same head on the same threads.

    Medians of one run in which all competitors take turns. GB/s counts each weight once; the percentage is of the read
    bandwidth measured in between. torch.compile builds for each width first, which takes a while.

    \b
    circuitgraph bench drafter.cg --model drafter/ --target-model llm/
    circuitgraph bench random.cg --entry draft --widths 1,4 --json > bench.json
    """
    chosen = parse_widths(widths) if widths else None

    from ..measure.bench import bench as bench_artifact

    with bar("bench") as report:
        result = bench_artifact(
            artifact,
            model=model,
            target_model=target_model,
            entries=entries,
            widths=chosen,
            context=context,
            peers=peers,
            threads=threads,
            seconds=seconds,
            observer=report,
        )
    if as_json:
        print_json(result.to_json())
    else:
        print_report(result)


def print_report(result: BenchReport) -> None:
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
