"""TensorStore: named tensors that rest on a home tier; callers fetch them before use and release
them after.

    with TensorStore(paths=["/mnt/nvme0"], host_bytes=2 << 30) as store:
        store.put("layers.3", weights, home=Tier.NVME)
        move = store.fetch("layers.3")                 # starts, returns at once
        weights = move.wait()                          # the bytes, in HOST memory
        store.release("layers.3", dirty=True)          # starts the write-back

    reserve       takes space for a tensor at its home          drop      gives that space back
    read, write   move byte ranges between files on NVMe and the caller's buffers; read_blocks: many small ranges
    freeze        syncs all bytes on NVMe and keeps them unchanged until `thaw`
    flush         waits for writes                              close     ends all transfers and frees everything

entry.py has the state diagram of an entry. An entry whose home is HOST or DEVICE is always PRESENT:
fetching it returns the home itself. `fetch(to=Tier.DEVICE)` brings a tensor of any home to the
accelerator's memory, until its release. Callers with buffers of their own (step programs) use byte
ranges and order their transfers themselves. The store knows no module, gradient, rank or optimizer.

A freeze needs a sync and copies no byte. Until the thaw, writes do not overwrite frozen bytes; they
go to other slots (see `num_slots`). `close` removes the files, unless `keep_files` was called: a
run that saved keeps its store's files.

With several paths, entries are divided by weight (passes.py), and each path has its own queue
(queue.py): a slow, full or failing path does not affect the others. After a transfer error the
store remains usable. An entry whose write failed is LOST, and fetching or freezing it raises the
error; other entries do not change.

There are two kinds of lock. A thread holds a move's lock while it waits for the move. A thread
holds the store's lock briefly, and takes it last. The store never waits for a move while it holds
its own lock.
"""

from __future__ import annotations

import itertools
import math
import os
import threading
import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack
from numbers import Integral
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from tiermem.swap.base.native import BACKGROUND, NORMAL, Fault, IoSettings, check_process
from tiermem.swap.base.ranges import ALIGNMENT, round_up
from tiermem.swap.base.tier import Tier, check_tier
from tiermem.swap.disk import durable
from tiermem.swap.disk.paths import AnyPath
from tiermem.swap.disk.queue import PathStats, Queues, Recorder, StoreStats, Transfers
from tiermem.swap.disk.run_folder import RunName, call_in_child
from tiermem.swap.memory.accelerator import is_accelerator
from tiermem.swap.memory.arena import BudgetError, Slot
from tiermem.swap.memory.device_memory import DeviceMemory
from tiermem.swap.store.checksum import Check, Range, Sums, WrittenBytes
from tiermem.swap.store.entry import Entry, EntryState, Freeze, NvmeHome
from tiermem.swap.store.move import Later, Move, wait_for_any
from tiermem.swap.store.places import EntryPlace, Plans, WritePlan, changing, places_of, reads_of
from tiermem.swap.store.resources import Resources, UnderWay

__all__ = ["PathStats", "StoreStats", "TensorStore"]


