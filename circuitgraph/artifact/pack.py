"""Stage `pack`: a bound program, its plans and what was built, to an artifact on disk."""

from __future__ import annotations

import hashlib
import json
import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from ..checkpoint.binding import DEFAULT_POSITIONS, BoundProgram
from ..checkpoint.made import carried_tensors
from ..lower import argument_values
from ..plan.ir import Plan
from ..plan.text import CONTEXT_FOR_COST, format_plan, plan_records
from ..target import Built
from .manifest import Arg, Build, Function, Manifest, Model, Target, config_digest
from .store import Artifact, Content, write_artifact

WEIGHT_FILE = "weights/model.safetensors"
"""Of weights that compiling made: a checkpoint of its own, in a folder of its own."""


@dataclass(frozen=True)
class Code:
    """What was made for one processor.

    target: `Backend.description()`. scripts: the lowered text of each plan by symbol, kept so that `show` works without a
    compiler.
    """

    target: Mapping[str, Any]
    plans: Sequence[Plan]
    scripts: Mapping[str, str]
    built: Built


def pack(
    out: Path,
    bound: BoundProgram,
    codes: Sequence[Code],
    options: Mapping[str, Any],
    overwrite: bool,
) -> Artifact:
    """Write the artifact folder `out`.

    Args:
        codes: of every processor, the one to name first in front. Their texts have folders of their own where there are
            several.
        options: what the caller asked for, kept for readers.

    Raises:
        ArtifactError: `out` exists, or the disk refused; nothing is left then.
    """
    files: dict[str, Content] = {}
    builds = []
    for code in codes:
        # A loader that has a library of this path open hands out the old one: a new library gets a new name.
        digest = hashlib.sha256(code.built.library.read_bytes()).hexdigest()[:12]
        library = f"lib/kernels-{digest}.so"
        files[library] = code.built.library
        builds.append(_build(code, library))
        folder = f"{code.target['mcpu']}/" if len(codes) > 1 else ""
        for plan in code.plans:
            files[f"plans/{folder}{plan.symbol}.txt"] = format_plan(plan).encode()
            files[f"plans/{folder}{plan.symbol}.json"] = json.dumps(plan_records(plan), indent=1).encode()
        files.update({f"src/{folder}{symbol}.tir": text.encode() for symbol, text in code.scripts.items()})
        files.update({f"src/{folder}kernels.{kind}": text.encode() for kind, text in code.built.texts.items()})
    manifest = make_manifest(bound, builds, options)
    carried = carried_tensors(bound)
    if carried:
        files[WEIGHT_FILE] = lambda path: _save(carried, path)
        manifest = replace(manifest, weight_file=WEIGHT_FILE)
    return write_artifact(out, manifest, files, overwrite=overwrite)


def _save(tensors: Mapping[str, torch.Tensor], path: Path) -> None:
    try:
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path)
    except SafetensorError as problem:  # what the disk refused, too
        raise OSError(str(problem)) from None


def _build(code: Code, library: str) -> Build:
    target = Target(code.target["kind"], platform.machine(), code.target["mcpu"], tuple(code.target["features"]))
    return Build(target, library, {plan.symbol: _function(plan) for plan in code.plans})


def make_manifest(bound: BoundProgram, builds: Sequence[Build], options: Mapping[str, Any]) -> Manifest:
    """All that a loader must know; digests of the files are the writer's."""
    first, *others = builds
    config = bound.config.values
    longest = [spec.max_position or DEFAULT_POSITIONS for spec in bound.rope.values()]
    return Manifest(
        program=bound.program,
        family=bound.family,
        circuit=bound.circuit,
        target=first.target,
        model=Model(
            name=bound.model.path.name,
            config_digest=config_digest(bound.model.config.data),
            hidden_size=config["hidden_size"],
            vocab_size=config["vocab_size"],
            target_digest=config_digest(bound.model.target.config.data) if bound.model.target is not None else "",
        ),
        functions=first.functions,
        weights=bound.weight_specs(),
        rope={name: spec.to_json() for name, spec in bound.rope.items()},
        max_position=min([*longest, DEFAULT_POSITIONS]),
        library=first.library,
        others={build.target.mcpu: build for build in others},
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


def tool_versions() -> dict[str, str]:
    """Versions of what made the artifact."""
    versions = {"python": platform.python_version()}
    for package in ("circuitgraph", "apache-tvm", "apache-tvm-ffi", "torch"):
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            versions[package] = "unknown"
    return versions
