"""The comparisons see what they are for."""

import pytest
import torch

from circuitgraph.measure.cases import Span, make_case
from circuitgraph.measure.compare import compare_caches, compare_outputs, compare_same_bits, error_of
from tests.circuits import small_mtp

F32 = torch.float32


def test_errors_are_relative_to_large_values_and_absolute_to_small_ones():
    assert error_of(torch.tensor([1.0, 2.5]), torch.tensor([1.0, 2.0])) == pytest.approx(0.5 / 2.5**0.5)
    assert error_of(torch.tensor([0.1]), torch.tensor([0.0])) == pytest.approx(0.1)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_what_is_not_a_number_is_never_close(value):
    assert error_of(torch.tensor([value]), torch.tensor([1.0])) == float("inf")
    assert error_of(torch.tensor([1.0]), torch.tensor([value])) == float("inf")


def test_shapes_must_agree():
    assert error_of(torch.zeros(2), torch.zeros(3)) == float("inf")


def _tokens(made, logits):
    wanted = {"draft": torch.tensor(logits).argmax(-1).int(), "logits": torch.tensor(logits)}
    return dict(compare_outputs({"draft": torch.tensor(made, dtype=torch.int32)}, wanted, len(made), F32))["draft"]


def test_a_token_that_nearly_ties_is_no_error():
    assert _tokens([1], [[1.0, 0.99999, 0.0]]).error < 1e-4
    assert _tokens([2], [[1.0, 0.99999, 0.0]]).error == pytest.approx(1.0)


@pytest.mark.parametrize("token", [-1, 3])
def test_a_token_that_does_not_exist_is_an_error(token):
    assert _tokens([token], [[1.0, 0.5, 0.0]]).error == float("inf")


def test_idle_rows_are_not_compared():
    made = {"y": torch.tensor([1.0, float("nan")])}
    assert dict(compare_outputs(made, {"y": torch.ones(2)}, 1, F32))["y"].error == 0


@pytest.fixture
def case():
    return make_case(small_mtp(), 3, [Span(4), Span(0, start=1)], block_size=4, generator=torch.Generator().manual_seed(0))


def test_cases_address_what_they_say(case):
    cache = case.caches["kv"]
    assert (case.live, case.rows) == (2, 3)
    assert cache.length.tolist() == [5, 2, 0]
    assert cache.slot.tolist()[2] == -1
    blocks = [*cache.table[:, 0].tolist(), int(cache.table[0, 1])]
    assert len(set(blocks)) == 3
    seen = cache.k[:, cache.table[0, 0].long()]
    assert not seen.isnan().any()
    assert cache.k[:, cache.table[1, 0].long()].isnan().all()


def test_a_written_row_must_be_right_and_nothing_else_may_change(case):
    wanted = case.copy_caches()
    slot = case.caches["kv"].slot[:2].long()
    for name in ("k", "v"):
        getattr(wanted["kv"], name)[:, slot // 4, :, slot % 4] = 1.0
    right = {name: type(cache)(**{**vars(cache), "k": cache.k.clone()}) for name, cache in wanted.items()}
    assert {name: c.error for name, c in compare_caches(case, right, wanted)} == {"kv rows": 0, "kv rest": 0}
    right["kv"].k[0, case.caches["kv"].table[0, 0].long(), 0, 0, 0] += 1
    assert dict(compare_caches(case, right, wanted))["kv rest"].error == 1
    unwritten = dict(compare_caches(case, case.copy_caches(), wanted))
    assert unwritten["kv rows"].error == float("inf")


def test_the_smallest_difference_in_bits_is_seen():
    a = torch.tensor([[1.0], [2.0]])
    b = torch.tensor([[1.0], [torch.nextafter(torch.tensor(2.0), torch.tensor(3.0))]])
    assert compare_same_bits({"y": a}, {"y": b}, 0).error == 0
    assert compare_same_bits({"y": a}, {"y": b}, 1).error == 1
