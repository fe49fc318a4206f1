"""Are the bytes that a step hands to collectives and to the disk those of its forecast, on two
ranks and on three?"""

from __future__ import annotations

from pathlib import Path

import pytest
from launch import asked, launch
from traffic_cases import CASES

HERE = Path(__file__).parent
Found = list[dict[str, tuple[dict[str, int], dict[str, int]]]]


@pytest.fixture(scope="module", params=[2, pytest.param(3, marks=pytest.mark.slow)])
def launched(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Found:
    out, nvme = tmp_path_factory.mktemp("out"), tmp_path_factory.mktemp("nvme")
    words = [str(nvme), *asked(request, "case")]
    return launch(HERE / "traffic_on_ranks.py", request.param, out, *words, timeout_s=300)


@pytest.mark.sampled(16)
@pytest.mark.parametrize("case", CASES)
def test_a_forecast_counts_what_a_step_sends_reads_and_writes(case: str, launched: Found) -> None:
    for found in launched:
        said, sent = found[case]
        assert said == sent
        assert sum(sent.values()) > 0
