"""Situations to call a program in: random inputs, and caches laid out as unhandily as a server may lay them out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from ..circuit.ir import Circuit, State
from ..circuit.types import TensorType
from ..errors import CircuitError, Fault
from ..ops import TORCH_DTYPES, PagedKV

SPARE_BLOCKS = 2
"""Blocks that belong to nobody. Unused places of block tables name one of them: it is NaN, so reading it shows."""


@dataclass(frozen=True)
class Span:
    """`count` rows of one sequence that has `context` rows already, after `start` places that hold nothing valid."""

    context: int
    count: int = 1
    start: int = 0


@dataclass(frozen=True)
class Case:
    """Everything that differs from call to call. Rows from `live` on are idle: they write nowhere and see nothing."""

    inputs: dict[str, torch.Tensor]
    caches: dict[str, PagedKV]
    spans: tuple[Span, ...]

    @property
    def live(self) -> int:
        return sum(span.count for span in self.spans)

    @property
    def rows(self) -> int:
        return next(iter(self.inputs.values())).shape[0]

    def copy_caches(self) -> dict[str, PagedKV]:
        """Caches of the same content in memory of their own."""
        return {name: replace(cache, k=cache.k.clone(), v=cache.v.clone()) for name, cache in self.caches.items()}

    def only(self, rows: Sequence[int]) -> Case:
        """Some rows of this case as a case; their caches are the same memory."""
        index = torch.tensor(rows)
        caches = {
            name: replace(cache, slot=cache.slot[index], seq=cache.seq[index], length=cache.length[index])
            for name, cache in self.caches.items()
        }
        spans = tuple(self.spans[row] for row in rows) if self.live == len(self.spans) else self.spans
        return Case({name: tensor[index] for name, tensor in self.inputs.items()}, caches, spans)


def make_case(
    circuit: Circuit,
    rows: int,
    spans: Sequence[Span],
    *,
    block_size: int,
    generator: torch.Generator,
    poison: bool = True,
    max_position: int | None = None,
) -> Case:
    """A call of `rows` rows: those of `spans` in order, then idle ones.

    Blocks lie in random order. With `poison`, cache rows that no row may see are NaN. Positions stay below
    `max_position`. In a slice that is an entry of blocks, the rows of a span see each other.
    """
    live = [(index, span, offset) for index, span in enumerate(spans) for offset in range(span.count)]
    if len(live) > rows:
        raise CircuitError(Fault("the spans have more rows than the call", expected=str(rows), got=str(len(live))))
    idle = rows - len(live)
    together = [entry.rows for entry in circuit.entries] == ["block"]
    after = [span.start + span.context + offset for _, span, offset in live]
    ends = [span.start + span.context + (span.count if together else offset + 1) for _, span, offset in live]
    positions = [span.context + offset + 1 for _, span, offset in live]
    if max_position is not None:
        positions = [min(position, max_position - 1) for position in positions]
    table = _block_table(spans, block_size, generator)
    slots = [
        int(table[index, place // block_size]) * block_size + place % block_size
        for (index, _, _), place in zip(live, after, strict=True)
    ]
    addressing = {
        "slot": _int32([*slots, *[-1] * idle]),
        "seq": _int32([*[index for index, _, _ in live], *[0] * idle]),
        "length": _int32([*ends, *[0] * idle]),
        "table": table,
        "start": _int32([span.start for span in spans]),
    }
    caches = {}
    for state in circuit.states:
        k, v = _storage(state, spans, table, block_size, generator, poison)
        caches[state.name] = PagedKV(k=k, v=v, **addressing)
    inputs = {item.name: _input(circuit, item.name, item.type, positions, rows, generator) for item in circuit.inputs}
    return Case(inputs, caches, tuple(spans))


def _int32(values: Sequence[int]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def _block_table(spans: Sequence[Span], block_size: int, generator: torch.Generator) -> torch.Tensor:
    """int32[sequences, widest + 1]: every sequence's blocks, from all over the pool."""
    needs = [-(-(span.start + span.context + span.count) // block_size) for span in spans]
    order = torch.randperm(sum(needs) + SPARE_BLOCKS, generator=generator).to(torch.int32)
    table = order[-1].repeat(len(spans), max(needs) + 1)
    first = 0
    for index, need in enumerate(needs):
        table[index, :need] = order[first : first + need]
        first += need
    return table


def _storage(
    state: State, spans: Sequence[Span], table: torch.Tensor, block_size: int, generator: torch.Generator, poison: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    blocks = int(table.max()) + 1 + SPARE_BLOCKS
    dtype = TORCH_DTYPES[state.dtype]
    parts = []
    for dim in state.dims:
        values = torch.randn((state.layers, blocks, state.heads, block_size, dim), generator=generator).to(dtype)
        if poison:
            seen = torch.zeros(blocks, block_size, dtype=torch.bool)
            for index, span in enumerate(spans):
                place = torch.arange(span.start, span.start + span.context)
                seen[table[index, place // block_size].long(), place % block_size] = True
            values.masked_fill_(~seen[None, :, None, :, None], float("nan"))
        parts.append(values)
    return parts[0], parts[1]


def _input(
    circuit: Circuit, name: str, kind: TensorType, positions: Sequence[int], rows: int, generator: torch.Generator
) -> torch.Tensor:
    shape = kind.with_rows(rows).shape
    if kind.dtype not in ("i32", "i64"):
        return torch.randn(shape, generator=generator).to(TORCH_DTYPES[kind.dtype])  # type: ignore[arg-type]
    if len(shape) == 2:  # a grammar's mask: any bits, and some token that is allowed
        words = torch.randint(-(2**31), 2**31, shape, generator=generator)  # type: ignore[arg-type]
        words[:, 0] |= 1
        return words.to(TORCH_DTYPES[kind.dtype])
    values = torch.zeros(rows, dtype=TORCH_DTYPES[kind.dtype])
    embeds = [node for node in circuit.consumers(name) if node.op == "embed"]
    if embeds:
        table = circuit.types[embeds[0].inputs[1]]
        assert isinstance(table, TensorType)
        tokens = torch.randint(0, int(table.shape[0]), (len(positions),), generator=generator)
        values[: len(positions)] = tokens.to(values.dtype)
    else:
        values[: len(positions)] = torch.tensor(positions, dtype=values.dtype)
    return values
