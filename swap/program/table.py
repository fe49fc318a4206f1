"""StepTable: the tiles of a step program as rows, which are made once and run step after step.

    made      when a tile is first given: its places in entries, its checksummed pieces, its native steps
    kept      until what its caller makes it from, its buffer, an entry or the pieces of one change
    updated   at each run, with the slots that hold its bytes now. Transfers are kept for each choice of slots
    noted     after a run: if it has moved slots, or if a write has failed

Of a step, a kept row needs nothing but the numbers of its parameters, at which its steps point, and
checksums, which native code finds in the tables of the entries. A row *apart* writes beside the
bytes that it replaces: they stay readable, with their checksums, until `note`. Without `note` the
run has changed nothing that a read finds.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

import numpy as np

from tiermem.swap.base.native import Op, StepNumbers, TransferError, ffi
from tiermem.swap.base.parts import StepParts
from tiermem.swap.base.ranges import Column, Numbers
from tiermem.swap.base.tile_program import (
    BEGUN,
    BROUGHT,
    CALLED,
    DURING_CHECK,
    DURING_STEP,
    Failure,
    PieceRows,
    TileTimes,
    bytes_of_rows,
    columns_of,
    join_rows,
)
from tiermem.swap.disk.queue import Queues, Recorder
from tiermem.swap.memory.arena import Slot
from tiermem.swap.store.checksum import PiecesIn, Range, WrittenBytes
from tiermem.swap.store.places import Plans, WritePlan, places_of, reads_of
from tiermem.swap.store.store import TensorStore

T = TypeVar("T")
T_contra = TypeVar("T_contra", contravariant=True)


class NativeStep(NamedTuple):
    """A native step. Its parts keep their tensors alive; without parts, the caller does."""

    struct: Any  # tm_step *
    numbers: StepNumbers
    parts: StepParts | None = None


class TileWork(Protocol[T_contra]):
    """What the caller says of a tile. `slot` is the buffer that it gets, or the first one, which
    stands for it; None: none.

    A subclass says `name`, `early_reads`, `writes` and `compute`; the rest is by default that of a
    tile which `compute` steps.
    """

    def name(self, tile: T_contra) -> str:
        """Its name in events and errors."""

    def unit(self, tile: T_contra) -> int:
        """The number of the unit that it belongs to."""
        return 0

    def early_reads(self, tile: T_contra, slot: Slot | None) -> Sequence[Range]:
        """What may be read before the run."""

    def late_reads(self, tile: T_contra, slot: Slot | None) -> Sequence[Range]:
        """What is final only when the run begins."""
        return ()

    def cached(self, tile: T_contra) -> int:
        """The address of memory that has the bytes of `late_reads`, one behind the other, until
        `Program.forget`; 0: none."""
        return 0

    def writes(self, tile: T_contra, slot: Slot | None) -> Sequence[Range]:
        """What is written back."""

    def basis(self, tile: T_contra) -> Hashable:
        """What the tile's row is made from beside its buffer: a row is valid as long as it is
        equal. Called before each run, for each tile. None: the row is of use once."""
        return None

    def is_shown(self, tile: T_contra) -> bool:
        """Whether `Program.read` finds the last of `writes` while the run is under way."""
        return False

    def steps(self, tile: T_contra, slot: Slot | None) -> Sequence[NativeStep] | None:
        """The native steps that are its work; None: `compute` does it."""
        return None

    def columns(self, tile: T_contra) -> Sequence[Column]:
        """What its reads and writes hold, in its buffer, for native steps in strips; none: they
        step all of it at once.

        Every column begins at a multiple of the disk's alignment in the buffer and on disk, and so
        does each strip of it. A piece with a checksum lies in one strip.
        """
        return ()

    def is_brought(self, tile: T_contra) -> bool:
        """Whether its buffer gets more than its reads: from `bring`, before its native steps, or
        from `compute`."""
        return False

    def bring(self, tile: T_contra, slot: Slot) -> None:
        """Copies what does not come from disk to its buffer; blocks. In a thread of the program."""
        return

    def compute(self, tile: T_contra, slot: Slot | None) -> Callable[[], object] | None:
        """Changes the buffer, or memory, in place; blocks. Returns the rest of the work, which a
        thread of the program does before the buffer is written, such as waiting for an accelerator;
        None: nothing. A tile without buffer has no rest."""


_MOST_CHOICES = 16
"""Choices of slots whose transfers a row keeps: steps go round a few."""


class SlotChoice(NamedTuple):
    """The transfers of a row while its bytes are in certain slots."""

    queues: Queues | None  # that are open
    reads: Sequence[Op]
    native_reads: Any  # tm_transfer[]
    native_writes: Any
    num_early: int  # transfers of early reads, which come first: one range may lie in several slots


class RowBasis(NamedTuple):
    """What a row depends on: it is valid while this is equal."""

    basis: Hashable  # of its tile
    address: int  # of its buffer; 0: none
    is_apart: bool  # the bytes that are replaced can be read until `StepTable.note`


class TileRow(Generic[T]):
    """A tile of a step program. `update` begins another run; what it sets belongs to that run.

    Args:
        plans: of the store. Before rows that write, the caller calls `Plans.check_writable`.
        tile, work, slot: the tile and its buffer.
        valid_for: what it depends on. Without a basis it is of use once, and keeps what its steps
            point at alive.
        begun: the row whose reads were made before the run.
        is_early: it is only read, before its run.

    Raises what `work` raises, and ValueError as `Entry.check_range`.
    """

    def __init__(
        self,
        plans: Plans,
        tile: T,
        work: TileWork[T],
        slot: Slot | None,
        valid_for: RowBasis,
        begun: TileRow[T] | None,
        is_early: bool,
    ) -> None:
        has_rest = slot is not None and not is_early
        early = work.early_reads(tile, slot) if slot is not None and begun is None else ()
        late = work.late_reads(tile, slot) if has_rest else ()
        writes = work.writes(tile, slot) if has_rest else ()
        steps = () if is_early else work.steps(tile, slot)
        self.tile = tile
        self.name = work.name(tile)
        self.unit = work.unit(tile)
        self.begun = begun
        self.shown = writes[-1] if has_rest and work.is_shown(tile) else None
        """The bytes of an entry that `Program.read` finds while the run is under way."""
        self.is_native = steps is not None
        self.steps = [step.struct for step in steps or ()]  # tm_step *
        self._keep = [step if valid_for.basis is None else step.numbers for step in steps or ()]
        self.is_brought = not is_early and work.is_brought(tile)
        """Whether a function of the caller completes its buffer before its native steps."""
        self._plans = plans
        self._valid_for = valid_for
        self._num_early = len(early)
        self._choices: dict[Hashable, SlotChoice] = {}  # by the slots
        self._choice: SlotChoice | None = None
        self._versions: list[int] = []  # of the slots, when that was chosen
        self._place([*early, *late], writes)
        columns = work.columns(tile) if has_rest and self.is_native else ()
        self._describe(columns, valid_for.address)

    def _place(self, reads: Sequence[Range], writes: Sequence[Range]) -> None:
        """Finds the ranges in their entries, and the pieces of them."""
        plans = self._plans
        plans.held.check_usable()
        with plans.lock:
            self._names = list(dict.fromkeys(name for name, _, _ in (*reads, *writes)))
            self._version = plans.sums.version
            self._found = self._find()
            self._reads = places_of(plans.entries, reads)
            self._writes = places_of(plans.entries, writes)
            self._homes = list(dict.fromkeys(place.home for place in self._reads + self._writes))
            self._read = plans.sums.pieces_of(reads)
            written = plans.sums.pieces_of(writes)
            is_apart = self._valid_for.is_apart
            self._cut = [each for each in written if not is_apart and each.inside != each.touching]
            self.checks = plans.sums.checked(self._read, bool(self._cut))
        self.write = WritePlan([], is_apart)
        self.changes_slots = False
        """Whether the run's writes change which slots are current."""
        self.written = [WrittenBytes(each, each.new_crcs()) for each in written if is_apart]
        """The checksums of writes apart."""
        into = [each.crcs for each in self.written] if is_apart else [None] * len(written)
        self.sums = join_rows([each.rows(own) for each, own in zip(written, into, strict=True)])

    def _describe(self, columns: Sequence[Column], address: int) -> None:
        """Makes the tm_tile, without transfers. address: of its buffer."""
        self.struct = tile = ffi.new("tm_tile *")
        tile.key = id(self.tile)
        tile.unit = self.unit
        if not self.is_native:
            tile.flags |= CALLED
        if self.is_brought:
            tile.flags |= BROUGHT
        if self.begun is not None:
            tile.flags |= BEGUN
        self._pointers = ffi.new("tm_step *[]", self.steps)
        tile.steps = ffi.cast("const tm_step *const *", self._pointers)
        tile.num_steps = len(self.steps)
        tile.checks = ffi.cast("const tm_piece *", self.checks.ctypes.data)
        tile.num_checks = len(self.checks)
        tile.sums = ffi.cast("const tm_piece *", self.sums.ctypes.data)
        tile.num_sums = len(self.sums)
        if self.shown is not None:
            tile.weights = ffi.cast("void *", self.shown[2].data_ptr())
            tile.weight_bytes = self.shown[2].numel()
        if not tile.flags:
            self._columns = columns_of(columns, address)
            tile.columns = self._columns
            tile.num_columns = len(columns)

    @property
    def choice(self) -> SlotChoice:
        """The transfers of this run."""
        assert self._choice is not None
        return self._choice

    def is_valid_for(self, basis: RowBasis) -> bool:
        """Whether it is the row of its tile for another run: what it depends on is as it was, and
        so are its entries, and which of their bytes have checksums."""
        version = self._plans.sums.version
        if self._valid_for != basis:
            return False
        if self._version != version and self._found != self._find():
            return False
        self._version = version
        return True

    def _find(self) -> list[object]:
        """Its entries, their tables of pieces, and which reads are verified."""
        plans = self._plans
        tables = [plans.sums.of(name) for name in self._names]
        return [*map(plans.entries.get, self._names), *tables, plans.sums.verify]

    def update(self, work: TileWork[T]) -> None:
        """Makes it transfer its bytes where they are now. Raises NoSlotError and OSError as a write
        does."""
        plans = self._plans
        if (
            self._choice is None
            or self._choice.queues is not (plans.held.open_queues if self._homes else None)
            or self._versions != [home.slots.version for home in self._homes]
        ):
            with plans.lock:
                self._choose()
        if self._cut or plans.sums.verify == "sample":
            with plans.lock:
                plans.sums.turn(self._read, bool(self._cut))  # before pieces become unknown
                for pieces in self._cut:
                    pieces.begin()
        if len(self._reads) > self._num_early:
            address = work.cached(self.tile)
            native = self.choice.native_reads
            for row in native[self.choice.num_early : len(native)]:
                row.cached = ffi.cast("void *", address)
                address += row.length if address else 0

    def _choose(self) -> None:
        """Finds or makes the transfers of the slots of now. An interrupt leaves none chosen."""
        self._choice = None
        queues = self._plans.held.queues() if self._homes else None
        versions = [home.slots.version for home in self._homes]
        self.write = write = WritePlan(self._writes, self._valid_for.is_apart)
        current = [part for place in self._reads for part in place.current]
        like = (*current, *(part for _, part in write.targets))
        found = self._choices.get(like)
        if found is None or found.queues is not queues:
            if len(self._choices) == _MOST_CHOICES:
                self._choices.clear()
            early = reads_of(self._reads[: self._num_early])
            reads = [*early, *reads_of(self._reads[self._num_early :])]
            native = _transfers_of(reads, queues), _transfers_of(write.ops(), queues)
            found = self._choices[like] = SlotChoice(queues, reads, *native, len(early))
        self.struct.reads = found.native_reads
        self.struct.num_reads = len(found.native_reads)
        self.struct.writes = found.native_writes
        self.struct.num_writes = len(found.native_writes)
        self.changes_slots = any(
            not place.home.slots.is_written(part) for place, part in write.targets
        )
        self._versions = versions
        self._choice = found

    def error_of(
        self, failure: Failure, causes: Sequence[Exception], store: TensorStore
    ) -> OSError:
        """The error of a run that failed at this tile. causes: of work that is not native."""
        files = store.queues.files
        if failure.during == DURING_CHECK and failure.num_wrong:
            rows = self._with_begun()
            expected = [each.expected for each in self.all_reads()]
            ops = [op for row in rows for op in row.choice.reads]
            piece = failure.piece, failure.seen, failure.num_wrong
            return store.sums.damage(expected, *piece, ops, files)
        if failure.during in (DURING_CHECK, DURING_STEP):
            error = OSError(failure.error, f"stepping {self.name!r}: {os.strerror(failure.error)}")
            error.__cause__ = next(iter(causes), None)
            return error
        path = files.get(failure.fd, f"descriptor {failure.fd}")
        return TransferError(failure.error, failure.kind, path, failure.offset, failure.length)

    def all_reads(self) -> list[PiecesIn]:
        """The pieces in all of its reads, those of the begin included."""
        return [each for row in self._with_begun() for each in row._read]

    def all_checks(self) -> PieceRows:
        """`all_reads`, as rows."""
        return join_rows([row.checks for row in self._with_begun()])

    def _with_begun(self) -> list[TileRow[T]]:
        return [self] if self.begun is None else [self.begun, self]


