"""Masks, and a matcher that behaves as xgrammar's: strict about shapes, and filling after the end raises."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import torch


def words_of(tokens: Iterable[int], vocab: int) -> torch.Tensor:
    """int32[ceil(vocab / 32)] with the bits of `tokens` set."""
    words = [0] * -(-vocab // 32)
    for token in tokens:
        words[token // 32] |= 1 << (token % 32)
    return torch.tensor(words, dtype=torch.int64).to(torch.int32)


def bits_of(words: torch.Tensor, vocab: int) -> torch.Tensor:
    """bool[vocab]; tokens past the last word are not allowed."""
    token = torch.arange(vocab)
    padded = torch.cat([words, torch.zeros(-(-vocab // 32), dtype=torch.int32)])
    return (padded[token // 32] >> (token % 32).to(torch.int32) & 1) == 1


class CountingMatcher:
    """After `depth` tokens it allows those of one residue class, after `ends` of them no more. `history` is what it accepted."""

    def __init__(self, vocab: int, seed: int, ends: int = 1000):
        self.vocab, self.seed, self.ends = vocab, seed, ends
        self.history: list[int] = []
        self.fills = 0

    @property
    def depth(self) -> int:
        return len(self.history)

    def allowed(self, depth: int) -> set[int]:
        return {token for token in range(self.vocab) if token % 3 == (self.seed + depth) % 3}

    def is_terminated(self) -> bool:
        return self.depth >= self.ends

    def fill_next_token_bitmask(self, bitmask: torch.Tensor, index: int = 0) -> bool:
        if self.is_terminated():
            raise RuntimeError("the matcher has terminated")
        if bitmask.dtype != torch.int32 or bitmask.dim() != 2 or bitmask.shape[1] != -(-self.vocab // 32):
            raise ValueError("the bitmask has the wrong shape")
        self.fills += 1
        if self.depth == 2:  # nothing to forbid here: the row is left as it was
            bitmask[index].fill_(0x55)
            return False
        bitmask[index].copy_(words_of(self.allowed(self.depth), self.vocab))
        return True

    def accept_token(self, token: int) -> bool:
        if self.is_terminated() or (self.depth != 2 and token not in self.allowed(self.depth)):
            return False
        self.history.append(token)
        return True

    def rollback(self, count: int = 1) -> None:
        if count > len(self.history):
            raise RuntimeError("more tokens to roll back than there are")
        del self.history[len(self.history) - count :]

    def along(self, ids: Sequence[int]) -> Iterator[torch.Tensor]:
        """The masks of a chain that drafts `ids` from here."""
        for step in range(len(ids)):
            everything = range(self.vocab) if step == 2 else self.allowed(self.depth + step)
            yield words_of(everything, self.vocab)
