"""What several templates need: prologues as launches of their own, scratch of a top-1, the ends of an attention."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from tvm.tirx.script import builder as T

from ...circuit.ir import Node
from ...circuit.types import StateType, TensorType
from ...ops.cache import Sight
from ...plan.ir import VIEWS, Group, Plan, Scratch
from ..base import meeting, refuse_packed
from .architectures import architecture_of
from .attention import Query
from .epilogue import Epilogue
from .formats import Format, scales_of
from .plain import ROWS, Logits, Partials, Projection, emit_top1_final
from .row_program import Evaluator, Place, Spread, emit_rows, for_each, refuse_rows, sinks_of
from .values import do, hold, load, register, store

Finish = Callable[[Any, Any, list[Any]], None]
PROLOGUE_WARPS = 16
"""Of a block that has one row of a prologue."""


def refuse_prologue(plan: Plan, group: Group) -> str | None:
    return refuse_rows(plan, group.prologue, prologue_sinks(plan, group))


def prologue_sinks(plan: Plan, group: Group) -> tuple[str, ...]:
    """What the prologue has to leave in memory: the anchors' input, and what others read."""
    sinks = sinks_of(plan, group, group.prologue)
    x = group.anchors[0].inputs[0]
    made = {value.name for node in group.prologue for value in node.outputs}
    return (*sinks, x) if x in made and x not in sinks else sinks


def prologue_scratch(plan: Plan, group: Group) -> tuple[Scratch, ...]:
    crossing = sinks_of(plan, group, group.prologue)
    types = plan.circuit.types
    return tuple(Scratch(name, types[name]) for name in prologue_sinks(plan, group) if name not in crossing)  # type: ignore[arg-type]


def emit_prologue(env, group: Group, warps: int) -> None:
    if group.prologue:
        emit_rows(env, group.prologue, prologue_sinks(env.plan, group), warps=warps)


def refuse_dtypes(plan: Plan, group: Group) -> str | None:
    """Why tensor cores cannot multiply x by these weights, or None."""
    types, quantised = plan.circuit.types, plan.circuit.storage
    names = [name for anchor in group.anchors for name in anchor.inputs[:2] if name not in quantised]
    dtypes = {types[name].dtype for name in names}  # type: ignore[union-attr]
    if len(dtypes) > 1 or "f32" in dtypes:
        return f"needs bf16 or f16 activations and weights of that dtype, got {', '.join(sorted(dtypes))}"
    return None


def refuse_quantised(plan: Plan, group: Group) -> str | None:
    """Why products of this group's quantised weights cannot be one launch, or None. Others than products' are not read."""
    storage = plan.circuit.storage
    weights = {anchor.inputs[1] for anchor in group.anchors}
    foreign = [name for name in group.inputs if name in storage and name not in weights]
    if foreign:
        return f"reads quantised weights of products alone, got '{foreign[0]}' in {storage[foreign[0]]}"
    found = {storage.get(name) for name in weights}
    if len(found) > 1:
        said = ", ".join(sorted(f"'{name}' in {storage.get(name, 'its own dtype')}" for name in weights))
        return f"reads weights of one storage at a time, got {said}"
    return None


def format_of(plan: Plan, group: Group) -> Format:
    """How tensor cores get this group's weights, which are all of one storage."""
    first = group.anchors[0]
    dtype = plan.circuit.types[first.inputs[0]].dtype  # type: ignore[union-attr]
    return Format(dtype, plan.circuit.storage.get(first.inputs[1]), architecture_of(plan).multiply)


def projection_of(env, anchors: Sequence[Node], finish: Finish, *, words: bool = True) -> Projection:
    """The products of `anchors`, whose sums meet in `finish`. words: weights as 32-bit words."""
    names = [anchor.inputs[1] for anchor in anchors]
    weights = tuple(env.words(name) if words else env.buffer(name) for name in names)
    return Projection(weights, finish, tuple(scales_of(env, name) for name in names))


