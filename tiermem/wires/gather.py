"""Gather: brings every rank's part to all ranks; keeps the secondary copy of hpZ; spreads new
weights of resident units."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from tiermem.ranks.collectives import (
    GATHER_TAG,
    Pending,
    Then,
    call,
    explaining,
    marked,
    newest,
    send_to_all,
    sends_directly,
    start,
)
from tiermem.ranks.topology import Topology
from tiermem.swap.base.ranges import round_up
from tiermem.units.unit import ALIGN, UNIT_ALIGN, Unit, ranges_in

# ---- gathers -------------------------------------------------------------------------------------
#
#     UnitGather    every rank's shard of a unit     -> the unit's full layout, which the maths sees; may overlap compute
#     gather_unit   the same, at once; also for a span of the shard layout
#     assemble      every rank's part of one tensor  -> the whole tensor, in the order of ranks
#
# A rank first copies its own part into the full layout, in the dtype that the maths sees, so this
# dtype also crosses ranks. The buffer that the shard was read into is free after that. Then the
# parts are exchanged in place:
#
#     coalesced    all parameters of the unit in one call
#     single       one parameter after the other, so that at most one parameter is buffered
#
# gloo's all-gather collects into a tensor as large as everything gathered, and copies from there.
# So between CPUs each rank's part travels as a message to each of the others and is received in its
# final place. NCCL gathers in place, where the places of all ranks lie one behind the other. Else
# (a part of a parameter, one rank of every node) the pieces travel through a flat buffer, and the
# wait copies them out. torch's all_gather of a list would do that as well, but in a group of calls
# it queues those copies before NCCL launches the gather.

_Call = Callable[[], Sequence[Any]]  # starts transfers and returns the handles to wait for


class Gather:
    """The gather of one unit, in two steps: `put` takes this rank's shard, `start` begins the
    exchange."""

    @property
    def needs_shard(self) -> bool:
        """Whether the next gather needs this rank's shard; else the shard need not be read."""
        return True

    def put(self, shard: torch.Tensor | None) -> None:
        """Takes this rank's flat shard layout; None when the gather does not need it."""
        raise NotImplementedError

    def start(self) -> Pending:
        """Starts the exchange. Collective; does not block."""
        raise NotImplementedError

    def outdate(self) -> None:
        """Notes that the weights are about to change where they rest; a secondary copy is not used
        again."""

    def renew(self, full: torch.Tensor) -> None:
        """Makes a secondary copy that of a full layout which the user has written. Not
        collective."""


