"""A file system that fails on demand, in a process of its own: FUSE, spoken by hand, so that it
needs no library.

    the test --rules, one line of JSON each--> stdin    this program    /dev/fuse <--> the kernel <--> the store

Every file is a temporary one of a real file system. A read, a write or a sync that a rule covers is
answered with the rule's errno, or with the first `keep` bytes of it; the kernel hands that to
whoever asked, as it hands over a real disk's answer. `python lying_disk.py MOUNTPOINT` says
"mounted", then "ok" for each line of rules; it unmounts and ends when stdin closes. It does no more
than a store asks of a file system.
"""

from __future__ import annotations

import ctypes
import errno
import json
import os
import select
import stat
import struct
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

_LOOKUP, _FORGET, _GETATTR, _SETATTR, _MKDIR, _UNLINK, _RMDIR, _RENAME, _OPEN = (
    1,
    2,
    3,
    4,
    9,
    10,
    11,
    12,
    14,
)
_READ, _WRITE, _STATFS, _RELEASE, _FSYNC, _FLUSH, _INIT, _OPENDIR, _READDIR = (
    15,
    16,
    17,
    18,
    20,
    25,
    26,
    27,
    28,
)
_RELEASEDIR, _ACCESS, _CREATE, _INTERRUPT, _BATCH_FORGET, _FALLOCATE, _RENAME2 = (
    29,
    34,
    35,
    36,
    42,
    43,
    45,
)
_IN_HEADER = struct.Struct("<IIQQIIIHH")
_ROOT = 1
_PAST_THE_CACHE = 1  # FOPEN_DIRECT_IO
_BIG_WRITES, _MAX_PAGES = 1 << 5, 1 << 22
_MAX_WRITE = 1 << 20
_SIZE_IS_VALID = 1 << 3  # FATTR_SIZE
_DETACH = 2


@dataclass
class Rule:
    """What becomes of the next `times` transfers of a kind ("read", "write") that touch bytes start
    to stop.

    A "sync" touches all of them.
    """

    kind: str
    start: int
    stop: int
    code: int = 0
    keep: int = 0  # bytes, when code is 0
    times: int = 1

    def covers(self, kind: str, offset: int, length: int) -> bool:
        """Whether it speaks of this transfer."""
        return (
            self.times > 0
            and kind == self.kind
            and offset < self.stop
            and offset + length > self.start
        )


