"""Does the host wait for the device in a step? Neither per unit nor per parameter: helper threads
do."""

from __future__ import annotations

import threading
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from launch import launch
from programs.models import Tower
from programs.twins import assert_same_tensors, loss_of, seeded

import tiermem
from accelerator.fixture import WHY_SKIPPED
from accelerator.iteration import Sizes, Training
from accelerator.waits import GRADIENTS_THERE, HOMES, THERE, Counts, count
from tiermem import OffloadPolicy, Tier
from tiermem.optim.tile import Tile
from tiermem.optim.tile_step import TilePass
from tiermem.swap.memory.arena import Slot
from tiermem.swap.store.move import Move
from tiermem.weights.unit_state import LiveUnit

NONE = {"main": 0, "autograd": 0}
STEPPED_THERE: dict[str, dict[str, Any]] = {
    "host": {"params": Tier.HOST, "optim": Tier.HOST},
    "host, states there": {"params": Tier.HOST, "optim": Tier.DEVICE},
    "all there": THERE,
    "host, states sent": {"params": Tier.HOST, "optim": Tier.HOST, "streamed_ratio": 1.0},
}


def assert_no_waits(found: Counts) -> None:
    for phase in ("forward", "backward"):
        assert found[phase] | NONE == found[phase], (phase, found)
    assert all(each["pageable"] == 0 for each in found.values()), found


@pytest.mark.parametrize("home", HOMES)
def test_no_wait_in_forward_and_backward_and_no_pageable_copy_in_a_step(
    home: str, sim: ModuleType, tmp_path: Path
) -> None:
    sim.set_schedule("late")
    found = count("sim", tmp_path, **HOMES[home])
    assert_no_waits(found)
    assert found["backward"]["other"] >= 10  # the helper threads wait: for every unit's gradients
    assert found["step"] | NONE == found["step"], found


@pytest.mark.parametrize("home", STEPPED_THERE)
def test_units_that_are_stepped_in_backward_wait_once(
    home: str, sim: ModuleType, tmp_path: Path
) -> None:
    """In all, for the last unit that the device steps. A helper thread waits for each unit's
    gradients and for the step that has read the buffer before; autograd's thread waits for that
    thread, because gradients may be refused."""
    sim.set_schedule("late")
    found = count("sim", tmp_path, step_in_backward=True, **STEPPED_THERE[home])
    assert_no_waits(found)
    assert found["step"] == NONE | {"main": int(home != "host"), "other": 0, "pageable": 0}, found


@pytest.mark.parametrize("overlap", ["auto", "backward"])
@pytest.mark.parametrize(
    "homes",
    [
        {"params": Tier.HOST, "optim": Tier.HOST, "grads": Tier.DEVICE},
        {"params": Tier.NVME, "optim": Tier.NVME, "grads": Tier.DEVICE},
        {"params": Tier.HOST, "optim": Tier.DEVICE},
    ],
    ids=["host", "nvme", "host, states there"],
)
def test_gradients_that_rest_on_the_device_wait_once(
    homes: dict[str, Any], overlap: str, sim: ModuleType, tmp_path: Path
) -> None:
    """For their norm. A helper thread waits for each tile's; nothing waits for weights that come
    back."""
    sim.set_schedule("late")
    found = count("sim", tmp_path, overlap=overlap, **homes)
    assert_no_waits(found)
    assert found["step"]["main"] == 1, found


@pytest.mark.parametrize("home", ["host", "nvme"])
def test_clipping_by_torch_waits_once(home: str, sim: ModuleType, tmp_path: Path) -> None:
    """For the factor, which torch computes on the device, when the step needs it."""
    sim.set_schedule("late")
    found = count("sim", tmp_path, clips="torch", **HOMES[home])
    assert_no_waits(found)
    assert found["clipping"]["main"] + found["step"]["main"] == 1, found


@pytest.mark.parametrize("home", ["host", "nvme"])
@pytest.mark.parametrize("clips", ["scaler", "scaler, stepped"])
def test_unscaling_clipping_and_stepping_wait_once(
    clips: str, home: str, sim: ModuleType, tmp_path: Path
) -> None:
    """Norms are scaled on the device; the step waits, for the factors, or torch before it, which
    asks for an overflow."""
    sim.set_schedule("late")
    found = count("sim", tmp_path, clips=clips, **HOMES[home])
    assert_no_waits(found)
    assert (found["clipping"]["main"], found["step"]["main"]) == (0, 1), found


