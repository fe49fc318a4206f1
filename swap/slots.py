"""Slots: which of an entry's extents holds each of its bytes now, and which of them a freeze still needs.

    bytes of the entry   0 ......... a ......... b ......... end
    current slot             1           0           1
    held by freezes        0 by 7    0 by 7, 8       -           all of it was frozen by 7, then the middle by 8 alone

    read     goes to the current slot of each piece
    write    goes there too where no freeze holds that slot; elsewhere to the lowest slot that none holds, which then is current
    freeze   holds the current slot of every byte           thaw   lets go of what that freeze alone held

So what a freeze has seen is never written over, writes of a part never copy the rest, and a run that does not freeze stays
in slot 0. A write that failed leaves its slot *lost* there, until those bytes are written again: they must not be frozen.

Plain arithmetic on numbers; it knows no file and no store. Pieces are coalesced, and found by bisection. Its owner's lock
guards it.
"""

from __future__ import annotations

import bisect
import functools
from collections.abc import Callable, Iterable
from typing import NamedTuple


class SlotPart(NamedTuple):
    """Bytes [start, stop) of an entry, in one slot."""

    slot: int
    start: int
    stop: int


class NoSlotError(RuntimeError):
    """A write has nowhere to go: freezes hold every slot of its bytes."""


class Slots:
    """The slots of one entry's bytes; all are in slot 0 and held by nobody at first.

    Args:
        num_bytes: of the entry, at least 1.
        num_slots: extents that it may have.
    """

    def __init__(self, num_bytes: int, num_slots: int) -> None:
        self.num_slots = num_slots
        self._pieces = [_Piece(0, num_bytes, 0, frozenset(), frozenset())]

    def current(self, start: int, stop: int) -> list[SlotPart]:
        """Where bytes [start, stop) are read, in order."""
        return _joined(SlotPart(piece.current, piece.start, piece.stop) for piece in self._within(start, stop))

    def targets(self, start: int, stop: int) -> list[SlotPart]:
        """Where a write of bytes [start, stop) goes; nothing changes yet. Raises NoSlotError."""
        return _joined(SlotPart(self._target(piece), piece.start, piece.stop) for piece in self._within(start, stop))

    def write(self, start: int, stop: int) -> None:
        """The write that `targets` told of is under way: its slots are current."""
        touched = self._within(start, stop)
        if all(self._target(piece) == piece.current and not piece.lost for piece in touched):
            return

        def written(piece: _Piece) -> _Piece:
            slot = self._target(piece)
            return piece._replace(current=slot, lost=piece.lost - {slot})

        self._change(start, stop, written)

    def lose(self, parts: Iterable[SlotPart]) -> None:
        """A write there has failed: what those slots hold is not what was written."""
        for slot, start, stop in parts:
            self._change(start, stop, functools.partial(_losing, slot))

    def lost(self, freeze: int) -> list[SlotPart]:
        """What is lost of that which a freeze holds."""
        return _joined(
            SlotPart(slot, piece.start, piece.stop)
            for piece in self._pieces
            if piece.lost
            for number, slot in sorted(piece.holds)
            if number == freeze and slot in piece.lost
        )

    def freeze(self, freeze: int) -> list[SlotPart]:
        """Holds the current slots of all bytes for a freeze, by its number, and tells them."""
        self._pieces = [
            _Piece(start, stop, current, holds | {(freeze, current)}, lost)
            for start, stop, current, holds, lost in self._pieces
        ]
        return _joined(SlotPart(piece.current, piece.start, piece.stop) for piece in self._pieces)

    def thaw(self, freeze: int) -> None:
        """Lets go of what a freeze holds; of one that holds nothing here, nothing."""
        self._pieces = _coalesced(
            _Piece(start, stop, current, frozenset([hold for hold in holds if hold[0] != freeze]), lost)
            for start, stop, current, holds, lost in self._pieces
        )

    def held(self) -> set[int]:
        """The slots that some freeze holds somewhere."""
        return {slot for piece in self._pieces for _, slot in piece.holds}

    def _target(self, piece: _Piece) -> int:
        held = {slot for _, slot in piece.holds}
        if piece.current not in held:
            return piece.current
        free = next((slot for slot in range(self.num_slots) if slot not in held), None)
        if free is None:
            raise NoSlotError(
                f"bytes {piece.start} to {piece.stop} cannot be written: freezes hold all {self.num_slots} slots of them. "
                "Thaw one first, or open the store with more slots: num_slots is one more than the freezes held at a time"
            )
        return free

    def _within(self, start: int, stop: int) -> list[_Piece]:
        """The pieces of [start, stop), cut there."""
        first, last = self._touching(start, stop)
        return [p._replace(start=max(p.start, start), stop=min(p.stop, stop)) for p in self._pieces[first:last]]

    def _touching(self, start: int, stop: int) -> tuple[int, int]:
        if start >= stop:
            return 0, 0
        first = bisect.bisect_right(self._pieces, start, key=lambda piece: piece.start) - 1
        return first, bisect.bisect_left(self._pieces, stop, first, key=lambda piece: piece.start)

    def _change(self, start: int, stop: int, change: Callable[[_Piece], _Piece]) -> None:
        """Changes the pieces of [start, stop); what was cut and is equal again becomes one with its neighbours."""
        first, last = self._touching(start, stop)
        if first == last:
            return
        before, behind = self._pieces[first], self._pieces[last - 1]
        changed = [change(piece) for piece in self._within(start, stop)]
        if before.start < start:
            changed.insert(0, before._replace(stop=start))
        if behind.stop > stop:
            changed.append(behind._replace(start=stop))
        first, last = max(0, first - 1), min(len(self._pieces), last + 1)  # with the neighbours, which may be equal now
        left = [piece for piece in self._pieces[first:last] if piece.stop <= changed[0].start]
        right = [piece for piece in self._pieces[first:last] if piece.start >= changed[-1].stop]
        self._pieces[first:last] = _coalesced([*left, *changed, *right])


class _Piece(NamedTuple):
    """Bytes [start, stop) that are all in the same situation."""

    start: int
    stop: int
    current: int  # the slot that is read
    holds: frozenset[tuple[int, int]]  # (freeze, slot)
    lost: frozenset[int]  # slots whose last write failed


def _losing(slot: int, piece: _Piece) -> _Piece:
    return piece._replace(lost=piece.lost | {slot})


def _coalesced(pieces: Iterable[_Piece]) -> list[_Piece]:
    """Neighbours in the same situation become one."""
    found: list[_Piece] = []
    for piece in pieces:
        if found and found[-1][2:] == piece[2:]:
            found[-1] = found[-1]._replace(stop=piece.stop)
        else:
            found.append(piece)
    return found


def _joined(parts: Iterable[SlotPart]) -> list[SlotPart]:
    """Parts that lie one behind the other in one slot become one."""
    found: list[SlotPart] = []
    for part in parts:
        if found and (found[-1].slot, found[-1].stop) == (part.slot, part.start):
            found[-1] = found[-1]._replace(stop=part.stop)
        else:
            found.append(part)
    return found
