"""Build an IRModule of CPU PrimFuncs into one shared library that needs tvm-ffi and libc only."""

import os
import shlex
import shutil
import subprocess
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import tvm
from tvm import tirx
from tvm.target import codegen
from tvm.tirx import compilation_pipeline
from tvm_ffi import libinfo

from ...artifact.machine import machine_features
from ...errors import BuildError, Fault, did_you_mean

LEAST_SPACE = 64 << 20
LAUNCHER = Path(__file__).with_name("launcher.c")

# Names for `mcpu` beside LLVM's own. "portable" runs on every 64-bit server CPU, slowly; "avx2" on those since 2013.
MCPU_ALIASES = {"portable": "x86-64-v2", "avx2": "x86-64-v3", "avx512": "x86-64-v4"}

# x86 instruction sets that LLVM may use on its own, and what /proc/cpuinfo calls them where that is another name
# (sse4_1 and sse4_2 are read as LLVM writes them). All that the code may execute is recorded and checked before it
# is loaded.
_KERNEL_FLAGS = {
    "cmov": "cmov", "cx16": "cx16", "sahf": "lahf_lm", "popcnt": "popcnt", "lzcnt": "abm", "bmi": "bmi1", "bmi2": "bmi2",
    "tbm": "tbm", "movbe": "movbe", "adx": "adx", "prfchw": "3dnowprefetch",
    "sse3": "pni", "ssse3": "ssse3", "sse4.1": "sse4.1", "sse4.2": "sse4.2", "sse4a": "sse4a", "xop": "xop", "fma4": "fma4",
    "avx": "avx", "f16c": "f16c", "fma": "fma", "avx2": "avx2", "gfni": "gfni",
    "aes": "aes", "vaes": "vaes", "pclmul": "pclmulqdq", "vpclmulqdq": "vpclmulqdq", "sha": "sha_ni",
    "avx512f": "avx512f", "avx512bw": "avx512bw", "avx512cd": "avx512cd", "avx512dq": "avx512dq", "avx512vl": "avx512vl",
    "avx512ifma": "avx512ifma", "avx512vbmi": "avx512vbmi", "avx512vbmi2": "avx512_vbmi2", "avx512vnni": "avx512_vnni",
    "avx512bitalg": "avx512_bitalg", "avx512vpopcntdq": "avx512_vpopcntdq", "avx512bf16": "avx512_bf16",
    "avx512fp16": "avx512_fp16", "avx512vp2intersect": "avx512_vp2intersect", "avxvnni": "avx_vnni",
}  # fmt: skip

# Of newer CPUs, what Linux reports under no settled name: never used, as a loader could not check it.
_UNCHECKED = (
    "avx10.1", "avx10.2", "avxifma", "avxneconvert", "avxvnniint8", "avxvnniint16", "ccmp", "cmpccxadd", "egpr", "movdir64b",
    "movdiri", "movrs", "ndd", "nf", "ppx", "push2pop2", "zu",
)  # fmt: skip

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


def cpu_target(mcpu=None):
    """The LLVM target for `mcpu`: None is this machine's CPU, see MCPU_ALIASES for the other short names.

    Raises:
        BuildError: LLVM does not know the CPU, or it runs no 64-bit code.
    """
    name = MCPU_ALIASES.get(mcpu, mcpu) or host_cpu()
    plain = _target(name)
    if mcpu is not None:
        known = [str(cpu) for cpu in codegen.llvm_get_cpu_archlist(_target(host_cpu()))]
        if name not in known:
            raise BuildError(Fault(f"no target 'cpu:{mcpu}'", hint=did_you_mean(mcpu, [*known, *MCPU_ALIASES])))
    available = _llvm_features(plain)
    if "x87" in available and "64bit" not in available:
        raise BuildError(Fault(f"no target 'cpu:{mcpu}'", expected="a 64-bit CPU", got=name, hint="Try 'cpu:portable'."))
    off = [feature for feature in _UNCHECKED if feature in available]
    if mcpu is None:
        off += _masked(available, machine_features())
    return _target(name, off) if off else plain


def _target(name, off=()):
    attributes = {"kind": "llvm", "mcpu": name}
    if off:
        attributes["mattr"] = [f"-{feature}" for feature in off]
    return tvm.target.Target(attributes)


def _llvm_features(target):
    return frozenset(str(name) for name in codegen.llvm_get_cpu_features(target))


