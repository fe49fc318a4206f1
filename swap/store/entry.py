"""Entry: one named tensor of a store, its state machine, its extents on NVMe, and the freezes that
hold them."""

from __future__ import annotations

import bisect
import dataclasses
import enum
import errno
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple, TypeVar

import numpy as np
import torch

from tiermem.swap.base.native import READ, Blocks, Op
from tiermem.swap.base.ranges import ALIGNMENT, Numbers, round_up, spread
from tiermem.swap.base.tier import Tier
from tiermem.swap.disk.files import Extent, Files
from tiermem.swap.memory.arena import Slot
from tiermem.swap.store.move import DeviceCopy, Move


class SlotPart(NamedTuple):
    """Bytes [start, stop) of an entry, in one slot."""

    start: int
    stop: int
    slot: int


P = TypeVar("P", "SlotPart", "_EntryPiece")


class NoSlotError(RuntimeError):
    """A write cannot start because freezes hold every slot of its bytes."""


class Slots:
    """For each byte of an entry: the slot (extent) that holds it now, and the slots that freezes
    hold.

        bytes of the entry   0 ......... a ......... b ......... end
        current slot             1           0           1
        held by freezes        0 by 7    0 by 7, 8       -         all of it was frozen by 7, then the middle by 8 alone

        read      uses the current slot of each piece
        write     uses the current slot if no freeze holds it, else the lowest slot that no freeze holds; that becomes current
        apart     a write that uses the lowest slot that is neither held nor current; it becomes current when its caller says so
        freeze    holds the current slot of every byte
        thaw      ends that freeze's holds

    So a write never overwrites frozen bytes, and a write of a part never copies the rest. A run
    without freezes stays in slot 0. A failed write makes its bytes in that slot *lost* until the
    next write of them; lost bytes cannot be frozen. At first all bytes are in slot 0, and no freeze
    holds them.

    native/tiermem.h draws who chooses, writes and reads slots while a run of a step program is under
    way. Rows of its table compare `version` with that of their choice.

    The class computes with numbers only. Bisection finds a piece. The store's lock guards it.

    Args:
        num_bytes: size of the entry, at least 1.
        num_slots: most extents of the entry.
    """

    def __init__(self, num_bytes: int, num_slots: int) -> None:
        self.num_slots = num_slots
        self.version = 0  # another one after each change
        self._pieces = [_EntryPiece(0, num_bytes, 0, frozenset(), frozenset())]
        self._starts = [0]  # of the pieces

    def current(self, start: int, stop: int) -> list[SlotPart]:
        """Returns the slots that a read of bytes [start, stop) uses, in order."""
        first, last = self._touching(start, stop)
        if last == first + 1:
            return [SlotPart(start, stop, self._pieces[first].current)]
        return _joined([SlotPart(*piece[:3]) for piece in self._within(start, stop)])

    def targets(self, start: int, stop: int, is_apart: bool = False) -> list[SlotPart]:
        """Returns the slots that a write of bytes [start, stop) uses, and changes nothing. Raises
        NoSlotError.

        is_apart: the write must not overwrite the current slots either.
        """
        return _joined(
            [
                SlotPart(piece.start, piece.stop, self._target(piece, is_apart))
                for piece in self._within(start, stop)
            ]
        )

    def write(self, part: SlotPart) -> None:
        """Makes a slot of `targets` current, once its write has started. Freezes may have ended
        since `targets`."""
        start, stop, slot = part
        if not self.is_written(part):
            self._change(
                start,
                stop,
                lambda p: _EntryPiece(p.start, p.stop, slot, p.holds, p.lost and p.lost - {slot}),
            )

    def is_written(self, part: SlotPart) -> bool:
        """Whether a slot is current, and no write of the bytes has failed, so that `write` changes
        nothing."""
        first, last = self._touching(part.start, part.stop)
        return all(
            piece.current == part.slot and not piece.lost for piece in self._pieces[first:last]
        )

    def lose(self, part: SlotPart) -> None:
        """Marks the bytes of a failed write as lost in its slot."""
        self._change(
            part.start, part.stop, lambda piece: piece._replace(lost=piece.lost | {part.slot})
        )

    def lost(self, freeze: int) -> list[SlotPart]:
        """Returns the lost bytes among those that a freeze holds."""
        return _joined(
            [
                SlotPart(piece.start, piece.stop, slot)
                for piece in self._pieces
                if piece.lost
                for number, slot in sorted(piece.holds)
                if number == freeze and slot in piece.lost
            ]
        )

    def freeze(self, freeze: int) -> list[SlotPart]:
        """Holds the current slots of all bytes for the freeze of that number, and returns them."""
        self._merge(
            [
                piece._replace(holds=piece.holds | {(freeze, piece.current)})
                for piece in self._pieces
            ]
        )
        return _joined([SlotPart(*piece[:3]) for piece in self._pieces])

    def thaw(self, freeze: int) -> None:
        """Ends the holds of a freeze, if it has any here."""
        self._merge(
            [
                piece._replace(holds=frozenset(hold for hold in piece.holds if hold[0] != freeze))
                for piece in self._pieces
            ]
        )

    def held(self) -> set[int]:
        """Returns the slots in which a freeze holds bytes."""
        return {slot for piece in self._pieces for _, slot in piece.holds}

    def _target(self, piece: _EntryPiece, is_apart: bool) -> int:
        held = {slot for _, slot in piece.holds}
        if piece.current not in held and not is_apart:
            return piece.current
        held.add(piece.current)
        free = next((slot for slot in range(self.num_slots) if slot not in held), None)
        if free is None:
            holders = "freezes and what is current" if is_apart else "freezes"
            raise NoSlotError(
                f"bytes {piece.start} to {piece.stop} cannot be written: {holders} hold all "
                f"{self.num_slots} slots of them. Thaw one first, or open the store with more "
                "slots: num_slots is one more than the freezes held at a time"
            )
        return free

    def _within(self, start: int, stop: int) -> list[_EntryPiece]:
        """Returns the pieces of [start, stop), cut at both ends."""
        first, last = self._touching(start, stop)
        if last == first + 1:
            return [_EntryPiece(start, stop, *self._pieces[first][2:])]
        return [
            p._replace(start=max(p.start, start), stop=min(p.stop, stop))
            for p in self._pieces[first:last]
        ]

    def _touching(self, start: int, stop: int) -> tuple[int, int]:
        if start >= stop:
            return 0, 0
        first = bisect.bisect_right(self._starts, start) - 1
        return first, bisect.bisect_left(self._starts, stop, first)

    def _merge(self, pieces: list[_EntryPiece]) -> None:
        self.version += 1
        self._pieces = _joined(pieces)
        self._starts = [piece.start for piece in self._pieces]

    def _change(self, start: int, stop: int, change: Callable[[_EntryPiece], _EntryPiece]) -> None:
        """Changes the pieces of [start, stop), which are cut at both ends. Equal neighbours stay
        apart until the next freeze or thaw, because the next write is likely to have the same
        ends."""
        first, last = self._touching(start, stop)
        if first == last:
            return
        self.version += 1
        before = self._pieces[first]
        behind = self._pieces[last - 1]
        if (before.start, behind.stop, last - first) == (start, stop, 1):
            self._pieces[first] = change(before)
            return
        changed = [change(piece) for piece in self._within(start, stop)]
        if before.start < start:
            changed.insert(0, before._replace(stop=start))
        if behind.stop > stop:
            changed.append(behind._replace(start=stop))
        self._pieces[first:last], self._starts[first:last] = (
            changed,
            [piece.start for piece in changed],
        )


