"""`MtpProposer`: the lifecycle of drafting, for every kind of drafter (`kinds`) over a paged KV cache, or over none."""

from __future__ import annotations

import functools
import logging
import math
import threading
from collections.abc import Collection, Mapping, Sequence
from typing import Any, cast

import torch

from circuitgraph.errors import Fault, RuntimeUseError, did_you_mean

from . import drafting
from .arguments import is_whole, of_kind, shown, whole
from .batch import Batch
from .carried import CarriedKV
from .device_form import DeviceForm
from .draft_binding import DraftBinding, bind_draft, reasons_against
from .grammar import Bitmask, Grammar, Grammars
from .kinds import Block
from .metrics import Metrics
from .mtp_checks import FARTHEST, WHERE, equally_long
from .mtp_device import DeviceMethods
from .pool import BlockPool
from .proposer import DraftProposer, Hiddens
from .runner import DraftRunner, no_autograd
from .state import DEFERRED, Entry, MtpProposerState, ProposerState
from .trim import TRIM

log = logging.getLogger("circuitgraph.runtime")

REFERENCE_BATCH = 64
"""What `propose_batch_max` says of a runner without compiled widths, which takes any number of rows."""


class MtpProposer(DeviceMethods, DraftProposer):
    """Drafts with a `DraftRunner`, KV rows in a `BlockPool`. See `DraftProposer` for the contract.

    It drives MTP heads and EAGLE (a row a draft), Medusa (no rows) and DFlash (a block of scratch rows) alike: the runner's
    `kind` says what differs. Without rows, prefill and catch-up check their arguments and write nothing.

    Args:
        runner: compiled or reference.
        pool: made for the same circuit and device, and used by this proposer alone.
        trim: what stays after a verify (`trim.TRIM`). With "exact", follow `after_verify` with `catchup_batch` for the
            accepted drafts; skipping it costs accepted length, never correctness. Only chains have rows that are not
            exact: for other kinds all policies are "exact".

    Raises:
        RuntimeUseError: a pool that does not fit the runner, an unknown policy, or a program that no proposer can drive.
    """

    def __init__(self, runner: DraftRunner, pool: BlockPool, *, trim: str = "exact"):
        if not isinstance(trim, str) or trim not in TRIM:
            raise RuntimeUseError(Fault(f"no trim policy '{trim}'", where=WHERE, hint=did_you_mean(str(trim), TRIM)))
        of_kind(runner, DraftRunner, "runner", WHERE, "a DraftRunner")
        of_kind(pool, BlockPool, "pool", WHERE, "a BlockPool")
        _check_ids(runner)
        _check_pool(runner, pool)
        pool.claim(self)
        self.runner = runner
        self.kind = runner.kind
        self.pool = pool
        self.trim = "exact" if self.kind.at_once else trim
        self.metrics = Metrics(ledger=lambda: pool.ledger)
        self._own = runner
        pool.used_by(runner)
        self._batch = Batch(runner, pool)
        self._device = DeviceForm(Batch(runner, pool, on_device=True), self.trim)
        self._bitmask: Bitmask | None = None
        self._warned = False
        self._deferred: tuple[MtpProposerState, torch.Tensor] | None = None
        self._carried: set[CarriedKV] = set()
        self._lock = _Locks(self._batch)

    # -- lives -------------------------------------------------------------------------------------------------

    def alloc_state(self) -> MtpProposerState:
        return self.alloc_state_for(None)

    def alloc_state_for(self, budget_tokens: int | None) -> MtpProposerState:
        if budget_tokens is not None:
            whole(budget_tokens, "budget_tokens", WHERE, least=1, message="needs room for a token")
        # Sequences draft up to the position limit only, so that bounds the promise too.
        rows = self._below_limit(self.kind.promised(int(budget_tokens))) if budget_tokens else 0
        with self._lock:
            return MtpProposerState(self, self.pool.open(rows), keeps_rows=self.kind.keeps_rows)

    def free_state(self, state: ProposerState) -> None:
        with self._lock:
            mine = self._mine(state, freed_too=True)
            if mine.freed:
                return
            self.pool.close(mine.lease)
            self._device.release(mine)
            mine.clear()
            mine.freed = True
            if self._deferred is not None and self._deferred[0] is mine:
                self._deferred = None

    # -- carrying KV over a turn -------------------------------------------------------------------------------

    def take_drafter_kv(self, state: ProposerState) -> CarriedKV | None:
        with self._lock:
            mine = self._mine(state)
            self._check_settled(mine)
            if not mine.rows:
                return None
            self.pool.shrink(mine.lease, mine.rows)
            history = mine.history
            carried = CarriedKV(self, mine.model, tuple(self.pool.lend(mine.lease)), history, history.digest())
            self._carried.add(carried)
            self._device.release(mine)
            mine.clear()
            return carried

    def install_drafter_kv(self, state: ProposerState, carried: CarriedKV, *, prefix: Sequence[int] | None = None) -> bool:
        with self._lock:
            mine = self._mine(state)
            self._check_settled(mine)
            given = None if prefix is None else self._ids(prefix)
            reason, rows = self._carries(mine, carried, given)
            if reason:
                self.metrics.refusals[f"carry_{reason}"] += 1
                return False
            self._carried.remove(carried)
            self.pool.adopt(mine.lease, carried.blocks)
            self.pool.shrink(mine.lease, rows)
            mine.history, mine.model = carried.history, carried.model
            mine.history.keep(rows)
            if given is not None:
                mine.history.read(mine.history.common(given), [])
            mine.next_token = mine.next_position
            return True

    def _carries(self, state: MtpProposerState, carried: CarriedKV, prefix: list[int] | None) -> tuple[str | None, int]:
        """Why the KV cannot go into the state, or how many of its rows may."""
        if not isinstance(carried, CarriedKV) or carried.owner is not self:
            return "owner", 0
        if carried not in self._carried:
            return "gone", 0
        if state.rows or state.lease.blocks:
            return "occupied", 0
        if carried.model != self.runner.model_digest():
            return "model", 0
        if carried.digest != carried.history.digest():
            return "digest", 0
        rows = carried.rows if prefix is None else carried.history.vouched(carried.history.common(prefix))
        return (None, rows) if rows else ("prefix", 0)

    def free_drafter_kv(self, carried: CarriedKV) -> None:
        with self._lock:
            if not isinstance(carried, CarriedKV) or carried not in self._carried:
                got = "one that went back before" if getattr(carried, "owner", None) is self else f"{carried!r}"
                self._refuse("is not on loan from this pool", "carried", "what take_drafter_kv gave", got)
            self._carried.remove(carried)
            self.pool.free(carried.blocks)

    # -- context -----------------------------------------------------------------------------------------------

    def prefill_drafter(self, prompt_tokens: Sequence[int], hiddens: Hiddens, state: ProposerState, *, first_pos: int = 0) -> int:
        with self._lock:
            mine = self._mine(state)
            prompt_tokens = self._ids(prompt_tokens)
            if not prompt_tokens:
                self._refuse("is empty", "prompt_tokens", "a token or more", "none")
            given, wanted = self._rows_of(hiddens), len(prompt_tokens) - 1
            if given not in (wanted, wanted + 1):
                self._refuse("prompt and hiddens do not go together", "hiddens", f"{wanted} or {wanted + 1} rows", str(given))
            self._check_first(mine, first_pos, prompt_tokens[0])
            self._check_tokens(prompt_tokens[:1])
            refusals = self.metrics.refusals["pool_exhausted"]
            written = self._append([prompt_tokens[1:]], [hiddens[:wanted]], [first_pos + 1], [mine])
            if refusals == self.metrics.refusals["pool_exhausted"]:
                mine.read(first_pos, prompt_tokens)  # the first token, too
            return written

    def prefill_hidden_rows(self, max_seq_len: int) -> int:
        return self._below_limit(self.kind.hidden_rows(whole(max_seq_len, "max_seq_len", WHERE)))

    def prefill_uses_shared_buffers(self) -> bool:
        return False  # programs have a workspace of their own

    def needs_comm(self) -> bool:
        return False  # the forward runs whole on one device

    def block_gamma(self) -> int | None:
        return self.kind.gamma if isinstance(self.kind, Block) else None

    def catchup_drafter(self, tokens: Sequence[int], hiddens: Hiddens, row_base: int, pos_base: int, state: ProposerState) -> int:
        with self._lock:
            mine = self._mine(state)
            if not is_whole(row_base):
                self._refuse("is no row", "row_base", "an int", shown(row_base))
            if row_base != mine.rows:
                self.metrics.refusals["row_base"] += 1
                return 0
            return self._append([self._ids(tokens)], [hiddens], [pos_base], [mine])

    def catchup_batch(
        self,
        tokens: Sequence[Sequence[int]],
        hiddens: Sequence[Hiddens],
        first_pos: Sequence[int],
        states: Sequence[ProposerState],
    ) -> int:
        with self._lock:
            self._same_length(tokens=tokens, hiddens=hiddens, first_pos=first_pos, states=states)
            return self._append([self._ids(row) for row in tokens], hiddens, list(first_pos), self._all_mine(states))

    @no_autograd()
    def _append(
        self,
        tokens: Sequence[Sequence[int]],
        hiddens: Sequence[Hiddens],
        first_pos: Sequence[int],
        states: Sequence[MtpProposerState],
    ) -> int:
        """Rows (hiddens[i][j], tokens[i][j]) at the end of states[i]: all of them, or none."""
        for ids, rows, first, state in zip(tokens, hiddens, first_pos, states, strict=True):
            self._check_settled(state)
            if len(ids) != self._rows_of(rows):
                self._refuse("every token needs its hidden", "hiddens", f"{len(ids)} rows", str(len(rows)))
            self._check_tokens(ids)
            self._check_hiddens(rows)
            self._check_position(first, state.next_position if ids else 0)
        limit = self.runner.max_position
        # Rows past the limit would never be seen by a draft: drafting has stopped there.
        counts = [
            len(ids) if limit is None else max(min(len(ids), limit - first), 0)
            for ids, first in zip(tokens, first_pos, strict=True)
        ]
        if not self.kind.keeps_rows:
            counts = [0] * len(counts)
        elif sum(counts) < sum(len(ids) for ids in tokens):
            self.metrics.refusals["position_limit"] += 1
        held = [len(state.lease.blocks) for state in states]
        if any(counts):
            if not self._reserve([(state, state.rows + count) for state, count in zip(states, counts, strict=True)]):
                return 0
            try:
                self._batch.context(tokens, hiddens, first_pos, states, counts)
            except BaseException:
                self._give_back(states, held)
                raise
        for ids, count, first, state in zip(tokens, counts, first_pos, states, strict=True):
            if ids:
                state.read(first, ids)
            if count:
                self._begin(state, first)
                state.history.append(first, count)
        self.metrics.context_rows += sum(counts)
        return sum(counts)

    # -- drafting ----------------------------------------------------------------------------------------------

    def propose(
        self,
        last_token: int,
        target_hidden: torch.Tensor | None,
        position: int,
        num_drafts: int,
        state: ProposerState,
        *,
        grammar: Grammar | None = None,
        stop_confidence: float | None = None,
        stop_ids: Collection[int] = (),
        draft_embed_target: torch.Tensor | None = None,
        target_hidden_stack: torch.Tensor | None = None,
    ) -> list[int]:
        with self._lock:
            mine = [self._mine(state)]
            if self.runner.serves(1) is None:
                widths = f"widths {self.runner.widths}"
                self._refuse("the runner has no draft programs", "runner", "a program for one row", widths)
            hidden = self._one_hidden(target_hidden, target_hidden_stack)
            self._check_threshold(stop_confidence)
            self._check_row(draft_embed_target, self.runner.embed_size)
            if grammar is not None and draft_embed_target is not None:
                got, hint = "both", "Where nothing is allowed there is no draft, and nobody looks at a deferred one."
                self._refuse("does not go with a grammar", "draft_embed_target", "one of the two", got, hint)
            stops = self._stops(stop_ids)
            call = drafting.Call([], [], self._ids([last_token]), cast(Hiddens, [hidden]), [position], [], stop_ids=stops)
            call.grammars = self._grammars([grammar], num_drafts)
            if stop_confidence is not None:
                call.stop_logprob = math.log(stop_confidence) if stop_confidence else -math.inf
            call.embed_target = draft_embed_target
            return self._propose(call, mine, num_drafts, None)[0]

    def propose_batch(
        self,
        last_tokens: Sequence[int] | torch.Tensor,
        target_hiddens: Hiddens,
        positions: Sequence[int] | torch.Tensor,
        num_drafts: int,
        states: Sequence[ProposerState],
        *,
        grammars: Sequence[Grammar | None] | None = None,
        stop_ids: Collection[int] = (),
        out_confidence: list[list[float]] | None = None,
        accepted: torch.Tensor | None = None,
        out: torch.Tensor | None = None,
    ) -> list[list[int]] | torch.Tensor | None:
        with self._lock:
            if grammars is not None or not equally_long(target_hiddens, last_tokens, positions, states):
                also = {} if grammars is None else {"grammars": grammars}
                lists = {"last_tokens": last_tokens, "target_hiddens": target_hiddens, "positions": positions, "states": states}
                self._same_length(**lists, **also)
            mine = self._all_mine(states)
            if out is not None:
                extras = {"grammars": grammars, "stop_ids": self._stops(stop_ids) or None, "out_confidence": out_confidence}
                return self._propose_on_device(last_tokens, target_hiddens, positions, num_drafts, mine, accepted, out, extras)
            if accepted is not None:
                self._refuse("belongs to the device form", "accepted", "an out= tensor beside it", "none")
            if not mine:
                if out_confidence is not None:
                    out_confidence.clear()
                return []
            if self.runner.serves(len(mine)) is None:
                self.metrics.refusals["width"] += 1
                return None
            where = positions.tolist() if isinstance(positions, torch.Tensor) else list(positions)
            stops = self._stops(stop_ids)
            call = drafting.Call([], [], self._ids(last_tokens), target_hiddens, where, [], stop_ids=stops)
            call.grammars = None if grammars is None else self._grammars(grammars, num_drafts)
            return self._propose(call, mine, num_drafts, out_confidence)

    @no_autograd()
    def _propose(
        self,
        call: drafting.Call,
        states: Sequence[MtpProposerState],
        num_drafts: int,
        out_confidence: list[list[float]] | None,
    ) -> list[list[int]]:
        """`call` has the caller's whole lists; the rows that can draft, and how far, are decided here."""
        if out_confidence is not None and not isinstance(out_confidence, list):
            self._refuse("cannot receive anything", "out_confidence", "a list", type(out_confidence).__name__)
        self._check_tokens(call.tokens)
        self._check_hiddens(call.hiddens)
        self._check_count(num_drafts)
        for state, position in zip(states, call.positions, strict=True):
            # The checks say what is wrong; that nothing is can be seen without them, which is most of a call's time.
            written = state.history.positions
            newest = written[-1] if written else 0
            if state.unsettled or state.last_drafts or type(position) is not int or not newest < position <= FARTHEST:
                self._check_settled(state)
                self._check_next(state, position)
            call.before.append(len(written))
        entry = Entry(states, call.tokens, call.positions)
        try:
            self._choose_rows(call, states, num_drafts)
            call.meanwhile = functools.partial(self._enter, call, entry)
            made = self._drafted(call)
            if not entry.made:
                self._enter(call, entry)
            drafts, logprobs = made.ids, made.scores
            if len(call.rows) < len(states):
                drafts, logprobs = [[] for _ in states], [[] for _ in states]
                for row, ids, scores in zip(call.rows, made.ids, made.scores, strict=True):
                    drafts[row], logprobs[row] = ids, scores
            short = [len(ids) for ids in made.ids] != call.counts
            if short:
                self._shorten(call, made.ids)
            if self.kind.at_once:
                for state in call.states:  # rows that were scratch
                    self.pool.shrink(state.lease, state.rows)
            for state, ids, scores in zip(states, drafts, logprobs, strict=True):
                state.last_scores = scores
                state.last_drafts = ids
        except BaseException:
            entry.undo()
            for state in states:
                state.last_drafts = []
                self.pool.shrink(state.lease, state.rows)  # nobody has blocks beyond those of its rows between calls
            raise
        self.metrics.skipped_rows += sum(entry.gaps)
        if short:
            self._count_missing(call, made.ids, entry.gaps)
        # Of this propose or of none: an id of an earlier one would be taken for this one's.
        self._deferred = None if made.deferred is None else (states[0], made.deferred)
        if out_confidence is not None:
            out_confidence[:] = logprobs
        return [ids[:] for ids in drafts]

    def _enter(self, call: drafting.Call, entry: Entry) -> None:
        """What is known of a propose before its drafts are."""
        entry.make(call.rows, [self.kind.adds(count) for count in call.counts], self.runner.model_digest)
        if call.rows:
            self._count_path(len(call.rows), masked=call.grammars is not None)

    def _shorten(self, call: drafting.Call, drafts: Sequence[Sequence[int]]) -> None:
        """Take back the rows of drafts that did not come."""
        for state, count, ids in zip(call.states, call.counts, drafts, strict=True):
            if len(ids) < count:
                state.history.keep(state.rows - self.kind.adds(count) + self.kind.adds(len(ids)))
                self.pool.shrink(state.lease, state.rows)

    def _count_missing(self, call: drafting.Call, drafts: Sequence[Sequence[int]], gaps: Sequence[int]) -> None:
        """Sequences without any draft: why, and that no row came behind a gap."""
        for row, ids, gap in zip(call.rows, drafts, gaps, strict=True):
            if not ids:
                self.metrics.skipped_rows -= gap
                self.metrics.refusals["grammar" if call.grammars and call.grammars.masked(row) else "not_finite"] += 1

    def _drafted(self, call: drafting.Call) -> drafting.Drafted:
        """Run the rows that were chosen; matchers are where they were afterwards, whatever happens."""
        if not call.rows:
            return drafting.Drafted([], [])
        try:
            return drafting.run(self._batch, call)
        finally:
            if call.grammars:
                call.grammars.rollback()

    def _choose_rows(self, call: drafting.Call, states: Sequence[MtpProposerState], num_drafts: int) -> None:
        """Reserve blocks and keep in `call` the rows that draft: the others stay out of the launch altogether."""
        limit, kind = self.runner.max_position, self.kind
        count = kind.drafts(num_drafts, max(call.positions), limit)
        more = kind.writes(count)
        # Where the farthest sequence is not held up by the limit, no one is.
        if count >= 1 and count == kind.drafts(num_drafts, 0, None) and more == kind.writes(count, max(call.positions), limit):
            leases = [state.lease for state in states]
            if self._cover(leases, call.before, more):
                call.slots = self.pool.slots_of(leases, call.before, more) if more else ([], {})
                call.rows, call.counts, call.states = list(range(len(states))), [count] * len(states), list(states)
                return
        for row, (state, position) in enumerate(zip(states, call.positions, strict=True)):
            count = kind.drafts(num_drafts, position, limit)
            if count < 1:
                if num_drafts:
                    self.metrics.refusals["position_limit"] += 1
                continue
            rows = state.rows
            if rows + kind.writes(count, position, limit) > len(state.lease.blocks) * self.pool.block_size:
                # Fewer drafts where memory ends; without room for one, the refusal is counted.
                count = max(kind.fits(count, self.pool.room(state.lease) - rows, position, limit), 1)
                if not self._reserve([(state, rows + kind.writes(count, position, limit))]):
                    continue
            call.rows.append(row)
            call.counts.append(count)
            call.states.append(state)
        if len(call.rows) < len(states):
            call.tokens = [call.tokens[row] for row in call.rows]
            call.hiddens = [call.hiddens[row] for row in call.rows]
            call.positions = [call.positions[row] for row in call.rows]
            call.before = [call.before[row] for row in call.rows]

    def _grammars(self, given: Sequence[Grammar | None], num_drafts: int) -> Grammars | None:
        """The grammars of a call, checked; None when there are none."""
        if all(item is None for item in given):
            return None
        words = self.runner.mask_words
        if words is None or self.runner.serves(len(given), masked=True) is None:
            hint = f"Compile with {self.runner.masked_entries}"
            hint += ", or draft without the grammar: the text stays right, fewer drafts are accepted."
            self._refuse("no program drafts under a mask", "grammar", "None", "a grammar", hint)
        if self._bitmask is None or self._bitmask.device != self.runner.device or self._bitmask.words != words:
            self._bitmask = Bitmask(words, self.runner.device)
        grammars = Grammars(given, self._bitmask)
        if grammars.fixed and num_drafts > 1 and not self._warned:
            self._warned = True
            log.warning("a fixed mask is held over all draft positions; give the grammar's matcher for a mask of each")
        return grammars

    def propose_batch_max(self) -> int:
        return max(self.runner.widths, default=REFERENCE_BATCH)

    def read_deferred_draft_token(self) -> int:
        with self._lock:
            if self._deferred is None:
                self._refuse("no draft was left on the device", "draft", "a propose with draft_embed_target before", "none")
            state, token = self._deferred
            value = int(token)
            if state.last_drafts[-1:] == [DEFERRED]:
                state.last_drafts[-1] = value
            return value

    def after_verify(self, num_accepted: int, state: ProposerState) -> None:
        with self._lock:
            mine = self._mine(state)
            self._check_known(mine)
            drafted = mine.last_num_drafted
            self._check_accepted(num_accepted, drafted)
            if mine.proposed_at is not None:
                known = mine.last_drafts[:num_accepted]
                known = known[: known.index(DEFERRED)] if DEFERRED in known else known
                mine.read(mine.proposed_at + 1, known)
                mine.next_token = mine.proposed_at + num_accepted + 1
            written = self.kind.adds(drafted)
            mine.history.keep(mine.rows - written + cast(int, TRIM[self.trim](written, min(num_accepted, written))))
            mine.last_drafts, mine.proposed_at = [], None
            self.pool.shrink(mine.lease, mine.rows)
            self.metrics.count_verify(drafted, num_accepted)

    # -- what a server may ask ---------------------------------------------------------------------------------

    def drafter_rows(self, state: ProposerState) -> int:
        with self._lock:
            return self._mine(state).rows

    def rows_behind(self, state: ProposerState, position: int) -> int:
        with self._lock:
            mine = self._mine(state)
            if not is_whole(position):
                self._refuse("is no position", "position", "an int", shown(position))
            return max(position - mine.next_position, 0) if self.kind.keeps_rows else 0

    def last_pair_key(self, state: ProposerState) -> int | None:
        with self._lock:
            return self._mine(state).last_pair_key

    def last_confidence(self, state: ProposerState) -> float | None:
        with self._lock:
            return self._mine(state).last_confidence

    # -- the forward as a circuit ------------------------------------------------------------------------------

    def circuit_draft(
        self, config: Any, levers: Mapping[str, Any] | None = None, *, reasons: list[str] | None = None
    ) -> DraftBinding | None:
        with self._lock:
            if config is None or isinstance(config, str | bytes | int | float | list | tuple):
                self._refuse("is no config", "config", "a mapping, or an object with attributes", shown(config))
            of_kind(levers, (Mapping, type(None)), "levers", WHERE, "a mapping of names to values")
            of_kind(reasons, (list, type(None)), "reasons", WHERE, "a list that receives them")
            against = reasons_against(self._own, config, levers or {})
            if reasons is not None:
                reasons[:] = against
            manifest = getattr(self._own, "manifest", None)
            return None if against else bind_draft(self._own, self.pool, manifest.family if manifest else "")

    def set_circuit_draft(self, runner: DraftRunner | None) -> None:
        with self._lock:
            other = self._own if runner is None else runner
            of_kind(other, DraftRunner, "runner", WHERE, "a DraftRunner or None")
            _check_pool(other, self.pool)
            for what in ("facts", "dtypes", "states"):
                have, wanted = (getattr(each.circuit, what) for each in (other, self._own))
                if have != wanted:
                    self._refuse("computes other rows", f"runner's {what}", str(wanted), str(have))
            for what in ("kind", "vocab_size", "hidden_size"):
                have, wanted = (getattr(each, what) for each in (other, self._own))
                if have != wanted:
                    self._refuse("drafts in another way", f"runner's {what}", str(wanted), str(have))
            self.pool.used_by(other)
            for batch in (self._batch, self._device.batch):
                batch.use(other)
            self.runner = other


