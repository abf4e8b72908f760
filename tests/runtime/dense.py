"""The oracle of the lifecycle: one sequence's rows in one long cache, run by the reference interpreter. No pool, no runner.

What a policy keeps, and what drafts of each kind of drafter take, is written here a second time, as the specification states it.
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
    """Of drafters that draft step by step. positions: of the tokens whose rows are in the cache, in row order."""

    def __init__(self, runner: DraftRunner, trim: str, capacity: int = 256):
        self.circuit, self.weights, self.trim = runner.circuit, runner.weights, trim
        self.limit, self.device = runner.max_position, runner.device
        self.states = runner.circuit.states
        self.storage = {
            state.name: tuple(
                torch.zeros((state.layers, 1, state.heads, capacity, dim), dtype=TORCH_DTYPES[state.dtype], device=self.device)
                for dim in state.dims
            )
            for state in self.states
        }
        entries = {entry.name: entry for entry in runner.circuit.entries}
        self.first = "first_logits" if "first" in entries else "logits"
        self.target = next(item.name for item in runner.circuit.inputs if item.type.dtype != "i32")
        self.d2t = runner.weights.get("d2t")
        self.positions: list[int] = []

    @property
    def next_position(self) -> int:
        return self.positions[-1] + 1 if self.positions else 1

    # -- what drafts take --------------------------------------------------------------------------------------

    def most(self, asked: int, position: int | None) -> int:
        """Drafts that there can be of those asked for; position None: as if there were no limit."""
        return asked if position is None else max(min(asked, self.limit - position), 0)

    def needs(self, count: int, position: int | None) -> int:
        """Cache rows of `count` drafts, scratch among them."""
        return count

    def fits(self, count: int, room: int, position: int | None) -> int:
        """Drafts of `count` that so many rows are enough for."""
        return max(min(count, room), 0)

    def loose(self, drafted: int) -> int:
        """Of the newest rows, how many a verify may take back."""
        return drafted

    def promise(self, tokens: int) -> int:
        return min(tokens, self.limit)

    def behind(self, position: int) -> int:
        return max(position - self.next_position, 0)

    # -- rows and drafts ---------------------------------------------------------------------------------------

    def append(self, first: int, tokens: Sequence[int], hiddens: torch.Tensor) -> int:
        """Rows of the tokens at `first` and after; rows beyond the position limit are dropped."""
        count = max(min(len(tokens), self.limit - first), 0)
        if count:
            self._context(first, tokens[:count], hiddens[:count])
            self.positions += range(first, first + count)
        return count

    def _context(self, first: int, tokens: Sequence[int], hiddens: torch.Tensor) -> None:
        self._run("context", tokens, hiddens, range(first, first + len(tokens)))

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
        name, entry, hidden = self.target, self.first, hidden[None]
        for step, draft in enumerate(drafts):
            out = self._run(entry, [token], hidden, [position + step], name)
            self._judge(step, draft, out["logits"][0], scores, masks)
            self.positions.append(position + step)
            name, entry, token, hidden = "hidden", "logits", draft, out["next_hidden"]

    def _judge(self, step: int, draft: int, logits: torch.Tensor, scores, masks) -> None:
        logits = self.in_target_ids(logits.float())
        mask = masks[step] if masks else None
        if mask is not None:
            logits = logits.masked_fill(~mask, -math.inf)
        best = float(logits.max())
        assert float(logits[draft]) >= best - CLOSE * max(1.0, abs(best)), f"draft {step} is {draft}, not {logits.argmax()}"
        if scores is not None:
            assert abs(scores[step] - float(logits[draft] - logits.logsumexp(0))) < 1e-3

    def in_target_ids(self, logits: torch.Tensor) -> torch.Tensor:
        """Scores of an own vocabulary where the target's tokens are; what cannot be drafted has none."""
        if self.d2t is None:
            return logits
        embed = next(node for node in self.circuit.nodes if node.op == "embed")
        wide = logits.new_full(self.circuit.types[embed.inputs[1]].shape[:1], -math.inf)  # type: ignore[union-attr]
        for own, score in enumerate(logits.tolist()):
            wide[own + int(self.d2t[own])] = score
        return wide

    def logits(self, token: int, hidden: torch.Tensor, position: int) -> torch.Tensor:
        """Of one more step, whose row is forgotten."""
        return self._run(self.first, [token], hidden[None], [position], self.target)["logits"][0].float()

    def verified(self, drafted: int, accepted: int) -> None:
        self.keep(len(self.positions) - drafted + (KEPT[self.trim](drafted, accepted) if drafted else 0))

    def keep(self, rows: int) -> None:
        del self.positions[rows:]

    def _run(
        self,
        entry: str,
        tokens: Sequence[int],
        hiddens: torch.Tensor,
        positions: Sequence[int],
        name: str | None = None,
        *,
        sees: int | None = None,
    ) -> dict[str, torch.Tensor]:
        """Rows at the end; each sees those before it, or all see `sees` rows."""
        ints = lambda values: torch.tensor(list(values), dtype=torch.int32, device=self.device)  # noqa: E731
        row = ints(range(len(self.positions), len(self.positions) + len(tokens)))
        one = ints([0])
        length = row + 1 if sees is None else ints([sees] * len(tokens))
        addressing = (row, one.expand(len(tokens)), one[None], one, length)
        caches = {state: PagedKV(*parts, *addressing) for state, parts in self.storage.items()}
        inputs = {"token": ints(tokens), name or self.target: hiddens, "position": ints(positions)}
        with torch.no_grad():
            return interpret(self.circuit, inputs=inputs, weights=self.weights, states=caches, entry=entry)


