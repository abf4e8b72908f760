"""Stage `fuse`: cut a specialised circuit into groups by declared patterns.

Patterns are tried in order; each absorbs what feeds its anchor (prologue) and what its anchor feeds (epilogue).
What no pattern wants is grouped row by row. Every node ends in exactly one group.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace

import networkx

from ..circuit.ir import Circuit, Node
from ..errors import CircuitError, Fault
from .ir import Group, Plan


@dataclass(frozen=True)
class Pattern:
    """`anchor` is the op that the kernel is made for.

    With `siblings`, all anchors that read one input join: the input is read once. Weights must be stored alike then, since a
    kernel reads one format. `prologue` ops are taken backwards from the anchor's first input, `epilogue` ops forwards from
    its output while it has one reader; without all of `needs` among the epilogue the pattern does not match, and only anchors
    that feed it join.

    With `between`, everything on the way from the anchor's first input to the end of its epilogue joins as further anchors;
    the pattern does not match if there is nothing, or another op. `kind`: of the targets that the pattern is for, if not all.
    `optional`: where no rule of the schedule accepts such a group, its nodes go to the patterns after this one. With `whole` the
    prologue is of all that the group reads, its epilogue included. `tail`: ops of which one may be the epilogue's last though its
    input has other readers, for whom that is stored.
    """

    name: str
    anchor: str
    siblings: bool = False
    prologue: tuple[str, ...] = ()
    epilogue: tuple[str, ...] = ()
    needs: tuple[str, ...] = ()
    between: tuple[str, ...] = ()
    kind: str = ""
    optional: bool = False
    whole: bool = False
    tail: tuple[str, ...] = ()


QKV = "qkv"
NORMED = "project_norm"
OWN_ROW = "attend_own_row"
NORMS = ("rms_norm",)
JOIN = ("embed", "zero_at", "rms_norm", "cat")

PATTERNS = (
    # An FFN of experts: the router, the experts, the shared one and their sum, with the norm before and the residual after.
    Pattern(
        "mixture",
        "experts",
        prologue=NORMS,
        epilogue=("add",),
        between=("route", "linear", "silu", "mul", "sigmoid", "scale_rows"),
        kind="cuda",
    ),
    # The norm of what comes next, where sums are joined by rows anyway: a launch for that alone would be all latency.
    Pattern(
        NORMED,
        "linear",
        prologue=NORMS,
        epilogue=("add",),
        needs=("add", "rms_norm"),
        tail=NORMS,
        kind="cuda",
        optional=True,
    ),
    # lm_head, top-1 and log-probability: the logits never reach memory. On GPUs the best id becomes the target's there, too: a
    # launch for that alone would be all latency.
    Pattern("head", "linear", prologue=NORMS, epilogue=("top1", "target_ids"), needs=("top1", "target_ids"), kind="cuda"),
    Pattern(
        "head", "linear", prologue=NORMS, epilogue=("masked_top1", "target_ids"), needs=("masked_top1", "target_ids"), kind="cuda"
    ),
    Pattern("head", "linear", prologue=NORMS, epilogue=("top1",), needs=("top1",)),
    Pattern("head", "linear", prologue=NORMS, epilogue=("masked_top1",), needs=("masked_top1",)),
    # silu(gate) * up in the epilogue of one pass over both weights.
    Pattern("gated", "linear", siblings=True, prologue=NORMS, epilogue=("silu", "mul"), needs=("silu", "mul")),
    # Queries, keys and values to rotated queries and rows of the cache: a launch for that alone would be all latency.
    Pattern(
        QKV,
        "linear",
        siblings=True,
        prologue=JOIN,
        epilogue=("heads", "rms_norm", "rope", "append"),
        needs=("rope", "append"),
        kind="cuda",
        optional=True,
    ),
    # x + silu(linear(x)), a residual block; of several heads that read one x, in one pass.
    Pattern("project", "linear", siblings=True, prologue=NORMS, epilogue=("silu", "add"), needs=("silu", "add")),
    # Every other projection, with the norms and the concatenation before it and the residual after it; or a gate of one
    # number a row, which is the epilogue of what it scales.
    Pattern("project", "linear", siblings=True, prologue=JOIN, epilogue=("heads", "sigmoid", "scale_rows", "add")),
    # Attention that norms, rotates and appends its row itself: a launch for that alone would be all latency.
    Pattern(
        OWN_ROW,
        "attention",
        prologue=("part", "rms_norm", "rope", "append", "sigmoid"),
        epilogue=("mul", "merge"),
        kind="cuda",
        optional=True,
        whole=True,
    ),
    Pattern("attend", "attention", epilogue=("mul", "merge")),
    # A product for each head; part of each head may be what it reads.
    Pattern("head_project", "head_linear", prologue=("part",), epilogue=("merge",)),
    Pattern("attend_latent", "latent_attention", epilogue=("merge",)),
    Pattern("route", "route"),
    Pattern("experts", "experts"),
)

ROWS = "rows"
"""Row-wise nodes that no pattern took. With one of APPENDS among them the group is called CACHE."""
CACHE = "cache_rows"
APPENDS = ("append", "append_latent")


def fuse(circuit: Circuit, entry: str, rows: int, target: str, declined: Collection[str] = ()) -> Plan:
    """Groups of `circuit`, in an order in which they can run.

    declined: anchors (by name) that no optional pattern is tried with.
    """
    groups: list[Group] = []
    taken: set[str] = set()
    for pattern in PATTERNS:
        if pattern.kind not in ("", target.partition(":")[0]):
            continue
        for anchor in circuit.nodes:
            declines = pattern.optional and anchor.name in declined
            if anchor.op == pattern.anchor and anchor.name not in taken and not declines:
                group = _match(circuit, pattern, anchor, taken)
                if group is not None:
                    groups.append(group)
                    taken.update(node.name for node in group.nodes)
    groups += _row_groups(circuit, groups, taken)
    ordered = _order(circuit, groups)
    named = tuple(replace(group, name=f"g{index}") for index, group in enumerate(ordered))
    plan = Plan(circuit, entry, rows, target, named)
    verify_groups(plan)
    return plan


def _match(circuit: Circuit, pattern: Pattern, anchor: Node, taken: set[str]) -> Group | None:
    anchors = [anchor]
    if pattern.siblings:
        readers = circuit.consumers(anchor.inputs[0])
        anchors = [node for node in readers if node.op == pattern.anchor and node.inputs[0] == anchor.inputs[0]]
        stored = circuit.storage.get(anchor.inputs[1])
        anchors = [node for node in anchors if node.name not in taken and circuit.storage.get(node.inputs[1]) == stored]
    members = {node.name for node in anchors}
    epilogue = _absorb_readers(circuit, pattern, anchors, members, taken)
    if pattern.tail:
        beside = [node for node in circuit.consumers(anchor.inputs[0]) if node.op == pattern.anchor]
        if len(beside) > 1:
            return None  # a sibling would have to read the same x in a launch of its own
        epilogue += _tail(circuit, pattern, epilogue, members, taken)
    if any(need not in {node.op for node in epilogue} for need in pattern.needs):
        return None
    if pattern.between:
        inside = _between(circuit, anchor, members)
        if not inside or any(node.op not in pattern.between or node.name in taken for node in inside):
            return None
        anchors += inside
        members |= {node.name for node in inside}
    if pattern.needs:
        fed = {name for node in epilogue for name in node.inputs}
        feeding = [node for node in anchors if any(value.name in fed for value in node.outputs)]
        if pattern.optional and len(feeding) < len(anchors):
            return None  # a sibling that ends otherwise would have to read the same x in a launch of its own
        anchors = feeding
        members = {node.name for node in (*anchors, *epilogue)}
    read_later = {name for node in epilogue for name in node.inputs} if not pattern.whole else set()
    prologue = _absorb_producers(circuit, pattern, anchors, members, taken, read_later)
    return _group(circuit, pattern.name, prologue, anchors, epilogue)


def _absorb_readers(circuit: Circuit, pattern: Pattern, anchors: list[Node], members: set[str], taken: set[str]) -> list[Node]:
    """Follow each anchor's output through `pattern.epilogue` ops, while every value on the way has one reader."""
    epilogue: list[Node] = []
    visible = {name for _, name in circuit.outputs}
    ends = [value.name for node in anchors for value in node.outputs]
    grown = True
    while grown:  # a reader may have to wait until its other input has been taken in
        grown = False
        for name in list(ends):
            readers = circuit.consumers(name)
            if name in visible or len(readers) != 1:
                continue
            reader = readers[0]
            free = reader.op in pattern.epilogue and reader.name not in taken and reader.name not in members
            if free and not _makes_factor(circuit, reader, members) and not _reaches_back(circuit, reader, members):
                members.add(reader.name)
                epilogue.append(reader)
                ends.remove(name)
                ends += [value.name for value in reader.outputs]
                grown = True
    return epilogue


