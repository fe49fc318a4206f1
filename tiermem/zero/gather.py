"""Gather: every rank's part brought together on all ranks; the second copy of hpZ; the update of resident units."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist

from tiermem.policy import OffloadPolicy
from tiermem.swap.arena import Pool
from tiermem.swap.ranges import round_up
from tiermem.zero.collectives import (
    GATHER_TAG,
    Pending,
    Then,
    call,
    explained,
    newest,
    send_to_all,
    sends_directly,
    start,
)
from tiermem.zero.topology import Topology
from tiermem.zero.unit import ALIGN, UNIT_ALIGN, Shard, Unit

# ---- Gather: every rank's part of something, brought together on all of them, straight into its final place ----------
#
#     UnitGather    every rank's shard of a unit     -> the unit's full layout, which the maths sees; may run behind compute
#     gather_unit   the same, at once, or a span of the shard layout after the other
#     gather        every rank's part of one tensor  -> the whole, in the order of ranks
#
# A rank puts its own part into the full layout first, in the dtype that the maths sees (so what crosses ranks is in
# that dtype as well), and the buffer that the shard was read into is free from then on. Then the parts are exchanged in
# place:
#
#     coalesced    all parameters of the unit as one call
#     single       one parameter after the other: nothing is buffered for more than one of them
#   all_reduce   the other ranks' parts are set to zero and the whole layout is added up, as integers: bits stay what they are
#
# Over gloo an all-gather collects into a tensor of its own, as large as all that is gathered, and copies from there; so
# between CPUs each rank's part travels as a message to each of the others, received where it belongs. NCCL gathers in
# place.

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
        is_single: one parameter after the other, with nothing buffered for more than one; else all as one call.
        span: elements of the shard layout that are gathered; default: all of it.
    """

    def __init__(
        self, topology: Topology, unit: Unit, full: torch.Tensor, is_single: bool = False, span: slice | None = None
    ) -> None:
        self._topology = topology
        self._full = full
        self._is_single = is_single
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
        calls = [[index] for index in everything] if self._is_single else [everything]
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
    """Fills `whole` with the parts of the ranks that share it, in their order. Blocks.

    In two stages: from this rank's place on every node, then one node's parts after the other within this node. A byte crosses
    to this node once for all its ranks. The first stage takes a buffer of num_across parts.
    """
    if not topology.gathers_in_stages:
        call(topology, what, dist.all_gather_into_tensor, whole, mine, among="shard")
        return
    assert topology.across is not None
    num_nodes = topology.across.size
    from_nodes = mine.new_empty(num_nodes, mine.numel())
    call(topology, what, dist.all_gather_into_tensor, from_nodes.view(-1), mine, among="across")
    for node, of_node in zip(from_nodes, whole.view(num_nodes, -1), strict=True):
        call(topology, what, dist.all_gather_into_tensor, of_node, node, among="within")


# ---- NearGather: a second copy of a unit's gathered parameters, kept among ranks that are near each other (hpZ) ------


def secondary_numel(unit: Unit, num_across: int) -> int:
    """Elements of a rank's part of a unit's second copy."""
    return round_up(sum(round_up(s.shard_numel * num_across, ALIGN) for s in unit.shards), UNIT_ALIGN)


