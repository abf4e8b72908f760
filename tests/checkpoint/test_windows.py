"""Which cache rows a config says that each layer sees."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from circuitgraph.checkpoint import default_config, load_circuit, load_family
from circuitgraph.checkpoint.config import read_raw
from circuitgraph.circuit.check import check
from circuitgraph.circuit.ir import Node
from circuitgraph.errors import CheckpointError, CircuitError
from circuitgraph.ops.cache import Sight

FULL, SLIDING = "full_attention", "sliding_attention"
ON = {"use_sliding_window": True, "sliding_window": 64}
CHAINS = ("llama_mtp", "mimo_mtp", "eagle3_llama")


def told(family: str, **config: Any) -> dict[str, list]:
    values = load_family(family).read_config(read_raw({**default_config(family), **config})).values
    return {name: values[name] for name in ("windows", "causal")}


def refusal(family: str, **config: Any) -> str:
    with pytest.raises(CheckpointError) as caught:
        told(family, **config)
    return str(caught.value)


@pytest.mark.parametrize("family", CHAINS)
@pytest.mark.parametrize(
    ("config", "window"),
    [
        ({}, 0),
        ({"sliding_window": 64, "use_sliding_window": False}, 0),
        ({"sliding_window": 1 << 20}, 0),
        ({"layer_types": [FULL, FULL], "sliding_window": 64}, 0),
        ({**ON, "max_window_layers": 0}, 64),
        ({"layer_types": [SLIDING] * 3, "sliding_window": 64, "use_sliding_window": None}, 64),
        ({"layer_types": [SLIDING], **ON}, 64),
        ({"layer_types": [SLIDING], **ON, "sliding_window": 1 << 20}, 0),
    ],
)
def test_a_chain(family: str, config: dict, window: int) -> None:
    assert told(family, **config)["windows"] == [window]


def test_layers_at_the_top_have_the_window() -> None:
    """transformers' Qwen2Config: layers from max_window_layers on."""
    config = {**ON, "num_hidden_layers": 3, "max_window_layers": 2, "layer_types": None}
    assert told("eagle3_llama", **config)["windows"] == [0, 0, 64]
    circuit = load_circuit("eagle3", config={**default_config("eagle3_llama"), **config})
    assert [Sight.of(node.attr).window for node in circuit.nodes if node.op == "attention"] == [0, 0, 64]


def test_the_layer_behind_the_target_has_its_own_kind() -> None:
    of = {**ON, "num_hidden_layers": 36}
    assert told("mimo_mtp", **of, layer_types=[FULL] * 36 + [SLIDING])["windows"] == [64]
    mixed = refusal("mimo_mtp", **of, layer_types=[FULL, SLIDING] * 18)
    assert "which rows the drafter's layers see; expected 37 items, or all the same; got 36 items" in mixed
    unknown = refusal("mimo_mtp", **ON, num_hidden_layers=None, layer_types=[FULL, SLIDING] * 18)
    assert "layer_types: does not say which rows the drafter's layers see; expected items that are the same" in unknown
    some = refusal("mimo_mtp", **of, max_window_layers=36)
    assert "max_window_layers: does not say which rows the drafter's layer sees; expected 0, or layer_types; got 36" in some


