"""The CUDA backend: plans to TIR, TIR to CUDA C++, and that through nvcc to one shared library."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import tvm
from tvm.script.ir_builder import IRBuilder
from tvm.script.ir_builder import ir as I
from tvm.tirx.script import builder as T

from ...plan.ir import Plan
from ...target import Built, Target
from ..base import KERNELS, make_params
from . import build, templates
from .architectures import DEFAULT, architecture, architecture_of
from .chain import CHAIN_FUNCTIONS
from .environment import CudaEnvironment
from .nvcc import resources


class CudaBackend:
    """See `target.Backend`."""

    def __init__(self, target: Target):
        self.arch = architecture(target.arch or DEFAULT)
        self.tvm_target = build.cuda_target(self.arch)

    def lower(self, plans: list[Plan]) -> tvm.IRModule:
        with IRBuilder() as builder, I.ir_module():
            for plan in plans:
                self._emit_function(plan)
            for name, emit in CHAIN_FUNCTIONS.items():
                with self._function(name):
                    emit(self.arch.overlap)
        return builder.get()

    @contextmanager
    def _function(self, name: str) -> Iterator[None]:
        """A host function, which launches every kernel that is emitted inside."""
        flags = ["tirx.use_programtic_dependent_launch"] if self.arch.overlap else []  # TVM's spelling
        with T.prim_func():
            T.func_name(name)
            T.func_attr({"tirx.kernel_launch_params": ["blockIdx.x", "threadIdx.x", *flags, "tirx.use_dyn_shared_memory"]})
            yield

    def _emit_function(self, plan: Plan) -> None:
        assert architecture_of(plan) is self.arch, f"{plan.symbol} is planned for {plan.target}"
        with self._function(plan.symbol):
            env = CudaEnvironment(plan, overlap=self.arch.overlap, processors=self.arch.processors)
            for index, group in enumerate(plan.groups):
                choice = plan.choices[index]
                template = KERNELS[choice.kernel]
                env.enter(group)
                template.emit(env, group, make_params(template, dict(choice.params), plan.symbol))
            for source, target in env.shared_outputs():
                templates.emit_copy(env, source, target)

    def sources(self, module: tvm.IRModule) -> list[str]:
        """The generated CUDA C++, unit by unit; equal modules give equal text."""
        return build.sources(module, self.tvm_target)

    def build(self, module: tvm.IRModule, folder: Path) -> Built:
        library, sources, report = build.build_library(module, self.tvm_target, self.arch, folder)
        lines = [
            f"{kernel} {registers} registers, {spilled} B spilled" for kernel, (registers, spilled) in resources(report).items()
        ]
        texts = {f"{index}.cu": source for index, source in enumerate(sources)}
        return Built(library, {**texts, "resources.txt": "\n".join(sorted(lines)) + "\n"})

    def script(self, module: tvm.IRModule, plan: Plan) -> str:
        return module[plan.symbol].script()

    def description(self) -> dict[str, Any]:
        return {"kind": "cuda", "mcpu": self.arch.name, "features": []}


def make_backend(target: Target) -> CudaBackend:
    """What `target.backend_of` calls."""
    return CudaBackend(target)
