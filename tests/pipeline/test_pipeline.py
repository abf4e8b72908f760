"""The pipeline: stage names, hooks, what ends it early, and that a refusal leaves nothing behind."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file

import circuitgraph
from circuitgraph.checkpoint import default_config
from circuitgraph.circuit.ir import Circuit
from circuitgraph.errors import ArtifactError, CircuitError, CircuitgraphError, ScheduleError
from circuitgraph.pipeline import STAGES, Run, work_list
from tests.circuits import SMALL, small_mtp
from tests.fixture_cases import FIXTURES


@pytest.fixture
def config(tmp_path):
    """A small config.json of the plain family: random weights."""
    path = tmp_path / "config.json"
    keys = ("hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim", "intermediate_size", "vocab_size")
    path.write_text(json.dumps({**default_config("llama_mtp"), **{key: SMALL[key] for key in keys}}))
    return path


def test_stages_come_in_order_and_each_is_shown(config, tmp_path):
    seen = []
    out = tmp_path / "out"
    result = circuitgraph.compile(
        "mtp_dense",
        model=config,
        out=out,
        widths=(2,),
        context_rows=(4,),
        observer=lambda stage, subject, form, seconds: seen.append((stage, subject)),
        dump=tmp_path / "dump",
    )
    first_seen = list(dict.fromkeys(stage for stage, _ in seen))
    assert first_seen == list(STAGES)
    assert {subject for stage, subject in seen if stage == "fuse"} == {"draft_1", "draft_2", "context_4"}
    assert set(result.seconds) == set(STAGES)
    dumped = sorted(path.name for path in (tmp_path / "dump").iterdir())
    assert "01_resolve_mtp_dense.txt" in dumped
    assert "07_place_draft_2.txt" in dumped
    assert (tmp_path / "dump" / "07_place_draft_2.txt").read_text() == (out / "plans" / "draft_2.txt").read_text()
    # `show` on the artifact and on the program tell the same.
    for stage in ("slice", "specialize", "place"):
        shown = circuitgraph.stage_text(out, entry="draft", width=2, stage=stage)
        assert shown == circuitgraph.stage_text("mtp_dense", model=config, entry="draft", width=2, stage=stage)
    assert "draft_2" in circuitgraph.stage_text(out, entry="draft", width=2, stage="lower")
    with pytest.raises(ArtifactError, match="no program 'draft_3'"):
        circuitgraph.stage_text(out, entry="draft", width=3, stage="plan")
    # The same input gives the same source: only the library's build may differ.
    again = tmp_path / "again"
    circuitgraph.compile("mtp_dense", model=config, out=again, widths=(2,), context_rows=(4,))
    for file in sorted((out / "src").iterdir()) + sorted((out / "plans").iterdir()):
        assert file.read_bytes() == (again / file.parent.name / file.name).read_bytes(), file.name


@pytest.mark.parametrize("stage", ["load", "check", "slice", "specialize", "fuse", "schedule", "place", "lower"])
def test_stop_after_ends_there_and_writes_nothing(stage, config, tmp_path):
    seen = []
    result = circuitgraph.compile(
        "mtp_dense",
        model=config,
        out=tmp_path / "out",
        widths=(1,),
        context_rows=(4,),
        stop_after=stage,
        observer=lambda name, subject, form, seconds: seen.append(name),
    )
    assert result.path is None
    assert not (tmp_path / "out").exists()
    later = STAGES[STAGES.index(stage) + 1 :]
    assert not [name for name in seen if name in later and name not in ("resolve", "check")]


def test_every_form_is_verified():
    circuit = small_mtp()
    run = Run()
    broken = replace(circuit, nodes=circuit.nodes[1:])
    with pytest.raises(CircuitError, match="before it is defined"):
        run("check", "broken", lambda: broken)
    assert run.seconds == {}


def test_an_existing_output_is_refused_before_any_work(config, tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine.txt").write_text("keep me")
    seen = []
    for overwrite in (False, True):
        with pytest.raises(ArtifactError, match="exists"):
            circuitgraph.compile(
                "mtp_dense", model=config, out=tmp_path / "out", overwrite=overwrite, observer=lambda *args: seen.append(args)
            )
    assert seen == []
    assert (tmp_path / "out" / "mine.txt").read_text() == "keep me"


@pytest.mark.parametrize("option", ["out", "dump"])
def test_a_folder_under_a_file_is_refused_before_any_work(option, config, tmp_path):
    (tmp_path / "file").write_text("")
    given = {"out": tmp_path / "a", option: tmp_path / "file" / "o"}
    with pytest.raises(CircuitgraphError, match=r"file/o: cannot be (made|written to); got 'file' is a file"):
        circuitgraph.compile("auto", model=config, **given, observer=lambda *args: pytest.fail("a stage ran"))
    assert [path.name for path in tmp_path.iterdir() if path.name != config.name] == ["file"]


def test_a_schedule_that_accepts_nothing_says_why_for_every_group(config, tmp_path):
    schedule = tmp_path / "mine.yaml"
    schedule.write_text("target: cpu\nrules:\n  - {name: only, patterns: [project], rows: 9-, kernel: cpu.linear}\n")
    with pytest.raises(ScheduleError) as refused:
        circuitgraph.compile("mtp_dense", model=config, out=tmp_path / "out", widths=(1,), schedule_file=schedule)
    text = str(refused.value)
    assert "only: for 9- rows" in text
    assert "no rule for pattern 'attend'" in text
    assert not (tmp_path / "out").exists()


def test_work_list_always_has_the_single_row_program():
    assert work_list(small_mtp(), None, (4,), (16,)) == [("draft", 1), ("draft", 4), ("context", 16)]
    assert work_list(small_mtp(), ["logits"], (2, 1), ()) == [("logits", 1), ("logits", 2)]
    with pytest.raises(CircuitError, match="Did you mean 'draft'"):
        work_list(small_mtp(), ["drfat"], (1,), (4,))
    with pytest.raises(CircuitError, match="widths are positive"):
        work_list(small_mtp(), None, (0,), (4,))
    assert work_list(small_mtp(), ["draft", "draft"], (1,), ()) == [("draft", 1)]


@pytest.mark.parametrize(
    ("entries", "widths", "context_rows", "message"),
    [
        ([], (1,), (4,), "there is no entry to compile"),
        ("draft", (1,), (4,), "entries is a list of names; got 'draft'"),
        (None, (1,), (), "context: needs context_rows"),
        (["context"], (1,), (), "context: needs context_rows"),
        (None, (1.5,), (4,), "widths are whole numbers; got 1.5"),
        (None, ("2",), (4,), "widths are whole numbers; got '2'"),
        (None, (True,), (4,), "widths are whole numbers; got True"),
        (None, 4, (4,), "widths is a list of whole numbers; got 4"),
        (None, "4", (4,), "widths is a list of whole numbers; got '4'"),
        (None, (1,), (4, 1 << 20), "context_rows are positive and at most 1024; got 1048576"),
    ],
)
def test_work_list_refuses(entries, widths, context_rows, message):
    with pytest.raises(CircuitError) as refused:
        work_list(small_mtp(), entries, widths, context_rows)
    assert message in str(refused.value)


def test_forms_are_frozen_and_hold_places():
    circuit = small_mtp()
    with pytest.raises(AttributeError):
        circuit.name = "other"  # type: ignore[misc]
    assert isinstance(circuit, Circuit)
    assert all(node.where is not None and node.where.line for node in circuit.nodes)


def test_explain_names_rules_and_refusals():
    records = circuitgraph.explain("mtp_dense", family="llama_mtp", entry="draft", width=2)
    assert [record.pattern for record in records][-1] == "head"
    skinny = next(record for record in records if record.pattern == "project")
    assert skinny.rule == "skinny projections"
    assert skinny.refusals == (("wide projections", "for 9- rows"),)
    assert all(record.bytes > 0 for record in records)


def test_explain_and_plan_are_plans_of_the_same_thing():
    text = circuitgraph.stage_text("mtp_dense", family="llama_mtp", entry="draft", width=2, stage="plan")
    for record in circuitgraph.explain("mtp_dense", family="llama_mtp", entry="draft", width=2):
        assert f"{record.group} {record.pattern} -> {record.kernel}(" in text


def test_a_plan_needs_no_tvm():
    script = (
        "import sys, circuitgraph\n"
        "assert 'digest' in circuitgraph.stage_text('mtp_dense', stage='plan')\n"
        "assert circuitgraph.explain('mtp_dense')\n"
        "print([name for name in sys.modules if name.split('.')[0] == 'tvm'])\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.stdout.strip() == "[]", done.stderr


def types_of(folder, target, **options):
    """(act, kv) that `compile` decides on."""
    result = circuitgraph.compile("auto", model=folder, out="unused", target=target, stop_after="check", **options)
    dtypes = dict(result.circuit.dtypes)
    assert result.circuit.act == dtypes["act"]
    assert {state.dtype for state in result.circuit.states} == {dtypes["kv"]}
    return dtypes["act"], dtypes["kv"]


def stored_as(dtype, folder):
    """The EAGLE-1 fixture, drafter and target, with its numbers in another dtype."""
    for name in (".", "target"):
        place = folder / name
        place.mkdir(exist_ok=True)
        shutil.copy(FIXTURES / "eagle1_llama" / name / "config.json", place)
        weights = load_file(FIXTURES / "eagle1_llama" / name / "model.safetensors")
        save_file(
            {key: value.to(dtype) if value.is_floating_point() else value for key, value in weights.items()},
            place / "model.safetensors",
        )
    return folder


@pytest.mark.parametrize(("dtype", "own"), [(torch.float32, "f32"), (torch.float16, "f16"), (torch.bfloat16, "bf16")])
def test_on_gpus_activations_and_cache_are_of_the_checkpoints_type(dtype, own, tmp_path):
    folder = stored_as(dtype, tmp_path)
    assert types_of(folder, "cuda:sm_80,sm_90a") == (own, own)
    assert types_of(folder, "cpu") == ("f32", "f32")
    assert types_of(folder, "cuda", wt="bf16") == ("bf16", "bf16")
    assert types_of(folder, "cuda", act="f16") == ("f16", "f16")
    assert types_of(folder, "cuda", kv="f16") == (own, "f16")
    assert types_of(folder, "cpu", act="bf16") == ("bf16", "f32")


def test_a_config_alone_is_bf16_on_gpus(config):
    assert types_of(config, "cuda:sm_90a") == ("bf16", "bf16")
    assert types_of(config, "cpu:portable") == ("f32", "f32")


def test_a_few_numbers_of_another_type_do_not_decide(tmp_path):
    """Nor does what a host hands over, which is larger than the drafter."""
    folder = stored_as(torch.float16, tmp_path)
    weights = load_file(folder / "model.safetensors")
    norm = next(name for name, value in weights.items() if value.dim() == 1)
    save_file({**weights, norm: weights[norm].float()}, folder / "model.safetensors")
    assert types_of(folder, "cuda") == ("f16", "f16")
    shutil.rmtree(folder / "target")
    assert types_of(folder, "cuda") == ("f16", "f16")


def test_plans_of_a_gpu_are_shown_in_the_types_that_it_gets():
    text = circuitgraph.stage_text("mtp_dense", target="cuda:sm_90a", stage="resolve")
    assert "dtypes: {act: bf16, wt: bf16, kv: bf16}" in text
    assert "dtypes: {act: f32, wt: bf16, kv: f32}" in circuitgraph.stage_text("mtp_dense", stage="resolve")
    assert "cuda.attention_paged" in {item.kernel for item in circuitgraph.explain("mtp_dense", target="cuda:sm_90a")}
