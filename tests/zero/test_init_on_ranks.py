"""Does zero.Init give every rank rank 0's values, and hold no more than its part? One launch, no
process group."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import init_on_ranks
import pytest
import torch
from launch import asked, launch_ranks
from torch import nn

HERE = Path(__file__).parent
MIB = 1 << 20


@pytest.fixture(scope="module", params=[2, pytest.param(3, marks=pytest.mark.slow)])
def launched(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> list[dict[str, Any]]:
    out, num_ranks = tmp_path_factory.mktemp("out"), request.param
    names = [f"{case}, {numel}" for case, numel in asked(request, "case", "persistence_numel")]
    launch_ranks(HERE / "init_on_ranks.py", num_ranks, str(out), *names, timeout_s=300)
    return [json.loads((out / f"{rank}.json").read_text()) for rank in range(num_ranks)]


@pytest.mark.sampled(16)
@pytest.mark.parametrize("persistence_numel", [0, 50, 1 << 20])
@pytest.mark.parametrize("case", init_on_ranks.CASES)
def test_values_are_those_of_rank_0_whatever_the_threshold(
    case: str, persistence_numel: int, launched: list[dict[str, Any]]
) -> None:
    torch.manual_seed(0)
    plain: nn.Module = init_on_ranks.CASES[case]()
    for found in launched:
        for name, values in found[f"{case}, {persistence_numel}"].items():
            assert torch.equal(torch.tensor(values), plain.state_dict()[name].detach().flatten()), (
                name
            )


@pytest.mark.parametrize(("width", "num_blocks"), init_on_ranks.SIZES)
def test_peak_of_a_rank_is_its_parts_and_a_unit_or_the_cache(
    width: int, num_blocks: int, launched: list[dict[str, Any]]
) -> None:
    unit_bytes, cache_bytes = width**2 * 4, 16 * MIB
    allowed = (
        num_blocks * unit_bytes // len(launched)  # this rank's parts
        # the unit under construction, or parameters awake for the initialisation
        + max(unit_bytes, cache_bytes)
        # slack: modules, messages, freed blocks that the C library has not given back yet
        + 4 * MIB
    )
    for found in launched:
        assert found[f"peak {width}"] <= allowed < num_blocks * unit_bytes
