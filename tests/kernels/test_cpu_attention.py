"""Paged attention and cache append against torch in fp64."""

import math

import pytest
import torch
from tvm.tirx.script import builder as T

from circuitgraph.kernels.cpu import attention, sizes
from tests.kernels.cpu_harness import assert_close, compile_cases, declare, poisoned, random

# n, heads, kv heads, dim, cache dtype, activation dtype, splits
CASES = [
    (1, 9, 3, 64, "bfloat16", "float32", 4),
    (3, 4, 4, 20, "float32", "float32", 1),
    (5, 6, 2, 32, "float16", "float16", 1),
    (8, 2, 1, 7, "float32", "bfloat16", 3),
    (17, 4, 2, 16, "bfloat16", "bfloat16", 1),
]
BLOCK_SIZES = (16, 1, 5)


def cache_arguments(kv_heads, dim, dtype):
    blocks, block_size = T.int32(), T.int32()
    shape = (blocks, kv_heads, block_size, dim)
    return declare("k_cache", shape, dtype), declare("v_cache", shape, dtype)


def attend(n, heads, kv_heads, dim, cache_dtype, dtype, splits):
    def emit(lanes):
        q = declare("q", (n, heads, dim), dtype)
        k_cache, v_cache = cache_arguments(kv_heads, dim, cache_dtype)
        sequences, width = T.int32(), T.int32()
        table, sequence = declare("table", (sequences, width), "int32"), declare("sequence", (n,), "int32")
        start, length = declare("start", (sequences,), "int32"), declare("length", (n,), "int32")
        out = declare("out", (n, heads, dim), dtype)
        floats = sizes.attention_scratch_floats(n, heads, dim, splits)
        scratch = declare("scratch", (max(1, floats),), "float32")
        attention.emit_attention(
            q, k_cache, v_cache, table, sequence, start, length, out,
            n=n, lanes=lanes, splits=splits, scratch=scratch, split_rows=8,
        )  # fmt: skip

    return emit


def append(n, kv_heads, dim, cache_dtype, dtype):
    def emit(lanes):
        k, value = declare("k", (n, kv_heads, dim), dtype), declare("v", (n, kv_heads, dim), dtype)
        k_cache, v_cache = cache_arguments(kv_heads, dim, cache_dtype)
        slot = declare("slot", (n,), "int32")
        attention.emit_kv_append(k, value, k_cache, v_cache, slot, n=n, lanes=lanes)

    return emit


APPENDS = [(5, 2, 20, "bfloat16", "float32"), (3, 1, 64, "float32", "bfloat16"), (1, 3, 8, "float16", "float16")]


def name(kind, *parts):
    return "_".join([kind, *map(str, parts)])


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    cases = {name("attend", *case): attend(*case) for case in CASES}
    cases |= {name("append", *case): append(*case) for case in APPENDS}
    return compile_cases(cases, tmp_path_factory.mktemp("attention"))


def reference(q, k_cache, v_cache, table, sequence, start, length):
    out = torch.zeros(q.shape, dtype=torch.float64)
    group = q.shape[1] // k_cache.shape[1]
    block_size = k_cache.shape[2]
    for i in range(q.shape[0]):
        if length[i] == 0:
            continue
        rows = torch.arange(start[sequence[i]], length[i])
        if not len(rows):
            continue
        blocks = table[sequence[i]][rows // block_size].long()
        k = k_cache.double()[blocks, :, rows % block_size].repeat_interleave(group, 1)
        value = v_cache.double()[blocks, :, rows % block_size].repeat_interleave(group, 1)
        weights = torch.softmax(torch.einsum("hd,rhd->hr", q[i].double(), k) / math.sqrt(q.shape[2]), -1)
        out[i] = torch.einsum("hr,rhd->hd", weights, value)
    return out


@pytest.mark.parametrize("block_size", BLOCK_SIZES)
@pytest.mark.parametrize("case", CASES, ids=lambda case: name("", *case))
def test_attention(library, case, block_size):
    n, heads, kv_heads, dim, cache_dtype, dtype, splits = case
    generator = torch.Generator().manual_seed(block_size)
    sequences, longest = n + 1, 75
    width = -(-longest // block_size) + 1
    blocks = sequences * width + 3
    # Memory that no row may read is NaN: unused blocks, rows before start and behind length.
    k_cache = poisoned((blocks, kv_heads, block_size, dim), cache_dtype)
    v_cache = poisoned((blocks, kv_heads, block_size, dim), cache_dtype)
    table = torch.full((sequences, width), 2**30, dtype=torch.int32)
    order = torch.randperm(blocks, generator=generator).int()
    start = torch.randint(0, 9, (sequences,), generator=generator).int()
    sequence = torch.randperm(sequences, generator=generator)[:n].int()
    length = torch.randint(10, longest, (n,), generator=generator).int()
    length[0] = longest - 1
    if n > 2:
        length[1], sequence[1] = 0, -1  # an idle row, whose sequence index is not to be used
        length[2] = start[sequence[2]] + 1  # one visible row
    taken = 0
    for i in range(n):
        if length[i] == 0:
            continue
        used = -(-int(length[i]) // block_size)
        table[sequence[i], :used] = order[taken : taken + used]
        taken += used
        rows = torch.arange(start[sequence[i]], length[i])
        at = table[sequence[i]][rows // block_size].long(), slice(None), rows % block_size
        k_cache[at] = random((len(rows), kv_heads, dim), cache_dtype, seed=i)
        v_cache[at] = random((len(rows), kv_heads, dim), cache_dtype, seed=i + 100)
    q, out = random((n, heads, dim), dtype, seed=7), poisoned((n, heads, dim), dtype)
    scratch = poisoned((max(1, sizes.attention_scratch_floats(n, heads, dim, splits)),))
    library[name("attend", *case)](q, k_cache, v_cache, table, sequence, start, length, out, scratch)
    assert_close(out, reference(q, k_cache, v_cache, table, sequence, start, length), dtype)


@pytest.mark.parametrize("block_size", BLOCK_SIZES)
@pytest.mark.parametrize("case", APPENDS, ids=lambda case: name("", *case))
def test_append(library, case, block_size):
    n, kv_heads, dim, cache_dtype, dtype = case
    blocks = 7
    k, value = random((n, kv_heads, dim), dtype, 1), random((n, kv_heads, dim), dtype, 2)
    k_cache = random((blocks, kv_heads, block_size, dim), cache_dtype, 3)
    v_cache = random((blocks, kv_heads, block_size, dim), cache_dtype, 4)
    slot = torch.randperm(blocks * block_size, generator=torch.Generator().manual_seed(1))[:n].int()
    if n > 1:
        slot[1] = -1
    if n > 3:
        slot[3] = blocks * block_size  # past the end
    expected_k, expected_v = k_cache.clone(), v_cache.clone()
    for i in range(n):
        if 0 <= slot[i] < blocks * block_size:
            at = slot[i] // block_size, slice(None), slot[i] % block_size
            expected_k[at], expected_v[at] = k[i].to(k_cache.dtype), value[i].to(v_cache.dtype)
    library[name("append", *case)](k, value, k_cache, v_cache, slot)
    assert torch.equal(k_cache, expected_k)
    assert torch.equal(v_cache, expected_v)
