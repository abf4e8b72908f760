"""A mixture of experts at the speed of memory: two launches that read the weights of every chosen expert once.

`Up` (experts_up.py): every block chooses the rows' experts from the router's logits, all alike, and lists the experts that are
chosen with their rows (expert_groups.py). Then blocks take tile after tile of 8 rows of gate and 8 of up, first of the shared
expert, whose weights are known before the kernel waits for its predecessor, then of the listed ones, and leave
share * silu(gate) * up. Of few rows and weights of four bits, a warp does that for all while the others have the next tile's
weights: a tile is short, and they would wait for each other.
`Down` (experts_down.py): a block makes 16 columns of the result. Its warps go through the same 16 weight rows of all listed
experts, a step at a time, and add up in registers: every row's sum has the order of its experts' numbers, whatever rows are
beside it.

Both copy weights as `stream` does: a lane's own 16 bytes of a ring (expert_steps.py). Scales of quantised weights (see
`formats`) come beside them (expert_scales.py). A pair is a row and one of its experts; pairs are ordered by expert, then by
row, so the pairs of an expert lie side by side. Here is what the two have in common: sizes, cuts and weights.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tvm.tirx.script import builder as T

from ...circuit.ir import Storage
from .expert_one import shared_words
from .formats import Format, Scales
from .values import hold, load, wide

STEP_WORDS = 16
"""Words of a weight row in one step of a warp: a lane has four, and four lanes share a row."""


@dataclass(frozen=True)
class Sizes:
    """rows of x [rows, hidden]; inner columns of a routed expert, shared of the shared one (0 without)."""

    rows: int
    hidden: int
    inner: int
    shared: int
    experts: int
    top: int
    format: Format

    @property
    def step(self) -> int:
        """Columns of one step of a warp: of `STEP_WORDS` words."""
        return STEP_WORDS * self.format.columns

    @property
    def storage(self) -> Storage | None:
        return self.format.storage

    @property
    def early(self) -> bool:
        """Is what down multiplies by read a step before, see `experts_down_early`?"""
        return self.rows <= 16 and self.storage is not None

    def together(self, warps: int) -> int:
        """Steps that so many warps of `experts_down_early` take at once: two where that leaves all as much to do."""
        storage = self.storage
        if not self.early or storage is None or self.format.scaled == "numbers":
            return 1
        whole = all(columns % (2 * self.step * warps) == 0 for columns in (self.inner, self.shared))
        return 2 if whole and storage.block[1] % (2 * self.step) == 0 else 1

    @property
    def pairs(self) -> int:
        return self.rows * self.top

    @property
    def most(self) -> int:
        """Experts that can be chosen at once."""
        return min(self.experts, self.pairs)

    @property
    def row_blocks(self) -> int:
        return -(-self.rows // 8)

    @property
    def mask_words(self) -> int:
        """32-bit words that hold a bit of every row."""
        return -(-self.rows // 32)

    @property
    def banks(self) -> int:
        """Groups of 32 experts."""
        return -(-self.experts // 32)


@dataclass(frozen=True)
class UpCut:
    """steps: of a warp in a tile; stages: of the ring, a multiple or a part of the steps. resident: x stays in registers;
    otherwise its rows are read for each tile, only those that the expert has. buffers: for sums, 1 waits twice a tile.
    beside: a warp's steps are neighbours, so that their scales are; otherwise those of all warps take turns. groups: of 8 rows
    of gate and 8 of up in a tile, each of `steps`."""

    warps: int
    steps: int
    stages: int
    resident: bool
    buffers: int
    beside: bool = False
    groups: int = 1

    @property
    def all_steps(self) -> int:
        """Of a warp in a tile."""
        return self.groups * self.steps

    @property
    def tiles_ahead(self) -> int:
        """Tiles that the ring holds; it is filled for the one after them."""
        return max(1, self.stages // self.all_steps)

    @property
    def stride(self) -> int:
        """Steps from one of a warp to its next."""
        return 1 if self.beside else self.warps

    @property
    def spread(self) -> int:
        """Steps from one warp's first to the next warp's."""
        return self.steps if self.beside else 1

    def scratch_words(self, sizes: Sizes, choosing_words: int) -> int:
        """Of the memory that choosing and adding up take turns in."""
        return max(self.buffers * self.warps * self.groups * sizes.rows * 16, min(self.warps, sizes.rows) * choosing_words)

    def shared_bytes(self, sizes: Sizes, choosing_words: int) -> int:
        ring = self.warps * self.stages * 1024
        lines, words = up_scales(sizes.format)
        scales = self.warps * (self.tiles_ahead + 1) * 4 * lines * words * self.all_steps
        return ring + scales + 4 * self.scratch_words(sizes, choosing_words) + groups_bytes(sizes) + 1024


@dataclass(frozen=True)
class DownCut:
    """together: steps that a warp takes at once, 1 but in `experts_down_early`; kept: tiles of a block whose sums lie in shared
    memory: one, or all, which are finished at the end then."""

    warps: int
    stages: int
    together: int = 1
    kept: int = 1

    def factors(self, sizes: Sizes) -> int:
        """16-byte pieces that a lane has of what a stage's weights are multiplied by, beside the two of weights. None where
        there are more than 16 rows, or it is read early."""
        return sizes.row_blocks * sizes.step // 32 if sizes.rows <= 16 and not sizes.early else 0

    def shared_bytes(self, sizes: Sizes) -> int:
        lines, words = down_scales(sizes.format)
        ring = self.warps * self.stages * (1024 * self.together + 4 * lines * words + 512 * self.factors(sizes))
        wholes = 4 * (sizes.experts + 1) if sizes.storage and sizes.storage.whole else 0
        table = 36 * (sizes.most + 1) if sizes.early else 16 * sizes.most
        return ring + 4 * self.kept * self.warps * sizes.rows * 16 + table + wholes + 1024


def up_scales(format: Format) -> tuple[int, int]:
    """(lines, words of each) of a step's scales: a line for each of 8 rows of gate and of up, or one for all 8; none where
    scales do not differ along a row, which are left to the sums."""
    if not format.scaled or format.storage is None:
        return 0, 0
    return 16 if format.storage.block[0] % 8 else 2, _scale_words(format)


def down_scales(format: Format) -> tuple[int, int]:
    """(lines, words of each) of a step's scales: a line for each of 16 weight rows, or one for all. Experts' sums are added up
    where they arise, so scales of whole rows count there, too."""
    if format.storage is None:
        return 0, 0
    return 16 if format.storage.block[0] % 16 else 1, _scale_words(format)


def _scale_words(format: Format) -> int:
    """32-bit words of scales that a weight row has in a step."""
    return STEP_WORDS * format.columns // format.scale_columns if format.scaled == "numbers" else 1


def groups_bytes(sizes: Sizes) -> int:
    """Shared memory of the lists of expert_groups.py."""
    words = 4 * sizes.pairs + sizes.rows + (sizes.mask_words + 1) * sizes.banks * 32
    if sizes.rows == 1:
        words += shared_words(sizes.experts)
    return 4 * (words + 2 * sizes.banks + (3 + sizes.mask_words) * (sizes.most + 1)) + 13 * 16


@dataclass(frozen=True)
class Between:
    """Scratch from `Up` to `Down`. made: [pairs, inner / 2] words, shared: [rows, shared / 2] words or None, columns in the order
    of `Product.place`; the same as 16-bit floats to store to. listed: [most + 1, 4] int32: expert, first pair, two words of
    rows; the last line: how many."""

    made: Any
    shared: Any
    made_elements: Any
    shared_elements: Any
    listed: Any


@dataclass(frozen=True)
class Matrix:
    """A weight, or one for each expert, as words: [lines, columns / elements of a word], or [experts, all of a matrix]."""

    words: Any
    columns: int
    elements: int
    scales: Scales | None = None

    def piece(self, expert: Any, line: Any, word: Any) -> Any:
        """uint64 address of a word of a line. expert: None where there is but one matrix."""
        if expert is None:
            return T.reinterpret("uint64", self.words.ptr_to([wide(line), wide(word)]))
        place = wide(line) * (self.columns // self.elements) + wide(word)
        return T.reinterpret("uint64", self.words.ptr_to([wide(expert), place]))

    def scale(self, expert: Any, line: Any, column: Any) -> Any:
        """uint64 address of the scale of a line from this column on."""
        assert self.scales is not None
        high, across = self.scales.storage.block
        place = [T.floordiv(line, high) if high else 0, T.floordiv(column, across) if across else 0]
        return T.reinterpret("uint64", self.scales.scales.ptr_to(place if expert is None else [wide(expert), *place]))

    def factor(self, expert: Any, line: Any) -> Any:
        """What the finished sum of a line is multiplied by, None where that is nothing."""
        scales = self.scales
        if scales is None:
            return None
        found, high = [], scales.storage.block[0]
        if not scales.of_blocks:
            place = [T.floordiv(line, high) if high else 0, 0]
            found.append(load(scales.scales, place if expert is None else [expert, *place], constant=True))
        if scales.whole is not None:
            found.append(load(scales.whole, [0 if expert is None else expert], constant=True))
        return hold(found[0] * found[1]) if len(found) == 2 else found[0] if found else None


@dataclass(frozen=True)
class Weights:
    """gate, up: [experts, inner, hidden], down: [experts, hidden, inner]; up is None where gate has both one after the other.
    shared: gate and up [shared, hidden], and down [hidden, shared], or None."""

    gate: Matrix
    up: Matrix | None
    down: Matrix
    shared: tuple[Matrix, Matrix, Matrix] | None
