"""Does `tiermem bench io` measure what was asked for, refuse what cannot be, and leave nothing
behind?"""

from __future__ import annotations

import csv
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from called import call

pytest.importorskip("_tiermem_native")
pytest.importorskip("matplotlib")

from tiermem.swap.base.engines import ENGINES
from tiermem.tools.cli import main
from tiermem.tools.options import IoBenchOptions
from tiermem.tools.words import parse_bytes, parse_list

PROMISED = (
    *(
        "mode",
        "engine",
        "block_bytes",
        "depth",
        "ranks",
        "path",
        "gbps_median",
        "gbps_min",
        "gbps_max",
        "p50_us",
    ),
    *(
        "p99_us",
        "cpu_s_per_gb",
        "idle_fraction",
        "first_gbps",
        "fio_gbps",
        "yardstick_gbps",
        "fraction",
        "peer_gbps",
    ),
)
YARDSTICK = """#!{python}
import sys
for line in sys.stdin:
    if line.strip() == "quit":
        break
    print(0.001, 0.0001, 0.0001, flush=True)
"""


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "tiermem.tools.cli", "bench", "io", *arguments]


def bench_io(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return call(folder, "bench", "io", *arguments)


class Run:
    """One small benchmark of everything, looked at by several tests."""

    def __init__(self, folder: Path) -> None:
        self.disks = [folder / "a", folder / "b"]
        self.out = folder / "out"
        for made in (*self.disks, self.out):
            made.mkdir()
        yardstick = folder / "loop"
        yardstick.write_text(YARDSTICK.format(python=sys.executable))
        yardstick.chmod(0o755)
        self.done = bench_io(
            folder,
            *("--path", *map(str, self.disks), "--size", "8MiB", "--block", "1MiB", "--depth", "4"),
            *(
                "--engine",
                "auto",
                "--mode",
                "read,write,mixed,random,random-write,tensors,sustained",
                "--ranks",
                "1",
            ),
            *(
                "--bytes",
                "40MiB",
                "--loops",
                "1",
                "--yardstick",
                str(yardstick),
                "--json",
                str(self.out / "x.json"),
            ),
            *("--csv", str(self.out / "x.csv"), "--debug"),
        )
        assert self.done.returncode == 0, self.done.stderr
        self.report = json.loads((self.out / "x.json").read_text())
        self.rows: list[dict[str, Any]] = self.report["rows"]


@pytest.fixture(scope="module")
def run(opened_fonts: None, tmp_path_factory: pytest.TempPathFactory) -> Run:
    return Run(tmp_path_factory.mktemp("bench"))


def test_there_is_a_row_for_every_setting(run: Run) -> None:
    found = {
        (r["mode"], r["engine"], r["block_bytes"], r["depth"], r["ranks"], r["path"])
        for r in run.rows
    }
    assert len(found) == len(run.rows)
    paths = [*map(str, run.disks), "all"]
    expected = {
        (mode, "auto", 4096 if "random" in mode else 1 << 20, 4, 1, path)
        for mode in ("read", "write", "mixed", "random", "random-write", "tensors", "sustained")
        for path in paths
    }
    assert found == expected


def test_two_ranks_have_rows_of_their_own_but_for_sustained_writes(
    opened_fonts: None, tmp_path: Path
) -> None:
    modes = "read,random-write,tensors,sustained"
    words = ("--size", "8MiB", "--block", "1MiB", "--depth", "4", "--mode", modes, "--loops", "1")
    words += ("--path", str(tmp_path), "--ranks", "1,2", "--bytes", "16MiB", "--json", "x.json")
    words += ("--plot", "x.png")
    done = bench_io(tmp_path, *words)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "x.png").read_bytes().startswith(b"\x89PNG")
    rows = json.loads((tmp_path / "x.json").read_text())["rows"]
    expected = {(mode, ranks) for mode in modes.split(",") for ranks in (1, 2)}
    assert {(row["mode"], row["ranks"]) for row in rows} == expected - {("sustained", 2)}
    for row in rows:
        assert row["error"] is None
        assert 0 < row["gbps_min"] <= row["gbps_median"] <= row["gbps_max"]


def test_a_row_has_every_promised_key_and_figures(run: Run) -> None:
    for row in run.rows:
        assert set(PROMISED) <= set(row)
        assert row["error"] is None
        assert 0 < row["gbps_min"] <= row["gbps_median"] <= row["gbps_max"]
        assert 0 < row["p50_us"] <= row["p99_us"] <= row["p999_us"]
        assert row["iops"] == pytest.approx(row["gbps_median"] * 1e9 / row["block_bytes"]) or (
            row["mode"] == "sustained"
        )
        assert row["cpu_s_per_gb"] > 0
        assert 0 <= row["idle_fraction"] <= 1
        assert (row["first_gbps"] is not None) == (row["mode"] in ("read", "random"))
        assert row["engine_used"] in ENGINES[1:]


