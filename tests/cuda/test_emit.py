"""CUDA code generation without a GPU: what is chosen, and what the text promises."""

from __future__ import annotations

import re

import pytest
import tvm
from tvm.script import tirx as T

from circuitgraph.errors import ScheduleError
from circuitgraph.kernels.base import KERNELS, make_params
from circuitgraph.kernels.cuda.backend import make_backend
from circuitgraph.kernels.cuda.build import units_of
from circuitgraph.kernels.cuda.stream import Geometry, geometry
from circuitgraph.pipeline import Run, plan_piece
from circuitgraph.plan.schedule import load_schedule
from circuitgraph.target import Target
from tests.circuits import EVERYTHING, small_mtp

RULES = load_schedule("cuda")
ALIGNED = {
    "hidden_size": 512,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "rotary_dim": 64,
    "intermediate_size": 512,
    "vocab_size": 1003,
    "rms_norm_eps": 1e-6,
    "attention_scale": 0.125,
}


def plan_of(circuit, rows=2, entry="draft", arch="sm_90a"):
    return plan_piece(Run(), circuit, entry, rows, f"cuda:{arch}", RULES)


def aligned(rows=2, entry="draft", arch="sm_90a", **dtypes):
    from circuitgraph.language import Bindings, load_program, resolve

    dtypes = dtypes or {"act": "bf16", "wt": "bf16", "kv": "bf16"}
    return plan_of(resolve(load_program("mtp_dense"), Bindings(ALIGNED, {}, **dtypes)), rows, entry, arch)


def source_of(plan, arch="sm_90a"):
    backend = make_backend(Target("cuda", arch))
    (source,) = backend.sources(backend.lower([plan]))
    return source


def kernels_of(source: str) -> list[str]:
    """The bodies of the kernels."""
    return re.findall(r"__global__ [^;{]*\{(.*?)\n\}", source, flags=re.S)


def test_aligned_shapes_reach_the_tensor_cores():
    chosen = {group.pattern: choice.kernel for group, choice in zip(aligned().groups, aligned().choices, strict=True)}
    assert chosen["project"] == chosen["gated"] == "cuda.linear_stream"
    assert chosen["attend"] == "cuda.attention_paged"
    # 1003 logits are no whole number of tiles of 128 rows; the refusal is a line of the plan.
    assert chosen["head"] == "cuda.top1_plain"
    refusals = [reason for choice in aligned().choices for _, reason in choice.refusals]
    assert any("1003 weight rows do not split" in reason for reason in refusals)


def test_other_dtypes_fall_to_the_plain_kernels():
    kernels = {choice.kernel for choice in aligned(act="f32", wt="bf16", kv="f32").choices}
    assert kernels == {"cuda.linear_plain", "cuda.top1_plain", "cuda.attention_plain", "cuda.rows"}


@pytest.mark.parametrize("switches", [{}, EVERYTHING])
def test_every_kernel_waits_for_those_before_it(switches):
    """A kernel that returned without waiting would let the next but one start too early."""
    for circuit in (small_mtp(switches), None):
        plan = plan_of(circuit) if circuit else aligned()
        source = source_of(plan)
        bodies = kernels_of(source)
        assert len(bodies) >= len(plan.groups)
        for body in bodies:
            assert body.count("griddepcontrol_wait();") == 1
            assert "return" not in body
        assert source.count("cudaLaunchAttributeProgrammaticStreamSerialization") == len(bodies)
        # The two ends of a chain let nobody start early: positions and addressing are read before a kernel waits.
        early = [body.count("griddepcontrol_launch_dependents();") for body in bodies]
        assert sorted(early) == [0, 0] + [1] * (len(bodies) - 2)


STEADY = {"position", "kv_slot", "kv_seq", "kv_start", "kv_length", "kv_table"}


@pytest.mark.parametrize("switches", [{}, EVERYTHING])
def test_only_constants_and_addressing_are_read_before_the_wait(switches):
    """What kernels before may still be writing is read afterwards: activations, tokens, cache rows."""
    for circuit in (small_mtp(switches), None):
        plan = plan_of(circuit) if circuit else aligned()
        constants = {weight.name.replace(".", "_") for weight in plan.circuit.weights} | {"rope_cos", "rope_sin"}
        for body in kernels_of(source_of(plan)):
            early = body.split("griddepcontrol_wait();")[0]
            read = set(re.findall(r"(?:ld_global\w*|cp_async\w*)\([^;]*?&\(+(?:\(\w+\*\))?(\w+?)_ptr", early))
            read |= set(re.findall(r"&\((\w+?)_ptr\[", early))
            local = set(re.findall(r"(?:int|float|uint|uint64_t|ushort|int64_t) (\w+?)_ptr", early))
            assert {re.sub(r"_\d+$", "", name) for name in read - local} <= constants | STEADY | {""}, read


def test_before_sm_90_kernels_are_launched_one_after_the_other():
    source = source_of(plan_of(small_mtp(), arch="sm_80"), "sm_80")
    assert "griddepcontrol" not in source
    assert "ProgrammaticStreamSerialization" not in source


def test_text_is_the_same_every_time():
    assert source_of(aligned()) == source_of(aligned())


@pytest.mark.parametrize(("programs", "units"), [(1, [3]), (2, [4]), (3, [3, 2]), (6, [4, 4]), (7, [3, 3, 3])])
def test_units_are_even_and_none_is_alone(programs, units):
    """With the two ends of a chain; TVM makes a module's only function its main, of which a library can have one."""

    @T.prim_func
    def nothing():
        T.evaluate(0)

    names = ["chain_begin", "chain_end", *(f"draft_{rows}" for rows in range(programs))]
    cut = [[name.name_hint for name in unit.functions] for unit in units_of(tvm.IRModule(dict.fromkeys(names, nothing)))]
    assert [len(unit) for unit in cut] == units
    assert sorted(name for unit in cut for name in unit) == sorted(names)


@pytest.mark.parametrize(
    ("rows", "columns", "expected"),
    [
        (1, 4096, (1, 8, 1, 8)),
        (8, 12288, (1, 24, 1, 8)),
        (16, 12288, (3, 8, 1, 8)),
        (16, 8192, (2, 8, 1, 8)),
        (1, 512, (1, 1, 8, 8)),
        (4, 1536, (1, 3, 2, 6)),
        (1, 1000, "do not split"),
        (33, 4096, "at most 32 rows"),
    ],
)
def test_geometry(rows, columns, expected):
    cut = geometry(rows, columns, warps=16, stages=8, k_parts=0, registers=64 if rows > 8 else 96)
    if isinstance(cut, Geometry):
        assert (cut.k_parts, cut.steps, cut.groups, cut.stages) == expected
        assert cut.steps * cut.groups % cut.stages == 0
    else:
        assert expected in cut


@pytest.mark.parametrize("name", sorted(name for name in KERNELS if name.startswith("cuda.")))
def test_parameters_have_bounds(name):
    template = KERNELS[name]
    for field in template.Params.__dataclass_fields__.values():
        if type(field.default) is int:
            for value in (field.metadata["least"] - 1, field.metadata["most"] + 1):
                with pytest.raises(ScheduleError, match=f"parameter '{field.name}' is out of bounds"):
                    make_params(template, {field.name: value}, "mine.yaml:3")
