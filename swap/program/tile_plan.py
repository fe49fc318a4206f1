"""TilePlan: a tile as a step program gets it: its transfers, its checksums, its native steps, and
the slots that it writes to.

The caller of a program describes its tiles (TileWork). A plan is made when the tile is given to the
program, and used again while nothing but scalars and checksums has changed: it is kept for each
choice of slots. A plan *apart* writes beside the bytes that it replaces: they stay readable, with
their checksums, until `note`. Without `note` the plan has changed nothing that a read finds.
"""

from __future__ import annotations

import dataclasses
import itertools
import os
from collections.abc import Callable, Hashable, Sequence
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

import numpy as np

from tiermem.swap.base.native import Op, TransferError, step_struct
from tiermem.swap.base.parts import Dither, StepParts, StepRule
from tiermem.swap.base.ranges import ByteRange, Column, Numbers
from tiermem.swap.base.tile_program import (
    BEGUN,
    BROUGHT,
    CALLED,
    CHECK_STAGE,
    NO_COLUMNS,
    NO_PIECES,
    NOTHING,
    STEP_STAGE,
    Failure,
    NativeTile,
    TileTimes,
    bytes_of_rows,
    columns_of,
)
from tiermem.swap.disk.queue import Recorder
from tiermem.swap.memory.arena import Slot
from tiermem.swap.store.checksum import Expected, Range, WrittenBytes
from tiermem.swap.store.places import TileRanges, WritePlan
from tiermem.swap.store.store import TensorStore

T = TypeVar("T")
T_contra = TypeVar("T_contra", contravariant=True)


class KernelStep(NamedTuple):
    """The arguments of one native step; see `swap.native.optimizer_step`."""

    rule: StepRule
    parts: StepParts
    dither: Dither | None
    start_moments: bool


class NativeStep(NamedTuple):
    """A native step. Its parts keep their tensors alive; without parts, the caller does."""

    struct: Any  # tm_step *
    parts: StepParts | None = None

    @staticmethod
    def of(step: KernelStep) -> NativeStep:
        """The native step of these arguments. Raises ValueError for parts that do not fit
        together."""
        return NativeStep(step_struct(*step), step.parts)


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

    def kept(self, tile: T_contra) -> int:
        """The address of memory that has the bytes of `late_reads`, one behind the other, until
        `Program.forget`; 0: none."""
        return 0

    def writes(self, tile: T_contra, slot: Slot | None) -> Sequence[Range]:
        """What is written back."""

    def likeness(self, tile: T_contra, slot: Slot | None) -> Hashable:
        """Equal for equal ranges, which are then planned once; None: they are planned anew."""
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


class Shown(NamedTuple):
    """Bytes of an entry that `Program.read` finds while the run is under way."""

    entry: str
    offset: int
    memory: ByteRange  # in the buffer


@dataclasses.dataclass
class TilePlan(Generic[T]):
    """A tile of a run, or of a begin, as it was given to the native program."""

    tile: T
    name: str
    native: NativeTile
    ops: Sequence[Op]  # reads, those of the begin included
    expected: Expected
    writes: WritePlan | None = None
    written: Sequence[WrittenBytes] = ()  # checksums of writes apart
    shown: Shown | None = None
    steps: Sequence[NativeStep] | None = None
    keep: object = None  # what native memory points at

    def is_again(self, flags: int, steps: Sequence[NativeStep] | None, planned: TileRanges) -> bool:
        """Whether a run gets the tile as before: with steps that may have new scalars, and
        checksums that may be others."""
        native = self.native
        return native.flags == flags and self.steps is steps and native.checks is planned.checks

    @property
    def is_native(self) -> bool:
        """Whether no function of the caller does its work."""
        return not self.native.flags & CALLED

    @property
    def is_brought(self) -> bool:
        """Whether a function of the caller completes its buffer before its native steps."""
        return bool(self.native.flags & BROUGHT)

    def error_of(
        self, failure: Failure, causes: Sequence[Exception], store: TensorStore
    ) -> OSError:
        """The error of a run that failed at this tile. causes: of work that is not native."""
        files = store.queues.files
        if failure.stage == CHECK_STAGE and failure.num_wrong:
            piece = failure.piece, failure.seen, failure.num_wrong
            return store.sums.damage(self.expected, *piece, self.ops, files)
        if failure.stage in (CHECK_STAGE, STEP_STAGE):
            error = OSError(failure.error, f"stepping {self.name!r}: {os.strerror(failure.error)}")
            error.__cause__ = next(iter(causes), None)
            return error
        path = files.get(failure.fd, f"descriptor {failure.fd}")
        return TransferError(failure.error, failure.kind, path, failure.offset, failure.length)


