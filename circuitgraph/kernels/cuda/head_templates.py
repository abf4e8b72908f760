"""Templates for products with a matrix for each head (see head_linear.py)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ...circuit.ir import Node
from ...plan.ir import VIEWS, Group, Plan, Scratch
from ..base import Kernel, kernel
from .architectures import architecture_of
from .formats import scales_of
from .head_linear import Finish, HeadProduct, emit_head_product, emit_plain_head_product
from .row_program import Evaluator, Place, refuse_rows, sinks_of
from .shared import emit_prologue, format_of, prologue_scratch, refuse_dtypes, refuse_prologue, refuse_quantised
from .values import store


def part_of(plan: Plan, group: Group) -> Node | None:
    """The part of each head that is the whole prologue and that nobody else reads: the product reads it where it is cut from."""
    (anchor,) = group.anchors
    alone = [node.op for node in group.prologue] == ["part"] and group.prologue[0].name == anchor.inputs[0]
    return group.prologue[0] if alone and not sinks_of(plan, group, group.prologue) else None


def product_of(plan: Plan, group: Group) -> HeadProduct:
    (anchor,), types = group.anchors, plan.circuit.types
    part = part_of(plan, group)
    rows, heads, stride = (int(size) for size in types[part.inputs[0] if part else anchor.inputs[0]].shape)  # type: ignore[union-attr]
    height, latent = (int(size) for size in types[anchor.inputs[1]].shape)  # type: ignore[union-attr]
    return HeadProduct(
        rows=rows,
        heads=heads,
        block=height // heads,
        start=int(anchor.attr["start"]),
        size=int(anchor.attr["size"]),
        latent=latent,
        into_latent=anchor.attr["into"] == "latent",
        first=int(part.attr["start"]) if part else 0,
        stride=stride,
    )


def source_of(env: Any, group: Group) -> str:
    """The name of the value that x is in; emits the prologue where it is a launch of its own."""
    part = part_of(env.plan, group)
    if part is None:
        emit_prologue(env, group, 4)
    return part.inputs[0] if part else group.anchors[0].inputs[0]


def scratch_of(plan: Plan, group: Group) -> tuple[Scratch, ...]:
    return () if part_of(plan, group) else prologue_scratch(plan, group)


def refuse_head_project(plan: Plan, group: Group) -> str | None:
    rows = refuse_prologue(plan, group) or refuse_rows(plan, group.epilogue, sinks_of(plan, group, group.nodes))
    return rows or refuse_quantised(plan, group)


def finish_of(env: Any, group: Group) -> Finish:
    """The epilogue on one result."""
    (anchor,), product = group.anchors, product_of(env.plan, group)
    nodes = [*group.anchors, *group.epilogue]
    targets = {name: env.flat(name) for name in sinks_of(env.plan, group, nodes)}

    def finish(row, head, column, value):
        evaluator = Evaluator(env, [node for node in group.epilogue if node.op not in VIEWS], {anchor.name: lambda _: value})
        for name, target in targets.items():
            store(target, [row, head * product.made + column], evaluator.at(name, Place(row, head, column)))

    return finish


@kernel
class HeadStream(Kernel):
    """Products with a matrix for each head in bf16 or f16 on tensor cores, every matrix read once for 64 rows; weights may be
    fp8 or int8."""

    name = "cuda.head_stream"
    patterns = ("head_project",)

    @dataclass(frozen=True)
    class Params:
        pass

    @staticmethod
    def refuse(plan: Plan, group: Group, params: Any) -> str | None:
        product = product_of(plan, group)
        reason = refuse_dtypes(plan, group) or product.refuse() or product.refuse_storage(format_of(plan, group))
        if reason is None and product.shared_bytes > architecture_of(plan).shared_bytes:
            return f"needs {product.shared_bytes} B of shared memory"
        return reason or refuse_head_project(plan, group)

    @staticmethod
    def scratch(plan: Plan, group: Group, params: Any) -> tuple[Scratch, ...]:
        return scratch_of(plan, group)

    @staticmethod
    def emit(env, group: Group, params: Any) -> None:
        source, (anchor,) = source_of(env, group), group.anchors
        weight, product = anchor.inputs[1], product_of(env.plan, group)
        format, scales = format_of(env.plan, group), scales_of(env, weight)
        emit_head_product(env, product, env.words(source), env.words(weight), format, scales, finish_of(env, group))


@kernel
class HeadPlain(Kernel):
    """Products with a matrix for each head, of any sizes and dtypes: a thread a result."""

    name = "cuda.head_plain"
    patterns = ("head_project",)

    @dataclass(frozen=True)
    class Params:
        pass

    @staticmethod
    def refuse(plan: Plan, group: Group, params: Any) -> str | None:
        return refuse_head_project(plan, group)

    @staticmethod
    def scratch(plan: Plan, group: Group, params: Any) -> tuple[Scratch, ...]:
        return scratch_of(plan, group)

    @staticmethod
    def emit(env, group: Group, params: Any) -> None:
        source, (anchor,) = source_of(env, group), group.anchors
        weight, product = anchor.inputs[1], product_of(env.plan, group)
        finish = finish_of(env, group)
        emit_plain_head_product(env, product, env.buffer(source), env.buffer(weight), scales_of(env, weight), finish)
