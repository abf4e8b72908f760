"""Weights that compiling changes, end to end on the CPU: quantised ones of the checkpoint, quantised copies, restricted heads."""

from __future__ import annotations

import json
import resource
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import circuitgraph
from circuitgraph.artifact import read_artifact
from circuitgraph.checkpoint import bind
from circuitgraph.checkpoint.made import chosen, quantising, restricting
from circuitgraph.checkpoint.quantise import FORMATS, quantise
from circuitgraph.checkpoint.vocabulary import draft_vocabulary
from circuitgraph.circuit.restrict import OFFSETS, VOCABULARY, restrict_vocabulary
from circuitgraph.errors import ArtifactError, CheckpointError, CircuitError, RuntimeUseError, ScheduleError
from circuitgraph.measure.verify import verify
from circuitgraph.runtime import BlockPool, CompiledRunner, MtpProposer, ReferenceRunner, load
from tests.circuits import random_cache, random_inputs, small_mtp
from tests.fixture_cases import FIXTURES

MODEL = FIXTURES / "qwen3_dense_mtp"
LAYER = "mtp_layers.0."
QUICK = {"widths": (1, 3), "context_rows": (4,)}


def build(out: Path, model: Path = MODEL, **options):
    return circuitgraph.compile("auto", model=model, out=out, **{**QUICK, **options})


def both(out: Path, model: Path = MODEL, rows: int = 3, masked: bool = False) -> tuple:
    """What the compiled program and the interpreter make of the same rows."""
    runner = load(out, model=model, target_model=model / "target")
    reference = ReferenceRunner(runner.circuit, runner.weights)
    generator = torch.Generator().manual_seed(3)
    inputs = random_inputs(runner.circuit, rows, generator)
    made = []
    for each in (runner, reference):
        cache = random_cache(runner.circuit, [4, 7, 5][:rows], torch.Generator().manual_seed(4))
        given = (inputs["token"], inputs["hidden"], inputs["position"], {"kv": cache})
        made.append(each.draft_masked(*given, inputs["allowed"]) if masked else each.draft(*given))
    return runner, inputs, *made


def same(compiled, interpreted) -> None:
    assert torch.equal(compiled.draft, interpreted.draft)
    torch.testing.assert_close(compiled.logprob, interpreted.logprob, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(compiled.next_hidden, interpreted.next_hidden, rtol=1e-4, atol=1e-4)


# -- quantised copies ----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def mixed(tmp_path_factory) -> tuple:
    """One weight or more of every format."""
    out = tmp_path_factory.mktemp("mixed") / "a"
    formats = {"lm_head": "nvfp4", "layer.ffn.*": "mxfp4", "layer.attn.*": "int8", "layer.attn.o_proj": "fp8-block", "fc": "fp8"}
    return out, build(out, quantize=formats)


def test_quantised_copies_lie_in_the_artifact(mixed) -> None:
    out, result = mixed
    kinds = {name: str(storage) for name, storage in result.circuit.storage.items()}
    assert kinds == {
        "fc": "fp8 per row",
        "layer.attn.q_proj": "int8 per row",
        "layer.attn.k_proj": "int8 per row",
        "layer.attn.v_proj": "int8 per row",
        "layer.attn.o_proj": "fp8 128x128",
        "layer.ffn.gate_proj": "mxfp4",
        "layer.ffn.up_proj": "mxfp4",
        "layer.ffn.down_proj": "mxfp4",
        "lm_head": "nvfp4",
    }
    artifact = read_artifact(out)
    manifest = artifact.manifest
    assert {name for name, spec in manifest.weights.items() if spec.source == "artifact"} == set(kinds)
    assert manifest.weight_file in manifest.files
    carried = load_file(out / manifest.weight_file)
    stored = {value.name for weight in result.circuit.weights if weight.storage for value in weight.tensors()}
    assert set(carried) == stored
    # The numbers are the checkpoint's, quantised: not somebody else's.
    head = load_file(MODEL / "target" / "model.safetensors")["lm_head.weight"]
    assert torch.equal(carried["lm_head"], quantise(head, FORMATS["nvfp4"])[0])
    now, plain = result.step_bytes()
    saved = sum(result.circuit.types[name].bytes() - result.circuit.stored_bytes(name) for name in kinds)
    assert plain - now == saved > 0.6 * sum(result.circuit.types[name].bytes() for name in kinds)
    purposes = {row.weight: row.reason for row in result.report if row.tensor == "lm_head.weight"}
    assert purposes == {"lm_head": "quantised to nvfp4"}


def test_their_programs_compute_what_the_numbers_mean(mixed) -> None:
    out, _ = mixed
    report = verify(out, seed=1)
    assert report.passed, report
    assert {control.weight.rpartition(".")[2] for control in report.controls} & {"scales", "whole"}
    _, _, compiled, interpreted = both(out)
    same(compiled, interpreted)


def test_other_files_beside_the_copies_are_not_read(mixed, tmp_path: Path) -> None:
    """Only what the manifest lists was verified."""
    out = tmp_path / "a"
    shutil.copytree(mixed[0], out)
    carried = load_file(out / "weights" / "model.safetensors")
    save_file({name: torch.zeros_like(tensor) for name, tensor in carried.items()}, out / "weights" / "stray.safetensors")
    index = {"weight_map": dict.fromkeys(carried, "stray.safetensors")}
    (out / "weights" / "model.safetensors.index.json").write_text(json.dumps(index))
    weights = load(out, model=MODEL, target_model=MODEL / "target").weights
    assert all(torch.equal(bytes_of(weights[name]), bytes_of(tensor)) for name, tensor in carried.items())


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.reshape(-1).view(torch.uint8)


def test_a_disk_that_is_full_before_the_copies_are_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def much(bound) -> dict[str, torch.Tensor]:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 24, limits[1]))
        return {"much": torch.zeros(1 << 23)}

    monkeypatch.setattr("circuitgraph.artifact.pack.carried_tensors", much)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        with pytest.raises(ArtifactError) as caught:
            build(tmp_path / "a", quantize={"lm_head": "fp8"}, widths=(1,), entries=("draft",))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert str(caught.value).startswith(f"{tmp_path}/a: could not be written: ")
    assert "File too large" in str(caught.value)
    assert not list(tmp_path.iterdir())


