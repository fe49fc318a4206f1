"""Does the bench of ranks tell what the Python around a unit costs apart from what collectives
cost?"""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
from bench.options import RanksBenchOptions
from bench.ranks import bench_ranks, print_report, summary
from rich.console import Console

from tiermem.tools.measure.machine import machine_facts

STEPS = {
    who: [{"forward": 1.0, "backward": 2.0, "step": 3.0, "whole": 6.0}] * 3
    for who in ("tiermem", "fsdp2")
}


def passes(*pairs: tuple[float, float]) -> list[dict[str, float]]:
    return [{"forward": forward * 1e-6, "backward": backward * 1e-6} for forward, backward in pairs]


def printed(overhead: dict[str, Any]) -> str:
    console = Console(file=io.StringIO(), width=160)
    options = {"num_blocks": 1, "width": 8, "num_ranks": 2, "loops": 3, "num_empty": 64}
    print_report(
        {
            "machine": machine_facts(),
            "options": options,
            **summary({"steps": STEPS, "overhead": overhead}),
        },
        console,
    )
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


@pytest.mark.parametrize(
    ("backward", "verdict"), [(149, "within the 150 us"), (151, "more than the 150 us")]
)
def test_medians_of_passes_are_held_against_what_is_allowed(backward: float, verdict: str) -> None:
    ours = passes((90, backward), (80, backward - 20), (1000, backward + 700))
    gloo = {"tiermem": passes((281, 467)), "fsdp2": passes((350, 570))}
    found = printed({"gloo": gloo, "python": {"tiermem": ours, "fsdp2": passes((190, 230))}})
    assert f"90 us forward, {backward} us backward: {verdict}" in found
    assert all(f" {cost}" in found for cost in (281, 467, 350, 570, 190, 230))


def test_a_torch_without_an_idle_group_is_said_to_have_none() -> None:
    assert "Python alone was not measured" in printed({"gloo": {"tiermem": passes((281, 467))}})


@pytest.mark.slow
def test_two_ranks_measure_both_ways(tmp_path: Path) -> None:
    pytest.importorskip("_tiermem_native")
    options = RanksBenchOptions(
        loops=1, num_blocks=1, width=16, num_samples=4, num_empty=3, json_file=tmp_path / "r.json"
    )
    assert bench_ranks(options, Console(file=io.StringIO())) == 0
    found = json.loads((tmp_path / "r.json").read_text())["overhead_us_per_unit_and_pass"]
    assert {way: set(contestants) for way, contestants in found.items()} == {
        way: {"tiermem", "fsdp2"} for way in ("gloo", "python")
    }
    assert all(
        cost["backward"] > 0 for contestants in found.values() for cost in contestants.values()
    )
