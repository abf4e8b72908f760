"""0 fine, 1 failed, 2 misused; what failed is told on stderr, without a traceback, and nothing is written."""

import subprocess
import sys

import pytest

MISUSES = [
    ["nonsense"],
    ["compile"],
    ["compile", "mtp_dense", "-o", "x"],
    ["compile", "mtp_dense", "--model", "config.json"],
    ["compile", "mtp_dense", "--model", "config.json", "-o", "x", "--widths", "4-1"],
    ["compile", "mtp_dense", "--model", "config.json", "-o", "x", "--context-rows", "0"],
    ["compile", "mtp_dense", "--model", "config.json", "-o", "x", "--set", "concat"],
    ["compile", "mtp_dense", "--model", "config.json", "-o", "x", "--act", "f8"],
    ["compile", "mtp_dense", "--model", "config.json", "-o", "x", "--stop-after", "later"],
    ["compile", "mtp_dense", "--model", "config.json", "-o", "x", "--target", "cpu:znver3", "--portable"],
    ["show"],
    ["show", "mtp_dense", "--stage", "later"],
    ["show", "mtp_dense", "--width", "0"],
    ["explain", "mtp_dense", "--no-such-option"],
    ["verify"],
    ["bench", "x", "--widths", "one"],
    ["generate", "--model", "x"],
    ["demo", "--prompts", "0"],
]


@pytest.mark.parametrize("arguments", MISUSES, ids=" ".join)
def test_misuse(run, arguments):
    result = run(*arguments)
    assert result.exit_code == 2, result.output
    assert "Usage" in result.stderr


FAILURES = [
    (["show", "no_such_program"], "no program 'no_such_program'"),
    (["show", "mtp_dense", "--family", "no_such_family"], "no family 'no_such_family'"),
    (["show", "mtp_dense", "--entry", "drafts"], "Did you mean 'draft'?"),
    (["show", "mtp_dense", "--set", "concatt=embed_first"], "Did you mean 'concat'?"),
    (["show", "mtp_dense", "--target", "abacus"], "no target 'abacus'"),
    (["explain", "mtp_dense", "--entry", "drafts"], "Did you mean 'draft'?"),
    (["verify", "nowhere.cg"], "does not exist"),
    (["bench", "nowhere.cg"], "does not exist"),
    (["generate", "--model", "nowhere", "--artifact", "nowhere.cg", "--prompt", "x"], "does not exist"),
    (["demo", "--example", "nowhere"], "head is not there"),
    (["compile", "auto", "--model", "nowhere", "-o", "x"], "does not exist"),
]


@pytest.mark.parametrize(("arguments", "message"), FAILURES, ids=lambda value: " ".join(value) if isinstance(value, list) else "")
def test_failure(run, arguments, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    result = run(*arguments)
    assert result.exit_code == 1, result.output
    assert message in result.stderr
    assert result.stderr.startswith("error: ")
    assert "Traceback" not in result.output
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "arguments",
    [
        ["verify", "nowhere.cg"],
        ["verify", "."],
        ["bench", "nowhere.cg"],
        ["explain", "no_such_program"],
        ["show", "mtp_dense", "--schedule", "nowhere.yaml"],
        ["show", "mtp_dense", "--model", "nowhere"],
        ["compile", "auto", "--model", "nowhere", "-o", "x"],
        ["compile", "mtp_dens", "--model", ".", "-o", "x"],
        ["compile", "auto", "--model", ".", "--target-model", "nowhere", "-o", "x"],
        ["generate", "--model", "nowhere", "--artifact", "nowhere.cg", "--prompt", "x"],
    ],
    ids=" ".join,
)
def test_a_path_that_is_not_there_is_told_before_anything_heavy_is_imported(arguments, tmp_path):
    """torch takes seconds. In a process of its own: this one has it."""
    script = (
        "import sys\n"
        "from circuitgraph.cli.app import app\n"
        "try:\n"
        "    app(sys.argv[1:])\n"
        "except SystemExit as stop:\n"
        "    heavy = {'torch', 'tvm', 'tvm_ffi', 'transformers'} & set(sys.modules)\n"
        "    sys.exit(f'imported {heavy}' if heavy else stop.code)\n"
    )
    command = [sys.executable, "-c", script, *arguments]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr.startswith("error: ")
    assert "imported" not in done.stderr


def test_every_fault_of_a_program_is_told_with_its_line(tmp_path):
    """In a process of its own, as a shell sees it."""
    (tmp_path / "bad.yaml").write_text(
        "program: bad\n"
        "inputs:\n"
        "  hidden: act[n, 8]\n"
        "body:\n"
        "  - a = silu(hiden)\n"
        "  - b = no_such_op(hidden)\n"
        "outputs: {y: a}\n"
        "entries:\n"
        "  draft: {outputs: [y]}\n"
    )
    command = [sys.executable, "-m", "circuitgraph", "show", "bad.yaml"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "bad.yaml:5" in done.stderr
    assert "bad.yaml:6" in done.stderr
    assert done.stdout == ""


def test_an_output_that_exists_is_refused_before_the_work(run, config_file, tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "file").write_text("keep me")
    result = run("compile", "auto", "--model", config_file, "-o", tmp_path / "mine")
    assert result.exit_code == 1
    assert "exists already" in result.stderr
    assert (tmp_path / "mine" / "file").read_text() == "keep me"
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]
