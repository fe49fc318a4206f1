"""Does every code block of the pages run, alone, after the page's block "paste this first"?

A block is fenced. Blocks of Python are programs and run in `make test`; blocks of sh are commands
and run in `make test-all`; blocks of JSON are configs, or sections of one. Each runs in an empty
folder, after the blocks of its page whose title is "paste this first". A line `<!-- not run: why
-->` before a fence says that a block does not, and is counted here.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import fork_server
import pytest
import typer
from typer.core import TyperGroup

from tiermem.config import load_config
from tiermem.tools.cli import app

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
FIRST = 'title="paste this first"'
NUM_NOT_RUN = 20
"""Blocks that need a GPU, a network, a large model or minutes. A new one is a decision."""
_FENCE = re.compile(
    r"^(?:<!-- not run: (?P<why>[^\n]+) -->\n)?```(?P<kind>\w*)(?P<words>[^\n]*)\n(?P<text>.*?)^```$",
    re.DOTALL | re.MULTILINE,
)
_PACKAGE = re.compile(r"^ *(?:from|import) (\w+)", re.MULTILINE)
_EXTRAS = {"sft": ("trl", "datasets"), "as_deepspeed": ("transformers", "accelerate")}
"""Packages that a command of this name needs."""


class Block(NamedTuple):
    """A fenced block of a page."""

    page: str
    number: int
    kind: str
    is_first: bool
    why_not: str | None
    text: str

    @property
    def name(self) -> str:
        return f"{self.page}-{self.number}"


def blocks_of(page: Path) -> list[Block]:
    found = _FENCE.finditer(page.read_text("utf-8"))
    return [
        Block(page.name, number, each["kind"], FIRST in each["words"], each["why"], each["text"])
        for number, each in enumerate(found)
    ]


BLOCKS = [block for page in PAGES for block in blocks_of(page)]


def shown(kind: str) -> list[Any]:
    """The blocks of a kind that run."""
    return [
        pytest.param(block, id=block.name)
        for block in BLOCKS
        if block.kind == kind and block.why_not is None and not runs_before_others(block)
    ]


def runs_before_others(block: Block) -> bool:
    """Whether other blocks of the page run it."""
    others = [each for each in BLOCKS if each.page == block.page and each.kind == block.kind]
    return block.is_first and len(others) > 1


def text_before(block: Block, kind: str) -> str:
    """What the page says to paste first."""
    return "".join(
        each.text
        for each in BLOCKS
        if each.page == block.page and each.is_first and each.kind == kind
    )


def skip_without_packages(text: str) -> None:
    for package in _PACKAGE.findall(text):
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"there is no {package}")
    for command, packages in _EXTRAS.items():
        missing = [each for each in packages if importlib.util.find_spec(each) is None]
        if re.search(rf"tiermem[ .]{command}\b", text) and missing:
            pytest.skip(f"there is no {missing[0]}")


def commands_of(text: str) -> list[str]:
    """The lines of a block of sh, those that go on joined, without comments."""
    lines = text.replace("\\\n", " ").splitlines()
    return [line.strip() for line in lines if line.strip() and not line.strip().startswith("#")]


def has_command(name: str) -> bool:
    command: Any = typer.main.get_command(app)
    return name in command.commands


def run_shell(text: str) -> None:
    environment = {
        **os.environ,
        "PATH": f"{Path(sys.executable).parent}:{sys.prefix}/bin:{os.environ['PATH']}",
        "ACCELERATE_USE_CPU": "true",
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
    }
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", text],
        env=environment,
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )
    assert done.returncode == 0, f"{done.stdout[-8000:]}\n{done.stderr[-8000:]}"


@pytest.mark.sampled(16)
@pytest.mark.usefixtures("forked_python")
@pytest.mark.parametrize("block", shown("python"))
def test_programs_run_alone(block: Block, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = "" if block.is_first else text_before(block, "python")
    skip_without_packages(before + block.text)
    monkeypatch.chdir(tmp_path)
    shell = text_before(block, "sh")
    if shell:
        skip_without_packages(shell)
        run_shell(shell)
    Path("program.py").write_text(before + block.text, "utf-8")
    done = fork_server.run(
        ["program.py"], 300.0, OMP_NUM_THREADS="1", ACCELERATE_USE_CPU="true", HF_HUB_OFFLINE="1"
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-8000:]


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("block", shown("sh"))
def test_commands_run_alone(block: Block, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = "" if block.is_first else text_before(block, "sh")
    skip_without_packages(before + block.text)
    if "tiermem sft" in block.text and not has_command("sft"):
        pytest.skip("this checkout has no `tiermem sft`")
    monkeypatch.chdir(tmp_path)
    run_shell(before + block.text)


@pytest.mark.parametrize("block", shown("json"))
def test_configs_are_accepted(block: Block, tmp_path: Path) -> None:
    found = json.loads(block.text)
    zero = {"stage": 3, "offload_optimizer": {"device": "nvme"}}
    if "paths" not in found.get("tiermem", {}):
        zero["offload_optimizer"]["nvme_path"] = str(tmp_path)
    config = {"train_batch_size": 16, "gradient_clipping": 0, "zero_optimization": zero, **found}
    assert load_config(config).policy() is not None


@pytest.mark.sampled(16)
@pytest.mark.parametrize(
    ("page", "line"),
    [
        (block.page, line)
        for block in BLOCKS
        if block.kind == "sh"
        for line in commands_of(block.text)
        if re.match(r"(?:\w+=\S+ )*tiermem ", line)
    ],
)
def test_commands_have_the_options_that_blocks_show(page: str, line: str) -> None:
    """Also of blocks that do not run."""
    command: Any = typer.main.get_command(app)
    given = shlex.split(line, comments=True)
    given = given[given.index("tiermem") + 1 :]
    if given[0] == "sft":
        return  # TRL's own arguments, which TRL's parser takes
    while isinstance(command, TyperGroup) and given and not given[0].startswith("-"):
        assert given[0] in command.commands, line
        command = command.commands[given.pop(0)]
    known = {option for each in command.params for option in (*each.opts, *each.secondary_opts)}
    known |= {"--help"} | ({"--install-completion"} if isinstance(command, TyperGroup) else set())
    assert [each for each in given if each.startswith("--") and each not in known] == []


# ---- what a page may hold ------------------------------------------------------------------------


def test_blocks_that_do_not_run_are_counted_and_say_why() -> None:
    left_out = [block for block in BLOCKS if block.why_not is not None]
    assert len(left_out) == NUM_NOT_RUN, [block.name for block in left_out]
    assert all(block.kind in ("python", "sh", "json") for block in left_out)


def test_pages_show_programs_and_commands() -> None:
    kinds = [block.kind for block in BLOCKS]
    assert kinds.count("python") > 25 and kinds.count("sh") > 25 and kinds.count("json") > 5
    assert set(kinds) <= {"python", "sh", "json", "text", "diff"}


def test_a_page_has_one_block_to_paste_first_of_a_kind() -> None:
    firsts = [(block.page, block.kind) for block in BLOCKS if block.is_first]
    assert len(firsts) == len(set(firsts)) > 8


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_code_stands_in_fences(page: Path) -> None:
    """A program or command that is indented, or a whole command inside a sentence, would be run by
    no test."""
    text = _FENCE.sub("", page.read_text("utf-8"))
    begins = r"import \w|from \w+ import|class \w|def \w|with \w.*:$|for \w.*:$"
    begins += r"|tiermem |make |pip |python3? |torchrun |\{"
    assert re.findall(rf"^ {{4}}(?:{begins}).*", text, re.MULTILINE) == []
    for words in re.findall(r"`tiermem ([^`\n]+)`", text):
        after = [
            each for each in words.split() if not re.fullmatch(r"[a-z]+|--[a-z-]+|[A-Z.]+", each)
        ]
        assert after == [], f"`tiermem {words}` is a command to paste: put it into a block"


def test_options_in_sentences_exist() -> None:
    command: Any = typer.main.get_command(app)
    for page in PAGES:
        text = _FENCE.sub("", page.read_text("utf-8"))
        for words in re.findall(r"`tiermem ([a-z][^`\n]*)`", text):
            place: Any = command
            given = words.split()
            if given[0] == "sft":
                continue
            while isinstance(place, TyperGroup) and given and re.fullmatch("[a-z]+", given[0]):
                assert given[0] in place.commands, f"{page.name}: tiermem {words}"
                place = place.commands[given.pop(0)]
            known = {
                option for each in place.params for option in (*each.opts, *each.secondary_opts)
            }
            known |= {"--help", "--install-completion"}
            unknown = [each for each in given if each.startswith("--") and each not in known]
            assert unknown == [], f"{page.name}: tiermem {words}"


OWN = {"walk.md", "glossary.md", "code.md", "CHANGELOG.md", "keys.md"}
"""Pages of those who work on tiermem, and the page that is made of the code's own words."""
_IDIOM = re.compile(
    r"\b(?:house|floors?|landing|lands)\b|\b(?:rests|rested|resting)\b"
    r"|\brest (?:on|in|at|there|where|elsewhere|as|until|off)\b"
    r"|\b(?:they|weights|states|bytes|gradients|activations|tiles) rest\b",
    re.IGNORECASE,
)


@pytest.mark.parametrize(
    "page", [page for page in PAGES if page.name not in OWN], ids=lambda page: page.name
)
def test_words_of_the_code_stay_out_of_the_pages(page: Path) -> None:
    """Messages and names of the program, in quotes, are its own."""
    text = re.sub(r"`[^`\n]*`|refused: .*", "", _FENCE.sub("", page.read_text("utf-8")))
    assert [line for line in text.splitlines() if _IDIOM.search(line)] == []


def test_the_first_page_is_short() -> None:
    assert len((ROOT / "README.md").read_text("utf-8").splitlines()) <= 110
