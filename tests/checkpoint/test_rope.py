"""RoPE tables against transformers' own, and the limits of kinds that no table can follow."""

from __future__ import annotations

import json

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from circuitgraph.checkpoint import read_config
from circuitgraph.errors import RuntimeUseError
from circuitgraph.runtime.rope import RopeSpec, rope_tables

SIZES = {"hidden_size": 256, "num_attention_heads": 4, "vocab_size": 100, "max_position_embeddings": 4096}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024}
CASES = {
    "default": {"rope_theta": 500000.0},
    "default, partial": {"rope_theta": 10000.0, "partial_rotary_factor": 0.5},
    "linear": {"rope_theta": 10000.0, "rope_scaling": {"type": "linear", "factor": 2.5}},
    "llama3": {
        "rope_theta": 500000.0,
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 1024,
        },
    },
    "yarn": {"rope_theta": 1000000.0, "rope_parameters": {**YARN, "rope_theta": 1000000.0}},
    "yarn, DeepSeek": {"rope_theta": 10000.0, "rope_scaling": {**YARN, "mscale": 1.0, "mscale_all_dim": 0.8, "beta_fast": 16}},
    "yarn without a factor": {"rope_theta": 10000.0, "rope_scaling": {**YARN, "factor": None, "mscale": 0, "mscale_all_dim": 0}},
    "longrope, long": {
        "rope_theta": 10000.0,
        "rope_scaling": {
            "type": "longrope",
            "short_factor": [1.0 + i / 32 for i in range(32)],
            "long_factor": [1.0 + i / 4 for i in range(32)],
        },
        "original_max_position_embeddings": 512,
    },
    "longrope, short": {
        "rope_theta": 10000.0,
        "rope_scaling": {
            "type": "longrope",
            "short_factor": [1.0 + i / 16 for i in range(32)],
            "long_factor": [1.0 + i / 4 for i in range(32)],
            "attention_factor": 1.5,
            "original_max_position_embeddings": 600,
        },
    },
    "yarn, not truncated": {"rope_theta": 150000.0, "rope_scaling": {**YARN, "truncate": False, "attention_factor": 1.25}},
}


