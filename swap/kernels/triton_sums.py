"""Sums of squares of a gradient as one Triton kernel: those of `block_sums_in_torch`, to the bit,
in one pass over memory.

    a norm block, 64 rows --(6 times two halves are added)--> 1024 columns --(10 times)--> its sum

Torch operations make the same sums in some twenty passes, each a launch for every 2 Mi elements,
which costs a fast device more than the backward that it follows. A square of an fp32 number is
exact in float64, so bits depend on the order of the additions alone. Each dtype is tried when a
process first uses it on a device, as in triton_step.py; like it, this module imports triton.
"""

from __future__ import annotations

import functools
import logging

import torch
import triton
import triton.language as tl

from tiermem.swap.base.native import NORM_BLOCK
from tiermem.swap.kernels.torch_step import block_sums_in_torch
from tiermem.swap.kernels.triton_step import float_of, pointer_to

_logger = logging.getLogger("tiermem")

_ROWS = tl.constexpr(64)
_COLUMNS = tl.constexpr(NORM_BLOCK // 64)

_TRIED = ((2 * NORM_BLOCK, 0), (NORM_BLOCK + 1003, 5), (77, NORM_BLOCK - 16))
"""Elements, and the place of the first: whole blocks, then ranges that cut the first and the
last."""


def block_sums_in_triton(grad: torch.Tensor, first: int) -> torch.Tensor:
    """The sums of `block_sums_in_torch`, queued on the current stream.

    Waits for the device when a dtype is first used there, then no more.
    """
    return (launch if _is_exact(grad.device, grad.dtype) else block_sums_in_torch)(grad, first)


def launch(grad: torch.Tensor, first: int) -> torch.Tensor:
    """Queues the kernel. Raises what Triton raises where it cannot compile or start it."""
    numel = grad.numel()
    before = first % NORM_BLOCK
    sums = torch.empty(
        triton.cdiv(before + numel, NORM_BLOCK) if numel else 0,
        dtype=torch.float64,
        device=grad.device,
    )
    if numel:
        with torch.accelerator.device_index(grad.device.index):
            _sum[(sums.numel(),)](
                pointer_to(grad), sums, numel, before, enable_fp_fusion=False, num_warps=8
            )
    return sums


@functools.cache
def _is_exact(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether the kernel runs on the device and gives the bits of torch operations. Waits for the
    device."""
    generator = torch.Generator().manual_seed(1)
    try:
        for numel, first in _TRIED:
            values = torch.randn(numel, generator=generator) * torch.exp2(
                torch.randn(numel, generator=generator) * 4
            )
            grad = values.to(dtype).to(device)
            if not torch.equal(launch(grad, first), block_sums_in_torch(grad, first)):
                raise ArithmeticError("its bits differ from those of torch operations")
    except Exception as error:  # as in triton_step.py
        fault = f"{type(error).__name__}: {error}"
        _logger.warning(
            "Triton cannot add squares of %s on %s; torch operations do: %s", dtype, device, fault
        )
        return False
    return True


# ---- the kernel ----------------------------------------------------------------------------------
#
# A program adds up one norm block, a matrix of ROWS x COLUMNS elements. Halves are added first, as
# in `block_sums_in_torch`: row r and row r + 32, then what these give for r and r + 16. `_halved`
# asks for that from its end, so that few rows are held.


@triton.jit
def _sum(grad: tl.tensor, sums: tl.tensor, numel: tl.tensor, before: tl.tensor) -> None:
    block = tl.program_id(0).to(tl.int64)
    total = _halved(grad, block * (_ROWS * _COLUMNS) - before, numel, 0, 1)
    for _ in tl.static_range(10):
        lower, upper = tl.split(tl.permute(tl.reshape(total, [2, total.shape[0] // 2]), [1, 0]))
        total = lower + upper
    tl.store(sums + block + tl.arange(0, 1), total)


@triton.jit
def _halved(
    grad: tl.tensor,
    start: tl.tensor,
    numel: tl.tensor,
    row: tl.constexpr,
    step: tl.constexpr,
) -> tl.tensor:
    """The sum of every `step`-th row from `row` on. A compiler makes one function of each step."""
    if step == _ROWS:
        total = _squares(grad, start, numel, row)
    else:
        near = _halved(grad, start, numel, row, 2 * step)
        total = near + _halved(grad, start, numel, row + step, 2 * step)
    return total


@triton.jit
def _squares(grad: tl.tensor, start: tl.tensor, numel: tl.tensor, row: tl.constexpr) -> tl.tensor:
    at = start + row * _COLUMNS + tl.arange(0, _COLUMNS)
    stored = tl.load(grad + at, (at >= 0) & (at < numel), 0)
    if stored.dtype == tl.int16:
        stored = float_of(stored.to(tl.int32) << 16)
    wide = stored.to(tl.float64)
    return wide * wide
