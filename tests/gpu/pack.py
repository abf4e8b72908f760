"""Compiles the artifacts that tests/gpu runs: `python -m tests.gpu.pack build/gpu [name ...]`, see `--help`.

Needs nvcc and no GPU. Shapes are the smallest that reach what a case is about; `CASES` says which kernels that is. Beside
the artifacts it puts the wheel of tvm-ffi, the one package that a machine with torch lacks.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from importlib.metadata import version
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import tvm

import circuitgraph
from circuitgraph.checkpoint import bind, default_config
from circuitgraph.circuit.ir import Circuit
from circuitgraph.circuit.restrict import restrict_vocabulary
from circuitgraph.circuit.text import format_circuit
from circuitgraph.kernels.cuda.backend import make_backend
from circuitgraph.kernels.cuda.build import HOST
from circuitgraph.measure.shapes import SHAPES, state_storage
from circuitgraph.pipeline import Run, compile, plan_piece, work_list
from circuitgraph.plan.ir import Plan
from circuitgraph.plan.schedule import load_schedule
from circuitgraph.plan.text import format_plan
from circuitgraph.target import Target, parse_target
from tests.fixture_cases import FIXTURES

TARGET = parse_target("cuda:sm_90a")
"""The GPU that there is."""

SIZES: dict[str, Any] = {
    "head_dim": 128,
    "hidden_size": 1024,
    "intermediate_size": 1536,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "vocab_size": 2112,
}


@dataclass(frozen=True)
class Case:
    """One artifact: the fixture `model`'s config at other sizes, with random weights, in some dtypes and numbers of rows.

    model: or a family's file, whose example is the config. sizes: over `SIZES`, or over the example; None takes the fixture as
    it is, whose weights are its own. storage: of quantised weights, see `measure.shapes.state_storage`. tokens: those alone that
    the head scores.
    """

    name: str
    model: str = "qwen3_dense_mtp"
    sizes: Mapping[str, Any] | None = field(default_factory=dict)
    switches: Mapping[str, Any] = field(default_factory=dict)
    act: str = "bf16"
    wt: str | None = "bf16"
    kv: str = "bf16"
    widths: Sequence[int] = (1, 4)
    context_rows: Sequence[int] = (4,)
    entries: Sequence[str] = ("draft", "logits", "context")
    program: str = "mtp_dense"
    storage: Mapping[str, str] = field(default_factory=dict)
    block: int = 1
    tokens: Sequence[int] | None = None

    def rows(self, entry: str) -> Sequence[int]:
        """Of the programs of an entry; `block` rows of each sequence draft at once."""
        return self.context_rows if entry == "context" else [self.block * width for width in self.widths]


ODD = {"hidden_size": 120, "head_dim": 24, "intermediate_size": 88, "vocab_size": 331}
WIDE = {"hidden_size": 4096, "num_attention_heads": 4, "intermediate_size": 12288, "vocab_size": 1003}
WHOLE = {"intermediate_size": 2048}
"""Columns that quantised weights have a whole number of steps of."""
EIGHT_BITS = {
    "fc": "fp8 per tensor",
    "*.[qkv]_proj": "fp8 per row",
    "*.down_proj": "int8 per tensor",
    "lm_head": "fp8 per row",
    "*": "fp8 128x128",
}
SIBLINGS = {
    "*.q_proj": "fp8 128x128",
    "*.k_proj": "int8 per row",
    "*.v_proj": "",
    "*.gate_proj": "nvfp4",
    "*.up_proj": "mxfp4",
    "*.down_proj": "int8 64x32",
    "fc": "mxfp4",
    "*.o_proj": "nvfp4",
    "*": "fp8 per row",
}
PRODUCTS, MIXTURE = (str(Path(__file__).parent / f"{name}.yaml") for name in ("products", "mixture"))
SIGMOID = {"scoring": "sigmoid", "correction_bias": True}
EXPERTS = {
    "num_experts": 16,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 256,
    "shared_expert_intermediate_size": 128,
}
STEP = ("draft", "context")
MASKED = (*STEP, "draft_masked")
OWN = Path(__file__).parent / "programs"
"""Programs for tests alone."""
LATENT = {"program": str(OWN / "mla_dense.yaml"), "model": str(OWN / "mla_dense_family.yaml")}
SMALL_LATENT = {
    "hidden_size": 120,
    "num_attention_heads": 5,
    "q_lora_rank": 40,
    "kv_lora_rank": 48,
    "qk_nope_head_dim": 24,
    "qk_rope_head_dim": 16,
    "v_head_dim": 20,
    "intermediate_size": 88,
    "vocab_size": 331,
}
MEASURE = Path(circuitgraph.__file__).parent / "measure"
OF_EXAMPLES = ("dflash_qwen3", "eagle3_llama", "medusa1")
"""Families whose cases are sized over their example instead of over a fixture's config."""
DFLASH_SIZES = {
    "hidden_size": 1024,
    "intermediate_size": 1536,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "vocab_size": 2112,
    "dflash_config": {"mask_token_id": 2111, "target_layer_ids": [1, 9, 17]},
}
EAGLE3_SIZES = {
    "hidden_size": 1024,
    "intermediate_size": 1536,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "vocab_size": 4224,
    "draft_vocab_size": 2112,
}
WINDOW = {"use_sliding_window": True, "layer_types": ["sliding_attention"] * 2}
MEDUSA_SIZES = {"hidden_size": 1024, "num_attention_heads": 8, "vocab_size": 2112, "medusa_num_heads": 3}
BYTES = {"moe_intermediate_size": 192, "shared_expert_intermediate_size": 128}
CODED = {"*vector": "", "ffn.*": "fp8 128x128"}
WORDS = {"moe_intermediate_size": 384, "shared_expert_intermediate_size": 128}
FOUR_BITS = {"*vector": "", "ffn.*": "nvfp4"}
MIXED = (1, 3, 8, 16, 33, 64)
FEW = (1, 4, 16)
ALL = (1, 2, 3, 5, 8, 9, 16, 17, 32, 33, 64)
"""Around the sizes of fragments, of schedule rules and of tiles."""

