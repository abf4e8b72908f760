"""RoPE tables against transformers' own, and the limits of kinds that no table can follow."""

from __future__ import annotations

import json

import pytest
import torch

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
    "yarn, not truncated": {"rope_theta": 150000.0, "rope_scaling": {**YARN, "truncate": False, "attention_factor": 1.25}},
}


@pytest.mark.parametrize("config", CASES.values(), ids=CASES)
def test_tables_are_those_of_transformers(config: dict) -> None:
    transformers = pytest.importorskip("transformers")
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    spec = read_config({**SIZES, **config}).rope
    theirs = transformers.LlamaConfig(**json.loads(json.dumps({**SIZES, **config})))
    if spec.kind == "default":
        share = config.get("partial_rotary_factor", 1.0)
        frequencies = 1.0 / config["rope_theta"] ** (torch.arange(0, 64 * share, 2) / (64 * share))
        amplitude = 1.0
    else:
        frequencies, amplitude = ROPE_INIT_FUNCTIONS[spec.kind](theirs, device=torch.device("cpu"))
    angle = torch.arange(600, dtype=torch.float32)[:, None] * frequencies
    cos, sin = rope_tables(spec, 600)
    assert cos.dtype == torch.float32
    # Frequencies agree to fp32 rounding; 600 positions magnify it.
    torch.testing.assert_close(cos, angle.cos() * amplitude, atol=1e-4, rtol=0)
    torch.testing.assert_close(sin, angle.sin() * amplitude, atol=1e-4, rtol=0)


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
