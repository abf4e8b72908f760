"""`DraftBinding`: what a proposer's forward is, as a circuit, and what that circuit leaves to others."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from circuitgraph.circuit.ir import Circuit, State

from .pool import BlockPool
from .runner import DraftRunner
from .trim import TRIM

NOT_MODELLED = (
    "sampling: drafts are greedy, no distribution is returned",
    "tree drafts: a row has one parent, the row before it",
    "verification, trimming and catch-up: the proposer does them around the forward",
    "sharding: the forward runs whole on one device",
)


@dataclass(frozen=True)
class DraftBinding:
    """A proposer's forward as a circuit.

    kind: `chain`, `heads` or `block`. drafts: at most, of one propose; None where only memory and the position limit bound them.
    weights: name to (dtype, shape). kv: the states; bytes_per_row over all of them. widths, context_rows: rows of the
    compiled programs, empty where any number runs. context_limit: positions below it draft, None without a limit.
    block_size: of the pool. hidden_source: what the server captures of its model, hidden_layers: of how many of its layers.
    masked: whether grammars can be honoured.
    model: `DraftRunner.model_digest`. not_modelled: what the circuit does not say.
    """

    program: str
    family: str
    kind: str
    drafts: int | None
    circuit: Circuit
    weights: Mapping[str, tuple[str, tuple[int, ...]]]
    kv: tuple[State, ...]
    bytes_per_row: int
    block_size: int
    widths: tuple[int, ...]
    context_rows: tuple[int, ...]
    context_limit: int | None
    hidden_source: str
    hidden_layers: int
    masked: bool
    model: str
    not_modelled: tuple[str, ...] = NOT_MODELLED


def bind_draft(runner: DraftRunner, pool: BlockPool, family: str) -> DraftBinding:
    circuit = runner.circuit
    return DraftBinding(
        program=circuit.name,
        family=family,
        kind=type(runner.kind).__name__.lower(),
        drafts=runner.kind.most_drafts,
        circuit=circuit,
        weights={
            value.name: (value.type.dtype, tuple(int(dim) for dim in value.type.shape))  # type: ignore[union-attr]
            for weight in circuit.weights
            for value in weight.tensors()
        },
        kv=circuit.states,
        bytes_per_row=pool.bytes_per_row,
        block_size=pool.block_size,
        widths=runner.widths,
        context_rows=runner.context_rows,
        context_limit=runner.max_position,
        hidden_source=runner.hidden_source,
        hidden_layers=runner.hidden_layers,
        masked=runner.serves(1, masked=True) is not None,
        model=runner.model_digest(),
    )


def reasons_against(runner: DraftRunner, config: Any, levers: Mapping[str, Any]) -> list[str]:
    """Why the circuit is not the forward of a drafter for `config` under `levers`; empty when it is."""
    reasons = []
    for key, have in (("hidden_size", runner.hidden_size // runner.hidden_layers), ("vocab_size", runner.vocab_size)):
        wanted = _lookup(config, key)
        if wanted is not None and wanted != have:
            reasons.append(f"{key}: the circuit has {have}, the model {wanted}")
    for key in ("num_nextn_predict_layers", "mtp_num_hidden_layers"):
        modules = _lookup(config, key)
        if isinstance(modules, int) and modules > 1:
            reasons.append(f"{key}: {modules} modules, of which module k drafts position k; the circuit has one for all")
    for name, value in levers.items():
        refused = _refused_lever(runner, name, value)
        if refused:
            reasons.append(f"{name}: {refused}")
    return reasons


def _refused_lever(runner: DraftRunner, name: str, value: Any) -> str | None:
    """Why a lever at this value is not modelled."""
    off = value in (None, False, 0)
    if name in ("num_drafts", "stop_confidence", "stop_ids", "refeed", "max_seq_len") or off:
        return None  # the proposer's business, with any forward
    if name == "trim":
        return None if value in TRIM else f"no policy '{value}'"
    if name == "grammar":
        return None if runner.serves(1, masked=True) else f"no program drafts under a mask; compile with {runner.masked_entries}"
    if name in ("tensor_parallel", "expert_parallel"):
        return None if value == 1 else "the forward runs whole on one device"
    if name in ("sampling", "temperature"):
        return "drafts are greedy"
    if name == "tree":
        return "drafts are chains"
    return f"unknown to the circuit, and set to {value!r}"


def _lookup(config: Any, key: str) -> Any:
    """A key of a config, of its text part first; configs are mappings or objects."""
    read = (lambda part, name: part.get(name)) if isinstance(config, Mapping) else (lambda part, name: getattr(part, name, None))
    inner = read(config, "text_config")
    if inner is not None:
        found = inner.get(key) if isinstance(inner, Mapping) else getattr(inner, key, None)
        if found is not None:
            return found
    return read(config, key)
