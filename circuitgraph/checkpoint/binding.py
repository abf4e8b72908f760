"""Binding: a program, its family and a model's tensors to a circuit of which every weight is accounted for."""

from __future__ import annotations

import hashlib
import json
import math
from collections import Counter
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from ..artifact.manifest import SOURCES, WeightSpec
from ..circuit.ir import Circuit, Storage
from ..circuit.types import FLOAT_DTYPES
from ..errors import CheckpointError, Fault, ProgramError, RuntimeUseError, did_you_mean
from ..language.load import Program, load_program
from ..language.resolve import Bindings, resolve
from ..language.schema import SwitchValue, WeightDecl
from ..ops.base import TORCH_DTYPES
from ..places import shipped_programs
from ..runtime import own_ids
from ..runtime.rope import RopeSpec, rope_tables
from .account import Account, ReportRow, TensorRef, WayIn
from .config import MOST_LAYERS, TEXT, ModelConfig, RawConfig, check_quantisation, find_value, is_count, read_raw
from .family import TARGET_WIDTH, Family, default_family, load_family, recognise
from .files import TensorFiles
from .made import Made, carried_tensors
from .model import Model, open_checkpoint
from .provide import made_up, read_tensors, read_weights

DEFAULT_POSITIONS = 32768
"""Most rows of a RoPE table when the caller does not say how many it serves."""


