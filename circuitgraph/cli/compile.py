"""`circuitgraph compile`: a program and a checkpoint to an artifact."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from ..places import check_model, check_schedule, check_target, find_program
from .common import notes, out, parse_formats, parse_switches, parse_widths, print_json
from .options import AsJson, Family, FloatType, Model, PipelineStage, Program, ScheduleFile, Switches, Target, TargetModel
from .progress import CompileProgress, bar


def compile_(
    program: Program,
    model: Model = None,
    output: Annotated[
        Path | None, typer.Option("-o", "--out", metavar="OUT", help="The artifact folder to make; it must not exist.")
    ] = None,
    target: Target = "cpu",
    widths: Annotated[
        str, typer.Option("--widths", metavar="1-4,8", help="Numbers of sequences to compile for; 1 is always added.")
    ] = "1-4,8",
    context_rows: Annotated[
        str, typer.Option("--context-rows", metavar="4,16,64", help="Chunk sizes of the programs that read prompts.")
    ] = "4,16,64",
    extra: Annotated[
        list[str] | None,
        typer.Option("--with", metavar="ENTRY", help="Also compile an entry on request: draft_masked for grammars; repeatable."),
    ] = None,
    family: Family = None,
    target_model: TargetModel = None,
    switches: Switches = None,
    act: Annotated[
        FloatType | None, typer.Option("--act", help="Type of activations; left out, f32 on CPUs, on GPUs the checkpoint's.")
    ] = None,
    kv: Annotated[
        FloatType | None, typer.Option("--kv", help="Type of the drafter's KV cache; left out, f32 on CPUs, on GPUs as --act.")
    ] = None,
    wt: Annotated[
        FloatType | None, typer.Option("--wt", help="Convert weights to this type; left out, each keeps its own.")
    ] = None,
    quantize: Annotated[
        list[str] | None,
        typer.Option(
            "--quantize",
            metavar="NAME=FORMAT",
            help="Quantise a weight, or all that a pattern fits, in a copy in the artifact: fp8, fp8-block, int8, nvfp4, mxfp4; "
            "repeatable.",
        ),
    ] = None,
    dequantise: Annotated[
        bool, typer.Option("--dequantise", help="Weights that the checkpoint has quantised become floats when they are loaded.")
    ] = False,
    draft_vocab: Annotated[
        str | None,
        typer.Option(
            "--draft-vocab", metavar="N|FILE", help="The head scores the first N tokens alone, or those whose ids FILE lists."
        ),
    ] = None,
    portable: Annotated[
        bool, typer.Option("--portable", help="For any processor of this architecture instead of this machine's own.")
    ] = False,
    schedule: ScheduleFile = None,
    stop_after: Annotated[
        PipelineStage | None, typer.Option("--stop-after", metavar="STAGE", help="End after this stage and write nothing.")
    ] = None,
    dump: Annotated[
        Path | None, typer.Option("--dump", metavar="DIR", help="Also write the text of every stage's result there.")
    ] = None,
    tensors: Annotated[
        bool, typer.Option("--tensors", help="Also print what every tensor of the checkpoint is used for, and why.")
    ] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace OUT if it is an artifact.")] = False,
    as_json: AsJson = False,
) -> None:
    """Compile a drafter program for a checkpoint. Each width gets an exact program of its own.

    A drafter that is stored without embedding and lm_head borrows the target's: name its folder, or hand the
    tensors over when loading. Nothing is written unless everything worked.

    \b
    circuitgraph compile auto --model drafter/ --target-model llm/ -o drafter.cg
    circuitgraph compile auto --model drafter/ --target-model llm/ --quantize lm_head=fp8 -o small.cg
    circuitgraph compile mtp_dense --model config.json --widths 1-4,8 -o r.cg
    circuitgraph compile mtp_dense --model drafter/ --stop-after place
    circuitgraph compile auto --model drafter/ --stop-after resolve --tensors
    """
    if model is None:
        raise typer.BadParameter("say which checkpoint (or config.json) to compile for", param_hint="'--model'")
    if output is None and (stop_after is None or stop_after == "pack"):
        raise typer.BadParameter("say where the artifact goes", param_hint="'-o'")
    if portable and target != "cpu":
        raise typer.BadParameter(f"goes with --target cpu, not with '{target}'", param_hint="'--portable'")
    rows, chunks = parse_widths(widths), parse_widths(context_rows, "'--context-rows'")
    chosen, formats = parse_switches(switches or []), parse_formats(quantize or [])

    if program != "auto":
        find_program(program)
    check_model(model)
    check_target(target_model)
    check_schedule(schedule)
    from ..checkpoint.report import format_report
    from ..measure.weights import gguf_file
    from ..pipeline import compile, work_list
    from ..target import parse_targets

    targets = parse_targets(target)
    if target_model is not None and gguf_file(target_model):
        # Nothing of a GGUF target can be mapped: what the drafter borrows is converted when it is loaded.
        notes().print(f"what the drafter borrows comes from {target_model.name} when the artifact is loaded")
        target_model = None
    with bar("compile") as report:
        result = compile(
            program,
            model=model,
            out=output or Path("unused"),
            target="cpu:portable" if portable else target,
            widths=rows,
            context_rows=chunks,
            also=extra or (),
            family=family,
            target_model=target_model,
            switches=chosen,
            act=act,
            kv=kv,
            wt=wt,
            schedule_file=schedule,
            quantize=formats,
            dequantise=dequantise,
            draft_vocab=draft_vocab,
            overwrite=overwrite,
            dump=dump,
            stop_after=stop_after,
            observer=CompileProgress(
                report, lambda circuit: len(work_list(circuit, None, rows, chunks, extra or ())), len(targets)
            ),
        )
    if as_json:
        print_json(_record(result))
        return
    if tensors:
        out().print(format_report(result.report), end="", soft_wrap=True, markup=False, highlight=False)
    seconds = sum(result.seconds.values())
    programs = ", ".join(dict.fromkeys(plan.symbol for plan in result.plans))
    notes().print(f"{result.circuit.name}: {len(result.plans)} programs in {seconds:.1f} s ({programs})")
    _say_bytes(result)
    if result.path is None:
        notes().print("nothing written, as asked")
    else:
        out().print(str(result.path), soft_wrap=True)


def _say_bytes(result: Any) -> None:
    """What quantised weights save of a step."""
    read, storage = result.step_bytes(), result.circuit.storage
    if read is None or not storage:
        return
    now, before = (f"{count / 1e6:.1f} MB" for count in read)
    names = ", ".join(f"{name} in {kind}" for name, kind in storage.items())
    notes().print(f"{names}: a step of one row moves {now}, {before} with plain weights", soft_wrap=True, markup=False)


def _record(result: Any) -> dict[str, Any]:
    return {
        "path": str(result.path) if result.path else None,
        "program": result.circuit.name,
        "facts": dict(result.circuit.facts),
        "storage": {name: str(storage) for name, storage in result.circuit.storage.items()},
        "step_bytes": dict(zip(("now", "plain"), result.step_bytes() or (None, None), strict=True)),
        "tensors": [vars(row) for row in result.report],
        "programs": [
            {
                "entry": plan.entry,
                "rows": plan.rows,
                "target": plan.target,
                "kernels": len(plan.groups),
                "workspace_bytes": plan.workspace_bytes,
            }
            for plan in result.plans
        ],
        "seconds": {stage: round(seconds, 4) for stage, seconds in result.seconds.items()},
    }