def test_the_hosts_own_tensor_does_not_replace_a_copy(mixed) -> None:
    out, _ = mixed
    head = load_file(MODEL / "target" / "model.safetensors")["lm_head.weight"]
    with pytest.raises(RuntimeUseError) as caught:
        load(out, model=MODEL, weights={"lm_head": head})
    assert "lm_head: is given in part; expected lm_head, lm_head.scales, lm_head.whole, or none of them" in str(caught.value)
    assert "The program reads this weight as nvfp4" in str(caught.value)


@pytest.mark.parametrize("part", ["layer.attn.q_proj", "layer.attn.q_proj.scales"])
def test_parts_of_a_quantised_weight_are_not_taken_alone(mixed, part: str) -> None:
    """Values of one quantisation mean nothing under the scales of another: no shape tells them apart."""
    out, _ = mixed
    options = {"model": MODEL, "target_model": MODEL / "target"}
    runner = load(out, **options)
    before = dict(runner.weights)
    other = {name: tensor.clone() for name, tensor in before.items() if name.startswith("layer.attn.q_proj")}
    assert set(other) == {"layer.attn.q_proj", "layer.attn.q_proj.scales"}
    told = r"layer.attn.q_proj: is given in part; expected layer.attn.q_proj, layer.attn.q_proj.scales, or none of them"
    for give in (lambda: load(out, weights={part: other[part]}, **options), lambda: runner.rebind({part: other[part]})):
        with pytest.raises(RuntimeUseError, match=told):
            give()
    assert all(runner.weights[name] is before[name] for name in before)
    runner.rebind(other)
    assert load(out, weights=other, **options).weights[part] is other[part]
    assert runner.weights[part] is other[part]


def test_bound_and_loaded_weights_are_the_same(mixed) -> None:
    out, _ = mixed
    loaded = load(out, model=MODEL, target_model=MODEL / "target").weights
    wanted = read_artifact(out).manifest.circuit.storage
    bound = quantising(bind("auto", model=MODEL), wanted).load_weights(positions=4)
    assert set(bound) == set(loaded)
    assert all(torch.equal(bound[name], loaded[name]) for name in bound if not name.startswith("rope"))


