"""Is the site what it should be: all public names with their docstrings, nothing from elsewhere, no
warning?"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import site_pages

ROOT = Path(__file__).parent.parent


def test_every_public_name_is_described() -> None:
    assert len(site_pages.written_names()) > 500
    assert site_pages.without_docstring() == []


def test_a_name_that_nothing_describes_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    names = (
        "tiermem.swap.disk.queue.PathStats.used_bytes",
        "tiermem.swap.disk.queue.Figures.limits_s",
    )
    monkeypatch.setattr(site_pages, "written_names", lambda: names)
    assert site_pages.without_docstring() == [names[0]]


def test_every_public_name_is_asked_of_a_page() -> None:
    pages = site_pages.made_pages()
    for package in site_pages.packages():
        for name in site_pages.names_of(package):
            assert (
                f"#{name.written} }}" in pages[f"api/{package}.md"]
                or f"#{name.written}}}" in pages[f"api/{package}.md"]
                or f"::: {name.written}\n" in pages[f"api/{package}.md"]
            )


def test_every_page_is_in_the_menu() -> None:
    menu = (ROOT / "mkdocs.yml").read_text("utf-8").partition("\nnav:\n")[2]
    assert [page.name for page in (ROOT / "docs").glob("*.md") if page.name not in menu] == []


def test_names_of_integrations_that_pages_import_are_described() -> None:
    texts = [
        ROOT / "README.md",
        *(ROOT / "docs").glob("*.md"),
        *(ROOT / "docs" / "examples").glob("*.py"),
    ]
    imports = re.compile(r"from (tiermem\.integrations\.\w+) import (\w+)")
    shown = {
        ".".join(found) for file in texts for found in imports.findall(file.read_text("utf-8"))
    }
    assert len(shown) > 3
    assert shown <= set(site_pages.INTEGRATIONS)


def test_a_program_becomes_a_page(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text('"""Do it.\n\nBecause.\n"""\n\nimport os\n')
    assert site_pages.page_of_example(tmp_path / "a.py") == (
        '# Do it\n\nBecause.\n\n```python title="docs/examples/a.py"\nimport os\n```\n'
    )


@pytest.mark.parametrize(
    ("page", "found"),
    [
        ('<script src="https://cdn.example/a.js"></script>', ["https://cdn.example/a.js"]),
        ('<link rel="stylesheet" href="//fonts.example/b.css">', ["//fonts.example/b.css"]),
        ('<img src="pictures/loss.png"><a href="https://example.org">', []),
    ],
)
def test_what_comes_from_elsewhere_is_told(page: str, found: list[str]) -> None:
    assert site_pages.loaded_from_elsewhere(page) == found


def test_a_name_without_a_place_is_told(tmp_path: Path) -> None:
    (tmp_path / "index.html").write_text('<h2 id="tiermem.shard"></h2>')
    problems = site_pages.check(tmp_path)
    assert any(each.startswith("tiermem.AdamW:") for each in problems)
    assert any(each.startswith("tiermem.integrations.peft.merge_and_unload:") for each in problems)
    assert not any(each.startswith("tiermem.shard:") for each in problems)


@pytest.mark.slow  # 20 s
def test_the_site_is_built_without_warnings(tmp_path: Path) -> None:
    pytest.importorskip("mkdocs")
    pytest.importorskip("material")
    pytest.importorskip("mkdocstrings")
    command = [
        sys.executable,
        "-m",
        "mkdocs",
        "build",
        "--strict",
        "--site-dir",
        str(tmp_path / "site"),
    ]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert (tmp_path / "site" / "index.html").is_file()
    index = json.loads((tmp_path / "site" / "search" / "search_index.json").read_text())
    for words, page in (
        ("out of memory", "trouble.html"),
        ("jsonl", "finetune_8b.html"),
        ("tokenizer", "finetune_8b.html"),
    ):
        found = [each["location"] for each in index["docs"] if words in each["text"].lower()]
        found += [each["location"] for each in index["docs"] if words in each["title"].lower()]
        assert any(place.startswith(page) for place in found), words
