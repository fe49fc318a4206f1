"""GradientStore: where gradients rest until the step, unit by unit.

    open    memory of a unit's shard layout, with what rests there if there is to be added to it
    put     a part of a parameter's share is copied or added, and measured when the share is all there
    close   the unit's gradients go where they rest

    HOST, DEVICE    the memory is their home
    NVME            it is a buffer, read from home if need be and written behind; a unit is read only once it is written
    None            (step_in_backward) it is a buffer, handed to whoever steps the unit

Measured are sums of squares of fixed blocks of each parameter, in float64, in the order of elements: they do not depend on
how a share was cut into parts.

On a DEVICE all of this happens there, on a stream of its own, because hooks run on whichever stream autograd is on: it waits
for the stream that brings a gradient, and a reader waits for it (`join`). A gradient depends on the weights of the last step,
so that it comes when that has read the one before.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch

from tiermem.policy import Tier
from tiermem.swap.accelerator import current_stream, is_accelerator, new_stream, on
from tiermem.swap.arena import Pool, Slot
from tiermem.swap.move import Move
from tiermem.swap.native import Workers, store_gradient
from tiermem.swap.store import TensorStore
from tiermem.swap.torch_step import block_sums_in_torch
from tiermem.zero.unit import Shard, Unit

Consume = Callable[[Unit, torch.Tensor], None]
"""Steps a unit with gradients that are not kept: flat, in its shard layout, valid during the call."""


class OpenHome(NamedTuple):
    """A unit's gradients while parts of them are put."""

    unit: Unit
    flat: torch.Tensor
    slot: Slot | None  # the buffer they are in, unless that is their home


class GradientStore:
    """See the module.

    Args:
        home: None: none is held.
        shard_rank: which share of every parameter is this rank's.
        pool: buffers, for NVME and None.
    """

    def __init__(
        self, home: Tier | None, store: TensorStore, shard_rank: int, workers: Workers, pool: Pool | None
    ) -> None:
        self.home = home
        self.recorder = store.recorder
        self._store = store
        self._shard_rank = shard_rank
        self._workers = workers
        self._pool = pool
        self._stream = new_stream(store.device) if home is Tier.DEVICE and is_accelerator(store.device) else None
        self._leaving: list[tuple[Unit, Slot, Move]] = []
        self.consume: Consume | None = None  # takes them at once when none is held

    @staticmethod
    def entry(unit: Unit) -> str:
        """The name of a unit's gradients in the store."""
        return f"grad/{unit.index}/{unit.name}"

    def reserve(self, unit: Unit, dtype: torch.dtype) -> None:
        """Makes room for a unit's gradients where they rest."""
        if self.home is not None:
            self._store.reserve(self.entry(unit), (unit.shard_numel,), dtype, self.home, is_durable=False)

    def view(self, unit: Unit) -> torch.Tensor | None:
        """A unit's gradients in the shard layout, when they rest in memory."""
        return self._store.view(self.entry(unit)) if self.home in (Tier.HOST, Tier.DEVICE) else None

    def open(self, unit: Unit, dtype: torch.dtype, adds: bool) -> OpenHome:
        """Memory for a unit's gradients; with `adds`, what rests at home is in it. Blocks for a buffer; raises OSError."""
        at_home = self.view(unit)
        if at_home is not None:
            return OpenHome(unit, at_home, None)
        slot = self._take()
        data = slot.tensor[: unit.shard_numel * dtype.itemsize]
        try:
            if adds:
                while any(each is unit for each, _, _ in self._leaving):
                    self._reap()  # what is being written is not to be read before
                self._store.read([(self.entry(unit), 0, data)], f"grad {unit.name}").wait()
        except BaseException:
            self._give_back(slot)
            raise
        return OpenHome(unit, data.view(dtype), slot)

    def put(self, opened: OpenHome, shard: Shard, part: torch.Tensor, start: int, adds: bool) -> None:
        """Copies or adds a part of this rank's share, flat, which begins at element `start` of it; the last one measures."""
        with self._at_home(part):
            self._put(opened, shard, part, start, adds)

    def _put(self, opened: OpenHome, shard: Shard, part: torch.Tensor, start: int, adds: bool) -> None:
        stop = start + part.numel()
        first = shard.shard_numel * self._shard_rank
        num_valid = min(shard.shard_numel, max(0, shard.numel - first))
        share = opened.flat[shard.shard_offset : shard.shard_offset + num_valid]
        if start == 0 and adds and shard.grad_factor != 1.0:
            share.mul_(shard.grad_factor)  # what the user scaled is what is at home, not what comes
        source = part[: max(0, num_valid - start)]
        is_last = stop >= num_valid
        if is_accelerator(share.device):
            target = share[start : start + source.numel()]
            target.add_(source) if adds else target.copy_(source)
            if is_last:
                shard.block_sums = block_sums_in_torch(share, first)
                shard.grad_factor, shard.is_zeroed = 1.0, False
            return
        source = source.cpu()
        if start == 0 and is_last:
            shard.block_sums = store_gradient(self._workers, share, source, first, accumulate=adds)
        elif source.numel():
            target = share[start : start + source.numel()]
            target.add_(source) if adds else target.copy_(source)
            if is_last:
                shard.block_sums = store_gradient(self._workers, None, share, first)
        if is_last:
            shard.grad_factor, shard.is_zeroed = 1.0, False

    def clear(self, opened: OpenHome, shard: Shard) -> None:
        """Writes zeros in place of a parameter's gradient."""
        share = opened.flat[shard.shard_offset : shard.shard_offset + shard.shard_numel]
        with self._at_home(share):
            share.zero_()
        shard.is_zeroed = False

    def close(self, opened: OpenHome) -> None:
        """Sends a unit's gradients where they rest; a write to NVME goes on behind. Raises OSError."""
        unit, flat, slot = opened
        if slot is None:
            return
        try:
            if self.home is None:
                assert self.consume is not None
                self.consume(unit, flat)
                self._give_back(slot)
                return
            data = slot.tensor[: flat.nbytes]
            move = self._store.write([(self.entry(unit), 0, data)], f"grad {unit.name}")
        except BaseException:
            self._give_back(slot)
            raise
        self._leaving.append((unit, slot, move))

    def drop(self, opened: OpenHome) -> None:
        """Forgets what was put; its buffer is free again."""
        self._give_back(opened.slot)

    def settle(self) -> None:
        """Waits until every gradient is at home. Raises OSError."""
        self.join()
        while self._leaving:
            self._reap()

    def join(self) -> None:
        """The current stream waits for what is done to gradients on a DEVICE."""
        if self._stream is not None:
            current_stream(self._stream.device).wait_stream(self._stream)

    @contextlib.contextmanager
    def _at_home(self, data: torch.Tensor) -> Iterator[None]:
        """Inside, work on an accelerator is done where gradients rest on a DEVICE, with data of the current stream."""
        if self._stream is None:
            yield
            return
        self._stream.wait_stream(current_stream(self._stream.device))
        data.record_stream(self._stream)
        with on(self._stream):
            yield

    def _take(self) -> Slot:
        assert self._pool is not None
        slot = self._pool.take()
        if slot is None:
            self._reap()
            slot = self._pool.take()
        assert slot is not None
        return slot

    def _give_back(self, slot: Slot | None) -> None:
        if slot is not None:
            assert self._pool is not None
            self._pool.give_back(slot)

    def _reap(self) -> None:
        _, slot, move = self._leaving.pop(0)
        try:
            move.wait()
        finally:
            self._give_back(slot)
