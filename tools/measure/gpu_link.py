"""GpuLink: how fast an accelerator's link and its own memory are.

    link           pinned memory, as the arena carves it, copied both ways at once
    memory         an AdamW step of bf16 weights with fp32 states, by the bytes that its torch operations move
    beside copies  host memory, by work of the CPU and copies both ways that go on together

One Python thread issues the copies, as in training, so that small ones show what issuing costs. A
tool: it waits for streams.
"""

from __future__ import annotations

import contextlib
import statistics
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence

import torch

from tiermem.forecast.loads import torch_traffic
from tiermem.precision import PRESETS, Precision
from tiermem.swap.base.parts import StepParts, StepRule
from tiermem.swap.base.ranges import round_up
from tiermem.swap.kernels.device_kernels import kernels_of
from tiermem.swap.kernels.torch_step import step_in_torch
from tiermem.swap.memory.accelerator import (
    free_and_total,
    is_accelerator,
    new_stream,
    on,
    record,
)
from tiermem.swap.memory.arena import PAGE_BYTES, Arena
from tiermem.units.state_layout import StateLayout

# parameters
_STEPPED = 1 << 23
_LEAST_STEPPED = 1 << 16
_STEPPED_BYTES = 128  # for each: what is stepped, and what its operations take
_COPIES_AHEAD = 4  # each way: the link is busy while the CPU works


Copy = tuple[torch.Stream, torch.Tensor, torch.Tensor]
"""(stream, to, from)"""


def measure_link(
    device: torch.device, num_bytes: int = 16 << 20, least_s: float = 0.05
) -> float | None:
    """Bytes per second each way of an accelerator's link, while pinned memory is copied both ways
    at once, as training does.

    None for the CPU. Blocks for about `least_s` seconds or more; takes `num_bytes` of memory twice
    on either side.
    """
    if not is_accelerator(device):
        return None
    with _both_ways(device, num_bytes) as copies:
        return copy_rate(copies, num_bytes, least_s) / 2


# An H200, whose memory moves 4.8 TB/s, takes 0.0084, 0.0066 and 0.0065 ns for an element's step by
# the Triton kernel (docs/gpu.md). Its 28, 18 and 14 bytes pass in less. The rest of the time is
# counted as further passes.
_EXACT_BYTES = 28
_KERNEL_PASSES = {
    PRESETS["exact"]: 0.0084e-9 * 4.8e12 / _EXACT_BYTES,
    PRESETS["compact"]: 0.0066e-9 * 4.8e12 / 18,
    PRESETS["tiny"]: 0.0065e-9 * 4.8e12 / 14,
}


def kernel_passes(states: Precision) -> float:
    """`Rates.step_passes` of a card whose steps a Triton kernel makes; of formats that were not
    timed, those of compact."""
    return _KERNEL_PASSES.get(states, _KERNEL_PASSES[PRESETS["compact"]])


