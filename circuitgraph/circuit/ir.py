"""The circuit: a frozen dataflow graph. Program order is a tuple; networkx is a view (`circuit.graph`)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from types import MappingProxyType
from typing import Any, TypeAlias

from ..errors import Location
from .types import FLOAT_DTYPES, ROWS, StateType, TensorType, ValueType

Attribute: TypeAlias = int | float | str | bool


@dataclass(frozen=True)
class Value:
    name: str
    type: ValueType


@dataclass(frozen=True)
class Node:
    """One op application. `inputs` are value names in the op's argument order."""

    op: str
    inputs: tuple[str, ...]
    outputs: tuple[Value, ...]
    attrs: tuple[tuple[str, Attribute], ...] = ()
    where: Location | None = field(default=None, compare=False)

    @property
    def name(self) -> str:
        """A node is called by its first output."""
        return self.outputs[0].name

    @property
    def attr(self) -> Mapping[str, Attribute]:
        return MappingProxyType(dict(self.attrs))


@dataclass(frozen=True)
class Input:
    """A tensor that the caller hands in. `source` says what a server must capture for it, if anything."""

    name: str
    type: TensorType
    source: str = ""


FOUR_BIT = {"nvfp4": ((1, 16), True), "mxfp4": ((1, 32), False)}
"""Formats with two numbers (e2m1) a byte: the block that each has, and whether a scale over the whole weight goes with it."""

STORAGE_FORMATS = ("fp8", "int8", *FOUR_BIT)


