"""Probe: what a folder offers to a run, found by trying.

A file without a name is made; where there are none, a small file is made and removed. Nothing else is touched, nothing is left.
"""

from __future__ import annotations

import errno
import os
import re
import secrets
from pathlib import Path
from typing import NamedTuple

from tiermem.swap.direct import open_direct


class PathFacts(NamedTuple):
    """What a path offers: free bytes for this user, file system type, whether transfers go past the page cache."""

    path: Path
    free_bytes: int
    file_system: str
    is_direct: bool
    why_buffered: str = ""
    device: int = 0  # of the file system: two paths with the same one share their free bytes


def probe_path(path: Path) -> PathFacts:
    """Looks at a folder: it must exist and be writable. Raises OSError that names it and says what to do."""
    if not path.is_dir():
        raise FileNotFoundError(errno.ENOENT, "no such folder: make it first, or correct nvme_path", str(path))
    why = _tried(path)
    stats = os.statvfs(path)
    free_bytes = stats.f_bavail * stats.f_frsize
    return PathFacts(path, free_bytes, file_system_of(path), not why, why, path.stat().st_dev)


def _tried(path: Path) -> str:
    """Why a file there is used buffered; empty: it takes direct transfers. Raises OSError."""
    try:
        unnamed = os.open(path, os.O_RDWR | os.O_TMPFILE, 0o600)  # nothing is left by a process that is killed here
    except OSError:  # no such files on this file system, or no writing at all
        return _tried_by_name(path)
    try:
        fd, why = open_direct(Path(f"/proc/self/fd/{unnamed}"), os.O_RDWR)
        os.close(fd)
        return why
    finally:
        os.close(unnamed)


def _tried_by_name(path: Path) -> str:
    name = path / f".tiermem-probe-{os.getpid()}-{secrets.token_hex(4)}"
    try:
        fd = os.open(name, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
    except OSError as error:
        raise OSError(error.errno, f"cannot write here: {os.strerror(error.errno or 0)}", str(path)) from None
    os.close(fd)
    try:
        fd, why = open_direct(name, os.O_RDWR)
        os.close(fd)
        return why
    finally:
        name.unlink()


def file_system_of(path: Path) -> str:
    """The type of the file system that holds a path ("ext4", "tmpfs", ...), or "unknown"."""
    resolved, best, kind = path.resolve(), -1, "unknown"
    try:
        mounts = Path("/proc/self/mounts").read_text().splitlines()
    except OSError:
        return kind
    for line in mounts:
        point, fs_type = line.split()[1:3]
        mount = Path(re.sub(r"\\([0-7]{3})", lambda octal: chr(int(octal[1], 8)), point))
        if resolved.is_relative_to(mount) and len(mount.parts) >= best:  # of two on one point the later covers
            best, kind = len(mount.parts), fs_type
    return kind
