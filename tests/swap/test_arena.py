"""Is the arena's memory exactly what was carved, within the budget, and reused warm?"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tiermem.swap.base.native import Map
from tiermem.swap.memory import arena as arena_module
from tiermem.swap.memory.arena import HUGE_BYTES, PAGE_BYTES, Arena, BudgetError


def resident_bytes(address: int, num_bytes: int) -> int:
    """Of the mappings that begin in a range, as the kernel counts."""
    total, is_inside = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        first = line.split()[0]
        if "-" in first and not first.endswith(":"):
            is_inside = address <= int(first.split("-")[0], 16) < address + num_bytes
        elif is_inside and first == "Rss:":
            total += int(line.split()[1]) * 1024
    return total


def test_slot_has_exactly_the_bytes_asked_for_and_takes_whole_pages() -> None:
    arena = Arena(8 * PAGE_BYTES)
    slot = arena.take(PAGE_BYTES + 1)
    assert slot.num_bytes == slot.tensor.numel() == PAGE_BYTES + 1
    assert slot.tensor.data_ptr() % PAGE_BYTES == 0
    assert arena.carved_bytes == arena.peak_bytes == 2 * PAGE_BYTES
    arena.close()


def test_slots_do_not_overlap() -> None:
    arena = Arena(64 * PAGE_BYTES)
    slots = [arena.take(n) for n in (1, PAGE_BYTES, 3 * PAGE_BYTES - 7, 5)]
    for value, slot in enumerate(slots):
        slot.tensor.fill_(value)
    assert all((slot.tensor == value).all() for value, slot in enumerate(slots))
    arena.close()


def test_lowest_hole_is_carved_first_and_holes_that_touch_are_one() -> None:
    arena = Arena(8 * PAGE_BYTES)
    slots = [arena.take(PAGE_BYTES) for _ in range(8)]
    for i in (5, 3, 4):
        arena.give_back(slots[i])
    assert arena.take(3 * PAGE_BYTES).offset == 3 * PAGE_BYTES
    arena.close()


def test_what_does_not_fit_is_refused_with_the_arithmetic() -> None:
    arena = Arena(4 * PAGE_BYTES)
    arena.take(PAGE_BYTES)
    with pytest.raises(BudgetError) as refusal:
        arena.take(4 * PAGE_BYTES, "unit 'layers.3'")
    assert str(refusal.value) == (
        "unit 'layers.3' needs 16384 bytes of HOST memory; the budget is 16384, "
        "4096 are in use and the longest free range is 12288"
    )
    assert arena.carved_bytes == PAGE_BYTES
    arena.close()


def test_slot_given_back_is_carved_again_with_its_pages() -> None:
    arena = Arena(4 << 20)
    slot = arena.take(1 << 20)
    slot.tensor.fill_(7)
    arena.give_back(slot)
    again = arena.take(1 << 20)
    assert again.offset == slot.offset
    # the same pages: nothing was given to the kernel and taken anew
    assert (again.tensor == 7).all()
    assert sum(region.num_bytes for region in arena.regions) == 1 << 20
    arena.close()


def test_slot_given_back_twice_is_refused() -> None:
    arena = Arena(4 * PAGE_BYTES)
    slot = arena.take(PAGE_BYTES)
    arena.give_back(slot)
    with pytest.raises(RuntimeError, match="given back twice"):
        arena.give_back(slot)
    assert arena.carved_bytes == 0
    arena.close()


def test_carved_memory_is_resident_and_the_rest_is_not() -> None:
    arena = Arena(256 << 20)
    assert not arena.regions
    address = arena.take(10 << 20).tensor.data_ptr()
    arena.take(PAGE_BYTES)
    resident = resident_bytes(address, 256 << 20)
    carved = arena.carved_bytes
    assert carved <= resident <= carved + HUGE_BYTES  # the last huge page may be whole
    arena.close()


def test_a_sixteenth_more_is_resident_before_it_is_carved_where_that_is_much(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(arena_module, "_LEAST_AHEAD_BYTES", 4 << 20)  # 64 MiB of a GiB
    arena = Arena((130 << 20) + PAGE_BYTES)
    first = arena.take(60 << 20).tensor
    address = first.data_ptr()
    assert resident_bytes(address, arena.limit_bytes) == 60 << 20
    arena.take(20 << 20)
    assert resident_bytes(address, arena.limit_bytes) == 84 << 20  # 80 and 5, of whole huge pages
    arena.take(4 << 20)
    assert resident_bytes(address, arena.limit_bytes) == 84 << 20
    last = arena.take((46 << 20) + PAGE_BYTES).tensor
    assert (
        arena.limit_bytes
        <= resident_bytes(address, arena.limit_bytes)
        <= arena.limit_bytes + HUGE_BYTES
    )
    assert not first.any() and not last.any()
    arena.close()


def test_budget_is_usable_to_its_last_page() -> None:
    arena = Arena(3 * PAGE_BYTES - 1)
    assert arena.limit_bytes == 3 * PAGE_BYTES
    arena.take(3 * PAGE_BYTES).tensor.fill_(1)
    with pytest.raises(BudgetError):
        arena.take(0)
    arena.close()


@pytest.mark.parametrize("limit_bytes", [0, -1])
def test_budget_that_holds_nothing_is_refused(limit_bytes: int) -> None:
    with pytest.raises(ValueError, match="holds nothing"):
        Arena(limit_bytes)


def test_slot_is_not_lost_when_the_system_has_no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: Map, offset: int, num_bytes: int) -> None:
        raise OSError(12, "no memory")

    arena = Arena(4 * PAGE_BYTES)
    with monkeypatch.context() as patch:
        patch.setattr(Map, "commit", refuse)
        with pytest.raises(OSError, match="no memory"):
            arena.take(4 * PAGE_BYTES)
    assert arena.carved_bytes == 0
    assert arena.take(4 * PAGE_BYTES).offset == 0
    arena.close()


def test_closed_arena_carves_nothing() -> None:
    arena = Arena(4 * PAGE_BYTES)
    arena.close()
    arena.close()
    with pytest.raises(RuntimeError, match="closed"):
        arena.take(1)


def test_tensor_of_a_closed_arena_keeps_its_bytes_and_its_memory_goes_with_it() -> None:
    arena = Arena(4 << 20)
    tensor = arena.take(4 << 20).tensor[:100]
    address = tensor.data_ptr()
    tensor.fill_(9)
    arena.close()
    assert (tensor == 9).all()
    del tensor
    assert resident_bytes(address, 4 << 20) == 0


def test_forked_child_does_not_have_the_memory_and_unmaps_nothing() -> None:
    arena = Arena(4 << 20)
    slot = arena.take(4 << 20)
    slot.tensor.fill_(5)
    address = slot.tensor.data_ptr()
    pid = os.fork()
    if pid == 0:
        arena.close()
        os._exit(1 if resident_bytes(address, 4 << 20) else 0)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert (slot.tensor == 5).all()
    arena.close()


@pytest.mark.slow
def test_process_that_forgets_its_arena_ends_quietly() -> None:
    script = (
        "from tiermem.swap.memory.arena import Arena\nkept = Arena(1 << "
        "20).take(5).tensor\nother = Arena(1 << 20)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


# ---- another budget ------------------------------------------------------------------------------


def test_another_budget_keeps_slots_and_gives_free_pages_back() -> None:
    arena = Arena(4 << 20)
    kept, freed = [arena.take(1 << 20) for _ in range(2)]
    last = arena.take(1 << 20)
    for slot in (kept, freed, last):
        slot.tensor.fill_(7)
    arena.give_back(freed)
    arena.renew(5 << 20)
    assert resident_bytes(freed.tensor.data_ptr(), 1 << 20) == 0
    whole = arena.take(3 << 20)  # no free range of the first budget was as long
    whole.tensor.fill_(9)
    assert (kept.tensor == 7).all()
    assert (last.tensor == 7).all()
    with pytest.raises(BudgetError, match="the budget is 5242880, 5242880 are in use"):
        arena.take(1)
    regions = [
        (kept.tensor.data_ptr(), 1 << 20),
        (last.tensor.data_ptr(), 1 << 20),
        (whole.tensor.data_ptr(), 3 << 20),
    ]
    assert arena.regions == regions
    arena.close()


def test_a_slot_of_the_first_budget_is_carved_again_in_the_second() -> None:
    arena = Arena(3 << 20, link_bytes=1 << 20)
    linked, other = arena.take(1 << 20, crosses_link=True), arena.take(1 << 20)
    arena.renew(4 << 20, link_bytes=2 << 20)
    more = arena.take(1 << 20, crosses_link=True)
    arena.give_back(linked)
    arena.give_back(other)
    assert arena.take(1 << 20, crosses_link=True).offset == linked.offset
    assert arena.take(1 << 20).offset == other.offset
    assert arena.take(1 << 20).offset > more.offset
    assert arena.carved_bytes == arena.limit_bytes
    arena.close()
