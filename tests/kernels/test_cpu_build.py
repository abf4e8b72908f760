"""The built library: other vector widths and CPUs, and life in processes with and without torch and TVM."""

import ctypes
import errno
import platform
import subprocess
import sys
from dataclasses import fields

import pytest
import torch

from circuitgraph.artifact import machine_features
from circuitgraph.errors import BuildError, Location, ScheduleError
from circuitgraph.kernels import register_kernels
from circuitgraph.kernels.base import KERNELS, make_params
from circuitgraph.kernels.cpu import attention, build, linear, rows, top1
from circuitgraph.kernels.cpu import vector as v
from tests.kernels.cpu_harness import assert_close, compile_cases, declare, poisoned, random

# Runs in a process of its own: {setup} decides what is loaded before the library.
SCRIPT = """
import sys, threading
{setup}
import numpy, tvm_ffi
assert tuple(sys.modules.get(name) is not None for name in ("torch", "tvm")) == {loaded}
library = tvm_ffi.load_module(sys.argv[1])
x = numpy.random.default_rng(0).standard_normal((5, 77)).astype("float32")
w = numpy.random.default_rng(1).standard_normal((300, 77)).astype("float32")
def check():
    y = numpy.full((5, 300), numpy.nan, "float32")
    library["linear"](*(tvm_ffi.from_dlpack(a) for a in (x, w, y)))
    numpy.testing.assert_allclose(y, x @ w.T, rtol=1e-4, atol=1e-4)
for threads in (0, 1, 3, 2):
    shared = library["circuitgraph_init"](threads)
    assert shared == {shared}, shared
    for _ in range(50):
        check()
callers = [threading.Thread(target=lambda: [check() for _ in range(50)]) for _ in range(3)]
for caller in callers: caller.start()
for caller in callers: caller.join()
print("done")
"""


def emit_linear(lanes):
    x, w, y = declare("x", (5, 77), "float32"), declare("w", (300, 77), "float32"), declare("y", (5, 300), "float32")
    project = linear.Projection((w,), lambda row, column, width, s: v.store(y, [row, column], s[0], width))
    linear.emit_linear(x, [project], n=5, lanes=lanes)


def emit_everything(lanes):
    """A linear with a gate, a norm, an attention and a head after each other, in bf16."""
    x, norm = declare("x", (3, 40), "float32"), declare("norm", (40,), "bfloat16")
    gate, up = declare("gate", (52, 40), "bfloat16"), declare("up", (52, 40), "bfloat16")
    head, cache = declare("head", (200, 52), "bfloat16"), declare("cache", (4, 2, 16, 20), "bfloat16")
    table, index = declare("table", (1, 4), "int32"), declare("index", (3,), "int32")
    start, length = declare("start", (1,), "int32"), declare("length", (3,), "int32")
    normed, middle = declare("normed", (3, 40), "float32"), declare("middle", (3, 52), "float32")
    token, logprob = declare("token", (3,), "int32"), declare("logprob", (3,), "float32")
    best, ids, total = (declare(n, (4, 3), d) for n, d in (("b", "float32"), ("i", "int32"), ("t", "float32")))
    query, out = declare("query", (3, 4, 20), "float32"), declare("out", (3, 4, 20), "float32")

    def gated(row, column, width, sums):
        v.store(middle, [row, column], v.silu(sums[0], width) * sums[1], width)

    rows.emit_rms_norm(x, norm, normed, eps=1e-6, lanes=lanes)
    linear.emit_linear(normed, [linear.Projection((gate, up), gated)], n=3, lanes=lanes)
    scratch = top1.Top1Scratch(best, ids, total)
    top1.emit_linear_top1(middle, head, token, logprob, scratch, n=3, lanes=lanes, task_columns=64)
    attention.emit_attention(query, cache, cache, table, index, start, length, out, n=3, lanes=lanes)


