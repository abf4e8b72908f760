"""Medusa-1 against values that FasterDecoding's code computed, interpreted and compiled."""

from __future__ import annotations

import json
import shutil
from functools import cache
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from circuitgraph.checkpoint import bind
from circuitgraph.errors import CheckpointError
from tests.compiled_calls import Interpreted, compile_entries
from tests.fixture_cases import FIXTURES, fixture_tensors
from tests.program_cases import MEDUSA_CASES, MEDUSA_PROGRAMS, check_medusa, medusa_hiddens

FOLDER = FIXTURES / "medusa1"


@cache
def bound():
    model = bind("auto", model=FOLDER)
    return model, model.load_weights()


@pytest.fixture(scope="module", params=["interpreted", "compiled"])
def heads(request, tmp_path_factory):
    model, weights = bound()
    if request.param == "interpreted":
        forward = Interpreted(model.circuit)
    else:
        pieces = [(entry, rows) for entry, sizes in MEDUSA_PROGRAMS.items() for rows in sizes]
        forward = compile_entries(model.circuit, pieces, tmp_path_factory.mktemp("medusa"))
    return lambda entry, hidden: forward.run(entry, {"hidden": hidden.contiguous()}, weights, {})


@pytest.mark.parametrize("case", MEDUSA_CASES)
def test_cases(case: str, heads) -> None:
    check_medusa(case, heads)


def test_heads_are_counted_in_the_file_and_sizes_are_the_targets() -> None:
    model, _ = bound()
    assert json.loads((FOLDER / "config.json").read_text())["medusa_num_heads"] == 2
    assert model.family == "medusa1"
    assert [weight.name for weight in model.circuit.weights if weight.name.endswith("lm_head")] == [
        f"head_{i}.lm_head" for i in range(4)
    ]
    assert model.config.values["hidden_size"] == 64


@pytest.mark.parametrize("wrong", ["bias", "residual", "order"])
def test_a_wrong_head_is_noticed(wrong: str) -> None:
    model, weights = bound()
    want = fixture_tensors("medusa1")
    hidden = medusa_hiddens("a", want)
    changed = dict(weights)
    if wrong == "bias":
        changed["head_1.blocks_0.bias"] = torch.zeros_like(weights["head_1.blocks_0.bias"])
    elif wrong == "order":
        changed["head_0.lm_head"], changed["head_1.lm_head"] = weights["head_1.lm_head"], weights["head_0.lm_head"]
    else:
        changed["head_2.blocks_0.linear"] = -weights["head_2.blocks_0.linear"]
    logits = Interpreted(model.circuit).run("logits", {"hidden": hidden}, changed, {})["logits"]
    assert (logits[0] - want["a.logits"]).abs().max() > 0.05


@pytest.mark.parametrize(
    "changed",
    [
        {"sliding_window": 4096, "max_position_embeddings": 32768},
        {"rope_scaling": {"rope_type": "proportional"}},
        {"num_attention_heads": 7, "num_key_value_heads": 3},
        {"hidden_size": None, "vocab_size": None, "text_config": {"hidden_size": 64, "vocab_size": 512}},
    ],
    ids=["window", "rope", "heads", "nested"],
)
def test_heads_need_no_more_of_the_target_than_its_sizes(changed: dict, tmp_path: Path) -> None:
    """Its attention is not theirs, and of its files only the config is read."""
    model = shutil.copytree(FOLDER, tmp_path / "heads")
    (model / "target/model.safetensors").unlink()
    file = model / "target/config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **changed}))
    assert bind("auto", model=model).circuit == bound()[0].circuit


def test_a_size_that_the_target_lacks_is_missed_in_the_targets_file(tmp_path: Path) -> None:
    model = shutil.copytree(FOLDER, tmp_path / "heads")
    (model / "target/config.json").write_text('{"hidden_size": "64", "vocab_size": 512}')
    with pytest.raises(CheckpointError, match=r"target/config.json: hidden_size: the value is of the wrong kind; .*; got '64'"):
        bind("auto", model=model)


def test_heads_of_two_residual_blocks(tmp_path: Path) -> None:
    """The depth follows from the file; a second block of zeros adds nothing, since silu(0) is 0."""
    model = shutil.copytree(FOLDER, tmp_path / "heads")
    tensors = {}
    for name, tensor in load_file(FOLDER / "model.safetensors").items():
        head, _, rest = name.partition(".")
        tensors[f"{head}.2.weight" if rest == "1.weight" else name] = tensor
        if rest.startswith("0.linear"):
            tensors[f"{head}.1.{rest.removeprefix('0.')}"] = torch.zeros_like(tensor)
    save_file(tensors, model / "model.safetensors")
    deep = bind("auto", model=model)
    assert "head_3.blocks_1.bias" in {weight.name for weight in deep.circuit.weights}
    want = fixture_tensors("medusa1")
    logits = Interpreted(deep.circuit).run("logits", {"hidden": medusa_hiddens("a", want)}, deep.load_weights(), {})["logits"]
    torch.testing.assert_close(logits[0], want["a.logits"], rtol=0, atol=1e-4)


def test_a_head_that_is_not_whole_is_refused(tmp_path: Path) -> None:
    model = shutil.copytree(FOLDER, tmp_path / "heads")
    tensors = load_file(FOLDER / "model.safetensors")
    del tensors["2.0.linear.bias"]
    save_file(tensors, model / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"no tensor for weight 'head_2.blocks_0.bias'; expected '2.0.linear.bias'"):
        bind("auto", model=model)


def test_without_a_target_there_are_no_sizes(tmp_path: Path) -> None:
    model = shutil.copytree(FOLDER, tmp_path / "heads", ignore=shutil.ignore_patterns("target"))
    with pytest.raises(
        CheckpointError, match=r"have their sizes in the target's config, which is not given\. Give target_model="
    ):
        bind("auto", model=model)
    assert bind("auto", model=model, target_model=FOLDER / "target").circuit == bound()[0].circuit
