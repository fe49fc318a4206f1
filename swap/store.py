"""TensorStore: named tensors that rest in a home tier and are fetched before use and released after.

    with TensorStore(paths=["/mnt/nvme0"], host_bytes=2 << 30) as store:
        store.put("layers.3", weights, home=Tier.NVME)
        move = store.fetch("layers.3")                 # starts, returns at once
        weights = move.wait()                          # the bytes, in HOST memory
        store.release("layers.3", dirty=True)          # starts the write-back

What an entry goes through is drawn in entry.py. An entry whose home is HOST is always present: fetching it hands out the
home itself. Callers with buffers of their own (the tile pipeline) use `read` and `write` on byte ranges instead, and look
after the order themselves. The store knows no module, gradient, rank or optimizer.

Two kinds of lock: a move's, held while a thread waits for it, and the store's, held for moments and taken last. The store
never waits for a move while it holds its own.
"""

from __future__ import annotations

import dataclasses
import os
import threading
import weakref
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import NamedTuple

import torch

from tiermem.swap.arena import Arena, BudgetError, Slot
from tiermem.swap.entry import Entry, EntryState
from tiermem.swap.files import ALIGNMENT, Files, IoSettings
from tiermem.swap.move import Move
from tiermem.swap.native import BACKGROUND, NORMAL, READ, WRITE, Counters, Fault, Op, Queue
from tiermem.swap.record import Recorder
from tiermem.swap.tier import Tier


@dataclasses.dataclass(frozen=True)
class StoreStats:
    """Totals of a store, in bytes and seconds."""

    nvme_read_bytes: int
    nvme_written_bytes: int
    nvme_bytes: int  # extents in use on all paths
    host_bytes: int  # carved out of the arena now
    host_peak_bytes: int
    wait_s: float  # spent waiting for transfers
    engine: str
    engine_why: str


