"""Products with quantised weights, read as they are, against torch in fp64 on the numbers that the bytes mean."""

from __future__ import annotations

import itertools

import pytest
import torch
from tvm.tirx.script import builder as T

from circuitgraph.checkpoint.packed import tensors_to_numbers
from circuitgraph.checkpoint.random_weights import random_packed
from circuitgraph.circuit.ir import Storage, Weight
from circuitgraph.circuit.types import TensorType
from circuitgraph.kernels.cpu import linear, packed, sizes, top1
from circuitgraph.kernels.cpu import vector as v
from tests.kernels.cpu_harness import assert_close, compile_cases, declare, name, poisoned, random

STORAGES = {
    "fp8_tensor": Storage("fp8", (0, 0)),
    "fp8_row": Storage("fp8", (1, 0)),
    "fp8_block": Storage("fp8", (128, 128)),
    "fp8_odd_block": Storage("fp8", (24, 48)),
    "int8_tensor": Storage("int8", (0, 0)),
    "int8_row": Storage("int8", (1, 0)),
    "int8_block": Storage("int8", (32, 64)),
    "nvfp4": Storage("nvfp4", (1, 16), True),
    "mxfp4": Storage("mxfp4", (1, 32)),
}
SHAPES = ((1, 37, 160), (5, 37, 160), (17, 16, 128), (2, 145, 288))  # rows of x, N, K
RAGGED = ((1, 21, 150), (8, 21, 150))  # columns that are no whole number of vectors, nor of blocks
CASES = [(kind, *shape) for kind, shape in itertools.product(STORAGES, (*SHAPES, *RAGGED))]
FEW_LANES = [(kind, 5, *shape) for kind, shape in itertools.product(STORAGES, ((37, 160), (21, 150)))]
HEADS = [(kind, n, vocabulary, 96) for kind in STORAGES for n, vocabulary in ((1, 515), (4, 131))]
STACKS = [(kind, 3, 20, 96) for kind in STORAGES]


def weight(kind: str, *shape: int) -> Weight:
    return Weight("w", TensorType("bf16", shape), STORAGES[kind])


def declared(kind: str, lanes: int, *shape: int) -> packed.Quantised:
    dtypes = {"u8": "uint8", "f32": "float32"}
    made = [
        declare(value.name.replace(".", "_"), value.type.shape, dtypes[value.type.dtype])
        for value in weight(kind, *shape).tensors()
    ]
    return packed.Quantised(STORAGES[kind], made[0], made[1], made[2] if len(made) > 2 else None, lanes)


def product(kind: str, n: int, rows: int, columns: int):
    def emit(lanes):
        x = declare("x", (n, columns), "float32")
        w = declared(kind, lanes, rows, columns)
        y = declare("y", (n, rows), "float32")
        projection = linear.Projection((w,), lambda row, column, width, s: v.store(y, [row, column], s[0], width))
        linear.emit_linear(x, [projection], n=n, lanes=lanes)

    return emit


def head(kind: str, n: int, vocabulary: int, columns: int):
    def emit(lanes):
        tasks = sizes.top1_tasks(vocabulary, 64)
        x, w = declare("x", (n, columns), "float32"), declared(kind, lanes, vocabulary, columns)
        token, logprob = declare("token", (n,), "int32"), declare("logprob", (n,), "float32")
        parts = (("best", "float32"), ("index", "int32"), ("total", "float32"))
        scratch = top1.Top1Scratch(*(declare(name, (tasks, n), dtype) for name, dtype in parts))
        top1.emit_linear_top1(x, w, token, logprob, scratch, n=n, lanes=lanes, task_columns=64)

    return emit


