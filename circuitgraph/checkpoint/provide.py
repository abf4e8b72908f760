"""The tensors of weights: read from files and brought to the circuit's dtype, or made up.

Checkpoint binding and the runtime load through here alike. A serving box uses it: torch and safetensors only.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from ..circuit.ir import Circuit
from ..errors import CheckpointError, Fault, did_you_mean
from ..ops.base import TORCH_DTYPES
from .files import TensorFiles
from .packed import dequantise, packed_tensors
from .random_weights import random_packed, random_weight, seeded
from .stored import check_packed

if TYPE_CHECKING:
    from ..artifact.manifest import WeightSpec


def read_weights(
    files: TensorFiles, specs: Mapping[str, WeightSpec], device: torch.device | str = "cpu"
) -> dict[str, torch.Tensor]:
    """Weights by circuit name, from a checkpoint's files; of quantised ones that stay so all tensors (`Weight.tensors`).

    On the CPU they stay memory-mapped where they are stored as the circuit wants them. Others are converted, or
    dequantised on `device`. Weights that are tied share a tensor.

    Raises:
        CheckpointError: every weight whose tensors are absent or not of the spec's dtype and shape; a scale that is no
            number.
    """
    faults: list[Fault] = []
    for name, spec in specs.items():
        faults += _misfit(files, name, spec)
    if faults:
        raise CheckpointError(faults)
    wanted = {tensor for spec in specs.values() for tensor in (spec.tensor, *(spec.packed.tensors if spec.packed else ()))}
    tensors = files.load(sorted(wanted))
    return read_tensors(tensors, specs, device, files)


def read_tensors(
    tensors: Mapping[str, torch.Tensor],
    specs: Mapping[str, WeightSpec],
    device: torch.device | str = "cpu",
    files: TensorFiles | None = None,
) -> dict[str, torch.Tensor]:
    """`read_weights` of tensors as files store them. files: where they are from, for errors.

    Raises:
        CheckpointError: a scale that is no number.
    """
    made: dict[tuple[Any, ...], list[torch.Tensor]] = {}
    weights = {}
    for name, spec in specs.items():
        key = (spec.tensor, spec.dtype, spec.storage)
        if key not in made:
            made[key] = _ready(files, spec, tensors, device)
        weights.update(zip((value.name for value in spec.weight(name).tensors()), made[key], strict=True))
    return weights


def _misfit(files: TensorFiles, name: str, spec: WeightSpec) -> tuple[Fault, ...]:
    # The code of other weights was made for what their files hold; of the host's nobody has seen any.
    remedy = "Compile with this folder as target_model= (--target-model)." if spec.source == "host" else None
    if spec.tensor not in files:
        hint = remedy or did_you_mean(spec.tensor, files.names)
        where = str(files.folder)
        return (Fault(f"no tensor '{spec.tensor}', which '{name}' is bound from", where=where, hint=hint),)
    try:
        check_packed(files, spec.tensor, spec.shape, spec.packed)
        info = files.info(spec.tensor)
    except CheckpointError as problem:
        return problem.faults
    if spec.packed is not None or (info.shape == spec.shape and info.dtype in (spec.dtype, spec.stored)):
        return ()
    expected = f"{spec.stored or spec.dtype}{list(spec.shape)} ('{name}')"
    return (Fault("does not fit", where=str(info.file), subject=spec.tensor, expected=expected, got=str(info), hint=remedy),)


def _ready(
    files: TensorFiles | None, spec: WeightSpec, tensors: Mapping[str, torch.Tensor], device: torch.device | str
) -> list[torch.Tensor]:
    """The tensors of the weight on `device`: one in its circuit's dtype, or those of its storage."""
    packed, dtype = spec.packed, TORCH_DTYPES[spec.dtype]
    if packed is None:
        return [tensors[spec.tensor].to(device, dtype)]
    for name in packed.tensors:
        broken = tensors[name].float().isfinite().logical_not() if tensors[name].dtype != torch.uint8 else tensors[name] == 255
        if packed.divides and name == packed.global_scale:
            broken = broken | (tensors[name] == 0)
        if broken.any():
            where = str(files.info(name).file) if files else None
            hint = "The checkpoint is damaged: download or export it again."
            got = f"{int(broken.sum())} of {broken.numel()} that are not"
            raise CheckpointError(
                Fault("scales must be finite", where=where, subject=name, expected="numbers", got=got, hint=hint)
            )
    values, scales, *rest = (tensors[name].to(device) for name in (spec.tensor, *packed.tensors))
    whole = rest[0] if rest else None
    if spec.storage is not None:
        return list(packed_tensors(packed, spec.weight(spec.tensor), values, scales, whole).values())
    return [dequantise(packed, spec.shape, values, scales, whole, dtype)]


def made_up(circuit: Circuit, specs: Mapping[str, WeightSpec], seed: int, device: torch.device | str) -> dict[str, torch.Tensor]:
    """Weights of a program that was compiled from a config alone; tied ones share their tensor."""
    weights = {weight.name: weight for weight in circuit.weights}
    made: dict[tuple[Any, ...], list[torch.Tensor]] = {}
    tensors = {}
    for name, spec in specs.items():
        weight, key = weights[name], (spec.tensor, spec.storage)
        if key not in made:
            generator = seeded(weight, seed)
            plain = spec.storage is None
            some = [random_weight(circuit, weight, generator)] if plain else random_packed(weight, generator)
            made[key] = [tensor.to(device) for tensor in some]
        tensors.update(zip((value.name for value in weight.tensors()), made[key], strict=True))
    return tensors
