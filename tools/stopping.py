"""Stopping: SIGTERM unwinds as Ctrl-C does, so that what a command has made is removed on either way out."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator


@contextlib.contextmanager
def stopped_by_sigterm() -> Iterator[None]:
    """Within: SIGTERM raises KeyboardInterrupt. Elsewhere than in the main thread nothing changes."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
