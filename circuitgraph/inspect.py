"""Looking inside: the text of any stage of a program or artifact (`show`), and why a kernel was chosen (`explain`)."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .circuit.ir import Circuit
from .circuit.text import format_circuit
from .errors import ArtifactError, CircuitError, Fault, did_you_mean
from .pipeline import STAGES, Run, form_text, own_types, plan_piece
from .places import find_program, is_artifact
from .plan.ir import Plan
from .plan.schedule import load_schedule
from .plan.text import plan_records
from .target import backend_of, parse_target

if TYPE_CHECKING:
    from .artifact.store import Artifact

# What building leaves, by the file endings that a target may have for it.
_GENERATED = {"build": ("ll", "cu"), "source": ("ll", "cu"), "llvm": ("ll",), "asm": ("s",)}
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
    `cpu` without `target`. An artifact has decided all that: it takes `entry`, `width` and `stage` alone, and one for
    several architectures `target`, which names one of them. width: sequences, of a context entry rows.

    Raises:
        CircuitgraphError: of the stage that failed; unknown stages, entries and widths that an artifact lacks.
    """
    if stage not in TEXT_STAGES:
        raise CircuitError(Fault(f"no stage '{stage}'", hint=did_you_mean(stage, TEXT_STAGES)))
    if is_artifact(program):
        _refuse_decided(program, family=family, model=model, switches=switches, schedule_file=schedule_file)
        return _artifact_text(_open_artifact(Path(program), target), entry, width, stage)
    if stage == "load":
        return _program_text(program)
    if stage == "pack":
        raise CircuitError(Fault("a program has no manifest", subject=str(program), hint="Give the artifact instead."))
    run = Run()
    parsed = parse_target(target or "cpu")
    options: dict[str, Any] = {"family": family, "model": model, "switches": switches, "kind": parsed.kind}
    circuit = run("resolve", str(program), lambda: program_circuit(program, **options))
    run("check", circuit.name, lambda: circuit)
    if stage in ("resolve", "check"):
        return format_circuit(circuit)
    rules = load_schedule(parsed.kind, Path(schedule_file) if schedule_file else None)
    form = plan_piece(run, circuit, entry, _rows(circuit, entry, width), parsed.of_plans, rules, stop_after=stage)
    if stage in run.seconds or stage == "plan":
        return str(form_text(form))
    assert isinstance(form, Plan)
    backend = backend_of(parsed)
    module = backend.lower([form])
    if stage == "lower":
        return backend.script(module, form)
    with tempfile.TemporaryDirectory() as folder:
        texts = backend.build(module, Path(folder)).texts
    return _generated(texts, stage, form.symbol, str(parsed))


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
    if is_artifact(program):
        _refuse_decided(program, family=family, model=model, switches=switches, schedule_file=schedule_file)
        records = _artifact_records(_open_artifact(Path(program), target), entry, width)
    else:
        run = Run()
        parsed = parse_target(target or "cpu")
        options: dict[str, Any] = {"family": family, "model": model, "switches": switches, "kind": parsed.kind}
        circuit = run("resolve", str(program), lambda: program_circuit(program, **options))
        rules = load_schedule(parsed.kind, Path(schedule_file) if schedule_file else None)
        plan = plan_piece(run, circuit, entry, _rows(circuit, entry, width), parsed.of_plans, rules)
        assert isinstance(plan, Plan)
        records = plan_records(plan)
    return [_explanation(record, context) for record in records]


def _explanation(record: Mapping[str, Any], context: int) -> Explanation:
    rows = min(context, record.get("most_rows", context))
    return Explanation(
        group=record["group"],
        pattern=record["pattern"],
        nodes=tuple(record["nodes"]),
        rule=record["rule"],
        kernel=record["kernel"],
        params=record["params"],
        refusals=tuple((rule, reason) for rule, reason in record["refusals"]),
        bytes=record["bytes"] + rows * record["bytes_per_row"],
        flops=record["flops"] + rows * record["flops_per_row"],
    )


def program_circuit(program: str | Path, *, family=None, model=None, switches=None, kind: str = "cpu") -> Circuit:
    """The circuit of a program for a checkpoint's config, or for the family's example config, in the types that `compile`
    takes for the target kind when weights are bf16."""
    from .checkpoint import load_circuit

    config = None
    if model is not None:
        path = Path(model)
        config = path / "config.json" if path.is_dir() else path
    act, kv = (dtype or "bf16" for dtype in own_types(kind, None, None))
    return load_circuit(program, family=family, config=config, switches=switches, act=act, kv=kv)


