"""Family files: how a model's config selects a program, and what its tensors are called. docs/language.md is the manual."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Collection, Container, Mapping
from dataclasses import dataclass, replace
from functools import cache, cached_property
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, StrictBool, StrictInt, StrictStr

from ..errors import CheckpointError, Fault, ProgramError, did_you_mean
from ..language.schema import SwitchValue
from ..language.source import Places, read_yaml
from ..places import PROGRAMS
from .config import TEXT, ConfigReader, ModelConfig, RawConfig, check_quantisation, find_value, read_config
from .files import TensorFiles
from .model import Model
from .settings import Accepted, ConfigValue, accepts, differing, foreign, places_of, unknown
from .stored import spellings
from .window_config import WindowsDecl, read_windows

FAMILIES = PROGRAMS / "families"

TARGET_WIDTH = "target_hidden_size"
"""The key that says how wide a drafter's target is."""


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class ConfigSwitch(_Strict):
    """A switch that is decided by a config key, or by several, which then agree; `values`: what it is by what stands there,
    where it is not that itself. Where the config has none, by whether the file has a `tensor`: `held` or `absent`;
    `default` where there is neither key nor file. equal: two config values without whose equality the tensor may not be absent:
    then it is `default`, and the tensor is missed. Where they are equal, a bare config means `absent`, too."""

    config: str | list[str] | None = None
    values: dict[StrictBool | StrictStr, SwitchValue] = Field(default_factory=dict)
    tensor: str | None = None
    held: SwitchValue | None = None
    absent: SwitchValue | None = None
    equal: tuple[str, str] | None = None
    default: SwitchValue

    @property
    def keys(self) -> tuple[str, ...]:
        return _listed(self.config) if self.config else ()

    def meaning(self, value: Any) -> Any:
        """What the switch is where a key has this value; something else than a switch may be where it cannot be one's."""
        return self.values.get(value) if self.values and isinstance(value, bool | str) else value

    def value_of(self, meaning: SwitchValue) -> ConfigValue | None:
        """The value of a key that means this; None where none does."""
        return next((value for value, meant in self.values.items() if meant == meaning), None) if self.values else meaning


class ItemsDecl(_Strict):
    """Layers of the target: a config's list of whole numbers, as a text with spaces between them; `otherwise` without one.

    items: the keys that may have the list; where several do, they agree. exactly: how many items it has. distinct: no layer is
    there twice. layers: the key that says how many layers the target has, of which the highest is `last` from there. outputs:
    keys whose lists count what layers put out, where the others count what enters them: one less each. longer: what a list may
    have beside, for a word where it is too long.
    """

    items: str | list[str]
    outputs: str | list[str] = Field(default_factory=list)
    otherwise: str | None = None
    exactly: StrictInt | None = None
    distinct: StrictBool = False
    layers: str | None = None
    last: StrictInt = -1
    longer: str | None = None

    @property
    def keys(self) -> tuple[str, ...]:
        return (*_listed(self.items), *_listed(self.outputs))


class CountDecl(_Strict):
    """How many items a config's list has; of several keys that may have it, the first that does counts."""

    count: str | list[str]


class OneDecl(_Strict):
    """It is one where the file has tensors whose names start with `one`, and none whose names start with `unless`."""

    one: str
    unless: str


class LayerDecl(_Strict):
    """`{layer}` in tensor names: the index of the layer whose tensors start with `found_by`.

    Without tensors (a bare config) it is `otherwise`, a number or a config key.
    """

    found_by: str
    otherwise: StrictInt | StrictStr = 0


class OwnDecl(_Strict):
    """A drafter has a tensor of its own for what others borrow where two config values are `unequal`, or where a config key,
    the `flag`, is true. names: of that tensor."""

    names: list[str] = Field(min_length=1)
    unequal: tuple[str, str]
    flag: str


class BorrowedDecl(_Strict):
    """A weight of the target model. `tied_to` stands in for it where the config ties the two; `own` says which drafters have
    their own."""

    names: list[str] = Field(min_length=1)
    tied_to: str | None = None
    own: OwnDecl | None = None


class WaivedDecl(_Strict):
    """Tensors that no program uses, and why that is right. copy_of: the borrowed weight that is used in their place."""

    pattern: str
    reason: str
    copy_of: str | None = None


