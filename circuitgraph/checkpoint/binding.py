"""Binding: a program, its family and a model's tensors to a circuit of which every weight is accounted for.

Nothing is guessed and nothing is left over: each weight has exactly one tensor, and each tensor under the drafter's
prefixes is used, or waived by the family file with a reason. All faults of a checkpoint are raised together.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from ..circuit.ir import Circuit, Weight
from ..circuit.types import FLOAT_DTYPES
from ..errors import CheckpointError, Fault, RuntimeUseError, did_you_mean
from ..language.load import Program, load_program, shipped_programs
from ..language.resolve import Bindings, resolve
from ..language.schema import SwitchValue
from ..ops.base import TORCH_DTYPES
from ..runtime.rope import RopeSpec, rope_tables
from .config import ModelConfig, RawConfig, read_raw
from .family import Family, default_family, layers_found, load_family, recognise
from .files import TensorFiles, TensorInfo
from .model import Model, open_checkpoint
from .random_weights import random_weight

DEFAULT_POSITIONS = 32768
"""Most rows of a RoPE table when the caller does not say how many it serves."""


@dataclass(frozen=True)
class TensorRef:
    """Where a circuit weight comes from.

    source: `drafter` and `target` are the two folders; `host` is a tensor of the target that the caller hands over
    when it loads; `random` is made up. status: `used`, `borrowed` (the target's own), `tied` (borrowed, and standing
    in for another). dtype is the stored one; the circuit's may differ when `wt` asked for a conversion.
    """

    name: str
    source: str
    status: str
    dtype: str
    shape: tuple[int, ...]
    file: Path | None = None

    def to_json(self) -> dict[str, Any]:
        """For a manifest: everything but where the file lay."""
        return {**vars(self), "shape": list(self.shape), "file": self.file.name if self.file else None}


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
class BoundProgram:
    """A circuit, and a tensor for each of its weights. `rope` has a spec for each table of the circuit."""

    program: str
    family: str
    circuit: Circuit
    switches: Mapping[str, SwitchValue]
    tensors: Mapping[str, TensorRef]
    rope: Mapping[str, RopeSpec]
    config: ModelConfig
    model: Model
    report: tuple[ReportRow, ...]
    digest: str

    def load_weights(
        self,
        *,
        positions: int | None = None,
        host: Mapping[str, torch.Tensor] | None = None,
        device: torch.device | str = "cpu",
        seed: int = 0,
    ) -> dict[str, torch.Tensor]:
        """Weights and tables by circuit name. On the CPU, checkpoint tensors are memory-mapped, not copied.

        Args:
            positions: rows of the RoPE tables; by default what the config allows, at most DEFAULT_POSITIONS.
            host: tensors by circuit weight name for weights with source `host`; any other weight may be given too.
            seed: of random weights.

        Raises:
            RuntimeUseError: a host tensor that is missing, unknown, or of the wrong shape.
            CheckpointError: files that changed since they were bound.
        """
        host = dict(host or {})
        self._check_host(host)
        weights: dict[str, torch.Tensor] = {}
        refs = {name: ref for name, ref in self.tensors.items() if name not in host}
        for source, model in (("drafter", self.model), ("target", self.model.target)):
            names = {ref.name for ref in refs.values() if ref.source == source}
            if names and model is not None and model.tensors is not None:
                loaded = model.tensors.load(sorted(names))
                weights.update((weight, loaded[ref.name]) for weight, ref in refs.items() if ref.source == source)
        made: dict[str, torch.Tensor] = {}
        types = {weight.name: weight for weight in self.circuit.weights}
        for name, ref in refs.items():
            if ref.source == "random":
                if ref.name not in made:  # weights that are tied share one tensor
                    made[ref.name] = random_weight(self.circuit, types[name], seed)
                weights[name] = made[ref.name]
        weights.update(host)
        weights = {name: weights[name].to(device, TORCH_DTYPES[types[name].type.dtype]) for name in types}
        for name, spec in self.rope.items():
            rows = positions or min(spec.max_position or DEFAULT_POSITIONS, DEFAULT_POSITIONS)
            weights[f"{name}.cos"], weights[f"{name}.sin"] = rope_tables(spec, rows, device)
        return weights

    def _check_host(self, host: Mapping[str, torch.Tensor]) -> None:
        faults = []
        for name, ref in self.tensors.items():
            if name in host and tuple(host[name].shape) != ref.shape:
                got = list(host[name].shape)
                faults.append(Fault("a host tensor has the wrong shape", subject=name, expected=str(list(ref.shape)), got=str(got)))
            elif ref.source == "host" and name not in host:
                hint = f"Give host={{'{name}': the target's {ref.name}}}, or bind with target_model=."
                faults.append(Fault("a tensor of the host is missing", subject=name, expected=str(list(ref.shape)), hint=hint))
        faults += [
            Fault(f"no weight '{name}'", subject=self.program, hint=did_you_mean(name, self.tensors))
            for name in host
            if name not in self.tensors
        ]
        if faults:
            raise RuntimeUseError(faults)


def load_circuit(
    program: str | Path,
    family: str | Path | None = None,
    config: Mapping[str, Any] | str | Path | None = None,
    *,
    switches: Mapping[str, SwitchValue] | None = None,
    act: str | None = None,
    wt: str | None = None,
    kv: str | None = None,
) -> Circuit:
    """The circuit of a program without a checkpoint: to train it, or to look at it.

    `config` is a config.json, its folder, or a mapping; without one the family's example stands in. Without a family
    the config decides it; without both it is the program's default family. A program that no family is for (one with
    numbers for dims, say) takes `config` as it is.

    Raises:
        ProgramError, CheckpointError: as the files say.
    """
    raw = read_raw(config) if config is not None else None
    chosen = _family_without_checkpoint(program, family, raw)
    if chosen is None:
        dims = dict(raw.data) if raw else {}
        return resolve(load_program(program), Bindings(dims, switches or {}, act, wt, kv))
    loaded = load_program(program)
    settings = chosen.read_config(raw or RawConfig(chosen.file.example, f"the example of family '{chosen.name}'"))
    _check_dims(loaded, settings)
    return resolve(loaded, Bindings(settings.values, chosen.switches(settings, switches), act, wt, kv))


def default_config(program_or_family: str | Path) -> dict[str, Any]:
    """The example config of a family, or of a program's default family.

    Raises:
        ProgramError: neither a family nor a program that has one.
    """
    family = default_family(str(program_or_family)) or load_family(program_or_family)
    return dict(family.file.example)


def bind(
    program: str | Path,
    *,
    model: str | Path | Model,
    target_model: str | Path | None = None,
    family: str | Path | None = None,
    switches: Mapping[str, SwitchValue] | None = None,
    act: str = "f32",
    kv: str = "f32",
    wt: str | None = None,
    host_dtype: str = "bf16",
) -> BoundProgram:
    """Bind `program` to a checkpoint.

    Args:
        program: a shipped name, a program file, or "auto": what the config's family says.
        model: the drafter's folder, or a config.json for random weights.
        target_model: folder of the model that a drafter stored alone borrows from. Left out, it is where the
            drafter's config says, or else those weights are asked from the host at load.
        family: a shipped name or a family file; left out, the config decides.
        switches: over the family's.
        act, kv: dtypes of activations and cache. wt: convert all weights to it; left out, each keeps its own
            (random ones are bf16).
        host_dtype: of weights that the host hands over, when `wt` does not say.

    Raises:
        ProgramError, CheckpointError: every fault of the stage that failed, each located.
    """
    opened = model if isinstance(model, Model) else open_checkpoint(model, target_model)
    wanted = None if str(program) == "auto" else program
    chosen = load_family(family) if family is not None else recognise(opened.config, _program_name(wanted))
    loaded = load_program(wanted or chosen.file.program)
    config = chosen.read_config(opened.config)
    opened = _with_target(opened, chosen)
    _check_dims(loaded, config)
    _check_target(opened, config)
    decided = chosen.switches(config, switches)
    bindings = Bindings(config.values, decided, act, wt, kv)
    circuit = resolve(loaded, bindings)
    account = _Account(chosen, circuit, config, opened, host_dtype)
    refs, report = account.settle()
    if wt is None:
        bindings = replace(bindings, weight_dtypes={name: ref.dtype for name, ref in refs.items()})
        circuit = resolve(loaded, bindings)
    rope = {table.name: config.rope for table in circuit.tables if table.kind == "rope"}
    digest = _digest(chosen, circuit, rope)
    return BoundProgram(loaded.name, chosen.name, circuit, decided, refs, rope, config, opened, report, digest)


def _program_name(program: str | Path | None) -> str | None:
    """The name families know a program by; a file of one's own may be used with any family."""
    return str(program) if program is not None and str(program) in shipped_programs() else None