CASES = (
    # Every width on every template: streams, tiles and paged attention in both dtypes, plain kernels in all three.
    Case("few_bf16", widths=(1, 2, 3, 5, 8), entries=MASKED),
    Case("more_bf16", widths=(1, 9, 16, 17, 32, 33, 64), context_rows=(64, 200), entries=MASKED),
    Case("listed_bf16", tokens=(*range(3, 1500, 2), 1999, 2111), widths=(1, 3, 9), entries=MASKED),
    # A window over the rows of a chain's cache.
    Case("window_bf16", sizes={**WINDOW, "sliding_window": 40}, widths=(1, 3), context_rows=(16,), entries=STEP),
    Case("aligned_f16", act="f16", wt="f16", kv="f16", widths=ALL, entries=STEP),
    Case("odd_bf16", sizes=ODD, widths=ALL, context_rows=(5,), entries=MASKED),
    Case("odd_f16", sizes=ODD, act="f16", wt="f16", kv="f16", widths=ALL, context_rows=(5,), entries=STEP),
    Case("odd_f32", sizes=ODD, act="f32", wt="f32", kv="f32", widths=ALL, context_rows=(5,), entries=(*STEP, "logits")),
    # A gate on attention, norms around zero, partial RoPE by pairs, heads of 256; the residual sum is recycled.
    Case(
        "gated_bf16",
        "qwen3_5_mtp",
        {"head_dim": 256, "num_attention_heads": 4},
        {"recycle": "pre_norm", "rope_style": "interleaved"},
        widths=(1, 9),
        context_rows=(4, 64),
    ),
    # Columns that are no whole number of steps for sixteen warps, in parts; of one step for eight, in one.
    Case("long_bf16", sizes={"intermediate_size": 17408}, widths=(9, 16), entries=STEP),
    Case("long_fp8", sizes={"hidden_size": 7168, **WHOLE}, storage={"*": "fp8 128x128"}, widths=(16,), entries=STEP),
    # Twelve query heads over each KV head, both halves of an `mma`'s rows; and twenty, in two groups.
    Case("many_heads_bf16", sizes={"num_attention_heads": 24}, widths=(1, 3, 9), entries=STEP),
    Case(
        "many_heads_f16",
        sizes={"num_attention_heads": 20, "num_key_value_heads": 1, "head_dim": 64},
        act="f16",
        wt="f16",
        kv="f16",
        widths=(1, 4),
        entries=STEP,
    ),
    # Rows that attention makes itself, with biases and no norm, half of each head rotated.
    Case(
        "biased_rows_f16",
        "mimo_mtp",
        {"partial_rotary_factor": 0.5},
        act="f16",
        wt="f16",
        kv="f16",
        widths=(1, 3, 16),
        entries=STEP,
    ),
    # Biases, the mask at the first position, RoPE at the hidden's position.
    Case("biased_bf16", "mimo_mtp", {}, {"rope_position": "hidden", "mask_first": True}, widths=(1, 3, 32), entries=STEP),
    # Queries and keys rotated where their sums arise: whole heads, and a half of smaller ones.
    Case("rotated_bf16", "mimo_mtp", {"attention_bias": False}, widths=(1, 3, 8), entries=MASKED),
    Case(
        "rotated_f16",
        "mimo_mtp",
        {"attention_bias": False, "head_dim": 64, "num_attention_heads": 12, "partial_rotary_factor": 0.5},
        act="f16",
        wt="f16",
        kv="f16",
        widths=(1, 5),
        entries=STEP,
    ),
    # One step of 32 columns a warp, heads of 64.
    Case("narrow_bf16", sizes={"hidden_size": 512, "head_dim": 64, "intermediate_size": 512, "vocab_size": 2048}, widths=(1, 3)),
    # Columns in parts over blocks, and a vocabulary cut inside a tile.
    Case(
        "wide_bf16",
        sizes=WIDE,
        widths=(1, 8, 16),
        context_rows=(16,),
        entries=STEP,
    ),
    # What the lifecycle's random interleavings run on.
    Case("lifecycle_f32", sizes=ODD, act="f32", wt="f32", kv="f32", widths=(1, 2, 3), context_rows=(4, 16), entries=MASKED),
    # Weights that are not of the activations' dtype.
    Case("mixed_f32_bf16", act="f32", kv="f32", widths=(1, 2), entries=STEP),
    # Quantised weights: streamed in both dtypes with every kind of scales, all lines a step apart from the block's; siblings
    # of different storage; and on plain kernels, with blocks and bytes that are cut.
    Case("fp8_bf16", sizes=WHOLE, storage=EIGHT_BITS, widths=ALL, context_rows=(64,), entries=MASKED),
    Case("fp8_f16", sizes=WHOLE, storage=EIGHT_BITS, act="f16", wt="f16", kv="f16", widths=FEW, entries=STEP),
    Case("int8_bf16", sizes=WHOLE, storage={"*": "int8 per row"}, widths=FEW, entries=STEP),
    Case("int8_f16", sizes=WHOLE, storage={"*": "int8 128x128"}, act="f16", wt="f16", kv="f16", widths=FEW, entries=STEP),
    Case("nvfp4_bf16", sizes=WHOLE, storage={"*": "nvfp4"}, widths=(1, 2, 5, 8, 9, 16, 32), context_rows=(64,), entries=STEP),
    Case("nvfp4_f16", sizes=WHOLE, storage={"*": "nvfp4"}, act="f16", wt="f16", kv="f16", widths=FEW, entries=STEP),
    Case("mxfp4_bf16", sizes=WHOLE, storage={"*": "mxfp4"}, widths=FEW, entries=STEP),
    Case("mixed_storage", sizes=WHOLE, storage=SIBLINGS, widths=FEW, entries=STEP),
    Case("odd_storage", sizes=ODD, storage=SIBLINGS, widths=FEW, context_rows=(5,), entries=STEP),
    Case(
        "odd_storage_f32", sizes=ODD, storage=SIBLINGS, act="f32", wt="f32", kv="f32", widths=FEW, context_rows=(5,), entries=STEP
    ),
    Case("wide_fp8", sizes=WIDE, storage={"*": "fp8 128x128"}, widths=(1, 16), context_rows=(16,), entries=STEP),
    # Tiles of products whose columns are shared by two blocks, where there are few.
    Case("wide_nvfp4", sizes=WIDE, storage={"*": "nvfp4"}, widths=(1, 3, 8, 16), context_rows=(16,), entries=STEP),
    Case("wide_mxfp4", sizes=WIDE, storage={"*": "mxfp4"}, widths=(2, 5), context_rows=(16,), entries=("draft",)),
    *(
        Case(
            f"products_{act}",
            program=PRODUCTS,
            act=act,
            wt=act,
            kv=act,
            widths=widths,
            entries=("products",),
        )
        for act, widths in (("bf16", (1, 8, 16, 33)), ("f16", (1, 16)), ("f32", (1, 3)))
    ),
    # Many rows of plain weights: tiles of rows that are full and that are not, and weights of several products in one tile.
    *(
        Case(
            f"products_rows_{act}",
            str(OWN / "many_rows_family.yaml"),
            act=act,
            wt=act,
            kv=act,
            widths=(17, 48, 64, 100, 128, 200),
            entries=("products",),
            program=str(OWN / "many_rows.yaml"),
        )
        for act in ("bf16", "f16")
    ),
    # The same with columns of whole groups: nearly 64 or 128 rows of x are those of `wgmma`.
    *(
        Case(
            f"products_turned_{act}",
            str(OWN / "many_rows_family.yaml"),
            {"vocab_size": 328},
            act=act,
            wt=act,
            kv=act,
            widths=(57, 64, 120, 128, 250),
            entries=("products",),
            program=str(OWN / "many_rows.yaml"),
        )
        for act in ("bf16", "f16")
    ),
    # Experts alone: streamed with x in registers, and gathered by expert; routes of every kind; and node by node.
    Case("mixture_bf16", program=MIXTURE, switches={"shared_gate": True}, widths=MIXED, entries=("apply",)),
    Case(
        "mixture_f16",
        program=MIXTURE,
        switches={"experts": "fused", "norm": "zero_centred", **SIGMOID},
        act="f16",
        wt="f16",
        widths=(1, 4, 33),
        entries=("apply",),
    ),
    Case(
        "mixture_groups",
        program=MIXTURE,
        sizes={"num_experts": 64, "n_group": 4, "topk_group": 2, "routed_scaling_factor": 2.5},
        switches=SIGMOID,
        widths=(1, 8, 64),
        entries=("apply",),
    ),
    Case("mixture_wide", program=MIXTURE, sizes={"hidden_size": 4096}, widths=(8, 16, 64), entries=("apply",)),
    Case("mixture_fp8", program=MIXTURE, sizes=BYTES, storage=CODED, widths=(1, 4, 8, 16, 33), entries=("apply",)),
    Case("mixture_nvfp4", program=MIXTURE, sizes=WORDS, storage=FOUR_BITS, widths=(1, 4, 8, 16, 33), entries=("apply",)),
    # Two warps share a tile of gate and up.
    Case(
        "mixture_nvfp4_narrow",
        program=MIXTURE,
        sizes={**WORDS, "hidden_size": 256},
        storage=FOUR_BITS,
        widths=(1, 2, 8),
        entries=("apply",),
    ),
    # A step of every expert for each of the warps of down, whose blocks have two tiles.
    Case(
        "mixture_nvfp4_even",
        program=MIXTURE,
        sizes={
            "hidden_size": 2560,
            "num_experts": 16,
            "moe_intermediate_size": 2048,
            "shared_expert_intermediate_size": 2048,
        },
        storage=FOUR_BITS,
        widths=(1, 3, 8, 16),
        entries=("apply",),
    ),
    Case(
        "mixture_nvfp4_f16",
        program=MIXTURE,
        sizes={**WORDS, "hidden_size": 4096},
        switches={"experts": "fused"},
        storage=FOUR_BITS,
        act="f16",
        wt="f16",
        widths=(1, 8, 64),
        entries=("apply",),
    ),
    Case(
        "mixture_mxfp4",
        program=MIXTURE,
        sizes={**WORDS, "hidden_size": 2560, "num_experts": 16},
        switches=SIGMOID,
        storage={"*vector": "", "ffn.*": "mxfp4"},
        widths=(1, 8, 16),
        entries=("apply",),
    ),
    Case(
        "mixture_int8",
        program=MIXTURE,
        sizes=BYTES,
        storage={"*vector": "", "ffn.*": "int8 per row"},
        act="f16",
        wt="f16",
        widths=(1, 8, 16),
        entries=("apply",),
    ),
    Case(
        "mixture_f32",
        program=MIXTURE,
        sizes={"num_experts": 48, "n_group": 6, "topk_group": 3, "hidden_size": 120},
        switches=SIGMOID,
        act="f32",
        wt="f32",
        widths=(1, 3, 64),
        entries=("apply",),
    ),
    # ... and in their drafters.
    Case("moe_bf16", "qwen3_next_mtp", EXPERTS, widths=(1, 3, 8), entries=MASKED, program="mtp_moe"),
    # Against values that other people's code computed; widths 1 and 3 are what the cases call.
    *(
        Case(f"fixture_{name}", name, None, switches, "f32", None, "f32", (1, 3), (16,), program=program)
        for name, switches, program in (
            ("qwen3_dense_mtp", {}, "mtp_dense"),
            ("qwen3_5_mtp", {}, "mtp_dense"),
            ("mimo_mtp", {"mask_first": False}, "mtp_dense"),
            ("qwen3_next_mtp", {}, "mtp_moe"),
            ("glm4_moe_mtp", {}, "mtp_moe"),
            ("eagle1_llama", {}, "eagle1"),
            ("deepseek_v3_mtp", {}, "mtp_mla"),
        )
    ),
    # Latent attention, with a dense FFN: on warpgroups, all heads of blocks or some; plain.
    Case("latent_bf16", sizes={"num_attention_heads": 128}, widths=(1, 3, 8), entries=STEP, **LATENT),
    Case(
        "latent_f16",
        sizes={"num_attention_heads": 24, "v_head_dim": 64, "head_dim": 64},
        act="f16",
        wt="f16",
        kv="f16",
        widths=(1, 2),
        entries=STEP,
        **LATENT,
    ),
    Case("latent_fp8", storage={"*": "fp8 128x128"}, widths=(1, 8), entries=STEP, **LATENT),
    Case("latent_odd_storage", sizes=SMALL_LATENT, storage=SIBLINGS, widths=(2,), context_rows=(5,), entries=STEP, **LATENT),
    Case("latent_odd_f32", sizes=SMALL_LATENT, act="f32", wt="f32", kv="f32", widths=(1, 3), context_rows=(5,), **LATENT),
    # Programs that are not MTP heads: their functions are called as they are (test_direct.py), and the proposer drives those of
    # the fixtures (test_families.py).
    *(
        Case(f"direct_fixture_{model}", model, None, {}, "f32", None, "f32", widths, rows, entries, program, {}, block)
        for model, program, widths, rows, block, entries in (
            ("dflash_qwen3", "dflash", (1, 4), (8, 35), 8, ("draft", "logits", "context")),
            ("eagle3_llama", "eagle3", (1, 3), (16,), 1, ("first", "draft", "first_masked", "draft_masked", "context")),
            ("medusa1", "medusa", (1, 3), (16,), 1, ("draft", "logits")),
        )
    ),
    Case(
        "direct_dflash",
        "dflash_qwen3",
        DFLASH_SIZES,
        widths=(1, 3),
        context_rows=(16, 48),
        entries=STEP,
        program="dflash",
        block=16,
    ),
    # Blocks that fill a tile of rows, and more; two queries share a KV head.
    Case(
        "direct_dflash_blocks",
        "dflash_qwen3",
        {**DFLASH_SIZES, "num_key_value_heads": 4},
        act="f16",
        wt="f16",
        kv="f16",
        widths=(2, 8, 10),
        context_rows=(128,),
        entries=STEP,
        program="dflash",
        block=16,
    ),
    # Heads of 64, whose queries stay in shared memory.
    Case(
        "direct_dflash_narrow",
        "dflash_qwen3",
        {**DFLASH_SIZES, "head_dim": 64},
        widths=(1, 3),
        context_rows=(16,),
        entries=STEP,
        program="dflash",
        block=16,
    ),
    # Layers that see a window: with causal blocks beside one that sees all, and without, where queries stay in shared memory; of
    # heads for which there is no kernel of blocks; by plain kernels.
    *(
        Case(
            f"direct_dflash_window_{name}",
            "dflash_qwen3",
            {**DFLASH_SIZES, **WINDOW, **sizes},
            act=dtype,
            wt=dtype,
            kv=dtype,
            widths=widths,
            context_rows=(16,),
            entries=STEP,
            program="dflash",
            block=16,
        )
        for name, dtype, widths, sizes in (
            ("mixed", "bf16", (1, 3), {"sliding_window": 50, "layer_types": ["sliding_attention", "full_attention"]}),
            ("blocks", "f16", (1, 3), {"sliding_window": 20, "is_causal": False, "head_dim": 64}),
            ("paged", "bf16", (2,), {"sliding_window": 33, "head_dim": 256}),
            ("plain", "f32", (2,), {"sliding_window": 20, "head_dim": 24, "num_attention_heads": 4}),
        )
    ),
    # Biases before the norms of heads, of context rows, too.
    Case(
        "direct_dflash_biases",
        "dflash_qwen3",
        {**DFLASH_SIZES, "attention_bias": True},
        widths=(1, 3),
        context_rows=(16, 64),
        entries=STEP,
        program="dflash",
        block=16,
    ),
    # Rows that no power of two divides, each of several columns a thread; down in parts that are joined at one block, too.
    Case(
        "direct_dflash_wide",
        "dflash_qwen3",
        {**DFLASH_SIZES, "hidden_size": 2560, "intermediate_size": 9216},
        widths=(1, 2, 8),
        context_rows=(64,),
        entries=STEP,
        program="dflash",
        block=16,
    ),
    # Eight query heads over each KV head: 128 queries a block, whose thread blocks have a processor each.
    Case(
        "direct_dflash_heads",
        "dflash_qwen3",
        {**DFLASH_SIZES, "num_attention_heads": 16},
        widths=(1, 3),
        context_rows=(16,),
        entries=STEP,
        program="dflash",
        block=16,
    ),
    Case("direct_eagle3", "eagle3_llama", EAGLE3_SIZES, widths=(1, 8), entries=("first", *STEP), program="eagle3"),
    Case(
        "direct_eagle3_deep",
        "eagle3_llama",
        {**EAGLE3_SIZES, "num_hidden_layers": 2},
        widths=(1, 3),
        entries=("first", *STEP),
        program="eagle3",
    ),
    # Of another width than their target, with biases and a norm of each of its hiddens; with one of all, and two layers.
    *(
        Case(
            f"direct_eagle3_{name}",
            "eagle3_llama",
            {**EAGLE3_SIZES, **sizes},
            widths=(1, 3, 8),
            context_rows=(16,),
            entries=("first", *STEP),
            program="eagle3",
        )
        for name, sizes in (
            ("narrow", {"target_hidden_size": 1536, "attention_bias": True, "fc_norm": True}),
            ("normed", {"target_hidden_size": 512, "norm_before_fc": True, "num_hidden_layers": 2}),
        )
    ),
    Case("direct_medusa", "medusa1", MEDUSA_SIZES, widths=(1, 8, 40), entries=("draft", "logits"), program="medusa"),
    # Latent attention alone, where a few cache rows can be told from all others.
    *(
        Case(
            f"direct_latent_{dtype}",
            str(MEASURE / "latent_attend_family.yaml"),
            {"num_attention_heads": heads, "head_dim": 128},
            act=dtype,
            wt=dtype,
            kv=dtype,
            widths=(1, 2, 5),
            entries=("attend",),
            program=str(MEASURE / "latent_attend.yaml"),
        )
        for dtype, heads in (("bf16", 128), ("f16", 24), ("f32", 8))
    ),
)
_SHAPE = SHAPES["dense8b"]
DENSE8B = Case(
    "dense8b", sizes=_SHAPE.config, widths=_SHAPE.widths, context_rows=_SHAPE.context_rows, entries=_SHAPE.entries or STEP
)


