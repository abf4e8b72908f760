"""Greedy decoding of a Hugging Face causal LM, plain or speculative, in one loop.

Both kinds run the same code, so that a comparison measures drafting and nothing else. Hiddens are taken with forward
hooks on the decoder's final norm, which mean the same in every transformers version (`output_hidden_states` does not).
Batch 1; tried with transformers 4.57 to 5.24.
"""

from __future__ import annotations

import inspect
import operator
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Any

import torch

from circuitgraph.errors import Fault, RuntimeUseError

from ..arguments import of_kind, shown, whole
from ..mtp import MtpProposer
from ..pool import PoolExhausted
from ..proposer import DraftProposer
from ..verify import accept_greedy

WHERE = "generate"
"""In errors."""


@dataclass
class Stats:
    """Of one generation. `drafted_at[i]` and `accepted_at[i]` count drafts at position i of their chain."""

    new_tokens: int = 0
    steps: int = 0
    """Forwards of the target after the prompt's."""
    drafts: int = 0
    """Steps that verified at least one draft."""
    drafted_at: list[int] = field(default_factory=list)
    accepted_at: list[int] = field(default_factory=list)
    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0
    draft_seconds: float = 0.0
    """Part of decode_seconds spent in the drafter: proposing and catching up."""

    @property
    def tokens_per_second(self) -> float:
        """Of decoding: the first token belongs to the prompt's forward."""
        return max(self.new_tokens - 1, 0) / self.decode_seconds if self.decode_seconds else 0.0

    @property
    def mean_accepted_length(self) -> float:
        """1 + accepted drafts per step that had drafts."""
        return 1.0 + (sum(self.accepted_at) / self.drafts if self.drafts else 0.0)

    def count(self, drafted: int, accepted: int) -> None:
        self.steps += 1
        self.drafts += drafted > 0
        for position in range(drafted):
            if position == len(self.drafted_at):
                self.drafted_at.append(0)
                self.accepted_at.append(0)
            self.drafted_at[position] += 1
            self.accepted_at[position] += position < accepted


@dataclass(frozen=True)
class Generation:
    """ids: the new tokens, an end token included."""

    ids: list[int]
    stats: Stats


class HiddenTap:
    """Captures the decoder's hidden states, [1, rows, H], of the last forward, while entered.

    source: "post_norm", the output of the final norm, or "pre_norm", its input.
    """

    def __init__(self, model: Any, source: str):
        if source not in ("post_norm", "pre_norm"):
            expected, got = "post_norm or pre_norm", shown(source)
            raise RuntimeUseError(Fault("cannot be captured", where="HiddenTap", subject="source", expected=expected, got=got))
        decoder = model.get_decoder()
        names = [name for name in ("norm", "final_layernorm", "ln_f") if hasattr(decoder, name)]
        if not names:
            raise RuntimeUseError(Fault("has no final norm under a known name", where=type(decoder).__name__))
        self._norm: torch.nn.Module = getattr(decoder, names[0])
        self._post = source == "post_norm"
        self.hidden = torch.empty(0)

    def __enter__(self) -> HiddenTap:
        self._handle = self._norm.register_forward_hook(self._capture)
        return self

    def __exit__(self, *exception: object) -> None:
        self._handle.remove()

    def _capture(self, module: torch.nn.Module, args: tuple, output: torch.Tensor) -> None:
        self.hidden = output if self._post else args[0]


class _Target:
    """The model with its cache: feed tokens, get its greedy choices and hiddens."""

    def __init__(self, model: Any, cache: Any, tap: HiddenTap | None):
        from transformers import DynamicCache

        self.model, self.tap = model, tap
        self.cache = DynamicCache(config=model.config) if cache is None else cache
        if tap is not None and hasattr(self.cache, "activate_past_recording"):
            self.cache.activate_past_recording()  # layers of bounded memory can be cropped then
        parameters = inspect.signature(model.forward).parameters
        self._keep = "logits_to_keep" in parameters
        # transformers 5.24 renamed the argument; a model's own forward may still have the old name.
        self._cache_name = "past_key_values" if "past_key_values" in parameters else "cache"

    def feed(self, ids: torch.Tensor, choices: int) -> list[int]:
        """Greedy choices after the last `choices` tokens of ids [1, rows]; their rows join the cache."""
        options: dict[str, Any] = {self._cache_name: self.cache}
        if self._keep:
            options["logits_to_keep"] = choices
        logits = self.model(input_ids=ids, use_cache=True, **options).logits
        return logits[0, -choices:].argmax(-1).tolist()

    def drop(self, rows: int) -> None:
        """Forget the newest rows (rejected drafts)."""
        if rows > 0:  # cropping by 0 empties the cache in some versions
            self.cache.crop(-rows)


