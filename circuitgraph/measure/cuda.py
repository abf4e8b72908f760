"""`bench` on a GPU. Also a program of its own for machines that have torch and tvm-ffi only:

python -m circuitgraph.measure.cuda build/gpu/dense8b --random --peers --json bench.json
"""

from __future__ import annotations

import argparse
import datetime
import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from ..artifact import Artifact, built_for_gpu, check_device, read_artifact
from ..errors import ArtifactError, CircuitgraphError, Fault, did_you_mean
from ..runtime.binding import bind_weights
from ..runtime.compiled import open_library
from ..runtime.loading import load
from . import attend, chains, entries
from .ceiling import Ceiling
from .gpu import MultiplyCeiling, ReadCeiling, describe_gpu, need_gpu
from .gpu_plan import MODES, PARTS, GpuPlan
from .report import Section, plain_table
from .weights import bind_where_recorded, random_weights

Observer = Callable[[str, int, int], None]

METHOD = (
    "GPU time: CUDA graph replays between events, medians; the host puts each into the queue while the GPU idles, so no "
    "launch is timed; prefill is called as a server calls it, and what its launches take beyond that head start is in its time. "
    "What is compared takes turns in one run, the read kernel among them."
)


@dataclass(frozen=True)
class CudaReport:
    """What was measured on one GPU in one run. Times are medians, in microseconds; GB/s count every weight once.

    read: the ceiling that shares are of. sections: tables by name.
    """

    artifact: str
    program: str
    context: int
    date: str
    command: str
    method: str
    machine: Mapping[str, Any]
    read: Mapping[str, Any]
    sections: Mapping[str, Section]

    def to_json(self) -> dict[str, Any]:
        return {**vars(self), "sections": {name: section.to_json() for name, section in self.sections.items()}}

    def lines(self) -> Iterator[str]:
        """What was measured on, with what and how: the text around the tables."""
        machine, read = self.machine, self.read
        versions = ", ".join(f"{name} {version}" for name, version in machine["versions"].items())
        yield f"read ceiling {read['gb_per_s']:.0f} GB/s (median of {read['passes']} passes of {read['bytes'] / 1e9:.2f} GB,"
        yield f"best {read['best_gb_per_s']:.0f}; sums checked; {read['kernel']})"
        yield f"arithmetic ceiling {read['tflop_per_s']:.0f} TFLOP/s ({read['product']})"
        yield f"{machine['device']}, driver {machine['driver']}; {versions}; {self.date}"
        yield self.method
        yield self.command


def bench_cuda(
    artifact: str | Path,
    plan: GpuPlan | None = None,
    *,
    model: str | Path | None = None,
    target_model: str | Path | None = None,
    weights: Mapping[str, torch.Tensor] | None = None,
    random: bool = False,
    observer: Observer | None = None,
) -> CudaReport:
    """Time an artifact's programs on this GPU.

    Before it is timed, a step is compared with the reference, a replayed chain with its steps one by one, and prefill's
    cache rows with the reference. Of the proposer only that it drafts as many tokens as asked is looked at.

    Args:
        plan: what to measure; see `GpuPlan`.
        model, target_model, weights: as in `verify`. random: make all weights up instead.
        observer: called with (what is measured, parts done, parts in all).

    Raises:
        CircuitgraphError: no GPU, another GPU than compiled for, no such width, weights that do not bind, a result that
            is not the reference's.
    """
    plan = plan or GpuPlan()
    need_gpu(str(artifact))
    opened = read_artifact(artifact)
    manifest = opened.manifest
    if manifest.target.kind != "cuda":
        hint = "Measure it with `circuitgraph bench`."
        raise ArtifactError(Fault("was not compiled for a GPU", where=str(artifact), got=manifest.target.kind, hint=hint))
    device = torch.device("cuda", torch.cuda.current_device())
    manifest = built_for_gpu(manifest, device)
    check_device(manifest, device, str(artifact))
    opened = replace(opened, manifest=manifest)
    chosen = _widths(opened, plan, str(artifact))
    with torch.no_grad():
        bound = _bind(opened, model, target_model, weights, random, device, max(plan.context, plan.prefill) + 2048)
        functions = open_library(opened)
        ceiling = Ceiling(ReadCeiling(), MultiplyCeiling())
        tell = observer or (lambda *_: None)
        if attend.is_attention(manifest.circuit):
            sections = attend.measure(manifest, functions, device, ceiling, chosen, plan.rounds, tell)
        elif entries.chains_itself(manifest.circuit):
            runner = load(artifact, weights=bound, device=device)
            sections = chains.measure(runner, ceiling, chosen, plan, tell)
        else:
            sections = entries.measure(manifest, functions, bound, ceiling, chosen, plan, tell)
    return CudaReport(
        artifact=str(artifact),
        program=manifest.program,
        context=plan.context,
        date=datetime.datetime.now(datetime.UTC).isoformat(timespec="minutes"),
        command=" ".join(sys.argv),
        method=METHOD,
        machine=describe_gpu(manifest.tools),
        read=ceiling.to_json(),
        sections=sections,
    )


