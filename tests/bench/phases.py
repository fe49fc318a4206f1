"""Phases: a step of a training in three parts, each timed by a clock that may wait for the
device."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable

import torch

from tiermem.swap.memory.accelerator import is_accelerator
from tiermem.tools.record.run_record import PHASES


def timed(
    clock: Callable[[], float], forward: Callable[[], torch.Tensor], *step: Callable[[], object]
) -> tuple[torch.Tensor, dict[str, float]]:
    """Makes one step; returns the loss that `forward` made, and the seconds of each of PHASES by a
    clock."""
    marks = [clock()]
    loss = forward()
    marks.append(clock())
    loss.backward()
    marks.append(clock())
    for each in step:
        each()
    marks.append(clock())
    return loss, dict(
        zip(PHASES, (end - start for start, end in itertools.pairwise(marks)), strict=True)
    )


def clock_of(device: torch.device) -> Callable[[], float]:
    """A clock in seconds that waits until a device has done what was asked of it; for `timed`."""

    def clock() -> float:
        if is_accelerator(device):
            torch.accelerator.synchronize(device)
        return time.monotonic()

    return clock
