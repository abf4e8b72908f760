"""Quantised weights in CUDA plans: which kernels read them, and what is refused with which reason."""

from __future__ import annotations

import re

import pytest

from circuitgraph.circuit.ir import Storage
from circuitgraph.kernels.base import KERNELS, make_params
from circuitgraph.kernels.cuda.formats import Format
from circuitgraph.kernels.cuda.stream import Geometry, geometry
from circuitgraph.kernels.cuda.stream_templates import cut_of
from circuitgraph.language import Bindings, load_program, resolve
from circuitgraph.pipeline import Run, plan_piece
from circuitgraph.plan.schedule import load_schedule
from tests.cuda.test_emit import ALIGNED, source_of

RULES = load_schedule("cuda")
SIZES = {**ALIGNED, "num_attention_heads": 16, "hidden_size": 1024, "intermediate_size": 2048, "vocab_size": 2112}
EVERY = tuple(Storage.parse(text) for text in ("fp8 per tensor", "fp8 per row", "fp8 128x128", "int8 per row", "nvfp4", "mxfp4"))


def plan_of(storage, rows=2, act="bf16", arch="sm_90a", **sizes):
    """storage: a text for all products' weights, or one for each by name."""
    circuit = resolve(load_program("mtp_dense"), Bindings({**SIZES, **sizes}, {}, act, act, act))
    names = {node.inputs[1] for node in circuit.nodes if node.op == "linear"}
    texts = storage if isinstance(storage, dict) else dict.fromkeys(names, storage)
    circuit = circuit.with_storage({name: Storage.parse(text) for name, text in texts.items()})
    return plan_piece(Run(), circuit, "draft", rows, f"cuda:{arch}", RULES)


def choices(plan):
    """Weights of a group's products to the kernel, its refusals, and what it is called with."""
    return {
        tuple(anchor.inputs[1] for anchor in group.anchors): (choice, group)
        for group, choice in zip(plan.groups, plan.choices, strict=True)
        if group.anchors and group.anchors[0].op == "linear"
    }


def kernels(plan):
    return {weights: choice.kernel for weights, (choice, _) in choices(plan).items()}


@pytest.mark.parametrize("storage", EVERY, ids=str)
@pytest.mark.parametrize("arch", ["sm_90a", "sm_100"])
@pytest.mark.parametrize(("rows", "kind"), [(1, "stream"), (16, "stream"), (33, "tiles"), (64, "tiles")])
def test_every_storage_reaches_the_tensor_cores(storage, rows, kind, arch):
    kind = "warpgroups" if kind == "tiles" and arch == "sm_90a" else kind
    found, wanted = set(kernels(plan_of(str(storage), rows, arch=arch)).values()), {f"cuda.linear_{kind}", f"cuda.top1_{kind}"}
    assert wanted <= found <= wanted | ({"cuda.joined_warpgroups"} if kind == "warpgroups" else set())


@pytest.mark.parametrize("storage", EVERY, ids=str)
def test_no_more_than_the_stored_bytes_is_read(storage):
    plan = plan_of(str(storage))
    bits = {"nvfp4": 4.5, "mxfp4": 4.25}.get(storage.format, 8)
    for _, group in choices(plan).values():
        for anchor in group.anchors:
            columns, depth = plan.circuit.types[anchor.inputs[1]].shape
            bytes = plan.circuit.stored_bytes(anchor.inputs[1])
            assert columns * depth * bits / 8 <= bytes <= columns * depth * bits / 8 + 4 * columns
            assert plan.cost(group, 1).bytes < plan.cost(group, 1).flops  # two rows: of bf16 weights it would be the other way


def test_scales_and_bytes_are_arguments_and_words():
    source = source_of(plan_of({"lm_head": "nvfp4", "fc": "fp8 per row"}))
    for name, there in (("lm_head_scales", 1), ("lm_head_whole", 1), ("fc_scales", 1), ("fc_whole", 0), ("prmt", 1)):
        assert (name in source) == there, name


@pytest.mark.parametrize("storage", ["nvfp4", "mxfp4"])
def test_one_row_of_four_bits_has_its_scales_on_sums(storage):
    """Then numbers are not multiplied: x alone is, by its norm's weight and to keep away from subnormals."""

    def products(rows):
        return source_of(plan_of({"lm_head": storage}, rows, **LARGE)).count("mul_half_rn_bf16x2(")

    assert products(1) < 150 < 300 < products(2)


