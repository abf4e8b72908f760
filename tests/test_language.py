"""The circuit language: every switch combination resolves and prints back; every kind of refusal, word by word."""

from __future__ import annotations

import itertools
import json
import random
import re
from pathlib import Path

import pytest

from circuitgraph.checkpoint import RawConfig, load_circuit, load_family, shipped_families
from circuitgraph.checkpoint.family import families_of
from circuitgraph.circuit.check import check
from circuitgraph.circuit.ir import Circuit
from circuitgraph.circuit.text import circuit_from_json, circuit_to_json, format_circuit
from circuitgraph.errors import ProgramError
from circuitgraph.language import Bindings, load_program, parse_circuit, resolve, shipped_programs, switch_space
from tests.circuits import SMALL

DOCS = Path(__file__).parents[1] / "docs"

PROGRAM = """\
program: small
dims: {H: hidden_size, V: 8}
params: {eps: rms_norm_eps}
switches:
  concat: [embed_first, hidden_first]
  norm: [plain, zero_centred]
inputs:
  token: i32[n]
  hidden: act[n, H]
weights:
  table: "wt[V, H]"
  scale: "wt[H]"
  fc: "wt[H, 2*H]"
  ffn: {block: tiny}
body:
  - e = rms_norm(embed(token, table), scale, eps=eps, flavour=norm)
  - x = linear(select(concat, embed_first=cat(e, hidden), hidden_first=cat(hidden, e)), fc)
  - y = tiny(x, weights=ffn)
outputs: {y: y}
entries:
  draft: {outputs: [y]}
"""
BLOCK = """\
block: tiny
doc: A projection.
args: [x]
weights:
  down: "wt[H, H]"
body:
  - y = linear(x, down)
returns: [y]
"""
CONFIG = {"hidden_size": 4, "rms_norm_eps": 1e-5}


