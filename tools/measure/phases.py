"""Phases: the parts of a step, timed."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator

import torch

from tiermem.swap.memory.accelerator import is_accelerator


@contextlib.contextmanager
def timed(device: torch.device, seconds: dict[str, float], name: str) -> Iterator[None]:
    """Adds the seconds of a block to those of a name. Waits for the device."""
    started = time.monotonic()
    yield
    # a phase's time is its own; a tool may wait for the device
    if is_accelerator(device):
        torch.accelerator.synchronize(device)
    seconds[name] += time.monotonic() - started
