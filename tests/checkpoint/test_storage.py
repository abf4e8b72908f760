"""Quantised weights in circuits: their text, their tensors, their bytes, and what the interpreter makes of them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from circuitgraph.artifact.manifest import WeightSpec
from circuitgraph.checkpoint import TensorFiles
from circuitgraph.checkpoint.packed import Packed, dequantised
from circuitgraph.checkpoint.provide import made_up, read_weights
from circuitgraph.checkpoint.random_weights import random_packed, random_weight, seeded
from circuitgraph.circuit.check import check
from circuitgraph.circuit.ir import Storage, Weight
from circuitgraph.circuit.text import circuit_from_json, circuit_to_json, format_circuit
from circuitgraph.circuit.types import TensorType
from circuitgraph.errors import CheckpointError, CircuitError, ProgramError
from circuitgraph.interpreter import interpret
from circuitgraph.language import parse_circuit
from circuitgraph.lower import argument_values
from circuitgraph.pipeline import Run, plan_piece
from circuitgraph.plan.fuse import fuse
from circuitgraph.plan.ir import Plan
from tests.circuits import random_cache, random_inputs, random_weights, small_mtp

KINDS = {
    "fp8 per tensor": Storage("fp8", (0, 0)),
    "fp8 per row": Storage("fp8", (1, 0)),
    "fp8 128x128": Storage("fp8", (128, 128)),
    "int8 per row": Storage("int8", (1, 0)),
    "nvfp4": Storage("nvfp4", (1, 16), True),
    "mxfp4": Storage("mxfp4", (1, 32)),
}


@pytest.mark.parametrize(("text", "storage"), KINDS.items())
def test_text(text: str, storage: Storage) -> None:
    assert str(storage) == text
    assert Storage.parse(text) == storage
    assert Storage.from_json(storage.to_json()) == storage


@pytest.mark.parametrize(
    "text", ["", "fp8", "fp8 128", "fp8 128x", "int4 per row", "nvfp4 per row", "fp8 per row ", "mxfp4 1x32"]
)
def test_other_texts_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="no storage"):
        Storage.parse(text)


@pytest.mark.parametrize(
    "wrong", [("fp4", (1, 16), True), ("nvfp4", (1, 16), False), ("mxfp4", (1, 16), False), ("fp8", (-1, 0), False)]
)
def test_other_storages_are_refused(wrong: tuple) -> None:
    with pytest.raises(ValueError, match="no storage"):
        Storage(*wrong)


def shapes(storage: Storage, *shape: int) -> list[str]:
    return [str(value.type) for value in Weight("w", TensorType("bf16", shape), storage).tensors()]


def test_tensors() -> None:
    assert shapes(KINDS["fp8 per tensor"], 200, 300) == ["u8[200, 300]", "f32[1, 1]"]
    assert shapes(KINDS["fp8 per row"], 7, 200, 300) == ["u8[7, 200, 300]", "f32[7, 200, 1]"]
    assert shapes(KINDS["fp8 128x128"], 200, 300) == ["u8[200, 300]", "f32[2, 3]"]
    assert shapes(KINDS["nvfp4"], 200, 320) == ["u8[200, 160]", "u8[200, 20]", "f32[1]"]
    assert shapes(KINDS["nvfp4"], 7, 200, 320) == ["u8[7, 200, 160]", "u8[7, 200, 20]", "f32[7]"]
    assert shapes(KINDS["mxfp4"], 200, 320) == ["u8[200, 160]", "u8[200, 10]"]
    names = [value.name for value in Weight("a.w", TensorType("bf16", (4, 32)), KINDS["nvfp4"]).tensors()]
    assert names == ["a.w", "a.w.scales", "a.w.whole"]


PACKED = {"lm_head": KINDS["fp8 per row"], "o": KINDS["nvfp4"], "fc": KINDS["mxfp4"], "down": KINDS["fp8 128x128"]}


def packed_circuit():
    circuit = small_mtp()
    names = {weight.name for weight in circuit.weights}
    return circuit.with_storage({next(n for n in names if n.rpartition(".")[2].startswith(k)): s for k, s in PACKED.items()})


def test_circuits_keep_it_as_text_and_json() -> None:
    circuit = packed_circuit()
    assert len(circuit.storage) == len(PACKED)
    assert parse_circuit(format_circuit(circuit)) == circuit
    assert circuit_from_json(circuit_to_json(circuit)) == circuit
    assert format_circuit(circuit) != format_circuit(small_mtp())
    assert '"storage"' not in str(circuit_to_json(small_mtp()))
    check(circuit)


def test_a_storage_that_does_not_fit_is_refused() -> None:
    text = format_circuit(packed_circuit())
    with pytest.raises(ProgramError, match="no storage fp9 with a scale"):
        parse_circuit(text.replace("fp8 per row", "fp9 per row"))
    norm = next(weight for weight in small_mtp().weights if weight.type.rank == 1)
    with pytest.raises(CircuitError, match=f"weight '{norm.name}': fp8 per row holds float matrices"):
        check(small_mtp().with_storage({norm.name: KINDS["fp8 per row"]}))


def test_arguments_and_bytes() -> None:
    circuit = packed_circuit()
    plan = fuse_of(circuit)
    arguments = {value.name: value.type for role, value in argument_values(plan) if role == "weight"}
    expected = [value for weight in plan.circuit.weights for value in weight.tensors()]
    assert list(arguments) == [value.name for value in expected]
    assert arguments["lm_head"] == TensorType("u8", (131, 48))
    assert arguments["lm_head.scales"] == TensorType("f32", (131, 1))
    assert circuit.stored_bytes("lm_head") == 131 * 48 + 131 * 4

    def read(form) -> int:
        plan = fuse_of(form)
        group = next(group for group in plan.groups if "lm_head" in group.inputs)
        return plan.cost(group, 0).bytes

    plain = small_mtp()
    width = {"bf16": 2, "f32": 4}[plain.types["lm_head"].dtype]  # type: ignore[union-attr]
    assert read(plain) - read(circuit) == 131 * 48 * width - circuit.stored_bytes("lm_head")


def fuse_of(circuit) -> Plan:
    from circuitgraph.circuit.narrow import slice_entry, specialize

    return fuse(specialize(slice_entry(circuit, "draft"), 2), "draft", 2, "cpu")


@pytest.mark.parametrize("storage", KINDS.values(), ids=KINDS)
@pytest.mark.parametrize("shape", [(40, 96), (3, 130, 160)])
def test_random_ones_are_numbers_of_the_size_of_plain_ones(storage: Storage, shape: tuple[int, ...]) -> None:
    weight = Weight("w", TensorType("f32", shape), storage)
    circuit = small_mtp()
    tensors = dict(zip([v.name for v in weight.tensors()], random_packed(weight, seeded(weight, 0)), strict=True))
    for value in weight.tensors():
        assert tuple(tensors[value.name].shape) == value.type.shape  # type: ignore[union-attr]
        assert tensors[value.name].dtype == {"u8": torch.uint8, "f32": torch.float32}[value.type.dtype]  # type: ignore[union-attr]
    plain = random_weight(circuit, weight, seeded(weight, 0))
    (made,) = dequantised(type(circuit)(**{**vars_of(circuit), "weights": (weight,)}), tensors).values()
    assert made.isfinite().all()
    assert 0.5 < made.square().mean().sqrt() / plain.square().mean().sqrt() < 2
    assert made.unique().numel() > 12


def vars_of(circuit) -> dict:
    import dataclasses

    return {field.name: getattr(circuit, field.name) for field in dataclasses.fields(circuit)}


def test_the_interpreter_takes_either_form() -> None:
    """The tensors that programs read, or the numbers that they mean: the same results, and others with another scale."""
    circuit, generator = packed_circuit(), torch.Generator().manual_seed(0)
    weights = random_weights(circuit, generator)
    for weight in circuit.weights:
        if weight.storage:
            made = random_packed(weight, generator)
            weights.update((value.name, tensor) for value, tensor in zip(weight.tensors(), made, strict=True))
    inputs, cache = random_inputs(circuit, 2, generator), random_cache(circuit, [3, 5], generator)
    run = lambda given: interpret(circuit, inputs=inputs, weights=given, states={"kv": cache}, entry="logits")["logits"]  # noqa: E731
    numbers = dequantised(circuit, weights)
    assert set(numbers) == {weight.name for weight in circuit.weights} | {"rope.cos", "rope.sin"}
    assert torch.equal(run(weights), run(numbers))
    for name in [name for name in weights if name.endswith((".scales", ".whole"))]:
        wrong = {**weights, name: weights[name] + 1 if weights[name].dtype == torch.uint8 else weights[name] * 2}
        assert (run(wrong) - run(weights)).abs().max() > 1e-3, name


# -- files to tensors ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stack", [(), (3,)])
@pytest.mark.parametrize("scales", ["f32", "bf16", "e8m0"])
def test_every_spelling_of_fp8_scales(tmp_path: Path, stack: tuple[int, ...], scales: str) -> None:
    """The tensors that programs read mean what `dequantise` makes of the file's."""
    generator = torch.Generator().manual_seed(1)
    dtype = {"f32": torch.float32, "bf16": torch.bfloat16, "e8m0": torch.float8_e8m0fnu}[scales]
    for block in ((0, 0), (1, 0), (128, 128)):
        packed = Packed("fp8", "w_scale", block)
        shape = (*stack, 140, 130)
        weight = Weight("w", TensorType("f32", shape), packed.storage)
        values, _ = random_packed(weight, generator)
        for scale_shape in packed.scale_shapes(shape):
            factors = torch.exp2(torch.randint(-3, 3, scale_shape, generator=generator).float()).to(dtype)
            save_file({"w": values.view(torch.float8_e4m3fn), "w_scale": factors}, tmp_path / "model.safetensors")
            files = TensorFiles.open(tmp_path)
            spec = WeightSpec("f32", shape, "w", "drafter", "", packed)
            (plain,) = read_weights(files, {"w": spec}).values()
            kept = read_weights(files, {"w": WeightSpec("f32", shape, "w", "drafter", "", packed, packed.storage)})
            check_tensors(weight, kept)
            assert torch.equal(kept["w"], values)
            assert torch.equal(numbers_of(weight, kept), plain)


