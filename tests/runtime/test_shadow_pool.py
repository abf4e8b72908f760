"""A shadow pool: rows addressed by a foreign host's slots, as beside vLLM's or SGLang's own KV pool. No proposer, no `BlockPool`.

The host gives a slot for every token and a block table for every sequence; the drafter's rows lie at the same slots of its own
storage. Hosts skip the drafter, so rows may be missing at the front (a prefix hit), and may come late.
"""

from __future__ import annotations

import functools
import json
import random
import tempfile
from collections import Counter
from pathlib import Path

import pytest
import torch

import circuitgraph
from circuitgraph.ops import PagedKV
from circuitgraph.runtime import DraftRunner, ReferenceRunner, load
from tests.cli.conftest import TINY
from tests.runtime.dense import Dense
from tests.runtime.helpers import Script, drafter

LENGTH = 36
BLOCK_SIZES = (1, 4, 8, 16)
"""With blocks of one row, a sequence's slots are a random map."""


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
    """Sequences in a foreign pool: random blocks; the row of the token at position p is row p - 1 of its sequence.

    present: positions whose rows the host handed over. What else lies in the storage, NaN at first and the drafter's own rows
    later, must not be seen.
    """

    def __init__(self, runner: DraftRunner, seed: int, block_size: int = 4):
        self.runner, self.size = runner, block_size
        self.reference = ReferenceRunner(runner.circuit, runner.weights)
        generator = torch.Generator().manual_seed(seed)
        hidden, vocab = runner.hidden_size, runner.vocab_size
        self.scripts = [Script(10 * seed + row, LENGTH + 8, hidden, vocab) for row in range(3)]
        width = -(-(LENGTH + 4) // block_size)
        self.blocks = 4 * width  # one sequence's worth belongs to nobody
        self.table = torch.randperm(self.blocks, generator=generator)[: 3 * width].view(3, -1).to(torch.int32)
        state = runner.circuit.states[0]
        shape = (state.layers, self.blocks, state.heads, block_size, state.dim)
        self.k, self.v = (torch.full(shape, float("nan")) for _ in "kv")
        self.present: list[set[int]] = [set(), set(), set()]

    def slot(self, seq: int, position: int) -> int:
        row = position - 1
        return int(self.table[seq, row // self.size]) * self.size + row % self.size

    def caches(self, slot, seq, start, length) -> dict[str, PagedKV]:
        ints = [torch.tensor(part, dtype=torch.int32) for part in (slot, seq, start, length)]
        return {"kv": PagedKV(self.k, self.v, ints[0], ints[1], self.table, ints[2], ints[3])}

    def _changed(self, before: tuple[torch.Tensor, torch.Tensor]) -> set[int]:
        """Slots whose bytes are no longer those of `before`."""
        slots = set()
        for old, new in zip(before, (self.k, self.v), strict=True):
            same = (old.view(torch.int32) == new.view(torch.int32)).all(dim=4).all(dim=2).all(dim=0)
            slots.update((~same).flatten().nonzero().flatten().tolist())
        return slots

    def write(self, rows: list[tuple[int, int]]) -> None:
        """Rows (sequence, position), in any order and with gaps: each program call is one batch of them."""
        token = torch.tensor([self.scripts[seq].tokens[at] for seq, at in rows], dtype=torch.int32)
        hidden = torch.stack([self.scripts[seq].hiddens[at - 1] for seq, at in rows])
        position = torch.tensor([at for _, at in rows], dtype=torch.int32)
        slots, before = [self.slot(seq, at) for seq, at in rows], (self.k.clone(), self.v.clone())
        self.runner.context(token, hidden, position, self.caches(slots, [s for s, _ in rows], [0] * 3, [at for _, at in rows]))
        assert self._changed(before) <= set(slots), "a row went to a slot that the host did not give"
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
        before = self.k.clone(), self.v.clone()
        caches = self.caches(slots[0].tolist(), [0, 1, 2], starts, positions)
        chain = self.runner.chain(steps, token, hidden, torch.tensor(positions, dtype=torch.int32), caches, slots)
        for seq, (script, at) in enumerate(zip(self.scripts, positions, strict=True)):
            dense = Dense(self.reference, "exact")
            first = starts[seq] + 1
            dense.append(first, script.tokens[first:at], script.hiddens[first - 1 : at - 1])
            dense.follow(script.tokens[at], script.hiddens[at - 1], at, chain.drafts[seq].tolist(), chain.logprobs[seq].tolist())
        assert self._changed(before) == set(slots.flatten().tolist())


@pytest.mark.shows("goal shadow pool")
@pytest.mark.parametrize("block_size", BLOCK_SIZES)
@pytest.mark.parametrize("name", RUNNERS)
def test_rows_at_a_hosts_slots(name, block_size):
    """Random maps; rows that never come, at the front and in between; rows that come after the drafts that missed them."""
    events: Counter[str] = Counter()
    for seed in range(2):
        chance, host = random.Random(seed), Host(RUNNERS[name](), seed, block_size)
        newest = [chance.choice((1, 2, 7, 8, 9, 15, 16, 17)) for _ in range(3)]
        leading = [chance.choice((0, 0, at // 2)) for at in newest]
        due = [(seq, at) for seq in range(3) for at in range(1 + leading[seq], newest[seq])]
        late = [row for row in due if chance.random() < 0.2]
        hand_over(host, [row for row in due if row not in late], chance)
        events["leading rows missing"] += sum(first > 0 for first in leading)
        while max(newest) < LENGTH - 4:
            come = [row for row in late if chance.random() < 0.4]
            late = [row for row in late if row not in come]
            events["late rows"] += len(come)
            hand_over(host, come, chance)
            steps = chance.randint(1, 3)
            host.draft(newest, steps)
            events["drafts past a gap"] += sum(
                bool(set(range(1 + leading[seq], at)) - host.present[seq]) for seq, at in enumerate(newest)
            )
            accepted = [chance.randint(0, steps) for _ in newest]
            due = [(seq, at + k) for seq, (at, count) in enumerate(zip(newest, accepted, strict=True)) for k in range(count + 1)]
            wait = [row for row in due if chance.random() < 0.15]
            hand_over(host, [row for row in due if row not in wait], chance)  # over the drafter's own rows
            late += wait
            newest = [at + count + 1 for at, count in zip(newest, accepted, strict=True)]
    assert events["leading rows missing"]
    assert events["late rows"] >= 8
    assert events["drafts past a gap"] >= 8


def hand_over(host: Host, rows: list[tuple[int, int]], chance: random.Random) -> None:
    """In an order of the host's own, several sequences in one call; rows of one sequence rise within a call."""
    rows = chance.sample(rows, len(rows))
    while rows:
        count = chance.randint(1, 9)
        host.write(sorted(rows[:count], key=lambda row: row[1]))
        rows = rows[count:]


@pytest.mark.shows("goal shadow pool")
@pytest.mark.parametrize("name", RUNNERS)
@pytest.mark.parametrize("block_size", BLOCK_SIZES)
def test_leading_rows_are_missing(name, block_size):
    """A prefix hit: the host has the tokens in its cache and no hiddens of them."""
    host = Host(RUNNERS[name](), 7, block_size)
    host.write([(seq, at) for seq, first in enumerate((5, 1, 8)) for at in range(first, 12)])
    host.draft([12, 12, 12], 3)


def test_a_wrong_slot_or_start_is_noticed():
    """The control: rows elsewhere, and a run that reaches over a gap, are no dense cache's."""
    host = Host(drafter(), 3, 1)
    host.write([(seq, at) for seq in range(3) for at in range(1, 12) if at != 6])
    host.draft([12, 12, 12], 2)
    host.present[1].add(6)  # the host thinks that it was handed over
    with pytest.raises(AssertionError):
        host.draft([12, 12, 12], 2)
    host = Host(drafter(), 3, 1)
    host.write([(seq, at) for seq in range(3) for at in range(1, 12)])
    host.table[0, :2] = host.table[0, :2].flip(0)
    host.table[0, 2] = host.table[1, 2]
    with pytest.raises(AssertionError):
        host.draft([12, 12, 12], 2)