@torch.no_grad()
def generate(
    model: Any,
    input_ids: torch.Tensor,
    *,
    proposer: MtpProposer | None = None,
    num_drafts: int = 3,
    max_new_tokens: int = 128,
    eos_ids: Collection[int] = (),
    streamer: Any = None,
    stop: Callable[[torch.Tensor], bool] | None = None,
    cache: Any = None,
) -> Generation:
    """Greedy text of `model` after `input_ids`; with a proposer, the same text in fewer forwards.

    In fp32 the text is identical with and without drafts; in lower precision a forward of several rows rounds
    differently from one of one row, so near-ties between two tokens may fall the other way.

    Args:
        input_ids: int64[1, P], P >= 1.
        proposer: drafts for the model; a state is taken for the call and given back.
        num_drafts: drafts per step, fewer where max_new_tokens leaves less room.
        eos_ids: tokens that end the text (they are kept).
        streamer: gets the prompt, then every token, then `end()`.
        stop: called with all ids [1, so far] after each new token; True ends the text.
        cache: a transformers cache that already holds rows of the first tokens; it grows with the text.

    Raises:
        RuntimeUseError: a batch, an empty prompt, a proposer of another hidden size, or what is no such argument at all.
    """
    _check_prompt(input_ids)
    of_kind(model, torch.nn.Module, "model", WHERE, "a causal LM of transformers")
    whole(max_new_tokens, "max_new_tokens", WHERE, least=1)
    whole(num_drafts, "num_drafts", WHERE)
    of_kind(proposer, (DraftProposer, type(None)), "proposer", WHERE, "a DraftProposer or None")
    ends = _end_ids(eos_ids)
    if proposer is None:
        text = _Text(input_ids, max_new_tokens, ends, streamer, stop)
        return _decode(_Target(model, cache, None), text, None)
    if proposer.runner.hidden_size != model.config.get_text_config().hidden_size:
        expected, got = str(proposer.runner.hidden_size), str(model.config.get_text_config().hidden_size)
        raise RuntimeUseError(Fault("the drafter was made for another model", subject="hidden_size", expected=expected, got=got))
    with HiddenTap(model, proposer.runner.hidden_source) as tap:
        drafting = _Drafting(proposer, num_drafts, input_ids.shape[1] + max_new_tokens)
        text = _Text(input_ids, max_new_tokens, ends, streamer, stop)
        try:
            return _decode(_Target(model, cache, tap), text, drafting)
        finally:
            proposer.free_state(drafting.state)


def _check_prompt(input_ids: Any) -> None:
    fits = isinstance(input_ids, torch.Tensor) and input_ids.dim() == 2 and input_ids.shape[0] == 1 and input_ids.shape[1] >= 1
    if not fits or input_ids.dtype not in (torch.int64, torch.int32):
        expected, got = "int64[1, P], P >= 1", shown(input_ids)
        raise RuntimeUseError(Fault("one prompt at a time", where=WHERE, subject="input_ids", expected=expected, got=got))


def _end_ids(eos_ids: Any) -> frozenset[int]:
    try:
        return frozenset(operator.index(token) for token in eos_ids)
    except TypeError:
        expected, got = "a collection of ints", shown(eos_ids)
        raise RuntimeUseError(Fault("are no tokens", where=WHERE, subject="eos_ids", expected=expected, got=got)) from None


class _Text:
    """The ids so far and when they end."""

    def __init__(self, prompt: torch.Tensor, room: int, eos_ids: frozenset[int], streamer: Any, stop: Callable | None):
        self.prompt = prompt
        self.ids: list[int] = prompt[0].tolist()
        self.room, self.eos_ids, self.streamer, self.stop = room, eos_ids, streamer, stop
        self.new = 0
        self.ended = False
        if streamer is not None:
            streamer.put(prompt.cpu())

    def add(self, tokens: list[int]) -> None:
        """Append tokens one by one, until the text ends."""
        for token in tokens:
            if self.ended:
                return
            self.ids.append(token)
            self.new += 1
            self.room -= 1
            if self.streamer is not None:
                self.streamer.put(torch.tensor([token]))
            self.ended = self.room == 0 or token in self.eos_ids or bool(self.stop and self.stop(self.tensor()))

    def tensor(self) -> torch.Tensor:
        return torch.tensor([self.ids], device=self.prompt.device)

    def feed(self, drafts: list[int]) -> torch.Tensor:
        """What the target has not seen: the newest token and the drafts after it."""
        return torch.tensor([[self.ids[-1], *drafts]], device=self.prompt.device)


