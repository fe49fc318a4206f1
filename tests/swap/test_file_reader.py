"""Does FileReader give exactly the bytes asked for, at every edge, and say so when the file has
fewer?"""

from __future__ import annotations

import errno
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from drawn import drawn
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tiermem.swap.base.native import Answer, Op, Queue, TransferError
from tiermem.swap.store import stream as reader_module
from tiermem.swap.store.stream import FileReader

Pattern = Callable[..., torch.Tensor]
PIECE = 4 << 20


@pytest.fixture
def make_file(tmp_path: Path, pattern: Pattern) -> Callable[[int], Path]:
    """make_file(num_bytes): a file of a pattern."""

    def make(num_bytes: int) -> Path:
        path = tmp_path / f"model {num_bytes}.bin"
        path.write_bytes(bytes(pattern(num_bytes).numpy()))
        return path

    return make


@pytest.mark.parametrize(
    "num_bytes", [0, 1, 4095, 4096, 4097, 8192, PIECE - 1, PIECE, PIECE + 1, 5 * PIECE + 4097]
)
def test_whole_file_is_read(
    make_file: Callable[[int], Path], pattern: Pattern, num_bytes: int
) -> None:
    with FileReader(make_file(num_bytes)) as reader:
        assert reader.num_bytes == num_bytes
        assert torch.equal(reader.read(0, num_bytes), pattern(num_bytes))


EDGES = [0, 1, 4095, 4096, 4097, 8191, 8192, 12_287, 12_288, 12_289, 16_383]


@pytest.mark.parametrize("start", EDGES)
def test_every_pair_of_edges_is_read(
    make_file: Callable[[int], Path], pattern: Pattern, start: int
) -> None:
    with FileReader(make_file(16_383)) as reader:
        for stop in (edge for edge in EDGES if edge >= start):
            assert torch.equal(reader.read(start, stop - start), pattern(16_383)[start:stop])


@settings(max_examples=drawn(40), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data(), num_bytes=st.integers(0, 60_000))
def test_any_range_of_any_file_is_read(
    tmp_path: Path, pattern: Pattern, data: st.DataObject, num_bytes: int
) -> None:
    path = tmp_path / "file"
    path.write_bytes(bytes(pattern(num_bytes).numpy()))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reader_module, "_READ_PIECE_BYTES", 8192)  # many pieces for few bytes
        with FileReader(path) as reader:
            for _ in range(3):
                start = data.draw(st.integers(0, num_bytes))
                stop = data.draw(st.integers(start, num_bytes))
                assert torch.equal(reader.read(start, stop - start), pattern(num_bytes)[start:stop])


def test_file_that_cannot_be_opened_past_the_page_cache_is_read_buffered(
    mount: Callable[..., Path], pattern: Pattern
) -> None:
    path = mount("ramfs") / "file"
    path.write_bytes(bytes(pattern(10_000).numpy()))
    with FileReader(path) as reader:
        assert torch.equal(reader.read(3, 9_990), pattern(10_000)[3:9_993])


def test_range_past_the_end_is_refused_with_what_the_file_has(
    make_file: Callable[[int], Path],
) -> None:
    path = make_file(10_000)
    with (
        FileReader(path) as reader,
        pytest.raises(OSError, match=r"bytes 9000 to 10001 .* ends at 10000") as refusal,
    ):
        reader.read(9_000, 1_001)
    assert (refusal.value.errno, refusal.value.filename) == (errno.ENODATA, str(path))


@pytest.mark.parametrize(("start", "num_bytes"), [(-1, 4), (4, -1)])
def test_what_is_no_range_is_refused(
    make_file: Callable[[int], Path], start: int, num_bytes: int
) -> None:
    with FileReader(make_file(10)) as reader, pytest.raises(ValueError, match="are no range"):
        reader.read(start, num_bytes)