def test_the_yardstick_stands_beside_one_rank_on_one_path(run: Run) -> None:
    for row in run.rows:
        beside = (
            row["ranks"] == 1
            and row["path"] != "all"
            and row["mode"] in ("read", "write", "mixed", "random")
        )
        assert (row["yardstick_gbps"] is not None) == beside
        if beside:
            assert row["fraction"] == pytest.approx(row["gbps_median"] / row["yardstick_gbps"])


def test_the_best_of_a_mode_is_its_highest_median(run: Run) -> None:
    assert (
        set(run.report["best"]) == {row["mode"] for row in run.rows}
        and len(run.report["best"]) == 7
    )
    for mode, best in run.report["best"].items():
        assert best in run.rows
        assert best["gbps_median"] == max(
            row["gbps_median"] for row in run.rows if row["mode"] == mode
        )


def test_the_machine_is_in_the_report(run: Run) -> None:
    machine = run.report["machine"]
    assert {
        "kernel",
        "cpu",
        "num_cores",
        "memory_bytes",
        "date",
        "tiermem",
        "paths",
        "engines",
    } <= set(machine)
    assert [place["path"] for place in machine["paths"]] == list(map(str, run.disks))
    assert all(place["file_system"] and place["mount_options"] for place in machine["paths"])
    assert run.report["made_by"] == "tiermem bench io"


def test_the_csv_holds_the_same_rows(run: Run) -> None:
    lines = (run.out / "x.csv").read_text().splitlines()
    found = list(csv.DictReader(lines[1:]))
    assert [(row["mode"], row["path"], float(row["gbps_median"])) for row in found] == [
        (row["mode"], row["path"], row["gbps_median"]) for row in run.rows
    ]
    assert set(PROMISED) <= set(found[0])


def test_nothing_is_left_on_the_paths(run: Run) -> None:
    assert [list(disk.iterdir()) for disk in run.disks] == [[], []]
    assert sorted(file.name for file in run.out.iterdir()) == ["x.csv", "x.json"]


def test_the_table_and_the_facts_are_printed(run: Run) -> None:
    for words in (
        "GB/s",
        "p99 us",
        "sustained",
        "auto (",
        "all",
        run.report["machine"]["kernel"],
        "of the sequential",
    ):
        assert words in run.done.stdout


