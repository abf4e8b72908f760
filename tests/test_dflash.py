"""DFlash against values that z-lab's code computed, interpreted and compiled."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace

import pytest
import torch

from circuitgraph.checkpoint import bind
from circuitgraph.circuit.narrow import slice_entry
from circuitgraph.circuit.text import circuit_from_json, circuit_to_json, format_circuit
from circuitgraph.errors import CheckpointError
from circuitgraph.language import parse_circuit
from circuitgraph.pipeline import work_list
from tests.compiled_calls import Interpreted, compile_entries
from tests.fixture_cases import FIXTURES, Cache, Row, fixture_tensors, target_of

NAME = "dflash_qwen3"
MASK = 508


@pytest.fixture(scope="module")
def bound():
    return bind("auto", model=FIXTURES / NAME, target_model=target_of(NAME))


@pytest.fixture(scope="module", params=["interpreted", "compiled"])
def forward(request, bound, tmp_path_factory):
    if request.param == "interpreted":
        return Interpreted(bound.circuit)
    pieces = [(entry, rows) for entry in ("draft", "logits") for rows in (5, 8, 24)]
    return compile_entries(bound.circuit, [*pieces, *(("context", rows) for rows in (3, 13, 35))], tmp_path_factory.mktemp(NAME))


@dataclass
class Drafter:
    """Calls a forward on one cache of some sequences."""

    forward: object
    weights: dict[str, torch.Tensor]
    cache: Cache

    def context(self, rows: list[tuple[int, int, torch.Tensor]]) -> None:
        """(sequence, position, hiddens) of each row."""
        call = self.cache.rows([Row(sequence, place, 0, aux) for sequence, place, aux in rows])
        position = torch.tensor([place for _, place, _ in rows], dtype=torch.int32)
        self.forward.run("context", {"aux": call.hidden, "position": position}, self.weights, {"kv": call.kv})

    def block(self, starts: list[int], newest: list[int], size: int, end: int | None = None) -> dict[str, torch.Tensor]:
        """A block of each sequence; [sequences, size, ...] of every output. `end`: see only so many rows."""
        rows = [
            Row(sequence, start + i, token if i == 0 else MASK, torch.zeros(1))
            for sequence, (start, token) in enumerate(zip(starts, newest, strict=True))
            for i in range(size)
        ]
        call = self.cache.rows(rows)
        position = torch.tensor([row.index for row in rows], dtype=torch.int32)
        length = torch.tensor([end or starts[row.sequence] + size for row in rows], dtype=torch.int32)
        states = {"kv": replace(call.kv, length=length)}
        inputs = {"token": call.token, "position": position}
        made = {
            **self.forward.run("logits", inputs, self.weights, states),
            **self.forward.run("draft", inputs, self.weights, states),
        }
        return {name: value.unflatten(0, (len(starts), size)) for name, value in made.items()}


def drafter(forward, bound, sequences: int = 1) -> Drafter:
    return Drafter(forward, bound.load_weights(positions=64), Cache(bound.circuit.states[0], sequences=sequences, capacity=32))


def close(got: torch.Tensor, want: torch.Tensor, bound: float = 1e-4) -> None:
    torch.testing.assert_close(got.float().reshape(want.shape), want, rtol=0, atol=bound)


def rows_of(cache: Cache, sequence: int, first: int, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values [layers, rows, heads, dim]."""
    slots = torch.tensor([cache._slot(sequence, index) for index in range(first, first + count)])
    block, offset = slots // cache.block_size, slots % cache.block_size
    return cache.k[:, block, :, offset].transpose(0, 1), cache.v[:, block, :, offset].transpose(0, 1)


def after_context(forward, bound) -> tuple[Drafter, dict[str, torch.Tensor]]:
    want = fixture_tensors(NAME)
    made = drafter(forward, bound)
    made.context([(0, place, aux) for place, aux in enumerate(want["ctx.aux"])])
    return made, want


