"""Calls of a runner and of the reference on the same random situation, on the GPU."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from circuitgraph.interpreter import interpret
from circuitgraph.measure.cases import Case, Span, make_case
from circuitgraph.runtime import CompiledRunner

ARTIFACTS: str | None = None
"""The folder of --artifacts, for tests that cannot take fixtures."""

CONTEXTS = (0, 1, 3, 4, 5, 15, 16, 17, 33, 130)
"""Cache rows before a call: around the sizes of blocks and tiles."""


def situation(
    runner: CompiledRunner,
    entry: str,
    rows: int,
    seed: int,
    *,
    context: int | None = None,
    spans: Sequence[Span] | None = None,
) -> Case:
    """`rows` rows with blocks of another size for each seed; the last of several rows is idle, without `spans` given."""
    generator = torch.Generator().manual_seed(seed)
    live = rows - 1 if rows > 1 else 1
    if spans is not None:
        spans = list(spans)
    elif runner.circuit.entry(entry).rows == "context":
        first = live // 2
        spans = [Span(CONTEXTS[seed % 10], live - first, seed % 3), *([Span(5, first)] if first else [])]
    else:
        spans = [Span(CONTEXTS[(seed + i) % 10] if context is None else context, 1, (seed + i) % 3) for i in range(live)]
    block_size = (4, 16, 1, 64)[seed % 4]
    case = make_case(runner.circuit, rows, spans, block_size=block_size, generator=generator, max_position=runner.max_position)
    caches = {
        name: replace(cache, **{part: tensor.to(runner.device) for part, tensor in vars(cache).items()})
        for name, cache in case.caches.items()
    }
    return Case({name: tensor.to(runner.device) for name, tensor in case.inputs.items()}, caches, case.spans)


def reference(runner: CompiledRunner, case: Case, entry: str) -> tuple[dict[str, torch.Tensor], dict]:
    """(outputs, caches) of the interpreter in the circuit's own dtypes; drafting entries with all logits."""
    caches = case.copy_caches()
    prefix = "masked_" if entry == "draft_masked" else ""
    outputs = () if entry == "context" else (f"{prefix}draft", f"{prefix}logprob", "next_hidden", "logits")
    with torch.no_grad():
        made = interpret(
            runner.circuit,
            inputs=case.inputs,
            weights=runner.weights,
            states=caches,
            **({"entry": entry} if entry == "context" else {"outputs": outputs}),
        )
    return {name.removeprefix(prefix): value for name, value in made.items()}, caches


def run(runner: CompiledRunner, case: Case, entry: str) -> tuple[dict[str, torch.Tensor], dict]:
    """The same of the runner."""
    caches = case.copy_caches()
    arguments = (case.inputs["token"], case.inputs["hidden"], case.inputs["position"], caches)
    if entry == "context":
        runner.context(*arguments)
        return {}, caches
    if entry == "logits":
        logits, hidden = runner.logits(*arguments)
        return {"logits": logits, "next_hidden": hidden}, caches
    if entry == "draft_masked":
        return runner.draft_masked(*arguments, case.inputs["allowed"])._asdict(), caches
    return runner.draft(*arguments)._asdict(), caches


def error(got: torch.Tensor, want: torch.Tensor) -> float:
    """norm(got - want) / norm(want)."""
    return ((got.double() - want.double()).norm() / want.double().norm().clamp(min=1e-30)).item()


def tolerance(runner: CompiledRunner) -> float:
    """Relative; activations are rounded between groups in both, but not at the same places within one."""
    return {"f32": 2e-5, "f16": 4e-3, "bf16": 2.5e-2}[runner.circuit.act]
