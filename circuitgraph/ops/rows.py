"""Ops that work on each row alone: gather, norms, concatenation, element-wise maths, reshapes, RoPE."""

from __future__ import annotations

import torch

from ..circuit.types import TensorType
from .base import (
    NO_FLOPS,
    Attr,
    Op,
    Sample,
    TypeRuleError,
    elementwise,
    need_float,
    need_ints,
    need_rank,
    need_shape,
    random_tensors,
    register,
)


@register
class Embed(Op):
    """y[i] = table[ids[i]], in the activation dtype. Ids lie in [0, V): the caller checks."""

    name = "embed"
    inputs = ("ids", "table")

    @staticmethod
    def infer(types, attrs, ctx):
        ids, table = types
        need_ints(ids, (1,), "ids")
        need_rank(table, (2,), "the embedding table")
        need_float(types, 1)
        return (TensorType(ctx.act, (ids.shape[0], table.shape[1])),)

    @staticmethod
    def reference(args, attrs, ctx):
        ids, table = args
        return (torch.nn.functional.embedding(ids.long(), table).to(ctx.torch_act),)

    @staticmethod
    def reads(position, ins, attrs):
        ids, table = ins
        return table.bytes() // int(table.shape[0]) * ids.elements() if position == 1 else None

    flops = NO_FLOPS

    @staticmethod
    def samples(rows):
        types = (TensorType("i32", (rows,)), TensorType("bf16", (37, 24)))

        def tensors(generator):
            ids = torch.randint(0, 37, (rows,), generator=generator, dtype=torch.int32)
            return [ids, *random_tensors(types[1:], generator)]

        return [Sample(types, {}, tensors)]


@register
class Shift(Op):
    """y = x + by, for positions."""

    name = "shift"
    inputs = ("x",)
    attrs = {"by": Attr(int)}

    @staticmethod
    def infer(types, attrs, ctx):
        if not isinstance(types[0], TensorType) or types[0].dtype != "i32":
            raise TypeRuleError("shift works on i32 positions", got=str(types[0]))
        return (types[0],)

    @staticmethod
    def reference(args, attrs, ctx):
        return (args[0] + attrs["by"],)

    flops = NO_FLOPS

    @staticmethod
    def samples(rows):
        types = (TensorType("i32", (rows,)),)
        return [Sample(types, {"by": -1}, lambda g: [torch.randint(0, 99, (rows,), generator=g, dtype=torch.int32)])]


@register
class ZeroAt(Op):
    """y[i] = 0 where position[i] == value, else x[i]. The position-0 mask of some engines."""

    name = "zero_at"
    inputs = ("x", "position")
    attrs = {"value": Attr(int, 0)}

    @staticmethod
    def infer(types, attrs, ctx):
        x, position = types
        need_float(types, 0)
        need_rank(x, (2,), "x")
        need_shape(position, (x.shape[0],), "position")
        return (x,)

    @staticmethod
    def reference(args, attrs, ctx):
        x, position = args
        return (torch.where((position == attrs["value"])[:, None], torch.zeros_like(x), x),)

    flops = NO_FLOPS

    @staticmethod
    def samples(rows):
        types = (TensorType("f32", (rows, 19)), TensorType("i32", (rows,)))

        def tensors(generator):
            position = torch.randint(0, 2, (rows,), generator=generator, dtype=torch.int32)
            return [*random_tensors(types[:1], generator), position]

        return [Sample(types, {"value": 0}, tensors)]


