"""Small circuits and inputs that several tests use."""

from __future__ import annotations

import torch

from circuitgraph.circuit.ir import Circuit
from circuitgraph.language import Bindings, load_program, parse_circuit, resolve
from circuitgraph.ops import TORCH_DTYPES, PagedKV

SMALL = {
    "hidden_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "rotary_dim": 8,
    "intermediate_size": 80,
    "vocab_size": 131,
    "draft_vocab_size": 40,
    "target_hidden_size": 40,
    "num_hidden_layers": 2,
    "shared_expert_intermediate_size": 24,
    "aux_layers": 3,
    "q_lora_rank": 20,
    "kv_lora_rank": 24,
    "qk_nope_head_dim": 12,
    "v_head_dim": 10,
    "latent_norm_eps": 1e-6,
    "num_experts": 8,
    "moe_intermediate_size": 16,
    "num_experts_per_tok": 3,
    "n_group": 2,
    "topk_group": 1,
    "routed_scaling_factor": 2.5,
    "block_size": 4,
    "mask_token": 130,
    "hidden_layers": "0 1 2",
    "medusa_num_heads": 3,
    "medusa_num_layers": 2,
    "rms_norm_eps": 1e-6,
    "attention_scale": 0.25,
    "windows": [0, 0],
    "causal": [False, False],
}

EVERYTHING = {
    "attention_gate": True,
    "concat": "hidden_first",
    "fc_bias": True,
    "mask_first": True,
    "norm": "zero_centred",
    "output_bias": True,
    "qk_norm": True,
    "qkv_bias": True,
    "recycle": "pre_norm",
    "rope_position": "hidden",
    "rope_style": "interleaved",
}
"""Every switch of mtp_dense at its other value."""


def post_norm(act: str, size: int) -> Circuit:
    """A residual of what was normed: the epilogue of the product reads the norm that the product reads, too."""
    return parse_circuit(f"""
program: post_norm
inputs: {{x: "{act}[n, {size}]"}}
weights: {{g: "{act}[{size}]", w: "bf16[{size}, {size}]"}}
body:
  - z = rms_norm(x, g, eps=1e-6, flavour=plain)
  - y = add(z, silu(linear(z, w)))
outputs: {{y: y}}
entries: {{run: {{outputs: [y]}}}}
""")


def small_mtp(switches: dict | None = None, **bindings) -> Circuit:
    """mtp_dense at a size that compiles in a second; odd vocabulary, partial RoPE, grouped heads."""
    return resolve(load_program("mtp_dense"), Bindings(SMALL, switches or {}, **bindings))


def random_weights(circuit: Circuit, generator: torch.Generator, positions: int = 64) -> dict[str, torch.Tensor]:
    """Weights scaled so that values stay around one, and real rotation tables."""
    weights = {}
    for weight in circuit.weights:
        fan_in = weight.type.shape[-1] if weight.type.rank > 1 else 4
        values = torch.randn(weight.type.shape, generator=generator) * float(fan_in) ** -0.5
        weights[weight.name] = values.to(TORCH_DTYPES[weight.type.dtype])
    for table in circuit.tables:
        angle = torch.rand(positions, table.dim // 2, generator=generator) * 6.28
        weights[f"{table.name}.cos"], weights[f"{table.name}.sin"] = angle.cos(), angle.sin()
    return weights


def random_cache(circuit: Circuit, lengths: list[int], generator: torch.Generator, block_size: int = 4) -> PagedKV:
    """One sequence a row holding `lengths[i]` rows, the newest of which is about to be written; shuffled blocks."""
    state = circuit.states[0]
    n = len(lengths)
    width = max(1, -(-max(lengths) // block_size))
    blocks = n * width + 2
    table = torch.randperm(blocks, generator=generator)[: n * width].reshape(n, width).to(torch.int32)
    length = torch.tensor(lengths, dtype=torch.int32)
    last = (length - 1).clamp(min=0)
    slot = table[torch.arange(n), (last // block_size).long()] * block_size + last % block_size
    slot = torch.where(length > 0, slot, torch.full_like(slot, -1)).to(torch.int32)
    shape = (state.layers, blocks, state.heads, block_size)
    dtype = TORCH_DTYPES[state.dtype]
    return PagedKV(
        k=torch.randn((*shape, state.dims[0]), generator=generator).to(dtype),
        v=torch.randn((*shape, state.dims[1]), generator=generator).to(dtype),
        slot=slot,
        seq=torch.arange(n, dtype=torch.int32),
        table=table,
        start=torch.zeros(n, dtype=torch.int32),
        length=length,
    )


def random_inputs(circuit: Circuit, rows: int, generator: torch.Generator, positions: int = 64) -> dict[str, torch.Tensor]:
    """token, hidden, position and a grammar's mask for `rows` rows; the first is at position 1, where the mask switch acts."""
    vocabulary = next(int(weight.type.shape[0]) for weight in circuit.weights if weight.name == "embed_tokens")
    width = next(int(item.type.shape[1]) for item in circuit.inputs if item.name == "hidden")  # type: ignore[arg-type]
    position = torch.randint(1, positions, (rows,), generator=generator, dtype=torch.int32)
    position[0] = 1
    words = torch.randint(-(2**31), 2**31, (rows, -(-vocabulary // 32)), generator=generator)
    words[:, 0] |= 1 << 5  # something is allowed
    return {
        "token": torch.randint(0, vocabulary, (rows,), generator=generator, dtype=torch.int32),
        "hidden": torch.randn(rows, width, generator=generator).to(TORCH_DTYPES[circuit.act]),
        "position": position,
        "allowed": words.to(torch.int32),
    }
