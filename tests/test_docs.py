"""Are the pages' links whole, and do the names, keys, messages and tables that they show exist?

test_pages.py runs their code blocks.
"""

from __future__ import annotations

import ast
import dataclasses
import importlib.util
import json
import re
from pathlib import Path
from typing import Any

import pytest
from site_pages import made_pages

import tiermem
from tiermem.config import load_config

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
MADE = set(made_pages())
STOPS = re.findall(
    r"^\| `([\w/]+\.py)` \| `([\w.]+)` \|",
    (ROOT / "docs" / "walk.md").read_text("utf-8"),
    re.MULTILINE,
)


@pytest.mark.parametrize(("file", "name"), STOPS)
def test_the_walk_names_what_there_is(file: str, name: str) -> None:
    place: ast.AST = ast.parse((ROOT / file).read_text("utf-8"))
    for part in name.split("."):
        inside = ast.iter_child_nodes(place)
        [place] = [
            each
            for each in inside
            if isinstance(each, ast.ClassDef | ast.FunctionDef) and each.name == part
        ]


def test_the_walk_has_stops() -> None:
    assert len(STOPS) > 20


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    """A page that is made for the site exists there alone."""
    for target, anchor in re.findall(r"\]\(([^)#\s]*)(?:#([\w-]+))?\)", page.read_text("utf-8")):
        if "://" in target or target in MADE:
            continue
        file = page.parent / target if target else page
        assert file.exists(), target
        assert not anchor or anchor in headings(file), f"{target}#{anchor}"