def theirs(config: dict, kind: str, positions: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosines and sines by transformers."""
    transformers = pytest.importorskip("transformers")
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    own = transformers.LlamaConfig(**json.loads(json.dumps(config)))
    if kind == "default":
        columns = own.head_dim * own.rope_parameters.get("partial_rotary_factor", 1.0)
        frequencies, amplitude = 1.0 / config["rope_theta"] ** (torch.arange(0, columns, 2) / columns), 1.0
    else:
        length = positions if kind == "longrope" else None
        frequencies, amplitude = ROPE_INIT_FUNCTIONS[kind](own, device=torch.device("cpu"), seq_len=length)
    angle = torch.arange(positions, dtype=torch.float32)[:, None] * frequencies
    return angle.cos() * amplitude, angle.sin() * amplitude


def compare(config: dict, positions: int) -> None:
    """Frequencies agree to fp32 rounding, which positions and amplitudes magnify."""
    spec = read_config(config).rope
    tables = rope_tables(spec, positions)
    for mine, other in zip(tables, theirs(config, spec.kind, positions), strict=True):
        assert mine.dtype == torch.float32
        torch.testing.assert_close(mine, other, atol=1e-4 * max(1.0, float(other.abs().max())), rtol=0)


@pytest.mark.parametrize("config", CASES.values(), ids=CASES)
def test_tables_are_those_of_transformers(config: dict) -> None:
    compare({**SIZES, **config}, 600)


def numbers(low: float, high: float) -> st.SearchStrategy[float]:
    return st.floats(low, high, allow_nan=False)


@st.composite
def configs(draw: st.DrawFn) -> dict:
    """Any kind, in any layout, with and without the keys that it can do without."""
    heads, head_dim = draw(st.sampled_from([(4, 64), (2, 128), (3, 80)]))
    limit, original = draw(st.integers(64, 200_000)), draw(st.integers(16, 65_536))
    kind = draw(st.sampled_from(["default", "linear", "dynamic", "yarn", "llama3", "longrope"]))
    share = draw(st.sampled_from([1.0, 0.5, 0.25]))
    columns = int(head_dim * share)
    scaling: dict = {draw(st.sampled_from(["rope_type", "type"])): kind}
    config: dict = {"rope_theta": draw(numbers(2.0, 1e8))}
    if kind in ("linear", "dynamic", "yarn", "llama3") or (kind == "longrope" and draw(st.booleans())):
        scaling["factor"] = draw(numbers(0.5, 64.0))
    if kind in ("yarn", "llama3", "longrope"):
        # Beside the parameters, or among them. Left out (yarn), it is the limit.
        place = draw(st.sampled_from([config, scaling] + ([{}] if kind == "yarn" else [])))
        place["original_max_position_embeddings"] = original
    if kind == "llama3":
        scaling["low_freq_factor"] = draw(numbers(0.1, 4.0))
        scaling["high_freq_factor"] = scaling["low_freq_factor"] + draw(numbers(0.5, 30.0))
    if kind == "longrope":
        for name in ("short_factor", "long_factor"):
            scaling[name] = draw(st.lists(numbers(0.5, 60.0), min_size=columns // 2, max_size=columns // 2))
    if kind == "yarn":
        optional = {
            "beta_fast": numbers(4.0, 64.0),
            "beta_slow": numbers(0.25, 4.0),
            "mscale": st.just(0) | numbers(0.01, 2.0),
            "mscale_all_dim": st.just(0) | numbers(0.01, 2.0),
            "truncate": st.booleans(),
        }
        scaling.update({name: draw(values) for name, values in optional.items() if draw(st.booleans())})
    if kind in ("yarn", "longrope") and draw(st.booleans()):
        scaling["attention_factor"] = draw(numbers(0.25, 3.0))
    if share != 1.0:
        (scaling if draw(st.booleans()) else config)["partial_rotary_factor"] = share
    if draw(st.booleans()):
        scaling["rope_theta"] = config["rope_theta"]
        config["rope_parameters"] = scaling
    else:
        config["rope_scaling"] = scaling
    sizes = {"hidden_size": heads * head_dim, "num_attention_heads": heads, "vocab_size": 100, "head_dim": head_dim}
    return {**sizes, "max_position_embeddings": limit, **config}


@settings(max_examples=200)
@given(config=configs(), positions=st.integers(1, 64))
def test_random_configs_make_the_tables_of_transformers(config: dict, positions: int) -> None:
    compare(config, positions)
    nested = {"text_config": config}
    assert read_config(nested, ["text_config"]).rope == read_config(config).rope


@pytest.mark.parametrize("scaling", [None, {**YARN, "factor": 40, "mscale": 1.0, "mscale_all_dim": 0.8}])
def test_latent_attention_rotates_a_part_and_scales_by_yarns_amplitude(scaling: dict | None) -> None:
    transformers = pytest.importorskip("transformers")
    from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3Attention

    config = {**SIZES, "qk_rope_head_dim": 16, "qk_nope_head_dim": 32, "rope_theta": 10000.0, "rope_scaling": scaling}
    mine = read_config(config)
    own = transformers.DeepseekV3Config(**json.loads(json.dumps(config)))
    assert mine.values["rotary_dim"] == 16
    assert mine.values["attention_scale"] == pytest.approx(DeepseekV3Attention(own, 0).scaling)


def test_kinds_differ() -> None:
    """The control of the test above: no two of these configs make one table."""
    tables = [rope_tables(read_config({**SIZES, **config}).rope, 600)[0] for config in CASES.values()]
    for i, one in enumerate(tables):
        for other in tables[:i]:
            assert one.shape != other.shape or (one - other).abs().max() > 0.1


def test_dynamic_is_plain_up_to_its_limit_and_refused_beyond() -> None:
    spec = read_config({**SIZES, "rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}).rope
    plain = read_config(SIZES).rope
    assert spec.limit == 4096
    assert plain.limit is None
    assert torch.equal(rope_tables(spec, 4096)[0], rope_tables(plain, 4096)[0])
    with pytest.raises(RuntimeUseError) as caught:
        rope_tables(spec, 4097)
    assert str(caught.value) == (
        "a 'dynamic' RoPE table cannot hold 4097 positions; expected at most 4096. Stop drafting at that length."
    )


def test_unknown_kind_is_refused() -> None:
    with pytest.raises(RuntimeUseError, match="unknown RoPE kind 'spiral'; expected default, linear"):
        rope_tables(RopeSpec("spiral", 10000.0, 64), 4)


@pytest.mark.parametrize("config", CASES.values(), ids=CASES)
def test_json_round_trip(config: dict) -> None:
    spec = read_config({**SIZES, **config}).rope
    assert RopeSpec.from_json(json.loads(json.dumps(spec.to_json()))) == spec
