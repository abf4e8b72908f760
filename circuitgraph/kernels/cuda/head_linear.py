"""Products with a matrix for each head: every matrix is read once for up to 64 rows, through tensor cores.

A block has some of one head's results and asks for all of their weights before it waits for the kernel before: 32 KB in bf16,
so that the blocks of 128 heads fit the GPU at once, and the whole matrix is on its way. Weights of eight bits pass through
registers on their way to shared memory and are pairs there as all others; scales of blocks are applied to sums.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tvm.backend.cuda.lang.alloc_pool import SMEMPool
from tvm.tirx.script import builder as T

from .formats import Format, Scales, number, of_row
from .values import COPY_ONCE, LOAD, do, hold, load, put, register, wide, zeros

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
        return self.chunk * self.summed * 2 + 32 * 8 * 4

    def scaled_steps(self, block: tuple[int, int]) -> int:
        """Steps of 16 columns of a warp that share the scales of a block: all where there are no blocks."""
        along = block[0] if self.into_latent else block[1]
        return min(along // 16, self.steps) if along else self.steps

    @property
    def steps(self) -> int:
        """Of 16 columns of a warp: all, or where the warps share the results of 32 weight rows, half."""
        return self.summed // (16 if self.into_latent else 32)

    def refuse_storage(self, format: Format) -> str | None:
        """Why the weights cannot be stored so, or None."""
        storage = format.storage
        if storage is None:
            return None
        high, across = storage.block
        if storage.format not in ("fp8", "int8") or storage.whole:
            return f"reads plain weights, fp8 and int8, got {storage}"
        if not across:
            return "scales of rows differ along what is summed" if high and self.into_latent else None
        lines = (self.block, self.start, high) if high else ()
        if any(size % 16 for size in (*lines, across)) or (high and (self.block % high or self.start % high)):
            return f"blocks of {high}x{across} do not begin where those of heads do"
        if self.steps % self.scaled_steps(storage.block):
            return f"{self.steps * 16} columns of a warp are no whole number of blocks of {storage}"
        if not self.into_latent and self.steps * 16 < across < self.summed:
            return f"blocks of {storage} begin within the second {self.steps * 16} columns, which one warp sums"
        return None

    def refuse(self) -> str | None:
        if self.summed % 32 or self.made % self.chunk:
            return f"{self.made} results of {self.summed} columns are not cut into blocks of {self.chunk} and steps of 32"
        if not self.into_latent and self.summed % 128:
            return f"{self.summed} columns are no whole number of 128"
        if (self.first | self.stride) % 2 or self.summed > 512:
            return f"columns {self.first}..{self.first + self.summed - 1} of {self.stride}"
        return None


def emit_head_product(
    env: Any, product: HeadProduct, x: Any, weight: Any, format: Format, scales: Scales | None, finish: Finish
) -> None:
    """x: [rows, heads * stride / 2] words; weight: [heads * block, ...] words; finish(row, head, column, value)."""
    groups, chunks = -(-product.rows // ROWS), product.made // product.chunk
    with env.kernel(product.heads * chunks * groups, WARPS, early=True, once=True) as at:
        pool = SMEMPool()
        width = product.chunk // 8 if product.into_latent else product.summed // 8  # chunks of 16 bytes in a line
        lines = product.summed if product.into_latent else product.chunk
        tile = pool.alloc((lines * width, 4), "uint32", align=128)
        halves = pool.alloc((32 * 8,), "float32", align=16)
        pool.commit()
        chunk = hold(T.floormod(at.block, chunks), "int32", "chunk")
        head = hold(T.floormod(T.floordiv(at.block, chunks), product.heads), "int32", "head")
        first_row = hold(T.floordiv(at.block, chunks * product.heads) * ROWS, "int32", "first_row")
        first_line = hold(head * product.block + product.start + (0 if product.into_latent else chunk * product.chunk), "int32")
        first_word = chunk * (product.chunk // format.columns) if product.into_latent else T.int32(0)
        copy = _Copy(at.warp * 32 + at.lane, at.once, lines, width, tile, weight, first_line, first_word, format)
        kept = copy.begin()
        env.wait()
        block = _Block(product, at, x, tile, halves, width, head, chunk, first_row, first_line, format, scales, finish)
        blocks = -(-min(product.rows, ROWS) // 8)
        x_of_first = block.load(T.int32(0))
        copy.end(kept)
        do(T.cuda.cta_sync())
        block.multiply(T.int32(0), x_of_first)
        if blocks > 1:
            with T.serial(1, blocks) as number:
                block.multiply(number, block.load(number))


@dataclass(frozen=True)
class _Copy:
    """A block's weights to shared memory, as `lines` of `width` chunks of 16 bytes, swizzled by line."""

    thread: Any
    once: Any
    lines: int
    width: int
    tile: Any
    weight: Any
    first_line: Any
    first_word: Any
    format: Format

    def begin(self) -> list[tuple[Any, Any, Any]]:
        """Ask for all; what passes through registers is returned: (line, chunk, words)."""
        threads, kept = WARPS * 32, []
        if self.format.storage is None:
            with T.serial(0, self.lines * self.width // threads) as turn:
                piece = hold(turn * threads + self.thread, "int32")
                line, place = T.floordiv(piece, self.width), T.floormod(piece, self.width)
                do(T.ptx[COPY_ONCE](self._place(line, place), self._source(line, place), 16, self.once))
            do(T.ptx.cp.async_.commit_group())
            return kept
        narrow = self.width // 2  # chunks of bytes in a line
        for turn in range(self.lines * narrow // threads):
            piece = hold(turn * threads + self.thread, "int32")
            line, place = hold(T.floordiv(piece, narrow), "int32"), hold(T.floormod(piece, narrow), "int32")
            words = register("uint32", 4, "bytes")
            do(T.ptx["ld.global.nc.v4.b32"](*(words[i] for i in range(4)), self._source(line, place)))
            kept.append((line, place, words))
        return kept

    def end(self, kept: list[tuple[Any, Any, Any]]) -> None:
        for line, place, words in kept:
            for half in range(2):
                pairs = [pair for i in (0, 1) for pair in self.format.natural(self.format.decode(words[half * 2 + i]))]
                do(T.ptx["st.shared.v4.b32"](self._place(line, place * 2 + half), *pairs))
        if self.format.storage is None:
            do(T.ptx.cp.async_.wait_group(0))

    def _source(self, line: Any, place: Any) -> Any:
        return self.weight.ptr_to([wide(self.first_line + line), wide(self.first_word + place * 4)])

    def _place(self, line: Any, place: Any) -> Any:
        return self.tile.ptr_to([line * self.width + T.bitwise_xor(place, line % 8), 0])


@dataclass(frozen=True)
class _Block:
    """Eight rows of x after eight rows with the weights in shared memory."""

    product: HeadProduct
    at: Any
    x: Any
    tile: Any
    halves: Any
    width: int
    head: Any
    chunk: Any
    first_row: Any
    first_line: Any
    format: Format
    scales: Scales | None
    finish: Finish

    @property
    def steps(self) -> int:
        return self.product.steps

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
                place = warp * 2 + tile
                sums = self._sums(x, place, lambda step, place=place: self._transposed(step, place))
                self._store(number, place * 16, sums)
            return
        sums = self._sums(x, warp % 2, lambda step: self._straight(step, warp % 2))
        for i in range(4):
            place = (warp % 2 * 16 + T.floordiv(lane, 4) + i // 2 * 8) * 8 + lane % 4 * 2 + i % 2
            with T.If(warp >= 2), T.Then():
                T.buffer_store(self.halves, sums[i], [place])
        do(T.cuda.cta_sync())
        with T.If(warp < 2), T.Then():
            for i in range(4):
                place = (warp % 2 * 16 + T.floordiv(lane, 4) + i // 2 * 8) * 8 + lane % 4 * 2 + i % 2
                put(sums, sums[i] + self.halves[place], i)
            self._store(number, warp * 16, sums)
        do(T.cuda.cta_sync())  # the other half is read before it is written again

    def _sums(self, x: Any, tile: Any, weights: Callable[[int], Any]) -> Any:
        """Of 16 results, the `tile`-th of the block, and eight rows."""
        kind = self.format.kind
        mma = f"mma.sync.aligned.m16n8k16.row.col.f32.{kind}.{kind}.f32"
        sums = register("float32", 4, "sums")
        zeros(sums, 4)
        c = [sums[i] for i in range(4)]
        blocks = self.scales is not None and self.scales.of_blocks
        together = self.product.scaled_steps(self.scales.storage.block) if blocks else self.steps  # type: ignore[union-attr]
        total = register("float32", 4, "total") if blocks else sums
        if blocks:
            zeros(total, 4)
        for step in range(self.steps):
            piece = weights(step)
            do(T.ptx[mma](*c, *(piece[i] for i in range(4)), x[step * 2], x[step * 2 + 1], *c))
            if blocks and (step + 1) % together == 0:
                scale = self._scale(step, tile)
                for i in range(4):
                    put(total, total[i] + sums[i] * scale, i)
                zeros(sums, 4)
        self._finish_scales(total, tile)
        return total

    def _scale(self, step: int, tile: Any) -> Any:
        """Of the block of weights that a step of 16 rows or columns and a tile are in."""
        assert self.scales is not None
        high, across = self.scales.storage.block
        if self.product.into_latent:
            row, column = self.first_line + step * 16, self.chunk * self.product.chunk + tile * 16
        else:
            row, column = self.first_line + tile * 16, (self.first_step + step) * 16
        place = [T.floordiv(row, high) if high else 0, T.floordiv(column, across)]
        return load(self.scales.scales, place, constant=True)

    def _finish_scales(self, total: Any, tile: Any) -> None:
        """What is left to sums: scales of rows or of all, and the format's factor."""
        factor = self.format.factor
        for half in range(2):
            scale = of_row(self.scales, self.first_line + tile * 16 + T.floordiv(self.at.lane, 4) + half * 8)
            for i in (half * 2, half * 2 + 1):
                if scale is not None:
                    put(total, total[i] * scale, i)
                if factor != 1:
                    put(total, total[i] * T.float32(factor), i)

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


def emit_plain_head_product(env: Any, product: HeadProduct, x: Any, weight: Any, scales: Scales | None, finish: Finish) -> None:
    """A thread for every result. x: [rows, heads, stride]; weight: [heads * block, latent]. Any sizes, dtypes, storages."""
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
                place = (line + k, column) if product.into_latent else (line + column, k)
                if scales is None:
                    value = load(weight, [wide(place[0]), place[1]], constant=True)
                else:
                    value, scale = number(weight, scales, *place), of_row(scales, place[0])
                    value = value if scale is None else hold(value * scale)
                put(total, total[0] + load(x, [row, head, k + product.first]) * value)
            finish(row, head, column, total[0])
