"""A hypothesis state machine: random interleavings of every method on several sequences, each against a dense cache.

After every rule: drafts were the oracle's, rows and keys are, the pool's rows hold what the oracle's do, every block is in one
place, rows of sequences that the call did not name are byte for byte what they were. A refused call changes nothing.
`machine_of` makes it for any runner, so that it runs on a GPU, too.
"""

from __future__ import annotations

import math
import os
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import Phase, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from circuitgraph.errors import RuntimeUseError
from circuitgraph.runtime import BlockPool, DraftRunner, PoolExhausted
from tests.runtime.audited import Audited
from tests.runtime.dense import KEPT, Dense, dense_of
from tests.runtime.grammars import CountingMatcher, bits_of, words_of

MOST_SEQUENCES = 5
POOL_ROWS = 144
"""Small: a few prompts fill it."""
LENGTHS = (1, 2, 3, 7, 8, 9, 15, 16, 17, 18, 31, 33, 45)
"""Prompts around the edges of blocks and of context programs, one of them longer than the position limit."""
GRAMMARS = st.sampled_from(("none", "mask", "nothing", "matcher"))
LIMIT = 40
"""Rows of the RoPE tables that the runners should have."""


@dataclass(eq=False, repr=False)
class Sequence:
    """text: the tokens so far, the newest one not fed to the target. drafts: None unless a verify is awaited.

    late: accept counts that the host was not told yet, oldest first; last: (position, drafts, accepted) of the newest
    device-form propose, whose rows are still as drafted; promised: whether a budget was.
    """

    seed: int
    state: object
    dense: Dense
    text: list[int]
    drafts: list[int] | None = None
    late: list[int] = field(default_factory=list)
    last: tuple[int, int, int] | None = None

    def __repr__(self) -> str:
        return f"<sequence {self.seed} at {self.position}>"

    @property
    def position(self) -> int:
        return len(self.text) - 1

    @property
    def ready(self) -> bool:
        """For host-form calls."""
        return self.drafts is None and not self.late


