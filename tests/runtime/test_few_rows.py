"""Products of a few rows the other way round: the same numbers, every shape, and what is left alone."""

from __future__ import annotations

import pytest
import torch

from circuitgraph.runtime.integrations.few_rows import MOST_ROWS, FewRowsLinear, use_few_rows_linear


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(1, 24), (2, 24), (1, 4, 24), (2, 3, 24), (1, MOST_ROWS, 24), (1, 8, 24), (0, 24), (24,)])
def test_equals_linear(shape, bias):
    layer = torch.nn.Linear(24, 33, bias=bias)
    x = torch.randn(shape)
    want = layer(x)
    assert use_few_rows_linear(layer) == 1
    got = layer(x)
    assert type(layer) is FewRowsLinear
    assert got.is_contiguous()
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6)


def test_rows_in_between_take_the_other_way(monkeypatch):
    layer = FewRowsLinear(8, 8)
    taken = []
    monkeypatch.setattr(torch, "mm", lambda a, b: taken.append(b.shape[1]) or a @ b)
    for rows in (1, 2, MOST_ROWS, MOST_ROWS + 1):
        layer(torch.randn(rows, 8))
    assert taken == [2, MOST_ROWS]


def test_other_layers_are_left_alone():
    class Own(torch.nn.Linear):
        pass

    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4).to(torch.bfloat16), Own(4, 4), torch.nn.ReLU())
    weight = model[0].weight
    assert use_few_rows_linear(model) == 1
    assert model[0].weight is weight
    assert [type(layer) for layer in model] == [FewRowsLinear, torch.nn.Linear, Own, torch.nn.ReLU]