class AmbiguousDecl(_Strict):
    """A setting that means several things in published configs. Which one, somebody says by giving `switch`, or the config does
    by having the key `unless`."""

    switch: str
    meanings: str
    unless: str | None = None


class FamilyFile(_Strict):
    family: str
    doc: str
    sources: list[str] = Field(min_length=1)
    program: str
    default: bool = False
    stored: Literal["in_target", "alone"]
    recognise: list[dict[str, list[ConfigValue] | Literal["present", "absent"]]] = Field(min_length=1)
    unlike: dict[str, str] = Field(default_factory=dict)
    sections: list[str] = Field(default_factory=lambda: [""], min_length=1)
    sizes: Literal["own", "target"] = "own"
    counts: dict[str, str | OneDecl] = Field(default_factory=dict)
    values: dict[str, StrictInt | float | StrictStr | list[StrictStr] | ItemsDecl | CountDecl] = Field(default_factory=dict)
    required: list[str] = Field(default_factory=list)
    same: dict[str, str] = Field(default_factory=dict)
    target: str | None = None
    supports: dict[str, Accepted] = Field(default_factory=dict)
    nested: dict[str, list[str]] = Field(default_factory=dict)
    windows: WindowsDecl | None = None
    ambiguous: dict[str, AmbiguousDecl] = Field(default_factory=dict)
    switches: dict[str, SwitchValue | ConfigSwitch] = Field(default_factory=dict)
    apart: list[list[str]] = Field(default_factory=list)
    layer: LayerDecl | None = None
    prefixes: list[str] = Field(min_length=1)
    tensors: dict[str, str | list[str]]
    unrounded: list[str] = Field(default_factory=list)
    borrowed: dict[str, BorrowedDecl] = Field(default_factory=dict)
    waived: list[WaivedDecl] = Field(default_factory=list)
    marks: dict[str, str] = Field(default_factory=dict)
    beside: dict[str, str] = Field(default_factory=dict)
    example: dict[str, Any]


