"""CUDA code generation without a GPU: what is chosen, what the text promises, and that nvcc takes it."""

from __future__ import annotations

import re
import shutil

import pytest

from circuitgraph.artifact import read_artifact
from circuitgraph.errors import ArtifactError, BuildError
from circuitgraph.kernels.cuda import build
from circuitgraph.kernels.cuda.backend import make_backend
from circuitgraph.kernels.cuda.stream import Geometry, geometry
from circuitgraph.pipeline import Run, compile, plan_piece
from circuitgraph.plan.schedule import load_schedule
from circuitgraph.target import Target, parse_target
from tests.circuits import EVERYTHING, small_mtp
from tests.gpu.pack import CASES, options_of

RULES = load_schedule("cuda")
ALIGNED = {
    "hidden_size": 512,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "rotary_dim": 64,
    "intermediate_size": 512,
    "vocab_size": 1003,
    "rms_norm_eps": 1e-6,
    "attention_scale": 0.125,
}


def plan_of(circuit, rows=2, entry="draft"):
    return plan_piece(Run(), circuit, entry, rows, "cuda", RULES)


def aligned(rows=2, **dtypes):
    from circuitgraph.language import Bindings, load_program, resolve

    dtypes = dtypes or {"act": "bf16", "wt": "bf16", "kv": "bf16"}
    return plan_of(resolve(load_program("mtp_dense"), Bindings(ALIGNED, {}, **dtypes)), rows)


def source_of(plan, arch="sm_90a"):
    backend = make_backend(Target("cuda", arch))
    return backend.source(backend.lower([plan]))


def kernels_of(source: str) -> list[str]:
    """The bodies of the kernels."""
    return re.findall(r"__global__ [^;{]*\{(.*?)\n\}", source, flags=re.S)


def test_aligned_shapes_reach_the_tensor_cores():
    chosen = {group.pattern: choice.kernel for group, choice in zip(aligned().groups, aligned().choices, strict=True)}
    assert chosen["project"] == chosen["gated"] == "cuda.linear_stream"
    assert chosen["attend"] == "cuda.attention_paged"
    # 1003 logits are no whole number of tiles of 128 rows; the refusal is a line of the plan.
    assert chosen["head"] == "cuda.top1_plain"
    refusals = [reason for choice in aligned().choices for _, reason in choice.refusals]
    assert any("1003 weight rows do not split" in reason for reason in refusals)


def test_other_dtypes_fall_to_the_plain_kernels():
    kernels = {choice.kernel for choice in aligned(act="f32", wt="bf16", kv="f32").choices}
    assert kernels == {"cuda.linear_plain", "cuda.top1_plain", "cuda.attention_plain", "cuda.rows"}


@pytest.mark.parametrize("switches", [{}, EVERYTHING])
def test_every_kernel_waits_for_those_before_it(switches):
    """A kernel that returned without waiting would let the next but one start too early."""
    for circuit in (small_mtp(switches), None):
        plan = plan_of(circuit) if circuit else aligned()
        source = source_of(plan)
        bodies = kernels_of(source)
        assert len(bodies) >= len(plan.groups)
        for body in bodies:
            assert body.count("griddepcontrol_wait();") == 1
            assert "return" not in body
        assert source.count("cudaLaunchAttributeProgrammaticStreamSerialization") == len(bodies)
        # The two ends of a chain let nobody start early: positions and addressing are read before a kernel waits.
        early = [body.count("griddepcontrol_launch_dependents();") for body in bodies]
        assert sorted(early) == [0, 0] + [1] * (len(bodies) - 2)


STEADY = {"position", "kv_slot", "kv_seq", "kv_start", "kv_length", "kv_table"}


