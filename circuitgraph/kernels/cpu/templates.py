"""The CPU kernel templates that schedules/cpu.yaml chooses from: groups of nodes to the emitters beside this file."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import networkx
from tvm.tirx.script import builder as T

from ...circuit.ir import Node
from ...circuit.types import StateType, TensorType
from ...plan.ir import VIEWS, Group, Plan, Scratch
from ..base import Kernel, kernel
from . import rows as row_ops
from . import vector as v
from .attention import attention_scratch_floats, attention_splits, emit_attention, emit_kv_append
from .linear import Projection, Tile, default_tile, emit_linear, linear_scratch_floats
from .rows import emit_copy
from .top1 import Top1Scratch, emit_linear_top1, top1_tasks

__all__ = ["Attend", "Linear", "LinearTop1", "Rows", "emit_copy"]


@kernel
class Rows(Kernel):
    """Row-wise nodes one after the other: the generic fallback, and the home of what is too small to split."""

    name = "cpu.rows"

    @dataclass(frozen=True)
    class Params:
        pass

    @staticmethod
    def refuse(plan: Plan, group: Group, params: Any) -> str | None:
        foreign = sorted({node.op for node in group.nodes} - set(_ROW_EMITTERS) - set(VIEWS))
        return f"no row-wise emitter for {', '.join(foreign)}" if foreign else None

    @staticmethod
    def scratch(plan: Plan, group: Group, params: Any) -> tuple[Scratch, ...]:
        return _inner_values(plan, group, group.nodes)

    @staticmethod
    def emit(env, group: Group, params: Any) -> None:
        _emit_rows(env, group.nodes)


@kernel
class Linear(Kernel):
    """Projections that share one input: the prologue by rows, then every weight streamed once in one launch."""

    name = "cpu.linear"

    @dataclass(frozen=True)
    class Params:
        """block: output columns of a task. The others: see `linear.Tile`; 0 takes the measured default for the rows."""

        block: int = 16
        tile_columns: int = 0
        tile_rows: int = 0
        unroll: int = 0
        chains: int = 0
        prefetch: int = 0

    @staticmethod
    def refuse(plan: Plan, group: Group, params: Any) -> str | None:
        foreign = sorted({node.op for node in group.epilogue} - {"silu", "sigmoid", "mul", "add", *VIEWS})
        if foreign:
            return f"no vector form of {', '.join(foreign)} in the epilogue"
        foreign = sorted({node.op for node in group.prologue} - set(_ROW_EMITTERS) - set(VIEWS))
        if foreign:
            return f"no row-wise emitter for {', '.join(foreign)} in the prologue"
        for anchors, _ in _meeting(group):
            shapes = {plan.circuit.types[anchor.inputs[1]].shape for anchor in anchors}  # type: ignore[union-attr]
            if len(shapes) > 1:
                return f"weights that meet in one epilogue have different shapes {sorted(shapes)}"
        return None

    @staticmethod
    def scratch(plan: Plan, group: Group, params: Any) -> tuple[Scratch, ...]:
        return (
            *_inner_values(plan, group, group.prologue),
            _packing(plan, group, lambda lanes: _tile(plan, group, params, lanes)),
        )

    @staticmethod
    def emit(env, group: Group, params: Any) -> None:
        _emit_rows(env, group.prologue)
        crossing = set(env.plan.crossing(group))
        projections = []
        for anchors, epilogue in _meeting(group):
            # Looked up here: a buffer declared inside the loop nest would be declared in every task.
            outside = {name: env.flat(name) for node in epilogue for name in node.inputs if name not in group.made}
            biases = [v.bits_of(env.buffer(anchor.inputs[2])) if len(anchor.inputs) == 3 else None for anchor in anchors]
            made = [value.name for node in (*anchors, *epilogue) for value in node.outputs]
            stores = {name: v.bits_of(env.flat(name)) for name in made if name in crossing}
            loads = {name: v.bits_of(buffer) for name, buffer in outside.items()}
            weights = tuple(env.buffer(anchor.inputs[1]) for anchor in anchors)
            projections.append(Projection(weights, _epilogue(anchors, epilogue, biases, loads, stores)))
        emit_linear(
            env.flat(group.anchors[0].inputs[0]),
            projections,
            n=env.plan.rows,
            lanes=env.lanes,
            block=params.block,
            tile=_tile(env.plan, group, params, env.lanes),
            scratch=env.buffer("packed"),
        )


@kernel
class LinearTop1(Kernel):
    """lm_head, top-1 and log-probability; logits are reduced where they arise."""

    name = "cpu.linear_top1"

    @dataclass(frozen=True)
    class Params:
        """task_columns: vocabulary entries of a task; block: those reduced together. Both multiples of 32."""

        task_columns: int = 512
        block: int = 32

    @staticmethod
    def refuse(plan: Plan, group: Group, params: Any) -> str | None:
        if params.block % 32 or params.task_columns % params.block:
            return f"block {params.block} must be a multiple of 32 and divide task_columns {params.task_columns}"
        shape = [node.op for node in (*group.anchors, *group.epilogue)]
        return None if shape == ["linear", "top1"] else f"expected linear and top1, got {shape}"

    @staticmethod
    def scratch(plan: Plan, group: Group, params: Any) -> tuple[Scratch, ...]:
        weight = plan.circuit.types[group.anchors[0].inputs[1]]
        assert isinstance(weight, TensorType)
        partial = (top1_tasks(int(weight.shape[0]), params.task_columns), plan.rows)
        parts = (("best", "f32"), ("index", "i32"), ("total", "f32"))
        partials = tuple(Scratch(name, TensorType(dtype, partial)) for name, dtype in parts)
        packed = _packing(plan, group, lambda lanes: _head_tile(plan, group, lanes))
        return (*_inner_values(plan, group, group.prologue), packed, *partials)

    @staticmethod
    def emit(env, group: Group, params: Any) -> None:
        _emit_rows(env, group.prologue)
        (linear,), (top1,) = group.anchors, group.epilogue
        token, logprob = (env.buffer(value.name) for value in top1.outputs)
        bias = env.buffer(linear.inputs[2]) if len(linear.inputs) == 3 else None
        scratch = Top1Scratch(*(env.buffer(name) for name in ("best", "index", "total")))
        emit_linear_top1(
            env.buffer(linear.inputs[0]),
            env.buffer(linear.inputs[1]),
            token,
            logprob,
            scratch,
            n=env.plan.rows,
            lanes=env.lanes,
            bias=bias,
            task_columns=params.task_columns,
            block=params.block,
            tile=_head_tile(env.plan, group, env.lanes),
            packed=env.buffer("packed"),
        )


@kernel
class Attend(Kernel):
    """Paged attention of each row over its sequence, then the element-wise rest by rows."""

    name = "cpu.attention"

    @dataclass(frozen=True)
    class Params:
        """splits: pieces of a row's context, 0 chooses by rows and heads; split_rows: least cache rows of a piece."""

        splits: int = 0
        split_rows: int = 64

    @staticmethod
    def refuse(plan: Plan, group: Group, params: Any) -> str | None:
        return None if len(group.anchors) == 1 else "one attention at a time"

    @staticmethod
    def scratch(plan: Plan, group: Group, params: Any) -> tuple[Scratch, ...]:
        heads, dim = _head_shape(plan, group)
        floats = attention_scratch_floats(plan.rows, heads, dim, _splits(plan, group, params))
        pieces = (Scratch("pieces", TensorType("f32", (floats,))),) if floats else ()
        return (*_inner_values(plan, group, group.nodes), *pieces)

    @staticmethod
    def emit(env, group: Group, params: Any) -> None:
        (node,) = group.anchors
        state = _state(env.plan, node)
        layer = int(node.attr["layer"])
        splits = _splits(env.plan, group, params)
        emit_attention(
            env.buffer(node.inputs[0]),
            env.layer_cache(f"{state}.k", layer),
            env.layer_cache(f"{state}.v", layer),
            *(env.buffer(f"{state}.{part}") for part in ("table", "seq", "start", "length")),
            env.buffer(node.name),
            n=env.plan.rows,
            lanes=env.lanes,
            scale=node.attr["scale"],
            splits=splits,
            scratch=env.buffer("pieces") if splits > 1 else None,
            split_rows=params.split_rows,
        )
        _emit_rows(env, group.epilogue)