@dataclass(frozen=True)
class Family:
    file: FamilyFile
    places: Places

    @property
    def name(self) -> str:
        return self.file.family

    def recognises(self, config: RawConfig) -> bool:
        """Whether every condition of one of the family's `recognise` alternatives holds."""
        return any(all(_holds(config, key, wanted) for key, wanted in case.items()) for case in self.file.recognise)

    def read_config(
        self,
        raw: RawConfig,
        *,
        attention: bool = True,
        told: Container[str] = (),
        asked: Collection[str] = (),
        tensors: TensorFiles | None = None,
    ) -> ModelConfig:
        """The config from where this family keeps it. attention: whether the program has any. told: switches that somebody
        gave, which decide what an ambiguous setting means. asked: keys that the program itself reads. tensors: those of the
        file, which tells some values itself, whatever the config says.

        Raises:
            CheckpointError: as `config.read_config`, and for a setting that the family's program does not model.
        """
        defaults = {key: said for key, said in self.file.values.items() if isinstance(said, int | float)}
        config = read_config(raw, self.file.sections, defaults=defaults, required=self.file.required, attention=attention)
        check_quantisation(raw)
        others = foreign({*self._named, *asked}, attention=attention)
        faults = [*self._unsupported(config, told), *self._foreign(config, others), *self._told_apart(config, told)]
        faults += [*self._unknown(config), *self._another_width(config), *self._flags(config)]
        counted = self._counted(tensors)
        config = replace(config, values={**config.values, **counted})
        windows, wrong = read_windows(config, self.file.windows, self.name) if attention and not faults else ({}, [])
        if faults or wrong:
            raise CheckpointError([*faults, *wrong])
        return replace(config, values={**config.values, **windows, **self._values(config), **counted})

    @cached_property
    def _switched(self) -> frozenset[str]:
        """Every key that decides a switch."""
        decls = [decl for decl in self.file.switches.values() if isinstance(decl, ConfigSwitch)]
        return frozenset(key for decl in decls for key in decl.keys)

    @cached_property
    def _named(self) -> frozenset[str]:
        """Every key that the family reads or refuses, as it is spelled there."""
        file, windows = self.file, self.file.windows
        made = [key for said in file.values.values() for key in _keys_of(said)]
        seen = [*windows.size, *windows.everywhere, *windows.block, *windows.causal] if windows else []
        flags = [decl.own.flag for decl in file.borrowed.values() if decl.own]
        return frozenset([*file.supports, *self._switched, *file.values, *made, *seen, *file.same, *file.same.values(), *flags])

    def _unsupported(self, config: ModelConfig, told: Container[str]) -> list[Fault]:
        """A fault for each setting that the family's program does not model, or that may mean several things."""
        faults = []
        for key, accepted in self.file.supports.items():
            unclear = self.file.ambiguous.get(key)
            clear = unclear and (
                unclear.switch in told
                or (unclear.unless and config.raw.get(unclear.unless) is not None)
                or self._said_by_another(unclear.switch, key, config)
            )
            for place, value in places_of(config, key, self.file.nested).items():
                if accepts(accepted, value) or (clear and type(value) in map(type, accepted)):
                    continue
                fault = self._refused(config, place, accepted, value)
                if unclear:
                    hint = f"Say by the switch '{unclear.switch}' (--set) which one it is here: {unclear.meanings}."
                    fault = replace(fault, message="the setting means several things", hint=hint)
                faults.append(fault)
        return faults

    def _said_by_another(self, switch: str, key: str, config: ModelConfig) -> bool:
        """Whether the config decides a switch by another key than this one: they agree, or are refused for it."""
        decl = self.file.switches[switch]
        others = [other for other in decl.keys if other != key] if isinstance(decl, ConfigSwitch) else []
        return any(places_of(config, other, self.file.nested) for other in others)

    def _foreign(self, config: ModelConfig, settings: Mapping[str, Accepted]) -> list[Fault]:
        """A fault for each setting that other models know, and this family says nothing of."""
        return [
            self._refused(config, place, accepted, value, " Remove it if the drafter's own code does not read it.")
            for key, accepted in settings.items()
            for place, value in places_of(config, key, self.file.nested).items()
            if not accepts(accepted, value)
        ]

    def _refused(self, config: ModelConfig, place: str, accepted: Accepted, value: Any, remedy: str = "") -> Fault:
        words = {"absent": "no such key", "empty": "an empty list"}
        expected = words[accepted] if isinstance(accepted, str) else " or ".join(repr(item) for item in accepted)
        hint = f"Program '{self.file.program}' would compute something else.{remedy}"
        other = self.file.unlike.get(place.rpartition(".")[2])
        if other:
            hint = f"Drafters of family '{other}' have it: if this is one, say family='{other}' (--family)."
        message = f"family '{self.name}' does not model this setting"
        return Fault(message, config.raw.file, place, expected, repr(value), hint)

    def _told_apart(self, config: ModelConfig, told: Container[str]) -> list[Fault]:
        """A fault for each key that is read in one place, and that another place says otherwise."""
        faults = []
        for key, place in self.file.same.items():
            found = {at: value for at in (key, place) if (value := config.find(at)) is not None}
            faults.append(_two_values(config, found, found))
        decls = {name: decl for name, decl in self.file.switches.items() if isinstance(decl, ConfigSwitch) and name not in told}
        for keys in dict.fromkeys(decl.keys for decl in decls.values()):  # one key may decide several switches
            names = [name for name, decl in decls.items() if decl.keys == keys]
            found = self._said(decls[names[0]], config)
            meant = {place: decls[names[0]].meaning(value) for place, value in found.items()}
            switches = f"switch{'es' if len(names) > 1 else ''} {' and '.join(map(repr, names))}"
            faults.append(_two_values(config, found, meant, f" Or say which by the {switches} (--set)."))
        return [fault for fault in faults if fault]

    def _said(self, decl: ConfigSwitch, config: ModelConfig) -> dict[str, Any]:
        """Every place where a config decides a switch, and what stands there."""
        return {place: value for key in decl.keys for place, value in places_of(config, key, self.file.nested).items()}

    def _unknown(self, config: ModelConfig) -> list[Fault]:
        """A fault for each key of a nested object that the family neither reads nor refuses there."""
        anywhere = {*foreign(self._named, attention=True), *self.file.supports, *self._switched}
        faults = []
        for name, idle in self.file.nested.items():
            inside = {key.removeprefix(f"{name}.") for key in self._named if key.startswith(f"{name}.")}
            faults += unknown(config, name, {*(key for key in anywhere if "." not in key), *inside, *idle}, self.name)
        return faults

    def _another_width(self, config: ModelConfig) -> list[Fault]:
        """A fault where the config says that a target is not as wide as its drafter, and the program has one width alone."""
        size, other = config.values["hidden_size"], config.find(TARGET_WIDTH)
        if self.file.stored == "in_target" or TARGET_WIDTH in self.file.values or other in (None, size):
            return []
        lent = " and ".join(self.file.borrowed)
        hint = f"They take {lent} from it, so both have one width." if lent else None
        message = f"drafters of family '{self.name}' are as wide as their target"
        return [Fault(message, config.raw.file, TARGET_WIDTH, f"{size} as hidden_size", repr(other), hint)]

    def _flags(self, config: ModelConfig) -> list[Fault]:
        """A fault for each flag that says of a weight whose it is, and is neither true nor false."""
        flags = [decl.own.flag for decl in self.file.borrowed.values() if decl.own]
        found = {flag: config.find(flag) for flag in flags}
        wrong = {key: value for key, value in found.items() if not isinstance(value, bool | None)}
        return [_wrong_kind(config, key, "true or false", value) for key, value in wrong.items()]

    def owns(self, weight: str, config: ModelConfig) -> str | None:
        """Why a drafter has a tensor of its own for a weight that others borrow; None where it borrows it, too."""
        own = self.file.borrowed[weight].own
        if own is None:
            return None
        if config.find(own.flag):
            return f"{own.flag} is true"
        first, other = (config.values.get(key) for key in own.unequal)
        return None if first == other else f"{own.unequal[0]} is {first}, {own.unequal[1]} {other}"

    def lent(self, config: ModelConfig) -> list[str]:
        """The weights that are the target's."""
        return [weight for weight in self.file.borrowed if self.owns(weight, config) is None]

    def _values(self, config: ModelConfig) -> dict[str, Any]:
        """What the program calls otherwise than the config, and what stands for a key that the config lacks."""
        made: dict[str, Any] = {}
        faults = []
        for key, said in self.file.values.items():
            if config.find(key) is not None:
                made[key] = config.find(key)
            elif isinstance(said, ItemsDecl):
                items, wrong = _layers(config, said)
                faults += wrong
                if not wrong and (items is not None or said.otherwise is not None):
                    made[key] = said.otherwise if items is None else " ".join(map(str, items))
            elif isinstance(said, CountDecl):
                items = _first(config, said.count)
                if isinstance(items, list):  # what is none is told where the items themselves are read
                    made[key] = len(items)
            elif isinstance(said, list):
                if (value := _first(config, said)) is not None:
                    made[key] = value
            elif isinstance(said, str):
                parts = {name: made.get(name, config.find(name)) for name in said.split(" * ")}
                wrong = {name: part for name, part in parts.items() if len(parts) > 1 and type(part) not in (int, float)}
                if None in parts.values():  # the program's key is missing, which is told where it is needed
                    continue
                faults += [_wrong_kind(config, name, "a number", part) for name, part in wrong.items()]
                if not wrong:
                    made[key] = math.prod(parts.values()) if len(parts) > 1 else parts[said]
            else:
                made[key] = said
        if faults:
            raise CheckpointError(list(dict.fromkeys(faults)))
        return made

    def spelled(self, key: str, config: ModelConfig) -> str:
        """What a program's key is called in this family's configs, for messages."""
        said = self.file.values.get(key)
        if config.find(key) is None and isinstance(said, str):
            return said
        if config.find(key) is None and isinstance(said, list | ItemsDecl | CountDecl):
            keys = _keys_of(said)
            there = next((place for place in keys if config.find(place) is not None), None)
            return there or " or ".join(keys)
        in_section = config.section and config.raw.get(f"{config.section}.{key}") is not None
        return f"{config.section}.{key}" if in_section else key

    def check_layers(self, config: ModelConfig, target: RawConfig) -> None:
        """Raises CheckpointError for layers that the program reads and this target has not."""
        count = find_value(target, TEXT, "num_hidden_layers")
        faults = []
        for said in self.file.values.values():
            if isinstance(said, ItemsDecl) and type(count) is int:
                items, _ = _layers(config, said)
                faults += _beyond(config, said, items or [], count, f"which {target.file} has {count} of")
        if faults:
            raise CheckpointError(faults)

    def switches(self, config: ModelConfig, tensors: TensorFiles | None = None) -> dict[str, SwitchValue]:
        """What the family says of a model with this config and these tensors.

        Raises:
            CheckpointError: a config value that cannot be a switch's.
        """
        decided: dict[str, SwitchValue] = {}
        faults = []
        for name, decl in self.file.switches.items():
            if not isinstance(decl, ConfigSwitch):
                decided[name] = decl
                continue
            subject, value = next(iter(self._said(decl, config).items()), (next(iter(decl.keys), None), None))
            if value is None and decl.tensor:
                value = self._told_by_tensor(decl, config, tensors)
            decided[name] = decl.default if value is None else decl.meaning(value)
            if type(decided[name]) is not type(decl.default):
                flag = isinstance(next(iter(decl.values), decl.default), bool)
                expected = "true or false" if flag else "a text"
                message = f"the value decides switch '{name}' and is of the wrong kind"
                faults.append(Fault(message, where=config.raw.file, subject=subject, expected=expected, got=repr(value)))
        if faults:
            raise CheckpointError(faults)
        return decided

    def _told_by_tensor(self, decl: ConfigSwitch, config: ModelConfig, tensors: TensorFiles | None) -> SwitchValue | None:
        """What a switch is by the file; of a bare config, what an equality says. None: the default."""
        assert decl.tensor is not None
        if tensors is not None and _held(decl.tensor, tensors):
            return decl.held
        if decl.equal is None:
            return None if tensors is None else decl.absent
        return decl.absent if _equal(decl.equal, config) else None

    def setting(self, name: str, value: SwitchValue, config: ModelConfig) -> str | None:
        """How the config says that a switch has this value; None where it does not decide it."""
        decl = self.file.switches.get(name)
        if not isinstance(decl, ConfigSwitch) or not decl.keys or decl.value_of(value) is None:
            return None
        place = next(iter(self._said(decl, config)), decl.keys[0])
        return f"'{place}': {json.dumps(decl.value_of(value))}"

    def candidates(self, weight: str) -> tuple[str, ...]:
        """Tensor names that may hold `weight`, best first; `{layer}` still stands in them. Empty: the family has none."""
        if weight in self.file.borrowed:
            return tuple(self.file.borrowed[weight].names)
        if weight in self.file.tensors:
            return _listed(self.file.tensors[weight])
        for pattern, names in self.file.tensors.items():
            indices = _indices(pattern, weight)
            if indices:
                return tuple(_with_indices(name, indices) for name in _listed(names))
        return ()

    def own_config(self, model: Model) -> RawConfig:
        """The drafter's config, with sizes of the target's where this family's drafters leave them to it.

        Raises:
            CheckpointError: there is no target's config to be read.
        """
        own = model.config
        lacking = [key for key in ("hidden_size", "vocab_size") if own.get(key) is None]
        if self.file.sizes == "own" or not lacking:
            return own
        if model.target is None:
            hint = "Give target_model= (--target-model), the folder of the model that the drafter was made for."
            message = f"drafters of family '{self.name}' have their sizes in the target's config, which is not given"
            raise CheckpointError(Fault(message, where=own.file, hint=hint))
        theirs = model.target.config
        reader = ConfigReader(theirs, TEXT if isinstance(theirs.get(TEXT), Mapping) else "")
        sizes = {key: reader.count(key) for key in lacking}
        if reader.faults:
            raise CheckpointError(reader.faults)
        return RawConfig({**own.data, **sizes}, own.file)

    def check_likeness(self, model: Model) -> None:
        """Raises CheckpointError for a tensor that files of another family have, whose config looks like one of this family."""
        found = ((name, other) for name, other in self.file.unlike.items() if model.tensors is not None and name in model.tensors)
        for name, other in found:
            message = f"is of family '{other}', and the config looks like one of family '{self.name}'"
            raise CheckpointError(Fault(message, str(model.path), name, hint=f"Say family='{other}' (--family)."))

    def check_beside(self, model: Model) -> None:
        """Raises CheckpointError for files beside the weights that change what they mean, and that nothing here reads."""
        found = {
            name: why for name, why in self.file.beside.items() if model.tensors is not None and (model.path / name).is_file()
        }
        if found:
            hint = f"Program '{self.file.program}' would compute something else."
            message = f"family '{self.name}' does not model this file"
            raise CheckpointError([Fault(f"{message}: {why}", str(model.path), name, hint=hint) for name, why in found.items()])

    def _counted(self, tensors: TensorFiles | None) -> dict[str, int]:
        """Those values that the file itself tells, whatever the config says."""
        counted: dict[str, int] = {}
        if tensors is None:
            return counted
        for key, said in self.file.counts.items():
            if isinstance(said, str):
                if indices := layers_found(said, tensors.names):
                    counted[key] = indices[-1] + 1
            elif _begins(said.one, tensors) and not _begins(said.unless, tensors):
                counted[key] = 1
        return counted

    def waiver(self, tensor: str) -> str | None:
        """Why `tensor` may stay unused, None where it may not."""
        return next((item.reason for item in self.file.waived if _matches(item.pattern, tensor)), None)

    def copied(self, tensor: str) -> str | None:
        """The weight that `tensor` is said to be a copy of, None where it is none."""
        return next((item.copy_of for item in self.file.waived if item.copy_of and _matches(item.pattern, tensor)), None)


