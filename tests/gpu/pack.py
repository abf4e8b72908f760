"""Compiles the artifacts that tests/gpu runs: `python -m tests.gpu.pack build/gpu [name ...]`.

Needs nvcc and no GPU. Shapes are the smallest that reach what a case is about; `CASES` says which kernels that is.
"""

from __future__ import annotations

import hashlib
import json
import re
import shutil
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import tvm

import circuitgraph
from circuitgraph.checkpoint import bind
from circuitgraph.kernels.cuda.backend import make_backend
from circuitgraph.pipeline import Run, compile, plan_piece, work_list
from circuitgraph.plan.ir import Plan
from circuitgraph.plan.schedule import load_schedule
from circuitgraph.plan.text import format_plan
from circuitgraph.target import Target
from tests.fixture_cases import FIXTURES

HOST = "#include <tvm/ffi/c_api.h>"
"""Where the host code of a generated unit begins."""

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

    sizes: over `SIZES`; None takes the fixture as it is, whose weights are its own.
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


ODD = {"hidden_size": 120, "head_dim": 24, "intermediate_size": 88, "vocab_size": 331}
STEP = ("draft", "context")

CASES = (
    Case("few_bf16", widths=(1, 2, 3, 5, 8), entries=STEP),
    Case("more_bf16", widths=(1, 9, 16, 17, 32, 33, 64), context_rows=(64, 200), entries=STEP),
    Case("aligned_f16", act="f16", wt="f16", kv="f16", widths=(1, 9, 33), entries=STEP),
    # A gate on attention, norms around zero, partial RoPE by pairs, heads of 256; the residual sum is recycled.
    Case(
        "gated_bf16",
        "qwen3_5_mtp",
        {"head_dim": 256, "num_attention_heads": 4},
        {"recycle": "pre_norm", "rope_style": "interleaved"},
        widths=(1, 9),
    ),
    # Biases, the mask at the first position, RoPE at the hidden's position.
    Case("biased_bf16", "mimo_mtp", {}, {"rope_position": "hidden", "mask_first": True}, widths=(1, 3), entries=STEP),
    # One step of 32 columns a warp, heads of 64.
    Case("narrow_bf16", sizes={"hidden_size": 512, "head_dim": 64, "intermediate_size": 512, "vocab_size": 2048}, widths=(1, 3)),
    # Columns in parts over blocks, and a vocabulary cut inside a tile.
    Case(
        "wide_bf16",
        sizes={"hidden_size": 4096, "num_attention_heads": 4, "intermediate_size": 12288, "vocab_size": 1003},
        widths=(1, 8, 16),
        context_rows=(16,),
        entries=STEP,
    ),
    # What tensor cores refuse.
    Case("odd_bf16", sizes=ODD, widths=(1, 5), context_rows=(5,), entries=STEP),
    Case("odd_f32", sizes=ODD, act="f32", wt="f32", kv="f32", widths=(1, 3, 33), context_rows=(5,)),
    Case("mixed_f32_bf16", act="f32", kv="f32", widths=(1, 2), entries=STEP),
    # Against values that other people's code computed; widths 1 and 3 are what the cases call.
    *(
        Case(f"fixture_{name}", name, None, switches, "f32", None, "f32", (1, 3), (16,))
        for name, switches in (("qwen3_dense_mtp", {}), ("qwen3_5_mtp", {}), ("mimo_mtp", {"mask_first": False}))
    ),
)
DENSE8B = Case(
    "dense8b",
    sizes={
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "vocab_size": 151936,
    },
    widths=(1, 2, 4, 8, 16),
    context_rows=(64, 4096),
    entries=("draft", "context"),
)


def options_of(case: Case, folder: Path) -> dict[str, Any]:
    """Arguments of `bind` and `compile` that both take."""
    model = FIXTURES / case.model
    if case.sizes is not None:
        config = json.loads((model / "config.json").read_text())
        inner = next((config[key] for key in ("transformer_layer_config", "text_config") if key in config), config)
        inner.update({**SIZES, **case.sizes})
        model = folder / f"{case.name}.json"
        model.write_text(json.dumps(config))
    return {"model": model, "family": case.model, "switches": dict(case.switches), "act": case.act, "kv": case.kv, "wt": case.wt}


def plans_of(case: Case) -> list[Plan]:
    with tempfile.TemporaryDirectory() as folder:
        circuit = bind("mtp_dense", **options_of(case, Path(folder))).circuit
    rules = load_schedule("cuda")
    pieces = work_list(circuit, case.entries, case.widths, case.context_rows)
    plans = [plan_piece(Run(), circuit, entry, rows, "cuda", rules) for entry, rows in pieces]
    return [plan for plan in plans if isinstance(plan, Plan)]


def inputs_digest(case: Case) -> str:
    """A digest of all that the generated text depends on: plans, templates, and TVM. Much cheaper than the text."""
    package = Path(circuitgraph.__file__).parent
    files = [*sorted((package / "kernels" / "cuda").glob("*.py")), package / "lower.py"]
    parts = [tvm.__version__, *(file.read_text() for file in files), *(format_plan(plan) for plan in plans_of(case))]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]


def source_digests(case: Case) -> dict[str, str]:
    """`digests` of what is generated for a case now: what tests/gpu/record.json pins."""
    backend = make_backend(Target("cuda", "sm_90a"))
    return digests(backend.source(backend.lower(plans_of(case))))


def digests(source: str) -> dict[str, str]:
    """A digest of the kernels of every host function, by its name, and one of the host code."""
    device, host = source.split(HOST, 1)
    texts: dict[str, str] = {"host": host}
    for definition in re.split(r'(?=^extern "C" __global__ )', device, flags=re.M)[1:]:
        name = re.search(r"(\w+)_kernel(?:_\d+)?\(", definition)
        assert name is not None, definition[:200]
        texts[name[1]] = texts.get(name[1], "") + definition
    return {name: hashlib.sha256(text.encode()).hexdigest()[:16] for name, text in sorted(texts.items())}


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
    source = (out / case.name / "src" / "kernels.cu").read_text()
    facts = {"inputs": inputs_digest(case), "programs": digests(source)}
    (out / f"{case.name}.digests.json").write_text(json.dumps(facts, indent=1))
    return out / case.name


def build_all(out: Path, names: Sequence[str]) -> Iterator[str]:
    out.mkdir(parents=True, exist_ok=True)
    for case in (*CASES, DENSE8B):
        if not names or case.name in names:
            build(case, out)
            yield case.name


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    if len(sys.argv) == 2:
        shutil.rmtree(folder, ignore_errors=True)
    for name in build_all(folder, sys.argv[2:]):
        print(name, flush=True)
