"""Proc: what the kernel says in files of /proc and /sys, read without root and without a library."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path


def own_cgroup(controller: str, pid: int | str = "self") -> Path | None:
    """The folder of a process's cgroup in the hierarchy of a version 1 controller, or for "" in the
    unified hierarchy.

    None where that is not mounted. A process without a cgroup counts to the whole version 1
    hierarchy.
    """
    fs_type = "cgroup" if controller else "cgroup2"
    for line in read_word("/proc/self/mountinfo").splitlines():
        left, right = line.split(" - ", 1)
        kind, _, options = right.split()[:3]
        if kind == fs_type and (not controller or controller in options.split(",")):
            root, point = left.split()[3:5]
            break
    else:
        return None
    for line in read_word(f"/proc/{pid}/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if (controller in controllers.split(",")) if controller else not controllers:
            folder = (
                Path(point, os.path.relpath(path, root)) if path.startswith(root) else Path(point)
            )
            return folder.resolve() if folder.is_dir() else Path(point)
    return Path(point) if controller else None


def read_word(file: str | Path) -> str:
    """What a file of /proc or /sys says; empty when it is not there."""
    try:
        return Path(file).read_text(errors="replace").strip()
    except OSError:
        return ""


def read_table(file: str) -> dict[str, str]:
    """The `name : value` lines of a file of /proc; of several with one name the first. Empty when
    the file is not there."""
    found: dict[str, str] = {}
    for line in read_word(file).split("\n"):
        name, colon, value = line.partition(":")
        if colon:
            found.setdefault(name.strip(), value.strip())
    return found


def bytes_in(table: Mapping[str, str], name: str) -> int:
    """Bytes of an entry that the kernel writes as "123 kB"; 0 when it is not there."""
    return int(table.get(name, "0").split()[0]) * 1024
