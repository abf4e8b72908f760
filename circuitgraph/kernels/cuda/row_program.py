"""Row-wise nodes as one kernel: every value is computed where it is wanted, and only what others read is stored.

A value that a warp or block needs as a whole, the sum of squares of a norm, is reduced before the elements are formed.
These kernels are short and wait for memory, not for arithmetic: weights of norms are fetched before the kernel waits for its
predecessor, all other loads are in flight before the first is needed, and a thread keeps the elements of its columns.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

from tvm.tirx.script import builder as T

from ...circuit.ir import Node
from ...circuit.types import StateType, TensorType
from ...ops.linear import MASK_BITS
from ...plan.fuse import APPENDS
from ...plan.ir import VIEWS
from .values import cluster_sync, do, gate, hold, load, load_int, put, register, silu, store, wide

ELEMENTWISE = {
    "add": lambda a, b: a + b,
    "mul": lambda a, b: a * b,
    "silu": silu,
    "sigmoid": gate,
}
OPS = frozenset(
    {
        *ELEMENTWISE,
        *VIEWS,
        *APPENDS,
        "cat",
        "columns",
        "embed",
        "own_mask",
        "part",
        "rms_norm",
        "rope",
        "scale_rows",
        "shift",
        "target_ids",
        "zero_at",
    }
)

UNROLLED = 16
"""Elements of a thread up to which a loop is written out, so that its loads are in flight together."""


@dataclass(frozen=True)
class Place:
    """Where an element lies: row, head (0 for values without heads) and column of the head."""

    row: Any
    head: Any
    column: Any


class Spread:
    """The columns first, first + step, ... of a row that one thread serves. Where they are few they are `columns`, and what
    was computed for one of them can be had again."""

    def __init__(self, first: Any, step: int, most: int):
        whole = most // step
        self.first, self.step = first, step
        self.columns = [hold(first + index * step, "int32", "column") for index in range(whole)] if whole <= UNROLLED else []

    def each(self, count: int, body: Callable[[Any], None]) -> None:
        """body(column) for all columns below `count`."""
        whole = count // self.step
        if whole > len(self.columns):
            return for_each(count, self.first, self.step, body)
        for column in self.columns[:whole]:
            body(column)
        if count % self.step:
            with T.If(self.first < count % self.step), T.Then():
                body(hold(self.first + whole * self.step, "int32"))

    def index(self, column: Any) -> int | None:
        """Which of `columns` this very expression is."""
        return next((index for index, own in enumerate(self.columns) if own is column), None)


def upstream(nodes: Sequence[Node], names: Iterable[str], known: Container[str] = ()) -> list[Node]:
    """Those of `nodes` that `names` are computed from, in program order. What is `known` is not computed."""
    producer = {value.name: node for node in nodes for value in node.outputs}
    wanted, stack = set(), list(names)
    while stack:
        name = stack.pop()
        node = producer.get(name)
        if node is not None and name not in known and node.name not in wanted:
            wanted.add(node.name)
            stack += node.inputs
    return [node for node in nodes if node.name in wanted]


class Evaluator:
    """Values of one group at a place. `known` gives values that were computed by other means."""

    def __init__(self, env: Any, nodes: Sequence[Node], known: dict[str, Callable[[Place], Any]] | None = None):
        self.env, self.types = env, env.plan.circuit.types
        self.nodes = nodes
        self.producer = {value.name: node for node in nodes for value in node.outputs}
        self.known = known or {}
        self.prepared: dict[str, Any] = {}
        self.spread: Spread | None = None
        self.kept: dict[tuple[str, int], Any] = {}
        self.early: dict[str, Any] = {}

    @contextmanager
    def keeping(self, spread: Spread | None, early: _Early | None = None, case: int = 0) -> Iterator[None]:
        """Keep what is computed for the columns of `spread`, until the scope that it is computed in ends; begin with what
        was fetched early."""
        before = self.spread, self.kept, self.early
        self.spread, self.kept, self.early = spread, {}, {}
        if early is not None:
            self.kept, self.early = early.elements(case), early.numbers(case)
        yield
        self.spread, self.kept, self.early = before

    def shape(self, name: str) -> tuple[int, int]:
        """(heads, columns of a head)."""
        dims = [int(dim) for dim in self.types[name].shape[1:]]
        return (1, *dims)[-2:] if dims else (1, 1)

    def upstream(self, names: Iterable[str]) -> list[Node]:
        return upstream(self.nodes, names, self.known)

    def prepare(self, names: Iterable[str], row: Any, head: Any, total: Callable[[Any, int], Any]) -> None:
        """Compute what is one number for a row or head. `total(term, columns)` sums term(column) over a head."""
        self.prepared, names = dict(self.early), list(names)
        nodes = self.upstream(names)
        for node in nodes:
            if node.op == "embed":
                self.prepared[node.name] = load_int(self.env.buffer(node.inputs[0]), [row])
            elif node.op in ("zero_at", "rope") and node.name not in self.early:
                self.prepared[node.name] = self.at(node.inputs[1], Place(row, 0, 0))
        self._fetch(nodes, row, head)
        for name in names:
            self._fetch_elements(name, row, head)
        for node in nodes:
            if node.op == "rms_norm":
                columns, whose = self.shape(node.name)[1], self._head_of(node, head)

                def square(column, name=node.inputs[0], whose=whose):
                    value = self.at(name, Place(row, whose, column))
                    return value * value

                mean = total(square, columns) * T.float32(1.0 / columns)
                self.prepared[node.name] = hold(T.rsqrt(mean + T.float32(node.attr["eps"])))

    def _fetch(self, nodes: Sequence[Node], row: Any, head: Any) -> None:
        """Start the loads of what norms add up and of the angles of rotations, before anything waits for one of them."""
        for node in nodes:
            simple = not any(other.op == "rms_norm" for other in self.upstream(node.inputs[:1]))
            for column in self._own_columns(self.shape(node.name)[1]):
                if node.op == "rms_norm" and simple:
                    self.at(node.inputs[0], Place(row, self._head_of(node, head), column))
                elif node.op == "rope" and self._turns_own(node):
                    self._angles(node, column)

    def _fetch_elements(self, name: str, row: Any, head: Any) -> None:
        """Start the loads of what is copied, or computed element by element, before the first store: none can pass one."""
        nodes = self.upstream([name])
        if any(node.op not in (*VIEWS, *ELEMENTWISE, "part") for node in nodes):
            return
        computed = {node.name for node in nodes if node.op in ELEMENTWISE}
        read = {item for node in nodes if node.name in computed for item in node.inputs} - computed if computed else {name}
        for item in sorted(read):
            if self.shape(item) == self.shape(name):
                for column in self._own_columns(self.shape(name)[1]):
                    self.at(item, Place(row, head, column))

    def _head_of(self, node: Node, head: Any) -> Any:
        """A norm over whole rows may feed a value with heads: its own elements lie in no head."""
        return head if self.types[node.name].rank == 3 else 0

    def _own_columns(self, count: int) -> list[Any]:
        if self.spread is None:
            return []
        return self.spread.columns[: count // self.spread.step]

    def at(self, name: str, place: Place) -> Any:
        """One element, fp32 (int32 for integer values)."""
        index = None if self.spread is None else self.spread.index(place.column)
        if index is None:
            return self._at(name, place)
        if (name, index) not in self.kept:
            self.kept[name, index] = self._at(name, place)
        return self.kept[name, index]

    def _at(self, name: str, place: Place) -> Any:
        if name in self.known:
            return self.known[name](place)
        node = self.producer.get(name)
        if node is None:
            return self._outside(name, place)
        if node.op in ELEMENTWISE:
            return hold(ELEMENTWISE[node.op](*(self.at(item, place) for item in node.inputs)))
        return getattr(self, f"_{node.op}")(node, place)

    def _outside(self, name: str, place: Place) -> Any:
        if self.types[name].rank == 1:
            of_row = load_int if self.types[name].dtype == "i32" else load
            return of_row(self.env.buffer(name), [place.row])
        _, columns = self.shape(name)
        return load(self.env.flat(name), [place.row, place.head * columns + place.column])

    def _embed(self, node: Node, place: Place) -> Any:
        return load(self.env.buffer(node.inputs[1]), [wide(self.prepared[node.name]), place.column], constant=True)

    def _zero_at(self, node: Node, place: Place) -> Any:
        hit = T.EQ(self.prepared[node.name], T.int32(node.attr["value"]))
        return hold(T.Select(hit, T.float32(0), self.at(node.inputs[0], place)))

    def norm_weight(self, node: Node, column: Any) -> Any:
        weight = load(self.env.buffer(node.inputs[1]), [column], constant=True)
        return weight + T.float32(1) if node.attr["flavour"] == "zero_centred" else weight

    def _rms_norm(self, node: Node, place: Place) -> Any:
        index = None if self.spread is None else self.spread.index(place.column)
        weight = None if index is None else self.kept.get((f"{node.name} weight", index))
        if weight is None:
            weight = self.norm_weight(node, place.column)
        return hold(self.at(node.inputs[0], place) * self.prepared[node.name] * weight)

    def _scale_rows(self, node: Node, place: Place) -> Any:
        return hold(self.at(node.inputs[0], place) * self.at(node.inputs[1], Place(place.row, 0, 0)))

    def _cat(self, node: Node, place: Place) -> Any:
        result, start = register("float32"), 0
        for name in node.inputs:
            columns = self.shape(name)[1]
            with T.If(T.And(place.column >= start, place.column < start + columns)), T.Then(), self.keeping(None):
                put(result, self.at(name, Place(place.row, place.head, place.column - start)))
            start += columns
        return result[0]

    def _part(self, node: Node, place: Place) -> Any:
        return self.at(node.inputs[0], Place(place.row, place.head, place.column + node.attr["start"]))

    def _columns(self, node: Node, place: Place) -> Any:
        dtype = "int32" if self.types[node.name].dtype == "i32" else "float32"
        result = register(dtype)
        for index, name in enumerate(node.inputs):
            with T.If(T.EQ(place.column, index)), T.Then(), self.keeping(None):
                put(result, self.at(name, Place(place.row, 0, 0)))
        return result[0]

    def _own_mask(self, node: Node, place: Place) -> Any:
        """A word of a mask: bit c is bit c + offsets[c] of the target's. Offsets that lead out of it give 0, as on the CPU."""
        allowed, offsets = (self.env.buffer(name) for name in node.inputs)
        bits = register("uint32", name="bits")
        put(bits, T.uint32(0))
        with T.serial(0, MASK_BITS) as bit:
            own = hold(place.column * MASK_BITS + bit, "int32", "own")
            with T.If(own < int(offsets.shape[0])), T.Then():
                target = hold(own + load_int(offsets, [own], constant=True), "int32", "target")
                with T.If(T.And(target >= 0, target < int(allowed.shape[1]) * MASK_BITS)), T.Then():
                    word = T.Cast("uint32", load_int(allowed, [place.row, T.floordiv(target, MASK_BITS)]))
                    found = T.bitwise_and(T.shift_right(word, T.Cast("uint32", T.floormod(target, MASK_BITS))), T.uint32(1))
                    put(bits, T.bitwise_or(bits[0], T.shift_left(found, T.Cast("uint32", bit))))
        return hold(T.Cast("int32", bits[0]), "int32")

    def _target_ids(self, node: Node, place: Place) -> Any:
        """An id outside the table stays, as it does on the CPU."""
        offsets, result = self.env.buffer(node.inputs[1]), register("int32", name="id")
        put(result, self.at(node.inputs[0], place))
        with T.If(T.And(result[0] >= 0, result[0] < int(offsets.shape[0]))), T.Then():
            put(result, result[0] + load_int(offsets, [result[0]], constant=True))
        return result[0]

    def _shift(self, node: Node, place: Place) -> Any:
        return self.at(node.inputs[0], place) + T.int32(node.attr["by"])

    def _heads(self, node: Node, place: Place) -> Any:
        columns = self.shape(node.name)[1]
        return self.at(node.inputs[0], Place(place.row, 0, place.head * columns + place.column))

    def _merge(self, node: Node, place: Place) -> Any:
        columns = self.shape(node.inputs[0])[1]
        return self.at(node.inputs[0], Place(place.row, T.floordiv(place.column, columns), T.floormod(place.column, columns)))

    def turns_early(self, node: Node) -> bool:
        """Are position and angles known before the wait, and few?"""
        names = [node.inputs[1]]
        while (producer := self.producer.get(names[-1])) is not None:
            names.append(producer.inputs[0])
        chain = {self.producer[name].op for name in names[:-1]}
        return chain <= {"shift"} and self.env.steady(names[-1]) and self._turns_own(node)

    def _turns_own(self, node: Node) -> bool:
        """Does a rotation by halves have both elements of every pair in one thread?"""
        columns, half = self.shape(node.name)[1], int(self.env.buffer(node.inputs[2]).shape[1])
        own = self._own_columns(columns)
        return self.spread is not None and node.attr["style"] == "half" and half % self.spread.step == 0 and len(own) > 0

    def _angles(self, node: Node, column: Any) -> tuple[Any, Any, int, bool] | None:
        """(cos, sin, index of the partner, is the second of its pair) of an own column, None for what is not turned."""
        assert self.spread is not None
        half = int(self.env.buffer(node.inputs[2]).shape[1])
        apart, index = half // self.spread.step, self.spread.index(column)
        assert index is not None
        if index >= 2 * apart:
            return None
        first, second = index % apart, index >= apart
        if (f"{node.name} cos", first) not in self.kept:
            for name, table in zip(("cos", "sin"), node.inputs[2:4], strict=True):
                place = [self.prepared[node.name], self.spread.columns[first]]
                self.kept[f"{node.name} {name}", first] = load(self.env.buffer(table), place, constant=True)
        partner = index - apart if second else index + apart
        return self.kept[f"{node.name} cos", first], self.kept[f"{node.name} sin", first], partner, second

    def _rope(self, node: Node, place: Place) -> Any:
        if self.spread is not None and self.spread.index(place.column) is not None and self._turns_own(node):
            angles = self._angles(node, place.column)
            whole = self.at(node.inputs[0], place)
            if angles is None:
                return whole
            c, s, partner, second = angles
            other = self.at(node.inputs[0], Place(place.row, place.head, self.spread.columns[partner]))
            return hold(whole * c + other * s if second else whole * c - other * s)
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
    flat = upstream(nodes, (name for name in sinks if types[name].rank < 3))
    if any(node.op == "rms_norm" and types[node.name].rank == 3 for node in flat):
        return "a norm per head feeds a value without heads"
    return None


