"""Heap: how the C heap of the trained process treats large blocks, phase by phase (glibc; elsewhere nothing changes).

    training    blocks of up to 32 MiB are kept and used again: mapped anew each time, activations cost page faults
    building    blocks of 256 KiB or more are mapped by themselves and gone when they are freed

A model is built once, larger than memory, and each module goes home as it stands. Built in the heap its weights leave holes as
wide as the whole model; their pages are given back, but the blocks of training then wander over them and touch them again,
so that the peak grows with the number of layers, though no layer keeps anything. Mapped, they leave the heap as it was.
"""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Iterator

MAP_FROM_BYTES = 32 << 20
"""Blocks of this size and more are mapped while a model is trained: the largest that glibc allows."""
KEEP_BYTES = 1 << 30
"""Free bytes at the heap's end that are kept."""

_MAP_FROM_BYTES_BUILDING = 256 << 10
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # malloc.h


@contextlib.contextmanager
def large_blocks_mapped() -> Iterator[None]:
    """Inside, blocks are treated as building wants it; afterwards as training does, and free pages are given back."""
    _set_threshold(_MAP_FROM_BYTES_BUILDING)
    try:
        yield
    finally:
        _set_threshold(MAP_FROM_BYTES)
        give_back_free_memory()


def give_back_free_memory() -> None:
    """Hands the heap's free pages back to the kernel: what building left must not sit beside what training takes."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc has it, musl has not
    if trim is not None:
        trim(0)


def _set_threshold(num_bytes: int) -> None:
    set_option = getattr(ctypes.CDLL(None), "mallopt", None)
    if set_option is not None:
        set_option(_M_MMAP_THRESHOLD, num_bytes)
        set_option(_M_TRIM_THRESHOLD, KEEP_BYTES)
