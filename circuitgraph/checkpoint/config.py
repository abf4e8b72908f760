"""A model's config.json, read into the flat values that programs ask for.

Configs of one architecture differ in where they put things: the text model's part may be nested, RoPE may be given
as `rope_parameters` or as `rope_theta` and `rope_scaling`, a null means absent. What is read here is the meaning;
keys that nobody asks for are left alone.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..errors import CheckpointError, Fault, did_you_mean
from ..runtime.rope import RopeSpec, yarn_mscale
from .files import unique_keys
from .pickled import SUFFIXES
from .rope_config import read_rope

MOST_LAYERS = 1000
"""Of a drafter or of its target: more are a damaged number."""
TEXT = "text_config"
"""The section of the text model in configs of models that also see or hear."""

ANY_HEAD = 1024
"""Stands in for the columns of a head that a config does not tell: no share of it gives another fault."""


@dataclass(frozen=True)
class RawConfig:
    """The JSON as it is, and the file to name in messages."""

    data: Mapping[str, Any]
    file: str

    def get(self, key: str) -> Any:
        """The value at a dotted path of keys ("" is the whole), None where there is none or it is null."""
        value: Any = self.data
        for part in key.split(".") if key else ():
            if not isinstance(value, Mapping):
                return None
            value = value.get(part)
        return value


@dataclass(frozen=True)
class ModelConfig:
    """A config seen from one of its sections.

    values: every plain value of the section, and of the top level where the section lacks it, under its own key, and the
    canonical ones (see `read_config`) over them. rope is None where nobody asked for attention.
    """

    raw: RawConfig
    section: str
    values: Mapping[str, Any]
    rope: RopeSpec | None

    def find(self, key: str) -> Any:
        """A key of the section, else of the whole file; None where absent or null."""
        return find_value(self.raw, self.section, key)

    def places(self, key: str) -> tuple[str, ...]:
        """Where a key may stand: in the section, and at the top of the file."""
        return (f"{self.section}.{key}", key) if self.section else (key,)


def read_raw(source: str | Path | Mapping[str, Any] | RawConfig) -> RawConfig:
    """The config of a folder, of a JSON file, or a mapping that stands for one.

    Raises:
        CheckpointError: the file is absent or does not hold a JSON object.
    """
    if isinstance(source, RawConfig):
        return source
    if isinstance(source, Mapping):
        return RawConfig(source, "config")
    path = Path(source)
    path = path / "config.json" if path.is_dir() else path
    if path.suffix in (".safetensors", ".gguf", *SUFFIXES) and path.is_file():
        hint = "Give the folder that has it and the config.json."
        raise CheckpointError(Fault("is a file of tensors, not a model's config", where=str(path), hint=hint))
    try:
        text = path.read_text(encoding="utf-8-sig")  # some editors put a mark before the text
        data = json.loads(text, object_pairs_hook=unique_keys)
    except FileNotFoundError:
        hint = "Give a model folder with a config.json, or the path of a config.json."
        raise CheckpointError(Fault("the file does not exist", where=str(path), hint=hint)) from None
    except OSError as problem:
        raise CheckpointError(Fault(f"cannot read the file: {problem.strerror}", where=str(path))) from None
    except UnicodeDecodeError as problem:
        message = f"not a text in UTF-8: {problem.reason} at byte {problem.start}"
        raise CheckpointError(Fault(message, where=str(path), hint="Save it as UTF-8, or download it again.")) from None
    except json.JSONDecodeError as problem:
        hint = "Correct it, or download it again."
        raise CheckpointError(Fault(f"not valid JSON: {problem.msg}", where=f"{path}:{problem.lineno}", hint=hint)) from None
    except (RecursionError, ValueError) as problem:  # nested without end; a number of thousands of digits; a key twice
        raise CheckpointError(Fault(f"no config: {problem}", where=str(path), hint="Download it again.")) from None
    if not isinstance(data, dict):
        hint = "Is it the config.json of a model?"
        raise CheckpointError(Fault("a config is a JSON object", where=str(path), got=type(data).__name__, hint=hint))
    return RawConfig(data, str(path))


def read_config(
    source: str | Path | Mapping[str, Any] | RawConfig,
    sections: Sequence[str] = ("",),
    *,
    defaults: Mapping[str, Any] | None = None,
    required: Collection[str] = (),
    attention: bool = True,
) -> ModelConfig:
    """Read the first of `sections` (dotted keys, "" is the top level) that the config has.

    The canonical values: hidden_size, vocab_size, tie_word_embeddings; with `attention` num_attention_heads,
    num_key_value_heads, head_dim, rotary_dim, attention_scale; where given: intermediate_size, rms_norm_eps,
    max_position_embeddings.

    Args:
        defaults: what a key means that the config lacks, where that is not what most models mean. required: keys that
            have no default.
        attention: without it nothing about heads and RoPE is read, and so nothing about them refused.

    Raises:
        CheckpointError: every value that is absent, of the wrong kind, or at odds with another.
    """
    raw = read_raw(source)
    section = next((name for name in sections if isinstance(raw.get(name), Mapping)), None)
    if section is None:
        expected = " or ".join(f"'{name}'" for name in sections)
        raise CheckpointError(Fault("the config has no section for the drafter", where=raw.file, expected=expected))
    reader = ConfigReader(raw, section, defaults or {}, required)
    values = {**_plain(raw.data), **_plain(raw.get(section))}
    heads = reader.count("num_attention_heads") if attention else None
    values["hidden_size"], values["vocab_size"] = reader.count("hidden_size"), reader.count("vocab_size")
    rope = None
    if heads is not None:
        values["num_attention_heads"] = heads
        values["num_key_value_heads"] = reader.count("num_key_value_heads", heads)
        head_dim = reader.head_dim(values["hidden_size"], heads)
        latent = reader.get("qk_rope_head_dim") is not None  # multi-head latent attention: a part of each head is rotated
        rope = read_rope(reader, reader.count("qk_rope_head_dim", stand_in=ANY_HEAD) if latent else head_dim)
        values["head_dim"], values["rotary_dim"] = head_dim, rope.dim
        values["attention_scale"] = head_dim**-0.5
        if latent:
            # YaRN's amplitude goes into the scale, squared, instead of into the rotation, which covers only a part of the head.
            scaling = dict(rope.scaling)
            amplitude = yarn_mscale(scaling.get("factor", 1.0), scaling.get("mscale_all_dim", 0.0))
            values["attention_scale"] = (reader.count("qk_nope_head_dim") + rope.dim) ** -0.5 * amplitude**2
    for key in ("intermediate_size", "max_position_embeddings"):
        if reader.get(key) is not None:
            values[key] = reader.count(key)
    if reader.get("rms_norm_eps") is not None:
        values["rms_norm_eps"] = reader.number("rms_norm_eps", reader.get("rms_norm_eps"))
    values["tie_word_embeddings"] = reader.ties()
    sound = not reader.refused("num_attention_heads") and not reader.refused("num_key_value_heads")
    if heads is not None and sound and heads % values["num_key_value_heads"]:
        expected = f"a divisor of num_attention_heads ({heads})"
        reader.refuse("num_key_value_heads", "query heads do not split evenly", expected, values["num_key_value_heads"])
    if reader.faults:
        raise CheckpointError(reader.faults)
    return ModelConfig(raw, section, values, rope)


def _plain(section: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in section.items() if isinstance(value, bool | int | float | str)}


def is_count(layers: Any) -> bool:
    """Whether a config's value is a number of layers."""
    return type(layers) is int and 0 < layers <= MOST_LAYERS