def _transfers_of(ops: Sequence[Op], queues: Queues | None) -> Any:
    rows = ffi.new("tm_transfer[]", len(ops))
    for row, op in zip(rows, ops, strict=True):
        assert queues is not None
        row.queue = queues.queue_of(op.fd).handle
        row.buffer = ffi.cast("void *", op.address)
        row.length = op.length
        row.offset = op.offset
        row.fd = op.fd
    return rows


class StepTable(Generic[T]):
    """The rows of the tiles of one store."""

    def __init__(self, store: TensorStore) -> None:
        self._store = store
        self._rows: dict[T, TileRow[T]] = {}

    def forget(self) -> None:
        """Gives up what is kept, because tiles have been replaced."""
        self._rows.clear()

    def rows(
        self,
        tiles: Iterable[T],
        work: TileWork[T],
        slot: Slot | None,
        begun: Mapping[int, TileRow[T]] = {},
        is_apart: bool = False,
        is_early: bool = False,
    ) -> Iterator[TileRow[T]]:
        """The rows of tiles for a run, one by one. Raises what `work` raises, NoSlotError and
        OSError.

        begun: what was read before, by the tile's id. is_apart, is_early: see RowBasis and TileRow.
        """
        plans = self._store.plans
        valid_for = RowBasis(None, 0 if slot is None else slot.tensor.data_ptr(), is_apart)
        for tile in tiles:
            read = begun.get(id(tile)) if begun else None
            basis = None if is_early or read is not None else work.basis(tile)
            if basis is not valid_for.basis:
                valid_for = valid_for._replace(basis=basis)
            row = None if basis is None else self._rows.get(tile)
            if row is None or not row.is_valid_for(valid_for):
                row = TileRow(plans, tile, work, slot, valid_for, read, is_early)
                if basis is not None:
                    self._rows[tile] = row
            row.update(work)
            yield row

    def settle(self, rows: Iterable[TileRow[T]]) -> None:
        """Notes that a run of rows counts, so that what it had to verify is no longer due."""
        with self._store.plans.lock:
            self._store.sums.settle(each for row in rows for each in row.all_reads())

    def note(self, row: TileRow[T], has_failed: bool) -> None:
        """Tells the store that the writes of a row have been made, or that they failed."""
        if row.changes_slots or has_failed:
            self._store.plans.note(row.write, row.name, has_failed, row.written)


