"""`circuitgraph show`: what any stage leaves, as text."""

from __future__ import annotations

from typing import Annotated

import typer

from ..places import check_model, check_schedule, find_program, is_artifact
from .common import parse_switches, print_json
from .options import AsJson, Entry, Family, Model, PlanTarget, ProgramOrArtifact, ScheduleFile, Switches, TextStage, Width


def show(
    program: ProgramOrArtifact,
    entry: Entry = "draft",
    width: Width = 1,
    stage: Annotated[TextStage, typer.Option("--stage", help="A stage, or what building leaves.")] = "plan",
    family: Family = None,
    model: Model = None,
    switches: Switches = None,
    target: PlanTarget = None,
    schedule: ScheduleFile = None,
    as_json: AsJson = False,
) -> None:
    """Print what a stage of the compiler leaves for one entry and width.

    The order is load, resolve, check, slice, specialize, fuse, schedule, place (= plan), lower, and then what
    building leaves: source, llvm, asm. A program without a model takes its family's example sizes.

    \b
    circuitgraph show mtp_dense                                     the plan of draft at width 1
    circuitgraph show mtp_dense --family qwen3_5_mtp --stage resolve
    circuitgraph show mtp_dense --width 4 --stage lower             TIR
    circuitgraph show drafter.cg --width 4 --stage llvm
    """
    chosen = parse_switches(switches or [])
    if not is_artifact(program):
        check_model(model)
        check_schedule(schedule)
        find_program(program)

    from ..inspect import stage_text

    text = stage_text(
        program,
        family=family,
        entry=entry,
        width=width,
        stage=stage,
        target=target,
        model=model,
        switches=chosen,
        schedule_file=schedule,
    )
    if as_json:
        print_json({"program": program, "entry": entry, "width": width, "stage": stage, "text": text})
    else:
        typer.echo(text, nl=not text.endswith("\n"))
