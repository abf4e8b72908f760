"""Every method, rule, pitfall and goal of the proposer has a test that says so; see `index`."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path

import pytest

from circuitgraph.runtime import DraftProposer
from tests.runtime.index import MEASURED, METHODS, RULES, shown, wanted

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def tests_of():
    found = defaultdict(list)
    for what, node in shown():
        found[what].append(node)
    return found


@pytest.mark.parametrize("what", sorted(wanted()))
def test_something_shows(what, tests_of):
    assert tests_of[what], f"no test is marked shows({what!r})"


def test_marks_name_what_there_is(tests_of):
    assert set(tests_of) <= wanted()


def test_the_index_is_whole():
    assert set(METHODS) == DraftProposer.__abstractmethods__
    assert list(RULES) == list(range(1, 13))


@pytest.mark.parametrize("file", MEASURED)
def test_what_is_measured_elsewhere_is_there(file):
    text = (ROOT / file).read_text(encoding="utf-8")
    assert [item for item in MEASURED[file] if item not in text] == []
