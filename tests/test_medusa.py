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

FOLDER = FIXTURES / "medusa1"
CASES = ("a", "b", "c", "d")


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
        pieces = [(entry, rows) for entry in ("draft", "logits") for rows in (1, 3)]
        forward = compile_entries(model.circuit, pieces, tmp_path_factory.mktemp("medusa"))
    return lambda entry, hidden: forward.run(entry, {"hidden": hidden.contiguous()}, weights, {})


def hiddens_of(case: str, want: dict[str, torch.Tensor]) -> torch.Tensor:
    """The target's hiddens of a case, a row each."""
    if case == "c":
        return torch.stack([want[f"c.{i}.hidden"] for i in range(3)])
    return want["d.hiddens" if case == "d" else "ctx.hiddens"][-1:]


def expected_of(case: str, want: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits [rows, heads, V] and drafts [rows, heads]; case c has those of the first 3 heads."""
    if case == "c":
        return tuple(torch.stack([want[f"c.{i}.draft_{what}"] for i in range(3)]) for what in ("logits", "tokens"))  # type: ignore[return-value]
    names = {"a": ("a.logits", "a.argmax"), "b": ("b.logits", "b.tokens"), "d": ("d.draft_logits", "d.draft_tokens")}[case]
    return want[names[0]][None], want[names[1]][None]


@pytest.mark.parametrize("case", CASES)
def test_cases(case: str, heads) -> None:
    want = fixture_tensors("medusa1")
    hidden = hiddens_of(case, want)
    logits, tokens = expected_of(case, want)
    some = logits.shape[1]
    drafted = heads("draft", hidden)
    assert drafted["draft"].shape == (len(hidden), 4)
    assert drafted["draft"][:, :some].tolist() == tokens.tolist()
    torch.testing.assert_close(heads("logits", hidden)["logits"][:, :some], logits, rtol=0, atol=1e-4)
    torch.testing.assert_close(drafted["logprob"][:, :some], logits.log_softmax(-1).amax(-1), rtol=0, atol=1e-4)
    if case == "a":
        torch.testing.assert_close(drafted["logprob"][0], want["a.logprob"], rtol=0, atol=1e-4)


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
    hidden = hiddens_of("a", want)
    changed = dict(weights)
    if wrong == "bias":
        changed["head_1.blocks_0.bias"] = torch.zeros_like(weights["head_1.blocks_0.bias"])
    elif wrong == "order":
        changed["head_0.lm_head"], changed["head_1.lm_head"] = weights["head_1.lm_head"], weights["head_0.lm_head"]
    else:
        changed["head_2.blocks_0.linear"] = -weights["head_2.blocks_0.linear"]
    logits = Interpreted(model.circuit).run("logits", {"hidden": hidden}, changed, {})["logits"]
    assert (logits[0] - want["a.logits"]).abs().max() > 0.05


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
    logits = Interpreted(deep.circuit).run("logits", {"hidden": hiddens_of("a", want)}, deep.load_weights(), {})["logits"]
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
