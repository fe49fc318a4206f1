"""TileProgram: the binding of a native step program (native/tiermem.h), which steps tiles without
Python and the GIL."""

from __future__ import annotations

import contextlib
import errno
import functools
import os
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from tiermem.swap.base.native import (
    NORMAL,
    Workers,
    check,
    check_process,
    ffi,
    handle_of,
    lib,
    mirror,
)
from tiermem.swap.base.ranges import ByteRange, Column, Numbers

ONE_READ = int(lib.TM_RUN_ONE_READ)
ONE_WRITE = int(lib.TM_RUN_ONE_WRITE)
AWAITED = int(lib.TM_RUN_AWAITED)
CALLED = int(lib.TM_TILE_CALLED)
BEGUN = int(lib.TM_TILE_BEGUN)
BROUGHT = int(lib.TM_TILE_BROUGHT)
DURING_CHECK = int(lib.TM_DURING_CHECK)
DURING_STEP = int(lib.TM_DURING_STEP)

_COLUMNS = list(mirror("tm_piece").names or ())  # each of 8 bytes
_DATA, _BYTES, _CRC, _IS_KNOWN = map(_COLUMNS.index, ("data", "bytes", "crc", "is_known"))

_TILE_TIMES = mirror("tm_tile_times")

PieceRows = npt.NDArray[np.uint64]
"""Checksummed pieces: an array of tm_piece, one in each row."""

Flags = npt.NDArray[np.bool_]

NO_PIECES: PieceRows = np.zeros((0, len(_COLUMNS)), np.uint64)
_UNIT_OF_DATA = np.array([column == "data" for column in _COLUMNS], np.uint64)


def columns_of(columns: Sequence[Column], base: int) -> Any:
    """The columns of a tile whose first buffer begins at `base`, as tm_column[]."""
    return ffi.new(
        "tm_column[]",
        [
            {
                "data": ffi.cast("void *", base + held.offset),
                "bytes": held.num_bytes,
                "strip_bytes": strip_bytes,
            }
            for held, strip_bytes in columns
        ],
    )


class Failure(NamedTuple):
    """The first failure of a run: the record of native/tiermem.h."""

    error: int
    during: int
    fd: int
    kind: int
    offset: int
    length: int
    tile: int
    piece: int
    seen: int
    num_wrong: int


TileTimes = npt.NDArray[np.void]
"""What became of tiles: an array of tm_tile_times. Pairs of CLOCK_MONOTONIC nanoseconds, 0: it did
not happen."""


def piece_rows(
    addresses: Numbers, num_bytes: Numbers, crcs: npt.NDArray[np.uint32], is_known: Flags
) -> PieceRows:
    """Pieces from the addresses of their bytes, and the arrays of their checksums and flags, which
    the caller keeps alive."""
    rows = np.zeros((len(addresses), len(_COLUMNS)), np.uint64)
    rows[:, _DATA] = addresses
    rows[:, _BYTES] = num_bytes
    return aim_rows(rows, crcs, is_known)


def aim_rows(
    rows: PieceRows, crcs: npt.NDArray[np.uint32], is_known: Flags | None = None
) -> PieceRows:
    """Sets the arrays that hold the rows' checksums and flags (None: no flags). Returns the
    rows."""
    numbers = np.arange(len(rows), dtype=np.uint64)
    rows[:, _CRC] = np.uint64(crcs.ctypes.data) + np.uint64(crcs.itemsize) * numbers
    rows[:, _IS_KNOWN] = 0 if is_known is None else np.uint64(is_known.ctypes.data) + numbers
    return rows


def moved_rows(rows: PieceRows, num_bytes: int) -> PieceRows:
    """A copy of rows whose bytes lie so many bytes further on."""
    moved: PieceRows = rows + _UNIT_OF_DATA * np.uint64(num_bytes)
    return moved


def bytes_of_rows(rows: PieceRows) -> int:
    """The bytes of all pieces together."""
    return int(rows[:, _BYTES].sum())


def join_rows(several: Sequence[PieceRows]) -> PieceRows:
    """Pieces one after the other."""
    return several[0] if len(several) == 1 else np.concatenate([NO_PIECES, *several])


_NO_TILE = (1 << 64) - 1


