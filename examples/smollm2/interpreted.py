"""The head's forward for training: the project's reference interpreter running the shipped circuit `mtp_dense`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from common import LAYER
from torch import Tensor

from circuitgraph import Circuit, interpret, load_circuit
from circuitgraph.ops import PagedKV

CIRCUIT_NAMES = {
    "fc": "mtp.fc.weight",
    "enorm": "mtp.pre_fc_norm_embedding.weight",
    "hnorm": "mtp.pre_fc_norm_hidden.weight",
    "norm_weight": "mtp.norm.weight",
    "layer.input_norm": LAYER + "input_layernorm.weight",
    "layer.post_norm": LAYER + "post_attention_layernorm.weight",
    **{f"layer.attn.{n}_proj": LAYER + f"self_attn.{n}_proj.weight" for n in "qkvo"},
    **{f"layer.ffn.{n}_proj": LAYER + f"mlp.{n}_proj.weight" for n in ("gate", "up", "down")},
}


def head_circuit(config: Mapping) -> Circuit:
    """`mtp_dense` for this head, fp32, with its cache as a further output.

    The interpreter doesn't change a cache in place while autograd records: the next draft depth needs the new version.
    """
    circuit = load_circuit("mtp_dense", "llama_mtp", config, act="f32", wt="f32", kv="f32")
    return replace(circuit, outputs=(*circuit.outputs, ("cache", dict(circuit.effects)["kv"])))


@dataclass
class InterpretedHead:
    """Runs draft depths of many chains at once through the interpreter.

    Depth 1 has one row for every token of every sequence. A deeper row belongs to one chain; its sequence, in the paged
    cache's terms, is the exact rows that the chain started from, then the chain's own rows: exactly what it would see
    when drafting. Blocks hold one row each there, so chains share the exact rows without copying.
    """

    config: Mapping
    embed: Tensor

    def __post_init__(self) -> None:
        c, device = self.config, self.embed.device
        self.circuit = head_circuit(c)
        inverse = c["rope_theta"] ** (-torch.arange(0, c["head_dim"], 2, dtype=torch.float64) / c["head_dim"])
        angle = torch.arange(c["max_position_embeddings"], dtype=torch.float64)[:, None] * inverse
        self.tables = {"rope.cos": angle.cos().float().to(device), "rope.sin": angle.sin().float().to(device)}

    def _run(
        self, weights: Mapping[str, Tensor], token: Tensor, hidden: Tensor, position: Tensor, kv: PagedKV
    ) -> tuple[Tensor, PagedKV]:
        named = {name: weights[stored] for name, stored in CIRCUIT_NAMES.items()}
        made = interpret(
            self.circuit,
            inputs={"token": token.int(), "hidden": hidden.float(), "position": position.int()},
            weights={**named, **self.tables, "embed_tokens": self.embed},
            states={"kv": kv},
            outputs=["next_hidden", "cache"],
        )
        return made["next_hidden"], made["cache"]  # type: ignore[return-value]

    def exact(self, weights: Mapping[str, Tensor], ids: Tensor, hidden: Tensor) -> tuple[Tensor, PagedKV]:
        """Depth 1 of chains 0..T-2 of ids [B, T], hidden [B, T, H]: next hidden [B, T-1, H] and the rows' cache."""
        (b, t), device = (ids.shape[0], ids.shape[1] - 1), ids.device
        c = self.config
        place = torch.arange(t, device=device).repeat(b)
        store = torch.zeros(1, b, c["num_key_value_heads"], t, c["head_dim"], device=device)
        kv = PagedKV(
            k=store,
            v=store.clone(),
            slot=torch.arange(b * t, device=device, dtype=torch.int32),
            seq=torch.arange(b, device=device, dtype=torch.int32).repeat_interleave(t),
            table=torch.arange(b, device=device, dtype=torch.int32)[:, None],
            start=torch.zeros(b, device=device, dtype=torch.int32),
            length=(place + 1).int(),
        )
        y, kv = self._run(weights, ids[:, 1:].flatten(), hidden[:, :-1].flatten(0, 1), place + 1, kv)
        return y.view(b, t, -1), kv

    def chains(self, exact: PagedKV, sequence: Tensor, place: Tensor, depth: int) -> PagedKV:
        """The cache in which chains (sequence[m], place[m]) continue to `depth`; their own rows are still empty.

        Columns 0..T-1 of a chain's table hold exact rows, the chain's last one at T-1, then its own rows follow. Columns
        before its first row are never seen; they name the sequence's later rows, since a block that all chains name
        would be slow in the backward pass.
        """
        _, b, heads, t, dim = exact.k.shape
        m, device = len(place), place.device
        own = exact.k.new_zeros(1, m * (depth - 1), heads, 1, dim)

        def spread(x: Tensor) -> Tensor:
            return torch.cat([x.permute(0, 1, 3, 2, 4).reshape(1, b * t, heads, 1, dim), own], dim=1)

        shared = sequence[:, None] * t + (torch.arange(t, device=device) + place[:, None] + 1) % t
        mine = b * t + torch.arange(m * (depth - 1), device=device).view(depth - 1, m).T
        return PagedKV(
            k=spread(exact.k),
            v=spread(exact.v),
            slot=torch.zeros(m, device=device, dtype=torch.int32),
            seq=torch.arange(m, device=device, dtype=torch.int32),
            table=torch.cat([shared, mine], dim=1).int(),
            start=(t - 1 - place).int(),
            length=torch.full((m,), t, device=device, dtype=torch.int32),
        )

    def deeper(
        self, weights: Mapping[str, Tensor], token: Tensor, hidden: Tensor, position: Tensor, kv: PagedKV
    ) -> tuple[Tensor, PagedKV]:
        """The next depth of every chain, from the last draft's token, its position, and the hidden made with it."""
        slot = kv.table.gather(1, kv.length[:, None].long())[:, 0]
        return self._run(weights, token, hidden, position, replace(kv, slot=slot, length=kv.length + 1))
