"""Attention that norms, rotates and appends its row itself: when it does, and what its kernel has."""

import re
from dataclasses import replace

import pytest

from circuitgraph.circuit.ir import Entry
from circuitgraph.kernels.cuda.architectures import ARCHITECTURES
from circuitgraph.kernels.cuda.own_row import append_of, heads_of, refuse_own_row
from circuitgraph.plan.fuse import OWN_ROW
from tests.cuda.test_emit import kernels_of, source_of
from tests.cuda.test_paged import attending

NORMED = {"qk_norm": True}


def patterns(plan) -> list[str]:
    return [group.pattern for group in plan.groups if group.pattern in (OWN_ROW, "cache_rows", "attend")]


def own(plan):
    return next(group for group in plan.groups if group.pattern == OWN_ROW)


def reasons(plan) -> list[str]:
    (choice,) = [choice for group, choice in zip(plan.groups, plan.choices, strict=True) if group.pattern == "attend"]
    return [reason for rule, reason in choice.refusals if "makes its row" in rule]


@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize(("rows", "dim", "kind"), [(1, 128, "bf16"), (1, 256, "f16"), (4, 64, "f16"), (16, 128, "bf16")])
def test_heads_with_a_norm_are_made_by_attention(rows, dim, kind, arch):
    plan = attending(8, 2, dim, rows, arch, kind, **NORMED)
    assert patterns(plan) == [OWN_ROW]
    assert plan.crossing(own(plan)) == plan.crossing(own(plan))[-1:]  # nothing but the result is stored


@pytest.mark.parametrize(
    ("rows", "more", "said"),
    [
        (17, {}, "for 1-16 rows"),
        (2, {"dim": 256}, "for 1-1 rows"),
        (2, {"kind": "f32"}, "needs queries and cache in bf16 or f16"),
        (2, {"rope_style": "interleaved"}, "in style interleaved"),
        (2, {"dim": 96}, "head size 96"),
    ],
    ids=str,
)
def test_what_it_cannot_make_is_left_to_a_launch_of_its_own(rows, more, said):
    plan = attending(8, 2, rows=rows, **NORMED, **more)
    assert patterns(plan) == ["cache_rows", "attend"]
    assert any(said in reason for reason in reasons(plan)), reasons(plan)


def test_a_gate_is_made_where_it_is_needed():
    plan = attending(8, 2, rows=1, **NORMED, attention_gate=True)
    assert patterns(plan) == [OWN_ROW]
    made = {node.op for node in own(plan).prologue}
    assert made >= {"part", "sigmoid", "rms_norm", "rope", "append"}
    queries = heads_of(plan, own(plan), own(plan).anchors[0].inputs[0])
    assert (queries.start, queries.pitch) == (0, 256)
    assert "sigmoid" not in source_of(plan)  # it is arithmetic of the kernel, and no call


def changed(plan, old, new):
    """The plan with another node, and its group."""
    circuit = replace(plan.circuit, nodes=tuple(new if node is old else node for node in plan.circuit.nodes))
    group = own(plan)
    parts = {
        part: tuple(new if node is old else node for node in getattr(group, part))
        for part in ("nodes", "prologue", "anchors", "epilogue")
    }
    return replace(plan, circuit=circuit), replace(group, **parts)


def node_of(plan, op, index=0):
    return [node for node in own(plan).prologue if node.op == op][index]


@pytest.mark.parametrize(
    ("op", "attr", "said"),
    [
        ("append", {"layer": 1}, "appends once, to the layer that it reads"),
        ("rms_norm", {"eps": 0.5}, "norms queries and keys alike"),
        ("rms_norm", {"flavour": "zero_centred"}, "norms queries and keys alike"),
        ("rope", {"style": "interleaved"}, "in style interleaved"),
    ],
)
def test_heads_of_another_form_are_refused(op, attr, said):
    plan = attending(8, 2, rows=2, **NORMED)
    assert refuse_own_row(plan, own(plan)) is None
    node = node_of(plan, op)
    assert said in str(refuse_own_row(*changed(plan, node, replace(node, attrs=tuple((dict(node.attrs) | attr).items())))))


def test_other_positions_of_keys_are_refused():
    plan = attending(8, 2, rows=2, **NORMED)
    keys = heads_of(plan, own(plan), append_of(own(plan)).inputs[1]).rope
    other = replace(keys, inputs=(keys.inputs[0], "token", *keys.inputs[2:]))
    assert refuse_own_row(*changed(plan, keys, other)) == "rotates queries and keys alike"


def test_rows_of_one_sequence_are_refused():
    """They see each other's keys, which lie in the cache only when another block has made them."""
    plan = attending(8, 2, rows=2, **NORMED)
    entries = tuple(replace(entry, rows="context") if entry.name == plan.entry else entry for entry in plan.circuit.entries)
    assert isinstance(entries[0], Entry)
    several = replace(plan, circuit=replace(plan.circuit, entries=entries))
    assert refuse_own_row(several, own(plan)) == "for entries of one row a sequence"


def test_its_kernel_appends_behind_the_wait_and_copies_older_rows_before_it():
    plan = attending(8, 2, rows=2, **NORMED)
    (kernel,) = [text for text in kernels_of(source_of(plan)) if "largest" in text]
    before, after = kernel.split("griddepcontrol_wait();")
    assert "cp_async" in before
    assert "max((stored_ptr[0] - 1), 0)" in before
    stores = re.findall(r"st_global_b32\(\(\(void\*\)", after)
    assert len(stores) == 2  # words of a lane, of keys and values alike
    assert not re.search(r"st_\w*global", before)


def test_a_launch_is_saved():
    counts = [len(kernels_of(source_of(attending(8, 2, rows=rows, **NORMED)))) for rows in (16, 17)]
    assert patterns(attending(8, 2, rows=16, **NORMED)) == [OWN_ROW]
    assert counts[0] < counts[1]
