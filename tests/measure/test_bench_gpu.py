"""The GPU bench without a GPU: everything but clocks and graphs, on programs that were compiled for the CPU.

What needs the device (events, graph replays, the read kernel) is replaced; checks, tables and counts are the real ones.
"""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch

from circuitgraph.artifact import read_artifact
from circuitgraph.checkpoint import bind
from circuitgraph.checkpoint.packed import dequantised
from circuitgraph.checkpoint.random_weights import random_packed, random_weight, seeded
from circuitgraph.circuit.ir import Storage
from circuitgraph.circuit.narrow import slice_entry
from circuitgraph.errors import ArtifactError, CircuitgraphError, Fault
from circuitgraph.measure import attend, chains, cuda, entries, floors, peers_gpu, shapes
from circuitgraph.measure import ceiling as ceilings
from circuitgraph.measure.cases import Span, make_case
from circuitgraph.measure.gpu import READINGS, ReadCeiling
from circuitgraph.measure.gpu_plan import GpuPlan
from circuitgraph.measure.peers import peer_heads
from circuitgraph.measure.report import plain_table
from circuitgraph.measure.routing import chosen_experts, sure_rows
from circuitgraph.measure.truth import check_draft, judged, reference
from circuitgraph.measure.weights import random_weights
from circuitgraph.ops import PagedKV
from circuitgraph.runtime import load, open_library
from circuitgraph.runtime.binding import bind_weights
from tests.fixture_cases import FIXTURES
from tests.measure.small import DFLASH_SMALL, SMALL, artifact_of

PLAN = GpuPlan(context=20, rounds=3, calls=2, prefill=32, modes=())
CPU = torch.device("cpu")


class FakeKernel:
    """Reads 1000 bytes in the time that the fake clock says."""

    bytes = 1000
    best = READINGS[0]
    tried = {READINGS[0]: 1e9}

    def __call__(self) -> None: ...
    def check(self) -> None: ...


class FakeProduct:
    rate = 1e12


@pytest.fixture
def ceiling(monkeypatch):
    """A ceiling whose clock ticks 1, 2, 3, ... microseconds over the competitors of a round."""

    def turns(calls, rounds):
        for call in calls.values():
            call()
        return {name: [1e-6 * place] * rounds for place, name in enumerate(calls, start=1)}

    monkeypatch.setattr(ceilings, "take_turns", turns)
    monkeypatch.setattr(chains, "newest_graph", lambda runner: lambda: None)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    for module in (attend, entries, peers_gpu):
        monkeypatch.setattr(module, "record", lambda call: call)
    return ceilings.Ceiling(FakeKernel(), FakeProduct())


def runner_of(artifact, **options):
    manifest = read_artifact(artifact).manifest
    return load(artifact, weights=random_weights(manifest, "cpu", every=True), **options)


def bound_weights(artifact):
    opened = read_artifact(artifact)
    return bind_weights(opened, weights=random_weights(opened.manifest, "cpu", every=True), max_position=64)


def quiet(*_):
    return None


def test_steps_chains_proposer_and_prefill(tiny, ceiling):
    sections = chains.measure(runner_of(tiny), ceiling, [1, 2], replace(PLAN, peer_widths=(2,)), quiet)
    assert list(sections) == ["draft", "peers", "singles", "proposer", "prefill"]
    (alone,) = sections["singles"].rows
    assert (alone["n"], alone["n_times_single_us"], alone["single_runs_us"]) == (2, pytest.approx(8), pytest.approx(5))
    one, two = sections["draft"].rows
    assert (one["n"], two["n"]) == (1, 2)
    assert two["step_us"] == pytest.approx(2.0)  # after the read kernel, which took 1
    assert two["of_read"] == pytest.approx(two["bytes"] / 2e-6 / 1e9)
    assert two["chain_per_step"] == pytest.approx(1.5)
    assert two["equal_drafts"] == 2
    assert [row["n"] for row in sections["peers"].rows] == [2]
    assert sections["peers"].rows[0]["peer_drafts_equal"] == 2
    assert sections["peers"].rows[0]["torch eager ratio"] == pytest.approx(3)
    assert [row["n"] for row in sections["proposer"].rows] == [1, 2]
    assert all(row["wall_us"] > 0 and row["proposes_us"] > 0 for row in sections["proposer"].rows)
    assert all({"bare_us", "over_gpu_us"} <= row.keys() for row in sections["proposer"].rows)
    assert sections["prefill"].rows[0]["programs"] == 2
    assert sections["prefill"].rows[0]["error"] < 1e-5
    for section in sections.values():
        assert len(section.cells()[0]) == len(section.shown())
        json.dumps(section.to_json())


