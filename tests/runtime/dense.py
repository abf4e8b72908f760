"""The oracle of the lifecycle: one sequence's rows in one long cache, run by the reference interpreter. No pool, no runner.

What a policy keeps is written here a second time, as the specification states it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from circuitgraph.interpreter import interpret
from circuitgraph.ops import TORCH_DTYPES, PagedKV
from circuitgraph.runtime import DraftRunner

KEPT = {
    "exact": lambda k, a: min(k, 1),
    "valid": lambda k, a: min(k, a + 1),
    "seed": lambda k, a: k - min(k, k - a),
    "seed_refeed": lambda k, a: k - min(k, (k - a) + max(a - 1, 0)),
}
"""Policy to (K, accepted) -> rows kept of the K that a propose wrote."""

CLOSE = 2e-4
"""Logits closer than this, relative to their size, may fall either way: sums are taken in another order."""


class Dense:
    """positions: of the tokens whose rows are in the cache, in row order."""

    def __init__(self, runner: DraftRunner, trim: str, capacity: int = 256):
        self.circuit, self.weights, self.trim = runner.circuit, runner.weights, trim
        self.limit, self.device = runner.max_position, runner.device
        self.state = runner.circuit.states[0]
        shape = (self.state.layers, 1, self.state.heads, capacity, self.state.dim)
        self.k, self.v = (torch.zeros(shape, dtype=TORCH_DTYPES[self.state.dtype], device=self.device) for _ in "kv")
        self.positions: list[int] = []

    @property
    def next_position(self) -> int:
        return self.positions[-1] + 1 if self.positions else 1

    def append(self, first: int, tokens: Sequence[int], hiddens: torch.Tensor) -> int:
        """Rows of the tokens at `first` and after; rows beyond the position limit are dropped."""
        count = max(min(len(tokens), self.limit - first), 0)
        if count:
            self._run("context", tokens[:count], hiddens[:count], range(first, first + count))
            self.positions += range(first, first + count)
        return count

    def follow(
        self,
        token: int,
        hidden: torch.Tensor,
        position: int,
        drafts: Sequence[int],
        scores: Sequence[float] | None = None,
        masks: Sequence[torch.Tensor | None] | None = None,
    ) -> None:
        """Go along with `drafts`, each of which must be the best token (one of the best, when several are as good)."""
        hidden = hidden[None]
        for step, draft in enumerate(drafts):
            out = self._run("logits", [token], hidden, [position + step])
            logits = out["logits"][0].float()
            mask = masks[step] if masks else None
            if mask is not None:
                logits = logits.masked_fill(~mask, -math.inf)
            best = float(logits.max())
            assert float(logits[draft]) >= best - CLOSE * max(1.0, abs(best)), f"draft {step} is {draft}, not {logits.argmax()}"
            if scores is not None:
                assert abs(scores[step] - float(logits[draft] - logits.logsumexp(0))) < 1e-3
            self.positions.append(position + step)
            token, hidden = draft, out["next_hidden"]

    def logits(self, token: int, hidden: torch.Tensor, position: int) -> torch.Tensor:
        """Of one more step, whose row is forgotten."""
        return self._run("logits", [token], hidden[None], [position])["logits"][0].float()

    def verified(self, drafted: int, accepted: int) -> None:
        self.keep(len(self.positions) - drafted + (KEPT[self.trim](drafted, accepted) if drafted else 0))

    def keep(self, rows: int) -> None:
        del self.positions[rows:]

    def _run(self, entry: str, tokens: Sequence[int], hiddens: torch.Tensor, positions: Sequence[int]) -> dict[str, torch.Tensor]:
        ints = lambda values: torch.tensor(list(values), dtype=torch.int32, device=self.device)  # noqa: E731
        row = ints(range(len(self.positions), len(self.positions) + len(tokens)))
        one = ints([0])
        cache = PagedKV(self.k, self.v, row, one.expand(len(tokens)), one[None], one, row + 1)
        inputs = {"token": ints(tokens), "hidden": hiddens, "position": ints(positions)}
        with torch.no_grad():
            return interpret(self.circuit, inputs=inputs, weights=self.weights, states={self.state.name: cache}, entry=entry)
