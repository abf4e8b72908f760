"""What a call has to move and to multiply, counted from circuits."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from circuitgraph.checkpoint import load_circuit, load_family
from circuitgraph.measure.bench import cost_at
from circuitgraph.pipeline import Run, plan_piece
from circuitgraph.plan.schedule import load_schedule
from circuitgraph.plan.text import CONTEXT_FOR_COST


def plan_of(family: str, rows: int):
    circuit = load_circuit(load_family(family).file.program, family=family)
    return circuit, plan_piece(Run(), circuit, "draft", rows, "cpu", load_schedule("cpu"))


@pytest.mark.parametrize(("family", "rows"), [("llama_mtp", 3), ("deepseek_v3_mtp", 2), ("dflash_qwen3", 32)])
def test_cost_follows_the_context_in_every_kind_of_attention(family, rows):
    circuit, plan = plan_of(family, rows)
    recorded = [plan.cost(group, CONTEXT_FOR_COST) for group in plan.groups]
    counts = {"cost_bytes": sum(cost.bytes for cost in recorded), "cost_flops": sum(cost.flops for cost in recorded)}
    for context in (0, 20, 5000):
        wanted = [plan.cost(group, context) for group in plan.groups]
        cost = cost_at(SimpleNamespace(circuit=circuit), SimpleNamespace(entry="draft", rows=rows, **counts), context)
        assert (cost.bytes, cost.flops) == (sum(item.bytes for item in wanted), sum(item.flops for item in wanted))


@pytest.mark.parametrize(
    ("family", "rows", "sequences"), [("llama_mtp", 3, 3), ("deepseek_v3_mtp", 2, 2), ("dflash_qwen3", 32, 2)]
)
def test_a_cache_row_is_read_once_a_sequence(family, rows, sequences):
    circuit, plan = plan_of(family, rows)
    here, there = (sum(plan.cost(group, context).bytes for group in plan.groups) for context in (100, 101))
    (state,) = circuit.states
    assert there - here == sequences * state.bytes_per_row()