@pytest.mark.parametrize(("mcpu", "lanes"), [("portable", None), ("avx2", 16), (None, 1)])
def test_other_vector_widths(tmp_path, mcpu, lanes):
    """16 lanes is what an AVX-512 machine gets; here LLVM splits them."""
    if mcpu == "avx2" and "avx2" not in build.cpu_features(build.cpu_target()):
        pytest.skip("this CPU has no AVX2")
    library = compile_cases({"everything": emit_everything}, tmp_path, mcpu, lanes)
    x, norm = random((3, 40), seed=1), random((40,), "bfloat16", 2)
    gate, up, head = (random(shape, "bfloat16", i) for i, shape in enumerate(((52, 40), (52, 40), (200, 52)), 3))
    cache, query = random((4, 2, 16, 20), "bfloat16", 6), random((3, 4, 20), seed=7)
    table, index = torch.tensor([[2, 0, 3, 1]], dtype=torch.int32), torch.zeros(3, dtype=torch.int32)
    start, length = torch.tensor([3], dtype=torch.int32), torch.tensor([61, 4, 0], dtype=torch.int32)
    token, logprob, out = poisoned((3,), "int32"), poisoned((3,)), poisoned((3, 4, 20))
    scratch = poisoned((4, 3)), poisoned((4, 3), "int32"), poisoned((4, 3))
    library["everything"](
        x, norm, gate, up, head, cache, table, index, start, length, poisoned((3, 40)), poisoned((3, 52)),
        token, logprob, *scratch, query, out,
    )  # fmt: skip
    h = x.double() * (x.double().pow(2).mean(-1, keepdim=True) + 1e-6).rsqrt() * norm.double()
    h = torch.nn.functional.silu(h @ gate.double().T) * (h @ up.double().T)
    expected = torch.log_softmax(h @ head.double().T, -1).max(-1)
    assert token.tolist() == expected.indices.tolist()
    assert_close(logprob, expected.values)
    rows_of_sequence = cache.double()[table[0].long()].transpose(0, 1).reshape(2, 64, 20)
    for i, visible in enumerate(length.tolist()):
        keys = rows_of_sequence[:, 3:visible].repeat_interleave(2, 0)
        weights = torch.softmax(torch.einsum("hd,hrd->hr", query[i].double(), keys) / 20**0.5, -1)
        assert_close(out[i], torch.einsum("hr,hrd->hd", weights, keys))


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    folder = tmp_path_factory.mktemp("build")
    compile_cases({"linear": emit_linear}, folder)
    return folder / "kernels.so"


