"""Harness: runs one of this folder's scripts, each of which goes through many cases and counts
them."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import fork_server

HERE = Path(__file__).parent


def totals_of(script: str, folder: Path, *words: str, name: str = "") -> dict[str, Any]:
    """What a script counted; TIERMEM_SOAK_TOTALS names a folder that keeps it, under a name."""
    keep = os.environ.get("TIERMEM_SOAK_TOTALS")
    totals = (Path(keep) if keep else folder) / f"{name or Path(script).stem}.json"
    done = fork_server.run(
        [str(HERE / script), str(folder / "runs"), "--totals", str(totals), *words]
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-6000:]
    found: dict[str, Any] = json.loads(totals.read_text())
    return found
