"""`CudaRunner`: compiled programs on a GPU, on the caller's current stream; drafts and chains replay as CUDA graphs.

A chain of K steps is one graph: step k + 1 reads its tokens and hiddens where step k wrote them, and the host waits for
nothing. Integers that come from the host travel in one packed copy, with the positions and lengths of all steps; for
integers on the device the graph has a kernel at its start that forms those.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import tvm_ffi

from circuitgraph.artifact import Manifest, check_device
from circuitgraph.errors import Fault, RuntimeUseError
from circuitgraph.ops import PagedKV

from .arguments import shown
from .compiled import CHAIN_FUNCTIONS, CompiledRunner, _Program
from .cuda_at_once import ADDRESSING, AtOnce, bucket
from .kinds import Block
from .recording import packed, record
from .runner import MASKED, MASKED_OUTPUT, Blocks, Caches, ChainRows, DraftChain, Drafts, DraftStep, no_autograd

ALIGNED = 16
"""Bytes that kernels read at a time."""
MOST_PLACES = 4
"""Of a caller's hiddens that a chain has graphs of its own for: recording one takes milliseconds."""
MOST_GRAPHS = 64
"""Kinds of calls whose graphs a runner keeps, a few for each; beyond that the one that was used longest ago is dropped."""


def check_alignment(weights: Mapping[str, torch.Tensor], where: str) -> None:
    """Raises RuntimeUseError for weights that kernels cannot read 16 bytes at a time."""
    faults = [
        Fault(
            "kernels read 16 bytes at a time",
            where=where,
            subject=name,
            expected="an address that 16 divides",
            got=f"one that is {tensor.data_ptr() % ALIGNED} bytes beyond",
            hint="Give a tensor of its own, `.clone()`, in place of that view.",
        )
        for name, tensor in weights.items()
        if tensor.data_ptr() % ALIGNED
    ]
    if faults:
        raise RuntimeUseError(faults)


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
        self._graphs: OrderedDict[tuple, _Chain | AtOnce] = OrderedDict()
        self._routes: dict[tuple, _Route] = {}
        self.newest: _Chain | AtOnce | None = None
        """What ran last: `measure` times it."""
        # torch.cuda.graph would take a stream of whichever device was captured on first, and wait for the whole device.
        self.recorder = torch.cuda.Stream(device)
        self.chain_functions = tuple(functions[name] for name in CHAIN_FUNCTIONS)
        super().__init__(manifest, functions, weights, device=device, fallback=fallback)

    def _bind(self) -> None:
        self._graphs.clear()  # graphs hold the addresses of the old weights
        self._routes.clear()
        self.newest = None
        super()._bind()

    def _fitting(self, weights: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        checked = super()._fitting(weights)
        check_alignment(checked, self.circuit.name)
        return checked

    def _check_allowed(self, allowed: torch.Tensor | None, n: int, *, needed: bool = False) -> None:
        super()._check_allowed(allowed, n, needed=needed)
        if allowed is not None and allowed.device.type == "cpu" and torch.cuda.is_current_stream_capturing():
            hint = "Put it into a device tensor, and write that before each replay."
            fault = Fault("a mask of the host cannot be part of a graph", where=self.circuit.name, subject="allowed", hint=hint)
            raise RuntimeUseError(fault)

    def _check_tensor(self, name: str, tensor: torch.Tensor, shape: tuple[int, ...]) -> None:
        fits = isinstance(tensor, torch.Tensor) and tensor.shape == shape and tensor.dtype == torch.int32
        if not fits or tensor.device not in (self.device, torch.device("cpu")):
            expected = f"i32[{', '.join(map(str, shape))}] on {self.device} or the host"
            raise RuntimeUseError(
                Fault("does not fit", where=self.circuit.name, subject=name, expected=expected, got=shown(tensor))
            )

    @property
    def integers_on(self) -> torch.device:
        return torch.device("cpu")

    # -- work --------------------------------------------------------------------------------------------------

    @no_autograd()
    def draft(self, token, hidden, position, kv, *, recycled=False) -> DraftStep:
        self._check_step(token, hidden, position, kv, recycled)
        if torch.cuda.is_current_stream_capturing() or len(kv) != 1:  # a graph has one slot per row for all states
            token, position, kv, _ = self._on_device(token, position, kv)
            with self._stream():
                return super().draft(token, hidden, position, kv, recycled=recycled)
        slots = next(iter(kv.values())).slot[None]
        return _only_step(self._replay(1, token, hidden, position, kv, slots, stops=False, recycled=recycled))

    @no_autograd()
    def draft_masked(self, token, hidden, position, kv, allowed, *, recycled=False) -> DraftStep:
        n = self._check_step(token, hidden, position, kv, recycled)
        self._check_allowed(allowed, n, needed=True)
        if torch.cuda.is_current_stream_capturing() or len(kv) != 1:
            token, position, kv, _ = self._on_device(token, position, kv)
            with self._stream():
                return super().draft_masked(token, hidden, position, kv, allowed, recycled=recycled)
        slots = next(iter(kv.values())).slot[None]
        step = self._replay(1, token, hidden, position, kv, slots, stops=False, allowed=allowed, recycled=recycled)
        return _only_step(step)

    @no_autograd()
    def logits(self, token, hidden, position, kv, *, recycled=False) -> tuple[torch.Tensor, torch.Tensor]:
        self._check_rows(token, hidden, position, kv, recycled)
        token, position, kv, _ = self._on_device(token, position, kv)
        with self._stream():
            return super().logits(token, hidden, position, kv, recycled=recycled)

    @no_autograd()
    def context(self, token, hidden, position, kv) -> None:
        self._check_rows(token, hidden, position, kv)
        token, position, kv, _ = self._on_device(token, position, kv)
        with self._stream():
            super().context(token, hidden, position, kv)

    @no_autograd()
    def chain(self, steps, token, hidden, position, kv, slots, *, allowed=None, recycled=False) -> DraftChain:
        if self.kind.at_once:
            return self._chain_at_once(steps, token, hidden, position, kv, slots, allowed)
        n = self._check_rows(token, hidden, position, kv, recycled)
        self._check_allowed(allowed, n)
        self._check_chain(steps, n, position, slots, kv)
        if torch.cuda.is_current_stream_capturing():
            token, position, kv, slots = self._on_device(token, position, kv, slots)
            with self._stream():
                return super().chain(steps, token, hidden, position, kv, slots, allowed=allowed, recycled=recycled)
        return self._replay(steps, token, hidden, position, kv, slots, stops=True, allowed=allowed, recycled=recycled)

    def _at_once(self, entry, steps, token, hidden, position, kv, slots) -> dict[str, torch.Tensor]:
        self._check_steps(steps)
        if isinstance(self.kind, Block):
            n = self._check_rows(token, hidden, position, kv)
            self._check_block(self.kind, n, position, slots, kv)  # while integers of the host can be looked at
        else:
            self._check_lone_hidden(hidden)
            kv, slots = {}, None
        if torch.cuda.is_current_stream_capturing():
            if slots is not None:
                token, position, kv, slots = self._on_device(token, position, kv, slots)
            return self._whole(entry, steps, token, hidden, position, kv, slots)
        places = _places({name: (cache.k, cache.v) for name, cache in kv.items()})
        key = (entry, steps, *AtOnce.key(hidden, kv, slots), places)
        whole = self._kept(key)
        if whole is None:
            call = functools.partial(self._whole, entry, steps)
            whole = AtOnce(call, hidden, self.circuit.act, kv, slots, self.recorder)
            self._keep(key, whole)
        assert isinstance(whole, AtOnce)
        if whole.newest is not None:  # what is not launched from here is not counted there
            self._count(entry, hidden.shape[0])
        self.newest = whole
        with self._device():
            return whole.run(token, hidden, position, kv, slots)

    def _whole(self, entry: str, steps: int, token, hidden, position, kv: Caches, slots) -> dict[str, torch.Tensor]:
        with self._stream():
            return super()._at_once(entry, steps, token, hidden, position, kv, slots)

    @no_autograd()
    def start_chain(
        self,
        steps: int,
        rows: ChainRows,
        hidden: torch.Tensor,
        storage: Mapping[str, tuple[torch.Tensor, torch.Tensor]],
        allowed: torch.Tensor | None = None,
    ) -> Callable[[], Drafts]:
        if torch.cuda.is_current_stream_capturing():
            hint = "Capture `chain` instead, with integers on the device."
            raise RuntimeUseError(Fault("drafts cannot be read while a graph is captured", where=self.circuit.name, hint=hint))
        masked, n = allowed is not None, len(rows.tokens)
        allowed = None if allowed is None else self._own_mask(allowed)
        width = bucket(max([len(blocks.blocks) for blocks in rows.blocks]))
        with self._device():
            route = self._route(masked, steps, n, width, storage)
            graph, _, first_count = route.parts[0]
            if first_count == n:
                graph.run_packed(rows, hidden, allowed)
            else:
                graph.run_packed(*_rows_of(rows, hidden, allowed, 0, first_count))
        return functools.partial(self._finish, route, rows, hidden, allowed)

    @no_autograd()
    def _finish(self, route: _Route, rows: ChainRows, hidden: torch.Tensor, allowed: torch.Tensor | None) -> Drafts:
        """Wait for a chain whose first part is running; the other parts, which may be calls of the same program, follow."""
        with self._device():
            (graph, _, count), *others = route.parts
            drafts, logprobs = graph.read(count)
            for graph, first, count in others:
                graph.run_packed(*_rows_of(rows, hidden, allowed, first, count))
                ids, scores = graph.read(count)
                drafts += ids
                logprobs += scores
        return drafts, logprobs

    def _route(
        self, masked: bool, steps: int, n: int, width: int, storage: Mapping[str, tuple[torch.Tensor, torch.Tensor]]
    ) -> _Route:
        """What serves n rows of these caches, found once and counted every time."""
        key = (masked, steps, n, width)
        route = self._routes.get(key)
        if route is not None and route.storage is storage:
            self.paths[route.path] += 1
            for name in route.names:
                self._graphs.move_to_end(name)
            return route
        entry = self._entry(masked=masked)
        self._count(entry, n)
        parts, names = [], []
        for program, start, count in self._parts(entry, n):
            sizes = dict.fromkeys(storage, (bucket(program.rows), width))
            name, graph = self._graph(program, steps, storage, sizes, stops=True)
            names.append(name)
            parts.append((graph, start, count))
        route = self._routes[key] = _Route(storage, str(self._path(entry, n)), parts, names)
        return route

    def _device(self) -> contextlib.AbstractContextManager[object]:
        """Makes ours the current device; as a rule it is."""
        if torch.cuda.current_device() == self.device.index:
            return contextlib.nullcontext()
        return torch.cuda.device(self.device)

    def release(self, storage: Mapping[str, tuple[torch.Tensor, torch.Tensor]]) -> Callable[[], None]:
        forget, this, places = super().release(storage), weakref.ref(self), _places(storage)

        def drop() -> None:
            forget()
            runner = this()
            if runner is None:
                return
            for key in [key for key in list(runner._graphs) if key[-1] == places]:
                del runner._graphs[key]
            runner._routes.clear()
            runner.newest = None

        return drop

    @contextlib.contextmanager
    def _stream(self) -> Iterator[None]:
        """Kernels go to torch's current stream of our device."""
        device = tvm_ffi.device(f"cuda:{self.device.index}")
        stream = torch.cuda.current_stream(self.device).cuda_stream
        with torch.cuda.device(self.device), tvm_ffi.use_raw_stream(device, stream):
            yield

    def _on_device(self, token, position, kv: Caches, slots=None) -> tuple[Any, ...]:
        """(token, position, kv, slots) where the kernels read them: integers from the host travel in one copy, which the host
        does not wait for.

        Raises:
            RuntimeUseError: integers from the host inside a capture, which would be read again by every replay.
        """
        given = [token, position, *([] if slots is None else [slots])]
        for cache in kv.values():
            given += [getattr(cache, part) for part in ADDRESSING]
        host = [tensor for tensor in given if tensor.device.type == "cpu"]
        if host and torch.cuda.is_current_stream_capturing():
            hint = "Put them into device tensors, and write those before each replay."
            fault = Fault("integers of the host cannot be part of a graph", where=self.circuit.name, hint=hint)
            raise RuntimeUseError(fault)
        if host:
            packed = torch.empty(sum(tensor.numel() for tensor in host), dtype=torch.int32, pin_memory=True)
            torch.cat([tensor.reshape(-1) for tensor in host], out=packed)
            pieces = iter(packed.to(self.device, non_blocking=True).split([tensor.numel() for tensor in host]))
            given = [next(pieces).view(tensor.shape) if tensor.device.type == "cpu" else tensor for tensor in given]
        parts = iter(given)
        token, position, slots = next(parts), next(parts), None if slots is None else next(parts)
        caches = {name: PagedKV(cache.k, cache.v, *(next(parts) for _ in ADDRESSING)) for name, cache in kv.items()}
        return token, position, caches, slots

    def _replay(
        self, steps, token, hidden, position, kv, slots, *, stops: bool, allowed=None, recycled: bool = False
    ) -> DraftChain:
        n, entry = token.shape[0], self._entry(masked=allowed is not None, recycled=recycled)
        allowed = None if allowed is None else self._own_mask(allowed)
        self._count(entry, n)
        made = []
        # Tables are staged at sizes that are powers of two: a growing context changes them seldom.
        sizes = {name: (bucket(cache.table.shape[0]), bucket(cache.table.shape[1])) for name, cache in kv.items()}
        storage = {name: (cache.k, cache.v) for name, cache in kv.items()}
        with self._device():
            for program, first, count in self._parts(entry, n):
                _, graph = self._graph(program, steps, storage, sizes, stops)
                graph.run(first, count, token, hidden, position, kv, slots, allowed)
                made.append(graph.results(count))
        if len(made) == 1:
            return made[0]
        return DraftChain(*(torch.cat(parts) for parts in zip(*made, strict=True)))

    def _graph(
        self,
        program: _Program,
        steps: int,
        storage: Mapping[str, tuple[torch.Tensor, torch.Tensor]],
        sizes: dict[str, tuple[int, int]],
        stops: bool,
    ) -> tuple[tuple, _Chain]:
        """What `_graphs` keeps it by, and the graph."""
        key = (program.spec.symbol, steps, stops, tuple(sizes.values()), _places(storage))
        graph = self._kept(key)
        if graph is None:
            graph = _Chain(self, program, steps, storage, sizes, stops)
            self._keep(key, graph)
        assert isinstance(graph, _Chain)
        return key, graph

    def _kept(self, key: tuple) -> _Chain | AtOnce | None:
        """The graph of that key, if there is one, which is about to be used."""
        graph = self._graphs.get(key)
        if graph is not None:
            self._graphs.move_to_end(key)
        return graph

    def _keep(self, key: tuple, graph: _Chain | AtOnce) -> None:
        self._graphs[key] = graph
        if len(self._graphs) > MOST_GRAPHS:
            self._graphs.popitem(last=False)
            self._routes.clear()


class _Route(NamedTuple):
    """Chains that serve a number of rows between them: each with its first row and its rows. storage: of the caches that they
    are for. names: what `_graphs` keeps the chains by, each of which is there for as long as the route is."""

    storage: Mapping[str, tuple[torch.Tensor, torch.Tensor]]
    path: str
    parts: list[tuple[_Chain, int, int]]
    names: list[tuple]


def _rows_of(rows: ChainRows, hidden: torch.Tensor, allowed: torch.Tensor | None, first: int, count: int) -> tuple[Any, ...]:
    """rows first..first+count-1 of a call."""
    last = first + count
    return rows.part(first, count), hidden[first:last], None if allowed is None else allowed[first:last]


class _Chain:
    """`steps` calls with memory of their own, recorded as a CUDA graph at the second use: of one program, or, where a first
    step is another one, of that and what follows it.

    stops: a row whose slot is -1 sees and drafts nothing, as `DraftRunner.chain` says; without it slots only say where
        rows are written.
    """

    def __init__(
        self,
        runner: CudaRunner,
        program: _Program,
        steps: int,
        storage: Mapping[str, tuple[torch.Tensor, torch.Tensor]],
        sizes: dict[str, tuple[int, int]],
        stops: bool,
    ):
        self.runner, self.program, self.steps, self.stops = runner, program, steps, stops
        self.later = runner._following(program) if steps > 1 else program
        n, device = program.rows, runner.device
        # First what changes with every step of decoding, then what rarely does, then what only a kernel at the start reads
        # to form `positions` and `lengths`.
        shapes: dict[str, tuple[int, ...]] = {"token": (n,), "slots": (steps, n), "positions": (steps, n)}
        shapes |= {f"{name}.lengths": (steps, n) for name in sizes}
        self.often = sum(torch.Size(shape).numel() for shape in shapes.values())
        for name, (sequences, width) in sizes.items():
            shapes |= {f"{name}.table": (sequences, width), f"{name}.seq": (n,), f"{name}.start": (sequences,)}
        shapes |= {"position": (n,)} | {f"{name}.length": (n,) for name in sizes}
        self.states = list(sizes)
        self.ints, self.packed = packed(shapes, device)
        self.host, self.pinned = packed(shapes, torch.device("cpu"))
        self.cells = (ctypes.c_int32 * self.pinned.numel()).from_address(self.pinned.data_ptr())
        places = [(self.host[f"{name}.table"], width) for name, (_, width) in sizes.items()]
        self.table_cells = [((table.data_ptr() - self.pinned.data_ptr()) // 4, width) for table, width in places]
        self.tables: list[int] | None = None
        """Versions of the blocks that the staged tables are copies of; None when other calls have written there."""
        self.ramp = torch.arange(steps, dtype=torch.int32)[:, None]
        # Slots, positions and lengths lie one after the other, so one addition forms all steps of them. A length counts its
        # own row, too.
        kinds = 2 + len(sizes)
        self.ramps = torch.stack([self.ramp + (kind >= 2) for kind in range(kinds)])
        self.starts = torch.zeros(kinds, 1, n, dtype=torch.int32)
        self.starts_cells = (ctypes.c_int32 * self.starts.numel()).from_address(self.starts.data_ptr())
        self.counted = self.pinned[n : self.often].view(kinds, steps, n)
        self.copied = torch.cuda.Event()
        self.unread = False
        """Whether a graph that copies from the page-locked memory was launched, and nobody has waited for it yet."""
        self.enters = next(name for name in program.inputs if name not in ("token", "position", "allowed"))
        self.hidden = torch.zeros_like(program.inputs[self.enters])
        # Drafts and, as the same 32 bits, log-probabilities: one copy takes both to the caller.
        self.result = torch.zeros(2, steps, n, dtype=torch.int32, device=device)
        self.drafts, self.logprobs = self.result[0], self.result[1].view(torch.float32)
        self.pinned_result = torch.zeros(2, steps, n, dtype=torch.int32, pin_memory=True)
        self.readings: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        # A grammar's mask is too large for the packed copy.
        masked = program.spec.entry.endswith(MASKED)
        self.allowed = torch.zeros_like(program.inputs["allowed"]) if masked else None
        self.prefix = MASKED_OUTPUT if masked else ""
        self.hiddens = [torch.zeros_like(program.made["next_hidden"]) for _ in range(steps)]
        self.views: dict[tuple[bool, str, torch.Size], torch.Tensor] = {}
        self.storage = {f"{name}.{part}": item for name, pair in storage.items() for part, item in zip("kv", pair, strict=True)}
        self.calls = [self._arguments(self.later if step else program, step) for step in range(steps)]
        slots = self.ints["slots"]
        self.begins = [
            _converted(self.ints["position"], self.ints[f"{name}.length"], slots, self.ints["positions"], lengths, stops)
            for name, lengths in ((name, self.ints[f"{name}.lengths"]) for name in self.states)
        ]
        self.end = _converted(slots, self.drafts, self.logprobs, stops)
        self.graphs: dict[tuple[bool, bool, bool, int | None], torch.cuda.CUDAGraph | None] = {}
        self.entering = next(i for i, arg in enumerate(program.spec.args) if (arg.role, arg.name) == ("input", self.enters))
        self.recent: deque[int] = deque(maxlen=MOST_PLACES)
        """Where the hiddens lay that came last, and `places` of those that are read where they lie."""
        self.places: set[int] = set()
        self.newest: torch.cuda.CUDAGraph | None = None
        """What was replayed last: `measure` times it."""

    def _arguments(self, program: _Program, step: int) -> list[Any]:
        given: dict[tuple[str, str], torch.Tensor] = {
            ("input", "token"): self.drafts[step - 1] if step else self.ints["token"],
            ("input", "hidden" if step else self.enters): self.hiddens[step - 1] if step else self.hidden,
            ("input", "position"): self.ints["positions"][step],
            ("output", f"{self.prefix}draft"): self.drafts[step],
            ("output", f"{self.prefix}logprob"): self.logprobs[step],
            ("output", "next_hidden"): self.hiddens[step],
        }
        if self.allowed is not None:
            given["input", "allowed"] = self.allowed
        given |= {("state", name): tensor for name, tensor in self.storage.items()}
        for name in self.states:
            given |= {("state", f"{name}.{part}"): self.ints[f"{name}.{part}"] for part in ("seq", "start", "table")}
            given |= {("state", f"{name}.length"): self.ints[f"{name}.lengths"][step]}
            given |= {("state", f"{name}.slot"): self.ints["slots"][step]}
        arguments = list(program.args)
        for index, arg in enumerate(program.spec.args):
            if (arg.role, arg.name) in given:
                arguments[index] = tvm_ffi.from_dlpack(given[arg.role, arg.name])
        return arguments

    def run(self, first: int, count: int, token, hidden, position, kv: Caches, slots, allowed=None) -> None:
        """Stage and launch; results stay here until the next run."""
        sources = self._sources(first, count, token, position, kv, slots)
        formed, masked = all(source.device.type == "cpu" for source in sources.values()), self.stops
        if formed:
            masked = self._stage_host(count, sources)
        else:
            self._stage_mixed(count, sources)
        self.hidden[:count].copy_(hidden[first : first + count])
        if self.allowed is not None and allowed is not None:
            self.allowed[:count].copy_(allowed[first : first + count])
        self._replay(formed=formed, masked=masked)

    def run_packed(self, rows: ChainRows, hidden: torch.Tensor, allowed: torch.Tensor | None) -> None:
        """As `run`, of plain integers: they go straight into the page-locked memory."""
        n, count = self.program.rows, len(rows.tokens)
        if self.tables is None or self.unread:
            self._await_copy()
        if rows.counts.count(self.steps) == n:
            self._stage_whole(rows)
        else:
            self._stage_some(rows)
        self._stage_tables(rows.blocks)
        if self.allowed is not None and allowed is not None:
            self.allowed[:count].copy_(allowed)
        in_place = count == n and self._reads_in_place(hidden)
        if not in_place:
            (self.hidden if count == n else self.hidden[:count]).copy_(hidden)
        # The copy is part of the graph: `read` waits for all of it, so this memory is free again by the next call.
        self.unread = True
        self._replay(formed=True, masked=False, sends=True, hidden=hidden if in_place else None)

    def _reads_in_place(self, hidden: torch.Tensor) -> bool:
        """Whether the first step reads the caller's memory: servers hand over the same one time and again, or a few in turn, so
        graphs of their own save a copy: for the first few that came again soon. Only addresses are kept."""
        if hidden.dtype != self.hidden.dtype or hidden.shape != self.hidden.shape or not hidden.is_contiguous():
            return False
        address = hidden.data_ptr()
        if address in self.places:
            return True
        if address in self.recent and address % ALIGNED == 0 and len(self.places) < MOST_PLACES:
            self.places.add(address)
        self.recent.append(address)
        return address in self.places

    def _stage_whole(self, rows: ChainRows) -> None:
        """Every row of the program makes all steps: what step 0 reads, counted on, but for slots that go over to a block
        elsewhere."""
        n = self.program.rows
        self.starts_cells[:] = rows.starts + rows.positions + rows.before * len(self.states)
        torch.add(self.starts, self.ramps, out=self.counted)
        self.cells[:n] = rows.tokens
        for row, written in rows.apart.items():
            self.cells[n + row : n + row + n * self.steps : n] = written

    def _stage_some(self, rows: ChainRows) -> None:
        """Rows without work, and rows that stop before the end."""
        idle = [0] * (self.program.rows - len(rows.tokens))
        tokens, slots, positions, lengths = [*rows.tokens, *idle], [], [], []
        written = rows.slots()
        for step in range(self.steps):
            live = [step < end for end in rows.counts]
            slots += [row[step] if on else -1 for row, on in zip(written, live, strict=True)] + [-1] * len(idle)
            positions += [position + step if on else 0 for position, on in zip(rows.positions, live, strict=True)] + idle
            lengths += [before + step + 1 if on else 0 for before, on in zip(rows.before, live, strict=True)] + idle
        self.cells[: self.often] = tokens + slots + positions + lengths * len(self.states)

    def _stage_tables(self, blocks: Sequence[Blocks]) -> None:
        """Tables whose blocks have changed since they were copied."""
        versions = [item.version for item in blocks]
        if self.tables is None:
            for name in self.states:
                self.host[f"{name}.seq"].copy_(torch.arange(self.program.rows, dtype=torch.int32))
                self.host[f"{name}.start"].zero_()
            self.tables = [-1] * self.program.rows
        if self.tables[: len(versions)] == versions:
            return
        for row, (item, seen) in enumerate(zip(blocks, self.tables, strict=False)):
            if seen == item.version:
                continue
            kept = item.steady if seen == item.since else 0
            self.tables[row] = -1  # an interrupt may come before it is whole
            for first, width in self.table_cells:
                self.cells[first + row * width + kept : first + row * width + len(item.blocks)] = item.blocks[kept:]
            item.copied()
            self.tables[row] = item.version

    def _sources(self, first: int, count: int, token, position, kv: Caches, slots) -> dict[str, torch.Tensor]:
        last = first + count
        sources = {"token": token[first:last], "position": position[first:last], "slots": slots[:, first:last]}
        for name, cache in kv.items():
            sources |= {f"{name}.seq": cache.seq[first:last], f"{name}.length": cache.length[first:last]}
            sources |= {f"{name}.start": cache.start, f"{name}.table": cache.table}
        return sources

    def _stage_host(self, count: int, sources: dict[str, torch.Tensor]) -> bool:
        """All integers from the host, with what every step reads. Returns whether some row stops before the end."""
        self._clear(count)
        for name, source in sources.items():
            if name != "position" and not name.endswith(".length"):
                self._part(self.host, name, source.shape).copy_(source)
        ragged = self.stops and any(slot < 0 for row in sources["slots"].tolist() for slot in row)
        stopped = sources["slots"] < 0 if ragged else None
        for name in ("position", *(f"{name}.length" for name in self.states)):
            ramped = self._part(self.host, f"{name}s", torch.Size((self.steps, count)))
            torch.add(sources[name], self.ramp, out=ramped)
            if stopped is not None:
                ramped.masked_fill_(stopped, 0)
        self._send()
        return ragged

    def _stage_mixed(self, count: int, sources: dict[str, torch.Tensor]) -> None:
        """Some or all integers on the device already; a kernel forms what every step reads."""
        on_host = {name: source for name, source in sources.items() if source.device.type == "cpu"}
        if on_host or count < self.program.rows:
            self._clear(count)
            for name, source in on_host.items():
                self._part(self.host, name, source.shape).copy_(source)
            self._send()
        rest = [name for name in sources if name not in on_host]
        targets = [self._part(self.ints, name, sources[name].shape) for name in rest]
        torch._foreach_copy_(targets, [sources[name] for name in rest])  # type: ignore[reportPrivateImportUsage]

    def _clear(self, count: int) -> None:
        """Rows without work write nowhere and see nothing."""
        self._await_copy()
        self.tables = None
        if count < self.program.rows:
            self.pinned.zero_()
            self.host["slots"].fill_(-1)

    def _await_copy(self) -> None:
        """The copy before has left the page-locked memory; as a rule it has long since."""
        if self.unread:  # nobody waited: an interrupt came before `read` or inside of it
            torch.cuda.synchronize(self.runner.device)
            self.unread = False
        if not self.copied.query():
            self.copied.synchronize()

    def _send(self) -> None:
        self.packed.copy_(self.pinned, non_blocking=True)
        self.copied.record()

    def _part(self, tensors: dict[str, torch.Tensor], name: str, shape: torch.Size) -> torch.Tensor:
        """The corner of a staging tensor that a tensor of `shape` fills. Cutting views costs as much as copying into them."""
        key = (tensors is self.host, name, shape)
        view = self.views.get(key)
        if view is None:
            view = self.views[key] = tensors[name][tuple(slice(size) for size in shape)]
        return view

    def _replay(self, *, formed: bool, masked: bool, sends: bool = False, hidden: torch.Tensor | None = None) -> None:
        """formed: positions and lengths are there; masked: some rows may have stopped; sends: with the copy of the staged
        integers; hidden: what is read where it lies. Recorded at the second use."""
        self.runner.newest = self
        key = (formed, masked, sends, None if hidden is None else hidden.data_ptr())
        if key not in self.graphs:
            self.graphs[key] = None
            return self._launch(formed, masked, sends, hidden)
        graph = self.graphs[key]
        if graph is None:
            graph = record(lambda: self._launch(formed, masked, sends, hidden), self.runner.recorder)[0]
            self.graphs[key] = graph
        self.newest = graph
        graph.replay()

    def _launch(self, formed: bool, masked: bool, sends: bool, hidden: torch.Tensor | None) -> None:
        begin, end = self.runner.chain_functions
        first = list(self.calls[0])
        if hidden is not None:
            first[self.entering] = tvm_ffi.from_dlpack(hidden)
        with self.runner._stream():
            if sends:
                self.packed.copy_(self.pinned, non_blocking=True)
            if not formed:
                for arguments in self.begins:
                    begin(*arguments)
            self.program.call(*first)
            for arguments in self.calls[1:]:
                self.later.call(*arguments)
            if masked:
                end(*self.end)

    def results(self, count: int) -> DraftChain:
        """Fresh tensors."""
        made = self.result[:, :, :count].clone()
        return DraftChain(made[0].T, made[1].view(torch.float32).T, self.hiddens[-1][:count].clone())

    def read(self, count: int) -> Drafts:
        """(drafts, logprobs) on the host: waits for the chain."""
        self.pinned_result.copy_(self.result, non_blocking=True)
        if count not in self.readings:
            drafts, logprobs = self.pinned_result[:, :, :count].transpose(1, 2).unbind()
            self.readings[count] = (drafts, logprobs.view(torch.float32))
        drafts, logprobs = self.readings[count]
        torch.cuda.current_stream().synchronize()
        self.unread = False
        return drafts.tolist(), logprobs.tolist()


def _places(storage: Mapping[str, tuple[torch.Tensor, torch.Tensor]]) -> tuple[Any, ...]:
    """Where caches lie, as graphs are told apart by it."""
    return tuple((k.data_ptr(), v.data_ptr(), k.shape) for k, v in storage.values())


def _only_step(chain: DraftChain) -> DraftStep:
    return DraftStep(chain.drafts[:, 0], chain.logprobs[:, 0], chain.next_hidden)


def _converted(*arguments: torch.Tensor | bool) -> list[Any]:
    return [tvm_ffi.from_dlpack(item) if isinstance(item, torch.Tensor) else int(item) for item in arguments]
