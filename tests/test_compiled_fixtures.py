"""Compiled CPU code against values that other people's code computed: the same cases as the reference interpreter."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import pytest
import torch

import circuitgraph
from circuitgraph.checkpoint import bind
from circuitgraph.errors import CheckpointError
from circuitgraph.runtime import DraftRunner, ReferenceRunner
from tests.fixture_cases import FIXTURES, Cases, fixture_tensors, target_of
from tests.test_fixtures import COMPILED as NAMES
from tests.test_fixtures import MAIN

WIDTHS = (1, 3)


@dataclass(frozen=True)
class Run:
    """A runner as a `fixture_cases.Forward`."""

    runner: DraftRunner

    def draft(self, rows):
        return self.runner.draft(rows.token, rows.hidden, rows.position, {"kv": rows.kv})

    def logits(self, rows):
        return self.runner.logits(rows.token, rows.hidden, rows.position, {"kv": rows.kv})

    def context(self, rows):
        self.runner.context(rows.token, rows.hidden, rows.position, {"kv": rows.kv})


@pytest.fixture(scope="module")
def artifacts(tmp_path_factory):
    """Each family compiled once, under the switches of its fixture's main cases."""
    folder = tmp_path_factory.mktemp("artifacts")

    @cache
    def compiled(name: str):
        path = folder / name
        circuitgraph.compile(
            "auto",
            model=FIXTURES / name,
            target_model=target_of(name),
            out=path,
            widths=WIDTHS,
            context_rows=(4,),
            entries=["draft", "context", "logits"],
            switches=MAIN.get(name),
        )
        return path

    return compiled


def load(path, name: str) -> DraftRunner:
    return circuitgraph.load(path, model=FIXTURES / name, target_model=target_of(name), max_position=64, threads=2)


@pytest.mark.parametrize("case", ["a", "b", "c", "d", "d_without_overwrite"])
@pytest.mark.parametrize("name", NAMES)
def test_cases(name: str, case: str, artifacts) -> None:
    runner = load(artifacts(name), name)
    tensors = fixture_tensors(name)
    if case == "d_without_overwrite" and "d.logits_if_no_overwrite" not in tensors:
        pytest.skip("this fixture has no such case")
    getattr(Cases(tensors, runner.circuit.states[0], Run(runner)), f"check_{case}")()


@pytest.mark.parametrize("name", NAMES)
def test_a_wrong_weight_is_seen(name: str, artifacts) -> None:
    """The control: one perturbed weight must fail the same case."""
    runner = load(artifacts(name), name)
    k_proj = next(weight for weight in runner.weights if weight.endswith("attn.k_proj"))
    runner.rebind({k_proj: (runner.weights[k_proj].float() * 1.05).to(runner.weights[k_proj].dtype)})
    with pytest.raises(AssertionError):
        Cases(fixture_tensors(name), runner.circuit.states[0], Run(runner)).check_a()


def test_unequal_sequences_in_one_program(artifacts) -> None:
    """Case c drafts three sequences of unequal context in one three-row program, not one by one."""
    runner = load(artifacts("qwen3_dense_mtp"), "qwen3_dense_mtp")
    assert runner.serves(3) == "n-row"
    Cases(fixture_tensors("qwen3_dense_mtp"), runner.circuit.states[0], Run(runner)).check_c()
    assert runner.paths["n-row"] > 0
    assert runner.paths["split"] == 0


def test_an_artifact_refuses_another_model(artifacts) -> None:
    with pytest.raises(CheckpointError, match="not the model that the artifact was compiled for"):
        circuitgraph.load(artifacts("qwen3_dense_mtp"), model=FIXTURES / "mimo_mtp")


def test_loaded_weights_are_borrowed(artifacts) -> None:
    """The host's own lm_head is used where it lies: a change of its bytes changes the drafts without rebinding."""
    bound = bind("auto", model=FIXTURES / "qwen3_dense_mtp")
    weights = {name: tensor.clone() for name, tensor in bound.load_weights(positions=64).items()}
    runner = circuitgraph.load(artifacts("qwen3_dense_mtp"), weights=weights)
    reference = ReferenceRunner(runner.circuit, weights)
    from tests.circuits import random_cache, random_inputs

    generator = torch.Generator().manual_seed(3)
    cache = random_cache(runner.circuit, [5], generator)
    inputs = random_inputs(runner.circuit, 1, generator)
    call = (inputs["token"], inputs["hidden"], inputs["position"], {"kv": cache})
    first = runner.logits(*call)[0]
    weights["lm_head"].copy_(weights["lm_head"].roll(1, 0))
    torch.testing.assert_close(runner.logits(*call)[0], first.roll(1, 1))
    torch.testing.assert_close(runner.logits(*call)[0], reference.logits(*call)[0], rtol=1e-4, atol=1e-4)
