"""Paged attention and cache append against torch in fp64."""

import math

import pytest
import torch

from circuitgraph.kernels.cpu import attention, sizes
from tests.kernels.cpu_harness import assert_close, compile_cases, declare, name, poisoned, random
from tests.kernels.paged_cache import BLOCK_SIZES, addressing_arguments, cache_arguments, check_append, paged, places

# n, heads, kv heads, dim, cache dtype, activation dtype, splits
CASES = [
    (1, 9, 3, 64, "bfloat16", "float32", 4),
    (3, 4, 4, 20, "float32", "float32", 1),
    (5, 6, 2, 32, "float16", "float16", 1),
    (8, 2, 1, 7, "float32", "bfloat16", 3),
    (17, 4, 2, 16, "bfloat16", "bfloat16", 1),
    (2, 11, 1, 24, "bfloat16", "float32", 2),  # more heads over one than go over a tile together
]


def attend(n, heads, kv_heads, dim, cache_dtype, dtype, splits):
    def emit(lanes):
        q = declare("q", (n, heads, dim), dtype)
        caches = cache_arguments(("k_cache", "v_cache"), kv_heads, (dim, dim), cache_dtype)
        addressing = addressing_arguments(n)
        out = declare("out", (n, heads, dim), dtype)
        floats = sizes.attention_scratch_floats(n, heads, dim, splits)
        scratch = declare("scratch", (max(1, floats),), "float32")
        attention.emit_attention(
            q, *caches, *addressing, out,
            n=n, lanes=lanes, splits=splits, scratch=scratch, split_rows=8,
        )  # fmt: skip

    return emit


def append(n, kv_heads, dim, cache_dtype, dtype):
    def emit(lanes):
        k, value = declare("k", (n, kv_heads, dim), dtype), declare("v", (n, kv_heads, dim), dtype)
        caches = cache_arguments(("k_cache", "v_cache"), kv_heads, (dim, dim), cache_dtype)
        attention.emit_kv_append(k, value, *caches, declare("slot", (n,), "int32"), n=n, lanes=lanes)

    return emit


APPENDS = [(5, 2, 20, "bfloat16", "float32"), (3, 1, 64, "float32", "bfloat16"), (1, 3, 8, "float16", "float16")]


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    cases = {name("attend", *case): attend(*case) for case in CASES}
    cases |= {name("append", *case): append(*case) for case in APPENDS}
    return compile_cases(cases, tmp_path_factory.mktemp("attention"))


def attended(q, caches, table, sequence, start, length):
    """In fp64, row by row."""
    out = torch.zeros(q.shape, dtype=torch.float64)
    group = q.shape[1] // caches[0].shape[1]
    for i in range(len(length)):
        if length[i] == 0:
            continue
        at = places(table, sequence, start, length, i, caches[0].shape[2])
        k, value = (cache.double()[at].repeat_interleave(group, 1) for cache in caches)
        weights = torch.softmax(torch.einsum("hd,rhd->hr", q[i].double(), k) / math.sqrt(q.shape[2]), -1)
        out[i] = torch.einsum("hr,rhd->hd", weights, value)
    return out


@pytest.mark.parametrize("block_size", BLOCK_SIZES)
@pytest.mark.parametrize("case", CASES, ids=lambda case: name("", *case))
def test_attention(library, case, block_size):
    n, heads, kv_heads, dim, cache_dtype, dtype, splits = case
    caches, *addressing = paged(n, block_size, kv_heads, (dim, dim), cache_dtype)
    q, out = random((n, heads, dim), dtype, seed=7), poisoned((n, heads, dim), dtype)
    scratch = poisoned((max(1, sizes.attention_scratch_floats(n, heads, dim, splits)),))
    library[name("attend", *case)](q, *caches, *addressing, out, scratch)
    assert_close(out, attended(q, caches, *addressing), dtype)
    # The control: a row less.
    *tables, length = addressing
    with pytest.raises(AssertionError):
        assert_close(out, attended(q, caches, *tables, length - (length > 9).int()), dtype)


@pytest.mark.parametrize("block_size", BLOCK_SIZES)
@pytest.mark.parametrize("case", APPENDS, ids=lambda case: name("", *case))
def test_append(library, case, block_size):
    n, kv_heads, dim, cache_dtype, dtype = case
    check_append(library[name("append", *case)], kv_heads, (dim, dim), dtype, cache_dtype, n, block_size)
