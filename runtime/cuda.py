"""`CudaRunner`: compiled programs on a GPU, on the caller's current stream; drafts and chains replay as CUDA graphs.

A chain of K steps is one graph: step k + 1 reads its tokens and hiddens where step k wrote them, positions and lengths of
all steps are formed at its start, and the host waits for nothing. Integers travel in one packed copy when they come from
the host.
"""

from __future__ import annotations

import contextlib
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
import tvm_ffi

from circuitgraph.artifact import Manifest, check_device
from circuitgraph.errors import Fault, RuntimeUseError
from circuitgraph.ops import TORCH_DTYPES

from .compiled import CHAIN_FUNCTIONS, CompiledRunner, _Program
from .runner import Caches, DraftChain, DraftStep, _kind

MOST_GRAPHS = 64
"""Graphs kept per runner; beyond that the one that was used longest ago is dropped."""


class CudaRunner(CompiledRunner):
    """See `CompiledRunner`. Integer arguments may lie on the device or in host memory.

    Inside a caller's own graph capture, `draft` and `chain` launch their kernels into that graph instead of replaying one.
    """

    def __init__(
        self,
        manifest: Manifest,
        functions: Mapping[str, Callable[..., Any]],
        weights: Mapping[str, torch.Tensor],
        *,
        device: torch.device | str = "cuda",
        fallback: str = "cover",
    ):
        device = torch.device(device)
        if device.index is None:
            device = torch.device("cuda", torch.cuda.current_device())
        check_device(manifest, device, manifest.program)
        self._graphs: OrderedDict[tuple, _Chain] = OrderedDict()
        self.chain_functions = tuple(functions[name] for name in CHAIN_FUNCTIONS)
        super().__init__(manifest, functions, weights, device=device, fallback=fallback)

    def _bind(self) -> None:
        self._graphs.clear()  # graphs hold the addresses of the old weights
        faults = [
            Fault("kernels read 16 bytes at a time", where=self.circuit.name, subject=name, expected="an aligned tensor")
            for name, tensor in self.weights.items()
            if tensor.data_ptr() % 16
        ]
        if faults:
            raise RuntimeUseError(faults)
        super()._bind()

    def _check_tensor(self, name: str, tensor: torch.Tensor, shape: tuple[int, ...]) -> None:
        if tensor.shape != shape or tensor.dtype != torch.int32 or tensor.device not in (self.device, torch.device("cpu")):
            expected = f"i32[{', '.join(map(str, shape))}] on {self.device} or the host"
            raise RuntimeUseError(
                Fault("does not fit", where=self.circuit.name, subject=name, expected=expected, got=_kind(tensor))
            )

    # -- work --------------------------------------------------------------------------------------------------

    def draft(self, token, hidden, position, kv) -> DraftStep:
        if torch.cuda.is_current_stream_capturing() or len(kv) > 1:  # a graph has one slot per row for all states
            with self._stream():
                return super().draft(token, hidden, position, self._on_device(kv))
        self._check_rows(token, hidden, position, kv)
        slots = next(iter(kv.values())).slot[None]
        chain = self._replay(1, token, hidden, position, kv, slots, stops=False)
        return DraftStep(chain.drafts[:, 0], chain.logprobs[:, 0], chain.next_hidden)

    def logits(self, token, hidden, position, kv) -> tuple[torch.Tensor, torch.Tensor]:
        with self._stream():
            return super().logits(token, hidden, position, self._on_device(kv))

    def context(self, token, hidden, position, kv) -> None:
        with self._stream():
            super().context(token, hidden, position, self._on_device(kv))

    def chain(self, steps, token, hidden, position, kv, slots) -> DraftChain:
        n = self._check_rows(token, hidden, position, kv)
        self._check_chain(steps, n, position, slots)
        if torch.cuda.is_current_stream_capturing():
            with self._stream():
                return super().chain(steps, token, hidden, position, self._on_device(kv), slots)
        return self._replay(steps, token, hidden, position, kv, slots, stops=True)

    @contextlib.contextmanager
    def _stream(self) -> Iterator[None]:
        """Kernels go to torch's current stream of our device."""
        device = tvm_ffi.device(f"cuda:{self.device.index}")
        stream = torch.cuda.current_stream(self.device).cuda_stream
        with torch.cuda.device(self.device), tvm_ffi.use_raw_stream(device, stream):
            yield

    def _on_device(self, kv: Caches) -> Caches:
        """The caches with their table and start where the kernels read them; the rest is staged anyhow."""
        return {
            name: cache.__class__(**{**vars(cache), "table": cache.table.to(self.device), "start": cache.start.to(self.device)})
            for name, cache in kv.items()
        }

    def _replay(self, steps, token, hidden, position, kv, slots, *, stops: bool) -> DraftChain:
        n = token.shape[0]
        self._count("draft", n)
        made = []
        with torch.cuda.device(self.device):
            for program, first, count in self._parts("draft", n):
                graph = self._graph(program, steps, kv, stops)
                made.append(graph.run(first, count, token, hidden, position, kv, slots))
        if len(made) == 1:
            return made[0]
        return DraftChain(*(torch.cat(parts) for parts in zip(*made, strict=True)))

    def _graph(self, program: _Program, steps: int, kv: Caches, stops: bool) -> _Chain:
        # Tables are staged at sizes that are powers of two: a growing context changes them seldom.
        sizes = {name: (_bucket(cache.table.shape[0]), _bucket(cache.table.shape[1])) for name, cache in kv.items()}
        storage = tuple((cache.k.data_ptr(), cache.v.data_ptr(), tuple(cache.k.shape)) for cache in kv.values())
        key = (program.spec.symbol, steps, stops, tuple(sizes.values()), storage)
        graph = self._graphs.get(key)
        if graph is None:
            graph = self._graphs[key] = _Chain(self, program, steps, kv, sizes, stops)
            if len(self._graphs) > MOST_GRAPHS:
                self._graphs.popitem(last=False)
        self._graphs.move_to_end(key)
        return graph


