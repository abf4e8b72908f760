"""Drafters whose drafts come all at once, on a GPU: the whole call, torch's own kernels in it, is one CUDA graph."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from circuitgraph.ops import TORCH_DTYPES, PagedKV

from .recording import packed, record
from .runner import Caches

ADDRESSING = ("slot", "seq", "table", "start", "length")
"""The integers of a `PagedKV`, in its own order."""

Call = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, Caches, torch.Tensor], dict[str, torch.Tensor]]
"""(token, hidden, position, caches, slots), all on the device, to outputs."""


def bucket(size: int) -> int:
    """The next power of two: what is staged at that size changes seldom."""
    return 1 << max(size - 1, 0).bit_length()


class AtOnce:
    """One call for n sequences with memory of its own, recorded at the second use.

    Inputs are copied to where the recorded call reads them: integers of the host in one copy, those of the device in place.
    Heads take the hidden alone.
    """

    def __init__(
        self, call: Call, hidden: torch.Tensor, act: str, kv: Caches, slots: torch.Tensor | None, recorder: torch.cuda.Stream
    ):
        self.call, self.recorder = call, recorder
        n, device = hidden.shape[0], hidden.device
        shapes: dict[str, tuple[int, ...]] = {}
        if slots is not None:
            shapes = {"token": (n,), "position": (n,), "slots": tuple(slots.shape)}
        for name, cache in kv.items():
            sequences, width = (bucket(size) for size in cache.table.shape)
            shapes |= {f"{name}.slot": (n,), f"{name}.seq": (n,), f"{name}.table": (sequences, width)}
            shapes |= {f"{name}.start": (sequences,), f"{name}.length": (n,)}
        self.ints, self.packed = packed(shapes, device)
        self.host, self.pinned = packed(shapes, torch.device("cpu"))
        self.copied = torch.cuda.Event()
        self.hidden = torch.zeros(hidden.shape, dtype=TORCH_DTYPES[act], device=device)
        self.caches = {
            name: PagedKV(cache.k, cache.v, *(self.ints[f"{name}.{part}"] for part in ADDRESSING)) for name, cache in kv.items()
        }
        self.used = False
        self.newest: torch.cuda.CUDAGraph | None = None
        self.made: dict[str, torch.Tensor] = {}

    @staticmethod
    def key(hidden: torch.Tensor, kv: Caches, slots: torch.Tensor | None) -> tuple[object, ...]:
        """What calls must have in common to be served by one graph, the places of caches apart."""
        sizes = tuple(tuple(bucket(size) for size in cache.table.shape) for cache in kv.values())
        return (hidden.shape[0], None if slots is None else tuple(slots.shape), sizes)

    def run(self, token, hidden, position, kv: Caches, slots) -> dict[str, torch.Tensor]:
        """Fresh tensors."""
        self._stage(self._sources(token, position, kv, slots))
        self.hidden.copy_(hidden)
        if not self.used:
            self.used = True
            return self._launch()
        if self.newest is None:
            self.newest, self.made = record(self._launch, self.recorder)
        self.newest.replay()
        return {name: tensor.clone() for name, tensor in self.made.items()}

    def _launch(self) -> dict[str, torch.Tensor]:
        none = self.hidden
        ints = [self.ints.get(name, none) for name in ("token", "position", "slots")]
        return self.call(ints[0], self.hidden, ints[1], self.caches, ints[2])

    def _sources(self, token, position, kv: Caches, slots) -> dict[str, torch.Tensor]:
        given = {"token": token, "position": position, "slots": slots}
        sources = {name: given[name] for name in given if name in self.ints}
        for name, cache in kv.items():
            sources |= {f"{name}.{part}": getattr(cache, part) for part in ADDRESSING}
        return sources

    def _stage(self, sources: Mapping[str, torch.Tensor]) -> None:
        on_host = {name: source for name, source in sources.items() if source.device.type == "cpu"}
        if on_host:
            self.copied.synchronize()  # the copy before has left the page-locked memory; as a rule it has long since
            for name, source in on_host.items():
                _corner(self.host[name], source).copy_(source)
            self.packed.copy_(self.pinned, non_blocking=True)
            self.copied.record()
        rest = [name for name in sources if name not in on_host]
        if rest:
            targets = [_corner(self.ints[name], sources[name]) for name in rest]
            torch._foreach_copy_(targets, [sources[name] for name in rest])  # type: ignore[reportPrivateImportUsage]


def _corner(staged: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
    """The part of a staging tensor that `source` fills: a table may be smaller."""
    return staged if staged.shape == source.shape else staged[tuple(slice(size) for size in source.shape)]
