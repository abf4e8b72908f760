"""Running one propose: all drafts in one chain on the device, or step by step where the host decides on each."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field

import torch

from .batch import Batch, Slots
from .grammar import Grammars
from .proposer import Hiddens
from .runner import DraftChain
from .state import DEFERRED, MtpProposerState


@dataclass
class Call:
    """The rows of a propose that draft: `rows` are their places in the caller's lists, `counts` drafts are wanted of each.

    before: cache rows that each has. slots: of the rows that it writes, where that is known.
    stop_logprob: a draft below it ends its chain. embed_target: where the last draft's embedding goes (one row only).
    """

    rows: list[int]
    counts: list[int]
    tokens: list[int]
    hiddens: Hiddens
    positions: list[int]
    states: list[MtpProposerState]
    before: list[int] = field(default_factory=list)
    slots: Slots | None = None
    stop_ids: Collection[int] = ()
    grammars: Grammars | None = None
    stop_logprob: float | None = None
    embed_target: torch.Tensor | None = None
    meanwhile: Callable[[], None] | None = None
    """What the host does while all drafts are made in one chain."""

    def stepwise(self, at_once: bool) -> bool:
        """Whether the host decides on each draft; where they come all at once (`at_once`), only masks are beyond the program."""
        if at_once:
            return self.grammars is not None
        return self.stop_logprob is not None or (self.grammars is not None and self.grammars.stepwise)

    def ends(self, token: int, score: float) -> bool:
        """Whether a draft is the last of its chain. An unmeasured score, NaN, compares as false."""
        return token in self.stop_ids or (self.stop_logprob is not None and score < self.stop_logprob)


@dataclass
class Drafted:
    """Drafts and their log-probabilities by row of the call; `deferred` is the id, int32[1], that the host did not read."""

    ids: list[list[int]]
    scores: list[list[float]]
    deferred: torch.Tensor | None = None


def run(batch: Batch, call: Call) -> Drafted:
    return _step_by_step(batch, call) if call.stepwise(batch.runner.kind.at_once) else _in_one_chain(batch, call)


def _in_one_chain(batch: Batch, call: Call) -> Drafted:
    allowed = call.grammars.fill(call.rows) if call.grammars else None
    rows = (call.tokens, call.hiddens, call.positions, call.states, call.counts)
    if call.embed_target is not None:
        return _all_but_the_last(batch, call, batch.chain(*rows, allowed=allowed))
    wait = batch.launch(*rows, call.before, call.slots, allowed=allowed)
    if call.meanwhile is not None:
        call.meanwhile()
    made = Drafted(*wait())
    _cut_all(call, made, 0)
    return made


def _all_but_the_last(batch: Batch, call: Call, chain: DraftChain) -> Drafted:
    most = call.counts[0] - 1
    if not most:  # a single deferred draft: the host waits for nothing
        return _defer(batch, call, Drafted([[]], [[]]), chain.drafts[0, :1])
    made = Drafted(*chain.read())
    _cut_all(call, made, 1)
    if len(made.ids[0]) == most and not call.ends(made.ids[0][-1], made.scores[0][-1]):
        return _defer(batch, call, made, chain.drafts[0, most : most + 1])
    _embed_last(batch, call, made)
    return made


def _cut_all(call: Call, made: Drafted, unread: int) -> None:
    """Every row's own drafts, as far as there was a choice, up to and with the first that ends it."""
    finite = -math.inf not in itertools.chain.from_iterable(made.scores)
    uniform = call.counts.count(call.counts[0]) == len(call.counts)
    if finite and uniform and not (unread or call.stop_ids or call.stop_logprob is not None):
        return  # every row has all that was drafted
    for place, count in enumerate(call.counts):
        ids, scores = made.ids[place], made.scores[place]
        if len(ids) != count - unread:
            ids, scores = ids[: count - unread], scores[: count - unread]
        if not finite and -math.inf in scores:  # nothing was allowed there, or no logit was a number
            ends = scores.index(-math.inf)
            ids, scores = ids[:ends], scores[:ends]
        made.ids[place], made.scores[place] = _cut(call, ids, scores)


