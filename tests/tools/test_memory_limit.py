"""Does a cap hold from the first page on, and is everything it made removed?"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from tiermem.tools import memory_limit
from tiermem.tools.job.launcher import CHANNEL_FD, Outcome, launch
from tiermem.tools.memory_limit import (
    CgroupV1Limit,
    CgroupV2Limit,
    MemoryLimit,
    WatchLimit,
    open_limit,
)

CAP = 128 << 20
HOARD = """
import os, sys, time
def phase(name): os.write(int(sys.argv[1]), b'{"kind": "phase", "name": "%s"}\\n' % name)
phase(b"collecting")
kept = []
for i in range(int(sys.argv[2])):
    kept.append(bytearray(8 << 20))
    if i == 4: phase(b"hoarding")
phase(b"the end")
time.sleep(0.2)
"""


def hoard(limit: MemoryLimit, num_bytes: int) -> Outcome:
    return launch(
        [sys.executable, "-S", "-c", HOARD, CHANNEL_FD, str(num_bytes // (8 << 20))], limit
    )


def strongest() -> MemoryLimit:
    limit = open_limit(CAP)
    if limit.kind == "watch":
        pytest.skip(f"no kernel-held cap here: {limit.why}")
    return limit


def test_the_kernel_kills_a_child_that_takes_more_than_the_cap() -> None:
    with strongest() as limit:
        outcome = hoard(limit, 4 * CAP)
    assert outcome.is_killed_at_cap
    assert outcome.exit_code == 137
    assert outcome.phase == "hoarding"
    assert outcome.charge.num_kills == 1
    assert outcome.charge.peak_bytes is not None
    assert CAP * 0.9 < outcome.charge.peak_bytes <= CAP
    assert (
        f"killed at the cap of 128.0 MiB during hoarding ({limit.kind}: oom_kill 1"
        in outcome.describe()
    )


def test_a_child_below_the_cap_ends_by_itself() -> None:
    with strongest() as limit:
        outcome = hoard(limit, CAP // 2)
    assert outcome.exit_code == 0
    assert not outcome.is_killed_at_cap
    assert outcome.describe() == "finished"
    assert outcome.phase == "the end"
    assert CAP // 2 <= outcome.peak_rss_bytes <= CAP
    assert outcome.charge.num_kills == 0


def test_a_child_is_under_the_cap_before_its_program_is_loaded() -> None:
    look = (
        "import os, sys; sys.exit(f'tiermem-{os.getppid()}' not in "
        "open('/proc/self/cgroup').read())"
    )
    with strongest() as limit:
        assert launch([sys.executable, "-S", "-c", look], limit).exit_code == 0


def test_what_a_child_starts_is_under_the_cap_too() -> None:
    child = (
        "import subprocess, sys; sys.exit(subprocess.call([sys.executable, '-S', '-c', 'x = "
        "bytearray(1 << 28)']) != 0)"
    )
    with strongest() as limit:
        outcome = launch([sys.executable, "-S", "-c", child], limit)
    assert outcome.charge.num_kills
    assert outcome.is_killed_at_cap


def test_a_watch_stops_a_child_over_the_cap() -> None:
    with WatchLimit(CAP) as limit:
        outcome = hoard(limit, 64 * CAP)
    assert outcome.is_killed_at_cap
    assert outcome.limit_kind == "watch"
    assert outcome.exit_code == 137
    assert "the process tree held" in outcome.describe()


def test_the_cgroup_is_gone_after_close_whatever_is_left_in_it() -> None:
    limit = strongest()
    if not isinstance(limit, CgroupV1Limit | CgroupV2Limit):
        pytest.skip(f"{limit.kind} makes no folder of ours")
    assert limit.folder.is_dir()
    launch(["/bin/sh", "-c", "sleep 1000 >/dev/null 2>&1 & exit 0"], limit)
    limit.close()
    assert not limit.folder.exists()
    limit.close()


def test_folders_of_dead_launchers_are_removed_and_others_left(tmp_path: Path) -> None:
    dead, alive, foreign = (
        tmp_path / name for name in ("tiermem-999999999-0", f"tiermem-{os.getpid()}-7", "other-1")
    )
    for folder in (dead, alive, foreign):
        folder.mkdir()
    memory_limit._remove_dead(tmp_path)
    assert not dead.exists()
    assert alive.exists()
    assert foreign.exists()
    alive.rmdir()


def test_a_v2_cgroup_is_read_by_its_own_names(tmp_path: Path) -> None:
    files = {
        "memory.current": "1000\n",
        "memory.peak": "5000\n",
        "memory.events": "low 0\nhigh 0\nmax 7\noom 1\noom_kill 1\n",
        "memory.stat": "anon 600\nfile 300\nkernel 100\n",
    }
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    charge = memory_limit._charge_v2(tmp_path, in_full=True)
    assert charge == memory_limit.Charge(1000, 5000, 700, 1, 7)


def test_counts_that_a_kernel_does_not_give_are_none(tmp_path: Path) -> None:
    assert memory_limit._charge_v2(tmp_path, in_full=True) == memory_limit.Charge()


def test_without_a_cap_nothing_is_limited() -> None:
    with open_limit(None) as limit:
        assert limit.kind == "none"
        assert limit.wrap(["true"]) == ["true"]
        assert not limit.is_over(1 << 60)


def test_auto_says_why_stronger_kinds_are_not_in_force(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(kind: str, limit_bytes: int, why: str) -> MemoryLimit:
        if kind != "watch":
            raise OSError(f"no {kind} today")
        return WatchLimit(limit_bytes, why)

    monkeypatch.setattr(memory_limit, "_open", refuse)
    limit = open_limit(CAP)
    assert limit.kind == "watch"
    assert (
        "cgroup-v1: no cgroup-v1 today; cgroup-v2: no cgroup-v2 today; systemd-scope" in limit.why
    )
