"""`verify` fails for every kind of wrong program, and when its own control sees nothing."""

from __future__ import annotations

import json

import pytest
import torch

import circuitgraph
from circuitgraph.artifact import read_artifact
from circuitgraph.measure import verify as module
from circuitgraph.measure.weights import bind_where_recorded

CALL = module.call_function


def _off_by_little(function, made, inputs, caches):
    made["next_hidden"][0, 3] += 1e-3


def _another_token(function, made, inputs, caches):
    made["draft"][:] = (made["draft"] + 1) % 96


def _unwritten_output(function, made, inputs, caches):
    made["logprob"][-1] = float("nan")


def _foreign_row(function, made, inputs, caches):
    caches["kv"].v[0, -1, 0, 0, 0] = 1.0


def _missing_row(function, made, inputs, caches):
    cache = caches["kv"]
    cache.k[:, cache.slot[0] // cache.block_size, :, cache.slot[0] % cache.block_size] = 0.0


def _sees_its_neighbour(function, made, inputs, caches):
    made["next_hidden"] += 1e-7 * inputs["hidden"].sum()


@pytest.mark.parametrize(
    ("sabotage", "check"),
    [
        (_off_by_little, "next_hidden"),
        (_another_token, "draft"),
        (_unwritten_output, "logprob"),
        (_foreign_row, "kv rest"),
        (_missing_row, "kv rows"),
        (_sees_its_neighbour, "isolated"),
    ],
)
def test_a_wrong_program_fails(run, artifact, monkeypatch, sabotage, check):
    def call(function, code, *, inputs, caches, weights):
        made = CALL(function, code, inputs=inputs, caches=caches, weights=weights)
        if function.entry == "draft":
            sabotage(function, made, inputs, caches)
        return made

    monkeypatch.setattr(module, "call_function", call)
    result = run("verify", artifact, "--json")
    assert result.exit_code == 1
    failed = {item["name"] for item in json.loads(result.stdout)["checks"] if not item["passed"]}
    assert check in failed
    assert "FAILED" in run("verify", artifact).stdout


def test_a_control_that_sees_nothing_fails(run, artifact, monkeypatch):
    monkeypatch.setattr(module, "PERTURBATION", 0.0)
    result = run("verify", artifact, "--json")
    assert result.exit_code == 1
    report = json.loads(result.stdout)
    assert all(check["passed"] for check in report["checks"])
    assert report["controls"] == []


def _controls(config_file, tmp_path, change):
    """Verify with some weights changed."""
    out = tmp_path / "head.cg"
    circuitgraph.compile("auto", model=config_file, out=out, widths=(1,), entries=["draft"])
    weights = bind_where_recorded(read_artifact(out), model=None, target_model=None, weights=None)
    return module.verify(out, weights={**weights, **change(weights)})


def test_a_weight_that_is_zero_is_perturbed_all_the_same(config_file, tmp_path):
    report = _controls(config_file, tmp_path, lambda weights: {"fc": torch.zeros_like(weights["fc"])})
    assert report.passed
    assert "fc" in {control.weight for control in report.controls}


def test_a_weight_without_influence_is_passed_over(config_file, tmp_path):
    report = _controls(config_file, tmp_path, lambda weights: {"enorm": torch.zeros_like(weights["enorm"])})
    assert report.passed
    assert len(report.controls) == module.CONTROL_WEIGHTS
    assert "embed_tokens" not in {control.weight for control in report.controls}


def test_a_program_that_ignores_its_weights_fails(config_file, tmp_path, monkeypatch):
    """The reference moves and the program does not."""
    out = tmp_path / "head.cg"
    circuitgraph.compile("auto", model=config_file, out=out, widths=(1,), entries=["draft"])
    right = bind_where_recorded(read_artifact(out), model=None, target_model=None, weights=None)
    monkeypatch.setattr(module, "call_function", lambda *args, weights, **others: CALL(*args, weights=right, **others))
    report = module.verify(out)
    assert not report.passed
    assert len(report.controls) == module.CONTROL_WEIGHTS
    assert not any(control.passed for control in report.controls)