def _inner_values(plan: Plan, group: Group, nodes: tuple[Node, ...]) -> tuple[Scratch, ...]:
    """Scratch for what `nodes` make and nobody outside the group reads."""
    crossing = {plan.storage(name) for name in plan.crossing(group)}
    inner = []
    for node in nodes:
        for value in node.outputs:
            if node.op not in VIEWS and value.name not in crossing and isinstance(value.type, TensorType):
                inner.append(Scratch(value.name, value.type))
    return tuple(inner)


def _meeting(group: Group) -> list[tuple[tuple[Node, ...], tuple[Node, ...]]]:
    """Anchors whose outputs meet in one epilogue, with that epilogue, in program order."""
    graph = networkx.Graph()
    graph.add_nodes_from(node.name for node in (*group.anchors, *group.epilogue))
    made_by = {value.name: node.name for node in (*group.anchors, *group.epilogue) for value in node.outputs}
    for node in group.epilogue:
        graph.add_edges_from((made_by[name], node.name) for name in node.inputs if name in made_by)
    parts = []
    for component in networkx.connected_components(graph):
        anchors = tuple(node for node in group.anchors if node.name in component)
        parts.append((anchors, tuple(node for node in group.epilogue if node.name in component)))
    return sorted(parts, key=lambda part: group.nodes.index(part[0][0]))


