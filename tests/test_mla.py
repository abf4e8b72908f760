"""DeepSeek-V3's MTP layer, whose cache holds latents, against values that transformers computed."""

from __future__ import annotations

import pytest
import torch

from circuitgraph.checkpoint import bind
from tests.fixture_cases import FIXTURES, Interpreted, LatentCases, fixture_tensors

FOLDER = FIXTURES / "deepseek_v3_mtp"


def cases_of(prefix: str = "", keys: str = "tpos", **switches) -> LatentCases:
    bound = bind("auto", model=FOLDER, switches=switches)
    forward = Interpreted(bound.circuit, bound.load_weights(positions=64))
    return LatentCases(fixture_tensors("deepseek_v3_mtp"), bound.circuit.states[0], forward, prefix, keys)


@pytest.mark.parametrize("case", ["a", "b", "c", "d", "d_without_overwrite"])
def test_cases(case: str) -> None:
    getattr(cases_of(), f"check_{case}")()


@pytest.mark.parametrize("case", ["a", "b"])
def test_keys_rotated_at_the_hiddens_position(case: str) -> None:
    getattr(cases_of(keys="hpos", rope_position="hidden"), f"check_{case}")()


@pytest.mark.parametrize(
    ("prefix", "switches"),
    [
        ("b_prenorm.", {"recycle": "pre_norm"}),
        ("b_mask0.", {"mask_first": True}),
        ("b_mask0_prenorm.", {"mask_first": True, "recycle": "pre_norm"}),
    ],
)
def test_as_other_engines_run_it(prefix: str, switches: dict) -> None:
    cases = cases_of(prefix, **switches)
    made = cases.chain(cases.prefilled(), cases.context_rows(14)[13:], 4)
    token, _, logits, hidden = map(torch.cat, zip(*made, strict=True))
    assert token.tolist() == cases.want("tokens").tolist()
    cases.close(logits, "logits")
    cases.close(hidden, "recycled")


@pytest.mark.parametrize(
    "switches",
    [{"mask_first": True}, {"scoring": "softmax"}, {"renormalise": False}, {"rope_position": "hidden"}],
)
def test_a_wrong_switch_is_noticed(switches: dict) -> None:
    with pytest.raises(AssertionError):
        cases_of(**switches).check_a()


@pytest.mark.parametrize("weight", ["q_a_norm", "kv_a_norm", "kv_b_proj", "q_b_proj", "kv_a_proj"])
def test_every_part_of_the_attention_matters(weight: str) -> None:
    cases = cases_of()
    cases.forward.weights[f"layer.attn.{weight}"] = cases.forward.weights[f"layer.attn.{weight}"].flip(0)
    with pytest.raises(AssertionError):
        cases.check_a()


def test_the_cache_is_as_wide_as_the_latent_and_the_rotated_part() -> None:
    (state,) = bind("auto", model=FOLDER).circuit.states
    assert (state.heads, state.dims) == (1, (16, 48))
    assert state.bytes_per_row() == 4 * (16 + 48)


def test_the_scale_has_yarns_amplitude() -> None:
    """(24 + 16)^-0.5, and the square of 0.1 * ln(40) + 1."""
    values = bind("auto", model=FOLDER).config.values
    assert values["attention_scale"] == pytest.approx(40**-0.5 * (0.1 * torch.tensor(40.0).log().item() + 1) ** 2)
    assert values["rotary_dim"] == 16
