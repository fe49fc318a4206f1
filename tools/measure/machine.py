"""Machine: the facts about a machine that accompany every figure, and the bytes written to the
drive of each path."""

from __future__ import annotations

import datetime
import os
import platform
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import tiermem
from tiermem.swap.base.proc import bytes_in, read_table, read_word
from tiermem.tools.words import format_bytes, numbered, parse_bytes

# ---- the machine ---------------------------------------------------------------------------------
#
# The facts come from /proc and /sys, without root and without starting a program; unreadable facts
# are "unknown". A benchmark stores them in its JSON and prints the main ones in the caption of its
# picture.

_UNKNOWN = "unknown"
_MOUNTS = Path("/proc/self/mountinfo")
_NETWORKED = re.compile(r"^(nfs|cifs|smb|9p|virtiofs|fuse|lustre|ceph)")


class DiskPlace(NamedTuple):
    """What a folder lies on."""

    path: str
    mount_point: str
    file_system: str
    mount_options: str
    device: str
    device_model: str


def machine_facts(paths: Sequence[Path] = ()) -> dict[str, Any]:
    """The facts as JSON takes them: kernel, cpu, num_cores, memory_bytes, virtualisation, date,
    tiermem, paths."""
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
        lines.append(
            f"{place['path']}: {place['file_system']} ({place['mount_options']}) on "
            f"{place['device']}{model}"
        )
    return "\n".join(lines)


def try_engines() -> dict[str, tuple[bool, str]]:
    """Opens each of the queue's engines: whether it can run, and its line about how, or why not."""
    from tiermem.swap.base.native import ENGINES, IoSettings, Queue

    found = {}
    for name in ENGINES:
        try:
            queue = Queue(IoSettings(name))
        except OSError as error:
            found[name] = (False, error.strerror or str(error))
            continue
        found[name] = (True, f"takes {queue.engine}: {queue.why}" if name == "auto" else queue.why)
        queue.close()
    return found


def cpu_model() -> str:
    """The processor's name."""
    return (
        read_table("/proc/cpuinfo").get("model name")
        or platform.processor()
        or platform.machine()
        or _UNKNOWN
    )


def num_cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0))


def memory_bytes() -> int:
    """Memory of the machine."""
    return bytes_in(read_table("/proc/meminfo"), "MemTotal")


def virtualisation() -> str:
    """The hypervisor's name, "yes" when it does not tell, or "none"."""
    if re.search(r"\bhypervisor\b", read_table("/proc/cpuinfo").get("flags", "")) is None:
        return "none"
    return read_word("/sys/hypervisor/type") or read_word("/sys/class/dmi/id/sys_vendor") or "yes"


def place_of(path: Path) -> DiskPlace:
    """Finds the mount that holds a folder, and the device below it."""
    resolved = path.resolve()
    found = DiskPlace(str(path), _UNKNOWN, _UNKNOWN, _UNKNOWN, _UNKNOWN, _UNKNOWN)
    best = -1
    for line in read_word(_MOUNTS).splitlines():
        first, _, second = line.partition(" - ")
        _, _, number, _, point, options, *_ = first.split(" ")
        file_system, source, super_options = second.split(" ", 2)
        mount = Path(_unescaped(point))
        # of two on one point the later covers
        if resolved.is_relative_to(mount) and len(mount.parts) >= best:
            best = len(mount.parts)
            together = ",".join(dict.fromkeys([*options.split(","), *super_options.split(",")]))
            model = (
                _UNKNOWN
                if _NETWORKED.match(file_system)
                else _model_of(Path("/sys/dev/block") / number)
            )
            found = DiskPlace(
                str(path), str(mount), file_system, together, _unescaped(source) or _UNKNOWN, model
            )
    return found


def _model_of(device: Path) -> str:
    """Model of a block device, or of the disk that a partition lies on."""
    try:
        resolved = device.resolve(strict=True)
    except OSError:
        return _UNKNOWN
    disk = resolved.parent if (resolved / "partition").exists() else resolved
    return read_word(str(disk / "device/model")) or _UNKNOWN


def _unescaped(text: str) -> str:
    """mountinfo writes blanks and the like as \\040."""
    return re.sub(r"\\([0-7]{3})", lambda octal: chr(int(octal[1], 8)), text)


# ---- endurance: bytes written, compared with a drive's TBW (terabytes written) -------------------
#
#     written to /mnt/nvme0: 12.3 GB in this run, 1.23 GB per step; a drive of 600 TBW lasts 48,780
#     such runs, ...
#
# TBW is in the drive's data sheet, in units of 10**12 bytes. Writes that the drive makes internally
# are not counted: the vendor's figure allows for them. Each path is treated as a separate drive.
# The tool does not check whether two paths share a drive, so it prints their sum, too.