class UnitGather(Gather):
    """The gather of one unit; may be repeated. Collective: every rank starts the same gathers in
    the same order.

    Args:
        topology: the ranks that share the unit.
        unit: the unit to gather.
        full: its full layout; its storage has bytes whenever a gather runs.
        is_single: gather one parameter after the other, so that at most one is buffered; else all
            in one call.
        span: the elements of the shard layout to gather; default: all of it.
    """

    def __init__(
        self,
        topology: Topology,
        unit: Unit,
        full: torch.Tensor,
        is_single: bool = False,
        span: slice | None = None,
    ) -> None:
        self._topology = topology
        self._full = full
        self._is_single = is_single
        self._what = f"gathering {unit.name}"
        self._first = span.start if span is not None else 0
        self._parts = ranges_in(unit, span)
        # per parameter, every rank's part of the full layout: views, made once
        self._pieces: list[list[torch.Tensor]] = []
        self._own: list[torch.Tensor] = []  # this rank's among them
        # between these views, in the order in which they are started
        self._exchanges: list[_Exchange] = []
        self._shard: torch.Tensor | None = None
        self._mine: list[torch.Tensor] = []  # views of the shard, one per parameter

    def put(self, shard: torch.Tensor | None) -> None:
        """Copies this rank's flat shard layout, or the span of it, into its place in the full
        layout.

        The shard may be reused afterwards; on a GPU when the current stream has done the copy.
        """
        assert shard is not None
        if not self._pieces:
            self._prepare()
        if shard is not self._shard:  # a shard that rests in memory is the same tensor every time
            self._shard = shard
            spans = [part.in_unit for part in self._parts]
            self._mine = [
                shard[span.start - self._first : span.stop - self._first] for span in spans
            ]
        if self._parts:
            torch._foreach_copy_(self._own, self._mine, non_blocking=True)

    def start(self) -> Pending:
        """Starts the exchange, after `put`. Does not block. Raises RankLost."""
        with explaining(self._topology, self._what):
            return Pending(self._topology, self._what, self._start(), [self._full])

    def _start(self) -> Iterable[Sequence[Any]]:
        """Starts the first round; the wait starts each later round after the round before it."""
        first = [self._begin(exchange) for exchange in self._exchanges[:1]]
        return itertools.chain(first, map(self._begin, self._exchanges[1:]))

    def _begin(self, exchange: _Exchange) -> list[Any]:
        self._topology.traffic.add("all_gather", self._what, exchange.num_bytes, exchange.among)
        return exchange.start()

    def _prepare(self) -> None:
        """Makes the views that every gather uses. Not before the first gather: a storage without
        bytes cannot be viewed."""
        ranks = range(self._topology.num_shards)
        self._pieces = [[self._full[part.in_full(rank)] for rank in ranks] for part in self._parts]
        self._own = [pieces[self._topology.shard_rank] for pieces in self._pieces]
        if self._topology.num_shards == 1 or not self._parts:
            return
        everything = list(range(len(self._parts)))
        calls = [[index] for index in everything] if self._is_single else [everything]
        is_direct = sends_directly(self._topology.group, self._full.device)
        make = self._messages if is_direct else self._all_gathers
        self._exchanges = [
            make(call, each) for call in calls for each in _rounds_of(self._topology)
        ]

    def _messages(self, indices: list[int], each: _Round) -> _Exchange:
        """One round of the exchange of some parameters, as messages of every rank's piece between
        every two ranks."""
        group = self._topology.group_of(each.among)
        num_bytes = 0
        calls: list[_Call] = []
        for index in indices:
            for row, ranks in enumerate(each.rows):
                pieces = [self._pieces[index][rank] for rank in ranks]
                num_bytes += sum(piece.nbytes for piece in pieces)
                tag = (row + 1) * GATHER_TAG + self._parts[index].shard.index
                calls.append(partial(send_to_all, group, each.me, pieces, tag))
        return _Exchange(each.among, num_bytes, calls, marked_in=group)

    def _all_gathers(self, indices: list[int], each: _Round) -> _Exchange:
        """The same round as one backend call: in place where the pieces of a row lie one behind the
        other, else flat."""
        group = self._topology.group_of(each.among)
        rows = [
            [self._pieces[index][rank] for rank in row] for index in indices for row in each.rows
        ]
        num_bytes = sum(piece.nbytes for row in rows for piece in row)
        is_in_place = all(row == list(range(row[0], row[-1] + 1)) for row in each.rows)
        if not (is_in_place and all(self._parts[index].is_whole for index in indices)):
            return _Exchange(each.among, num_bytes, [partial(_gather_flat, group, each.me, rows)])
        calls: list[_Call] = []
        for row in rows:
            first = row[0].storage_offset() - self._full.storage_offset()
            whole = self._full[first : first + len(row) * row[0].numel()]
            calls.append(partial(_gather_in_place, group, whole, row[each.me]))
        # on a CPU grouping gains nothing, and a grouped call has no wait with a time-out
        grouping = None if self._full.device.type == "cpu" else _grouping(group)
        return _Exchange(each.among, num_bytes, calls, grouping)


class _Exchange(NamedTuple):
    """Calls that are started together, with all their arguments; used for every gather."""

    among: str
    num_bytes: int
    calls: list[_Call]
    # makes the calls one backend call
    grouping: Callable[[], contextlib.AbstractContextManager[Any]] | None = None
    marked_in: dist.ProcessGroup | None = None  # the group of messages, which marks follow

    def start(self) -> list[Any]:
        """Starts the calls and returns the handles to wait for."""
        if self.grouping is None:
            works = [work for call in self.calls for work in call()]
            return works if self.marked_in is None else marked(self.marked_in, works)
        with self.grouping() as grouped:
            for call in self.calls:
                call()
        return [grouped]


class _Round(NamedTuple):
    """One exchange among some ranks. Each row lists pieces of a parameter, by the rank that
    has them; every rank contributes its own."""

    among: str
    me: int  # this rank's position in a row
    rows: list[list[int]]


def _rounds_of(topology: Topology) -> list[_Round]:
    """One round among all ranks that share the parts; or two, across nodes and then within, so
    bytes cross nodes once."""
    if not topology.gathers_in_stages:
        return [_Round("shard", topology.shard_rank, [list(range(topology.num_shards))])]
    across = topology.across
    within = topology.within
    assert across is not None and within is not None
    rows = [
        [node * within.size + local for local in range(within.size)] for node in range(across.size)
    ]
    return [
        _Round("across", across.rank, [[row[within.rank] for row in rows]]),
        _Round("within", within.rank, rows),
    ]


def _gather_in_place(
    group: dist.ProcessGroup, whole: torch.Tensor, mine: torch.Tensor
) -> list[Any]:
    """Starts the gather of every rank's piece into the tensor that holds this rank's."""
    return [newest(dist.all_gather_into_tensor)(whole, mine, group=group, async_op=True)]


