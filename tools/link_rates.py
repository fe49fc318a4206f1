"""LinkRates: what host memory costs to register with an accelerator's driver, and how fast copies over the link are.

    registration   fresh memory (its pages come with the registration) and touched memory, in huge pages where there are any
    copies         pinned memory, as the arena carves it, and pageable memory; to the device, to the host, both at once

One Python thread issues the copies, as in training, so that small ones show what issuing costs. A tool: it waits for streams.
"""

from __future__ import annotations

import contextlib
import mmap
import statistics
import time
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch

from tiermem.swap.accelerator import PageLock, new_stream, on
from tiermem.swap.arena import HUGE_BYTES, Arena
from tiermem.swap.extents import round_up

_NUM_LOOPS = 3
DIRECTIONS = ("to device", "to host", "both")


class Registration(NamedTuple):
    """What it took to register a piece of host memory; medians of three."""

    num_bytes: int
    is_touched: bool
    is_pinned: bool
    register_s: float
    unregister_s: float

    @property
    def s_per_gib(self) -> float:
        """Seconds of registering one GiB."""
        return self.register_s * (1 << 30) / self.num_bytes


class CopyRate(NamedTuple):
    """Bytes per second of copies of one size; of both directions the sum."""

    num_bytes: int
    direction: str
    is_pinned: bool
    bytes_s: float


def measure_registration(device: torch.device, sizes: Sequence[int]) -> list[Registration]:
    """Registers fresh and touched memory of each size. Blocks; takes the largest size of memory."""
    return [_registration(device, size, is_touched) for size in sizes for is_touched in (False, True)]


def measure_copies(device: torch.device, sizes: Sequence[int], least_s: float) -> list[CopyRate]:
    """Copies each size for `least_s` seconds or more, each way. Blocks; takes four times the largest size of memory."""
    most = max(sizes)
    streams = new_stream(device), new_stream(device)
    rates = []
    with _pinned(device, most) as (pinned, is_pinned):
        pageable = [torch.ones(most, dtype=torch.uint8) for _ in range(2)]
        there = [torch.ones(most, dtype=torch.uint8, device=device) for _ in range(2)]
        torch.accelerator.synchronize(device)
        for size in sizes:
            for here, is_fast in ((pinned, is_pinned), (pageable, False)):
                up = streams[0], there[0][:size], here[0][:size]
                down = streams[1], here[1][:size], there[1][:size]
                for direction, copies in zip(DIRECTIONS, ([up], [down], [up, down]), strict=True):
                    rates.append(CopyRate(size, direction, is_fast, _rate(copies, size, least_s)))
    return rates


def _registration(device: torch.device, num_bytes: int, is_touched: bool) -> Registration:
    times, is_pinned = [], True
    for _ in range(_NUM_LOOPS):
        memory = mmap.mmap(-1, num_bytes + HUGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        with contextlib.suppress(OSError):  # a kernel without huge pages
            memory.madvise(mmap.MADV_HUGEPAGE)
        whole = torch.frombuffer(memory, dtype=torch.uint8)
        start = round_up(whole.data_ptr(), HUGE_BYTES) - whole.data_ptr()
        piece = whole[start : start + num_bytes]
        if is_touched:
            piece.fill_(1)
        begin = time.monotonic()
        lock = PageLock(device, [(piece.data_ptr(), num_bytes)])
        middle = time.monotonic()
        is_pinned = is_pinned and lock.num_bytes == num_bytes
        lock.close()
        times.append((middle - begin, time.monotonic() - middle))
        del whole, piece
        memory.close()
    register_s, unregister_s = (statistics.median(column) for column in zip(*times, strict=True))
    return Registration(num_bytes, is_touched, is_pinned, register_s, unregister_s)


@contextlib.contextmanager
def _pinned(device: torch.device, num_bytes: int) -> Iterator[tuple[list[torch.Tensor], bool]]:
    """Two slots of a link slab, and whether the driver took them."""
    arena = Arena(2 * num_bytes, link_bytes=2 * num_bytes)
    try:
        slots = [arena.take(num_bytes, "a slot to copy from", crosses_link=True).tensor for _ in range(2)]
        for slot in slots:
            slot.fill_(1)
        arena.pin(device)
        yield slots, arena.is_pinned
        torch.accelerator.synchronize(device)
    finally:
        arena.close()


def _rate(copies: Sequence[tuple[torch.Stream, torch.Tensor, torch.Tensor]], num_bytes: int, least_s: float) -> float:
    """Bytes per second of copies (stream, to, from), issued in turn."""
    _time_copies(copies, 1)
    count = 1
    while (seconds := _time_copies(copies, count)) < least_s:
        count = max(2 * count, min(100 * count, int(1.2 * count * least_s / max(seconds, 1e-7))))
    return count * len(copies) * num_bytes / seconds


def _time_copies(copies: Sequence[tuple[torch.Stream, torch.Tensor, torch.Tensor]], count: int) -> float:
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
