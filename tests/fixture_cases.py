"""The fixtures' cases as calls of a step function: the reference interpreter and compiled programs run the same ones.

A case is turned into rows (token, hidden, position) and the addressing of a paged cache with shuffled blocks. Row i of
a sequence pairs hidden h_i with token t_(i+1): its position is i + 1, its place in the cache is i.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
from safetensors.torch import load_file

from circuitgraph.circuit.ir import Circuit, State
from circuitgraph.interpreter import interpret
from circuitgraph.ops import PagedKV

FIXTURES = Path(__file__).parent / "fixtures"
DTYPES = {"f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16}


@dataclass(frozen=True)
class Rows:
    """One call: token i32[n], hidden f32[n, H], position i32[n], and the cache with the rows' addressing."""

    token: torch.Tensor
    hidden: torch.Tensor
    position: torch.Tensor
    kv: PagedKV


class Forward(Protocol):
    """What a case needs of an implementation. The cache of `rows` is written in place."""

    def draft(self, rows: Rows) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """One row a sequence: token i32[n], logprob f32[n], next_hidden [n, H]."""
        ...

    def logits(self, rows: Rows) -> tuple[torch.Tensor, torch.Tensor]:
        """One row a sequence: logits [n, V], next_hidden [n, H]."""
        ...

    def context(self, rows: Rows) -> None:
        """Any number of rows of each sequence."""
        ...


@dataclass(frozen=True)
class Interpreted:
    """The reference interpreter as a `Forward`."""

    circuit: Circuit
    weights: dict[str, torch.Tensor]

    def _run(self, entry: str, rows: Rows) -> dict[str, torch.Tensor]:
        inputs = {"token": rows.token, "hidden": rows.hidden, "position": rows.position}
        return interpret(self.circuit, inputs=inputs, weights=self.weights, states={"kv": rows.kv}, entry=entry)

    def draft(self, rows):
        out = self._run("draft", rows)
        return out["draft"], out["logprob"], out["next_hidden"]

    def logits(self, rows):
        out = self._run("logits", rows)
        return out["logits"], out["next_hidden"]

    def context(self, rows):
        self._run("context", rows)


@dataclass(frozen=True)
class Row:
    """Row `index` of sequence `sequence`."""

    sequence: int
    index: int
    token: int
    hidden: torch.Tensor


