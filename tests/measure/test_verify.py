"""`verify` of programs whose rows see a part of their sequence, and what it notices."""

from __future__ import annotations

from dataclasses import replace

import torch

import circuitgraph
from circuitgraph.circuit.ir import Circuit
from circuitgraph.measure import verify as verifying
from tests.fixture_cases import FIXTURES
from tests.program_cases import DFLASH, dflash_variant


def test_blocks_with_a_window(tmp_path, monkeypatch) -> None:
    """Causal blocks with a window, and a layer without; then a reference that sees more than what was compiled, as if the kernel
    had left an attribute out."""
    options = {"target_model": FIXTURES / DFLASH / "target", "widths": (1, 3), "context_rows": (4,), "target": "cpu"}
    out = tmp_path / "a.cg"
    circuitgraph.compile("auto", model=dflash_variant("mixed", tmp_path / "model"), out=out, **options)
    report = circuitgraph.verify(out)
    assert report.passed, report
    of = {(check.rows, check.name) for check in report.checks if check.entry == "draft"}
    assert {(8, "isolated"), (24, "isolated"), (24, "alone"), (8, "draft"), (24, "kv rows")} <= of
    reference = verifying.reference
    for without in ("window", "causal"):

        def seeing(circuit: Circuit, *arguments, without=without) -> dict[str, torch.Tensor]:
            nodes = [replace(node, attrs=tuple(pair for pair in node.attrs if pair[0] != without)) for node in circuit.nodes]
            return reference(circuit.with_nodes(tuple(nodes)), *arguments)

        monkeypatch.setattr(verifying, "reference", seeing)
        report = circuitgraph.verify(out)
        wrong = {check.rows for check in report.checks if check.entry == "draft" and not check.passed}
        assert wrong == {8, 24}, without
