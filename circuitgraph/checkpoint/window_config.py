"""What a config says of the cache rows that each of the drafter's layers sees: sliding windows, and causal blocks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, StrictInt, StrictStr

from ..errors import Fault
from .config import ModelConfig, is_count

FULL, SLIDING = "full_attention", "sliding_attention"
SIZE = "sliding_window"
TWO_VALUES = "the config gives two values"
NOBODY = 1 << 31
"""A place in `layer_types` behind all items: that of a layer whose place is not known."""


class WindowsDecl(BaseModel):
    """Where a family's configs say which of its layers attend to a window.

    layers: how many the drafter has, a number or a key. after: the key that says how many layers of the target come first in
    `layer_types`, where that is the target's list. size: keys that may have the window, the first that does counts.
    everywhere: keys that, where true, give every layer a window if nothing else gives it to any. block: keys that may have the
    rows of a block, than which no window is shorter. causal: keys that say for all layers whether a row of a block sees none
    behind it; without one, layers that are sliding by their kind are causal.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    layers: StrictInt | StrictStr = 1
    after: StrictStr | None = None
    size: list[str] = Field(default=[SIZE], min_length=1)
    everywhere: list[str] = Field(default_factory=list)
    block: list[str] = Field(default_factory=list)
    causal: list[str] = Field(default_factory=list)


def read_windows(config: ModelConfig, said: WindowsDecl | None, family: str) -> tuple[dict[str, list], list[Fault]]:
    """({windows: cache rows that each layer sees, 0 for all; causal: of each layer}, what is wrong).

    `layer_types` names each layer's kind. Without it `use_sliding_window` says whether there is a window, and `max_window_layers`
    how many layers at the bottom see all rows all the same (transformers Qwen2Config, Qwen3Config).

    said: None where the family does not say how its configs tell it: then any window is refused.
    """
    reader = _Reader(config, said or WindowsDecl(layers="num_hidden_layers"))
    made = reader.read() if said else reader.without(family)
    return made, reader.faults


def _said(rotations: Mapping[str, Any], kind: str) -> Any:
    """What a layer kind's RoPE parameters say, without what they leave as it is."""
    of = rotations.get(kind)
    return {key: value for key, value in of.items() if value not in (None, "default")} if isinstance(of, Mapping) else of


