"""Mixtures of experts: variants that engines disagree on, other layouts of one checkpoint, routing by hand, costs."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from circuitgraph.checkpoint import bind, load_circuit
from circuitgraph.circuit.types import TensorType
from circuitgraph.errors import CheckpointError
from circuitgraph.ops import TABLE, OpContext, TypeRuleError
from circuitgraph.ops.moe import route_margin
from circuitgraph.pipeline import Run, plan_piece
from circuitgraph.plan.schedule import load_schedule
from tests.fixture_cases import FIXTURES, Cases, Interpreted, fixture_tensors

GLM, QWEN = FIXTURES / "glm4_moe_mtp", FIXTURES / "qwen3_next_mtp"
CONTEXT = OpContext("f32")


def cases_of(model: Path, tensors: str, prefix: str = "", **switches) -> Cases:
    bound = bind("auto", model=model, switches=switches)
    forward = Interpreted(bound.circuit, bound.load_weights(positions=64))
    return Cases(fixture_tensors(tensors), bound.circuit.states[0], forward, prefix)


@pytest.mark.parametrize(
    ("prefix", "switches"),
    [
        ("b_prenorm.", {"recycle": "pre_norm"}),
        ("b_mask0.", {"mask_first": True}),
        ("b_mask0_prenorm.", {"mask_first": True, "recycle": "pre_norm"}),
    ],
)
def test_glm_as_other_engines_run_it(prefix: str, switches: dict) -> None:
    def chain(cases: Cases):
        return map(torch.cat, zip(*cases.chain(cases.prefilled(), cases.context_rows(14)[13:], 4), strict=True))

    cases = cases_of(GLM, "glm4_moe_mtp", prefix, **switches)
    token, _, logits, hidden = chain(cases)
    assert token.tolist() == cases.want("tokens").tolist()
    cases.close(logits, "logits")
    cases.close(hidden, "recycled")
    *_, logits, hidden = chain(cases_of(GLM, "glm4_moe_mtp"))
    with pytest.raises(AssertionError):
        cases.close(logits, "logits")


def fused_checkpoint(folder: Path) -> Path:
    """The Qwen3-Next fixture as a Qwen3.5 MoE checkpoint: nested config, gate and up of all experts in one tensor."""
    folder.mkdir()
    config = json.loads((QWEN / "config.json").read_text())
    del config["norm_topk_prob"]
    config = {"model_type": "qwen3_5_moe", "text_config": {**config, "model_type": "qwen3_5_moe_text"}}
    (folder / "config.json").write_text(json.dumps(config))
    tensors: dict[str, torch.Tensor] = {}
    for shard in sorted(QWEN.glob("model-*.safetensors")):
        tensors.update(load_file(shard))
    experts = "mtp.layers.0.mlp.experts."
    stacks = {
        part: torch.stack([tensors.pop(f"{experts}{i}.{part}_proj.weight") for i in range(8)]) for part in ("gate", "up", "down")
    }
    tensors[f"{experts}gate_up_proj"] = torch.cat([stacks["gate"], stacks["up"]], 1)
    tensors[f"{experts}down_proj"] = stacks["down"]
    save_file(tensors, folder / "model.safetensors")
    return folder


def test_fused_experts_are_the_same_model(tmp_path: Path) -> None:
    model = fused_checkpoint(tmp_path / "m")
    assert bind("auto", model=model).family == "qwen3_5_moe_mtp"
    for case in ("b", "c", "d"):
        getattr(cases_of(model, "qwen3_next_mtp"), f"check_{case}")()
    weights = bind("auto", model=model).load_weights()
    assert weights["layer.ffn.gate"].shape == (8, 64, 64)


def test_experts_one_by_one_are_known_from_the_file(tmp_path: Path) -> None:
    """FP8 releases of Qwen3.5 MoE have them so."""
    model = shutil.copytree(QWEN, tmp_path / "m")
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**config, "model_type": "qwen3_5_moe_text"}))
    bound = bind("auto", model=model)
    assert (bound.family, bound.switches["experts"]) == ("qwen3_5_moe_mtp", "apart")
    weights, plain = bound.load_weights(), bind("auto", model=QWEN).load_weights()
    assert all(torch.equal(weights[name], tensor) for name, tensor in plain.items())


# -- loading -------------------------------------------------------------------------------------------------------


def damaged(folder: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> Path:
    shutil.copytree(GLM, folder)
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")
    return folder


EXPERT = "model.layers.2.mlp.experts."


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop(f"{EXPERT}5.up_proj.weight"), rf"{EXPERT}5.up_proj.weight: an expert lacks this tensor"),
        (lambda t: t.pop(f"{EXPERT}7.up_proj.weight"), r"expected \[8, 32, 64\]; got \[7, 32, 64\]"),
        (
            lambda t: t.update({f"{EXPERT}3.down_proj.weight": t[f"{EXPERT}3.down_proj.weight"].float()}),
            r"experts.3.down_proj.weight: experts differ; expected bf16\[64, 32\] as in 'model.layers.2.mlp.experts.0.down_proj",
        ),
        (lambda t: t.pop("model.layers.2.mlp.gate.e_score_correction_bias"), r"no tensor for weight 'layer.ffn.correction'"),
        (lambda t: t.update({"model.layers.2.mlp.gate.bias": torch.zeros(8)}), r"no weight of the program uses this tensor"),
    ],
)
def test_damaged_experts_are_refused(change, message: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=message):
        bind("auto", model=damaged(tmp_path / "m", change))


@pytest.mark.parametrize("name", ["glm4_moe_mtp", "deepseek_v3_mtp"])
@pytest.mark.parametrize("wt", ["bf16", "f16"])
def test_the_correction_is_not_rounded(name: str, wt: str) -> None:
    """Models keep it in fp32: near-ties between experts are closer than what bf16 rounds it by."""
    bound = bind("auto", model=FIXTURES / name, wt=wt)
    types = {weight.name: weight.type.dtype for weight in bound.circuit.weights}
    assert types.pop("layer.ffn.correction") == "f32"
    assert set(types.values()) == {wt}
    (row,) = (row for row in bound.report if row.weight == "layer.ffn.correction")
    assert row.reason == "kept in its own type"
    correction = bound.load_weights(positions=4)["layer.ffn.correction"]
    assert not torch.equal(correction, correction.bfloat16().float())
    assert torch.equal(correction, bind("auto", model=FIXTURES / name).load_weights(positions=4)["layer.ffn.correction"])


def test_the_correction_chooses_and_does_not_weigh(tmp_path: Path) -> None:
    """A correction of 100 for all changes nothing; one for a single expert changes the choice."""
    bias = "model.layers.2.mlp.gate.e_score_correction_bias"
    same = damaged(tmp_path / "same", lambda t: t.update({bias: t[bias] + 100}))
    cases_of(same, "glm4_moe_mtp").check_a()
    other = damaged(tmp_path / "other", lambda t: t.update({bias: t[bias] + torch.eye(8)[2] * 100}))
    with pytest.raises(AssertionError):
        cases_of(other, "glm4_moe_mtp").check_a()


@pytest.mark.parametrize(
    "weight", ["layer.ffn.shared.down_proj", "layer.ffn.shared_gate_vector", "layer.ffn.up", "layer.ffn.router"]
)
def test_every_part_matters(weight: str) -> None:
    cases = cases_of(QWEN, "qwen3_next_mtp")
    cases.forward.weights[weight] = cases.forward.weights[weight].flip(0) * 2
    with pytest.raises(AssertionError):
        cases.check_a()


# -- routing by hand -----------------------------------------------------------------------------------------------


def routed(scores: list[float], correction: list[float] | None = None, **attrs) -> tuple[list[int], list[float]]:
    """Sigmoid routing of one row whose scores are given."""
    logits = torch.tensor(scores).logit()
    args = [torch.ones(1, 1), logits[:, None]] + ([torch.tensor(correction)] if correction else [])
    given = {"top": 2, "scoring": "sigmoid", "renormalise": False, "factor": 1.0, "groups": 1, "kept": 1, **attrs}
    ids, share = TABLE["route"].reference(args, given, CONTEXT)
    return ids[0].tolist(), [round(value, 4) for value in share[0].tolist()]


def test_routing() -> None:
    assert routed([0.1, 0.8, 0.3, 0.6]) == ([1, 3], [0.8, 0.6])
    assert routed([0.1, 0.8, 0.3, 0.6], factor=2.5) == ([1, 3], [2.0, 1.5])
    assert routed([0.1, 0.8, 0.3, 0.2], renormalise=True) == ([1, 2], [0.7273, 0.2727])
    assert routed([0.1, 0.8, 0.3, 0.6], [1.0, 0.0, 0.0, 0.0]) == ([0, 1], [0.1, 0.8])
    assert routed([0.5, 0.5, 0.5, 0.5]) == ([0, 1], [0.5, 0.5]), "the lowest of equals"


def test_groups_are_judged_by_their_two_best() -> None:
    scores = [0.9, 0.1, 0.5, 0.6]
    assert routed(scores, groups=2, kept=1) == ([3, 2], [0.6, 0.5]), "1.0 against 1.1"
    assert routed(scores, groups=2, kept=2) == ([0, 3], [0.9, 0.6])
    assert routed(scores, [0.2, 0.0, 0.0, 0.0], groups=2, kept=1) == ([0, 1], [0.9, 0.1])
    # Experts of dropped groups are not chosen even where all that is left scores below 0 with its correction.
    assert routed(scores, [-2.0] * 4, groups=2, kept=1)[0] == [3, 2]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"top": 9}, "cannot choose 9 experts"),
        ({"groups": 3}, "8 experts do not split into 3 groups"),
        ({"groups": 4, "kept": 5}, "cannot keep 5 of 4 groups"),
        ({"groups": 4, "kept": 1, "top": 3}, "cannot choose 3 experts"),
    ],
)
def test_routes_that_are_refused(change: dict, message: str) -> None:
    given = {"top": 2, "scoring": "sigmoid", "renormalise": False, "factor": 1.0, "groups": 1, "kept": 1, **change}
    with pytest.raises(TypeRuleError, match=message):
        TABLE["route"].infer([TensorType("f32", (3, 4)), TensorType("bf16", (8, 4))], given, CONTEXT)


# -- plans ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("target", ["cpu", "cuda:sm_90a"])
@pytest.mark.parametrize("rows", [1, 2, 64])
def test_only_activated_experts_count(rows: int, target: str) -> None:
    circuit = load_circuit("mtp_moe")  # 32 experts, 10 a row
    plan = plan_piece(Run(), circuit, "draft", rows, target, load_schedule(target.partition(":")[0]), stop_after="fuse")
    group = next(group for group in plan.groups if any(node.op == "experts" for node in group.nodes))
    expert = 3 * 2048 * 512 * 2
    moved = plan.cost(group, 0).bytes
    assert moved >= min(32, 10 * rows) * expert
    assert moved < min(32, 10 * rows) * expert + 16 * 2**20


@pytest.mark.parametrize("scoring", ["softmax", "sigmoid"])
@pytest.mark.parametrize("groups", [1, 4])
@pytest.mark.parametrize("corrected", [False, True])
def test_a_margin_is_what_a_choice_stands(scoring, groups, corrected):
    """Logits that change by less than it leave the choice as it is; a change of a few margins does not, for most rows."""
    attrs = {"top": 3, "scoring": scoring, "renormalise": True, "factor": 1.0, "groups": groups, "kept": (groups + 1) // 2}
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(64, 24, generator=generator)
    extra = [0.1 * torch.randn(24, generator=generator)] if corrected else []
    route = TABLE["route"]

    def chosen(logits):
        return route.reference([logits, torch.eye(24), *extra], attrs, CONTEXT)[0].sort(-1).values

    margin = (route_margin([x, torch.eye(24), *extra], attrs) * x.std(-1))[:, None]
    changed = torch.zeros(64, dtype=torch.bool)
    for _ in range(50):
        sign = torch.randint(0, 2, x.shape, generator=generator) * 2.0 - 1
        assert torch.equal(chosen(x + 0.99 * margin * sign), chosen(x))
        changed |= (chosen(x + 6 * margin * sign) != chosen(x)).any(-1)
    assert changed.sum() > 32
