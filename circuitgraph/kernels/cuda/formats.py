"""Quantised weights in registers: stored bytes to the pairs of bf16 or f16 that tensor cores multiply, or to fp32.

The stored floats have a short exponent. Shifted to where the exponent of a wider type ends they are their value times a
power of two, subnormals included, and one exact multiplication of a pair takes that power back, and a 4-bit format's scale
with it: number and scale have six significant bits together. So every decoded number is exact, up to the power of two
`Format.factor`, which is left to the sums.

The two numbers of a pair lie 16 bits apart in their word, so they are no neighbouring columns; `Format.order` brings x to
the same order, once. An e4m3 byte that is NaN (127, 255) decodes to 480: weights are numbers.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from tvm.tirx.script import builder as T

from ...circuit.ir import FOUR_BIT, Storage
from .values import do, hold, load, register, wide

SIGNS = 0x80008000
MANTISSA = {"bf16": 7, "f16": 10}
E4M3, E2M1 = (8, 3), (4, 1)
"""Bits of a number, and of its mantissa."""

POWER_OF_E4M3 = {"bf16": 120, "f16": 8, "f32": 120}
POWER_OF_E2M1 = {"bf16": 126, "f16": 14, "f32": 126}
"""What a number that was only shifted falls short of its value: the difference of the exponents' biases, of two."""

LEFT_TO_SUMS = {("nvfp4", "bf16"): 10, ("mxfp4", "bf16"): 60, ("fp8", "f16"): 8, ("nvfp4", "f16"): 8}
"""Powers of two by which decoded numbers are too small. In bf16 a scale times 2^126 would overflow; in f16 fp8 needs no
multiplication then."""

LIFT = {"bf16": 60, "f16": 0}
"""Of two: what x is multiplied by where numbers stay too small, so that products do not end among the subnormals of fp32. An x
of 2^67 and more turns infinite."""


@dataclass(frozen=True)
class Scales:
    """What belongs to a quantised weight beside its values: the tensors of `Storage.tensors`.

    words: the scales of a 4-bit format four a word, where their lines are a whole number of words.
    """

    storage: Storage
    scales: Any
    words: Any = None
    whole: Any = None

    @property
    def of_blocks(self) -> bool:
        """Do scales differ along a row?"""
        return self.storage.block[1] > 0


def scales_of(env: Any, weight: str) -> Scales | None:
    """Of a weight that the circuit has quantised, else None."""
    storage = env.plan.circuit.storage.get(weight)
    if storage is None:
        return None
    scales = env.buffer(f"{weight}.scales")
    words = env.words(f"{weight}.scales") if storage.format in FOUR_BIT and int(scales.shape[-1]) % 4 == 0 else None
    return Scales(storage, scales, words, env.buffer(f"{weight}.whole") if storage.whole else None)


def of_row(scales: Scales | None, row: Any) -> Any:
    """What the finished sum of a weight's row is multiplied by, None where that is nothing."""
    if scales is None:
        return None
    factors = []
    if not scales.of_blocks:
        factors.append(load(scales.scales, [row if scales.storage.block[0] else 0, 0], constant=True))
    if scales.whole is not None:
        factors.append(load(scales.whole, [0], constant=True))
    return hold(factors[0] * factors[1]) if len(factors) == 2 else factors[0] if factors else None


