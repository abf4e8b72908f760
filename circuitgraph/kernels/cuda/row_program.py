"""Row-wise nodes as one kernel: every value is computed where it is wanted, and only what others read is stored.

A value that a warp or block needs as a whole, the sum of squares of a norm, is reduced before the elements are formed;
everything else is recomputed from its inputs, which lie in L1.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from tvm.tirx.script import builder as T

from ...circuit.ir import Node
from ...circuit.types import StateType, TensorType
from ...plan.ir import VIEWS
from .values import do, hold, load, load_int, put, register, sigmoid, silu, store, wide

ELEMENTWISE = {
    "add": lambda a, b: a + b,
    "mul": lambda a, b: a * b,
    "silu": silu,
    "sigmoid": sigmoid,
}
OPS = frozenset({*ELEMENTWISE, *VIEWS, "append", "cat", "embed", "part", "rms_norm", "rope", "shift", "zero_at"})

UNROLLED = 16
"""Elements of a thread up to which a loop is written out, so that its loads are in flight together."""


@dataclass(frozen=True)
class Place:
    """Where an element lies: row, head (0 for values without heads) and column of the head."""

    row: Any
    head: Any
    column: Any


class Evaluator:
    """Values of one group at a place. `known` gives values that were computed by other means."""

    def __init__(self, env: Any, nodes: Sequence[Node], known: dict[str, Callable[[Place], Any]] | None = None):
        self.env, self.types = env, env.plan.circuit.types
        self.nodes = nodes
        self.producer = {value.name: node for node in nodes for value in node.outputs}
        self.known = known or {}
        self.prepared: dict[str, Any] = {}

    def shape(self, name: str) -> tuple[int, int]:
        """(heads, columns of a head)."""
        dims = [int(dim) for dim in self.types[name].shape[1:]]
        return (1, *dims)[-2:] if dims else (1, 1)

    def upstream(self, names: Iterable[str]) -> list[Node]:
        """The group's nodes that `names` are computed from, in program order."""
        wanted, stack = set(), list(names)
        while stack:
            name = stack.pop()
            node = self.producer.get(name)
            if node is not None and name not in self.known and node.name not in wanted:
                wanted.add(node.name)
                stack += node.inputs
        return [node for node in self.nodes if node.name in wanted]

    def prepare(self, names: Iterable[str], row: Any, head: Any, total: Callable[[Any, int], Any]) -> None:
        """Compute what is one number for a row or head. `total(term, columns)` sums term(column) over a head."""
        self.prepared = {}
        for node in self.upstream(names):
            if node.op == "embed":
                self.prepared[node.name] = load_int(self.env.buffer(node.inputs[0]), [row])
            elif node.op in ("zero_at", "rope"):
                self.prepared[node.name] = self.at(node.inputs[1], Place(row, 0, 0))
            elif node.op == "rms_norm":
                columns = self.shape(node.name)[1]

                def square(column, name=node.inputs[0]):
                    value = self.at(name, Place(row, head, column))
                    return value * value

                mean = total(square, columns) * T.float32(1.0 / columns)
                self.prepared[node.name] = hold(T.rsqrt(mean + T.float32(node.attr["eps"])))

    def at(self, name: str, place: Place) -> Any:
        """One element, fp32 (int32 for integer values)."""
        if name in self.known:
            return self.known[name](place)
        node = self.producer.get(name)
        if node is None:
            return self._outside(name, place)
        if node.op in ELEMENTWISE:
            return hold(ELEMENTWISE[node.op](*(self.at(item, place) for item in node.inputs)))
        return getattr(self, f"_{node.op}")(node, place)

    def _outside(self, name: str, place: Place) -> Any:
        if self.types[name].dtype == "i32":
            return load_int(self.env.buffer(name), [place.row])
        _, columns = self.shape(name)
        return load(self.env.flat(name), [place.row, place.head * columns + place.column])

    def _embed(self, node: Node, place: Place) -> Any:
        return load(self.env.buffer(node.inputs[1]), [wide(self.prepared[node.name]), place.column], constant=True)

    def _zero_at(self, node: Node, place: Place) -> Any:
        hit = T.EQ(self.prepared[node.name], T.int32(node.attr["value"]))
        return hold(T.Select(hit, T.float32(0), self.at(node.inputs[0], place)))

    def _rms_norm(self, node: Node, place: Place) -> Any:
        weight = load(self.env.buffer(node.inputs[1]), [place.column], constant=True)
        if node.attr["flavour"] == "zero_centred":
            weight = weight + T.float32(1)
        return hold(self.at(node.inputs[0], place) * self.prepared[node.name] * weight)

    def _cat(self, node: Node, place: Place) -> Any:
        result, start = register("float32"), 0
        for name in node.inputs:
            columns = self.shape(name)[1]
            with T.If(T.And(place.column >= start, place.column < start + columns)), T.Then():
                put(result, self.at(name, Place(place.row, place.head, place.column - start)))
            start += columns
        return result[0]

    def _part(self, node: Node, place: Place) -> Any:
        return self.at(node.inputs[0], Place(place.row, place.head, place.column + node.attr["start"]))

    def _shift(self, node: Node, place: Place) -> Any:
        return self.at(node.inputs[0], place) + T.int32(node.attr["by"])

    def _heads(self, node: Node, place: Place) -> Any:
        columns = self.shape(node.name)[1]
        return self.at(node.inputs[0], Place(place.row, 0, place.head * columns + place.column))

    def _merge(self, node: Node, place: Place) -> Any:
        columns = self.shape(node.inputs[0])[1]
        return self.at(node.inputs[0], Place(place.row, T.floordiv(place.column, columns), T.floormod(place.column, columns)))

    def _rope(self, node: Node, place: Place) -> Any:
        cos, sin = (self.env.buffer(name) for name in node.inputs[2:4])
        half = int(cos.shape[1])
        whole = self.at(node.inputs[0], place)
        column = hold(T.min(place.column, T.int32(2 * half - 1)), "int32")
        if node.attr["style"] == "half":
            second = column >= half
            angle, partner = T.floormod(column, half), T.Select(second, column - half, column + half)
        else:
            second = T.EQ(T.floormod(column, 2), 1)
            angle, partner = T.floordiv(column, 2), T.Select(second, column - 1, column + 1)
        other = self.at(node.inputs[0], Place(place.row, place.head, hold(partner, "int32")))
        position = self.prepared[node.name]
        c, s = (load(table, [position, angle], constant=True) for table in (cos, sin))
        turned = T.Select(second, whole * c + other * s, whole * c - other * s)
        return hold(T.Select(place.column < 2 * half, turned, whole))


