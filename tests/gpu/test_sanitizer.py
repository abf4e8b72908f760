"""The small artifacts under NVIDIA's compute-sanitizer, where it is installed: no access out of bounds, no race."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.gpu.calls import artifact_folder

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("tool", ["memcheck", "racecheck"])
def test_sanitizer_finds_nothing(small, tool):
    check(small, tool)


@pytest.mark.parametrize("tool", ["memcheck", "racecheck"])
@pytest.mark.parametrize("name", ["mixture_nvfp4", "direct_dflash"])
def test_sanitizer_finds_nothing_in_experts_and_blocks(name, tool):
    check(artifact_folder(name), tool)


def check(folder: Path, tool: str) -> None:
    sanitizer = shutil.which("compute-sanitizer") or shutil.which("/usr/local/cuda/bin/compute-sanitizer")
    if sanitizer is None:
        pytest.skip("compute-sanitizer is not installed")
    command = [sanitizer, "--tool", tool, "--error-exitcode", "9", sys.executable, "-m", "tests.gpu.sanitized", str(folder)]
    made = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=500, check=False)
    report = (made.stdout + made.stderr)[-3000:]
    assert made.returncode == 0, report
    assert "ERROR SUMMARY: 0 errors" in report or "RACECHECK SUMMARY: 0 hazards" in report, report
