"""Templates for mixtures of experts: the whole FFN in three launches on tensor cores (see experts.py), or node by node."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from ...circuit.ir import FOUR_BIT, Node
from ...circuit.types import TensorType
from ...plan.ir import Group, Plan, Scratch
from ..base import Kernel, kernel, refuse_packed, within
from .architectures import architecture_of
from .epilogue import Epilogue, refuse_ops
from .expert_one import fits
from .experts import STEP_WORDS, Between, DownCut, Matrix, Sizes, UpCut, Weights
from .experts_down import Down
from .experts_down_early import EarlyDown
from .experts_up import Up
from .formats import Format, scales_of
from .plain import Projection, emit_plain
from .plain_experts import emit_plain_experts
from .route import choosing_of, emit_route, refuse_route
from .row_program import ELEMENTWISE, emit_rows
from .shared import PROLOGUE_WARPS, emit_prologue, prologue_scratch, refuse_prologue
from .stream import Geometry, Stream, geometry
from .stream_templates import norm_of
from .values import load, store


@dataclass(frozen=True)
class Mixture:
    """The nodes of an FFN of experts. shared: gate, up and down of the expert that every row goes to, or None; vector: the
    product that its gate is the sigmoid of, or None. joined: the sum of both, or the experts alone."""

    route: Node
    experts: Node
    shared: tuple[Node, Node, Node] | None
    vector: Node | None
    joined: Node

    @property
    def x(self) -> str:
        return self.experts.inputs[0]

    @property
    def chosen(self) -> tuple[str, ...]:
        """Names of the experts' weights, of the shared one's too."""
        return (*self.experts.inputs[3:], *(node.inputs[1] for node in self.shared or ()))

    @property
    def choosing(self) -> tuple[str, ...]:
        """Names of what x is multiplied by beside them."""
        return (self.route.inputs[1], *([self.vector.inputs[1]] if self.vector else []))


def mixture_of(group: Group) -> Mixture | str:
    """The roles of a group's nodes, or why it is no such FFN."""
    maker = {value.name: node for node in group.nodes for value in node.outputs}
    (experts,) = [node for node in group.anchors if node.op == "experts"] or [None]
    if experts is None or experts.inputs[1] not in maker or maker[experts.inputs[1]].op != "route":
        return "needs a route and its experts"
    route, x = maker[experts.inputs[1]], experts.inputs[0]
    if route.inputs[0] != x or tuple(value.name for value in route.outputs) != experts.inputs[1:3]:
        return "the experts' ids and shares are not those of a route of their x"
    rest = [node for node in group.anchors if node not in (route, experts)]
    if not rest:
        return Mixture(route, experts, None, None, experts)
    joined = next((node for node in group.epilogue if experts.name in node.inputs), None)
    other = next((name for name in joined.inputs if name != experts.name), "") if joined else ""
    top, vector = maker.get(other), None
    used = [top]
    if joined is None or joined.op != "add" or top is None:
        return "experts and the rest are not added"
    if top.op == "scale_rows":
        gate = maker.get(top.inputs[1])
        vector = maker.get(gate.inputs[0]) if gate is not None and gate.op == "sigmoid" else None
        if vector is None or vector.op != "linear" or vector.inputs[0] != x:
            return "the gate of the shared expert is not the sigmoid of a product of x"
        top = maker.get(top.inputs[0])
        used += [gate, vector, top]
    parts = _gated_of(maker, top, x)
    if isinstance(parts, str):
        return parts
    used += parts
    if {node.name for node in rest} != {node.name for node in used if node is not None}:
        return "there is more between x and the sum than experts and a shared one"
    by_op = {node.name: node for node in parts}
    mul = next(node for node in parts if node.op == "mul")
    silu = next(by_op[name] for name in mul.inputs if by_op[name].op == "silu")
    up = next(by_op[name] for name in mul.inputs if name != silu.name)
    return Mixture(route, experts, (by_op[silu.inputs[0]], up, parts[0]), vector, joined)