@dataclass(frozen=True)
class Storage:
    """How programs hold a quantised weight [*stack, N, K]: number(w[n, k]) * scales[block of (n, k)] * whole, in fp32.

    format: `fp8` (e4m3), `int8`, `nvfp4` or `mxfp4`. block: rows and columns that share a scale, counted from the first; 0 is
    all of them. whole: one more scale over the whole weight, or over each matrix of a stack.

    Raises:
        ValueError: a format that does not exist, or a block that it does not have.
    """

    format: str
    block: tuple[int, int]
    whole: bool = False

    def __post_init__(self) -> None:
        fits = FOUR_BIT.get(self.format, (self.block, False)) == (self.block, self.whole)
        if self.format not in STORAGE_FORMATS or not fits or min(self.block) < 0:
            raise ValueError(f"no storage {self.format} with a scale for {self.block}" + " and one over all" * self.whole)

    def __str__(self) -> str:
        if self.format in FOUR_BIT:
            return self.format
        return f"{self.format} " + {(0, 0): "per tensor", (1, 0): "per row"}.get(self.block, "{}x{}".format(*self.block))

    @staticmethod
    def parse(text: str) -> Storage:
        """Inverse of `str`. Raises ValueError for other texts."""
        name, _, rest = text.partition(" ")
        if name in FOUR_BIT and not rest:
            return Storage(name, *FOUR_BIT[name])
        known = {"per tensor": (0, 0), "per row": (1, 0)}
        high, x, wide = rest.partition("x")
        if name in FOUR_BIT or (rest not in known and not (x and high.isdecimal() and wide.isdecimal())):
            raise ValueError(f"no storage {text!r}")
        return Storage(name, known.get(rest) or (int(high), int(wide)))

    def refuse(self, weight: TensorType) -> str | None:
        """Why a weight of this type cannot be held so, or None."""
        if weight.dtype not in FLOAT_DTYPES or weight.rank < 2:
            return f"{self} holds float matrices"
        if self.format in FOUR_BIT and int(weight.shape[-1]) % 2:
            return f"{self} holds two numbers a byte, and so no odd number of columns"
        return None

    def tensors(self, weight: Weight) -> tuple[Value, ...]:
        """What takes the place of the one tensor of `weight`: its values, `<name>.scales` and, with `whole`, `<name>.whole`."""
        *stack, rows, columns = (int(dim) for dim in weight.type.shape)
        high, wide = self.block[0] or rows, self.block[1] or columns
        packed = self.format in FOUR_BIT
        values = TensorType("u8", (*stack, rows, columns // 2 if packed else columns))
        scales = TensorType("u8" if packed else "f32", (*stack, -(-rows // high), -(-columns // wide)))
        parts = [Value(weight.name, values), Value(f"{weight.name}.scales", scales)]
        if self.whole:
            parts.append(Value(f"{weight.name}.whole", TensorType("f32", tuple(stack) or (1,))))
        return tuple(parts)

    def to_json(self) -> dict[str, Any]:
        return {"format": self.format, "block": list(self.block), "whole": self.whole}

    @staticmethod
    def from_json(data: Mapping[str, Any]) -> Storage:
        """Inverse of `to_json`. Raises KeyError, TypeError or ValueError on data that it did not write."""
        high, wide = data["block"]
        return Storage(data["format"], (high, wide), data["whole"])


@dataclass(frozen=True)
class Weight:
    """A parameter, bound from a checkpoint by name. Shape is [out, in] for matrices.

    type: of its values, as ops read them. storage: how programs hold it where it is quantised.
    """

    name: str
    type: TensorType
    storage: Storage | None = None

    def tensors(self) -> tuple[Value, ...]:
        """What programs are passed for it."""
        return self.storage.tensors(self) if self.storage else (Value(self.name, self.type),)


@dataclass(frozen=True)
class Table:
    """Constants computed at load time from the config: `rope` has `<name>.cos` and `<name>.sin`, f32[P, dim/2]."""

    name: str
    kind: str
    dim: int

    def tensors(self) -> tuple[Value, ...]:
        shape = (f"{self.name}_rows", self.dim // 2)
        return tuple(Value(f"{self.name}.{part}", TensorType("f32", shape)) for part in ("cos", "sin"))


@dataclass(frozen=True)
class State:
    """A paged KV cache.

    Storage, owned by the caller: `<name>.k` and `<name>.v`, dtype[layers, blocks, heads, block_size, dim].
    Per call: `<name>.slot` i32[n] (block * block_size + offset; -1 writes nothing), `<name>.seq` i32[n] (which
    sequence a row belongs to), `<name>.table` i32[s, b] (block ids), `<name>.start` i32[s] (first valid row),
    `<name>.length` i32[n] (rows start..length-1 are visible to the row; its own row included).
    """

    name: str
    kind: str
    layers: int
    heads: int
    dim: int
    dtype: str
    value_dim: int | None = None
    """Of `<name>.v`, where it differs from the keys'."""

    @property
    def dims(self) -> tuple[int, int]:
        """Columns of a head's keys and values."""
        return self.dim, self.value_dim or self.dim

    def storage(self) -> tuple[Value, ...]:
        shape = (self.layers, f"{self.name}_blocks", self.heads, f"{self.name}_block_size")
        parts = zip(("k", "v"), self.dims, strict=True)
        return tuple(Value(f"{self.name}.{part}", TensorType(self.dtype, (*shape, dim))) for part, dim in parts)

    def metadata(self) -> tuple[Value, ...]:
        sequences = f"{self.name}_sequences"
        shapes: dict[str, tuple[int | str, ...]] = {
            "slot": (ROWS,),
            "seq": (ROWS,),
            "table": (sequences, f"{self.name}_table_width"),
            "start": (sequences,),
            "length": (ROWS,),
        }
        return tuple(Value(f"{self.name}.{part}", TensorType("i32", shape)) for part, shape in shapes.items())

    def bytes_per_row(self) -> int:
        """Bytes that one row (one token of one sequence) takes, over all layers, keys and values."""
        width = {"f32": 4, "bf16": 2, "f16": 2}[self.dtype]
        return self.layers * self.heads * sum(self.dims) * width


@dataclass(frozen=True)
class Entry:
    """A slice of the graph that can be called: what it computes and which states it changes.

    `rows` says what the row axis is: `sequences` (one row a sequence), `context` (rows of several sequences, a chunk at
    a time) or `block` (some rows of each sequence that see each other; what they write is scratch). An entry
    `on_request` is compiled only when it is asked for by name. Values that are `given` are inputs of this entry,
    whatever makes them in others.
    """

    name: str
    rows: str
    outputs: tuple[str, ...] = ()
    effects: tuple[str, ...] = ()
    on_request: bool = False
    given: tuple[str, ...] = ()


@dataclass(frozen=True)
class Circuit:
    """A resolved program: every switch decided, every dimension but the rows a number.

    `outputs` maps public output names to value names, `effects` maps a state to its last version,
    `facts` keeps the decisions (switch values) that made it.
    """

    name: str
    dtypes: tuple[tuple[str, str], ...]
    inputs: tuple[Input, ...]
    states: tuple[State, ...]
    tables: tuple[Table, ...]
    weights: tuple[Weight, ...]
    nodes: tuple[Node, ...]
    outputs: tuple[tuple[str, str], ...]
    effects: tuple[tuple[str, str], ...]
    entries: tuple[Entry, ...]
    facts: tuple[tuple[str, Attribute], ...] = ()

    def entry(self, name: str) -> Entry:
        for entry in self.entries:
            if entry.name == name:
                return entry
        raise KeyError(f"'{self.name}' has no entry '{name}'; it has {', '.join(e.name for e in self.entries)}")

    @property
    def act(self) -> str:
        return dict(self.dtypes)["act"]

    @property
    def block_size(self) -> int:
        """Rows of a sequence in a `block` entry: what the program calls so, or 1."""
        return int(dict(self.facts).get("block_size", 1))

    def block_of(self, entry: str) -> int:
        """Rows of the entry that one sequence has."""
        return self.block_size if self.entry(entry).rows == "block" else 1

    def sources(self) -> Iterator[Value]:
        """Values that exist before the first node: inputs, states, tables, weights."""
        yield from (Value(item.name, item.type) for item in self.inputs)
        for state in self.states:
            yield Value(state.name, StateType(state.name))
        for table in self.tables:
            yield from table.tensors()
        yield from (Value(item.name, item.type) for item in self.weights)

    @cached_property
    def types(self) -> Mapping[str, ValueType]:
        types = {value.name: value.type for value in self.sources()}
        for node in self.nodes:
            types.update((value.name, value.type) for value in node.outputs)
        return MappingProxyType(types)

    @cached_property
    def storage(self) -> Mapping[str, Storage]:
        """Weight name to how programs hold it; only of quantised ones."""
        return MappingProxyType({item.name: item.storage for item in self.weights if item.storage is not None})

    def stored_bytes(self, name: str) -> int:
        """Bytes of the tensors that programs read weight `name` from."""
        weight = next(item for item in self.weights if item.name == name)
        return sum(value.type.bytes() for value in weight.tensors() if isinstance(value.type, TensorType))

    def with_storage(self, storage: Mapping[str, Storage]) -> Circuit:
        """The same circuit with these weights quantised, and no others."""
        return replace(self, weights=tuple(replace(item, storage=storage.get(item.name)) for item in self.weights))

    @cached_property
    def producer(self) -> Mapping[str, Node]:
        """Value name to the node that makes it (sources are absent)."""
        return MappingProxyType({value.name: node for node in self.nodes for value in node.outputs})

    def consumers(self, name: str) -> tuple[Node, ...]:
        return tuple(node for node in self.nodes if name in node.inputs)

    def graph(self):  # -> networkx.MultiDiGraph; imported here since the runtime has no networkx
        """The networkx view: nodes are node names, edges carry the value name."""
        import networkx

        graph = networkx.MultiDiGraph()
        for node in self.nodes:
            graph.add_node(node.name, op=node.op)
        for node in self.nodes:
            for name in node.inputs:
                if name in self.producer:
                    graph.add_edge(self.producer[name].name, node.name, value=name)
        return graph

    def with_nodes(self, nodes: tuple[Node, ...], **changes) -> Circuit:
        return replace(self, nodes=nodes, **changes)