def _program_text(program: str | Path) -> str:
    from .language import load_program

    loaded = load_program(program)
    parts = [find_program(program).read_text(encoding="utf-8")]
    for name, block in sorted(loaded.blocks.items()):
        parts.append(f"# block {name}, from {block.places.file}: {block.file.doc.strip()}\n")
    return "\n".join(parts)


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


def _open_artifact(path: Path, target: str | None) -> Artifact:
    """With the code for `target` in front, where it was compiled for several."""
    from .artifact.store import read_artifact

    artifact = read_artifact(path, to_run=False)
    if target is None:
        return artifact
    manifest = artifact.manifest
    if not manifest.others:
        _refuse_decided(path, target=target)
    chosen = parse_target(target).arch
    if chosen not in manifest.builds:
        raise ArtifactError(
            Fault("was not compiled for that", where=str(path), subject="target", expected=", ".join(manifest.builds), got=target)
        )
    return replace(artifact, manifest=manifest.of(chosen))


def _rows(circuit: Circuit, entry: str, width: int) -> int:
    """Of a program for so many sequences, of which each has a block in some entries."""
    return width * circuit.block_of(entry) if entry in {item.name for item in circuit.entries} else width


def _symbol(artifact: Artifact, entry: str, width: int) -> str:
    functions = artifact.manifest.functions
    symbol = f"{entry}_{_rows(artifact.manifest.circuit, entry, width)}"
    if symbol not in functions:
        raise ArtifactError(Fault(f"has no program '{symbol}'", where=str(artifact.origin), hint=did_you_mean(symbol, functions)))
    return symbol


def _artifact_records(artifact: Artifact, entry: str, width: int) -> list[dict[str, Any]]:
    file = f"plans/{artifact.manifest.folder}{_symbol(artifact, entry, width)}.json"
    if file not in artifact.manifest.files:
        where = str(artifact.origin)
        raise ArtifactError(Fault("does not say how its kernels were chosen", where=where, hint="Compile it again."))
    return json.loads((artifact.folder / file).read_text(encoding="utf-8"))


def _artifact_text(artifact: Artifact, entry: str, width: int, stage: str) -> str:
    manifest = artifact.manifest
    if stage in ("load", "resolve", "check", "pack"):
        return json.dumps(manifest.to_json(), indent=2) + "\n" if stage == "pack" else format_circuit(manifest.circuit)
    symbol = _symbol(artifact, entry, width)
    if stage in ("slice", "specialize"):
        from .circuit.narrow import slice_entry, specialize

        sliced = slice_entry(manifest.circuit, entry)
        return format_circuit(sliced if stage == "slice" else specialize(sliced, _rows(manifest.circuit, entry, width)))
    if stage in _GENERATED:
        start = f"src/{manifest.folder}kernels."
        files = [name for name in manifest.files if name.startswith(start)]
        texts = {name.removeprefix(start): (artifact.folder / name).read_text(encoding="utf-8") for name in files}
        return _generated(texts, stage, symbol, manifest.target.kind)
    name = f"src/{manifest.folder}{symbol}.tir" if stage == "lower" else f"plans/{manifest.folder}{symbol}.txt"
    if name not in manifest.files:
        raise _no_such_text(stage, manifest.target.kind)
    return (artifact.folder / name).read_text(encoding="utf-8")


def _generated(texts: Mapping[str, str], stage: str, symbol: str, target: str) -> str:
    """Of `Built.texts`, the one that shows `stage` of a program."""
    for ending in _GENERATED[stage]:
        found = [text for name, text in texts.items() if f".{name}".endswith(f".{ending}")]
        # Code that was cut into units: the one that defines the program's function.
        found = [text for text in found if len(found) == 1 or f"__tvm_ffi_{symbol}(" in text]
        if found:
            return found[0]
    raise _no_such_text(stage, target)


def _no_such_text(stage: str, target: str) -> CircuitError:
    return CircuitError(Fault(f"target '{target}' leaves no {stage}", hint="`build` and `source` print what there is."))
