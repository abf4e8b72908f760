"""What `bench` measures on a GPU."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

MODES = ("default", "max-autotune-no-cudagraphs")
"""Of torch.compile. CUDA graphs are made by `gpu.record`, the same way for all, so torch makes none of its own."""
PARTS = ("proposer", "prefill")


@dataclass(frozen=True)
class GpuPlan:
    """widths: None is all compiled ones. context: cache rows of every sequence. steps: of a chain.

    peer_widths: where torch's heads are built and timed; None for all widths, () for none. modes: of torch.compile.
    rounds: replays of each competitor. calls: of the proposer. prefill: context rows of one call.
    parts: of PARTS, what is measured beside single steps and chains.
    """

    widths: Sequence[int] | None = None
    context: int = 1000
    steps: int = 3
    peer_widths: Sequence[int] | None = ()
    modes: Sequence[str] = MODES
    rounds: int = 40
    calls: int = 60
    prefill: int = 4096
    parts: Sequence[str] = PARTS

    def with_peers(self, n: int) -> bool:
        return self.peer_widths is None or n in self.peer_widths
