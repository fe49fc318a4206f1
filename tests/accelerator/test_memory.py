"""Does device memory behave as a GPU's: out of the host's reach, bounded, cached when freed, given
back in stream order?"""

from __future__ import annotations

import ctypes
import faulthandler
import os
import signal
from types import ModuleType

import pytest
import torch

MIB = 1 << 20


def test_host_access_of_device_memory_ends_the_process(sim: ModuleType) -> None:
    tensor = torch.ones(4, device="sim")
    pid = os.fork()
    if pid == 0:
        faulthandler.disable()
        ctypes.string_at(tensor.data_ptr(), 4)
        os._exit(0)
    assert os.WTERMSIG(os.waitpid(pid, 0)[1]) == signal.SIGSEGV


def test_new_memory_is_nan(sim: ModuleType) -> None:
    assert torch.empty(1000, device="sim").isnan().all().item()
    again = torch.full((1000,), 3.0, device="sim")
    del again
    assert torch.empty(1000, device="sim").isnan().all().item()


@pytest.mark.parametrize("schedule", ["late", "random:3"])
def test_freed_memory_is_reused_in_stream_order(sim: ModuleType, schedule: str) -> None:
    sim.set_schedule(schedule)
    first = torch.full((1000,), 3.0, device="sim")
    doubled = first * 2
    address = first.data_ptr()
    del first
    second = torch.full((1000,), 5.0, device="sim")
    assert second.data_ptr() == address
    assert doubled.sum().item() == 6000 and second.sum().item() == 5000


@pytest.mark.parametrize("is_recorded", [True, False])
def test_block_used_on_another_stream_is_safe_only_if_recorded(
    sim: ModuleType, is_recorded: bool
) -> None:
    sim.set_schedule("late")
    source, other = torch.full((1000,), 3.0, device="sim"), torch.Stream("sim")
    other.wait_stream(sim.current_stream())
    with other:
        doubled = source * 2
    if is_recorded:
        source.record_stream(other)
    del source
    overwriting = torch.full((1000,), 5.0, device="sim")
    assert overwriting.sum().item() == 5000  # the stream that frees goes first
    sim.current_stream().wait_stream(other)
    total = doubled.sum().item()
    assert total == 6000 if is_recorded else total != 6000


@pytest.mark.parametrize("is_strict", [True, False])
def test_freeing_before_the_owner_waits_is_an_error_only_if_strict(
    sim: ModuleType, is_strict: bool
) -> None:
    sim.set_schedule("late")
    sim.set_strict_frees(is_strict)
    source, other = torch.full((1000,), 3.0, device="sim"), torch.Stream("sim")
    other.wait_stream(sim.current_stream())
    with other:
        doubled = source * 2
    del source
    # before the memory has a new owner, but after it was freed
    sim.current_stream().wait_stream(other)
    torch.full((1000,), 5.0, device="sim")
    assert doubled.sum().item() == 6000 or is_strict
    assert not is_strict or doubled.isnan().all().item()


def test_recorded_block_is_reused_when_the_other_stream_is_done(sim: ModuleType) -> None:
    sim.set_schedule("late")
    source, other = torch.full((1000,), 3.0, device="sim"), torch.Stream("sim")
    other.wait_stream(sim.current_stream())
    with other:
        source.add_(1)
    source.record_stream(other)
    address = source.data_ptr()
    del source
    assert torch.empty(1000, device="sim").data_ptr() != address
    other.synchronize()
    assert torch.empty(1000, device="sim").data_ptr() == address


def test_released_storage_is_an_error_that_names_shape_and_bytes(sim: ModuleType) -> None:
    unit = torch.arange(64.0, device="sim")
    view = unit.view(8, 8).t()
    unit.untyped_storage().resize_(0)
    with pytest.raises(
        RuntimeError,
        match=r"illegal memory access.*shape \[8, 8\].*256 bytes of a storage of 0 bytes",
    ):
        view.sum()
    unit.untyped_storage().resize_(256)
    assert view.isnan().all().item()
    unit.copy_(torch.arange(64.0))
    assert torch.equal(view.cpu(), torch.arange(64.0).view(8, 8).t())


def test_views_saved_by_autograd_see_a_storage_that_came_back(sim: ModuleType) -> None:
    sim.set_schedule("late")
    weight = torch.full((4, 4), 2.0, device="sim")
    leaf = torch.ones(3, 4, device="sim", requires_grad=True)
    loss = (leaf @ weight).sum()
    weight.untyped_storage().resize_(0)
    weight.untyped_storage().resize_(64)
    with torch.no_grad():
        weight.data.fill_(2.0)
    loss.backward()
    assert torch.equal(leaf.grad.cpu(), torch.full((3, 4), 8.0))


