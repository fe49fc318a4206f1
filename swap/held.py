"""Held: what a store holds of the system: memory, files, queues.

It is apart from the store so that whoever forgets the store leaves this to be closed (`weakref.finalize`), in the one order
that is safe: queues, then memory, then files. The store's lock guards it.
"""

from __future__ import annotations

from collections.abc import Sequence

from tiermem.swap.arena import Arena
from tiermem.swap.files import Files
from tiermem.swap.native import Counters, Fault
from tiermem.swap.path_weights import weigh
from tiermem.swap.paths import AnyPath, as_paths
from tiermem.swap.queues import Queues, add_counters
from tiermem.swap.run_folder import RunName
from tiermem.swap.settings import IoSettings
from tiermem.swap.stats import PathStats


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
