"""Ranks: the processes that measure, started once and told Jobs; all that take part begin at one moment.

A rank that dies, or a benchmark that is interrupted, leaves none behind and no store's folder.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from pathlib import Path
from typing import Any, NamedTuple

from tiermem.tools.sweep_job import Failed, Job, Outcome

_START_IN_S = 0.002  # from the word to the start: enough for every rank to have heard it
_STOP_S = 20.0


class CannotRun(Exception):
    """A job that no rank can prepare, with the reason: the engine cannot run here, or memory is missing."""


class Ranks:
    """Processes of one benchmark. A context manager.

    Args:
        num_ranks: how many; each imports what it needs while the others do.
        folders: where a rank that is killed may leave a store's folder.
    """

    def __init__(self, num_ranks: int, folders: Sequence[Path] = ()) -> None:
        self._folders = folders
        self._ranks: list[_Rank] = []
        try:
            with _deaf_to_interrupts():
                for number in range(num_ranks):
                    self._ranks.append(_start(number))
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def run(self, jobs: Sequence[Job]) -> list[Outcome]:
        """Does a job on each of the first ranks, together. Blocks.

        Raises CannotRun, then nothing was moved; OSError when a transfer failed or a rank died.
        """
        taking_part = self._ranks[: len(jobs)]
        for rank, job in zip(taking_part, jobs, strict=True):
            with contextlib.suppress(BrokenPipeError):  # it died: hearing from it says so
                rank.connection.send(job)
        answers = [_hear(rank) for rank in taking_part]
        refusals = [answer for answer in answers if isinstance(answer, Failed)]
        start_s = None if refusals else time.monotonic() + _START_IN_S
        for rank, answer in zip(taking_part, answers, strict=True):
            if not isinstance(answer, Failed):
                rank.connection.send(start_s)
        if refusals:
            raise CannotRun(refusals[0].message)
        outcomes = [_hear(rank) for rank in taking_part]
        for outcome in outcomes:
            if isinstance(outcome, Failed):
                raise OSError(outcome.errno, outcome.message) if outcome.errno else OSError(outcome.message)
        return outcomes

    def close(self) -> None:
        """Ends every process, in order where it can be had, and removes what a killed one left."""
        for rank in self._ranks:
            rank.connection.close()
            if rank.process.is_alive():
                rank.process.terminate()
        for rank in self._ranks:
            rank.process.join(_STOP_S)
            if rank.process.is_alive():
                rank.process.kill()
                rank.process.join()
            self._remove_left(rank.process.pid)
            rank.process.close()
        self._ranks.clear()

    def _remove_left(self, pid: int | None) -> None:
        from tiermem.swap.run_folder import remove_dead_runs

        for folder in self._folders:
            if pid is not None:
                remove_dead_runs(folder, pid)


class _Rank(NamedTuple):
    process: SpawnProcess
    connection: Connection


def _start(number: int) -> _Rank:
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_serve, args=(theirs,), name=f"rank {number}", daemon=True)
    process.start()
    theirs.close()
    return _Rank(process, ours)


def _serve(connection: Connection) -> None:
    from tiermem.tools.sweep_rank import serve  # imports torch: in the ranks alone

    serve(connection)


def _hear(rank: _Rank) -> Any:
    try:
        return rank.connection.recv()
    except (EOFError, ConnectionResetError):
        rank.process.join(_STOP_S)
        raise OSError(f"{rank.process.name} ended with status {rank.process.exitcode}") from None


@contextlib.contextmanager
def _deaf_to_interrupts() -> Iterator[None]:
    """Within: processes are started that Ctrl-C does not reach, not even while Python starts in them."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
