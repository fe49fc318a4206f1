"""Failures of ranks: finds the rank that is gone, and ranks whose collectives differ, and ends the
waits for them."""

from __future__ import annotations

import collections
import contextlib
import json
import os
import socket
import threading
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from tiermem.ranks.heartbeat import Heartbeat
from tiermem.swap.base.side_threads import Flag, start_thread

# ---- traffic -------------------------------------------------------------------------------------

_MOST_WORDS = 3000  # that are kept for the digest
_NUM_COMPARED = 100


class Payload(NamedTuple):
    """One call of a collective by this rank."""

    op: str
    """Its name in torch.distributed, such as "all_gather_into_tensor"."""
    what: str
    """The purpose, such as "gathering layers.3"."""
    num_bytes: int
    """Bytes of the larger side: the output of an all-gather, the input of a reduce-scatter, the
    tensor of an all-reduce."""
    among: str = "world"
    """The ranks that took part: "world" (all), "shard", "replica", "across" or "within"
    (topology.py)."""


class Traffic:
    """The newest payloads of this rank. Tests and reports count bytes with it; older payloads are
    dropped to bound memory."""

    def __init__(self) -> None:
        self.payloads: collections.deque[Payload] = collections.deque(maxlen=50_000)
        self._num_calls = 0  # since the beginning
        self._digest = 0  # of all calls and their order, but the newest
        self._words: list[str] = []  # of the newest, which the digest lacks
        self._newest: collections.deque[tuple[int, str, str]] = collections.deque(
            maxlen=_NUM_COMPARED
        )

    def add(self, op: str, what: str, num_bytes: int, among: str = "world") -> None:
        """Records one call."""
        self.payloads.append(Payload(op, what, num_bytes, among))
        self._num_calls += 1
        self._newest.append((self._num_calls, op, what))
        self._words += (op, " ", what)
        if len(self._words) > _MOST_WORDS:
            self.digest()

    def digest(self) -> int:
        """Of all calls and their order; equal on ranks that have made the same ones."""
        self._digest = zlib.crc32("".join(self._words).encode(), self._digest)
        self._words.clear()
        return self._digest

    def newest(self) -> dict[int, str]:
        """The newest 100 calls by number, counted from 1 since the beginning. On all ranks a number
        means the same call."""
        return {number: f"{what} ({op})" for number, op, what in list(self._newest)}

    def bytes_of(self, what: str) -> int:
        """Bytes of all payloads whose purpose begins with `what`."""
        return sum(payload.num_bytes for payload in self.payloads if payload.what.startswith(what))


# ---- board ---------------------------------------------------------------------------------------


class Board:
    """Notes that ranks leave for each other, as JSON, in the rendezvous store of torch.distributed.

    torchrun's store belongs to its agent and outlives ranks. Otherwise rank 0 keeps the store, and
    it ends with rank 0: then notes can be neither posted nor read, and `is_gone` is True. A rank 0
    that is silent may be stopped, so that its store would not answer: until it is heard again notes
    are neither posted nor read.

    Args:
        is_keeper_silent: whether rank 0 was heard before, and has not been for some seconds.
    """

    def __init__(self, is_keeper_silent: Callable[[], bool] = lambda: False) -> None:
        self.is_gone = False
        self._is_keeper_silent = is_keeper_silent
        self._store = dist.distributed_c10d._get_default_store()

    @property
    def is_kept_by_rank_0(self) -> bool:
        """Whether the store ends with rank 0."""
        return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"

    def post(self, key: str, note: Any) -> None:
        """Writes a note and replaces an older one under the same key. A lost store sets `is_gone`
        and raises nothing."""
        if self._may_ask():
            with self._noticing():
                self._store.set(f"tiermem/{key}", json.dumps(note))

    def read(self, key: str) -> Any:
        """A note, or None where there is none or the store is lost. Does not wait for a note."""
        if self._may_ask():
            with self._noticing():
                if self._store.check([f"tiermem/{key}"]):
                    return self.wait(key)
        return None

    def _may_ask(self) -> bool:
        return not (self.is_gone or (self.is_kept_by_rank_0 and self._is_keeper_silent()))

    def wait(self, key: str) -> Any:
        """A note. Blocks until it is posted; raises RuntimeError."""
        return json.loads(self._store.get(f"tiermem/{key}"))

    @contextlib.contextmanager
    def _noticing(self) -> Iterator[None]:
        try:
            yield
        except RuntimeError:
            self.is_gone = True


