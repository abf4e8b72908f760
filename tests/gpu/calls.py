"""Calls of a runner and of the reference on the same random situation, on the GPU."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

import pytest
import torch

from circuitgraph.circuit.ir import Circuit
from circuitgraph.interpreter import interpret
from circuitgraph.measure.cases import Case, Span, make_case
from circuitgraph.measure.routing import sure_rows
from circuitgraph.ops import PagedKV
from circuitgraph.runtime import CompiledRunner
from circuitgraph.runtime.runner import Blocks, ChainRows

ARTIFACTS: str | None = None
"""The folder of --artifacts, for tests that cannot take fixtures."""

CONTEXTS = (0, 1, 3, 4, 5, 15, 16, 17, 33, 130)
"""Cache rows before a call: around the sizes of blocks and tiles."""

ADDRESSING = ("slot", "seq", "length", "table", "start")


def artifact_folder(name: str) -> Path:
    """An artifact by name; skips where there is none, or no GPU."""
    folder = Path(ARTIFACTS or "", name)
    if not (ARTIFACTS and folder.is_dir() and torch.cuda.is_available()):
        pytest.skip("needs a GPU and --artifacts")
    return folder


def has_entry(runner: CompiledRunner, entry: str) -> bool:
    return any(function.entry == entry for function in runner.manifest.functions.values())


class Callee(Protocol):
    """What a situation is made for."""

    @property
    def circuit(self) -> Circuit: ...
    @property
    def device(self) -> torch.device: ...
    @property
    def max_position(self) -> int: ...


def situation(
    runner: Callee,
    entry: str,
    rows: int,
    seed: int,
    *,
    context: int | None = None,
    spans: Sequence[Span] | None = None,
) -> Case:
    """`rows` rows with blocks of another size for each seed; the last of several rows is idle, without `spans` given."""
    generator = torch.Generator().manual_seed(seed)
    live = rows - 1 if rows > 1 else 1
    if spans is not None:
        spans = list(spans)
    elif runner.circuit.entry(entry).rows != "sequences":
        first = live // 2
        spans = [Span(CONTEXTS[seed % 10], live - first, seed % 3), *([Span(5, first)] if first else [])]
    else:
        spans = [Span(CONTEXTS[(seed + i) % 10] if context is None else context, 1, (seed + i) % 3) for i in range(live)]
    block_size = (4, 16, 1, 64)[seed % 4]
    case = make_case(runner.circuit, rows, spans, block_size=block_size, generator=generator, max_position=runner.max_position)
    caches = {
        name: replace(cache, **{part: tensor.to(runner.device) for part, tensor in vars(cache).items()})
        for name, cache in case.caches.items()
    }
    return Case({name: tensor.to(runner.device) for name, tensor in case.inputs.items()}, caches, case.spans)


def varied(runner: CompiledRunner, case: Case, turn: int, *, roll: bool = True) -> Case:
    """The same sequences and caches with other tokens, hiddens and masks; `roll`: rows change places, so their addressing is
    other, too. Turn 0 is the case itself."""
    if turn == 0:
        return case
    generator = torch.Generator().manual_seed(1000 + turn)
    inputs = dict(case.inputs)
    for name in inputs.keys() & {"token", "hidden", "allowed"}:
        old = inputs[name]
        if name == "hidden":
            made = torch.randn(old.shape, generator=generator)
        elif name == "allowed":
            made = torch.randint(-(2**31), 2**31, old.shape, generator=generator)
            made[:, 0] |= 1
        else:
            made = torch.randint(0, runner.vocab_size, old.shape, generator=generator)
            made[case.live :] = 0
        inputs[name] = made.to(old.dtype).to(old.device)
    caches = case.caches
    if roll:
        order = torch.arange(case.rows, device=runner.device)
        order[: case.live] = order[: case.live].roll(turn)
        inputs["position"] = inputs["position"][order]
        caches = {
            name: replace(cache, slot=cache.slot[order], seq=cache.seq[order], length=cache.length[order])
            for name, cache in caches.items()
        }
    return Case(inputs, caches, case.spans)


class Kept:
    """Storage of one case's caches that stays where it is, so that a runner takes call after call for the same graph: as it
    comes, recorded, replayed. What the runner has recorded before is forgotten."""

    def __init__(self, runner: CompiledRunner, case: Case):
        torch.cuda.synchronize(runner.device)
        runner._graphs.clear()
        self.case = case
        self.storage = {name: (cache.k.clone(), cache.v.clone()) for name, cache in case.caches.items()}

    def caches(self, case: Case | None = None) -> dict[str, PagedKV]:
        """The case's content and addressing, once more in the same memory."""
        made = {}
        for name, cache in (case or self.case).caches.items():
            k, v = self.storage[name]
            k.copy_(cache.k)
            v.copy_(cache.v)
            made[name] = replace(cache, k=k, v=v)
        return made


