"""Every compiled program against the reference interpreter, on fresh random inputs each time."""

from __future__ import annotations

import functools
from dataclasses import replace

import pytest
import torch

from circuitgraph.measure.cases import Case, Span
from circuitgraph.runtime import CompiledRunner, DraftRunner, load
from circuitgraph.runtime.cuda import MOST_PLACES, _Chain
from circuitgraph.runtime.runner import ChainRows, DraftChain, Drafts
from tests.gpu.calls import (
    CONTEXTS,
    Kept,
    Table,
    artifact_folder,
    chain_slots,
    check,
    comparable,
    each_mask,
    error,
    has_entry,
    host_arguments,
    plain_rows,
    recorded,
    reference,
    run,
    same,
    same_caches,
    situation,
    tolerance,
    varied,
)


@pytest.mark.parametrize("seed", range(5))
def test_program_computes_what_the_circuit_means(program, seed, runners):
    """Each drafting program is called as it comes, then recorded as a graph, then replayed, with other inputs every time."""
    folder, entry, rows = program
    runner = runners(folder)
    case = situation(runner, entry, rows, seed)
    kept = Kept(runner, case)
    for turn in range(3):
        now = varied(runner, case, turn)
        check(runner, now, entry, run(runner, now, entry, kept), reference(runner, now, entry))
    assert not entry.startswith("draft") or recorded(runner)


@pytest.mark.parametrize("steps", [1, 3])
def test_chain_equals_its_steps(artifact, steps, runners):
    """Tokens, scores and cache, bit for bit; a row that stops drafts nothing from there on. Called thrice: as it comes,
    recorded, replayed, with other inputs every time."""
    runner = runners(artifact)
    for n in [width for width in runner.widths if width <= 16]:
        for seed in range(3):
            case = situation(runner, "draft", n, seed)
            for mask in each_mask(runner, case):
                kept = Kept(runner, case)
                for turn in range(3):
                    now = varied(runner, case, turn)
                    slots = chain_slots(now, steps)
                    inputs = (now.inputs["token"], now.inputs["hidden"], now.inputs["position"])
                    ours = kept.caches(now)
                    got = runner.chain(steps, *inputs, ours, slots, **mask(now))
                    assert recorded(runner) == (turn > 0)
                    check_chain(runner, steps, now, slots, mask(now), got, ours)


def check_chain(runner: CompiledRunner, steps: int, case: Case, slots, mask, got, ours) -> None:
    """(drafts, logprobs, ...) and caches are those of single steps. What those record is forgotten, not what there was."""
    before = dict(runner._graphs)
    theirs = case.copy_caches()
    inputs = (case.inputs["token"], case.inputs["hidden"], case.inputs["position"])
    want = DraftRunner.chain(runner, steps, *inputs, theirs, slots, **mask)
    assert torch.equal(got.drafts, want.drafts)
    assert same(got.logprobs, want.logprobs)
    assert same_caches(ours, theirs)
    torch.cuda.synchronize(runner.device)
    for key in [key for key in runner._graphs if key not in before]:
        del runner._graphs[key]


@pytest.mark.parametrize("steps", [1, 3])
def test_chain_of_host_integers_equals_that_of_device_ones(artifact, steps, runners):
    """The host forms positions and lengths of all steps itself; a kernel does for integers on the device. All rows live, some
    stopped. Thrice, as above."""
    runner = runners(artifact)
    for n in [width for width in runner.widths if width <= 16]:
        for seed in range(4):
            case = situation(runner, "draft", n, seed)
            count = 1 if seed == 3 else steps  # then no row stops but the idle one
            for mask in each_mask(runner, case):
                kept = Kept(runner, case)
                for turn in range(3):
                    now = varied(runner, case, turn)
                    slots = chain_slots(now, count)
                    ours = kept.caches(now)
                    got = runner.chain(count, *host_arguments(now.inputs, ours), slots.cpu(), **mask(now))
                    assert recorded(runner) == (turn > 0)
                    check_chain(runner, count, now, slots, mask(now), got, ours)


