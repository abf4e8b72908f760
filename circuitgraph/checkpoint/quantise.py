"""Making quantised weights: from float ones to the tensors that programs read (`circuit.ir.Storage`). Imports torch only.

A scale brings the largest number of its block to the format's largest, so that nothing overflows:

fp8     scale = largest / 448, numbers to the nearest e4m3
int8    scale = largest / 127, numbers to the nearest integer of -127..127
nvfp4   whole = largest of all / (448 * 6), scale of 16 columns = largest / 6 / whole to the nearest e4m3, numbers to the nearest
        e2m1 of that
mxfp4   scale of 32 columns = a power of two, numbers to the nearest e2m1: of the power that leaves the largest at 4 to 8, where
        what is over 6 is cut off, and of twice that, the one with the smaller squared error

Ties go to the even number; a block of zeros has scale 1. All of it is computed in fp32.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import torch

from ..circuit.ir import FOUR_BIT, Storage, Weight
from ..circuit.types import FLOAT_DTYPES, TensorType
from ..errors import CheckpointError, Fault
from ..ops.base import DTYPE_NAMES
from .packed import E2M1

FORMATS = {
    "fp8": Storage("fp8", (1, 0)),
    "fp8-block": Storage("fp8", (128, 128)),
    "int8": Storage("int8", (1, 0)),
    "nvfp4": Storage("nvfp4", *FOUR_BIT["nvfp4"]),
    "mxfp4": Storage("mxfp4", *FOUR_BIT["mxfp4"]),
}
"""What `--quantize` calls a storage: fp8 and int8 have a scale for each row, which costs kernels least."""

LARGEST = {"fp8": 448.0, "int8": 127.0, "nvfp4": 6.0, "mxfp4": 6.0}

_LARGEST_SCALE = 448.0
_SMALLEST = 2.0**-126
"""Of a scale in fp32: smaller ones lose bits, and numbers over them overflow."""
_CHUNK = 1 << 24
"""Numbers that are worked on at once."""


def quantise(values: torch.Tensor, storage: Storage, where: str = "") -> list[torch.Tensor]:
    """The tensors of a weight with these values, float [*stack, N, K]: `Weight.tensors` says their dtypes and shapes.

    Raises:
        CheckpointError: values that are not finite; `where` says whose.
    """
    weight = Weight("w", TensorType(DTYPE_NAMES[values.dtype], tuple(values.shape)), storage)
    assert weight.type.dtype in FLOAT_DTYPES
    assert storage.refuse(weight.type) is None, storage.refuse(weight.type)
    shapes = [tuple(int(dim) for dim in value.type.shape) for value in weight.tensors()]  # type: ignore[union-attr]
    matrices = values.reshape(-1, *values.shape[-2:])
    stored = [torch.empty(shape, dtype=torch.uint8, device=values.device) for shape in shapes[:1]]
    plain = storage.format not in FOUR_BIT
    stored.append(torch.empty(shapes[1], dtype=torch.float32 if plain else torch.uint8, device=values.device))
    by_matrix = [tensor.reshape(len(matrices), *tensor.shape[-2:]) for tensor in stored]
    wholes = []
    for index, matrix in enumerate(matrices):
        _check_finite(matrix, where)
        whole = _whole_scale(matrix) if storage.whole else None
        wholes.append(whole)
        high = storage.block[0] or len(matrix)
        for start, part in _row_chunks(matrix, high):
            numbers, scales = _quantise_rows(part.float(), storage, high, whole)
            by_matrix[0][index, start : start + len(part)] = numbers
            by_matrix[1][index, start // high : start // high + len(scales)] = scales
    if storage.whole:
        stored.append(torch.stack([whole for whole in wholes if whole is not None]).reshape(shapes[2]))
    return stored


def _row_chunks(matrix: torch.Tensor, high: int) -> Iterator[tuple[int, torch.Tensor]]:
    """(first row, rows), whole blocks of `high` rows."""
    step = max(_CHUNK // max(matrix.shape[1], 1) // high, 1) * high
    for start in range(0, len(matrix), step):
        yield start, matrix[start : start + step]


def _check_finite(matrix: torch.Tensor, where: str) -> None:
    for start, part in _row_chunks(matrix, 1):
        broken = ~part.isfinite()
        if broken.any():
            row, column = (int(index) for index in broken.nonzero()[0])
            got = f"{float(part[row, column])} at row {start + row}, column {column}"
            hint = "The checkpoint is damaged, or the weight's dtype is too small for it."
            raise CheckpointError(
                Fault("cannot be quantised", where=where or None, expected="finite numbers", got=got, hint=hint)
            )


def _whole_scale(matrix: torch.Tensor) -> torch.Tensor:
    largest = torch.stack([part.float().abs().amax() for _, part in _row_chunks(matrix, 1)]).amax()
    return _scale(largest, LARGEST["nvfp4"] * _LARGEST_SCALE)


def _scale(largest: torch.Tensor, most: float) -> torch.Tensor:
    return torch.where(largest == 0, torch.ones_like(largest), (largest / most).clamp(min=_SMALLEST))


def _quantise_rows(
    values: torch.Tensor, storage: Storage, high: int, whole: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """(numbers, scales) of whole blocks of rows, as they are stored."""
    wide = storage.block[1] or values.shape[1]
    blocks = _padded(values, high, wide)
    largest = blocks.abs().amax((1, 3))
    if storage.format == "mxfp4":
        return _powers_of_two(values, blocks, largest)
    if whole is not None:
        scales = (largest / LARGEST["nvfp4"] / whole).clamp(max=_LARGEST_SCALE).to(torch.float8_e4m3fn)
        factors = scales.float() * whole
        # A block that is so small beside the largest of all that its scale is none becomes zero.
        over = torch.where(factors == 0, torch.ones_like(factors), factors)
        codes = _four_bit_codes(torch.where(factors[:, None, :, None] == 0, 0.0, blocks / over[:, None, :, None]))
        return _two_a_byte(_cut(codes, values)), scales.view(torch.uint8)
    scales = _scale(largest, LARGEST[storage.format])
    numbers = _cut(blocks / scales[:, None, :, None], values).clamp(-LARGEST[storage.format], LARGEST[storage.format])
    made = numbers.round().to(torch.int8) if storage.format == "int8" else numbers.to(torch.float8_e4m3fn)
    return made.view(torch.uint8), scales


def _padded(values: torch.Tensor, high: int, wide: int) -> torch.Tensor:
    """[row blocks, rows, column blocks, columns], filled up with zeros."""
    rows, columns = values.shape
    down, across = -(-rows // high), -(-columns // wide)
    padded = torch.nn.functional.pad(values, (0, across * wide - columns, 0, down * high - rows))
    return padded.reshape(down, high, across, wide)


def _cut(blocks: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """Back to the shape of `values`."""
    down, high, across, wide = blocks.shape
    return blocks.reshape(down * high, across * wide)[: values.shape[0], : values.shape[1]]


def _powers_of_two(values: torch.Tensor, blocks: torch.Tensor, largest: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """frexp: largest = m * 2^e with m in 0.5..1, so that 2^(e - 3) leaves it at 4..8."""
    exponent = torch.where(largest == 0, torch.full_like(largest, 3.0), torch.frexp(largest).exponent.float()) - 3
    tried = []
    for more in (0, 1):
        power = (exponent + more).clamp(-126, 127)
        factor = torch.exp2(power)[:, None, :, None]
        codes = _four_bit_codes(blocks / factor)
        error = (_numbers(codes) * factor - blocks).square().sum((1, 3))
        tried.append((power, codes, error))
    (low, low_codes, low_error), (up, up_codes, up_error) = tried
    better = up_error < low_error
    power, codes = torch.where(better, up, low), torch.where(better[:, None, :, None], up_codes, low_codes)
    return _two_a_byte(_cut(codes, values)), (power + 127).to(torch.uint8)


def _four_bit_codes(numbers: torch.Tensor) -> torch.Tensor:
    """u8 codes of the nearest e2m1; what is larger than 6 becomes 6."""
    size = numbers.abs()
    code = torch.zeros(numbers.shape, dtype=torch.uint8, device=numbers.device)
    for index, (low, high) in enumerate(pairwise(E2M1)):
        middle = (low + high) / 2
        code += size > middle if index % 2 == 0 else size >= middle  # a tie goes to the even code
    return code | (torch.signbit(numbers).to(torch.uint8) << 3)


def _numbers(codes: torch.Tensor) -> torch.Tensor:
    table = torch.tensor([*E2M1, *(-number for number in E2M1)], device=codes.device)
    return table[codes.int()]


def _two_a_byte(codes: torch.Tensor) -> torch.Tensor:
    return codes[:, 0::2] | (codes[:, 1::2] << 4)
