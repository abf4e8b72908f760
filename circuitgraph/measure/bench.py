"""`bench`: time per entry and width, against the machine's read bandwidth and against torch, in one run."""

from __future__ import annotations

import datetime
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ..artifact.manifest import Function, Manifest
from ..artifact.store import read_artifact
from ..circuit.narrow import slice_entry, specialize
from ..errors import ArtifactError, Fault, did_you_mean
from ..plan.ir import Cost, node_cost
from ..plan.text import CONTEXT_FOR_COST
from ..runtime.compiled import CompiledRunner, open_library
from .cases import Case, Span, make_case
from .machine import CacheFlush, ReadProbe, describe_machine, last_level_cache
from .peers import torch_peers
from .weights import bind_where_recorded, random_weights

if TYPE_CHECKING:
    from .cuda import CudaReport, GpuPlan

Observer = Callable[[str, int, int], None]

OURS = "circuitgraph"
SERVED = frozenset({"context", "draft", "draft_masked", "logits"})
"""Entries of chains without first steps of their own, which a server calls by methods of the same names."""

GIVEN = ("token", "hidden", "position")
"""What it gives them."""

MIN_ROUNDS = 7
BLOCK_SIZE = 16
DEFAULT_CONTEXT = 256


@dataclass(frozen=True)
class BenchRow:
    """One entry and width. Seconds are medians; `peers` has those of the same head in torch, by kind.

    `fraction` is `bytes_per_second` over the run's read bandwidth.
    """

    entry: str
    rows: int
    seconds: float
    bytes: int
    flops: int
    bytes_per_second: float
    fraction: float
    rounds: int
    peers: Mapping[str, float]

    def speedup(self, peer: str) -> float | None:
        """How many times faster than a peer; None where it was not measured."""
        return self.peers[peer] / self.seconds if peer in self.peers else None


@dataclass(frozen=True)
class BenchReport:
    artifact: str
    program: str
    context: int
    date: str
    command: str
    machine: Mapping[str, Any]
    read_bandwidth: float
    rows: tuple[BenchRow, ...]

    def row(self, entry: str, rows: int) -> BenchRow:
        return next(row for row in self.rows if (row.entry, row.rows) == (entry, rows))

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def bench(
    artifact: str | Path,
    *,
    model: str | Path | None = None,
    target_model: str | Path | None = None,
    weights: Mapping[str, torch.Tensor] | None = None,
    entries: Sequence[str] | None = None,
    widths: Sequence[int] | None = None,
    context: int = DEFAULT_CONTEXT,
    peers: bool = True,
    threads: int | None = None,
    seconds: float = 1.0,
    random: bool = False,
    gpu: GpuPlan | None = None,
    observer: Observer | None = None,
) -> BenchReport | CudaReport:
    """Time every compiled program as a server calls it, staging included; an artifact for a GPU as `bench_cuda` does.

    Ours, torch eager, torch.compile and the read probe take turns, one call each a round, so that all of them meet
    the same disturbances. Where the weights might stay in the cache, it is flushed before every call: between two
    draft steps the target's own weights would pass through it.

    Args:
        artifact: the folder or zip that `compile` wrote.
        model, target_model, weights: as in `verify`.
        entries, widths: only these.
        context: cache rows of every sequence.
        peers: torch beside ours (for programs that have a torch peer; torch.compile takes a while to build).
        threads: for everything in the run; torch's own number when left out.
        seconds: of measuring per program and competitor, at least MIN_ROUNDS rounds.
        random: make all weights up instead of reading a checkpoint.
        gpu: what to measure of an artifact that runs on a GPU, in place of everything above but the weights.
        observer: called with (program, programs done, programs in all).

    Raises:
        CircuitgraphError: the artifact or its weights do not load, or it has no such entry or width.
    """
    opened = read_artifact(artifact)
    if opened.manifest.target.kind == "cuda":
        from .cuda import bench_cuda
        from .gpu_plan import GpuPlan

        if entries is not None:
            hint = "Steps are always measured; --parts (GpuPlan.parts) says what else."
            raise ArtifactError(Fault("entries are not chosen on a GPU", where=str(artifact), got=", ".join(entries), hint=hint))
        gpu = gpu or GpuPlan(widths=widths, peer_widths=None if peers else ())
        places = {"model": model, "target_model": target_model, "weights": weights}
        return bench_cuda(artifact, gpu, **places, random=random, observer=observer)
    before = torch.get_num_threads()
    try:
        if threads:
            torch.set_num_threads(threads)
        functions = _chosen(opened.manifest, str(artifact), entries, widths)
        if random:
            weights = {**random_weights(opened.manifest, "cpu", every=True), **(weights or {})}
        bound = bind_where_recorded(opened, model=model, target_model=target_model, weights=weights)
        runner = CompiledRunner(opened.manifest, open_library(opened, threads=threads), bound)
        probe, rows = ReadProbe(), []
        measured = []
        for done, function in enumerate(functions):
            if observer:
                observer(function.symbol, done, len(functions))
            measured.append(_measure(runner, function, probe, context, peers, seconds))
        for function, times in measured:
            rows.append(_row(opened.manifest, function, times, context, probe.rate))
        return BenchReport(
            artifact=str(artifact),
            program=opened.manifest.program,
            context=context,
            date=datetime.datetime.now(datetime.UTC).date().isoformat(),
            command=" ".join(["circuitgraph", *sys.argv[1:]]),
            machine=describe_machine(),
            read_bandwidth=probe.rate,
            rows=tuple(rows),
        )
    finally:
        torch.set_num_threads(before)


