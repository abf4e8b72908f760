"""Random drafters, a dense oracle, a proposer that audits itself, and an artifact whose functions are interpreted."""

from __future__ import annotations

import functools
import platform
from collections.abc import Sequence
from typing import Any

import torch

from circuitgraph.artifact import Arg, Function, Manifest, Model, Target, WeightSpec
from circuitgraph.circuit.ir import Circuit
from circuitgraph.circuit.narrow import slice_entry
from circuitgraph.interpreter import interpret
from circuitgraph.ops import DTYPE_NAMES, PagedKV
from circuitgraph.runtime import BlockPool, DraftRunner, ProposerState, ReferenceRunner
from tests.runtime.audited import Audited

POSITIONS = 96
"""Rows of the tests' RoPE tables."""


@functools.cache
def drafter(seed: int = 0, **switches: Any) -> ReferenceRunner:
    """A random head; the same seed and switches give the same one (do not write to it)."""
    from tests.circuits import random_weights, small_mtp  # the language's packages are not on every GPU machine

    circuit = small_mtp(switches, act="f32", wt="f32", kv="f32")
    return ReferenceRunner(circuit, random_weights(circuit, torch.Generator().manual_seed(seed), POSITIONS))


class Witness(Audited):
    """Remembers every (position, token, hidden) that a server handed over: a wrong one only costs acceptance, silently."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.pairs: dict[ProposerState, list[tuple[int, int, torch.Tensor]]] = {}

    def _saw(self, state, first, tokens, hiddens):
        triples = zip(range(first, first + len(tokens)), tokens, hiddens, strict=False)
        self.pairs.setdefault(state, []).extend((p, t, h.clone()) for p, t, h in triples)

    def prefill_drafter(self, prompt_tokens, hiddens, state, *, first_pos=0):
        self._saw(state, first_pos + 1, prompt_tokens[1:], hiddens)
        return super().prefill_drafter(prompt_tokens, hiddens, state, first_pos=first_pos)

    def propose(self, last_token, target_hidden, position, num_drafts, state, **options):
        self._saw(state, position, [last_token], [target_hidden])
        return super().propose(last_token, target_hidden, position, num_drafts, state, **options)

    def propose_batch(self, last_tokens, target_hiddens, positions, num_drafts, states, **options):
        for row, state in enumerate(states):
            self._saw(state, positions[row], [last_tokens[row]], [target_hiddens[row]])
        return super().propose_batch(last_tokens, target_hiddens, positions, num_drafts, states, **options)

    def catchup_batch(self, tokens, hiddens, first_pos, states):
        for row, state in enumerate(states):
            self._saw(state, first_pos[row], tokens[row], hiddens[row])
        return super().catchup_batch(tokens, hiddens, first_pos, states)

    def check(self, state, ids: Sequence[int], hiddens: torch.Tensor, start: int = 1) -> None:
        """ids: the final text; hiddens: the target's of every position. Every pair from `start` on came, once and right."""
        pairs = self.pairs[state]
        assert [position for position, _, _ in pairs] == list(range(start, start + len(pairs)))
        for position, token, hidden in pairs:
            assert token == ids[position], position
            # Forwards of different row counts round differently.
            torch.testing.assert_close(hidden, hiddens[position - 1], rtol=1e-4, atol=1e-4)


class Rehearsed(Witness):
    """Drafts the target's own text, known beforehand, but for every `miss`-th draft: all accepted lengths occur."""

    texts: Sequence[Sequence[int]] = ()
    miss = 3

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.drafted = 0

    def _recite(self, position, state, drafts):
        known = [(p, t) for p, t, _ in self.pairs[state]]
        text = next(text for text in self.texts if all(text[p] == t for p, t in known if p < len(text)))
        for index in range(len(drafts)):
            self.drafted += 1
            if position + 1 + index < len(text) and self.drafted % self.miss:
                drafts[index] = text[position + 1 + index]
        state.last_drafts = list(drafts)
        return drafts

    def propose(self, last_token, target_hidden, position, num_drafts, state, **options):
        return self._recite(position, state, super().propose(last_token, target_hidden, position, num_drafts, state, **options))

    def propose_batch(self, last_tokens, target_hiddens, positions, num_drafts, states, **options):
        drafts = super().propose_batch(last_tokens, target_hiddens, positions, num_drafts, states, **options)
        return [self._recite(*row) for row in zip(positions, states, drafts, strict=True)]


def proposer_of(
    runner: DraftRunner | None = None, *, blocks: int = 64, block_size: int = 8, kind: type = Audited, trim: str = "exact"
) -> Any:
    runner = runner or drafter()
    return kind(runner, BlockPool(runner.circuit, blocks=blocks, block_size=block_size, device=runner.device), trim=trim)


class Script:
    """A made-up target: tokens t_0.. and a hidden after each."""

    def __init__(self, seed: int, length: int = POSITIONS, hidden: int = 48, vocab: int = 131):
        generator = torch.Generator().manual_seed(seed)
        self.tokens: list[int] = torch.randint(0, vocab, (length,), generator=generator).tolist()
        self.hiddens = torch.randn(length, hidden, generator=generator)