@pytest.mark.parametrize("divides", [False, True])
@pytest.mark.parametrize("stack", [(), (3,)])
def test_nvfp4_and_its_two_ways_to_say_the_whole_scale(tmp_path: Path, stack: tuple[int, ...], divides: bool) -> None:
    packed, shape = Packed("nvfp4", "s", (1, 16), "g", divides), (*stack, 24, 64)
    weight = Weight("w", TensorType("f32", shape), packed.storage)
    values, scales, _ = random_packed(weight, torch.Generator().manual_seed(1))
    whole = torch.full(stack or (1,), 3.0)
    save_file({"w": values, "s": scales.view(torch.float8_e4m3fn), "g": whole}, tmp_path / "model.safetensors")
    spec = WeightSpec("f32", shape, "w", "drafter", "", packed)
    files = TensorFiles.open(tmp_path)
    (plain,) = read_weights(files, {"w": spec}).values()
    kept = read_weights(files, {"w": WeightSpec("f32", shape, "w", "drafter", "", packed, packed.storage)})
    check_tensors(weight, kept)
    assert torch.allclose(kept["w.whole"], 1 / whole if divides else whole)
    torch.testing.assert_close(numbers_of(weight, kept), plain, rtol=1e-6, atol=0)
    save_file({"w": values, "s": scales.view(torch.float8_e4m3fn), "g": whole * 0}, tmp_path / "model.safetensors")
    if divides:
        with pytest.raises(CheckpointError, match="g: scales must be finite"):
            read_weights(TensorFiles.open(tmp_path), {"w": spec})


