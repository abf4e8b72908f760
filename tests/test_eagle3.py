"""EAGLE-3 against values that SafeAILab's code computed, and the entries that start at different values."""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass

import pytest
import torch
from safetensors.torch import load_file, save_file

from circuitgraph.checkpoint import bind, load_circuit
from circuitgraph.circuit.narrow import slice_entry
from circuitgraph.circuit.text import circuit_from_json, circuit_to_json, format_circuit
from circuitgraph.errors import CheckpointError, ProgramError
from circuitgraph.interpreter import interpret
from circuitgraph.language import parse_circuit
from tests.compiled_calls import Interpreted, compile_entries
from tests.fixture_cases import FIXTURES, Cases, fixture_tensors, target_of
from tests.fixture_cases import Interpreted as InterpretedForward
from tests.program_cases import EAGLE3_PROGRAMS, check_eagle3, close, eagle3_chain, eagle3_drafts

FOLDER = FIXTURES / "eagle3_llama"
NARROW = "eagle3_llama_narrow"
"""A head of 48 columns for a target of 64, with an embedding of its own."""
HEADS = ("eagle3_llama", NARROW)
heads = pytest.mark.parametrize("head", HEADS)


@dataclass(frozen=True)
class Eagle3(InterpretedForward):
    """A `Forward` of the fixtures' cases. Rows of three hiddens are a chain's first step or context; later steps have one,
    and a token of the head's own vocabulary."""

    offsets: torch.Tensor

    def _run(self, entry: str, rows) -> dict[str, torch.Tensor]:
        name, token = "aux", rows.token
        if rows.hidden.shape[1] != self.weights["fc"].shape[1]:
            name, token = "hidden", (token + self.offsets[token.long()]).int()
        inputs = {"token": token, name: rows.hidden, "position": rows.position}
        first = {"draft": "first", "logits": "first_logits"}.get(entry, entry)
        entry = first if name == "aux" else entry
        return interpret(self.circuit, inputs=inputs, weights=self.weights, states={"kv": rows.kv}, entry=entry)


def tensors_in_draft_ids(head: str) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """The cases with the three hiddens where other families have one, and drafts in the head's vocabulary; d2t."""
    offsets = load_file(FIXTURES / head / "model.safetensors")["d2t"]
    own = {int(target): draft for draft, target in enumerate(offsets + torch.arange(len(offsets)))}
    tensors = dict(fixture_tensors(head))
    for name in list(tensors):
        if name.endswith(".aux"):
            tensors[name.removesuffix("aux") + "hiddens"] = tensors[name]
        if name.endswith("draft_tokens"):
            tensors[name] = torch.tensor([own[int(token)] for token in tensors[name]])
    tensors["b.tokens"] = tensors["b.draft_ids"]
    return tensors, offsets


def cases_of(keys: str = "tpos", head: str = "eagle3_llama", **switches) -> Cases:
    bound = bind("auto", model=FIXTURES / head, target_model=target_of(head), switches={"ids": "own", **switches})
    tensors, offsets = tensors_in_draft_ids(head)
    forward = Eagle3(bound.circuit, bound.load_weights(positions=64), offsets)
    return Cases(tensors, bound.circuit.states[0], forward, keys=keys)


@heads
@pytest.mark.parametrize("case", ["a", "b", "c", "d"])
def test_cases(case: str, head: str) -> None:
    getattr(cases_of(head=head), f"check_{case}")()


@heads
@pytest.mark.parametrize("case", ["a", "b"])
def test_keys_rotated_at_the_hiddens_position(case: str, head: str) -> None:
    getattr(cases_of("hpos", head, rope_position="hidden"), f"check_{case}")()


@heads
@pytest.mark.parametrize("switches", [{"norm_before_residual": True}, {"recycle": "post_norm"}])
def test_a_wrong_switch_is_noticed(switches: dict, head: str) -> None:
    with pytest.raises(AssertionError):
        cases_of(head=head, **switches).check_b()


@heads
def test_skipping_the_catch_up_is_noticed(head: str) -> None:
    cases_of(head=head).check_d_without_overwrite()


