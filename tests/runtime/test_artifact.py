"""Artifacts on disk: whole or absent, verified before anything is loaded, bound to the right model."""

from __future__ import annotations

import errno
import json
import random
import zipfile
from dataclasses import replace

import pytest
import torch

from circuitgraph.artifact import (
    MANIFEST,
    Build,
    Manifest,
    Target,
    config_digest,
    machine_features,
    pack_zip,
    read_artifact,
    write_artifact,
)
from circuitgraph.artifact import store as store_module
from circuitgraph.checkpoint.packed import Packed
from circuitgraph.errors import ArtifactError, CheckpointError, RuntimeUseError
from circuitgraph.runtime import bind_weights, load, open_library
from tests.runtime.helpers import POSITIONS, drafter, manifest_of

FILES = {"lib/kernels.so": b"not really a library" * 50, "plans/draft_1.txt": b"plan"}


@pytest.fixture
def manifest():
    return manifest_of(drafter().circuit)


@pytest.fixture
def artifact(manifest, tmp_path):
    return write_artifact(tmp_path / "head", manifest, FILES)


def edit(folder, change):
    data = json.loads((folder / MANIFEST).read_text())
    change(data)
    (folder / MANIFEST).write_text(json.dumps(data))


def test_what_is_written_reads_back(artifact, manifest, tmp_path):
    again = read_artifact(tmp_path / "head")
    assert again.manifest == artifact.manifest
    assert again.manifest == replace(manifest, files=again.manifest.files)
    assert set(again.manifest.files) == set(FILES)
    assert again.library.read_bytes() == FILES["lib/kernels.so"]
    assert again.manifest.widths("draft") == (1, 2, 4)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["head"]


def test_files_can_be_copied_from_disk(manifest, tmp_path):
    (tmp_path / "built.so").write_bytes(b"library")
    artifact = write_artifact(tmp_path / "head", manifest, {"lib/kernels.so": tmp_path / "built.so"})
    assert artifact.library.read_bytes() == b"library"


def test_an_existing_folder_is_kept(artifact, manifest, tmp_path):
    with pytest.raises(ArtifactError, match="head: exists already"):
        write_artifact(tmp_path / "head", manifest, {"lib/kernels.so": b"new"})
    assert read_artifact(tmp_path / "head").library.read_bytes() == FILES["lib/kernels.so"]
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("years of work")
    with pytest.raises(ArtifactError, match=r"exists and is not a folder with a manifest.json"):
        write_artifact(tmp_path / "mine", manifest, FILES, overwrite=True)
    assert (tmp_path / "mine" / "thesis.txt").exists()
    write_artifact(tmp_path / "head", manifest, {"lib/kernels.so": b"new"}, overwrite=True)
    assert read_artifact(tmp_path / "head").library.read_bytes() == b"new"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["head", "mine"]


@pytest.mark.parametrize("when", ["first file", "manifest", "rename"])
@pytest.mark.parametrize("overwrite", [False, True])
def test_a_full_disk_leaves_no_half_artifact(manifest, tmp_path, monkeypatch, when, overwrite):
    folder = tmp_path / "head"
    if overwrite:
        write_artifact(folder, manifest, FILES)

    def full(*args):
        raise OSError(errno.ENOSPC, "No space left on device")

    flush = store_module._flush

    def flush_some(path):
        return full() if (path.name == MANIFEST) == (when == "manifest") else flush(path)

    if when == "rename":
        monkeypatch.setattr(store_module, "_move_into_place", full)
    else:
        monkeypatch.setattr(store_module, "_flush", flush_some)
    with pytest.raises(ArtifactError, match=r"could not be written: .*No space left"):
        write_artifact(folder, manifest, {**FILES, "lib/kernels.so": b"new"}, overwrite=overwrite)
    assert sorted(p.name for p in tmp_path.iterdir()) == (["head"] if overwrite else [])
    if overwrite:
        assert read_artifact(folder).library.read_bytes() == FILES["lib/kernels.so"]