class _Drafting:
    """A proposer's side of the loop, timed."""

    def __init__(self, proposer: MtpProposer, num_drafts: int, budget: int):
        self.proposer, self.num_drafts = proposer, num_drafts
        try:
            self.state = proposer.alloc_state_for(budget)
        except PoolExhausted:
            self.state = proposer.alloc_state()  # drafts as far as the pool goes; the text stays right
        self.seconds = 0.0

    def prefill(self, ids: list[int], hidden: torch.Tensor, first: int) -> None:
        """Rows of ids[first:], whose hiddens the target just made."""
        self.proposer.prefill_drafter(ids[first:], hidden[0], self.state, first_pos=first)

    def propose(self, text: _Text, hidden: torch.Tensor) -> list[int]:
        count = min(self.num_drafts, text.room - 1)  # the target adds a token of its own
        if count < 1:
            return []
        started = time.perf_counter()
        drafts = self.proposer.propose(text.ids[-1], hidden, len(text.ids) - 1, count, self.state)
        self.seconds += time.perf_counter() - started
        return drafts

    def verified(self, fed: list[int], accepted: int, hiddens: list[torch.Tensor], position: int) -> None:
        """fed: the newest token, at `position`, and the drafts after it. hiddens: the target's of the token before each."""
        started = time.perf_counter()
        self.proposer.after_verify(accepted, self.state)
        end = accepted + 1
        first = end - min(self.proposer.rows_behind(self.state, position + end), end)
        if first < end:
            self.proposer.catchup_batch([fed[first:end]], [torch.stack(hiddens[first:end])], [position + first], [self.state])
        self.seconds += time.perf_counter() - started


def _decode(target: _Target, text: _Text, drafting: _Drafting | None) -> Generation:
    stats = Stats()
    started = time.perf_counter()
    cached = target.cache.get_seq_length()
    if cached >= len(text.ids):
        expected = f"fewer than {len(text.ids)} rows"
        raise RuntimeUseError(Fault("the cache holds the whole prompt", subject="cache", expected=expected, got=str(cached)))
    choices = target.feed(text.prompt[:, cached:], 1)
    hidden = torch.empty(0)
    if drafting is not None:
        assert target.tap is not None
        drafting.prefill(text.ids, target.tap.hidden, cached)
        hidden = target.tap.hidden[0, -1]
    text.add(choices)
    stats.prefill_seconds = time.perf_counter() - started
    while not text.ended:
        last, position = text.ids[-1], len(text.ids) - 1
        drafts = drafting.propose(text, hidden) if drafting else []
        accepted, bonus = accept_greedy(drafts, target.feed(text.feed(drafts), len(drafts) + 1))
        target.drop(len(drafts) - accepted)
        text.add([*drafts[:accepted], bonus])
        stats.count(len(drafts), accepted)
        if drafting is not None:
            assert target.tap is not None
            drafting.verified([last, *drafts], accepted, [hidden, *target.tap.hidden[0]], position)
            hidden = target.tap.hidden[0, accepted]
    if text.streamer is not None:
        text.streamer.end()
    stats.new_tokens = text.new
    stats.decode_seconds = time.perf_counter() - started - stats.prefill_seconds
    stats.draft_seconds = drafting.seconds if drafting else 0.0
    return Generation(text.ids[-text.new :], stats)


def as_custom_generate(proposer: MtpProposer, *, num_drafts: int = 3, streamer: Any = None) -> Callable[..., torch.Tensor]:
    """A callable for `model.generate(..., custom_generate=...)`: greedy speculative decoding of one prompt.

    transformers hands no streamer to such a callable, so give it here, and not to `generate`.

    The callable raises RuntimeUseError for what it would otherwise ignore: sampling, beams, batches, logits processors.
    """

    def decode(model, input_ids, *, generation_config, logits_processor=None, stopping_criteria=None, **kwargs):
        config = generation_config
        asked = {
            "do_sample": config.do_sample,
            "num_beams > 1": (config.num_beams or 1) > 1,
            "return_dict_in_generate": config.return_dict_in_generate,
            "logits processors": bool(logits_processor),
        }
        refused = [name for name, given in asked.items() if given]
        if refused:
            raise RuntimeUseError(Fault(f"greedy drafting does not support {', '.join(refused)}", where="custom_generate"))
        criteria = stopping_criteria
        cache = kwargs.get("past_key_values", kwargs.get("cache"))
        result = generate(
            model,
            input_ids,
            proposer=proposer,
            num_drafts=num_drafts,
            max_new_tokens=config.max_length - input_ids.shape[1],
            eos_ids=_eos_ids(config.eos_token_id),
            streamer=streamer,
            stop=(lambda ids: bool(criteria(ids, None).all())) if criteria else None,
            cache=cache,
        )
        return torch.cat([input_ids, torch.tensor([result.ids], device=input_ids.device)], dim=1)

    return decode


def _eos_ids(value: int | list[int] | None) -> list[int]:
    if value is None:
        return []
    return [value] if isinstance(value, int) else list(value)
