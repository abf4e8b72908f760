"""Binding weights: from the host's own tensors or from checkpoint folders, by name, without copies."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from circuitgraph.artifact import Artifact, Manifest, WeightSpec, config_digest
from circuitgraph.circuit.ir import Circuit
from circuitgraph.errors import CheckpointError, Fault, RuntimeUseError, did_you_mean
from circuitgraph.ops import DTYPE_NAMES, TORCH_DTYPES

from . import own_ids
from .arguments import device_of, of_kind, shown, whole
from .rope import RopeSpec, rope_tables

if TYPE_CHECKING:
    from circuitgraph.checkpoint.config import RawConfig

MOST_POSITIONS = 1 << 26
"""Rows of RoPE tables: beyond all models by far, and still some gigabytes."""


def bind_weights(
    artifact: Artifact,
    *,
    weights: Mapping[str, torch.Tensor] | None = None,
    model: str | Path | None = None,
    target_model: str | Path | None = None,
    device: torch.device | str = "cpu",
    max_position: int | None = None,
    seed: int = 0,
) -> dict[str, torch.Tensor]:
    """Every weight of the artifact's circuit by its circuit name, of quantised ones all tensors, and the RoPE tables.

    Args:
        weights: the host's own tensors by circuit name; they win over folders. A quantised weight's are given together.
        model: the drafter's checkpoint folder, whose config must be the one that was compiled for; or only a config.json.
        target_model: the target's checkpoint folder, for embedding and lm_head: the target that was compiled with, if
            any. Without it, they must be in `weights`, or in `model` when compiling was given no other folder.
        max_position: rows of the RoPE tables, where the kind permits more or fewer than the manifest's.
        seed: of made-up weights (a program compiled from a config alone).

    Raises:
        CheckpointError: a folder, config or tensor that does not fit, naming both sides.
        RuntimeUseError: given weights that do not fit, or a weight that nothing provides.
    """
    of_kind(artifact, Artifact, "artifact", "bind_weights", "an Artifact, as read_artifact gives")
    manifest = artifact.manifest
    device = device_of(device, manifest.program)
    if max_position is not None:
        text = "needs room for a token, and for tables of so many rows"
        whole(max_position, "max_position", manifest.program, least=1, most=MOST_POSITIONS, message=text)
    whole(seed, "seed", manifest.program, most=2**63 - 1, message="is no seed")
    for name, folder in (("model", model), ("target_model", target_model)):
        of_kind(folder, (str, Path, type(None)), name, manifest.program, "a folder")
    of_kind(weights, (Mapping, type(None)), "weights", manifest.program, "tensors by the circuit's names")
    check_whole(manifest, weights or {})
    folders: dict[str, Path] = {}
    if model is not None:
        _check_config(
            Path(model), manifest.model.config_digest, f"model that the artifact was compiled for ('{manifest.model.name}')"
        )
        if Path(model).is_dir():
            folders["drafter"] = Path(model)
            if not manifest.model.target_digest:
                folders["target"] = Path(model)
    if target_model is not None:
        if not Path(target_model).exists():
            raise CheckpointError(
                Fault("does not exist", where=str(target_model), hint="Give target_model= the target's folder.")
            )
        if manifest.model.target_digest:
            what = f"target that '{manifest.model.name}' was compiled with"
            _check_config(Path(target_model), manifest.model.target_digest, what)
        folders["target"] = folders["host"] = Path(target_model)
    if manifest.weight_file is not None:
        folders["artifact"] = artifact.folder / manifest.weight_file  # itself: what lies beside it was not verified
    given = dict(weights or {})
    tied = _ties(folders.get("host")) if any(spec.either for spec in manifest.weights.values()) else None
    wanted: dict[str, dict[str, WeightSpec]] = {}
    for name, spec in manifest.weights.items():
        if name not in given:
            either = spec.either if tied is not None else None
            wanted.setdefault(spec.source, {})[name] = replace(spec, tensor=either[bool(tied)]) if either else spec
    if "host" in folders:
        _check_lender(folders["host"], manifest.program, wanted.get("host", {}))
    for source, folder in folders.items():
        given.update(_from_folder(folder, wanted.get(source, {}), device))
    given.update(_made_up(manifest.circuit, wanted.get("random", {}), seed, device))
    for name, spec in manifest.rope.items():
        tables = rope_tables(RopeSpec.from_json(spec), max_position or manifest.max_position, device)
        for part, tensor in zip(("cos", "sin"), tables, strict=True):
            given.setdefault(f"{name}.{part}", tensor)
    return check_weights(manifest, given, device)


_TARGET_HINT = "Give target_model= (--target-model), the target's folder, or its tensor itself in weights={{'{name}': ...}}."


_QUANTISED = "The program reads this weight as {storage}. Leave it out, and it is taken from the artifact or the checkpoint."


def check_whole(manifest: Manifest, given: Mapping[str, torch.Tensor]) -> None:
    """Raises RuntimeUseError for a quantised weight of which some tensors are given and others not: they only go together."""
    faults = []
    for name, spec in manifest.weights.items():
        parts = [value.name for value in spec.weight(name).tensors()] if spec.storage else []
        absent = [part for part in parts if part not in given]
        if absent and len(absent) < len(parts):
            got = ", ".join(part for part in parts if part in given)
            expected = f"{', '.join(parts)}, or none of them"
            hint = _QUANTISED.format(storage=spec.storage)
            faults.append(Fault("is given in part", where=manifest.program, subject=name, expected=expected, got=got, hint=hint))
    if faults:
        raise RuntimeUseError(faults)


def check_weights(manifest: Manifest, weights: Mapping[str, torch.Tensor], device: torch.device) -> dict[str, torch.Tensor]:
    """The weights, after comparing each with the manifest.

    Raises:
        RuntimeUseError: every one that is missing, unknown, or of another shape, dtype, layout or device; else a map of ids
            that leads out of the vocabulary.
    """
    of_kind(weights, Mapping, "weights", manifest.program, "tensors by the circuit's names")
    tables = {value.name: value for table in manifest.circuit.tables for value in table.tensors()}
    specs = {value.name: (spec, value) for name, spec in manifest.weights.items() for value in spec.weight(name).tensors()}
    faults = []
    for name in sorted({*specs, *tables} - set(weights)):
        source = specs[name][0].source if name in specs else "table"
        hint = {
            "drafter": "Give model=, the drafter's checkpoint folder.",
            "target": _TARGET_HINT.format(name=name),
            "host": _TARGET_HINT.format(name=name),
        }
        faults.append(Fault("nothing provides it", where=manifest.program, subject=name, hint=hint.get(source)))
    for name, tensor in weights.items():
        if not isinstance(tensor, torch.Tensor):
            faults.append(Fault("is no tensor", where=manifest.program, subject=str(name), got=shown(tensor)))
            continue
        hint = None
        if name in specs:
            spec, value = specs[name]
            dtype, shape = value.type.dtype, value.type.shape  # type: ignore[union-attr]
            hint = _QUANTISED.format(storage=spec.storage) if spec.storage else None
        elif name in tables:
            rows = tensor.shape[:1] or ("rows",)
            dtype, shape = "f32", (*rows, tables[name].type.shape[1])  # type: ignore[union-attr]
        else:
            hint = did_you_mean(str(name), {*specs, *tables})
            faults.append(Fault("is not a weight of this program", where=manifest.program, subject=str(name), hint=hint))
            continue
        fits = tuple(tensor.shape) == shape and tensor.dtype == TORCH_DTYPES[dtype]
        if not (fits and tensor.is_contiguous() and tensor.device == device):
            layout = "" if tensor.is_contiguous() else "strided "
            got = f"{layout}{_dtype(tensor)}{list(tensor.shape)} on {tensor.device}"
            expected = f"contiguous {dtype}[{', '.join(map(str, shape))}] on {device}"
            faults.append(Fault("does not fit", where=manifest.program, subject=name, expected=expected, got=got, hint=hint))
    if not faults:
        name = own_ids.map_of(manifest.circuit)
        fault = own_ids.fault_of(manifest.program, name, weights[name], manifest.model.vocab_size) if name else None
        faults += [fault] if fault else []
        for table in manifest.circuit.tables:
            cos, sin = (weights[value.name] for value in table.tensors())
            if cos.shape != sin.shape:
                got = f"{cos.shape[0]} rows of cos, {sin.shape[0]} of sin"
                faults.append(Fault("cos and sin differ in length", where=manifest.program, subject=table.name, got=got))
    if faults:
        raise RuntimeUseError(faults)
    return dict(weights)


def _check_config(model: Path, digest: str, what: str) -> None:
    """Refuse another model than `what`, whose config has `digest`. `model` is a folder, or its config.json."""
    file = model / "config.json" if model.is_dir() else model
    try:
        config = json.loads(file.read_text(encoding="utf-8-sig"))
        if not isinstance(config, dict):
            raise ValueError("not an object")
    except (OSError, ValueError) as error:
        raise CheckpointError(Fault(f"cannot be read: {error}", where=str(file))) from error
    found, compiled = config_digest(config)[:16], digest[:16]
    if found != compiled:
        hint = "Compile again for this model, or give the folder of the other."
        expected = f"config digest {compiled}"
        raise CheckpointError(Fault(f"is not the {what}", where=str(file), expected=expected, got=found, hint=hint))


def _ties(target: Path | None) -> bool | None:
    """Whether the target's lm_head is its embedding: what compiling would have asked, had it been given this folder. A stray
    lm_head in the file is none then. None where no config says."""
    config = _config_of(target) if target is not None else None
    if config is None:
        return None
    from circuitgraph.checkpoint.config import ties

    return ties(config)


def _config_of(target: Path) -> RawConfig | None:
    """The config in the target's folder, or beside its file; None where there is none."""
    folder = target if target.is_dir() else target.parent
    if not (folder / "config.json").is_file():
        return None
    from circuitgraph.checkpoint.config import read_raw

    return read_raw(folder)


