"""Are the pages' links whole, and do the names that docs/walk.md follows exist where it says?"""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
STOPS = re.findall(r"^\| `([\w/]+\.py)` \| `([\w.]+)` \|", (ROOT / "docs" / "walk.md").read_text("utf-8"), re.MULTILINE)


@pytest.mark.parametrize(("file", "name"), STOPS)
def test_the_walk_names_what_there_is(file: str, name: str) -> None:
    place: ast.AST = ast.parse((ROOT / file).read_text("utf-8"))
    for part in name.split("."):
        inside = ast.iter_child_nodes(place)
        [place] = [each for each in inside if isinstance(each, ast.ClassDef | ast.FunctionDef) and each.name == part]


def test_the_walk_has_stops() -> None:
    assert len(STOPS) > 20


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    targets = re.findall(r"\]\(([^)#]+?)(?:#[\w-]+)?\)", page.read_text("utf-8"))
    assert [target for target in targets if "://" not in target and not (page.parent / target).exists()] == []


def test_the_readme_tree_names_what_there_is() -> None:
    tree = (ROOT / "README.md").read_text("utf-8").partition("## The house")[2].partition("Each floor")[0]
    rooms = re.findall(r"^ {4,6}([a-z_]+(?:/|\.py))", tree, re.MULTILINE)
    places = [ROOT, ROOT / "tiermem", ROOT / "tests", ROOT / "swap"]
    assert len(rooms) > 10
    assert [room for room in rooms if not any((place / room).exists() for place in places)] == []
