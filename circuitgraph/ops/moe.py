"""Mixtures of experts: which experts a row goes to and with what shares, and their sum."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ..circuit.types import TensorType
from .base import (
    Attr,
    Op,
    Sample,
    TypeRuleError,
    need_float,
    need_rank,
    need_shape,
    product_flops,
    random_tensors,
    register,
)

SMALLEST_SUM = 1e-20
"""Keeps a row whose shares are all 0 from being divided by 0, as DeepSeek's code does."""


@register
class Route(Op):
    """The `top` experts of each row and their shares: ids i32[n, top] (best first), share f32[n, top].

    Scores are softmax or sigmoid of x @ weight^T, in fp32. The correction, where given, is added for choosing only: shares
    are of the scores without it. With several `groups` of neighbouring experts, experts are chosen among the `kept` groups
    whose two best sum highest (DeepSeek-V3). Shares sum to 1 if `renormalise`, and are multiplied by `factor`. The lowest
    expert wins a tie.
    """

    name = "route"
    inputs = ("x", "weight")
    optional = ("correction",)
    attrs = {
        "top": Attr(int),
        "scoring": Attr(str, "softmax", ("softmax", "sigmoid")),
        "renormalise": Attr(bool, True),
        "factor": Attr(float, 1.0),
        "groups": Attr(int, 1),
        "kept": Attr(int, 1),
    }

    @staticmethod
    def infer(types, attrs, ctx):
        x, weight = types[:2]
        need_float(types, *range(len(types)))
        need_rank(x, (2,), "x")
        need_rank(weight, (2,), "the router")
        experts, top, groups, kept = weight.shape[0], attrs["top"], attrs["groups"], attrs["kept"]
        if weight.shape[1] != x.shape[1]:
            raise TypeRuleError("input and router do not fit", expected=f"a router [experts, {x.shape[1]}]", got=str(weight))
        if len(types) == 3:
            need_shape(types[2], (experts,), "the correction")
        if groups < 1 or experts % groups or (groups > 1 and experts // groups < 2):
            raise TypeRuleError(f"{experts} experts do not split into {groups} groups of 2 or more")
        if not 1 <= kept <= groups:
            raise TypeRuleError(f"cannot keep {kept} of {groups} groups", expected=f"1..{groups}")
        if not 1 <= top <= kept * (experts // groups):
            raise TypeRuleError(f"cannot choose {top} experts", expected=f"1..{kept * (experts // groups)}")
        shape = (x.shape[0], top)
        return (TensorType("i32", shape), TensorType("f32", shape))

    @staticmethod
    def reference(args, attrs, ctx):
        _, scores, choice, *_ = scores_of(args, attrs)
        ids = choice.sort(dim=-1, descending=True, stable=True).indices[:, : attrs["top"]]
        share = scores.gather(1, ids)
        if attrs["renormalise"]:
            share = share / (share.sum(-1, keepdim=True) + SMALLEST_SUM)
        return (ids.to(torch.int32), share * attrs["factor"])

    @staticmethod
    def flops(ins, outs, attrs, context):
        return product_flops(ins[0], ins[1])

    @staticmethod
    def samples(rows):
        x, router = TensorType("f32", (rows, 20)), TensorType("bf16", (12, 20))
        plain = {"top": 3, "scoring": "softmax", "renormalise": True, "factor": 1.0, "groups": 1, "kept": 1}
        grouped = {"top": 4, "scoring": "sigmoid", "renormalise": True, "factor": 2.5, "groups": 4, "kept": 2}
        bare = {**plain, "renormalise": False}
        return [
            Sample((x, router), plain),
            Sample((x, router, TensorType("f32", (12,))), grouped),
            Sample((x, router, TensorType("f32", (12,))), bare),
        ]


def scores_of(args: Sequence[torch.Tensor], attrs: Mapping[str, Any]) -> tuple[torch.Tensor, ...]:
    """Of a route: logits, scores, what experts are chosen by, and where there are groups what those are chosen by, in fp32."""
    logits = args[0].float() @ args[1].float().T
    scores = logits.softmax(-1) if attrs["scoring"] == "softmax" else logits.sigmoid()
    choice = scores + args[2].float() if len(args) == 3 else scores
    if attrs["groups"] == 1:
        return logits, scores, choice
    grouped = choice.unflatten(1, (attrs["groups"], -1))
    best = grouped.topk(2, dim=-1).values.sum(-1)
    kept = best.sort(dim=-1, descending=True, stable=True).indices[:, : attrs["kept"]]
    dropped = torch.ones_like(best, dtype=torch.bool).scatter(1, kept, False)
    return logits, scores, grouped.masked_fill(dropped[:, :, None], float("-inf")).flatten(1), best


def route_margin(args: Sequence[torch.Tensor], attrs: Mapping[str, Any]) -> torch.Tensor:
    """f32[n]: how far off another choice of experts is for each row. At least one of its logits has to change by so many
    of their standard deviations."""
    logits, scores, choice, *groups = scores_of(args, attrs)
    # What a score changes by at most where its logit changes by one; two scores may change, in a group four.
    slope = scores.amax(-1) if attrs["scoring"] == "softmax" else torch.full_like(scores[:, 0], 0.25)
    nearest = _gap(choice, attrs["top"]) / (2 * slope)
    if attrs["scoring"] == "softmax" and len(args) == 2 and not groups:
        nearest = _gap(logits, attrs["top"]) / 2
    for best in groups:
        nearest = torch.minimum(nearest, _gap(best, attrs["kept"]) / (4 * slope))
    return nearest / logits.std(-1)


def _gap(values: torch.Tensor, count: int) -> torch.Tensor:
    """Between the `count`th largest of each row and the one after it; infinite where there is none."""
    ordered = values.sort(dim=-1, descending=True).values
    if count == values.shape[1]:
        return torch.full_like(ordered[:, 0], float("inf"))
    return ordered[:, count - 1] - ordered[:, count]


@register
class Experts(Op):
    """y[i] = sum over j of share[i, j] * down_e(silu(gate_e(x[i])) * up_e(x[i])) with e = ids[i, j].

    Weights of all experts in one tensor: gate and up [E, I, H], down [E, H, I]. Without `up`, gate is [E, 2 * I, H]: first
    the gates, then the ups.
    """

    name = "experts"
    inputs = ("x", "ids", "share", "down", "gate")
    optional = ("up",)

    @staticmethod
    def infer(types, attrs, ctx):
        x, ids, share, down, gate = types[:5]
        need_float(types, 0, 2, *range(3, len(types)))
        need_rank(x, (2,), "x")
        need_rank(ids, (2,), "ids")
        need_rank(down, (3,), "the experts' down")
        if ids.dtype != "i32" or ids.shape[0] != x.shape[0]:
            raise TypeRuleError("ids are i32, a row of them for each row of x", got=str(ids))
        need_shape(share, ids.shape, "the shares")
        experts, hidden, inner = down.shape
        if hidden != x.shape[1]:
            raise TypeRuleError("input and experts do not fit", expected=f"down [E, {x.shape[1]}, I]", got=str(down))
        if len(types) == 6:
            need_shape(gate, (experts, inner, hidden), "the experts' gate")
            need_shape(types[5], (experts, inner, hidden), "the experts' up")
        else:
            need_shape(gate, (experts, 2 * inner, hidden), "the experts' gate and up")
        return (x,)

    @staticmethod
    def reference(args, attrs, ctx):
        x, ids, share, down, gate = args[:5]
        wide = x.float()
        mixed = torch.zeros_like(wide)
        for expert in ids.unique().tolist():
            row, place = (ids == expert).nonzero(as_tuple=True)
            inner = down.shape[2]
            up_weight = args[5][expert] if len(args) == 6 else gate[expert, inner:]
            g, u = wide[row] @ gate[expert, :inner].float().T, wide[row] @ up_weight.float().T
            made = (torch.nn.functional.silu(g) * u) @ down[expert].float().T
            mixed = mixed.index_add(0, row, made * share[row, place].float()[:, None])
        return (mixed.to(x.dtype),)

    @staticmethod
    def flops(ins, outs, attrs, context):
        _, hidden, inner = ins[3].shape
        return 6 * ins[1].elements() * hidden * inner

    @staticmethod
    def reads(position, ins, attrs):
        """Of the experts, only those that rows go to: at most one for each choice of each row."""
        if position < 3:
            return None
        experts = int(ins[position].shape[0])
        return ins[position].bytes() // experts * min(experts, ins[1].elements())

    @staticmethod
    def samples(rows):
        experts, hidden, inner, top = 6, 20, 9, 2
        head = (TensorType("f32", (rows, hidden)), TensorType("i32", (rows, top)), TensorType("f32", (rows, top)))
        down = TensorType("bf16", (experts, hidden, inner))
        apart = (*head, down, *[TensorType("bf16", (experts, inner, hidden))] * 2)
        fused = (*head, down, TensorType("bf16", (experts, 2 * inner, hidden)))

        def tensors(types):
            def make(generator):
                ids = torch.rand(rows, experts, generator=generator).argsort(-1)[:, :top].to(torch.int32)
                return [*random_tensors(types[:1], generator), ids, *random_tensors(types[2:], generator)]

            return make

        return [Sample(types, {}, tensors(types)) for types in (apart, fused)]