# -- entries that are given interior values ------------------------------------------------------------------------


def test_later_steps_take_the_hidden_and_no_projection() -> None:
    circuit = load_circuit("eagle3")
    first, later = slice_entry(circuit, "first"), slice_entry(circuit, "draft")
    assert [item.name for item in first.inputs] == ["token", "aux", "position"]
    assert [item.name for item in later.inputs] == ["token", "position", "hidden"]
    assert "fc" in {weight.name for weight in first.weights}
    assert "fc" not in {weight.name for weight in later.weights}
    assert slice_entry(later, "draft") == later


def test_given_values_survive_printing_and_json() -> None:
    circuit = load_circuit("eagle3")
    assert circuit.entry("draft").given == ("hidden",)
    assert parse_circuit(format_circuit(circuit)) == circuit
    assert circuit_from_json(circuit_to_json(circuit)) == circuit


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("hiden", "entry 'draft' is given 'hiden', which is no tensor that the body makes. Did you mean 'hidden'?"),
        ("aux", "entry 'draft' is given 'aux', which is no tensor that the body makes"),
        ("kv", "entry 'draft' is given 'kv', which is no tensor that the body makes"),
        ("x", "entry 'draft' is given 'x', which is called 'x_2' in the circuit"),
    ],
)
def test_what_cannot_be_given_is_refused(given: str, message: str, tmp_path) -> None:
    from circuitgraph.language import shipped_programs

    text = shipped_programs()["eagle3"].read_text()
    file = tmp_path / "eagle3.yaml"
    file.write_text(text.replace("draft: {rows: sequences, given: [hidden]", f"draft: {{rows: sequences, given: [{given}]"))
    with pytest.raises(ProgramError) as caught:
        load_circuit(file, family="eagle3_llama")
    assert message in str(caught.value)


# -- ids that leave are the target's -------------------------------------------------------------------------------


@heads
@pytest.mark.parametrize("kind", ["interpreted", "compiled"])
def test_drafts_are_ids_of_the_target(kind: str, head: str, tmp_path) -> None:
    bound = bind("auto", model=FIXTURES / head, target_model=target_of(head))
    weights = bound.load_weights(positions=64)
    assert weights["d2t"].dtype == torch.int64
    pieces = [(entry, rows) for entry, sizes in EAGLE3_PROGRAMS.items() for rows in sizes]
    forward = compile_entries(bound.circuit, pieces, tmp_path) if kind == "compiled" else Interpreted(bound.circuit)
    check_eagle3(forward, weights, bound.circuit.states[0], head)
    with pytest.raises(AssertionError):
        check_eagle3(forward, {**weights, "d2t": weights["d2t"].roll(1)}, bound.circuit.states[0], head)


# -- heads with some things more -------------------------------------------------------------------------------------

PIECES = FIXTURES / "eagle3_llama_variants"
BIASES = tuple(f"layers.0.self_attn.{name}_proj.bias" for name in "qkvo")
VARIANTS: dict[str, tuple[dict, tuple[str, ...]]] = {
    "plain": ({}, ()),
    "bias": ({"attention_bias": True}, BIASES),
    "bias_deep": ({"attention_bias": True, "num_hidden_layers": 2}, (*BIASES, "layers.1.")),
    "norm_before_fc": ({"norm_before_fc": True}, ("input_norm.",)),
    "fc_norm": ({"fc_norm": True}, ("fc_norm.",)),
    "norm_output": ({"norm_output": True, "fc_norm": True, "norm_before_residual": True}, ("fc_norm.",)),
    "own_embedding": ({"embed_requires_grad": True}, ("embed_tokens.",)),
}
"""Config keys, and what the names of the tensors begin with."""


SPECULATORS = "speculators"
OF_SPECULATORS = (
    *("draft_vocab_size", "norm_before_residual", "norm_before_fc", "fc_norm", "norm_output"),
    *("embed_requires_grad", "target_hidden_size"),
)
"""What stands at the top of their configs; the layer's own settings lie in a section."""


