"""The target model of `generate` and `demo`: loading it, spelling a prompt for it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ..errors import CheckpointError, Fault
from ..measure.weights import gguf_file, quiet
from ..places import check_target, check_tokenizer
from ..runtime.integrations.few_rows import use_few_rows_linear


@dataclass(frozen=True)
class Target:
    model: Any
    tokenizer: Any

    def prompt_ids(self, text: str, chat: bool) -> torch.Tensor:
        """int64[1, P]: the prompt as the user's turn of a chat, or as it is."""
        if chat and self.tokenizer.chat_template:
            text = self.tokenizer.apply_chat_template(
                [{"role": "user", "content": text}], add_generation_prompt=True, tokenize=False
            )
        return self.tokenizer(text, return_tensors="pt", add_special_tokens=not chat)["input_ids"]

    @property
    def eos_ids(self) -> list[int]:
        """Every token that ends an answer."""
        configured = self.model.generation_config.eos_token_id
        ids = configured if isinstance(configured, list) else [configured]
        return sorted({token for token in (*ids, self.tokenizer.eos_token_id) if token is not None})


def load_target(folder: str | Path, dtype: str) -> Target:
    """A causal language model from a folder (safetensors or GGUF) or from one GGUF file.

    Its fp32 products of a few rows go the faster way (`few_rows`): plain and speculative decoding run the same model.

    Raises:
        CheckpointError: transformers is not installed, or does not load it.
    """
    folder = Path(folder)
    check_target(folder)
    check_tokenizer(folder)
    try:
        from transformers import AutoModelForCausalLM, AutoTokenizer
    except ModuleNotFoundError:
        raise CheckpointError(Fault("text needs transformers", hint="pip install 'circuitgraph[transformers]'")) from None
    file = gguf_file(folder)
    source = str(file.parent if file else folder)
    options: dict[str, Any] = {"gguf_file": file.name} if file else {}
    kind = {"f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16}[dtype]
    with quiet():
        try:
            model = AutoModelForCausalLM.from_pretrained(source, dtype=kind, **options)
            tokenizer = AutoTokenizer.from_pretrained(source, **options)
        except (OSError, ValueError) as problem:
            raise CheckpointError(Fault(f"transformers cannot load it: {problem}", where=str(folder))) from problem
    use_few_rows_linear(model)
    return Target(model.eval().requires_grad_(False), tokenizer)
