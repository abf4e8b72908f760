"""`circuitgraph verify`: compiled programs against the reference interpreter."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer
from rich.markup import escape

from ..places import check_artifact, check_model, check_target
from .common import out, print_json, table
from .options import Artifact, AsJson, Model, TargetModel, Threads
from .progress import bar

if TYPE_CHECKING:
    from ..measure.verify import Check, VerifyReport


def verify(
    artifact: Artifact,
    model: Model = None,
    target_model: TargetModel = None,
    seed: Annotated[int, typer.Option("--seed", help="Of the random inputs, and of random weights.")] = 0,
    threads: Threads = None,
    as_json: AsJson = False,
) -> None:
    """Compare every compiled program with the reference interpreter on fresh random inputs, per output and width.

    Also checked: no foreign cache byte changes, a row does not depend on its neighbours, and, as a control, that the
    comparison fails when a weight is perturbed. Exit status 1 when anything differs or the control does not fail.

    \b
    circuitgraph verify drafter.cg --model drafter/ --target-model llm/
    circuitgraph verify random.cg --seed 7                 compiled from a config.json
    """
    check_artifact(artifact)
    check_model(model)
    check_target(target_model)
    from ..measure.verify import verify as verify_artifact

    with bar("verify") as report:
        result = verify_artifact(artifact, model=model, target_model=target_model, seed=seed, threads=threads, observer=report)
    if as_json:
        print_json(result.to_json())
    else:
        print_report(result)
    if not result.passed:
        raise typer.Exit(1)


def print_report(result: VerifyReport) -> None:
    """One line per program, one column per check: the worst error, which must not exceed the tolerance."""
    console = out()
    names = list(dict.fromkeys(check.name for check in result.checks))
    console.print(f"{result.program}: compiled against reference, worst error of each comparison")
    shown = table()
    shown.add_column("program", no_wrap=True)
    for name in names:
        shown.add_column(name, justify="right")
    for entry, rows in dict.fromkeys((check.entry, check.rows) for check in result.checks):
        found = {check.name: check for check in result.checks if (check.entry, check.rows) == (entry, rows)}
        shown.add_row(f"{entry} {rows}", *(_cell(found.get(name)) for name in names))
    console.print(shown)
    tolerances = dict.fromkeys(check.tolerance for check in result.checks if check.tolerance)
    console.print(f"tolerance {', '.join(f'{value:g}' for value in tolerances)}; rest and isolated: exact")
    for check in result.checks:
        if not check.passed:
            console.print(f"[red]FAILED[/red] {check.entry} {check.rows} {check.name}: {escape(_failure(check))}", soft_wrap=True)
    seen = sum(control.passed for control in result.controls)
    console.print(f"control: {seen} of {len(result.controls)} perturbed weights were noticed")
    for control in result.controls:
        if not control.passed:
            error = f"{control.error:.2g} in {control.seen_by}"
            console.print(f"[red]FAILED[/red] a wrong '{escape(control.weight)}' passes ({error})", soft_wrap=True)
    console.print("[green]verified[/green]" if result.passed else "[red]not verified[/red]")


def _cell(check: Check | None) -> str:
    if check is None:
        return ""
    text = f"{check.error:.1e}".replace("e-0", "e-") if check.error else "0"
    return text if check.passed else f"[red]{text}[/red]"


def _failure(check: Check) -> str:
    return f"error {check.error:.3g}, tolerance {check.tolerance:g}" + (f" ({check.detail})" if check.detail else "")
