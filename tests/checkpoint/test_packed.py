"""Quantised weights: what their bytes mean, against plain formulas and other people's code, and what is refused."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from circuitgraph.artifact.manifest import WeightSpec
from circuitgraph.checkpoint import TensorFiles
from circuitgraph.checkpoint.packed import Packed, dequantise
from circuitgraph.checkpoint.provide import read_weights
from circuitgraph.checkpoint.stored import owners, read_stored
from circuitgraph.errors import CheckpointError
from tests.fixture_cases import FIXTURES

SAMPLES = FIXTURES / "quant_samples"
FP8, U8 = torch.float8_e4m3fn, torch.uint8


def read(folder: Path, name: str, dtype: str = "f32") -> tuple[str, torch.Tensor]:
    """A weight as it is stored, in words, and its values."""
    files = TensorFiles.open(folder)
    stored = read_stored(files, name)
    spec = WeightSpec(dtype, stored.shape, stored.info.name, "drafter", "", stored.packed)
    return str(stored.packed), read_weights(files, {"w": spec})["w"]


# -- other people's files and values -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sample", "kind"),
    [("fp8_block_deepseek", "fp8 block 128x128"), ("nvfp4_modelopt", "nvfp4"), ("nvfp4_compressed_tensors", "nvfp4")],
)
def test_samples(sample: str, kind: str) -> None:
    expected = load_file(SAMPLES / sample / "expected.safetensors")
    names = [name.removesuffix(".expected") for name in expected if name.endswith(".expected")]
    assert len(names) >= 2
    for name in names:
        weight = name if name.endswith(".weight") else f"{name}.weight"
        said, values = read(SAMPLES / sample, weight)
        assert said == kind
        torch.testing.assert_close(values, expected[f"{name}.expected"], atol=1e-5, rtol=0)
        torch.testing.assert_close(values @ expected[f"{name}.x"], expected[f"{name}.y"], atol=1e-4, rtol=0)


def test_what_a_sample_leaves_in_bf16_stays_so() -> None:
    files = TensorFiles.open(SAMPLES / "nvfp4_modelopt")
    assert read_stored(files, "mtp.fc.weight").packed is None
    assert read_stored(files, "model.layers.0.mlp.down_proj.weight").idle == ("model.layers.0.mlp.down_proj.input_scale",)


# -- plain formulas, one number at a time ---------------------------------------------------------------------------


def e4m3(byte: int) -> float:
    sign, exponent, mantissa = byte >> 7, (byte >> 3) & 15, byte & 7
    size = mantissa / 8 * 2.0**-6 if exponent == 0 else (1 + mantissa / 8) * 2.0 ** (exponent - 7)
    return -size if sign else size


def e2m1(bits: int) -> float:
    sign, exponent, mantissa = bits >> 3, (bits >> 1) & 3, bits & 1
    size = mantissa * 0.5 if exponent == 0 else (1 + mantissa / 2) * 2.0 ** (exponent - 1)
    return -size if sign else size


def random_bytes(*shape: int, generator: torch.Generator) -> torch.Tensor:
    """Every pattern but e4m3's two NaNs."""
    values = torch.randint(0, 256, shape, generator=generator, dtype=torch.uint8)
    return torch.where(values & 127 == 127, values - 1, values)


shapes = st.tuples(st.integers(1, 300), st.integers(1, 150))


def fp8_values(rows: int, columns: int, scale_of, values: torch.Tensor) -> torch.Tensor:
    table = torch.tensor([e4m3(byte) for byte in range(256)])
    scale = torch.tensor([[scale_of(row, column) for column in range(columns)] for row in range(rows)])
    return table[values.int()] * scale


