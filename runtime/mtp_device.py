"""The device form of `MtpProposer`: what is checked, reserved and remembered around `device_form`'s launches."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

import torch

from .arguments import is_whole, shown
from .device_form import DeviceForm, outcome, settled, started
from .kinds import Kind
from .mtp_memory import Memory
from .proposer import Hiddens
from .runner import no_autograd
from .state import MtpProposerState, ProposerState, Unsettled


class DeviceMethods(Memory):
    """Part of `MtpProposer`; `DraftProposer` documents the calls."""

    trim: str
    kind: Kind
    _device: DeviceForm
    _lock: Any

    @no_autograd()
    def _propose_on_device(
        self,
        last_tokens: Sequence[int] | torch.Tensor,
        hiddens: Hiddens,
        positions: Sequence[int] | torch.Tensor,
        num_drafts: int,
        states: list[MtpProposerState],
        accepted: torch.Tensor | None,
        out: torch.Tensor,
        extras: Mapping[str, Any],
    ) -> torch.Tensor | None:
        for name, value in extras.items():
            if value is not None:
                self._refuse("needs the host between drafts, or their readback", name, "nothing of it in the device form", "one")
        n = len(states)
        self._check_count(num_drafts)
        if num_drafts < 1:
            self._refuse("is no number of drafts", "num_drafts", "1 or more in the device form", str(num_drafts))
        self._check_ints("out", out, (n, num_drafts))
        self._check_ints("last_tokens", last_tokens, (n,))
        if isinstance(positions, torch.Tensor):
            self._check_ints("positions", positions, (n,))
        self._check_hiddens(hiddens)
        waiting = [bool(state.last_drafts) or bool(state.unsettled and not state.unsettled[-1].caught_up) for state in states]
        if accepted is not None:
            self._check_ints("accepted", accepted, (n,))
        elif any(waiting):
            self._refuse("drafts were verified, with what result?", "accepted", f"int32[{n}]", "None")
        if not isinstance(positions, torch.Tensor):
            for state, position in zip(states, positions, strict=True):
                before = _proposed_at(state)
                self._check_position(position, state.next_position if before is None else before + 1)
        if not n:
            return out
        path = self.runner.serves(n)
        if path is None:
            self.metrics.refusals["width"] += 1
            return None
        held = [len(state.lease.blocks) for state in states]
        counts = []
        try:
            for state in states:
                most = _most_rows(state, self.kind)
                wanted = self.kind.drafts(num_drafts, 0, None)
                room = self.pool.room(state.lease)
                # Where the position is the device's, how far the limit lies is, too: room for all rows below it is enough.
                whole = self._below_limit(most + self.kind.writes(wanted)) <= room
                count = wanted if whole else self.kind.fits(wanted, room - most)
                if count < 1 or not self._reserve([(state, self._below_limit(most + self.kind.writes(count)))]):
                    self.metrics.refusals["pool_exhausted"] += count < 1
                    count = 0
                counts.append(count)
            if any(counts):
                self._count_path(n)
                self._device.propose(
                    cast(torch.Tensor, last_tokens), hiddens, positions, num_drafts, counts, states, accepted, out
                )
            else:
                self._device.skip(positions, states, accepted)
                out.fill_(-1)
        except BaseException:
            self._give_back(states, held)
            raise
        for row, (state, count) in enumerate(zip(states, counts, strict=True)):
            started(state, self.kind)
            state.model = state.model or self.runner.model_digest()
            place = None if isinstance(positions, torch.Tensor) else positions[row]
            state.unsettled.append(Unsettled(count, position=place))
            state.last_scores, state.proposed_at = (), None
        return out

    @no_autograd()
    def catchup_accepted(
        self,
        tokens: torch.Tensor,
        hiddens: torch.Tensor,
        states: Sequence[ProposerState],
        accepted: torch.Tensor,
        *,
        first: int = 1,
    ) -> bool:
        with self._lock:
            self._same_length(tokens=tokens, hiddens=hiddens, states=states, accepted=accepted)
            mine = self._all_mine(states)
            n, columns = len(mine), tokens.shape[1] if isinstance(tokens, torch.Tensor) and tokens.dim() == 2 else -1
            self._check_ints("tokens", tokens, (n, columns))
            self._check_ints("accepted", accepted, (n,))
            if not isinstance(hiddens, torch.Tensor) or hiddens.dim() != 3 or hiddens.shape[1] != columns:
                self._refuse("do not fit", "hiddens", f"a tensor [{n}, {columns}, H]", shown(hiddens))
            self._check_hiddens(hiddens.flatten(0, 1))
            if not is_whole(first) or first not in (0, 1):
                self._refuse("is no first token", "first", "0 or 1", shown(first))
            for state in mine:
                if not state.last_drafts and (not state.unsettled or state.unsettled[-1].caught_up):
                    self._refuse("has no verify to catch up with", "state", "a propose before", "none, or one that was caught up")
            if not n or not columns:
                return True
            held = [len(state.lease.blocks) for state in mine]
            if not self._reserve([(state, self._below_limit(_most_rows(state, self.kind))) for state in mine]):
                return False
            try:
                self._device.catch_up(tokens, hiddens, mine, accepted, first)
            except BaseException:
                self._give_back(mine, held)
                raise
            for state in mine:
                started(state, self.kind)
                state.unsettled[-1].caught_up = (first, columns)
            return True

    def settle(self, states: Sequence[ProposerState], accepted: Sequence[int]) -> None:
        with self._lock:
            self._same_length(states=states, accepted=accepted)
            mine, limit = self._all_mine(states), self.runner.max_position
            counts = self._ids(accepted)
            for state, count in zip(mine, counts, strict=True):
                if not state.unsettled:
                    self._refuse("has nothing to settle", "state", "a device-form propose before", "none")
                position, drafted = outcome(state, limit, self.kind)
                self._check_accepted(count, drafted)
                self._check_order(state, position + count + 1)
            for state, count in zip(mine, counts, strict=True):
                drafted, skipped = settled(state, count, self.trim, limit, self.kind)
                self.metrics.skipped_rows += skipped
                self.pool.shrink(state.lease, state.most_rows)
                self.metrics.count_verify(drafted, count)

    def _check_order(self, state: MtpProposerState, newest: int) -> None:
        """The next propose began at `newest` or later, or the count that says so is of another propose than the oldest."""
        after = state.unsettled[1].position if len(state.unsettled) > 1 else None
        if after is not None and after < newest:
            hint = "Counts are told in the order of the proposes, the oldest first."
            got = f"one that puts the next token at {newest}"
            self._refuse("is not of the oldest propose", "accepted", f"one that fits the next propose, at {after}", got, hint)


def _proposed_at(state: MtpProposerState) -> int | None:
    """Position of the newest propose that awaits its verify or its count, as far as the host knows it."""
    if state.unsettled:
        return state.unsettled[-1].position
    return state.proposed_at if state.last_drafts else None


def _most_rows(state: MtpProposerState, kind: Kind) -> int:
    """Rows at most once the last verify is accounted for, wherever its accept count is."""
    if not state.last_drafts or not state.keeps_rows:
        return state.most_rows
    drafted = len(state.last_drafts)
    return state.rows - kind.adds(drafted) + 1 + drafted
