"""Does the host wait for the device in a step? Neither per unit nor per parameter: helper threads do."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import pytest
from launch import launch

from accelerator.fixture import WHY_SKIPPED
from accelerator.waits import HOMES, Counts, count

NONE = {"main": 0, "autograd": 0}


def assert_no_waits(found: Counts) -> None:
    for phase in ("forward", "backward"):
        assert found[phase] | NONE == found[phase], (phase, found)
    assert all(each["pageable"] == 0 for each in found.values()), found


@pytest.mark.parametrize("home", HOMES)
def test_no_wait_in_forward_and_backward_and_no_pageable_copy_in_a_step(
    home: str, sim: ModuleType, tmp_path: Path
) -> None:
    sim.set_schedule("late")
    found = count("sim", tmp_path, **HOMES[home])
    assert_no_waits(found)
    assert found["backward"]["other"] >= 10  # the helper threads wait: for every unit's gradients
    assert found["step"] | NONE == found["step"], found


@pytest.mark.parametrize("home", ["host", "nvme"])
def test_clipping_by_torch_waits_once(home: str, sim: ModuleType, tmp_path: Path) -> None:
    """For the factor, which torch computes on the device, when the step needs it."""
    sim.set_schedule("late")
    found = count("sim", tmp_path, clips="torch", **HOMES[home])
    assert_no_waits(found)
    assert found["clipping"]["main"] + found["step"]["main"] == 1, found


@pytest.mark.parametrize("home", ["host", "nvme"])
@pytest.mark.parametrize("clips", ["scaler", "scaler, stepped"])
def test_unscaling_clipping_and_stepping_wait_once(clips: str, home: str, sim: ModuleType, tmp_path: Path) -> None:
    """Norms are scaled on the device; the step waits, for the factors, or torch before it, which asks for an overflow."""
    sim.set_schedule("late")
    found = count("sim", tmp_path, clips=clips, **HOMES[home])
    assert_no_waits(found)
    assert (found["clipping"]["main"], found["step"]["main"]) == (0, 1), found


@pytest.mark.skipif(WHY_SKIPPED is not None, reason=str(WHY_SKIPPED))
def test_no_wait_on_two_ranks(tmp_path: Path) -> None:
    backend = "cpu:gloo,sim:simccl"
    for found in launch(Path(__file__).parent / "waits.py", 2, tmp_path, backend, "host", "nvme", "states on host"):
        for home, counts in found.items():
            if home == "states on host":  # there a step brings the shards, which rest on the device, to the CPU
                del counts["step"]
            assert_no_waits(counts)