class _Locks:
    """The proposer's own lock, and that of the runner in use: staging memory is the runner's, and several may share it.

    Inside a call, code of the server's may run (a matcher). From there no call may begin: it would find a call half done.
    """

    def __init__(self, batch: Batch):
        self._batch, self._own = batch, threading.RLock()  # an RLock lets its own thread in, so that it can be told
        self._entered: list[Any] = []

    def __enter__(self) -> None:
        self._own.acquire()
        try:
            if self._entered:
                hint = "A matcher, or what else runs inside of a call, has to come back first."
                raise RuntimeUseError(Fault("a call of this proposer is under way in this thread", where=WHERE, hint=hint))
            lock = self._batch.runner.lock
            lock.acquire()  # for as long as another proposer's call takes: Ctrl-C may come meanwhile
        except BaseException:
            self._own.release()
            raise
        self._entered.append(lock)

    def __exit__(self, *exception: object) -> None:
        self._entered.pop().release()
        self._own.release()


def _check_ids(runner: DraftRunner) -> None:
    """Drafts are fed back and handed out as the target's ids."""
    scored = runner.circuit.types[dict(runner.circuit.outputs)["logits"]].shape[-1]  # type: ignore[union-attr]
    if dict(runner.circuit.facts).get("ids") == "own" and scored != runner.vocab_size:
        got, hint = f"its own {scored} ids", "Compile with the switch ids=target."
        raise RuntimeUseError(
            Fault("drafts ids of its own", where=runner.circuit.name, expected="the target's ids", got=got, hint=hint)
        )


def _check_pool(runner: DraftRunner, pool: BlockPool) -> None:
    if runner.block_size not in (None, pool.block_size):
        expected, got = str(runner.block_size), str(pool.block_size)
        raise RuntimeUseError(Fault("programs were compiled for another block size", expected=expected, got=got))
    runner.check_storage(pool.storage)
