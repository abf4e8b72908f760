"""Stage `lower`, the part that every backend shares: the argument list of a plan's function.

Order: inputs, state storage, state addressing, tables, weights, workspace, outputs. The manifest records it, and
the runtime passes tensors by it.
"""

from __future__ import annotations

from .circuit.ir import State, Value
from .circuit.types import TensorType
from .ops import TABLE
from .plan.ir import Plan


def argument_values(plan: Plan) -> list[tuple[str, Value]]:
    """(role, value) of every argument; roles: input, state, addressing, table, weight, workspace, output."""
    circuit = plan.circuit
    arguments = [("input", Value(item.name, item.type)) for item in circuit.inputs]
    for state in circuit.states:
        arguments += [("state", value) for value in state.storage()]
        arguments += [("addressing", value) for value in _addressing(plan, state)]
    arguments += [("table", value) for table in circuit.tables for value in table.tensors()]
    arguments += [("weight", value) for weight in circuit.weights for value in weight.tensors()]
    arguments.append(("workspace", Value("workspace", TensorType("u8", (plan.workspace_bytes,)))))
    for public, name in circuit.outputs:
        value_type = circuit.types[name]
        assert isinstance(value_type, TensorType)
        arguments.append(("output", Value(public, value_type)))
    return arguments


def _addressing(plan: Plan, state: State) -> list[Value]:
    """The parts of the state's addressing that the plan's ops read."""
    read = {part for node in plan.circuit.nodes for part in TABLE[node.op].addressing}
    rows = plan.rows
    return [
        Value(value.name, value.type.with_rows(rows))
        for value in state.metadata()
        if isinstance(value.type, TensorType) and value.name.removeprefix(f"{state.name}.") in read
    ]
