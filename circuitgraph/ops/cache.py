"""Paged KV: appending rows, and attention of one row over its sequence's rows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from ..circuit.types import StateType, TensorType
from .base import NO_FLOPS, Attr, Op, Sample, TypeRuleError, need_float, need_rank, random_tensors, register


@dataclass(frozen=True)
class PagedKV:
    """Storage and addressing of one paged KV state, as `circuit.ir.State` describes them.

    k, v: [layers, blocks, heads, block_size, dim]; slot, seq, length: int32[n]; table: int32[s, b]; start: int32[s].
    """

    k: torch.Tensor
    v: torch.Tensor
    slot: torch.Tensor
    seq: torch.Tensor
    table: torch.Tensor
    start: torch.Tensor
    length: torch.Tensor

    @property
    def block_size(self) -> int:
        return self.k.shape[3]


@dataclass(frozen=True)
class Sight:
    """Which rows of its sequence a row sees, of those from `start` to `length` - 1: the attributes of `attention` beside scale
    and layer.

    Rows come in blocks of `block`, and a block's rows lie in the cache one behind the other, up to the end that `length` gives
    all of them. So a row's own place is `length` - 1, less the rows behind it in its block that are of its sequence and not idle.
    window: no more than so many rows, counted back from its own (0: all). causal: none behind its own.
    """

    window: int = 0
    block: int = 1
    causal: bool = False

    @staticmethod
    def of(attrs: Mapping[str, Any]) -> Sight:
        """Nodes leave out what has its default."""
        return Sight(**{name: attrs[name] for name in ("window", "block", "causal") if name in attrs})

    @property
    def limited(self) -> bool:
        """Does a row see less than all from `start` to `length`?"""
        return self.window > 0 or (self.causal and self.block > 1)

    def seen(self, context: int) -> int:
        """Rows of so many that a row sees at most."""
        return min(context, self.window + (0 if self.causal else self.block - 1)) if self.window else context

    def read(self, context: int) -> int:
        """Rows of so many that the rows of a block see at most, one or another of them."""
        return min(context, self.window + self.block - 1) if self.window else context

    def refuse(self) -> None:
        """Raises TypeRuleError for what can be no sight."""
        if self.window < 0 or self.block < 1:
            raise TypeRuleError("sees nothing", expected="window >= 0, block >= 1", got=f"{self.window}, {self.block}")
        if 0 < self.window < self.block:
            expected, got = f"{self.block} or more, the rows of a block", f"a window of {self.window}"
            raise TypeRuleError("the window is shorter than a block", expected=expected, got=got)

    def bounds(self, cache: PagedKV) -> tuple[torch.Tensor, torch.Tensor]:
        """(first, end) int64[n] of the rows that each row sees."""
        seq, end = cache.seq.long(), cache.length.long()
        first = torch.where(end > 0, cache.start.long()[seq], torch.zeros_like(end))
        if self.limited:
            row = torch.arange(len(seq), device=seq.device)
            behind = (row > row[:, None]) & (row // self.block == row[:, None] // self.block)
            behind &= (seq == seq[:, None]) & (end > 0)
            own = end - 1 - behind.sum(1)
            first = torch.maximum(first, own + 1 - self.window) if self.window else first
            end = own + 1 if self.causal else end
        return first, end


EVERYTHING = Sight()
SIGHT = {name: Attr(type(default), default, quiet=True) for name, default in vars(EVERYTHING).items()}


@register
class Append(Op):
    """Writes row i's keys and values at slot[i] of the cache (-1 writes nothing) and yields its next version.

    The storage is written in place, as compiled code does, unless autograd needs the older version.
    """

    name = "append"
    inputs = ("cache", "k", "v")
    attrs = {"layer": Attr(int, 0)}
    addressing = ("slot",)

    @staticmethod
    def infer(types, attrs, ctx):
        cache, k, v = types
        if not isinstance(cache, StateType):
            raise TypeRuleError("the first argument must be a state", got=str(cache))
        need_float(types, 1, 2)
        need_rank(k, (3,), "k")
        if k != v:
            raise TypeRuleError("keys and values must have one type", expected=str(k), got=str(v))
        return (cache,)

    @staticmethod
    def reference(args, attrs, ctx):
        cache, k, v = args
        keep = cache.slot >= 0
        slot = cache.slot[keep].long()
        layer = torch.full_like(slot, attrs["layer"])
        index = (layer, slot // cache.block_size, slice(None), slot % cache.block_size)
        rows = {"k": k[keep].to(cache.k.dtype), "v": v[keep].to(cache.v.dtype)}
        made = {}
        for name, new in rows.items():
            old = getattr(cache, name)
            if torch.is_grad_enabled() and (new.requires_grad or old.requires_grad):
                old = old.clone()
            old[index] = new
            made[name] = old
        return (replace(cache, **made),)

    flops = NO_FLOPS

    @staticmethod
    def samples(rows):
        return [_cache_sample(rows, keys=2, per_key=1)]


@register
class Attention(Op):
    """softmax(scale * q k^T) v of each row over rows start..length-1 of its sequence, or those that `window`, `block` and
    `causal` leave; grouped-query heads. See `Sight`.

    Query head h reads KV head h // (Q / KV). A row with no visible rows yields zeros.
    """

    name = "attention"
    inputs = ("q", "cache")
    attrs = {"scale": Attr(float), "layer": Attr(int, 0), **SIGHT}
    addressing = ("seq", "table", "start", "length")

    @staticmethod
    def infer(types, attrs, ctx):
        q, cache = types
        need_float(types, 0)
        need_rank(q, (3,), "q")
        if not isinstance(cache, StateType):
            raise TypeRuleError("the second argument must be a state", got=str(cache))
        Sight.of(attrs).refuse()
        return (q,)

    @staticmethod
    def reference(args, attrs, ctx):
        q, cache = args
        device = q.device
        rows, heads, dim = q.shape
        sequences = cache.table.shape[0]
        seq, length = cache.seq.long(), cache.length.long()
        longest = int(length.max()) if rows else 0
        if longest <= 0:
            return (torch.zeros_like(q),)
        # Every sequence's rows once: [s, t, KV, D].
        steps = torch.arange(longest, device=device)
        last = cache.table.shape[1] - 1
        block = cache.table.long()[:, (steps // cache.block_size).clamp(max=last)]
        offset = (steps % cache.block_size).expand(sequences, -1)
        layer = attrs["layer"]
        # Rows that no query sees may lie in blocks that do not exist; read block 0 for them, masked below.
        longest_of = torch.zeros(sequences, dtype=torch.long, device=device).scatter_reduce(0, seq, length, "amax")
        block = torch.where(steps[None] < longest_of[:, None], block, torch.zeros_like(block))
        k = cache.k[layer, block, :, offset].float()
        v = cache.v[layer, block, :, offset].float()
        # The queries of one sequence side by side: [s, r, ...], so that keys are not copied per row.
        order = torch.argsort(seq, stable=True)
        counts = torch.bincount(seq, minlength=sequences)
        before = counts.cumsum(0) - counts
        place = torch.empty_like(seq)
        place[order] = torch.arange(rows, device=device) - before[seq[order]]
        width = int(counts.max())
        queries = q.new_zeros(sequences, width, heads, dim, dtype=torch.float32)
        queries = queries.index_put((seq, place), q.float())
        first, end = (torch.zeros(sequences, width, 1, dtype=torch.long, device=device) for _ in range(2))
        first[seq, place, 0], end[seq, place, 0] = Sight.of(attrs).bounds(cache)
        group = heads // k.shape[2]
        queries = queries.unflatten(2, (-1, group))
        scores = torch.einsum("srkgd,stkd->skgrt", queries, k) * attrs["scale"]
        seen = (steps >= first) & (steps < end)
        scores = scores.masked_fill(~seen[:, None, None], float("-inf"))
        # A row that sees nothing would be 0/0: give it zeros.
        weights = torch.softmax(scores, dim=-1).masked_fill(~seen.any(-1)[:, None, None, :, None], 0.0)
        # Unwritten rows may hold NaN; zero times NaN is NaN, so unseen values are cleared.
        v = torch.where(seen.any(1)[:, :, None, None], v, torch.zeros_like(v))
        mixed = torch.einsum("skgrt,stkd->srkgd", weights, v).flatten(2, 3)
        return (mixed[seq, place].to(q.dtype),)

    @staticmethod
    def flops(ins, outs, attrs, context):
        rows, heads, dim = ins[0].shape
        return 4 * rows * heads * dim * Sight.of(attrs).seen(context)

    @staticmethod
    def samples(rows):
        base = _cache_sample(rows, keys=2, per_key=2)
        types = (base.types[1], base.types[0])
        made = base.tensors
        assert made is not None, "a cache cannot be made of random floats"

        def tensors(generator, block):
            cache, _, _ = made(generator)
            idle = (torch.arange(rows) % 5 == 1) & (block > 1)  # a block's rows are of one sequence; of some, one is idle
            cache = replace(cache, seq=cache.seq // block, length=cache.length.masked_fill(idle, 0))
            q = torch.randn(rows, 4, 8, generator=generator)
            return [q, cache]

        q = TensorType("f32", (rows, 4, 8))
        sights = (EVERYTHING, Sight(window=3), Sight(window=4, block=3), Sight(window=5, block=2, causal=True))
        return [
            Sample((q, types[1]), {"scale": 0.35, "layer": 0, **vars(sight)}, partial(tensors, block=sight.block))
            for sight in sights
        ]


@register
class AppendLatent(Op):
    """`append` for latent attention: the rotated part as the cache's keys, the latent as its values, one head of each."""

    name = "append_latent"
    inputs = ("cache", "rotated", "latent")
    attrs = {"layer": Attr(int, 0)}
    addressing = ("slot",)

    @staticmethod
    def infer(types, attrs, ctx):
        cache, rotated, latent = types
        if not isinstance(cache, StateType):
            raise TypeRuleError("the first argument must be a state", got=str(cache))
        need_float(types, 1, 2)
        need_rank(rotated, (3,), "the rotated part")
        need_rank(latent, (3,), "the latent")
        if (rotated.dtype, *rotated.shape[:2]) != (latent.dtype, *latent.shape[:2]) or latent.shape[1] != 1:
            raise TypeRuleError("one head of both, a row for each", expected=f"{rotated.dtype}[rows, 1, ...]", got=str(latent))
        return (cache,)

    reference = Append.reference

    flops = NO_FLOPS

    @staticmethod
    def samples(rows):
        return [_latent_sample(rows, ("append_latent", {"layer": 1}))]


