"""Does building leave the C heap as it was, and does training find it as the launcher has set
it?"""

from __future__ import annotations

import ctypes
import subprocess
import sys

import pytest

from tiermem.tools.job.launcher import CHILD_ENVIRONMENT, KEEP_BYTES, MAP_FROM_BYTES

pytestmark = pytest.mark.skipif(
    not hasattr(ctypes.CDLL(None), "mallinfo2"), reason="asks glibc 2.33 or newer"
)

COUNT_HEAP = """
import contextlib, ctypes, sys
from tiermem.tools.job.launcher import large_blocks_mapped
libc = ctypes.CDLL(None)
fields = "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost".split()
class Info(ctypes.Structure):
    _fields_ = [(name, ctypes.c_size_t) for name in fields]
libc.mallinfo2.restype = Info
libc.malloc.restype, libc.malloc.argtypes, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_size_t], [ctypes.c_void_p]
def build():
    for _ in range(8):  # modules: weights that go home, and something small behind them that stays
        weights = libc.malloc(8 << 20)
        libc.malloc(64 << 10)
        libc.free(weights)
        libc.malloc(9 << 20 if sys.argv[1] == "keep" else 64 << 10)
before = libc.mallinfo2().arena
with large_blocks_mapped() if sys.argv[2] == "mapped" else contextlib.nullcontext():
    build()
after = libc.mallinfo2()
block = libc.malloc(8 << 20)
print(after.arena - before, libc.mallinfo2().hblkhd - after.hblkhd)
"""


def run(what: str, how: str) -> tuple[int, int]:
    """(bytes the heap has grown by, bytes mapped for a block of 8 MiB afterwards)."""
    command = [sys.executable, "-c", COUNT_HEAP, what, how]
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        check=True,
        env={**_environment(), **CHILD_ENVIRONMENT},
    )
    grown, mapped = done.stdout.split()
    return int(grown), int(mapped)


def _environment() -> dict[str, str]:
    return {"PYTHONPATH": ":".join(sys.path)}


def test_the_environment_says_what_is_set_again_after_building() -> None:
    assert CHILD_ENVIRONMENT["MALLOC_MMAP_THRESHOLD_"] == str(MAP_FROM_BYTES)
    assert CHILD_ENVIRONMENT["MALLOC_TRIM_THRESHOLD_"] == str(KEEP_BYTES)


def test_building_in_the_heap_leaves_it_as_wide_as_the_model() -> None:
    assert run("keep", "in the heap")[0] >= 0.98 * 8 * (9 << 20)


@pytest.mark.parametrize("what", ["keep", "let go"])
def test_mapped_blocks_leave_the_heap_as_it_was(what: str) -> None:
    grown, mapped_later = run(what, "mapped")
    assert grown < 4 << 20
    assert mapped_later == 0  # what training asks for is in the heap again
