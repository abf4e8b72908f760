"""The torch heads of `peers` as CUDA graphs: the same kernels without the time that Python takes to launch them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from ..errors import CircuitgraphError
from .gpu import record
from .report import Column, microseconds, ratio

EAGER = "torch eager"

Check = Callable[[str, Any], Mapping[str, float]]
"""(name, outputs of a head) to {equal_drafts, error}. Raises CircuitgraphError where they are not what the head means."""


@dataclass
class Peers:
    """Competitors by name: graph replays, how their results compared, and why some are not timed."""

    replays: dict[str, Callable[[], object]] = field(default_factory=dict)
    checked: dict[str, Mapping[str, float]] = field(default_factory=dict)
    faults: dict[str, str] = field(default_factory=dict)

    def add(self, other: Peers, suffix: str = "") -> None:
        for part in ("replays", "checked", "faults"):
            getattr(self, part).update({f"{name}{suffix}": value for name, value in getattr(other, part).items()})

    def columns(self, times: Mapping[str, float]) -> dict[str, Any]:
        """For a row that has `step_us`: every competitor's time and what it is of ours, drafts of the reference's that the
        worst of them made, its error, and `peers_left_out`."""
        row: dict[str, Any] = {}
        for name in self.replays:
            row |= {f"{name} us": times[name], f"{name} ratio": times[name] / times["step"]}
        if self.checked:
            row["peer_drafts_equal"] = min(int(found["equal_drafts"]) for found in self.checked.values())
            row["peer_error"] = max(found["error"] for found in self.checked.values())
        return row | ({"peers_left_out": self.faults} if self.faults else {})


def peer_columns(rows: Sequence[Mapping[str, Any]]) -> list[Column]:
    """Of `Peers.columns`, for all rows of a table."""
    columns = []
    for name in dict.fromkeys(key.removesuffix(" us") for row in rows for key in row if key.endswith(" us")):
        header = f"{name.replace('.', ' ')} us"  # breaks into short lines
        columns += [Column(header, f"{name} us", microseconds), Column("ours", f"{name} ratio", ratio)]
    return [*columns, Column("torch's equal drafts", "peer_drafts_equal")]


def left_out(rows: Sequence[Mapping[str, Any]]) -> str:
    """Which competitors are not in a table, and why; empty where all are."""
    found = {name: why for row in rows for name, why in row.get("peers_left_out", {}).items()}
    return "".join(f" Not timed: {name}: {why}" for name, why in found.items())


def peer_name(mode: str) -> str:
    return f"torch.compile {mode.removesuffix('-no-cudagraphs')}"


def graphed_peers(head: torch.nn.Module, arguments: Sequence[torch.Tensor], modes: Sequence[str], check: Check) -> Peers:
    """Eager and each mode of torch.compile. Compiling takes from seconds to minutes a mode.

    What `check` refuses or torch cannot build is left out, and the others are timed.
    """
    peers = Peers()

    def add(name: str, module: Callable[..., Any]) -> None:
        def call() -> Any:
            with torch.no_grad():
                return module(*arguments)

        try:
            checked = check(name, call())
            replay = record(call)
        except CircuitgraphError as error:
            peers.faults[name] = str(error.faults[0])
        except (RuntimeError, OSError) as error:  # of torch's compiler, of the compilers behind it, of memory
            peers.faults[name] = f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0][:200]}"
        else:
            peers.checked[name], peers.replays[name] = checked, replay

    add(EAGER, head)
    torch.compiler.reset()  # one compilation for each width: no dynamic shapes, no recompilation limit
    for mode in modes:
        add(peer_name(mode), torch.compile(head, dynamic=False, mode=mode))
    return peers
