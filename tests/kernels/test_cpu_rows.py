"""Row-wise emitters against torch in fp64, with odd sizes, every dtype and views of one workspace."""

import pytest
import torch
from tvm.tirx.script import builder as T

from circuitgraph.kernels.cpu import rows
from circuitgraph.kernels.cpu import vector as v
from tests.kernels.cpu_harness import assert_close, compile_cases, declare, poisoned, random

DTYPES = ("float32", "float16", "bfloat16")
MAPS = {
    "add": (rows.emit_add, 2, lambda a, b: a + b),
    "mul": (rows.emit_mul, 2, lambda a, b: a * b),
    "silu": (rows.emit_silu, 1, torch.nn.functional.silu),
    "sigmoid": (rows.emit_sigmoid, 1, torch.sigmoid),
    "copy": (rows.emit_copy, 1, lambda a: a),
}
SHAPES = ((1, 5), (3, 37), (17, 1024))
NORMS = ((1, 37), (5, 64), (3, 4, 20), (2, 3))
ROPES = ((3, 2, 16, 8, False), (2, 3, 20, 5, False), (5, 1, 64, 32, True), (1, 4, 64, 32, False))


def emit_map(emitter, inputs, shape, dtype):
    def emit(lanes):
        buffers = [declare(f"x{i}", shape, dtype) for i in range(inputs)]
        emitter(*buffers, declare("out", shape, dtype), lanes=lanes)

    return emit


def emit_norm(shape, dtype, plus_one):
    def emit(lanes):
        x, w, out = declare("x", shape, dtype), declare("w", shape[-1:], dtype), declare("out", shape, dtype)
        rows.emit_rms_norm(x, w, out, eps=1e-5, lanes=lanes, plus_one=plus_one)

    return emit


def emit_rope(n, heads, dim, half, interleaved):
    def emit(lanes):
        positions = T.int32()
        x = declare("x", (n, heads, dim), "float32")
        cos, sin = declare("cos", (positions, half), "float32"), declare("sin", (positions, half), "float32")
        at, out = declare("positions", (n,), "int32"), declare("out", (n, heads, dim), "float32")
        rows.emit_rope(x, cos, sin, at, out, lanes=lanes, interleaved=interleaved)

    return emit


def emit_joined(dtype):
    """out = slice of concat(a, b), reshaped; the concat lives in a workspace at a byte offset."""

    def emit(lanes):
        a, b = declare("a", (3, 11), dtype), declare("b", (3, 20), dtype)
        workspace, out = declare("workspace", (4096,), "uint8"), declare("out", (6, 9), dtype)
        joined = T.decl_buffer((3, 31), dtype, data=workspace.data, byte_offset=128)
        part = T.decl_buffer((3, 18), "float32", data=workspace.data, byte_offset=1024)
        rows.emit_concat([a, b], joined, lanes=lanes)
        rows.emit_slice(joined, part, 7, lanes=lanes)
        rows.emit_copy(part, out, lanes=lanes)

    return emit


def emit_embedding(dtype):
    def emit(lanes):
        ids, table = declare("ids", (5,), "int32"), declare("table", (11, 37), dtype)
        rows.emit_embedding(ids, table, declare("out", (5, 37), "float32"), lanes=lanes)

    return emit


def emit_zero(lanes):
    x, marks = declare("x", (4, 3, 7), "float32"), declare("marks", (4,), "int32")
    rows.emit_zero_rows(x, marks, 0, declare("out", (4, 3, 7), "float32"), lanes=lanes)


def emit_shift(lanes):
    rows.emit_shift(declare("x", (5,), "int32"), -3, declare("out", (5,), "int32"))


def emit_exp(lanes):
    x, out = declare("x", (4096,), "float32"), declare("out", (4096,), "float32")
    v.for_columns(4096, lanes, lambda c, width: v.store(out, [c], v.exp(v.load(x, [c], width), width), width))


def name(*parts):
    return "_".join(str(part).replace(", ", "x").strip("()") for part in parts)


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    cases = {
        name(op, shape, dtype): emit_map(emitter, inputs, shape, dtype)
        for op, (emitter, inputs, _) in MAPS.items()
        for shape in SHAPES
        for dtype in DTYPES
    }
    cases |= {
        name("norm", shape, dtype, plus): emit_norm(shape, dtype, plus)
        for shape in NORMS
        for dtype in DTYPES
        for plus in (False, True)
    }
    cases |= {name("rope", case): emit_rope(*case) for case in ROPES}
    cases |= {name("joined", dtype): emit_joined(dtype) for dtype in DTYPES}
    cases |= {name("embedding", dtype): emit_embedding(dtype) for dtype in DTYPES}
    cases |= {"zero": emit_zero, "shift": emit_shift, "exp": emit_exp}
    return compile_cases(cases, tmp_path_factory.mktemp("rows"))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("op", MAPS)