class NearGather:
    """The gather of one unit with a second copy: from all ranks, and then from near ones until the weights change.

        forward    gathers from the shards of all ranks, over every node    and each rank keeps its part of what came
        backward   gathers from those parts, within `Topology.within`       no byte leaves the node

    Of every parameter a rank keeps a num_within-th of its full layout, contiguous, so that it is gathered straight into place,
    too. It holds the very bits that forward computed with. Until weights change at home every gather of the unit is served from
    the copy, those of further micro-batches included. It costs num_across shards of memory per unit.

    Args:
        topology: with `within` and `across`.
        far: gathers from all ranks.
        full: the unit's full layout.
        copy: `secondary_numel` elements in the dtype of the full layout, for this rank's part.
    """

    def __init__(self, topology: Topology, unit: Unit, far: Gather, full: torch.Tensor, copy: torch.Tensor) -> None:
        assert topology.across is not None
        self._topology = topology
        self._unit = unit
        self._far = far
        self._full = full
        self._is_filled = False
        self._parts: list[torch.Tensor] = []  # of the copy, one per parameter
        offset = 0
        for shard in unit.shards:
            numel = shard.shard_numel * topology.across.size
            self._parts.append(copy[offset : offset + numel])
            offset += round_up(numel, ALIGN)

    @property
    def needs_shard(self) -> bool:
        """Whether the next gather begins at the shard; else it need not be read."""
        return not self._is_filled

    def put(self, shard: torch.Tensor | None) -> None:
        """Takes this rank's flat shard layout, when it is needed."""
        if not self._is_filled:
            self._far.put(shard)

    def start(self) -> Pending:
        """Starts the exchange, after `put`. Collective; does not block. Raises RankLost."""
        if not self._is_filled:
            return Then([self._far.start()], self._keep)
        what = f"gathering {self._unit.name}"
        pairs = [pair for pair in zip(self._wholes(), self._parts, strict=True) if pair[0].numel()]
        collective = dist.all_gather_into_tensor
        return Then([start(self._topology, what, collective, *pair, among="within") for pair in pairs])

    def outdate(self) -> None:
        """The weights are about to change at home."""
        self._is_filled = False

    def _keep(self) -> None:
        """Copies this rank's part out of the full layout, which has just been gathered."""
        assert self._topology.within is not None
        for mine, whole in zip(self._parts, self._wholes(), strict=True):
            mine.copy_(whole.view(self._topology.within.size, -1)[self._topology.within.rank])
        self._is_filled = True

    def _wholes(self) -> list[torch.Tensor]:
        """The parameters in the full layout; its memory comes and goes, so the views are made anew."""
        num_shards = self._topology.num_shards
        return [self._full[s.full_offset : s.full_offset + s.shard_numel * num_shards] for s in self._unit.shards]


# ---- Updating: the weights of units that stay present, brought from the ranks that have stepped them to all the ------
# others
#
#     a span of every rank's shard layout, at most `allgather_bucket_numel` elements of all ranks together, then the next
#
#     all-gather (allgather_partitions)    every rank's span in one call, straight into the full layout
#     broadcasts                           one rank's span after the other: its owner sends it as it rests, the others receive
#                                          it in a buffer of one span and copy each parameter's part to its place
#
# Both leave the same bits. A span ends where its room does, in the middle of a parameter or of several. What it bounds
# is what a call carries, and with it the memory that is needed beside weights and shards: the buffer of broadcasts,
# what a backend collects in, and on a GPU the span on its way there. Units that come and go are gathered whole
# (gather.py).


class Updating:
    """Brings new weights to all ranks. Collective: every rank calls it for the same units in the same order.

    Args:
        pool: a buffer of `span_bytes` of the largest unit, for broadcasts between CPUs; None: torch's own memory.
    """

    def __init__(self, topology: Topology, policy: OffloadPolicy, pool: Pool | None) -> None:
        self._topology = topology
        self._is_gathered = policy.allgather_partitions
        self._limit_numel = policy.allgather_bucket_numel
        self._pool = pool

    def spread(self, unit: Unit, shard: torch.Tensor, full: torch.Tensor) -> None:
        """Fills a unit's full layout from every rank's flat shard layout. Raises RankLost.

        Blocks, on a GPU in stream order.
        """
        num_shards = self._topology.num_shards
        if num_shards == 1:
            gather_unit(self._topology, unit, shard.to(full.device), full)
            return
        for span in spans_of(unit, num_shards, self._limit_numel):
            mine = shard[span].to(full.device)
            if self._is_gathered:
                gather_unit(self._topology, unit, mine, full, span)
            else:
                self._broadcast(unit, mine, full, span)

    def _broadcast(self, unit: Unit, mine: torch.Tensor, full: torch.Tensor, span: slice) -> None:
        slot = self._pool.take() if self._pool is not None else None
        try:
            buffer = torch.empty_like(mine) if slot is None else slot.tensor[: mine.nbytes].view(mine.dtype)
            for owner in range(self._topology.num_shards):
                sent = mine if owner == self._topology.shard_rank else buffer
                source = dist.get_global_rank(self._topology.group_of("shard"), owner)
                call(self._topology, f"gathering {unit.name}", dist.broadcast, sent, source, among="shard")
                for part in cut_span(unit, span):
                    place = part.shard_offset - span.start
                    full[part.place_of(owner)].copy_(sent[place : place + part.numel])
        finally:
            if self._pool is not None and slot is not None:
                self._pool.give_back(slot)


def span_bytes(unit: Unit, num_shards: int, policy: OffloadPolicy) -> int:
    """Bytes of the buffer that a unit's broadcasts are received in; 0 when there are none."""
    if policy.allgather_partitions or num_shards == 1:
        return 0
    longest = max((s.stop - s.start for s in spans_of(unit, num_shards, policy.allgather_bucket_numel)), default=0)
    return longest * unit.dtype.itemsize