def program_of(case: Case, folder: Path) -> tuple[str | Path, dict[str, Any]]:
    """The program and the options that `bind` and `compile` take: with storage, a program that is written to `folder`, whose
    switches are decided."""
    options = options_of(case, folder)
    program = state_storage(case.program, case.storage, folder / f"{case.name}.yaml", **options)
    return program, options | ({"switches": {}} if case.storage else {})


def options_of(case: Case, folder: Path) -> dict[str, Any]:
    """Arguments of `bind` and `compile` that both take."""
    model, family, more = FIXTURES / case.model, case.model, {}
    if case.program in (PRODUCTS, MIXTURE):
        family = case.program.replace(".yaml", "_family.yaml")
        model = folder / f"{case.name}.json"
        model.write_text(json.dumps({**default_config(family), **(case.sizes or {})}))
    elif case.sizes is None and (model / "target").is_dir() and case.model != "medusa1":
        more["target_model"] = model / "target"
    elif case.sizes is not None:
        example = case.model.endswith(".yaml") or not (model / "config.json").is_file() or case.model in OF_EXAMPLES
        config = default_config(case.model) if example else json.loads((model / "config.json").read_text())
        inner = next((config[key] for key in ("transformer_layer_config", "text_config") if key in config), config)
        inner.update(case.sizes if example else {**SIZES, **case.sizes})
        model = folder / f"{case.name}.json"
        model.write_text(json.dumps(config))
    dtypes = {"act": case.act, "kv": case.kv, "wt": case.wt}
    return {"model": model, "family": family, "switches": dict(case.switches), **dtypes, **more}


