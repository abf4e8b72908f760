"""Programs without their runner, called as they are: the functions of an artifact by entry."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from circuitgraph.artifact import Manifest, read_artifact
from circuitgraph.circuit.ir import Circuit
from circuitgraph.circuit.narrow import slice_entry
from circuitgraph.measure.calls import call_function
from circuitgraph.measure.cases import Case
from circuitgraph.measure.truth import relative_error
from circuitgraph.measure.weights import random_weights
from circuitgraph.ops import PagedKV
from circuitgraph.runtime.binding import bind_weights
from circuitgraph.runtime.compiled import open_library
from tests.fixture_cases import FIXTURES
from tests.gpu.expected import ALONE

POSITIONS = 4096


@dataclass(frozen=True)
class Entry:
    """One entry of an artifact, for `calls.situation`: its circuit has what the entry is given among its inputs."""

    circuit: Circuit
    device: torch.device
    max_position: int = POSITIONS


@dataclass(frozen=True)
class Direct:
    """An artifact's functions with weights on the GPU: random ones, or those of the fixture that it is named after."""

    manifest: Manifest
    functions: Mapping[str, object]
    weights: dict[str, torch.Tensor]
    device: torch.device

    @property
    def circuit(self) -> Circuit:
        return self.manifest.circuit

    def entry(self, name: str) -> Entry:
        return Entry(slice_entry(self.circuit, name), self.device)

    def call(self, name: str, case: Case, weights: Mapping[str, torch.Tensor] | None = None) -> tuple[dict, dict]:
        """(outputs, caches) of one call in poisoned memory; the case's caches stay as they are."""
        function, caches = self.manifest.function(name, case.rows), case.copy_caches()
        code = self.functions[function.symbol]
        made = call_function(function, code, inputs=case.inputs, caches=caches, weights=weights or self.weights)  # type: ignore[arg-type]
        return made, caches

    def run(self, entry: str, inputs, weights, states: Mapping[str, PagedKV]) -> dict[str, torch.Tensor]:
        """As `program_cases.Entries`: tensors of the host, on the smallest program that has room; idle rows fill it."""
        n = next(iter(inputs.values())).shape[0]
        rows = min(rows for rows in self.manifest.widths(entry) if rows >= n)

        def moved(tensor: torch.Tensor, fill: int = 0) -> torch.Tensor:
            more = tensor.new_full((rows - n, *tensor.shape[1:]), fill)
            return torch.cat([tensor, more]).to(self.device)

        caches = {
            name: PagedKV(
                k=cache.k.to(self.device),
                v=cache.v.to(self.device),
                slot=moved(cache.slot, -1),
                seq=moved(cache.seq),
                length=moved(cache.length),
                table=cache.table.to(self.device),
                start=cache.start.to(self.device),
            )
            for name, cache in states.items()
        }
        function = self.manifest.function(entry, rows)
        made = call_function(
            function,
            self.functions[function.symbol],  # type: ignore[arg-type]
            inputs={name: moved(tensor) for name, tensor in inputs.items()},
            caches=caches,
            weights={name: tensor.to(self.device) for name, tensor in weights.items()},
        )
        for name, cache in caches.items():
            states[name].k.copy_(cache.k)
            states[name].v.copy_(cache.v)
        return {name: tensor[:n].cpu() for name, tensor in made.items()}


@functools.cache
def open_direct(folder: Path) -> Direct:
    opened, device = read_artifact(folder), torch.device("cuda", torch.cuda.current_device())
    fixture = FIXTURES / folder.name.removeprefix(f"{ALONE['direct']}fixture_")
    positions = POSITIONS if opened.manifest.circuit.tables else None
    if fixture.is_dir():
        target = fixture / "target" if (fixture / "target").is_dir() else None
        weights = bind_weights(opened, model=fixture, target_model=target, device=device, max_position=positions)
    else:
        given = random_weights(opened.manifest, device, every=True)
        weights = bind_weights(opened, weights=given, device=device, max_position=positions)
    return Direct(opened.manifest, open_library(opened), weights, device)


def perturbed(weights: Mapping[str, torch.Tensor], name: str) -> dict[str, torch.Tensor]:
    """One weight with its rows in another order."""
    return {**weights, name: weights[name].roll(1, 0)}


def live_rows(case: Case, outputs: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: tensor[: case.live] for name, tensor in outputs.items()}


def worst(made: Mapping[str, torch.Tensor], meant: Mapping[str, torch.Tensor]) -> float:
    """The largest relative error of a row of any float output."""
    errors = [
        relative_error(ours, theirs)
        for name, tensor in made.items()
        if tensor.is_floating_point()
        for ours, theirs in zip(tensor, meant[name], strict=True)
    ]
    return max((error if error == error else float("inf") for error in errors), default=0.0)


def with_caches(case: Case, **parts: torch.Tensor) -> Case:
    """The case with other parts of its only cache."""
    ((name, cache),) = case.caches.items()
    return Case(case.inputs, {name: replace(cache, **parts)}, case.spans)