def test_a_config_alone_gets_made_up_bytes(tmp_path: Path) -> None:
    shutil.copy(MODEL / "config.json", tmp_path / "config.json")
    result = build(
        tmp_path / "a", tmp_path / "config.json", quantize={"lm_head": "mxfp4", "layer.*": "nvfp4"}, family="qwen3_dense_mtp"
    )
    assert len(result.circuit.storage) == 8
    assert read_artifact(tmp_path / "a").manifest.weight_file is None
    assert verify(tmp_path / "a").passed


def test_a_pattern_takes_what_it_can(tmp_path: Path) -> None:
    """Norms are no matrices, and no kernel reads a quantised embedding: neither is told about, unless by name."""
    result = build(tmp_path / "a", quantize={"*": "fp8"}, stop_after="place")
    kept = {name.rpartition(".")[2] for name in result.circuit.storage}
    assert kept == {"fc", "q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "lm_head"}
    with pytest.raises(ScheduleError, match="'embed_tokens' in fp8 per row"):
        build(tmp_path / "a", quantize={"embed_tokens": "fp8"}, stop_after="place")


REFUSED = {
    "no such weight": ({"lm_haed": "fp8"}, "mtp_dense: no weight 'lm_haed' to quantise. Did you mean 'lm_head'?"),
    "no such format": (
        {"lm_head": "fp9"},
        "mtp_dense: lm_head: no format 'fp9'; expected fp8, fp8-block, int8, nvfp4, mxfp4. Did you mean 'fp8'?",
    ),
    "no matrix": ({"enorm": "int8"}, "mtp_dense: enorm: cannot be quantised: int8 per row holds float matrices; got bf16[64]"),
}


def test_a_name_wins_over_a_pattern_wherever_it_stands() -> None:
    bound = bind("auto", model=MODEL)
    for wanted in ({"lm_head": "int8", "*": "fp8"}, {"*": "fp8", "lm_head": "int8"}):
        found = chosen(bound, wanted)
        assert (found["lm_head"], found["fc"]) == (FORMATS["int8"], FORMATS["fp8"])


@pytest.mark.parametrize(("formats", "message"), REFUSED.values(), ids=REFUSED)
def test_what_cannot_be_quantised(tmp_path: Path, formats: dict, message: str) -> None:
    with pytest.raises(CheckpointError) as caught:
        build(tmp_path / "a", quantize=formats)
    assert str(caught.value) == message
    assert not (tmp_path / "a").exists()


def test_numbers_that_are_not_finite_are_refused_with_their_place(tmp_path: Path) -> None:
    model = copied(tmp_path, f"{LAYER}mlp.up_proj.weight", lambda weight: weight[3, 5].fill_(float("inf")))
    with pytest.raises(CheckpointError) as caught:
        build(tmp_path / "a", model, quantize={"layer.ffn.up_proj": "fp8"})
    expected = (
        f"{model}/model.safetensors: {LAYER}mlp.up_proj.weight: cannot be quantised; expected finite numbers; got inf at row 3, "
    )
    assert str(caught.value).startswith(expected + "column 5")
    assert not (tmp_path / "a").exists()


def copied(folder: Path, name: str, edit) -> Path:
    model = folder / "m"
    shutil.copytree(MODEL, model)
    tensors = load_file(model / "model.safetensors")
    edit(tensors[name])
    save_file(tensors, model / "model.safetensors")
    return model


def test_a_head_of_the_host_is_not_there_to_be_quantised(tmp_path: Path) -> None:
    model = tmp_path / "m"
    shutil.copytree(MODEL, model)
    shutil.rmtree(model / "target")
    for option in ({"quantize": {"lm_head": "fp8"}}, {"draft_vocab": 100}):
        with pytest.raises(CheckpointError, match=r"lm_head: cannot .*: it is handed over when .*Give target_model= "):
            build(tmp_path / "a", model, **option)


# -- quantised checkpoints -----------------------------------------------------------------------------------------


def store(tensors: dict[str, torch.Tensor], name: str, kind: str) -> None:
    """As DeepSeek, vLLM's compressed-tensors and modelopt store them."""
    storage = FORMATS[kind]
    values, scales, *whole = quantise(tensors.pop(name), storage)
    if kind.startswith("fp8"):
        tensors[name] = values.view(torch.float8_e4m3fn)
        tensors[f"{name}_scale_inv" if kind == "fp8-block" else f"{name}_scale"] = scales
    elif kind == "int8":
        tensors[name], tensors[f"{name}_scale"] = values.view(torch.int8), scales.bfloat16()
    elif kind == "nvfp4":
        tensors[name], tensors[f"{name}_scale"] = values, scales.view(torch.float8_e4m3fn)
        tensors[f"{name}_scale_2"] = whole[0][0]
    else:
        tensors[name], tensors[f"{name}_scale"] = values, scales


STORED = {
    "mlp.gate_proj": "nvfp4",
    "mlp.up_proj": "nvfp4",
    "mlp.down_proj": "mxfp4",
    "self_attn.q_proj": "fp8-block",
    "self_attn.k_proj": "fp8-block",
    "self_attn.v_proj": "fp8",
    "self_attn.o_proj": "int8",
}


@pytest.fixture
def quantised(tmp_path: Path) -> Path:
    model = tmp_path / "quantised"
    shutil.copytree(MODEL, model)
    tensors = load_file(model / "model.safetensors")
    for name, kind in STORED.items():
        store(tensors, f"{LAYER}{name}.weight", kind)
    save_file(tensors, model / "model.safetensors")
    return model


def test_a_quantised_checkpoint_stays_so(quantised: Path, tmp_path: Path) -> None:
    result = build(tmp_path / "a", quantised)
    assert len(result.circuit.storage) == len(STORED)
    told = {row.tensor: row.reason for row in result.report}
    assert told[f"{LAYER}mlp.up_proj.weight"] == "nvfp4, read as it is"
    assert told[f"{LAYER}self_attn.q_proj.weight"] == "fp8 block 128x128, read as it is"
    specs = read_artifact(tmp_path / "a").manifest.weights
    assert {specs[name].source for name in result.circuit.storage} == {"drafter"}
    assert verify(tmp_path / "a").passed
    _, _, compiled, interpreted = both(tmp_path / "a", quantised)
    same(compiled, interpreted)
    # The bytes are mapped where the file has them.
    weights = load(tmp_path / "a", model=quantised, target_model=quantised / "target").weights
    assert weights["layer.ffn.up_proj"].dtype == torch.uint8
    plain = build(tmp_path / "b", quantised, dequantise=True)
    assert not plain.circuit.storage
    assert {row.reason for row in plain.report if row.tensor == f"{LAYER}mlp.up_proj.weight"} == {"nvfp4 -> bf16"}
    _, _, rounded, _ = both(tmp_path / "b", quantised)
    torch.testing.assert_close(rounded.next_hidden, compiled.next_hidden, rtol=0.05, atol=0.05)
    assert not torch.equal(rounded.next_hidden, compiled.next_hidden)


def test_what_is_quantised_already_is_quantised_anew_on_request_alone(quantised: Path, tmp_path: Path) -> None:
    formats = {"layer.ffn.up_proj": "int8"}
    with pytest.raises(CheckpointError, match=r"layer.ffn.up_proj: cannot be quantised: it is quantised already, nvfp4"):
        build(tmp_path / "a", quantised, quantize=formats)
    result = build(tmp_path / "a", quantised, quantize=formats, dequantise=True)
    assert {name: str(kind) for name, kind in result.circuit.storage.items()} == {"layer.ffn.up_proj": "int8 per row"}


def test_what_kernels_cannot_read_is_dequantised_and_said(tmp_path: Path) -> None:
    """Blocks of 24 columns: a vector may lie in two of them. The weights that share a launch go with it."""
    model = tmp_path / "m"
    shutil.copytree(MODEL, model)
    tensors = load_file(model / "model.safetensors")
    for name in ("gate_proj", "up_proj"):
        weight = f"{LAYER}mlp.{name}.weight"
        rows, columns = tensors[weight].shape
        tensors[weight] = tensors[weight].to(torch.float8_e4m3fn)
        tensors[f"{weight}_scale_inv"] = torch.ones(-(-rows // 24), -(-columns // 24))
    store(tensors, f"{LAYER}mlp.down_proj.weight", "int8")
    save_file(tensors, model / "model.safetensors")
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**config, "quantization_config": {"weight_block_size": [24, 24]}}))
    result = build(tmp_path / "a", model)
    assert set(result.circuit.storage) == {"layer.ffn.down_proj"}
    reason = next(row.reason for row in result.report if row.tensor == f"{LAYER}mlp.up_proj.weight")
    assert reason.startswith("fp8 block 24x24 -> bf16, since kernels cannot read it (")
    assert "has scales for 24 columns, which is no multiple of 16" in reason
    assert verify(tmp_path / "a").passed