def shipped_families() -> dict[str, Path]:
    """Name to file of every family in the distribution."""
    return {path.stem: path for path in sorted(FAMILIES.glob("*.yaml"))}


def load_family(name_or_path: str | Path) -> Family:
    """A shipped family by name, or a family file by path.

    Raises:
        ProgramError: neither, or a file that does not load.
    """
    shipped = shipped_families()
    path = shipped.get(str(name_or_path), Path(name_or_path))
    if path.suffix not in (".yaml", ".yml") or not path.is_file():
        hint = f"{did_you_mean(str(name_or_path), shipped)} Or give the path of a .yaml file."
        raise ProgramError(Fault(f"no family '{name_or_path}'", hint=hint))
    family = Family(*read_yaml(path, FamilyFile))
    faults = _contradictions(family)
    if faults:
        raise ProgramError(faults)
    return family


def _contradictions(family: Family) -> list[Fault]:
    """What is said in a family file of something else there that is not said."""
    faults, file, places = [], family.file, family.places
    for key, decl in file.ambiguous.items():
        where = places["ambiguous", key]
        if key not in file.supports:
            hint = "State there which values mean one thing alone."
            faults.append(Fault(f"'{key}' is ambiguous", where, expected="a setting of 'supports'", got="none there", hint=hint))
        if decl.switch not in file.switches:
            hint = did_you_mean(decl.switch, file.switches)
            faults.append(Fault(f"'{decl.switch}' decides", where, key, "one of 'switches'", "none of that name", hint))
    for name in (name for name in file.unrounded if not family.candidates(name)):
        where, hint = places["unrounded",], did_you_mean(name, file.tensors)
        faults.append(Fault(f"'{name}' is not rounded", where, None, "one of 'tensors'", "none of that name", hint))
    for name in (name for names in file.apart for name in names if name not in file.switches):
        where, hint = places["apart",], did_you_mean(name, file.switches)
        faults.append(Fault(f"'{name}' goes without others", where, None, "one of 'switches'", "none of that name", hint))
    for name, decl in file.switches.items():
        if isinstance(decl, ConfigSwitch) and decl.equal is not None and None in (decl.tensor, decl.held, decl.absent):
            where, expected = places["switches", name], "'tensor', 'held' and 'absent' beside 'equal'"
            lacking = ", ".join(key for key in ("tensor", "held", "absent") if getattr(decl, key) is None)
            faults.append(Fault("an equality says when a tensor may be absent", where, name, expected, f"no {lacking}"))
    return faults


