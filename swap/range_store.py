"""RangeStore: entries at their homes, byte ranges of them, and the store as a whole."""

from __future__ import annotations

import math
import os
import threading
import weakref
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from tiermem.swap import durable
from tiermem.swap.accelerator import is_accelerator
from tiermem.swap.arena import Slot
from tiermem.swap.direct import ALIGNMENT
from tiermem.swap.entry import Entry, Freeze, NvmeHome, Place, changing
from tiermem.swap.move import Move
from tiermem.swap.native import BACKGROUND, NORMAL, READ, WRITE, Fault, Op, check_process
from tiermem.swap.paths import AnyPath
from tiermem.swap.queue import Blocks, IoSettings, Queues, Recorder, StoreStats, Transfers
from tiermem.swap.resources import Freezes, Held, HostMemory, UnderWay
from tiermem.swap.run_folder import RunName
from tiermem.swap.sums import Check, Range, Sums
from tiermem.swap.tier import Tier

# ---- Ranges: parts of an entry on NVME as transfers, checked before the disk is asked --------------------------------
#
# An offset, a length or an address that O_DIRECT would refuse is refused here, in the words of whoever gave it. A range
# whose bytes lie in several slots becomes several transfers; blocks are looked up all at once, and cut only where slots
# meet.

Int64s = npt.NDArray[np.int64]


def check_range(entry: Entry, offset: int, buffer: torch.Tensor) -> None:
    """Raises ValueError for a range outside the entry or odd to the disk."""
    home, length, address = home_of(entry), buffer.numel(), buffer.data_ptr()
    if offset < 0 or offset + length > home.num_bytes:
        raise ValueError(f"bytes {offset} to {offset + length} lie outside {entry.name!r} ({home.num_bytes} bytes)")
    _check_bytes(entry, buffer)
    if offset % ALIGNMENT or length % ALIGNMENT or address % ALIGNMENT:
        raise ValueError(
            f"{entry.name!r}: offset {offset}, length {length} and address {address:#x} must be multiples of "
            f"{ALIGNMENT}; odd ranges pass through a Bounce"
        )


def transfers_of(kind: int, places: Iterable[Place], offset: int, buffer: torch.Tensor) -> list[Op]:
    """One transfer for each place, between the files and a buffer that begins at the entry's byte `offset`."""
    base = buffer.data_ptr() - offset
    return [Op(kind, place.fd, base + place.start, place.num_bytes, place.file_offset) for place in places]


def blocks_of(entry: Entry, offsets: Int64s, block_bytes: int, into: torch.Tensor) -> list[Blocks]:
    """Reads of equal blocks of an entry, one behind the other into a buffer; none when there are none.

    Raises ValueError as `check_range`; nothing is looked at block by block.
    """
    home, address = home_of(entry), into.data_ptr()
    if offsets.dtype != np.int64 or offsets.ndim != 1:
        raise ValueError(f"{entry.name!r}: offsets are a flat int64 array, not {offsets.ndim}-d {offsets.dtype}")
    if block_bytes <= 0 or block_bytes % ALIGNMENT or address % ALIGNMENT:
        raise ValueError(
            f"{entry.name!r}: blocks of {block_bytes} bytes at address {address:#x}; both must be multiples of {ALIGNMENT}"
        )
    _check_bytes(entry, into)
    if into.numel() != len(offsets) * block_bytes:
        raise ValueError(
            f"{entry.name!r}: {len(offsets)} blocks of {block_bytes} bytes need a buffer of {len(offsets) * block_bytes}, "
            f"not {into.numel()}"
        )
    if not len(offsets):
        return []
    first, last = int(offsets.min()), int(offsets.max())
    if first < 0 or last + block_bytes > home.num_bytes:
        raise ValueError(
            f"blocks at {first} to {last + block_bytes} lie outside {entry.name!r} ({home.num_bytes} bytes)"
        )
    if int(np.bitwise_or.reduce(offsets)) % ALIGNMENT:
        odd = int(offsets[offsets % ALIGNMENT != 0][0])
        raise ValueError(f"{entry.name!r}: offset {odd} is no multiple of {ALIGNMENT}")
    return _in_files(home.reads(first, last + block_bytes), offsets, block_bytes, address)


def home_of(entry: Entry) -> NvmeHome:
    """Where an entry rests on NVME. Raises RuntimeError when it rests elsewhere."""
    if entry.nvme is None:
        raise RuntimeError(f"{entry.name!r} rests on {entry.home.name}: there is no file to read or write")
    return entry.nvme


