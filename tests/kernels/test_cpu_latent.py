"""Latent attention, its cache write and the product of each head's own matrix, against torch in fp64."""

import pytest
import torch

from circuitgraph.kernels.cpu import attention, head_linear, latent, sizes
from circuitgraph.ops import TABLE, OpContext
from tests.kernels.cpu_harness import assert_close, compile_cases, declare, name, poisoned, random
from tests.kernels.paged_cache import BLOCK_SIZES, addressing_arguments, cache_arguments, check_append, paged, places

# n, heads, latent columns, rotated columns, cache dtype, activation dtype, splits
ATTENDS = [
    (1, 9, 48, 16, "bfloat16", "float32", 4),
    (3, 4, 20, 6, "float32", "float32", 1),
    (5, 6, 32, 8, "float16", "float16", 2),
    (8, 1, 7, 3, "float32", "bfloat16", 3),
    (17, 3, 16, 64, "bfloat16", "bfloat16", 1),
]
# n, heads, rows of a head's block, start, size, latent columns, columns before x, activation dtype, weight dtype
PRODUCTS = [
    (n, 3, 13, start, 5, 21, skip, x, w)
    for n, start, skip, x, w in (
        (1, 0, 0, "float32", "bfloat16"), (2, 8, 3, "float32", "float32"), (5, 2, 0, "bfloat16", "float16"),
        (8, 0, 0, "float32", "bfloat16"), (17, 3, 2, "float16", "bfloat16"), (64, 8, 0, "float32", "bfloat16"),
    )
]  # fmt: skip
PRODUCTS += [(4, 2, 48, 16, 32, 64, 0, "float32", "bfloat16"), (3, 1, 40, 0, 37, 530, 0, "float32", "float32")]


def attend(n, heads, columns, rotated, cache_dtype, dtype, splits):
    def emit(lanes):
        q = [declare(part, (n, heads, dim), dtype) for part, dim in (("q_latent", columns), ("q_rotated", rotated))]
        caches = cache_arguments(("rotated", "latent"), 1, (rotated, columns), cache_dtype)
        addressing = addressing_arguments(n)
        out = declare("out", (n, heads, columns), dtype)
        scratch = declare("scratch", (sizes.attention_scratch_floats(n, heads, columns, splits),), "float32")
        latent.emit_latent_attention(
            *q, *caches, *addressing, out,
            n=n, lanes=lanes, scale=0.21, splits=splits, scratch=scratch, split_rows=8,
        )  # fmt: skip

    return emit


def append(n, columns, rotated, cache_dtype, dtype):
    def emit(lanes):
        new = [declare(part, (n, 1, dim), dtype) for part, dim in (("new_rotated", rotated), ("new_latent", columns))]
        caches = cache_arguments(("rotated", "latent"), 1, (rotated, columns), cache_dtype)
        attention.emit_kv_append(*new, *caches, declare("slot", (n,), "int32"), n=n, lanes=lanes)

    return emit


def head_floats(n, heads, columns):
    return max(sizes.head_scratch_floats(n, heads, columns, lanes) for lanes in (4, 8, 16))


def product(into, n, heads, rows, start, size, columns, skip, x_dtype, w_dtype):
    def emit(lanes):
        x = declare("x", (n, heads, skip + (size if into == "latent" else columns)), x_dtype)
        w = declare("w", (heads * rows, columns), w_dtype)
        out = declare("out", (n, heads, columns if into == "latent" else size), x_dtype)
        if into == "latent":
            head_linear.emit_into_latent(x, w, out, n=n, lanes=lanes, start=start, size=size, skip=skip, columns=256)
        else:
            packed = declare("packed", (head_floats(n, heads, columns),), "float32")
            head_linear.emit_into_heads(x, w, out, n=n, lanes=lanes, start=start, skip=skip, packed=packed)

    return emit


