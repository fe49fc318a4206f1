"""Is what is rounded, stochastically too, the same to the bit on one rank, on two and on four?

One launch for each number of ranks trains every case (precision_on_ranks.py); the tests look at
what they wrote.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from launch import launch
from precision_on_ranks import CASES
from programs.twins import assert_same_tensors

HERE = Path(__file__).parent

Found = list[dict[str, Any]]


@pytest.fixture(scope="module")
def launched(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], Found]:
    """What so many ranks found."""

    @functools.cache
    def launched_on(ranks: int) -> Found:
        out, nvme = tmp_path_factory.mktemp("out"), tmp_path_factory.mktemp("nvme")
        found = launch(HERE / "precision_on_ranks.py", ranks, out, str(nvme))
        assert not list(nvme.iterdir())
        return found

    return launched_on


ON_TWO = [pytest.param(case, 2, id=case) for case in CASES]
ON_FOUR = [  # four parts of a bias are smaller than a block of 8-bit states
    pytest.param(case, 4, id=f"{case}, 4 ranks", marks=pytest.mark.slow)
    for case in CASES
    if case != "tiny"
]


@pytest.mark.sampled(16)
@pytest.mark.parametrize(("case", "ranks"), [*ON_TWO, *ON_FOUR])
def test_ranks_compute_what_one_does(
    case: str, ranks: int, launched: Callable[[int], Found]
) -> None:
    alone, several = launched(1)[0][case], [each[case] for each in launched(ranks)]
    for each in several:
        assert each["losses"] == alone["losses"]
        assert_same_tensors(each["weights"], alone["weights"])
    joined = {
        name: torch.cat([each["states"][name] for each in several]) for name in alone["states"]
    }
    assert_same_tensors(joined, alone["states"])


@pytest.mark.parametrize("ranks", [1, 2, pytest.param(4, marks=pytest.mark.slow)])
def test_steps_under_backward_count_on_every_rank(
    ranks: int, launched: Callable[[int], Found]
) -> None:
    for each in launched(ranks):
        stepped, expected = each["compact, under backward"], each["compact, on NVMe"]
        assert (
            len(stepped["committed"]) == 2
            and all(stepped["committed"])
            and not expected["committed"]
        )
        assert stepped["losses"] == expected["losses"]
        assert_same_tensors(stepped["states"], expected["states"])


def test_what_was_compared_was_trained_and_rounded(launched: Callable[[int], Found]) -> None:
    alone = launched(1)[0]
    assert len(set(alone["exact"]["losses"])) > 1
    assert alone["compact"]["losses"] != alone["exact"]["losses"]
    assert alone["stochastic bf16"]["losses"] != alone["bf16"]["losses"]
    for moment in alone["tiny"]["states"].values():
        assert moment.any()
