"""Forked: children of the test process that do something and are killed, without the seconds that
an import of torch takes."""

from __future__ import annotations

import os
import signal
import sys
import traceback
from collections.abc import Callable
from typing import NamedTuple


class Forked(NamedTuple):
    """A child, and the pipes to and from it."""

    pid: int
    to: int
    answers: int

    def go(self) -> None:
        """Lets it out of one `Inside.wait`."""
        os.write(self.to, b".")

    def hear(self) -> str:
        """Its next word; empty when it has ended. Blocks."""
        found = b""
        while (byte := os.read(self.answers, 1)) not in (b"", b"\n"):
            found += byte
        return found.decode()

    def kill(self) -> int:
        """Kills it unless it has ended, and tells how it ended: the signal's number, negative, or
        its exit status."""
        if self.pid:
            os.kill(self.pid, signal.SIGKILL)
        return self.end()

    def end(self) -> int:
        """Waits for its end, and closes the pipes."""
        _, status = os.waitpid(self.pid, 0)
        os.close(self.to)
        os.close(self.answers)
        return os.waitstatus_to_exitcode(status)


class Inside(NamedTuple):
    """What the child has of its parent."""

    orders: int
    answers: int

    def wait(self) -> None:
        """Blocks until the parent says `go`."""
        os.read(self.orders, 1)

    def say(self, word: object) -> None:
        """A word for the parent's `hear`."""
        os.write(self.answers, f"{word}\n".encode())


def fork(body: Callable[[Inside], None]) -> Forked:
    """Runs the body in a child, which is killed at its end: nothing is closed in order. An
    exception exits with 1."""
    orders, to = os.pipe()
    answers, from_child = os.pipe()
    pid = os.fork()
    if pid:
        os.close(orders)
        os.close(from_child)
        return Forked(pid, to, answers)
    try:
        os.close(to)
        os.close(answers)
        body(Inside(orders, from_child))
        os.kill(os.getpid(), signal.SIGKILL)
    except BaseException:
        traceback.print_exc(file=sys.__stderr__)
    os._exit(1)
