"""Packed: gathers and reductions that send blocks instead of values (ZeRO++: qwZ, qgZ), and gathers
of packed units.

    gather     shard --pack--> all-gather of the unit's packed shard, one call --unpack--> the full layout
               Every rank, also the sender, computes with the unpacked values, so ranks agree.
               Shards and masters keep their precision. A unit that rests packed is sent as it
               rests; with one shard it is only unpacked, on a CPU straight from where it rests, or
               has been read to, into the full layout.

    reduce     columns for all ranks --pack--> all-to-all --unpack, add up in fp32, in the order of ranks--> this rank's column
               Over several nodes there are two steps, within the node first, so that only one
               node's sum crosses nodes:

                   columns[across][within]  -> to each rank of the node its column of every node  -> this node's sums
                                            -> to each node its own sums                          -> this rank's column

A value is rounded once per step, by at most half a scale of its block (quantised.py).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable

import torch
import torch.distributed as dist

from tiermem.policy import OffloadPolicy
from tiermem.ranks.collectives import (
    GATHER_TAG,
    Pending,
    Then,
    explaining,
    marked,
    send_to_all,
    sends_directly,
    start,
    swap_rows,
)
from tiermem.ranks.topology import Topology
from tiermem.swap.base.native import Workers
from tiermem.swap.base.ranges import round_up
from tiermem.swap.memory.accelerator import is_accelerator
from tiermem.swap.memory.arena import Pool
from tiermem.units.quantised import INT8, pack_into, unpack
from tiermem.units.unit import Unit
from tiermem.wires.gather import Gather


class PackedGather(Gather):
    """The gather of one unit as blocks; may be repeated. Collective: every rank starts the same
    ones in the same order.

    Args:
        topology: the ranks of its shard group take part.
        unit: the unit to gather.
        full: its full layout; its storage has bytes from `put` on, until the gather has been waited
            for.
        pool: buffers of `wire_bytes` for sent and received blocks; None: torch's own memory.
        workers: threads that pack and unpack on a CPU; None: the caller alone.
    """

    def __init__(
        self,
        topology: Topology,
        unit: Unit,
        full: torch.Tensor,
        pool: Pool | None,
        workers: Workers | None = None,
    ) -> None:
        self._topology = topology
        self._unit = unit
        self._full = full
        self._pool = pool
        self._workers = workers
        self._form = unit.blocks or INT8
        self._needs_wire = needs_wire(unit, topology.num_shards, is_accelerator(full.device))
        self._wire: _Wire | None = None  # between `put` and `start`

    def put(self, shard: torch.Tensor | None) -> None:
        """Packs this rank's flat shard layout, or copies it where the unit rests packed; unpacks it
        where that is the gather.

        The shard may be reused afterwards, on an accelerator when the current stream has copied it.
        """
        assert shard is not None
        if not self._needs_wire:
            self._unpack([shard])
            return
        self._wire = _Wire(self._topology, self._unit, self._pool, self._full.device)
        if self._unit.is_packed:
            self._wire.mine.copy_(shard[: self._wire.mine.numel()], non_blocking=True)
        else:
            numel = self._unit.packed_numel
            values = shard[:numel]
            if values.device != self._full.device:  # through the full layout, which is filled later
                values = self._full[:numel].copy_(values, non_blocking=True)
            pack_into(self._wire.mine, numel, values, 0, self._form, self._workers)

    def start(self) -> Pending:
        """Starts the exchange, after `put`. Does not block; the wait fills the full layout. Raises
        RankLost."""
        what = f"gathering {self._unit.name}"
        if self._wire is None:
            return Pending(self._topology, what, [], [])
        wire = self._wire
        self._wire = None
        if self._topology.num_shards == 1:
            pending = Pending(self._topology, what, [], [wire.mine])
        else:
            pending = self._exchange(what, wire)
        return Then([pending], functools.partial(self._unpack, wire.rows), wire.give_back)

    def _unpack(self, rows: Iterable[torch.Tensor]) -> None:
        """Fills the full layout from the blocks of each rank."""
        for rank, row in enumerate(rows):
            for part in self._unit.shards:
                first = part.full_offset + rank * part.shard_numel
                target = self._full[first : first + part.shard_numel]
                unpack(
                    row,
                    self._unit.packed_numel,
                    target,
                    part.shard_offset,
                    False,
                    self._form,
                    self._workers,
                )

    def _exchange(self, what: str, wire: _Wire) -> Pending:
        topology = self._topology
        group = topology.group_of("shard")
        if not sends_directly(group, wire.mine.device):
            return start(
                topology,
                what,
                dist.all_gather_into_tensor,
                wire.rows.view(-1),
                wire.mine,
                among="shard",
            )
        pieces = list(wire.rows)
        pieces[topology.shard_rank].copy_(wire.mine)
        topology.traffic.add("all_gather_into_tensor", what, wire.rows.nbytes, "shard")
        with explaining(topology, what):
            tag = GATHER_TAG + self._unit.shards[0].index
            works = marked(group, send_to_all(group, topology.shard_rank, pieces, tag))
        return Pending(topology, what, [works], [wire.rows])


def gathers_packed(unit: Unit, policy: OffloadPolicy, num_shards: int) -> bool:
    """Whether a unit is gathered as blocks: it rests packed, or the policy packs its values to send
    them. With one shard nothing is sent."""
    is_sent = num_shards > 1 and unit.dtype.is_floating_point
    return unit.is_packed or (policy.quantised_gather and is_sent)


def needs_wire(unit: Unit, num_shards: int, is_gpu: bool) -> bool:
    """Whether a packed gather needs a buffer: all but that of blocks which rest where the maths
    runs."""
    return num_shards > 1 or is_gpu or not unit.is_packed


def wire_bytes(unit: Unit, num_shards: int) -> int:
    """Bytes of the buffer of a packed gather: this rank's blocks, and with several shards those of
    all ranks."""
    return unit.packed_bytes * (num_shards + 1 if num_shards > 1 else 1)


class _Wire:
    """The blocks that one packed gather sends (`mine`) and receives (`rows`, one per rank), in one
    buffer."""

    def __init__(
        self, topology: Topology, unit: Unit, pool: Pool | None, device: torch.device
    ) -> None:
        num_bytes = unit.packed_bytes
        in_all = wire_bytes(unit, topology.num_shards)
        self._pool = pool
        self._slot = pool.take() if pool is not None else None
        memory = (
            torch.empty(in_all, dtype=torch.uint8, device=device)
            if self._slot is None
            else self._slot.tensor[:in_all]
        )
        self.mine = memory[:num_bytes]
        self.rows = memory[-num_bytes * topology.num_shards :].view(topology.num_shards, num_bytes)

    def give_back(self) -> None:
        slot = self._slot
        self._slot = None
        if self._pool is not None and slot is not None:
            self._pool.give_back(slot)


class Carving:
    """Cuts a buffer into tensors, one behind the other, each at a multiple of 64 bytes."""

    def __init__(self, buffer: torch.Tensor) -> None:
        self._buffer = buffer  # uint8
        self._used_bytes = 0

    def take(self, dtype: torch.dtype, *shape: int) -> torch.Tensor:
        """The next part of the buffer, content undefined. The caller ensures that there is room."""
        start = self._used_bytes
        num_bytes = math.prod(shape) * dtype.itemsize
        self._used_bytes += round_up(num_bytes, CARVED_ALIGN)
        taken = self._buffer[start : start + num_bytes].view(dtype)
        return taken.view(shape) if len(shape) > 1 else taken


CARVED_ALIGN = 64  # bytes


def packed_reduction_bytes(topology: Topology, column_bytes: int, column_numel: int) -> int:
    """Most bytes that `start_packed_reduction` carves for columns of so many bytes and elements."""
    across = topology.across
    within = topology.within
    if across is None or within is None:
        return _exchange_bytes(topology.num_shards, column_numel)
    rows = round_up(column_bytes * topology.num_shards, CARVED_ALIGN)
    return (
        rows
        + _exchange_bytes(within.size, column_numel * across.size)
        + _exchange_bytes(across.size, column_numel)
    )


def start_packed_reduction(
    topology: Topology, columns: torch.Tensor, what: str, number: int, carving: Carving
) -> tuple[Pending, Callable[[], torch.Tensor]]:
    """Starts a reduction. Collective: every rank starts and finishes the same reductions in the
    same order.

    Returns the calls under way, and a function that waits for them and returns the sum of this
    rank's column: fp32, flat, a part of the buffer. It blocks, and raises RankLost.

    Args:
        topology: the ranks of its shard group take part.
        columns: flat, a column of equal size for each rank of the shard group; read before this
            function returns.
        what: the purpose, for errors and counts.
        number: names the purpose, as in `swap_rows` (collectives.py).
        carving: gives `packed_reduction_bytes`, which the reduction uses until it has ended.
    """
    across = topology.across
    within = topology.within
    if across is None or within is None:
        whole = _PackedExchange(
            topology, columns.view(topology.num_shards, -1), what, "shard", number, carving
        )
        return whole.pending, whole.sum
    by_node = columns.view(across.size, within.size, -1).transpose(0, 1)
    rows = carving.take(columns.dtype, *by_node.shape).copy_(by_node).view(within.size, -1)
    near = _PackedExchange(topology, rows, what, "within", number, carving)

    def finish() -> torch.Tensor:
        return _PackedExchange(
            topology, near.sum().view(across.size, -1), what, "across", number, carving
        ).sum()

    return near.pending, finish


class _PackedExchange:
    """Sends its packed row to each rank of a dimension, and receives one from each."""

    def __init__(
        self,
        topology: Topology,
        rows: torch.Tensor,
        what: str,
        among: str,
        number: int,
        carving: Carving,
    ) -> None:
        self._numel = rows.shape[1]
        blocks = rows.shape[0], INT8.packed_bytes(self._numel)
        sent, self._come = (carving.take(torch.uint8, *blocks) for _ in range(2))
        self._total = carving.take(torch.float32, self._numel)
        for row, target in zip(rows, sent, strict=True):
            pack_into(target, self._numel, row)
        self.pending = swap_rows(topology, what, self._come.view(-1), sent.view(-1), among, number)

    def sum(self) -> torch.Tensor:
        """The fp32 sum of the received rows. Blocks."""
        self.pending.wait()
        self._total.zero_()
        for row in self._come:
            unpack(row, self._numel, self._total, add=True)
        return self._total


def _exchange_bytes(num_rows: int, numel: int) -> int:
    return 2 * round_up(num_rows * INT8.packed_bytes(numel), CARVED_ALIGN) + round_up(
        4 * numel, CARVED_ALIGN
    )
