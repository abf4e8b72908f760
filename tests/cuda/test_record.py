"""The generated CUDA is what the GPU tests last ran: kernels that changed and were not run again do not pass."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.gpu.pack import CASES, source_digests

RECORD = Path(__file__).resolve().parents[1] / "gpu" / "record.json"


@pytest.fixture(scope="module")
def record():
    return json.loads(RECORD.read_text())


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_programs_are_those_that_passed(case, record):
    hint = f"Run the GPU tests again: tests/gpu/conftest.py says how. Recorded on {record['device']}."
    assert source_digests(case) == record["programs"].get(case.name), hint


def test_everything_passed(record):
    assert set(record["tests"].values()) <= {"passed", "skipped"}
