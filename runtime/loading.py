"""From an artifact on disk to a runner that drafts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from circuitgraph.artifact import Manifest, built_for_gpu, check_device, read_artifact
from circuitgraph.errors import Fault, RuntimeUseError

from .arguments import device_of, of_kind
from .binding import bind_weights
from .compiled import CompiledRunner, check_fallback, check_threads, open_library
from .cuda import CudaRunner


def load(
    path: str | Path,
    *,
    weights: Mapping[str, torch.Tensor] | None = None,
    model: str | Path | None = None,
    target_model: str | Path | None = None,
    threads: int | None = None,
    fallback: str = "cover",
    max_position: int | None = None,
    seed: int = 0,
    device: torch.device | str | None = None,
) -> CompiledRunner:
    """Verify an artifact (folder or zip), bind its weights and load its library.

    Args:
        weights: the host's own tensors by circuit name (`embed_tokens`, `lm_head`, ...), borrowed without a copy.
        model: the drafter's checkpoint folder, memory-mapped.
        target_model: the target's, where embedding and lm_head come from (see `bind_weights`).
        threads: of the CPU library's parallel loops, for all runners of that library; None takes torch's number now.
        fallback: how widths without a program run: "cover" or "single" (see `CompiledRunner`).
        max_position: rows of the RoPE tables, instead of the manifest's: the longest sequence that will be served.
        seed: of the weights of a program that was compiled from a config alone.
        device: where to run, of the kind compiled for; torch's current GPU for a CUDA artifact when left out.

    Raises:
        ArtifactError: an artifact of another version or target, or a damaged one.
        CheckpointError: a folder that is not the model compiled for. RuntimeUseError: tensors that do not fit, and
            arguments that are none, before anything is read.

    >>> runner = load("head.artifact", model="head/", weights={"embed_tokens": embed, "lm_head": embed})  # doctest: +SKIP
    >>> ReferenceRunner(runner.circuit, runner.weights)  # the same program, interpreted          # doctest: +SKIP
    """
    _check_arguments(path, threads, fallback, device)
    artifact = read_artifact(path)
    place = _device(artifact.manifest, device, str(path))
    if place.type == "cuda":
        artifact = replace(artifact, manifest=built_for_gpu(artifact.manifest, place))
        check_device(artifact.manifest, place, str(path))
    bound = bind_weights(
        artifact, weights=weights, model=model, target_model=target_model, max_position=max_position, seed=seed, device=place
    )
    runner = CudaRunner if place.type == "cuda" else CompiledRunner
    return runner(artifact.manifest, open_library(artifact, threads=threads), bound, device=place, fallback=fallback)


def _check_arguments(path: Any, threads: Any, fallback: Any, device: Any) -> None:
    """What is known to be wrong before the artifact is read; `bind_weights` looks at its own."""
    of_kind(path, (str, Path), "path", "load", "a folder or a zip")
    check_threads(threads, str(path))
    check_fallback(fallback)
    if device is not None:
        device_of(device, str(path))


def _device(manifest: Manifest, device: torch.device | str | None, where: str) -> torch.device:
    """Where an artifact runs, with the index of the GPU filled in.

    Raises:
        RuntimeUseError: a device of another kind.
    """
    kind = manifest.target.kind
    if device is not None and torch.device(device).type != kind:
        hint = "Compile for that device, or leave device= out."
        raise RuntimeUseError(Fault(f"was compiled for '{kind}'", where=where, subject="device", got=str(device), hint=hint))
    if kind != "cuda":
        return torch.device("cpu")
    place = torch.device(device or "cuda")
    return torch.device("cuda", torch.cuda.current_device()) if place.index is None else place
