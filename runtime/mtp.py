"""`MtpProposer`: the lifecycle for drafters with one autoregressive head over a paged KV cache."""

from __future__ import annotations

import ctypes
import math
import operator
from collections.abc import Collection, Sequence
from numbers import Integral
from typing import NoReturn

import torch

from circuitgraph.errors import Fault, RuntimeUseError, did_you_mean
from circuitgraph.ops import PagedKV

from .metrics import Metrics
from .pool import BlockPool
from .proposer import DraftProposer, Hiddens
from .runner import DraftRunner, no_autograd
from .state import MtpProposerState, ProposerState
from .trim import TRIM, rows_missing

REFERENCE_BATCH = 64
"""What `propose_batch_max` says of a runner without compiled widths, which takes any number of rows."""


class MtpProposer(DraftProposer):
    """Drafts with a `DraftRunner`, KV rows in a `BlockPool`. See `DraftProposer` for the contract.

    Args:
        runner: compiled or reference.
        pool: made for the same circuit and device, and used by this proposer alone.
        trim: what stays after a verify (`trim.TRIM`). With "exact", follow `after_verify` with `catchup_batch` for the
            accepted drafts; skipping it costs accepted length, never correctness.

    Raises:
        RuntimeUseError: a pool that does not fit the runner, or an unknown policy.
    """

    def __init__(self, runner: DraftRunner, pool: BlockPool, *, trim: str = "exact"):
        if trim not in TRIM:
            raise RuntimeUseError(Fault(f"no trim policy '{trim}'", hint=did_you_mean(trim, TRIM)))
        if runner.block_size not in (None, pool.block_size):
            expected, got = str(runner.block_size), str(pool.block_size)
            raise RuntimeUseError(Fault("programs were compiled for another block size", expected=expected, got=got))
        runner.check_storage(pool.storage)
        pool.claim(self)
        self.runner = runner
        self.pool = pool
        self.trim = trim
        self.metrics = Metrics()
        self._batch = _Batch(runner, pool)
        self._lock = runner.lock

    # -- lives -------------------------------------------------------------------------------------------------

    def alloc_state(self) -> MtpProposerState:
        return self.alloc_state_for(None)

    def alloc_state_for(self, budget_tokens: int | None) -> MtpProposerState:
        if budget_tokens is not None and not (isinstance(budget_tokens, Integral) and budget_tokens >= 1):
            fault = Fault(
                "needs room for a token", subject="budget_tokens", expected="an int, 1 or more", got=repr(budget_tokens)
            )
            raise RuntimeUseError(fault)
        # Sequences draft up to the position limit only, so that bounds the promise too.
        rows = self.prefill_hidden_rows(budget_tokens or 0)
        with self._lock:
            return MtpProposerState(self, self.pool.open(rows))

    def free_state(self, state: ProposerState) -> None:
        with self._lock:
            mine = self._mine(state, freed_too=True)
            if mine.freed:
                return
            self.pool.close(mine.lease)
            mine.freed = True
            mine.rows, mine.last_pair_key, mine.last_drafts, mine.pending_catchup = 0, None, [], 0

    # -- context -----------------------------------------------------------------------------------------------

    def prefill_drafter(self, prompt_tokens: Sequence[int], hiddens: Hiddens, state: ProposerState, *, first_pos: int = 0) -> int:
        with self._lock:
            mine = self._mine(state)
            prompt_tokens = self._ids(prompt_tokens)
            given, wanted = len(hiddens), len(prompt_tokens) - 1
            if wanted < 0 or given not in (wanted, wanted + 1):
                self._refuse("prompt and hiddens do not go together", "hiddens", f"{wanted} or {wanted + 1} rows", str(given))
            return self._append([prompt_tokens[1:]], [hiddens[:wanted]], [first_pos + 1], [mine])

    def prefill_hidden_rows(self, max_seq_len: int) -> int:
        limit = self.runner.max_position
        return max_seq_len if limit is None else min(max_seq_len, limit)

    def catchup_drafter(self, tokens: Sequence[int], hiddens: Hiddens, row_base: int, pos_base: int, state: ProposerState) -> int:
        with self._lock:
            mine = self._mine(state)
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
            return self._append([self._ids(row) for row in tokens], hiddens, first_pos, self._all_mine(states))

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
            if len(ids) != len(rows):
                self._refuse("every token needs its hidden", "hiddens", f"{len(ids)} rows", str(len(rows)))
            self._check_tokens(ids)
            self._check_hiddens(rows)
            if ids:
                self._check_next(state, first)
        limit = self.runner.max_position
        # Rows past the limit would never be seen by a draft: drafting has stopped there.
        counts = [
            len(ids) if limit is None else max(min(len(ids), limit - first), 0)
            for ids, first in zip(tokens, first_pos, strict=True)
        ]
        if sum(counts) < sum(len(ids) for ids in tokens):
            self.metrics.refusals["position_limit"] += 1
        if not any(counts):
            return 0
        held = [len(state.lease.blocks) for state in states]
        if not self._reserve(states, counts):
            return 0
        try:
            self._batch.context(tokens, hiddens, first_pos, states, counts)
        except BaseException:
            self._give_back(states, held)
            raise
        for count, first, state in zip(counts, first_pos, states, strict=True):
            if count:
                state.rows += count
                state.last_pair_key = first + count - 2
                state.pending_catchup = max(state.pending_catchup - count, 0)
        self.metrics.context_rows += sum(counts)
        return sum(counts)

    # -- drafting ----------------------------------------------------------------------------------------------

    def propose(
        self,
        last_token: int,
        target_hidden: torch.Tensor,
        position: int,
        num_drafts: int,
        state: ProposerState,
        *,
        stop_ids: Collection[int] = (),
    ) -> list[int]:
        with self._lock:
            mine = [self._mine(state)]
            if self.runner.serves(1) is None:
                self._refuse(
                    "the runner has no draft programs", "runner", "a program for one row", f"widths {self.runner.widths}"
                )
            return self._propose(self._ids([last_token]), [target_hidden], [position], num_drafts, mine, stop_ids, None)[0]

    def propose_batch(
        self,
        last_tokens: Sequence[int],
        target_hiddens: Hiddens,
        positions: Sequence[int],
        num_drafts: int,
        states: Sequence[ProposerState],
        *,
        stop_ids: Collection[int] = (),
        out_confidence: list[list[float]] | None = None,
    ) -> list[list[int]] | None:
        with self._lock:
            self._same_length(last_tokens=last_tokens, target_hiddens=target_hiddens, positions=positions, states=states)
            mine = self._all_mine(states)
            if not mine:
                if out_confidence is not None:
                    out_confidence.clear()
                return []
            if self.runner.serves(len(mine)) is None:
                self.metrics.refusals["width"] += 1
                return None
            tokens = self._ids(last_tokens)
            return self._propose(tokens, target_hiddens, positions, num_drafts, mine, stop_ids, out_confidence)

    @no_autograd()
    def _propose(
        self,
        last_tokens: Sequence[int],
        hiddens: Hiddens,
        positions: Sequence[int],
        num_drafts: int,
        states: Sequence[MtpProposerState],
        stop_ids: Collection[int],
        out_confidence: list[list[float]] | None,
    ) -> list[list[int]]:
        self._check_tokens(last_tokens)
        self._check_hiddens(hiddens)
        if not isinstance(num_drafts, Integral) or num_drafts < 0:
            self._refuse("is no number of drafts", "num_drafts", "an int, 0 or more", repr(num_drafts))
        for state, position in zip(states, positions, strict=True):
            self._check_settled(state)
            self._check_next(state, position)
        # Which rows draft, and how far; the others stay out of the launch altogether.
        rows, counts = [], []
        limit = self.runner.max_position
        held = [len(state.lease.blocks) for state in states]
        for row, (state, position) in enumerate(zip(states, positions, strict=True)):
            count = num_drafts if limit is None else min(num_drafts, limit - position)
            if num_drafts and count < 1:
                self.metrics.refusals["position_limit"] += 1
            elif count:
                # Fewer drafts where memory ends; without room for one, the refusal is counted.
                count = max(min(count, self.pool.room(state.lease) - state.rows), 1)
                if self._reserve([state], [count]):
                    rows.append(row)
                    counts.append(count)
        drafts: list[list[int]] = [[] for _ in states]
        logprobs: list[list[float]] = [[] for _ in states]
        if rows:
            everyone = len(rows) == len(states)
            try:
                made = self._batch.chain(
                    [last_tokens[row] for row in rows],
                    hiddens if everyone else [hiddens[row] for row in rows],
                    [positions[row] for row in rows],
                    [states[row] for row in rows],
                    counts,
                )
            except BaseException:
                self._give_back(states, held)
                raise
            for row, count, ids, scores in zip(rows, counts, *made, strict=True):
                drafts[row], logprobs[row] = _cut(ids[:count], scores[:count], stop_ids)
        for state, position, ids, scores in zip(states, positions, drafts, logprobs, strict=True):
            state.last_drafts = ids
            state.last_confidence = _confidence(scores)
            if ids:
                state.pending_catchup = 0
                state.rows += len(ids)
                state.last_pair_key = position - 2 + len(ids)
                self.pool.shrink(state.lease, state.rows)
        if out_confidence is not None:
            out_confidence[:] = logprobs
        return [list(ids) for ids in drafts]

    def propose_batch_max(self) -> int:
        return max(self.runner.widths, default=REFERENCE_BATCH)

    def after_verify(self, num_accepted: int, state: ProposerState) -> None:
        with self._lock:
            mine = self._mine(state)
            drafted = mine.last_num_drafted
            if not 0 <= num_accepted <= drafted:
                self._refuse("more drafts accepted than there were", "num_accepted", f"0..{drafted}", str(num_accepted))
            kept = TRIM[self.trim](drafted, num_accepted)
            trimmed = drafted - kept
            mine.rows -= trimmed
            if mine.last_pair_key is not None:
                mine.last_pair_key -= trimmed
            mine.pending_catchup = rows_missing(drafted, num_accepted, kept)
            mine.last_drafts = []
            self.metrics.count_verify(drafted, num_accepted)

    # -- what a server may ask ---------------------------------------------------------------------------------

    def drafter_rows(self, state: ProposerState) -> int:
        with self._lock:
            return self._mine(state).rows

    def rows_behind(self, state: ProposerState, position: int) -> int:
        with self._lock:
            return max(position - self._mine(state).next_position, 0)

    def last_pair_key(self, state: ProposerState) -> int | None:
        with self._lock:
            return self._mine(state).last_pair_key

    def last_confidence(self, state: ProposerState) -> float | None:
        with self._lock:
            return self._mine(state).last_confidence

    # -- checks ------------------------------------------------------------------------------------------------

    def _refuse(self, message: str, subject: str, expected: str, got: str) -> NoReturn:
        raise RuntimeUseError(Fault(message, where="MtpProposer", subject=subject, expected=expected, got=got))

    def _mine(self, state: ProposerState, *, freed_too: bool = False) -> MtpProposerState:
        if not isinstance(state, MtpProposerState) or state.owner is not self:
            owner = getattr(state, "owner", None)
            self._refuse("belongs to another proposer", "state", f"one made by {self!r}", f"one of {owner!r}")
        if state.freed and not freed_too:
            self._refuse("was freed", "state", "a live state", "a freed one")
        return state

    def _all_mine(self, states: Sequence[ProposerState]) -> list[MtpProposerState]:
        mine = [self._mine(state) for state in states]
        if len({id(state) for state in mine}) != len(mine):
            self._refuse("one sequence cannot be in a batch twice", "states", "distinct states", "a state listed twice")
        return mine

    def _same_length(self, **lists: Sequence | torch.Tensor) -> None:
        lengths = {name: len(items) for name, items in lists.items()}
        if len(set(lengths.values())) > 1:
            got = ", ".join(f"{name} {length}" for name, length in lengths.items())
            self._refuse("lists of unequal length", "batch", "one item a sequence", got)

    def _check_settled(self, state: MtpProposerState) -> None:
        """Unverified rows would become context for good."""
        if state.last_drafts:
            self._refuse("drafts are waiting for after_verify", "state", "after_verify first", f"{state.last_drafts} unverified")

    def _check_next(self, state: MtpProposerState, position: int) -> None:
        """The row of the token at `position` has pair key position - 1, which must be newer than every row's."""
        lowest = state.next_position
        if position < lowest:
            self._refuse("that position has a row already, or no token before it", "position", f"{lowest} or more", str(position))

    def _ids(self, tokens: Sequence[int]) -> list[int]:
        """Tokens as plain integers: of a list, an array or a tensor."""
        values = tokens.tolist() if hasattr(tokens, "tolist") else tokens  # type: ignore[attr-defined]
        try:
            return [operator.index(token) for token in values]
        except TypeError:
            self._refuse("are not integers in a row", "tokens", "a sequence of ints", repr(tokens)[:80])

    def _check_tokens(self, tokens: Sequence[int]) -> None:
        vocab = self.runner.vocab_size
        for token in tokens:
            if not 0 <= token < vocab:
                self._refuse("token outside the vocabulary", "token", f"0..{vocab - 1}", str(token))

    def _check_hiddens(self, hiddens: Hiddens) -> None:
        size, device = self.runner.hidden_size, self.runner.device
        for row in [hiddens] if isinstance(hiddens, torch.Tensor) else hiddens:
            dims = 2 if row is hiddens else 1
            if not isinstance(row, torch.Tensor):
                self._refuse("do not fit", "hiddens", "tensors", type(row).__name__)
            if row.dim() != dims or row.shape[-1] != size or not row.is_floating_point() or row.device != device:
                shape = "rows, " if dims == 2 else ""
                got = f"{row.dtype}{list(row.shape)} on {row.device}"
                self._refuse("do not fit", "hiddens", f"float[{shape}{size}] on {device}", got)

    def _reserve(self, states: Sequence[MtpProposerState], counts: Sequence[int]) -> bool:
        """Blocks for `counts` more rows: all or, counted and returning False, none."""
        if not self.pool.grow([(state.lease, state.rows + count) for state, count in zip(states, counts, strict=True)]):
            self.metrics.refusals["pool_exhausted"] += len(states)
            return False
        self.metrics.peak_blocks = max(self.metrics.peak_blocks, self.pool.held)
        return True

    def _give_back(self, states: Sequence[MtpProposerState], held: Sequence[int]) -> None:
        """After a failed call: every state has the blocks that it had before."""
        for state, blocks in zip(states, held, strict=True):
            self.pool.shrink(state.lease, blocks * self.pool.block_size)


