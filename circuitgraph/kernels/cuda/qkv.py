"""The ends of a QKV group's products: queries are rotated and stored, keys rotated and appended, values appended."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tvm.tirx.script import builder as T

from ...circuit.ir import Node
from ...plan.ir import Group, Plan
from .plain import Pairs
from .row_program import sinks_of
from .shared import state_of
from .values import hold, load, load_int, put, register, store_at, wide


@dataclass(frozen=True)
class End:
    """What becomes of one product of a QKV group: heads, perhaps rotated, which are stored or appended as the cache's `part`."""

    anchor: Node
    name: str
    pairs: Pairs
    rope: Node | None
    append: Node | None
    part: str


def ends_of(plan: Plan, group: Group) -> list[End] | str:
    """Of every product of a QKV group, or why `HeadEnds` has no form of one."""
    found = [_end_of(plan, group, anchor) for anchor in group.anchors]
    ends = [end for end in found if isinstance(end, End)]
    return next((reason for reason in found if isinstance(reason, str)), ends)


def _end_of(plan: Plan, group: Group, anchor: Node) -> End | str:
    types, inputs = plan.circuit.types, {item.name for item in plan.circuit.inputs}
    if len(anchor.inputs) > 2:
        return "adds no bias"
    after = {node.inputs[0]: node for node in group.epilogue if node.op != "append"}
    name, chain = anchor.name, []
    while name in after:
        chain.append(after[name])
        name = chain[-1].name
    if [node.op for node in chain] not in (["heads"], ["heads", "rope"]):
        return f"no form of {', '.join(node.op for node in chain)} after a product"
    rope = chain[1] if len(chain) > 1 else None
    append = next((node for node in group.epilogue if node.op == "append" and name in node.inputs[1:]), None)
    dim, turned = int(types[name].shape[2]), 0  # type: ignore[union-attr]
    if rope is not None:
        turned = 2 * int(types[rope.inputs[2]].shape[1])  # type: ignore[union-attr]
        if rope.attr["style"] != "half" or rope.inputs[1] != "position" or "position" not in inputs:
            return "rotates halves of heads at positions that are given"
    part = "k" if append is None or append.inputs[1] == name else "v"
    return End(anchor, name, Pairs(dim, turned), rope, append, part)


def refuse_ends(plan: Plan, group: Group, pairs: int) -> str | None:
    """Why `HeadEnds` cannot end the products of a QKV group whose tiles have so many pairs of columns, or None."""
    ends = ends_of(plan, group)
    if isinstance(ends, str):
        return ends
    appended = [name for node in group.epilogue if node.op == "append" for name in node.inputs[1:]]
    if sorted(appended) != sorted(end.name for end in ends if end.append) or len(appended) > 2:
        return "appends the keys and values that it makes, once"
    x = plan.circuit.types[group.anchors[0].inputs[0]]
    if {state.dtype for state in plan.circuit.states} != {x.dtype}:  # type: ignore[union-attr]
        return f"needs a cache of the activations' dtype {x.dtype}"  # type: ignore[union-attr]
    kept = {plan.storage(end.name) for end in ends if end.append is None}
    if kept != set(sinks_of(plan, group, (*group.anchors, *group.epilogue))):
        return "stores queries alone"
    odd = [size for end in ends for size in end.pairs.parts if size % (2 * pairs)]
    return f"{odd[0]} columns of a head do not split into tiles of {2 * pairs}" if odd else None


class HeadEnds:
    """The ends of the products of a QKV group: rotation, and the store of a query or of a row of the cache.

    See `stream.Early`: positions and slots are there before the program starts. What differs from product to product, where
    both numbers go and by which angle they turn, is found while the tile is multiplied; the end itself is one piece of code.
    """

    def __init__(self, env: Any, ends: Sequence[End]):
        self.env, self.ends = env, ends
        self.targets = [env.flat(end.name) if end.append is None else self._cache(end).lines for end in ends]

    def _cache(self, end: End) -> Any:
        assert end.append is not None
        return self.env.cache(f"{state_of(self.env.plan, end.append)}.{end.part}")

    def begin(self, row: Any) -> None:
        self.row = row
        self.position, self.slot = register("int32", name="position"), register("int32", name="slot")
        self.block, self.offset = register("int32", name="block"), register("int32", name="offset")
        self.places = register("uint64", 2, "places")
        self.turns = register("float32", 2, "turns")
        ropes = [end.rope for end in self.ends if end.rope]
        appends = [end for end in self.ends if end.append]
        if ropes:
            put(self.position, load_int(self.env.steady_buffer(ropes[0].inputs[1]), [row]))
        if appends:
            put(self.slot, load_int(self.env.steady_buffer(f"{state_of(self.env.plan, appends[0].append)}.slot"), [row]))
            size = self._cache(appends[0]).block_size
            put(self.block, T.floordiv(T.max(self.slot[0], T.int32(0)), size))
            put(self.offset, T.floormod(T.max(self.slot[0], T.int32(0)), size))

    def fetch(self, projection: int, column: Any) -> None:
        end = self.ends[projection]
        inside = hold(T.floormod(column, end.pairs.dim), "int32", "inside")
        apart = end.pairs.apart(inside)
        for index, number in enumerate((1, 0)):
            put(self.turns, T.float32(number), index)
        if end.rope:
            with T.If(inside < end.pairs.turned), T.Then():
                for index, table in enumerate(end.rope.inputs[2:4]):
                    put(self.turns, load(self.env.buffer(table), [self.position[0], inside], constant=True), index)
        place = hold(T.reinterpret("uint64", self.targets[projection].ptr_to(self._place(projection, column))), "uint64")
        put(self.places, place)
        put(self.places, place + T.Cast("uint64", apart * 2), 1)
        if end.append is not None:
            with T.If(self.slot[0] < 0), T.Then():
                put(self.places, T.uint64(0))

    def _place(self, projection: int, column: Any) -> list[Any]:
        end = self.ends[projection]
        if end.append is None:
            return [self.row, column]
        head = T.floordiv(column, end.pairs.dim)
        line = self._cache(end).line(int(end.append.attr["layer"]), self.block[0], head, self.offset[0])
        return [line, wide(T.floormod(column, end.pairs.dim))]

    def finish(self, sums: list[Any]) -> None:
        (first, second), cos, sin = sums, self.turns[0], self.turns[1]
        with T.If(self.places[0] != T.uint64(0)), T.Then():
            for index, value in enumerate((first * cos - second * sin, second * cos + first * sin)):
                store_at(self.targets[0], self.places[index], value)
