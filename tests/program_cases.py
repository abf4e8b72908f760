"""Golden cases of programs that are not MTP heads: DFlash, EAGLE-3 and Medusa-1, on anything that runs an entry by name."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors.torch import load_file, save_file

from circuitgraph.circuit.ir import State
from circuitgraph.ops import PagedKV
from tests.fixture_cases import FIXTURES, Cache, Row, fixture_tensors

Tensors = dict[str, torch.Tensor]


class Entries(Protocol):
    """What a case needs of an implementation. Caches are written in place."""

    def run(self, entry: str, inputs: Mapping[str, torch.Tensor], weights: Tensors, states: Mapping[str, PagedKV]) -> Tensors: ...


def close(got: torch.Tensor, want: torch.Tensor, bound: float = 1e-4) -> None:
    torch.testing.assert_close(got.float().reshape(want.shape), want, rtol=0, atol=bound)


# -- DFlash ------------------------------------------------------------------------------------------------------

DFLASH = "dflash_qwen3"
MASK = 508


@dataclass
class Drafter:
    """Calls a forward on one cache of some sequences."""

    forward: Entries
    weights: Tensors
    cache: Cache
    entries: tuple[str, ...] = ("logits", "draft")

    def context(self, rows: list[tuple[int, int, torch.Tensor]]) -> None:
        """(sequence, position, hiddens) of each row."""
        call = self.cache.rows([Row(sequence, place, 0, aux) for sequence, place, aux in rows])
        position = torch.tensor([place for _, place, _ in rows], dtype=torch.int32)
        self.forward.run("context", {"aux": call.hidden, "position": position}, self.weights, {"kv": call.kv})

    def block(self, starts: list[int], newest: list[int], size: int, end: int | None = None) -> Tensors:
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
        made: Tensors = {}
        for entry in self.entries:
            made |= self.forward.run(entry, inputs, self.weights, states)
        return {name: value.unflatten(0, (len(starts), size)) for name, value in made.items()}


def rows_of(cache: Cache, sequence: int, first: int, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values [layers, rows, heads, dim]."""
    slots = torch.tensor([cache._slot(sequence, index) for index in range(first, first + count)])
    block, offset = slots // cache.block_size, slots % cache.block_size
    return cache.k[:, block, :, offset].transpose(0, 1), cache.v[:, block, :, offset].transpose(0, 1)


def drafter(forward: Entries, weights: Tensors, state: State, sequences: int = 1) -> Drafter:
    return Drafter(forward, weights, Cache(state, sequences=sequences, capacity=32))


def after_context(forward: Entries, weights: Tensors, state: State) -> tuple[Drafter, Tensors]:
    want = fixture_tensors(DFLASH)
    made = drafter(forward, weights, state)
    made.context([(0, place, aux) for place, aux in enumerate(want["ctx.aux"])])
    return made, want


def check_context_and_block(forward: Entries, weights: Tensors, state: State) -> None:
    made, want = after_context(forward, weights, state)
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


def check_a_smaller_block(forward: Entries, weights: Tensors, state: State) -> None:
    made, want = after_context(forward, weights, state)
    out = made.block([13], [int(want["ctx.tokens"][13])], int(want["b.block_size"]))
    assert out["draft"][0, 1:].tolist() == want["b.tokens"].tolist()
    close(out["logits"][0, 1:], want["b.logits"])
    close(out["last_hidden"], want["b.y"])


def check_three_sequences(forward: Entries, weights: Tensors, state: State) -> None:
    """Of unequal context."""
    want = fixture_tensors(DFLASH)
    made = drafter(forward, weights, state, sequences=3)
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