LATENT_SMALL = {
    "hidden_size": 128,
    "num_attention_heads": 4,
    "q_lora_rank": 64,
    "kv_lora_rank": 64,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 16,
    "v_head_dim": 32,
    "n_routed_experts": 16,
    "moe_intermediate_size": 128,
    "vocab_size": 256,
}
MIXTURE_SMALL = {
    "hidden_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "num_experts": 12,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "shared_expert_intermediate_size": 64,
    "vocab_size": 256,
}


@pytest.mark.parametrize(
    ("name", "config", "stack"), [("deepseek-v3-fp8", LATENT_SMALL, 16), ("qwen3-next-80b", MIXTURE_SMALL, 12)]
)
def test_steps_of_mixtures(name, config, stack, tmp_path, ceiling):
    """Bytes of the experts that had rows, a floor, and both of torch's ways beside it."""
    shape = shapes.SHAPES[name]
    artifact = artifact_of(name, tmp_path, config={**shape.config, **config}, widths=(1, 2), entries=("draft",))
    plan = replace(PLAN, peer_widths=None, parts=())
    runner = runner_of(artifact)
    sections = chains.measure(runner, ceiling, [1, 2], plan, quiet)
    one, two = sections["draft"].rows
    top = next(node.attr["top"] for node in runner.circuit.nodes if node.op == "route")
    assert one["experts"] == top
    assert top <= two["experts"] <= min(2 * top, stack)
    whole = floors.step_bytes(runner.circuit, runner.weights, 1, 20)
    expert = sum(runner.circuit.stored_bytes(f"layer.ffn.{part}") // stack for part in ("gate", "up", "down"))
    assert one["bytes"] == whole - (stack - top) * expert
    assert one["of_floor"] == pytest.approx(one["floor_us"] / one["step_us"])
    assert "torch eager by row us" in sections["peers"].rows[0]
    assert "torch eager grouped us" in sections["peers"].rows[1]
    assert ("the same numbers in bf16" in sections["peers"].said) == name.endswith("fp8")


def test_bytes_of_a_step(tiny):
    """Weights once, of the embedding a row each, cache rows and the new ones."""
    runner = runner_of(tiny)
    weights = sum(
        tensor.nbytes for name, tensor in runner.weights.items() if name not in ("embed_tokens", "rope.cos", "rope.sin")
    )
    row = runner.circuit.states[0].bytes_per_row()
    assert floors.step_bytes(runner.circuit, runner.weights, 3, 20) == weights + 3 * (128 * 2) + 3 * 21 * row


def test_bytes_of_experts_are_those_of_the_chosen():
    """Of a stack so many matrices as have rows, plain or quantised; and which those are, the interpreter says."""
    circuit = bind("auto", model=FIXTURES / "qwen3_next_mtp").circuit
    weights = {item.name: random_weight(circuit, item, seeded(item, 0)) for item in circuit.weights}
    case = make_case(circuit, 2, [Span(3)] * 2, block_size=4, generator=torch.Generator().manual_seed(0), max_position=64)
    table = {value.name: torch.zeros(64, *value.type.shape[1:]) for item in circuit.tables for value in item.tensors()}
    draft = judged(circuit, "draft")
    counts = chosen_experts(draft, case.inputs, {**weights, **table}, case.copy_caches())
    stacks = [f"layer.ffn.{part}" for part in ("gate", "up", "down")]
    assert set(counts) == set(stacks)
    assert len(set(counts.values())) == 1
    (count,) = set(counts.values())
    assert 3 <= count <= 6
    left_out = sum(weights[name].nbytes for name in stacks) * (8 - count) // 8
    whole = floors.step_bytes(circuit, weights, 2, 3)
    assert whole - floors.step_bytes(circuit, weights, 2, 3, counts) == left_out
    stored = circuit.with_storage(dict.fromkeys(stacks, Storage.parse("fp8 per row")))
    fewer = floors.step_bytes(stored, weights, 2, 3) - floors.step_bytes(stored, weights, 2, 3, counts)
    assert fewer == sum(stored.stored_bytes(name) // 8 * (8 - count) for name in stacks)


STORED = {"lm_head": "", "fc": "", "*": "fp8 128x128"}


@pytest.mark.parametrize("storage", [{}, STORED], ids=["bf16", "fp8"])
@pytest.mark.parametrize(
    ("family", "program"),
    [("qwen3_5_mtp", "mtp_dense"), ("qwen3_next_mtp", "mtp_moe"), ("glm4_moe_mtp", "mtp_moe"), ("deepseek_v3_mtp", "mtp_mla")],
)
def test_torch_heads_compute_the_same(family, program, storage, tmp_path):
    """What is timed beside ours: with experts by row and grouped, latent attention, quantised weights as numbers."""
    options = {"model": FIXTURES / family / "config.json", "family": family, **dict.fromkeys(("act", "wt", "kv"), "bf16")}
    circuit = bind(shapes.state_storage(program, storage, tmp_path / "program.yaml", **options), **options).circuit
    generator = torch.Generator().manual_seed(0)
    weights = {}
    for item in circuit.weights:
        made = random_packed(item, generator) if item.storage else [random_weight(circuit, item, generator)]
        weights |= dict(zip((value.name for value in item.tensors()), made, strict=True))
    for table in circuit.tables:
        cos, sin = table.tensors()
        angles = torch.rand(64, *cos.type.shape[1:], generator=generator)
        weights |= {cos.name: angles.cos(), sin.name: angles.sin()}
    numbers = dequantised(circuit, weights)
    case = chains.device_case(circuit, 6, 20, CPU, 64)
    meant = reference(circuit, "draft", case, numbers, case.copy_caches())
    routed = any(node.op == "route" for node in circuit.nodes)
    sure = sure_rows(judged(circuit, "draft"), case.inputs, numbers, case.copy_caches()) if routed else None
    heads = peer_heads(circuit, numbers, 6, 20)
    assert list(heads) == ([" by row", " grouped"] if routed else [""])
    for head in heads.values():
        head.take_cache(next(iter(case.caches.values())))
        made = head(
            *(case.inputs[name].long() if name != "hidden" else case.inputs[name] for name in ("token", "hidden", "position"))
        )
        theirs = dict(zip(("draft", "logprob", "next_hidden"), made, strict=True))
        assert check_draft(family, "bf16", theirs, meant, sure)["error"] < 0.02


@pytest.mark.parametrize("entry", ["first", "draft"])
@pytest.mark.parametrize(
    "config", [{}, {"attention_bias": True}, {"norm_before_fc": True}, {"fc_norm": True, "target_hidden_size": 96}]
)
def test_torch_heads_of_eagle3_compute_the_same(config, entry, tmp_path):
    file = tmp_path / "config.json"
    file.write_text(json.dumps(json.loads((FIXTURES / "eagle3_llama" / "config.json").read_text()) | config))
    whole = bind("eagle3", model=file, **dict.fromkeys(("act", "wt", "kv"), "bf16")).circuit
    circuit = slice_entry(whole, entry)
    generator = torch.Generator().manual_seed(0)
    weights = {item.name: random_weight(whole, item, generator) for item in whole.weights}
    for table in circuit.tables:
        cos, sin = table.tensors()
        angles = torch.rand(64, *cos.type.shape[1:], generator=generator)
        weights |= {cos.name: angles.cos(), sin.name: angles.sin()}
    case = chains.device_case(circuit, 6, 20, CPU, 64)
    meant = reference(circuit, entry, case, weights, case.copy_caches())
    made = entries.peer_of(whole, weights, case, entry, 20)
    assert made is not None
    head, given = made
    theirs = dict(zip(("draft", "logprob", "next_hidden"), head(*given), strict=True))
    assert check_draft("eagle3", "bf16", theirs, meant, None)["error"] < 0.02


def test_a_peer_that_is_wrong_or_fails_is_left_out(monkeypatch):
    """It is named, and the others are timed."""
    monkeypatch.setattr(peers_gpu, "record", lambda call: call)

    def broken(head, dynamic, mode):
        def run(x):
            if mode == "fails":
                raise RuntimeError("no compiler\nand much more")
            return head(x) + (mode == "wrong")

        return run

    def check(name, made):
        if float(made):
            raise CircuitgraphError(Fault("differs", where=name))
        return {"equal_drafts": 1, "error": 0.0}

    monkeypatch.setattr(torch, "compile", broken)
    head = torch.nn.Identity()
    peers = peers_gpu.graphed_peers(head, [torch.zeros(1)], ["right", "wrong", "fails"], check)
    assert list(peers.replays) == ["torch eager", "torch.compile right"]
    assert peers.faults == {
        "torch.compile wrong": "torch.compile wrong: differs",
        "torch.compile fails": "RuntimeError: no compiler",
    }
    row = peers.columns({"step": 2.0, "torch eager": 3.0, "torch.compile right": 1.0})
    assert row["torch eager ratio"] == 1.5
    assert peers_gpu.left_out([row]) == " Not timed: torch.compile wrong: torch.compile wrong: differs" + (
        " Not timed: torch.compile fails: RuntimeError: no compiler"
    )


def test_floor_is_the_slower_of_reading_and_multiplying(ceiling):
    """The read kernel passes 1000 bytes a microsecond, the product does a million operations in one."""
    ceiling.take_turns({}, 1)
    rows = [
        {"bytes": 4000, "flops": 1e6, "gb_per_s": 0.5, "step_us": 8.0},
        {"bytes": 4000, "flops": 6e6, "gb_per_s": 0.5, "step_us": 8.0},
    ]
    shares = ceiling.shares(rows)
    assert [row["floor_us"] for row in shares] == pytest.approx([4, 6])
    assert [row["of_floor"] for row in shares] == pytest.approx([0.5, 0.75])
    assert "floor_us" not in ceiling.shares([{"gb_per_s": 1.0}])[0]


def test_operations_of_a_step(tiny):
    """Two for every weight of a product and row, and of attention four for every head's column and visible row."""
    circuit = read_artifact(tiny).manifest.circuit
    products = sum(
        2 * torch.Size(weight.type.shape).numel()
        for weight in circuit.weights
        if weight.type.rank == 2 and weight.name != "embed_tokens"
    )
    counted = floors.step_flops(circuit, "draft", 3, 20)
    assert counted == pytest.approx(3 * (products + 4 * 4 * 32 * 21), rel=0.02)  # norms and RoPE beside them
    assert floors.step_flops(circuit, "draft", 3, 120) - counted == 3 * 4 * 4 * 32 * 100


def test_operations_of_experts_are_those_of_the_chosen():
    circuit = bind("auto", model=FIXTURES / "qwen3_next_mtp").circuit
    (route,) = [node for node in circuit.nodes if node.op == "route"]
    down = next(weight for weight in circuit.weights if weight.name == "layer.ffn.down").type.shape
    rest = sum(
        2 * torch.Size(weight.type.shape).numel()
        for weight in circuit.weights
        if weight.type.rank == 2 and weight.name != "embed_tokens"
    )
    experts = 6 * route.attr["top"] * down[1] * down[2]
    assert floors.step_flops(circuit, "draft", 2, 3) == pytest.approx(2 * (rest + experts), rel=0.1)


def test_rows_that_may_go_elsewhere_are_not_compared(monkeypatch):
    made = {"next_hidden": torch.tensor([[1.0, 0], [5, 5]]), "draft": torch.tensor([0, 1])}
    meant = {"next_hidden": torch.tensor([[1.0, 0], [0, 1]]), "draft": torch.tensor([0, 0])}
    with pytest.raises(CircuitgraphError, match="differs from the reference"):
        check_draft("draft 2", "bf16", made, meant)
    assert check_draft("draft 2", "bf16", made, meant, torch.tensor([True, False])) == {"equal_drafts": 1, "error": 0.0}
    with pytest.raises(CircuitgraphError, match="differs from the reference"):
        check_draft("draft 2", "bf16", made, meant, torch.tensor([False, True]))


def test_a_wrong_program_is_not_timed(tiny, ceiling, monkeypatch):
    runner = runner_of(tiny)
    draft = runner.draft

    def wrong(*arguments):
        made = draft(*arguments)
        return made._replace(next_hidden=made.next_hidden + 1)

    monkeypatch.setattr(runner, "draft", wrong)
    with pytest.raises(CircuitgraphError, match="draft 1: differs from the reference"):
        chains.measure(runner, ceiling, [1], PLAN, quiet)


def test_a_wrong_prefill_is_not_timed(tiny, ceiling, monkeypatch):
    runner = runner_of(tiny)
    context = runner.context
    monkeypatch.setattr(runner, "context", lambda token, *rest: context(token + 1 - 2 * (token % 2), *rest))
    with pytest.raises(CircuitgraphError, match=r"prefill 32: kv\.k: differs from the reference"):
        chains._prefill(runner, ceiling, PLAN)


def test_a_chain_that_is_not_its_steps_is_not_timed(tiny, ceiling, monkeypatch):
    runner = runner_of(tiny)
    chain = runner.chain
    monkeypatch.setattr(runner, "chain", lambda *arguments: chain(*arguments)._replace(next_hidden=torch.zeros(2, 128)))
    case = chains.device_case(runner.circuit, 2, 20, CPU, None)
    with pytest.raises(CircuitgraphError, match="a chain of 3, 2 rows: next_hidden: a chain is not what its steps are"):
        chains.recorded_chain(runner, 3, case)


def test_each_row_of_a_chain_is_the_newest_of_its_sequence():
    """What attention takes from elsewhere than the cache."""
    table, length = torch.tensor([[2, 0], [3, 1]], dtype=torch.int32), torch.tensor([3, 5], dtype=torch.int32)
    storage = torch.zeros(1, 4, 1, 4, 1)
    nothing = torch.zeros(2, dtype=torch.int32)
    seq = torch.tensor([0, 1], dtype=torch.int32)
    cache = PagedKV(storage, storage, slot=nothing, seq=seq, table=table, start=nothing, length=length)
    assert chains.slots_of_steps(cache, 3).tolist() == [[10, 4], [11, 5], [0, 6]]


def test_entries_one_by_one(eagle, ceiling):
    opened = read_artifact(eagle)
    assert not entries.chains_itself(opened.manifest.circuit)
    weights = bound_weights(eagle)
    plan = replace(PLAN, peer_widths=None)
    section = entries.measure(opened.manifest, open_library(opened), weights, ceiling, [1, 2], plan, quiet)["steps"]
    assert [(row["entry"], row["n"]) for row in section.rows] == [("first", 1), ("first", 2), ("draft", 1), ("draft", 2)]
    assert all(row["equal_drafts"] == row["peer_drafts_equal"] == row["n"] for row in section.rows)
    fc = weights["fc"].nbytes
    assert section.rows[0]["bytes"] - section.rows[2]["bytes"] == fc
    json.dumps(section.to_json())


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("dflash-qwen3-8b", {"config": DFLASH_SMALL, "context_rows": (16,), "widths": (1, 2), "entries": ("draft",)}),
        ("medusa1-7b", {"config": {"hidden_size": 128, "num_attention_heads": 4, "vocab_size": 96}, "widths": (1, 3)}),
    ],
)
def test_entries_that_draft_at_once(name, changes, tmp_path, ceiling):
    """Blocks of 16 rows, of one and of two sequences; several heads. Torch's heads draft the same."""
    artifact = artifact_of(name, tmp_path, **changes)
    opened = read_artifact(artifact)
    assert not entries.chains_itself(opened.manifest.circuit)
    widths = [1, 2] if name.startswith("dflash") else [1, 3]
    weights, plan = bound_weights(artifact), replace(PLAN, peer_widths=None)
    section = entries.measure(opened.manifest, open_library(opened), weights, ceiling, widths, plan, quiet)["steps"]
    assert [(row["entry"], row["n"]) for row in section.rows] == [("draft", n) for n in widths]
    drafts = 16 if name.startswith("dflash") else 5
    # Where two tokens are as good in bf16, either may be chosen; a step that is not among the best has been refused.
    assert all(row["equal_drafts"] >= 0.8 * row["n"] * drafts for row in section.rows)
    assert all(row["peer_drafts_equal"] >= 0.7 * row["n"] * drafts for row in section.rows)
    assert "single_runs_us" in section.rows[1]


