"""What a kernel template is. Templates are chosen and parametrised by schedule files; see `plan.schedule`."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import field, fields
from typing import Any, ClassVar, Protocol

import networkx

from ..circuit.ir import Node
from ..errors import Fault, ScheduleError, did_you_mean
from ..plan.ir import Group, Plan, Scratch


class Environment(Protocol):
    """What a template sees while it emits: buffers by value name, under construction in an open TIR frame."""

    plan: Plan

    def buffer(self, name: str) -> Any:
        """The TIR buffer of a value, weight, table or state part (`kv.k`), by its name in the circuit and no other.

        A quantised weight's is of its stored values; `w.scales` and `w.whole` are beside it (`circuit.ir.Storage`).
        """
        ...

    def scratch(self, name: str) -> Any:
        """The buffer that this group's kernel asked for as `Scratch.own(name, ...)`; values may have the same name."""
        ...


class Kernel:
    """A template: what it accepts, the scratch it needs, and how it emits TIR. Used as a class, never instantiated."""

    name: ClassVar[str]
    """`kind.what`: a schedule for another target kind cannot name it."""
    patterns: ClassVar[tuple[str, ...]]
    """Patterns (`plan.fuse`) whose groups it is written for. `refuse` and `emit` see groups of no other."""
    Params: ClassVar[type]
    """A frozen dataclass of tunables with defaults; schedule files set them by name."""

    @staticmethod
    def refuse(plan: Plan, group: Group, params: Any) -> str | None:
        """Why this template cannot compute `group`, or None."""
        raise NotImplementedError

    @staticmethod
    def scratch(plan: Plan, group: Group, params: Any) -> tuple[Scratch, ...]:
        """Memory needed while the group runs; names are local to the group."""
        return ()

    @staticmethod
    def emit(env: Environment, group: Group, params: Any) -> None:
        raise NotImplementedError


def refuse_packed(plan: Plan, group: Group, reads: Collection[str] = (), matrices: Collection[str] = ()) -> str | None:
    """Why a template that reads quantised weights of the formats `reads` alone cannot compute `group`, or None.

    matrices: names of those whose storage the caller judges itself.

    Every template asks this, or what its target has for kernels that read some storages (`refuse_quantised` on CUDA,
    `refuse_storages` on CPUs): one that knows nothing of storage would take bytes for numbers of another kind.
    """
    storage = plan.circuit.storage
    packed = [name for name in group.inputs if name in storage and name not in matrices]
    foreign = [f"'{name}' in {storage[name]}" for name in packed if storage[name].format not in reads]
    if not foreign:
        return None
    said = f"plain weights and {', '.join(reads)}" if reads else "plain weights"
    return f"reads {said}{' beside its matrices' if matrices else ''}, got {', '.join(foreign)}"


def meeting(group: Group) -> list[tuple[tuple[Node, ...], tuple[Node, ...]]]:
    """Anchors whose outputs meet in one epilogue, with that epilogue, in program order."""
    graph = networkx.Graph()
    graph.add_nodes_from(node.name for node in (*group.anchors, *group.epilogue))
    made_by = {value.name: node.name for node in (*group.anchors, *group.epilogue) for value in node.outputs}
    for node in group.epilogue:
        graph.add_edges_from((made_by[name], node.name) for name in node.inputs if name in made_by)
    parts = []
    for component in networkx.connected_components(graph):
        anchors = tuple(node for node in group.anchors if node.name in component)
        parts.append((anchors, tuple(node for node in group.epilogue if node.name in component)))
    return sorted(parts, key=lambda part: group.nodes.index(part[0][0]))


def within(default: int, least: int, most: int) -> Any:
    """A field of `Params` with its bounds, which `make_params` checks."""
    return field(default=default, metadata={"least": least, "most": most})


KERNELS: dict[str, type[Kernel]] = {}
"""Of every target kind that this process has imported; `kernels_of` asks for one kind's."""


def kernels_of(kind: str) -> dict[str, type[Kernel]]:
    """The registered templates of a target kind."""
    return {name: template for name, template in KERNELS.items() if name.partition(".")[0] == kind}


def kernel(template: type[Kernel]) -> type[Kernel]:
    """Add a template to the registry."""
    if not template.__doc__ or template.name in KERNELS or not getattr(template, "patterns", ()):
        raise TypeError(f"kernel {template.__name__} needs a docstring, a name of its own and the patterns that it serves")
    KERNELS[template.name] = template
    return template


def make_params(template: type[Kernel], given: dict[str, Any], where: Any) -> Any:
    """Schedule parameters as the template's dataclass.

    Raises:
        ScheduleError: an unknown name, a value of another kind, or a number out of bounds.
    """
    known = {item.name: item for item in fields(template.Params)}
    faults = []
    for name, value in given.items():
        if name not in known:
            faults.append(Fault(f"kernel {template.name} has no parameter '{name}'", where=where, hint=did_you_mean(name, known)))
        elif type(value) is not type(known[name].default):
            expected = type(known[name].default).__name__
            faults.append(Fault(f"parameter '{name}' has the wrong kind", where=where, expected=expected, got=repr(value)))
        elif (bounds := known[name].metadata) and not bounds["least"] <= value <= bounds["most"]:
            expected = f"{bounds['least']} to {bounds['most']}"
            faults.append(Fault(f"parameter '{name}' is out of bounds", where=where, expected=expected, got=repr(value)))
    if faults:
        raise ScheduleError(faults)
    return template.Params(**given)
