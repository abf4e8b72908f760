"""`DraftRunner`: runs a circuit's programs for any number of rows. Knows rows, slots and tables, not sequences' lives.

Addressing of a call is one `PagedKV` per state (see `circuit.ir.State`): storage of the caller's, a write slot per row
(-1 writes nothing), block tables per sequence. The rows of one `draft` call belong to different sequences.
"""

from __future__ import annotations

import abc
import functools
import hashlib
import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol, TypeVar, cast

import torch

from circuitgraph.checkpoint.packed import dequantised
from circuitgraph.circuit.ir import Circuit, State
from circuitgraph.errors import Fault, RuntimeUseError
from circuitgraph.interpreter import interpret
from circuitgraph.ops import TORCH_DTYPES, PagedKV

from . import device_rows
from .arguments import is_whole, of_kind, shown, whole

Caches = Mapping[str, PagedKV]
Function = TypeVar("Function", bound=Callable[..., Any])


class no_autograd:
    """Plain tensors without gradients, whatever mode the caller is in: memory that is kept must serve every later mode.

    As a decorator it costs nothing where the caller is in that mode already.
    """

    def __enter__(self) -> None:
        self._modes = (torch.inference_mode(False), torch.no_grad())
        for mode in self._modes:
            mode.__enter__()

    def __exit__(self, *exception: Any) -> None:
        for mode in reversed(self._modes):
            mode.__exit__(*exception)

    def __call__(self, function: Function) -> Function:
        @functools.wraps(function)
        def inner(*args: Any, **options: Any) -> Any:
            if torch.is_inference_mode_enabled():
                with no_autograd():
                    return function(*args, **options)
            if not torch.is_grad_enabled():
                return function(*args, **options)
            torch.set_grad_enabled(False)  # a context manager costs several times as much
            try:
                return function(*args, **options)
            finally:
                torch.set_grad_enabled(True)

        return inner  # type: ignore[return-value]


Drafts = tuple[list[list[int]], list[list[float]]]
"""(ids, log-probabilities) on the host: a list of one for each draft position, of every row."""


class DraftStep(NamedTuple):
    """One draft position. draft: int32[n]; logprob: f32[n], of the draft under what was scored; next_hidden: act[n, H]."""

    draft: torch.Tensor
    logprob: torch.Tensor
    next_hidden: torch.Tensor


class DraftChain(NamedTuple):
    """`steps` draft positions. drafts: int32[n, steps], -1 where a row had stopped; logprobs: f32[n, steps], NaN there;
    next_hidden: act[n, H] of the last step (meaningless for rows that stopped before it)."""

    drafts: torch.Tensor
    logprobs: torch.Tensor
    next_hidden: torch.Tensor

    def read(self) -> Drafts:
        """Drafts and log-probabilities on the host: the one place that waits for the device, and one copy."""
        if self.drafts.device.type == "cpu":
            return self.drafts.tolist(), self.logprobs.tolist()
        drafts, bits = torch.stack([self.drafts, self.logprobs.view(torch.int32)]).cpu()
        return drafts.tolist(), bits.view(torch.float32).tolist()


class Blocks(Protocol):
    """Cache blocks of one sequence; `version` differs whenever they do, from all that any sequence ever had."""

    blocks: list[int]
    version: int


class ChainRows(NamedTuple):
    """A chain's rows as plain integers, one item each, from a caller that vouches for them.

    tokens, positions: the newest token and its position. before: cache rows before it. slots: where its row and those of
    the next steps are written; a row stops where they end. blocks: where its cache lies.
    """

    tokens: Sequence[int]
    positions: Sequence[int]
    before: Sequence[int]
    slots: Sequence[Sequence[int]]
    blocks: Sequence[Blocks]

    def part(self, first: int, count: int) -> ChainRows:
        """`count` of the rows."""
        if count == len(self.tokens):
            return self
        cut = slice(first, first + count)
        return ChainRows(self.tokens[cut], self.positions[cut], self.before[cut], self.slots[cut], self.blocks[cut])


