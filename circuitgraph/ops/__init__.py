"""The op table. `TABLE[name]` has everything there is to know about an op; see `base.Op`."""

from . import cache, linear, moe, rows
from .base import DTYPE_NAMES, TABLE, TORCH_DTYPES, Op, OpContext, Sample, TypeRuleError
from .cache import PagedKV

__all__ = [
    "DTYPE_NAMES",
    "TABLE",
    "TORCH_DTYPES",
    "Op",
    "OpContext",
    "PagedKV",
    "Sample",
    "TypeRuleError",
    "cache",
    "linear",
    "moe",
    "rows",
]
