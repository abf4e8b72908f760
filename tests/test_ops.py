"""The op table: that it is complete, that its references make the types that its rules state, and that they have gradients."""

from __future__ import annotations

import pytest
import torch

from circuitgraph.circuit.types import StateType, TensorType
from circuitgraph.errors import RuntimeUseError
from circuitgraph.interpreter import interpret
from circuitgraph.ops import DTYPE_NAMES, TABLE, TORCH_DTYPES, OpContext, PagedKV, TypeRuleError
from circuitgraph.ops.base import Op, Sample, random_tensors, register
from circuitgraph.ops.cache import Sight
from tests.circuits import EVERYTHING, random_cache, random_weights, small_mtp

ROWS = 5
CONTEXT = OpContext("f32")
SAMPLES = [(name, index) for name, op in TABLE.items() for index in range(len(op.samples(ROWS)))]


def sample_of(name: str, index: int) -> tuple[type[Op], Sample, list]:
    op, sample = TABLE[name], TABLE[name].samples(ROWS)[index]
    generator = torch.Generator().manual_seed(index)
    make = sample.tensors or (lambda generator: random_tensors(sample.types, generator))
    return op, sample, list(make(generator))


def type_of(value) -> TensorType | StateType:
    return StateType("kv") if isinstance(value, PagedKV) else TensorType(DTYPE_NAMES[value.dtype], tuple(value.shape))


@pytest.mark.parametrize(("name", "index"), SAMPLES)
def test_references_make_what_the_type_rules_state(name: str, index: int) -> None:
    op, sample, tensors = sample_of(name, index)
    assert tuple(map(type_of, tensors)) == tuple(sample.types)
    stated = op.infer(sample.types, sample.attrs, CONTEXT)
    results = op.reference(tensors, sample.attrs, CONTEXT)
    assert tuple(map(type_of, results)) == stated
    for result in results:
        if not isinstance(result, PagedKV):
            assert torch.isfinite(result.float()).all()


VISIBLE = 16
"""Cache rows that a row attends to."""
FLOPS = {
    "linear": 2 * ROWS * 48 * 33,
    "head_linear": 2 * ROWS * 3 * 4 * 14,
    "route": 2 * ROWS * 20 * 12,
    "experts": 2 * ROWS * 2 * 3 * 20 * 9,
    "attention": 2 * ROWS * 4 * VISIBLE * (8 + 8),
    "latent_attention": 2 * ROWS * 4 * VISIBLE * (12 + 8 + 12),
    "top1": 4 * ROWS * 41,
    "masked_top1": 4 * ROWS * 41,
    "rms_norm": 4 * ROWS * 40,
    "rope": 3 * ROWS * 3 * 8,
    "silu": 4 * ROWS * 21,
    "sigmoid": 3 * ROWS * 21,
    "add": ROWS * 21,
    "mul": ROWS * 21,
    "scale_rows": ROWS * 21,
}
"""Of each op's first sample. Other ops move numbers and compute none."""


@pytest.mark.parametrize("name", TABLE)
def test_operations_are_counted(name: str) -> None:
    op, sample, _ = sample_of(name, 0)
    outputs = op.infer(sample.types, sample.attrs, CONTEXT)
    assert op.flops(sample.types, outputs, sample.attrs, VISIBLE) == FLOPS.get(name, 0)
    attends = name in ("attention", "latent_attention")
    assert op.flops(sample.types, outputs, sample.attrs, 2 * VISIBLE) == FLOPS.get(name, 0) * (2 if attends else 1)


@pytest.mark.parametrize(("name", "index"), SAMPLES)
def test_attributes_of_samples_are_those_of_the_op(name: str, index: int) -> None:
    op, sample, _ = sample_of(name, index)
    assert set(sample.attrs) == set(op.attrs)
    for key, value in sample.attrs.items():
        assert isinstance(value, op.attrs[key].type)
        assert not op.attrs[key].choices or value in op.attrs[key].choices


