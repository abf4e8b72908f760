"""A circuit's entries compiled for the CPU and called as they are, whatever their inputs are: no runner, no artifact."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from circuitgraph.circuit.ir import Circuit
from circuitgraph.interpreter import interpret
from circuitgraph.lower import argument_values
from circuitgraph.ops import TORCH_DTYPES, PagedKV
from circuitgraph.pipeline import Run, plan_piece
from circuitgraph.plan.ir import Plan
from circuitgraph.plan.schedule import load_schedule
from circuitgraph.target import backend_of, parse_target


@dataclass(frozen=True)
class Interpreted:
    """The same calls, interpreted."""

    circuit: Circuit

    def run(self, entry: str, inputs, weights, states: Mapping[str, PagedKV]) -> dict[str, torch.Tensor]:
        return interpret(self.circuit, inputs=inputs, weights=weights, states=states, entry=entry)


@dataclass(frozen=True)
class CompiledEntries:
    """Programs by entry and rows."""

    circuit: Circuit
    plans: Mapping[tuple[str, int], Plan]
    module: object

    def run(self, entry: str, inputs, weights, states: Mapping[str, PagedKV]) -> dict[str, torch.Tensor]:
        """One call with poisoned workspace and outputs; caches are written in place."""
        rows = next(iter(inputs.values())).shape[0]
        plan = self.plans[entry, rows]
        outputs, args = {}, []
        for role, value in argument_values(plan):
            if role in ("state", "addressing"):
                state, _, part = value.name.rpartition(".")
                args.append(getattr(states[state], part))
            elif role in ("table", "weight"):
                args.append(weights[value.name])
            elif role == "input":
                args.append(inputs[value.name])
            elif role == "workspace":
                args.append(torch.full(value.type.shape, 255, dtype=torch.uint8))
            else:
                poison = -7 if value.type.dtype == "i32" else float("nan")
                outputs[value.name] = torch.full(value.type.shape, poison, dtype=TORCH_DTYPES[value.type.dtype])
                args.append(outputs[value.name])
        self.module[plan.symbol](*args)  # type: ignore[index]
        return outputs


def compile_entries(circuit: Circuit, pieces: Sequence[tuple[str, int]], folder: Path) -> CompiledEntries:
    import tvm_ffi

    rules, backend = load_schedule("cpu"), backend_of(parse_target("cpu"))
    plans = {piece: plan_piece(Run(), circuit, *piece, "cpu", rules) for piece in pieces}
    built = backend.build(backend.lower(list(plans.values())), folder)
    module = tvm_ffi.load_module(str(built.library))
    module["circuitgraph_init"](2)
    return CompiledEntries(circuit, plans, module)