class TensorStore(AbstractContextManager["TensorStore"]):
    """Named tensors on DEVICE, HOST and NVME, moved by one queue for each path. Thread-safe.

    Args:
        paths: folders on NVMe file systems, one or several; empty when no tensor rests on NVME.
            Several paths without weights are measured first, which blocks for less than a second.
        host_bytes: budget of HOST memory in bytes. A request beyond it raises BudgetError with the
            arithmetic.
        io: engine, block size and depth of each path's queue.
        disk_bytes: most bytes on all paths together; None: no bound but the disks'.
        device: the device of the tier DEVICE; default: the CPU, that is this process's own memory.
        link_bytes: the part of host_bytes for copies to and from the accelerator; `flush` pins it.
        faults: faults that the fault-injecting engine produces, for tests.
        num_slots: most extents of an entry on NVME: one more than the number of freezes held while
            it is written.
        run: the name of the run's folders; None: a new name.

    `close` removes the store's files, unless they are to be kept, and no other file. A forked child
    cannot use or delete the store.

    Raises:
        ValueError: host_bytes, disk_bytes or num_slots is not a positive number, a path is listed
            twice, or only some paths have weights.
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
        for name, size in (("host_bytes", host_bytes), ("disk_bytes", disk_bytes)):
            if size is not None and (not isinstance(size, Integral) or size < 1):
                raise ValueError(f"{name} is {size!r}; give a number of bytes, such as 1 << 30")
        if not isinstance(io, IoSettings | None):
            raise ValueError(f"io is {io!r}; give an IoSettings, such as IoSettings(depth=32)")
        self.num_slots = num_slots
        self.run = run or RunName.new()
        self.device = device or torch.device("cpu")
        self.on_device = DeviceMemory(self.device)
        self.recorder = Recorder()
        self.sums = Sums(self.recorder)
        self._entries: dict[str, Entry] = {}
        self._under_way = UnderWay()
        self._is_starting = False  # a transfer has no owner yet
        # by the freeze's number; dropped entries included
        self._frozen: dict[int, list[NvmeHome]] = {}
        self._freeze_numbers = itertools.count(1)
        self._lock = threading.RLock()  # guards the entries and everything above
        self._owner = os.getpid()
        settings = io or IoSettings()
        # for moves without transfers
        self._no_queues = Queues({}, settings, recorder=self.recorder)
        self._held = Resources(
            paths, host_bytes, disk_bytes, self.run, settings, link_bytes, faults, self.recorder
        )
        # for a program that drops the store without `close`
        self._finalizer = weakref.finalize(self, self._held.close)
        self.arena = self._held.arena
        self._files = self._held.files
        self.programs = self._held.programs
        self.plans = Plans(self._entries, self.sums, self._held, self._lock)
        call_in_child(self, lambda store: store._finalizer.detach())

    def __exit__(self, *_: object) -> None:
        self.close()

    def __contains__(self, name: str) -> bool:
        return name in self._entries

    # ---- homes -----------------------------------------------------------------------------------

    def reserve(
        self,
        name: str,
        shape: Sequence[int],
        dtype: torch.dtype,
        home: Tier,
        is_durable: bool = True,
        crosses_link: bool = False,
    ) -> None:
        """Takes space for a tensor at its home; its content is undefined.

        is_durable: whether freezes include it when it rests on NVME; a tensor that is not durable
            has one slot.
        crosses_link: whether a tensor on HOST is copied to the accelerator and back.

        Raises ValueError for a name that exists and for another home than a Tier, BudgetError,
        OSError (ENOSPC) or, for DEVICE, torch's OutOfMemoryError.
        """
        self.check_usable()
        check_tier("home", home)
        with self._lock:
            if name in self._entries:
                raise ValueError(f"{name!r} is in the store already")
            nvme = None
            if home is Tier.NVME:
                num_bytes = dtype.itemsize * math.prod(shape)
                nvme = NvmeHome(
                    self._files, num_bytes, self.num_slots if is_durable else 1, is_durable
                )
            entry = self._entries[name] = Entry(name, home, dtype, shape, nvme)
        try:
            if home is Tier.DEVICE:
                entry.occupy(self.on_device.take(name, entry.padded_bytes))
            elif home is Tier.HOST:
                entry.occupy(
                    self._take(entry.num_bytes, f"{name!r}, resting on HOST,", crosses_link)
                )
        except BaseException:
            self.drop(name)
            raise

    def reserve_disk(self, num_bytes: int, why: str = "") -> ExitStack:
        """Preallocates NVME space for all slots of later entries, divided over the paths by weight
        within their caps.

        Closing what it returns gives that space back, if nothing was stored since. why: a sentence
        about the size, for the error. Raises OSError (ENOSPC) with the arithmetic; then no space is
        taken.
        """
        self.check_usable()
        with self._lock:
            try:
                return self._files.reserve(num_bytes)
            except OSError as error:
                if not why:
                    raise
                raise OSError(error.errno, f"{error.strerror}. {why}", error.filename) from None

    def home_of(self, name: str) -> Tier:
        """Returns a tensor's home tier."""
        return self._entries[name].home

    def num_bytes(self, name: str) -> int:
        """Returns the size of a tensor."""
        return self._entries[name].num_bytes

    def drop(self, name: str) -> None:
        """Removes a tensor and frees its home. Cancels its fetch and write-back; waits for byte
        ranges in flight.

        Bytes that a freeze holds stay until the thaw.
        """
        self.check_usable()
        with self._lock:
            entry = self._entries.pop(name)
            self.sums.forget(name)
            touching = self._under_way.touching(entry)
        for move in touching:
            if move in (entry.coming, entry.leaving):
                move.cancel()
            else:
                move.outcome()  # its own `wait` and `flush` raise the error
        entry.end_device_copy(is_dirty=False)
        with self._lock:
            slot = entry.give_up()
            if slot is not None:
                (self.on_device if entry.home is Tier.DEVICE else self.arena).give_back(slot)

    # ---- entries ---------------------------------------------------------------------------------

    def put(self, name: str, tensor: torch.Tensor, home: Tier) -> Move:
        """Copies a tensor to its home. On return `tensor` may change; the write to NVME continues
        in the background.

        Blocks for write-backs when the budget has no room for the copy. Raises BudgetError or
        OSError; then the store has no entry of that name.
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

    def fetch(
        self, name: str, into: Slot | None = None, priority: int = NORMAL, *, to: Tier = Tier.HOST
    ) -> Move:
        """Starts reading a tensor into HOST memory; the Move's `wait()` returns it with its dtype
        and shape.

        With `to=Tier.DEVICE` its `wait()` returns a copy in the device's memory, which lasts until
        `release` (then the call may block for the copy's end). A tensor whose home is DEVICE is
        itself returned.

        `into` lends a slot of at least the tensor's bytes rounded up to 4096; without it the store
        carves one. A tensor that is PRESENT or COMING is not fetched again. Blocks only while the
        budget needs write-backs in flight to end. The Move of an entry whose write-back failed
        fails with that error. Raises KeyError, BudgetError, ValueError for another `to`.
        """
        self.check_usable()
        if to is not Tier.HOST:
            check_tier("to", to, (Tier.HOST, Tier.DEVICE))
        while True:
            try:
                with self._lock:
                    move = self._fetch(self._entries[name], into, priority)
                    return (
                        move
                        if to is Tier.HOST
                        else self._entries[name].to_device(move, self.device)
                    )
            except BudgetError:
                if not self._await_some():
                    raise

    def release(self, name: str, dirty: bool = False) -> Move | None:
        """Releases a fetched tensor; with `dirty` starts the write to its home and returns that
        Move.

        Blocks only for the end of its copy on the device, if it has one; with `dirty` the copy's
        bytes go home.

        The caller may reuse memory lent by `into` at once after a clean release, and after the
        Move's end after a dirty one. Raises RuntimeError when the tensor is not PRESENT.
        """
        self.check_usable()
        self._entries[name].end_device_copy(dirty)
        with self._lock:
            entry = self._entries[name]
            entry.expect("released", EntryState.PRESENT)
            if entry.home is not Tier.NVME:
                return self._nothing_to_move(None, name) if dirty else None
            if dirty:
                return self._write_back(entry)
            slot = entry.slot
            owns = entry.owns_slot
            entry.rest()
            if owns and slot is not None:
                self.arena.give_back(slot)
            return None

    def view(self, name: str) -> torch.Tensor:
        """Returns the home itself of a tensor on HOST or DEVICE; changes need no write-back. Raises
        RuntimeError on NVME."""
        slot = self._slot_of(name)
        return self._entries[name].tensor(slot)

    def address(self, name: str) -> int:
        """Returns the address of what `view` returns, in less time. Raises as `view`."""
        return self._slot_of(name).tensor.data_ptr()

    def exchange(self, name: str, slot: Slot) -> Slot:
        """Makes a slot of the arena the home of a tensor on HOST; returns the slot that was its
        home, which the caller owns.

        The tensor has the bytes of the new slot from now on. Raises ValueError on another tier, and
        for another size.
        """
        self.check_usable()
        with self._lock:
            return self._entries[name].exchange(slot)

    def cross(self, name: str, crosses_link: bool) -> None:
        """Says whether a tensor on HOST is copied to the accelerator and back, from the next
        `renew_host` on."""
        self.arena.cross(self._slot_of(name), crosses_link)

    def is_present(self, name: str) -> bool:
        """Whether a tensor is PRESENT, so that it may be released."""
        return self._entries[name].state is EntryState.PRESENT

    # ---- byte ranges, for callers with buffers of their own --------------------------------------

    def read(
        self, ranges: Sequence[Range], name: str, priority: int = NORMAL, is_checked: bool = True
    ) -> Move:
        """Starts reading entries on NVME into buffers, as one Move. Each range is (entry, byte
        offset, uint8 buffer).

        Offsets, lengths and addresses are multiples of 4096 bytes. The Move owns the buffers until
        it has ended. is_checked: whether pieces with a checksum are verified. Raises ValueError for
        ranges outside an entry or unaligned.
        """
        self.check_usable()
        with self._lock:
            entries = tuple(self._entries[entry_name] for entry_name, _, _ in ranges)
            ops = reads_of(places_of(self._entries, ranges))
            check = (
                self.sums.check_of(ranges, ops, self._files.by_descriptor) if is_checked else None
            )
            buffers = [buffer for _, _, buffer in ranges]
            if not ops:
                return self._nothing_to_move(buffers, name)
            queues = self._before_start()
            move = Move(queues, queues.submit(ops, priority), buffers, name, check=check)
            self._under_way.add(move, entries)
            self._is_starting = False
            return move

    def check_of(self, name: str, start: int, data: torch.Tensor) -> Check | None:
        """What tells whether the bytes from `start` on of an entry on NVME are right, once several
        unchecked reads have brought them to `data` on the CPU; None: no checksum is due."""
        with self._lock:
            home = self._entries[name].nvme_home()
            stop = round_up(start + data.numel(), ALIGNMENT)
            blocks = EntryPlace(home, start // ALIGNMENT * ALIGNMENT, stop, data.data_ptr() - start)
            ops = reads_of([blocks])
            return self.sums.check_of([(name, start, data)], ops, self._files.by_descriptor)

    def write(self, ranges: Sequence[Range], name: str, priority: int = BACKGROUND) -> Move:
        """Starts writing buffers into entries on NVME, with ranges as in `read`. Blocks while it
        computes checksums.

        Raises NoSlotError when freezes hold all slots of a range, OSError (ENOSPC) when the disk
        has no space for another slot.
        """
        self.check_usable()
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
        """Starts reading blocks of equal size of one entry on NVME into consecutive places of a
        buffer, as one Move.

        `offsets` is a flat int64 array of byte offsets. Offsets, block_bytes and the buffer's
        address are multiples of 4096. It suits rows of an embedding: Python does no work per block.
        `title` names the Move. Checksums are not verified.
        """
        self.check_usable()
        with self._lock:
            entry = self._entries[name]
            home = entry.check_blocks(offsets, block_bytes, into)
            blocks = home.blocks(offsets, block_bytes, into.data_ptr()) if len(offsets) else []
            return self._start((entry,), blocks, priority, into, title or name)

    # ---- the store as a whole --------------------------------------------------------------------

    @property
    def queues(self) -> Queues:
        """The queues, one per path. The first transfer opens them and registers the memory carved
        so far. Raises OSError."""
        self.check_usable()
        with self._lock:
            return self._held.queues()

    def freeze(self, is_kept: bool = True) -> Freeze:
        """Makes all durable entries on NVME durable: they are on the disk on return, and do not
        change there until the thaw.

        It covers each durable entry as last given to `put`, `release(dirty=True)` or `write` before
        the call. Changes to a PRESENT tensor that is not released yet are not included. Blocks for
        writes in flight and a sync. Other threads may continue; their writes go to other slots.

        is_kept: whether the files are to hold the bytes after the run. If not, nothing is synced, and
            the files may have been removed meanwhile: the caller reads them by `descriptors`.

        Raises OSError when a write failed and was not repeated, or a sync fails; then nothing is
        frozen. The caller may retry after a failed sync, except on buffered paths, where the kernel
        may have dropped the bytes.
        """
        self.check_usable()
        with self._lock:
            homes = {
                e: e.nvme
                for e in self._entries.values()
                if e.nvme is not None and e.nvme.is_durable
            }
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
                if is_kept:
                    self._files.sync()
                else:
                    self._files.check_whole()
        except BaseException:
            with self._lock:
                self._let_go(freeze)
            raise
        return freeze

    def thaw(self, freeze: Freeze) -> None:
        """Ends a freeze: bytes that no other freeze holds may be overwritten again. A second call
        does nothing."""
        self.check_process()
        with durable.step("thaw", self.run.folder_name), self._lock:
            self._let_go(freeze)

    def check_process(self) -> None:
        """Raises RuntimeError in a forked child, which does not have the store's memory."""
        check_process(self._owner, "this store")

    def check_usable(self) -> None:
        """Raises RuntimeError after `close`, and in a forked child."""
        self._held.check_usable()

    def folders(self) -> tuple[Path, ...]:
        """Returns the run's folder on each path. `close` also removes other files there whose names
        run_folder.py knows."""
        return tuple(segment.folder for segment in self._files.segments)

    def descriptors(self) -> tuple[int, ...]:
        """The open segment file of each path, until `close`; it may have no name any more."""
        return tuple(self._files.by_descriptor())

    def flush(self) -> None:
        """Waits for every write and raises the first error among them; pins and registers memory
        carved since. Blocks."""
        self.check_usable()
        if is_accelerator(self.device):
            self.arena.pin(self.device)
        with self._lock:
            writes = self._under_way.writes()
        try:
            self._end_writes(writes)
        finally:
            if self.arena.regions != self._held.registered:
                self._end_queues()

    def renew_host(self, host_bytes: int, link_bytes: int) -> None:
        """Goes on with another budget of HOST memory (`Arena.renew`). Blocks for every transfer.
        Raises OSError."""
        self._end_queues()
        self.arena.renew(host_bytes, link_bytes)

    def stats(self) -> StoreStats:
        """Returns totals so far; bytes are counted from the kernel's completions."""
        with self._lock:
            return self._held.stats()

    def keep_files(self, keep: bool = True) -> None:
        """Sets whether the store's folders stay, without their lock file, when the store is closed
        or dropped unclosed."""
        self._held.keeps_files = keep

    def close(self, keep: bool = False) -> None:
        """Ends every transfer, frees memory and removes the store's files. Blocks. Raises the first
        error of a write-back.

        With `keep`, or after `keep_files`, the folders stay without their lock file and with the
        frozen bytes; other disk space is given back. A second call does nothing, nor does a call in
        a forked child.
        """
        if self._finalizer.detach() is None:
            return
        self._held.keeps_files |= keep
        try:
            with self._lock:
                reads = self._under_way.unfinished(is_write=False)
            for move in reads:
                move.cancel()
            try:
                self.flush()
            finally:
                self._end_queues()
        finally:
            for entry in self._entries.values():
                entry.end_device_copy(is_dirty=False)
                if entry.nvme is not None and self._held.keeps_files:
                    entry.nvme.drop()
            for kept in (self._entries, self._under_way, self._frozen):
                kept.clear()
            self.on_device.close()
            self._held.close()

    # ---- inside ----------------------------------------------------------------------------------

    def _slot_of(self, name: str) -> Slot:
        """The memory in which a tensor rests on HOST or DEVICE."""
        self.check_usable()
        self.on_device.check_there(name)
        entry = self._entries[name]
        slot = entry.slot
        if entry.home is Tier.NVME or slot is None:
            raise RuntimeError(
                f"{name!r} rests on {entry.home.name}; only what rests in memory can be looked at in "
                "place"
            )
        return slot

    def _fetch(self, entry: Entry, into: Slot | None, priority: int) -> Move:
        if entry.state is EntryState.PRESENT:
            assert entry.slot is not None
            return self._nothing_to_move(entry.tensor(entry.slot), entry.name)
        if entry.coming is not None:
            return entry.coming
        if into is not None and into.num_bytes < entry.padded_bytes:
            raise ValueError(
                f"{entry.name!r} needs a slot of {entry.padded_bytes} bytes; it has "
                f"{into.num_bytes}"
            )
        owns = into is None
        queues = self._before_start()
        slot = into or self.arena.take(entry.padded_bytes, f"{entry.name!r}, being fetched,")
        owned = [slot] if owns else []

        def came(arrived: bool) -> None:
            with self._lock:
                # a second call, after an interrupt, completes the first
                if entry.coming is not None:
                    end = entry.arrive if arrived else entry.turn_back
                    end()
                while owned and not arrived:
                    self.arena.give_back(owned.pop())

        try:
            data = slot.tensor[: entry.padded_bytes]
            ops = reads_of(places_of(self._entries, whole := [(entry.name, 0, data)]))
            check = self.sums.check_of(whole, ops, self._files.by_descriptor)
            writing = entry.leaving  # a write that has failed fails the fetch, too
            if writing is None or (writing.is_done() and not writing.has_failed):
                transfers: int | Later = queues.submit(ops, priority)
            else:
                transfers = Later(writing, ops, priority)
            move = Move(queues, transfers, entry.tensor(slot), entry.name, on_end=came, check=check)
        except BaseException:
            self.end_transfers()  # after an interrupt one may fill the slot
            if owns:
                self.arena.give_back(slot)
            raise
        entry.come(move, slot, owns)
        self._under_way.add(move, (entry,))
        self._is_starting = False
        return move

    def _write_back(self, entry: Entry) -> Move:
        slot = entry.slot
        owns = entry.owns_slot
        assert slot is not None
        owned = list[Slot]()
        move: Move | None = None

        def left(arrived: bool) -> None:
            with self._lock:
                # else a second call after an interrupt, or one came before `leave`
                if entry.leaving is move and entry.state in (EntryState.LEAVING, EntryState.COMING):
                    entry.end_leaving(arrived)
                while owned:
                    self.arena.give_back(owned.pop())

        ranges = [(entry.name, 0, slot.tensor[: entry.padded_bytes])]
        move = self._write(ranges, slot, entry.name, BACKGROUND, self.sums.of_write(ranges), left)
        entry.leave(move)
        owned += [slot] * owns  # before, the entry shows it
        return move

    def _write(
        self,
        ranges: Sequence[Range],
        owns: object,
        name: str,
        priority: int,
        summed: Sequence[WrittenBytes],
        on_end: Callable[[bool], None] | None = None,
    ) -> Move:
        """Starts a write to free slots. These slots become current when the write starts, and lost
        if it fails."""
        plan = WritePlan(places_of(self._entries, ranges))
        entries = tuple(self._entries[each[0]] for each in ranges)

        def ended(arrived: bool) -> None:
            if not arrived:
                with self._lock:
                    plan.lose()
            if on_end is not None:
                on_end(arrived)

        with changing(plan.targets, name):
            self.sums.keep(summed)
            move = self._start(
                entries, plan.ops(), priority, owns, name, is_write=True, on_end=ended
            )
            plan.begin()
        return move

    def _start(
        self,
        entries: tuple[Entry, ...],
        transfers: Transfers,
        priority: int,
        owns: object,
        name: str,
        **how: Any,
    ) -> Move:
        """Starts transfers of entries. Holds the lock; `how` are further arguments of Move."""
        if not transfers:
            return self._nothing_to_move(owns, name)
        queues = self._before_start()
        move = Move(queues, queues.submit(transfers, priority), owns, name, **how)
        self._under_way.add(move, entries)
        self._is_starting = False
        return move

    def _before_start(self) -> Queues:
        """The queues, marked until a move owns what starts. A mark that is left tells of an
        interrupt: a transfer without an owner, which is waited for before its buffer is used
            again."""
        if self._is_starting:
            self.end_transfers()
        self._is_starting = True
        return self.queues

    def _nothing_to_move(self, result: object, name: str) -> Move:
        return Move(self._no_queues, None, result, name)

    def _take(self, num_bytes: int, what: str, crosses_link: bool = False) -> Slot:
        """Carves a slot of HOST memory; if need be, waits for write-backs to give memory back.
        Raises BudgetError."""
        while True:
            try:
                return self.arena.take(num_bytes, what, crosses_link)
            except BudgetError:
                if not self._await_some():
                    raise

    def _await_some(self) -> bool:
        """Waits until a write-back in flight has ended; False when no write-back could free
        memory."""
        carved = self.arena.carved_bytes
        with self._lock:
            writes = self._under_way.unfinished(is_write=True)
        if writes and self.arena.carved_bytes >= carved:
            wait_for_any(writes)  # whichever path is faster
        return bool(writes) or self.arena.carved_bytes < carved

    def _let_go(self, freeze: Freeze) -> None:
        for home in self._frozen.pop(freeze.number, ()):
            home.thaw(freeze.number)

    def _end_writes(self, writes: Sequence[Move]) -> None:
        """Waits for writes and raises the first error among them; a later call does not raise it
        again."""
        errors = [move.outcome() for move in writes]
        with self._lock:
            self._under_way.forget(writes)
        for error in errors:
            if error is not None:
                raise error

    def end_transfers(self) -> None:
        """Blocks until the kernel has no transfer of the store's moves, also one that an interrupt
        has left without a move.

        Raises no OSError: each move keeps its answer.
        """
        if self._held.open_queues is not None:
            self._held.open_queues.end_all()

    def _end_queues(self) -> None:
        """Waits for every transfer and closes the queues; the next transfer opens new ones."""
        while True:
            with self._lock:
                if not (moves := self._under_way.unfinished()):
                    self._held.end_queues()
                    return
            for move in moves:
                move.outcome()
