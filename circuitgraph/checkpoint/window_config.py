"""What a config says of the cache rows that each of the drafter's layers sees: sliding windows, and causal blocks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, StrictInt, StrictStr

from ..errors import Fault
from .config import ModelConfig

FULL, SLIDING = "full_attention", "sliding_attention"
NOBODY = 1 << 31
"""A place in `layer_types` behind all items: that of a layer whose place is not known."""


class WindowsDecl(BaseModel):
    """Where a family's configs say which of its layers attend to a window.

    layers: how many the drafter has, a number or a key. after: the key that says how many layers of the target come first in
    `layer_types`, where that is the target's list. size: keys that may have the window. everywhere: keys that, where true, give
    every layer a window if `layer_types` gives it to none. causal: keys that say for all layers of a block drafter whether a
    row of a block sees none behind it; without one, layers that `layer_types` calls sliding are causal.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    layers: StrictInt | StrictStr = 1
    after: StrictStr | None = None
    size: list[str] = Field(default=["sliding_window"], min_length=1)
    everywhere: list[str] = Field(default_factory=list)
    causal: list[str] = Field(default_factory=list)


def read_windows(config: ModelConfig, said: WindowsDecl) -> tuple[dict[str, list], list[Fault]]:
    """({windows: cache rows that each layer sees, 0 for all; causal: of each layer}, what is wrong).

    `layer_types` names each layer's kind. Without it `use_sliding_window` says whether there is a window, and `max_window_layers`
    how many layers at the bottom see all rows all the same (transformers Qwen2Config).
    """
    reader = _Reader(config, said)
    made = reader.read()
    return made, reader.faults


class _Reader:
    def __init__(self, config: ModelConfig, said: WindowsDecl):
        self.config, self.said = config, said
        self.faults: list[Fault] = []
        layers = said.layers if isinstance(said.layers, int) else config.find(said.layers)
        self.count = layers if type(layers) is int and layers > 0 else 1  # what is wrong is told where the key is needed
        before = config.find(said.after) if said.after else 0
        self.before = before if type(before) is int else NOBODY

    def read(self) -> dict[str, list]:
        size_key, window = self._one(self.said.size, int)
        _, causal = self._one(self.said.causal, bool)
        on = self._flag("use_sliding_window")
        named = self._named()
        forced = {key: self._flag(key) for key in self.said.everywhere}
        forced_by = next((key for key, value in forced.items() if value), None)
        if self.faults:
            return {"windows": [0] * self.count, "causal": [False] * self.count}
        if forced_by and not any(named or []):
            sliding, by = [True] * self.count, forced_by
        elif named is not None:
            sliding, by = named, "layer_types"
        else:
            sliding, by = self._unnamed(size_key, window, False if on is None and False in forced.values() else on)
        if by == "layer_types" and any(sliding) and on is False:
            self._fault("use_sliding_window", "the config gives two values", f"true, since {by} has windows", "False")
        elif any(sliding) and window is None:
            self._fault(size_key, "the key is missing", f"a window's rows, since {by} has windows", None)
        rows = 0 if window is None or self._holds_all(window) else window
        windows = [rows if item else 0 for item in sliding]
        if any(windows):
            self._one_rope()
        default = sliding if by == "layer_types" else [False] * self.count
        return {"windows": windows, "causal": default if causal is None else [causal] * self.count}

    def _named(self) -> list[bool] | None:
        """Which layers `layer_types` calls sliding."""
        kinds = self.config.find("layer_types")
        if kinds is None or kinds == []:
            return None
        if not isinstance(kinds, list):
            self._fault("layer_types", "the value is of the wrong kind", "a list", repr(kinds))
            return None
        mine = kinds[self.before : self.before + self.count]
        if len(mine) < self.count and len(set(map(str, kinds))) == 1:  # of other layers, which are all the same
            mine = kinds[:1] * self.count
        if len(mine) < self.count:
            message = "does not say which rows the drafter's layers see"
            expected = (
                "items that are the same" if self.before == NOBODY else f"{self.before + self.count} items, or all the same"
            )
            hint = f"Add '{FULL}' or '{SLIDING}' for each of the drafter's layers."
            self._fault("layer_types", message, expected, f"{len(kinds)} items", hint)
            return None
        other = next((kind for kind in mine if kind not in (FULL, SLIDING)), None)
        if other is not None:
            self._fault("layer_types", "layers of this kind are not modelled", f"'{FULL}' or '{SLIDING}'", repr(other))
            return None
        return [kind == SLIDING for kind in mine]

    def _unnamed(self, size_key: str, window: int | None, on: bool | None) -> tuple[list[bool], str]:
        full = self.config.find("max_window_layers")
        if on is None and window is not None and not self._holds_all(window):
            message = "a window, and no word on which layers have it"
            hint = "Say 'use_sliding_window': true if the drafter's layers attend to a window, false if to everything."
            self._fault(size_key, message, "null, or layer_types", repr(window), hint)
        elif on and full is not None and (type(full) is not int or full < 0):
            self._fault("max_window_layers", "the value is of the wrong kind", "0 or more", repr(full))
        elif on and full and self.said.after:
            message = "does not say which rows the drafter's layer sees"
            hint = f"Add 'layer_types', with '{FULL}' or '{SLIDING}' for the drafter's layer, too."
            self._fault("max_window_layers", message, "0, or layer_types", repr(full), hint)
        elif on:
            return [index >= (full or 0) for index in range(self.count)], "use_sliding_window"
        return [False] * self.count, "nothing"

    def _one_rope(self) -> None:
        """Programs have one rotation for all layers."""
        for key in ("rope_parameters", "rope_scaling"):
            sets = self.config.find(key)
            if isinstance(sets, Mapping) and FULL in sets and sets.get(SLIDING, sets[FULL]) != sets[FULL]:
                expected = f"the same as of {FULL}, {sets[FULL]!r}"
                self._fault(f"{key}.{SLIDING}", "layers with a window rotate otherwise", expected, repr(sets[SLIDING]))

    def _holds_all(self, window: int) -> bool:
        """Does a window hold every position that there can be?"""
        limit = self.config.values.get("max_position_embeddings")
        return type(limit) is int and window >= limit

    def _one(self, keys: list[str], kind: type) -> tuple[str, Any]:
        """(key, value) of the first key that the config has; they agree."""
        found = {key: self.config.find(key) for key in keys if self.config.find(key) is not None}
        for key, value in found.items():
            if type(value) is not kind or (kind is int and not 0 < value < 2**31):
                expected = "a positive integer" if kind is int else "true or false"
                self._fault(key, "the value is of the wrong kind", expected, repr(value))
                return key, None
        if len(set(found.values())) > 1:
            (first, value), (key, other), *_ = found.items()
            hint = "Remove the one that is out of date."
            self._fault(key, "the config gives two values", f"{value!r} as in {first}", repr(other), hint)
        return next(iter(found.items()), (keys[0] if keys else "", None))

    def _flag(self, key: str) -> bool | None:
        return self._one([key], bool)[1]

    def _fault(self, key: str, message: str, expected: str, got: str | None, hint: str | None = None) -> None:
        self.faults.append(Fault(message, self.config.raw.file, key, expected, got, hint))
