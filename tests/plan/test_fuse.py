"""Grouping: what is fused with what, and that any program ends in runnable groups."""

from __future__ import annotations

from dataclasses import replace

import pytest

from circuitgraph.circuit.check import check
from circuitgraph.circuit.ir import Storage
from circuitgraph.circuit.narrow import slice_entry, specialize
from circuitgraph.circuit.restrict import restrict_vocabulary
from circuitgraph.errors import CircuitError
from circuitgraph.language import Bindings, load_program, parse_circuit, resolve
from circuitgraph.plan.fuse import fuse, verify_groups
from circuitgraph.plan.schedule import load_schedule, schedule
from tests.circuits import EVERYTHING, SMALL, post_norm, small_mtp


def grouped(circuit, entry="draft", rows=4):
    return fuse(specialize(slice_entry(circuit, entry), rows), entry, rows, "cpu")


def ops_of(plan):
    return [(group.pattern, [node.op for node in group.nodes]) for group in plan.groups]


def test_draft_step_is_eight_groups():
    assert [pattern for pattern, _ in ops_of(grouped(small_mtp()))] == [
        "project", "project", "cache_rows", "attend", "project", "gated", "project", "head",
    ]  # fmt: skip


def test_logits_are_not_made_when_only_the_token_is_asked_for():
    plan = grouped(small_mtp())
    head = plan.groups[-1]
    assert [node.op for node in head.nodes] == ["rms_norm", "linear", "top1"]
    assert plan.crossing(head) == ("y", "draft", "logprob")


@pytest.mark.parametrize(("target", "last"), [("cuda:sm_90a", ["linear", "top1", "target_ids"]), ("cpu", ["target_ids"])])
def test_the_targets_id_of_the_best_is_found_with_it_on_gpus(target, last):
    circuit, _ = restrict_vocabulary(small_mtp(), (1, 4, 6))
    plan = fuse(specialize(slice_entry(circuit, "draft"), 4), "draft", 4, target)
    assert [node.op for node in plan.groups[-1].nodes if node.op != "rms_norm"] == last


def test_logits_are_made_when_asked_for():
    plan = grouped(small_mtp(), "logits")
    assert plan.groups[-1].pattern == "project"
    assert "scores" in plan.crossing(plan.groups[-1])


def test_context_entry_of_one_layer_needs_neither_queries_nor_ffn_nor_head():
    circuit = specialize(slice_entry(small_mtp(), "context"), 16)
    names = {weight.name for weight in circuit.weights}
    assert names == {"embed_tokens", "enorm", "hnorm", "fc", "layer.input_norm", "layer.attn.k_proj", "layer.attn.v_proj"}


def test_gate_and_up_share_one_pass_whatever_their_order():
    text = """
program: swapped
inputs: {x: "f32[n, 32]"}
weights: {a: "bf16[16, 32]", b: "bf16[16, 32]"}
body:
  - u = linear(x, a)
  - y = mul(silu(linear(x, b)), u)
outputs: {y: y}
entries: {run: {outputs: [y]}}
"""
    assert ops_of(grouped(parse_circuit(text), "run")) == [("gated", ["linear", "linear", "silu", "mul"])]


def test_a_residual_that_depends_on_the_group_stays_outside():
    # The other side of the add comes from a second reader of the first product: fusing both would be a loop.
    text = """
program: loop
inputs: {x: "f32[n, 32]"}
weights: {a: "bf16[32, 32]", b: "bf16[32, 32]"}
body:
  - p = linear(x, a)
  - q = linear(p, b)
  - y = add(p, q)
outputs: {y: y}
entries: {run: {outputs: [y]}}
"""
    plan = grouped(parse_circuit(text), "run")
    assert [pattern for pattern, _ in ops_of(plan)] == ["project", "project"]
    assert [node.op for node in plan.groups[1].nodes] == ["linear", "add"]


@pytest.mark.parametrize("target", ["cpu", "cuda:sm_90a"])
def test_a_residual_of_what_the_group_norms_leaves_the_norm_outside(target):
    # Kernels that fold a norm into the product never have its rows; an epilogue that adds them reads them from memory.
    circuit = specialize(slice_entry(post_norm("bf16", 512), "run"), 4)
    plan = fuse(circuit, "run", 4, target)
    assert ops_of(plan) == [("rows", ["rms_norm"]), ("project", ["linear", "silu", "add"])]


def test_nodes_of_no_pattern_are_grouped_by_row():
    text = """
program: rest
inputs: {x: "f32[n, 32]"}
body:
  - y = add(silu(x), sigmoid(x))
outputs: {y: y}
entries: {run: {outputs: [y]}}
"""
    assert ops_of(grouped(parse_circuit(text), "run")) == [("rows", ["silu", "sigmoid", "add"])]