def test_an_interrupt_leaves_nothing(manifest, tmp_path, monkeypatch):
    def interrupt(*args):
        raise KeyboardInterrupt

    monkeypatch.setattr(store_module, "_move_into_place", interrupt)
    with pytest.raises(KeyboardInterrupt):
        write_artifact(tmp_path / "head", manifest, FILES)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda d: d.update(format=99), r"manifest.json: format: the artifact has another format version; expected 4; got 99"),
        (lambda d: d.pop("program"), r"program: is absent; expected str"),
        (lambda d: d.update(library=7), r"library: has the wrong type; expected str; got int"),
        (lambda d: d.update(extra=1), r"extra: has unknown keys"),
        (lambda d: d["target"].update(kind=[]), r"target.kind: has the wrong type"),
        (lambda d: d["weights"]["fc"].update(source="guess"), r"weights.fc.source: has an unknown value; .*; got 'guess'"),
        (lambda d: d["functions"]["draft_2"]["args"][0].pop("role"), r"functions.draft_2.args.0.role: is absent"),
        (lambda d: d["functions"]["draft_2"].update(rows=1), r"functions.draft_2: serves the same entry and rows as 'draft_1'"),
        (lambda d: d["functions"]["draft_2"]["cost"].update(flops="many"), r"functions.draft_2.cost.flops: has the wrong type"),
        (lambda d: d["weights"].pop("fc"), r"is a weight that 'weights' does not list"),
        (lambda d: d.update(library="lib/other.so"), r"library: 'lib/other.so' is not among the files"),
        (lambda d: d["files"].update({"../../etc/passwd": "0"}), r"is not a relative file name"),
        (lambda d: d["circuit"].pop("nodes"), r"circuit: is not a circuit"),
        (lambda d: d["entries"].update(draft=[1]), r"entries: has unknown keys, or disagrees"),
        (lambda d: d["circuit"].update(dtypes=None), r"circuit: is not a circuit"),
        (lambda d: d["circuit"]["nodes"][0].update(op="softmax"), r"digest: is of another manifest"),
        (lambda d: d["circuit"]["weights"][0]["type"].update(shape=[1]), r"digest: is of another manifest"),
        (lambda d: d.update(max_position=7), r"digest: is of another manifest"),
        (lambda d: d.pop("digest"), r"digest: is absent"),
    ],
)
def test_a_manifest_that_does_not_hold_is_refused(artifact, tmp_path, change, message):
    edit(tmp_path / "head", change)
    with pytest.raises(ArtifactError, match=message):
        read_artifact(tmp_path / "head")


def test_not_an_artifact(tmp_path):
    with pytest.raises(ArtifactError, match="nowhere: does not exist"):
        read_artifact(tmp_path / "nowhere")
    with pytest.raises(ArtifactError, match=r"has no manifest.json"):
        read_artifact(tmp_path)
    (tmp_path / MANIFEST).write_text("{")
    with pytest.raises(ArtifactError, match="is not JSON"):
        read_artifact(tmp_path)
    (tmp_path / MANIFEST).write_text("[]")
    with pytest.raises(ArtifactError, match="must be an object; got list"):
        read_artifact(tmp_path)


def test_another_machine_is_refused_but_can_be_looked_at(manifest, tmp_path):
    for name, target, message in (
        ("features", replace(manifest.target, mcpu="zen9", features=("avx", "avx9000")), "'zen9', and this CPU lacks avx9000"),
        ("arch", replace(manifest.target, arch="s390x"), "target.arch: was compiled for another architecture; .*; got s390x"),
        ("kind", Target("cuda", "sm_90a", ""), "was compiled for 'cuda'"),
    ):
        write_artifact(tmp_path / name, replace(manifest, target=target), FILES)
        with pytest.raises(ArtifactError, match=message):
            read_artifact(tmp_path / name)
        assert read_artifact(tmp_path / name, to_run=False).manifest.target == target


def test_code_for_several_processors(manifest, tmp_path):
    """The manifest keeps all of it, and any can be put in front."""
    other = replace(manifest.functions["draft_1"], workspace_bytes=64)
    build = Build(Target("cuda", "x86_64", "sm_80"), "lib/kernels.so", {**manifest.functions, "draft_1": other})
    both = replace(manifest, others={"sm_80": build})
    write_artifact(tmp_path / "head", both, FILES)
    again = read_artifact(tmp_path / "head", to_run=False).manifest
    assert list(again.builds) == ["generic", "sm_80"]
    assert again.builds["sm_80"] == build
    assert again.of("sm_80").functions["draft_1"].workspace_bytes == 64
    assert again.of("sm_80").of("generic") == again
    for others, message in (
        ({"sm_90": build}, "others.sm_90.target.mcpu: is the processor of other code, too; expected sm_90; got sm_80"),
        ({"sm_80": replace(build, library="lib/x.so")}, "others.sm_80.library: 'lib/x.so' is not among the files"),
    ):
        write_artifact(tmp_path / "bad", replace(both, others=others), FILES, overwrite=True)
        with pytest.raises(ArtifactError, match=message):
            read_artifact(tmp_path / "bad", to_run=False)


