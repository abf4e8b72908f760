"""Stage `resolve`: a `Program` and its decisions (switches, dims, dtypes) to a `Circuit`.

Blocks are inlined, `select` and `when` decided, every type computed by the op table. Faults are collected;
a value whose making failed is poisoned, so that one fault is told once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from ..circuit.ir import Circuit, Entry, Input, Node, State, Storage, Table, Value, Weight
from ..circuit.types import DTYPE_BITS, FLOAT_DTYPES, ROWS, StateType, TensorType, ValueType
from ..errors import Fault, Location, ProgramError, did_you_mean
from ..ops import TABLE, OpContext, TypeRuleError
from ..ops.base import REQUIRED, Op
from ..ops.linear import MASK_BITS
from .expressions import Arithmetic, Call, Expression, Item, Literal, Ref, Statement, parse_expression
from .load import Block, Body, Program, Repeat, When
from .schema import BlockWeights, InputDecl, SwitchValue, WeightDecl
from .source import Places


@dataclass(frozen=True)
class Bindings:
    """The decisions of one family and checkpoint.

    dims and params are given under the *config key* that the program maps them to (`hidden_size`), or under the
    program's own name; switches left out take the first value that the program lists.
    """

    config: Mapping[str, Any] = field(default_factory=dict)
    switches: Mapping[str, SwitchValue] = field(default_factory=dict)
    act: str | None = None
    wt: str | None = None
    kv: str | None = None
    weight_dtypes: Mapping[str, str] = field(default_factory=dict)


class _Refused(Exception):
    """Unwinds one statement; its fault is in the list already (or its cause was)."""


@dataclass(frozen=True)
class _Namespace:
    """A prefix: `layer` in `layer.q_proj`. Of a repeated block: `count` of them, prefix_0, prefix_1, ..."""

    prefix: str
    count: int | None = None


_POISON = Value("", StateType(""))


def resolve(program: Program, bindings: Bindings | None = None) -> Circuit:
    """Decide everything but the number of rows.

    Raises:
        ProgramError: every fault found, each with its line.
    """
    return _Resolver(program, bindings or Bindings()).run()


def switch_space(program: Program) -> dict[str, list[SwitchValue]]:
    """The program's switches and their legal values, the default first."""
    return dict(program.file.switches)


