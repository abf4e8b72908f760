"""Reading a manifest's JSON by hand: each refusal names file, key, expected and got."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

from ..errors import ArtifactError, Fault


class Reader:
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

    def inner(self, key: str) -> Reader:
        return Reader(self.value(key, dict), self.file, f"{self.key}.{key}".strip("."))

    def table(self, key: str, read: Callable[[Reader], Any]) -> dict[str, Any]:
        """An object of objects, each read by `read`."""
        rows = self.inner(key)
        return {name: read(rows.inner(name)) for name in rows.data}