def _chosen(manifest: Manifest, where: str, entries: Sequence[str] | None, widths: Sequence[int] | None) -> list[Function]:
    """The functions to time. Raises ArtifactError for an entry or a width that none of them has."""
    functions = sorted(manifest.functions.values(), key=lambda function: (function.entry, function.rows))
    known = {function.entry for function in functions}
    faults = [
        Fault(f"has no entry '{entry}'", where=where, hint=did_you_mean(entry, known))
        for entry in entries or ()
        if entry not in known
    ]
    chosen = [function for function in functions if entries is None or function.entry in entries]
    compiled = {function.rows for function in chosen}
    if chosen:
        faults += [
            Fault(f"has no program for {rows} rows", where=where, hint=f"Compiled: {', '.join(map(str, sorted(compiled)))}.")
            for rows in widths or ()
            if rows not in compiled
        ]
    chosen = [function for function in chosen if widths is None or function.rows in widths]
    if not chosen and not faults:
        faults.append(Fault("nothing to measure: no entry or no width was asked for", where=where))
    if faults:
        raise ArtifactError(faults)
    return chosen


def _measure(
    runner: CompiledRunner, function: Function, probe: ReadProbe, context: int, peers: bool, seconds: float
) -> tuple[Function, dict[str, list[float]]]:
    case = _case(runner, function, context)
    calls: dict[str, Callable[[], object]] = {OURS: _our_call(runner, function.entry, case)}
    if peers and function.entry == "draft":
        calls.update(torch_peers(runner.circuit, runner.weights, function.rows, context, case.inputs))
    flush = CacheFlush() if _weight_bytes(runner) < 4 * last_level_cache() else None
    times: dict[str, list[float]] = {name: [] for name in calls}
    for call in calls.values():
        call()
    ends = time.perf_counter() + seconds * len(calls)
    while len(times[OURS]) < MIN_ROUNDS or time.perf_counter() < ends:
        for name, call in calls.items():
            if flush:
                flush()
            started = time.perf_counter()
            call()
            times[name].append(time.perf_counter() - started)
        if len(times[OURS]) % MIN_ROUNDS == 1:
            probe()
    return function, times


def _case(runner: CompiledRunner, function: Function, context: int) -> Case:
    kind = runner.circuit.entry(function.entry).rows
    block = runner.circuit.block_size if kind == "block" else 1
    spans = [Span(context, function.rows)] if kind == "context" else [Span(context, block)] * (function.rows // block)
    return make_case(
        slice_entry(runner.circuit, function.entry),
        function.rows,
        spans,
        block_size=runner.block_size or BLOCK_SIZE,
        generator=torch.Generator().manual_seed(0),
        poison=False,
        max_position=runner.max_position,
    )


def _our_call(runner: CompiledRunner, entry: str, case: Case) -> Callable[[], object]:
    """The runner's method of the entry's name; what those methods are made of where programs are no such chain."""
    if entry not in SERVED or not {item.name for item in runner.circuit.inputs}.issuperset(GIVEN):
        return lambda: runner.run_entry(entry, case.inputs, case.caches)
    method = getattr(runner, entry)
    arguments = [*(case.inputs[name] for name in GIVEN), case.caches]
    if entry == "draft_masked":
        arguments.append(case.inputs["allowed"])
    return lambda: method(*arguments)


def _weight_bytes(runner: CompiledRunner) -> int:
    return sum({tensor.data_ptr(): tensor.nbytes for tensor in runner.weights.values()}.values())


def _row(manifest: Manifest, function: Function, times: Mapping[str, list[float]], context: int, ceiling: float) -> BenchRow:
    medians = {name: statistics.median(values) for name, values in times.items()}
    ours = medians.pop(OURS)
    cost = cost_at(manifest, function, context)
    return BenchRow(
        entry=function.entry,
        rows=function.rows,
        seconds=ours,
        bytes=cost.bytes,
        flops=cost.flops,
        bytes_per_second=cost.bytes / ours,
        fraction=cost.bytes / ours / ceiling,
        rounds=len(times[OURS]),
        peers=medians,
    )


def cost_at(manifest: Manifest, function: Function, context: int) -> Cost:
    """Bytes and FLOPs of one call with `context` cache rows a sequence: the manifest's are of CONTEXT_FOR_COST."""
    circuit = specialize(slice_entry(manifest.circuit, function.entry), function.rows)
    moved, flops = function.cost_bytes, function.cost_flops
    for node in circuit.nodes:
        here, there = (node_cost(circuit, node, function.rows, rows) for rows in (context, CONTEXT_FOR_COST))
        moved += here.bytes - there.bytes
        flops += here.flops - there.flops
    return Cost(moved, flops)