def find_value(raw: RawConfig, section: str, key: str) -> Any:
    """A key of a section, else of the whole file: the one rule for keys that may stand in both. None where absent or null."""
    value = raw.get(f"{section}.{key}") if section else None
    return raw.get(key) if value is None else value


def ties(raw: RawConfig) -> bool:
    """Whether a model's lm_head is its embedding.

    Raises:
        CheckpointError: the config does not say it by true or false, or says both.
    """
    reader = ConfigReader(raw, TEXT if isinstance(raw.get(TEXT), Mapping) else "")
    tied = reader.ties()
    if reader.faults:
        raise CheckpointError(reader.faults)
    return tied


def scale_block(raw: RawConfig) -> tuple[int, int] | None:
    """Rows and columns that share a scale in block-quantised FP8, None where the config does not say.

    Which tensors are quantised, and how, the tensors say themselves.

    Raises:
        CheckpointError: not two positive integers.
    """
    for section in _QUANTISATION:
        found = {f"{section}.weight_block_size": raw.get(f"{section}.weight_block_size")}
        groups = raw.get(f"{section}.config_groups")
        for name in groups if isinstance(groups, Mapping) else ():
            key = f"{section}.config_groups.{name}.weights.block_structure"
            found[key] = raw.get(key)
        for key, value in found.items():
            if value is None:
                continue
            if isinstance(value, list) and len(value) == 2 and all(type(size) is int and size > 0 for size in value):
                return value[0], value[1]
            expected = "two positive integers, rows and columns"
            message = "the value is of the wrong kind"
            raise CheckpointError(Fault(message, where=raw.file, subject=key, expected=expected, got=repr(value)))
    return None


