"""GpuLink: what registering host memory with a device's driver costs, and how fast its link and its
own memory are.

    registration   fresh memory (its pages come with the registration) and touched memory, in huge pages where there are any
    copies         pinned memory, as the arena carves it, and pageable memory; to the device, to the host, both at once
    memory         an AdamW step of bf16 weights with fp32 states, by the bytes that its torch operations move
    beside copies  host memory, by work of the CPU and copies both ways that go on together

One Python thread issues the copies, as in training, so that small ones show what issuing costs. A
tool: it waits for streams.
"""

from __future__ import annotations

import contextlib
import mmap
import statistics
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from tiermem.forecast.loads import torch_traffic
from tiermem.precision import PRESETS, Precision
from tiermem.swap.base.parts import StepParts, StepRule
from tiermem.swap.base.ranges import ByteRange, round_up
from tiermem.swap.kernels.device_kernels import kernels_of
from tiermem.swap.kernels.torch_step import step_in_torch
from tiermem.swap.memory.accelerator import (
    PageLock,
    free_and_total,
    is_accelerator,
    new_stream,
    on,
    record,
)
from tiermem.swap.memory.arena import HUGE_BYTES, PAGE_BYTES, Arena
from tiermem.tools.measure.machine import available_bytes
from tiermem.tools.words import format_bytes
from tiermem.units.state_layout import StateLayout

_COPY_SIZES = tuple(1 << shift for shift in range(16, 30, 2))  # 64 KiB to 256 MiB
DIRECTIONS = ("to device", "to host", "both")
# parameters
_STEPPED = 1 << 23
_LEAST_STEPPED = 1 << 16
_STEPPED_BYTES = 128  # for each: what is stepped, and what its operations take
_COPIES_AHEAD = 4  # each way: the link is busy while the CPU works


Copy = tuple[torch.Stream, torch.Tensor, torch.Tensor]
"""(stream, to, from)"""


def measure_registration(device: torch.device, sizes: Sequence[int]) -> list[dict[str, Any]]:
    """Registers fresh and touched memory of each size, those too large for this machine left out.
    Blocks."""
    most = available_bytes() // 2
    rows = [
        _registration(device, size, touched)
        for size in sizes
        if size <= most
        for touched in (False, True)
    ]
    left_out = f"{format_bytes(2 * most)} are free"
    return rows + [{"num_bytes": size, "left_out": left_out} for size in sizes if size > most]


def measure_copies(device: torch.device, most: int, least_s: float) -> list[dict[str, Any]]:
    """Copies each size up to `most` bytes for `least_s` seconds or more, each way. Blocks; takes
    four times `most` of memory.

    A rate is in bytes per second; of both directions it is the sum.
    """
    sizes = [size for size in _COPY_SIZES if size <= most]
    if not sizes:
        raise ValueError(
            f"--most is {most} bytes; the smallest copy is {format_bytes(_COPY_SIZES[0])}"
        )
    streams = new_stream(device), new_stream(device)
    rates = []
    with _pinned(device, sizes[-1]) as (pinned, is_pinned):
        pageable = [torch.ones(sizes[-1], dtype=torch.uint8) for _ in range(2)]
        there = [torch.ones(sizes[-1], dtype=torch.uint8, device=device) for _ in range(2)]
        torch.accelerator.synchronize(device)
        for size in sizes:
            for here, is_fast in ((pinned, is_pinned), (pageable, False)):
                up = streams[0], there[0][:size], here[0][:size]
                down = streams[1], here[1][:size], there[1][:size]
                for direction, copies in zip(DIRECTIONS, ([up], [down], [up, down]), strict=True):
                    rate = _rate(copies, size, least_s)
                    rates.append(
                        {
                            "num_bytes": size,
                            "direction": direction,
                            "is_pinned": is_fast,
                            "bytes_s": rate,
                        }
                    )
    return rates


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
    with _pinned(device, num_bytes) as (here, _):
        there = [torch.ones(num_bytes, dtype=torch.uint8, device=device) for _ in range(2)]
        torch.accelerator.synchronize(device)
        copies = [(new_stream(device), there[0], here[0]), (new_stream(device), here[1], there[1])]
        return _rate(copies, num_bytes, least_s) / 2


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
    down = new_stream(device)
    up = new_stream(device)
    under_way = deque[torch.Event]()
    with _pinned(device, num_bytes) as (here, _):
        there = [torch.ones(num_bytes, dtype=torch.uint8, device=device) for _ in range(2)]
        torch.accelerator.synchronize(device)

        def copy() -> None:
            for stream, to, source in ((down, there[0], here[0]), (up, here[1], there[1])):
                with on(stream):
                    to.copy_(source, non_blocking=True)
            up.wait_stream(down)
            under_way.append(record(up))

        start = time.monotonic()
        moved = 0
        while (elapsed := time.monotonic() - start) < least_s or not moved:
            while len(under_way) < _COPIES_AHEAD:
                copy()
            work()
            moved += work_bytes
            while under_way and under_way[0].query():
                under_way.popleft()
                moved += 2 * num_bytes
        torch.accelerator.synchronize(device)
    return moved / elapsed


def _registration(device: torch.device, num_bytes: int, is_touched: bool) -> dict[str, Any]:
    """Seconds to register and to give back a piece of host memory; medians of three."""
    times = []
    is_pinned = True
    for _ in range(3):
        memory = mmap.mmap(-1, num_bytes + HUGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        with contextlib.suppress(OSError):  # a kernel without huge pages
            memory.madvise(mmap.MADV_HUGEPAGE)
        whole = torch.frombuffer(memory, dtype=torch.uint8)
        start = round_up(whole.data_ptr(), HUGE_BYTES) - whole.data_ptr()
        piece = whole[start : start + num_bytes]
        if is_touched:
            piece.fill_(1)
        begin = time.monotonic()
        lock = PageLock(device, [ByteRange(piece.data_ptr(), num_bytes)])
        middle = time.monotonic()
        is_pinned = is_pinned and lock.num_bytes == num_bytes
        lock.close()
        times.append((middle - begin, time.monotonic() - middle))
        del whole, piece
        memory.close()
    register_s, unregister_s = (statistics.median(column) for column in zip(*times, strict=True))
    return {
        "num_bytes": num_bytes,
        "is_touched": is_touched,
        "is_pinned": is_pinned,
        "register_s": register_s,
        "unregister_s": unregister_s,
        "s_per_gib": register_s * (1 << 30) / num_bytes,
    }


@contextlib.contextmanager
def _pinned(device: torch.device, num_bytes: int) -> Iterator[tuple[list[torch.Tensor], bool]]:
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


def _rate(copies: Sequence[Copy], num_bytes: int, least_s: float) -> float:
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
            for stream, to, source in copies:
                with on(stream):
                    to.copy_(source, non_blocking=True)
    for stream, _, _ in copies:
        stream.synchronize()
    return time.monotonic() - start
