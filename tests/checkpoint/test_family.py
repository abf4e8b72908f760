"""Family files of one's own: what they may say, and what they are told."""

from __future__ import annotations

from pathlib import Path

import pytest

from circuitgraph.checkpoint import bind, load_family, shipped_families
from circuitgraph.checkpoint.family import recognise
from circuitgraph.errors import CheckpointError, CircuitgraphError
from tests.fixture_cases import FIXTURES

MODEL = FIXTURES / "mimo_mtp"


@pytest.fixture(autouse=True)
def in_tmp(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def family(old: str, new: str) -> str:
    """MiMo's family file with some text replaced."""
    text = shipped_families()["mimo_mtp"].read_text()
    assert text.count(old) == 1
    Path("own.yaml").write_text(text.replace(old, new))
    return "own.yaml"


def refusal(file: str) -> str:
    """The message, with line numbers left out: they move with the shipped file."""
    with pytest.raises(CircuitgraphError) as caught:
        bind("auto", model=MODEL, family=file)
    head, _, rest = str(caught.value).partition(": ")
    return f"{head.partition(':')[0]}: {rest}"


def test_a_family_file_by_path() -> None:
    assert bind("auto", model=MODEL, family=family("family: mimo_mtp", "family: mine")).family == "mine"


def test_candidates_are_tried_in_order() -> None:
    name = '"model.mtp_layers.{layer}.input_proj.weight"'
    bound = bind("auto", model=MODEL, family=family(f"fc: {name}", f'fc: ["model.mtp_layers.{{layer}}.eh_proj.weight", {name}]'))
    assert bound.tensors["fc"].name == "model.mtp_layers.0.input_proj.weight"


def test_waived_by_pattern() -> None:
    file = family("borrowed:\n", "waived:\n  - {pattern: 'model.mtp_layers.{layer}.*.bias', reason: for this test}\nborrowed:\n")
    bound = bind("auto", model=MODEL, family=file, switches={"qkv_bias": False})
    waived = [row for row in bound.report if row.status == "waived"]
    assert [row.tensor[-11:] for row in waived] == ["k_proj.bias", "q_proj.bias", "v_proj.bias"]
    assert {row.reason for row in waived} == {"for this test"}


REFUSALS = {
    "unknown key": ("stored: in_target", "strored: in_target", "own.yaml: unknown key 'strored'. Did you mean 'stored'?"),
    "unknown program": ("program: mtp_dense", "program: mtp", "no program 'mtp'. Did you mean 'mtp_moe'?"),
    "unknown switch": (
        "  qk_norm: false",
        "  qknorm: false",
        "own.yaml: the family states 'qknorm: false'; expected a switch of program 'mtp_dense'; got no such switch there. "
        "Did you mean 'qk_norm'?",
    ),
    "a weight without a name": (
        '  enorm: "model.mtp_layers.{layer}.token_layernorm.weight"\n',
        "",
        "own.yaml: the family names no tensor for weight 'enorm'. "
        "Add it under 'tensors' or 'borrowed', or set the switch that leaves the weight out.",
    ),
}


@pytest.mark.parametrize(("old", "new", "message"), REFUSALS.values(), ids=REFUSALS)
def test_refusals(old: str, new: str, message: str) -> None:
    # The first line: what a family leaves out has consequences, each told too.
    assert refusal(family(old, new)).split("\n")[0].startswith(message)


def test_several_families_recognise_one_config(monkeypatch: pytest.MonkeyPatch) -> None:
    raw = bind("auto", model=MODEL).config.raw
    twice = [load_family("mimo_mtp"), load_family("mimo_mtp")]
    monkeypatch.setattr("circuitgraph.checkpoint.family.families_of", lambda program: twice)
    with pytest.raises(CheckpointError) as caught:
        recognise(raw)
    assert str(caught.value) == (
        f"{MODEL}/config.json: several families recognise this config: mimo_mtp, mimo_mtp; "
        "got model_type 'mimo', architectures ['MiMoForCausalLM']. Name one of them."
    )


def test_every_fact_of_a_shipped_family_has_a_source() -> None:
    for path in shipped_families().values():
        file = load_family(path).file
        assert file.sources
        assert all(item.reason for item in file.waived)