def _family_without_checkpoint(program: str | Path, family: str | Path | None, raw: RawConfig | None) -> Family | None:
    if family is not None:
        return load_family(family)
    name = _program_name(program)
    if raw is None:
        return default_family(name) if name else None
    return recognise(raw, name) if name else None


def _check_dims(program: Program, config: ModelConfig) -> None:
    """Every key that the program asks for is in the config. Told here, where the config's file can be named."""
    wanted = {**program.file.dims, **program.file.params}
    faults = [
        Fault("the key is missing", where=config.raw.file, subject=key, hint=f"Program '{program.name}' needs it for {name}.")
        for name, key in wanted.items()
        if isinstance(key, str) and name not in config.values and key not in config.values
    ]
    if faults:
        raise CheckpointError(faults)


def _with_target(model: Model, family: Family) -> Model:
    """The target that the drafter's own config names, when it is a folder beside the drafter."""
    if model.target is not None or family.file.target is None or model.tensors is None:
        return model
    name = model.config.get(family.file.target)
    folder = model.path / str(name) if name else None
    return replace(model, target=open_checkpoint(folder)) if folder is not None and folder.is_dir() else model


def _check_target(model: Model, config: ModelConfig) -> None:
    if model.target is None:
        return
    faults = []
    for key in ("hidden_size", "vocab_size"):
        value = model.target.config.get(key)
        value = model.target.config.get(f"text_config.{key}") if value is None else value
        if value != config.values[key]:
            expected = f"{config.values[key]} as in {config.raw.file}"
            hint = "This drafter belongs to another target."
            where = model.target.config.file
            faults.append(Fault("target and drafter differ", where=where, subject=key, expected=expected, got=repr(value), hint=hint))
    if faults:
        raise CheckpointError(faults)


