"""Times one artifact's draft programs on a GPU: `python -m tests.gpu.bench build/gpu/dense8b --out FILE [--peers]`.

GPU time of one step and of a chain, as graph replays between events, medians; beside torch's own head (torch.compile) as
a CUDA graph in the same process. Weights are random and far larger than the cache.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from dataclasses import replace
from pathlib import Path

import torch

from circuitgraph.artifact import read_artifact
from circuitgraph.measure.cases import Span, make_case
from circuitgraph.measure.peers import TorchMtpHead
from circuitgraph.ops import TORCH_DTYPES
from circuitgraph.runtime import load
from tests.gpu.calls import error, reference, run


def median_us(call, rounds: int = 30) -> float:
    for _ in range(3):
        call()
    times = []
    for _ in range(rounds):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        start.record()
        call()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e3)
    return statistics.median(times)


def graph_of(call):
    """A replay of `call`, recorded."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(2):
            call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph.replay


def random_weights(artifact: Path) -> dict[str, torch.Tensor]:
    manifest = read_artifact(artifact).manifest
    weights = {}
    for name, spec in manifest.weights.items():
        values = torch.randn(spec.shape, device="cuda", dtype=TORCH_DTYPES[spec.dtype])
        weights[name] = values * spec.shape[-1] ** -0.5 if len(spec.shape) == 2 else 1 + 0.1 * values
    return weights


def situation(runner, n: int, context: int):
    generator = torch.Generator().manual_seed(n)
    case = make_case(runner.circuit, n, [Span(context)] * n, block_size=16, generator=generator, poison=False)
    caches = {
        name: replace(cache, **{part: tensor.cuda() for part, tensor in vars(cache).items()})
        for name, cache in case.caches.items()
    }
    return case.__class__({name: tensor.cuda() for name, tensor in case.inputs.items()}, caches, case.spans)


def wall_us(runner, steps: int, inputs, caches, slots, rounds: int = 30) -> float:
    """From integers on the host to drafts on the host, median."""
    token, hidden, position = inputs
    token, position, slots = token.cpu(), position.cpu(), slots.cpu()
    parts = ("slot", "seq", "length", "table", "start")
    caches = {name: replace(cache, **{part: getattr(cache, part).cpu() for part in parts}) for name, cache in caches.items()}
    times = []
    for _ in range(rounds):
        torch.cuda.synchronize()
        started = time.perf_counter()
        runner.chain(steps, token, hidden, position, caches, slots).drafts.tolist()
        times.append((time.perf_counter() - started) * 1e6)
    return statistics.median(times)


def prefill_us(runner, count: int) -> float:
    """One chunk of context rows of one sequence."""
    case = make_case(
        runner.circuit, count, [Span(0, count)], block_size=16, generator=torch.Generator().manual_seed(0), poison=False
    )
    caches = {
        name: replace(cache, **{part: tensor.cuda() for part, tensor in vars(cache).items()})
        for name, cache in case.caches.items()
    }
    token, hidden, position = (case.inputs[name].cuda() for name in ("token", "hidden", "position"))
    return median_us(lambda: runner.context(token, hidden, position, caches), rounds=10)


def measure(runner, n: int, context: int, peers: bool) -> dict[str, float]:
    case = situation(runner, n, context)
    want, _ = reference(runner, case, "draft")
    got, _ = run(runner, case, "draft")
    row = {
        "n": n,
        "equal_tokens": int((got["draft"] == want["draft"]).sum()),
        "error": error(got["next_hidden"], want["next_hidden"]),
    }
    del want
    inputs = (case.inputs["token"], case.inputs["hidden"], case.inputs["position"])
    cache = case.caches["kv"]
    for steps in (1, 3):
        slots = cache.slot[None].repeat(steps, 1)
        for _ in range(3):
            runner.chain(steps, *inputs, case.caches, slots)
        graph = next(reversed(runner._graphs.values()))
        row[f"step_{steps}_us"] = median_us(graph.graph.replay)
        row[f"wall_{steps}_us"] = wall_us(runner, steps, inputs, case.caches, slots)
    weights = sum(t.nbytes for name, t in runner.weights.items() if name in runner.manifest.weights and name != "embed_tokens")
    kv = n * (context + 1) * runner.circuit.states[0].bytes_per_row()
    row["TB_per_s"] = (weights + kv) / row["step_1_us"] / 1e6
    if peers:
        with torch.device("cuda"):
            head = TorchMtpHead(runner.circuit, runner.weights, n, context).eval()
        token, position = case.inputs["token"].long(), case.inputs["position"].long()
        torch.compiler.reset()
        compiled = torch.compile(head, dynamic=False)
        with torch.no_grad():
            compiled(token, case.inputs["hidden"], position)
            row["torch_compile_us"] = median_us(graph_of(lambda: compiled(token, case.inputs["hidden"], position)))
        row["speedup"] = row["torch_compile_us"] / row["step_1_us"]
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("artifact", type=Path)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--context", type=int, default=1000)
    parser.add_argument("--peers", action="store_true")
    options = parser.parse_args()
    runner = load(options.artifact, weights=random_weights(options.artifact), max_position=max(options.context, 4096) + 64)
    rows = []
    for n in runner.widths:
        rows.append(measure(runner, n, options.context, options.peers))
        print("  ".join(f"{name} {value:.4g}" for name, value in rows[-1].items()), flush=True)
    prefill = {count: prefill_us(runner, count) for count in runner.context_rows}
    print("  ".join(f"context {count} rows {value:.4g} us" for count, value in prefill.items()))
    if options.out:
        facts = {
            "device": torch.cuda.get_device_name(),
            "torch": torch.__version__,
            "context": options.context,
            "rows": rows,
            "prefill_us": prefill,
        }
        options.out.write_text(json.dumps(facts, indent=1) + "\n")


if __name__ == "__main__":
    main()
