"""DeviceCopy: a fetched tensor's copy in an accelerator's memory, until it is released.

fetch(name, to=Tier.DEVICE) --> the Move of the fetch --(wait)--> the copy, on the current stream
--(release)--> home
"""

from __future__ import annotations

import torch

from tiermem.swap.memory.accelerator import current_stream, is_accelerator, record
from tiermem.swap.store.move import Move


class DeviceCopy(Move):
    """A tensor on its way from its home, through HOST memory, to the device.

    The copy has memory of torch's allocator, or is HOST memory itself where the device is the CPU.

    Args:
        move: the fetch into HOST memory.
        device: the device of the copy.
    """

    def __init__(self, move: Move, device: torch.device) -> None:
        super().__init__(move.queue, None, None, move.name)
        self._move = move
        self._device = device
        self._host: torch.Tensor | None = None  # the tensor in HOST memory
        self._copy: torch.Tensor | None = None
        self._copied: torch.Event | None = None

    def wait(self) -> torch.Tensor:
        """Blocks until the bytes are in HOST memory; returns the copy, which the current stream
        fills. Raises OSError."""
        if self._copy is None:
            self._host = self._copy = self._move.wait()
            if is_accelerator(self._device):
                self._copy = torch.empty_like(self._host, device=self._device)
                self._copy.copy_(self._host, non_blocking=True)
                self._copied = record(current_stream(self._device))
        return self._copy

    def is_done(self) -> bool:
        """Whether `wait` would return or raise at once."""
        return self._move.is_done()

    @property
    def has_failed(self) -> bool:
        """Whether the fetch has failed; `wait` raises the error."""
        return self._move.has_failed

    @property
    def was_cancelled(self) -> bool:
        """Whether the fetch has failed because of `cancel`."""
        return self._move.was_cancelled

    def promote(self) -> None:
        """Makes the fetch urgent. Does not block."""
        self._move.promote()

    def cancel(self) -> None:
        """Cancels the fetch. Never raises OSError."""
        self._move.cancel()

    def end(self, is_dirty: bool) -> None:
        """Ends the copy: HOST memory may be given away afterwards. With `is_dirty` it has the
        copy's bytes. Blocks."""
        if self._copied is None:
            return
        assert self._host is not None and self._copy is not None
        if is_dirty:
            self._host.copy_(self._copy)
        elif not self._copied.query():
            self._copied.synchronize()
        self._copy = self._copied = None
