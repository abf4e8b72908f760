"""The generated CUDA is what the GPU tests last ran, all of them: kernels that changed and were not run again do not pass."""

from __future__ import annotations

import datetime
import json
from pathlib import Path

import pytest

from tests.gpu import expected
from tests.gpu.pack import CASES, all_source_digests, circuit_of, inputs_digest

RECORD = Path(__file__).resolve().parents[1] / "gpu" / "record.json"
HINT = "The kernels differ from those that ran on a GPU: run tests/gpu again with --record (see its conftest.py)."


def functions_of(case) -> expected.Functions:
    """As the manifest of the case's artifact has them."""
    return {f"{entry}_{n}": (entry, n) for entry in case.entries for n in case.rows(entry)}


RECORDED = [case for case in CASES if case.name not in expected.NOT_RUN]
ARTIFACTS = {case.name: functions_of(case) for case in RECORDED}


@pytest.fixture(scope="module")
def record():
    return json.loads(RECORD.read_text())


@pytest.fixture(scope="module")
def generated(record):
    """Digests of the text now. Where plans, templates and TVM are those of the record, so is it: only one case makes it then."""
    changed = [case for case in RECORDED if case.name == "odd_bf16" or inputs_digest(case) != record["inputs"].get(case.name)]
    return record["programs"] | all_source_digests(changed)


@pytest.mark.parametrize("case", RECORDED, ids=lambda case: case.name)
def test_programs_are_those_that_passed(case, record, generated):
    assert generated[case.name] == record["programs"].get(case.name), HINT


@pytest.mark.parametrize("case", [case for case in CASES if case.storage], ids=lambda case: case.name)
def test_what_is_to_be_quantised_is(case):
    """Else kernels of plain weights pass, and nobody sees that they are not those the case is about."""
    stored = {str(storage) for storage in circuit_of(case).storage.values()}
    assert stored
    assert stored <= set(case.storage.values())


@pytest.mark.parametrize("name", ARTIFACTS)
def test_an_artifact_passed_all_its_tests(name, record):
    """Whatever tests/gpu has for it now, the sanitizer's among them."""
    assert not missing(record["tests"], expected.tests_of(name, ARTIFACTS[name])), HINT


def test_the_lifecycle_passed(record):
    """And all else that names no artifact by a fixture."""
    tests = list(expected.tests_without_artifact())
    assert any(test.startswith("test_lifecycle.py::test_random_interleavings[") for test in tests)
    assert not missing(record["tests"], tests), HINT


def test_nothing_failed_and_only_what_may_was_skipped(record):
    assert set(record["tests"].values()) <= {"passed", "skipped"}
    assert {test for test, outcome in record["tests"].items() if outcome == "skipped"} <= set(expected.MAY_SKIP)


@pytest.mark.parametrize("name", expected.NOT_RUN)
def test_what_has_not_run_is_a_case_that_the_record_lacks(name, record):
    """A case that ran leaves `NOT_RUN`, or a later change of its kernels would go unnoticed."""
    assert name in {case.name for case in CASES}
    assert name not in record["programs"], "it ran: take it out of expected.NOT_RUN"
    assert name not in record["inputs"]
    assert not [test for test in record["tests"] if expected.artifact_of(test) == name]


def test_nothing_is_named_twice():
    names = [case.name for case in CASES]
    assert len(set(names)) == len(names)
    assert len(set(expected.NOT_RUN)) == len(expected.NOT_RUN)


def test_the_record_says_where_and_when(record):
    assert all(record[name] for name in ("device", "driver", "torch", "cuda"))
    datetime.date.fromisoformat(record["date"])


def missing(outcomes, tests) -> dict[str, str | None]:
    return {test: outcomes.get(test) for test in tests if not expected.passed(outcomes, [test])}


# -- what gets into a record -------------------------------------------------------------------------------------


@pytest.fixture
def all_passed():
    tests = [test for name, functions in ARTIFACTS.items() for test in expected.tests_of(name, functions)]
    return dict.fromkeys([*tests, *expected.tests_without_artifact()], "passed")


def test_tests_are_named_as_pytest_names_them(all_passed):
    for test in (
        "test_programs.py::test_program_computes_what_the_circuit_means[few_bf16-draft_masked_5-4]",
        "test_programs.py::test_long_contexts[gated_bf16-131071]",
        "test_runner.py::test_inside_the_callers_own_graph[more_bf16-chain]",
        "test_runner.py::test_golden_cases[fixture_mimo_mtp-d]",
        "test_sanitizer.py::test_sanitizer_finds_nothing[odd_bf16-racecheck]",
        "test_sanitizer.py::test_sanitizer_finds_nothing[narrow_bf16-memcheck]",
        "test_lifecycle.py::test_random_interleavings[exact]",
        "test_families.py::test_random_interleavings[direct_fixture_eagle3_llama]",
        "test_direct.py::test_a_wrong_weight_is_seen[direct_fixture_eagle3_llama-first_masked_3]",
        "test_measure.py::test_times_leave_the_launch_out",
    ):
        assert test in all_passed
    assert set(expected.MAY_SKIP) <= set(all_passed)
    assert not [test for test in all_passed if test.startswith("test_sanitizer.py") and "few" in test]


def test_what_passed_is_recorded(all_passed):
    assert expected.recorded(all_passed, ARTIFACTS) == list(ARTIFACTS)
    assert expected.recorded(all_passed | dict.fromkeys(expected.MAY_SKIP, "skipped"), ARTIFACTS) == list(ARTIFACTS)


@pytest.mark.parametrize(
    ("test", "artifact"),
    [
        ("test_lifecycle.py::test_random_interleavings[seed]", "lifecycle_f32"),
        ("test_lifecycle.py::test_the_device_form_never_waits", "lifecycle_f32"),
        ("test_families.py::test_golden_drafts[direct_fixture_medusa1]", "direct_fixture_medusa1"),
        ("test_programs.py::test_long_contexts[odd_f32-32768]", "odd_f32"),
        ("test_sanitizer.py::test_sanitizer_finds_nothing[narrow_bf16-racecheck]", "narrow_bf16"),
        ("test_programs.py::test_program_computes_what_the_circuit_means[more_bf16-context_200-0]", "more_bf16"),
        ("test_runner.py::test_golden_cases[fixture_mimo_mtp-a]", "fixture_mimo_mtp"),
    ],
)
@pytest.mark.parametrize("outcome", ["failed", "skipped", None])
def test_what_failed_or_did_not_run_is_not_recorded(all_passed, test, artifact, outcome):
    assert all_passed.pop(test) == "passed"
    if outcome:
        all_passed[test] = outcome
    assert set(ARTIFACTS) - set(expected.recorded(all_passed, ARTIFACTS)) == {artifact}
