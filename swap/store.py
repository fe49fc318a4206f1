"""TensorStore: named tensors that rest in a home tier and are fetched before use and released after.

    with TensorStore(paths=["/mnt/nvme0"], host_bytes=2 << 30) as store:
        store.put("layers.3", weights, home=Tier.NVME)
        move = store.fetch("layers.3")                 # starts, returns at once
        weights = move.wait()                          # the bytes, in HOST memory
        store.release("layers.3", dirty=True)          # starts the write-back

    reserve     room at a home                    drop      gives it back
    read, write byte ranges of what rests on NVMe, between the files and the caller's buffers; read_blocks: many small ones
    freeze      what rests on NVMe now is on the disk, and stays there unchanged until `thaw`
    settle      waits for writes                  close     ends everything

The states of an entry are drawn in entry.py. An entry whose home is HOST or DEVICE is always present: fetching it returns the
home itself. Callers with buffers of their own (the tile pipeline) use byte ranges and order them themselves. The store knows no
module, gradient, rank or optimizer.

A freeze costs a sync: no byte is copied. Until the thaw, frozen bytes are not overwritten; writes go to other slots, for which
there is room when the store was opened with `num_slots`. The files are removed when the store is closed, unless `keep_files`
was called: a run that saved leaves its store, any other leaves nothing.

With several paths, entries are dealt by weight (passes.py), and each path has its own queue (queue.py): a path that is slow,
full or failing does not affect the others. After a transfer error the store goes on. An entry that could not be written is
LOST, and the error is raised when it is fetched or frozen; everything else is unchanged.

There are two kinds of lock: a move's, held while a thread waits for it, and the store's, held for moments and taken last. The
store never waits for a move while it holds its own lock.
"""

from __future__ import annotations

import itertools
import math
import os
import threading
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from tiermem.swap import durable
from tiermem.swap.accelerator import is_accelerator
from tiermem.swap.arena import BudgetError, Slot
from tiermem.swap.checksum import Range, Sums, Written
from tiermem.swap.entry import Entry, EntryState, Freeze, NvmeHome, changing
from tiermem.swap.move import Move, wait_for_any
from tiermem.swap.native import BACKGROUND, NORMAL, WRITE, Fault, IoSettings, Op, check_process
from tiermem.swap.paths import AnyPath
from tiermem.swap.queue import PathStats, Queues, Recorder, StoreStats
from tiermem.swap.resources import Resources, UnderWay
from tiermem.swap.run_folder import RunName
from tiermem.swap.tier import Tier

__all__ = ["PathStats", "StoreStats", "TensorStore"]


