"""GPU tests: `pytest tests/gpu --artifacts build/gpu --record FILE`, after `python -m tests.gpu.pack build/gpu`.

Without a GPU, or without artifacts, everything here is skipped. They need torch, tvm-ffi, pytest, hypothesis and safetensors
beside the package; no compiler. `expected` says which tests a record must have.
"""

from __future__ import annotations

import datetime
import json
from pathlib import Path

import pytest
import torch

from tests.gpu import calls, expected


def pytest_addoption(parser):
    parser.addoption("--artifacts", default=None, help="folder that tests.gpu.pack filled")
    parser.addoption("--record", default=None, help="where to write what passed, with digests of the generated CUDA")


def pytest_configure(config):
    calls.ARTIFACTS = config.getoption("--artifacts", default=None)


def artifacts_of(config) -> dict[Path, expected.Functions]:
    folder = config.getoption("--artifacts", default=None)
    if folder is None or not torch.cuda.is_available():
        return {}
    found = {}
    for file in sorted(Path(folder).glob("*/manifest.json")):
        if file.parent.name not in expected.BENCHED:
            functions = json.loads(file.read_text())["functions"]
            found[file.parent] = {symbol: (function["entry"], function["rows"]) for symbol, function in functions.items()}
    return found


def pytest_generate_tests(metafunc):
    """`artifact`, `golden`, `small`: folders of artifacts. `program`, `product`, `mixture`, `direct`: (folder, entry, rows);
    `entry`: (folder, entry)."""
    for fixture in expected.FIXTURES:
        if fixture in metafunc.fixturenames:
            values = [
                pytest.param((folder, *more) if more else folder, id=name)
                for folder, functions in artifacts_of(metafunc.config).items()
                for name, more in expected.units(fixture, folder.name, functions)
            ]
            reason = pytest.mark.skip(reason="needs a GPU and --artifacts")
            metafunc.parametrize(fixture, values or [pytest.param(None, marks=reason)])


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
        name = report.nodeid.rpartition("tests/gpu/")[2]
        if _outcomes.get(name) != "failed":  # whichever part of it failed
            _outcomes[name] = report.outcome


def pytest_sessionfinish(session):
    """An artifact is recorded, with the digests of its programs, when all its tests ran and none that names it failed."""
    target = session.config.getoption("--record", default=None)
    if target is None:
        return
    from circuitgraph.measure.gpu import describe_gpu

    artifacts = artifacts_of(session.config)
    names = expected.recorded(_outcomes, {folder.name: functions for folder, functions in artifacts.items()})
    facts = {
        folder.name: json.loads((folder.parent / f"{folder.name}.digests.json").read_text())
        for folder in artifacts
        if folder.name in names
    }
    machine = describe_gpu({})
    record = {
        "device": machine["device"],
        "driver": machine["driver"],
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "tests": dict(sorted(_outcomes.items())),
        "inputs": {name: fact["inputs"] for name, fact in facts.items()},
        "programs": {name: fact["programs"] for name, fact in facts.items()},
    }
    Path(target).write_text(json.dumps(record, indent=1) + "\n")
