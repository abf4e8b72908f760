"""What `MtpProposer` checks of its arguments, before anything changes."""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from numbers import Integral
from typing import Any, NoReturn

import torch

from circuitgraph.errors import Fault, RuntimeUseError

from .proposer import Hiddens
from .runner import DraftRunner
from .state import MtpProposerState, ProposerState

FARTHEST = 2**31 - 2**20
"""Positions are 32-bit integers, and drafts go on from them."""


class Checks:
    """Part of `MtpProposer`. Refusals are RuntimeUseError."""

    runner: DraftRunner

    def _refuse(self, message: str, subject: str, expected: str, got: str, hint: str | None = None) -> NoReturn:
        raise RuntimeUseError(Fault(message, where="MtpProposer", subject=subject, expected=expected, got=got, hint=hint))

    # -- states ------------------------------------------------------------------------------------------------

    def _mine(self, state: ProposerState, *, freed_too: bool = False) -> MtpProposerState:
        if not isinstance(state, MtpProposerState) or state.owner is not self:
            owner = getattr(state, "owner", None)
            self._refuse("belongs to another proposer", "state", f"one made by {self!r}", f"one of {owner!r}")
        if state.freed and not freed_too:
            self._refuse("was freed", "state", "a live state", "a freed one")
        return state

    def _all_mine(self, states: Sequence[ProposerState]) -> list[MtpProposerState]:
        mine = [self._mine(state) for state in states]
        if len(set(mine)) != len(mine):
            self._refuse("one sequence cannot be in a batch twice", "states", "distinct states", "a state listed twice")
        return mine

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
        lowest = state.next_position
        # An ABC's isinstance costs as much as all else here.
        if (type(position) is not int and not isinstance(position, Integral)) or position < lowest:
            self._refuse("that position has a row already, or no token before it", "position", f"{lowest} or more", str(position))
        if position > FARTHEST:
            self._refuse("is out of reach", "position", f"{FARTHEST} at most", str(position))

    def _check_first(self, state: MtpProposerState, first_pos: Any, token: int) -> None:
        """Where a chunk of a prompt begins: its first token has a row already, or was left out, and is what it was."""
        lowest = max(state.next_position - 1, 0)
        if not isinstance(first_pos, Integral) or not lowest <= int(first_pos) <= FARTHEST:
            self._refuse("has a row already, or is no position", "first_pos", f"{lowest} or more", repr(first_pos))
        text = state.history.text
        if state.rows and first_pos == lowest and first_pos < len(text) and text[first_pos] != token:
            self._refuse("is another token than its row was made of", "prompt_tokens", f"{text[first_pos]} first", str(token))

    # -- lists and tensors -------------------------------------------------------------------------------------

    def _same_length(self, **lists: Sequence | torch.Tensor) -> None:
        if len(set(map(len, lists.values()))) > 1:
            lengths = {name: len(items) for name, items in lists.items()}
            got = ", ".join(f"{name} {length}" for name, length in lengths.items())
            self._refuse("lists of unequal length", "batch", "one item a sequence", got)

    def _ids(self, tokens: Sequence[int] | torch.Tensor) -> list[int]:
        """Tokens as plain integers: of a list, an array or a tensor."""
        values = tokens.tolist() if hasattr(tokens, "tolist") else tokens  # type: ignore[union-attr]
        try:
            return list(map(operator.index, values))
        except TypeError:
            self._refuse("are not integers in a row", "tokens", "a sequence of ints", repr(tokens)[:80])

    def _check_tokens(self, tokens: Sequence[int]) -> None:
        vocab = self.runner.vocab_size
        if tokens and min(tokens) >= 0 and max(tokens) < vocab:
            return
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
                self._refuse("do not fit", "hiddens", f"float[{shape}{size}] on {device}", _kind(row))

    def _check_ints(self, name: str, tensor: Any, shape: tuple[int, ...]) -> None:
        """int32 on the runner's device."""
        device = self.runner.device
        fits = isinstance(tensor, torch.Tensor) and tensor.dtype == torch.int32 and tensor.device == device
        if not fits or tensor.shape != shape:
            self._refuse("does not fit", name, f"int32{list(shape)} on {device}", _kind(tensor))

    def _check_count(self, num_drafts: Any) -> None:
        if not isinstance(num_drafts, Integral) or isinstance(num_drafts, bool) or num_drafts < 0:
            self._refuse("is no number of drafts", "num_drafts", "an int, 0 or more", repr(num_drafts))

    def _check_accepted(self, accepted: Any, drafted: int) -> None:
        if (type(accepted) is not int and not isinstance(accepted, Integral)) or not 0 <= int(accepted) <= drafted:
            self._refuse("more drafts accepted than there were", "num_accepted", f"0..{drafted}", str(accepted))

    def _check_threshold(self, stop_confidence: float | None) -> None:
        known = stop_confidence is None or (isinstance(stop_confidence, float | int) and not math.isnan(stop_confidence))
        if not known or not (stop_confidence is None or 0 <= stop_confidence <= 1):
            self._refuse("is no probability", "stop_confidence", "0..1", repr(stop_confidence))

    def _check_row(self, row: torch.Tensor | None, size: int | None) -> None:
        """Where the last draft's embedding goes."""
        if row is None:
            return
        if size is None:
            self._refuse("this drafter has no embedding", "draft_embed_target", "None", _kind(row))
        device = self.runner.device
        if not isinstance(row, torch.Tensor) or row.shape != (size,) or not row.is_floating_point() or row.device != device:
            self._refuse("does not fit", "draft_embed_target", f"float[{size}] on {device}", _kind(row))

    def _one_hidden(self, target_hidden: torch.Tensor | None, stack: torch.Tensor | None) -> torch.Tensor | None:
        """The target's hidden that row 0 is made of: of several layers side by side, where a drafter takes them."""
        if stack is None:
            return target_hidden
        layers = self.runner.hidden_layers
        if not isinstance(stack, torch.Tensor) or stack.dim() != 2 or stack.shape[0] != layers:
            hint = "Hiddens of several layers are for EAGLE-3 and DFlash drafters." if layers == 1 else None
            what = "one layer's hidden" if layers == 1 else f"hiddens of {layers} layers"
            self._refuse(f"this drafter takes {what}", "target_hidden_stack", f"[{layers}, H]", _kind(stack), hint)
        return stack.reshape(-1)


def _kind(item: Any) -> str:
    """A tensor's type, shape and device, or what else it is."""
    if isinstance(item, torch.Tensor):
        return f"{item.dtype}{list(item.shape)} on {item.device}"
    return type(item).__name__
