"""`--help` teaches, and answers at once."""

import re
import subprocess
import sys
from typing import get_args

import pytest

COMMANDS = ("programs", "compile", "show", "explain", "verify", "bench", "generate", "demo")


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_explains_itself_with_an_example(run, command):
    result = run(command, "--help")
    assert result.exit_code == 0
    assert f"circuitgraph {command}" in result.output.replace("\n", " ")


def test_the_command_list(run):
    result = run("--help")
    assert result.exit_code == 0
    named = re.findall(r"^\W*(\w+)  ", result.output, re.MULTILINE)
    assert [name for name in named if name in COMMANDS] == list(COMMANDS)


def test_help_imports_nothing_heavy():
    script = "import sys; import circuitgraph.cli.app; print({'torch', 'tvm', 'transformers', 'networkx'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


def test_stage_names_are_the_pipelines():
    from circuitgraph.cli.options import PipelineStage, TextStage
    from circuitgraph.inspect import TEXT_STAGES
    from circuitgraph.pipeline import STAGES

    assert get_args(PipelineStage) == STAGES
    assert set(get_args(TextStage)) == set(TEXT_STAGES)