@pytest.mark.parametrize("factor_first", [False, True])
def test_a_gate_of_one_number_a_row_follows_what_it_scales(factor_first):
    """Whichever product comes first; not in the group that makes the factor, whose sums are one column wide."""

    def scaling(source):
        products = ["t = linear(x, a)", f"f = sigmoid(linear({source}, b))"]
        text = """
program: gate
inputs: {{x: "f32[n, 32]", w: "f32[n, 32]", r: "f32[n, 24]"}}
weights: {{a: "bf16[24, 32]", b: "bf16[1, 32]"}}
body:
  - {}
  - {}
  - y = add(r, scale_rows(t, f))
outputs: {{y: y}}
entries: {{run: {{outputs: [y]}}}}
"""
        return ops_of(grouped(parse_circuit(text.format(*(products[::-1] if factor_first else products))), "run"))

    assert scaling("w")[-1] == ("project", ["linear", "scale_rows", "add"])
    assert scaling("x")[-1] == ("rows", ["scale_rows", "add"])


def test_experts_and_latent_attention_are_groups_of_their_own():
    def patterns(program, **switches):
        circuit = resolve(load_program(program), Bindings(SMALL, switches))
        return [(group.pattern, {node.op for node in group.epilogue}) for group in grouped(circuit).groups]

    assert patterns("mtp_moe", shared_gate=True)[5:10] == [
        ("gated", {"silu", "mul"}), ("route", set()), ("experts", set()), ("project", {"sigmoid"}),
        ("project", {"scale_rows", "add"}),
    ]  # fmt: skip
    assert [name for name, _ in patterns("mtp_mla")][3:8] == [
        "cache_rows", "head_project", "attend_latent", "head_project", "project",
    ]  # fmt: skip


def test_a_ffn_of_experts_is_one_group_on_gpus():
    """From the norm to the residual, with the shared expert and its gate; experts alone are no such FFN."""
    for program, switches in (("mtp_moe", {"shared_gate": True}), ("mtp_moe", {"correction_bias": True}), ("mtp_mla", {})):
        circuit = resolve(load_program(program), Bindings(SMALL, switches))
        plan = fuse(slice_entry(circuit, "draft"), "draft", 2, "cuda:sm_90a")
        (mixture,) = [group for group in plan.groups if group.pattern == "mixture"]
        assert not {"route", "experts", "gated"} & {group.pattern for group in plan.groups}
        assert [node.op for node in mixture.prologue] == ["rms_norm"]
        assert [node.op for node in mixture.epilogue] == ["add", "add"]
        anchors = [node.op for node in mixture.anchors]
        assert {"route", "experts", "silu", "mul"} <= set(anchors)
        assert anchors.count("linear") == 3 + ("shared_gate" in switches)
        assert ("scale_rows" in anchors) == ("shared_gate" in switches)
    alone = """
program: alone
inputs: {x: "f32[n, 32]", ids: "i32[n, 2]", share: "f32[n, 2]"}
weights: {gate: "f32[4, 16, 32]", up: "f32[4, 16, 32]", down: "f32[4, 32, 16]"}
body:
  - y = experts(x, ids, share, down, gate, up)
outputs: {y: y}
entries: {run: {outputs: [y]}}
"""
    assert [g.pattern for g in fuse(slice_entry(parse_circuit(alone), "run"), "run", 2, "cuda").groups] == ["experts"]


@pytest.mark.parametrize("switches", [{}, EVERYTHING, {"attention_gate": True}, {"recycle": "pre_norm", "qk_norm": True}])
@pytest.mark.parametrize("entry", ["draft", "context", "logits"])
def test_every_node_has_one_group_and_fusion_keeps_the_circuit(switches, entry):
    circuit = small_mtp(switches)
    check(circuit)
    plan = grouped(circuit, entry)
    assert sorted(node.name for group in plan.groups for node in group.nodes) == sorted(n.name for n in plan.circuit.nodes)


def test_verifier_refuses_a_lost_node_and_a_wrong_order():
    plan = grouped(small_mtp())
    with pytest.raises(CircuitError, match="nodes without exactly one group"):
        verify_groups(replace(plan, groups=plan.groups[:-1]))
    with pytest.raises(CircuitError, match="before it is made"):
        verify_groups(replace(plan, groups=plan.groups[::-1]))


QKV = ("q_proj", "k_proj", "v_proj")


ATTENDED = "merge(attention(q, kv, scale=0.1))"
GATED = f"mul({ATTENDED}, sigmoid(linear(x, g_proj)))"