# ---- watch ---------------------------------------------------------------------------------------

_GRACE_S = 10.0
_PATIENCE_S = 2.0  # a longer wait is checked for differences
_LOOK_S = 1.0
_UNUSED_TAG = 1 << 30  # no rank sends a message with this tag

# The number of watches started on a group. All ranks start them in the same order, so the number
# names one watch.
_STARTED: WeakKeyDictionary[dist.ProcessGroup, int] = WeakKeyDictionary()


class RankLost(RuntimeError):
    """A collective failed; the message names the rank that is gone, or says that all ranks are
    alive."""


class RanksDiffer(RankLost):
    """Ranks have gone different ways and would wait for each other; the message says where they
    differ."""


class Watch:
    """Watches this rank's waits for others, and finds the reason when one fails.

    First case: a rank is gone. A backend only reports that a connection was closed, and then closes
    its own connections. So every rank gets errors from its neighbours, and the first failure cannot
    be told from the others. Therefore every rank posts its host and process, and a rank whose
    collective has failed checks, for up to 10 s (1 and 2 in a long wait, too):

        1  whether another rank has already named the lost rank (each rank posts the lost rank that it found)
        2  whether a process on its own host is no longer alive
        3  at the end: whether a rank has never posted its host and process

    When no rank is gone, the error names the rank that did not come: a rank whose wait failed posts
    the purpose of that wait. When rank 0 keeps the store, a lost store means that rank 0 is gone.
    So a rank 0 that has its answer keeps running until the other ranks have theirs; otherwise they
    would report rank 0 as the lost rank.

    Second case: ranks have gone different ways. They find out while they wait for each other,
    before the time-out:

        number    rank 0                 rank 1
            40    gathering layers.0     gathering layers.0
            41    gathering layers.1     gathering layers.2      <- the ranks differ here, however slow one of them is

    The calls that ranks hand to collectives are one sequence, the same on all ranks. A rank that
    waits longer than 2 s posts the end of its own sequence and reads the ends of the others. If one
    number has two names, the wait is ended with an error. If the names are equal, the wait
    continues: a rank is slow. Starting and ending a wait costs two assignments. A thread checks
        once per second, and uses the store only during a long wait. It also ends a wait for a rank
        that is gone while its
    connections are still open: processes that it had started keep them.

    Beside the store ranks hear each other (heartbeat.py). A rank that is silent for nearly
    `timeout_s` is gone, wherever it runs and whatever became of the store; a rank on the host of a
    dead process tells all others at once. Then this rank ends its waits, which raise RankLost.

    A gloo wait is ended by a second receive on the same connections that times out after 1 ms. The
    time-out closes the connections on the other ranks too, and they look for the difference in
    turn. A rank that fails ends its other waits in the same way, because the ranks that it waits
    for may wait for it. NCCL's collectives run on the GPU, which waits for no message: its
    communicators are aborted, which leaves the tensors undefined, and the next call of one raises.

    Args:
        ranks: the global ranks that work together.
        traffic: this rank's calls; calls of all its threads are one sequence.
        timeout_s: longest wait for another rank.
    """

    def __init__(self, ranks: Sequence[int], traffic: Traffic, timeout_s: float) -> None:
        self._ranks = ranks
        self._me = dist.get_rank()
        self._others = [rank for rank in ranks if rank != self._me]
        self._traffic = traffic
        self._grace_s = min(_GRACE_S, timeout_s / 3)
        self._most_silent_s = max(0.9 * timeout_s, timeout_s - _PATIENCE_S)
        # 200 datagrams a second at most
        self._interval_s = max(min(timeout_s / 20, max(0.5, len(ranks) / 100)), 0.05)
        # None until the watch is started, and where there are no datagrams
        self._beat: Heartbeat | None = None
        # an interrupt has ended an exchange of this rank, or came amid what follows one
        self.is_torn = False
        self._is_ended = False  # this rank's waits were ended, after a rank was lost
        self._board = Board(self._is_keeper_silent)
        self._board.post(
            f"rank/{self._me}", (socket.gethostname(), os.getpid(), _start_of(os.getpid()))
        )
        # host, process and start of ranks, while the store lives
        self._known: dict[int, tuple[str, int, str]] = {}
        self._groups: list[dist.ProcessGroup] = []  # those of gloo
        self._backends: list[Any] = []  # other than gloo's, in all groups
        self._key = ""  # prefix of the posted sequences; empty until the watch is started
        self._waits_since = 0.0  # 0: this rank does not wait
        self._num_posted = -1
        self._is_closed = Flag()
        self._thread: threading.Thread | None = None

    def start(self, group: dist.ProcessGroup, groups: Sequence[dist.ProcessGroup]) -> None:
        """Starts to check waits. Every rank of `group` starts its watches in the same order. Does
        not block.

        groups: the groups whose waits are ended when a difference is found.
        """
        number = _STARTED[group] = _STARTED.get(group, 0) + 1
        self._key = f"watch/{'-'.join(map(str, self._ranks))}/{number}"
        self._groups = [each for each in groups if "cpu:gloo" in dist.get_backend_config(each)]
        backends = [each._get_backend(device) for each in groups for device in each._device_types]
        self._backends = [backend for backend in backends if backend.name() != "gloo"]
        with contextlib.suppress(OSError):
            self._beat = Heartbeat(self._me, self._interval_s, self._newest_call)
            self._board.post(f"{self._key}/{self._me}/beat", self._beat.address)
            self._beat.start()
        thread = threading.Thread(target=self._run, name="tiermem watch", daemon=True)
        start_thread(thread)
        self._thread = thread

    def close(self) -> None:
        """Stops the checks. Safe to repeat; blocks until the thread has ended, which may be reading
        the store."""
        self._is_closed.set()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()
        if self._beat is not None:
            self._beat.close()

    def meet(self) -> None:
        """Reads the host and process of every rank. Call it after a collective, when all ranks have
        come. Raises RankLost."""
        if len(self._known) == len(self._ranks):
            return
        try:
            self._known = {rank: self._board.wait(f"rank/{rank}") for rank in self._ranks}
        except RuntimeError as error:
            raise self._explain_loss("the roll call", error) from error

    def check_whole(self) -> None:
        """Raises RankLost if this rank was interrupted where the others may have gone on; ends
        their waits for it."""
        if self.is_torn:
            self.end_waits()
            raise RankLost(
                f"rank {self._me} was interrupted in the midst of what ranks do together, so that "
                "this model is torn: another "
                "rank may be a step ahead. End every rank, and open a checkpoint that is whole"
            )

    def begin_wait(self) -> None:
        """Notes that this rank waits for others from now on."""
        self._waits_since = time.monotonic()

    def end_wait(self) -> None:
        """Notes that the wait has ended."""
        self._waits_since = 0.0

    def end_waits(self) -> None:
        """Ends this rank's waits, and the other ranks' waits for it, after a failure. Safe to
        repeat."""
        self._post_newest()
        for backend in self._backends:
            backend.abort()
        for group in self._groups:
            for rank in set(range(group.size())) - {group.rank()}:  # one open connection is enough
                with contextlib.suppress(RuntimeError):  # the intended time-out
                    group.recv([torch.zeros(1)], rank, _UNUSED_TAG).wait(timedelta(milliseconds=1))

    def explain(self, what: str, error: Exception) -> RankLost:
        """The error to raise when a collective has failed: where ranks differ, or which rank is
        gone. Takes up to 10 s."""
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
        """Posts that this rank has its answer. A rank 0 that keeps the store then waits until all
        living ranks have theirs.

        Args:
            since: when this rank began to look for its answer (`time.monotonic()`); the wait ends
                10 s after it.
        """
        self._board.post(f"rank/{self._me}/answered", True)
        is_keeper = self._me == 0 and self._board.is_kept_by_rank_0
        while is_keeper and not self._board.is_gone and time.monotonic() < since + self._grace_s:
            if all(
                self._board.read(f"rank/{rank}/answered")
                for rank in set(self._others) - self._lost()
            ):
                return
            time.sleep(0.05)

    # ---- a rank that is gone ---------------------------------------------------------------------

    def _explain_loss(self, what: str, error: Exception) -> RankLost:
        self._board.post(f"rank/{self._me}/waits", what)
        lost = self._lost()
        deadline = time.monotonic() + self._grace_s
        while not lost and time.monotonic() < deadline:
            time.sleep(0.05)
            lost = self._lost()
        lost = lost or self._absent()
        if not lost:
            return RankLost(
                f"{what} failed on rank {self._me}, though every rank that can be seen from here "
                f"is alive: {error}. {self._who_stays_away(what)}Ranks may have gone different "
                "ways (another batch, another branch), or one was slower than timeout_s"
            )
        names = ", ".join(f"rank {rank}{self._last_seen(rank)}" for rank in sorted(lost))
        self._board.post(f"rank/{self._me}/lost", sorted(lost))
        return RankLost(
            f"{what} cannot go on: {names} is gone. Its own output says why. (On rank {self._me}: "
            f"{error})"
        )

    def _lost(self) -> set[int]:
        # these may have posted since the last look
        for rank in set(self._ranks) - set(self._known):
            process = self._board.read(f"rank/{rank}")
            if process is not None:
                self._known[rank] = process
        lost = {rank for rank, process in list(self._known.items()) if _has_died(*process)}
        if self._beat is not None:
            self._beat.tell_dead(lost)
            lost |= self._beat.dead | self._silent(self._beat)
        for rank in self._others:
            lost.update(self._board.read(f"rank/{rank}/lost") or ())
        if not lost and self._me != 0 and self._board.is_gone and self._board.is_kept_by_rank_0:
            return {0}
        return lost

    def _silent(self, beat: Heartbeat) -> set[int]:
        """Ranks that were heard, and have not been for so long that they are gone."""
        return {rank for rank in self._others if beat.silence_s(rank) > self._most_silent_s}

    def _absent(self) -> set[int]:
        """Ranks that never posted their host and process: they stopped before, or run another
        program."""
        absent = {rank for rank in self._ranks if self._board.read(f"rank/{rank}") is None}
        return set() if self._board.is_gone else absent

    def _who_stays_away(self, what: str) -> str:
        """What the living ranks do instead, as far as posted: a rank whose wait failed has posted
        the purpose of that wait."""
        waits = {rank: self._board.read(f"rank/{rank}/waits") for rank in self._others}
        absent = [
            f"rank {rank}{self._last_seen(rank)}" for rank, other in waits.items() if other is None
        ]
        elsewhere = [
            f"rank {rank} waits in {other!r}"
            for rank, other in waits.items()
            if other not in (None, what)
        ]
        if absent:
            elsewhere.insert(
                0, f"{', '.join(absent)} did not come to it, nor to anything else that failed"
            )
        return "".join(f"{sentence[0].upper()}{sentence[1:]}. " for sentence in elsewhere)

    def _last_seen(self, rank: int) -> str:
        known = self._known.get(rank)
        call = "" if self._beat is None else self._beat.call_of(rank)
        last = f"; its last call was {call!r}" if call else ""
        return (
            f" (process {known[1]} on {known[0]}{last})" if known else " (which has not come here)"
        )

    # ---- ranks that differ -----------------------------------------------------------------------

    def difference(self) -> str | None:
        """Where the ranks that wait, or have waited, went different ways, as far as posted; None:
        no difference is found.

        Posts the end of this rank's own sequence first. Reads the store; does not wait for any
        rank.
        """
        if not self._key:
            return None
        self._post_newest()
        posted = {rank: self._board.read(f"{self._key}/{rank}") or {} for rank in self._others}
        if self._board.is_gone:
            return None
        sequences = {
            rank: {int(number): what for number, what in calls.items()}
            for rank, calls in posted.items()
        }
        sequences[self._me] = self._traffic.newest()
        return _difference({rank: calls for rank, calls in sorted(sequences.items()) if calls})

    def _run(self) -> None:
        look_s = min(_LOOK_S, self._interval_s)
        last = -1
        since_last = 0.0
        patience_s = min(_PATIENCE_S, self._most_silent_s / 2)
        while not self._is_closed.wait_for(look_s):
            self._meet_beats()
            now = time.monotonic()
            since = self._waits_since
            number = max(self._traffic.newest(), default=0)
            if number != last:
                last = number
                since_last = now
            is_long = since > 0 and now - since > patience_s
            is_idle = (
                bool(self._backends) and now - since_last > patience_s
            )  # may wait for the accelerator, which waits
            differs = (is_long or is_idle) and self.difference() is not None
            if self._is_ended or differs or self._is_lost() or (is_long and self._lost()):
                self._is_ended = True
                self.end_waits()  # again at the next look, if one goes on

    def _is_lost(self) -> bool:
        """Whether a rank is gone, as far as it can be seen without the store."""
        if not (self._waits_since > 0 or self._backends):
            return False
        dead = {
            rank for rank in self._others if rank in self._known and _has_died(*self._known[rank])
        }
        if self._beat is not None:
            dead -= self._beat.ended
            self._beat.tell_dead(dead)
            dead |= (self._beat.dead & set(self._others)) | self._silent(self._beat)
        return bool(dead)

    def _meet_beats(self) -> None:
        """Learns where the other ranks hear, as they post it."""
        if self._beat is not None:
            for rank in self._others:
                if not self._beat.knows(rank) and (
                    address := self._board.read(f"{self._key}/{rank}/beat")
                ):
                    self._beat.know(rank, address)

    def _is_keeper_silent(self) -> bool:
        return self._beat is not None and self._beat.silence_s(0) > max(
            _PATIENCE_S, 4 * self._interval_s
        )

    def _newest_call(self) -> str:
        newest = self._traffic.newest()
        return newest[max(newest)] if newest else ""

    def _post_newest(self) -> None:
        newest = self._traffic.newest()
        if self._key and max(newest, default=0) != self._num_posted:
            self._num_posted = max(newest, default=0)
            self._board.post(f"{self._key}/{self._me}", newest)