class TensorStore:
    """Tensors at rest on HOST and NVME, moved by one queue for each path.

    Args:
        paths: folders on NVMe file systems, one or several; empty when nothing rests on NVME. Several paths without weights
            are measured first, which blocks for a moment.
        host_bytes: budget of HOST memory; never exceeded, refused with the arithmetic.
        io: engine, block size and depth of each path's queue.
        disk_bytes: most bytes on all paths together.
        device: whose memory DEVICE is, an accelerator's or, by default, this process's own.
        link_bytes: of host_bytes, what crosses the link to the accelerator: `settle` registers it with the device's driver.
        faults: lies for the fault-injecting engine, for tests.
        num_slots: most extents of an entry that rests on NVME: one more than the freezes that are held while it is written.
        run: names the run's folders; None: a new name.

    The store's files go with it when it is closed, unless they are to be kept; nothing else on the paths is touched. Safe
    to call from several threads; a forked child may neither use nor delete it.

    Raises:
        ValueError: host_bytes or num_slots is not positive, a path is listed twice, or only some paths have weights.
        OSError: a path is missing, not writable or too full.
    """

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
        self.device = device or torch.device("cpu")
        self.recorder = Recorder()
        self.sums = Sums(self.recorder)
        self._entries: dict[str, Entry] = {}
        self._under_way = UnderWay()
        self._frozen: dict[int, list[NvmeHome]] = {}  # by the freeze's number, also of entries that were dropped since
        self._freeze_numbers = itertools.count(1)
        self._lock = threading.RLock()  # guards the entries and everything above
        self._owner = os.getpid()
        settings = io or IoSettings()
        self._held = Resources(paths, host_bytes, disk_bytes, self.run, settings, link_bytes, faults, self.recorder)
        self.arena, self._files = self._held.arena, self._held.files
        self._no_queues = Queues({}, settings, recorder=self.recorder)  # of moves that have nothing to move
        self._finalizer = weakref.finalize(self, _close_forgotten, os.getpid(), self._held)

    def __enter__(self) -> TensorStore:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

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
        with self._lock:
            if name in self._entries:
                raise ValueError(f"{name!r} is in the store already")
            nvme = None
            if home is Tier.NVME:
                num_bytes = dtype.itemsize * math.prod(shape)
                nvme = NvmeHome(self._files, num_bytes, self.num_slots if is_durable else 1, is_durable)
            entry = self._entries[name] = Entry(name, home, dtype, shape, nvme)
        try:
            if home is Tier.DEVICE:
                memory = torch.empty(entry.padded_bytes, dtype=torch.uint8, device=self.device)
                entry.occupy(Slot(-1, memory))
            elif home is Tier.HOST:
                entry.occupy(self._take(entry.num_bytes, f"{name!r}, resting on HOST,", crosses_link))
        except BaseException:
            self.drop(name)
            raise

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
                move.outcome()  # raised by its own wait, and by settle
        with self._lock:
            slot = entry.give_up()
            if slot is not None:
                self.arena.give_back(slot)

    # ---- entries -------------------------------------------------------------------------------------------------

    def put(self, name: str, tensor: torch.Tensor, home: Tier) -> Move:
        """Copies a tensor to its home. The copy out of `tensor` is done on return; the write goes on behind.

        Waits for write-backs when the budget has no room for the copy. Raises BudgetError or OSError, and then nothing
        of that name is in the store.
        """
        self.reserve(name, tensor.shape, tensor.dtype, home)
        entry = self._entries[name]
        try:
            if home is Tier.NVME:
                entry.occupy(self._take(entry.padded_bytes, f"{name!r}, on its way to NVME,"))
            assert entry.slot is not None
            entry.tensor(entry.slot).copy_(tensor)
            move = self.release(name, dirty=True)
        except BaseException:
            self.drop(name)
            raise
        assert move is not None
        return move

    def fetch(self, name: str, into: Slot | None = None, priority: int = NORMAL) -> Move:
        """Starts bringing a tensor to HOST memory; `wait()` returns it, typed and shaped.

        `into` lends a slot of at least the tensor's bytes rounded up to 4096; without it one is carved. What is present
        or on its way already is not fetched again. Blocks only while the budget has no room until write-backs under way
        have ended. The Move of an entry whose write-back failed fails with that error. Raises KeyError, BudgetError.
        """
        self._check_usable()
        while True:
            try:
                with self._lock:
                    return self._fetch(self._entries[name], into, priority)
            except BudgetError:
                if not self._await_some():
                    raise

    def release(self, name: str, dirty: bool = False) -> Move | None:
        """Gives up a fetched tensor; with `dirty` its bytes are written home first, behind the returned Move.

        Memory lent by `into` may be used again at once after a clean release, after the Move's end after a dirty one.
        Raises RuntimeError when the tensor is not present.
        """
        self._check_usable()
        with self._lock:
            entry = self._entries[name]
            entry.expect("released", EntryState.PRESENT)
            if entry.home is not Tier.NVME:
                return self._nothing_to_move(None, name) if dirty else None
            if dirty:
                return self._write_back(entry)
            slot, owns = entry.slot, entry.owns_slot
            entry.rest()
            if owns and slot is not None:
                self.arena.give_back(slot)
            return None

    def view(self, name: str) -> torch.Tensor:
        """The home itself of a tensor that rests on HOST or DEVICE; changes to it need no write-back."""
        self._check_usable()
        entry = self._entries[name]
        if entry.home is Tier.NVME or entry.slot is None:
            raise RuntimeError(
                f"{name!r} rests on {entry.home.name}; only what rests in memory can be looked at in place"
            )
        return entry.tensor(entry.slot)

    def is_present(self, name: str) -> bool:
        """Whether a tensor is known to occupy HOST memory and may be released."""
        return self._entries[name].state is EntryState.PRESENT

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
                ops += entry.reads(offset, buffer)
            buffers = [buffer for _, _, buffer in ranges]
            if not ops:
                return self._nothing_to_move(buffers, name)
            check = self.sums.check_of(ranges, ops, self._files.by_descriptor) if is_checked else None
            move = Move(self.queues, ops, buffers, name, priority, check=check)
            self._under_way.add(move, entries)
            return move

    def write(self, ranges: Sequence[Range], name: str, priority: int = BACKGROUND) -> Move:
        """Starts writing buffers into entries that rest on NVME; as `read`.

        Raises NoSlotError when freezes hold all slots of a range, OSError (ENOSPC) when there is no room for another slot.
        """
        self._check_usable()
        summed = self.sums.of_write(ranges)
        with self._lock:
            return self._write(ranges, [buffer for _, _, buffer in ranges], name, priority, summed)

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
            home = entry.check_blocks(offsets, block_bytes, into)
            if not len(offsets):
                return self._nothing_to_move(into, title or name)
            blocks = home.blocks(offsets, block_bytes, into.data_ptr())
            move = Move(self.queues, blocks, into, title or name, priority)
            self._under_way.add(move, (entry,))
            return move

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
            homes = {e: e.nvme for e in self._entries.values() if e.nvme is not None and e.nvme.is_durable}
            number = next(self._freeze_numbers)
            parts = {entry.name: home.freeze(number) for entry, home in homes.items()}
            freeze = Freeze(number, tuple(segment.file for segment in self._files.segments), parts)
            self._frozen[number] = list(homes.values())
            writes = self._under_way.writes()
        try:
            with durable.step("freeze", self.run.folder_name):
                self._end_writes(writes)
                with self._lock:
                    for entry in homes:
                        entry.check_written(number)
                self._files.sync()
        except BaseException:
            with self._lock:
                self._let_go(freeze)
            raise
        return freeze

    def thaw(self, freeze: Freeze) -> None:
        """Lets what only this freeze held be written, and given back, again. Thawing twice does nothing. Never blocks."""
        self.check_process()
        with durable.step("thaw", self.run.folder_name), self._lock:
            self._let_go(freeze)

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
            if self.arena.region.num_bytes > self._held.registered_bytes:
                self._end_queues()

    def stats(self) -> StoreStats:
        """Totals so far; bytes are those of the kernel's completions."""
        with self._lock:
            return self._held.stats()

    def keep_files(self, keep: bool = True) -> None:
        """From now on the store's folders stay (or not) when it is closed, without their lock, also when it is not closed."""
        self._held.keep_files(keep)

    def close(self, keep: bool = False) -> None:
        """Ends every transfer, frees memory and removes the store's files. Raises the first error of a write-back.

        With `keep`, or after `keep_files`, the folders stay, without their lock, with what is frozen: the room of everything
        else is given back to the disk. Calling it twice does nothing; nor does calling it in a forked child.
        """
        if os.getpid() != self._owner or self._finalizer.detach() is None:
            return
        self._held.keep_files(keep or self._held.keeps_files)
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
                for entry in self._entries.values():
                    if entry.nvme is not None:
                        entry.nvme.drop()
            for kept in (self._entries, self._under_way, self._frozen):
                kept.clear()
            self._held.close()

    # ---- inside --------------------------------------------------------------------------------------------------------

    def _check_usable(self) -> None:
        self.check_process()
        if self._held.is_closed:
            raise RuntimeError("this store is closed")

    def _fetch(self, entry: Entry, into: Slot | None, priority: int) -> Move:
        if entry.state is EntryState.PRESENT:
            assert entry.slot is not None
            return self._nothing_to_move(entry.tensor(entry.slot), entry.name)
        if entry.coming is not None:
            return entry.coming
        if into is not None and into.num_bytes < entry.padded_bytes:
            raise ValueError(f"{entry.name!r} needs a slot of {entry.padded_bytes} bytes; it has {into.num_bytes}")
        owns, queues = into is None, self.queues
        slot = into or self.arena.take(entry.padded_bytes, f"{entry.name!r}, being fetched,")

        def came(arrived: bool) -> None:
            with self._lock:
                if arrived:
                    entry.arrive()
                    return
                entry.turn_back()
                if owns:
                    self.arena.give_back(slot)

        try:
            data = slot.tensor[: entry.padded_bytes]
            ops = entry.reads(0, data)
            check = self.sums.check_of([(entry.name, 0, data)], ops, self._files.by_descriptor)
            move = Move(queues, ops, entry.tensor(slot), entry.name, priority, entry.leaving, came, check)
        except BaseException:
            if owns:
                self.arena.give_back(slot)
            raise
        entry.come(move, slot, owns)
        self._under_way.add(move, (entry,))
        return move

    def _write_back(self, entry: Entry) -> Move:
        slot, owns = entry.slot, entry.owns_slot
        assert slot is not None

        def left(arrived: bool) -> None:
            with self._lock:
                entry.end_leaving(arrived)
                if owns:
                    self.arena.give_back(slot)

        ranges = [(entry.name, 0, slot.tensor[: entry.padded_bytes])]
        move = self._write(ranges, slot, entry.name, BACKGROUND, self.sums.of_write(ranges), left)
        entry.leave(move)
        return move

    def _write(
        self,
        ranges: Sequence[Range],
        owns: object,
        name: str,
        priority: int,
        summed: Sequence[Written],
        on_end: Callable[[bool], None] | None = None,
    ) -> Move:
        """Starts a write to the slots that take it, which are current once it is under way; lost there if it fails."""
        entries = tuple(self._entries[entry_name] for entry_name, _, _ in ranges)
        ops: list[Op] = []
        targets = []
        for entry, (_, offset, buffer) in zip(entries, ranges, strict=True):
            home = entry.check_range(offset, buffer)
            parts = home.targets(offset, offset + buffer.numel())
            ops += home.ops(WRITE, parts, buffer.data_ptr() - offset)
            targets += [(home, part) for part in parts]
        if not ops:
            return self._nothing_to_move(owns, name)

        def ended(arrived: bool) -> None:
            with self._lock:
                for home, part in () if arrived else targets:
                    home.slots.lose(part)
            if on_end is not None:
                on_end(arrived)

        with changing(targets, name):
            self.sums.keep(summed)
            move = Move(self.queues, ops, owns, name, priority, on_end=ended)
            self._under_way.add(move, entries)
            for home, part in targets:
                home.slots.write(part.start, part.stop)
        return move

    def _nothing_to_move(self, result: object, name: str) -> Move:
        return Move(self._no_queues, (), result, name)

    def _take(self, num_bytes: int, what: str, crosses_link: bool = False) -> Slot:
        """A slot of HOST memory, when need be after write-backs have given theirs back. Raises BudgetError."""
        while True:
            try:
                return self.arena.take(num_bytes, what, crosses_link)
            except BudgetError:
                if not self._await_some():
                    raise

    def _await_some(self) -> bool:
        """Waits until a write-back under way has ended; False when there is none whose end could free memory."""
        carved = self.arena.carved_bytes
        with self._lock:
            writes = self._under_way.unfinished(is_write=True)
        if writes and self.arena.carved_bytes >= carved:
            wait_for_any([[move] for move in writes])  # whichever path is faster
        return bool(writes) or self.arena.carved_bytes < carved

    def _let_go(self, freeze: Freeze) -> None:
        for home in self._frozen.pop(freeze.number, ()):
            home.thaw(freeze.number)

    def _end_writes(self, writes: Sequence[Move]) -> None:
        """Waits for writes, and raises the first error among them; it is raised once."""
        errors = [move.outcome() for move in writes]
        with self._lock:
            self._under_way.forget(writes)
        for error in errors:
            if error is not None:
                raise error

    def _end_queues(self) -> None:
        """Lets every transfer end and closes the queues; the next transfer opens others."""
        while True:
            with self._lock:
                moves = self._under_way.unfinished()
                if not moves:
                    self._held.end_queues()
                    return
            for move in moves:
                move.outcome()


def _close_forgotten(owner: int, held: Resources) -> None:
    """Ends the transfers and removes the files of a store that was not closed; never in a forked child."""
    if os.getpid() == owner:
        held.close()
