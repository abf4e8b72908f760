"""Paged attention without a GPU: which numbers of query heads it takes, and how they lie in an `mma`."""

from __future__ import annotations

import re
from dataclasses import replace
from types import SimpleNamespace

import pytest

from circuitgraph.kernels.cuda.architectures import ARCHITECTURES
from circuitgraph.kernels.cuda.paged import groups_of
from circuitgraph.kernels.cuda.shared import fresh_rows
from circuitgraph.kernels.cuda.templates import AttendPaged
from circuitgraph.language import Bindings, load_program, resolve
from circuitgraph.plan.fuse import OWN_ROW
from tests.cuda.test_emit import ALIGNED, kernels_of, plan_of, source_of

ATTENDS = ("attend", OWN_ROW)


def attending(heads: int, kv_heads: int, dim: int = 128, rows: int = 2, arch: str = "sm_90a", kind: str = "bf16", **switches):
    sizes = {**ALIGNED, "num_attention_heads": heads, "num_key_value_heads": kv_heads, "head_dim": dim, "rotary_dim": dim}
    circuit = resolve(load_program("mtp_dense"), Bindings(sizes, switches, act=kind, wt=kind, kv=kind))
    return plan_of(circuit, rows, arch=arch)


def chosen(plan) -> str:
    return next(choice.kernel for group, choice in zip(plan.groups, plan.choices, strict=True) if group.pattern in ATTENDS)


@pytest.mark.parametrize(
    ("each", "cut"),
    [
        (1, (1, 1)),
        (8, (1, 8)),
        (9, (1, 9)),
        (12, (1, 12)),
        (16, (1, 16)),
        (20, (2, 10)),
        (32, (2, 16)),
        (48, (3, 16)),
        (17, None),
    ],
)
def test_groups(each, cut):
    assert groups_of(3 * each, 3) == cut
    assert groups_of(3 * each + 1, 3) is None


@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize(("each", "dim"), [(3, 128), (12, 128), (16, 64), (16, 128), (12, 256), (16, 256), (32, 128)])
def test_whatever_shares_a_kv_head_is_served(each, dim, arch):
    """On GPUs with little shared memory, too: with fewer warps."""
    for rows in (1, 8):
        assert chosen(attending(2 * each, 2, dim, rows, arch)) == "cuda.attention_paged"


def parts_of(plan) -> int:
    (group,) = [group for group in plan.groups if group.pattern in ATTENDS]
    (choice,) = [choice for owner, choice in zip(plan.groups, plan.choices, strict=True) if owner is group]
    return AttendPaged.parts(plan, group, AttendPaged.Params(**dict(choice.params)))


@pytest.mark.parametrize(
    ("rows", "kv_heads", "parts"), [(1, 8, 16), (2, 8, 6), (4, 8, 3), (8, 8, 2), (16, 8, 1), (8, 2, 6), (4, 2, 8), (1, 2, 32)]
)
def test_clusters_of_parts_run_at_once(rows, kv_heads, parts):
    """One row of eight KV heads has no clusters."""
    assert parts_of(attending(4 * kv_heads, kv_heads, rows=rows)) == parts


@pytest.mark.parametrize(("arch", "early"), [("sm_90a", True), ("sm_80", False)])
def test_cache_rows_that_the_program_does_not_write_are_asked_for_before_the_wait(arch, early):
    (kernel,) = [text for text in kernels_of(source_of(attending(8, 2, arch=arch), arch)) if "largest" in text]
    before, *after = kernel.split("griddepcontrol_wait();")
    assert ("cp_async" in before and bool(after)) == early


def test_a_cluster_waits_for_shared_memory_alone_and_then_for_all_gates_at_once():
    """A release of all memory waits for what is on its way to L2; and no load passes a store."""
    plan = attending(8, 2, attention_gate=True)
    assert parts_of(plan) > 1
    (kernel,) = [text for text in kernels_of(source_of(plan)) if "largest" in text]
    assert "cluster_arrive_release" not in kernel
    *_, end = kernel.split("barrier_cluster_wait")[:-1]
    assert kernel.count("circuitgraph_release_shared();") == kernel.count("cluster_arrive_relaxed") == 2
    first, *stores = end.split("st_vec_global_v2")
    assert (first.count("gate_ptr["), len(stores), end.count("gate_ptr[")) == (4, 1, 4)


def test_without_an_append_before_it_all_of_the_cache_waits():
    """Nobody says then what the kernels before may be writing."""
    plan = attending(8, 2)
    (group,) = [group for group in plan.groups if group.pattern == "attend"]
    appended = SimpleNamespace(plan=plan, settled=True)
    assert fresh_rows(appended, group.anchors[0]) == 2
    assert fresh_rows(SimpleNamespace(plan=plan, settled=False), group.anchors[0]) is None
    alone = SimpleNamespace(plan=replace(plan, circuit=replace(plan.circuit, nodes=group.nodes)), settled=True)
    assert fresh_rows(alone, group.anchors[0]) is None


def test_what_cannot_be_cut_evenly_is_left_to_the_plain_kernel():
    plan = attending(17, 1)
    assert chosen(plan) == "cuda.attention_plain"
    assert any("17 query heads over 1" in reason for choice in plan.choices for _, reason in choice.refusals)


def left_operands(plan) -> set[tuple[bool, ...]]:
    """Of every `mma` of the attention kernel: which of the four pieces of its left side are more than zeros. Pieces are rows 0 to
    7 and 8 to 15 of the first eight columns, then of the others."""
    (kernel,) = [text for text in kernels_of(source_of(plan)) if "largest" in text]
    calls = re.findall(r"mma_sync\w*\((.*?)\);", kernel)
    assert len(calls) > 8, kernel[:2000]
    return {tuple("[" in piece for piece in call.split(", ")[4:8]) for call in calls}


@pytest.mark.parametrize(
    ("each", "used"),
    [(8, (True, False, True, False)), (9, (True,) * 4), (12, (True,) * 4), (20, (True,) * 4)],
)
def test_the_lower_rows_of_an_mma_are_used_from_nine_heads_on(each, used):
    assert left_operands(attending(2 * each, 2)) == {used}
