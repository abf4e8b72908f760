"""Schedule files: what a rule may say is checked when the file is loaded, before anything is compiled."""

from __future__ import annotations

import itertools

import pytest

from circuitgraph.errors import ScheduleError
from circuitgraph.kernels import register_kernels
from circuitgraph.kernels.base import Kernel, kernel, kernels_of
from circuitgraph.plan.fuse import CACHE, PATTERNS, ROWS
from circuitgraph.plan.schedule import load_schedule

KINDS = ("cpu", "cuda")
ALL_PATTERNS = sorted({pattern.name for pattern in PATTERNS} | {ROWS, CACHE})
for kind in KINDS:
    register_kernels(kind)
NAMES = {kind: sorted(kernels_of(kind)) for kind in KINDS}


def written(folder, kind, kernel, patterns, rows='"1-"'):
    file = folder / f"{kind}.yaml"
    file.write_text(
        f"target: {kind}\nrules:\n  - name: mine\n    patterns: [{patterns}]\n    rows: {rows}\n    kernel: {kernel}\n",
    )
    return file


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("pattern", ALL_PATTERNS)
def test_a_kernel_serves_the_patterns_that_it_declares_and_no_other(tmp_path, kind, pattern):
    for name, template in kernels_of(kind).items():
        file = written(tmp_path, kind, name, pattern)
        if pattern in template.patterns:
            (rule,) = load_schedule(kind, file)
            assert rule.kernel is template
        else:
            with pytest.raises(ScheduleError, match=rf"{kind}.yaml:3: mine: kernel {name} is not for this .*; got {pattern}"):
                load_schedule(kind, file)


@pytest.mark.parametrize("kind", KINDS)
def test_kernels_declare_patterns_that_there_are(kind):
    declared = set(itertools.chain.from_iterable(template.patterns for template in kernels_of(kind).values()))
    assert declared <= set(ALL_PATTERNS)
    assert {"head", "gated", "project", "attend", ROWS, CACHE} <= declared, "a dense head needs these"


def test_a_kernel_has_to_declare_what_it_serves():
    class Silent(Kernel):
        """Of no pattern."""

        name = "cpu.silent"

    with pytest.raises(TypeError, match=r"Silent needs .* the patterns that it serves"):
        kernel(Silent)
    assert "cpu.silent" not in kernels_of("cpu")


@pytest.mark.parametrize(("kind", "other"), [("cpu", "cuda"), ("cuda", "cpu")])
def test_kernels_of_another_target_are_none(tmp_path, kind, other):
    """Whatever this process imported before: both kinds are registered here."""
    for name in NAMES[other]:
        (pattern, *_) = kernels_of(other)[name].patterns
        with pytest.raises(ScheduleError, match=rf"mine: no kernel '{name}' for target '{kind}'"):
            load_schedule(kind, written(tmp_path, kind, name, pattern))


@pytest.mark.parametrize("rows", ["8-1", "0-4", "0", "-3", "1-2-3", "x", "1-x", "''", "1.5", "²"])
def test_rows_that_are_none(tmp_path, rows):
    with pytest.raises(ScheduleError, match=r"cpu.yaml:3: mine: are no rows; expected 'first-last'"):
        load_schedule("cpu", written(tmp_path, "cpu", "cpu.rows", "rows", f"'{rows}'" if "'" not in rows else rows))


@pytest.mark.parametrize(("rows", "bounds"), [("1-8", (1, 8)), ("'9-'", (9, None)), ("'4'", (4, 4)), ("'3 - 3'", (3, 3))])
def test_rows(tmp_path, rows, bounds):
    (rule,) = load_schedule("cpu", written(tmp_path, "cpu", "cpu.rows", "rows", rows))
    assert (rule.first, rule.last) == bounds
