"""TileMoves: what of a tile is read and written, and where it lies while it passes through a buffer (swap/pipeline.py).

What is read depends on what has been written and on what the work needs (optim/layout.py):

    states             once they have been made
    fp32 initial       before that, when zero.Init kept them for a master
    parameters         when they are the master, or its upper half; and when the master is made from them
    gradients          when they rest on NVME; they are final only at the end of backward

States and the slice of the parameters are written back. What is computed in between: tile_step.py, tile_visit.py. It is
computed on the CPU, but for steps of states that rest on an accelerator: what lies elsewhere is copied there and back.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from tiermem.optim.layout import FP32_BYTES, StateViews
from tiermem.optim.tile import Tile
from tiermem.policy import Tier
from tiermem.swap.arena import Slot
from tiermem.swap.move import Move
from tiermem.swap.native import BACKGROUND, narrow_part
from tiermem.zero.shards import Shards
from tiermem.zero.unit import Shard
from tiermem.zero.weights.values import initial_master

MomentsOf = Callable[[Shard], Sequence[str]]
"""The names of a parameter's moments, as torch names them, in the order of swap.parts.MOMENTS."""


class Part(NamedTuple):
    """Bytes of an entry of the store and their place in a tile's buffer."""

    entry: str
    offset: int
    place: int
    num_bytes: int