def _gated_of(maker: dict[str, Node], top: Node | None, x: str) -> list[Node] | str:
    """down, mul, silu, gate and up of an FFN of x that ends in `top`, or why it is none."""
    reason = "the shared expert is not down(silu(gate(x)) * up(x)) without biases"
    if top is None or top.op != "linear" or len(top.inputs) != 2 or top.inputs[0] not in maker:
        return reason
    mul = maker[top.inputs[0]]
    sides = [maker.get(name) for name in mul.inputs]
    if mul.op != "mul" or sorted(side.op if side else "" for side in sides) != ["linear", "silu"]:
        return reason
    silu = next(side for side in sides if side is not None and side.op == "silu")
    products = [maker.get(silu.inputs[0]), next(side for side in sides if side is not None and side.op == "linear")]
    if any(node is None or node.op != "linear" or node.inputs[0] != x or len(node.inputs) != 2 for node in products):
        return reason
    return [top, mul, silu, *[node for node in products if node is not None]]


def sizes_of(plan: Plan, mixture: Mixture) -> Sizes:
    types = plan.circuit.types
    experts, hidden, inner = (int(dim) for dim in types[mixture.experts.inputs[3]].shape)  # type: ignore[union-attr]
    shared = int(types[mixture.shared[0].inputs[1]].shape[0]) if mixture.shared else 0  # type: ignore[union-attr]
    return Sizes(plan.rows, hidden, inner, shared, experts, int(mixture.route.attr["top"]), format_of(plan, mixture))


def format_of(plan: Plan, mixture: Mixture) -> Format:
    """How tensor cores get the experts' weights, which are all of one storage."""
    dtype = plan.circuit.types[mixture.x].dtype  # type: ignore[union-attr]
    return Format(dtype, plan.circuit.storage.get(mixture.chosen[0]), architecture_of(plan).multiply)


