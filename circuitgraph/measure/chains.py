"""GPU times of a drafter that feeds itself: one step, a chain, the proposer around it, prefill."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from ..checkpoint.packed import dequantised
from ..circuit.ir import Circuit
from ..errors import CircuitgraphError, Fault
from ..ops import TORCH_DTYPES, PagedKV
from ..runtime.compiled import CompiledRunner
from ..runtime.mtp import MtpProposer
from ..runtime.pool import BlockPool
from ..runtime.runner import DraftRunner
from .cases import Case, Span, make_case
from .ceiling import Ceiling
from .floors import step_bytes, step_flops
from .gpu_plan import GpuPlan
from .peers import OUTPUTS, peer_heads
from .peers_gpu import Peers, graphed_peers, left_out, peer_columns
from .report import FLOOR, Column, Section, microseconds, ratio
from .routing import chosen_experts, sure_rows
from .truth import check_chain, check_context, check_draft, judged, reference

if TYPE_CHECKING:
    from .cuda import Observer

BLOCK_SIZE = 16
WARMUP = 5
TRIES = 16
"""Cases that are looked through for a row that is no near tie between experts."""

N = Column("n", "n")


def measure(runner: CompiledRunner, ceiling: Ceiling, widths: Sequence[int], plan: GpuPlan, tell: Observer) -> dict[str, Section]:
    proposing = "proposer" in plan.parts
    total = len(widths) * (2 if proposing else 1) + ("prefill" in plan.parts)
    steps: list[dict[str, Any]] = []
    peers: list[dict[str, Any]] = []
    singles: list[dict[str, Any]] = []
    done = 0
    for n in widths:
        tell(f"draft {n}", done, total)
        row, beside, alone = _steps(runner, ceiling, n, plan)
        steps.append(row)
        peers += [beside] if beside else []
        singles += [alone] if alone else []
        done += 1
    sections = {"draft": _draft_section(ceiling.shares(steps), plan)}
    if peers:
        sections["peers"] = _peer_section(runner.circuit, peers)
    if singles:
        sections["singles"] = _single_section(singles)
    if proposing:
        rows = []
        for n in widths:
            tell(f"propose_batch {n}", done, total)
            rows.append(_proposer(runner, ceiling, n, plan))
            done += 1
        sections["proposer"] = _proposer_section(rows, plan)
    if "prefill" in plan.parts and runner.context_rows:
        tell("prefill", done, total)
        sections["prefill"] = _prefill(runner, ceiling, plan)
    return sections


# -- steps -------------------------------------------------------------------------------------------------------


def _steps(
    runner: CompiledRunner, ceiling: Ceiling, n: int, plan: GpuPlan
) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    """Rows of the tables of drafts, of peers and of single rows; empty where there is nothing to compare with."""
    circuit = runner.circuit
    numbers = dequantised(circuit, runner.weights)  # once for all that interprets below
    case, sure, experts = _comparable(runner, numbers, n, plan.context)
    token, hidden, position = (case.inputs[name] for name in ("token", "hidden", "position"))
    meant = reference(circuit, "draft", case, numbers, case.copy_caches())
    made = runner.draft(token, hidden, position, case.copy_caches())._asdict()
    checked = check_draft(f"draft {n}", circuit.act, made, meant, sure)
    peers = Peers()
    if plan.with_peers(n):
        arguments = (token.long(), hidden, position.long())
        heads = peer_heads(circuit, numbers, n, plan.context)
        del numbers
        for name, head in heads.items():
            head.eval().take_cache(next(iter(case.caches.values())))

            def check(kind: str, outputs: tuple[torch.Tensor, ...], name: str = name) -> dict[str, float]:
                theirs: dict[str, torch.Tensor] = dict(zip(OUTPUTS, outputs, strict=True))
                return check_draft(f"{kind}{name}, {n} rows", circuit.act, theirs, meant, sure)

            peers.add(graphed_peers(head, arguments, plan.modes, check), name)
    calls = {"step": recorded_chain(runner, 1, case), "chain": recorded_chain(runner, plan.steps, case)}
    if n > 1 and 1 in runner.widths:
        single = recorded_chain(runner, 1, device_case(circuit, 1, plan.context, runner.device, runner.max_position))
        calls |= {"single": single, "singles": lambda: [single() for _ in range(n)]}
    times = ceiling.take_turns({**calls, **peers.replays}, plan.rounds)
    moved = step_bytes(circuit, runner.weights, n, plan.context, experts)
    row = {
        "n": n,
        "step_us": times["step"],
        "bytes": moved,
        "flops": step_flops(circuit, "draft", n, plan.context),
        **({"experts": max(experts.values())} if experts else {}),
        "gb_per_s": moved / times["step"] / 1e3,
        "chain_us": times["chain"],
        "chain_steps": plan.steps,
        "chain_per_step": times["chain"] / times["step"],
        **checked,
    }
    both = {"n": n, "step_us": times["step"]}
    beside = {**both, **peers.columns(times)} if plan.with_peers(n) and (peers.replays or peers.faults) else {}
    alone: dict[str, Any] = {}
    if "singles" in times:
        runs = times["singles"]
        alone = {**both, "n_times_single_us": n * times["single"], "single_runs_us": runs, "over_singles": runs / times["step"]}
    return row, beside, alone


def _comparable(
    runner: CompiledRunner, numbers: Mapping[str, torch.Tensor], n: int, context: int
) -> tuple[Case, torch.Tensor | None, dict[str, int]]:
    """A case, its rows that can be compared (None: all), and how many experts have rows, by the weights of their stacks.

    Where every row of a case is a near tie between experts, the next case is taken: else nothing would have been compared.
    """
    circuit, draft = runner.circuit, judged(runner.circuit, "draft")
    routed = any(node.op == "route" for node in circuit.nodes)
    for seed in range(n, n + TRIES):
        case = device_case(circuit, n, context, runner.device, runner.max_position, seed=seed)
        if not routed:
            return case, None, {}
        sure = sure_rows(draft, case.inputs, numbers, case.copy_caches())
        if bool(sure.any()):
            return case, sure, chosen_experts(draft, case.inputs, numbers, case.copy_caches())
    hint = "Weights that make all experts alike cannot be compared with anything."
    raise CircuitgraphError(Fault(f"no row in {TRIES} cases goes to certain experts", where=circuit.name, hint=hint))


def device_case(
    circuit: Circuit,
    n: int,
    context: int,
    device: torch.device,
    max_position: int | None,
    *,
    block: int = 1,
    seed: int | None = None,
) -> Case:
    """n rows of sequences with `context` rows each, as `make_case` lays them out, on the device. `block` rows of a sequence see
    each other. seed: n when left out."""
    generator = torch.Generator().manual_seed(n if seed is None else seed)
    spans = [Span(context, block)] * (n // block)
    case = make_case(circuit, n, spans, block_size=BLOCK_SIZE, generator=generator, poison=False, max_position=max_position)
    return on_device(case, device)


def on_device(case: Case, device: torch.device) -> Case:
    caches = {
        name: replace(cache, **{part: tensor.to(device) for part, tensor in vars(cache).items()})
        for name, cache in case.caches.items()
    }
    return Case({name: tensor.to(device) for name, tensor in case.inputs.items()}, caches, case.spans)


def recorded_chain(runner: CompiledRunner, steps: int, case: Case) -> Callable[[], object]:
    """The runner's own graph of a chain, as it replays it for a proposer: integers come from the host.

    The last step writes the case's newest row, those before it the rows before that one: there need not be room for more.

    Raises:
        CircuitgraphError: what it replays is not what the steps one by one make.
    """
    token, hidden, position = (case.inputs[name] for name in ("token", "hidden", "position"))
    before = {name: replace(cache, length=(cache.length - (steps - 1)).clamp(min=1)) for name, cache in case.caches.items()}
    caches = {
        name: replace(cache, **{part: getattr(cache, part).cpu() for part in ("slot", "seq", "table", "start", "length")})
        for name, cache in before.items()
    }
    slots = slots_of_steps(next(iter(before.values())), steps)
    rest = (position.cpu(), caches, slots.cpu())
    for _ in range(2):  # as it comes, recorded; with other hiddens, so that their results cannot pass for those of the replay
        runner.chain(steps, token.cpu(), -hidden, *rest)
    made = runner.chain(steps, token.cpu(), hidden, *rest)
    torch.cuda.synchronize()
    replay = newest_graph(runner)
    meant = DraftRunner.chain(runner, steps, token, hidden, position, before, slots)
    check_chain(f"a chain of {steps}, {case.rows} rows", made, meant)
    return replay


def slots_of_steps(cache: PagedKV, steps: int) -> torch.Tensor:
    """int32[steps, n]: where the rows of a chain's steps go, each the newest of its sequence when it is written."""
    places = cache.length - 1 + torch.arange(steps, dtype=torch.int32, device=cache.length.device)[:, None]
    blocks = cache.table[cache.seq.long(), (places // cache.block_size).long()]
    return blocks * cache.block_size + places % cache.block_size


def newest_graph(runner: CompiledRunner) -> Callable[[], object]:
    """Replays what the runner's last call replayed.

    Raises:
        CircuitgraphError: that call was not a graph.
    """
    chain = getattr(runner, "newest", None)
    graph = getattr(chain, "newest", None)
    if graph is None:
        raise CircuitgraphError(Fault("the runner did not record a graph", where=runner.circuit.name))

    def replay(_kept: object = chain) -> None:  # the graph reads and writes its memory
        graph.replay()

    return replay


def _draft_section(rows: Sequence[dict[str, Any]], plan: GpuPlan) -> Section:
    columns = (
        N,
        Column("step us", "step_us", microseconds),
        *FLOOR,
        Column(f"chain of {plan.steps} us", "chain_us", microseconds),
        Column("steps", "chain_per_step", lambda value: f"{value:.2f}"),
        Column("equal drafts", "equal_drafts"),
        Column("error", "error", lambda value: f"{value:.1e}"),
    )
    said = f"One step and a chain of {plan.steps} of n sequences. Drafts that the reference interpreter makes too (others are as "
    said += "good within rounding), and the relative error of the hidden."
    return Section("Draft steps", said, columns, tuple(rows))


def _single_section(rows: Sequence[dict[str, Any]]) -> Section:
    columns = (
        N,
        Column("step us", "step_us", microseconds),
        Column("n x one row us", "n_times_single_us", microseconds),
        Column("n runs us", "single_runs_us", microseconds),
        Column("ours", "over_singles", ratio),
    )
    said = "One step of n rows beside the one-row program: its time n times, and n replays of it one after the other."
    return Section("Beside single rows", said, columns, tuple(rows))


def _peer_section(circuit: Circuit, rows: Sequence[dict[str, Any]]) -> Section:
    columns = [N, Column("step us", "step_us", microseconds), *peer_columns(rows)]
    said = "The same head in torch (fused QKV and gate/up, SDPA with enable_gqa over a contiguous cache, bf16), as CUDA graphs, "
    said += "compared with the reference first."
    if any(node.op == "latent_attention" for node in circuit.nodes):
        said = said.replace("SDPA with enable_gqa", "latent attention absorbed, as two products and a softmax,")
    if any(weight.storage is not None for weight in circuit.weights):
        said += " Torch has no product of bf16 by weights with scales by block: its head has the same numbers in bf16."
    return Section("Beside torch", said + left_out(rows), tuple(columns), tuple(rows))


# -- the proposer ------------------------------------------------------------------------------------------------


class _Sequences:
    """n sequences of a real proposer, with `context` rows and a few each, that draft again and again and have nothing accepted.
    Their rows end at different places of a block, so that nearly every call of many sequences needs a block for some."""

    def __init__(self, runner: CompiledRunner, n: int, context: int, calls: int, steps: int):
        rows = context + 2 * (calls + WARMUP) + steps + 2 * BLOCK_SIZE
        pool = BlockPool(runner.circuit, blocks=n * -(-rows // BLOCK_SIZE), block_size=BLOCK_SIZE, device=runner.device)
        self.proposer = MtpProposer(runner, pool)
        self.states = [self.proposer.alloc_state() for _ in range(n)]
        self.steps = steps
        generator = torch.Generator().manual_seed(n)
        act = TORCH_DTYPES[runner.circuit.act]
        for index, state in enumerate(self.states):
            own = context + index * BLOCK_SIZE // n
            tokens = torch.randint(0, runner.vocab_size, (own + 1,), generator=generator).tolist()
            hiddens = torch.randn(own, runner.hidden_size, device=runner.device, dtype=act)
            written = self.proposer.prefill_drafter(tokens, hiddens, state)
            if written != own:
                raise CircuitgraphError(Fault("prefill refused", expected=f"{own} rows", got=str(written)))
        self.tokens = torch.randint(0, runner.vocab_size, (n,), generator=generator).tolist()
        self.hiddens = torch.randn(n, runner.hidden_size, device=runner.device, dtype=act)

    def _positions(self) -> list[int]:
        return [(self.proposer.last_pair_key(state) or 0) + 2 for state in self.states]

    def batch(self) -> float:
        """Wall microseconds of one propose_batch, from Python integers to Python integers."""
        positions = self._positions()
        torch.cuda.synchronize()
        started = time.perf_counter()
        drafts = self.proposer.propose_batch(self.tokens, self.hiddens, positions, self.steps, self.states)
        taken = time.perf_counter() - started
        assert isinstance(drafts, list)
        self._settle(drafts)
        return 1e6 * taken

    def singles(self) -> float:
        """Wall microseconds of a propose for each sequence."""
        positions = self._positions()
        rows = list(self.hiddens)
        torch.cuda.synchronize()
        started = time.perf_counter()
        calls = zip(self.tokens, rows, positions, self.states, strict=True)
        drafts = [self.proposer.propose(token, hidden, position, self.steps, state) for token, hidden, position, state in calls]
        taken = time.perf_counter() - started
        self._settle(drafts)
        return 1e6 * taken

    def _settle(self, drafts: Sequence[Sequence[int]] | None) -> None:
        if drafts is None or any(len(row) != self.steps for row in drafts):
            raise CircuitgraphError(Fault("a sequence drafted less", expected=f"{self.steps} drafts each", got=repr(drafts)[:80]))
        for state in self.states:
            self.proposer.after_verify(0, state)


def _proposer(runner: CompiledRunner, ceiling: Ceiling, n: int, plan: GpuPlan) -> dict[str, Any]:
    sequences = _Sequences(runner, n, plan.context, plan.calls, plan.steps)
    # One after the other, as a server does one of the two: in turns, each would find the other's block tables staged.
    singles = [sequences.singles() for _ in range(WARMUP + plan.calls)][WARMUP:]
    batches = [sequences.batch() for _ in range(WARMUP + plan.calls)][WARMUP:]
    replay = newest_graph(runner)
    gpu = ceiling.take_turns({"chain": replay}, plan.rounds)["chain"]
    bare = _bare_us(replay, sequences.hiddens, plan)
    wall, alone = statistics.median(batches), statistics.median(singles)
    return {
        "n": n,
        "wall_us": wall,
        "chain_gpu_us": gpu,
        "over_gpu_us": wall - gpu,
        "bare_us": bare - gpu,
        "proposes_us": alone,
        "over_proposes": alone / wall,
        "calls": plan.calls,
    }


def _bare_us(replay: Callable[[], object], hiddens: torch.Tensor, plan: GpuPlan) -> float:
    """Wall microseconds of the least that any host does for a chain: the graph, results out, wait. Median."""
    on_gpu = hiddens.device.type == "cuda"
    result = torch.zeros(2, plan.steps, len(hiddens), dtype=torch.int32, device=hiddens.device)
    read = torch.zeros(result.shape, dtype=torch.int32, pin_memory=on_gpu)
    times = []
    for _ in range(WARMUP + plan.calls):
        torch.cuda.synchronize()
        started = time.perf_counter()
        replay()
        read.copy_(result, non_blocking=True)
        if on_gpu:
            torch.cuda.current_stream().synchronize()
        times.append(1e6 * (time.perf_counter() - started))
    return statistics.median(times[WARMUP:])


def _proposer_section(rows: Sequence[dict[str, Any]], plan: GpuPlan) -> Section:
    columns = (
        N,
        Column("propose_batch us", "wall_us", microseconds),
        Column("its chain on the GPU us", "chain_gpu_us", microseconds),
        Column("over it us", "over_gpu_us", microseconds),
        Column("bare us", "bare_us", microseconds),
        Column("n propose us", "proposes_us", microseconds),
        Column("ours", "over_proposes", ratio),
    )
    said = (
        f"Wall time of MtpProposer.propose_batch(n, {plan.steps} drafts), ints in, lists out, hiddens on the GPU, beside the GPU "
    )
    said += "time of the same chain and beside n calls of propose. Bare is the host's floor over it: the graph's replay, "
    said += "a copy out and the wait, without a proposer or a runner."
    return Section("Proposer", said, columns, tuple(rows))


# -- prefill -----------------------------------------------------------------------------------------------------


def _prefill(runner: CompiledRunner, ceiling: Ceiling, plan: GpuPlan) -> Section:
    generator = torch.Generator().manual_seed(0)
    spans = [Span(0, plan.prefill)]
    case = make_case(
        runner.circuit,
        plan.prefill,
        spans,
        block_size=BLOCK_SIZE,
        generator=generator,
        poison=False,
        max_position=runner.max_position,
    )
    case = on_device(case, runner.device)
    token, hidden, position = (case.inputs[name] for name in ("token", "hidden", "position"))
    before = case.copy_caches()
    runner.context(token, hidden, position, case.caches)
    error = check_context(f"prefill {plan.prefill}", runner.circuit.act, runner.circuit, runner.weights, case, before)
    del before
    times = ceiling.take_turns({"prefill": lambda: runner.context(token, hidden, position, case.caches)}, plan.rounds)
    row = {
        "rows": plan.prefill,
        "programs": -(-plan.prefill // max(runner.context_rows)),
        "us": times["prefill"],
        "rows_per_s": plan.prefill / times["prefill"] * 1e6,
        "error": error,
    }
    columns = (
        Column("rows", "rows"),
        Column("programs", "programs"),
        Column("us", "us", microseconds),
        Column("rows/s", "rows_per_s", lambda value: f"{value:.3g}"),
        Column("error", "error", lambda value: f"{value:.1e}"),
    )
    said = "Context rows of one sequence in one call, staging and launches included; the relative error of its cache rows."
    return Section("Prefill", said, columns, (row,))
