"""DFlash against values that z-lab's code computed, interpreted and compiled."""

from __future__ import annotations

import json
import re

import pytest
import torch

from circuitgraph.checkpoint import bind, load_circuit
from circuitgraph.circuit.narrow import slice_entry
from circuitgraph.circuit.text import circuit_from_json, circuit_to_json, format_circuit
from circuitgraph.errors import CheckpointError, CircuitError
from circuitgraph.language import parse_circuit
from circuitgraph.pipeline import work_list
from tests.compiled_calls import Interpreted, compile_entries
from tests.fixture_cases import FIXTURES, target_of
from tests.program_cases import (
    DFLASH,
    DFLASH_PROGRAMS,
    DFLASH_VARIANT_PROGRAMS,
    DFLASH_VARIANTS,
    FULL,
    MASK,
    SLIDING,
    after_context,
    check_a_smaller_block,
    check_attention,
    check_catching_up,
    check_context_and_block,
    check_three_sequences,
    dflash_variant,
)


@pytest.fixture(scope="module")
def bound():
    return bind("auto", model=FIXTURES / DFLASH, target_model=target_of(DFLASH))


@pytest.fixture(scope="module", params=["interpreted", "compiled"])
def forward(request, bound, tmp_path_factory):
    if request.param == "interpreted":
        return Interpreted(bound.circuit)
    pieces = [(entry, rows) for entry, sizes in DFLASH_PROGRAMS.items() for rows in sizes]
    return compile_entries(bound.circuit, pieces, tmp_path_factory.mktemp(DFLASH))


@pytest.mark.parametrize(
    "check",
    [check_context_and_block, check_a_smaller_block, check_three_sequences, check_catching_up],
    ids=lambda check: check.__name__,
)
def test_cases(check, forward, bound) -> None:
    check(forward, bound.load_weights(positions=64), bound.circuit.states[0])


COMPILED = ("mixed", "blocks", "biases")
"""Variants that together have all that compiled code can do otherwise; each takes long to build."""


@pytest.mark.parametrize(
    ("name", "compiled"), [*((name, False) for name in DFLASH_VARIANTS), *((name, True) for name in COMPILED)]
)
def test_windows_causal_blocks_and_biases(name: str, compiled: bool, tmp_path) -> None:
    bound = bind("auto", model=dflash_variant(name, tmp_path / "model"), target_model=target_of(DFLASH))
    pieces = [(entry, rows) for entry, sizes in DFLASH_VARIANT_PROGRAMS.items() for rows in sizes]
    forward = compile_entries(bound.circuit, pieces, tmp_path) if compiled else Interpreted(bound.circuit)
    check_attention(forward, bound.load_weights(positions=64), bound.circuit.states[0], name)


def test_a_wrong_window_is_noticed(tmp_path) -> None:
    folder = dflash_variant("mixed", tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    for wrong in ({"sliding_window": 10}, {"is_causal": False}, {"layer_types": [SLIDING, SLIDING, FULL]}):
        (folder / "config.json").write_text(json.dumps(config | wrong))
        bound = bind("auto", model=folder, target_model=target_of(DFLASH))
        with pytest.raises(AssertionError):
            check_attention(Interpreted(bound.circuit), bound.load_weights(positions=64), bound.circuit.states[0], "mixed")


def started(bound):
    return after_context(Interpreted(bound.circuit), bound.load_weights(positions=64), bound.circuit.states[0])


def test_scratch_that_stays_is_noticed(bound) -> None:
    made, want = started(bound)
    made.block([13], [int(want["ctx.tokens"][13])], 8)
    logits = made.block([16], [int(want["d.bonus"])], 8)["logits"][0, 1:]
    assert (logits - want["d.draft_logits"]).abs().max() > 0.05


@pytest.mark.parametrize("wrong", ["causal", "k_norm", "order", "hidden_norm"])
def test_a_wrong_drafter_is_noticed(wrong: str, bound) -> None:
    made, want = started(bound)
    newest = [int(want["ctx.tokens"][13])]
    if wrong == "causal":
        out = made.block([13], newest, 8, end=14)
    else:
        weights = made.weights
        if wrong == "k_norm":  # the first layer's for all
            weights |= {f"layers_{i}.attn.k_norm": weights["layers_0.attn.k_norm"] for i in range(3)}
        elif wrong == "order":  # of the target's layers
            weights["fc"] = weights["fc"].unflatten(1, (3, -1)).flip(1).flatten(1).contiguous()
        else:
            weights["hidden_norm"] = torch.ones_like(weights["hidden_norm"])
        made.context([(0, place, aux) for place, aux in enumerate(want["ctx.aux"])])
        out = made.block([13], newest, 8)
    assert (out["logits"][0, 1:] - want["a.logits"]).abs().max() > 0.05


def test_entries_compute_what_they_need(bound) -> None:
    context, block = (slice_entry(bound.circuit, name) for name in ("context", "draft"))
    assert {item.name for item in context.inputs} == {"aux", "position"}
    assert {item.name for item in block.inputs} == {"token", "position"}
    assert not {"lm_head", "layers_0.attn.q_proj", "layers_0.ffn.up_proj"} & {weight.name for weight in context.weights}
    assert not {"fc", "hidden_norm"} & {weight.name for weight in block.weights}


def test_programs_have_whole_blocks(bound) -> None:
    assert work_list(bound.circuit, None, (3,), (4,)) == [("draft", 8), ("draft", 24), ("context", 4)]


def test_what_a_block_is_made_of_is_a_fact(bound) -> None:
    facts = dict(bound.circuit.facts)
    assert (facts["block_size"], facts["mask_token"], facts["hidden_layers"]) == (8, MASK, "1 2 3")
    assert parse_circuit(format_circuit(bound.circuit)) == bound.circuit
    assert circuit_from_json(circuit_to_json(bound.circuit)) == bound.circuit


def test_programs_of_too_many_rows_are_refused() -> None:
    """Widths are of sequences, and each has a block."""
    told = (
        "dflash: widths: a program has at most 1024 rows; expected at most 128 sequences, whose blocks have 8 rows each; got 129"
    )
    circuit = load_circuit("dflash", config=FIXTURES / DFLASH)
    assert ("draft", 1024) in work_list(circuit, ["draft"], [128], [4])
    with pytest.raises(CircuitError, match=re.escape(told)):
        work_list(circuit, ["draft"], [129], [4])
    assert ("context", 4) in work_list(circuit, ["context"], [129], [4])


@pytest.mark.parametrize(("key", "missing"), [("block_size", "block_size"), ("dflash_config", "mask_token_id")])
def test_a_config_that_does_not_say_it_is_refused(key: str, missing: str, tmp_path) -> None:
    config = json.loads((FIXTURES / DFLASH / "config.json").read_text())
    if key == "dflash_config":
        del config[key]["mask_token_id"]
    else:
        del config[key]
    file = tmp_path / "config.json"
    file.write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=rf": dflash_config.{missing} or {missing}: the key is missing\. Program"):
        bind("auto", model=file)
