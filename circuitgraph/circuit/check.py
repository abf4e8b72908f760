"""Stage `check`, and the verifier between stages: is this circuit well formed and well typed?"""

from __future__ import annotations

from ..errors import CircuitError, Fault, did_you_mean
from ..interpreter import needed_values
from ..ops import TABLE, OpContext, TypeRuleError
from ..ops.cache import EVERYTHING, Sight
from .ir import Circuit, Node
from .types import StateType


def check(circuit: Circuit) -> None:
    """Names are unique and defined before use, types are what the op table says, entries exist, no node is dead.

    Raises:
        CircuitError: every fault found.
    """
    faults: list[Fault] = []
    types = {}
    for source in circuit.sources():
        if source.name in types:
            faults.append(_fault(circuit, None, f"'{source.name}' is declared twice"))
        types[source.name] = source.type
    for name, storage in circuit.storage.items():
        reason = storage.refuse(types[name])
        if reason:
            faults.append(_fault(circuit, None, f"weight '{name}': {reason}, got {types[name]}"))
    for node in circuit.nodes:
        _check_node(circuit, node, types, faults)
        for value in node.outputs:
            if value.name in types:
                faults.append(_fault(circuit, node, f"'{value.name}' is defined twice"))
            types[value.name] = value.type
    for public, name in circuit.outputs:
        if name not in types or isinstance(types[name], StateType):
            faults.append(_fault(circuit, None, f"output '{public}' is '{name}', which is no tensor of the circuit"))
    for state, last in circuit.effects:
        if types.get(last) != StateType(state):
            faults.append(_fault(circuit, None, f"state '{state}' ends as '{last}', which is no version of it"))
    for entry in circuit.entries:
        for name in entry.outputs:
            if name not in dict(circuit.outputs):
                faults.append(_fault(circuit, None, f"entry '{entry.name}' has no output '{name}'"))
        for name in entry.effects:
            if name not in dict(circuit.effects):
                faults.append(_fault(circuit, None, f"entry '{entry.name}' has no state '{name}'"))
        for name in entry.given:
            if name not in types or isinstance(types[name], StateType):
                faults.append(_fault(circuit, None, f"entry '{entry.name}' is given '{name}', which is no tensor of the circuit"))
    if not faults:
        _check_sights(circuit, faults)
        roots = [name for _, name in (*circuit.outputs, *circuit.effects)]
        needed = needed_values(circuit, roots)
        for node in circuit.nodes:
            if not any(value.name in needed for value in node.outputs):
                faults.append(_fault(circuit, node, "nothing uses this value", "Remove the line, or make it an output."))
        for weight in circuit.weights:
            if weight.name not in needed:
                faults.append(_fault(circuit, None, f"weight '{weight.name}' is used by nothing"))
    if faults:
        raise CircuitError(faults)


def _check_sights(circuit: Circuit, faults: list[Fault]) -> None:
    """Rows find their own place in the cache by the blocks that their entry has."""
    outputs, effects = dict(circuit.outputs), dict(circuit.effects)
    for entry in circuit.entries:
        roots = [outputs[name] for name in entry.outputs] + [effects[name] for name in entry.effects]
        needed, block = needed_values(circuit, roots, given=entry.given), circuit.block_of(entry.name)
        for node in circuit.nodes:
            sight = Sight.of(node.attr) if node.op == "attention" and node.name in needed else EVERYTHING
            if (sight.window or sight.causal) and sight.block != block:
                message = f"attention with a window, or causal, has other blocks than its entry '{entry.name}'"
                where, hint = node.where or circuit.name, "A row's own place is counted from the end of its block."
                faults.append(Fault(message, where, node.name, f"block={block}", f"block={sight.block}", hint))


def _check_node(circuit: Circuit, node: Node, types: dict, faults: list[Fault]) -> None:
    op = TABLE.get(node.op)
    if op is None:
        faults.append(_fault(circuit, node, f"unknown op '{node.op}'", did_you_mean(node.op, TABLE)))
        return
    unknown = [name for name in node.inputs if name not in types]
    if unknown:
        if _in_cycle(circuit, node):
            faults.append(_fault(circuit, node, f"'{node.name}' depends on itself: a cycle"))
        else:
            faults.append(_fault(circuit, node, f"'{unknown[0]}' is used before it is defined", did_you_mean(unknown[0], types)))
        return
    where = node.where or circuit.name
    try:
        made = op.infer([types[name] for name in node.inputs], node.attr, OpContext(circuit.act))
    except TypeRuleError as error:
        faults.append(Fault(f"{node.op}: {error.message}", where, node.name, error.expected, error.got, error.hint))
        return
    stated = tuple(value.type for value in node.outputs)
    if made != stated:
        expected, got = (", ".join(map(str, side)) for side in (made, stated))
        faults.append(Fault(f"{node.op} makes other types", where, node.name, expected, got))


def _in_cycle(circuit: Circuit, node: Node) -> bool:
    import networkx

    graph = circuit.graph()
    return any(node.name in component and len(component) > 1 for component in networkx.strongly_connected_components(graph)) or (
        graph.has_edge(node.name, node.name)
    )


def _fault(circuit: Circuit, node: Node | None, message: str, hint: str | None = None) -> Fault:
    where = node.where if node and node.where else circuit.name
    return Fault(message, where=where, subject=node.name if node else None, hint=hint)
