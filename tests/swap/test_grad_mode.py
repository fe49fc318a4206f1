"""Is autograd as it was, whatever interrupts a call that turns it on or off?"""

from __future__ import annotations

import signal
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

pytest.importorskip("_tiermem_native")

import tiermem
from tiermem.swap.base.grad_mode import call_with_grad, without_grad


@pytest.fixture
def interrupted(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """interrupted(n): Ctrl-C arrives while torch turns autograd on or off for the nth time."""
    set_mode = torch._C._set_grad_enabled

    def make(number: int) -> None:
        left = [number]

        def set_and_stop(is_enabled: bool) -> None:
            set_mode(is_enabled)
            left[0] -= 1
            if left[0] == 0:
                signal.raise_signal(signal.SIGINT)

        monkeypatch.setattr(torch._C, "_set_grad_enabled", set_and_stop)

    return make


def test_autograd_is_off_inside_and_as_before_afterwards() -> None:
    seen: list[bool] = []
    without_grad(lambda: seen.append(torch.is_grad_enabled()))()
    assert call_with_grad(True, torch.is_grad_enabled) and torch.is_grad_enabled()
    with torch.no_grad():
        assert call_with_grad(True, torch.is_grad_enabled) and not torch.is_grad_enabled()
    with pytest.raises(KeyError):
        call_with_grad(False, {}.__getitem__, "absent")
    assert seen == [False] and torch.is_grad_enabled()


@pytest.mark.parametrize("number", [1, 2])
def test_a_step_that_ctrl_c_stops_leaves_autograd_on(
    number: int, interrupted: Callable[[int], None]
) -> None:
    """While the step turns it off, and while it turns it on again."""
    model = nn.Linear(3, 3)
    optim: Any = tiermem.AdamW(model.parameters(), lr=0.1)
    model(torch.ones(1, 3)).sum().backward()
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        interrupted(number)
        with pytest.raises(KeyboardInterrupt):
            optim.step()
    finally:
        signal.signal(signal.SIGINT, before)
    assert torch.is_grad_enabled()
    model(torch.ones(1, 3)).sum().backward()