def _has_died(host: str, pid: int, started: str) -> bool:
    """Whether a process of this host has ended, is a zombie, or has a new owner of its number;
    False for other hosts."""
    return host == socket.gethostname() and _start_of(pid) != started


def _start_of(pid: int) -> str:
    """When a process started, in the kernel's clock ticks since boot; empty for a process that does
    not run."""
    try:
        fields: list[Any] = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return ""
    return "" if fields[0] in ("Z", "X") else str(fields[19])


def _difference(said: dict[int, dict[int, str]]) -> str | None:
    """A sentence about the first number that has two names; None when there is none."""
    for number in sorted({number for calls in said.values() for number in calls}):
        named = {rank: calls[number] for rank, calls in said.items() if number in calls}
        first = next(iter(named))
        for rank, what in named.items():
            if what != named[first]:
                return (
                    f"ranks have gone different ways: number {number} of what they do together is "
                    f"{named[first]!r} on rank {first} and {what!r} on rank {rank}. Every rank has "
                    "to use the same modules in the same order; where that depends on data, have "
                    "them fetched as one (tiermem.utils.set_z3_leaf_modules)"
                )
    return None


# ---- meeting: the first wait of a group ----------------------------------------------------------
#
#     rank 0 waits among ranks 0, 1, 2      rank 1 waits among ranks 0, 1      neither wait can end
#
# A rank that has waited for 1 s posts the ranks of its group until the wait ends. When it sees,
# twice in a row, a rank that waits for it in another group, neither wait can end. It then posts an
# error under the keys of both groups, and all their ranks raise it. A rank that is only slow posts
# nothing, so the others wait for it.

