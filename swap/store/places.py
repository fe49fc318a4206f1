"""Place: a byte range of an entry where it rests and where it is in memory; the transfers of reads
and writes.

TileRanges are the places that a tile is read from and written to in one run of a step program after
the other. The program makes these transfers by itself (program.py). Its tiles are the same in every
step, and rest in few slots, so that a transfer is described once for each choice of slots, and a
checksummed piece once.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Hashable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import torch

from tiermem.swap.base.native import READ, WRITE, Op, ffi
from tiermem.swap.base.tile_program import join_rows
from tiermem.swap.disk import durable
from tiermem.swap.disk.queue import Queues
from tiermem.swap.store.checksum import Expected, Range, Sums, WrittenBytes
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

    def targets(self, is_apart: bool) -> list[SlotPart]:
        """The slots that a write uses. Raises as `NvmeHome.targets`."""
        return self.home.targets(self.start, self.stop, is_apart)


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
    """A write of byte ranges: its transfers, and the slots that it goes to.

    Args:
        places: the ranges.
        is_apart: what rests there now stays readable until `begin`.

    Raises NoSlotError and OSError as `NvmeHome.targets`.
    """

    def __init__(self, places: Iterable[EntryPlace], is_apart: bool = False) -> None:
        self.ops: list[Op] = []
        self.targets: list[tuple[NvmeHome, SlotPart]] = []
        for place in places:
            parts = place.targets(is_apart)
            self.ops += place.home.ops(WRITE, parts, place.address)
            self.targets += [(place.home, part) for part in parts]

    def begin(self) -> None:
        """Makes the slots current, when the write has started."""
        for home, part in self.targets:
            home.slots.write(part)

    def lose(self) -> None:
        """Marks the bytes as lost, when the write has failed."""
        for home, part in self.targets:
            home.slots.lose(part)


def changing(
    targets: Sequence[tuple[NvmeHome, SlotPart]], name: str
) -> contextlib.AbstractContextManager[None]:
    """Announces to observers (`durable.watch`) a write that changes the current slot of some
    bytes."""
    if durable.is_watched() and any(
        home.slots.current(part.start, part.stop) != [part] for home, part in targets
    ):
        return durable.step("slot", name)
    return contextlib.nullcontext()


_MOST_MADE = 16
"""Choices of slots whose transfers a tile keeps: steps go round a few."""


@dataclasses.dataclass(eq=False)
class TileTransfers:
    """The transfers of a tile while its bytes are in certain slots."""

    reads: Sequence[Op]
    writes: WritePlan
    native: tuple[Any, Any]  # tm_transfer[] of both
    late: Sequence[tuple[Any, int]]  # those of late reads, and their places in the bytes of these
    plan: Any = None
    """The TilePlan that was built from these transfers, as `keep` was given it."""

    def keep(self, plan: object) -> None:
        """Keeps something with these transfers."""
        self.plan = plan

    def set_kept(self, address: int) -> None:
        """Sets where memory has the bytes of late reads, one behind the other; 0: it does not have
        them."""
        for row, place in self.late:
            row.kept = ffi.cast("void *", address + place if address else 0)


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
        self._held = held

    def check_usable(self) -> None:
        """Raises RuntimeError after the store's `close`, and in a forked child."""
        self._held.check_usable()

    def check_writable(self) -> None:
        """Before plans of writes: raises as `check_usable`, and OSError (ENODATA) when a file has
        been truncated."""
        self.check_usable()
        self._held.files.check_whole()

    def queues(self) -> Queues:
        """The store's queues; opens them first if need be. The caller holds the lock. Raises
        OSError."""
        return self._held.queues()

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


class TileRanges:
    """The ranges of one tile. `renew` begins another run; what it sets belongs to that run until
    the next `renew`.

    Transfers are kept for each choice of slots. Before plans of writes, the caller calls
    `Plans.check_writable`.

    Args:
        plans: of the store.
        early, late, writes: the ranges; `early` and `late` are read. Their buffers are not kept
            alive.
        is_apart: the bytes that are replaced can be read until `Plans.note`. Without `note` they
            stay.

    Raises ValueError as `Entry.check_range`.
    """

    transfers: TileTransfers
    """Those of this run."""
    expected: Expected
    """The pieces that its reads must bring; `checks` are theirs."""

    def __init__(
        self,
        plans: Plans,
        early: Sequence[Range],
        late: Sequence[Range] = (),
        writes: Sequence[Range] = (),
        is_apart: bool = False,
    ) -> None:
        self._plans = plans
        self._is_apart = is_apart
        self._made: dict[Hashable, TileTransfers] = {}  # by the slots
        self._queues: Queues | None = None  # of what is made
        self._num_late = len(late)
        reads = [*early, *late]
        plans.check_usable()
        with plans.lock:
            self._reads, self._writes = (
                places_of(plans.entries, reads),
                places_of(plans.entries, writes),
            )
            self._ranges = list(dict.fromkeys(place[:3] for place in self._reads + self._writes))
            names = dict.fromkeys(name for name, _, _ in (*reads, *writes))
            self._tables = [(name, plans.sums.of(name)) for name in names]
            self._read, self._written = plans.sums.pieces_of(reads), plans.sums.pieces_of(writes)
        self.written = [WrittenBytes(each, each.new_crcs()) for each in self._written if is_apart]
        into = [each.crcs for each in self.written] if is_apart else [None] * len(self._written)
        self.sums = join_rows(
            [each.summed(crcs) for each, crcs in zip(self._written, into, strict=True)]
        )
        self.expected, self.checks = [], join_rows([])

    @property
    def is_current(self) -> bool:
        """Whether the entries, and which of their bytes have checksums, are those of its making."""
        if any(home.is_dropped for home, _, _ in self._ranges):
            return False
        table_of = self._plans.sums.of
        return all(table_of(name) is table for name, table in self._tables)

    def renew(self) -> None:
        """Notes where the bytes are now, and their checksums. Raises NoSlotError and OSError as a
        write does."""
        plans = self._plans
        with plans.lock:
            queues = plans.queues() if self._ranges else None
            if queues is not self._queues or len(self._made) == _MOST_MADE:
                self._queues = queues
                self._made.clear()
            if not plans.sums.due_again(self._read, self.expected):
                self.expected = plans.sums.due_of(self._read)
                self.checks = join_rows([each.rows() for each in self.expected])
            like = tuple([home.slots.likeness(start, stop) for home, start, stop in self._ranges])
            if (found := self._made.get(like)) is None:
                found = self._made[like] = self._make()
            for pieces in () if self._is_apart else self._written:
                pieces.begin()
        self.transfers = found

    def _make(self) -> TileTransfers:
        num_early = len(self._reads) - self._num_late
        place = 0
        early = reads_of(self._reads[:num_early])
        late = reads_of(self._reads[num_early:])
        reads = [*early, *late]
        writes = WritePlan(self._writes, self._is_apart)
        native = (self._native(reads), self._native(writes.ops))
        places = []
        for number, op in enumerate(late, len(early)):
            places.append((native[0] + number, place))
            place += op.length
        return TileTransfers(reads, writes, native, places)

    def _native(self, ops: Sequence[Op]) -> Any:
        rows = ffi.new("tm_transfer[]", len(ops))
        for row, op in zip(rows, ops, strict=True):
            assert self._queues is not None
            row.queue, row.buffer = self._queues.handle_of(op.fd), ffi.cast("void *", op.address)
            row.length = op.length
            row.offset = op.offset
            row.fd = op.fd
        return rows
