"""What an op is: its argument list, type rule, meaning (a torch reference), operations and sample inputs, in one class.

Registering an op that misses a part is an error at import, so the table is complete wherever it is used.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from ..circuit.types import TensorType, ValueType

TORCH_DTYPES = {
    "f32": torch.float32,
    "bf16": torch.bfloat16,
    "f16": torch.float16,
    "i32": torch.int32,
    "i64": torch.int64,
    "u8": torch.uint8,
}
DTYPE_NAMES = {dtype: name for name, dtype in TORCH_DTYPES.items()}

REQUIRED: Any = object()


class TypeRuleError(Exception):
    """A type rule's refusal; the resolver adds the place and the node's name."""

    def __init__(self, message: str, *, expected: str | None = None, got: str | None = None, hint: str | None = None):
        super().__init__(message)
        self.message, self.expected, self.got, self.hint = message, expected, got, hint


@dataclass(frozen=True)
class Attr:
    """A compile-time argument. Without a default it must be given. quiet: nodes that leave it at its default do not have it."""

    type: type
    default: Any = REQUIRED
    choices: tuple[str, ...] = ()
    quiet: bool = False


@dataclass(frozen=True)
class OpContext:
    """What a rule may know beyond its inputs: the activation dtype of the circuit."""

    act: str

    @property
    def torch_act(self) -> torch.dtype:
        return TORCH_DTYPES[self.act]


@dataclass(frozen=True)
class Sample:
    """Inputs on which an op can be tried: types (rows fixed) and, where random floats won't do, the tensors."""

    types: tuple[ValueType, ...]
    attrs: Mapping[str, Any]
    tensors: Callable[[torch.Generator], Sequence[Any]] | None = None


class Op:
    """Base class; an op is used as a class and never instantiated.

    `inputs` names the arguments, `optional` those that may be left out at the end; a `variadic` op takes one or
    more inputs of the first kind. `reference` computes in fp32 and rounds once to the output's dtype.
    """

    name: ClassVar[str]
    inputs: ClassVar[tuple[str, ...]]
    optional: ClassVar[tuple[str, ...]] = ()
    variadic: ClassVar[bool] = False
    attrs: ClassVar[Mapping[str, Attr]] = {}
    addressing: ClassVar[tuple[str, ...]] = ()
    """Which parts of a state's addressing (`slot`, `length`, ...) the op reads."""

    @staticmethod
    def infer(types: Sequence[Any], attrs: Mapping[str, Any], ctx: OpContext) -> tuple[ValueType, ...]:
        """Output types. Raises TypeRuleError."""
        raise NotImplementedError

    @staticmethod
    def reference(args: Sequence[Any], attrs: Mapping[str, Any], ctx: OpContext) -> tuple[Any, ...]:
        """The op's meaning, in torch, differentiable where the maths is."""
        raise NotImplementedError

    @staticmethod
    def flops(ins: Sequence[Any], outs: Sequence[Any], attrs: Mapping[str, Any], context: int) -> int:
        """Floating-point operations with the rows fixed; `context` is the number of cache rows a row attends to."""
        raise NotImplementedError

    @staticmethod
    def reads(position: int, ins: Sequence[Any], attrs: Mapping[str, Any]) -> int | None:
        """Bytes that are read of input `position` where that is less than all of it: of a table's rows, of some experts."""
        return None

    @staticmethod
    def samples(rows: int) -> Sequence[Sample]:
        """Inputs to test with, for `rows` rows."""
        raise NotImplementedError


TABLE: dict[str, type[Op]] = {}


def register(op: type[Op]) -> type[Op]:
    """Add `op` to the table. Raises TypeError when a part is missing."""
    missing = [part for part in ("infer", "reference", "flops", "samples") if part not in vars(op)]
    missing += [field for field in ("name", "inputs") if not hasattr(op, field)]
    if not op.__doc__:
        missing.append("docstring")
    if missing:
        raise TypeError(f"op {op.__name__} lacks {', '.join(missing)}")
    if op.name in TABLE:
        raise TypeError(f"op '{op.name}' is registered twice")
    TABLE[op.name] = op
    return op


NO_FLOPS: Any = staticmethod(lambda ins, outs, attrs, context: 0)
"""The `flops` of an op that moves or compares numbers."""


def elementwise(flops_per_element: int) -> Any:
    """A `flops` for a class: so many for each element of its outputs."""
    return staticmethod(lambda ins, outs, attrs, context: flops_per_element * sum(item.elements() for item in outs))


def product_flops(x: TensorType, weight: TensorType) -> int:
    """Of x [n, K] with a matrix [N, K]."""
    return 2 * x.elements() * weight.shape[0]  # type: ignore[return-value]


def need_float(types: Sequence[Any], *positions: int) -> None:
    for position in positions:
        item = types[position]
        if not isinstance(item, TensorType) or item.dtype not in ("f32", "bf16", "f16"):
            raise TypeRuleError(f"argument {position + 1} must be a float tensor", got=str(item))


def need_shape(item: Any, shape: Sequence[int | str], what: str, hint: str | None = None) -> None:
    if not isinstance(item, TensorType) or item.shape != tuple(shape):
        expected = f"[{', '.join(str(dim) for dim in shape)}]"
        raise TypeRuleError(f"{what} has the wrong shape", expected=expected, got=str(item), hint=hint)


def need_rank(item: Any, ranks: Sequence[int], what: str) -> None:
    if not isinstance(item, TensorType) or item.rank not in ranks:
        expected = " or ".join(f"{rank} axes" for rank in ranks)
        raise TypeRuleError(f"{what} has the wrong number of axes", expected=expected, got=str(item))


def need_ints(item: Any, ranks: Sequence[int], what: str, dtypes: Sequence[str] = ("i32",)) -> None:
    need_rank(item, ranks, what)
    if item.dtype not in dtypes:
        raise TypeRuleError(f"{what} must be {' or '.join(dtypes)}", got=str(item))


def random_tensors(types: Sequence[Any], generator: torch.Generator) -> list[torch.Tensor]:
    """Standard normal tensors of the given types."""
    return [torch.randn(item.shape, generator=generator).to(TORCH_DTYPES[item.dtype]) for item in types]
