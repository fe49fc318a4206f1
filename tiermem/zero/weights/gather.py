"""Gather: every rank's part of something, brought together on all of them, straight into its final place.

    UnitGather    every rank's shard of a unit     -> the unit's full layout, which the maths sees; may run behind compute
    gather_unit   the same, at once, or a span of the shard layout after the other
    gather        every rank's part of one tensor  -> the whole, in the order of ranks

A rank puts its own part into the full layout first, in the dtype that the maths sees (so what crosses ranks is in that dtype
as well), and the buffer that the shard was read into is free from then on. Then the parts are exchanged in place:

    coalesced    all parameters of the unit as one call
    single       one parameter after the other: nothing is buffered for more than one of them
    all_reduce   the other ranks' parts are set to zero and the whole layout is added up, as integers: bits stay what they are

Over gloo an all-gather collects into a tensor of its own, as large as all that is gathered, and copies from there; so between
CPUs each rank's part travels as a message to each of the others, received where it belongs. NCCL gathers in place.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, Literal, NamedTuple, Protocol

import torch
import torch.distributed as dist

from tiermem.zero.ranks.collectives import Pending, call, explained, newest
from tiermem.zero.ranks.messages import GATHER_TAG, send_to_all, sends_directly
from tiermem.zero.ranks.topology import Topology
from tiermem.zero.unit import Shard, Unit

Way = Literal["coalesced", "single", "all_reduce"]
"""How the parts of a unit are exchanged; see above."""

_Call = Callable[[], Sequence[Any]]  # starts something and returns what is to be waited for


class Gather(Protocol):
    """The gather of one unit, in two steps: `put` this rank's shard, `start` the exchange."""

    @property
    def needs_shard(self) -> bool:
        """Whether the next gather begins at the shard; else it need not be read."""

    def put(self, shard: torch.Tensor | None) -> None:
        """Takes this rank's flat shard layout, when it is needed."""

    def start(self) -> Pending:
        """Starts the exchange. Collective; does not block."""

    def outdate(self) -> None:
        """The weights are about to change at home."""


