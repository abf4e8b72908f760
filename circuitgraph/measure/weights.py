"""Weights that a drafter borrows from its target, read from a folder in any form that transformers can load."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch

from ..artifact.manifest import Manifest
from ..artifact.store import Artifact
from ..checkpoint.random_weights import random_packed
from ..errors import CheckpointError, Fault
from ..ops import TORCH_DTYPES
from ..runtime import bind_weights


def gguf_file(folder: str | Path) -> Path | None:
    """The GGUF file to load from a folder (or the file itself), None where the folder has safetensors or nothing.

    Raises:
        CheckpointError: several, and no way to tell which.
    """
    folder = Path(folder)
    if folder.is_file():
        return folder if folder.suffix == ".gguf" else None
    if any(folder.glob("*.safetensors")):
        return None
    files = sorted(folder.glob("*.gguf"))
    if len(files) > 1:
        names = ", ".join(file.name for file in files)
        raise CheckpointError(Fault("has several GGUF files", where=str(folder), got=names, hint="Give one file's path."))
    return files[0] if files else None


def borrowed_weights(manifest: Manifest, target_model: str | Path | None) -> dict[str, torch.Tensor]:
    """Embedding and lm_head of a GGUF target by circuit name, in the artifact's types; empty for any other target.

    Safetensors folders are memory-mapped by the runtime itself. A GGUF's tensors are dequantised here, which copies.
    """
    file = gguf_file(target_model) if target_model is not None else None
    if file is None:
        return {}
    from transformers import AutoModelForCausalLM

    with quiet():
        target = AutoModelForCausalLM.from_pretrained(str(file.parent), gguf_file=file.name, dtype=torch.float32)
    return target_tensors(manifest, target)


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Without the progress bars that transformers shows while it loads: they would break ours."""
    with contextlib.redirect_stderr(io.StringIO()):
        yield


def target_tensors(manifest: Manifest, target: torch.nn.Module) -> dict[str, torch.Tensor]:
    """What `manifest` borrows from a loaded target, in the artifact's types; tied weights stay one tensor."""
    state = target.state_dict()
    made: dict[tuple[int, str], torch.Tensor] = {}
    weights = {}
    for name, spec in manifest.weights.items():
        if spec.source in ("target", "host") and spec.tensor in state:
            source = state[spec.tensor]
            key = (source.data_ptr(), spec.dtype)
            if key not in made:
                made[key] = source.to(TORCH_DTYPES[spec.dtype]).contiguous()
            weights[name] = made[key]
    return weights


def bind_where_recorded(
    artifact: Artifact,
    *,
    model: str | Path | None,
    target_model: str | Path | None,
    weights: Mapping[str, torch.Tensor] | None,
    seed: int = 0,
    device: torch.device | str = "cpu",
    max_position: int | None = None,
) -> dict[str, torch.Tensor]:
    """`runtime.bind_weights`, with folders that are not given taken from what the artifact was compiled with.

    A GGUF target is dequantised. Raises as `bind_weights`.
    """
    target = folder_of(artifact.manifest, "target_model", target_model)
    borrowed = {name: tensor.to(device) for name, tensor in borrowed_weights(artifact.manifest, target).items()}
    given = {**borrowed, **(weights or {})}
    drafter = folder_of(artifact.manifest, "model", model)
    is_gguf = target is not None and gguf_file(target) is not None
    return bind_weights(
        artifact,
        weights=given,
        model=drafter,
        target_model=None if is_gguf else target,
        seed=seed,
        device=device,
        max_position=max_position,
    )


def random_weights(manifest: Manifest, device: torch.device | str, *, every: bool = False) -> dict[str, torch.Tensor]:
    """Weights made where they are used, in seconds even where a head has gigabytes; tied ones share their tensor.

    every: of all weights; else of those that no checkpoint provides.
    """
    generator = torch.Generator(device).manual_seed(0)
    made: dict[str, torch.Tensor] = {}
    weights = {}
    for name, spec in manifest.weights.items():
        if not every and spec.source != "random":
            continue
        if spec.storage is not None:
            weight = spec.weight(name)
            tensors = random_packed(weight, generator)
            weights.update((value.name, tensor) for value, tensor in zip(weight.tensors(), tensors, strict=True))
            continue
        if not TORCH_DTYPES[spec.dtype].is_floating_point:
            weights[name] = torch.zeros(spec.shape, dtype=TORCH_DTYPES[spec.dtype], device=device)
            continue
        if spec.tensor not in made:
            values = torch.randn(spec.shape, generator=generator, device=device, dtype=TORCH_DTYPES[spec.dtype])
            # Matrices keep the size of what they project; vectors are norms (or biases), which vary around 1.
            made[spec.tensor] = values * spec.shape[-1] ** -0.5 if len(spec.shape) > 1 else 1 + 0.1 * values
        weights[name] = made[spec.tensor]
    return weights


def folder_of(manifest: Manifest, option: str, given: str | Path | None) -> Path | None:
    """The given checkpoint, or the one that was compiled with (`option`: model, target_model), where it still is."""
    if given is not None:
        return Path(given)
    recorded = manifest.options.get(option)
    return Path(recorded) if isinstance(recorded, str) and Path(recorded).exists() else None
