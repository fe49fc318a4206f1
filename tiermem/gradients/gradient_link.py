"""GradientLink: brings gradients from an accelerator to host memory while backward continues.

    autograd's thread    packs the smallest gradients, starts one copy of them and one of each other, on the link's stream
    helper thread        waits for the copies, stores the gradients at their home, frees the buffer

The buffers are a ring of pinned memory. Autograd's thread never waits for the accelerator. It waits
for a buffer when the helper thread is a whole ring behind, which bounds the memory.
"""

from __future__ import annotations

import functools
import queue
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

import torch

from tiermem.swap.base.ranges import round_up
from tiermem.swap.base.side_threads import SideThreads, Task
from tiermem.swap.memory.accelerator import activate, current_stream, new_stream, on, record
from tiermem.swap.memory.arena import Pool, Slot
from tiermem.units.unit import Shard

_PACKED_BYTES = 1 << 20
"""Gradients of at most this many bytes leave in one copy: a copy alone would take its latency
longer than its bytes."""
_ROOM_BYTES = 8 << 20
"""Of the accelerator's memory for packing, at most: one block on the link's stream, used again and
again. No plan counts it: `tiermem plan` leaves a part of the card to torch."""
_ALIGNMENT = 64  # bytes, of each gradient in a buffer


class GradientPart(NamedTuple):
    """Elements of a parameter's gradient, of this rank's share, flat, from element `start` on."""

    shard: Shard
    start: int
    data: torch.Tensor


Store = Callable[[Sequence[GradientPart]], None]
"""Stores parts at their home."""


class GradientLink:
    """Copies gradients of an accelerator to host memory and stores them there, in the order of the
    calls.

    Args:
        device: the accelerator.
        pool: pinned buffers; all of them belong to the link until it is closed. Must outlive the
            link.
    """

    def __init__(self, device: torch.device, pool: Pool) -> None:
        self._device = device
        self._room_bytes = pool.slot_bytes
        self._stream = new_stream(device)
        self._pool = pool
        self._slots = list(iter(pool.take, None))
        self._fill()
        activates = functools.partial(activate, device)
        self._thread = SideThreads(1, "tiermem-gradients", activates)
        self._under_way: list[Task[None]] = []
        # calls after the one that failed are skipped until `join` raises its error
        self._has_failed = False

    def send(self, parts: Sequence[GradientPart], store: Store) -> None:
        """Starts to copy parts to the host. `store` is called with the copies on the helper thread.

        The parts may be released on return: their memory is used until the copies have ended.
        Blocks while all buffers are in use.
        """
        for group in _groups(parts, self._room_bytes):
            slot = self._free.get()
            self._stream.wait_stream(current_stream(self._device))
            with on(self._stream):
                hosted = self._copy(group, slot)
                copied = record(self._stream)
            for part in group:
                part.data.record_stream(self._stream)
            take = functools.partial(self._take, slot, copied, hosted, store)
            self._under_way.append(self._thread.submit(take))

    def end_of_reads(self) -> torch.Event:
        """The event after which the copies that were started until now have ended."""
        return record(self._stream)

    def call(self, function: Callable[[], None]) -> Task[None]:
        """Calls a function on the helper thread, after all that was sent before has been stored."""
        self._under_way.append(self._thread.submit(functools.partial(self._run, function)))
        return self._under_way[-1]

    def join(self) -> None:
        """Blocks until all that was sent has been stored. Raises the first error since the last
        `join`."""
        for each in self._under_way:
            each.wait()
        under_way = self._under_way
        self._under_way = []
        self._has_failed = False
        for each in under_way:
            each.result()

    def reset(self) -> None:
        """Takes every buffer back, after an exception. Blocks until the helper thread has ended its
        work."""
        self._thread.submit(lambda: None).wait()
        self._fill()

    def close(self) -> None:
        """Ends the helper thread and gives the buffers back. Blocks until it has stored what was
        sent."""
        self._thread.close()
        self._pool.reset()

    def _fill(self) -> None:
        self._free = queue.SimpleQueue[Slot]()
        for slot in self._slots:
            self._free.put(slot)

    def _copy(self, parts: Sequence[GradientPart], slot: Slot) -> list[GradientPart]:
        """Starts the copies of parts into a buffer; returns the parts there, in the same order."""
        order = sorted(range(len(parts)), key=lambda i: parts[i].data.nbytes)
        spans: dict[int, slice] = {}
        stop = packed_bytes = num_packed = 0
        for i in order:
            spans[i] = slice(stop, stop + parts[i].data.nbytes)
            stop = round_up(spans[i].stop, _ALIGNMENT)
            if parts[i].data.nbytes <= _PACKED_BYTES and stop <= _ROOM_BYTES:
                packed_bytes = stop
                num_packed += 1
        if packed_bytes:
            packed = torch.empty(packed_bytes, dtype=torch.uint8, device=self._device)
            for i in order[:num_packed]:
                packed[spans[i]].view(parts[i].data.dtype).copy_(parts[i].data)
            slot.tensor[:packed_bytes].copy_(packed, non_blocking=True)
        hosted = [
            p._replace(data=slot.tensor[spans[i]].view(p.data.dtype)) for i, p in enumerate(parts)
        ]
        for i in order[num_packed:]:
            hosted[i].data.copy_(parts[i].data, non_blocking=True)
        return hosted

    def _take(
        self, slot: Slot, copied: torch.Event, hosted: Sequence[GradientPart], store: Store
    ) -> None:
        try:
            copied.synchronize()
            self._run(lambda: store(hosted))
        finally:
            self._free.put(slot)

    def _run(self, function: Callable[[], None]) -> None:
        if self._has_failed:
            return
        try:
            function()
        except BaseException:
            self._has_failed = True
            raise


def _groups(parts: Iterable[GradientPart], room_bytes: int) -> Iterator[list[GradientPart]]:
    """Divides parts, in their order, into groups that a buffer holds; cuts a part that is larger
    than a buffer."""
    group: list[GradientPart] = []
    filled = 0
    for part in parts:
        room_numel = room_bytes // part.data.itemsize
        for start in range(0, max(part.data.numel(), 1), room_numel):
            piece = part._replace(
                start=part.start + start, data=part.data[start : start + room_numel]
            )
            if group and filled + piece.data.nbytes > room_bytes:
                yield group
                group = []
                filled = 0
            group.append(piece)
            filled = round_up(filled + piece.data.nbytes, _ALIGNMENT)
    if group:
        yield group
