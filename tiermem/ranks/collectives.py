"""Collectives: the calls that all ranks make together, and the messages that ranks on CPUs send
each other directly."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import timedelta
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from tiermem.ranks.failures import OtherGroups, RankLost, meet
from tiermem.ranks.topology import Topology
from tiermem.swap.memory.accelerator import is_accelerator, to_device

T = TypeVar("T")

# ---- messages between CPU ranks ------------------------------------------------------------------
#
#     send_to_all    my piece to every other rank, theirs to me        an all-gather, received in its final place
#     RowSums        sums of a small row over all ranks, again and again, without marks
#     swap_rows      my row r to rank r, one row from each rank        an all-to-all
#
# gloo's all-gather copies through a buffer. gloo also matches collectives by counting them: ranks
# that have gone different ways would match calls of different sizes, which ends the process. A
# message carries a tag for its purpose instead, so such ranks wait, and failures.py finds where
# they differ. Other backends run the collective.
#
# When a connection closes, gloo ends the waits for messages that have not begun to arrive. The wait
# for a message of which a part has arrived goes on until its time-out. So a mark of one byte
# follows the messages of an exchange between two ranks, and is waited for first: when it has come,
# so have they. A message that is sent in part has no such mark: its wait ends with the exchange's
# first failure, else with the time-out.

GATHER_TAG = 1 << 20  # tags of the user's own messages begin at 0
REDUCE_TAG = 1 << 29
_ROWS_TAG = 3 << 28
_MARK_TAG = (1 << 30) - 1
_MARK = torch.zeros(1, dtype=torch.uint8)  # its value means nothing

# The rows and the receives of every `RowSums` on a group. They live as long as the group: a row
# that has been asked for may come after its model has been closed.
_EXPECTED: WeakKeyDictionary[dist.ProcessGroup, list[tuple[torch.Tensor, dict[int, Any]]]] = (
    WeakKeyDictionary()
)


def sends_directly(group: dist.ProcessGroup | None, device: torch.device) -> bool:
    """Whether tensors on a device travel as messages in a group: on CPUs with gloo."""
    if group is None or device.type != "cpu":
        return False
    is_gloo = _on_gloo.get(group)
    if is_gloo is None:
        is_gloo = _on_gloo[group] = "cpu:gloo" in dist.get_backend_config(group)
    return is_gloo


_on_gloo: weakref.WeakKeyDictionary[dist.ProcessGroup, bool] = weakref.WeakKeyDictionary()


def send_to_all(
    group: dist.ProcessGroup, me: int, pieces: Sequence[torch.Tensor], tag: int
) -> list[Any]:
    """Starts messages of every rank's piece between every two ranks of a group; returns the handles
    to wait for."""
    others = [(rank, piece) for rank, piece in enumerate(pieces) if rank != me]
    receives = [group.recv([piece], rank, tag) for rank, piece in others]
    return receives + [group.send([pieces[me]], rank, tag) for rank, _ in others]


def marked(group: dist.ProcessGroup, messages: list[Any]) -> list[Any]:
    """The handles of an exchange's messages, all started, between the marks that follow them on
    every connection."""
    others = [rank for rank in range(group.size()) if rank != group.rank()]
    marks = [group.recv([_MARK], rank, _MARK_TAG) for rank in others]
    return marks + messages + [group.send([_MARK], rank, _MARK_TAG) for rank in others]


def swap_rows(
    topology: Topology,
    what: str,
    received: torch.Tensor,
    sent: torch.Tensor,
    among: str,
    number: int,
) -> Pending:
    """Starts sending row r to rank r of a dimension, and receiving one row from each. Does not
    block. Raises RankLost.

    Args:
        received, sent: flat tensors of as many equal rows as there are ranks.
        number: names the purpose: the same on every rank, and different for every other exchange.
    """
    group = topology.group_of(among)
    if not sends_directly(group, sent.device):
        return start(topology, what, dist.all_to_all_single, received, sent, among=among)
    me = group.rank()
    mine = sent.view(group.size(), -1)
    theirs = received.view(group.size(), -1)
    others = [rank for rank in range(group.size()) if rank != me]
    tag = REDUCE_TAG + number
    topology.traffic.add("all_to_all_single", what, sent.nbytes, among)
    with explaining(topology, what):
        works = [group.recv([theirs[rank]], rank, tag) for rank in others]
        works = marked(group, works + [group.send([mine[rank]], rank, tag) for rank in others])
    theirs[me].copy_(mine[me])
    return Pending(topology, what, [works], [received, sent])


# ---- collectives ---------------------------------------------------------------------------------
#
#     start    hands a collective to torch.distributed and returns at once with a Pending
#     call     does the same and waits
#     total    sums float64 tensors over the ranks that hold different parts
#     share    copies one rank's tensor to all ranks; share_parts: to each rank its part
#     exchange gives every rank the strings of all ranks; exchange_digests: bytes of one length
#
# torch.distributed does the work (NCCL on GPUs, gloo on CPUs). The sequence of calls depends only
# on the program's sequence of units. When a rank dies, or is silent for longer than the policy's
# `timeout_s`, the wait on the other ranks fails with the name of that rank (failures.py).

_COMPARING = "comparing what ranks were given"


_NEWER_NAMES = {
    "all_gather_into_tensor": "all_gather_single",
    "reduce_scatter_tensor": "reduce_scatter_single",
}


class Pending:
    """Collectives under way. Owns the tensors that must stay alive until they end, and the wait for
    them.

    Args:
        topology: finds the rank that is gone when the wait fails.
        what: the purpose, for that error.
        rounds: lists of torch.distributed's handles. The wait asks for a round after the rounds
            before it have ended, so an iterator may start each round at that point.
        owns: the tensors that the transfers read and write, all on one device.
    """

    def __init__(
        self,
        topology: Topology,
        what: str,
        rounds: Iterable[Sequence[Any]],
        owns: Sequence[torch.Tensor],
    ) -> None:
        self._topology = topology
        self._what = what
        self._rounds = rounds
        self._owns = owns
        self._is_bounded = not owns or owns[0].device.type == "cpu"

    def wait(self) -> None:
        """Blocks until all have ended (on a GPU: orders the current stream after them). Raises
        RankLost; safe to repeat."""
        with explaining(self._topology, self._what):
            self._wait()

    def end(self) -> None:
        """Waits until no transfer uses the tensors any more; errors are suppressed. For use after a
        failure."""
        with contextlib.suppress(RuntimeError):
            self._wait()

    def _wait(self) -> None:
        watch = self._topology.watch
        if watch is not None:
            watch.begin_wait()
        try:
            for works in self._rounds:
                self._wait_for(works)
        except RuntimeError:
            self._rounds = self._owns = ()
            raise
        finally:
            if watch is not None:
                watch.end_wait()
        self._rounds = self._owns = ()  # not before: after an interrupt `end` waits again

    def _wait_for(self, works: Sequence[Any]) -> None:
        """Waits for all of a round, then raises the first failure: until then transfers use the
        owned tensors.

        The first failure also ends the others: the ranks that they wait for may wait for this rank,
        which sends no more. The connections are closed then, so nothing moves any more, and a
        message that has moved in part is waited for no longer.
        """
        failure = None
        limit = timedelta(seconds=self._topology.timeout_s)
        for work in works:
            try:
                if self._is_bounded:
                    work.wait(limit)
                else:
                    # orders the stream; the backend's own watchdog applies the time-out
                    work.wait()
            except RuntimeError as error:
                if failure is None and self._topology.watch is not None:
                    self._topology.watch.end_waits()
                    limit = timedelta(milliseconds=1)
                failure = failure or error
        try:
            if failure is not None:
                raise failure
        finally:
            failure = None  # else its traceback keeps this frame alive


class RowSums:
    """Sums of a small row of numbers over all ranks of the group, again and again.

    Between CPUs a row travels as one message, and no two messages pass each other between two
    ranks:

        the lower rank   asks for the other's row and gives its own
        the higher rank  when it has that row, asks for the next one and gives its own

    So a thread of gloo finds its lock free. (It tries the lock, which our thread holds while it
    asks or gives, again and again until it has it: where both share a core, for the 3 to 5 ms after
    which the system lets our thread go on.) A row is asked for before it is given, so each object
    has a tag of its own.

    Rows should seldom change their length: then this one starts anew. All ranks make and change
    theirs in the same order.
    """

    def __init__(self, topology: Topology) -> None:
        self._topology = topology
        self._resize(0)

    def _resize(self, numel: int) -> None:
        group = self._topology.group
        device = self._topology.control_device
        self._in_turn = torch.zeros(
            2, self._topology.world, numel, dtype=torch.float64, device=device
        )
        # which of the two is filled next: while one is added up, rows arrive in the other
        self._next = 0
        self._expected: dict[int, Any] = {}  # by lower rank: the receive of its next row
        self._tag: int | None = None  # None: the backend runs the collective
        if group is not None and numel and sends_directly(group, device):
            made = _EXPECTED.setdefault(group, [])
            self._tag = _ROWS_TAG + len(made)
            made.append((self._in_turn, self._expected))

    def add_up(
        self, what: str, mine: Sequence[float], meanwhile: Callable[[], object]
    ) -> list[float]:
        """The sums, added in the order of ranks: the same bits on every rank. Collective; blocks.
        Raises RankLost.

        meanwhile: called while rows travel.
        """
        if len(mine) != self._in_turn.shape[-1]:
            self._resize(len(mine))
        topology = self._topology
        row = torch.tensor(mine, dtype=torch.float64)
        rows = self._in_turn[self._next]
        self._next ^= 1
        if topology.group is None or self._tag is None:
            row = to_device(row, rows.device)
            pending = start(topology, what, dist.all_gather_into_tensor, rows.view(-1), row)
        else:
            pending = self._give(what, row, rows, topology.group, self._tag)
        meanwhile()
        pending.wait()
        sums: list[float] = functools.reduce(torch.add, rows).tolist()
        return sums

    def _give(
        self, what: str, row: torch.Tensor, rows: torch.Tensor, group: dist.ProcessGroup, tag: int
    ) -> Pending:
        me = group.rank()
        size = group.size()
        after = self._in_turn[self._next]
        rows[me].copy_(row)

        def rounds() -> Iterator[list[Any]]:
            for rank in range(me):
                yield [self._expected.pop(rank, None) or group.recv([rows[rank]], rank, tag)]
                self._expected[rank] = group.recv([after[rank]], rank, tag)
                works.append(group.send([row], rank, tag))
            # to a thread of the rank that waits for this row, where the system has put it on our
            # core
            os.sched_yield()
            yield works

        works: list[Any] = []
        self._topology.traffic.add("all_gather_into_tensor", what, rows.nbytes, "world")
        with explaining(self._topology, what):
            for rank in range(me + 1, size):
                works += group.recv([rows[rank]], rank, tag), group.send([row], rank, tag)
        return Pending(self._topology, what, rounds(), [rows, row])


def _nothing() -> None:
    """Follows collectives that need no further work."""


@dataclasses.dataclass(eq=False)
class Then(Pending):
    """Several collectives under way, and the work that follows them in the first wait.

    on_end: called when all have ended.
    release: called last, also after an error; perhaps more than once.
    """

    _pending: Sequence[Pending]
    _on_end: Callable[[], None] = _nothing
    _release: Callable[[], None] = _nothing

    def wait(self) -> None:
        """Blocks until all have ended (on a GPU: orders the current stream after them). Raises
        RankLost; safe to repeat."""
        try:
            for each in self._pending:
                each.wait()
            if self._pending:
                self._on_end()
        except Exception:
            self._pending = ()
            raise
        finally:
            self._release()
        self._pending = ()

    def end(self) -> None:
        """Waits until no transfer uses the tensors any more, also after an interrupt of `wait`;
        errors are suppressed."""
        for each in self._pending:
            each.end()


def newest(collective: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a collective under its newest name in this torch: newer releases warn about the older
    names."""
    found: Callable[..., Any] = getattr(dist, _NEWER_NAMES.get(collective.__name__, ""), collective)
    return found


