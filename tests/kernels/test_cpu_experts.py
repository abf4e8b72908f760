"""Experts and routing against the ops' references: any widths and shapes, every row alone, and what must not be read."""

from __future__ import annotations

import random as python_random
from dataclasses import dataclass

import pytest
import torch

from circuitgraph.kernels.cpu import experts, route, sizes
from circuitgraph.ops import TABLE, OpContext
from tests.kernels.cpu_harness import assert_close, compile_cases, declare, poisoned, random

WIDTHS = (1, 2, 3, 5, 8, 17, 64)


@dataclass(frozen=True)
class Mixture:
    """n rows of H columns, E experts of I inner columns, of which K a row; `fused`: gate and up in one tensor."""

    n: int
    hidden: int
    inner: int
    experts: int
    top: int
    fused: bool = False
    act: str = "float32"
    wt: str = "bfloat16"

    @property
    def name(self) -> str:
        return "_".join(["experts", *(str(value) for value in vars(self).values())])

    def scratch(self) -> dict[str, tuple[tuple[int, ...], str]]:
        pairs = self.n * self.top
        return {
            "first": ((self.experts + 1,), "int32"),
            "cursor": ((self.experts,), "int32"),
            "order": ((pairs,), "int32"),
            "active": ((self.experts + 1,), "int32"),
            "x": ((self.n, sizes.row_stride(self.hidden)), "float32"),
            "inner": ((pairs, sizes.row_stride(self.inner)), "float32"),
            "mixed": ((self.n, self.hidden), "float32"),
        }

    def emit(self, lanes: int) -> None:
        x = declare("x", (self.n, self.hidden), self.act)
        ids, share = declare("ids", (self.n, self.top), "int32"), declare("share", (self.n, self.top), "float32")
        down = declare("down", (self.experts, self.hidden, self.inner), self.wt)
        rows = 2 * self.inner if self.fused else self.inner
        gate = declare("gate", (self.experts, rows, self.hidden), self.wt)
        up = None if self.fused else declare("up", (self.experts, self.inner, self.hidden), self.wt)
        out = declare("out", (self.n, self.hidden), self.act)
        scratch = experts.ExpertsScratch(**{name: declare(f"s_{name}", *kind) for name, kind in self.scratch().items()})
        experts.emit_experts(x, ids, share, down, gate, up, out, scratch, n=self.n, lanes=lanes)

    def weights(self, seed: int) -> list[torch.Tensor]:
        scale = self.hidden**-0.5
        rows = 2 * self.inner if self.fused else self.inner
        down = random((self.experts, self.hidden, self.inner), self.wt, seed, self.inner**-0.5)
        gate = random((self.experts, rows, self.hidden), self.wt, seed + 1, 2 * scale)
        return [down, gate, *([] if self.fused else [random((self.experts, self.inner, self.hidden), self.wt, seed + 2, scale)])]

    def inputs(self, seed: int, few: int | None = None) -> list[torch.Tensor]:
        """x, ids and shares; with `few`, all rows choose among that many experts."""
        generator = torch.Generator().manual_seed(seed)
        order = torch.rand(self.n, few or self.experts, generator=generator).argsort(1)[:, : self.top]
        share = torch.rand(self.n, self.top, generator=generator)
        return [random((self.n, self.hidden), self.act, seed + 5), order.int().contiguous(), share]

    def call(self, library, inputs, weights) -> torch.Tensor:
        out = poisoned((self.n, self.hidden), self.act)
        library[self.name](*inputs, *weights, out, *(poisoned(*kind) for kind in self.scratch().values()))
        return out

    def want(self, inputs, weights) -> torch.Tensor:
        x, ids, share = inputs
        doubles = [weight.double() for weight in weights]
        rows = []
        for i in range(self.n):
            total = torch.zeros(self.hidden, dtype=torch.float64)
            for expert, part in zip(ids[i].tolist(), share[i].tolist(), strict=True):
                gate = doubles[1][expert][: self.inner]
                up = doubles[1][expert][self.inner :] if self.fused else doubles[2][expert]
                value = x[i].double()
                total += part * (doubles[0][expert] @ (torch.nn.functional.silu(gate @ value) * (up @ value)))
            rows.append(total)
        return torch.stack(rows)


