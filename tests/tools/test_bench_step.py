"""Does `tiermem bench step` move the bytes that arithmetic says, take turns with its yardstick, and
leave nothing behind?"""

from __future__ import annotations

import dataclasses
import io
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

pytest.importorskip("matplotlib")

from tiermem.swap.base.native import latency_edges
from tiermem.tools.bench import step as module
from tiermem.tools.bench.step import bench_step, cases_of
from tiermem.tools.bench.stepped_model import (
    ADDING,
    SETTINGS,
    Pipelining,
    Roofline,
    SteppedModel,
    TimedStep,
    ceiling,
    draw_tiles,
    mean_in_flight,
)
from tiermem.tools.cli import main
from tiermem.tools.options import StepBenchOptions
from tiermem.tools.record.run_record import IoCounts, Span

NUM_PARAMS = 3 << 20  # three tiles
MIB = 1 << 20
KEYS = {
    "made_by",
    "machine",
    "num_params",
    "precision",
    "preset",
    "state_bytes",
    "engine",
    "step_s",
    "step_s_median",
    "read_bytes",
    "written_bytes",
    "read_gbps",
    "written_gbps",
    "compute_s",
    "wait_s",
    "disk_idle_fraction",
    "cpu_share",
    "read_in_flight_bytes",
    "written_in_flight_bytes",
    "bytes_under_way",
    "roofline_s",
    "roofline_by",
    "roofline_fraction",
    "kernel_read_bytes",
    "kernel_written_bytes",
    "resident_bytes",
    "resident_fraction",
    "paths",
    "rows",
    "compare",
    "endurance",
    "notes",
}

Bench = Callable[..., dict[str, Any]]


pytestmark = pytest.mark.usefixtures("opened_fonts")


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    """bench(**options) runs the benchmark on one path and returns its JSON; what it printed is
    under "printed"."""

    def run(**fields: Any) -> dict[str, Any]:
        disk = tmp_path / "disk"
        disk.mkdir(exist_ok=True)
        settings = {"paths": [disk], "num_params": NUM_PARAMS, "precision": "fp32", "loops": 1}
        options = StepBenchOptions(**(settings | {"json_file": tmp_path / "out.json"} | fields))
        said = io.StringIO()
        assert bench_step(options, Console(file=said, width=150, markup=False)) == 0
        for path in options.paths:
            assert list(path.iterdir()) == []
        return json.loads((tmp_path / "out.json").read_text()) | {"printed": said.getvalue()}

    return run


@pytest.fixture
def yardstick(tmp_path: Path) -> Callable[[float], Path]:
    """yardstick(seconds): a program that answers every command so, and writes the commands to a
    file beside it."""

    def make(seconds: float) -> Path:
        program = tmp_path / "yardstick"
        program.write_text(
            f"#!{sys.executable}\n"
            "import sys\n"
            "with open(__file__ + '.log', 'a') as log:\n"
            "    for line in sys.stdin:\n"
            "        if line.strip() == 'quit': break\n"
            "        print(line, end='', file=log, flush=True)\n"
            f"        print('{seconds} 0.0 0.0', flush=True)\n"
        )
        program.chmod(0o755)
        return program

    return make


# ---- bytes ---------------------------------------------------------------------------------------


@pytest.mark.slow
def test_models_with_and_without_checksums_are_compared(bench: Bench) -> None:
    figures = bench(precision="bf16", verify="always,resume", only_states=True)
    assert [(row["preset"], row["verify"]) for row in figures["rows"]] == [
        ("exact", "always"),
        ("exact", "resume"),
    ]
    assert (
        "what unverified states are worth" in figures["printed"] and "never" in figures["printed"]
    )
    with pytest.raises(ValueError, match="allowed are always, sample, resume"):
        cases_of(StepBenchOptions([Path()], verify="never"))


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    ("precision", "read", "written"), [("fp32", 8 + 4 + 4, 8 + 4), ("bf16", 12 + 2, 12 + 2)]
)
def test_a_step_moves_what_arithmetic_says(
    bench: Bench, precision: str, read: int, written: int
) -> None:
    figures = bench(precision=precision, loops=2)
    assert figures.keys() >= KEYS
    assert figures["num_params"] == NUM_PARAMS
    assert (figures["read_bytes"], figures["written_bytes"]) == (
        read * NUM_PARAMS,
        written * NUM_PARAMS,
    )
    assert not [note for note in figures["notes"] if "are due" in note]
    assert len(figures["step_s"]) == 2
    assert [each["by"] for each in figures["rooflines"]] == [setting.name for setting in SETTINGS]
    assert all(len(each["seconds"]) == 2 for each in figures["rooflines"])
    assert figures["roofline_fraction"] == pytest.approx(
        figures["roofline_s"] / figures["step_s_median"]
    )
    assert figures["compute_s"] > 0
    assert figures["made_by"] == "tiermem bench step"
    assert figures["compare"] == []


