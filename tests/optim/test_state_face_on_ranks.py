"""Do resets of `optimizer.state`, a second optimizer and torch.func count on two ranks as they do
on one?"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from launch import asked, launch
from state_face_on_ranks import CASES

HERE = Path(__file__).parent


@pytest.fixture(scope="module")
def found(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> list[dict[str, Any]]:
    """What two ranks found."""
    out, nvme = tmp_path_factory.mktemp("out"), tmp_path_factory.mktemp("nvme")
    words = [str(nvme), "clear, stage 3", *asked(request, "case")]
    return launch(HERE / "state_face_on_ranks.py", 2, out, *words)


@pytest.mark.sampled(16)
@pytest.mark.parametrize("case", CASES)
def test_two_ranks_train_as_a_plain_model(case: str, found: list[dict[str, Any]]) -> None:
    for rank in found:
        assert rank[case]["losses"] == pytest.approx(rank[case]["twin's"], rel=2e-4)


def test_reading_a_part_is_refused_with_the_way(found: list[dict[str, Any]]) -> None:
    assert all(
        "safe_get_full_optimizer_state" in rank["clear, stage 3"]["refused"] for rank in found
    )