@pytest.mark.parametrize(
    ("config", "windows", "causal"),
    [
        ({}, [0, 0], [False, False]),
        ({"layer_types": [SLIDING, FULL], **ON}, [64, 0], [True, False]),
        ({"layer_types": [SLIDING, FULL], "sliding_window": 64}, [64, 0], [True, False]),
        ({"layer_types": [SLIDING, FULL], **ON, "is_causal": False}, [64, 0], [False, False]),
        ({"layer_types": [FULL, FULL], "is_causal": True}, [0, 0], [True, True]),
        ({"dflash_config": {"causal": True}}, [0, 0], [True, True]),
        ({"dflash_config": {"use_swa": True, "swa_window_size": 48}}, [48, 48], [False, False]),
        ({"dflash_config": {"use_swa": True}, "sliding_window": 48, "layer_types": [FULL, FULL]}, [48, 48], [False, False]),
        ({"dflash_config": {"use_swa": True}, "layer_types": [SLIDING, FULL], **ON}, [64, 0], [True, False]),
        ({"dflash_config": {"use_swa": False}, "layer_types": [SLIDING, FULL], "sliding_window": 64}, [64, 0], [True, False]),
        ({"dflash_config": {"use_swa": True, "swa_window_size": 48}, "use_sliding_window": False}, [48, 48], [False, False]),
        ({**ON, "max_window_layers": 1}, [0, 64], [False, True]),
        ({**ON, "max_window_layers": 0, "use_swa": True}, [64, 64], [True, True]),
        ({**ON, "max_window_layers": 2, "use_swa": True}, [64, 64], [False, False]),
        ({"sliding_window": 64, "swa_window_size": 48, "use_sliding_window": False}, [0, 0], [False, False]),
        ({"layer_types": [SLIDING, FULL], "swa_window_size": 48}, [48, 0], [True, False]),
        ({"dflash_config": {"use_swa": False, "swa_window_size": 48}}, [0, 0], [False, False]),
        ({"use_swa": True, "swa_window_size": 48, "causal": True}, [48, 48], [True, True]),
    ],
)
def test_a_block_drafter(config: dict, windows: list[int], causal: list[bool]) -> None:
    """vLLM's _resolve_layer_attention on transformers' Qwen3Config, and z-lab's is_causal."""
    inner = {**default_config("dflash_qwen3")["dflash_config"], **config.get("dflash_config", {})}
    assert told("dflash_qwen3", **{**config, "dflash_config": inner}) == {"windows": windows, "causal": causal}


@pytest.mark.parametrize(
    ("family", "config", "message"),
    [
        ("llama_mtp", {"sliding_window": 64}, "sliding_window: a window, and no word on which layers have it; expected null"),
        (
            "llama_mtp",
            {**ON, "sliding_window": None, "max_window_layers": 0},
            "sliding_window: the key is missing; expected a window's rows, since max_window_layers has windows",
        ),
        ("llama_mtp", ON, "max_window_layers: the key is missing; expected 0 or more layers at the bottom"),
        ("eagle3_llama", {**ON, "layer_types": [SLIDING, FULL] * 18}, "expected 1 items, or all the same; got 36 items"),
        ("dflash_qwen3", {**ON, "layer_types": [FULL] * 35 + [SLIDING]}, "expected 2 items, or all the same; got 36 items"),
        (
            "dflash_qwen3",
            {"use_swa": True, "sliding_window": 64, "use_sliding_window": False},
            "use_sliding_window: the config gives two values; expected true, since use_swa has windows; got False",
        ),
        (
            "dflash_qwen3",
            {**ON, "sliding_window": 15, "layer_types": [FULL, SLIDING]},
            "sliding_window: the window is shorter than a block; expected 16 or more, the rows of a block; got 15",
        ),
        ("llama_mtp", {**ON, "sliding_window": "64"}, "sliding_window: the value is of the wrong kind; expected a pos"),
        ("llama_mtp", {**ON, "sliding_window": True}, "sliding_window: the value is of the wrong kind; expected a pos"),
        ("llama_mtp", {**ON, "sliding_window": 0}, "sliding_window: the value is of the wrong kind; expected a pos"),
        ("llama_mtp", {**ON, "use_sliding_window": 1}, "use_sliding_window: the value is of the wrong kind; expected true"),
        ("llama_mtp", {**ON, "max_window_layers": -1}, "max_window_layers: the value is of the wrong kind; expected 0 or more"),
        ("llama_mtp", {**ON, "layer_types": ["linear_attention"]}, "layer_types: layers of this kind are not modelled; expected"),
        (
            "dflash_qwen3",
            {**ON, "layer_types": [SLIDING, None]},
            "layers of this kind are not modelled; expected 'full_attention'",
        ),
        ("mimo_mtp", {**ON, "layer_types": [None, None]}, "layers of this kind are not modelled; expected 'full_attention'"),
        (
            "dflash_qwen3",
            {"use_swa": True, "dflash_config": {"use_swa": False}, "swa_window_size": 48},
            "use_swa: the config gives two values; expected False as in dflash_config.use_swa; got True",
        ),
        ("llama_mtp", {**ON, "layer_types": SLIDING}, "layer_types: the value is of the wrong kind; expected a list"),
        ("eagle3_llama", {**ON, "layer_types": [SLIDING, FULL], "num_hidden_layers": 3}, "got 2 items. Give 'full_attention' or"),
        (
            "dflash_qwen3",
            {"layer_types": [SLIDING, FULL], "sliding_window": 64, "use_sliding_window": False},
            "use_sliding_window: the config gives two values; expected true, since layer_types has windows; got False",
        ),
        (
            "dflash_qwen3",
            {"layer_types": [SLIDING, FULL], "sliding_window": 64, "swa_window_size": 65},
            "sliding_window: the config gives two values; expected 65 as in swa_window_size; got 64. Engines differ in which",
        ),
        ("dflash_qwen3", {"causal": True, "is_causal": False}, "is_causal: the config gives two values; expected True as in"),
        ("dflash_qwen3", {"is_causal": "yes"}, "is_causal: the value is of the wrong kind; expected true or false; got 'yes'"),
        ("dflash_qwen3", {"use_swa": True}, "sliding_window: the key is missing; expected a window's rows, since use_swa"),
        (
            "dflash_qwen3",
            {
                **ON,
                "layer_types": [SLIDING, FULL],
                "rope_theta": None,
                "sliding_window": 1 << 20,
                "rope_parameters": {FULL: {"rope_theta": 1e6}, SLIDING: {"rope_theta": 1e4}},
            },
            "rope_parameters.sliding_attention: layers with a window rotate otherwise; expected the same as of full_attention",
        ),
    ],
)
def test_refused(family: str, config: dict, message: str) -> None:
    assert message in refusal(family, **config)


