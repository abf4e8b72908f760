"""Stage `pack`: a bound program, its plans and what was built, to an artifact on disk."""

from __future__ import annotations

import hashlib
import json
import platform
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from ..checkpoint.binding import DEFAULT_POSITIONS, BoundProgram, TensorRef
from ..lower import argument_values
from ..plan.ir import Plan
from ..plan.text import CONTEXT_FOR_COST, format_plan, plan_records
from ..target import Built
from .manifest import Arg, Function, Manifest, Model, Target, WeightSpec, config_digest
from .store import Artifact, write_artifact


def pack(
    out: Path,
    bound: BoundProgram,
    plans: Sequence[Plan],
    scripts: Mapping[str, str],
    built: Built,
    target: Mapping[str, Any],
    options: Mapping[str, Any],
    overwrite: bool,
) -> Artifact:
    """Write the artifact folder `out`.

    Args:
        scripts: the lowered text of each plan by symbol, kept so that `show` works without a compiler.
        target: `Backend.description()`.
        options: what the caller asked for, kept for readers.

    Raises:
        ArtifactError: `out` exists, or the disk refused; nothing is left then.
    """
    # A loader that has a library of this path open hands out the old one: a new library gets a new name.
    digest = hashlib.sha256(built.library.read_bytes()).hexdigest()[:12]
    library = f"lib/kernels-{digest}.so"
    files: dict[str, bytes | Path] = {library: built.library}
    files.update({f"plans/{plan.symbol}.txt": format_plan(plan).encode() for plan in plans})
    files.update({f"plans/{plan.symbol}.json": json.dumps(plan_records(plan), indent=1).encode() for plan in plans})
    files.update({f"src/{symbol}.tir": text.encode() for symbol, text in scripts.items()})
    files.update({f"src/kernels.{kind}": text.encode() for kind, text in built.texts.items()})
    return write_artifact(out, make_manifest(bound, plans, target, options, library), files, overwrite=overwrite)


def make_manifest(
    bound: BoundProgram, plans: Sequence[Plan], target: Mapping[str, Any], options: Mapping[str, Any], library: str
) -> Manifest:
    """All that a loader must know; digests of the files are the writer's."""
    config = bound.config.values
    longest = [spec.max_position or DEFAULT_POSITIONS for spec in bound.rope.values()]
    return Manifest(
        program=bound.program,
        family=bound.family,
        circuit=bound.circuit,
        target=Target(target["kind"], platform.machine(), target["mcpu"], tuple(target["features"])),
        model=Model(
            name=bound.model.path.name,
            config_digest=config_digest(bound.model.config.data),
            hidden_size=config["hidden_size"],
            vocab_size=config["vocab_size"],
            target_digest=config_digest(bound.model.target.config.data) if bound.model.target is not None else "",
        ),
        functions={plan.symbol: _function(plan) for plan in plans},
        weights={
            weight.name: _weight(weight.type.dtype, _numbers(weight.type.shape), bound.tensors[weight.name])
            for weight in bound.circuit.weights
        },
        rope={name: spec.to_json() for name, spec in bound.rope.items()},
        max_position=min([*longest, DEFAULT_POSITIONS]),
        library=library,
        options=options,
        tools=tool_versions(),
    )


def _function(plan: Plan) -> Function:
    args = []
    for role, value in argument_values(plan):
        role = "state" if role == "addressing" else role
        args.append(Arg(value.name, role, value.type.dtype, tuple(value.type.shape)))  # type: ignore[union-attr]
    costs = [plan.cost(group, CONTEXT_FOR_COST) for group in plan.groups]
    return Function(
        entry=plan.entry,
        rows=plan.rows,
        symbol=plan.symbol,
        args=tuple(args),
        workspace_bytes=plan.workspace_bytes,
        cost_bytes=sum(cost.bytes for cost in costs),
        cost_flops=sum(cost.flops for cost in costs),
    )


def _weight(dtype: str, shape: tuple[int, ...], ref: TensorRef) -> WeightSpec:
    return WeightSpec(dtype, shape, ref.name, ref.source, "" if ref.dtype == dtype else ref.dtype)


def tool_versions() -> dict[str, str]:
    """Versions of what made the artifact."""
    versions = {"python": platform.python_version()}
    for package in ("circuitgraph", "apache-tvm", "apache-tvm-ffi", "torch"):
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            versions[package] = "unknown"
    return versions


def _numbers(shape: Sequence[int | str]) -> tuple[int, ...]:
    return tuple(int(dim) for dim in shape)