@register
class RmsNorm(Op):
    """y = x / sqrt(mean(x^2) + eps) * w over the last axis; flavour zero_centred multiplies by (1 + w).

    Zhang & Sennrich 2019; the zero-centred form is Gemma's and Qwen3-Next's.
    """

    name = "rms_norm"
    inputs = ("x", "scale")
    attrs = {"eps": Attr(float), "flavour": Attr(str, "plain", ("plain", "zero_centred"))}

    @staticmethod
    def infer(types, attrs, ctx):
        x, scale = types
        need_float(types, 0, 1)
        need_rank(x, (2, 3), "x")
        need_shape(scale, x.shape[-1:], "the scale")
        return (x,)

    @staticmethod
    def reference(args, attrs, ctx):
        x, scale = args
        wide = x.float()
        weight = scale.float() + (1.0 if attrs["flavour"] == "zero_centred" else 0.0)
        return ((wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + attrs["eps"]) * weight).to(x.dtype),)

    flops = elementwise(4)

    @staticmethod
    def samples(rows):
        flat = (TensorType("f32", (rows, 40)), TensorType("bf16", (40,)))
        heads = (TensorType("f32", (rows, 3, 24)), TensorType("f32", (24,)))
        return [
            Sample(flat, {"eps": 1e-5, "flavour": "plain"}),
            Sample(heads, {"eps": 1e-6, "flavour": "zero_centred"}),
        ]


@register
class Cat(Op):
    """Concatenation on the last axis."""

    name = "cat"
    inputs = ("x",)
    variadic = True

    @staticmethod
    def infer(types, attrs, ctx):
        need_float(types, *range(len(types)))
        first = types[0]
        for item in types[1:]:
            if item.shape[:-1] != first.shape[:-1] or item.dtype != first.dtype:
                raise TypeRuleError("cat joins equal types on the last axis", expected=str(first), got=str(item))
        return (TensorType(first.dtype, (*first.shape[:-1], sum(item.shape[-1] for item in types))),)

    @staticmethod
    def reference(args, attrs, ctx):
        return (torch.cat(list(args), dim=-1),)

    flops = NO_FLOPS

    @staticmethod
    def samples(rows):
        return [Sample((TensorType("f32", (rows, 17)), TensorType("f32", (rows, 8))), {})]


@register
class TargetIds(Op):
    """y[i] = ids[i] + offsets[ids[i]]: ids of a drafter's own, smaller vocabulary to ids of the target's (EAGLE-3's `d2t`)."""

    name = "target_ids"
    inputs = ("ids", "offsets")

    @staticmethod
    def infer(types, attrs, ctx):
        ids, offsets = types
        need_ints(ids, (1,), "ids")
        need_ints(offsets, (1,), "the offsets", ("i32", "i64"))
        return (ids,)

    @staticmethod
    def reference(args, attrs, ctx):
        ids, offsets = args
        return ((ids + offsets[ids.long()]).to(torch.int32),)

    @staticmethod
    def reads(position, ins, attrs):
        ids, offsets = ins
        return offsets.bytes() // offsets.elements() * ids.elements() if position == 1 else None

    flops = NO_FLOPS

    @staticmethod
    def samples(rows):
        types = (TensorType("i32", (rows,)), TensorType("i64", (31,)))

        def tensors(generator):
            ids = torch.randint(0, 31, (rows,), generator=generator, dtype=torch.int32)
            return [ids, torch.randint(0, 9, (31,), generator=generator)]

        return [Sample(types, {}, tensors)]


@register
class Columns(Op):
    """Vectors [n] side by side: y[i, j] = x_j[i]. What several heads drafted, as one tensor."""

    name = "columns"
    inputs = ("x",)
    variadic = True

    @staticmethod
    def infer(types, attrs, ctx):
        for item in types:
            need_rank(item, (1,), "x")
            if item != types[0]:
                raise TypeRuleError("columns joins vectors of one type", expected=str(types[0]), got=str(item))
            if item.dtype not in ("i32", "f32"):
                raise TypeRuleError("columns joins i32 or f32", got=str(item))
        return (TensorType(types[0].dtype, (types[0].shape[0], len(types))),)

    @staticmethod
    def reference(args, attrs, ctx):
        return (torch.stack(list(args), dim=-1),)

    flops = NO_FLOPS

    @staticmethod
    def samples(rows):
        whole = TensorType("i32", (rows,))

        def tensors(generator):
            return [torch.randint(-9, 9, (rows,), generator=generator, dtype=torch.int32) for _ in range(3)]

        return [Sample((whole,) * 3, {}, tensors), Sample((TensorType("f32", (rows,)),) * 2, {})]


