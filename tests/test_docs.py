"""Are the pages' links whole, do their commands, messages and programs exist, and does what they
show run?"""

from __future__ import annotations

import ast
import dataclasses
import importlib.util
import json
import re
import shlex
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import typer
from site_pages import made_pages
from torch import nn
from typer.core import TyperGroup

import tiermem
from tiermem.config import load_config
from tiermem.tools.cli import app

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


def test_the_readme_tree_names_what_there_is() -> None:
    tree = (
        (ROOT / "README.md")
        .read_text("utf-8")
        .partition("## The house")[2]
        .partition("Each floor")[0]
    )
    rooms = re.findall(r"^ {4,6}([a-z_]+(?:/|\.py))", tree, re.MULTILINE)
    places = [ROOT, ROOT / "tiermem", ROOT / "tests", ROOT / "swap"]
    assert len(rooms) > 10
    assert [room for room in rooms if not any((place / room).exists() for place in places)] == []


# ---- commands ------------------------------------------------------------------------------------

SHOWN = [
    (page.name, words)
    for page in PAGES
    for words in re.findall(
        r"(?:^ {4}|`)tiermem (?=[a-z-])([^`#\n]*?)(?:  .*)?(?:`|$)",
        page.read_text("utf-8"),
        re.MULTILINE,
    )
]


@pytest.mark.parametrize(("page", "words"), SHOWN)
def test_commands_have_the_options_that_pages_show(page: str, words: str) -> None:
    command: Any = typer.main.get_command(app)
    given = shlex.split(words)
    while isinstance(command, TyperGroup) and given and not given[0].startswith("-"):
        assert given[0] in command.commands, words
        command = command.commands[given.pop(0)]
    known = {option for each in command.params for option in (*each.opts, *each.secondary_opts)} | {
        "--help"
    }
    known |= {"--install-completion"} if isinstance(command, TyperGroup) else set()
    if command.context_settings.get("ignore_unknown_options"):  # they are another program's
        known |= set(given)
    assert [each for each in given if each.startswith("--") and each not in known] == []


def test_pages_show_commands() -> None:
    assert len(SHOWN) > 40


# ---- configs and policies ------------------------------------------------------------------------

FRAGMENTS = [
    (page.name, fragment)
    for page in PAGES
    if page.name != "keys.md"
    for fragment in re.findall(
        r"(?:^ {4}|`)(\{?\"(?:tiermem|activation_checkpointing|durability|keep|verify)\": [^`\n]*?)(?:`|$|  )",
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


# ---- programs ------------------------------------------------------------------------------------

CONFIG = {
    "train_micro_batch_size_per_gpu": 2,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
    "zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu"}},
}


class Regression(nn.Sequential):
    """Stands for a reader's model."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))

    def forward(self, x: torch.Tensor, y: torch.Tensor | None = None) -> Any:
        made = super().forward(x)
        return made if y is None else SimpleNamespace(loss=nn.functional.mse_loss(made, y))


def stand_ins() -> dict[str, Any]:
    """What pages leave to the reader."""
    x = torch.randn(8, 8)
    pairs = [{"x": row, "y": row[:1]} for row in x]
    return {
        "MyLargeModel": Regression,
        "model": Regression(),
        "dataset": pairs,
        "batches": [(x[:4], x[:4, :1]), (x[4:], x[4:, :1])],
        "loss_of": nn.functional.mse_loss,
    }


def blocks_of(page: Path) -> list[str]:
    return re.findall(r"```python\n(.*?)```", page.read_text("utf-8"), re.DOTALL)


@pytest.fixture(scope="module")
def trainers() -> None:
    """transformers' Trainer is imported now: packages that it finds start threads that stay."""
    pytest.importorskip("transformers.trainer")


RUN_HERE = ("README.md", "docs/activations.md", "docs/from_deepspeed.md", "docs/from_fsdp2.md")


@pytest.mark.parametrize("name", RUN_HERE)
def test_programs_of_a_page_run(
    name: str, trainers: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tqdm import tqdm

    monkeypatch.setattr(tqdm, "monitor_interval", 0)
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    monkeypatch.chdir(tmp_path)
    Path("ds.json").write_text(json.dumps(CONFIG))
    names = stand_ins()
    for block in blocks_of(ROOT / name):
        exec(compile(block, name, "exec"), names)  # the page's own program
    if "trainer" in names:
        first = names["trainer"].state.log_history[0]
        assert (
            first["tiermem_limited_by"] in ("compute", "disk", "link", "kernels")
            and first["tiermem_waited_s"] >= 0
        )
    if isinstance(names.get("engine"), tiermem.Engine):
        names["engine"].close()
    if name == "docs/activations.md":
        model, (tokens, targets) = names["Model"](), torch.randint(500, (2, 7, 3))
        wanted = nn.functional.cross_entropy(
            model.head(model.body(tokens)).flatten(0, 1), targets.flatten()
        )
        torch.testing.assert_close(model(tokens, targets), wanted)


def test_checkpoints_of_the_page_are_saved_and_opened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    engine = tiermem.initialize(model=Regression(), config=CONFIG)[0]
    engine.backward(engine(torch.ones(2, 8), torch.ones(2, 1)).loss)
    engine.step()
    names = {
        "engine": engine,
        "tiermem": tiermem,
        "shards": engine.shards,
        "optim": engine.optimizer,
    }
    [block] = blocks_of(ROOT / "docs" / "checkpoints.md")
    exec(block.replace("/mnt/nvme0", str(tmp_path)), names | {"scheduler": None, "loader": None})
    engine.close()


def test_the_line_that_changes_is_one_of_the_program() -> None:
    changed = re.search(r"```diff\n-(.*)\n\+(.*)\n```", (ROOT / "README.md").read_text("utf-8"))
    assert changed is not None
    assert changed[2] in blocks_of(ROOT / "README.md")[0]
    assert changed[1] == "from transformers import Trainer"


def test_every_page_with_programs_is_run() -> None:
    """Here, or by a test that names it."""
    shown = {str(page.relative_to(ROOT)) for page in PAGES if blocks_of(page)}
    tests = "\n".join(file.read_text("utf-8") for file in (ROOT / "tests").rglob("test_*.py"))
    assert len(shown) > 4
    assert [page for page in shown - set(RUN_HERE) if f'"{Path(page).name}"' not in tests] == []


def test_programs_are_in_blocks_that_tests_find() -> None:
    """An indented program would be run by no test."""
    texts = {
        page.name: re.sub(r"```.*?```", "", page.read_text("utf-8"), flags=re.DOTALL)
        for page in PAGES
    }
    begins = re.compile(
        r"^ {4}(?:import |from \w|class \w|def \w|with \w.*:$|for \w.*:$)", re.MULTILINE
    )
    assert [name for name, text in texts.items() if begins.search(text)] == []


def test_targets_extras_and_modules_that_pages_show_exist() -> None:
    text = "\n".join(page.read_text("utf-8") for page in PAGES)
    makefile, pyproject = (
        (ROOT / name).read_text("utf-8") for name in ("Makefile", "pyproject.toml")
    )
    targets = set(re.findall(r"(?:^ {4}|`)make ([a-z-]+)", text, re.MULTILINE))
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


def test_the_command_below_the_tables_prints_their_cell(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    from sizing_tables import MODELS, PAGE, SHOWN

    from tiermem.tools.cli import main

    (machine, model, states), page = SHOWN, PAGE.read_text("utf-8")
    (command,) = re.findall(r"^    tiermem (plan .*)$", page, re.MULTILINE)
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
