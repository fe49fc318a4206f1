# ruff: noqa: F811
"""Do gradients that memory has go to their place, and is a piece that a write cuts checked before?"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from test_program import GRAD, NUMEL, TILE_BYTES, Momentum, put, stepped, value, workers  # noqa: F401

from tiermem.swap.base.errors import DamagedEntry
from tiermem.swap.base.native import Workers
from tiermem.swap.base.parts import StepParts
from tiermem.swap.base.tier import Tier
from tiermem.swap.memory.arena import Pool, Slot
from tiermem.swap.program.program import Program
from tiermem.swap.store.checksum import Pieces
from tiermem.swap.store.store import TensorStore


class Late(Momentum):
    """Gradients rest on NVMe, and memory has them."""

    cached_at = 0

    def late_reads(self, tile: str, slot: Slot | None) -> list[Any]:
        assert slot is not None
        return [("grad", 0, slot.tensor[TILE_BYTES : TILE_BYTES + 4 * NUMEL])]

    def cached(self, tile: str) -> int:
        return self.cached_at

    def _parts(self, tile: str, slot: Slot | None) -> StepParts:
        assert slot is not None
        values = slot.tensor[:TILE_BYTES].view(torch.float32)
        return StepParts(values[:NUMEL], None, self._grad(slot), [values[NUMEL:]])


@pytest.mark.parametrize("is_cached", [False, True])
@pytest.mark.parametrize("is_partial", [False, True])
def test_cached_gradients_go_to_late_reads(
    make_store: Callable[..., TensorStore], workers: Workers, is_cached: bool, is_partial: bool
) -> None:
    """Also where an early range lies in two slots, so that it takes two transfers."""
    store = make_store(num_slots=2)
    names = put(store, 1)
    store.reserve("grad", (4 * NUMEL,), torch.uint8, Tier.NVME, is_durable=False)
    memory = store.arena.take(4 * NUMEL, "gradients")
    memory.tensor.copy_(GRAD.view(torch.uint8))
    store.write([("grad", 0, memory.tensor)], "grad").wait()
    freeze = store.freeze()
    if is_partial:  # the same bytes, in another slot
        half = store.arena.take(TILE_BYTES // 2, "half")
        half.tensor.copy_(first_half())
        store.write([(names[0], 0, half.tensor)], "half").wait()
    work = Late(store, workers)
    if is_cached:
        work.cached_at = memory.tensor.data_ptr()
    program: Program[str] = Program(store, Pool(store.arena, 2 * TILE_BYTES, 1, "tiles"), workers)
    program.run(names, work)
    got = value(store, names[0])
    store.thaw(freeze)
    program.close()
    assert torch.equal(got, stepped(0, 1, workers))


def first_half() -> torch.Tensor:
    return stepped(0, 0, None)[: TILE_BYTES // 2]  # type: ignore[arg-type]


class Half(Momentum):
    """Writes half of a piece that it has read."""

    def writes(self, tile: str, slot: Slot | None) -> list[Any]:
        assert slot is not None
        return [(tile, 0, slot.tensor[: TILE_BYTES // 2])]


def test_a_piece_that_a_write_cuts_is_checked_before(
    make_store: Callable[..., TensorStore], workers: Workers
) -> None:
    store = make_store()
    names = put(store, 1)
    store.sums.protect(names[0], Pieces(np.array([0]), np.array([TILE_BYTES])))
    data = store.arena.take(TILE_BYTES, "data")
    data.tensor.copy_(stepped(0, 0, workers))
    store.write([(names[0], 0, data.tensor)], "all").wait()
    table = store.sums.of(names[0])
    assert table is not None and table.is_known.all()
    table.crcs[0] ^= 1
    program: Program[str] = Program(store, Pool(store.arena, TILE_BYTES, 1, "tiles"), workers)
    try:
        with pytest.raises(DamagedEntry):
            program.run(names, Half(store, workers))
    finally:
        program.close()
