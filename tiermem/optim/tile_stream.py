"""TileStream: buffers in an accelerator's memory, for what it lacks of tiles that are stepped there:
all of a tile that rests elsewhere; weights and gradients of one whose states are there.

    down     memory of a tile -> its buffer     states, weights and gradients; when the buffer's last tile has left
    step     in the buffer                      on the stream of the caller, when they have come
    up       its buffer -> memory of the tile   states and weights, when they are stepped

Each row is a stream: while a tile is stepped, the next one comes and the last one leaves. Memory of
tiles is pinned. No method waits for the accelerator. Two events are used again for all tiles.
"""

from __future__ import annotations

from collections.abc import Collection

import torch

from tiermem.plans.plan import Buffers
from tiermem.swap.base.ranges import ALIGNMENT, round_up
from tiermem.swap.memory.accelerator import current_stream, new_event, new_stream, on, record
from tiermem.swap.memory.device_memory import DeviceMemory, DevicePool


class TileStream:
    """Buffers that take turns. For one thread at a time, whose current stream steps.

    Args:
        memory: of the accelerator; the buffers are carved from it until `close`.
        device: the accelerator.
        buffers: their size and number.

    Raises torch's OutOfMemoryError.
    """

    def __init__(self, memory: DeviceMemory, device: torch.device, buffers: Buffers) -> None:
        self.slot_bytes = buffers.slot_bytes
        self._device = device
        self._down = new_stream(device)
        self._up = new_stream(device)
        self._pool = DevicePool(memory, *buffers, "stream")
        self._slots = list(iter(self._pool.take, None))
        # the end of the copies of each buffer's last tile
        self._left: list[torch.Event | None] = [None] * buffers.num
        # the buffer of the tile under way, and its bytes in use
        self._turn = 0
        self._used_bytes = 0
        # of the tile under way
        self._come = new_event(device)
        self._stepped = new_event(device)
        self._is_coming = False  # the current stream does not wait for all of it yet
        # which may still use what was freed for the buffers
        self._down.wait_stream(current_stream(device))

    def begin(self) -> None:
        """Goes on to the next buffer, for a tile that is about to come."""
        self._turn = (self._turn + 1) % len(self._slots)
        self._used_bytes = 0
        self._is_coming = True
        if (left := self._left[self._turn]) is not None:
            self._down.wait_event(left)

    def bring(self, data: torch.Tensor, is_read: bool = True) -> torch.Tensor:
        """A part of the buffer for flat data of the tile, valid until the buffer's next turn; of
        use after `arrive`.

        is_read: whether the data is copied there; else the content is undefined.
        """
        start = self._used_bytes
        size = data.numel() * data.itemsize
        self._used_bytes += round_up(size, ALIGNMENT)
        part = self._slots[self._turn].tensor[start : start + size].view(data.dtype)
        if is_read:
            self._is_coming = True
            with on(self._down):
                part.copy_(data, non_blocking=True)
        return part

    def arrive(self) -> None:
        """Makes the current stream wait for what the tile was brought until now, and for the
        buffer's last tile."""
        if self._is_coming:
            self._come.record(self._down)
            current_stream(self._device).wait_event(self._come)
            self._is_coming = False

    def send_back(self, moved: Collection[tuple[torch.Tensor, torch.Tensor]]) -> torch.Event:
        """Copies each (data, its part of the buffer) to the data when the current stream has
        stepped it. Returns the end of the copies."""
        self._stepped.record(current_stream(self._device))
        self._up.wait_event(self._stepped)
        with on(self._up):
            for data, part in moved:
                data.copy_(part, non_blocking=True)
        left = self._left[self._turn] = record(self._up)
        return left

    def join(self) -> None:
        """Makes the current stream wait for all copies."""
        for stream in (self._down, self._up):
            current_stream(self._device).wait_stream(stream)

    def close(self) -> None:
        """Gives the buffers back. No copy may be under way."""
        self._pool.reset()
        self._pool.close()
