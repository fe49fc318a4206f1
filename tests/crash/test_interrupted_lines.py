"""Does a run that is interrupted at any line of the library go on to the bit, or say that it is
torn?"""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from harness import totals_of


def test_some_interrupts_leave_a_run_that_goes_on_or_says_that_it_is_torn(tmp_path: Path) -> None:
    words = ("--sample", "10", "--settings", "0", "3", "--parts", "train", "--workers", "1")
    assert totals_of("interrupts.py", tmp_path, *words)["cases"] == 10


def test_an_interrupt_of_one_of_two_ranks_leaves_both_right_or_told(tmp_path: Path) -> None:
    words = (
        "--sample",
        "3",
        "--settings",
        "12",
        "--parts",
        "train",
        "--functions",
        "ShardedModel.step",
        "--workers",
        "1",
    )
    assert totals_of("interrupts.py", tmp_path, *words)["cases"] == 3


@pytest.mark.sampled(4)
@pytest.mark.parametrize(("kind", "setting"), [("steps", "1"), ("trainer", "5")])
def test_ctrl_c_at_random_moments_leaves_a_notebook_that_trains_right_or_is_told(
    kind: str, setting: str, tmp_path: Path
) -> None:
    words = ("--kinds", kind, "--settings", setting, "--count", "6", "--seed", "3")
    assert totals_of("notebook.py", tmp_path, *words)["cases"] == 6


@pytest.mark.slow
def test_counts_that_change_before_the_mark_are_noticed(tmp_path: Path) -> None:
    words = (
        "--sample",
        "40",
        "--settings",
        "0",
        "--parts",
        "train",
        "--functions",
        "ShardedModel.step",
    )
    words = (*words, "--sabotage", "counts_come_before_the_mark")
    with pytest.raises(AssertionError, match="wrong bits"):
        totals_of("interrupts.py", tmp_path, *words)


@pytest.mark.soak
@pytest.mark.parametrize("setting", range(14))
def test_no_interrupt_leaves_a_run_that_is_silently_wrong(setting: int, tmp_path: Path) -> None:
    """All settings take 40 minutes, and TIERMEM_SOAK_SEED chooses the order of cases: each seed
    goes through other ones."""
    seed = os.environ.get("TIERMEM_SOAK_SEED", "1")
    words = ("--settings", str(setting), "--seconds", "170", "--seed", seed)
    found = totals_of("interrupts.py", tmp_path, *words, name=f"interrupts-{setting}-seed-{seed}")
    assert found["cases"] > (
        300 if setting < 12 else 30
    )  # two ranks wait for each other; the machine may have other work


@pytest.mark.soak
@pytest.mark.parametrize(("kind", "count"), [("steps", 200), ("trainer", 200), ("command", 200)])
def test_no_ctrl_c_leaves_a_training_that_is_silently_wrong(
    kind: str, count: int, tmp_path: Path
) -> None:
    found = totals_of(
        "notebook.py", tmp_path, "--kinds", kind, "--count", str(count), name=f"ctrl-c-{kind}"
    )
    assert found["cases"] >= count
