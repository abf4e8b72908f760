"""Settings that change what a drafter computes and that no tensor shows: none is ignored, wherever it stands."""

from __future__ import annotations

import json
import shutil
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from circuitgraph.checkpoint import bind, load_circuit, load_family, shipped_families
from circuitgraph.checkpoint.config import read_raw
from circuitgraph.checkpoint.settings import LAYERS, SCORES, accepts
from circuitgraph.errors import CheckpointError
from circuitgraph.language import shipped_programs
from tests.fixture_cases import FIXTURES

FAMILIES = tuple(shipped_families())
ATTENDING = tuple(name for name in FAMILIES if name != "medusa1")


@pytest.fixture(autouse=True)
def in_tmp(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


family_of = cache(load_family)


def config_of(family: str, **settings: Any) -> dict[str, Any]:
    """A family's example with some settings more, where the family keeps those of layers; objects are merged."""
    file = family_of(family).file
    config = json.loads(json.dumps(file.example))
    section = next(name for name in file.sections if name == "" or name in config)
    inner = config[section] if section else config
    for key, value in settings.items():
        inner[key] = {**inner.get(key, {}), **value} if isinstance(value, dict) else value
    return config


def facts(family: str, given: dict | None = None, **settings: Any) -> dict[str, Any]:
    """What a family makes of a config: its switches, and the layers of the target that it reads."""
    known, raw = family_of(family), read_raw(config_of(family, **settings))
    config = known.read_config(raw, attention=family != "medusa1", told=given or ())
    return {"hidden_layers": config.values.get("hidden_layers"), **known.switches(config), **(given or {})}


def refusal(family: str, **settings: Any) -> str:
    with pytest.raises(CheckpointError) as caught:
        facts(family, **settings)
    return str(caught.value)


def changed(family: str, **settings: Any) -> dict[str, Any]:
    """The switches that these settings turn."""
    plain = facts(family)
    return {key: value for key, value in facts(family, **settings).items() if value != plain[key]}


# -- in objects of the config --------------------------------------------------------------------------------------

NESTED = [
    ({"norm_before_residual": True}, {"norm_before_residual": True}),
    ({"norm_before_fc": True}, {"norm_before_fc": True}),
    ({"fc_norm": True}, {"fc_norm": True}),
    ({"use_aux_norm": True}, {"fc_norm": True}),
    ({"attention_bias": True}, {"qkv_bias": True, "output_bias": True}),
    ({"rope_is_neox_style": False}, {"rope_style": "interleaved"}),
    ({"return_hidden_post_norm": True}, {"recycle": "post_norm"}),
    ({"has_lm_head": True}, {}),
    ({"norm_before_residual": None, "parallel_draft_heads_num_layers": 1, "next_layer_regular": True}, {}),
]


@pytest.mark.parametrize(("inside", "turned"), NESTED)
def test_eagle3_settings_may_stand_in_an_object(inside: dict, turned: dict) -> None:
    alone = {"attention_bias": None} if "attention_bias" in inside else {}
    assert changed("eagle3_llama", **alone, eagle_config=inside) == turned
    alike = {key: value for key, value in inside.items() if key not in ("return_hidden_post_norm", "next_layer_regular")}
    assert changed("eagle3_llama", **alike, eagle_config=inside) == turned


def test_a_nested_setting_reaches_the_tensors() -> None:
    shutil.copytree(FIXTURES / "eagle3_llama", "m")
    tensors = load_file("m/model.safetensors")
    norms = {f"fc_norm.{index}.weight": torch.ones(64).half() for index in range(3)}
    save_file(tensors | norms, "m/model.safetensors")
    config = json.loads(Path("m/config.json").read_text())
    Path("m/config.json").write_text(json.dumps({**config, "eagle_config": {"fc_norm": True}}))
    assert bind("auto", model="m").tensors["low_norm"].name == "fc_norm.0.weight"


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        (
            {"norm_before_residual": False, "eagle_config": {"norm_before_residual": True}},
            "config: eagle_config.norm_before_residual: the config gives two values; expected False as in "
            "norm_before_residual; got True. Remove the one that is out of date. "
            "Or say which by the switch 'norm_before_residual' (--set).",
        ),
        (
            {"fc_norm": True, "eagle_config": {"use_aux_norm": False}},
            "config: eagle_config.use_aux_norm: the config gives two values; expected True as in fc_norm; got False",
        ),
        (
            {"norm_output": False, "eagle_config": {"return_hidden_post_norm": True}},
            "config: eagle_config.return_hidden_post_norm: the config gives two values; expected False as in norm_output; got",
        ),
        (
            {"attention_bias": False, "eagle_config": {"attention_bias": 0}},
            "config: eagle_config.attention_bias: the config gives two values; expected False as in attention_bias; got 0",
        ),
        (
            {"eagle_config": {"norm_before_residual": "yes"}},
            "config: eagle_config.norm_before_residual: the value decides switch 'norm_before_residual' and is of the "
            "wrong kind; expected true or false; got 'yes'",
        ),
        (
            {"eagle_config": {"norm_output": True}},
            "config: eagle_config.norm_output: the setting means several things; expected False; got True. "
            "Say by the switch 'recycle' (--set) which one it is here",
        ),
        (
            {"eagle_config": {"logit_scale": 0.5}},
            "config: eagle_config.logit_scale: family 'eagle3_llama' does not model this setting; expected 1; got 0.5",
        ),
        (
            {"eagle_config": {"norm_before_residul": True}},
            "config: eagle_config.norm_before_residul: family 'eagle3_llama' knows no such setting there; expected no such key; "
            "got True. Did you mean 'norm_before_residual'? If it changes nothing of what the drafter computes, remove it.",
        ),
        (
            {"eagle_config": {"zzz": 3}},
            "config: eagle_config.zzz: family 'eagle3_llama' knows no such setting there; expected no such key; got 3. If ",
        ),
        (
            {"eagle_config": {"draft_vocab_size": 5}},
            "config: eagle_config.draft_vocab_size: family 'eagle3_llama' knows no such setting there",
        ),
    ],
)
def test_eagle3_settings_in_an_object_that_are_refused(settings: dict, told: str) -> None:
    message = refusal("eagle3_llama", **settings)
    assert message.startswith(told)
    assert len(message.splitlines()) == 1


