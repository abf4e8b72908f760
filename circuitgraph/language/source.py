"""YAML files with places: plain data, a pydantic schema, and the line each key came from."""

from __future__ import annotations

import difflib
from importlib import resources
from pathlib import Path
from typing import Any, TypeVar

import yaml
from pydantic import BaseModel, ValidationError

from ..errors import CircuitgraphError, Fault, Location, ProgramError

Key = tuple[str | int, ...]
Model = TypeVar("Model", bound=BaseModel)


class Places:
    """Maps a path of keys into a YAML document to the line it stands on."""

    def __init__(self, file: str, marks: dict[Key, yaml.Mark]):
        self.file = file
        self._marks = marks

    def has(self, key: Key) -> bool:
        return key in self._marks

    def __getitem__(self, key: Key) -> Location:
        # A key that is absent (a required field, say) is placed at its nearest parent.
        for length in range(len(key), -1, -1):
            mark = self._marks.get(key[:length])
            if mark is not None:
                return Location(self.file, mark.line + 1, mark.column + 1)
        return Location(self.file)


class MergedPlaces(Places):
    """Places of a file that is laid over another."""

    def __init__(self, over: Places, base: Places):
        super().__init__(over.file, {})
        self._layers = (over, base)

    def has(self, key: Key) -> bool:
        return any(places.has(key) for places in self._layers)

    def __getitem__(self, key: Key) -> Location:
        return next((places[key] for places in self._layers if places.has(key)), self._layers[0][key])


class _NotPlain(yaml.MarkedYAMLError):
    """YAML that says more than plain data, or values that are none."""


class _Loader(yaml.SafeLoader):
    """Without anchors and aliases: a document is a tree, and each value stands where it is written."""

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        event = self.peek_event()
        if isinstance(event, yaml.AliasEvent) or getattr(event, "anchor", None) is not None:
            raise _NotPlain(problem="anchors and aliases are not part of the language", problem_mark=event.start_mark)
        return super().compose_node(parent, index)


def display_path(path: Path) -> str:
    """Path as messages and artifacts show it: shipped files by their folder, others as given."""
    for package in ("programs", "schedules"):
        folder = Path(str(resources.files(f"circuitgraph.{package}"))).resolve()
        if path.resolve().is_relative_to(folder):
            return f"{package}/{path.resolve().relative_to(folder)}"
    return str(path)


def read_yaml(path: Path, schema: type[Model], error: type[CircuitgraphError] = ProgramError) -> tuple[Model, Places]:
    """Read `path`, validate it as `schema`.

    Raises:
        error: unreadable file, YAML syntax, an anchor or alias, a duplicate key, or schema violations (all of them together).
    """
    file = display_path(path)
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as reason:
        raise error(Fault(f"cannot read the file: {reason}", where=file)) from None
    marks: dict[Key, yaml.Mark] = {}
    try:
        root = yaml.compose(text, Loader=_Loader)
        data = _plain(root, (), marks, file, error)
    except yaml.MarkedYAMLError as problem:
        mark = problem.problem_mark or problem.context_mark
        where = Location(file, mark.line + 1, mark.column + 1) if mark else Location(file)
        message = problem.problem if isinstance(problem, _NotPlain) else f"not valid YAML: {problem.problem}"
        raise error(Fault(str(message), where=where)) from None
    except yaml.reader.ReaderError as problem:
        where = Location(file, text.count("\n", 0, problem.position) + 1)
        raise error(Fault(f"not valid YAML: {problem.reason}", where=where, got=f"#x{ord(text[problem.position]):04x}")) from None
    except yaml.YAMLError as problem:
        raise error(Fault(f"not valid YAML: {problem}", where=file)) from None
    except RecursionError:
        raise error(Fault("the file is nested too deeply", where=file)) from None
    places = Places(file, marks)
    try:
        return schema.model_validate(data if data is not None else {}), places
    except ValidationError as problem:
        raise error(_schema_faults(problem, places, schema)) from None


