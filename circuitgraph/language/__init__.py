"""The circuit language: YAML files to circuits. docs/language.md is its manual."""

from __future__ import annotations

import tempfile
from pathlib import Path

from ..circuit.ir import Circuit
from ..places import find_program, shipped_programs
from .load import Program, load_program
from .resolve import Bindings, resolve, switch_space

__all__ = [
    "Bindings",
    "Program",
    "find_program",
    "load_program",
    "parse_circuit",
    "resolve",
    "shipped_programs",
    "switch_space",
]


def parse_circuit(text: str) -> Circuit:
    """Read back what `circuit.text.format_circuit` printed.

    Raises:
        ProgramError: as `load_program` and `resolve`.
    """
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "circuit.yaml"
        path.write_text(text, encoding="utf-8")
        return resolve(load_program(path))