def tell(
    rows: Sequence[TileRow[Any]],
    times: TileTimes,
    recorder: Recorder,
    lane: str,
    is_awaited: bool,
) -> None:
    """Tells a recorder what became of the tiles of a run. lane: of native work; is_awaited: the
    caller did nothing but wait."""
    names = [row.name for row in rows]

    def add(lane: str, spans: Numbers, num_bytes: Numbers | int = 0) -> None:
        chosen = np.flatnonzero(spans[:, 1])
        columns = *spans[chosen].T, np.broadcast_to(num_bytes, len(times))[chosen]
        own = names if len(chosen) == len(names) else [names[index] for index in chosen.tolist()]
        events = zip(
            itertools.repeat(lane), own, *(column.tolist() for column in columns), strict=False
        )
        recorder.add_rows(lane, list(events))

    add("read", times["begun_ns"], times["read_bytes"])
    add("read", times["read_ns"], np.where(times["begun_ns"][:, 1], 0, times["read_bytes"]))
    if is_awaited:
        add("wait", times["waited_ns"])
    for field in ("check_ns", "sum_ns"):
        for index in np.flatnonzero(times[field][:, 1]).tolist():
            pieces = rows[index].all_checks() if field == "check_ns" else rows[index].sums
            start_ns, end_ns = times[field][index].tolist()
            recorder.add("check", f"{len(pieces)} pieces", start_ns, end_ns, bytes_of_rows(pieces))
    if lane:
        is_native = np.array([row.is_native for row in rows], np.bool_)
        add(lane, times["step_ns"] * is_native[:, None], times["written_bytes"])
    add("write", times["write_ns"], times["written_bytes"])
    end_ns = max(int(times[field][:, 1].max(initial=0)) for field in ("step_ns", "sum_ns"))
    if end_ns and is_awaited:
        for name, write_end_ns in zip(names, times["write_ns"][:, 1].tolist(), strict=True):
            if write_end_ns > end_ns:
                recorder.add("wait", name, end_ns, write_end_ns)
                end_ns = write_end_ns