class Taken:
    """A tile that `TileProgram.next` has given to this thread. Native code notes it, so that an
    interrupt loses none."""

    def __init__(self) -> None:
        self.tile = ffi.new("uint64_t *", _NO_TILE)
        self.buffer = ffi.new("int32_t *")
        self._thread = threading.get_ident()

    @property
    def is_mine(self) -> bool:
        """Whether a tile was given, to the thread that asks."""
        return self.tile[0] != _NO_TILE and self._thread == threading.get_ident()


_CACHES = Path("/sys/devices/system/cpu/cpu0/cache")
_LEAST_BYTES = 6 << 20  # three strips
_MOST_BYTES = 16 << 20  # where the cache is unknown or large


def cache_bytes() -> int:
    """Bytes of the processor's last cache, as one core shares it; 0: unknown."""
    sizes = [0]
    for file in _CACHES.glob("index*/size"):
        with contextlib.suppress(OSError, ValueError):
            sizes.append(int(file.read_text().strip().removesuffix("K")) << 10)
    return max(sizes)


@functools.cache
def first_bytes() -> int:
    """Bytes of strips that a step has under way before it has tried more: a quarter of the last
    cache."""
    return min(max(cache_bytes() // 4 or _MOST_BYTES, _LEAST_BYTES), _MOST_BYTES)


class TileProgram:
    """A native step program with its own thread. Methods may be called from any thread; they raise
    OSError as `check` does.

    Args:
        workers: threads that kernels share, which outlive the program; None: kernels run in the
            program's own.
    """

    def __init__(self, workers: Workers | None) -> None:
        program = ffi.new("tm_program **")
        check(
            lib.tm_program_open(handle_of(workers), first_bytes(), program),
            "starting the thread of a step program",
        )
        self._handle = program[0]
        self._owner = os.getpid()

    @property
    def handle(self) -> Any:
        """The native program. Raises RuntimeError in a forked child and after `close`."""
        check_process(self._owner, "this step program")
        if self._handle == ffi.NULL:
            raise RuntimeError("this step program is closed")
        return self._handle

    def begin(self, buffers: Sequence[ByteRange], tiles: Sequence[Any]) -> None:
        """Starts to read tiles (tm_tile *) before their run, one for each buffer. Does not
        block."""
        code = lib.tm_program_begin(self.handle, *_buffers(buffers), _tiles(tiles), len(tiles))
        check(code, f"beginning to read {len(tiles)} tiles")

    def run(
        self,
        buffers: Sequence[ByteRange],
        tiles: Sequence[Any],
        total: int,
        flags: int,
        priority: int = NORMAL,
    ) -> None:
        """Starts a run of `total` tiles, or the rest of a begun one, with the first of them; `add`
        gives the others.

        Does not block. What the tiles point at stays until the end.
        """
        code = lib.tm_program_run(
            self.handle, *_buffers(buffers), _tiles(tiles), len(tiles), total, priority, flags
        )
        check(code, f"starting a program of {total} tiles")

    def add(self, tiles: Sequence[Any], turns: Sequence[int] = ()) -> bool:
        """Gives the run more tiles, while others are stepped. False: it has ended already. Does not
        block.

        turns: a tile gets its buffer before those of later turns; 0 is that of the tiles of `run`,
            and of all tiles if none are given.
        """
        given = _tiles(tiles)
        for number, turn in enumerate(turns):
            given[number].turn = turn
        code = lib.tm_program_add(self.handle, given, len(tiles))
        return check(code, f"adding {len(tiles)} tiles to a program") == 0

    def next(self, timeout_s: float, taken: Taken) -> tuple[int, int] | bool:
        """Waits for a tile that is called or brought. Returns its index and that of its buffer (-1:
        none).

        Both are the caller's until `done`. True: the run has ended. False: timeout_s has passed;
        negative: it never does.
        """
        code = lib.tm_program_next(self.handle, int(timeout_s * 1e9), taken.tile, taken.buffer)
        if code == -errno.ETIMEDOUT:
            return False
        return True if check(code, "waiting for a tile") else (taken.tile[0], taken.buffer[0])

    def done(self, tile: int, has_failed: bool) -> None:
        """Ends the work on a tile of `next`."""
        check(
            lib.tm_program_done(self.handle, tile, errno.EIO if has_failed else 0),
            "ending the work on a tile",
        )

    def give_up(self, tile: int) -> None:
        """Ends the work on a tile that an interrupt has left, if it has not ended: the run ends as
        after a failure."""
        lib.tm_program_done(self.handle, tile, errno.ECANCELED)

    def wait(self, unit: int, is_written: bool, timeout_s: float) -> bool | None:
        """Whether a unit's tiles are stepped, or written as well; None after timeout_s; False when
        the run ended before."""
        code = lib.tm_program_wait(self.handle, unit, is_written, int(timeout_s * 1e9))
        return None if code == -errno.ETIMEDOUT else check(code, f"waiting for unit {unit}") == 0

    def await_tile(self, tile: int, timeout_s: float) -> bool | None:
        """Whether a tile is stepped; None after timeout_s; False when the run ended before."""
        code = lib.tm_program_await(self.handle, tile, int(timeout_s * 1e9))
        return None if code == -errno.ETIMEDOUT else check(code, f"waiting for tile {tile}") == 0

    def take(self, tile: int, address: int) -> bool:
        """Asks for a tile's new weights at an address; False: read them from disk. Address 0 takes
        the request back.

        Blocks while a strip of the tile has been written and others have not.
        """
        to = ffi.cast("void *", address)
        return check(lib.tm_program_take(self.handle, tile, to), "taking a tile's weights") == 1

    def forget(self, unit: int) -> None:
        """Before memory that is `cached` for a unit's tiles changes: on return nothing reads it any
        more."""
        check(
            lib.tm_program_forget(self.handle, unit), f"forgetting what memory has for unit {unit}"
        )

    def quiet(self) -> None:
        """Blocks until no transfer is under way: a run ends first. Does nothing after `close`."""
        if self._handle != ffi.NULL:
            check(lib.tm_program_quiet(self.handle), "waiting for a step program")

    def stop(self) -> None:
        """Ends a run early, or drops what was begun. Blocks for transfers in flight. Does nothing
        after `close`."""
        if self._handle != ffi.NULL:
            check(lib.tm_program_stop(self.handle), "stopping a step program")

    def failure(self) -> Failure | None:
        """The first failure of the run."""
        failure = self._report()[1]
        return (
            Failure(*(getattr(failure, name) for name in Failure._fields))
            if failure.error
            else None
        )

    @property
    def num_tiles(self) -> int:
        """The tiles that the run has been given."""
        return self._report()[0]

    def times(self) -> TileTimes:
        """What became of each tile of the run, which has ended."""
        num_tiles = self.num_tiles
        times = ffi.new("tm_tile_times[]", num_tiles)
        self._report(times, num_tiles)
        return np.frombuffer(ffi.buffer(times), _TILE_TIMES)

    def _report(self, times: Any = ffi.NULL, num_times: int = 0) -> tuple[int, Any]:
        """Fills the times of so many tiles. Returns the number of the run's tiles and its failure
        (tm_failure *)."""
        failure = ffi.new("tm_failure *")
        code = lib.tm_program_report(self.handle, times, num_times, failure)
        return check(code, "reading a program's report"), failure

    @property
    def bytes_under_way(self) -> int:
        """Bytes of strips that may be under way now; 0 before a first run and after `close`."""
        if self._handle == ffi.NULL:
            return 0
        num_bytes = ffi.new("uint64_t *")
        check(lib.tm_program_under_way(self.handle, num_bytes), "asking what is under way")
        return int(num_bytes[0])

    def close(self) -> None:
        """Stops, and ends the thread. Does nothing in a forked child and in a second call."""
        handle = self._handle
        self._handle = ffi.NULL
        if handle != ffi.NULL and os.getpid() == self._owner:
            check(lib.tm_program_close(handle), "ending a step program")


def end_kernels(programs: Sequence[TileProgram], workers: Workers) -> None:
    """Closes programs, then the threads that their kernels share. Blocks for transfers. A second
    call does nothing."""
    for program in programs:
        program.close()
    workers.close()


def _buffers(buffers: Sequence[ByteRange]) -> tuple[Any, int, int]:
    starts = ffi.new("void *[]", [ffi.cast("void *", address) for address, _ in buffers])
    return starts, len(buffers), buffers[0].num_bytes if buffers else 0


def _tiles(tiles: Sequence[Any]) -> Any:
    return ffi.new("tm_tile[]", [tile[0] for tile in tiles])
