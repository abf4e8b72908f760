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
SUMMING = 2.0**-17
"""Of the sum of absolute products: of a few thousand, in fp32."""
STREAMED = 32
"""Rows up to which scales of blocks are applied to sums; beyond, 8-bit numbers times their scale are rounded once."""


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
        if not (worst := excess(made, inputs, meant, node.inputs, circuit.act)) <= 1
    ]
    assert not wrong
    # The control: one number in 1000 with its sign turned is more than rounding.
    for node in circuit.nodes:
        turned = meant[node.inputs[1]].clone()
        turned[:, ::1000] *= -1
        assert excess(made, inputs, {node.inputs[1]: turned}, node.inputs, circuit.act) > 1


def excess(made, inputs, weights, names: tuple[str, ...], act: str) -> float:
    """The largest error of a product over what is allowed of it; infinite where something is no number."""
    x, weight = (tensors[name].double() for tensors, name in zip((inputs, weights), names, strict=True))
    exact = x @ weight.T
    rounded = ROUNDING[act] if len(x) > STREAMED and names[1].endswith("_block") else 0
    allowed = exact.abs() * ROUNDING[act] + (x.abs() @ weight.abs().T) * (SUMMING + rounded / 2)
    if act == "f16":
        allowed += 2.0**-24  # the spacing of its subnormals
    error = (made[f"{names[1]}_out"].double() - exact).abs() / allowed
    return float(error.nan_to_num(float("inf")).max())


def smallest(circuit, name: str, tensor: torch.Tensor) -> torch.Tensor:
    """Only subnormals, in values and in scales of eight bits, both signs."""
    storage = circuit.storage.get(name.removesuffix(".scales"))
    if storage is None or tensor.dtype != torch.uint8:
        return tensor
    if name.endswith(".scales"):
        return tensor & 7 if storage.format == "nvfp4" else tensor
    return tensor & {"fp8": 0x87, "int8": 0x81}.get(storage.format, 0x99)
