"""CUDA C++ compiled at run time by the NVRTC that torch's CUDA wheels bring: for kernels that measure, not for products.

`torch.cuda._compile_kernel` does the same but asks for a CUDA toolkit's headers, which a serving box does not have. Only
the stable C interfaces of NVRTC and the driver are used.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from ..errors import BuildError, Fault


class Kernel:
    """A compiled `extern "C"` kernel. Called with a grid, a block, and tensors and integers (64 bits each) as arguments."""

    def __init__(self, cubin: bytes, name: str):
        self._driver = ctypes.CDLL("libcuda.so.1")
        torch.zeros(1, device="cuda")  # there is a context from here on
        self._module, self._function = ctypes.c_void_p(), ctypes.c_void_p()
        self._check(self._driver.cuModuleLoadData(ctypes.byref(self._module), cubin))
        self._check(self._driver.cuModuleGetFunction(ctypes.byref(self._function), self._module, name.encode()))

    def __call__(self, grid: int, block: int, *arguments: torch.Tensor | int) -> None:
        """Launch on torch's current stream."""
        values = [
            ctypes.c_uint64(argument.data_ptr() if isinstance(argument, torch.Tensor) else argument) for argument in arguments
        ]
        pointers = (ctypes.c_void_p * len(values))(*(ctypes.addressof(value) for value in values))
        sizes = [ctypes.c_uint(size) for size in (grid, 1, 1, block, 1, 1, 0)]
        stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
        self._check(self._driver.cuLaunchKernel(self._function, *sizes, stream, pointers, None))

    def _check(self, status: int) -> None:
        if status:
            text = ctypes.c_char_p()
            self._driver.cuGetErrorString(status, ctypes.byref(text))
            raise BuildError(Fault("the CUDA driver refused", got=(text.value or b"unknown error").decode()))


def compile_kernel(source: str, name: str, *, arch: str, defines: Sequence[str] = ()) -> bytes:
    """Machine code of `source` for `arch` (sm_90). Needs no GPU.

    Raises:
        BuildError: NVRTC is not found, or it refuses the source.
    """
    nvrtc = _library()
    program = ctypes.c_void_p()
    _check(nvrtc, nvrtc.nvrtcCreateProgram(ctypes.byref(program), source.encode(), f"{name}.cu".encode(), 0, None, None))
    options = [f"--gpu-architecture={arch}", *(f"-D{define}" for define in defines)]
    given = (ctypes.c_char_p * len(options))(*(option.encode() for option in options))
    status = nvrtc.nvrtcCompileProgram(program, len(options), given)
    if status:
        raise BuildError(Fault("NVRTC refuses the kernel", where=name, got=_text(nvrtc, program)))
    size = ctypes.c_size_t()
    _check(nvrtc, nvrtc.nvrtcGetCUBINSize(program, ctypes.byref(size)))
    cubin = ctypes.create_string_buffer(size.value)
    _check(nvrtc, nvrtc.nvrtcGetCUBIN(program, cubin))
    nvrtc.nvrtcDestroyProgram(ctypes.byref(program))
    return cubin.raw


def _text(nvrtc: ctypes.CDLL, program: ctypes.c_void_p) -> str:
    size = ctypes.c_size_t()
    nvrtc.nvrtcGetProgramLogSize(program, ctypes.byref(size))
    log = ctypes.create_string_buffer(size.value)
    nvrtc.nvrtcGetProgramLog(program, log)
    return log.value.decode(errors="replace")


def _check(nvrtc: ctypes.CDLL, status: int) -> None:
    if status:
        nvrtc.nvrtcGetErrorString.restype = ctypes.c_char_p
        raise BuildError(Fault("NVRTC failed", got=nvrtc.nvrtcGetErrorString(status).decode()))


def library_names() -> list[str]:
    """Where NVRTC may be: known to the loader, or in the wheels beside torch's."""
    major = str(torch.version.cuda or "13").partition(".")[0]
    packages = Path(torch.__file__).parents[1]
    found: list[Any] = []
    for pattern in (f"nvidia/*/lib/libnvrtc.so.{major}*", "torch/lib/libnvrtc*.so*"):
        found += [path for path in sorted(packages.glob(pattern)) if "builtins" not in path.name]
    return [f"libnvrtc.so.{major}", *map(str, found), "libnvrtc.so"]


def _library() -> ctypes.CDLL:
    for name in library_names():
        try:
            return ctypes.CDLL(name)
        except OSError:
            continue
    hint = "pip install nvidia-cuda-nvrtc, or a CUDA build of torch, which brings it."
    raise BuildError(Fault("NVRTC is not found", expected=" or ".join(library_names()), hint=hint))
