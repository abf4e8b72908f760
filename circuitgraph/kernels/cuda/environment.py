"""What CUDA templates emit with: buffers by value name, and the frame of a kernel."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

import tvm
from tvm.tirx.script import builder as T

from ...circuit.ir import Value
from ...circuit.types import DTYPE_BITS, StateType, TensorType
from ...lower import argument_values
from ...plan.ir import Group, Plan, Scratch
from .values import do, named, register, wide

TIR_DTYPES = {"f32": "float32", "bf16": "bfloat16", "f16": "float16", "i32": "int32", "i64": "int64", "u8": "uint8"}


def int_equal(a: Any, b: Any) -> bool:
    """Are two dimensions the same number? Open axes are compared by identity elsewhere."""
    numbers = [int(dim) if isinstance(dim, int) or hasattr(dim, "value") else None for dim in (a, b)]
    return numbers[0] is not None and numbers[0] == numbers[1]


@dataclass(frozen=True)
class Thread:
    """Where a thread is in its grid. once: the policy of what is read once, for `COPY_ONCE`: it leaves L2 before all else."""

    block: Any
    warp: Any
    lane: Any
    once: Any = None


@contextmanager
def launch(
    blocks: int, warps: int, overlap: bool, *, early: bool = False, cluster: int = 1, fence: bool = False, once: bool = False
) -> Iterator[Thread]:
    """One launch; what is emitted inside is its body.

    With `overlap` the next kernel may start at once, and this one waits for the memory of those before it: here, or, when
    `early`, where the body waits. Every thread must pass the wait, also one with nothing to do: whoever waits for this
    kernel must be able to rely on all before it. Of a `fence` the body says when the next kernel may start
    (`Environment.release`); where it does not, that is when this one has ended.

    cluster: this many consecutive blocks run together and see each other's shared memory. once: some of what is copied is read
    once (`Thread.once`).
    """
    with T.attr({"tirx.device_entry": True}):
        if cluster > 1:
            T.cta_id_in_cluster([cluster])
        place = T.cta_id([blocks]), T.warp_id([warps]), T.lane_id([32])
        thread = Thread(*place, _leaves_first() if once else None)
        if overlap:
            if not fence:
                do(T.ptx.griddepcontrol.launch_dependents())
            if not early:
                do(T.ptx.griddepcontrol.wait())
        yield thread


def _leaves_first() -> Any:
    policy = register("uint64", name="once")
    do(T.ptx["createpolicy.fractional.L2::evict_first.b64"](policy[0], T.float32(1)))
    return policy[0]


@dataclass(frozen=True)
class Cache:
    """A cache's storage as lines of one (layer, block, head, slot) each."""

    lines: Any
    blocks: Any
    heads: int
    block_size: Any

    def line(self, layer: int, block: Any, head: Any, slot: Any) -> Any:
        """int64 index of a line."""
        whole = wide(block) + (wide(self.blocks) * layer if layer else T.int64(0))
        return (whole * self.heads + wide(head)) * wide(self.block_size) + wide(slot)