def _tail(circuit: Circuit, pattern: Pattern, epilogue: list[Node], members: set[str], taken: set[str]) -> list[Node]:
    """The one reader of the epilogue's end that is of `pattern.tail`, if there is but one."""
    ends = [value.name for node in epilogue[-1:] for value in node.outputs]
    readers = [node for name in ends for node in circuit.consumers(name) if node.op in pattern.tail]
    if len(readers) != 1 or readers[0].name in taken or readers[0].inputs[0] not in ends:
        return []
    members.add(readers[0].name)
    return readers


def _between(circuit: Circuit, anchor: Node, members: set[str]) -> list[Node]:
    """The nodes that depend on the anchor's first input and that `members` depend on."""
    graph, readers = circuit.graph(), [node.name for node in circuit.consumers(anchor.inputs[0])]
    after = set(readers).union(*(networkx.descendants(graph, name) for name in readers))
    before = set().union(*(networkx.ancestors(graph, name) for name in members))
    return [node for node in circuit.nodes if node.name in (after & before) - members]


def _makes_factor(circuit: Circuit, reader: Node, members: set[str]) -> bool:
    """Is `reader` a gate whose factor, one column wide, is made inside? Sums that meet in an epilogue are equally wide."""
    maker = circuit.producer.get(reader.inputs[1]) if reader.op == "scale_rows" else None
    return maker is not None and maker.name in members