def circuit_of(case: Case) -> Circuit:
    """What a case compiles: in its dtypes, its storage of weights and its vocabulary."""
    with tempfile.TemporaryDirectory() as folder:
        program, options = program_of(case, Path(folder))
        circuit = bind(program, **options).circuit
    return circuit if case.tokens is None else restrict_vocabulary(circuit, case.tokens)[0]


def plans_of(case: Case, target: Target = TARGET) -> list[Plan]:
    circuit = circuit_of(case)
    rules = load_schedule(target.kind)
    pieces = work_list(circuit, case.entries, case.widths, case.context_rows)
    plans = [plan_piece(Run(), circuit, entry, rows, target.of_plans, rules) for entry, rows in pieces]
    return [plan for plan in plans if isinstance(plan, Plan)]


def inputs_digest(case: Case) -> str:
    """A digest of all that the generated text depends on: circuits, plans, what turns them into text, and TVM.

    Much cheaper than the text. What else the package does reaches the text through circuits and plans.
    """
    package = Path(circuitgraph.__file__).parent
    own = ("kernels/base.py", "lower.py", "plan/ir.py", "circuit/ir.py", "circuit/types.py")
    files = [*sorted((package / "kernels" / "cuda").glob("*.py")), *(package / name for name in own)]
    parts = [tvm.__version__, *(file.read_text() for file in files)]
    for plan in plans_of(case):
        parts += [format_circuit(plan.circuit), format_plan(plan), str(plan.scratch)]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]


