"""Text with and without drafts, on a tiny random target: it must be the same whatever the drafter proposes."""

from __future__ import annotations

import json
import shutil

import pytest

from circuitgraph.cli import progress

from .conftest import TINY

transformers = pytest.importorskip("transformers")


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    """A two-layer Llama of the head's sizes with a tokenizer of one token a letter."""
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers

    folder = tmp_path_factory.mktemp("target")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        hidden_size=TINY["hidden_size"],
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=TINY["vocab_size"],
        initializer_range=0.3,
        bos_token_id=None,
        eos_token_id=0,
    )
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    letters = {chr(32 + index): index for index in range(TINY["vocab_size"])}
    tokenizer = Tokenizer(models.WordLevel(letters, unk_token=" "))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=" ").save_pretrained(folder)
    return folder


def test_texts_are_identical(run, artifact, target):
    arguments = ["generate", "--model", target, "--artifact", artifact, "--raw", "--max-new-tokens", "24", "--threads", "1"]
    arguments += ["--prompt", "hello", "--prompt", "drafts"]
    result = run(*arguments, "--json")
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout)
    assert report["identical"] == report["prompts"] == 2
    assert [text["prompt"] for text in report["texts"]] == ["hello", "drafts"]
    assert len(report["acceptance"]) == 3
    assert all(0 <= share <= 1 for share in report["acceptance"])
    assert 1 <= report["mean_accepted_length"] <= 4
    assert "2/2" in run(*arguments).stdout


def test_a_target_without_a_tokenizer_is_told_as_one(run, artifact, target, tmp_path):
    """And not by what transformers says when it tries to make one of nothing."""
    for file in target.iterdir():
        if not file.name.startswith("tokenizer"):
            shutil.copy(file, tmp_path)
    result = run("generate", "--model", tmp_path, "--artifact", artifact, "--prompt", "x")
    assert result.exit_code == 1
    assert f"error: {tmp_path}: has no tokenizer, which text needs; expected one of tokenizer.json, " in result.stderr
    assert "Copy the tokenizer's files beside the model's." in result.stderr


def test_long_work_is_seen_to_go_on_where_no_bar_can_be(run, artifact, target, monkeypatch):
    """In a log: a line for each text, plain and with drafts, once it has taken a while."""
    monkeypatch.setattr(progress, "LINE_SECONDS", 0.0)
    arguments = ["--model", target, "--artifact", artifact, "--raw", "--max-new-tokens", "4", "--prompt", "hello"]
    lines = run("generate", *arguments).stderr.splitlines()
    steps = [line.partition("; ")[2] for line in lines if line.startswith("generate: ")]
    assert steps == ["loading the target", "warming up", "plain: hello", "with drafts: hello"]
    assert lines[-1].startswith("generate: 2 of 3 after ")
    monkeypatch.setattr(progress, "LINE_SECONDS", 1000.0)
    assert "generate: " not in run("generate", *arguments).stderr
