"""Single products with quantised weights against the numbers that their bytes mean, as closely as rounding allows.

A whole program's error says little about one small number: here weights of subnormals alone, and signs and scales that
were lost, would show.
"""

from __future__ import annotations

import pytest
import torch

from circuitgraph.artifact import read_artifact
from circuitgraph.checkpoint.packed import dequantised
from circuitgraph.measure.calls import call_function
from circuitgraph.measure.weights import random_weights
from circuitgraph.ops import TORCH_DTYPES
from circuitgraph.runtime.compiled import open_library

ROUNDING = {"bf16": 2.0**-8, "f16": 2.0**-11, "f32": 2.0**-22}
"""Of a result, generously: half a unit in the last place would do."""
SUMMING = 2.0**-20
"""Of the sum of absolute products: of a few thousand, in fp32."""


@pytest.mark.parametrize("bytes", ["any", "small"])
def test_products_are_as_exact_as_rounding(product, bytes):
    folder, entry, rows = product
    artifact = read_artifact(folder)
    manifest, circuit = artifact.manifest, artifact.manifest.circuit
    weights = random_weights(manifest, "cuda", every=True)
    if bytes == "small":
        for name, tensor in weights.items():
            weights[name] = smallest(circuit, name, tensor)
    generator = torch.Generator("cuda").manual_seed(rows)
    dtype = TORCH_DTYPES[circuit.act]
    inputs = {
        item.name: torch.randn((rows, item.type.shape[1]), generator=generator, device="cuda").to(dtype)  # type: ignore[arg-type]
        for item in circuit.inputs
    }
    function = manifest.function(entry, rows)
    made = call_function(function, open_library(artifact)[function.symbol], inputs=inputs, caches={}, weights=weights)
    meant = dequantised(circuit, weights)
    wrong = [
        f"{node.inputs[1]}: {worst:.3g} of what rounding allows"
        for node in circuit.nodes
        if not (worst := excess(made[f"{node.inputs[1]}_out"], inputs[node.inputs[0]], meant[node.inputs[1]], circuit.act)) <= 1
    ]
    assert not wrong
    # The control: one number in 1000 with its sign turned is more than rounding.
    first = circuit.nodes[0]
    numbers = meant[first.inputs[1]].clone()
    numbers[:, ::1000] *= -1
    assert excess(made[f"{first.inputs[1]}_out"], inputs[first.inputs[0]], numbers, circuit.act) > 1


def excess(made: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, act: str) -> float:
    """The largest error over what is allowed of it; infinite where something is no number."""
    exact = x.double() @ weight.double().T
    allowed = exact.abs() * ROUNDING[act] + (x.double().abs() @ weight.double().abs().T) * SUMMING
    if act == "f16":
        allowed += 2.0**-24  # the spacing of its subnormals
    error = (made.double() - exact).abs() / allowed
    return float(error.nan_to_num(float("inf")).max())


def smallest(circuit, name: str, tensor: torch.Tensor) -> torch.Tensor:
    """Only subnormals, in values and in scales of eight bits, both signs."""
    storage = circuit.storage.get(name.removesuffix(".scales"))
    if storage is None or tensor.dtype != torch.uint8:
        return tensor
    if name.endswith(".scales"):
        return tensor & 7 if storage.format == "nvfp4" else tensor
    return tensor & {"fp8": 0x87, "int8": 0x81}.get(storage.format, 0x99)