def source_digests(case: Case) -> dict[str, str]:
    """`digests` of what is generated for a case now: what tests/gpu/record.json pins."""
    backend = make_backend(TARGET)
    return digests(backend.sources(backend.lower(plans_of(case))))


def all_source_digests(cases: Sequence[Case] = CASES) -> dict[str, dict[str, str]]:
    """`source_digests` by case name, made in as many processes as there are cores: half the time goes by in Python."""
    if len(cases) < 2:
        return {case.name: source_digests(case) for case in cases}
    with ProcessPoolExecutor(os.cpu_count(), mp_context=get_context("spawn")) as pool:
        names = [case.name for case in cases]
        return dict(zip(names, pool.map(source_digests, cases), strict=True))


def digests(sources: Iterable[str]) -> dict[str, str]:
    """A digest of the kernels of every host function, by its name, and one of the host code of all units."""
    texts: dict[str, str] = {"host": ""}
    for source in sources:
        device, host = source.split(HOST, 1)
        texts["host"] += host
        for definition in re.split(r'(?=^extern "C" __global__ )', device, flags=re.M)[1:]:
            name = re.search(r"(\w+)_kernel(?:_\d+)?\(", definition)
            assert name is not None, definition[:200]
            texts[name[1]] = texts.get(name[1], "") + definition.rstrip()
    return {name: hashlib.sha256(text.encode()).hexdigest()[:16] for name, text in sorted(texts.items())}


