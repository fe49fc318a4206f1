"""Running: a run of a step program; RunRead: a read of bytes that it changes. Where the new bytes
of a tile come from:

    a tile that is not computed yet             the program copies its new bytes when it has computed them
    a tile that is computed, and not written    they are copied from its buffer at once
    a tile that is written, and other bytes     they are read from disk

The read is given to its caller at once; `wait` blocks until all bytes are there.
"""

from __future__ import annotations

import dataclasses
import errno
import functools
import time
from collections.abc import Callable, Sequence
from typing import Generic, NamedTuple, TypeVar

from tiermem.swap.base.tile_program import TileProgram
from tiermem.swap.program.table import TileRow, TileWork
from tiermem.swap.store.move import Move

T = TypeVar("T")

SLICE_S = 0.1
"""Seconds between looks for signals, such as Ctrl-C, while a thread waits for a program."""


@dataclasses.dataclass
class RunState:
    """What a run and its reads know of each other. The native program forgets a run when the next
    one begins."""

    is_told: bool = False  # whether its failure has been raised
    is_over: bool = False
    error: OSError | None = None  # why it ended before all tiles were stepped and written

    def end(self, error: OSError | None) -> None:
        """Notes its end."""
        self.is_over = True
        self.error = error


class ShownBy(NamedTuple):
    """Bytes of an entry that a tile of a run changes."""

    tile: int  # its index in the run
    offset: int
    num_bytes: int


@dataclasses.dataclass
class Running(Generic[T]):
    """A run under way."""

    planned: list[TileRow[T]]
    work: TileWork[T]
    lane: str
    is_awaited: bool  # its caller does nothing but wait
    is_shown: bool = False  # it has all of its tiles, so that reads find their bytes
    # tiles whose writes the store knows of
    noted: set[int] = dataclasses.field(default_factory=set)
    # of tiles that were not brought
    causes: list[Exception] = dataclasses.field(default_factory=list)
    is_cut: bool = False  # it failed before it was given all tiles
    state: RunState = dataclasses.field(default_factory=RunState)

    def __post_init__(self) -> None:
        self._has_called = self._has_brought = False
        self._look_at(self.planned)

    def add(self, plans: Sequence[TileRow[T]]) -> None:
        """Adds tiles behind the others."""
        self._look_at(plans)
        self.planned.extend(plans)

    def _look_at(self, plans: Sequence[TileRow[T]]) -> None:
        self._has_called |= any(not plan.is_native for plan in plans)
        self._has_brought |= any(plan.is_brought for plan in plans)

    @property
    def is_native(self) -> bool:
        """Whether no tile needs its caller."""
        return not self._has_called

    @property
    def is_brought(self) -> bool:
        """Whether tiles need bytes from elsewhere than disk, and nothing else of the caller."""
        return self._has_brought and not self._has_called

    @functools.cached_property
    def _by_unit(self) -> dict[int, list[int]]:
        found: dict[int, list[int]] = {}
        for index, row in enumerate(self.planned):
            found.setdefault(row.unit, []).append(index)
        return found

    @functools.cached_property
    def _by_entry(self) -> dict[str, list[ShownBy]]:
        found: dict[str, list[ShownBy]] = {}
        for index, row in enumerate(self.planned):
            if row.shown is not None:
                entry, offset, data = row.shown
                found.setdefault(entry, []).append(ShownBy(index, offset, data.numel()))
        for changes in found.values():
            changes.sort(key=lambda by: by.offset)
        return found

    def of_unit(self, unit: int) -> list[int]:
        """The indexes of a unit's tiles; none before it has all."""
        return self._by_unit.get(unit, []) if self.is_shown else []

    def shown(self, entry: str) -> list[ShownBy]:
        """The bytes of an entry that its tiles change, in order; none before it has all."""
        return self._by_entry.get(entry, []) if self.is_shown else []


@dataclasses.dataclass(eq=False)
class RunRead:
    """A read with the methods of a Move. Thread-safe.

    Args:
        program: of the run.
        run: its state.
        unit: the number of the unit whose bytes these are.
        tiles: the tiles whose bytes are copied when they are computed; None: the run has failed,
            and `wait` raises its error.
        move: the read of the others.
        failure: makes the error of a run that has ended before the unit was computed; told whether
            it is raised.
        waited: told the times of a wait.
    """

    _program: TileProgram
    _run: RunState
    _unit: int
    _tiles: Sequence[int] | None
    _move: Move | None
    _failure: Callable[[bool], OSError]
    _waited: Callable[[int, int], None]
    was_cancelled: bool = dataclasses.field(default=False, init=False)

    def wait(self) -> None:
        """Blocks until the bytes have arrived. Raises OSError: the error of the run, if it ended
        before; ECANCELED."""
        if not self._await_run():
            raise self._failure(True)
        if self._move is not None:
            self._move.wait()

    def outcome(self) -> OSError | None:
        """Blocks as `wait` and returns its error instead of raising it; None also after
        `cancel`."""
        try:
            if not self._await_run():
                return self._failure(False)
        except OSError:
            return None  # cancelled
        return None if self._move is None else self._move.outcome()

    def _await_run(self) -> bool:
        """Whether the unit has been computed, when it has or the run has ended. Raises ECANCELED
        after `cancel`."""
        start_ns = time.monotonic_ns()
        is_computed = self._look(0.0)
        if is_computed is None:
            while is_computed is None and not self.was_cancelled:
                is_computed = self._look(SLICE_S)
            self._waited(start_ns, time.monotonic_ns())
        if self.was_cancelled:
            raise OSError(errno.ECANCELED, "a read of weights that are being stepped was cancelled")
        return is_computed is True

    def _look(self, timeout_s: float) -> bool | None:
        """Whether the unit has been computed; False: the run has ended before; None: not within the
        time."""
        found = None if self._run.is_over else self._program.wait(self._unit, False, timeout_s)
        if self._tiles is None:
            return False
        return self._run.error is None if self._run.is_over else found

    def is_done(self) -> bool:
        """Whether `wait` would return or raise at once."""
        return self._look(0.0) is not None and (self._move is None or self._move.is_done())

    def promote(self) -> None:
        """Makes the run take the unit's tiles first, and the transfers urgent. Does not block."""
        self._look(1e-9)
        if self._move is not None:
            self._move.promote()

    def cancel(self) -> None:
        """Ends the read: afterwards nothing is written to its buffer. Never raises OSError."""
        self.was_cancelled = True
        for tile in () if self._run.is_over else self._tiles or ():
            self._program.take(tile, 0)
        if self._move is not None:
            self._move.cancel()