def _in_files(places: list[Place], offsets: Int64s, block_bytes: int, address: int) -> list[Blocks]:
    """The reads of each file, of blocks that do not cross from one place to the next."""
    starts = np.array([place.start for place in places], np.int64)
    addresses = address + np.arange(len(offsets), dtype=np.int64) * block_bytes
    found = np.searchsorted(starts, offsets, "right") - 1
    if len(places) > 1 and bool((np.searchsorted(starts, offsets + block_bytes - 1, "right") - 1 != found).any()):
        offsets, addresses, block_bytes = _cut(starts, offsets, addresses, block_bytes)
        found = np.searchsorted(starts, offsets, "right") - 1
    shifts = np.array([place.file_offset - place.start for place in places], np.int64)
    fds = np.array([place.fd for place in places])
    in_file = offsets + shifts[found]
    if len(set(fds.tolist())) == 1:
        return [Blocks(READ, int(fds[0]), addresses, in_file, block_bytes)]
    return [
        Blocks(READ, fd, addresses[chosen], in_file[chosen], block_bytes)
        for fd in sorted(set(fds.tolist()))
        if (chosen := fds[found] == fd).any()
    ]


def _cut(starts: Int64s, offsets: Int64s, addresses: Int64s, block_bytes: int) -> tuple[Int64s, Int64s, int]:
    """The same blocks in smaller ones of one length, none of which crosses a start."""
    length = block_bytes
    for start in starts.tolist():
        inside = offsets[(offsets < start) & (offsets + block_bytes > start)]
        length = math.gcd(length, *(start - inside).tolist())
    parts = np.arange(0, block_bytes, length, dtype=np.int64)
    return (offsets[:, None] + parts).reshape(-1), (addresses[:, None] + parts).reshape(-1), length


def _check_bytes(entry: Entry, buffer: torch.Tensor) -> None:
    if buffer.dtype != torch.uint8 or not buffer.is_contiguous():
        raise ValueError(f"{entry.name!r}: a buffer is a contiguous uint8 tensor, not {buffer.dtype}")


# ---- RangeStore: entries at their homes, byte ranges of them, and the store as a whole. Tensors that come and go: ----
# store.py
#
#     reserve     room at a home            drop       gives it back
#   read, write byte ranges of what rests on NVME, between the files and buffers of the caller's; read_blocks: many small ones
#     freeze      what rests on NVME now is on the disk, and stays there as it is until it is thawed
#     settle      waits for writes          close      ends everything
#
# A freeze costs a sync: no byte is copied. Until the thaw, what it holds is not written; writes go to other slots
# (entry.py), for which there is room when the store was opened with `num_slots`. Files are removed when the store is
# closed, unless `keep_files` was called: a run that saved leaves its store, any other leaves nothing.
#
# On several paths entries are dealt by weight (passes.py), each path has a queue of its own (queue.py), and one
# that is slow, full or failing leaves the others as they are. After any transfer error the store goes on: what could
# not be written is LOST and says so when it is fetched or frozen, everything else is as it was.
#
# Two kinds of lock: a move's, held while a thread waits for it, and the store's, held for moments and taken last. The
# store never waits for a move while it holds its own.

Writing = tuple[Entry, int, torch.Tensor]
"""A range of an entry, from a byte offset on, and the uint8 buffer that goes there."""