def _elementwise(arity: int):
    def infer(types, attrs, ctx):
        need_float(types, *range(arity))
        for item in types[1:]:
            if item != types[0]:
                raise TypeRuleError("both sides must have one type", expected=str(types[0]), got=str(item))
        return (types[0],)

    return staticmethod(infer)


def _elementwise_samples(arity: int):
    def samples(rows):
        return [Sample((TensorType("f32", (rows, 21)),) * arity, {})]

    return staticmethod(samples)


@register
class Add(Op):
    """y = a + b."""

    name = "add"
    inputs = ("a", "b")
    infer = _elementwise(2)
    samples = _elementwise_samples(2)

    @staticmethod
    def reference(args, attrs, ctx):
        return ((args[0].float() + args[1].float()).to(args[0].dtype),)

    flops = elementwise(1)


@register
class Mul(Op):
    """y = a * b."""

    name = "mul"
    inputs = ("a", "b")
    infer = _elementwise(2)
    samples = _elementwise_samples(2)

    @staticmethod
    def reference(args, attrs, ctx):
        return ((args[0].float() * args[1].float()).to(args[0].dtype),)

    flops = elementwise(1)


@register
class ScaleRows(Op):
    """y[i] = x[i] * factor[i, 0]: a gate with one number a row."""

    name = "scale_rows"
    inputs = ("x", "factor")

    @staticmethod
    def infer(types, attrs, ctx):
        x, factor = types
        need_float(types, 0, 1)
        need_rank(x, (2,), "x")
        need_shape(factor, (x.shape[0], 1), "the factor")
        return (x,)

    @staticmethod
    def reference(args, attrs, ctx):
        return ((args[0].float() * args[1].float()).to(args[0].dtype),)

    flops = elementwise(1)

    @staticmethod
    def samples(rows):
        return [Sample((TensorType("f32", (rows, 21)), TensorType("f32", (rows, 1))), {})]


@register
class Silu(Op):
    """y = x * sigmoid(x)."""

    name = "silu"
    inputs = ("x",)
    infer = _elementwise(1)
    samples = _elementwise_samples(1)

    @staticmethod
    def reference(args, attrs, ctx):
        return (torch.nn.functional.silu(args[0].float()).to(args[0].dtype),)

    flops = elementwise(4)


@register
class Sigmoid(Op):
    """y = 1 / (1 + exp(-x))."""

    name = "sigmoid"
    inputs = ("x",)
    infer = _elementwise(1)
    samples = _elementwise_samples(1)

    @staticmethod
    def reference(args, attrs, ctx):
        return (torch.sigmoid(args[0].float()).to(args[0].dtype),)

    flops = elementwise(3)