def test_two_switches_by_one_key_are_told_once() -> None:
    message = refusal("eagle3_llama", attention_bias=True, eagle_config={"attention_bias": False})
    assert message == (
        "config: eagle_config.attention_bias: the config gives two values; expected True as in attention_bias; got False. "
        "Remove the one that is out of date. Or say which by the switches 'qkv_bias' and 'output_bias' (--set)."
    )


def test_a_switch_that_is_given_decides_what_the_config_says_twice() -> None:
    twice = {"norm_before_residual": False, "eagle_config": {"norm_before_residual": True}}
    circuit = load_circuit("eagle3", config=config_of("eagle3_llama", **twice), switches={"norm_before_residual": True})
    assert dict(circuit.facts)["norm_before_residual"] is True


@pytest.mark.parametrize("family", ["eagle1_llama", "eagle3_llama"])
def test_what_is_no_object(family: str) -> None:
    message = refusal(family, eagle_config="yes")
    assert message == "config: eagle_config: the value is of the wrong kind; expected an object; got 'yes'"


def test_an_object_in_the_section_of_sizes_is_looked_at() -> None:
    config = {"speculators_model_type": "eagle3", "transformer_layer_config": config_of("eagle3_llama", eagle_config={"zzz": 1})}
    with pytest.raises(
        CheckpointError, match=r"transformer_layer_config\.eagle_config\.zzz: family 'eagle3_llama' knows no such"
    ):
        load_circuit("eagle3", config=config)


@pytest.mark.parametrize(
    ("inside", "told"),
    [
        ({"use_last_layernorm": True}, "eagle_config.use_last_layernorm: family 'eagle1_llama' does not model this setting"),
        ({"use_aux_hidden_state": True}, "eagle_config.use_aux_hidden_state: family 'eagle1_llama' does not model"),
        ({"norm_before_fc": True}, "eagle_config.norm_before_fc: family 'eagle1_llama' knows no such setting there"),
    ],
)
def test_eagle1_settings_in_an_object(inside: dict, told: str) -> None:
    assert told in refusal("eagle1_llama", eagle_config=inside)
    none = {"use_last_layernorm": False, "use_aux_hidden_state": False, "parallel_draft_step": 1}
    assert changed("eagle1_llama", eagle_config=none) == {}
    assert changed("eagle1_llama", eagle_config={"has_lm_head": True, "eagle_aux_hidden_state_layer_ids": []}) == {}


