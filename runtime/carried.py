"""Drafter KV between two turns of a conversation, in the server's hands."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from .state import History


@dataclass(frozen=True, eq=False)
class CarriedKV:
    """What `take_drafter_kv` moved out of a state. It goes back once: by `install_drafter_kv` or `free_drafter_kv`.

    owner: the proposer whose pool the blocks are of. model: `DraftRunner.model_digest` when the rows were taken.
    blocks: in row order. rows, last_pair_key: as the state's were. digest: of the tokens behind the rows.
    """

    owner: Any
    model: str
    blocks: tuple[int, ...]
    history: History
    digest: str

    @property
    def rows(self) -> int:
        return len(self.history.positions)

    @property
    def last_pair_key(self) -> int:
        return self.history.positions[-1] - 1

    @property
    def tokens(self) -> list[int]:
        """The text from position 0, as far as the proposer was told all of it."""
        return self.history.text.tolist()
