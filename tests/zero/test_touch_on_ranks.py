"""Do GatheredParameters, external parameters, leaf modules and zero.Init do on several ranks what
they promise?

One launch per number of ranks runs every case that is asked for (touch_on_ranks.py); the tests look at what it wrote.
Three ranks divide hardly any parameter evenly.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from launch import asked, launch

HERE = Path(__file__).parent
CASES = re.findall(r"@case\ndef (\w+)", (HERE / "touch_on_ranks.py").read_text())


@pytest.fixture(
    scope="module", params=[2, pytest.param(3, marks=pytest.mark.slow)], ids=["2 ranks", "3 ranks"]
)
def launched(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[list[Any], Path]:
    out, nvme = tmp_path_factory.mktemp("out"), tmp_path_factory.mktemp("nvme")
    words = [str(nvme), *asked(request, "name")]
    return launch(HERE / "touch_on_ranks.py", request.param, out, *words), nvme


@pytest.mark.sampled(16)
@pytest.mark.parametrize("name", CASES)
def test_case(name: str, launched: Any) -> None:
    for rank, found in enumerate(launched[0]):
        assert not found[name], f"rank {rank}: {found[name]}"


def test_nothing_is_left_in_the_nvme_folder(launched: Any) -> None:
    assert not list(launched[1].iterdir())
