"""The account of a binding: the tensor of every weight, and the weight of every tensor.

Nothing is guessed and nothing is left over: each weight has exactly one tensor, and each tensor under the drafter's
prefixes is used, or waived by the family file with a reason. All faults of a checkpoint are raised together.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import torch

from ..circuit.ir import Circuit, Weight
from ..circuit.types import FLOAT_DTYPES
from ..errors import CheckpointError, Fault, did_you_mean
from ..language.schema import SwitchValue
from ..ops.base import DTYPE_NAMES
from .config import ModelConfig, scale_block, ties
from .family import Family, filled, layers_found
from .files import STACKED, TensorFiles
from .model import Model
from .packed import Packed
from .stored import (
    CACHE_SCALES,
    FP8_BLOCK,
    Stored,
    companions,
    foreign_format,
    held_name,
    owners,
    read_stored,
    read_table,
    strays,
)

COMPARED_ROWS = 256
"""Of a copy of embedding or lm_head: one that was trained on its own differs in every row, and reading all takes seconds."""


@dataclass(frozen=True)
class TensorRef:
    """Where a circuit weight comes from.

    source: `drafter` and `target` are the two folders; `host` is a tensor of the target that the caller hands over
    when it loads; `random` is made up. status: `used`, `borrowed` (the target's own), `tied` (borrowed, and standing
    in for another). dtype is the stored one; the circuit's may differ when `wt` asked for a conversion. packed: how a
    quantised one is stored under this name; dtype is then what it is dequantised to, where it does not stay quantised.
    either: of a host's tensor that is tied in some targets, its names in one that does not tie, and in one that does.
    """

    name: str
    source: str
    status: str
    dtype: str
    shape: tuple[int, ...]
    file: Path | None = None
    packed: Packed | None = None
    either: tuple[str, str] | None = None


@dataclass(frozen=True)
class ReportRow:
    """One line of the account: a weight, or a tensor that no weight uses."""

    tensor: str
    status: str
    weight: str = ""
    source: str = ""
    type: str = ""
    reason: str = ""


@dataclass(frozen=True)
class WayIn:
    """The setting of a switch with which the program would have these weights, too, and how somebody says it."""

    switch: str
    value: SwitchValue
    said: str
    weights: tuple[str, ...]


class Account:
    """Finds the tensor of every weight and the weight of every tensor, and collects what does not add up."""

    def __init__(
        self,
        family: Family,
        circuit: Circuit,
        config: ModelConfig,
        model: Model,
        convert: str | None,
        host_dtype: str,
        ways_out: Mapping[str, str],
        ways_in: Callable[[], Sequence[WayIn]],
    ):
        """ways_out: weight to the setting of a switch that leaves it out. ways_in: asked where a tensor has no weight."""
        self.family = family
        self.circuit = circuit
        self.config = config
        self.model = model
        self.convert = convert
        self.ways_out, self.ways_in = ways_out, ways_in
        wanted = dict(circuit.dtypes)["wt"]
        self.made_dtypes = {"random": wanted, "host": convert or host_dtype, "packed": wanted}
        self.faults: list[Fault] = []
        self.refs: dict[str, TensorRef] = {}
        self.notes: dict[str, str] = {}
        self.types: dict[str, str] = {}
        self.beside: dict[str, list[ReportRow]] = {}
        self.lent = family.lent(config)
        self.claimed: set[str] = set()
        self.layer = self._find_layer()

    def settle(self) -> tuple[dict[str, TensorRef], tuple[ReportRow, ...]]:
        """Raises CheckpointError with every fault."""
        for weight in self.circuit.weights:
            ref = self._borrow(weight) if weight.name in self.lent else self._own(weight)
            if ref is not None:
                self.refs[weight.name] = ref
        rows = []
        for name, ref in self.refs.items():
            type_ = self.types.get(name, f"{ref.dtype}{_shape(ref.shape)}")
            rows.append(ReportRow(ref.name, ref.status, name, ref.source, type_, self.notes.get(name, "")))
            rows += self.beside.get(name, [])
        rows += self._leftovers()
        if self.faults:
            raise CheckpointError(self.faults)
        return self.refs, tuple(rows)

    # -- names -------------------------------------------------------------------------------------------------

    def _find_layer(self) -> int | None:
        decl, tensors = self.family.file.layer, self.model.tensors
        if decl is None:
            return None
        if tensors is None:
            return decl.otherwise if isinstance(decl.otherwise, int) else self.config.find(decl.otherwise)
        found = layers_found(decl.found_by, tensors.names)
        if len(found) == 1:
            return found[0]
        got = ", ".join(map(str, found)) or "none"
        hint = "Several modules are not supported." if found else "Does this checkpoint have a drafter?"
        self.faults.append(
            Fault(
                f"family '{self.family.name}' wants tensors '{decl.found_by}*' of one layer",
                where=str(tensors.folder),
                got=got,
                hint=hint,
            )
        )
        raise CheckpointError(self.faults)

    def _names(self, weight: str) -> list[str]:
        values = {**self.config.values, "layer": self.layer}
        own = self.family.file.borrowed[weight].own if self._owned(weight) else None
        return [filled(name, values) for name in (own.names if own else self.family.candidates(weight))]

    def _owned(self, weight: str) -> str | None:
        """Why the drafter has its own tensor for a weight that other drafters of its family borrow."""
        return self.family.owns(weight, self.config) if weight in self.family.file.borrowed else None

    def _candidates(self, weight: Weight) -> list[str]:
        names = self._names(weight.name)
        if not names:
            self.faults.append(
                Fault(
                    f"the family names no tensor for weight '{weight.name}'",
                    where=self.family.places["tensors",],
                    hint="Add it under 'tensors' or 'borrowed', or set the switch that leaves the weight out.",
                )
            )
        return names

    # -- weights -----------------------------------------------------------------------------------------------

    def _own(self, weight: Weight) -> TensorRef | None:
        names = self._candidates(weight)
        if not names:
            return None
        owned = self._owned(weight.name)
        if owned:
            self.notes[weight.name] = f"the drafter's own: {owned}"
        if self.model.tensors is None:
            return self._made(weight, names[0], "random", "used")
        name = next((name for name in names if held_name(self.model.tensors, name)), None)
        if name is not None:
            return self._held(weight, name, self.model, "drafter", "used")
        self._missing(weight, names, self.model.tensors)
        return None

    def _borrow(self, weight: Weight) -> TensorRef | None:
        decl = self.family.file.borrowed[weight.name]
        tied = decl.tied_to if decl.tied_to and self._target_ties() else None
        if tied is not None:
            # A config that ties makes loaders ignore an lm_head in the file, so a stray copy must not win here.
            self.notes[weight.name] = f"tie_word_embeddings: {tied}'s tensor"
        status = "tied" if tied else "borrowed"
        names = self._names(tied or weight.name)
        for source, model in (("target", self.model.target), ("drafter", self.model)):
            if model is None or model.tensors is None:
                continue
            if source == "drafter" and self.model.target is not None and self.family.file.stored == "alone":
                continue  # a copy stands in where no target is given; what a given one lacks is missed
            name = next((name for name in names if held_name(model.tensors, name)), None)
            if name is not None:
                self._refuse_strays(weight, [name, *self._names(weight.name)], model)
                return self._held(weight, name, model, source, status)
        if self.model.tensors is None:  # a config alone, for which nothing real is to be had
            return self._made(weight, names[0], "random", status)
        if self.model.target is None and self.family.file.stored == "alone":
            self.notes[weight.name] = "the target's tensor, handed over at load"
            either = (self._names(weight.name)[0], self._names(decl.tied_to)[0]) if decl.tied_to else None
            return replace(self._made(weight, names[0], "host", status), either=either)
        holder = self.model.target or self.model
        assert holder.tensors is not None
        self._missing(weight, names, holder.tensors)
        return None

    def _refuse_strays(self, weight: Weight, names: list[str], model: Model) -> None:
        """A fault for what lies in the module of a borrowed weight and is none of its tensors: a bias of lm_head, say.

        Of the drafter's own modules every tensor is accounted for anyhow; of the target's these are all that is looked at.
        """
        assert model.tensors is not None
        hint = f"The target computes something else than program '{self.circuit.name}' would."
        for other in strays(model.tensors, names):
            self.faults.append(Fault(f"belongs to '{weight.name}', and no program uses it", str(model.path), other, hint=hint))

    def _target_ties(self) -> bool:
        if self.model.target is None:
            return self.config.values["tie_word_embeddings"]
        return ties(self.model.target.config)

    def _made(self, weight: Weight, name: str, source: str, status: str) -> TensorRef:
        dtype = self.made_dtypes[source] if weight.type.dtype in FLOAT_DTYPES else weight.type.dtype
        return TensorRef(name, source, status, dtype, weight.type.shape)  # type: ignore[arg-type]

    def _held(self, weight: Weight, name: str, model: Model, source: str, status: str) -> TensorRef | None:
        """The tensor of a weight that `model` has under `name`, and what belongs to it."""
        assert model.tensors is not None
        if source == "drafter":  # whatever is wrong with them, they are this weight's
            beside = [other for other in companions(name) if other in model.tensors]
            for owned in (held_name(model.tensors, name) or name, *beside):
                self.claimed.update(model.tensors.parts(owned))
        try:
            if weight.type.dtype in FLOAT_DTYPES:
                stored = read_stored(model.tensors, name, scale_block(model.config) or FP8_BLOCK)
            else:
                stored = read_table(model.tensors, name, weight.type.dtype)
        except CheckpointError as problem:
            self.faults += [fault for fault in problem.faults if fault not in self.faults]
            return None
        if stored.shape != weight.type.shape:
            self.faults.append(
                Fault(
                    f"weight '{weight.name}' has another shape",
                    where=str(stored.info.file),
                    subject=stored.info.name,
                    expected=_shape(weight.type.shape),
                    got=_shape(stored.shape) + (f" of {stored.packed}" if stored.packed else ""),
                    hint=self._shape_hint(weight, stored.shape),
                )
            )
            return None
        dtype = self.made_dtypes["packed"] if stored.packed else stored.info.dtype
        self._note(weight.name, stored, dtype)
        self._report_beside(weight.name, stored, model.tensors, source)
        return TensorRef(stored.info.name, source, status, dtype, stored.shape, stored.info.file, stored.packed)

    def _note(self, weight: str, stored: Stored, dtype: str) -> None:
        """What becomes of the stored numbers, for the report; of quantised ones, `BoundProgram.report` says it."""
        notes = [self.notes[weight]] if weight in self.notes else []
        if stored.packed is not None:
            self.types[weight] = str(stored.info)
        elif self.convert is not None and self.convert != dtype and dtype in FLOAT_DTYPES:
            kept = weight in self.family.file.unrounded
            notes.append("kept in its own type" if kept else f"converted to {self.convert} when it is loaded")
        if notes:
            self.notes[weight] = "; ".join(notes)

    def _report_beside(self, weight: str, stored: Stored, tensors: TensorFiles, source: str) -> None:
        rows = self.beside.setdefault(weight, [])
        for other in stored.packed.tensors if stored.packed else ():
            rows.append(ReportRow(other, "used", weight, source, str(tensors.info(other)), f"scale of {stored.info.name}"))
        for other in stored.idle:
            reason = "a scale for activations, which are not quantised here"
            rows.append(ReportRow(other, "waived", "", source, str(tensors.info(other)), reason))

    def _shape_hint(self, weight: Weight, got: tuple[int, ...]) -> str:
        if got == tuple(reversed(weight.type.shape)):
            return "Is it transposed? Weights are stored [out, in]."
        return f"The shape follows from {self.config.raw.file} and the switches: is it the config of these tensors?"

    def _missing(self, weight: Weight, names: list[str], tensors: TensorFiles) -> None:
        foreign = next((said for said in (foreign_format(tensors, name) for name in names) if said), None)
        near = did_you_mean(names[0], tensors.names)
        near = near if near.startswith("Did you mean") else None
        switch = self.ways_out.get(weight.name)
        without = f"If the model has none, say so: {switch} (--set)." if switch else None
        owned = self._owned(weight.name)
        if owned:
            near, without = None, f"The target's does not stand in for it, since {owned}."
        self.faults.append(
            Fault(
                f"no tensor for weight '{weight.name}'",
                where=str(tensors.folder),
                expected=" or ".join(f"'{name}'" for name in names),
                hint=foreign or " ".join(filter(None, (near, without))) or None,
            )
        )

    # -- tensors -----------------------------------------------------------------------------------------------

    def _leftovers(self) -> list[ReportRow]:
        """Waived tensors; a fault for every other tensor under a prefix that no weight uses."""
        if self.model.tensors is None:
            return []
        mine = (ref for ref in self.refs.values() if ref.source == "drafter")
        used = {*self.claimed, *(part for ref in mine for part in self.model.tensors.parts(ref.name))}
        prefixes = tuple(filled(prefix, {"layer": self.layer}) for prefix in self.family.file.prefixes)
        refused = {fault.subject for fault in self.faults}
        rows, unused = [], {}
        for name in self.model.tensors:
            if name in used or name in refused or not name.startswith(prefixes):
                continue
            reason = self._waiver(name)
            if reason is None:
                unused.setdefault(_EXPERT.sub(f".experts.{STACKED}.", name), []).append(name)
            else:
                rows.append(ReportRow(name, "waived", "", "drafter", self._glance(name), reason + self._difference(name)))
        for stack, (first, *others) in unused.items():  # what hundreds of experts have is told once
            message = f"no weight of the program uses {'these tensors' if others else 'this tensor'}"
            subject, got = (stack, f"{len(others) + 1} of them") if others else (first, None)
            self.faults.append(Fault(message, str(self.model.path), subject, got=got, hint=self._unused_hint(first)))
        return rows

    def _waiver(self, tensor: str) -> str | None:
        """Why a tensor may stay unused. What belongs to a waived weight is waived with it."""
        if tensor.rpartition(".")[2] in CACHE_SCALES:
            return "a scale for a quantised cache; the cache here is not quantised"
        return next((reason for reason in map(self.family.waiver, (tensor, *owners(tensor))) if reason), None)

    def _difference(self, tensor: str) -> str:
        """What the report adds for a copy that is none: some rows are compared with the tensor that is used. Nothing where that
        cannot be read as it is, or where the shard of either is absent."""
        ref = self.refs.get(self.family.copied(tensor) or "")
        if ref is None or ref.file is None or ref.packed is not None:
            return ""
        lender = self.model.target if ref.source == "target" else self.model
        assert lender is not None
        assert lender.tensors is not None
        assert self.model.tensors is not None
        try:
            copy, used = self.model.tensors.load([tensor])[tensor], lender.tensors.load([ref.name])[ref.name]
        except CheckpointError:
            return ""
        if DTYPE_NAMES.get(copy.dtype) not in FLOAT_DTYPES:
            return ""
        if copy.shape == used.shape:
            rows = torch.linspace(0, len(used) - 1, min(len(used), COMPARED_ROWS)).long()
            copy, used = copy[rows], used[rows]
            if torch.equal(copy, used.to(copy.dtype)) or torch.equal(copy.to(used.dtype), used):
                return ""
        return f", and differs from '{ref.name}'"

    def _glance(self, tensor: str) -> str:
        """The type of a tensor that nobody needs: no shard is opened for it, and none has to be there."""
        assert self.model.tensors is not None
        info = self.model.tensors.glance(tensor)
        return str(info) if info else ""

    def _unused_hint(self, tensor: str) -> str:
        named = next((weight for weight in self.family.file.tensors if tensor in self._names(weight)), None)
        if named in self.refs:
            return f"'{named}' is taken from '{self.refs[named].name}': remove the one that is out of date."
        # What belongs to a weight, as its scales do, is left out with it; one expert's stands for those of all.
        names = {_EXPERT.sub(f".experts.{STACKED}.", name) for name in (tensor, *owners(tensor))}
        found = {way: weight for way in self._ways for weight in way.weights if not names.isdisjoint(self._names(weight))}
        facts = dict(self.circuit.facts)
        switches = dict.fromkeys(way.switch for way in found) or facts
        left_out = ", ".join(f"{name}={str(facts[name]).lower()}" for name in switches)
        if found:
            said = " or ".join(dict.fromkeys(way.said for way in found))
            return f"It is '{next(iter(found.values()))}', which {left_out} leaves out. If the model uses it, say so: {said}."
        if named is not None:
            return f"It is '{named}', which these switches leave out: {left_out}."
        return f"Program '{self.circuit.name}' does not model it. If it does not matter, waive it in family '{self.family.name}'."

    @cached_property
    def _ways(self) -> Sequence[WayIn]:
        return self.ways_in()


_EXPERT = re.compile(r"\.experts\.\d+\.")


def _shape(shape: Sequence[int | str]) -> str:
    return f"[{', '.join(map(str, shape))}]"
