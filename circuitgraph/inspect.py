"""Looking inside: the text of any stage of a program or artifact (`show`), and why a kernel was chosen (`explain`)."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .circuit.ir import Circuit
from .circuit.text import format_circuit
from .errors import ArtifactError, CircuitError, Fault, did_you_mean
from .pipeline import STAGES, Run, form_text, plan_piece
from .plan.ir import Plan
from .plan.schedule import load_schedule
from .plan.text import plan_records
from .target import backend_of, parse_target

if TYPE_CHECKING:
    from .artifact.store import Artifact

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
    target: str | None = None,
    model: str | Path | None = None,
    switches: Mapping[str, Any] | None = None,
    schedule_file: str | Path | None = None,
) -> str:
    """The text that `stage` leaves for one entry and width of a program, or of an artifact (folder or zip).

    A program without `model` takes the example config of `family` (by default the first family of that program), and
    `cpu` without `target`. An artifact has decided all that: it takes `entry`, `width` and `stage` alone.

    Raises:
        CircuitgraphError: of the stage that failed; unknown stages, entries and widths that an artifact lacks.
    """
    if stage not in TEXT_STAGES:
        raise CircuitError(Fault(f"no stage '{stage}'", hint=did_you_mean(stage, TEXT_STAGES)))
    if _is_artifact(program):
        _refuse_decided(program, family=family, target=target, model=model, switches=switches, schedule_file=schedule_file)
        return _artifact_text(Path(program), entry, width, stage)
    if stage == "load":
        return _program_text(program)
    if stage == "pack":
        raise CircuitError(Fault("a program has no manifest", subject=str(program), hint="Give the artifact instead."))
    run = Run()
    circuit = run("resolve", str(program), lambda: program_circuit(program, family=family, model=model, switches=switches))
    run("check", circuit.name, lambda: circuit)
    if stage in ("resolve", "check"):
        return format_circuit(circuit)
    parsed = parse_target(target or "cpu")
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
    raise _no_such_text(stage, str(parsed))


def explain(
    program: str | Path,
    *,
    family: str | None = None,
    entry: str = "draft",
    width: int = 1,
    target: str | None = None,
    model: str | Path | None = None,
    switches: Mapping[str, Any] | None = None,
    schedule_file: str | Path | None = None,
    context: int = 1024,
) -> list[Explanation]:
    """Chosen rule, parameters, refusals and cost (with `context` cache rows a sequence) per group.

    Of an artifact it tells what was decided when that was compiled; the other arguments are as in `stage_text`.

    Raises:
        CircuitgraphError: the program does not load, no rule accepts a group, or the artifact has no such entry and width.
    """
    if _is_artifact(program):
        _refuse_decided(program, family=family, target=target, model=model, switches=switches, schedule_file=schedule_file)
        records = _artifact_records(Path(program), entry, width)
    else:
        run = Run()
        circuit = run("resolve", str(program), lambda: program_circuit(program, family=family, model=model, switches=switches))
        kind = parse_target(target or "cpu").kind
        rules = load_schedule(kind, Path(schedule_file) if schedule_file else None)
        plan = plan_piece(run, circuit, entry, width, kind, rules)
        assert isinstance(plan, Plan)
        records = plan_records(plan)
    return [_explanation(record, context) for record in records]


def _explanation(record: Mapping[str, Any], context: int) -> Explanation:
    return Explanation(
        group=record["group"],
        pattern=record["pattern"],
        nodes=tuple(record["nodes"]),
        rule=record["rule"],
        kernel=record["kernel"],
        params=record["params"],
        refusals=tuple((rule, reason) for rule, reason in record["refusals"]),
        bytes=record["bytes"] + context * record["bytes_per_row"],
        flops=record["flops"] + context * record["flops_per_row"],
    )


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
    parts = [find_program(program).read_text(encoding="utf-8")]
    for name, block in sorted(loaded.blocks.items()):
        parts.append(f"# block {name}, from {block.places.file}: {block.file.doc.strip()}\n")
    return "\n".join(parts)


def _is_artifact(program: str | Path) -> bool:
    path = Path(program)
    return (path / "manifest.json").is_file() or (path.is_file() and path.suffix in (".zip", ".cg"))


def _refuse_decided(program: str | Path, **options: Any) -> None:
    """An artifact's program, checkpoint, target and schedule were decided when it was compiled."""
    faults = [
        Fault(
            "was decided when the artifact was compiled", where=str(program), subject=name, hint="Leave it out, or compile again."
        )
        for name, value in options.items()
        if value
    ]
    if faults:
        raise ArtifactError(faults)


def _open_symbol(path: Path, entry: str, width: int) -> tuple[Artifact, str]:
    from .artifact.store import read_artifact

    artifact, symbol = read_artifact(path, to_run=False), f"{entry}_{width}"
    functions = artifact.manifest.functions
    if symbol not in functions:
        raise ArtifactError(Fault(f"has no program '{symbol}'", where=str(path), hint=did_you_mean(symbol, functions)))
    return artifact, symbol


def _artifact_records(path: Path, entry: str, width: int) -> list[dict[str, Any]]:
    artifact, symbol = _open_symbol(path, entry, width)
    file = f"plans/{symbol}.json"
    if file not in artifact.manifest.files:
        raise ArtifactError(Fault("does not say how its kernels were chosen", where=str(path), hint="Compile it again."))
    return json.loads((artifact.folder / file).read_text(encoding="utf-8"))


def _artifact_text(path: Path, entry: str, width: int, stage: str) -> str:
    from .artifact.store import read_artifact

    if stage in ("load", "resolve", "check", "pack"):
        manifest = read_artifact(path, to_run=False).manifest
        return json.dumps(manifest.to_json(), indent=2) + "\n" if stage == "pack" else format_circuit(manifest.circuit)
    artifact, symbol = _open_symbol(path, entry, width)
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
