"""What tests of a GPU run on: the accelerator of this machine, else the simulated one, else
nothing, with the reason.

`make gpu` runs them where a GPU is; `make test` runs them on the simulated device, where they are
quick and show little of what a GPU would.

Algorithms are deterministic where torch has such, and cuBLAS has a fixed workspace: else its
products may differ in a bit from one stream or run to the next, and a test of parity would fail
without a defect.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read when cuBLAS is first used
# before the simulated device is loaded, which would hide it
IS_REAL = torch.accelerator.is_available()

if not IS_REAL and Path(__file__).parent.parent.joinpath("accelerator").is_dir():
    from accelerator.fixture import sim

    __all__ = ["sim"]

    @pytest.fixture
    def accelerator(sim: ModuleType) -> torch.device:
        torch.ones(8).pin_memory()  # is_pinned answers from then on
        return torch.device("sim", 0)

else:

    @pytest.fixture(scope="session")
    def accelerator(warmed_up: None) -> torch.device:
        """The device, in use: its context, threads, files and workspaces stay, and no test is to be
        blamed for them."""
        found = torch.accelerator.current_accelerator(check_available=True)
        if found is None:
            pytest.skip(
                "needs an accelerator, and tests/accelerator, the simulated one, is not there"
            )
        a = torch.ones(64, 64, dtype=torch.bfloat16, device=found, requires_grad=True)
        with torch.Stream(found):
            a.detach().clone()
        (a @ a).float().sum().backward()
        torch.ones(8).pin_memory().to(found, non_blocking=True).sum().item()
        return torch.device(found.type, 0)


@pytest.fixture(autouse=True)
def deterministic() -> Iterator[None]:
    """New memory is filled with NaN, too: it is part of what torch calls deterministic."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.fixture
def device_module(accelerator: torch.device) -> ModuleType:
    """The device's own module, such as torch.cuda."""
    module = importlib.import_module(torch.get_device_module(accelerator).__name__)
    assert isinstance(module, ModuleType)
    return module
