"""Binding: strict accounting of a checkpoint's tensors, and every refusal word by word."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from circuitgraph.artifact.manifest import Build, Manifest, Target
from circuitgraph.artifact.pack import make_manifest
from circuitgraph.artifact.store import write_artifact
from circuitgraph.checkpoint import bind, default_config, load_circuit, load_family, shipped_families
from circuitgraph.circuit.text import format_circuit
from circuitgraph.errors import CheckpointError, CircuitgraphError, ProgramError, RuntimeUseError
from circuitgraph.interpreter import interpret
from circuitgraph.runtime import bind_weights
from tests.circuits import random_cache
from tests.fixture_cases import FIXTURES

Tensors = dict[str, torch.Tensor]
LAYER = "mtp_layers.0."
BUILDS = [Build(Target("cpu", "x86_64", "generic"), "lib/kernels.so", {})]


@pytest.fixture(autouse=True)
def in_tmp(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Messages name paths, so work where they are short."""
    monkeypatch.chdir(tmp_path)


def edited(
    name: str, edit: Callable[[Tensors], object] = lambda tensors: None, config: dict | None = None, folder: str = "m"
) -> str:
    """A copy of a fixture, called `m`, with other tensors and config keys."""
    shutil.copytree(FIXTURES / name, folder)
    tensors = load_file(f"{folder}/model.safetensors")
    edit(tensors)
    save_file(tensors, f"{folder}/model.safetensors")
    data = json.loads(Path(f"{folder}/config.json").read_text())
    Path(f"{folder}/config.json").write_text(json.dumps({**data, **(config or {})}))
    return folder


def refusal(call: Callable[[], object], kind: type[CircuitgraphError] = CheckpointError) -> str:
    with pytest.raises(kind) as caught:
        call()
    return str(caught.value)


