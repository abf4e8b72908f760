"""Matrix products and the lm_head's choice of a token."""

from __future__ import annotations

import torch

from ..circuit.types import TensorType
from .base import (
    Cost,
    Op,
    Sample,
    TypeRuleError,
    element_cost,
    need_float,
    need_rank,
    need_shape,
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
    def cost(ins, outs, attrs, context):
        rows, columns = ins[0].shape
        return Cost(element_cost(ins, outs, 0).bytes, 2 * rows * columns * ins[1].shape[0])

    @staticmethod
    def samples(rows):
        x, weight = TensorType("f32", (rows, 48)), TensorType("bf16", (33, 48))
        return [Sample((x, weight), {}), Sample((x, weight, TensorType("bf16", (33,))), {})]


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
    def cost(ins, outs, attrs, context):
        return Cost(element_cost(ins, outs, 0).bytes, 4 * ins[0].elements())

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

    @staticmethod
    def cost(ins, outs, attrs, context):
        return Cost(element_cost(ins, outs, 0).bytes, 4 * ins[0].elements())

    @staticmethod
    def samples(rows):
        types = (TensorType("f32", (rows, 41)), TensorType("i32", (rows, 2)))

        def some(generator):
            words = torch.randint(-(2**31), 2**31, (rows, 2), generator=generator)
            words[:, 0] |= 1 << 7  # something is allowed
            return [*random_tensors(types[:1], generator), words.to(torch.int32)]

        return [Sample(types, {}, some)]
