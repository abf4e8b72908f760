"""Drafters by size alone, for measuring without a checkpoint: `--shape dense8b`. Their weights are random.

python -m circuitgraph.measure.shapes build/gpu dense2b eagle3-8b attention    # compile, here and without a GPU
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatch
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import ArtifactError, CircuitError, Fault, did_you_mean

if TYPE_CHECKING:
    from ..circuit.ir import Circuit
    from ..pipeline import Observer

HERE = Path(__file__).parent
DFLASH = {"mask_token_id": 151669, "target_layer_ids": [1, 9, 17, 25, 33]}
WINDOWS = {"layer_types": ["sliding_attention"] * 4 + ["full_attention"], "sliding_window": 4096, "use_sliding_window": True}


@dataclass(frozen=True)
class Shape:
    """What to compile. `config` is over the example of `family`, in the section that has `hidden_size`. `act` is the type
    of activations, weights and cache alike; `storage`: of quantised weights, see `state_storage`."""

    name: str
    program: str
    family: str
    config: Mapping[str, Any]
    widths: Sequence[int] = (1, 2, 4, 8, 16)
    context_rows: Sequence[int] = (64, 1024)
    entries: Sequence[str] | None = None
    act: str = "bf16"
    switches: Mapping[str, Any] = field(default_factory=dict)
    storage: Mapping[str, str] = field(default_factory=dict)

    def pieces(self, circuit: Circuit, widths: Sequence[int] | None = None) -> list[tuple[str, int]]:
        """(entry, rows) of every program."""
        from ..pipeline import work_list

        return work_list(circuit, self.entries, widths or self.widths, self.context_rows)

    def full_config(self) -> dict[str, Any]:
        """A config.json of the family in this size."""
        from ..checkpoint import default_config

        config = json.loads(json.dumps(default_config(self.family)))
        nested = [value for value in config.values() if isinstance(value, dict) and "hidden_size" in value]
        (nested or [config])[0].update(self.config)
        return config


def _dense(name: str, hidden: int, heads: int, kv_heads: int, ffn: int, dim: int, vocab: int, **more: Any) -> Shape:
    config = {
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": dim,
        "intermediate_size": ffn,
        "vocab_size": vocab,
        "max_position_embeddings": 40960,
    }
    return Shape(name, "mtp_dense", "qwen3_dense_mtp", config, entries=("draft", "context"), **more)


SHAPES = {
    shape.name: shape
    for shape in (
        _dense("dense8b", 4096, 32, 8, 12288, 128, 151936),
        _dense("dense2b", 2048, 16, 4, 6144, 128, 151936),
        # The head is 72 % of the bytes of a step.
        *(
            _dense(f"dense8b-head-{name}", 4096, 32, 8, 12288, 128, 151936, storage={"lm_head": storage})
            for name, storage in (("fp8", "fp8 per row"), ("int8", "int8 per row"), ("nvfp4", "nvfp4"))
        ),
        *(
            _dense(f"dense8b-{name}", 4096, 32, 8, 12288, 128, 151936, storage={"*": storage})
            for name, storage in (("fp8", "fp8 128x128"), ("nvfp4", "nvfp4"), ("mxfp4", "mxfp4"))
        ),
        # Small enough to compile and run anywhere: for trying the command.
        _dense("tiny", 128, 4, 2, 256, 32, 512, widths=(1, 2), context_rows=(16,)),
        # The MTP layer of Qwen3.5-27B: a gate beside each query head, 24 heads of 256 over 4.
        Shape(
            "qwen3.5-27b",
            "mtp_dense",
            "qwen3_5_mtp",
            {
                "hidden_size": 5120,
                "num_attention_heads": 24,
                "num_key_value_heads": 4,
                "intermediate_size": 17408,
                "vocab_size": 248320,
                "max_position_embeddings": 40960,
            },
            entries=("draft", "context"),
        ),
        # The MTP layers of Qwen3-Next-80B-A3B and of GLM-4.5-Air: 3.2 and 4.4 GB of experts, of which a few are read.
        Shape(
            "qwen3-next-80b",
            "mtp_moe",
            "qwen3_next_mtp",
            {"num_experts": 512, "vocab_size": 151936},
            context_rows=(64,),
            entries=("draft", "context"),
        ),
        Shape(
            "glm-4.5-air",
            "mtp_moe",
            "glm4_moe_mtp",
            {"n_routed_experts": 128, "vocab_size": 151552},
            context_rows=(64,),
            entries=("draft", "context"),
        ),
        # EAGLE-3 of Llama-3.1-8B.
        Shape(
            "eagle3-8b",
            "eagle3",
            "eagle3_llama",
            {
                "hidden_size": 4096,
                "num_attention_heads": 32,
                "num_key_value_heads": 8,
                "head_dim": 128,
                "intermediate_size": 14336,
                "vocab_size": 128256,
                "draft_vocab_size": 32000,
            },
            entries=("first", "draft", "context"),
        ),
        # DFlash of Qwen3-8B: five layers, blocks of 16 rows.
        Shape(
            "dflash-qwen3-8b",
            "dflash",
            "dflash_qwen3",
            {"num_hidden_layers": 5, "vocab_size": 151936, "dflash_config": DFLASH},
            context_rows=(16, 128),
            entries=("draft", "context"),
        ),
        # The same with a window in four of its layers, as DFlash of Qwen3.6 has: for long contexts.
        Shape(
            "dflash-windows",
            "dflash",
            "dflash_qwen3",
            {"num_hidden_layers": 5, "vocab_size": 151936, "dflash_config": DFLASH, **WINDOWS},
            widths=(1, 4),
            context_rows=(16,),
            entries=("draft", "context"),
        ),
        # Medusa-1 of Vicuna-7B.
        Shape("medusa1-7b", "medusa", "medusa1", {"vocab_size": 32000}, context_rows=(), entries=("draft",)),
        # DeepSeek-V3's own MTP layer: in bf16, and as it is published, in fp8 but for its head, its projection and its router.
        *(
            Shape(
                name,
                "mtp_mla",
                "deepseek_v3_mtp",
                {"vocab_size": 129280, "n_routed_experts": 256},
                context_rows=(64,),
                entries=("draft", "context"),
                storage=storage,
            )
            for name, storage in (
                ("deepseek-v3", {}),
                ("deepseek-v3-fp8", {"lm_head": "", "fc": "", "*": "fp8 128x128"}),
            )
        ),
        # One layer's attention at the heads of both 8B shapes.
        Shape(
            "attention",
            str(HERE / "attend.yaml"),
            str(HERE / "attend_family.yaml"),
            {},
            widths=(1, 8),
            context_rows=(),
            entries=("attend",),
        ),
        # One layer's latent attention at DeepSeek-V3's heads.
        Shape(
            "latent-attention",
            str(HERE / "latent_attend.yaml"),
            str(HERE / "latent_attend_family.yaml"),
            {},
            widths=(1, 2, 4, 8),
            context_rows=(),
            entries=("attend",),
        ),
    )
}


def find_shape(name: str) -> Shape:
    """Raises CircuitError for a name that is not in SHAPES."""
    if name not in SHAPES:
        hint = f"{did_you_mean(name, SHAPES)} There are: {', '.join(SHAPES)}."
        raise CircuitError(Fault(f"no shape '{name}'", subject="--shape", hint=hint))
    return SHAPES[name]


def state_storage(program: str | Path, storage: Mapping[str, str], file: Path, **options: Any) -> str | Path:
    """A program with quantised weights, written to `file`; without any, the program itself.

    Args:
        storage: what programs say of it (`Storage.parse`), by patterns of names (`fnmatch`), of which the first that fits a
            matrix of a product or of experts counts; empty: as it is.
        options: of `bind`.
    """
    from ..checkpoint import bind
    from ..circuit.ir import Storage
    from ..circuit.text import format_circuit

    if not storage:
        return program
    circuit = bind(program, **options).circuit
    first = {"linear": slice(1, 2), "head_linear": slice(1, 2), "experts": slice(3, None)}
    names = dict.fromkeys(name for node in circuit.nodes if node.op in first for name in node.inputs[first[node.op]])
    found = {name: next((text for pattern, text in storage.items() if fnmatch(name, pattern)), "") for name in names}
    stated = circuit.with_storage({name: Storage.parse(text) for name, text in found.items() if text})
    file.write_text(format_circuit(stated))
    return file


def compile_shape(
    shape: Shape,
    out: Path,
    target: str,
    *,
    widths: Sequence[int] | None = None,
    overwrite: bool = False,
    observer: Observer | None = None,
) -> Path:
    """Compile a shape to the artifact `out`. Raises CircuitgraphError as `pipeline.compile`."""
    from ..pipeline import compile

    out.parent.mkdir(parents=True, exist_ok=True)
    config = out.parent / f"{shape.name}.config.json"
    config.write_text(json.dumps(shape.full_config()))
    options: dict[str, Any] = {"model": config, "family": shape.family, "switches": dict(shape.switches)}
    options |= {"act": shape.act, "wt": shape.act, "kv": shape.act}
    compile(
        state_storage(shape.program, shape.storage, out.parent / f"{shape.name}.program.yaml", **options),
        out=out,
        target=target,
        widths=widths or shape.widths,
        context_rows=shape.context_rows,
        entries=shape.entries,
        overwrite=overwrite,
        observer=observer,
        **options,
    )
    return out


def target_here() -> str:
    """The GPU of this machine, as a compile target. Raises CircuitError when there is none."""
    import torch

    if not torch.cuda.is_available():
        hint = "Say --target cpu, or run it on a machine with a GPU and a CUDA build of torch."
        raise CircuitError(Fault("there is no GPU here to compile the shape for", subject="--shape", hint=hint))
    major, minor = torch.cuda.get_device_capability()
    return f"cuda:sm_{major}{minor}" + ("a" if (major, minor) == (9, 0) else "")


def check_shape(shape: Shape, artifact: Path) -> None:
    """Raises ArtifactError when the artifact is not of this shape."""
    from ..artifact.store import read_artifact

    manifest = read_artifact(artifact).manifest
    config = shape.full_config()
    inner = next((value for value in config.values() if isinstance(value, dict) and "hidden_size" in value), config)
    wanted = f"{Path(shape.program).stem}, hidden {inner['hidden_size']}, vocabulary {inner['vocab_size']}"
    got = f"{manifest.program}, hidden {manifest.model.hidden_size}, vocabulary {manifest.model.vocab_size}"
    if wanted != got:
        hint = "Leave --shape out, or OUT: then the shape is compiled."
        fault = Fault("is of another shape", where=str(artifact), subject=shape.name, expected=wanted, got=got, hint=hint)
        raise ArtifactError(fault)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m circuitgraph.measure.shapes", description="Compile shapes to artifacts.")
    parser.add_argument("folder", type=Path)
    parser.add_argument("names", nargs="+", choices=SHAPES)
    parser.add_argument("--target", default="cuda:sm_90a")
    options = parser.parse_args(arguments)
    for name in options.names:
        print(compile_shape(SHAPES[name], options.folder / name, options.target, overwrite=True), flush=True)


if __name__ == "__main__":
    main()
