"""The generated CUDA is what the GPU tests last ran: kernels that changed and were not run again do not pass."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.gpu.pack import CASES, inputs_digest, source_digests

RECORD = Path(__file__).resolve().parents[1] / "gpu" / "record.json"
HINT = "The kernels differ from those that ran on a GPU: run tests/gpu again with --record (see its conftest.py)."


@pytest.fixture(scope="module")
def record():
    return json.loads(RECORD.read_text())


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_programs_are_those_that_passed(case, record):
    """Where plans, templates and TVM are those of the record, so is the text: only one case generates it all the same."""
    if case.name != "odd_bf16" and inputs_digest(case) == record["inputs"].get(case.name):
        return
    assert source_digests(case) == record["programs"].get(case.name), HINT


def test_everything_passed(record):
    assert set(record["tests"].values()) <= {"passed", "skipped"}
