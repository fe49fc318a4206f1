"""Do averages, exports and clipping by value give on two ranks what they give on one?

One launch for each number of ranks runs every case (outside_on_ranks.py).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from launch import launch
from outside_on_ranks import CASES
from programs.twins import assert_same_tensors

HERE = Path(__file__).parent


@pytest.fixture(scope="module")
def launched(
    tmp_path_factory: pytest.TempPathFactory,
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """What one rank found, and what two did."""
    script, make = HERE / "outside_on_ranks.py", tmp_path_factory.mktemp
    return launch(script, 1, make("one"), str(make("nvme"))), launch(
        script, 2, make("two"), str(make("nvme"))
    )


@pytest.mark.sampled(12)
@pytest.mark.parametrize("case", CASES)
def test_two_ranks_find_what_one_finds(case: str, launched: Any) -> None:
    [alone], both = launched
    for rank in both:
        mine, theirs = rank[case], alone[case]
        assert mine["clipped"] == pytest.approx(theirs["clipped"], rel=1e-6)
        for name, value in mine["averages"].items():
            torch.testing.assert_close(value, theirs["averages"][name], rtol=1e-5, atol=1e-6)
        assert_same_tensors(mine["averages"], both[0][case]["averages"])


@pytest.mark.parametrize("case", CASES)
def test_averages_are_applied_and_taken_back_and_exports_are_current(
    case: str, launched: Any
) -> None:
    for rank in [*launched[0], *launched[1]]:
        found = rank[case]
        assert found["back"]
        assert_same_tensors(found["applied"], found["averages"])
        assert_same_tensors(found["loaded"], found["averages"])
        assert_same_tensors(found["exported"], found["current"])


def test_a_gradient_in_parts_is_not_read_on_one_rank_alone(launched: Any) -> None:
    [alone], both = launched
    for case in ("host", "nvme"):
        assert float(alone[case]["refused"]) > 0
        for rank in both:
            assert r"call Shards.gradient(param) on every rank" in rank[case]["refused"]