class _Resolver:
    def __init__(self, program: Program, bindings: Bindings):
        self.program = program
        self.file = program.file
        self.bindings = bindings
        self.faults: list[Fault] = []
        self.nodes: list[Node] = []
        self.used: set[str] = set()
        self.dims: dict[str, int] = {}
        self.params: dict[str, Any] = {}
        self.switches: dict[str, SwitchValue] = {}
        self.constants: dict[str, int | str] = {}
        self.dtypes: dict[str, str] = {}
        self.weights: list[Weight] = []

    def run(self) -> Circuit:
        self._decide()
        if self.faults:
            raise ProgramError(self.faults)
        file, places = self.file, self.program.places
        inputs = self._inputs()
        states = self._states()
        tables = self._tables()
        scope: dict[str, Any] = {item.name: Value(item.name, item.type) for item in inputs}
        scope.update({state.name: Value(state.name, StateType(state.name)) for state in states})
        for table in tables:
            scope[table.name] = _Namespace(table.name)
            scope.update({value.name: value for value in table.tensors()})
        self._declare_weights(file.weights, "", places, scope, scope)
        self._check_names(places)
        if self.faults:
            raise ProgramError(self.faults)
        self.used = set(scope)
        self._body(self.program.body, scope, "")
        outputs = self._outputs(scope)
        effects = self._effects(scope)
        entries = self._entries(dict(outputs), {state.name for state in states}, scope)
        if self.faults:
            raise ProgramError(self.faults)
        return Circuit(
            name=file.program,
            dtypes=tuple(self.dtypes.items()),
            inputs=inputs,
            states=states,
            tables=tables,
            weights=tuple(self.weights),
            nodes=tuple(self.nodes),
            outputs=outputs,
            effects=effects,
            entries=entries,
            facts=tuple({**self.file.facts, **self.switches, **self.constants}.items()),
        )

    # -- decisions ---------------------------------------------------------------------------------------------

    def _fault(self, message: str, where: Location | None, **details: Any) -> None:
        self.faults.append(Fault(message, where=where, **details))

    def _decide(self) -> None:
        file, places, given = self.file, self.program.places, self.bindings
        for name, value in given.switches.items():
            legal = file.switches.get(name)
            if legal is None:
                hint = did_you_mean(name, file.switches)
                self._fault(f"program '{file.program}' has no switch '{name}'", places["switches",], hint=hint)
            elif value not in legal:
                self._no_value(name, value, places["switches", name])
        for name, legal in file.switches.items():
            if not legal:
                self._fault(f"switch '{name}' lists no values", places["switches", name])
            else:
                self.switches[name] = given.switches.get(name, legal[0])
        for name, key in file.dims.items():
            value = key if isinstance(key, int) else given.config.get(name, given.config.get(key))
            if value is None:
                self._fault(f"dimension {name} needs '{key}', which the config does not give", places["dims", name])
            elif isinstance(value, bool) or not isinstance(value, int) or value < 1:
                self._fault(f"dimension {name} must be a positive integer", places["dims", name], got=repr(value))
            else:
                self.dims[name] = value
        for name, key in file.params.items():
            value = given.config.get(name, given.config.get(key)) if isinstance(key, str) else key
            if value is None:
                self._fault(f"parameter {name} needs '{key}', which the config does not give", places["params", name])
            else:
                self.params[name] = value
        for name, key in file.constants.items():
            value = given.config.get(name, given.config.get(key)) if isinstance(key, str) else key
            if value is None:
                self._fault(f"constant {name} needs '{key}', which the config does not give", places["constants", name])
            elif type(value) not in (int, str):
                self._fault(f"constant {name} must be an integer or a text", places["constants", name], got=repr(value))
            else:
                self.constants[name] = value
        for kind, default in (("act", "f32"), ("wt", "bf16"), ("kv", "f32")):
            dtype = getattr(given, kind) or file.dtypes.get(kind, default)  # type: ignore[call-overload]
            if dtype not in FLOAT_DTYPES:
                expected = ", ".join(FLOAT_DTYPES)
                self._fault(f"dtype parameter '{kind}' must be a float dtype", places["dtypes",], expected=expected, got=dtype)
            self.dtypes[kind] = dtype

    def _holds(self, condition: Iterable[tuple[str, SwitchValue]], where: Location) -> bool:
        holds = True
        for name, value in condition:
            holds = self._switch(name, where, value) == value and holds
        return holds

    def _switch(self, name: str, where: Location, *values: SwitchValue) -> Any:
        if name in self.file.facts:  # decided by the program for good, whatever else a block could do
            return self.file.facts[name]
        if name not in self.switches:
            self._fault(f"no switch '{name}'", where, hint=did_you_mean(name, [*self.switches, *self.file.facts]))
            return None
        for value in values:
            if value not in self.file.switches[name]:
                self._no_value(name, value, where)
        return self.switches[name]

    def _no_value(self, name: str, value: Any, where: Location) -> None:
        expected = ", ".join(str(item).lower() for item in self.file.switches[name])
        self._fault(f"switch '{name}' has no value '{str(value).lower()}'", where, expected=expected)

    # -- declarations ------------------------------------------------------------------------------------------

    def _inputs(self) -> tuple[Input, ...]:
        inputs = []
        for name, decl in self.file.inputs.items():
            where = self.program.places["inputs", name]
            decl = decl if isinstance(decl, InputDecl) else InputDecl(type=decl)
            parsed = self._type(decl.type, where, name)
            source = str({**self.file.facts, **self.switches}.get(decl.source, decl.source))
            if parsed is not None:
                inputs.append(Input(name, parsed, source))
        return tuple(inputs)

    def _states(self) -> tuple[State, ...]:
        states = []
        for name, decl in self.file.state.items():
            where = self.program.places["state", name]
            layers, heads, dim = (self._size(value, where, name) for value in (decl.layers, decl.heads, decl.dim))
            dtype = self._dtype(decl.dtype, where, name)
            value_dim = None if decl.value_dim is None else self._size(decl.value_dim, where, name)
            if layers and heads and dim and dtype:
                states.append(State(name, decl.kind, layers, heads, dim, dtype, value_dim))
        return tuple(states)

    def _tables(self) -> tuple[Table, ...]:
        tables = []
        for name, decl in self.file.tables.items():
            where = self.program.places["tables", name]
            dim = self._size(decl.dim, where, name)
            if dim is not None and dim % 2:
                self._fault("a RoPE table turns pairs of columns", where, subject=name, expected="an even dim", got=str(dim))
            elif dim is not None:
                tables.append(Table(name, decl.kind, dim))
        return tuple(tables)

    def _declare_weights(
        self, decls: Mapping[str, Any], prefix: str, places: Places, scope: dict[str, Any], everything: dict[str, Any]
    ) -> None:
        """Put the weights of `decls` into `scope` under their short names and into `everything` under their full ones."""
        for name, decl in decls.items():
            where, full = places["weights", name], prefix + name
            if isinstance(decl, str):
                decl = WeightDecl(type=decl)
            if not self._holds(decl.when.items(), where):
                continue
            if isinstance(decl, BlockWeights):
                block = self.program.blocks[decl.block]
                count = None if decl.repeat is None else self._count(decl.repeat, where, full)
                scope[name] = everything[full] = _Namespace(full, count)
                for prefix_of_one in [full] if decl.repeat is None else [f"{full}_{i}" for i in range(count or 0)]:
                    # Short names are for the block's own body (see _inline); here they would hide the program's.
                    self._declare_weights(block.file.weights, f"{prefix_of_one}.", block.places, {}, everything)
                continue
            text: str | None = decl.type if isinstance(decl.type, str) else None
            if not isinstance(decl.type, str):
                for switch, cases in decl.type.items():
                    text = cases.get(self._switch(switch, where, *cases))  # type: ignore[arg-type]
                if text is None and not self.faults:
                    self._fault("no type for this switch value", where, subject=full)
            parsed = self._type(text, where, full) if text else None
            if parsed is None:
                continue
            if full in self.bindings.weight_dtypes:
                parsed = TensorType(self.bindings.weight_dtypes[full], parsed.shape)
            storage = self._storage(decl.storage, parsed, where, full) if decl.storage else None
            self.weights.append(Weight(full, parsed, storage))
            scope[name] = everything[full] = Value(full, parsed)

    def _storage(self, text: str, weight: TensorType, where: Location, subject: str) -> Storage | None:
        try:
            storage = Storage.parse(text)
        except ValueError as problem:
            expected = "fp8 or int8 with 'per tensor', 'per row' or a block as 128x128; nvfp4; mxfp4"
            self._fault(str(problem), where, subject=subject, expected=expected)
            return None
        reason = storage.refuse(weight)
        if reason:
            self._fault(reason, where, subject=subject, got=str(weight))
        return None if reason else storage

    def _check_names(self, places: Places) -> None:
        sections = ("inputs", "state", "tables", "weights")
        seen: dict[str, str] = {}
        for section in sections:
            for name in getattr(self.file, section):
                if name in seen:
                    self._fault(f"'{name}' is declared in {seen[name]} and in {section}", places[section, name])
                seen[name] = section

    def _dtype(self, text: str, where: Location, subject: str) -> str | None:
        dtype = self.dtypes.get(text, text)
        if dtype not in DTYPE_BITS:
            hint = did_you_mean(text, [*self.dtypes, *DTYPE_BITS])
            self._fault(f"unknown dtype '{text}'", where, subject=subject, hint=hint)
            return None
        return dtype

    def _type(self, text: str, where: Location, subject: str) -> TensorType | None:
        """'wt[H, 2*H]' to a type."""
        name, bracket, rest = text.partition("[")
        if not bracket or not rest.endswith("]"):
            self._fault(f"a type is written dtype[dims]: {text!r}", where, subject=subject)
            return None
        dtype = self._dtype(name.strip(), where, subject)
        dims = [self._dim_value(part.strip(), where, subject) for part in rest[:-1].split(",") if part.strip()]
        if dtype is None or any(dim is None for dim in dims):
            return None
        return TensorType(dtype, tuple(dims))  # type: ignore[arg-type]

    def _dim_value(self, value: int | str, where: Location, subject: str) -> int | str | None:
        if value == ROWS:
            return ROWS
        try:
            number = value if isinstance(value, int) else self._arithmetic(parse_expression(value, where), where, subject)
        except _Refused:
            return None
        except ProgramError as error:
            self.faults.extend(error.faults)
            return None
        if number < 1:
            self._fault(f"dimension '{value}' is {number}", where, subject=subject, expected="1 or more")
            return None
        return number

    def _size(self, value: int | str, where: Location, subject: str) -> int | None:
        """A dimension that must be known now: of what outlives a call, and so cannot depend on its rows."""
        size = self._dim_value(value, where, subject)
        if isinstance(size, str):
            self._fault("the row axis has no place here", where, subject=subject, expected="a dimension", got=size)
            return None
        return size

    def _count(self, value: int | str, where: Location, subject: str) -> int:
        """How often something is repeated: a dimension that may be 0."""
        try:
            number = value if isinstance(value, int) else self._arithmetic(parse_expression(value, where), where, subject)
        except _Refused:
            return 0
        except ProgramError as error:
            self.faults.extend(error.faults)
            return 0
        if number < 0:
            self._fault(f"'{value}' is {number}", where, subject=subject, expected="0 or more")
        return max(number, 0)

    def _arithmetic(self, expression: Expression, where: Location, subject: str, scope: Mapping[str, Any] | None = None) -> int:
        """A number of literals, dims and, with a scope, the numbers in it (loop indices and a block's `numbers`), constants, and
        items of parameters that are lists."""
        if isinstance(expression, Literal) and isinstance(expression.value, int):
            return expression.value
        if isinstance(expression, Ref):
            if scope is not None and isinstance(scope.get(expression.name), int):
                return scope[expression.name]
            if expression.name in self.dims:
                return self.dims[expression.name]
            if scope is not None and isinstance(self.constants.get(expression.name), int):
                return self.constants[expression.name]  # type: ignore[return-value]
            hint = did_you_mean(expression.name, self.dims)
            self._fault(f"unknown dimension '{expression.name}'", where, subject=subject, hint=hint)
            raise _Refused
        if isinstance(expression, Arithmetic):
            left = self._arithmetic(expression.left, where, subject, scope)
            right = self._arithmetic(expression.right, where, subject, scope)
            if expression.operator == "//" and (right == 0 or left % right):
                self._fault(f"{left} // {right} is not whole", where, subject=subject)
                raise _Refused
            table: dict[str, Callable[[int, int], int]] = {
                "+": int.__add__,
                "-": int.__sub__,
                "*": int.__mul__,
                "//": int.__floordiv__,
            }
            return table[expression.operator](left, right)
        if isinstance(expression, Item) and scope is not None and not expression.rest:
            return self._listed(expression, where, subject, scope)
        if isinstance(expression, Call) and expression.function == "mask_words" and len(expression.args) == 1:
            return -(-self._arithmetic(expression.args[0], where, subject) // MASK_BITS)
        self._fault("a dimension is made of names, integers, + - * // and mask_words()", where, subject=subject)
        raise _Refused

    def _listed(self, item: Item, where: Location, subject: str, scope: Mapping[str, Any]) -> int:
        """One of a parameter's numbers; true counts as 1."""
        values, index = self.params.get(item.name), self._arithmetic(item.index, where, subject, scope)
        if not isinstance(values, list):
            hint = did_you_mean(item.name, [name for name, value in self.params.items() if isinstance(value, list)])
            self._fault(f"'{item.name}' is no parameter that is a list", where, subject=subject, hint=hint)
        elif not 0 <= index < len(values):
            self._fault(f"'{item.name}' has no [{index}]", where, subject=subject, expected=f"0..{len(values) - 1}")
        elif not isinstance(values[index], int):
            self._fault(f"'{item.name}[{index}]' is no whole number", where, subject=subject, got=repr(values[index]))
        else:
            return int(values[index])
        raise _Refused

    # -- body --------------------------------------------------------------------------------------------------

    def _body(self, body: Body, scope: dict[str, Any], prefix: str) -> None:
        later = _assigned_names(body)
        for item in body:
            if isinstance(item, When):
                chosen = item.do if self._holds(item.condition, item.where) else item.otherwise
                self._body(chosen, scope, prefix)
                continue
            if isinstance(item, Repeat):
                self._repeat(item, scope, prefix)
                continue
            try:
                values = self._evaluate(item.value, item, scope, prefix, later, item.targets)
            except _Refused:
                values = (_POISON,) * len(item.targets)
            if len(values) != len(item.targets):
                names = f"{len(item.targets)} names ({', '.join(item.targets)})"
                self._fault(f"{len(values)} values are assigned to {names}", item.where)
                values = (_POISON,) * len(item.targets)
            scope.update(zip(item.targets, values, strict=True))

    def _repeat(self, item: Repeat, scope: dict[str, Any], prefix: str) -> None:
        """The lines once for each index. Names live on from one to the next, so `x = layer(x, ...)` is a stack of layers."""
        if item.index in scope:
            self._fault(f"'{item.index}' is the name of something else already", item.where)
            return
        collected: dict[str, list[Value]] = {name: [] for name, *_ in item.collect}
        for index in range(self._count(item.count, item.where, item.index)):
            scope[item.index] = index
            self._body(item.do, scope, prefix)
            for name, _, inside, where in item.collect:
                try:
                    collected[name].append(self._lookup(inside, Statement((name,), Ref(inside), where), scope, {}))
                except _Refused:
                    collected[name].append(_POISON)
        scope.pop(item.index, None)
        for name, function, inside, where in item.collect:
            scope[name] = self._join(name, function, inside, collected[name], where, prefix)

    def _join(self, name: str, function: str, inside: str, values: list[Value], where: Location, prefix: str) -> Value:
        op = TABLE.get(function)
        if op is None or not op.variadic:
            known = [other.name for other in TABLE.values() if other.variadic]
            self._fault(f"'{function}' is no op that joins", where, subject=name, expected=" or ".join(known))
            return _POISON
        if not values or _POISON in values:
            if not values:
                self._fault("nothing to collect: the loop runs 0 times", where, subject=name)
            return _POISON
        at = Statement((name,), Ref(inside), where)
        made = {f"{inside}{index}": value for index, value in enumerate(values)}
        call = Call(function, tuple(map(Ref, made)), ())
        try:
            return self._apply(op, call, at, made, prefix, {}, (name,))[0]
        except _Refused:
            return _POISON

    def _evaluate(
        self,
        expression: Expression,
        at: Statement,
        scope: dict[str, Any],
        prefix: str,
        later: dict,
        targets: tuple[str, ...] = (),
    ) -> tuple[Any, ...]:
        if isinstance(expression, Ref):
            return (self._lookup(expression.name, at, scope, later),)
        if isinstance(expression, Item):
            return (self._item(expression, at, scope, later),)
        if not isinstance(expression, Call):
            self._fault("a value is a name or a call", at.where, subject=at.targets[0])
            raise _Refused
        if expression.function == "select":
            return self._select(expression, at, scope, prefix, later, targets)
        if expression.function in self.program.blocks:
            return self._inline(self.program.blocks[expression.function], expression, at, scope, prefix, later)
        op = TABLE.get(expression.function)
        if op is None:
            hint = did_you_mean(expression.function, [*TABLE, *self.program.blocks, "select"])
            self._fault(f"unknown op '{expression.function}'", at.where, subject=at.targets[0], hint=hint)
            raise _Refused
        return self._apply(op, expression, at, scope, prefix, later, targets)

    def _lookup(self, name: str, at: Statement, scope: dict[str, Any], later: dict) -> Any:
        if name in scope:
            if scope[name] is _POISON:
                raise _Refused
            return scope[name]
        head, _, rest = name.partition(".")
        if rest and isinstance(scope.get(head), _Namespace):
            full = f"{scope[head].prefix}.{rest}"
            if full in scope:
                return scope[full]
            inside = [key for key in scope if key.startswith(f"{scope[head].prefix}.")]
            self._fault(f"'{head}' has no '{rest}' here", at.where, subject=at.targets[0], hint=did_you_mean(full, inside))
            raise _Refused
        if name in later:
            message = f"'{name}' is used before it is defined (line {later[name].line}); a body is read from top to bottom"
            if name in at.targets:
                message = f"'{name}' is defined by itself: a cycle"
            self._fault(message, at.where, subject=at.targets[0])
        else:
            hint = did_you_mean(name, scope)
            self._fault(f"unknown name '{name}'", at.where, subject=at.targets[0], hint=hint)
        raise _Refused

    def _item(self, item: Item, at: Statement, scope: dict[str, Any], later: dict) -> Any:
        """One of a repeated block's weights, or a weight in it."""
        group = self._lookup(item.name, at, scope, later)
        index = self._arithmetic(item.index, at.where, at.targets[0], scope)
        if not isinstance(group, _Namespace) or group.count is None:
            self._fault(f"'{item.name}' is no repeated block", at.where, subject=at.targets[0])
            raise _Refused
        if not 0 <= index < group.count:
            expected = f"0..{group.count - 1}" if group.count else "none: it is repeated 0 times"
            self._fault(f"'{item.name}' has no [{index}]", at.where, subject=at.targets[0], expected=expected)
            raise _Refused
        one = f"{group.prefix}_{index}"
        if not item.rest:
            return _Namespace(one)
        full = f"{one}.{item.rest}"
        if full not in scope:
            inside = [key.removeprefix(f"{one}.") for key in scope if key.startswith(f"{one}.")]
            hint = did_you_mean(item.rest, inside)
            self._fault(f"'{item.name}[{index}]' has no '{item.rest}' here", at.where, subject=at.targets[0], hint=hint)
            raise _Refused
        return scope[full]

    def _select(self, call: Call, at: Statement, scope, prefix, later, targets) -> tuple[Any, ...]:
        if len(call.args) != 1 or not isinstance(call.args[0], Ref) or not call.kwargs:
            self._fault("select is written select(switch, value=expression, ...)", at.where, subject=at.targets[0])
            raise _Refused
        switch = call.args[0].name
        cases = {_switch_literal(name): branch for name, branch in call.kwargs}
        value = self._switch(switch, at.where, *cases)
        if value is None:
            raise _Refused
        if value not in cases:
            self._fault(f"select({switch}) has no case for '{value}'", at.where, subject=at.targets[0])
            raise _Refused
        return self._evaluate(cases[value], at, scope, prefix, later, targets)

    def _inline(self, block: Block, call: Call, at: Statement, scope, prefix, later) -> tuple[Any, ...]:
        given = dict(call.kwargs)
        group = given.pop("weights", None)
        names = block.file.args
        numbers = block.file.numbers
        for name in given:
            if name not in names and name not in numbers:
                hint = did_you_mean(name, [*names, *numbers, "weights"])
                self._fault(f"block '{block.file.block}' has no argument '{name}'", at.where, subject=at.targets[0], hint=hint)
                raise _Refused
        placed = dict(zip(names, call.args, strict=False))
        for name in placed.keys() & given.keys():
            self._fault(f"block '{block.file.block}' gets argument '{name}' twice", at.where, subject=at.targets[0])
            raise _Refused
        given.update(placed)
        missing = [name for name in names if name not in given]
        if missing or len(call.args) > len(names):
            expected = f"({', '.join(names)}, weights=...)"
            self._fault(f"block '{block.file.block}' got other arguments", at.where, subject=at.targets[0], expected=expected)
            raise _Refused
        inner: dict[str, Any] = {key: value for key, value in scope.items() if "." in key}
        for name, default in numbers.items():
            inner[name] = self._arithmetic(given.pop(name, Literal(default)), at.where, at.targets[0], scope)
        for name, expression in given.items():
            inner[name] = self._evaluate(expression, at, scope, prefix, later)[0]
        inner_prefix = prefix
        if group is not None:
            named = isinstance(group, Ref | Item)
            namespace = self._evaluate(group, at, scope, prefix, later)[0] if named else None
            if not isinstance(namespace, _Namespace):
                self._fault("weights= takes the name of a block's weights", at.where, subject=at.targets[0])
                raise _Refused
            if namespace.count is not None:
                hint = f"Write {namespace.prefix}[0], or [i] in a loop."
                self._fault(f"'{namespace.prefix}' is repeated: which one?", at.where, subject=at.targets[0], hint=hint)
                raise _Refused
            inner_prefix = f"{namespace.prefix}."
            inner.update({key.removeprefix(inner_prefix): value for key, value in scope.items() if key.startswith(inner_prefix)})
        self._body(block.body, inner, inner_prefix)
        at_return = Statement(at.targets, Ref(""), block.places["returns",])
        return tuple(self._lookup(name, at_return, inner, {}) for name in block.file.returns)

    def _apply(self, op: type[Op], call: Call, at: Statement, scope, prefix, later, targets) -> tuple[Value, ...]:
        subject = at.targets[0]
        attrs: dict[str, Any] = {}
        args: list[Value] = [self._evaluate(arg, at, scope, prefix, later)[0] for arg in call.args]
        for name, expression in call.kwargs:
            if name in op.attrs:
                attrs[name] = self._attribute(op, name, expression, at, scope)
            elif name in op.optional:
                args.append(self._evaluate(expression, at, scope, prefix, later)[0])
            else:
                hint = did_you_mean(name, [*op.attrs, *op.optional])
                self._fault(f"op '{op.name}' has no argument '{name}'", at.where, subject=subject, hint=hint)
                raise _Refused
        for name, attr in op.attrs.items():
            if name not in attrs:
                if attr.default is REQUIRED:
                    self._fault(f"op '{op.name}' needs {name}=", at.where, subject=subject)
                    raise _Refused
                attrs[name] = attr.default
        most = len(op.inputs) + len(op.optional)
        if len(args) < len(op.inputs) or (len(args) > most and not op.variadic):
            expected = f"{', '.join(op.inputs)}" + (", ..." if op.variadic else "")
            self._fault(f"op '{op.name}' got {len(args)} inputs", at.where, subject=subject, expected=expected)
            raise _Refused
        bad = [arg for arg in args if not isinstance(arg, Value)]
        if bad:
            what = f"'{bad[0].prefix}' is a group of names" if isinstance(bad[0], _Namespace) else f"{bad[0]} is a number"
            self._fault(f"{what}, not a value", at.where, subject=subject)
            raise _Refused
        try:
            types = op.infer([arg.type for arg in args], attrs, OpContext(self.dtypes["act"]))
        except TypeRuleError as error:
            self._fault(
                f"{op.name}: {error.message}", at.where, subject=subject, expected=error.expected, got=error.got, hint=error.hint
            )
            raise _Refused from None
        outputs = self._new_values(op, types, targets, prefix)
        ordered = tuple((name, attrs[name]) for name, attr in op.attrs.items() if not attr.quiet or attrs[name] != attr.default)
        self.nodes.append(Node(op.name, tuple(arg.name for arg in args), outputs, ordered, at.where))
        return outputs

    def _attribute(self, op: type[Op], name: str, expression: Expression, at: Statement, scope: Mapping[str, Any]) -> Any:
        attr = op.attrs[name]
        value: Any = None
        own = isinstance(expression, Ref) and isinstance(scope.get(expression.name), int)  # a block's number hides a parameter
        if isinstance(expression, Literal):
            value = expression.value
        elif isinstance(expression, Ref) and expression.name in self.params and not own:
            value = self.params[expression.name]
        elif isinstance(expression, Ref) and expression.name in self.switches:
            value = self.switches[expression.name]
        elif isinstance(expression, Ref) and expression.name in self.file.facts:
            value = self.file.facts[expression.name]
        elif isinstance(expression, Ref) and attr.choices:
            value = expression.name
        elif isinstance(expression, Ref) and not own and expression.name not in {*self.dims, *self.constants}:
            hint = did_you_mean(expression.name, [*self.params, *self.switches, *self.dims, *self.constants])
            self._fault(f"{op.name}: {name}= is the unknown name '{expression.name}'", at.where, subject=at.targets[0], hint=hint)
            raise _Refused
        elif isinstance(expression, Ref | Item | Arithmetic):
            value = self._arithmetic(expression, at.where, f"{at.targets[0]} {name}=", scope)
            value = bool(value) if attr.type is bool and value in (0, 1) else value
        if attr.type is float and isinstance(value, int) and not isinstance(value, bool):
            value = float(value)
        if not isinstance(value, attr.type) or (attr.type is not bool and isinstance(value, bool)):
            expected = attr.type.__name__
            self._fault(
                f"{op.name}: {name}= has the wrong kind", at.where, subject=at.targets[0], expected=expected, got=repr(value)
            )
            raise _Refused
        if attr.choices and value not in attr.choices:
            expected = ", ".join(attr.choices)
            self._fault(f"{op.name}: {name}= has no value {value!r}", at.where, subject=at.targets[0], expected=expected)
            raise _Refused
        return value

    def _new_values(self, op: type[Op], types: tuple[ValueType, ...], targets: tuple[str, ...], prefix: str) -> tuple[Value, ...]:
        """Unique names: the assigned one where there is one, else the op's; numbered when taken."""
        wanted = targets if len(targets) == len(types) else (op.name,) * len(types)
        values = []
        for name, value_type in zip(wanted, types, strict=True):
            base = name if name.startswith(prefix) else prefix + name
            unique, count = base, 1
            while unique in self.used:
                count += 1
                unique = f"{base}_{count}"
            self.used.add(unique)
            values.append(Value(unique, value_type))
        return tuple(values)

    # -- results -----------------------------------------------------------------------------------------------

    def _outputs(self, scope: dict[str, Any]) -> tuple[tuple[str, str], ...]:
        outputs = []
        for public, text in self.file.outputs.items():
            where = self.program.places["outputs", public]
            at = Statement((public,), Ref(text), where)
            try:
                values = self._evaluate(parse_expression(text, where), at, scope, "", {})
            except _Refused:
                continue
            except ProgramError as error:
                self.faults.extend(error.faults)
                continue
            if isinstance(values[0], Value) and isinstance(values[0].type, TensorType):
                outputs.append((public, values[0].name))
            else:
                self._fault(f"output '{public}' is not a tensor", where)
        return tuple(outputs)

    def _effects(self, scope: dict[str, Any]) -> tuple[tuple[str, str], ...]:
        """The last version of each state: what its name is bound to at the end, unless `effects:` says otherwise."""
        effects = []
        for name in self.file.effects:
            if name not in self.file.state:
                hint = did_you_mean(name, self.file.state)
                self._fault(f"no state '{name}'", self.program.places["effects", name], hint=hint or "The program has no state.")
        for state in self.file.state:
            where = self.program.places["effects", state]
            try:
                last = self._lookup(self.file.effects.get(state, state), Statement((state,), Ref(""), where), scope, {})
            except _Refused:
                continue
            if last.type != StateType(state):
                self._fault(f"'{last.name}' is not a version of state '{state}'", where, got=str(last.type))
            effects.append((state, last.name))
        return tuple(effects)

    def _entries(self, outputs: Mapping[str, str], states: set[str], scope: dict[str, Any]) -> tuple[Entry, ...]:
        entries = []
        for name, decl in self.file.entries.items():
            where = self.program.places["entries", name]
            for output in decl.outputs:
                if output not in outputs and output not in self.file.outputs:
                    self._fault(f"entry '{name}' has no output '{output}'", where, hint=did_you_mean(output, self.file.outputs))
            for effect in decl.effects:
                if effect not in states:
                    self._fault(f"entry '{name}' names no state '{effect}'", where, hint=did_you_mean(effect, states))
            if not decl.outputs and not decl.effects:
                self._fault(f"entry '{name}' computes nothing", where, hint="Give it outputs or effects.")
            given = tuple(self._given(name, value, where, scope) for value in decl.given)
            entries.append(Entry(name, decl.rows, tuple(decl.outputs), tuple(decl.effects), decl.on_request, given))
        return tuple(entries)

    def _given(self, entry: str, name: str, where: Location, scope: dict[str, Any]) -> str:
        """The interior value that an entry is given. The caller hands it in under this name, so the circuit's must be it."""
        made = {value.name for node in self.nodes for value in node.outputs}
        value = scope.get(name)
        if value is _POISON:
            return name
        if not isinstance(value, Value) or value.name not in made or isinstance(value.type, StateType):
            hint = did_you_mean(name, [other for other in made if "." not in other])
            self._fault(f"entry '{entry}' is given '{name}', which is no tensor that the body makes", where, hint=hint)
        elif value.name != name:
            hint = "Give the value another name: this one is assigned several times."
            self._fault(f"entry '{entry}' is given '{name}', which is called '{value.name}' in the circuit", where, hint=hint)
        return name


def _assigned_names(body: Body) -> dict[str, Location]:
    names: dict[str, Location] = {}
    for item in body:
        if isinstance(item, When):
            names.update(_assigned_names(item.do))
            names.update(_assigned_names(item.otherwise))
        elif isinstance(item, Repeat):
            names.update(_assigned_names(item.do))
            names.update({name: where for name, _, _, where in item.collect})
        else:
            names.update({target: item.where for target in item.targets if target not in names})
    return names


def _switch_literal(name: str) -> SwitchValue:
    """In `select(flag, true=..., false=...)` the keywords stand for booleans."""
    return {"true": True, "false": False}.get(name, name)
