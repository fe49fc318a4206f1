"""Resources of a store: its memory, files and queues, and its moves in flight."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Sequence

from tiermem.swap.base.native import Counters, Fault, IoSettings, check_process
from tiermem.swap.base.ranges import ByteRange
from tiermem.swap.base.tile_program import TileProgram, first_bytes
from tiermem.swap.disk.files import Files
from tiermem.swap.disk.passes import weigh
from tiermem.swap.disk.paths import AnyPath, as_paths
from tiermem.swap.disk.queue import PathStats, Queues, Recorder, StoreStats, add_counters
from tiermem.swap.disk.run_folder import RunName
from tiermem.swap.memory.arena import Arena
from tiermem.swap.store.entry import Entry
from tiermem.swap.store.move import Move


class Resources:
    """The system resources of a store: memory and files from the start, queues from the first
    transfer on.

    It is a separate object so that `weakref.finalize` can close it when the program drops the store
    without closing it. The store's lock guards it. The arguments are those of TensorStore. Raises
    OSError and ValueError; then it holds nothing.
    """

    def __init__(
        self,
        paths: AnyPath | Sequence[AnyPath],
        host_bytes: int,
        disk_bytes: int | None,
        run: RunName,
        io: IoSettings,
        link_bytes: int,
        faults: Sequence[Fault],
        recorder: Recorder,
    ) -> None:
        self.is_closed = True  # nothing is open yet
        self._owner = os.getpid()
        self.open_queues: Queues | None = None
        self.programs: list[TileProgram] = []  # they use the queues and the arena
        self.registered: list[ByteRange] = []  # of the arena, registered with the queues
        self.keeps_files = False  # whether `close` leaves the files
        self.files = Files(())
        self.arena, known = Arena(host_bytes, link_bytes), as_paths(paths)
        self.is_closed = False
        try:
            self.files = Files(known, disk_bytes, run)
            self.files.weights = weigh(known, io)  # after Files has checked the folders
        except BaseException:
            self.close()
            raise
        self._io = io
        self._faults = tuple(faults)
        self._recorder = recorder
        # counters of closed queues, per path
        self._past = [add_counters([]) for _ in self.files.segments]

    def __del__(self) -> None:
        """Closes them, if an interrupt came before their store could."""
        if not self.is_closed and os.getpid() == self._owner:
            self.close()

    def check_usable(self) -> None:
        """Raises RuntimeError after `close`, and in a forked child."""
        check_process(self._owner, "this store")
        if self.is_closed:
            raise RuntimeError("this store is closed: what rested in it can be used no more")

    def queues(self) -> Queues:
        """Returns the queues. Opens them first if need be, and registers the memory carved so far.
        Raises OSError."""
        if self.open_queues is None:
            regions = self.arena.regions
            files = self.files.by_descriptor()
            self.open_queues = Queues(files, self._io, regions, self._faults, self._recorder)
            self.registered = regions
        return self.open_queues

    def end_queues(self) -> None:
        """Closes the queues, which ends their transfers. The next transfer opens new queues."""
        queues = self.open_queues
        self.open_queues = None
        self.registered = []
        if queues is None:
            return
        for program in self.programs:
            program.quiet()
        try:
            self._past = self._counters(queues)
        finally:
            queues.close()

    def stats(self) -> StoreStats:
        """Returns bytes held now and bytes moved so far, closed queues included."""
        queues = self.open_queues
        paths = tuple(
            PathStats(s.facts.path, weight, count.read_bytes, count.written_bytes, s.used_bytes)
            for s, weight, count in zip(
                self.files.segments, self.files.weights, self._counters(queues), strict=True
            )
        )
        why = "no transfer has been made yet"
        if queues:
            why = f"{queues.why}, {self.bytes_under_way >> 20} MiB of a step under way"
        return StoreStats(
            nvme_read_bytes=sum(path.read_bytes for path in paths),
            nvme_written_bytes=sum(path.written_bytes for path in paths),
            nvme_bytes=self.files.used_bytes,
            host_bytes=self.arena.carved_bytes,
            host_peak_bytes=self.arena.peak_bytes,
            wait_s=self._recorder.wait_s,
            engine=queues.engine if queues else "none yet",
            engine_why=why,
            paths=paths,
            bytes_under_way=self.bytes_under_way,
        )

    @property
    def bytes_under_way(self) -> int:
        """Most bytes of strips that a step has under way now."""
        return max((each.bytes_under_way for each in self.programs), default=0) or first_bytes()

    def close(self) -> None:
        """Closes programs, queues, memory and files, in this order: no transfer may outlive its
        memory or its file."""
        self.is_closed = True
        # the last one first; an error does not keep the others open
        with contextlib.ExitStack() as closing:
            closing.callback(self.files.close, self.keeps_files)
            closing.callback(self.arena.close)
            closing.callback(self.end_queues)
            for program in self.programs:
                closing.callback(program.close)

    def _counters(self, queues: Queues | None) -> list[Counters]:
        if queues is None:
            return self._past
        return [
            add_counters(pair) for pair in zip(self._past, queues.counters_by_path(), strict=True)
        ]


class UnderWay:
    """The moves of a store that are in flight, and failed writes whose error was not raised yet.

    It keeps moves and their buffers alive. The store's lock guards it. No method waits for a move.
    """

    def __init__(self) -> None:
        # the entries that each move reads or writes
        self._entries: dict[Move, tuple[Entry, ...]] = {}

    def add(self, move: Move, entries: tuple[Entry, ...]) -> None:
        """Keeps a move until it has ended; keeps a failed write until `forget`."""
        self._entries = {each: of for each, of in self._entries.items() if _is_of_interest(each)}
        self._entries[move] = entries

    def touching(self, entry: Entry) -> list[Move]:
        """Moves that read or write an entry."""
        return [move for move, entries in self._entries.items() if entry in entries]

    def writes(self) -> list[Move]:
        """Returns writes in flight, failed writes, and writes that ended since the last `add`."""
        return [move for move in self._entries if move.is_write]

    def unfinished(self, is_write: bool | None = None) -> list[Move]:
        """Returns moves in flight: writes, reads, or with None both."""
        return [
            move
            for move in self._entries
            if is_write in (None, move.is_write) and not move.is_done()
        ]

    def forget(self, moves: Iterable[Move]) -> None:
        """Drops moves; the caller raises their errors."""
        for move in moves:
            self._entries.pop(move, None)

    def clear(self) -> None:
        """Drops all."""
        self._entries.clear()


def _is_of_interest(move: Move) -> bool:
    return not move.is_done() or (move.is_write and move.has_failed and not move.was_cancelled)