def measure_memory(device: torch.device) -> float | None:
    """Bytes per second of an accelerator's memory in an optimizer step there. None: the CPU, or no
    room for a small step.

    Blocks for some milliseconds. Takes up to 1 GiB of the device.
    """
    numel = (
        min(_STEPPED, free_and_total(device)[0] // _STEPPED_BYTES) if is_accelerator(device) else 0
    )
    if numel < _LEAST_STEPPED:
        return None
    weight = torch.zeros(numel, dtype=torch.bfloat16, device=device)
    master, *moments = (torch.zeros(numel, device=device) for _ in range(3))
    parts = StepParts(weight, master, torch.full_like(weight, 1e-3), moments)
    times = []
    step = kernels_of(device).step
    for _ in range(5):
        start = time.monotonic()
        step(StepRule("adamw", 1e-3, 1.0, beta1=0.9, beta2=0.999, eps=1e-8), parts)
        torch.accelerator.synchronize(device)
        times.append(time.monotonic() - start)
    if step is step_in_torch:
        moved = numel * torch_traffic(StateLayout(weight.dtype, Precision(), 2), weight.dtype)
    else:
        moved = numel * _EXACT_BYTES * kernel_passes(Precision())
    return moved / statistics.median(times[1:])


def step_passes(device: torch.device, states: Precision) -> float | None:
    """`Rates.step_passes` of a device and a precision of states; None where no Triton kernel steps
    there."""
    is_stepped_so = is_accelerator(device) and kernels_of(device).step is not step_in_torch
    return kernel_passes(states) if is_stepped_so else None


def measure_beside_copies(
    device: torch.device,
    work: Callable[[], object],
    work_bytes: int,
    num_bytes: int,
    least_s: float = 0.1,
) -> float:
    """Bytes per second of host memory while work of the CPU goes on and pinned memory is copied
    both ways: those of both.

    Blocks for `least_s` seconds or more. Takes `num_bytes` of memory twice on either side, or half
    of what the device has left.

    Args:
        work: blocks; called again and again. `work_bytes` is what it reads and writes.
    """
    num_bytes = min(num_bytes, free_and_total(device)[0] // 4)
    under_way = deque[torch.Event]()
    with _both_ways(device, num_bytes) as copies:
        (down, *_), (up, *_) = copies
        start = time.monotonic()
        moved = 0
        while (elapsed := time.monotonic() - start) < least_s or not moved:
            while len(under_way) < _COPIES_AHEAD:
                _issue(copies)
                up.wait_stream(down)
                under_way.append(record(up))
            work()
            moved += work_bytes
            while under_way and under_way[0].query():
                under_way.popleft()
                moved += 2 * num_bytes
    return moved / elapsed


@contextlib.contextmanager
def _both_ways(device: torch.device, num_bytes: int) -> Iterator[Sequence[Copy]]:
    """A copy of pinned memory to the accelerator and one from it, each with a stream of its own.
    Waits for the device at the end."""
    with pinned_slots(device, num_bytes) as (here, _):
        there = [torch.ones(num_bytes, dtype=torch.uint8, device=device) for _ in range(2)]
        torch.accelerator.synchronize(device)
        yield (new_stream(device), there[0], here[0]), (new_stream(device), here[1], there[1])


@contextlib.contextmanager
def pinned_slots(device: torch.device, num_bytes: int) -> Iterator[tuple[list[torch.Tensor], bool]]:
    """Two slots of a link slab, and whether the driver took them."""
    total = 2 * round_up(max(num_bytes, 1), PAGE_BYTES)
    arena = Arena(total, link_bytes=total)
    try:
        slots = [
            arena.take(num_bytes, "a slot to copy from", crosses_link=True).tensor for _ in range(2)
        ]
        for slot in slots:
            slot.fill_(1)
        arena.pin(device)
        yield slots, arena.is_pinned
        torch.accelerator.synchronize(device)
    finally:
        arena.close()


def copy_rate(copies: Sequence[Copy], num_bytes: int, least_s: float) -> float:
    """Bytes per second of copies issued in turn."""
    _time_copies(copies, 1)
    count = 1
    while (seconds := _time_copies(copies, count)) < least_s:
        count = max(2 * count, min(100 * count, int(1.2 * count * least_s / max(seconds, 1e-7))))
    return count * len(copies) * num_bytes / seconds


def _time_copies(copies: Sequence[Copy], count: int) -> float:
    start = time.monotonic()
    if len(copies) == 1:
        ((stream, to, source),) = copies
        with on(stream):
            for _ in range(count):
                to.copy_(source, non_blocking=True)
    else:
        for _ in range(count):
            _issue(copies)
    for stream, _, _ in copies:
        stream.synchronize()
    return time.monotonic() - start


def _issue(copies: Sequence[Copy]) -> None:
    for stream, to, source in copies:
        with on(stream):
            to.copy_(source, non_blocking=True)
