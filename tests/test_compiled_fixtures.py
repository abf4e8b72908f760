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
from tests.fixture_cases import FIXTURES, Cases, cases_class, fixture_tensors, target_of
from tests.test_fixtures import MAIN
from tests.test_fixtures import NAMES as GROUPED
from tests.test_moe import fused_checkpoint

FUSED = "qwen3_5_moe_mtp"
"""The Qwen3-Next fixture in another layout, with the same cases."""
NAMES = (*GROUPED, "deepseek_v3_mtp", FUSED)
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
def models(tmp_path_factory):
    """The checkpoint of each fixture."""
    fused = fused_checkpoint(tmp_path_factory.mktemp("fused") / "model")
    return {name: fused if name == FUSED else FIXTURES / name for name in NAMES}


@pytest.fixture(scope="module")
def artifacts(models, tmp_path_factory):
    """Each family compiled once, under the switches of its fixture's main cases."""
    folder = tmp_path_factory.mktemp("artifacts")

    @cache
    def compiled(name: str):
        path = folder / name
        circuitgraph.compile(
            "auto",
            model=models[name],
            target_model=target_of(name),
            out=path,
            widths=WIDTHS,
            context_rows=(4,),
            entries=["draft", "context", "logits"],
            switches=MAIN.get(name),
        )
        return path

    return compiled


@pytest.fixture
def cases(models, artifacts):
    """The cases of a fixture against its artifact."""

    def made(name: str) -> Cases:
        model = {"model": models[name], "target_model": target_of(name)}
        runner = circuitgraph.load(artifacts(name), **model, max_position=64, threads=2)
        tensors = fixture_tensors("qwen3_next_mtp" if name == FUSED else name)
        return cases_class(name)(tensors, runner.circuit.states[0], Run(runner))

    return made


@pytest.mark.parametrize("case", ["a", "b", "c", "d", "d_without_overwrite"])
@pytest.mark.parametrize("name", NAMES)
def test_cases(name: str, case: str, cases) -> None:
    of = cases(name)
    if case == "d_without_overwrite" and "d.logits_if_no_overwrite" not in of.tensors:
        pytest.skip("this fixture has no such case")
    getattr(of, f"check_{case}")()


PARTS = ("attn.k_proj", "attn.kv_a_proj", "attn.kv_b_proj", "ffn.router", "ffn.down", "ffn.up")
"""What a control perturbs, of each layer that has it."""


@pytest.mark.parametrize("name", NAMES)
def test_a_wrong_weight_is_seen(name: str, cases) -> None:
    """The control: one perturbed weight must fail the same case."""
    of = cases(name)
    runner = of.forward.runner
    changed = [weight for weight in runner.weights if weight.endswith(PARTS)]
    assert changed
    for weight in changed:
        right = runner.weights[weight]
        runner.rebind({weight: (right.float() * 1.1).to(right.dtype)})
        with pytest.raises(AssertionError):
            of.check_a()
        runner.rebind({weight: right})
    of.check_a()


@pytest.mark.parametrize("name", ["qwen3_dense_mtp", "qwen3_next_mtp", "deepseek_v3_mtp"])
def test_unequal_sequences_in_one_program(name: str, cases) -> None:
    """Case c drafts three sequences of unequal context in one three-row program, not one by one."""
    of = cases(name)
    runner = of.forward.runner
    assert runner.serves(3) == "n-row"
    of.check_c()
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
