"""The CUDA compiler: finding one, and CUDA C++ through it to one shared library."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sysconfig
from collections.abc import Sequence
from pathlib import Path

from tvm_ffi import libinfo

from ...errors import BuildError, Fault
from .architectures import Architecture

PACKAGED = "nvidia/cu*/bin/nvcc"
"""Where the Python packages of `circuitgraph[cuda]` put it, beside other packages. It finds its headers."""

SINCE = (13, 0)
"""The oldest CUDA toolkit, for all architectures: no older one was tried."""

GET_ONE = "pip install 'circuitgraph[cuda]', or install the CUDA toolkit (13.0 or newer) and set CUDA_HOME to it."


def find_nvcc() -> str:
    """The CUDA compiler: $CUDA_HOME's where that is set, otherwise the one on the PATH, or that of the Python packages.

    Raises:
        BuildError: there is none, or CUDA_HOME names a folder without one.
    """
    home = os.environ.get("CUDA_HOME")
    if home:
        named = str(Path(home, "bin", "nvcc"))
        if shutil.which(named) is None:
            hint = "Set CUDA_HOME to the folder of a CUDA toolkit, or unset it."
            raise BuildError(Fault("CUDA_HOME has no CUDA compiler", where=home, expected=named, hint=hint))
        return named
    candidates = [shutil.which("nvcc")]
    candidates += map(str, sorted(Path(sysconfig.get_path("purelib")).glob(PACKAGED)))
    found = next(filter(None, candidates), None)
    if found is None:
        expected = "$CUDA_HOME/bin/nvcc, nvcc on the PATH, or the Python packages"
        raise BuildError(Fault("no CUDA compiler (nvcc) found", expected=expected, hint=GET_ONE))
    return found


class Nvcc:
    """The compiler for one architecture.

    Raises:
        BuildError: there is none, it does not start, or it is too old.
    """

    def __init__(self, arch: Architecture):
        self.arch = arch
        self.path = find_nvcc()
        if not os.environ.get("NVCC_CCBIN") and shutil.which("g++") is None:
            hint = "Install g++, or set NVCC_CCBIN to a C++ compiler."
            raise BuildError(Fault("nvcc needs a host compiler, and there is none", expected="g++ on the PATH", hint=hint))
        self.version = _version(self.path, self._run("--version"))
        if self.version < SINCE:
            expected, got = (".".join(map(str, version)) for version in (SINCE, self.version))
            raise BuildError(Fault("nvcc is too old", where=self.path, expected=f"{expected} or newer", got=got, hint=GET_ONE))

    def compile(self, source: Path, compiled: Path) -> str:
        """One unit to an object, or its device code alone to a `.cubin`.

        Returns the compiler's report of every kernel: registers, shared memory and spills.

        Raises:
            BuildError: nvcc refuses the source.
        """
        code = self.arch.code
        flags = ["-O3", "-std=c++17", f"-gencode=arch=compute_{code},code=sm_{code}", "-Xcompiler", "-fPIC,-O1", "-Xptxas", "-v"]
        flags += ["-w"]  # the generated text has a thousand unused names
        flags += [f"-I{path}" for path in (libinfo.find_include_path(), libinfo.find_dlpack_include_path())]
        kind = "-cubin" if compiled.suffix == ".cubin" else "-c"
        return self._run(kind, *flags, str(source), "-o", str(compiled))

    def link(self, objects: Sequence[Path], library: Path) -> None:
        """Objects to a library that needs tvm-ffi and the driver; the CUDA runtime is inside.

        Every unit defines TVM's few helper functions and `__tvm_ffi__library_ctx`, not inline and all the same: the linker
        takes the first of each.
        """
        # The Python packages put libraries in lib, where nvcc before 13.5 does not look: a toolkit has lib64.
        beside = Path(self.path).resolve().parents[1] / "lib"
        flags = ["-shared", "-cudart", "static", "-Xlinker", "-z,muldefs", *([f"-L{beside}"] if beside.is_dir() else [])]
        self._run(*flags, *map(str, objects), "-o", str(library))

    def _run(self, *arguments: str) -> str:
        try:
            result = subprocess.run([self.path, *arguments], capture_output=True, text=True, check=False)
        except OSError as problem:
            raise BuildError(Fault(f"nvcc does not start: {problem}", where=self.path, hint=GET_ONE)) from problem
        report = result.stdout + result.stderr
        if result.returncode:
            raise BuildError(Fault(f"nvcc fails with status {result.returncode}", where=self.path, got=report[-3000:]))
        return report


def _version(path: str, text: str) -> tuple[int, int]:
    found = re.search(r"release (\d+)\.(\d+)", text)
    if found is None:
        raise BuildError(Fault("does not tell its version", where=path, expected="release ...", got=text[-300:], hint=GET_ONE))
    return int(found[1]), int(found[2])


def resources(report: str) -> dict[str, tuple[int, int]]:
    """Kernel to (registers, bytes spilled), from the report of `Nvcc.compile`."""
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
