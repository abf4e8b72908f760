"""GPU times of a drafter's entries one by one: for programs whose first step starts elsewhere than its later ones (EAGLE-3), or
that draft all tokens at once (DFlash, Medusa). The compiled functions are called directly, as a graph of their own."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from ..artifact.manifest import Manifest
from ..circuit.ir import Circuit
from ..circuit.narrow import slice_entry
from .calls import PreparedCall, workspace_of
from .cases import Case
from .chains import Ceiling, device_case, step_bytes
from .gpu import record
from .gpu_plan import GpuPlan
from .peers import TorchEagle3Head
from .peers_at_once import TorchDflash, TorchMedusa
from .peers_gpu import graphed_peers
from .report import Column, Section, microseconds, percent, ratio
from .truth import check_draft, reference

if TYPE_CHECKING:
    from .cuda import Observer

BLOCK = 16
"""Rows of a sequence in an entry of block rows."""


def chains_itself(circuit: Circuit) -> bool:
    """Whether one entry drafts a whole chain: it takes the hidden that it makes."""
    return any(item.name == "hidden" for item in circuit.inputs) and "next_hidden" in dict(circuit.outputs)


def block_of(circuit: Circuit, entry: str) -> int:
    """Rows of the entry that one sequence has."""
    return BLOCK if circuit.entry(entry).rows == "block" else 1


def measure(
    manifest: Manifest,
    functions: Mapping[str, Callable[..., Any]],
    weights: Mapping[str, torch.Tensor],
    ceiling: Ceiling,
    widths: Sequence[int],
    plan: GpuPlan,
    tell: Observer,
) -> dict[str, Section]:
    whole = manifest.circuit
    drafting = [entry.name for entry in whole.entries if entry.rows != "context" and "draft" in entry.outputs]
    pairs = [(entry, n) for entry in drafting for n in widths if n in manifest.widths(entry) and n % block_of(whole, entry) == 0]
    rows = []
    for done, (entry, n) in enumerate(pairs):
        tell(f"{entry} {n}", done, len(pairs))
        rows.append(_row(manifest, functions, weights, ceiling, entry, n, plan))
    names = list(dict.fromkeys(key.removesuffix(" us") for row in rows for key in row if key.endswith(" us")))
    columns = [
        Column("entry", "entry"),
        Column("n", "n"),
        Column("step us", "step_us", microseconds),
        Column("MB", "bytes", lambda value: f"{value / 1e6:.0f}"),
        Column("GB/s", "gb_per_s", lambda value: f"{value:.0f}"),
        Column("of read", "of_read", percent),
        Column("one by one us", "single_runs_us", microseconds),
        Column("ours", "over_singles", ratio),
    ]
    for name in names:
        header = f"{name.replace('.', ' ')} us"  # breaks into short lines
        columns += [Column(header, f"{name} us", microseconds), Column("ours", f"{name} ratio", ratio)]
    columns += [Column("equal drafts", "equal_drafts"), Column("error", "error", lambda value: f"{value:.1e}")]
    said = "The compiled function of each entry alone, without a runner around it; the same head in torch as CUDA graphs. "
    said += f"n rows are n sequences, or where a block drafts at once, blocks of {BLOCK}. One by one: a call for each sequence."
    return {"steps": Section("Draft steps", said, tuple(columns), ceiling.shares(rows))}


def peer_of(
    whole: Circuit, weights: Mapping[str, torch.Tensor], case: Case, entry: str, context: int
) -> tuple[torch.nn.Module, tuple[torch.Tensor, ...]] | None:
    """The same head in torch with the case's cache, and its arguments."""
    inputs = {name: value if value.is_floating_point() else value.long() for name, value in case.inputs.items()}
    cache = next(iter(case.caches.values()), None)
    if whole.name == TorchMedusa.PROGRAM:
        return TorchMedusa(whole, weights).eval(), (inputs["hidden"],)
    if whole.name == TorchDflash.PROGRAM and cache is not None:
        block = TorchDflash(whole, weights, case.rows, context, block_of(whole, entry)).eval()
        block.take_cache(cache)
        return block, (inputs["token"], inputs["position"])
    if whole.name == TorchEagle3Head.PROGRAM and cache is not None:
        head = TorchEagle3Head(whole, weights, case.rows, context, first=entry == "first").eval()
        head.take_cache(cache)
        return head, (inputs["token"], inputs["aux" if entry == "first" else "hidden"], inputs["position"])
    return None


def _row(manifest: Manifest, functions, weights, ceiling: Ceiling, entry: str, n: int, plan: GpuPlan) -> dict[str, Any]:
    circuit = slice_entry(manifest.circuit, entry)
    positions = min((weights[f"{table.name}.cos"].shape[0] for table in circuit.tables), default=None)
    block = block_of(manifest.circuit, entry)
    device = next(iter(weights.values())).device

    def prepared(rows: int):
        case = device_case(circuit, rows, plan.context, device, positions, block=block)
        function = manifest.function(entry, rows)
        caches = case.copy_caches()
        call = PreparedCall(
            function,
            functions[function.symbol],
            inputs=case.inputs,
            caches=caches,
            weights=weights,
            workspace=workspace_of(function, device),
        )
        return case, call

    case, call = prepared(n)
    call()
    whole = manifest.circuit
    meant = reference(whole, entry, case, weights, case.copy_caches())
    offsets = next((weights[node.inputs[1]] for node in circuit.nodes if node.op == "target_ids"), None)
    checked = check_draft(f"{entry} {n}", whole.act, call.outputs, meant, offsets=offsets)
    calls = {"step": record(call)}
    if n > block and block in manifest.widths(entry):
        single = record(prepared(block)[1])
        calls["singles"] = lambda: [single() for _ in range(n // block)]
    peers: dict[str, Callable[[], object]] = {}
    peer = peer_of(whole, weights, case, entry, plan.context) if plan.with_peers(n) else None
    if peer is not None:
        head, arguments = peer
        checked["peer_drafts_equal"] = int((head(*arguments)[0] == meant["draft"]).sum())
        peers = graphed_peers(head, arguments, plan.modes)
    del meant
    times = ceiling.take_turns({**calls, **peers}, plan.rounds)
    moved = step_bytes(circuit, weights, n, plan.context, block=block)
    row = {"entry": entry, "n": n, "step_us": times["step"], "bytes": moved, "gb_per_s": moved / times["step"] / 1e3}
    if "singles" in times:
        row |= {"single_runs_us": times["singles"], "over_singles": times["singles"] / times["step"]}
    for name in peers:
        row |= {f"{name} us": times[name], f"{name} ratio": times[name] / times["step"]}
    return row | checked
