"""Do threads that wait for the device sleep, on events of the class that its own module has?"""

from __future__ import annotations

from types import ModuleType
from typing import Any

import pytest
import torch

from accelerator.fixture import sim
from tiermem.swap.memory import accelerator

__all__ = ["sim"]
SIM = torch.device("sim", 0)


def test_events_are_of_the_devices_own_class_and_let_threads_sleep(sim: ModuleType) -> None:
    for event in (accelerator.new_event(SIM), accelerator.record(accelerator.current_stream(SIM))):
        assert isinstance(event, sim.Event) and event.blocking


def test_cudas_event_is_asked_to_sleep() -> None:
    assert accelerator._words_for_sleep(torch.cuda.Event) == {"blocking": True}


def test_a_device_whose_events_know_no_sleep_gets_its_own_class(
    sim: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    def make(enable_timing: bool = False) -> Any:
        return torch.Event("sim", enable_timing=enable_timing)

    monkeypatch.setattr(sim, "Event", make)
    assert type(accelerator.new_event(SIM)) is torch.Event


def test_streams_are_of_the_devices_own_class(
    sim: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch.Stream would not wait for an event of the device module's class."""
    made = []
    monkeypatch.setattr(sim, "Stream", lambda device=None, priority=0: made.append(device))
    monkeypatch.setattr(sim, "current_stream", lambda device=None: made.append(device))
    accelerator.new_stream(SIM)
    accelerator.current_stream(SIM)
    assert made == [SIM, SIM]