def _step_by_step(batch: Batch, call: Call) -> Drafted:
    """One draft position after the other, the host deciding who goes on."""
    grammars = call.grammars
    made = Drafted([[] for _ in call.rows], [[] for _ in call.rows])
    going = list(range(len(call.rows)))
    draft = _scored(batch, call) if batch.runner.kind.at_once else _chained(batch, call, made)
    for step in range(max(call.counts)):
        going = [i for i in going if step < call.counts[i] and not (grammars and grammars.ended(call.rows[i]))]
        if not going:
            break
        chain = draft(step, going, grammars.fill([call.rows[i] for i in going]) if grammars else None)
        if call.embed_target is not None and step == call.counts[0] - 1:
            return _defer(batch, call, made, chain.drafts[0])
        ends = set()
        for i, (token,), (score,) in zip(going, *chain.read(), strict=True):
            row = call.rows[i]
            if score == -math.inf or (grammars and not grammars.accept(row, token)):
                ends.add(i)  # nothing was allowed, or no logit was a number
                continue
            made.ids[i].append(token)
            made.scores[i].append(score)
            if call.ends(token, score):
                ends.add(i)
        going = [i for i in going if i not in ends] if ends else going
    if call.embed_target is not None:
        _embed_last(batch, call, made)
    return made


Step = Callable[[int, list[int], torch.Tensor | None], DraftChain]
"""One draft for each row that goes on: of (step, rows, their masks)."""


def _chained(batch: Batch, call: Call, made: Drafted) -> Step:
    """Each draft follows from the one before."""
    hiddens, rows = call.hiddens, list(range(len(call.rows)))

    def draft(step: int, going: list[int], allowed: torch.Tensor | None) -> DraftChain:
        nonlocal hiddens, rows
        if going != rows:
            hiddens = [hiddens[rows.index(i)] for i in going]
        chain = batch.chain(
            [made.ids[i][-1] if step else call.tokens[i] for i in going],
            hiddens,
            [call.positions[i] + step for i in going],
            [call.states[i] for i in going],
            [1] * len(going),
            ahead=step,
            allowed=allowed,
        )
        hiddens, rows = chain.next_hidden, going
        return chain

    return draft


def _scored(batch: Batch, call: Call) -> Step:
    """All are chosen from scores that one forward gave, under a mask each."""
    scores = batch.scores(call.tokens, call.hiddens, call.positions, call.states, call.counts)

    def draft(step: int, going: list[int], allowed: torch.Tensor | None) -> DraftChain:
        assert allowed is not None, "without masks they come as drafts"
        drafts, logprobs = batch.runner.pick(scores[going, step], allowed)
        return DraftChain(drafts[:, None], logprobs[:, None], scores)

    return draft


def _defer(batch: Batch, call: Call, made: Drafted, token: torch.Tensor) -> Drafted:
    """The last draft stays on the device: only its embedding is written."""
    assert call.embed_target is not None
    batch.runner.embed(token, call.embed_target)
    made.ids[0].append(DEFERRED)
    made.scores[0].append(math.nan)
    made.deferred = token
    return made


def _embed_last(batch: Batch, call: Call, made: Drafted) -> None:
    """The chain ended early, so the last draft is known."""
    assert call.embed_target is not None
    if made.ids[0]:
        batch.runner.embed(batch.token.fill(made.ids[0][-1:]), call.embed_target)


def _cut(call: Call, ids: Sequence[int], scores: Sequence[float]) -> tuple[list[int], list[float]]:
    """Drafts up to and with the first that ends the chain."""
    ends = next((index + 1 for index, draft in enumerate(zip(ids, scores, strict=True)) if call.ends(*draft)), len(ids))
    return list(ids[:ends]), list(scores[:ends])