class UnitGather:
    """The gather of one unit, again and again. Collective: every rank starts the same ones in the same order.

    Args:
        topology: over which ranks.
        unit: what is gathered.
        full: its full layout; has bytes under it whenever a gather runs.
        way: how parts are exchanged.
        span: elements of the shard layout that are gathered; default: all of it.
    """

    def __init__(
        self, topology: Topology, unit: Unit, full: torch.Tensor, way: Way = "coalesced", span: slice | None = None
    ) -> None:
        self._topology = topology
        self._full = full
        self._way = way
        self._what = f"gathering {unit.name}"
        self._first = span.start if span is not None else 0
        self._parts = cut_span(unit, span)
        self._pieces: list[list[torch.Tensor]] = []  # of each parameter, every rank's: views, made in the first gather
        self._own: list[torch.Tensor] = []  # this rank's of those
        self._exchanges: list[_Exchange] = []  # made with them, in the order in which they are started
        self._shard: torch.Tensor | None = None
        self._mine: list[torch.Tensor] = []  # views of that

    @property
    def needs_shard(self) -> bool:
        """Always."""
        return True

    def outdate(self) -> None:
        """Nothing is kept that could be outdated."""

    def put(self, shard: torch.Tensor | None) -> None:
        """Copies this rank's flat shard layout, or what the span holds of it, into its place in the full one.

        The shard is free afterwards; on a GPU when the current stream gets there.
        """
        assert shard is not None
        if not self._pieces:
            self._prepare()
        if shard is not self._shard:  # one that rests in memory is the same every time
            self._shard = shard
            places = [(part.shard_offset - self._first, part.numel) for part in self._parts]
            self._mine = [shard[place : place + numel] for place, numel in places]
        if self._parts:
            torch._foreach_copy_(self._own, self._mine, non_blocking=True)

    def start(self) -> Pending:
        """Starts the exchange, after `put`. Does not block. Raises RankLost."""
        try:
            return Pending(self._topology, self._what, self._start(), [self._full])
        except RuntimeError as error:
            raise explained(self._topology, self._what, error) from error

    def _start(self) -> Iterable[Sequence[Any]]:
        """Starts the first round; those after it are started as the wait asks for them."""
        if self._way == "all_reduce" and self._topology.num_shards > 1 and self._parts:
            return [[self._add_up()]]
        if not self._exchanges:
            return []
        first = self._begin(self._exchanges[0])
        if len(self._exchanges) == 1:
            return [first]
        return itertools.chain([first], map(self._begin, self._exchanges[1:]))

    def _begin(self, exchange: _Exchange) -> list[Any]:
        self._topology.traffic.add("all_gather", self._what, exchange.num_bytes, exchange.among)
        return exchange.start()

    def _prepare(self) -> None:
        """Makes the views that every gather uses: not before the first, since a storage without bytes cannot be viewed."""
        self._pieces = [self._cut(part) for part in self._parts]
        self._own = [pieces[self._topology.shard_rank] for pieces in self._pieces]
        if self._topology.num_shards == 1 or not self._parts:
            return
        everything = list(range(len(self._parts)))
        calls = [[index] for index in everything] if self._way == "single" else [everything]
        is_direct = sends_directly(self._topology.group, self._full.device)
        make = self._messages if is_direct else self._all_gathers
        self._exchanges = [make(call, each) for call in calls for each in _rounds_of(self._topology)]

    def _cut(self, part: Part) -> list[torch.Tensor]:
        """The places of every rank's piece of a parameter in the full layout."""
        return [self._full[part.place_of(rank)] for rank in range(self._topology.num_shards)]

    def _messages(self, indices: list[int], each: _Round) -> _Exchange:
        """A round of the exchange of some parameters, as messages of every rank's piece between every two of a group."""
        group, num_bytes = self._topology.group_of(each.among), 0
        calls: list[_Call] = []
        for index in indices:
            for row, places in enumerate(each.rows):
                pieces = [self._pieces[index][place] for place in places]
                num_bytes += sum(piece.nbytes for piece in pieces)
                tag = (row + 1) * GATHER_TAG + self._parts[index].shard.index
                calls.append(partial(send_to_all, group, each.me, pieces, tag))
        return _Exchange(each.among, num_bytes, calls)

    def _all_gathers(self, indices: list[int], each: _Round) -> _Exchange:
        """The same as all-gathers, grouped by the backend where torch can; in place where a row lies in one piece."""
        group, num_bytes = self._topology.group_of(each.among), 0
        is_whole = all(row == list(range(row[0], row[-1] + 1)) for row in each.rows)
        is_whole = is_whole and all(self._parts[index].is_whole for index in indices)
        calls: list[_Call] = []
        for part, pieces in ((self._parts[index], self._pieces[index]) for index in indices):
            for row in each.rows:
                mine, start = pieces[row[each.me]], part.place_of(row[0]).start
                num_bytes += mine.nbytes * len(row)
                whole = self._full[start : start + len(row) * part.numel] if is_whole else [pieces[i] for i in row]
                calls.append(partial(_all_gather, whole, mine, group))
        if self._full.device.type == "cpu":  # nothing to win, and what is grouped cannot be waited for with a time-out
            return _Exchange(each.among, num_bytes, calls)
        return _Exchange(each.among, num_bytes, calls, _grouping(group, None if is_whole else self._full.device))

    def _add_up(self) -> Any:
        """An all-reduce of the full layout, in which the parts of others are zero."""
        for pieces in self._pieces:
            for rank, piece in enumerate(pieces):
                if rank != self._topology.shard_rank:
                    piece.zero_()
        self._topology.traffic.add("all_reduce", self._what, self._full.nbytes, "shard")
        return dist.all_reduce(self._full.view(torch.int32), group=self._topology.group_of("shard"), async_op=True)


class _Exchange(NamedTuple):
    """Calls that are started together, again and again, with all their arguments."""

    among: str
    num_bytes: int
    calls: list[_Call]
    grouping: Callable[[], contextlib.AbstractContextManager[Any]] | None = None  # makes them one call of the backend's

    def start(self) -> list[Any]:
        """Returns what is to be waited for."""
        if self.grouping is None:
            return [work for call in self.calls for work in call()]
        with self.grouping() as grouped:
            for call in self.calls:
                call()
        return [grouped]


class _Round(NamedTuple):
    """An exchange among some of the ranks: of each row of places in a parameter, every one brings its own."""

    among: str
    me: int  # this rank's place in a row
    rows: list[list[int]]


