"""On a GPU: do its kernels step states and add squares to the bits of the CPU, and wait for
nothing?"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator

import pytest
import torch
from test_torch_step import (
    BF16,
    F16,
    F32,
    MASTERS,
    MOMENT_DTYPES,
    RULES,
    copy_of,
    is_same,
    parts_of,
    tensors_of,
)

from tiermem.swap.base.native import NORM_BLOCK, Workers, optimizer_step
from tiermem.swap.base.parts import Dither
from tiermem.swap.kernels.torch_step import block_sums_in_torch, step_in_torch
from tiermem.swap.memory.accelerator import runs_triton

pytestmark = pytest.mark.gpu

_EVERY = 7
"""Of the variants of the Triton kernel: each takes a second to compile."""


@pytest.fixture
def device(accelerator: torch.device) -> torch.device:
    if accelerator.type == "sim":
        pytest.skip("the simulated device runs the CPU's kernels")
    return accelerator


@pytest.fixture
def without_waits(device: torch.device) -> Iterator[Callable[[str], None]]:
    """Called with "error", what waits for CUDA raises from then on."""
    set_debug_mode = getattr(
        torch.get_device_module(device), "set_sync_debug_mode", lambda mode: None
    )
    yield set_debug_mode
    set_debug_mode("default")


@pytest.mark.parametrize("form", ["torch", "triton"])
@pytest.mark.parametrize("name", RULES)
def test_a_step_gives_the_bits_of_the_cpu(
    name: str,
    form: str,
    device: torch.device,
    workers: Workers,
    without_waits: Callable[[str], None],
) -> None:
    """By the kernel itself, which is not tried before."""
    step_there, every = step_in_torch, 1
    if form == "triton":
        if not runs_triton(device):
            pytest.skip(f"torch operations step {device.type}")
        step_there, every = pytest.importorskip("tiermem.swap.kernels.triton_step").launch, _EVERY
    rule, num_moments = RULES[name]
    kinds = MOMENT_DTYPES if num_moments else MOMENT_DTYPES[:1]
    combinations = list(itertools.product(MASTERS, kinds, (False, True)))
    for (weight, master), moments, is_stochastic in combinations[::every]:
        parts = parts_of(rule, workers, 5003, weight, master, moments[:num_moments], BF16)
        there, dither = (
            copy_of(parts, str(device)),
            Dither(1, 2, 2**32 - 1024) if is_stochastic else None,
        )
        for step in range(3):
            optimizer_step(workers, rule, parts, dither, start_moments=step == 1)
            without_waits("error")
            step_there(rule, there, dither, start_moments=step == 1)
            without_waits("default")
            for seen, wanted in zip(tensors_of(there), tensors_of(parts), strict=True):
                assert is_same(seen.cpu(), wanted)


@pytest.mark.parametrize("form", ["torch", "triton"])
@pytest.mark.parametrize("dtype", [F32, BF16, F16])
def test_sums_of_squares_have_the_bits_of_the_cpu(
    dtype: torch.dtype, form: str, device: torch.device, without_waits: Callable[[str], None]
) -> None:
    """Where ranges begin and end in a block, and where one element is not finite."""
    sums_there = block_sums_in_torch
    if form == "triton":
        if not runs_triton(device):
            pytest.skip(f"torch operations add squares on {device.type}")
        sums_there = pytest.importorskip("tiermem.swap.kernels.triton_sums").launch
    for first, numel in itertools.product(
        (0, 5, NORM_BLOCK - 1, 3 * NORM_BLOCK), (1, 5003, NORM_BLOCK, 5_000_000)
    ):
        grad = torch.randn(numel, generator=torch.Generator().manual_seed(numel)).to(dtype)
        for broken in (None, 0, numel - 1):
            if broken is not None:
                grad[broken] = float("inf" if broken else "nan")
            there = grad.to(device)
            without_waits("error")
            sums = sums_there(there, first)
            without_waits("default")
            torch.testing.assert_close(
                sums.cpu(), block_sums_in_torch(grad, first), rtol=0, atol=0, equal_nan=True
            )