def _widths(artifact: Artifact, plan: GpuPlan, where: str) -> list[int]:
    """Raises ArtifactError for widths, among those for peers, that were not compiled, and for unknown parts."""
    manifest = artifact.manifest
    drafting = {entry.name for entry in manifest.circuit.entries if entry.rows != "context"}
    functions = [function for function in manifest.functions.values() if function.entry in drafting]
    compiled = sorted({function.rows // manifest.circuit.block_of(function.entry) for function in functions})
    hint = f"Compiled: {', '.join(map(str, compiled)) or 'none'}."
    faults = [
        Fault(f"has no program for {rows} sequences", where=where, hint=hint)
        for rows in dict.fromkeys([*(plan.widths or ()), *(plan.peer_widths or ())])
        if rows not in compiled
    ]
    faults += [
        Fault(f"there is no part '{part}' to measure", where=where, hint=did_you_mean(part, PARTS))
        for part in plan.parts
        if part not in PARTS
    ]
    if not compiled or (plan.widths is not None and not plan.widths):
        faults.append(Fault("nothing to measure: no draft program, or no width was asked for", where=where, hint=hint))
    if faults:
        raise ArtifactError(faults)
    return compiled if plan.widths is None else sorted(set(plan.widths))


def _bind(
    opened: Artifact,
    model: str | Path | None,
    target_model: str | Path | None,
    weights: Mapping[str, torch.Tensor] | None,
    random: bool,
    device: torch.device,
    positions: int,
) -> dict[str, torch.Tensor]:
    """Every weight on the device; those that no checkpoint has are made up there."""
    made = random_weights(opened.manifest, device, every=random)
    given = {**made, **{name: tensor.to(device) for name, tensor in (weights or {}).items()}}
    if random:
        return bind_weights(opened, weights=given, device=device, max_position=positions)
    return bind_where_recorded(
        opened, model=model, target_model=target_model, weights=given, device=device, max_position=positions
    )


# -- the program -------------------------------------------------------------------------------------------------


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m circuitgraph.measure.cuda", description="Time an artifact's programs on this GPU."
    )
    parser.add_argument("artifact", type=Path, help="a folder that compile or tests.gpu.pack wrote")
    parser.add_argument("--model", type=Path, help="the drafter's checkpoint folder")
    parser.add_argument("--target-model", type=Path, help="the target's, for weights that are borrowed")
    parser.add_argument("--random", action="store_true", help="made-up weights instead of a checkpoint's")
    parser.add_argument("--widths", type=_numbers, help="only these, e.g. 1,8")
    parser.add_argument("--context", type=int, default=GpuPlan.context, help="cache rows of every sequence")
    parser.add_argument("--steps", type=int, default=3, help="of a chain")
    parser.add_argument("--peers", action="store_true", help="also torch eager and torch.compile, as CUDA graphs")
    parser.add_argument("--peer-widths", type=_numbers, help="peers for these widths alone, e.g. 1,8")
    parser.add_argument("--peer-modes", type=lambda text: text.split(","), default=list(MODES), help="of torch.compile")
    parser.add_argument("--rounds", type=int, default=GpuPlan.rounds)
    parser.add_argument("--parts", type=lambda text: [part for part in text.split(",") if part], default=list(PARTS))
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the report there, too")
    options = parser.parse_args(arguments)
    peer_widths = options.peer_widths or (None if options.peers else ())
    plan = GpuPlan(
        options.widths, options.context, options.steps, peer_widths, options.peer_modes, options.rounds, parts=options.parts
    )
    try:
        report = bench_cuda(
            options.artifact,
            plan,
            model=options.model,
            target_model=options.target_model,
            random=options.random,
            observer=lambda what, done, total: print(f"[{done + 1}/{total}] {what}", file=sys.stderr, flush=True),
        )
    except CircuitgraphError as error:
        for fault in error.faults:
            print(f"error: {fault}", file=sys.stderr)
        return 1
    if options.json:
        write_json(report, options.json)
    print_plain(report)
    return 0


def write_json(report: CudaReport, file: Path) -> None:
    file.write_text(json.dumps(report.to_json(), indent=1) + "\n", encoding="utf-8")


def print_plain(report: CudaReport) -> None:
    print(f"{report.program}, {report.context} cache rows a sequence")
    for section in report.sections.values():
        print(f"\n{section.title}\n{section.said}")
        print(plain_table([column.header for column in section.shown()], section.cells()))
    print()
    for line in report.lines():
        print(line)


def _numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


if __name__ == "__main__":
    sys.exit(main())
