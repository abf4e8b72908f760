"""Latent attention and products by head: which kernel takes what, and why not."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from circuitgraph.checkpoint import bind
from circuitgraph.circuit.ir import Storage
from circuitgraph.kernels.cuda.architectures import ARCHITECTURES, DEFAULT
from circuitgraph.kernels.cuda.formats import Format
from circuitgraph.kernels.cuda.head_linear import HeadProduct
from circuitgraph.kernels.cuda.latent import PANEL, PANELS, SHARED_BYTES
from circuitgraph.measure import shapes
from circuitgraph.pipeline import Run, plan_piece
from circuitgraph.plan.schedule import load_schedule
from tests.gpu.pack import CASES, plans_of

RULES = load_schedule("cuda")
DEEPSEEK = {"rows": 8, "heads": 128, "block": 256, "latent": 512, "stride": 192}
KEYS = HeadProduct(start=0, size=128, into_latent=True, first=0, **DEEPSEEK)
VALUES = HeadProduct(start=128, size=128, into_latent=False, first=0, **{**DEEPSEEK, "stride": 512})


def planned(name: str, rows: int, entry: str = "draft", arch: str = "sm_90a", tmp_path: Path | None = None):
    shape = shapes.find_shape(name)
    assert tmp_path is not None
    config = tmp_path / "config.json"
    config.write_text(json.dumps(shape.full_config()))
    dtypes = dict.fromkeys(("act", "kv", "wt"), shape.act)
    circuit = bind(shape.program, model=config, family=shape.family, switches=shape.switches, **dtypes).circuit
    return plan_piece(Run(), circuit, entry, rows, f"cuda:{arch}", RULES)


@pytest.mark.parametrize("rows", [1, 2, 8, 16])
@pytest.mark.parametrize(
    ("name", "entry", "times"),
    [
        ("eagle3-8b", "first", 1),
        ("eagle3-8b", "draft", 1),
        ("medusa1-7b", "draft", 1),
        ("dflash-qwen3-8b", "draft", 16),
        ("dflash-qwen3-8b", "context", 16),
        ("deepseek-v3", "draft", 1),
        ("latent-attention", "attend", 1),
    ],
)
def test_real_sizes_get_no_plain_kernel(name, entry, times, rows, tmp_path):
    """Of dflash, so many blocks."""
    plan = planned(name, min(rows * times, 128), entry, tmp_path=tmp_path)
    assert not [choice.kernel for choice in plan.choices if choice.kernel.endswith("_plain")]


def test_other_architectures_have_no_wgmma(tmp_path):
    plan = planned("latent-attention", 1, "attend", "sm_120", tmp_path)
    (choice,) = plan.choices
    assert choice.kernel == "cuda.latent_plain"
    assert "sm_120 has no wgmma" in dict(choice.refusals).values()


def test_other_sizes_and_dtypes_are_plain():
    plans = {case.name: plans_of(case) for case in CASES if case.name in ("latent_odd_f32", "direct_latent_f32")}
    reasons = {name: [dict(choice.refusals) for plan in made for choice in plan.choices] for name, made in plans.items()}
    said = [reason for refusals in reasons["latent_odd_f32"] for reason in refusals.values()]
    assert "needs queries and cache in bf16 or f16, both the same, got f32" in said
    assert any("needs bf16 or f16 activations and weights" in reason for reason in said)


@pytest.mark.parametrize(
    ("product", "text", "says"),
    [
        (KEYS, "fp8 128x128", None),
        (VALUES, "fp8 128x128", None),
        (KEYS, "int8 per tensor", None),
        (VALUES, "fp8 per row", None),
        (VALUES, "int8 64x32", None),
        (KEYS, "int8 64x32", None),
        (KEYS, "fp8 per row", "scales of rows differ along what is summed"),
        (VALUES, "nvfp4", "reads plain weights, fp8 and int8, got nvfp4"),
        (KEYS, "fp8 96x128", "do not begin where those of heads do"),
        (VALUES, "fp8 128x96", "are no whole number of blocks"),
        (VALUES, "fp8 128x384", "begin within the second 256 columns, which one warp sums"),
        (VALUES, "int8 128x320", "begin within the second 256 columns, which one warp sums"),
        (VALUES, "fp8 128x256", None),
        (VALUES, "fp8 128x512", None),
        (VALUES, "fp8 128x768", None),
        (KEYS, "fp8 128x384", None),
        (VALUES, "fp8 128x24", "do not begin where those of heads do"),
    ],
)
def test_storages_of_products_by_head(product, text, says):
    assert product.refuse() is None
    reason = product.refuse_storage(Format("bf16", Storage.parse(text)))
    assert reason is None if says is None else says in reason


def test_scales_of_blocks_are_applied_to_whole_steps():
    assert KEYS.scaled_steps((128, 128)) == 8 == KEYS.steps
    assert VALUES.scaled_steps((128, 128)) == 8 == VALUES.steps // 2
    assert VALUES.scaled_steps((128, 1024)) == VALUES.steps


def test_shared_memory_is_filled_and_no_more():
    assert SHARED_BYTES <= ARCHITECTURES[DEFAULT].shared_bytes < SHARED_BYTES + PANELS * PANEL