def families_of(program: str | None) -> list[Family]:
    """The shipped families of a program, or all of them."""
    families = [load_family(path) for path in shipped_families().values()]
    return [family for family in families if program in (None, family.file.program)]


def default_family(program: str) -> Family | None:
    """What stands for a program when nobody names a family or a config."""
    return next((family for family in families_of(program) if family.file.default), None)


def recognise(config: RawConfig, program: str | None = None) -> Family:
    """The one family that `config` belongs to.

    Raises:
        CheckpointError: no family, or several.
    """
    known = families_of(program)
    found = [family for family in known if family.recognises(config)]
    if len(found) == 1:
        return found[0]
    of_program = f" of program '{program}'" if program else ""
    seen = ("model_type", "speculators_model_type", "transformer_layer_config.model_type", "architectures")
    got = ", ".join(f"{key} {config.get(key)!r}" for key in seen if config.get(key) is not None) or "a config without model_type"
    if found:
        message = f"several families{of_program} recognise this config: {', '.join(family.name for family in found)}"
        raise CheckpointError(Fault(message, where=config.file, got=got, hint="Name one of them."))
    expected = "; ".join(f"{family.name}: {_conditions(family)}" for family in known) or None
    hint = "Name the family if you know that its layout fits, or write a family file (docs/language.md)."
    message = f"no family{of_program} recognises this config"
    raise CheckpointError(Fault(message, where=config.file, expected=expected, got=got, hint=hint))


