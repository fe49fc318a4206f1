"""Does a person see loss, speed, memory against the cap, the disk and what is waited for?"""

from __future__ import annotations

import io
import sys
from pathlib import Path

import pytest
from rich.console import Console

sys.path.insert(0, str(Path(__file__).parent))

from fake_run import DEVICE_FIELDS

from tiermem.tools.job.launcher import Sample
from tiermem.tools.record.reports import Progress

MIB = 1 << 20
READY = {
    "kind": "ready",
    "ceiling": {"read_bytes_s": 4e9, "write_bytes_s": 8e9},
    "read_bytes": 5,
    "written_bytes": 0,
}
STEP = {
    "kind": "step",
    "step": 2,
    "loss": 7.25,
    "tokens": 128,
    "forward_s": 0.5,
    "backward_s": 0.5,
    "step_s": 1.0,
    "nvme_read_bytes": 4_000_000_005,
    "nvme_written_bytes": 2_000_000_000,
    "waits": {"tile state": 0.25, "param": 0.001},
    **DEVICE_FIELDS,
}


@pytest.mark.parametrize("is_terminal", [True, False])
def test_a_step_is_shown(is_terminal: bool) -> None:
    text = io.StringIO()
    console = Console(file=text, width=300, force_terminal=is_terminal, color_system=None)
    with Progress(console, "tiermem tiny", 10, 1250 * MIB, "cgroup-v1") as progress:
        progress.on_message({"kind": "phase", "name": "building the model"})
        progress.on_message(READY)
        progress.on_sample(Sample(0, 900 * MIB, None))
        progress.on_message(STEP)
        progress._drawn = 0.0
        progress.on_sample(Sample(1, 800 * MIB, None))
    shown = text.getvalue()
    for part in (
        "2/10",
        "7.2500",
        "64.0 tokens/s",
        "of 1250.0 MiB (cgroup-v1), peak 900.0 MiB",
        "2.00 read + 1.00 write GB/s (ceilings 4.0 and 8.0: busy 62%)",
        "0.25 s for tile state",
        "cuda:0 100.0 MiB (300.0 MiB reserved) of 20.00 GiB, peak 200.0 MiB (400.0 MiB)",
    ):
        assert part in shown
    assert "for param" not in shown
    assert ("building the model" in shown) is not is_terminal or is_terminal


def test_memory_under_a_cgroup_is_what_the_cap_counts() -> None:
    text = io.StringIO()
    with Progress(Console(file=text, width=300), "tiny", 10, 1250 * MIB, "cgroup-v1") as progress:
        progress.on_message(READY)
        progress.on_sample(Sample(0, 1300 * MIB, 1100 * MIB))
        progress.on_message(STEP)
    assert "memory 1100.0 MiB of 1250.0 MiB (cgroup-v1), peak 1100.0 MiB" in text.getvalue()


def test_texts_with_brackets_are_shown_as_they_are() -> None:
    text = io.StringIO()
    with Progress(Console(file=text, width=300), "run [bold]", 1, None, "none") as progress:
        progress.on_message({"kind": "phase", "name": "loading [x]"})
    assert text.getvalue() == "run [bold]: loading [x]\n"