@pytest.mark.parametrize("nested", [True, False])
def test_eagle1_heads_read_no_auxiliary_layers(nested: bool) -> None:
    """ModelOpt writes an empty list."""
    ids = {"eagle_aux_hidden_state_layer_ids": [2, 16, 29]}
    message = refusal("eagle1_llama", **({"eagle_config": ids} if nested else ids))
    assert message == (
        f"config: {'eagle_config.' if nested else ''}eagle_aux_hidden_state_layer_ids: family 'eagle1_llama' does not model this "
        "setting; expected an empty list; got [2, 16, 29]. Drafters of family 'eagle3_llama' have it: if this is one, say "
        "family='eagle3_llama' (--family)."
    )


@pytest.mark.parametrize(
    ("inside", "told"),
    [
        ({"shift_label": True}, "dflash_config.shift_label: family 'dflash_qwen3' does not model this setting; expected False"),
        ({"projector_type": "domino"}, "dflash_config.projector_type: family 'dflash_qwen3' does not model this setting"),
        ({"markov_rank": 8}, "dflash_config.markov_rank: family 'dflash_qwen3' does not model this setting; expected 0; got 8"),
        ({"use_aux_hidden_state": False}, "dflash_config.use_aux_hidden_state: family 'dflash_qwen3' does not model"),
        ({"sliding_window": 64}, "dflash_config.sliding_window: family 'dflash_qwen3' knows no such setting there"),
        ({"is_causal": True}, "dflash_config.is_causal: family 'dflash_qwen3' knows no such setting there"),
    ],
)
def test_dflash_settings_in_an_object(inside: dict, told: str) -> None:
    assert told in refusal("dflash_qwen3", dflash_config=inside)


def test_a_dflash_setting_in_an_object_is_read() -> None:
    inside = {"attention_bias": True}
    assert changed("dflash_qwen3", attention_bias=None, dflash_config=inside) == {"qkv_bias": True, "output_bias": True}
    none = {"shift_label": False, "use_aux_hidden_state": True, "block_size": 16, "causal": False}
    assert changed("dflash_qwen3", dflash_config=none) == {}
    none = {"projector_type": "dflash", "attention_mode": "gqa", "conv_kernel_size": 0, "selector_rank": 0}
    assert changed("dflash_qwen3", dflash_config=none) == {}


# -- in either of two places ---------------------------------------------------------------------------------------

