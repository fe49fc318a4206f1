"""Reduce: packs gradients into buckets and adds them up over ranks while backward continues."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import functools
import time
from collections.abc import Callable, Iterator, Sequence

import torch
import torch.distributed as dist

from tiermem.policy import OffloadPolicy
from tiermem.ranks.collectives import Pending, call, start, swap_rows
from tiermem.ranks.topology import Topology
from tiermem.swap.base.ranges import round_up
from tiermem.swap.memory.accelerator import current_stream, is_accelerator, new_stream, on
from tiermem.swap.memory.arena import Pool, Slot
from tiermem.units.unit import ALIGN, Shard, ShardRange, Unit
from tiermem.wires.packed import (
    CARVED_ALIGN,
    Carving,
    packed_reduction_bytes,
    start_packed_reduction,
)

# ---- buckets -------------------------------------------------------------------------------------
#
#     parameter a, 5 elements, 2 ranks    share 3    a0 a1 a2 | a3 a4 .
#     parameter b, 4 elements             share 2    b0 b1    | b2 b3
#
#     bucket                              a0 a1 a2 b0 b1 | a3 a4 . b2 b3       one column per rank, one after the other
#
# Column r holds every parameter's share for rank r, so one reduce-scatter gives each rank its own
# parts. A share is ceil(numel / shards) elements; the last shares are padded with zeros. A bucket
# holds at most `limit_numel` elements over all columns. A parameter that does not fit continues in
# the next bucket. With one shard there is one column, for an all-reduce.
#
# The place of a cut changes neither which elements of two ranks are added nor the order in which
# reductions add them.


@dataclasses.dataclass(frozen=True)
class Bucket:
    """The input of one reduction."""

    unit: Unit
    dtype: torch.dtype
    ranges: tuple[ShardRange, ...]
    column_numel: int
    num_columns: int

    @property
    def number(self) -> int:
        """The index of its first parameter: the same on every rank, and different for buckets of
        other units."""
        return self.ranges[0].shard.index

    @property
    def num_bytes(self) -> int:
        """Bytes of all columns: the input that a rank gives to the reduction."""
        return self.column_numel * self.num_columns * self.dtype.itemsize

    def split(self, columns: torch.Tensor) -> Sequence[torch.Tensor]:
        """Views of columns, one for each range; the last dimension is a column."""
        return columns.split_with_sizes([each.numel for each in self.ranges], -1)


def cut(unit: Unit, num_shards: int, limit_numel: int) -> list[Bucket]:
    """Cuts a unit's gradients into buckets by the dtype of the reduction, in the order of
    parameters.

    limit_numel: most elements of a bucket over all columns; a column holds at least one element.
    """
    kinds: dict[torch.dtype, list[Shard]] = {}
    for shard in unit.shards:
        if shard.shard_numel:
            kinds.setdefault(shard.reduce_dtype, []).append(shard)
    room = max(1, limit_numel // num_shards)
    return [
        bucket
        for dtype, alike in kinds.items()
        for bucket in _fill(unit, dtype, alike, num_shards, room)
    ]


def largest_buffer(unit: Unit, topology: Topology, limit_numel: int, is_gpu: bool = False) -> int:
    """Most bytes of the buffer of a reduction of a unit's gradients.

    With several shards it is the bucket, and the columns that come from other ranks: on an
    accelerator their sum alone; as blocks what is sent and received, and the sum. An all-reduce is
    done in place.
    """
    num_shards = topology.num_shards
    shares = sum(shard.shard_numel for shard in unit.shards)
    numel = min(shares, max(1, limit_numel // num_shards))
    column = numel * max(shard.reduce_dtype.itemsize for shard in unit.shards)
    if num_shards == 1:
        return column
    if topology.packs_reductions:
        beside = packed_reduction_bytes(topology, column, numel)
    else:
        beside = column if is_gpu else column * num_shards
    return round_up(column * num_shards, CARVED_ALIGN) + beside


def largest_column(unit: Unit, num_shards: int, limit_numel: int) -> int:
    """Most bytes of a rank's column of the sums of a unit's gradients, each parameter's part at a
    multiple of 64 bytes."""
    column = min(unit.shard_numel, max(1, limit_numel // num_shards) + ALIGN * len(unit.shards))
    return column * max(
        unit.dtype.itemsize, *(shard.reduce_dtype.itemsize for shard in unit.shards)
    )


def put_in(part: ShardRange, grad: torch.Tensor | None, columns: torch.Tensor) -> None:
    """Copies a part of a gradient into its place in every column of a bucket; None writes zeros.

    columns: (columns, elements of the part).
    """
    if grad is None:
        columns.zero_()
        return
    share = part.shard.shard_numel
    # all of it, without padding
    if part.numel == share and len(columns) * share == part.shard.numel:
        columns.copy_(grad.reshape(columns.shape))
        return
    source = grad.reshape(-1)
    num_full, rest = divmod(part.shard.numel, share)
    columns[:num_full].copy_(
        source[: num_full * share].view(num_full, share)[:, part.start : part.stop]
    )
    if num_full < len(columns):
        rest = min(max(0, rest - part.start), part.numel)
        begin = num_full * share + part.start
        columns[num_full, :rest].copy_(source[begin : begin + rest])
        columns[num_full, rest:].zero_()
        columns[num_full + 1 :].zero_()


def _fill(
    unit: Unit, dtype: torch.dtype, shards: Sequence[Shard], num_shards: int, room: int
) -> Iterator[Bucket]:
    ranges: list[ShardRange] = []
    filled = 0
    for shard in shards:
        start = 0
        while start < shard.shard_numel:
            stop = min(shard.shard_numel, start + room - filled)
            ranges.append(ShardRange(shard, start, stop))
            filled += stop - start
            start = stop
            if filled == room:
                yield Bucket(unit, dtype, tuple(ranges), filled, num_shards)
                ranges = []
                filled = 0
    if ranges:
        yield Bucket(unit, dtype, tuple(ranges), filled, num_shards)


# ---- reductions ----------------------------------------------------------------------------------

MOST_UNDER_WAY = 2
"""Most reductions under way at once; each owns a buffer."""


@dataclasses.dataclass(eq=False)
class Reduction:
    """One reduction under way, and the buffers that it owns."""

    what: str
    bucket: Bucket
    slot: Slot
    start_ns: int
    pending: Pending
    # this rank's column of the sums; call it when `pending` has ended
    column: Callable[[], torch.Tensor]


class Reducer:
    """Starts and finishes reductions, oldest first.

        start    begins the reduction of a bucket; the gradients may be released afterwards
        finish   waits for the oldest reduction and returns this rank's column

        stages 1 to 3            reduce-scatter: every rank gets the sum of its own column
        stage 0                  all-reduce: every rank gets the sum of the one column
        copies of parts (MiCS)   the column is then all-reduced among the ranks that hold copies of it

    Between CPUs a reduce-scatter is an all-to-all, after which every rank adds up the received
    columns in the order of ranks. (gloo would all-reduce the whole bucket, in an order that depends
    on an element's place in it.) So on CPUs the bits of a sum depend only on the gradients and the
    number of ranks, not on bucket sizes or tiers. All-reduces and NCCL add in their own order; with
    two ranks the bits are the same anyway.

    At most two reductions are under way: the first is finished before a third is started. Each owns
    a buffer, into which its gradients are packed, and which holds all that it sends and receives.
    On an accelerator the next reduction in a buffer waits for those who read its sums.

    Args:
        pool: buffers of `largest_buffer`; None: there are no gradients.
        device: the device of the gradients. On an accelerator reductions have a stream of their
            own, and no call waits for it.
    """

    def __init__(
        self, topology: Topology, policy: OffloadPolicy, pool: Pool | None, device: torch.device
    ) -> None:
        self._topology = topology
        self._pool = pool
        # by the buffer's offset; the end of the last reads of its sums
        self._reads: dict[int, torch.Event] = {}
        self._under_way: collections.deque[Reduction] = collections.deque()
        self._factor = 1.0 / predivided(topology.world, policy)
        self._stream = new_stream(device) if is_accelerator(device) else None

    def use(self, pool: Pool | None) -> None:
        """Goes on with other buffers. No reduction may be under way."""
        self._pool = pool

    @property
    def is_eager(self) -> bool:
        """Whether `finish` only orders streams, so that a reduction is finished as soon as it is
        started."""
        return self._stream is not None

    def aside(self) -> contextlib.AbstractContextManager[None]:
        """Inside, work on an accelerator goes to the stream of reductions: what follows a sum."""
        return on(self._stream)

    @property
    def is_full(self) -> bool:
        """Whether one reduction must be finished before the next is started."""
        return len(self._under_way) >= MOST_UNDER_WAY

    @property
    def is_idle(self) -> bool:
        """Whether no reduction is under way."""
        return not self._under_way

    def start(self, what: str, bucket: Bucket, grads: Sequence[torch.Tensor | None]) -> None:
        """Starts to add up a bucket. Collective; does not block. Gradients may be released when it
        returns.

        grads: the whole gradient of each of its pieces; None for zeros.
        """
        if self._stream is not None:
            self._stream.wait_stream(current_stream(self._stream.device))
            for grad in grads:
                if grad is not None:
                    grad.record_stream(self._stream)
        with self.aside():
            self._start(what, bucket, grads)

    def _start(self, what: str, bucket: Bucket, grads: Sequence[torch.Tensor | None]) -> None:
        start_ns = time.monotonic_ns()
        slot = self._take()
        carving = Carving(slot.tensor)
        filled = carving.take(bucket.dtype, bucket.num_columns * bucket.column_numel)
        columns = bucket.split(filled.view(bucket.num_columns, -1))
        for part, grad, column in zip(bucket.ranges, grads, columns, strict=True):
            put_in(part, grad, column)
        if self._factor != 1.0:
            filled.mul_(self._factor)
        begun = self._begin(f"reducing {what}", carving, bucket, filled)
        self._under_way.append(Reduction(what, bucket, slot, start_ns, *begun))

    def _take(self) -> Slot:
        """A buffer; on an accelerator the current stream, that of reductions, waits until its last
        sums have been read."""
        assert self._pool is not None
        slot = self._pool.take()
        assert slot is not None
        if self._stream is not None:
            # a slab that ends is not given to others before its reductions
            slot.tensor.record_stream(self._stream)
            if (read := self._reads.pop(slot.offset, None)) is not None:
                self._stream.wait_event(read)
        return slot

    def finish(self) -> tuple[Reduction, torch.Tensor]:
        """The oldest reduction and this rank's column of its sums, valid until `release`. Raises
        RankLost.

        Blocks; on an accelerator the column is there in the order of the stream of reductions.
        """
        done = self._under_way[0]
        with self.aside():
            done.pending.wait()
            column = done.column()
            if self._topology.num_shards > 1 and self._topology.num_replicas > 1:
                call(
                    self._topology,
                    f"reducing {done.what}",
                    dist.all_reduce,
                    column,
                    among="replica",
                )
        return done, column

    def release(self, done: Reduction, read: torch.Event | None = None) -> None:
        """Takes the buffer of the oldest reduction back, whose sums streams of an accelerator read
        until `read`."""
        assert self._pool is not None
        if read is not None:
            self._reads[done.slot.offset] = read
        self._under_way.popleft()
        self._pool.give_back(done.slot)

    def reset(self) -> None:
        """After an exception: ends what is under way, and takes every buffer back. May be repeated.
        Blocks."""
        with self.aside():
            for each in self._under_way:
                each.pending.end()
        self._under_way.clear()
        if self._pool is not None:
            self._pool.reset()

    def _begin(
        self, what: str, carving: Carving, bucket: Bucket, filled: torch.Tensor
    ) -> tuple[Pending, Callable[[], torch.Tensor]]:
        """Starts the call for a filled bucket; returns `pending` and `column` of a Reduction."""
        topology = self._topology
        numel = bucket.column_numel
        if topology.num_shards == 1:
            return start(topology, what, dist.all_reduce, filled), lambda: filled
        if topology.packs_reductions:
            pending, finish = start_packed_reduction(topology, filled, what, bucket.number, carving)
            return pending, lambda: filled[:numel].copy_(finish())
        if filled.device.type == "cpu":
            received = carving.take(bucket.dtype, bucket.num_columns, numel)
            pending = swap_rows(topology, what, received.view(-1), filled, "shard", bucket.number)
            # in the order of ranks, in the place of the first column
            return pending, lambda: functools.reduce(torch.Tensor.add_, received.unbind())
        column = carving.take(bucket.dtype, numel)
        return start(
            topology, what, dist.reduce_scatter_tensor, column, filled, among="shard"
        ), lambda: column


def predivided(world: int, policy: OffloadPolicy) -> float:
    """The number by which gradients are divided before they are added up."""
    if world == 1:
        return 1.0
    return float(world if policy.predivide_factor == "ranks" else policy.predivide_factor)
