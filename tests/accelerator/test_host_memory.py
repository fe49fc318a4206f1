"""Do copies block, defer and fail as CUDA's do, by what is page-locked?"""

from __future__ import annotations

from collections.abc import Iterator
from types import ModuleType

import pytest
import torch

NUM = 1024
NUM_BYTES = NUM * 4


@pytest.fixture
def slot(sim: ModuleType) -> Iterator[torch.Tensor]:
    """A page-locked host buffer of 1,024 floats."""
    host = torch.full((NUM,), 3.0)
    sim.host_register(host.data_ptr(), NUM_BYTES)
    yield host
    sim.synchronize()
    sim.host_unregister(host.data_ptr())


def test_copy_from_a_pinned_slot_reads_it_when_its_stream_gets_there(
    sim: ModuleType, slot: torch.Tensor
) -> None:
    sim.set_schedule("late")
    device = torch.empty(NUM, device="sim")
    device.copy_(slot, non_blocking=True)
    slot.fill_(7.0)  # too early
    assert device.sum().item() == 7 * NUM
    assert sim.host_waits()["main"] == 1


def test_slot_reused_after_its_event_is_safe(sim: ModuleType, slot: torch.Tensor) -> None:
    for seed in range(20):
        sim.set_schedule(f"random:{seed}")
        slot.fill_(3.0)
        device, side = torch.empty(NUM, device="sim"), torch.Stream("sim")
        side.wait_stream(sim.current_stream())
        with side:
            device.copy_(slot, non_blocking=True)
            event = side.record_event()
        event.synchronize()
        slot.fill_(7.0)
        sim.current_stream().wait_event(event)
        assert device.sum().item() == 3 * NUM


def test_copy_to_a_pinned_slot_arrives_later(sim: ModuleType, slot: torch.Tensor) -> None:
    sim.set_schedule("late")
    device = torch.full((NUM,), 5.0, device="sim")
    slot.copy_(device, non_blocking=True)
    assert slot.sum().item() == 3 * NUM  # read too early
    sim.current_stream().synchronize()
    assert slot.sum().item() == 5 * NUM


def test_a_blocking_copy_waits(sim: ModuleType, slot: torch.Tensor) -> None:
    sim.set_schedule("late")
    device = torch.empty(NUM, device="sim")
    device.copy_(slot)
    slot.fill_(7.0)
    assert device.sum().item() == 3 * NUM
    slot.copy_(device)
    assert slot.sum().item() == 3 * NUM


@pytest.mark.parametrize("is_non_blocking", [True, False])
def test_pageable_copies_block_and_are_counted(sim: ModuleType, is_non_blocking: bool) -> None:
    sim.set_schedule("late")
    host, device = torch.full((NUM,), 3.0), torch.zeros(NUM, device="sim")
    device.copy_(host, non_blocking=is_non_blocking)
    host.fill_(7.0)  # staged or done
    assert sim.host_waits()["main"] == 1 and sim.copies()["num_pageable"] == 1
    host.copy_(device, non_blocking=is_non_blocking)
    assert host.sum().item() == 3 * NUM
    assert sim.host_waits()["main"] == 2 and sim.copies()["num_pageable"] == 2