@pytest.mark.parametrize(("name", "index"), SAMPLES)
def test_rows_do_not_depend_on_each_other(name: str, index: int) -> None:
    """Row i of the result is the same when row i is alone."""
    op, sample, tensors = sample_of(name, index)
    if any(isinstance(tensor, PagedKV) for tensor in tensors):
        pytest.skip("caches are addressed by row: tests/test_fixtures.py runs rows together and apart")
    whole = op.reference(tensors, sample.attrs, CONTEXT)
    by_row = [tensor.shape[:1] == (ROWS,) for tensor in tensors]
    for row in range(ROWS):
        alone = [tensor[row : row + 1] if cut else tensor for tensor, cut in zip(tensors, by_row, strict=True)]
        for many, one in zip(whole, op.reference(alone, sample.attrs, CONTEXT), strict=True):
            # One row may be summed up in another order: fp32 rounds that to the size of the largest terms.
            bound = 1e-5 * max(1.0, float(many.abs().max()))
            torch.testing.assert_close(many[row : row + 1], one, rtol=1.3e-6, atol=bound)


def test_an_op_with_a_missing_part_is_refused() -> None:
    class Half(Op):
        name = "half"

        @staticmethod
        def infer(types, attrs, ctx):
            return tuple(types)

    with pytest.raises(TypeError, match=r"^op Half lacks reference, flops, samples, inputs, docstring$"):
        register(Half)
    assert "half" not in TABLE


def test_an_op_of_the_same_name_is_refused() -> None:
    with pytest.raises(TypeError, match=r"^op 'add' is registered twice$"):
        register(TABLE["add"])


@pytest.mark.parametrize("name", TABLE)
def test_ops_refuse_states_or_tensors_where_they_want_the_other(name: str) -> None:
    """A type rule answers any input with a refusal of its own, not with a Python error."""
    op = TABLE[name]
    sample = op.samples(ROWS)[0]
    for position, given in enumerate(sample.types):
        wrong = TensorType("i64", (7, 7, 7)) if isinstance(given, StateType) else StateType("kv")
        with pytest.raises(TypeRuleError):
            op.infer([*sample.types[:position], wrong, *sample.types[position + 1 :]], sample.attrs, CONTEXT)


def test_ties_go_to_the_lowest_token() -> None:
    logits = torch.tensor([[1.0, 3.0, 3.0], [2.0, 2.0, 2.0]])
    token, logprob = TABLE["top1"].reference([logits], {}, CONTEXT)
    assert token.tolist() == [1, 0]
    torch.testing.assert_close(logprob[1], torch.tensor(1 / 3).log())


def masked(logits: list[float], *words: int) -> tuple[int, float]:
    arguments = [torch.tensor([logits]), torch.tensor([words], dtype=torch.int32)]
    token, logprob = TABLE["masked_top1"].reference(arguments, {}, CONTEXT)
    return int(token), float(logprob)


def test_a_mask_leaves_the_best_of_what_it_allows() -> None:
    logits = [5.0, 1.0, 3.0, 3.0]
    assert masked(logits, 0b1111)[0] == 0
    token, logprob = masked(logits, 0b1110)
    assert token == 2, "the lowest of equals"
    assert logprob == pytest.approx(3.0 - torch.tensor([1.0, 3.0, 3.0]).logsumexp(0).item())
    assert masked(logits, 0b0010) == (1, pytest.approx(0.0))
    assert masked(logits, 0) == masked([float("nan")] * 4, -1) == (0, float("-inf"))
    assert masked([0.0] * 31 + [1.0, 2.0, 0.5], -(2**31), 0b10)[0] == 31, "the sign bit is token 31"
    assert masked([0.0] * 31 + [1.0, 2.0, 0.5], 0, 0b10)[0] == 33


def test_a_mask_without_a_bit_for_every_column_is_refused() -> None:
    with pytest.raises(TypeRuleError, match="a bit for every column"):
        TABLE["masked_top1"].infer([TensorType("f32", (2, 33)), TensorType("i32", (2, 1))], {}, CONTEXT)
    TABLE["masked_top1"].infer([TensorType("f32", (2, 33)), TensorType("i32", (2, 4))], {}, CONTEXT)


