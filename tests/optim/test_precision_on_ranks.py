"""Is what is rounded, stochastically too, the same to the bit on one rank and on two?

One launch for each number of ranks trains every case (precision_on_ranks.py); the tests look at what they wrote.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from launch import launch
from precision_on_ranks import CASES
from twins import assert_same_tensors

HERE = Path(__file__).parent

Found = list[dict[str, Any]]


@pytest.fixture(scope="module")
def launched(tmp_path_factory: pytest.TempPathFactory) -> tuple[Found, Found]:
    """What one rank found, and what two did."""
    found = []
    for ranks in (1, 2):
        out, nvme = tmp_path_factory.mktemp("out"), tmp_path_factory.mktemp("nvme")
        found.append(launch(HERE / "precision_on_ranks.py", ranks, out, str(nvme)))
        assert not list(nvme.iterdir())
    return found[0], found[1]


@pytest.mark.parametrize("case", CASES)
def test_two_ranks_compute_what_one_does(case: str, launched: tuple[Found, Found]) -> None:
    (alone,), (first, second) = ([each[case] for each in found] for found in launched)
    assert first["losses"] == second["losses"] == alone["losses"]
    assert_same_tensors(first["weights"], alone["weights"])
    assert_same_tensors(second["weights"], alone["weights"])
    joined = {name: torch.cat([first["states"][name], second["states"][name]]) for name in alone["states"]}
    assert_same_tensors(joined, alone["states"])


def test_steps_under_backward_count_on_every_rank(launched: tuple[Found, Found]) -> None:
    for found in (each for ranks in launched for each in ranks):
        stepped, expected = found["compact, under backward"], found["compact, on NVMe"]
        assert len(stepped["committed"]) == 2 and all(stepped["committed"]) and not expected["committed"]
        assert stepped["losses"] == expected["losses"]
        assert_same_tensors(stepped["states"], expected["states"])


def test_what_was_compared_was_trained_and_rounded(launched: tuple[Found, Found]) -> None:
    alone = launched[0][0]
    assert len(set(alone["exact"]["losses"])) > 1
    assert alone["compact"]["losses"] != alone["exact"]["losses"]
    assert alone["stochastic bf16"]["losses"] != alone["bf16"]["losses"]
    for moment in alone["tiny"]["states"].values():
        assert moment.any()
