"""The row that attention makes itself, in entries of one row a sequence: its queries and keys are normed and rotated, and keys
and values appended, before the block looks at the cache. A launch that does this alone would be all latency: it waits for its
predecessor, and attention for it.

A warp makes one head after the other and leaves them in shared memory: queries for all warps, the new cache row for the one
whose tile it belongs to.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tvm.tirx.script import builder as T

from ...circuit.ir import Node
from ...plan.fuse import APPENDS
from ...plan.ir import Group, Plan
from .heads import HeadMaker, Turn, chosen, heads_of, refuse_heads
from .row_program import sinks_of
from .shared import state_of
from .values import LOAD, do, hold, load_int, put, register, wide

PADDING = 8
"""Elements between heads in shared memory, so that eight of them are read from different banks."""
MOST = 128
"""Columns of a head."""


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
    queries, keys = (heads_of(plan, group.prologue, name) for name in (anchor.inputs[0], append.inputs[1]))
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
    norms = [heads.norm for heads in (queries, keys) if heads.norm]
    weights = [norm.inputs[1] for norm in norms]
    if {types[name].dtype for name in (*sources, *weights)} != {state.dtype} or state.dtype == "f32":  # type: ignore[union-attr]
        return "needs heads, weights of their norms and the cache in bf16 or f16, all the same"
    others = {node.name for node in group.prologue if node.op in ("rms_norm", "rope")}
    if others - {node.name for node in (*norms, queries.rope, keys.rope) if node}:
        return "makes gates element by element"
    return refuse_heads(plan, queries, keys)


class OwnRow:
    """What one block does for its (row, KV head); see `paged.PagedAttention`.

    What is known before the wait is looked up before it, see `HeadMaker`.
    """

    def __init__(self, env: Any, group: Group, kind: str):
        append, (anchor,) = append_of(group), group.anchors
        assert append is not None
        self.env, self.append, self.kind = env, append, kind
        self.queries, self.keys = (heads_of(env.plan, group.prologue, name) for name in (anchor.inputs[0], append.inputs[1]))
        self.sources = [env.words(name) for name in (self.queries.source, self.keys.source, append.inputs[2])]
        state = state_of(env.plan, append)
        self.caches, self.slots = [env.cache(f"{state}.{part}") for part in ("k", "v")], env.steady_buffer(f"{state}.slot")
        self.dim = int(env.plan.circuit.types[append.inputs[1]].shape[2])
        self.maker = HeadMaker(env, self.queries, self.keys, self.dim, kind)
        self.each = self.maker.each

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
        position = load_int(self.env.steady_buffer(rope.inputs[1]), [self.row]) if rope else None
        layer, size = int(self.append.attr["layer"]), self.caches[0].block_size
        slot = hold(T.max(self.slot, T.int32(0)), "int32", "slot")
        line = hold(self.caches[0].line(layer, T.floordiv(slot, size), kv_head, T.floormod(slot, size)), "int64", "line")
        self.turns = [
            self._fetch(hold(self.at.warp + turn, "int32", "head"), first_head, kv_head, line, position)
            for turn in range(0, self.members + 2, self.warps)
        ]

    def _fetch(self, head: Any, first_head: Any, kv_head: Any, line: Any, position: Any) -> Turn:
        query, value = head < self.members, T.EQ(head, self.members + 1)
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
        turn = Turn(head, hold(T.Cast("int32", value), "int32", "value"), chosen(query, value, *places), target, self.each)
        self.maker.fetch_norm(turn, lane, query, value)
        self.maker.fetch_angles(turn, lane, position)
        return turn

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

    def _make(self, turn: Turn) -> None:
        """Norm and rotate a head, which is rounded once; values stay as they are."""
        maker, numbers = self.maker, register("float32", 2 * self.each, "numbers")
        for index in range(self.each):
            for part, number in enumerate(maker.pair(turn.words[index])):
                put(numbers, number, 2 * index + part)
        maker.turn(turn, numbers)
        for index in range(self.each):
            put(turn.words, T.Select(turn.value > 0, turn.words[index], maker.rounded(numbers, index)), index)
            T.buffer_store(self.lines, turn.words[index], [turn.head, self.at.lane + 32 * index])
        with T.If(turn.head >= self.members), T.Then():
            maker.store(turn)

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
