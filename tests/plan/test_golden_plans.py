"""Golden plans: shipped families x entries x widths x targets, as text files whose change shows as a diff.

`pytest tests/plan --snapshot-update` rewrites them; read the diff before committing it.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from syrupy.extensions.single_file import SingleFileSnapshotExtension, WriteMode

from circuitgraph.checkpoint import load_circuit, load_family, shipped_families
from circuitgraph.circuit.narrow import slice_entry
from circuitgraph.errors import ScheduleError
from circuitgraph.pipeline import Run, plan_piece
from circuitgraph.plan.fuse import ROWS
from circuitgraph.plan.ir import Plan
from circuitgraph.plan.schedule import load_schedule
from circuitgraph.plan.text import format_plan

GOLDEN = Path(__file__).resolve().parents[1] / "golden" / "plans"
CASES = [("draft", 1), ("draft", 2), ("draft", 4), ("draft", 8), ("draft", 16), ("context", 64), ("logits", 4)]

SMALL = {"columns", "cat", "heads", "target_ids"}

WITHOUT_KERNEL = {"append_latent", "experts", "head_linear", "latent_attention", "route", "scale_rows"}
"""Ops that the CPU target refuses, by name."""


class PlanFiles(SingleFileSnapshotExtension):
    """One .txt per plan under tests/golden/plans."""

    _write_mode = WriteMode.TEXT
    file_extension = "txt"

    @classmethod
    def dirname(cls, *, test_location) -> str:
        return str(GOLDEN)

    @classmethod
    def get_snapshot_name(cls, *, test_location, index=0) -> str:
        return str(index)


@pytest.fixture(scope="module")
def rules():
    return load_schedule("cpu")


@pytest.mark.filterwarnings("ignore:\\s*Can not relate snapshot name")  # files are named after plans, not after tests
@pytest.mark.parametrize("family", sorted(shipped_families()))
@pytest.mark.parametrize(("entry", "rows"), CASES)
def test_plan_is_as_committed(family, entry, rows, rules, snapshot):
    circuit = load_circuit(load_family(family).file.program, family=family)
    if entry not in {known.name for known in circuit.entries}:
        pytest.skip(f"{circuit.name} has no such entry")
    missing = sorted({node.op for node in slice_entry(circuit, entry).nodes} & WITHOUT_KERNEL)
    if missing:
        with pytest.raises(ScheduleError) as caught:
            plan_piece(Run(), circuit, entry, rows, "cpu", rules)
        assert all(f" = {op}" in str(caught.value) for op in missing)
        return
    plan = plan_piece(Run(), circuit, entry, rows, "cpu", rules)
    assert isinstance(plan, Plan)
    assert format_plan(plan) == snapshot(name=f"cpu-{family}-{entry}-{rows}", extension_class=PlanFiles)
    # Only what moves a few numbers a row is left to the generic kernel.
    assert {node.op for group in plan.groups if group.pattern == ROWS for node in group.nodes} <= SMALL


def test_digest_tells_plans_apart(rules):
    circuit = load_circuit("mtp_dense", family="llama_mtp")
    digests = {format_plan(plan_piece(Run(), circuit, "draft", rows, "cpu", rules)).splitlines()[-1] for rows in (1, 2, 3)}
    assert len(digests) == 3
