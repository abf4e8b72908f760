"""Compile many small PrimFuncs around emitters into one library, and call them with torch tensors."""

import torch
import tvm_ffi
from tvm.script.ir_builder import IRBuilder
from tvm.script.ir_builder import ir as I
from tvm.tirx.script import builder as T

from circuitgraph.kernels.cpu import build

TOLERANCE = {"float32": 2e-5, "float16": 2e-3, "bfloat16": 1.6e-2}


def name(kind, *parts):
    """Of a case's function."""
    return "_".join([kind, *map(str, parts)])


def declare(name, shape, dtype):
    """A PrimFunc argument that may have any element alignment, as a borrowed checkpoint tensor may."""
    size = torch.empty(0, dtype=getattr(torch, dtype)).element_size()
    return T.arg(name, T.buffer(shape, dtype, align=size, buffer_name=name))


def compile_cases(cases, folder, mcpu=None, lanes=None, compiler=None):
    """cases: {name: emit(lanes)}; `emit` declares its arguments and calls emitters. Returns the loaded library."""
    target = build.cpu_target(mcpu)
    lanes = lanes or build.vector_lanes(target)
    with IRBuilder() as builder, I.ir_module():
        for name, emit in cases.items():
            with T.prim_func():
                T.func_name(name)
                emit(lanes)
    path = folder / "kernels.so"
    build.build_library(builder.get(), path, target, compiler=compiler)
    library = tvm_ffi.load_module(str(path))
    assert library["circuitgraph_init"](torch.get_num_threads()) is True
    return library


def poisoned(shape, dtype="float32"):
    """An output full of NaN (or of a large negative number), so that what a kernel skips is seen."""
    dtype = getattr(torch, dtype)
    return torch.full(shape, float("nan") if dtype.is_floating_point else -(2**30), dtype=dtype)


def random(shape, dtype="float32", seed=0, scale=1.0):
    generator = torch.Generator().manual_seed(seed * 7919 + sum(shape))
    return (torch.randn(shape, generator=generator) * scale).to(getattr(torch, dtype))


def assert_close(actual, expected, dtype="float32", factor=1.0):
    """Elementwise, relative to the size of the values compared."""
    expected = expected.double()
    scale = expected.abs().mean().clamp_min(1e-3).item()
    tolerance = TOLERANCE[dtype] * factor
    torch.testing.assert_close(actual.double(), expected, rtol=tolerance, atol=tolerance * scale)
