"""Torch's heads that draft all tokens at once: DFlash's blocks and Medusa's heads. Competitors, as in `peers`."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F

from ..circuit.ir import Circuit
from ..ops import PagedKV
from ..ops.cache import Sight
from .peers import contiguous_rows, rotated


class TorchDflash(torch.nn.Module):
    """Blocks of `block` rows for sequences that all have `context` rows: several layers, SDPA over the rows that some row of a
    block sees, with a mask in layers with a window or causal blocks."""

    PROGRAM = "dflash"

    def __init__(self, circuit: Circuit, weights: Mapping[str, torch.Tensor], rows: int, context: int, block: int):
        super().__init__()
        (state,) = circuit.states
        self.eps = next(float(node.attr["eps"]) for node in circuit.nodes if node.op == "rms_norm")
        self.scale = next(float(node.attr["scale"]) for node in circuit.nodes if node.op == "attention")
        self.context, self.block, self.dim, self.kv_heads = context, block, state.dim, state.heads
        self.w = {name: tensor.to(torch.bfloat16) for name, tensor in weights.items() if not name.startswith("rope.")}
        self.cos, self.sin = weights["rope.cos"], weights["rope.sin"]
        for i in range(state.layers):
            self.w[f"{i} qkv"] = torch.cat([self.w[f"layers_{i}.attn.{part}_proj"] for part in "qkv"])
            if f"layers_{i}.attn.q_bias" in self.w:
                self.w[f"{i} qkv_bias"] = torch.cat([self.w[f"layers_{i}.attn.{part}_bias"] for part in "qkv"])
            self.w[f"{i} gate_up"] = torch.cat([self.w[f"layers_{i}.ffn.{part}_proj"] for part in ("gate", "up")])
        shape = (state.layers, rows // block, self.kv_heads, context + block, self.dim)
        self.k, self.v = (torch.zeros(shape, device=self.cos.device, dtype=torch.bfloat16) for _ in range(2))
        sights = [Sight.of(node.attr) for node in circuit.nodes if node.op == "attention"]
        self.seen_from = [max(0, context + 1 - sight.window) if sight.window else 0 for sight in sights]
        both = zip(sights, self.seen_from, strict=True)
        self.masks = [self._mask(sight, first) if sight.limited else None for sight, first in both]

    def _mask(self, sight: Sight, first: int) -> torch.Tensor:
        """bool[block, rows from `first` on]: what each row of a block sees."""
        row = torch.arange(first, self.context + self.block, device=self.cos.device)
        own = torch.arange(self.context, self.context + self.block, device=self.cos.device)[:, None]
        near = own - row < sight.window if sight.window else row >= 0
        return near & (row <= own) if sight.causal else near.expand(self.block, -1)

    def take_cache(self, cache: PagedKV) -> None:
        """Make a paged cache's rows the head's own. Rows of the call are those of sequence after sequence."""
        for layer in range(self.k.shape[0]):
            k, v = contiguous_rows(cache, self.context, layer)
            self.k[layer, :, :, : self.context], self.v[layer, :, :, : self.context] = k[:: self.block], v[:: self.block]

    def forward(self, token: torch.Tensor, position: torch.Tensor) -> tuple[torch.Tensor, ...]:
        w, n = self.w, token.shape[0]
        x = F.embedding(token, w["embed_tokens"])
        cos, sin = self.cos[position][:, None], self.sin[position][:, None]
        for i in range(self.k.shape[0]):
            qkv = F.linear(self._norm(x, f"layers_{i}.input_norm"), w[f"{i} qkv"], w.get(f"{i} qkv_bias")).view(n, -1, self.dim)
            q, k, v = qkv.split([qkv.shape[1] - 2 * self.kv_heads, self.kv_heads, self.kv_heads], dim=1)
            q = rotated(self._norm(q, f"layers_{i}.attn.q_norm"), cos, sin)
            k = rotated(self._norm(k, f"layers_{i}.attn.k_norm"), cos, sin)
            q, k, v = (part.unflatten(0, (-1, self.block)).transpose(1, 2) for part in (q, k, v))
            self.k[i, :, :, self.context :], self.v[i, :, :, self.context :] = k, v
            k, v = self.k[i, :, :, self.seen_from[i] :], self.v[i, :, :, self.seen_from[i] :]
            a = F.scaled_dot_product_attention(q, k, v, self.masks[i], scale=self.scale, enable_gqa=True)
            merged, o_bias = a.transpose(1, 2).reshape(n, -1), w.get(f"layers_{i}.attn.o_bias")
            x = x + F.linear(merged, w[f"layers_{i}.attn.o_proj"], o_bias)
            gate, up = F.linear(self._norm(x, f"layers_{i}.post_norm"), w[f"{i} gate_up"]).chunk(2, dim=-1)
            x = x + F.linear(F.silu(gate) * up, w[f"layers_{i}.ffn.down_proj"])
        logits = F.linear(self._norm(x, "norm_weight"), w["lm_head"]).float()
        best = logits.max(dim=-1)
        return best.indices, best.values - logits.logsumexp(dim=-1)

    def _norm(self, x: torch.Tensor, name: str) -> torch.Tensor:
        return F.rms_norm(x, x.shape[-1:], self.w[name], self.eps)


class TorchMedusa(torch.nn.Module):
    """All heads' residual blocks as one matrix, their vocabularies as one batched product."""

    PROGRAM = "medusa"

    def __init__(self, circuit: Circuit, weights: Mapping[str, torch.Tensor]):
        super().__init__()
        heads = len([weight for weight in circuit.weights if weight.name.endswith(".lm_head")])
        blocks = len(
            [weight for weight in circuit.weights if weight.name.startswith("head_0.blocks_") and "linear" in weight.name]
        )
        self.heads = heads

        def stacked(name: str) -> torch.Tensor:
            return torch.stack([weights[f"head_{head}.{name}"].to(torch.bfloat16) for head in range(heads)])

        self.first, self.bias = stacked("blocks_0.linear").flatten(0, 1), stacked("blocks_0.bias").flatten(0, 1)
        self.later = [(stacked(f"blocks_{i}.linear").mT, stacked(f"blocks_{i}.bias")[:, None]) for i in range(1, blocks)]
        self.lm_heads = stacked("lm_head").mT

    def forward(self, hidden: torch.Tensor) -> tuple[torch.Tensor, ...]:
        y = F.silu(F.linear(hidden, self.first, self.bias)).unflatten(1, (self.heads, -1))
        x = (hidden[:, None] + y).transpose(0, 1)
        for weight, bias in self.later:
            x = x + F.silu(torch.baddbmm(bias, x, weight))
        logits = torch.bmm(x, self.lm_heads).float().transpose(0, 1)
        best = logits.max(dim=-1)
        return best.indices, best.values - logits.logsumexp(dim=-1)
