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
from circuitgraph.circuit.ir import Circuit, Input, State
from circuitgraph.circuit.restrict import VOCABULARY
from circuitgraph.circuit.types import TensorType
from circuitgraph.errors import Fault, RuntimeUseError
from circuitgraph.interpreter import interpret
from circuitgraph.ops import TORCH_DTYPES, PagedKV

from . import device_rows, own_ids
from .arguments import is_whole, of_kind, shown, whole
from .block import block_rows, context_rows, ended
from .kinds import Block, Heads, Kind, kind_of

Caches = Mapping[str, PagedKV]
AUX_PRE_NORM = "aux_pre_norm"
"""The source of hiddens that are residual streams of several layers of the target."""
USUAL_LAYERS = 3
"""How many those are where the drafter's config leaves them to the usual rule."""
MASKED = "_masked"
"""What the names of entries that draft under a grammar's mask end with."""
MASKED_OUTPUT = "masked_"
"""What the names of their outputs begin with: else they are as those of `draft`."""
Function = TypeVar("Function", bound=Callable[..., Any])
_set_grad_enabled: Callable[[bool], object] = getattr(torch._C, "_set_grad_enabled", torch.set_grad_enabled)


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
            _set_grad_enabled(False)  # a context manager, or the public class, costs several times as much
            try:
                return function(*args, **options)
            finally:
                _set_grad_enabled(True)

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
    """Cache blocks of one sequence; `version` differs whenever they do, from all that any sequence ever had. The leading
    `steady` ones are those of version `since`, which `copied` makes the present one."""

    blocks: list[int]
    version: int
    since: int
    steady: int

    def copied(self) -> None: ...


class ChainRows(NamedTuple):
    """A chain's rows as plain integers, one item each, from a caller that vouches for them.

    tokens, positions: the newest token and its position. before: cache rows before it. counts: steps that a row makes.
    starts: the slot of its first step's row; those of the next steps follow it, but for the rows that `apart` has all slots
    of. blocks: where its cache lies.
    """

    tokens: list[int]
    positions: list[int]
    before: list[int]
    counts: list[int]
    starts: list[int]
    apart: Mapping[int, Sequence[int]]
    blocks: Sequence[Blocks]

    def slots(self) -> list[Sequence[int]]:
        """counts[i] slots of every row."""
        beside = enumerate(zip(self.starts, self.counts, strict=True))
        return [self.apart[row] if row in self.apart else range(start, start + count) for row, (start, count) in beside]

    def part(self, first: int, count: int) -> ChainRows:
        """`count` of the rows."""
        if count == len(self.tokens):
            return self
        cut = slice(first, first + count)
        tokens, positions, before, counts, starts, _, blocks = self
        apart = {row - first: slots for row, slots in self.apart.items() if first <= row < first + count}
        return ChainRows(tokens[cut], positions[cut], before[cut], counts[cut], starts[cut], apart, blocks[cut])


