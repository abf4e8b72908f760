"""How a chain's integers get into the memory that a GPU copies from. Needs no GPU."""

from __future__ import annotations

import ctypes
import random
from collections import deque
from types import SimpleNamespace

import pytest
import torch

from circuitgraph.runtime import BlockPool
from circuitgraph.runtime.cuda import MOST_PLACES, _Chain
from circuitgraph.runtime.runner import ChainRows
from tests.runtime.helpers import drafter

WIDTH = 16


class Staged:
    """A `_Chain` on no GPU, of `rows` rows and `steps` steps: what is staged is real."""

    def __init__(self, rows: int, steps: int):
        self.chain = chain = object.__new__(_Chain)
        chain.program, chain.steps, chain.states = SimpleNamespace(rows=rows), steps, ["kv"]  # type: ignore[assignment]
        chain.often = rows + 3 * steps * rows
        host = torch.full((chain.often + rows * (WIDTH + 2),), -7, dtype=torch.int32)
        chain.pinned, table = host, host[chain.often : chain.often + rows * WIDTH].view(rows, WIDTH)
        chain.cells = (ctypes.c_int32 * len(host)).from_address(host.data_ptr())
        chain.host = {"kv.table": table, "kv.seq": host[-2 * rows : -rows], "kv.start": host[-rows:]}
        chain.table_cells, chain.tables = [(chain.often, WIDTH)], None
        ramp = torch.arange(steps, dtype=torch.int32)[:, None]
        chain.ramps, chain.starts = torch.stack([ramp, ramp, ramp + 1]), torch.zeros(3, 1, rows, dtype=torch.int32)
        chain.starts_cells = (ctypes.c_int32 * (3 * rows)).from_address(chain.starts.data_ptr())
        chain.counted = host[rows : chain.often].view(3, steps, rows)

    def table(self, row: int, count: int) -> list[int]:
        return self.chain.host["kv.table"][row, :count].tolist()


@pytest.mark.parametrize("seed", range(4))
def test_staged_tables_are_the_leases(seed):
    """Sequences grow, shrink, go and come, lend and adopt; two chains of other widths, with the sequences in any order, are given
    them now and then. Of a table that has changed only the end is copied: what is there must be the lease's all the same."""
    choose = random.Random(seed)
    pool = BlockPool(drafter().circuit, blocks=40, block_size=2)
    leases = [pool.open() for _ in range(5)]
    chains = [Staged(1, 2), Staged(3, 2)]
    order, copied = list(range(len(leases))), 0
    for _ in range(2000):
        which = choose.randrange(len(leases))
        lease, act = leases[which], choose.randrange(6)
        if act < 2:
            pool.grow([(lease, min(2 * len(lease.blocks) + choose.randrange(1, 5), 2 * WIDTH))])
        elif act == 2:
            pool.shrink(lease, choose.randrange(2 * len(lease.blocks) + 1))
        elif act == 3 and choose.random() < 0.2:
            pool.close(lease)
            leases[which] = pool.open()
        elif act == 4 and lease.blocks and choose.random() < 0.3:
            blocks = pool.lend(lease)
            taker = choose.choice([other for other in leases if not other.blocks])
            pool.adopt(taker, blocks)
        if choose.random() < 0.6:
            continue  # many changes between two copies
        if choose.random() < 0.1:
            order = choose.sample(range(len(leases)), len(leases))
        staged = chains[choose.random() < 0.8]
        rows = [leases[place] for place in order[: staged.chain.program.rows]]
        staged.chain._stage_tables(rows)
        for row, shown in enumerate(rows):
            copied += len(shown.blocks)
            assert staged.table(row, len(shown.blocks)) == shown.blocks
    assert copied > 1000


def test_an_interrupt_while_a_table_is_staged_leaves_no_foreign_one():
    """Another sequence's blocks lie in a row of the table that was staged for one before: it must not be taken for its own."""
    pool, staged = BlockPool(drafter().circuit, blocks=40, block_size=2), Staged(1, 2)
    first, second = pool.open(), pool.open()
    pool.grow([(first, 6), (second, 6)])
    staged.chain._stage_tables([first])

    def interrupted():
        raise KeyboardInterrupt

    second.copied = interrupted  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        staged.chain._stage_tables([second])
    staged.chain._stage_tables([first])
    assert staged.table(0, 3) == first.blocks


def test_only_hiddens_that_fit_and_came_again_are_read_in_place():
    """Their address is all that a graph has: another shape, type or layout there must be copied, and so what comes once."""
    chain = object.__new__(_Chain)
    chain.hidden, chain.recent, chain.places = torch.zeros(2, 4), deque(maxlen=MOST_PLACES), set()
    memory = torch.zeros(MOST_PLACES + 2, 4, 4)
    reads = [chain._reads_in_place(memory[0, :2]) for _ in range(3)]
    assert reads == [False, True, True]
    others = [memory[0, :1], memory[0], memory[0, ::2], memory[0, :2].to(torch.float16), memory[0].view(-1)[:8].view(torch.int32)]
    assert not any(chain._reads_in_place(other) for other in others * 2)
    odd = memory.view(-1)[1:9].view(2, 4)  # kernels read 16 bytes at a time
    assert not any(chain._reads_in_place(odd) for _ in range(3))
    for turn in range(2):
        assert [chain._reads_in_place(memory[place, :2]) for place in (1, 2)] == [turn > 0] * 2, "two buffers in turn"
    for place in range(3, MOST_PLACES + 2):
        chain._reads_in_place(memory[place, :2])
        assert chain._reads_in_place(memory[place, :2]) == (place < MOST_PLACES), "recording one takes milliseconds"


@pytest.mark.parametrize("whole", [True, False])
def test_staged_integers_are_those_of_all_steps(whole):
    """Both ways to stage: all rows make all steps, or some stop. Row 1 goes over to another block, row 2 stops (or does not)."""
    staged = Staged(4, 3)
    last = 3 if whole else 1
    rows = ChainRows(
        tokens=[5, 6, 7, 8][: 4 if whole else 3],
        positions=[10, 20, 30, 40][: 4 if whole else 3],
        before=[3, 4, 5, 6][: 4 if whole else 3],
        counts=[3, 3, last, 3][: 4 if whole else 3],
        starts=[100, 215, 300, 400][: 4 if whole else 3],
        apart={1: [215, 64, 65]},
        blocks=[],
    )
    (staged.chain._stage_whole if whole else staged.chain._stage_some)(rows)
    ints = staged.chain.pinned[: staged.chain.often].tolist()
    tokens, (slots, positions, lengths) = ints[:4], torch.tensor(ints[4:]).view(3, 3, 4).tolist()
    if whole:
        assert tokens == [5, 6, 7, 8]
        assert slots == [[100, 215, 300, 400], [101, 64, 301, 401], [102, 65, 302, 402]]
        assert positions == [[10, 20, 30, 40], [11, 21, 31, 41], [12, 22, 32, 42]]
        assert lengths == [[4, 5, 6, 7], [5, 6, 7, 8], [6, 7, 8, 9]]
    else:  # a row that has stopped writes nowhere and sees nothing; so does one without a sequence
        assert tokens == [5, 6, 7, 0]
        assert slots == [[100, 215, 300, -1], [101, 64, -1, -1], [102, 65, -1, -1]]
        assert positions == [[10, 20, 30, 0], [11, 21, 0, 0], [12, 22, 0, 0]]
        assert lengths == [[4, 5, 6, 0], [5, 6, 0, 0], [6, 7, 0, 0]]
