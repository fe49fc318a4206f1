"""Machine: the facts that a figure is worth nothing without: kernel, CPU, memory, and of each path what it lies on.

Read from /proc and /sys, without root and without starting a program; what cannot be read is "unknown". A benchmark keeps
them in its JSON and says the main ones in the caption of its picture.
"""

from __future__ import annotations

import datetime
import os
import platform
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import tiermem
from tiermem.tools.byte_size import format_bytes

MEMORY_FILE_SYSTEMS = ("tmpfs", "ramfs", "hugetlbfs", "devtmpfs")
_UNKNOWN = "unknown"
_MOUNTS = Path("/proc/self/mountinfo")
_NETWORKED = re.compile(r"^(nfs|cifs|smb|9p|virtiofs|fuse|lustre|ceph)")


class Place(NamedTuple):
    """What a folder lies on."""

    path: str
    mount_point: str
    file_system: str
    mount_options: str
    device: str
    device_model: str


def machine_facts(paths: Sequence[Path] = ()) -> dict[str, Any]:
    """The facts as JSON takes them: kernel, cpu, num_cores, memory_bytes, virtualisation, date, tiermem, paths."""
    return {
        "kernel": f"{platform.system()} {platform.release()}",
        "cpu": cpu_model(),
        "num_cores": num_cores(),
        "memory_bytes": memory_bytes(),
        "virtualisation": virtualisation(),
        "date": datetime.datetime.now().astimezone().isoformat(timespec="seconds"),
        "tiermem": tiermem.__version__,
        "python": platform.python_version(),
        "paths": [place_of(path)._asdict() for path in paths],
    }


def caption(facts: dict[str, Any]) -> str:
    """The facts on two or more lines: the machine and the date, then a line per path."""
    size = format_bytes(facts["memory_bytes"])
    kinds = {"none": "", "yes": ", a virtual machine"}
    virtual = kinds.get(facts["virtualisation"], f", a virtual machine ({facts['virtualisation']})")
    lines = [
        f"{facts['cpu']}, {facts['num_cores']} cores, {size}{virtual} · {facts['kernel']} · "
        f"tiermem {facts['tiermem']} · {facts['date'][:16].replace('T', ' ')}"
    ]
    for place in facts["paths"]:
        model = "" if place["device_model"] == _UNKNOWN else f" ({place['device_model']})"
        lines.append(f"{place['path']}: {place['file_system']} ({place['mount_options']}) on {place['device']}{model}")
    return "\n".join(lines)


def try_engines() -> dict[str, tuple[bool, str]]:
    """Opens each of the queue's engines: whether it can run, and its line about how, or why not."""
    from tiermem.swap.native import ENGINES, Queue

    found = {}
    for name in ENGINES:
        try:
            queue = Queue(name)
        except OSError as error:
            found[name] = (False, error.strerror or str(error))
            continue
        found[name] = (True, f"takes {queue.engine}: {queue.why}" if name == "auto" else queue.why)
        queue.close()
    return found


def cpu_model() -> str:
    """The processor's name."""
    return _table("/proc/cpuinfo").get("model name") or platform.processor() or platform.machine() or _UNKNOWN


def num_cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0))


def memory_bytes() -> int:
    """Memory of the machine."""
    return _kib("MemTotal")


def available_bytes() -> int:
    """Memory that could be had now without swapping."""
    return _kib("MemAvailable")


def virtualisation() -> str:
    """The hypervisor's name, "yes" when it does not tell, or "none"."""
    if re.search(r"\bhypervisor\b", _table("/proc/cpuinfo").get("flags", "")) is None:
        return "none"
    return read_word("/sys/hypervisor/type") or read_word("/sys/class/dmi/id/sys_vendor") or "yes"


def place_of(path: Path) -> Place:
    """Finds the mount that holds a folder, and the device below it."""
    resolved = path.resolve()
    found = Place(str(path), _UNKNOWN, _UNKNOWN, _UNKNOWN, _UNKNOWN, _UNKNOWN)
    try:
        mounts = _MOUNTS.read_text().splitlines()
    except OSError:
        return found
    best = -1
    for line in mounts:
        first, _, second = line.partition(" - ")
        _, _, number, _, point, options, *_ = first.split(" ")
        file_system, source, super_options = second.split(" ", 2)
        mount = Path(_unescaped(point))
        if resolved.is_relative_to(mount) and len(mount.parts) >= best:  # of two on one point the later covers
            best = len(mount.parts)
            together = ",".join(dict.fromkeys([*options.split(","), *super_options.split(",")]))
            model = _UNKNOWN if _NETWORKED.match(file_system) else _model_of(Path("/sys/dev/block") / number)
            found = Place(str(path), str(mount), file_system, together, _unescaped(source) or _UNKNOWN, model)
    return found


def read_word(file: str) -> str:
    """What a file of /proc or /sys says; empty when it is not there."""
    try:
        return Path(file).read_text().strip()
    except OSError:
        return ""


def _model_of(device: Path) -> str:
    """Model of a block device, or of the disk that a partition lies on."""
    try:
        resolved = device.resolve(strict=True)
    except OSError:
        return _UNKNOWN
    disk = resolved.parent if (resolved / "partition").exists() else resolved
    return read_word(str(disk / "device/model")) or _UNKNOWN


def _table(file: str) -> dict[str, str]:
    """`name : value` lines; of several with one name the first."""
    found: dict[str, str] = {}
    for line in read_word(file).splitlines():
        name, colon, value = line.partition(":")
        if colon:
            found.setdefault(name.strip(), value.strip())
    return found


def _kib(name: str) -> int:
    words = _table("/proc/meminfo").get(name, "0").split()
    return int(words[0]) * 1024


def _unescaped(text: str) -> str:
    """mountinfo writes blanks and the like as \\040."""
    return re.sub(r"\\([0-7]{3})", lambda octal: chr(int(octal[1], 8)), text)
