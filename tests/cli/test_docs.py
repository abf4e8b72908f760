"""What README and docs show exists: files behind links, commands, options."""

import re
from pathlib import Path

import pytest
import typer

from circuitgraph.cli.app import app

ROOT = Path(__file__).parents[2]
PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").glob("*.md")])
COMMANDS = typer.main.get_command(app).commands  # type: ignore[attr-defined]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page):
    links = re.findall(r"\]\(([^)#]+)", page.read_text(encoding="utf-8"))
    missing = [link for link in links if "://" not in link and not (page.parent / link).exists()]
    assert missing == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_commands_are_spelled_as_they_are(page):
    for line in re.findall(r"^(circuitgraph [a-z].*)$", page.read_text(encoding="utf-8"), re.MULTILINE):
        _, name, *words = line.partition("#")[0].split()
        options = {option for parameter in COMMANDS[name].params for option in (*parameter.opts, *parameter.secondary_opts)}
        unknown = [word for word in words if word.startswith("-") and word not in options]
        assert unknown == [], line


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
