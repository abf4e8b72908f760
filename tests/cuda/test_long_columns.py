"""Products over columns that sixteen warps cannot share evenly: streamed all the same, not left to the plain kernel."""

from __future__ import annotations

import pytest

from circuitgraph.language import Bindings, load_program, resolve
from tests.cuda.test_emit import ALIGNED, plan_of


def choice_of(plan, columns):
    """Of the product over so many columns."""
    (choice,) = [
        choice
        for group, choice in zip(plan.groups, plan.choices, strict=True)
        if group.pattern == "project" and any(columns in plan.circuit.types[name].shape for name in group.anchors[0].inputs)
    ]
    return choice


@pytest.mark.parametrize("rows", [1, 8, 9, 16])
@pytest.mark.parametrize("columns", [12288, 14336, 17408, 25600, 28672])
def test_real_models_columns_are_streamed(columns, rows):
    """Of more than eight rows where there is no wgmma."""
    arch, sizes = "sm_90a" if rows <= 8 else "sm_100", {**ALIGNED, "intermediate_size": columns}
    plan = plan_of(resolve(load_program("mtp_dense"), Bindings(sizes, {}, act="bf16", wt="bf16", kv="bf16")), rows, arch=arch)
    choice = choice_of(plan, columns)
    assert choice.kernel == "cuda.linear_stream"
    assert dict(choice.params)["warps"] == (8 if columns == 17408 and rows > 8 else 16)
