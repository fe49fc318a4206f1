"""Channel: what a capped process tells its launcher, one JSON object a line, over an inherited pipe.

    {"kind": "phase", "name": "forward of step 3", "time_ns": ...}      before the work begins: names a death
    {"kind": "step", "loss": ..., ...}                                   after each step
    {"kind": "error", "type": "ValueError", "message": ..., "trace": ...}
    {"kind": "done", ...}

A pipe, not a file: it costs the writer no page of cache and no byte of I/O, and what was written survives the writer's
death. A launcher that is gone shows as BrokenPipeError, so that no trainer outlives it by more than a phase.
"""

from __future__ import annotations

import json
import os
import time
from typing import Any

Message = dict[str, Any]


class Channel:
    """The writing end. `fd` is inherited; None sends nowhere (a trainer run by hand)."""

    def __init__(self, fd: int | None) -> None:
        self._fd = fd
        self.phase_name = "start"
        """What is under way."""

    def send(self, kind: str, **fields: Any) -> None:
        """Writes one message; blocks only while the launcher is 64 KiB behind."""
        if self._fd is None:
            return
        line = json.dumps({"kind": kind, "time_ns": time.monotonic_ns(), **fields}).encode() + b"\n"
        while line:
            line = line[os.write(self._fd, line) :]

    def phase(self, name: str, **fields: Any) -> None:
        """Says what begins now."""
        self.phase_name = name
        self.send("phase", name=name, **fields)


class LineReader:
    """The reading end of a pipe, line by line, never blocking."""

    def __init__(self, fd: int) -> None:
        os.set_blocking(fd, False)
        self.fd = fd
        self.is_open = True
        self._rest = b""

    def lines(self) -> list[str]:
        """Complete lines that have arrived; at the end of the pipe, what is left as well."""
        try:
            while chunk := os.read(self.fd, 65536):
                self._rest += chunk
        except BlockingIOError:
            pass
        else:
            self.is_open = False
        *complete, self._rest = self._rest.split(b"\n")
        if not self.is_open and self._rest:
            complete.append(self._rest)
            self._rest = b""
        return [line.decode(errors="replace") for line in complete]
