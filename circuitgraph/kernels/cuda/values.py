"""Typed access to memory from device code, and small arithmetic: what every CUDA emitter is written with.

Loads and stores of activations are spelled in PTX on purpose. Kernel parameters are `__restrict__`, so a plain read may
become a read through the constant cache, which must not be used for data that an earlier kernel of the chain is still
writing; and two views of the workspace arrive as two such pointers.
"""

from __future__ import annotations

from typing import Any

from tvm.script.ir_builder import IRBuilder
from tvm.tirx.script import builder as T

COPY = "cp.async.cg.shared.global.L2::128B"
"""The hint has L2 fetch whole lines of 128 bytes: worth 8 % of bandwidth on an H200."""

COPY_ONCE = "cp.async.cg.shared.global.L2::cache_hint.L2::128B"
"""Of what nobody reads again soon, such as weights and cache rows, with `Thread.once` as the last operand."""

COPY_WORD = "cp.async.ca.shared.global.L2::128B"
"""Of 4 or 8 bytes. It takes as long as one of 16."""

COPY_WORD_ONCE = "cp.async.ca.shared.global.L2::cache_hint.L2::128B"

LOAD = "ldmatrix.sync.aligned.m8n8.x4.shared.b16"
LOG2_E = 1.4426950408889634
LOWEST = -1e30
"""Stands for minus infinity where a difference of two of them must not become NaN."""


def do(call: Any) -> None:
    """Emit a call for its effect."""
    T.evaluate(call)


NAMES = {"float32": "f", "int32": "i", "int64": "wide", "uint16": "half", "uint32": "word", "uint64": "address"}


def named(name: str, buffer: Any) -> Any:
    """The buffer, under this name in the generated text."""
    IRBuilder.name("".join(letter if letter.isalnum() else "_" for letter in name).strip("_") or "value", buffer)
    return buffer


def register(dtype: str, count: int = 1, name: str = "") -> Any:
    """`count` mutable locals; with constant indices the compiler keeps them in registers. `name`: in the generated text."""
    return named(name or NAMES[dtype], T.alloc_local((count,), dtype))


def put(target: Any, value: Any, index: int = 0) -> None:
    T.buffer_store(target, value, [index])


def hold(value: Any, dtype: str = "float32", name: str = "") -> Any:
    """A value computed once, here."""
    kept = register(dtype, name=name)
    put(kept, value)
    return kept[0]


def dtype_of(buffer: Any) -> str:
    return str(buffer.dtype)


def load(buffer: Any, indices: list[Any], *, constant: bool = False) -> Any:
    """One float element as fp32. `constant`: nothing writes it while the program runs (weights, tables)."""
    path = "ld.global.nc" if constant else "ld.global"
    result = register("float32")
    if dtype_of(buffer) == "float32":
        do(T.ptx[f"{path}.f32"](result[0], buffer.ptr_to(indices)))
        return result[0]
    bits = register("uint16")
    do(T.ptx[f"{path}.b16"](bits[0], buffer.ptr_to(indices)))
    if dtype_of(buffer) == "bfloat16":
        put(result, widened(T.Cast("uint32", bits[0])))
    else:
        do(T.ptx["cvt.f32.f16"](result[0], bits[0]))
    return result[0]


def load_int(buffer: Any, indices: list[Any], *, constant: bool = False) -> Any:
    """One integer as int32; int64 buffers hold small ones."""
    path, dtype = "ld.global.nc" if constant else "ld.global", dtype_of(buffer)
    result = register(dtype)
    do(T.ptx[f"{path}.s{dtype.removeprefix('int')}"](result[0], buffer.ptr_to(indices)))
    return result[0] if dtype == "int32" else hold(T.Cast("int32", result[0]), "int32")


def store(buffer: Any, indices: list[Any], value: Any) -> None:
    """Store an fp32 value, rounded to nearest even; int32 buffers take int32 values."""
    dtype = dtype_of(buffer)
    if dtype == "int32":
        do(T.ptx["st.global.s32"](buffer.ptr_to(indices), value))
    elif dtype == "float32":
        do(T.ptx["st.global.f32"](buffer.ptr_to(indices), value))
    else:
        do(T.ptx["st.global.b16"](buffer.ptr_to(indices), rounded(dtype, value)))


def store_at(like: Any, address: Any, value: Any) -> None:
    """Store an fp32 value at an address (uint64), rounded to the 16 bits that a buffer's elements have."""
    do(T.ptx["st.global.b16"](T.reinterpret("handle", address), rounded(dtype_of(like), value)))


def rounded(dtype: str, value: Any) -> Any:
    """An fp32 value as the bits of a bf16 or f16."""
    bits = register("uint16")
    do(T.ptx[f"cvt.rn.{'bf16' if dtype == 'bfloat16' else 'f16'}.f32"](bits[0], value))
    return bits[0]


def widened(word: Any) -> Any:
    """bf16 in the low half of a uint32, as fp32."""
    return T.cuda.uint_as_float(T.shift_left(word, T.uint32(16)))


def wide(index: Any) -> Any:
    """A 64-bit index: a vocabulary times a hidden size, or a cache, may exceed 2^31 elements."""
    return T.Cast("int64", index)


def zeros(target: Any, count: int, value: float = 0.0) -> None:
    for index in range(count):
        put(target, T.float32(value), index)


def from_lane_beside(part: Any, step: int) -> Any:
    """The first element of a register in the lane whose number differs by the bit `step`."""
    return hold(T.cuda.__shfl_xor_sync(T.uint32(0xFFFFFFFF), part[0], step, 32), dtype_of(part))


def from_lane(value: Any, lane: Any, dtype: str) -> Any:
    """A value of another lane of the warp."""
    return hold(T.cuda.__shfl_sync(T.uint32(0xFFFFFFFF), value, lane, 32), dtype)


def from_lane_before(value: Any, step: int, dtype: str) -> Any:
    """A value of the lane `step` before this one; the first lanes get their own."""
    return hold(T.cuda.__shfl_up_sync(T.uint32(0xFFFFFFFF), value, step, 32), dtype)


def sigmoid(x: Any) -> Any:
    return hold(T.float32(1) / (T.float32(1) + T.exp(T.float32(0) - x)))


def gate(x: Any) -> Any:
    """A sigmoid whose division is one instruction and rounds to the last bit but one: elements after each other cost less."""
    result, below = register("float32"), hold(T.float32(1) + T.exp(T.float32(0) - x))
    do(T.ptx["rcp.approx.ftz.f32"](result[0], below))
    return result[0]


def silu(x: Any) -> Any:
    return hold(x * sigmoid(x))


RELEASE_SHARED = """
__forceinline__ __device__ void circuitgraph_release_shared() {
  asm volatile("fence.release.sync_restrict::shared::cta.cluster;" ::: "memory");
}
"""


def cluster_sync(parts: int) -> None:
    """All thread blocks of a cluster of so many, or the one block, are here."""
    if parts == 1:
        do(T.cuda.cta_sync())
    else:
        # What others read is in shared memory: a release of all memory would wait for whatever is on its way to L2, 1 us.
        do(T.cuda.func_call("circuitgraph_release_shared", source_code=RELEASE_SHARED))
        do(T.ptx.barrier.cluster.arrive.relaxed.aligned())
        do(T.ptx.barrier.cluster.wait.acquire.aligned())
