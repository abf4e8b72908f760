"""A head that scores some tokens alone: fewer rows of lm_head to read, and drafts among those tokens.

Logits then have a column for each token kept, in the order of their ids. Drafts leave as the target's ids and grammars' masks
come in target ids, as before; log-probabilities are among the tokens kept.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ..errors import CircuitError, Fault
from ..ops import TABLE, OpContext
from .ir import Circuit, Node, Value, Weight
from .types import StateType, TensorType

OFFSETS = "draft_offsets"
"""The weight that maps: target id minus own id, for each own id."""

VOCABULARY = "vocab_size"
"""The fact that says how many tokens the target has, where neither an embedding nor the restricted head does."""

CHOOSERS = ("top1", "masked_top1")


def restrict_vocabulary(circuit: Circuit, ids: Sequence[int]) -> tuple[Circuit, tuple[str, ...]]:
    """The circuit whose heads score the tokens `ids` (rising) alone, and the names of the weights that lose rows.

    Where `ids` are 0, 1, 2 and so on, own ids are the target's. Else there is a weight OFFSETS more. All of the vocabulary
    leaves the circuit as it is.

    Raises:
        CircuitError: there is no head, it maps its ids already, ids are none of its vocabulary, or its weight has other uses.
    """
    chosen = [node for node in circuit.nodes if node.op in CHOOSERS]
    scored = dict.fromkeys(node.inputs[0] for node in chosen)
    heads = {node.name: node for node in circuit.nodes if node.name in scored and node.op == "linear"}
    _check(circuit, chosen, heads, ids)
    cut = tuple(dict.fromkeys(name for node in heads.values() for name in node.inputs[1:]))
    if all(circuit.types[name].shape[0] == len(ids) for name in cut):  # type: ignore[union-attr]
        return circuit, ()
    size, mapped = len(ids), list(ids) != list(range(len(ids)))
    weights = [
        replace(item, type=TensorType(item.type.dtype, (size, *item.type.shape[1:])), storage=None) if item.name in cut else item
        for item in circuit.weights
    ]
    if mapped:
        weights.append(Weight(OFFSETS, TensorType("i32", (size,))))
    nodes: list[Node] = []
    masks: dict[str, str] = {}
    for node in circuit.nodes:
        nodes += _mapped(circuit, node, masks) if mapped and node.op in CHOOSERS else [node]
    facts = circuit.facts
    if not any(node.op == "embed" for node in circuit.nodes):
        size_before = max(int(circuit.types[node.inputs[1]].shape[0]) for node in heads.values())  # type: ignore[union-attr]
        facts = tuple({VOCABULARY: size_before, **dict(facts)}.items())
    return _retyped(replace(circuit, weights=tuple(weights), nodes=tuple(nodes), facts=facts)), cut


def offsets_of(ids: Sequence[int]) -> list[int]:
    """The values of OFFSETS."""
    return [target - own for own, target in enumerate(ids)]


def _check(circuit: Circuit, chosen: Sequence[Node], heads: dict[str, Node], ids: Sequence[int]) -> None:
    if not chosen or {node.inputs[0] for node in chosen} != set(heads):
        raise CircuitError(Fault("has no head to restrict: a matrix whose products are chosen among", where=circuit.name))
    faults = []
    for node in chosen:
        if any(reader.op == "target_ids" for reader in circuit.consumers(node.name)):
            hint = "Its checkpoint has made that choice."
            faults.append(Fault("the head has a vocabulary of its own already", where=circuit.name, subject=node.name, hint=hint))
    for head in heads.values():
        size = int(circuit.types[head.inputs[1]].shape[0])  # type: ignore[union-attr]
        if not ids or ids[0] < 0 or ids[-1] >= size:
            got = f"{len(ids)} of {min(ids)} to {max(ids)}" if ids else "none"
            faults.append(Fault("no ids of its vocabulary", where=circuit.name, expected=f"0 to {size - 1}", got=got))
        others = [reader for name in head.inputs[1:] for reader in circuit.consumers(name) if reader.name not in heads]
        others += [reader for reader in circuit.consumers(head.name) if reader.op not in (*CHOOSERS, "cat")]
        faults += [
            Fault("reads the head, too, and so it cannot lose rows", where=circuit.name, subject=node.name) for node in others
        ]
    if faults:
        raise CircuitError(faults)


def _mapped(circuit: Circuit, node: Node, masks: dict[str, str]) -> list[Node]:
    """The node on own ids, what brings its mask to them (once a mask), and what brings its token back."""
    made = []
    inputs = list(node.inputs)
    if node.op == "masked_top1":
        mask = inputs[1]
        if mask not in masks:
            masks[mask] = _fresh(circuit, f"own_{mask}")
            made.append(Node("own_mask", (mask, OFFSETS), (Value(masks[mask], circuit.types[mask]),), (), node.where))
        inputs[1] = masks[mask]
    token, logprob = node.outputs
    own = Value(_fresh(circuit, f"own_{token.name}"), token.type)
    made.append(replace(node, inputs=tuple(inputs), outputs=(own, logprob)))
    made.append(Node("target_ids", (own.name, OFFSETS), (token,), (), node.where))
    return made


def _fresh(circuit: Circuit, name: str) -> str:
    while name in circuit.types:
        name += "_"
    return name


def _retyped(circuit: Circuit) -> Circuit:
    """Every node's types anew, from those of the sources."""
    types = {source.name: source.type for source in circuit.sources()}
    nodes = []
    for node in circuit.nodes:
        ins = [types[name] for name in node.inputs]
        made = TABLE[node.op].infer(ins, node.attr, OpContext(circuit.act))
        outputs = tuple(Value(value.name, kind) for value, kind in zip(node.outputs, made, strict=True))
        types.update((value.name, value.type) for value in outputs)
        nodes.append(replace(node, outputs=outputs))
    assert all(isinstance(kind, TensorType | StateType) for kind in types.values())
    return circuit.with_nodes(tuple(nodes))