def _cut(ids: list[int], scores: list[float], stop_ids: Collection[int]) -> tuple[list[int], list[float]]:
    """Drafts up to and with the first stop id."""
    for index, token in enumerate(ids):
        if token in stop_ids:
            return ids[: index + 1], scores[: index + 1]
    return ids, scores


def _confidence(logprobs: Sequence[float]) -> float | None:
    measured = [value for value in logprobs if not math.isnan(value)]
    return math.exp(min(measured)) if measured else None


class _Column:
    """A growing int32 tensor written like a list: filling it from Python integers allocates nothing on the host."""

    def __init__(self, device: torch.device):
        self.device = device
        self._resize(64)

    def _resize(self, size: int) -> None:
        self._views: dict[int, torch.Tensor] = {}
        self._host = torch.zeros(size, dtype=torch.int32)
        self._cells = (ctypes.c_int32 * size).from_address(self._host.data_ptr())

    def fill(self, values: Sequence[int]) -> torch.Tensor:
        """The values as int32[len(values)] on the device, valid until the next fill."""
        count = len(values)
        if count > len(self._cells):
            self._resize(2 * count)
        self._cells[:count] = values
        view = self._views.get(count)
        if view is None:
            view = self._host[:count]
            if count <= 64:  # the sizes of drafting, which come again with every step
                self._views[count] = view
        return view.to(self.device)


