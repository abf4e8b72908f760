"""Attention alone on a GPU: contexts of several lengths, beside torch's SDPA over a contiguous cache of the same rows.

Programs are of `attend.yaml` and `latent_attend.yaml`; SDPA has no kernel for latents, so torch multiplies there. A graph attends
to several caches one after the other, each with memory of its own, so that short contexts do not come from the L2 cache and a
graph's own cost counts little, for both sides alike.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from ..artifact.manifest import Manifest
from ..circuit.ir import Circuit, State
from ..errors import CircuitgraphError, Fault
from ..ops import TABLE, TORCH_DTYPES, PagedKV
from .calls import PreparedCall, workspace_of
from .gpu import record
from .peers import contiguous_rows
from .report import Column, Section, microseconds, percent, ratio
from .truth import relative_error

if TYPE_CHECKING:
    from .chains import Ceiling
    from .cuda import Observer

PROGRAM, LATENT_PROGRAM = "attend", "latent_attend"
CONTEXTS = (1024, 8192, 32768)
BLOCK_SIZE = 16
ENOUGH = 1 << 30
"""Bytes of cache that one graph reads, or MOST_COPIES caches."""
MOST_COPIES = 64
LIMIT = 1e-2
"""Largest norm(made - meant) / norm(meant) in bf16."""
SDPA, TORCH = "sdpa", "torch"
BACKENDS = {"flash": SDPBackend.FLASH_ATTENTION, "cudnn": SDPBackend.CUDNN_ATTENTION}


def is_attention(circuit: Circuit) -> bool:
    return circuit.name in (PROGRAM, LATENT_PROGRAM)


def measure(
    manifest: Manifest,
    functions: Mapping[str, Callable[..., Any]],
    device: torch.device,
    ceiling: Ceiling,
    widths: Sequence[int],
    rounds: int,
    tell: Observer,
) -> dict[str, Section]:
    pairs = [(n, context) for n in widths for context in CONTEXTS]
    rows = []
    for done, (n, context) in enumerate(pairs):
        tell(f"attention {n} x {context}", done, len(pairs))
        rows.append(_row(manifest, functions, device, ceiling, n, context, rounds))
    columns = (
        Column("n", "n"),
        Column("context", "context"),
        Column("MB", "bytes", lambda value: f"{value / 1e6:.1f}"),
        Column("ours us", "us", microseconds),
        Column("GB/s", "gb_per_s", lambda value: f"{value:.0f}"),
        Column("of read", "of_read", percent),
        Column("TFLOP/s", "tflop_per_s", lambda value: f"{value:.0f}"),
        *(
            column
            for name in (TORCH if manifest.circuit.name == LATENT_PROGRAM else SDPA, *BACKENDS)
            for column in (Column(f"{name} us", f"{name}_us", microseconds), Column("ours", f"over_{name}", ratio))
        ),
        Column("error", "error", lambda value: f"{value:.1e}"),
    )
    said = (
        "One layer's attention of n rows, combine included, over a paged cache with shuffled blocks; SDPA with enable_gqa over "
    )
    said += (
        "the same rows side by side, as torch chooses its kernel and with each fast one named. One call of a graph of several."
    )
    if manifest.circuit.name == LATENT_PROGRAM:
        said = (
            "One layer's latent attention of n rows, combine included, over a paged cache with shuffled blocks; torch: two "
            "matrix products and a softmax over the same rows side by side. One call of a graph of several."
        )
    return {"attention": Section("Attention", said, columns, ceiling.shares(rows))}


def _row(
    manifest: Manifest, functions, device: torch.device, ceiling: Ceiling, n: int, context: int, rounds: int
) -> dict[str, Any]:
    circuit = manifest.circuit
    state = circuit.states[0]
    latent = circuit.name == LATENT_PROGRAM
    node = next(node for node in circuit.nodes if node.op == ("latent_attention" if latent else "attention"))
    kinds = {item.name: item.type for item in circuit.inputs}
    scale = float(node.attr["scale"])
    q_types = [item.with_rows(n) for item in kinds.values()]
    flops = TABLE[node.op].flops(q_types, q_types[:1], {}, context)
    moved = n * context * state.bytes_per_row()
    copies = max(2, min(MOST_COPIES, math.ceil(ENOUGH / moved)))
    caches = [_cache(state, n, context, device) for _ in range(copies)]
    inputs = {
        name: torch.randn(item.with_rows(n).shape, device=device, dtype=TORCH_DTYPES[item.dtype])  # type: ignore[arg-type]
        for name, item in kinds.items()
    }
    function = manifest.function(circuit.entries[0].name, n)
    code = functions[function.symbol]
    workspace = workspace_of(function, device)
    ours = [
        PreparedCall(function, code, inputs=inputs, caches={state.name: cache}, weights={}, workspace=workspace)
        for cache in caches
    ]
    lines = [contiguous_rows(cache, context) for cache in caches]
    if latent:  # keys are the latents, too
        lines = [(torch.cat([v, k], dim=-1), v) for k, v in lines]
    q = torch.cat(list(inputs.values()), dim=-1)
    error = _check(ours[0], q, *lines[0], scale, f"attention {n} x {context}")

    def all_ours() -> None:
        for call in ours:
            call()

    def all_sdpa() -> list[torch.Tensor]:
        return [F.scaled_dot_product_attention(q[:, :, None], k, v, scale=scale, enable_gqa=True) for k, v in lines]

    def all_torch() -> list[torch.Tensor]:
        return [torch.softmax(q @ k[:, 0].mT * scale, dim=-1, dtype=torch.float32).to(v.dtype) @ v[:, 0] for k, v in lines]

    peer = TORCH if latent else SDPA
    calls = {"ours": record(all_ours), peer: record(all_torch if latent else all_sdpa)}
    for backend, chosen in ({} if latent else BACKENDS).items():
        try:
            with sdpa_kernel(chosen):
                calls[backend] = record(all_sdpa)
        except RuntimeError:  # this backend does not take the shape
            continue
    times = {name: time / copies for name, time in ceiling.take_turns(calls, rounds).items()}
    row: dict[str, Any] = {
        "n": n,
        "context": context,
        "copies": copies,
        "bytes": moved,
        "us": times["ours"],
        "gb_per_s": moved / times["ours"] / 1e3,
        "tflop_per_s": flops / times["ours"] / 1e6,
        "error": error,
    }
    for name in times.keys() - {"ours"}:
        row |= {f"{name}_us": times[name], f"over_{name}": times[name] / times["ours"]}
    return row


def _cache(state: State, n: int, context: int, device: torch.device) -> PagedKV:
    """Caches of n sequences, made on the device, whose blocks lie in random order."""
    each = -(-context // BLOCK_SIZE)
    shape, dtype = (1, n * each, state.heads, BLOCK_SIZE), TORCH_DTYPES[state.dtype]
    k, v = (torch.randn((*shape, dim), device=device, dtype=dtype) for dim in state.dims)
    ints: dict[str, Any] = {"dtype": torch.int32, "device": device}
    return PagedKV(
        k=k,
        v=v,
        slot=torch.full((n,), -1, **ints),
        seq=torch.arange(n, **ints),
        table=torch.randperm(n * each, device=device).to(torch.int32).view(n, each),
        start=torch.zeros(n, **ints),
        length=torch.full((n,), context, **ints),
    )


def _check(call: PreparedCall, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, subject: str) -> float:
    """The error against fp32 torch. Raises CircuitgraphError when it is more than rounding."""
    call()
    n, kv_heads, _, dim = k.shape
    meant = torch.empty((*q.shape[:2], v.shape[-1]), device=q.device)
    for row in range(n):  # one at a time: the fp32 copy of a long context is large
        queries = q[row].float().view(kv_heads, -1, dim)
        weights = torch.softmax(queries @ k[row].float().transpose(1, 2) * scale, dim=-1)
        meant[row] = (weights @ v[row].float()).view(-1, v.shape[-1])
    made = next(iter(call.outputs.values())).view(meant.shape)
    error = relative_error(made, meant)
    if not error < LIMIT:
        fault = Fault("differs from the reference", where=subject, expected=f"error below {LIMIT:g}", got=f"{error:.2g}")
        raise CircuitgraphError(fault)
    return error