@pytest.mark.parametrize(
    ("setup", "loaded", "shared"),
    [
        ('sys.modules["torch"] = None', (False, False), False),
        ("import torch", (True, False), True),
        ("import tvm, torch", (True, True), True),
    ],
    ids=["bare", "torch", "torch-and-tvm"],
)
def test_runs_in_a_process_of_its_own(path, setup, loaded, shared):
    script = SCRIPT.format(setup=setup, loaded=loaded, shared=shared)
    done = subprocess.run([sys.executable, "-c", script, str(path)], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "done\n"


def test_tvm_runtime_cannot_reach_the_launcher(path):
    library = ctypes.CDLL(str(path))
    assert hasattr(library, "__tvm_ffi_linear")
    assert not hasattr(library, "__TVMBackendParallelLaunch")


def test_wrong_arguments_are_refused(path):
    import tvm_ffi

    library = tvm_ffi.load_module(str(path))
    with pytest.raises(TypeError, match="circuitgraph_init expects"):
        library["circuitgraph_init"](-1)
    with pytest.raises(ValueError, match=r"Mismatched x\.strides"):  # how TVM words a wrong last axis
        library["linear"](torch.zeros(5, 76), torch.zeros(300, 77), torch.zeros(5, 300))
    with pytest.raises(ValueError, match="compact"):
        library["linear"](torch.zeros(77, 5).T, torch.zeros(300, 77), torch.zeros(5, 300))
    with pytest.raises((ValueError, TypeError), match="dtype"):
        library["linear"](torch.zeros(5, 77).double(), torch.zeros(300, 77), torch.zeros(5, 300))


def test_a_missing_compiler_is_named(tmp_path, monkeypatch):
    with pytest.raises(BuildError, match="/nowhere/gcc: the C compiler does not start"):
        compile_cases({"linear": emit_linear}, tmp_path, compiler="/nowhere/gcc")
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CC", raising=False)
    with pytest.raises(BuildError, match=r"no C compiler found; expected gcc, cc or clang on PATH. Install gcc"):
        build.find_compiler()
    monkeypatch.setenv("CC", "ccache gcc")
    assert build.find_compiler() == "ccache gcc"


def test_a_failing_compiler_is_quoted(tmp_path):
    with pytest.raises(BuildError, match=r"(?s)fails with status 1.*no-such-option"):
        compile_cases({"linear": emit_linear}, tmp_path, compiler="gcc --no-such-option")


def test_a_disk_that_cannot_be_written_is_named(tmp_path, monkeypatch):
    def full(*args, **kwargs):
        raise OSError(errno.ENOSPC, "No space left on device", str(tmp_path))

    monkeypatch.setattr(build.tempfile, "TemporaryDirectory", full)
    with pytest.raises(BuildError, match=r"cannot be written.*No space left") as caught:
        compile_cases({"linear": emit_linear}, tmp_path)
    assert caught.value.faults[0].where == str(tmp_path)


def test_plain_gcc_builds(path):
    """`gcc` without g++ is what the README promises: nothing needs the C++ runtime."""
    needed = subprocess.run(["readelf", "-d", str(path)], capture_output=True, text=True, check=True).stdout
    assert "libstdc++" not in needed
    assert "libgcc_s" not in needed


@pytest.mark.parametrize(("mcpu", "says"), [("nonsense", "no target 'cpu:nonsense'"), ("znver33", "Did you mean 'znver3'"),
                                            ("avx51", "Did you mean 'avx512'"), ("i486", "expected a 64-bit CPU")])  # fmt: skip
def test_unknown_cpus_are_refused(mcpu, says):
    if platform.machine() != "x86_64":
        pytest.skip("names of x86 CPUs")
    with pytest.raises(BuildError, match=says):
        build.cpu_target(mcpu)


@pytest.mark.skipif(platform.machine() != "x86_64", reason="instruction sets of x86")
def test_every_instruction_set_is_recorded_by_its_kernel_name():
    flags = build.cpu_flags(build.cpu_target("sapphirerapids"))
    assert {"avx512_fp16", "avx512_bf16", "avx512vbmi", "avx512_vnni", "bmi1", "bmi2", "movbe", "abm", "sse4.2"} <= set(flags)
    newest = build.cpu_target("diamondrapids")
    assert not build._llvm_features(newest) & set(build._UNCHECKED)
    assert build.vector_lanes(newest) == 16
    assert set(build.cpu_flags(build.cpu_target())) <= machine_features()
    assert set(build.cpu_flags(build.cpu_target("portable"))) <= machine_features()


@pytest.mark.skipif(platform.machine() != "x86_64", reason="instruction sets of x86")
def test_what_a_virtual_machine_hides_is_not_used(monkeypatch):
    monkeypatch.setattr(build, "host_cpu", lambda: "sapphirerapids")
    shown = frozenset(build.cpu_flags(build.cpu_target("avx2"))) - {"movbe"}
    monkeypatch.setattr(build, "machine_features", lambda: shown)
    target = build.cpu_target()
    assert set(build.cpu_flags(target)) <= shown
    assert build.vector_lanes(target) == 8
    assert "movbe" in build.cpu_features(build.cpu_target("sapphirerapids"))  # for another machine, nothing is dropped


@pytest.mark.parametrize(
    ("kernel", "given"),
    [
        ("cpu.linear", {"block": 0}),
        ("cpu.linear", {"block": -1}),
        ("cpu.linear", {"tile_columns": -1}),
        ("cpu.linear", {"unroll": 10**9}),
        ("cpu.attention", {"splits": -1}),
        ("cpu.attention", {"split_rows": 0}),
        ("cpu.linear_top1", {"task_columns": 0}),
        ("cpu.linear_top1", {"block": 0}),
    ],
)
def test_parameters_out_of_bounds_are_refused(kernel, given):
    register_kernels("cpu")
    (name,) = given
    with pytest.raises(ScheduleError, match=rf"cpu.yaml:7: parameter '{name}' is out of bounds; expected \d+ to \d+; got"):
        make_params(KERNELS[kernel], given, Location("cpu.yaml", 7))


def test_every_cpu_number_has_bounds():
    register_kernels("cpu")
    for template in KERNELS.values():
        if template.name.startswith("cpu."):
            assert make_params(template, {}, None) == template.Params()
            assert all(item.metadata for item in fields(template.Params))
