"""circuitgraph: drafters of speculative decoding, compiled ahead of time and run inside LLM servers.

    circuitgraph.compile("auto", model="drafter/", target_model="target/", out="drafter.cg")
    runner = circuitgraph.load("drafter.cg", model="drafter/", target_model="target/")

Names are imported when they are first used: a serving box has torch and tvm_ffi only, and a command line that prints
a program should not wait for a compiler.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .checkpoint import bind, load_circuit, open_checkpoint
    from .circuit.ir import Circuit
    from .errors import (
        ArtifactError,
        BuildError,
        CheckpointError,
        CircuitError,
        CircuitgraphError,
        ProgramError,
        RuntimeUseError,
        ScheduleError,
    )
    from .inspect import explain, stage_text
    from .interpreter import interpret
    from .language import load_program, parse_circuit, resolve, shipped_programs
    from .measure.bench import BenchReport, bench
    from .measure.verify import VerifyReport, verify
    from .pipeline import CompileResult, compile
    from .runtime import load

__version__ = "0.1.0"

_HOMES = {
    "measure.bench": ("BenchReport", "bench"),
    "checkpoint": ("bind", "load_circuit", "open_checkpoint"),
    "circuit.ir": ("Circuit",),
    "errors": (
        "ArtifactError",
        "BuildError",
        "CheckpointError",
        "CircuitError",
        "CircuitgraphError",
        "ProgramError",
        "RuntimeUseError",
        "ScheduleError",
    ),
    "inspect": ("explain", "stage_text"),
    "interpreter": ("interpret",),
    "language": ("load_program", "parse_circuit", "resolve", "shipped_programs"),
    "pipeline": ("CompileResult", "compile"),
    "runtime": ("load",),
    "measure.verify": ("VerifyReport", "verify"),
}
_HOME_OF = {name: module for module, names in _HOMES.items() for name in names}

__all__ = [
    "ArtifactError",
    "BenchReport",
    "BuildError",
    "CheckpointError",
    "Circuit",
    "CircuitError",
    "CircuitgraphError",
    "CompileResult",
    "ProgramError",
    "RuntimeUseError",
    "ScheduleError",
    "VerifyReport",
    "bench",
    "bind",
    "compile",
    "explain",
    "interpret",
    "load",
    "load_circuit",
    "load_program",
    "open_checkpoint",
    "parse_circuit",
    "resolve",
    "shipped_programs",
    "stage_text",
    "verify",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME_OF:
        raise AttributeError(f"module '{__name__}' has no attribute '{name}'")
    return getattr(import_module(f".{_HOME_OF[name]}", __name__), name)
