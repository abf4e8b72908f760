"""Compiles the artifacts that tests/gpu runs: `python -m circuitgraph.kernels.cuda.pack_tests build/gpu [name ...]`.

Needs nvcc and no GPU. Shapes are the smallest that reach what a case is about; `CASES` says which kernels that is.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import tvm

from ...checkpoint import bind
from ...pipeline import Run, compile, plan_piece, work_list
from ...plan.ir import Plan
from ...plan.schedule import load_schedule
from ...target import Target
from .backend import make_backend

WIDTHS = (1, 2, 3, 5, 8, 9, 16, 17, 32, 33, 64)
BASE: dict[str, Any] = {
    "attention_bias": False,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 1024,
    "intermediate_size": 1536,
    "max_position_embeddings": 40960,
    "model_type": "qwen3",
    "num_attention_heads": 8,
    "num_hidden_layers": 1,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-06,
    "rope_theta": 1000000,
    "tie_word_embeddings": False,
    "vocab_size": 2112,
}


@dataclass(frozen=True)
class Case:
    """One artifact: a config over `BASE`, bound by `family` with switches, in some dtypes and numbers of rows."""

    name: str
    family: str = "qwen3_dense_mtp"
    config: Mapping[str, Any] = field(default_factory=dict)
    switches: Mapping[str, Any] = field(default_factory=dict)
    act: str = "bf16"
    wt: str = "bf16"
    kv: str = "bf16"
    widths: Sequence[int] = (1, 4)
    context_rows: Sequence[int] = (4,)
    entries: Sequence[str] = ("draft", "logits", "context")


GATED = {"attention_gate": True, "norm": "zero_centred", "concat": "embed_first"}
ODD = {"hidden_size": 120, "head_dim": 24, "intermediate_size": 88, "vocab_size": 331}
CASES = (
    Case("aligned_bf16", widths=WIDTHS, context_rows=(4, 64), entries=("draft", "context")),
    Case("aligned_f16", act="f16", wt="f16", kv="f16", widths=(2, 16)),
    # Every switch at its other value; 16 query heads of 256 over 2, partial RoPE by pairs.
    Case(
        "switches_bf16",
        config={"head_dim": 256, "partial_rotary_factor": 0.25},
        switches={
            **GATED,
            "concat": "hidden_first",
            "fc_bias": True,
            "mask_first": True,
            "output_bias": True,
            "qkv_bias": True,
            "recycle": "pre_norm",
            "rope_position": "hidden",
            "rope_style": "interleaved",
        },
        widths=(1, 9),
    ),
    # One step of 32 columns a warp, heads of 64; a vocabulary that no tile divides.
    Case("narrow_bf16", config={"hidden_size": 512, "head_dim": 64, "intermediate_size": 512, "vocab_size": 2048}, widths=(1, 3)),
    # Columns in parts over blocks, and a vocabulary cut inside a tile.
    Case(
        "wide_bf16",
        config={"hidden_size": 4096, "head_dim": 128, "num_attention_heads": 4, "intermediate_size": 12288, "vocab_size": 1003},
        widths=(1, 8, 16),
        context_rows=(16,),
        entries=("draft", "context"),
    ),
    # What tensor cores refuse.
    Case("odd_bf16", config=ODD, widths=(1, 5), context_rows=(5,)),
    Case("odd_f32", config=ODD, act="f32", wt="f32", kv="f32", widths=(1, 3, 33), context_rows=(5,)),
    Case("mixed_f32_bf16", act="f32", kv="f32", widths=(2,)),
)
DENSE8B = Case(
    "dense8b",
    config={
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "vocab_size": 151936,
    },
    widths=(1, 2, 4, 8, 16),
    context_rows=(64,),
    entries=("draft", "context"),
)


def config_of(case: Case) -> dict[str, Any]:
    """A config.json as the family's checkpoints have it."""
    return {
        "architectures": ["MTPDraftModel"],
        "num_nextn_predict_layers": 1,
        "speculators_model_type": "mtp",
        "transformer_layer_config": {**BASE, **case.config},
    }


def options_of(case: Case, folder: Path) -> dict[str, Any]:
    """Arguments of `bind` and `compile` that both take."""
    path = folder / f"{case.name}.json"
    path.write_text(json.dumps(config_of(case)))
    return {"model": path, "family": case.family, "switches": dict(case.switches), "act": case.act, "kv": case.kv, "wt": case.wt}


def plans_of(case: Case) -> list[Plan]:
    with tempfile.TemporaryDirectory() as folder:
        circuit = bind("mtp_dense", **options_of(case, Path(folder))).circuit
    rules = load_schedule("cuda")
    pieces = work_list(circuit, case.entries, case.widths, case.context_rows)
    plans = [plan_piece(Run(), circuit, entry, rows, "cuda", rules) for entry, rows in pieces]
    return [plan for plan in plans if isinstance(plan, Plan)]


def source_digests(case: Case) -> dict[str, str]:
    """The digest of the generated CUDA of every program of a case, by symbol: what tests/gpu/record.json pins."""
    backend = make_backend(Target("cuda", "sm_90a"))
    return {plan.symbol: _digest(backend.source(backend.lower([plan]))) for plan in plans_of(case)}


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def build(case: Case, out: Path) -> Path:
    """Compile one case to out/<name>, with the digests of its programs beside it."""
    with tempfile.TemporaryDirectory() as folder:
        compile(
            "mtp_dense",
            out=out / case.name,
            target="cuda:sm_90a",
            widths=case.widths,
            context_rows=case.context_rows,
            entries=case.entries,
            overwrite=True,
            **options_of(case, Path(folder)),
        )
    (out / f"{case.name}.digests.json").write_text(json.dumps(source_digests(case), indent=1))
    return out / case.name


def build_all(out: Path, names: Sequence[str]) -> Iterator[str]:
    out.mkdir(parents=True, exist_ok=True)
    for case in (*CASES, DENSE8B):
        if not names or case.name in names:
            build(case, out)
            yield case.name
    (out / "tvm_version.txt").write_text(tvm.__version__ + "\n")


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    if len(sys.argv) == 2:
        shutil.rmtree(folder, ignore_errors=True)
    for name in build_all(folder, sys.argv[2:]):
        print(name, flush=True)
