"""The block pool: sizes, the ledger, loans."""

from __future__ import annotations

import pytest
import torch

from circuitgraph.errors import RuntimeUseError
from circuitgraph.runtime import BlockPool
from tests.circuits import small_mtp


def test_sizes_are_published_and_follow_blocks_or_bytes():
    circuit = small_mtp(act="f32", kv="bf16")
    pool = BlockPool(circuit, memory_bytes=10_000, block_size=8)
    assert pool.bytes_per_row == 2 * 2 * 16 * 2
    assert pool.bytes_per_block == 8 * pool.bytes_per_row
    assert pool.total == 10_000 // pool.bytes_per_block
    k, v = pool.storage["kv"]
    assert k.shape == v.shape == (1, pool.total, 2, 8, 16)
    assert k.dtype == torch.bfloat16
    assert k.nbytes + v.nbytes == pool.total * pool.bytes_per_block
    assert pool.bytes_for(9) == 2 * pool.bytes_per_block


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "either in blocks or in bytes"),
        ({"blocks": 4, "memory_bytes": 4096}, "either in blocks or in bytes"),
        ({"blocks": 0}, "would be empty"),
        ({"memory_bytes": 100}, r"would be empty; expected at least one block \(4096 bytes\); got 100"),
        ({"blocks": 4, "block_size": 0}, "at least one row"),
    ],
)
def test_a_pool_without_a_size_is_refused(options, message):
    with pytest.raises(RuntimeUseError, match=message):
        BlockPool(small_mtp(act="f32", kv="f32"), **options)


def test_loans_and_double_frees():
    pool = BlockPool(small_mtp(), blocks=6, block_size=4)
    lease = pool.open(promised_rows=8)
    assert pool.grow([(lease, 12)])
    blocks = pool.lend(lease)
    assert len(blocks) == 3
    assert (pool.ledger.held, pool.ledger.loaned, pool.ledger.promised) == (0, 3, 0), "the promise went with the blocks"
    other = pool.open()
    assert not pool.grow([(other, 16)])
    pool.adopt(other, blocks)
    with pytest.raises(RuntimeUseError, match="are not on loan"):
        pool.adopt(lease, blocks)
    loan = pool.lend(other)
    with pytest.raises(RuntimeUseError, match="listed twice"):
        pool.free([loan[0], loan[0]])
    pool.free(loan)
    with pytest.raises(RuntimeUseError, match="are not on loan"):
        pool.free(loan)
    assert pool.ledger.balances
    pool.close(lease)
    pool.close(lease)
    pool.close(other)
    assert pool.ledger.free == 6
    assert pool.ledger.promised == 0
    with pytest.raises(RuntimeUseError, match="closed"):
        pool.grow([(lease, 1)])