ZLAB = {
    "architectures": ["DFlashDraftModel"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "dtype": "bfloat16",
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 2560,
    "initializer_range": 0.02,
    "intermediate_size": 9728,
    "layer_types": ["full_attention"] * 5,
    "max_position_embeddings": 262144,
    "max_window_layers": 5,
    "model_type": "qwen3",
    "num_attention_heads": 32,
    "num_hidden_layers": 5,
    "num_key_value_heads": 8,
    "num_target_layers": 32,
    "rms_norm_eps": 1e-06,
    "rope_theta": 10000000,
    "tie_word_embeddings": True,
    "use_cache": True,
    "use_sliding_window": False,
    "vocab_size": 248320,
}
"""As of z-lab's DFlash for Qwen3.5-4B, without what it says of blocks."""
BLOCKS: dict[str, Any] = {"block_size": 16, "mask_token_id": 248070, "target_layer_ids": [1, 8, 15, 22, 29]}


@pytest.mark.parametrize("nested", [(), ("mask_token_id", "target_layer_ids"), tuple(BLOCKS), ("block_size",)])
@pytest.mark.parametrize("twice", [True, False])
def test_what_is_said_of_blocks_may_stand_in_either_place(nested: tuple[str, ...], twice: bool) -> None:
    config: dict[str, Any] = {**ZLAB, **{key: value for key, value in BLOCKS.items() if twice or key not in nested}}
    if nested:
        config["dflash_config"] = {key: BLOCKS[key] for key in nested}
    circuit = load_circuit("dflash", config=config)
    made = {"block_size": 16, "mask_token": 248070, "hidden_layers": "1 8 15 22 29"}
    assert made.items() <= dict(circuit.facts).items()
    assert next(weight.type.shape for weight in circuit.weights if weight.name == "fc") == (2560, 5 * 2560)


@pytest.mark.parametrize(("key", "other"), [("block_size", 8), ("mask_token_id", 5), ("target_layer_ids", [1, 2, 3, 4, 5])])
def test_two_places_that_differ_are_both_named(key: str, other: Any) -> None:
    config = {**ZLAB, **BLOCKS, "dflash_config": {**BLOCKS, key: other}}
    with pytest.raises(CheckpointError) as caught:
        load_circuit("dflash", config=config)
    message = str(caught.value)
    assert f"dflash_config.{key}" in message
    assert f" {key}" in message
    assert "the config gives two values" in message
    assert len(message.splitlines()) == 1


@pytest.mark.parametrize(
    ("key", "wrong"), [("block_size", 1), ("mask_token_id", 248320), ("target_layer_ids", [1, 8, 15, 22, 32])]
)
@pytest.mark.parametrize("nested", [True, False])
def test_a_fault_names_the_place_that_is_there(key: str, wrong: Any, nested: bool) -> None:
    blocks = {**BLOCKS, key: wrong}
    with pytest.raises(CheckpointError, match=rf"^config: {r'dflash_config.' if nested else ''}{key}: "):
        load_circuit("dflash", config={**ZLAB, **({"dflash_config": blocks} if nested else blocks)})


@pytest.mark.parametrize("key", BLOCKS)
def test_what_stands_in_neither_place(key: str) -> None:
    with pytest.raises(CheckpointError, match=rf"config: dflash_config.{key} or {key}: the key is missing"):
        load_circuit("dflash", config={**ZLAB, "dflash_config": {other: BLOCKS[other] for other in BLOCKS if other != key}})


# -- in a section and at the top -----------------------------------------------------------------------------------


def of_speculators(top: dict[str, Any], section: dict[str, Any]) -> dict[str, Any]:
    layers = {key: value for key, value in config_of("eagle3_llama").items() if key not in ("attention_bias", "draft_vocab_size")}
    return {
        "speculators_model_type": "eagle3",
        "draft_vocab_size": 32000,
        "transformer_layer_config": {**layers, **section},
        **top,
    }


@pytest.mark.parametrize(
    ("top", "section", "told"),
    [
        (
            {"norm_before_residual": True},
            {"norm_before_residual": False},
            "config: norm_before_residual: the config gives two values; expected False as in "
            "transformer_layer_config.norm_before_residual; got True",
        ),
        (
            {"attention_bias": True},
            {"attention_bias": False},
            "config: attention_bias: the config gives two values; expected False as in transformer_layer_config.attention_bias",
        ),
        (
            {"attention_bias": False},
            {"attention_bias": True},
            "config: attention_bias: the config gives two values; expected True as in transformer_layer_config.attention_bias",
        ),
        (
            {"eagle_config": {"norm_before_fc": True}},
            {"eagle_config": {"norm_before_fc": False}},
            "config: eagle_config.norm_before_fc: the config gives two values; expected False as in "
            "transformer_layer_config.eagle_config.norm_before_fc; got True",
        ),
        (
            {"eagle_config": {"use_last_layernorm": False}},
            {"eagle_config": {"use_last_layernorm": True}},
            "config: eagle_config.use_last_layernorm: family 'eagle3_llama' does not model this setting; expected True; got",
        ),
        (
            {"logit_scale": 0.5},
            {"logit_scale": 1.0},
            "config: logit_scale: family 'eagle3_llama' does not model this setting; expected 1; got 0.5",
        ),
        (
            {"logit_scale": 1.0},
            {"logit_scale": 0.5},
            "config: transformer_layer_config.logit_scale: family 'eagle3_llama' does not model this setting; expected 1; got",
        ),
        (
            {"hidden_act": "gelu"},
            {"hidden_act": "silu"},
            "config: hidden_act: family 'eagle3_llama' does not model this setting; expected 'silu' or 'swish'; got 'gelu'",
        ),
    ],
)
def test_a_section_does_not_hide_what_the_top_says(top: dict, section: dict, told: str) -> None:
    with pytest.raises(CheckpointError) as caught:
        load_circuit("eagle3", config=of_speculators(top, section))
    assert str(caught.value).startswith(told)
    assert len(str(caught.value).splitlines()) == 1


def test_a_section_and_the_top_that_say_the_same() -> None:
    said = {"norm_before_residual": True, "attention_bias": True, "hidden_act": "silu", "eagle_config": {"norm_before_fc": True}}
    one, both = (dict(load_circuit("eagle3", config=of_speculators(said, inside)).facts) for inside in ({}, said))
    assert one == both
    assert one["norm_before_residual"] is one["norm_before_fc"] is one["output_bias"] is True


@pytest.mark.parametrize(
    ("key", "top", "section"),
    [("attention_bias", True, False), ("logit_scale", 0.5, 1.0), ("hidden_act", "gelu", "silu")],
)
def test_the_text_models_section_does_not_hide_it_either(key: str, top: Any, section: Any) -> None:
    config = {**config_of("qwen3_5_mtp", **{key: section}), key: top}
    with pytest.raises(CheckpointError, match=f"^config: {key}: family 'qwen3_5_mtp' does not model this setting"):
        load_circuit("mtp_dense", config=config)


def test_sizes_may_differ_between_a_section_and_the_top() -> None:
    """The top of a file may have the target's."""
    circuit = load_circuit("eagle3", config=of_speculators({"intermediate_size": 99, "num_hidden_layers": 40}, {}))
    assert next(weight.type.shape for weight in circuit.weights if weight.name == "ffn.up_proj") == (14336, 4096)


# -- that mean several things --------------------------------------------------------------------------------------


def test_the_other_key_of_a_switch_says_what_is_meant() -> None:
    both = {"norm_output": True, "eagle_config": {"return_hidden_post_norm": True}}
    assert changed("eagle3_llama", **both) == {"recycle": "post_norm"}
    assert "norm_output: the setting means several things" in refusal("eagle3_llama", norm_output=True)
    both["eagle_config"] = {"return_hidden_post_norm": False}
    assert "eagle_config.return_hidden_post_norm: the config gives two values" in refusal("eagle3_llama", **both)
    assert "norm_output: family" not in refusal("eagle3_llama", **both)


@pytest.mark.parametrize(("accepted", "value"), [([1], True), ([0], False), ([False], 0), ([True], 1)])
def test_true_is_no_one(accepted: list, value: Any) -> None:
    assert not accepts(accepted, value)
    assert not accepts(accepted, [value])
    assert accepts(accepted, [accepted[0], float(accepted[0]) if type(accepted[0]) is int else accepted[0]])


def test_an_empty_list_alone_is_fine() -> None:
    assert accepts("empty", [])
    assert not accepts("empty", [1])
    assert not accepts("empty", False)
    assert not accepts("absent", [])


# -- that other models know ----------------------------------------------------------------------------------------

KNOWN = {**SCORES, **LAYERS}
OTHER: dict[str, Any] = {key: True for key, accepted in KNOWN.items() if accepted in ("absent", [False])}
OTHER |= {key: not accepted[0] for key, accepted in KNOWN.items() if accepted == [True]}
OTHER |= {key: 0.5 for key, accepted in KNOWN.items() if accepted in ([0], [1]) and not isinstance(accepted[0], bool)}
OTHER |= {"hidden_act": "gelu", "hidden_activation": "gelu"}
"""A value of each setting that changes something."""
READ = {
    "eagle1_llama": {"rope_is_neox_style": {"rope_style": "interleaved"}},
    "eagle3_llama": {"rope_is_neox_style": {"rope_style": "interleaved"}},
    "llama_mtp": {"rope_is_neox_style": {"rope_style": "interleaved"}},
    "glm4_moe_mtp": {"use_qk_norm": {"qk_norm": True}},
}
NORMED = ("qwen3_5_mtp", "qwen3_5_moe_mtp", "qwen3_next_mtp", "qwen3_dense_mtp", "dflash_qwen3")
ALWAYS: dict[str, dict[str, bool]] = {name: {"use_qk_norm": True, "qk_norm": True} for name in NORMED}
ALWAYS["mimo_mtp"] = {"mtp_hidden_states_first": True}
ALWAYS["deepseek_v3_mtp"] = {"rope_interleave": True, "is_neox_style": False, "rope_is_neox_style": False}
"""What says what is done anyhow in some families, and something else in the others."""


def test_every_setting_is_tried() -> None:
    for key, accepted in KNOWN.items():
        assert accepted == "absent" or OTHER[key] not in accepted, key


@pytest.mark.parametrize("family", ATTENDING)
def test_no_family_ignores_a_setting(family: str) -> None:
    for key, value in OTHER.items():
        other = not value if key in ALWAYS.get(family, {}) else value
        if key in READ.get(family, {}):
            assert changed(family, **{key: other}) == READ[family][key]
        elif (family, key) != ("dflash_qwen3", "is_causal"):  # read with the windows
            assert f"{key}: family '{family}' does not model this setting; expected " in refusal(family, **{key: other})


def test_medusa_ignores_nothing_of_scores() -> None:
    for key in SCORES:
        message = refusal("medusa1", **{key: OTHER[key]})
        assert message.startswith(f"config: {key}: family 'medusa1' does not model this setting")
        assert message.endswith("would compute something else. Remove it if the drafter's own code does not read it.")


def test_medusa_has_no_layers_to_ask_about() -> None:
    assert changed("medusa1", attention_multiplier=0.5, is_causal=False) == {}


@pytest.mark.parametrize("family", ATTENDING)
def test_settings_that_change_nothing_are_fine(family: str) -> None:
    neutral = {key: accepted[0] for key, accepted in KNOWN.items() if accepted != "absent"}
    neutral |= ALWAYS.get(family, {})
    nulls = {key: None for key, accepted in KNOWN.items() if accepted == "absent"}
    if family == "dflash_qwen3":
        del neutral["is_causal"]
    assert changed(family, **neutral, **nulls) == {}


def test_a_program_of_ones_own_may_read_such_a_setting() -> None:
    text = shipped_programs()["medusa"].read_text()
    assert text.count("dims:\n") == 1
    Path("own.yaml").write_text(text.replace("dims:\n", "params: {factor: logit_scale}\ndims:\n"))
    config = config_of("medusa1", logit_scale=0.5)
    assert load_circuit("own.yaml", "medusa1", config).name == "medusa"
    with pytest.raises(CheckpointError, match="logit_scale: family 'medusa1' does not model"):
        load_circuit("medusa", "medusa1", config)


@pytest.mark.parametrize(
    ("family", "settings", "told"),
    [
        ("qwen3_5_moe_mtp", {"norm_topk_prob": False}, "norm_topk_prob: family 'qwen3_5_moe_mtp' does not model this setting"),
        ("qwen3_5_moe_mtp", {"scoring_func": "sigmoid"}, "scoring_func: family 'qwen3_5_moe_mtp' does not model this setting"),
        ("qwen3_next_mtp", {"topk_method": "noaux_tc"}, "topk_method: family 'qwen3_next_mtp' does not model this setting"),
        ("deepseek_v3_mtp", {"num_mtp_layers": 2}, "num_mtp_layers: family 'deepseek_v3_mtp' does not model this setting"),
        ("glm4_moe_mtp", {"num_mtp_layers": 2}, "num_mtp_layers: family 'glm4_moe_mtp' does not model this setting"),
        (
            "eagle3_llama",
            {"num_aux_hidden_states": 5},
            "num_aux_hidden_states: family 'eagle3_llama' does not model this setting",
        ),
        ("eagle3_llama", {"bias": True}, "bias: family 'eagle3_llama' does not model this setting; expected False; got True"),
        ("eagle3_llama", {"qkv_bias": True}, "qkv_bias: family 'eagle3_llama' does not model this setting; expected False"),
        (
            "eagle3_llama",
            {"eagle_config": {"next_layer_regular": False}},
            "eagle_config.next_layer_regular: family 'eagle3_llama' does not model this setting; expected True; got False",
        ),
        (
            "eagle3_llama",
            {"eagle_config": {"eh_proj_before_attn": True}},
            "eagle_config.eh_proj_before_attn: family 'eagle3_llama' does not model this setting; expected False; got True",
        ),
    ],
)
def test_settings_of_one_family(family: str, settings: dict, told: str) -> None:
    assert told in refusal(family, **settings)


def test_a_gate_that_qwen3_next_says_it_has_not() -> None:
    assert changed("qwen3_next_mtp", attn_output_gate=False) == {"attention_gate": False}


# -- layers of the target ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        (
            {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [2, 2, 29]}},
            "config: eagle_config.eagle_aux_hidden_state_layer_ids: the list repeats a layer; expected each layer once; "
            "got [2, 2, 29]. Correct it: the drafter reads the hiddens of layers that differ.",
        ),
        (
            {"aux_hidden_states_layer_ids": [5, 9, 5]},
            "config: aux_hidden_states_layer_ids: the list repeats a layer; expected each layer once; "
            "got [5, 9, 5] of outputs, which is [6, 10, 6]",
        ),
    ],
)
def test_auxiliary_layers_that_are_repeated(settings: dict, told: str) -> None:
    assert refusal("eagle3_llama", **settings).startswith(told)


