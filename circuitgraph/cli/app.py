"""The commands, put together."""

from __future__ import annotations

import typer

from . import bench, compile, demo, explain, generate, programs, show, verify
from .common import guarded

app = typer.Typer(
    name="circuitgraph",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog="Exit status: 0 fine, 1 failed, 2 misused. Every command explains itself: circuitgraph COMMAND --help",
)


@app.callback()
def circuitgraph() -> None:
    """Compile the drafters of speculative decoding ahead of time, look at every stage, and measure them.

    \b
    circuitgraph demo
    circuitgraph show mtp_dense --width 4
    circuitgraph compile auto --model drafter/ --target-model llm/ -o OUT
    circuitgraph verify OUT --model drafter/ --target-model llm/
    """


for command in (
    programs.programs,
    compile.compile_,
    show.show,
    explain.explain,
    verify.verify,
    bench.bench,
    generate.generate,
    demo.demo,
):
    app.command(name=command.__name__.rstrip("_"))(guarded(command))
