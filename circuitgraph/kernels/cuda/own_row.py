"""The row that attention makes itself, in entries of one row a sequence: its queries and keys are normed and rotated, and keys
and values appended, before the block looks at the cache. A launch that does this alone would be all latency: it waits for its
predecessor, and attention for it.

A warp makes one head after the other and leaves them in shared memory: queries for all warps, the new cache row for the one
whose tile it belongs to.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tvm.tirx.script import builder as T

from ...circuit.ir import Node
from ...plan.fuse import APPENDS
from ...plan.ir import Group, Plan
from .row_program import sinks_of
from .shared import state_of
from .values import LOAD, do, from_lane_beside, hold, load, load_int, put, register, wide, widened

PADDING = 8
"""Elements between heads in shared memory, so that eight of them are read from different banks."""
MOST = 128
"""Columns of a head."""


@dataclass(frozen=True)
class Heads:
    """How queries or keys come about. source: heads that others made, of `pitch` columns, of which these begin at `start`."""

    source: str
    start: int
    pitch: int
    norm: Node | None
    rope: Node | None


def heads_of(plan: Plan, group: Group, name: str) -> Heads:
    """What leads to a value in this group's prologue, as far as it has this form; `refuse_own_row` looks at the rest."""
    made, found = {node.name: node for node in group.prologue}, {}
    for op in ("rope", "rms_norm", "part"):
        if name in made and made[name].op == op:
            found[op], name = made[name], made[name].inputs[0]
    start = int(found["part"].attr["start"]) if "part" in found else 0
    return Heads(name, start, int(plan.circuit.types[name].shape[2]), found.get("rms_norm"), found.get("rope"))  # type: ignore[union-attr]


def append_of(group: Group) -> Node | None:
    """What makes, in this group, the cache that the anchor reads."""
    return next((node for node in group.prologue if node.op == "append" and node.name == group.anchors[0].inputs[1]), None)


def refuse_own_row(plan: Plan, group: Group) -> str | None:
    """Why `OwnRow` cannot make the rows of this group, or None."""
    types, append, (anchor, *_) = plan.circuit.types, append_of(group), group.anchors
    if plan.circuit.entry(plan.entry).rows != "sequences":
        return "for entries of one row a sequence"
    if append is None:
        return "what it attends to is appended elsewhere"
    if sum(node.op in APPENDS for node in group.nodes) > 1 or append.attr["layer"] != anchor.attr["layer"]:
        return "appends once, to the layer that it reads"
    queries, keys = (heads_of(plan, group, name) for name in (anchor.inputs[0], append.inputs[1]))
    sources = (queries.source, keys.source, append.inputs[2])
    if any(name not in group.inputs for name in sources):
        return "norms and rotates what others made"
    if any(number % 2 for heads in (queries, keys) for number in (heads.start, heads.pitch)):
        return "reads words of two columns"
    if int(types[append.inputs[1]].shape[2]) > MOST:  # type: ignore[union-attr]
        return f"makes heads of {MOST} columns at most: of larger ones few warps make many, which takes as long as a launch"
    ends = sinks_of(plan, group, (*group.anchors, *group.epilogue))
    if set(sinks_of(plan, group, group.nodes)) != set(ends):
        return "stores the result alone"
    state = next(state for state in plan.circuit.states if state.name == state_of(plan, append))
    norms, ropes = [(heads.norm, heads.rope) for heads in (queries, keys)], (queries.rope, keys.rope)
    weights = [norm.inputs[1] for norm, _ in norms if norm]
    if {types[name].dtype for name in (*sources, *weights)} != {state.dtype} or state.dtype == "f32":  # type: ignore[union-attr]
        return "needs heads, weights of their norms and the cache in bf16 or f16, all the same"
    if len(weights) == 1 or len({(norm.attr["eps"], norm.attr["flavour"]) for norm, _ in norms if norm}) > 1:
        return "norms queries and keys alike"
    if len({(rope.inputs[1:], rope.attr["style"]) if rope else None for rope in ropes}) > 1:
        return "rotates queries and keys alike"
    others = {node.name for node in group.prologue if node.op in ("rms_norm", "rope")}
    if others - {node.name for pair in norms for node in pair if node}:
        return "makes gates element by element"
    if ropes[0]:
        half = int(types[ropes[0].inputs[2]].shape[1])  # type: ignore[union-attr]
        if ropes[0].attr["style"] != "half" or (half % 64 and half not in (8, 16, 32)):
            return f"rotates halves of 8, 16, 32 or a multiple of 64 columns, got {half} in style {ropes[0].attr['style']}"
        if ropes[0].inputs[1] != "position" or "position" not in {item.name for item in plan.circuit.inputs}:
            return "rotates by positions that are given"  # which are there before the program starts
    return None


class _Turn:
    """One head of a warp: what is known of it before the wait, and its words."""

    def __init__(self, head: Any, value: Any, source: Any, target: Any, each: int):
        self.head, self.value, self.source, self.target = head, value, source, target
        self.weights = register("float32", 2 * each, "norm_weight")
        self.cos, self.sin = (register("float32", 2 * each, name) for name in ("cos", "sin"))
        self.words = register("uint32", each, "words")