class CudaEnvironment:
    """Buffers by value name. Arguments are the caller's tensors; the rest are views of the workspace argument.

    overlap: kernels are launched programmatically: each starts while the one before still runs, and waits for it (see
        `launch`). processors: multiprocessors that a persistent kernel fills. settled: all that came before this program is
        complete when the kernel that is emitted next starts, see `wait`.
    """

    def __init__(self, plan: Plan, *, overlap: bool, processors: int):
        self.plan, self.overlap, self.processors = plan, overlap, processors
        self.group: Group | None = None
        self.settled = False
        self._axes: dict[str, Any] = {}
        self._buffers: dict[str, Any] = {}
        self._views: dict[tuple[str, tuple[Any, ...], str], Any] = {}
        self._output_of: dict[str, str] = {}
        self._steady: set[str] = set()
        for role, value in argument_values(plan):
            buffer = self._argument(value, role)
            if role == "addressing" or (role, value.name) == ("input", "position"):
                self._steady.add(value.name)
            if role == "workspace":
                self._workspace = buffer
                continue
            if role != "output":
                self._buffers[value.name] = buffer
                continue
            # The first output of a value's bytes is where they live; further ones are copied at the end.
            root = plan.storage(dict(plan.circuit.outputs)[value.name])
            if root not in self._buffers:
                self._buffers[root] = buffer
                self._output_of[root] = value.name
            self._buffers[f"output {value.name}"] = buffer

    def _argument(self, value: Any, role: str) -> Any:
        shape = [self._axis(dim) for dim in value.type.shape]
        name = value.name.replace(".", "_") + ("_out" if role == "output" else "")
        return T.arg(name, T.buffer(shape, TIR_DTYPES[value.type.dtype], buffer_name=name))

    def _axis(self, dim: int | str) -> Any:
        if isinstance(dim, int):
            return dim
        if dim not in self._axes:
            self._axes[dim] = tvm.tirx.Var(dim, "int32")
        return self._axes[dim]

    # -- kernels -----------------------------------------------------------------------------------------------

    def kernel(
        self, blocks: int, warps: int, *, early: bool = False, cluster: int = 1, fence: bool = False, once: bool = False
    ) -> AbstractContextManager[Thread]:
        """One launch, see `launch`; with `early` the body itself calls `wait`."""
        return launch(blocks, warps, self.overlap, early=early, cluster=cluster, fence=fence, once=once)

    def steady(self, name: str) -> bool:
        """May a kernel read this argument before it waits? Positions and the addressing of caches are complete before a
        program starts, whatever ran before it (see `chain`); tokens and hiddens come from the kernels before."""
        return name in self._steady

    def steady_buffer(self, name: str) -> Any:
        """The buffer of what is read before the wait."""
        assert self.steady(name), name
        return self.buffer(name)

    def wait(self, *, release: bool = False) -> None:
        """Memory of earlier kernels is complete from here on. Weights, tables and what is `steady` may be read before;
        cache rows that are not this call's, too, once the program is `settled` (see `Query.fresh`), and what the kernel before
        has fenced before it let this one start (the list of experts).

        release: of a `fence`; only now may the next kernel start. So whatever starts after it may rely on all before it: the
            program is `settled`.
        """
        if self.overlap:
            do(T.ptx.griddepcontrol.wait())
        if release:
            self.release()
        self.settled |= release

    def release(self) -> None:
        """Of a `fence`: now the next kernel may start."""
        if self.overlap:
            do(T.ptx.griddepcontrol.launch_dependents())

    def enter(self, group: Group) -> None:
        """Templates ask for this group's scratch from now on.

        Every view that they may use is declared here, in host code: one declared inside a kernel would be its own.
        """
        self.group = group
        stored = {key.rpartition("/")[2] for key in self.plan.slots if key.startswith(f"{group.name}/")}
        packed = {item.name: item.tensors() for item in self.plan.circuit.weights if item.storage}
        for value in (value for name in group.inputs for value in packed.get(name, ())):
            self._declare_packed(value)
        for name in (*group.inputs, *group.made, *stored):
            value_type = self.plan.circuit.types.get(name)
            if name in packed:
                continue
            if isinstance(value_type, StateType):
                self.cache(f"{value_type.state}.k")
                self.cache(f"{value_type.state}.v")
            elif self.stored(name):
                buffer = self.buffer(name)
                if all(isinstance(dim, int) or hasattr(dim, "value") for dim in buffer.shape) and len(buffer.shape) > 1:
                    self.flat(name)
                if DTYPE_BITS.get(value_type.dtype if value_type else "") == 16:
                    self.words(name)

    def _declare_packed(self, value: Value) -> None:
        """The views of one of a quantised weight's tensors; whole words where its lines are a whole number of them."""
        assert isinstance(value.type, TensorType)
        if value.type.rank > 1:
            self.flat(value.name)
        if value.type.dtype == "u8" and int(value.type.shape[-1]) % 4 == 0:
            self.words(value.name)

    def stored(self, name: str) -> bool:
        """Has the value memory? Values that only this group's kernel sees have none."""
        assert self.group is not None
        root = self.plan.storage(name)
        return any(key in self._buffers or key in self.plan.slots for key in (f"{self.group.name}/{root}", root))

    # -- buffers -----------------------------------------------------------------------------------------------

    def buffer(self, name: str) -> Any:
        """Buffer of a value, weight, table, state part (`kv.slot`), or of a quantised weight's values, scales and whole scale."""
        assert self.group is not None
        root = self.plan.storage(name)
        for key in (f"{self.group.name}/{root}", root):
            if key in self.plan.slots and key not in self._buffers:
                self._buffers[key] = self._workspace_view(key, root)
            if key in self._buffers:
                if name not in self.plan.circuit.types or name in self.plan.circuit.storage:
                    return self._buffers[key]
                return self.view(key, self.plan.circuit.types[name].shape)  # type: ignore[union-attr]
        raise KeyError(f"{self.plan.symbol} {self.group.name}: '{name}' has no storage")

    def _workspace_view(self, key: str, root: str) -> Any:
        value_type = self.plan.circuit.types.get(root)
        if "/" in key:
            index = self.plan.groups.index(self.group)  # type: ignore[arg-type]
            value_type = next(
                item.type for item in self.plan.scratch[index] if f"{self.plan.groups[index].name}/{item.name}" == key
            )
        assert isinstance(value_type, TensorType)
        offset = self.plan.slots[key].offset // (DTYPE_BITS[value_type.dtype] // 8)
        dtype = TIR_DTYPES[value_type.dtype]
        return named(root, T.decl_buffer(list(value_type.shape), dtype, data=self._workspace.data, elem_offset=offset))

    def view(self, key: str, shape: Any, dtype: str = "") -> Any:
        """The storage `key` under another shape or element type of the same bytes."""
        buffer = self._buffers[key]
        dtype = dtype or str(buffer.dtype)
        shape = [self._axis(dim) if isinstance(dim, str) else dim for dim in shape]
        same = len(shape) == len(buffer.shape) and all(
            a is b or int_equal(a, b) for a, b in zip(shape, buffer.shape, strict=True)
        )
        if same and dtype == str(buffer.dtype):
            return buffer
        cached = (key, tuple(str(dim) for dim in shape), dtype)
        if cached not in self._views:
            scale = (tvm.DataType(str(buffer.dtype)).bits, tvm.DataType(dtype).bits)
            offset = buffer.elem_offset * scale[0] // scale[1] if buffer.elem_offset is not None else None
            view = T.decl_buffer(shape, dtype, data=buffer.data, elem_offset=offset)
            self._views[cached] = named(key.rpartition("/")[2], view)
        return self._views[cached]

    def scratch(self, name: str) -> Any:
        """See `base.Environment`."""
        return self.buffer(f"{Scratch.OWN}{name}")

    def flat(self, name: str) -> Any:
        """The buffer of `name` as [rows, columns]."""
        buffer = self.buffer(name)
        columns = 1
        for dim in buffer.shape[1:]:
            columns *= int(dim)
        return self._shaped(name, (int(buffer.shape[0]), columns))

    def words(self, name: str) -> Any:
        """A matrix or vector of narrower elements as 32-bit words: two of 16 bits each, or four bytes."""
        buffer = self.flat(name) if len(self.buffer(name).shape) > 1 else self.buffer(name)
        shape = [int(dim) for dim in buffer.shape]
        each = 32 // tvm.DataType(str(buffer.dtype)).bits
        return self._shaped(name, (*shape[:-1], shape[-1] // each), "uint32")

    def _shaped(self, name: str, shape: Any, dtype: str = "") -> Any:
        assert self.group is not None
        self.buffer(name)
        root = self.plan.storage(name)
        key = f"{self.group.name}/{root}"
        return self.view(key if key in self._buffers else root, shape, dtype)

    def cache(self, name: str) -> Cache:
        """A state part (`kv.k`)."""
        storage = self._buffers[name]
        layers, blocks, heads, block_size, dim = storage.shape
        lines = self.view(name, (layers * blocks * heads * block_size, dim))
        return Cache(lines, blocks, int(heads), block_size)

    def shared_outputs(self) -> list[tuple[Any, Any]]:
        """(storage, output) of outputs whose bytes live elsewhere: in an input, or in another output."""
        return [
            (self._buffers[self.plan.storage(value)], self._buffers[f"output {public}"])
            for public, value in self.plan.circuit.outputs
            if self._output_of.get(self.plan.storage(value)) != public
        ]
