"""Ctrl-C while a chain is awaited: nothing of the call stays, and nothing that the device may still read is written."""

from __future__ import annotations

import ctypes
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from inspect import unwrap
from types import SimpleNamespace

import pytest
import torch

from circuitgraph.runtime import BlockPool, MtpProposer, ReferenceRunner
from circuitgraph.runtime.cuda import _Chain
from circuitgraph.runtime.runner import ChainRows, DraftRunner
from circuitgraph.runtime.state import Entry, History
from tests.runtime.grammars import CountingMatcher
from tests.runtime.helpers import Script, drafter, oracle, proposer_of
from tests.runtime.test_proposer import prefilled, propose, snapshot


def kept(taken):
    """Of a snapshot: blocks that were reserved come back in an order of their own."""
    fields, free, ledger, _ = taken
    return fields, sorted(free), ledger


class Interrupted(ReferenceRunner):
    """Waits like a GPU's runner: the chain is made at the start, and the first wait is interrupted."""

    interrupts = 1

    def start_chain(self, steps, rows, hidden, storage, allowed=None):
        def wait():
            if self.interrupts:
                self.interrupts -= 1
                raise KeyboardInterrupt
            raise AssertionError("waited twice")

        return wait if self.interrupts else None


@pytest.mark.shows("rule 1")
def test_an_interrupted_wait_leaves_states_and_ledger():
    runner = Interrupted(drafter().circuit, drafter().weights)
    proposer, scripts = proposer_of(runner, block_size=1, blocks=200), [Script(0), Script(1)]
    states = [prefilled(proposer, script, 6) for script in scripts]
    before = snapshot(proposer, *states)
    arguments = [s.tokens[6] for s in scripts], [s.hiddens[5] for s in scripts], [6, 6], 4, states
    with pytest.raises(KeyboardInterrupt):
        proposer.propose_batch(*arguments)
    assert kept(before) == kept(snapshot(proposer, *states))
    assert proposer.metrics.skipped_rows == 0
    assert proposer.propose_batch(*arguments) == [oracle(drafter(), script, 6, 4) for script in scripts]


def test_an_interrupt_between_any_two_lines_of_the_bookkeeping_is_taken_back():
    """`Entry.make` runs while the device drafts. It is interrupted before each line of its own, and of what it calls in
    `state`, in turn: among them those between a sequence's steps, and those of a sequence without rows, which asks for the
    model's digest."""
    stop, seen = 0, set()
    while True:
        proposer, scripts = proposer_of(block_size=1, blocks=200), [Script(0), Script(1), Script(2)]
        states = [prefilled(proposer, scripts[0], 6), proposer.alloc_state(), prefilled(proposer, scripts[2], 6)]
        # Two of four drafts were accepted, and the next token is told to be another one: what the text said of it goes.
        propose(proposer, scripts[2], 6, 4, states[2])
        proposer.after_verify(2, states[2])
        before = snapshot(proposer, *states)
        models = [state.model for state in states]
        positions = [6, 3, 7]
        tokens = [s.tokens[at] for s, at in zip(scripts, positions, strict=True)]
        hiddens = [s.hiddens[at - 1] for s, at in zip(scripts, positions, strict=True)]
        with interrupt(stop, Entry.make, History.read, DraftRunner.model_digest) as lines:
            try:
                proposer.propose_batch(tokens, hiddens, positions, 4, states)
                interrupted = False
            except KeyboardInterrupt:
                interrupted = True
        seen.update(lines)
        if not interrupted:
            break
        assert kept(before) == kept(snapshot(proposer, *states)), lines[-1]
        assert [state.model for state in states] == models, lines[-1]
        assert proposer.metrics.skipped_rows == 0
        stop += 1
    assert stop == len(lines), "every line was the last one once"
    assert {name for name, _ in seen} >= {"make", "read", "model_digest"}
    assert all(state.model for state in states)
    assert proposer.drafter_rows(states[1]) == 4


@pytest.mark.parametrize("ended", [False, True])
def test_an_interrupt_anywhere_in_a_propose_leaves_states_and_pool_as_they_were(ended):
    """Blocks are taken, one of the sequences' of a promise; `ended`: a grammar ends one's drafts early, so that rows go back,
    too. Where the drafts are there already, they wait for their verify as after any propose."""
    stop, after = 0, set()
    parts = [BlockPool.cover, BlockPool._take, BlockPool._changed, MtpProposer._choose_rows]
    parts += [BlockPool.shrink, MtpProposer._shorten] if ended else []
    while True:
        proposer, scripts = proposer_of(block_size=2, blocks=60), [Script(0), Script(1)]
        states = [proposer.alloc_state_for(30), proposer.alloc_state()]
        for state, script in zip(states, scripts, strict=True):
            proposer.prefill_drafter(script.tokens[:6], script.hiddens[:6], state)
        before = snapshot(proposer, *states)
        rows = [s.tokens[6] for s in scripts], torch.stack([s.hiddens[5] for s in scripts]), [6, 6], 4, states
        grammars = [None, CountingMatcher(drafter().vocab_size, 0, ends=2)] if ended else None
        with interrupt(stop, unwrap(MtpProposer._propose), *parts) as lines:
            try:
                proposer.propose_batch(*rows, grammars=grammars)
                interrupted = False
            except KeyboardInterrupt:
                interrupted = True
        ledger = proposer.pool.ledger
        assert ledger.balances
        assert proposer.pool._promised == ledger.promised, lines[-1]
        if not interrupted:
            break
        if any(state.last_drafts for state in states):
            assert all(state.last_drafts for state in states), lines[-1]
            after.add(lines[-1])
        else:
            assert kept(before) == kept(snapshot(proposer, *states)), lines[-1]
            assert proposer.propose_batch(*rows) == [oracle(drafter(), script, 6, 4) for script in scripts]
        for state in states:
            proposer.free_state(state)
        assert (proposer.pool.ledger.free, proposer.pool._promised) == (60, 0), lines[-1]
        stop += 1
    assert {name for name, _ in lines} == {"_propose", *(part.__name__ for part in parts)}
    assert {name for name, _ in after} == {"_propose"}, "only once all of it has happened"


