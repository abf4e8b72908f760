"""The generated CUDA is what the GPU tests last ran: kernels that changed and were not run again do not pass."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.gpu.pack import CASES, all_source_digests, inputs_digest

RECORD = Path(__file__).resolve().parents[1] / "gpu" / "record.json"
HINT = "The kernels differ from those that ran on a GPU: run tests/gpu again with --record (see its conftest.py)."


@pytest.fixture(scope="module")
def record():
    return json.loads(RECORD.read_text())


@pytest.fixture(scope="module")
def generated(record):
    """Digests of the text now. Where plans, templates and TVM are those of the record, so is it: only one case makes it then."""
    changed = [case for case in CASES if case.name == "odd_bf16" or inputs_digest(case) != record["inputs"].get(case.name)]
    return record["programs"] | all_source_digests(changed)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_programs_are_those_that_passed(case, record, generated):
    assert generated[case.name] == record["programs"].get(case.name), HINT


def test_everything_passed(record):
    assert set(record["tests"].values()) <= {"passed", "skipped"}
