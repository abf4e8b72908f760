"""Weights as the inner loops read them: fp32 vectors of adjacent columns, whatever they are stored in.

Quantised bytes are decoded in registers. A byte of fp8, or four bits, moved to the right place, is a float16 that is too
small by a power of two; the processor converts those, and the power goes into the scale. Scales that hold for a whole row
multiply its sums (`factor`), those of blocks of columns the numbers.

    weight = weight_of(env, "lm_head", lanes)      # outside of loops; for a stack too
    value = weight.load([expert, row], column)     # `lanes` columns from `column`, a multiple of `lanes`
    total = sum of value * x                       # per row
    total * weight.factor([expert, row])           # a scalar, or None for 1
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tvm.tirx.script import builder as T

from ...circuit.ir import FOUR_BIT, Storage
from . import vector as v
from .sizes import refuse_storage

_FP8_POWER = 2.0**8
_FOUR_BIT_POWER = 2.0**14
"""What a float16 with the exponent's bits of e4m3 or e2m1 is too small by."""


class Plain:
    """A float buffer [*stack, N, K]."""

    def __init__(self, buffer: Any, lanes: int):
        self.buffer, self.lanes = v.bits_of(buffer), lanes
        *_, self.rows, self.columns = (int(size) for size in buffer.shape)
        self.bits = self.buffer.dtype.itemsize * 8

    def load(self, row: Sequence[Any], column: Any) -> Any:
        """`lanes` columns from `column`."""
        return v.load(self.buffer, [*row, column], self.lanes)

    def flat(self, row: Sequence[Any]) -> Any:
        """Which row of `buffer` it is, in int64."""
        return T.Cast("int64", row[0])

    def load_rest(self, row: Sequence[Any], column: Any, count: int) -> Any:
        """The last `count` < lanes columns of a row, filled up with zeros."""
        return v.load_rest(self.buffer, [*row, column], count, self.lanes)

    def factor(self, row: Sequence[Any]) -> Any:
        """What the sums over a row are to be multiplied by, or None."""
        return None


class Quantised:
    """Bytes u8 [*stack, N, K] or [*stack, N, K / 2], their scales and, where there is one, the whole scale.

    See `circuit.ir.Storage` and `Plain`, whose methods it has. NaN in the bytes of fp8 is not told from numbers. A block of
    mxfp4 whose scale is 2^-127 counts as zero.
    """

    def __init__(self, storage: Storage, values: Any, scales: Any, whole: Any, lanes: int):
        reason = refuse_storage(storage)
        assert reason is None, reason
        self.storage, self.buffer, self.scales, self.whole, self.lanes = storage, values, scales, whole, lanes
        *self.stack, self.rows, stored = (int(size) for size in values.shape)
        self.four = storage.format in FOUR_BIT
        self.bits = 4 if self.four else 8
        self.columns = stored * 8 // self.bits

    def flat(self, row: Sequence[Any]) -> Any:
        """See `Plain`."""
        return T.Cast("int64", row[0])

    def load(self, row: Sequence[Any], column: Any) -> Any:
        """`lanes` columns from `column`, a multiple of lanes; without the row's `factor`."""
        if self.four:
            half = self.lanes // 2
            packed = T.BufferLoad(self.buffer, [*row, T.Ramp(column >> 1, 1, half)])
            numbers = _four_bits(packed, half)
        else:
            packed = T.BufferLoad(self.buffer, [*row, T.Ramp(column, 1, self.lanes)])
            numbers = _eight_bits(packed, self.lanes, self.storage.format)
        scale = self._block_scale(row, column)
        return numbers if scale is None else numbers * v.splat(scale, self.lanes)

    def load_rest(self, row: Sequence[Any], column: Any, count: int) -> Any:
        """The last `count` < lanes columns of a row, filled up with zeros; reads nothing behind them."""
        size = (count + 1) // 2 if self.four else count
        start = column >> 1 if self.four else column
        found = [T.BufferLoad(self.buffer, [*row, start + i]) for i in range(size)]
        width = self.lanes // 2 if self.four else self.lanes
        bytes_ = T.Shuffle(found + [T.uint8(0)] * (width - size), list(range(width)))
        numbers = _four_bits(bytes_, width) if self.four else _eight_bits(bytes_, width, self.storage.format)
        scale = self._block_scale(row, column)
        return numbers if scale is None else numbers * v.splat(scale, self.lanes)

    def factor(self, row: Sequence[Any]) -> Any:
        """What the sums over a row are to be multiplied by: a scalar in fp32."""
        factor = T.float32(_FOUR_BIT_POWER if self.four else _FP8_POWER if self.storage.format == "fp8" else 1.0)
        if self.storage.block[1] == 0:
            factor = factor * T.BufferLoad(self.scales, [*row[:-1], self._block_row(row[-1]), 0])
        if self.whole is not None:
            factor = factor * T.BufferLoad(self.whole, list(row[:-1]) or [0])
        return T.bind(factor)

    def _block_row(self, row: Any) -> Any:
        high = self.storage.block[0]
        return 0 if high == 0 else _over(row, high)

    def _block_scale(self, row: Sequence[Any], column: Any) -> Any:
        wide = self.storage.block[1]
        if wide == 0:
            return None
        stored = T.BufferLoad(self.scales, [*row[:-1], self._block_row(row[-1]), _over(column, wide)])
        if self.storage.format == "nvfp4":
            return _eight_bits(stored, 1, "fp8") * T.float32(_FP8_POWER)
        if self.storage.format == "mxfp4":
            return T.reinterpret("float32", T.Cast("uint32", stored) << T.uint32(23))
        return stored


