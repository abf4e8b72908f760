"""What the device allows, measured in the same run as what is compared with it: bytes read a second, products a second."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from .gpu import MultiplyCeiling, ReadCeiling, take_turns


class Ceiling:
    """The read kernel as one of those that take turns, and the times of its passes over the whole run; beside it the rate of
    a large product, which was measured before: among the others it would warm the GPU up and slow them down."""

    NAME = "read"

    def __init__(self, kernel: ReadCeiling, multiply: MultiplyCeiling):
        self.kernel = kernel
        self.multiply = multiply
        self.seconds: list[float] = []

    def take_turns(self, calls: Mapping[str, Callable[[], object]], rounds: int) -> dict[str, float]:
        """Median microseconds of every call, with one pass of the read kernel in each round."""
        times = take_turns({self.NAME: self.kernel, **calls}, rounds)
        self.seconds += times.pop(self.NAME)
        self.kernel.check()
        return {name: 1e6 * statistics.median(values) for name, values in times.items()}

    @property
    def rate(self) -> float:
        """Bytes a second, the median pass: what it is compared with is a median, too."""
        return self.kernel.bytes / statistics.median(self.seconds)

    def to_json(self) -> dict[str, Any]:
        return {
            "gb_per_s": self.rate / 1e9,
            "best_gb_per_s": self.kernel.bytes / min(self.seconds) / 1e9,
            "passes": len(self.seconds),
            "bytes": self.kernel.bytes,
            "kernel": str(self.kernel.best),
            "tried_gb_per_s": {str(reading): rate / 1e9 for reading, rate in self.kernel.tried.items()},
            "tflop_per_s": self.multiply.rate / 1e12,
            "product": str(self.multiply),
        }

    def shares(self, rows: Sequence[Mapping[str, Any]]) -> tuple[dict[str, Any], ...]:
        """Rows with `of_read`, once all passes have run; those with `bytes`, `flops` and `step_us` also with `floor_us`, the
        longer of what reading and multiplying take at the ceilings, and `of_floor`, the share of the step that this is."""
        return tuple({**row, "of_read": row["gb_per_s"] * 1e9 / self.rate, **self._floor(row)} for row in rows)

    def _floor(self, row: Mapping[str, Any]) -> dict[str, float]:
        if "flops" not in row:
            return {}
        floor = 1e6 * max(row["bytes"] / self.rate, row["flops"] / self.multiply.rate)
        return {"floor_us": floor, "of_floor": floor / row["step_us"]}