def test_mxfp4_in_blocks_of_their_own(tmp_path: Path) -> None:
    packed, shape = Packed("mxfp4", "s", (1, 32)), (2, 8, 96)
    weight = Weight("w", TensorType("f32", shape), packed.storage)
    values, scales = random_packed(weight, torch.Generator().manual_seed(1))
    save_file({"w": values.reshape(2, 8, 3, 16), "s": scales}, tmp_path / "model.safetensors")
    spec = WeightSpec("f32", shape, "w", "drafter", "", packed, packed.storage)
    kept = read_weights(TensorFiles.open(tmp_path), {"w": spec})
    check_tensors(weight, kept)
    assert torch.equal(kept["w"], values)
    assert torch.equal(kept["w.scales"], scales)


def test_made_up_ones_do_not_depend_on_their_neighbours() -> None:
    circuit = packed_circuit()
    specs = {
        weight.name: WeightSpec(weight.type.dtype, weight.type.shape, weight.name, "random", "", None, weight.storage)  # type: ignore[arg-type]
        for weight in circuit.weights
    }
    whole = made_up(circuit, specs, 0, "cpu")
    assert set(whole) == {value.name for weight in circuit.weights for value in weight.tensors()}
    alone = made_up(circuit, {"lm_head": specs["lm_head"]}, 0, "cpu")
    assert all(torch.equal(whole[name], tensor) for name, tensor in alone.items())
    other = made_up(circuit, {"lm_head": specs["lm_head"]}, 1, "cpu")
    assert not torch.equal(other["lm_head"], alone["lm_head"])


def check_tensors(weight: Weight, tensors: dict[str, torch.Tensor]) -> None:
    assert list(tensors) == [value.name for value in weight.tensors()]
    for value in weight.tensors():
        tensor = tensors[value.name]
        assert tensor.is_contiguous()
        assert (tensor.dtype, tuple(tensor.shape)) == (
            {"u8": torch.uint8, "f32": torch.float32}[value.type.dtype],  # type: ignore[union-attr]
            value.type.shape,  # type: ignore[union-attr]
        )


def numbers_of(weight: Weight, tensors: dict[str, torch.Tensor]) -> torch.Tensor:
    circuit = small_mtp()
    return dequantised(type(circuit)(**{**vars_of(circuit), "weights": (weight,)}), tensors)[weight.name]


@pytest.mark.parametrize(
    ("target", "told"),
    [
        ("cpu", "skinny projections: reads plain weights beside its matrices, got 'embed_tokens' in fp8 per row"),
        ("cuda:sm_90a", "streamed projections: reads quantised weights of products alone, got 'embed_tokens' in fp8 per row"),
    ],
)
def test_kernels_that_do_not_read_them_refuse_with_a_reason(target: str, told: str) -> None:
    """An embedding is read by no kernel in quantised form."""
    from circuitgraph.errors import ScheduleError
    from circuitgraph.plan.schedule import load_schedule

    circuit = small_mtp().with_storage({"embed_tokens": KINDS["fp8 per row"]})
    with pytest.raises(ScheduleError, match=told):
        plan_piece(Run(), circuit, "draft", 2, target, load_schedule(target.partition(":")[0]))