def check_catching_up(forward: Entries, weights: Tensors, state: State) -> None:
    """Two drafts accepted: three context rows overwrite the block's scratch, and the next block starts after them."""
    made, want = after_context(forward, weights, state)
    made.block([13], [int(want["ctx.tokens"][13])], 8)
    made.context([(0, 13 + i, aux) for i, aux in enumerate(want["d.aux"])])
    k, v = rows_of(made.cache, 0, 13, 3)
    close(k, want["d.k"], 1e-5)
    close(v, want["d.v"], 1e-5)
    out = made.block([16], [int(want["d.bonus"])], 8)
    assert out["draft"][0, 1:].tolist() == want["d.draft_tokens"].tolist()
    close(out["logits"][0, 1:], want["d.draft_logits"])
    close(out["last_hidden"], want["d.y"])


SLIDING, FULL = "sliding_attention", "full_attention"
DFLASH_VARIANTS: dict[str, dict[str, Any]] = {
    "mixed": {"layer_types": [SLIDING, FULL, SLIDING], "sliding_window": 9, "use_sliding_window": True},
    "short": {"layer_types": [SLIDING, SLIDING, FULL], "sliding_window": 8, "use_sliding_window": True},
    "blocks": {"layer_types": [SLIDING] * 3, "sliding_window": 10, "use_sliding_window": True, "is_causal": False},
    "causal": {"is_causal": True},
    "biases": {"attention_bias": True},
}
"""What the fixture's config says instead, for the values in attention.safetensors."""
DFLASH_VARIANT_PROGRAMS = {"logits": (24,), "context": (3, 35)}


def dflash_variant(name: str, folder: Path) -> Path:
    """A folder with the fixture's drafter as one of `DFLASH_VARIANTS`."""
    folder.mkdir(exist_ok=True)
    config = json.loads((FIXTURES / DFLASH / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | DFLASH_VARIANTS[name]))
    weights = load_file(FIXTURES / DFLASH / "model.safetensors")
    biases = load_file(FIXTURES / DFLASH / "attention.safetensors") if name == "biases" else {}
    weights |= {key.removeprefix("biases."): value for key, value in biases.items() if key.startswith("biases.layers.")}
    save_file(weights, folder / "model.safetensors")
    return folder


def check_attention(forward: Entries, weights: Tensors, state: State, name: str) -> None:
    """Three sequences of different contexts in one call; then one of them catches up, and all draft again."""
    tensors, want = fixture_tensors(DFLASH), load_file(FIXTURES / DFLASH / "attention.safetensors")
    made = replace(drafter(forward, weights, state, sequences=3), entries=("logits",))
    aux = [tensors["c.0.aux"], tensors["ctx.aux"], tensors["c.2.aux"]]
    tokens = [tensors[name] for name in ("c.0.tokens", "ctx.tokens", "c.2.tokens")]
    newest = [int(of[len(rows)]) for of, rows in zip(tokens, aux, strict=True)]
    made.context([(s, place, row) for s, rows in enumerate(aux) for place, row in enumerate(rows)])
    for cases, starts in ((("c.0", "a", "c.2"), [5, 13, 17]), (("c.0", "d", "c.2"), [5, 16, 17])):
        out = made.block(starts, newest, 8)
        for s, case in enumerate(cases):
            close(out["last_hidden"][s], want[f"{name}.{case}.y"])
            close(out["logits"][s, 1:], want[f"{name}.{case}.logits"])
        made.context([(1, 13 + i, row) for i, row in enumerate(tensors["d.aux"])])
        newest[1] = int(tensors["d.bonus"])


DFLASH_PROGRAMS = {"draft": (5, 8, 24), "logits": (5, 8, 24), "context": (3, 13, 35)}
"""Entries and rows that the cases call."""

# -- EAGLE-3 -----------------------------------------------------------------------------------------------------

EAGLE3 = "eagle3_llama"
EAGLE3_PROGRAMS = {"first": (1,), "draft": (1,), "context": (13,)}


def eagle3_drafts(
    forward: Entries, weights: Tensors, state: State, head: str = EAGLE3, steps: int = 4
) -> tuple[list[int], torch.Tensor]:
    """Case b: a greedy chain after 13 rows; its tokens are fed back as they leave. (tokens, log-probabilities)."""
    made = eagle3_chain(forward, weights, state, head, steps)
    return [int(step["draft"]) for step in made], torch.cat([step["logprob"] for step in made])


