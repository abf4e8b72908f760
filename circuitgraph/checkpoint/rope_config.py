"""RoPE parameters from a config, in any of the layouts that configs have.

They stand in `rope_parameters` (newer) or `rope_scaling`, the base in either or beside them; models that mix attention
kinds give a set for each kind. What one key says and another denies is refused: a drafter with the wrong rotation
still drafts, only badly.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ..errors import did_you_mean
from ..runtime.rope import KINDS, OPTIONAL, PER_COLUMN, RopeSpec

if TYPE_CHECKING:
    from .config import ConfigReader

_ALIASES = {"mrope": "default", "su": "longrope"}
"""`mrope` gives text tokens one position on all its axes, which is the ordinary rotation. `su` is longrope's first name."""

_FOREIGN: dict[str, tuple[tuple[str, ...], Any]] = {
    "alpha": (("dynamic", "linear"), None),
    "short_mscale": (("longrope",), None),
    "long_mscale": (("longrope",), None),
    "attn_factor": (("yarn",), 1),
    "extrapolation_factor": (("yarn",), 1),
    "apply_yarn_scaling": (("yarn",), True),
    "llama_4_scaling_beta": (tuple(KINDS), 0),
}
"""Keys of other people's variants of a kind (Hunyuan's dynamic, Phi-3-small's longrope, vLLM's and Mistral's YaRN), which compute
something else: the kinds, and the value that changes nothing, if there is one."""

_ORIGINAL = "original_max_position_embeddings"


def read_rope(reader: ConfigReader, head_dim: int) -> RopeSpec:
    """The rotation of a head of `head_dim` columns. Faults go to the reader; a plain rotation stands in then."""
    parameters, key = _parameters(reader)
    kind = _kind(reader, parameters, key)
    limit = reader.get("max_position_embeddings")
    max_position = limit if type(limit) is int and 0 < limit < 2**31 else None
    theta = reader.number("rope_theta", _agreed(reader, "rope_theta", parameters, reader.default("rope_theta", 10000.0)))
    if theta <= 1.0 and not reader.faults:
        reader.refuse("rope_theta", "the base is too small: no column would turn slower than another", "more than 1", theta)
    factor = _agreed(reader, "partial_rotary_factor", parameters, reader.default("partial_rotary_factor", 1.0))
    dim = int(min(head_dim * reader.number("partial_rotary_factor", factor), 2.0 * head_dim))
    if not 2 <= dim <= head_dim or dim % 2:
        expected = f"an even share of head_dim ({head_dim})"
        reader.refuse("partial_rotary_factor", f"rotates {dim} columns of a head", expected, factor)
    if kind is None:
        return RopeSpec("default", theta, dim, max_position)
    if kind == "dynamic" and max_position is None:
        reader.refuse("max_position_embeddings", "RoPE kind 'dynamic' needs this key", "a positive integer")
    return RopeSpec(kind, theta, dim, max_position, _scaling(reader, kind, parameters, key, max_position, dim))


def _parameters(reader: ConfigReader) -> tuple[Mapping[str, Any], str]:
    """The one set of parameters that counts, and its key."""
    found: list[tuple[Mapping[str, Any], str]] = []
    for key in ("rope_parameters", "rope_scaling"):
        value = reader.get(key)
        if value is None:
            continue
        if not isinstance(value, Mapping):
            reader.refuse(key, "the value is of the wrong kind", "an object", value)
            continue
        kinds = [name for name, part in value.items() if isinstance(part, Mapping)]
        if "full_attention" in kinds:  # window_config refuses layers with a window that rotate otherwise
            value, key = value["full_attention"], f"{key}.full_attention"
        elif kinds:
            hint = "Which of these sets is the drafter's? All its layers rotate alike: leave that one alone."
            reader.refuse(
                key, "has a set of parameters for each attention kind, but not this one's", "full_attention", kinds, hint
            )
            continue
        found.append((value, key))
    if len(found) == 2:
        (one, _), (other, second) = found
        first_kind, second_kind = (_ALIASES.get(str(name), name) for name in (_named(one), _named(other)))
        if one and other and first_kind != second_kind:
            expected, hint = f"{first_kind} as in {found[0][1]}", "Remove the one that is out of date."
            reader.refuse(f"{second}.rope_type", "the config gives two RoPE kinds", expected, second_kind, hint)
        for name in sorted({*one} & {*other} - {"rope_type", "type"}):
            if None not in (one[name], other[name]) and one[name] != other[name]:
                expected, hint = f"{one[name]!r} as in {found[0][1]}", "Remove the one that is out of date."
                reader.refuse(f"{second}.{name}", "the config gives two values", expected, other[name], hint)
        added = {name: value for name, value in other.items() if one.get(name) is None and name not in ("rope_type", "type")}
        found[0] = {**one, **added} if one else one, found[0][1]
    return next((item for item in found if item[0]), ({}, "rope_parameters"))


def _named(parameters: Mapping[str, Any]) -> Any:
    """As it is written, whether or not it is a kind."""
    return parameters.get("rope_type") or parameters.get("type") or "default"