def test_llvm_feature_names_match_this_machines(monkeypatch):
    monkeypatch.setattr(store_module.Path, "read_text", lambda self: "processor : 0\nflags\t\t: fpu sse4_2 avx2 f16c\n")
    assert {"sse4.2", "avx2", "f16c"} <= machine_features()


def test_corrupted_and_missing_files_are_refused_before_loading(artifact, tmp_path, monkeypatch):
    library = tmp_path / "head" / "lib" / "kernels.so"
    library.write_bytes(library.read_bytes()[:-1])
    monkeypatch.setattr("circuitgraph.runtime.compiled.tvm_ffi.load_module", lambda path: pytest.fail("dlopen'd unverified"))
    with pytest.raises(ArtifactError, match=r"lib/kernels.so: has another digest"):
        load(tmp_path / "head", weights=drafter().weights)
    library.unlink()
    with pytest.raises(ArtifactError, match=r"lib/kernels.so: is missing"):
        load(tmp_path / "head", weights=drafter().weights)


def test_a_library_that_is_none_does_not_load(artifact):
    with pytest.raises(ArtifactError, match=r"kernels.so: does not load"):
        open_library(artifact)


def test_zip(artifact, tmp_path):
    pack_zip(tmp_path / "head", tmp_path / "one.zip")
    pack_zip(tmp_path / "head", tmp_path / "two.zip")
    assert (tmp_path / "one.zip").read_bytes() == (tmp_path / "two.zip").read_bytes()
    packed = read_artifact(tmp_path / "one.zip")
    assert packed.manifest == artifact.manifest
    assert packed.library.read_bytes() == FILES["lib/kernels.so"]
    with pytest.raises(ArtifactError, match="exists already"):
        pack_zip(tmp_path / "head", tmp_path / "one.zip")
    with zipfile.ZipFile(tmp_path / "one.zip") as archive, zipfile.ZipFile(tmp_path / "bad.zip", "w") as bad:
        for name in archive.namelist():
            bad.writestr(name, b"other" if name.endswith(".so") else archive.read(name))
    with pytest.raises(ArtifactError, match=r"bad.zip: lib/kernels.so: has another digest"):
        read_artifact(tmp_path / "bad.zip")
    (tmp_path / "cut.zip").write_bytes((tmp_path / "one.zip").read_bytes()[:-30])
    with pytest.raises(ArtifactError, match="is not a readable artifact zip"):
        read_artifact(tmp_path / "cut.zip")


def test_damaged_bytes_never_surprise(artifact, tmp_path):
    """Any damage to a zip or a manifest: an ArtifactError, or the same artifact."""
    pack_zip(tmp_path / "head", tmp_path / "head.zip")
    rng = random.Random(0)
    manifest = (tmp_path / "head" / MANIFEST).read_bytes()
    (tmp_path / "copy").mkdir()
    (tmp_path / "copy" / "lib").mkdir()
    (tmp_path / "copy" / "plans").mkdir()
    for name, content in FILES.items():
        (tmp_path / "copy" / name).write_bytes(content)
    refused = 0
    for file, whole, opened in (
        (tmp_path / "bad.zip", (tmp_path / "head.zip").read_bytes(), tmp_path / "bad.zip"),
        (tmp_path / "copy" / MANIFEST, manifest, tmp_path / "copy"),
    ):
        places = [*range(80), *range(len(whole) - 400, len(whole))]  # a zip's headers, beside anywhere
        for turn in range(120):
            damaged = bytearray(whole)
            for _ in range(rng.choice((1, 1, 3))):
                damaged[rng.choice(places) if turn % 2 else rng.randrange(len(whole))] = rng.randrange(256)
            file.write_bytes(damaged)
            try:
                again = read_artifact(opened)
            except ArtifactError:
                refused += 1
                continue
            assert again.manifest == artifact.manifest
            assert again.library.read_bytes() == FILES["lib/kernels.so"]
    assert refused > 150


