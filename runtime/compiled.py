"""`CompiledRunner`: an artifact's functions behind the `DraftRunner` interface.

Every function has staging tensors that are allocated once and never move; a call copies rows in, launches, and copies
results out. Weights are borrowed: a function is handed the caller's own memory.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
import tvm_ffi

from circuitgraph.artifact import Arg, Artifact, Function, Manifest
from circuitgraph.errors import ArtifactError, Fault, RuntimeUseError
from circuitgraph.ops import TORCH_DTYPES, PagedKV

from .arguments import device_of, of_kind, shown, whole
from .binding import check_weights, check_whole
from .cover import cover
from .runner import MASKED_OUTPUT, Caches, DraftChain, DraftRunner, no_autograd

log = logging.getLogger("circuitgraph.runtime")

FALLBACKS = ("cover", "single")
MOST_THREADS = 1024
"""OpenMP ends the process when it cannot start as many as it is asked for."""
CHAIN_FUNCTIONS = ("circuitgraph_chain_begin", "circuitgraph_chain_end")
"""What libraries for devices have beside the manifest's functions: the two ends of a chain."""
_DTYPES = {**TORCH_DTYPES, "i8": torch.int8}
_IDLE = {"slot": -1, "seq": 0, "length": 0}
"""How an idle row is addressed: it writes nowhere, and sees nothing of sequence 0."""


