"""Settings of a config that no weight shows: where they may stand, and those that no program models.

A family says which settings mean something to its drafters. What other models of the same engines know, and no program here
does, stands in one place below: in a config of any family it is refused, since the drafter would draft on, only badly.
"""

from __future__ import annotations

from collections.abc import Collection, Container, Iterable, Mapping
from typing import Any, Literal

from pydantic import StrictBool, StrictInt, StrictStr

from ..errors import Fault, did_you_mean
from .config import ModelConfig

ConfigValue = StrictBool | StrictInt | float | StrictStr
Accepted = list[ConfigValue] | Literal["absent", "empty"]
"""The values of a setting that are fine (an empty list: all), or that it must not be there, or be an empty list."""

SCORES: dict[str, Accepted] = {
    # what is done with logits: Granite, Cohere, Gemma, Grok, Falcon-H1; vLLM's LogitsProcessor; transformers' MtpModel
    "logit_scale": [1],
    "logits_scaling": [1],
    "output_multiplier": [1],
    "output_multiplier_scale": [1],
    "lm_head_multiplier": [1],
    "logits_mup_width_multiplier": [1],
    "final_logit_softcapping": [0],  # 0 is none
    "unpadded_vocab_size": "absent",
}
"""Of every program."""

LAYERS: dict[str, Accepted] = {
    # another activation, or more weights, than `hidden_act` and the tensors' names tell
    "hidden_act": ["silu", "swish"],
    "hidden_activation": ["silu", "swish"],
    "swiglu_limit": "absent",
    "mlp_bias": [False],
    # the streams' factors: Granite, MiniCPM, Grok, z-lab's DFlash
    "embedding_multiplier": [1],
    "embedding_multiplier_scale": [1],
    "input_embedding_scale": [1],
    "scale_emb": [1],
    "residual_multiplier": [1],
    "scale_depth": "absent",
    "dim_model_base": "absent",
    # queries, keys, values and their scores: Granite, Gemma, Grok, MiMo-V2, Llama 4, Mistral Large 3, OLMo
    "attention_multiplier": "absent",
    "query_pre_attn_scalar": "absent",
    "attn_logit_softcapping": [0],
    "attention_value_scale": [1],
    "attn_temperature_tuning": [False],
    "llama_4_scaling": "absent",
    "clip_qkv": "absent",
    "attention_sink_bias": [False],
    "add_swa_attention_sink_bias": [False],
    "add_full_attention_sink_bias": [False],
    # norms: Llama 4's of queries and keys have no weights
    "use_qk_norm": [False],
    "qk_norm": [False],
    "use_gemma_norm": [False],
    # which rows a row sees: vLLM's Llama; Llama 4; DeepSeek-V3.2
    "is_causal": [True],
    "use_bidirectional_attention": [False],
    "attention_chunk_size": "absent",
    "index_topk": "absent",
    # rotations: SGLang's Llama; DeepSeek-V3; SmolLM3; Gemma 3, MiMo-V2
    "is_neox_style": [True],
    "rope_is_neox_style": [True],
    "rope_interleave": [False],
    "no_rope_layers": "absent",
    "rope_local_base_freq": "absent",
    "swa_rope_theta": "absent",
    # which half of a projection is the hidden's: transformers' MtpLayer
    "mtp_hidden_states_first": [False],
}
"""Of programs with attention."""


def foreign(named: Container[str], *, attention: bool) -> dict[str, Accepted]:
    """The settings above, without those that are named elsewhere."""
    left: dict[str, Accepted] = {}
    for settings in (SCORES, LAYERS) if attention else (SCORES,):
        left.update({key: accepted for key, accepted in settings.items() if key not in named})
    return left


def accepts(accepted: Accepted, value: Any) -> bool:
    """Is this value of a setting fine; of a list, every item has to be."""
    if isinstance(accepted, str):
        return accepted == "empty" and value == []
    items = value if isinstance(value, list) else [value]
    return not accepted or all(any(_same(item, fine) for fine in accepted) for item in items)


def places_of(config: ModelConfig, key: str, nested: Iterable[str]) -> dict[str, Any]:
    """Where a config says `key`, by itself and in the objects `nested`, and what it says there.

    Each may stand in the section and at the top of the file, too. `find_value` takes the section's then; of a setting that no
    tensor shows, engines differ in which one they take, so that both are to be looked at.
    """
    inside = () if "." in key else tuple(f"{name}.{key}" for name in nested)
    all_places = [at for place in (key, *inside) for at in config.places(place)]
    return {place: value for place in all_places if (value := config.raw.get(place)) is not None}


def differing(found: Mapping[str, Any]) -> tuple[str, str] | None:
    """Two of these places that do not say the same; true is no 1."""
    first = next(iter(found), None)
    other = next((place for place in found if not _same(found[place], found[first])), None) if first else None
    return (first, other) if first and other else None


def _same(one: Any, other: Any) -> bool:
    return one == other and isinstance(one, bool) == isinstance(other, bool)


def unknown(config: ModelConfig, name: str, known: Collection[str], family: str) -> list[Fault]:
    """A fault for each key of the object `name` that is none of `known`, and where it is no object."""
    faults = []
    for place in config.places(name):
        inside = config.raw.get(place)
        if inside is not None and not isinstance(inside, Mapping):
            faults.append(Fault("the value is of the wrong kind", config.raw.file, place, "an object", repr(inside)))
        for key, value in inside.items() if isinstance(inside, Mapping) else ():
            if key in known or value is None:
                continue
            near = did_you_mean(key, known)
            hint = f"{near} " if near.startswith("Did you mean") else ""
            hint += "If it changes nothing of what the drafter computes, remove it."
            message = f"family '{family}' knows no such setting there"
            faults.append(Fault(message, config.raw.file, f"{place}.{key}", "no such key", repr(value), hint))
    return faults