def test_a_row_that_sees_nothing_attends_to_nothing() -> None:
    _, sample, (q, kv) = sample_of("attention", 0)
    blind = PagedKV(**{**vars(kv), "length": torch.zeros_like(kv.length), "k": kv.k * float("nan")})
    (mixed,) = TABLE["attention"].reference([q, blind], sample.attrs, CONTEXT)
    assert (mixed == 0).all()


@pytest.mark.parametrize("window", [0, 3, 6])
@pytest.mark.parametrize(("block", "causal"), [(1, False), (3, False), (3, True)])
def test_what_a_row_sees(window: int, block: int, causal: bool) -> None:
    """Row by row, of blocks that end early, share a block of rows with another sequence, or are idle."""
    seq = torch.tensor([0, 0, 0, 1, 1, 0, 2, 3, 3, 4], dtype=torch.int32)
    length = torch.tensor([9, 9, 9, 7, 7, 0, 5, 8, 8, 4], dtype=torch.int32)
    start = torch.tensor([0, 2, 4, 0, 0], dtype=torch.int32)
    none = torch.zeros(0)
    cache = PagedKV(k=none, v=none, slot=none, table=none, seq=seq, start=start, length=length)
    first, end = Sight(window, block, causal).bounds(cache)
    own = {1: [8, 8, 8, 6, 6, -1, 4, 7, 7, 3], 3: [6, 7, 8, 5, 6, -1, 4, 6, 7, 3]}[block]
    for row, place in enumerate(own):
        seen = set(range(int(first[row]), int(end[row])))
        every = range(int(start[seq[row]]), int(length[row]))
        near = {other for other in every if not window or other > place - window}
        assert seen == {other for other in near if not causal or other <= place}, row


def test_a_sight_that_is_none_is_refused() -> None:
    _, sample, _ = sample_of("attention", 0)
    for wrong, message in (
        ({"window": -1}, "sees nothing"),
        ({"block": 0}, "sees nothing"),
        ({"window": 3, "block": 4}, "shorter"),
    ):
        with pytest.raises(TypeRuleError, match=message):
            TABLE["attention"].infer(sample.types, {**sample.attrs, **wrong}, CONTEXT)
    _, latent, _ = sample_of("latent_attention", 0)
    with pytest.raises(TypeRuleError, match="latents are seen by all rows"):
        TABLE["latent_attention"].infer(latent.types, {**latent.attrs, "window": 5}, CONTEXT)


def test_work_stops_growing_with_the_window() -> None:
    op, sample, _ = sample_of("attention", 0)
    work = [
        op.flops(sample.types, (), {**sample.attrs, "window": 8, "block": block, "causal": causal}, context)
        for block, causal, context in ((1, False, 8), (1, False, 90), (4, False, 90), (4, True, 90))
    ]
    assert [8 * item / work[0] for item in work] == [8, 8, 11, 8]


def test_a_slot_of_minus_one_writes_nothing() -> None:
    _, sample, (kv, k, v) = sample_of("append", 0)
    before = kv.k.clone(), kv.v.clone()
    idle = PagedKV(**{**vars(kv), "slot": torch.full_like(kv.slot, -1)})
    TABLE["append"].reference([idle, k, v], sample.attrs, CONTEXT)
    assert torch.equal(kv.k, before[0])
    assert torch.equal(kv.v, before[1])


# -- the interpreter -----------------------------------------------------------------------------------------------


def inputs_of(circuit, generator: torch.Generator, lengths: list[int]) -> dict[str, torch.Tensor]:
    size = next(item.type.shape[1] for item in circuit.inputs if item.name == "hidden")
    return {
        "token": torch.arange(len(lengths), dtype=torch.int32),
        "hidden": torch.randn(len(lengths), size, generator=generator).to(TORCH_DTYPES[circuit.act]),
        "position": torch.tensor(lengths, dtype=torch.int32),
    }