def _plain(node: yaml.Node | None, key: Key, marks: dict[Key, yaml.Mark], file: str, error: type[CircuitgraphError]) -> Any:
    if node is None:
        return None
    marks.setdefault(key, node.start_mark)
    if isinstance(node, yaml.MappingNode):
        result: dict[Any, Any] = {}
        for key_node, value_node in node.value:
            if not isinstance(key_node, yaml.ScalarNode):
                raise _NotPlain(problem="a key is a name, not a list or a mapping", problem_mark=key_node.start_mark)
            name = _scalar(key_node)
            if name in result:
                where = Location(file, key_node.start_mark.line + 1)
                raise error(Fault(f"key '{name}' is given twice", where=where, hint="Remove one of them."))
            marks[(*key, name)] = key_node.start_mark
            result[name] = _plain(value_node, (*key, name), marks, file, error)
        return result
    if isinstance(node, yaml.SequenceNode):
        return [_plain(item, (*key, index), marks, file, error) for index, item in enumerate(node.value)]
    return _scalar(node)


def _scalar(node: yaml.Node) -> Any:
    try:
        return yaml.SafeLoader("").construct_object(node, deep=True)  # type: ignore[no-untyped-call]
    except (ValueError, TypeError, KeyError) as problem:  # a date of month 13, say
        raise _NotPlain(problem=f"cannot read the value: {problem}", problem_mark=node.start_mark) from None


def _schema_faults(problem: ValidationError, places: Places, schema: type[BaseModel]) -> list[Fault]:
    errors = [_Violation(item, places) for item in problem.errors()]
    likely = _of_likely_members(errors)
    missing = {item.key for item in errors if item.kind == "missing"}
    meant: dict[Key, str] = {}
    for item in likely:
        if item.kind == "extra_forbidden":
            known = {key[-1] for key in missing if key[:-1] == item.key[:-1]}
            known.update(schema.model_fields if len(item.key) == 1 else ())
            near = difflib.get_close_matches(str(item.key[-1]), map(str, known), n=1)
            if near:
                meant[item.key] = near[0]
    mended = {(*key[:-1], name) for key, name in meant.items()}
    unsure = {key[:-1] for key in meant if len(key) > 1}
    faults: dict[Key, Fault] = {}
    for item in likely:
        where, subject, fault = places[item.key], ".".join(map(str, item.key)) or None, None
        if item.kind == "extra_forbidden":
            hint = f"Did you mean '{meant[item.key]}'?" if item.key in meant else "See docs/language.md for the keys."
            fault = Fault(f"unknown key '{item.key[-1]}'", where=where, hint=hint)
        elif item.kind != "missing":
            fault = Fault(item.message, where=where, subject=subject, got=repr(item.input)[:80])
        elif item.key not in mended and item.key[:-1] not in unsure:
            # Next to a key that is a slip of the pen, what else is missing depends on what was meant.
            fault = Fault(f"key '{subject}' is missing", where=where)
        if fault is not None:
            faults.setdefault(item.key, fault)
    return list(faults.values())


class _Violation:
    """One of pydantic's errors. Its `loc` mixes keys with the names of union members; the document tells them apart."""

    def __init__(self, item: Any, places: Places):
        self.kind: str = item["type"]
        self.message: str = item["msg"]
        self.input: Any = item["input"]
        parts = list(item["loc"])
        absent = [parts.pop()] if self.kind == "missing" else []
        self.key: Key = ()
        self.member: tuple[Key, str] | None = None
        for part in parts:
            if places.has((*self.key, part)):
                self.key = (*self.key, part)
            elif self.member is None:
                self.member = (self.key, str(part))
        self.key = (*self.key, *absent)

    @property
    def of_other_shape(self) -> bool:
        """The union's member wants a scalar and the file has a mapping there, or the other way round."""
        if self.member is None or self.key != self.member[0]:
            return False
        wants_mapping = self.kind in ("model_type", "dict_type")
        wants_scalar = self.kind.endswith("_type") and not wants_mapping
        return wants_mapping != isinstance(self.input, dict) if wants_mapping or wants_scalar else False


def _of_likely_members(errors: list[_Violation]) -> list[_Violation]:
    """Of each union keep the faults of the member that the author most likely meant."""
    members: dict[Key, dict[str, list[_Violation]]] = {}
    for item in errors:
        if item.member is not None:
            members.setdefault(item.member[0], {}).setdefault(item.member[1], []).append(item)

    def unlikeliness(faults: list[_Violation]) -> tuple[bool, int]:
        return any(item.of_other_shape for item in faults), sum(item.kind == "extra_forbidden" for item in faults)

    likely = {key: min(of.values(), key=unlikeliness) for key, of in members.items()}
    return [item for item in errors if item.member is None or item in likely[item.member[0]]]