@pytest.mark.parametrize("steps", [1, 3])
def test_chain_of_plain_integers(artifact, steps, runners):
    """What proposers use: lists in, lists out; tables are copied only where blocks have changed, which they do in between."""
    runner = runners(artifact)
    for n in [width for width in (*runner.widths, 7) if width <= 16]:
        spans = [Span(CONTEXTS[(n + i) % 10]) for i in range(n)]
        whole = situation(runner, "draft", n, 5, spans=spans)
        for mask in each_mask(runner, whole):
            case, kept = whole, Kept(runner, whole)
            blocks = [Table(row.tolist(), version) for version, row in enumerate(case.caches["kv"].table, 1)]
            for turn in range(5):  # as it comes, recorded, replayed
                if turn:
                    row = turn % n
                    case = moved(case, row)
                    blocks[row] = Table(case.caches["kv"].table[row].tolist(), 1000 * turn)
                now = varied(runner, case, turn, roll=False)
                slots, ours, theirs = chain_slots(now, steps), kept.caches(now), now.copy_caches()
                inputs = (now.inputs["token"], now.inputs["hidden"], now.inputs["position"])
                rows = plain_rows(now, [span.context for span in spans], slots, blocks)
                storage = {"kv": (ours["kv"].k, ours["kv"].v)}
                drafts, logprobs = runner.start_chain(steps, rows, inputs[1], storage, **mask(now))()
                assert turn == 0 or recorded(runner)
                before = dict(runner._graphs)
                want = runner.chain(steps, *inputs, theirs, slots, **mask(now))
                check_lists(rows, (drafts, logprobs), want)
                assert same_caches(ours, theirs)
                torch.cuda.synchronize(runner.device)
                for key in [key for key in runner._graphs if key not in before]:
                    del runner._graphs[key]


def check_lists(rows: ChainRows, got: Drafts, want: DraftChain) -> None:
    for i, count in enumerate(rows.counts):
        assert got[0][i][:count] == want.drafts[i, :count].tolist()
        assert got[1][i][:count] == want.logprobs[i, :count].tolist()


