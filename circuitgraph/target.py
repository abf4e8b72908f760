"""Targets: what a plan is built for.

`cpu` is this machine, `cpu:portable` and `cpu:<mcpu>` are others; `cuda:sm_90a` is a GPU, `cuda:sm_80,sm_90a` are two.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol

from .errors import BuildError, Fault, did_you_mean
from .kernels import register_kernels
from .kernels.cuda.architectures import ARCHITECTURES, DEFAULT
from .plan.ir import Plan


@dataclass(frozen=True)
class Target:
    """`kind` names the schedule file and the backend; `arch` is the processor, empty for the build machine's own."""

    kind: str
    arch: str = ""

    def __str__(self) -> str:
        return f"{self.kind}:{self.arch}" if self.arch else self.kind

    @property
    def of_plans(self) -> str:
        """What plans are made for: on CPUs for all processors, on GPUs for one architecture."""
        return self.kind if self.kind == "cpu" else str(self)


@dataclass(frozen=True)
class Built:
    """What building left: the library, and its generated texts by file ending (`ll`, `s`, or `0.cu`, `1.cu` of two)."""

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


def parse_targets(text: str) -> tuple[Target, ...]:
    """'cpu', 'cpu:portable', 'cpu:<mcpu>', 'cuda', or 'cuda:' and architectures: all that one artifact is built for.

    Raises:
        BuildError: a kind that there is no backend for; an architecture without kernels, or one named twice.
    """
    kind, _, rest = text.partition(":")
    if kind not in KINDS:
        raise BuildError(Fault(f"no target '{text}'", hint=did_you_mean(kind, KINDS)))
    if kind == "cpu":
        return (Target(kind, rest),)
    names = [name.strip() for name in rest.split(",")] if ":" in text else [DEFAULT]
    faults = []
    for index, name in enumerate(names):
        if not name:
            hint = f"Name architectures between the commas, or none: 'cuda' is 'cuda:{DEFAULT}'."
            faults.append(Fault("an architecture is missing", where=f"target '{text}'", hint=hint))
        elif name not in ARCHITECTURES:
            hint = did_you_mean(name, ARCHITECTURES)
            faults.append(Fault(f"no target 'cuda:{name}'", where=f"target '{text}'", hint=hint))
        elif name in names[:index]:
            faults.append(Fault(f"'{name}' is there twice", where=f"target '{text}'", hint="Name every architecture once."))
    if faults:
        raise BuildError(faults)
    return tuple(Target(kind, name) for name in names)


def parse_target(text: str) -> Target:
    """One of `parse_targets`, where several make no sense.

    Raises:
        BuildError: as there, and for several architectures.
    """
    first, *others = parse_targets(text)
    if others:
        raise BuildError(Fault("one architecture at a time", where=f"target '{text}'", hint=f"For example '{first}'."))
    return first


def backend_of(target: Target) -> Backend:
    """The backend; importing it imports TVM.

    Raises:
        BuildError: TVM is not installed, or does not know the processor.
    """
    register_kernels(target.kind)
    return import_module(f".kernels.{target.kind}.backend", __package__).make_backend(target)