# -- pairs for tensor cores ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Format:
    """How a weight's words become pairs of `kind` (bf16, f16).

    storage: None where they are pairs already. multiply: the GPU has a product of two bf16 pairs; all have its sum with a third.
    """

    kind: str
    storage: Storage | None = None
    multiply: bool = True

    @property
    def name(self) -> str:
        return self.storage.format if self.storage else self.kind

    @property
    def columns(self) -> int:
        """Of a 32-bit word."""
        return 2 if self.storage is None else 8 if self.name in FOUR_BIT else 4

    @property
    def scaled(self) -> str:
        """Where the scales of blocks go: on the `numbers`, on the `sums` of a step; empty where there are none."""
        if self.storage is None or not self.storage.block[1]:
            return ""
        return "numbers" if self.name in FOUR_BIT else "sums"

    @property
    def scale_columns(self) -> int:
        """Columns that a 32-bit word of scales is for: one of fp32, or four bytes."""
        assert self.storage is not None
        return self.storage.block[1] * (4 if self.name in FOUR_BIT else 1)

    @property
    def factor(self) -> float:
        """What sums are multiplied by, beside `of_row`."""
        return 2.0 ** LEFT_TO_SUMS.get((self.name, self.kind), 0)

    @property
    def sums_factor(self) -> float:
        """The same where scales are multiplied with sums, and x is `lifted`: see `one_row`."""
        left = POWER_OF_E2M1[self.kind] - LIFT[self.kind]
        return 2.0 ** (left + (POWER_OF_E4M3["f16"] if self.name == "nvfp4" else 0))

    @property
    def lane_scales(self) -> int:
        """Of a 4-bit format, for 32 columns."""
        assert self.storage is not None
        return 32 // self.storage.block[1]

    @property
    def lift(self) -> float:
        """What x is multiplied by there."""
        return 2.0 ** LIFT[self.kind]

    def lifted(self, pair: Any) -> Any:
        """A pair of x times `lift`."""
        return self._times(pair, _power(LIFT[self.kind], self.kind)) if LIFT[self.kind] else pair

    def refuse(self) -> str | None:
        """Why tensor cores cannot have these weights, or None."""
        if (self.name, self.kind) == ("mxfp4", "f16"):
            return "f16 does not hold the scales of mxfp4"
        return None

    def order(self, x: Sequence[Any]) -> list[Any]:
        """The words of x, two columns each, that go with one word of weights, in the order of its pairs."""
        if self.storage is None:
            return list(x)
        half, pairs = self.columns // 2, range(self.columns // 2)
        return [permuted(x[i // 2], x[(i + half) // 2], 0x7632 if i % 2 else 0x5410) for i in pairs]

    def natural(self, pairs: Sequence[Any]) -> list[Any]:
        """The pairs of a decoded word as neighbouring columns."""
        if self.storage is None:
            return list(pairs)
        beside = [(pairs[i], pairs[i + 1]) for i in range(0, len(pairs), 2)]
        return [permuted(*two, take) for take in (0x5410, 0x7632) for two in beside]

    def rescaled(self, pair: Any, scale: Any) -> Any:
        """A pair times an fp32 scale, rounded."""
        halves = []
        for half in range(2):
            if self.kind == "bf16":
                bits = T.bitwise_and(pair, T.uint32(0xFFFF0000)) if half else T.shift_left(pair, T.uint32(16))
                halves.append(hold(T.cuda.uint_as_float(bits) * scale))
            else:
                value = register("float32")
                bits = hold(T.Cast("uint16", T.shift_right(pair, T.uint32(16)) if half else pair), "uint16")
                do(T.ptx["cvt.f32.f16"](value[0], bits))
                halves.append(hold(value[0] * scale))
        result = register("uint32", name="pair")
        do(T.ptx[f"cvt.rn.{self.kind}x2.f32"](result[0], halves[1], halves[0]))
        return result[0]

    def decode(self, word: Any, scale: Any = None) -> list[Any]:
        """The pairs of a word of weights. scale: of a 4-bit format, see `scale_pairs`."""
        if self.storage is None:
            return [word]
        if self.name == "int8":
            return list(self._integers(word))
        if self.name == "fp8":
            pairs = shifted(word, E4M3, self.kind)
            return list(pairs) if self.kind == "f16" else [self._times(pair, _power(120, "bf16")) for pair in pairs]
        return [self._times(pair, scale) for pair in self.unscaled(word)]

    def unscaled(self, word: Any) -> list[Any]:
        """The pairs of a word of a 4-bit format, 2^`POWER_OF_E2M1` too small and without their scales."""
        return list(_four_bits(word) if self.kind == "bf16" else shifted(word, E2M1, self.kind))

    def scale_pairs(self, word: Any, lane: Any) -> list[Any]:
        """A 4-bit format's scales for the 32 columns that are the lane's of 128, equally many for each: twice in a word.

        word: of the scales; every lane has the one with its columns' in it.
        """
        lane = T.Cast("uint32", lane)
        if self.name == "mxfp4":
            # e8m0 is the exponent of a float. One above 2^61 turns infinite, which shows; one below 2^-65 loses digits.
            byte = permuted(word, T.uint32(0), T.uint32(0x4440) + lane % T.uint32(4))
            bias = POWER_OF_E2M1["bf16"] - LEFT_TO_SUMS["mxfp4", "bf16"]
            exponent = hold(T.min(byte + T.uint32(bias), T.uint32(255)), "uint32")
            return [hold(exponent * T.uint32(0x00800080), "uint32")]
        # Two bytes of e4m3: each to the top of a half, then to its value, then to both halves.
        take = T.uint32(0x1404) + lane % T.uint32(2) * T.uint32(0x2020)
        (*_, pair) = shifted(permuted(word, T.uint32(0), take), E4M3, self.kind, first=1)
        missing = POWER_OF_E4M3[self.kind] + POWER_OF_E2M1[self.kind] - LEFT_TO_SUMS["nvfp4", self.kind]
        while missing:
            step = min(missing, 120)
            pair, missing = self._times(pair, _power(step, self.kind)), missing - step
        # Taken apart and joined, not permuted: then a multiplication reads one half for both, which costs nothing.
        halves, both = register("uint16", 2), register("uint32", 2, "scales")
        do(T.ptx.mov.b32(halves[0], halves[1], pair))
        for half in range(2):
            do(T.ptx.mov.b32(both[half], halves[half], halves[half]))
        return [both[0], both[1]]

    def scale_floats(self, word: Any, lane: Any) -> list[Any]:
        """The same scales in fp32, of nvfp4 2^`POWER_OF_E4M3` of f16 too small."""
        lane = T.Cast("uint32", lane)
        if self.name == "mxfp4":
            byte = permuted(word, T.uint32(0), T.uint32(0x4440) + lane % T.uint32(4))
            bits = T.Select(T.EQ(byte, T.uint32(0)), T.uint32(0x00400000), T.shift_left(byte, T.uint32(23)))
            return [hold(T.cuda.uint_as_float(bits))]
        take = T.uint32(0x1404) + lane % T.uint32(2) * T.uint32(0x2020)
        (*_, pair) = shifted(permuted(word, T.uint32(0), take), E4M3, "f16", first=1)
        halves, scales = register("uint16", 2), register("float32", 2, "scales")
        do(T.ptx.mov.b32(halves[0], halves[1], pair))
        for half in range(2):
            do(T.ptx["cvt.f32.f16"](scales[half], halves[half]))
        return [scales[0], scales[1]]

    def _integers(self, word: Any) -> Iterator[Any]:
        """Signed bytes. f16 has room for 1024 + a whole byte; bf16 for 128 + seven bits, and for 128 or 256 as the sign."""
        if self.kind == "f16":
            flipped = hold(T.bitwise_xor(word, T.uint32(0x80808080)), "uint32")
            for take in (0x4240, 0x4341):
                yield self._plus(permuted(flipped, T.uint32(0x64646464), take), T.uint32(0x3C003C00), T.uint32(0xE480E480))
            return
        for source in (word, hold(T.shift_right(word, T.uint32(8)), "uint32")):
            seven, sign = (
                hold(T.bitwise_or(T.bitwise_and(source, T.uint32(mask)), T.uint32(0x43004300)), "uint32")
                for mask in (0x007F007F, 0x00800080)
            )
            yield self._plus(sign, T.uint32(0xBF80BF80), seven)

    def _times(self, a: Any, b: Any) -> Any:
        if self.kind == "bf16" and not self.multiply:  # a * b + -0 is a * b, zeros included
            return self._plus(a, b, T.uint32(SIGNS))
        result = register("uint32", name="pair")
        do(T.ptx[f"mul.rn.{self.kind}x2"](result[0], a, b))
        return result[0]

    def _plus(self, a: Any, b: Any, c: Any) -> Any:
        result = register("uint32", name="pair")
        do(T.ptx[f"fma.rn.{self.kind}x2"](result[0], a, b, c))
        return result[0]


def permuted(a: Any, b: Any, selector: Any) -> Any:
    """Four bytes of the eight of a (0 to 3) and b; the lowest digit of the selector says which becomes the lowest."""
    result = register("uint32")
    do(T.ptx["prmt.b32"](result[0], a, b, T.uint32(selector) if isinstance(selector, int) else selector))
    return result[0]


def shifted(word: Any, number: tuple[int, int], kind: str, first: int = 0) -> Iterator[Any]:
    """Pairs of the floats of each half of a word from the `first` on, each with its fields where those of `kind` end."""
    bits, mantissa = number
    up = MANTISSA[kind] - mantissa
    mask = ((1 << bits - 1) - 1 << up) * 0x00010001
    for place in range(first * bits, 16, bits):
        sign = T.bitwise_and(_shift(word, 16 - bits - place), T.uint32(SIGNS))
        yield hold(T.bitwise_or(sign, T.bitwise_and(_shift(word, up - place), T.uint32(mask))), "uint32", "pair")


def _four_bits(word: Any) -> Iterator[Any]:
    """`shifted` of e2m1 to bf16, with fewer instructions where logic is the limit: a product copies a number to two places."""
    mask = T.uint32(0x81C081C0)
    low = hold(T.shift_right(word, T.uint32(6)), "uint32")
    for source, field, factor in ((word, 0x000F000F, 0x1040), (word, 0x00F000F0, 0x0104), (low, 0x003C003C, 0x0410)):
        copies = hold(T.bitwise_and(source, T.uint32(field)) * T.uint32(factor), "uint32")
        yield hold(T.bitwise_and(copies, mask), "uint32", "pair")
    top = T.bitwise_or(T.bitwise_and(word, T.uint32(SIGNS)), T.bitwise_and(low, T.uint32(0x01C001C0)))
    yield hold(top, "uint32", "pair")


def _shift(word: Any, left: int) -> Any:
    if left == 0:
        return word
    return T.shift_left(word, T.uint32(left)) if left > 0 else T.shift_right(word, T.uint32(-left))


def _power(exponent: int, kind: str) -> Any:
    """2^exponent twice in a word."""
    bias = {"bf16": 127, "f16": 15}[kind]
    return T.uint32((exponent + bias << MANTISSA[kind]) * 0x00010001)


# -- single numbers in fp32 ----------------------------------------------------------------------------------------


def number(weight: Any, scales: Scales, row: Any, column: Any) -> Any:
    """One number of a weight as fp32, times the scale of its block of columns; `of_row` is left to the sum."""
    storage = scales.storage
    if storage.format in FOUR_BIT:
        byte = load_byte(weight, [wide(row), T.floordiv(column, 2)])
        value = _float(T.shift_right(byte, T.Cast("uint32", column % 2) * T.uint32(4)), E2M1, POWER_OF_E2M1["f32"])
    else:
        byte = load_byte(weight, [wide(row), column])
        if storage.format == "int8":
            value = hold(T.Cast("float32", T.Cast("int32", T.bitwise_xor(byte, T.uint32(128))) - 128))
        else:
            value = _float(byte, E4M3, POWER_OF_E4M3["f32"])
    if not scales.of_blocks:
        return value
    high, across = storage.block
    place = [T.floordiv(row, high) if high else 0, T.floordiv(column, across)]
    return hold(value * _scale(scales, place))


def _scale(scales: Scales, place: list[Any]) -> Any:
    if scales.storage.format not in FOUR_BIT:
        return load(scales.scales, place, constant=True)
    byte = load_byte(scales.scales, [wide(place[0]), place[1]])
    if scales.storage.format == "nvfp4":
        return _float(byte, E4M3, POWER_OF_E4M3["f32"])
    smallest = T.uint32(0x00400000)  # 2^-127, a subnormal
    return hold(T.cuda.uint_as_float(T.Select(T.EQ(byte, T.uint32(0)), smallest, T.shift_left(byte, T.uint32(23)))))


def _float(bits: Any, number: tuple[int, int], power: int) -> Any:
    """The float in the low bits of a word, whatever is above."""
    width, mantissa = number
    sign = T.bitwise_and(T.shift_left(bits, T.uint32(32 - width)), T.uint32(1 << 31))
    rest = T.shift_left(T.bitwise_and(bits, T.uint32((1 << width - 1) - 1)), T.uint32(23 - mantissa))
    return hold(T.cuda.uint_as_float(T.bitwise_or(sign, rest)) * T.float32(2.0**power))


def load_byte(buffer: Any, indices: list[Any]) -> Any:
    result = register("uint32")
    do(T.ptx["ld.global.nc.u8"](result[0], buffer.ptr_to(indices)))
    return result[0]