def start(
    topology: Topology, what: str, collective: Callable[..., Any], *args: Any, among: str = "world"
) -> Pending:
    """Starts a collective of torch.distributed among the ranks of a dimension
    (`Topology.group_of`); does not block.

    Raises RankLost.
    """
    tensors = [each for each in args if isinstance(each, torch.Tensor)]
    topology.traffic.add(collective.__name__, what, max(tensor.nbytes for tensor in tensors), among)
    with explaining(topology, what):
        work = newest(collective)(*args, group=topology.group_of(among), async_op=True)
    return Pending(topology, what, [[work]], tensors)


def call(
    topology: Topology, what: str, collective: Callable[..., Any], *args: Any, among: str = "world"
) -> None:
    """Runs a collective and blocks until it has ended. Raises RankLost, which names the rank that
    is gone."""
    with explaining(topology, what):
        start(topology, what, collective, *args, among=among).wait()


def total(topology: Topology, sums: torch.Tensor, among: str = "shard") -> torch.Tensor:
    """Adds float64 sums in place over the ranks that hold different parts ("shard") or over all
    ("world"). Blocks."""
    if (topology.num_shards if among == "shard" else topology.world) > 1:
        call(topology, "adding up norms", dist.all_reduce, sums, among=among)
    return sums


def sendable(topology: Topology, value: torch.Tensor) -> torch.Tensor:
    """A tensor that the group takes: itself, or a copy where accelerators alone exchange tensors."""
    return value if is_accelerator(value.device) else value.to(topology.control_device)


