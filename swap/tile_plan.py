"""TilePlan: a tile as a step program gets it: its transfers, its checksums, its native steps, and the slots that it writes to.

The caller of a program describes its tiles (TileWork). A plan is made when the tile is given to the program. A plan *apart*
writes beside the bytes that it replaces: they stay readable, with their checksums, until `note`. Without `note` the plan has
changed nothing that a read finds.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Hashable, Sequence
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

from tiermem.swap.arena import Slot
from tiermem.swap.checksum import Expected, Range, Written
from tiermem.swap.entry import WritePlan
from tiermem.swap.native import Op, TransferError, ffi, step_struct
from tiermem.swap.parts import Dither, StepParts, StepRule
from tiermem.swap.queue import Recorder
from tiermem.swap.ranges import ByteRange
from tiermem.swap.store import TensorStore
from tiermem.swap.tile_program import (
    BEGUN,
    BROUGHT,
    CALLED,
    CHECK_STAGE,
    NO_PIECES,
    STEP_STAGE,
    Failure,
    NativeTile,
    TileTimes,
    Transfer,
    bytes_of_rows,
    join_rows,
)

T = TypeVar("T")
T_contra = TypeVar("T_contra", contravariant=True)


class KernelStep(NamedTuple):
    """The arguments of one native step; see `swap.native.optimizer_step`."""

    rule: StepRule
    parts: StepParts
    dither: Dither | None
    start_moments: bool


class NativeStep(NamedTuple):
    """A native step, and what it points at."""

    struct: Any  # tm_step *
    parts: StepParts


class NativeSteps:
    """Makes the native steps of one pass. Those of equal rules and the same tensors differ in their dither alone."""

    def __init__(self) -> None:
        self._made: dict[Hashable, NativeStep] = {}

    def of(self, step: KernelStep) -> NativeStep:
        """The native step of these arguments. Raises ValueError for parts that do not fit together."""
        rule, parts, dither, start_moments = step
        tensors = parts.weight, parts.master, parts.grad, *parts.moments
        likeness = rule, start_moments, dither is None, *map(id, tensors)
        if (like := self._made.get(likeness)) is None:
            return self._made.setdefault(likeness, NativeStep(step_struct(*step), parts))
        struct = ffi.new("tm_step *", like.struct[0])
        if dither is not None:
            struct.key, struct.step, struct.first_element = dither
        return NativeStep(struct, parts)


class TileWork(Protocol[T_contra]):
    """What the caller says of a tile. `slot` is the buffer that it gets, or the first one, which stands for it; None: none.

    A subclass says `name`, `early_reads`, `writes` and `compute`; the rest is by default that of a tile which `compute` steps.
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
        """The address of memory that has the bytes of `late_reads`, one behind the other, until `Program.forget`; 0: none."""
        return 0

    def writes(self, tile: T_contra, slot: Slot | None) -> Sequence[Range]:
        """What is written back."""

    def is_shown(self, tile: T_contra) -> bool:
        """Whether `Program.read` finds the last of `writes` while the run is under way."""
        return False

    def steps(self, tile: T_contra, slot: Slot | None) -> Sequence[NativeStep] | None:
        """The native steps that are its work; None: `compute` does it."""
        return None

    def is_brought(self, tile: T_contra) -> bool:
        """Whether its buffer gets more than its reads: from `bring`, before its native steps, or from `compute`."""
        return False

    def bring(self, tile: T_contra, slot: Slot) -> None:
        """Copies what does not come from disk to its buffer; blocks. In a thread of the program."""
        return

    def compute(self, tile: T_contra, slot: Slot | None) -> Callable[[], object] | None:
        """Changes the buffer, or memory, in place; blocks. Returns the rest of the work, which a thread of the program does
        before the buffer is written, such as waiting for an accelerator; None: nothing. A tile without buffer has no rest."""


