"""The GPUs that there are kernels for. Nothing here imports TVM: a target's name is checked before anything is built."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from ...errors import BuildError, Fault, did_you_mean
from ...plan.ir import Plan


@dataclass(frozen=True)
class Architecture:
    """What kernels may use and fill.

    processors: multiprocessors of the largest GPU of its kind; a smaller one runs the same grid, in turns. shared_bytes:
    shared memory of one block. overlap: programmatic launch. multiply: `mul` of two bf16 at once; `fma` they all have.
    """

    name: str
    processors: int
    shared_bytes: int
    overlap: bool
    multiply: bool

    @property
    def clusters(self) -> bool:
        """Blocks that see each other's shared memory: as old as programmatic launch."""
        return self.overlap

    @property
    def warpgroups(self) -> bool:
        """`wgmma`, which no other generation has."""
        return self.name == "sm_90a"

    @property
    def code(self) -> str:
        """As nvcc writes it after `compute_` and `sm_`."""
        return self.name.removeprefix("sm_")


ARCHITECTURES = {
    arch.name: arch
    for arch in (
        Architecture("sm_80", 108, 163 * 1024, False, False),
        Architecture("sm_89", 128, 99 * 1024, False, False),
        Architecture("sm_90a", 132, 227 * 1024, True, True),
        Architecture("sm_100", 148, 227 * 1024, True, True),
        Architecture("sm_120", 170, 99 * 1024, True, True),
    )
}
DEFAULT = "sm_90a"
"""What `cuda` alone means: the one that kernels were measured on."""

GROUPS, PROCESSORS = 8, 12
"""Groups of multiprocessors, and how many each has at least: an H200's 132 are 12 to 18 each. A cluster of blocks lies in one
group. What does not fit beside the others waits for them, and takes as long again: slow, never wrong."""

CLUSTERS_OF_HALVES = {8: 30, 4: 62, 3: 79, 2: 132}
"""How many clusters run at once on an H200, by blocks of each, two a multiprocessor (`cuOccupancyMaxActiveClusters`)."""


def at_once(clusters: int, blocks: int) -> bool:
    """Do so many clusters of so many blocks, each with a multiprocessor of its own, run at once?"""
    return blocks <= 2 or clusters <= GROUPS * (PROCESSORS // blocks)


def architecture(name: str) -> Architecture:
    """Raises BuildError for one that there are no kernels for."""
    if name not in ARCHITECTURES:
        raise BuildError(Fault(f"no target 'cuda:{name}'", hint=did_you_mean(name, ARCHITECTURES)))
    return ARCHITECTURES[name]


def architecture_of(plan: Plan) -> Architecture:
    """What the plan's kernels may use: its target is spelled `cuda:sm_90a`."""
    return architecture(plan.target.partition(":")[2] or DEFAULT)


Size = TypeVar("Size")


def fitting(plan: Plan, sizes: Sequence[Size], shared_bytes: Callable[[Size], int]) -> Size:
    """The first of `sizes` that the shared memory of the plan's architecture holds, or one that it does not.

    Schedules are written for DEFAULT. What is too large there is refused everywhere, so that all architectures run the
    same kernels, some with fewer stages.
    """
    if shared_bytes(sizes[0]) > ARCHITECTURES[DEFAULT].shared_bytes:
        return sizes[0]
    return next((size for size in sizes if shared_bytes(size) <= architecture_of(plan).shared_bytes), sizes[-1])
