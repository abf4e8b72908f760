"""`circuitgraph explain`: which kernel each group got, and why the rules before did not take it."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

import typer
from rich.markup import escape

from ..places import check_model, check_schedule, find_program, is_artifact
from .common import out, parse_switches, print_json
from .options import AsJson, Entry, Family, Model, PlanTarget, ProgramOrArtifact, ScheduleFile, Switches, Width


def explain(
    program: ProgramOrArtifact,
    entry: Entry = "draft",
    width: Width = 1,
    family: Family = None,
    model: Model = None,
    switches: Switches = None,
    target: PlanTarget = None,
    schedule: ScheduleFile = None,
    context: Annotated[int, typer.Option("--context", min=0, help="Cache rows a sequence that costs assume.")] = 1024,
    as_json: AsJson = False,
) -> None:
    """Say for every group of a program which schedule rule chose its kernel, and what the earlier rules objected to.

    \b
    circuitgraph explain mtp_dense --width 4
    circuitgraph explain mtp_dense --entry context --width 64 --schedule my_cpu.yaml
    circuitgraph explain drafter.cg --width 4             as it was compiled
    """
    chosen = parse_switches(switches or [])
    if not is_artifact(program):
        check_model(model)
        check_schedule(schedule)
        find_program(program)

    from ..inspect import explain as explain_program

    records = explain_program(
        program,
        family=family,
        entry=entry,
        width=width,
        target=target,
        model=model,
        switches=chosen,
        schedule_file=schedule,
        context=context,
    )
    if as_json:
        print_json([asdict(record) for record in records])
        return
    console = out()
    for record in records:
        params = ", ".join(f"{name}={value}" for name, value in record.params.items())
        cost = f"{record.bytes / 1e6:.3f} MB, {record.flops / 1e6:.2f} MFLOP"
        console.print(f"[bold]{record.group}[/bold] ({record.pattern}): {', '.join(record.nodes)}", soft_wrap=True)
        console.print(f"  {escape(f'{record.kernel}({params})')}  by rule '{record.rule}'; {cost}", soft_wrap=True)
        for rule, reason in record.refusals:
            console.print(f"  not '{rule}': {escape(reason)}", soft_wrap=True)
