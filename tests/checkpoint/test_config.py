"""Configs: where values may stand, what they default to, and every refusal word by word."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from circuitgraph.checkpoint import read_config
from circuitgraph.errors import CheckpointError
from circuitgraph.runtime.rope import rope_tables

PLAIN = {"hidden_size": 64, "num_attention_heads": 4, "vocab_size": 100, "rms_norm_eps": 1e-5}


def test_defaults() -> None:
    config = read_config(PLAIN)
    assert config.values == {
        **PLAIN,
        "num_key_value_heads": 4,
        "head_dim": 16,
        "rotary_dim": 16,
        "attention_scale": 0.25,
        "tie_word_embeddings": False,
    }
    assert (config.rope.kind, config.rope.theta, config.rope.max_position) == ("default", 10000.0, None)


def test_null_is_absent() -> None:
    nulls = dict.fromkeys(["head_dim", "num_key_value_heads", "rope_scaling", "rope_theta", "tie_word_embeddings"])
    assert read_config({**PLAIN, **nulls}).values == read_config(PLAIN).values


def test_a_section_wins_and_the_top_level_helps_out() -> None:
    config = read_config(
        {"text_config": {**PLAIN, "hidden_size": 128}, "hidden_size": 7, "tie_word_embeddings": True}, ["text_config"]
    )
    assert config.values["hidden_size"] == 128
    assert config.values["tie_word_embeddings"] is True
    assert config.find("vocab_size") == 100


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_theta": 5e5},
        {"rope_parameters": {"rope_theta": 5e5}},
        {"rope_parameters": {"rope_theta": 5e5, "rope_type": "default"}, "rope_theta": 5e5},
        {"rope_parameters": {"full_attention": {"rope_theta": 5e5}, "sliding_attention": {"rope_theta": 1e4}}},
        {"rope_scaling": {"type": "mrope", "mrope_section": [2, 3, 3]}, "rope_theta": 5e5},
        {"rope_parameters": {"rope_type": "default"}, "rope_scaling": {"type": "default", "rope_theta": 5e5}},
    ],
)
def test_theta_wherever_it_stands(rope: dict) -> None:
    for config in (read_config({**PLAIN, **rope}), read_config({"text_config": {**PLAIN, **rope}}, ["text_config"])):
        assert (config.rope.kind, config.rope.theta, config.rope.dim) == ("default", 5e5, 16)


def test_partial_rotation_is_read_from_the_rope_parameters_too() -> None:
    assert read_config({**PLAIN, "rope_parameters": {"partial_rotary_factor": 0.25}}).values["rotary_dim"] == 4
    assert read_config({**PLAIN, "partial_rotary_factor": 0.5}).values["rotary_dim"] == 8


REFUSALS = {
    "missing": (
        {key: value for key, value in PLAIN.items() if key != "vocab_size"} | {"vocabsize": 100},
        "config: vocab_size: the key is missing; expected a positive integer. Did you mean 'vocabsize'?",
    ),
    "wrong kind": (
        {**PLAIN, "hidden_size": "64"},
        "config: hidden_size: the value is of the wrong kind; expected a positive integer; got '64'",
    ),
    "a boolean is no number": (
        {**PLAIN, "num_attention_heads": True},
        "config: num_attention_heads: the value is of the wrong kind; expected a positive integer; got True",
    ),
    "flag": (
        {**PLAIN, "tie_word_embeddings": "no"},
        "config: tie_word_embeddings: the value is of the wrong kind; expected true or false; got 'no'",
    ),
    "epsilon": (
        {**PLAIN, "rms_norm_eps": "1e-5"},
        "config: rms_norm_eps: the value is of the wrong kind; expected a positive, finite number; got '1e-5'",
    ),
    "head_dim": (
        {**PLAIN, "num_attention_heads": 5},
        "config: hidden_size: does not split into 5 heads; got 64. Does the config lack 'head_dim'?",
    ),
    "groups": (
        {**PLAIN, "num_key_value_heads": 3},
        "config: num_key_value_heads: query heads do not split evenly; expected a divisor of num_attention_heads (4); got 3",
    ),
    "odd rotation": (
        {**PLAIN, "partial_rotary_factor": 0.2},
        "config: partial_rotary_factor: rotates 3 columns of a head; expected an even share of head_dim (16); got 0.2",
    ),
    "two thetas": (
        {**PLAIN, "rope_theta": 1e6, "rope_parameters": {"rope_theta": 1e4}},
        "config: rope_theta: the config gives two values; expected 10000.0 as in its RoPE parameters; got 1000000.0",
    ),
    "kind": (
        {**PLAIN, "rope_scaling": {"rope_type": "yarm", "factor": 4.0}},
        "config: rope_scaling.rope_type: unknown RoPE kind 'yarm'; expected default, linear, dynamic, yarn, llama3, longrope. "
        "Did you mean 'yarn'?",
    ),
    "scaling parameters": (
        {**PLAIN, "rope_parameters": {"rope_type": "llama3", "factor": 8, "low_freq_factor": 1, "high_freq_factor": 4}},
        "config: rope_parameters.original_max_position_embeddings: RoPE kind 'llama3' needs this key; expected a positive number",
    ),
    "rope_scaling is no object": (
        {**PLAIN, "rope_scaling": "linear"},
        "config: rope_scaling: the value is of the wrong kind; expected an object; got 'linear'",
    ),
    "kind of the wrong kind": (
        {**PLAIN, "rope_scaling": {"rope_type": ["yarn"], "factor": 4.0}},
        "config: rope_scaling.rope_type: the value is of the wrong kind; expected a text; got ['yarn']",
    ),
    "two kinds in one": (
        {**PLAIN, "rope_scaling": {"rope_type": "yarn", "type": "linear", "factor": 4.0}},
        "config: rope_scaling.type: the config gives two RoPE kinds; expected yarn as in its rope_type; got 'linear'",
    ),
    "two kinds in two": (
        {**PLAIN, "rope_scaling": {"type": "linear", "factor": 4.0}, "rope_parameters": {"rope_type": "default"}},
        "config: rope_scaling.rope_type: the config gives two RoPE kinds; expected default as in rope_parameters; got 'linear'. "
        "Remove the one that is out of date.",
    ),
    "two factors in two": (
        {**PLAIN, "rope_scaling": {"type": "linear", "factor": 8.0}, "rope_parameters": {"rope_type": "linear", "factor": 4.0}},
        "config: rope_scaling.factor: the config gives two values; expected 4.0 as in rope_parameters; got 8.0. "
        "Remove the one that is out of date.",
    ),
    "a factor of nothing": (
        {**PLAIN, "rope_scaling": {"factor": 4.0}},
        "config: rope_scaling.rope_type: the key is missing; expected default, linear, dynamic, yarn, llama3, longrope. "
        "A factor without a kind does not say what it scales.",
    ),
    "a factor that is a text": (
        {**PLAIN, "rope_scaling": {"type": "linear", "factor": "4"}},
        "config: rope_scaling.factor: the value is of the wrong kind; expected a positive, finite number; got '4'",
    ),
    "no set for full attention": (
        {**PLAIN, "rope_parameters": {"sliding_attention": {"rope_theta": 1e4}}},
        "config: rope_parameters: has a set of parameters for each attention kind, but not this one's; expected full_attention; "
        "got ['sliding_attention']. Which of these sets is the drafter's? All its layers rotate alike: leave that one alone.",
    ),
    "dynamic without a limit": (
        {**PLAIN, "rope_scaling": {"type": "dynamic", "factor": 2}},
        "config: max_position_embeddings: RoPE kind 'dynamic' needs this key; expected a positive integer",
    ),
    "Hunyuan's dynamic": (
        {**PLAIN, "max_position_embeddings": 64, "rope_scaling": {"type": "dynamic", "factor": 1.0, "alpha": 1000.0}},
        "config: rope_scaling.alpha: RoPE kind 'dynamic' is not known with this key; expected no such key; got 1000.0. "
        "It is another model's variant, which computes something else. Remove it if the drafter's own code does not read it.",
    ),
    "yarn's optional keys": (
        {
            **PLAIN,
            "max_position_embeddings": 64,
            "rope_scaling": {"type": "yarn", "factor": 2, "beta_fast": [32], "truncate": 1, "mscale": True},
        },
        "config: rope_scaling.beta_fast: the value is of the wrong kind; expected a positive, finite number; got [32]\n"
        "config: rope_scaling.mscale: the value is of the wrong kind; expected a positive, finite number; got True\n"
        "config: rope_scaling.truncate: the value is of the wrong kind; expected true or false; got 1",
    ),
    "longrope's factors": (
        {
            **PLAIN,
            "max_position_embeddings": 64,
            "rope_scaling": {"type": "longrope", "factor": 2, "short_factor": [1.0] * 7, "long_factor": [1.0] * 7 + [None]},
        },
        "config: rope_scaling.short_factor: needs a factor for each pair of rotated columns; expected a list of 8 numbers; "
        "got '7 numbers'\n"
        "config: rope_scaling.long_factor.7: the value is of the wrong kind; expected a positive, finite number",
    ),
    "llama3 without a band": (
        {
            **PLAIN,
            "rope_scaling": {
                "rope_type": "llama3",
                "factor": 8,
                "low_freq_factor": 4,
                "high_freq_factor": 4,
                "original_max_position_embeddings": 64,
            },
        },
        "config: rope_scaling.low_freq_factor: leaves no band to blend in; expected less than high_freq_factor (4.0); got 4.0",
    ),
    "two original lengths": (
        {
            **PLAIN,
            "original_max_position_embeddings": 32,
            "rope_scaling": {"type": "yarn", "factor": 2, "original_max_position_embeddings": 64},
        },
        "config: original_max_position_embeddings: the config gives two values; expected 64 as in its RoPE parameters; got 32",
    ),
    "base": (
        {**PLAIN, "rope_theta": 1.0},
        "config: rope_theta: the base is too small: no column would turn slower than another; expected more than 1; got 1.0",
    ),
    "more than a float holds": (
        {**PLAIN, "rope_theta": 10**400},
        f"config: rope_theta: the value is of the wrong kind; expected a positive, finite number; got {10**400}",
    ),
    "several at once": (
        {"num_attention_heads": 0, "vocab_size": 100, "hidden_size": 64},
        "config: num_attention_heads: the value is of the wrong kind; expected a positive integer; got 0",
    ),
}


@pytest.mark.parametrize(("config", "message"), REFUSALS.values(), ids=REFUSALS)
def test_refusals(config: dict, message: str) -> None:
    with pytest.raises(CheckpointError) as caught:
        read_config(config)
    assert str(caught.value) == message


def test_faults_are_collected_and_name_the_section() -> None:
    with pytest.raises(CheckpointError) as caught:
        read_config({"text_config": {"vocab_size": -1, "num_attention_heads": 2}}, ["text_config"])
    assert str(caught.value) == (
        "config: text_config.hidden_size: the key is missing; expected a positive integer\n"
        "config: text_config.vocab_size: the value is of the wrong kind; expected a positive integer; got -1"
    )


FILES = {
    "absent": (
        None,
        "config.json: the file does not exist. Give a model folder with a config.json, or the path of a config.json.",
    ),
    "not JSON": (
        '{"a": 1,\n oops}',
        "config.json:2: not valid JSON: Expecting property name enclosed in double quotes. Correct it, or download it again.",
    ),
    "not an object": ("[1]", "config.json: a config is a JSON object; got list. Is it the config.json of a model?"),
    "no section": (json.dumps(PLAIN), "config.json: the config has no section for the drafter; expected 'text_config'"),
}


@pytest.mark.parametrize(("text", "message"), FILES.values(), ids=FILES)
def test_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str | None, message: str) -> None:
    monkeypatch.chdir(tmp_path)
    if text is not None:
        Path("config.json").write_text(text)
    with pytest.raises(CheckpointError) as caught:
        read_config("config.json", ["text_config"])
    assert str(caught.value) == message


JUNK = st.sampled_from(
    [
        None,
        True,
        0,
        -1,
        1,
        3,
        0.5,
        -0.0,
        1e308,
        float("inf"),
        float("nan"),
        10**400,
        "",
        "4",
        "yarn",
        [],
        [1.0],
        [None],
        {},
        {"a": 1},
    ]
)
ROPE_KEYS = (
    *("rope_type", "type", "factor", "rope_theta", "original_max_position_embeddings", "low_freq_factor", "high_freq_factor"),
    *("short_factor", "long_factor", "attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate"),
    *("partial_rotary_factor", "full_attention"),
)
KINDS = {
    "yarn": {"factor": 4.0},
    "llama3": {"factor": 8, "low_freq_factor": 1, "high_freq_factor": 4, "original_max_position_embeddings": 64},
    "longrope": {"short_factor": [1.0] * 8, "long_factor": [2.0] * 8, "original_max_position_embeddings": 16},
    "dynamic": {"factor": 2.0},
    "linear": {"factor": 2.0},
}
TOP_KEYS = (
    *(*PLAIN, "max_position_embeddings", "num_key_value_heads", "head_dim", "tie_word_embeddings", "rope_theta", "rope_scaling"),
    *("rope_parameters", "partial_rotary_factor", "original_max_position_embeddings", "intermediate_size"),
)


@settings(max_examples=300)
@given(
    kind=st.sampled_from(sorted(KINDS)),
    rope=st.dictionaries(st.sampled_from(ROPE_KEYS), JUNK, max_size=2),
    top=st.dictionaries(st.sampled_from(TOP_KEYS), JUNK, max_size=2),
)
def test_any_value_is_understood_or_refused(kind: str, rope: dict, top: dict) -> None:
    """Nothing crashes on a value, and what is accepted makes tables."""
    config = {**PLAIN, "max_position_embeddings": 128, "rope_scaling": {"rope_type": kind, **KINDS[kind], **rope}, **top}
    try:
        spec = read_config(config).rope
    except CheckpointError as refused:
        faults = refused.faults
    else:
        faults = ()
        rows = min(spec.limit or 20, 20)
        assert rope_tables(spec, rows)[0].shape == (rows, spec.dim // 2)
    assert all(fault.where == "config" and fault.subject for fault in faults)
