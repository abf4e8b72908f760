"""Products of some rows and attention of blocks on Hopper: who gets them, and how they are cut."""

from __future__ import annotations

import functools
import json
import re
import tempfile
from pathlib import Path

import pytest

from circuitgraph.checkpoint import bind
from circuitgraph.kernels.cuda.architectures import ARCHITECTURES, architecture
from circuitgraph.kernels.cuda.backend import make_backend
from circuitgraph.kernels.cuda.block_attention import shared_bytes
from circuitgraph.kernels.cuda.block_templates import AttendBlocks
from circuitgraph.kernels.cuda.turned_warpgroups import TurnedTile
from circuitgraph.kernels.cuda.warpgroup_templates import Top1Warpgroups, WarpgroupParams, sizes_of
from circuitgraph.kernels.cuda.warpgroups import DEPTH, PACE, ROWS, STEADY_PACE
from circuitgraph.measure.shapes import SHAPES, state_storage
from circuitgraph.pipeline import Run, plan_piece
from circuitgraph.plan.schedule import load_schedule
from circuitgraph.target import Target
from tests.gpu.pack import CASES, TARGET, circuit_of

RULES = load_schedule("cuda")
LARGE = SHAPES["dflash-qwen3-8b"]
PARAMS = WarpgroupParams()
PRODUCTS = ("project", "qkv", "project_norm", "gated", "head")
NO_JOIN = tuple(rule for rule in RULES if rule.kernel.name != "cuda.joined_warpgroups")


@functools.cache
def dflash(dtype: str = "bf16", storage: str = "", **sizes):
    """DFlash of one layer in its real size, or another."""
    config = {**LARGE.full_config(), "num_hidden_layers": 1, **sizes}
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "config.json"
        file.write_text(json.dumps(config))
        options = {"model": file, "family": LARGE.family, "act": dtype, "wt": dtype, "kv": dtype}
        program = state_storage("dflash", {"*": storage} if storage else {}, Path(folder) / "program.yaml", **options)
        return bind(program, **options).circuit


def plan_of(circuit, rows: int, arch: str = "sm_90a", entry: str = "draft", rules=RULES):
    return plan_piece(Run(), circuit, entry, rows, f"cuda:{arch}", rules)


def products_of(plan):
    return [group for group in plan.groups if group.pattern in PRODUCTS]


def kernels_of(plan) -> dict[str, str]:
    return {group.pattern: choice.kernel.removeprefix("cuda.") for group, choice in zip(plan.groups, plan.choices, strict=True)}


def refusals_of(plan) -> str:
    return "; ".join(reason for choice in plan.choices for _, reason in choice.refusals)


def groups_of(plan):
    return {group.pattern: group for group in plan.groups}


@pytest.mark.parametrize("blocks", [2, 3, 4, 8])
def test_blocks_in_their_real_size_get_warpgroups_on_hopper_alone(blocks):
    rows = blocks * 16
    for arch in ARCHITECTURES:
        found = kernels_of(plan_of(dflash(), rows, arch))
        if architecture(arch).warpgroups:
            queries = found["project"] if blocks == 3 else found["qkv"]  # of 48 rows they come in one part
            assert queries == ("linear_warpgroups" if blocks == 3 else "joined_warpgroups")
            assert found["project_norm"] == "joined_warpgroups"
            assert (found["gated"], found["head"]) == ("linear_warpgroups", "top1_warpgroups")
            assert found["attend"] == "attention_blocks"
        else:
            assert "warpgroups" not in str(found)
            assert found["attend"] == "attention_paged"


def test_what_warpgroups_do_not_read_goes_where_it_went_before():
    assert kernels_of(plan_of(dflash("f32"), 64))["project"] == "linear_plain"
    odd = plan_of(dflash(hidden_size=4096 + 32), 64)
    assert kernels_of(odd)["gated"] == "linear_plain"
    assert "4128 columns are no whole number of stages of 64" in refusals_of(odd)
    assert "256 columns do not split into 8 parts" in refusals_of(plan_of(dflash(hidden_size=256), 64))