def _gather_flat(group: dist.ProcessGroup, me: int, rows: list[list[torch.Tensor]]) -> list[Any]:
    """Starts the gather of every rank's pieces through one buffer; rank r's pieces come to
    position r of each row."""
    mine = torch.cat([row[me] for row in rows])
    come = mine.new_empty(len(rows[0]), mine.numel())
    work = newest(dist.all_gather_into_tensor)(come.view(-1), mine, group=group, async_op=True)
    return [_Flat(work, come, rows, mine)]


@dataclasses.dataclass(eq=False)
class _Flat:
    """A gather into a buffer, under way. Its wait copies the pieces of the other ranks to
    where they belong."""

    _work: Any
    _come: torch.Tensor
    _rows: list[list[torch.Tensor]]
    _mine: torch.Tensor  # read until the work has ended

    def wait(self, *limit: timedelta) -> None:
        """Waits as the work does, then copies: on an accelerator both on the current stream. Raises
        RuntimeError."""
        self._work.wait(*limit)
        sizes = [row[0].numel() for row in self._rows]
        pieces = [piece for rank in self._come for piece in rank.split_with_sizes(sizes)]
        torch._foreach_copy_(
            [row[rank] for rank in range(len(self._come)) for row in self._rows], pieces
        )


def _grouping(
    group: dist.ProcessGroup,
) -> Callable[[], contextlib.AbstractContextManager[Any]] | None:
    # private to torch; else calls are separate
    manager = getattr(dist.distributed_c10d, "_coalescing_manager", None)
    return None if manager is None else partial(manager, group, None, async_ops=True)