@pytest.mark.parametrize("left", [0, 1, 4096, 8193, PIECE + 1])
def test_file_truncated_after_it_was_opened_is_never_read_as_if_whole(
    make_file: Callable[[int], Path], pattern: Pattern, left: int
) -> None:
    num_bytes = 3 * PIECE + 9_000
    path = make_file(num_bytes)
    with FileReader(path) as reader:
        with path.open("r+b") as file:
            file.truncate(left)
        with pytest.raises(OSError, match=r"truncated") as failure:
            reader.read(0, num_bytes)
        assert (failure.value.errno, failure.value.filename) == (errno.ENODATA, str(path))
        # the last bytes alone, which are no whole block
        with pytest.raises(OSError, match=r"truncated"):
            reader.read(num_bytes - 10, 10)
        assert torch.equal(
            reader.read(0, left // 4096 * 4096), pattern(num_bytes)[: left // 4096 * 4096]
        )


def test_failure_leaves_no_read_under_way_in_the_buffers(
    make_file: Callable[[int], Path], pattern: Pattern, monkeypatch: pytest.MonkeyPatch
) -> None:
    submitted: list[int] = []
    waited: list[int] = []
    submit, wait = Queue.submit, Queue.wait

    def watch_submit(self: Queue, ops: list[Op]) -> int:
        submitted.append(submit(self, ops))
        return submitted[-1]

    def watch_wait(self: Queue, tag: int) -> Answer | None:
        waited.append(tag)
        return wait(self, tag)

    def fail(self: Queue, answer: Answer) -> None:
        raise TransferError(errno.EIO, answer.kind, "file", answer.offset, answer.length)

    with FileReader(make_file(6 * PIECE)) as reader:
        with monkeypatch.context() as patch:
            for name, function in (
                ("submit", watch_submit),
                ("wait", watch_wait),
                ("raise_for", fail),
            ):
                patch.setattr(Queue, name, function)
            with pytest.raises(TransferError):
                reader.read(0, 6 * PIECE)
        assert len(submitted) == 4
        assert waited == submitted
        assert torch.equal(reader.read(0, 6 * PIECE), pattern(6 * PIECE))


def test_threads_read_through_one_reader(
    make_file: Callable[[int], Path], pattern: Pattern, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reader_module, "_READ_PIECE_BYTES", 8192)
    size, start_together = 200_000, threading.Barrier(4)

    def read_all(step: int) -> bool:
        start_together.wait()
        return all(
            torch.equal(reader.read(at, step), expected[at : at + step])
            for at in range(0, size - step, step)
            for _ in range(3)
        )

    expected, interval = pattern(size), sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with FileReader(make_file(size)) as reader, ThreadPoolExecutor(4) as threads:
            assert all(threads.map(read_all, [5000, 7001, 12_289, 30_000]))
    finally:
        sys.setswitchinterval(interval)


def test_the_end_of_the_block_waits_for_another_threads_read(
    make_file: Callable[[int], Path], pattern: Pattern, monkeypatch: pytest.MonkeyPatch
) -> None:
    is_reading, wait = threading.Event(), Queue.wait

    def slow(self: Queue, tag: int) -> Answer | None:
        is_reading.set()
        time.sleep(0.05)  # meanwhile the block ends
        return wait(self, tag)

    monkeypatch.setattr(Queue, "wait", slow)
    with ThreadPoolExecutor(1) as other:
        with FileReader(make_file(8192)) as reader:
            reading = other.submit(reader.read, 0, 8192)
            assert is_reading.wait(10)
        assert torch.equal(reading.result(), pattern(8192))
    with pytest.raises(ValueError, match=r"8192\.bin is closed"):
        reader.read(0, 1)


def test_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError) as failure:
        FileReader(tmp_path / "missing")
    assert failure.value.filename == str(tmp_path / "missing")


def test_reader_that_cannot_have_its_queue_leaves_nothing(
    make_file: Callable[[int], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(**options: object) -> None:
        raise OSError(errno.ENOSYS, "no engine")

    monkeypatch.setattr(reader_module, "Queue", refuse)
    with pytest.raises(OSError, match="no engine"):
        FileReader(make_file(10))
