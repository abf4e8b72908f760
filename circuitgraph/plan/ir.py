"""The plan of one (entry, rows): groups of nodes, the kernel of each, and where every value lives."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

from ..circuit.ir import Circuit, Node
from ..circuit.types import StateType, TensorType
from ..ops import TABLE
from ..ops.cache import Sight

VIEWS = ("heads", "merge")
"""Ops that see the same bytes under another shape; they cost nothing and share their input's storage."""


@dataclass(frozen=True)
class Cost:
    """Bytes that must move through memory at least once, and floating-point operations."""

    bytes: int
    flops: int


@dataclass(frozen=True)
class Group:
    """Nodes that one kernel computes, in program order. `pattern` is the rule that brought them together."""

    name: str
    pattern: str
    nodes: tuple[Node, ...]
    prologue: tuple[Node, ...] = ()
    anchors: tuple[Node, ...] = ()
    epilogue: tuple[Node, ...] = ()

    @property
    def made(self) -> tuple[str, ...]:
        return tuple(value.name for node in self.nodes for value in node.outputs)

    @property
    def inputs(self) -> tuple[str, ...]:
        """Values from outside, in order of first use."""
        made = set(self.made)
        return tuple(dict.fromkeys(name for node in self.nodes for name in node.inputs if name not in made))


@dataclass(frozen=True)
class Choice:
    """What the schedule decided for a group, and why the rules before it did not."""

    rule: str
    kernel: str
    params: tuple[tuple[str, Any], ...]
    refusals: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True)
class Scratch:
    """Memory that a kernel needs while it runs: for a value inside its group, or under a name of its own (`own`)."""

    OWN: ClassVar[str] = "#"
    """Begins names of a kernel's own, which no value's name does."""

    name: str
    type: TensorType

    @staticmethod
    def own(name: str, type: TensorType) -> Scratch:
        """What `Environment.scratch(name)` finds."""
        return Scratch(f"{Scratch.OWN}{name}", type)


@dataclass(frozen=True)
class Slot:
    """A place in the workspace, in bytes."""

    offset: int
    bytes: int


@dataclass(frozen=True)
class Plan:
    """A specialised circuit cut into groups. Stages fill in `choices` (schedule) and `slots` (place).

    target: `Target.of_plans`, which a kind's templates may ask for what its processors can do.
    """

    circuit: Circuit
    entry: str
    rows: int
    target: str
    groups: tuple[Group, ...]
    choices: tuple[Choice, ...] = ()
    scratch: tuple[tuple[Scratch, ...], ...] = ()
    slots: Mapping[str, Slot] = field(default_factory=dict)
    workspace_bytes: int = 0

    @property
    def symbol(self) -> str:
        return f"{self.entry}_{self.rows}"

    def storage(self, name: str) -> str:
        """The value whose bytes `name` shares: itself unless a view made it."""
        while name in self.circuit.producer and self.circuit.producer[name].op in VIEWS:
            name = self.circuit.producer[name].inputs[0]
        return name

    def crossing(self, group: Group) -> tuple[str, ...]:
        """Values that `group` makes and somebody else reads: other groups, or the caller."""
        wanted = {value for _, value in self.circuit.outputs}
        for other in self.groups:
            if other is not group:
                wanted.update(other.inputs)
        return tuple(name for name in group.made if name in wanted and isinstance(self.circuit.types[name], TensorType))

    def cost(self, group: Group, context: int) -> Cost:
        """Bytes that must cross the group's border (weights, inputs, outputs, cache rows) and its FLOPs."""
        types = self.circuit.types
        moved = sum(self._moved(name, group) for name in group.inputs)
        moved += sum(_bytes(types[name]) for name in self.crossing(group))
        nodes = [node_cost(self.circuit, node, self.rows, context) for node in group.nodes]
        return Cost(moved + sum(cost.bytes for cost in nodes), sum(cost.flops for cost in nodes))

    def _moved(self, name: str, group: Group) -> int:
        value_type = self.circuit.types[name]
        if isinstance(value_type, StateType) or any(isinstance(dim, str) for dim in value_type.shape):
            return 0
        read = []
        for node in group.nodes:
            ins = [self.circuit.types[other] for other in node.inputs]
            read += [TABLE[node.op].reads(at, ins, node.attr) for at, other in enumerate(node.inputs) if other == name]
        whole = value_type.bytes()
        moved = max(whole if some is None else some for some in read)
        return moved * self.circuit.stored_bytes(name) // whole if name in self.circuit.storage else moved


def node_cost(circuit: Circuit, node: Node, rows: int, context: int) -> Cost:
    """The cache rows that a node of a specialised entry reads, once for all rows of a sequence's block, or appends, and its
    FLOPs. `context`: cache rows that each row attends to."""
    ins, outs = [circuit.types[name] for name in node.inputs], [value.type for value in node.outputs]
    moved = 0
    for state in circuit.states:
        if StateType(state.name) in outs:
            moved += state.bytes_per_row() // state.layers * rows
        elif StateType(state.name) in ins:
            (entry,) = circuit.entries
            read = Sight.of(node.attr).read(context)
            moved += state.bytes_per_row() // state.layers * -(-rows // circuit.block_of(entry.name)) * read
    return Cost(moved, TABLE[node.op].flops(ins, outs, node.attr, context))


def _bytes(value_type: TensorType | StateType) -> int:
    return value_type.bytes() if isinstance(value_type, TensorType) else 0
