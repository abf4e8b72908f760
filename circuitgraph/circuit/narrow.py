"""Stages `slice` and `specialize`: one entry of a circuit, then one number of rows."""

from __future__ import annotations

from dataclasses import replace

from ..errors import CircuitError, Fault, did_you_mean
from ..interpreter import needed_values
from .ir import Circuit, Input, Node, Value
from .types import StateType, TensorType


def slice_entry(circuit: Circuit, name: str) -> Circuit:
    """Only what entry `name` computes: its outputs and effects, and what they depend on, as far as it is not given.

    Before: the whole head. After (`context` of a one-layer head): norms, fc, k and v, append.

    Raises:
        CircuitError: no such entry.
    """
    known = {entry.name: entry for entry in circuit.entries}
    if name not in known:
        raise CircuitError(Fault(f"no entry '{name}'", where=circuit.name, hint=did_you_mean(name, known)))
    entry = known[name]
    outputs = tuple((public, value) for public, value in circuit.outputs if public in entry.outputs)
    effects = tuple((state, value) for state, value in circuit.effects if state in entry.effects)
    needed = needed_values(circuit, [value for _, value in (*outputs, *effects)], entry.given)
    given = [name for name in entry.given if name in needed and name in circuit.producer]
    inputs = [item for item in circuit.inputs if item.name in needed]
    inputs += [Input(name, circuit.types[name]) for name in given]  # type: ignore[arg-type]
    computed = needed.difference(given)
    return replace(
        circuit,
        inputs=tuple(inputs),
        states=tuple(state for state in circuit.states if state.name in needed),
        tables=tuple(table for table in circuit.tables if any(value.name in needed for value in table.tensors())),
        weights=tuple(weight for weight in circuit.weights if weight.name in needed),
        nodes=tuple(node for node in circuit.nodes if any(value.name in computed for value in node.outputs)),
        outputs=outputs,
        effects=effects,
        entries=(entry,),
    )


def specialize(circuit: Circuit, rows: int) -> Circuit:
    """The same circuit for exactly `rows` rows. The one place where the row axis becomes a number.

    Raises:
        CircuitError: rows < 1.
    """
    if rows < 1:
        raise CircuitError(Fault("the number of rows must be positive", where=circuit.name, got=str(rows)))

    def fixed(value_type: TensorType | StateType) -> TensorType | StateType:
        return value_type.with_rows(rows) if isinstance(value_type, TensorType) else value_type

    def node_for(node: Node) -> Node:
        return replace(node, outputs=tuple(Value(value.name, fixed(value.type)) for value in node.outputs))

    inputs = tuple(Input(item.name, item.type.with_rows(rows), item.source) for item in circuit.inputs)
    return replace(circuit, inputs=inputs, nodes=tuple(node_for(node) for node in circuit.nodes))
