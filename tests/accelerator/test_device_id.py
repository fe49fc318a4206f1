"""Does the process group know its rank's device, and do all ranks take part where groups are split
from it?"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from launch import launch

from accelerator.fixture import WHY_SKIPPED


@pytest.mark.skipif(WHY_SKIPPED is not None, reason=str(WHY_SKIPPED))
def test_groups_of_ranks_are_made_beside_one_that_has_a_device(tmp_path: Path) -> None:
    found = launch(Path(__file__).parent / "device_id_on_ranks.py", 4, tmp_path, timeout_s=100)
    assert all(torch.equal(each, found[0]) and bool(each.isfinite().all()) for each in found)