def test_growing_a_storage_keeps_its_bytes(sim: ModuleType) -> None:
    sim.set_schedule("late")
    tensor = torch.arange(4.0, device="sim")
    tensor.untyped_storage().resize_(32)
    grown = torch.empty(0, device="sim").set_(tensor.untyped_storage(), 0, (8,), (1,))
    assert grown[:4].tolist() == [0, 1, 2, 3] and grown[4:].isnan().all().item()


# ---- capacity and statistics ---------------------------------------------------------------------


def test_out_of_memory_says_what_was_asked_and_what_is_there(sim: ModuleType) -> None:
    sim.set_capacity(4 * MIB)
    kept = torch.empty(3 * MIB, dtype=torch.uint8, device="sim")
    with pytest.raises(
        torch.OutOfMemoryError,
        match=r"Tried to allocate 2.0 MiB. Device sim:0 has a total capacity of 4.0 MiB",
    ):
        torch.empty(2 * MIB, dtype=torch.uint8, device="sim")
    assert torch.accelerator.memory_stats()["num_ooms"] >= 1
    del kept
    torch.empty(4 * MIB, dtype=torch.uint8, device="sim")  # what was cached is given back first


def test_out_of_memory_leaves_results_of_before_intact(sim: ModuleType) -> None:
    sim.set_schedule("late")
    sim.set_capacity(4 * MIB)
    kept = torch.full((MIB // 2,), 3.0, device="sim")
    with pytest.raises(torch.OutOfMemoryError):
        torch.cat([kept] * 3)
    assert kept.sum().item() == 3 * (MIB // 2)


def test_statistics_follow_allocation_free_and_cache(sim: ModuleType) -> None:
    def now() -> tuple[int, int]:
        return torch.accelerator.memory_allocated(), torch.accelerator.memory_reserved()

    assert now() == (0, 0)
    tensor = torch.empty(2 * MIB, dtype=torch.uint8, device="sim")
    small = torch.empty(1, device="sim")
    assert now() == (2 * MIB + 512, 2 * MIB + 512)
    del tensor
    assert now() == (512, 2 * MIB + 512)
    assert torch.accelerator.max_memory_allocated() == 2 * MIB + 512
    torch.accelerator.reset_peak_memory_stats()
    assert torch.accelerator.max_memory_allocated() == 512
    assert torch.accelerator.max_memory_reserved() == 2 * MIB + 512
    torch.accelerator.empty_cache()
    assert now() == (512, 512)
    free, total = torch.accelerator.get_memory_info()
    assert (free, total) == sim.mem_get_info() and total - free == 512
    assert sim.memory_allocated(0) == 512 and sim.memory_allocated("sim:1") == 0
    del small


def test_a_cached_block_is_cut_and_joined_again(sim: ModuleType) -> None:
    whole = torch.empty(4 * MIB, dtype=torch.uint8, device="sim")
    address = whole.data_ptr()
    del whole
    parts = [torch.empty(2 * MIB, dtype=torch.uint8, device="sim") for _ in range(2)]
    assert {part.data_ptr() - address for part in parts} == {0, 2 * MIB}
    del parts
    assert torch.empty(4 * MIB, dtype=torch.uint8, device="sim").data_ptr() == address
    assert torch.accelerator.memory_reserved() == 4 * MIB


def test_memory_cached_by_one_stream_is_not_given_to_another(sim: ModuleType) -> None:
    tensor = torch.empty(1000, device="sim")
    address = tensor.data_ptr()
    del tensor
    with torch.Stream("sim"):
        assert torch.empty(1000, device="sim").data_ptr() != address


def test_empty_cache_waits_for_what_still_uses_the_memory(sim: ModuleType) -> None:
    sim.set_schedule("late")
    tensor = torch.full((MIB,), 3.0, device="sim")
    doubled = tensor * 2
    del tensor
    sim.empty_cache()
    assert sim.pending() == 0 and sim.host_waits()["main"] == 1
    # addresses that were used before
    assert torch.empty(2 * MIB, device="sim").isnan().all().item()
    assert doubled.sum().item() == 6 * MIB


# ---- the context ---------------------------------------------------------------------------------


def test_a_fork_cannot_use_the_devices_of_its_parent(sim: ModuleType) -> None:
    kept = torch.ones(1, device="sim")
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            torch.ones(1, device="sim")
        except RuntimeError as error:
            status = 0 if "forked subprocess" in str(error) and sim._is_in_bad_fork() else 2
        os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert kept.item() == 1