def stack(kind: str, experts: int, rows: int, columns: int):
    """Every number of a stack: what a kernel of experts is written with."""

    def emit(lanes):
        w = declared(kind, lanes, experts, rows, columns)
        y = declare("y", (experts, rows, columns), "float32")
        with T.serial(0, experts) as expert, T.serial(0, rows) as row:
            factor = w.factor([expert, row])
            with T.serial(0, columns // lanes) as i:
                v.store(y, [expert, row, i * lanes], w.load([expert, row], i * lanes) * v.splat(factor, lanes), lanes)

    return emit


def gated(kinds: tuple[str, str], n: int):
    """Two weights in one epilogue, one of them perhaps plain."""

    def emit(lanes):
        x = declare("x", (n, 96), "float32")
        g = declared(kinds[0], lanes, 40, 96)
        u = declare("u", (40, 96), "bfloat16")
        y = declare("y", (n, 40), "float32")
        multiply = lambda row, column, width, s: v.store(y, [row, column], s[0] * s[1], width)  # noqa: E731
        linear.emit_linear(x, [linear.Projection((g, u), multiply)], n=n, lanes=lanes)

    return emit


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    cases = {name("product", *case): product(*case) for case in CASES}
    cases |= {name("head", *case): head(*case) for case in HEADS}
    cases |= {name("stack", *case): stack(*case) for case in STACKS}
    cases |= {name("gated", kind): gated((kind, "bf16"), 3) for kind in STORAGES}
    return compile_cases(cases, tmp_path_factory.mktemp("packed"))


@pytest.fixture(scope="module", params=[8, 4])
def fewer_lanes(request, tmp_path_factory):
    cases = {name("product", *case): product(*case) for case in FEW_LANES}
    cases |= {name("stack", *case): stack(*case) for case in STACKS}
    return compile_cases(cases, tmp_path_factory.mktemp("lanes"), lanes=request.param)


def tensors(kind: str, *shape: int, seed: int = 0) -> tuple[list[torch.Tensor], torch.Tensor]:
    """The tensors of a random weight, and its numbers in fp64."""
    made = random_packed(weight(kind, *shape), torch.Generator().manual_seed(seed))
    return made, tensors_to_numbers(weight(kind, *shape), made).double()


@pytest.mark.parametrize("case", CASES, ids=lambda case: name("", *case))
def test_linear(library, case):
    check_linear(library, *case)


@pytest.mark.parametrize("case", FEW_LANES, ids=lambda case: name("", *case))
def test_linear_with_fewer_lanes(fewer_lanes, case):
    check_linear(fewer_lanes, *case)


def check_linear(library, kind: str, n: int, rows: int, columns: int) -> None:
    stored, numbers = tensors(kind, rows, columns)
    x, y = random((n, columns), seed=1), poisoned((n, rows))
    library[name("product", kind, n, rows, columns)](x, *stored, y)
    assert_close(y, x.double() @ numbers.T)


@pytest.mark.parametrize("kind", STORAGES)
def test_every_byte_and_every_scale_counts(library, kind):
    """The comparison fails for another scale, wherever its block lies, and for another number at either end of a row."""
    stored, numbers = tensors(kind, 37, 160)
    x, y = random((5, 160), seed=1), poisoned((5, 37))
    for part, tensor in enumerate(stored):
        for place in (0, tensor.numel() - 1):
            wrong = [item.clone() for item in stored]
            flat = wrong[part].view(-1)
            flat[place] = flat[place] ^ 64 if tensor.dtype == torch.uint8 else flat[place] * 2
            library[name("product", kind, 5, 37, 160)](x, *wrong, y)
            with pytest.raises(AssertionError):
                assert_close(y, x.double() @ numbers.T)


@pytest.mark.parametrize("kind", STORAGES)
def test_beside_a_plain_weight(library, kind):
    stored, numbers = tensors(kind, 40, 96)
    x, u, y = random((3, 96), seed=1), random((40, 96), "bfloat16", 2), poisoned((3, 40))
    library[name("gated", kind)](x, *stored, u, y)
    assert_close(y, (x.double() @ numbers.T) * (x.double() @ u.double().T))


@pytest.mark.parametrize("case", HEADS, ids=lambda case: name("", *case))
def test_top1(library, case):
    kind, n, vocabulary, columns = case
    stored, numbers = tensors(kind, vocabulary, columns)
    x, token, logprob = random((n, columns), seed=1), poisoned((n,), "int32"), poisoned((n,))
    tasks = sizes.top1_tasks(vocabulary, 64)
    scratch = poisoned((tasks, n)), poisoned((tasks, n), "int32"), poisoned((tasks, n))
    library[name("head", *case)](x, *stored, token, logprob, *scratch)
    expected = torch.log_softmax(x.double() @ numbers.T, -1).max(-1)
    assert token.tolist() == expected.indices.tolist()
    torch.testing.assert_close(logprob.double(), expected.values, rtol=1e-5, atol=2e-5)


@pytest.mark.parametrize("case", STACKS, ids=lambda case: name("", *case))
def test_every_number_of_a_stack(library, fewer_lanes, case):
    stored, numbers = tensors(*case)
    for built in (library, fewer_lanes):
        y = poisoned(case[1:])
        built[name("stack", *case)](*stored, y)
        torch.testing.assert_close(y.double(), numbers, rtol=3e-7, atol=0)


@pytest.mark.parametrize("kind", ["fp8_row", "int8_row", "nvfp4"])
def test_every_number_of_a_format(library, kind):
    """All bytes but e4m3's two NaNs: subnormal numbers and both zeros, too."""
    stored, _ = tensors(kind, 3, 20, 96)
    usable = torch.arange(256, dtype=torch.uint8)
    usable = usable[usable & 127 != 127] if kind == "fp8_row" else usable
    stored[0].view(-1)[: 3 * len(usable)] = usable.repeat(3)
    if kind == "nvfp4":
        scales = torch.arange(127, dtype=torch.uint8)  # e4m3, not negative
        stored[1].view(-1)[:127] = scales
    numbers = tensors_to_numbers(weight(kind, 3, 20, 96), stored)
    y = poisoned((3, 20, 96))
    library[name("stack", kind, 3, 20, 96)](*stored, y)
    torch.testing.assert_close(y, numbers, rtol=3e-7, atol=0)


def test_storages_that_cannot_be_read():
    assert sizes.refuse_storage(Storage("fp8", (8, 24))) == "scales for 24 columns, which is no multiple of 16"
    assert all(sizes.refuse_storage(storage) is None for storage in STORAGES.values())