@register
class LatentAttention(Op):
    """softmax(scale * (q_latent latent^T + q_rotated rotated^T)) latent: attention whose keys and values are one latent row,
    with projections absorbed into queries and outputs (DeepSeek-V2). Every row from `start` to `length` is visible:
    a window is refused.
    """

    name = "latent_attention"
    inputs = ("q_latent", "q_rotated", "cache")
    attrs = {"scale": Attr(float), "layer": Attr(int, 0), **SIGHT}
    addressing = ("seq", "table", "start", "length")

    @staticmethod
    def infer(types, attrs, ctx):
        q_latent, q_rotated, cache = types
        need_float(types, 0, 1)
        need_rank(q_latent, (3,), "q_latent")
        need_rank(q_rotated, (3,), "q_rotated")
        if (q_latent.dtype, *q_latent.shape[:2]) != (q_rotated.dtype, *q_rotated.shape[:2]):
            raise TypeRuleError("both parts of the queries have the same heads", expected=str(q_latent), got=str(q_rotated))
        if not isinstance(cache, StateType):
            raise TypeRuleError("the third argument must be a state", got=str(cache))
        if Sight.of(attrs).limited:
            raise TypeRuleError("latents are seen by all rows", expected="no window, not causal", got=str(Sight.of(attrs)))
        return (q_latent,)

    @staticmethod
    def reference(args, attrs, ctx):
        q_latent, q_rotated, cache = args
        # Ordinary attention with keys [latent | rotated] and, beside the latent, values of which nothing is kept.
        joined = replace(cache, k=torch.cat([cache.v, cache.k], -1), v=torch.cat([cache.v, torch.zeros_like(cache.k)], -1))
        q = torch.cat([q_latent, q_rotated], -1)
        (mixed,) = Attention.reference([q, joined], attrs, ctx)
        return (mixed[..., : q_latent.shape[2]],)

    @staticmethod
    def flops(ins, outs, attrs, context):
        rows, heads, latent = ins[0].shape
        return 2 * rows * heads * (2 * latent + ins[1].shape[2]) * context

    @staticmethod
    def samples(rows):
        return [_latent_sample(rows, ("latent_attention", {"scale": 0.35, "layer": 0, **vars(EVERYTHING)}))]


