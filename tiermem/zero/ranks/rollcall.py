"""Roll call: which rank is gone, when a collective has failed.

A backend only reports that a connection was closed, and closes its own in turn, so that the rank that really stopped drowns
in errors of its neighbours. So every rank says in the rendezvous store where it runs (host, process), and whoever fails asks

    1  whether another rank has named the lost one already (it posts what it found)
    2  whether a process of its own host is no longer alive
    3  whether a rank has never said where it runs

for a few seconds, and raises with the answer. When nobody is gone it says who did not come: whoever waits in vain says so,
and for what. torchrun's store belongs to its agent and outlives ranks. A store that rank 0 keeps goes with it, which is an
answer too; so a rank 0 that has its answer stays until the others have theirs: they would take it for the one that is gone.
"""

from __future__ import annotations

import json
import os
import socket
import time
from pathlib import Path
from typing import Any

import torch.distributed as dist

_GRACE_S = 10.0
_PREFIX = "tiermem/rank"


class RankLost(RuntimeError):
    """A collective failed; the message names the rank that is gone, or says that all are there."""


class RanksDiffer(RankLost):
    """Ranks have gone different ways and would wait for each other; the message says where (watch.py)."""


class RollCall:
    """This rank's entry in the rendezvous store, and the look at everybody's when something fails.

    Args:
        ranks: the global ranks that work together.
    """

    def __init__(self, ranks: list[int]) -> None:
        self._ranks = ranks
        self._me = dist.get_rank()
        self._store = dist.distributed_c10d._get_default_store()
        self._store.set(f"{_PREFIX}/{self._me}", json.dumps(_this_process()))
        self._known: dict[int, tuple[str, int, str]] = {}  # what others said, read while the store lives

    def meet(self) -> None:
        """Remembers where every rank runs. To be called when all have come: after a collective. Raises RankLost."""
        if len(self._known) == len(self._ranks):
            return
        try:
            self._known = {rank: tuple(json.loads(self._store.get(f"{_PREFIX}/{rank}"))) for rank in self._ranks}
        except RuntimeError as error:
            raise self.explain("the roll call", error) from error

    def explain(self, what: str, error: Exception) -> RankLost:
        """The error to raise when a collective has failed; asks around for a few seconds."""
        self._say_waiting(what)
        lost, deadline = self._lost(), time.monotonic() + _GRACE_S
        while not lost and time.monotonic() < deadline:
            time.sleep(0.05)
            lost = self._lost()
        lost = lost or self._absent()
        if not lost:
            return RankLost(
                f"{what} failed on rank {self._me}, though every rank that can be seen from here is alive: {error}. "
                f"{self._who_stays_away(what)}Ranks may have gone different ways (another batch, another branch), or one was "
                "slower than timeout_s"
            )
        names = ", ".join(f"rank {rank}{self._place(rank)}" for rank in sorted(lost))
        self._post(lost)
        return RankLost(f"{what} cannot go on: {names} is gone. Its own output says why. (On rank {self._me}: {error})")

    def outlive(self, since: float) -> None:
        """Says that this rank has its answer; if it keeps the store, waits until all who are alive have one too.

        Args:
            since: when this rank began to ask (`time.monotonic()`). It waits no longer than it asks for.
        """
        try:
            self._store.set(self._answered(self._me), "")
            others = [rank for rank in self._ranks if rank != self._me]
            while self._me == 0 and not _is_agents_store() and time.monotonic() < since + _GRACE_S:
                if all(self._store.check([self._answered(rank)]) for rank in set(others) - self._lost()):
                    return
                time.sleep(0.05)
        except RuntimeError:
            return  # the store is gone

    @staticmethod
    def _answered(rank: int) -> str:
        return f"{_PREFIX}/{rank}/answered"

    def _who_stays_away(self, what: str) -> str:
        """What the ranks that are alive do instead, as far as they have said: those that wait say for what."""
        said = {rank: self._waits_for(rank) for rank in self._ranks if rank != self._me}
        absent = [f"rank {rank}{self._place(rank)}" for rank, other in said.items() if other is None]
        elsewhere = [f"rank {rank} waits in {other!r}" for rank, other in said.items() if other not in (None, what)]
        missing = [f"{', '.join(absent)} did not come to it, nor to anything else that failed"] if absent else []
        return "".join(f"{sentence[0].upper()}{sentence[1:]}. " for sentence in (*missing, *elsewhere))

    def _say_waiting(self, what: str) -> None:
        try:
            self._store.set(f"{_PREFIX}/{self._me}/waits", what)
        except RuntimeError:
            return  # nobody can be told: the store is gone

    def _waits_for(self, rank: int) -> str | None:
        """What a rank that has failed was waiting for; None when it has not."""
        key = f"{_PREFIX}/{rank}/waits"
        try:
            return self._store.get(key).decode() if self._store.check([key]) else None
        except RuntimeError:
            return None

    def _hear(self) -> None:
        """Takes note of where ranks run that have said so since, or before all could meet."""
        for rank in set(self._ranks) - set(self._known):
            key = f"{_PREFIX}/{rank}"
            try:
                if self._store.check([key]):
                    self._known[rank] = tuple(json.loads(self._store.get(key)))
            except RuntimeError:
                return  # the store is gone

    def _lost(self) -> set[int]:
        self._hear()
        lost = {rank for rank, (host, pid, started) in self._known.items() if _has_died(host, pid, started)}
        try:
            for rank in self._ranks:
                key = f"{_PREFIX}/{rank}/lost"
                if rank != self._me and self._store.check([key]):
                    lost |= set(json.loads(self._store.get(key)))
        except RuntimeError:
            return lost or ({0} if self._me != 0 and not _is_agents_store() else set())  # rank 0 kept the store
        return lost

    def _absent(self) -> set[int]:
        """Ranks that never said where they run: they stopped before, or run something else."""
        try:
            return {rank for rank in self._ranks if not self._store.check([f"{_PREFIX}/{rank}"])}
        except RuntimeError:
            return set()

    def _post(self, lost: set[int]) -> None:
        try:
            self._store.set(f"{_PREFIX}/{self._me}/lost", json.dumps(sorted(lost)))
        except RuntimeError:
            return  # nobody can be told: the store is gone

    def _place(self, rank: int) -> str:
        known = self._known.get(rank)
        return f" (process {known[1]} on {known[0]})" if known else " (which has not come here)"


def _this_process() -> tuple[str, int, str]:
    return socket.gethostname(), os.getpid(), _start_of(os.getpid())


def _has_died(host: str, pid: int, started: str) -> bool:
    """Whether a process of this host is gone, a zombie, or another one by now; False for other hosts."""
    if host != socket.gethostname():
        return False
    return _start_of(pid) != started


def _start_of(pid: int) -> str:
    """When a process started, in the kernel's clock ticks; empty for one that runs no more."""
    try:
        fields: list[Any] = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return ""
    return "" if fields[0] in ("Z", "X") else str(fields[19])


def _is_agents_store() -> bool:
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
