"""Matrix products and the lm_head's choice of a token."""

from __future__ import annotations

import torch

from ..circuit.types import TensorType
from .base import (
    NO_FLOPS,
    Attr,
    Op,
    Sample,
    TypeRuleError,
    need_float,
    need_ints,
    need_rank,
    need_shape,
    product_flops,
    random_tensors,
    register,
)


@register
class Linear(Op):
    """y = x @ weight^T (+ bias). Weight is [out, in] as checkpoints store it; sums are fp32."""

    name = "linear"
    inputs = ("x", "weight")
    optional = ("bias",)

    @staticmethod
    def infer(types, attrs, ctx):
        x, weight = types[:2]
        need_float(types, *range(len(types)))
        need_rank(x, (2,), "x")
        need_rank(weight, (2,), "the weight")
        if x.shape[1] != weight.shape[1]:
            hint = None
            if weight.shape[1] == 2 * x.shape[1]:
                hint = "The weight reads twice the columns: concatenate a second input first?"
            elif weight.shape[0] == x.shape[1]:
                hint = "Weights are [out, in]: is this one transposed?"
            expected = f"a weight [out, {x.shape[1]}]"
            raise TypeRuleError("input and weight do not fit", expected=expected, got=str(weight), hint=hint)
        if len(types) == 3:
            need_shape(types[2], weight.shape[:1], "the bias")
        return (TensorType(x.dtype, (x.shape[0], weight.shape[0])),)

    @staticmethod
    def reference(args, attrs, ctx):
        x, weight = args[:2]
        y = x.float() @ weight.float().T
        if len(args) == 3:
            y = y + args[2].float()
        return (y.to(x.dtype),)

    @staticmethod
    def flops(ins, outs, attrs, context):
        return product_flops(ins[0], ins[1])

    @staticmethod
    def samples(rows):
        x, weight = TensorType("f32", (rows, 48)), TensorType("bf16", (33, 48))
        return [Sample((x, weight), {}), Sample((x, weight, TensorType("bf16", (33,))), {})]


@register
class HeadLinear(Op):
    """A matrix of its own for each head: rows start..start+size-1 of the head's block W_h of the weight [heads * block, L].

    into latent: y[n, h] = x[n, h] @ W_h, [n, h, size] to [n, h, L]. into heads: y[n, h] = W_h x[n, h], the other way round.
    Latent attention absorbs its up-projections so: DeepSeek-V2's kv_b_proj holds those of keys and values, head by head.
    """

    name = "head_linear"
    inputs = ("x", "weight")
    attrs = {"start": Attr(int), "size": Attr(int), "into": Attr(str, choices=("latent", "heads"))}

    @staticmethod
    def infer(types, attrs, ctx):
        x, weight = types
        need_float(types, 0, 1)
        need_rank(x, (3,), "x")
        need_rank(weight, (2,), "the weight")
        rows, heads, _ = x.shape
        start, size, latent = attrs["start"], attrs["size"], weight.shape[1]
        if weight.shape[0] % heads or start < 0 or size < 1 or start + size > weight.shape[0] // heads:
            expected = f"a weight [{heads} * block, L] with rows {start}..{start + size - 1} in each block"
            raise TypeRuleError("heads and weight do not fit", expected=expected, got=str(weight))
        need_shape(x, (rows, heads, size if attrs["into"] == "latent" else latent), "x")
        return (TensorType(x.dtype, (rows, heads, latent if attrs["into"] == "latent" else size)),)

    @staticmethod
    def reference(args, attrs, ctx):
        x, weight = args
        blocks = weight.float().unflatten(0, (x.shape[1], -1))[:, attrs["start"] : attrs["start"] + attrs["size"]]
        y = torch.einsum("nhd,hdl->nhl" if attrs["into"] == "latent" else "nhl,hdl->nhd", x.float(), blocks)
        return (y.to(x.dtype),)

    @staticmethod
    def reads(position, ins, attrs):
        x, weight = ins
        return weight.bytes() * attrs["size"] * x.shape[1] // weight.shape[0] if position == 1 else None

    @staticmethod
    def flops(ins, outs, attrs, context):
        return 2 * ins[0].elements() * outs[0].shape[2]

    @staticmethod
    def samples(rows):
        weight = TensorType("bf16", (3 * 9, 14))
        into, out = {"start": 0, "size": 4, "into": "latent"}, {"start": 4, "size": 5, "into": "heads"}
        return [
            Sample((TensorType("f32", (rows, 3, 4)), weight), into),
            Sample((TensorType("f32", (rows, 3, 14)), weight), out),
        ]