@pytest.mark.parametrize("switches", [{}, EVERYTHING], ids=["plain", "everything"])
def test_gradients_reach_every_weight(switches: dict) -> None:
    circuit = small_mtp(switches, wt="f32")
    generator = torch.Generator().manual_seed(0)
    weights = random_weights(circuit, generator)
    trained = {weight.name: weights[weight.name].requires_grad_() for weight in circuit.weights}
    lengths = [3, 1, 6]
    kv = random_cache(circuit, lengths, generator)
    kv = PagedKV(**{**vars(kv), "k": kv.k.nan_to_num(), "v": kv.v.nan_to_num()})
    out = interpret(circuit, inputs=inputs_of(circuit, generator, lengths), weights=weights, states={"kv": kv}, entry="logits")
    (out["logits"].square().mean() + out["next_hidden"].square().mean()).backward()
    for name, weight in trained.items():
        assert weight.grad is not None, name
        assert torch.isfinite(weight.grad).all(), name
        assert weight.grad.abs().max() > 0, name


def test_gradients_are_right() -> None:
    """Against finite differences, along a random direction of each weight."""
    circuit = small_mtp({"recycle": "pre_norm"}, wt="f32")
    generator = torch.Generator().manual_seed(1)
    weights = random_weights(circuit, generator)
    lengths = [3, 5]
    kv = random_cache(circuit, lengths, generator)
    stored = kv.k.nan_to_num(), kv.v.nan_to_num()
    inputs = inputs_of(circuit, generator, lengths)

    def loss() -> torch.Tensor:
        fresh = PagedKV(**{**vars(kv), "k": stored[0].clone(), "v": stored[1].clone()})
        out = interpret(circuit, inputs=inputs, weights=weights, states={"kv": fresh}, entry="logits")
        return out["logits"].double().logsumexp(-1).sum()

    for name in ("fc", "layer.attn.k_proj", "layer.ffn.gate_proj", "norm_weight", "lm_head"):
        weight = weights[name].requires_grad_()
        (grad,) = torch.autograd.grad(loss(), weight)
        weight.requires_grad_(False)
        direction = torch.randn(weight.shape, generator=generator)
        step = 1e-2 * weight.norm() / direction.norm() * direction
        with torch.no_grad():
            original = weight.clone()
            weight.copy_(original + step)
            above = loss()
            weight.copy_(original - step)
            below = loss()
            weight.copy_(original)
        expected = 2 * (grad * step).sum()
        torch.testing.assert_close((above - below).float(), expected, rtol=0.02, atol=2e-4)


def test_the_interpreter_refuses_what_does_not_fit() -> None:
    circuit = small_mtp()
    generator = torch.Generator().manual_seed(0)
    weights, lengths = random_weights(circuit, generator), [2, 3]
    kv, inputs = random_cache(circuit, lengths, generator), inputs_of(circuit, generator, lengths)

    def refusal(**changes) -> str:
        with pytest.raises(RuntimeUseError) as caught:
            interpret(circuit, **{"inputs": inputs, "weights": weights, "states": {"kv": kv}, "entry": "draft", **changes})
        return str(caught.value)

    assert refusal(inputs={**inputs, "hidden": inputs["hidden"][:1]}) == (
        "mtp_dense: hidden: has the wrong shape; expected f32[n, 48]; got [1, 48] with 2 rows elsewhere"
    )
    assert refusal(states={}) == "mtp_dense: kv: is not given; expected state[kv]"
    assert refusal(weights={**weights, "fc": weights["fc"].T}) == (
        "mtp_dense: fc: has the wrong shape; expected bf16[48, 96]; got [96, 48]"
    )
    assert refusal(entry=None, outputs=["token"]) == (
        "mtp_dense: no output 'token'. Known: draft, logits, logprob, masked_draft, masked_logprob, next_hidden."
    )
