"""Caches in blocks for the tests of attention: NaN wherever nobody may read."""

import torch
from tvm.tirx.script import builder as T

from tests.kernels.cpu_harness import declare, poisoned, random

BLOCK_SIZES = (16, 1, 5)
LONGEST = 75


def cache_arguments(names, heads, dims, dtype):
    """Arguments of a kernel: caches of any number of blocks."""
    blocks, block_size = T.int32(), T.int32()
    return [declare(name, (blocks, heads, block_size, dim), dtype) for name, dim in zip(names, dims, strict=True)]


def addressing_arguments(n):
    """Table, sequence, start and length, in an emitter's order."""
    sequences, width = T.int32(), T.int32()
    table, sequence = declare("table", (sequences, width), "int32"), declare("sequence", (n,), "int32")
    return [table, sequence, declare("start", (sequences,), "int32"), declare("length", (n,), "int32")]


def paged(n, block_size, heads, dims, dtype):
    """(caches, table, sequence, start, length): rows of unequal context, some idle or with one visible row. Unused blocks, rows
    before start and behind length are NaN."""
    generator = torch.Generator().manual_seed(block_size)
    sequences = n + 1
    width = -(-LONGEST // block_size) + 1
    blocks = sequences * width + 3
    caches = [poisoned((blocks, heads, block_size, dim), dtype) for dim in dims]
    table = torch.full((sequences, width), 2**30, dtype=torch.int32)
    order = torch.randperm(blocks, generator=generator).int()
    start = torch.randint(0, 9, (sequences,), generator=generator).int()
    sequence = torch.randperm(sequences, generator=generator)[:n].int()
    length = torch.randint(10, LONGEST, (n,), generator=generator).int()
    length[0] = LONGEST - 1
    if n > 2:
        length[1], sequence[1] = 0, -1  # an idle row, whose sequence index is not to be used
        length[2] = start[sequence[2]] + 1
    taken = 0
    for i in range(n):
        if length[i] == 0:
            continue
        used = -(-int(length[i]) // block_size)
        table[sequence[i], :used] = order[taken : taken + used]
        taken += used
        at = places(table, sequence, start, length, i, block_size)
        for index, cache in enumerate(caches):
            cache[at] = random((len(at[0]), heads, cache.shape[3]), dtype, seed=i + 100 * index)
    return caches, table, sequence, start, length


def places(table, sequence, start, length, row, block_size):
    """Where the visible rows of row `row` lie: an index of the caches, which gives [rows, heads, dim]."""
    rows = torch.arange(start[sequence[row]], length[row])
    return table[sequence[row]][rows // block_size].long(), slice(None), rows % block_size


def check_append(append, heads, dims, dtype, cache_dtype, n, block_size):
    """`append(*new, *caches, slot)` writes each row where its slot says, in the caches' dtype, and nothing else."""
    blocks = 7
    new = [random((n, heads, dim), dtype, index + 1) for index, dim in enumerate(dims)]
    caches = [random((blocks, heads, block_size, dim), cache_dtype, index + 3) for index, dim in enumerate(dims)]
    slot = torch.randperm(blocks * block_size, generator=torch.Generator().manual_seed(1))[:n].int()
    if n > 1:
        slot[1] = -1
    if n > 3:
        slot[3] = blocks * block_size  # past the end
    want = [cache.clone() for cache in caches]
    written = [(i, at) for i, at in enumerate(slot.tolist()) if 0 <= at < blocks * block_size]
    assert written
    for i, at in written:
        for cache, row in zip(want, new, strict=True):
            cache[at // block_size, :, at % block_size] = row[i].to(cache.dtype)
    append(*new, *caches, slot)
    for got, expected in zip(caches, want, strict=True):
        assert torch.equal(got, expected)
