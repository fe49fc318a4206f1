"""Meeting: the wait with which ranks come together, in which those that were given different groups find each other.

    rank 0 waits among 0, 1, 2      rank 1 waits among 0, 1      each waits for the other, and neither will come

Whoever has waited for a while says in the rendezvous store among whom, as long as it waits. Two ranks that wait for each other
in different groups, seen twice in a row, will do so for ever: they say so where the others of their groups look, and all stop.
Whoever is only slow says nothing and is waited for.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any
from weakref import WeakKeyDictionary

import torch.distributed as dist

_LOOK_S = 1.0
_PREFIX = "tiermem/meeting"

# How often a group has met: the same number on all its ranks, which names one meeting.
_MET: WeakKeyDictionary[dist.ProcessGroup, int] = WeakKeyDictionary()


class OtherGroups(ValueError):
    """Ranks that work together were given different groups; the message says which."""


def meet(group: dist.ProcessGroup, work: Any, timeout_s: float) -> None:
    """Waits for a collective of gloo's that all ranks of a group begin with. Raises OtherGroups, RuntimeError."""
    meeting = _MET[group] = _MET.get(group, 0) + 1
    deadline = time.monotonic() + timeout_s
    look: _Look | None = None
    try:
        while True:
            left_s = deadline - time.monotonic()
            if _has_ended(work, min(_LOOK_S, max(left_s, 0.001)), is_last=left_s <= _LOOK_S):
                return
            look = look or _Look(group, meeting)
            look.again()
    except RuntimeError:
        (look or _Look(group, meeting)).raise_verdict()  # who has found it has closed the connections
        raise
    finally:
        if look is not None:
            look.end()


def _has_ended(work: Any, wait_s: float, is_last: bool) -> bool:
    """Waits for some time; raises what the collective failed with, or that the last wait was in vain."""
    try:
        work.wait(timedelta(seconds=wait_s))
    except RuntimeError:
        if is_last or work.is_completed():
            raise
        return False
    return True


class _Look:
    """What this rank says and reads while it waits in one meeting."""

    def __init__(self, group: dist.ProcessGroup, meeting: int) -> None:
        self._me = dist.get_rank()
        self._ranks = dist.get_process_group_ranks(group)
        self._store = dist.distributed_c10d._get_default_store()
        self._verdict = _verdict_of(meeting, self._ranks)
        self._before: list[tuple[int, str]] = []  # who waits for this rank elsewhere, seen in the look before
        self._said = json.dumps([meeting, self._ranks])
        self._say(lambda: self._store.set(f"{_PREFIX}/{self._me}", self._said))

    def again(self) -> None:
        """Raises OtherGroups when a rank waits for this one in another group, or another one of this group has found one."""
        found: list[tuple[int, str]] = []
        self._say(lambda: found.extend(self._waiting_elsewhere()))
        self.raise_verdict()
        twice = [each for each in found if each in self._before]
        self._before = found
        if twice:
            rank, said = twice[0]
            message = (
                f"ranks disagree: rank {self._me} shares the model among ranks {self._ranks} and rank {rank} among "
                f"{json.loads(said)[1]}, and each waits for the other. Give every rank of a group the same group or mesh"
            )
            self._say(lambda: self._store.set(self._verdict, message))
            self._say(lambda: self._store.set(_verdict_of(*json.loads(said)), message))
            raise OtherGroups(message)

    def raise_verdict(self) -> None:
        """Raises OtherGroups when another rank of this group has found one that waits elsewhere."""
        if self._store_has(self._verdict):
            raise OtherGroups(self._store.get(self._verdict).decode())

    def end(self) -> None:
        """This rank waits no more."""
        self._say(lambda: self._store.set(f"{_PREFIX}/{self._me}", ""))

    def _waiting_elsewhere(self) -> list[tuple[int, str]]:
        """The ranks of this group that wait for this rank in another group, with what they say."""
        found = []
        for rank in self._ranks:
            key = f"{_PREFIX}/{rank}"
            said = self._store.get(key).decode() if rank != self._me and self._store.check([key]) else ""
            ranks = json.loads(said)[1] if said else self._ranks
            if ranks != self._ranks and self._me in ranks:
                found.append((rank, said))
        return found

    def _store_has(self, key: str) -> bool:
        try:
            return bool(self._store.check([key]))
        except RuntimeError:
            return False

    def _say(self, call: Callable[[], object]) -> None:
        try:
            call()
        except RuntimeError:
            return  # nobody can be told: the store is gone, and the wait will fail


def _verdict_of(meeting: int, ranks: list[int]) -> str:
    """The key of what was found about a meeting of some ranks."""
    return f"{_PREFIX}/{'-'.join(map(str, ranks))}/{meeting}"