class _EntryPiece(NamedTuple):
    """Bytes [start, stop) with one current slot, equal holds and equal lost slots."""

    start: int
    stop: int
    current: int  # the slot that is read
    holds: frozenset[tuple[int, int]]  # (freeze, slot)
    lost: frozenset[int]  # slots whose last write failed


def _joined(pieces: list[P]) -> list[P]:
    """Merges neighbours that differ in their ranges only."""
    found = pieces[:1]
    for piece in pieces[1:]:
        if found[-1].stop == piece.start and found[-1][2:] == piece[2:]:
            found[-1] = found[-1]._replace(stop=piece.stop)
        else:
            found.append(piece)
    return found


class FrozenRows(NamedTuple):
    """The places of many byte ranges: flat int64 arrays with one row for each part of a range, in
    order."""

    request: Numbers  # index of the range
    start: Numbers  # byte of the entry
    path_index: Numbers
    file_offset: Numbers
    num_bytes: Numbers


class Stored(NamedTuple):
    """The extent that holds bytes of an entry, from byte `start` on."""

    start: int
    extent: Extent


@dataclasses.dataclass(frozen=True)
class Freeze:
    """The places of all durable entries on NVME at one moment. The store writes nothing there until
    the thaw.

    `TensorStore.freeze` makes it and `thaw` ends it. It also covers entries that were dropped
    since. The `parts` of an entry are in the order of its bytes and cover the entry, rounded up to
    blocks of 4096 bytes.
    """

    number: int
    files: tuple[Path, ...]
    """The segment file of each path; a `path_index` is an index into this tuple."""
    parts: Mapping[str, Sequence[Stored]] = dataclasses.field(repr=False)

    def find(
        self, entries: Sequence[str], entry: Numbers, offset: Numbers, num_bytes: Numbers
    ) -> FrozenRows:
        """Finds bytes [offset[i], offset[i] + num_bytes[i]) of entries[entry[i]], for all i at
        once.

        Raises KeyError for an entry that is not frozen, ValueError for bytes outside an entry.
        """
        parts = [part for name in entries for part in self.parts[name]]
        table = np.array([(start, *extent) for start, extent in parts], np.int64).reshape(-1, 4)
        ends = np.cumsum([len(self.parts[name]) for name in entries], dtype=np.int64)
        sizes = table[ends - 1, 0] + table[ends - 1, 3]
        outside = np.flatnonzero(
            (offset < 0) | (num_bytes < 0) | (offset + num_bytes > sizes[entry])
        )
        if len(outside):
            i = outside[0]
            name = entries[entry[i]]
            size = sizes[entry[i]]
            raise ValueError(
                f"bytes {offset[i]} to {offset[i] + num_bytes[i]} lie outside {name!r} ({size} "
                "bytes)"
            )
        bases = np.cumsum(sizes) - sizes  # one address space: all entries one after the other
        own = np.repeat(bases, np.diff(ends, prepend=0))
        starts, (first, path_index, file_offset, _) = table[:, 0] + own, table.T
        stops = np.append(starts[1:], sizes.sum())
        low = bases[entry] + offset
        high = bases[entry] + offset + num_bytes
        at = np.searchsorted(starts, low, "right") - 1
        counts = np.where(num_bytes > 0, np.searchsorted(starts, high, "left") - at, 0)
        request, part = spread(at, counts)
        begin = np.maximum(low[request], starts[part])
        end = np.minimum(high[request], stops[part])
        within = begin - starts[part]
        return FrozenRows(
            request, first[part] + within, path_index[part], file_offset[part] + within, end - begin
        )

    def ranges(self, entry: str, offset: int, num_bytes: int) -> list[Extent]:
        """Returns the extents of bytes [offset, offset + num_bytes) of an entry, in order; the
        range needs no alignment.

        Raises KeyError for an entry that is not frozen, ValueError for bytes outside the entry.
        """
        found = self.find([entry], *np.array([[0], [offset], [num_bytes]], np.int64))
        columns = zip(
            found.path_index.tolist(),
            found.file_offset.tolist(),
            found.num_bytes.tolist(),
            strict=True,
        )
        return [Extent(*each) for each in columns]


