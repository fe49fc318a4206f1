"""What if the kernel refuses an engine, or to register memory? By real means: limits, capabilities,
a seccomp filter.

Filters and capabilities belong to a thread and to those it starts, the queue's own among them: each
test does its work in a thread, and the rest of the process never notices.
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import re
import resource
import struct
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from aio_events import aio_events

from tiermem.swap.base.native import READ, WRITE, IoSettings, Map, Op, Queue

_LIBC = ctypes.CDLL(None, use_errno=True)
_SYSTEM_CALLS = {"x86_64": (206, 207, 126), "aarch64": (0, 1, 91)}  # io_setup, io_destroy, capset
_IO_URING_SETUP = 425  # everywhere
_NUM_BYTES = 16 << 20

pytestmark = pytest.mark.skipif(
    platform.machine() not in _SYSTEM_CALLS, reason="numbers of system calls not known"
)


def in_a_thread(body: Callable[[], None]) -> None:
    """Runs it in a thread of its own, and raises here what it raised there (a skip too)."""
    raised: list[BaseException] = []

    def run() -> None:
        try:
            body()
        except BaseException as error:
            raised.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    if raised:
        raise raised[0]


def refuse_io_uring(error: int) -> None:
    """Lets io_uring_setup answer with an errno, in this thread and those it starts."""
    load, jump_if_equal, give = (
        (0x20, 0, 0, 0),
        (0x15, 0, 1, _IO_URING_SETUP),
        (0x06, 0, 0, 0x7FFF0000),
    )
    refuse = (0x06, 0, 0, 0x00050000 | error)
    program = b"".join(struct.pack("HBBI", *line) for line in (load, jump_if_equal, refuse, give))
    buffer = ctypes.create_string_buffer(program)
    filter_ = ctypes.create_string_buffer(struct.pack("HxxxxxxP", 4, ctypes.addressof(buffer)))
    no_new_privileges, set_seccomp, mode_filter = 38, 22, 2
    if _LIBC.prctl(no_new_privileges, 1, 0, 0, 0) or _LIBC.prctl(
        set_seccomp, mode_filter, filter_, 0, 0
    ):
        pytest.skip(f"no seccomp filter: {os.strerror(ctypes.get_errno())}")


def drop_capabilities() -> None:
    """In this thread and those it starts; root's CAP_IPC_LOCK among them, which puts it above the
    limit of locked memory."""
    header = ctypes.create_string_buffer(struct.pack("IiI", 0x20080522, 0, 0))
    if _LIBC.syscall(_SYSTEM_CALLS[platform.machine()][2], header, ctypes.create_string_buffer(24)):
        pytest.skip(f"no capset: {os.strerror(ctypes.get_errno())}")


@contextmanager
def aio_exhausted() -> Iterator[int]:
    """Takes every event that the machine has left for Linux AIO; gives fs.aio-max-nr."""
    io_setup, io_destroy, _ = _SYSTEM_CALLS[platform.machine()]
    limit = int(Path("/proc/sys/fs/aio-max-nr").read_text())
    if limit > 1 << 20:
        pytest.skip(f"fs.aio-max-nr is {limit}: taking all would need too much memory")
    contexts: list[ctypes.c_ulong] = []
    num_events = 1 << 16
    with aio_events(takes_all=True):
        try:
            while num_events:
                context = ctypes.c_ulong(0)
                if _LIBC.syscall(io_setup, num_events, ctypes.byref(context)) == 0:
                    contexts.append(context)
                elif ctypes.get_errno() == errno.EAGAIN:
                    num_events //= 2
                else:
                    pytest.skip(f"no Linux AIO here: {os.strerror(ctypes.get_errno())}")
            yield limit
        finally:
            for context in contexts:
                _LIBC.syscall(io_destroy, context)


def check_bytes(queue: Queue, folder: Path, memory: Map) -> None:
    """Writes a pattern through the queue and reads it back."""
    half = memory.num_bytes // 2
    tensor = memory.tensor()
    tensor[:half] = torch.arange(half).remainder(251).to(torch.uint8)
    tensor[half:] = 0
    fd = os.open(folder / "data", os.O_RDWR | os.O_CREAT | os.O_DIRECT)
    for op in (
        Op(WRITE, fd, memory.address, half, 0),
        Op(READ, fd, memory.address + half, half, 0),
    ):
        answer = queue.wait(queue.submit([op]))
        assert answer is not None
        queue.raise_for(answer)
    os.close(fd)
    assert torch.equal(tensor[:half], tensor[half:])


@pytest.fixture
def memory() -> Iterator[Map]:
    """More than an ordinary user may lock in memory."""
    memory = Map(_NUM_BYTES)
    memory.commit(0, _NUM_BYTES)
    yield memory
    memory.close()


# ENOMEM: RLIMIT_MEMLOCK
@pytest.mark.parametrize("error", [errno.EPERM, errno.ENOSYS, errno.EINVAL, errno.ENOMEM])
def test_refused_io_uring_falls_back_to_linux_aio(error: int, tmp_path: Path, memory: Map) -> None:
    def body() -> None:
        refuse_io_uring(error)
        queue = Queue(IoSettings("auto", 65536))
        assert queue.engine in ("aio", "threads")
        assert f"no io_uring: io_uring_setup: {os.strerror(error)}" in queue.why
        check_bytes(queue, tmp_path, memory)
        queue.close()
        with pytest.raises(OSError, match="io_uring_setup") as raised:
            Queue(IoSettings("uring"))
        assert raised.value.errno == error

    in_a_thread(body)


def test_exhausted_aio_names_the_limit_and_the_number_to_set() -> None:
    with aio_exhausted() as limit, pytest.raises(OSError, match="io_setup") as raised:
        Queue(IoSettings("aio", depth=64))
    assert raised.value.errno == errno.EAGAIN
    said = str(raised.value)
    assert f"/proc/sys/fs/aio-max-nr allows {limit} events on this machine" in said
    # an event of a process that has just ended comes back late
    num_used = int(re.findall(r"(\d+) are in use, this queue needs 65", said)[0])
    assert limit - 65 < num_used <= limit
    enough = -(-(num_used + 65) // 65536) * 65536
    assert f"sysctl -w fs.aio-max-nr={enough}" in said
    queue = Queue(IoSettings("aio", depth=64))  # the others have ended
    queue.close()


def test_refused_io_uring_and_exhausted_aio_leave_threads(tmp_path: Path, memory: Map) -> None:
    def body() -> None:
        refuse_io_uring(errno.EPERM)
        with aio_exhausted():
            queue = Queue(IoSettings("auto", 65536))
        assert queue.engine == "threads"
        assert (
            "no io_uring: io_uring_setup" in queue.why
            and "no Linux AIO: io_setup: /proc/sys/fs/aio-max-nr" in queue.why
        )
        check_bytes(queue, tmp_path, memory)
        queue.close()

    in_a_thread(body)


def test_memory_over_the_limit_is_used_unregistered(tmp_path: Path, memory: Map) -> None:
    def body() -> None:
        drop_capabilities()
        fd = os.open(tmp_path / "other", os.O_RDWR | os.O_CREAT)
        try:
            queue = Queue(
                IoSettings("uring", 65536),
                regions=[(memory.address, memory.num_bytes)],
                files={fd: "other"},
            )
        except OSError as error:
            pytest.skip(f"no io_uring: {error}")
        assert (
            "16 MiB of buffers not registered: Cannot allocate memory (see ulimit -l), 1 file "
            "registered"
        ) in queue.why
        check_bytes(queue, tmp_path, memory)
        queue.close()
        os.close(fd)

    soft, hard = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    lower = 1 << 20 if hard == resource.RLIM_INFINITY else min(hard, 1 << 20)
    resource.setrlimit(resource.RLIMIT_MEMLOCK, (lower, hard))
    try:
        in_a_thread(body)
    finally:
        resource.setrlimit(resource.RLIMIT_MEMLOCK, (soft, hard))


def test_what_may_be_locked_is_registered(tmp_path: Path, memory: Map) -> None:
    try:
        queue = Queue(IoSettings("uring", 65536), regions=[(memory.address, 1 << 20)])
    except OSError as error:
        pytest.skip(f"no io_uring: {error}")
    assert "1 MiB of buffers registered" in queue.why
    check_bytes(queue, tmp_path, memory)
    queue.close()
