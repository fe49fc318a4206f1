"""Does `tiermem tune` find, verify and write settings that the library reads back unchanged, and
leave nothing else?"""

from __future__ import annotations

import errno
import json
import math
import os
import signal
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("_tiermem_native")

from tiermem.config import load_config
from tiermem.config.load import with_tuned
from tiermem.swap.base.engines import ENGINES
from tiermem.swap.base.native import IoSettings, Queue
from tiermem.swap.disk.paths import NvmePath
from tiermem.tools.cli import main
from tiermem.tools.measure.files import check_room
from tiermem.tools.options import TuneOptions
from tiermem.tools.record.reports import open_console
from tiermem.tools.tune import (
    BLOCKS,
    DEPTHS,
    MADE_BY,
    Refused,
    StepMix,
    Turn,
    Verdict,
    candidates_of,
    check_out,
    default_of,
    engines_that_run,
    section_of,
    tune,
    verify,
    weighed,
)

MIB = 1 << 20
NVME: dict[str, Any] = {"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "nvme"}}}
GRID = [
    *candidates_of(ENGINES[1:], 1 << 30, IoSettings()),
    IoSettings("aio"),
    IoSettings("threads"),
]


def options_of(folder: Path, *paths: str, **fields: Any) -> TuneOptions:
    for path in paths:
        (folder / path).mkdir()
    given = {"seconds": 0.6, "size_bytes": 8 * MIB, "engines": ("threads",)} | fields
    return TuneOptions([folder / path for path in paths], folder / "tiermem.json", **given)


# ---- what is written -----------------------------------------------------------------------------


@given(
    io=st.sampled_from(GRID),
    weights=st.lists(
        st.floats(0.001, 1000.0).map(lambda value: round(value, 3)), min_size=1, max_size=3
    ),
    single_submit=st.booleans(),
)
def test_what_was_found_reads_back_unchanged(
    io: IoSettings, weights: list[float], single_submit: bool
) -> None:
    io = IoSettings(
        io.engine, io.block_bytes, io.depth, io.threads, single_submit, not single_submit
    )
    single = [NvmePath(Path("/nvme"))]
    paths = (
        [NvmePath(Path(f"/nvme{i}"), weight=w) for i, w in enumerate(weights)]
        if len(weights) > 1
        else single
    )
    section = json.loads(json.dumps(section_of(io, paths, {"made_by": MADE_BY, "engine": "auto"})))
    assert load_config(section).policy().io == io
    for config in ({**NVME, **section}, with_tuned(NVME, section)):
        policy = load_config(config).policy()
        assert policy.io == io
        assert policy.paths == tuple(paths)


@pytest.mark.parametrize("io", GRID)
def test_the_aio_section_means_the_same_to_its_documented_reader(io: IoSettings) -> None:
    aio = section_of(io, [NvmePath(Path("/a"))], {})["aio"]
    documented = {
        "block_size",
        "queue_depth",
        "intra_op_parallelism",
        "thread_count",
        "single_submit",
        "overlap_events",
    }
    assert set(aio) <= documented
    assert aio["queue_depth"] * aio.get("intra_op_parallelism", 1) == io.depth
    assert aio["block_size"] == io.block_bytes
    respelled = {
        ("thread_count" if key == "intra_op_parallelism" else key): value
        for key, value in aio.items()
    }
    assert (
        load_config({"aio": respelled, "tiermem": {"engine": io.engine, "strict": True}})
        .policy()
        .io
        == io
    )


def test_a_run_writes_what_it_says_and_leaves_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = options_of(tmp_path, "a", "b")
    assert tune(options, open_console()) == 0
    written = json.loads(options.out.read_text())
    policy = load_config(with_tuned(NVME, options.out)).policy()
    notes = written["tiermem"]["measured"]
    kept = notes["default" if notes["is_default_kept"] else "winner"]
    assert policy.io == IoSettings(**{name: kept[name] for name in IoSettings.__dataclass_fields__})
    assert [path.path for path in policy.paths] == [tmp_path / "a", tmp_path / "b"]
    assert min(path.weight or 0 for path in policy.paths) == 1.0
    assert sorted(file.name for file in tmp_path.iterdir()) == ["a", "b", "tiermem.json"]
    assert [*(tmp_path / "a").iterdir(), *(tmp_path / "b").iterdir()] == []
    assert "settings tried" in capsys.readouterr().out


def test_its_own_file_is_written_again_and_no_other(tmp_path: Path) -> None:
    file = tmp_path / "tiermem.json"
    ours = section_of(IoSettings(), [NvmePath(tmp_path)], {"made_by": MADE_BY})
    check_out(file)
    file.write_text(json.dumps(ours))
    check_out(file)
    for foreign in (
        {},
        {"aio": {}},
        {**ours, "train_batch_size": 1},
        {**ours, "tiermem": {**ours["tiermem"], "host_bytes": 1}},
        {**ours, "tiermem": {**ours["tiermem"], "measured": {"made_by": "somebody"}}},
        [ours],
        "text",
    ):
        file.write_text(json.dumps(foreign))
        with pytest.raises(FileExistsError, match="not overwritten"):
            check_out(file)
    with pytest.raises(FileNotFoundError, match="no such folder"):
        check_out(tmp_path / "nowhere" / "tiermem.json")


# ---- what is tried -------------------------------------------------------------------------------


def test_the_grid_spans_blocks_depths_and_engines_within_bounds() -> None:
    grid = candidates_of(ENGINES[1:], 1 << 30, IoSettings())
    assert {io.engine for io in grid} == set(ENGINES)
    assert (
        {io.block_bytes for io in grid}
        == set(BLOCKS)
        == {(256 << 10) << power for power in range(6)}
    )
    assert {io.depth for io in grid} == set(DEPTHS)
    assert all(2 * MIB <= io.block_bytes * io.depth <= 64 * MIB for io in grid)
    assert all(io.threads == io.depth <= 32 for io in grid if io.engine == "threads")
    assert len(set(grid)) == len(grid)
    assert grid[-1] == IoSettings()
    # the defaults by another name
    assert IoSettings("uring", MIB, IoSettings().depth, 1) not in grid


def test_a_small_file_bounds_what_is_in_flight() -> None:
    grid = candidates_of(["uring"], 8 * MIB, IoSettings())[:-1]
    assert grid
    assert all(io.block_bytes * io.depth <= 4 * MIB for io in grid)


def test_engines_that_cannot_run_are_left_out_unless_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def open_queue(io: IoSettings) -> Queue:
        if io.engine == "uring":
            raise OSError(errno.EPERM, "not here")
        return Queue(IoSettings("threads"))

    monkeypatch.setattr("tiermem.swap.base.native.Queue", open_queue)
    monkeypatch.setattr("tiermem.tools.tune.Queue", open_queue)
    assert engines_that_run(["auto"]) == ["aio", "threads"]
    assert engines_that_run(["threads"]) == ["threads"]
    with pytest.raises(OSError, match="not here"):
        engines_that_run(["uring", "threads"])
    assert default_of(["threads"]) == IoSettings()
    assert default_of(["aio"]) == IoSettings("aio")


# ---- how it is measured --------------------------------------------------------------------------


def test_the_cost_is_a_step_s_bytes_at_these_rates() -> None:
    assert Turn((5.2,), (2.0,)).cost_ns == pytest.approx(26 / 5.2 + 4 / 2)
    assert Turn((2.6, 2.6), (1.5, 0.5)).cost_ns == pytest.approx(26 / 5.2 + 4 / 2)


def test_a_turn_uses_every_path(tmp_path: Path) -> None:
    io = IoSettings("threads", 256 << 10, 4)
    (tmp_path / "b").mkdir()
    with StepMix([tmp_path, tmp_path / "b"], 8 * MIB, io, 1.0) as mix:
        turn = mix.turn(io, 0.01)
        assert mix.file_bytes == 8 * MIB
        assert mix.turn_s(io, 0.04) > 0
    assert len(turn.mixed_gbps) == len(turn.read_gbps) == 2
    assert 0 < turn.cost_ns < math.inf


def test_settings_that_the_queue_refuses_are_told_apart_from_a_broken_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    io = IoSettings("threads", 256 << 10, 4)
    with StepMix([tmp_path], 8 * MIB, io, 1.0) as mix:

        def refuse(*_: object) -> None:
            raise OSError(errno.EAGAIN, "too many requests")

        monkeypatch.setattr("tiermem.tools.tune.Passes", refuse)
        with pytest.raises(Refused, match="too many requests"):
            mix.turn(io, 0.01)


class Rigged(StepMix):
    """Rates by settings, in a fixed order of gains; no file is touched."""

    def __init__(self, gains: list[float]) -> None:
        self._gains = gains
        self._turns = {"auto": 0, "aio": 0}

    def turn(self, io: IoSettings, seconds: float) -> Turn:
        number = self._turns[io.engine]
        self._turns[io.engine] += 1
        rate = self._gains[number % len(self._gains)] if io.engine == "aio" else 1.0
        return Turn((rate,), (rate,))


@pytest.mark.parametrize(
    ("gains", "is_better"),
    [
        ([1.2, 1.1, 1.3, 1.2, 1.05], True),
        ([1.2, 0.9, 1.2, 1.2, 1.1], False),  # four of five: chance gives that in one of five
        ([1.005], False),
        ([1.0], False),
        ([0.8], False),
    ],
)
def test_a_winner_must_be_better_than_noise(gains: list[float], is_better: bool) -> None:
    verdict = verify(Rigged(gains), IoSettings("aio"), IoSettings(), seconds=0.0)
    assert verdict.gains == pytest.approx(gains if len(gains) == 5 else gains * 5)
    assert verdict.is_better is is_better


def test_chance_is_the_sign_test() -> None:
    turn = Turn((1.0,), (1.0,))
    assert Verdict(turn, turn, (1.1,) * 5).chance == 1 / 32
    assert Verdict(turn, turn, (1.1, 1.1, 1.1, 0.9)).chance == 5 / 16
    assert Verdict(turn, turn, (0.9,) * 3).chance == 1.0


def test_weights_are_rates_and_the_slowest_weighs_one() -> None:
    paths = [Path("/a"), Path("/b"), Path("/c")]
    found = weighed(paths, Turn((2.0, 5.0, 3.0), (1.0, 1.0, 1.0)))
    assert [path.weight for path in found] == [1.0, 2.5, 1.5]
    assert weighed([Path("rel")], Turn((2.0,), (1.0,))) == [NvmePath(Path.cwd() / "rel")]


# ---- what is refused -----------------------------------------------------------------------------


def test_too_little_room_is_refused_with_the_arithmetic(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "b").mkdir()
    stats = os.statvfs_result((4096, 4096, 0, 0, 5120, 0, 0, 0, 0, 255))  # 20 MiB free
    monkeypatch.setattr("os.statvfs", lambda path: stats)
    file = ("a file to measure on (--size)", 16 * MIB)
    check_room([tmp_path], [file])
    with pytest.raises(
        OSError, match=r"32\.0 MiB are needed, 20\.0 MiB are free: .* x 2 paths"
    ) as caught:
        check_room([tmp_path, tmp_path / "b"], [file])
    assert caught.value.errno == errno.ENOSPC


def run(*arguments: str) -> object:
    """The exit status of the command, in this process."""
    with pytest.raises(SystemExit) as ended:
        main(["tune", *arguments])
    return ended.value.code


@pytest.mark.sampled(2)
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_leaves_nothing(
    number: signal.Signals,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    turn, turns = StepMix.turn, []

    def interrupted_turn(self: StepMix, io: IoSettings, seconds: float) -> Turn:
        turns.append(io)
        if len(turns) == 5:
            signal.raise_signal(number)
        return turn(self, io, seconds)

    monkeypatch.setattr(StepMix, "turn", interrupted_turn)
    monkeypatch.chdir(tmp_path)
    assert run("--path", ".", "--size", "8MiB", "--seconds", "100") == 130
    assert capsys.readouterr().err == "tiermem tune: stopped; nothing was written\n"
    assert list(tmp_path.iterdir()) == []