@dataclass(frozen=True)
class BoundProgram:
    """A circuit, and a tensor for each of its weights. `rope` has a spec for each table of the circuit.

    The circuit's `storage` says which weights stay quantised. account: a row for each tensor. unread: quantised weights that
    kernels cannot read, and why. made: weights that are not as the checkpoint has them, which the artifact therefore carries.
    """

    program: str
    family: str
    circuit: Circuit
    switches: Mapping[str, SwitchValue]
    tensors: Mapping[str, TensorRef]
    rope: Mapping[str, RopeSpec]
    config: ModelConfig
    model: Model
    account: tuple[ReportRow, ...]
    unread: Mapping[str, str] = field(default_factory=dict)
    made: Mapping[str, Made] = field(default_factory=dict)

    @property
    def digest(self) -> str:
        """Of all that config and family decide: two configs that differ elsewhere are the same model to a drafter."""
        return _digest(self.family, self.circuit, self.rope)

    @property
    def report(self) -> tuple[ReportRow, ...]:
        """The account, with what becomes of quantised weights."""
        return tuple(self._told(row) for row in self.account)

    def _told(self, row: ReportRow) -> ReportRow:
        ref = self.tensors.get(row.weight)
        if ref is None or row.tensor != ref.name:
            return row
        storage, notes = self.circuit.storage.get(row.weight), [row.reason] if row.reason else []
        if row.weight in self.made:
            notes.append(str(self.made[row.weight]))
        elif storage is not None:
            notes.append(f"{ref.packed or storage}, read as it is")
        elif ref.packed is not None:
            why = f", since kernels cannot read it ({self.unread[row.weight]})" if row.weight in self.unread else ""
            notes.append(f"{ref.packed} -> {ref.dtype}{why}")
        return replace(row, reason="; ".join(notes))

    def dequantising(self, unread: Mapping[str, str]) -> BoundProgram:
        """The same, with these weights dequantised when they are loaded; the values say why."""
        kept = {name: storage for name, storage in self.circuit.storage.items() if name not in unread}
        return replace(self, circuit=self.circuit.with_storage(kept), unread={**self.unread, **unread})

    def weight_specs(self) -> dict[str, WeightSpec]:
        """Every weight as the circuit has it, and where it comes from."""
        specs = {}
        for weight in self.circuit.weights:
            ref, dtype = self.tensors[weight.name], weight.type.dtype
            stored = "" if ref.packed or ref.dtype == dtype else ref.dtype
            shape = _numbers(weight.type.shape)
            if weight.name in self.made and ref.source != "random":
                specs[weight.name] = self.made[weight.name].spec(weight)
                continue
            specs[weight.name] = WeightSpec(dtype, shape, ref.name, ref.source, stored, ref.packed, weight.storage, ref.either)
        return specs

    def load_weights(
        self,
        *,
        positions: int | None = None,
        host: Mapping[str, torch.Tensor] | None = None,
        device: torch.device | str = "cpu",
        seed: int = 0,
    ) -> dict[str, torch.Tensor]:
        """Weights and tables by circuit name; all tensors of quantised ones that stay so. On the CPU, checkpoint tensors are
        memory-mapped, not copied.

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
        specs = self.weight_specs()
        sources = {
            source: {n: spec for n, spec in specs.items() if spec.source == source and n not in host} for source in SOURCES
        }
        weights = {name: tensor.to(device, TORCH_DTYPES[specs[name].dtype]) for name, tensor in host.items()}
        for source, model in (("drafter", self.model), ("target", self.model.target)):
            if sources[source] and model is not None and model.tensors is not None:
                weights.update(read_weights(model.tensors, sources[source], device))
        weights.update(made_up(self.circuit, sources["random"], seed, device))
        if sources["artifact"]:
            weights.update(read_tensors(carried_tensors(self), sources["artifact"], device))
        for name, spec in self.rope.items():
            rows = positions or min(spec.max_position or DEFAULT_POSITIONS, DEFAULT_POSITIONS)
            weights[f"{name}.cos"], weights[f"{name}.sin"] = rope_tables(spec, rows, device)
        return weights

    def _check_host(self, host: Mapping[str, torch.Tensor]) -> None:
        faults = []
        for name, ref in self.tensors.items():
            if name in host and tuple(host[name].shape) != ref.shape:
                got = list(host[name].shape)
                faults.append(
                    Fault("a host tensor has the wrong shape", subject=name, expected=str(list(ref.shape)), got=str(got))
                )
            elif name in host and name in self.made:
                hint = "Bind it without quantising it and with its whole vocabulary, or leave the tensor out."
                faults.append(Fault("is made when compiling", subject=name, got="a tensor of the host", hint=hint))
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


def _numbers(shape: Sequence[int | str]) -> tuple[int, ...]:
    return tuple(int(dim) for dim in shape)


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
    the config decides it; without both it is the program's default family. A program of one's own, whose config no
    family recognises, takes `config` as it is: its dims and parameters by key.

    Raises:
        ProgramError, CheckpointError: as the files say.
    """
    raw = read_raw(config) if config is not None else None
    chosen = _family_without_checkpoint(program, family, raw)
    if chosen is None:
        dims = dict(raw.data) if raw else {}
        return resolve(load_program(program), Bindings(dims, switches or {}, act, wt, kv))
    loaded = load_program(program)
    raw = raw or RawConfig(chosen.file.example, f"the example of family '{chosen.name}'")
    settings = chosen.read_config(raw, attention=_attends(loaded), told=switches or (), asked=_asked(loaded))
    _check_values(loaded, chosen, settings)
    _check_block(loaded, chosen, settings)
    bindings = Bindings(settings.values, _decide(loaded, chosen, settings, switches), act, wt, kv)
    return _resolved(loaded, bindings, settings, shipped=_program_name(program) is not None)


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
    act: str | None = "f32",
    kv: str | None = "f32",
    wt: str | None = None,
    host_dtype: str = "bf16",
    keep_packed: bool = False,
) -> BoundProgram:
    """Bind `program` to a checkpoint.

    Args:
        program: a shipped name, a program file, or "auto": what the config's family says.
        model: the drafter's folder, or a config.json for random weights.
        target_model: folder of the model that a drafter stored alone borrows from. Left out, it is where the
            drafter's config says, or else those weights are asked from the host at load.
        family: a shipped name or a family file; left out, the config decides.
        switches: over the family's.
        act, kv: dtypes of activations and cache; None is that of the weights for activations (`wt`, or what most numbers of
            the checkpoint are), and that of the activations for the cache. wt: convert all weights to it, but for those that
            the family says are not rounded; left out, each keeps its own (random ones are bf16).
        host_dtype: of weights that the host hands over, when `wt` does not say.
        keep_packed: weights that the checkpoint has quantised stay so in the circuit (`Circuit.storage`), for kernels that
            read them; else they are dequantised when they are loaded. A storage that the program itself states stays.

    Raises:
        ProgramError, CheckpointError: every fault of the stage that failed, each located.
    """
    opened = model if isinstance(model, Model) else open_checkpoint(model)
    wanted = None if str(program) == "auto" else program
    chosen = load_family(family) if family is not None else recognise(opened.config, _program_name(wanted))
    loaded = load_program(wanted or chosen.file.program)
    opened = _with_target(opened, chosen, target_model)
    chosen.check_likeness(opened)
    chosen.check_beside(opened)
    raw, asked = chosen.own_config(opened), _asked(loaded)
    config = chosen.read_config(raw, attention=_attends(loaded), told=switches or (), asked=asked, tensors=opened.tensors)
    opened = _with_lender(opened, chosen, config)
    _check_values(loaded, chosen, config)
    _check_block(loaded, chosen, config)
    _check_target(opened, chosen, config)
    decided = _decide(loaded, chosen, config, switches, opened.tensors)
    bindings = Bindings(config.values, decided, act, wt, kv or act)
    circuit = _resolved(loaded, bindings, config, shipped=wanted is None or _program_name(wanted) is not None)
    ways_in = partial(_ways_in, loaded, bindings, circuit, chosen, config, switches or ())
    account = Account(chosen, circuit, config, opened, wt, host_dtype, _ways_out(loaded), ways_in)
    refs, rows = account.settle()
    _check_map(circuit, refs, opened, config)
    _check_marks(chosen, refs, opened)
    act = act or wt or _most_common(refs.values())
    own = {name: ref.dtype for name, ref in refs.items() if wt is None or name in chosen.file.unrounded}
    bindings = replace(bindings, act=act, kv=kv or act, weight_dtypes=own)
    circuit = resolve(loaded, bindings)
    rope = {table.name: config.rope for table in circuit.tables if table.kind == "rope" and config.rope is not None}
    circuit = circuit.with_storage(_storage(circuit, refs, keep_packed))
    return BoundProgram(loaded.name, chosen.name, circuit, decided, refs, rope, config, opened, rows)


