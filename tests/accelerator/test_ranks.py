"""Do ranks, each on a simulated device of its own, compute what they compute on CPUs?

With two ranks sums have two terms, so that they are equal to the bit. With four the CPUs add up in
another order: there every schedule equals the device's own first one to the bit, and that one the
CPUs' to 1e-5.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from launch import launch

from accelerator.fixture import WHY_SKIPPED
from accelerator.mutants import ON_RANKS

HERE = Path(__file__).parent
BOTH = "cpu:gloo,sim:simccl"
QUICK = {
    "a gather is not waited for",
    "device memory that a model leaves is lent before its streams have ended",
    "parts of parameters are gathered as lists in a coalesced group",
    "the end of a gather's reads is recorded before them",
}
pytestmark = pytest.mark.skipif(WHY_SKIPPED is not None, reason=str(WHY_SKIPPED))


LATE = "late,late,late"
IN_TURN = "late,random:0,random:1,random:2,random:3"
"""Each step has another schedule, and begins with what is pending of the step before."""


def random_ways(num: int) -> list[str]:
    """Trainings of three steps, under as many random schedules."""
    return [",".join([f"random:{seed}"] * 3) for seed in range(num)]


def assert_equal(folder: Path, backend: str, *ways: str, timeout_s: float = 400.0) -> None:
    for found in launch(
        HERE / "parity_on_ranks.py", 2, folder, backend, "all", *ways, timeout_s=timeout_s
    ):
        assert {name: apart for name, apart in found.items() if apart} == {}


def assert_close_and_equal(folder: Path, names: str, *ways: str, timeout_s: float = 400.0) -> None:
    for found in launch(
        HERE / "parity_on_ranks.py", 4, folder, BOTH, names, *ways, timeout_s=timeout_s
    ):
        beside = {name: apart for name, apart in found.items() if name.endswith("beside CPUs")}
        assert beside
        assert {name: apart for name, apart in beside.items() if not apart < 1e-5} == {}
        assert {name: apart for name, apart in found.items() if apart and name not in beside} == {}


@pytest.mark.slow
def test_two_ranks_on_devices_compute_what_they_compute_on_cpus(tmp_path: Path) -> None:
    assert_equal(tmp_path, BOTH, IN_TURN)


@pytest.mark.slow
def test_two_ranks_train_whose_group_takes_tensors_of_devices_alone(tmp_path: Path) -> None:
    assert_equal(tmp_path, "simccl", IN_TURN)


@pytest.mark.slow
def test_groups_within_four_ranks_compute_what_they_compute_on_cpus(tmp_path: Path) -> None:
    assert_close_and_equal(tmp_path, "on four", IN_TURN)


@pytest.mark.slow
def test_four_ranks_on_devices_compute_what_they_compute_on_cpus(tmp_path: Path) -> None:
    assert_close_and_equal(tmp_path, "all", LATE, *random_ways(6))


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[] if name in QUICK else [pytest.mark.slow]) for name in ON_RANKS],
)
def test_a_mutant_is_seen(name: str, tmp_path: Path) -> None:
    found = launch(HERE / "parity_on_ranks.py", 2, tmp_path, BOTH, name, LATE, *random_ways(10))
    assert any(apart != 0.0 for rank in found for apart in rank.values())


@pytest.mark.soak
def test_two_ranks_compute_the_same_under_every_schedule(tmp_path: Path) -> None:
    assert_equal(tmp_path, BOTH, *random_ways(20), timeout_s=1800)


@pytest.mark.soak
def test_four_ranks_compute_the_same_under_every_schedule(tmp_path: Path) -> None:
    assert_close_and_equal(tmp_path, "all", *random_ways(20), timeout_s=3600)
