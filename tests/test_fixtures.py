"""The reference interpreter against values that other people's code computed (tests/fixtures)."""

from __future__ import annotations

from functools import cache

import pytest
import torch

from circuitgraph.checkpoint import bind
from tests.fixture_cases import FIXTURES, Cases, Interpreted, Row, fixture_tensors, target_of

NAMES = ("qwen3_dense_mtp", "qwen3_5_mtp", "mimo_mtp", "eagle1_llama", "qwen3_next_mtp", "glm4_moe_mtp")
MAIN = {"mimo_mtp": {"mask_first": False}}
"""Where a fixture's main cases follow another engine than the family's defaults do."""


@pytest.fixture(autouse=True)
def one_thread():
    """These matrices are too small to share between threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@cache
def tensors_of(name: str) -> dict[str, torch.Tensor]:
    return fixture_tensors(name)


def cases_of(name: str, prefix: str = "", keys: str = "tpos", **switches) -> Cases:
    bound = bind("auto", model=FIXTURES / name, target_model=target_of(name), switches={**MAIN.get(name, {}), **switches})
    forward = Interpreted(bound.circuit, bound.load_weights(positions=64))
    return Cases(tensors_of(name), bound.circuit.states[0], forward, prefix, keys)


@pytest.mark.parametrize("case", ["a", "b", "c", "d"])
@pytest.mark.parametrize("name", NAMES)
def test_cases(name: str, case: str) -> None:
    getattr(cases_of(name), f"check_{case}")()


@pytest.mark.parametrize("case", ["a", "b"])
@pytest.mark.parametrize("name", NAMES)
def test_keys_rotated_at_the_hiddens_position(name: str, case: str) -> None:
    getattr(cases_of(name, keys="hpos", rope_position="hidden"), f"check_{case}")()


@pytest.mark.parametrize("name", NAMES)
def test_rope_positions_are_told_apart(name: str) -> None:
    with pytest.raises(AssertionError, match="k_hpos differs"):
        cases_of(name, keys="hpos").check_a()


@pytest.mark.parametrize("case", ["a", "b", "c", "d"])
def test_mask_at_the_first_position(case: str) -> None:
    """MiMo as engines run it, which is the family's default."""
    getattr(cases_of("mimo_mtp", prefix="mask0.", mask_first=True), f"check_{case}")()
    assert bind("auto", model=FIXTURES / "mimo_mtp").switches["mask_first"] is True


def test_mimo_as_vllm_runs_it() -> None:
    """The hidden before the target's final norm, the mask, keys at the hidden's position."""
    cases = cases_of("mimo_mtp", "b_vllm.", "hpos", mask_first=True, target_hidden="pre_norm", rope_position="hidden")
    cache = cases.prefilled(hiddens="ctx.hiddens_prenorm")
    steps = cases.chain(cache, cases.context_rows(14, "ctx.hiddens_prenorm")[13:], 4)
    token, _, logits, hidden = map(torch.cat, zip(*steps, strict=True))
    assert token.tolist() == cases.want("tokens").tolist()
    cases.close(logits, "logits")
    cases.close(hidden, "recycled")
    cases.close_kv(cache, 0, 13, "")


@pytest.mark.parametrize("name", [name for name in NAMES if "d.logits_if_no_overwrite" in tensors_of(name)])
def test_skipping_the_catch_up_is_noticed(name: str) -> None:
    cases_of(name).check_d_without_overwrite()


@pytest.mark.parametrize("name", NAMES)
def test_several_rows_of_a_sequence_in_one_call(name: str) -> None:
    """Prefill and catch-up with the outputs of every row, not of the last alone."""
    cases = cases_of(name)
    cache = cases.check_b()
    logits, hidden = cases.forward.logits(cache.rows(cases.context_rows(13)))
    cases.close(logits[-1], "a.prefill.logits_last")
    cases.close(hidden, "a.prefill.recycled")
    logits, hidden = cases.forward.logits(cache.rows(cases.catch_up_rows()))
    cases.close(logits[-1], "d.logits")
    cases.close(hidden, "d.recycled")
    cases.close_kv(cache, 0, 14, "d.")


@pytest.mark.parametrize("name", [name for name in NAMES if "b.prenorm" in tensors_of(name)])
def test_hidden_before_the_final_norm(name: str) -> None:
    """recycle=pre_norm yields the residual sum. The chain is fed the fixture's own recycled hiddens and tokens."""
    cases = cases_of(name, recycle="pre_norm")
    cache = cases.prefilled()
    _, hidden = cases.forward.logits(cache.rows(cases.context_rows(13)))
    cases.close(hidden, "a.prefill.prenorm")
    tokens, recycled = cases.want("b.tokens"), cases.want("b.recycled")
    rows = [*cases.context_rows(14)[13:], *(Row(0, 14 + i, int(tokens[i]), recycled[i]) for i in range(3))]
    logits, hidden = cases.forward.logits(cache.rows(rows))
    cases.close(logits, "b.logits")
    cases.close(hidden, "b.prenorm")


@pytest.mark.parametrize(
    ("name", "switches"),
    [
        ("qwen3_dense_mtp", {"concat": "hidden_first"}),
        ("qwen3_dense_mtp", {"norm": "zero_centred"}),
        ("qwen3_dense_mtp", {"rope_style": "interleaved"}),
        ("qwen3_5_mtp", {"norm": "plain"}),
        ("mimo_mtp", {"concat": "embed_first"}),
        ("mimo_mtp", {"mask_first": True}),
        ("qwen3_next_mtp", {"renormalise": False}),
        ("qwen3_next_mtp", {"scoring": "sigmoid"}),
        ("qwen3_next_mtp", {"norm": "plain"}),
        ("glm4_moe_mtp", {"scoring": "softmax"}),
        ("glm4_moe_mtp", {"renormalise": False}),
        ("eagle1_llama", {"concat": "hidden_first"}),
        ("eagle1_llama", {"rope_style": "interleaved"}),
    ],
)
def test_a_wrong_switch_is_noticed(name: str, switches: dict) -> None:
    """The control: each of these would run, and be silently wrong."""
    with pytest.raises(AssertionError):
        cases_of(name, **switches).check_a()