class Part:
    """One matrix of a stack, from its row `first` on, as a matrix. Made where the expert is known."""

    def __init__(self, stack: Plain | Quantised, expert: Any, first: int = 0):
        size = int(stack.buffer.shape[0]) * stack.rows * stack.columns
        # 64-bit: a stack may hold more than 2^31 elements.
        self.expert = T.bind(T.Cast("int64", expert)) if size >= 2**31 else expert
        self.stack, self.first = stack, first
        self.rows, self.columns, self.bits, self.buffer = stack.rows, stack.columns, stack.bits, stack.buffer

    def _row(self, row: Sequence[Any]) -> list[Any]:
        return [self.expert, row[0] + self.first]

    def load(self, row: Sequence[Any], column: Any) -> Any:
        """See `Plain`."""
        return self.stack.load(self._row(row), column)

    def load_rest(self, row: Sequence[Any], column: Any, count: int) -> Any:
        """See `Plain`."""
        return self.stack.load_rest(self._row(row), column, count)

    def factor(self, row: Sequence[Any]) -> Any:
        """See `Plain`."""
        return self.stack.factor(self._row(row))

    def flat(self, row: Sequence[Any]) -> Any:
        """See `Plain`."""
        return T.Cast("int64", self.expert) * self.rows + T.Cast("int64", row[0] + self.first)


Weight = Plain | Quantised | Part


def weight_of(env: Any, name: str) -> Plain | Quantised:
    """A weight of the plan's circuit, by its name."""
    storage = env.plan.circuit.storage.get(name)
    if storage is None:
        return Plain(env.buffer(name), env.lanes)
    whole = env.buffer(f"{name}.whole") if storage.whole else None
    return Quantised(storage, env.buffer(name), env.buffer(f"{name}.scales"), whole, env.lanes)


def _over(index: Any, size: int) -> Any:
    """index // size of an index that is not negative; a shift where it can be, since nothing simplifies a division here."""
    shift = size.bit_length() - 1
    return index >> shift if size == 1 << shift else T.truncdiv(index, size)


def _eight_bits(stored: Any, width: int, format: str) -> Any:
    """fp32 of bytes: integers, or e4m3 times 2^-8."""
    signed = T.reinterpret(v.vector_type("int8", width), stored)
    if format == "int8":
        return T.Cast(v.vector_type("float32", width), signed)

    def const(number):
        return v.splat(number, width, "int16")

    # The sign fills the upper half, so that a shift by 7 leaves it in bit 15; bit 14 is of it, too.
    bits = (T.Cast(v.vector_type("int16", width), signed) << const(7)) & const(-0x4001)
    return T.Cast(v.vector_type("float32", width), T.reinterpret(v.vector_type("float16", width), bits))


def _four_bits(stored: Any, half: int) -> Any:
    """fp32 of 2 * half e2m1 numbers, times 2^-14; the even columns are in the low halves of the bytes."""

    def const(number):
        return v.splat(number, half, "uint32")

    wide = v.hold(T.Cast(v.vector_type("uint32", half), stored))
    apart = v.hold(wide | (wide << const(12)))  # bits 0..3 and 16..19
    bits = ((apart & const(0x00070007)) << const(9)) | ((apart & const(0x00080008)) << const(12))
    return T.Cast(f"float32x{2 * half}", T.reinterpret(f"float16x{2 * half}", bits))
