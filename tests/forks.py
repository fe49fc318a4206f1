"""Forks: something done in a process of its own that has imported everything already."""

from __future__ import annotations

import contextlib
import gc
import os
import socket
import sys
import traceback
from collections.abc import Callable
from pathlib import Path

RAISED = 99
"""The exit status of a fork that ended with an exception; its trace is in what it printed."""


def forked(act: Callable[[], int | None], printed: Path | None = None) -> int:
    """Starts a fork that does something and ends with what that returns (None: 0). Returns its
    process id at once.

    printed: gets its output; default: where this process prints to.
    """
    pid = os.fork()
    if pid:
        return pid
    gc.freeze()  # a collection would walk through all that was imported, and copy its pages
    status = RAISED
    try:
        if printed is not None:
            out = os.open(printed, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            os.dup2(out, 1)
            os.dup2(out, 2)
        status = act() or 0
    except SystemExit as end:
        status = int(end.code or 0)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(status)


def free_port() -> int:
    """One that nobody is given unasked, so that no other run's connections get it meanwhile: below
    those of the kernel."""
    for _ in range(100):
        port = 12000 + (int.from_bytes(os.urandom(2), "little") % 16000)
        with socket.socket() as server:
            server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            with contextlib.suppress(OSError):
                server.bind(("127.0.0.1", port))
                return port
    raise RuntimeError("no free port was found")
