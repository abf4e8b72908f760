"""Mixtures of experts in CUDA plans: which storages tensor cores read, what is refused with which reason, and how much memory."""

from __future__ import annotations

import json
import re
from dataclasses import replace

import pytest

from circuitgraph.checkpoint import bind, default_config
from circuitgraph.circuit.ir import Storage
from circuitgraph.kernels.base import KERNELS, make_params
from circuitgraph.kernels.cuda.experts import down_scales, up_scales
from circuitgraph.kernels.cuda.experts_templates import format_of, mixture_of, sizes_of
from circuitgraph.kernels.cuda.formats import Format
from circuitgraph.kernels.cuda.route import choosing_of
from circuitgraph.measure.shapes import state_storage
from circuitgraph.pipeline import Run, plan_piece
from circuitgraph.plan.schedule import load_schedule
from tests.cuda.test_emit import source_of
from tests.gpu.pack import MIXTURE

RULES = load_schedule("cuda")
SIZES = {"hidden_size": 1024, "moe_intermediate_size": 256, "shared_expert_intermediate_size": 128, "num_experts": 16}
EVERY = ("fp8 per tensor", "fp8 per row", "fp8 128x128", "int8 4x128", "nvfp4", "mxfp4")


@pytest.fixture
def plan_of(tmp_path):
    def plan(storage, rows=2, act="bf16", arch="sm_90a", **sizes):
        family = MIXTURE.replace(".yaml", "_family.yaml")
        model = tmp_path / "config.json"
        model.write_text(json.dumps({**default_config(family), **SIZES, **sizes}))
        options = {"model": model, "family": family, "switches": {}, "act": act, "wt": act, "kv": act}
        program = state_storage(MIXTURE, {"*vector": "", "ffn.*": storage}, tmp_path / "program.yaml", **options)
        return plan_piece(Run(), bind(program, **options).circuit, "apply", rows, f"cuda:{arch}", RULES)

    return plan


def chosen(plan):
    """(the mixture's kernel, what others said)."""
    (choice,) = [choice for group, choice in zip(plan.groups, plan.choices, strict=True) if group.pattern == "mixture"]
    return choice.kernel, [reason for _, reason in choice.refusals]


def cuts(plan):
    (found,) = [pair for pair in zip(plan.groups, plan.choices, strict=True) if pair[0].pattern == "mixture"]
    group, choice = found
    params, mixture = make_params(KERNELS[choice.kernel], dict(choice.params), "here"), mixture_of(group)
    sizes = sizes_of(plan, mixture)
    words = choosing_of(mixture.route, sizes.experts, None).words
    return sizes, words, params.up(plan, sizes, words), params.down(plan, sizes)


@pytest.mark.parametrize("storage", EVERY)
@pytest.mark.parametrize("rows", [1, 8, 16, 33])
def test_every_storage_reaches_the_tensor_cores(plan_of, storage, rows):
    plan = plan_of(storage, rows)
    assert chosen(plan) == ("cuda.mixture_stream", [])
    assert str(format_of(plan, mixture_of(plan.groups[0])).storage) == storage


@pytest.mark.parametrize(
    ("storage", "more", "reason"),
    [
        ("fp8 128x32", {}, "scales of fp8 128x32 change within a step of 64 columns"),
        ("mxfp4", {"act": "f16"}, "f16 does not hold the scales of mxfp4"),
        ("nvfp4", {"moe_intermediate_size": 192}, "192 columns are no whole number of steps of 128"),
        ("fp8 per row", {"moe_intermediate_size": 96}, "96 columns are no whole number of steps of 64"),
    ],
)
def test_what_is_refused_says_why(plan_of, storage, more, reason):
    """Plain kernels read no quantised experts: a plan alone has no kernel then, and `compile` turns them into floats."""
    from circuitgraph.errors import ScheduleError

    with pytest.raises(ScheduleError) as error:
        plan_of(storage, **more)
    assert reason in str(error.value)