def _kind(reader: ConfigReader, parameters: Mapping[str, Any], key: str) -> str | None:
    """None after a fault."""
    named: list[str] = []
    for place in ("rope_type", "type"):
        name = parameters.get(place)
        if isinstance(name, str):
            named.append(name)
        elif name is not None:
            reader.refuse(f"{key}.{place}", "the value is of the wrong kind", "a text", name)
            return None
    kinds = [_ALIASES.get(name, name) for name in named]
    if len(kinds) == 2 and kinds[0] != kinds[1]:
        reader.refuse(f"{key}.type", "the config gives two RoPE kinds", f"{named[0]} as in its rope_type", named[1])
        return None
    if not kinds and parameters.get("factor") is not None:
        hint = "A factor without a kind does not say what it scales."
        reader.refuse(f"{key}.rope_type", "the key is missing", ", ".join(KINDS), hint=hint)
        return None
    kind = kinds[0] if kinds else "default"
    if kind not in KINDS:
        reader.refuse(f"{key}.rope_type", f"unknown RoPE kind '{kind}'", ", ".join(KINDS), hint=did_you_mean(kind, KINDS))
        return None
    return kind


def _agreed(reader: ConfigReader, key: str, parameters: Mapping[str, Any], default: Any) -> Any:
    """A value that may stand in the RoPE parameters, in the section or at the top: the same wherever it stands."""
    given = [value for value in (parameters.get(key), reader.get(key)) if value is not None]
    if len(given) == 2 and given[0] != given[1]:
        reader.refuse(key, "the config gives two values", f"{given[0]} as in its RoPE parameters", given[1])
    return given[0] if given else default


def _scaling(
    reader: ConfigReader, kind: str, parameters: Mapping[str, Any], key: str, max_position: int | None, dim: int
) -> tuple[tuple[str, Any], ...]:
    """What the kind needs, each value checked, so that computing a table cannot fail."""
    scaling: dict[str, Any] = {}
    for name, (kinds, neutral) in _FOREIGN.items():
        if kind in kinds and parameters.get(name) not in (None, neutral):
            hint = "It is another model's variant, which computes something else. "
            hint += "Remove it if the drafter's own code does not read it."
            expected = "no such key" if neutral is None else f"no such key, or {neutral!r}"
            reader.refuse(f"{key}.{name}", f"RoPE kind '{kind}' is not known with this key", expected, parameters[name], hint)
    if _ORIGINAL in KINDS[kind]:
        # Left out, the model was not extended, so its limit is the original; llama3 configs always say.
        value = _agreed(reader, _ORIGINAL, parameters, None if kind == "llama3" else max_position)
        if value is None:
            reader.refuse(f"{key}.{_ORIGINAL}", f"RoPE kind '{kind}' needs this key", "a positive number")
        else:
            scaling[_ORIGINAL] = reader.number(f"{key}.{_ORIGINAL}", value)
            if scaling[_ORIGINAL] < 2 and not reader.faults:
                reader.refuse(f"{key}.{_ORIGINAL}", "the value is too small", "2 or more", value)
    for name in KINDS[kind]:
        value = parameters.get(name)
        if value is None and name == "factor" and max_position and scaling.get(_ORIGINAL):
            value = max_position / scaling[_ORIGINAL]  # how Phi-3's and DeepSeek's own code has it
        if name == _ORIGINAL:
            continue
        if value is None:
            expected = f"{dim // 2} numbers" if name in PER_COLUMN else "a positive number"
            reader.refuse(f"{key}.{name}", f"RoPE kind '{kind}' needs this key", expected)
        elif name in PER_COLUMN:
            scaling[name] = _columns(reader, f"{key}.{name}", value, dim // 2)
        else:
            scaling[name] = reader.number(f"{key}.{name}", value)
    for name in OPTIONAL.get(kind, ()):
        value = parameters.get(name)
        if value is not None:
            scaling[name] = _optional(reader, f"{key}.{name}", name, value)
    if kind == "llama3" and not reader.faults and scaling["low_freq_factor"] >= scaling["high_freq_factor"]:
        expected = f"less than high_freq_factor ({scaling['high_freq_factor']})"
        reader.refuse(f"{key}.low_freq_factor", "leaves no band to blend in", expected, scaling["low_freq_factor"])
    return tuple((name, scaling[name]) for name in (*KINDS[kind], *OPTIONAL.get(kind, ())) if name in scaling)


def _columns(reader: ConfigReader, key: str, value: Any, count: int) -> tuple[float, ...]:
    if not isinstance(value, list) or len(value) != count:
        got = f"{len(value)} numbers" if isinstance(value, list) else value
        reader.refuse(key, "needs a factor for each pair of rotated columns", f"a list of {count} numbers", got)
        return (1.0,) * count
    return tuple(reader.number(f"{key}.{index}", item) for index, item in enumerate(value))


def _optional(reader: ConfigReader, key: str, name: str, value: Any) -> float | bool:
    if name == "truncate":
        if not isinstance(value, bool):
            reader.refuse(key, "the value is of the wrong kind", "true or false", value)
        return bool(value)
    if name in ("mscale", "mscale_all_dim") and type(value) in (int, float) and value == 0:
        return 0.0  # "not used", as in configs without the key
    return reader.number(key, value)
