"""Small drafters of the shipped shapes, compiled for the CPU: what both benches are tested on."""

from __future__ import annotations

from dataclasses import replace

from circuitgraph.measure import shapes

SMALL = {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "intermediate_size": 96}
DFLASH_SMALL = {
    **SMALL,
    "num_hidden_layers": 2,
    "vocab_size": 96,
    "dflash_config": {"mask_token_id": 95, "target_layer_ids": [1, 3]},
}


def artifact_of(name: str, folder, **changes):
    return shapes.compile_shape(replace(shapes.SHAPES[name], **changes), folder / f"{name}.cg", "cpu")
