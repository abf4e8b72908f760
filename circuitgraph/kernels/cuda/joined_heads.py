"""Queries, keys and values whose products come in parts: one launch adds the parts, norms and rotates heads, and appends. A warp
makes one head of a row, or some, whether of queries, keys or values: where keys and values had code of their own, they were there
2 us after the queries.
"""

from __future__ import annotations

from typing import Any

from tvm.tirx.script import builder as T

from ...circuit.ir import Node
from ...plan.fuse import APPENDS
from ...plan.ir import Group, Plan
from .heads import HeadMaker, Turn, chosen, heads_of, refuse_heads
from .row_program import sinks_of
from .shared import state_of
from .values import do, hold, load_int, put, register, wide

WARPS = 4
"""Of a block."""
AT_ONCE = 1536
"""Warps, about, that start beside the products."""


class JoinedHeads:
    """One launch. sums: fp32 [parts, rows, columns of all products]."""

    def __init__(self, env: Any, group: Group, sums: Any):
        self.env, self.sums, self.rows = env, sums, env.plan.rows
        (self.sink,), self.append = sinks_of(env.plan, group, group.epilogue), append_of(group)
        names = (self.sink, *self.append.inputs[1:])
        queries, keys, values = (heads_of(env.plan, group.epilogue, name) for name in names)
        self.dim = keys.pitch
        self.firsts = [first_column(env.plan, group, heads.source) for heads in (queries, keys, values)]
        types = env.plan.circuit.types
        self.counts = [int(types[name].shape[1]) for name in names]
        self.ends = (0, self.counts[0], self.counts[0] + self.counts[1])
        """The first head of each among all of a row."""
        self.maker = HeadMaker(env, queries, keys, self.dim, types[self.sink].dtype)
        state = state_of(env.plan, self.append)
        self.caches, self.slots = [env.cache(f"{state}.{part}") for part in ("k", "v")], env.steady_buffer(f"{state}.slot")

    def emit(self) -> None:
        """A warp takes heads of one row, as many as leave `AT_ONCE` warps or fewer: they share its angles."""
        units = sum(self.counts)
        each = next((each for each in (1, 2, 4) if units % (each * 2) or self.rows * units <= AT_ONCE * each), 4)
        warps = units // each
        with self.env.kernel(-(-self.rows * warps // WARPS), WARPS, early=True) as at:
            unit = hold(T.min(at.block * WARPS + at.warp, T.int32(self.rows * warps - 1)), "int32", "unit")
            row, first = hold(T.floordiv(unit, warps), "int32", "row"), hold(T.floormod(unit, warps), "int32", "first")
            turns = self._fetch(at.lane, row, [hold(first + index * warps, "int32", "head") for index in range(each)])
            self.env.wait()
            found = [self._ask(turn) for turn, _ in turns]
            for (turn, stored), parts in zip(turns, found, strict=True):
                self._make(turn, parts)
                with T.If(stored > 0), T.Then():
                    self.maker.store(turn)

    def _fetch(self, lane: Any, row: Any, places: list[Any]) -> list[tuple[Turn, Any]]:
        """(what is known of a head before the wait, does anybody want it?) of the heads at these places among all of a row."""
        slot, rope = load_int(self.slots, [row]), self.maker.queries.rope
        position = load_int(self.env.steady_buffer(rope.inputs[1]), [row]) if rope else None
        cache, there = self.caches[0], hold(T.max(slot, T.int32(0)), "int32", "slot")
        block, offset = T.floordiv(there, cache.block_size), T.floormod(there, cache.block_size)
        line = hold(cache.line(int(self.append.attr["layer"]), block, 0, offset), "int64", "line")
        turns = []
        for place in places:
            query, value = place < self.ends[1], place >= self.ends[2]
            turn = self._turn(lane, row, place, query, value, line)
            self.maker.fetch_norm(turn, lane, query, value)
            turns.append((turn, hold(T.Cast("int32", T.Or(query, slot >= 0)), "int32", "stored")))
        (shared, _), *others = turns
        self.maker.fetch_angles(shared, lane, position)
        for turn, _ in others:
            turn.cos, turn.sin = shared.cos, shared.sin
        return turns

    def _turn(self, lane: Any, row: Any, place: Any, query: Any, value: Any, line: Any) -> Turn:
        """line: of the cache, of the row's slot and the first head."""
        columns = [first + (place - end) * self.dim + lane * 2 for first, end in zip(self.firsts, self.ends, strict=True)]
        column = hold(T.if_then_else(query, columns[0], T.if_then_else(value, columns[2], columns[1])), "int32", "column")
        source = hold(T.reinterpret("uint64", self.sums.ptr_to([0, row, column])), "uint64")
        head = hold(T.max(place - T.if_then_else(value, self.ends[2], self.ends[1]), T.int32(0)), "int32")
        own = self.env.words(self.sink).ptr_to([row, T.min(place, T.int32(self.counts[0] - 1)) * (self.dim // 2) + lane])
        lines = [cache.lines.ptr_to([line + wide(head) * wide(cache.block_size), wide(lane * 2)]) for cache in self.caches]
        target = chosen(query, value, *(T.reinterpret("uint64", place) for place in (own, *lines)))
        return Turn(place, hold(T.Cast("int32", value), "int32", "value"), source, target, self.maker.each)

    def _ask(self, turn: Turn) -> list[Any]:
        """The columns that a lane has of a head, of every part, on their way together."""
        step, count = self.rows * int(self.sums.shape[2]) * 4, 2 * self.maker.each
        parts = [register("float32", count, "part") for _ in range(int(self.sums.shape[0]))]
        for part, numbers in enumerate(parts):
            for index in range(0, count, 2):
                source = T.reinterpret("handle", turn.source + T.uint64(part * step + 128 * index))
                do(T.ptx["ld.global.v2.f32"](numbers[index], numbers[index + 1], source))
        return parts

    def _make(self, turn: Turn, parts: list[Any]) -> None:
        """Add the parts, norm and rotate; values are only added."""
        numbers, *others = parts
        for index in range(2 * self.maker.each):
            put(numbers, sum((other[index] for other in others), numbers[index]), index)
        for index in range(self.maker.each):
            put(turn.words, self.maker.rounded(numbers, index), index)
        self.maker.turn(turn, numbers)
        for index in range(self.maker.each):
            put(turn.words, T.Select(turn.value > 0, turn.words[index], self.maker.rounded(numbers, index)), index)


def append_of(group: Group) -> Node:
    return next(node for node in group.epilogue if node.op in APPENDS)


def first_column(plan: Plan, group: Group, source: str) -> int:
    """Of the product, among those of all, that becomes these heads; -1: none does."""
    made, first = {node.name: node for node in group.epilogue}, 0
    inputs = made[source].inputs[:1] if source in made and made[source].op == "heads" else ()
    for anchor in group.anchors:
        if inputs == (anchor.name,):
            return first
        first += int(plan.circuit.types[anchor.name].shape[1])  # type: ignore[union-attr]
    return -1


def refuse_joined_heads(plan: Plan, group: Group) -> str | None:
    """Why `JoinedHeads` cannot make what follows these products, or None."""
    types, sinks = plan.circuit.types, sinks_of(plan, group, group.epilogue)
    appends = [node for node in group.epilogue if node.op in APPENDS]
    if len(appends) != 1 or appends[0].op != "append" or len(sinks) != 1:
        return "makes queries, and appends once"
    if any(len(anchor.inputs) > 2 for anchor in group.anchors):
        return "adds no biases"
    if any(item.storage for item in plan.circuit.weights if item.name in group.inputs):
        return "multiplies no sums by scales"
    names = (sinks[0], *appends[0].inputs[1:])
    queries, keys, values = (heads_of(plan, group.epilogue, name) for name in names)
    every = (queries, keys, values)
    if any(heads.start or first_column(plan, group, heads.source) < 0 for heads in every) or values.norm or values.rope:
        return "takes products as they are for heads"
    if len({heads.pitch for heads in every}) > 1 or keys.pitch % 64:
        return "makes heads of as many columns, a multiple of 64"
    known = {node.name for heads in every for node in (heads.norm, heads.rope) if node}
    if others := [node.name for node in group.epilogue if node.op not in ("heads", "append") and node.name not in known]:
        return f"norms and rotates heads alone, got {', '.join(others)}"
    state = next(state for state in plan.circuit.states if state.name == state_of(plan, appends[0]))
    weights = [heads.norm.inputs[1] for heads in every if heads.norm]
    if {types[name].dtype for name in (sinks[0], *weights)} != {state.dtype} or state.dtype == "f32":  # type: ignore[union-attr]
        return "needs queries, weights of norms and the cache in bf16 or f16, all the same"
    return refuse_heads(plan, queries, keys)