class NvmeHome:
    """The extents of one entry on NVME, one for each slot that a write has used so far. Each has
    the entry's size.

        entry     [ 0 .................. a .......... end )
        slot 0    [ frozen               |  live          )     path 0, 1 MiB on       allocated with the entry
        slot 1    [ live                 |                )     path 0, 64 MiB on      allocated by the first write to it

    The other slots' extents lie on the path of slot 0 if that path has space. An extent is freed
    when the entry is dropped and no freeze holds it. The store's lock guards it. Raises OSError
    when there is no space for slot 0.

    Args:
        files: allocates the extents.
        num_bytes: size of the entry.
        num_slots: most extents.
        is_durable: whether freezes of the store include it.
    """

    def __init__(self, files: Files, num_bytes: int, num_slots: int, is_durable: bool) -> None:
        first = files.allocate(num_bytes)
        self.num_bytes = first.num_bytes
        self.is_durable = is_durable
        self.slots = Slots(first.num_bytes, num_slots)
        self.extents: list[Extent | None] = [first, *[None] * (num_slots - 1)]
        self.is_dropped = False
        self._files = files

    def targets(self, start: int, stop: int, is_apart: bool = False) -> list[SlotPart]:
        """Returns the slots that a write of bytes [start, stop) uses, as `Slots`, and allocates
        their missing extents.

        Raises NoSlotError; OSError when there is no space, or a file was truncated.
        """
        targets = self.slots.targets(start, stop, is_apart)
        for slot in {part.slot for part in targets}:
            extent = self.extents[slot]
            if extent is None:
                self.extents[slot] = extent = self._files.allocate(
                    self.num_bytes, near=self._extent(0).path_index
                )
            self._files.segment_of(extent).check_whole()
        return targets

    def ops(self, kind: int, parts: Iterable[SlotPart], address: int) -> list[Op]:
        """Returns one transfer for each part. `address` is the address that byte 0 of the entry
        would have in memory."""
        ops = []
        for start, stop, slot in parts:
            extent = self._extent(slot)
            ops.append(
                Op(
                    kind,
                    self._files.segment_of(extent).fd,
                    address + start,
                    stop - start,
                    extent.offset + start,
                )
            )
        return ops

    def blocks(self, offsets: Numbers, block_bytes: int, address: int) -> list[Blocks]:
        """Returns reads of equal blocks into consecutive memory; cuts the blocks that cross from
        one slot to the next."""
        ops = self.ops(
            READ, self.slots.current(int(offsets.min()), int(offsets.max()) + block_bytes), 0
        )
        starts = np.array([op.address for op in ops], np.int64)
        addresses = address + np.arange(len(offsets), dtype=np.int64) * block_bytes
        found = np.searchsorted(starts, offsets, "right") - 1
        if len(ops) > 1 and bool(
            (np.searchsorted(starts, offsets + block_bytes - 1, "right") - 1 != found).any()
        ):
            offsets, addresses, block_bytes = _cut(starts, offsets, addresses, block_bytes)
            found = np.searchsorted(starts, offsets, "right") - 1
        in_file = offsets + np.array([op.offset - op.address for op in ops], np.int64)[found]
        fds = [op.fd for op in ops]
        if len(set(fds)) == 1:
            return [Blocks(READ, fds[0], addresses, in_file, block_bytes)]
        each_fd = np.array(fds)[found]
        return [
            Blocks(READ, fd, addresses[each_fd == fd], in_file[each_fd == fd], block_bytes)
            for fd in sorted(set(each_fd.tolist()))
        ]

    def freeze(self, number: int) -> list[Stored]:
        """Holds the current slots for a freeze and returns their extents."""
        found = []
        for start, stop, slot in self.slots.freeze(number):
            extent = self._extent(slot)
            found.append(
                Stored(start, extent._replace(offset=extent.offset + start, num_bytes=stop - start))
            )
        return found

    def thaw(self, number: int) -> None:
        """Ends a freeze's holds; frees the extents of a dropped entry."""
        self.slots.thaw(number)
        if self.is_dropped:
            self.drop()

    def drop(self) -> None:
        """Frees the extents; those that a freeze holds are freed at the thaw."""
        self.is_dropped = True
        held = self.slots.held()
        for slot, extent in enumerate(self.extents):
            if extent is not None and slot not in held:
                self._files.free(extent)
                self.extents[slot] = None

    def _extent(self, slot: int) -> Extent:
        extent = self.extents[slot]
        assert extent is not None  # a current slot has been allocated by `targets`
        return extent