def test_elementwise(library, op, shape, dtype):
    _, count, function = MAPS[op]
    inputs, out = [random(shape, dtype, i, scale=3) for i in range(count)], poisoned(shape, dtype)
    library[name(op, shape, dtype)](*inputs, out)
    assert_close(out, function(*(x.double() for x in inputs)), dtype)


@pytest.mark.parametrize("plus_one", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", NORMS)
def test_rms_norm(library, shape, dtype, plus_one):
    x, w, out = random(shape, dtype, 1, scale=5), random(shape[-1:], dtype, 2), poisoned(shape, dtype)
    library[name("norm", shape, dtype, plus_one)](x, w, out)
    normed = x.double() / (x.double().pow(2).mean(-1, keepdim=True) + 1e-5).sqrt()
    assert_close(out, normed * (w.double() + plus_one), dtype)


@pytest.mark.parametrize("case", ROPES)
def test_rope(library, case):
    n, heads, dim, half, interleaved = case
    x, out = random((n, heads, dim)), poisoned((n, heads, dim))
    angles = random((50, half), seed=2, scale=9)
    positions = torch.randint(0, 50, (n,), generator=torch.Generator().manual_seed(3)).int()
    library[name("rope", case)](x, angles.cos(), angles.sin(), positions, out)
    first = slice(0, 2 * half, 2) if interleaved else slice(0, half)
    second = slice(1, 2 * half, 2) if interleaved else slice(half, 2 * half)
    cos, sin = (f(angles[positions.long()].double())[:, None] for f in (torch.cos, torch.sin))
    expected = x.double().clone()
    expected[..., first] = x[..., first].double() * cos - x[..., second].double() * sin
    expected[..., second] = x[..., second].double() * cos + x[..., first].double() * sin
    assert_close(out, expected)
    assert torch.equal(out[..., 2 * half :], x[..., 2 * half :])


@pytest.mark.parametrize("dtype", DTYPES)
def test_concat_slice_and_reshape(library, dtype):
    a, b, out = random((3, 11), dtype, 1), random((3, 20), dtype, 2), poisoned((6, 9), dtype)
    library[name("joined", dtype)](a, b, torch.full((4096,), 255, dtype=torch.uint8), out)
    assert torch.equal(out, torch.cat([a, b], -1)[:, 7:25].reshape(6, 9))


@pytest.mark.parametrize("dtype", DTYPES)
def test_embedding_reads_nothing_outside_the_table(library, dtype):
    ids = torch.tensor([3, -1, 10, 11, 2**31 - 1], dtype=torch.int32)
    table, out = random((11, 37), dtype), poisoned((5, 37))
    library[name("embedding", dtype)](ids, table, out)
    expected = torch.zeros(5, 37)
    expected[0], expected[2] = table[3].float(), table[10].float()
    assert torch.equal(out, expected)


def test_zero_rows(library):
    x, marks, out = random((4, 3, 7)), torch.tensor([0, 1, 0, -1], dtype=torch.int32), poisoned((4, 3, 7))
    library["zero"](x, marks, out)
    assert torch.equal(out, x * (marks != 0)[:, None, None])


def test_shift(library):
    out = poisoned((5,), "int32")
    library["shift"](torch.arange(5, dtype=torch.int32), out)
    assert out.tolist() == [-3, -2, -1, 0, 1]


def test_exp(library):
    x = torch.linspace(-87, 88.7, 4096)
    x[:4] = torch.tensor([float("-inf"), float("nan"), float("inf"), 0.0])
    out = poisoned((4096,))
    library["exp"](x, out)
    assert (out[0], out[2], out[3]) == (0, float("inf"), 1)
    assert out[1].isnan()
    torch.testing.assert_close(out[4:].double(), x[4:].double().exp(), rtol=3e-7, atol=0)


def test_bf16_rounds_like_torch(library):
    x = torch.randn(17, 1024, generator=torch.Generator().manual_seed(1)).bfloat16()
    out = poisoned((17, 1024), "bfloat16")
    ones = torch.full_like(x, 1.0)
    library[name("add", (17, 1024), "bfloat16")](x, ones, out)
    assert torch.equal(out, x + ones)


def test_bf16_keeps_nan_and_infinity(library):
    x = torch.zeros(3, 37, dtype=torch.bfloat16)
    x[0, :3] = torch.tensor([float("nan"), float("inf"), float("-inf")])
    x[0, 36] = float("nan")
    out = torch.zeros_like(x)
    library[name("copy", (3, 37), "bfloat16")](x, out)
    torch.testing.assert_close(out, x, equal_nan=True)