def emit_rows(
    env: Any,
    nodes: Sequence[Node],
    sinks: Sequence[str],
    *,
    warps: int,
    known: dict[str, Callable[[Place], Any]] | None = None,
    together: int = 0,
) -> None:
    """Store `sinks` and do the appends among `nodes`: a block per row and flat value (the parts of a concatenation apart), and
    a warp per row and head for what has heads.

    Args:
        known: values that were computed by other means, see `Evaluator`.
        together: so many blocks, a cluster if there are several, share a row of all flat values, which are equally wide and of
            floats; 0: each value has a block of its own.
    """
    evaluator = Evaluator(env, nodes, known)
    headed = [name for name in sinks if env.plan.circuit.types[name].rank == 3]
    flat = [piece for name in sinks if name not in headed for piece in _pieces(evaluator, name)]
    if together and flat:
        flat = [_Piece(flat[-1].sink, flat[-1].name, 0, tuple(piece.name for piece in flat[:-1]))]
    appends = [node for node in nodes if node.op in APPENDS]
    if flat:
        _emit_flat(evaluator, flat, warps, max(together, 1))
    if headed or appends:
        _emit_heads(evaluator, headed, appends)


@dataclass(frozen=True)
class _Piece:
    """The value `name`, stored in `sink` from column `start` on. beside: others that the same block stores as they are."""

    sink: str
    name: str
    start: int
    beside: tuple[str, ...] = ()


