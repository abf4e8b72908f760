"""What a drafter head looks like when an engineer writes it in torch: bf16, fused QKV and gate/up, SDPA, a dense cache.

This is the competitor, not the reference: it is written to be fast, and its results are not compared bit for bit.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F

from ..circuit.ir import Circuit, State
from ..ops import PagedKV
from ..ops.cache import Sight

PEER_PROGRAM = "mtp_dense"
OUTPUTS = ("draft", "logprob", "next_hidden")
"""Of a head; those that draft all tokens at once have no hidden."""


class _TorchHead(torch.nn.Module):
    """What every head has: its weights by name in `w`, a dense cache of `rows` sequences with `context` rows each."""

    def __init__(self, circuit: Circuit, weights: Mapping[str, torch.Tensor], rows: int, context: int):
        super().__init__()
        self.facts = dict(circuit.facts)
        self.eps = next(float(node.attr["eps"]) for node in circuit.nodes if node.op == "rms_norm")
        attention = ("attention", "latent_attention")
        self.scale = next(float(node.attr["scale"]) for node in circuit.nodes if node.op in attention)
        self.rows, self.context = rows, context
        window = next(Sight.of(node.attr).window for node in circuit.nodes if node.op in attention)
        self.seen_from = max(0, context + 1 - window) if window else 0
        self.w: dict[str, torch.Tensor | None] = {}
        self.cos, self.sin = weights["rope.cos"], weights["rope.sin"]
        self._make_cache(circuit.states[0])

    def _make_cache(self, state: State) -> None:
        self.kv_heads, self.dim = state.heads, state.dim
        shape = (self.rows, self.kv_heads, self.context + 1, self.dim)
        self.k, self.v = (torch.randn(shape, device=self.cos.device).to(torch.bfloat16) for _ in range(2))

    def take_cache(self, cache: PagedKV) -> None:
        """Make a paged cache's rows the head's own, so that its drafts can be compared. Row i is of sequence i."""
        self.k[:, :, : self.context], self.v[:, :, : self.context] = contiguous_rows(cache, self.context)

    def _norm(self, x: torch.Tensor, name: str) -> torch.Tensor:
        return F.rms_norm(x, x.shape[-1:], self.w[name], self.eps)

    def _attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
        """Rotates, writes the new rows, attends: [n, heads, dim]."""
        cos, sin = self.cos[position][:, None], self.sin[position][:, None]
        q, k = self._rotate(q, cos, sin), self._rotate(k, cos, sin)
        self.k[:, :, self.context], self.v[:, :, self.context] = k, v
        k, v = self.k[:, :, self.seen_from :], self.v[:, :, self.seen_from :]
        return F.scaled_dot_product_attention(q[:, :, None], k, v, scale=self.scale, enable_gqa=True)[:, :, 0]

    def _rotate(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        return rotated(x, cos, sin, str(self.facts["rope_style"]))


def half(weights: Mapping[str, torch.Tensor], name: str) -> torch.Tensor | None:
    """A weight in bf16, None where the head has none of that name."""
    return weights[name].to(torch.bfloat16) if name in weights else None


def rotated(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, style: str = "half") -> torch.Tensor:
    """RoPE on the first columns of x."""
    rotary = 2 * cos.shape[-1]
    head, rest = x[..., :rotary].float(), x[..., rotary:]
    if style == "half":
        a, b = head.chunk(2, dim=-1)
        turned = torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)
    else:
        a, b = head[..., 0::2], head[..., 1::2]
        turned = torch.stack([a * cos - b * sin, b * cos + a * sin], dim=-1).flatten(-2)
    return torch.cat([turned.to(x.dtype), rest], dim=-1)


class TorchMtpHead(_TorchHead):
    """One draft step of an `mtp_dense` circuit for `rows` sequences that all have `context` rows."""

    def __init__(self, circuit: Circuit, weights: Mapping[str, torch.Tensor], rows: int, context: int):
        super().__init__(circuit, weights, rows, context)
        names = ("embed_tokens", "enorm", "hnorm", "fc", "fc_bias_vector", "norm_weight", "lm_head")
        self.w = {name: half(weights, name) for name in names}
        self.w.update({name: half(weights, f"layer.{name}") for name in ("input_norm", "post_norm")})
        self._take_attention(weights)
        self._take_ffn(circuit, weights)
        if self.facts["norm"] == "zero_centred":
            for name in ("enorm", "hnorm", "norm_weight", "input_norm", "post_norm", "attn.q_norm", "attn.k_norm"):
                if self.w[name] is not None:
                    self.w[name] = self.w[name] + 1  # type: ignore[operator]

    def forward(self, token: torch.Tensor, hidden: torch.Tensor, position: torch.Tensor) -> tuple[torch.Tensor, ...]:
        facts, w = self.facts, self.w
        hidden_position = position - 1
        e = F.embedding(token, w["embed_tokens"])  # type: ignore[arg-type]
        if facts["mask_first"]:
            e = torch.where(hidden_position[:, None] == 0, torch.zeros_like(e), e)
        e, h = self._norm(e, "enorm"), self._norm(hidden, "hnorm")
        x = torch.cat((e, h) if facts["concat"] == "embed_first" else (h, e), dim=-1)
        x = F.linear(x, w["fc"], w["fc_bias_vector"])  # type: ignore[arg-type]
        x = x + self._attention(self._norm(x, "input_norm"), position if facts["rope_position"] == "token" else hidden_position)
        x = x + self._ffn(self._norm(x, "post_norm"))
        y = self._norm(x, "norm_weight")
        logits = F.linear(y, w["lm_head"]).float()  # type: ignore[arg-type]
        best = logits.max(dim=-1)
        return best.indices, best.values - logits.logsumexp(dim=-1), y if facts["recycle"] == "post_norm" else x

    def _take_attention(self, weights: Mapping[str, torch.Tensor]) -> None:
        for name in ("attn.o_proj", "attn.o_bias", "attn.q_norm", "attn.k_norm"):
            self.w[name] = half(weights, f"layer.{name}")
        self.w["qkv"] = torch.cat([weights[f"layer.attn.{name}_proj"].to(torch.bfloat16) for name in "qkv"])
        biases = [half(weights, f"layer.attn.{name}_bias") for name in "qkv"]
        self.w["qkv_bias"] = torch.cat(biases) if biases[0] is not None else None  # type: ignore[arg-type]

    def _take_ffn(self, circuit: Circuit, weights: Mapping[str, torch.Tensor], name: str = "layer.ffn") -> None:
        self.w["gate_up"] = torch.cat([weights[f"{name}.{n}_proj"].to(torch.bfloat16) for n in ("gate", "up")])
        self.w["down"] = weights[f"{name}.down_proj"].to(torch.bfloat16)

    def _ffn(self, x: torch.Tensor) -> torch.Tensor:
        return _gated(F.linear(x, self.w["gate_up"]), self.w["down"])  # type: ignore[arg-type]

    def _attention(self, x: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
        w, n = self.w, self.rows
        qkv = F.linear(x, w["qkv"], w["qkv_bias"])  # type: ignore[arg-type]
        kv = self.kv_heads * self.dim
        q, k, v = qkv.split([qkv.shape[-1] - 2 * kv, kv, kv], dim=-1)
        k, v = k.view(n, self.kv_heads, self.dim), v.view(n, self.kv_heads, self.dim)
        gate = None
        if self.facts["attention_gate"]:
            q, gate = q.view(n, -1, 2 * self.dim).chunk(2, dim=-1)
        q = q.reshape(n, -1, self.dim)
        if self.facts["qk_norm"]:
            q, k = self._norm(q, "attn.q_norm"), self._norm(k, "attn.k_norm")
        a = self._attend(q, k, v, position)
        if gate is not None:
            a = a * torch.sigmoid(gate)
        return F.linear(a.reshape(n, -1), w["attn.o_proj"], w["attn.o_bias"])  # type: ignore[arg-type]


def _gated(gate_up: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    return F.linear(F.silu(gate) * up, down)


class TorchMoeHead(TorchMtpHead):
    """One draft step of an `mtp_moe` circuit. grouped: rows are sorted by expert for `_grouped_mm`, which reads an expert once;
    otherwise every row takes its own experts' weights, which inductor does without a copy."""

    grouped = False

    def both(self) -> dict[str, TorchMoeHead]:
        """Both ways, by what their names end in. They share weights and cache."""
        other = copy.copy(self)
        other.grouped = True
        return {" by row": self, " grouped": other}

    def _take_ffn(self, circuit: Circuit, weights: Mapping[str, torch.Tensor], name: str = "layer.ffn") -> None:
        super()._take_ffn(circuit, weights, f"{name}.shared")
        (route,) = [node for node in circuit.nodes if node.op == "route"]
        self.route: dict[str, Any] = dict(route.attr)
        parts = [weights[f"{name}.{part}"].to(torch.bfloat16) for part in ("gate", "up") if f"{name}.{part}" in weights]
        self.w["experts"] = torch.cat(parts, 1)
        self.w["experts_down"] = weights[f"{name}.down"].to(torch.bfloat16)
        for part in ("router", "correction", "shared_gate_vector"):
            self.w[part] = half(weights, f"{name}.{part}")

    def _ffn(self, x: torch.Tensor) -> torch.Tensor:
        ids, share = self._choose(x)
        mixed = self._by_expert(x, ids, share) if self.grouped else self._by_row(x, ids, share)
        beside = super()._ffn(x)
        if self.w["shared_gate_vector"] is not None:
            beside = beside * torch.sigmoid(F.linear(x, self.w["shared_gate_vector"]))
        return mixed.to(x.dtype) + beside

    def _choose(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        route = self.route
        logits = F.linear(x, self.w["router"]).float()  # type: ignore[arg-type]
        scores = logits.softmax(-1) if route["scoring"] == "softmax" else logits.sigmoid()
        choice = scores if self.w["correction"] is None else scores + self.w["correction"]
        if route["groups"] > 1:
            grouped = choice.unflatten(1, (route["groups"], -1))
            kept = grouped.topk(2, dim=-1).values.sum(-1).topk(route["kept"], dim=-1).indices
            mask = torch.zeros_like(grouped[..., 0], dtype=torch.bool).scatter(1, kept, True)
            choice = grouped.masked_fill(~mask[..., None], float("-inf")).flatten(1)
        ids = choice.topk(route["top"], dim=-1).indices
        share = scores.gather(1, ids)
        if route["renormalise"]:
            share = share / share.sum(-1, keepdim=True)
        return ids, share * route["factor"]

    def _by_row(self, x: torch.Tensor, ids: torch.Tensor, share: torch.Tensor) -> torch.Tensor:
        gate, up = torch.einsum("nh,nkih->nki", x, self.w["experts"][ids]).chunk(2, dim=-1)  # type: ignore[index]
        made = torch.einsum("nki,nkhi->nkh", F.silu(gate) * up, self.w["experts_down"][ids])  # type: ignore[index]
        return (made * share[..., None]).sum(1)

    def _by_expert(self, x: torch.Tensor, ids: torch.Tensor, share: torch.Tensor) -> torch.Tensor:
        experts, down = self.w["experts"], self.w["experts_down"]
        assert experts is not None
        assert down is not None
        order = ids.flatten().argsort(stable=True)
        numbers = torch.arange(len(experts), device=x.device)
        ends = torch.searchsorted(ids.flatten()[order], numbers, right=True).to(torch.int32)
        row = order // ids.shape[1]
        multiply = torch.ops.aten._grouped_mm
        gate, up = multiply(x[row], experts.transpose(1, 2), ends).chunk(2, dim=-1)
        made = multiply(F.silu(gate) * up, down.transpose(1, 2), ends)
        return torch.zeros_like(x, dtype=torch.float32).index_add(0, row, made * share.flatten()[order, None])


class TorchEagle3Head(_TorchHead):
    """One draft step of an `eagle3` circuit; `first`: from three of the target's hiddens side by side."""

    PROGRAM = "eagle3"

    def __init__(self, circuit: Circuit, weights: Mapping[str, torch.Tensor], rows: int, context: int, *, first: bool):
        super().__init__(circuit, weights, rows, context)
        self.first = first
        names = (
            "embed_tokens",
            "fc",
            "input_norm",
            "hidden_norm",
            "o_proj",
            "post_norm",
            "ffn.down_proj",
            "norm_weight",
            "lm_head",
        )
        self.w.update({name: weights[name].to(torch.bfloat16) for name in names})
        norms = ("low_norm", "middle_norm", "high_norm")
        self.w.update({name: half(weights, name) for name in ("o_bias", "aux_norm", *norms)})
        self.norms = [name for name in norms if name in weights]
        self.w["qkv"] = torch.cat([weights[f"{name}_proj"].to(torch.bfloat16) for name in ("q", "k", "v")])
        biases = [half(weights, f"{name}_bias") for name in "qkv"]
        self.w["qkv_bias"] = torch.cat(biases) if biases[0] is not None else None  # type: ignore[arg-type]
        self.w["gate_up"] = torch.cat([weights[f"ffn.{name}_proj"].to(torch.bfloat16) for name in ("gate", "up")])
        self.offsets = weights.get("d2t")

    def forward(self, token: torch.Tensor, hidden: torch.Tensor, position: torch.Tensor) -> tuple[torch.Tensor, ...]:
        facts, w, n = self.facts, self.w, self.rows
        if self.first:
            if facts["norm_before_fc"]:
                hidden = self._norm(hidden, "aux_norm")
            if self.norms:
                parts = hidden.chunk(len(self.norms), dim=-1)
                hidden = torch.cat([self._norm(part, name) for part, name in zip(parts, self.norms, strict=True)], dim=-1)
            hidden = F.linear(hidden, w["fc"])  # type: ignore[arg-type]
        e = self._norm(F.embedding(token, w["embed_tokens"]), "input_norm")  # type: ignore[arg-type]
        h = self._norm(hidden, "hidden_norm")
        qkv = F.linear(torch.cat([e, h], dim=-1), w["qkv"], w["qkv_bias"])  # type: ignore[arg-type]
        q, k, v = qkv.view(n, -1, self.dim).split([qkv.shape[-1] // self.dim - 2 * self.kv_heads, *[self.kv_heads] * 2], dim=1)
        a = self._attend(q, k, v, position if facts["rope_position"] == "token" else position - 1)
        a = F.linear(a.reshape(n, -1), w["o_proj"], w["o_bias"])  # type: ignore[arg-type]
        x = (h if facts["norm_before_residual"] else hidden) + a
        gate, up = F.linear(self._norm(x, "post_norm"), w["gate_up"]).chunk(2, dim=-1)  # type: ignore[arg-type]
        x = x + F.linear(F.silu(gate) * up, w["ffn.down_proj"])  # type: ignore[arg-type]
        y = self._norm(x, "norm_weight")
        logits = F.linear(y, w["lm_head"]).float()  # type: ignore[arg-type]
        best = logits.max(dim=-1)
        draft = best.indices if self.offsets is None else best.indices + self.offsets[best.indices]
        return draft, best.values - logits.logsumexp(dim=-1), y if facts["recycle"] == "post_norm" else x


class TorchLatentHead(TorchMoeHead):
    """One draft step of an `mtp_mla` circuit: latent attention absorbed, so that all heads share one row of the cache, which
    holds the latent and the rotated part side by side."""

    def _make_cache(self, state: State) -> None:
        self.rotary, self.latent = state.dims
        shape = (self.rows, self.context + 1, self.latent + self.rotary)
        self.cache = torch.randn(shape, device=self.cos.device).to(torch.bfloat16)

    def take_cache(self, cache: PagedKV) -> None:
        rotary, latent = contiguous_rows(cache, self.context)
        self.cache[:, : self.context] = torch.cat([latent, rotary], dim=-1)[:, 0]

    def _take_attention(self, weights: Mapping[str, torch.Tensor]) -> None:
        for name in ("attn.o_proj", "attn.q_a_norm", "attn.q_b_proj", "attn.kv_a_norm"):
            self.w[name] = half(weights, f"layer.{name}")
        self.w["a_proj"] = torch.cat([weights[f"layer.attn.{name}_a_proj"].to(torch.bfloat16) for name in ("q", "kv")])
        q_b, kv_b, o = (weights[f"layer.attn.{name}_proj"] for name in ("q_b", "kv_b", "o"))
        # Heads from what rows must add up to: q_b has N + R for each, kv_b N + D, o's columns are D for each.
        self.heads = (q_b.shape[0] + o.shape[1] - kv_b.shape[0]) // self.rotary
        blocks = kv_b.to(torch.bfloat16).unflatten(0, (self.heads, -1))
        self.plain = blocks.shape[1] - o.shape[1] // self.heads
        self.w["k_up"] = blocks[:, : self.plain].contiguous()  # [heads, N, L]
        self.w["v_up"] = blocks[:, self.plain :].mT.contiguous()  # [heads, L, D]

    def _attention(self, x: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
        w = self.w
        a = F.linear(x, w["a_proj"])  # type: ignore[arg-type]
        queries, latent, k = a.split([a.shape[-1] - self.latent - self.rotary, self.latent, self.rotary], dim=-1)
        q = F.linear(self._norm(queries, "attn.q_a_norm"), w["attn.q_b_proj"]).unflatten(1, (self.heads, -1))  # type: ignore[arg-type]
        cos, sin = self.cos[position][:, None], self.sin[position][:, None]
        wide = torch.bmm(q[..., : self.plain].transpose(0, 1), w["k_up"]).transpose(0, 1)  # type: ignore[arg-type]
        q = torch.cat([wide, self._rotate(q[..., self.plain :], cos, sin)], dim=-1)
        new = torch.cat([self._norm(latent, "attn.kv_a_norm"), self._rotate(k[:, None], cos, sin)[:, 0]], dim=-1)
        self.cache[:, self.context] = new
        shares = torch.softmax(torch.bmm(q, self.cache.mT) * self.scale, dim=-1, dtype=torch.float32).to(q.dtype)
        mixed = torch.bmm(shares, self.cache[..., : self.latent])
        values = torch.bmm(mixed.transpose(0, 1), w["v_up"]).transpose(0, 1)  # type: ignore[arg-type]
        return F.linear(values.flatten(1), w["attn.o_proj"])  # type: ignore[arg-type]


def peer_heads(circuit: Circuit, weights: Mapping[str, torch.Tensor], rows: int, context: int) -> dict[str, TorchMtpHead]:
    """The same head in torch, by what its name ends in where there is more than one way; empty for programs without a peer.

    weights: numbers; quantised ones as `dequantised` makes them.
    """
    if circuit.name == PEER_PROGRAM:
        return {"": TorchMtpHead(circuit, weights, rows, context)}
    kind = {"mtp_moe": TorchMoeHead, "mtp_mla": TorchLatentHead}.get(circuit.name)
    return dict(kind(circuit, weights, rows, context).both()) if kind else {}


def contiguous_rows(cache: PagedKV, context: int, layer: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """The first `context` rows of every row's sequence, [n, heads, context, dim] each, copied out of one layer."""
    place = cache.start[cache.seq.long()].long()[:, None] + torch.arange(context, device=cache.k.device)
    block = cache.table[cache.seq.long()].long().gather(1, place // cache.block_size)
    k, v = (storage[layer][block, :, place % cache.block_size].transpose(1, 2) for storage in (cache.k, cache.v))
    return k.contiguous(), v.contiguous()


def torch_peers(
    circuit: Circuit, weights: Mapping[str, torch.Tensor], rows: int, context: int, inputs: Mapping[str, torch.Tensor]
) -> dict[str, Callable[[], object]]:
    """'torch eager' and 'torch.compile' of the same head, warmed up; empty for programs without a peer."""
    if circuit.name != PEER_PROGRAM:
        return {}
    head = TorchMtpHead(circuit, weights, rows, context).eval()
    token, position = inputs["token"].long(), inputs["position"].long()
    hidden = inputs["hidden"].to(torch.bfloat16)
    torch.compiler.reset()  # one compilation for each width: no dynamic shapes, no recompilation limit
    compiled = torch.compile(head, dynamic=False)

    def run(module: Callable[..., object]) -> Callable[[], object]:
        def call() -> object:
            with torch.no_grad():
                return module(token, hidden, position)

        return call

    peers = {"torch eager": run(head), "torch.compile": run(compiled)}
    for call in peers.values():
        call()
    return peers