APPENDS = [(5, 20, 6, "bfloat16", "float32"), (1, 12, 64, "float32", "bfloat16")]
INTO = ("latent", "heads")


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    cases = {name("attend", *case): attend(*case) for case in ATTENDS}
    cases |= {name("append", *case): append(*case) for case in APPENDS}
    cases |= {name(into, *case): product(into, *case) for case in PRODUCTS for into in INTO}
    return compile_cases(cases, tmp_path_factory.mktemp("latent"))


def attended(q, caches, table, sequence, start, length):
    """In fp64, row by row."""
    out = torch.zeros(q[0].shape, dtype=torch.float64)
    for i in range(len(length)):
        if length[i] == 0:
            continue
        at = places(table, sequence, start, length, i, caches[0].shape[2])
        rotated, columns = (cache.double()[at][:, 0] for cache in caches)
        scores = q[0][i].double() @ columns.T + q[1][i].double() @ rotated.T
        out[i] = torch.softmax(scores * 0.21, -1) @ columns
    return out


@pytest.mark.parametrize("block_size", BLOCK_SIZES)
@pytest.mark.parametrize("case", ATTENDS, ids=lambda case: name("", *case))
def test_attention(library, case, block_size):
    n, heads, columns, rotated, cache_dtype, dtype, splits = case
    caches, *addressing = paged(n, block_size, 1, (rotated, columns), cache_dtype)
    q = [random((n, heads, dim), dtype, seed=7) for dim in (columns, rotated)]
    out = poisoned((n, heads, columns), dtype)
    scratch = poisoned((sizes.attention_scratch_floats(n, heads, columns, splits),))
    library[name("attend", *case)](*q, *caches, *addressing, out, scratch)
    assert_close(out, attended(q, caches, *addressing), dtype)
    # The controls: without the rotated part, and with a row less.
    for change in ((0 * caches[0], caches[1]), None):
        *tables, length = addressing
        other = attended(q, change or caches, *tables, length if change else length - (length > 9).int())
        with pytest.raises(AssertionError):
            assert_close(out, other, dtype)


@pytest.mark.parametrize("block_size", BLOCK_SIZES)
@pytest.mark.parametrize("case", APPENDS, ids=lambda case: name("", *case))
def test_append(library, case, block_size):
    n, columns, rotated, cache_dtype, dtype = case
    check_append(library[name("append", *case)], 1, (rotated, columns), dtype, cache_dtype, n, block_size)


@pytest.mark.parametrize("case", PRODUCTS, ids=lambda case: name("", *case))
@pytest.mark.parametrize("into", INTO)
def test_products_per_head(library, into, case):
    n, heads, rows, start, size, columns, skip, x_dtype, w_dtype = case
    used, made = (size, columns) if into == "latent" else (columns, size)
    x, w = random((n, heads, skip + used), x_dtype, 1), random((heads * rows, columns), w_dtype, 2, columns**-0.5)
    x[:, :, :skip] = float("nan")
    outside = torch.arange(heads * rows) % rows
    w[(outside < start) | (outside >= start + size)] = float("nan")
    out = poisoned((n, heads, made), x_dtype)
    packed = [] if into == "latent" else [poisoned((head_floats(n, heads, columns),))]

    def want(weight):
        attrs = {"start": start, "size": size, "into": into}
        return TABLE["head_linear"].reference([x[:, :, skip:].double(), weight], attrs, OpContext("f32"))[0]

    library[name(into, *case)](x, w, out, *packed)
    assert_close(out, want(w), x_dtype)
    w[start] += 1  # the control: one row of one head
    with pytest.raises(AssertionError):
        assert_close(out, want(w), x_dtype)


def test_rows_alone_are_the_same(library):
    """A row of a batch has the bits that it has alone, where weight rows are added up."""
    alone, many = PRODUCTS[0], PRODUCTS[3]
    _, heads, rows, _, size, columns, *_ = alone
    x, w = random((8, heads, size), seed=3), random((heads * rows, columns), "bfloat16", 4)
    out, one = poisoned((8, heads, columns)), poisoned((1, heads, columns))
    library[name("latent", *many)](x, w, out)
    for i in range(8):
        library[name("latent", *alone)](x[i : i + 1].contiguous(), w, one)
        assert torch.equal(one[0], out[i])