# of states, read of weights
PER_PARAM = {"exact": (12, 0), "compact": (6, 2), "bf16": (4, 2), "tiny": (4 + 2 / 64, 2)}


@pytest.mark.sampled(4)
@pytest.mark.parametrize("only_states", [True, False])
def test_a_preset_moves_its_bytes_per_parameter(bench: Bench, only_states: bool) -> None:
    figures = bench(precision="bf16", preset=",".join(PER_PARAM), only_states=only_states)
    assert [row["preset"] for row in figures["rows"]] == list(PER_PARAM)
    for row, (states, weights) in zip(figures["rows"], PER_PARAM.values(), strict=True):
        assert row["state_bytes"] == states * NUM_PARAMS
        gradients, written = (0, 0) if only_states else (2, 2)
        assert row["read_bytes"] == (states + gradients + weights * (not only_states)) * NUM_PARAMS
        assert row["written_bytes"] == (states + written) * NUM_PARAMS
        assert not [note for note in row["notes"] if "are due" in note]
    assert "what smaller states are worth, steps in turn" in figures["printed"]


@pytest.mark.slow
def test_with_only_states_on_nvme_nothing_else_is_moved(bench: Bench) -> None:
    figures = bench(only_states=True)
    assert (figures["read_bytes"], figures["written_bytes"]) == (8 * NUM_PARAMS, 8 * NUM_PARAMS)


@pytest.mark.slow
def test_resident_states_are_neither_read_nor_written(bench: Bench) -> None:
    figures = bench(resident="0, 34%,25165824,100%", only_states=True)
    rows = figures["rows"]
    tile_bytes = 8 << 20
    assert [row["resident_bytes"] for row in rows] == [
        0,
        tile_bytes,
        3 * tile_bytes,
        3 * tile_bytes,
    ]
    for row in rows:
        assert row["read_bytes"] == row["written_bytes"] == 3 * tile_bytes - row["resident_bytes"]
    assert figures["resident_bytes"] == 0  # what is shown first
    assert "what resident states are worth" in figures["printed"]
    assert figures["rows"][-1]["roofline_by"] == "memory traffic of Adam"


def test_several_paths_share_the_bytes(bench: Bench, tmp_path: Path) -> None:
    paths = [tmp_path / "a", tmp_path / "b"]
    for path in paths:
        path.mkdir()
    figures = bench(paths=paths)
    assert [part["path"] for part in figures["paths"]] == [str(path) for path in paths]
    assert all(part["read_bytes"] > 0 for part in figures["paths"])
    for what in ("read_bytes", "written_bytes"):
        assert sum(part[what] for part in figures["paths"]) == figures[what]
    assert len(figures["endurance"]) == 3  # each, and their sum


