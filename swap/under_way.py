"""UnderWay: the moves of a store that have not ended, and the writes that failed until somebody has been told.

Keeps moves, and with them their buffers, alive that nobody else looks after. The store's lock guards it; nothing here waits
for a move.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from tiermem.swap.entry import Entry
from tiermem.swap.move import Move


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
