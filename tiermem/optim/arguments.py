"""Arguments: what a parameter group may hold, said with what was given, what is allowed and what to change."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tiermem.optim.rules import Group

IMPLEMENTATION: Mapping[str, tuple[Any, str]] = {
    "foreach": (None, "there is one implementation here, a native pass over every parameter; leave it out"),
    "fused": (None, "there is one implementation here, and it is fused; leave it out"),
    "capturable": (False, "steps run on the CPU, where there is no CUDA graph to capture them; leave it out"),
    "differentiable": (
        False,
        "a native step leaves no graph behind; use torch's own optimizer to differentiate through it",
    ),
}
"""torch's options about how it computes: what asks for nothing, and why anything else is refused."""


def check_range(name: str, value: float, low: float, high: float, is_open: bool = False) -> None:
    """Raises ValueError unless low <= value <= high (< high when open); NaN is never in range."""
    if not low <= value <= high or (is_open and value == high):
        raise ValueError(f"{name} is {value}; allowed are {low} to {high}" + (" (excluded)" if is_open else ""))


def check_betas(betas: tuple[float, float]) -> None:
    """Raises ValueError unless both decay rates are in [0, 1)."""
    for i, beta in enumerate(betas):
        check_range(f"betas[{i}]", beta, 0.0, 1.0, is_open=True)


def check_implementation(group: Group) -> None:
    """Raises ValueError when a group asks torch to compute in a certain way."""
    for name, (nothing, why) in IMPLEMENTATION.items():
        if group.get(name, nothing) not in (nothing, False):
            raise ValueError(f"{name}={group[name]} asks for something that does not exist here: {why}")
