"""Are state dicts of sharded models whole on every rank, the same on any number of them, and do
they resume to the bit?

One launch for each number of ranks runs every case (state_dicts_on_ranks.py).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from launch import launch
from programs.models import Tower
from programs.twins import assert_same_tensors, flat_states
from state_dicts_on_ranks import CASES

HERE = Path(__file__).parent

Found = list[dict[str, Any]]


@pytest.fixture(scope="module")
def launched(tmp_path_factory: pytest.TempPathFactory) -> tuple[Found, Found]:
    """What one rank found, and what two did."""
    found = []
    for ranks in (1, 2):
        out, nvme = tmp_path_factory.mktemp("out"), tmp_path_factory.mktemp("nvme")
        found.append(launch(HERE / "state_dicts_on_ranks.py", ranks, out, str(nvme)))
    return found[0], found[1]


@pytest.mark.sampled(12)
@pytest.mark.parametrize("case", CASES)
def test_the_dict_is_whole_and_the_same_on_every_number_of_ranks(
    case: str, launched: tuple[Found, Found]
) -> None:
    alone = flat_states(launched[0][0][case]["saved"])
    sizes = [p.shape for p in Tower().parameters()]
    assert [alone[f"{i}.exp_avg"].shape for i in range(len(sizes))] == sizes
    for rank in range(2):
        assert_same_tensors(flat_states(launched[1][rank][case]["saved"]), alone)


@pytest.mark.parametrize("case", CASES)
def test_a_run_resumes_to_the_bit(case: str, launched: tuple[Found, Found]) -> None:
    for found in launched:
        for rank in found:
            assert rank[case]["resumed"] == rank[case]["went_on"]


def test_matrices_cut_over_ranks_are_refused(launched: tuple[Found, Found]) -> None:
    assert launched[0][0]["muon"] == "none"
    for rank in range(2):
        assert (
            "cut into 2 shards, one per rank: no rank has a whole one" in launched[1][rank]["muon"]
        )


def test_ranks_agree_on_moments_that_one_of_them_got_before_the_first_step(
    launched: tuple[Found, Found],
) -> None:
    for found in [*launched[0], *launched[1]]:
        entries = found["visited"]["state"].values()
        assert len(entries) == len(found["visited"]["param_groups"][0]["params"])
        for entry in entries:
            assert entry["exp_avg"].flatten()[0] == 1.0
            assert entry["exp_avg"].sum() == 1.0
            assert not entry["exp_avg_sq"].any()