def drawn(count: int) -> list[Mixture]:
    """Shapes of no pattern, the same in every run."""
    chosen = python_random.Random(20)
    made = []
    for _ in range(count):
        number = chosen.randint(2, 19)
        made.append(
            Mixture(
                chosen.randint(1, 64),
                chosen.randint(1, 90),
                chosen.randint(1, 70),
                number,
                chosen.randint(1, min(6, number)),
                chosen.random() < 0.5,
                chosen.choice(("float32", "bfloat16", "float16")),
                chosen.choice(("float32", "bfloat16", "float16")),
            )
        )
    return made


PLAIN = [Mixture(n, 48, 40, 8, 3) for n in WIDTHS]
CASES = [*PLAIN, Mixture(4, 64, 32, 4, 4, fused=True), Mixture(3, 40, 24, 1, 1), Mixture(200, 16, 24, 2, 2), *drawn(6)]


# experts, H, and the op's attributes
ROUTES = [
    (12, 20, {"top": 3}),
    (8, 33, {"top": 8, "renormalise": False, "factor": 2.5}),
    (256, 64, {"top": 8, "scoring": "sigmoid", "groups": 8, "kept": 4, "factor": 2.5}),
    (18, 24, {"top": 5, "scoring": "sigmoid", "groups": 3, "kept": 2}),
    (512, 40, {"top": 10}),
    (5, 9, {"top": 1, "groups": 1}),
]
DEFAULTS = {name: attr.default for name, attr in TABLE["route"].attrs.items()}


def route_name(n, corrected, case) -> str:
    return f"route_{n}_{corrected}_{ROUTES.index(case)}"


def emit_route(n, corrected, case):
    number, hidden, attrs = case

    def emit(lanes):
        x, weight = declare("x", (n, hidden), "float32"), declare("weight", (number, hidden), "float32")
        correction = declare("correction", (number,), "float32") if corrected else None
        ids, share = declare("ids", (n, attrs["top"]), "int32"), declare("share", (n, attrs["top"]), "float32")
        logits = declare("logits", (n, number), "float32")
        route.emit_route(x, weight, correction, ids, share, logits, n=n, lanes=lanes, attrs={**DEFAULTS, **attrs})

    return emit


EVERY_ROUTE = [(7, corrected, case) for corrected in (False, True) for case in ROUTES] + [(1, True, ROUTES[2])]


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    cases = {case.name: case.emit for case in CASES}
    cases |= {route_name(*case): emit_route(*case) for case in EVERY_ROUTE}
    return compile_cases(cases, tmp_path_factory.mktemp("experts"))


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_experts(library, case):
    weights = case.weights(1)
    for seed, few in ((1, None), (2, case.top)):  # as they come; all rows to the same experts
        inputs = case.inputs(seed, few)
        got = case.call(library, inputs, weights)
        assert_close(got, case.want(inputs, weights), case.act)
        assert torch.equal(got, case.call(library, inputs, weights)), "another run gives other bits"
    # The control: a weight that a row goes to, and one of 16 bits less.
    weights[0][inputs[1][0, 0]] *= 1.25
    with pytest.raises(AssertionError):
        assert_close(got, case.want(inputs, weights), case.act)


def test_a_row_is_the_same_in_every_batch(library):
    """Whoever shares an expert with it: the same bits alone, and in every width."""
    weights = PLAIN[0].weights(3)
    largest = PLAIN[-1]
    for few in (None, 4):
        x, ids, share = largest.inputs(4, few)
        alone = [PLAIN[0].call(library, [part[i : i + 1].contiguous() for part in (x, ids, share)], weights) for i in range(64)]
        for case in PLAIN:
            inputs = [part[: case.n].contiguous() for part in (x, ids, share)]
            assert torch.equal(case.call(library, inputs, weights), torch.cat(alone[: case.n])), case.name