class TileMoves:
    """The transfers of a model's tiles.

    Args:
        shards: the model.
        moments_of: what is kept of each parameter.
        reads_gradients: whether the work looks at gradients that rest at home.
        reads_weights: whether it always looks at the parameters, not only where states are made of them.
    """

    def __init__(
        self, shards: Shards, moments_of: MomentsOf, reads_gradients: bool = False, reads_weights: bool = False
    ) -> None:
        self._shards = shards
        self._store = shards.store
        self._moments_of = moments_of
        self._reads_gradients = reads_gradients and shards.homes.home is Tier.NVME
        self._reads_weights = reads_weights
        self._copies: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}  # of what lies elsewhere, by its address

    def compute(self, tile: Tile, slot: Slot | None) -> None:
        """Does the work with a tile, in its buffer or where it rests. Blocks."""
        try:
            self._compute(tile, slot)
            for original, copy in self._copies.values():
                original.copy_(copy)
        finally:
            self._copies.clear()

    def _compute(self, tile: Tile, slot: Slot | None) -> None:
        raise NotImplementedError

    def _device(self, tile: Tile) -> torch.device:
        """Where the work with a tile is computed."""
        return torch.device("cpu")

    def _near(self, tile: Tile, data: torch.Tensor) -> torch.Tensor:
        """A tile's data where its work is computed: themselves, or a copy that is copied back in the end."""
        if data.device == self._device(tile) or not data.numel():
            return data
        if data.data_ptr() not in self._copies:
            self._copies[data.data_ptr()] = data, data.to(self._device(tile))
        return self._copies[data.data_ptr()][1]

    def read(self, tile: Tile, slot: Slot) -> Move:
        """Starts filling a buffer with all that the work needs."""
        parts = self._lasting_parts(tile) + self._gradient_parts(tile)
        return self._store.read(_into(slot, parts), f"tile {tile.entry}")

    def read_lasting(self, tile: Tile, slot: Slot) -> Move:
        """Starts reading what rests from step to step; whatever else waits for the disk goes first."""
        return self._store.read(_into(slot, self._lasting_parts(tile)), f"tile {tile.entry}", BACKGROUND)

    def read_rest(self, tile: Tile, slot: Slot) -> Move:
        """Starts reading what `read_lasting` leaves out."""
        return self._store.read(_into(slot, self._gradient_parts(tile)), f"gradients of tile {tile.entry}")

    def has_lasting(self, tile: Tile) -> bool:
        """Whether a tile has anything on NVMe that is read and rests from step to step."""
        return bool(self._lasting_parts(tile))

    def write(self, tile: Tile, slot: Slot) -> Move:
        """Starts writing states and parameters back."""
        ranges = []
        if tile.home is Tier.NVME:
            ranges.append((tile.entry, 0, slot.tensor[: tile.state_bytes]))
        if tile.live.entry is not None:
            ranges.append((tile.live.entry, self._params_offset(tile), self._params_in(tile, slot)))
        return self._store.write(ranges, f"tile {tile.entry}")

    def open(self, tile: Tile, slot: Slot | None) -> tuple[StateViews, torch.Tensor]:
        """A tile's states, made if they never were, and its slice of the parameters, where they lie now."""
        params = self._params(tile, slot)
        views = tile.layout.views(self._states(tile, slot), tile.numel)
        if not tile.is_started:
            self._start(tile, slot, views, params)
        return views, params

    # ---- making states ---------------------------------------------------------------------------------------------------

    def _start(self, tile: Tile, slot: Slot | None, views: StateViews, params: torch.Tensor) -> None:
        """Makes a tile's first states: masters from initial values or from the weight, moments zero."""
        initial, states = self._initial_values(tile, slot), self._states(tile, slot)
        master = tile.layout.master
        if master is None:
            states.zero_()
            return
        if master.kind == "fp32":
            fp32_master(views).copy_(params if initial is None else initial)
        else:
            assert views.master is not None
            views.master.zero_()  # bits that a bf16 number does not have
            for segment in tile.segments if initial is not None else ():
                assert initial is not None
                part = slice(segment.start, segment.start + segment.numel)
                narrow_part(self._shards.workers, initial[part], views.master[part], params[part])
        states[master.num_bytes(tile.numel) :].zero_()  # the initial values may have lain here

    def _initial_of(self, tile: Tile) -> str | None:
        """The entry of fp32 initial values that a tile's master starts from, when they were kept."""
        name = initial_master(tile.live.unit)
        return name if not tile.is_started and name in self._store else None

    def _initial_values(self, tile: Tile, slot: Slot | None) -> torch.Tensor | None:
        initial = self._initial_of(tile)
        if initial is None:
            return None
        if self._store.home_of(initial) is Tier.HOST:
            return self._store.view(initial)[tile.elements]
        assert slot is not None
        place = tile.layout.initial_offset_bytes(tile.numel)
        return slot.tensor[place : place + tile.numel * FP32_BYTES].view(torch.float32)

    # ---- where things are ------------------------------------------------------------------------------------------------

    def _lasting_parts(self, tile: Tile) -> list[Part]:
        """States, fp32 initial values and parameters, as far as they are read from NVMe."""
        parts = []
        if tile.is_started and tile.home is Tier.NVME:
            parts.append(Part(tile.entry, 0, 0, tile.state_bytes))
        initial = self._initial_of(tile)
        if initial is not None and self._store.home_of(initial) is Tier.NVME:
            place = tile.layout.initial_offset_bytes(tile.numel)
            parts.append(Part(initial, tile.start * FP32_BYTES, place, tile.numel * FP32_BYTES))
        is_weight_read = self._reads_weights or tile.layout.reads_weight or not tile.is_started
        if tile.live.entry is not None and is_weight_read:
            parts.append(Part(tile.live.entry, self._params_offset(tile), tile.room_bytes, tile.slice_bytes))
        return parts

    def _gradient_parts(self, tile: Tile) -> list[Part]:
        """Gradients, when they rest on NVME."""
        if not self._reads_gradients:
            return []
        entry, offset = self._shards.homes.entry(tile.live.unit), tile.start * tile.grad_dtype.itemsize
        return [Part(entry, offset, tile.room_bytes + tile.slice_bytes, tile.grad_bytes)]

    def _params_offset(self, tile: Tile) -> int:
        return tile.start * tile.dtype.itemsize

    def _params_in(self, tile: Tile, slot: Slot) -> torch.Tensor:
        """The bytes of a tile's buffer that hold its slice of the parameters."""
        return slot.tensor[tile.room_bytes : tile.room_bytes + tile.slice_bytes]

    def _states(self, tile: Tile, slot: Slot | None) -> torch.Tensor:
        """The bytes of a tile's states, at home or in its buffer."""
        if not tile.state_bytes:
            return torch.empty(0, dtype=torch.uint8)
        if tile.home is not Tier.NVME:
            return self._near(tile, self._store.view(tile.entry))
        assert slot is not None
        return slot.tensor[: tile.state_bytes]

    def _params(self, tile: Tile, slot: Slot | None) -> torch.Tensor:
        if tile.live.shard is not None:
            tile.live.await_home()
            return self._near(tile, tile.live.shard[tile.elements])
        assert slot is not None
        return self._near(tile, self._params_in(tile, slot).view(tile.dtype))


def fp32_master(views: StateViews) -> torch.Tensor:
    """The master of a tile that keeps one in fp32."""
    assert views.master is not None and views.master.dtype == torch.float32
    return views.master


def _into(slot: Slot, parts: Sequence[Part]) -> list[tuple[str, int, torch.Tensor]]:
    """What the store is asked for: each part with its place in the buffer."""
    return [(part.entry, part.offset, slot.tensor[part.place : part.place + part.num_bytes]) for part in parts]