def test_edited_values_never_surprise(artifact):
    """Any value of the manifest replaced by another one."""
    rng, text, refused = random.Random(1), artifact.manifest.to_text(), 0
    for _ in range(150):
        place = data = json.loads(text)
        while isinstance(place, dict | list) and place:
            above, key = place, rng.choice(list(place) if isinstance(place, dict) else range(len(place)))
            place = above[key]
            if rng.random() < 0.2:
                break
        above[key] = rng.choice([None, True, -1, 0.5, "x", [], {}, [None], {"x": None}, 10**30])
        try:
            assert Manifest.from_text(json.dumps(data)) == artifact.manifest
        except ArtifactError:
            refused += 1
    assert refused > 120
    with pytest.raises(ArtifactError, match="is not JSON"):
        Manifest.from_text("[" * 100_000)


def test_a_failure_leaves_no_parents(manifest, tmp_path, monkeypatch):
    monkeypatch.setattr(store_module, "_move_into_place", lambda *args: (_ for _ in ()).throw(OSError("full")))
    (tmp_path / "mine").mkdir()
    with pytest.raises(ArtifactError, match="full"):
        write_artifact(tmp_path / "mine" / "a" / "b" / "head", manifest, FILES)
    assert list(tmp_path.rglob("*")) == [tmp_path / "mine"]
    monkeypatch.undo()
    assert write_artifact(tmp_path / "mine" / "a" / "b" / "head", manifest, FILES).library.is_file()


def test_a_zip_that_cannot_be_written_is_not_left(artifact, tmp_path, monkeypatch):
    def full(*args):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(store_module, "_flush", full)
    with pytest.raises(ArtifactError, match="No space left"):
        pack_zip(tmp_path / "head", tmp_path / "one.zip")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["head"]


# -- binding -------------------------------------------------------------------------------------------------------


@pytest.fixture
def checkpoint(manifest, tmp_path):
    """The drafter's folder, and the artifact that was compiled for it."""
    from safetensors.torch import save_file

    folder, config = tmp_path / "checkpoint", {"hidden_size": 48, "transformers_version": "5.0"}
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    save_file({f"model.{name}": drafter().weights[name] for name in manifest.weights}, folder / "model.safetensors")
    model = replace(manifest.model, config_digest=config_digest(config))
    return folder, write_artifact(tmp_path / "bound", replace(manifest, model=model), FILES)


def test_weights_come_memory_mapped_from_the_checkpoint(checkpoint):
    folder, artifact = checkpoint
    weights = bind_weights(artifact, model=folder)
    for name in artifact.manifest.weights:
        assert torch.equal(weights[name], drafter().weights[name])
    assert weights["rope.cos"].shape == (POSITIONS, 4)
    assert bind_weights(artifact, model=folder, max_position=17)["rope.sin"].shape == (17, 4)
    given = torch.ones(131, 48)
    assert bind_weights(artifact, model=folder, weights={"lm_head": given})["lm_head"] is given


def test_another_model_is_refused(checkpoint):
    folder, artifact = checkpoint
    (folder / "config.json").write_text(json.dumps({"hidden_size": 48, "transformers_version": "9.9", "dtype": "bfloat16"}))
    bind_weights(artifact, model=folder)
    (folder / "config.json").write_text(json.dumps({"hidden_size": 64}))
    with pytest.raises(CheckpointError, match=r"config.json: is not the model that the artifact was compiled for \('test'\)"):
        bind_weights(artifact, model=folder)


def test_tensors_that_do_not_fit_name_both_sides(checkpoint):
    from safetensors.torch import load_file, save_file

    folder, artifact = checkpoint
    tensors = load_file(folder / "model.safetensors")
    file = folder / "model.safetensors"
    save_file({**tensors, "model.fc": torch.zeros(48, 95)}, file)
    with pytest.raises(CheckpointError, match=r"model.fc: does not fit; expected f32\[48, 96\] \('fc'\); got f32\[48, 95\]"):
        bind_weights(artifact, model=folder)
    save_file({name: tensor for name, tensor in tensors.items() if name != "model.fc"}, file)
    with pytest.raises(CheckpointError, match=r"no tensor 'model.fc', which 'fc' is bound from"):
        bind_weights(artifact, model=folder)
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(CheckpointError, match=r"not a readable safetensors file"):
        bind_weights(artifact, model=folder)
    file.unlink()
    with pytest.raises(CheckpointError, match="no model weights here"):
        bind_weights(artifact, model=folder)
    with pytest.raises(RuntimeUseError, match=r"fc: nothing provides it. Give model="):
        bind_weights(artifact)


