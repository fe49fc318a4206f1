"""Are several devices kept apart: tensors, streams, memory, random numbers?"""

from __future__ import annotations

from types import ModuleType

import pytest
import torch

MIB = 1 << 20


def test_tensors_of_two_devices_do_not_mix(sim: ModuleType) -> None:
    here, there = torch.ones(3, device="sim:0"), torch.ones(3, device="sim:1")
    for wrong in (there, torch.ones(3)):
        with pytest.raises(RuntimeError, match="Expected all tensors to be on the same device"):
            here + wrong
    with pytest.raises(RuntimeError, match="Expected all tensors to be on the same device"):
        torch.ones(()).add_(here.sum())
    assert (here + torch.tensor(2.0)).tolist() == [3, 3, 3]  # a number on the CPU is allowed


def test_a_device_that_is_not_there(sim: ModuleType) -> None:
    with pytest.raises(
        RuntimeError, match="invalid device ordinal: sim:2, and there are 2 devices"
    ):
        torch.ones(1, device="sim:2")
    with pytest.raises(RuntimeError, match="invalid device ordinal"):
        torch.accelerator.set_device_index(2)


def test_the_current_device_is_where_tensors_are_made(sim: ModuleType) -> None:
    with torch.accelerator.device_index(1):
        assert torch.ones(1, device="sim").device.index == 1 and sim.current_device() == 1
    with sim.device("sim:1"):
        assert torch.zeros(1, device="sim").device.index == 1
    assert torch.ones(1, device="sim").device == torch.device("sim", 0)


def test_results_are_on_the_device_of_their_arguments(sim: ModuleType) -> None:
    there = torch.ones(3, device="sim:1", requires_grad=True)
    (there * 2).sum().backward()
    assert there.grad.device.index == 1 and torch.zeros_like(there).device.index == 1


def test_each_device_has_streams_of_its_own(sim: ModuleType) -> None:
    sim.set_schedule("late")
    first, second = torch.ones(3, device="sim:0"), torch.ones(3, device="sim:1")
    torch.accelerator.synchronize(0)
    assert sim.current_stream(0).query() and not sim.current_stream(1).query()
    side = torch.Stream("sim:1")
    with side:
        assert sim.current_stream(1) == side and sim.current_stream(0) == sim.default_stream(0)
    assert first.sum().item() == second.sum().item() == 3


@pytest.mark.parametrize("schedule", ["at_once", "late", "random:5"])
def test_copies_between_devices_wait_for_both(sim: ModuleType, schedule: str) -> None:
    sim.set_schedule(schedule)
    here = torch.arange(100.0, device="sim:0") * 2
    there = torch.empty(100, device="sim:1")
    there.fill_(1.0)
    there.copy_(here)
    here.zero_()
    assert there.sum().item() == 9900
    assert here.to("sim:1").sum().item() == 0


def test_each_device_has_a_capacity_and_statistics(sim: ModuleType) -> None:
    sim.set_capacity(MIB, device=1)
    torch.empty(2 * MIB, dtype=torch.uint8, device="sim:0")
    with pytest.raises(torch.OutOfMemoryError, match="Device sim:1"):
        torch.empty(2 * MIB, dtype=torch.uint8, device="sim:1")
    kept = torch.empty(1000, dtype=torch.uint8, device="sim:1")
    assert (
        torch.accelerator.memory_allocated(0) == 0 and torch.accelerator.memory_allocated(1) == 1024
    )
    assert torch.accelerator.get_memory_info(1) == (MIB - 1024, MIB)
    del kept


def test_tensors_are_saved_and_loaded(sim: ModuleType, tmp_path) -> None:
    torch.save({"x": torch.arange(3.0, device="sim:1")}, tmp_path / "x.pt")
    assert torch.load(tmp_path / "x.pt")["x"].device == torch.device("sim", 1)
    assert torch.load(tmp_path / "x.pt", map_location="cpu")["x"].tolist() == [0, 1, 2]
