"""Tensor files: which are opened, that nothing is copied, and what broken ones are told."""

from __future__ import annotations

import json
import time
from pathlib import Path
from random import Random

import pytest
import torch
from safetensors.torch import save_file

from circuitgraph.checkpoint import TensorFiles
from circuitgraph.checkpoint import files as files_module
from circuitgraph.errors import CheckpointError


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Messages name paths, so work where they are short."""
    monkeypatch.chdir(tmp_path)
    Path("m").mkdir()
    return Path("m")


def sharded(folder: Path, weight_map: dict[str, str] | None = None) -> None:
    """Tensor a in shard 1, b and c in shard 2."""
    save_file({"a": torch.zeros(2)}, folder / "model-00001-of-00002.safetensors")
    save_file({"b": torch.ones(3), "c": torch.ones(4)}, folder / "model-00002-of-00002.safetensors")
    right = {"a": "model-00001-of-00002.safetensors", **dict.fromkeys("bc", "model-00002-of-00002.safetensors")}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {**right, **(weight_map or {})}}))


def refusal(call) -> str:
    with pytest.raises(CheckpointError) as caught:
        call()
    return str(caught.value)


def test_only_needed_shards_are_opened(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sharded(folder)
    opened = []
    real = files_module.safe_open
    monkeypatch.setattr(files_module, "safe_open", lambda file, **how: opened.append(file.name) or real(file, **how))
    files = TensorFiles.open(folder)
    assert sorted(files) == ["a", "b", "c"]
    assert opened == []
    assert str(files.info("b")) == "f32[3]"
    assert files.load(["b", "c"])["c"].tolist() == [1.0] * 4
    assert set(opened) == {"model-00002-of-00002.safetensors"}


def test_data_is_mapped_not_copied(folder: Path) -> None:
    save_file({"big": torch.zeros(16_000_000)}, folder / "model.safetensors")

    def resident() -> int:
        return next(
            int(line.split()[1]) for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmRSS")
        )

    files = TensorFiles.open(folder)
    before = resident()
    tensor = files.load(["big"])["big"]
    assert resident() - before < 8_000, "kB: reading 64 MB would show"
    assert tensor.shape == (16_000_000,)


def test_other_files_beside_the_weights_are_not_read(folder: Path) -> None:
    save_file({"a": torch.zeros(2)}, folder / "model.safetensors")
    save_file({"stray": torch.zeros(2)}, folder / "cases.safetensors")
    assert list(TensorFiles.open(folder)) == ["a"]


def test_an_index_beside_a_single_file_that_it_does_not_name(folder: Path) -> None:
    """transformers would take the file."""
    sharded(folder)
    save_file({"old": torch.zeros(2)}, folder / "model.safetensors")
    assert refusal(lambda: TensorFiles.open(folder)) == (
        "m: several model weights; expected model.safetensors or model.safetensors.index.json; got model.safetensors, and "
        "model.safetensors.index.json, which does not name it. "
        "Which of them is it? Move the other away: loaders differ in which they take."
    )
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"old": "model.safetensors"}}))
    assert list(TensorFiles.open(folder)) == ["old"]


def test_the_only_file_may_have_another_name(folder: Path) -> None:
    save_file({"a": torch.zeros(2)}, folder / "head.safetensors")
    assert list(TensorFiles.open(folder)) == ["a"]
    save_file({"b": torch.zeros(2)}, folder / "other.safetensors")
    assert refusal(lambda: TensorFiles.open(folder)) == (
        "m: several model weights; expected model.safetensors or an index of shards; got head.safetensors, other.safetensors. "
        "Which of them is it? Call it model.safetensors."
    )


def test_quantised_dtypes_keep_their_names(folder: Path) -> None:
    save_file(
        {"a": torch.zeros(2, dtype=torch.float8_e4m3fn), "b": torch.zeros(2, dtype=torch.bfloat16)}, folder / "model.safetensors"
    )
    files = TensorFiles.open(folder)
    assert [files.info(name).dtype for name in "ab"] == ["F8_E4M3", "bf16"]


def test_absent_shard(folder: Path) -> None:
    sharded(folder, {"d": "model-00003-of-00003.safetensors", "e": "model-00003-of-00003.safetensors"})
    files = TensorFiles.open(folder)
    assert files.load(["a", "b"])["b"].tolist() == [1.0] * 3, "what lies in it is not needed"
    assert files.glance("d") is None
    assert refusal(lambda: files.load(["a", "d"])) == (
        "m/model.safetensors.index.json: d: the index puts the tensor into a shard that is absent: "
        "model-00003-of-00003.safetensors. Download it, or correct the index."
    )


def test_tensor_missing_in_its_shard(folder: Path) -> None:
    sharded(folder, {"d": "model-00001-of-00002.safetensors"})
    files = TensorFiles.open(folder)
    assert refusal(lambda: files.info("d")) == (
        "m/model.safetensors.index.json: d: model.safetensors.index.json puts the tensor into "
        "model-00001-of-00002.safetensors, which does not have it. "
        "Index and shards are of different versions: download both again."
    )


def test_unknown_tensor(folder: Path) -> None:
    sharded(folder)
    assert refusal(lambda: TensorFiles.open(folder).info("aa")) == "m: no tensor 'aa'. Did you mean 'a'?"


def test_a_near_name_among_very_many_is_found_at_once(folder: Path) -> None:
    names = [f"l.{layer}.e.{e}.{z}_proj.weight" for layer in range(61) for e in range(256) for z in ("gate", "up", "down")]
    sharded(folder, dict.fromkeys([*names, "l.7.kv_b_proj.weight"], "model-00001-of-00002.safetensors"))
    files, start = TensorFiles.open(folder), time.perf_counter()
    for wanted, near in {
        "l.9.e.7.gat_proj.weight": "l.9.e.7.gate_proj.weight",
        "l.7.kvb_proj.weight": "l.7.kv_b_proj.weight",
    }.items():
        assert f"Did you mean '{near}'?" in refusal(lambda wanted=wanted: files.info(wanted))
    assert len(refusal(lambda: files.info("zzzzzzzzzzzz"))) < 200  # no list of all that there is
    assert time.perf_counter() - start < 5


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", "header too small; got 0 bytes"),
        (b"\x10\x00\x00\x00\x00\x00\x00\x00garbage in header!", "invalid"),
        (b"\xff" * 64, "header too large; got 64 bytes"),
    ],
)
def test_garbage(folder: Path, data: bytes, reason: str) -> None:
    (folder / "model.safetensors").write_bytes(data)
    message = refusal(lambda: TensorFiles.open(folder))
    assert message.startswith("m/model.safetensors: not a readable safetensors file: Error while deserializing header: ")
    assert reason in message
    assert message.endswith(". Truncated or overwritten? Download it again.")


def test_truncated_file(folder: Path) -> None:
    file = folder / "model.safetensors"
    save_file({"a": torch.zeros(100)}, file)
    file.write_bytes(file.read_bytes()[:-8])
    size = file.stat().st_size
    message = refusal(lambda: TensorFiles.open(folder))
    assert message.startswith("m/model.safetensors: not a readable safetensors file: ")
    assert message.endswith(f"; got {size} bytes. Truncated or overwritten? Download it again.")


WEIGHT_MAP = "weight_map: not a readable shard index; expected an object of the file of each tensor; got "


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("{", "not a readable shard index: JSONDecodeError: Expecting property name"),
        ("", "not a readable shard index: JSONDecodeError: Expecting value"),
        ("[" * 100_000, "not a readable shard index: RecursionError"),
        ("{}", f"{WEIGHT_MAP}none"),
        ('{"weight_map": null}', f"{WEIGHT_MAP}none"),
        ('{"weight_map": 3}', f"{WEIGHT_MAP}int"),
        ('{"weight_map": ["a"]}', f"{WEIGHT_MAP}list"),
        ("[]", f"{WEIGHT_MAP}none"),
    ],
    ids=["cut off", "empty", "nested", "nothing", "null", "number", "list", "no object"],
)
def test_unreadable_index(folder: Path, text: str, told: str) -> None:
    (folder / "model.safetensors.index.json").write_text(text)
    message = refusal(lambda: TensorFiles.open(folder))
    assert message.startswith(f"m/model.safetensors.index.json: {told}")
    assert message.endswith("Download it again.")


def test_pickled_data_is_mapped_and_only_needed_shards_are_opened(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.save({"big": torch.zeros(16_000_000), "view": torch.zeros(4, 6)[:, ::2]}, folder / "one.bin")
    torch.save({"b": torch.ones(3, dtype=torch.float8_e4m3fn)}, folder / "two.bin")
    weight_map = {"big": "one.bin", "view": "one.bin", "b": "two.bin", "c": "three.bin"}
    (folder / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": weight_map}))
    opened = []
    real = files_module.read_pickle
    monkeypatch.setattr(files_module, "read_pickle", lambda file: opened.append(file.name) or real(file))

    def resident() -> int:
        return next(
            int(line.split()[1]) for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmRSS")
        )

    files = TensorFiles.open(folder)
    before = resident()
    loaded = files.load(["big", "view"])
    assert resident() - before < 16_000, "kB: reading 64 MB would show"
    assert loaded["view"].is_contiguous()
    assert opened == ["one.bin"]
    assert str(files.info("b")) == "F8_E4M3[3]"
    assert opened == ["one.bin", "two.bin"]


def test_known_names_win_over_others(folder: Path) -> None:
    torch.save({"a": torch.zeros(2)}, folder / "pytorch_model.bin")
    save_file({"stray": torch.zeros(2)}, folder / "cases.safetensors")
    assert list(TensorFiles.open(folder)) == ["a"]
    save_file({"b": torch.zeros(2)}, folder / "model.safetensors")
    assert list(TensorFiles.open(folder)) == ["b"]


@pytest.mark.parametrize(
    ("name", "how"), [("model.safetensors", {}), ("pytorch_model.bin", {}), ("pytorch_model.bin", {"old": True})]
)
def test_bytes_at_random_are_read_or_refused(folder: Path, name: str, how: dict) -> None:
    """Nothing but a CheckpointError comes of a damaged file, and none of its messages advises to read it unprotected."""
    tensors = {f"a.{index}.weight": torch.randn(3, 4) for index in range(4)}
    if name == "model.safetensors":
        save_file(tensors, folder / name)
    else:
        torch.save(tensors, folder / name, _use_new_zipfile_serialization=not how)
    whole, random = (folder / name).read_bytes(), Random(5)
    safe = refused = 0
    for _ in range(100):
        data = bytearray(whole)
        for _ in range(random.randint(1, 4)):
            data[random.randrange(min(600, len(data)))] = random.randrange(256)
        (folder / name).write_bytes(data[: random.randrange(len(data))] if random.random() < 0.2 else data)
        try:
            files = TensorFiles.open(folder)
            files.load(list(files))
        except CheckpointError as problem:
            safe += "weights_only" not in str(problem)
            refused += 1
            continue
        safe += 1
    assert safe == 100
    assert refused > 50, "nothing was damaged"