def tensors_of(variant: str) -> dict[str, torch.Tensor]:
    """The tensors that a plain head lacks."""
    pieces = load_file(PIECES / "pieces.safetensors")
    return {name: tensor for name, tensor in pieces.items() if name.startswith(VARIANTS[variant][1])}


def write_variant(folder, variant: str, style: str, **config) -> None:
    """A head's folder. style: what the tensors of the first layer begin with; `speculators`: theirs, in a config of theirs."""
    own, style = style == SPECULATORS, "layers.0." if style == SPECULATORS else style
    shutil.copytree(FOLDER, folder)
    tensors = load_file(folder / "model.safetensors") | tensors_of(variant)
    first = ("midlayer.", "layers.0.")
    renamed = {next((style + n.removeprefix(p) for p in first if n.startswith(p)), n): t for n, t in tensors.items()}
    save_file(renamed, folder / "model.safetensors")
    settings = {**json.loads((folder / "config.json").read_text()), **VARIANTS[variant][0], **config}
    if own:
        top = {key: settings.pop(key) for key in list(settings) if key in OF_SPECULATORS}
        settings = {"speculators_model_type": "eagle3", **top, "transformer_layer_config": settings}
    (folder / "config.json").write_text(json.dumps(settings))


def bound_variant(folder, variant: str, style: str = SPECULATORS, **config):
    write_variant(folder, variant, style, **config)
    told = {"recycle": "post_norm"} if variant == "norm_output" and style != SPECULATORS else None
    return bind("auto", model=folder, target_model=folder / "target", switches=told)


def check_variant(variant: str, bound, forward, *, logits: bool = False) -> None:
    want = load_file(PIECES / "cases.safetensors")
    made = eagle3_chain(forward, bound.load_weights(positions=64), bound.circuit.states[0], logits=logits)
    assert [int(step["draft"]) for step in made] == want[f"{variant}.tokens"].tolist()
    close(torch.cat([step["logprob"] for step in made]), want[f"{variant}.logits"].log_softmax(-1).amax(-1))
    close(torch.cat([step["next_hidden"] for step in made]), want[f"{variant}.recycled"])
    if logits:
        close(torch.cat([step["logits"] for step in made]), want[f"{variant}.logits"])


@pytest.mark.parametrize("style", ["layers.0.", "midlayer.", SPECULATORS])
@pytest.mark.parametrize("variant", VARIANTS)
def test_variants(variant: str, style: str, tmp_path) -> None:
    bound = bound_variant(tmp_path / "head", variant, style)
    check_variant(variant, bound, Interpreted(bound.circuit), logits=True)
    if variant != "plain":
        with pytest.raises(AssertionError):
            check_variant("plain", bound, Interpreted(bound.circuit))


@pytest.mark.parametrize("variant", [variant for variant in VARIANTS if variant != "plain"])
def test_compiled_variants(variant: str, tmp_path) -> None:
    bound = bound_variant(tmp_path / "head", variant)
    pieces = [(entry, rows) for entry, sizes in EAGLE3_PROGRAMS.items() for rows in sizes]
    check_variant(variant, bound, compile_entries(bound.circuit, pieces, tmp_path))


def test_a_head_without_the_biases_that_its_config_says(tmp_path) -> None:
    """Configs are copied from targets that have some."""
    with pytest.raises(CheckpointError) as caught:
        bound_variant(tmp_path / "head", "plain", attention_bias=True)
    assert "no tensor for weight 'q_bias'" in str(caught.value)
    assert "If the model has none, say so: qkv_bias=false (--set)." in str(caught.value)
    assert "If the model has none, say so: output_bias=false (--set)." in str(caught.value)
    none = {"qkv_bias": False, "output_bias": False}
    bound = bind("auto", model=tmp_path / "head", target_model=FOLDER / "target", switches=none)
    check_variant("plain", bound, Interpreted(bound.circuit))


# -- names and layers ----------------------------------------------------------------------------------------------