def test_sets_that_say_the_same_are_one_rotation() -> None:
    sets = {FULL: {"rope_theta": 1e6, "rope_type": "default"}, SLIDING: {"rope_theta": 1e6, "factor": None}}
    config = {**ON, "layer_types": [SLIDING, FULL], "rope_theta": None, "rope_parameters": sets}
    assert told("dflash_qwen3", **config)["windows"] == [64, 0]


@pytest.mark.parametrize(("program", "family"), [("dflash", "dflash_qwen3"), ("eagle3", "eagle3_llama")])
def test_layers_without_end_are_refused(program: str, family: str) -> None:
    config = {**default_config(family), **ON, "layer_types": [SLIDING], "num_hidden_layers": 10**9}
    with pytest.raises(CheckpointError, match="num_hidden_layers: is no number of layers; expected 1 to 1000; got 1000000000"):
        load_circuit(program, config=config)


def test_a_program_says_its_blocks() -> None:
    """Rows find their own place by the blocks of their entry: the same for all kernels."""
    config = {**default_config("dflash_qwen3"), "is_causal": True}
    circuit = load_circuit("dflash", config=config)
    check(circuit)
    for block in (1, 8):
        nodes = [with_attr(node, block=block) if node.op == "attention" else node for node in circuit.nodes]
        with pytest.raises(CircuitError, match=rf"than its entry 'draft'; expected block=16; got block={block}"):
            check(circuit.with_nodes(tuple(nodes)))


def with_attr(node: Node, **attrs: Any) -> Node:
    return replace(node, attrs=tuple((dict(node.attrs) | attrs).items()))


def test_latents_have_no_window() -> None:
    """A family without `windows` refuses what its program does not model."""
    with pytest.raises(CheckpointError, match="family 'deepseek_v3_mtp' does not model a sliding window"):
        load_circuit("mtp_mla", family="deepseek_v3_mtp", config={**default_config("deepseek_v3_mtp"), "sliding_window": 64})
