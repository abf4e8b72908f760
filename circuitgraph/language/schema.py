"""What a program or block file may contain. Unknown keys are refused. docs/language.md explains every key."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, StrictBool, StrictInt, StrictStr

SwitchValue = StrictBool | StrictStr


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class InputDecl(_Strict):
    """An input tensor; `source` names the switch (or the text) that says what a server captures for it."""

    type: str
    source: str = ""


class StateDecl(_Strict):
    kind: Literal["paged_kv"]
    layers: StrictInt | StrictStr = 1
    heads: StrictInt | StrictStr
    dim: StrictInt | StrictStr
    value_dim: StrictInt | StrictStr | None = None
    dtype: str = "kv"


class TableDecl(_Strict):
    kind: Literal["rope"]
    dim: StrictInt | StrictStr


class WeightDecl(_Strict):
    """One tensor. `type` may depend on one switch: {switch: {value: type}}. `when` leaves it out otherwise.

    storage: how programs hold it, `circuit.ir.Storage` as text: said where a circuit of quantised weights is printed.
    """

    type: str | dict[str, dict[SwitchValue, str]]
    storage: str | None = None
    when: dict[str, SwitchValue] = Field(default_factory=dict)


class BlockWeights(_Strict):
    """The weights of a block, under this name; with `repeat` so many times, as name[0], name[1], ..."""

    block: str
    repeat: StrictInt | StrictStr | None = None
    when: dict[str, SwitchValue] = Field(default_factory=dict)


class WhenDecl(_Strict):
    """Body lines that only hold for some switch values."""

    when: dict[str, SwitchValue]
    do: list[str | WhenDecl | RepeatDecl] = Field(min_length=1)
    otherwise: list[str | WhenDecl | RepeatDecl] = Field(default_factory=list)


class RepeatDecl(_Strict):
    """Body lines that hold for each value of an index, 0 upwards: {index: how many}.

    `collect` joins what a name stood for in each of them: {name after the loop: op(name inside)}.
    """

    repeat: dict[str, StrictInt | StrictStr] = Field(min_length=1, max_length=1)
    do: list[str | WhenDecl | RepeatDecl] = Field(min_length=1)
    collect: dict[str, str] = Field(default_factory=dict)


WhenDecl.model_rebuild()


class EntryDecl(_Strict):
    """`given` names interior values that the caller hands in: nothing of what makes them is computed."""

    rows: Literal["sequences", "context", "block"] = "sequences"
    given: list[str] = Field(default_factory=list)
    outputs: list[str] = Field(default_factory=list)
    effects: list[str] = Field(default_factory=list)
    on_request: StrictBool = False


class BlockFile(_Strict):
    block: str
    doc: str
    args: list[str]
    numbers: dict[str, StrictInt] = Field(default_factory=dict)
    slots: dict[str, str] = Field(default_factory=dict)
    weights: dict[str, str | WeightDecl | BlockWeights] = Field(default_factory=dict)
    body: list[str | WhenDecl | RepeatDecl] = Field(min_length=1)
    returns: list[str] = Field(min_length=1)


class ProgramFile(_Strict):
    program: str
    doc: str = ""
    blocks: dict[str, str] = Field(default_factory=dict)
    dims: dict[str, StrictInt | StrictStr] = Field(default_factory=dict)
    params: dict[str, StrictInt | float | StrictStr] = Field(default_factory=dict)
    switches: dict[str, list[SwitchValue]] = Field(default_factory=dict)
    dtypes: dict[Literal["act", "wt", "kv"], str] = Field(default_factory=dict)
    facts: dict[str, SwitchValue | StrictInt] = Field(default_factory=dict)
    constants: dict[str, StrictInt | StrictStr] = Field(default_factory=dict)
    inputs: dict[str, str | InputDecl]
    state: dict[str, StateDecl] = Field(default_factory=dict)
    tables: dict[str, TableDecl] = Field(default_factory=dict)
    weights: dict[str, str | WeightDecl | BlockWeights] = Field(default_factory=dict)
    body: list[str | WhenDecl | RepeatDecl] = Field(min_length=1)
    outputs: dict[str, str]
    effects: dict[str, str] = Field(default_factory=dict)
    entries: dict[str, EntryDecl]


class DerivedFile(_Strict):
    """A program that is another one with some things added or replaced, key by key; `null` takes a key away."""

    program: str
    extends: str
    doc: str = ""
    blocks: dict[str, str] = Field(default_factory=dict)
    dims: dict[str, StrictInt | StrictStr | None] = Field(default_factory=dict)
    params: dict[str, StrictInt | float | StrictStr | None] = Field(default_factory=dict)
    switches: dict[str, list[SwitchValue] | None] = Field(default_factory=dict)
    facts: dict[str, SwitchValue] = Field(default_factory=dict)
    inputs: dict[str, str | InputDecl | None] = Field(default_factory=dict)
    state: dict[str, StateDecl | None] = Field(default_factory=dict)
    tables: dict[str, TableDecl | None] = Field(default_factory=dict)
    weights: dict[str, str | WeightDecl | BlockWeights | None] = Field(default_factory=dict)
    outputs: dict[str, str | None] = Field(default_factory=dict)
    entries: dict[str, EntryDecl | None] = Field(default_factory=dict)

    def over(self, base: ProgramFile) -> ProgramFile:
        """The whole program. What became a fact is no switch any more."""
        sections = ("blocks", "dims", "params", "switches", "facts", "inputs", "state", "tables", "weights", "outputs", "entries")
        merged = {}
        for section in sections:
            both = {**getattr(base, section), **getattr(self, section)}
            merged[section] = {key: value for key, value in both.items() if value is not None}
        merged["switches"] = {key: value for key, value in merged["switches"].items() if key not in self.facts}
        return base.model_copy(update={"program": self.program, "doc": self.doc, **merged})
