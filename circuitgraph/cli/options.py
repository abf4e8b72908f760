"""Arguments and options that several commands take, spelled and explained once."""

from __future__ import annotations

from enum import Enum
from pathlib import Path
from typing import Annotated

import typer


class Stage(str, Enum):
    """The pipeline's stages in order, then what building leaves behind."""

    load = "load"
    resolve = "resolve"
    check = "check"
    slice = "slice"
    specialize = "specialize"
    fuse = "fuse"
    schedule = "schedule"
    place = "place"
    lower = "lower"
    build = "build"
    pack = "pack"
    plan = "plan"
    source = "source"
    llvm = "llvm"


class FloatType(str, Enum):
    f32 = "f32"
    bf16 = "bf16"
    f16 = "f16"


Program = Annotated[
    str,
    typer.Argument(metavar="PROGRAM", help="A shipped program's name, the path of a .yaml file, or 'auto' to let the model's config decide."),
]
ProgramOrArtifact = Annotated[
    str, typer.Argument(metavar="PROGRAM_OR_ARTIFACT", help="A program (name or .yaml file), or an artifact that 'compile' wrote.")
]
Artifact = Annotated[Path, typer.Argument(metavar="OUT", help="An artifact that 'compile' wrote.")]
Model = Annotated[
    Path | None,
    typer.Option("--model", metavar="DIR_OR_CONFIG_JSON", help="The drafter's checkpoint folder, or a bare config.json (weights are random then)."),
]
TargetModel = Annotated[
    Path | None,
    typer.Option("--target-model", metavar="DIR", help="The target model's folder, for weights that the drafter borrows (embedding, lm_head)."),
]
Target = Annotated[str, typer.Option("--target", help="What to compile for: 'cpu' is this machine's processor.")]
Family = Annotated[str | None, typer.Option("--family", help="How checkpoints are read; otherwise recognised from the model's config.")]
Switches = Annotated[list[str] | None, typer.Option("--set", metavar="SWITCH=VALUE", help="Overrule a switch; repeatable.")]
Entry = Annotated[str, typer.Option("--entry", help="Which entry of the program: draft, context, logits, ...")]
Width = Annotated[int, typer.Option("--width", min=1, help="Rows: sequences for draft, context rows for context.")]
Threads = Annotated[int | None, typer.Option("--threads", min=1, help="Threads; all cores when left out.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON document on standard output instead of text.")]
