"""The bench of programs for the CPU: an entry and width a row, whichever way the program drafts."""

from __future__ import annotations

import pytest

import circuitgraph
from tests.measure.small import DFLASH_SMALL, artifact_of


def test_a_shape(tiny):
    report = circuitgraph.bench(tiny, random=True, peers=False, seconds=0.01, context=8, entries=["draft"])
    assert [row.rows for row in report.rows] == [1, 2]


def test_masked_drafts(tmp_path):
    masked = artifact_of("tiny", tmp_path, widths=(2,), entries=("draft", "draft_masked"))
    report = circuitgraph.bench(masked, random=True, peers=False, seconds=0.01, context=8, entries=["draft_masked"])
    assert [(row.entry, row.rows) for row in report.rows] == [("draft_masked", 1), ("draft_masked", 2)]


def test_first_and_later_steps(eagle):
    report = circuitgraph.bench(eagle, random=True, peers=False, seconds=0.01, context=8)
    assert [(row.entry, row.rows) for row in report.rows] == [(entry, n) for entry in ("draft", "first") for n in (1, 2)]


@pytest.mark.parametrize(
    ("shape", "options", "want"),
    [
        (
            "dflash-qwen3-8b",
            {"config": DFLASH_SMALL, "context_rows": (16,), "widths": (1,), "entries": ("draft", "context")},
            [("context", 16), ("draft", 16)],
        ),
        (
            "medusa1-7b",
            {"config": {"hidden_size": 128, "num_attention_heads": 4, "vocab_size": 96}, "widths": (1, 3)},
            [("draft", 1), ("draft", 3)],
        ),
    ],
)
def test_what_drafts_at_once(tmp_path, shape, options, want):
    report = circuitgraph.bench(artifact_of(shape, tmp_path, **options), random=True, peers=False, seconds=0.01, context=8)
    assert [(row.entry, row.rows) for row in report.rows] == want
