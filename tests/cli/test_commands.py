"""The commands on a tiny head with random weights."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys

import pytest

import circuitgraph
from circuitgraph.plan.schedule import SCHEDULES
from tests.fixture_cases import FIXTURES


def test_programs(run):
    assert "mtp_dense" in run("programs").stdout
    records = json.loads(run("programs", "--json").stdout)
    record = next(record for record in records if record["program"] == "mtp_dense")
    assert "draft" in record["entries"]
    assert "llama_mtp" in {family["name"] for family in record["families"]}
    assert record["switches"]["concat"] == ["embed_first", "hidden_first"]


@pytest.mark.parametrize("stage", ["load", "resolve", "slice", "specialize", "fuse", "schedule", "place", "plan"])
def test_show_of_a_program(run, stage):
    result = run("show", "mtp_dense", "--width", "4", "--stage", stage)
    assert result.exit_code == 0, result.stderr
    assert "lm_head" in result.stdout
    record = json.loads(run("show", "mtp_dense", "--width", "4", "--stage", stage, "--json").stdout)
    assert record["stage"] == stage
    assert record["text"].rstrip("\n") == result.stdout.rstrip("\n")


def test_show_of_switches_and_families(run):
    default = run("show", "mtp_dense", "--stage", "resolve").stdout
    other = run("show", "mtp_dense", "--stage", "resolve", "--set", "concat=hidden_first").stdout
    assert default != other
    assert run("show", "mtp_dense", "--stage", "resolve", "--family", "llama_mtp").stdout == default


def test_explain(run):
    assert "by rule" in run("explain", "mtp_dense", "--width", "4").stdout
    records = json.loads(run("explain", "mtp_dense", "--width", "4", "--json").stdout)
    assert {"group", "nodes", "rule", "kernel", "params", "refusals"} <= set(records[0])
    refused = [rule for record in records for rule, reason in record["refusals"] if reason]
    assert "wide projections" in refused


def test_compile(run, config_file, tmp_path):
    out = tmp_path / "head.cg"
    result = run(
        *("compile", "mtp_dense", "--model", config_file, "-o", out, "--widths", "1", "--context-rows", "4"),
        *("--portable", "--json"),
    )
    assert result.exit_code == 0, result.stderr
    record = json.loads(result.stdout)
    assert record["path"] == str(out)
    assert [(p["entry"], p["rows"]) for p in record["programs"]] == [("draft", 1), ("context", 4)]
    assert (out / "manifest.json").is_file()


def test_compile_with_an_entry_on_request(run, config_file):
    options = ("--widths", "1", "--context-rows", "4", "--stop-after", "place", "--json", "--with", "draft_masked")
    result = run("compile", "mtp_dense", "--model", config_file, *options)
    assert result.exit_code == 0, result.stderr
    programs = json.loads(result.stdout)["programs"]
    assert [(p["entry"], p["rows"]) for p in programs] == [("draft", 1), ("context", 4), ("draft_masked", 1)]


def test_entries_on_request_come_beside_all_that_a_program_has(run):
    """EAGLE-3 starts with an entry of its own."""
    options = ("--widths", "1", "--context-rows", "4", "--stop-after", "place", "--with", "first_masked", "--json")
    result = run("compile", "auto", "--model", str(FIXTURES / "eagle3_llama"), *options)
    assert result.exit_code == 0, result.stderr
    assert {"first", "draft", "context", "first_masked"} == {p["entry"] for p in json.loads(result.stdout)["programs"]}


def test_compile_stops_where_asked_and_writes_nothing(run, config_file, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    result = run("compile", "mtp_dense", "--model", config_file, "--stop-after", "place", "--json")
    assert result.exit_code == 0, result.stderr
    assert json.loads(result.stdout)["path"] is None
    assert list(tmp_path.iterdir()) == []


def test_compile_says_what_every_tensor_is_for(run):
    options = ("compile", "auto", "--model", str(FIXTURES / "qwen3_dense_mtp"), "--stop-after", "resolve")
    result = run(*options, "--tensors")
    assert result.exit_code == 0, result.stderr
    lines = result.stdout.splitlines()
    assert "borrowed  target   lm_head.weight                                bf16[512, 64]  lm_head" in lines
    assert lines[-1] == "2 tensors borrowed, 15 used"
    rows = json.loads(run(*options, "--json").stdout)["tensors"]
    assert {row["tensor"] for row in rows if row["status"] == "borrowed"} == {"lm_head.weight", "model.embed_tokens.weight"}


@pytest.mark.parametrize(
    ("stage", "wanted"), [("plan", "digest"), ("lower", "def "), ("llvm", "define"), ("pack", '"functions"')]
)
def test_show_of_an_artifact(run, artifact, stage, wanted):
    result = run("show", artifact, "--width", "3", "--stage", stage)
    assert result.exit_code == 0, result.stderr
    assert wanted in result.stdout


def test_verify(run, artifact):
    assert "verified" in run("verify", artifact).stdout
    result = run("verify", artifact, "--seed", "5", "--json")
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout)
    assert report["passed"]
    assert {(check["entry"], check["rows"]) for check in report["checks"]} == {("draft", 1), ("draft", 3), ("context", 4)}
    assert report["controls"]
    assert all(control["passed"] for control in report["controls"])
    assert {"draft", "logprob", "next_hidden", "kv rows", "kv rest"} <= {check["name"] for check in report["checks"]}


def test_a_damaged_library_is_refused(run, artifact, tmp_path):
    copy = tmp_path / "damaged.cg"
    shutil.copytree(artifact, copy)
    library = copy / json.loads((copy / "manifest.json").read_text())["library"]
    library.write_bytes(library.read_bytes()[:-1] + b"\0\0")
    result = run("verify", copy)
    assert result.exit_code == 1
    assert library.name in result.stderr


def test_bench(run, artifact):
    result = run("bench", artifact, "--no-peers", "--seconds", "0.01", "--context", "20", "--json")
    assert result.exit_code == 0, result.stderr
    report = json.loads(result.stdout)
    assert [(row["entry"], row["rows"]) for row in report["rows"]] == [("context", 4), ("draft", 1), ("draft", 3)]
    assert all(row["seconds"] > 0 and row["bytes"] > 0 and 0 < row["fraction"] < 2 for row in report["rows"])
    assert report["read_bandwidth"] > 0
    assert report["machine"]["versions"]["circuitgraph"] == circuitgraph.__version__
    assert "draft 1" in run("bench", artifact, "--no-peers", "--seconds", "0.01", "--entry", "draft", "--widths", "1").stdout


def test_bench_counts_bytes_and_flops_for_the_same_context(artifact):
    from circuitgraph.artifact import read_artifact
    from circuitgraph.measure.bench import cost_at

    manifest = read_artifact(artifact).manifest
    for context in (0, 20, 1024):
        told = circuitgraph.explain(artifact, width=3, context=context)
        cost = cost_at(manifest, manifest.functions["draft_3"], context)
        assert (cost.bytes, cost.flops) == (sum(record.bytes for record in told), sum(record.flops for record in told))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--entry", "drfat"], "has no entry 'drfat'. Did you mean 'draft'?"),
        (["--entry", "draft", "--widths", "1,2"], "has no program for 2 rows. Compiled: 1, 3."),
        (["--entry", "context", "--widths", "1"], "has no program for 1 rows. Compiled: 4."),
    ],
)
def test_bench_refuses_what_the_artifact_lacks(run, artifact, options, message):
    result = run("bench", artifact, "--no-peers", "--seconds", "0.01", *options)
    assert result.exit_code == 1
    assert message in result.stderr


def test_bench_of_nothing_is_refused(artifact):
    from circuitgraph.errors import ArtifactError

    for nothing in ({"entries": []}, {"widths": []}):
        with pytest.raises(ArtifactError, match="nothing to measure"):
            circuitgraph.bench(artifact, peers=False, **nothing)


def test_bench_of_a_shape(run, tmp_path):
    """Compiled for the time that it is measured; the file has what --json prints."""
    file = tmp_path / "bench.json"
    options = ["--target", "cpu", "--no-peers", "--seconds", "0.01", "--context", "8", "--entry", "draft", "--widths", "1"]
    result = run("bench", "--shape", "tiny", *options, "--json", "--out", file)
    assert result.exit_code == 0, result.stderr
    assert json.loads(result.stdout) == json.loads(file.read_text())
    assert [row["rows"] for row in json.loads(file.read_text())["rows"]] == [1]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ([], "say what to measure"),
        (["--shape", "dense8"], "no shape 'dense8'. Did you mean 'dense8b'?"),
        (["--shape", "tiny", "--target", "gpu"], "no target 'gpu'"),
    ],
)
def test_bench_refuses_what_is_no_shape(run, options, message):
    result = run("bench", *options)
    assert result.exit_code != 0
    assert message in result.stderr


def test_bench_refuses_a_shape_that_the_artifact_is_not(run, artifact):
    result = run("bench", artifact, "--shape", "dense8b")
    assert result.exit_code == 1
    assert "is of another shape" in result.stderr
    assert run("bench", artifact, "--target", "cpu").exit_code == 2


def test_bench_names_every_shape(run):
    from circuitgraph.measure.shapes import SHAPES

    shown = " ".join(run("bench", "--help").stdout.split())
    assert all(name in shown for name in SHAPES)


def test_explain_of_an_artifact_tells_what_was_compiled(run, config_file, tmp_path):
    """Not what the shipped schedule would choose now."""
    schedule = tmp_path / "mine.yaml"
    shipped = (SCHEDULES / "cpu.yaml").read_text()
    assert "name: skinny projections" in shipped
    schedule.write_text(shipped.replace("name: skinny projections", "name: my projections"))
    out = tmp_path / "mine.cg"
    circuitgraph.compile("auto", model=config_file, out=out, widths=(1,), entries=["draft"], schedule_file=schedule)
    assert "by rule 'my projections'" in run("explain", out).stdout
    told = circuitgraph.explain(out, context=77)
    assert told == circuitgraph.explain("mtp_dense", model=config_file, schedule_file=schedule, context=77)
    result = run("explain", out, "--width", "4")
    assert result.exit_code == 1
    assert "has no program 'draft_4'" in result.stderr


@pytest.mark.parametrize("command", ["explain", "show"])
@pytest.mark.parametrize(
    "options",
    [["--family", "llama_mtp"], ["--model", "x"], ["--set", "norm=plain"], ["--schedule", "x.yaml"], ["--target", "cpu"]],
)
def test_an_artifact_has_decided_these(run, artifact, command, options):
    result = run(command, artifact, *options)
    assert result.exit_code == 1
    assert "was decided when the artifact was compiled" in result.stderr


DEAD = """\
program: dead
inputs:
  hidden: act[n, 8]
