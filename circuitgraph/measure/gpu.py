"""A GPU as a measuring instrument: what it is, times of things that take turns on it, and how fast it reads memory."""

from __future__ import annotations

import platform
import statistics
import subprocess
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ..errors import ArtifactError, CircuitgraphError, Fault
from .machine import package_version
from .nvrtc import Kernel, compile_kernel

HEAD_START = 400_000
"""GPU cycles of idling (0.2 ms) before each timed call, in which the host puts it into the queue. Otherwise the host's
launch, which a server hides behind the target's own step, would be part of every time."""
READ_BYTES = 2 << 30
"""Many times any cache."""


def need_gpu(where: str = "bench") -> None:
    """Raises ArtifactError when there is no GPU to measure on."""
    if not torch.cuda.is_available():
        hint = "Run it on a machine with the GPU and a CUDA build of torch; artifacts for 'cpu' are measured anywhere."
        raise ArtifactError(Fault("there is no GPU here", where=where, got=f"torch {torch.__version__}", hint=hint))


def describe_gpu(tools: Mapping[str, str]) -> dict[str, Any]:
    """For reports. `tools`: what compiled the artifact, of its manifest."""
    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    return {
        "device": properties.name,
        "processors": properties.multi_processor_count,
        "capability": f"{properties.major}.{properties.minor}",
        "memory_bytes": properties.total_memory,
        "l2_bytes": getattr(properties, "L2_cache_size", None),
        "driver": _driver(),
        "system": f"{platform.system()} {platform.machine()}",
        "compiled_with": dict(tools),
        "versions": {name: package_version(name) for name in ("circuitgraph", "apache-tvm-ffi")}
        | {"torch": torch.__version__, "cuda": str(torch.version.cuda), "python": platform.python_version()},
    }


def _driver() -> str:
    try:
        command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        return subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout.split("\n")[0].strip()
    except (OSError, subprocess.SubprocessError):
        file = Path("/proc/driver/nvidia/version")
        return file.read_text().splitlines()[0] if file.exists() else "unknown"


def record(call: Callable[[], object]) -> Callable[[], object]:
    """A replay of `call` as a CUDA graph, recorded after two ordinary calls."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):
            call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        made = call()
    graph.replay()
    torch.cuda.synchronize()

    def replay(_kept: object = (call, made)) -> None:  # the graph reads and writes their memory
        graph.replay()

    return replay


def take_turns(calls: Mapping[str, Callable[[], object]], rounds: int) -> dict[str, list[float]]:
    """GPU seconds of every call, one after the other in each round: all of them meet the same clocks and neighbours."""
    for call in calls.values():
        call()
        call()
    torch.cuda.synchronize()
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds):
        events = {}
        for name, call in calls.items():
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            torch.cuda._sleep(HEAD_START)
            start.record()
            call()
            end.record()
            events[name] = (start, end)
        torch.cuda.synchronize()
        for name, (start, end) in events.items():
            times[name].append(start.elapsed_time(end) * 1e-3)
    return times


def medians(times: Mapping[str, list[float]]) -> dict[str, float]:
    return {name: statistics.median(values) for name, values in times.items()}


SOURCE = r"""
struct Words { unsigned x, y, z, w; };

