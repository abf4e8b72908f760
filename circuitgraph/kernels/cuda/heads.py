"""Heads that one warp makes: normed, rotated and rounded once. What differs between queries, keys and values (weights, angles,
where from, where to) is looked up before the kernel waits: behind the wait all are one piece of code, since the code of a kernel
comes from memory in every step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tvm.tirx.script import builder as T

from ...circuit.ir import Node
from ...plan.ir import Plan
from .values import do, from_lane_beside, hold, load, put, register, widened


@dataclass(frozen=True)
class Heads:
    """How queries or keys come about. source: heads that others made, of `pitch` columns, of which these begin at `start`."""

    source: str
    start: int
    pitch: int
    norm: Node | None
    rope: Node | None


def heads_of(plan: Plan, nodes: Sequence[Node], name: str) -> Heads:
    """What leads to a value in these nodes, as far as it has this form; who asks looks at the rest."""
    made, found = {node.name: node for node in nodes}, {}
    for op in ("rope", "rms_norm", "part"):
        if name in made and made[name].op == op:
            found[op], name = made[name], made[name].inputs[0]
    start = int(found["part"].attr["start"]) if "part" in found else 0
    return Heads(name, start, int(plan.circuit.types[name].shape[2]), found.get("rms_norm"), found.get("rope"))  # type: ignore[union-attr]


def refuse_heads(plan: Plan, queries: Heads, keys: Heads) -> str | None:
    """Why `HeadMaker` cannot make both alike, or None."""
    norms, ropes = [heads.norm for heads in (queries, keys) if heads.norm], (queries.rope, keys.rope)
    if len(norms) == 1 or len({(norm.attr["eps"], norm.attr["flavour"]) for norm in norms}) > 1:
        return "norms queries and keys alike"
    if len({(rope.inputs[1:], rope.attr["style"]) if rope else None for rope in ropes}) > 1:
        return "rotates queries and keys alike"
    if ropes[0]:
        half = int(plan.circuit.types[ropes[0].inputs[2]].shape[1])  # type: ignore[union-attr]
        if ropes[0].attr["style"] != "half" or (half % 64 and half not in (8, 16, 32)):
            return f"rotates halves of 8, 16, 32 or a multiple of 64 columns, got {half} in style {ropes[0].attr['style']}"
        if ropes[0].inputs[1] != "position" or "position" not in {item.name for item in plan.circuit.inputs}:
            return "rotates by positions that are given"  # which are there before the program starts
    return None


class Turn:
    """One head of a warp: what is known of it before the wait, and its words."""

    def __init__(self, head: Any, value: Any, source: Any, target: Any, each: int):
        self.head, self.value, self.source, self.target = head, value, source, target
        self.weights = register("float32", 2 * each, "norm_weight")
        self.cos, self.sin = (register("float32", 2 * each, name) for name in ("cos", "sin"))
        self.words = register("uint32", each, "words")


def chosen(query: Any, value: Any, of_query: Any, of_key: Any, of_value: Any) -> Any:
    """The address that the warp's head needs."""
    return hold(T.if_then_else(query, of_query, T.if_then_else(value, of_value, of_key)), "uint64")


class HeadMaker:
    """A lane has words lane, lane + 32, ... of a head of `dim` columns, two columns each. kind: bf16 or f16."""

    def __init__(self, env: Any, queries: Heads, keys: Heads, dim: int, kind: str):
        self.env, self.queries, self.keys, self.dim, self.kind = env, queries, keys, dim, kind
        self.each = dim // 64
        """Words of a lane."""
        self.half = int(env.plan.circuit.types[queries.rope.inputs[2]].shape[1]) if queries.rope else 0

    # -- before the wait ---------------------------------------------------------------------------------------

    def fetch_norm(self, turn: Turn, lane: Any, query: Any, value: Any) -> None:
        """The weights of a head's norm. query, value: is it one?"""
        norms = [heads.norm.inputs[1] for heads in (self.queries, self.keys) if heads.norm]
        if norms:
            words = [T.reinterpret("uint64", self.env.words(name).ptr_to([lane])) for name in norms]
            place = chosen(query, value, words[0], words[1], words[1])
            centred = self.queries.norm is not None and self.queries.norm.attr["flavour"] == "zero_centred"
            for index in range(self.each):
                word = register("uint32")
                do(T.ptx["ld.global.nc.b32"](word[0], T.reinterpret("handle", place + T.uint64(128 * index))))
                for part, weight in enumerate(self.pair(word[0])):
                    put(turn.weights, weight + T.float32(1) if centred else weight, 2 * index + part)

    def fetch_angles(self, turn: Turn, lane: Any, position: Any) -> None:
        for index in range(self._turned() * 2):
            first = (index // 2 * 32 + lane) * 2 + index % 2
            for numbers, table, other in zip((turn.cos, turn.sin), self.queries.rope.inputs[2:4], (1, 0), strict=True):
                put(numbers, T.float32(other), index)
                with T.If(first < 2 * self.half), T.Then():
                    angle = hold(T.floormod(first, self.half), "int32")
                    put(numbers, load(self.env.buffer(table), [position, angle], constant=True), index)
            if self._across():  # the first of a pair is turned the other way than the second
                put(turn.sin, T.Select(first < self.half, T.float32(0) - turn.sin[index], turn.sin[index]), index)

    def _across(self) -> bool:
        """Do the two columns that are turned together lie in different lanes?"""
        return 0 < self.half < 64

    def _turned(self) -> int:
        """Words of a lane that are turned, or are the first of those that are turned together."""
        return 1 if self._across() else self.half // 64

    # -- behind it ---------------------------------------------------------------------------------------------

    def turn(self, turn: Turn, numbers: Any) -> None:
        """Norm and rotate the columns that a lane has of a head."""
        norm = self.queries.norm
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

    def rounded(self, numbers: Any, index: int) -> Any:
        """A word of two numbers."""
        made = register("uint32", name="made")
        do(T.ptx[f"cvt.rn.{self.kind}x2.f32"](made[0], numbers[2 * index + 1], numbers[2 * index]))
        return made[0]

    def store(self, turn: Turn) -> None:
        for index in range(self.each):
            do(T.ptx["st.global.b32"](T.reinterpret("handle", turn.target + T.uint64(128 * index)), turn.words[index]))

    def pair(self, word: Any) -> tuple[Any, Any]:
        """Both elements of a word."""
        if self.kind == "bf16":
            return widened(word), T.cuda.uint_as_float(T.bitwise_and(word, T.uint32(0xFFFF0000)))
        found = register("float32", 2)
        for index in range(2):
            bits = hold(T.Cast("uint16", T.shift_right(word, T.uint32(16 * index))), "uint16")
            do(T.ptx["cvt.f32.f16"](found[index], bits))
        return found[0], found[1]