@pytest.mark.slow
def test_its_own_files_are_overwritten_and_others_not(run: Run) -> None:
    small = (
        "--path",
        str(run.disks[0]),
        "--size",
        "1MiB",
        "--block",
        "64KiB",
        "--depth",
        "2",
        "--mode",
        "write",
    )
    theirs = run.out.parent / "theirs.json"
    theirs.write_text('{"made_by": "me"}')
    refused = bench_io(run.out, *small, "--json", str(theirs))
    assert refused.returncode == 2
    assert "theirs.json: not made by" in refused.stderr
    assert theirs.read_text() == '{"made_by": "me"}'
    done = bench_io(run.out, *small, "--loops", "1", "--fsync", "--csv", str(run.out / "x.csv"))
    assert done.returncode == 0, done.stderr
    assert len((run.out / "x.csv").read_text().splitlines()) == 3


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["--size", "much"], "'much' is not a size"),
        (["--size", "1000"], "1000 bytes is given; allowed are multiples of 4096"),
        (["--block", "1MiB,6000"], "6000 bytes is given; allowed are multiples of 4096"),
        (["--block", "1MiB,x"], "--block: 'x' is not a size"),
        (["--block", ""], "--block is empty"),
        (["--size", "1MiB"], "--block 4.0 MiB is larger than --size 1.0 MiB"),
        (["--depth", "0"], "--depth is 0; allowed are 1 to 4096"),
        (["--depth", "many"], "--depth: 'many' is not a whole number"),
        (["--engine", "auto,sync"], "--engine is 'sync'; allowed are auto, uring"),
        (
            ["--mode", "copy"],
            "--mode is 'copy'; allowed are read, write, mixed, random, random-write, tensors, sustained",
        ),
        (["--ranks", "0"], "--ranks is 0"),
        (["--loops", "0"], "--loops is 0; it must be at least 1"),
        (["--threads", "-1"], "--threads is -1"),
        (["--mode", "sustained", "--seconds", "0"], "--seconds is 0.0; it must be more than 0"),
        (["--mode", "sustained", "--bytes", "1MiB"], "--bytes 1048576 is less than a block"),
        (["--path", "nowhere"], "nowhere: no such folder"),
        (["--path", "."], "--path names a folder twice"),
        (["--size", "1000TiB"], "are needed"),
        (["--mode", "sustained", "--bytes", "1000TiB"], "for sustained writes (--bytes)"),
        (["--depth", "4096", "--ranks", "64", "--block", "4MiB"], "of buffers are needed"),
        (["--json", "out.txt"], "--json: out.txt must end in .json"),
        (["--plot", "no-folder/x.png"], "no-folder: no such folder"),
        (["--yardstick", "no-program"], "no-program: --yardstick: no such program"),
        (["--peer-python", "no-python"], "no-python: --peer-python: no such program"),
    ],
)
def test_a_mistake_is_one_line_and_nothing_is_made(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    reason: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as ended:
        main(["bench", "io", "--path", ".", *arguments])
    said = capsys.readouterr().err
    assert ended.value.code == 2
    assert said.startswith("tiermem bench io: ")
    assert reason in said
    assert len(said.strip().splitlines()) == 1
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_interrupted_amid_a_pass_it_leaves_nothing(tmp_path: Path, number: signal.Signals) -> None:
    arguments = ("--path", str(tmp_path), "--size", "32MiB", "--block", "64KiB", "--depth", "1")
    process = subprocess.Popen(
        command(*arguments, "--mode", "tensors", "--loops", "100000", "--ranks", "2"),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        wait_for(lambda: len(list(tmp_path.glob("tiermem-*"))) == 2 or process.poll() is not None)
        children = children_of(process.pid)
        assert len(children) >= 2
        if number is signal.SIGINT:
            os.killpg(process.pid, number)  # as a terminal does
        else:
            process.send_signal(number)
        _, said = process.communicate(timeout=120)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == 130
    assert said.splitlines()[-1] == "tiermem bench io: stopped; nothing is left on the paths"
    assert list(tmp_path.iterdir()) == []
    wait_for(lambda: not any(Path(f"/proc/{pid}").exists() for pid in children))


@pytest.mark.slow
def test_killed_it_leaves_no_file_and_no_process(tmp_path: Path) -> None:
    arguments = (
        "--path",
        str(tmp_path),
        "--size",
        "64MiB",
        "--block",
        "64KiB",
        "--depth",
        "1",
        "--mode",
        "read",
    )
    process = subprocess.Popen(
        command(*arguments, "--loops", "100000"), stdout=subprocess.PIPE, text=True
    )
    try:
        wait_for(lambda: any(is_at_work(pid, tmp_path) for pid in children_of(process.pid)))
        children = children_of(process.pid)
    finally:
        process.kill()
        process.communicate()
    assert process.returncode == -signal.SIGKILL
    wait_for(lambda: not any(Path(f"/proc/{pid}").exists() for pid in children))
    assert list(tmp_path.iterdir()) == []


def is_at_work(pid: int, folder: Path) -> bool:
    """Whether a process holds a file open in a folder."""
    try:
        held = [os.readlink(f"/proc/{pid}/fd/{fd}") for fd in os.listdir(f"/proc/{pid}/fd")]
    except OSError:
        return False
    return any(name.startswith(str(folder)) for name in held)


def children_of(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def wait_for(is_so: Callable[[], bool]) -> None:
    """Looks until it is so; fails after two minutes."""
    end = time.monotonic() + 120
    while not is_so():
        assert time.monotonic() < end
        time.sleep(0.01)


def test_a_list_is_read_once_each() -> None:
    assert parse_list("--block", "1MiB, 64K,1024KiB,", parse_bytes) == (1 << 20, 1 << 16)


def test_a_path_is_needed() -> None:
    with pytest.raises(ValueError, match="--path is empty"):
        IoBenchOptions(paths=[])


@pytest.mark.slow
@pytest.mark.usefixtures("forked_python")
def test_a_program_gets_what_the_command_writes(tmp_path: Path) -> None:
    from tiermem.tools.bench import io as bench

    found = bench.run(
        tmp_path, size="1MiB", block="64KiB", depth=2, loops=1, mode="write,random-write"
    )
    assert found["made_by"] == "tiermem bench io"
    assert set(found["best"]) == {"write", "random-write"}
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(ValueError, match="--mode is 'copy'"):
        bench.run(tmp_path, mode="copy")