@settings(max_examples=25)
@given(shape=shapes, block=st.sampled_from([(0, 0), (1, 0), (128, 128), (64, 32), (1, 128)]), seed=st.integers(0, 99))
def test_fp8(shape: tuple[int, int], block: tuple[int, int], seed: int) -> None:
    generator, (rows, columns) = torch.Generator().manual_seed(seed), shape
    packed = Packed("fp8", "s", block)
    values = random_bytes(rows, columns, generator=generator)
    scales = torch.rand(packed.scale_shapes(shape)[0], generator=generator) + 0.01
    matrix = scales if scales.ndim == 2 else scales.reshape(1, 1)
    expected = fp8_values(
        rows, columns, lambda row, column: matrix[row // (block[0] or rows), column // (block[1] or columns)].item(), values
    )
    for dtype in (torch.float32, torch.bfloat16):
        found = dequantise(packed, shape, values.view(torch.float8_e4m3fn), scales, None, dtype)
        torch.testing.assert_close(found, expected.to(dtype), rtol=0, atol=0)


@settings(max_examples=25)
@given(rows=st.integers(1, 40), blocks=st.integers(1, 6), divides=st.booleans(), seed=st.integers(0, 99))
def test_nvfp4(rows: int, blocks: int, divides: bool, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    packed = Packed("nvfp4", "s", (1, 16), "g", divides)
    values = torch.randint(0, 256, (rows, blocks * 8), generator=generator, dtype=torch.uint8)
    scales = random_bytes(rows, blocks, generator=generator) & 127
    whole = torch.rand(1, generator=generator) + 0.1
    found = dequantise(packed, (rows, blocks * 16), values, scales.view(torch.float8_e4m3fn), whole, torch.float32)
    for row in range(rows):
        for column in range(blocks * 16):
            byte = values[row, column // 2].item()
            scale = e4m3(scales[row, column // 16].item()) * (1 / whole.item() if divides else whole.item())
            assert math.isclose(found[row, column].item(), e2m1(byte >> 4 if column % 2 else byte & 15) * scale, rel_tol=1e-6)


@settings(max_examples=25)
@given(rows=st.integers(1, 40), blocks=st.integers(1, 4), apart=st.booleans(), seed=st.integers(0, 99))
def test_mxfp4(rows: int, blocks: int, apart: bool, seed: int) -> None:
    """`apart`: the 16 bytes of a scale in a dimension of their own, as gpt-oss has them."""
    generator, packed = torch.Generator().manual_seed(seed), Packed("mxfp4", "s", (1, 32))
    shape = (rows, blocks * 32)
    values = torch.randint(0, 256, packed.value_shapes(shape)[apart], generator=generator, dtype=torch.uint8)
    scales = torch.randint(100, 150, (rows, blocks), generator=generator, dtype=torch.uint8)
    found = dequantise(packed, shape, values, scales, None, torch.float32)
    flat = values.reshape(rows, -1)
    for row in range(rows):
        for column in range(blocks * 32):
            byte = flat[row, column // 2].item()
            number = e2m1(byte >> 4 if column % 2 else byte & 15)
            assert found[row, column].item() == number * 2.0 ** (scales[row, column // 32].item() - 127)


@pytest.mark.parametrize("size", [(), (1,), (1, 1)])
@pytest.mark.parametrize("kind", ["fp8", "nvfp4"])
def test_a_scale_an_expert(kind: str, size: tuple[int, ...], tmp_path: Path) -> None:
    """One number for each matrix: written as [], as [1] (compressed-tensors) or as [1, 1]."""
    tensors, expected = {}, []
    for index in range(3):
        name = f"experts.{index}.up_proj.weight"
        whole = torch.full(size, 2.0**index)
        if kind == "fp8":
            tensors[name], tensors[f"{name}_scale"] = torch.ones(4, 32).to(FP8), whole
            expected.append(torch.full((4, 32), 2.0**index))
        else:
            tensors[f"{name}_packed"] = torch.full((4, 16), 0x22, dtype=U8)  # two ones a byte
            tensors[f"{name}_scale"], tensors[f"{name}_global_scale"] = torch.ones(4, 2).to(FP8), whole
            expected.append(torch.full((4, 32), 2.0**-index))
    save_file(tensors, tmp_path / "model.safetensors")
    said, values = read(tmp_path, "experts.{expert}.up_proj.weight")
    assert said == ("fp8 per tensor" if kind == "fp8" else "nvfp4")
    assert torch.equal(values, torch.stack(expected))


def test_a_stack_of_experts() -> None:
    """Every matrix has its own scales; the result is that of one after the other."""
    values = torch.randn(3, 130, 140).to(torch.float8_e4m3fn)
    for block in ((0, 0), (1, 0), (128, 128)):
        packed = Packed("fp8", "s", block)
        scales = torch.rand(packed.scale_shapes((3, 130, 140))[0])
        found = dequantise(packed, (3, 130, 140), values, scales, None, torch.bfloat16)
        for index in range(3):
            assert torch.equal(found[index], dequantise(packed, (130, 140), values[index], scales[index], None, torch.bfloat16))


def test_experts_that_are_stored_one_by_one(tmp_path: Path) -> None:
    tensors = {}
    for index in range(3):
        tensors[f"m.{index}.w.weight"] = torch.randn(130, 140).to(FP8)
        tensors[f"m.{index}.w.weight_scale_inv"] = torch.rand(2, 2)
    save_file(tensors, tmp_path / "model.safetensors")
    said, values = read(tmp_path, "m.{expert}.w.weight")
    assert said == "fp8 block 128x128"
    for index in range(3):
        assert torch.equal(values[index], read(tmp_path, f"m.{index}.w.weight")[1])
    del tensors["m.1.w.weight_scale_inv"]
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(
        CheckpointError, match=r"m.1.w.weight_scale_inv: an expert lacks this tensor; expected one for each of 3 experts"
    ):
        read(tmp_path, "m.{expert}.w.weight")


def test_rows_are_computed_in_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    values, scales = torch.randn(700, 256).to(torch.float8_e4m3fn), torch.rand(6, 2)
    packed = Packed("fp8", "s", (128, 128))
    whole = dequantise(packed, (700, 256), values, scales, None, torch.bfloat16)
    monkeypatch.setattr("circuitgraph.checkpoint.packed._CHUNK", 256 * 300)
    assert torch.equal(dequantise(packed, (700, 256), values, scales, None, torch.bfloat16), whole)


def test_json_round_trip() -> None:
    for packed in (Packed("fp8", "s", (128, 128)), Packed("nvfp4", "s", (1, 16), "g", True)):
        assert Packed.from_json(json.loads(json.dumps(packed.to_json()))) == packed


# -- what a file may say ---------------------------------------------------------------------------------------------


W = "m.w.weight"
ones = torch.ones
LEGAL = {
    "fp8 block": ({W: ones(130, 260).to(FP8), f"{W}_scale_inv": ones(2, 3)}, "fp8 block 128x128"),
    "fp8 block in bf16": ({W: ones(130, 8).to(FP8), f"{W}_scale_inv": ones(2, 1).bfloat16()}, "fp8 block 128x128"),
    "fp8 block, powers of two": (
        {W: ones(130, 8).to(FP8), f"{W}_scale_inv": ones(2, 1).to(torch.float8_e8m0fnu)},
        "fp8 block 128x128",
    ),
    "compressed-tensors' fp8 block": ({W: ones(130, 260).to(FP8), f"{W}_scale": ones(2, 3)}, "fp8 block 128x128"),
    "fp8 tensor, scalar": ({W: ones(130, 8).to(FP8), f"{W}_scale": ones(())}, "fp8 per tensor"),
    "fp8 tensor, one": ({W: ones(130, 8).to(FP8), f"{W}_scale": ones(1), "m.w.input_scale": ones(1)}, "fp8 per tensor"),
    "Mistral's fp8": ({W: ones(130, 8).to(FP8), f"{W}_scale_inv": ones(()), "m.w.activation_scale": ones(())}, "fp8 per tensor"),
    "fp8 channel": ({W: ones(130, 8).to(FP8), f"{W}_scale": ones(130)}, "fp8 per channel"),
    "fp8 channel, a column": ({W: ones(130, 8).to(FP8), f"{W}_scale": ones(130, 1)}, "fp8 per channel"),
    "no rows": ({W: ones(0, 8).to(FP8), f"{W}_scale_inv": ones(0, 1)}, "fp8 per channel"),
    "modelopt's nvfp4": (
        {W: torch.zeros(6, 8, dtype=U8), f"{W}_scale": ones(6, 1).to(FP8), f"{W}_scale_2": ones(())},
        "nvfp4",
    ),
    "compressed-tensors' nvfp4": (
        {f"{W}_packed": torch.zeros(6, 8, dtype=U8), f"{W}_scale": ones(6, 1).to(FP8), f"{W}_global_scale": ones(1)},
        "nvfp4",
    ),
    "mxfp4": ({W: torch.zeros(6, 16, dtype=U8), f"{W}_scale": torch.zeros(6, 1, dtype=U8)}, "mxfp4"),
    "compressed-tensors' mxfp4": (
        {f"{W}_packed": torch.zeros(6, 16, dtype=U8), f"{W}_scale": ones(6, 1).to(torch.float8_e8m0fnu)},
        "mxfp4",
    ),
    "gpt-oss": (
        {f"{W}_blocks": torch.zeros(2, 6, 3, 16, dtype=U8), f"{W}_scales": torch.zeros(2, 6, 3, dtype=U8)},
        "mxfp4",
    ),
    "fused experts": ({W: ones(3, 130, 8).to(FP8), f"{W}_scale_inv": ones(3, 2, 1)}, "fp8 block 128x128"),
    "an idle scale beside bf16": ({W: ones(6, 8).bfloat16(), "m.w.input_scale": ones(())}, "None"),
}


@pytest.mark.parametrize(("tensors", "kind"), LEGAL.values(), ids=LEGAL)
def test_legal(tmp_path: Path, tensors: dict[str, torch.Tensor], kind: str) -> None:
    save_file(tensors, tmp_path / "model.safetensors")
    said, values = read(tmp_path, W, "bf16")
    assert said == kind
    assert values.dtype == torch.bfloat16
    assert all(W in owners(name) for name in tensors if name != W)


MIXED = "Values and scales are of different exports, or of a format that is not known here."
REFUSED = {
    "no scale": (
        {W: ones(130, 8).to(FP8)},
        f"{W}: F8_E4M3 needs one scale; expected {W}_scale_inv or {W}_scale or {W}_scales; got none. "
        "Numbers mean nothing without their scale: export the checkpoint again.",
    ),
    "two scales": (
        {W: ones(130, 8).to(FP8), f"{W}_scale_inv": ones(2, 1), f"{W}_scale": ones(())},
        f"{W}: F8_E4M3 needs one scale; expected {W}_scale_inv or {W}_scale or {W}_scales; got {W}_scale_inv, {W}_scale. "
        "Remove the other.",
    ),
    "scale of another shape": (
        {W: ones(130, 260).to(FP8), f"{W}_scale_inv": ones(3, 2)},
        f"{W}_scale_inv: does not fit as scales of fp8 block 128x128; expected f32 or bf16 or f16 or F8_E8M0 [2, 3]; "
        f"got f32[3, 2]. {MIXED}",
    ),
    "scale of another dtype": (
        {W: ones(130, 260).to(FP8), f"{W}_scale": torch.ones(1, dtype=torch.int32)},
        f"{W}_scale: does not fit as scales of fp8 per tensor; expected f32 or bf16 or f16 or F8_E8M0 [] or [1]; "
        f"got i32[1]. {MIXED}",
    ),
    "a scale beside bf16": (
        {W: ones(6, 8).bfloat16(), f"{W}_scale": ones(())},
        f"{W}: the weight is not quantised and has a scale; got bf16 and {W}_scale. "
        "Was the weight replaced without its scale? Remove the scale, or store the quantised weight.",
    ),
    "e5m2": (
        {W: ones(6, 8).to(torch.float8_e5m2), f"{W}_scale": ones(())},
        f"{W}: the weight cannot be read from this dtype; expected f32 or bf16 or f16 or F8_E4M3 or I8 or U8; got F8_E5M2. "
        "Convert the weight to bf16, or to FP8 (e4m3), INT8, NVFP4 or MXFP4.",
    ),
    "int8 in groups of columns": (
        {W: torch.ones(6, 8, dtype=torch.int8), f"{W}_scale": ones(6, 2)},
        f"{W}_scale: does not fit as scales of int8 block 128x128; expected f32 or bf16 or f16 [1, 1]; got f32[6, 2]. "
        "Values and scales are of different exports, or of a format that is not known here.",
    ),
    "int4 of compressed-tensors": (
        {f"{W}_packed": torch.ones(6, 8, dtype=torch.int32), f"{W}_scale": ones(6, 1)},
        f"{W}_packed: the weight cannot be read from this dtype; expected f32 or bf16 or f16 or F8_E4M3 or I8 or U8; got i32. "
        "Convert the weight to bf16, or to FP8 (e4m3), INT8, NVFP4 or MXFP4.",
    ),
    "nvfp4 without a global scale": (
        {W: torch.zeros(6, 8, dtype=U8), f"{W}_scale": ones(6, 1).to(FP8)},
        f"{W}: NVFP4 needs one scale over its scales; expected {W}_scale_2, or ..._global_scale of compressed-tensors; got none. "
        "Without it the scales of the blocks are off by a factor: export the checkpoint again.",
    ),
    "nvfp4 with a global scale for each row": (
        {W: torch.zeros(6, 8, dtype=U8), f"{W}_scale": ones(6, 1).to(FP8), f"{W}_scale_2": ones(6)},
        f"{W}_scale_2: does not fit as global scale of nvfp4; expected f32 or bf16 or f16 [] or [1]; got f32[6]. {MIXED}",
    ),
    "nvfp4 with padded scales": (
        {W: torch.zeros(6, 8, dtype=U8), f"{W}_scale": ones(128, 4).to(FP8), f"{W}_scale_2": ones(())},
        f"{W}_scale: does not fit as scales of nvfp4; expected F8_E4M3 [6, 1]; got F8_E4M3[128, 4]. {MIXED}",
    ),
    "mxfp4 with scales of nvfp4's blocks": (
        {W: torch.zeros(6, 16, dtype=U8), f"{W}_scale": torch.zeros(6, 2, dtype=U8)},
        f"{W}_scale: does not fit as scales of mxfp4; expected U8 or F8_E8M0 [6, 1]; got U8[6, 2]. {MIXED}",
    ),
    "mxfp4 with a global scale": (
        {W: torch.zeros(6, 16, dtype=U8), f"{W}_scale": torch.zeros(6, 1, dtype=U8), f"{W}_scale_2": ones(())},
        f"{W}_scale_2: mxfp4 has no scale over its scales; got f32[]. {MIXED}",
    ),
    "stored twice": (
        {W: ones(6, 16), f"{W}_packed": torch.zeros(6, 8, dtype=U8), f"{W}_scale": ones(6, 1).to(FP8)},
        f"{W}: the weight is stored twice; got {W} and {W}_packed. Remove the one that is out of date.",
    ),
    "a vector with scales of blocks": (
        {W: ones(8).to(FP8), f"{W}_scale_inv": ones(1, 1)},
        f"{W}_scale_inv: does not fit as scales of fp8 block 128x128; "
        f"expected f32 or bf16 or f16 or F8_E8M0 a matrix to scale; got f32[1, 1]. {MIXED}",
    ),
    "a number of bytes": (
        {W: torch.ones((), dtype=U8), f"{W}_scale": torch.zeros(1, dtype=U8)},
        f"{W}: does not fit as values of mxfp4; expected U8 [0] or [0, 16]; got U8[]. {MIXED}",
    ),
}


@pytest.mark.parametrize(("tensors", "message"), REFUSED.values(), ids=REFUSED)
def test_refused(tmp_path: Path, tensors: dict[str, torch.Tensor], message: str) -> None:
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError) as caught:
        read(tmp_path, W)
    assert str(caught.value) == f"{tmp_path}/model.safetensors: {message}"


@pytest.mark.parametrize(
    "tensors",
    [
        {W: ones(130, 8).to(FP8), f"{W}_scale": torch.tensor([math.nan])},
        {W: ones(130, 8).to(FP8), f"{W}_scale_inv": torch.tensor([[1.0], [math.inf]])},
        {W: torch.zeros(1, 16, dtype=U8), f"{W}_scale": torch.full((1, 1), 255, dtype=U8)},
        {W: torch.zeros(1, 8, dtype=U8), f"{W}_scale": ones(1, 1).to(FP8), f"{W}_scale_2": torch.tensor(math.nan)},
    ],
)
def test_a_scale_that_is_no_number(tmp_path: Path, tensors: dict[str, torch.Tensor]) -> None:
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"weight_scale\w*: scales must be finite; expected numbers; got 1 of \d"):
        read(tmp_path, W)
