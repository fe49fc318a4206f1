"""The machine's events for Linux AIO (fs.aio-max-nr): one test takes all of them, and others may
not find none meanwhile."""

from __future__ import annotations

import fcntl
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def aio_events(takes_all: bool = False) -> Iterator[None]:
    """Waits until no other process has taken all events, or, to take all, until no other test uses
    some."""
    with (Path(tempfile.gettempdir()) / "tiermem-tests-aio-events").open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX if takes_all else fcntl.LOCK_SH)
        yield
