"""Finding the CUDA compiler, and what is said where it is absent, too old or fails."""

from __future__ import annotations

import shutil

import pytest

from circuitgraph.errors import BuildError
from circuitgraph.kernels.cuda import nvcc
from circuitgraph.kernels.cuda.architectures import ARCHITECTURES, architecture

REPORT = """ptxas info    : Compiling entry function 'draft_1_kernel' for 'sm_90a'
ptxas info    : Function properties for draft_1_kernel
    8 bytes stack frame, 4 bytes spill stores, 4 bytes spill loads
ptxas info    : Used 128 registers, used 1 barriers"""


def script(path, text):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return path


@pytest.fixture
def nothing(monkeypatch, tmp_path):
    """A machine without any CUDA compiler, but with a host compiler; the folder of its Python packages."""
    monkeypatch.delenv("CUDA_HOME", raising=False)
    monkeypatch.delenv("NVCC_CCBIN", raising=False)
    monkeypatch.setenv("PATH", str(script(tmp_path / "bin" / "g++", "").parent))
    monkeypatch.setattr(nvcc.sysconfig, "get_path", lambda name: str(tmp_path / "packages"))
    return tmp_path / "packages"


def test_a_missing_compiler_says_how_to_get_one(nothing):
    with pytest.raises(BuildError) as error:
        nvcc.find_nvcc()
    for part in ("no CUDA compiler (nvcc) found", "pip install 'circuitgraph[cuda]'", "CUDA toolkit", "CUDA_HOME"):
        assert part in str(error.value)


def test_the_compiler_of_the_python_packages_is_found(nothing):
    there = script(nothing / "nvidia" / "cu13" / "bin" / "nvcc", "echo 'release 13.0, V13.0.88'")
    assert nvcc.find_nvcc() == str(there)
    assert nvcc.Nvcc(architecture("sm_120")).version == (13, 0)


def test_the_toolkit_that_is_named_comes_first(nothing, monkeypatch, tmp_path):
    script(nothing / "nvidia" / "cu13" / "bin" / "nvcc", "")
    on_path = script(tmp_path / "bin" / "nvcc", "")
    assert nvcc.find_nvcc() == str(on_path)
    named = script(tmp_path / "toolkit" / "bin" / "nvcc", "")
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "toolkit"))
    assert nvcc.find_nvcc() == str(named)


def test_a_named_toolkit_without_a_compiler_is_no_other_one(nothing, monkeypatch, tmp_path):
    script(tmp_path / "bin" / "nvcc", "")
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "gone"))
    with pytest.raises(BuildError, match=r"/gone: CUDA_HOME has no CUDA compiler; expected .*/gone/bin/nvcc"):
        nvcc.find_nvcc()


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_an_old_compiler_says_what_is_needed(nothing, tmp_path, arch):
    script(tmp_path / "bin" / "nvcc", "echo 'Cuda compilation tools, release 12.9, V12.9.86'")
    with pytest.raises(BuildError, match=r"nvcc is too old; expected 13.0 or newer; got 12.9. pip install"):
        nvcc.Nvcc(architecture(arch))


def test_a_missing_host_compiler_is_told(nothing, tmp_path):
    script(tmp_path / "bin" / "nvcc", "echo 'release 13.0, '")
    (tmp_path / "bin" / "g++").unlink()
    with pytest.raises(BuildError, match=r"nvcc needs a host compiler, .* Install g\+\+"):
        nvcc.Nvcc(architecture("sm_90a"))


def test_what_the_compiler_says_is_passed_on(nothing, tmp_path):
    script(
        tmp_path / "bin" / "nvcc",
        "echo release 13.0,; [ $1 = --version ] || { echo 'kernels.cu(3): error'; exit 2; }",
    )
    with pytest.raises(BuildError, match=r"nvcc fails with status 2; got release 13.0,\nkernels.cu\(3\): error"):
        nvcc.Nvcc(architecture("sm_90a")).compile(tmp_path / "kernels.cu", tmp_path / "kernels.o")
    script(tmp_path / "bin" / "nvcc", "echo hello")
    with pytest.raises(BuildError, match="does not tell its version"):
        nvcc.Nvcc(architecture("sm_90a"))


def test_resource_report_is_read():
    assert nvcc.resources(REPORT) == {"draft_1_kernel": (128, 4)}


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="needs nvcc")
def test_units_are_linked_to_one_library(tmp_path):
    """Each unit defines TVM's helpers and context once more; what is no CUDA says where."""
    compiler = nvcc.Nvcc(architecture("sm_90a"))
    objects = []
    for name in ("a", "b"):
        source = tmp_path / f"{name}.cu"
        source.write_text(f'void* __tvm_ffi__library_ctx; extern "C" int {name}() {{ return 1; }}\n')
        objects.append(source.with_suffix(".o"))
        compiler.compile(source, objects[-1])
    compiler.link(objects, tmp_path / "both.so")
    assert (tmp_path / "both.so").stat().st_size > 0
    (tmp_path / "c.cu").write_text("nonsense;")
    with pytest.raises(BuildError, match=r"c\.cu"):
        compiler.compile(tmp_path / "c.cu", tmp_path / "c.o")
