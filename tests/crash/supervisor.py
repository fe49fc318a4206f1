"""Supervisor: answers chosen system calls of another process in the kernel's place, and writes down
all that it sees.

    the run, a fork    --a filter (seccomp) holds each call of these kinds-->    this process: "go on", or -errno

A filter sees every call of every thread, also those of io_uring and Linux AIO, for which the C
library has no function. Counted are calls on files below some folders, by path or descriptor, the
native module's memory maps, and the calls that drive asynchronous I/O. Needs Linux 5.9 and no
privilege; `why_not` says what is missing.

A failed call does nothing, except that a failed `close` closes, as the kernel's does, and that a
failed sync of a file without O_DIRECT loses what was written since the last one: the kernel marks
such pages clean and may drop them.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import os
import platform
import random
import select
import signal
import struct
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Literal, NamedTuple

# AUDIT_ARCH and the number of seccomp(2)
_MACHINES = {"x86_64": (0xC000003E, 317), "aarch64": (0xC00000B7, 277)}
_PIDFD_GETFD = 438
_NEW_LISTENER, _SET_FILTER, _NO_NEW_PRIVS = 8, 1, 38
_ALLOW, _NOTIFY = 0x7FFF0000, 0x7FC00000
_RECEIVE, _SEND, _ADD_DESCRIPTOR, _SET_FLAGS = 0xC0502100, 0xC0182101, 0x40182103, 0x40082104
_SWITCH_AT_ONCE = 1  # to the other process, without the scheduler's queue (Linux 6.6)
_GO_ON, _REPLACE = 1, 1
_HELD = struct.Struct("<QIIiIQ6Q")  # struct seccomp_notif
_MOST_PATH_BYTES, _PAGE = 4096, 4096
_NO_RESERVE, _SHARED, _ANONYMOUS = 0x4000, 0x1, 0x20
_DONT_NEED, _DONT_FORK, _HUGE_PAGE, _POPULATE = 4, 10, 14, 23
_TRANSIENT = frozenset((errno.EINTR, errno.EAGAIN, errno.EBUSY))

Place = Literal["path", "path at", "descriptor", "memory", "anything"]


class Call(NamedTuple):
    """A kind of system call: where its arguments name a file, how it may fail, its numbers (x86-64,
    aarch64)."""

    place: Place
    codes: tuple[int, ...]
    numbers: dict[int, int | None]


_IO = (errno.EIO,)
CALLS: dict[str, Call] = {
    "open": Call("path at", (errno.EIO, errno.ENOSPC, errno.EMFILE), {257: 56}),
    "read": Call("descriptor", (errno.EIO, errno.EINTR), {0: 63}),
    "pread": Call("descriptor", (errno.EIO, errno.EINTR), {17: 67}),
    "write": Call("descriptor", (errno.EIO, errno.ENOSPC, errno.EINTR), {1: 64}),
    "pwrite": Call("descriptor", (errno.EIO, errno.ENOSPC, errno.EINTR), {18: 68}),
    "fsync": Call("descriptor", (errno.EIO, errno.ENOSPC), {74: 82}),
    "fdatasync": Call("descriptor", (errno.EIO, errno.ENOSPC), {75: 83}),
    "rename": Call("path", (errno.EIO, errno.ENOSPC), {82: None}),
    "renameat": Call("path at", (errno.EIO, errno.ENOSPC), {264: 38, 316: 276}),
    "unlink": Call("path", _IO, {87: None}),
    "unlinkat": Call("path at", _IO, {263: 35}),
    "mkdir": Call("path", (errno.EIO, errno.ENOSPC), {83: None}),
    "mkdirat": Call("path at", (errno.EIO, errno.ENOSPC), {258: 34}),
    "rmdir": Call("path", _IO, {84: None}),
    "ftruncate": Call("descriptor", _IO, {77: 46}),
    "fallocate": Call(
        "descriptor", (errno.ENOSPC, errno.EIO, errno.EINTR, errno.EOPNOTSUPP), {285: 47}
    ),
    "flock": Call("descriptor", (errno.ENOLCK, errno.EINTR), {73: 32}),
    "fcntl": Call("descriptor", (errno.ENOLCK, errno.EMFILE), {72: 25}),
    "getdents": Call("descriptor", _IO, {217: 61}),
    "close": Call("descriptor", _IO, {3: 57}),
    "statfs": Call("path", _IO, {137: 43}),
    "fstatfs": Call("descriptor", _IO, {138: 44}),
    "stat": Call("path at", _IO, {262: 79, 332: 291}),
    "fstat": Call("descriptor", _IO, {5: 80}),
    "access": Call("path", _IO, {21: None}),
    "accessat": Call("path at", _IO, {269: 48, 439: 439}),
    "readlink": Call("path", _IO, {89: None}),
    "mmap": Call("memory", (errno.ENOMEM,), {9: 222}),
    "munmap": Call("memory", (errno.ENOMEM,), {11: 215}),
    "madvise": Call("memory", (errno.ENOMEM, errno.EINVAL), {28: 233}),
    "mlock": Call("anything", (errno.ENOMEM,), {149: 228}),
    "eventfd": Call("anything", (errno.EMFILE,), {290: 19}),
    "io_setup": Call("anything", (errno.EAGAIN, errno.ENOMEM), {206: 0}),
    "io_submit": Call("anything", (errno.EAGAIN, errno.EIO), {209: 2}),
    "io_getevents": Call("anything", (errno.EINTR, errno.EIO), {208: 4}),
    "io_uring_setup": Call("anything", (errno.ENOMEM, errno.EPERM), {425: 425}),
    "io_uring_enter": Call(
        "anything", (errno.EINTR, errno.EAGAIN, errno.EBUSY, errno.EIO), {426: 426}
    ),
    "io_uring_register": Call("anything", (errno.ENOMEM,), {427: 427}),
}
SYNCS = frozenset(("fsync", "fdatasync"))


class Rule(NamedTuple):
    """Which calls fail: the nth of a kind (from 1), or from that one on for good."""

    call: str
    nth: int
    code: int
    is_for_good: bool

    def covers(self, call: str, nth: int) -> bool:
        """Whether the nth call of a kind fails."""
        return call == self.call and (nth >= self.nth if self.is_for_good else nth == self.nth)


def rules_for(call: str, nth: int) -> Iterator[Rule]:
    """The ways for a call to fail: once with each error, and for good with the first that is no
    "interrupted" or "again"."""
    codes = CALLS[call].codes
    yield from (Rule(call, nth, code, is_for_good=False) for code in codes)
    lasting = [code for code in codes if code not in _TRANSIENT or call == "io_setup"]
    yield from (Rule(call, nth, code, is_for_good=True) for code in lasting[:1])


class Seen(NamedTuple):
    """One counted call."""

    call: str
    name: str  # the file, "" for memory and what drives asynchronous I/O
    has_failed: bool


class Entry(NamedTuple):
    """One counted call, with all that it gives to the kernel."""

    call: str
    name: str
    arguments: list[int]
    data: bytes = b""  # that a write writes
    offset: int = 0
    other: str = ""  # the new name, of a rename


class Supervised(NamedTuple):
    """How a process has ended under supervision."""

    status: int | None  # as os.waitpid says; None: it was killed because it took too long
    seen: list[Seen]

    @property
    def num_failed(self) -> int:
        """Calls that a rule let fail."""
        return sum(each.has_failed for each in self.seen)

    def counts(self) -> Counter[str]:
        """Calls of each kind."""
        return Counter(each.call for each in self.seen)


def why_not() -> str:
    """Why this machine cannot supervise, or an empty string."""
    if platform.machine() not in _MACHINES:
        return f"no table of system calls for {platform.machine()}"
    pid = os.fork()
    if pid == 0:
        with contextlib.suppress(OSError):
            hold(["eventfd"])
        try:
            os._exit(os.eventfd(0))
        except OSError as error:
            os._exit(error.errno or 0)
    try:
        ended = Supervisor(
            pid, ["eventfd"], [], Rule("eventfd", 1, errno.EMFILE, is_for_good=False)
        ).watch(10.0)
    except OSError as error:
        return f"a filter's calls cannot be answered here: {error}"
    is_answered = (
        ended.status is not None and os.waitstatus_to_exitcode(ended.status) == errno.EMFILE
    )
    return "" if is_answered else "seccomp filters are not allowed here"


def hold(calls: list[str]) -> None:
    """Lets the supervisor answer these kinds of calls of this process from now on, which must have
    one thread.

    Raises OSError where that is not allowed.
    """
    if not calls:
        return
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(_NO_NEW_PRIVS, 1, 0, 0, 0)
    architecture, seccomp = _MACHINES[platform.machine()]
    numbers = [number for call in calls for number in _numbers(call)]
    lines = [(0x20, 0, 0, 4), (0x15, 1, 0, architecture), (0x06, 0, 0, _ALLOW), (0x20, 0, 0, 0)]
    lines += [(0x15, len(numbers) - at, 0, number) for at, number in enumerate(numbers)]
    lines += [(0x06, 0, 0, _ALLOW), (0x06, 0, 0, _NOTIFY)]
    code = ctypes.create_string_buffer(b"".join(struct.pack("<HBBI", *line) for line in lines))
    program = ctypes.create_string_buffer(
        struct.pack("<HxxxxxxQ", len(lines), ctypes.addressof(code))
    )
    if libc.syscall(seccomp, _SET_FILTER, _NEW_LISTENER, program) < 0:
        raise OSError(ctypes.get_errno(), "seccomp: " + os.strerror(ctypes.get_errno()))


def _numbers(call: str) -> list[int]:
    pairs = CALLS[call].numbers.items()
    found = (
        [pair[0] for pair in pairs]
        if platform.machine() == "x86_64"
        else [pair[1] for pair in pairs]
    )
    return [number for number in found if number is not None]


class Supervisor:
    """Watches one process from its filter to its end.

    Args:
        pid: a child that is about to call `hold` with the same kinds of calls.
        calls: the kinds that are held.
        roots: folders whose files count.
        rule: what fails; None: nothing.
        buffered: the file system refuses O_DIRECT. "open" must be among the calls.
        seed: of which pages a failed sync loses.
        log: gets an entry for each counted call, before it is made.
    """

    def __init__(
        self,
        pid: int,
        calls: list[str],
        roots: list[Path],
        rule: Rule | None = None,
        buffered: bool = False,
        seed: int = 0,
        log: list[Entry] | None = None,
    ) -> None:
        self._log = log
        self._memory = -1  # the process's, once it has a filter
        self._pid, self._rule, self._is_buffered = pid, rule, buffered
        self._roots = tuple(str(root) for root in roots)
        self._names = {number: call for call in calls for number in _numbers(call)}
        self._counts, self._seen = Counter[str](), list[Seen]()
        self._maps: list[tuple[int, int]] = []  # of the native module
        self._chance = random.Random(seed)
        self._synced: dict[int, bytes] = {}  # by inode, where syncs are held
        if SYNCS & set(calls):
            files = [file for root in roots for file in root.rglob("*") if file.is_file()]
            self._synced = {file.stat().st_ino: file.read_bytes() for file in files}

    def watch(self, longest_s: float) -> Supervised:
        """Answers until the process has ended; kills it when that takes too long, or on an OSError.
        Blocks."""
        deadline, ended, listener = time.monotonic() + longest_s, os.pidfd_open(self._pid), -1
        try:
            listener = self._listener(ended)
            poll = select.poll()
            for descriptor in (listener, ended):
                if descriptor >= 0:
                    poll.register(descriptor, select.POLLIN)
            while True:
                ready = [
                    descriptor for descriptor, events in poll.poll(1000.0) if events & select.POLLIN
                ]
                if ended in ready:
                    return Supervised(os.waitpid(self._pid, 0)[1], self._seen)
                if listener in ready:
                    self._answer(listener)
                if time.monotonic() > deadline:
                    self._kill()
                    return Supervised(None, self._seen)
        except BaseException:
            self._kill()  # it would wait for an answer for ever
            raise
        finally:
            os.close(ended)
            if listener >= 0:
                os.close(listener)
            if self._memory >= 0:
                os.close(self._memory)

    def _kill(self) -> None:
        os.kill(self._pid, signal.SIGKILL)
        os.waitpid(self._pid, 0)

    def _listener(self, ended: int) -> int:
        """This process's descriptor of the filter, once there is one; -1 when no calls are held, or
        the process has ended."""
        if not self._names:
            return -1
        libc, folder = ctypes.CDLL(None, use_errno=True), Path(f"/proc/{self._pid}/fd")
        while not select.select([ended], [], [], 0.001)[0]:
            for each in os.listdir(folder):
                try:
                    is_found = "seccomp" in os.readlink(folder / each)
                except FileNotFoundError:
                    continue
                if is_found:
                    self._memory = os.open(f"/proc/{self._pid}/mem", os.O_RDONLY | os.O_CLOEXEC)
                    listener = int(libc.syscall(_PIDFD_GETFD, ended, int(each), 0))
                    if listener < 0:
                        raise OSError(
                            ctypes.get_errno(), "pidfd_getfd: " + os.strerror(ctypes.get_errno())
                        )
                    libc.ioctl(
                        listener, ctypes.c_ulong(_SET_FLAGS), ctypes.c_ulong(_SWITCH_AT_ONCE)
                    )
                    return listener
        return -1

    def _answer(self, listener: int) -> None:
        held = bytearray(_HELD.size)
        try:
            fcntl.ioctl(listener, _RECEIVE, held)
        except OSError:  # the caller is gone
            return
        identity, thread, _, number, _, _, *arguments = _HELD.unpack(held)
        code = self._decide(self._names[number], thread, arguments)
        try:
            if code and self._names[number] == "close":
                null = os.open(os.devnull, os.O_RDWR)
                fcntl.ioctl(
                    listener,
                    _ADD_DESCRIPTOR,
                    struct.pack("<QIIII", identity, _REPLACE, null, arguments[0], 0),
                )
                os.close(null)
            fcntl.ioctl(
                listener,
                _SEND,
                bytearray(struct.pack("<QqiI", identity, 0, -code, 0 if code else _GO_ON)),
            )
        except OSError as error:
            if error.errno != errno.ENOENT:  # it was interrupted, or is gone
                raise

    def _decide(self, call: str, thread: int, arguments: list[int]) -> int:
        """0, or the error that the call gets; takes down what was counted."""
        if self._is_buffered and call == "open" and arguments[2] & os.O_DIRECT:
            return errno.EINVAL
        name = self._file_of(call, thread, arguments)
        if name is None:
            return 0
        self._counts[call] += 1
        has_failed = self._rule is not None and self._rule.covers(call, self._counts[call])
        self._seen.append(Seen(call, name, has_failed))
        if self._log is not None:
            self._log.append(self._entry(call, name, thread, arguments))
        if call in SYNCS:
            self._note_sync(f"/proc/{thread}/fd/{arguments[0]}", has_failed)
        return self._rule.code if has_failed and self._rule is not None else 0

    def _file_of(self, call: str, thread: int, arguments: list[int]) -> str | None:
        """The file that a call is about, "" for one without that counts, None for one that does
        not."""
        place = CALLS[call].place
        if place == "anything":
            return ""
        if place == "memory":
            return "" if self._is_native(call, thread, arguments) else None
        if place == "descriptor":
            name = self._link(thread, arguments[0])
        else:
            name = self._text(arguments[place == "path at"])
            if place == "path at":
                name = self._below(thread, arguments[0], name)
        return name if name.startswith(self._roots) else None

    def _is_native(self, call: str, thread: int, arguments: list[int]) -> bool:
        """Whether memory is of the native module, which alone asks for it in these ways, or a
        buffer of a page's start."""
        if call == "mmap":
            _, _, protection, flags, descriptor, _ = arguments
            if not flags & _ANONYMOUS:
                return "io_uring" in self._link(thread, descriptor)
            return bool(flags & _SHARED or (flags & _NO_RESERVE and protection == 3))
        address, length, advice = arguments[:3]
        if call == "madvise" and advice == _HUGE_PAGE:
            self._maps.append((address, address + length))
        is_ours = any(start <= address < stop for start, stop in self._maps)
        return is_ours or (call == "madvise" and advice in (_DONT_FORK, _POPULATE))

    def _link(self, thread: int, descriptor: int) -> str:
        try:
            return os.readlink(f"/proc/{thread}/fd/{descriptor & 0xFFFFFFFF}")
        except OSError:
            return ""

    def _below(self, thread: int, descriptor: int, name: str) -> str:
        """A name that is relative to a folder's descriptor, with the folder."""
        return (
            name
            if name.startswith("/")
            else os.path.join(self._link(thread, descriptor), name).rstrip("/")
        )

    def _text(self, address: int) -> str:
        return (
            os.pread(self._memory, _MOST_PATH_BYTES, address)
            .partition(b"\0")[0]
            .decode(errors="replace")
        )

    def _entry(self, call: str, name: str, thread: int, arguments: list[int]) -> Entry:
        data, offset, other = b"", 0, ""
        if call in ("write", "pwrite"):
            data = os.pread(self._memory, arguments[2], arguments[1])
            assert len(data) == arguments[2]
            positions = Path(f"/proc/{thread}/fdinfo/{arguments[0]}").read_text()
            offset = (
                arguments[3] if call == "pwrite" else int(positions.split("pos:")[1].split()[0])
            )
        elif call in ("rename", "renameat"):
            other = self._text(arguments[3 if call == "renameat" else 1])
            if call == "renameat":
                other = self._below(thread, arguments[2], other)
        return Entry(call, name, arguments, data, offset, other)

    def _note_sync(self, link: str, has_failed: bool) -> None:
        """Keeps what a sync makes lasting; takes pages back when it fails and they were in the page
        cache."""
        if not os.path.isfile(link):
            return
        inode, now = os.stat(link).st_ino, Path(link).read_bytes()
        if not has_failed:
            self._synced[inode] = now
            return
        flags = int(
            Path(link.replace("/fd/", "/fdinfo/")).read_text().split("flags:")[1].split()[0], 8
        )
        if flags & os.O_DIRECT:
            return
        before = self._synced.get(inode, b"").ljust(len(now), b"\0")
        fd = os.open(link, os.O_WRONLY | os.O_CLOEXEC)
        for at in range(0, len(now), _PAGE):
            if self._chance.random() < 0.5 or now[at : at + _PAGE] == before[at : at + _PAGE]:
                continue
            os.pwrite(fd, before[at : at + min(_PAGE, len(now) - at)], at)
        os.close(fd)
