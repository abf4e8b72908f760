"""GPU times of a drafter's entries one by one: for programs whose first step starts elsewhere than its later ones (EAGLE-3), or
that draft all tokens at once (DFlash, Medusa). The compiled functions are called directly, as a graph of their own."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from ..artifact.manifest import Manifest
from ..checkpoint.packed import dequantised
from ..circuit.ir import Circuit
from ..circuit.narrow import slice_entry
from .calls import PreparedCall, workspace_of
from .cases import Case
from .ceiling import Ceiling
from .chains import device_case
from .floors import step_bytes, step_flops
from .gpu import record
from .gpu_plan import GpuPlan
from .peers import OUTPUTS, TorchEagle3Head
from .peers_at_once import TorchDflash, TorchMedusa
from .peers_gpu import Peers, graphed_peers, left_out, peer_columns
from .report import FLOOR, Column, Section, microseconds, ratio
from .truth import check_draft, reference

if TYPE_CHECKING:
    from .cuda import Observer


def chains_itself(circuit: Circuit) -> bool:
    """Whether one entry drafts a whole chain: it takes the hidden that it makes."""
    return any(item.name == "hidden" for item in circuit.inputs) and "next_hidden" in dict(circuit.outputs)


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
    pairs = [(entry, n) for entry in drafting for n in widths if n * whole.block_of(entry) in manifest.widths(entry)]
    rows = []
    for done, (entry, n) in enumerate(pairs):
        tell(f"{entry} {n}", done, len(pairs))
        rows.append(_row(manifest, functions, weights, ceiling, entry, n, plan))
    columns = [
        Column("entry", "entry"),
        Column("n", "n"),
        Column("rows", "rows"),
        Column("step us", "step_us", microseconds),
        *FLOOR,
        Column("one by one us", "single_runs_us", microseconds),
        Column("ours", "over_singles", ratio),
        *peer_columns(rows),
        Column("equal drafts", "equal_drafts"),
        Column("error", "error", lambda value: f"{value:.1e}"),
    ]
    said = (
        "The compiled function of each entry alone, without a runner around it; the same head in torch as CUDA graphs, compared "
    )
    said += "with the reference first. n is sequences. One by one: a call for each of them."
    if whole.block_size > 1:
        said += f" A sequence has a block of {whole.block_size} rows."
    return {"steps": Section("Draft steps", said + left_out(rows), tuple(columns), ceiling.shares(rows))}


def peer_of(
    whole: Circuit, weights: Mapping[str, torch.Tensor], case: Case, entry: str, context: int
) -> tuple[torch.nn.Module, tuple[torch.Tensor, ...]] | None:
    """The same head in torch with the case's cache, and its arguments."""
    inputs = {name: value if value.is_floating_point() else value.long() for name, value in case.inputs.items()}
    cache = next(iter(case.caches.values()), None)
    if whole.name == TorchMedusa.PROGRAM:
        return TorchMedusa(whole, weights).eval(), (inputs["hidden"],)
    if whole.name == TorchDflash.PROGRAM and cache is not None:
        block = TorchDflash(whole, weights, case.rows, context, whole.block_of(entry)).eval()
        block.take_cache(cache)
        return block, (inputs["token"], inputs["position"])
    if whole.name == TorchEagle3Head.PROGRAM and cache is not None:
        head = TorchEagle3Head(whole, weights, case.rows, context, first=entry == "first").eval()
        head.take_cache(cache)
        return head, (inputs["token"], inputs["aux" if entry == "first" else "hidden"], inputs["position"])
    return None


def _row(manifest: Manifest, functions, weights, ceiling: Ceiling, entry: str, n: int, plan: GpuPlan) -> dict[str, Any]:
    whole, circuit = manifest.circuit, slice_entry(manifest.circuit, entry)
    positions = min((weights[f"{table.name}.cos"].shape[0] for table in circuit.tables), default=None)
    block = whole.block_of(entry)
    device = next(iter(weights.values())).device

    def prepared(sequences: int):
        case = device_case(circuit, sequences * block, plan.context, device, positions, block=block)
        function = manifest.function(entry, sequences * block)
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
    numbers = dequantised(whole, weights)
    meant = reference(whole, entry, case, numbers, case.copy_caches())
    offsets = next((weights[node.inputs[1]] for node in circuit.nodes if node.op == "target_ids"), None)
    checked = check_draft(f"{entry} {n}", whole.act, call.outputs, meant, offsets=offsets)
    calls = {"step": record(call)}
    if n > 1 and block in manifest.widths(entry):
        single = record(prepared(1)[1])
        calls["singles"] = lambda: [single() for _ in range(n)]
    peers = Peers()
    peer = peer_of(whole, numbers, case, entry, plan.context) if plan.with_peers(n) else None
    del numbers
    if peer is not None:

        def check(kind: str, outputs: tuple[torch.Tensor, ...]) -> dict[str, float]:
            theirs: dict[str, torch.Tensor] = dict(zip(OUTPUTS, outputs, strict=False))
            return check_draft(f"{kind}, {entry} {n}", whole.act, theirs, meant, offsets=offsets)

        peers = graphed_peers(*peer, plan.modes, check)
    times = ceiling.take_turns({**calls, **peers.replays}, plan.rounds)
    moved = step_bytes(circuit, weights, n * block, plan.context, block=block)
    row = {
        "entry": entry,
        "n": n,
        **({"rows": n * block} if block > 1 else {}),
        "step_us": times["step"],
        "bytes": moved,
        "flops": step_flops(whole, entry, n * block, plan.context, block=block),
        "gb_per_s": moved / times["step"] / 1e3,
    }
    if "singles" in times:
        row |= {"single_runs_us": times["singles"], "over_singles": times["singles"] / times["step"]}
    return row | peers.columns(times) | checked
