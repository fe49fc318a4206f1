"""Lies: what a test holds of the lying disk that runs beside it (lying_disk.py)."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path


class Lies:
    """Where the disk is mounted, and how it is told what to do."""

    def __init__(self, point: Path, process: subprocess.Popen[str]) -> None:
        self.point = point
        self.process = process

    def tell(self, *rules: dict[str, object]) -> None:
        """Replaces all rules."""
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write(json.dumps(rules) + "\n")
        self.process.stdin.flush()
        assert self.process.stdout.readline() == "ok\n"
