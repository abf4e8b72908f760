"""`circuitgraph programs`: what is shipped."""

from __future__ import annotations

from .common import out, print_json
from .options import AsJson


def programs(as_json: AsJson = False) -> None:
    """List the shipped programs, their families, switches and entries.

    \b
    circuitgraph programs
    circuitgraph programs --json | jq '.[].families[].name'
    """
    from ..checkpoint.family import families_of
    from ..language import load_program, shipped_programs, switch_space

    records = []
    for name in shipped_programs():
        program = load_program(name)
        records.append(
            {
                "program": name,
                "doc": " ".join(program.file.doc.split()),
                "entries": {entry: decl.rows for entry, decl in program.file.entries.items()},
                "switches": switch_space(program),
                "families": [{"name": family.name, "doc": " ".join(family.file.doc.split())} for family in families_of(name)],
            }
        )
    if as_json:
        print_json(records)
        return
    console = out()
    for record in records:
        console.print(f"[bold]{record['program']}[/bold]  {record['doc']}")
        console.print(f"  entries   {', '.join(record['entries'])}")
        for family in record["families"]:
            console.print(f"  family    [bold]{family['name']}[/bold]: {family['doc']}")
        for switch, values in record["switches"].items():
            console.print(f"  switch    {switch}: {' | '.join(str(value).lower() for value in values)}")
