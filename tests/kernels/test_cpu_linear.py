"""Linear and top-1 emitters against torch in fp64."""

import itertools

import pytest
import torch

from circuitgraph.kernels.cpu import linear, sizes, top1
from circuitgraph.kernels.cpu import vector as v
from tests.kernels.cpu_harness import assert_close, compile_cases, declare, name, poisoned, random

WIDTHS = (1, 2, 3, 5, 8, 17, 64)
DTYPES = ("float32", "float16", "bfloat16")
SHAPES = ((37, 29), (16, 64))  # N, K: odd, and whole vectors
PLAIN = [(n, *shape, "float32", w) for n, shape, w in itertools.product(WIDTHS, SHAPES, DTYPES)]
PLAIN += [(1, 5, 7, "float32", w) for w in DTYPES]
PLAIN += [(n, 33, 41, x, "bfloat16") for n in (1, 5, 17) for x in ("float16", "bfloat16")]
TILES = [(n, columns, rows, chains) for n in (1, 5, 9) for columns, rows, chains in ((4, 3, 1), (2, 4, 2), (1, 8, 4))]
TOP1 = [(1, 1, "float32"), (3, 515, "bfloat16"), (8, 64, "float16"), (17, 131, "bfloat16")]
MASKED = [(2, 515), (3, 64), (1, 40)]


def plain(n, columns, k, x_dtype, w_dtype, tile=None):
    def emit(lanes):
        x, w = declare("x", (n, k), x_dtype), declare("w", (columns, k), w_dtype)
        y = declare("y", (n, columns), "float32")
        projection = linear.Projection((w,), lambda row, column, width, s: v.store(y, [row, column], s[0], width))
        linear.emit_linear(x, [projection], n=n, lanes=lanes, tile=tile)

    return emit


def gated(n, dtype):
    """silu(x Wg) * (x Wu) + residual beside a second projection with a bias, outputs in `dtype`."""

    def emit(lanes):
        x, g, u = declare("x", (n, 48), "float32"), declare("g", (40, 48), dtype), declare("u", (40, 48), dtype)
        w, b = declare("w", (19, 48), dtype), declare("b", (19,), dtype)
        residual = declare("r", (n, 40), dtype)
        y, z = declare("y", (n, 40), dtype), declare("z", (n, 19), "float32")
        bias, add, out = v.bits_of(b), v.bits_of(residual), v.bits_of(y)

        def mlp(row, column, width, sums):
            value = v.silu(sums[0], width) * sums[1] + v.load(add, [row, column], width)
            v.store(out, [row, column], value, width)

        def biased(row, column, width, sums):
            v.store(z, [row, column], sums[0] + v.load(bias, [column], width), width)

        projections = [linear.Projection((g, u), mlp), linear.Projection((w,), biased)]
        linear.emit_linear(x, projections, n=n, lanes=lanes)

    return emit


