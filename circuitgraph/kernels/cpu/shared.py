"""What several templates need: which ops the emitters know, and the scratch of values, packed activations and pieces."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod

from ...circuit.ir import Node
from ...circuit.types import StateType, TensorType
from ...plan.ir import VIEWS, Group, Plan, Scratch
from ..base import refuse_packed
from .sizes import Tile, linear_scratch_floats, lone_tile, refuse_storage

LANES = (4, 8, 16)
"""Vector lengths that code may be built for. Plans do not depend on them: scratch is large enough for each."""

ROW_OPS = (
    "add",
    "append",
    "append_latent",
    "cat",
    "columns",
    "embed",
    "mul",
    "own_mask",
    "part",
    "rms_norm",
    "rope",
    "scale_rows",
    "shift",
    "sigmoid",
    "silu",
    "target_ids",
    "zero_at",
)
"""Ops with a row-wise emitter (`emission.ROW_EMITTERS`)."""
VECTOR_OPS = ("add", "mul", "scale_rows", "sigmoid", "silu")
"""Ops that an epilogue can do on vectors (`emission.VECTOR_FORMS`)."""


def inner_values(plan: Plan, group: Group, nodes: tuple[Node, ...]) -> tuple[Scratch, ...]:
    """Scratch for what `nodes` make and nobody outside the group reads."""
    crossing = {plan.storage(name) for name in plan.crossing(group)}
    inner = []
    for node in nodes:
        for value in node.outputs:
            if node.op not in VIEWS and value.name not in crossing and isinstance(value.type, TensorType):
                inner.append(Scratch(value.name, value.type))
    return tuple(inner)


def shape_of(plan: Plan, name: str) -> tuple[int, ...]:
    """Of a tensor of a plan, whose rows are a number."""
    tensor = plan.circuit.types[name]
    assert isinstance(tensor, TensorType)
    return tuple(int(size) for size in tensor.shape)


def columns_of(plan: Plan, group: Group) -> int:
    """K: columns of the input that the group's weights read."""
    return prod(shape_of(plan, group.anchors[0].inputs[0])) // plan.rows


def packing(plan: Plan, group: Group, tile: Callable[[int], Tile] | None = None) -> Scratch:
    """Room for the packed activations. tile: from lanes to the product's tile, where it is not `lone_tile`."""
    k = columns_of(plan, group)
    tiles = {lanes: tile(lanes) if tile else lone_tile(plan.rows, lanes, k) for lanes in LANES}
    floats = max(linear_scratch_floats(plan.rows, k, lanes, each) for lanes, each in tiles.items())
    return Scratch.own("packed", TensorType("f32", (floats,)))


def refuse_storages(plan: Plan, group: Group, streamed: Sequence[int] = (1,)) -> str | None:
    """Why the anchors' weights, at the inputs `streamed`, cannot be read as they are stored, or None. What else the group
    reads must be plain."""
    matrices = [name for anchor in group.anchors for at, name in enumerate(anchor.inputs) if at in streamed]
    if reason := refuse_packed(plan, group, matrices=matrices):
        return reason
    storage = plan.circuit.storage
    reasons = (f"'{name}' has {reason}" for name in matrices if name in storage and (reason := refuse_storage(storage[name])))
    return next(reasons, None)


def state_of(plan: Plan, node: Node) -> str:
    return next(t.state for t in (plan.circuit.types[name] for name in node.inputs) if isinstance(t, StateType))