def attending(rows=4, storage=None, **program):
    """Plans of attention whose queries and keys have no norm, as fused and as scheduled."""
    text = """
program: attending
inputs: {{x: "bf16[n, 2048]", position: "i32[n]"}}
state: {{kv: {{kind: paged_kv, layers: 1, heads: 2, dim: {dim}, dtype: {kv}}}}}
tables: {{rope: {{kind: rope, dim: {turned}}}}}
weights: {{q_proj: {q}, k_proj: {k}, v_proj: {k}, b: "bf16[{many}]", g_proj: {q}}}
body:
  - p = {p}
  - q = rope(heads(linear(x, q_proj), count=4), p, rope.cos, rope.sin, style={style})
  - k = rope(heads(linear(x, k_proj{bias}), count=2), p, rope.cos, rope.sin, style={style})
  - kv = append(kv, k, heads(linear(x, v_proj), count=2))
  - a = {a}
outputs: {{a: a}}
entries: {{run: {{outputs: [a], effects: [kv]}}}}
"""
    facts = {"dim": 64, "turned": 64, "style": "half", "p": "position", "kv": "bf16", "bias": "", "a": ATTENDED} | program
    sizes = {name: f'"bf16[{count * facts["dim"]}, 2048]"' for name, count in (("q", 4), ("k", 2))}
    sizes["many"] = str(2 * facts["dim"])
    circuit = parse_circuit(text.format(**facts, **sizes))
    if storage:
        circuit = circuit.with_storage(dict.fromkeys(QKV, Storage.parse(storage)))
    fused = fuse(specialize(slice_entry(circuit, "run"), rows), "run", rows, "cuda:sm_90a")
    return fused, schedule(fused, load_schedule("cuda"))


@pytest.mark.parametrize("turned", [64, 32])
def test_queries_and_keys_are_rotated_and_appended_where_their_sums_arise(turned):
    _, plan = attending(turned=turned)
    assert [pattern for pattern, _ in ops_of(plan)] == ["qkv", "attend"]
    assert plan.choices[0].kernel == "cuda.qkv_stream"
    assert plan.crossing(plan.groups[0]) == ("q",)


ROTATED_BY_ATTENTION = ["project", "attend_own_row"]


@pytest.mark.parametrize(
    ("program", "groups"),
    [
        ({"style": "interleaved"}, ["project", "cache_rows", "attend"]),
        ({"p": "shift(position, by=-1)"}, ["project", "cache_rows", "attend"]),
        ({"dim": 24, "turned": 24}, ["project", "cache_rows", "attend"]),
        ({"kv": "f32"}, ["project", "cache_rows", "attend"]),
        ({"bias": ", b"}, ROTATED_BY_ATTENTION),
        ({"rows": 9}, ROTATED_BY_ATTENTION),
        ({"storage": "fp8 per row"}, ROTATED_BY_ATTENTION),
    ],
    ids=str,
)
def test_what_no_kernel_ends_so_is_left_to_the_next_pattern_that_takes_it(program, groups):
    """Nothing refuses to compile: the nodes are grouped as if there were no pattern that no kernel is for."""
    fused, plan = attending(**program)
    assert "qkv" in {pattern for pattern, _ in ops_of(fused)}
    assert [pattern for pattern, _ in ops_of(plan)] == groups
    assert "streamed queries, keys and values" in {rule for rule, _ in plan.choices[0].refusals}  # `explain` says why
    assert not any("queries, keys" in rule for choice in plan.choices[1:] for rule, _ in choice.refusals)


@pytest.mark.parametrize("rows", [4, 9])
def test_a_product_beside_that_ends_otherwise_keeps_all_of_them_in_one_launch(rows):
    _, plan = attending(rows, a=GATED)
    assert [pattern for pattern, _ in ops_of(plan)] == ["project", "attend_own_row"]


SOME_ROWS = """
program: layer
inputs: {x: "bf16[n, 2048]", position: "i32[n]"}
state: {kv: {kind: paged_kv, layers: 1, heads: 8, dim: 128, dtype: bf16}}
tables: {rope: {kind: rope, dim: 128}}
weights:
  q_proj: "bf16[2048, 2048]"
  k_proj: "bf16[1024, 2048]"
  v_proj: "bf16[1024, 2048]"
  o_proj: "bf16[2048, 2048]"
  q_norm: "bf16[128]"
  k_norm: "bf16[128]"
  norm: "bf16[2048]"
  other: "bf16[2048]"
  up: "bf16[4096, 2048]"
body:
  - h = heads(linear(x, q_proj), count=16)
  - q = QUERIES
  - k = rope(rms_norm(heads(linear(x, k_proj), count=8), k_norm, eps=1e-6), position, rope.cos, rope.sin)
  - kv = append(kv, k, heads(linear(x, v_proj), count=8))
  - y = RESIDUAL
  - u = linear(rms_norm(y, norm, eps=1e-6), up)
MORE
outputs: {u: u, y: y}
entries: {run: {outputs: [u, y], effects: [kv]}}
"""
QUERIES = "rope(rms_norm(h, q_norm, eps=1e-6), position, rope.cos, rope.sin)"
RESIDUAL = "add(x, linear(merge(attention(q, kv, scale=0.1)), o_proj))"


