"""Does a tensor that is fetched to the device come back as it was changed there, whatever its home,
however late the device?"""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import pytest
import torch
from accelerator.fixture import sim
from accelerator.mutants import Mutant, applied

from tiermem import Tier
from tiermem.swap.store.move import DeviceCopy
from tiermem.swap.store.store import TensorStore

__all__ = ["sim"]
NUM = 3000
SCHEDULES = ["at_once", "late", *(f"random:{seed}" for seed in range(5))]


def store_on(device: str, folder: Path) -> TensorStore:
    return TensorStore(
        paths=[folder], host_bytes=1 << 20, device=torch.device(device), link_bytes=1 << 18
    )


def go_and_come(store: TensorStore, home: Tier) -> list[torch.Tensor]:
    """Fetches to the device, changes there, releases; then changes a copy that is released as
    clean."""
    store.put("t", torch.arange(NUM, dtype=torch.float32), home).wait()
    found = []
    for is_dirty in (True, False, True):
        there = store.fetch("t", to=Tier.DEVICE).wait()
        again = store.fetch("t", to=Tier.DEVICE).wait()
        assert there.device.type == store.device.type and again.data_ptr() == there.data_ptr()
        found.append(there.clone())
        if is_dirty:
            there.mul_(2)
        move = store.release("t", dirty=is_dirty)
        if move is not None:
            move.wait()
    found.append(store.fetch("t").wait().to("cpu", copy=True))
    store.release("t")
    return [each.cpu() for each in found]


@pytest.mark.parametrize("home", Tier)
@pytest.mark.parametrize("device", ["sim", "cpu"])
def test_what_is_changed_on_the_device_goes_home(
    device: str, home: Tier, sim: ModuleType, tmp_path: Path
) -> None:
    start = torch.arange(NUM, dtype=torch.float32)
    for schedule in SCHEDULES if device == "sim" else ["at_once"]:
        sim.set_schedule(schedule)
        (tmp_path / schedule).mkdir()
        with store_on(device, tmp_path / schedule) as store:
            found = go_and_come(store, home)
        assert [
            torch.equal(each, start * factor)
            for each, factor in zip(found, (1, 2, 2, 4), strict=True)
        ] == [True] * 4


def seen_late(sim: ModuleType, folder: Path, how: str) -> float:
    """What the device reads of pinned memory that held threes, and is let go and filled with sevens
    while it is copied."""
    sim.set_schedule("late")
    with store_on("sim", folder) as store:
        store.reserve("t", (NUM,), torch.float32, Tier.HOST, crosses_link=True)
        store.flush()
        store.view("t").fill_(3.0)
        sim.reset_counts()
        there = store.fetch("t", to=Tier.DEVICE).wait()
        assert sim.copies()["num_pageable"] == 0 and sim.pending()
        if how == "released":
            store.release("t")
            store.view("t").fill_(7.0)
        elif how == "dropped":
            store.drop("t")
            store.reserve("another", (NUM,), torch.float32, Tier.HOST, crosses_link=True)
            store.view("another").fill_(7.0)
        if how != "left":
            return there.sum().item() / NUM
    return there.sum().item() / NUM


@pytest.mark.parametrize("how", ["released", "dropped", "left"])
def test_memory_of_a_pending_copy_is_not_given_away(
    how: str, sim: ModuleType, tmp_path: Path
) -> None:
    """Neither a release, nor a drop, nor the end of the store lets go of bytes that the device has
    not read yet."""
    assert seen_late(sim, tmp_path, how) == 3.0


@pytest.mark.parametrize("how", ["released", "dropped"])
def test_memory_that_is_given_away_while_it_is_copied_is_seen(
    how: str, sim: ModuleType, tmp_path: Path
) -> None:
    with applied(Mutant(DeviceCopy, "end", "self._copied.synchronize()", "pass", "", "")):
        assert seen_late(sim, tmp_path, how) == 7.0
