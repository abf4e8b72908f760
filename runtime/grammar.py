"""Grammars of a propose: fixed bitmasks, and matchers that make a fresh mask for every draft position.

A mask is int32 words; bit c % 32 of word c // 32 is token c, 1 allows it, tokens past the last word are not allowed. A matcher
is an object with xgrammar's own methods. It stands where the text stands: the newest token is accepted already.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import torch

from circuitgraph.errors import Fault, RuntimeUseError

ALL = -1
"""A word that allows everything."""


@runtime_checkable
class Matcher(Protocol):
    """What is used of xgrammar's GrammarMatcher. `is_terminated` is asked where it exists: filling after the end raises."""

    def fill_next_token_bitmask(self, bitmask: torch.Tensor, index: int = 0, /) -> bool: ...
    def accept_token(self, token_id: int, /) -> bool: ...
    def rollback(self, num_tokens: int = 1, /) -> None: ...


Grammar = torch.Tensor | Sequence[int] | Matcher
"""A fixed mask (tensor, array or list of words), or a matcher."""


class Bitmask:
    """Host memory for the masks of a call's rows, kept from call to call."""

    def __init__(self, words: int, device: torch.device):
        self.words, self.device = words, device
        self._memory = torch.empty(0, words, dtype=torch.int32)

    def rows(self, count: int) -> torch.Tensor:
        if count > self._memory.shape[0]:
            self._memory = torch.empty(max(count, 2 * self._memory.shape[0]), self.words, dtype=torch.int32)
        return self._memory[:count]


class Grammars:
    """The grammars of one call, checked; matchers are moved on by `accept`, and back where they were by `rollback`."""

    def __init__(self, given: Sequence[Grammar | None], bitmask: Bitmask):
        self._bitmask = bitmask
        self._items = [_checked(item, bitmask.words) for item in given]
        matchers = [id(item) for item in self._items if isinstance(item, Matcher)]
        if len(set(matchers)) < len(matchers):
            expected = "a matcher for each sequence"
            raise RuntimeUseError(Fault("one matcher cannot follow two sequences", subject="grammars", expected=expected))
        self._accepted = [0] * len(self._items)

    @property
    def stepwise(self) -> bool:
        """Whether a mask depends on the drafts before it, so that the host must see them."""
        return any(isinstance(item, Matcher) for item in self._items)

    @property
    def fixed(self) -> bool:
        """Whether there is a mask that does not follow the drafts."""
        return any(isinstance(item, torch.Tensor) for item in self._items)

    def masked(self, row: int) -> bool:
        return self._items[row] is not None

    def ended(self, row: int) -> bool:
        """Whether the row's grammar has come to its end: it allows no further token, and must not be asked."""
        item = self._items[row]
        return isinstance(item, Matcher) and bool(getattr(item, "is_terminated", lambda: False)())

    def fill(self, rows: Sequence[int]) -> torch.Tensor:
        """The masks of some rows for their next draft: int32[len(rows), words] on the device."""
        bits = self._bitmask.rows(len(rows))
        for place, row in enumerate(rows):
            item = self._items[row]
            if item is None:
                bits[place].fill_(ALL)
            elif isinstance(item, torch.Tensor):
                bits[place, : len(item)].copy_(item)
                bits[place, len(item) :].zero_()
            elif not item.fill_next_token_bitmask(bits, place):
                bits[place].fill_(ALL)  # the matcher says that nothing is forbidden, whatever it left there
        return bits.to(self._bitmask.device)

    def accept(self, row: int, token: int) -> bool:
        """Move the row's matcher past its draft; False when it refuses the token."""
        item = self._items[row]
        if not isinstance(item, Matcher):
            return True
        if not item.accept_token(token):
            return False
        self._accepted[row] += 1
        return True

    def rollback(self) -> None:
        """Every matcher where the caller left it; one that raises does not keep the others from it."""
        problem: BaseException | None = None
        for row, item in enumerate(self._items):
            if isinstance(item, Matcher) and self._accepted[row]:
                try:
                    item.rollback(self._accepted[row])
                except BaseException as raised:
                    problem = problem or raised
                self._accepted[row] = 0
        if problem is not None:
            raise problem


def _checked(item: Grammar | None, words: int) -> torch.Tensor | Matcher | None:
    return item if item is None or isinstance(item, Matcher) else _mask(item, words)


def _mask(item: Any, words: int) -> torch.Tensor:
    """A fixed mask as int32[<= words]: a longer one speaks of tokens that the drafter does not have."""
    expected = f"int32[{words}], or an object with xgrammar's methods"
    if isinstance(item, torch.Tensor) or hasattr(item, "__array__"):
        tensor = torch.as_tensor(item)
        if tensor.dim() == 2 and tensor.shape[0] == 1:
            tensor = tensor[0]
        if tensor.dim() != 1 or tensor.dtype != torch.int32:
            got = f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"
            raise RuntimeUseError(Fault("is no bitmask", subject="grammar", expected=expected, got=got))
        return tensor[:words]
    try:
        numbers = list(item)
        # Words may be written unsigned; the bits are what counts.
        if not all(type(number) is int and -(2**31) <= number < 2**32 for number in numbers) or isinstance(item, Mapping):
            raise ValueError
        return torch.tensor(numbers[:words], dtype=torch.int64).to(torch.int32)
    except (TypeError, ValueError, RuntimeError):
        raise RuntimeUseError(Fault("is no bitmask", subject="grammar", expected=expected, got=type(item).__name__)) from None