def test_sharded_checkpoints(checkpoint):
    from safetensors.torch import load_file, save_file

    folder, artifact = checkpoint
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    halves = dict(list(tensors.items())[:7]), dict(list(tensors.items())[7:])
    for index, half in enumerate(halves):
        save_file(half, folder / f"part-{index}.safetensors")
    names = {name: f"part-{index}.safetensors" for index, half in enumerate(halves) for name in half}
    index_file = folder / "model.safetensors.index.json"
    index_file.write_text(json.dumps({"weight_map": names}))
    assert torch.equal(bind_weights(artifact, model=folder)["fc"], drafter().weights["fc"])
    wrong = {**names, "model.fc": next(p for p in names.values() if p != names["model.fc"])}
    index_file.write_text(json.dumps({"weight_map": wrong}))
    with pytest.raises(CheckpointError, match=r"model.fc: .* puts the tensor into part-[01].safetensors, which does not have it"):
        bind_weights(artifact, model=folder)
    index_file.write_text(json.dumps({"weight_map": {**names, "model.fc": "part-9.safetensors"}}))
    with pytest.raises(CheckpointError, match=r"shard that is absent: part-9.safetensors"):
        bind_weights(artifact, model=folder)


def test_a_stored_dtype_is_converted_only_where_compiling_said_so(checkpoint, tmp_path):
    folder, artifact = checkpoint
    narrow = {name: replace(spec, dtype="bf16", stored="f32") for name, spec in artifact.manifest.weights.items()}
    converted = write_artifact(tmp_path / "bf16", replace(artifact.manifest, weights=narrow), FILES)
    assert torch.equal(bind_weights(converted, model=folder)["fc"], drafter().weights["fc"].bfloat16())
    silent = {name: replace(spec, stored="") for name, spec in narrow.items()}
    other = write_artifact(tmp_path / "other", replace(artifact.manifest, weights=silent), FILES)
    with pytest.raises(CheckpointError, match=r"model.fc: does not fit; expected bf16\[48, 96\] \('fc'\); got f32\[48, 96\]"):
        bind_weights(other, model=folder)


def test_a_quantised_weight_is_dequantised_as_the_manifest_says(checkpoint, tmp_path):
    from safetensors.torch import load_file, save_file

    folder, artifact = checkpoint
    tensors, file = load_file(folder / "model.safetensors"), folder / "model.safetensors"
    values = tensors["model.fc"].to(torch.float8_e4m3fn)
    fc = replace(artifact.manifest.weights["fc"], packed=Packed("fp8", "model.fc_scale", (1, 0)))
    specs = {**artifact.manifest.weights, "fc": fc}
    quantised = write_artifact(tmp_path / "fp8", replace(artifact.manifest, weights=specs), FILES)
    assert read_artifact(tmp_path / "fp8").manifest.weights["fc"] == fc
    scale = torch.rand(48, 1)
    save_file({**tensors, "model.fc": values, "model.fc_scale": scale}, file)
    assert torch.equal(bind_weights(quantised, model=folder)["fc"], values.float() * scale)
    with pytest.raises(CheckpointError, match=r"model.fc: does not fit; expected f32\[48, 96\] \('fc'\); got F8_E4M3\[48, 96\]"):
        bind_weights(artifact, model=folder)
    save_file({**tensors, "model.fc": values, "model.fc_scale": scale[:47].clone()}, file)
    with pytest.raises(CheckpointError, match=r"model.fc_scale: does not fit as scales of fp8 per channel"):
        bind_weights(quantised, model=folder)
    save_file(tensors, file)
    with pytest.raises(CheckpointError, match=r"model.fc: does not fit as values of fp8 per channel; expected F8_E4M3 "):
        bind_weights(quantised, model=folder)


def test_host_tensors_must_be_given(checkpoint, tmp_path):
    folder, artifact = checkpoint
    specs = dict(artifact.manifest.weights)
    specs["lm_head"] = replace(specs["lm_head"], source="host")
    hosted = write_artifact(tmp_path / "hosted", replace(artifact.manifest, weights=specs), FILES)
    with pytest.raises(RuntimeUseError, match=r"lm_head: nothing provides it. Give target_model= \(--target-model\)"):
        bind_weights(hosted, model=folder)
    head = torch.zeros(131, 48)
    assert bind_weights(hosted, model=folder, weights={"lm_head": head})["lm_head"] is head


