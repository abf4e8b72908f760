"""Arguments and options that several commands take, spelled and explained once."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

# Spelled out here since importing the pipeline takes longer than `--help` may; a test compares.
PipelineStage = Literal[
    "load", "resolve", "check", "slice", "specialize", "fuse", "schedule", "place", "lower", "build", "pack"
]  # fmt: skip
TextStage = Literal[
    "load", "resolve", "check", "slice", "specialize", "fuse", "schedule", "place", "plan",
    "lower", "build", "source", "llvm", "asm", "pack",
]  # fmt: skip
FloatType = Literal["f32", "bf16", "f16"]

Program = Annotated[
    str,
    typer.Argument(
        metavar="PROGRAM",
        help="A shipped program's name, the path of a .yaml file, or 'auto' to let the model's config decide.",
    ),
]
ProgramOrArtifact = Annotated[
    str,
    typer.Argument(
        metavar="PROGRAM_OR_ARTIFACT",
        help="A program (name or .yaml file), or an artifact that 'compile' wrote.",
    ),
]
Artifact = Annotated[Path, typer.Argument(metavar="OUT", help="An artifact that 'compile' wrote.")]
Model = Annotated[
    Path | None,
    typer.Option(
        "--model",
        metavar="DIR_OR_CONFIG_JSON",
        help="The drafter's checkpoint folder, or a bare config.json.",
    ),
]
TargetModel = Annotated[
    Path | None,
    typer.Option(
        "--target-model",
        metavar="DIR",
        help="The target model's folder (safetensors or GGUF), for weights that the drafter borrows from it.",
    ),
]
Target = Annotated[
    str,
    typer.Option(
        "--target",
        help="'cpu' is this machine's processor, 'cpu:MCPU' another, by LLVM's name; 'cuda:sm_90a' a GPU, or several: "
        "'cuda:sm_80,sm_90a'.",
    ),
]
PlanTarget = Annotated[
    str | None,
    typer.Option(
        "--target", help="As in 'compile', one; 'cpu' when left out. Of an artifact for several GPUs, which one to look at."
    ),
]
Family = Annotated[
    str | None,
    typer.Option("--family", help="How checkpoints are read; otherwise recognised from the model's config."),
]
Switches = Annotated[list[str] | None, typer.Option("--set", metavar="SWITCH=VALUE", help="Overrule a switch; repeatable.")]
Entry = Annotated[str, typer.Option("--entry", help="Which entry of the program: draft, context, logits, ...")]
Width = Annotated[int, typer.Option("--width", min=1, help="Sequences for draft, context rows for context.")]
ScheduleFile = Annotated[
    Path | None, typer.Option("--schedule", metavar="YAML", help="Schedule rules to use instead of the shipped ones.")
]
Threads = Annotated[int | None, typer.Option("--threads", min=1, help="Threads; as many as torch uses when left out.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON document on standard output instead of text.")]
