"""Link: what registering host memory with a device's driver costs, and the rates of copies over its
link.

    registration   fresh memory (its pages come with the registration) and touched memory, in huge pages where there are any
    copies         pinned memory, as the arena carves it, and pageable memory; to the device, to the host, both at once
"""

from __future__ import annotations

import contextlib
import mmap
import statistics
import time
from collections.abc import Sequence
from typing import Any

import torch

from tiermem.swap.base.ranges import ByteRange, round_up
from tiermem.swap.memory.accelerator import PageLock, new_stream
from tiermem.swap.memory.arena import HUGE_BYTES
from tiermem.swap.memory.free import free_host_bytes
from tiermem.tools.measure.gpu_link import copy_rate, pinned_slots
from tiermem.tools.words import format_bytes

_COPY_SIZES = tuple(1 << shift for shift in range(16, 30, 2))  # 64 KiB to 256 MiB
DIRECTIONS = ("to device", "to host", "both")


def measure_registration(device: torch.device, sizes: Sequence[int]) -> list[dict[str, Any]]:
    """Registers fresh and touched memory of each size, those too large for this machine left out.
    Blocks."""
    most = free_host_bytes() // 2
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
    with pinned_slots(device, sizes[-1]) as (pinned, is_pinned):
        pageable = [torch.ones(sizes[-1], dtype=torch.uint8) for _ in range(2)]
        there = [torch.ones(sizes[-1], dtype=torch.uint8, device=device) for _ in range(2)]
        torch.accelerator.synchronize(device)
        for size in sizes:
            for here, is_fast in ((pinned, is_pinned), (pageable, False)):
                up = streams[0], there[0][:size], here[0][:size]
                down = streams[1], here[1][:size], there[1][:size]
                for direction, copies in zip(DIRECTIONS, ([up], [down], [up, down]), strict=True):
                    rate = copy_rate(copies, size, least_s)
                    rates.append(
                        {
                            "num_bytes": size,
                            "direction": direction,
                            "is_pinned": is_fast,
                            "bytes_s": rate,
                        }
                    )
    return rates


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