def test_the_verifiers_last_layer_among_the_auxiliary_ones() -> None:
    hint = "The last one may be the verifier's own last layer, which the head does not read: remove it then."
    assert refusal("eagle3_llama", eagle_config={"eagle_aux_hidden_state_layer_ids": [2, 16, 29, 32]}).endswith(hint)
    assert hint not in refusal("eagle3_llama", eagle_config={"eagle_aux_hidden_state_layer_ids": [2, 16]})


# -- layers that a config copied from the target counts -------------------------------------------------------------


def one_midlayer(more: dict[str, str] | None = None, **settings: Any) -> None:
    """The fixture in m, with some tensors once more under another name."""
    shutil.copytree(FIXTURES / "eagle3_llama", "m", dirs_exist_ok=True)
    tensors = load_file("m/model.safetensors")
    assert any(name.startswith("midlayer.") for name in tensors)
    save_file(tensors | {new: tensors[old].clone() for new, old in (more or {}).items()}, "m/model.safetensors")
    config = json.loads(Path("m/config.json").read_text())
    Path("m/config.json").write_text(json.dumps({**config, **settings}))


@pytest.mark.parametrize("kinds", [None, ["full_attention"] * 40, ["full_attention"]])
def test_a_midlayer_is_one_layer_whatever_the_config_says(kinds: list[str] | None) -> None:
    one_midlayer()
    plain = bind("auto", model="m")
    one_midlayer(num_hidden_layers=40, layer_types=kinds)
    bound = bind("auto", model="m")
    assert bound.config.values["num_hidden_layers"] == 1
    assert bound.digest == plain.digest


