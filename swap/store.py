"""TensorStore: named tensors that rest in a home tier and are fetched before use and released after.

    with TensorStore(paths=["/mnt/nvme0"], host_bytes=2 << 30) as store:
        store.put("layers.3", weights, home=Tier.NVME)
        move = store.fetch("layers.3")                 # starts, returns at once
        weights = move.wait()                          # the bytes, in HOST memory
        store.release("layers.3", dirty=True)          # starts the write-back

What an entry goes through is drawn in entry.py. An entry whose home is HOST is always present: fetching it hands out the
home itself. Callers with buffers of their own (the tile pipeline) use `read` and `write` on byte ranges instead, and look
after the order themselves, and `read_blocks` to fetch many small blocks at once. The store knows no module, gradient, rank
or optimizer.

On several paths entries are dealt by weight (path_weights.py), each path has a queue of its own (queues.py), and one that is
slow, full or failing leaves the others as they are. After any transfer error the store goes on: what could not be written
is LOST and says so when it is fetched, everything else is as it was.

Two kinds of lock: a move's, held while a thread waits for it, and the store's, held for moments and taken last. The store
never waits for a move while it holds its own.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Sequence
from types import TracebackType

import numpy as np
import numpy.typing as npt
import torch

from tiermem.swap.arena import Arena, BudgetError, Slot
from tiermem.swap.entry import Entry, EntryState
from tiermem.swap.files import Files
from tiermem.swap.held import Held
from tiermem.swap.move import Move, wait_for_any
from tiermem.swap.native import BACKGROUND, NORMAL, READ, WRITE, Fault, Op
from tiermem.swap.path_weights import weigh
from tiermem.swap.paths import AnyPath, as_paths
from tiermem.swap.queues import Queues, Transfers
from tiermem.swap.ranges import blocks_of, extent_of, range_of
from tiermem.swap.record import Recorder
from tiermem.swap.settings import IoSettings
from tiermem.swap.stats import PathStats, StoreStats
from tiermem.swap.sums import Check, Sums
from tiermem.swap.tier import Tier
from tiermem.swap.under_way import UnderWay

__all__ = ["PathStats", "StoreStats", "TensorStore"]


class TensorStore:
    """Tensors at rest on HOST and NVME, moved by one queue for each path.

    Args:
        paths: folders on NVMe file systems, one or several; empty when nothing rests on NVME. Several paths without weights
            are measured first, which blocks for a moment.
        host_bytes: budget of HOST memory; never exceeded, refused with the arithmetic.
        io: engine, block size and depth of each path's queue.
        disk_bytes: most bytes on all paths together.
        pin: register HOST memory with the GPU driver, where there is a GPU.
        faults: lies for the fault-injecting engine, for tests.

    The store's files go with it when it is closed; nothing else on the paths is touched. Safe to call from several
    threads; a forked child may neither use nor delete it.

    Raises:
        ValueError: host_bytes is not positive, a path is listed twice, or only some paths have weights.
        OSError: a path is missing, not writable or too full.
    """

    def __init__(
        self,
        paths: AnyPath | Sequence[AnyPath] = (),
        host_bytes: int = 1 << 30,
        io: IoSettings | None = None,
        disk_bytes: int | None = None,
        pin: bool = True,
        faults: Sequence[Fault] = (),
    ) -> None:
        self.recorder = Recorder()
        self.sums = Sums()
        self._entries: dict[str, Entry] = {}
        self._under_way = UnderWay()  # and writes that failed, until settle() or close() raises why
        self._lock = threading.RLock()  # guards the entries and everything above
        self._owner = os.getpid()
        self.arena = Arena(host_bytes, pin)
        io = io or IoSettings()
        try:
            self._files = _open_files(paths, disk_bytes, io)
        except BaseException:
            self.arena.close()
            raise
        self._held = Held(self.arena, self._files, io, faults)
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
        """Preallocates NVME space for what will be reserved, dealt over the paths by weight within their caps.

        Raises OSError (ENOSPC) with the arithmetic of what is too small, and then nothing of it is taken.
        """
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
            self.sums.forget(name)
            touching = self._under_way.touching(entry)
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
            blocks = blocks_of(entry, self._files.fd(extent_of(entry)), offsets, block_bytes, into)
            return self._start(() if blocks is None else blocks, into, (entry,), False, title or name, priority)

    # ---- the store as a whole ---------------------------------------------------------------------------------------

    @property
    def queues(self) -> Queues:
        """The queues, one per path; opened by the first transfer with the memory carved so far registered. Raises OSError."""
        self._check_usable()
        with self._lock:
            return self._held.queues()

    def settle(self) -> None:
        """Waits for every write-back, and raises the first error among them; registers memory carved since."""
        self._check_usable()
        with self._lock:
            writes = self._under_way.writes()
        errors = [_error_of(move) for move in writes]
        with self._lock:
            self._under_way.forget(writes)
        if self.arena.region[1] > self._held.registered_bytes:
            self._end_queues()
        for error in errors:
            if error is not None:
                raise error

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

    def close(self) -> None:
        """Ends every transfer, frees memory and removes the store's files. Raises the first error of a write-back.

        Calling it twice does nothing; nor does calling it in a forked child.
        """
        if os.getpid() != self._owner or self._finalizer.detach() is None:
            return
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
        """Waits until a write-back under way has ended; False when there is none whose end could free memory."""
        carved = self.arena.carved_bytes
        with self._lock:
            writes = self._under_way.unfinished(is_write=True)
        if writes and self.arena.carved_bytes >= carved:
            wait_for_any([[move] for move in writes])  # whichever path is faster
        return bool(writes) or self.arena.carved_bytes < carved

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
            ops = self._ops(READ, entry, 0, slot.tensor[: entry.padded_bytes])
            tensor = entry.tensor(slot)
            check = self.sums.check_of(
                [(entry.name, 0, slot.tensor[: entry.padded_bytes])], ops, self._files.by_descriptor
            )
            move = Move(queues, ops, tensor, entry.name, self.recorder, priority, entry.leaving, came, check)
        except BaseException:
            if owns:
                self.arena.give_back(slot)
            raise
        entry.come(move, slot, owns)
        self._under_way.add(move, (entry,), is_write=False)
        return move

    def _write_back(self, entry: Entry) -> Move:
        slot, owns = entry.slot, entry.owns_slot
        assert slot is not None

        def left(arrived: bool) -> None:
            with self._lock:
                entry.end_leaving(arrived)
                if owns:
                    self.arena.give_back(slot)

        data = slot.tensor[: entry.padded_bytes]
        ops = self._ops(WRITE, entry, 0, data)
        self.sums.keep(self.sums.of_write([(entry.name, 0, data)]))
        move = Move(self.queues, ops, slot, entry.name, self.recorder, BACKGROUND, on_end=left)
        entry.leave(move)
        self._under_way.add(move, (entry,), is_write=True)
        return move

    def _transfer(self, kind: int, ranges: Sequence[tuple[str, int, torch.Tensor]], name: str, priority: int) -> Move:
        self._check_usable()
        written = self.sums.of_write(ranges) if kind == WRITE else []
        with self._lock:
            entries = tuple(self._entries[entry_name] for entry_name, _, _ in ranges)
            ops: list[Op] = []
            for entry, (_, offset, buffer) in zip(entries, ranges, strict=True):
                ops += self._ops(kind, entry, offset, buffer)
            self.sums.keep(written)
            check = self.sums.check_of(ranges, ops, self._files.by_descriptor) if kind == READ else None
            buffers = [buffer for _, _, buffer in ranges]
            return self._start(ops, buffers, entries, kind == WRITE, name, priority, check)

    def _start(
        self,
        ops: Transfers,
        buffers: object,
        entries: tuple[Entry, ...],
        is_write: bool,
        name: str,
        priority: int,
        check: Check | None = None,
    ) -> Move:
        if not ops:
            return self._nothing_to_move(buffers, name)
        move = Move(self.queues, ops, buffers, name, self.recorder, priority, check=check)
        self._under_way.add(move, entries, is_write)
        return move

    def _ops(self, kind: int, entry: Entry, offset: int, buffer: torch.Tensor) -> list[Op]:
        extent = extent_of(entry)
        if kind == WRITE:
            self._files.check_whole(extent)
        return range_of(kind, entry, self._files.fd(extent), offset, buffer)

    def _nothing_to_move(self, result: object, name: str) -> Move:
        return Move(_NO_QUEUES, (), result, name, self.recorder)

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


def _open_files(paths: AnyPath | Sequence[AnyPath], disk_bytes: int | None, io: IoSettings) -> Files:
    """The files of all paths, which are weighed once they are known to be usable."""
    known = as_paths(paths)
    files = Files(known, disk_bytes)
    try:
        files.reweigh(weigh(known, io))
    except BaseException:
        files.close(keep=False)
        raise
    return files


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
