"""Does `tiermem bench adam` count the bytes that must move, take turns, and refuse what it cannot
measure?"""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from rich.console import Console

pytest.importorskip("_tiermem_native")

from tiermem.ranks.topology import fair_threads
from tiermem.swap.base.native import choose_isa
from tiermem.tools.bench.adam import ROWS, AdamRow, bench_adam, row_of
from tiermem.tools.cli import EXIT_USER, main
from tiermem.tools.options import AdamBenchOptions

NUMEL = 4096


@pytest.fixture(scope="module", autouse=True)
def torch_threads() -> None:
    """torch keeps the threads that it has once started."""
    before = torch.get_num_threads()
    torch.set_num_threads(fair_threads())
    torch.ones(1 << 20).mul_(2.0)
    torch.set_num_threads(before)


YARDSTICK = """
for line in sys.stdin:
    if line == "quit\\n":
        break
    note.write(line)
    note.flush()
    print("0.5 0.25" if line.startswith("prepare") else "0.25", flush=True)
"""
PEER = """
for line in sys.stdin:
    if line == "quit\\n":
        break
    note.write(line)
    note.flush()
    print(1.0, flush=True)
"""
MakeProgram = Callable[[str, str], Path]


@pytest.fixture
def make_program(tmp_path: Path) -> MakeProgram:
    """Makes a program out of Python lines that notes what it was asked in `<name>.asked`."""

    def make(name: str, lines: str) -> Path:
        program = tmp_path / name
        program.write_text(
            f"#!{sys.executable}\nimport sys\nnote = open({str(program) + '.asked'!r}, "
            f"'w')\n{lines}"
        )
        program.chmod(0o755)
        return program

    return make


def quiet() -> Console:
    return Console(file=io.StringIO(), width=200)


@pytest.mark.parametrize(
    ("row", "streams", "num_bytes"),
    [
        (ROWS[0], "4rw 4rw 4rw 4r", 28),
        (ROWS[1], "2w 4rw 4rw 4rw 2r", 28),
        (ROWS[2], "2rw 2rw 4rw 4rw 2r", 26),
        (ROWS[3], "2rw 2rw 2rw 2rw 2r", 18),
        (ROWS[5], "2rw 2rw 2rw 2r", 14),
        (ROWS[7], "2rw 2rw 1rw 1rw 2r", 14 + 4 / 64),
        (ROWS[8], "2w 4rw 4rw 4rw 2r 2r", 30),
    ],
    ids=lambda value: value.name if isinstance(value, AdamRow) else str(value),
)
def test_a_row_counts_every_array_once_each_way(
    row: AdamRow, streams: str, num_bytes: float
) -> None:
    assert " ".join(f"{num_bytes}{how}" for num_bytes, how in row.streams) == streams
    assert row.bytes_per_param == num_bytes


def test_names_tell_rows_apart() -> None:
    assert len({row.name for row in ROWS}) == len(ROWS)


def test_figures_are_medians_and_shares_those_of_each_loops_ratio() -> None:
    seconds = {"tiermem": [2.0, 1.0, 9.0], "yardstick": [1.0, 1.5, 1.9], "torch": [4.0, 5.0, 3.0]}
    row = row_of(ROWS[0], 10**9, seconds, 2)
    assert row["ns_per_param"] == 2.0
    assert row["gbps"] == 14.0
    assert row["stream_fraction"] == 0.5
    assert row["peers"] == {"torch": {"ns_per_param": 4.0, "speedup": 2.0}}
    assert row["arithmetic_fraction"] is None and row["limit_fraction"] == 0.5


def test_a_row_is_limited_by_the_slower_of_memory_and_arithmetic() -> None:
    seconds = {
        "tiermem": [2.0, 2.0, 4.0],
        "yardstick": [1.0, 1.5, 3.0],
        "arithmetic": [1.5, 1.0, 2.0],
    }
    row = row_of(ROWS[3], 10**9, seconds, 2)
    assert row["stream_fraction"] == 0.75
    assert row["arithmetic_ns_per_param"] == 1.5
    assert row["arithmetic_fraction"] == 0.5
    # the medians of 0.75, 0.75 and 0.75, not of one yardstick alone
    assert row["limit_fraction"] == 0.75
    assert row["peers"] == {}


def test_every_row_is_measured_and_written(tmp_path: Path) -> None:
    file = tmp_path / "adam.json"
    assert bench_adam(AdamBenchOptions(NUMEL, loops=2, json_file=file), quiet()) == 0
    report = json.loads(file.read_text())
    assert report["made_by"] == "tiermem bench adam"
    assert report["machine"]["num_cores"] >= 1
    assert [row["name"] for row in report["rows"]] == [row.name for row in ROWS]
    for row in report["rows"]:
        assert row["ns_per_param"] > 0 and len(row["ns_per_param_loops"]) == 2
        assert row["stream_fraction"] is None
    have_torch = [row["name"] for row in report["rows"] if "torch" in row["peers"]]
    assert have_torch == [
        "fp32 / fp32",
        "bf16 / bf16, stochastic",
        "bf16 / bf16, nearest",
        "whole step: bf16 + fp32 / fp32",
    ]
    # its own file
    assert bench_adam(AdamBenchOptions(NUMEL, loops=1, rows=["8bit"], json_file=file), quiet()) == 0
    assert len(json.loads(file.read_text())["rows"]) == 1


