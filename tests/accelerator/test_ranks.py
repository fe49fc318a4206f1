"""Do ranks, each on a simulated device of its own, compute what they compute on CPUs?

With two ranks sums have two terms, so that they are equal to the bit. With four the CPUs add up in another order: there every
schedule equals the device's own first one to the bit, and that one the CPUs' to 1e-4.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from launch import launch

from accelerator.fixture import WHY_SKIPPED
from accelerator.mutants import ON_RANKS

HERE = Path(__file__).parent
BOTH = "cpu:gloo,sim:simccl"
QUICK = {"a gather is not waited for", "parts of parameters are gathered as lists in a coalesced group"}
pytestmark = pytest.mark.skipif(WHY_SKIPPED is not None, reason=str(WHY_SKIPPED))


@pytest.mark.parametrize("schedule", ["late", pytest.param("random:1", marks=pytest.mark.slow)])
def test_two_ranks_on_devices_compute_what_they_compute_on_cpus(schedule: str, tmp_path: Path) -> None:
    for found in launch(HERE / "parity_on_ranks.py", 2, tmp_path, BOTH, "none", schedule):
        assert {name: apart for name, apart in found.items() if apart} == {}


def test_two_ranks_train_whose_group_takes_tensors_of_devices_alone(tmp_path: Path) -> None:
    for found in launch(HERE / "parity_on_ranks.py", 2, tmp_path, "simccl", "none", "late"):
        assert {name: apart for name, apart in found.items() if apart} == {}


def beside_cpus_and_itself(folder: Path, cases: str, *schedules: str) -> None:
    for found in launch(HERE / "parity_on_ranks.py", 4, folder, BOTH, cases, *schedules):
        beside = {name: apart for name, apart in found.items() if name.endswith("beside CPUs")}
        assert beside
        assert {name: apart for name, apart in beside.items() if not apart < 1e-4} == {}
        assert {name: apart for name, apart in found.items() if apart and name not in beside} == {}


def test_groups_within_four_ranks_compute_what_they_compute_on_cpus(tmp_path: Path) -> None:
    beside_cpus_and_itself(tmp_path, "on four", "late", "random:3")


@pytest.mark.slow
def test_four_ranks_on_devices_compute_what_they_compute_on_cpus(tmp_path: Path) -> None:
    beside_cpus_and_itself(tmp_path, "none", "late", "random:2")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in QUICK else [pytest.mark.slow]) for name in ON_RANKS]
)
def test_a_mutant_is_seen(name: str, tmp_path: Path) -> None:
    found = launch(
        HERE / "parity_on_ranks.py", 2, tmp_path, BOTH, name, "late", *(f"random:{seed}" for seed in range(10))
    )
    assert any(apart != 0.0 for rank in found for apart in rank.values())


@pytest.mark.soak
def test_two_ranks_compute_the_same_under_every_schedule(tmp_path: Path) -> None:
    for found in launch(
        HERE / "parity_on_ranks.py",
        2,
        tmp_path,
        BOTH,
        "none",
        *(f"random:{seed}" for seed in range(20)),
        timeout_s=1800,
    ):
        assert {name: apart for name, apart in found.items() if apart} == {}