class DraftRunner(abc.ABC):
    """Runs the entries of one circuit with weights bound. One runner serves one device stream and one thread at a time.

    Arguments of the running methods, for n rows: token int32[n], hidden float[n, H] (rounded to the circuit's `act`),
    position int32[n] (sequence position of `token`), kv: state name to `PagedKV` (slot, seq, length int32[n];
    table int32[s, b]; start int32[s]), all on `device`. Results are fresh tensors of the caller's.

    allowed int32[n, mask_words], where it is given, is a grammar's mask: bit c % 32 of word c // 32 is token c, 1 allows
    it. A row in which nothing is allowed drafts token 0 with log-probability -inf.

    Raises, from all of them: RuntimeUseError for wrong shapes or dtypes, and, where the tensors lie in host memory, for
    tokens and positions out of range, before anything runs. Values of device tensors are not looked at: no host sync.
    """

    circuit: Circuit
    device: torch.device
    weights: Mapping[str, torch.Tensor]
    """Weights and tables by circuit name, as bound: borrowed, never written."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        """Taken by proposers for each of their calls: staging memory is the runner's, and several may share it."""
        self.paths: Counter[str] = Counter()
        """How many calls each path served: n-row, split, single, reference."""

    # -- facts -------------------------------------------------------------------------------------------------

    @property
    @abc.abstractmethod
    def widths(self) -> tuple[int, ...]:
        """Rows of the compiled draft programs, ascending; empty where any number of rows runs as it is."""

    @property
    @abc.abstractmethod
    def context_rows(self) -> tuple[int, ...]:
        """Rows of the compiled context programs; empty where any number of rows runs as it is."""

    @property
    def block_size(self) -> int | None:
        """The KV block size that programs were compiled for, None where any will do."""
        return None

    @abc.abstractmethod
    def serves(self, n: int, *, masked: bool = False) -> str | None:
        """How n draft rows would run: "n-row" (one exact program), "split", "single", "reference"; None: not at all.

        masked: with a grammar's mask, which programs of their own serve.
        """

    @property
    def max_position(self) -> int | None:
        """Positions below this have RoPE rows; None without such a limit."""
        rows = [self.weights[f"{table.name}.cos"].shape[0] for table in self.circuit.tables]
        return min(rows) if rows else None

    def release(self, storage: Mapping[str, tuple[torch.Tensor, torch.Tensor]]) -> Callable[[], None]:
        """What to call when the caches of `storage` are no longer used: a runner may hold on to them until then. The
        callback keeps neither the caches nor the runner alive."""
        return lambda: None

    @property
    def integers_on(self) -> torch.device:
        """Where integer arguments lie best."""
        return self.device

    @property
    def hidden_source(self) -> str:
        """What the server must capture of the target: "post_norm" or "pre_norm" (its final norm).

        Raises:
            RuntimeUseError: the program does not say.
        """
        source = next(item.source for item in self.circuit.inputs if item.name == "hidden")
        if not source:
            hint = "Give that input a `source` in the program: post_norm or pre_norm."
            raise RuntimeUseError(
                Fault("the program does not say its source", where=self.circuit.name, subject="hidden", hint=hint)
            )
        return source

    @cached_property
    def hidden_size(self) -> int:
        """Columns of the hidden that is handed in.

        Raises:
            RuntimeUseError: the program's first step takes something else.
        """
        size = next((int(item.type.shape[-1]) for item in self.circuit.inputs if item.name == "hidden"), None)
        if size is None:
            got = ", ".join(item.name for item in self.circuit.inputs)
            hint = "The interpreter and its compiled functions run it; no runner drives it yet."
            fault = Fault("takes no 'hidden'", where=self.circuit.name, expected="an input 'hidden'", got=got, hint=hint)
            raise RuntimeUseError(fault)
        return size

    @cached_property
    def vocab_size(self) -> int:
        """Rows of the drafter's embedding: token ids below this can be fed."""
        embed = next(node for node in self.circuit.nodes if node.op == "embed")
        return int(self.circuit.types[embed.inputs[1]].shape[0])  # type: ignore[union-attr]

    @cached_property
    def mask_words(self) -> int | None:
        """32-bit words of a grammar's mask; None when the circuit takes none."""
        words = [int(item.type.shape[1]) for item in self.circuit.inputs if item.name == "allowed"]
        return words[0] if words else None

    def model_digest(self) -> str:
        """Of the circuit and of the tensors bound to it, as they are now: KV rows of one digest go together.

        Tensors count by where they are and how often they were written, not by their values: it costs microseconds.
        """
        facts = (self.circuit.name, self.circuit.dtypes, self.circuit.facts, self.circuit.states)
        digest = hashlib.sha256(repr(facts).encode())
        for name, tensor in sorted(self.weights.items()):
            version = None if tensor.is_inference() else tensor._version
            digest.update(repr((name, tensor.dtype, tuple(tensor.shape), tensor.data_ptr(), version)).encode())
        return digest.hexdigest()

    @cached_property
    def embed_size(self) -> int:
        """Columns of the drafter's embedding."""
        embed = next(node for node in self.circuit.nodes if node.op == "embed")
        return int(self.circuit.types[embed.inputs[1]].shape[1])  # type: ignore[union-attr]

    # -- work --------------------------------------------------------------------------------------------------

    @abc.abstractmethod
    def draft(self, token: torch.Tensor, hidden: torch.Tensor, position: torch.Tensor, kv: Caches) -> DraftStep:
        """One draft position of n sequences; appends row i at slot[i]."""

    @abc.abstractmethod
    def draft_masked(
        self, token: torch.Tensor, hidden: torch.Tensor, position: torch.Tensor, kv: Caches, allowed: torch.Tensor
    ) -> DraftStep:
        """As `draft`, of the tokens that `allowed` allows; the log-probability is the one among them."""

    @abc.abstractmethod
    def context(self, token: torch.Tensor, hidden: torch.Tensor, position: torch.Tensor, kv: Caches) -> None:
        """Appends any number of rows and computes nothing else. Rows of one sequence come in order."""

    @abc.abstractmethod
    def logits(
        self, token: torch.Tensor, hidden: torch.Tensor, position: torch.Tensor, kv: Caches
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """As `draft`, but scores instead of the best token: (logits act[n, V], next_hidden act[n, H])."""

    @no_autograd()
    def chain(
        self,
        steps: int,
        token: torch.Tensor,
        hidden: torch.Tensor,
        position: torch.Tensor,
        kv: Caches,
        slots: torch.Tensor,
        *,
        allowed: torch.Tensor | None = None,
    ) -> DraftChain:
        """`steps` draft positions: each takes the draft and the recycled hidden of the one before, one position on.

        slots: int32[steps, n], where step k of row i is written; it stands in for the caches' own `slot`. A row whose
        slot is -1 has stopped: from there on it writes nothing and drafts nothing. The caches' `length` is that of
        step 0. `allowed` holds for every step.
        """
        n = self._check_rows(token, hidden, position, kv)
        self._check_allowed(allowed, n)
        self._check_chain(steps, n, position, slots, kv)
        drafts = torch.full((n, steps), -1, dtype=torch.int32, device=self.device)
        logprobs = torch.full((n, steps), float("nan"), device=self.device)
        for k in range(steps):
            live = slots[k] >= 0
            caches = {
                name: replace(cache, slot=slots[k], length=(cache.length + k) * live)  # length 0: sees nothing
                for name, cache in kv.items()
            }
            rows = (token * live, hidden, (position + k) * live, caches)
            step = self.draft(*rows) if allowed is None else self.draft_masked(*rows, allowed)
            drafts[:, k] = torch.where(live, step.draft, drafts[:, k])
            logprobs[:, k] = torch.where(live, step.logprob, logprobs[:, k])
            token, hidden = step.draft, step.next_hidden
        return DraftChain(drafts, logprobs, hidden)

    def start_chain(
        self,
        steps: int,
        rows: ChainRows,
        hidden: torch.Tensor,
        storage: Mapping[str, tuple[torch.Tensor, torch.Tensor]],
        allowed: torch.Tensor | None = None,
    ) -> Callable[[], Drafts] | None:
        """As `chain`, of integers, and not waited for: what is returned waits, once, before the runner is used again. What a
        row has beyond its own slots means nothing. Nothing is checked.

        None from a runner that does not stage integers itself: give `chain` tensors then.
        """
        return None

    # The device form's arithmetic. A runner for a device may launch one kernel for each instead of torch's many.
    place_chain = staticmethod(device_rows.place_chain)
    place_accepted = staticmethod(device_rows.place_accepted)

    def embed(self, token: torch.Tensor, out: torch.Tensor) -> None:
        """Write the embedding of `token`, int32[1], to the row `out`, both on `device`. The host waits for nothing."""
        fits = isinstance(token, torch.Tensor) and token.shape == (1,) and token.dtype in (torch.int32, torch.int64)
        if not fits or not isinstance(out, torch.Tensor) or out.shape != (self.embed_size,) or not out.is_floating_point():
            expected, got = f"int32[1], and float[{self.embed_size}] for it", f"{shown(token)} and {shown(out)}"
            raise RuntimeUseError(Fault("do not fit", where=self.circuit.name, subject="embed", expected=expected, got=got))
        node = next(node for node in self.circuit.nodes if node.op == "embed")
        out.copy_(torch.nn.functional.embedding(token.to(self.device), self.weights[node.inputs[1]])[0])

    # -- checks that every implementation shares ---------------------------------------------------------------

    def _check_rows(self, token: torch.Tensor, hidden: torch.Tensor, position: torch.Tensor, kv: Caches) -> int:
        n = token.shape[0] if isinstance(token, torch.Tensor) and token.dim() == 1 else -1
        name = self.circuit.name
        if n < 1:
            fault = Fault("needs at least one row", where=name, subject="token", expected="i32[n]", got=shown(token))
            raise RuntimeUseError(fault)
        self._check_tensor("token", token, (n,))
        self._check_tensor("position", position, (n,))
        self._check_hidden(hidden, n)
        of_kind(kv, Mapping, "kv", name, "a PagedKV for each state")
        for state in self.circuit.states:
            cache = kv.get(state.name)
            if cache is None:
                raise RuntimeUseError(Fault(f"state '{state.name}' is not given", where=name))
            of_kind(cache, PagedKV, state.name, name, "a PagedKV")
            self._check_storage(state, cache.k, cache.v)
            for part in ("slot", "seq", "length"):
                self._check_tensor(f"{state.name}.{part}", getattr(cache, part), (n,))
            of_kind(cache.table, torch.Tensor, f"{state.name}.table", name, "i32[sequences, blocks]")
            sequences, width = cache.table.shape if cache.table.dim() == 2 else (0, 0)
            self._check_tensor(f"{state.name}.table", cache.table, (sequences, width))
            self._check_tensor(f"{state.name}.start", cache.start, (sequences,))
            if token.device.type == "cpu":
                self._check_range(f"{state.name}.slot", cache.slot, cache.k.shape[1] * cache.block_size, lowest=-1)
                self._check_range(f"{state.name}.seq", cache.seq, sequences)
                self._check_range(f"{state.name}.length", cache.length, width * cache.block_size + 1)
                self._check_table(state.name, cache)
        if token.device.type == "cpu":
            self._check_range("token", token, self.vocab_size)
            if self.max_position is not None:
                self._check_range("position", position, self.max_position)
        return n

    def _check_hidden(self, hidden: torch.Tensor, n: int) -> None:
        fits = isinstance(hidden, torch.Tensor) and hidden.shape == (n, self.hidden_size) and hidden.is_floating_point()
        if not fits or hidden.device != self.device:
            expected = f"float[{n}, {self.hidden_size}] on {self.device}"
            fault = Fault("does not fit", where=self.circuit.name, subject="hidden", expected=expected, got=shown(hidden))
            raise RuntimeUseError(fault)

    def _check_allowed(self, allowed: torch.Tensor | None, n: int, *, needed: bool = False) -> None:
        if allowed is None and not needed:
            return
        if self.mask_words is None:
            raise RuntimeUseError(Fault("this program takes no mask", where=self.circuit.name, subject="allowed"))
        self._check_tensor("allowed", cast(torch.Tensor, allowed), (n, self.mask_words))

    def _check_tensor(self, name: str, tensor: torch.Tensor, shape: tuple[int, ...]) -> None:
        fits = isinstance(tensor, torch.Tensor) and tensor.shape == shape and tensor.dtype == torch.int32
        if not fits or tensor.device != self.device:
            expected = f"i32[{', '.join(map(str, shape))}] on {self.device}"
            raise RuntimeUseError(
                Fault("does not fit", where=self.circuit.name, subject=name, expected=expected, got=shown(tensor))
            )

    def check_storage(self, storage: Mapping[str, tuple[torch.Tensor, torch.Tensor]]) -> None:
        """Raises RuntimeUseError unless `storage`, as in `BlockPool.storage`, can hold every state of the circuit."""
        of_kind(storage, Mapping, "storage", self.circuit.name, "keys and values of each state")
        states = {state.name for state in self.circuit.states}
        if set(storage) != states:
            fault = Fault("the pool was made for another circuit", expected=f"states {sorted(states)}", got=str(sorted(storage)))
            raise RuntimeUseError(fault)
        for state in self.circuit.states:
            self._check_storage(state, *storage[state.name])

    def _check_storage(self, state: State, k: torch.Tensor, v: torch.Tensor) -> None:
        for part, dim in zip((k, v), state.dims, strict=True):
            fits = isinstance(part, torch.Tensor) and isinstance(k, torch.Tensor)
            fits = fits and part.dim() == 5 and part.dtype == TORCH_DTYPES[state.dtype] and part.device == self.device
            fits = fits and part.is_contiguous() and part.shape[:4] == k.shape[:4]
            fits = fits and (part.shape[0], part.shape[2], part.shape[4]) == (state.layers, state.heads, dim)
            if not fits or self.block_size not in (None, part.shape[3]):
                block = self.block_size or "block_size"
                shape = f"[{state.layers}, blocks, {state.heads}, {block}, {dim}]"
                expected = f"contiguous {state.dtype}{shape} on {self.device}"
                raise RuntimeUseError(
                    Fault("storage does not fit", where=self.circuit.name, subject=state.name, expected=expected, got=shown(part))
                )

    def _check_table(self, name: str, cache: PagedKV, later: int = 0) -> None:
        """Block ids of host tables: in the storage, as far as rows will read, `later` steps from now."""
        blocks, size = cache.k.shape[1], cache.block_size
        low, high = _extremes(cache.table.flatten()) if cache.table.numel() else (0, 0)
        if low >= 0 and high < blocks:
            return
        starts = cache.start.tolist()
        for sequence, length in zip(cache.seq.tolist(), cache.length.tolist(), strict=True):
            used = cache.table[sequence, max(starts[sequence], 0) // size : -(-(length + later) // size)]
            if used.numel():
                self._check_range(f"{name}.table", used.flatten(), blocks)

    def _check_range(self, name: str, tensor: torch.Tensor, limit: int, lowest: int = 0) -> None:
        low, high = _extremes(tensor)
        if low < lowest or high >= limit:
            got = low if low < lowest else high
            expected = f"{lowest}..{limit - 1}"
            raise RuntimeUseError(Fault("out of range", where=self.circuit.name, subject=name, expected=expected, got=str(got)))

    def _check_chain(
        self, steps: int, n: int, position: torch.Tensor, slots: torch.Tensor, kv: Caches = MappingProxyType({})
    ) -> bool:
        """Whether rows may stop before the end: known for host tensors, assumed for device ones, which are not looked at."""
        if not is_whole(steps) or steps < 1:
            raise RuntimeUseError(Fault("a chain has at least one step", where=self.circuit.name, got=shown(steps)))
        self._check_tensor("slots", slots, (steps, n))
        self._check_tensor("position", position, (n,))
        if slots.device.type != "cpu":
            return True
        limit, first, ragged = self.max_position, position.tolist(), False
        live = slots.tolist()
        for name, cache in kv.items():
            self._check_range("slots", slots.flatten(), cache.k.shape[1] * cache.block_size, lowest=-1)
            self._check_table(name, cache, later=steps - 1)
            room = cache.table.shape[1] * cache.block_size
            for row, length in enumerate(cache.length.tolist()):
                taken = length + max((k for k in range(steps) if live[k][row] >= 0), default=0)
                if taken > room:
                    expected = f"at most {room} rows of a sequence"
                    fault = Fault(
                        "the chain outgrows the table", where=self.circuit.name, subject=name, expected=expected, got=str(taken)
                    )
                    raise RuntimeUseError(fault)
        for k, written in enumerate(live):
            for row, slot in enumerate(written):
                if slot < 0:
                    ragged = True
                elif limit is not None and first[row] + k >= limit:
                    expected, got = f"0..{limit - 1}", str(first[row] + k)
                    fault = Fault("out of range", where=self.circuit.name, subject="position", expected=expected, got=got)
                    raise RuntimeUseError(fault)
        return ragged


class ReferenceRunner(DraftRunner):
    """The circuit itself, interpreted in torch: the oracle, and what drafts where nothing is compiled.

    Args:
        weights: by circuit name, the tables' tensors (`rope.cos`, ...) among them; any float dtype. Quantised ones may be the
            tensors that programs read: they are dequantised here, once.

    Raises:
        RuntimeUseError: weights that are missing, no tensors, of another shape, or on several devices.
    """

    def __init__(self, circuit: Circuit, weights: Mapping[str, torch.Tensor]):
        super().__init__()
        of_kind(circuit, Circuit, "circuit", "ReferenceRunner", "a Circuit")
        of_kind(weights, Mapping, "weights", circuit.name, "tensors by the circuit's names")
        self.circuit = circuit
        self.weights = dequantised(circuit, weights)
        needed = {weight.name: weight.type.shape for weight in circuit.weights}
        tables = {value.name for table in circuit.tables for value in table.tensors()}
        missing = sorted({*needed, *tables} - set(self.weights))
        if missing:
            raise RuntimeUseError(Fault("weights are missing", where=circuit.name, got=", ".join(missing)))
        for name in {**needed, **dict.fromkeys(tables)}:
            tensor = self.weights[name]
            of_kind(tensor, torch.Tensor, name, circuit.name, "a tensor")
            if name in needed and tuple(tensor.shape) != needed[name]:
                expected, got = f"[{', '.join(map(str, needed[name]))}]", shown(tensor)
                raise RuntimeUseError(Fault("does not fit", where=circuit.name, subject=name, expected=expected, got=got))
        devices = {tensor.device for tensor in self.weights.values()}
        if len(devices) > 1:
            got = ", ".join(sorted(map(str, devices)))
            raise RuntimeUseError(Fault("weights lie on several devices", where=circuit.name, expected="one", got=got))
        self.device = devices.pop() if devices else torch.device("cpu")
        self._act = TORCH_DTYPES[circuit.act]

    @property
    def widths(self) -> tuple[int, ...]:
        return ()

    @property
    def context_rows(self) -> tuple[int, ...]:
        return ()

    def serves(self, n: int, *, masked: bool = False) -> str | None:
        return "reference" if whole(n, "n", self.circuit.name) >= 1 and not (masked and self.mask_words is None) else None

    def draft(self, token, hidden, position, kv) -> DraftStep:
        out = self._run("draft", token, hidden, position, kv)
        return DraftStep(out["draft"], out["logprob"], out["next_hidden"])

    def draft_masked(self, token, hidden, position, kv, allowed) -> DraftStep:
        self._check_allowed(allowed, self._check_rows(token, hidden, position, kv), needed=True)
        out = self._run("draft_masked", token, hidden, position, kv, allowed=allowed)
        return DraftStep(out["masked_draft"], out["masked_logprob"], out["next_hidden"])

    def context(self, token, hidden, position, kv) -> None:
        self._run("context", token, hidden, position, kv)

    def logits(self, token, hidden, position, kv) -> tuple[torch.Tensor, torch.Tensor]:
        out = self._run("logits", token, hidden, position, kv)
        return out["logits"], out["next_hidden"]

    @no_autograd()
    def _run(self, entry: str, token, hidden, position, kv, **more: torch.Tensor) -> dict[str, torch.Tensor]:
        self._check_rows(token, hidden, position, kv)
        self.paths["reference"] += 1
        inputs = {"token": token, "hidden": hidden.to(self._act), "position": position, **more}
        return interpret(self.circuit, inputs=inputs, weights=self.weights, states=kv, entry=entry)


def _extremes(tensor: torch.Tensor) -> tuple[int, int]:
    """Smallest and largest value; short tensors are read faster as a list than reduced."""
    if tensor.numel() <= 64:
        values = tensor.tolist()
        return min(values), max(values)
    low, high = torch.aminmax(tensor)
    return int(low), int(high)