def test_hiddens_are_read_where_they_lie_or_copied(small, runners):
    """A server's hiddens mostly come in the same memory: with other values each time, in memory of other kinds in between, and in
    more places than there are graphs for. The wanted ones come from a graph that copies them."""
    runner = runners(small)
    for n in [width for width in (*runner.widths, 7) if width <= 16]:
        spans = [Span(5 + i) for i in range(n)]
        case = situation(runner, "draft", n, 5, spans=spans)
        kept, slots = Kept(runner, case), chain_slots(case, 2)
        blocks = [Table(row.tolist(), version) for version, row in enumerate(case.caches["kv"].table, 1)]
        shape, dtype = case.inputs["hidden"].shape, case.inputs["hidden"].dtype
        flat = torch.zeros(9 * (case.inputs["hidden"].numel() + 8), dtype=dtype, device=runner.device)
        homes = [flat[i * (len(flat) // 9 // 8 * 8) :][: shape.numel()].view(shape) for i in range(6)]
        wide = torch.zeros(shape[0], 2 * shape[1], dtype=dtype, device=runner.device)[:, : shape[1]]
        odd = flat[6 * (len(flat) // 9 // 8 * 8) + 1 :][: shape.numel()].view(shape)
        other = torch.zeros(shape, dtype=torch.float32 if dtype != torch.float32 else torch.float16, device=runner.device)
        visited = [*homes[:1] * 4, odd, odd, wide, wide, other, other, homes[0], *(home for home in homes for _ in range(4))]
        for turn, home in enumerate(visited, 1):
            now = varied(runner, case, turn, roll=False)
            home.copy_(now.inputs["hidden"])
            ours, theirs = kept.caches(now), now.copy_caches()
            rows = plain_rows(now, [span.context for span in spans], slots, blocks)
            got = runner.start_chain(2, rows, home, {"kv": (ours["kv"].k, ours["kv"].v)})()
            home.zero_()  # nobody reads it from here on
            hidden = now.inputs["hidden"] if home is not other else now.inputs["hidden"].to(other.dtype).to(dtype)
            check_lists(rows, got, runner.chain(2, now.inputs["token"], hidden, now.inputs["position"], theirs, slots))
            assert same_caches(ours, theirs)
        chains = [graph for graph in runner._graphs.values() if isinstance(graph, _Chain)]
        if n in runner.widths:  # rows on a larger program are copied
            assert max(len(chain.places) for chain in chains) == MOST_PLACES


def moved(case: Case, row: int) -> Case:
    """The case with the newest block of a row's sequence in another place of the storage; where it was, there is poison."""
    caches = case.copy_caches()
    cache = caches["kv"]
    table = cache.table.clone()
    last = (int(cache.length[row]) - 1) // cache.block_size
    old = int(table[row, last])
    free = sorted(set(range(cache.k.shape[1])) - set(table.flatten().tolist()))
    new = free[row % len(free)]
    for part in (cache.k, cache.v):
        part[:, new] = part[:, old]
        part[:, old] = float("nan")
    table[row, last] = new
    slot = cache.slot.clone()
    slot[row] += (new - old) * cache.block_size
    return Case(case.inputs, {"kv": replace(cache, table=table, slot=slot)}, case.spans)


def test_rows_do_not_depend_on_each_other(artifact, runners):
    """Row i of an n-row program equals the same row run alone: within rounding, and the token unless two are as good."""
    runner = runners(artifact)
    limit = tolerance(runner)
    for n in [width for width in runner.widths if width > 1]:
        case = situation(runner, "draft", n, 1)
        together, _ = run(runner, case, "draft")
        for row in {0, case.live // 2, case.live - 1} & set(comparable(runner, case).tolist()):
            alone, _ = run(runner, case.only([row]), "draft")
            assert error(together["next_hidden"][row], alone["next_hidden"][0]) < limit
            assert abs(together["logprob"][row] - alone["logprob"][0]) < 8 * limit
        idle, _ = run(runner, case, "draft")
        assert torch.equal(idle["draft"], together["draft"]), "the same call twice gives other tokens"


@pytest.mark.parametrize("context", [0, 1, 15, 16, 17, 1000])
def test_contexts(artifact, context, runners):
    runner = runners(artifact)
    for n in runner.widths[:2]:
        case = situation(runner, "draft", n, 1, context=context)
        check(runner, case, "draft", run(runner, case, "draft"), reference(runner, case, "draft"))


@functools.cache
def far_reaching(name: str) -> CompiledRunner:
    return load(artifact_folder(name), max_position=140_000)


@pytest.mark.parametrize("context", [0, 1, 15, 16, 17, 1000, 32768, 131071])
@pytest.mark.parametrize("name", ["few_bf16", "gated_bf16", "odd_f32"])
def test_long_contexts(name, context):
    """Few cache rows weigh as much as all others together, so that each of those missing would show: the oldest, the newest,
    at edges of tiles, in between."""
    runner = far_reaching(name)
    for n in runner.widths[: 1 if context > 100_000 else 2]:
        for seed in (1,) if context > 1000 else (0, 1, 2):
            case = situation(runner, "draft", n, seed, context=context)
            weigh(case, context)
            check(runner, case, "draft", run(runner, case, "draft"), reference(runner, case, "draft"))


def weigh(case: Case, context: int) -> None:
    """Make some rows of every sequence's values large, in place."""
    cache = case.caches["kv"]
    generator = torch.Generator().manual_seed(context)
    some = torch.randint(0, context, (4,), generator=generator).tolist() if context else []
    for seq, span in enumerate(case.spans):
        for place in {*some, context - 1, 0, 15, 16, context // 2 // 16 * 16} & set(range(context)):
            block, offset = divmod(span.start + place, cache.block_size)
            shape = (cache.v.shape[0], cache.v.shape[2], cache.v.shape[4])
            values = torch.randn(shape, generator=generator) * max(context / 8, 1)
            cache.v[:, int(cache.table[seq, block]), :, offset] = values.to(cache.v.dtype).to(cache.v.device)


def test_rows_that_see_nothing(artifact, runners):
    """A row whose sequence starts at its end, or behind it, gets zeros from attention; its neighbours what they had."""
    runner = runners(artifact)
    entries = [entry for entry in ("draft", "draft_masked", "logits") if has_entry(runner, entry)]
    for n in [width for width in runner.widths if width <= 16][:3]:
        for seed, more in ((0, 0), (1, 1), (2, 40)):
            case = situation(runner, "draft", n, seed)
            for cache in case.caches.values():
                cache.start[0] = cache.length[0] + more
            for entry in entries:
                got = run(runner, case, entry)
                assert got[0]["next_hidden"][: case.live].isfinite().all()
                check(runner, case, entry, got, reference(runner, case, entry))


def test_nan_stays_in_its_row(artifact, runners):
    """A row whose hidden is NaN drafts the head's first token with log-probability -inf, in a chain too; its neighbours notice
    nothing."""
    runner = runners(artifact)
    first = 0 if runner._offsets is None else int(runner._offsets[0])
    n = [width for width in runner.widths if width <= 16][-1]
    case = situation(runner, "draft", n, 0)
    want, _ = run(runner, case, "draft")
    case.inputs["hidden"][0] = float("nan")
    kept = Kept(runner, case)
    for _ in range(3):
        got, _ = run(runner, case, "draft", kept)
        assert got["draft"][0] == first
        assert got["logprob"][0] == float("-inf")
        assert torch.equal(got["draft"][1:], want["draft"][1:])
    assert recorded(runner)
    inputs = (case.inputs["token"], case.inputs["hidden"], case.inputs["position"])
    for _ in range(3):
        chain = runner.chain(3, *inputs, kept.caches(), chain_slots(case, 3))
        assert chain.drafts[0, 0] == first
