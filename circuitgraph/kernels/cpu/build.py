"""Build an IRModule of CPU PrimFuncs into one shared library that needs tvm-ffi and libc only."""

import shutil
import subprocess
import tempfile
from pathlib import Path

import tvm
from tvm import tirx
from tvm.target import codegen
from tvm.tirx import compilation_pipeline
from tvm_ffi import libinfo

LAUNCHER = Path(__file__).with_name("launcher.cpp")

# Names for `mcpu` beside LLVM's own. "portable" runs on every 64-bit server CPU, slowly; "avx2" on those since 2013.
MCPU_ALIASES = {"portable": "x86-64-v2", "avx2": "x86-64-v3", "avx512": "x86-64-v4"}

# Only these decide whether generated code runs: the instruction sets that the vectors and conversions can use.
_RELEVANT_FEATURES = ("sse4.2", "avx", "f16c", "fma", "avx2", "avx512f", "avx512bw", "avx512dq", "avx512vl")

# The three runtime pointers stay hidden: libtvm_runtime, if loaded, overwrites those it can see.
_EXPORTS = "{ global: __tvm_ffi_*; local: *; };\n"


_PIPELINE = "circuitgraph_cpu"


def _pipeline():
    """The passes that emitted code needs and no others: it has no blocks, and LLVM simplifies.

    TVM's own pipelines simplify first, which substitutes every T.bind of a pure value into its uses. A chain of
    reductions or an exp, where each value is used a few times, then grows exponentially: minutes for one attention.
    """
    passes = [
        tirx.transform.FlattenBuffer(),
        tirx.transform.VectorizeLoop(),
        tirx.transform.AnnotateEntryFunc(),
        tirx.transform.SplitHostDevice(),
        tirx.transform.MakePackedAPI(),
        tirx.transform.BF16StorageLegalize(),
    ]
    return (
        tvm.ir.transform.Sequential(passes),
        compilation_pipeline.finalize_host_passes,
        compilation_pipeline.finalize_device_passes,
    )


compilation_pipeline.register_tir_pipeline(_PIPELINE, _pipeline)


class BuildError(RuntimeError):
    """The C++ compiler is missing or refused the launcher."""


def cpu_target(mcpu=None):
    """The LLVM target for `mcpu`: None is this machine's CPU, see MCPU_ALIASES for the other short names."""
    return tvm.target.Target({"kind": "llvm", "mcpu": MCPU_ALIASES.get(mcpu, mcpu) or host_cpu()})


def host_cpu():
    return codegen.llvm_get_system_cpu()


def cpu_features(target):
    """Instruction sets (LLVM's names) that a library built for `target` may execute."""
    available = codegen.llvm_get_cpu_features(target)
    return tuple(name for name in _RELEVANT_FEATURES if name in available)


def vector_lanes(target):
    """fp32 lanes of a vector register: what the emitters take as `lanes`."""
    features = cpu_features(target)
    if "avx512f" in features:
        return 16
    return 8 if "avx2" in features else 4


def build_library(module, path, target, *, compiler=None):
    """Compile `module` (an IRModule of public PrimFuncs) for `target` and write the shared library to `path`.

    Returns the TVM module, whose `inspect_source("ll")` and `("asm")` show the generated code.
    """
    compiler = compiler or shutil.which("g++") or shutil.which("clang++") or shutil.which("c++")
    if compiler is None:
        raise BuildError("no C++ compiler found: install g++ or clang++, or pass compiler=")
    library = tvm.tirx.build(module, target=target, pipeline=_PIPELINE)
    with tempfile.TemporaryDirectory() as folder:
        kernels, exports = Path(folder, "kernels.o"), Path(folder, "exports.map")
        library.write_to_file(str(kernels), "o")
        exports.write_text(_EXPORTS)
        command = [compiler, "-shared", "-fPIC", "-O2", "-std=c++17", "-fvisibility=hidden"]
        command += [f"-I{include}" for include in _include_paths()]
        command += [str(LAUNCHER), str(kernels), f"-Wl,--version-script={exports}", "-Wl,-z,noexecstack"]
        command += ["-ldl", "-lpthread", "-lm", "-o", str(path)]
        try:
            result = subprocess.run(command, capture_output=True, text=True, check=False)
        except OSError as error:
            raise BuildError(f"the C++ compiler {compiler} does not start: {error}") from error
    if result.returncode != 0:
        raise BuildError(f"{' '.join(command)}\n{result.stderr}")
    return library


def _include_paths():
    return [libinfo.find_include_path(), libinfo.find_dlpack_include_path()]
