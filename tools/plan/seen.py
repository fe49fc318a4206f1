"""Seen: what runs took from their disks, kept beside the result of `tiermem tune`, and the rates
that follow from it.

    train --tuned tiermem.json    a run that its disks have limited adds {"date", "read_bytes", "written_bytes", "disk_s"}
    plan --rates tiermem.json     the measured rates, times the median of (seconds that they predict / seconds seen)

A record is of an iteration: bytes read and written, and the seconds for which a transfer was under
way. Where something else limits, the disk waits between transfers, and its seconds say nothing.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tiermem.tools.words import save_json

_MOST_RECORDS = 20
_MADE_BY = "tiermem tune"


def record_of(run: Mapping[str, Any]) -> dict[str, Any] | None:
    """What a run, as saved, has seen of its disks; None where they did not limit it, or it was too
    short to tell."""
    moved = run.get("nvme_read_bytes_a_step"), run.get("nvme_written_bytes_a_step")
    if run.get("limited_by") != "disk" or None in moved or run.get("error") or not any(moved):
        return None
    return {
        "date": run["date"],
        "read_bytes": moved[0],
        "written_bytes": moved[1],
        "disk_s": run["limits_s"]["disk"],
    }


def keep_record(file: Path, run: Mapping[str, Any]) -> bool:
    """Adds a run's record to what `tiermem tune` wrote, and drops the oldest above twenty. Returns
    whether it did.

    A file that holds other content is the user's and stays as it is. Raises OSError, and ValueError
    for a file that was damaged since the run began.
    """
    record = record_of(run)
    content = json.loads(file.read_text(encoding="utf-8"))
    try:
        measured = (content.get("tiermem") or {}).get("measured") or {}
        if record is None or measured.get("made_by") != _MADE_BY:
            return False
        measured["runs"] = [*measured.get("runs", []), record][-_MOST_RECORDS:]
    except (AttributeError, TypeError):
        raise ValueError("it does not hold what `tiermem tune` writes") from None
    save_json(file, content)
    return True


def pace_of(
    records: list[Mapping[str, float]], read_bytes_s: float, write_bytes_s: float, is_duplex: bool
) -> float:
    """How fast the disks were in runs, relative to these rates: the median; 1 without a record."""
    paces = []
    for record in records:
        ways = record["read_bytes"] / read_bytes_s, record["written_bytes"] / write_bytes_s
        paces.append((max(ways) if is_duplex else sum(ways)) / record["disk_s"])
    return statistics.median(paces) if paces else 1.0
