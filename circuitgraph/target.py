"""Targets: what a plan is built for.

`cpu` is this machine, `cpu:portable` and `cpu:<mcpu>` are others; `cuda:sm_90a` is a GPU.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol

from .errors import BuildError, Fault, did_you_mean
from .kernels import register_kernels
from .plan.ir import Plan


@dataclass(frozen=True)
class Target:
    """`kind` names the schedule file and the backend; `arch` is the processor, empty for the build machine's own."""

    kind: str
    arch: str = ""

    def __str__(self) -> str:
        return f"{self.kind}:{self.arch}" if self.arch else self.kind


@dataclass(frozen=True)
class Built:
    """What building left: the library, and its generated texts by file ending (`ll`, `s`)."""

    library: Path
    texts: dict[str, str]


class Backend(Protocol):
    """One per target kind; found by `backend_of`."""

    def lower(self, plans: list[Plan]) -> Any:
        """Stage `lower`: one function per plan, as one TVM IRModule."""
        ...

    def build(self, module: Any, folder: Path) -> Built:
        """Stage `build`: the IRModule to one shared library in `folder`. Raises BuildError."""
        ...

    def script(self, module: Any, plan: Plan) -> str:
        """One plan's lowered function as text."""
        ...

    def description(self) -> dict[str, Any]:
        """What the manifest says of the target, and what loading compares with the machine."""
        ...


KINDS = ("cpu", "cuda")


def parse_target(text: str) -> Target:
    """'cpu', 'cpu:portable', 'cpu:<mcpu>', 'cuda' or 'cuda:sm_<number>'.

    Raises:
        BuildError: a kind that there is no backend for.
    """
    kind, _, arch = text.partition(":")
    if kind not in KINDS:
        raise BuildError(Fault(f"no target '{text}'", hint=did_you_mean(kind, KINDS)))
    return Target(kind, arch)


def backend_of(target: Target) -> Backend:
    """The backend; importing it imports TVM.

    Raises:
        BuildError: TVM is not installed, or does not know the processor.
    """
    register_kernels(target.kind)
    return import_module(f".kernels.{target.kind}.backend", __package__).make_backend(target)
