"""TilePass: one pass over tiles: the bytes of each that are read and written, and the work in a
buffer.

It reads, depending on what was written before and what the work needs (units/state_layout.py):

    states             once they have been written
    fp32 initial       before that, if zero.Init kept these values for a master
    parameters         if they are the master or its upper half, or if the master is made from them
    gradients          for a step, if they rest on NVMe; they are final only at the end of backward

It writes back the states and the tile's slice of the parameters. An accelerator steps tiles whose
states rest on it, and tiles that are sent to it. Weights and gradients that rest elsewhere are
copied to its buffers first, and so are the states of a sent tile (tile_stream.py). The CPU steps
all other tiles meanwhile. If the gradients or weights of such a tile rest on the accelerator, they
are copied to the tile's pinned buffer first, on a stream of their own: a thread of the program
makes these copies, steps a tile whose weights they are, and copies the new weights back. `finish`
waits for copies to host memory.

With a second copy (`SecondCopy`) a step reads the weights and the states that rest in memory, and
writes the copy.
"""

from __future__ import annotations

import enum
import functools
import time
from collections.abc import Callable, Hashable, Iterator, Mapping
from types import MappingProxyType
from typing import NamedTuple

import torch

from tiermem.optim.tile import MomentsOf, Tile
from tiermem.optim.tile_stream import TileStream
from tiermem.optim.tile_work import Act, ParamViews, Stepping
from tiermem.policy import Tier
from tiermem.run.shards import Shards
from tiermem.swap.base.native import narrow_part
from tiermem.swap.base.parts import StepRule
from tiermem.swap.base.ranges import Column
from tiermem.swap.kernels.torch_step import CHUNK, narrow_in_torch
from tiermem.swap.memory.accelerator import activate, current_stream, is_accelerator, on, record
from tiermem.swap.memory.arena import Slot
from tiermem.swap.program.table import NativeStep
from tiermem.swap.store.checksum import Range
from tiermem.units.state_layout import FP32_BYTES, StateViews
from tiermem.weights.unit_state import LiveUnit
from tiermem.weights.values import initial_master


class Way(enum.Enum):
    """How the work on a tile is done: by whom, and what an accelerator and the CPU exchange for
    it."""

    CPU = enum.auto()  # all is in host memory, or in the tile's buffer
    # gradients come from an accelerator to the buffer before
    CPU_FETCHES_GRADIENTS = enum.auto()
    # weights come from an accelerator, too, and go back
    CPU_FETCHES_WEIGHTS = enum.auto()
    CPU_COPIES = enum.auto()  # what an accelerator has is copied, which blocks
    DEVICE = enum.auto()  # the states rest there
    DEVICE_STREAMS = enum.auto()  # all comes to a buffer there, and goes back


class SecondCopy(NamedTuple):
    """Memory beside that in which a unit rests: a step writes it, and `StateTiles` exchanges the
    two when the step counts."""

    weights: torch.Tensor  # flat, in the unit's shard layout, in a storage of their own
    # by entry of the store; of the weights, and of tiles whose states rest in memory
    slots: dict[str, Slot]