class Machine(RuleBasedStateMachine):
    make: Callable[[], tuple[DraftRunner, DraftRunner]]
    """The runner under test, and a reference runner of the same circuit and weights."""
    events: Counter[str]
    """What happened over all examples: a machine that never gets anywhere proves nothing."""

    trim: str

    @initialize(block_size=st.sampled_from((1, 8, 16)))
    def begin(self, block_size: int) -> None:
        self.runner, self.reference = type(self).make()
        pool = BlockPool(self.runner.circuit, blocks=POOL_ROWS // block_size, block_size=block_size, device=self.runner.device)
        self.proposer = Audited(self.runner, pool, trim=self.trim)
        self.pool, self.vocab = pool, self.runner.vocab_size
        self.sequences: list[Sequence] = []
        self.carried: list[tuple[object, Sequence]] = []
        self.joined = 0
        generator = torch.Generator().manual_seed(block_size)
        hidden = torch.randn(8, 128, self.runner.hidden_size, generator=generator)
        self.hiddens = hidden.to(self.runner.device)
        self.words = torch.randint(0, self.vocab, (8, 128), generator=generator).tolist()

    # -- helpers -----------------------------------------------------------------------------------------------

    def hidden(self, seq: Sequence, position: int) -> torch.Tensor:
        """The target's hidden after the token at `position`."""
        return self.hiddens[seq.seed % 8, position]

    def hidden_rows(self, seq: Sequence, first: int, last: int) -> torch.Tensor:
        return self.hiddens[seq.seed % 8, first:last]

    def some(self, data, pool: list[Sequence], most: int = 4) -> list[Sequence]:
        count = data.draw(st.integers(1, min(most, len(pool))))
        order = data.draw(st.permutations(range(len(pool))))
        return [pool[place] for place in order[:count]]

    def ready(self) -> list[Sequence]:
        return [seq for seq in self.sequences if seq.ready and seq.position + 8 < 126]

    @contextmanager
    def touching(self, *touched: Sequence) -> Iterator[None]:
        """Rows of all other sequences, and carried ones, do not change; nor do the older rows of the touched ones."""
        before = [part.clone() for parts in self.pool.storage.values() for part in parts]
        kept = []
        for seq in self.sequences:
            state = seq.state
            if seq.late or seq.last:
                continue
            rows = state.rows - (seq.dense.loose(len(state.last_drafts)) if seq in touched else 0)
            kept += self.pool.slots(state.lease, 0, rows)
        size = self.pool.block_size
        for carried, _ in self.carried:
            kept += [carried.blocks[row // size] * size + row % size for row in range(carried.rows)]
        yield
        index = torch.tensor(kept, dtype=torch.long, device=self.runner.device)
        after = [part for parts in self.pool.storage.values() for part in parts]
        for old, new in zip(before, after, strict=True):
            block, offset = index // size, index % size
            assert torch.equal(old[:, block, :, offset], new[:, block, :, offset]), "somebody else's rows changed"

    @contextmanager
    def changing_nothing(self) -> Iterator[None]:
        before = self.everything()
        yield
        after = self.everything()
        assert before[0] == after[0]
        assert all(torch.equal(old, new) for old, new in zip(before[1], after[1], strict=True))

    def everything(self):
        states = [
            (list(s.state.lease.blocks), s.state.lease.promised, list(s.state.history.positions), list(s.state.last_drafts),
             list(s.state.history.text), s.state.next_token, s.state.proposed_at, len(s.state.unsettled))
            for s in self.sequences
        ]  # fmt: skip
        storage = [part.clone() for parts in self.pool.storage.values() for part in parts]
        return (states, list(self.pool._free), sorted(self.pool._loaned), self.pool.ledger), storage

    def wanted(
        self, seqs: list[Sequence], num_drafts: int, rows: Callable[[Sequence], int], *, limited: bool = True
    ) -> list[int]:
        """How many drafts each sequence can get, one reserving after the other."""
        ledger, size = self.pool.ledger, self.pool.block_size
        spare = max(ledger.free - ledger.promised, 0)
        counts = []
        for seq in seqs:
            lease, have = seq.state.lease, rows(seq)
            position = seq.position if limited else None
            # Without its position a sequence's rows still end at the limit.
            end = math.inf if limited or self.runner.max_position is None else self.runner.max_position
            room = (len(lease.blocks) + lease.outstanding + spare) * size - have
            count = seq.dense.most(num_drafts, position)
            if min(have + seq.dense.needs(count, position), end) > have + room:
                count = seq.dense.fits(count, room, position)
            rows_after = min(have + seq.dense.needs(count, position), end)
            need = max(-(-int(rows_after) // size) - len(lease.blocks), 0) if count else 0
            spare -= max(need - lease.outstanding, 0)
            counts.append(count)
        return counts

    # -- lives -------------------------------------------------------------------------------------------------

    @precondition(lambda self: len(self.sequences) < MOST_SEQUENCES)
    @rule(length=st.sampled_from(LENGTHS), chunk=st.sampled_from((3, 8, 16, 99)), budget=st.sampled_from((None, 0, 8, 40)),
          skipped=st.sampled_from((0, 0, 0, 5)))  # fmt: skip
    def join(self, length: int, chunk: int, budget: int | None, skipped: int) -> None:
        """A prompt, in chunks; `skipped` leading tokens have no hiddens (the server's prefix cache had them)."""
        self.joined += 1
        seed, text = self.joined, self.words[self.joined % 8][: length + 1]
        asked = None if budget is None else length + 1 + budget
        ledger = self.pool.ledger
        dense = dense_of(self.reference, self.trim)
        need = 0 if asked is None else self.pool.blocks_for(dense.promise(asked))
        if need > ledger.free - ledger.promised:
            with self.changing_nothing(), pytest.raises(PoolExhausted, match="cannot promise"):
                self.proposer.alloc_state_for(asked)
            self.events["admission refused"] += 1
            return
        seq = Sequence(seed, self.proposer.alloc_state_for(asked), dense, text)
        self.sequences.append(seq)
        first = skipped if skipped < length - 1 else 0
        while first < length:
            last = min(first + chunk, length)
            tokens, hiddens = text[first : last + 1], self.hidden_rows(seq, first, last)
            if last == length:  # the newest token's row is the propose's
                tokens, hiddens = text[first:last], self.hidden_rows(seq, first, last)
            with self.touching(seq):
                wrote = self.proposer.prefill_drafter(tokens, hiddens, seq.state, first_pos=first)
            if wrote:
                seq.dense.append(first + 1, tokens[1:], hiddens)
            first = last

    @precondition(lambda self: self.sequences)
    @rule(data=st.data())
    def leave(self, data) -> None:
        """At the end, or at any time: unverified drafts and unsettled proposes are no obstacle."""
        seq = data.draw(st.sampled_from(self.sequences))
        with self.touching(seq):
            self.proposer.free_state(seq.state)
            self.proposer.free_state(seq.state)
        self.sequences.remove(seq)

    # -- drafting ----------------------------------------------------------------------------------------------

    @precondition(lambda self: self.ready())
    @rule(data=st.data(), num_drafts=st.integers(0, 4), alone=st.booleans())
    def propose(self, data, num_drafts: int, alone: bool) -> None:
        seqs = self.some(data, self.ready(), 1 if alone else 4)
        self.draft(seqs, num_drafts, alone=alone)

    @precondition(lambda self: self.ready() and self.runner.serves(4, masked=True))
    @rule(
        data=st.data(),
        num_drafts=st.integers(1, 4),
        kinds=st.lists(st.sampled_from(["none", "mask", "nothing", "matcher"]), min_size=4),
    )
    def propose_masked(self, data, num_drafts: int, kinds: list[str]) -> None:
        seqs = self.some(data, self.ready())
        self.draft(seqs, num_drafts, kinds=kinds[: len(seqs)], alone=len(seqs) == 1)

    @precondition(lambda self: self.ready())
    @rule(data=st.data(), threshold=st.sampled_from((0.0, 0.02, 0.05, 1.0)))
    def propose_confident(self, data, threshold: float) -> None:
        (seq,) = self.some(data, self.ready(), 1)
        self.draft([seq], 4, alone=True, threshold=threshold)

    @precondition(lambda self: self.ready())
    @rule(data=st.data(), stops=st.integers(1, 40))
    def propose_until(self, data, stops: int) -> None:
        seqs = self.some(data, self.ready())
        self.draft(seqs, 4, alone=False, stop_ids=frozenset(range(0, self.vocab, stops + 1)))

    def draft(self, seqs, num_drafts, *, alone, kinds=(), threshold=None, stop_ids=frozenset()) -> None:
        counts = self.wanted(seqs, num_drafts, lambda seq: seq.state.rows)
        grammars = [self.grammar(kind, seq) for kind, seq in zip(kinds, seqs, strict=True)] if kinds else None
        tokens, hiddens = [seq.text[-1] for seq in seqs], [self.hidden(seq, seq.position - 1) for seq in seqs]
        positions, states = [seq.position for seq in seqs], [seq.state for seq in seqs]
        scores: list[list[float]] | None = None
        with self.touching(*seqs):
            if alone:
                options = {"grammar": grammars[0] if grammars else None, "stop_confidence": threshold, "stop_ids": stop_ids}
                drafts = [self.proposer.propose(tokens[0], hiddens[0], positions[0], num_drafts, states[0], **options)]
            else:
                scores = []
                options = {"grammars": grammars, "stop_ids": stop_ids, "out_confidence": scores}
                drafts = self.proposer.propose_batch(tokens, hiddens, positions, num_drafts, states, **options)
        for row, (seq, ids, count) in enumerate(zip(seqs, drafts, counts, strict=True)):
            matcher = grammars[row] if grammars else None
            masks = self.masks(matcher, ids) if kinds and kinds[row] != "none" else None
            seq.dense.follow(tokens[row], hiddens[row], positions[row], ids, scores[row] if scores else None, masks)
            assert len(ids) <= count
            self.events["drafts"] += len(ids)
            self.events["drafts under a mask"] += len(ids) if kinds and kinds[row] != "none" else 0
            below, without = (seq.dense.most(num_drafts, place) for place in (positions[row], None))
            self.events["no room"] += count < below == num_drafts
            self.events["limit"] += below < without
            self.events["cut"] += len(ids) < count
            if len(ids) < count:
                ended = ids and (ids[-1] in stop_ids or threshold is not None)
                assert ended or (kinds and kinds[row] in ("nothing", "matcher")), "a chain that ended for no reason"
            assert all(token not in stop_ids for token in ids[:-1])
            seq.drafts = ids
            if isinstance(matcher, CountingMatcher):
                assert matcher.depth == 0, "the matcher was not rolled back"

    def grammar(self, kind: str, seq: Sequence):
        return {
            "none": None,
            "mask": words_of({(seq.seed + 3 * i) % self.vocab for i in range(20)}, self.vocab),
            "nothing": words_of(set(), self.vocab),
            "matcher": CountingMatcher(self.vocab, seq.seed, ends=seq.seed % 4 + 1),
        }[kind]

    def masks(self, grammar, ids: list[int]) -> list[torch.Tensor]:
        if isinstance(grammar, CountingMatcher):
            return [bits_of(words, self.vocab).to(self.runner.device) for words in grammar.along(ids)]
        return [bits_of(grammar, self.vocab).to(self.runner.device)] * len(ids)

    @precondition(lambda self: any(seq.drafts is not None for seq in self.sequences))
    @rule(data=st.data(), catch_up=st.sampled_from((True, True, True, False)))
    def verify(self, data, catch_up: bool) -> None:
        seqs = self.some(data, [seq for seq in self.sequences if seq.drafts is not None])
        self.verified(seqs, [data.draw(st.integers(0, len(seq.drafts))) for seq in seqs], catch_up)

    @precondition(lambda self: self.ready())
    @rule(num_drafts=st.integers(1, 4), luck=st.lists(st.integers(0, 4), min_size=3, max_size=9))
    def serve(self, num_drafts: int, luck: list[int]) -> None:
        """A few steps of the server's own loop, with all sequences that are ready."""
        for at in range(len(luck) // 3):
            seqs = self.ready()[:4]
            self.draft(seqs, num_drafts, alone=False)
            self.verified(seqs, [luck[(at + row) % len(luck)] % (len(seq.drafts) + 1) for row, seq in enumerate(seqs)], True)

    def verified(self, seqs: list[Sequence], accepted: list[int], catch_up: bool) -> None:
        """Trim, then catch up in one batch, unless the server skips that."""
        rows = []
        with self.touching(*seqs):
            for seq, count in zip(seqs, accepted, strict=True):
                drafts, position = seq.drafts, seq.position
                self.events[f"{self.trim}: {count} of {len(drafts)}"] += 1
                self.proposer.after_verify(count, seq.state)
                seq.dense.verified(len(drafts), count)
                fed = [seq.text[-1], *drafts]
                seq.text += [*drafts[:count], self.words[(seq.seed + 1) % 8][position + count + 1]]
                seq.drafts = None
                end = count + 1
                missing = self.proposer.rows_behind(seq.state, seq.position)
                assert missing == seq.dense.behind(seq.position)
                first = end - min(missing, end)
                hiddens = self.hidden_rows(seq, position + first - 1, position + end - 1)
                rows.append((seq, fed[first:end], hiddens, position + first))
        if catch_up:
            with self.touching(*seqs):
                tokens, hiddens, firsts = ([row[part] for row in rows] for part in (1, 2, 3))
                wrote = self.proposer.catchup_batch(tokens, hiddens, firsts, [seq.state for seq in seqs])
            self.events["rows caught up"] += wrote
            if wrote:
                assert wrote == sum(seq.dense.append(first, tokens, hiddens) for seq, tokens, hiddens, first in rows)

    # -- the device form ---------------------------------------------------------------------------------------

    def for_device(self) -> list[Sequence]:
        """Sequences whose last verify, if any, was accounted for: by the host, or with counts on the device."""
        return [seq for seq in self.sequences if seq.drafts is None and seq.position + 8 < 126]

    @precondition(lambda self: self.for_device())
    @rule(data=st.data(), num_drafts=st.integers(1, 4), catch_up=st.booleans(), left=st.sampled_from((None, None, None, 0, 1)))
    def device_step(self, data, num_drafts: int, catch_up: bool, left: int | None) -> None:
        """A propose, its verify, and maybe the catch-up, of which the host learns nothing; `settle` comes any time later."""
        seqs = self.some(data, self.for_device())
        with self.crowded(left):
            self.on_device(data, seqs, num_drafts, catch_up)

    @contextmanager
    def crowded(self, left: int | None) -> Iterator[None]:
        """Others have been promised all free blocks but so many, if any number: a long sequence would take many steps to."""
        ledger = self.pool.ledger
        lease = None if left is None else self.pool.open(max(ledger.free - ledger.promised - left, 0) * self.pool.block_size)
        yield
        if lease is not None:
            self.pool.close(lease)

    def on_device(self, data, seqs: list[Sequence], num_drafts: int, catch_up: bool) -> None:
        ints = lambda values: torch.tensor(values, dtype=torch.int32, device=self.runner.device)  # noqa: E731
        states, n = [seq.state for seq in seqs], len(seqs)
        # The host does not look at positions, so it reserves for drafts beyond the limit, too.
        counts = self.wanted(seqs, num_drafts, lambda seq: seq.state.most_rows, limited=False)
        accepted = ints([seq.last[2] if seq.last else 3 for seq in seqs])
        for seq in seqs:
            self.account(seq)
        out = ints([[-7] * num_drafts] * n)
        hiddens = torch.stack([self.hidden(seq, seq.position - 1) for seq in seqs])
        positions = [seq.position for seq in seqs]
        # A prompt that had no room left the host without a notion of where the sequence stands.
        known = all(seq.state.next_token + sum(seq.late) + len(seq.late) == seq.position for seq in seqs)
        with self.touching(*seqs):
            made = self.proposer.propose_batch(
                ints([seq.text[-1] for seq in seqs]), hiddens, ints(positions) if known else positions, num_drafts, states,
                accepted=accepted, out=out,
            )  # fmt: skip
        assert made is out
        taken, fed, rows = [], [], []
        for row, (seq, room) in enumerate(zip(seqs, counts, strict=True)):
            count = min(room, seq.dense.most(num_drafts, seq.position))
            self.events["device drafts"] += count
            self.events["device, no room"] += room < seq.dense.most(num_drafts, None)
            self.events["device, limit"] += count < room
            drafts = [token for token in out[row].tolist() if token >= 0]
            assert out[row].tolist() == drafts + [-1] * (num_drafts - len(drafts))
            assert len(drafts) == count, (len(drafts), count)
            position = seq.position
            seq.dense.follow(seq.text[-1], hiddens[row], position, drafts)
            accepted_here = data.draw(st.integers(0, count))
            fed.append(([seq.text[-1], *drafts] + [0] * num_drafts)[: num_drafts + 1])
            rows.append(self.hidden_rows(seq, position - 1, position + num_drafts))
            seq.last = (position, count, accepted_here)
            seq.late.append(accepted_here)
            seq.text += [*drafts[:accepted_here], self.words[(seq.seed + 1) % 8][position + accepted_here + 1]]
            taken.append(accepted_here)
        if catch_up:
            with self.touching(*seqs):
                done = self.proposer.catchup_accepted(ints(fed), torch.stack(rows), states, ints(taken), first=0)
            if done:
                for seq, tokens, hidden in zip(seqs, fed, rows, strict=True):
                    position, count, accepted_here = seq.last  # type: ignore[misc]
                    self.account(seq)
                    kept = KEPT[self.trim](count, accepted_here) if count else 0
                    window = slice(kept, accepted_here + 1)
                    self.events["device rows caught up"] += accepted_here + 1 - kept
                    seq.dense.append(position + kept, tokens[window], hidden[window])

    def account(self, seq: Sequence) -> None:
        """What the device does with the accept count of the last device-form propose."""
        if seq.last:
            seq.dense.verified(seq.last[1], seq.last[2])
            seq.last = None

    @precondition(lambda self: any(seq.late for seq in self.sequences))
    @rule(data=st.data())
    def settle(self, data) -> None:
        seqs = self.some(data, [seq for seq in self.sequences if seq.late])
        with self.touching(*seqs):
            self.proposer.settle([seq.state for seq in seqs], [seq.late[0] for seq in seqs])
        for seq in seqs:
            self.events["settled"] += 1
            seq.late.pop(0)
            if not seq.late:
                self.account(seq)

    # -- carrying ----------------------------------------------------------------------------------------------

    @precondition(lambda self: self.ready() and len(self.carried) < 2)
    @rule(data=st.data())
    def take(self, data) -> None:
        seq = data.draw(st.sampled_from(self.ready()))
        with self.touching(seq):
            carried = self.proposer.take_drafter_kv(seq.state)
        assert (carried is None) == (not seq.dense.positions)
        assert self.proposer.drafter_rows(seq.state) == 0
        assert self.proposer.last_pair_key(seq.state) is None
        if carried is not None:
            assert (carried.rows, carried.last_pair_key) == (len(seq.dense.positions), seq.dense.positions[-1] - 1)
            self.carried.append((carried, seq))
        self.proposer.free_state(seq.state)
        self.sequences.remove(seq)

    @precondition(lambda self: self.carried and len(self.sequences) < MOST_SEQUENCES)
    @rule(data=st.data(), differs=st.sampled_from((None, None, 1, 5, 9)), asked=st.booleans())
    def install(self, data, differs: int | None, asked: bool) -> None:
        """The next turn: the same text, or one that differs from some token on."""
        carried, old = data.draw(st.sampled_from(self.carried))
        state = self.proposer.alloc_state()
        text = list(old.text)
        known = len(carried.tokens)
        assert carried.tokens == text[:known]
        if differs is not None and differs < len(text):
            text[differs] = (text[differs] + 1) % self.vocab
            asked = True
        same = min(known, len(text) if differs is None else min(differs, len(text)))
        keep = sum(position < same for position in old.dense.positions) if asked else len(old.dense.positions)
        with self.touching():
            done = self.proposer.install_drafter_kv(state, carried, prefix=text if asked else None)
        assert done == (keep > 0)
        self.events["installed" if done else "not installed"] += 1
        self.events["installed in part"] += 0 < keep < len(old.dense.positions)
        if not done:
            assert self.proposer.drafter_rows(state) == 0
            self.proposer.free_state(state)
            return
        self.carried.remove((carried, old))
        old.dense.keep(keep)
        seq = Sequence(old.seed, state, old.dense, text)
        self.sequences.append(seq)
        first = seq.dense.next_position
        if first < seq.position:  # the turn's new tokens
            tokens, hiddens = text[first : seq.position], self.hidden_rows(seq, first - 1, seq.position - 1)
            with self.touching(seq):
                wrote = self.proposer.catchup_drafter(tokens, hiddens, keep, first, state)
            if wrote:
                seq.dense.append(first, tokens, hiddens)

    @precondition(lambda self: self.carried)
    @rule(data=st.data())
    def drop(self, data) -> None:
        carried, old = data.draw(st.sampled_from(self.carried))
        self.carried.remove((carried, old))
        with self.touching():
            self.proposer.free_drafter_kv(carried)
        with self.changing_nothing(), pytest.raises(RuntimeUseError, match="is not on loan from this pool"):
            self.proposer.free_drafter_kv(carried)

    # -- other forwards, wrong calls ---------------------------------------------------------------------------

    @rule(reference=st.booleans())
    def swap_forward(self, reference: bool) -> None:
        self.proposer.set_circuit_draft(self.reference if reference else None)

    @precondition(lambda self: self.sequences)
    @rule(data=st.data())
    def wrong(self, data) -> None:
        seq = data.draw(st.sampled_from(self.sequences))
        state, other, hidden = seq.state, self.sequences[0].state, self.hidden(seq, 0)
        position = seq.dense.next_position + 4
        propose = lambda token=1, h=hidden, p=position, k=2, s=state: self.proposer.propose(token, h, p, k, s)  # noqa: E731
        twice, uneven = "one sequence cannot be in a batch twice", "lists of unequal length"
        calls: list[tuple[Callable[[], object], str]] = [
            (lambda: propose(token=self.vocab), "token outside the vocabulary"),
            (lambda: propose(h=hidden[:-1]), "hiddens: do not fit"),
            (lambda: propose(p=0), "position: that position has a row already"),
            (lambda: propose(k=-1), "num_drafts: is no number of drafts"),
            (lambda: self.proposer.propose_batch([1, 1], [hidden] * 2, [position] * 2, 2, [state, state]), twice),
            (lambda: self.proposer.propose_batch([1], [hidden] * 2, [position] * 2, 2, [state, other]), uneven),
            (lambda: self.proposer.after_verify(5, state), "more drafts accepted than there were"),
            (lambda: self.proposer.catchup_batch([[self.vocab]], [hidden[None]], [position], [state]), "outside the vocabulary"),
            (lambda: self.proposer.settle([state], [9]), "has nothing to settle"),
        ]
        waits = "drafts are waiting for after_verify|its rows are known to the device only|more drafts accepted"
        if seq.drafts or seq.late:  # everything else waits for the verify or the settle
            calls = [(call, f"{told}|{waits}") for call, told in calls]
            calls += [
                (propose, waits),
                (lambda: self.proposer.catchup_batch([[1]], [hidden[None]], [position], [state]), waits),
            ] * 2
            calls += [(lambda: self.proposer.take_drafter_kv(state), waits)]
        call, told = calls[data.draw(st.integers(0, len(calls) - 1))]
        with self.changing_nothing(), pytest.raises(RuntimeUseError, match=told):
            call()
        self.events["refused"] += 1

    # -- after every rule --------------------------------------------------------------------------------------

    @invariant()
    def rows_are_the_oracles(self) -> None:
        if not hasattr(self, "proposer"):
            return
        self.events["operations"] += 1
        self.proposer.audit()
        ledger, size = self.pool.ledger, self.pool.block_size
        assert ledger.loaned == sum(len(carried.blocks) for carried, _ in self.carried)
        for seq in self.sequences:
            state, dense = seq.state, seq.dense
            if seq.late:
                assert state.most_rows >= len(dense.positions)
                continue
            assert self.proposer.drafter_rows(state) == len(dense.positions)
            assert self.proposer.last_pair_key(state) == (dense.positions[-1] - 1 if dense.positions else None)
            assert len(state.lease.blocks) == self.pool.blocks_for(len(dense.positions)), "blocks that nobody needs"
            index = torch.tensor(list(self.pool.slots(state.lease, 0, state.rows)), dtype=torch.long, device=dense.device)
            for name, parts in dense.storage.items():
                for mine, theirs in zip(self.pool.storage[name], parts, strict=True):
                    rows = mine[:, index // size, :, index % size]  # [rows, layers, heads, dim]
                    want = theirs[:, 0, :, : state.rows].permute(2, 0, 1, 3)
                    torch.testing.assert_close(rows, want, rtol=1e-3, atol=1e-3)
            confidence = self.proposer.last_confidence(state)
            assert confidence is None or (0 < confidence <= 1 + 1e-6 and not math.isnan(confidence))

    def teardown(self) -> None:
        if not hasattr(self, "proposer"):
            return
        for seq in self.sequences:
            self.proposer.free_state(seq.state)
        for carried, _ in self.carried:
            self.proposer.free_drafter_kv(carried)
        ledger = self.pool.ledger
        assert (ledger.free, ledger.held, ledger.loaned, ledger.promised) == (self.pool.total, 0, 0, 0)


def machine_of(
    name: str, make: Callable[[], tuple[DraftRunner, DraftRunner]], operations: int, *, trim: str = "exact", steps: int = 50
):
    """A TestCase that runs about `operations` random operations; the same ones in every run.

    With SHRINK=1 in the environment, a failure is made as short as possible, which takes minutes.
    """
    machine = type(name, (Machine,), {"make": staticmethod(make), "trim": trim, "events": Counter()})
    case = machine.TestCase
    case.events = machine.events
    case.settings = settings(
        max_examples=max(operations // steps, 1),
        stateful_step_count=steps,
        deadline=None,
        derandomize=True,
        database=None,
        phases=[Phase.generate, *([Phase.shrink] if os.environ.get("SHRINK") else [])],
        report_multiple_bugs=False,
    )
    return case