@pytest.mark.parametrize("switches", [{}, EVERYTHING])
def test_only_constants_and_addressing_are_read_before_the_wait(switches):
    """What kernels before may still be writing is read afterwards: activations, tokens, cache rows."""
    for circuit in (small_mtp(switches), None):
        plan = plan_of(circuit) if circuit else aligned()
        constants = {weight.name.replace(".", "_") for weight in plan.circuit.weights} | {"rope_cos", "rope_sin"}
        for body in kernels_of(source_of(plan)):
            early = body.split("griddepcontrol_wait();")[0]
            read = set(re.findall(r"(?:ld_global\w*|cp_async\w*)\([^;]*?&\(+(?:\(\w+\*\))?(\w+?)_ptr", early))
            read |= set(re.findall(r"&\((\w+?)_ptr\[", early))
            local = set(re.findall(r"(?:int|float|uint|uint64_t|ushort|int64_t) (\w+?)_ptr", early))
            assert {re.sub(r"_\d+$", "", name) for name in read - local} <= constants | STEADY | {""}, read


def test_before_sm_90_kernels_are_launched_one_after_the_other():
    source = source_of(plan_of(small_mtp()), "sm_80")
    assert "griddepcontrol" not in source
    assert "ProgrammaticStreamSerialization" not in source


def test_text_is_the_same_every_time():
    assert source_of(aligned()) == source_of(aligned())


@pytest.mark.parametrize(
    ("rows", "columns", "expected"),
    [
        (1, 4096, (1, 8, 1, 8)),
        (8, 12288, (1, 24, 1, 8)),
        (16, 12288, (3, 8, 1, 8)),
        (16, 8192, (2, 8, 1, 8)),
        (1, 512, (1, 1, 8, 8)),
        (4, 1536, (1, 3, 2, 6)),
        (1, 1000, "do not split"),
        (33, 4096, "at most 32 rows"),
    ],
)
def test_geometry(rows, columns, expected):
    cut = geometry(rows, columns, warps=16, stages=8, k_parts=0, registers=64 if rows > 8 else 96)
    if isinstance(cut, Geometry):
        assert (cut.k_parts, cut.steps, cut.groups, cut.stages) == expected
        assert cut.steps * cut.groups % cut.stages == 0
    else:
        assert expected in cut


def test_targets():
    assert str(parse_target("cuda:sm_90a")) == "cuda:sm_90a"
    with pytest.raises(BuildError, match="no target 'cuda:sm_91'"):
        make_backend(parse_target("cuda:sm_91"))


def test_resource_report_is_read():
    report = """ptxas info    : Compiling entry function 'draft_1_kernel' for 'sm_90a'
ptxas info    : Function properties for draft_1_kernel
    8 bytes stack frame, 4 bytes spill stores, 4 bytes spill loads
ptxas info    : Used 128 registers, used 1 barriers"""
    assert build.resources(report) == {"draft_1_kernel": (128, 4)}


def test_a_missing_compiler_says_how_to_get_one(monkeypatch):
    monkeypatch.delenv("CUDA_HOME", raising=False)
    monkeypatch.setattr(shutil, "which", lambda name: None)
    monkeypatch.setattr(build, "PACKAGED", "nowhere/*/nvcc")
    with pytest.raises(BuildError, match="Install the CUDA toolkit"):
        build.find_nvcc()


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="needs nvcc")
def test_artifact(tmp_path):
    """compile -> src/*.cu, plans and library; a machine without the GPU says so instead of crashing."""
    case = next(case for case in CASES if case.name == "odd_bf16")
    result = compile(
        "mtp_dense", out=tmp_path / "a", target="cuda:sm_90a", entries=["context"], context_rows=[2], **options_of(case, tmp_path)
    )
    artifact = read_artifact(tmp_path / "a", to_run=False)
    assert artifact.manifest.target.kind == "cuda"
    assert "context_2_kernel" in (result.path / "src" / "kernels.cu").read_text()
    assert "registers" in (result.path / "src" / "kernels.resources.txt").read_text()
    with pytest.raises(ArtifactError, match="was compiled for 'cuda'"):
        read_artifact(tmp_path / "a")
