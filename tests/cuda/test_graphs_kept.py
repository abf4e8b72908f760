"""Which CUDA graphs a runner drops when it has too many: those that were used longest ago, whichever way they are reached.

No GPU: what graphs do is left out, what is kept of them is real.
"""

from __future__ import annotations

import contextlib
from collections import Counter, OrderedDict
from types import SimpleNamespace

import pytest
import torch

from circuitgraph.runtime import cuda
from circuitgraph.runtime.cuda import CudaRunner
from circuitgraph.runtime.kinds import Heads


class Recorded:
    """Stands in for `_Chain` and `AtOnce`."""

    newest = None

    def __init__(self, *args: object) -> None:
        self.args = args

    def run(self, *args: object) -> dict[str, torch.Tensor]:
        return {}


@pytest.fixture
def runner(monkeypatch) -> CudaRunner:
    made = object.__new__(CudaRunner)
    key = staticmethod(cuda.AtOnce.key)
    monkeypatch.setattr(cuda, "MOST_GRAPHS", 3)
    monkeypatch.setattr(cuda, "_Chain", Recorded)
    monkeypatch.setattr(cuda, "AtOnce", type("AtOnce", (Recorded,), {"key": key}))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    made._graphs, made._routes, made.paths = OrderedDict(), {}, Counter()
    made.circuit, made.recorder, made.device = SimpleNamespace(name="p", act="f32", entries=()), None, torch.device("cpu")  # type: ignore
    made.__dict__.update(kind=Heads(2), hidden_size=4, _device=contextlib.nullcontext)
    made.__dict__.update(_count=lambda entry, n: None, _path=lambda entry, n: "n-row")
    made.__dict__["_parts"] = lambda entry, n: [(SimpleNamespace(rows=n, spec=SimpleNamespace(symbol=f"{entry}_{n}")), 0, n)]
    return made


def test_of_drafts_at_once(runner: CudaRunner) -> None:
    def call(rows: int) -> object:
        runner._at_once("draft", 2, None, torch.zeros(rows, 4), None, {}, None)
        return runner.newest

    first, second, third = call(1), call(2), call(3)
    assert call(1) is first, "used again"
    call(4)
    assert call(1) is first, "so it is not the one that goes"
    assert call(3) is third
    assert call(2) is not second


def test_of_chains_that_are_reached_by_a_route(runner: CudaRunner) -> None:
    storage = {"kv": (torch.zeros(1, 2, 1, 4, 4), torch.zeros(1, 2, 1, 4, 4))}

    def call(rows: int) -> object:
        return runner._route("draft", 2, rows, 4, storage).parts[0][0]

    first, second, third = call(1), call(2), call(3)
    assert call(1) is first
    assert len(runner._graphs) == len(runner._routes) == 3
    call(4)
    assert call(1) is first
    assert call(3) is third
    assert call(2) is not second
    assert len(runner._graphs) == 3
