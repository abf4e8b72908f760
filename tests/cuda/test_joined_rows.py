"""What follows products in parts, in the launch that adds them: which kernels there are, and what they read and store."""

import re

import pytest

from circuitgraph.kernels.cuda.joined_heads import refuse_joined_heads
from circuitgraph.plan.fuse import NORMED, QKV
from tests.cuda.test_emit import source_of
from tests.cuda.test_warpgroups import NO_JOIN, PARAMS, RULES, dflash, groups_of, plan_of, refusals_of


def kernels_of(source: str) -> dict[str, str]:
    """Text by the names of pointers that a kernel gets, without the layer."""
    found = re.findall(r"__global__ void __launch_bounds__\(\d+\) \w+\(([^)]*)\) \{(.*?)\n\}", source, flags=re.S)
    return {" ".join(re.findall(r"(\w+)_ptr", arguments)).replace("layers_0_", ""): text for arguments, text in found}


def kernel_with(kernels: dict[str, str], *names: str) -> tuple[str, str]:
    (found,) = [(arguments, text) for arguments, text in kernels.items() if set(names) <= set(arguments.split())]
    return found


@pytest.mark.parametrize("rows", [32, 128])
def test_there_is_a_launch_less_for_every_norm_and_for_the_cache(rows):
    joined, apart = (kernels_of(source_of(plan_of(dflash(), rows, rules=rules))) for rules in (RULES, NO_JOIN))
    assert len(apart) - len(joined) == 3  # two norms, and norms of heads, RoPE and append


@pytest.mark.parametrize("rows", [16, 32, 128])
def test_heads_are_normed_rotated_and_appended_from_the_parts(rows):
    plan = plan_of(dflash(), rows)
    parts = PARAMS.tile(plan, groups_of(plan)[QKV]).parts
    arguments, text = kernel_with(kernels_of(source_of(plan)), "kv_slot", "sums")
    assert {"kv_k", "kv_v", "attn_q_norm", "attn_k_norm", "rope_cos", "rope_sin", "position"} <= set(arguments.split())
    assert not [name for name in arguments.split() if "linear" in name], "sums are not left in memory once more"
    early, _, late = text.partition("griddepcontrol_wait")
    heads = max(1, rows // 32)  # of a warp, so that some 1536 are enough
    assert early.count("&(sums_ptr[") == heads, "queries, keys and values are one piece of code"
    assert (early.count("ld_vec_global"), late.count("ld_vec_global_v2_f32(")) == (0, heads * parts * 2)
    assert late.count("warp_reduce_sum") == heads, "values are not normed apart"
    for known in ("position", "rope_cos", "rope_sin", "attn_q_norm", "attn_k_norm", "kv_slot"):
        assert known in early, "what is there before the program is asked for ahead"
        assert known not in late


def test_every_head_is_made_once():
    for rows, warps in ((16, 768), (32, 1536), (128, 1536)):
        source = source_of(plan_of(dflash(), rows))
        (blocks,) = {int(found) for found in re.findall(r"unit_ptr\[0\] = min\(.*, (\d+)\);", source)}
        assert blocks == warps - 1


@pytest.mark.parametrize(
    ("sizes", "said"),
    [
        ({"attention_bias": True}, "adds no biases"),
        ({"storage": "fp8 128x128"}, "multiplies no sums by scales"),
        ({"head_dim": 96}, "makes heads of as many columns, a multiple of 64"),
        ({}, None),
    ],
)
def test_other_heads_keep_the_general_code(sizes, said):
    plan = plan_of(dflash(**sizes), 32)
    group = groups_of(plan)[QKV]
    assert refuse_joined_heads(plan, group) == said
    assert ("unit_ptr[0] = min(" in source_of(plan)) == (said is None)


def test_a_row_is_joined_and_normed_by_a_cluster():
    plan = plan_of(dflash(), 32)
    arguments, text = kernel_with(kernels_of(source_of(plan)), "post_norm", "sums")
    assert {"x", "rms_norm_2"} <= set(arguments.split()), "the sum is stored for the residual, and its norm for gate and up"
    assert text.count("mapa") == 1
    assert text.index("post_norm_ptr") < text.index("griddepcontrol_wait") < text.index("sums_ptr")
    after = text[text.index("mapa") :]
    assert "barrier_cluster_wait" in after, "no block ends while another may read its shared memory"


def test_the_last_norm_is_joined_for_the_head():
    plan = plan_of(dflash(), 64)
    last = [group for group in plan.groups if group.pattern == NORMED][-1]
    assert plan.crossing(last) == (last.epilogue[-1].name,)
    assert groups_of(plan)["head"].prologue == ()


def test_products_in_one_part_have_no_such_launch():
    plan = plan_of(dflash(), 256)
    assert "columns in one part, which no second launch adds (qkv)" in refusals_of(plan)
    assert QKV not in groups_of(plan)
    assert NORMED in groups_of(plan)
