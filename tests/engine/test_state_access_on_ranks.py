"""Are states seen whole on every rank, in parts that fit, and changed everywhere, on 1, 2 and 3
ranks in every stage?

One launch for each number of ranks runs every case (state_access_on_ranks.py). No parameter's size
can be divided by 2 or 3.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from launch import asked, launch
from programs.twins import assert_same_tensors
from state_access_on_ranks import CASES, built, value_for

SCRIPT = Path(__file__).parent / "state_access_on_ranks.py"
PARAMS = dict(built().named_parameters())

cases = pytest.mark.parametrize("case", CASES)
many_ranks = pytest.mark.parametrize("ranks", [pytest.param(2, marks=pytest.mark.slow), 3])


class Found(dict[int, list[dict[str, Any]]]):
    """What every rank found, by number of ranks: launched when it is first asked for."""

    def __init__(self, folders: pytest.TempPathFactory, names: list[str]) -> None:
        self._folders = folders
        self._names = names

    def __missing__(self, ranks: int) -> list[dict[str, Any]]:
        out, nvme = self._folders.mktemp("out"), self._folders.mktemp("nvme")
        self[ranks] = launch(SCRIPT, ranks, out, str(nvme), *self._names, timeout_s=300)
        return self[ranks]


@pytest.fixture(scope="module")
def found(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Found:
    return Found(tmp_path_factory, asked(request, "case"))


@pytest.mark.sampled(4)
@many_ranks
@cases
def test_full_states_are_the_same_on_all_ranks_and_as_on_one(
    case: str, ranks: int, found: Found
) -> None:
    alone = found[1][0][case]["full"]
    for rank in found[ranks]:
        assert_same_tensors(rank[case]["full"], found[ranks][0][case]["full"])
    for name, value in alone.items():
        other = found[ranks][0][case]["full"][name]
        assert value.dtype == other.dtype == torch.float32
        assert value.shape == other.shape == PARAMS[name.rpartition(" ")[0]].shape
        tolerance = 1e-5 if CASES[case][2] == "" else 0.05  # a bf16 sum of three is rounded
        assert torch.allclose(value, other, rtol=tolerance, atol=tolerance)


@pytest.mark.sampled(4)
@many_ranks
@cases
def test_local_states_are_the_parts_of_the_full_ones_with_zeros_behind(
    case: str, ranks: int, found: Found
) -> None:
    if CASES[case][0] == 0:
        assert not found[ranks][0][case]["local"]
        return
    for name, whole in found[ranks][0][case]["full"].items():
        parts = [rank[case]["local"][name] for rank in found[ranks]]
        assert {part.shape for part in parts} == {(-(-whole.numel() // ranks),)}
        joined = torch.cat(parts)
        assert torch.equal(joined[: whole.numel()], whole.flatten())
        assert not joined[whole.numel() :].any()


@pytest.mark.sampled(4)
@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.slow), 3])
@cases
def test_what_is_put_is_seen_on_every_rank(case: str, ranks: int, found: Found) -> None:
    for rank in found[ranks]:
        for what, seeds in (
            ("put", (1, 2, 3)),
            ("put locally", (4, 5, 6) if CASES[case][0] else (1, 2, 3)),
        ):
            for name, param in PARAMS.items():
                for kind, seed in zip(("fp32", "grad", "state"), seeds, strict=True):
                    assert torch.equal(
                        rank[case][what][f"{name} {kind}"], value_for(param, seed)
                    ), (name, kind)
        for name, param in PARAMS.items():  # the weights that the maths sees
            assert torch.equal(
                rank[case]["shown"][name].float(), value_for(param, 4 if CASES[case][0] else 1)
            )


@pytest.mark.sampled(4)
@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.slow), 3])
@cases
def test_vectorised_forms_see_every_element_once(case: str, ranks: int, found: Found) -> None:
    seed = (5, 6) if CASES[case][0] else (2, 3)
    for rank in found[ranks]:
        for name, param in PARAMS.items():
            visited = rank[case]["visited"]
            assert torch.equal(
                visited[f"{name} fp32"].flatten(), torch.arange(param.numel()) % 2 + 1.0
            )
            assert torch.equal(visited[f"{name} grad"], value_for(param, seed[0]) + 0.5)
            assert torch.equal(visited[f"{name} state"], value_for(param, seed[1]) * 0.5)


@pytest.mark.sampled(4)
@many_ranks
@cases
def test_the_step_after_it_is_the_same_on_any_number_of_ranks(
    case: str, ranks: int, found: Found
) -> None:
    """Nothing of what it starts from was summed over ranks but the norm."""
    alone = found[1][0][case]
    gradients = [value for name, value in alone["visited"].items() if name.endswith("grad")]
    assert alone["norm"] == pytest.approx(
        torch.cat([g.flatten() for g in gradients]).double().norm().item(), rel=1e-6
    )
    for rank in found[ranks]:
        assert rank[case]["norm"] == pytest.approx(alone["norm"], rel=1e-6)
        assert rank[case]["loss"] == pytest.approx(
            alone["loss"], rel=1e-5 if CASES[case][2] == "" else 0.05
        )
        assert_same_tensors(rank[case]["weights"], found[ranks][0][case]["weights"])


@pytest.mark.sampled(4)
@many_ranks
@pytest.mark.parametrize("case", [name for name, (_, _, preset) in CASES.items() if not preset])
def test_in_no_sync_a_gradient_is_that_of_the_rank_or_reduced(
    found: Found, case: str, ranks: int
) -> None:
    """Below stage 2 no backward in the block reduces; from there on each does, since a rank has
    room for its part alone."""
    own = [rank[case]["of this rank"] for rank in found[ranks]]
    mean = [torch.stack(each).mean(0) for each in zip(*own, strict=True)]
    for rank, mine in zip(found[ranks], own, strict=True):
        for seen, expected in zip(
            rank[case]["in no_sync"], mine if CASES[case][0] < 2 else mean, strict=True
        ):
            torch.testing.assert_close(seen, expected)
