"""Every architecture gets the same kind of kernels, as far as its shared memory goes, and nvcc takes them."""

from __future__ import annotations

import shutil

import pytest

from circuitgraph.errors import BuildError
from circuitgraph.kernels.cuda.architectures import ARCHITECTURES, DEFAULT, architecture
from circuitgraph.kernels.cuda.backend import make_backend
from circuitgraph.kernels.cuda.build import HOST
from circuitgraph.kernels.cuda.nvcc import Nvcc, resources
from circuitgraph.target import Target, parse_target, parse_targets
from tests.cuda.test_emit import aligned
from tests.cuda.test_quantised import plan_of
from tests.gpu.pack import CASES, plans_of

FORMATS = {
    "fc": "fp8 128x128",
    "layer.attn.q_proj": "int8 per row",
    "layer.attn.o_proj": "mxfp4",
    "layer.ffn.down_proj": "fp8 per tensor",
    "lm_head": "nvfp4",
}

HOPPER_ALONE = {
    "latent_warpgroups": ("latent_plain",),
    "linear_warpgroups": ("linear_stream", "linear_tiles"),
    "joined_warpgroups": ("linear_stream", "linear_tiles"),
    "top1_warpgroups": ("top1_stream", "top1_tiles"),
    "attention_blocks": ("attention_paged",),
}
"""And what the others have instead."""


def kernels(arch, case):
    """(program, anchor) to the group's pattern and the kernel's name without its target. What is only computed by rows has its
    own group on some architectures."""
    plans = plans_of(case, Target("cuda", arch))
    return {
        (plan.symbol, anchor.name): (group.pattern, choice.kernel.removeprefix("cuda."))
        for plan in plans
        for group, choice in zip(plan.groups, plan.choices, strict=True)
        for anchor in group.anchors
        if choice.kernel != "cuda.rows"
    }


PLAIN_ELSEWHERE = {
    ("long_fp8", "draft_1", "head"),
    ("mixed_storage", "draft_16", "project"),
    ("wide_nvfp4", "draft_16", "project"),
    ("wide_nvfp4", "draft_3", "head"),
    ("wide_nvfp4", "draft_8", "head"),
    ("wide_mxfp4", "draft_5", "head"),
}
"""Quantised weights that Hopper streams, or multiplies by warpgroups, and that have no fast kernel on some other GPUs: too many
columns for what there is of shared memory, and tiles do not read them."""


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_no_architecture_falls_to_plain_kernels_alone(case):
    wanted = kernels(DEFAULT, case)
    for arch in ARCHITECTURES:
        found = kernels(arch, case)
        assert found.keys() == wanted.keys()
        for key, (pattern, kernel) in found.items():
            # What streams through 227 KB of shared memory may need tiles where there are 99; only Hopper has wgmma.
            _, first = wanted[key]
            others = HOPPER_ALONE.get(first, (first, first.replace("_stream", "_tiles")))
            if (case.name, key[0], pattern) in PLAIN_ELSEWHERE:
                others = (*others, others[0].replace("_stream", "_plain"))
            assert kernel in (others if arch != DEFAULT else (first,)), (arch, key)


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="needs nvcc")
@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_compiles(arch, tmp_path):
    """Streams, tiles, paged attention, plain and row kernels, and the ends of a chain, in one unit."""
    plans = [aligned(2, arch=arch), aligned(33, "context", arch=arch)]
    chosen = {choice.kernel for plan in plans for choice in plan.choices}
    many = "cuda.linear_warpgroups" if architecture(arch).warpgroups else "cuda.linear_tiles"
    assert chosen == {"cuda.linear_stream", "cuda.qkv_stream", many, "cuda.attention_paged", "cuda.top1_plain", "cuda.rows"}
    backend = make_backend(Target("cuda", arch))
    (source,) = backend.sources(backend.lower(plans))
    assert HOST in source
    (tmp_path / "kernels.cu").write_text(source)
    report = Nvcc(architecture(arch)).compile(tmp_path / "kernels.cu", tmp_path / "kernels.cubin")
    found = resources(report)
    assert {"draft_2_kernel", "context_33_kernel", "circuitgraph_chain_end_kernel"} <= found.keys()
    assert all(registers <= 255 for registers, _ in found.values())


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="needs nvcc")
@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_quantised_weights_compile(arch, tmp_path):
    """Every format's way to pairs, streamed and in tiles; sm_80 has no product of two bf16, and nowhere does hardware convert."""
    plans = [plan_of(FORMATS, rows, arch=arch) for rows in (1, 33)]
    many = "cuda.linear_warpgroups" if architecture(arch).warpgroups else "cuda.linear_tiles"
    assert {"cuda.linear_stream", many} <= {choice.kernel for plan in plans for choice in plan.choices}
    backend = make_backend(Target("cuda", arch))
    (source,) = backend.sources(backend.lower(plans))
    assert "e4m3" not in source
    assert ("mul.rn.bf16x2" in source) == architecture(arch).multiply
    (tmp_path / "kernels.cu").write_text(source)
    report = Nvcc(architecture(arch)).compile(tmp_path / "kernels.cu", tmp_path / "kernels.cubin")
    found = resources(report)
    assert {"draft_1_kernel", "draft_33_kernel"} <= found.keys()
    assert all(spilled == 0 for name, (_, spilled) in found.items() if name.startswith("draft_1_"))


def test_targets_are_parsed():
    assert str(parse_target("cuda:sm_90a")) == "cuda:sm_90a"
    assert parse_targets("cuda") == (Target("cuda", DEFAULT),)
    assert [target.of_plans for target in parse_targets("cuda:sm_80,sm_90a")] == ["cuda:sm_80", "cuda:sm_90a"]
    assert [target.of_plans for target in parse_targets("cpu:znver3")] == ["cpu"]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("cuda:sm_91", "target 'cuda:sm_91': no target 'cuda:sm_91'. Did you mean 'sm_"),
        ("cuda:sm_80,,sm_90a", "target 'cuda:sm_80,,sm_90a': an architecture is missing."),
        ("cuda:", "target 'cuda:': an architecture is missing."),
        ("cuda:sm_80,sm_90a,sm_80", "'sm_80' is there twice. Name every architecture once"),
        ("rocm", "no target 'rocm'. Known: cpu, cuda"),
    ],
)
def test_unknown_and_repeated_architectures_are_refused(text, says):
    with pytest.raises(BuildError) as error:
        parse_targets(text)
    assert says in str(error.value)


def test_one_architecture_where_several_make_no_sense():
    with pytest.raises(BuildError, match=r"one architecture at a time. For example 'cuda:sm_80'"):
        parse_target("cuda:sm_80,sm_90a")
