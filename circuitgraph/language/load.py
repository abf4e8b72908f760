"""Stage `load`: program and block files to a `Program`: parsed statements, nothing decided yet."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

from ..errors import CircuitgraphError, Fault, Location, ProgramError, did_you_mean
from ..places import PROGRAMS, find_program
from .expressions import Call, Expression, Ref, Statement, parse_expression, parse_statement
from .schema import BlockFile, BlockWeights, DerivedFile, ProgramFile, RepeatDecl, SwitchValue, WhenDecl
from .source import Key, MergedPlaces, Places, read_yaml


@dataclass(frozen=True)
class When:
    """Statements under a condition on switches."""

    condition: tuple[tuple[str, SwitchValue], ...]
    do: Body
    otherwise: Body
    where: Location


@dataclass(frozen=True)
class Repeat:
    """Statements for each value of `index`, 0..count-1. `collect`: a name after the loop, the op that joins, a name inside."""

    index: str
    count: int | str
    do: Body
    collect: tuple[tuple[str, str, str, Location], ...]
    where: Location


Body: TypeAlias = "tuple[Statement | When | Repeat, ...]"


@dataclass(frozen=True)
class Block:
    file: BlockFile
    body: Body
    places: Places


@dataclass(frozen=True)
class Program:
    """A program file, its body parsed, with the blocks that it and they use."""

    file: ProgramFile
    body: Body
    blocks: dict[str, Block]
    places: Places

    @property
    def name(self) -> str:
        return self.file.program


def load_program(name_or_path: str | Path) -> Program:
    """Read a program and its blocks. Blocks are looked for in `blocks/` beside the program, then in the shipped ones.

    Raises:
        ProgramError: every fault of every file read, each with its line.
    """
    path = find_program(name_or_path)
    file, places = _read_program(path, ())
    faults: list[Fault] = []
    body = _parse_body(file.body, ("body",), places, faults)
    blocks: dict[str, Block] = {}
    folders = [path.parent / "blocks", PROGRAMS / "blocks"]
    _load_blocks(_used_blocks(file.weights, places), _Library(folders, file.blocks, blocks, faults), {}, ())
    faults += [
        Fault(f"no block of the program has a place '{slot}'", where=places["blocks", slot], hint=did_you_mean(slot, blocks))
        for slot in file.blocks
        if slot not in blocks
    ]
    if faults:
        raise ProgramError(faults)
    return Program(file, body, blocks, places)


def _read_program(path: Path, before: tuple[Path, ...]) -> tuple[ProgramFile, Places]:
    """A program file, laid over the one that it extends, if it does."""
    if path.is_file() and re.search(r"^extends:", path.read_text(encoding="utf-8", errors="replace"), re.MULTILINE):
        derived, places = read_yaml(path, DerivedFile)
        if path.resolve() in before:
            raise ProgramError(Fault(f"program '{derived.program}' extends itself", where=places["extends",]))
        beside = path.parent / f"{derived.extends}.yaml"
        base, base_places = _read_program(
            beside if beside.is_file() else find_program(derived.extends), (*before, path.resolve())
        )
        return derived.over(base), MergedPlaces(places, base_places)
    return read_yaml(path, ProgramFile)


@dataclass(frozen=True)
class _Library:
    """Where blocks are found, which ones stand in a program's slots, and what was loaded."""

    folders: list[Path]
    chosen: dict[str, str]
    blocks: dict[str, Block]
    faults: list[Fault]


def _used_blocks(weights: dict, places: Places) -> dict[str, Location]:
    return {decl.block: places["weights", name] for name, decl in weights.items() if isinstance(decl, BlockWeights)}


def _load_blocks(used: dict[str, Location], library: _Library, slots: dict[str, str], path: tuple[str, ...]) -> None:
    """`slots`: names that stand for another block unless the program chooses one."""
    blocks, faults, folders = library.blocks, library.faults, library.folders
    for called, where in used.items():
        name = library.chosen.get(called, slots[called]) if called in slots else called
        if name in path:
            faults.append(Fault(f"block '{name}' uses itself: {' -> '.join((*path, name))}", where=where))
            continue
        if called in blocks:
            continue
        files = [folder / f"{name}.yaml" for folder in folders]
        found = next((file for file in files if file.is_file()), None)
        if found is None:
            known = {file.stem for folder in folders for file in folder.glob("*.yaml")}
            faults.append(Fault(f"no block '{name}'", where=where, hint=did_you_mean(name, known)))
            continue
        try:
            file, places = read_yaml(found, BlockFile)
        except CircuitgraphError as error:
            faults.extend(error.faults)
            continue
        if file.block != name:
            faults.append(Fault(f"the file is called '{name}' but says 'block: {file.block}'", where=places["block",]))
        for arg in set(file.args) & set(file.weights):
            faults.append(Fault(f"'{arg}' is declared in args and in weights", where=places["weights", arg]))
        for number in set(file.numbers) & {*file.args, *file.weights}:
            faults.append(Fault(f"'{number}' is declared twice", where=places["numbers", number]))
        blocks[called] = Block(file, _parse_body(file.body, ("body",), places, faults), places)
        _load_blocks(_used_blocks(file.weights, places), library, file.slots, (*path, name))


def _parse_body(items: list, key: Key, places: Places, faults: list[Fault]) -> Body:
    body: list[Statement | When | Repeat] = []
    for index, item in enumerate(items):
        here = (*key, index)
        if isinstance(item, WhenDecl):
            do = _parse_body(item.do, (*here, "do"), places, faults)
            otherwise = _parse_body(item.otherwise, (*here, "otherwise"), places, faults)
            body.append(When(tuple(item.when.items()), do, otherwise, places[here]))
            continue
        if isinstance(item, RepeatDecl):
            ((index, count),) = item.repeat.items()
            do = _parse_body(item.do, (*here, "do"), places, faults)
            joins = []
            for name, text in item.collect.items():
                where = places[(*here, "collect", name)]
                try:
                    joins.append((name, *_join(parse_expression(text, where), where), where))
                except ProgramError as error:
                    faults.extend(error.faults)
            body.append(Repeat(index, count, do, tuple(joins), places[here]))
            continue
        try:
            body.append(parse_statement(item, places[here]))
        except ProgramError as error:
            faults.extend(error.faults)
    return tuple(body)


def _join(expression: Expression, where: Location) -> tuple[str, str]:
    """`op(name)` of a `collect`."""
    if isinstance(expression, Call) and len(expression.args) == 1 and not expression.kwargs:
        (inside,) = expression.args
        if isinstance(inside, Ref):
            return expression.function, inside.name
    raise ProgramError(Fault("what is collected is written op(name)", where=where))