def plain_rows(case: Case, before: list[int], slots: torch.Tensor, blocks: Sequence[Blocks]) -> ChainRows:
    """A case as proposers hand it over; `slots` int32[steps, n], -1 where a row has stopped. Every other row's slots are given
    one by one, also where they follow each other."""
    written = [[slot for slot in row if slot >= 0] for row in slots.T.tolist()]
    beside = [all(slot == row[0] + step for step, slot in enumerate(row)) for row in written]
    apart = {i: row for i, row in enumerate(written) if i % 2 or not beside[i]}
    counts, starts = [len(row) for row in written], [row[0] if row else 0 for row in written]
    return ChainRows(case.inputs["token"].tolist(), case.inputs["position"].tolist(), before, counts, starts, apart, blocks)


def recorded(runner: CompiledRunner) -> bool:
    """Whether all that the runner has run since `Kept` was made was replayed in the end."""
    return bool(runner._graphs) and all(chain.newest is not None for chain in runner._graphs.values())


def reference(runner: CompiledRunner, case: Case, entry: str) -> tuple[dict[str, torch.Tensor], dict]:
    """(outputs, caches) of the interpreter in the circuit's own dtypes; drafting entries with all logits."""
    caches = case.copy_caches()
    prefix = "masked_" if entry == "draft_masked" else ""
    outputs = () if entry == "context" else (f"{prefix}draft", f"{prefix}logprob", "next_hidden", "logits")
    with torch.no_grad():
        made = interpret(
            runner.circuit,
            inputs=case.inputs,
            weights=runner.weights,
            states=caches,
            **({"entry": entry} if entry == "context" else {"outputs": outputs}),
        )
    return {name.removeprefix(prefix): value for name, value in made.items()}, caches


def run(runner: CompiledRunner, case: Case, entry: str, kept: Kept | None = None) -> tuple[dict[str, torch.Tensor], dict]:
    """The same of the runner; caches are new memory, or `kept`'s."""
    caches = case.copy_caches() if kept is None else kept.caches(case)
    return call(runner, entry, case.inputs, caches), caches


def call(runner: CompiledRunner, entry: str, inputs: Mapping[str, torch.Tensor], caches, slots=None) -> dict[str, torch.Tensor]:
    """One call by name; "chain" takes slots."""
    arguments = (inputs["token"], inputs["hidden"], inputs["position"], caches)
    if entry == "context":
        runner.context(*arguments)
        return {}
    if entry == "logits":
        logits, hidden = runner.logits(*arguments)
        return {"logits": logits, "next_hidden": hidden}
    if entry == "draft_masked":
        return runner.draft_masked(*arguments, inputs["allowed"])._asdict()
    if entry == "chain":
        return runner.chain(len(slots), *arguments, slots)._asdict()
    return runner.draft(*arguments)._asdict()


def on_host(cache: PagedKV) -> PagedKV:
    """The same storage, addressed by integers in host memory."""
    return replace(cache, **{part: getattr(cache, part).cpu() for part in ADDRESSING})


def host_arguments(inputs: Mapping[str, torch.Tensor], caches: Mapping[str, PagedKV]) -> tuple:
    """(token, hidden, position, caches) with all integers in host memory."""
    host = {name: on_host(cache) for name, cache in caches.items()}
    return inputs["token"].cpu(), inputs["hidden"], inputs["position"].cpu(), host


