"""TileRanges: the byte ranges that a tile reads and writes in one run after the other: their transfers and checksums.

A step program makes these transfers by itself (program.py). Its tiles are the same in every step, and rest in few places, so
that a transfer is described once for each choice of slots, and a checksummed piece once.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

from tiermem.swap.checksum import Expected, Range, Sums, Written
from tiermem.swap.entry import Entry, SlotPart, WritePlan, changing, places_of, reads_of
from tiermem.swap.native import Op, ffi
from tiermem.swap.queue import Queues
from tiermem.swap.resources import Resources
from tiermem.swap.tile_program import join_rows


class TileTransfers(NamedTuple):
    """The transfers of a tile while its bytes are in certain slots."""

    reads: Sequence[Op]
    writes: WritePlan
    native: tuple[Any, Any]  # tm_transfer[] of both
    late: Sequence[tuple[Any, int]]  # those of late reads, and their places in the bytes of these

    def set_kept(self, address: int) -> None:
        """Sets where memory has the bytes of late reads, one behind the other; 0: it does not have them."""
        for row, place in self.late:
            row.kept = ffi.cast("void *", address + place if address else 0)


class Plans:
    """Plans transfers that a step program makes by itself. Thread-safe.

    Args:
        entries, sums, held: of a store.
        lock: guards them.
    """

    def __init__(
        self, entries: Mapping[str, Entry], sums: Sums, held: Resources, lock: AbstractContextManager[object]
    ) -> None:
        self.entries = entries
        self.sums = sums
        self.lock = lock
        self._held = held

    def queues(self) -> Queues:
        """The store's queues; opens them first if need be. Raises OSError, and RuntimeError when the store is closed."""
        self._held.check_usable()
        with self.lock:
            return self._held.queues()

    def note(self, plan: WritePlan, name: str, has_failed: bool, written: Sequence[Written] = ()) -> None:
        """Notes that the writes of a plan have been made, or that they failed, and the checksums of writes apart."""
        with self.lock, changing(plan.targets, name):
            self.sums.keep(written)
            plan.begin()
            if has_failed:
                plan.lose()


class TileRanges:
    """The ranges of one tile. `renew` begins another run; what it sets belongs to that run until the next `renew`.

    Args:
        plans: of the store.
        early, late, writes: the ranges; `early` and `late` are read. Their buffers are not kept alive.
        is_apart: the bytes that are replaced can be read until `Plans.note`. Without `note` they stay.

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
        self._num_late, reads = len(late), [*early, *late]
        with plans.lock:
            self._reads, self._writes = places_of(plans.entries, reads), places_of(plans.entries, writes)
            names = dict.fromkeys(name for name, _, _ in (*reads, *writes))
            self._tables = [(name, plans.sums.of(name)) for name in names]
            self._read, self._written = plans.sums.pieces_of(reads), plans.sums.pieces_of(writes)
        self.written = [Written(each, each.new_crcs()) for each in self._written if is_apart]
        into = [each.crcs for each in self.written] if is_apart else [None] * len(self._written)
        self.sums = join_rows([each.summed(crcs) for each, crcs in zip(self._written, into, strict=True)])
        self.expected, self.checks = [], join_rows([])

    @property
    def is_current(self) -> bool:
        """Whether the entries, and which of their bytes have checksums, are those of its making."""
        if any(place.home.is_dropped for place in self._reads + self._writes):
            return False
        table_of = self._plans.sums.of
        return all(table_of(name) is table for name, table in self._tables)

    def renew(self) -> None:
        """Notes where the bytes are now, and their checksums. Raises NoSlotError and OSError as a write does."""
        plans, is_apart = self._plans, self._is_apart
        if (queues := plans.queues() if self._tables else None) is not self._queues:
            self._queues = queues
            self._made.clear()
        with plans.lock:
            if not plans.sums.due_again(self._read, self.expected):
                self.expected = plans.sums.due_of(self._read)
                self.checks = join_rows([each.rows() for each in self.expected])
            slots = list[SlotPart]()
            for place in self._reads:
                slots += place.current
            for place in self._writes:
                slots += place.targets(is_apart)
            for pieces in () if is_apart else self._written:
                pieces.begin()
            found = self._made.get(like := tuple(slots))
            if found is None:
                found = self._made[like] = self._make()
        self.transfers = found

    def _make(self) -> TileTransfers:
        num_early, place = len(self._reads) - self._num_late, 0
        early, late = reads_of(self._reads[:num_early]), reads_of(self._reads[num_early:])
        reads, writes = [*early, *late], WritePlan(self._writes, self._is_apart)
        native, places = (self._native(reads), self._native(writes.ops)), []
        for number, op in enumerate(late, len(early)):
            places.append((native[0] + number, place))
            place += op.length
        return TileTransfers(reads, writes, native, places)

    def _native(self, ops: Sequence[Op]) -> Any:
        rows = ffi.new("tm_transfer[]", len(ops))
        for row, op in zip(rows, ops, strict=True):
            assert self._queues is not None
            row.queue, row.buffer = self._queues.handle_of(op.fd), ffi.cast("void *", op.address)
            row.length, row.offset, row.fd = op.length, op.offset, op.fd
        return rows