class _Chain:
    """`steps` calls of one program with memory of their own, recorded as a CUDA graph at the second use.

    stops: a row whose slot is -1 sees and drafts nothing, as `DraftRunner.chain` says; without it slots only say where
        rows are written.
    """

    def __init__(
        self, runner: CudaRunner, program: _Program, steps: int, kv: Caches, sizes: dict[str, tuple[int, int]], stops: bool
    ):
        self.runner, self.program, self.steps, self.stops = runner, program, steps, stops
        n, device = program.rows, runner.device
        shapes: dict[str, tuple[int, ...]] = {"token": (n,), "position": (n,), "slots": (steps, n)}
        for name, (sequences, width) in sizes.items():
            shapes |= {
                f"{name}.seq": (n,),
                f"{name}.length": (n,),
                f"{name}.start": (sequences,),
                f"{name}.table": (sequences, width),
            }
        self.ints, self.packed = _packed(shapes, device)
        self.host, self.pinned = _packed(shapes, torch.device("cpu"))
        self.copied = torch.cuda.Event()
        self.hidden = torch.zeros(n, runner.hidden_size, dtype=TORCH_DTYPES[runner.circuit.act], device=device)
        self.positions = torch.zeros(steps, n, dtype=torch.int32, device=device)
        self.lengths = {name: torch.zeros(steps, n, dtype=torch.int32, device=device) for name in sizes}
        self.drafts = torch.zeros(steps, n, dtype=torch.int32, device=device)
        self.logprobs = torch.zeros(steps, n, device=device)
        self.hiddens = [torch.zeros_like(self.hidden) for _ in range(steps)]
        # Drafts and, as the same 32 bits, log-probabilities: one copy takes both to the caller.
        self.result = torch.zeros(2, n, steps, dtype=torch.int32, device=device)
        self.views: dict[tuple[bool, str, torch.Size], torch.Tensor] = {}
        self.storage = {f"{name}.{part}": getattr(cache, part) for name, cache in kv.items() for part in ("k", "v")}
        self.calls = [self._arguments(step) for step in range(steps)]
        self.ends = {
            name: _converted(
                self.ints["position"], self.ints[f"{name}.length"], self.ints["slots"], self.positions, lengths, stops
            )
            for name, lengths in self.lengths.items()
        }
        self.ends["end"] = _converted(
            self.drafts, self.logprobs, self.ints["slots"], self.result[0], self.result[1].view(torch.float32), stops
        )
        self.graph: torch.cuda.CUDAGraph | None = None
        self.used = False

    def _arguments(self, step: int) -> list[Any]:
        given: dict[tuple[str, str], torch.Tensor] = {
            ("input", "token"): self.drafts[step - 1] if step else self.ints["token"],
            ("input", "hidden"): self.hiddens[step - 1] if step else self.hidden,
            ("input", "position"): self.positions[step],
            ("output", "draft"): self.drafts[step],
            ("output", "logprob"): self.logprobs[step],
            ("output", "next_hidden"): self.hiddens[step],
        }
        given |= {("state", name): tensor for name, tensor in self.storage.items()}
        for name, lengths in self.lengths.items():
            given |= {("state", f"{name}.{part}"): self.ints[f"{name}.{part}"] for part in ("seq", "start", "table")}
            given |= {("state", f"{name}.length"): lengths[step], ("state", f"{name}.slot"): self.ints["slots"][step]}
        arguments = list(self.program.args)
        for index, arg in enumerate(self.program.spec.args):
            if (arg.role, arg.name) in given:
                arguments[index] = tvm_ffi.from_dlpack(given[arg.role, arg.name])
        return arguments

    def run(self, first: int, count: int, token, hidden, position, kv: Caches, slots) -> DraftChain:
        self._stage(first, count, token, hidden, position, kv, slots)
        if self.graph is not None:
            self.graph.replay()
        elif self.used:
            self.graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self.graph, capture_error_mode="thread_local"):
                self._launch()
            self.graph.replay()
        else:
            self.used = True
            self._launch()
        made = self.result[:, :count].clone()
        return DraftChain(made[0], made[1].view(torch.float32), self.hiddens[-1][:count].clone())

    def _stage(self, first: int, count: int, token, hidden, position, kv: Caches, slots) -> None:
        last = first + count
        sources = {"token": token[first:last], "position": position[first:last], "slots": slots[:, first:last]}
        for name, cache in kv.items():
            sources |= {f"{name}.seq": cache.seq[first:last], f"{name}.length": cache.length[first:last]}
            sources |= {f"{name}.start": cache.start, f"{name}.table": cache.table}
        on_host = {name: source for name, source in sources.items() if source.device.type == "cpu"}
        idle = count < self.program.rows
        if on_host or idle:
            # Idle rows write nowhere and see nothing; the packed copy brings their values too.
            self.copied.synchronize()
            if idle:
                self.pinned.zero_()
                self.host["slots"].fill_(-1)
            for name, source in on_host.items():
                self._part(self.host, name, source).copy_(source)
            self.packed.copy_(self.pinned, non_blocking=True)
            self.copied.record()
        rest = [name for name in sources if name not in on_host]
        if rest:
            targets = [self._part(self.ints, name, sources[name]) for name in rest]
            torch._foreach_copy_(targets, [sources[name] for name in rest])  # type: ignore[reportPrivateImportUsage]
        self.hidden[:count].copy_(hidden[first:last])

    def _part(self, tensors: dict[str, torch.Tensor], name: str, source: torch.Tensor) -> torch.Tensor:
        """The corner of a staging tensor that `source` fills. Cutting views costs as much as copying into them."""
        key = (tensors is self.host, name, source.shape)
        view = self.views.get(key)
        if view is None:
            view = self.views[key] = tensors[name][tuple(slice(size) for size in source.shape)]
        return view

    def _launch(self) -> None:
        begin, end = self.runner.chain_functions
        with self.runner._stream():
            for name in self.lengths:
                begin(*self.ends[name])
            for arguments in self.calls:
                self.program.call(*arguments)
            end(*self.ends["end"])


def _converted(*arguments: torch.Tensor | bool) -> list[Any]:
    return [tvm_ffi.from_dlpack(item) if isinstance(item, torch.Tensor) else int(item) for item in arguments]


def _bucket(size: int) -> int:
    return 1 << max(size - 1, 0).bit_length()


def _packed(shapes: Mapping[str, tuple[int, ...]], device: torch.device) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """Integer tensors side by side in one memory, and that memory; page-locked on the host."""
    sizes = {name: torch.Size(shape).numel() for name, shape in shapes.items()}
    memory = torch.zeros(sum(sizes.values()), dtype=torch.int32, device=device, pin_memory=device.type == "cpu")
    views, offset = {}, 0
    for name, shape in shapes.items():
        views[name] = memory[offset : offset + sizes[name]].view(shape)
        offset += sizes[name]
    return views, memory