def chain_slots(case: Case, steps: int) -> torch.Tensor:
    """Where the rows of a chain are written, as far as their own blocks reach; the first row stops after one step."""
    cache = case.caches["kv"]
    table, seq, length = cache.table.tolist(), cache.seq.tolist(), cache.length.tolist()
    slots = torch.full((steps, case.rows), -1, dtype=torch.int32)
    for row in range(case.live):
        first = length[row] - 1
        blocks = -(-(first + 1) // cache.block_size)
        for step in range(min(steps, blocks * cache.block_size - first) if row else 1):
            block, offset = divmod(first + step, cache.block_size)
            slots[step, row] = table[seq[row]][block] * cache.block_size + offset
    return slots.to(cache.slot.device)


@dataclass
class Table:
    """As a lease of a pool."""

    blocks: list[int]
    version: int
    since: int = 0
    steady: int = 0

    def copied(self) -> None:
        self.since, self.steady = self.version, len(self.blocks)


def error(got: torch.Tensor, want: torch.Tensor) -> float:
    """norm(got - want) / norm(want)."""
    return ((got.double() - want.double()).norm() / want.double().norm().clamp(min=1e-30)).item()


def tolerance(runner: CompiledRunner) -> float:
    """Relative; activations are rounded between groups in both, but not at the same places within one."""
    return {"f32": 2e-5, "f16": 4e-3, "bf16": 2.5e-2}[runner.circuit.act]


def check(runner: CompiledRunner, case: Case, entry: str, got: tuple[dict, dict], want: tuple[dict, dict]) -> None:
    """(outputs, caches) of the runner are those of the reference."""
    limit, live = tolerance(runner), comparable(runner, case)
    check_caches(case, got[1], want[1], limit)
    if entry == "context" or not len(live):
        return
    made, meant = got[0], want[0]
    assert error(made["next_hidden"][live], meant["next_hidden"][live]) < limit
    if entry == "logits":
        assert error(made["logits"][live], meant["logits"][live]) < limit
    if entry in ("draft", "draft_masked"):
        logits = meant["logits"][live].float()
        spread = logits.std(dim=-1)
        tokens = scored_tokens(runner, logits.shape[1])
        if entry == "draft_masked":
            logits = logits.masked_fill(~allowed_tokens(case.inputs["allowed"][live], tokens), float("-inf"))
        drafts = made["draft"][live].long()
        columns = torch.searchsorted(tokens, drafts).clamp(max=len(tokens) - 1)
        assert torch.equal(tokens[columns], drafts), "a token that is not scored"
        chosen = logits.gather(1, columns[:, None])[:, 0]
        assert (logits.amax(-1) - chosen <= 8 * limit * spread).all(), "a token that is not among the best"
        assert (made["logprob"][live] - (chosen - logits.logsumexp(-1))).abs().max() <= 8 * limit * spread.max()


def comparable(runner: CompiledRunner, case: Case) -> torch.Tensor:
    """The rows that have work and whose experts, if there are any, do not depend on rounding."""
    rows = torch.arange(case.live, device=runner.device)
    if not any(node.op == "route" for node in runner.circuit.nodes):
        return rows
    return rows[sure_rows(runner.circuit, case.inputs, runner.weights, case.copy_caches())[: case.live]]


def scored_tokens(runner: CompiledRunner, columns: int) -> torch.Tensor:
    """The target's id of each column of the logits, int64[columns], rising."""
    own = torch.arange(columns, device=runner.device)
    return own if runner._offsets is None else own + runner._offsets.long()


def allowed_tokens(mask: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """bool[rows, tokens] of a bitmask int32[rows, words]."""
    return ((mask[:, tokens // 32] >> (tokens % 32).to(torch.int32)) & 1) == 1


def check_caches(case: Case, got, want, limit: float) -> None:
    """Written rows agree; everything else, poison included, is bit for bit what it was."""
    for name, before in case.caches.items():
        slot = before.slot[before.slot >= 0].long()
        block, offset = slot // before.block_size, slot % before.block_size
        for part in ("k", "v"):
            ours, reference_, old = (getattr(caches[name], part) for caches in (got, want, case.caches))
            assert error(ours[:, block, :, offset], reference_[:, block, :, offset]) < limit
            written = torch.zeros(old.shape[1], old.shape[3], dtype=torch.bool, device=old.device)
            written[block, offset] = True
            written = written[None, :, None, :, None]
            assert same(ours.masked_fill(written, 0.0), old.masked_fill(written, 0.0))


def same(ours: torch.Tensor, theirs: torch.Tensor) -> bool:
    """Bit for bit, but for what kind of NaN."""
    return torch.equal(torch.nan_to_num(ours, 7.0), torch.nan_to_num(theirs, 7.0))


def same_caches(ours: Mapping[str, PagedKV], theirs: Mapping[str, PagedKV]) -> bool:
    return all(same(getattr(ours[name], part), getattr(theirs[name], part)) for name in ours for part in ("k", "v"))


def same_results(got, want, case: Case, slots: torch.Tensor | None = None) -> bool:
    """Outputs of the rows that have work, bit for bit. The hidden of a row that stopped in a chain means nothing."""
    live = torch.arange(case.rows, device=case.inputs["token"].device) < case.live
    going = live if slots is None else live & (slots[-1] >= 0)
    rows = {name: going if name == "next_hidden" else live for name in want}
    return all(same(got[name][rows[name]], tensor[rows[name]]) for name, tensor in want.items())


def each_mask(runner: CompiledRunner, case: Case) -> list[Callable[[Case], dict[str, torch.Tensor]]]:
    """What chains are called with beside their rows: nothing, and a grammar's mask where there are programs for it."""
    masks: list[Callable[[Case], dict[str, torch.Tensor]]] = [lambda turn: {}]
    if has_entry(runner, "draft_masked"):
        masks.append(lambda turn: {"allowed": turn.inputs["allowed"]})
    return masks