class _Reader:
    def __init__(self, config: ModelConfig, said: WindowsDecl):
        self.config, self.said = config, said
        self.faults: list[Fault] = []
        # of `values`, since the file itself may have told it
        layers: Any = said.layers if isinstance(said.layers, int) else config.values.get(said.layers)
        self.count = layers if is_count(layers) else 1  # what is wrong is told where the key is needed
        before = config.find(said.after) if said.after else 0
        self.before = before if type(before) is int else NOBODY

    @property
    def none(self) -> dict[str, list]:
        """Every layer sees all rows."""
        return {"windows": [0] * self.count, "causal": [False] * self.count}

    def without(self, family: str) -> dict[str, list]:
        """None, and a fault where some layer may have a window: of the target's layers nobody knows which is the drafter's."""
        window, on, kinds = self._positive(SIZE), self._flag("use_sliding_window"), self.config.find("layer_types")
        named = isinstance(kinds, list) and kinds and SLIDING not in kinds
        if window is not None and on is not False and not named and not self._holds_all(window):
            limit = self.config.values.get("max_position_embeddings")
            self._fault(
                SIZE,
                f"family '{family}' does not model a sliding window",
                f"null, or max_position_embeddings ({limit}) or more" if limit else "null",
                repr(window),
                "If these layers attend to everything, say so: 'use_sliding_window': false.",
            )
        return self.none

    def read(self) -> dict[str, list]:
        sizes = {key: window for key in self.said.size if (window := self._positive(key)) is not None}
        size_key, window = next(iter(sizes.items()), (self.said.size[0], None))
        (_, causal), (forced_by, forced) = self._agreed(self.said.causal), self._agreed(self.said.everywhere)
        on = self._flag("use_sliding_window")
        by, sliding = self._kinds(size_key, window, on, off=forced is not None)
        if self.faults:
            return self.none
        kinds = sliding
        if forced and not any(sliding):
            by, sliding = forced_by, [True] * self.count
        if any(sliding):
            self._check(by, on, sizes, size_key)
        rows = 0 if window is None or self._holds_all(window) else window
        windows = [rows if item else 0 for item in sliding]
        return self.none if self.faults else {"windows": windows, "causal": kinds if causal is None else [causal] * self.count}

    def _kinds(self, size_key: str, window: int | None, on: bool | None, *, off: bool) -> tuple[str, list[bool]]:
        """(the key that says it, which layers are sliding). off: a window alone means none yet."""
        kinds, full = self.config.find("layer_types"), self.config.find("max_window_layers")
        if kinds is not None and kinds != []:
            return "layer_types", self._named(kinds)
        if on is None and window is not None and not off and not self._holds_all(window):
            message = "a window, and no word on which layers have it"
            hint = "Say 'use_sliding_window': false if the drafter's layers attend to everything, else their 'layer_types'."
            self._fault(size_key, message, "null, or layer_types", repr(window), hint)
        elif on and (type(full) is not int or full < 0):
            got, message = (None, "the key is missing") if full is None else (repr(full), "the value is of the wrong kind")
            self._fault("max_window_layers", message, "0 or more layers at the bottom that see all rows, or layer_types", got)
        elif on and full and self.said.after:
            message = "does not say which rows the drafter's layer sees"
            hint = f"Add 'layer_types', with '{FULL}' or '{SLIDING}' for the drafter's layer, too."
            self._fault("max_window_layers", message, "0, or layer_types", repr(full), hint)
        elif on:
            return "max_window_layers", [index >= full for index in range(self.count)]
        return "", [False] * self.count

    def _named(self, kinds: Any) -> list[bool]:
        """Which of the drafter's layers `layer_types` calls sliding."""
        none = [False] * self.count
        if not isinstance(kinds, list):
            self._fault("layer_types", "the value is of the wrong kind", "a list", repr(kinds))
            return none
        alike = len(set(map(str, kinds))) == 1
        mine = kinds[:1] * self.count if alike else kinds[self.before : self.before + self.count]
        if len(mine) < self.count or (not alike and not self.said.after and len(kinds) > self.count):
            message = "does not say which rows the drafter's layers see"
            known = self.before != NOBODY
            expected = f"{self.before + self.count} items, or all the same" if known else "items that are the same"
            hint = f"Give '{FULL}' or '{SLIDING}' for each of the drafter's layers."
            self._fault("layer_types", message, expected, f"{len(kinds)} items", hint)
            return none
        for other in [kind for kind in mine if kind not in (FULL, SLIDING)][:1]:
            self._fault("layer_types", "layers of this kind are not modelled", f"'{FULL}' or '{SLIDING}'", repr(other))
        return [kind == SLIDING for kind in mine]

    def _check(self, by: str, on: bool | None, sizes: dict[str, int], size_key: str) -> None:
        """Where some layer is sliding: how wide, and no word against it."""
        blocks = [size for key in self.said.block if type(size := self.config.find(key)) is int]
        if on is False and (by == "layer_types" or size_key == SIZE):
            self._fault("use_sliding_window", TWO_VALUES, f"true, since {by} has windows", "False")
        if not sizes:
            self._fault(self.said.size[-1], "the key is missing", f"a window's rows, since {by} has windows", None)
        elif len(set(sizes.values())) > 1:
            (first, value), (key, other), *_ = sizes.items()
            self._fault(key, TWO_VALUES, f"{value!r} as in {first}", repr(other), "Engines differ in which one they take.")
        elif blocks and sizes[size_key] < blocks[0]:
            expected = f"{blocks[0]} or more, the rows of a block"
            self._fault(size_key, "the window is shorter than a block", expected, repr(sizes[size_key]))
        for key in ("rope_parameters", "rope_scaling"):  # programs have one rotation for all layers
            rotations = self.config.find(key)
            if isinstance(rotations, Mapping) and SLIDING in rotations and _said(rotations, SLIDING) != _said(rotations, FULL):
                expected = f"the same as of {FULL}, {rotations.get(FULL)!r}"
                self._fault(f"{key}.{SLIDING}", "layers with a window rotate otherwise", expected, repr(rotations[SLIDING]))

    def _holds_all(self, window: int) -> bool:
        """Does a window hold every position that there can be?"""
        limit = self.config.values.get("max_position_embeddings")
        return type(limit) is int and window >= limit

    def _agreed(self, keys: list[str]) -> tuple[str, bool | None]:
        """(the first of these keys that is there, what it says); they say the same."""
        found = {key: value for key in keys if (value := self._flag(key)) is not None}
        if len(set(found.values())) > 1:
            (first, value), (key, other), *_ = found.items()
            self._fault(key, TWO_VALUES, f"{value!r} as in {first}", repr(other), "Remove the one that is out of date.")
        return next(iter(found.items()), ("", None))

    def _positive(self, key: str) -> int | None:
        value = self.config.find(key)
        if value is None or (type(value) is int and 0 < value < 2**31):
            return value
        self._fault(key, "the value is of the wrong kind", "a positive integer", repr(value))
        return None

    def _flag(self, key: str) -> bool | None:
        value = self.config.find(key)
        if value is None or type(value) is bool:
            return value
        self._fault(key, "the value is of the wrong kind", "true or false", repr(value))
        return None

    def _fault(self, key: str, message: str, expected: str, got: str | None, hint: str | None = None) -> None:
        self.faults.append(Fault(message, self.config.raw.file, key, expected, got, hint))
