"""`verify` fails for every kind of wrong program, and when its own control sees nothing."""

from __future__ import annotations

import json

import pytest

from circuitgraph.measure import verify as module

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
    assert not any(control["passed"] for control in report["controls"])
