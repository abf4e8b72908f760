"""How the CPU templates emit: nodes of a group to calls of the emitters beside this file."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from functools import partial
from typing import Any

from tvm.tirx.script import builder as T

from ...circuit.ir import Node
from ...ops.cache import Sight
from ...plan.ir import VIEWS, Group
from . import rows as row_ops
from . import vector as v
from .attention import emit_attention, emit_kv_append
from .experts import ExpertsScratch, emit_experts
from .head_linear import emit_into_heads, emit_into_latent
from .latent import emit_latent_attention
from .linear import Projection, emit_linear
from .packed import weight_of
from .route import emit_route
from .shared import ROW_OPS, VECTOR_OPS, state_of
from .sizes import Tile
from .top1 import Top1Scratch, emit_linear_top1


def emit_projections(
    env: Any, group: Group, meeting: Sequence[tuple[tuple[Node, ...], tuple[Node, ...]]], block: int, tile: Tile
) -> None:
    """The prologue by rows, then all weights in one launch; `meeting` pairs anchors with the epilogue they share."""
    emit_rows(env, group.prologue)
    crossing = set(env.plan.crossing(group))
    projections = []
    for anchors, epilogue in meeting:
        # Looked up here: a buffer declared inside the loop nest would be declared in every task.
        outside = {name: env.flat(name) for node in epilogue for name in node.inputs if name not in group.made}
        biases = [v.bits_of(env.buffer(anchor.inputs[2])) if len(anchor.inputs) == 3 else None for anchor in anchors]
        made = [value.name for node in (*anchors, *epilogue) for value in node.outputs]
        stores = {name: v.bits_of(env.flat(name)) for name in made if name in crossing}
        loads = {name: v.bits_of(buffer) for name, buffer in outside.items()}
        weights = tuple(weight_of(env, anchor.inputs[1]) for anchor in anchors)
        projections.append(Projection(weights, _epilogue(anchors, epilogue, biases, loads, stores)))
    x = env.flat(group.anchors[0].inputs[0])
    emit_linear(x, projections, n=env.plan.rows, lanes=env.lanes, block=block, tile=tile, scratch=env.scratch("packed"))


def emit_head(env: Any, group: Group, task_columns: int, block: int) -> None:
    """lm_head, top-1, masked or not, and log-probability."""
    emit_rows(env, group.prologue)
    (linear,), (top1,) = group.anchors, group.epilogue
    token, logprob = (env.buffer(value.name) for value in top1.outputs)
    emit_linear_top1(
        env.buffer(linear.inputs[0]),
        weight_of(env, linear.inputs[1]),
        token,
        logprob,
        Top1Scratch(*(env.scratch(name) for name in ("best", "index", "total"))),
        n=env.plan.rows,
        lanes=env.lanes,
        allowed=env.buffer(top1.inputs[1]) if top1.op == "masked_top1" else None,
        bias=env.buffer(linear.inputs[2]) if len(linear.inputs) == 3 else None,
        task_columns=task_columns,
        block=block,
        packed=env.scratch("packed"),
    )


def emit_attend(env: Any, group: Group, splits: int, split_rows: int) -> None:
    """Paged attention, then the element-wise rest by rows."""
    sight = Sight.of(group.anchors[0].attr)
    _over_cache(partial(emit_attention, sight=sight), env, group, 1, splits, split_rows, in_memory=splits > 1)
    emit_rows(env, group.epilogue)


def emit_router(env: Any, group: Group, block: int) -> None:
    """A row's experts and their shares."""
    (node,) = group.anchors
    emit_route(
        env.buffer(node.inputs[0]),
        weight_of(env, node.inputs[1]),
        env.buffer(node.inputs[2]) if len(node.inputs) == 3 else None,
        *(env.buffer(value.name) for value in node.outputs),
        env.scratch("logits"),
        n=env.plan.rows,
        lanes=env.lanes,
        attrs=node.attr,
        block=block,
        packed=env.scratch("packed"),
    )


def emit_mixture(env: Any, group: Group, block: int, down_block: int) -> None:
    """The chosen experts of all rows, and their sum."""
    (node,) = group.anchors
    emit_experts(
        *(env.buffer(name) for name in node.inputs[:3]),
        *(weight_of(env, name) for name in node.inputs[3:5]),
        weight_of(env, node.inputs[5]) if len(node.inputs) == 6 else None,
        env.buffer(node.name),
        ExpertsScratch(**{field.name: env.scratch(field.name) for field in fields(ExpertsScratch)}),
        n=env.plan.rows,
        lanes=env.lanes,
        block=block,
        down_block=down_block,
    )


def emit_head_project(env: Any, group: Group, sliced: Node | None, block: int, columns: int) -> None:
    """A matrix for each head; `sliced` is the prologue, where it is read in place."""
    (node,) = group.anchors
    if sliced is None:
        emit_rows(env, group.prologue)
    x = env.buffer(node.inputs[0] if sliced is None else sliced.inputs[0])
    weight, out = weight_of(env, node.inputs[1]), env.buffer(node.name)
    common = {"n": env.plan.rows, "lanes": env.lanes, "start": node.attr["start"]}
    common["skip"] = 0 if sliced is None else sliced.attr["start"]
    if node.attr["into"] == "latent":
        emit_into_latent(x, weight, out, **common, size=node.attr["size"], columns=columns)
    else:
        emit_into_heads(x, weight, out, **common, packed=env.scratch("packed"), block=block)


def emit_attend_latent(env: Any, group: Group, splits: int, split_rows: int) -> None:
    """Attention over latents."""
    _over_cache(emit_latent_attention, env, group, 2, splits, split_rows)