@dataclass(frozen=True)
class MixtureParams:
    """warps: of a block; stages: of the rings, about; registers: of a thread for x, which stays there if it fits; fold_norm:
    apply an RMSNorm in the router's launch instead of one of its own."""

    warps: int = within(16, 1, 16)
    stages: int = within(8, 2, 16)
    registers: int = within(96, 4, 128)
    fold_norm: bool = True

    def up(self, plan: Plan, sizes: Sizes, words: int) -> UpCut | str:
        """words: of a warp's memory while it chooses."""
        limit, least = architecture_of(plan).shared_bytes, None
        for warps in self._fewer([warps for warps in range(self.warps, 0, -1) if sizes.hidden % (warps * sizes.step) == 0]):
            steps = sizes.hidden // (warps * sizes.step)
            resident = sizes.row_blocks * steps * sizes.step // 8 <= self.registers
            beside = sizes.format.scaled == "numbers"
            # Four bits leave a tile few bytes, beside what is done once for each.
            groups = 2 if beside and resident and sizes.rows <= 8 else 1
            total = groups * steps
            rings = [stages for stages in range(2, self.stages + 4) if stages % total == 0 or total % stages == 0]
            rings = sorted(rings or [1], key=lambda stages: (abs(stages - self.stages), stages))
            cuts = [UpCut(warps, steps, stages, resident, buffers, beside, groups) for buffers in (2, 1) for stages in rings]
            for cut in (cut for cut in cuts if cut.stages <= rings[0]):
                least = min(least or limit * 2, cut.shared_bytes(sizes, words))
                if least <= limit:
                    return cut
        return f"needs {least} B of shared memory"

    def down(self, plan: Plan, sizes: Sizes) -> DownCut | str:
        warps = self._fewer(list(range(self.warps, 0, -1)))
        each = {some: sizes.together(some) for some in warps}
        most = {1: self.stages, 2: -(-self.stages * 3 // 4)}
        cuts = [DownCut(some, stages, each[some]) for some in warps for stages in range(most[each[some]], 1, -1)]
        limit = architecture_of(plan).shared_bytes
        cut = next((cut for cut in cuts if cut.shared_bytes(sizes) <= limit), None)
        if cut is None:
            return "needs more shared memory than there is"
        all_kept = replace(cut, kept=-(-sizes.hidden // 16 // architecture_of(plan).processors))
        return all_kept if sizes.early and all_kept.shared_bytes(sizes) <= limit else cut

    def _fewer(self, warps: list[int]) -> list[int]:
        """The first of these, and for GPUs with little shared memory about half as many, and half of those."""
        kept: list[int] = []
        for some in warps:
            if not kept or some <= kept[-1] // 2:
                kept.append(some)
        return kept


def refuse_mixture(plan: Plan, group: Group, params: MixtureParams) -> str | None:
    mixture = mixture_of(group)
    if isinstance(mixture, str):
        return mixture
    if reason := refuse_weights(plan, group, mixture):
        return reason
    sizes = sizes_of(plan, mixture)
    if sizes.rows > 64:
        return f"at most 64 rows, got {sizes.rows}"
    if reason := refuse_route(mixture.route, sizes.experts):
        return reason
    for columns in (sizes.hidden, sizes.inner, sizes.shared):
        if columns % sizes.step:
            return f"{columns} columns are no whole number of steps of {sizes.step}"
    if mixture.vector is not None and len(mixture.vector.inputs) > 2:
        return "the gate of the shared expert has a bias"
    inside = {value.name for node in group.anchors for value in node.outputs} - {mixture.joined.name}
    if inside & set(plan.crossing(group)):
        return f"somebody else reads {', '.join(sorted(inside & set(plan.crossing(group))))}"
    up = params.up(plan, sizes, choosing_of(mixture.route, sizes.experts, None).words)
    for cut in (up, params.down(plan, sizes)):
        if isinstance(cut, str):
            return cut
    return refuse_prologue(plan, group) or refuse_ops(group)


def refuse_weights(plan: Plan, group: Group, mixture: Mixture) -> str | None:
    """Why tensor cores cannot multiply these weights, or None."""
    types, storage = plan.circuit.types, plan.circuit.storage
    if reason := format_of(plan, mixture).refuse():
        return reason
    found = {storage.get(name) for name in mixture.chosen}
    odd = [name for name in group.inputs if name in storage and name not in mixture.chosen]
    if odd or len(found) > 1:
        kinds = sorted(str(kind) for kind in found)
        return f"reads experts of one storage, shared ones too, and all else unpacked, got {', '.join(odd or kinds)}"
    names = [name for name in (mixture.x, *mixture.choosing, *mixture.chosen) if name not in storage]
    dtypes = {types[name].dtype for name in names}  # type: ignore[union-attr]
    if len(dtypes) > 1 or "f32" in dtypes:
        return f"needs bf16 or f16 activations and weights of that dtype, got {', '.join(sorted(dtypes))}"
    (kind,) = found
    if kind is not None and kind.format not in FOUR_BIT and (kind.whole or kind.block[1] % (STEP_WORDS * 4)):
        return f"scales of {kind} change within a step of {STEP_WORDS * 4} columns, or are of two kinds"
    return None


def router_cut(plan: Plan, params: MixtureParams, hidden: int) -> Geometry | None:
    """How the router's product is streamed; None where x does not fit, and a plain product does."""
    registers = params.registers if plan.rows <= 8 else 64
    for warps in (params.warps, -(-params.warps // 2), -(-params.warps // 4)):
        # One tile a block and less: a tile of more groups would leave blocks idle.
        cut = geometry(plan.rows, hidden, warps, params.stages, 1, registers, lambda groups, parts: groups, tiles_ahead=1)
        if isinstance(cut, Geometry) and cut.groups == 1 and cut.rows * 16 <= warps * 32:
            return cut
    return None


def folded(plan: Plan, group: Group, params: MixtureParams, mixture: Mixture) -> Node | None:
    """The norm that the router's product can take in: the whole prologue, of the activations' dtype."""
    types, hidden = plan.circuit.types, sizes_of(plan, mixture).hidden
    if not params.fold_norm or len(group.prologue) != 1 or router_cut(plan, params, hidden) is None:
        return None
    (node,) = group.prologue
    alike = len({types[name].dtype for name in (node.name, *node.inputs)}) == 1  # type: ignore[union-attr]
    return node if node.op == "rms_norm" and node.name == mixture.x and alike else None


@kernel
class MixtureStream(Kernel):
    """An FFN of experts in bf16 or f16, up to 64 rows: the router, then gate and up, then down of the chosen experts, whose
    weights are streamed once through tensor cores, with the shared expert and the sums after it."""

    name = "cuda.mixture_stream"
    patterns = ("mixture",)
    Params = MixtureParams

    @staticmethod
    def refuse(plan: Plan, group: Group, params: Any) -> str | None:
        return refuse_mixture(plan, group, params)

    @staticmethod
    def scratch(plan: Plan, group: Group, params: Any) -> tuple[Scratch, ...]:
        mixture = mixture_of(group)
        assert isinstance(mixture, Mixture)
        sizes = sizes_of(plan, mixture)
        dtype = plan.circuit.types[mixture.x].dtype  # type: ignore[union-attr]
        wanted = {
            "logits": TensorType("f32", (sizes.rows, sizes.experts)),
            "listed": TensorType("i32", (sizes.most + 1, 4)),
            "made": TensorType(dtype, (sizes.pairs, sizes.inner)),
        }
        if mixture.shared:
            wanted["shared_made"] = TensorType(dtype, (sizes.rows, sizes.shared))
        if mixture.vector:
            wanted["shared_gate"] = TensorType("f32", (sizes.rows, 1))
        return (*prologue_scratch(plan, group), *(Scratch.own(name, value) for name, value in wanted.items()))

    @staticmethod
    def emit(env, group: Group, params: Any) -> None:
        plan, mixture = env.plan, mixture_of(group)
        assert isinstance(mixture, Mixture)
        sizes = sizes_of(plan, mixture)
        x, format = env.words(mixture.x), format_of(plan, mixture)
        gate = env.scratch("shared_gate") if mixture.vector else None
        logits = env.scratch("logits")
        _emit_router(env, group, params, mixture, logits, gate)
        down, *rest = (_matrix(env, name, format) for name in mixture.experts.inputs[3:])
        gate_up_down = [_matrix(env, node.inputs[1], format) for node in mixture.shared or ()]
        shared = (gate_up_down[0], gate_up_down[1], gate_up_down[2]) if gate_up_down else None
        weights = Weights(rest[0], rest[1] if len(rest) > 1 else None, down, shared)
        own = [f"{Scratch.OWN}{name}" for name in ("made", "shared_made")]
        between = Between(
            env.words(own[0]),
            env.words(own[1]) if shared else None,
            env.buffer(own[0]),
            env.buffer(own[1]) if shared else None,
            env.scratch("listed"),
        )
        correction = env.buffer(mixture.route.inputs[2]) if len(mixture.route.inputs) > 2 else None
        choosing = choosing_of(mixture.route, sizes.experts, correction)
        up_cut, down_cut = params.up(plan, sizes, choosing.words), params.down(plan, sizes)
        assert isinstance(up_cut, UpCut)
        assert isinstance(down_cut, DownCut)
        after = [node for node in group.epilogue if node is not mixture.joined]
        finish = Epilogue(env, group, [mixture.joined], after)
        alone = fits(choosing, sizes.rows, up_cut.warps)
        Up(env, sizes, up_cut, format, choosing, weights, between, alone).emit(x, logits, gate)
        down = EarlyDown if sizes.early else Down
        down(env, sizes, down_cut, format, weights, between).emit(finish)


def _matrix(env: Any, name: str, format: Format) -> Matrix:
    columns = int(env.plan.circuit.types[name].shape[-1])
    return Matrix(env.words(name), columns, format.columns, scales_of(env, name))


def _emit_router(env: Any, group: Group, params: MixtureParams, mixture: Mixture, logits: Any, gate: Any) -> None:
    """logits = x router^T, and what the shared expert's gate is the sigmoid of; x itself, if it is normed here."""
    plan = env.plan
    keep = lambda target: lambda row, column, sums: store(target, [row, column], sums[0])  # noqa: E731
    pairs = [(mixture.route.inputs[1], logits)] + ([(mixture.vector.inputs[1], gate)] if mixture.vector else [])
    hidden = sizes_of(plan, mixture).hidden
    cut, node = router_cut(plan, params, hidden), folded(plan, group, params, mixture)
    if node is None:
        emit_prologue(env, group, PROLOGUE_WARPS)
    if cut is None:
        projections = [Projection((env.buffer(name),), keep(target)) for name, target in pairs]
        return emit_plain(env, env.flat(mixture.x), projections, blocks_per_processor=4)
    projections = [Projection((env.words(name),), keep(target)) for name, target in pairs]
    norm = norm_of(env, node, stored=True) if node else None
    source = mixture.x if node is None else node.inputs[0]
    Stream(env, cut, env.words(source), plan.circuit.types[source].dtype, projections, norm).emit()


@kernel
class MixturePlain(Kernel):
    """Experts, routing and what lies between them node by node, in any shape and dtype: weights are read for each row. The
    last resort."""

    name = "cuda.mixture_plain"
    patterns = ("mixture", "route", "experts")

    @dataclass(frozen=True)
    class Params:
        """blocks_per_processor: that stay and take column after column. warps: of blocks that have one row."""

        blocks_per_processor: int = within(4, 1, 16)
        warps: int = within(16, 1, 32)

    @staticmethod
    def refuse(plan: Plan, group: Group, params: Any) -> str | None:
        known = {"route", "experts", "linear", "scale_rows", *ELEMENTWISE}
        foreign = sorted({node.op for node in (*group.anchors, *group.epilogue)} - known)
        if reason := refuse_packed(plan, group):
            return reason
        if foreign:
            return f"no form of {', '.join(foreign)} among experts"
        types = plan.circuit.types
        routes = [(node, int(types[node.inputs[1]].shape[0])) for node in group.anchors if node.op == "route"]  # type: ignore[union-attr]
        reasons = [reason for node, experts in routes if (reason := refuse_route(node, experts))]
        return reasons[0] if reasons else refuse_prologue(plan, group)

    @staticmethod
    def scratch(plan: Plan, group: Group, params: Any) -> tuple[Scratch, ...]:
        types, crossing = plan.circuit.types, set(plan.crossing(group))
        before = {value.name for node in group.prologue for value in node.outputs}
        inner = [name for name in group.made if name not in crossing and name not in before]
        own = []
        for node in group.anchors:
            if node.op == "route":
                own.append(Scratch.own(f"{node.name} logits", _logits_type(plan, node)))
            if node.op == "experts":
                pairs, columns = types[node.inputs[1]].elements(), int(types[node.inputs[3]].shape[2])  # type: ignore[union-attr]
                own.append(Scratch.own(f"{node.name} made", TensorType("f32", (pairs, columns))))
        return (*prologue_scratch(plan, group), *(Scratch(name, types[name]) for name in inner), *own)  # type: ignore[arg-type]

    @staticmethod
    def emit(env, group: Group, params: Any) -> None:
        emit_prologue(env, group, params.warps)
        for node in group.nodes:
            if node in group.prologue:
                continue
            x, *_ = node.inputs
            if node.op == "linear":
                projection = Projection((env.buffer(node.inputs[1]),), _keep(env, node))
                emit_plain(env, env.flat(x), [projection], blocks_per_processor=params.blocks_per_processor)
            elif node.op == "route":
                _emit_plain_route(env, node, params.blocks_per_processor)
            elif node.op == "experts":
                emit_plain_experts(env, node, env.scratch(f"{node.name} made"))
            else:
                emit_rows(env, [node], [node.name], warps=params.warps)


def _keep(env: Any, node: Node) -> Any:
    """finish(row, column, sums) of a product alone."""
    target, bias = env.flat(node.name), env.buffer(node.inputs[2]) if len(node.inputs) > 2 else None

    def finish(row, column, sums):
        store(target, [row, column], sums[0] if bias is None else sums[0] + load(bias, [column], constant=True))

    return finish


def _logits_type(plan: Plan, node: Node) -> TensorType:
    return TensorType("f32", (plan.rows, int(plan.circuit.types[node.inputs[1]].shape[0])))  # type: ignore[union-attr]


def _emit_plain_route(env: Any, node: Node, blocks_per_processor: int) -> None:
    x, router, *corrections = node.inputs
    logits = env.scratch(f"{node.name} logits")
    projection = Projection((env.buffer(router),), lambda row, column, sums: store(logits, [row, column], sums[0]))
    ids, share = (env.buffer(value.name) for value in node.outputs)
    choosing = choosing_of(node, projection.columns, env.buffer(corrections[0]) if corrections else None)
    emit_plain(env, env.flat(x), [projection], blocks_per_processor=blocks_per_processor)
    emit_route(env, choosing, logits, ids, share)