def test_yardstick_and_peer_take_turns_with_us(make_program: MakeProgram, tmp_path: Path) -> None:
    yardstick, peer = make_program("yardstick", YARDSTICK), make_program("peer", PEER)
    file = tmp_path / "adam.json"
    parts = ("8bit", "bf16, nearest", "whole step: bf16")
    options = AdamBenchOptions(
        NUMEL + 5, 3, rows=parts, json_file=file, yardstick=yardstick, peer_python=peer
    )
    assert bench_adam(options, quiet()) == 0
    threads = fair_threads()
    rows = {row["name"]: row for row in json.loads(file.read_text())["rows"]}
    assert Path(f"{yardstick}.asked").read_text().splitlines() == [
        line
        for streams, words in (
            ("2rw 2rw 2rw 2rw 2r", "kernel bf16 split bf16 bf16 nearest"),
            ("2rw 2rw 2rw 2r", "kernel bf16 bf16 bf16 bf16 nearest"),
            ("2rw 2rw 1rw 1rw 2r", "kernel bf16 split 8bit bf16 stochastic"),
            ("2w 4rw 4rw 4rw 2r 2r", "whole bf16 fp32 fp32 bf16 nearest"),
        )
        for line in (
            "release",
            f"prepare 4096 {threads} {streams}",
            *["pass 5", f"arithmetic {threads} {words}"] * 3,
        )
    ]
    assert Path(f"{peer}.asked").read_text().splitlines() == [
        *["release"] * 2,
        f"prepare bf16 4096 {threads}",
        *["step 5"] * 3,
        *["release"] * 2,
        f"prepare whole 4096 {threads}",
        *["step 5"] * 3,
    ]
    for name in ("bf16 / bf16, nearest", "whole step: bf16 + fp32 / fp32"):
        assert rows[name]["peers"]["deepspeed"]["ns_per_param"] == pytest.approx(1e9 / 4096)
    eighth = rows["split / 8bit, stochastic"]
    # the yardstick moves no scales
    assert eighth["stream_gbps"] == pytest.approx(14 * 4096 / 0.25 / 1e9)
    assert "deepspeed" not in eighth["peers"]


def test_kernels_and_yardstick_are_held_down_together(
    make_program: MakeProgram, tmp_path: Path
) -> None:
    yardstick = make_program("yardstick", YARDSTICK)
    best = choose_isa()
    said = io.StringIO()
    options = AdamBenchOptions(NUMEL, 1, rows=["8bit"], yardstick=yardstick, isa="plain")
    assert bench_adam(options, Console(file=said, width=200)) == 0
    assert Path(f"{yardstick}.asked").read_text().splitlines()[0] == "isa 0"
    assert choose_isa(0) in said.getvalue()
    assert choose_isa() == best


def test_a_peer_that_fails_is_told_in_its_own_words(make_program: MakeProgram) -> None:
    peer = make_program(
        "peer", "sys.stdin.readline()\nprint('no such operator', file=sys.stderr)\nsys.exit(1)"
    )
    with pytest.raises(
        OSError, match=r"DeepSpeedCPUAdam ended \(status 1\) at 'release': no such operator"
    ):
        bench_adam(AdamBenchOptions(NUMEL, loops=1, peer_python=peer), quiet())


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--params", "1K"], "--params is 1000; it must be at least 1024"),
        (["--loops", "0"], "--loops is 0"),
        (["--threads", "5000"], "--threads is 5000; allowed are 1 to"),
        (["--row", "fp64"], "--row fp64 is part of no row's name; they are: fp32 / fp32; bf16"),
        (["--params", "10000B"], "at once"),
        (["--json", "a.txt"], "a.txt must end in .json"),
        (["--yardstick", "nowhere"], "nowhere: --yardstick: no such program"),
        (["--peer-python", "nowhere"], "nowhere: --peer-python: no such program"),
    ],
)
def test_what_cannot_be_measured_is_one_line(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["bench", "adam", *words])
    assert ended.value.code == EXIT_USER
    said = capsys.readouterr().err
    assert message in said and said.count("\n") == 1


def test_a_file_of_somebody_else_is_not_overwritten(tmp_path: Path) -> None:
    file = tmp_path / "notes.json"
    file.write_text("{}")
    with pytest.raises(FileExistsError, match="not made by 'tiermem bench adam'"):
        bench_adam(AdamBenchOptions(NUMEL, json_file=file), quiet())