def _wrong_kind(config: ModelConfig, key: str, expected: str, got: Any) -> Fault:
    return Fault("the value is of the wrong kind", where=config.raw.file, subject=key, expected=expected, got=repr(got))


def _two_values(config: ModelConfig, found: Mapping[str, Any], meant: Mapping[str, Any], more: str = "") -> Fault | None:
    """A fault where places do not mean the same."""
    apart = differing(meant)
    if apart is None:
        return None
    first, place = apart
    expected, hint = f"{found[first]!r} as in {first}", f"Remove the one that is out of date.{more}"
    return Fault("the config gives two values", config.raw.file, place, expected, repr(found[place]), hint)


def _conditions(family: Family) -> str:
    cases = []
    for case in family.file.recognise:
        wanted = [f"{key} {value if isinstance(value, str) else '/'.join(map(str, value))}" for key, value in case.items()]
        cases.append(" and ".join(wanted))
    return " or ".join(cases)


def _holds(config: RawConfig, key: str, wanted: list[ConfigValue] | str) -> bool:
    value = config.get(key)
    if isinstance(wanted, str):
        return (value is not None) == (wanted == "present")
    values = value if isinstance(value, list) else [value]
    return any(item in wanted for item in values)


def filled(name: str, values: Mapping[str, Any]) -> str:
    """A tensor name with `{key}` replaced by that value; keys that are none of `values` stay."""
    return re.sub(r"\{(\w+)\}", lambda match: str(values.get(match[1], match[0])), name)


