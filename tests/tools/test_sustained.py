"""Are disks measured past their fast caches when that is asked for, and are rates seen in runs kept
and planned with?"""

from __future__ import annotations

import errno
import io
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from tiermem.tools.cli import main
from tiermem.tools.job.launcher import Channel
from tiermem.tools.job.train_job import make_job
from tiermem.tools.measure import sustained
from tiermem.tools.measure.files import DiskRate
from tiermem.tools.measure.sustained import (
    WriteSeries,
    has_plateau,
    measure_disks,
    measure_sustained,
)
from tiermem.tools.options import TrainOptions, TuneOptions
from tiermem.tools.plan import seen
from tiermem.tools.plan.speed import tuned_speed
from tiermem.tools.train import train as train_command
from tiermem.tools.train.training import measure_ceiling
from tiermem.tools.tune import tune
from tiermem.tools.words import parse_share

MIB = 1 << 20


# ---- past the fast cache -------------------------------------------------------------------------


def test_a_plateau_is_a_drop_that_stays() -> None:
    assert not has_plateau([4.0] * 40)
    assert not has_plateau([4.0] * 10 + [1.0] * 11)
    assert has_plateau([4.0] * 10 + [1.0] * 12)
    assert not has_plateau([4.0] * 10 + [1.0, 2.5] * 6), "it still swings"


