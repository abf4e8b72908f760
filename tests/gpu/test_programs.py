"""Every compiled program against the reference interpreter, on fresh random inputs each time."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch

from circuitgraph.measure.cases import Span
from circuitgraph.runtime import DraftRunner
from circuitgraph.runtime.runner import ChainRows
from tests.gpu.calls import CONTEXTS, error, reference, run, situation, tolerance


@pytest.mark.parametrize("seed", range(5))
def test_program_computes_what_the_circuit_means(program, seed, runners):
    """Each program is called as it comes, then recorded as a graph, then replayed, with other inputs every time."""
    folder, entry, rows = program
    runner = runners(folder)
    case = situation(runner, entry, rows, seed)
    want, want_caches = reference(runner, case, entry)
    got, got_caches = run(runner, case, entry)
    limit = tolerance(runner)
    check_caches(case, got_caches, want_caches, limit)
    live = slice(0, case.live)
    if entry != "context":
        assert error(got["next_hidden"][live], want["next_hidden"][live]) < limit
    if entry == "logits":
        assert error(got["logits"][live], want["logits"][live]) < limit
    if entry in ("draft", "draft_masked"):
        logits = want["logits"][live].float()
        spread = logits.std(dim=-1)
        if entry == "draft_masked":
            logits = logits.masked_fill(~allowed_columns(case.inputs["allowed"][live], logits.shape[1]), float("-inf"))
        chosen = logits.gather(1, got["draft"][live, None].long())[:, 0]
        assert (logits.amax(-1) - chosen <= 8 * limit * spread).all(), "a token that is not among the best"
        assert (got["logprob"][live] - (chosen - logits.logsumexp(-1))).abs().max() <= 8 * limit * spread.max()


def allowed_columns(mask: torch.Tensor, columns: int) -> torch.Tensor:
    """bool[rows, columns] of a bitmask int32[rows, words]."""
    column = torch.arange(columns, device=mask.device)
    return ((mask[:, column // 32] >> (column % 32).to(torch.int32)) & 1) == 1


def check_caches(case, got, want, limit) -> None:
    """Written rows agree; everything else, poison included, is bit for bit what it was."""
    for name, before in case.caches.items():
        slot = before.slot[before.slot >= 0].long()
        block, offset = slot // before.block_size, slot % before.block_size
        for part in ("k", "v"):
            ours, reference_, old = (getattr(caches[name], part) for caches in (got, want, case.caches))
            assert error(ours[:, block, :, offset], reference_[:, block, :, offset]) < limit
            rest = torch.ones(old.shape[1], old.shape[3], dtype=torch.bool, device=old.device)
            rest[block, offset] = False
            mask = rest[None, :, None, :, None].expand_as(old)
            assert torch.equal(torch.nan_to_num(ours[mask], 7.0), torch.nan_to_num(old[mask], 7.0))


@pytest.mark.parametrize("steps", [1, 3])
def test_chain_equals_its_steps(artifact, steps, runners):
    """Tokens, scores and cache, bit for bit; a row that stops drafts nothing from there on. Called thrice: as it comes,
    recorded, replayed."""
    runner = runners(artifact)
    for n in [width for width in runner.widths if width <= 16]:
        for seed in range(3):
            case = situation(runner, "draft", n, seed)
            slots = chain_slots(case, steps)
            inputs = (case.inputs["token"], case.inputs["hidden"], case.inputs["position"])
            ours, theirs = case.copy_caches(), case.copy_caches()
            got = runner.chain(steps, *inputs, ours, slots)
            want = DraftRunner.chain(runner, steps, *inputs, theirs, slots)
            assert torch.equal(got.drafts, want.drafts)
            assert torch.equal(torch.nan_to_num(got.logprobs), torch.nan_to_num(want.logprobs))
            for part in ("k", "v"):
                pair = [torch.nan_to_num(getattr(caches["kv"], part), 7.0) for caches in (ours, theirs)]
                assert torch.equal(*pair)


def chain_slots(case, steps: int) -> torch.Tensor:
    """Where the rows of a chain are written, as far as their own blocks reach; the first row stops after one step."""
    cache = case.caches["kv"]
    slots = torch.full((steps, case.rows), -1, dtype=torch.int32, device=cache.slot.device)
    for row, span in enumerate(case.spans):
        first = span.start + span.context
        blocks = -(-(first + 1) // cache.block_size)
        for step in range(min(steps, blocks * cache.block_size - first) if row else 1):
            block, offset = divmod(first + step, cache.block_size)
            slots[step, row] = cache.table[row, block] * cache.block_size + offset
    return slots


@pytest.mark.parametrize("steps", [1, 3])
def test_chain_of_host_integers_equals_that_of_device_ones(artifact, steps, runners):
    """The host forms positions and lengths of all steps itself; a kernel does for integers on the device. All rows live, some
    stopped."""
    runner = runners(artifact)
    for n in [width for width in runner.widths if width <= 16]:
        for seed in range(4):
            case = situation(runner, "draft", n, seed)
            slots = chain_slots(case, steps)
            if seed == 3:
                slots = slots[:1]  # no row stops but the idle one
            inputs = (case.inputs["token"], case.inputs["hidden"], case.inputs["position"])
            ours, theirs = case.copy_caches(), case.copy_caches()
            want = runner.chain(len(slots), *inputs, theirs, slots)
            host = {name: on_host(cache) for name, cache in ours.items()}
            arguments = (inputs[0].cpu(), inputs[1], inputs[2].cpu(), host, slots.cpu())
            got = runner.chain(len(slots), *arguments)
            assert torch.equal(got.drafts, want.drafts)
            assert torch.equal(torch.nan_to_num(got.logprobs), torch.nan_to_num(want.logprobs))
            for part in ("k", "v"):
                assert torch.equal(*[torch.nan_to_num(getattr(caches["kv"], part), 7.0) for caches in (ours, theirs)])


@pytest.mark.parametrize("steps", [1, 3])
def test_chain_of_plain_integers(artifact, steps, runners):
    """What proposers use: lists in, lists out; tables are copied only where blocks have changed."""
    runner = runners(artifact)
    for n in [width for width in (*runner.widths, 7) if width <= 16]:
        spans = [Span(CONTEXTS[(n + i) % 10]) for i in range(n)]
        case = situation(runner, "draft", n, 5, spans=spans)
        slots, cache = chain_slots(case, steps), case.caches["kv"]
        blocks = [Table(row.tolist(), version) for version, row in enumerate(cache.table, 1)]
        inputs = (case.inputs["token"], case.inputs["hidden"], case.inputs["position"])
        for _ in range(4):  # as it comes, recorded, replayed
            ours, theirs = case.copy_caches(), case.copy_caches()
            want = runner.chain(steps, *inputs, theirs, slots)
            written = [[slot for slot in row if slot >= 0] for row in slots.T.tolist()]
            rows = ChainRows(inputs[0].tolist(), inputs[2].tolist(), [span.context for span in spans], written, blocks)
            drafts, logprobs = runner.chain_packed(steps, rows, inputs[1], {"kv": (ours["kv"].k, ours["kv"].v)})
            for i, row in enumerate(written):
                assert drafts[i][: len(row)] == want.drafts[i, : len(row)].tolist()
                assert logprobs[i][: len(row)] == want.logprobs[i, : len(row)].tolist()
            for part in ("k", "v"):
                assert torch.equal(*[torch.nan_to_num(getattr(caches["kv"], part), 7.0) for caches in (ours, theirs)])


@dataclass
class Table:
    """As a lease of a pool."""

    blocks: list[int]
    version: int


def on_host(cache):
    """The same storage, addressed by integers in host memory."""
    return replace(cache, **{part: getattr(cache, part).cpu() for part in ("slot", "seq", "length", "table", "start")})


def test_rows_do_not_depend_on_each_other(artifact, runners):
    """Row i of an n-row program equals the same row run alone: within rounding, and the token unless two are as good."""
    runner = runners(artifact)
    limit = tolerance(runner)
    for n in [width for width in runner.widths if width > 1]:
        case = situation(runner, "draft", n, 1)
        together, _ = run(runner, case, "draft")
        for row in {0, case.live // 2, case.live - 1}:
            alone, _ = run(runner, case.only([row]), "draft")
            assert error(together["next_hidden"][row], alone["next_hidden"][0]) < limit
            assert abs(together["logprob"][row] - alone["logprob"][0]) < 8 * limit
        idle, _ = run(runner, case, "draft")
        assert torch.equal(idle["draft"], together["draft"]), "the same call twice gives other tokens"


@pytest.mark.parametrize("context", [15, 16, 17, 1000, 32768])
def test_contexts(artifact, context, runners):
    runner = runners(artifact)
    if runner.max_position is not None and context >= runner.max_position:
        pytest.skip("longer than the program's positions")
    if context > 1000 and not artifact.name.startswith(("few", "gated", "odd")):
        pytest.skip("long contexts are tried on a few shapes")
    for n in runner.widths[:2]:
        case = situation(runner, "draft", n, 1, context=context)
        want, _ = reference(runner, case, "draft")
        got, _ = run(runner, case, "draft")
        live = slice(0, case.live)
        assert error(got["next_hidden"][live], want["next_hidden"][live]) < tolerance(runner)


def test_nan_stays_in_its_row(artifact, runners):
    """A row whose hidden is NaN drafts token 0 with log-probability -inf, in a chain too; its neighbours notice nothing."""
    runner = runners(artifact)
    n = [width for width in runner.widths if width <= 16][-1]
    case = situation(runner, "draft", n, 0)
    want, _ = run(runner, case, "draft")
    case.inputs["hidden"][0] = float("nan")
    for _ in range(3):
        got, _ = run(runner, case, "draft")
        assert got["draft"][0] == 0
        assert got["logprob"][0] == float("-inf")
        assert torch.equal(got["draft"][1:], want["draft"][1:])
    inputs = (case.inputs["token"], case.inputs["hidden"], case.inputs["position"])
    chain = runner.chain(3, *inputs, case.copy_caches(), chain_slots(case, 3))
    assert chain.drafts[0, 0] == 0
