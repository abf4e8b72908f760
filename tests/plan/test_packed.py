"""Which quantised weights are given up where kernels cannot read all of a group's: few bytes, and no product's for a router."""

from __future__ import annotations

from dataclasses import replace

import pytest

from circuitgraph.circuit.ir import Storage
from circuitgraph.language import Bindings, load_program, resolve
from circuitgraph.plan.packed import unreadable
from circuitgraph.plan.schedule import load_schedule
from tests.circuits import SMALL, small_mtp

SIZES = {**SMALL, "hidden_size": 1024, "num_experts": 128, "moe_intermediate_size": 256, "head_dim": 64, "rotary_dim": 64}
PIECES = [("draft", 1), ("draft", 8), ("context", 16)]


def stored(circuit, text):
    """Every matrix in one storage, as `--quantize "*=..."` has it."""
    storage = Storage.parse(text)
    return circuit.with_storage({item.name: storage for item in circuit.weights if storage.refuse(item.type) is None})


@pytest.mark.parametrize("text", ["fp8 per row", "fp8 128x128", "int8 per row"])
@pytest.mark.parametrize("shared", [128, 256])
def test_experts_keep_what_their_router_loses(text, shared):
    """The kernel wants the router and the shared expert's gate plain. With 128, a shared matrix is as small as the router."""
    sizes = {**SIZES, "shared_expert_intermediate_size": shared}
    circuit = resolve(load_program("mtp_moe"), Bindings(sizes, {"shared_gate": True}, "bf16", "bf16", "bf16"))
    given_up = unreadable(stored(circuit, text), PIECES, "cuda:sm_90a", load_schedule("cuda"))
    assert set(given_up) == {"embed_tokens", "layer.ffn.router", "layer.ffn.shared_gate_vector"}
    assert "reads experts of one storage, shared ones too, and all else unpacked" in given_up["layer.ffn.router"]


class Picky:
    """A kernel that reads one storage at a time, and k_proj plain."""

    @staticmethod
    def refuse(plan, group, params):
        names = {node.inputs[1] for node in group.nodes if node.op == "linear"}
        if len({plan.circuit.storage.get(name) for name in names}) > 1:
            return "two storages"
        return "k_proj" if "layer.attn.k_proj" in names & set(plan.circuit.storage) else None


def test_siblings_are_cut_anew_without_what_is_given_up():
    rules = [replace(rule, kernel=Picky, last=None, first=1) for rule in load_schedule("cpu")]
    circuit = stored(small_mtp(), "int8 per row")
    assert list(unreadable(circuit, PIECES, "cpu", rules)) == ["layer.attn.k_proj"]
