"""What README and docs show exists: files behind links, commands, options."""

import re
import shlex
from importlib.util import find_spec
from pathlib import Path

import click
import pytest
import typer
from pydantic import BaseModel

from circuitgraph.checkpoint import family
from circuitgraph.cli.app import app
from circuitgraph.language import schema
from circuitgraph.ops import TABLE
from circuitgraph.ops.base import REQUIRED, Op

ROOT = Path(__file__).parents[2]
PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").glob("*.md")])


def schema_of(module) -> list[type[BaseModel]]:
    """The kinds of objects that a file may hold, as a module declares them."""
    found = [item for item in vars(module).values() if isinstance(item, type) and issubclass(item, BaseModel)]
    return [item for item in found if item.__module__ == module.__name__ and item.model_fields]


COMMANDS = typer.main.get_command(app).commands  # type: ignore[attr-defined]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page):
    links = re.findall(r"\]\(([^)#]+)", page.read_text(encoding="utf-8"))
    missing = [link for link in links if "://" not in link and not (page.parent / link).exists()]
    assert missing == []


SHOWN = [
    (page.name, line.partition("#")[0].strip())
    for page in PAGES
    for line in re.findall(r"^(?:\.venv/bin/)?(circuitgraph [a-z].*)$", page.read_text(encoding="utf-8"), re.MULTILINE)
]
"""Commands on lines of their own."""
HELPED = [
    (name, re.split(r"   |[|>]", line)[0].strip())  # an explanation, or what the shell does with the output
    for name, command in COMMANDS.items()
    for line in re.findall(r"(circuitgraph [a-z][^\n]*)", f"{command.help}\n{command.epilog}")
]
"""Examples of `--help`."""


def test_there_are_commands_to_look_at():
    assert len({line for _, line in SHOWN}) > 15
    assert {page for page, _ in SHOWN} >= {"README.md", "tuning.md"}
    assert {name for name, _ in HELPED} == set(COMMANDS)


@pytest.mark.parametrize(("page", "line"), [*SHOWN, *HELPED], ids=lambda item: item)
def test_commands_are_understood(page, line, tmp_path, monkeypatch):
    """Names, options and their values: all that is known before files are read."""
    monkeypatch.chdir(tmp_path)
    _, name, *words = shlex.split(line)
    for word in words:  # what is named must be there
        if word.endswith("/"):
            Path(word).mkdir()
            (Path(word) / "config.json").write_text("{}")
        elif word.endswith((".cg", ".yaml", ".json")):
            Path(word).touch()
    context = click.Context(COMMANDS[name], info_name=name)
    assert COMMANDS[name].parse_args(context, words) == []


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["mtp_dense", "--widht", "4"], "No such option: --widht"),
        (["mtp_dense", "--stage", "nothing"], "'nothing' is not one of"),
        (["mtp_dense", "--width", "many"], "should be a valid integer"),
    ],
)
def test_a_command_that_is_misspelt_is_seen(words, told):
    """The control of the test above."""
    with pytest.raises(Exception, match=told):
        COMMANDS["show"].parse_args(click.Context(COMMANDS["show"]), words)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_files_that_are_named_exist(page):
    """Paths from the root in running text, and modules that are run."""
    text = page.read_text(encoding="utf-8")
    named = re.findall(r"`((?:circuitgraph|docs|examples|programs|runtime|schedules|tests)/[\w./-]*)", text)
    assert [name for name in named if not list(ROOT.glob(name.replace("NAME", "*").rstrip("/")))] == []
    modules = {name.rstrip(".") for name in re.findall(r"python -m (circuitgraph[\w.]+|tests[\w.]+)", text)}
    assert [name for name in modules if find_spec(name) is None] == []


def test_make_has_the_targets_that_are_named():
    rules = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    named = {
        name
        for page in PAGES
        for name in re.findall(r"`make ([\w-]+)|^make ([\w-]+)", page.read_text(), re.MULTILINE)
        for name in name
        if name
    }
    assert named >= {"demo", "test"}
    assert named <= rules


def signature(op: type[Op]) -> str:
    """How a program calls it: what may be left out in brackets, compile-time arguments with what they are without."""
    inputs = [*op.inputs, *(f"[{name}]" for name in op.optional), *(["..."] if op.variadic else [])]
    given = []
    for name, attr in op.attrs.items():
        kind = " or ".join(attr.choices) if attr.choices else attr.type.__name__
        given.append(f"{name}: {kind}" if attr.default is REQUIRED else f"{name}: {kind} = {attr.default}")
    return f"{op.name}({', '.join([*inputs, *given])})"


LANGUAGE = (ROOT / "docs" / "language.md").read_text(encoding="utf-8")


def test_every_op_is_in_the_manual():
    rows = re.findall(r"^\| `(\w+\(.*?\))` \|", LANGUAGE, re.MULTILINE)
    assert rows == [signature(op) for op in TABLE.values()]


@pytest.mark.parametrize("declaration", [*schema_of(schema), *schema_of(family)], ids=lambda item: item.__name__)
def test_every_key_is_in_the_manual(declaration):
    """In code, or as a key of an example."""
    code = " ".join(
        [*re.findall(r"`([^`\n]+)`", LANGUAGE), *re.findall(r"^```yaml\n(.*?)^```", LANGUAGE, re.MULTILINE | re.DOTALL)]
    )
    assert [key for key in declaration.model_fields if not re.search(rf"\b{key}\b", code)] == []


def test_the_map_names_every_package():
    text = (ROOT / "docs" / "layout.md").read_text(encoding="utf-8")
    packages = [path.parent.name for path in (ROOT / "circuitgraph").glob("*/__init__.py")]
    assert [name for name in packages if f"{name}/" not in text] == []


def test_every_package_is_in_the_distribution():
    import tomllib

    listed = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]
    homes = {"circuitgraph": "circuitgraph", **{name: f"circuitgraph.{name}" for name in ("programs", "schedules", "runtime")}}
    found = set()
    for folder, package in homes.items():
        for file in (ROOT / folder).rglob("__init__.py"):
            found.add(".".join([package, *file.parent.relative_to(ROOT / folder).parts]))
    assert set(listed) == found