def _reaches_back(circuit: Circuit, reader: Node, members: set[str]) -> bool:
    """Does an input of `reader` that is made outside of `members` depend on them? Then the groups would form a loop."""
    graph = circuit.graph()
    inside = [circuit.producer[name].name for name in reader.inputs if name in circuit.producer]
    outside = [name for name in inside if name not in members]
    return any(networkx.ancestors(graph, name) & members for name in outside)


def _absorb_producers(
    circuit: Circuit, pattern: Pattern, anchors: list[Node], members: set[str], taken: set[str], read_later: set[str]
) -> list[Node]:
    """Take in what makes the anchors' first input, or of a `whole` pattern all that the group reads, as long as nobody outside
    needs it first.

    A value may have other readers (the final norm is also the recycled hidden): it is then written out too. It is left alone
    when an epilogue of this group waits for one of those readers, or reads it itself (`read_later`): kernels finish a sum of
    any row and column, where they need not have made that of the prologue.
    """
    prologue: list[Node] = []
    inside = [node for node in circuit.nodes if node.name in members]
    front = [name for node in inside for name in node.inputs] if pattern.whole else [anchors[0].inputs[0]]
    while front:
        node = circuit.producer.get(front.pop(0))
        if node is None or node.op not in pattern.prologue or node.name in taken or node.name in members:
            continue
        if any(value.name in read_later for value in node.outputs):
            continue
        trial = members | {node.name}
        if not _convex(circuit, trial):
            continue
        members.add(node.name)
        prologue.append(node)
        front += list(node.inputs)
    return prologue