def test_counts_that_differ_from_the_kernels_are_said(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    # of the warm-up and of the one timed step
    counts = iter([IoCounts(0, 0), IoCounts(0, 12 * NUM_PARAMS)] * 2)
    monkeypatch.setattr("tiermem.tools.bench.stepped_model.kernel_counts", lambda: next(counts))
    said = [note for note in bench()["notes"] if note.startswith("bytes")]
    assert len(said) == 1
    assert said[0].startswith(
        f"bytes read: in a step the queue counts {16 * NUM_PARAMS} (48.0 MiB), the kernel 0 (0 B)"
    )


# ---- the yardstick -------------------------------------------------------------------------------


def test_the_yardstick_moves_the_bytes_of_a_step(
    bench: Bench, yardstick: Callable[[float], Path]
) -> None:
    program = yardstick(0.001)
    figures = bench(yardstick=program, loops=2)
    moved = f"{16 * NUM_PARAMS} {12 * NUM_PARAMS}"
    expected = [f"spread {s.block_bytes} {s.depth} {moved}" for s in SETTINGS]
    expected += [f"through {ADDING.block_bytes} {ADDING.depth} {moved}"]
    assert Path(f"{program}.log").read_text().splitlines() == expected * 2
    assert all(each["seconds"] == [0.001, 0.001] for each in figures["rooflines"])
    assert "each way, added to" in figures["printed"]
    assert not figures["roofline_by"].endswith("added to")


def test_a_step_faster_than_the_yardstick_is_an_error_of_the_yardstick(
    bench: Bench, yardstick: Callable[[float], Path]
) -> None:
    figures = bench(yardstick=yardstick(1000.0))
    assert figures["roofline_fraction"] > 1.02
    assert [
        note
        for note in figures["notes"]
        if note.startswith("error of the yardstick: the step takes")
    ]
    assert "! error of the yardstick" in figures["printed"]
    assert figures["roofline_by"].startswith("bare loop, ")


def test_without_the_program_the_queue_moves_the_bytes_and_that_is_said(bench: Bench) -> None:
    figures = bench()
    assert figures["roofline_by"].startswith("by the queue without arithmetic, ")
    assert "by the queue without arithmetic" in figures["printed"]


def test_a_yardstick_that_refuses_is_an_error_and_leaves_nothing(
    bench: Bench, tmp_path: Path
) -> None:
    program = tmp_path / "yardstick"
    program.write_text("#!/bin/sh\nread line\necho error: no ring\n")
    program.chmod(0o755)
    with pytest.raises(ValueError, match="error: no ring"):
        bench(yardstick=program)
    assert list((tmp_path / "disk").iterdir()) == []


def test_steps_and_yardstick_take_turns(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    log: list[str] = []
    step, measure = SteppedModel.step, Roofline.measure

    def logged_step(model: SteppedModel, pipelining: Pipelining) -> TimedStep:
        log.append(f"step, {pipelining.name}")
        return step(model, pipelining)

    def logged_measure(roofline: Roofline, load: Sequence[IoCounts], setting: Any) -> float:
        log.append(setting.name)
        return measure(roofline, load, setting)

    monkeypatch.setattr(SteppedModel, "step", logged_step)
    monkeypatch.setattr(Roofline, "measure", logged_measure)
    bench(compares=True, loops=2)
    turn = [
        "step, both on",
        "0.25 MiB x 8 each way",
        "step, only reads ahead",
        "0.5 MiB x 8 each way",
        "step, only writes behind",
        "1 MiB x 16 each way",
        "step, both off",
        "4 MiB x 8 each way",
    ]
    assert log == ["step, both on", *turn, *turn]  # the first is the warm-up


def test_the_ceiling_is_the_best_median_or_memory_if_that_takes_longer() -> None:
    series = {SETTINGS[0]: [3.0, 1.0, 9.0], SETTINGS[1]: [2.0, 2.5, 2.6], ADDING: [0.1]}
    assert ceiling(Path("bare_loop"), series, 0.5) == (2.5, "bare loop, 0.5 MiB x 8 each way")
    assert ceiling(None, series, 2.6) == (2.6, "memory traffic of Adam")


# ---- the pipeline --------------------------------------------------------------------------------


@pytest.mark.slow
def test_compare_measures_every_setting_in_one_run(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[bool, bool]] = []
    run = module.SteppedModel.step

    def step(model: SteppedModel, pipelining: Pipelining) -> TimedStep:
        done = run(model, pipelining)
        seen.append((model._shards.policy.pipeline_read, model._shards.policy.pipeline_write))
        return done

    monkeypatch.setattr(module.SteppedModel, "step", step)
    figures = bench(compares=True, loops=3)
    ways = [(True, True), (True, False), (False, True), (False, False)]
    assert seen == [(True, True)] + ways * 3
    assert [(row["pipeline_read"], row["pipeline_write"]) for row in figures["compare"]] == ways
    assert all(len(row["step_s"]) == 3 for row in figures["compare"])
    assert figures["compare"][0]["step_s"] == figures["step_s"]
    assert figures["compare"][0]["slower"] == 1.0
    assert "what the pipeline is worth" in figures["printed"]


@pytest.mark.slow
def test_no_pipeline_is_measured_as_asked(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Pipelining] = []
    run = module.SteppedModel.step
    monkeypatch.setattr(
        module.SteppedModel, "step", lambda model, way: seen.append(way) or run(model, way)
    )
    bench(pipelines=False)
    assert set(seen) == {Pipelining(False, False)}


# ---- the picture ---------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_picture_carries_our_mark_and_may_be_drawn_again(bench: Bench, tmp_path: Path) -> None:
    picture = tmp_path / "step.png"
    for _ in range(2):
        bench(plot_file=picture)
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert b"tEXtSoftware\0tiermem bench step" in picture.read_bytes()


@pytest.mark.sampled(2)
@pytest.mark.parametrize("num_tiles", [0, 1, 7, 300])
def test_a_step_of_any_length_can_be_drawn(tmp_path: Path, num_tiles: int) -> None:
    spans = []
    for i in range(num_tiles):
        start = 1000 + 1_000_000 * i
        spans.append(Span("read", f"tile {i}", start, start + 2_000_000, 4096))
        spans.append(Span("read", f"gradients of tile {i}", start, start, 0))
        spans.append(Span("compute", f"tile {i}", start + 2_000_000, start + 2_500_000, 0))
        spans.append(Span("write", f"tile {i}", start + 2_500_000, start + 5_500_000, 4096))
    step = TimedStep(
        1000, 1000 + 1_000_000 * (num_tiles + 6), (IoCounts(1, 1),), IoCounts(1, 1), spans
    )
    figures = {
        "num_params": 10**9,
        "precision": "bf16",
        "resident_bytes": 1,
        "resident_fraction": 0.5,
        "step_s": [1.0],
        "step_s_median": 1.0,
        "roofline_s": 0.9,
        "roofline_by": "bare loop",
        "roofline_fraction": 0.9,
    }
    draw_tiles(
        step,
        [f"tile {i}" for i in range(num_tiles)],
        figures,
        "a machine",
        tmp_path / "a.png",
        "us",
    )
    assert (tmp_path / "a.png").stat().st_size > 10_000


def test_idle_is_what_no_transfer_covers() -> None:
    spans = [
        Span("read", "a", 0, 30, 1),
        Span("write", "b", 20, 40, 1),
        Span("compute", "c", 40, 60, 1),
        Span("read", "d", 60, 90, 1),
        Span("read", "before the end", 95, 200, 1),
    ]
    assert TimedStep(0, 100, (), IoCounts(0, 0), spans).idle_fraction() == pytest.approx(0.25)
    assert TimedStep(0, 100, (), IoCounts(0, 0), []).idle_fraction() == 1.0


# ---- refusals and ends ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"precision": "int8"}, "--precision is 'int8'; allowed are bf16, fp32"),
        ({"preset": "exact,small"}, "preset is 'small'; allowed are exact, compact, bf16, tiny"),
        ({"preset": ""}, "--preset is ''; write precisions"),
        ({"loops": 0}, "--loops is 0; it must be at least 1"),
        ({"num_params": 5}, "--params is 5; it must be at least 4096"),
        ({"resident": ""}, "--resident is ''; write sizes or percentages"),
        ({"resident": "0,,1"}, "--resident is '0,,1'; write sizes or percentages"),
        ({"resident": "101%"}, "'101%' is no percentage of the states"),
        ({"resident": "-1%"}, "'-1%' is no percentage of the states"),
        ({"resident": "half%"}, "'half%' is no percentage of the states"),
        ({"resident": "half"}, "'half' is not a size"),
        ({"compares": True, "pipelines": False}, "leave --no-pipeline out"),
        (
            {"yardstick": Path("nowhere")},
            "--yardstick: no such program; `make yardsticks` builds it: 'nowhere'",
        ),
        ({"engine": "dma"}, "engine is 'dma'"),
        ({"json_file": Path("/nowhere/a.json")}, "make it first, or correct a.json"),
        ({"num_params": 10**13}, "of memory are needed"),
        ({"paths": [Path("/nowhere")]}, "make it first, or correct --path"),
    ],
)
def test_what_cannot_be_measured_is_refused_before_anything_is_made(
    bench: Bench, tmp_path: Path, fields: dict[str, Any], reason: str
) -> None:
    with pytest.raises((ValueError, OSError)) as refused:
        bench(**fields)
    assert reason in str(refused.value)
    assert not (tmp_path / "out.json").exists()
    assert list((tmp_path / "disk").iterdir()) == []