@dataclasses.dataclass(frozen=True)
class TilePlan(Generic[T]):
    """A tile of a run, or of a begin, as it was given to the native program."""

    tile: T
    native: NativeTile
    ops: Sequence[Op]  # reads, those of the begin included
    expected: Expected
    writes: WritePlan | None = None
    written: Sequence[Written] = ()  # checksums of writes apart
    shown: Range | None = None
    keep: object = None  # what native memory points at

    @property
    def is_native(self) -> bool:
        """Whether no function of the caller does its work."""
        return not self.native.flags & CALLED

    @property
    def is_brought(self) -> bool:
        """Whether a function of the caller completes its buffer before its native steps."""
        return bool(self.native.flags & BROUGHT)

    def tell(self, recorder: Recorder, times: TileTimes, name: str, lane: str, is_awaited: bool) -> None:
        """Tells a recorder what became of the tile. lane: of its native work; is_awaited: the caller did nothing but wait."""
        add, native = recorder.add, self.native
        rest = 0 if times.begun_ns[1] else times.read_bytes
        for span, num_read in (times.begun_ns, times.read_bytes), (times.read_ns, rest):
            if span[1]:
                add("read", name, *span, num_read)
        if times.waited_ns[1] and is_awaited:
            add("wait", name, *times.waited_ns)
        if times.check_ns[1]:
            pieces = sum(len(part.crcs) for part in self.expected)
            add("check", f"{pieces} pieces", *times.check_ns, sum(int(part.num_bytes.sum()) for part in self.expected))
        if times.step_ns[1] and lane and self.is_native:
            add(lane, name, *times.step_ns, times.written_bytes)
        if times.sum_ns[1]:
            add("check", f"{len(native.sums)} pieces", *times.sum_ns, bytes_of_rows(native.sums))
        if times.write_ns[1]:
            add("write", name, *times.write_ns, times.written_bytes)

    def error_of(self, failure: Failure, name: str, causes: Sequence[Exception], store: TensorStore) -> OSError:
        """The error of a run that failed at this tile. causes: of work that is not native."""
        files = store.queues.files
        if failure.stage == CHECK_STAGE and failure.num_wrong:
            piece = failure.piece, failure.seen, failure.num_wrong
            return store.sums.damage(self.expected, *piece, self.ops, files)
        if failure.stage in (CHECK_STAGE, STEP_STAGE):
            error = OSError(failure.error, f"stepping {name!r}: {os.strerror(failure.error)}")
            error.__cause__ = next(iter(causes), None)
            return error
        path = files.get(failure.fd, f"descriptor {failure.fd}")
        return TransferError(failure.error, failure.kind, path, failure.offset, failure.length)


class TilePlans:
    """Plans tiles of one store."""

    def __init__(self, store: TensorStore) -> None:
        self._store = store

    def reads(self, tile: T, ranges: Sequence[Range], unit: int) -> TilePlan[T]:
        """The plan of a tile that is read before its run."""
        ops, expected = self._store.plans.reads(ranges)
        checks = join_rows([each.rows() for each in expected])
        native = NativeTile(id(tile), unit, 0, self._transfers(ops), checks, (), NO_PIECES, ())
        return TilePlan(tile, native, ops, expected)

    def whole(
        self, tile: T, work: TileWork[T], slot: Slot | None, begun: TilePlan[T] | None, is_apart: bool = False
    ) -> TilePlan[T]:
        """The plan of a tile of a run. begun: what was read before. Raises what `work` raises, NoSlotError and OSError."""
        early, late = work.early_reads(tile, slot), work.late_reads(tile, slot)
        writes, steps = work.writes(tile, slot), work.steps(tile, slot)
        shown = writes[-1] if work.is_shown(tile) else None
        read = self.reads(tile, late if begun is not None else [*early, *late], work.unit(tile))
        kept = self._kept(read.native.reads, late, work.kept(tile))
        plan = self._store.plans.writes(writes, is_apart) if writes else None
        sums, written = self._store.sums.rows_of(writes, is_apart)
        native = read.native._replace(
            reads=kept,
            flags=CALLED * (steps is None) | BROUGHT * work.is_brought(tile) | BEGUN * (begun is not None),
            key=read.native.key if begun is None else begun.native.key,
            steps=[step.struct for step in steps or ()],
            sums=sums,
            writes=[] if plan is None else self._transfers(plan.ops),
            weights=ByteRange(0, 0) if shown is None else ByteRange(shown[2].data_ptr(), shown[2].numel()),
        )
        keep = steps, written, begun
        ops, expected = ([], []) if begun is None else (begun.ops, begun.expected)
        apart = written if is_apart else ()
        return TilePlan(tile, native, [*ops, *read.ops], [*expected, *read.expected], plan, apart, shown, keep)

    def _kept(self, reads: Sequence[Transfer], late: Sequence[Range], address: int) -> Sequence[Transfer]:
        """The same transfers; those of late ranges say where memory has their bytes, if it has."""
        for _, _, data in late if address else ():
            begin, end = data.data_ptr(), data.data_ptr() + data.numel()
            here = address - begin
            reads = [r._replace(kept=r.address + here) if begin <= r.address < end else r for r in reads]
            address += data.numel()
        return reads

    def note(self, plan: TilePlan[T], name: str, has_failed: bool) -> None:
        """Tells the store that the writes of a plan have been made, or that they failed."""
        if plan.writes is not None:
            self._store.plans.note(plan.writes, name, has_failed, plan.written)

    def _transfers(self, ops: Sequence[Op]) -> list[Transfer]:
        queues = self._store.queues if ops else None
        return [
            Transfer(queues.handle_of(op.fd), op.address, op.length, op.offset, op.fd)
            for op in ops
            if queues is not None
        ]
