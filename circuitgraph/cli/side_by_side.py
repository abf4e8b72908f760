"""Plain and speculative decoding of the same prompts with the same loop, in turn."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..runtime import BlockPool, DraftRunner, MtpProposer
from ..runtime.integrations.transformers import Generation, generate
from .target import Target


@dataclass(frozen=True)
class Pair:
    """One prompt, decoded twice."""

    prompt: str
    text: str
    plain: Generation
    drafted: Generation

    @property
    def identical(self) -> bool:
        return self.plain.ids == self.drafted.ids

    def to_json(self) -> dict[str, Any]:
        speeds = {"plain": self.plain.stats.tokens_per_second, "speculative": self.drafted.stats.tokens_per_second}
        return {
            "prompt": self.prompt,
            "text": self.text,
            "identical": self.identical,
            "tokens": len(self.plain.ids),
            "tokens_per_second": speeds,
            "mean_accepted_length": self.drafted.stats.mean_accepted_length,
            "acceptance": acceptance([self]),
        }


def decode_pairs(
    target: Target,
    runner: DraftRunner,
    prompts: Sequence[str],
    *,
    num_drafts: int,
    max_new_tokens: int,
    chat: bool,
    report: Callable[[str, int, int], None],
) -> list[Pair]:
    """Decode every prompt plainly and with drafts. The first prompt is decoded once unmeasured, to warm everything up."""
    ids = [target.prompt_ids(prompt, chat) for prompt in prompts]
    longest = max(tensor.shape[1] for tensor in ids) + max_new_tokens + num_drafts
    block_size = runner.block_size or 16
    pool = BlockPool(runner.circuit, blocks=-(-longest // block_size) + 1, block_size=block_size)
    proposer = MtpProposer(runner, pool)

    def decode(prompt: torch.Tensor, drafter: MtpProposer | None, tokens: int = max_new_tokens) -> Generation:
        return generate(
            target.model, prompt, proposer=drafter, num_drafts=num_drafts, max_new_tokens=tokens, eos_ids=target.eos_ids
        )

    steps = 1 + 2 * len(prompts)
    report("warming up", 0, steps)
    for drafter in (None, proposer):
        decode(ids[0], drafter, tokens=min(8, max_new_tokens))
    pairs = []
    for index, (prompt, tensor) in enumerate(zip(prompts, ids, strict=True)):
        report(f"plain: {prompt[:40]}", 1 + 2 * index, steps)
        plain = decode(tensor, None)
        report(f"with drafts: {prompt[:40]}", 2 + 2 * index, steps)
        drafted = decode(tensor, proposer)
        pairs.append(Pair(prompt, target.tokenizer.decode(plain.ids, skip_special_tokens=True), plain, drafted))
    return pairs


def tokens_per_second(generations: Sequence[Generation]) -> float:
    """Over all of them: decoded tokens by decoding time."""
    seconds = sum(generation.stats.decode_seconds for generation in generations)
    return sum(max(generation.stats.new_tokens - 1, 0) for generation in generations) / seconds if seconds else 0.0


def mean_accepted_length(pairs: Sequence[Pair]) -> float:
    """1 + accepted drafts per verify step that had drafts, over all prompts."""
    drafts = sum(pair.drafted.stats.drafts for pair in pairs)
    return 1 + (sum(sum(pair.drafted.stats.accepted_at) for pair in pairs) / drafts if drafts else 0.0)


def acceptance(pairs: Sequence[Pair]) -> list[float]:
    """Share of drafts accepted at each position, over all prompts."""
    depth = max((len(pair.drafted.stats.drafted_at) for pair in pairs), default=0)
    shares = []
    for position in range(depth):
        drafted = sum(sum(pair.drafted.stats.drafted_at[position : position + 1]) for pair in pairs)
        accepted = sum(sum(pair.drafted.stats.accepted_at[position : position + 1]) for pair in pairs)
        shares.append(accepted / drafted)
    return shares


def summary(pairs: Sequence[Pair]) -> dict[str, Any]:
    """Of all prompts together, for tables and JSON."""
    plain = tokens_per_second([pair.plain for pair in pairs])
    drafted = tokens_per_second([pair.drafted for pair in pairs])
    return {
        "prompts": len(pairs),
        "identical": sum(pair.identical for pair in pairs),
        "tokens_per_second": {"plain": plain, "speculative": drafted},
        "speedup": drafted / plain if plain else 0.0,
        "mean_accepted_length": mean_accepted_length(pairs),
        "acceptance": acceptance(pairs),
    }
