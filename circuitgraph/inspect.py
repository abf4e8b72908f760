"""Looking inside: the text of any stage of a program or artifact (`show`), and why a kernel was chosen (`explain`)."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .circuit.ir import Circuit
from .circuit.text import format_circuit
from .errors import ArtifactError, CircuitError, Fault, did_you_mean
from .pipeline import STAGES, Run, form_text, plan_piece
from .plan.ir import Plan
from .plan.schedule import load_schedule
from .target import backend_of, parse_target

# What building leaves, by the file endings that a target may have for it.
_GENERATED = {"build": ("ll", "cu"), "source": ("ll", "cu"), "llvm": ("ll",), "asm": ("s",), "ptx": ("ptx",), "sass": ("sass",)}
TEXT_STAGES = (*STAGES, "plan", *(stage for stage in _GENERATED if stage not in STAGES))
"""What `stage_text` prints. `plan` is what `place` leaves, `build` and `source` the generated code, `pack` the manifest."""


@dataclass(frozen=True)
class Explanation:
    """Why one group got its kernel."""

    group: str
    pattern: str
    nodes: tuple[str, ...]
    rule: str
    kernel: str
    params: Mapping[str, Any]
    refusals: tuple[tuple[str, str], ...]
    bytes: int
    flops: int


def stage_text(
    program: str | Path,
    *,
    family: str | None = None,
    entry: str = "draft",
    width: int = 1,
    stage: str = "plan",
    target: str = "cpu",
    model: str | Path | None = None,
    switches: Mapping[str, Any] | None = None,
    schedule_file: str | Path | None = None,
) -> str:
    """The text that `stage` leaves for one entry and width of a program, or of an artifact (folder or zip).

    A program without `model` takes the example config of `family` (by default the first family of that program).

    Raises:
        CircuitgraphError: of the stage that failed; unknown stages, entries and widths that an artifact lacks.
    """
    if stage not in TEXT_STAGES:
        raise CircuitError(Fault(f"no stage '{stage}'", hint=did_you_mean(stage, TEXT_STAGES)))
    if _is_artifact(program):
        return _artifact_text(Path(program), entry, width, stage)
    if stage == "load":
        return _program_text(program)
    if stage == "pack":
        raise CircuitError(Fault("a program has no manifest", subject=str(program), hint="Give the artifact instead."))
    circuit = program_circuit(program, family=family, model=model, switches=switches)
    if stage in ("resolve", "check"):
        return format_circuit(circuit)
    parsed = parse_target(target)
    run = Run()
    rules = load_schedule(parsed.kind, Path(schedule_file) if schedule_file else None)
    form = plan_piece(run, circuit, entry, width, parsed.kind, rules, stop_after=stage)
    if stage in run.seconds or stage == "plan":
        return str(form_text(form))
    assert isinstance(form, Plan)
    backend = backend_of(parsed)
    module = backend.lower([form])
    if stage == "lower":
        return backend.script(module, form)
    with tempfile.TemporaryDirectory() as folder:
        texts = backend.build(module, Path(folder)).texts
    for ending in _GENERATED[stage]:
        if ending in texts:
            return texts[ending]
    raise _no_such_text(stage, target)


def explain(
    program: str | Path,
    *,
    family: str | None = None,
    entry: str = "draft",
    width: int = 1,
    target: str = "cpu",
    model: str | Path | None = None,
    switches: Mapping[str, Any] | None = None,
    schedule_file: str | Path | None = None,
    context: int = 1024,
) -> list[Explanation]:
    """Chosen rule, parameters, refusals and cost (with `context` cache rows a sequence) per group.

    Raises:
        CircuitgraphError: the program does not load, or no rule accepts a group.
    """
    if _is_artifact(program):
        circuit = _manifest(Path(program)).circuit
    else:
        circuit = program_circuit(program, family=family, model=model, switches=switches)
    kind = parse_target(target).kind
    plan = plan_piece(Run(), circuit, entry, width, kind, load_schedule(kind, Path(schedule_file) if schedule_file else None))
    assert isinstance(plan, Plan)
    explanations = []
    for group, choice in zip(plan.groups, plan.choices, strict=True):
        cost = plan.cost(group, context)
        nodes = tuple(f"{node.name} = {node.op}" for node in group.nodes)
        explanations.append(
            Explanation(
                group.name,
                group.pattern,
                nodes,
                choice.rule,
                choice.kernel,
                dict(choice.params),
                choice.refusals,
                cost.bytes,
                cost.flops,
            )
        )
    return explanations


def program_circuit(program: str | Path, *, family=None, model=None, switches=None) -> Circuit:
    """The circuit of a program for a checkpoint's config, or for the family's example config."""
    from .checkpoint import load_circuit

    config = None
    if model is not None:
        path = Path(model)
        config = path / "config.json" if path.is_dir() else path
    return load_circuit(program, family=family, config=config, switches=switches)


def _program_text(program: str | Path) -> str:
    from .language import find_program, load_program

    loaded = load_program(program)
    files = [find_program(program)]
    parts = [path.read_text(encoding="utf-8") for path in files]
    for name, block in sorted(loaded.blocks.items()):
        parts.append(f"# block {name}, from {block.places.file}: {block.file.doc.strip()}\n")
    return "\n".join(parts)


def _is_artifact(program: str | Path) -> bool:
    path = Path(program)
    return (path / "manifest.json").is_file() or (path.is_file() and path.suffix in (".zip", ".cg"))


def _manifest(path: Path) -> Any:
    from .artifact.store import read_artifact

    return read_artifact(path, to_run=False).manifest


def _artifact_text(path: Path, entry: str, width: int, stage: str) -> str:
    from .artifact.store import read_artifact

    artifact = read_artifact(path, to_run=False)
    symbol = f"{entry}_{width}"
    if stage == "pack":
        return json.dumps(artifact.manifest.to_json(), indent=2) + "\n"
    if stage in ("load", "resolve", "check"):
        return format_circuit(artifact.manifest.circuit)
    if symbol not in artifact.manifest.functions:
        raise ArtifactError(
            Fault(f"has no program '{symbol}'", where=str(path), hint=did_you_mean(symbol, artifact.manifest.functions))
        )
    if stage in ("slice", "specialize"):
        from .circuit.narrow import slice_entry, specialize

        sliced = slice_entry(artifact.manifest.circuit, entry)
        return format_circuit(sliced if stage == "slice" else specialize(sliced, width))
    names = [f"src/kernels.{ending}" for ending in _GENERATED.get(stage, ())]
    if stage not in _GENERATED:
        names = [f"src/{symbol}.tir" if stage == "lower" else f"plans/{symbol}.txt"]
    for name in names:
        if name in artifact.manifest.files:
            return (artifact.folder / name).read_text(encoding="utf-8")
    raise _no_such_text(stage, artifact.manifest.target.kind)


def _no_such_text(stage: str, target: str) -> CircuitError:
    return CircuitError(Fault(f"target '{target}' leaves no {stage}", hint="`build` and `source` print what there is."))