@pytest.mark.sampled(12)
@pytest.mark.parametrize("homes", [THERE, GRADIENTS_THERE], ids=["all", "gradients"])
@pytest.mark.parametrize("clips", ["torch", "scaler", "scaler, stepped"])
def test_gradients_on_the_device_are_unscaled_clipped_and_stepped_with_one_wait(
    clips: str, homes: dict[str, Any], sim: ModuleType, tmp_path: Path
) -> None:
    """Norms and the search for an overflow need no number of the device; the step waits for sums
    and factors together."""
    sim.set_schedule("late")
    found = count("sim", tmp_path, clips=clips, **homes)
    for phase in ("forward", "backward"):
        assert found[phase] | NONE == found[phase], (phase, found)
    assert (found["clipping"]["main"], found["step"]["main"]) == (0, 1), found


def test_helper_threads_alone_wait_for_reads_and_never_poll(
    sim: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A thread that waits for a read does so once, in the kernel, until it has ended. When the
    model is closed, main waits for the end of a read that it has cancelled, if one is under way."""
    ask, cancel, waited, cancelled = Move._ask, Move.cancel, list[tuple[str, Move]](), set[Move]()

    def noting(move: Move, timeout_s: float | None) -> None:
        # else it looks whether the read has ended
        if not move.is_write and move not in cancelled and timeout_s != 0.0:
            assert timeout_s is None
            waited.append((threading.current_thread().name, move))
        ask(move, timeout_s)

    def cancelling(move: Move) -> None:
        cancelled.add(move)
        cancel(move)

    monkeypatch.setattr(Move, "_ask", noting)
    monkeypatch.setattr(Move, "cancel", cancelling)
    sim.set_schedule("late")
    count("sim", tmp_path, **HOMES["nvme"])
    assert waited and {name for name, _ in waited} == {"tiermem-reads"}
    assert len({id(move) for _, move in waited}) == len(waited)


@pytest.mark.skipif(WHY_SKIPPED is not None, reason=str(WHY_SKIPPED))
def test_no_wait_on_two_ranks(tmp_path: Path) -> None:
    backend = "cpu:gloo,sim:simccl"
    for found in launch(
        Path(__file__).parent / "waits.py", 2, tmp_path, backend, "host", "nvme", "states on host"
    ):
        for counts in found.values():
            assert_no_waits(counts)
            assert counts["step"] | NONE == counts["step"], found


def test_norms_on_the_device_are_those_of_the_elements(sim: ModuleType) -> None:
    """Of parameters with many blocks and with few, all at once and one by one: equal, and without a
    wait."""
    model = seeded(lambda: Tower(width=67, inner=1021, num_blocks=2))
    with tiermem.shard(model, OffloadPolicy(**THERE), device="sim"):
        loss_of(model, 0, "sim").backward()
        sim.reset_counts()
        grads = [param.grad for param in model.parameters()]
        together = torch._foreach_norm(grads)
        alone = [torch.linalg.vector_norm(grad) for grad in grads]
        assert sim.host_waits()["main"] == 0
        expected = [grad.clone().cpu().double().norm() for grad in grads]
        for one, other, of_elements in zip(together, alone, expected, strict=True):
            assert one.item() == other.item() == pytest.approx(of_elements.item(), rel=1e-6)


def test_what_is_stepped_is_copied_while_the_rest_of_its_unit_is(
    sim: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the second step the last tile of a block is stepped after the others have been copied to
    the device."""
    sizes = Sizes(width=130, layers=3, vocabulary=64, rows=8, tile_numel=4096)
    due, copied, num_steps = set[int](), threading.Event(), [0]
    fill, bring = LiveUnit._fill, TilePass.bring

    def filling(live: LiveUnit, shard: torch.Tensor, part: slice, copies: torch.Stream) -> None:
        fill(live, shard, part, copies)
        due.discard(shard[part].data_ptr())
        if num_steps[0] == 2 and not due:
            copied.set()

    def bringing(work: TilePass, tile: Tile, slot: Slot) -> None:
        if tile.live.unit.name == "layers.1" and tile.start == 0:
            num_steps[0] += 1
            assert tile.live.shard is not None
            due.update(piece.data_ptr() for piece in tile.live.shard.split(4096)[:4])
        if (tile.live.unit.name, tile.start, num_steps[0]) == ("layers.1", 4 * 4096, 2):
            assert copied.wait(20)
        bring(work, tile, slot)

    def weights_of(overlap: str) -> dict[str, torch.Tensor]:
        with Training(sizes, overlap, 0.5) as training:
            for _ in range(3):
                training.iterate()
            training.quiet()
            return training.weights

    expected = weights_of("none")
    monkeypatch.setattr(LiveUnit, "_fill", filling)
    monkeypatch.setattr(TilePass, "bring", bringing)
    assert_same_tensors(weights_of("forward"), expected)
    assert copied.is_set()
