"""`verify` of programs whose rows see a part of their sequence, and what it notices."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import circuitgraph
from circuitgraph.circuit.ir import Circuit
from circuitgraph.measure import verify as verifying
from tests.fixture_cases import FIXTURES
from tests.program_cases import DFLASH, dflash_variant


@pytest.fixture(scope="module")
def windowed(tmp_path_factory):
    """Causal blocks with a window, and a layer without."""
    folder = tmp_path_factory.mktemp("windowed")
    model = dflash_variant("mixed", folder / "model")
    target = FIXTURES / DFLASH / "target"
    options = {"target_model": target, "widths": (1, 3), "context_rows": (4,), "target": "cpu"}
    return circuitgraph.compile("auto", model=model, out=folder / "a.cg", **options).path


def test_blocks_with_a_window(windowed) -> None:
    report = circuitgraph.verify(windowed)
    assert report.passed, report
    of = {(check.rows, check.name) for check in report.checks if check.entry == "draft"}
    assert {(8, "isolated"), (24, "isolated"), (24, "alone"), (8, "draft"), (24, "kv rows")} <= of


@pytest.mark.parametrize("without", ["window", "causal"])
def test_a_kernel_that_ignores_it_is_noticed(windowed, without: str, monkeypatch) -> None:
    """The reference sees more than what was compiled, as a kernel would that leaves the attribute out."""
    reference = verifying.reference

    def seeing(circuit: Circuit, *arguments) -> dict[str, torch.Tensor]:
        return reference(circuit.with_nodes(tuple(replace(node, attrs=kept(node)) for node in circuit.nodes)), *arguments)

    def kept(node):
        return tuple(pair for pair in node.attrs if pair[0] != without)

    monkeypatch.setattr(verifying, "reference", seeing)
    report = circuitgraph.verify(windowed)
    wrong = {check.rows for check in report.checks if check.entry == "draft" and not check.passed}
    assert wrong == {8, 24}
