"""Weights that compiling makes: quantised copies, heads with fewer rows. The artifact carries them (docs/decisions.md)."""

from __future__ import annotations

import fnmatch
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from ..artifact.manifest import WeightSpec
from ..circuit.ir import Storage, Weight
from ..circuit.restrict import OFFSETS, offsets_of, restrict_vocabulary
from ..errors import CheckpointError, Fault, did_you_mean
from .account import TensorRef
from .packed import file_tensors, packed_in_file
from .provide import read_weights
from .quantise import FORMATS, quantise

if TYPE_CHECKING:
    from .binding import BoundProgram


@dataclass(frozen=True)
class Made:
    """How a weight differs from the checkpoint's. rows: those that are kept, None for all. storage: it is quantised so."""

    rows: tuple[int, ...] | None = None
    storage: Storage | None = None

    def __str__(self) -> str:
        said = []
        if self.rows is not None:
            first = self.rows == tuple(range(len(self.rows)))
            said.append(f"{'the first' if first else 'listed'} {len(self.rows)} rows")
        if self.storage is not None:
            said.append(f"quantised to {self.storage}")
        return ", ".join(said)

    def spec(self, weight: Weight) -> WeightSpec:
        """Where the artifact has the weight."""
        packed = packed_in_file(weight.name, self.storage) if self.storage else None
        shape = tuple(int(dim) for dim in weight.type.shape)
        return WeightSpec(weight.type.dtype, shape, weight.name, "artifact", "", packed, self.storage)


def chosen(bound: BoundProgram, wanted: Mapping[str, str]) -> dict[str, Storage]:
    """The storage of every weight that a name or a pattern of `wanted` fits: its name counts, else the last pattern.

    What only patterns fit and no format holds, or is quantised already, is left out.

    Raises:
        CheckpointError: a name or pattern that fits no weight, or an unknown format.
    """
    weights = {weight.name: weight for weight in bound.circuit.weights}
    found: dict[str, Storage] = {}
    faults = []
    for pattern, text in sorted(wanted.items(), key=lambda item: item[0] in weights):  # patterns first, in their order
        names = fnmatch.filter(weights, pattern)
        if text not in FORMATS:
            hint = did_you_mean(text, FORMATS)
            faults.append(
                Fault(f"no format '{text}'", where=bound.program, subject=pattern, expected=", ".join(FORMATS), hint=hint)
            )
            continue
        if not names:
            faults.append(Fault(f"no weight '{pattern}' to quantise", where=bound.program, hint=did_you_mean(pattern, weights)))
        for name in names:
            weight = weights[name]
            if name == pattern or (weight.storage is None and FORMATS[text].refuse(weight.type) is None):
                found[name] = FORMATS[text]
    if faults:
        raise CheckpointError(faults)
    return found


def quantising(bound: BoundProgram, wanted: Mapping[str, Storage]) -> BoundProgram:
    """`bound` with these weights quantised.

    Raises:
        CheckpointError: weights that cannot be, or whose values are not here.
    """
    faults = [fault for name, storage in wanted.items() for fault in _cannot_quantise(bound, name, storage)]
    if faults:
        raise CheckpointError(faults)
    made = {name: replace(bound.made.get(name, Made()), storage=storage) for name, storage in wanted.items()}
    circuit = bound.circuit.with_storage({**bound.circuit.storage, **wanted})
    return replace(bound, circuit=circuit, made={**bound.made, **made})


def keeping_plain(bound: BoundProgram, names: Sequence[str]) -> BoundProgram:
    """`bound` with these weights not quantised after all."""
    made = {name: replace(item, storage=None) if name in names else item for name, item in bound.made.items()}
    kept = {name: storage for name, storage in bound.circuit.storage.items() if name not in names}
    changed = {name: item for name, item in made.items() if item != Made() or name not in names}
    return replace(bound, circuit=bound.circuit.with_storage(kept), made=changed)


def restricting(bound: BoundProgram, ids: Sequence[int]) -> BoundProgram:
    """`bound` with heads that score the tokens `ids` (rising) alone. One that the checkpoint has quantised becomes plain.

    Raises:
        CircuitError: there is no such head. CheckpointError: the head's values are not here.
    """
    circuit, cut = restrict_vocabulary(bound.circuit, ids)
    faults = [_absent(bound, name, "lose rows") for name in cut if bound.tensors[name].source == "host"]
    if faults:
        raise CheckpointError(faults)
    made = {name: Made(rows=tuple(ids)) for name in cut}
    tensors = dict(bound.tensors)
    if any(weight.name == OFFSETS for weight in circuit.weights):
        made[OFFSETS] = Made(rows=tuple(ids))
        tensors[OFFSETS] = TensorRef(OFFSETS, "artifact", "made", "i32", (len(ids),))
    return replace(bound, circuit=circuit, tensors=tensors, made={**bound.made, **made})


def carried_tensors(bound: BoundProgram) -> dict[str, torch.Tensor]:
    """What the artifact has to carry, by tensor name, as files store it. Made-up weights are made when they are loaded.

    Raises:
        CheckpointError: values that cannot be quantised, or files that changed since they were bound.
    """
    carried: dict[str, torch.Tensor] = {}
    for name, made in bound.made.items():
        ref = bound.tensors[name]
        if name == OFFSETS:
            assert made.rows is not None
            carried[name] = torch.tensor(offsets_of(made.rows), dtype=torch.int32)
        elif ref.source != "random":
            values = _values(bound, name, made)
            where = f"{ref.file}: {ref.name}"
            tensors = file_tensors(name, made.storage, quantise(values, made.storage, where)) if made.storage else {name: values}
            carried.update(tensors)
    return carried


def _values(bound: BoundProgram, name: str, made: Made) -> torch.Tensor:
    """Of the checkpoint, in the circuit's dtype."""
    ref = bound.tensors[name]
    model = bound.model if ref.source == "drafter" else bound.model.target
    assert model is not None
    assert model.tensors is not None
    dtype = bound.circuit.types[name].dtype  # type: ignore[union-attr]
    stored = "" if ref.packed or ref.dtype == dtype else ref.dtype
    (values,) = read_weights(
        model.tensors, {name: WeightSpec(dtype, ref.shape, ref.name, ref.source, stored, ref.packed)}
    ).values()
    if made.rows is None:
        return values
    if made.rows == tuple(range(len(made.rows))):
        return values[: len(made.rows)]
    return values[torch.tensor(made.rows)]


def _cannot_quantise(bound: BoundProgram, name: str, storage: Storage) -> list[Fault]:
    weight = next(weight for weight in bound.circuit.weights if weight.name == name)
    reason, hint = storage.refuse(weight.type), None
    if reason is None and weight.storage is not None:
        reason = f"it is quantised already, {weight.storage}"
        hint = "Leave it as it is, or have its numbers quantised anew with dequantise=True (--dequantise)."
    if reason is not None:
        got = str(weight.type)
        return [Fault(f"cannot be quantised: {reason}", where=bound.program, subject=name, got=got, hint=hint)]
    return [_absent(bound, name, "be quantised")] if bound.tensors[name].source == "host" else []


def _absent(bound: BoundProgram, name: str, what: str) -> Fault:
    hint = "Give target_model= (--target-model), the target's folder with safetensors: of a GGUF nothing is read before loading."
    return Fault(f"cannot {what}: it is handed over when the artifact is loaded", where=bound.program, subject=name, hint=hint)
