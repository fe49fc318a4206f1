"""Remedy: what is best done about an error of the system's, in a few words, by its errno; the end of an I/O error's text."""

from __future__ import annotations

import errno
from collections.abc import Mapping
from types import MappingProxyType

_REMEDIES: Mapping[int, str] = MappingProxyType(
    {
        errno.ENOSPC: "the file system is full: free some space or add a path",
        errno.EDQUOT: "the quota is used up: free some space, ask for more, or use another path",
        errno.ENODATA: "the file is shorter than what was written to it: something truncated it",
        errno.EIO: "the device reports a failure: see the kernel log",
        errno.EROFS: "the file system has turned read-only: see the kernel log",
        errno.ENOLCK: "the file system keeps no locks, or their server is down: mount it with locks, or use another one",
        errno.EFBIG: "the file may not grow so long: see ulimit -f",
    }
)


def remedy(code: int | None) -> str:
    """What to do; empty where the error says it all."""
    return "" if code is None else _REMEDIES.get(code, "")