def projections_of(env, group: Group, *, words: bool = True) -> list[Projection]:
    """All products of a group with what follows each; see `projection_of`."""
    return [projection_of(env, anchors, Epilogue(env, group, anchors, nodes), words=words) for anchors, nodes in meeting(group)]


def refuse_meeting(group: Group) -> str | None:
    """Tiles hold the rows of one weight, or of two whose sums meet."""
    counts = {len(anchors) for anchors, _ in meeting(group)}
    return None if counts in ({1}, {2}) else f"one or two weights meet in every epilogue, got {sorted(counts)}"


def refuse_top1(group: Group) -> str | None:
    shape = [node.op for node in (*group.anchors, *group.epilogue)]
    fits = shape[:2] in (["linear", "top1"], ["linear", "masked_top1"]) and shape[2:] in ([], ["target_ids"])
    return None if fits else f"expected linear, top1 or masked_top1 and perhaps target_ids, got {shape}"


def logits_of(env, group: Group) -> Logits:
    (linear,), (top1, *_) = group.anchors, group.epilogue
    return Logits(
        bias=env.buffer(linear.inputs[2]) if len(linear.inputs) == 3 else None,
        allowed=env.buffer(top1.inputs[1]) if top1.op == "masked_top1" else None,
    )


def partial_scratch(parts: int, rows: int) -> tuple[Scratch, ...]:
    kinds = (("best", "f32"), ("index", "i32"), ("total", "f32"))
    return tuple(Scratch.own(name, TensorType(dtype, (parts, rows))) for name, dtype in kinds)


def partials_of(env) -> Partials:
    return Partials(*(env.scratch(name) for name in ("best", "index", "total")))


def emit_chosen(env, group: Group, partials: Partials) -> None:
    """Token and log-probability of every row, the token as the target's id where the group ends with that."""
    top1, *after = group.epilogue
    own, logprob = (value.name for value in top1.outputs)
    offsets = env.buffer(after[0].inputs[1]) if after else None
    emit_top1_final(env, partials, env.buffer(after[0].name if after else own), env.buffer(logprob), offsets)


def refuse_attend(plan: Plan, group: Group, parts: int) -> str | None:
    if len(group.anchors) != 1:
        return "one attention at a time"
    if not 1 <= parts <= 64:
        return f"parts lie in 1..64, got {parts}"
    return refuse_packed(plan, group) or refuse_rows(plan, group.epilogue, sinks_of(plan, group, group.nodes))


def attend_facts(plan: Plan, group: Group) -> tuple[int, int, int, set[str]]:
    """(query heads, head size, KV heads, dtypes of queries and cache)."""
    (node,) = group.anchors[:1]
    q = plan.circuit.types[node.inputs[0]]
    state = next(state for state in plan.circuit.states if state.name == state_of(plan, node))
    return int(q.shape[1]), int(q.shape[2]), state.heads, {q.dtype, state.dtype}  # type: ignore[union-attr]


def attend_scratch(plan: Plan, group: Group, parts: int) -> tuple[Scratch, ...]:
    rows, heads, dim = (int(size) for size in plan.circuit.types[group.anchors[0].inputs[0]].shape)  # type: ignore[union-attr]
    shapes = (("sums", (rows, heads, parts, dim)), ("stats", (rows, heads, parts, 2)))
    return tuple(Scratch.own(name, TensorType("f32", shape)) for name, shape in shapes)


def query_of(env, group: Group, parts: int, *, joined: bool = False) -> Query:
    """joined: by the launch itself, without scratch."""
    (node,) = group.anchors
    state, q = state_of(env.plan, node), node.inputs[0]
    rows, heads, dim = (int(size) for size in env.plan.circuit.types[q].shape)
    return Query(
        shape=(rows, heads, dim),
        q=env.buffer(q) if q in group.inputs else None,
        keys=env.cache(f"{state}.k"),
        values=env.cache(f"{state}.v"),
        layer=int(node.attr["layer"]),
        **{part: env.buffer(f"{state}.{part}") for part in ("table", "seq", "start", "length")},
        scale=float(node.attr["scale"]),
        parts=parts,
        fresh=fresh_rows(env, node),
        sight=Sight.of(node.attr),
        **({} if joined else {name: env.scratch(name) for name in ("sums", "stats")}),
    )


