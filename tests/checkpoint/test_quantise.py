"""Quantising: how far numbers move, which stay, and what is refused."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from circuitgraph.checkpoint import quantise as module
from circuitgraph.checkpoint.packed import tensors_to_numbers
from circuitgraph.checkpoint.quantise import FORMATS, LARGEST, quantise
from circuitgraph.checkpoint.random_weights import random_packed, seeded
from circuitgraph.circuit.ir import Storage, Weight
from circuitgraph.circuit.types import TensorType
from circuitgraph.errors import CheckpointError
from circuitgraph.ops import DTYPE_NAMES

KINDS = {**FORMATS, "fp8 per tensor": Storage("fp8", (0, 0)), "int8 blocks": Storage("int8", (8, 48))}
STEP = {"fp8": 1 / 16, "int8": 0.5 / 127, "nvfp4": 1 / 6, "mxfp4": 0.25}
"""The most that a number moves: fp8's relative to itself, the others' to the largest of its block."""


def weight_of(values: torch.Tensor, storage: Storage) -> Weight:
    return Weight("w", TensorType(DTYPE_NAMES[values.dtype], tuple(values.shape)), storage)


def round_trip(values: torch.Tensor, storage: Storage) -> torch.Tensor:
    weight, tensors = weight_of(values, storage), quantise(values, storage)
    for value, tensor in zip(weight.tensors(), tensors, strict=True):
        assert tuple(tensor.shape) == value.type.shape  # type: ignore[union-attr]
        assert DTYPE_NAMES[tensor.dtype] == value.type.dtype  # type: ignore[union-attr]
    return tensors_to_numbers(weight, tensors)


def largest_of_blocks(values: torch.Tensor, storage: Storage) -> torch.Tensor:
    """Of each number's block, one number at a time."""
    rows, columns = values.shape
    high, wide = storage.block[0] or rows, storage.block[1] or columns
    out = torch.empty_like(values)
    for r in range(0, rows, high):
        for c in range(0, columns, wide):
            part = values[r : r + high, c : c + wide]
            out[r : r + high, c : c + wide] = part.abs().max()
    return out


@settings(max_examples=40)
@given(
    kind=st.sampled_from(list(KINDS)),
    rows=st.integers(1, 150),
    pairs=st.integers(1, 100),
    size=st.sampled_from([1e-30, 1e-3, 1.0, 1e4]),
    spread=st.sampled_from([0.0, 2.0]),
    seed=st.integers(0, 99),
)
def test_numbers_move_by_half_a_step_at_most(kind: str, rows: int, pairs: int, size: float, spread: float, seed: int) -> None:
    storage, generator = KINDS[kind], torch.Generator().manual_seed(seed)
    values = torch.randn(rows, 2 * pairs, generator=generator) * size
    values *= torch.exp(spread * torch.randn(rows, 1, generator=generator))
    made, largest = round_trip(values, storage), largest_of_blocks(values, storage)
    step = STEP[storage.format]
    if storage.format == "fp8":
        bound = torch.maximum(values.abs() * step, largest / LARGEST["fp8"] * 2.0**-10)
    elif storage.format == "nvfp4":  # its scale is rounded, too, by 1/16 or, beside much larger blocks, by a fixed step
        bound = largest * (step + 1 / 16) + values.abs().max() * 2.0**-10
    else:
        bound = largest * step
    rounding = 127 * 3 * 2.0**-23  # a scale, a quotient of up to 127 steps and a product are rounded to fp32; in half steps
    assert ((made - values).abs() <= bound * (1 + rounding)).all()
    assert (made * values >= 0).all(), "a number has changed its sign"


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", [(40, 96), (3, 24, 160)])
def test_what_is_quantised_stays_as_it_is(kind: str, shape: tuple[int, ...]) -> None:
    """The numbers of quantised tensors are quantised to the same numbers."""
    weight = Weight("w", TensorType("f32", shape), KINDS[kind])
    tensors = random_packed(weight, seeded(weight, 0))
    if kind == "nvfp4":  # a whole scale of the form that quantising makes: the largest block has the largest scale
        tensors[1] = torch.full_like(tensors[1], 0x38)
        tensors[1].view(-1, *tensors[1].shape[-2:])[:, 0, 0] = 0x7E
        tensors[0].view(-1, *tensors[0].shape[-2:])[:, 0, 0] |= 7
    values = tensors_to_numbers(weight, tensors)
    again = round_trip(values, KINDS[kind])
    high, wide = weight.storage.block
    if weight.storage.format in ("fp8", "int8"):
        numbers = tensors[0].view(torch.int8 if weight.storage.format == "int8" else torch.float8_e4m3fn).float().abs()
    else:
        numbers = values_over_scales(weight, tensors)
    full = largest_full(numbers, LARGEST[weight.storage.format], high, wide)  # only these have the scale that quantising makes
    assert full.any()
    exact = 0.0 if weight.storage.format == "mxfp4" else 2e-7
    assert ((again - values).abs()[full] <= exact * values.abs()[full]).all()