class TensorStore:
    """Tensors at rest on HOST and NVME, moved by one queue.

    Args:
        paths: folders on NVMe file systems; empty when nothing rests on NVME.
        host_bytes: budget of HOST memory; never exceeded, refused with the arithmetic.
        io: engine, block size and depth of the queue.
        disk_bytes: most bytes on all paths together.
        pin: register HOST memory with the GPU driver, where there is a GPU.
        faults: lies for the fault-injecting engine, for tests.

    The store's files go with it when it is closed; nothing else on the paths is touched. Safe to call from several
    threads; a forked child may neither use nor delete it.

    Raises:
        ValueError: host_bytes is not positive, or a path is listed twice.
        OSError: a path is missing, not writable or too full.
    """

    def __init__(
        self,
        paths: Sequence[str | os.PathLike[str]] = (),
        host_bytes: int = 1 << 30,
        io: IoSettings | None = None,
        disk_bytes: int | None = None,
        pin: bool = True,
        faults: Sequence[Fault] = (),
    ) -> None:
        self.recorder = Recorder()
        self._io = io or IoSettings()
        self._faults = tuple(faults)
        self._entries: dict[str, Entry] = {}
        self._under_way: list[_UnderWay] = []  # and writes that failed, until settle() or close() raises why
        self._past_counts = Counters(0, 0, 0, 0, 0, 0)  # of queues that were closed
        self._lock = threading.RLock()  # guards the entries and everything above
        self._owner = os.getpid()
        self.arena = Arena(host_bytes, pin)
        try:
            self._files = Files([Path(p) for p in paths], disk_bytes)
        except BaseException:
            self.arena.close()
            raise
        self._held = _Held(self.arena, self._files)
        self._finalizer = weakref.finalize(self, _close_forgotten, os.getpid(), self._held)

    def __enter__(self) -> TensorStore:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __contains__(self, name: str) -> bool:
        return name in self._entries

    # ---- entries -------------------------------------------------------------------------------------------------

    def reserve(self, name: str, shape: Sequence[int], dtype: torch.dtype, home: Tier) -> None:
        """Makes room for a tensor at its home, content undefined. Raises BudgetError or OSError (ENOSPC)."""
        self._check_usable()
        if home is Tier.DEVICE:
            raise ValueError(f"{name!r}: the store keeps HOST and NVME; DEVICE memory belongs to torch")
        entry = Entry(name, home, dtype, shape)
        with self._lock:
            if name in self._entries:
                raise ValueError(f"{name!r} is in the store already")
            if home is Tier.NVME:
                entry.extent = self._files.allocate(entry.num_bytes)
            self._entries[name] = entry
        if home is Tier.HOST:
            try:
                entry.occupy(self._carve(entry.num_bytes, f"{name!r}, resting on HOST,"))
            except BaseException:
                self.drop(name)
                raise

    def reserve_disk(self, num_bytes: int) -> None:
        """Preallocates NVME space for what will be reserved. Raises OSError (ENOSPC), needed against free per path."""
        self._check_usable()
        with self._lock:
            self._files.reserve(num_bytes)

    def put(self, name: str, tensor: torch.Tensor, home: Tier) -> Move:
        """Copies a tensor to its home. The copy out of `tensor` is done on return; the write goes on behind.

        Waits for write-backs when the budget has no room for the copy. Raises BudgetError or OSError, and then nothing
        of that name is in the store.
        """
        self.reserve(name, tensor.shape, tensor.dtype, home)
        entry = self._entries[name]
        try:
            if home is Tier.NVME:
                entry.occupy(self._carve(entry.padded_bytes, f"{name!r}, on its way to NVME,"))
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
                if not self._await_memory():
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
            if entry.home is Tier.HOST:
                return self._nothing_to_move(None, name) if dirty else None
            if dirty:
                return self._write_back(entry)
            slot, owns = entry.slot, entry.owns_slot
            entry.rest()
            if owns and slot is not None:
                self.arena.give_back(slot)
            return None

    def view(self, name: str) -> torch.Tensor:
        """The home itself of a tensor that rests on HOST; changes to it need no write-back."""
        self._check_usable()
        entry = self._entries[name]
        if entry.home is not Tier.HOST or entry.slot is None:
            raise RuntimeError(f"{name!r} rests on {entry.home.name}; only HOST can be looked at in place")
        return entry.tensor(entry.slot)

    def is_present(self, name: str) -> bool:
        """Whether a tensor is known to occupy HOST memory and may be released."""
        return self._entries[name].state is EntryState.PRESENT

    def home_of(self, name: str) -> Tier:
        """The tier a tensor returns to."""
        return self._entries[name].home

    def drop(self, name: str) -> None:
        """Forgets a tensor and frees its home. Its own transfers are cancelled, ranges under way are waited for."""
        self._check_usable()
        with self._lock:
            entry = self._entries.pop(name)
            touching = [item.move for item in self._under_way if entry in item.entries]
        for move in touching:
            if move in (entry.coming, entry.leaving):
                move.cancel()
            else:
                _error_of(move)  # raised by its own wait, and by settle
        with self._lock:
            slot, entry.slot = entry.slot, None
            if slot is not None and entry.owns_slot:
                self.arena.give_back(slot)
            if entry.extent is not None:
                self._files.free(entry.extent)

    # ---- byte ranges, for callers with buffers of their own ---------------------------------------------------------

    def read(self, ranges: Sequence[tuple[str, int, torch.Tensor]], name: str, priority: int = NORMAL) -> Move:
        """Starts filling buffers from entries that rest on NVME: (entry, byte offset, uint8 buffer) each, one Move.

        Offsets, lengths and addresses are multiples of 4096. The buffers belong to the Move until it has ended.
        """
        return self._transfer(READ, ranges, name, priority)

    def write(self, ranges: Sequence[tuple[str, int, torch.Tensor]], name: str, priority: int = BACKGROUND) -> Move:
        """Starts writing buffers into entries that rest on NVME; as `read`."""
        return self._transfer(WRITE, ranges, name, priority)

    # ---- the store as a whole ---------------------------------------------------------------------------------------

    @property
    def queue(self) -> Queue:
        """The queue; opened by the first transfer with the memory carved so far registered. Raises OSError."""
        self._check_usable()
        with self._lock:
            if self._held.queue is None:
                io, region = self._io, self.arena.region
                regions = [region] if region[1] else []
                path_of = self._files.path_of
                self._held.registered_bytes = region[1]
                self._held.queue = Queue(
                    io.engine, io.depth, io.block_bytes, io.threads, regions, path_of, self._faults
                )
            return self._held.queue

    def settle(self) -> None:
        """Waits for every write-back, and raises the first error among them; registers memory carved since."""
        self._check_usable()
        with self._lock:
            writes = [item for item in self._under_way if item.is_write]
        errors = [_error_of(item.move) for item in writes]
        with self._lock:
            self._under_way = [item for item in self._under_way if item not in writes]
        if self.arena.region[1] > self._held.registered_bytes:
            self._end_queue()
        for error in errors:
            if error is not None:
                raise error

    def stats(self) -> StoreStats:
        """Totals so far; bytes are those of the kernel's completions."""
        with self._lock:
            queue = self._held.queue
            counters = queue.counters() if queue is not None else Counters(0, 0, 0, 0, 0, 0)
        return StoreStats(
            nvme_read_bytes=self._past_counts.read_bytes + counters.read_bytes,
            nvme_written_bytes=self._past_counts.written_bytes + counters.written_bytes,
            nvme_bytes=self._files.used_bytes,
            host_bytes=self.arena.carved_bytes,
            host_peak_bytes=self.arena.peak_bytes,
            wait_s=self.recorder.wait_s,
            engine=queue.engine if queue else "none yet",
            engine_why=queue.why if queue else "no transfer has been made yet",
        )

    def close(self) -> None:
        """Ends every transfer, frees memory and removes the store's files. Raises the first error of a write-back.

        Calling it twice does nothing; nor does calling it in a forked child.
        """
        if os.getpid() != self._owner or self._finalizer.detach() is None:
            return
        try:
            for item in list(self._under_way):
                if not item.is_write:
                    item.move.cancel()
            try:
                self.settle()
            finally:
                self._end_queue()
        finally:
            self._entries.clear()
            self._under_way.clear()
            self._held.close()

    # ---- inside --------------------------------------------------------------------------------------------------------

    def _check_usable(self) -> None:
        if os.getpid() != self._owner:
            raise RuntimeError("this store belongs to the process that opened it; a forked child may not use it")
        if self._held.is_closed:
            raise RuntimeError("this store is closed")

    def _carve(self, num_bytes: int, what: str) -> Slot:
        """HOST memory, when need be after write-backs have given theirs back. Raises BudgetError."""
        while True:
            try:
                return self.arena.take(num_bytes, what)
            except BudgetError:
                if not self._await_memory():
                    raise

    def _await_memory(self) -> bool:
        """Waits for the oldest write-back under way; False when there is none whose end could free memory."""
        carved = self.arena.carved_bytes
        with self._lock:
            writes = [item.move for item in self._under_way if item.is_write and not item.move.is_done()]
        if writes:
            _error_of(writes[0])
        return bool(writes) or self.arena.carved_bytes < carved

    def _fetch(self, entry: Entry, into: Slot | None, priority: int) -> Move:
        if entry.state is EntryState.PRESENT:
            assert entry.slot is not None
            return self._nothing_to_move(entry.tensor(entry.slot), entry.name)
        if entry.coming is not None:
            return entry.coming
        if into is not None and into.num_bytes < entry.padded_bytes:
            raise ValueError(f"{entry.name!r} needs a slot of {entry.padded_bytes} bytes; it has {into.num_bytes}")
        owns, queue = into is None, self.queue
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
            ops = self._ops(READ, entry, 0, slot.tensor[: entry.padded_bytes])
            tensor = entry.tensor(slot)
            move = Move(queue, ops, tensor, entry.name, self.recorder, priority, entry.leaving, came)
        except BaseException:
            if owns:
                self.arena.give_back(slot)
            raise
        entry.come(move, slot, owns)
        self._watch(move, (entry,), is_write=False)
        return move

    def _write_back(self, entry: Entry) -> Move:
        slot, owns = entry.slot, entry.owns_slot
        assert slot is not None

        def left(arrived: bool) -> None:
            with self._lock:
                entry.end_leaving(arrived)
                if owns:
                    self.arena.give_back(slot)

        ops = self._ops(WRITE, entry, 0, slot.tensor[: entry.padded_bytes])
        move = Move(self.queue, ops, slot, entry.name, self.recorder, BACKGROUND, on_end=left)
        entry.leave(move)
        self._watch(move, (entry,), is_write=True)
        return move

    def _transfer(self, kind: int, ranges: Sequence[tuple[str, int, torch.Tensor]], name: str, priority: int) -> Move:
        self._check_usable()
        with self._lock:
            entries = tuple(self._entries[entry_name] for entry_name, _, _ in ranges)
            ops: list[Op] = []
            for entry, (_, offset, buffer) in zip(entries, ranges, strict=True):
                ops += self._ops(kind, entry, offset, buffer)
            buffers = [buffer for _, _, buffer in ranges]
            if not ops:
                return self._nothing_to_move(buffers, name)
            move = Move(self.queue, ops, buffers, name, self.recorder, priority)
            self._watch(move, entries, is_write=kind == WRITE)
            return move

    def _ops(self, kind: int, entry: Entry, offset: int, buffer: torch.Tensor) -> list[Op]:
        extent, length, address = entry.extent, buffer.numel(), buffer.data_ptr()
        if extent is None:
            raise RuntimeError(f"{entry.name!r} rests on {entry.home.name}: there is no file to read or write")
        if offset < 0 or offset + length > extent.num_bytes:
            raise ValueError(
                f"bytes {offset} to {offset + length} lie outside {entry.name!r} ({extent.num_bytes} bytes)"
            )
        if buffer.dtype != torch.uint8 or not buffer.is_contiguous():
            raise ValueError(f"{entry.name!r}: a buffer is a contiguous uint8 tensor, not {buffer.dtype}")
        if offset % ALIGNMENT or length % ALIGNMENT or address % ALIGNMENT:
            raise ValueError(
                f"{entry.name!r}: offset {offset}, length {length} and address {address:#x} must be multiples of "
                f"{ALIGNMENT}; odd ranges pass through a Bounce"
            )
        if not length:
            return []
        return [Op(kind, self._files.fd(extent), address, length, extent.offset + offset)]

    def _nothing_to_move(self, result: object, name: str) -> Move:
        return Move(_NO_QUEUE, (), result, name, self.recorder)

    def _watch(self, move: Move, entries: tuple[Entry, ...], is_write: bool) -> None:
        """Remembers a move until it has ended, and a failed write until its error has been raised here."""
        self._under_way = [item for item in self._under_way if item.is_of_interest()]
        self._under_way.append(_UnderWay(move, entries, is_write))

    def _end_queue(self) -> None:
        """Lets every transfer end and closes the queue; the next transfer opens another."""
        while True:
            with self._lock:
                moves = [item.move for item in self._under_way if not item.move.is_done()]
                if not moves:
                    self._past_counts = self._held.end_queue(self._past_counts)
                    return
            for move in moves:
                _error_of(move)