def _latent_sample(rows: int, of: tuple[str, dict]) -> Sample:
    """As `_cache_sample`, with 8 rotated columns and 12 latent ones."""
    base = _cache_sample(rows, keys=1, per_key=1)
    made = base.tensors
    assert made is not None, "a cache cannot be made of random floats"
    heads = 1 if of[0] == "append_latent" else 4
    latent, rotated = TensorType("f32", (rows, heads, 12)), TensorType("f32", (rows, heads, 8))

    def tensors(generator):
        cache, _, _ = made(generator)
        cache = replace(cache, v=torch.randn((*cache.k.shape[:4], 12), generator=generator))
        wide, narrow = random_tensors((latent, rotated), generator)
        return [cache, narrow, wide] if heads == 1 else [wide, narrow, cache]

    state = base.types[0]
    types = (state, rotated, latent) if heads == 1 else (latent, rotated, state)
    return Sample(types, of[1], tensors)


def _cache_sample(rows: int, keys: int, per_key: int) -> Sample:
    """A cache of 2 layers, blocks of 4 rows, one sequence a row with 0..11 older rows, blocks in random order."""
    dim, block, width = 8, 4, 3
    row = TensorType("f32", (rows, keys, dim))

    def tensors(generator):
        blocks = rows * width + 1
        order = torch.randperm(blocks, generator=generator)[: rows * width].reshape(rows, width).to(torch.int32)
        length = torch.randint(0, block * width, (rows,), generator=generator, dtype=torch.int32) + 1
        last = length - 1
        slot = order[torch.arange(rows), (last // block).long()] * block + last % block
        start = torch.minimum(torch.randint(0, 3, (rows,), generator=generator, dtype=torch.int32), last)
        shape = (2, blocks, keys, block, dim)
        cache = PagedKV(
            k=torch.randn(shape, generator=generator),
            v=torch.randn(shape, generator=generator),
            slot=slot.to(torch.int32),
            seq=torch.arange(rows, dtype=torch.int32),
            table=order,
            start=start,
            length=length,
        )
        k, v = (torch.randn((rows, keys, dim), generator=generator) for _ in range(2))
        return [cache, k, v]

    return Sample((StateType("kv"), row, row), {"layer": per_key - 1}, tensors)
