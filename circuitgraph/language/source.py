"""YAML files with places: plain data, a pydantic schema, and the line each key came from."""

from __future__ import annotations

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

    def __getitem__(self, key: Key) -> Location:
        # A key that is absent (a required field, say) is placed at its nearest parent.
        for length in range(len(key), -1, -1):
            mark = self._marks.get(key[:length])
            if mark is not None:
                return Location(self.file, mark.line + 1, mark.column + 1)
        return Location(self.file)


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
        error: unreadable file, YAML syntax, a duplicate key, or schema violations (all of them together).
    """
    file = display_path(path)
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as reason:
        raise error(Fault(f"cannot read the file: {reason}", where=file)) from None
    marks: dict[Key, yaml.Mark] = {}
    try:
        root = yaml.compose(text, Loader=yaml.SafeLoader)
        data = _plain(root, (), marks, file, error)
    except yaml.MarkedYAMLError as problem:
        mark = problem.problem_mark or problem.context_mark
        where = Location(file, mark.line + 1, mark.column + 1) if mark else Location(file)
        raise error(Fault(f"not valid YAML: {problem.problem}", where=where)) from None
    places = Places(file, marks)
    try:
        return schema.model_validate(data if data is not None else {}), places
    except ValidationError as problem:
        raise error(_schema_faults(problem, places)) from None


def _plain(node: yaml.Node | None, key: Key, marks: dict[Key, yaml.Mark], file: str, error: type[CircuitgraphError]) -> Any:
    if node is None:
        return None
    marks.setdefault(key, node.start_mark)
    if isinstance(node, yaml.MappingNode):
        result: dict[Any, Any] = {}
        for key_node, value_node in node.value:
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
    return yaml.SafeLoader("").construct_object(node, deep=True)  # type: ignore[no-untyped-call]


def _schema_faults(problem: ValidationError, places: Places) -> list[Fault]:
    faults: dict[Location, Fault] = {}
    for item in problem.errors():
        # pydantic puts the names of union members into `loc`; places skips what is not in the file.
        key = tuple(part for part in item["loc"])
        where = places[key]
        subject = ".".join(str(part) for part in item["loc"] if not _is_union_tag(part)) or None
        if item["type"] == "extra_forbidden":
            fault = Fault(f"unknown key '{item['loc'][-1]}'", where=where, hint="See docs/language.md for the keys.")
        elif item["type"] == "missing":
            fault = Fault(f"key '{item['loc'][-1]}' is missing", where=where)
        else:
            fault = Fault(item["msg"], where=where, subject=subject, got=repr(item["input"])[:80])
        # A union reports one fault per member: the first is enough for one place.
        faults.setdefault(where, fault)
    return list(faults.values())


def _is_union_tag(part: str | int) -> bool:
    return isinstance(part, str) and (part in {"str", "int", "float", "bool"} or "[" in part or part[:1].isupper())
