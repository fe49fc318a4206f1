"""Is what a helper thread meets raised where it matters, with nothing left, and does the model
train on?"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from programs.models import Tower
from programs.twins import loss_of, seeded
from saved_by_hand import flip

import tiermem
from tiermem import OffloadPolicy, Tier
from tiermem.gradients.gradient_store import GradientStore
from tiermem.optim.tile import Tile
from tiermem.optim.tile_step import TilePass
from tiermem.swap.base.errors import CorruptionError
from tiermem.swap.memory.arena import Slot
from tiermem.swap.store.store import TensorStore
from tiermem.weights.unit_state import LiveUnit, UnitState


def policy(folder: Path, **fields: Any) -> OffloadPolicy:
    settings: dict[str, Any] = {
        "params": Tier.NVME,
        "optim": Tier.HOST,
        "paths": [folder],
        "persistence_numel": 50,
    }
    return OffloadPolicy(**settings | {"unit_buffers": 3} | fields)


def helpers() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("tiermem-")]


def trained(model: torch.nn.Module, optim: tiermem.AdamW, steps: Sequence[int]) -> list[float]:
    losses = []
    for step in steps:
        loss = loss_of(model, step, "sim")
        loss.backward()
        optim.step()
        optim.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("schedule", ["late", "random:1"])
def test_a_flipped_bit_of_a_weight_is_named_before_the_device_sees_it(
    schedule: str, sim: ModuleType, tmp_path: Path
) -> None:
    sim.set_schedule(schedule)
    model = seeded(Tower)
    with tiermem.shard(model, policy(tmp_path), device="sim") as shards:
        trained(model, tiermem.AdamW(model.parameters()), [0])
        live = next(each for each in shards.units if each.unit.name == "layers.2")
        assert live.entry is not None
        shards.prefetcher.empty()
        [extent] = shards.store._entries[live.entry].nvme_home().extents[:1]
        flip(shards.store._files.segment_of(extent).file, extent.offset + 100)
        with pytest.raises(CorruptionError, match=r"layers\.2"):
            loss_of(model, 1, "sim")
    assert helpers() == [] and sim.registered().num_ranges == 0


def test_a_read_that_fails_is_raised_in_forward_and_the_next_one_serves(
    sim: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = []
    read, fails = TensorStore.read, [False]

    def failing(store: TensorStore, ranges: Any, name: str, *args: Any, **kwargs: Any) -> Any:
        if fails[0] and "layers.1" in name:
            fails[0] = False
            raise OSError(5, "Input/output error", name)
        return read(store, ranges, name, *args, **kwargs)

    monkeypatch.setattr(TensorStore, "read", failing)
    for is_tried in (False, True):
        sim.set_schedule("late")
        model = seeded(Tower)
        (tmp_path / str(is_tried)).mkdir()
        with tiermem.shard(model, policy(tmp_path / str(is_tried)), device="sim"):
            optim = tiermem.AdamW(model.parameters(), lr=1e-2)
            losses = trained(model, optim, [0])
            fails[0] = is_tried
            if is_tried:
                with pytest.raises(OSError, match="Input/output error"):
                    trained(model, optim, [1])
            expected.append(losses + trained(model, optim, [1, 2]))
    assert expected[0] == expected[1]


def test_a_gradient_that_cannot_be_stored_ends_the_backward(
    sim: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error of the helper thread is backward's own; the gradients of that step are forgotten,
    and training goes on."""
    expected = []
    put, fails = GradientStore.put, [0]

    def failing(store: GradientStore, *args: Any) -> None:
        fails[0] -= 1
        if fails[0] == 0:
            raise OSError(28, "No space left on device")
        put(store, *args)

    monkeypatch.setattr(GradientStore, "put", failing)
    for is_tried in (False, True):
        model = seeded(Tower)
        (tmp_path / str(is_tried)).mkdir()
        with tiermem.shard(model, policy(tmp_path / str(is_tried), grads=Tier.NVME), device="sim"):
            optim = tiermem.AdamW(model.parameters(), lr=1e-2)
            losses = trained(model, optim, [0])
            if is_tried:
                fails[0] = 5
                with pytest.raises(OSError, match="No space left"):
                    loss_of(model, 1, "sim").backward()
                optim.zero_grad()
            expected.append(losses + trained(model, optim, [1, 2]))
    assert expected[0] == expected[1]


def test_closing_with_reads_and_copies_under_way_leaves_nothing(
    sim: ModuleType, tmp_path: Path
) -> None:
    sim.set_schedule("late")
    for _ in range(3):
        model = seeded(Tower)
        with tiermem.shard(model, policy(tmp_path), device="sim"), torch.no_grad():
            assert helpers()
            model.embed(
                torch.zeros(1, 2, dtype=torch.int64, device="sim")
            )  # a pass that has begun: units are on their way
        assert helpers() == [] and sim.registered().num_ranges == 0


def test_a_unit_is_dropped_only_when_the_thread_that_starts_its_copy_has_done_so(
    sim: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the copy would fill memory that is another unit's, from a buffer of another read."""
    begun, goes_on, copy = threading.Event(), threading.Event(), LiveUnit._copy

    def slow(live: LiveUnit) -> torch.Event:
        begun.set()
        goes_on.wait()
        return copy(live)

    monkeypatch.setattr(LiveUnit, "_copy", slow)
    with tiermem.shard(seeded(Tower), policy(tmp_path), device="sim") as shards:
        shards.prefetcher.empty()
        live = shards.units[0]
        live.read(is_urgent=True)
        begun.wait()
        dropping = threading.Thread(target=live.drop)
        dropping.start()
        dropping.join(0.3)
        was_waiting = dropping.is_alive()
        goes_on.set()
        dropping.join()
        assert was_waiting and live.state is UnitState.HOME


def test_a_step_that_fails_amid_a_unit_is_raised_at_its_copy_and_loses_no_slot(
    sim: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first tiles of the unit have been copied; the forward that needs it raises, and the model
    says that it is torn."""
    bring, fill, copied, is_due = TilePass.bring, LiveUnit._fill, threading.Event(), [False]

    def failing(work: TilePass, tile: Tile, slot: Slot) -> None:
        if is_due[0] and tile.live.unit.name == "layers.2" and tile.start == 4096:
            assert copied.wait(20)
            raise ValueError("no gradients")
        bring(work, tile, slot)

    def filling(live: LiveUnit, shard: torch.Tensor, part: slice, copies: torch.Stream) -> None:
        fill(live, shard, part, copies)
        if is_due[0] and live.unit.name == "layers.2" and part == slice(0, 4096):
            copied.set()

    monkeypatch.setattr(TilePass, "bring", failing)
    monkeypatch.setattr(LiveUnit, "_fill", filling)
    sim.set_schedule("late")
    fields = {
        "params": Tier.HOST,
        "grads": Tier.DEVICE,
        "tile_numel": 4096,
        "overlap": "forward",
        "unit_buffers": 2,
    }
    model = seeded(Tower)
    with tiermem.shard(model, policy(tmp_path, **fields), device="sim") as shards:
        optim = tiermem.AdamW(model.parameters(), lr=1e-2)
        trained(model, optim, [0])
        is_due[0] = True
        with pytest.raises(OSError, match=r"stepping .*layers\.2") as caught:
            trained(model, optim, [1, 2])
        assert str(caught.value.__cause__) == "no gradients"
        with pytest.raises(RuntimeError, match="failed half-way"):
            shards.check_whole()
        assert shards.prefetcher._full.keys() <= {
            live.unit.index for live in shards.units if live.is_present
        }
    assert helpers() == [] and sim.registered().num_ranges == 0