class DenseHeads(Dense):
    """Of heads beside each other: the newest hidden is all that there is."""

    def most(self, asked: int, position: int | None) -> int:
        return min(asked, self.circuit.types[dict(self.circuit.outputs)["draft"]].shape[1])  # type: ignore[union-attr,return-value]

    def needs(self, count: int, position: int | None) -> int:
        return 0

    def fits(self, count: int, room: int, position: int | None) -> int:
        return count

    def loose(self, drafted: int) -> int:
        return 0

    def promise(self, tokens: int) -> int:
        return 0

    def behind(self, position: int) -> int:
        return 0

    def append(self, first: int, tokens: Sequence[int], hiddens: torch.Tensor) -> int:
        return 0

    def follow(self, token, hidden, position, drafts, scores=None, masks=None) -> None:
        with torch.no_grad():
            inputs = {self.target: hidden[None]}
            made = interpret(self.circuit, inputs=inputs, weights=self.weights, entry="logits")["logits"][0]
        for step, draft in enumerate(drafts):
            self._judge(step, draft, made[step], scores, masks)

    def verified(self, drafted: int, accepted: int) -> None:
        pass


class DenseBlock(Dense):
    """Of a block of rows that see each other, behind the rows of the target's hiddens: none of them is kept."""

    def __init__(self, runner: DraftRunner, trim: str, capacity: int = 256):
        super().__init__(runner, trim, capacity)
        facts = dict(runner.circuit.facts)
        self.size, self.mask = int(facts["block_size"]), int(facts["mask_token"])

    def most(self, asked: int, position: int | None) -> int:
        return max(min(asked, self.rows(position) - 1), 0)

    def rows(self, position: int | None) -> int:
        return self.size if position is None else min(self.size, self.limit - position)

    def needs(self, count: int, position: int | None) -> int:
        return 1 + self.rows(position) if count else 0

    def fits(self, count: int, room: int, position: int | None) -> int:
        return count if room >= self.needs(count, position) else 0

    def loose(self, drafted: int) -> int:
        return 0

    def promise(self, tokens: int) -> int:
        return min(tokens + self.size - 1, self.limit)

    def _context(self, first: int, tokens: Sequence[int], hiddens: torch.Tensor) -> None:
        self._run("context", tokens, hiddens, range(first - 1, first - 1 + len(tokens)))

    def follow(self, token, hidden, position, drafts, scores=None, masks=None) -> None:
        if not drafts:
            return
        self.append(position, [token], hidden[None])
        size = self.rows(position)
        tokens, places = [token, *[self.mask] * (size - 1)], range(position, position + size)
        made = self._run("logits", tokens, hidden[None], places, "unused", sees=len(self.positions) + size)["logits"]
        for step, draft in enumerate(drafts):
            self._judge(step, draft, made[step + 1], scores, masks)

    def verified(self, drafted: int, accepted: int) -> None:
        pass


def dense_of(runner: DraftRunner, trim: str) -> Dense:
    draft = runner.circuit.entry("draft")
    kind = DenseBlock if draft.rows == "block" else Dense if "next_hidden" in draft.outputs else DenseHeads
    return kind(runner, trim)