def _most_common(refs: Iterable[TensorRef]) -> str:
    """The float dtype that most plain numbers of the checkpoint have; of all weights where it stores none."""
    floats = [ref for ref in refs if ref.dtype in FLOAT_DTYPES and ref.packed is None]
    counts: Counter[str] = Counter()
    for ref in [ref for ref in floats if ref.file is not None] or floats:
        counts[ref.dtype] += math.prod(ref.shape)
    return max(counts, key=counts.__getitem__, default="bf16")


def _storage(circuit: Circuit, refs: Mapping[str, TensorRef], keep_packed: bool) -> dict[str, Storage]:
    """How programs hold each quantised weight: as the checkpoint has it, or, of made-up ones, as the program states.

    Raises:
        CheckpointError: a program states another storage than the checkpoint has.
    """
    kept, faults = {}, []
    for weight in circuit.weights:
        ref = refs[weight.name]
        found = ref.packed.storage if ref.packed else None
        if weight.storage is not None and ref.source != "random" and found != weight.storage:
            hint = "Say 'type' alone in the program, or quantise the checkpoint so."
            where = str(ref.file or circuit.name)
            expected, got = f"{weight.storage} ('{weight.name}')", str(ref.packed or ref.dtype)
            faults.append(Fault("the program states another storage", where, ref.name, expected, got, hint))
        chosen = weight.storage or (found if keep_packed else None)
        if chosen is not None:
            kept[weight.name] = chosen
    if faults:
        raise CheckpointError(faults)
    return kept


def _program_name(program: str | Path | None) -> str | None:
    """The name families know a program by; a file of one's own may be used with any family."""
    return str(program) if program is not None and str(program) in shipped_programs() else None


def _family_without_checkpoint(program: str | Path, family: str | Path | None, raw: RawConfig | None) -> Family | None:
    if family is not None:
        return load_family(family)
    name = _program_name(program)
    if raw is None:
        return default_family(name) if name else None
    try:
        return recognise(raw, name)
    except CheckpointError:
        if name:
            raise
        return None


def _decide(
    program: Program,
    family: Family,
    config: ModelConfig,
    given: Mapping[str, SwitchValue] | None,
    tensors: TensorFiles | None = None,
) -> dict[str, SwitchValue]:
    """The family's switches, `given` over them. A program that was printed has facts where others have switches."""
    decided = {**family.switches(config, tensors), **(given or {})}
    space, facts = program.file.switches, program.file.facts
    faults = [
        Fault(
            f"the family states '{name}: {str(value).lower()}'",
            where=family.places["switches", name],
            expected=f"a switch of program '{program.name}'",
            got=f"{name} fixed to {str(facts[name]).lower()} there" if name in facts else "no such switch there",
            hint=None if name in facts else did_you_mean(name, space),
        )
        for name, value in decided.items()
        if name not in space and name not in (given or {}) and facts.get(name) != value
    ]
    if faults:
        raise ProgramError(faults)
    together = [[name for name in names if decided.get(name) is True] for names in family.file.apart]
    faults = [
        Fault(
            "do not go together: engines differ in what both mean",
            config.raw.file,
            " and ".join(names),
            "one of them",
            "all",
            f"Say which is not: {' or '.join(f'{name}=false' for name in names)} (--set).",
        )
        for names in together
        if len(names) > 1
    ]
    if faults:
        raise CheckpointError(faults)
    return {name: value for name, value in decided.items() if name in space or name in (given or {})}


