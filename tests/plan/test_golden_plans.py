"""Golden plans: shipped families x entries x widths x targets, as text files whose change shows as a diff.

`pytest tests/plan --snapshot-update` rewrites them; read the diff before committing it.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest
from syrupy.extensions.single_file import SingleFileSnapshotExtension, WriteMode

from circuitgraph.checkpoint import load_circuit, load_family, shipped_families
from circuitgraph.circuit.ir import Circuit
from circuitgraph.errors import ScheduleError
from circuitgraph.pipeline import Run, plan_piece
from circuitgraph.plan.fuse import ROWS
from circuitgraph.plan.ir import Plan
from circuitgraph.plan.schedule import Rule, load_schedule
from circuitgraph.plan.text import format_plan
from circuitgraph.target import parse_target

GOLDEN = Path(__file__).resolve().parents[1] / "golden" / "plans"
CASES = {
    "cpu": [("draft", 1), ("draft", 2), ("draft", 4), ("draft", 8), ("draft", 16), ("context", 64), ("logits", 4)],
    "cuda:sm_90a": [("draft", 1), ("draft", 4), ("draft", 8), ("draft", 16), ("context", 64)],
}
DTYPES = {"cpu": {}, "cuda:sm_90a": {"act": "bf16", "wt": "bf16", "kv": "bf16"}}
EVERY_CASE = [(target, *case) for target, cases in CASES.items() for case in cases]

SMALL = {"columns", "cat", "heads", "target_ids"}
"""Ops that move a few numbers a row: all that the generic kernel is left with."""


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


@cache
def rules_of(target: str) -> tuple[Rule, ...]:
    return load_schedule(parse_target(target).kind)


@cache
def circuit_of(family: str, target: str) -> Circuit:
    return load_circuit(load_family(family).file.program, family=family, **DTYPES[target])


def plan_of(family: str, target: str, entry: str, rows: int) -> Plan:
    """rows: of a block drafter, whose programs have whole blocks, the number of blocks."""
    rows *= circuit_of(family, target).block_of(entry)
    plan = plan_piece(Run(), circuit_of(family, target), entry, rows, target, rules_of(target))
    assert isinstance(plan, Plan)
    return plan


@pytest.mark.filterwarnings("ignore:\\s*Can not relate snapshot name")  # files are named after plans, not after tests
@pytest.mark.parametrize("family", sorted(shipped_families()))
@pytest.mark.parametrize(("target", "entry", "rows"), EVERY_CASE)
def test_plan_is_as_committed(family, target, entry, rows, snapshot):
    circuit = circuit_of(family, target)
    if entry not in {known.name for known in circuit.entries}:
        pytest.skip(f"{circuit.name} has no such entry")
    name = f"{target.replace(':', '-')}-{family}-{entry}-{rows}"
    try:
        plan = plan_of(family, target, entry, rows)
    except ScheduleError as refusal:
        # A GPU may lack kernels for an op; then there is no file, and one that has been committed stays wanted.
        if target == "cpu" or (GOLDEN / f"{name}.txt").exists():
            raise
        pytest.skip(f"{target} has no kernels for it: {refusal}")
    assert format_plan(plan) == snapshot(name=name, extension_class=PlanFiles)
    assert {node.op for group in plan.groups if group.pattern == ROWS for node in group.nodes} <= SMALL


def test_digest_tells_plans_apart():
    digests = {format_plan(plan_of("llama_mtp", "cpu", "draft", rows)).splitlines()[-1] for rows in (1, 2, 3)}
    assert len(digests) == 3
