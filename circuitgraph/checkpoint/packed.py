"""Weights in quantised storage: what their bytes mean.

A weight's numbers are its stored ones times the scale of the block that they lie in. Here they are multiplied out, which
is the reference; a kernel that reads the bytes itself needs the same description and nothing else. Imports torch
only: a serving box loads with it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..circuit.ir import FOUR_BIT, Circuit, Storage, Weight

VALUE_DTYPES = {"fp8": "F8_E4M3", "int8": "I8", "nvfp4": "U8", "mxfp4": "U8"}
"""Every format, and how files call the dtype of its values. The 4-bit ones are e2m1, two a byte, even column in the low half."""

SCALE_DTYPES = {
    "fp8": ("f32", "bf16", "f16", "F8_E8M0"),
    "int8": ("f32", "bf16", "f16"),
    "nvfp4": ("F8_E4M3",),
    "mxfp4": ("U8", "F8_E8M0"),
}
"""What scales may be stored in. U8 is the exponent of a power of two (e8m0), from before files had a dtype for it."""

GLOBAL_DTYPES = ("f32", "bf16", "f16")

E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""What the three low bits of a 4-bit number mean; the fourth is its sign."""

_CHUNK = 1 << 24
"""Numbers that are multiplied out at once: what this takes beside the result is some 200 MB."""

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Packed:
    """How the stored numbers of a weight [..., rows, columns] become its values.

    block: rows and columns that share a scale, counted from the first; the last block may be partial. 0 is all of them.
    scales: name of their tensor. global_scale: name of one more, for the whole weight; empty where there is none.
    divides: by the global scale, instead of multiplying (compressed-tensors).
    """

    format: str
    scales: str
    block: tuple[int, int]
    global_scale: str = ""
    divides: bool = False

    def __str__(self) -> str:
        if self.format in FOUR_BIT:
            return self.format
        kinds = {(0, 0): "per tensor", (1, 0): "per channel"}
        return f"{self.format} {kinds.get(self.block, 'block {}x{}'.format(*self.block))}"

    @property
    def storage(self) -> Storage:
        """The form that `packed_tensors` brings it to."""
        return Storage(self.format, self.block, bool(self.global_scale))

    @property
    def tensors(self) -> tuple[str, ...]:
        """The tensors that it needs beside its values."""
        return (self.scales, self.global_scale) if self.global_scale else (self.scales,)

    def value_shapes(self, shape: Shape) -> tuple[Shape, ...]:
        """How the values of a weight of this shape may be stored, the usual form first."""
        if self.format not in FOUR_BIT:
            return (shape,)
        *rest, columns = shape
        flat = () if columns % 2 else ((*rest, columns // 2),)
        # gpt-oss keeps the 16 bytes of a scale together in a dimension of their own.
        return flat if self.format != "mxfp4" or columns % 32 else (*flat, (*rest, columns // 32, 16))

    def scale_shapes(self, shape: Shape) -> tuple[Shape, ...]:
        """How the scales of a weight of this shape may be stored, the usual form first; empty where there can be none."""
        if self.block == (0, 0):
            return per_tensor_shapes(shape)
        if len(shape) < 2:
            return ()
        *stack, rows, columns = shape
        high, wide = self.block[0] or rows or 1, self.block[1] or columns or 1
        blocks = (*stack, -(-rows // high), -(-columns // wide))
        return (blocks, blocks[:-1]) if self.block == (1, 0) else (blocks,)

    def to_json(self) -> dict[str, Any]:
        return {**vars(self), "block": list(self.block)}

    @staticmethod
    def from_json(data: Mapping[str, Any]) -> Packed:
        """Inverse of `to_json`."""
        return Packed(**{**data, "block": tuple(data["block"])})


def per_tensor_shapes(shape: Shape) -> tuple[Shape, ...]:
    """A scale for the whole weight, or one for each matrix of a stack of them; files store one as [] or as [1]."""
    stack = tuple(shape[:-2])
    return (stack, (*stack, 1), (*stack, 1, 1)) if stack else ((), (1,))


def dequantise(
    packed: Packed,
    shape: Shape,
    values: torch.Tensor,
    scales: torch.Tensor,
    extra: torch.Tensor | None,
    dtype: torch.dtype,
) -> torch.Tensor:
    """The weight: computed in fp32, where the tensors lie, and rounded once.

    Shapes are those of `value_shapes` and `scale_shapes`; extra: the global scale, where there is one.
    """
    rows, columns = (1, *shape)[-2:]
    count = math.prod(shape[:-2])
    high, wide = packed.block[0] or max(rows, 1), packed.block[1] or max(columns, 1)
    factors = _numbers(scales).reshape(count, -(-rows // high), -(-columns // wide))
    if extra is not None:
        whole = extra.float().reshape(-1, 1, 1)
        factors = factors / whole if packed.divides else factors * whole
    stored = values.reshape(count, rows, math.prod(packed.value_shapes((columns,))[0]))
    out = torch.empty((count, rows, columns), dtype=dtype, device=values.device)
    step = max(_CHUNK // max(columns, 1) // high, 1) * high
    for matrix in range(count):
        for start in range(0, rows, step):
            part = stored[matrix, start : start + step]
            numbers = _four_bits(part) if packed.format in FOUR_BIT else part.float()
            scale = factors[matrix, start // high : -(-(start + len(part)) // high)]
            scale = scale.repeat_interleave(high, 0)[: len(part)].repeat_interleave(wide, 1)[:, :columns]
            out[matrix, start : start + step] = numbers * scale
    return out.reshape(shape)


def packed_tensors(
    packed: Packed, weight: Weight, values: torch.Tensor, scales: torch.Tensor, extra: torch.Tensor | None
) -> dict[str, torch.Tensor]:
    """The tensors that programs read a quantised weight from, `weight.tensors()` by name, of any file's spelling of them.

    Values stay where they lie if they are contiguous; nothing is rounded but a divisor's reciprocal.
    """
    scales = _numbers(scales) if packed.format not in FOUR_BIT else scales.contiguous().view(torch.uint8)
    found = [values.contiguous().view(torch.uint8), scales]
    if extra is not None:
        found.append(1 / extra.float() if packed.divides else extra.float())
    wanted = weight.tensors()
    return {value.name: item.reshape(value.type.shape).contiguous() for value, item in zip(wanted, found, strict=True)}  # type: ignore[union-attr,arg-type]


def packed_in_file(name: str, storage: Storage) -> Packed:
    """How `file_tensors` stores a weight under `name`."""
    return Packed(storage.format, f"{name}.scales", storage.block, f"{name}.whole" if storage.whole else "")


def file_tensors(name: str, storage: Storage, tensors: Sequence[torch.Tensor]) -> dict[str, torch.Tensor]:
    """The tensors that programs read (`Weight.tensors`) in the dtypes of files."""
    values, scales, *whole = tensors
    scales = scales.view(torch.float8_e4m3fn) if storage.format == "nvfp4" else scales
    stored = (values.view(_VALUES.get(storage.format, torch.uint8)), scales, *whole)
    return dict(zip((name, f"{name}.scales", f"{name}.whole"), stored, strict=False))


def dequantised(circuit: Circuit, weights: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """`weights` with every quantised one of the circuit as its numbers in fp32: what ops' references are given.

    Those whose scales are not there are left as they are.
    """
    made = dict(weights)
    for weight in circuit.weights:
        names = [value.name for value in weight.tensors()]
        if weight.storage is not None and all(name in made for name in names):
            made[weight.name] = tensors_to_numbers(weight, [made.pop(name) for name in names])
    return made


def tensors_to_numbers(weight: Weight, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """What the tensors of a quantised weight (`weight.tensors()`) mean, in fp32 [*stack, N, K]."""
    storage = weight.storage
    assert storage is not None
    values, scales, *rest = tensors
    packed = Packed(storage.format, "scales", storage.block, "whole" if rest else "")
    values = values.view(_VALUES.get(storage.format, torch.uint8))
    scales = scales.view(torch.float8_e4m3fn) if storage.format == "nvfp4" else scales
    shape = tuple(int(dim) for dim in weight.type.shape)
    return dequantise(packed, shape, values, scales, rest[0] if rest else None, torch.float32)


_VALUES = {"fp8": torch.float8_e4m3fn, "int8": torch.int8}


def _four_bits(packed: torch.Tensor) -> torch.Tensor:
    """e2m1 numbers f32[rows, columns] from u8[rows, columns / 2]."""
    table = torch.tensor([*E2M1, *(-number for number in E2M1)], device=packed.device)
    halves = torch.stack((packed & 15, packed >> 4), dim=-1)
    return table[halves.int()].flatten(-2)


def _numbers(scales: torch.Tensor) -> torch.Tensor:
    """Scales in fp32. An e8m0 of 255 is NaN, of 0 the smallest power that it has, which fp32 holds as a subnormal."""
    if scales.dtype == torch.uint8:
        scales = scales.view(torch.float8_e8m0fnu)
    return scales.float()