@dataclass
class Node:
    """A file or a folder."""

    number: int
    mode: int
    data: Any = None  # the temporary file
    children: dict[str, Node] = field(default_factory=dict)

    def attributes(self) -> bytes:
        """struct fuse_attr."""
        size = os.fstat(self.data.fileno()).st_size if self.data else 4096
        return struct.pack(
            "<6Q10I", self.number, size, -(-size // 512), *[0] * 6, self.mode, 1, 0, 0, 0, 4096, 0
        )


class LyingDisk:
    """Answers the kernel's requests, one after the other."""

    def __init__(self) -> None:
        self.rules: list[Rule] = []
        self.nodes = {_ROOT: Node(_ROOT, stat.S_IFDIR | 0o755)}
        self._next_number = _ROOT + 1
        self._answers: dict[int, Callable[[Node, bytes], bytes]] = {
            _INIT: self._init,
            _LOOKUP: lambda node, body: self._entry(self._child(node, _name(body))),
            _GETATTR: lambda node, body: _attributes(node),
            _SETATTR: self._set_attributes,
            _MKDIR: lambda node, body: self._entry(
                self._add(node, _name(body[8:]), stat.S_IFDIR | 0o755)
            ),
            _CREATE: self._create,
            _OPEN: lambda node, body: _opened(),
            _OPENDIR: lambda node, body: _opened(),
            _READDIR: _list,
            _READ: self._read,
            _WRITE: self._write,
            _FSYNC: self._sync,
            _FALLOCATE: self._allocate,
            _UNLINK: self._remove,
            _RMDIR: self._remove,
            _RENAME: lambda node, body: self._rename(node, body, 8),
            _RENAME2: lambda node, body: self._rename(node, body, 16),
            _STATFS: lambda node, body: struct.pack(
                "<5Q10I", *[1 << 20] * 5, 4096, 255, 4096, *[0] * 7
            ),
        }
        for quiet in (_RELEASE, _RELEASEDIR, _FLUSH, _ACCESS):
            self._answers[quiet] = lambda node, body: b""

    def answer(self, request: bytes) -> bytes | None:
        """What the kernel is told; None when it expects nothing."""
        _, code, unique, number, *_ = _IN_HEADER.unpack_from(request)
        if code in (_FORGET, _BATCH_FORGET, _INTERRUPT):
            return None
        error, body = 0, b""
        try:
            if code not in self._answers:
                raise OSError(errno.ENOSYS, "not spoken here")
            body = self._answers[code](self.nodes[number or _ROOT], request[_IN_HEADER.size :])
        except OSError as failure:
            error = failure.errno or errno.EIO
        return struct.pack("<IiQ", 16 + len(body), -error, unique) + body

    def _init(self, node: Node, body: bytes) -> bytes:
        major, minor, read_ahead, flags = struct.unpack_from("<4I", body)
        kept = flags & (_BIG_WRITES | _MAX_PAGES)
        return struct.pack(
            "<4IHHIIHH7I",
            major,
            min(minor, 31),
            read_ahead,
            kept,
            16,
            12,
            _MAX_WRITE,
            1,
            256,
            0,
            *[0] * 7,
        ) + bytes(4)

    def _child(self, node: Node, name: str) -> Node:
        if name not in node.children:
            raise OSError(errno.ENOENT, name)
        return node.children[name]

    def _add(self, parent: Node, name: str, mode: int) -> Node:
        if name in parent.children:
            raise OSError(errno.EEXIST, name)
        data = tempfile.TemporaryFile() if stat.S_ISREG(mode) else None  # noqa: SIM115  (it lives as long as its node)
        node = Node(self._next_number, mode, data)
        self._next_number += 1
        self.nodes[node.number] = parent.children[name] = node
        return node

    def _entry(self, node: Node) -> bytes:
        return struct.pack("<4Q2I", node.number, 0, 0, 0, 0, 0) + node.attributes()

    def _create(self, node: Node, body: bytes) -> bytes:
        return self._entry(self._add(node, _name(body[16:]), stat.S_IFREG | 0o600)) + _opened()

    def _set_attributes(self, node: Node, body: bytes) -> bytes:
        valid, _, _, size = struct.unpack_from("<IIQQ", body)
        if valid & _SIZE_IS_VALID:
            os.ftruncate(node.data.fileno(), size)
        return _attributes(node)

    def _read(self, node: Node, body: bytes) -> bytes:
        _, offset, length = struct.unpack_from("<QQI", body)
        return os.pread(node.data.fileno(), self._kept("read", offset, length), offset)

    def _write(self, node: Node, body: bytes) -> bytes:
        _, offset, length = struct.unpack_from("<QQI", body)
        kept = self._kept("write", offset, length)
        return struct.pack("<II", os.pwrite(node.data.fileno(), body[40 : 40 + kept], offset), 0)

    def _sync(self, node: Node, body: bytes) -> bytes:
        self._kept("sync", 0, 1 << 62)
        return b""

    def _kept(self, kind: str, offset: int, length: int) -> int:
        """How many bytes of a transfer are done. Raises OSError when a rule says so."""
        for rule in self.rules:
            if rule.covers(kind, offset, length):
                rule.times -= 1
                if rule.code:
                    raise OSError(rule.code, "as it was told")
                return min(rule.keep, length)
        return length

    def _allocate(self, node: Node, body: bytes) -> bytes:
        _, offset, length = struct.unpack_from("<3Q", body)
        file = node.data.fileno()
        os.ftruncate(file, max(os.fstat(file).st_size, offset + length))
        return b""

    def _remove(self, node: Node, body: bytes) -> bytes:
        self._child(node, _name(body))
        del node.children[_name(body)]  # the node itself stays, for those who have it open
        return b""

    def _rename(self, node: Node, body: bytes, names_at: int) -> bytes:
        (number,) = struct.unpack_from("<Q", body)
        old, new = body[names_at:].rstrip(b"\0").split(b"\0")
        self.nodes[number].children[new.decode()] = self._child(node, old.decode())
        del node.children[old.decode()]
        return b""


def _name(body: bytes) -> str:
    return body.split(b"\0", 1)[0].decode()


def _attributes(node: Node) -> bytes:
    return struct.pack("<QII", 0, 0, 0) + node.attributes()


def _opened() -> bytes:
    return struct.pack("<QII", 0, _PAST_THE_CACHE, 0)


def _list(node: Node, body: bytes) -> bytes:
    _, offset = struct.unpack_from("<QQ", body)
    listing = b""
    for at, (name, child) in enumerate(node.children.items(), 1):
        entry = (
            struct.pack("<QQII", child.number, at, len(name.encode()), child.mode >> 12)
            + name.encode()
        )
        listing += (entry + bytes(-len(entry) % 8)) if at > offset else b""
    return listing


def main(point: str) -> None:
    """Mounts, serves until stdin closes, unmounts. Ends with the reason when mounting is not
    allowed."""
    libc = ctypes.CDLL(None, use_errno=True)
    try:
        fuse = os.open("/dev/fuse", os.O_RDWR)
    except OSError as error:
        sys.exit(f"no FUSE here: {error}")
    options = f"fd={fuse},rootmode=40000,user_id={os.getuid()},group_id={os.getgid()}"
    if libc.mount(b"lying", point.encode(), b"fuse", 0, options.encode()):
        sys.exit(f"mounting is not allowed here: {os.strerror(ctypes.get_errno())}")
    try:
        _serve(LyingDisk(), fuse)
    finally:
        libc.umount2(point.encode(), _DETACH)


def _serve(disk: LyingDisk, fuse: int) -> None:
    print("mounted", flush=True)
    while True:
        ready, _, _ = select.select([fuse, 0], [], [])
        if fuse in ready:
            answer = disk.answer(os.read(fuse, _MAX_WRITE + 8192))
            if answer is not None:
                os.write(fuse, answer)
        elif not (line := os.read(0, 65536)):  # one line at a time: whoever writes waits for "ok"
            return
        else:
            disk.rules = [Rule(**rule) for rule in json.loads(line)]
            print("ok", flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
