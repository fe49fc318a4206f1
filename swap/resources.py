"""Resources of a store: its moves in flight, its freezes, and its memory, files and queues."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from tiermem.swap.arena import Arena, BudgetError, Slot
from tiermem.swap.entry import Entry, Freeze, NvmeHome
from tiermem.swap.files import Files
from tiermem.swap.move import Move, wait_for_any
from tiermem.swap.native import Counters, Fault
from tiermem.swap.passes import weigh
from tiermem.swap.paths import AnyPath, as_paths
from tiermem.swap.queue import IoSettings, PathStats, Queues, add_counters
from tiermem.swap.run_folder import RunName

# ---- UnderWay: the moves of a store that have not ended, and the writes that failed until somebody has been told -----
#
# Keeps moves, and with them their buffers, alive that nobody else looks after. The store's lock guards it; nothing here
# waits for a move.


class UnderWay:
    """Empty at first; looking at it forgets what is of no interest any more."""

    def __init__(self) -> None:
        self._items: list[_Item] = []

    def add(self, move: Move, entries: tuple[Entry, ...], is_write: bool) -> None:
        """Remembers a move until it has ended, and a failed write until `forget`."""
        self._items = [item for item in self._items if item.is_of_interest()]
        self._items.append(_Item(move, entries, is_write))

    def touching(self, entry: Entry) -> list[Move]:
        """Moves that read or write an entry."""
        return [item.move for item in self._items if entry in item.entries]

    def writes(self) -> list[Move]:
        """Writes that go on, have failed, or have ended a moment ago."""
        return [item.move for item in self._items if item.is_write]

    def unfinished(self, is_write: bool | None = None) -> list[Move]:
        """Moves that go on, of both kinds or of one."""
        chosen = (item for item in self._items if is_write is None or item.is_write == is_write)
        return [item.move for item in chosen if not item.move.is_done()]

    def forget(self, moves: Sequence[Move]) -> None:
        """Drops moves whose end has been told."""
        told = set(map(id, moves))
        self._items = [item for item in self._items if id(item.move) not in told]

    def clear(self) -> None:
        """Forgets everything."""
        self._items.clear()


class _Item(NamedTuple):
    """A move and what it is about."""

    move: Move
    entries: tuple[Entry, ...]
    is_write: bool

    def is_of_interest(self) -> bool:
        """Whether it goes on, or is a failed write."""
        return not self.move.is_done() or (self.is_write and self.move.has_failed and not self.move.was_cancelled)


# ---- Freezes: what every freeze of a store holds until it is thawed, also of entries that were dropped since ---------
#
# The store's lock guards it. What a freeze is to those who have asked for it: entry.py.


class Freezes:
    """None at first."""

    def __init__(self) -> None:
        self._homes: dict[int, list[NvmeHome]] = {}  # by the freeze's number
        self._numbers = itertools.count(1)

    def hold(self, entries: Sequence[Entry], files: Sequence[Path]) -> Freeze:
        """Holds what is current of entries that rest on NVME; `files` are the segments of the paths."""
        number = next(self._numbers)
        homes = {entry.name: entry.nvme for entry in entries if entry.nvme is not None}
        parts = {name: home.freeze(number) for name, home in homes.items()}
        self._homes[number] = list(homes.values())
        return Freeze(number, tuple(files), parts)

    def let_go(self, freeze: Freeze) -> None:
        """Holds nothing for it any more. Twice does nothing."""
        for home in self._homes.pop(freeze.number, ()):
            home.thaw(freeze.number)

    def clear(self) -> None:
        """Forgets everything: the files are closed."""
        self._homes.clear()


# ---- Held: what a store holds of the system: memory, files, queues ---------------------------------------------------
#
# It is apart from the store so that whoever forgets the store leaves this to be closed (`weakref.finalize`), in the one
# order that is safe: queues, then memory, then files. The store's lock guards it.


class Held:
    """Memory and files from the start, queues from the first transfer on.

    Args:
        arena: closed with this.
        files: closed with this, and removed unless `keeps_files` is set.
        io: of each path's queue.
        faults: lies for tests.
    """

    def __init__(self, arena: Arena, files: Files, io: IoSettings, faults: Sequence[Fault]) -> None:
        self.arena = arena
        self.files = files
        self.open_queues: Queues | None = None
        self.registered_bytes = 0  # of the arena, with the queues
        self.is_closed = False
        self.keeps_files = False  # their owner's wish, also when it forgets to close
        self._io = io
        self._faults = tuple(faults)
        self._past = [add_counters([]) for _ in files.segments]  # of queues that were closed

    @classmethod
    def take(
        cls,
        paths: AnyPath | Sequence[AnyPath],
        host_bytes: int,
        disk_bytes: int | None,
        run: RunName,
        io: IoSettings,
        link_bytes: int,
        faults: Sequence[Fault],
    ) -> Held:
        """Takes memory and files as TensorStore is asked for them. Raises OSError and ValueError; then nothing is held."""
        arena, known = Arena(host_bytes, link_bytes), as_paths(paths)
        try:
            files = Files(known, disk_bytes, run)
            try:
                files.reweigh(weigh(known, io))  # once they are known to be usable
            except BaseException:
                files.close(keep=False)
                raise
        except BaseException:
            arena.close()
            raise
        return cls(arena, files, io, faults)

    def queues(self) -> Queues:
        """The queues; opened now if they are not, with the memory carved so far registered. Raises OSError."""
        if self.open_queues is None:
            region = self.arena.region
            regions = [region] if region[1] else []
            self.open_queues = Queues(self.files.by_descriptor(), self._io, regions, self._faults)
            self.registered_bytes = region[1]
        return self.open_queues

    def end_queues(self) -> None:
        """Closes the queues, which ends what was submitted; the next transfer opens others."""
        queues, self.open_queues, self.registered_bytes = self.open_queues, None, 0
        if queues is None:
            return
        try:
            self._past = _sums(self._past, queues.counters_by_path())
        finally:
            queues.close()

    def path_stats(self) -> tuple[PathStats, ...]:
        """What each path holds and has moved, through queues that were closed as well."""
        counts = self._past if self.open_queues is None else _sums(self._past, self.open_queues.counters_by_path())
        return tuple(
            PathStats(s.facts.path, s.weight, count.read_bytes, count.written_bytes, s.used_bytes)
            for s, count in zip(self.files.segments, counts, strict=True)
        )

    def close(self) -> None:
        """Closes the queues first: no transfer may outlive its memory or its file."""
        self.is_closed = True
        try:
            self.end_queues()
        finally:
            try:
                self.arena.close()
            finally:
                self.files.close(self.keeps_files)


def _sums(one: list[Counters], other: list[Counters]) -> list[Counters]:
    return [add_counters(pair) for pair in zip(one, other, strict=True)]


# ---- HostMemory: slots of a store's arena, for which write-backs under way are waited for when the budget is full ----
#
# The store's lock is held for moments only, never while a move is waited for.


class HostMemory:
    """The arena of a store, the moves that may give memory back to it, and the lock that guards them."""

    def __init__(self, arena: Arena, under_way: UnderWay, lock: threading.RLock) -> None:
        self._arena = arena
        self._under_way = under_way
        self._lock = lock

    def take(self, num_bytes: int, what: str, crosses_link: bool = False) -> Slot:
        """A slot, when need be after write-backs have given theirs back. Raises BudgetError."""
        while True:
            try:
                return self._arena.take(num_bytes, what, crosses_link)
            except BudgetError:
                if not self.await_some():
                    raise

    def await_some(self) -> bool:
        """Waits until a write-back under way has ended; False when there is none whose end could free memory."""
        carved = self._arena.carved_bytes
        with self._lock:
            writes = self._under_way.unfinished(is_write=True)
        if writes and self._arena.carved_bytes >= carved:
            wait_for_any([[move] for move in writes])  # whichever path is faster
        return bool(writes) or self._arena.carved_bytes < carved
