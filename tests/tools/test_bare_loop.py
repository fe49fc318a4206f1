"""Is a yardstick driven line by line, its refusal told in its own words, and its process ended in
every case?"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tiermem.tools.bench.witnesses import BareLoop, BareRun

Program = Callable[[str], Path]

ANSWERS = """
for line in sys.stdin:
    words = line.split()
    if words == ["quit"]:
        break
    print(int(words[3]) / 1e6, 0.25, 0.5, flush=True)
"""


@pytest.fixture
def make_program(tmp_path: Path) -> Program:
    """Makes a program out of Python lines; it notes how it was called."""

    def make(lines: str) -> Path:
        program = tmp_path / "loop"
        program.write_text(f"#!{sys.executable}\nimport sys\nfile = sys.argv[1]\n{lines}")
        program.chmod(0o755)
        return program

    return make


def test_each_command_is_answered_in_turn(make_program: Program, tmp_path: Path) -> None:
    with BareLoop(make_program(ANSWERS), tmp_path / "file") as loop:
        assert loop.run("read", 65536, 4, 2_000_000) == BareRun(2.0, 0.25, 0.5)
        assert loop.run("mixed", 65536, 4, 3_000_000, 1_000_000).seconds == 3.0
        assert loop.run("random", 4096, 64, 500_000, 7).seconds == 0.5


def test_the_command_line_is_the_protocols(make_program: Program, tmp_path: Path) -> None:
    lines = "print('error', file, sys.stdin.readline().strip(), flush=True)\nsys.exit(1)"
    with (
        BareLoop(make_program(lines), tmp_path / "a file") as loop,
        pytest.raises(ValueError, match=r"error .*/a file mixed 4096 2 8192 12288$"),
    ):
        loop.run("mixed", 4096, 2, 8192, 12288)


def test_a_program_that_dies_is_told_with_its_last_words(
    make_program: Program, tmp_path: Path
) -> None:
    lines = "sys.stdin.readline()\nprint('first\\nno such ring', file=sys.stderr)\nsys.exit(3)"
    with (
        BareLoop(make_program(lines), tmp_path / "file") as loop,
        pytest.raises(OSError, match=r"ended \(status 3\) at 'read 4096 1 4096': no such ring"),
    ):
        loop.run("read", 4096, 1, 4096)


@pytest.mark.parametrize("answer", ["1.0 2.0", "1 2 3 4", "soon"])
def test_an_answer_of_another_shape_is_refused(
    make_program: Program, tmp_path: Path, answer: str
) -> None:
    lines = f"for line in sys.stdin: print({answer!r}, flush=True)"
    with (
        BareLoop(make_program(lines), tmp_path / "file") as loop,
        pytest.raises(ValueError, match="instead of seconds"),
    ):
        loop.run("read", 4096, 1, 4096)


def test_no_process_outlives_it(make_program: Program, tmp_path: Path) -> None:
    loop = BareLoop(make_program(ANSWERS), tmp_path / "file")
    pid = loop._process.pid
    loop.close()
    loop.close()
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_a_program_that_is_not_there_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        BareLoop(tmp_path / "nowhere", tmp_path / "file")