class _UnderWay(NamedTuple):
    """A move and what it is about: keeps buffers alive that nobody else looks after."""

    move: Move
    entries: tuple[Entry, ...]
    is_write: bool

    def is_of_interest(self) -> bool:
        """Whether it goes on, or is a failed write."""
        return not self.move.is_done() or (self.is_write and self.move.has_failed and not self.move.was_cancelled)


class _Held:
    """What a store holds of the system, apart from the store: whoever forgets the store leaves this to be closed."""

    def __init__(self, arena: Arena, files: Files) -> None:
        self.arena = arena
        self.files = files
        self.queue: Queue | None = None  # opened by the first transfer, when the arena's pools are carved
        self.registered_bytes = 0  # of the arena, with the queue
        self.is_closed = False

    def end_queue(self, counts: Counters) -> Counters:
        """Closes the queue, which ends what was submitted; adds its counters to those given."""
        queue, self.queue, self.registered_bytes = self.queue, None, 0
        if queue is None:
            return counts
        try:
            return Counters(*(a + b for a, b in zip(counts, queue.counters(), strict=True)))
        finally:
            queue.close()

    def close(self) -> None:
        """Closes the queue first: no transfer may outlive its memory or its file."""
        self.is_closed = True
        try:
            self.end_queue(Counters(0, 0, 0, 0, 0, 0))
        finally:
            try:
                self.arena.close()
            finally:
                self.files.close(keep=False)


_NO_QUEUE: Queue = object()  # type: ignore[assignment]  # of moves that have nothing to move


def _error_of(move: Move) -> OSError | None:
    try:
        move.wait()
    except OSError as error:
        return None if move.was_cancelled else error
    return None


def _close_forgotten(owner: int, held: _Held) -> None:
    """Ends the transfers and removes the files of a store that nobody closed; never in a forked child."""
    if os.getpid() == owner:
        held.close()
