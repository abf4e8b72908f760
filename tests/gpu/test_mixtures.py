"""Mixtures of experts alone: routes of every kind against the interpreter, and rows beside other rows."""

from __future__ import annotations

import pytest
import torch

from circuitgraph.artifact import read_artifact
from circuitgraph.interpreter import interpret
from circuitgraph.measure.calls import call_function
from circuitgraph.measure.routing import chosen_experts, sure_rows
from circuitgraph.measure.weights import random_weights
from circuitgraph.ops import TORCH_DTYPES
from circuitgraph.runtime.compiled import open_library

LIMITS = {"bf16": 2e-2, "f16": 4e-3, "f32": 2e-5}
"""Of a row's error relative to what the experts add. Another expert in place of one is ten times as much."""

KINDS = ("any", "alike", "apart", "ties")


class Mixture:
    """One artifact's programs on the GPU, with weights made up."""

    def __init__(self, folder):
        artifact = read_artifact(folder)
        self.manifest, self.library = artifact.manifest, open_library(artifact)
        self.circuit = self.manifest.circuit
        self.weights = random_weights(self.manifest, "cuda", every=True)
        (self.route,) = [node for node in self.circuit.nodes if node.op == "route"]
        self.experts, self.hidden = self.weights[self.route.inputs[1]].shape
        self.top = int(self.route.attr["top"])

    def situation(self, kind: str, rows: int, seed: int = 0) -> torch.Tensor:
        """h [rows, hidden]. alike: all rows the same; apart: as many different experts as there are, by a router that reads
        single columns; ties: of two experts with one score the second is not chosen."""
        generator = torch.Generator("cuda").manual_seed(100 * rows + seed)
        h = torch.randn((rows, self.hidden), generator=generator, device="cuda")
        router = self.weights[self.route.inputs[1]]
        if kind == "alike":
            h = torch.randn((32, self.hidden), generator=generator, device="cuda").to(TORCH_DTYPES[self.circuit.act])
            h = h[self.sure(h, kind)][:1].repeat(rows, 1)
        if kind in ("apart", "ties"):
            router.zero_()
            for correction in self.route.inputs[2:]:
                self.weights[correction].zero_()
            share = 1 if kind == "apart" else 2  # experts that read one column
            columns = self.experts // share
            router[torch.arange(columns * share), torch.arange(columns * share) // share] = 1
            place = torch.arange(self.top).repeat(rows, 1) + self.top * torch.arange(rows)[:, None]
            height = torch.linspace(4, 2, self.top, device="cuda").repeat(rows, 1)
            h[:, :columns] *= 0.1
            h.scatter_(1, (place % columns).cuda(), height)
        return h.to(TORCH_DTYPES[self.circuit.act])

    def made(self, entry: str, h: torch.Tensor) -> torch.Tensor:
        function = self.manifest.function(entry, len(h))
        call = call_function(function, self.library[function.symbol], inputs={"h": h}, caches={}, weights=self.weights)
        return call["mixed"]

    def meant(self, h: torch.Tensor) -> torch.Tensor:
        return interpret(self.circuit, inputs={"h": h}, weights=self.weights, outputs=["mixed"])["mixed"]

    def sure(self, h: torch.Tensor, kind: str) -> torch.Tensor:
        """Rows whose experts do not depend on rounding; of ties only two equal scores do, and those are equal in any."""
        if kind == "ties":
            return torch.ones(len(h), dtype=torch.bool, device="cuda")
        return sure_rows(self.circuit, {"h": h}, self.weights)


def errors(got: torch.Tensor, want: torch.Tensor, h: torch.Tensor) -> torch.Tensor:
    """Of each row, relative to what is added to h."""
    return ((got.double() - want.double()).norm(dim=1) / (want.double() - h.double()).norm(dim=1)).nan_to_num(float("inf"))


@pytest.mark.parametrize("kind", KINDS)
def test_mixture_computes_what_the_circuit_means(mixture, kind):
    folder, entry, rows = mixture
    ours = Mixture(folder)
    limit, checked = LIMITS[ours.circuit.act], 0
    for seed in range(3):
        h = ours.situation(kind, rows, seed)
        sure = ours.sure(h, kind)
        got, want = ours.made(entry, h), ours.meant(h)
        assert (errors(got, want, h)[sure] < limit).all()
        assert torch.equal(got, ours.made(entry, h)), "the same call twice gives other results"
        checked += int(sure.sum())
    assert checked >= rows, "hardly a row whose experts are beyond doubt"
    (count,) = set(chosen_experts(ours.circuit, {"h": h}, ours.weights).values())
    assert {"alike": count == ours.top, "apart": count == min(ours.experts, rows * ours.top)}.get(kind, True)
    # The control: without one of the experts that are chosen, its rows are off.
    down = ours.weights[next(node for node in ours.circuit.nodes if node.op == "experts").inputs[3]]
    down.zero_()
    assert (errors(got, ours.meant(h), h) > limit).all()


def test_rows_of_a_mixture_do_not_depend_on_each_other(mixture):
    """A row alone, beside others, and beside one that is no number."""
    folder, entry, rows = mixture
    ours = Mixture(folder)
    limit = LIMITS[ours.circuit.act]
    h = ours.situation("any", rows)
    sure, together, want = ours.sure(h, "any"), ours.made(entry, h), ours.meant(h)
    if 1 in ours.manifest.widths(entry):
        alone = torch.cat([ours.made(entry, h[row : row + 1]) for row in range(rows)])
        assert (((alone - together).double().norm(dim=1) / (want - h).double().norm(dim=1))[sure] < limit).all()
    if rows > 1:
        broken = h.clone()
        broken[rows // 2] = float("nan")
        others = torch.arange(rows, device="cuda") != rows // 2
        got = ours.made(entry, broken)
        assert got[rows // 2].isnan().all()
        assert (errors(got, want, h)[sure & others] < limit).all()