@register
class Heads(Op):
    """[n, heads * d] seen as [n, heads, d]."""

    name = "heads"
    inputs = ("x",)
    attrs = {"count": Attr(int)}

    @staticmethod
    def infer(types, attrs, ctx):
        (x,) = types
        need_rank(x, (2,), "x")
        if x.shape[1] % attrs["count"]:
            raise TypeRuleError(f"{x.shape[1]} columns do not split into {attrs['count']} heads", got=str(x))
        return (TensorType(x.dtype, (x.shape[0], attrs["count"], x.shape[1] // attrs["count"])),)

    @staticmethod
    def reference(args, attrs, ctx):
        return (args[0].unflatten(1, (attrs["count"], -1)),)

    flops = NO_FLOPS

    @staticmethod
    def samples(rows):
        return [Sample((TensorType("f32", (rows, 24)),), {"count": 3})]


@register
class Merge(Op):
    """[n, heads, d] seen as [n, heads * d]."""

    name = "merge"
    inputs = ("x",)

    @staticmethod
    def infer(types, attrs, ctx):
        (x,) = types
        need_rank(x, (3,), "x")
        return (TensorType(x.dtype, (x.shape[0], x.shape[1] * x.shape[2])),)

    @staticmethod
    def reference(args, attrs, ctx):
        return (args[0].flatten(1),)

    flops = NO_FLOPS

    @staticmethod
    def samples(rows):
        return [Sample((TensorType("f32", (rows, 3, 8)),), {})]


@register
class Part(Op):
    """Columns start..start+size-1 of the last axis."""

    name = "part"
    inputs = ("x",)
    attrs = {"start": Attr(int), "size": Attr(int)}

    @staticmethod
    def infer(types, attrs, ctx):
        (x,) = types
        need_float(types, 0)
        if attrs["start"] < 0 or attrs["size"] < 1 or attrs["start"] + attrs["size"] > x.shape[-1]:
            wanted = f"columns {attrs['start']}..{attrs['start'] + attrs['size'] - 1}"
            raise TypeRuleError(f"{wanted} lie outside of x", got=str(x))
        return (TensorType(x.dtype, (*x.shape[:-1], attrs["size"])),)

    @staticmethod
    def reference(args, attrs, ctx):
        return (args[0][..., attrs["start"] : attrs["start"] + attrs["size"]],)

    flops = NO_FLOPS

    @staticmethod
    def samples(rows):
        return [Sample((TensorType("f32", (rows, 3, 16)),), {"start": 8, "size": 8})]


@register
class Rope(Op):
    """Rotary position embedding of the first 2 * cos.shape[1] columns of every head (Su et al. 2021).

    style half rotates column j with j + R/2 (Llama, Qwen), interleaved rotates 2j with 2j + 1 (DeepSeek, GPT-J).
    Rows of cos and sin are positions; positions lie in [0, P).
    """

    name = "rope"
    inputs = ("x", "position", "cos", "sin")
    attrs = {"style": Attr(str, "half", ("half", "interleaved"))}

    @staticmethod
    def infer(types, attrs, ctx):
        x, position, cos, sin = types
        need_float(types, 0)
        need_rank(x, (3,), "x")
        need_shape(position, (x.shape[0],), "position")
        need_rank(cos, (2,), "the cosine table")
        if cos != sin:
            raise TypeRuleError("cosine and sine tables must have one type", expected=str(cos), got=str(sin))
        if 2 * cos.shape[1] > x.shape[2]:
            raise TypeRuleError("the table rotates more columns than a head has", expected=str(x), got=str(cos))
        return (x,)

    @staticmethod
    def reference(args, attrs, ctx):
        x, position, cos, sin = args
        rotary = 2 * cos.shape[1]
        c, s = cos[position.long()][:, None], sin[position.long()][:, None]
        wide = x[..., :rotary].float()
        if attrs["style"] == "half":
            a, b = wide.chunk(2, dim=-1)
            turned = torch.cat([a * c - b * s, b * c + a * s], dim=-1)
        else:
            a, b = wide[..., 0::2], wide[..., 1::2]
            turned = torch.stack([a * c - b * s, b * c + a * s], dim=-1).flatten(-2)
        return (torch.cat([turned.to(x.dtype), x[..., rotary:]], dim=-1),)

    @staticmethod
    def flops(ins, outs, attrs, context):
        return 3 * outs[0].elements()

    @staticmethod
    def samples(rows):
        samples = []
        for style, rotary in (("half", 8), ("half", 4), ("interleaved", 8)):
            table = TensorType("f32", (50, rotary // 2))
            types = (TensorType("f32", (rows, 3, 8)), TensorType("i32", (rows,)), table, table)

            def tensors(generator, types=types):
                position = torch.randint(0, 50, (rows,), generator=generator, dtype=torch.int32)
                angle = torch.rand(types[2].shape, generator=generator) * 6.28
                return [*random_tensors(types[:1], generator), position, angle.cos(), angle.sin()]

            samples.append(Sample(types, {"style": style}, tensors))
        return samples