def _over_cache(emit: Any, env: Any, group: Group, queries: int, splits: int, split_rows: int, *, in_memory: bool = True) -> None:
    """Attention, whose first `queries` inputs are that, over its layer of a cache; in_memory: whether its pieces have scratch."""
    (node,) = group.anchors
    state = state_of(env.plan, node)
    emit(
        *(env.buffer(name) for name in node.inputs[:queries]),
        *_caches(env, node),
        *(env.buffer(f"{state}.{part}") for part in ("table", "seq", "start", "length")),
        env.buffer(node.name),
        n=env.plan.rows,
        lanes=env.lanes,
        scale=node.attr["scale"],
        splits=splits,
        scratch=env.scratch("pieces") if in_memory else None,
        split_rows=split_rows,
    )


def _caches(env: Any, node: Node) -> list[Any]:
    """The layer's part of the keys and of the values."""
    state, layer = state_of(env.plan, node), int(node.attr["layer"])
    return [env.layer_cache(f"{state}.{part}", layer) for part in ("k", "v")]


def _epilogue(anchors, epilogue, biases, loads, stores):
    """The callback of `Projection`: evaluates the epilogue nodes on fp32 vectors and stores what crosses groups."""

    def emit(row, column, width, sums):
        values = {}

        def keep(name, value):
            values[name] = T.bind(value)
            if name in stores:
                v.store(stores[name], [row, column], values[name], width)

        def load(name, row, column, width):
            if int(loads[name].shape[1]) == 1:  # a number for the whole row
                return T.bind(v.splat(v.load(loads[name], [row, 0]), width))
            return T.bind(v.load(loads[name], [row, column], width))

        for anchor, bias, total in zip(anchors, biases, sums, strict=True):
            keep(anchor.name, total if bias is None else total + v.load(bias, [column], width))
        for node in epilogue:
            operands = [values[name] if name in values else load(name, row, column, width) for name in node.inputs]
            keep(node.name, VECTOR_FORMS[node.op](width, *operands))

    return emit


VECTOR_FORMS = {
    "add": lambda width, a, b: a + b,
    "mul": lambda width, a, b: a * b,
    "scale_rows": lambda width, a, factor: a * factor,
    "silu": lambda width, x: v.silu(x, width),
    "sigmoid": lambda width, x: v.sigmoid(x, width),
    "heads": lambda width, x: x,
    "merge": lambda width, x: x,
}


def emit_rows(env: Any, nodes: Sequence[Node]) -> None:
    """Nodes one after the other."""
    for node in nodes:
        if node.op not in VIEWS:
            ROW_EMITTERS[node.op](env, node, env.lanes)


def _append(env, node: Node, lanes: int) -> None:
    caches = _caches(env, node)
    k, value = (env.buffer(name) for name in node.inputs[1:])
    slot = env.buffer(f"{state_of(env.plan, node)}.slot")
    emit_kv_append(k, value, *caches, slot, n=env.plan.rows, lanes=lanes)


def _mapped(emitter):
    """Emitters with the plain signature (inputs..., out)."""
    return lambda env, node, lanes: emitter(*(env.buffer(name) for name in (*node.inputs, node.name)), lanes=lanes)


ROW_EMITTERS = {
    "embed": _mapped(row_ops.emit_embedding),
    "add": _mapped(row_ops.emit_add),
    "mul": _mapped(row_ops.emit_mul),
    "silu": _mapped(row_ops.emit_silu),
    "sigmoid": _mapped(row_ops.emit_sigmoid),
    "append": _append,
    "append_latent": _append,
    "scale_rows": _mapped(row_ops.emit_scale_rows),
    "columns": lambda env, node, lanes: row_ops.emit_columns([env.buffer(name) for name in node.inputs], env.buffer(node.name)),
    "own_mask": lambda env, node, lanes: row_ops.emit_own_mask(*(env.buffer(name) for name in (*node.inputs, node.name))),
    "target_ids": lambda env, node, lanes: row_ops.emit_target_ids(*(env.buffer(name) for name in (*node.inputs, node.name))),
    "shift": lambda env, node, lanes: row_ops.emit_shift(env.buffer(node.inputs[0]), node.attr["by"], env.buffer(node.name)),
    "zero_at": lambda env, node, lanes: row_ops.emit_zero_rows(
        *(env.buffer(name) for name in node.inputs), node.attr["value"], env.buffer(node.name), lanes=lanes
    ),
    "rms_norm": lambda env, node, lanes: row_ops.emit_rms_norm(
        *(env.buffer(name) for name in (*node.inputs, node.name)),
        eps=node.attr["eps"],
        lanes=lanes,
        plus_one=node.attr["flavour"] == "zero_centred",
    ),
    "cat": lambda env, node, lanes: row_ops.emit_concat(
        [env.buffer(name) for name in node.inputs], env.buffer(node.name), lanes=lanes
    ),
    "part": lambda env, node, lanes: row_ops.emit_slice(
        env.buffer(node.inputs[0]), env.buffer(node.name), node.attr["start"], lanes=lanes
    ),
    "rope": lambda env, node, lanes: row_ops.emit_rope(
        env.buffer(node.inputs[0]),
        env.buffer(node.inputs[2]),
        env.buffer(node.inputs[3]),
        env.buffer(node.inputs[1]),
        env.buffer(node.name),
        lanes=lanes,
        interleaved=node.attr["style"] == "interleaved",
    ),
}

# What the templates promise is what there is.
assert set(ROW_EMITTERS) == set(ROW_OPS)
assert set(VECTOR_FORMS) == {*VECTOR_OPS, *VIEWS}
