"""The circuit's data structure, its views, and the verifier between stages."""

from __future__ import annotations

from dataclasses import replace

import pytest

from circuitgraph.circuit.check import check
from circuitgraph.circuit.ir import Circuit, Entry, Input, Node, State, Table, Value, Weight
from circuitgraph.circuit.text import format_node
from circuitgraph.circuit.types import TensorType
from circuitgraph.errors import CircuitError
from tests.circuits import EVERYTHING, small_mtp

ROW = TensorType("f32", ("n", 4))


def add(name: str, left: str, right: str) -> Node:
    return Node("add", (left, right), (Value(name, ROW),))


def circuit(*nodes: Node, output: str = "c", **changes) -> Circuit:
    """Two inputs a and b, and `nodes`."""
    made = Circuit(
        name="adder",
        dtypes=(("act", "f32"), ("wt", "bf16"), ("kv", "f32")),
        inputs=(Input("a", ROW), Input("b", ROW)),
        states=(),
        tables=(),
        weights=(),
        nodes=nodes or (add("c", "a", "b"),),
        outputs=(("sum", output),),
        effects=(),
        entries=(Entry("draft", "sequences", ("sum",)),),
    )
    return replace(made, **changes)


def test_views() -> None:
    made = circuit(add("c", "a", "b"), add("d", "c", "c"), output="d")
    check(made)
    assert made.producer["d"].inputs == ("c", "c")
    assert [node.name for node in made.consumers("c")] == ["d"]
    assert [(a, b) for a, b, _ in made.graph().edges(keys=True)] == [("c", "d"), ("c", "d")]
    assert made.types["d"] == ROW
    assert made.entry("draft").outputs == ("sum",)
    with pytest.raises(KeyError, match="'adder' has no entry 'context'; it has draft"):
        made.entry("context")


def test_equality_does_not_depend_on_where_things_were_written() -> None:
    one, other = small_mtp(), small_mtp()
    assert one == other
    assert one.nodes[0].where is not None
    assert replace(one, nodes=(replace(one.nodes[0], where=None), *one.nodes[1:])) == other


def test_types() -> None:
    assert str(TensorType("bf16", ("n", 3))) == "bf16[n, 3]"
    assert TensorType("bf16", ("n", 3)).with_rows(5).bytes() == 30
    with pytest.raises(ValueError, match=r"bf16\[n, 3\] still has the open axis 'n'"):
        TensorType("bf16", ("n", 3)).elements()


def test_state_and_table_tensors() -> None:
    state = State("kv", "paged_kv", 2, 3, 8, "bf16")
    assert [str(value.type) for value in state.storage()] == ["bf16[2, kv_blocks, 3, kv_block_size, 8]"] * 2
    assert {value.name: str(value.type) for value in state.metadata()} == {
        "kv.slot": "i32[n]",
        "kv.seq": "i32[n]",
        "kv.table": "i32[kv_sequences, kv_table_width]",
        "kv.start": "i32[kv_sequences]",
        "kv.length": "i32[n]",
    }
    assert state.bytes_per_row() == 2 * 2 * 3 * 8 * 2
    assert [(value.name, str(value.type)) for value in Table("rope", "rope", 8).tensors()] == [
        ("rope.cos", "f32[rope_rows, 4]"),
        ("rope.sin", "f32[rope_rows, 4]"),
    ]


def test_nodes_print_as_the_language_writes_them() -> None:
    assert [format_node(node) for node in small_mtp().nodes[:3]] == [
        "e = embed(token, embed_tokens)",
        'e_2 = rms_norm(e, enorm, eps=1e-06, flavour="plain")',
        'h = rms_norm(hidden, hnorm, eps=1e-06, flavour="plain")',
    ]


@pytest.mark.parametrize("switches", [{}, EVERYTHING], ids=["plain", "everything"])
def test_shipped_circuits_pass(switches: dict) -> None:
    check(small_mtp(switches))


REFUSALS = {
    "cycle": (
        circuit(add("c", "a", "d"), add("d", "c", "b")),
        "adder: c: 'c' depends on itself: a cycle",
    ),
    "used before its definition": (
        circuit(add("c", "d", "b"), add("d", "a", "b")),
        "adder: c: 'd' is used before it is defined. Known: a, b.",
    ),
    "unknown op": (
        circuit(Node("ad", ("a", "b"), (Value("c", ROW),))),
        "adder: c: unknown op 'ad'. Did you mean 'add'?",
    ),
    "wrong type": (
        circuit(Node("add", ("a", "b"), (Value("c", TensorType("f32", ("n", 5))),))),
        "adder: c: add makes other types; expected f32[n, 4]; got f32[n, 5]",
    ),
    "defined twice": (circuit(add("c", "a", "b"), add("c", "b", "a")), "adder: c: 'c' is defined twice"),
    "dead node": (
        circuit(add("c", "a", "b"), add("d", "a", "b")),
        "adder: d: nothing uses this value. Remove the line, or make it an output.",
    ),
    "dead weight": (
        circuit(weights=(Weight("w", TensorType("bf16", (3,))),)),
        "adder: weight 'w' is used by nothing",
    ),
    "no such output": (circuit(output="x"), "adder: output 'sum' is 'x', which is no tensor of the circuit"),
    "no such state": (
        circuit(effects=(("kv", "c"),)),
        "adder: state 'kv' ends as 'c', which is no version of it",
    ),
    "entry": (
        circuit(entries=(Entry("draft", "sequences", ("total",), ("kv",)),)),
        "adder: entry 'draft' has no output 'total'\nadder: entry 'draft' has no state 'kv'",
    ),
}


@pytest.mark.parametrize(("made", "message"), REFUSALS.values(), ids=REFUSALS)
def test_refusals(made: Circuit, message: str) -> None:
    with pytest.raises(CircuitError) as caught:
        check(made)
    # A fault often has others behind it; the first is the one that is meant.
    assert "\n".join(str(caught.value).split("\n")[: message.count("\n") + 1]) == message


def test_a_fault_of_types_keeps_its_place() -> None:
    made = small_mtp()
    narrow = replace(made.weights[1], type=TensorType("bf16", (3,)))
    with pytest.raises(CircuitError) as caught:
        check(replace(made, weights=(made.weights[0], narrow, *made.weights[2:])))
    line = str(caught.value)
    assert line.startswith("programs/mtp_dense.yaml:")
    assert line.endswith(": e_2: rms_norm: the scale has the wrong shape; expected [48]; got bf16[3]")
