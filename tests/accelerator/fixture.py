"""The fixture `sim`: the simulated device, plugged in for one test, with nothing left of the test
before.

A conftest or test module imports it (`from accelerator.fixture import sim`). The import loads the
device type, because autograd makes its threads per device at the process's first backward. Until a
test asks for the fixture the device is not plugged in: torch.accelerator.is_available() is False,
as on a machine without one.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from types import ModuleType

import pytest

from accelerator import build, device

WHY_SKIPPED = build.missing_for_build()
if WHY_SKIPPED is None:
    device.load()
    device.unplug()


@pytest.fixture
def sim() -> Iterator[ModuleType]:
    """torch.sim, plugged in, at once. What the test changes of schedule, capacity and limits ends
    with it."""
    if WHY_SKIPPED is not None:
        pytest.skip(WHY_SKIPPED)
    device.plug()
    device.reset()
    try:
        yield device
    finally:
        if device.is_initialized() and any(
            map(device.memory_allocated, range(device.device_count()))
        ):
            # slow, so only where tensors are left, which a circle or a traceback may hold
            gc.collect()
        device.reset()
        device.unplug()
