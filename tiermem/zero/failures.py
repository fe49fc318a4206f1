"""Failures of ranks: which rank is gone, which one went another way, and how waiting ranks find out before the time-out."""

from __future__ import annotations

import collections
import contextlib
import json
import os
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

# ---- Traffic: what this rank has handed to collectives, call by call. Tests and reports count payloads with it -------

_NUM_COMPARED = 100


class Payload(NamedTuple):
    """One call of a collective."""

    op: str
    """Its name in torch.distributed, such as "all_gather_into_tensor"."""
    what: str
    """What it was for, such as "gathering layers.3"."""
    num_bytes: int
    """Bytes of the larger side: what an all-gather fills, what a reduce-scatter takes, what an all-reduce adds up."""
    among: str = "world"
    """Which ranks took part: "world" (all), "shard", "replica", "across" or "within" (topology.py)."""


class Traffic:
    """The newest payloads; the oldest are forgotten, so that memory stays bounded.

    Args:
        max_calls: how many are kept.
    """

    def __init__(self, max_calls: int = 50_000) -> None:
        self.payloads: collections.deque[Payload] = collections.deque(maxlen=max_calls)
        self._num_calls = 0  # ever
        self._newest: collections.deque[tuple[int, str, str]] = collections.deque(maxlen=_NUM_COMPARED)

    def add(self, op: str, what: str, num_bytes: int, among: str = "world") -> None:
        """Notes one call."""
        self.payloads.append(Payload(op, what, num_bytes, among))
        self._num_calls += 1
        self._newest.append((self._num_calls, op, what))

    def newest(self) -> dict[int, str]:
        """The newest calls by number, counted from 1 since the beginning: on all ranks the same (failures.py)."""
        return {number: f"{what} ({op})" for number, op, what in list(self._newest)}

    def bytes_of(self, what: str) -> int:
        """Bytes of all payloads whose purpose begins with `what`."""
        return sum(payload.num_bytes for payload in self.payloads if payload.what.startswith(what))


# ---- Board: what ranks tell each other in the rendezvous store -------------------------------------------------------


class Board:
    """Notes of all ranks, as JSON, in the rendezvous store.

    torchrun's store belongs to its agent and outlives ranks. A store that rank 0 keeps goes with it: then nothing can be posted
    or read any more, and `is_gone` says so.
    """

    def __init__(self) -> None:
        self.is_gone = False
        self._store = dist.distributed_c10d._get_default_store()

    @property
    def is_kept_by_rank_0(self) -> bool:
        """Whether the store ends with rank 0."""
        return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"

    def post(self, key: str, note: Any) -> None:
        """Writes a note; another one under the same key is replaced."""
        with self._noticing():
            self._store.set(f"tiermem/{key}", json.dumps(note))

    def read(self, key: str) -> Any:
        """A note, or None where there is none. Does not wait for one."""
        with self._noticing():
            if self._store.check([f"tiermem/{key}"]):
                return self.wait(key)
        return None

    def wait(self, key: str) -> Any:
        """A note, once it is there. Blocks; raises RuntimeError."""
        return json.loads(self._store.get(f"tiermem/{key}"))

    @contextlib.contextmanager
    def _noticing(self) -> Iterator[None]:
        try:
            yield
        except RuntimeError:
            self.is_gone = True


# ---- Watch: what has become of the ranks that this one waits for -----------------------------------------------------

_GRACE_S = 10.0
_PATIENCE_S = 2.0  # before a wait is long
_LOOK_S = 1.0
_UNUSED_TAG = 1 << 30  # of a message that no rank sends

# How many watches were started on a group: all ranks start the same ones in the same order, so that the number names one.
_STARTED: WeakKeyDictionary[dist.ProcessGroup, int] = WeakKeyDictionary()


class RankLost(RuntimeError):
    """A collective failed; the message names the rank that is gone, or says that all are there."""


class RanksDiffer(RankLost):
    """Ranks have gone different ways and would wait for each other; the message says where."""


