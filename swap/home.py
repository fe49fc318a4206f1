"""NvmeHome: where one entry rests on NVME: an extent of its size for each slot that it has come to need.

    entry     [ 0 .................. a .......... end )
    slot 0    [ frozen               |  live          )     path 0, 1 MiB on       allocated with the entry
    slot 1    [ live                 |                )     path 0, 64 MiB on      allocated by the first write to it

Which slot holds what is told in slots.py. Another slot's extent lies on the path of the first one where that has room. None
of them is given back before the entry is dropped, and then not while a freeze holds it. Under its store's lock.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from tiermem.swap import durable
from tiermem.swap.files import Extent, Files
from tiermem.swap.freeze import FrozenPart, FrozenRange
from tiermem.swap.slots import SlotPart, Slots


class Place(NamedTuple):
    """Bytes [start, start + num_bytes) of an entry, in a file."""

    start: int
    num_bytes: int
    fd: int
    file_offset: int


class NvmeHome:
    """The extents of one entry, and which of them holds what. Raises OSError when there is no room for the first.

    Args:
        files: where extents come from.
        num_bytes: of the entry.
        num_slots: most extents.
        is_durable: whether it is frozen when its store is.
    """

    def __init__(self, files: Files, num_bytes: int, num_slots: int, is_durable: bool) -> None:
        first = files.allocate(num_bytes)
        self.num_bytes = first.num_bytes
        self.is_durable = is_durable
        self.slots = Slots(first.num_bytes, num_slots)
        self.extents: list[Extent | None] = [first, *[None] * (num_slots - 1)]
        self.is_dropped = False
        self._files = files

    def reads(self, start: int, stop: int) -> list[Place]:
        """Where bytes [start, stop) are read."""
        return [self._place(part) for part in self.slots.current(start, stop)]

    def writes(self, start: int, stop: int) -> list[SlotPart]:
        """Where bytes [start, stop) are to be written; extents that are missing are allocated.

        Raises NoSlotError; OSError when there is no room, or a file has been truncated.
        """
        targets = self.slots.targets(start, stop)
        for slot in {part.slot for part in targets}:
            extent = self.extents[slot]
            if extent is None:
                self.extents[slot] = extent = self._files.allocate(self.num_bytes, near=self.first.path_index)
            self._files.check_whole(extent)
        return targets

    def written(self, parts: Iterable[SlotPart]) -> None:
        """A write to those parts, which `writes` told, is under way: they are what is read from now on."""
        for _, start, stop in parts:
            self.slots.write(start, stop)

    def moves_to(self, parts: Iterable[SlotPart]) -> bool:
        """Whether a write to those parts leaves a slot for another."""
        return any(self.slots.current(start, stop) != [SlotPart(slot, start, stop)] for slot, start, stop in parts)

    def places(self, parts: Iterable[SlotPart]) -> list[Place]:
        """Where parts lie in the files."""
        return [self._place(part) for part in parts]

    def freeze(self, number: int) -> list[FrozenPart]:
        """Holds what is current for a freeze."""
        found = []
        for slot, start, stop in self.slots.freeze(number):
            extent = self.extent(slot)
            found.append(FrozenPart(start, FrozenRange(extent.path_index, extent.offset + start, stop - start)))
        return found

    def thaw(self, number: int) -> None:
        """Lets go of what a freeze holds, and of what was waiting for that."""
        self.slots.thaw(number)
        if self.is_dropped:
            self._free()

    def drop(self) -> None:
        """Gives the extents back; those that a freeze holds when it is thawed."""
        self.is_dropped = True
        self._free()

    @property
    def first(self) -> Extent:
        """Slot 0's."""
        return self.extent(0)

    def extent(self, slot: int) -> Extent:
        """A slot's extent, which has been written or is the first."""
        extent = self.extents[slot]
        assert extent is not None  # a current slot has been allocated by `writes`
        return extent

    def _place(self, part: SlotPart) -> Place:
        extent = self.extent(part.slot)
        return Place(part.start, part.stop - part.start, self._files.fd(extent), extent.offset + part.start)

    def _free(self) -> None:
        held = self.slots.held()
        for slot, extent in enumerate(self.extents):
            if extent is not None and slot not in held:
                self._files.free(extent)
                self.extents[slot] = None


@contextlib.contextmanager
def changing(targets: Iterable[tuple[NvmeHome, Sequence[SlotPart]]], name: str) -> Iterator[None]:
    """Announces, when somebody watches, a write that leaves the slots of some freeze for others."""
    if durable.is_watched() and any(home.moves_to(parts) for home, parts in targets):
        with durable.step("slot", name):
            yield
    else:
        yield