def test_experts_that_nobody_goes_to_are_not_read(library):
    case = PLAIN[3]
    weights, inputs = case.weights(5), case.inputs(6, few=4)
    want = case.want(inputs, weights)
    for weight in weights:
        weight[4:] = float("nan")
    assert_close(case.call(library, inputs, weights), want)
    weights[1][inputs[1][0, 0]] = float("nan")
    assert case.call(library, inputs, weights)[0].isnan().all()


def test_a_choice_outside_the_table_adds_nothing(library):
    case = PLAIN[3]
    weights, (x, ids, share) = case.weights(7), case.inputs(8)
    without = share.clone()
    without[1:3, 1] = 0
    want = case.want([x, ids, without], weights)
    ids[1, 1], ids[2, 1] = -1, case.experts
    assert_close(case.call(library, [x, ids, share], weights), want)


def test_an_expert_that_a_row_names_twice_counts_twice(library):
    case = PLAIN[3]
    weights, (x, ids, share) = case.weights(9), case.inputs(10)
    ids[:] = ids[0, 0]
    assert_close(case.call(library, [x, ids, share], weights), case.want([x, ids, share], weights))


def routed(library, case, tensors):
    n, corrected, (_, _, attrs) = case
    ids, share = poisoned((n, attrs["top"]), "int32"), poisoned((n, attrs["top"]))
    number = tensors[1].shape[0]
    library[route_name(*case)](*tensors[: 2 + corrected], ids, share, poisoned((n, number)))
    return ids, share


def reference(case, tensors):
    _, corrected, (_, _, attrs) = case
    return TABLE["route"].reference(tensors[: 2 + corrected], {**DEFAULTS, **attrs}, OpContext("f32"))


def tensors_for(case, seed):
    n, _, (number, hidden, _) = case
    return [random((n, hidden), seed=seed), random((number, hidden), seed=seed + 1), random((number,), seed=seed + 2, scale=0.3)]


@pytest.mark.parametrize("case", EVERY_ROUTE, ids=lambda case: route_name(*case))
def test_routes(library, case):
    for seed in (1, 11, 21):
        tensors = tensors_for(case, seed)
        (ids, share), (want_ids, want_share) = routed(library, case, tensors), reference(case, tensors)
        assert torch.equal(ids, want_ids)
        torch.testing.assert_close(share, want_share, rtol=1e-5, atol=1e-7)
    other, _ = reference(case, [tensors[0], tensors[1].flip(0), tensors[2]])
    assert not torch.equal(ids, other), "the control passes"


@pytest.mark.parametrize("case", EVERY_ROUTE, ids=lambda case: route_name(*case))
def test_ties_go_to_the_lowest_expert(library, case):
    """Whole numbers, so that both sides sum them alike: many scores, and with them groups, are equal."""
    tensors = [tensor.round().clamp(-1, 1) for tensor in tensors_for(case, 31)]
    tensors[0][:, 3:] = 0
    tensors[2] /= 4
    (ids, share), (want_ids, want_share) = routed(library, case, tensors), reference(case, tensors)
    assert torch.equal(ids, want_ids)
    torch.testing.assert_close(share, want_share, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("case", EVERY_ROUTE, ids=lambda case: route_name(*case))
def test_ids_are_inside_the_table_whatever_the_row_is(library, case):
    """What fills up a batch may be anything: its experts are read, so they have to be there."""
    tensors = tensors_for(case, 41)
    tensors[0][0] = float("nan")
    tensors[0][-1, ::2] = float("inf")
    ids, _ = routed(library, case, tensors)
    for row in ids.tolist():
        assert len(set(row)) == len(row)
        assert 0 <= min(row) <= max(row) < tensors[1].shape[0]