def share(topology: Topology, value: torch.Tensor, what: str, rank: int = 0) -> None:
    """Overwrites a tensor with the one of rank `rank` of the group. Blocks; does nothing when there
    is one rank."""
    if topology.group is not None and value.numel():
        call(topology, what, dist.broadcast, value, dist.get_global_rank(topology.group, rank))


def share_parts(topology: Topology, value: torch.Tensor, parts: Sequence[int], what: str) -> None:
    """Overwrites this rank's part of a contiguous tensor with rank 0's values. Blocks; raises
    RankLost.

    Between CPUs each rank is sent its part alone. Other backends send the whole, which then is rank
    0's.

    Args:
        parts: the part that each rank of the group keeps, in the order of ranks.
    """
    group = topology.group
    if group is None or not sends_directly(group, value.device):
        share(topology, value, what)
        return
    rows = value.view(-1).split(max(1, -(-value.numel() // topology.num_shards)))
    me = group.rank()
    works = list[Any]()
    topology.traffic.add("send", what, value.nbytes, "world")
    with explaining(topology, what):
        for rank in range(1, group.size()):
            if me in (0, rank) and parts[rank] < len(rows):
                call_of = group.send if me == 0 else group.recv
                works.append(call_of([rows[parts[rank]]], rank if me == 0 else 0, REDUCE_TAG - 1))
        Pending(topology, what, [works], [value]).wait()


def exchange_digests(topology: Topology, digest: bytes) -> list[bytes]:
    """Every rank's digest, in the order of ranks; all have one length. Blocks; the first half of a
    comparison.

    Raises RankLost, and OtherGroups when ranks were given different groups.
    """
    if topology.group is None:
        return [digest]
    device = topology.control_device
    mine = torch.frombuffer(bytearray(digest), dtype=torch.uint8).to(device)
    whole = torch.empty(topology.world * len(digest), dtype=torch.uint8, device=device)
    try:
        with explaining(topology, _COMPARING):
            work = newest(dist.all_gather_into_tensor)(
                whole, mine, group=topology.group, async_op=True
            )
            meet(topology.group, work, topology.timeout_s) if device.type == "cpu" else work.wait()
    except OtherGroups:
        if topology.watch is not None:
            topology.watch.outlive(time.monotonic())
        raise
    return [bytes(row) for row in whole.view(topology.world, -1).tolist()]


def exchange(topology: Topology, value: T) -> list[T]:
    """Every rank's value, which pickle takes, in the order of ranks. Blocks. Raises RankLost."""
    values: list[Any] = [None] * topology.world
    if topology.group is None:
        return [value]

    def gathered() -> Iterator[list[Any]]:
        dist.all_gather_object(values, value, group=topology.group)
        yield []

    topology.traffic.add("all_gather_object", _COMPARING, len(repr(value)))
    Pending(topology, _COMPARING, gathered(), []).wait()
    return values


@dataclasses.dataclass(eq=False)
class explaining:  # noqa: N801 (named as a function, which it stands for)
    """Makes an error of a collective say where ranks differ, or which rank is gone. Finding that
    takes a few seconds.

    An interrupt in the block leaves messages that no call waits for: after it every block raises
    RankLost.
    """

    _topology: Topology
    _what: str

    def __enter__(self) -> None:
        watch = self._topology.watch
        if watch is not None and watch.is_torn:
            watch.check_whole()

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        watch = self._topology.watch
        if error is None or watch is None or isinstance(error, RankLost):
            return
        if isinstance(error, RuntimeError):
            raise watch.explain(self._what, error) from error
        watch.is_torn |= isinstance(error, MemoryError) or not isinstance(error, Exception)