def test_layers_behind_a_midlayer_are_those_of_the_config() -> None:
    one_midlayer({"layers.1.input_layernorm.weight": "midlayer.input_layernorm.weight"}, num_hidden_layers=2)
    with pytest.raises(CheckpointError, match=r"no tensor for weight 'more_0\.attn\.q_proj'"):
        bind("auto", model="m")


# -- block drafters of small targets -------------------------------------------------------------------------------


def test_targets_of_few_layers_have_block_drafters_that_read_one_twice() -> None:
    """z-lab spreads the ids evenly and rounds."""
    assert facts("dflash_qwen3", dflash_config={"target_layer_ids": [1, 2, 2, 2, 3]})["hidden_layers"] == "1 2 2 2 3"


# -- tensors that a switch leaves out ------------------------------------------------------------------------------


def unused(
    fixture: str, name: str, size: int = 64, switches: dict | None = None, family: str | None = None, **settings: Any
) -> str:
    """What is said of a tensor that the program has no weight for."""
    shutil.copytree(FIXTURES / fixture, "m", dirs_exist_ok=True)
    tensors = load_file("m/model.safetensors")
    save_file({**tensors, name: torch.ones(size).to(next(iter(tensors.values())).dtype)}, "m/model.safetensors")
    config = json.loads(Path("m/config.json").read_text())
    Path("m/config.json").write_text(json.dumps({**config, **settings}))
    with pytest.raises(CheckpointError) as caught:
        bind("auto", model="m", switches=switches, family=family)
    return next(line for line in str(caught.value).splitlines() if f"m: {name}: no weight of the program uses" in line)