def _pieces(evaluator: Evaluator, name: str) -> list[_Piece]:
    """A concatenation as its parts, so that no element asks where it is."""
    node = evaluator.producer.get(name)
    pieces, start = [], 0
    for item in node.inputs if node is not None and node.op == "cat" else (name,):
        pieces.append(_Piece(name, item, start))
        start += evaluator.shape(item)[1]
    return pieces


class _Early:
    """What does not depend on earlier kernels, fetched before the wait: weights of norms, positions and their angles.

    A block or warp serves one of several cases; the wait comes once for all, so their registers lie outside the branches.
    """

    def __init__(self, evaluator: Evaluator, spread: Spread, row: Any, cases: Sequence[Sequence[str]]):
        self.evaluator, self.spread, self.row = evaluator, spread, row
        self.norms, self.turns = [], []
        for names in cases:
            nodes = evaluator.upstream(names)
            # A norm of another length than its case is read elsewhere than at the case's own columns.
            length = max(evaluator.shape(name)[1] for name in names)
            alike = [node for node in nodes if evaluator.shape(node.name)[1] == length]
            self.norms.append([node for node in alike if node.op == "rms_norm"])
            with evaluator.keeping(spread):
                self.turns.append([node for node in alike if node.op == "rope" and evaluator.turns_early(node)])
        count = len(spread.columns)
        self.weights = [register("float32", count, "norm_weight") for _ in range(max(map(len, self.norms)) if count else 0)]
        self.positions = [register("int32", name="position") for _ in range(max(map(len, self.turns)))]
        self.angles = [(register("float32", count, "cos"), register("float32", count, "sin")) for _ in self.positions]

    @property
    def worth_it(self) -> bool:
        return bool(self.weights or self.positions)

    def fetch(self, case: int) -> None:
        evaluator, columns = self.evaluator, self.spread.columns
        for node, position in zip(self.turns[case], self.positions, strict=False):
            put(position, evaluator.at(node.inputs[1], Place(self.row, 0, 0)))
        for node, weights in zip(self.norms[case], self.weights, strict=False):
            for index, column in enumerate(columns[: evaluator.shape(node.name)[1] // self.spread.step]):
                put(weights, evaluator.norm_weight(node, column), index)
        for node, position, angles in zip(self.turns[case], self.positions, self.angles, strict=False):
            for table, kept in zip(node.inputs[2:4], angles, strict=True):
                buffer = evaluator.env.buffer(table)
                for index in range(int(buffer.shape[1]) // self.spread.step):
                    put(kept, load(buffer, [position[0], columns[index]], constant=True), index)

    def elements(self, case: int) -> dict[tuple[str, int], Any]:
        """As `Evaluator.kept`."""
        found = {}
        for node, weights in zip(self.norms[case], self.weights, strict=False):
            found |= {(f"{node.name} weight", index): weights[index] for index in range(len(self.spread.columns))}
        for node, angles in zip(self.turns[case], self.angles, strict=False):
            for name, kept in zip(("cos", "sin"), angles, strict=True):
                apart = int(self.evaluator.env.buffer(node.inputs[2]).shape[1]) // self.spread.step
                found |= {(f"{node.name} {name}", index): kept[index] for index in range(apart)}
        return found

    def numbers(self, case: int) -> dict[str, Any]:
        """As `Evaluator.prepared`."""
        return {node.name: position[0] for node, position in zip(self.turns[case], self.positions, strict=False)}


def _emit_flat(evaluator: Evaluator, pieces: Sequence[_Piece], warps: int, cluster: int = 1) -> None:
    """One value of one row by a whole block, or by a cluster of blocks."""
    env, threads = evaluator.env, warps * 32 * cluster
    with env.kernel(env.plan.rows * len(pieces) * cluster, warps, early=True, cluster=cluster) as at:
        thread, unit = hold(at.warp * 32 + at.lane, "int32"), at.block
        if cluster > 1:
            thread = hold(T.floormod(at.block, cluster) * (warps * 32) + thread, "int32")
            unit = hold(T.floordiv(at.block, cluster), "int32")
        row, turn = hold(T.floordiv(unit, len(pieces)), "int32"), hold(T.floormod(unit, len(pieces)), "int32")
        spread = Spread(thread, threads, max(evaluator.shape(piece.name)[1] for piece in pieces))
        early = _Early(evaluator, spread, row, [[piece.name] for piece in pieces])
        total = partial(cluster_sum, cluster) if cluster > 1 else block_sum

        def store_piece(case: int) -> None:
            piece = pieces[case]
            name, columns = piece.name, evaluator.shape(piece.name)[1]
            with evaluator.keeping(spread, early, case):
                evaluator.prepare([*piece.beside, name], row, 0, lambda term, count: total(term, count, spread, at, warps))
                if evaluator.types[name].dtype == "i32" and evaluator.types[name].rank == 1:
                    with T.If(thread < 1), T.Then(), evaluator.keeping(None):
                        store(env.buffer(piece.sink), [row], evaluator.at(name, Place(row, 0, 0)))
                    return
                for value, sink, start in (*((other, other, 0) for other in piece.beside), (name, piece.sink, piece.start)):
                    _store_columns(evaluator, value, env.flat(sink), row, columns, start, spread)

        cases = [T.EQ(turn, case) for case in range(len(pieces))]
        if early.worth_it:
            _choose(cases, early.fetch)
        env.wait()
        _choose(cases, store_piece)
        if cluster > 1:  # the others may still be reading this block's sums
            do(T.ptx.barrier.cluster.arrive.relaxed.aligned())
            do(T.ptx.barrier.cluster.wait.acquire.aligned())


def _store_columns(evaluator: Evaluator, name: str, target: Any, row: Any, columns: int, start: int, spread: Spread) -> None:
    spread.each(columns, lambda c: store(target, [row, c + start], evaluator.at(name, Place(row, 0, c))))


def _choose(cases: Sequence[Any], body: Callable[[int], None]) -> None:
    """body(case) where its condition holds; a single case needs none."""
    if len(cases) == 1:
        return body(0)
    for case, condition in enumerate(cases):
        with T.If(condition), T.Then():
            body(case)


def _emit_heads(evaluator: Evaluator, sinks: Sequence[str], appends: Sequence[Node], warps: int = 4) -> None:
    env = evaluator.env
    wanted = [[name] for name in sinks] + [list(node.inputs[1:]) for node in appends]
    counts = [evaluator.shape(names[0])[0] for names in wanted]
    units, rows = sum(counts), env.plan.rows
    with env.kernel(-(-rows * units // warps), warps, early=True) as at:
        unit = hold(at.block * warps + at.warp, "int32")
        row = hold(T.floordiv(unit, units), "int32")
        place = hold(T.floormod(unit, units), "int32")
        spread = Spread(at.lane, 32, max(evaluator.shape(name)[1] for names in wanted for name in names))
        early = _Early(evaluator, spread, row, wanted)
        firsts = [sum(counts[:case]) for case in range(len(counts))]
        cases = [
            T.And(T.And(place >= first, place < first + count), row < rows) for first, count in zip(firsts, counts, strict=True)
        ]
        slots = [_slot_of(evaluator, node) for node in appends]
        slot = register("int32", name="slot")

        def fetch(case: int) -> None:
            early.fetch(case)
            if case >= len(sinks):
                put(slot, load_int(slots[case - len(sinks)], [row]))

        def body(case: int) -> None:
            head = hold(place - firsts[case], "int32")
            if case < len(sinks):
                with evaluator.keeping(spread, early, case):
                    _store_head(evaluator, sinks[case], row, head, spread)
            else:
                with T.If(slot[0] >= 0), T.Then(), evaluator.keeping(spread, early, case):
                    _append_head(evaluator, appends[case - len(sinks)], row, head, slot[0], spread)

        for case, condition in enumerate(cases):
            with T.If(condition), T.Then():
                fetch(case)
        env.wait()
        for case, condition in enumerate(cases):
            with T.If(condition), T.Then():
                body(case)


def _slot_of(evaluator: Evaluator, node: Node) -> Any:
    return evaluator.env.buffer(f"{_state_of(evaluator, node)}.slot")


def _state_of(evaluator: Evaluator, node: Node) -> str:
    return next(t.state for t in (evaluator.types[name] for name in node.inputs) if isinstance(t, StateType))


def _store_head(evaluator: Evaluator, name: str, row: Any, head: Any, spread: Spread) -> None:
    columns, target = evaluator.shape(name)[1], evaluator.env.flat(name)
    evaluator.prepare([name], row, head, lambda term, count: warp_total(term, count, spread))
    spread.each(columns, lambda c: store(target, [row, head * columns + c], evaluator.at(name, Place(row, head, c))))


def _append_head(evaluator: Evaluator, node: Node, row: Any, head: Any, slot: Any, spread: Spread) -> None:
    caches = [evaluator.env.cache(f"{_state_of(evaluator, node)}.{part}") for part in ("k", "v")]
    evaluator.prepare(node.inputs[1:], row, head, lambda term, count: warp_total(term, count, spread))
    block, offset = T.floordiv(slot, caches[0].block_size), T.floormod(slot, caches[0].block_size)
    line = hold(caches[0].line(int(node.attr["layer"]), block, head, offset), "int64")
    for cache, name in zip(caches, node.inputs[1:], strict=True):
        spread.each(
            evaluator.shape(name)[1],
            lambda c, cache=cache, name=name: store(cache.lines, [line, wide(c)], evaluator.at(name, Place(row, head, c))),
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


def warp_total(term: Callable[[Any], Any], columns: int, spread: Spread) -> Any:
    """Sum of term(column) over the columns, by one warp."""
    return hold(T.cuda.warp_sum(_own_total(term, columns, spread)[0]))


def block_sum(term: Callable[[Any], Any], columns: int, spread: Spread, at: Any, warps: int) -> Any:
    """Sum of term(column) over the columns, by the whole block; every thread gets it."""
    total = _own_total(term, columns, spread)
    shared = T.alloc_buffer((warps,), "float32", scope="shared")
    part = hold(T.cuda.warp_sum(total[0]))
    with T.If(at.lane < 1), T.Then():
        T.buffer_store(shared, part, [at.warp])
    do(T.cuda.cta_sync())
    put(total, T.float32(0))
    for warp in range(warps):
        put(total, total[0] + shared[warp])
    return total[0]


def cluster_sum(blocks: int, term: Callable[[Any], Any], columns: int, spread: Spread, at: Any, warps: int) -> Any:
    """As `block_sum`, by a cluster of blocks that have at most 32 warps together: each lane asks for the sum of one."""
    shared = T.alloc_buffer((warps,), "float32", scope="shared")
    mine, address = hold(T.cuda.warp_sum(_own_total(term, columns, spread)[0])), register("uint32")
    with T.If(at.lane < 1), T.Then():
        T.buffer_store(shared, mine, [at.warp])
    cluster_sync(blocks)
    one = register("float32")
    put(one, T.float32(0))
    with T.If(at.lane < blocks * warps), T.Then():
        window = T.cuda.cvta_generic_to_shared(shared.ptr_to([T.floormod(at.lane, warps)]))
        do(T.ptx.mapa.shared__cluster.u32(address[0], window, T.Cast("uint32", T.floordiv(at.lane, warps))))
        do(T.ptx["ld.shared::cluster.f32"](one[0], address[0]))
    return hold(T.cuda.warp_sum(one[0]))


def _own_total(term: Callable[[Any], Any], columns: int, spread: Spread) -> Any:
    total = register("float32")
    put(total, T.float32(0))
    spread.each(columns, lambda column: put(total, total[0] + term(column)))
    return total


def sinks_of(plan: Any, group: Any, nodes: Sequence[Node]) -> tuple[str, ...]:
    """The stored values among what `nodes` make: one name for each storage that crosses the group's border."""
    crossing = {plan.storage(name) for name in plan.crossing(group)}
    made = [value for node in nodes for value in node.outputs]
    return tuple(value.name for value in made if value.name in crossing and isinstance(value.type, TensorType))