def fresh_rows(env: Any, node: Node) -> int | None:
    """See `Query.fresh`: rows of one sequence lie side by side, so none that this program appends lies further back."""
    plan = env.plan
    made_by, whose = plan.circuit.producer.get(node.inputs[1]), plan.circuit.entry(plan.entry).rows
    appended = made_by is not None and made_by.op == "append"
    return plan.rows if env.settled and appended and whose in ("sequences", "block") else None


def state_of(plan: Plan, node: Any) -> str:
    return next(t.state for t in (plan.circuit.types[name] for name in node.inputs) if isinstance(t, StateType))


def attend_end(env, group: Group, query: Query) -> Callable[[Any, Any, Any, Any], None]:
    """finish(row, head, column, value): the epilogue on one element of the joined parts."""
    (node,) = group.anchors
    sinks = sinks_of(env.plan, group, group.nodes)
    targets = {name: env.flat(name) for name in sinks}
    dim, types = query.shape[2], env.plan.circuit.types
    nodes = [item for item in group.nodes if item.op not in VIEWS]
    merges = [item for item in group.nodes if item.op == "merge"]

    def finish(row, head, column, value):
        place, whole = Place(row, head, column), head * dim + column
        known = {node.name: lambda _: value}
        heads = Evaluator(env, nodes, known)
        rows = Evaluator(env, nodes, {item.name: lambda _, item=item: heads.at(item.inputs[0], place) for item in merges})
        for name, target in targets.items():  # what follows a merge has no heads
            of_rows = types[name].rank == 2
            store(target, [row, whole], rows.at(name, Place(row, 0, whole)) if of_rows else heads.at(name, place))

    return finish


def attend_end_of_some(env, group: Group, query: Query) -> Callable[[Any, Any, Any, list[Any]], None]:
    """As `attend_end`, of some values side by side: all that they meet is asked for before they are stored, at once."""
    (node,), (sink, *others) = group.anchors, sinks_of(env.plan, group, group.nodes)
    one, dim, dtype = attend_end(env, group, query), query.shape[2], env.plan.circuit.types[sink].dtype
    nodes = [item for item in group.nodes if item.op not in VIEWS]

    def finish(row, head, column, values):
        for index, value in enumerate(values):
            one(row, head, hold(column + index, "int32"), value)

    def ended(row, head, column, values):
        spread = Spread(column, 1, len(values))

        def joined(place):
            return values[spread.index(place.column)]

        evaluator = Evaluator(env, nodes, {node.name: joined})
        with evaluator.keeping(spread):
            evaluator.prepare([sink], row, head, lambda *_: None)
            return [hold(evaluator.at(sink, Place(row, head, own))) for own in spread.columns]

    def finish_words(row, head, column, values):
        if len(nodes) > 1:
            values = ended(row, head, column, values)
        pairs = [register("uint32") for _ in values[::2]]
        for pair, low, high in zip(pairs, values[::2], values[1::2], strict=True):
            do(T.ptx[f"cvt.rn.{dtype}x2.f32"](pair[0], high, low))
        target = words.ptr_to([row, hold(T.floordiv(head * dim + column, 2), "int32")])
        do(T.ptx[f"st.global.v{len(pairs)}.b32"](target, *(pair[0] for pair in pairs)))

    if others or dtype == "f32" or env.plan.circuit.types[sink].rank == 2:
        return finish
    words = env.words(sink)
    return finish_words


def emit_copy(env, source: Any, target: Any) -> None:
    """A second output of the same bytes."""
    count = 1
    for size in target.shape:
        count *= int(size)
    views = [T.decl_buffer((count,), str(b.dtype), data=b.data, elem_offset=b.elem_offset) for b in (source, target)]
    per_block = 32 * ROWS
    with env.kernel(-(-count // per_block), ROWS) as at:
        index = hold(at.block * per_block + at.warp * 32 + at.lane, "int32")
        for_each(count, index, 1 << 30, lambda i: store(views[1], [i], load(views[0], [i])))