def test_teams_without_a_tile_are_spread_over_blocks():
    """384 tiles of q, k and v for 528 teams: three of every block have one, instead of all four of some. Those of a head, which
    has more, are neighbours."""
    names = [f"layer.attn.{name}_proj" for name in "qkv"]
    kernels = source_of(plan_of({**dict.fromkeys(names, "nvfp4"), "lm_head": "nvfp4"}, 1, **LARGE)).split("__global__")
    firsts = [re.search(r"tile_ptr\[0\] = (.*blockIdx.*>> 2.*|.*>> 2.*blockIdx.*);", kernel) for kernel in kernels]
    few, many = (first[1] for first in firsts if first)
    assert ("* 132)" in few, "* 132)" in many) == (True, False)


@pytest.mark.parametrize("rows", [1, 8])
def test_normed_rows_are_stored_before_the_tiles(rows):
    """By one thread an element: by one block a row, after its tiles, they held up the end of a step."""
    bodies = source_of(plan_of({"lm_head": "nvfp4"}, rows, **LARGE)).split("__global__")
    (head,) = [body for body in bodies if re.search(r"st_global\w+\(\(&\(next_hidden_out_ptr", body)]
    assert head.index("next_hidden_out_ptr[") < head.index("while (")


def test_siblings_of_other_storage_go_apart():
    """A kernel reads one format. A gate whose partner is another launch's waits for it."""
    names = {f"layer.attn.{name}_proj": text for name, text in (("q", "fp8 per row"), ("k", "fp8 per row"), ("v", "nvfp4"))}
    plan = plan_of({**names, "layer.ffn.gate_proj": "fp8 per row"})
    found = kernels(plan)
    q, k, v = names
    gate, up = "layer.ffn.gate_proj", "layer.ffn.up_proj"
    assert found[q, k] == found[v,] == found[gate,] == found[up,] == "cuda.linear_stream"
    order = [anchor.inputs[1] for group in plan.groups for anchor in group.anchors if anchor.op == "linear"]
    assert order.index(up) < order.index(gate)
    alike = plan_of({**dict.fromkeys(names, "nvfp4"), gate: "mxfp4", up: "mxfp4"})
    assert {(q, k, v), (gate, up)} <= kernels(alike).keys()


@pytest.mark.parametrize(
    ("storage", "more", "rows", "reason"),
    [
        ("int8 128x32", {}, 2, "scales of int8 128x32 change within a step of 64 columns"),
        ("int8 24x128", {}, 2, "scales of int8 24x128 change within a tile of"),
        ("mxfp4", {"act": "f16"}, 2, "f16 does not hold the scales of mxfp4"),
        ("mxfp4", {"act": "f16"}, 33, "f16 does not hold the scales of mxfp4"),
        ("nvfp4", {"intermediate_size": 96}, 2, "96 columns do not split into steps"),
        ("mxfp4", {"intermediate_size": 64}, 33, "64 columns are no whole number of words of scales"),
        ("int8 8x8", {}, 33, "scales of int8 8x8 change within 16 columns"),
    ],
)
def test_what_tensor_cores_refuse_runs_on_the_plain_kernel(storage, more, rows, reason):
    found = choices(plan_of({"layer.ffn.down_proj": storage}, rows, **more))
    choice, _ = found["layer.ffn.down_proj",]
    assert choice.kernel == "cuda.linear_plain"
    assert any(reason in said for _, said in choice.refusals), choice.refusals


def test_fp32_activations_read_bytes_on_the_plain_kernel():
    assert set(kernels(plan_of("fp8 128x128", act="f32")).values()) == {"cuda.linear_plain", "cuda.top1_plain"}


@pytest.mark.parametrize(
    ("storage", "rows", "columns", "expected"),
    [
        ("fp8 per row", 1, 4096, (64, 1, 4, 2, 8)),
        ("fp8 128x128", 8, 12288, (64, 1, 12, 1, 6)),
        ("nvfp4", 1, 4096, (128, 1, 2, 4, 8)),
        ("mxfp4", 16, 12288, (128, 3, 2, 4, 8)),
        ("nvfp4", 1, 1024, "do not split into steps of 2048"),
    ],
)
def test_geometry(storage, rows, columns, expected):
    format = Format("bf16", Storage.parse(storage))
    cut = geometry(rows, columns, warps=16, stages=8, k_parts=0, registers=64 if rows > 8 else 96, format=format)
    if isinstance(cut, Geometry):
        assert (cut.step, cut.k_parts, cut.steps, cut.groups, cut.stages) == expected
        assert cut.scale_words == {"nvfp4": 2, "mxfp4": 1}.get(storage, 0)
    else:
        assert expected in cut