class RangeStore:
    """Bytes at rest on HOST and NVME; the arguments are told in TensorStore."""

    def __init__(
        self,
        paths: AnyPath | Sequence[AnyPath] = (),
        host_bytes: int = 1 << 30,
        io: IoSettings | None = None,
        disk_bytes: int | None = None,
        device: torch.device | None = None,
        link_bytes: int = 0,
        faults: Sequence[Fault] = (),
        num_slots: int = 1,
        run: RunName | None = None,
    ) -> None:
        if num_slots < 1:
            raise ValueError(f"num_slots is {num_slots}; an entry has one slot or more")
        self.num_slots = num_slots
        self.run = run or RunName.new()
        self.recorder = Recorder()
        self.sums = Sums(self.recorder)
        self._entries: dict[str, Entry] = {}
        self._under_way = UnderWay()  # and writes that failed, until settle() or close() raises why
        self._freezes = Freezes()
        self._lock = threading.RLock()  # guards the entries and everything above
        self._owner = os.getpid()
        self.device = device or torch.device("cpu")
        self._held = Held.take(paths, host_bytes, disk_bytes, self.run, io or IoSettings(), link_bytes, faults)
        self.arena, self._files = self._held.arena, self._held.files
        self._memory = HostMemory(self.arena, self._under_way, self._lock)
        self._finalizer = weakref.finalize(self, _close_forgotten, os.getpid(), self._held)

    def __contains__(self, name: str) -> bool:
        return name in self._entries

    # ---- homes -----------------------------------------------------------------------------------------------------

    def reserve(
        self,
        name: str,
        shape: Sequence[int],
        dtype: torch.dtype,
        home: Tier,
        is_durable: bool = True,
        crosses_link: bool = False,
    ) -> None:
        """Makes room for a tensor at its home, content undefined. Raises BudgetError, OSError (ENOSPC) or, for DEVICE, torch's
        OutOfMemoryError.

        is_durable: whether it is frozen with the others when it rests on NVME; what is not has one slot.
        crosses_link: whether what rests on HOST is copied to the accelerator and back.
        """
        self._check_usable()
        entry = Entry(name, home, dtype, shape)
        with self._lock:
            if name in self._entries:
                raise ValueError(f"{name!r} is in the store already")
            if home is Tier.NVME:
                num_slots = self.num_slots if is_durable else 1
                entry.nvme = NvmeHome(self._files, entry.num_bytes, num_slots, is_durable)
            self._entries[name] = entry
        if home is not Tier.NVME:
            try:
                entry.occupy(self._memory_of(entry, crosses_link))
            except BaseException:
                self.drop(name)
                raise

    def _memory_of(self, entry: Entry, crosses_link: bool) -> Slot:
        """The home of an entry that rests in memory."""
        if entry.home is Tier.DEVICE:
            return Slot(-1, torch.empty(entry.padded_bytes, dtype=torch.uint8, device=self.device))
        return self._memory.take(entry.num_bytes, f"{entry.name!r}, resting on HOST,", crosses_link)

    def reserve_disk(self, num_bytes: int, why: str = "") -> None:
        """Preallocates NVME space for what will be reserved, all slots of it, dealt over the paths by weight within their caps.

        Raises OSError (ENOSPC) with the arithmetic of what is too small and `why` so much is asked for; then nothing of it
        is taken.
        """
        self._check_usable()
        with self._lock:
            try:
                self._files.reserve(num_bytes)
            except OSError as error:
                if not why:
                    raise
                raise OSError(error.errno, f"{error.strerror}. {why}", error.filename) from None

    def home_of(self, name: str) -> Tier:
        """The tier a tensor returns to."""
        return self._entries[name].home

    def drop(self, name: str) -> None:
        """Forgets a tensor and frees its home. Its own transfers are cancelled, ranges under way are waited for.

        What a freeze holds of it stays until the thaw.
        """
        self._check_usable()
        with self._lock:
            entry = self._entries.pop(name)
            self.sums.forget(name)
            touching = self._under_way.touching(entry)
        for move in touching:
            if move in (entry.coming, entry.leaving):
                move.cancel()
            else:
                _error_of(move)  # raised by its own wait, and by settle
        with self._lock:
            slot, entry.slot = entry.slot, None
            if slot is not None and entry.owns_slot and entry.home is not Tier.DEVICE:
                self.arena.give_back(slot)
            if entry.nvme is not None:
                entry.nvme.drop()

    # ---- byte ranges, for callers with buffers of their own ---------------------------------------------------------

    def read(self, ranges: Sequence[Range], name: str, priority: int = NORMAL, is_checked: bool = True) -> Move:
        """Starts filling buffers from entries that rest on NVME: (entry, byte offset, uint8 buffer) each, one Move.

        Offsets, lengths and addresses are multiples of 4096. The buffers belong to the Move until it has ended.
        is_checked: whether pieces that have a checksum are compared with it; else the bytes are what they are.
        """
        self._check_usable()
        with self._lock:
            entries = tuple(self._entries[entry_name] for entry_name, _, _ in ranges)
            ops: list[Op] = []
            for entry, (_, offset, buffer) in zip(entries, ranges, strict=True):
                ops += self._read_ops(entry, offset, buffer)
            check = self.sums.check_of(ranges, ops, self._files.by_descriptor) if is_checked else None
            return self._start(ops, [buffer for _, _, buffer in ranges], entries, name, priority, check)

    def write(self, ranges: Sequence[Range], name: str, priority: int = BACKGROUND) -> Move:
        """Starts writing buffers into entries that rest on NVME; as `read`.

        Raises NoSlotError when freezes hold all slots of a range, OSError (ENOSPC) when there is no room for another slot.
        """
        self._check_usable()
        summed = self.sums.of_write(ranges)
        with self._lock:
            entries = [self._entries[entry_name] for entry_name, _, _ in ranges]
            pieces = [(e, offset, buffer) for e, (_, offset, buffer) in zip(entries, ranges, strict=True)]
            return self._write(
                pieces, [buffer for _, _, buffer in ranges], name, priority, lambda: self.sums.keep(summed)
            )

    def read_blocks(
        self,
        name: str,
        offsets: npt.NDArray[np.int64],
        block_bytes: int,
        into: torch.Tensor,
        title: str | None = None,
        priority: int = NORMAL,
    ) -> Move:
        """Starts reading equal blocks of one entry that rests on NVME, one behind the other into a buffer, as one Move.

        `offsets` is a flat int64 array of byte offsets; they, block_bytes and the buffer's address are multiples of 4096.
        The way to fetch, say, rows of an embedding: nothing is done block by block in Python. `title` names the Move.
        """
        self._check_usable()
        with self._lock:
            entry = self._entries[name]
            blocks = blocks_of(entry, offsets, block_bytes, into)
            return self._start(blocks, into, (entry,), title or name, priority)

    # ---- the store as a whole ---------------------------------------------------------------------------------------

    @property
    def queues(self) -> Queues:
        """The queues, one per path; opened by the first transfer with the memory carved so far registered. Raises OSError."""
        self._check_usable()
        with self._lock:
            return self._held.queues()

    def freeze(self) -> Freeze:
        """Makes what rests on NVME last: all of it is on the disk on return, and is not written until it is thawed.

        It is each durable entry as last given to `put`, `release(dirty=True)` or `write` before the call; what is PRESENT
        and has been changed since counts when it is released. Blocks for writes under way and a sync; other threads may
        go on, what they write goes to other slots.

        Raises OSError when a write has failed and was not made good, or a sync fails; then nothing is frozen. A sync that
        failed may be tried again, except on paths that are used buffered: there the kernel may have dropped what it held.
        """
        self._check_usable()
        with self._lock:
            entries = [e for e in self._entries.values() if e.nvme is not None and e.nvme.is_durable]
            freeze = self._freezes.hold(entries, [segment.file for segment in self._files.segments])
            writes = self._under_way.writes()
        try:
            with durable.step("freeze", self.run.folder_name):
                self._end_writes(writes)
                with self._lock:
                    for entry in entries:
                        entry.check_written(freeze.number)
                self._files.sync()
        except BaseException:
            with self._lock:
                self._freezes.let_go(freeze)
            raise
        return freeze

    def thaw(self, freeze: Freeze) -> None:
        """Lets what only this freeze held be written, and given back, again. Thawing twice does nothing. Never blocks."""
        self.check_process()
        with durable.step("thaw", self.run.folder_name), self._lock:
            self._freezes.let_go(freeze)

    def check_process(self) -> None:
        """Raises RuntimeError in a forked child, which has none of the memory that this store lends."""
        check_process(self._owner, "this store")

    def folders(self) -> tuple[Path, ...]:
        """The run's folder on each path; what else is put there is removed with the store if run_folder.py knows its name."""
        return tuple(segment.folder for segment in self._files.segments)

    def settle(self) -> None:
        """Waits for every write-back, and raises the first error among them; registers memory carved since."""
        self._check_usable()
        if is_accelerator(self.device):
            self.arena.pin(self.device)
        with self._lock:
            writes = self._under_way.writes()
        try:
            self._end_writes(writes)
        finally:
            if self.arena.region[1] > self._held.registered_bytes:
                self._end_queues()

    def stats(self) -> StoreStats:
        """Totals so far; bytes are those of the kernel's completions."""
        with self._lock:
            paths, queues = self._held.path_stats(), self._held.open_queues
            return StoreStats(
                nvme_read_bytes=sum(path.read_bytes for path in paths),
                nvme_written_bytes=sum(path.written_bytes for path in paths),
                nvme_bytes=self._files.used_bytes,
                host_bytes=self.arena.carved_bytes,
                host_peak_bytes=self.arena.peak_bytes,
                wait_s=self.recorder.wait_s,
                engine=queues.engine if queues else "none yet",
                engine_why=queues.why if queues else "no transfer has been made yet",
                paths=paths,
            )

    def keep_files(self, keep: bool = True) -> None:
        """From now on the store's folders stay (or not) when it is closed, without their lock, also when nobody closes it."""
        self._held.keeps_files = keep

    def close(self, keep: bool = False) -> None:
        """Ends every transfer, frees memory and removes the store's files. Raises the first error of a write-back.

        With `keep`, or after `keep_files`, the folders stay, without their lock, with what is frozen: the room of everything
        else is given back to the disk. Calling it twice does nothing; nor does calling it in a forked child.
        """
        if os.getpid() != self._owner or self._finalizer.detach() is None:
            return
        self._held.keeps_files |= keep
        try:
            with self._lock:
                reads = self._under_way.unfinished(is_write=False)
            for move in reads:
                move.cancel()
            try:
                self.settle()
            finally:
                self._end_queues()
        finally:
            if self._held.keeps_files:
                self._drop_homes()
            self._entries.clear()
            self._under_way.clear()
            self._freezes.clear()
            self._held.close()

    # ---- inside --------------------------------------------------------------------------------------------------------

    def _check_usable(self) -> None:
        self.check_process()
        if self._held.is_closed:
            raise RuntimeError("this store is closed")

    def _read_ops(self, entry: Entry, offset: int, buffer: torch.Tensor) -> list[Op]:
        check_range(entry, offset, buffer)
        return transfers_of(READ, home_of(entry).reads(offset, offset + buffer.numel()), offset, buffer)

    def _start(
        self,
        ops: Transfers,
        buffers: object,
        entries: tuple[Entry, ...],
        name: str,
        priority: int,
        check: Check | None = None,
    ) -> Move:
        """A read that somebody else's buffers wait for."""
        if not ops:
            return self._nothing_to_move(buffers, name)
        move = Move(self.queues, ops, buffers, name, self.recorder, priority, check=check)
        self._under_way.add(move, entries, is_write=False)
        return move

    def _write(
        self,
        pieces: Sequence[Writing],
        owns: object,
        name: str,
        priority: int,
        on_start: Callable[[], None],
        on_end: Callable[[bool], None] | None = None,
    ) -> Move:
        """Starts a write to the slots that take it, which are current once it is under way; lost there if it fails."""
        ops: list[Op] = []
        targets = []
        for entry, offset, buffer in pieces:
            check_range(entry, offset, buffer)
            parts = home_of(entry).writes(offset, offset + buffer.numel())
            ops += transfers_of(WRITE, home_of(entry).places(parts), offset, buffer)
            targets.append((home_of(entry), parts))
        if not ops:
            return self._nothing_to_move(owns, name)

        def ended(arrived: bool) -> None:
            with self._lock:
                for home, parts in () if arrived else targets:
                    home.slots.lose(parts)
            if on_end is not None:
                on_end(arrived)

        with changing(targets, name):
            on_start()
            move = Move(self.queues, ops, owns, name, self.recorder, priority, on_end=ended)
            self._under_way.add(move, tuple(entry for entry, _, _ in pieces), is_write=True)
            for home, parts in targets:
                home.written(parts)
        return move

    def _end_writes(self, writes: Sequence[Move]) -> None:
        """Waits for writes; what they came to is told here, once."""
        errors = [_error_of(move) for move in writes]
        with self._lock:
            self._under_way.forget(writes)
        for error in errors:
            if error is not None:
                raise error

    def _nothing_to_move(self, result: object, name: str) -> Move:
        return Move(_NO_QUEUES, (), result, name, self.recorder)

    def _drop_homes(self) -> None:
        """Gives back every extent that no freeze holds."""
        for entry in self._entries.values():
            if entry.nvme is not None:
                entry.nvme.drop()

    def _end_queues(self) -> None:
        """Lets every transfer end and closes the queues; the next transfer opens others."""
        while True:
            with self._lock:
                moves = self._under_way.unfinished()
                if not moves:
                    self._held.end_queues()
                    return
            for move in moves:
                _error_of(move)


_NO_QUEUES: Queues = object()  # type: ignore[assignment]  # of moves that have nothing to move


def _error_of(move: Move) -> OSError | None:
    try:
        move.wait()
    except OSError as error:
        return None if move.was_cancelled else error
    return None


def _close_forgotten(owner: int, held: Held) -> None:
    """Ends the transfers and removes the files of a store that nobody closed; never in a forked child."""
    if os.getpid() == owner:
        held.close()