def _ways_out(program: Program) -> dict[str, str]:
    """The weights that a switch leaves out, each with the setting that does."""
    found = {}
    for name, decl in program.file.weights.items():
        for switch, value in decl.when.items() if isinstance(decl, WeightDecl) else ():
            other = next((other for other in program.file.switches.get(switch, ()) if other != value), None)
            found[name] = f"{switch}={str(other).lower()}"
    return found


def _ways_in(
    program: Program, bindings: Bindings, circuit: Circuit, family: Family, config: ModelConfig, given: Container[str]
) -> list[WayIn]:
    """Every other value of one switch that makes the program need more weights. given: switches that somebody set, whatever the
    config says."""
    mine, ways = {weight.name for weight in circuit.weights}, []
    facts = dict(circuit.facts)
    for name, values in program.file.switches.items():
        for value in (value for value in values if value != facts[name]):
            try:
                other = resolve(program, replace(bindings, switches={**bindings.switches, name: value}))
            except ProgramError:  # this config has no numbers for it
                continue
            weights = tuple(weight.name for weight in other.weights if weight.name not in mine)
            setting = None if name in given else family.setting(name, value, config)
            said = f"{setting} in {config.raw.file}" if setting else f"{name}={str(value).lower()} (--set)"
            ways.append(WayIn(name, value, said, weights))
    return ways


def _check_map(circuit: Circuit, refs: Mapping[str, TensorRef], model: Model, config: ModelConfig) -> None:
    """The checkpoint's map of own ids stays inside the target's vocabulary.

    Raises:
        CheckpointError: it does not.
    """
    name = own_ids.map_of(circuit)
    ref = refs.get(name) if name else None
    if ref is None or ref.source != "drafter" or model.tensors is None:
        return
    offsets = model.tensors.load([ref.name])[ref.name]
    fault = own_ids.fault_of(str(ref.file), ref.name, offsets, int(config.values["vocab_size"]))
    if fault is not None:
        raise CheckpointError(fault)


def _check_marks(family: Family, refs: Mapping[str, TensorRef], model: Model) -> None:
    """A map of own ids, told twice in a file, is told alike: the offsets lead to those ids that the marks mark. Where
    nothing is marked the marks were never filled in.

    Raises:
        CheckpointError: another number of ids, or other ones.
    """
    for offsets, marks in family.file.marks.items():
        if offsets not in refs or model.tensors is None or marks not in model.tensors:
            continue
        name = refs[offsets].name
        loaded = model.tensors.load([name, marks])
        led = (torch.arange(len(loaded[name])) + loaded[name]).sort().values
        marked = loaded[marks].flatten().nonzero().flatten()
        if len(marked) and not torch.equal(led, marked):
            count = int(torch.isin(led, marked).sum())
            got, hint = f"{len(marked)} ids, {count} of them the same", "They are of different exports: export the drafter again."
            where, expected = str(model.tensors.info(marks).file), f"the {len(led)} ids that '{name}' leads to"
            raise CheckpointError(Fault("marks other ids", where, marks, expected, got, hint))


def _attends(program: Program) -> bool:
    """Whether a program has use for what a config says of attention."""
    heads = ("num_attention_heads", "num_key_value_heads", "head_dim", "rotary_dim")
    return bool(program.file.tables) or not _asked(program).isdisjoint(heads)


def _asked(program: Program) -> set[str]:
    """The config keys that a program reads."""
    file = program.file
    given = {*file.dims.values(), *file.params.values(), *file.constants.values()}
    return {key for key in given if isinstance(key, str)}


def _is_parameter(value: Any) -> bool:
    """Numbers that families make come in lists, too."""
    if isinstance(value, list):
        return all(isinstance(item, int) for item in value)
    return type(value) in (int, float) and math.isfinite(value)


def _check_values(program: Program, family: Family, config: ModelConfig) -> None:
    """Every key that the program asks for is in the config, and of its kind. Told here, where the config's file can be named."""
    file = program.file
    kinds = (
        (file.dims, "a positive integer", lambda value: type(value) is int and 0 < value < 2**31),
        (file.params, "a finite number", _is_parameter),
        (file.constants, "an integer or a text", lambda value: type(value) in (int, str)),
    )
    faults = []
    for wanted, expected, fits in kinds:
        for name, key in wanted.items():
            if not isinstance(key, str):
                continue
            value = config.values.get(name, config.values.get(key))
            where, subject, hint = config.raw.file, family.spelled(key, config), f"Program '{program.name}' needs it for {name}."
            if value is None:
                faults.append(Fault("the key is missing", where=where, subject=subject, hint=hint))
            elif not fits(value):
                faults.append(Fault("the value is of the wrong kind", where, subject, expected, repr(value), hint))
            elif key == "num_hidden_layers" and not is_count(value):
                faults.append(Fault("is no number of layers", where, subject, f"1 to {MOST_LAYERS}", repr(value), hint))
    if faults:
        raise CheckpointError(faults)