def head(n, vocabulary, dtype, masked=False):
    def emit(lanes):
        tasks = sizes.top1_tasks(vocabulary, 64)
        x, w = declare("x", (n, 24), "float32"), declare("w", (vocabulary, 24), dtype)
        token, logprob = declare("token", (n,), "int32"), declare("logprob", (n,), "float32")
        scratch = top1.Top1Scratch(
            declare("best", (tasks, n), "float32"),
            declare("index", (tasks, n), "int32"),
            declare("total", (tasks, n), "float32"),
        )
        allowed = declare("allowed", (n, -(-vocabulary // 32)), "int32") if masked else None
        top1.emit_linear_top1(x, w, token, logprob, scratch, n=n, lanes=lanes, allowed=allowed, task_columns=64)

    return emit


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    cases = {name("plain", *case): plain(*case) for case in PLAIN}
    for case in TILES:
        n, columns, rows, chains = case
        tile = sizes.Tile(columns, rows, chains=chains)
        cases[name("tile", *case)] = plain(n, 37, 77, "float32", "bfloat16", tile)
    cases |= {name("gated", n, dtype): gated(n, dtype) for n in (1, 5) for dtype in DTYPES}
    cases |= {name("head", *case): head(*case) for case in TOP1}
    cases |= {name("masked", *case): head(*case, "bfloat16", masked=True) for case in MASKED}
    return compile_cases(cases, tmp_path_factory.mktemp("linear"))


@pytest.mark.parametrize("case", PLAIN, ids=lambda case: name("", *case))
def test_linear(library, case):
    n, columns, k, x_dtype, w_dtype = case
    x, w, y = random((n, k), x_dtype, 1), random((columns, k), w_dtype, 2), poisoned((n, columns))
    library[name("plain", *case)](x, w, y)
    assert_close(y, x.double() @ w.double().T)


@pytest.mark.parametrize("case", TILES, ids=lambda case: name("", *case))
def test_every_tile_computes_the_same(library, case):
    n = case[0]
    x, w, y = random((n, 77), seed=1), random((37, 77), "bfloat16", 2), poisoned((n, 37))
    library[name("tile", *case)](x, w, y)
    assert_close(y, x.double() @ w.double().T)


def test_weights_need_no_alignment(library):
    storage = random((16 * 64 + 1,), "bfloat16", 3)
    w, x, y = storage[1:].view(16, 64), random((1, 64)), poisoned((1, 16))
    library[name("plain", 1, 16, 64, "float32", "bfloat16")](x, w, y)
    assert_close(y, x.double() @ w.double().T)


@pytest.mark.parametrize("n", [1, 5])
@pytest.mark.parametrize("dtype", DTYPES)
def test_epilogues_and_several_projections(library, n, dtype):
    x, g, u, w = random((n, 48)), random((40, 48), dtype, 1), random((40, 48), dtype, 2), random((19, 48), dtype, 3)
    b, r, y, z = random((19,), dtype, 4), random((n, 40), dtype, 5), poisoned((n, 40), dtype), poisoned((n, 19))
    library[name("gated", n, dtype)](x, g, u, w, b, r, y, z)
    xd = x.double()
    expected = torch.nn.functional.silu(xd @ g.double().T) * (xd @ u.double().T) + r.double()
    assert_close(y, expected, dtype)
    assert_close(z, xd @ w.double().T + b.double())


def run_head(library, case_name, x, w, *extra):
    n, tasks = x.shape[0], sizes.top1_tasks(w.shape[0], 64)
    token, logprob = poisoned((n,), "int32"), poisoned((n,))
    scratch = poisoned((tasks, n)), poisoned((tasks, n), "int32"), poisoned((tasks, n))
    library[case_name](x, w, token, logprob, *scratch, *extra)
    return token, logprob


@pytest.mark.parametrize("case", TOP1, ids=lambda case: name("", *case))
def test_top1(library, case):
    n, vocabulary, dtype = case
    x, w = random((n, 24), seed=1), random((vocabulary, 24), dtype, 2)
    token, logprob = run_head(library, name("head", *case), x, w)
    expected = torch.log_softmax(x.double() @ w.double().T, -1).max(-1)
    assert token.tolist() == expected.indices.tolist()
    torch.testing.assert_close(logprob.double(), expected.values, rtol=1e-5, atol=2e-6)


def test_top1_ties_go_to_the_lowest_id(library):
    w = random((515, 24), "bfloat16", 2)
    x = w[300].float().repeat(3, 1) * 9
    for twin in (37, 301, 511, 514):
        w[twin] = w[300]
    token, _ = run_head(library, name("head", 3, 515, "bfloat16"), x, w)
    assert token.tolist() == [37] * 3


def test_top1_survives_nan_and_infinite_logits(library):
    x, w = random((3, 24), seed=1), random((515, 24), "bfloat16", 2)
    w[100] = float("nan")
    x[2] = float("nan")
    token, logprob = run_head(library, name("head", 3, 515, "bfloat16"), x, w)
    logits = x.double() @ w.double().T
    logits[:, 100] = float("-inf")
    expected = torch.log_softmax(logits[:2], -1).max(-1)
    assert token.tolist() == [*expected.indices.tolist(), 0]
    torch.testing.assert_close(logprob[:2].double(), expected.values, rtol=1e-5, atol=2e-6)
    assert logprob[2] == float("-inf")


@pytest.mark.parametrize("case", MASKED, ids=lambda case: name("", *case))
def test_top1_obeys_the_mask(library, case):
    n, vocabulary = case
    x, w = random((n, 24), seed=1), random((vocabulary, 24), "bfloat16", 2)
    allow = torch.rand(n, -(-vocabulary // 32) * 32, generator=torch.Generator().manual_seed(5)) < 0.3
    if n > 1:
        allow[1] = False
    bits = (allow.view(n, -1, 32).long() << torch.arange(32)).sum(-1)
    words = torch.where(bits >= 2**31, bits - 2**32, bits).to(torch.int32)
    token, logprob = run_head(library, name("masked", *case), x, w, words)
    logits = (x.double() @ w.double().T).masked_fill(~allow[:, :vocabulary], float("-inf"))
    for row in range(n):
        if not allow[row, :vocabulary].any():
            assert (token[row], logprob[row]) == (0, float("-inf"))
            continue
        expected = torch.log_softmax(logits[row], -1).max(-1)
        assert token[row] == expected.indices
        torch.testing.assert_close(logprob[row].double(), expected.values, rtol=1e-5, atol=2e-6)