def layer(rows, target="cuda:sm_90a", queries=QUERIES, residual=RESIDUAL, more=""):
    text = SOME_ROWS.replace("QUERIES", queries).replace("RESIDUAL", residual).replace("MORE", more)
    text = text.replace("[u, y]", "[u, y, z]").replace("y: y}", "y: y, z: z}") if more else text
    fused = fuse(specialize(slice_entry(parse_circuit(text), "run"), rows), "run", rows, target)
    return fused, schedule(fused, load_schedule("cuda"))


@pytest.mark.parametrize("rows", [17, 64, 128])
def test_what_follows_products_in_parts_is_in_the_launch_that_adds_them(rows):
    _, plan = layer(rows)
    assert [pattern for pattern, _ in ops_of(plan)] == ["qkv", "attend", "project_norm", "project"]
    products = plan.groups[2]
    assert [node.op for node in products.epilogue] == ["add", "rms_norm"]
    assert plan.crossing(products) == ("y", products.epilogue[-1].name)  # the sum is an output, too
    assert [node.op for node in plan.groups[0].epilogue].count("rms_norm") == 2


@pytest.mark.parametrize(
    ("rows", "target", "said"),
    [
        (16, "cuda:sm_90a", "for 4096 columns and more, got 2048 (project_norm)"),
        (64, "cuda:sm_80", "sm_80 has no wgmma (project_norm)"),
        (300, "cuda:sm_90a", "for 17-256 rows (project_norm)"),
    ],
)
def test_a_norm_is_what_comes_next_reads_where_nobody_adds_parts(rows, target, said):
    fused, plan = layer(rows, target)
    assert "project_norm" in {pattern for pattern, _ in ops_of(fused)}
    assert "project_norm" not in {pattern for pattern, _ in ops_of(plan)}
    assert [node.op for node in plan.groups[-1].prologue] == ["rms_norm"]
    assert any(said == reason for choice in plan.choices for _, reason in choice.refusals)


@pytest.mark.parametrize(
    "program",
    [
        {"residual": "linear(merge(attention(q, kv, scale=0.1)), o_proj)"},  # no sum
        {"more": "  - z = rms_norm(y, other, eps=1e-6)"},  # two norms of it
        {"residual": "add(x, linear(x, o_proj))", "more": "  - z = merge(attention(q, kv, scale=0.1))"},  # siblings read its x
    ],
    ids=["no sum", "two norms", "siblings"],
)
def test_other_ends_of_a_product_are_no_such_group(program):
    fused, _ = layer(64, **program)
    assert "project_norm" not in {pattern for pattern, _ in ops_of(fused)}


@pytest.mark.parametrize(
    ("queries", "more", "said"),
    [
        (QUERIES, "  - z = merge(h)", "stores what follows the products alone, got linear"),
        ("rms_norm(h, q_norm, eps=1e-6)", "", "stores rotated queries alone, got q"),
        ("rope(h, shift(position, by=-1), rope.cos, rope.sin)", "", "rotates at positions that are given"),
    ],
    ids=["read by others", "not rotated", "elsewhere"],
)
def test_queries_that_are_not_rotated_at_once_are_projected_alone(queries, more, said):
    fused, plan = layer(64, queries=queries, more=more)
    assert "qkv" in {pattern for pattern, _ in ops_of(fused)}
    assert "qkv" not in {pattern for pattern, _ in ops_of(plan)}
    assert f"{said} (qkv)" in {reason for choice in plan.choices for _, reason in choice.refusals}


@pytest.mark.parametrize("qk_norm", [False, True])
def test_norms_of_heads_may_lie_between(qk_norm):
    fused = fuse(specialize(slice_entry(small_mtp({"qk_norm": qk_norm}), "draft"), 4), "draft", 4, "cuda:sm_90a")
    (group,) = (group for group in fused.groups if group.pattern == "qkv")
    assert qk_norm is ("rms_norm" in {node.op for node in group.epilogue})
