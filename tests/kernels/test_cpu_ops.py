"""Every op of the table as a program of its own, compiled for the CPU, on the table's own samples."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch

from circuitgraph.circuit.ir import Circuit
from circuitgraph.circuit.types import StateType
from circuitgraph.errors import ScheduleError
from circuitgraph.interpreter import interpret
from circuitgraph.language import parse_circuit
from circuitgraph.ops import TABLE, OpContext, PagedKV
from circuitgraph.ops.base import Sample, random_tensors
from tests.compiled_calls import compile_entries

ROWS = 5
BEHIND_A_PRODUCT = ("masked_top1", "top1")
"""Ops that compile only as the end of an lm_head: tests/test_compiled.py."""
CASES = [(name, index) for name, op in TABLE.items() if name not in BEHIND_A_PRODUCT for index in range(len(op.samples(ROWS)))]


def tensors_of(sample: Sample, seed: int) -> list:
    generator = torch.Generator().manual_seed(seed)
    make = sample.tensors or (lambda generator: random_tensors(sample.types, generator))
    return list(make(generator))


def program_of(name: str, sample: Sample, tensors: Sequence) -> Circuit:
    """What has a row for each row is an input; the rest are weights."""
    inputs, weights, states, arguments = [], [], "", []
    for at, (item, tensor) in enumerate(zip(sample.types, tensors, strict=True)):
        if isinstance(tensor, PagedKV):
            layers, _, heads, _, dim = tensor.k.shape
            states = f"state: {{kv: {{kind: paged_kv, layers: {layers}, heads: {heads}, dim: {dim}, "
            states += f"value_dim: {tensor.v.shape[4]}, dtype: f32}}}}\n"
            arguments.append("kv")
            continue
        by_row = item.shape[0] == ROWS
        shape = ", ".join(str(dim) for dim in (("n", *item.shape[1:]) if by_row else item.shape))
        (inputs if by_row else weights).append(f'x{at}: "{item.dtype}[{shape}]"')
        arguments.append(f"x{at}")
    arguments += [f"{key}={value}" for key, value in sample.attrs.items()]
    made = TABLE[name].infer(sample.types, sample.attrs, OpContext("f32"))
    stateful = isinstance(made[0], StateType)
    results = ["kv"] if stateful else [f"y{at}" for at in range(len(made))]
    entry = "effects: [kv]" if stateful else f"outputs: [{', '.join(results)}]"
    block = sample.attrs.get("block", 1)  # only entries of blocks may have any
    rows, constants = ("rows: block, ", f"constants: {{block_size: {block}}}\n") if block > 1 else ("", "")
    body = f"{', '.join(results)} = {name}({', '.join(arguments)})"
    outputs = "{}" if stateful else f"{{{', '.join(f'{name}: {name}' for name in results)}}}"
    return parse_circuit(
        f"program: one_op\n{constants}inputs: {{{', '.join(inputs)}}}\n{states}weights: {{{', '.join(weights)}}}\n"
        f"body:\n  - {body}\noutputs: {outputs}\nentries: {{run: {{{rows}{entry}}}}}\n"
    )


def run(form, circuit: Circuit, tensors: Sequence) -> dict[str, torch.Tensor]:
    """Outputs and, of a state, what it became."""
    named = {f"x{at}": tensor for at, tensor in enumerate(tensors)}
    caches = {f"kv{at or ''}": t for at, t in enumerate(t for t in tensors if isinstance(t, PagedKV))}
    caches = {name: replace(cache, k=cache.k.clone(), v=cache.v.clone()) for name, cache in caches.items()}
    inputs = {item.name: named[item.name] for item in circuit.inputs}
    weights = {item.name: named[item.name] for item in circuit.weights}
    made = dict(form("run", inputs, weights, caches))
    return made | {part: getattr(cache, part) for cache in caches.values() for part in ("k", "v")}


@pytest.mark.parametrize(("name", "index"), CASES)
def test_op_equals_its_reference(name: str, index: int, tmp_path) -> None:
    sample = TABLE[name].samples(ROWS)[index]
    circuit = program_of(name, sample, tensors_of(sample, 0))
    compiled = compile_entries(circuit, [("run", ROWS)], tmp_path)

    def reference(entry, inputs, weights, states):
        return interpret(circuit, entry=entry, inputs=inputs, weights=weights, states=states)

    for seed in range(3):
        tensors = tensors_of(sample, seed)
        want, got = run(reference, circuit, tensors), run(compiled.run, circuit, tensors)
        assert set(want) == set(got)
        for part, value in want.items():
            torch.testing.assert_close(got[part], value, rtol=2e-5, atol=2e-5)
    # The control: other numbers do not pass.
    other = run(compiled.run, circuit, tensors_of(sample, 17))
    assert any(not torch.equal(other[part], value) for part, value in want.items())


@pytest.mark.parametrize("name", BEHIND_A_PRODUCT)
def test_ops_that_need_a_product_say_so(name: str, tmp_path) -> None:
    sample = TABLE[name].samples(ROWS)[0]
    with pytest.raises(ScheduleError, match=f"no row-wise emitter for {name}"):
        compile_entries(program_of(name, sample, tensors_of(sample, 0)), [("run", ROWS)], tmp_path)
