"""On a GPU: do the programs of tests/programs/on_device.py compute the same bits wherever their states rest?

On the simulated device test_parity.py compares them with the CPU. A GPU adds up in another order,
so here the other homes are compared with HOST.
"""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from accelerator.test_parity import EVERY, differences, run
from programs.homes import HOMES
from programs.on_device import PROGRAMS

pytestmark = pytest.mark.gpu

STEPPED_THERE = [
    home
    for home in HOMES
    if home == "device" or home.endswith(("on device", "of the states", "sent"))
]
STEPPED_THERE.remove("host, gradients on device")
STEPPED_THERE.remove("nvme, gradients on device")


@pytest.mark.slow
@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_computes_the_same_bits_at_every_home(
    name: str, accelerator: torch.device, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    if accelerator.type == "sim":
        pytest.skip(
            "tests/accelerator/test_parity.py runs them on the simulated device, under many "
            "schedules"
        )
    # not counted
    monkeypatch.setattr(
        torch, "sim", SimpleNamespace(copies=lambda: {"num_pageable": 0}), raising=False
    )
    homes = [home for each, home in EVERY if each == name and home != "host"]
    if name == "one_matrix_of_muon":  # its products depend on where they are computed
        homes = [home for home in homes if home not in STEPPED_THERE]
    wanted = run(name, "host", str(accelerator), tmp_path / "host")
    found = {
        home: differences(run(name, home, str(accelerator), tmp_path / home), wanted)
        for home in homes
    }
    assert found == {home: [] for home in homes}