def _masked(available, flags):
    """What LLVM thinks this machine's CPU has and the kernel does not report: a virtual machine may hide it."""
    if flags is None or "x87" not in available:
        return []
    return [name for name, flag in _KERNEL_FLAGS.items() if name in available and flag not in flags]


def host_cpu():
    return codegen.llvm_get_system_cpu()


def cpu_features(target):
    """Instruction sets (LLVM's names) that a library built for `target` may execute."""
    available = _llvm_features(target)
    return tuple(name for name in _KERNEL_FLAGS if name in available)


def cpu_flags(target):
    """`cpu_features` by the names that `artifact.machine_features` gives them: what loading compares."""
    return tuple(_KERNEL_FLAGS[name] for name in cpu_features(target))


def vector_lanes(target):
    """fp32 lanes of a vector register: what the emitters take as `lanes`."""
    features = cpu_features(target)
    if "avx512f" in features:
        return 16
    return 8 if "avx2" in features else 4


def build_library(module, path, target, *, compiler=None):
    """Compile `module` (an IRModule of public PrimFuncs) for `target` and write the shared library to `path`.

    Every function is an object of its own, and threads compile them side by side: LLVM takes seconds for each.

    Returns:
        (LLVM IR, assembly): the generated code of all functions, in the order of their names.

    Raises:
        BuildError: TVM refuses the module, there is no C compiler, it fails, or the disk is full.
    """
    compiler = compiler or find_compiler()
    functions = sorted(module.functions.items(), key=lambda item: item[0].name_hint)
    try:
        with tempfile.TemporaryDirectory() as folder:
            _need_space(folder)
            exports = Path(folder, "exports.map")
            exports.write_text(_EXPORTS)
            objects = [Path(folder, f"{name.name_hint}.o") for name, _ in functions]

            def compile_one(name, function, file):
                try:
                    compiled = tvm.tirx.build(tvm.IRModule({name: function}), target=target, pipeline=_PIPELINE)
                except (RuntimeError, TypeError, ValueError) as problem:  # the kinds that TVM raises its errors as
                    raise BuildError(Fault(f"TVM cannot compile it: {problem}", where=name.name_hint)) from problem
                compiled.write_to_file(str(file), "o")
                return compiled.inspect_source("ll"), compiled.inspect_source("asm")

            with ThreadPoolExecutor(os.cpu_count()) as pool:
                texts = list(pool.map(compile_one, *zip(*functions, strict=True), objects))
            _link(compiler, objects, exports, path)
    except OSError as problem:
        where = problem.filename or tempfile.gettempdir()
        raise BuildError(Fault(f"the library cannot be written: {problem}", where=str(where))) from problem
    llvm, assembly = ("\n".join(parts) for parts in zip(*texts, strict=True))
    return llvm, assembly


def _need_space(folder):
    """LLVM ends the process when it cannot write an object, so a full disk is told beforehand."""
    free = shutil.disk_usage(folder).free
    if free < LEAST_SPACE:
        raise BuildError(
            Fault(
                "too little space to compile",
                where=folder,
                expected=f"{LEAST_SPACE >> 20} MiB",
                got=f"{free >> 20} MiB",
                hint="Set TMPDIR.",
            )
        )


def find_compiler():
    """The C compiler: $CC, else what there is.

    Raises:
        BuildError: there is none.
    """
    chosen = os.environ.get("CC")
    found = chosen or next(filter(None, map(shutil.which, ("gcc", "cc", "clang"))), None)
    if found is None:
        hint = "Install gcc, or set CC to a C compiler."
        raise BuildError(Fault("no C compiler found", expected="gcc, cc or clang on PATH", hint=hint))
    return found


def _link(compiler, objects, exports, path):
    command = [*shlex.split(compiler), "-shared", "-fPIC", "-O2", "-std=c11", "-fvisibility=hidden"]
    command += [f"-I{include}" for include in _include_paths()]
    command += [str(LAUNCHER), *map(str, objects), f"-Wl,--version-script={exports}", "-Wl,-z,noexecstack"]
    command += ["-ldl", "-lpthread", "-lm", "-o", str(path)]
    try:
        result = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError as problem:
        hint = "Install gcc, or set CC to a C compiler."
        raise BuildError(Fault(f"the C compiler does not start: {problem}", where=compiler, hint=hint)) from problem
    if result.returncode != 0:
        report = f"{shlex.join(command)}\n{result.stderr[-3000:]}"
        raise BuildError(Fault(f"the C compiler fails with status {result.returncode}", where=compiler, got=report))


def _include_paths():
    return [libinfo.find_include_path(), libinfo.find_dlpack_include_path()]
