"""Attention that norms, rotates and appends its row itself: when it does, and what its kernel has."""

import re
from dataclasses import replace

import pytest

from circuitgraph.kernels.cuda.architectures import ARCHITECTURES
from circuitgraph.kernels.cuda.own_row import append_of, heads_of, refuse_own_row
from circuitgraph.plan.fuse import OWN_ROW, fuse
from circuitgraph.plan.place import place
from circuitgraph.plan.schedule import load_schedule, schedule
from tests.cuda.test_emit import kernels_of, source_of
from tests.cuda.test_paged import attending, parts_of
from tests.plan.test_fuse import GATED
from tests.plan.test_fuse import attending as without_norms

NORMED = {"qk_norm": True}


def patterns(plan) -> list[str]:
    return [group.pattern for group in plan.groups if group.pattern in (OWN_ROW, "cache_rows", "attend")]


def own(plan):
    return next(group for group in plan.groups if group.pattern == OWN_ROW)


def reasons(plan) -> list[str]:
    (choice,) = [choice for group, choice in zip(plan.groups, plan.choices, strict=True) if group.pattern == "attend"]
    return [reason for rule, reason in choice.refusals if "makes its row" in rule]


@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize(("rows", "dim", "kind"), [(1, 128, "bf16"), (1, 64, "bf16"), (4, 64, "f16"), (16, 128, "bf16")])
def test_heads_with_a_norm_are_made_by_attention(rows, dim, kind, arch):
    plan = attending(8, 2, dim, rows, arch, kind, **NORMED)
    assert patterns(plan) == [OWN_ROW]
    merged = next(node.name for node in own(plan).epilogue if node.op == "merge")
    assert plan.crossing(own(plan)) == (merged,)  # nothing but the result is stored


@pytest.mark.parametrize(
    ("rows", "more", "said"),
    [
        (17, {}, "for 1-16 rows"),
        (2, {"dim": 256}, "makes heads of 128 columns at most"),
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
    queries = heads_of(plan, own(plan).prologue, own(plan).anchors[0].inputs[0])
    assert (queries.start, queries.pitch) == (0, 256)
    plan = attending(8, 2, rows=4, **NORMED, attention_gate=True)  # with a cluster, whose threads finish four columns each
    (kernel,) = [text for text in kernels_of(source_of(plan)) if "largest" in text]
    *_, end = kernel.split("barrier_cluster_wait")[:-1]
    before, *stores = end.split("st_vec_global_v2")
    loads = re.findall(r"ld_global_b16\([^;]*attn_linear_ptr\w*\[", before)
    assert (len(loads), len(stores)) == (4, 1)  # all gates are on their way before the first store


def changed(plan, old, new, group=None):
    """The plan with another node, and its group."""
    circuit = replace(plan.circuit, nodes=tuple(new if node is old else node for node in plan.circuit.nodes))
    group = group or own(plan)
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
        ("rope", {"style": "interleaved"}, "rotates queries and keys alike"),
    ],
)
@pytest.mark.parametrize("index", [0, -1])
def test_heads_of_another_form_are_refused(op, attr, said, index):
    """Be it those of queries or of keys."""
    plan = attending(8, 2, rows=2, **NORMED)
    assert refuse_own_row(plan, own(plan)) is None
    node = node_of(plan, op, index)
    assert said in str(refuse_own_row(*changed(plan, node, replace(node, attrs=tuple((dict(node.attrs) | attr).items())))))


def test_other_positions_of_keys_are_refused():
    plan = attending(8, 2, rows=2, **NORMED)
    keys = heads_of(plan, own(plan).prologue, append_of(own(plan)).inputs[1]).rope
    other = replace(keys, inputs=(keys.inputs[0], "token", *keys.inputs[2:]))
    assert refuse_own_row(*changed(plan, keys, other)) == "rotates queries and keys alike"


def test_positions_that_others_make_are_refused():
    """They may not be there before the wait."""
    plan = attending(8, 2, rows=2, **NORMED)
    group = own(plan)
    for index in (0, -1):
        rope = [node for node in group.prologue if node.op == "rope"][index]
        plan, group = changed(plan, rope, replace(rope, inputs=(rope.inputs[0], "token", *rope.inputs[2:])), group)
    assert refuse_own_row(plan, group) == "rotates by positions that are given"


def test_a_gate_of_more_than_elements_is_refused():
    plan = attending(8, 2, rows=2, **NORMED, attention_gate=True)
    gate = next(node for node in own(plan).prologue if node.op == "sigmoid")
    norm = replace(node_of(plan, "rms_norm"), outputs=gate.outputs)
    assert refuse_own_row(*changed(plan, gate, norm)) == "makes gates element by element"


def test_one_row_of_many_query_heads_keeps_its_sixteen_parts():
    """Which a cluster has no room for; and without a row of its own it needs no room for one."""
    for switches in (NORMED, {}):
        plan = attending(64, 8, rows=1, **switches)
        assert parts_of(plan) == 16


def test_rows_of_one_sequence_are_refused():
    """They see each other's keys, which lie in the cache only when another block has made them."""
    plan = attending(8, 2, rows=2, **NORMED)
    entries = tuple(replace(entry, rows="context") if entry.name == plan.entry else entry for entry in plan.circuit.entries)
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
    plan = attending(8, 2, rows=2, **NORMED)
    rules = tuple(rule for rule in load_schedule("cuda") if rule.patterns != (OWN_ROW,))
    fused = fuse(plan.circuit, plan.entry, plan.rows, plan.target)
    without = place(schedule(fused, rules))
    assert (patterns(plan), patterns(without)) == ([OWN_ROW], ["cache_rows", "attend"])
    assert len(kernels_of(source_of(without))) == len(kernels_of(source_of(plan))) + 1


def test_a_factor_behind_the_merge_is_applied_to_rows():
    """It has no heads: its columns are those of all heads."""
    _, plan = without_norms(4, a=GATED)
    (kernel,) = [text for text in kernels_of(source_of(place(plan))) if "largest" in text]
    *_, end = kernel.split("barrier_cluster_wait")[:-1]
    factors = re.findall(r"ld_global_b16\([^;]*\(sigmoid_ptr\[\((.*) \+ \d+\)\]", end)
    stored = re.findall(r"st_global_b16\(\(&\(a_out_ptr\[(.*)\]\)\),", end)
    assert len(factors) == 4
    assert factors == stored  # each at its own place