def test_attention(tmp_path, ceiling, monkeypatch):
    monkeypatch.setattr(attend, "CONTEXTS", (33,))
    monkeypatch.setattr(attend, "MOST_COPIES", 3)
    artifact = artifact_of("attention", tmp_path, config={**SMALL, "vocab_size": 8}, widths=(1, 2))
    opened = read_artifact(artifact)
    assert attend.is_attention(opened.manifest.circuit)
    section = attend.measure(opened.manifest, open_library(opened), CPU, ceiling, [1, 2], 3, quiet)["attention"]
    assert [(row["n"], row["context"], row["copies"]) for row in section.rows] == [(1, 33, 3), (2, 33, 3)]
    assert all(row["us"] == pytest.approx(2 / 3) and row["over_sdpa"] == pytest.approx(1.5) for row in section.rows)
    assert section.rows[0]["bytes"] == 33 * 2 * 2 * 16 * 2
    assert all(row["error"] < attend.LIMIT for row in section.rows)


@pytest.mark.parametrize("random", [True, False])
def test_weights_are_made_where_they_are_used(tiny, random):
    """A shape's artifact has no checkpoint: with and without --random all weights are made up."""
    bound = cuda._bind(read_artifact(tiny), None, None, None, random, CPU, 77)
    assert bound["rope.cos"].shape[0] == 77
    assert 0.5 < float(bound["layer.ffn.gate_proj"].float().std()) * 128**0.5 < 2
    assert float(bound["enorm"].float().mean()) == pytest.approx(1, abs=0.1)


