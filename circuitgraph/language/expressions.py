"""The one-line statements of a program body: `y, p = op(x, linear(h, fc), eps=eps)`.

The text has Python's expression syntax, so Python's own parser reads it; everything but assignments,
calls, names, numbers and strings is refused.
"""

from __future__ import annotations

import ast
from dataclasses import dataclass
from typing import TypeAlias

from ..errors import Fault, Location, ProgramError


@dataclass(frozen=True)
class Ref:
    """A name, dotted or not: `x`, `layer.q_proj`."""

    name: str


@dataclass(frozen=True)
class Item:
    """One of a repeated block's weights: `layers[i]`, or one weight in it: `layers[i].q_proj`."""

    name: str
    index: Expression
    rest: str = ""


@dataclass(frozen=True)
class Literal:
    value: int | float | str | bool


@dataclass(frozen=True)
class Arithmetic:
    """Dimension arithmetic: + - * // of names and integers."""

    operator: str
    left: Expression
    right: Expression


@dataclass(frozen=True)
class Call:
    function: str
    args: tuple[Expression, ...]
    kwargs: tuple[tuple[str, Expression], ...]


Expression: TypeAlias = Ref | Item | Literal | Arithmetic | Call


@dataclass(frozen=True)
class Statement:
    targets: tuple[str, ...]
    value: Expression
    where: Location


_OPERATORS = {ast.Add: "+", ast.Sub: "-", ast.Mult: "*", ast.FloorDiv: "//"}


def parse_statement(text: str, where: Location) -> Statement:
    """Parse `names = expression`.

    Raises:
        ProgramError: at `where`, for anything the language does not have.
    """
    try:
        body = ast.parse(text.strip()).body
    except SyntaxError as problem:
        raise _unparsed(text, where, problem) from None
    assign = body[0] if len(body) == 1 else None
    if not isinstance(assign, ast.Assign) or len(assign.targets) != 1:
        raise ProgramError(Fault(f"a body line is one assignment, 'name = op(...)': {text!r}", where=where))
    target = assign.targets[0]
    names = target.elts if isinstance(target, ast.Tuple) else [target]
    return Statement(tuple(_dotted(name, where) for name in names), _expression(assign.value, where), where)


def parse_expression(text: str, where: Location) -> Expression:
    """Parse one expression (a dimension, an output, a default)."""
    try:
        return _expression(ast.parse(text.strip(), mode="eval").body, where)
    except SyntaxError as problem:
        raise _unparsed(text, where, problem) from None


def _unparsed(text: str, where: Location, problem: SyntaxError) -> ProgramError:
    return ProgramError(Fault(f"cannot parse {text!r}: {problem.msg}", where=where))


def _dotted(node: ast.expr, where: Location) -> str:
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        return f"{_dotted(node.value, where)}.{node.attr}"
    raise ProgramError(Fault(f"expected a name, got {ast.unparse(node)!r}", where=where))


def _expression(node: ast.expr, where: Location) -> Expression:
    item, rest = node, ""
    while isinstance(item, ast.Attribute):
        item, rest = item.value, f"{item.attr}.{rest}".rstrip(".")
    if isinstance(item, ast.Subscript):
        return Item(_dotted(item.value, where), _expression(item.slice, where), rest)
    if isinstance(node, ast.Name | ast.Attribute):
        return Ref(_dotted(node, where))
    if isinstance(node, ast.Constant) and isinstance(node.value, int | float | str | bool):
        return Literal(node.value)
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub) and isinstance(node.operand, ast.Constant):
        value = node.operand.value
        if isinstance(value, int | float):
            return Literal(-value)
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
        operator = _OPERATORS[type(node.op)]
        return Arithmetic(operator, _expression(node.left, where), _expression(node.right, where))
    if isinstance(node, ast.Call):
        if any(isinstance(arg, ast.Starred) for arg in node.args) or any(key.arg is None for key in node.keywords):
            raise ProgramError(Fault("'*' arguments are not part of the language", where=where))
        names = [str(key.arg) for key in node.keywords]
        twice = next((name for name in names if names.count(name) > 1), None)
        if twice is not None:
            raise ProgramError(Fault(f"argument '{twice}' is given twice: {ast.unparse(node)!r}", where=where))
        args = tuple(_expression(arg, where) for arg in node.args)
        kwargs = tuple((str(key.arg), _expression(key.value, where)) for key in node.keywords)
        return Call(_dotted(node.func, where), args, kwargs)
    raise ProgramError(
        Fault(
            f"'{ast.unparse(node)}' is not part of the language",
            where=where,
            hint="Use calls of ops and blocks, names, numbers and + - * // in dimensions.",
        )
    )