def test_context_and_block(forward, bound) -> None:
    made, want = after_context(forward, bound)
    k, v = rows_of(made.cache, 0, 0, 13)
    close(k, want["a.context.k"], 1e-5)
    close(v, want["a.context.v"], 1e-5)
    out = made.block([13], [int(want["ctx.tokens"][13])], 8)
    close(out["last_hidden"], want["a.block.y"])
    close(out["logits"][0, 1:], want["a.logits"])
    close(out["logprob"][0, 1:], want["a.logprobs"])
    assert out["draft"][0, 1:].tolist() == want["a.argmax"].tolist()
    k, v = rows_of(made.cache, 0, 13, 8)
    close(k, want["a.block.k"])
    close(v, want["a.block.v"])
    close(rows_of(made.cache, 0, 0, 13)[0], want["a.context.k"], 1e-5)


def test_a_smaller_block(forward, bound) -> None:
    made, want = after_context(forward, bound)
    out = made.block([13], [int(want["ctx.tokens"][13])], int(want["b.block_size"]))
    assert out["draft"][0, 1:].tolist() == want["b.tokens"].tolist()
    close(out["logits"][0, 1:], want["b.logits"])
    close(out["last_hidden"], want["b.y"])


def test_three_sequences_of_unequal_context(forward, bound) -> None:
    want = fixture_tensors(NAME)
    made = drafter(forward, bound, sequences=3)
    made.context([(s, place, aux) for s in range(3) for place, aux in enumerate(want[f"c.{s}.aux"])])
    starts = [len(want[f"c.{s}.aux"]) for s in range(3)]
    out = made.block(starts, [int(want[f"c.{s}.tokens"][-1]) for s in range(3)], 8)
    for s, start in enumerate(starts):
        assert out["draft"][s, 1:].tolist() == want[f"c.{s}.draft_tokens"].tolist()
        close(out["logits"][s, 1:], want[f"c.{s}.draft_logits"])
        close(out["last_hidden"][s], want[f"c.{s}.y"])
        k, v = rows_of(made.cache, s, start - 1, 1)
        close(k[:, 0], want[f"c.{s}.k_last"], 1e-5)
        close(v[:, 0], want[f"c.{s}.v_last"], 1e-5)


def test_catching_up(forward, bound) -> None:
    """Two drafts accepted: three context rows overwrite the block's scratch, and the next block starts after them."""
    made, want = after_context(forward, bound)
    made.block([13], [int(want["ctx.tokens"][13])], 8)
    made.context([(0, 13 + i, aux) for i, aux in enumerate(want["d.aux"])])
    k, v = rows_of(made.cache, 0, 13, 3)
    close(k, want["d.k"], 1e-5)
    close(v, want["d.v"], 1e-5)
    out = made.block([16], [int(want["d.bonus"])], 8)
    assert out["draft"][0, 1:].tolist() == want["d.draft_tokens"].tolist()
    close(out["logits"][0, 1:], want["d.draft_logits"])
    close(out["last_hidden"], want["d.y"])


def test_scratch_that_stays_is_noticed(bound) -> None:
    made, want = after_context(Interpreted(bound.circuit), bound)
    made.block([13], [int(want["ctx.tokens"][13])], 8)
    logits = made.block([16], [int(want["d.bonus"])], 8)["logits"][0, 1:]
    assert (logits - want["d.draft_logits"]).abs().max() > 0.05


@pytest.mark.parametrize("wrong", ["causal", "k_norm", "order", "hidden_norm"])
def test_a_wrong_drafter_is_noticed(wrong: str, bound) -> None:
    made, want = after_context(Interpreted(bound.circuit), bound)
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


@pytest.mark.parametrize(("key", "missing"), [("block_size", "block_size"), ("dflash_config", "mask_token")])
def test_a_config_that_does_not_say_it_is_refused(key: str, missing: str, tmp_path) -> None:
    config = json.loads((FIXTURES / NAME / "config.json").read_text())
    if key == "dflash_config":
        del config[key]["mask_token_id"]
    else:
        del config[key]
    file = tmp_path / "config.json"
    file.write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=rf"{missing}: the key is missing\. Program 'dflash' needs it for {missing}"):
        bind("auto", model=file)