def test_report(tiny, ceiling, monkeypatch, capsys, tmp_path):
    """The whole command but the device: dispatch, report, table, file."""
    machine = {"device": "H0", "driver": "1", "versions": {"torch": "2"}}
    manifest = read_artifact(tiny).manifest
    opened = replace(read_artifact(tiny), manifest=replace(manifest, target=replace(manifest.target, kind="cuda")))
    monkeypatch.setattr(cuda, "need_gpu", quiet)
    monkeypatch.setattr(cuda, "check_device", quiet)
    monkeypatch.setattr(cuda, "built_for_gpu", lambda manifest, device: manifest)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(cuda, "read_artifact", lambda path: opened)
    monkeypatch.setattr(cuda, "ReadCeiling", FakeKernel)
    monkeypatch.setattr(cuda, "MultiplyCeiling", FakeProduct)
    monkeypatch.setattr(cuda, "describe_gpu", lambda tools: machine)
    monkeypatch.setattr(cuda, "_bind", lambda opened, *_: bound_weights(tiny))
    monkeypatch.setattr(cuda, "load", lambda *_, **options: runner_of(tiny))
    assert (
        cuda.main([str(tiny), "--random", "--widths", "2", "--context", "20", "--parts", "", "--json", str(tmp_path / "r.json")])
        == 0
    )
    shown = capsys.readouterr().out
    assert "of read" in shown
    assert "read ceiling 1 GB/s" in shown
    data = json.loads((tmp_path / "r.json").read_text())
    assert data["machine"] == machine
    assert data["sections"]["draft"]["rows"][0]["n"] == 2
    assert cuda.main([str(tiny), "--widths", "3"]) == 1
    assert "has no program for 3 sequences. Compiled: 1, 2." in capsys.readouterr().err
    assert cuda.main([str(tiny), "--parts", "propose"]) == 1
    assert "there is no part 'propose' to measure. Did you mean 'proposer'?" in capsys.readouterr().err