_QUANTISATION = ("quantization_config", f"{TEXT}.quantization_config", "compression_config")


def check_quantisation(raw: RawConfig) -> None:
    """Raises CheckpointError where activations are transformed before a product (compressed-tensors' Hadamard rotations): the
    stored weights are then of another basis, and nothing in them shows it."""
    for section in _QUANTISATION:
        key = f"{section}.transform_config"
        transforms = raw.get(key)
        if transforms and transforms != {"config_groups": {}}:
            hint = "Use an export of the model without transforms."
            message = "activations are transformed while the model runs, which no program does"
            raise CheckpointError(Fault(message, where=raw.file, subject=key, expected="none", got=repr(transforms), hint=hint))


@dataclass
class ConfigReader:
    """Looks values up and collects what is wrong; after a fault a harmless value stands in."""

    raw: RawConfig
    section: str
    defaults: Mapping[str, Any] = field(default_factory=dict)
    required: Collection[str] = ()
    faults: list[Fault] = field(default_factory=list)

    def refuse(self, key: str, message: str, expected: str | None = None, got: Any = None, hint: str | None = None) -> None:
        shown = None if got is None else repr(got)
        self.faults.append(Fault(message, where=self.raw.file, subject=self._path(key), expected=expected, got=shown, hint=hint))

    def refused(self, key: str) -> bool:
        return any(fault.subject == self._path(key) for fault in self.faults)

    def _path(self, key: str) -> str:
        return f"{self.section}.{key}" if self.section else key

    def get(self, key: str) -> Any:
        return find_value(self.raw, self.section, key)

    def default(self, key: str, usual: Any) -> Any:
        """What a key means that the config lacks: this model's own default, else the usual one; None for "it must be there"."""
        return None if key in self.required else self.defaults.get(key, usual)

    def count(self, key: str, default: int | None = None, *, stand_in: int = 1) -> int:
        value = self.get(key)
        value = self.default(key, default) if value is None else value
        if value is None:
            section = self.raw.get(self.section)
            near = _near(key, [name for name in section if isinstance(name, str) and name != key])
            self.refuse(key, "the key is null" if key in section else "the key is missing", "a positive integer", hint=near)
        elif isinstance(value, bool) or not isinstance(value, int) or not 0 < value < 2**31:
            self.refuse(key, "the value is of the wrong kind", "a positive integer", value)
        else:
            return value
        return stand_in

    def number(self, key: str, value: Any) -> float:
        if (
            isinstance(value, bool) or not isinstance(value, int | float) or not 1e-30 < value < 1e30
        ):  # what fp32 can compute with; NaN fails, too
            self.refuse(key, "the value is of the wrong kind", "a positive, finite number", value)
            return 1.0
        return float(value)

    def flag(self, key: str, default: bool) -> bool:
        value = self.get(key)
        if value is not None and not isinstance(value, bool):
            self.refuse(key, "the value is of the wrong kind", "true or false", value)
        return value if isinstance(value, bool) else default

    def ties(self) -> bool:
        """tie_word_embeddings, which configs with a text model inside may say twice: then engines differ in whom they believe."""
        tied, top = self.flag("tie_word_embeddings", False), self.raw.get("tie_word_embeddings")
        if self.section == TEXT and isinstance(top, bool) and top != tied:
            hint = "Is lm_head the embedding? Correct the one that is wrong."
            expected = f"{str(top).lower()} as at the top of the file"
            self.refuse("tie_word_embeddings", "the config gives two values", expected, tied, hint)
        return tied

    def head_dim(self, hidden: int, heads: int) -> int:
        """After a fault a stand-in that raises no other."""
        if self.get("head_dim") is not None or "head_dim" in (*self.defaults, *self.required):
            return self.count("head_dim", stand_in=ANY_HEAD)
        if self.faults:
            return ANY_HEAD
        if hidden % heads:
            self.refuse("hidden_size", f"does not split into {heads} heads", got=hidden, hint="Does the config lack 'head_dim'?")
        return max(1, hidden // heads)


def _near(key: str, known: Sequence[str]) -> str | None:
    hint = did_you_mean(key, known)
    return hint if hint.startswith("Did you mean") else None