@pytest.mark.parametrize("storage", ["fp8 128x128", "fp8 per row", "int8 per tensor", "nvfp4", "mxfp4"])
def test_quantised_weights_get_warpgroups_whose_rings_fit(storage):
    for rows in (32, 128):
        plan = plan_of(dflash(storage=storage), rows)
        assert (kernels_of(plan)["gated"], kernels_of(plan)["head"]) == ("linear_warpgroups", "top1_warpgroups")
        tile = PARAMS.tile(plan, groups_of(plan)["gated"])
        assert tile.shared_bytes <= architecture("sm_90a").shared_bytes
        assert tile.stages >= 3
        assert all(words % 256 == 0 for name, words in tile.words.items() if name in ("converted", "x")), "as the swizzle needs"
    assert "tiles" in kernels_of(plan_of(dflash(storage=storage), 128, "sm_80"))["gated"]


def test_scales_that_change_within_a_piece_are_refused():
    plan = plan_of(dflash(storage="fp8 128x8"), 64)
    assert "warpgroups" not in kernels_of(plan)["gated"]
    assert "change within 16 columns" in refusals_of(plan)


def test_few_rows_get_warpgroups_where_nothing_streams():
    """Of 16 rows: 18944 columns do not split into parts that fit the registers, and a head of 7168 has none."""
    plan = plan_of(dflash(intermediate_size=18944), 16, rules=NO_JOIN)
    last = [choice.kernel for group, choice in zip(plan.groups, plan.choices, strict=True) if group.pattern == "project"][-1]
    assert last == "cuda.linear_warpgroups"
    assert kernels_of(plan_of(dflash(hidden_size=7168), 16))["head"] == "top1_warpgroups"


def test_from_nine_rows_on_plain_weights_are_multiplied_by_wgmma():
    joined, streamed = "joined_warpgroups", {"qkv_stream", "linear_stream", "top1_stream"}
    found = kernels_of(plan_of(dflash(), 16))
    assert (found["qkv"], found["project_norm"], found["gated"], found["head"]) == (
        joined,
        joined,
        "linear_warpgroups",
        "top1_warpgroups",
    )
    for other in (plan_of(dflash(), 16, "sm_100"), plan_of(dflash(storage="fp8 128x128"), 16)):
        assert "warpgroups" not in str(kernels_of(other))
        assert streamed & set(kernels_of(other).values())
    assert "for plain weights: quantised ones of few rows are streamed" in refusals_of(other)


def test_short_columns_of_sixteen_rows_are_streamed():
    """But gate and up, which have no second launch, and the head."""
    found = kernels_of(plan_of(dflash(hidden_size=2048, num_attention_heads=16, intermediate_size=3072), 16))
    assert (found["project"], found["gated"], found["head"]) == ("linear_stream", "linear_warpgroups", "top1_warpgroups")
    assert "for 4096 columns and more, got 2048 (qkv)" in refusals_of(plan_of(dflash(hidden_size=2048), 16))


@pytest.mark.parametrize(("columns", "joined"), [(2048, 1), (6144, 4)])
def test_a_norm_that_nobody_left_is_taken_in_by_a_stream(columns, joined):
    """Of 16 rows and two layers: the second one's queries, keys and values are joined where down before them is."""
    sizes = {"hidden_size": 2048, "num_attention_heads": 16, "intermediate_size": columns, "num_hidden_layers": 2}
    plan = plan_of(dflash(**sizes), 16)
    assert [choice.kernel for choice in plan.choices].count("cuda.joined_warpgroups") == joined
    said = "for x that is there: a stream takes in its norm (qkv)"
    assert (said in refusals_of(plan)) == (columns == 2048)