def _listed(names: str | list[str]) -> tuple[str, ...]:
    return (names,) if isinstance(names, str) else tuple(names)


def _indices(pattern: str, weight: str) -> dict[str, int]:
    """`layers_{i}.norm` and `layers_2.norm`: {i: 2}. Empty where they do not fit."""
    parts = re.split(r"\{(\w+)\}", pattern)
    expression = "".join(f"(?P<{part}>\\d+)" if odd % 2 else re.escape(part) for odd, part in enumerate(parts))
    match = re.fullmatch(expression, weight) if len(parts) > 1 else None
    return {name: int(value) for name, value in match.groupdict().items()} if match else {}


def _with_indices(name: str, indices: Mapping[str, int]) -> str:
    """`layers.{i+1}.norm` with i = 2: `layers.3.norm`."""

    def number(match: re.Match[str]) -> str:
        return str(indices[match[1]] + int(match[2] or 0)) if match[1] in indices else match[0]

    return re.sub(r"\{(\w+)(\+\d+)?\}", number, name)


def _matches(pattern: str, tensor: str) -> bool:
    """`*` in a pattern is any text, `{layer}` any number."""
    return _expression(pattern).fullmatch(tensor) is not None


@cache
def _expression(pattern: str) -> re.Pattern[str]:
    parts = re.split(r"(\*|\{layer\})", pattern)
    known = {"*": ".*", "{layer}": r"\d+"}
    return re.compile("".join(known.get(part, re.escape(part)) for part in parts))


def _held(name: str, tensors: TensorFiles) -> bool:
    """Whether the file has weight `name` of any layer, plain or quantised."""
    return any(_matches(spelling, tensor) for spelling in spellings(name) for tensor in tensors.names)