@pytest.mark.parametrize(
    ("fixture", "name", "settings", "told"),
    [
        ("eagle3_llama", "input_norm.weight", {}, "It is 'aux_norm', which norm_before_fc=false leaves out. If the model "
         "uses it, say so: 'norm_before_fc': true in m/config.json."),
        ("eagle3_llama", "aux_norm_low.weight", {"use_aux_norm": False}, "'use_aux_norm': true in m/config.json."),
        ("eagle3_llama", "input_norm.weight", {"eagle_config": {"norm_before_fc": False}},
         "'eagle_config.norm_before_fc': true in m/config.json."),
        ("eagle3_llama", "midlayer.self_attn.o_proj.bias", {}, "It is 'o_bias', which output_bias=false leaves out. If the model "
         "uses it, say so: 'attention_bias': true in m/config.json."),
        ("eagle1_llama", "fc.bias", {"bias": False}, "It is 'fc_bias_vector', which fc_bias=false leaves out. If the model uses "
         "it, say so: 'bias': true in m/config.json."),
        ("eagle1_llama", "layers.0.self_attn.q_proj.bias", {}, "It is 'attn.q_bias', which qkv_bias=false leaves out. If the "
         "model uses it, say so: 'qkv_bias': true in m/config.json."),
        ("dflash_qwen3", "layers.2.self_attn.q_proj.bias", {}, "It is 'layers_2.attn.q_bias', which qkv_bias=false leaves out. "
         "If the model uses it, say so: 'attention_bias': true in m/config.json."),
        ("qwen3_dense_mtp", "mtp_layers.0.self_attn.o_proj.bias", {}, "It is 'layer.attn.o_bias', which output_bias=false leaves "
         "out. If the model uses it, say so: 'transformer_layer_config.attention_bias': true in m/config.json."),
        ("glm4_moe_mtp", "model.layers.2.self_attn.q_norm.weight", {"use_qk_norm": False}, "It is 'layer.attn.q_norm', which "
         "qk_norm=false leaves out. If the model uses it, say so: 'use_qk_norm': true in m/config.json."),
        ("mimo_mtp", "model.mtp_layers.0.self_attn.q_proj.bias", {"attention_bias": False}, "It is 'layer.attn.q_bias', which "
         "qkv_bias=false leaves out. If the model uses it, say so: 'attention_bias': true in m/config.json."),
    ],
)  # fmt: skip
def test_a_tensor_that_a_setting_would_use(fixture: str, name: str, settings: dict, told: str) -> None:
    assert unused(fixture, name, **settings).endswith(told)


