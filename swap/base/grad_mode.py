"""Grad mode: calls with autograd on or off, after which it is as it was, whatever interrupts them.

An interrupt in the middle of `torch.no_grad.__enter__`, or right before `__exit__` does its work,
leaves autograd off for good: the next loss has no grad_fn. Python looks for signals when a call of
C code returns and when a Python function begins, so a `finally` whose first call is C code is never
left before that call.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch

P = ParamSpec("P")
R = TypeVar("R")


def call_with_grad(
    is_enabled: bool, function: Callable[P, R], *args: P.args, **kwargs: P.kwargs
) -> R:
    """Calls a function with autograd on or off."""
    before = torch.is_grad_enabled()
    try:
        torch._C._set_grad_enabled(is_enabled)
        return function(*args, **kwargs)
    finally:
        torch._C._set_grad_enabled(before)


def without_grad(function: Callable[P, R]) -> Callable[P, R]:
    """A function that is always called with autograd off."""

    @functools.wraps(function)
    def called(*args: P.args, **kwargs: P.kwargs) -> R:
        return call_with_grad(False, function, *args, **kwargs)

    return called
