"""Products with a matrix for each head: every matrix is read once for up to 64 rows, through tensor cores.

A block has some of one head's results and asks for all of their weights before it waits for the kernel before: 32 KB, so that
the blocks of 128 heads fit the GPU at once, and the whole matrix is on its way.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tvm.backend.cuda.lang.alloc_pool import SMEMPool
from tvm.tirx.script import builder as T

from .values import COPY, LOAD, do, hold, load, put, register, wide, zeros

LOAD_TRANSPOSED = "ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16"
WARPS = 4
ROWS = 64
"""Rows of x that a block multiplies its weights with."""

Finish = Callable[[Any, Any, Any, Any], None]


@dataclass(frozen=True)
class HeadProduct:
    """y[n, h] = x[n, h] W_h (`into_latent`) or W_h x[n, h], W_h: `size` rows from `start` of the head's block of the weight.

    x: columns first.. of [rows, heads, stride] in memory, as many as the product sums over.
    """

    rows: int
    heads: int
    block: int
    start: int
    size: int
    latent: int
    into_latent: bool
    first: int
    stride: int

    @property
    def summed(self) -> int:
        return self.size if self.into_latent else self.latent

    @property
    def made(self) -> int:
        return self.latent if self.into_latent else self.size

    @property
    def chunk(self) -> int:
        """Results of a block: of the latent's columns as many as a warp's share times 4, of weight rows those of 32 KB."""
        return 128 if self.into_latent else 32

    @property
    def shared_bytes(self) -> int:
        return self.chunk * self.summed * 2 + 2 * 32 * 8 * 4

    def refuse(self) -> str | None:
        if self.summed % 32 or self.made % self.chunk:
            return f"{self.made} results of {self.summed} columns are not cut into blocks of {self.chunk} and steps of 32"
        if not self.into_latent and self.summed % 128:
            return f"{self.summed} columns are no whole number of 128"
        if (self.first | self.stride) % 2 or self.summed > 512:
            return f"columns {self.first}..{self.first + self.summed - 1} of {self.stride}"
        return None


def emit_head_product(env: Any, product: HeadProduct, x: Any, weight: Any, kind: str, finish: Finish) -> None:
    """x: [rows, heads * stride / 2] words; weight: [heads * block, latent / 2] words; finish(row, head, column, value)."""
    groups, chunks = -(-product.rows // ROWS), product.made // product.chunk
    with env.kernel(product.heads * chunks * groups, WARPS, early=True) as at:
        pool = SMEMPool()
        width = product.chunk // 8 if product.into_latent else product.summed // 8  # chunks of 16 bytes in a line
        lines = product.summed if product.into_latent else product.chunk
        tile = pool.alloc((lines * width, 4), "uint32", align=128)
        halves = pool.alloc((2, 32 * 8), "float32", align=16)
        pool.commit()
        chunk = hold(T.floormod(at.block, chunks), "int32", "chunk")
        head = hold(T.floormod(T.floordiv(at.block, chunks), product.heads), "int32", "head")
        first_row = hold(T.floordiv(at.block, chunks * product.heads) * ROWS, "int32", "first_row")
        first_line = hold(head * product.block + product.start + (0 if product.into_latent else chunk * product.chunk), "int32")
        first_word = chunk * (product.chunk // 2) if product.into_latent else T.int32(0)
        thread = at.warp * 32 + at.lane
        with T.serial(0, lines * width // (WARPS * 32)) as turn:
            piece = hold(turn * (WARPS * 32) + thread, "int32")
            line, place = T.floordiv(piece, width), T.floormod(piece, width)
            source = weight.ptr_to([wide(first_line + line), wide(first_word + place * 4)])
            do(T.ptx[COPY](tile.ptr_to([line * width + T.bitwise_xor(place, line % 8), 0]), source, 16))
        do(T.ptx.cp.async_.commit_group())
        env.wait()
        block = _Block(product, at, x, tile, halves, kind, width, head, chunk, first_row, finish)
        blocks = -(-min(product.rows, ROWS) // 8)
        x_of_first = block.load(T.int32(0))
        do(T.ptx.cp.async_.wait_group(0))
        do(T.cuda.cta_sync())
        block.multiply(T.int32(0), x_of_first)
        if blocks > 1:
            with T.serial(1, blocks) as number:
                block.multiply(number, block.load(number))


@dataclass(frozen=True)
class _Block:
    """Eight rows of x after eight rows with the weights in shared memory."""

    product: HeadProduct
    at: Any
    x: Any
    tile: Any
    halves: Any
    kind: str
    width: int
    head: Any
    chunk: Any
    first_row: Any
    finish: Finish

    @property
    def steps(self) -> int:
        """Of 16 columns of a warp: all, or where the warps share the results of 32 weight rows, half."""
        return self.product.summed // (16 if self.product.into_latent else 32)

    @property
    def first_step(self) -> Any:
        return T.int32(0) if self.product.into_latent else T.floordiv(self.at.warp, 2) * self.steps

    def load(self, number: Any) -> Any:
        """The fragments of eight rows; rows that there are not are replaced by the last."""
        row = T.min(self.first_row + number * 8 + T.floordiv(self.at.lane, 4), T.int32(self.product.rows - 1))
        first = self.head * (self.product.stride // 2) + self.product.first // 2 + self.first_step * 8 + self.at.lane % 4
        first, row = hold(first, "int32"), hold(row, "int32")
        words = register("uint32", self.steps * 2, "x")
        for index in range(self.steps * 2):
            do(T.ptx["ld.global.b32"](words[index], self.x.ptr_to([row, first + index * 4])))
        return words

    def multiply(self, number: Any, x: Any) -> None:
        lane, warp = self.at.lane, self.at.warp
        if self.product.into_latent:
            for tile in range(2):
                sums = self._sums(x, lambda step, place=warp * 2 + tile: self._transposed(step, place))
                self._store(number, warp * 32 + tile * 16, sums)
            return
        sums = self._sums(x, lambda step: self._straight(step, warp % 2))
        for i in range(4):
            place = (warp % 2 * 16 + T.floordiv(lane, 4) + i // 2 * 8) * 8 + lane % 4 * 2 + i % 2
            with T.If(warp >= 2), T.Then():
                T.buffer_store(self.halves, sums[i], [0, place])
        do(T.cuda.cta_sync())
        with T.If(warp < 2), T.Then():
            for i in range(4):
                place = (warp % 2 * 16 + T.floordiv(lane, 4) + i // 2 * 8) * 8 + lane % 4 * 2 + i % 2
                put(sums, sums[i] + self.halves[0, place], i)
            self._store(number, warp * 16, sums)
        do(T.cuda.cta_sync())  # the other half is read before it is written again

    def _sums(self, x: Any, weights: Callable[[int], Any]) -> Any:
        mma = f"mma.sync.aligned.m16n8k16.row.col.f32.{self.kind}.{self.kind}.f32"
        sums = register("float32", 4, "sums")
        zeros(sums, 4)
        c = [sums[i] for i in range(4)]
        for step in range(self.steps):
            piece = weights(step)
            do(T.ptx[mma](*c, *(piece[i] for i in range(4)), x[step * 2], x[step * 2 + 1], *c))
        return sums

    def _transposed(self, step: int, tile: Any) -> Any:
        """16 columns of the latent, as rows, and 16 weight rows."""
        lane, piece = self.at.lane, register("uint32", 4, "weights")
        line = step * 16 + T.floordiv(lane, 16) * 8 + lane % 8
        place = tile * 2 + T.floormod(T.floordiv(lane, 8), 2)
        address = self.tile.ptr_to([line * self.width + T.bitwise_xor(place, lane % 8), 0])
        do(T.ptx[LOAD_TRANSPOSED](*(piece[i] for i in range(4)), address))
        return piece

    def _straight(self, step: int, tile: Any) -> Any:
        lane, piece = self.at.lane, register("uint32", 4, "weights")
        line = tile * 16 + T.floormod(T.floordiv(lane, 8), 2) * 8 + lane % 8
        place = (self.first_step + step) * 2 + T.floordiv(lane, 16)
        address = self.tile.ptr_to([line * self.width + T.bitwise_xor(place, lane % 8), 0])
        do(T.ptx[LOAD](*(piece[i] for i in range(4)), address))
        return piece

    def _store(self, number: Any, first: Any, sums: Any) -> None:
        for i in range(4):
            row = hold(self.first_row + number * 8 + self.at.lane % 4 * 2 + i % 2, "int32")
            column = hold(self.chunk * self.product.chunk + first + T.floordiv(self.at.lane, 4) + i // 2 * 8, "int32")
            with T.If(row < self.product.rows), T.Then():
                self.finish(row, self.head, column, sums[i])


PLAIN_WARPS = 8


def emit_plain_head_product(env: Any, product: HeadProduct, x: Any, weight: Any, finish: Finish) -> None:
    """A thread for every result. x: [rows, heads, stride]; weight: [heads * block, latent]. For any sizes and dtypes."""
    results = product.rows * product.heads * product.made
    with env.kernel(-(-results // (PLAIN_WARPS * 32)), PLAIN_WARPS) as at:
        index = hold((at.block * PLAIN_WARPS + at.warp) * 32 + at.lane, "int32")
        with T.If(index < results), T.Then():
            column = hold(T.floormod(index, product.made), "int32")
            head = hold(T.floormod(T.floordiv(index, product.made), product.heads), "int32")
            row = hold(T.floordiv(index, product.made * product.heads), "int32")
            total = register("float32", name="total")
            put(total, T.float32(0))
            line = hold(head * product.block + product.start, "int32")
            with T.serial(0, product.summed) as k:
                place = [wide(line + k), column] if product.into_latent else [wide(line + column), k]
                put(total, total[0] + load(x, [row, head, k + product.first]) * load(weight, place, constant=True))
            finish(row, head, column, total[0])