# How often a group has met. The number is the same on all its ranks and names one meeting.
_MET: WeakKeyDictionary[dist.ProcessGroup, int] = WeakKeyDictionary()


class OtherGroups(ValueError):
    """Ranks that work together were given different groups; the message names both groups."""


def meet(group: dist.ProcessGroup, work: Any, timeout_s: float) -> None:
    """Waits for the gloo collective with which all ranks of a group begin. Blocks. Raises
    OtherGroups, RuntimeError."""
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
        # the rank that raised OtherGroups has closed the connections
        (look or _Look(group, meeting)).raise_verdict()
        raise
    finally:
        if look is not None:
            look.end()


def _has_ended(work: Any, wait_s: float, is_last: bool) -> bool:
    """Waits for at most `wait_s`. Raises the collective's own error, and on the last wait also the
    time-out."""
    try:
        work.wait(timedelta(seconds=wait_s))
    except RuntimeError:
        if is_last or work.is_completed():
            raise
        return False
    return True


class _Look:
    """The notes that this rank posts and reads while it waits in one meeting."""

    def __init__(self, group: dist.ProcessGroup, meeting: int) -> None:
        self._me = dist.get_rank()
        self._ranks = dist.get_process_group_ranks(group)
        self._board = Board()
        self._verdict = _verdict_of(meeting, self._ranks)
        # ranks that waited for this one in another group at the last look
        self._before: list[tuple[int, Any]] = []
        self._board.post(f"meeting/{self._me}", [meeting, self._ranks])

    def again(self) -> None:
        """Raises OtherGroups when a rank waits for this one in another group, or a rank of this
        group has posted that error."""
        found = [
            (rank, self._board.read(f"meeting/{rank}")) for rank in self._ranks if rank != self._me
        ]
        found = [
            (rank, note)
            for rank, note in found
            if note and note[1] != self._ranks and self._me in note[1]
        ]
        self.raise_verdict()
        twice = [each for each in found if each in self._before]
        self._before = found
        if twice:
            rank, note = twice[0]
            message = (
                f"ranks disagree: rank {self._me} shares the model among ranks {self._ranks} and "
                f"rank {rank} among {note[1]}, and each waits for the other. Give every rank of a "
                "group the same group or mesh"
            )
            self._board.post(self._verdict, message)
            self._board.post(_verdict_of(*note), message)
            raise OtherGroups(message)

    def raise_verdict(self) -> None:
        """Raises OtherGroups when a rank of this group or of the other one has posted the error."""
        message = self._board.read(self._verdict)
        if message is not None:
            raise OtherGroups(message)

    def end(self) -> None:
        """Removes this rank's note: it waits no more."""
        self._board.post(f"meeting/{self._me}", None)


def _verdict_of(meeting: int, ranks: list[int]) -> str:
    """The key of the error that is posted about one meeting of some ranks."""
    return f"meeting/{'-'.join(map(str, ranks))}/{meeting}"
