"""An IRModule of CUDA PrimFuncs to CUDA C++, and that to one shared library that needs tvm-ffi and the driver only."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import tvm
from tvm.backend.cuda.host import export_cuda_host

from ...errors import BuildError, Fault
from .architectures import Architecture
from .nvcc import Nvcc

UNIT = 4
"""Functions of one unit, about. Headers cost a unit three seconds, a function another three, and units are compiled side
by side. The cut must not depend on the machine: the same input gives the same source."""

INCLUDES = "#include <tvm/ffi/c_api.h>"
"""Where TVM's host code begins."""
HOST = f"#ifndef __CUDA_ARCH__\n{INCLUDES}"
"""Where a unit's host code begins: the pass for the device need not read it, nor its headers, which saves a second."""


def cuda_target(arch: Architecture) -> tvm.target.Target:
    """The TVM target whose host code is CUDA C++: building needs no GPU and no driver."""
    options = {
        "kind": "cuda",
        # TVM 0.27 fails where it replaces fp8, which sm_80 lacks and no kernel has; the text is the same otherwise.
        "arch": "sm_89" if arch.name == "sm_80" else arch.name,
        "max_threads_per_block": 1024,
        "max_shared_memory_per_block": arch.shared_bytes,
        "thread_warp_size": 32,
    }
    return tvm.target.Target(options, host="cuda_host")


def units_of(module: tvm.IRModule) -> list[tvm.IRModule]:
    """The module cut into units of nearly equal numbers of functions, the same for equal modules."""
    functions = sorted(module.functions.items(), key=lambda item: item[0].name_hint)
    # In turns: functions of many rows, which take longest, are neighbours. Two in every unit at least, since TVM makes
    # the only function of a module its `main`, and there can be one of those in a library.
    count = max(1, min(-(-len(functions) // UNIT), len(functions) // 2))
    return [tvm.IRModule(dict(functions[index::count])) for index in range(count)]


def cuda_source(unit: tvm.IRModule, target: tvm.target.Target) -> str:
    """CUDA C++: kernels, and a host function per PrimFunc that launches its own.

    Raises:
        BuildError: TVM refuses the module.
    """
    try:
        source = export_cuda_host(tvm.tirx.build(unit, target=target, pipeline="tirx"))
    except Exception as problem:
        raise BuildError(Fault(f"TVM cannot lower the kernels: {problem}")) from problem
    return source.replace(INCLUDES, HOST, 1) + "\n#endif\n"


def sources(module: tvm.IRModule, target: tvm.target.Target) -> list[str]:
    """The text of every unit."""
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        return list(pool.map(lambda unit: cuda_source(unit, target), units_of(module)))


def build_library(
    module: tvm.IRModule, target: tvm.target.Target, arch: Architecture, folder: Path
) -> tuple[Path, list[str], str]:
    """(library, text of every unit, the compiler's report). Units are compiled side by side, while TVM lowers the next.

    Raises:
        BuildError: of TVM or the compiler; the latter also when there is none.
    """
    nvcc, library, texts = Nvcc(arch), folder / "kernels.so", []
    try:
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            compiling = []
            for index, unit in enumerate(units_of(module)):
                source = folder / f"kernels.{index}.cu"
                texts.append(cuda_source(unit, target))
                source.write_text(texts[-1])
                compiling.append((source.with_suffix(".o"), pool.submit(nvcc.compile, source, source.with_suffix(".o"))))
            report = "".join(done.result() for _, done in compiling)
        nvcc.link([compiled for compiled, _ in compiling], library)
    except OSError as problem:
        where = str(problem.filename or folder)
        raise BuildError(Fault(f"the library cannot be written: {problem}", where=where, hint="Set TMPDIR.")) from problem
    return library, texts, report
