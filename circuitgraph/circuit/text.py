"""A circuit as a program file: stable text that loads back to an equal circuit (`parse`), and JSON for artifacts."""

from __future__ import annotations

from typing import Any

from .ir import Attribute, Circuit, Entry, Input, Node, State, Storage, Table, Value, Weight
from .types import StateType, TensorType, ValueType


def format_circuit(circuit: Circuit) -> str:
    """The circuit in the circuit language: no switches, every dimension a number, one op a line.

    `language.parse_circuit(format_circuit(c)) == c` for every circuit.
    """
    lines = [f"program: {circuit.name}"]
    lines.append(f"dtypes: {{{', '.join(f'{name}: {dtype}' for name, dtype in circuit.dtypes)}}}")
    if circuit.facts:
        lines.append(f"facts: {{{', '.join(f'{name}: {_scalar(value)}' for name, value in circuit.facts)}}}")
    lines.append("inputs:")
    for item in circuit.inputs:
        source = f', source: "{item.source}"' if item.source else ""
        lines.append(f'  {item.name}: {{type: "{item.type}"{source}}}')
    if circuit.states:
        lines.append("state:")
    for state in circuit.states:
        sizes = f"layers: {state.layers}, heads: {state.heads}, dim: {state.dim}, dtype: {state.dtype}"
        sizes += f", value_dim: {state.value_dim}" if state.value_dim else ""
        lines.append(f"  {state.name}: {{kind: {state.kind}, {sizes}}}")
    if circuit.tables:
        lines.append("tables:")
    lines += [f"  {table.name}: {{kind: {table.kind}, dim: {table.dim}}}" for table in circuit.tables]
    if circuit.weights:
        lines.append("weights:")
    lines += [f"  {weight.name}: {_weight(weight)}" for weight in circuit.weights]
    lines.append("body:")
    lines += [f"  - {format_node(node)}" for node in circuit.nodes]
    lines.append("outputs: {" + ", ".join(f"{public}: {name}" for public, name in circuit.outputs) + "}")
    if circuit.effects:
        lines.append("effects: {" + ", ".join(f"{state}: {last}" for state, last in circuit.effects) + "}")
    lines.append("entries:")
    for entry in circuit.entries:
        parts = [f"rows: {entry.rows}"]
        if entry.given:
            parts.append(f"given: [{', '.join(entry.given)}]")
        if entry.outputs:
            parts.append(f"outputs: [{', '.join(entry.outputs)}]")
        if entry.effects:
            parts.append(f"effects: [{', '.join(entry.effects)}]")
        if entry.on_request:
            parts.append("on_request: true")
        lines.append(f"  {entry.name}: {{{', '.join(parts)}}}")
    return "\n".join(lines) + "\n"


def format_node(node: Node) -> str:
    """`y = rms_norm(x, scale, eps=1e-06, flavour="plain")`"""
    arguments = [*node.inputs, *(f"{name}={_attribute(value)}" for name, value in node.attrs)]
    return f"{', '.join(value.name for value in node.outputs)} = {node.op}({', '.join(arguments)})"


def _weight(weight: Weight) -> str:
    return f'{{type: "{weight.type}", storage: {weight.storage}}}' if weight.storage else f'"{weight.type}"'


def _attribute(value: Attribute) -> str:
    return f'"{value}"' if isinstance(value, str) else repr(value)


def _scalar(value: Attribute) -> str:
    if isinstance(value, str):
        return value if value.isidentifier() else f'"{value}"'
    return str(value).lower() if isinstance(value, bool) else str(value)


def circuit_to_json(circuit: Circuit) -> dict[str, Any]:
    """Plain data for the manifest; places in source files are left out."""
    return {
        "name": circuit.name,
        "dtypes": dict(circuit.dtypes),
        "facts": dict(circuit.facts),
        "inputs": [{"name": i.name, "type": _type_json(i.type), "source": i.source} for i in circuit.inputs],
        "states": [{key: value for key, value in vars(state).items() if value is not None} for state in circuit.states],
        "tables": [vars(table) for table in circuit.tables],
        "weights": [_weight_json(weight) for weight in circuit.weights],
        "nodes": [
            {
                "op": node.op,
                "inputs": list(node.inputs),
                "outputs": [{"name": value.name, "type": _type_json(value.type)} for value in node.outputs],
                "attrs": dict(node.attrs),
            }
            for node in circuit.nodes
        ],
        "outputs": dict(circuit.outputs),
        "effects": dict(circuit.effects),
        "entries": [
            {
                "name": e.name,
                "rows": e.rows,
                "outputs": list(e.outputs),
                "effects": list(e.effects),
                "on_request": e.on_request,
                **({"given": list(e.given)} if e.given else {}),
            }
            for e in circuit.entries
        ],
    }


def circuit_from_json(data: dict[str, Any]) -> Circuit:
    """Inverse of `circuit_to_json`. Raises KeyError, TypeError or ValueError on data that it did not write."""
    return Circuit(
        name=data["name"],
        dtypes=tuple(data["dtypes"].items()),
        inputs=tuple(Input(i["name"], _tensor(i["type"]), i["source"]) for i in data["inputs"]),
        states=tuple(State(**state) for state in data["states"]),
        tables=tuple(Table(**table) for table in data["tables"]),
        weights=tuple(_weight_from_json(weight) for weight in data["weights"]),
        nodes=tuple(
            Node(
                node["op"],
                tuple(node["inputs"]),
                tuple(Value(value["name"], _type(value["type"])) for value in node["outputs"]),
                tuple(node["attrs"].items()),
            )
            for node in data["nodes"]
        ),
        outputs=tuple(data["outputs"].items()),
        effects=tuple(data["effects"].items()),
        entries=tuple(
            Entry(e["name"], e["rows"], tuple(e["outputs"]), tuple(e["effects"]), e["on_request"], tuple(e.get("given", ())))
            for e in data["entries"]
        ),
        facts=tuple(data["facts"].items()),
    )


def _weight_json(weight: Weight) -> dict[str, Any]:
    data = {"name": weight.name, "type": _type_json(weight.type)}
    return {**data, "storage": weight.storage.to_json()} if weight.storage else data


def _weight_from_json(data: dict[str, Any]) -> Weight:
    storage = Storage.from_json(data["storage"]) if "storage" in data else None
    return Weight(data["name"], _tensor(data["type"]), storage)


def _type_json(value_type: ValueType) -> Any:
    if isinstance(value_type, StateType):
        return {"state": value_type.state}
    return {"dtype": value_type.dtype, "shape": list(value_type.shape)}


def _type(data: Any) -> ValueType:
    return StateType(data["state"]) if "state" in data else _tensor(data)


def _tensor(data: Any) -> TensorType:
    return TensorType(data["dtype"], tuple(data["shape"]))
