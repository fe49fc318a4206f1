"""What the tests of a sweep share: settings and outcomes with plain numbers."""

from __future__ import annotations

from typing import Any

from tiermem.tools.bench.io_ranks import Outcome
from tiermem.tools.bench.sweep import Setting

MIB = 1 << 20


def setting(mode: str = "read", **changed: Any) -> Setting:
    """A setting on one path: 1 MiB x 8, one rank."""
    return Setting(mode, "auto", MIB, 8, 1, "/a", (0,))._replace(**changed)


def outcome(seconds: float = 1.0, read: int = 0, written: int = 0, **changed: Any) -> Outcome:
    """An outcome that began at second 100; its CPU time is a tenth of the time, two parts user to one system."""
    return Outcome(
        start_s=100.0,
        end_s=100.0 + seconds,
        read_bytes=read,
        written_bytes=written,
        user_s=seconds * 0.2 / 3,
        system_s=seconds * 0.1 / 3,
        idle_fraction=0.25,
        latencies=[1, 2, 3],
        engine="uring",
        kernel_read_bytes=read,
        kernel_written_bytes=written,
        num_blocks=100,
    )._replace(**changed)