def _epilogue(anchors, epilogue, biases, loads, stores):
    """The callback of `Projection`: evaluates the epilogue nodes on fp32 vectors and stores what crosses groups."""

    def emit(row, column, width, sums):
        values = {}

        def keep(name, value):
            values[name] = T.bind(value)
            if name in stores:
                v.store(stores[name], [row, column], values[name], width)

        for anchor, bias, total in zip(anchors, biases, sums, strict=True):
            keep(anchor.name, total if bias is None else total + v.load(bias, [column], width))
        for node in epilogue:
            operands = [
                values[name] if name in values else T.bind(v.load(loads[name], [row, column], width)) for name in node.inputs
            ]
            keep(node.name, _VECTOR_FORMS[node.op](width, *operands))

    return emit


_VECTOR_FORMS = {
    "add": lambda width, a, b: a + b,
    "mul": lambda width, a, b: a * b,
    "silu": lambda width, x: v.silu(x, width),
    "sigmoid": lambda width, x: v.sigmoid(x, width),
    "heads": lambda width, x: x,
    "merge": lambda width, x: x,
}


def _tile(plan: Plan, group: Group, params: Any, lanes: int) -> Tile:
    """The measured default, with what the schedule sets in its place."""
    weights = max(len(anchors) for anchors, _ in _meeting(group))
    measured = default_tile(plan.rows, weights, lanes, _columns(plan, group))
    return Tile(
        columns=params.tile_columns or measured.columns,
        rows=min(plan.rows, params.tile_rows or measured.rows),
        unroll=params.unroll or measured.unroll,
        chains=params.chains or measured.chains,
        prefetch=params.prefetch or measured.prefetch,
    )


def _head_tile(plan: Plan, group: Group, lanes: int) -> Tile:
    return default_tile(plan.rows, 1, lanes, _columns(plan, group))


def _columns(plan: Plan, group: Group) -> int:
    """K: columns of the input that the group's weights read."""
    x = plan.circuit.types[group.anchors[0].inputs[0]]
    assert isinstance(x, TensorType)
    return int(x.elements() // plan.rows)


def _packing(plan: Plan, group: Group, tile: Callable[[int], Tile]) -> Scratch:
    """Room for the packed activations, whichever vector length the code is built for: plans do not depend on it."""
    k = _columns(plan, group)
    floats = max(linear_scratch_floats(plan.rows, k, lanes, tile(lanes)) for lanes in (4, 8, 16))
    return Scratch("packed", TensorType("f32", (floats,)))


def _head_shape(plan: Plan, group: Group) -> tuple[int, int]:
    q = plan.circuit.types[group.anchors[0].inputs[0]]
    assert isinstance(q, TensorType)
    return int(q.shape[1]), int(q.shape[2])


def _splits(plan: Plan, group: Group, params: Any) -> int:
    name = _state(plan, group.anchors[0])
    kv_heads = next(state.heads for state in plan.circuit.states if state.name == name)
    return params.splits or attention_splits(plan.rows, kv_heads)


def _state(plan: Plan, node: Node) -> str:
    return next(t.state for t in (plan.circuit.types[name] for name in node.inputs) if isinstance(t, StateType))


def _emit_rows(env, nodes: tuple[Node, ...]) -> None:
    for node in nodes:
        if node.op not in VIEWS:
            _ROW_EMITTERS[node.op](env, node, env.lanes)


def _append(env, node: Node, lanes: int) -> None:
    state, layer = _state(env.plan, node), int(node.attr["layer"])
    k_cache, v_cache = (env.layer_cache(f"{state}.{part}", layer) for part in ("k", "v"))
    k, value = (env.buffer(name) for name in node.inputs[1:])
    emit_kv_append(k, value, k_cache, v_cache, env.buffer(f"{state}.slot"), n=env.plan.rows, lanes=lanes)


def _mapped(emitter):
    """Emitters with the plain signature (inputs..., out)."""
    return lambda env, node, lanes: emitter(*(env.buffer(name) for name in (*node.inputs, node.name)), lanes=lanes)


_ROW_EMITTERS = {
    "embed": _mapped(row_ops.emit_embedding),
    "add": _mapped(row_ops.emit_add),
    "mul": _mapped(row_ops.emit_mul),
    "silu": _mapped(row_ops.emit_silu),
    "sigmoid": _mapped(row_ops.emit_sigmoid),
    "append": _append,
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