class OwnRow:
    """What one block does for its (row, KV head); see `paged.PagedAttention`.

    A lane has words lane, lane + 32, ... of a head, two columns each. What differs between queries, keys and values is looked up
    before the wait: behind it all are one piece of code, since instructions come from memory, too.
    """

    def __init__(self, env: Any, group: Group, kind: str):
        append, (anchor,) = append_of(group), group.anchors
        assert append is not None
        self.env, self.append, self.kind = env, append, kind
        self.queries, self.keys = (heads_of(env.plan, group, name) for name in (anchor.inputs[0], append.inputs[1]))
        self.sources = [env.words(name) for name in (self.queries.source, self.keys.source, append.inputs[2])]
        state = state_of(env.plan, append)
        self.caches, self.slots = [env.cache(f"{state}.{part}") for part in ("k", "v")], env.buffer(f"{state}.slot")
        self.dim = int(env.plan.circuit.types[append.inputs[1]].shape[2])
        self.each = self.dim // 64
        """Words of a lane."""
        self.half = int(env.plan.circuit.types[self.queries.rope.inputs[2]].shape[1]) if self.queries.rope else 0

    def share_memory(self, pool: Any, members: int, warps: int) -> None:
        """members: query heads of the block. Behind them lie the new keys and values."""
        self.members, self.warps = members, warps
        self.lines = pool.alloc((members + 2, (self.dim + PADDING) // 2), "uint32", align=16)

    # -- before the wait ---------------------------------------------------------------------------------------

    def begin(self, at: Any, row: Any) -> Any:
        """The row's slot, -1 where it appends nothing."""
        self.at, self.row = at, row
        self.slot = load_int(self.slots, [row])
        return self.slot

    def fetch(self, first_head: Any, kv_head: Any, appends: Any) -> None:
        """All that no kernel before makes, of heads that the warp may have to make: keys and values where the block `appends`."""
        self.count = hold(T.Select(appends, T.int32(self.members + 2), T.int32(self.members)), "int32", "heads")
        rope = self.queries.rope
        position = load_int(self.env.buffer(rope.inputs[1]), [self.row]) if rope else None
        layer, size = int(self.append.attr["layer"]), self.caches[0].block_size
        slot = hold(T.max(self.slot, T.int32(0)), "int32", "slot")
        line = hold(self.caches[0].line(layer, T.floordiv(slot, size), kv_head, T.floormod(slot, size)), "int64", "line")
        self.turns = [
            self._fetch(hold(self.at.warp + turn, "int32", "head"), first_head, kv_head, line, position)
            for turn in range(0, self.members + 2, self.warps)
        ]

    def _fetch(self, head: Any, first_head: Any, kv_head: Any, line: Any, position: Any) -> _Turn:
        query, value = head < self.members, T.EQ(head, self.members + 1)

        def chosen(of_query: Any, of_key: Any, of_value: Any) -> Any:
            return hold(T.if_then_else(query, of_query, T.if_then_else(value, of_value, of_key)), "uint64")

        columns = (
            (first_head + head) * self.queries.pitch + self.queries.start,
            kv_head * self.keys.pitch + self.keys.start,
            kv_head * self.dim,
        )
        lane = self.at.lane
        places = [
            T.reinterpret("uint64", source.ptr_to([self.row, T.floordiv(column, 2) + lane]))
            for source, column in zip(self.sources, columns, strict=True)
        ]
        kept = [T.reinterpret("uint64", cache.lines.ptr_to([line, wide(lane * 2)])) for cache in self.caches]
        target = hold(T.if_then_else(value, kept[1], kept[0]), "uint64")
        turn = _Turn(head, hold(T.Cast("int32", value), "int32", "value"), chosen(*places), target, self.each)
        norms = [heads.norm.inputs[1] for heads in (self.queries, self.keys) if heads.norm]
        if norms:
            words = [T.reinterpret("uint64", self.env.words(name).ptr_to([lane])) for name in norms]
            place = chosen(words[0], words[1], words[1])
            centred = self.queries.norm is not None and self.queries.norm.attr["flavour"] == "zero_centred"
            for index in range(self.each):
                word = register("uint32")
                do(T.ptx["ld.global.nc.b32"](word[0], T.reinterpret("handle", place + T.uint64(128 * index))))
                for part, weight in enumerate(self._pair(word[0])):
                    put(turn.weights, weight + T.float32(1) if centred else weight, 2 * index + part)
        for index in range(self._turned() * 2):
            first = (index // 2 * 32 + lane) * 2 + index % 2
            for numbers, table, other in zip((turn.cos, turn.sin), self.queries.rope.inputs[2:4], (1, 0), strict=True):
                put(numbers, T.float32(other), index)
                with T.If(first < 2 * self.half), T.Then():
                    angle = hold(T.floormod(first, self.half), "int32")
                    put(numbers, load(self.env.buffer(table), [position, angle], constant=True), index)
            if self._across():  # the first of a pair is turned the other way than the second
                put(turn.sin, T.Select(first < self.half, T.float32(0) - turn.sin[index], turn.sin[index]), index)
        return turn

    def _across(self) -> bool:
        """Do the two columns that are turned together lie in different lanes?"""
        return 0 < self.half < 64

    def _turned(self) -> int:
        """Words of a lane that are turned, or are the first of those that are turned together."""
        return 1 if self._across() else self.half // 64

    # -- behind it ---------------------------------------------------------------------------------------------

    def make(self, release: Callable[[], None]) -> None:
        """All heads of the block. `release`: called when what others made has come, as far as the warp waits for it."""
        for turn in self.turns:  # all are on their way before the first is needed
            with T.If(turn.head < self.count), T.Then():
                for index in range(self.each):
                    do(T.ptx["ld.global.b32"](turn.words[index], T.reinterpret("handle", turn.source + T.uint64(128 * index))))
        for turn in self.turns:
            with T.If(turn.head < self.count), T.Then():
                self._make(turn)
        release()
        do(T.cuda.cta_sync())

    def _make(self, turn: _Turn) -> None:
        """Norm and rotate a head, which is rounded once; values stay as they are."""
        numbers, norm = register("float32", 2 * self.each, "numbers"), self.queries.norm
        for index in range(self.each):
            for part, number in enumerate(self._pair(turn.words[index])):
                put(numbers, number, 2 * index + part)
        if norm:
            squares = register("float32", name="squares")
            put(squares, T.float32(0))
            for index in range(2 * self.each):
                put(squares, squares[0] + numbers[index] * numbers[index])
            mean = T.cuda.warp_sum(squares[0]) * T.float32(1 / self.dim)
            inverse = hold(T.rsqrt(mean + T.float32(norm.attr["eps"])))
            for index in range(2 * self.each):
                put(numbers, numbers[index] * inverse * turn.weights[index], index)
        for index in range(2 * self._turned()):
            cos, sin = turn.cos[index], turn.sin[index]
            if self._across():
                own = register("float32", name="own")
                put(own, numbers[index])
                put(numbers, own[0] * cos + from_lane_beside(own, self.half // 2) * sin, index)
            else:
                first, second, there = hold(numbers[index]), hold(numbers[index + 2 * self._turned()]), 2 * self._turned()
                put(numbers, first * cos - second * sin, index)
                put(numbers, second * cos + first * sin, index + there)
        for index in range(self.each):
            made = register("uint32", name="made")
            do(T.ptx[f"cvt.rn.{self.kind}x2.f32"](made[0], numbers[2 * index + 1], numbers[2 * index]))
            put(turn.words, T.Select(turn.value > 0, turn.words[index], made[0]), index)
            T.buffer_store(self.lines, turn.words[index], [turn.head, self.at.lane + 32 * index])
        with T.If(turn.head >= self.members), T.Then():
            for index in range(self.each):
                do(T.ptx["st.global.b32"](T.reinterpret("handle", turn.target + T.uint64(128 * index)), turn.words[index]))

    def _pair(self, word: Any) -> tuple[Any, Any]:
        """Both elements of a word."""
        if self.kind == "bf16":
            return widened(word), T.cuda.uint_as_float(T.bitwise_and(word, T.uint32(0xFFFF0000)))
        found = register("float32", 2)
        for index in range(2):
            bits = hold(T.Cast("uint16", T.shift_right(word, T.uint32(16 * index))), "uint16")
            do(T.ptx["cvt.f32.f16"](found[index], bits))
        return found[0], found[1]

    def fragments(self, half: int) -> Any:
        """Queries of heads 8 * half to 8 * half + 7 as the rows of an `mma`. Those that there are not repeat the last."""
        q = register("uint32", self.dim // 8, "q")
        head = hold(T.min(self.at.lane % 8 + 8 * half, T.int32(self.members - 1)), "int32")
        for first in range(0, self.dim // 8, 4):
            place = self.lines.ptr_to([head, (first + T.floordiv(self.at.lane, 8)) * 4])
            do(T.ptx[LOAD](*(q[first + i] for i in range(4)), place))
        return q

    def place(self, ring: Callable[[Any, Any, Any], Any], first: Any, count: Any) -> None:
        """Write the new row over `count` rows of a tile from `first` on, by one warp. ring(part, row, chunk): where 16 bytes of
        keys (0) or values (1) go."""
        chunks, lane = self.dim // 8, self.at.lane
        for turn in range(-(-2 * chunks // 32)):
            piece = hold(turn * 32 + lane, "int32")
            with T.If(piece < 2 * chunks), T.Then():
                part, chunk = hold(T.floordiv(piece, chunks), "int32"), hold(T.floormod(piece, chunks), "int32")
                words = register("uint32", 4, "line")
                targets = [words[i] for i in range(4)]
                do(T.ptx["ld.shared.v4.b32"](*targets, self.lines.ptr_to([self.members + part, chunk * 4])))
                with T.serial(0, count) as more:
                    do(T.ptx["st.shared.v4.b32"](ring(part, first + more, chunk), *targets))
        do(T.cuda.warp_sync())
