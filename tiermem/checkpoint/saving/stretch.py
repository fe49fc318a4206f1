"""Stretch: elements of one state that lie in one range of bytes of this rank's, on NVMe or in memory.

A stretch on NVMe is what the store's entry holds when it is frozen; nothing of it is copied (resting.py). One in memory is
read in bounded pieces while it is written to a file.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import torch

from tiermem.checkpoint.format import kinds

Read = Callable[[int, int], torch.Tensor]
"""(offset, bytes) -> those bytes: uint8, contiguous, on the CPU; valid until the next call."""


@dataclasses.dataclass(frozen=True)
class Stretch:
    """Elements `start` to `start + numel` of one state of a parameter.

    Attributes:
        first_byte: of them in the bytes of the whole state.
        place: where on NVMe, an entry and an offset in it; or how they are read from memory.
    """

    param: str
    state: str
    kind: str
    start: int
    numel: int
    first_byte: int
    place: tuple[str, int] | Read

    @property
    def num_bytes(self) -> int:
        """Bytes of these elements."""
        return kinds.bytes_of(self.kind, self.numel)


def in_memory(data: torch.Tensor, offset: int = 0) -> Read:
    """Reads a tensor on any device, from a byte of it on."""
    flat = data.detach().reshape(-1).view(torch.uint8)
    return lambda start, num_bytes: flat[offset + start : offset + start + num_bytes].cpu()
