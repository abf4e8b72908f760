"""An IRModule of CUDA PrimFuncs to one shared library that needs tvm-ffi and the CUDA driver only."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

import tvm
from tvm.backend.cuda.host import export_cuda_host
from tvm_ffi import libinfo

from ...errors import BuildError, Fault, did_you_mean


@dataclass(frozen=True)
class Architecture:
    """What kernels may use and fill. `shared_bytes`: shared memory of one block; `overlap`: programmatic launch."""

    name: str
    processors: int
    shared_bytes: int
    overlap: bool


ARCHITECTURES = {
    arch.name: arch
    for arch in (
        Architecture("sm_80", 108, 163 * 1024, False),
        Architecture("sm_89", 128, 99 * 1024, False),
        Architecture("sm_90a", 132, 227 * 1024, True),
        Architecture("sm_100", 148, 227 * 1024, True),
        Architecture("sm_120", 170, 99 * 1024, True),
    )
}
DEFAULT = "sm_90a"
PACKAGED = "nvidia/cu*/bin/nvcc"
"""Where the Python packages of the CUDA compiler put it, beside other packages."""


def architecture(name: str) -> Architecture:
    """Raises BuildError for one that there are no kernels for."""
    name = name or DEFAULT
    if name not in ARCHITECTURES:
        raise BuildError(Fault(f"no target 'cuda:{name}'", hint=did_you_mean(name, ARCHITECTURES)))
    return ARCHITECTURES[name]


def cuda_target(arch: Architecture) -> tvm.target.Target:
    """The TVM target whose host code is CUDA C++: building needs no GPU and no driver."""
    options = {
        "kind": "cuda",
        "arch": arch.name,
        "max_threads_per_block": 1024,
        "max_shared_memory_per_block": arch.shared_bytes,
        "thread_warp_size": 32,
    }
    return tvm.target.Target(options, host="cuda_host")


def cuda_source(module: tvm.IRModule, target: tvm.target.Target) -> str:
    """One CUDA C++ unit: kernels, and a host function per PrimFunc that launches its own.

    Raises:
        BuildError: TVM refuses the module.
    """
    try:
        return export_cuda_host(tvm.tirx.build(module, target=target, pipeline="tirx"))
    except Exception as problem:
        raise BuildError(Fault(f"TVM cannot lower the kernels: {problem}")) from problem


def find_nvcc() -> str:
    """The CUDA compiler: $CUDA_HOME's, the one on the PATH, or that of the Python packages.

    Raises:
        BuildError: there is none.
    """
    home = os.environ.get("CUDA_HOME")
    candidates = [shutil.which(str(Path(home, "bin", "nvcc")))] if home else []
    candidates.append(shutil.which("nvcc"))
    candidates += [str(path) for path in sorted(Path(tvm.__file__).parents[1].glob(PACKAGED))]
    found = next((candidate for candidate in candidates if candidate), None)
    if found is None:
        hint = "Install the CUDA toolkit (12.8 or newer) or set CUDA_HOME to it."
        raise BuildError(Fault("no CUDA compiler (nvcc) found", hint=hint))
    return found


def compile_cuda(source: Path, library: Path, arch: Architecture) -> str:
    """Compile and return the compiler's resource report: registers, shared memory and spills of every kernel.

    Raises:
        BuildError: nvcc is missing, does not start or refuses the source.
    """
    code = arch.name.removeprefix("sm_")
    command = [find_nvcc(), "-shared", "-O3", "-std=c++17", f"-gencode=arch=compute_{code},code=sm_{code}"]
    command += ["-Xcompiler", "-fPIC,-O1", "-cudart", "static", "-Xptxas", "-v", "-split-compile", "2"]
    command += [f"-I{path}" for path in (libinfo.find_include_path(), libinfo.find_dlpack_include_path())]
    command += [str(source), "-o", str(library)]
    try:
        result = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError as problem:
        raise BuildError(Fault(f"nvcc does not start: {problem}")) from problem
    report = result.stdout + result.stderr
    if result.returncode:
        raise BuildError(Fault(f"nvcc refused the generated code: {report[-3000:]}", where=str(source)))
    return report


def resources(report: str) -> dict[str, tuple[int, int]]:
    """Kernel to (registers, bytes spilled), from `compile_cuda`'s report."""
    found: dict[str, tuple[int, int]] = {}
    kernel, spilled = "", 0
    for line in report.splitlines():
        if match := re.search(r"Compiling entry function '(\w+)'", line):
            kernel = match[1]
        elif match := re.search(r"(\d+) bytes spill stores", line):
            spilled = int(match[1])
        elif (match := re.search(r"Used (\d+) registers", line)) and kernel:
            found[kernel] = (int(match[1]), spilled)
    return found
