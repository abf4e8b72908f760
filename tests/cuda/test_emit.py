"""CUDA code generation without a GPU: what is chosen, and what the text promises."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
import tvm
from tvm.script import tirx as T

from circuitgraph.errors import ScheduleError
from circuitgraph.kernels.base import KERNELS, make_params
from circuitgraph.kernels.cuda import latent_templates, stream_templates, templates
from circuitgraph.kernels.cuda.architectures import architecture_of
from circuitgraph.kernels.cuda.backend import make_backend
from circuitgraph.kernels.cuda.build import units_of
from circuitgraph.kernels.cuda.stream import Geometry, geometry
from circuitgraph.pipeline import Run, plan_piece
from circuitgraph.plan.schedule import load_schedule
from circuitgraph.target import Target
from tests.circuits import EVERYTHING, post_norm, small_mtp
from tests.gpu.pack import CASES, plans_of

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
    "windows": [0],
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
    # 1003 logits are no whole number of tiles of 16 weight rows; the refusal is a line of the plan.
    assert chosen["head"] == "cuda.top1_plain"
    refusals = [reason for choice in aligned().choices for _, reason in choice.refusals]
    assert any("1003 weight rows do not split" in reason for reason in refusals)


def test_other_dtypes_fall_to_the_plain_kernels():
    kernels = {choice.kernel for choice in aligned(act="f32", wt="bf16", kv="f32").choices}
    assert kernels == {"cuda.linear_plain", "cuda.top1_plain", "cuda.attention_plain", "cuda.rows"}


@pytest.mark.parametrize("rows", [1, 8, 64])
def test_a_residual_of_what_was_normed_is_emitted(rows):
    plan = plan_of(post_norm("bf16", 512), rows, "run")
    assert plan.choices[1].kernel != "cuda.linear_plain"
    assert len(kernels_of(source_of(plan))) >= 2


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

REPRESENTATIVE = {
    "few_bf16": ("draft_1", "draft_8", "draft_masked_1", "draft_masked_5", "context_4"),
    "more_bf16": ("draft_9", "draft_33", "draft_masked_64", "context_64", "context_200"),
    "aligned_f16": ("draft_2", "draft_17"),
    "odd_bf16": ("draft_1", "draft_17", "draft_masked_3", "context_5"),
    "odd_f32": ("draft_64", "logits_2"),
    "gated_bf16": ("draft_9", "logits_9", "context_4"),
    "biased_bf16": ("draft_3",),
    "narrow_bf16": ("draft_3",),
    "wide_bf16": ("draft_1", "draft_16", "context_16"),
    "mixed_f32_bf16": ("draft_2",),
    "fp8_bf16": ("draft_1", "draft_17", "draft_64", "draft_masked_3"),
    "nvfp4_bf16": ("draft_8", "draft_32"),
    "mixed_storage": ("draft_4",),
    "odd_storage": ("draft_4",),
    "products_bf16": ("products_16",),
    "fixture_qwen3_5_mtp": ("draft_3",),
    "direct_eagle3": ("first_1", "draft_8"),
    "direct_medusa": ("draft_8", "logits_1"),
    "direct_dflash": ("draft_16", "draft_48"),
    "products_rows_bf16": ("products_100",),
    "latent_bf16": ("draft_1", "draft_8"),
    "latent_odd_f32": ("draft_3", "context_5"),
    "mixture_bf16": ("apply_1", "apply_16", "apply_33"),
    "mixture_fp8": ("apply_1", "apply_8"),
    "mixture_nvfp4": ("apply_1", "apply_33"),
    "mixture_wide": ("apply_64",),
    "moe_bf16": ("draft_3",),
    "fixture_glm4_moe_mtp": ("draft_3",),
}
"""Programs of tests.gpu.pack.CASES that reach every template, and what templates do beside their rule."""

ON_THE_WAY = {
    "emit_latent_combine": latent_templates,
    "emit_copy": templates,
    "emit_combine": templates,
    "emit_add_parts": stream_templates,
    "emit_chosen": stream_templates,
}


def definitions(source: str) -> list[tuple[str, set[str], str]]:
    """(name, names of the pointers it is given, body) of every kernel."""
    found = re.findall(r'extern "C" __global__ [^{;]*?(\w+_kernel(?:_\d+)?)\(([^{;]*)\)\s*\{(.*?)\n\}', source, flags=re.S)
    return [(name, set(re.findall(r"\* __restrict__ (\w+)", given)), body) for name, given, body in found]


HELD = re.compile(r" (?:condval\w*|address\w*\[0\]) = reinterpret_cast<uint64_t>\(\(&\(.*\)\)\);")
"""Where one of several heads lies, in launches that make heads: nothing is read there yet."""
READ = re.compile(r"(?:_ld_global_|_cp_async)\w*\([^;]*?\(void\*\)\(*(\w+)\[0\]")
"""From an address in a register."""


def without_held(constants: set[str], early: str) -> str:
    """Without the addresses, where all that are read from are of constants."""
    for address in set(READ.findall(early)):
        found = early[early.index(f" {address}[1];") : early.index(f" {address}[0] = ")]
        if not set(re.findall(r"&\((\w+?)_ptr(?:_\d+)?\[", found)) <= constants:
            return early
    return HELD.sub("", early)


def early_uses(constants: set[str], given: set[str], body: str) -> list[str]:
    """What a kernel does wrong before it waits for those before it, which may still be writing activations, tokens and cache
    rows, or reading what it is about to write."""
    early, waits, _ = body.partition("griddepcontrol_wait();")
    if "stored_ptr[0]" in early:
        early = without_held(constants, early)
    touched = {re.sub(r"_ptr(_\d+)?$", "", name) for name in given if re.search(rf"\b{name}\b", early)}
    faults = [f"touches {name}" for name in sorted(touched - constants - STEADY)]
    faults += [
        f"stores: {call}" for call in re.findall(r"\w*(?:_st(?:_\w+)?_global|_red_global|atom(?!_shared)|_bulk)\w*\(", early)
    ]
    faults += [f"stores to {name}" for name in given if re.search(rf"\b{name}\[[^;\n]*\] = ", early)]
    return faults if waits else ["does not wait"]


def lets_start_late(body: str) -> bool:
    """Does a kernel let the next one start only when it has waited itself?"""
    waited, *rest = body.split("griddepcontrol_wait();")
    starts = "griddepcontrol_launch_dependents();"
    return bool(rest) and starts not in waited and starts in rest[0]


def complete_before(bodies: list[str]) -> set[str]:
    """What is complete when the kernel after these of its program starts: the list of chosen experts, if the last lets it start
    only when that is where all see it."""
    listed = bodies and re.search(r"listed_ptr.*thread_fence\(\);.*cta_sync\(\);.*launch_dependents\(\);", bodies[-1], re.S)
    return {"listed"} if listed and lets_start_late(bodies[-1]) else set()


SETTLED = re.compile(r"^( *)if \(\(\(\w+\[0\] \* (\d+)\) \+ (\d+)\) <= \w+\[0\]\) \{\n.*?^\1\}$", re.S | re.M)
"""What is done with a tile of so many cache rows if it ends so many rows before its sequence does, or more."""
FIRST_FRESH = re.compile(r" settled_ptr\[0\] = \(\(longest_ptr\[0\] - (\d+)\) >> 6\);")
"""Of attention of blocks: the first tile of 64 cache rows of which a row may be among so many newest."""
BEFORE_FRESH = re.compile(r"^( *)if \(\(\w+\[0\] \+ \w+\) < settled_ptr\[0\]\) \{\n.*?^\1\}$", re.S | re.M)


STORED = re.compile(r"^( *)if \(\(\w+\[0\] < \w+\[0\]\) && \(first_ptr\[0\] < stored_ptr\[0\]\)\) \{\n.*?^\1\}$", re.S | re.M)
"""Of attention that makes its row: what is done with a tile if there are other rows."""
OLDER = re.compile(r" = min\(max\(.*, first_ptr\[0\]\), max\(\(stored_ptr\[0\] - 1\), 0\)\);")
"""Which row is looked for there: none but older ones."""


def without_settled(rows: int, bodies: list[str], body: str) -> str:
    """The body without its early reading of tiles that the program appends nothing to; complete is what was there before the
    program, after a kernel that lets the next one start late."""
    if not any(map(lets_start_late, bodies)):
        return body
    early, waits, rest = body.partition("griddepcontrol_wait();")
    if any(int(newest) == rows for newest in FIRST_FRESH.findall(early)):
        early = BEFORE_FRESH.sub("", early)
    if (older := len(OLDER.findall(early))) and older == early.count("&(kv_table_ptr["):
        early = STORED.sub("", early)
    return SETTLED.sub(lambda found: "" if int(found[3]) == int(found[2]) + rows else found[0], early) + waits + rest


def constants_of(plan) -> set[str]:
    tensors = [value for weight in plan.circuit.weights for value in weight.tensors()]
    return {value.name.replace(".", "_") for value in tensors} | {"rope_cos", "rope_sin"}


def test_nothing_but_constants_and_addressing_is_touched_before_the_wait(monkeypatch):
    """In programs that between them have every template in them."""
    from tests.cuda.test_quantised import plan_of as packed_plan

    cases = {case.name: case for case in CASES}
    reached = set()
    for name, module in ON_THE_WAY.items():
        monkeypatch.setattr(module, name, noted(reached, name, getattr(module, name)))
    programs = {"twice": [plan_of(hidden_twice(small_mtp()))], "all switches": [plan_of(small_mtp(EVERYTHING))]}
    programs["quantised head of many rows"] = [packed_plan("fp8 128x128", 33, arch="sm_100")]  # which has no warpgroups
    for name, symbols in REPRESENTATIVE.items():
        programs[name] = [plan for plan in plans_of(cases[name]) if plan.symbol in symbols]
        assert {plan.symbol for plan in programs[name]} == set(symbols)
    checked = settled = 0
    for name, plans in programs.items():
        constants = set().union(*map(constants_of, plans))
        reached |= {choice.kernel for plan in plans for choice in plan.choices}
        backend = make_backend(Target("cuda", architecture_of(plans[0]).name))
        for source in backend.sources(backend.lower(plans)):
            before: dict[str, list[str]] = {}
            for kernel, given, body in definitions(source):
                symbol = kernel.partition("_kernel")[0]
                bodies = before.setdefault(symbol, [])
                rows = symbol.rpartition("_")[2]
                shown = without_settled(int(rows), bodies, body) if rows.isdigit() else body
                settled += shown != body
                faults = early_uses(constants | complete_before(bodies), given, shown)
                bodies.append(body)
                assert not faults, (name, kernel, faults)
                checked += 1
    assert reached == {name for name in KERNELS if name.startswith("cuda.")} | set(ON_THE_WAY)
    assert checked > 200
    assert settled


def noted(reached: set[str], name: str, emit):
    def emit_and_note(*args, **more):
        reached.add(name)
        return emit(*args, **more)

    return emit_and_note


def hidden_twice(circuit):
    """With a second output of the same bytes."""
    outputs = (*circuit.outputs, ("again", dict(circuit.outputs)["next_hidden"]))
    entries = tuple(
        replace(entry, outputs=(*entry.outputs, "again")) if entry.name == "draft" else entry for entry in circuit.entries
    )
    return replace(circuit, outputs=outputs, entries=entries)


ADDRESS = (
    "stored_ptr[0] = 1; uint64_t address_ptr[1]; "
    "condval = reinterpret_cast<uint64_t>((&({}_ptr[0])));\n address_ptr[0] = condval;"
)


@pytest.mark.parametrize(
    ("early", "fault"),
    [
        ("f = ld_global_f32(x, (&(hidden_ptr[0])));", "touches hidden"),
        ("here = reinterpret_cast<uint64_t>((&(kv_k_ptr[0])));", "touches kv_k"),
        ("tvm_builtin_ptx_st_global_b16((&(fc_ptr[0])), half_ptr[0]);", "stores: tvm_builtin_ptx_st_global_b16("),
        ("fc_ptr[(i_ptr[0] + 1)] = 0;", "stores to fc_ptr"),
        ("tvm_builtin_ptx_ld_global_s32(i_ptr[0], (&(kv_slot_ptr[0])));", None),
        (ADDRESS.format("hidden"), None),
        (ADDRESS.format("hidden") + " tvm_builtin_ptx_ld_global_nc_b32(w, ((void*)(address_ptr[0] + 4)));", "touches hidden"),
        (ADDRESS.format("hidden") + " tvm_builtin_ptx_cp_async_cg(s, ((void*)address_ptr[0]), 16);", "touches hidden"),
        (ADDRESS.format("fc") + " tvm_builtin_ptx_ld_global_nc_b32(w, ((void*)address_ptr[0]));", None),
    ],
)
def test_what_is_touched_too_early_is_found(early, fault):
    given = {"fc_ptr", "hidden_ptr", "kv_k_ptr", "kv_slot_ptr"}
    faults = early_uses({"fc"}, given, f"{early} griddepcontrol_wait(); y = hidden_ptr[0];")
    assert faults == ([fault] if fault else [])
    assert early_uses({"fc"}, given, early) == ["does not wait"]


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


@pytest.mark.parametrize(
    ("layer", "tiles_ahead", "expected"),
    [
        (9216, 2, (1, 8)),  # tiles of 16 rows spread it best, and two of them make a ring as long as others'
        (9216, 1, (1, 4)),
        (151936, 2, (2, 8)),  # larger tiles spread it as well
    ],
)
def test_a_ring_of_two_short_tiles(layer, tiles_ahead, expected):
    work = lambda groups, parts: -(-(layer // 16 // groups) // 132) * groups  # noqa: E731
    cut = geometry(1, 2048, warps=16, stages=8, k_parts=0, registers=96, work=work, tiles_ahead=tiles_ahead)
    assert isinstance(cut, Geometry)
    assert (cut.groups, cut.stages) == expected
    assert cut.tiles_ahead == -(-cut.stages // (cut.steps * cut.groups))


@pytest.mark.parametrize("name", sorted(name for name in KERNELS if name.startswith("cuda.")))
def test_parameters_have_bounds(name):
    template = KERNELS[name]
    for field in template.Params.__dataclass_fields__.values():
        if type(field.default) is int:
            for value in (field.metadata["least"] - 1, field.metadata["most"] + 1):
                with pytest.raises(ScheduleError, match=f"parameter '{field.name}' is out of bounds"):
                    make_params(template, {field.name: value}, "mine.yaml:3")