def tell(
    planned: Sequence[TilePlan[Any]],
    times: TileTimes,
    recorder: Recorder,
    lane: str,
    is_awaited: bool,
) -> None:
    """Tells a recorder what became of the tiles of a run. lane: of native work; is_awaited: the
    caller did nothing but wait."""
    names = [each.name for each in planned]

    def add(lane: str, spans: Numbers, num_bytes: Numbers | int = 0) -> None:
        columns = *spans.T, np.broadcast_to(num_bytes, len(times))
        rows = zip(
            itertools.repeat(lane), names, *(column.tolist() for column in columns), strict=False
        )
        recorder.add_rows(lane, [row for row in rows if row[3]])

    add("read", times["begun_ns"], times["read_bytes"])
    add("read", times["read_ns"], np.where(times["begun_ns"][:, 1], 0, times["read_bytes"]))
    if is_awaited:
        add("wait", times["waited_ns"])
    for index in np.flatnonzero(times["check_ns"][:, 1]).tolist():
        expected, (start_ns, end_ns) = planned[index].expected, times["check_ns"][index].tolist()
        num_bytes = sum(int(part.num_bytes.sum()) for part in expected)
        recorder.add(
            "check",
            f"{sum(len(part.crcs) for part in expected)} pieces",
            start_ns,
            end_ns,
            num_bytes,
        )
    if lane:
        is_native = np.array([each.is_native for each in planned], np.bool_)
        add(lane, times["step_ns"] * is_native[:, None], times["written_bytes"])
    for index in np.flatnonzero(times["sum_ns"][:, 1]).tolist():
        sums, (start_ns, end_ns) = planned[index].native.sums, times["sum_ns"][index].tolist()
        recorder.add("check", f"{len(sums)} pieces", start_ns, end_ns, bytes_of_rows(sums))
    add("write", times["write_ns"], times["written_bytes"])
    end_ns = max(int(times[field][:, 1].max(initial=0)) for field in ("step_ns", "sum_ns"))
    if end_ns and is_awaited:
        for name, write_end_ns in zip(names, times["write_ns"][:, 1].tolist(), strict=True):
            if write_end_ns > end_ns:
                recorder.add("wait", name, end_ns, write_end_ns)
                end_ns = write_end_ns


class _Ranges(NamedTuple):
    """The ranges of a tile, planned for several runs."""

    likeness: Hashable
    planned: TileRanges
    shown: Shown | None


class TilePlans:
    """Plans tiles of one store. What the ranges of a tile have in common in all runs is kept."""

    def __init__(self, store: TensorStore) -> None:
        self._store = store
        self._kept: dict[Any, _Ranges] = {}  # by tile

    def forget(self) -> None:
        """Gives up what is kept, because tiles have been replaced."""
        self._kept.clear()

    def reads(self, tile: T, work: TileWork[T], slot: Slot | None) -> TilePlan[T]:
        """The plan of a tile that is read before its run."""
        planned = TileRanges(self._store.plans, work.early_reads(tile, slot))
        planned.renew()
        reads, writes = planned.transfers.native
        native = NativeTile(
            id(tile), work.unit(tile), 0, reads, planned.checks, (), NO_PIECES, writes
        )
        return TilePlan(
            tile, work.name(tile), native, planned.transfers.reads, planned.expected, keep=planned
        )

    def whole(
        self,
        tile: T,
        work: TileWork[T],
        slot: Slot | None,
        begun: TilePlan[T] | None,
        is_apart: bool = False,
    ) -> TilePlan[T]:
        """The plan of a tile of a run. begun: what was read before. Raises what `work` raises,
        NoSlotError and OSError."""
        found = self._ranges(tile, work, slot, begun is not None, is_apart)
        steps = work.steps(tile, slot)
        planned = found.planned
        shown = found.shown
        planned.renew()
        planned.transfers.set_kept(work.kept(tile))
        flags = (
            CALLED * (steps is None) | BROUGHT * work.is_brought(tile) | BEGUN * (begun is not None)
        )
        kept: TilePlan[T] | None = planned.transfers.plan
        if kept is not None and kept.is_again(flags, steps, planned):
            return kept
        reads, writes = planned.transfers.native
        native = NativeTile(
            key=id(tile) if begun is None else begun.native.key,
            unit=work.unit(tile),
            flags=flags,
            reads=reads,
            checks=planned.checks,
            steps=tuple(step.struct for step in steps or ()),
            sums=planned.sums,
            writes=writes,
            weights=NOTHING if shown is None else shown.memory,
            columns=NO_COLUMNS
            if flags or slot is None
            else columns_of(work.columns(tile), slot.tensor.data_ptr()),
        )
        ops = planned.transfers.reads
        expected = planned.expected
        plan = TilePlan(
            tile,
            work.name(tile),
            native,
            ops if begun is None else [*begun.ops, *ops],
            expected if begun is None else [*begun.expected, *expected],
            planned.transfers.writes,
            planned.written,
            shown,
            steps,
            (planned, begun),
        )
        if found.likeness is not None:
            planned.transfers.keep(plan)
        return plan

    def _ranges(
        self, tile: T, work: TileWork[T], slot: Slot | None, is_begun: bool, is_apart: bool
    ) -> _Ranges:
        """The ranges of a tile: the kept ones if they are like these."""
        likeness = (
            None if is_begun or (like := work.likeness(tile, slot)) is None else (like, is_apart)
        )
        kept = self._kept.get(tile) if likeness is not None else None
        if kept is not None and kept.likeness == likeness and kept.planned.is_current:
            return kept
        early = work.early_reads(tile, slot)
        late = work.late_reads(tile, slot)
        writes = work.writes(tile, slot)
        planned = TileRanges(self._store.plans, [] if is_begun else early, late, writes, is_apart)
        shown = None
        if work.is_shown(tile):
            entry, offset, data = writes[-1]
            shown = Shown(entry, offset, ByteRange(data.data_ptr(), data.numel()))
        found = _Ranges(likeness, planned, shown)
        if likeness is not None:
            self._kept[tile] = found
        return found

    def note(self, plan: TilePlan[T], has_failed: bool) -> None:
        """Tells the store that the writes of a plan have been made, or that they failed."""
        if plan.writes is not None and plan.writes.targets:
            self._store.plans.note(plan.writes, plan.name, has_failed, plan.written)
