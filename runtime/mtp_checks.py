"""What `MtpProposer` checks of its arguments, before anything changes."""

from __future__ import annotations

import operator
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, NoReturn, cast

import torch

from circuitgraph.errors import Fault, RuntimeUseError

from .arguments import is_whole, shown
from .proposer import Hiddens
from .runner import DraftRunner
from .state import MtpProposerState, ProposerState

WHERE = "MtpProposer"
"""In errors."""
FARTHEST = 2**31 - 2**20
"""Positions are 32-bit integers, and drafts go on from them."""


class Checks:
    """Part of `MtpProposer`. Refusals are RuntimeUseError."""

    runner: DraftRunner

    def _refuse(self, message: str, subject: str, expected: str, got: str, hint: str | None = None) -> NoReturn:
        raise RuntimeUseError(Fault(message, where=WHERE, subject=subject, expected=expected, got=got, hint=hint))

    # -- states ------------------------------------------------------------------------------------------------

    def _mine(self, state: ProposerState, *, freed_too: bool = False) -> MtpProposerState:
        if not isinstance(state, MtpProposerState) or state.owner is not self:
            got = f"one of {state.owner!r}" if isinstance(state, MtpProposerState) else shown(state)
            self._refuse("belongs to another proposer", "state", f"one made by {self!r}", got)
        if state.freed and not freed_too:
            self._refuse("was freed", "state", "a live state", "a freed one")
        return state

    def _all_mine(self, states: Sequence[ProposerState]) -> list[MtpProposerState]:
        mine = list(states)
        for state in mine:
            if type(state) is not MtpProposerState or state.owner is not self or state.freed:
                self._mine(state)  # says what is wrong
        if len(set(mine)) != len(mine):
            self._refuse("one sequence cannot be in a batch twice", "states", "distinct states", "a state listed twice")
        return cast(list[MtpProposerState], mine)

    def _check_settled(self, state: MtpProposerState) -> None:
        """Unverified rows would become context for good."""
        self._check_known(state)
        if state.last_drafts:
            self._refuse("drafts are waiting for after_verify", "state", "after_verify first", f"{state.last_drafts} unverified")

    def _check_known(self, state: MtpProposerState) -> None:
        if state.unsettled:
            got = f"{len(state.unsettled)} device-form proposes of unknown outcome"
            self._refuse("its rows are known to the device only", "state", "settle first", got)

    def _check_next(self, state: MtpProposerState, position: int) -> None:
        """The row of the token at `position` has pair key position - 1, which must be newer than every row's."""
        self._check_position(position, state.next_position)

    def _check_position(self, position: int, lowest: int) -> None:
        if not is_whole(position):
            self._refuse("is no position", "position", f"an int, {lowest} or more", shown(position))
        if position < lowest:
            self._refuse("that position has a row already, or no token before it", "position", f"{lowest} or more", str(position))
        if position > FARTHEST:
            self._refuse("is out of reach", "position", f"{FARTHEST} at most", str(position))

    def _check_first(self, state: MtpProposerState, first_pos: Any, token: int) -> None:
        """Where a chunk of a prompt begins: its first token has a row already, or was left out, and is what it was."""
        lowest = max(state.next_position - 1, 0)
        if not is_whole(first_pos) or not lowest <= first_pos <= FARTHEST:
            self._refuse("has a row already, or is no position", "first_pos", f"{lowest} or more", shown(first_pos))
        text = state.history.text
        if state.rows and first_pos == lowest and first_pos < len(text) and text[first_pos] != token:
            self._refuse("is another token than its row was made of", "prompt_tokens", f"{text[first_pos]} first", str(token))

    # -- lists and tensors -------------------------------------------------------------------------------------

    def _same_length(self, **lists: Sequence | torch.Tensor) -> None:
        try:
            unequal = len(set(map(len, lists.values()))) > 1
        except TypeError:  # numbers, None, generators, tensors without dimensions
            name, items = next((name, items) for name, items in lists.items() if not _countable(items))
            self._refuse("is no list", name, "one item a sequence", shown(items))
        if unequal:
            lengths = {name: len(items) for name, items in lists.items()}
            got = ", ".join(f"{name} {length}" for name, length in lengths.items())
            self._refuse("lists of unequal length", "batch", "one item a sequence", got)

    def _ids(self, tokens: Sequence[int] | torch.Tensor) -> list[int]:
        """Tokens as plain integers: of a list, an array or a tensor."""
        if isinstance(tokens, torch.Tensor) and tokens.dtype == torch.bool:
            self._refuse("are not integers in a row", "tokens", "a sequence of ints", shown(tokens))
        values = tokens.tolist() if hasattr(tokens, "tolist") else tokens  # type: ignore[union-attr]
        try:
            return list(map(operator.index, values))
        except TypeError:
            self._refuse("are not integers in a row", "tokens", "a sequence of ints", repr(tokens)[:80])

    def _stops(self, stop_ids: Iterable[int]) -> Collection[int]:
        """The stop ids, looked at once: what can be gone through only once is kept."""
        if type(stop_ids) in (tuple, list) and not stop_ids:
            return ()
        try:
            return frozenset(self._ids(stop_ids))  # type: ignore[arg-type]
        except RuntimeUseError:
            self._refuse("are no tokens", "stop_ids", "a collection of ints", shown(stop_ids))

    def _rows_of(self, hiddens: Any) -> int:
        """How many rows of hiddens there are; what they are is `_check_hiddens`' matter."""
        if not _countable(hiddens) or isinstance(hiddens, str | bytes | Mapping):
            self._refuse("do not fit", "hiddens", "a tensor [rows, H], or a list of tensors [H]", shown(hiddens))
        return len(hiddens)

    def _check_tokens(self, tokens: Sequence[int]) -> None:
        vocab = self.runner.vocab_size
        if tokens and min(tokens) >= 0 and max(tokens) < vocab:
            return
        for token in tokens:
            if not 0 <= token < vocab:
                self._refuse("token outside the vocabulary", "token", f"0..{vocab - 1}", str(token))

    def _check_hiddens(self, hiddens: Hiddens) -> None:
        size, device = self.runner.hidden_size, self.runner.device
        if isinstance(hiddens, torch.Tensor) and hiddens.shape[1:] == (size,) and hiddens.is_floating_point():
            if hiddens.device == device:
                return
        elif not isinstance(hiddens, (torch.Tensor, list)):
            self._rows_of(hiddens)
        for row in [hiddens] if isinstance(hiddens, torch.Tensor) else hiddens:
            dims = 2 if row is hiddens else 1
            if not isinstance(row, torch.Tensor):
                self._refuse("do not fit", "hiddens", "tensors", shown(row))
            if row.dim() != dims or row.shape[-1] != size or not row.is_floating_point() or row.device != device:
                shape = "rows, " if dims == 2 else ""
                self._refuse("do not fit", "hiddens", f"float[{shape}{size}] on {device}", shown(row))

    def _check_ints(self, name: str, tensor: Any, shape: tuple[int, ...]) -> None:
        """int32 on the runner's device."""
        device = self.runner.device
        fits = isinstance(tensor, torch.Tensor) and tensor.dtype == torch.int32 and tensor.device == device
        if not fits or tensor.shape != shape:
            self._refuse("does not fit", name, f"int32{list(shape)} on {device}", shown(tensor))

    def _check_count(self, num_drafts: Any) -> None:
        if not is_whole(num_drafts) or num_drafts < 0:
            self._refuse("is no number of drafts", "num_drafts", "an int, 0 or more", shown(num_drafts))

    def _check_accepted(self, accepted: Any, drafted: int) -> None:
        if not is_whole(accepted):
            self._refuse("is no number of drafts", "num_accepted", f"0..{drafted}", shown(accepted))
        if not 0 <= accepted <= drafted:
            self._refuse("more drafts accepted than there were", "num_accepted", f"0..{drafted}", str(accepted))

    def _check_threshold(self, stop_confidence: float | None) -> None:
        if stop_confidence is None:
            return
        number = isinstance(stop_confidence, float) or is_whole(stop_confidence)
        if not number or not 0 <= stop_confidence <= 1:  # NaN is not, either
            self._refuse("is no probability", "stop_confidence", "0..1", shown(stop_confidence))

    def _check_row(self, row: torch.Tensor | None, size: int | None) -> None:
        """Where the last draft's embedding goes."""
        if row is None:
            return
        if size is None:
            self._refuse("this drafter has no embedding", "draft_embed_target", "None", shown(row))
        device = self.runner.device
        if not isinstance(row, torch.Tensor) or row.shape != (size,) or not row.is_floating_point() or row.device != device:
            self._refuse("does not fit", "draft_embed_target", f"float[{size}] on {device}", shown(row))

    def _one_hidden(self, target_hidden: torch.Tensor | None, stack: torch.Tensor | None) -> torch.Tensor | None:
        """The target's hidden that row 0 is made of: of several layers side by side, where a drafter takes them."""
        if stack is None:
            return target_hidden
        if target_hidden is not None:
            self._refuse("does not go with a stack of hiddens", "target_hidden", "None, or no target_hidden_stack", "both")
        layers = self.runner.hidden_layers
        if not isinstance(stack, torch.Tensor) or stack.dim() != 2 or stack.shape[0] != layers:
            hint = "Hiddens of several layers are for EAGLE-3 and DFlash drafters." if layers == 1 else None
            what = "one layer's hidden" if layers == 1 else f"hiddens of {layers} layers"
            self._refuse(f"this drafter takes {what}", "target_hidden_stack", f"[{layers}, H]", shown(stack), hint)
        return stack.reshape(-1)


def equally_long(hiddens: Any, *lists: Any) -> bool:
    """Whether all have as many items; not where one is no list."""
    try:
        count = hiddens.shape[0] if isinstance(hiddens, torch.Tensor) else len(hiddens)  # a tensor's len takes thrice as long
        for items in lists:
            if len(items) != count:
                return False
    except (TypeError, IndexError):
        return False
    return True


def _countable(items: Any) -> bool:
    try:
        len(items)
    except TypeError:
        return False
    return True
