"""`manifest.json`: everything that a loader must know about an artifact, as dataclasses with hand-made validation.

A serving box has no schema library, so reading is written out here; each refusal names file, key, expected and got.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from ..checkpoint.packed import VALUE_DTYPES, Packed
from ..circuit.ir import Circuit, Storage, Weight
from ..circuit.text import circuit_from_json, circuit_to_json
from ..circuit.types import TensorType
from ..errors import ArtifactError, Fault
from ..places import MANIFEST
from .reader import Reader

FORMAT = 4

ROLES = ("input", "state", "table", "weight", "workspace", "output")
SOURCES = ("drafter", "target", "host", "random", "artifact")
DTYPES = ("f32", "bf16", "f16", "i32", "i64", "u8", "i8")

# Keys of a config.json that say who wrote it or how it was loaded, not what the model is.
_VOLATILE = ("_name_or_path", "transformers_version", "torch_dtype", "dtype", "use_cache")


def config_digest(config: Mapping[str, Any]) -> str:
    """What identifies a model's config.json: SHA-256 of its canonical text without the keys that tools rewrite."""
    kept = {key: value for key, value in config.items() if key not in _VOLATILE}
    return hashlib.sha256(json.dumps(kept, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


@dataclass(frozen=True)
class Target:
    """What machine the library runs on.

    features: instruction sets that its code may execute, as `machine_features` names them.
    """

    kind: str
    arch: str
    mcpu: str
    features: tuple[str, ...] = ()


@dataclass(frozen=True)
class Model:
    """The checkpoint that the program was compiled for. `target_digest`: of the target's config, where one was given."""

    name: str
    config_digest: str
    hidden_size: int
    vocab_size: int
    target_digest: str = ""


@dataclass(frozen=True)
class Arg:
    """One argument of a function. `name` is the circuit's (`token`, `kv.slot`, `rope.cos`, a weight, a public output).

    Role `state` is a cache's storage and its addressing. A dimension that differs from call to call is an axis name.
    """

    name: str
    role: str
    dtype: str
    shape: tuple[int | str, ...]


@dataclass(frozen=True)
class Function:
    """One compiled program: `entry` for exactly `rows` rows, called with `args` in order, outputs written in place.

    `workspace_bytes` is what its arguments of role workspace take; `cost` is bytes moved and FLOPs of one call.
    """

    entry: str
    rows: int
    symbol: str
    args: tuple[Arg, ...]
    workspace_bytes: int
    cost_bytes: int
    cost_flops: int


@dataclass(frozen=True)
class Build:
    """The code for one processor."""

    target: Target
    library: str
    functions: Mapping[str, Function]


@dataclass(frozen=True)
class WeightSpec:
    """A weight as the code expects it, and where it is bound from.

    tensor: its name in the checkpoint (drafter, target), in the artifact's weight file (artifact), or of the target's
        own tensor that the caller hands over (host). Weights that share a tensor name are tied.
    stored: the checkpoint's dtype where compiling asked for another one; empty where it is `dtype`.
    packed: how the file stores a quantised weight, of which `tensor` has the values. Loading dequantises it to `dtype`, or,
        with `storage`, brings it to the form that the code reads.
    either: of a host's tensor that some targets tie to another, its names in a target that does not and in one that does;
        `tensor` is the one that the drafter's own config says.
    """

    dtype: str
    shape: tuple[int, ...]
    tensor: str
    source: str
    stored: str = ""
    packed: Packed | None = None
    storage: Storage | None = None
    either: tuple[str, str] | None = None

    def weight(self, name: str) -> Weight:
        """As the weight `name` of a circuit."""
        return Weight(name, TensorType(self.dtype, self.shape), self.storage)

    def to_json(self) -> dict[str, Any]:
        data = {**vars(self), "shape": list(self.shape)}
        quantised = {key: data.pop(key) for key in ("packed", "storage")}
        either = data.pop("either")
        data.update({key: value.to_json() for key, value in quantised.items() if value is not None})
        return {**data, "either": list(either)} if either is not None else data


@dataclass(frozen=True)
class Manifest:
    """See the fields' types. Widths and switches are derived: functions and the circuit hold them.

    functions: by name, e.g. `draft_4`. others: the code for further architectures, by their names; `of` takes one of them
    as target, library and functions. rope: table name to `RopeSpec.to_json()`. max_position: rows of those tables.
    options: what the compile call was given, for people. files: relative name to SHA-256, filled in by the writer.
    weight_file: of the weights whose source is `artifact`: `model.safetensors` in a folder of its own.
    """

    program: str
    family: str
    circuit: Circuit
    target: Target
    model: Model
    functions: Mapping[str, Function]
    weights: Mapping[str, WeightSpec]
    rope: Mapping[str, Mapping[str, Any]]
    max_position: int
    library: str
    weight_file: str | None = None
    others: Mapping[str, Build] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)
    tools: Mapping[str, str] = field(default_factory=dict)
    files: Mapping[str, str] = field(default_factory=dict)

    def widths(self, entry: str) -> tuple[int, ...]:
        """Compiled row counts of `entry`, ascending; empty when it was not compiled."""
        return tuple(sorted(function.rows for function in self.functions.values() if function.entry == entry))

    def function(self, entry: str, rows: int) -> Function:
        return next(f for f in self.functions.values() if (f.entry, f.rows) == (entry, rows))

    @property
    def builds(self) -> dict[str, Build]:
        """All code, by the processor that it is for."""
        return {self.target.mcpu: Build(self.target, self.library, self.functions), **self.others}

    @property
    def folder(self) -> str:
        """Where below `plans/` and `src/` the texts of its functions lie."""
        return f"{self.target.mcpu}/" if self.others else ""

    def of(self, mcpu: str) -> Manifest:
        """The manifest of the same artifact with the code for `mcpu` as its target, library and functions."""
        builds = self.builds
        chosen = builds.pop(mcpu)
        return replace(self, target=chosen.target, library=chosen.library, functions=chosen.functions, others=builds)

    def to_json(self) -> dict[str, Any]:
        """Plain data. `switches` and `entries` repeat, for readers, what the circuit and the functions say.

        `digest` is of all the rest, in this order: a manifest that was edited does not read back.
        """
        data = {
            "format": FORMAT,
            "program": self.program,
            "family": self.family,
            "switches": dict(self.circuit.facts),
            "entries": {entry: list(self.widths(entry)) for entry in sorted({f.entry for f in self.functions.values()})},
            "target": _target_json(self.target),
            "model": vars(self.model),
            "max_position": self.max_position,
            "library": self.library,
            "weight_file": self.weight_file,
            "options": dict(self.options),
            "tools": dict(self.tools),
            "files": dict(self.files),
            "weights": {name: spec.to_json() for name, spec in self.weights.items()},
            "rope": {name: dict(spec) for name, spec in self.rope.items()},
            "functions": _functions_json(self.functions),
            "others": {
                name: {
                    "target": _target_json(build.target),
                    "library": build.library,
                    "functions": _functions_json(build.functions),
                }
                for name, build in self.others.items()
            },
            "circuit": circuit_to_json(self.circuit),
        }
        return {**data, "digest": hashlib.sha256(json.dumps(data).encode()).hexdigest()}

    def to_text(self) -> str:
        return json.dumps(self.to_json(), indent=1) + "\n"

    @staticmethod
    def from_text(text: str, file: str = MANIFEST) -> Manifest:
        """Inverse of `to_text`.

        Raises:
            ArtifactError: not JSON, another format version, or the first key that is absent, unknown or wrong.
        """
        try:
            data = json.loads(text)
        except (ValueError, RecursionError) as error:
            hint = "The artifact is damaged: compile again."
            raise ArtifactError(Fault(f"is not JSON: {error}", where=file, hint=hint)) from None
        top = Reader(data, file, "")
        try:
            return _read_manifest(top)
        except (AttributeError, KeyError, TypeError, ValueError, RecursionError) as error:
            top.refuse("circuit", f"is not a circuit ({error!r})")


def _target_json(target: Target) -> dict[str, Any]:
    return {**vars(target), "features": list(target.features)}


def _functions_json(functions: Mapping[str, Function]) -> dict[str, Any]:
    return {
        name: {
            "entry": function.entry,
            "rows": function.rows,
            "symbol": function.symbol,
            "workspace_bytes": function.workspace_bytes,
            "cost": {"bytes": function.cost_bytes, "flops": function.cost_flops},
            "args": [{**vars(arg), "shape": list(arg.shape)} for arg in function.args],
        }
        for name, function in functions.items()
    }


def _read_manifest(top: Reader) -> Manifest:
    version = top.value("format", int)
    if version != FORMAT:
        hint = "Compile again with this version, or install the one that wrote it."
        top.refuse("format", "the artifact has another format version", expected=str(FORMAT), got=str(version), hint=hint)
    model = top.inner("model")
    top.value("digest", str)
    manifest = Manifest(
        program=top.value("program", str),
        family=top.value("family", str),
        circuit=circuit_from_json(top.value("circuit", dict)),
        target=_read_target(top.inner("target")),
        model=Model(
            name=model.value("name", str),
            config_digest=model.value("config_digest", str),
            hidden_size=model.value("hidden_size", int),
            vocab_size=model.value("vocab_size", int),
            target_digest=model.value("target_digest", str),
        ),
        functions=top.table("functions", _read_function),
        weights=top.table("weights", _read_weight),
        rope={name: dict(spec.data) for name, spec in top.table("rope", lambda reader: reader).items()},
        max_position=top.value("max_position", int),
        library=top.value("library", str),
        weight_file=top.value("weight_file", (str, type(None))),
        others=top.table("others", _read_build),
        options=top.value("options", dict),
        tools=top.value("tools", dict),
        files=top.value("files", dict),
    )
    _check_whole(manifest, top)
    return manifest


def _check_whole(manifest: Manifest, top: Reader) -> None:
    """What no single key shows: unknown keys, and parts that disagree."""
    for name, digest in manifest.files.items():
        if not isinstance(digest, str) or name.startswith(("/", "\\")) or ".." in name.replace("\\", "/").split("/"):
            top.refuse(f"files.{name}", "is not a relative file name with its digest")
    if manifest.weight_file is not None and manifest.weight_file not in manifest.files:
        top.refuse("weight_file", f"'{manifest.weight_file}' is not among the files")
    own = Build(manifest.target, manifest.library, manifest.functions)
    for name, build in {"": own, **manifest.others}.items():
        key = f"others.{name}." if name else ""
        if name and (name != build.target.mcpu or name == manifest.target.mcpu):
            top.refuse(f"{key}target.mcpu", "is the processor of other code, too", expected=name, got=build.target.mcpu)
        if build.library not in manifest.files:
            top.refuse(f"{key}library", f"'{build.library}' is not among the files")
        _check_functions(build.functions, manifest.weights, f"{key}functions", top)
    written = manifest.to_json()
    for key in written:
        if key not in top.data:  # what repeats something is not read, and has to be there all the same
            top.refuse(key, "is absent")
    for key, value in top.data.items():
        if written.get(key, _ABSENT) != value and key != "digest":
            top.refuse(key, "has unknown keys, or disagrees with what it repeats from the circuit and the functions")
    if written["digest"] != top.data["digest"]:
        top.refuse("digest", "is of another manifest", expected=written["digest"], got=top.data["digest"])


def _check_functions(functions: Mapping[str, Function], weights: Mapping[str, WeightSpec], key: str, top: Reader) -> None:
    calls = {}
    tensors = {value.name for name, spec in weights.items() for value in spec.weight(name).tensors()}
    for name, function in functions.items():
        if (function.entry, function.rows) in calls:
            other = calls[function.entry, function.rows]
            top.refuse(f"{key}.{name}", f"serves the same entry and rows as '{other}'")
        calls[function.entry, function.rows] = name
        for arg in function.args:
            if arg.role == "weight" and arg.name not in tensors:
                top.refuse(f"{key}.{name}.args.{arg.name}", "is a weight that 'weights' does not list")


_ABSENT = object()


def _read_target(reader: Reader) -> Target:
    return Target(
        kind=reader.value("kind", str),
        arch=reader.value("arch", str),
        mcpu=reader.value("mcpu", str),
        features=tuple(reader.items("features", str)),
    )


def _read_build(reader: Reader) -> Build:
    return Build(
        target=_read_target(reader.inner("target")),
        library=reader.value("library", str),
        functions=reader.table("functions", _read_function),
    )


def _read_function(reader: Reader) -> Function:
    cost = reader.inner("cost")
    args = [Reader(data, reader.file, f"{reader.key}.args.{index}") for index, data in enumerate(reader.items("args", dict))]
    return Function(
        entry=reader.value("entry", str),
        rows=reader.value("rows", int),
        symbol=reader.value("symbol", str),
        args=tuple(_read_arg(arg) for arg in args),
        workspace_bytes=reader.value("workspace_bytes", int),
        cost_bytes=cost.value("bytes", int),
        cost_flops=cost.value("flops", int),
    )


def _read_arg(reader: Reader) -> Arg:
    return Arg(
        name=reader.value("name", str),
        role=reader.value("role", str, ROLES),
        dtype=reader.value("dtype", str, DTYPES),
        shape=tuple(reader.items("shape", (int, str))),
    )


def _read_weight(reader: Reader) -> WeightSpec:
    dtype, shape = reader.value("dtype", str, DTYPES), tuple(reader.items("shape", int))
    storage = reader.inner("storage") if "storage" in reader.data else None
    return WeightSpec(
        dtype=dtype,
        shape=shape,
        tensor=reader.value("tensor", str),
        source=reader.value("source", str, SOURCES),
        stored=reader.value("stored", str, ("", *DTYPES)),
        packed=_read_packed(reader.inner("packed")) if "packed" in reader.data else None,
        storage=_read_storage(storage, TensorType(dtype, shape)) if storage else None,
        either=_read_either(reader) if "either" in reader.data else None,
    )


def _read_either(reader: Reader) -> tuple[str, str]:
    names = reader.items("either", str)
    if len(names) != 2:
        reader.refuse("either", "is not two names", got=str(names))
    return names[0], names[1]


def _read_storage(reader: Reader, weight: TensorType) -> Storage:
    high, wide = _read_block(reader)
    try:
        storage = Storage(reader.value("format", str), (high, wide), reader.value("whole", bool))
    except ValueError as problem:
        reader.refuse("", str(problem))
    reason = storage.refuse(weight)
    if reason:
        reader.refuse("", reason, got=str(weight))
    return storage


def _read_block(reader: Reader) -> tuple[int, int]:
    block = reader.items("block", int)
    if len(block) != 2 or min(block) < 0:
        reader.refuse("block", "is not a number of rows and one of columns", got=str(block))
    return block[0], block[1]


def _read_packed(reader: Reader) -> Packed:
    return Packed(
        format=reader.value("format", str, tuple(VALUE_DTYPES)),
        scales=reader.value("scales", str),
        block=_read_block(reader),
        global_scale=reader.value("global_scale", str),
        divides=reader.value("divides", bool),
    )
