"""The CPU backend: plans to TIR, TIR through LLVM to one shared library."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import tvm
from tvm.script.ir_builder import IRBuilder
from tvm.script.ir_builder import ir as I
from tvm.tirx.script import builder as T

from ...circuit.ir import Value
from ...circuit.types import DTYPE_BITS, TensorType
from ...lower import argument_values
from ...plan.ir import Group, Plan, Scratch
from ...target import Built, Target
from ..base import KERNELS, make_params
from . import build
from .rows import emit_copy

TIR_DTYPES = {"f32": "float32", "bf16": "bfloat16", "f16": "float16", "i32": "int32", "i64": "int64", "u8": "uint8"}


class CpuBackend:
    """See `target.Backend`."""

    def __init__(self, target: Target):
        self.tvm_target = build.cpu_target(target.arch or None)
        self.lanes = build.vector_lanes(self.tvm_target)

    def lower(self, plans: list[Plan]) -> tvm.IRModule:
        with IRBuilder() as builder, I.ir_module():
            for plan in plans:
                _emit_function(plan, self.lanes)
        return builder.get()

    def build(self, module: tvm.IRModule, folder: Path) -> Built:
        library = folder / "kernels.so"
        llvm, assembly = build.build_library(module, library, self.tvm_target)
        return Built(library, {"ll": _stable(llvm), "s": assembly})

    def script(self, module: tvm.IRModule, plan: Plan) -> str:
        return module[plan.symbol].script()

    def description(self) -> dict[str, Any]:
        return {
            "kind": "cpu",
            "mcpu": str(self.tvm_target.attrs["mcpu"]),
            "features": list(build.cpu_flags(self.tvm_target)),
            "lanes": self.lanes,
        }


def _stable(llvm: str) -> str:
    """LLVM IR whose alias-analysis tags, which TVM names by addresses, are numbered: equal input, equal text."""
    numbers: dict[str, int] = {}
    # Accesses at constant places have a range behind the buffer: "0x7f0c.w64.b128".
    return re.sub(r'!"(0x[0-9a-f]+)(?=[".])', lambda tag: f'!"buffer {numbers.setdefault(tag[1], len(numbers))}', llvm)


def make_backend(target: Target) -> CpuBackend:
    """What `target.backend_of` calls."""
    return CpuBackend(target)


def _emit_function(plan: Plan, lanes: int) -> None:
    with T.prim_func():
        T.func_name(plan.symbol)
        env = CpuEnvironment(plan, lanes)
        for index, group in enumerate(plan.groups):
            choice = plan.choices[index]
            template = KERNELS[choice.kernel]
            env.enter(group)
            template.emit(env, group, make_params(template, dict(choice.params), plan.symbol))
        env.copy_shared_outputs()


class CpuEnvironment:
    """Arguments are the caller's tensors; the rest are views of the workspace argument.

    Values, scratch, outputs and the workspace are looked up apart: programs may use any name.
    """

    def __init__(self, plan: Plan, lanes: int):
        self.plan = plan
        self.lanes = lanes
        self.group: Group | None = None
        self._axes: dict[str, Any] = {}
        self._names: set[str] = set()
        self._values: dict[str, Any] = {}
        self._scratch: dict[str, Any] = {}  # by slot: what is inside one group
        self._outputs: dict[str, Any] = {}
        self._output_of: dict[str, str] = {}
        for role, value in argument_values(plan):
            buffer = self._argument(value, role)
            if role == "workspace":
                self._workspace = buffer
            elif role == "output":
                # The first output of a value's bytes is where they live; further ones are copied at the end.
                root = plan.storage(dict(plan.circuit.outputs)[value.name])
                if root not in self._values:
                    self._values[root] = self._reshaped(buffer, plan.circuit.types[root])
                    self._output_of[root] = value.name
                self._outputs[value.name] = buffer
            else:
                self._values[value.name] = buffer

    def _argument(self, value: Value, role: str) -> Any:
        assert isinstance(value.type, TensorType)
        shape = [self._axis(dim) for dim in value.type.shape]
        name = self._fresh(value.name.replace(".", "_") + ("_out" if role == "output" else ""))
        # Borrowed tensors lie where a checkpoint file put them: only their element's alignment is certain.
        alignment = 64 if role == "workspace" else DTYPE_BITS[value.type.dtype] // 8
        buffer = T.buffer(shape, TIR_DTYPES[value.type.dtype], align=alignment, buffer_name=name)
        return T.arg(name, buffer)

    def _fresh(self, name: str) -> str:
        """A parameter name that no other has: `a.b` and `a_b` are two values."""
        fresh, count = name, 1
        while fresh in self._names:
            count += 1
            fresh = f"{name}_{count}"
        self._names.add(fresh)
        return fresh

    def _axis(self, dim: int | str) -> Any:
        if isinstance(dim, int):
            return dim
        if dim not in self._axes:
            self._axes[dim] = tvm.tirx.Var(dim, "int32")
        return self._axes[dim]

    def enter(self, group: Group) -> None:
        """Templates ask for this group's scratch from now on."""
        self.group = group

    def buffer(self, name: str) -> Any:
        """See `base.Environment`."""
        assert self.group is not None
        root = self.plan.storage(name)
        inner = f"{self.group.name}/{root}"
        if inner in self.plan.slots:
            buffer = self._inside(inner, root)
        else:
            if root not in self._values and root in self.plan.slots:
                self._values[root] = self._workspace_view(root, self.plan.circuit.types[root])
            buffer = self._values.get(root)
        if buffer is None:
            raise KeyError(f"{self.plan.symbol} {self.group.name}: '{name}' has no storage")
        return buffer if root == name else self._reshaped(buffer, self.plan.circuit.types[name])

    def scratch(self, name: str) -> Any:
        """See `base.Environment`."""
        assert self.group is not None
        item = f"{Scratch.OWN}{name}"
        return self._inside(f"{self.group.name}/{item}", item)

    def _inside(self, slot: str, item: str) -> Any:
        if slot not in self._scratch:
            index = next(i for i, group in enumerate(self.plan.groups) if group is self.group)
            item_type = next(scratch.type for scratch in self.plan.scratch[index] if scratch.name == item)
            self._scratch[slot] = self._workspace_view(slot, item_type)
        return self._scratch[slot]

    def _workspace_view(self, slot: str, value_type: Any) -> Any:
        assert isinstance(value_type, TensorType)
        dtype, itemsize = TIR_DTYPES[value_type.dtype], DTYPE_BITS[value_type.dtype] // 8
        offset = self.plan.slots[slot].offset // itemsize
        return T.decl_buffer(list(value_type.shape), dtype, data=self._workspace.data, elem_offset=offset)

    def _reshaped(self, buffer: Any, value_type: Any) -> Any:
        shape = list(value_type.shape)
        if list(buffer.shape) == shape:
            return buffer
        return T.decl_buffer(shape, str(buffer.dtype), data=buffer.data, elem_offset=buffer.elem_offset)

    def flat(self, name: str) -> Any:
        """The buffer of `name` as [rows, columns]."""
        buffer = self.buffer(name)
        rows, *rest = [int(dim) for dim in buffer.shape]
        columns = 1
        for dim in rest:
            columns *= dim
        return self._reshaped(buffer, TensorType("f32", (rows, columns)))

    def layer_cache(self, name: str, layer: int) -> Any:
        """One layer of a state part as [blocks, heads, block_size, dim]."""
        cache = self._values[name]
        _, blocks, heads, block_size, dim = cache.shape
        offset = layer * blocks * heads * block_size * dim if layer else 0
        return T.decl_buffer((blocks, heads, block_size, dim), str(cache.dtype), data=cache.data, elem_offset=offset)

    def copy_shared_outputs(self) -> None:
        """Outputs whose bytes live elsewhere: in an input, or in another output."""
        for public, value in self.plan.circuit.outputs:
            root = self.plan.storage(value)
            if self._output_of.get(root) != public:
                source, target = self._values[root], self._outputs[public]
                emit_copy(self._reshaped(source, self.plan.circuit.types[value]), target, lanes=self.lanes)