def spans_of(unit: Unit, num_shards: int, limit_numel: int) -> list[slice]:
    """Cuts a unit's shard layout into spans of at most `limit_numel` elements over all ranks, and
    at least one per rank."""
    room = max(1, limit_numel // num_shards)
    last = unit.shards[-1]
    end = last.shard_offset + last.shard_numel
    return [slice(start, min(start + room, end)) for start in range(0, end, room)]


def gather_unit(
    topology: Topology,
    unit: Unit,
    shard: torch.Tensor,
    full: torch.Tensor,
    span: slice | None = None,
) -> None:
    """Fills the full layout, or a span's part of it, from every rank's shard. Collective; blocks
    (on a GPU in stream order).

    shard: this rank's flat shard layout, or the span of it.
    """
    whole = UnitGather(topology, unit, full, span=span)
    whole.put(shard)
    with explaining(topology, f"gathering {unit.name}"):
        whole.start().wait()


def assemble(
    topology: Topology, local: torch.Tensor, share: int, device: torch.device, what: str
) -> torch.Tensor:
    """The elements of every rank's part, in the order of ranks: flat, on the CPU. Collective;
    blocks.

    Takes memory for the whole elements on `device`, and for those on the CPU if that is another
    device. On an accelerator no row of a plan counts it, because no forward or backward is under
    way: it has the room of the gradients that autograd and the link hold in backward, which is that
        of more than one unit.

    local: this rank's part, flat, with or without its padding.
    share: elements of a part with its padding.
    device: where the parts are exchanged.
    """
    if topology.num_shards == 1 or not share:
        return local
    rows = torch.empty(topology.num_shards, share, dtype=local.dtype, device=device)
    mine = rows[topology.shard_rank]
    mine[: local.numel()].copy_(local)
    mine[local.numel() :].zero_()
    gather(topology, rows, what)
    return rows.view(-1).cpu()


def gather(topology: Topology, rows: torch.Tensor, what: str) -> None:
    """Fills the rows with the parts of the ranks that share them; this rank's own row holds its
    part. Collective; blocks.

    With `gathers_in_stages` there are two stages: the first gathers from this rank's peer on every
    node, the second gathers each node's parts within this node. A byte crosses to this node once
    for all its ranks. If a backend runs the stages, the first takes a buffer of num_across parts.
    """
    if sends_directly(topology.group, rows.device):
        for each in _rounds_of(topology):
            _send_rows(topology, each, rows, what)
        return
    mine = rows[topology.shard_rank]
    if not topology.gathers_in_stages:
        call(topology, what, dist.all_gather_into_tensor, rows.view(-1), mine, among="shard")
        return
    assert topology.across is not None
    num_nodes = topology.across.size
    from_nodes = rows.new_empty(num_nodes, mine.numel())
    call(topology, what, dist.all_gather_into_tensor, from_nodes.view(-1), mine, among="across")
    for node, of_node in zip(from_nodes, rows.view(num_nodes, -1), strict=True):
        call(topology, what, dist.all_gather_into_tensor, of_node, node, among="within")


def _send_rows(topology: Topology, each: _Round, rows: torch.Tensor, what: str) -> None:
    """One round of a gather as messages of every rank's row between every two ranks."""
    group = topology.group_of(each.among)
    works = list[Any]()
    with explaining(topology, what):
        for number, ranks in enumerate(each.rows):
            pieces = [rows[rank] for rank in ranks]
            topology.traffic.add(
                "all_gather", what, sum(piece.nbytes for piece in pieces), each.among
            )
            # a tag of no unit
            works += send_to_all(group, each.me, pieces, (number + 2) * GATHER_TAG - 1)
        Pending(topology, what, [marked(group, works)], [rows]).wait()


# ---- the secondary copy of hpZ -------------------------------------------------------------------


def secondary_numel(unit: Unit, num_across: int) -> int:
    """Elements of a rank's part of a unit's secondary copy."""
    return round_up(
        sum(round_up(s.shard_numel * num_across, ALIGN) for s in unit.shards), UNIT_ALIGN
    )


class NearGather(Gather):
    """The gather of one unit with a secondary copy (hpZ): from all ranks at first, then from near
    ranks until weights change.

        forward    gathers from the shards of all ranks, over all nodes    each rank keeps its part of the result
        backward   gathers from those parts, within `Topology.within`      no byte leaves the node

    Of every parameter a rank keeps 1 / num_within of the full layout, contiguous, so this gather
    also is in place. The copy has the same bits that forward computed with. Until weights change
    where they rest, every gather of the unit uses the copy, also in later micro-batches. It costs
    the memory of num_across shards per unit.

    Args:
        topology: with `within` and `across`.
        far: the gather from all ranks.
        full: the unit's full layout.
        copy: `secondary_numel` elements in the dtype of the full layout, for this rank's part.
    """

    def __init__(
        self, topology: Topology, unit: Unit, far: Gather, full: torch.Tensor, copy: torch.Tensor
    ) -> None:
        assert topology.across is not None
        self._topology = topology
        self._unit = unit
        self._far = far
        self._full = full
        self._is_filled = False
        self._parts: list[torch.Tensor] = []  # views of the copy, one per parameter
        offset = 0
        for shard in unit.shards:
            numel = shard.shard_numel * topology.across.size
            self._parts.append(copy[offset : offset + numel])
            offset += round_up(numel, ALIGN)

    @property
    def needs_shard(self) -> bool:
        """Whether the next gather needs this rank's shard: True until the copy is filled."""
        return not self._is_filled

    def put(self, shard: torch.Tensor | None) -> None:
        """Takes this rank's flat shard layout, unless the copy is filled."""
        if not self._is_filled:
            self._far.put(shard)

    def start(self) -> Pending:
        """Starts the exchange, after `put`. Collective; does not block. Raises RankLost."""
        if not self._is_filled:
            return Then([self._far.start()], partial(self._keep, self._full))
        what = f"gathering {self._unit.name}"
        return Then(
            [
                start(self._topology, what, dist.all_gather_into_tensor, *pair, among="within")
                for pair in zip(self._wholes(self._full), self._parts, strict=True)
                if pair[0].numel()
            ]
        )

    def outdate(self) -> None:
        """Notes that the weights are about to change where they rest: the next gather is from all
        ranks."""
        self._is_filled = False

    def renew(self, full: torch.Tensor) -> None:
        """Makes the copy that of a full layout which the user has written. It stays filled: ranks
        whose user has written nothing gather from it next."""
        if self._is_filled:
            self._keep(full)

    def _keep(self, full: torch.Tensor) -> None:
        """Copies this rank's part out of a full layout."""
        assert self._topology.within is not None
        for mine, whole in zip(self._parts, self._wholes(full), strict=True):
            mine.copy_(whole.view(self._topology.within.size, -1)[self._topology.within.rank])
        self._is_filled = True

    def _wholes(self, full: torch.Tensor) -> list[torch.Tensor]:
        """The parameters in a full layout. The views are made anew, since the layout's memory comes
        and goes."""
        num_shards = self._topology.num_shards
        return [
            full[s.full_offset : s.full_offset + s.shard_numel * num_shards]
            for s in self._unit.shards
        ]


# ---- new weights for resident units --------------------------------------------------------------


def spread(
    topology: Topology, unit: Unit, shard: torch.Tensor, full: torch.Tensor, limit_numel: int
) -> None:
    """Fills a resident unit's full layout with new weights from every rank's flat shard layout.

    The shard layouts are gathered in spans of at most `limit_numel` elements over all ranks. A span
    may end inside a parameter and may hold several. The limit bounds the bytes of a call, and so
    the memory beside weights and shards: the backend's buffer. Streamed units are gathered whole
    (UnitGather).

    Collective: every rank calls it for the same units in the same order. Blocks, on a GPU in stream
    order: there the shard must not change until the current stream has copied it. Raises RankLost.
    """
    if topology.num_shards == 1:
        full.copy_(shard, non_blocking=True)
        return
    for span in spans_of(unit, topology.num_shards, limit_numel):
        gather_unit(topology, unit, shard[span], full, span)