class DraftRunner(abc.ABC):
    """Runs the entries of one circuit with weights bound. One runner serves one device stream and one thread at a time.

    Arguments of the running methods, for n rows: token int32[n], hidden float[n, hidden_size] (rounded to the circuit's `act`),
    position int32[n] (sequence position of `token`), kv: state name to `PagedKV` (slot, seq, length int32[n];
    table int32[s, b]; start int32[s]), all on `device`. Results are fresh tensors of the caller's.

    allowed int32[n, mask_words], where it is given, is a grammar's mask: bit c % 32 of word c // 32 is token c, 1 allows
    it. A row in which nothing is allowed drafts the head's first token with log-probability -inf.

    recycled: `hidden` is what the step before made, not the target's: for some drafters, EAGLE-3, that is another tensor.

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

    @cached_property
    def kind(self) -> Kind:
        """Whether it drafts step by step, with heads beside each other, or a block. RuntimeUseError: in none of these ways."""
        return kind_of(self.circuit)

    @cached_property
    def _target(self) -> Input:
        """The input that is the target's."""
        inputs = [item for item in self.circuit.inputs if item.type.rank == 2 and item.type.dtype != "i32"]
        if len(inputs) != 1:
            got = ", ".join(item.name for item in self.circuit.inputs)
            raise RuntimeUseError(
                Fault("takes no hiddens of a target", where=self.circuit.name, expected="one such input", got=got)
            )
        return inputs[0]

    @property
    def hidden_source(self) -> str:
        """What the server must capture of the target: "post_norm" or "pre_norm" (its final norm), or, of several layers,
        "aux_pre_norm" (residual streams, as they enter the layers that the config names) or "aux_layer_outputs".

        Raises:
            RuntimeUseError: the program does not say.
        """
        if not self._target.source:
            hint = "Give that input a `source` in the program: post_norm or pre_norm."
            raise RuntimeUseError(
                Fault("the program does not say its source", where=self.circuit.name, subject=self._target.name, hint=hint)
            )
        return self._target.source

    @cached_property
    def hidden_size(self) -> int:
        """Columns of the hidden that is handed in: of several layers of the target, side by side.

        Raises:
            RuntimeUseError: the program takes none.
        """
        return int(self._target.type.shape[1])

    @property
    def hidden_layers(self) -> int:
        """How many layers of the target the hidden that is handed in is of, side by side.

        Raises:
            RuntimeUseError: it is not as wide as so many hiddens of one width.
        """
        if self._target.source != AUX_PRE_NORM or "hidden_layers" not in dict(self.circuit.facts):
            return self.hidden_size // (self.embed_size or self.hidden_size)
        # A head of EAGLE-3 may be of another width than its target, so that its embedding does not tell.
        count = len(self._named_layers) or USUAL_LAYERS
        if self.hidden_size % count:
            expected = f"hiddens of {count} layers side by side"
            got, hint = f"{self.hidden_size} columns", "Does the constant hidden_layers name as many as the input has?"
            raise RuntimeUseError(Fault("does not split into layers", self.circuit.name, self._target.name, expected, got, hint))
        return count

    @property
    def _named_layers(self) -> tuple[int, ...]:
        """The layers that the drafter's config names."""
        return tuple(int(layer) for layer in str(dict(self.circuit.facts).get("hidden_layers", "")).split())

    def hidden_layer_ids(self, target_layers: int) -> tuple[int, ...]:
        """Which layers' outputs those are, counted from 0 (transformers' hidden_states[id + 1]), of a target with so many
        layers; () where it is the last one's alone.

        Raises:
            RuntimeUseError: the drafter's config names others than there are, or another number of them.
        """
        whole(target_layers, "target_layers", self.circuit.name, least=1, message="is no number of layers")
        if self.hidden_layers == 1:
            return ()
        ids = self._named_layers
        if self.hidden_source == AUX_PRE_NORM:
            ids = ids or (2, target_layers // 2, target_layers - 3)
            # Configs count either outputs, and begin with 1, or inputs: what enters layer 2 is what layer 1 put out.
            ids = ids if ids[0] == 1 else tuple(layer - 1 for layer in ids)
        if len(ids) != self.hidden_layers or not all(0 <= layer < target_layers for layer in ids):
            expected, got = f"{self.hidden_layers} of 0..{target_layers - 1}", " ".join(map(str, ids))
            fault = Fault("does not fit the target", where=self.circuit.name, subject="hidden_layers", expected=expected, got=got)
            raise RuntimeUseError(fault)
        return ids

    @cached_property
    def recycled_size(self) -> int:
        """Columns of the hidden that one step hands to the next."""
        return self._columns("next_hidden")

    def _columns(self, output: str) -> int:
        kind = self.circuit.types[dict(self.circuit.outputs)[output]]
        assert isinstance(kind, TensorType)
        return int(kind.shape[-1])

    @cached_property
    def vocab_size(self) -> int:
        """Token ids below this can be fed: rows of the drafter's embedding, or, where it has none, what it scores."""
        if self._embedding:
            return int(self._embedding.shape[0])
        said = dict(self.circuit.facts).get(VOCABULARY)
        return self._unsaid_vocab() if said is None else int(said)

    def _unsaid_vocab(self) -> int:
        """The vocabulary of a drafter without an embedding whose head nobody restricted."""
        return self._columns("logits")

    @cached_property
    def embed_size(self) -> int | None:
        """Columns of the drafter's embedding, None where it has none."""
        return int(self._embedding.shape[1]) if self._embedding else None

    @cached_property
    def _embedding(self) -> TensorType | None:
        node = next((node for node in self.circuit.nodes if node.op == "embed"), None)
        return None if node is None else self.circuit.types[node.inputs[1]]  # type: ignore[return-value]

    @cached_property
    def mask_words(self) -> int | None:
        """32-bit words of a grammar's mask, which is in the target's ids; None when the circuit takes none."""
        words = next((int(item.type.shape[1]) for item in self.circuit.inputs if item.name == "allowed"), None)
        if self.kind.at_once or (words is not None and own_ids.takes_own_masks(self.circuit)):
            return -(-self.vocab_size // own_ids.BITS)
        return words

    @property
    def _offsets(self) -> torch.Tensor | None:
        """What maps a vocabulary of the drafter's own to the target's ids."""
        name = own_ids.map_of(self.circuit)
        return None if name is None else self.weights[name]

    def _entry(self, *, masked: bool = False, recycled: bool = False, logits: bool = False) -> str:
        """The entry of a step. Those of a first step are named apart where a target's hidden is another tensor."""
        first = not recycled and self._starts_apart
        if logits or (masked and self.kind.at_once):
            return "first_logits" if first else "logits"
        return ("first" if first else "draft") + (MASKED if masked else "")

    @property
    def masked_entries(self) -> str:
        """The options that compile what drafts under a mask."""
        entries = dict.fromkeys(self._entry(masked=True, recycled=recycled) for recycled in (False, True))
        return " ".join(f"--with {entry}" for entry in entries)

    @cached_property
    def _starts_apart(self) -> bool:
        return any(entry.name == "first" for entry in self.circuit.entries)

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

    # -- work --------------------------------------------------------------------------------------------------

    @abc.abstractmethod
    def run_entry(self, entry: str, inputs: Mapping[str, torch.Tensor], kv: Caches) -> dict[str, torch.Tensor]:
        """Outputs of an entry, as fresh tensors, by name without a mask's prefix; any number of rows. Nothing is checked.

        What the methods below are made of; for the bench, too, which times entries that none of them stands for.
        """

    @no_autograd()
    def draft(
        self, token: torch.Tensor, hidden: torch.Tensor, position: torch.Tensor, kv: Caches, *, recycled: bool = False
    ) -> DraftStep:
        """One draft position of n sequences; appends row i at slot[i], where row length[i] - 1 of its sequence lies: compiled
        attention may take that row from where it was made."""
        out = self._step(self._entry(recycled=recycled), token, hidden, position, kv, recycled)
        return DraftStep(out["draft"], out["logprob"], out["next_hidden"])

    @no_autograd()
    def draft_masked(
        self,
        token: torch.Tensor,
        hidden: torch.Tensor,
        position: torch.Tensor,
        kv: Caches,
        allowed: torch.Tensor,
        *,
        recycled: bool = False,
    ) -> DraftStep:
        """As `draft`, of the tokens that `allowed` allows; the log-probability is the one among them."""
        self._check_allowed(allowed, self._check_step(token, hidden, position, kv, recycled), needed=True)
        out = self._step(self._entry(masked=True, recycled=recycled), token, hidden, position, kv, recycled, allowed)
        return DraftStep(out["draft"], out["logprob"], out["next_hidden"])

    @no_autograd()
    def logits(
        self, token: torch.Tensor, hidden: torch.Tensor, position: torch.Tensor, kv: Caches, *, recycled: bool = False
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """As `draft`, but scores instead of the best token: (logits act[n, V], next_hidden act[n, recycled_size])."""
        out = self._step(self._entry(logits=True, recycled=recycled), token, hidden, position, kv, recycled)
        return out["logits"], out["next_hidden"]

    def _step(self, entry: str, token, hidden, position, kv: Caches, recycled: bool, allowed=None) -> dict[str, torch.Tensor]:
        self._check_step(token, hidden, position, kv, recycled)
        inputs = {"token": token, self._hidden_input(recycled): hidden, "position": position}
        if allowed is not None:
            inputs["allowed"] = self._own_mask(allowed)
        return self.run_entry(entry, inputs, kv)

    def _check_step(self, token, hidden, position, kv: Caches, recycled: bool) -> int:
        """The number of rows."""
        if self.kind.at_once:
            hint = "All its drafts come from one call: `chain`."
            raise RuntimeUseError(Fault("does not draft step by step", where=self.circuit.name, hint=hint))
        return self._check_rows(token, hidden, position, kv, recycled)

    def _hidden_input(self, recycled: bool) -> str:
        """What the hidden of a step is called: a value that later steps are given may have another name."""
        given = self.circuit.entry("draft").given if recycled else ()
        return given[0] if given else self._target.name

    @no_autograd()
    def context(self, token: torch.Tensor, hidden: torch.Tensor, position: torch.Tensor, kv: Caches) -> None:
        """Appends any number of rows and computes nothing else. Rows of one sequence come in order.

        position: of the tokens, as everywhere; where a row is made of the hidden alone, it lies at that one's, one less.
        """
        self._check_rows(token, hidden, position, kv)
        place = (position - 1).clamp(min=0) if isinstance(self.kind, Block) else position
        self.run_entry("context", {"token": token, self._target.name: hidden, "position": place}, kv)

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
        recycled: bool = False,
    ) -> DraftChain:
        """`steps` draft positions: each takes the draft and the recycled hidden of the one before, one position on.

        slots: int32[steps, n], where step k of row i is written; it stands in for the caches' own `slot`. A row whose
        slot is -1 has stopped: from there on it writes nothing and drafts nothing. The caches' `length` is that of
        step 0. `allowed` holds for every step.

        Drafters whose drafts come all at once run one forward; a mask goes with `scores`. Heads take no slots, int32[0, n]. A
        block takes int32[1 + gamma, n]: of the row of the newest hidden, which `length` counts, and of the block's rows. Its
        draft k is that of row k + 1, and lacks where the slot does.
        """
        if self.kind.at_once:
            return self._chain_at_once(steps, token, hidden, position, kv, slots, allowed)
        n = self._check_rows(token, hidden, position, kv, recycled)
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
            later = recycled or k > 0
            step = self.draft(*rows, recycled=later) if allowed is None else self.draft_masked(*rows, allowed, recycled=later)
            drafts[:, k] = torch.where(live, step.draft, drafts[:, k])
            logprobs[:, k] = torch.where(live, step.logprob, logprobs[:, k])
            token, hidden = step.draft, step.next_hidden
        return DraftChain(drafts, logprobs, hidden)

    @no_autograd()
    def scores(
        self,
        steps: int,
        token: torch.Tensor,
        hidden: torch.Tensor,
        position: torch.Tensor,
        kv: Caches,
        slots: torch.Tensor,
    ) -> torch.Tensor:
        """As `chain`, of a drafter whose drafts come all at once: act[n, steps, V], of which `pick` takes what masks allow."""
        if not self.kind.at_once:
            hint = "Take `logits` of each step."
            raise RuntimeUseError(Fault("drafts step by step", where=self.circuit.name, subject="scores", hint=hint))
        return self._at_once("logits", steps, token, hidden, position, kv, slots)["logits"]

    @no_autograd()
    def pick(self, scores: torch.Tensor, allowed: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(drafts int32[n], logprobs f32[n]) of one draft position's scores [n, V], under masks int32[n, mask_words]."""
        return own_ids.best_allowed(scores, allowed, self._offsets)

    def _chain_at_once(self, steps, token, hidden, position, kv: Caches, slots, allowed) -> DraftChain:
        if allowed is not None:
            hint = "Take `scores`, and `pick` of each draft's."
            raise RuntimeUseError(Fault("takes no mask", where=self.circuit.name, subject="allowed", hint=hint))
        made = self._at_once("draft", steps, token, hidden, position, kv, slots)
        drafts, logprobs = made["draft"], made["logprob"]
        missing = (0, steps - drafts.shape[1])
        pad = torch.nn.functional.pad
        return DraftChain(pad(drafts, missing, value=-1), pad(logprobs, missing, value=float("nan")), hidden)

    def _at_once(self, entry: str, steps: int, token, hidden, position, kv: Caches, slots) -> dict[str, torch.Tensor]:
        """Outputs [n, steps, ...] of an entry that gives all drafts, or of as many as it gives."""
        kind = self.kind
        self._check_steps(steps)
        if isinstance(kind, Heads):
            self._check_lone_hidden(hidden)
            made = self.run_entry(entry, {self._target.name: hidden}, {})
            return {name: value[:, :steps] for name, value in made.items()}
        assert isinstance(kind, Block), "a drafter that is no chain"
        n = self._check_rows(token, hidden, position, kv)
        self._check_block(kind, n, position, slots, kv)
        self.context(token, hidden, position, context_rows(kv, slots))
        tokens, positions, caches = block_rows(kind, token, position, kv, slots)
        made = self.run_entry(entry, {"token": tokens, "position": positions}, caches)
        made = {name: value.unflatten(0, (n, kind.gamma))[:, 1 : 1 + steps] for name, value in made.items()}
        if "draft" in made:
            over = ended(slots, made["draft"].shape[1])
            made["draft"] = made["draft"].masked_fill(over, -1)
            made["logprob"] = made["logprob"].masked_fill(over, float("nan"))
        return made

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

    def _check_rows(
        self, token: torch.Tensor, hidden: torch.Tensor, position: torch.Tensor, kv: Caches, recycled: bool = False
    ) -> int:
        n = token.shape[0] if isinstance(token, torch.Tensor) and token.dim() == 1 else -1
        name = self.circuit.name
        if n < 1:
            fault = Fault("needs at least one row", where=name, subject="token", expected="i32[n]", got=shown(token))
            raise RuntimeUseError(fault)
        self._check_tensor("token", token, (n,))
        self._check_tensor("position", position, (n,))
        self._check_hidden(hidden, n, recycled)
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

    def _check_hidden(self, hidden: torch.Tensor, n: int, recycled: bool = False) -> None:
        size = self.recycled_size if recycled else self.hidden_size
        fits = isinstance(hidden, torch.Tensor) and hidden.shape == (n, size) and hidden.is_floating_point()
        if not fits or hidden.device != self.device:
            expected = f"float[{n}, {size}] on {self.device}"
            fault = Fault("does not fit", where=self.circuit.name, subject="hidden", expected=expected, got=shown(hidden))
            raise RuntimeUseError(fault)

    def _check_lone_hidden(self, hidden: torch.Tensor) -> None:
        """Of a drafter that takes nothing else, so that they say how many rows there are."""
        n = hidden.shape[0] if isinstance(hidden, torch.Tensor) and hidden.dim() == 2 else 0
        if n < 1:
            expected = f"float[n, {self.hidden_size}], n 1 or more"
            fault = Fault(
                "needs at least one row", where=self.circuit.name, subject="hidden", expected=expected, got=shown(hidden)
            )
            raise RuntimeUseError(fault)
        self._check_hidden(hidden, n)

    def _check_steps(self, steps: Any) -> None:
        if not is_whole(steps) or steps < 1:
            raise RuntimeUseError(Fault("a chain has at least one step", where=self.circuit.name, got=shown(steps)))

    def _check_allowed(self, allowed: torch.Tensor | None, n: int, *, needed: bool = False) -> None:
        if allowed is None and not needed:
            return
        if self.mask_words is None:
            raise RuntimeUseError(Fault("this program takes no mask", where=self.circuit.name, subject="allowed"))
        self._check_tensor("allowed", cast(torch.Tensor, allowed), (n, self.mask_words))

    def _own_mask(self, allowed: torch.Tensor) -> torch.Tensor:
        """A mask as the circuit takes it: in ids of its own, where it has such."""
        offsets = self._offsets if self._takes_own_masks else None
        return allowed if offsets is None else own_ids.narrowed(allowed.to(offsets.device), offsets)

    @cached_property
    def _takes_own_masks(self) -> bool:
        return own_ids.takes_own_masks(self.circuit)

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

    def _check_block(self, kind: Block, n: int, position: torch.Tensor, slots: torch.Tensor, kv: Caches) -> None:
        self._check_tensor("slots", slots, (1 + kind.gamma, n))
        if slots.device.type != "cpu" or position.device.type != "cpu":
            return
        rows = (slots >= 0).sum(0, dtype=torch.int32)
        newest = position + (rows - 2).clamp(min=0)  # of the block's last row
        if self.max_position is not None:
            self._check_range("position", newest, self.max_position)
        for name, cache in kv.items():
            self._check_range("slots", slots.flatten(), cache.k.shape[1] * cache.block_size, lowest=-1)
            if cache.length.device.type == "cpu":
                room = cache.table.shape[1] * cache.block_size
                self._check_range(f"{name}.length", cache.length + (rows - 1).clamp(min=0), room + 1)
                self._check_table(name, cache, later=kind.gamma)

    def _check_chain(
        self, steps: int, n: int, position: torch.Tensor, slots: torch.Tensor, kv: Caches = MappingProxyType({})
    ) -> bool:
        """Whether rows may stop before the end: known for host tensors, assumed for device ones, which are not looked at."""
        self._check_steps(steps)
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
        entries = {entry.name for entry in self.circuit.entries}
        return "reference" if whole(n, "n", self.circuit.name) >= 1 and self._entry(masked=masked) in entries else None

    def run_entry(self, entry: str, inputs: Mapping[str, torch.Tensor], kv: Caches) -> dict[str, torch.Tensor]:
        self.paths["reference"] += 1
        given = {name: tensor.to(self._act) if tensor.is_floating_point() else tensor for name, tensor in inputs.items()}
        made = interpret(self.circuit, inputs=given, weights=self.weights, states=kv, entry=entry)
        return {name.removeprefix(MASKED_OUTPUT): tensor for name, tensor in made.items()}


def _extremes(tensor: torch.Tensor) -> tuple[int, int]:
    """Smallest and largest value; short tensors are read faster as a list than reduced."""
    if tensor.numel() <= 64:
        values = tensor.tolist()
        return min(values), max(values)
    low, high = torch.aminmax(tensor)
    return int(low), int(high)