def refuse_rows(env_plan: Any, nodes: Sequence[Node], sinks: Sequence[str]) -> str | None:
    """Why `emit_rows` cannot compute `nodes`, or None."""
    foreign = sorted({node.op for node in nodes} - OPS)
    if foreign:
        return f"no row-wise form of {', '.join(foreign)}"
    types = env_plan.circuit.types
    flat = any(types[name].rank < 3 for name in sinks)
    if flat and any(node.op == "rms_norm" and types[node.name].rank == 3 for node in nodes):
        return "a norm per head feeds a value without heads"
    return None


def emit_rows(env: Any, nodes: Sequence[Node], sinks: Sequence[str], *, warps: int) -> None:
    """Store `sinks` and do the appends among `nodes`: a block per row, and a warp per row and head for what has heads."""
    evaluator = Evaluator(env, nodes)
    headed = [name for name in sinks if env.plan.circuit.types[name].rank == 3]
    flat = [name for name in sinks if name not in headed]
    appends = [node for node in nodes if node.op == "append"]
    if flat:
        with env.kernel(env.plan.rows, warps) as at:
            for name in flat:
                _store_row(evaluator, name, at, warps)
    if headed or appends:
        _emit_heads(evaluator, headed, appends)


def _store_row(evaluator: Evaluator, name: str, at: Any, warps: int) -> None:
    """One value of one row by the whole block."""
    env, thread = evaluator.env, at.warp * 32 + at.lane
    evaluator.prepare([name], at.block, 0, lambda term, columns: block_sum(term, columns, at, warps))
    if evaluator.types[name].dtype == "i32":
        with T.If(thread < 1), T.Then():
            store(env.buffer(name), [at.block], evaluator.at(name, Place(at.block, 0, 0)))
        return
    target = env.flat(name)
    for piece, start in _pieces(evaluator, name):
        for_each(
            evaluator.shape(piece)[1],
            thread,
            warps * 32,
            lambda column, piece=piece, start=start: store(
                target, [at.block, column + start], evaluator.at(piece, Place(at.block, 0, column))
            ),
        )


def _pieces(evaluator: Evaluator, name: str) -> list[tuple[str, int]]:
    """A concatenation as its parts with their first columns, so that no element asks where it is."""
    node = evaluator.producer.get(name)
    if node is None or node.op != "cat":
        return [(name, 0)]
    pieces, start = [], 0
    for item in node.inputs:
        pieces.append((item, start))
        start += evaluator.shape(item)[1]
    return pieces