class Watch:
    """Looks after this rank's waits for others, and finds out why one has failed.

    A rank that is gone. A backend only reports that a connection was closed, and closes its own in turn, so that the rank that
    really stopped drowns in errors of its neighbours. So every rank posts where it runs (host, process), and a rank whose
    collective has failed looks for a few seconds:

        1  whether another rank has named the lost one already (it posts what it found)
        2  whether a process of its own host is no longer alive
        3  whether a rank has never posted where it runs

    When no rank is gone the error says which one did not come: a rank whose wait failed posts what it waited for. A store that
    rank 0 keeps goes with it, which is an answer too; so a rank 0 that has its answer stays until the others have theirs, which
    would otherwise take it for the one that is gone.

    Ranks that have gone different ways find out while they wait for each other, long before the time-out:

        number    rank 0                 rank 1
            40    gathering layers.0     gathering layers.0
            41    gathering layers.1     gathering layers.2      <- here, for certain, whatever is slow

    What ranks hand to collectives is one sequence, the same on all of them. A rank that has waited for a while posts the end of
    its own and reads those of the others; where one number has two names, the wait is ended and says so. With equal names it
    goes on: a rank is slow. A wait costs two assignments; a thread looks now and then, and touches the store only while there
    is something to wait for.

    A wait of gloo's is ended by another one on the same connections that times out: that closes them, on the other ranks as
    well, which then look for the difference in turn. A rank that fails ends its other waits like this: the ranks that it waits
    for may wait for it. NCCL waits on the GPU, and its own watch ends them.

    Args:
        ranks: the global ranks that work together.
        traffic: what this rank has handed to collectives; calls of all its threads are one sequence.
    """

    def __init__(self, ranks: Sequence[int], traffic: Traffic) -> None:
        self._ranks = ranks
        self._me = dist.get_rank()
        self._others = [rank for rank in ranks if rank != self._me]
        self._traffic = traffic
        self._board = Board()
        self._board.post(f"rank/{self._me}", _this_process())
        self._known: dict[int, tuple[str, int, str]] = {}  # where ranks run, read while the store lives
        self._groups: list[dist.ProcessGroup] = []
        self._key = ""  # of the sequences; empty until the watch is started
        self._waits_since = 0.0  # 0: this rank does not wait
        self._num_posted = -1
        self._is_closed = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self, group: dist.ProcessGroup, groups: Sequence[dist.ProcessGroup]) -> None:
        """Begins to look at waits. Every rank of `group` starts its watches in the same order. Does not block.

        groups: those whose waits are ended when a difference is found.
        """
        number = _STARTED[group] = _STARTED.get(group, 0) + 1
        self._key = f"watch/{'-'.join(map(str, self._ranks))}/{number}"
        self._groups = [each for each in groups if "cpu:gloo" in dist.get_backend_config(each)]
        if self._groups:
            self._thread = threading.Thread(target=self._run, name="tiermem watch", daemon=True)
            self._thread.start()

    def close(self) -> None:
        """Ends the looking. Safe to repeat; waits for the thread, which may be asking the store."""
        self._is_closed.set()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()

    def meet(self) -> None:
        """Remembers where every rank runs. To be called when all have come: after a collective. Raises RankLost."""
        if len(self._known) == len(self._ranks):
            return
        try:
            self._known = {rank: self._board.wait(f"rank/{rank}") for rank in self._ranks}
        except RuntimeError as error:
            raise self._explain_loss("the roll call", error) from error

    def begin_wait(self) -> None:
        """This rank waits for others from now on."""
        self._waits_since = time.monotonic()

    def end_wait(self) -> None:
        """It waits no more."""
        self._waits_since = 0.0

    def end_waits(self) -> None:
        """Ends what this rank still waits for, and what waits for it, once something has failed. Safe to repeat."""
        self._post_newest()
        for group in self._groups:
            for rank in set(range(group.size())) - {group.rank()}:  # one that is connected still is enough
                with contextlib.suppress(RuntimeError):  # the time-out, which is what it is for
                    group.recv([torch.zeros(1)], rank, _UNUSED_TAG).wait(timedelta(milliseconds=1))

    def explain(self, what: str, error: Exception) -> RankLost:
        """The error to raise when a collective has failed: where ranks differ, or which is gone. Takes a few seconds."""
        since = time.monotonic()
        difference = self.difference()
        if difference is not None:
            found: RankLost = RanksDiffer(f"{what} cannot go on: {difference}")
        else:
            found = self._explain_loss(what, error)
        self.end_waits()
        self.outlive(since)
        return found

    def outlive(self, since: float) -> None:
        """Posts that this rank has its answer; if it keeps the store, waits until all who are alive have one too.

        Args:
            since: when this rank began to ask (`time.monotonic()`). It waits no longer than it asks for.
        """
        self._board.post(f"rank/{self._me}/answered", True)
        is_keeper = self._me == 0 and self._board.is_kept_by_rank_0
        while is_keeper and not self._board.is_gone and time.monotonic() < since + _GRACE_S:
            if all(self._board.read(f"rank/{rank}/answered") for rank in set(self._others) - self._lost()):
                return
            time.sleep(0.05)

    # ---- a rank that is gone -----------------------------------------------------------------------------------------

    def _explain_loss(self, what: str, error: Exception) -> RankLost:
        self._board.post(f"rank/{self._me}/waits", what)
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
        self._board.post(f"rank/{self._me}/lost", sorted(lost))
        return RankLost(f"{what} cannot go on: {names} is gone. Its own output says why. (On rank {self._me}: {error})")

    def _lost(self) -> set[int]:
        for rank in set(self._ranks) - set(self._known):  # which may have posted since
            place = self._board.read(f"rank/{rank}")
            if place is not None:
                self._known[rank] = place
        lost = {rank for rank, place in self._known.items() if _has_died(*place)}
        for rank in self._others:
            lost.update(self._board.read(f"rank/{rank}/lost") or ())
        if not lost and self._me != 0 and self._board.is_gone and self._board.is_kept_by_rank_0:
            return {0}
        return lost

    def _absent(self) -> set[int]:
        """Ranks that never posted where they run: they stopped before, or run something else."""
        absent = {rank for rank in self._ranks if self._board.read(f"rank/{rank}") is None}
        return set() if self._board.is_gone else absent

    def _who_stays_away(self, what: str) -> str:
        """What the ranks that are alive do instead, as far as they have posted it: those whose wait failed say for what."""
        waits = {rank: self._board.read(f"rank/{rank}/waits") for rank in self._others}
        absent = [f"rank {rank}{self._place(rank)}" for rank, other in waits.items() if other is None]
        elsewhere = [f"rank {rank} waits in {other!r}" for rank, other in waits.items() if other not in (None, what)]
        missing = [f"{', '.join(absent)} did not come to it, nor to anything else that failed"] if absent else []
        return "".join(f"{sentence[0].upper()}{sentence[1:]}. " for sentence in (*missing, *elsewhere))

    def _place(self, rank: int) -> str:
        known = self._known.get(rank)
        return f" (process {known[1]} on {known[0]})" if known else " (which has not come here)"

    # ---- ranks that differ -------------------------------------------------------------------------------------------

    def difference(self) -> str | None:
        """Where the ranks that wait, or have waited, went different ways, as far as this one can see; None: nowhere.

        Posts this rank's own end of the sequence first. Asks the store; does not wait for any rank.
        """
        if not self._key:
            return None
        self._post_newest()
        posted = {rank: self._board.read(f"{self._key}/{rank}") or {} for rank in self._others}
        if self._board.is_gone:
            return None
        sequences = {rank: {int(number): what for number, what in calls.items()} for rank, calls in posted.items()}
        sequences[self._me] = self._traffic.newest()
        return _difference({rank: calls for rank, calls in sorted(sequences.items()) if calls})

    def _run(self) -> None:
        while not self._is_closed.wait(_LOOK_S):
            since = self._waits_since
            is_long = since > 0 and time.monotonic() - since > _PATIENCE_S
            if is_long and self.difference() is not None:
                self.end_waits()
                return

    def _post_newest(self) -> None:
        newest = self._traffic.newest()
        if self._key and max(newest, default=0) != self._num_posted:
            self._num_posted = max(newest, default=0)
            self._board.post(f"{self._key}/{self._me}", newest)


