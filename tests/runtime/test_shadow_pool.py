"""A shadow pool: rows addressed by a foreign host's slots, as beside vLLM's or SGLang's own KV pool. No proposer, no `BlockPool`.

The host gives a slot for every token and a block table for every sequence; the drafter's rows lie at the same slots of its own
storage. Hosts skip the drafter, so rows may be missing at the front (a prefix hit), and may come late.
"""

from __future__ import annotations

import functools
import json
import tempfile
from pathlib import Path

import pytest
import torch

import circuitgraph
from circuitgraph.ops import PagedKV
from circuitgraph.runtime import DraftRunner, ReferenceRunner, load
from tests.cli.conftest import TINY
from tests.runtime.dense import Dense
from tests.runtime.helpers import Script, drafter

BLOCK, BLOCKS, LENGTH = 4, 40, 48


@functools.cache
def compiled() -> DraftRunner:
    folder = Path(tempfile.mkdtemp())
    (folder / "config.json").write_text(json.dumps(TINY))
    out = folder / "head"
    circuitgraph.compile(
        "auto", model=folder / "config.json", out=out, widths=(3,), context_rows=(8,), entries=("draft", "context"), wt="f32"
    )
    return load(out, max_position=LENGTH + 8, threads=1)


RUNNERS = {"reference": drafter, "compiled": compiled}


class Host:
    """Sequences in a foreign pool: random blocks; the row of the token at position p is row p - 1 of its sequence."""

    def __init__(self, runner: DraftRunner, seed: int):
        self.runner = runner
        self.reference = ReferenceRunner(runner.circuit, runner.weights)
        generator = torch.Generator().manual_seed(seed)
        hidden, vocab = runner.hidden_size, runner.vocab_size
        self.scripts = [Script(10 * seed + row, LENGTH + 8, hidden, vocab) for row in range(3)]
        blocks = torch.randperm(BLOCKS, generator=generator)[: 3 * (LENGTH // BLOCK)]
        self.table = blocks.view(3, -1).to(torch.int32)
        state = runner.circuit.states[0]
        shape = (state.layers, BLOCKS, state.heads, BLOCK, state.dim)
        self.k, self.v = (torch.full(shape, float("nan")) for _ in "kv")
        self.present: list[set[int]] = [set(), set(), set()]

    def slot(self, seq: int, position: int) -> int:
        row = position - 1
        return int(self.table[seq, row // BLOCK]) * BLOCK + row % BLOCK

    def caches(self, slot, seq, start, length) -> dict[str, PagedKV]:
        ints = [torch.tensor(part, dtype=torch.int32) for part in (slot, seq, start, length)]
        return {"kv": PagedKV(self.k, self.v, ints[0], ints[1], self.table, ints[2], ints[3])}

    def write(self, rows: list[tuple[int, int]]) -> None:
        """Rows (sequence, position), in any order and with gaps: each program call is one batch of them."""
        token = torch.tensor([self.scripts[seq].tokens[at] for seq, at in rows], dtype=torch.int32)
        hidden = torch.stack([self.scripts[seq].hiddens[at - 1] for seq, at in rows])
        position = torch.tensor([at for _, at in rows], dtype=torch.int32)
        slots = [self.slot(seq, at) for seq, at in rows]
        self.runner.context(token, hidden, position, self.caches(slots, [s for s, _ in rows], [0] * 3, [at for _, at in rows]))
        for seq, at in rows:
            self.present[seq].add(at)

    def draft(self, positions: list[int], steps: int) -> None:
        """One chain for all three sequences, each seeing its unbroken run of newest rows; compared with a dense cache."""
        starts = []
        for seq, at in enumerate(positions):
            first = at
            while first - 1 in self.present[seq]:
                first -= 1
            starts.append(first - 1)
        slots = torch.tensor([[self.slot(s, at + k) for s, at in enumerate(positions)] for k in range(steps)], dtype=torch.int32)
        token = torch.tensor([s.tokens[at] for s, at in zip(self.scripts, positions, strict=True)], dtype=torch.int32)
        hidden = torch.stack([s.hiddens[at - 1] for s, at in zip(self.scripts, positions, strict=True)])
        before = self.k.clone()
        caches = self.caches(slots[0].tolist(), [0, 1, 2], starts, positions)
        chain = self.runner.chain(steps, token, hidden, torch.tensor(positions, dtype=torch.int32), caches, slots)
        for seq, (script, at) in enumerate(zip(self.scripts, positions, strict=True)):
            dense = Dense(self.reference, "exact")
            first = starts[seq] + 1
            dense.append(first, script.tokens[first:at], script.hiddens[first - 1 : at - 1])
            dense.follow(script.tokens[at], script.hiddens[at - 1], at, chain.drafts[seq].tolist(), chain.logprobs[seq].tolist())
        written = torch.zeros(BLOCKS * BLOCK, dtype=torch.bool)
        written[slots.flatten().long()] = True
        kept = ~written.view(1, BLOCKS, 1, BLOCK, 1)
        assert torch.equal(torch.where(kept, before, 0).nan_to_num(7), torch.where(kept, self.k, 0).nan_to_num(7))


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("name", RUNNERS)
def test_rows_at_a_hosts_slots(name, seed):
    host = Host(RUNNERS[name](), seed)
    # A prompt each, written in an order of the host's own, several sequences in one call.
    generator = torch.Generator().manual_seed(seed)
    lengths = [9, 1 + 4 * seed, 14]
    rows = [(seq, at) for seq, length in enumerate(lengths) for at in range(1, length)]
    order = torch.randperm(len(rows), generator=generator).tolist()
    for first in range(0, len(rows), 7):
        host.write(sorted((rows[place] for place in order[first : first + 7]), key=lambda row: row[1]))
    host.draft(lengths, 3)
    # Drafted rows of the next positions are the drafter's own: the target's come in their place.
    host.write([(seq, length + k) for seq, length in enumerate(lengths) for k in range(2)])
    host.draft([length + 2 for length in lengths], 2)


@pytest.mark.parametrize("name", RUNNERS)
def test_leading_rows_are_missing(name):
    """A prefix hit: the host has the tokens in its cache and no hiddens of them."""
    host = Host(RUNNERS[name](), 7)
    host.write([(seq, at) for seq, first in enumerate((5, 1, 8)) for at in range(first, 12)])
    host.draft([12, 12, 12], 3)
    # One sequence has no row at all: it drafts from its newest token alone.
    host.present[1] = set()
    host.draft([12, 12, 12], 2)


@pytest.mark.parametrize("name", RUNNERS)
def test_rows_come_late(name):
    """The host skipped the drafter for some steps: a hole, which is not read, until its rows are there."""
    host = Host(RUNNERS[name](), 9)
    host.write([(seq, at) for seq in range(3) for at in (1, 2, 3, 4, 5, 6)])
    host.write([(0, 10), (0, 11), (1, 7), (1, 8), (1, 9), (1, 10), (1, 11), (2, 11)])
    host.draft([12, 12, 12], 2)
    host.write([(2, 7), (0, 7), (2, 8), (0, 8)])
    host.draft([12, 12, 12], 2)
    host.write([(0, 9), (2, 9), (2, 10)])
    host.draft([12, 12, 12], 3)
    assert [min(rows) for rows in host.present] == [1, 1, 1]
