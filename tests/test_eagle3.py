"""EAGLE-3 against values that SafeAILab's code computed, and the entries that start at different values."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch

from circuitgraph.checkpoint import bind, load_circuit
from circuitgraph.circuit.narrow import slice_entry
from circuitgraph.circuit.text import circuit_from_json, circuit_to_json, format_circuit
from circuitgraph.errors import ProgramError
from circuitgraph.interpreter import interpret
from circuitgraph.language import parse_circuit
from tests.fixture_cases import FIXTURES, Cases, fixture_tensors

FOLDER = FIXTURES / "eagle3_llama"


@dataclass(frozen=True)
class Eagle3:
    """A `Forward` of the fixtures' cases. Rows of three hiddens are a chain's first step or context; later steps have one,
    and a token of the head's own vocabulary."""

    circuit: object
    weights: dict[str, torch.Tensor]
    offsets: torch.Tensor

    def _run(self, entry: str, rows) -> dict[str, torch.Tensor]:
        name, token = "aux", rows.token
        if rows.hidden.shape[1] == self.weights["fc"].shape[0]:
            name, token = "hidden", (token + self.offsets[token.long()]).int()
        inputs = {"token": token, name: rows.hidden, "position": rows.position}
        first = {"draft": "first", "logits": "first_logits"}.get(entry, entry)
        entry = first if name == "aux" else entry
        return interpret(self.circuit, inputs=inputs, weights=self.weights, states={"kv": rows.kv}, entry=entry)

    def draft(self, rows):
        out = self._run("draft", rows)
        return out["draft"], out["logprob"], out["next_hidden"]

    def logits(self, rows):
        out = self._run("logits", rows)
        return out["logits"], out["next_hidden"]

    def context(self, rows):
        self._run("context", rows)


def tensors_in_draft_ids() -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """The cases with the three hiddens where other families have one, and drafts in the head's vocabulary; d2t."""
    from safetensors.torch import load_file

    offsets = load_file(FOLDER / "model.safetensors")["d2t"]
    own = {int(target): draft for draft, target in enumerate(offsets + torch.arange(len(offsets)))}
    tensors = dict(fixture_tensors("eagle3_llama"))
    for name in list(tensors):
        if name.endswith(".aux"):
            tensors[name.removesuffix("aux") + "hiddens"] = tensors[name]
        if name.endswith("draft_tokens"):
            tensors[name] = torch.tensor([own[int(token)] for token in tensors[name]])
    tensors["b.tokens"] = tensors["b.draft_ids"]
    return tensors, offsets


def cases_of(keys: str = "tpos", **switches) -> Cases:
    bound = bind("auto", model=FOLDER, target_model=FOLDER / "target", switches=switches)
    tensors, offsets = tensors_in_draft_ids()
    forward = Eagle3(bound.circuit, bound.load_weights(positions=64), offsets)
    return Cases(tensors, bound.circuit.states[0], forward, keys=keys)


@pytest.mark.parametrize("case", ["a", "b", "c", "d"])
def test_cases(case: str) -> None:
    getattr(cases_of(), f"check_{case}")()


@pytest.mark.parametrize("case", ["a", "b"])
def test_keys_rotated_at_the_hiddens_position(case: str) -> None:
    getattr(cases_of(keys="hpos", rope_position="hidden"), f"check_{case}")()


@pytest.mark.parametrize("switches", [{"norm_before_residual": True}, {"recycle": "post_norm"}])
def test_a_wrong_switch_is_noticed(switches: dict) -> None:
    with pytest.raises(AssertionError):
        cases_of(**switches).check_b()


def test_skipping_the_catch_up_is_noticed() -> None:
    cases_of().check_d_without_overwrite()


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


def test_no_runner_drives_it_yet() -> None:
    from circuitgraph.errors import RuntimeUseError
    from circuitgraph.runtime import ReferenceRunner

    bound = bind("auto", model=FOLDER, target_model=FOLDER / "target")
    with pytest.raises(RuntimeUseError, match="takes no 'hidden'; expected an input 'hidden'; got token, aux, position"):
        _ = ReferenceRunner(bound.circuit, bound.load_weights(positions=4)).hidden_size