def oracle(runner: ReferenceRunner, script: Script, position: int, steps: int, tokens: Sequence[int] | None = None) -> list[int]:
    """Drafts after the token at `position`, from one dense cache that holds every pair before it. No pool, no runner."""
    circuit, weights = runner.circuit, runner.weights
    tokens = list(tokens if tokens is not None else script.tokens)
    state = circuit.states[0]
    rows = position + steps
    storage = [torch.zeros(state.layers, 1, state.heads, rows, state.dim) for _ in "kv"]

    def run(entry, token, hidden, first_row):
        count = len(token)
        row = torch.arange(first_row, first_row + count, dtype=torch.int32)
        one = torch.zeros(1, dtype=torch.int32)
        cache = PagedKV(*storage, slot=row, seq=one.repeat(count), table=one[None], start=one, length=row + 1)
        inputs = {"token": torch.tensor(token, dtype=torch.int32), "hidden": hidden, "position": row + 1}
        with torch.no_grad():
            return interpret(circuit, inputs=inputs, weights=weights, states={state.name: cache}, entry=entry)

    if position > 1:
        run("context", tokens[1:position], script.hiddens[: position - 1], 0)
    token, hidden, drafts = tokens[position], script.hiddens[position - 1][None], []
    for step in range(steps):
        out = run("draft", [token], hidden, position - 1 + step)
        token, hidden = int(out["draft"]), out["next_hidden"]
        drafts.append(token)
    return drafts


# -- an artifact without a compiler ----------------------------------------------------------------------------


def manifest_of(
    circuit: Circuit,
    *,
    draft: Sequence[int] = (1, 2, 4),
    context: Sequence[int] = (4, 8),
    logits: Sequence[int] = (1,),
    masked: Sequence[int] = (),
) -> Manifest:
    """What a compiler would write for `circuit`."""
    functions = {}
    for entry, widths in (("draft", draft), ("context", context), ("logits", logits), ("draft_masked", masked)):
        for rows in widths:
            symbol = f"{entry}_{rows}"
            functions[symbol] = Function(entry, rows, symbol, _args(circuit, entry, rows), 256 * rows, 1000, 2000)
    return Manifest(
        program=circuit.name,
        family="test",
        circuit=circuit,
        target=Target("cpu", platform.machine(), "generic"),
        model=Model("test", "0" * 64, 48, 131),
        functions=functions,
        weights={
            w.name: WeightSpec(w.type.dtype, tuple(int(d) for d in w.type.shape), f"model.{w.name}", "drafter")
            for w in circuit.weights
        },
        rope={table.name: {"kind": "default", "theta": 10000.0, "dim": table.dim, "max_position": None, "scaling": {}}
              for table in circuit.tables},
        max_position=POSITIONS,
        library="lib/kernels.so",
        options={"widths": list(draft)},
        tools={"tvm": "test"},
        files={"lib/kernels.so": "0" * 64},
    )  # fmt: skip


def _args(circuit: Circuit, entry: str, rows: int) -> tuple[Arg, ...]:
    def arg(role, value):
        return Arg(value.name, role, value.type.dtype, value.type.with_rows(rows).shape)

    args = [arg("input", item) for item in slice_entry(circuit, entry).inputs]
    for state in circuit.states:
        args += [arg("state", value) for value in state.storage()]
        args += [arg("state", value) for value in state.metadata()]
    args += [arg("table", value) for table in circuit.tables for value in table.tensors()]
    args += [arg("weight", weight) for weight in circuit.weights]
    args.append(Arg("workspace", "workspace", "u8", (256 * rows,)))
    for public in circuit.entry(entry).outputs:
        value_type = circuit.types[dict(circuit.outputs)[public]].with_rows(rows)
        args.append(Arg(public, "output", value_type.dtype, value_type.shape))
    return tuple(args)


class InterpretedLibrary:
    """Stands in for a compiled library: same calls, same in-place outputs, and it remembers what it was given."""

    def __init__(self, manifest: Manifest):
        self.manifest = manifest
        self.calls: list[tuple[str, dict[str, torch.Tensor]]] = []
        self.functions = {f.symbol: functools.partial(self._call, f) for f in manifest.functions.values()}

    def _call(self, function: Function, *args: Any) -> None:
        given = {arg.name: torch.from_dlpack(value) for arg, value in zip(function.args, args, strict=True)}
        for arg in function.args:
            tensor = given[arg.name]
            assert DTYPE_NAMES.get(tensor.dtype, "u8") == arg.dtype
            assert all(isinstance(want, str) or want == have for want, have in zip(arg.shape, tensor.shape, strict=True)), arg
        by_role = {role: [arg.name for arg in function.args if arg.role == role] for role in ("input", "output")}
        addressing = [value.name for state in self.manifest.circuit.states for value in state.metadata()]
        self.calls.append((function.symbol, {n: given[n].clone() for n in (*by_role["input"], *addressing)}))
        states = {}
        for state in self.manifest.circuit.states:
            parts = {value.name.rpartition(".")[2]: given[value.name] for value in (*state.storage(), *state.metadata())}
            states[state.name] = PagedKV(**parts)
        inputs = {name: given[name].clone() for name in by_role["input"]}
        with torch.no_grad():
            out = interpret(self.manifest.circuit, inputs=inputs, weights=given, states=states, entry=function.entry)
        for name in by_role["output"]:
            given[name].copy_(out[name])
