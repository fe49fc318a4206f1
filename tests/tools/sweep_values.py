"""What the tests of a sweep share: settings and outcomes with plain numbers."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

from tiermem.tools.bench.io_ranks import RankOutcome, Setting
from tiermem.tools.record.run_record import IoCounts

MIB = 1 << 20


def setting(mode: str = "read", **changed: Any) -> Setting:
    """A setting on one path: 1 MiB x 8, one rank."""
    return Setting(mode, "auto", MIB, 8, 1, "/a", (0,))._replace(**changed)


def outcome(seconds: float = 1.0, read: int = 0, written: int = 0, **changed: Any) -> RankOutcome:
    """An outcome that began at second 100; its CPU time is a tenth of the time, two parts user to
    one system."""
    return RankOutcome(
        start_s=100.0,
        end_s=100.0 + seconds,
        moved=IoCounts(read, written),
        user_s=seconds * 0.2 / 3,
        system_s=seconds * 0.1 / 3,
        idle_fraction=0.25,
        latencies=[1, 2, 3],
        engine="uring",
        kernel=IoCounts(read, written),
        num_blocks=100,
    )._replace(**changed)


def options(*paths: str, **changed: Any) -> Any:
    """Options of the benchmark on paths that need not exist: files of 64 MiB, one read of 1 MiB x 8
    in one loop."""
    lists = {"modes": ["read"], "engines": ["auto"], "blocks": [MIB], "depths": [8], "ranks": [1]}
    sizes = {
        "size_bytes": 64 * MIB,
        "random_block_bytes": 4096,
        "sustained_bytes": 0,
        "sustained_s": None,
    }
    others = {"loops": 1, "threads": 0, "sync": False}
    return SimpleNamespace(
        paths=[Path(path) for path in paths or ["/a"]], **(lists | sizes | others | changed)
    )
