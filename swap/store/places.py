"""Place: a byte range of an entry where it rests and where it is in memory; the transfers of reads
and writes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple

import torch

from tiermem.swap.base.native import READ, WRITE, Op
from tiermem.swap.disk import durable
from tiermem.swap.store.checksum import Sums, WrittenBytes
from tiermem.swap.store.entry import Entry, NvmeHome, SlotPart
from tiermem.swap.store.resources import Resources


class EntryPlace(NamedTuple):
    """A byte range of an entry on NVME, and where it is in memory."""

    home: NvmeHome
    start: int
    stop: int
    address: int  # that byte 0 of the entry would have

    @property
    def current(self) -> list[SlotPart]:
        """The slots that a read uses."""
        return self.home.slots.current(self.start, self.stop)


def places_of(
    entries: Mapping[str, Entry], ranges: Iterable[tuple[str, int, torch.Tensor]]
) -> list[EntryPlace]:
    """The places of byte ranges: the name of an entry, an offset in it, a buffer. Raises ValueError
    as `Entry.check_range`.

    The caller of this and of what follows holds the store's lock.
    """
    found = []
    for name, offset, buffer in ranges:
        home = entries[name].check_range(offset, buffer)
        found.append(EntryPlace(home, offset, offset + buffer.numel(), buffer.data_ptr() - offset))
    return found


def reads_of(places: Iterable[EntryPlace]) -> list[Op]:
    """The transfers that read byte ranges into their buffers."""
    return [op for place in places for op in place.home.ops(READ, place.current, place.address)]


class WritePlan:
    """A write of byte ranges: the slots that it goes to, and its transfers.

    Args:
        places: the ranges.
        is_apart: what rests there now stays readable until `begin`.

    Raises NoSlotError and OSError as `NvmeHome.targets`.
    """

    def __init__(self, places: Iterable[EntryPlace], is_apart: bool = False) -> None:
        self.targets = [
            (place, part)
            for place in places
            for part in place.home.targets(place.start, place.stop, is_apart)
        ]

    def ops(self) -> list[Op]:
        """Its transfers."""
        return [
            op
            for place, part in self.targets
            for op in place.home.ops(WRITE, [part], place.address)
        ]

    def begin(self) -> None:
        """Makes the slots current, when the write has started."""
        for place, part in self.targets:
            place.home.slots.write(part)

    def lose(self) -> None:
        """Marks the bytes as lost, when the write has failed."""
        for place, part in self.targets:
            place.home.slots.lose(part)


def changing(
    targets: Sequence[tuple[EntryPlace, SlotPart]], name: str
) -> AbstractContextManager[None]:
    """Announces to observers (`durable.watch`) a write that changes the current slot of some
    bytes."""
    if durable.is_watched() and any(
        place.home.slots.current(part.start, part.stop) != [part] for place, part in targets
    ):
        return durable.step("slot", name)
    return nullcontext()


class Plans:
    """Plans transfers that a step program makes by itself. Thread-safe.

    Args:
        entries, sums, held: of a store.
        lock: guards them.
    """

    def __init__(
        self,
        entries: Mapping[str, Entry],
        sums: Sums,
        held: Resources,
        lock: AbstractContextManager[object],
    ) -> None:
        self.entries = entries
        self.sums = sums
        self.lock = lock
        self.held = held

    def check_writable(self) -> None:
        """Before plans of writes: raises as `Resources.check_usable`, and OSError (ENODATA) when a
        file has been truncated."""
        self.held.check_usable()
        self.held.files.check_whole()

    def note(
        self, plan: WritePlan, name: str, has_failed: bool, written: Sequence[WrittenBytes] = ()
    ) -> None:
        """Notes that the writes of a plan have been made, or that they failed, and the checksums of
        writes apart."""
        with self.lock, changing(plan.targets, name):
            self.sums.keep(written)
            plan.begin()
            if has_failed:
                plan.lose()