def test_what_is_converted_on_the_host_is_pageable(sim: ModuleType, slot: torch.Tensor) -> None:
    torch.empty(NUM, dtype=torch.bfloat16, device="sim").copy_(slot, non_blocking=True)
    torch.empty(NUM // 2, device="sim").copy_(slot[::2], non_blocking=True)
    assert sim.copies()["num_pageable"] == 2


def test_a_copy_into_a_part_of_a_device_tensor_stays_direct(
    sim: ModuleType, slot: torch.Tensor
) -> None:
    sim.set_schedule("late")
    wide = torch.zeros(32, 64, device="sim")
    wide[:, :32].copy_(slot.view(32, 32), non_blocking=True)
    slot.view(32, 32).t().copy_(
        torch.ones(32, 32, device="sim").t(), non_blocking=True
    )  # the same layout on both sides
    assert sim.copies()["num_pageable"] == 0 and sim.host_waits()["main"] == 0
    assert wide.sum().item() == 3 * NUM and slot.sum().item() == NUM


def test_bytes_are_counted_by_direction(sim: ModuleType, slot: torch.Tensor) -> None:
    device = torch.empty(NUM, device="sim")
    sim.reset_counts()
    device.copy_(slot, non_blocking=True)
    slot[: NUM // 2].copy_(device[: NUM // 2], non_blocking=True)
    device.to("sim:1")
    assert sim.copies() == {
        "to_device_bytes": NUM_BYTES,
        "to_host_bytes": NUM_BYTES // 2,
        "between_devices_bytes": NUM_BYTES,
        "num_pageable": 0,
    }


def test_copy_that_leaves_its_range_is_an_invalid_argument(sim: ModuleType) -> None:
    host, device = torch.zeros(2 * NUM), torch.empty(2 * NUM, device="sim")
    sim.host_register(host.data_ptr(), NUM_BYTES)
    sim.host_register(host.data_ptr() + NUM_BYTES, NUM_BYTES)
    try:
        with pytest.raises(RuntimeError, match="invalid argument"):
            device.copy_(host, non_blocking=True)
        with pytest.raises(RuntimeError, match="invalid argument"):
            host[NUM // 2 : NUM + 1].copy_(device[NUM // 2 : NUM + 1], non_blocking=True)
        device[:NUM].copy_(host[:NUM], non_blocking=True)
        device[NUM:].copy_(host[NUM:], non_blocking=True)
    finally:
        sim.synchronize()
        sim.host_unregister(host.data_ptr())
        with pytest.raises(RuntimeError, match="starts before a page-locked range"):
            device.copy_(host)
        sim.host_unregister(host.data_ptr() + NUM_BYTES)


def test_ranges_do_not_overlap(sim: ModuleType, slot: torch.Tensor) -> None:
    for offset, num_bytes in ((0, NUM_BYTES), (64, 64), (NUM_BYTES - 1, 2)):
        with pytest.raises(RuntimeError, match="already mapped"):
            sim.host_register(slot.data_ptr() + offset, num_bytes)
    assert sim.registered() == (1, NUM_BYTES)


def test_unregistering_needs_a_range_without_pending_copies(
    sim: ModuleType, slot: torch.Tensor
) -> None:
    sim.set_schedule("late")
    with pytest.raises(RuntimeError, match="does not correspond to a registered"):
        sim.host_unregister(slot.data_ptr() + 64)
    torch.empty(NUM, device="sim").copy_(slot, non_blocking=True)
    with pytest.raises(RuntimeError, match="while a copy of it is pending"):
        sim.host_unregister(slot.data_ptr())


def test_the_driver_can_refuse(sim: ModuleType) -> None:
    host = torch.zeros(NUM)
    sim.set_register_limit(NUM_BYTES - 1)
    with pytest.raises(RuntimeError, match="refuses to page-lock 4096 bytes"):
        sim.host_register(host.data_ptr(), NUM_BYTES)
    with pytest.raises(RuntimeError, match="refuses to page-lock"):
        host.pin_memory()
    assert sim.registered() == (0, 0) and not host.is_pinned()


def test_pinned_tensors_of_torch(sim: ModuleType) -> None:
    sim.set_schedule("late")
    pinned = torch.full((NUM,), 3.0).pin_memory()
    assert pinned.is_pinned() and not torch.zeros(NUM).is_pinned()
    assert torch.zeros(NUM, pin_memory=True).is_pinned()
    device = pinned.to("sim", non_blocking=True)
    assert sim.host_waits()["main"] == 0
    del pinned  # freed when the copy is done
    assert sim.registered().num_ranges == 1
    assert device.sum().item() == 3 * NUM
    assert sim.registered() == (0, 0)


def test_a_registered_slot_is_pinned(sim: ModuleType, slot: torch.Tensor) -> None:
    assert slot.is_pinned() and slot[5:].is_pinned()
