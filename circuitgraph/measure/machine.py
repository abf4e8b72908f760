"""The machine: what it is, and how fast it reads memory."""

from __future__ import annotations

import os
import platform
import statistics
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from ..errors import CircuitgraphError, Fault

READ_BYTES = 512 << 20
"""Many times any cache, so that every pass comes from memory."""


def describe_machine() -> dict[str, Any]:
    """For reports: processor, cores, threads in use, last-level cache, versions."""
    return {
        "processor": _cpu_name(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "last_level_cache_bytes": last_level_cache(),
        "system": f"{platform.system()} {platform.machine()}",
        "versions": {name: package_version(name) for name in ("circuitgraph", "torch", "apache-tvm", "apache-tvm-ffi")}
        | {"python": platform.python_version()},
    }


def last_level_cache() -> int:
    """Bytes; 32 MiB where the system does not tell."""
    sizes = []
    for file in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size"):
        text = file.read_text().strip()
        unit = {"K": 1 << 10, "M": 1 << 20}.get(text[-1:], 1)
        sizes.append(int(text.rstrip("KM")) * unit)
    return max(sizes, default=32 << 20)


class ReadProbe:
    """The read ceiling: a sum over a buffer many times the cache, on torch's threads, its result checked each time."""

    def __init__(self, size: int = READ_BYTES):
        self.buffer = torch.ones(size // 8, dtype=torch.int64)
        self._rates: list[float] = []

    @property
    def rate(self) -> float:
        """Bytes per second, the median of all passes: what programs are compared with is a median, too."""
        return statistics.median(self._rates) if self._rates else 0.0

    def __call__(self) -> float:
        """Bytes per second of one pass.

        Raises:
            CircuitgraphError: the sum is wrong, so not everything was read.
        """
        started = time.perf_counter()
        total = int(self.buffer.sum())
        rate = self.buffer.nbytes / (time.perf_counter() - started)
        if total != self.buffer.numel():
            expected = str(self.buffer.numel())
            raise CircuitgraphError(Fault("the read probe did not read its buffer", expected=expected, got=str(total)))
        self._rates.append(rate)
        return rate


class CacheFlush:
    """Reads twice the last-level cache, so that the next call finds nothing of its weights there."""

    def __init__(self) -> None:
        self.buffer = torch.ones(2 * last_level_cache() // 8, dtype=torch.int64)

    def __call__(self) -> None:
        self.buffer.sum()


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or "unknown"
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())


def package_version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "absent"