@pytest.fixture(autouse=True)
def in_tmp(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Messages name paths, so work where they are short."""
    monkeypatch.chdir(tmp_path)
    Path("blocks").mkdir()


def load(edits: list[tuple[str, str]], **bindings) -> Circuit:
    """Resolve PROGRAM with some text replaced, in the block's file where it stands there."""
    texts = {"p.yaml": PROGRAM, "blocks/tiny.yaml": BLOCK}
    for old, new in edits:
        file = "p.yaml" if old in PROGRAM else "blocks/tiny.yaml"
        assert texts[file].count(old) == 1, f"{old!r} does not stand once in {file}"
        texts[file] = texts[file].replace(old, new)
    for file, text in texts.items():
        Path(file).write_text(text)
    return resolve(load_program("p.yaml"), Bindings(**{"config": CONFIG, **bindings}))


def refusal(edits: list[tuple[str, str]], **bindings) -> str:
    with pytest.raises(ProgramError) as caught:
        load(edits, **bindings)
    return str(caught.value)


# -- what resolves -------------------------------------------------------------------------------------------------


def test_the_program_of_these_tests_is_fine() -> None:
    circuit = load([])
    assert [str(weight.type) for weight in circuit.weights] == ["bf16[8, 4]", "bf16[4]", "bf16[4, 8]", "bf16[4, 4]"]
    assert [weight.name for weight in circuit.weights][-1] == "ffn.down"


@pytest.mark.parametrize("name", shipped_programs())
def test_every_switch_combination(name: str) -> None:
    """All of them resolve and pass the verifier; a sample survives JSON, and printing and parsing (10 ms each)."""
    program = load_program(name)
    space = switch_space(program)
    combinations = list(itertools.product(*space.values()))
    printed = set(random.Random(0).sample(range(len(combinations)), min(200, len(combinations))))
    for index, values in enumerate(combinations):
        circuit = resolve(program, Bindings(SMALL, dict(zip(space, values, strict=True))))
        check(circuit)
        if index in printed:
            assert circuit_from_json(json.loads(json.dumps(circuit_to_json(circuit)))) == circuit
            assert parse_circuit(format_circuit(circuit)) == circuit


@pytest.mark.parametrize("family", shipped_families())
def test_every_family_has_an_example_that_resolves(family: str) -> None:
    file = load_family(family).file
    assert file.family == family
    circuit = load_circuit(file.program, family)
    check(circuit)
    assert parse_circuit(format_circuit(circuit)) == circuit
    assert set(file.switches) == set(switch_space(load_program(file.program))), "a family states every switch"


@pytest.mark.parametrize("program", shipped_programs())
def test_each_program_has_one_default_family(program: str) -> None:
    assert sum(family.file.default for family in families_of(program)) == 1


def test_families_recognise_their_own_example_and_no_other() -> None:
    families = families_of(None)
    for one in families:
        raw = RawConfig(one.file.example, "example")
        assert [family.name for family in families if family.recognises(raw)] == [one.name]


def test_the_manuals_examples_load() -> None:
    program, _, block, family = re.findall(r"```yaml\n(.*?)```", (DOCS / "language.md").read_text(), re.DOTALL)
    for file, text in {"tiny_mtp.yaml": program, "blocks/gated_ffn.yaml": block, "family.yaml": family}.items():
        Path(file).write_text(text)
    for order in ("embed_first", "hidden_first"):
        circuit = resolve(load_program("tiny_mtp.yaml"), Bindings(SMALL, {"concat": order}))
        check(circuit)
        assert parse_circuit(format_circuit(circuit)) == circuit
    assert load_family("family.yaml").name == "mimo_mtp"


def test_dtypes_of_single_weights() -> None:
    circuit = load([], act="bf16", wt="f16", weight_dtypes={"ffn.down": "f32"})
    assert [weight.type.dtype for weight in circuit.weights] == ["f16", "f16", "f16", "f32"]
    assert str(circuit.types[dict(circuit.outputs)["y"]]) == "bf16[n, 4]"
    assert parse_circuit(format_circuit(circuit)) == circuit


def test_a_blocks_weights_do_not_hide_the_programs() -> None:
    circuit = load(
        [('fc: "wt[H, 2*H]"', 'down: "wt[H, 2*H]"'), ("hidden_first=cat(hidden, e)), fc)", "hidden_first=cat(hidden, e)), down)")]
    )
    assert [node.inputs[1] for node in circuit.nodes if node.op == "linear"] == ["down", "ffn.down"]


def test_one_block_twice() -> None:
    circuit = load(
        [
            ("  ffn: {block: tiny}", "  ffn: {block: tiny}\n  more: {block: tiny}"),
            ("y = tiny(x, weights=ffn)", "y = tiny(tiny(x, weights=ffn), weights=more)"),
        ]
    )
    assert [node.inputs[1] for node in circuit.nodes if node.op == "linear"][1:] == ["ffn.down", "more.down"]
    assert len({value.name for node in circuit.nodes for value in node.outputs}) == len(circuit.nodes)


# -- what is refused -----------------------------------------------------------------------------------------------

SELECT = "select(concat, embed_first=cat(e, hidden), hidden_first=cat(hidden, e))"
LAST = "y = tiny(x, weights=ffn)"
REFUSALS: dict[str, tuple[list[tuple[str, str]], str]] = {
    "unknown op": ([("linear(select", "lineer(select")], "p.yaml:17: x: unknown op 'lineer'. Did you mean 'linear'?"),
    "unknown name": (
        [("y = tiny(x,", "y = tiny(z,")],
        "p.yaml:18: y: unknown name 'z'. Known: e, fc, ffn, ffn.down, hidden, scale, table, token, x.",
    ),
    "unknown name in a block": (
        [("linear(x, down)", "linear(x, dwn)")],
        "blocks/tiny.yaml:7: y: unknown name 'dwn'. Did you mean 'down'?",
    ),
    "unknown name in a group": (
        [("embed(token, table)", "embed(token, ffn.up)")],
        "p.yaml:16: e: 'ffn' has no 'up' here. Known: ffn.down.",
    ),
    "unknown switch": ([("select(concat,", "select(concta,")], "p.yaml:17: no switch 'concta'. Did you mean 'concat'?"),
    "unknown switch value": (
        [("embed_first=cat", "embed=cat")],
        "p.yaml:17: switch 'concat' has no value 'embed'; expected embed_first, hidden_first\n"
        "p.yaml:17: x: select(concat) has no case for 'embed_first'",
    ),
    "unknown switch in when": (
        [(f"  - {LAST}", f"  - when: {{conct: embed_first}}\n    do:\n      - {LAST}\n    otherwise:\n      - {LAST}")],
        "p.yaml:18: no switch 'conct'. Did you mean 'concat'?",
    ),
    "unknown dimension": ([("2*H]", "2*HH]")], "p.yaml:13: fc: unknown dimension 'HH'. Did you mean 'H'?"),
    "unknown key": ([("weights:\n  table", "weigths:\n  table")], "p.yaml:10: unknown key 'weigths'. Did you mean 'weights'?"),
    "unknown key in an entry": (
        [("draft: {outputs: [y]}", "draft: {outputs: [y], widths: 3}")],
        "p.yaml:21: unknown key 'widths'. See docs/language.md for the keys.",
    ),
    "unknown key of a weight": ([("{block: tiny}", "{blok: tiny}")], "p.yaml:14: unknown key 'blok'. Did you mean 'block'?"),
    "unknown key of a condition": (
        [(f"  - {LAST}", f"  - when: {{concat: embed_first}}\n    then:\n      - {LAST}")],
        "p.yaml:18: key 'body.2.do' is missing\np.yaml:19: unknown key 'then'. See docs/language.md for the keys.",
    ),
    "unknown block": ([("{block: tiny}", "{block: tinny}")], "p.yaml:14: no block 'tinny'. Did you mean 'tiny'?"),
    "unknown dtype": (
        [('scale: "wt[H]"', 'scale: "xt[H]"')],
        "p.yaml:12: scale: unknown dtype 'xt'. Known: act, bf16, f16, f32, i32, i64, kv, u8, wt.",
    ),
    "unknown argument of an op": (
        [("eps=eps", "epsilon=eps")],
        "p.yaml:16: e: op 'rms_norm' has no argument 'epsilon'. Did you mean 'eps'?",
    ),
    "unknown argument of a block": (
        [(LAST, "y = tiny(x, weigths=ffn)")],
        "p.yaml:18: y: block 'tiny' has no argument 'weigths'. Did you mean 'weights'?",
    ),
    "unknown output": (
        [("draft: {outputs: [y]}", "draft: {outputs: [z]}")],
        "p.yaml:21: entry 'draft' has no output 'z'. Known: y.",
    ),
    "unknown state": (
        [("draft: {outputs: [y]}", "draft: {outputs: [y], effects: [kv]}")],
        "p.yaml:21: entry 'draft' names no state 'kv'",
    ),
    "key is missing": ([("outputs: {y: y}\n", "")], "p.yaml:1: key 'outputs' is missing"),
    "key has another kind": (
        [("{block: tiny}", "{type: 3}")],
        "p.yaml:14: weights.ffn.type: Input should be a valid string; got 3",
    ),
    "key has no such value": (
        [("draft: {outputs: [y]}", "draft: {rows: columns}")],
        "p.yaml:21: entries.draft.rows: Input should be 'sequences', 'context' or 'block'; got 'columns'",
    ),
    "key is given twice": (
        [("outputs: {y: y}", "outputs: {y: y, y: x}")],
        "p.yaml:19: key 'y' is given twice. Remove one of them.",
    ),
    "not YAML": (
        [("program: small", "\tprogram: small")],
        "p.yaml:1: not valid YAML: found character '\\t' that cannot start any token",
    ),
    "not YAML, unclosed": (
        [("outputs: {y: y}", "outputs: {y: y")],
        "p.yaml:20: not valid YAML: expected ',' or '}', but got ':'",
    ),
    "not a statement": (
        [(LAST, "tiny(x, weights=ffn)")],
        "p.yaml:18: a body line is one assignment, 'name = op(...)': 'tiny(x, weights=ffn)'",
    ),
    "not closed": (
        [(LAST, "y = tiny(x, weights=ffn")],
        "p.yaml:18: cannot parse 'y = tiny(x, weights=ffn': '(' was never closed",
    ),
    "not in the language": (
        [(LAST, "y = x if x else e")],
        "p.yaml:18: 'x if x else e' is not part of the language. Use calls of ops and blocks, names, numbers "
        "and + - * // in dimensions.",
    ),
    "not a value": ([(LAST, "y = 3")], "p.yaml:18: y: a value is a name or a call"),
    "not a type": ([('scale: "wt[H]"', 'scale: "wt(H)"')], "p.yaml:12: scale: a type is written dtype[dims]: 'wt(H)'"),
    "starred": ([(LAST, "y = tiny(*x, weights=ffn)")], "p.yaml:18: '*' arguments are not part of the language"),
    "wrong shape": (
        [('scale: "wt[H]"', 'scale: "wt[V]"')],
        "p.yaml:16: e: rms_norm: the scale has the wrong shape; expected [4]; got bf16[8]",
    ),
    "wrong shape, half": (
        [("2*H]", "H]")],
        "p.yaml:17: x: linear: input and weight do not fit; expected a weight [out, 8]; got bf16[4, 4]",
    ),
    "wrong shape, transposed": (
        [('down: "wt[H, H]"', 'down: "wt[H, 2*H]"')],
        "blocks/tiny.yaml:7: y: linear: input and weight do not fit; expected a weight [out, 4]; got bf16[4, "
        "8]. The weight reads twice the columns: concatenate a second input first?",
    ),
    "wrong rank": (
        [("2*H]", "2*H, 3]")],
        "p.yaml:17: x: linear: the weight has the wrong number of axes; expected 2 axes; got bf16[4, 8, 3]",
    ),
    "wrong dtype": ([("cat(e, hidden)", "cat(e, token)")], "p.yaml:17: x: cat: argument 2 must be a float tensor; got i32[n]"),
    "dimension does not divide": ([("2*H]", "H*2//3]")], "p.yaml:13: fc: 8 // 3 is not whole"),
    "dimension of nothing": ([("2*H]", "H-4]")], "p.yaml:13: fc: dimension 'H-4' is 0; expected 1 or more"),
    "odd rotation": (
        [("inputs:", "tables:\n  rope: {kind: rope, dim: 3}\ninputs:")],
        "p.yaml:8: rope: a RoPE table turns pairs of columns; expected an even dim; got 3",
    ),
    "rows in a table": (
        [("inputs:", "tables:\n  rope: {kind: rope, dim: n}\ninputs:")],
        "p.yaml:8: rope: the row axis has no place here; expected a dimension; got n",
    ),
    "used before its definition": (
        [("embed(token, table)", "x")],
        "p.yaml:16: e: 'x' is used before it is defined (line 17); a body is read from top to bottom",
    ),
    "cycle of one": ([("embed(token, table)", "e")], "p.yaml:16: e: 'e' is defined by itself: a cycle"),
    "cycle of two": (
        [("embed(token, table)", "y")],
        "p.yaml:16: e: 'y' is used before it is defined (line 18); a body is read from top to bottom",
    ),
    "block that uses itself": (
        [('down: "wt[H, H]"', 'down: "wt[H, H]"\n  again: {block: tiny}')],
        "blocks/tiny.yaml:6: block 'tiny' uses itself: tiny -> tiny",
    ),
    "block of another name": (
        [("block: tiny\ndoc", "block: tine\ndoc")],
        "blocks/tiny.yaml:1: the file is called 'tiny' but says 'block: tine'",
    ),
    "block that returns what it lacks": (
        [("returns: [y]", "returns: [z]")],
        "blocks/tiny.yaml:8: y: unknown name 'z'. Known: down, ffn.down, x, y.",
    ),
    "block argument that is a weight": (
        [("args: [x]", "args: [x, down]"), (LAST, "y = tiny(x, e, weights=ffn)")],
        "blocks/tiny.yaml:5: 'down' is declared in args and in weights",
    ),
    "attribute is missing": ([("eps=eps, ", "")], "p.yaml:16: e: op 'rms_norm' needs eps="),
    "attribute of another kind": (
        [("eps=eps", "eps=norm")],
        "p.yaml:16: e: rms_norm: eps= has the wrong kind; expected float; got 'plain'",
    ),
    "attribute from an unknown name": (
        [("eps=eps", "eps=esp")],
        "p.yaml:16: e: rms_norm: eps= is the unknown name 'esp'. Did you mean 'eps'?",
    ),
    "attribute without such a value": (
        [("flavour=norm", "flavour=odd")],
        "p.yaml:16: e: rms_norm: flavour= has no value 'odd'; expected plain, zero_centred",
    ),
    "switch with values of another op": (
        [("flavour=norm", "flavour=concat")],
        "p.yaml:16: e: rms_norm: flavour= has no value 'embed_first'; expected plain, zero_centred",
    ),
    "too few inputs": ([("embed(token, table)", "embed(token)")], "p.yaml:16: e: op 'embed' got 1 inputs; expected ids, table"),
    "too many inputs": (
        [("embed(token, table)", "embed(token, table, scale)")],
        "p.yaml:16: e: op 'embed' got 3 inputs; expected ids, table",
    ),
    "too many arguments of a block": (
        [(LAST, "y = tiny(x, e, weights=ffn)")],
        "p.yaml:18: y: block 'tiny' got other arguments; expected (x, weights=...)",
    ),
    "a group is no value": (
        [("embed(token, table)", "embed(token, ffn)")],
        "p.yaml:16: e: 'ffn' is a group of names, not a value",
    ),
    "a weight is no group": (
        [(LAST, "y = tiny(x, weights=scale)")],
        "p.yaml:18: y: weights= takes the name of a block's weights",
    ),
    "more names than values": ([(LAST, "y, z = tiny(x, weights=ffn)")], "p.yaml:18: 1 values are assigned to 2 names (y, z)"),
    "select without cases": (
        [(SELECT, "select(concat)")],
        "p.yaml:17: x: select is written select(switch, value=expression, ...)",
    ),
    "select without this case": (
        [(SELECT, "select(concat, hidden_first=cat(hidden, e))")],
        "p.yaml:17: x: select(concat) has no case for 'embed_first'",
    ),
    "argument given twice": (
        [("eps=eps, flavour=norm", "eps=eps, eps=eps")],
        "p.yaml:16: argument 'eps' is given twice: 'rms_norm(embed(token, table), scale, eps=eps, eps=eps)'",
    ),
    "argument of a block given twice": (
        [(LAST, "y = tiny(x, x=e, weights=ffn)")],
        "p.yaml:18: y: block 'tiny' gets argument 'x' twice",
    ),
    "effect of no state": (
        [("outputs: {y: y}", "outputs: {y: y}\neffects: {unknown: y}")],
        "p.yaml:20: no state 'unknown'. The program has no state.",
    ),
    "control character": (
        [("program: small", "program: sm\x01all")],
        "p.yaml:1: not valid YAML: special characters are not allowed; got #x0001",
    ),
    "alias": ([("V: 8}", "V: *v}")], "p.yaml:2: anchors and aliases are not part of the language"),
    "anchor": ([("V: 8}", "V: &v 8}")], "p.yaml:2: anchors and aliases are not part of the language"),
    "recursive alias": (
        [("params: {", "facts: &f {a: *f}\nparams: {")],
        "p.yaml:3: anchors and aliases are not part of the language",
    ),
    "a list as a key": ([("V: 8}", "[V]: 8}")], "p.yaml:2: a key is a name, not a list or a mapping"),
    "a date that is none": (
        [("V: 8}", "V: 2001-13-99}")],
        "p.yaml:2: cannot read the value: month must be in 1..12",
    ),
    "nested too deeply": ([("V: 8}", "V: " + "[" * 2000 + "]" * 2000 + "}")], "p.yaml: the file is nested too deeply"),
    "declared twice": ([('scale: "wt[H]"', 'token: "wt[H]"')], "p.yaml:12: 'token' is declared in inputs and in weights"),
    "output that is no tensor": ([("outputs: {y: y}", "outputs: {y: ffn}")], "p.yaml:19: output 'y' is not a tensor"),
    "entry of nothing": (
        [("draft: {outputs: [y]}", "draft: {}")],
        "p.yaml:21: entry 'draft' computes nothing. Give it outputs or effects.",
    ),
    "several at once": (
        [
            ("linear(select", "lineer(select"),
            ("table), scale", "table), scal"),
            ("returns: [y]", "returns: [z]"),
            ("draft: {outputs: [y]}", "draft: {outputs: [w]}"),
        ],
        "p.yaml:16: e: unknown name 'scal'. Did you mean 'scale'?\n"
        "p.yaml:17: x: unknown op 'lineer'. Did you mean 'linear'?\n"
        "p.yaml:21: entry 'draft' has no output 'w'. Known: y.",
    ),
    "several at once, keys": (
        [("{block: tiny}", "{blok: tiny}"), ("inputs:", "input:"), ("dims: {", "dmis: {")],
        "p.yaml:14: unknown key 'blok'. Did you mean 'block'?\n"
        "p.yaml:2: unknown key 'dmis'. Did you mean 'dims'?\n"
        "p.yaml:7: unknown key 'input'. Did you mean 'inputs'?",
    ),
}


@pytest.mark.parametrize(("edits", "message"), REFUSALS.values(), ids=REFUSALS)
def test_refusals(edits: list[tuple[str, str]], message: str) -> None:
    assert refusal(edits) == message


DECISIONS = {
    "unknown switch and value": (
        {"switches": {"concat": "both", "nrm": "plain"}},
        "p.yaml:5: switch 'concat' has no value 'both'; expected embed_first, hidden_first\n"
        "p.yaml:4: program 'small' has no switch 'nrm'. Did you mean 'norm'?",
    ),
    "absent config values": (
        {"config": {}},
        "p.yaml:2: dimension H needs 'hidden_size', which the config does not give\n"
        "p.yaml:3: parameter eps needs 'rms_norm_eps', which the config does not give",
    ),
    "a dimension of the wrong kind": (
        {"config": {**CONFIG, "hidden_size": "4"}},
        "p.yaml:2: dimension H must be a positive integer; got '4'",
    ),
    "a dtype that is none": (
        {"act": "f8"},
        "p.yaml:1: dtype parameter 'act' must be a float dtype; expected f32, bf16, f16; got f8",
    ),
}


@pytest.mark.parametrize(("bindings", "message"), DECISIONS.values(), ids=DECISIONS)
def test_decisions_that_are_refused(bindings: dict, message: str) -> None:
    assert refusal([], **bindings) == message


def test_an_unreadable_file() -> None:
    Path("p.yaml").write_bytes(b"program: \xff")
    with pytest.raises(ProgramError, match=r"p\.yaml: cannot read the file: 'utf-8' codec"):
        load_program("p.yaml")


def test_an_unknown_program() -> None:
    with pytest.raises(ProgramError) as caught:
        load_program("mtp_dens")
    assert str(caught.value) == "no program 'mtp_dens'. Did you mean 'mtp_dense'? Or give the path of a .yaml file."


# -- repetition ----------------------------------------------------------------------------------------------------

REPEATED = [
    ("ffn: {block: tiny}", "ffn: {block: tiny, repeat: L}"),
    ("dims: {H: hidden_size, V: 8}", "dims: {H: hidden_size, V: 8, L: layers}"),
    (
        "  - y = tiny(x, weights=ffn)\n",
        "  - repeat: {i: L}\n    do:\n      - x = tiny(x, weights=ffn[i])\n    collect: {y: cat(x)}\n",
    ),
]


def test_a_stack_of_layers() -> None:
    circuit = load(REPEATED, config={**CONFIG, "layers": 3})
    assert [weight.name for weight in circuit.weights][-3:] == ["ffn_0.down", "ffn_1.down", "ffn_2.down"]
    assert [node.inputs for node in circuit.nodes][-4:] == [
        ("x", "ffn_0.down"),
        ("ffn_0.y", "ffn_1.down"),
        ("ffn_1.y", "ffn_2.down"),
        ("ffn_0.y", "ffn_1.y", "ffn_2.y"),
    ]
    check(circuit)
    assert parse_circuit(format_circuit(circuit)) == circuit


def test_indices_are_numbers_for_blocks_and_ops() -> None:
    edits = [
        *REPEATED,
        ("args: [x]", "args: [x]\nnumbers: {at: 1}"),
        (
            "  - y = linear(x, down)",
            "  - y = part(linear(x, down), start=at, size=H - 2)\n  - y = cat(y, part(y, start=0, size=2))",
        ),
    ]
    text = [(old, new.replace("tiny(x, weights", "tiny(x, at=i, weights")) for old, new in edits]
    starts = [node.attr["start"] for node in load(text, config={**CONFIG, "layers": 3}).nodes if node.op == "part"]
    assert starts == [0, 0, 1, 0, 2, 0]
    starts = [node.attr["start"] for node in load(edits, config={**CONFIG, "layers": 3}).nodes if node.op == "part"]
    assert starts == [1, 0] * 3, "the default"


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("ffn[i]", "ffn", "p.yaml:20: x: 'ffn' is repeated: which one?. Write ffn[0], or [i] in a loop."),
        ("ffn[i]", "ffn[i + 1]", "p.yaml:20: x: 'ffn' has no [2]; expected 0..1"),
        ("ffn[i]", "fc[i]", "p.yaml:20: x: 'fc' is no repeated block"),
        ("ffn[i]", "ffn[k]", "p.yaml:20: x: unknown dimension 'k'"),
        ("{i: L}", "{x: L}", "p.yaml:18: 'x' is the name of something else already"),
        ("{i: L}", "{i: L - 2}", "p.yaml:21: y: nothing to collect: the loop runs 0 times"),
        ("{i: L}", "{i: L - 3}", "p.yaml:18: i: 'L - 3' is -1; expected 0 or more"),
        ("cat(x)", "add(x)", "p.yaml:21: y: 'add' is no op that joins; expected cat or columns"),
        ("cat(x)", "cat", "p.yaml:21: what is collected is written op(name)"),
        ("tiny(x, weights", "tiny(i, weights", "blocks/tiny.yaml:7: y: 0 is a number, not a value"),
    ],
)
def test_repetitions_that_are_refused(old: str, new: str, message: str) -> None:
    edits = [(a, b.replace(old, new)) for a, b in REPEATED]
    assert message in refusal(edits, config={**CONFIG, "layers": 2})


def test_facts_of_a_program_decide_its_blocks_switches() -> None:
    edits = [
        ("switches:\n", "facts: {bias: false}\nswitches:\n"),
        ('  down: "wt[H, H]"', '  down: "wt[H, H]"\n  b: {type: "wt[H]", when: {bias: true}}'),
    ]
    circuit = load(edits)
    assert "ffn.b" not in {weight.name for weight in circuit.weights}
    assert ("bias", False) in circuit.facts