def _begins(prefix: str, tensors: TensorFiles) -> bool:
    """Whether the file has a tensor whose name starts so."""
    return any(name.startswith(prefix) for name in tensors.names)


def _equal(keys: tuple[str, str], config: ModelConfig) -> bool:
    """Whether the config has one value for both keys."""
    one, other = (config.values.get(key, config.find(key)) for key in keys)
    return one is not None and one == other


def _layers(config: ModelConfig, said: ItemsDecl) -> tuple[list[int] | None, list[Fault]]:
    """The target's layers that a config lists, and what is wrong with them; None where it lists none."""
    lists = {key: config.find(key) for key in said.keys if config.find(key) is not None}
    if said.otherwise is not None:  # then an empty list says that it is the usual ones
        lists = {key: items for key, items in lists.items() if items != []}
    wrong = {key: items for key, items in lists.items() if not _whole_numbers(items)}
    if wrong:
        return None, [_wrong_kind(config, key, "a list of whole numbers", items) for key, items in wrong.items()]
    if not lists:
        return None, []
    where, shown = config.raw.file, {key: repr(items) for key, items in lists.items()}
    for key in (key for key in _listed(said.outputs) if key in lists):
        if lists[key][:1] == [0]:
            hint = "What enters the layer after it is 1, and a list that begins with 1 means outputs (`hidden_layer_ids`)."
            message = "the list begins with the output of the first layer, which programs cannot be told"
            return None, [Fault(message, where, key, "1 or more first", shown[key], hint)]
        lists[key] = [item + 1 for item in lists[key]]
        shown[key] += f" of outputs, which is {lists[key]}"
    (first, items), *others = lists.items()
    for key, other in others:
        if other != items:
            hint = "Remove the one that is out of date."
            return None, [Fault("the config gives two lists", where, key, f"{shown[first]} as in {first}", shown[key], hint)]
    if said.exactly is not None and len(items) != said.exactly:
        expected = f"{said.exactly} layers, whose hiddens the program takes"
        hint = said.longer if len(items) > said.exactly else None
        return items, [Fault("the list has another length", where, first, expected, shown[first], hint)]
    if said.distinct and len(set(items)) < len(items):
        hint = "Correct it: the drafter reads the hiddens of layers that differ."
        return items, [Fault("the list repeats a layer", where, first, "each layer once", shown[first], hint)]
    count = config.find(said.layers) if said.layers else None
    return items, _beyond(config, said, items, count if type(count) is int else None, f"as {said.layers} is {count}")


def _keys_of(said: Any) -> tuple[str, ...]:
    """The keys that a value is made of."""
    if isinstance(said, ItemsDecl):
        return said.keys
    if isinstance(said, CountDecl):
        return _listed(said.count)
    if isinstance(said, list):
        return tuple(said)
    return tuple(said.split(" * ")) if isinstance(said, str) else ()


def _first(config: ModelConfig, keys: str | list[str]) -> Any:
    """What the first of these keys that is there says; None where none is. `same` has them agree."""
    return next((value for key in _listed(keys) if (value := config.find(key)) is not None), None)


def _whole_numbers(items: Any) -> bool:
    return isinstance(items, list) and all(type(item) is int for item in items)


def _beyond(config: ModelConfig, said: ItemsDecl, items: list[int], count: int | None, why: str) -> list[Fault]:
    """A fault where some of `items` are no layers of a target that has `count`, None where nobody says how many."""
    if all(item >= 0 and (count is None or item <= count + said.last) for item in items):
        return []
    subject = next(key for key in said.keys if config.find(key) is not None)
    less = 1 if subject in _listed(said.outputs) else 0  # shown as the file counts
    expected = "0 or more" if count is None else f"0 to {count + said.last - less}, {why}"
    got = repr([item - less for item in items])
    return [Fault("the list names no layers of the target", config.raw.file, subject, expected, got)]


def layers_found(pattern: str, names: frozenset[str]) -> list[int]:
    """Every layer index with which the name of some tensor starts with `pattern`, in order."""
    before, _, after = pattern.partition("{layer}")
    expression = re.compile(re.escape(before) + r"(\d+)" + re.escape(after))
    return sorted({int(match[1]) for match in map(expression.match, names) if match})