def eagle3_chain(
    forward: Entries, weights: Tensors, state: State, head: str = EAGLE3, steps: int = 4, *, logits: bool = False
) -> list[Tensors]:
    """The outputs of each step of case b; those of the entries that give logits, too, where they are asked for."""
    tensors = fixture_tensors(head)
    cache = Cache(state)
    aux, tokens = tensors["ctx.aux"], tensors["ctx.tokens"]
    context = cache.rows([Row(0, i, int(tokens[i + 1]), aux[i]) for i in range(13)])
    given = {"token": context.token, "aux": context.hidden, "position": context.position}
    forward.run("context", given, weights, {"kv": context.kv})
    row, entries, name = Row(0, 13, int(tokens[14]), aux[13]), ("first", "first_logits"), "aux"
    made: list[Tensors] = []
    for _ in range(steps):
        rows = cache.rows([row])
        inputs = {"token": rows.token, name: rows.hidden, "position": rows.position}
        out = {}
        for entry in entries if logits else entries[:1]:
            out |= forward.run(entry, inputs, weights, {"kv": rows.kv})
        made.append(out)
        row = Row(0, row.index + 1, int(out["draft"]), out["next_hidden"][0].float())
        entries, name = ("draft", "logits"), "hidden"
    return made


def check_eagle3(forward: Entries, weights: Tensors, state: State, head: str = EAGLE3) -> None:
    """Drafts are ids of the target."""
    tokens, logprobs = eagle3_drafts(forward, weights, state, head)
    want = fixture_tensors(head)
    assert tokens == want["b.tokens"].tolist()
    assert tokens != want["b.draft_ids"].tolist()
    torch.testing.assert_close(logprobs, want["b.logprobs"], rtol=0, atol=1e-4)


# -- Medusa-1 ----------------------------------------------------------------------------------------------------

MEDUSA = "medusa1"
MEDUSA_CASES = ("a", "b", "c", "d")
MEDUSA_PROGRAMS = {"draft": (1, 3), "logits": (1, 3)}


def medusa_hiddens(case: str, want: Tensors) -> torch.Tensor:
    """The target's hiddens of a case, a row each."""
    if case == "c":
        return torch.stack([want[f"c.{i}.hidden"] for i in range(3)])
    return want["d.hiddens" if case == "d" else "ctx.hiddens"][-1:]


def medusa_expected(case: str, want: Tensors) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits [rows, heads, V] and drafts [rows, heads]; case c has those of the first 3 heads."""
    if case == "c":
        return tuple(torch.stack([want[f"c.{i}.draft_{what}"] for i in range(3)]) for what in ("logits", "tokens"))  # type: ignore[return-value]
    names = {"a": ("a.logits", "a.argmax"), "b": ("b.logits", "b.tokens"), "d": ("d.draft_logits", "d.draft_tokens")}[case]
    return want[names[0]][None], want[names[1]][None]


def check_medusa(case: str, heads: Callable[[str, torch.Tensor], Tensors]) -> None:
    """heads(entry, hidden): an entry's outputs."""
    want = fixture_tensors(MEDUSA)
    hidden = medusa_hiddens(case, want)
    logits, tokens = medusa_expected(case, want)
    some = logits.shape[1]
    drafted = heads("draft", hidden)
    assert drafted["draft"].shape == (len(hidden), 4)
    assert drafted["draft"][:, :some].tolist() == tokens.tolist()
    torch.testing.assert_close(heads("logits", hidden)["logits"][:, :some], logits, rtol=0, atol=1e-4)
    torch.testing.assert_close(drafted["logprob"][:, :some], logits.log_softmax(-1).amax(-1), rtol=0, atol=1e-4)
    if case == "a":
        torch.testing.assert_close(drafted["logprob"][0], want["a.logprob"], rtol=0, atol=1e-4)