class TilePass:
    """One pass over a model's tiles, which swap/program/program.py runs.

    Args:
        shards: the model.
        moments_of: the moments of each parameter.
        act: called for each parameter in each tile, in order, after the tile's first states are
            made.
        is_step: whether `act` is an optimizer step, which needs gradients.
        grads: gradients of the one unit that is stepped, flat in its shard layout; None: they rest
            in the store or in memory.
        second: of the one unit that is stepped; a step writes it and leaves what rests in memory.
        link: the stream on which gradients and weights come from an accelerator to tiles that the
            CPU steps; None: none do.
        streams: the accelerator's buffers for what it lacks of tiles, by way.
        reads_weights: whether parameters are always read, not only if states are made from them.
        is_blank: nothing is read; states and parameters are zero when `act` is called.
    """

    def __init__(
        self,
        shards: Shards,
        moments_of: MomentsOf,
        act: Act = lambda _: None,
        *,
        is_step: bool = False,
        grads: torch.Tensor | None = None,
        second: SecondCopy | None = None,
        link: torch.Stream | None = None,
        streams: Mapping[Way, TileStream] = MappingProxyType({}),
        reads_weights: bool = False,
        is_blank: bool = False,
    ) -> None:
        self._shards = shards
        self._store = shards.store
        self._moments_of = moments_of
        self._act = act
        self.is_step = is_step
        self._grads = grads
        self._second = second
        self._link = link if is_step and grads is None else None
        self._streams = streams
        # where the gradients that the work needs rest; None: it needs none, or they are given
        self._gradient_home = shards.homes.store.home if is_step and grads is None else None
        self._reads_weights = reads_weights
        self._is_blank = is_blank
        # (data, its copy), by the data's address
        self._copies: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self._bases: dict[LiveUnit, Hashable] = {}
        # whether data was copied to an accelerator since the last `finish`
        self._has_crossed = False

    def compute(self, tile: Tile, slot: Slot | None) -> Callable[[], object] | None:
        """Does the work on a tile, in its buffer or where it rests. Blocks, but not for an
        accelerator.

        Returns what a thread of the program still has to do before the buffer is written or used
        again: wait for an accelerator, or, if the weights rest on one, the whole step. None:
        nothing.
        """
        way = self._way(tile)
        if way is Way.CPU_FETCHES_WEIGHTS:
            assert slot is not None
            return functools.partial(self._step_fetched_weights, tile, slot)
        start_ns = time.monotonic_ns()
        try:
            if way is Way.CPU_FETCHES_GRADIENTS:
                assert slot is not None
                self.bring(tile, slot)
            if (stream := self._stream_of(tile)) is not None:
                self._has_crossed = True
                stream.begin()
            self._compute(tile, slot)
            ended = self._send_back(tile)
        finally:
            self._copies.clear()
        if self.is_step:
            self._record(tile, start_ns)
        return ended.synchronize if slot is not None and ended is not None else None

    def finish(self) -> None:
        """Ends the pass. Blocks until tiles that were sent have come back, but not in backward.

        Does not wait until an accelerator has read gradients and brought weights to host memory:
        `StepRun` has the event.
        """
        if not self._has_crossed:
            return
        self._has_crossed = False
        for stream in self._streams.values():
            stream.join()
        copied = record(current_stream(self._store.device))
        if Way.DEVICE_STREAMS in self._streams and self._grads is None:
            copied.synchronize()
        else:
            self._shards.steps.copied = copied

    def name(self, tile: Tile) -> str:
        """Its name in events and errors."""
        return f"tile {tile.entry}"

    def unit(self, tile: Tile) -> int:
        """The index of its unit."""
        return tile.live.unit.index

    def early_reads(self, tile: Tile, slot: Slot | None) -> list[Range]:
        """The bytes that stay valid between steps."""
        return [
            (entry, offset, _bytes_in(slot, start, num_bytes))
            for entry, offset, start, num_bytes in self.lasting_parts(tile)
        ]

    def late_reads(self, tile: Tile, slot: Slot | None) -> list[Range]:
        """The bytes that are final when the step begins: gradients."""
        if self._gradient_home is not Tier.NVME:
            return []
        entry = self._shards.homes.store.entry(tile.live.unit)
        grads = _bytes_in(slot, tile.grad_offset, tile.grad_bytes)
        return [(entry, tile.start * tile.grad_dtype.itemsize, grads)]

    def cached(self, tile: Tile) -> int:
        """The address of its gradients in memory from which they are, or were, written to NVMe; 0:
        only NVMe has them."""
        if self._gradient_home is not Tier.NVME:
            return 0
        cached = self._shards.homes.store.cached(tile.live.unit)
        return 0 if cached is None else cached.data_ptr() + tile.start * tile.grad_dtype.itemsize

    def columns(self, tile: Tile) -> list[Column]:
        """Its states, weights and gradients in the buffer, for native steps in strips."""
        return tile.columns(self._gradient_home is Tier.NVME)

    def is_brought(self, tile: Tile) -> bool:
        """Whether its gradients or weights come from an accelerator to its buffer."""
        return self._way(tile) in (Way.CPU_FETCHES_GRADIENTS, Way.CPU_FETCHES_WEIGHTS)

    def bring(self, tile: Tile, slot: Slot) -> None:
        """Copies a tile's gradients and weights from an accelerator to its buffer. Blocks; may be
        called in any thread."""
        assert self._link is not None
        activate(self._link.device)
        with on(self._link):
            if self._gradient_home is Tier.DEVICE:
                grads = self._shards.homes.store.view(tile.live.unit)
                assert grads is not None
                self._shards.homes.store.await_end(tile.live.unit)
                self._gradient_buffer(tile, slot).copy_(grads[tile.elements], non_blocking=True)
            if tile.weight_home is Tier.DEVICE:
                self._weight_buffer(tile, slot).copy_(tile.own_weights, non_blocking=True)
        record(self._link).synchronize()

    def writes(self, tile: Tile, slot: Slot | None) -> list[Range]:
        """The states and parameters that are written back to NVMe."""
        ranges = []
        if tile.state_home is Tier.NVME:
            ranges.append((tile.entry, 0, _bytes_in(slot, 0, tile.state_bytes)))
        if tile.live.entry is not None:
            weights = _bytes_in(slot, tile.room_bytes, tile.slice_bytes)
            ranges.append((tile.live.entry, tile.start * tile.dtype.itemsize, weights))
        return ranges

    def basis(self, tile: Tile) -> Hashable:
        """All that a row of a step depends on, beside its buffer, and may change; None: it is no
        step, or the tile's first, or one of a second copy."""
        if not isinstance(self._act, Stepping) or not tile.is_started or self._second is not None:
            return None
        if (basis := self._bases.get(tile.live)) is None:
            basis = self._bases[tile.live] = self._basis(tile.live, self._act)
        if tile.state_home is not Tier.HOST or not tile.state_bytes:
            return basis
        return basis, self._store.address(tile.entry)

    def _basis(self, live: LiveUnit, act: Stepping) -> Hashable:
        """What the tiles of a unit have in common of it. Sets the numbers of its native steps."""
        grads = 0 if self._grads is None else self._grads.data_ptr()
        if self._gradient_home is Tier.HOST:
            grads = self._store.address(self._shards.homes.store.entry(live.unit))
        if live.shard is not None:
            live.await_home()
        weights = None if live.shard is None else (live.shard.data_ptr(), live.shard.device)
        kinds = act.kinds(live.unit)
        ways = self.is_step, self._link is not None, self._gradient_home, self._reads_weights
        return ways, live.entry, weights, grads, kinds

    def is_shown(self, tile: Tile) -> bool:
        """Whether the last of `writes` are weights, which the next forward may read while the step
        is under way: those that rest on NVMe."""
        return tile.weight_home is Tier.NVME

    def steps(self, tile: Tile, slot: Slot | None) -> list[NativeStep] | None:
        """The native steps that are the work on a tile. None: `compute` does it.

        That is the case for visits and fills, for a tile's first states, for steps of whole
        matrices and on an accelerator, and for a parameter without gradient whose weight is written
        back unread.
        """
        act = self._act
        if not isinstance(act, Stepping) or not tile.is_started:
            return None
        if self._way(tile) not in (Way.CPU, Way.CPU_FETCHES_GRADIENTS):
            return None
        steps = []
        is_native = True
        for views in self._views(tile, slot):
            planned = act.plan(views)
            if planned is not None and isinstance(planned.rule, StepRule):
                steps.append(act.native(views.shard, planned))
            else:
                self.copy_unstepped(tile)
                is_native &= planned is None and not views.is_unread
        return steps if is_native else None

    def copy_unstepped(self, tile: Tile) -> None:
        """Copies a tile to the second copy, if there is one, because some or all of its elements
        are not stepped there."""
        if self._second is not None:
            self._second.weights[tile.elements].copy_(tile.own_weights)
            if (states := self._second.slots.get(tile.entry)) is not None:
                states.tensor.copy_(self._store.view(tile.entry))

    # ---- the work on a tile ----------------------------------------------------------------------

    def _step_fetched_weights(self, tile: Tile, slot: Slot) -> None:
        """All the work on a tile whose weights rest on an accelerator. Blocks; in a thread of the
        program."""
        self.bring(tile, slot)
        start_ns = time.monotonic_ns()
        self._compute(tile, slot)
        self._record(tile, start_ns)
        assert self._link is not None
        tile.live.await_home()
        with on(self._link):
            tile.own_weights.copy_(self._weight_buffer(tile, slot), non_blocking=True)
        record(self._link).synchronize()

    def _record(self, tile: Tile, start_ns: int) -> None:
        self._store.recorder.add(
            "compute", self.name(tile), start_ns, time.monotonic_ns(), tile.state_bytes
        )

    def _compute(self, tile: Tile, slot: Slot | None) -> None:
        params = self._params(tile, slot)
        states = self._states(tile, slot)
        views = tile.layout.views(states, tile.numel)
        self._arrive(tile)
        if self._is_blank:
            states.zero_()
            params.zero_()
        elif not tile.is_started:
            self._start(tile, slot, views, params)
        for of_param in self._views(tile, slot):
            self._arrive(tile)
            self._act(of_param)

    def _arrive(self, tile: Tile) -> None:
        """Makes an accelerator wait for what a tile was brought."""
        if (stream := self._stream_of(tile)) is not None:
            stream.arrive()

    def _send_back(self, tile: Tile) -> torch.Event | None:
        """Copies what the work has changed to where it rests. Returns the end of an accelerator's
        work; None: it had none."""
        if (stream := self._stream_of(tile)) is not None:
            return stream.send_back(self._copies.values())
        for original, copy in self._copies.values():
            original.copy_(copy, non_blocking=is_accelerator(copy.device))
        return (
            record(current_stream(self._store.device))
            if is_accelerator(self._device(tile))
            else None
        )

    def _views(self, tile: Tile, slot: Slot | None) -> Iterator[ParamViews]:
        """The elements of each parameter in a tile."""
        rank = self._shards.topology.shard_rank
        params = self._params(tile, slot)
        states = tile.layout.views(self._states(tile, slot), tile.numel)
        grads = self._gradients(tile, slot)
        source = self._source(tile, states)
        is_unread = not tile.layout.reads_weight and tile.weight_home is Tier.NVME
        for part in tile.ranges:
            in_tile = tile.slice_of(part)
            yield ParamViews(
                tile,
                part.shard,
                part.first_element(rank),
                params[in_tile],
                None if grads is None else grads[in_tile],
                states.piece(in_tile.start, part.numel),
                self._moments_of(part.shard),
                None
                if source is None
                else (source[0][in_tile], source[1].piece(in_tile.start, part.numel)),
                is_unread,
            )

    def _source(self, tile: Tile, states: StateViews) -> tuple[torch.Tensor, StateViews] | None:
        """The weights and the states that a step of a second copy reads."""
        if self._second is None:
            return None
        if tile.entry in self._second.slots:
            states = tile.layout.views(self._store.view(tile.entry), tile.numel)
        return tile.own_weights, states

    def _start(
        self, tile: Tile, slot: Slot | None, views: StateViews, params: torch.Tensor
    ) -> None:
        """Makes a tile's first states: masters from the initial values or from the weight; moments
        are zero."""
        initial = self._initial_values(tile, slot)
        states = self._states(tile, slot)
        master = tile.layout.master
        if master is None:
            states.zero_()
            return
        assert views.master is not None
        if master.kind == "fp32":
            views.master.copy_(params if initial is None else initial)
        elif initial is None:
            views.master.zero_()  # the bits of an fp32 number that bf16 does not have
        else:
            for span in map(tile.slice_of, tile.ranges):
                if is_accelerator(params.device):
                    for start in range(span.start, span.stop, CHUNK):
                        part = slice(start, min(start + CHUNK, span.stop))
                        narrow_in_torch(
                            initial[part].to(params.device), views.master[part], params[part]
                        )
                else:
                    narrow_part(
                        self._shards.workers, initial[span], views.master[span], params[span]
                    )
        # the initial values may have used these bytes
        states[master.num_bytes(tile.numel) :].zero_()

    def _initial_of(self, tile: Tile) -> str | None:
        """The entry of the fp32 initial values for a tile's master; None if the tile is started or
        none were kept."""
        name = initial_master(tile.live.unit)
        return name if not tile.is_started and name in self._store else None

    def _initial_values(self, tile: Tile, slot: Slot | None) -> torch.Tensor | None:
        initial = self._initial_of(tile)
        if initial is None:
            return None
        if self._store.home_of(initial) is Tier.HOST:
            return self._store.view(initial)[tile.elements]
        offset = tile.layout.initial_offset_bytes(tile.numel)
        return _bytes_in(slot, offset, tile.numel * FP32_BYTES).view(torch.float32)

    # ---- where data is ---------------------------------------------------------------------------

    def _way(self, tile: Tile) -> Way:
        if not self.is_step:
            return Way.CPU_COPIES
        if tile.engine is Tier.DEVICE:
            return Way.DEVICE if tile.state_home is Tier.DEVICE else Way.DEVICE_STREAMS
        if Tier.DEVICE not in (tile.weight_home, self._gradient_home):
            return Way.CPU
        if self._link is None:
            return Way.CPU_COPIES
        if tile.weight_home is Tier.DEVICE:
            return Way.CPU_FETCHES_WEIGHTS
        return Way.CPU_FETCHES_GRADIENTS

    def _stream_of(self, tile: Tile) -> TileStream | None:
        """The buffers for what an accelerator lacks of a tile. A whole matrix may be larger than
        they are."""
        stream = self._streams.get(self._way(tile))
        weights = 0 if tile.weight_home is Tier.DEVICE else tile.slice_bytes
        grads = 0 if self._gradient_home is Tier.DEVICE else tile.grad_bytes
        return stream if stream is not None and weights + grads <= stream.slot_bytes else None

    def _device(self, tile: Tile) -> torch.device:
        """The device that computes the work on a tile."""
        is_there = self._way(tile) in (Way.DEVICE, Way.DEVICE_STREAMS)
        return self._store.device if is_there else torch.device("cpu")

    def _near(self, tile: Tile, data: torch.Tensor, is_read: bool = True) -> torch.Tensor:
        """A tile's data on the device of its work: the data itself, or a copy that `compute` copies
        back.

        is_read: whether the work reads the data; else the copy may have any content.
        """
        if data.device == self._device(tile) or not data.numel():
            return data
        address = data.data_ptr()
        if address not in self._copies:
            self._copies[address] = data, self._brought(tile, data, is_read)
        return self._copies[address][1]

    def _brought(self, tile: Tile, data: torch.Tensor, is_read: bool = True) -> torch.Tensor:
        """Data on the device of a tile's work. A copy to an accelerator waits for nothing."""
        device = self._device(tile)
        if not is_accelerator(device) or data.device == device:
            return data.to(device)
        if (stream := self._stream_of(tile)) is not None:
            return stream.bring(data, is_read)
        self._has_crossed = True
        return data.to(device, non_blocking=True)

    def lasting_parts(self, tile: Tile) -> list[_Part]:
        """What `early_reads` reads: states, fp32 initial values and parameters on NVMe."""
        parts: list[_Part] = []
        if self._is_blank:
            return parts
        if tile.is_started and tile.state_home is Tier.NVME:
            parts.append((tile.entry, 0, 0, tile.state_bytes))
        initial = self._initial_of(tile)
        if initial is not None and self._store.home_of(initial) is Tier.NVME:
            offset = tile.layout.initial_offset_bytes(tile.numel)
            parts.append((initial, tile.start * FP32_BYTES, offset, tile.numel * FP32_BYTES))
        if tile.live.entry is not None and self._reads_weight(tile):
            parts.append(
                (
                    tile.live.entry,
                    tile.start * tile.dtype.itemsize,
                    tile.room_bytes,
                    tile.slice_bytes,
                )
            )
        return parts

    def _reads_weight(self, tile: Tile) -> bool:
        """Whether the work needs a tile's parameters as they are."""
        return self._reads_weights or tile.layout.reads_weight or not tile.is_started

    def _gradients(self, tile: Tile, slot: Slot | None) -> torch.Tensor | None:
        if not self.is_step:
            return None
        at_home = self._grads
        if at_home is None:
            at_home = self._shards.homes.store.view(tile.live.unit)
        if at_home is None or (self._gradient_home is Tier.DEVICE and self.is_brought(tile)):
            return self._brought(tile, self._gradient_buffer(tile, slot))
        return self._brought(tile, at_home[tile.elements])

    def _gradient_buffer(self, tile: Tile, slot: Slot | None) -> torch.Tensor:
        """A tile's gradients in its buffer."""
        return _bytes_in(slot, tile.grad_offset, tile.grad_bytes).view(tile.grad_dtype)

    def _states(self, tile: Tile, slot: Slot | None) -> torch.Tensor:
        """The bytes of a tile's states that the work changes."""
        if self._second is not None and tile.entry in self._second.slots:
            return self._second.slots[tile.entry].tensor
        return self._near(tile, tile.states_in(self._store, slot), tile.is_started)

    def _params(self, tile: Tile, slot: Slot | None) -> torch.Tensor:
        if self._second is not None:
            return self._second.weights[tile.elements]
        if self._way(tile) is Way.CPU_FETCHES_WEIGHTS:
            return self._weight_buffer(tile, slot)
        if tile.live.shard is not None:
            tile.live.await_home()
            return self._near(tile, tile.own_weights)
        return self._near(tile, self._weight_buffer(tile, slot), self._reads_weight(tile))

    def _weight_buffer(self, tile: Tile, slot: Slot | None) -> torch.Tensor:
        """A tile's weights in its buffer."""
        return _bytes_in(slot, tile.weight_offset, tile.slice_bytes).view(tile.dtype)


def _bytes_in(slot: Slot | None, start: int, num_bytes: int) -> torch.Tensor:
    """The bytes of a tile's buffer from `start` on; only data that does not rest in memory needs
    the buffer."""
    assert slot is not None
    return slot.tensor[start : start + num_bytes]


_Part = tuple[str, int, int, int]
"""A byte range of an entry, and its start in a tile's buffer: (entry, offset, start, bytes)."""
