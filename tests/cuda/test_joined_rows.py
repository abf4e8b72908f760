"""What follows products in parts, in the launch that adds them: which kernels there are, and what they read and store."""

import re

import pytest

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
    assert text.count("sums_ptr[") == parts * 4 * 3  # of four columns of a lane, of a query, a key and a value
    assert text.index("position_ptr") < text.index("griddepcontrol_wait"), "what is there before the program is asked for ahead"
    assert text.index("griddepcontrol_wait") < text.index("sums_ptr")


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