def test_a_damaged_one_is_refused_as_before(quantised: Path, tmp_path: Path) -> None:
    name = f"{LAYER}mlp.up_proj.weight"

    def refused(edit) -> str:
        tensors = load_file(quantised / "model.safetensors")
        edit(tensors)
        bad = tmp_path / "bad"
        shutil.rmtree(bad, ignore_errors=True)
        shutil.copytree(quantised, bad)
        save_file(tensors, bad / "model.safetensors")
        with pytest.raises(CheckpointError) as caught:
            bind("auto", model=bad, keep_packed=True).load_weights(positions=4)
        assert f"{bad}/model.safetensors: {name}" in str(caught.value)
        return str(caught.value)

    assert "NVFP4 needs one scale over its scales" in refused(lambda tensors: tensors.pop(f"{name}_scale_2"))
    assert "needs one scale" in refused(lambda tensors: tensors.pop(f"{name}_scale"))
    assert "does not fit as scales of nvfp4" in refused(
        lambda tensors: tensors.update({f"{name}_scale": tensors[f"{name}_scale"][:, :1].clone()})
    )
    assert "scales must be finite" in refused(lambda tensors: tensors[f"{name}_scale"].view(torch.uint8)[0].fill_(0x7F))
    assert "scales must be finite" in refused(lambda tensors: tensors[f"{name}_scale_2"].fill_(float("nan")))


