"""Endurance: bytes written to each path, and what they mean for a drive that may be written so much (its TBW).

    written to /mnt/nvme0: 12.3 GB in this run, 1.23 GB per step; a drive of 600 TBW lasts 48,780 such runs, ...

TBW is in the drive's data sheet, in units of 10**12 bytes. What the drive itself adds by moving data around inside is not
counted: the vendor's figure allows for it. Paths are taken for drives of their own; whether two share one is not looked up,
so their sum is given as well.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from tiermem.tools.byte_size import parse_bytes

_PART_BYTES = 100 * 10**12  # of a drive's TBW that is spoken of when none is given
_LEAST_TBW_BYTES = 10**9  # less is a slip: 600 MB for 600 TB
_DAY_S = 86_400.0
_DAYS_OF_YEAR = 365.25
_MANY_DAYS = 1000


class PathWrites(Protocol):
    """What is read of a PathStats: a folder, and the bytes written to it."""

    @property
    def path(self) -> Path: ...

    @property
    def written_bytes(self) -> int: ...


class Written(NamedTuple):
    """PathWrites that came over a channel, or several paths as one."""

    path: Path
    written_bytes: int


def endurance_lines(
    paths: Sequence[PathWrites],
    num_steps: int,
    seconds: float,
    tbw_bytes: int | None = None,
    since_made: Mapping[Path, int] | None = None,
) -> list[str]:
    """One sentence per path, and one for their sum when there are several. Empty when no path was in use.

    Args:
        paths: what was written in this run.
        num_steps: optimizer steps in which that happened; 0 leaves figures per step out.
        seconds: how long it took; 0 leaves the days out.
        tbw_bytes: what the drive may be written in its life; None: 100 TB are spoken of.
        since_made: bytes written since the store was made, by path, where that is more than this run's.
    """
    older = since_made or {}
    lines = [
        _sentence(f"written to {each.path}", each.written_bytes, num_steps, seconds, tbw_bytes, older.get(each.path))
        for each in paths
    ]
    if sum(each.written_bytes > 0 for each in paths) > 1:
        total = sum(each.written_bytes for each in paths)
        lines.append(_sentence("all of it, if the paths share one drive", total, num_steps, seconds, tbw_bytes, None))
    return lines


def lines_of_run(run: Mapping[str, Any], tbw_bytes: int | None = None) -> list[str]:
    """The same for a run of `tiermem train` as saved: its training alone, and beside it the building of the model."""
    paths = [Written(Path(each["path"]), each["written_bytes"]) for each in run.get("paths", [])]
    since_made = {Path(each["path"]): each["since_made_bytes"] for each in run.get("paths", [])}
    return endurance_lines(paths, len(run["losses"]), run.get("training_s", 0.0), tbw_bytes, since_made)


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
    what: str, written: int, num_steps: int, seconds: float, tbw_bytes: int | None, since_made: int | None
) -> str:
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
        lives.append(f"{_days(tbw_bytes * seconds / written / _DAY_S)} at this rate")
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
