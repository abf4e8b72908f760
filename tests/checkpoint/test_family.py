"""Family files of one's own: what they may say, and what they are told."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from circuitgraph.checkpoint import bind, load_circuit, load_family, shipped_families
from circuitgraph.checkpoint.config import read_raw
from circuitgraph.checkpoint.family import recognise
from circuitgraph.errors import CheckpointError, CircuitgraphError
from circuitgraph.language.load import load_program
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
    "unknown program": ("program: mtp_dense", "program: wxyz", "no program 'wxyz'. Known: "),
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


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (
            "switches:\n",
            "unrounded: [fcc]\nswitches:\n",
            "'fcc' is not rounded; expected one of 'tensors'; got none of that name. Did you mean 'fc'?",
        ),
        (
            "switches:\n",
            "ambiguous: {odd: {switch: concat, meanings: two}}\nswitches:\n",
            "'odd' is ambiguous; expected a setting of 'supports'; got none there",
        ),
        (
            "switches:\n",
            "ambiguous: {use_mrope: {switch: odd, meanings: two}}\nswitches:\n",
            "use_mrope: 'odd' decides; expected one of 'switches'; got none of that name",
        ),
        (
            "fc_bias: false",
            "fc_bias: {equal: [a, b], default: false}",
            "expected 'tensor', 'held' and 'absent' beside 'equal'; got no tensor, held, absent",
        ),
        (
            "switches:\n",
            "apart: [[qkv_bias, norms]]\nswitches:\n",
            "'norms' goes without others; expected one of 'switches'; got none of that name. Did you mean 'norm'?",
        ),
    ],
)
def test_what_a_family_file_names_is_there(old: str, new: str, message: str) -> None:
    assert message in refusal(family(old, new))


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


MODEL_TYPES = {
    "deepseek_v3_mtp": "deepseek_v3",
    "dflash_qwen3": "qwen3",
    "eagle1_llama": "llama",
    "eagle3_llama": "llama",
    "glm4_moe_mtp": "glm4_moe",
    "mimo_mtp": "qwen2",  # which MiMo's class extends
    "qwen3_5_moe_mtp": "qwen3_5_moe_text",
    "qwen3_5_mtp": "qwen3_5_text",
    "qwen3_dense_mtp": "qwen3",
    "qwen3_next_mtp": "qwen3_next",
}
SWITCHES = {"norm_topk_prob": "renormalise", "attention_bias": "qkv_bias", "use_qk_norm": "qk_norm"}
NUMBERS = ("head_dim", "num_key_value_heads", "rms_norm_eps", "routed_scaling_factor", "n_group", "topk_group")


def asked(name: str) -> list[str]:
    """Keys that mean something to a family's program."""
    program = load_program(load_family(name).file.program).file
    wanted = {*program.dims.values(), *program.params.values()}
    decided = [key for key, switch in SWITCHES.items() if switch in program.switches]
    return ["rope_theta", "partial_rotary_factor", "tie_word_embeddings", *filter(wanted.__contains__, NUMBERS), *decided]


@pytest.mark.parametrize(("name", "key"), [(name, key) for name in MODEL_TYPES for key in asked(name)])
def test_a_key_that_a_config_lacks_means_what_its_model_makes_of_it(name: str, key: str) -> None:
    """Or has to be there: the default of transformers' class is the same as ours, or ours is none."""
    transformers = pytest.importorskip("transformers")
    plain = transformers.CONFIG_MAPPING[MODEL_TYPES[name]]().to_dict()
    theirs = {**plain, **plain["rope_parameters"]}
    family = load_family(name)
    if key not in theirs:
        pytest.skip(f"{MODEL_TYPES[name]}'s class has no default of it")
    config = without(family.file.example, key)
    try:
        found = family.read_config(read_raw(config))
    except CheckpointError as problem:
        assert f"{key}: the key is missing" in str(problem)  # noqa: PT017 (either is right)
        return
    assert found.rope is not None
    if key == "rope_theta":
        assert found.rope.theta == theirs[key]
    elif key == "partial_rotary_factor":
        assert found.rope.dim == found.values["head_dim"] * theirs[key]
    elif key in SWITCHES:
        assert family.switches(found)[SWITCHES[key]] == theirs[key]
    elif key in found.values:
        assert found.values[key] == theirs[key]
    else:
        with pytest.raises(CheckpointError, match=f"{key}: the key is missing"):
            load_circuit(family.file.program, family=name, config=config)


def without(config: dict[str, Any], key: str) -> dict[str, Any]:
    """A config that lacks the key wherever it may stand."""
    return {name: without(value, key) if isinstance(value, dict) else value for name, value in config.items() if name != key}
