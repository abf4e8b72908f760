"""`manifest.json`: everything that a loader must know about an artifact, as dataclasses with hand-made validation.

A serving box has no schema library, so reading is written out here; each refusal names file, key, expected and got.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NoReturn

from ..circuit.ir import Circuit
from ..circuit.text import circuit_from_json, circuit_to_json
from ..errors import ArtifactError, Fault

FORMAT = 2
MANIFEST = "manifest.json"

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
class WeightSpec:
    """A weight as the code expects it, and where it is bound from.

    tensor: its name in the checkpoint (drafter, target), in the artifact's weight file (artifact), or of the target's
        own tensor that the caller hands over (host). Weights that share a tensor name are tied.
    stored: the checkpoint's dtype where compiling asked for another one; empty where it is `dtype`.
    """

    dtype: str
    shape: tuple[int, ...]
    tensor: str
    source: str
    stored: str = ""


@dataclass(frozen=True)
class Manifest:
    """See the fields' types. Widths and switches are derived: functions and the circuit hold them.

    functions: by name, e.g. `draft_4`. rope: table name to `RopeSpec.to_json()`. max_position: rows of those tables.
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
    options: Mapping[str, Any] = field(default_factory=dict)
    tools: Mapping[str, str] = field(default_factory=dict)
    files: Mapping[str, str] = field(default_factory=dict)

    def widths(self, entry: str) -> tuple[int, ...]:
        """Compiled row counts of `entry`, ascending; empty when it was not compiled."""
        return tuple(sorted(function.rows for function in self.functions.values() if function.entry == entry))

    def function(self, entry: str, rows: int) -> Function:
        return next(f for f in self.functions.values() if (f.entry, f.rows) == (entry, rows))

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
            "target": {**vars(self.target), "features": list(self.target.features)},
            "model": vars(self.model),
            "max_position": self.max_position,
            "library": self.library,
            "weight_file": self.weight_file,
            "options": dict(self.options),
            "tools": dict(self.tools),
            "files": dict(self.files),
            "weights": {name: {**vars(spec), "shape": list(spec.shape)} for name, spec in self.weights.items()},
            "rope": {name: dict(spec) for name, spec in self.rope.items()},
            "functions": {
                name: {
                    "entry": function.entry,
                    "rows": function.rows,
                    "symbol": function.symbol,
                    "workspace_bytes": function.workspace_bytes,
                    "cost": {"bytes": function.cost_bytes, "flops": function.cost_flops},
                    "args": [{**vars(arg), "shape": list(arg.shape)} for arg in function.args],
                }
                for name, function in self.functions.items()
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
        top = _Reader(data, file, "")
        try:
            return _read_manifest(top)
        except (AttributeError, KeyError, TypeError, ValueError, RecursionError) as error:
            top.refuse("circuit", f"is not a circuit ({error!r})")


def _read_manifest(top: _Reader) -> Manifest:
    version = top.value("format", int)
    if version != FORMAT:
        hint = "Compile again with this version, or install the one that wrote it."
        top.refuse("format", "the artifact has another format version", expected=str(FORMAT), got=str(version), hint=hint)
    target, model = top.inner("target"), top.inner("model")
    top.value("digest", str)
    manifest = Manifest(
        program=top.value("program", str),
        family=top.value("family", str),
        circuit=circuit_from_json(top.value("circuit", dict)),
        target=Target(
            kind=target.value("kind", str),
            arch=target.value("arch", str),
            mcpu=target.value("mcpu", str),
            features=tuple(target.items("features", str)),
        ),
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
        options=top.value("options", dict),
        tools=top.value("tools", dict),
        files=top.value("files", dict),
    )
    _check_whole(manifest, top)
    return manifest


def _check_whole(manifest: Manifest, top: _Reader) -> None:
    """What no single key shows: unknown keys, and parts that disagree."""
    for name, digest in manifest.files.items():
        if not isinstance(digest, str) or name.startswith(("/", "\\")) or ".." in name.replace("\\", "/").split("/"):
            top.refuse(f"files.{name}", "is not a relative file name with its digest")
    for key, name in (("library", manifest.library), ("weight_file", manifest.weight_file)):
        if name is not None and name not in manifest.files:
            top.refuse(key, f"'{name}' is not among the files")
    calls = {}
    for name, function in manifest.functions.items():
        if (function.entry, function.rows) in calls:
            other = calls[function.entry, function.rows]
            top.refuse(f"functions.{name}", f"serves the same entry and rows as '{other}'")
        calls[function.entry, function.rows] = name
        for arg in function.args:
            if arg.role == "weight" and arg.name not in manifest.weights:
                top.refuse(f"functions.{name}.args.{arg.name}", "is a weight that 'weights' does not list")
    written = manifest.to_json()
    for key, value in top.data.items():
        if written.get(key, _ABSENT) != value and key != "digest":
            top.refuse(key, "has unknown keys, or disagrees with what it repeats from the circuit and the functions")
    if written["digest"] != top.data["digest"]:
        top.refuse("digest", "is of another manifest", expected=written["digest"], got=top.data["digest"])


_ABSENT = object()


def _read_function(reader: _Reader) -> Function:
    cost = reader.inner("cost")
    args = [_Reader(data, reader.file, f"{reader.key}.args.{index}") for index, data in enumerate(reader.items("args", dict))]
    return Function(
        entry=reader.value("entry", str),
        rows=reader.value("rows", int),
        symbol=reader.value("symbol", str),
        args=tuple(_read_arg(arg) for arg in args),
        workspace_bytes=reader.value("workspace_bytes", int),
        cost_bytes=cost.value("bytes", int),
        cost_flops=cost.value("flops", int),
    )


def _read_arg(reader: _Reader) -> Arg:
    return Arg(
        name=reader.value("name", str),
        role=reader.value("role", str, ROLES),
        dtype=reader.value("dtype", str, DTYPES),
        shape=tuple(reader.items("shape", (int, str))),
    )


def _read_weight(reader: _Reader) -> WeightSpec:
    return WeightSpec(
        dtype=reader.value("dtype", str, DTYPES),
        shape=tuple(reader.items("shape", int)),
        tensor=reader.value("tensor", str),
        source=reader.value("source", str, SOURCES),
        stored=reader.value("stored", str, ("", *DTYPES)),
    )


class _Reader:
    """One JSON object of the manifest, and where it is."""

    def __init__(self, data: Any, file: str, key: str):
        self.file, self.key = file, key
        if not isinstance(data, dict):
            self.refuse("", "must be an object", got=type(data).__name__)
        self.data: dict[str, Any] = data

    def refuse(self, key: str, message: str, **details: str) -> NoReturn:
        subject = ".".join(part for part in (self.key, key) if part)
        details.setdefault("hint", "The artifact is damaged or was edited: compile again.")
        raise ArtifactError(Fault(message, where=self.file, subject=subject or None, **details))

    def value(self, key: str, kind: type | tuple[type, ...], choices: tuple[str, ...] = ()) -> Any:
        kinds = kind if isinstance(kind, tuple) else (kind,)
        expected = " or ".join("null" if k is type(None) else k.__name__ for k in kinds)
        if key not in self.data:
            self.refuse(key, "is absent", expected=expected)
        value = self.data[key]
        if type(value) not in kinds:
            self.refuse(key, "has the wrong type", expected=expected, got=type(value).__name__)
        if choices and value not in choices:
            self.refuse(key, "has an unknown value", expected=", ".join(choices), got=repr(value))
        return value

    def items(self, key: str, kind: type | tuple[type, ...]) -> list[Any]:
        items = self.value(key, list)
        kinds = kind if isinstance(kind, tuple) else (kind,)
        for index, item in enumerate(items):
            if type(item) not in kinds:
                expected = " or ".join(k.__name__ for k in kinds)
                self.refuse(f"{key}.{index}", "has the wrong type", expected=expected, got=type(item).__name__)
        return items

    def inner(self, key: str) -> _Reader:
        return _Reader(self.value(key, dict), self.file, f"{self.key}.{key}".strip("."))

    def table(self, key: str, read: Callable[[_Reader], Any]) -> dict[str, Any]:
        """An object of objects, each read by `read`."""
        rows = self.inner(key)
        return {name: read(rows.inner(name)) for name in rows.data}