@pytest.mark.parametrize("source", ["host", "target"])
def test_the_targets_folder_provides_what_is_borrowed(checkpoint, tmp_path, source):
    from safetensors.torch import save_file

    folder, artifact = checkpoint
    specs, config = dict(artifact.manifest.weights), {"hidden_size": 48, "name": "target"}
    specs["lm_head"] = replace(specs["lm_head"], source=source, tensor="head.weight")
    known = replace(artifact.manifest.model, target_digest=config_digest(config) if source == "target" else "")
    borrowed = write_artifact(tmp_path / "borrowed", replace(artifact.manifest, weights=specs, model=known), FILES)
    target, head = tmp_path / "target", torch.randn(131, 48)
    target.mkdir()
    (target / "config.json").write_text(json.dumps(config))
    save_file({"head.weight": head}, target / "model.safetensors")
    assert torch.equal(bind_weights(borrowed, model=folder, target_model=target)["lm_head"], head)
    with pytest.raises(RuntimeUseError, match=r"lm_head: nothing provides it. Give target_model= \(--target-model\)"):
        bind_weights(borrowed, model=folder)
    save_file({"head.weight": head.bfloat16()}, target / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"head.weight: does not fit; expected f32\[131, 48\]"):
        bind_weights(borrowed, model=folder, target_model=target)
    specs["lm_head"] = replace(specs["lm_head"], stored="bf16")
    converted = write_artifact(tmp_path / "converted", replace(borrowed.manifest, weights=specs), FILES)
    assert bind_weights(converted, model=folder, target_model=target)["lm_head"].dtype == torch.float32
    (target / "config.json").write_text(json.dumps({**config, "name": "another"}))
    if source == "target":
        with pytest.raises(
            CheckpointError, match=r"target/config.json: is not the target that 'test' was compiled with; expected"
        ):
            bind_weights(converted, model=folder, target_model=target)


@pytest.mark.parametrize("rows", [0, -1])
def test_tables_need_a_row(checkpoint, rows):
    folder, artifact = checkpoint
    with pytest.raises(RuntimeUseError, match="max_position: needs room for a token"):
        bind_weights(artifact, model=folder, max_position=rows)


def test_a_device_of_another_kind_is_refused(artifact, tmp_path):
    with pytest.raises(RuntimeUseError, match=r"device: was compiled for 'cpu'; got cuda"):
        load(tmp_path / "head", weights=drafter().weights, device="cuda")


def test_random_weights_are_the_same_for_a_seed(manifest, tmp_path):
    specs = {name: replace(spec, source="random") for name, spec in manifest.weights.items()}
    artifact = write_artifact(tmp_path / "random", replace(manifest, weights=specs), FILES)
    one, two, three = bind_weights(artifact), bind_weights(artifact), bind_weights(artifact, seed=1)
    assert torch.equal(one["fc"], two["fc"])
    assert not torch.equal(one["fc"], three["fc"])


def test_the_manifest_is_stable_text(manifest):
    assert Manifest.from_text(manifest.to_text()).to_text() == manifest.to_text()


def test_overwrite_spares_a_folder_that_is_not_only_an_artifact(tmp_path):
    """A manifest.json of another tool, or a file of one's own beside an artifact's, is no reason to delete a folder."""
    web = tmp_path / "web"
    web.mkdir()
    (web / "manifest.json").write_text('{"name": "app"}')
    with pytest.raises(ArtifactError, match="not an artifact's"):
        store_module.check_output(web, overwrite=True)
    (web / "manifest.json").write_text('{"files": {"lib/k.so": "0"}}')
    store_module.check_output(web, overwrite=True)
    (web / "index.html").write_text("mine")
    with pytest.raises(ArtifactError, match=r"index\.html"):
        store_module.check_output(web, overwrite=True)
    link = tmp_path / "link"
    link.symlink_to(web)
    with pytest.raises(ArtifactError, match="exists"):
        store_module.check_output(link, overwrite=True)


def test_every_key_of_a_manifest_has_to_be_there(artifact, tmp_path):
    """Those, too, that only repeat what the circuit and the functions say."""
    whole = json.loads((tmp_path / "head" / MANIFEST).read_text())
    assert {"switches", "entries"} <= set(whole)
    for key in whole:
        edit(tmp_path / "head", lambda data, key=key: data.pop(key))
        with pytest.raises(ArtifactError, match=rf"manifest.json: {key}: is absent"):
            read_artifact(tmp_path / "head")
        (tmp_path / "head" / MANIFEST).write_text(json.dumps(whole))
    read_artifact(tmp_path / "head")