def test_writing_ends_when_the_rate_has_fallen_to_a_plateau(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A drive that takes 32 of 128 MiB at 4 MiB a second, and then 1 MiB a second."""
    now_s = 0.0
    monkeypatch.setattr(sustained.time, "monotonic", lambda: now_s)
    series, taken = WriteSeries(128 * MIB, MIB, ends_at_plateau=True), 0
    while got := series.take(MIB):
        taken += got
        now_s += 0.25 if taken <= 32 * MIB else 1.0
    assert taken == 44 * MIB
    assert [rate / MIB for rate in series.rates] == [4.0] * 32 + [1.0] * 12


def share_of(folder: Path, num_bytes: int) -> float:
    stats = os.statvfs(folder)
    return (num_bytes + MIB // 2) / (stats.f_bavail * stats.f_frsize)


def test_a_disk_whose_rate_does_not_fall_is_written_to_the_stated_share(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sustained, "LEAST_BYTES", 8 * MIB)
    monkeypatch.setattr(sustained, "find_knee", lambda rates: None)
    rate = measure_disks([tmp_path, tmp_path], share_of(tmp_path, 16 * MIB))
    assert rate.read_bytes_s > 0 and rate.write_bytes_s > 0
    assert rate.sustained == "0.0 GB written: the rate did not fall"
    assert list(tmp_path.iterdir()) == []


def test_without_room_it_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    with pytest.raises(
        OSError,
        match=r"--sustained writes 512.0 MiB at least, and 0% of the .* that are free are 16.0 MiB",
    ) as error:
        measure_sustained(tmp_path, share_of(tmp_path, 16 * MIB))
    assert error.value.errno == errno.ENOSPC
    assert list(tmp_path.iterdir()) == []


def test_shares_are_parts_of_the_free_space(capsys: pytest.CaptureFixture[str]) -> None:
    assert parse_share("20%") == 0.2
    for text in ("20", "0%", "95%", "x%"):
        with pytest.raises(
            ValueError, match="is no part of the free space; write 1% to 90%, such as 20%"
        ):
            parse_share(text)
    with pytest.raises(SystemExit):
        main(["plan", "--preset", "7b", "--sustained", "20%", "--nvme-rate", "1,1"])
    assert "--sustained measures the disks" in capsys.readouterr().err


PAST = DiskRate(3e9, 5e8, "uring", "works", True, "9.0 GB written: 4.00 GB/s fell to 0.50")


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Path, float]]:
    """What the commands have measured past the fast caches; nothing is written."""
    found: list[tuple[Path, float]] = []

    def measured(folders: Sequence[Path], share: float, seconds: float = 1.0) -> DiskRate:
        found.extend((Path(folder), share) for folder in folders)
        return PAST

    for module in ("plan.speed", "train.training", "tune"):
        monkeypatch.setattr(f"tiermem.tools.{module}.measure_disks", measured)
    return found


@pytest.mark.slow
def test_train_plans_with_it(tmp_path: Path, asked: list[tuple[Path, float]]) -> None:
    options = TrainOptions(preset="151m", nvme=[tmp_path], sustained=0.2)
    job = make_job(options, "it", tmp_path)
    assert measure_ceiling(job, Channel(None)) == PAST._asdict()
    assert asked == [(tmp_path, 0.2)]


def test_plan_plans_with_it(
    tmp_path: Path,
    asked: list[tuple[Path, float]],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)  # where the states of a config that is made would rest
    with pytest.raises(SystemExit) as ended:
        main(
            [
                "plan",
                "--preset",
                "151m",
                "--offload",
                "nvme",
                "--flops",
                "1T",
                "--sustained",
                "20%",
                "--json",
                "plan.json",
            ]
        )
    assert (ended.value.code, asked) == (0, [(Path(), 0.2)])
    said = " ".join(capsys.readouterr().out.split())
    assert (
        "disk: 3.0 GB/s read, 0.5 written, measured in .; 9.0 GB written: 4.00 GB/s fell to 0.50"
        in said
    )
    figures = json.loads((tmp_path / "plan.json").read_text())
    written = figures["moved_bytes"]["HOST -> NVME"]
    # past the fast cache, one way at a time
    read = figures["moved_bytes"]["NVME -> HOST"]
    disk_s = sum(written.values()) / 0.5e9 + sum(read.values()) / 3e9
    assert figures["limits_s"]["disk"] == pytest.approx(disk_s, rel=0.01)


def test_tune_keeps_it(tmp_path: Path, asked: list[tuple[Path, float]]) -> None:
    out = tmp_path / "tiermem.json"
    (tmp_path / "disk").mkdir()
    options = TuneOptions([tmp_path / "disk"], out, 0.3, 8 * MIB, ("threads",), sustained=0.3)
    assert tune(options, Console(quiet=True)) == 0
    assert asked == [(tmp_path / "disk", 0.3)]
    assert json.loads(out.read_text())["tiermem"]["measured"]["sustained"] == PAST._asdict()
    assert tuned_speed(out)[0].disk_write_bytes_s <= 5e8


# ---- seen in runs --------------------------------------------------------------------------------

RUN: dict[str, Any] = {
    "date": "2026-11-23",
    "limited_by": "disk",
    "limits_s": {"compute": 1.0, "disk": 4.0, "link": 0.0, "kernels": 1.0},
    "nvme_read_bytes_a_step": 2 * 10**9,
    "nvme_written_bytes_a_step": 10**9,
    "error": None,
}


@pytest.fixture
def tuned(tmp_path: Path) -> Path:
    """Of a disk that takes 4 GB/s both ways together, and 2 GB/s of reads: 2 of each."""
    facts = {"mixed_gbps": [2.0], "read_gbps": [2.0]}
    file = tmp_path / "tiermem.json"
    measured = {"made_by": "tiermem tune", "is_default_kept": False, "winner": facts, "default": {}}
    file.write_text(
        json.dumps({"aio": {}, "tiermem": {"engine": "uring", "paths": [], "measured": measured}})
    )
    return file


def test_a_run_that_its_disk_has_limited_is_kept_and_planned_with(tuned: Path) -> None:
    rates, _ = tuned_speed(tuned)
    assert (rates.disk_read_bytes_s, rates.disk_write_bytes_s) == pytest.approx((2e9, 2e9))
    assert not rates.is_disk_duplex
    for disk_s in (3.0, 4.0, 2.0):  # 1.5 s are predicted
        assert seen.keep_record(tuned, {**RUN, "limits_s": {"disk": disk_s}})
    paced, source = tuned_speed(tuned)
    assert (paced.disk_read_bytes_s, paced.disk_write_bytes_s) == pytest.approx((1e9, 1e9))
    assert source == f"disk: from {tuned}, at 0.50 of that, as seen in 3 runs"
    for _ in range(30):
        seen.keep_record(tuned, RUN)
    assert len(json.loads(tuned.read_text())["tiermem"]["measured"]["runs"]) == 20


def test_runs_that_say_nothing_of_the_disk_are_not_kept(tuned: Path) -> None:
    before = tuned.read_text()
    silent: list[dict[str, Any]] = [
        {"limited_by": "compute"}, {"limited_by": None, "limits_s": None}, {"nvme_read_bytes_a_step": None},
        {"error": {"type": "OSError"}},
    ]  # fmt: skip
    assert not any(seen.keep_record(tuned, RUN | each) for each in silent)
    users = tuned.with_name("users.json")
    users.write_text(json.dumps({"tiermem": {"paths": ["/x"]}}))
    assert not seen.keep_record(users, RUN)
    assert tuned.read_text() == before


@pytest.mark.parametrize("damage", [b"{", b"[]", b'{"tiermem": 3}', b"\xff", None])
def test_a_tuned_file_that_is_damaged_meanwhile_costs_a_run_no_result(
    damage: bytes | None, tuned: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def reported(*_: object) -> dict[str, Any]:
        if damage is None:
            tuned.unlink()
        else:
            tuned.write_bytes(damage)
        return RUN | {"is_checkpointing": False}

    monkeypatch.setattr(train_command, "run_reported", reported)
    monkeypatch.setattr(train_command, "status_of", lambda *_: 0)
    folder = tuned.parent
    out = folder / "out.json"
    (folder / "nvme").mkdir()
    options = TrainOptions(
        preset="151m", nvme=[folder / "nvme"], tuned=tuned, runs=folder / "runs", json_file=out
    )
    console = Console(record=True, width=300, file=io.StringIO())
    assert train_command.train(options, console) == 0
    assert json.loads(out.read_text())["date"] == RUN["date"]
    said = console.export_text()
    assert f"what this run has seen of its disks is not kept in {tuned}" in said


def test_rates_past_the_fast_cache_are_planned_with(tuned: Path) -> None:
    content = json.loads(tuned.read_text())
    content["tiermem"]["measured"]["sustained"] = {
        "read_bytes_s": 3e9,
        "write_bytes_s": 5e8,
        "sustained": "9.0 GB written: ...",
    }
    tuned.write_text(json.dumps(content))
    rates, source = tuned_speed(tuned)
    assert (rates.disk_read_bytes_s, rates.disk_write_bytes_s) == (2e9, 5e8)
    assert source.endswith("past the fast cache (9.0 GB written: ...)")