def _cut(
    starts: Numbers, offsets: Numbers, addresses: Numbers, block_bytes: int
) -> tuple[Numbers, Numbers, int]:
    """Cuts blocks into smaller blocks of one length, so that none crosses a start."""
    length = block_bytes
    for start in starts.tolist():
        inside = offsets[(offsets < start) & (offsets + block_bytes > start)]
        length = math.gcd(length, *(start - inside).tolist())
    parts = np.arange(0, block_bytes, length, dtype=np.int64)
    return (offsets[:, None] + parts).reshape(-1), (addresses[:, None] + parts).reshape(-1), length


class EntryState(enum.Enum):
    """The memory that an entry occupies."""

    HOME = enum.auto()
    """No memory: the bytes are at home."""
    COMING = enum.auto()
    """A slot of HOST memory that is being filled. The bytes are at home, or in a write-back that
    the fetch follows."""
    PRESENT = enum.auto()
    """A slot of HOST memory. Home has the same bytes, unless the caller changed them."""
    LEAVING = enum.auto()
    """A slot of HOST memory that is being written back."""
    LOST = enum.auto()
    """No memory: the write-back failed, and home does not have the bytes."""


class Entry:
    """One named tensor of a store: its dtype and shape, its home, and its state machine.

        HOME --come--> COMING --arrive--> PRESENT --rest---------------> HOME
                         |                PRESENT --leave--> LEAVING --end_leaving--> HOME or LOST
                         +--turn_back--> where it came from: HOME, LEAVING or LOST
        LEAVING --come--> COMING      the fetch follows the write and sees the new bytes
        LOST    --come--> COMING      the fetch fails with the write's error

    An entry whose home is HOST or DEVICE is always PRESENT. Each arrow has one method; any other
    arrow raises a RuntimeError that names both states. The caller holds the store's lock.

    Args:
        nvme: the extents of an entry whose home is NVME.
    """

    def __init__(
        self,
        name: str,
        home: Tier,
        dtype: torch.dtype,
        shape: Sequence[int],
        nvme: NvmeHome | None,
    ) -> None:
        self.name = name
        self.home = home
        self.dtype = dtype
        self.shape = tuple(shape)
        self.num_bytes = dtype.itemsize * math.prod(self.shape)
        self.padded_bytes = round_up(max(self.num_bytes, 1), ALIGNMENT)
        self.state = EntryState.HOME
        self.nvme = nvme
        # while COMING or PRESENT; the home itself when home is HOST or DEVICE
        self.slot: Slot | None = None
        self.owns_slot = True  # False: the caller lent the slot
        self.coming: Move | None = None  # the fetch in flight
        # of a tensor whose home is not DEVICE, until it is released
        self.device_copy: DeviceCopy | None = None
        self.leaving: Move | None = None  # the write-back in flight, or the failed one

    def check_range(self, offset: int, buffer: torch.Tensor) -> NvmeHome:
        """Returns its home on NVME. Raises ValueError for a range outside the entry or one that
        O_DIRECT would refuse."""
        home = self.nvme_home()
        length = buffer.numel()
        address = buffer.data_ptr()
        if offset < 0 or offset + length > home.num_bytes:
            raise ValueError(
                f"bytes {offset} to {offset + length} lie outside {self.name!r} ({home.num_bytes} "
                "bytes)"
            )
        self._check_bytes(buffer)
        if offset % ALIGNMENT or length % ALIGNMENT or address % ALIGNMENT:
            raise ValueError(
                f"{self.name!r}: offset {offset}, length {length} and address {address:#x} must be "
                f"multiples of {ALIGNMENT}; odd ranges pass through a Bounce"
            )
        return home

    def check_blocks(self, offsets: Numbers, block_bytes: int, into: torch.Tensor) -> NvmeHome:
        """As `check_range`, for equal blocks that are read into consecutive memory. numpy checks
        all blocks at once."""
        home = self.nvme_home()
        address = into.data_ptr()
        num_bytes = len(offsets) * block_bytes
        if offsets.dtype != np.int64 or offsets.ndim != 1:
            raise ValueError(
                f"{self.name!r}: offsets are a flat int64 array, not {offsets.ndim}-d "
                f"{offsets.dtype}"
            )
        if block_bytes <= 0 or block_bytes % ALIGNMENT or address % ALIGNMENT:
            raise ValueError(
                f"{self.name!r}: blocks of {block_bytes} bytes at address {address:#x}; both must "
                f"be multiples of {ALIGNMENT}"
            )
        self._check_bytes(into)
        if into.numel() != num_bytes:
            raise ValueError(
                f"{self.name!r}: {len(offsets)} blocks of {block_bytes} bytes need a buffer of "
                f"{num_bytes}, not {into.numel()}"
            )
        first, last = (int(offsets.min()), int(offsets.max())) if num_bytes else (0, -block_bytes)
        if first < 0 or last + block_bytes > home.num_bytes:
            raise ValueError(
                f"blocks at {first} to {last + block_bytes} lie outside {self.name!r} "
                f"({home.num_bytes} bytes)"
            )
        if int(np.bitwise_or.reduce(offsets)) % ALIGNMENT:
            odd = int(offsets[offsets % ALIGNMENT != 0][0])
            raise ValueError(f"{self.name!r}: offset {odd} is no multiple of {ALIGNMENT}")
        return home

    def nvme_home(self) -> NvmeHome:
        """Returns its home on NVME. Raises RuntimeError when its home is another tier."""
        if self.nvme is None:
            raise RuntimeError(
                f"{self.name!r} rests on {self.home.name}: there is no file to read or write"
            )
        return self.nvme

    def tensor(self, slot: Slot) -> torch.Tensor:
        """Returns a slot's bytes with the entry's dtype and shape."""
        return slot.tensor[: self.num_bytes].view(self.dtype).view(self.shape)

    def occupy(self, slot: Slot) -> None:
        """HOME -> PRESENT: the caller writes its first bytes into the slot."""
        self.expect("put", EntryState.HOME)
        self.slot = slot
        self.owns_slot = True
        self.state = EntryState.PRESENT

    def exchange(self, slot: Slot) -> Slot:
        """PRESENT -> PRESENT: another slot becomes the home of an entry on HOST. Returns the one
        before."""
        if self.home is not Tier.HOST or self.slot is None or slot.num_bytes != self.slot.num_bytes:
            raise ValueError(
                f"{self.name!r} of {self.num_bytes} bytes on {self.home.name} cannot rest in "
                f"{slot.num_bytes} bytes of HOST"
            )
        self.slot, before = slot, self.slot
        return before

    def come(self, move: Move, slot: Slot, owns_slot: bool) -> None:
        """HOME, LEAVING or LOST -> COMING."""
        self.expect("fetched", EntryState.HOME, EntryState.LEAVING, EntryState.LOST)
        self.coming = move
        self.slot = slot
        self.owns_slot = owns_slot
        self.state = EntryState.COMING

    def arrive(self) -> None:
        """COMING -> PRESENT."""
        self.expect("present", EntryState.COMING)
        self.coming = None
        self.state = EntryState.PRESENT

    def turn_back(self) -> None:
        """COMING -> HOME, LEAVING or LOST: the fetch failed or was cancelled."""
        self.expect("given up", EntryState.COMING)
        self.coming = None
        self.slot = None
        self.state = EntryState.HOME
        if self.leaving is not None:
            self.state = EntryState.LOST if self.leaving.has_failed else EntryState.LEAVING

    def rest(self) -> None:
        """PRESENT -> HOME, without a write."""
        self.expect("released", EntryState.PRESENT)
        self.slot = None
        self.state = EntryState.HOME

    def leave(self, move: Move) -> None:
        """PRESENT -> LEAVING; the move owns the slot until it ends."""
        self.expect("released", EntryState.PRESENT)
        self.slot = None
        self.leaving = move
        self.state = EntryState.LEAVING

    def end_leaving(self, arrived: bool) -> None:
        """LEAVING -> HOME or LOST. An entry that is fetched again already stays COMING."""
        self.expect("home", EntryState.LEAVING, EntryState.COMING)
        if arrived:
            self.leaving = None
        if self.state is EntryState.LEAVING:
            self.state = EntryState.HOME if arrived else EntryState.LOST

    def expect(self, wish: str, *allowed: EntryState) -> None:
        """Raises RuntimeError, naming both states, unless the entry is in an allowed state."""
        if self.state not in allowed:
            names = " or ".join(state.name for state in allowed)
            raise RuntimeError(
                f"{self.name!r} is {self.state.name}; only what is {names} can be {wish}"
            )

    def check_written(self, freeze: int) -> None:
        """Raises OSError when the last write of bytes that a freeze holds failed."""
        if self.leaving is not None and self.leaving.has_failed:
            self.leaving.wait()
        for start, stop, _ in self.nvme.slots.lost(freeze) if self.nvme is not None else ():
            raise OSError(
                errno.EIO,
                f"bytes {start} to {stop} of {self.name!r} are lost: the last write of them "
                "failed. Write them again, or drop the entry, before it is frozen",
            )

    def give_up(self) -> Slot | None:
        """Drops the entry: frees its extents, and returns the slot of memory that the store must
        free, if any."""
        slot = self.slot
        self.slot = None
        if self.nvme is not None:
            self.nvme.drop()
        return slot if self.owns_slot else None

    def to_device(self, move: Move, device: torch.device) -> Move:
        """The copy on a device of a tensor that `move` brings to HOST memory; the move itself when
        its home is DEVICE."""
        if self.home is Tier.DEVICE:
            return move
        self.device_copy = self.device_copy or DeviceCopy(move, device)
        return self.device_copy

    def end_device_copy(self, is_dirty: bool) -> None:
        """Before a release: ends the copy on the device, if there is one, and brings its changes to
        HOST memory. Blocks."""
        copy = self.device_copy
        self.device_copy = None
        if copy is not None:
            copy.end(is_dirty)

    def _check_bytes(self, buffer: torch.Tensor) -> None:
        if buffer.dtype != torch.uint8 or not buffer.is_contiguous():
            raise ValueError(
                f"{self.name!r}: a buffer is a contiguous uint8 tensor, not {buffer.dtype}"
            )