def _rounds_of(topology: Topology) -> list[_Round]:
    """One round among all that share the parts; or across nodes first and then within each, where bytes cross once."""
    if not topology.gathers_in_stages:
        return [_Round("shard", topology.shard_rank, [list(range(topology.num_shards))])]
    across, within = topology.across, topology.within
    assert across is not None and within is not None
    places = [[node * within.size + local for local in range(within.size)] for node in range(across.size)]
    return [
        _Round("across", across.rank, [[row[within.rank] for row in places]]),
        _Round("within", within.rank, places),
    ]


def _all_gather(whole: torch.Tensor | list[torch.Tensor], mine: torch.Tensor, group: dist.ProcessGroup) -> list[Any]:
    """Starts the gather of every rank's `mine` into one tensor, or into one for each rank."""
    if isinstance(whole, list):
        return [dist.all_gather(whole, mine, group=group, async_op=True)]
    return [newest(dist.all_gather_into_tensor)(whole, mine, group=group, async_op=True)]


def _grouping(
    group: dist.ProcessGroup, device: torch.device | None
) -> Callable[[], contextlib.AbstractContextManager[Any]] | None:
    manager = getattr(dist.distributed_c10d, "_coalescing_manager", None)  # private: each is a call without it
    return None if manager is None else partial(manager, group, device, async_ops=True)


class Part(NamedTuple):
    """What a span of the shard layout holds of every rank's share of a parameter."""

    shard: Shard
    start: int  # in the share
    numel: int

    @property
    def shard_offset(self) -> int:
        """Where the part begins in the shard layout."""
        return self.shard.shard_offset + self.start

    @property
    def is_whole(self) -> bool:
        """Whether it is all of the share, so that those of all ranks lie one after the other in the full layout."""
        return self.numel == self.shard.shard_numel

    def place_of(self, rank: int) -> slice:
        """Where a rank's part lies in the full layout."""
        first = self.shard.full_offset + rank * self.shard.shard_numel + self.start
        return slice(first, first + self.numel)


def cut_span(unit: Unit, span: slice | None) -> list[Part]:
    """The parts of a unit's parameters that a span of its shard layout holds; None: all of each."""
    if span is None:
        return [Part(shard, 0, shard.shard_numel) for shard in unit.shards if shard.numel]
    bounds = [
        (s, max(0, span.start - s.shard_offset), min(s.shard_numel, span.stop - s.shard_offset)) for s in unit.shards
    ]
    return [Part(shard, start, stop - start) for shard, start, stop in bounds if start < stop]


def spans_of(unit: Unit, num_shards: int, limit_numel: int) -> list[slice]:
    """Cuts a unit's shard layout into spans of at most `limit_numel` elements, those of all ranks together; one at least."""
    room = max(1, limit_numel // num_shards)
    last = unit.shards[-1]
    end = last.shard_offset + last.shard_numel
    return [slice(start, min(start + room, end)) for start in range(0, end, room)]


def gather_unit(
    topology: Topology, unit: Unit, shard: torch.Tensor, full: torch.Tensor, span: slice | None = None
) -> None:
    """Fills the full layout, or a span's part of it, from every rank's. Blocks (in stream order on a GPU).

    shard: this rank's flat shard layout, or what the span holds of it.
    """
    whole = UnitGather(topology, unit, full, span=span)
    whole.put(shard)
    whole.start().wait()


def gather(topology: Topology, mine: torch.Tensor, whole: torch.Tensor, what: str) -> None:
    """Fills `whole` with the parts of the ranks that share it, in their order. Blocks."""
    if topology.gathers_in_stages:
        _gather_in_stages(topology, mine, whole, what)
    else:
        call(topology, what, dist.all_gather_into_tensor, whole, mine, among="shard")


def _gather_in_stages(topology: Topology, mine: torch.Tensor, whole: torch.Tensor, what: str) -> None:
    """Gathers from this rank's place on every node, then one node's parts after the other within this node.

    A byte crosses to this node once for all its ranks. The first stage takes a buffer of num_across parts.
    """
    assert topology.across is not None
    num_nodes = topology.across.size
    from_nodes = mine.new_empty(num_nodes, mine.numel())
    call(topology, what, dist.all_gather_into_tensor, from_nodes.view(-1), mine, among="across")
    for node, of_node in zip(from_nodes, whole.view(num_nodes, -1), strict=True):
        call(topology, what, dist.all_gather_into_tensor, of_node, node, among="within")