def headings(file: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub and the site make them."""
    text = re.sub(r"```.*?```", "", file.read_text("utf-8"), flags=re.DOTALL)
    titles = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def test_the_tree_names_what_there_is() -> None:
    tree = (ROOT / "docs" / "code.md").read_text("utf-8").partition("Each floor")[0]
    rooms = re.findall(r"^ {0,2}([a-z_]+(?:/|\.py))", tree, re.MULTILINE)
    places = [ROOT, ROOT / "tiermem", ROOT / "tests", ROOT / "swap"]
    assert len(rooms) > 10
    assert [room for room in rooms if not any((place / room).exists() for place in places)] == []


# ---- configs and policies ------------------------------------------------------------------------

FRAGMENTS = [
    (page.name, fragment)
    for page in PAGES
    if page.name != "keys.md"
    for fragment in re.findall(
        r"(?:`)(\{?\"(?:tiermem|activation_checkpointing|durability|keep|verify)\": [^`\n]*?)(?:`|$|  )",
        page.read_text("utf-8"),
        re.MULTILINE,
    )
    if "..." not in fragment
]


@pytest.mark.parametrize(("page", "fragment"), FRAGMENTS)
def test_parts_of_configs_are_accepted(page: str, fragment: str, tmp_path: Path) -> None:
    found = json.loads(fragment if fragment.startswith("{") else f"{{{fragment}}}")
    config = found if set(found) & {"tiermem", "activation_checkpointing"} else {"tiermem": found}
    home = (
        {"device": "nvme"}
        if '"paths"' in fragment
        else {"device": "nvme", "nvme_path": str(tmp_path)}
    )
    zero = {"stage": 3, "offload_optimizer": home}
    shown = load_config(
        {"train_batch_size": 1, "gradient_clipping": 0, "zero_optimization": zero, **config}
    )
    assert shown.policy() is not None


def test_pages_show_parts_of_configs() -> None:
    assert len(FRAGMENTS) > 9


def test_policies_in_texts_have_the_fields_that_they_name() -> None:
    fields = {field.name for field in dataclasses.fields(tiermem.OffloadPolicy)}
    shown = {
        name
        for page in PAGES
        for arguments in re.findall(r"OffloadPolicy\(([^()`]*)", page.read_text("utf-8"))
        for name in re.findall(r"\b(\w+)=", arguments)
    }
    assert len(shown) > 7
    assert shown <= fields


# ---- messages ------------------------------------------------------------------------------------

MESSAGES = re.findall(
    r"^\| `([^`]+)`(?: \(a warning\))? \|",
    (ROOT / "docs" / "errors.md").read_text("utf-8"),
    re.MULTILINE,
)


def test_messages_are_those_of_the_program() -> None:
    said = [
        node.value
        for floor in ("swap", "tiermem", "tools")
        for file in (ROOT / floor).rglob("*.py")
        for node in ast.walk(ast.parse(file.read_text("utf-8")))
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    ]
    whole = "\n".join(said)
    pieces = [
        piece.strip() for message in MESSAGES if " " in message for piece in message.split("...")
    ]
    assert len(pieces) > 25
    assert [piece for piece in pieces if piece not in whole] == []


def test_every_exception_has_a_row() -> None:
    from tiermem.ranks.failures import RankLost
    from tiermem.swap.base.errors import CorruptionError

    assert {CorruptionError.__name__, RankLost.__name__} <= set(MESSAGES)


def test_changes_are_short_entries() -> None:
    page = (ROOT / "docs" / "CHANGELOG.md").read_text("utf-8")
    entries = re.findall(r"^- (.*(?:\n  .*)*)", page, re.MULTILINE)
    assert len(entries) > 40
    assert [each for each in entries if len(each) > 170] == []


# ---- programs ------------------------------------------------------------------------------------


def test_the_line_that_changes_is_one_of_the_program() -> None:
    changed = re.search(r"```diff\n-(.*)\n\+(.*)\n```", (ROOT / "README.md").read_text("utf-8"))
    assert changed is not None
    program = (ROOT / "README.md").read_text("utf-8").partition("```python\n")[2]
    assert changed[2] in program.partition("```")[0]
    assert changed[1] == "from transformers import Trainer"


def test_targets_extras_and_modules_that_pages_show_exist() -> None:
    text = "\n".join(page.read_text("utf-8") for page in PAGES)
    makefile, pyproject = (
        (ROOT / name).read_text("utf-8") for name in ("Makefile", "pyproject.toml")
    )
    targets = set(re.findall(r"(?:^|`)make ([a-z-]+)", text, re.MULTILINE))
    extras = {
        extra for extras in re.findall(r"tiermem\[([\w,]+)\]", text) for extra in extras.split(",")
    }
    modules = set(re.findall(r"python3? -m (tiermem[\w.]*)", text))
    assert len(targets) > 5 and len(extras) > 3 and modules
    assert [each for each in targets if not re.search(rf"^{each}:", makefile, re.MULTILINE)] == []
    assert [
        each for each in extras if not re.search(rf"^{each} = \[", pyproject, re.MULTILINE)
    ] == []
    assert [each for each in modules if importlib.util.find_spec(each) is None] == []


# ---- tables that are computed --------------------------------------------------------------------


def test_the_first_pages_table_is_that_of_the_page_of_sizes() -> None:
    from sizing_tables import BEGIN, END, MACHINES, PAGE

    shown = (ROOT / "README.md").read_text("utf-8").partition(BEGIN)[2].partition(END)[0].strip()
    assert shown.count("\n") == len(MACHINES) + 1
    assert shown in PAGE.read_text("utf-8")


@pytest.mark.slow  # 20 s
def test_sizes_are_what_plan_computes() -> None:
    from sizing_tables import MACHINES, PAGE, cell

    page = PAGE.read_text("utf-8")
    for machine, model, states, place in (
        (MACHINES[1], "1b", "exact", 1),
        (MACHINES[4], "8b", "compact", 3),
    ):
        found = cell(machine, model, states)
        assert found is not None
        table = page.partition(f"| {states}: tokens/s |")[2]
        row = next(line for line in table.splitlines() if line.startswith(f"| {machine.words} |"))
        assert row.split("|")[1 + place].strip() == found.full


def predictions() -> list[Any]:
    from sizing_tables import PREDICTED

    found = [each for page in PAGES for each in PREDICTED.findall(page.read_text("utf-8"))]
    return [pytest.param(*each, id=str(number)) for number, each in enumerate(found)]


@pytest.mark.slow  # 15 s each
@pytest.mark.parametrize(("command", "said"), predictions())
def test_lines_below_commands_are_what_plan_computes(command: str, said: str) -> None:
    from sizing_tables import predicted

    assert predicted(command) == said


def test_pages_predict() -> None:
    assert len(predictions()) > 7


def test_the_page_of_measurements_is_made_of_their_rows() -> None:
    from bench.measure import COLUMNS, ORDER, PAGE, load, page

    assert PAGE.read_text("utf-8") == page()
    for name in ORDER:
        assert all(set(row) <= set(COLUMNS) and row["commit"] for row in load(name)["rows"])


@pytest.mark.usefixtures("forked_python")
def test_measuring_appends_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A command's own JSON becomes rows, and a file keeps those that it has."""
    import shutil

    from bench import measure

    monkeypatch.setattr(measure, "FOLDER", tmp_path / "measured")
    shutil.copytree(ROOT / "docs" / "measured", measure.FOLDER)
    before = measure.load("step")["rows"]
    small = ("--preset", "exact,compact", "--params", "1M", "--loops", "1")
    question = measure.QUESTIONS["step"]._replace(words=("tiermem", "bench", "step", *small))
    monkeypatch.setitem(measure.QUESTIONS, "step", question)
    measure.append("step", measure.ask("step", tmp_path))
    after = measure.load("step")["rows"]
    assert after[: len(before)] == before
    assert [row["case"].partition(",")[0] for row in after[len(before) :]] == ["exact", "compact"]
    assert all(float(row["ratio"]) > 0 for row in after[len(before) :])
    assert "| exact, 1 M parameters |" in measure.page()


@pytest.mark.slow
def test_the_command_below_the_tables_prints_their_cell(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    from sizing_tables import MODELS, PAGE, SHOWN

    from tiermem.tools.cli import main

    (machine, model, states), page = SHOWN, PAGE.read_text("utf-8")
    (command,) = re.findall(r"^tiermem (plan .*)$", page, re.MULTILINE)
    table = page.partition(f"| {states}: tokens/s |")[2]
    row = next(line for line in table.splitlines() if line.startswith(f"| {machine.words} |"))
    shown = row.split("|")[2 + MODELS.index(model)].split("(")[0].strip()
    with pytest.raises(SystemExit) as ended:
        main([*command.split(), "--json", str(tmp_path / "plan.json")])
    assert ended.value.code == 0
    assert "TB written a day; a drive of 600 TBW would last" in " ".join(
        capsys.readouterr().out.split()
    )
    assert f"{json.loads((tmp_path / 'plan.json').read_text())['tokens_per_s']:,.0f}" == shown
    assert f"prints {shown} tokens/s" in page
