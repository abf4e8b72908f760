"""Types of circuit values. A dimension is a number, or the name of an axis that is not fixed yet."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

Dim: TypeAlias = int | str

ROWS = "n"
"""The row axis: one row a sequence in `draft`, one row a context token in `context`."""

DTYPE_BITS = {"f32": 32, "bf16": 16, "f16": 16, "i32": 32, "i64": 64, "u8": 8}
FLOAT_DTYPES = ("f32", "bf16", "f16")


@dataclass(frozen=True)
class TensorType:
    """A dense row-major tensor."""

    dtype: str
    shape: tuple[Dim, ...]

    def __str__(self) -> str:
        return f"{self.dtype}[{', '.join(str(dim) for dim in self.shape)}]"

    @property
    def rank(self) -> int:
        return len(self.shape)

    def elements(self) -> int:
        """Number of elements; every dimension must be a number by now."""
        count = 1
        for dim in self.shape:
            if not isinstance(dim, int):
                raise ValueError(f"{self} still has the open axis '{dim}'")
            count *= dim
        return count

    def bytes(self) -> int:
        return self.elements() * DTYPE_BITS[self.dtype] // 8

    def with_rows(self, rows: int) -> TensorType:
        """The same type with the row axis fixed to `rows`."""
        return TensorType(self.dtype, tuple(rows if dim == ROWS else dim for dim in self.shape))


@dataclass(frozen=True)
class StateType:
    """A version of a state (a KV cache). Appending makes a new version; the storage is one."""

    state: str

    def __str__(self) -> str:
        return f"state[{self.state}]"


ValueType: TypeAlias = TensorType | StateType