class Cache:
    """A pool of blocks in random order, as full of NaN as a real one is of other sequences' rows."""

    def __init__(self, state: State, sequences: int = 1, capacity: int = 24, block_size: int = 4, seed: int = 7):
        width = -(-capacity // block_size)
        order = list(range(sequences * width + 3))
        random.Random(seed).shuffle(order)
        self.table = torch.tensor(order[: sequences * width], dtype=torch.int32).reshape(sequences, width)
        self.block_size = block_size
        shape = (state.layers, len(order), state.heads, block_size)
        self.k, self.v = (torch.full((*shape, dim), float("nan"), dtype=DTYPES[state.dtype]) for dim in state.dims)

    def rows(self, rows: Sequence[Row]) -> Rows:
        """The tensors of one call."""

        def ints(values) -> torch.Tensor:
            return torch.tensor(list(values), dtype=torch.int32)

        addressing = PagedKV(
            k=self.k,
            v=self.v,
            slot=ints(self._slot(row.sequence, row.index) for row in rows),
            seq=ints(row.sequence for row in rows),
            table=self.table,
            start=torch.zeros(len(self.table), dtype=torch.int32),
            length=ints(row.index + 1 for row in rows),
        )
        hidden = torch.stack([row.hidden for row in rows])
        return Rows(ints(row.token for row in rows), hidden, ints(row.index + 1 for row in rows), addressing)

    def read(self, sequence: int, first: int, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of `count` rows, [count, heads, dim] each, of layer 0."""
        slots = torch.tensor([self._slot(sequence, index) for index in range(first, first + count)])
        block, offset = slots // self.block_size, slots % self.block_size
        return self.k[0, block, :, offset].float(), self.v[0, block, :, offset].float()

    def _slot(self, sequence: int, index: int) -> int:
        return int(self.table[sequence, index // self.block_size]) * self.block_size + index % self.block_size


@dataclass(frozen=True)
class Bounds:
    """Largest absolute differences allowed. The defaults are for fp32 activations and caches."""

    value: float = 1e-4
    kv: float = 1e-5


@dataclass(frozen=True)
class Cases:
    """The cases of one fixture, or of one variant of it (`prefix`), against one implementation.

    keys: which of the stored keys the program's RoPE position gives, `tpos` or `hpos`.
    """

    tensors: dict[str, torch.Tensor]
    state: State
    forward: Forward
    prefix: str = ""
    keys: str = "tpos"
    bounds: Bounds = Bounds()

    def want(self, name: str) -> torch.Tensor:
        return self.tensors[self.prefix + name]

    def close(self, got: torch.Tensor, name: str, kind: str = "value") -> None:
        want = self.want(name).float()
        difference = (got.float().reshape(want.shape) - want).abs().max().item()
        limit = getattr(self.bounds, kind)
        assert difference <= limit, f"{self.prefix}{name} differs by {difference:.2e}, allowed {limit:.0e}"

    def close_kv(self, cache: Cache, sequence: int, first: int, name: str) -> None:
        """Keys and values from row `first` on against `name`k_... and `name`v, as far as the fixture has the keys."""
        v = self.want(f"{name}v")
        count = v.shape[0] if v.dim() == 3 else 1
        keys, values = cache.read(sequence, first, count)
        self.close(values, f"{name}v", "kv")
        if f"{self.prefix}{name}k_{self.keys}" in self.tensors:
            self.close(keys, f"{name}k_{self.keys}", "kv")

    def context_rows(self, count: int, hiddens: str = "ctx.hiddens") -> list[Row]:
        """Rows 0..count-1 of the context."""
        tokens, hidden = self.tensors["ctx.tokens"], self.tensors[hiddens]
        return [Row(0, index, int(tokens[index + 1]), hidden[index]) for index in range(count)]

    def step(self, cache: Cache, rows: Sequence[Row]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """The same rows through `logits` and `draft`, which must agree: token, logprob, logits, next_hidden."""
        logits, hidden = self.forward.logits(cache.rows(rows))
        token, logprob, next_hidden = self.forward.draft(cache.rows(rows))
        assert torch.equal(token.long(), logits.argmax(-1)), "draft and logits choose different tokens"
        assert (hidden.float() - next_hidden.float()).abs().max() <= self.bounds.value
        return token, logprob, logits, next_hidden

    def chain(self, cache: Cache, rows: Sequence[Row], steps: int) -> list[list[torch.Tensor]]:
        """A greedy chain from `rows` (one a sequence): per step token, logprob, logits, next_hidden."""
        made = []
        for _ in range(steps):
            made.append(list(self.step(cache, rows)))
            token, _, _, hidden = made[-1]
            rows = [Row(row.sequence, row.index + 1, int(token[i]), hidden[i].float()) for i, row in enumerate(rows)]
        return made

    def prefilled(self, rows: int = 13, hiddens: str = "ctx.hiddens") -> Cache:
        cache = Cache(self.state)
        self.forward.context(cache.rows(self.context_rows(rows, hiddens)))
        return cache

    # -- the cases ---------------------------------------------------------------------------------------------

    def check_a(self) -> None:
        """Prefill of 13 rows, and one step."""
        cache = self.prefilled()
        self.close_kv(cache, 0, 0, "a.prefill.")
        token, logprob, logits, hidden = self.step(cache, self.context_rows(14)[13:])
        assert int(token) == int(self.want("a.step.argmax"))
        self.close(logprob, "a.step.logprob")
        self.close(logits, "a.step.logits")
        self.close(hidden, "a.step.recycled")
        self.close_kv(cache, 0, 13, "a.step.")

    def check_b(self) -> Cache:
        """A greedy chain of 4. Returns the cache, with rows 13..16 from the chain."""
        cache = self.prefilled()
        token, logprob, logits, hidden = map(torch.cat, zip(*self.chain(cache, self.context_rows(14)[13:], 4), strict=True))
        assert token.tolist() == self.want("b.tokens").tolist()
        self.close(logprob, "b.logprobs")
        self.close(logits, "b.logits")
        self.close(hidden, "b.recycled")
        self.close_kv(cache, 0, 13, "b.")
        return cache

    def check_c(self) -> None:
        """Three sequences of unequal context in one cache: one prefill call, then 3 steps of 3 rows."""
        cache = Cache(self.state, sequences=3)
        context: list[Row] = []
        newest: list[Row] = []
        for sequence in range(3):
            tokens, hiddens = self.want(f"c.{sequence}.tokens"), self.want(f"c.{sequence}.hiddens")
            rows = [Row(sequence, i, int(tokens[i + 1]), hidden) for i, hidden in enumerate(hiddens)]
            context += rows[:-1]
            newest.append(rows[-1])
        self.forward.context(cache.rows(context))
        made = self.chain(cache, newest, 3)
        for sequence, row in enumerate(newest):
            token, _, logits, hidden = (torch.stack([step[part][sequence] for step in made]) for part in range(4))
            assert token.tolist() == self.want(f"c.{sequence}.draft_tokens").tolist()
            self.close(logits, f"c.{sequence}.draft_logits")
            self.close(hidden, f"c.{sequence}.recycled")
            self.close_kv(cache, sequence, row.index, f"c.{sequence}.")

    def catch_up_rows(self) -> list[Row]:
        tokens, hiddens = self.want("d.row_tokens"), self.want("d.hiddens")
        return [Row(0, 14 + i, int(token), hidden) for i, (token, hidden) in enumerate(zip(tokens, hiddens, strict=True))]

    def check_d(self) -> None:
        """Catch-up after accepting 2 of b: rows 14 and 15 again from the target's hiddens, row 16, and 3 more steps."""
        cache = self.check_b()
        rows = self.catch_up_rows()
        self.forward.context(cache.rows(rows[:-1]))
        token, _, logits, hidden = map(torch.cat, zip(*self.chain(cache, rows[-1:], 4), strict=True))
        assert token.tolist() == self.want("d.draft_tokens").tolist()
        self.close(logits[0], "d.logits")
        self.close(logits, "d.draft_logits")
        assert (hidden[0] - self.want("d.recycled")[2]).abs().max() <= self.bounds.value
        self.close_kv(cache, 0, 14, "d.")

    def check_d_without_overwrite(self) -> None:
        """What a proposer gets that leaves the chain's rows 14 and 15: another fixture value, far from the right one."""
        cache = self.check_b()
        _, _, logits, _ = self.step(cache, self.catch_up_rows()[-1:])
        self.close(logits, "d.logits_if_no_overwrite")
        assert (logits - self.want("d.logits")).abs().max() > 100 * self.bounds.value


@dataclass(frozen=True)
class LatentCases(Cases):
    """Cases whose rows are a latent and a rotated part, which transformers stores evens first."""

    def close_kv(self, cache: Cache, sequence: int, first: int, name: str) -> None:
        latent = self.want(f"{name}latent")
        rotated, got = cache.read(sequence, first, latent.shape[0] if latent.dim() == 3 else 1)
        self.close(got, f"{name}latent", "kv")
        if f"{self.prefix}{name}krope_{self.keys}" in self.tensors:
            self.close(torch.cat([rotated[..., 0::2], rotated[..., 1::2]], -1), f"{name}krope_{self.keys}", "kv")


def cases_class(name: str) -> type[Cases]:
    """How a fixture's cases are read."""
    return LatentCases if name == "deepseek_v3_mtp" else Cases


def fixture_tensors(name: str) -> dict[str, torch.Tensor]:
    """Every tensor of a fixture's cases."""
    return load_file(FIXTURES / name / "cases.safetensors")


def target_of(name: str, *, whole: bool = False) -> Path | None:
    """The folder of the target that a fixture's drafter borrows from, where it has one. whole: with its weights, which lie
    beside another drafter where this one borrows none."""
    folder = FIXTURES / (WHOLE_TARGETS.get(name, name) if whole else name) / "target"
    return folder if folder.is_dir() else None


WHOLE_TARGETS = {"eagle3_llama_narrow": "eagle3_llama"}
"""Drafter to the one whose folder has the same target with all its weights."""