def test_the_printed_program_has_the_storage_and_loads_again(quantised: Path, tmp_path: Path) -> None:
    bound = bind("auto", model=quantised, keep_packed=True)
    file = tmp_path / "printed.yaml"
    file.write_text(circuitgraph.circuit.text.format_circuit(bound.circuit))
    again = bind(file, model=quantised, family="qwen3_dense_mtp")
    assert again.circuit.storage == bound.circuit.storage
    assert again.digest == bound.digest
    assert bind("auto", model=quantised).digest != bound.digest
    with pytest.raises(CheckpointError, match=r"the program states another storage; expected nvfp4 \('layer.ffn.gate_proj'\)"):
        bind(file, model=MODEL, family="qwen3_dense_mtp")


# -- restricted heads ----------------------------------------------------------------------------------------------

LISTED = (3, 17, 18, 64, 65, 66, 131, 200, 333, 400, 402, 505, 511)


def full_logits(inputs: dict, hidden: torch.Tensor) -> torch.Tensor:
    """Scores of the whole vocabulary for a recycled (post-norm) hidden."""
    head = load_file(MODEL / "target" / "model.safetensors")["lm_head.weight"].float()
    return hidden.float() @ head.T


@pytest.mark.parametrize(
    ("vocabulary", "ids"), [(100, tuple(range(100))), (LISTED, LISTED), (LISTED[::-1], LISTED)], ids=["first", "listed", "turned"]
)
@pytest.mark.parametrize("quantize", [{}, {"lm_head": "fp8"}], ids=["plain", "fp8"])
def test_drafts_are_the_best_of_the_tokens_kept(tmp_path: Path, vocabulary, ids, quantize) -> None:
    result = build(tmp_path / "a", draft_vocab=vocabulary, quantize=quantize, entries=("draft", "draft_masked", "context"))
    assert result.circuit.types["lm_head"].shape == (len(ids), 64)
    assert (OFFSETS in result.circuit.types) == (ids == LISTED)
    for masked in (False, True):
        runner, inputs, compiled, interpreted = both(tmp_path / "a", masked=masked)
        same(compiled, interpreted)
        assert runner.vocab_size == 512
        logits = full_logits(inputs, compiled.next_hidden)
        keep = torch.zeros(512, dtype=torch.bool)
        keep[list(ids)] = True
        allowed = keep.expand(3, -1)
        if masked:
            places = torch.arange(512)
            allowed = allowed & ((inputs["allowed"][:, places // 32] >> (places % 32)) & 1).bool()
        if not quantize:
            assert allowed.any(-1).all()
            best = logits.masked_fill(~allowed, float("-inf"))
            assert compiled.draft.tolist() == best.argmax(-1).tolist()
            torch.testing.assert_close(compiled.logprob, best.log_softmax(-1).amax(-1), rtol=1e-4, atol=1e-4)
        assert all(allowed[row, token] for row, token in enumerate(compiled.draft.tolist()))


def test_a_restricted_head_is_verified(tmp_path: Path) -> None:
    build(tmp_path / "a", draft_vocab=LISTED)
    report = verify(tmp_path / "a")
    assert report.passed, report
    carried = load_file(tmp_path / "a" / "weights" / "model.safetensors")
    assert (carried[OFFSETS] + torch.arange(len(LISTED))).tolist() == list(LISTED)
    assert carried["lm_head"].shape == (len(LISTED), 64)


@pytest.mark.parametrize("whole", [512, "512", range(512)], ids=str)
def test_all_of_the_vocabulary_changes_nothing(whole) -> None:
    bound = bind("auto", model=MODEL)
    made = restricting(bound, draft_vocabulary(whole, 512))
    assert (made.circuit, made.tensors, made.made) == (bound.circuit, bound.tensors, {})


def test_forms_of_a_list(tmp_path: Path) -> None:
    ids = [5, 2, 9]
    (tmp_path / "ids.txt").write_text("5 2 # two of them\n\n9,\n")
    (tmp_path / "ids.json").write_text("[5, 2, 9]")
    save_file({"ids": torch.tensor(ids)}, tmp_path / "ids.safetensors")
    torch.save(torch.tensor(ids), tmp_path / "ids.pt")
    torch.save({"ids": ids}, tmp_path / "named.pt")
    for name in ("ids.txt", "ids.json", "ids.safetensors", "ids.pt", "named.pt"):
        assert draft_vocabulary(tmp_path / name, 10) == (2, 5, 9), name
    assert draft_vocabulary(ids, 10) == (2, 5, 9)
    assert draft_vocabulary("4", 10) == draft_vocabulary(4, 10) == (0, 1, 2, 3)


BAD_LISTS = {
    "twice.txt": ("5 2\n5\n", "entries 0 and 2 are the same token; expected each once; got 5"),
    "far.txt": ("5 10\n", "entry 1 is no token of the target; expected 0 to 9; got 10. Is the list of another tokenizer?"),
    "negative.json": ("[-1]", "entry 0 is no token of the target; expected 0 to 9; got -1. Is the list of another tokenizer?"),
    "empty.txt": ("# nothing\n", "lists no token; expected ids; got none"),
    "empty.json": ("[]", "lists no token; expected ids; got none"),
    "map.json": ('{"a": 1}', "is no list of token ids; expected a JSON list; got dict"),
    "text.json": ('["a"]', "entry 0 is no token id; expected a whole number; got 'a'"),
    "true.json": ("[true]", "entry 0 is no token id; expected a whole number; got True"),
}


@pytest.mark.parametrize(("name", "text", "message"), [(name, *rest) for name, rest in BAD_LISTS.items()], ids=BAD_LISTS)
def test_lists_that_are_refused(tmp_path: Path, name: str, text: str, message: str) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(CheckpointError) as caught:
        draft_vocabulary(tmp_path / name, 10)
    assert str(caught.value) == f"{tmp_path}/{name}: draft vocabulary: {message}"


def test_other_files_are_refused(tmp_path: Path) -> None:
    def refused(given) -> str:
        with pytest.raises(CheckpointError) as caught:
            draft_vocabulary(given, 10)
        return str(caught.value)

    (tmp_path / "words.txt").write_text("1\n2\nthree\n")
    assert refused(tmp_path / "words.txt") == (
        f"{tmp_path}/words.txt:3: draft vocabulary: is no token id; expected a whole number; got 'three'"
    )
    assert "cannot be read" in refused(tmp_path / "absent.txt")
    (tmp_path / "broken.safetensors").write_bytes(b"abc")
    (tmp_path / "broken.pt").write_bytes(b"abc")
    (tmp_path / "broken.json").write_text("[1, ")
    for name in ("broken.safetensors", "broken.pt", "broken.json"):
        assert f"{tmp_path}/{name}: draft vocabulary: cannot be read" in refused(tmp_path / name)
    torch.save(torch.ones(3), tmp_path / "floats.pt")
    assert "is no list of token ids; expected int32[N] or int64[N]; got float32[3]" in refused(tmp_path / "floats.pt")
    save_file({"a": torch.tensor([1]), "b": torch.tensor([2])}, tmp_path / "two.safetensors")
    assert "is to hold one tensor, of token ids; expected one; got a, b" in refused(tmp_path / "two.safetensors")
    (tmp_path / "signs.txt").write_text("1\n--5\n")
    assert f"{tmp_path}/signs.txt:2: draft vocabulary: is no token id" in refused(tmp_path / "signs.txt")
    assert "--5: draft vocabulary: cannot be read" in refused("--5")
    assert f"{'9' * 5000}: draft vocabulary: cannot be read" in refused("9" * 5000)
    for given in (True, False, 4.0, None):
        assert refused(given) == (
            f"draft vocabulary: is no number of tokens and no list; expected a number of tokens, or a file of ids; got {given!r}"
        )
    for count in (0, 11, -3, "0"):
        assert "is no number of tokens; expected 1 to 10" in refused(count)


def test_a_list_that_nests_without_end(tmp_path: Path) -> None:
    (tmp_path / "deep.json").write_text("[" * 100_000)
    with pytest.raises(CheckpointError, match=r"deep.json: draft vocabulary: cannot be read: maximum recursion depth exceeded"):
        draft_vocabulary(tmp_path / "deep.json", 10)


def test_heads_that_cannot_be_restricted() -> None:
    eagle = bind("auto", model=FIXTURES / "eagle3_llama", target_model=FIXTURES / "eagle3_llama" / "target").circuit
    with pytest.raises(CircuitError, match="the head has a vocabulary of its own already"):
        restrict_vocabulary(eagle, (0, 1))
    with pytest.raises(CircuitError, match=r"no ids of its vocabulary; expected 0 to 130; got 2 of 0 to 131"):
        restrict_vocabulary(small_mtp(), (0, 131))


@pytest.mark.parametrize("ids", [range(40), (1, 4, 6, 33, 70)], ids=["first", "some"])
def test_a_restricted_head_without_an_embedding_still_takes_the_targets_tokens(tmp_path: Path, ids) -> None:
    """Interpreted as compiled: tokens and masks are the target's, whatever rows the head has left."""
    folder = FIXTURES / "medusa1"
    options = {"model": folder, "target_model": folder / "target"}
    circuitgraph.compile("auto", **options, out=tmp_path / "a", widths=(1,), draft_vocab=list(ids), entries=("draft", "logits"))
    runner = load(tmp_path / "a", **options)
    reference = ReferenceRunner(runner.circuit, runner.weights)
    whole = bind("auto", **options).circuit
    size = ReferenceRunner(whole, bind("auto", **options).load_weights()).vocab_size
    assert VOCABULARY not in dict(whole.facts)
    assert dict(runner.circuit.facts)[VOCABULARY] == size > len(ids)
    assert (reference.vocab_size, reference.mask_words) == (runner.vocab_size, runner.mask_words) == (size, -(-size // 32))
    hidden = torch.randn(1, runner.hidden_size, generator=torch.Generator().manual_seed(1))
    none = torch.zeros(1, dtype=torch.int32)
    allowed = torch.zeros(1, reference.mask_words, dtype=torch.int32)
    allowed[0, 33 // 32] |= 1 << (33 % 32)
    for each in (reference, runner):
        scores = each.scores(1, none, hidden, none, {}, none[None, :0])
        assert each.pick(scores[:, 0], allowed)[0].tolist() == [33]
    proposer = MtpProposer(reference, BlockPool(reference.circuit, memory_bytes=1))
    state = proposer.alloc_state()
    assert max(proposer.propose(size - 1, hidden[0], 3, 2, state)) in ids, "the newest token is none that the head scores"
    old = replace(runner.manifest, circuit=replace(runner.circuit, facts=whole.facts))
    functions = {function.symbol: print for function in old.functions.values()}
    assert CompiledRunner(old, functions, runner.weights).vocab_size == size, "artifacts of before the circuit said it"


def test_several_heads_share_the_map() -> None:
    """Medusa: each head is restricted, and every draft leaves as a target id."""
    folder = FIXTURES / "medusa1"
    target = folder / "target"
    circuit = bind("auto", model=folder, target_model=target if target.is_dir() else None).circuit
    made, cut = restrict_vocabulary(circuit, (1, 4, 6))
    heads = [node for node in made.nodes if node.op == "top1"]
    assert len(heads) > 1
    assert len(cut) == len(heads)
    assert sum(node.op == "target_ids" for node in made.nodes) == len(heads)
    assert sum(weight.name == OFFSETS for weight in made.weights) == 1
    circuitgraph.circuit.check.check(made)