def _check_lender(target: Path, program: str, specs: Mapping[str, WeightSpec]) -> None:
    """A target that compiling has not seen lends weights that mean what its model makes of them.

    Raises:
        CheckpointError: something else lies in their modules (a bias of lm_head, a scale of its input), their numbers are in
            no format that is read, or its activations are transformed.
    """
    if not specs:
        return
    from circuitgraph.checkpoint.config import check_quantisation, scale_block
    from circuitgraph.checkpoint.files import TensorFiles
    from circuitgraph.checkpoint.stored import FP8_BLOCK, read_stored, strays

    config, block = _config_of(target), None
    if config is not None:
        check_quantisation(config)
        block = scale_block(config)
    files, faults = TensorFiles.open(target), []
    hint = f"The target computes something else than program '{program}' would."
    for name, spec in specs.items():
        if spec.tensor in files:
            read_stored(files, spec.tensor, block or FP8_BLOCK)
        for other in strays(files, [spec.tensor, *(spec.either or ())]):
            faults.append(Fault(f"belongs to '{name}', and no program uses it", str(target), other, hint=hint))
    if faults:
        raise CheckpointError(faults)


def _from_folder(folder: Path, specs: Mapping[str, WeightSpec], device: torch.device) -> dict[str, torch.Tensor]:
    if not specs:
        return {}
    from circuitgraph.checkpoint.files import TensorFiles  # needs safetensors, which only folders need
    from circuitgraph.checkpoint.provide import read_weights

    return read_weights(TensorFiles.open(folder), specs, device)


def _made_up(circuit: Circuit, specs: Mapping[str, WeightSpec], seed: int, device: torch.device) -> dict[str, torch.Tensor]:
    if not specs:
        return {}
    from circuitgraph.checkpoint.provide import made_up

    return made_up(circuit, specs, seed, device)


def _dtype(tensor: torch.Tensor) -> str:
    return DTYPE_NAMES.get(tensor.dtype, str(tensor.dtype))