def test_read_kernel_covers_whole_tiles():
    """Every way to read takes the same part of the buffer for every block, and most of the buffer."""
    probe = ReadCeiling.__new__(ReadCeiling)
    probe.processors, probe.buffer = 132, torch.empty(2 << 28, device="meta")
    for reading in READINGS:
        words = probe._words(reading)
        assert words % (reading.threads * reading.unroll * 4 * reading.blocks * 132) == 0
        assert words > 0.9 * probe.buffer.numel()
    assert len(set(map(str, READINGS))) == len(READINGS)


def test_without_a_gpu(tiny):
    if torch.cuda.is_available():
        pytest.skip("there is one")
    with pytest.raises(ArtifactError, match="there is no GPU here"):
        cuda.bench_cuda(tiny)


def test_plain_table_aligns():
    lines = plain_table(["n", "us"], [["1", "2.0"], ["16", "300.0"]]).splitlines()
    assert lines == [" n     us", " 1    2.0", "16  300.0"]


@pytest.mark.parametrize("name", [name for name in shapes.SHAPES if name != "tiny"])
def test_shapes_bind(name, tmp_path):
    """Sizes of the shapes that are too large to compile here."""
    shape = shapes.find_shape(name)
    file = tmp_path / "config.json"
    file.write_text(json.dumps(shape.full_config()))
    from circuitgraph.checkpoint import bind

    dtypes = dict.fromkeys(("act", "kv", "wt"), shape.act)
    circuit = bind(shape.program, model=file, family=shape.family, switches=shape.switches, **dtypes).circuit
    known = {entry.name for entry in circuit.entries}
    assert set(shape.entries or ()) <= known
    sizes = {
        name: sum(2 * torch.Size(weight.type.shape).numel() for weight in circuit.weights if weight.name not in left_out)
        for name, left_out in (("all", ["embed_tokens"]), ("later", ["embed_tokens", "fc"]))
    }
    expected = {
        "dense8b": 1.698e9,
        "dense2b": 0.735e9,
        "qwen3.5-27b": 3.392e9,
        "eagle3-8b": 0.850e9,
        "dflash-qwen3-8b": 3.342e9,
        "dflash-windows": 3.342e9,
        "medusa1-7b": 1.4785e9,
        "deepseek-v3": 25.07e9,
        "qwen3-next-80b": 3.923e9,
        "glm-4.5-air": 5.992e9,
        "attention": 0,
        "latent-attention": 0,
    }["dense8b" if name.startswith("dense8b-") else name.removesuffix("-fp8")]  # quantised: what it would be in bf16
    assert sizes["all"] == pytest.approx(expected, rel=0.01)
    if name == "eagle3-8b":
        assert sizes["later"] == pytest.approx(0.75e9, rel=0.01)


def test_a_shape_of_another_artifact_is_refused(tiny):
    with pytest.raises(ArtifactError, match="is of another shape; expected mtp_dense, hidden 4096"):
        shapes.check_shape(shapes.SHAPES["dense8b"], tiny)
    shapes.check_shape(shapes.SHAPES["tiny"], tiny)
