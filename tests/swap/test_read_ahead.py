"""Does ReadAhead bring exactly the bytes asked for into its memory, several readings at once, and
give all of it back?"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from tiermem.swap.base.ranges import FileRange
from tiermem.swap.memory.arena import Arena
from tiermem.swap.store import stream as read_ahead_module
from tiermem.swap.store.stream import ReadAhead

Pattern = Callable[..., torch.Tensor]
AREA = 1 << 16


@pytest.fixture
def ahead() -> Iterator[ReadAhead]:
    arena = Arena(2 * AREA)
    made = ReadAhead([arena.take(AREA).tensor for _ in range(2)])
    yield made
    made.close()
    arena.close()


@pytest.fixture
def file(tmp_path: Path, pattern: Pattern) -> Path:
    path = tmp_path / "file"
    path.write_bytes(bytes(pattern(3 * AREA + 77).numpy()))
    return path


EDGES = [0, 1, 4095, 4096, 4097, 3 * AREA - 1, 3 * AREA, 3 * AREA + 76]


@pytest.mark.parametrize("start", EDGES)
@pytest.mark.parametrize("num_bytes", [1, 4096, 5000])
def test_every_edge_is_read(
    ahead: ReadAhead, file: Path, pattern: Pattern, start: int, num_bytes: int
) -> None:
    stop = min(start + num_bytes, 3 * AREA + 77)
    reading = ahead.start([FileRange(file, start, stop - start)])
    assert reading is not None
    assert torch.equal(reading.wait()[0], pattern(3 * AREA + 77)[start:stop])
    reading.release()


def test_several_are_under_way_until_the_memory_is_full(
    ahead: ReadAhead, file: Path, pattern: Pattern
) -> None:
    whole, started = pattern(3 * AREA + 77), []
    while (
        reading := ahead.start([FileRange(file, 100 + 20_000 * len(started), 20_000)])
    ) is not None:
        started.append(reading)
    assert len(started) == 2 * (AREA // 24_576)  # a reading takes the blocks around it
    for number in (3, 0):
        start = 100 + 20_000 * number
        assert torch.equal(started[number].wait()[0], whole[start : start + 20_000])
    for each in started:  # two of them have not been waited for
        each.release()
        each.release()
    both = [FileRange(file, 0, AREA), FileRange(file, AREA, AREA)]
    reading = ahead.start(both)
    assert reading is not None  # nothing of the memory was lost
    assert torch.equal(torch.cat(reading.wait()), whole[: 2 * AREA])
    assert ahead.start([FileRange(file, 0, 1)]) is None
    reading.release()


def test_what_is_not_there_is_an_error_and_takes_no_memory(ahead: ReadAhead, file: Path) -> None:
    with pytest.raises(OSError, match="truncated") as told:
        ahead.start([FileRange(file, 0, AREA), FileRange(file, 3 * AREA, 78)])
    assert (told.value.errno, told.value.filename) == (errno.ENODATA, str(file))
    with pytest.raises(FileNotFoundError):
        ahead.start([FileRange(file, 0, AREA), FileRange(file.with_name("none"), 0, 1)])
    reading = ahead.start([FileRange(file, 0, AREA), FileRange(file, 0, AREA)])
    assert reading is not None
    os.truncate(file, 10)  # while it is under way, or before the next
    reading.release()
    for start in (AREA, 3 * AREA):
        reading = ahead.start([FileRange(file, start, 77)])
        assert reading is not None
        with pytest.raises(OSError, match="file") as told:
            reading.wait()
        assert (told.value.errno, told.value.filename) == (errno.ENODATA, str(file))
        reading.release()


def test_files_are_closed_when_there_are_many_and_at_the_end(tmp_path: Path) -> None:
    files = [tmp_path / f"{number}" for number in range(20)]
    for number, path in enumerate(files):
        path.write_bytes(bytes([number]) * 5000)
    before, arena = len(os.listdir("/proc/self/fd")), Arena(AREA)
    ahead = ReadAhead([arena.take(AREA).tensor])
    ahead.open(files[0])  # and the queue
    beside = len(os.listdir("/proc/self/fd")) - 1
    for number, path in enumerate(files):
        reading = ahead.start([FileRange(path, 1, 4500)])
        assert reading is not None
        assert reading.wait()[0].unique().tolist() == [number]
        reading.release()
    assert len(os.listdir("/proc/self/fd")) - beside <= read_ahead_module._MOST_FILES
    ahead.close()
    arena.close()
    assert len(os.listdir("/proc/self/fd")) == before