def _check_block(program: Program, family: Family, config: ModelConfig) -> None:
    """A block has a row for the newest token and others for drafts, and its mask is a token."""
    if all(entry.rows != "block" for entry in program.file.entries.values()):
        return
    faults: list[Fault] = []
    vocabulary = config.values["vocab_size"]
    for name, message, expected, fits in (
        ("block_size", "is no size of a block", "2 or more", lambda value: value >= 2),
        ("mask_token", "is no token", f"0 to {vocabulary - 1}", lambda value: 0 <= value < vocabulary),
    ):
        key = program.file.constants.get(name, name)
        value = config.values.get(name, config.values.get(key)) if isinstance(key, str) else key
        if type(value) is not int or not fits(value):
            faults.append(Fault(message, config.raw.file, family.spelled(name, config), expected, repr(value)))
    if faults:
        raise CheckpointError(faults)


def _resolved(program: Program, bindings: Bindings, config: ModelConfig, *, shipped: bool) -> Circuit:
    """The circuit; of a shipped program, what does not fit does so because of the config's numbers."""
    try:
        return resolve(program, bindings)
    except ProgramError as error:
        known = program.file.switches
        if not shipped or any(value not in known.get(name, ()) for name, value in bindings.switches.items()):
            raise
        hint = f"Are the numbers in {config.raw.file} those of one model?"
        raise ProgramError([replace(fault, hint=fault.hint or hint) for fault in error.faults]) from None


def _with_target(model: Model, family: Family, given: str | Path | None) -> Model:
    """`model` with the target that is given, else with the one that its own config names, when that is a folder beside it; of
    either, the config."""
    if model.target is not None:
        return model
    if given is None:
        name = model.config.get(family.file.target) if family.file.target and model.tensors is not None else None
        folder = model.path / str(name) if name else None
        if folder is None or not folder.is_dir():
            return model
        given = folder
    return replace(model, target=open_checkpoint(given, config_only=True))


def _with_lender(model: Model, family: Family, config: ModelConfig) -> Model:
    """`model` with the tensors of its target. Those of one that lends none are not looked at, so they need not be there."""
    target = model.target
    if target is None or target.tensors is not None or not target.path.is_dir() or not family.lent(config):
        return model
    return replace(model, target=open_checkpoint(target.path))


def _check_target(model: Model, family: Family, config: ModelConfig) -> None:
    if model.target is None:
        return
    lent = family.lent(config)
    if lent and model.tensors is not None and model.target.tensors is None:
        expected = f"the target's folder, for {' and '.join(lent)}"
        hint = "Give it, or leave it out (--target-model) and hand these tensors over when the artifact is loaded."
        raise CheckpointError(Fault("a config has no weights to lend", str(model.target.path), None, expected, hint=hint))
    family.check_layers(config, model.target.config)
    if lent:
        check_quantisation(model.target.config)
    faults = []
    width = TARGET_WIDTH if config.find(TARGET_WIDTH) is not None else "hidden_size"
    for key, own in (("hidden_size", width), ("vocab_size", "vocab_size")):
        value = find_value(model.target.config, TEXT, key)
        if value != config.values[own]:
            expected = f"{config.values[own]} as {'' if own == key else f'{own} '}in {config.raw.file}"
            hint = "This drafter belongs to another target."
            if own == key == "hidden_size" and TARGET_WIDTH in family.file.values:
                hint += f" If it is of another width than its target, its config says '{TARGET_WIDTH}'."
            where = model.target.config.file
            faults.append(
                Fault("target and drafter differ", where=where, subject=key, expected=expected, got=repr(value), hint=hint)
            )
    if faults:
        raise CheckpointError(faults)


def _digest(family: str, circuit: Circuit, rope: Mapping[str, RopeSpec]) -> str:
    facts = {
        "family": family,
        "program": circuit.name,
        "facts": dict(circuit.facts),
        "weights": {weight.name: list(weight.type.shape) for weight in circuit.weights},
        "attributes": [[node.name, node.op, dict(node.attrs)] for node in circuit.nodes],
        "rope": {name: spec.to_json() for name, spec in rope.items()},
    }
    if circuit.storage:
        facts["storage"] = {name: str(storage) for name, storage in circuit.storage.items()}
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()