def changed_head(folder, change, **config):
    shutil.copytree(FOLDER, folder)
    tensors = load_file(folder / "model.safetensors")
    save_file(change(tensors), folder / "model.safetensors")
    original = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**original, **config}))
    return bind("auto", model=folder, target_model=folder / "target")


def test_names_of_speculators_are_the_same_head(tmp_path) -> None:
    def renamed(tensors):
        return {name.replace("midlayer.", "layers.0."): tensor for name, tensor in tensors.items()}

    bound = changed_head(tmp_path / "head", renamed)
    assert bound.tensors["q_proj"].name == "layers.0.self_attn.q_proj.weight"
    tokens, _ = eagle3_drafts(Interpreted(bound.circuit), bound.load_weights(positions=64), bound.circuit.states[0])
    assert tokens == fixture_tensors("eagle3_llama")["b.tokens"].tolist()


def second_layer(tensors: dict[str, torch.Tensor], scale: float) -> dict[str, torch.Tensor]:
    """A second, ordinary layer; with a scale of 0 it adds nothing to the residual stream."""
    generator = torch.Generator().manual_seed(3)
    shapes = {
        "self_attn.q_proj": (64, 64),
        "self_attn.k_proj": (32, 64),
        "self_attn.v_proj": (32, 64),
        "self_attn.o_proj": (64, 64),
        "mlp.gate_proj": (160, 64),
        "mlp.up_proj": (160, 64),
        "mlp.down_proj": (64, 160),
    }
    made = {}
    for name, shape in shapes.items():
        factor = scale if name in ("self_attn.o_proj", "mlp.down_proj") else 1.0
        made[f"layers.1.{name}.weight"] = (torch.randn(shape, generator=generator) * factor / 8).to(torch.float16)
    for name in ("input_layernorm", "post_attention_layernorm"):
        made[f"layers.1.{name}.weight"] = torch.ones(64, dtype=torch.float16)
    return {**tensors, **made}


@pytest.mark.parametrize("kind", ["interpreted", "compiled"])
def test_a_head_of_two_layers(kind: str, tmp_path) -> None:
    want = fixture_tensors("eagle3_llama")
    runs = {}
    for scale in (0.0, 1.0):
        bound = changed_head(tmp_path / f"head{scale}", lambda tensors, s=scale: second_layer(tensors, s), num_hidden_layers=2)
        assert bound.circuit.states[0].layers == 2
        pieces = [("first", 1), ("draft", 1), ("context", 13)]
        (tmp_path / f"code{scale}").mkdir()
        compiled = kind == "compiled"
        forward = compile_entries(bound.circuit, pieces, tmp_path / f"code{scale}") if compiled else Interpreted(bound.circuit)
        runs[scale] = eagle3_drafts(forward, bound.load_weights(positions=64), bound.circuit.states[0])
    assert runs[0.0][0] == want["b.tokens"].tolist()
    torch.testing.assert_close(runs[0.0][1], want["b.logprobs"], rtol=0, atol=1e-4)
    assert (runs[1.0][1] - want["b.logprobs"]).abs().max() > 1e-2


def test_a_layer_that_the_config_denies_is_refused(tmp_path) -> None:
    with pytest.raises(CheckpointError, match=r"layers\.1\.mlp\.up_proj\.weight: no weight of the program uses this tensor"):
        changed_head(tmp_path / "head", lambda tensors: second_layer(tensors, 1.0))


def test_a_head_without_a_map_is_refused_unless_ids_are_its_own(tmp_path) -> None:
    with pytest.raises(CheckpointError, match=r"no tensor for weight 'd2t'"):
        changed_head(tmp_path / "head", lambda tensors: {name: t for name, t in tensors.items() if name != "d2t"})
    bind("auto", model=tmp_path / "head", target_model=FOLDER / "target", switches={"ids": "own"})


def test_a_map_of_floats_is_refused(tmp_path) -> None:
    with pytest.raises(CheckpointError, match=r"d2t: the table cannot be read from this dtype; expected i64; got f32"):
        changed_head(tmp_path / "head", lambda tensors: {**tensors, "d2t": tensors["d2t"].float()})
