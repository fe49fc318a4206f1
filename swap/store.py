"""TensorStore: named tensors that rest in a home tier and are fetched before use and released after.

    with TensorStore(paths=["/mnt/nvme0"], host_bytes=2 << 30) as store:
        store.put("layers.3", weights, home=Tier.NVME)
        move = store.fetch("layers.3")                 # starts, returns at once
        weights = move.wait()                          # the bytes, in HOST memory
        store.release("layers.3", dirty=True)          # starts the write-back

What an entry goes through is drawn in entry.py. An entry whose home is HOST or DEVICE is always present: fetching it hands out
the home itself. Callers with buffers of their own (the tile pipeline) use byte ranges instead and look after the order
themselves; those, freezes, errors and locks are told in range_store.py. The store knows no module, gradient, rank or
optimizer.
"""

from __future__ import annotations

from types import TracebackType

import torch

from tiermem.swap.arena import BudgetError, Slot
from tiermem.swap.entry import Entry, EntryState
from tiermem.swap.move import Move
from tiermem.swap.native import BACKGROUND, NORMAL
from tiermem.swap.queue import PathStats, StoreStats
from tiermem.swap.range_store import RangeStore
from tiermem.swap.tier import Tier

__all__ = ["PathStats", "StoreStats", "TensorStore"]


class TensorStore(RangeStore):
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

    def __enter__(self) -> TensorStore:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

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
                entry.occupy(self._memory.take(entry.padded_bytes, f"{name!r}, on its way to NVME,"))
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
                if not self._memory.await_some():
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

    # ---- inside --------------------------------------------------------------------------------------------------------

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
            ops = self._read_ops(entry, 0, data)
            check = self.sums.check_of([(entry.name, 0, data)], ops, self._files.by_descriptor)
            move = Move(
                queues, ops, entry.tensor(slot), entry.name, self.recorder, priority, entry.leaving, came, check
            )
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
        summed = self.sums.of_write([(entry.name, 0, data)])
        move = self._write([(entry, 0, data)], slot, entry.name, BACKGROUND, lambda: self.sums.keep(summed), left)
        entry.leave(move)
        return move