def test_a_tensor_that_a_given_switch_leaves_out() -> None:
    """The config says that it is used: it is the switch that has to change."""
    name = "model.mtp_layers.0.self_attn.q_proj.bias"
    assert unused("mimo_mtp", name, 128, {"qkv_bias": False}, attention_bias=True).endswith(
        "which qkv_bias=false leaves out. If the model uses it, say so: qkv_bias=true (--set)."
    )


def test_a_tensor_that_only_a_switch_of_the_family_would_use() -> None:
    """No key of the config decides it."""
    text = shipped_families()["mimo_mtp"].read_text()
    assert text.count("tensors:\n") == 1
    name = "model.mtp_layers.{layer}.self_attn.q_norm.weight"
    Path("own.yaml").write_text(text.replace("tensors:\n", f'tensors:\n  layer.attn.q_norm: "{name}"\n'))
    told = unused("mimo_mtp", name.format(layer=0), 32, family="own.yaml")
    assert told.endswith(
        "It is 'layer.attn.q_norm', which qk_norm=false leaves out. If the model uses it, say so: qk_norm=true (--set)."
    )


def test_scales_of_a_tensor_that_a_setting_would_use() -> None:
    name = "layers.0.self_attn.q_proj.bias_scale"
    assert unused("dflash_qwen3", name, 1).endswith("'attention_bias': true in m/config.json.")


# -- rows that no layer sees ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["deepseek_v3_mtp", "glm4_moe_mtp", "qwen3_next_mtp", "qwen3_5_mtp", "qwen3_5_moe_mtp"])
def test_families_whose_windows_nobody_knows(family: str) -> None:
    """They read the same keys as the others, and refuse any window."""
    values = load_family(family).read_config(read_raw(config_of(family, num_hidden_layers=3))).values
    assert (values["windows"], values["causal"]) == ([0] * 3, [False] * 3)
    assert f"sliding_window: family '{family}' does not model a sliding window; expected null, or" in refusal(
        family, sliding_window=64
    )
    wrong = refusal(family, sliding_window="64")
    assert "sliding_window: the value is of the wrong kind; expected a positive integer; got '64'" in wrong
    assert "use_sliding_window: the value is of the wrong kind; expected true or false; got 0" in refusal(
        family, sliding_window=64, use_sliding_window=0
    )
    for fine in (
        {"use_sliding_window": False},
        {"layer_types": ["linear_attention", "full_attention"]},
        {"sliding_window": 1 << 20},
    ):
        assert changed(family, **{"sliding_window": 64, **fine}) == {}


# -- rotations -----------------------------------------------------------------------------------------------------

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024}


@pytest.mark.parametrize(
    ("key", "neutral", "other"),
    [
        ("attn_factor", 1.0, 1.2),
        ("extrapolation_factor", 1, 0.5),
        ("apply_yarn_scaling", True, False),
        ("llama_4_scaling_beta", 0, 0.1),
    ],
)
def test_rotations_of_other_peoples_yarn(key: str, neutral: Any, other: Any) -> None:
    assert changed("eagle3_llama", rope_scaling={**YARN, key: neutral}) == {}
    said = refusal("eagle3_llama", rope_scaling={**YARN, key: other})
    expected = f"expected no such key, or {1 if key == 'attn_factor' else neutral!r}; got {other}"
    assert f"rope_scaling.{key}: RoPE kind 'yarn' is not known with this key; {expected}" in said
    assert "Remove it if" in said
