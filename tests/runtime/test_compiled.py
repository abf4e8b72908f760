"""The compiled runner around functions that are interpreted: which programs run, with which rows, and what is refused."""

from __future__ import annotations

import gc
import logging
import weakref
from dataclasses import replace
from itertools import combinations_with_replacement

import pytest
import torch

from circuitgraph.errors import ArtifactError, RuntimeUseError
from circuitgraph.runtime import BlockPool, CompiledRunner, MtpProposer
from circuitgraph.runtime import compiled as compiled_module
from circuitgraph.runtime.cover import cover
from tests.runtime.helpers import InterpretedLibrary, Script, drafter, manifest_of, oracle, proposer_of
from tests.runtime.test_proposer import accept, prefilled


def compiled(fallback="cover", **widths):
    manifest = manifest_of(drafter().circuit, **widths)
    library = InterpretedLibrary(manifest)
    return CompiledRunner(manifest, library.functions, drafter().weights, fallback=fallback), library


@pytest.mark.parametrize("widths", [(1,), (1, 2, 4), (1, 2, 3, 4, 8), (4, 5, 8), (3, 7), (16, 64, 256)])
def test_cover_is_the_fewest_programs_with_the_least_idle_rows(widths):
    for n in (*range(1, 20), 63, 64, 65, 300, 1001):
        parts = cover(n, widths)
        idle = sum(parts) - n
        assert 0 <= idle < parts[-1] == min(parts), "only the last program has idle rows, and a real one"
        assert len(parts) == (1 if n in widths else -(-n // max(widths)))
        if n < 20:
            options = [sum(c) for c in combinations_with_replacement(widths, len(parts)) if sum(c) >= n]
            assert sum(parts) == min(options)


@pytest.mark.parametrize("fallback", ["cover", "single"])
@pytest.mark.parametrize("n", [1, 2, 3, 4, 5, 7, 9])
def test_every_width_drafts_what_the_reference_drafts(n, fallback):
    runner, library = compiled(fallback)
    proposer, scripts = proposer_of(runner), [Script(seed) for seed in range(n)]
    states = [prefilled(proposer, script, 3 + seed) for seed, script in enumerate(scripts)]
    library.calls.clear()
    positions = [3 + seed for seed in range(n)]
    drafts = proposer.propose_batch(
        [s.tokens[p] for s, p in zip(scripts, positions, strict=True)],
        [s.hiddens[p - 1] for s, p in zip(scripts, positions, strict=True)],
        positions, 3, states,
    )  # fmt: skip
    assert drafts == [oracle(drafter(), s, p, 3) for s, p in zip(scripts, positions, strict=True)]
    path = "n-row" if n in (1, 2, 4) else {"cover": "split", "single": "single"}[fallback]
    assert runner.serves(n) == path
    assert runner.paths == {path: 1}
    parts = (1,) * n if path == "single" else cover(n, (1, 2, 4))
    assert [symbol for symbol, _ in library.calls] == [f"draft_{width}" for width in parts for _ in range(3)]


@pytest.mark.shows("rule 2")
def test_idle_rows_are_rewritten_and_write_nowhere():
    """Width 4 served a full batch before; its rows must not come back when three sequences are left."""
    runner, library = compiled(draft=(1, 4))
    proposer, scripts = proposer_of(runner), [Script(seed) for seed in range(4)]
    states = [prefilled(proposer, script, 20) for script in scripts]
    hiddens = torch.stack([script.hiddens[19] for script in scripts])
    tokens = [script.tokens[20] for script in scripts]
    proposer.propose_batch(tokens, hiddens, [20] * 4, 2, states)
    for state in states:
        proposer.after_verify(0, state)
    proposer.free_state(states[3])
    library.calls.clear()
    storage = [part.clone() for parts in proposer.pool.storage.values() for part in parts]
    proposer.propose_batch([s.tokens[21] for s in scripts[:3]], hiddens[:3], [21] * 3, 2, states[:3])
    assert [symbol for symbol, _ in library.calls] == ["draft_4"] * 2
    for _, given in library.calls:
        assert given["kv.slot"][3] == -1
        assert given["kv.length"][3] == given["kv.seq"][3] == given["token"][3] == given["position"][3] == 0
        assert not given["hidden"][3].any()
    written = {slot for state in states[:3] for slot in proposer.pool.slots(state.lease, 20, 2)}
    size = proposer.pool.block_size
    for before, after in zip(storage, [part for parts in proposer.pool.storage.values() for part in parts], strict=True):
        changed = (before != after).any(-1).any(2).any(0).nonzero().tolist()
        assert {block * size + offset for block, offset in changed} <= written


def test_context_runs_in_chunks_and_idle_rows_write_nothing():
    runner, library = compiled(context=(4, 8))
    proposer, script = proposer_of(runner, block_size=4), Script(0)
    state = prefilled(proposer, script, 30)
    assert [symbol for symbol, _ in library.calls] == ["context_8"] * 3 + ["context_8"]
    assert library.calls[-1][1]["kv.slot"][5:].tolist() == [-1] * 3
    library.calls.clear()
    position = 30
    for accepted in (2, 3):
        drafts = proposer.propose(script.tokens[position], script.hiddens[position - 1], position, 3, state)
        assert drafts == oracle(drafter(), script, position, 3)
        position = accept(proposer, script, state, position, accepted)


def test_rows_of_a_chain_stop_each_at_its_limit():
    runner, _ = compiled()
    proposers = proposer_of(runner), proposer_of()
    results = []
    for proposer in proposers:
        scripts, positions = [Script(0, 120), Script(1, 120), Script(2, 120)], [93, 10, 95]
        states = [prefilled(proposer, s, p) for s, p in zip(scripts, positions, strict=True)]
        tokens = [s.tokens[p] for s, p in zip(scripts, positions, strict=True)]
        hiddens = [s.hiddens[p - 1] for s, p in zip(scripts, positions, strict=True)]
        results.append(proposer.propose_batch(tokens, hiddens, positions, 5, states))
    assert results[0] == results[1]
    assert [len(row) for row in results[0]] == [3, 5, 1]


def test_chain_marks_rows_that_stopped():
    runner, _ = compiled()
    for each in (runner, drafter()):
        proposer = proposer_of(each)
        states = [proposer.alloc_state() for _ in range(3)]
        assert proposer.pool.grow([(state.lease, 4) for state in states])
        script = Script(0)
        ints = lambda *values: torch.tensor(values, dtype=torch.int32)  # noqa: E731
        slots = torch.tensor([list(proposer.pool.slots(s.lease, 0, 3)) for s in states], dtype=torch.int32).T.contiguous()
        slots[1:, 0] = slots[2:, 2] = -1
        caches = proposer._batch.caches(states, [0, 1, 2], [1, 1, 1], slots[0])
        chain = each.chain(3, ints(5, 6, 7), script.hiddens[:3], ints(1, 1, 1), caches, slots)
        assert (chain.drafts >= 0).tolist() == [[True, False, False], [True] * 3, [True, True, False]]
        assert torch.equal(chain.logprobs.isnan(), chain.drafts < 0)
        assert (
            chain.drafts[1].tolist()
            == each.chain(
                3,
                ints(6),
                script.hiddens[1:2],
                ints(1),
                proposer._batch.caches(states[1:2], [0], [1], slots[0, 1:2]),
                slots[:, 1:2],
            )
            .drafts[0]
            .tolist()
        )


def test_logits_of_every_width():
    runner, _ = compiled(logits=(1, 2))
    proposer, script = proposer_of(runner), Script(0)
    states = [proposer.alloc_state() for _ in range(3)]
    proposer.pool.grow([(state.lease, 1) for state in states])
    slots = torch.tensor([proposer.pool.slots(state.lease, 0, 1)[0] for state in states], dtype=torch.int32)
    caches = proposer._batch.caches(states, [0, 1, 2], [1] * 3, slots)
    token = torch.tensor([1, 2, 3], dtype=torch.int32)
    position = torch.ones(3, dtype=torch.int32)
    logits, hidden = runner.logits(token, script.hiddens[:3], position, caches)
    expected, expected_hidden = drafter().logits(token, script.hiddens[:3], position, caches)
    torch.testing.assert_close(logits, expected)
    torch.testing.assert_close(hidden, expected_hidden)


def test_the_path_is_logged_once_per_width(caplog):
    caplog.set_level(logging.INFO, "circuitgraph.runtime")
    runner, _ = compiled()
    proposer, script = proposer_of(runner), Script(0)
    states = [prefilled(proposer, script, 3) for _ in range(3)]
    for position in (3, 4):
        proposer.propose_batch([1] * 3, script.hiddens[:3], [position] * 3, 2, states)
        [proposer.after_verify(0, state) for state in states]
    lines = [record.getMessage() for record in caplog.records]
    assert lines == ["mtp_dense: 3 rows of 'draft' run as split (compiled: (1, 2, 4))"]
    assert runner.paths == {"split": 2}


def test_weights_are_borrowed_and_can_be_replaced():
    runner, _ = compiled()
    proposer, script = proposer_of(runner), Script(0)
    assert runner.weights["lm_head"].data_ptr() == drafter().weights["lm_head"].data_ptr()
    other = drafter(seed=1).weights
    runner.rebind({name: tensor for name, tensor in other.items() if name != "lm_head"})
    runner.rebind({"lm_head": other["lm_head"]})
    state = prefilled(proposer, script, 4)
    assert proposer.propose(script.tokens[4], script.hiddens[3], 4, 3, state) == oracle(drafter(seed=1), script, 4, 3)


@pytest.mark.parametrize(
    ("name", "tensor", "message"),
    [
        ("fc", torch.zeros(48, 95), r"fc: does not fit; expected contiguous f32\[48, 96\] on cpu; got f32\[48, 95\]"),
        ("fc", torch.zeros(48, 96).bfloat16(), r"got bf16\[48, 96\]"),
        ("fc", torch.zeros(96, 48).T, r"got strided f32\[48, 96\]"),
        ("fcc", torch.zeros(1), r"fcc: is not a weight of this program. Did you mean 'fc'\?"),
        ("rope.cos", torch.zeros(9, 5), r"rope.cos: does not fit"),
        ("rope.cos", torch.tensor(1.0), r"rope.cos: does not fit; expected contiguous f32\[rows, 4\]"),
        ("rope.sin", torch.zeros(9, 4), r"rope: cos and sin differ in length; got 96 rows of cos, 9 of sin"),
    ],
)
def test_weights_that_do_not_fit_are_refused(name, tensor, message):
    runner, _ = compiled()
    before = runner.weights
    with pytest.raises(RuntimeUseError, match=message):
        runner.rebind({name: tensor})
    assert runner.weights is before
    with pytest.raises(RuntimeUseError, match="nothing provides it"):
        CompiledRunner(runner.manifest, InterpretedLibrary(runner.manifest).functions, {"fc": drafter().weights["fc"]})


def test_bad_rows_are_refused_before_anything_is_launched():
    runner, library = compiled()
    proposer, script = proposer_of(runner), Script(0)
    state = proposer.alloc_state()
    proposer.pool.grow([(state.lease, 4)])
    ints = lambda *values: torch.tensor(values, dtype=torch.int32)  # noqa: E731
    caches = proposer._batch.caches([state], [0], [1], ints(*proposer.pool.slots(state.lease, 0, 1)))
    good = {"token": ints(1), "hidden": script.hiddens[:1], "position": ints(1), "kv": caches}
    cache = caches["kv"]
    bad = {
        "token: out of range; expected 0..130; got 131": {"token": ints(131)},
        "position: out of range; expected 0..95; got 96": {"position": ints(96)},
        r"position: does not fit; expected i32\[1\]": {"position": ints(1, 2)},
        "token: does not fit; .*int64": {"token": torch.tensor([1])},
        r"hidden: does not fit; expected float\[1, 48\]": {"hidden": torch.zeros(1, 47)},
        "at least one row": {"token": ints()},
        "state 'kv' is not given": {"kv": {}},
        "kv.slot: out of range": {"kv": {"kv": replace(cache, slot=ints(100_000))}},
        "kv.seq: out of range": {"kv": {"kv": replace(cache, seq=ints(1))}},
        "kv.length: out of range": {"kv": {"kv": replace(cache, length=ints(999))}},
        "kv.table: out of range; expected 0..63; got 64": {"kv": {"kv": replace(cache, table=ints(64)[None])}},
        "kv.table: out of range; .*got -1": {"kv": {"kv": replace(cache, table=ints(-1)[None])}},
        "kv.start: does not fit": {"kv": {"kv": replace(cache, start=ints(0, 0))}},
        "kv: storage does not fit": {"kv": {"kv": replace(cache, k=cache.k.double())}},
    }
    for message, change in bad.items():
        for each in (runner, drafter()):
            with pytest.raises(RuntimeUseError, match=message):
                each.draft(**{**good, **change})
    assert library.calls == []
    runner.draft(**good)
    with pytest.raises(RuntimeUseError, match="position: out of range"):
        runner.chain(3, ints(1), script.hiddens[:1], ints(94), caches, torch.zeros(3, 1, dtype=torch.int32))
    for each in (runner, drafter()):
        later = {"kv": replace(cache, table=ints(*cache.table[0].tolist(), 64)[None])}
        for kv, steps, message in (
            (caches, 9, "kv: the chain outgrows the table; expected at most 8 rows of a sequence; got 9"),
            (later, 9, "kv.table: out of range"),
            (later, 2, None),  # what is beyond the last row is never read
        ):
            slots = torch.zeros(steps, 1, dtype=torch.int32)
            if message is None:
                each.chain(steps, ints(1), script.hiddens[:1], ints(1), kv, slots)
                continue
            with pytest.raises(RuntimeUseError, match=message):
                each.chain(steps, ints(1), script.hiddens[:1], ints(1), kv, slots)
        with pytest.raises(RuntimeUseError, match="slots: out of range"):
            each.chain(2, ints(1), script.hiddens[:1], ints(1), caches, ints(0, 512)[:, None])
    with pytest.raises(RuntimeUseError, match="at least one step"):
        runner.chain(0, ints(1), script.hiddens[:1], ints(1), caches, torch.zeros(0, 1, dtype=torch.int32))


def test_what_an_artifact_cannot_serve_is_said_at_once():
    manifest = manifest_of(drafter().circuit, draft=(2, 4))
    with pytest.raises(ArtifactError, match="no one-row draft program"):
        CompiledRunner(manifest, {}, drafter().weights, fallback="single")
    with pytest.raises(RuntimeUseError, match="no such fallback"):
        CompiledRunner(manifest, {}, drafter().weights, fallback="pad")
    runner, _ = compiled(draft=(), context=(4,))
    proposer, script = proposer_of(runner), Script(0)
    state = prefilled(proposer, script, 3)
    assert runner.serves(1) is None
    assert proposer.propose_batch([1], script.hiddens[:1], [3], 2, [state]) is None
    assert proposer.metrics.refusals == {"width": 1}
    with pytest.raises(RuntimeUseError, match="runner: the runner has no draft programs"):
        proposer.propose(1, script.hiddens[0], 3, 2, state)
    one = torch.zeros(1, dtype=torch.int32)
    caches = proposer._batch.caches([state], [0], [1], one)
    with pytest.raises(RuntimeUseError, match="has no 'draft' programs"):
        runner.chain(1, one, script.hiddens[:1], one, caches, one[None])


def test_gradients_and_modes_of_the_caller_do_not_matter():
    script, weights = Script(0), {name: tensor.clone() for name, tensor in drafter().weights.items()}
    for tensor in weights.values():
        tensor.requires_grad_()
    manifest = manifest_of(drafter().circuit)

    def draft(proposer, state, position, hiddens):
        return proposer.propose(script.tokens[position], hiddens[position - 1], position, 3, state)

    with torch.inference_mode():
        runner = CompiledRunner(manifest, InterpretedLibrary(manifest).functions, weights)
        proposer = proposer_of(runner)
        state = prefilled(proposer, script, 5)
        assert draft(proposer, state, 5, script.hiddens.clone()) == oracle(drafter(), script, 5, 3)
        position = accept(proposer, script, state, 5, 1)
    hiddens = script.hiddens.clone().requires_grad_()
    assert draft(proposer, state, position, hiddens) == oracle(drafter(), script, position, 3)
    proposer.after_verify(0, state)
    one = torch.ones(1, dtype=torch.int32)
    caches = proposer._batch.caches([state], [0], [1], one)
    for each in (runner, drafter()):
        step = each.draft(one, hiddens[:1], one, caches)
        assert not step.next_hidden.requires_grad
        assert not each.logits(one, hiddens[:1], one, caches)[0].requires_grad
        assert not each.chain(2, one, hiddens[:1], one, caches, torch.stack([one, one + 1])).next_hidden.requires_grad
        each.context(one, hiddens[:1], one, caches)
    assert not any(part.requires_grad or part.is_inference() for part in proposer.pool.storage["kv"])


def test_threads_are_torchs_at_load(monkeypatch):
    given = []

    class Module:
        def implements_function(self, name):
            return True

        def get_function(self, name):
            return given.append

    for threads in (None, 3):
        compiled_module._set_threads(Module(), threads)
    assert given == [torch.get_num_threads(), 3]


def test_a_program_that_does_not_say_its_hidden_is_refused():
    from circuitgraph.runtime import ReferenceRunner

    circuit = drafter().circuit
    silent = replace(circuit, inputs=tuple(replace(item, source="") for item in circuit.inputs))
    with pytest.raises(RuntimeUseError, match="hidden: the program does not say its source"):
        ReferenceRunner(silent, drafter().weights).hidden_source  # noqa: B018


def test_a_runner_lets_go_of_a_pool_that_is_gone():
    """The caches of the last call, and the views of them that are handed to functions, are let go with the pool they are of:
    gigabytes, on a GPU. Another pool's stay."""
    runner, _ = compiled()
    script, want = Script(0), oracle(drafter(), Script(0), 6, 3)

    def drafted(proposer):
        state = prefilled(proposer, script, 6)
        return proposer.propose(script.tokens[6], script.hiddens[5], 6, 3, state)

    def addresses():
        return {cache.k.data_ptr() for program in runner._programs.values() for cache in program._last.values()}

    gone, kept = (MtpProposer(runner, BlockPool(runner.circuit, blocks=8)) for _ in range(2))
    storage = [weakref.ref(part) for pair in gone.pool.storage.values() for part in pair]
    assert drafted(kept) == drafted(gone) == want
    assert all(part() is not None for part in storage)
    del gone
    gc.collect()
    assert all(part() is None for part in storage)
    assert not addresses(), "the pool that is gone was the last that programs ran with"
    assert drafted(kept) == want, "what was let go is brought again"
    other = MtpProposer(runner, BlockPool(runner.circuit, blocks=8))
    del other
    gc.collect()
    assert addresses() == {kept.pool.storage["kv"][0].data_ptr()}, "and what is in use stays"
    assert drafted(kept) == want


def test_a_chain_has_no_scores_of_all_drafts():
    runner, one = compiled()[0], torch.ones(1, dtype=torch.int32)
    with pytest.raises(RuntimeUseError, match="scores: drafts step by step"):
        runner.scores(2, one, torch.zeros(1, runner.hidden_size), one, {}, one[None])


def test_a_pool_outlives_a_runner_that_it_was_used_by():
    pool, runner = BlockPool(drafter().circuit, blocks=8), compiled()[0]
    told, gone = runner.release(pool.storage), weakref.ref(runner)
    del runner
    gc.collect()
    assert gone() is None, "what the pool is told does not keep the runner"
    told()
