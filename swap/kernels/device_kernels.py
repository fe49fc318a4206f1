"""DeviceKernels: what steps states and adds squares on a device that is not the CPU.

A Triton kernel where triton is installed and the device is exact (`runs_triton`), else torch
operations, to the same bits.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple

import torch

from tiermem.swap.kernels.torch_step import block_sums_in_torch, step_in_torch
from tiermem.swap.memory.accelerator import runs_triton


class DeviceKernels(NamedTuple):
    """The kernels of a device; each queues its work on the current stream."""

    step: Callable[..., None] = step_in_torch
    block_sums: Callable[[torch.Tensor, int], torch.Tensor] = block_sums_in_torch


def kernels_of(device: torch.device) -> DeviceKernels:
    """The kernels that serve a device."""
    return _in_triton() if runs_triton(device) else DeviceKernels()


@functools.cache
def _in_triton() -> DeviceKernels:
    try:
        from tiermem.swap.kernels.triton_step import step_in_triton
        from tiermem.swap.kernels.triton_sums import block_sums_in_triton
    except ImportError:  # triton is not installed
        return DeviceKernels()
    return DeviceKernels(step_in_triton, block_sums_in_triton)