def _this_process() -> tuple[str, int, str]:
    return socket.gethostname(), os.getpid(), _start_of(os.getpid())


def _has_died(host: str, pid: int, started: str) -> bool:
    """Whether a process of this host is gone, a zombie, or another one by now; False for other hosts."""
    return host == socket.gethostname() and _start_of(pid) != started


def _start_of(pid: int) -> str:
    """When a process started, in the kernel's clock ticks; empty for one that runs no more."""
    try:
        fields: list[Any] = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return ""
    return "" if fields[0] in ("Z", "X") else str(fields[19])


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


# ---- Meeting: the first wait of some ranks, in which those that were given different groups find each other ----------
#
#     rank 0 waits among 0, 1, 2      rank 1 waits among 0, 1      each waits for the other, and neither will come
#
# A rank that has waited for a while posts among which ranks, as long as it waits. Two ranks that wait for each other in
# different groups, seen twice in a row, will do so for ever: they post that where the others of their groups look, and
# all stop. A rank that is only slow posts nothing and is waited for.

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
        (look or _Look(group, meeting)).raise_verdict()  # the rank that found it has closed the connections
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
    """What this rank posts and reads while it waits in one meeting."""

    def __init__(self, group: dist.ProcessGroup, meeting: int) -> None:
        self._me = dist.get_rank()
        self._ranks = dist.get_process_group_ranks(group)
        self._board = Board()
        self._verdict = _verdict_of(meeting, self._ranks)
        self._before: list[tuple[int, Any]] = []  # ranks that wait for this one elsewhere, seen in the look before
        self._board.post(f"meeting/{self._me}", [meeting, self._ranks])

    def again(self) -> None:
        """Raises OtherGroups when a rank waits for this one in another group, or another one of this group has found one."""
        found = [(rank, self._board.read(f"meeting/{rank}")) for rank in self._ranks if rank != self._me]
        found = [(rank, note) for rank, note in found if note and note[1] != self._ranks and self._me in note[1]]
        self.raise_verdict()
        twice = [each for each in found if each in self._before]
        self._before = found
        if twice:
            rank, note = twice[0]
            message = (
                f"ranks disagree: rank {self._me} shares the model among ranks {self._ranks} and rank {rank} among "
                f"{note[1]}, and each waits for the other. Give every rank of a group the same group or mesh"
            )
            self._board.post(self._verdict, message)
            self._board.post(_verdict_of(*note), message)
            raise OtherGroups(message)

    def raise_verdict(self) -> None:
        """Raises OtherGroups when another rank of this group has found one that waits elsewhere."""
        message = self._board.read(self._verdict)
        if message is not None:
            raise OtherGroups(message)

    def end(self) -> None:
        """This rank waits no more."""
        self._board.post(f"meeting/{self._me}", None)


def _verdict_of(meeting: int, ranks: list[int]) -> str:
    """The key of what was found about a meeting of some ranks."""
    return f"meeting/{'-'.join(map(str, ranks))}/{meeting}"
