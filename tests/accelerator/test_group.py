"""Do collectives of device tensors leave what gloo leaves, in stream order, whichever rank waits?"""

from __future__ import annotations

from pathlib import Path

import pytest
from launch import launch_ranks

from accelerator.fixture import WHY_SKIPPED


@pytest.mark.skipif(WHY_SKIPPED is not None, reason=str(WHY_SKIPPED))
@pytest.mark.parametrize("num_ranks", [2, 4])
def test_collectives_on_ranks(num_ranks: int, tmp_path: Path) -> None:
    launch_ranks(Path(__file__).parent / "group_on_ranks.py", num_ranks, str(tmp_path / "meeting"), timeout_s=120)