def cut_of_weight(name, storage, rows, teams=4, **sizes):
    plan = plan_of(storage, rows, **sizes)
    choice, group = next(found for weights, found in choices(plan).items() if name in weights)
    return cut_of(plan, group, make_params(KERNELS[choice.kernel], {**dict(choice.params), "teams": teams}, "here"))


LARGE = {"hidden_size": 4096, "num_attention_heads": 32, "head_dim": 128, "intermediate_size": 12288, "vocab_size": 151936}


def test_short_groups_are_shared_together_where_there_is_room():
    """As many as half of the threads finish at once; and fewer warps where columns are few."""

    def cut(rows, **sizes):
        found = cut_of_weight("lm_head", "nvfp4", rows, teams=1, **sizes)
        return found.warps, found.steps, found.together

    assert cut(1, **LARGE) == (16, 2, 4)
    assert cut(8, **LARGE) == (16, 2, 2)
    assert cut(16, **LARGE) == (16, 2, 1)
    assert cut(8)[:2] == (8, 1)


@pytest.mark.parametrize(
    ("name", "storage", "rows", "expected"),
    [
        ("lm_head", "nvfp4", 1, (4, 4, 8)),
        ("lm_head", "mxfp4", 8, (4, 4, 8)),
        ("lm_head", "nvfp4", 16, (1, 16, 2)),  # 128 threads do not finish 16 rows of 16
        ("lm_head", "fp8 per row", 1, (1, 16, 4)),
        ("layer.attn.o_proj", "nvfp4", 1, (2, 8, 4)),  # of 256 tiles 528 teams would leave half of the GPU idle
        ("layer.ffn.down_proj", "nvfp4", 1, (2, 8, 12)),
        ("layer.ffn.down_proj", "nvfp4", 8, (4, 4, 12)),  # x of half of the columns
    ],
)
def test_warps_of_short_shares_are_parted_into_teams(name, storage, rows, expected):
    cut = cut_of_weight(name, storage, rows, **LARGE)
    assert (cut.teams, cut.warps, cut.steps) == expected
    assert cut.x_steps * cut.teams == cut.steps


@pytest.mark.parametrize(
    ("name", "rows", "steps"),
    [
        ("fc", 8, 8),
        ("layer.attn.o_proj", 4, 4),
        ("layer.ffn.down_proj", 5, 12),
        ("fc", 1, None),  # one row is few bytes
        ("layer.attn.o_proj", 16, None),  # 128 threads do not finish 16 rows of 16
        ("layer.attn.q_proj", 8, None),  # the norm before it wants whole rows
        ("lm_head", 8, None),  # more tiles than teams
    ],
)
def test_few_tiles_are_those_of_pairs_of_blocks(name, rows, steps):
    cut = cut_of_weight(name, "nvfp4", rows, **LARGE)
    assert (cut.joined, cut.k_parts) == ((True, 2) if steps else (False, 1))
    assert not steps or (cut.steps, cut.x_columns) == (steps, cut.columns // 2)


def test_pairs_of_blocks_add_up_in_shared_memory():
    """Where blocks see each other's: otherwise teams have whole tiles. No launch adds the parts."""
    storage = {"layer.ffn.down_proj": "nvfp4"}
    assert "st_shared__cluster_f32" in source_of(plan_of(storage, 8, **LARGE))
    assert not [item.name for some in plan_of(storage, 8, **LARGE).scratch for item in some if "partial" in item.name]


def test_teams_meet_at_barriers_of_their_own():
    """Each has a number; blocks that are not parted have the one of all their threads alone."""
    assert "bar.sync" in source_of(plan_of({"lm_head": "nvfp4"}, 1, **LARGE))
    assert "bar.sync" not in source_of(plan_of({"lm_head": "fp8 per row"}, 1, **LARGE))