def largest_full(numbers: torch.Tensor, most: float, high: int, wide: int) -> torch.Tensor:
    """Numbers whose block reaches the format's largest."""
    flat = numbers.reshape(-1, *numbers.shape[-2:])
    out = torch.zeros(flat.shape, dtype=torch.bool)
    for matrix, found in zip(flat, out, strict=True):
        found |= largest_of_blocks(matrix, Storage("fp8", (high, wide))) == most
    return out.reshape(numbers.shape)


def values_over_scales(weight: Weight, tensors: list[torch.Tensor]) -> torch.Tensor:
    """The e2m1 numbers themselves."""
    one = {"nvfp4": 0x38, "mxfp4": 0x7F}[weight.storage.format]
    ones = [tensors[0], torch.full_like(tensors[1], one), *(torch.ones_like(whole) for whole in tensors[2:])]
    return tensors_to_numbers(weight, ones)


@pytest.mark.parametrize("kind", KINDS)
def test_zeros(kind: str) -> None:
    values = torch.randn(30, 64, generator=torch.Generator().manual_seed(0))
    values[7] = 0
    values[20:, 32:] = 0
    made = round_trip(values, KINDS[kind])
    assert made.isfinite().all()
    assert (made[values == 0] == 0).all()
    assert (round_trip(torch.zeros(3, 64), KINDS[kind]) == 0).all()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("bad", [float("inf"), float("-inf"), float("nan")])
def test_what_is_not_finite_is_refused(kind: str, bad: float) -> None:
    values = torch.ones(5, 64)
    values[3, 17] = bad
    with pytest.raises(CheckpointError) as caught:
        quantise(values, KINDS[kind], "model.safetensors: lm_head.weight")
    assert str(caught.value) == (
        f"model.safetensors: lm_head.weight: cannot be quantised; expected finite numbers; got {bad} at row 3, column 17. "
        "The checkpoint is damaged, or the weight's dtype is too small for it."
    )


def test_the_usual_error_of_each_format() -> None:
    """Of normally distributed numbers; the bounds are 10 % above what is found, so a worse rounding shows."""
    values = torch.randn(256, 1024, generator=torch.Generator().manual_seed(0)).bfloat16()
    changed = {kind: round_trip(values, storage) - values.float() for kind, storage in FORMATS.items()}
    found = {kind: float(change.norm() / values.float().norm()) for kind, change in changed.items()}
    bounds = {"fp8": 0.029, "fp8-block": 0.029, "int8": 0.0085, "nvfp4": 0.105, "mxfp4": 0.125}
    assert all(found[kind] < bound for kind, bound in bounds.items()), found
    assert all(found[kind] > bound / 2 for kind, bound in bounds.items()), found


def test_long_weights_are_worked_on_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    values = torch.randn(2, 300, 64, generator=torch.Generator().manual_seed(0))
    whole = {kind: quantise(values, storage) for kind, storage in KINDS.items()}
    monkeypatch.setattr(module, "_CHUNK", 64 * 40)
    for kind, storage in KINDS.items():
        assert all(torch.equal(a, b) for a, b in zip(whole[kind], quantise(values, storage), strict=True)), kind


def test_extremes_of_fp32() -> None:
    for kind, storage in KINDS.items():
        for size in (3e38, 1e-38, 1e-44):
            values = torch.full((2, 64), size)
            made = round_trip(values, storage)
            assert made.isfinite().all(), (kind, size)
            if size >= 1e-38:
                assert (made / values - 1).abs().max() < 0.2, (kind, size)