body:
  - a = silu(hidden)
  - b = silu(hidden)
outputs: {y: a}
entries:
  draft: {outputs: [y]}
"""


@pytest.mark.parametrize("stage", ["check", "plan"])
def test_show_checks_as_compile_does(run, tmp_path, stage, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "dead.yaml").write_text(DEAD)
    result = run("show", "dead.yaml", "--stage", stage)
    assert result.exit_code == 1
    assert "dead.yaml:6: b: nothing uses this value" in result.stderr


def test_a_schedule_that_is_not_there(run, tmp_path):
    result = run("show", "mtp_dense", "--schedule", tmp_path / "nope.yaml")
    assert result.exit_code == 1
    assert f"{tmp_path / 'nope.yaml'}: the file does not exist" in result.stderr
    assert "is no file" in run("show", "mtp_dense", "--schedule", tmp_path).stderr


def test_tables_are_whole_in_a_pipe(artifact):
    """As `circuitgraph verify | less` and a log see them: 80 columns would cut the numbers."""
    command = [sys.executable, "-m", "circuitgraph.cli", "verify", str(artifact), "--threads", "1"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env={**os.environ, "COLUMNS": "40"})
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    head = next(line for line in lines if line.lstrip().startswith("program"))
    rows = [line for line in lines if re.match(r"\s*(draft|context) \d", line)]
    assert len(rows) == 3, "one line a program"
    assert len(head) > 40
    assert all("\u2026" not in line for line in lines)
    assert all(name in head.split() for name in ("draft", "logprob", "next_hidden"))