@contextmanager
def interrupt(stop: int, function: Callable, *parts: Callable) -> Iterator[list[tuple[str, int]]]:
    """Ctrl-C before line number `stop` that runs in `function`, or in what of `parts` is called there; gives those that ran."""
    lines: list[tuple[str, int]] = []
    inside = []
    whole, codes = function.__code__, {part.__code__ for part in parts}

    def each_call(frame, event, arg):
        if frame.f_code is whole:
            inside.append(frame)
        return each_line if frame.f_code is whole or (frame.f_code in codes and inside) else None

    def each_line(frame, event, arg):
        if event == "line":
            lines.append((frame.f_code.co_name, frame.f_lineno))
            if len(lines) == stop + 1:
                raise KeyboardInterrupt
        elif event == "return" and frame.f_code is whole:
            inside.clear()
        return each_line

    before = sys.gettrace()
    sys.settrace(each_call)
    try:
        yield lines
    finally:
        sys.settrace(before)


def test_an_interrupt_while_a_lock_is_awaited_leaves_the_other_free():
    """Ctrl-C while another proposer's call has the runner: this one's lock must not stay taken, or nobody else gets in."""
    proposer, script = proposer_of(), Script(0)
    state = prefilled(proposer, script, 6)
    runner = proposer.runner
    lock = runner.lock

    def interrupted_wait():
        raise KeyboardInterrupt

    runner.lock = SimpleNamespace(acquire=interrupted_wait, release=lock.release)
    try:
        with pytest.raises(KeyboardInterrupt):
            proposer.drafter_rows(state)
    finally:
        runner.lock = lock
    rows: list[int] = []
    other = threading.Thread(target=lambda: rows.append(proposer.drafter_rows(state)), daemon=True)
    other.start()
    other.join(5)
    assert rows == [5]


def chain_of(steps: int, n: int, launched: list[list[int]]) -> _Chain:
    """A `_Chain` on no GPU: what is staged is real, `launched` gets the integers as they are when a graph would start."""
    chain = object.__new__(_Chain)
    chain.program, chain.steps, chain.states = SimpleNamespace(rows=n), steps, []  # type: ignore[assignment]
    chain.runner = SimpleNamespace(device=torch.device("cuda", 0))  # type: ignore[assignment]
    chain.often = n + 2 * steps * n
    chain.pinned = torch.zeros(chain.often, dtype=torch.int32)
    chain.cells = (ctypes.c_int32 * chain.often).from_address(chain.pinned.data_ptr())
    chain.ramps = torch.arange(steps, dtype=torch.int32)[:, None].expand(2, steps, 1)
    chain.starts = torch.zeros(2, 1, n, dtype=torch.int32)
    chain.starts_cells = (ctypes.c_int32 * (2 * n)).from_address(chain.starts.data_ptr())
    chain.counted = chain.pinned[n:].view(2, steps, n)
    chain.hidden, chain.allowed, chain.tables, chain.unread = torch.zeros(n, 4), None, [0] * n, False
    chain.recent, chain.places = deque(), set()
    chain.copied = SimpleNamespace(query=lambda: True)  # type: ignore[assignment]
    chain.result = chain.pinned_result = torch.zeros(2, steps, n, dtype=torch.int32)
    chain.readings = {}
    chain._replay = lambda **kinds: launched.append(chain.pinned.tolist())  # type: ignore[method-assign]
    return chain


def rows_of(token: int) -> ChainRows:
    blocks = [SimpleNamespace(blocks=[0], version=0)] * 2
    return ChainRows([token] * 2, [token] * 2, [0, 0], [3, 3], [token] * 2, {}, blocks)


def test_page_locked_integers_are_written_once_the_interrupted_chain_has_read_them(monkeypatch):
    launched: list[list[int]] = []
    events: list[object] = []
    chain = chain_of(3, 2, launched)
    stream = SimpleNamespace(synchronize=lambda: events.append("waited for the chain"))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda *device: stream)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: events.append(("waited for all", chain.pinned[0].item())))
    for token in (5, 6):  # as it goes: one wait a chain, and no other
        chain.run_packed(rows_of(token), torch.zeros(2, 4), None)
        assert chain.unread
        chain.read(2)
    assert events == ["waited for the chain"] * 2
    events.clear()
    chain.run_packed(rows_of(7), torch.zeros(2, 4), None)  # and nobody reads it: Ctrl-C
    chain.run_packed(rows_of(8), torch.zeros(2, 4), None)
    assert events == [("waited for all", 7)], "the integers of the chain before were there until it had read them"
    assert [staged[0] for staged in launched] == [5, 6, 7, 8]
    events.clear()
    stream.synchronize = interrupted
    with pytest.raises(KeyboardInterrupt):
        chain.read(2)
    chain._clear(2)  # the other way of staging
    assert events == [("waited for all", 8)]
    assert not chain.unread


def interrupted():
    raise KeyboardInterrupt