class CompiledRunner(DraftRunner):
    """Runs compiled programs: the exact n-row one, or what `fallback` says.

    Args:
        manifest: what was compiled.
        functions: symbol to callable, as `open_library` gives them.
        weights: every weight of the manifest by circuit name, and the tables' tensors. Borrowed.
        fallback: "cover", the fewest programs whose widths sum to at least n; "single", n runs of the one-row program.

    Raises:
        RuntimeUseError: weights that do not fit. ArtifactError: a fallback that the artifact cannot serve.
    """

    def __init__(
        self,
        manifest: Manifest,
        functions: Mapping[str, Callable[..., Any]],
        weights: Mapping[str, torch.Tensor],
        *,
        device: torch.device | str = "cpu",
        fallback: str = "cover",
    ):
        super().__init__()
        of_kind(manifest, Manifest, "manifest", "CompiledRunner", "a Manifest")
        of_kind(functions, Mapping, "functions", manifest.program, "callables by symbol, as open_library gives them")
        self.manifest = manifest
        self.circuit = manifest.circuit
        self.device = device_of(device, manifest.program)
        self._known_widths: dict[str, tuple[int, ...]] = {}
        self._known_paths: dict[tuple[int, bool], str] = {}
        check_fallback(fallback)
        if fallback == "single" and 1 not in self.widths:
            raise ArtifactError(Fault("has no one-row draft program, which fallback='single' needs", where=manifest.program))
        absent = sorted({function.symbol for function in manifest.functions.values()} - set(functions))
        if absent:
            fault = Fault(
                "functions are missing", where=manifest.program, expected="those of open_library", got=", ".join(absent)
            )
            raise RuntimeUseError(fault)
        self.fallback = fallback
        self.weights = self._fitting(weights)
        with no_autograd():
            workspace = _Workspace(manifest, self.device)
            self._programs = {
                (function.entry, function.rows): _Program(function, functions[function.symbol], workspace, self.device)
                for function in manifest.functions.values()
            }
        self._block_size = _compiled_block_size(manifest)
        self._logged: set[tuple[str, int]] = set()
        self._bind()

    def _bind(self) -> None:
        self._max_position = super().max_position
        converted = {name: tvm_ffi.from_dlpack(tensor.detach()) for name, tensor in self.weights.items()}
        for program in self._programs.values():
            program.bind(converted)

    def rebind(self, weights: Mapping[str, torch.Tensor]) -> None:
        """Use other tensors for some or all weights from the next call on, without compiling. A quantised weight's are given
        together.

        Raises:
            RuntimeUseError: one that does not fit; then none was changed.
        """
        of_kind(weights, Mapping, "weights", self.circuit.name, "tensors by the circuit's names")
        check_whole(self.manifest, weights)
        self.weights = self._fitting({**self.weights, **weights})
        self._bind()

    def _fitting(self, weights: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """The weights, checked: nothing has changed where one is refused."""
        return check_weights(self.manifest, weights, self.device)

    def release(self, storage: Mapping[str, tuple[torch.Tensor, torch.Tensor]]) -> Callable[[], None]:
        this, places = weakref.ref(self), {(k.data_ptr(), v.data_ptr()) for k, v in storage.values()}

        def drop() -> None:
            runner = this()
            if runner is not None:
                for program in runner._programs.values():
                    program.forget(places)

        return drop

    # -- facts -------------------------------------------------------------------------------------------------

    @property
    def widths(self) -> tuple[int, ...]:
        return self._widths(self._entry())

    @property
    def context_rows(self) -> tuple[int, ...]:
        return self._widths("context")

    @property
    def block_size(self) -> int | None:
        return self._block_size

    @property
    def max_position(self) -> int | None:
        return self._max_position  # asked for in every call

    def _unsaid_vocab(self) -> int:
        # Artifacts of before the circuit said it: a head may score some of the target's tokens alone.
        return self.manifest.model.vocab_size

    def serves(self, n: int, *, masked: bool = False) -> str | None:
        known = self._known_paths.get((n, masked)) if type(n) is int else None
        if known is None:
            known = self._path(self._entry(masked=masked), n)
            if known is not None:
                self._known_paths[n, masked] = known
        return known

    def _widths(self, entry: str) -> tuple[int, ...]:
        """Sequences that programs of the entry serve: as the manifest's rows, which looks through all functions each time."""
        if entry not in self._known_widths:
            group = self._group(entry)
            widths = (rows // group for rows in self.manifest.widths(entry) if not rows % group)
            if entry.startswith("first") and entry != "first_logits":  # a chain goes on from it
                later = self.manifest.widths(entry.replace("first", "draft"))
                widths = (rows for rows in widths if rows in later)
            self._known_widths[entry] = tuple(widths)
        return self._known_widths[entry]

    def _group(self, entry: str) -> int:
        """Rows of a sequence in a call of `entry`."""
        return self.circuit.block_size if self.circuit.entry(entry).rows == "block" else 1

    def _path(self, entry: str, n: int) -> str | None:
        widths = self._widths(entry)
        if whole(n, "n", self.circuit.name) < 1 or not widths:
            return None
        if n in widths:
            return "n-row"
        return "split" if self.fallback == "cover" else "single"

    # -- work --------------------------------------------------------------------------------------------------

    def run_entry(self, entry: str, inputs: Mapping[str, torch.Tensor], kv: Caches) -> dict[str, torch.Tensor]:
        rows = _Rows(inputs, kv)
        n = rows.count // self._group(entry)
        if entry != "context":
            self._count(entry, n)
        results: list[dict[str, torch.Tensor]] = []
        for program, first, count in self._parts(entry, n):
            program.stage(rows, first, count)
            program.run()
            results.append({name: tensor.clone() for name, tensor in program.outputs(count).items()})
        if len(results) == 1:
            return results[0]
        return {name: torch.cat([part[name] for part in results]) for name in results[0]}

    @no_autograd()
    def chain(self, steps, token, hidden, position, kv, slots, *, allowed=None, recycled=False) -> DraftChain:
        if self.kind.at_once:
            return self._chain_at_once(steps, token, hidden, position, kv, slots, allowed)
        n = self._check_rows(token, hidden, position, kv, recycled)
        self._check_allowed(allowed, n)
        entry = self._entry(masked=allowed is not None, recycled=recycled)
        ragged = self._check_chain(steps, n, position, slots, kv)
        drafts = torch.empty(n, steps, dtype=torch.int32, device=self.device)
        logprobs = torch.empty(n, steps, device=self.device)
        next_hidden = torch.empty(n, self.recycled_size, dtype=TORCH_DTYPES[self.circuit.act], device=self.device)
        inputs = {"token": token, self._hidden_input(recycled): hidden, "position": position}
        if allowed is not None:
            inputs["allowed"] = self._own_mask(allowed)
        rows = _Rows(inputs, kv, slots[0])
        self._count(entry, n)
        for program, first, count in self._parts(entry, n):
            last = first + count
            made = zip(drafts[first:last].unbind(1), logprobs[first:last].unbind(1), strict=True)
            written = slots[:, first:last].unbind(0)
            program.stage(rows, first, count)
            for step, (draft, logprob) in enumerate(made):
                if step:
                    before, program = program, self._following(program)
                    if program is not before:
                        program.stage(rows, first, count)
                    program.advance(before, count, written[step], written[step] < 0 if ragged else None)
                program.run()
                out = program.outputs(count)
                draft.copy_(out["draft"])
                logprob.copy_(out["logprob"])
            next_hidden[first:last].copy_(program.outputs(count)["next_hidden"])
        if ragged:
            stopped = (slots < 0).T
            drafts.masked_fill_(stopped, -1)
            logprobs.masked_fill_(stopped, float("nan"))
        return DraftChain(drafts, logprobs, next_hidden)

    def _parts(self, entry: str, n: int) -> Iterator[tuple[_Program, int, int]]:
        """(program, first row, rows) that serve n rows of `entry`, or n sequences of a block's, in order."""
        widths = self._widths(entry)
        if not widths:
            raise self._no_programs(entry)
        # Context rows are always chunked: the one-row fallback is about drafting.
        single = self.fallback == "single" and entry != "context" and n not in widths and 1 in widths
        first, group = 0, self._group(entry)
        for width in (1,) * n if single else cover(n, widths):
            count = min(width, n - first)
            yield self._programs[entry, width * group], first * group, count * group
            first += count

    def _following(self, program: _Program) -> _Program:
        """What runs the step after one of `program`: itself, unless first steps are programs of their own."""
        entry = program.spec.entry.replace("first", "draft")
        return self._programs[entry, program.rows]

    def _no_programs(self, entry: str) -> RuntimeUseError:
        hint = f"It has: {', '.join(sorted({f.entry for f in self.manifest.functions.values()}))}."
        hint += f" Compile with --with {entry}." if entry in {e.name for e in self.circuit.entries if e.on_request} else ""
        return RuntimeUseError(Fault(f"the artifact has no '{entry}' programs", where=self.circuit.name, hint=hint))

    def _count(self, entry: str, n: int) -> None:
        path = self._path(entry, n)
        if path is None:
            raise self._no_programs(entry)
        self.paths[path] += 1
        if (entry, n) not in self._logged:
            self._logged.add((entry, n))
            level = logging.INFO if path == "n-row" else logging.WARNING
            widths = self._widths(entry)
            log.log(level, "%s: %d rows of '%s' run as %s (compiled: %s)", self.circuit.name, n, entry, path, widths)


class _Rows(NamedTuple):
    """The rows of one call. `slot`, where given, stands in for every cache's own."""

    inputs: Mapping[str, torch.Tensor]
    kv: Caches
    slot: torch.Tensor | None = None

    @property
    def count(self) -> int:
        return next(iter(self.inputs.values())).shape[0]


class _Views(NamedTuple):
    """Staging tensors of one program, cut after its first `count` rows: pairs (real rows, idle rows)."""

    inputs: dict[str, tuple[torch.Tensor, torch.Tensor]]
    addressing: dict[str, dict[str, tuple[torch.Tensor, torch.Tensor]]]
    outputs: dict[str, torch.Tensor]


class _Program:
    """One function, its staging tensors and its argument list; cutting views and converting tensors is done once."""

    def __init__(self, spec: Function, call: Callable[..., Any], workspace: _Workspace, device: torch.device):
        self.spec, self.call = spec, call
        self.rows = spec.rows
        self.inputs: dict[str, torch.Tensor] = {}
        self.addressing: dict[str, dict[str, torch.Tensor]] = {}
        self.made: dict[str, torch.Tensor] = {}
        self.args: list[Any] = [None] * len(spec.args)
        self.weights: dict[int, str] = {}
        self.storage: dict[str, dict[str, int]] = {}
        """State to the places in `args` of what its caches bring: k, v, table, start."""
        self._last: dict[str, PagedKV] = {}
        self._views: dict[int, _Views] = {}
        for index, arg in enumerate(spec.args):
            self._place(index, arg, workspace, device)

    def _place(self, index: int, arg: Arg, workspace: _Workspace, device: torch.device) -> None:
        state, _, part = arg.name.rpartition(".")
        if arg.role in ("weight", "table"):
            self.weights[index] = arg.name
            return
        if arg.role == "state" and part not in _IDLE:
            self.storage.setdefault(state, {})[part] = index
            return
        if arg.role == "workspace":
            tensor = workspace.view(arg)
        else:
            tensor = torch.zeros(arg.shape, dtype=_DTYPES[arg.dtype], device=device)  # type: ignore[arg-type]
            if arg.role == "state":
                self.addressing.setdefault(state, {})[part] = tensor
            else:
                (self.inputs if arg.role == "input" else self.made)[arg.name] = tensor
        self.args[index] = tvm_ffi.from_dlpack(tensor)

    def bind(self, converted: Mapping[str, Any]) -> None:
        for index, name in self.weights.items():
            self.args[index] = converted[name]

    def stage(self, rows: _Rows, first: int, count: int) -> None:
        """Copy rows first..first+count-1 in, and rewrite the rows after them as idle. What a step before makes is not in them."""
        whole = count == rows.count
        last = first + count
        views = self.views(count)
        for name, (real, idle) in views.inputs.items():
            source = rows.inputs.get(name)
            if source is not None:
                real.copy_(source if whole else source[first:last])
            if count < self.rows:
                idle.zero_()
        for state, parts in views.addressing.items():
            cache = rows.kv[state]
            for part, (real, idle) in parts.items():
                source = rows.slot if part == "slot" and rows.slot is not None else getattr(cache, part)
                real.copy_(source if whole else source[first:last])
                if count < self.rows:
                    idle.fill_(_IDLE[part])
        for state, places in self.storage.items():
            cache, previous = rows.kv[state], self._last.get(state)
            for part, index in places.items():
                tensor = getattr(cache, part)
                if previous is None or tensor is not getattr(previous, part):
                    self.args[index] = tvm_ffi.from_dlpack(tensor.detach())
            self._last[state] = cache

    def forget(self, places: Collection[tuple[int, int]]) -> None:
        """Let go of caches whose (keys, values) lie there; the next `stage` brings others."""
        for state, cache in list(self._last.items()):
            if (cache.k.data_ptr(), cache.v.data_ptr()) in places:
                del self._last[state]
                for index in self.storage[state].values():
                    self.args[index] = None

    def advance(self, before: _Program, count: int, slot: torch.Tensor, stopped: torch.Tensor | None) -> None:
        """Make the results of the call `before` the next call's inputs, one position on. `stopped` rows see and write nothing."""
        views, made = self.views(count), before.outputs(count)
        views.inputs["token"][0].copy_(made["draft"])
        views.inputs["hidden"][0].copy_(made["next_hidden"])
        position = views.inputs["position"][0]
        position.add_(1)
        if stopped is not None:
            position.masked_fill_(stopped, 0)
        for parts in views.addressing.values():
            if "slot" in parts:
                parts["slot"][0].copy_(slot)
            if "length" in parts:
                parts["length"][0].add_(1)
                if stopped is not None:
                    parts["length"][0].masked_fill_(stopped, 0)

    def run(self) -> None:
        self.call(*self.args)

    def outputs(self, count: int) -> dict[str, torch.Tensor]:
        """The first `count` rows of the last call's outputs; valid until the next."""
        return self.views(count).outputs

    def views(self, count: int) -> _Views:
        views = self._views.get(count)
        if views is None:
            cut = lambda tensors: {name: (tensor[:count], tensor[count:]) for name, tensor in tensors.items()}  # noqa: E731
            addressing = {state: cut(parts) for state, parts in self.addressing.items()}
            outputs = {name.removeprefix(MASKED_OUTPUT): tensor[:count] for name, tensor in self.made.items()}
            views = self._views[count] = _Views(cut(self.inputs), addressing, outputs)
        return views


class _Workspace:
    """One memory for the intermediates of every program: they never run at the same time."""

    def __init__(self, manifest: Manifest, device: torch.device):
        sizes = [function.workspace_bytes for function in manifest.functions.values()]
        self.memory = torch.zeros(max(sizes, default=0), dtype=torch.uint8, device=device)

    def view(self, arg: Arg) -> torch.Tensor:
        dtype = _DTYPES[arg.dtype]
        shape = [int(dim) for dim in arg.shape]
        size = dtype.itemsize
        for dim in shape:
            size *= dim
        return self.memory[:size].view(dtype).view(shape)


def open_library(artifact: Artifact, *, threads: int | None = None) -> dict[str, Callable[..., Any]]:
    """Load the artifact's (verified) library: symbol to function.

    threads: of parallel loops; None takes what torch uses now. It holds for all who have this library open: a process
        loads it once.

    Raises:
        RuntimeUseError: no number of threads. ArtifactError: it does not load here, or lacks a function that the manifest
            lists.
    """
    of_kind(artifact, Artifact, "artifact", "open_library", "an Artifact, as read_artifact gives")
    check_threads(threads, artifact.library)
    path = artifact.library.resolve()
    try:
        module = tvm_ffi.load_module(str(path))
    except Exception as error:
        hint = "It needs this platform's C library and tvm-ffi; compile it again here."
        raise ArtifactError(Fault(f"does not load: {error}", where=str(path), hint=hint)) from error
    functions = {}
    for function in artifact.manifest.functions.values():
        if not module.implements_function(function.symbol):
            raise ArtifactError(Fault(f"has no function '{function.symbol}'", where=str(path), hint="Compile again."))
        functions[function.symbol] = module.get_function(function.symbol)
    functions.update({name: module.get_function(name) for name in CHAIN_FUNCTIONS if module.implements_function(name)})
    _set_threads(module, threads)
    return functions


def check_fallback(fallback: Any) -> None:
    if fallback not in FALLBACKS:
        expected, got = ", ".join(FALLBACKS), shown(fallback)
        raise RuntimeUseError(Fault("no such fallback", subject="fallback", expected=expected, got=got))


def check_threads(threads: Any, path: Path | str) -> None:
    if threads is not None:
        whole(threads, "threads", str(path), least=1, most=MOST_THREADS, message="is no number of threads")


def _set_threads(module: Any, threads: int | None) -> None:
    """CPU libraries export `circuitgraph_init(threads)`; device libraries have none.

    torch's number is passed on, since OpenMP's own is another in each calling thread.
    """
    if module.implements_function("circuitgraph_init"):
        module.get_function("circuitgraph_init")(threads or torch.get_num_threads())


def _compiled_block_size(manifest: Manifest) -> int | None:
    """The block size that a program's state arguments fix; None when they leave it open."""
    storage = {f"{state.name}.k" for state in manifest.circuit.states}
    sizes = {arg.shape[3] for f in manifest.functions.values() for arg in f.args if arg.name in storage}
    return next((size for size in sizes if isinstance(size, int)), None)