_PART_BYTES = 100 * 10**12  # of a drive's TBW that is spoken of when none is given
_LEAST_TBW_BYTES = 10**9  # less is a slip: 600 MB for 600 TB
USUAL_TBW_BYTES = 600 * 10**12  # of a drive of 1 TB
DAY_S = 86_400.0
_DAYS_OF_YEAR = 365.25
_MANY_DAYS = 1000


class WrittenOnPath(NamedTuple):
    """The bytes that were written to a folder in a run, and since the store was made, where that is
    known."""

    path: Path | str
    written_bytes: int
    since_made_bytes: int | None = None


def endurance_lines(
    paths: Sequence[WrittenOnPath], num_steps: int, seconds: float, tbw_bytes: int | None = None
) -> list[str]:
    """One sentence per path, and one for their sum when there are several. Empty when no path was
    in use.

    Args:
        paths: what was written in this run.
        num_steps: optimizer steps in which that happened; 0 leaves figures per step out.
        seconds: how long it took; 0 leaves the days out.
        tbw_bytes: what the drive may be written in its life; None: 100 TB are spoken of.
    """
    written_to = {f"written to {each.path}": each for each in paths}
    if sum(each.written_bytes > 0 for each in paths) > 1:
        total = WrittenOnPath("", sum(each.written_bytes for each in paths))
        written_to["all of it, if the paths share one drive"] = total
    return [
        _sentence(what, each, num_steps, seconds, tbw_bytes) for what, each in written_to.items()
    ]


def lines_of_run(run: Mapping[str, Any], tbw_bytes: int | None = None) -> list[str]:
    """The same for a run of `tiermem train` as saved: its training alone, and beside it the
    building of the model.

    What was written twice, because steps under backward were dropped and made again, is part of it,
    and said apart.
    """
    paths = [WrittenOnPath(**each) for each in run.get("paths", [])]
    lines = endurance_lines(paths, len(run["losses"]), run.get("training_s", 0.0), tbw_bytes)
    if copied := run.get("copied_bytes"):
        lines.append(f"of this {_gigabytes(copied)} are copies that saves made")
    if redone := run.get("redone_bytes"):
        done = numbered(len(run["losses"]), "step")
        lines.append(
            f"of this {_gigabytes(redone)} were written under backward and dropped: "
            f"{run.get('steps_redone')} of {done} made again"
        )
    return lines


def wear_a_day(num_bytes: float) -> str:
    """A sentence on the bytes that would be written in a day."""
    lasts = _days(USUAL_TBW_BYTES / num_bytes)
    return (
        f"NVMe: {_gigabytes(num_bytes)} written a day; a drive of {USUAL_TBW_BYTES / 1e12:,.6g} "
        f"TBW would last {lasts}"
    )


def parse_tbw(text: str) -> int:
    """Reads what a drive may be written: "600TB", "600TBW", "1200" (TB). Raises ValueError."""
    size = text.strip().upper().removesuffix("W")
    try:
        num_bytes = parse_bytes(size if size.endswith("B") else f"{size}TB")
    except ValueError:
        num_bytes = 0
    if num_bytes < _LEAST_TBW_BYTES:
        raise ValueError(f"{text!r} is no drive's endurance; write its TBW, for example 600TB")
    return num_bytes


def _sentence(
    what: str, each: WrittenOnPath, num_steps: int, seconds: float, tbw_bytes: int | None
) -> str:
    written = each.written_bytes
    since_made = each.since_made_bytes
    said = f"{what}: {_gigabytes(written)} in this run"
    if num_steps and written:
        said += f", {_gigabytes(written / num_steps)} per step"
    if since_made is not None and since_made != written:
        said += f" ({_gigabytes(since_made)} since the store was made)"
    if not written:
        return f"{said}: no wear"
    if tbw_bytes is None:
        part = f"every {_PART_BYTES / 1e12:.0f} TB of a drive's TBW"
        lasts = f"are {_PART_BYTES * num_steps / written:,.0f} such steps" if num_steps else ""
        return f"{said}; {part} {lasts}" if lasts else said
    lives = [f"{_number(tbw_bytes / written)} such runs"]
    if num_steps:
        lives.append(f"{_number(tbw_bytes * num_steps / written)} steps")
    if seconds > 0:
        lives.append(f"{_days(tbw_bytes * seconds / written / DAY_S)} at this rate")
    return f"{said}; a drive of {tbw_bytes / 1e12:,.6g} TBW lasts {', '.join(lives)}"


def _gigabytes(num_bytes: float) -> str:
    """GB as drives count them: powers of 1000, three figures."""
    for unit, size in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if num_bytes >= size:
            value = num_bytes / size
            return f"{value:.{2 if value < 10 else 1 if value < 100 else 0}f} {unit}"
    return f"{num_bytes:.0f} B"


def _days(days: float) -> str:
    if days > _MANY_DAYS:
        return f"{days / _DAYS_OF_YEAR:,.1f} years"
    return f"{_number(days)} days"


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 10 else f"{value:.2g}"