# -- what is bound -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["qwen3_dense_mtp", "qwen3_5_mtp", "mimo_mtp"])
def test_auto_recognises_the_family_and_accounts_for_everything(name: str) -> None:
    bound = bind("auto", model=FIXTURES / name)
    assert (bound.program, bound.family) == ("mtp_dense", name)
    assert set(bound.tensors) == {weight.name for weight in bound.circuit.weights}
    assert {row.weight for row in bound.report} == set(bound.tensors)
    weights = bound.load_weights(positions=32)
    for weight in bound.circuit.weights:
        assert weights[weight.name].shape == weight.type.shape
        assert weight.type.dtype == "bf16"
    assert weights["rope.cos"].shape == (32, bound.config.values["rotary_dim"] // 2)


def test_borrowed_and_tied() -> None:
    dense = bind("auto", model=FIXTURES / "qwen3_dense_mtp").tensors
    assert (dense["lm_head"].name, dense["lm_head"].source, dense["lm_head"].status) == ("lm_head.weight", "target", "borrowed")
    bound = bind("auto", model=FIXTURES / "qwen3_5_mtp")
    tied = bound.tensors["lm_head"]
    assert (tied.name, tied.status) == ("model.language_model.embed_tokens.weight", "tied")
    weights = bound.load_weights(positions=4)
    assert weights["lm_head"].data_ptr() == weights["embed_tokens"].data_ptr()


def test_a_stray_lm_head_of_a_tied_model_is_not_used() -> None:
    model = edited("qwen3_5_mtp", lambda tensors: tensors.update({"lm_head.weight": torch.randn(512, 64)}))
    assert bind("auto", model=model).tensors["lm_head"].status == "tied"


def test_the_layer_index_is_found_in_the_file() -> None:
    def move(tensors: Tensors) -> None:
        for name in [name for name in tensors if name.startswith(LAYER)]:
            tensors[name.replace(".0.", ".7.", 1)] = tensors.pop(name)

    bound = bind("auto", model=edited("qwen3_dense_mtp", move))
    assert bound.tensors["fc"].name == "mtp_layers.7.input_proj.weight"


def test_a_sharded_checkpoint() -> None:
    tensors = load_file(edited("qwen3_5_mtp") + "/model.safetensors")
    names = sorted(tensors)
    Path("m/model.safetensors").unlink()
    weight_map = {}
    for shard, part in enumerate((names[::2], names[1::2])):
        save_file({name: tensors[name] for name in part}, f"m/model-{shard}.safetensors")
        weight_map.update(dict.fromkeys(part, f"model-{shard}.safetensors"))
    Path("m/model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    sharded, whole = bind("auto", model="m"), bind("auto", model=FIXTURES / "qwen3_5_mtp")
    assert sharded.circuit == whole.circuit
    assert sharded.digest == whole.digest
    one, other = sharded.load_weights(positions=4), whole.load_weights(positions=4)
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in other)


def test_each_weight_keeps_its_dtype_or_all_are_converted() -> None:
    model = edited("mimo_mtp", lambda tensors: tensors.update({"lm_head.weight": tensors["lm_head.weight"].float()}))
    kept = bind("auto", model=model)
    assert {weight.name: weight.type.dtype for weight in kept.circuit.weights if weight.type.dtype != "bf16"} == {
        "lm_head": "f32"
    }
    converted = bind("auto", model=model, wt="f16")
    assert {weight.type.dtype for weight in converted.circuit.weights} == {"f16"}
    assert converted.load_weights(positions=4)["fc"].dtype == torch.float16
    assert {row.reason for row in converted.report} == {"converted to f16 when it is loaded"}


def test_waived_tensors_are_reported_with_the_reason() -> None:
    model = edited("qwen3_dense_mtp", lambda tensors: tensors.update({"lm_head.weight": torch.randn(512, 64)}))
    bound = bind("auto", model=model)
    assert bound.tensors["lm_head"].source == "target"
    assert [(row.tensor, row.reason) for row in bound.report if row.status == "waived"] == [
        ("lm_head.weight", "a copy of the target's lm_head, which is used instead, and differs from 'lm_head.weight'")
    ]


@pytest.mark.parametrize("change", ["none", "wider", "one row", "shape", "quantised", "absent"])
def test_a_copy_that_is_none_is_reported(change: str) -> None:
    model = edited("qwen3_dense_mtp")
    copy = load_file("m/target/model.safetensors")["model.embed_tokens.weight"]
    if change == "one row":
        copy[-1] += 1
    changed = {"wider": copy.float(), "shape": copy[:100], "quantised": copy.to(torch.float8_e4m3fn)}.get(change, copy)
    whole = load_file("m/model.safetensors")
    if change == "absent":
        Path("m/model.safetensors").rename("m/model-1.safetensors")
        names = {**dict.fromkeys(whole, "model-1.safetensors"), "embed_tokens.weight": "model-2.safetensors"}
        Path("m/model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))
    else:
        save_file({**whole, "embed_tokens.weight": changed.contiguous()}, "m/model.safetensors")
    (row,) = (row for row in bind("auto", model=model).report if row.status == "waived")
    told = row.reason.removeprefix("a copy of the target's embedding, which is used instead")
    assert told == (", and differs from 'model.embed_tokens.weight'" if change in ("one row", "shape") else "")


def test_the_digest_is_of_what_the_drafter_depends_on() -> None:
    digest = bind("auto", model=FIXTURES / "mimo_mtp").digest
    assert bind("auto", model=edited("mimo_mtp", config={"transformers_version": "9"})).digest == digest
    shutil.rmtree("m")
    assert bind("auto", model=edited("mimo_mtp", config={"rope_theta": 1e4})).digest != digest
    assert bind("auto", model=FIXTURES / "mimo_mtp", switches={"mask_first": False}).digest != digest


def test_a_drafter_alone_asks_its_host() -> None:
    model = edited("qwen3_dense_mtp")
    shutil.rmtree("m/target")
    bound = bind("auto", model=model, host_dtype="f32")
    assert {name for name, ref in bound.tensors.items() if ref.source == "host"} == {"embed_tokens", "lm_head"}
    assert {weight.name for weight in bound.circuit.weights if weight.type.dtype == "f32"} == {"embed_tokens", "lm_head"}
    head = torch.randn(512, 64)
    weights = bound.load_weights(positions=4, host={"embed_tokens": head, "lm_head": head})
    assert weights["lm_head"].data_ptr() == head.data_ptr()
    assert refusal(lambda: bound.load_weights(host={"lm_head": head.T, "lmhead": head}), RuntimeUseError) == (
        "embed_tokens: a tensor of the host is missing; expected [512, 64]. "
        "Give host={'embed_tokens': the target's model.embed_tokens.weight}, or bind with target_model=.\n"
        "lm_head: a host tensor has the wrong shape; expected [512, 64]; got [64, 512]\n"
        "mtp_dense: no weight 'lmhead'. Did you mean 'lm_head'?"
    )


def test_a_copy_in_the_drafters_file_stands_in_where_no_target_is_given() -> None:
    copies = {"lm_head.weight": torch.randn(512, 64), "embed_tokens.weight": torch.randn(512, 64)}
    model = edited("qwen3_dense_mtp", lambda tensors: tensors.update(copies))
    shutil.rmtree("m/target")
    bound = bind("auto", model=model)
    assert {(row.tensor, row.status, row.source) for row in bound.report if row.tensor in copies} == {
        (name, "borrowed", "drafter") for name in copies
    }
    assert torch.equal(bound.load_weights(positions=4)["lm_head"], copies["lm_head.weight"])


def eagle1_with_lm_head(head: torch.Tensor, **others: torch.Tensor) -> str:
    return edited("eagle1_llama", lambda tensors: tensors.update({"lm_head.weight": head, **others}))


@pytest.mark.parametrize("change", ["none", "one row", "fewer rows"])
@pytest.mark.parametrize("tied", [False, True])
def test_an_lm_head_beside_an_eagle1_head_is_taken_for_a_copy(tied: bool, change: str) -> None:
    target = FIXTURES / "eagle1_llama" / "target"
    used = "model.embed_tokens.weight" if tied else "lm_head.weight"
    weight = load_file(target / "model.safetensors")[used]
    head = weight[:100].clone() if change == "fewer rows" else weight.clone()
    if change == "one row":
        head[-1] += 1
    model = eagle1_with_lm_head(head)
    config = json.loads(Path("m/target/config.json").read_text())
    Path("m/target/config.json").write_text(json.dumps({**config, "tie_word_embeddings": tied}))
    bound = bind("auto", model=model, target_model="m/target")
    assert (bound.tensors["lm_head"].source, bound.tensors["lm_head"].name) == ("target", used)
    assert torch.equal(bound.load_weights(positions=4)["lm_head"], weight)
    (row,) = (row for row in bound.report if row.status == "waived" and row.tensor == "lm_head.weight")
    told = row.reason.removeprefix("a copy of the target's lm_head, which is used instead")
    assert told == ("" if change == "none" else f", and differs from '{used}'")


def test_an_lm_head_beside_an_eagle1_head_is_used_where_no_target_is_given() -> None:
    head = torch.randn(512, 128)
    bound = bind("auto", model=eagle1_with_lm_head(head))
    assert [(row.status, row.source) for row in bound.report if row.tensor == "lm_head.weight"] == [("borrowed", "drafter")]
    assert torch.equal(bound.load_weights(positions=4)["lm_head"], head)


def test_a_bias_of_an_lm_head_beside_an_eagle1_head_is_refused() -> None:
    model = eagle1_with_lm_head(torch.randn(512, 128), **{"lm_head.bias": torch.zeros(512)})
    message = "m: lm_head.bias: no weight of the program uses this tensor."
    assert refusal(lambda: bind("auto", model=model, target_model="m/target")).startswith(message)


@pytest.mark.parametrize("tied", [False, True])
def test_a_copy_in_the_drafters_file_stands_in_for_nothing_that_a_given_target_lacks(tied: bool) -> None:
    model = edited("eagle1_llama")
    target = Path("m/target").rename("target")
    tensors, config = load_file(target / "model.safetensors"), json.loads((target / "config.json").read_text())
    renamed = {f"language_model.{name}": tensor for name, tensor in tensors.items()}
    save_file(renamed, target / "model.safetensors")
    (target / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": tied}))
    message = refusal(lambda: bind("auto", model=model, target_model=target))
    assert "target: no tensor for weight 'embed_tokens'" in message
    assert "target: no tensor for weight 'lm_head'" in message
    assert "Did you mean 'language_model.model.embed_tokens.weight'?" in message


@pytest.mark.parametrize("family", shipped_families())
def test_a_bare_config_gets_random_weights(family: str) -> None:
    config = default_config(family)
    if "dflash_config" in config:
        config["dflash_config"] = {**config["dflash_config"], "mask_token_id": 299}
    section = next((config[key] for key in ("text_config", "transformer_layer_config") if key in config), config)
    section.update(
        hidden_size=128, num_attention_heads=4, num_key_value_heads=2, head_dim=32, intermediate_size=192, vocab_size=300
    )
    Path("config.json").write_text(json.dumps(config))
    bound = bind("auto", model="config.json")
    assert bound.family == family
    assert {ref.source for ref in bound.tensors.values()} == {"random"}
    weights = bound.load_weights(positions=32)
    assert all(torch.equal(weights[name], same) for name, same in bound.load_weights(positions=32).items())
    matrix = next(weight.name for weight in bound.circuit.weights if weight.type.rank == 2)
    assert not torch.equal(weights[matrix], bound.load_weights(positions=32, seed=1)[matrix])
    generator = torch.Generator().manual_seed(0)
    rows = 6
    inputs = {
        "token": torch.arange(rows, dtype=torch.int32),
        "hidden": torch.randn(rows, 128, generator=generator),
        "position": torch.arange(1, rows + 1, dtype=torch.int32),
    }
    states = {"kv": random_cache(bound.circuit, [1] * rows, generator)} if bound.circuit.states else {}
    out = interpret(bound.circuit, inputs=inputs, weights=weights, states=states, entry="logits")
    for name, values in out.items():
        assert 0.3 < values.std() < 3, f"{name} is out of scale"


def quantise_fp8(tensors: Tensors, name: str) -> torch.Tensor:
    """Replace a weight by FP8 values and scales of blocks (which it has one of); returns what they mean."""
    scale = tensors[name].float().abs().max() / 448
    tensors[name] = (tensors[name].float() / scale).to(torch.float8_e4m3fn)
    rows, columns = tensors[name].shape
    tensors[f"{name}_scale_inv"] = scale.expand(-(-rows // 128), -(-columns // 128)).contiguous()
    return tensors[name].float() * scale


def test_quantised_weights_are_dequantised_and_reported() -> None:
    meant: dict[str, torch.Tensor] = {}

    def quantise(tensors: Tensors) -> None:
        meant["up"] = quantise_fp8(tensors, f"{LAYER}mlp.up_proj.weight")
        tensors[f"{LAYER}mlp.up_proj.input_scale"] = torch.ones(1)
        tensors[f"{LAYER}self_attn.k_proj.k_scale"] = torch.ones(1)
        shape = tensors.pop(f"{LAYER}mlp.down_proj.weight").shape
        tensors[f"{LAYER}mlp.down_proj.weight_packed"] = torch.full((shape[0], shape[1] // 2), 0x72, dtype=torch.uint8)
        tensors[f"{LAYER}mlp.down_proj.weight_scale"] = torch.ones(shape[0], shape[1] // 16).to(torch.float8_e4m3fn)
        tensors[f"{LAYER}mlp.down_proj.weight_global_scale"] = torch.tensor([4.0])
        meant["down"] = torch.tensor([0.25, 1.5]).repeat(shape[0], shape[1] // 2)
        tensors["lm_head.weight"] = torch.zeros(512, 64).to(torch.float8_e4m3fn)
        tensors["lm_head.weight_scale"] = torch.ones(512, 1)

    model = edited("qwen3_dense_mtp", quantise)
    target = load_file("m/target/model.safetensors")
    meant["head"] = quantise_fp8(target, "lm_head.weight")
    save_file(target, "m/target/model.safetensors")
    bound = bind("auto", model=model)
    assert {weight.type.dtype for weight in bound.circuit.weights} == {"bf16"}
    told = {row.tensor: row for row in bound.report}
    up = told[f"{LAYER}mlp.up_proj.weight"]
    assert (up.status, up.type[:7], up.reason) == ("used", "F8_E4M3", "fp8 block 128x128 -> bf16")
    assert told[f"{LAYER}mlp.up_proj.weight_scale_inv"].reason == f"scale of {LAYER}mlp.up_proj.weight"
    assert told[f"{LAYER}mlp.up_proj.weight_scale_inv"].weight == "layer.ffn.up_proj"
    assert told[f"{LAYER}mlp.up_proj.input_scale"].status == "waived"
    assert told[f"{LAYER}self_attn.k_proj.k_scale"].reason == "a scale for a quantised cache; the cache here is not quantised"
    assert told[f"{LAYER}mlp.down_proj.weight_packed"].reason == "nvfp4 -> bf16"
    assert [row.status for row in bound.report if row.tensor == "lm_head.weight"] == ["borrowed", "waived"]
    assert [row.status for row in bound.report if row.tensor == "lm_head.weight_scale"] == ["waived"]
    assert sum(row.weight == "lm_head" for row in bound.report) == 2
    for positions, kept in ((4, bound), (4, bind("auto", model=model, wt="f32"))):
        weights = kept.load_weights(positions=positions)
        for name, weight in {"layer.ffn.up_proj": "up", "layer.ffn.down_proj": "down", "lm_head": "head"}.items():
            dtype = torch.bfloat16 if kept is bound else torch.float32
            assert torch.equal(weights[name], meant[weight].to(dtype))
    manifest = replace(make_manifest(bound, BUILDS, {}), files={"lib/kernels.so": ""})
    assert Manifest.from_text(manifest.to_text()).weights == bound.weight_specs()


def test_the_config_says_how_large_a_block_is() -> None:
    def quantise(tensors: Tensors) -> None:
        quantise_fp8(tensors, f"{LAYER}input_proj.weight")
        tensors[f"{LAYER}input_proj.weight_scale_inv"] = torch.arange(1.0, 9.0).reshape(2, 4)

    model = edited("qwen3_dense_mtp", quantise, {"quantization_config": {"weight_block_size": [32, 32]}})
    bound = bind("auto", model=model)
    assert str(bound.tensors["fc"].packed) == "fp8 block 32x32"
    groups = {"config_groups": {"group_0": {"weights": {"block_structure": [32, 32]}}}}
    shutil.rmtree("m")
    assert bind("auto", model=edited("qwen3_dense_mtp", quantise, {"quantization_config": groups})).tensors == bound.tensors
    shutil.rmtree("m")
    model = edited("qwen3_dense_mtp", quantise, {"quantization_config": {"weight_block_size": [32, "32"]}})
    assert refusal(lambda: bind("auto", model=model)) == (
        "m/config.json: quantization_config.weight_block_size: the value is of the wrong kind; "
        "expected two positive integers, rows and columns; got [32, '32']"
    )


def test_tied_quantised_weights_share_their_tensor() -> None:
    name = "model.language_model.embed_tokens.weight"
    model = edited("qwen3_5_mtp", lambda tensors: quantise_fp8(tensors, name))
    weights = bind("auto", model=model).load_weights(positions=4)
    assert weights["lm_head"].data_ptr() == weights["embed_tokens"].data_ptr()


# -- what is refused -----------------------------------------------------------------------------------------------


def test_missing() -> None:
    model = edited("qwen3_dense_mtp", lambda tensors: tensors.pop(f"{LAYER}mlp.up_proj.weight"))
    assert refusal(lambda: bind("auto", model=model)) == (
        "m: no tensor for weight 'layer.ffn.up_proj'; expected 'mtp_layers.0.mlp.up_proj.weight'. "
        "Did you mean 'mtp_layers.0.mlp.gate_proj.weight'?"
    )


def test_extra() -> None:
    model = edited("qwen3_dense_mtp", lambda tensors: tensors.update({f"{LAYER}router.weight": torch.zeros(3)}))
    assert refusal(lambda: bind("auto", model=model)) == (
        "m: mtp_layers.0.router.weight: no weight of the program uses this tensor. "
        "Program 'mtp_dense' does not model it. If it does not matter, waive it in family 'qwen3_dense_mtp'."
    )


def test_extra_of_every_expert_is_told_once() -> None:
    def gptq(tensors: Tensors) -> None:
        for name in [name for name in tensors if ".experts." in name]:
            del tensors[name]
            tensors[f"{name.removesuffix('weight')}qweight"] = torch.zeros(2, 2, dtype=torch.int32)

    told = refusal(lambda: bind("auto", model=edited("deepseek_v3_mtp", gptq))).splitlines()
    assert len(told) == 6
    assert "experts.{expert}.down_proj.qweight' holds integers" in told[2]
    assert re.search(
        r"experts\.\{expert\}\.down_proj\.qweight: no weight of the program uses these tensors; got \d+ of them", told[3]
    )


def test_extra_that_a_switch_leaves_out() -> None:
    message = refusal(lambda: bind("auto", model=edited("mimo_mtp"), switches={"qkv_bias": False}))
    assert message.splitlines()[0] == (
        "m: model.mtp_layers.0.self_attn.k_proj.bias: no weight of the program uses this tensor. "
        "It is 'layer.attn.k_bias', which qkv_bias=false leaves out. If the model uses it, say so: qkv_bias=true (--set)."
    )
    assert len(message.splitlines()) == 3


def test_transposed() -> None:
    def transpose(tensors: Tensors) -> None:
        tensors[f"{LAYER}input_proj.weight"] = tensors[f"{LAYER}input_proj.weight"].T.contiguous()

    assert refusal(lambda: bind("auto", model=edited("qwen3_dense_mtp", transpose))) == (
        "m/model.safetensors: mtp_layers.0.input_proj.weight: weight 'fc' has another shape; "
        "expected [64, 128]; got [128, 64]. Is it transposed? Weights are stored [out, in]."
    )


def test_other_shape() -> None:
    model = edited("qwen3_dense_mtp", lambda tensors: tensors.update({f"{LAYER}self_attn.q_norm.weight": torch.ones(16)}))
    assert refusal(lambda: bind("auto", model=model)) == (
        "m/model.safetensors: mtp_layers.0.self_attn.q_norm.weight: weight 'layer.attn.q_norm' has another shape; "
        "expected [32]; got [16]. The shape follows from m/config.json and the switches: is it the config of these tensors?"
    )


def test_faults_of_all_kinds_together() -> None:
    def spoil(tensors: Tensors) -> None:
        del tensors[f"{LAYER}final_layernorm.weight"]
        tensors[f"{LAYER}extra"] = torch.zeros(1)
        tensors[f"{LAYER}token_layernorm.weight"] = torch.zeros(64, dtype=torch.int64)
        tensors[f"{LAYER}hidden_layernorm.weight"] = torch.zeros(65)

    message = refusal(lambda: bind("auto", model=edited("qwen3_dense_mtp", spoil)))
    assert [line.split(";")[0] for line in message.splitlines()] == [
        "m/model.safetensors: mtp_layers.0.token_layernorm.weight: the weight cannot be read from this dtype",
        "m/model.safetensors: mtp_layers.0.hidden_layernorm.weight: weight 'hnorm' has another shape",
        "m: no tensor for weight 'norm_weight'",
        "m: mtp_layers.0.extra: no weight of the program uses this tensor. Program 'mtp_dense' does not model it. "
        "If it does not matter, waive it in family 'qwen3_dense_mtp'.",
    ]


def test_no_drafter_in_the_checkpoint() -> None:
    def strip(tensors: Tensors) -> None:
        for name in [name for name in tensors if name.startswith("mtp.")]:
            del tensors[name]

    assert refusal(lambda: bind("auto", model=edited("qwen3_5_mtp", strip))) == (
        "m: family 'qwen3_5_mtp' wants tensors 'mtp.layers.{layer}.*' of one layer; got none. "
        "Does this checkpoint have a drafter?"
    )


def test_several_modules() -> None:
    model = edited("mimo_mtp", lambda tensors: tensors.update({"model.mtp_layers.1.input_proj.weight": torch.zeros(1)}))
    assert refusal(lambda: bind("auto", model=model)) == (
        "m: family 'mimo_mtp' wants tensors 'model.mtp_layers.{layer}.*' of one layer; got 0, 1. "
        "Several modules are not supported."
    )


def test_another_target() -> None:
    message = refusal(lambda: bind("auto", model=FIXTURES / "qwen3_dense_mtp", target_model=edited("mimo_mtp")))
    assert message == (
        "m/config.json: hidden_size: target and drafter differ; "
        f"expected 64 as in {FIXTURES}/qwen3_dense_mtp/config.json; got 128. This drafter belongs to another target."
    )


def test_a_head_of_another_width_than_its_target_has_its_own_embedding() -> None:
    model = edited("eagle3_llama_narrow")
    bound = bind("auto", model=model)
    embed = bound.tensors["embed_tokens"]
    assert (embed.name, embed.source, embed.status) == ("embed_tokens.weight", "drafter", "used")
    row = next(row for row in bound.report if row.weight == "embed_tokens")
    assert row.reason == "the drafter's own: target_hidden_size is 64, hidden_size 48"
    assert (bound.tensors["fc"].shape, embed.shape) == ((48, 3 * 64), (512, 48))
    assert {ref.source for ref in bound.tensors.values()} == {"drafter"}  # so that a target's config is enough of it
    assert bind("auto", model=model, target_model="m/target/config.json").tensors == bound.tensors
    without = edited("eagle3_llama_narrow", lambda tensors: tensors.pop("embed_tokens.weight"), folder="without")
    assert refusal(lambda: bind("auto", model=without)) == (
        "without: no tensor for weight 'embed_tokens'; expected 'embed_tokens.weight'. "
        "The target's does not stand in for it, since target_hidden_size is 64, hidden_size 48."
    )


@pytest.mark.parametrize("size", [None, 64])
def test_a_head_as_wide_as_its_target_borrows_the_embedding(size: int | None) -> None:
    plain = bind("auto", model=FIXTURES / "eagle3_llama")
    bound = bind("auto", model=edited("eagle3_llama", config={"target_hidden_size": size}))
    assert bound.circuit == plain.circuit
    assert bound.tensors["embed_tokens"] == plain.tensors["embed_tokens"]
    assert bound.tensors["embed_tokens"].source == "host"


def test_a_head_that_trained_its_embedding_uses_it() -> None:
    def trained(tensors: Tensors) -> None:
        tensors["embed_tokens.weight"] = torch.full((512, 64), 0.5, dtype=tensors["fc.weight"].dtype)

    model = edited("eagle3_llama", trained, {"embed_requires_grad": True})
    for target in (None, "m/target"):
        bound = bind("auto", model=model, target_model=target)
        row = next(row for row in bound.report if row.weight == "embed_tokens")
        assert (row.tensor, row.source, row.reason) == (
            "embed_tokens.weight",
            "drafter",
            "the drafter's own: embed_requires_grad is true",
        )
        assert bound.load_weights(positions=4)["embed_tokens"].eq(0.5).all()
    for wrong in ("yes", 1):
        config = json.loads(Path("m/config.json").read_text())
        Path("m/config.json").write_text(json.dumps({**config, "embed_requires_grad": wrong}))
        assert refusal(lambda: bind("auto", model=model)) == (
            f"m/config.json: embed_requires_grad: the value is of the wrong kind; expected true or false; got {wrong!r}"
        )


def test_a_target_of_another_width_than_the_head_says() -> None:
    model = edited("eagle3_llama_narrow", config={"target_hidden_size": 128})
    assert refusal(lambda: bind("auto", model=model, target_model="m/target")) == (
        "m/target/config.json: hidden_size: target and drafter differ; "
        "expected 128 as target_hidden_size in m/config.json; got 64. This drafter belongs to another target."
    )
    for wrong in (0, "64", 64.0):
        config = json.loads(Path("m/config.json").read_text())
        Path("m/config.json").write_text(json.dumps({**config, "target_hidden_size": wrong}))
        assert refusal(lambda: bind("auto", model=model)) == (
            f"m/config.json: target_hidden_size: the value is of the wrong kind; expected a positive integer; got {wrong!r}. "
            "Program 'eagle3' needs it for G."
        )


@pytest.mark.parametrize(("name", "lent"), [("dflash_qwen3", True), ("eagle1_llama", True), ("medusa1", False)])
def test_drafters_that_are_as_wide_as_their_target(name: str, lent: bool) -> None:
    size = json.loads((FIXTURES / name / "config.json").read_text()).get("hidden_size", 64)
    expected = (
        f"m/config.json: target_hidden_size: drafters of family '{name}' are as wide as their target; "
        f"expected {size} as hidden_size; got 96"
    )
    if lent:
        expected += ". They take embed_tokens and lm_head from it, so both have one width."
    model = edited(name, config={"target_hidden_size": 96})
    assert refusal(lambda: bind("auto", model=model, target_model="m/target")) == expected
    edited(name, config={"target_hidden_size": size}, folder="same")
    bind("auto", model="same", target_model="same/target")


def test_a_target_without_the_tensors() -> None:
    model = edited("qwen3_dense_mtp")
    tensors = load_file("m/target/model.safetensors")
    del tensors["lm_head.weight"]
    save_file(tensors, "m/target/model.safetensors")
    assert refusal(lambda: bind("auto", model=model)) == "m/target: no tensor for weight 'lm_head'; expected 'lm_head.weight'"


def test_a_setting_that_is_not_modelled() -> None:
    model = edited("mimo_mtp", config={"hidden_act": "gelu", "use_mrope": True})
    assert refusal(lambda: bind("auto", model=model)) == (
        "m/config.json: hidden_act: family 'mimo_mtp' does not model this setting; expected 'silu'; got 'gelu'. "
        "Program 'mtp_dense' would compute something else.\n"
        "m/config.json: use_mrope: family 'mimo_mtp' does not model this setting; expected False; got True. "
        "Program 'mtp_dense' would compute something else."
    )


def test_a_key_that_the_program_needs() -> None:
    model = edited("mimo_mtp", config={"intermediate_size": None})
    assert refusal(lambda: bind("auto", model=model)) == (
        "m/config.json: intermediate_size: the key is missing. Program 'mtp_dense' needs it for F."
    )


def test_an_unknown_model() -> None:
    model = edited("mimo_mtp", config={"model_type": "mimo_v2"})
    told = refusal(lambda: bind("auto", model=model))
    assert told.startswith("m/config.json: no family recognises this config; expected deepseek_v3_mtp: model_type deepseek_v3; ")
    eagle1 = (
        "eagle1_llama: model_type llama and num_hidden_layers 1 and draft_vocab_size absent and "
        "architectures LlamaForCausalLM/LlamaForCausalLMEagle/EagleLlamaForCausalLM"
    )
    for family in (eagle1, "medusa1: medusa_num_heads present", "llama_mtp: model_type llama_mtp", "mimo_mtp: model_type mimo"):
        assert f"; {family}; " in told
    assert bind("mtp_dense", model=model, family="mimo_mtp").family == "mimo_mtp"


def test_mistaken_names_alone_do_not_decide() -> None:
    """MiMo's leaf names with speculators' config is the embed-first family, and the other way round."""
    assert bind("auto", model=FIXTURES / "qwen3_dense_mtp").switches["concat"] == "embed_first"
    assert bind("auto", model=FIXTURES / "mimo_mtp").switches["concat"] == "hidden_first"


def test_a_file_of_tensors_for_a_model() -> None:
    file = FIXTURES / "mimo_mtp/model.safetensors"
    assert refusal(lambda: bind("auto", model=file)) == (
        f"{file}: is a file of tensors, not a model's config. Give the folder that has it and the config.json."
    )


def test_a_switch_without_that_value() -> None:
    message = refusal(lambda: bind("auto", model=FIXTURES / "mimo_mtp", switches={"mask_first": "maybe"}), ProgramError)
    assert message.partition(": ")[2] == "switch 'mask_first' has no value 'maybe'; expected false, true"


def test_paths_and_names() -> None:
    assert refusal(lambda: bind("auto", model="nowhere")) == (
        "nowhere: the path does not exist. Give a model folder, or the path of a config.json."
    )
    assert refusal(lambda: bind("auto", model="Qwen/Qwen3-8B")) == (
        "Qwen/Qwen3-8B: the path does not exist. Give a model folder, or the path of a config.json. "
        "A model of the Hugging Face hub has to be downloaded first: `hf download Qwen/Qwen3-8B`."
    )
    for path in ("/nowhere", "~/nowhere", "m/config.json", str(FIXTURES / "nowhere"), f"{Path.cwd()}/nowhere"):
        assert "hub" not in refusal(lambda path=path: bind("auto", model=path))
    shutil.copytree(FIXTURES / "mimo_mtp", "models/mimo")
    assert "hub" not in refusal(lambda: bind("auto", model="models/nemo"))
    assert refusal(lambda: bind("mtp_dens", model=FIXTURES / "mimo_mtp"), ProgramError) == (
        "no program 'mtp_dens'. Did you mean 'mtp_dense'? Or give the path of a .yaml file."
    )
    assert refusal(lambda: bind("auto", model=FIXTURES / "mimo_mtp", family="mimo"), ProgramError) == (
        "no family 'mimo'. Did you mean 'mimo_mtp'? Or give the path of a .yaml file."
    )
    message = refusal(lambda: bind("auto", model=FIXTURES / "mimo_mtp", switches={"mask_frst": True}), ProgramError)
    assert message.endswith(": program 'mtp_dense' has no switch 'mask_frst'. Did you mean 'mask_first'?")


# -- circuits without a checkpoint ---------------------------------------------------------------------------------


def test_load_circuit_stands_in_with_examples() -> None:
    default = load_circuit("mtp_dense")
    assert default == load_circuit("mtp_dense", "llama_mtp")
    assert dict(default.facts)["concat"] == "embed_first"
    assert (
        load_circuit("mtp_dense", "mimo_mtp", switches={"mask_first": False}).facts != load_circuit("mtp_dense", "mimo_mtp").facts
    )


def test_load_circuit_of_a_checkpoints_config() -> None:
    bound = bind("auto", model=FIXTURES / "qwen3_5_mtp")
    for config in (FIXTURES / "qwen3_5_mtp", FIXTURES / "qwen3_5_mtp" / "config.json", bound.config.raw.data):
        assert load_circuit("mtp_dense", config=config) == bound.circuit


def test_load_circuit_of_a_program_of_ones_own() -> None:
    circuit = load_circuit("mtp_dense", "mimo_mtp")
    Path("printed.yaml").write_text(format_circuit(circuit))
    assert load_circuit("printed.yaml") == circuit
    assert load_circuit("printed.yaml", config=default_config("mimo_mtp")) == circuit


def test_a_program_of_ones_own_takes_any_config() -> None:
    Path("own.yaml").write_text(
        "program: own\ndims: {H: width}\ninputs: {hidden: 'act[n, H]'}\nweights: {fc: 'wt[3, H]'}\n"
        "body: ['y = linear(hidden, fc)']\noutputs: {y: y}\nentries: {draft: {outputs: [y]}}\n"
    )
    assert str(load_circuit("own.yaml", config={"width": 5}).weights[0].type) == "bf16[3, 5]"


def test_a_printed_circuit_binds_to_the_checkpoint_that_it_is_of() -> None:
    bound = bind("auto", model=FIXTURES / "mimo_mtp")
    Path("printed.yaml").write_text(format_circuit(bound.circuit))
    assert bind("printed.yaml", model=FIXTURES / "mimo_mtp").circuit == bound.circuit
    other = bind("auto", model=FIXTURES / "mimo_mtp", switches={"mask_first": False})
    Path("printed.yaml").write_text(format_circuit(other.circuit))
    message = refusal(lambda: bind("printed.yaml", model=FIXTURES / "mimo_mtp"), ProgramError)
    assert message.startswith("programs/families/mimo_mtp.yaml:")
    assert message.endswith(
        ": the family states 'mask_first: true'; expected a switch of program 'mtp_dense'; got mask_first fixed to false there"
    )


def test_a_switch_from_a_config_value_of_the_wrong_kind() -> None:
    model = edited("mimo_mtp", config={"attention_bias": "yes"})
    assert refusal(lambda: bind("auto", model=model)) == (
        "m/config.json: attention_bias: the value decides switch 'qkv_bias' and is of the wrong kind; "
        "expected true or false; got 'yes'"
    )


def test_a_serving_box_needs_none_of_the_compilers_packages() -> None:
    """Tensor files and RoPE tables with yaml, pydantic and networkx out of reach."""
    script = (
        "import sys\n"
        "for name in ('yaml', 'pydantic', 'networkx', 'tvm'): sys.modules[name] = None\n"
        "from circuitgraph.checkpoint.files import TensorFiles\n"
        "from circuitgraph.runtime.rope import RopeSpec, rope_tables\n"
        f"print(len(TensorFiles.open({str(FIXTURES / 'mimo_mtp')!r}).load(['lm_head.weight'])))\n"
        "print(rope_tables(RopeSpec('default', 1e4, 8), 3)[0].shape)\n"
    )
    ran = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert ran.stdout.split("\n")[:2] == ["1", "torch.Size([3, 4])"], ran.stderr


@pytest.mark.parametrize("with_target", [False, True])
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("place", ["nested", "top"])
def test_where_the_config_says_whether_embeddings_are_tied(with_target: bool, tied: bool, place: str) -> None:
    model = edited("qwen3_5_mtp", lambda tensors: tensors.update({"lm_head.weight": torch.zeros(512, 64)}))
    config = json.loads(Path("m/config.json").read_text())
    config["text_config"]["tie_word_embeddings"] = tied if place == "nested" else None
    config["tie_word_embeddings"] = tied if place == "top" else None
    Path("m/config.json").write_text(json.dumps(config))
    bound = bind("auto", model=model, target_model=model if with_target else None)
    assert bound.tensors["lm_head"].status == ("tied" if tied else "borrowed")


def test_a_target_that_gives_the_two_opposites() -> None:
    shutil.copytree(FIXTURES / "qwen3_5_mtp", "target")
    config = json.loads(Path("target/config.json").read_text())
    Path("target/config.json").write_text(json.dumps({**config, "tie_word_embeddings": False}))
    assert refusal(lambda: bind("auto", model=FIXTURES / "qwen3_dense_mtp", target_model="target")).startswith(
        "target/config.json: text_config.tie_word_embeddings: the config gives two values"
    )


def test_a_bare_config_lends_a_real_drafter_nothing() -> None:
    config = FIXTURES / "qwen3_dense_mtp/target/config.json"
    assert refusal(lambda: bind("auto", model=FIXTURES / "qwen3_dense_mtp", target_model=config)) == (
        f"{config}: a config has no weights to lend; expected the target's folder, for embed_tokens and lm_head. "
        "Give it, or leave it out (--target-model) and hand these tensors over when the artifact is loaded."
    )
    bound = bind("auto", model=FIXTURES / "qwen3_dense_mtp/config.json", target_model=config)
    assert {ref.source for ref in bound.tensors.values()} == {"random"}


@pytest.mark.parametrize("name", ["eagle3_llama", "dflash_qwen3"])
def test_layers_that_the_given_target_has_not(name: str) -> None:
    ids = {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 2, 9]}}
    block = {"dflash_config": {"mask_token_id": 508, "target_layer_ids": [1, 2, 8]}, "num_target_layers": None}
    model = edited(name, config=ids if name == "eagle3_llama" else block)
    file = Path("m/target/config.json")
    file.write_text(json.dumps({**json.loads(file.read_text()), "num_hidden_layers": 8}))
    message = refusal(lambda: bind("auto", model=model, target_model="m/target"))
    highest = 8 if name == "eagle3_llama" else 7
    assert f"the list names no layers of the target; expected 0 to {highest}, which m/target/config.json has 8 of" in message
    if name == "eagle3_llama":
        config = json.loads(Path("m/config.json").read_text())
        Path("m/config.json").write_text(json.dumps({**config, "eagle_config": {}, "aux_hidden_states_layer_ids": [1, 2, 8]}))
        message = refusal(lambda: bind("auto", model=model, target_model="m/target"))
        assert "aux_hidden_states_layer_ids: the list names no layers of the target; expected 0 to 7, which" in message
        assert "got [1, 2, 8]" in message


@pytest.mark.parametrize("stray", [False, True])
@pytest.mark.parametrize("tied", [False, True])
def test_at_load_the_targets_config_says_whether_its_head_is_its_embedding(tied: bool, stray: bool) -> None:
    """As when compiling is given the same folder: a stray lm_head in a tied target is none."""
    model = edited("qwen3_dense_mtp")
    target = Path("m/target").rename("target")
    config = json.loads((target / "config.json").read_text())
    (target / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": tied}))
    if not stray:
        tensors = load_file(target / "model.safetensors")
        del tensors["lm_head.weight"]
        save_file(tensors, target / "model.safetensors")
    manifest = make_manifest(bind("auto", model=model), BUILDS, {})
    artifact = write_artifact("artifact", manifest, {"lib/kernels.so": b""})
    assert artifact.manifest.weights["lm_head"].source == "host"
    if not tied and not stray:
        assert refusal(lambda: bind_weights(artifact, model=model, target_model=target)) == (
            "target: no tensor 'lm_head.weight', which 'lm_head' is bound from. "
            "Compile with this folder as target_model= (--target-model)."
        )
        return
    loaded = bind_weights(artifact, model=model, target_model=target)
    compiled = bind("auto", model=model, target_model=target).load_weights(positions=4)
    assert torch.equal(loaded["lm_head"], compiled["lm_head"])
    assert torch.equal(loaded["lm_head"], loaded["embed_tokens"]) == tied


def test_a_target_of_another_type_at_load_is_refused_with_a_remedy() -> None:
    model = edited("qwen3_dense_mtp")
    target = Path("m/target").rename("target")
    artifact = write_artifact("artifact", make_manifest(bind("auto", model=model), BUILDS, {}), {"lib/kernels.so": b""})
    tensors = load_file(target / "model.safetensors")
    save_file({name: tensor.half() for name, tensor in tensors.items()}, target / "model.safetensors")
    message = refusal(lambda: bind_weights(artifact, model=model, target_model=target))
    assert "expected bf16[512, 64] ('lm_head'); got f16[512, 64]. Compile with this folder as target_model=" in message
    tensors["lm_head.weight"] = tensors["lm_head.weight"].to(torch.float8_e4m3fn)
    save_file({**tensors, "lm_head.weight_scale_inv": torch.ones(16, 2)}, target / "model.safetensors")
    config = json.loads((target / "config.json").read_text())
    (target / "config.json").write_text(json.dumps({**config, "quantization_config": {"weight_block_size": [32, 32]}}))
    message = refusal(lambda: bind_weights(artifact, model=model, target_model=target))
    assert "got F8_E4M3[512, 64]. Compile with this folder as target_model=" in message
    assert bind("auto", model=model, target_model=target).tensors["lm_head"].packed is not None


@pytest.mark.parametrize("tied", [False, True])
def test_what_a_target_lends_at_load_is_looked_at_as_when_compiling(tied: bool) -> None:
    model = edited("qwen3_dense_mtp")
    target = Path("m/target").rename("target")
    whole, config = load_file(target / "model.safetensors"), json.loads((target / "config.json").read_text())
    (target / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": tied}))
    artifact = write_artifact("artifact", make_manifest(bind("auto", model=model), BUILDS, {}), {"lib/kernels.so": b""})
    for name, message in {
        "lm_head.bias": "target: lm_head.bias: belongs to 'lm_head', and no program uses it",
        "model.embed_tokens.extra": "target: model.embed_tokens.extra: belongs to 'embed_tokens', and no program uses it",
        "model.embed_tokens.pre_quant_scale": "model.embed_tokens.pre_quant_scale: changes what the weight means",
    }.items():
        save_file({**whole, name: torch.ones(8)}, target / "model.safetensors")
        assert message in refusal(lambda: bind_weights(artifact, model=model, target_model=target))
        assert message in refusal(lambda: bind("auto", model=model, target_model=target))
    save_file(whole, target / "model.safetensors")
    bind_weights(artifact, model=model, target_model=target)
    for groups in ({}, {"config_groups": {}}, {"config_groups": {"R1": {}}}):
        quantisation = {"quantization_config": {"transform_config": groups}}
        (target / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": tied, **quantisation}))
        if not groups.get("config_groups"):
            bind_weights(artifact, model=model, target_model=target)
            bind("auto", model=model, target_model=target)
    message = refusal(lambda: bind_weights(artifact, model=model, target_model=target))
    assert "quantization_config.transform_config: activations are transformed" in message


def test_speculators_own_config_of_an_eagle3_head() -> None:
    plain = bind("auto", model=FIXTURES / "eagle3_llama")
    model = edited("eagle3_llama")
    sizes = json.loads(Path("m/config.json").read_text())
    del sizes["draft_vocab_size"]
    config = {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "draft_vocab_size": 192,
        "norm_before_residual": True,
        "target_hidden_size": None,
        "eagle_aux_hidden_state_layer_ids": [2, 5, 9],
        "transformer_layer_config": sizes,
    }
    Path("m/config.json").write_text(json.dumps(config))
    bound = bind("auto", model=model)
    assert bound.family == "eagle3_llama"
    assert dict(bound.circuit.facts) == {**dict(plain.circuit.facts), "norm_before_residual": True, "hidden_layers": "2 5 9"}
    assert bound.tensors.keys() == plain.tensors.keys()
    assert bound.rope == plain.rope


@pytest.mark.parametrize(
    "config",
    [
        {"draft_vocab_size": 512},
        {"draft_vocab_size": None, "architectures": ["LlamaForCausalLMEagle3"]},
        {"draft_vocab_size": None, "speculators_model_type": "eagle3", "transformer_layer_config": {"model_type": "llama"}},
    ],
    ids=["as many", "null", "null of speculators"],
)
def test_an_eagle3_head_may_score_all_tokens_of_the_target(config: dict) -> None:
    def whole_head(tensors: Tensors) -> None:
        del tensors["d2t"], tensors["t2d"]
        tensors["lm_head.weight"] = torch.randn(512, 64).to(tensors["lm_head.weight"].dtype)

    model = edited("eagle3_llama", whole_head, config)
    if "transformer_layer_config" in config:
        sizes = json.loads(Path("m/config.json").read_text())
        text = {key: sizes.pop(key) for key in list(sizes) if key not in config}
        Path("m/config.json").write_text(json.dumps({**sizes, "transformer_layer_config": text | {"model_type": "llama"}}))
    bound = bind("auto", model=model)
    assert (bound.family, dict(bound.circuit.facts)["ids"]) == ("eagle3_llama", "own")  # which are the target's
    assert "d2t" not in bound.tensors
    assert bound.tensors["lm_head"].shape == (512, 64)
    assert load_circuit("eagle3", config="m/config.json").facts == bound.circuit.facts  # what `show` makes of the config alone


@pytest.mark.parametrize("first", ["midlayer", "layers.0"])
def test_an_eagle3_head_whose_config_looks_like_eagle1(first: str) -> None:
    def every_token(tensors: Tensors) -> None:
        tensors["lm_head.weight"] = torch.zeros(512, 64, dtype=torch.bfloat16)
        del tensors["d2t"], tensors["t2d"]
        for name in [name for name in tensors if name.startswith("midlayer.")]:
            tensors[name.replace("midlayer", first)] = tensors.pop(name)

    model = edited("eagle3_llama", every_token, {"draft_vocab_size": None, "architectures": ["LlamaForCausalLM"]})
    assert refusal(lambda: bind("auto", model=model)) == (
        f"m: {first}.hidden_norm.weight: is of family 'eagle3_llama', and the config looks like one of family 'eagle1_llama'. "
        "Say family='eagle3_llama' (--family)."
    )
    assert bind("auto", model=model, family="eagle3_llama").program == "eagle3"


@pytest.mark.parametrize(
    ("config", "want"),
    [
        ({"aux_hidden_states_layer_ids": [2, 5, 9]}, "3 6 10"),
        ({"aux_hidden_states_layer_ids": [1, 5, 9]}, "2 6 10"),
        ({"aux_hidden_states_layer_ids": [2, 5, 9], "eagle_aux_hidden_state_layer_ids": [3, 6, 10]}, "3 6 10"),
        ({"aux_hidden_states_layer_ids": []}, ""),
    ],
)
def test_layers_of_an_eagle3_head_that_are_counted_as_outputs(config: dict, want: str) -> None:
    bound = bind("auto", model=edited("eagle3_llama", config=config))
    assert dict(bound.circuit.facts)["hidden_layers"] == want


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (
            {"aux_hidden_states_layer_ids": [0, 5, 9]},
            "aux_hidden_states_layer_ids: the list begins with the output of the first layer, which programs cannot be told",
        ),
        (
            {"aux_hidden_states_layer_ids": [2, 5]},
            "aux_hidden_states_layer_ids: the list has another length; expected 3 layers, whose hiddens the program takes; "
            "got [2, 5] of outputs, which is [3, 6]",
        ),
        (
            {"aux_hidden_states_layer_ids": [2, 5, 9], "eagle_aux_hidden_state_layer_ids": [2, 5, 9]},
            "aux_hidden_states_layer_ids: the config gives two lists; expected [2, 5, 9] as in eagle_aux_hidden_state_layer_ids; "
            "got [2, 5, 9] of outputs, which is [3, 6, 10]",
        ),
    ],
)
def test_layers_counted_as_outputs_that_are_none(config: dict, message: str) -> None:
    assert message in refusal(lambda: bind("auto", model=edited("eagle3_llama", config=config)))


UNREAD = {
    "dflash_qwen3": [
        {"rope_is_neox_style": False},
        {"input_embedding_scale": 2.5},
        {"output_multiplier": 0.5},
        {"final_logit_softcapping": 30.0},
        {"logit_scale": 0.5},
        {"attention_value_scale": 0.612},
        {"dflash_config": {"mask_token_id": 508, "target_layer_ids": [1, 2, 3], "input_embedding_scale": 2.5}},
        {"dflash_config": {"mask_token_id": 508, "target_layer_ids": [1, 2, 3], "output_multiplier": 0.5}},
        {"dflash_config": {"mask_token_id": 508, "target_layer_ids": [1, 2, 3], "final_logit_softcapping": 30.0}},
    ],
    "eagle3_llama": [{"logit_scale": 0.5}],
    "eagle1_llama": [{"logit_scale": 0.5}],
}


@pytest.mark.parametrize(("name", "config"), [(name, config) for name, configs in UNREAD.items() for config in configs])
def test_settings_that_reference_code_reads_are_not_ignored(name: str, config: dict) -> None:
    assert "does not model this setting" in refusal(lambda: bind("auto", model=edited(name, config=config)))


BLOCK = {"mask_token_id": 508, "target_layer_ids": [1, 2, 3]}


@pytest.mark.parametrize(
    ("config", "key", "expected"),
    [
        ({"block_size": 4, "dflash_config": {**BLOCK, "block_size": 8}}, "dflash_config.block_size", "4 as in block_size; got 8"),
        ({"mask_token_id": 7, "dflash_config": BLOCK}, "mask_token_id", "508 as in dflash_config.mask_token_id; got 7"),
        (
            {"target_layer_ids": [1, 2, 4], "dflash_config": BLOCK},
            "target_layer_ids",
            "[1, 2, 3] as in dflash_config.target_layer_ids; got [1, 2, 4]",
        ),
    ],
)
def test_what_a_block_is_made_of_is_told_alike_in_both_places(config: dict, key: str, expected: str) -> None:
    assert f"m/config.json: {key}: the config gives two values; expected {expected}. Remove" in refusal(
        lambda: bind("auto", model=edited("dflash_qwen3", config=config))
    )
    alike = {**BLOCK, "block_size": 4, "dflash_config": {**BLOCK, "block_size": 4}}
    data = json.loads(Path("m/config.json").read_text())
    Path("m/config.json").write_text(json.dumps({**data, **alike}))
    assert bind("auto", model="m").family == "dflash_qwen3"


def test_a_file_beside_the_weights_that_changes_what_they_mean() -> None:
    model = edited("dflash_qwen3")
    torch.save({"embedding": torch.zeros(64)}, "m/mask_embedding.pt")
    assert refusal(lambda: bind("auto", model=model)) == (
        "m: mask_embedding.pt: family 'dflash_qwen3' does not model this file: the mask's own embedding, in place of the "
        "target's row of mask_token_id. Program 'dflash' would compute something else."
    )
    assert bind("auto", model="m/config.json").family == "dflash_qwen3"


@pytest.mark.parametrize(
    "config",
    [
        {"is_causal": False, "rope_is_neox_style": True, "input_embedding_scale": 1.0, "output_multiplier": 1},
        {"logit_scale": 1.0},
        {"final_logit_softcapping": None},
        {"final_logit_softcapping": 0.0},
    ],
)
def test_settings_that_say_what_is_done_anyhow(config: dict) -> None:
    assert bind("auto", model=edited("dflash_qwen3", config=config)).family == "dflash_qwen3"


@pytest.mark.parametrize("recycle", ["pre_norm", "post_norm"])
def test_a_setting_of_two_meanings_is_taken_once_its_switch_is_given(recycle: str) -> None:
    model = edited("eagle3_llama", config={"norm_output": True})
    bound = bind("auto", model=model, switches={"recycle": recycle})
    assert dict(bound.circuit.facts)["recycle"] == recycle
    given = load_circuit("eagle3", config="m/config.json", switches={"recycle": recycle})
    assert given.facts == bound.circuit.facts
    Path("m/config.json").write_text(Path("m/config.json").read_text().replace('"norm_output": true', '"norm_output": [true]'))
    assert "norm_output: the setting means several things" in refusal(
        lambda: bind("auto", model=model, switches={"recycle": recycle})
    )


@pytest.mark.parametrize(("value", "recycle"), [(True, "post_norm"), (False, "pre_norm"), (None, "pre_norm")])
def test_a_setting_of_two_meanings_has_one_in_configs_of_speculators(value: bool | None, recycle: str) -> None:
    model = edited("eagle3_llama")
    sizes = json.loads(Path("m/config.json").read_text())
    top = {"speculators_model_type": "eagle3", "draft_vocab_size": sizes.pop("draft_vocab_size"), "norm_output": value}
    Path("m/config.json").write_text(json.dumps({**top, "transformer_layer_config": sizes}))
    assert dict(bind("auto", model=model).circuit.facts)["recycle"] == recycle
    other = "pre_norm" if recycle == "post_norm" else "post_norm"
    assert dict(bind("auto", model=model, switches={"recycle": other}).circuit.facts)["recycle"] == other
    for wrong in ("yes", [True]):
        Path("m/config.json").write_text(json.dumps({**top, "norm_output": wrong, "transformer_layer_config": sizes}))
        assert "m/config.json: norm_output: the setting" in refusal(lambda: bind("auto", model=model))


def norms_before_fc(*names: str) -> Callable[[Tensors], None]:
    sizes = {"input_norm": 192}
    return lambda tensors: tensors.update({f"{name}.weight": torch.rand(sizes.get(name, 64)).half() for name in names})


@pytest.mark.parametrize(
    ("config", "names", "weights"),
    [
        ({"norm_before_fc": True}, ["input_norm"], ["aux_norm"]),
        ({"eagle_config": {"norm_before_fc": True}}, ["input_norm"], ["aux_norm"]),
        ({"norm_before_fc": True, "eagle_config": {"norm_before_fc": True}}, ["input_norm"], ["aux_norm"]),
        ({"fc_norm": True}, ["fc_norm.0", "fc_norm.1", "fc_norm.2"], ["low_norm", "middle_norm", "high_norm"]),
        ({"use_aux_norm": True}, ["aux_norm_low", "aux_norm_mid", "aux_norm_high"], ["low_norm", "middle_norm", "high_norm"]),
        ({"fc_norm": False, "norm_before_fc": False, "use_aux_norm": None}, [], []),
    ],
)
def test_norms_before_fc_by_all_their_names(config: dict, names: list[str], weights: list[str]) -> None:
    bound = bind("auto", model=edited("eagle3_llama", norms_before_fc(*names), config))
    plain = bind("auto", model=FIXTURES / "eagle3_llama").tensors
    assert {name: bound.tensors[name].name for name in bound.tensors if name not in plain} == {
        weight: f"{name}.weight" for weight, name in zip(weights, names, strict=True)
    }


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (
            {"norm_before_fc": False, "eagle_config": {"norm_before_fc": True}},
            "eagle_config.norm_before_fc: the config gives two values; expected False as in norm_before_fc; got True",
        ),
        (
            {"fc_norm": True, "use_aux_norm": False},
            "use_aux_norm: the config gives two values; expected True as in fc_norm; got False",
        ),
        (
            {"fc_norm": True, "eagle_config": {"norm_before_fc": True}},
            "norm_before_fc and fc_norm: do not go together: engines differ in what both mean; expected one of them",
        ),
        (
            {"eagle_config": {"norm_before_fc": "yes"}},
            "eagle_config.norm_before_fc: the value decides switch 'norm_before_fc' and is of the wrong kind; "
            "expected true or false; got 'yes'",
        ),
        ({"attention_bias": 1}, "attention_bias: the value decides switch 'qkv_bias' and is of the wrong kind"),
    ],
)
def test_norms_before_fc_that_are_not_told_alike(config: dict, message: str) -> None:
    every = norms_before_fc("input_norm", "fc_norm.0", "fc_norm.1", "fc_norm.2")
    assert message in refusal(lambda: bind("auto", model=edited("eagle3_llama", every, config)))


def test_a_norm_before_fc_that_the_config_or_the_file_lacks() -> None:
    model = edited("eagle3_llama", norms_before_fc("input_norm"))
    assert (
        "input_norm.weight: no weight of the program uses this tensor. It is 'aux_norm', which norm_before_fc=false leaves out"
        in (refusal(lambda: bind("auto", model=model)))
    )
    other = edited("eagle3_llama", config={"fc_norm": True}, folder="other")
    message = refusal(lambda: bind("auto", model=other))
    assert "no tensor for weight 'low_norm'; expected 'fc_norm.0.weight' or 'aux_norm_low.weight'" in message
    assert "If the model has none, say so: fc_norm=false (--set)." in message


def test_what_lies_beside_a_drafter_that_is_stored_alone_is_looked_at() -> None:
    for path in shipped_families().values():
        file = load_family(path).file
        assert file.stored == "in_target" or file.prefixes == [""], path.stem
