"""Watch: ranks that have gone different ways find out while they wait for each other, long before the time-out.

    number    rank 0                 rank 1
        40    gathering layers.0     gathering layers.0
        41    gathering layers.1     gathering layers.2      <- here, for certain, whatever is slow

What ranks hand to collectives is one sequence, the same on all of them. A rank that has waited for a while posts the end of its
own in the rendezvous store and reads what others have posted; where one number has two names, the wait is ended and says so.
With equal names it goes on: somebody is slow. A wait costs two assignments; a thread looks now and then, and touches the store
only while there is something to wait for.

A wait of gloo's is ended by another one on the same connections that times out: that closes them, on the other ranks as well,
which then look for the difference in turn. Whoever fails ends its other waits like this: those it waits for may wait for it.
NCCL waits on the GPU, and its own watch ends them.
"""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Sequence
from datetime import timedelta
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from tiermem.zero.ranks.traffic import Traffic

_PATIENCE_S = 2.0  # before a wait is long
_LOOK_S = 1.0
_NOBODYS_TAG = 1 << 30  # of a message that nobody sends

# How many watches were started on a group: all ranks start the same ones in the same order, so that the number names one.
_STARTED: WeakKeyDictionary[dist.ProcessGroup, int] = WeakKeyDictionary()


class Watch:
    """Looks after the waits of one sharded model on this rank. Does nothing until it is started.

    Args:
        ranks: the global ranks that work together.
        traffic: what this rank has handed to collectives; calls of all its threads are one sequence.
    """

    def __init__(self, ranks: Sequence[int], traffic: Traffic) -> None:
        self._ranks = ranks
        self._me = dist.get_rank()
        self._traffic = traffic
        self._store = dist.distributed_c10d._get_default_store()
        self._groups: list[dist.ProcessGroup] = []
        self._key = ""
        self._waits_since = 0.0  # 0: nobody waits
        self._num_posted = -1
        self._is_closed = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self, group: dist.ProcessGroup, groups: Sequence[dist.ProcessGroup]) -> None:
        """Begins to look. Every rank of `group` starts its watches in the same order. Does not block.

        groups: those whose waits are ended when a difference is found.
        """
        number = _STARTED[group] = _STARTED.get(group, 0) + 1
        self._key = f"tiermem/watch/{'-'.join(map(str, self._ranks))}/{number}"
        self._groups = [each for each in groups if "cpu:gloo" in dist.get_backend_config(each)]
        if self._groups:
            self._thread = threading.Thread(target=self._run, name="tiermem watch", daemon=True)
            self._thread.start()

    def close(self) -> None:
        """Ends the looking. Safe to repeat; waits for the thread, which may be asking the store."""
        self._is_closed.set()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()

    def begin_wait(self) -> None:
        """This rank waits for others from now on."""
        self._waits_since = time.monotonic()

    def end_wait(self) -> None:
        """It waits no more."""
        self._waits_since = 0.0

    def end_waits(self) -> None:
        """Ends what this rank still waits for, and what waits for it, once something has failed. Safe to repeat."""
        with contextlib.suppress(RuntimeError):  # the store is gone
            self._post()
        for group in self._groups:
            for rank in set(range(group.size())) - {group.rank()}:  # one that is connected still is enough
                with contextlib.suppress(RuntimeError):  # which is what it is for
                    group.recv([torch.zeros(1)], rank, _NOBODYS_TAG).wait(timedelta(milliseconds=1))

    def difference(self) -> str | None:
        """Where the ranks that wait, or have waited, went different ways, as far as this one can see; None: nowhere.

        Posts this rank's own end of the sequence first. Asks the store; does not wait for anybody.
        """
        if not self._key:
            return None
        try:
            self._post()
            said = {rank: self._posted_by(rank) for rank in self._ranks if rank != self._me}
        except RuntimeError:
            return None  # the store is gone, and a rank with it
        said[self._me] = self._traffic.newest()
        return _difference({rank: calls for rank, calls in sorted(said.items()) if calls})

    def _run(self) -> None:
        while not self._is_closed.wait(_LOOK_S):
            since = self._waits_since
            is_long = since > 0 and time.monotonic() - since > _PATIENCE_S
            if is_long and self.difference() is not None:
                self.end_waits()
                return

    def _post(self) -> None:
        if not self._key:
            return
        newest = self._traffic.newest()
        if max(newest, default=0) != self._num_posted:
            self._num_posted = max(newest, default=0)
            self._store.set(f"{self._key}/{self._me}", json.dumps(newest))

    def _posted_by(self, rank: int) -> dict[int, str]:
        key = f"{self._key}/{rank}"
        said = json.loads(self._store.get(key)) if self._store.check([key]) else {}
        return {int(number): what for number, what in said.items()}


def _difference(said: dict[int, dict[int, str]]) -> str | None:
    """The first number that has two names, in a sentence."""
    for number in sorted({number for calls in said.values() for number in calls}):
        named = {rank: calls[number] for rank, calls in said.items() if number in calls}
        first = next(iter(named))
        for rank, what in named.items():
            if what != named[first]:
                return (
                    f"ranks have gone different ways: number {number} of what they do together is {named[first]!r} on rank "
                    f"{first} and {what!r} on rank {rank}. Every rank has to use the same modules in the same order; where "
                    "that depends on data, have them fetched as one (tiermem.utils.set_z3_leaf_modules)"
                )
    return None
