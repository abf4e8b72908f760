"""The kinds of drafters: what a propose of one sequence writes, and how many drafts one forward gives.

Everything else (states, pool, trimming, catch-up, batches, the device form) is one code for all of them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

from circuitgraph.circuit.ir import Circuit
from circuitgraph.errors import Fault, RuntimeUseError


class Kind(ABC):
    """Positions and rows are those of one sequence, whose newest token is at `position`."""

    at_once = True
    """All drafts come from one forward, and depend on the target alone."""
    keeps_rows = True
    """A sequence has rows in a cache."""

    @property
    def most_drafts(self) -> int | None:
        """Drafts of one propose at most, None where nothing here bounds them."""
        return None

    @abstractmethod
    def drafts(self, wanted: int, position: int, limit: int | None) -> int:
        """How many of `wanted` drafts there can be below the position limit; 0 or less: none."""

    @abstractmethod
    def writes(self, drafts: int, position: int = 0, limit: int | None = None) -> int:
        """Cache rows that a propose of so many drafts needs after those that the sequence has."""

    @abstractmethod
    def adds(self, drafts: int) -> int:
        """Of those, how many are the sequence's rows until the verify: the others are scratch."""

    def fits(self, drafts: int, room: int, position: int = 0, limit: int | None = None) -> int:
        """How many of `drafts` drafts there is room for in so many rows."""
        return drafts if self.writes(drafts, position, limit) <= room else 0

    def slot_rows(self, steps: int) -> int:
        """Rows of the slots that a call for `steps` drafts takes."""
        return self.writes(steps)

    def promised(self, tokens: int) -> int:
        """Rows that a sequence of so many tokens needs at most."""
        return tokens

    def hidden_rows(self, tokens: int) -> int:
        """Rows of the target's hiddens that a sequence of so many tokens can use."""
        return tokens


@dataclass(frozen=True)
class Chain(Kind):
    """One draft after the other, each with a row: the first is made of the target's hidden, later ones of the drafter's own."""

    at_once = False

    def drafts(self, wanted: int, position: int, limit: int | None) -> int:
        return wanted if limit is None else min(wanted, limit - position)

    def writes(self, drafts: int, position: int = 0, limit: int | None = None) -> int:
        return drafts

    def adds(self, drafts: int) -> int:
        return drafts

    def fits(self, drafts: int, room: int, position: int = 0, limit: int | None = None) -> int:
        return max(min(drafts, room), 0)


@dataclass(frozen=True)
class Heads(Kind):
    """A head for each draft, beside each other on the newest hidden: no cache, nothing to keep or to catch up with."""

    heads: int
    keeps_rows = False

    @property
    def most_drafts(self) -> int:
        return self.heads

    def drafts(self, wanted: int, position: int, limit: int | None) -> int:
        return min(wanted, self.heads)

    def writes(self, drafts: int, position: int = 0, limit: int | None = None) -> int:
        return 0

    def adds(self, drafts: int) -> int:
        return 0

    def promised(self, tokens: int) -> int:
        return 0

    def hidden_rows(self, tokens: int) -> int:
        return min(tokens, 1)


@dataclass(frozen=True)
class Block(Kind):
    """A block of `gamma` rows in one pass: the newest token's, and a mask's for each draft.

    The rows of the target's hiddens are the context; that of the newest hidden is written before the block, and stays. The
    block is scratch. It is whole however few drafts are asked for, so that drafts do not depend on their number, except at
    the position limit, where it ends.
    """

    gamma: int
    mask: int

    @property
    def most_drafts(self) -> int:
        return self.gamma - 1

    def drafts(self, wanted: int, position: int, limit: int | None) -> int:
        most = self.most_drafts
        return min(wanted, most if limit is None else min(most, limit - 1 - position))

    def writes(self, drafts: int, position: int = 0, limit: int | None = None) -> int:
        if not drafts:
            return 0
        return 1 + (self.gamma if limit is None else min(self.gamma, limit - position))

    def adds(self, drafts: int) -> int:
        return min(drafts, 1)

    def promised(self, tokens: int) -> int:
        return tokens + self.gamma - 1  # the last block lies behind the last row


def kind_of(circuit: Circuit) -> Kind:
    """What a circuit's `draft` entry makes its drafter.

    Raises:
        RuntimeUseError: a circuit that no proposer drives, with the reason.
    """
    draft = next((entry for entry in circuit.entries if entry.name == "draft"), None)
    if draft is None:
        raise RuntimeUseError(Fault("has no entry 'draft'", where=circuit.name))
    if draft.rows == "block":
        facts = dict(circuit.facts)
        gamma, mask = facts.get("block_size"), facts.get("mask_token")
        if type(gamma) is not int or type(mask) is not int or gamma < 2 or mask < 0:
            expected, got = "a block_size of 2 or more, and a mask_token", f"{gamma} and {mask}"
            hint = "Give them under `constants` in the program."
            raise RuntimeUseError(
                Fault("does not say how a block is made", where=circuit.name, expected=expected, got=got, hint=hint)
            )
        return Block(gamma, mask)
    if "next_hidden" in draft.outputs:
        return Chain()
    shape = circuit.types[dict(circuit.outputs)["draft"]].shape  # type: ignore[union-attr]
    return Heads(int(shape[1]) if len(shape) == 2 else 1)