__device__ __forceinline__ Words read(const Words* at, unsigned long long policy) {
  Words v;
#if ONCE
  asm volatile("ld.global.nc.L1::no_allocate.L2::cache_hint.L2::128B.v4.u32 {%0, %1, %2, %3}, [%4], %5;"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(at), "l"(policy));
#else
  asm volatile("ld.global.nc.L1::no_allocate.L2::128B.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(at));
#endif
  return v;
}

// Sums all words. Every thread has UNROLL loads of 16 bytes in flight. Tiles of a block lie `stride` apart.
extern "C" __global__ void __launch_bounds__(THREADS) read_all(
    const Words* data, unsigned* total, unsigned long long tiles, unsigned long long block_step, unsigned long long stride) {
  const Words* at = data + blockIdx.x * block_step + threadIdx.x;
  unsigned long long policy;
  asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  unsigned sum = 0;
  for (unsigned long long tile = 0; tile < tiles; ++tile, at += stride) {
    Words v[UNROLL];
#pragma unroll
    for (int i = 0; i < UNROLL; ++i) v[i] = read(at + i * THREADS, policy);
#pragma unroll
    for (int i = 0; i < UNROLL; ++i) sum += v[i].x + v[i].y + v[i].z + v[i].w;
  }
  for (int step = 16; step; step >>= 1) sum += __shfl_xor_sync(0xffffffffu, sum, step);
  if (threadIdx.x % 32 == 0) atomicAdd(total, sum);
}
"""


@dataclass(frozen=True)
class Reading:
    """One way to read: blocks of `threads` with `unroll` loads each in flight, `blocks` of them on every processor.

    spread: all blocks walk through memory side by side; otherwise each has a stretch of its own. once: what is read leaves L2
    first, as the kernels' weights do.
    """

    threads: int
    unroll: int
    blocks: int
    spread: bool
    once: bool

    def __str__(self) -> str:
        walk = "side by side" if self.spread else "a stretch each"
        walk += ", leaving L2 first" if self.once else ""
        return f"{self.threads} threads, {self.unroll} loads, {self.blocks} blocks a processor, {walk}"


READINGS = tuple(
    Reading(*shape, spread, once)
    for shape in ((256, 4, 8), (256, 8, 4), (256, 8, 8), (512, 4, 4), (512, 8, 2), (512, 8, 4), (1024, 4, 2), (1024, 8, 1))
    for spread in (True, False)
    for once in (True, False)
)


class ReadCeiling:
    """The fastest of several kernels that read a buffer many times the cache and sum it; every sum is checked.

    Call it for one pass of the fastest; `check` after the passes have run.
    """

    def __init__(self, size: int = READ_BYTES, rounds: int = 9):
        properties = torch.cuda.get_device_properties(torch.cuda.current_device())
        self.processors = properties.multi_processor_count
        self.arch = f"sm_{properties.major}{properties.minor}"
        self.buffer = torch.randint(-(1 << 31), (1 << 31) - 1, (size // 4,), dtype=torch.int32, device="cuda")
        self.total = torch.zeros(1, dtype=torch.int32, device="cuda")
        self.kernels: dict[tuple[int, int, bool], Kernel] = {}
        self._sums: dict[int, int] = {}
        self._passes: Counter[int] = Counter()
        self.tried = {reading: self._rate(reading, rounds) for reading in READINGS}
        self.best = max(self.tried, key=self.tried.__getitem__)

    def __call__(self) -> None:
        self._launch(self.best)

    @property
    def bytes(self) -> int:
        """Of one pass."""
        return self._words(self.best) * 4

    def check(self) -> None:
        """Raises CircuitgraphError when a pass so far did not read everything."""
        self._check(str(self.best))

    def _rate(self, reading: Reading, rounds: int) -> float:
        times = take_turns({"read": lambda: self._launch(reading)}, rounds)["read"]
        self._check(str(reading))
        return self._words(reading) * 4 / statistics.median(times)

    def _words(self, reading: Reading) -> int:
        """What one pass reads: as many whole tiles a block as the buffer has for all of them."""
        wave = reading.threads * reading.unroll * 4 * reading.blocks * self.processors
        return self.buffer.numel() // wave * wave

    def _launch(self, reading: Reading) -> None:
        key = (reading.threads, reading.unroll, reading.once)
        if key not in self.kernels:
            defines = (f"THREADS={reading.threads}", f"UNROLL={reading.unroll}", f"ONCE={int(reading.once)}")
            self.kernels[key] = Kernel(compile_kernel(SOURCE, "read_all", arch=self.arch, defines=defines), "read_all")
        grid, tile = reading.blocks * self.processors, reading.threads * reading.unroll
        tiles = self._words(reading) // 4 // (grid * tile)
        block_step, stride = (tile, grid * tile) if reading.spread else (tiles * tile, tile)
        self._passes[self._words(reading)] += 1  # zeroing the total would take time of its own
        self.kernels[key](grid, reading.threads, self.buffer, self.total, tiles, block_step, stride)

    def _check(self, subject: str) -> None:
        """All passes so far have added up to what torch says, modulo 2^32."""
        expected = sum(count * self._sum(words) for words, count in self._passes.items()) & 0xFFFFFFFF
        got = int(self.total) & 0xFFFFFFFF
        if got != expected:
            fault = Fault("the read kernel did not read its buffer", subject=subject, expected=str(expected), got=str(got))
            raise CircuitgraphError(fault)

    def _sum(self, words: int) -> int:
        if words not in self._sums:
            self._sums[words] = sum(int(part.sum(dtype=torch.int64)) for part in self.buffer[:words].split(1 << 26))
        return self._sums[words]


class MultiplyCeiling:
    """How fast torch multiplies large bf16 matrices: `rate` operations a second, the median of `rounds` products."""

    def __init__(self, size: int = 8192, rounds: int = 9):
        self.size = size
        left, right = (torch.randn(size, size, device="cuda").to(torch.bfloat16) for _ in range(2))
        made = torch.empty_like(left)
        times = take_turns({"multiply": lambda: torch.mm(left, right, out=made)}, rounds)["multiply"]
        self.rate = 2 * size**3 / statistics.median(times)

    def __str__(self) -> str:
        return f"torch's product of two bf16 matrices of {self.size} x {self.size}"