class _Batch:
    """Builds a call's tensors from states, in memory that is kept from call to call, and runs it."""

    def __init__(self, runner: DraftRunner, pool: BlockPool):
        self.runner, self.pool = runner, pool
        columns = [_Column(runner.integers_on) for _ in range(7)]
        self.token, self.position, self.seq, self.length, self.slot, self.start, self.table = columns

    def chain(
        self,
        tokens: Sequence[int],
        hiddens: Hiddens,
        positions: Sequence[int],
        states: Sequence[MtpProposerState],
        counts: Sequence[int],
    ) -> tuple[list[list[int]], list[list[float]]]:
        """counts[i] drafts for states[i], whose rows have blocks already, and their log-probabilities."""
        steps = max(counts)
        rows = [list(self.pool.slots(state.lease, state.rows, count)) for state, count in zip(states, counts, strict=True)]
        written = [row[step] if step < len(row) else -1 for step in range(steps) for row in rows]
        slots = self.slot.fill(written).view(steps, len(states))
        caches = self._caches(states, range(len(states)), [state.rows + 1 for state in states], slots[0])
        token, position = self.token.fill(tokens), self.position.fill(positions)
        return self.runner.chain_lists(steps, token, _stacked([hiddens]), position, caches, slots)

    def context(
        self,
        tokens: Sequence[Sequence[int]],
        hiddens: Sequence[Hiddens],
        first_pos: Sequence[int],
        states: Sequence[MtpProposerState],
        counts: Sequence[int],
    ) -> None:
        """Append the first counts[i] rows of every sequence, whose blocks are there already."""
        ids: list[int] = []
        positions: list[int] = []
        seq: list[int] = []
        lengths: list[int] = []
        slots: list[int] = []
        for index, (state, count) in enumerate(zip(states, counts, strict=True)):
            ids += tokens[index][:count]
            positions += range(first_pos[index], first_pos[index] + count)
            seq += [index] * count
            lengths += range(state.rows + 1, state.rows + count + 1)
            slots += self.pool.slots(state.lease, state.rows, count)
        hidden = _stacked([rows[:count] for rows, count in zip(hiddens, counts, strict=True) if count])
        caches = self._caches(states, seq, lengths, self.slot.fill(slots))
        self.runner.context(self.token.fill(ids), hidden, self.position.fill(positions), caches)

    def _caches(
        self, states: Sequence[MtpProposerState], seq: Sequence[int], lengths: Sequence[int], slot: torch.Tensor
    ) -> dict[str, PagedKV]:
        width = max(len(state.lease.blocks) for state in states)
        blocks: list[int] = []
        for state in states:
            blocks += state.lease.blocks
            blocks += [0] * (width - len(state.lease.blocks))  # beyond the sequence's length: never read
        table = self.table.fill(blocks).view(len(states), width)
        start = self.start.fill([0] * len(states))
        addressing = (slot, self.seq.fill(seq), table, start, self.length.fill(lengths))
        return {name: PagedKV(k, v, *addressing) for name, (k, v) in self.pool.storage.items()}


def _stacked(parts: Sequence[Hiddens]) -> torch.Tensor:
    """All hiddens as one [n, H]; a single tensor is passed on as it is."""
    tensors = [part if isinstance(part, torch.Tensor) else torch.stack(list(part)) for part in parts]
    return tensors[0] if len(tensors) == 1 else torch.cat(tensors)
