"""EAGLE-1: the bias of fc, which the fixture's head lacks. Its cases are in test_fixtures.py."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from circuitgraph.checkpoint import bind
from circuitgraph.errors import CheckpointError
from tests.fixture_cases import FIXTURES, Cases, Interpreted, fixture_tensors, target_of

NAME = "eagle1_llama"


def head_with_bias(folder: Path, values: torch.Tensor | None, says: bool | None) -> Path:
    """The fixture's head with a bias in the file, None: without; the config's `bias` as given, None: without, as Llama-2's."""
    shutil.copytree(FIXTURES / NAME, folder)
    tensors = load_file(folder / "model.safetensors")
    save_file(tensors if values is None else {**tensors, "fc.bias": values}, folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    del config["bias"]
    if says is not None:
        config["bias"] = says
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def cases_of(model: Path) -> Cases:
    bound = bind("auto", model=model, target_model=target_of(NAME))
    forward = Interpreted(bound.circuit, bound.load_weights(positions=64))
    return Cases(fixture_tensors(NAME), bound.circuit.states[0], forward)


def test_a_bias_of_zeros_changes_nothing(tmp_path: Path) -> None:
    cases_of(head_with_bias(tmp_path / "head", torch.zeros(128, dtype=torch.bfloat16), None)).check_d()


def test_the_bias_is_added_to_fc(tmp_path: Path) -> None:
    """A bias b with x = fc j + b is what another fc makes of inputs whose last column is one: compared with plain torch."""
    values = torch.randn(128, generator=torch.Generator().manual_seed(5)).to(torch.bfloat16)
    cases = cases_of(head_with_bias(tmp_path / "head", values, None))
    with pytest.raises(AssertionError, match=r"a\.prefill\.v differs"):
        cases.check_a()
    cache = cases.prefilled()
    weights, tensors = cases.forward.weights, cases.tensors
    embedded = weights["embed_tokens"].float()[tensors["ctx.tokens"][1:14]]
    joined = torch.cat([embedded, tensors["ctx.hiddens"][:13]], -1)
    x = joined @ weights["fc"].float().T + values.float()
    expected = (x @ weights["attn.v_proj"].float().T).unflatten(1, (2, -1))
    torch.testing.assert_close(cache.read(0, 0, 13)[1], expected, rtol=1e-5, atol=1e-5)


def test_a_bias_that_the_config_denies_is_refused(tmp_path: Path) -> None:
    model = head_with_bias(tmp_path / "head", torch.zeros(128, dtype=torch.bfloat16), False)
    with pytest.raises(CheckpointError, match=r"fc\.bias: no weight of the program uses this tensor.*fc_bias=false"):
        bind("auto", model=model, target_model=target_of(NAME))


def test_a_bias_that_the_config_promises_is_missed(tmp_path: Path) -> None:
    shutil.copytree(FIXTURES / NAME, tmp_path / "head")
    config = json.loads((tmp_path / "head" / "config.json").read_text())
    (tmp_path / "head" / "config.json").write_text(json.dumps({**config, "bias": True}))
    with pytest.raises(CheckpointError, match=r"no tensor for weight 'fc_bias_vector'; expected 'fc.bias'"):
        bind("auto", model=tmp_path / "head", target_model=target_of(NAME))


@pytest.mark.parametrize("bias", [False, True])
def test_a_config_without_a_word_about_the_bias_leaves_it_to_the_file(bias: bool, tmp_path: Path) -> None:
    model = head_with_bias(tmp_path / "head", torch.zeros(128, dtype=torch.bfloat16) if bias else None, None)
    assert bind("auto", model=model, target_model=target_of(NAME)).switches["fc_bias"] is bias


def test_the_heads_own_copy_of_the_embedding_is_used_where_there_is_no_target() -> None:
    bound = bind("auto", model=FIXTURES / NAME)
    assert bound.tensors["embed_tokens"].source == "drafter"
    assert bound.tensors["lm_head"].source == "host"
    with_target = bind("auto", model=FIXTURES / NAME, target_model=target_of(NAME))
    assert with_target.tensors["embed_tokens"].source == "target"
    assert [row.tensor for row in with_target.report if row.status == "waived"] == ["embed_tokens.weight"]