def _emit_heads(evaluator: Evaluator, sinks: Sequence[str], appends: Sequence[Node], warps: int = 4) -> None:
    env = evaluator.env
    counts = [evaluator.shape(name)[0] for name in sinks] + [evaluator.shape(node.inputs[1])[0] for node in appends]
    units = sum(counts)
    with env.kernel(-(-env.plan.rows * units // warps), warps) as at:
        unit = hold(at.block * warps + at.warp, "int32")
        row = hold(T.floordiv(unit, units), "int32")
        place = hold(T.floormod(unit, units), "int32")
        first = 0
        for sink, count in zip((*sinks, *appends), counts, strict=True):
            mine = T.And(place >= first, place < first + count)
            with T.If(T.And(mine, row < env.plan.rows)), T.Then():
                head = hold(place - first, "int32")
                if isinstance(sink, Node):
                    _append_head(evaluator, sink, row, head, at.lane)
                else:
                    _store_head(evaluator, sink, row, head, at.lane)
            first += count


def _store_head(evaluator: Evaluator, name: str, row: Any, head: Any, lane: Any) -> None:
    columns, target = evaluator.shape(name)[1], evaluator.env.flat(name)
    evaluator.prepare([name], row, head, lambda term, count: warp_total(term, count, lane))
    for_each(
        columns,
        lane,
        32,
        lambda column: store(target, [row, head * columns + column], evaluator.at(name, Place(row, head, column))),
    )


def _append_head(evaluator: Evaluator, node: Node, row: Any, head: Any, lane: Any) -> None:
    env = evaluator.env
    state = next(t.state for t in (evaluator.types[name] for name in node.inputs) if isinstance(t, StateType))
    caches = [env.cache(f"{state}.{part}") for part in ("k", "v")]
    slot = load_int(env.buffer(f"{state}.slot"), [row])
    with T.If(slot >= 0), T.Then():
        evaluator.prepare(node.inputs[1:], row, head, lambda term, count: warp_total(term, count, lane))
        block, offset = T.floordiv(slot, caches[0].block_size), T.floormod(slot, caches[0].block_size)
        line = hold(caches[0].line(int(node.attr["layer"]), block, head, offset), "int64")
        for cache, name in zip(caches, node.inputs[1:], strict=True):
            for_each(
                evaluator.shape(name)[1],
                lane,
                32,
                lambda column, cache=cache, name=name: store(
                    cache.lines, [line, wide(column)], evaluator.at(name, Place(row, head, column))
                ),
            )


def for_each(count: int, first: Any, step: int, body: Callable[[Any], None]) -> None:
    """body(first), body(first + step), ... below `count`."""
    whole, rest = divmod(count, step)
    if whole <= UNROLLED:
        for index in range(whole):
            body(hold(first + index * step, "int32"))
    else:
        with T.serial(0, whole) as index:
            body(hold(first + index * step, "int32"))
    if rest:
        with T.If(first < rest), T.Then():
            body(hold(first + whole * step, "int32"))


def warp_total(term: Callable[[Any], Any], columns: int, lane: Any) -> Any:
    """Sum of term(column) over the columns, by one warp."""
    total = register("float32")
    put(total, T.float32(0))
    for_each(columns, lane, 32, lambda column: put(total, total[0] + term(column)))
    return hold(T.cuda.warp_sum(total[0]))


def block_sum(term: Callable[[Any], Any], columns: int, at: Any, warps: int) -> Any:
    """Sum of term(column) over the columns, by the whole block; every thread gets it."""
    total = register("float32")
    put(total, T.float32(0))
    for_each(columns, at.warp * 32 + at.lane, warps * 32, lambda column: put(total, total[0] + term(column)))
    shared = T.alloc_buffer((warps,), "float32", scope="shared")
    part = hold(T.cuda.warp_sum(total[0]))
    with T.If(at.lane < 1), T.Then():
        T.buffer_store(shared, part, [at.warp])
    do(T.cuda.cta_sync())
    put(total, T.float32(0))
    for warp in range(warps):
        put(total, total[0] + shared[warp])
    return total[0]


def sinks_of(plan: Any, group: Any, nodes: Sequence[Node]) -> tuple[str, ...]:
    """The stored values among what `nodes` make: one name for each storage that crosses the group's border."""
    crossing = {plan.storage(name) for name in plan.crossing(group)}
    made = [value for node in nodes for value in node.outputs]
    return tuple(value.name for value in made if value.name in crossing and isinstance(value.type, TensorType))
