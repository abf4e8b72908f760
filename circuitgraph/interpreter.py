"""The reference interpreter: runs any circuit in torch, on any device, differentiably.

It is the oracle of every compiled program, the proposer's own forward when nothing is compiled, and the
training forward of the example drafters.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from .checkpoint.packed import dequantised
from .circuit.ir import Circuit, Value
from .circuit.types import TensorType
from .errors import Fault, RuntimeUseError, did_you_mean
from .ops import TABLE, OpContext, PagedKV


def interpret(
    circuit: Circuit,
    *,
    inputs: Mapping[str, torch.Tensor],
    weights: Mapping[str, torch.Tensor],
    states: Mapping[str, PagedKV] | None = None,
    entry: str | None = None,
    outputs: Sequence[str] | None = None,
) -> dict[str, torch.Tensor]:
    """Run the part of `circuit` that `entry`, or the listed `outputs`, need.

    Args:
        inputs: one tensor per circuit input in use, and per value that the entry is given; row axis first, any number
            of rows.
        weights: weights and tables (`rope.cos`, ...) by circuit name, in any float dtype; quantised ones as numbers, too, or as
            the tensors that programs read (`checkpoint.packed.dequantised`).
        states: cache storage and addressing by state name; storage is written in place (see `ops.cache.Append`).
        entry: an entry of the circuit: its outputs and effects. `outputs` alone computes those and all effects.

    Returns:
        Public output name to tensor.

    Raises:
        RuntimeUseError: a tensor that is missing or has the wrong shape, before anything ran.
    """
    public = dict(circuit.outputs)
    wanted_outputs = circuit.entry(entry).outputs if entry else (outputs if outputs is not None else tuple(public))
    effects = circuit.entry(entry).effects if entry else tuple(state.name for state in circuit.states)
    for name in wanted_outputs:
        if name not in public:
            raise RuntimeUseError(Fault(f"no output '{name}'", where=circuit.name, hint=did_you_mean(name, public)))
    roots = [public[name] for name in wanted_outputs] + [dict(circuit.effects)[name] for name in effects]
    given_values = circuit.entry(entry).given if entry else ()
    needed = needed_values(circuit, roots, given_values)
    weights = dequantised(circuit, weights) if circuit.storage else weights
    values: dict[str, Any] = {}
    rows: int | None = None
    interior = (Value(name, circuit.types[name]) for name in given_values if name in circuit.producer)
    for source in (*circuit.sources(), *interior):
        if source.name not in needed:
            continue
        given = {**weights, **inputs, **(states or {})}.get(source.name)
        if given is None:
            raise RuntimeUseError(Fault("is not given", where=circuit.name, subject=source.name, expected=str(source.type)))
        if isinstance(source.type, TensorType):
            rows = _check_shape(circuit, source.name, source.type, given, rows)
        values[source.name] = given
    ctx = OpContext(circuit.act)
    for node in circuit.nodes:
        if not any(value.name in needed and value.name not in values for value in node.outputs):
            continue
        results = TABLE[node.op].reference([values[name] for name in node.inputs], node.attr, ctx)
        values.update((value.name, result) for value, result in zip(node.outputs, results, strict=True))
    return {name: values[public[name]] for name in wanted_outputs}


def needed_values(circuit: Circuit, roots: Sequence[str], given: Sequence[str] = ()) -> set[str]:
    """Names of all values that `roots` depend on, themselves included; what makes `given` ones is not looked at."""
    needed: set[str] = set()
    stack = list(roots)
    while stack:
        name = stack.pop()
        if name not in needed:
            needed.add(name)
            if name in circuit.producer and name not in given:
                stack.extend(circuit.producer[name].inputs)
    return needed


def _check_shape(circuit: Circuit, name: str, expected: TensorType, given: torch.Tensor, rows: int | None) -> int | None:
    fits = given.dim() == expected.rank
    for want, have in zip(expected.shape, given.shape, strict=False):
        if isinstance(want, int):
            fits = fits and want == have
        elif want == "n":
            rows = have if rows is None else rows
            fits = fits and rows == have
    if not fits:
        elsewhere = f" with {rows} rows elsewhere" if "n" in expected.shape and rows not in given.shape[:1] else ""
        got = f"[{', '.join(str(size) for size in given.shape)}]" + elsewhere
        raise RuntimeUseError(Fault("has the wrong shape", where=circuit.name, subject=name, expected=str(expected), got=got))
    return rows