def _digest(family: Family, circuit: Circuit, rope: Mapping[str, RopeSpec]) -> str:
    """Of all that config and family decide: two configs that differ elsewhere are the same model to a drafter."""
    facts = {
        "family": family.name,
        "program": circuit.name,
        "facts": dict(circuit.facts),
        "weights": {weight.name: list(weight.type.shape) for weight in circuit.weights},
        "attributes": [[node.name, node.op, dict(node.attrs)] for node in circuit.nodes],
        "rope": {name: spec.to_json() for name, spec in rope.items()},
    }
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()


class _Account:
    """Finds the tensor of every weight and the weight of every tensor, and collects what does not add up."""

    def __init__(self, family: Family, circuit: Circuit, config: ModelConfig, model: Model, host_dtype: str):
        self.family = family
        self.circuit = circuit
        self.config = config
        self.model = model
        self.wt = dict(circuit.dtypes)["wt"]
        self.host_dtype = host_dtype
        self.faults: list[Fault] = []
        self.refs: dict[str, TensorRef] = {}
        self.notes: dict[str, str] = {}
        self.layer = self._find_layer()

    def settle(self) -> tuple[dict[str, TensorRef], tuple[ReportRow, ...]]:
        """Raises CheckpointError with every fault."""
        for weight in self.circuit.weights:
            ref = self._borrow(weight) if weight.name in self.family.file.borrowed else self._own(weight)
            if ref is not None:
                self.refs[weight.name] = ref
        rows = [
            ReportRow(ref.name, ref.status, name, ref.source, f"{ref.dtype}{_shape(ref.shape)}", self.notes.get(name, ""))
            for name, ref in self.refs.items()
        ]
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

    def _candidates(self, weight: Weight) -> list[str]:
        names = [name.replace("{layer}", str(self.layer)) for name in self.family.candidates(weight.name)]
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
        if self.model.tensors is None:
            return self._made(weight, names[0], "random", "used")
        name = next((name for name in names if name in self.model.tensors), None)
        if name is not None:
            return self._checked(weight, self.model.tensors.info(name), "drafter", "used")
        self._missing(weight, names, self.model.tensors)
        return None

    def _borrow(self, weight: Weight) -> TensorRef | None:
        decl = self.family.file.borrowed[weight.name]
        tied = decl.tied_to if decl.tied_to and self._target_ties() else None
        if tied is not None:
            # A config that ties makes loaders ignore an lm_head in the file, so a stray copy must not win here.
            self.notes[weight.name] = f"tie_word_embeddings: {tied}'s tensor"
        status = "tied" if tied else "borrowed"
        names = [name.replace("{layer}", str(self.layer)) for name in self.family.candidates(tied or weight.name)]
        for source, model in (("target", self.model.target), ("drafter", self.model)):
            if model is None or model.tensors is None:
                continue
            name = next((name for name in names if name in model.tensors), None)
            if name is not None:
                return self._checked(weight, model.tensors.info(name), source, status)
        holder = self.model.target or self.model
        if holder.tensors is None:
            return self._made(weight, names[0], "random", status)
        if self.model.target is None and self.family.file.stored == "alone":
            self.notes[weight.name] = "the target's tensor, handed over at load"
            return self._made(weight, names[0], "host", status)
        self._missing(weight, names, holder.tensors)
        return None

    def _target_ties(self) -> bool:
        if self.model.target is None:
            return self.config.values["tie_word_embeddings"]
        raw = self.model.target.config
        return bool(raw.get("text_config.tie_word_embeddings") or raw.get("tie_word_embeddings"))

    def _made(self, weight: Weight, name: str, source: str, status: str) -> TensorRef:
        dtype = self.host_dtype if source == "host" else self.wt
        return TensorRef(name, source, status, dtype, weight.type.shape)  # type: ignore[arg-type]

    def _checked(self, weight: Weight, info: TensorInfo, source: str, status: str) -> TensorRef | None:
        where = str(info.file)
        if info.dtype not in FLOAT_DTYPES:
            hint = "Quantised tensors need a program that reads their format."
            self.faults.append(
                Fault(
                    f"weight '{weight.name}' cannot be read from this dtype",
                    where=where,
                    subject=info.name,
                    expected=" or ".join(FLOAT_DTYPES),
                    got=info.dtype,
                    hint=hint,
                )
            )
            return None
        if info.shape != weight.type.shape:
            self.faults.append(
                Fault(
                    f"weight '{weight.name}' has another shape",
                    where=where,
                    subject=info.name,
                    expected=_shape(weight.type.shape),
                    got=_shape(info.shape),
                    hint=self._shape_hint(weight, info),
                )
            )
            return None
        return TensorRef(info.name, source, status, info.dtype, info.shape, info.file)

    def _shape_hint(self, weight: Weight, info: TensorInfo) -> str:
        if info.shape == tuple(reversed(weight.type.shape)):
            return "Is it transposed? Weights are stored [out, in]."
        return f"The shape follows from {self.config.raw.file} and the switches: is it the config of these tensors?"

    def _missing(self, weight: Weight, names: list[str], tensors: TensorFiles) -> None:
        hint = did_you_mean(names[0], tensors.names)
        self.faults.append(
            Fault(
                f"no tensor for weight '{weight.name}'",
                where=str(tensors.folder),
                expected=" or ".join(f"'{name}'" for name in names),
                hint=hint if hint.startswith("Did you mean") else None,
            )
        )

    # -- tensors -----------------------------------------------------------------------------------------------

    def _leftovers(self) -> list[ReportRow]:
        """Waived tensors; a fault for every other tensor under a prefix that no weight uses."""
        if self.model.tensors is None:
            return []
        used = {ref.name for ref in self.refs.values() if ref.source == "drafter"}
        refused = {fault.subject for fault in self.faults}
        rows = []
        for name in self.model.tensors:
            if name in used or name in refused or not name.startswith(tuple(self.family.file.prefixes)):
                continue
            reason = self.family.waiver(name)
            if reason is None:
                self.faults.append(
                    Fault("no weight of the program uses this tensor", where=str(self.model.path), subject=name, hint=self._unused_hint(name))
                )
            else:
                info = self.model.tensors.info(name)
                rows.append(ReportRow(name, "waived", "", "drafter", str(info), reason))
        return rows

    def _unused_hint(self, tensor: str) -> str:
        for weight, names in self.family.file.tensors.items():
            if tensor in [name.replace("{layer}", str(self.layer)) for name in ([names] if isinstance(names, str) else names)]:
                facts = ", ".join(f"{name}={str(value).lower()}" for name, value in self.circuit.facts)
                return f"It is '{weight}', which these switches leave out: {facts}."
        return f"Program '{self.circuit.name}' does not model it; if that is right, waive it in family '{self.family.name}' with the reason."


def _shape(shape: Sequence[int | str]) -> str:
    return f"[{', '.join(map(str, shape))}]"
