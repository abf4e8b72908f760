"""Tiles, splits and scratch sizes: what a plan has to know of the CPU kernels. Needs no TVM."""

from dataclasses import dataclass

L1_ACTIVATION_BYTES = 20 * 1024

BLOCK_COLUMNS = 16
"""Blocks of columns that share a scale are a multiple of this, so that no vector of a quantised weight lies in two of them."""

STACK_BYTES = 192 * 1024
"""What a task of a matrix product may keep on its stack per row of activations, all rows together."""


@dataclass(frozen=True)
class Tile:
    """The inner loop: `columns` weight rows by `rows` activation rows of accumulators, each split in `chains`.

    Chains hide the latency of dependent adds where there are few accumulators. `unroll` counts vectors along K,
    a multiple of chains. `prefetch` is the distance in bytes of the software prefetch, 0 for none.
    """

    columns: int
    rows: int
    unroll: int = 4
    chains: int = 1
    prefetch: int = 1024


def default_tile(n, weights, lanes, k=None):
    """The tile that measured best for n rows of K elements and `weights` weights per projection.

    While the activations fit in half of a 32 KB L1 cache, one weight row at a time passes over them; beyond that,
    two at a time, so that the activations come from L2 half as often.
    """
    if n <= 8 and (k is None or n * k * 4 <= L1_ACTIVATION_BYTES):
        rows = _even_groups(n, max(1, 8 // weights))
        return Tile(columns=1, rows=rows, chains=max(1, 4 // (rows * weights)))
    columns = max(1, 2 // weights)
    limit = (24 if lanes == 16 else 12) // (columns * weights)
    rows = _even_groups(n, max(1, 8 // (columns * weights)) if n <= 8 else limit)
    return Tile(columns=columns, rows=rows, chains=max(1, 4 // (rows * columns * weights)), prefetch=4096)


def lone_tile(n, lanes, k):
    """The tile of a product that shares its launch's inner loop with no other: lm_head, a router, a matrix a head."""
    return default_tile(n, 1, lanes, k)


def _even_groups(n, limit):
    """The rows of one group, where n rows are cut into as few groups of at most `limit` as possible."""
    groups = -(-n // limit)
    return -(-n // groups)


def rows_on_stack(n, row_bytes, tile_rows):
    """How many of n rows a task takes at a time: all if their `row_bytes` fit, else whole groups of `tile_rows`."""
    if n * row_bytes <= STACK_BYTES:
        return n
    return max(1, STACK_BYTES // (row_bytes * tile_rows)) * tile_rows


def linear_scratch_floats(n, k, lanes, tile):
    """float32 elements that `emit_linear` and `emit_linear_top1` need for the packed activations."""
    rows = min(tile.rows, n)
    return -(-n // rows) * rows * -(-k // lanes) * lanes


def top1_tasks(vocabulary, task_columns=512):
    """How many tasks, and so scratch rows, `emit_linear_top1` uses."""
    return -(-vocabulary // task_columns)


def attention_splits(n, kv_heads, target_tasks=16, most=8):
    """Into how many pieces a row's context is cut, so that few rows still occupy all threads."""
    return max(1, min(most, -(-target_tasks // (n * kv_heads))))


def attention_scratch_floats(n, heads, dim, splits):
    """float32 elements of workspace that the pieces of an attention need: sums, and two numbers for each head."""
    return n * heads * splits * (dim + 2)


def row_stride(k):
    """float32 elements from one gathered row of k to the next: whole vectors of any length, and never a multiple of 4 KB,
    where rows would fight for the same lines of the L1 cache."""
    return -(-k // 16) * 16 + 16


def experts_tile(n, weights, lanes):
    """The inner loop for the rows of one expert. How many these are is known when it runs; chains must not depend on it,
    or a row's sums would differ with its neighbours."""
    return Tile(columns=1, rows=min(n, 6 if lanes == 16 else 3), chains=4 // weights)


def head_scratch_floats(n, heads, k, lanes):
    """float32 elements that `emit_into_heads` needs for the packed activations."""
    return heads * linear_scratch_floats(n, k, lanes, lone_tile(n, lanes, k))


def refuse_storage(storage):
    """Why weights in this storage (`circuit.ir.Storage`) cannot be read by `packed.Quantised`, or None."""
    if storage.block[1] % BLOCK_COLUMNS:
        return f"scales for {storage.block[1]} columns, which is no multiple of {BLOCK_COLUMNS}"
    return None