def build(case: Case, out: Path) -> Path:
    """Compile one case to out/<name>, with the digests of its programs beside it."""
    with tempfile.TemporaryDirectory() as folder:
        program, options = program_of(case, Path(folder))
        compile(
            program,
            out=out / case.name,
            target=str(TARGET),
            widths=case.widths,
            context_rows=case.context_rows,
            entries=case.entries,
            overwrite=True,
            draft_vocab=case.tokens,
            **options,
        )
    units = sorted((out / case.name / "src").glob("kernels.*.cu"), key=lambda file: int(file.suffixes[-2][1:]))
    sources = [file.read_text() for file in units]
    facts = {"inputs": inputs_digest(case), "programs": digests(sources)}
    (out / f"{case.name}.digests.json").write_text(json.dumps(facts, indent=1))
    return out / case.name


def build_all(out: Path, names: Sequence[str]) -> Iterator[str]:
    out.mkdir(parents=True, exist_ok=True)
    for case in (*CASES, DENSE8B):
        if not names or case.name in names:
            build(case, out)
            yield case.name


def fetch_wheels(out: Path, python: str) -> list[str]:
    """Download the tvm-ffi that artifacts were built with, for the GPU machine's Python, and return the file names."""
    command = [sys.executable, "-m", "pip", "-q", "--disable-pip-version-check", "download", "--no-deps", "-d", str(out)]
    command += ["--only-binary=:all:", "--implementation", "cp", "--python-version", python]
    for platform in ("manylinux_2_28_x86_64", "manylinux_2_24_x86_64", "manylinux2014_x86_64"):
        command += ["--platform", platform]
    subprocess.run([*command, f"apache-tvm-ffi=={version('apache-tvm-ffi')}"], check=True)
    return sorted(file.name for file in out.glob("*.whl"))


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.gpu.pack", description=__doc__)
    parser.add_argument("out", type=Path, help="made anew, unless cases are named")
    parser.add_argument("names", nargs="*", help="cases; all when left out")
    parser.add_argument("--python", default="3.12", help="version of the GPU machine's Python, for the wheel (3.12)")
    options = parser.parse_args()
    if not options.names:
        shutil.rmtree(options.out, ignore_errors=True)
    for name in build_all(options.out, options.names):
        print(name, flush=True)
    running = f"{sys.version_info.major}.{sys.version_info.minor}"
    for python in dict.fromkeys((options.python, running)):
        wheels = fetch_wheels(options.out / "wheels", python)
    print("wheels:", *wheels)


if __name__ == "__main__":
    main()