def _convex(circuit: Circuit, members: set[str]) -> bool:
    """No path leaves `members` and comes back."""
    graph = circuit.graph()
    after = set().union(*(networkx.descendants(graph, name) for name in members)) - members
    before = set().union(*(networkx.ancestors(graph, name) for name in members)) - members
    return not after & before


def _group(circuit: Circuit, pattern: str, prologue: list[Node], anchors: list[Node], epilogue: list[Node]) -> Group:
    place = {node.name: index for index, node in enumerate(circuit.nodes)}

    def ordered(nodes: list[Node]) -> tuple[Node, ...]:
        return tuple(sorted(nodes, key=lambda node: place[node.name]))

    return Group("", pattern, ordered([*prologue, *anchors, *epilogue]), ordered(prologue), ordered(anchors), ordered(epilogue))


def _row_groups(circuit: Circuit, groups: list[Group], taken: set[str]) -> list[Group]:
    """The rest, joined as far as the order allows: a node joins the last row group unless another group lies between."""
    graph = circuit.graph()
    bundles: list[list[Node]] = []
    for node in circuit.nodes:
        if node.name in taken:
            continue
        for bundle in reversed(bundles):
            trial = [
                *groups,
                *(_bundle(circuit, other) for other in bundles if other is not bundle),
                _bundle(circuit, [*bundle, node]),
            ]
            rest = [other for other in circuit.nodes if not any(other in group.nodes for group in trial)]
            if _acyclic(graph, [*trial, *(_bundle(circuit, [other]) for other in rest)]):
                bundle.append(node)
                break
        else:
            bundles.append([node])
    return [_bundle(circuit, bundle) for bundle in bundles]


def _bundle(circuit: Circuit, nodes: list[Node]) -> Group:
    pattern = CACHE if any(node.op in APPENDS for node in nodes) else ROWS
    return _group(circuit, pattern, [], nodes, [])


def _quotient(graph: networkx.MultiDiGraph, groups: list[Group]) -> networkx.DiGraph:
    owner = {node.name: index for index, group in enumerate(groups) for node in group.nodes}
    quotient = networkx.DiGraph()
    quotient.add_nodes_from(range(len(groups)))
    quotient.add_edges_from((owner[a], owner[b]) for a, b in graph.edges() if owner[a] != owner[b])
    return quotient


def _acyclic(graph: networkx.MultiDiGraph, groups: list[Group]) -> bool:
    return networkx.is_directed_acyclic_graph(_quotient(graph, groups))


def _order(circuit: Circuit, groups: list[Group]) -> list[Group]:
    """Topological order; among groups that are ready, the one whose first node comes first in the program."""
    place = {node.name: index for index, node in enumerate(circuit.nodes)}
    quotient = _quotient(circuit.graph(), groups)
    try:
        order = list(networkx.lexicographical_topological_sort(quotient, key=lambda i: place[groups[i].nodes[0].name]))
    except networkx.NetworkXUnfeasible:
        raise CircuitError(Fault("the groups wait for each other in a loop", where=circuit.name)) from None
    return [groups[index] for index in order]


def verify_groups(plan: Plan) -> None:
    """Every node is in exactly one group and groups only read what ran before them.

    Raises:
        CircuitError: otherwise; this is a fault of the compiler.
    """
    faults = []
    ready = {source.name for source in plan.circuit.sources()}
    seen: list[str] = []
    for group in plan.groups:
        for name in group.inputs:
            if name not in ready:
                faults.append(Fault(f"reads '{name}' before it is made", where=plan.symbol, subject=group.name))
        ready.update(group.made)
        seen += [node.name for node in group.nodes]
    expected = sorted(node.name for node in plan.circuit.nodes)
    if sorted(seen) != expected:
        odd = set(expected) ^ set(seen) or {name for name in seen if seen.count(name) > 1}
        faults.append(Fault(f"nodes without exactly one group: {', '.join(sorted(odd))}", where=plan.symbol))
    if faults:
        raise CircuitError(faults)
