"""Arena: the one allocation of HOST memory, and the slots carved out of it.

The arena reserves address space for the whole budget once. It makes pages resident when it carves
them for the first time, or a little before, with huge pages, and rounds sizes up to 4096 bytes
only. The pages of a slot that is given back stay resident, and low addresses are carved first.
Memory for copies to and from an accelerator is carved from a separate part, the *link slab*. Only
the link slab is registered with the device's driver (pinned), so that those copies run
asynchronously:

    [ link slab: shards, staging buffers | everything else: states, gradients, tiles ]

    Arena   carves slots of any size, first fit; raises BudgetError with the arithmetic when a slot does not fit. With
            another budget (`renew`) it gives free pages back and carves from a new part of address
            space
    Pool    lends equal slots that it carved at once, before a run

The arena knows no file and no tensor's name.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from itertools import repeat
from typing import NamedTuple

import torch

from tiermem.swap.base.native import Map, check_process
from tiermem.swap.base.ranges import ByteRange, FreeRanges, round_up
from tiermem.swap.memory.accelerator import PageLock

PAGE_BYTES = 4096
HUGE_BYTES = 2 << 20
_AHEAD = 16
"""For so many bytes one more becomes resident before it is carved, so that all cores make many at
once."""
_LEAST_AHEAD_BYTES = 64 << 20
_MOST_AHEAD_BYTES = 1 << 30


class BudgetError(RuntimeError):
    """A request does not fit the budget of HOST memory; the message holds the arithmetic."""


class Slot(NamedTuple):
    """A byte range of the arena. Its holder owns the bytes until it gives the slot back."""

    offset: int
    tensor: torch.Tensor  # uint8, exactly the bytes asked for

    @property
    def num_bytes(self) -> int:
        """Bytes asked for; the range carved is rounded up to pages."""
        return self.tensor.numel()


class _Part:
    """Address space of an arena: the arena's offsets from `start` on. Pages below `committed` are
    resident."""

    def __init__(self, start: int, num_bytes: int) -> None:
        self.start = start
        self.map = Map(num_bytes)
        self.bytes = self.map.tensor()
        self._committed = 0

    @property
    def stop(self) -> int:
        """The arena's offset of its end."""
        return self.start + self.map.num_bytes

    @property
    def committed(self) -> int:
        """The arena's offset of the end of its resident pages."""
        return self.start + self._committed

    def address(self, offset: int) -> int:
        """The address of an offset of the arena."""
        return self.map.address + offset - self.start

    def commit(self, stop: int) -> None:
        """Makes all pages below an offset of the arena resident, and some of those that follow.
        Raises OSError."""
        if (due := stop - self.start) > self._committed:
            ahead = min(due // _AHEAD, _MOST_AHEAD_BYTES) // HUGE_BYTES * HUGE_BYTES
            due = min(due + (ahead if ahead >= _LEAST_AHEAD_BYTES else 0), self.map.num_bytes)
            self.map.commit(self._committed, due - self._committed)
            self._committed = due

    def release(self, start: int, stop: int) -> None:
        """Gives the resident pages between two offsets of the arena back to the kernel. Raises
        OSError."""
        if (stop := min(stop, self.committed)) > start:
            self.map.release(start - self.start, stop - start)

    def close(self) -> None:
        """Gives the memory back when the last tensor that refers to it is gone."""
        self.bytes = torch.empty(0, dtype=torch.uint8)
        self.map.close()


class Arena:
    """Page-aligned HOST memory within one budget. Safe to call from several threads.

    Args:
        limit_bytes: the budget in bytes.
        link_bytes: the part of the budget that is the link slab.

    Raises:
        ValueError: the budget is not positive.
        OSError: the address space cannot be reserved.
    """

    def __init__(self, limit_bytes: int, link_bytes: int = 0) -> None:
        if limit_bytes <= 0:
            raise ValueError(
                f"a budget of {limit_bytes} bytes of HOST memory holds nothing; give at least "
                f"{PAGE_BYTES}"
            )
        self.limit_bytes = round_up(limit_bytes, PAGE_BYTES)
        self.peak_bytes = 0
        self.carved_bytes = 0
        # ascending; carving goes low first, so that a part is resident from its start
        self._parts: list[_Part] = []
        self._link_bytes = min(round_up(link_bytes, PAGE_BYTES), self.limit_bytes)
        self._link = FreeRanges()
        self._free = FreeRanges()
        self._given_up = FreeRanges()  # without pages, and not carved again
        self._add_part(_Part(0, self.limit_bytes), self._link_bytes)
        self._link_slots: dict[int, int] = {}  # bytes of each, by offset
        # of them, those of pinned memory that a budget counts with everything else
        self._crossed_back: dict[int, int] = {}
        self._locks: list[PageLock] = []
        self._locked = FreeRanges()  # what they have registered
        self._is_closed = False
        # guards everything above; an interrupt may leave it to this thread
        self._lock = threading.RLock()
        self._owner = os.getpid()

    @property
    def regions(self) -> list[ByteRange]:
        """The resident ranges, to be registered with the kernel's I/O."""
        found = []
        for part in self._parts:
            start = part.start
            for first, last in [*self._given_up.ranges(), (part.committed, part.committed)]:
                if part.start <= first <= part.committed:
                    if first > start:
                        found.append(ByteRange(part.address(start), first - start))
                    start = last
        return found

    def bind(self, node: int) -> None:
        """Prefers a memory node for what is carved from now on. Raises OSError where the kernel
        refuses."""
        for part in self._parts:
            part.map.bind(node)

    def renew(self, limit_bytes: int, link_bytes: int = 0) -> None:
        """Goes on with another budget, which counts what is carved. Slots keep their memory.

        Free pages are given back, except pinned ones, and later slots are carved from new address
        space; so slots of any size fit, whatever the free ranges were. No transfer may be in
        flight, and nothing registered with the kernel's I/O. Raises OSError when the address space
        cannot be reserved; then nothing is changed.
        """
        limit_bytes = round_up(limit_bytes, PAGE_BYTES)
        with self._lock:
            link_bytes = min(round_up(link_bytes, PAGE_BYTES), limit_bytes)
            if not link_bytes and not self._locks:
                self._link_slots.clear()
            linked = sum(self._link_slots.values()) - sum(self._crossed_back.values())
            due_link = max(0, link_bytes - linked)
            due = max(due_link, limit_bytes - self.carved_bytes)
            # the page between keeps ranges apart
            part = _Part(self._parts[-1].stop + PAGE_BYTES, due) if due else None
            self._give_up(self._free)
            self._free = FreeRanges()
            if not self._locks:
                self._give_up(self._link)
                self._link = FreeRanges()
            self.limit_bytes = limit_bytes
            self._link_bytes = link_bytes
            if part is not None:
                self._add_part(part, due_link)

    def take(self, num_bytes: int, what: str = "a slot", crosses_link: bool = False) -> Slot:
        """Carves a slot, content undefined. Raises BudgetError when no free range is long enough.

        crosses_link: carves from the link slab, if the arena has one.
        """
        size = _size_of(num_bytes)
        is_linked = crosses_link and self._link_bytes > 0
        free = self._link if is_linked else self._free
        check_process(self._owner, "this arena")
        with self._lock:
            if self._is_closed:
                raise RuntimeError(f"{what} needs {size} bytes of HOST memory; the arena is closed")
            offset = free.take(size)
            if offset is None:
                raise BudgetError(
                    f"{what} needs {size} bytes of HOST memory; the budget is {self.limit_bytes}, "
                    f"{self.carved_bytes} are in use and the longest free range is {free.longest}"
                )
            part = self._part_of(offset)
            try:
                part.commit(offset + size)
            except BaseException:
                free.add(offset, size)
                raise
            if is_linked:
                self._link_slots[offset] = size
            self.carved_bytes += size
            self.peak_bytes = max(self.peak_bytes, self.carved_bytes)
            first = offset - part.start
            return Slot(offset, part.bytes[first : first + num_bytes])

    def give_back(self, slot: Slot) -> None:
        """Frees a slot; its pages stay resident. Raises RuntimeError when the slot is given back
        twice."""
        size = _size_of(slot.num_bytes)
        with self._lock:
            self._crossed_back.pop(slot.offset, None)
            if self._link_slots.pop(slot.offset, None) is not None:
                self._link.add(slot.offset, size)
            else:
                self._free.add(slot.offset, size)
            self.carved_bytes -= size

    def cross(self, slot: Slot, crosses_link: bool) -> None:
        """Counts a slot in the link slab from now on, or with everything else, as the next budget
        does: `pin` registers it where it lies, and what is registered stays so."""
        size = _size_of(slot.num_bytes)
        with self._lock:
            if crosses_link:
                self._crossed_back.pop(slot.offset, None)
                self._link_slots[slot.offset] = size
            elif slot.offset in self._link_slots and self._locks:
                self._crossed_back[slot.offset] = size
            else:
                self._link_slots.pop(slot.offset, None)

    @property
    def is_pinned(self) -> bool:
        """Whether every slot of the link slab is registered with a device's driver, and there is
        one."""
        with self._lock:
            pinned = sum(lock.num_bytes for lock in self._locks)
            return 0 < sum(self._link_slots.values()) <= pinned

    def pin(self, device: torch.device) -> None:
        """Registers new slots of the link slab with a device's driver. Blocks."""
        with self._lock:
            slots = [each for slot in sorted(self._link_slots.items()) for each in self._due(*slot)]
            if slots:
                self._locks.append(
                    PageLock(
                        device,
                        [ByteRange(self._part_of(at).address(at), size) for at, size in slots],
                    )
                )
                for at, size in slots:
                    self._locked.add(at, size)

    def _due(self, start: int, num_bytes: int) -> Iterator[tuple[int, int]]:
        """The parts of a slot that no driver has registered: (offset, bytes)."""
        stop = start + num_bytes
        for first, last in self._locked.ranges():
            if first < stop and last > start:
                if first > start:
                    yield start, first - start
                start = last
        if start < stop:
            yield start, stop - start

    def close(self) -> None:
        """Gives the memory back; tensors that still refer to it keep it alive until the last of
        them is gone.

        No transfer may be in flight. Does nothing in a forked child and in a second call.
        """
        if os.getpid() != self._owner:
            return
        with self._lock:
            self._is_closed = True
            while self._locks:
                self._locks.pop().close()
            for part in self._parts:
                part.close()

    def _add_part(self, part: _Part, link_bytes: int) -> None:
        """Makes a part free: the link slab first."""
        self._parts.append(part)
        if link_bytes:
            self._link.add(part.start, link_bytes)
        if link_bytes < part.map.num_bytes:
            self._free.add(part.start + link_bytes, part.map.num_bytes - link_bytes)

    def _part_of(self, offset: int) -> _Part:
        """The part that holds an offset."""
        return next(part for part in reversed(self._parts) if part.start <= offset)

    def _give_up(self, free: FreeRanges) -> None:
        """Gives the pages of free ranges back for good."""
        for start, stop in free.ranges():
            part = self._part_of(start)
            part.release(start, stop)
            if start < part.committed:
                self._given_up.add(start, stop - start)


class Pool:
    """Equal slots carved at once from an arena.

    Args:
        arena: carves the slots; must outlive the pool.
        slot_bytes: bytes of each slot.
        count: number of slots.
        what: their purpose, for the error.
        crosses_link: whether they are carved from the link slab.
    """

    def __init__(
        self, arena: Arena, slot_bytes: int, count: int, what: str, crosses_link: bool = False
    ) -> None:
        self._give_up = arena.give_back  # a slot, to what it was carved from
        slots: list[Slot] = []
        try:
            for i in range(count):
                slots.append(
                    arena.take(slot_bytes, f"buffer {i + 1} of {count} for {what}", crosses_link)
                )
        except BaseException:
            for slot in slots:
                arena.give_back(slot)
            raise
        self._set(slots, slot_bytes)

    def _set(self, slots: list[Slot], slot_bytes: int) -> None:
        self._slots = slots
        self.slot_bytes = slot_bytes
        self.count = len(slots)
        self._free = list(reversed(slots))

    def take(self) -> Slot | None:
        """Returns a free slot, or None when all are lent."""
        return self._free.pop() if self._free else None

    def take_all(self, into: list[Slot]) -> None:
        """Moves every free slot to the end of a list. An interrupt leaves none outside both."""
        _move_all(self._free, into)

    def give_back(self, slot: Slot) -> None:
        """Takes a slot back; `take` returns the most recently used slot first."""
        self.give_back_all([slot])

    def give_back_all(self, slots: list[Slot]) -> None:
        """Takes back the slots of a list, which is empty then. An interrupt leaves none outside
        both."""
        held = {free.offset for free in self._free}
        for slot in slots:
            if slot.offset in held:
                raise RuntimeError(
                    f"the slot at {slot.offset} is in the pool already: it was given back twice"
                )
        _move_all(slots, self._free)

    def reset(self) -> None:
        """Takes every slot back, whoever has it: after an interrupt, when no transfer or thread
        uses any of them."""
        self._free = list(reversed(self._slots))

    def cross(self, arena: Arena, crosses_link: bool) -> None:
        """`Arena.cross` of every slot."""
        for slot in self._slots:
            arena.cross(slot, crosses_link)

    def close(self) -> None:
        """Returns every slot to the arena. All must have been given back."""
        if len(self._free) != self.count:
            raise RuntimeError(
                f"{self.count - len(self._free)} of {self.count} slots are still in use"
            )
        for slot in self._slots:
            self._give_up(slot)
        self._set([], self.slot_bytes)


def _move_all(slots: list[Slot], into: list[Slot]) -> None:
    """Moves slots, the last one first: one call of C code, which Python's signals do not
    interrupt."""
    into.extend(map(list.pop, repeat(slots, len(slots))))


def _size_of(num_bytes: int) -> int:
    """Returns the bytes that a slot takes from the budget."""
    return round_up(max(num_bytes, 1), PAGE_BYTES)
