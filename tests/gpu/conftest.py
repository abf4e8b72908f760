"""GPU tests: `pytest tests/gpu --artifacts build/gpu --record FILE`, after `python -m tests.gpu.pack build/gpu`.

Without a GPU, or without artifacts, everything here is skipped. They need torch, tvm-ffi, pytest and safetensors beside the
package; no compiler.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from tests.gpu import calls


def pytest_addoption(parser):
    parser.addoption("--artifacts", default=None, help="folder that tests.gpu.pack filled")
    parser.addoption("--record", default=None, help="where to write what passed, with digests of the generated CUDA")


def pytest_configure(config):
    calls.ARTIFACTS = config.getoption("--artifacts", default=None)


def artifacts_of(config) -> list[Path]:
    folder = config.getoption("--artifacts", default=None)
    if folder is None or not torch.cuda.is_available():
        return []
    return sorted(path.parent for path in Path(folder).glob("*/manifest.json"))


def pytest_generate_tests(metafunc):
    """`artifact`: every artifact; `program`: every (artifact, entry, rows)."""
    folders = artifacts_of(metafunc.config)
    reason = pytest.mark.skip(reason="needs a GPU and --artifacts")
    if "program" in metafunc.fixturenames:
        programs = []
        for folder in folders:
            for symbol, function in json.loads((folder / "manifest.json").read_text())["functions"].items():
                programs.append(pytest.param((folder, function["entry"], function["rows"]), id=f"{folder.name}-{symbol}"))
        metafunc.parametrize("program", programs or [pytest.param(None, marks=reason)])
    elif "artifact" in metafunc.fixturenames:
        metafunc.parametrize("artifact", [pytest.param(f, id=f.name) for f in folders] or [pytest.param(None, marks=reason)])


@pytest.fixture(scope="session")
def runners():
    """Loads every artifact once."""
    from circuitgraph.runtime import load

    loaded = {}

    def get(folder: Path):
        if folder not in loaded:
            from tests.fixture_cases import FIXTURES

            model = FIXTURES / folder.name.removeprefix("fixture_")
            own = folder.name.startswith("fixture_")
            target = model / "target" if (model / "target").is_dir() else None
            loaded[folder] = load(folder, model=model if own else None, target_model=target if own else None)
        return loaded[folder]

    return get


_outcomes: dict[str, str] = {}


def pytest_runtest_logreport(report):
    if report.when == "call" or report.outcome != "passed":
        _outcomes[report.nodeid.partition("tests/gpu/")[2]] = report.outcome


def pytest_sessionfinish(session):
    """An artifact is recorded, with the digests of its programs, when no test that names it has failed."""
    target = session.config.getoption("--record", default=None)
    if target is None:
        return
    failed = {test.partition("[")[2].partition("-")[0].rstrip("]") for test, outcome in _outcomes.items() if outcome == "failed"}
    facts = {
        folder.name: json.loads((folder.parent / f"{folder.name}.digests.json").read_text())
        for folder in artifacts_of(session.config)
        if folder.name not in failed and any(f"[{folder.name}-" in test for test in _outcomes)
    }
    record = {
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "tests": dict(sorted(_outcomes.items())),
        "inputs": {name: fact["inputs"] for name, fact in facts.items()},
        "programs": {name: fact["programs"] for name, fact in facts.items()},
    }
    Path(target).write_text(json.dumps(record, indent=1) + "\n")
