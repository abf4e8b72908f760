"""An artifact for GPUs, made and looked at without one."""

from __future__ import annotations

import shutil

import pytest
import torch
import tvm_ffi

from circuitgraph.artifact import check_device, pack_zip, read_artifact
from circuitgraph.artifact.machine import runs_on
from circuitgraph.errors import ArtifactError
from circuitgraph.inspect import explain, stage_text
from circuitgraph.pipeline import compile
from tests.gpu.pack import CASES, options_of

pytestmark = pytest.mark.skipif(shutil.which("nvcc") is None, reason="needs nvcc")


@pytest.fixture(scope="module")
def compiled(tmp_path_factory):
    """Two architectures in one artifact, each in two units."""
    folder = tmp_path_factory.mktemp("cuda")
    case = next(case for case in CASES if case.name == "odd_bf16")
    return compile(
        "mtp_dense",
        out=folder / "a",
        target="cuda:sm_80,sm_90a",
        entries=["context"],
        context_rows=[1, 2, 3],
        **options_of(case, folder),
    ).path


@pytest.fixture
def gpu(monkeypatch):
    """gpu((9, 0)): this machine has that one now."""

    def become(capability):
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: capability)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device=None: "a GPU")

    return become


def test_a_machine_without_a_gpu_says_so(compiled):
    with pytest.raises(ArtifactError, match="was compiled for 'cuda'"):
        read_artifact(compiled)


def test_everything_is_there_for_both(compiled):
    manifest = read_artifact(compiled, to_run=False).manifest
    assert list(manifest.builds) == ["sm_80", "sm_90a"]
    for arch in ("sm_80", "sm_90a"):
        units = [(compiled / "src" / arch / f"kernels.{index}.cu").read_text() for index in range(2)]
        assert sum("context_2_kernel" in unit for unit in units) == 1
        assert all(("griddepcontrol" in unit) == (arch == "sm_90a") for unit in units)
        report = (compiled / "src" / arch / "kernels.resources.txt").read_text()
        assert all(f"context_{rows}_kernel " in report for rows in (1, 2, 3))
        library = tvm_ffi.load_module(str(compiled / manifest.builds[arch].library))
        for function in (*manifest.functions, "circuitgraph_chain_begin", "circuitgraph_chain_end"):
            assert library.implements_function(function)


@pytest.mark.parametrize(("capability", "arch"), [((9, 0), "sm_90a"), ((8, 0), "sm_80"), ((8, 6), "sm_80")])
def test_the_code_that_fits_the_gpu_is_taken(compiled, gpu, capability, arch):
    gpu(capability)
    artifact = read_artifact(compiled)
    assert artifact.manifest.target.mcpu == arch
    assert artifact.library.is_file()
    assert artifact.manifest.functions == read_artifact(compiled, to_run=False).manifest.builds[arch].functions
    check_device(artifact.manifest, torch.device("cuda", 0), "a")


def test_another_gpu_is_refused_with_what_there_is(compiled, gpu):
    gpu((12, 0))
    with pytest.raises(ArtifactError, match=r"was compiled for another GPU; expected sm_120 \(a GPU\); got sm_80, sm_90a"):
        check_device(read_artifact(compiled).manifest, torch.device("cuda", 0), "a")


@pytest.mark.parametrize(
    ("mcpu", "capability", "fits"),
    [
        ("sm_90a", (9, 0), True),
        ("sm_90a", (10, 0), False),
        ("sm_80", (8, 9), True),
        ("sm_89", (8, 6), False),
        ("sm_100", (10, 3), True),
        ("sm_100", (12, 0), False),
        ("sm_120", (12, 1), True),
    ],
)
def test_where_code_runs(mcpu, capability, fits):
    assert runs_on(mcpu, capability) == fits


def test_show_and_explain_take_one_of_them(compiled, tmp_path):
    pack_zip(compiled, tmp_path / "a.zip")
    for path in (compiled, tmp_path / "a.zip"):
        for target, named in ((None, "sm_80"), ("cuda:sm_80", "sm_80"), ("cuda:sm_90a", "sm_90a")):
            look = {"entry": "context", "width": 2, "target": target}
            assert f"target=cuda:{named}" in stage_text(path, stage="plan", **look)
            assert ("griddepcontrol" in stage_text(path, stage="source", **look)) == (named == "sm_90a")
            assert "context_2" in stage_text(path, stage="lower", **look)
            assert explain(path, **look)
        with pytest.raises(ArtifactError, match="was not compiled for that; expected sm_80, sm_90a; got cuda:sm_120"):
            stage_text(path, entry="context", width=2, target="cuda:sm_120")
