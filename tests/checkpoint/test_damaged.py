"""Damaged and odd checkpoints, one a row: each is refused in words that name the place, the tensor or key and the remedy, or
loads where the oddity is legal.

Every row damages a copy of a fixture in `m` and binds and loads it as `compile auto --model m` would.
"""

from __future__ import annotations

import json
import os
import pickle
import shutil
import tarfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from circuitgraph.checkpoint import bind
from circuitgraph.errors import CheckpointError, ProgramError
from tests.fixture_cases import FIXTURES

Tensors = dict[str, torch.Tensor]
Damage = Callable[[], Any]

FOLDER = Path("m")
FILE, CONFIG = FOLDER / "model.safetensors", FOLDER / "config.json"
INDEX, PICKLE = FOLDER / "model.safetensors.index.json", FOLDER / "pytorch_model.bin"
L = "mtp_layers.0."
UP, FC, NORM = f"{L}mlp.up_proj.weight", f"{L}input_proj.weight", f"{L}final_layernorm.weight"
FP8 = torch.float8_e4m3fn


@pytest.fixture(autouse=True)
def in_tmp(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Messages name paths, so work where they are short."""
    monkeypatch.chdir(tmp_path)
    shutil.copytree(FIXTURES / "qwen3_dense_mtp", "m", ignore=shutil.ignore_patterns("cases.*"))


# -- how to damage one ---------------------------------------------------------------------------------------------


def tensors(edit: Callable[[Tensors], object], file: Path = FILE) -> Damage:
    def damage() -> None:
        data = load_file(file)
        edit(data)
        save_file({name: tensor.contiguous() for name, tensor in data.items()}, file)

    return damage


def put(name: str, change: Callable[[torch.Tensor], torch.Tensor], **beside: torch.Tensor) -> Damage:
    """Another tensor under the name, and some with a suffix beside it."""
    return tensors(
        lambda data: data.update({name: change(data[name]), **{name + suffix: tensor for suffix, tensor in beside.items()}})
    )


def add(name: str, tensor: torch.Tensor) -> Damage:
    return tensors(lambda data: data.update({name: tensor}))


def drop(*names: str) -> Damage:
    return tensors(lambda data: [data.pop(name) for name in names])


def rename(old: str, new: str) -> Damage:
    return tensors(lambda data: data.update({new: data.pop(old)}))


def config(**values: Any) -> Damage:
    def damage() -> None:
        CONFIG.write_text(json.dumps({**json.loads(CONFIG.read_text()), **values}))

    return damage


def sizes(**values: Any) -> Damage:
    """Keys of the nested section."""

    def damage() -> None:
        data = json.loads(CONFIG.read_text())
        data["transformer_layer_config"].update(values)
        CONFIG.write_text(json.dumps(data))

    return damage


def cut(file: Path, size: int) -> Damage:
    return lambda: file.write_bytes(file.read_bytes()[:size])


def shards(after: Callable[[dict[str, str]], object] = lambda weight_map: None) -> None:
    """The checkpoint in two shards, a.safetensors and b.safetensors; `after` may change where the index says things are."""
    data = load_file(FILE)
    FILE.unlink()
    names = sorted(data)
    where = {name: "ab"[index % 2] + ".safetensors" for index, name in enumerate(names)}
    for shard in ("a.safetensors", "b.safetensors"):
        save_file({name: data[name] for name in names if where[name] == shard}, FOLDER / shard)
    after(where)
    INDEX.write_text(json.dumps({"weight_map": where}))


def pickled(change: Callable[[Tensors], Any] = lambda data: data, **how: Any) -> Damage:
    """A PyTorch file in place of the safetensors."""

    def damage() -> None:
        data = change(load_file(FILE))
        FILE.unlink()
        torch.save(data, PICKLE, **how)

    return damage


def pickled_shards() -> None:
    data = load_file(FILE)
    FILE.unlink()
    names = sorted(data)
    for shard, part in (("one.bin", names[:5]), ("two.bin", names[5:])):
        torch.save({name: data[name] for name in part}, FOLDER / shard)
    where = {name: "one.bin" if name in names[:5] else "two.bin" for name in names}
    (FOLDER / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": where}))


class RunsCode:
    def __reduce__(self) -> Any:
        return os.system, ("touch ran",)


def bare_pickle() -> None:
    FILE.unlink()
    PICKLE.write_bytes(pickle.dumps({"a": RunsCode()}, protocol=2))


def torch_script() -> None:
    FILE.unlink()
    with warnings.catch_warnings(action="ignore"):  # PyTorch no longer wants such files made
        torch.jit.save(torch.jit.script(torch.nn.Linear(2, 2)), PICKLE)


def in_turn(*damages: Damage) -> Damage:
    return lambda: [damage() for damage in damages]


def of(fixture: str, damage: Damage) -> Damage:
    """To another drafter than the dense one."""

    def put() -> None:
        shutil.rmtree("m")
        shutil.copytree(FIXTURES / fixture, "m", ignore=shutil.ignore_patterns("cases.*"))
        damage()

    return put


def within(section: str, **values: Any) -> Damage:
    """Keys of another section of the config."""

    def damage() -> None:
        data = json.loads(CONFIG.read_text())
        data[section].update(values)
        CONFIG.write_text(json.dumps(data))

    return damage


MOE, SHARD = "qwen3_next_mtp", FOLDER / "model-00003-of-00003.safetensors"
EXPERTS = "mtp.layers.0.mlp.experts."
EXPERT = f"{EXPERTS}5.up_proj.weight"


def experts(edit: Callable[[str, Tensors], object]) -> Damage:
    """`edit` changes the tensors of a shard; its first argument is each matrix of the drafter's experts in it."""

    def damage() -> None:
        index = FOLDER / "model.safetensors.index.json"
        where = json.loads(index.read_text())
        for file in sorted(FOLDER.glob("*.safetensors")):
            data = load_file(file)
            for name in [name for name in data if name.startswith(EXPERTS)]:
                edit(name, data)
            save_file(data, file)
            kept = {name: shard for name, shard in where["weight_map"].items() if shard != file.name}
            where["weight_map"] = {**kept, **dict.fromkeys(data, file.name)}
        index.write_text(json.dumps(where))

    return of(MOE, damage)


def to_fp8(scaled: Callable[[str], bool]) -> Damage:
    def edit(name: str, data: Tensors) -> None:
        data[name] = data[name].to(FP8)
        if scaled(name):
            data[f"{name}_scale_inv"] = torch.ones(1, 1)

    return experts(edit)


def mxfp4(columns: int, scales: int) -> Damage:
    values, scale = torch.zeros(160, columns, dtype=torch.uint8), torch.full((160, scales), 127, dtype=torch.uint8)
    return put(UP, lambda old: values, _scale=scale)


# -- what is refused: the damage, and what the message must say, in this order ---------------------------------------

REFUSED: dict[str, tuple[Damage, list[str]]] = {
    # tensors
    "a tensor is missing": (drop(NORM), ["m: no tensor for weight 'norm_weight'", f"expected '{NORM}'"]),
    "a tensor is renamed": (
        rename(UP, f"{L}mlp.w3.weight"),
        [f"m: no tensor for weight 'layer.ffn.up_proj'; expected '{UP}'", "m: mtp_layers.0.mlp.w3.weight: no weight", "waive it"],
    ),
    "a tensor is misspelt": (rename(UP, f"{L}mlp.up_prj.weight"), [f"expected '{UP}'. Did you mean 'mtp_layers.0.mlp.up_prj"]),
    "a tensor too many": (add(f"{L}gate.weight", torch.ones(2)), ["m: mtp_layers.0.gate.weight: no weight of the program uses"]),
    "a second module": (add("mtp_layers.1.input_proj.weight", torch.ones(2)), ["of one layer; got 0, 1. Several modules"]),
    "no drafter at all": (tensors(lambda data: [data.pop(name) for name in list(data)]), ["got none", "have a drafter?"]),
    "transposed": (put(FC, torch.t), [f"m/model.safetensors: {FC}: ", "expected [64, 128]; got [128, 64]", "transposed?"]),
    "another size": (put(NORM, lambda old: old[:32]), [f"{NORM}: ", "expected [64]; got [32]", "m/config.json"]),
    "no elements": (put(NORM, lambda old: old[:0]), [f"{NORM}: ", "expected [64]; got [0]"]),
    "a number": (put(NORM, lambda old: old.sum()), [f"{NORM}: ", "expected [64]; got []"]),
    "integers": (put(NORM, torch.Tensor.int), [f"{NORM}: the weight cannot be read from this dtype", "got i32", "Convert"]),
    "doubles": (put(NORM, torch.Tensor.double), [f"{NORM}: the weight cannot be read from this dtype", "got F64", "Convert"]),
    "complex": (put(NORM, lambda old: old.to(torch.complex64)), [f"{NORM}: the weight cannot be read", "got C64", "Convert"]),
    # scales
    "fp8 without a scale": (
        put(UP, lambda old: old.to(FP8)),
        [f"{UP}: F8_E4M3 needs one scale; expected {UP}_scale_inv", "none"],
    ),
    "fp8 with too few scales": (
        put(UP, lambda old: torch.ones(96, 64).to(FP8), _scale=torch.ones(95)),
        [f"{UP}_scale: does not fit as scales of fp8", "got f32[95]", "different exports"],
    ),
    "a scale of another weight": (
        add(f"{UP}_scale_inv", torch.ones(1, 1)),
        [f"{UP}: the weight is not quantised and has a scale; got bf16 and {UP}_scale_inv", "Remove the scale"],
    ),
    "a scale without a weight": (
        in_turn(add(f"{UP}_scale_inv", torch.ones(1, 1)), drop(UP)),
        [f"no tensor for weight 'layer.ffn.up_proj'; expected '{UP}'", f"{UP}_scale_inv: no weight of the program uses"],
    ),
    "a scale that is infinite": (
        put(UP, lambda old: old.to(FP8), _scale_inv=torch.full((2, 1), torch.inf)),
        [f"m/model.safetensors: {UP}_scale_inv: scales must be finite; expected numbers; got 2 of 2", "download or export"],
    ),
    "nvfp4 without its global scale": (
        tensors(
            lambda data: data.update(
                {
                    UP: torch.zeros(data[UP].shape[0], 32, dtype=torch.uint8),
                    f"{UP}_scale": torch.ones(data[UP].shape[0], 4).to(FP8),
                }
            )
        ),
        [f"{UP}: NVFP4 needs one scale over its scales; expected {UP}_scale_2", "got none", "export the checkpoint again"],
    ),
    "fp8 of the other kind": (
        put(UP, lambda old: old.to(torch.float8_e5m2), _scale=torch.ones(1)),
        [f"{UP}: the weight cannot be read from this dtype", "got F8_E5M2", "Convert the weight to bf16"],
    ),
    "GPTQ": (
        rename(UP, f"{L}mlp.up_proj.qweight"),
        ["no tensor for weight 'layer.ffn.up_proj'", "'mtp_layers.0.mlp.up_proj.qweight' holds integers", "use bf16, FP8"],
    ),
    "a block size of the wrong kind": (
        in_turn(config(quantization_config={"weight_block_size": 128}), put(UP, lambda old: old.to(FP8))),
        ["m/config.json: quantization_config.weight_block_size: the value is of the wrong kind; expected two positive"],
    ),
    # files
    "no weights": (FILE.unlink, ["m: no model weights here; expected model.safetensors or"]),
    "two files": (
        lambda: (FILE.rename(FOLDER / "a.safetensors"), shutil.copy(FOLDER / "a.safetensors", FOLDER / "b.safetensors")),
        ["m: several model weights; expected model.safetensors or", "a.safetensors, b.safetensors. Which of them"],
    ),
    "an empty file": (cut(FILE, 0), ["m/model.safetensors: not a readable safetensors file", "got 0 bytes", "Download it again"]),
    "a truncated header": (cut(FILE, 100), ["m/model.safetensors: not a readable safetensors file", "got 100 bytes"]),
    "truncated data": (cut(FILE, -8), ["m/model.safetensors: not a readable safetensors file", "Truncated or overwritten?"]),
    "a Git LFS pointer": (
        lambda: FILE.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n"),
        ["m/model.safetensors: not a readable safetensors file", "Download it again"],
    ),
    "an absent shard": (
        lambda: (shards(), (FOLDER / "b.safetensors").unlink()),
        [f"{INDEX}: ", "shard that is absent: b.safetensors", "Download it"],
    ),
    "a truncated shard": (
        lambda: (shards(), cut(FOLDER / "b.safetensors", -4)()),
        ["m/b.safetensors: not a readable safetensors file", "Download it again"],
    ),
    "an index that names another shard": (
        lambda: shards(lambda where: where.update({UP: "a.safetensors" if where[UP] == "b.safetensors" else "b.safetensors"})),
        [f"{INDEX}: {UP}: model.safetensors.index.json puts the tensor into", "download both again"],
    ),
    "an index that names a file elsewhere": (
        lambda: shards(lambda where: where.update({UP: "../target.safetensors"})),
        [f"{INDEX}: {UP}: the index names no such file; expected a .safetensors file of the same folder; got ../target"],
    ),
    "an index that is cut off": (
        lambda: (shards(), cut(INDEX, 200)()),
        [f"{INDEX}: not a readable shard index: JSONDecodeError"],
    ),
    "an index with a tensor twice": (
        lambda: (shards(), INDEX.write_text(f'{{"weight_map": {{"{UP}": "a.safetensors", "{UP}": "b.safetensors"}}}}')),
        [f"{INDEX}: not a readable shard index: ValueError: '{UP}' is in it twice"],
    ),
    # PyTorch's files
    "a pickle with code in it": (
        pickled(lambda data: {**data, UP: RunsCode()}),
        ["m/pytorch_model.bin: posix.system: the file runs code when it is read", "convert it to safetensors"],
    ),
    "a bare pickle with code in it": (bare_pickle, ["m/pytorch_model.bin: posix.system: the file runs code", "convert it"]),
    "a whole module": (
        pickled(lambda data: torch.nn.Linear(2, 2)),
        ["m/pytorch_model.bin: torch.nn.modules.linear.Linear: the file runs code", "convert it to safetensors"],
    ),
    "a trainer's checkpoint": (
        pickled(lambda data: {"state_dict": data, "epoch": 3}),
        [
            "m/pytorch_model.bin: state_dict: is no tensor",
            "got dict. Save what is under 'state_dict' alone",
            "epoch: is no tensor",
        ],
    ),
    "a list": (pickled(lambda data: list(data.values())), ["m/pytorch_model.bin: does not hold named tensors; got list"]),
    "a sparse tensor": (
        pickled(lambda data: {**data, UP: data[UP].float().to_sparse()}),
        [f"m/pytorch_model.bin: {UP}: is no tensor; expected a dense tensor", "torch.sparse_coo", "ordinary tensor"],
    ),
    "a truncated pickle": (
        in_turn(pickled(), cut(PICKLE, 5000)),
        ["m/pytorch_model.bin: not a readable PyTorch file", "got 5000 bytes", "Download it again"],
    ),
    "an empty pickle": (in_turn(pickled(), cut(PICKLE, 0)), ["m/pytorch_model.bin: not a readable PyTorch file", "got 0 bytes"]),
    "two pickles": (
        in_turn(pickled(), lambda: PICKLE.rename(FOLDER / "a.pt"), lambda: shutil.copy(FOLDER / "a.pt", FOLDER / "b.bin")),
        ["m: several model weights; expected pytorch_model.bin or", "a.pt, b.bin. Which of them"],
    ),
    "an absent pickled shard": (
        lambda: (pickled_shards(), (FOLDER / "two.bin").unlink()),
        ["m/pytorch_model.bin.index.json: ", "shard that is absent: two.bin"],
    ),
    # the target's tensors
    "a target without lm_head": (
        tensors(lambda data: data.pop("lm_head.weight"), FOLDER / "target/model.safetensors"),
        ["m/target: no tensor for weight 'lm_head'; expected 'lm_head.weight'"],
    ),
    "a target of another vocabulary": (
        lambda: (FOLDER / "target/config.json").write_text(
            json.dumps({**json.loads((FOLDER / "target/config.json").read_text()), "vocab_size": 500})
        ),
        ["m/target/config.json: vocab_size: target and drafter differ; expected 512", "got 500", "another target"],
    ),
    "a target whose embedding was resized": (
        tensors(
            lambda data: data.update({"model.embed_tokens.weight": torch.zeros(520, 64)}), FOLDER / "target/model.safetensors"
        ),
        ["m/target/model.safetensors: model.embed_tokens.weight: ", "expected [512, 64]; got [520, 64]"],
    ),
    # other people's quantisations
    **{
        f"bitsandbytes' {kind}": (
            tensors(
                lambda data, kind=kind: data.update(
                    {
                        UP: torch.zeros(5120, 1, dtype=torch.uint8),
                        f"{UP}.absmax": torch.ones(2),
                        f"{UP}.quant_map": torch.ones(16),
                    }
                    | {f"{UP}.quant_state.bitsandbytes__nf4": torch.ones(8)}
                    if kind == "nf4"
                    else {UP: data[UP].to(torch.int8), f"{L}mlp.up_proj.SCB": torch.ones(160)}
                )
            ),
            [
                f"m/model.safetensors: {UP.removesuffix('weight') if kind == 'int8' else UP}",
                "changes what the weight means",
                "bitsandbytes",
            ],
        )
        for kind in ("nf4", "int8")
    },
    "TorchScript": (
        torch_script,
        ["m/pytorch_model.bin: not a readable PyTorch file: it is a TorchScript archive, which the weights-only loader refuses;"],
    ),
    "a tar": (
        lambda: (FILE.unlink(), tarfile.open(PICKLE, "w").close()),
        ["m/pytorch_model.bin: not a readable PyTorch file: it is a .tar archive, which the weights-only loader refuses;"],
    ),
    "a number for a name": (
        pickled(lambda data: {**data, 5: data[UP]}),
        ["m/pytorch_model.bin: 5: is no name of a tensor; expected a text; got int. Save the model's state_dict"],
    ),
    # configs
    "a key twice": (
        lambda: CONFIG.write_text(CONFIG.read_text().replace('"hidden_size": 64', '"hidden_size": 32, "hidden_size": 64')),
        ["m/config.json: no config: 'hidden_size' is in it twice. Download it again"],
    ),
    "no config": (CONFIG.unlink, ["m/config.json: the file does not exist", "Give a model folder with a config.json"]),
    "a config that is cut off": (cut(CONFIG, 30), ["m/config.json:", "not valid JSON"]),
    "an unknown model": (
        sizes(model_type="qwen9"),
        ["m/config.json: no family recognises this config", "speculators_model_type 'mtp'", "Name the family"],
    ),
    "no section for the drafter": (
        in_turn(config(speculators_model_type="mtp"), config(transformer_layer_config=None)),
        ["m/config.json: no family recognises this config"],
    ),
    "a null where a number must be": (
        sizes(vocab_size=None),
        ["m/config.json: transformer_layer_config.vocab_size: the key is null; expected a positive integer"],
    ),
    "a number as text": (sizes(hidden_size="64"), ["hidden_size: the value is of the wrong kind", "got '64'"]),
    "an unknown rope type": (
        sizes(rope_scaling={"rope_type": "yran", "factor": 2.0}),
        ["m/config.json: ", "rope_scaling.rope_type: unknown RoPE kind 'yran'", "Did you mean 'yarn'?"],
    ),
    "a rope type of the wrong kind": (
        sizes(rope_scaling={"rope_type": {"kind": "yarn"}}),
        ["rope_scaling: has a set of parameters for each attention kind", "Which of these sets"],
    ),
    "a rope factor of the wrong kind": (
        sizes(rope_scaling={"rope_type": "linear", "factor": [2.0]}),
        ["rope_scaling.factor: the value is of the wrong kind; expected a positive, finite number; got [2.0]"],
    ),
    "two thetas": (
        sizes(rope_parameters={"rope_theta": 7.0}),
        ["rope_theta: the config gives two values; expected 7.0 as in its RoPE parameters; got 1000000"],
    ),
    "Mistral's window": (
        sizes(sliding_window=64, use_sliding_window=None),
        ["m/config.json: sliding_window: a window, and no word on which layers have it", "got 64", "Say 'use_sliding_window'"],
    ),
    "more modules than one": (
        config(num_nextn_predict_layers=3),
        ["m/config.json: num_nextn_predict_layers: family 'qwen3_dense_mtp' does not model this setting; expected 1; got 3"],
    ),
    "a config that is a list": (lambda: CONFIG.write_text("[]"), ["m/config.json: a config is a JSON object; got list. Is it"]),
    "a config that nests without end": (
        lambda: CONFIG.write_text('{"a":' * 100_000),
        ["m/config.json: no config: maximum recursion depth exceeded", "Download it again"],
    ),
    "a number of thousands of digits": (
        lambda: CONFIG.write_text('{"a": ' + "1" * 5000 + "}"),
        ["m/config.json: no config: Exceeds the limit", "Download it again"],
    ),
    "a config in UTF-16": (
        lambda: CONFIG.write_text(CONFIG.read_text(), encoding="utf-16"),
        ["m/config.json: not a text in UTF-8: invalid start byte at byte 0. Save it as UTF-8, or download it again"],
    ),
    "a config that is a folder": (
        lambda: (CONFIG.unlink(), CONFIG.mkdir()),
        ["m/config.json: cannot read the file: Is a directory"],
    ),
    "a huge rope factor": (
        sizes(rope_scaling={"rope_type": "linear", "factor": 1e308}),
        ["rope_scaling.factor: the value is of the wrong kind; expected a positive, finite number; got 1e+308"],
    ),
    "experts as text": (
        of(MOE, config(num_experts="8")),
        [
            "m/config.json: num_experts: the value is of the wrong kind; expected a positive integer; got '8'",
            "'mtp_moe' needs it",
        ],
    ),
    "more experts chosen than there are": (
        of(MOE, config(num_experts_per_tok=9)),
        ["cannot choose 9 experts; expected 1..8. Are the numbers in m/config.json those of one model?"],
    ),
    "a factor that is no number": (
        of("deepseek_v3_mtp", config(routed_scaling_factor=float("nan"))),
        ["m/config.json: routed_scaling_factor: the value is of the wrong kind; expected a finite number; got nan"],
    ),
    "shared experts as text": (
        of("deepseek_v3_mtp", config(n_shared_experts="2")),
        ["m/config.json: n_shared_experts: the value is of the wrong kind; expected a number; got '2'"],
    ),
    "shared experts in a list": (
        of("deepseek_v3_mtp", config(n_shared_experts=[1])),
        ["m/config.json: n_shared_experts: the value is of the wrong kind; expected a number; got [1]"],
    ),
    "a mask that is no token": (
        of("dflash_qwen3", within("dflash_config", mask_token_id=512)),
        ["m/config.json: dflash_config.mask_token_id: is no token; expected 0 to 511; got 512"],
    ),
    "a mask in a list": (
        of("dflash_qwen3", within("dflash_config", mask_token_id=[3])),
        ["m/config.json: dflash_config.mask_token_id: the value is of the wrong kind; expected an integer", "got [3]"],
    ),
    "a block of one row": (
        of("dflash_qwen3", config(block_size=1)),
        ["m/config.json: block_size: is no size of a block; expected 2 or more; got 1"],
    ),
    "layers that are no numbers": (
        of("dflash_qwen3", within("dflash_config", target_layer_ids=[None, 1, 2])),
        ["m/config.json: dflash_config.target_layer_ids: the value is of the wrong kind; expected a list of whole numbers"],
    ),
    "EAGLE-3 with a setting of two meanings": (
        of("eagle3_llama", config(norm_output=True)),
        [
            "m/config.json: norm_output: the setting means several things",
            "by the switch 'recycle' (--set) which one",
            "post_norm after it, in vLLM",
        ],
    ),
    "a setting of two meanings that is no setting": (
        of("eagle3_llama", config(norm_output="yes")),
        ["m/config.json: norm_output: the setting means several things; expected False; got 'yes'"],
    ),
    # settings that other engines know and programs here do not
    "EAGLE-3 with parallel_drafting true": (
        of("eagle3_llama", config(parallel_drafting=True)),
        ["m/config.json: parallel_drafting: family 'eagle3_llama' does not model this setting; expected False; got True"],
    ),
    **{
        f"EAGLE-3 with {key} {str(value).lower()}": (
            of("eagle3_llama", config(eagle_config={key: value})),
            [f"m/config.json: eagle_config.{key}: family 'eagle3_llama' does not model this setting; expected {expected}"],
        )
        for key, value, expected in (
            ("use_mtp_layernorm", True, False),
            ("use_last_layernorm", False, True),
            ("use_input_layernorm_in_first_layer", False, True),
            ("parallel_draft_step", 4, 1),
        )
    },
    **{
        f"DFlash with {key} {value} {place}": (
            of("dflash_qwen3", within("dflash_config", **{key: value}) if place == "inside" else config(**{key: value})),
            [f"{key}: family 'dflash_qwen3' does not model this setting; expected {expected}; got {value}"],
        )
        for key, value, expected in (
            ("attention_sink_bias", True, False),
            ("is_neox_style", False, True),
        )
        for place in ("at the top", "inside")
    },
    "DeepSeek without interleaving": (
        of("deepseek_v3_mtp", config(rope_interleave=False)),
        ["m/config.json: rope_interleave: family 'deepseek_v3_mtp' does not model this setting; expected True; got False"],
    ),
    "activations that are rotated online": (
        config(quantization_config={"transform_config": {"config_groups": {"u": {"type": "hadamard"}}}}),
        ["m/config.json: quantization_config.transform_config: activations are transformed", "without transforms"],
    ),
    "a target whose activations are rotated online": (
        lambda: (FOLDER / "target/config.json").write_text(
            json.dumps(
                {
                    **json.loads((FOLDER / "target/config.json").read_text()),
                    "quantization_config": {"transform_config": {"config_groups": {"u": {}}}},
                }
            )
        ),
        ["m/target/config.json: quantization_config.transform_config: activations are transformed"],
    ),
    "embeddings that are tied and not": (
        of("qwen3_5_mtp", config(tie_word_embeddings=False)),
        [
            "m/config.json: text_config.tie_word_embeddings: the config gives two values; "
            "expected false as at the top of the file; got True. Is lm_head the embedding?"
        ],
    ),
    # layers of the target
    "two auxiliary layers": (
        of("eagle3_llama", config(eagle_aux_hidden_state_layer_ids=[1, 2])),
        ["m/config.json: eagle_aux_hidden_state_layer_ids: the list has another length; expected 3 layers", "got [1, 2]"],
    ),
    "auxiliary layers in two places": (
        of(
            "eagle3_llama",
            config(eagle_config={"eagle_aux_hidden_state_layer_ids": [1, 2, 3]}, eagle_aux_hidden_state_layer_ids=[2, 3, 4]),
        ),
        [
            "m/config.json: eagle_aux_hidden_state_layer_ids: the config gives two lists; "
            "expected [1, 2, 3] as in eagle_config.eagle_aux_hidden_state_layer_ids; got [2, 3, 4]. Remove"
        ],
    ),
    "an auxiliary layer before the first": (
        of("eagle3_llama", config(eagle_config={"eagle_aux_hidden_state_layer_ids": [-1, 2, 3]})),
        ["m/config.json: eagle_config.eagle_aux_hidden_state_layer_ids: the list names no layers", "0 or more; got [-1, 2, 3]"],
    ),
    "a layer that the target has not": (
        of("dflash_qwen3", within("dflash_config", target_layer_ids=[1, 2, 6])),
        [
            "m/config.json: dflash_config.target_layer_ids: the list names no layers of the target; "
            "expected 0 to 5, as num_target_layers is 6; got [1, 2, 6]"
        ],
    ),
    # what belongs to a weight
    **{
        f"{other} of a borrowed head": (
            of("mimo_mtp", add(f"lm_head.{other}", torch.ones(512))),
            [f"m/model.safetensors: lm_head.{other}: changes what the weight means", "beside 'lm_head.weight'. Zero points"],
        )
        for other in ("weight_zero_point", "weight_g_idx", "pre_quant_scale")
    },
    "a zero point of the drafter's own": (
        add(f"{UP}_zero_point", torch.ones(160, 1)),
        [f"m/model.safetensors: {UP}_zero_point: changes what the weight means"],
    ),
    "a bias of a borrowed head": (
        of("mimo_mtp", add("lm_head.bias", torch.ones(512))),
        ["m: lm_head.bias: belongs to 'lm_head', and no program uses it"],
    ),
    "a bias of the target's head": (
        tensors(lambda data: data.update({"lm_head.bias": torch.ones(512)}), FOLDER / "target/model.safetensors"),
        ["m/target: lm_head.bias: belongs to 'lm_head', and no program uses it. The target computes something else"],
    ),
    # mixtures, maps and four bits
    **{
        f"EAGLE-3 with {name}": (
            of("eagle3_llama", add(name, torch.ones(64))),
            [f"m: {name}: no weight of the program uses this tensor. Program 'eagle3' does not model it"],
        )
        for name in ("hidden_norm.weight", "embed_norm.weight", "mask_hidden")
    },
    **{
        f"EAGLE-3 with {name} that its config does not say": (
            of("eagle3_llama", add(name, torch.ones(64))),
            [
                f"m: {name}: no weight of the program uses this tensor. It is '{weight}', which {switch}=false leaves out. ",
                f"say so: '{key}': true in m/config.json.",
            ],
        )
        for name, weight, switch, key in (
            ("fc_norm.0.weight", "low_norm", "fc_norm", "fc_norm"),
            ("aux_norm_low.weight", "low_norm", "fc_norm", "fc_norm"),
            ("input_norm.weight", "aux_norm", "norm_before_fc", "norm_before_fc"),
            ("midlayer.self_attn.o_proj.bias", "o_bias", "output_bias", "attention_bias"),
        )
    },
    **{
        f"EAGLE-3 with {key} and no tensor for it": (
            of("eagle3_llama", config(**{key: True})),
            [f"m: no tensor for weight '{weight}'; expected '{name}'"],
        )
        for key, weight, name in (
            ("use_aux_norm", "low_norm", "fc_norm.0.weight"),
            ("fc_norm", "low_norm", "fc_norm.0.weight"),
            ("norm_before_fc", "aux_norm", "input_norm.weight"),
            ("embed_requires_grad", "embed_tokens", "embed_tokens.weight"),
            ("attention_bias", "q_bias", "midlayer.self_attn.q_proj.bias"),
        )
    },
    "one expert in FP8": (
        experts(lambda name, data: data.update({name: data[name].to(FP8)}) if name == EXPERT else None),
        [f"m/{SHARD.name}: {EXPERT}: experts differ; expected bf16[32, 64]", "got F8_E4M3[32, 64]", "export them alike"],
    ),
    "experts in FP8 without scales": (
        to_fp8(lambda name: False),
        [".gate_proj.weight: F8_E4M3 needs one scale; expected", "got none. Numbers mean nothing without their scale"],
    ),
    "one expert without a scale": (
        to_fp8(lambda name: name != EXPERT),
        [f"m: {EXPERT}_scale_inv: an expert lacks this tensor; expected one for each of 8 experts", "again"],
    ),
    "an expert without a matrix": (
        experts(lambda name, data: data.pop(name) if name == EXPERT else None),
        [f"m: {EXPERT}: an expert lacks this tensor; expected one for each of 8 experts", "again"],
    ),
    "an expert too many": (
        experts(lambda name, data: data.update({EXPERT.replace(".5.", ".8."): data[name].clone()}) if name == EXPERT else None),
        ["up_proj.weight: weight 'layer.ffn.up' has another shape; expected [8, 32, 64]; got [9, 32, 64]", "m/config.json"],
    ),
    "two spellings of a weight": (
        of(
            "eagle3_llama",
            tensors(lambda data: data.update({"layers.0.self_attn.q_proj.weight": data["midlayer.self_attn.q_proj.weight"] * 2})),
        ),
        [
            "m: layers.0.self_attn.q_proj.weight: no weight of the program uses this tensor. "
            "'q_proj' is taken from 'midlayer.self_attn.q_proj.weight': remove the one that is out of date."
        ],
    ),
    "no map": (
        of("eagle3_llama", drop("d2t", "t2d")),
        ["m: no tensor for weight 'd2t'; expected 'd2t'. If the model has none, say so: ids=own (--set)."],
    ),
    "no bias, but one promised": (
        of("eagle1_llama", config(bias=True)),
        ["m: no tensor for weight 'fc_bias_vector'; expected 'fc.bias'. If the model has none, say so: fc_bias=false (--set)."],
    ),
    "a map that its marks deny": (
        of("eagle3_llama", put("d2t", torch.zeros_like)),
        [
            "m/model.safetensors: t2d: marks other ids; expected the 192 ids that 'd2t' leads to; got 192 ids, ",
            "different exports",
        ],
    ),
    "a map of another target": (
        of("eagle3_llama", put("d2t", lambda offsets: offsets + 10000)),
        ["m/model.safetensors: d2t: leads out of the target's vocabulary; expected ids 0..511; got own id 0 with offset 1"],
    ),
    "a map of ids": (
        of("eagle3_llama", put("d2t", lambda offsets: offsets + torch.arange(len(offsets)))),
        ["d2t: leads out of the target's vocabulary", "or holds ids instead of offsets"],
    ),
    "a map of floats": (
        of("eagle3_llama", put("d2t", torch.Tensor.float)),
        ["m/model.safetensors: d2t: the table cannot be read from this dtype; expected i64; got f32"],
    ),
    "a map of another vocabulary": (
        of("eagle3_llama", put("d2t", lambda old: old[:100])),
        ["m/model.safetensors: d2t: ", "expected [192]; got [100]", "m/config.json"],
    ),
    "mxfp4 with odd columns": (
        mxfp4(31, 2),
        [f"{UP}: ", "expected [160, 64]; got [160, 62] of mxfp4", "m/config.json"],
    ),
    "mxfp4 with too few scales": (
        mxfp4(32, 1),
        [f"{UP}_scale: does not fit as scales of mxfp4; expected U8 or F8_E8M0 [160, 2]; got U8[160, 1]", "different exports"],
    ),
    "a bias that the file has not": (
        sizes(attention_bias=True),
        [f"no tensor for weight 'layer.attn.q_bias'; expected '{L}self_attn.q_proj.bias'"],
    ),
}


@pytest.mark.parametrize(("damage", "said"), REFUSED.values(), ids=REFUSED)
def test_refused(damage: Damage, said: list[str]) -> None:
    damage()
    with pytest.raises((CheckpointError, ProgramError)) as caught:
        bind("auto", model="m").load_weights(positions=4)
    message = str(caught.value)
    place = 0
    for part in said:
        place = message.find(part, place)
        assert place >= 0, f"{part!r} is not in, or not in this order in: {message}"
    assert not Path("ran").exists(), "code of a checkpoint ran"


@pytest.mark.parametrize(
    ("damage", "told"),
    [
        (
            sizes(num_attention_heads="64"),
            "num_attention_heads: the value is of the wrong kind; expected a positive integer; got '64'",
        ),
        (
            sizes(num_attention_heads=0),
            "num_attention_heads: the value is of the wrong kind; expected a positive integer; got 0",
        ),
        (sizes(head_dim="32"), "head_dim: the value is of the wrong kind; expected a positive integer; got '32'"),
    ],
    ids=["heads", "no heads", "columns"],
)
def test_what_follows_from_a_fault_is_none(damage: Damage, told: str) -> None:
    damage()
    with pytest.raises(CheckpointError) as caught:
        bind("auto", model="m")
    assert str(caught.value) == f"m/config.json: transformer_layer_config.{told}"


# -- what is legal: the damage; the weights are those of the whole checkpoint -----------------------------------------

LEGAL: dict[str, Damage] = {
    "sharded": shards,
    "a shard that is not needed is absent": lambda: shards(lambda where: where.update({"lm_head.weight": "c.safetensors"})),
    "the same tensor in two shards: the index decides": lambda: (
        shards(),
        tensors(
            lambda data: data.update({name: torch.zeros(3) for name in load_file(FOLDER / "b.safetensors")}),
            FOLDER / "a.safetensors",
        )(),
    ),
    "a tensor in a shard that the index does not know": lambda: (
        shards(),
        tensors(lambda data: data.update({f"{L}old.weight": torch.zeros(3)}), FOLDER / "a.safetensors")(),
    ),
    "another file name": lambda: FILE.rename(FOLDER / "head.safetensors"),
    "PyTorch's file": pickled(),
    "PyTorch's file of old": pickled(_use_new_zipfile_serialization=False),
    "PyTorch's file of another name": in_turn(pickled(), lambda: PICKLE.rename(FOLDER / "medusa_lm_head.pt")),
    "PyTorch's shards": pickled_shards,
    "a trainer's files beside a pickle": in_turn(
        pickled(),
        lambda: [torch.save(RunsCode(), FOLDER / name) for name in ("training_args.bin", "optimizer.pt", "rng_state_0.pth")],
    ),
    "a pickle beside safetensors is not read": lambda: torch.save(RunsCode(), PICKLE),
    "strided views in a pickle": pickled(
        lambda data: {name: torch.stack([tensor, tensor], -1)[..., 0] for name, tensor in data.items()}
    ),
    "parameters in a pickle": pickled(lambda data: {name: torch.nn.Parameter(tensor) for name, tensor in data.items()}),
    "a copy of the target's lm_head, even a wrong one": add("lm_head.weight", torch.randn(512, 64)),
    "an empty copy of the embedding": add("embed_tokens.weight", torch.zeros(0, 64)),
    "a quantised copy of the lm_head": tensors(
        lambda data: data.update({"lm_head.weight": torch.zeros(512, 64).to(FP8), "lm_head.weight_scale": torch.ones(1)})
    ),
    "scales of activations and of a cache": tensors(
        lambda data: data.update({f"{L}mlp.up_proj.input_scale": torch.ones(1), f"{L}self_attn.k_proj.k_scale": torch.ones(1)})
    ),
    "another layer index": tensors(
        lambda data: [data.update({name.replace(".0.", ".48.", 1): data.pop(name)}) for name in list(data) if name.startswith(L)]
    ),
    "a mark before the text": lambda: CONFIG.write_text(CONFIG.read_text(), encoding="utf-8-sig"),
    "nested nulls": sizes(rope_scaling={"rope_type": None, "factor": None, "original_max_position_embeddings": None}),
    "nulls": sizes(rope_scaling=None, sliding_window=None, layer_types=None, rope_parameters=None),
    "keys that nobody asks for": in_turn(config(auto_map={"AutoModel": "x.y"}, extra=[1, {"a": None}]), sizes(pad_token_id=-1)),
    "a window as long as the context": sizes(sliding_window=4096, use_sliding_window=None),
    "rope parameters under each attention kind": sizes(
        rope_theta=None,
        rope_parameters={
            "full_attention": {"rope_type": "default", "rope_theta": 1000000},
            "sliding_attention": {"rope_theta": 1.5},
        },
    ),
    "theta in two places that agree": sizes(rope_parameters={"rope_theta": 1000000.0, "rope_type": "default"}),
}


EAGLE3_LEGAL: dict[str, Damage] = {
    "an empty list of auxiliary layers: the usual ones": config(eagle_config={"eagle_aux_hidden_state_layer_ids": []}),
    "marks that were never filled in": put("t2d", torch.zeros_like),
}


@pytest.mark.parametrize("damage", EAGLE3_LEGAL.values(), ids=EAGLE3_LEGAL)
def test_legal_of_eagle3(damage: Damage) -> None:
    whole = bind("auto", model=FIXTURES / "eagle3_llama")
    of("eagle3_llama", damage)()
    bound = bind("auto", model="m")
    assert bound.circuit.facts == whole.circuit.facts
    assert bound.tensors.keys() == whole.tensors.keys()


@pytest.mark.parametrize("damage", LEGAL.values(), ids=LEGAL)
def test_legal(damage: Damage) -> None:
    whole = bind("auto", model=FIXTURES / "qwen3_dense_mtp").load_weights(positions=4)
    damage()
    weights = bind("auto", model="m").load_weights(positions=4)
    assert weights.keys() == whole.keys()
    for name, tensor in whole.items():
        assert torch.equal(weights[name], tensor), name
        assert weights[name].is_contiguous()
    assert not Path("ran").exists(), "code of a checkpoint ran"