def test_a_path_with_too_little_room_is_refused_with_the_arithmetic(
    bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    facts = os.statvfs(tmp_path)
    small = os.statvfs_result((*facts[:4], (30 << 20) // facts.f_frsize, *facts[5:]))
    monkeypatch.setattr("tiermem.tools.measure.files.os.statvfs", lambda path: small)
    with pytest.raises(
        OSError,
        match=r"96\.0 MiB are needed, 30\.0 MiB are free: 48\.0 MiB for the states \(--params\)",
    ):
        bench()


def test_a_file_of_somebody_elses_is_not_overwritten(bench: Bench, tmp_path: Path) -> None:
    mine = tmp_path / "thesis.json"
    mine.write_text('{"chapters": 5}')
    with pytest.raises(FileExistsError, match="not made by 'tiermem bench step'"):
        bench(json_file=mine)
    assert mine.read_text() == '{"chapters": 5}'


@pytest.mark.slow
def test_tbw_is_said_in_steps(bench: Bench) -> None:
    lines = bench(tbw_bytes=600 * 10**12)["endurance"]
    assert len(lines) == 1
    assert f"{600e12 / (12 * NUM_PARAMS):,.0f} steps" in lines[0]


def test_the_command_takes_its_options(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    paths = [tmp_path / "a", tmp_path / "b"]
    for path in paths:
        path.mkdir()
    options = [
        "--params",
        "40K",
        "--precision",
        "fp32",
        "--loops",
        "1",
        "--compare",
        "--json",
        str(tmp_path / "o.json"),
    ]
    with pytest.raises(SystemExit) as ended:
        main(["bench", "step", "--path", *map(str, paths), *options])
    assert ended.value.code == 0
    figures = json.loads((tmp_path / "o.json").read_text())
    assert figures["num_params"] == 40_000
    assert len(figures["paths"]) == 2
    assert len(figures["compare"]) == 4
    capsys.readouterr()
    with pytest.raises(SystemExit) as ended:
        main(["bench", "step", "--path", str(paths[0]), "--loops", "0"])
    assert ended.value.code == 2
    said = capsys.readouterr().err
    assert said.startswith(
        "tiermem bench step: --loops is 0; it must be at least 1; write: tiermem bench step --path "
    )


@pytest.fixture
def running(tmp_path: Path, forked_python: None) -> Iterator[subprocess.Popen[str]]:
    """The command in the midst of its steps, with a folder on the path."""
    arguments = ["--path", str(tmp_path), "--params", "2M", "--loops", "100000"]
    command = [sys.executable, "-m", "tiermem.tools.cli", "bench", "step", *arguments]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    while process.poll() is None and not list(tmp_path.glob("tiermem-*")):
        time.sleep(0.01)
    yield process
    process.kill()
    process.wait()
    assert process.stderr is not None
    process.stderr.close()


@pytest.mark.parametrize(
    "sent", [pytest.param(signal.SIGINT, marks=pytest.mark.slow), signal.SIGTERM]
)
def test_when_it_is_stopped_nothing_is_left(
    running: subprocess.Popen[str], tmp_path: Path, sent: signal.Signals
) -> None:
    running.send_signal(sent)
    assert running.wait(60) == 130
    assert running.stderr is not None
    assert running.stderr.read() == "tiermem bench step: stopped; nothing is left on the paths\n"
    assert list(tmp_path.iterdir()) == []


def test_options_are_values() -> None:
    options = StepBenchOptions([Path()])
    cases = cases_of(dataclasses.replace(options, preset="exact,compact", resident="0,50%"))
    sizes = [("exact", 0), ("exact", 256_000_000 * 6), ("compact", 0), ("compact", 256_000_000 * 3)]
    assert cases == [(preset, resident_bytes, "always") for preset, resident_bytes in sizes]


# ---- in flight -----------------------------------------------------------------------------------


def test_what_is_in_flight_is_the_blocks_latency_times_their_rate() -> None:
    edges_us = latency_edges()
    bucket = int(np.searchsorted(edges_us, 1000.0)) - 1
    counts = np.zeros(len(edges_us) - 1, np.int64)
    counts[bucket] = 20  # of a millisecond each, two at a time
    found = mean_in_flight(counts, 20 * MIB, 0.01)
    assert abs(found - 2 * MIB) < 0.07 * MIB  # the width of a bucket
    assert mean_in_flight(np.zeros_like(counts), 0, 0.01) == 0


def test_a_step_tells_what_was_in_flight_and_how_busy_the_cores_were(bench: Bench) -> None:
    figures = bench()
    assert 0 < figures["cpu_share"] <= 1.05
    for way in ("read", "written"):
        assert 0 < figures[f"{way}_in_flight_bytes"] < figures[f"{way}_bytes"]
    assert "in flight, mean" in figures["printed"] and "cores busy" in figures["printed"]
