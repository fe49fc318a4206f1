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
from collections.abc import Iterable
from typing import Any, Literal, NamedTuple, Protocol

import torch
import torch.distributed as dist

from tiermem.zero.ranks.collectives import Pending, call, explained
from tiermem.zero.ranks.messages import GATHER_TAG, send_to_all, sends_directly
from tiermem.zero.ranks.topology import Topology
from tiermem.zero.unit import Shard, Unit

Way = Literal["coalesced", "single", "all_reduce"]
"""How the parts of a unit are exchanged; see above."""


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
        self._shard: torch.Tensor | None = None
        self._mine: list[torch.Tensor] = []  # views of that
        self._rounds = _rounds_of(topology)
        self._is_direct = sends_directly(topology.group, full.device)

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
        if not self._pieces:  # a storage without bytes cannot be viewed
            self._pieces = [self._cut(part) for part in self._parts]
        if shard is not self._shard:  # one that rests in memory is the same every time
            self._shard = shard
            places = [(part.shard_offset - self._first, part.numel) for part in self._parts]
            self._mine = [shard[place : place + numel] for place, numel in places]
        if self._parts:
            own = [pieces[self._topology.shard_rank] for pieces in self._pieces]
            torch._foreach_copy_(own, self._mine, non_blocking=True)

    def start(self) -> Pending:
        """Starts the exchange, after `put`. Does not block. Raises RankLost."""
        if self._topology.num_shards == 1 or not self._parts:
            return self._pending([])
        everything = list(range(len(self._parts)))
        try:
            if self._way == "all_reduce":
                return self._pending([[self._add_up()]])
            calls = [[index] for index in everything] if self._way == "single" else [everything]
            rounds = ((call, each) for call in calls for each in self._rounds)
            first = self._exchange(*next(rounds))
            rest = (self._exchange(call, each) for call, each in rounds)  # as the wait asks for them
            return self._pending(itertools.chain([first], rest))
        except RuntimeError as error:
            raise explained(self._topology, self._what, error) from error

    def _cut(self, part: Part) -> list[torch.Tensor]:
        """The places of every rank's piece of a parameter in the full layout."""
        return [self._full[part.place_of(rank)] for rank in range(self._topology.num_shards)]

    def _pending(self, rounds: Iterable[list[Any]]) -> Pending:
        return Pending(self._topology, self._what, rounds, [self._full])

    def _exchange(self, indices: list[int], each: _Round) -> list[Any]:
        """Starts one round of the exchange of some parameters; returns what is to be waited for."""
        rows = [
            (index, row, [self._pieces[index][i] for i in places])
            for index in indices
            for row, places in enumerate(each.rows)
        ]
        num_bytes = sum(piece.nbytes for _, _, pieces in rows for piece in pieces)
        self._topology.traffic.add("all_gather", self._what, num_bytes, each.among)
        group = self._topology.group_of(each.among)
        if not self._is_direct:
            return self._all_gather(group, each, indices)
        return [
            work
            for index, row, pieces in rows
            for work in send_to_all(group, each.me, pieces, (row + 1) * GATHER_TAG + self._parts[index].shard.index)
        ]

    def _all_gather(self, group: dist.ProcessGroup, each: _Round, indices: list[int]) -> list[Any]:
        """All-gathers of a round, grouped by the backend where torch can; in place where a row lies in one piece."""
        is_whole = all(row == list(range(row[0], row[-1] + 1)) for row in each.rows) and all(
            self._parts[index].is_whole for index in indices
        )
        grouping = getattr(dist.distributed_c10d, "_coalescing_manager", None)  # private: each is a call without it
        device = None if is_whole else self._full.device
        works = []
        with grouping(group, device, async_ops=True) if grouping else contextlib.nullcontext() as grouped:
            for part, pieces in ((self._parts[index], self._pieces[index]) for index in indices):
                for row in each.rows:
                    mine, start = pieces[row[each.me]], part.place_of(row[0]).start
                    if is_whole:
                        whole = self._full[start : start + len(row) * part.numel]
                        works.append(dist.all_gather_into_tensor(whole, mine, group=group, async_op=True))
                    else:
                        row_pieces = [pieces[place] for place in row]
                        works.append(dist.all_gather(row_pieces, mine, group=group, async_op=True))
        return works if grouped is None else [grouped]

    def _add_up(self) -> Any:
        """An all-reduce of the full layout, in which the parts of others are zero."""
        for pieces in self._pieces:
            for rank, piece in enumerate(pieces):
                if rank != self._topology.shard_rank:
                    piece.zero_()
        self._topology.traffic.add("all_reduce", self._what, self._full.nbytes, "shard")
        return dist.all_reduce(self._full.view(torch.int32), group=self._topology.group_of("shard"), async_op=True)


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