@pytest.mark.parametrize("storage", ["", "fp8 128x128", "nvfp4"])
def test_a_block_that_multiplies_has_some_bytes_on_their_way(storage):
    plan = plan_of(dflash(storage=storage), 128)
    tile = PARAMS.tile(plan, groups_of(plan)["gated"])
    (kernel,) = [kernel for kernel in kernels_with(plan, "gate_proj_ptr") if "wgmma" in kernel]
    before, after = kernel.split("griddepcontrol_wait();", 1)
    for text, pace in ((before, PACE), (after, STEADY_PACE)):
        (stages,) = {int(most) for most in re.findall(r"cp_async_wait_group\w*_(\d+)\(", text)}
        assert stages == max(1, pace // tile.weight_bytes)
        assert stages < tile.stages or (storage, pace) == ("nvfp4", STEADY_PACE), "a limit, but for a short ring of few bytes"


@pytest.mark.parametrize("rows", [1, 8, 16, 17, 32, 48, 64, 100, 128, 129, 200, 256, 300, 1024])
def test_tiles_fit_and_cover(rows):
    """Every tile: shared memory, the columns of every part, all rows, no row tile more than needed."""
    plan = plan_of(dflash(), 16 * -(-rows // 16))
    assert len(products_of(plan)) == 5
    for group in products_of(plan):
        head = group.pattern == "head"
        weights, columns, _ = sizes_of(plan, group)
        tile = PARAMS.tile(plan, group, head=head)
        assert tile.shared_bytes <= architecture("sm_90a").shared_bytes
        assert tile.stages >= 3, "one that is read, one that is copied, and one between"
        assert tile.rows % 8 == 0
        assert tile.rows <= ROWS
        tiles = -(-plan.rows // ROWS)
        assert 0 <= tiles * tile.rows - plan.rows <= (tiles * tile.rows // 8 if isinstance(tile, TurnedTile) else 8 * tiles - 1)
        assert tile.stage_bytes % 1024 == 0, "a swizzled matrix begins at a multiple of 1024"
        assert columns // DEPTH >= tile.parts
        if head:
            assert tile.parts == 1
            blocks = Top1Warpgroups.blocks(plan, group, tile)
            tiles = -(-weights // tile.weights)
            each = -(-tiles // blocks)
            assert blocks <= architecture("sm_90a").processors
            assert (blocks - 1) * each < tiles <= blocks * each, "no block without a tile"


def test_x_is_the_rows_of_wgmma_where_it_has_nearly_64_or_128():
    def turned(circuit, rows: int) -> set[bool]:
        plan = plan_of(circuit, rows)
        tiles = [PARAMS.tile(plan, group, head=group.pattern == "head") for group in products_of(plan)]
        return {isinstance(tile, TurnedTile) for tile in tiles}

    found = {rows: turned(dflash(), rows) for rows in (32, 48, 64, 80, 96, 112, 128, 192, 208, 256)}
    assert found == {rows: {rows in (64, 112, 128, 256)} for rows in found} | {192: {False}, 208: {False}}
    assert turned(dflash(storage="fp8 128x128"), 64) == {False}
    plan = plan_of(dflash(vocab_size=151939), 64)
    assert not isinstance(PARAMS.tile(plan, groups_of(plan)["head"], head=True), TurnedTile), "columns lie in groups of eight"


def test_turned_tiles_are_what_one_wgmma_takes():
    """Halves of a tile, and columns that meet in a thread."""
    for rows in (64, 128):
        plan = plan_of(dflash(), rows)
        for group in products_of(plan):
            tile, matrices = PARAMS.tile(plan, group, head=group.pattern == "head"), sizes_of(plan, group)[2]
            assert isinstance(tile, TurnedTile)
            assert tile.across * tile.sides == tile.weights
            assert tile.across % (8 * matrices) == 0
            assert tile.across <= 256


@pytest.mark.parametrize("rows", [64, 128])
def test_narrow_layers_fill_the_processors(rows):
    """An 8B layer: no product on less than 120 of 132 processors, and none of them twice."""
    plan = plan_of(dflash(), rows)
    for group in products_of(plan):
        if group.pattern != "head":
            tile = PARAMS.tile(plan, group)
            assert 120 <= -(-sizes_of(plan, group)[0] // tile.weights) * tile.parts <= 132, group.name


@pytest.mark.parametrize(("blocks", "parts"), [(1, 8), (2, 8), (3, 8), (4, 4), (7, 4), (8, 3), (9, 3), (16, 2), (64, 1)])
def test_attention_of_blocks_runs_at_once(blocks, parts):
    plan = plan_of(dflash(), blocks * 16)
    assert kernels_of(plan)["attend"] == "attention_blocks"
    group, params = groups_of(plan)["attend"], AttendBlocks.Params()
    assert AttendBlocks.parts(plan, group, params) == parts
    assert 2 * shared_bytes(128, 16, 4, AttendBlocks.stages(plan, group, params)) <= architecture("sm_90a").shared_bytes


@pytest.mark.parametrize(
    ("sizes", "reason"),
    [
        ({"head_dim": 256}, "head size 256"),
        ({"head_dim": 64, "num_key_value_heads": 16}, "head size 64"),
        ({"num_key_value_heads": 32}, "1 warps do not split tiles of 64 cache rows"),
        ({"num_attention_heads": 24}, "3 warps do not split"),
        ({"block_size": 6}, "of blocks of 6 rows"),
        ({"block_size": 48}, "of blocks of 48 rows"),
    ],
)
def test_attention_of_blocks_says_what_it_does_not_take(sizes, reason):
    circuit = dflash(**sizes)
    plan = plan_of(circuit, circuit.block_size * 2)
    assert kernels_of(plan)["attend"] != "attention_blocks"
    assert reason in refusals_of(plan)


@pytest.mark.parametrize(
    ("kv_heads", "blocks", "parts"), [(4, 1, 8), (4, 2, 8), (4, 4, 6), (4, 8, 3), (2, 1, 8), (2, 8, 6), (4, 33, 1)]
)
def test_attention_of_more_than_64_queries_has_a_processor_a_block(kv_heads, blocks, parts):
    """Their registers leave room for no second one."""
    plan = plan_of(dflash(num_key_value_heads=kv_heads), blocks * 16)
    assert kernels_of(plan)["attend"] == "attention_blocks"
    assert AttendBlocks.parts(plan, groups_of(plan)["attend"], AttendBlocks.Params()) == parts


def test_part_of_a_block_reads_the_cache_as_a_whole_one():
    def cached(rows: int) -> int:
        plan = plan_of(dflash(), rows)
        return plan.cost(groups_of(plan)["attend"], 1000).bytes - plan.cost(groups_of(plan)["attend"], 0).bytes

    assert cached(4) == cached(16) == cached(20) / 2 == 1000 * 8 * 128 * 2 * 2


def test_attention_of_blocks_takes_heads_of_64():
    plan = plan_of(dflash(head_dim=64), 32)
    assert kernels_of(plan)["attend"] == "attention_blocks"
    assert shared_bytes(64, 16, 4, 3) - shared_bytes(64, 16, 2, 3) > 64 * 64 * 2, "four warps' queries stay in shared memory"


def kernels_with(plan, text: str) -> list[str]:
    backend = make_backend(Target("cuda", "sm_90a"))
    (source,) = backend.sources(backend.lower([plan]))
    return [kernel for kernel in source.split('extern "C" __global__ ') if text in kernel and "{" in kernel]


@pytest.mark.parametrize("rows", [16, 128])
def test_attention_of_blocks_asks_for_old_cache_rows_before_the_wait(rows):
    """And for queries, and rows that the program itself appends, behind it; then the next kernel may start."""
    (attention,) = [kernel for kernel in kernels_with(plan_of(dflash(), rows), "kv_table_ptr") if "wgmma" in kernel]
    before, _, after = attention.partition("griddepcontrol_wait();")
    assert before.count("cp_async_cg") == 16
    assert "q_3_ptr" not in before.partition("{")[2]
    assert "launch_dependents" not in before
    assert after.index("cp_async_cg") < after.index("launch_dependents")


def test_rows_of_sequences_of_their_own_are_no_blocks():
    from tests.cuda.test_emit import aligned

    plan = aligned(17)  # of which attention makes none itself
    assert kernels_of(plan)["attend"] == "attention_paged"
    assert "for entries of blocks" in refusals_of(plan)


def test_every_weight_is_copied_once_and_before_the_wait():
    """Of a head at 128 rows: its ring starts with weights, which nothing before this kernel writes."""
    backend = make_backend(Target("cuda", "sm_90a"))
    plan = plan_of(dflash(), 128)
    (source,) = backend.sources(backend.lower([plan]))
    kernels = source.split('extern "C" __global__ ')
    (head,) = [kernel for kernel in kernels if "lm_head_ptr" in kernel and "wgmma" in kernel and "{" in kernel]
    before, _, after = head.partition("griddepcontrol_wait();")
    assert "cp_async" in before
    assert "norm" not in before.partition("{")[2]
    assert "m64n192k16" in after


def test_a_bias_is_read_within_its_columns():
    """Blocks that add parts are wider than some projections, and compute what they do not store."""
    case = next(case for case in CASES if case.name == "biased_bf16")
    plans = [plan_of(circuit_of(case), 32, rules=NO_JOIN)]
    backend = make_backend(TARGET)
    text = "".join(backend.sources(backend.lower(plans)))
    kernels = [part for part in re.split(r"(?m)^(?=extern )", text) if re.search(r"bias_ptr\[", part)]
    assert len(kernels) == 1
    for index in re.findall(r"bias_ptr\[(\w+)\[0\]\]", kernels[0]):
        assert f"{index}[0] = min(" in kernels[0]
