"""Does what rests on NVMe hide in the page cache? (Promise 1: nothing hides outside the count.)"""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tiermem.swap.base.tier import Tier
from tiermem.swap.disk.direct import probe_path
from tiermem.swap.store.store import TensorStore


def cached_share(file: Path) -> float:
    """The part of a file's pages that the page cache holds, as mincore(2) says."""
    with open(file, "r+b") as stream, mmap.mmap(stream.fileno(), 0) as view:
        pages = -(-len(view) // mmap.PAGESIZE)
        answer = (ctypes.c_ubyte * pages)()
        anchor = ctypes.c_char.from_buffer(view)
        libc = ctypes.CDLL(None, use_errno=True)
        code = libc.mincore(
            ctypes.c_void_p(ctypes.addressof(anchor)), ctypes.c_size_t(len(view)), answer
        )
        del anchor
    assert code == 0, ctypes.get_errno()
    return sum(byte & 1 for byte in answer) / pages


def test_pages_of_a_file_that_was_written_and_read_are_not_cached(
    make_store: Callable[..., TensorStore], tmp_path: Path
) -> None:
    if not probe_path(tmp_path).is_direct:
        pytest.skip("this file system takes no O_DIRECT")
    store = make_store(host_bytes=64 << 20)
    for number in range(8):
        store.put(f"x{number}", torch.full((4 << 20,), number, dtype=torch.uint8), Tier.NVME).wait()
    for number in range(8):
        assert store.fetch(f"x{number}").wait()[-1] == number
        store.release(f"x{number}")
    segment = next(tmp_path.glob("tiermem-*/segment.bin"))
    assert segment.stat().st_size >= 32 << 20
    assert cached_share(segment) < 0.01


def test_the_ruler_sees_a_cached_file(tmp_path: Path) -> None:
    file = tmp_path / "cached"
    file.write_bytes(bytes(1 << 20))
    assert cached_share(file) > 0.9