@pytest.mark.parametrize("storage", EVERY)
@pytest.mark.parametrize("rows", [1, 8, 33])
@pytest.mark.parametrize("hidden", [1024, 7168])
def test_shared_memory_is_what_was_reckoned_with(plan_of, storage, rows, hidden):
    """Of both products, a kilobyte at most less: a launch that asks for more than there is fails where the GPU is."""
    plan = plan_of(storage, rows, hidden_size=hidden)
    sizes, words, up, down = cuts(plan)
    asked = [int(size) for size in re.findall(r"cuda_arg_\d+ = \(?\(?(?:int)?\)?\(?(\d+)\)?;", source_of(plan))]
    for reckoned in (up.shared_bytes(sizes, words), down.shared_bytes(sizes)):
        assert any(reckoned - 2048 <= size <= reckoned for size in asked), (reckoned, asked)


@pytest.mark.parametrize(
    ("storage", "up", "down"),
    [
        ("fp8 per tensor", (0, 0), (1, 1)),
        ("fp8 per row", (0, 0), (16, 1)),
        ("fp8 128x128", (2, 1), (1, 1)),
        ("int8 8x128", (2, 1), (16, 1)),
        ("int8 4x128", (16, 1), (16, 1)),
        ("nvfp4", (16, 2), (16, 2)),
        ("mxfp4", (16, 1), (16, 1)),
    ],
)
def test_no_scale_is_fetched_twice(storage, up, down):
    """(lines, words of each) in a step. Those that do not differ along a row are left to the sums of gate and up."""
    format = Format("bf16", Storage.parse(storage))
    assert (up_scales(format), down_scales(format)) == (up, down)


def test_two_steps_are_taken_at_once_where_that_leaves_all_warps_as_much_to_do(plan_of):
    large = {"moe_intermediate_size": 2048, "shared_expert_intermediate_size": 2048}
    sizes, *_, down = cuts(plan_of("fp8 128x128", **large))
    assert (down.together, sizes.inner // sizes.step % (2 * down.warps)) == (2, 0)
    assert cuts(plan_of("fp8 128x64", **large))[-1].together == 1  # a scale for each
    assert cuts(plan_of("nvfp4", **large))[-1].together == 1
    assert cuts(plan_of("fp8 128x128", moe_intermediate_size=1024))[-1].together == 1
    assert replace(sizes, rows=17).together(16) == 1


def test_tiles_of_few_rows_are_finished_by_a_warp_at_a_time(plan_of):
    """Of four bits, while the others go on; else by all, which wait for each other. Four bits have two groups in a tile, too."""
    for storage, rows, later, groups in (
        ("nvfp4", 1, True, 2),
        ("mxfp4", 8, True, 2),
        ("fp8 per row", 8, False, 1),
        ("nvfp4", 9, False, 1),
    ):
        plan = plan_of(storage, rows, hidden_size=2048)
        *_, up, _ = cuts(plan)
        assert ("bar_arrive" in source_of(plan), up.groups) == (later, groups), (storage, rows)


@pytest.mark.parametrize(
    ("storage", "rows", "hidden", "kept"),
    [("nvfp4", 1, 2048, 1), ("nvfp4", 8, 7168, 4), ("fp8 128x128", 3, 4096, 2), ("nvfp4", 17, 4096, 1)],
)
def test_all_tiles_of_down_are_finished_at_the_end(plan_of, storage, rows, hidden, kept):
    """Of few rows, whose sums have room: then no barrier is among a block's tiles."""
    plan = plan_of(storage, rows, hidden_size=hidden)
    assert cuts(plan)[-1].kept == kept
    (down,) = [body for body in source_of(plan).split("__global__") if "mixed_out_ptr[" in body and "st_global" in body]
    after = down.partition("tile_ptr[0] = (tile_ptr[0] + ")[2]
    assert after.count("cta_sync();") == (kept > 1)