@register
class Top1(Op):
    """The best token of each row and its log-probability: argmax(x), max(x) - logsumexp(x). The lowest id wins a tie."""

    name = "top1"
    inputs = ("logits",)

    @staticmethod
    def infer(types, attrs, ctx):
        (logits,) = types
        need_float(types, 0)
        need_rank(logits, (2,), "logits")
        rows = logits.shape[:1]
        return (TensorType("i32", rows), TensorType("f32", rows))

    @staticmethod
    def reference(args, attrs, ctx):
        logits = args[0].float()
        return _best(logits, ~logits.isnan())

    @staticmethod
    def flops(ins, outs, attrs, context):
        return 4 * ins[0].elements()

    @staticmethod
    def samples(rows):
        types = (TensorType("f32", (rows, 41)),)

        def ties(generator):
            (logits,) = random_tensors(types, generator)
            return [logits.round()]

        return [Sample(types, {}), Sample(types, {}, ties)]


def _best(logits: torch.Tensor, seen: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Lowest id of the largest logit among those that are seen, and its log-softmax among them. Where nothing is: 0, -inf."""
    logits = logits.masked_fill(~seen, float("-inf"))
    columns = torch.arange(logits.shape[-1], device=logits.device)
    best = logits.amax(dim=-1)
    lost = best == float("-inf")
    token = torch.where(logits == best[:, None], columns, logits.shape[-1]).amin(dim=-1).masked_fill(lost, 0)
    # Where nothing is seen, -inf minus -inf would be NaN.
    logprob = best - logits.masked_fill(lost[:, None], 0.0).logsumexp(dim=-1)
    return (token.to(torch.int32), logprob)


MASK_BITS = 32
"""Tokens that one word of a mask stands for."""


@register
class MaskedTop1(Op):
    """`top1` among the tokens that a bitmask allows: bit c % 32 of word c // 32 is column c, 1 allows it.

    Forbidden columns count for neither result; NaN logits are forbidden, too. Where nothing is allowed: token 0 and
    log-probability -inf.
    """

    name = "masked_top1"
    inputs = ("logits", "allowed")

    @staticmethod
    def infer(types, attrs, ctx):
        logits, allowed = types
        need_float(types, 0)
        need_rank(logits, (2,), "logits")
        need_rank(allowed, (2,), "the mask")
        rows, columns = logits.shape
        if allowed.dtype != "i32" or allowed.shape[0] != rows or allowed.shape[1] * MASK_BITS < columns:
            expected = f"i32[{rows}, {-(-columns // MASK_BITS)}]"
            raise TypeRuleError("a mask has a bit for every column", expected=expected, got=str(allowed))
        return (TensorType("i32", (rows,)), TensorType("f32", (rows,)))

    @staticmethod
    def reference(args, attrs, ctx):
        logits, allowed = args[0].float(), args[1]
        columns = torch.arange(logits.shape[-1], device=logits.device)
        bits = allowed[:, columns // MASK_BITS] >> (columns % MASK_BITS).to(torch.int32)
        return _best(logits, ((bits & 1) == 1) & ~logits.isnan())

    flops = staticmethod(Top1.flops)

    @staticmethod
    def samples(rows):
        types = (TensorType("f32", (rows, 41)), TensorType("i32", (rows, 2)))

        def some(generator):
            words = torch.randint(-(2**31), 2**31, (rows, 2), generator=generator)
            words[:, 0] |= 1 << 7  # something is allowed
            return [*random_tensors(types[:1], generator), words.to(torch.int32)]

        return [Sample(types, {}, some)]


@register
class OwnMask(Op):
    """A mask of a drafter's own ids from one of the target's: bit c is bit c + offsets[c] of `allowed`. Bits behind the last own
    id are 0."""

    name = "own_mask"
    inputs = ("allowed", "offsets")

    @staticmethod
    def infer(types, attrs, ctx):
        allowed, offsets = types
        need_ints(allowed, (2,), "the mask")
        need_ints(offsets, (1,), "the offsets", ("i32", "i64"))
        return (TensorType("i32", (allowed.shape[0], -(-offsets.shape[0] // MASK_BITS))),)

    @staticmethod
    def reference(args, attrs, ctx):
        allowed, offsets = args
        own = torch.arange(len(offsets), device=offsets.device)
        target = own + offsets.long()
        bits = (allowed[:, target // MASK_BITS] >> (target % MASK_BITS).to(torch.int32)) & 1
        bits = torch.nn.functional.pad(bits, (0, -len(own) % MASK_BITS)).unflatten(1, (-1, MASK_BITS)).long()
        words = (bits << torch.arange(MASK_BITS, device=bits.device)).sum(-1)
        return (torch.where(words >= 2**31, words - 2**32, words).to(torch.int32),)

    flops = NO_FLOPS

    @staticmethod
    def samples(rows):
        types = (TensorType("i32", (rows, 3)), TensorType("i32", (41,)))

        def some(generator):
            words = torch.randint(-(2**31), 2**31, (rows, 3), generator=generator).to(torch.int32)
            ids = torch.randperm(96, generator=generator)[:41].sort().values
            return [words, (ids - torch.arange(41)).to(torch.int32)]

        return [Sample(types, {}, some)]
