"""Does an artifact's code run on this machine, and which part of it?"""

from __future__ import annotations

import platform
from pathlib import Path

import torch

from ..errors import ArtifactError, Fault
from .manifest import Manifest, Target


def machine_features() -> frozenset[str] | None:
    """Instruction sets of this machine's CPU by LLVM's names (as far as they matter here), None where unknown."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return None
    flags = next((line.partition(":")[2] for line in lines if line.startswith(("flags", "Features"))), None)
    # The kernel writes sse4_2 where LLVM writes sse4.2; the other names are the same.
    return None if flags is None else frozenset(name.replace("sse4_", "sse4.") for name in flags.split())


def check_target(target: Target, where: str) -> None:
    """Raises ArtifactError when code for `target` cannot run on this machine. Whether the GPU fits, `check_device` tells."""
    if target.kind != "cpu" and not (target.kind == "cuda" and torch.cuda.is_available()):
        hint = "Compile for the CPU here, or load it where that device is."
        raise ArtifactError(Fault(f"was compiled for '{target.kind}'", where=where, subject="target", expected="cpu", hint=hint))
    here = platform.machine()
    if target.arch != here:
        message = "was compiled for another architecture"
        raise ArtifactError(Fault(message, where=where, subject="target.arch", expected=here, got=target.arch))
    have = machine_features()
    missing = [] if have is None else [name for name in target.features if name not in have]
    if missing:
        raise ArtifactError(
            Fault(
                f"was compiled for '{target.mcpu}', and this CPU lacks {', '.join(missing)}",
                where=where,
                subject="target.features",
                hint="Compile on this machine, or with a portable mcpu.",
            )
        )


def runs_on(mcpu: str, capability: tuple[int, int]) -> bool:
    """Does code for `sm_90a`, `sm_80`, ... run on a GPU of that compute capability?"""
    number = int(mcpu.removeprefix("sm_").rstrip("a"))
    major, minor = capability
    # An `a` architecture is that one alone; others run on later minor versions of the same major one, too.
    return number == 10 * major + minor if mcpu.endswith("a") else number // 10 == major and number % 10 <= minor


def built_for_gpu(manifest: Manifest, device: torch.device | None = None) -> Manifest:
    """`manifest` with the code that runs on the GPU, the closest there is, in front; as it was where none does."""
    capability = torch.cuda.get_device_capability(device)
    fitting = [mcpu for mcpu in manifest.builds if runs_on(mcpu, capability)]
    return manifest.of(max(fitting)) if fitting else manifest  # sm_89 before sm_80: they sort as text


def check_device(manifest: Manifest, device: torch.device, where: str) -> None:
    """Raises ArtifactError when the GPU cannot run the code in front."""
    names = ", ".join(manifest.builds)
    if not torch.cuda.is_available():
        hint = "Load it on a machine with a GPU and a CUDA build of torch."
        raise ArtifactError(Fault(f"was compiled for {names}, and there is no GPU here", where=where, hint=hint))
    major, minor = torch.cuda.get_device_capability(device)
    if not runs_on(manifest.target.mcpu, (major, minor)):
        here = f"sm_{major}{minor} ({torch.cuda.get_device_name(device)})"
        hint = f"Compile again and name this GPU's architecture in --target, beside others: cuda:{','.join(manifest.builds)},..."
        raise ArtifactError(
            Fault("was compiled for another GPU", where=where, subject="target", expected=here, got=names, hint=hint)
        )
