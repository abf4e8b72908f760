"""What a checkpoint stores for one weight: a plain tensor, or quantised values and the scales that belong to them.

Each tensor and its companions decide, not the config: quantised checkpoints leave layers in bf16 that their exclude
lists forget, and the other way round. The config only says how large a block of FP8 is. Imports torch and safetensors only.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass

from ..circuit.types import FLOAT_DTYPES
from ..errors import CheckpointError, Fault
from .files import TensorFiles, TensorInfo
from .packed import GLOBAL_DTYPES, SCALE_DTYPES, VALUE_DTYPES, Packed, Shape, per_tensor_shapes

FP8_BLOCK = (128, 128)
"""The block of `weight_scale_inv` where a config does not say another. It is never derived: rows / scale rows is wrong for
a matrix whose last block is partial."""


@dataclass(frozen=True)
class Stored:
    """info: of the values. shape: of the weight. idle: scales of activations, which no program here quantises."""

    info: TensorInfo
    shape: Shape
    packed: Packed | None = None
    idle: tuple[str, ...] = ()


def held_name(files: Container[str], name: str) -> str | None:
    """The tensor with the values of weight `name`, None where the files have none: quantised ones may have another name."""
    return next((spelling for spelling in spellings(name) if spelling in files), None)


def spellings(name: str) -> tuple[str, ...]:
    """Plain, compressed-tensors', gpt-oss'."""
    return (name, f"{name}_packed", f"{name}_blocks")


_BITSANDBYTES = (
    "absmax",
    "quant_map",
    "nested_absmax",
    "nested_quant_map",
    "quant_state.bitsandbytes__nf4",
    "quant_state.bitsandbytes__fp4",
)
"""What lies beside its 4-bit weights; beside its 8-bit ones it is SCB and weight_format."""


def companions(name: str) -> dict[str, str]:
    """Tensors that belong to the values of weight `name`, where they exist: name to role.

    `idle` ones mean nothing here; `foreign` ones change the weight in a way that is not read.
    """
    roles = {
        f"{name}_scale_inv": "scale",
        f"{name}_scale": "scale",
        f"{name}_scales": "scale",
        f"{name}_scale_2": "multiplier",
        f"{name}_global_scale": "divisor",
        f"{name}_input_scale": "idle",
        f"{name}_zero_point": "foreign",
        f"{name}_g_idx": "foreign",
        **dict.fromkeys((f"{name}.{other}" for other in _BITSANDBYTES), "foreign"),
    }
    module, dot, leaf = name.rpartition(".")
    if leaf == "weight":
        roles.update(dict.fromkeys((f"{module}{dot}{other}" for other in ("pre_quant_scale", "SCB", "weight_format")), "foreign"))
        idle = ("input_scale", "input_scale_inv", "input_global_scale", "activation_scale", "output_scale")
        roles.update({f"{module}{dot}{other}": "idle" for other in idle})
    return roles


def read_stored(files: TensorFiles, name: str, block: Shape = FP8_BLOCK) -> Stored:
    """What the files have of weight `name` (which they have: `held_name`).

    block: rows and columns of an FP8 block.

    Raises:
        CheckpointError: a dtype or a set of companions that is no format known here, or that does not fit together.
    """
    found = [spelling for spelling in spellings(name) if spelling in files]
    info = files.info(found[0])  # of the whole stack, where experts are stored one by one: their scales are, too
    if len(found) > 1:
        raise _refused(info, "the weight is stored twice", got=" and ".join(found), hint="Remove the one that is out of date.")
    present = {other: role for other, role in companions(name).items() if other in files}
    for other in (other for other, role in present.items() if role == "foreign"):
        hint = (
            "Zero points, orders of columns, scales of inputs and bitsandbytes' tables are not read: "
            "export it as bf16, FP8, INT8, NVFP4 or MXFP4."
        )
        expected = f"no such tensor beside '{info.name}'"
        raise CheckpointError(Fault("changes what the weight means", str(info.file), other, expected, hint=hint))
    idle = tuple(other for other, role in present.items() if role == "idle")
    scales = [other for other, role in present.items() if role == "scale"]
    wholes = [other for other, role in present.items() if role in ("multiplier", "divisor")]
    if info.dtype in FLOAT_DTYPES:
        if scales or wholes:
            hint = "Was the weight replaced without its scale? Remove the scale, or store the quantised weight."
            got = f"{info.dtype} and {', '.join(scales + wholes)}"
            raise _refused(info, "the weight is not quantised and has a scale", got=got, hint=hint)
        return Stored(info, info.shape, None, idle)
    if info.dtype not in VALUE_DTYPES.values():
        expected = " or ".join((*FLOAT_DTYPES, *dict.fromkeys(VALUE_DTYPES.values())))
        hint = "Convert the weight to bf16, or to FP8 (e4m3), INT8, NVFP4 or MXFP4."
        raise _refused(info, "the weight cannot be read from this dtype", expected, info.dtype, hint)
    if len(scales) != 1:
        expected = " or ".join(other for other, role in companions(name).items() if role == "scale")
        hint = "Numbers mean nothing without their scale: export the checkpoint again." if not scales else "Remove the other."
        raise _refused(info, f"{info.dtype} needs one scale", expected, ", ".join(scales) or "none", hint)
    scale = files.info(scales[0])
    if info.dtype == VALUE_DTYPES["nvfp4"]:
        stored = _four_bit(info, scale, wholes, present)
    else:
        stored = _eight_bit(info, scale, tuple(block), idle)
    if stored.packed is not None and wholes and not stored.packed.global_scale:
        whole = files.info(wholes[0])
        raise _refused(whole, f"{stored.packed.format} has no scale over its scales", got=str(whole), hint=_MIXED)
    check_packed(files, info.name, stored.shape, stored.packed)
    return Stored(stored.info, stored.shape, stored.packed, idle)


def read_table(files: TensorFiles, name: str, dtype: str) -> Stored:
    """A tensor that is no weight but a table of ids, which cannot be rounded: it has to be stored in its own dtype.

    Raises:
        CheckpointError: it is not.
    """
    info = files.info(name)
    if info.dtype != dtype:
        raise _refused(info, "the table cannot be read from this dtype", dtype, info.dtype)
    return Stored(info, info.shape)


def check_packed(files: TensorFiles, values: str, shape: Shape, packed: Packed | None) -> None:
    """That the tensors of a packed weight have the dtypes and shapes of its format.

    Raises:
        CheckpointError: the first that has not, or that is absent.
    """
    if packed is None:
        return
    _fits(files.info(values), "values", (VALUE_DTYPES[packed.format],), packed.value_shapes(shape), packed)
    _fits(files.info(packed.scales), "scales", SCALE_DTYPES[packed.format], packed.scale_shapes(shape), packed)
    if packed.global_scale:
        _fits(files.info(packed.global_scale), "global scale", GLOBAL_DTYPES, per_tensor_shapes(shape), packed)


def _fits(info: TensorInfo, what: str, dtypes: tuple[str, ...], shapes: tuple[Shape, ...], packed: Packed) -> None:
    if info.dtype in dtypes and info.shape in shapes:
        return
    sizes = " or ".join(str(list(shape)) for shape in shapes) or "a matrix to scale"
    raise _refused(info, f"does not fit as {what} of {packed}", f"{' or '.join(dtypes)} {sizes}", str(info), _MIXED)


_MIXED = "Values and scales are of different exports, or of a format that is not known here."


def _eight_bit(info: TensorInfo, scale: TensorInfo, block: Shape, idle: tuple[str, ...]) -> Stored:
    """One scale for all, for each row, or for each block: the shape of the scales says which."""
    high, wide = block
    format = next(name for name, dtype in VALUE_DTYPES.items() if dtype == info.dtype)
    kinds = [Packed(format, scale.name, sizes) for sizes in ((0, 0), (1, 0), (high, wide))]
    packed = next((kind for kind in kinds if scale.shape in kind.scale_shapes(info.shape)), kinds[-1])
    return Stored(info, info.shape, packed, idle)


def _four_bit(info: TensorInfo, scale: TensorInfo, wholes: list[str], roles: dict[str, str]) -> Stored:
    """FP8 scales are NVFP4's, powers of two MXFP4's."""
    blocks = info.name.endswith("_blocks")
    *rest, last = info.shape or (0,)
    shape = (*rest[:-1], rest[-1] * 32) if blocks and rest else (*rest, last * 2)
    if scale.dtype == "F8_E4M3":
        if len(wholes) != 1:
            expected = f"{info.name.removesuffix('_packed')}_scale_2, or ..._global_scale of compressed-tensors"
            hint = "Without it the scales of the blocks are off by a factor: export the checkpoint again."
            raise _refused(info, "NVFP4 needs one scale over its scales", expected, ", ".join(wholes) or "none", hint)
        return Stored(info, shape, Packed("nvfp4", scale.name, (1, 16), wholes[0], roles[wholes[0]] == "divisor"))
    return Stored(info, shape, Packed("mxfp4", scale.name, (1, 32)))


def strays(files: Iterable[str], names: Sequence[str]) -> list[str]:
    """What lies in the modules of these weights and is none of their tensors: a bias of lm_head, say."""
    known = {tensor for name in names for tensor in (*spellings(name), *companions(name))}
    modules = tuple(f"{name.removesuffix('.weight')}." for name in names if name.endswith(".weight"))
    return sorted(other for other in files if other.startswith(modules) and other not in known)


CACHE_SCALES = ("k_scale", "v_scale", "q_scale", "kv_scale", "prob_output_scale")
"""Leaves of scales for a quantised KV cache or attention."""


def owners(tensor: str) -> tuple[str, ...]:
    """The weights that a tensor may belong to, by its name alone: the inverse of `spellings` and `companions`."""
    suffixes = [spelling for spelling in (*spellings(""), *companions("")) if spelling]
    found = [tensor.removesuffix(suffix) for suffix in suffixes if tensor.endswith(suffix)]
    weight = f"{tensor.rpartition('.')[0]}.weight"
    return (*found, weight) if tensor in companions(weight) else tuple(found)


def foreign_format(files: Container[str], name: str) -> str | None:
    """What to say of weight `name`, which the files have not, where they have it in a format that is not read."""
    module = name.removesuffix("weight")
    for leaf in ("qweight", "weight_q", "SCB", "weight.quant_state.bitsandbytes__nf4"):
        if module + leaf in files:
            return f"'{module + leaf}' holds integers (GPTQ, AWQ or the like), which are not read: use bf16, FP8, NVFP4 or MXFP4."
    return None


def _refused(
    info: TensorInfo, message: str, expected: str | None = None, got: str | None = None, hint: str | None = None
) -> CheckpointError:
    where = str(info.file)
    return CheckpointError(Fault(message, where=where, subject=info.name, expected=expected, got=got, hint=hint))
