"""Program: reads, checks, computes, sums and writes tiles at the same time, through a fixed number
of buffers.

    buffers   those of one pool; a tile holds one from the start of its read to the end of its write. Native steps need a part
              of one: they go through a tile in strips
    read      starts in the given order, as many tiles ahead as there are free buffers (without `read_ahead`: one tile at a
              time)
    compute   one tile at a time: the first in order whose bytes have arrived
    write     runs while the next tiles are computed (without `write_behind`: ends before the next tile)

Tiles are independent of each other. Tiles from fast paths overtake a tile on a slow path, and the
results do not depend on the order. A native thread runs all of it (native/program.cpp) for tiles
whose work is a list of native steps: no Python runs between the read and the write of such a tile.
A thread of the program brings what such a tile needs beside the bytes on disk: gradients of an
accelerator. The work of other tiles is a function of the caller, which `run` calls in its own
thread when the tile's bytes have arrived. It may leave the rest of its work, such as waiting for an
accelerator, to a thread of the program. Where all tiles rest in memory there is no buffer, and
`run` needs a thread only for native work beside that of its caller.

        Program.begin                         run, or start ... read the bytes of a unit ... finish
    ... backward ........................| read the rest | compute | write |
        read the first tiles ............|

        attempt ... attempt ... commit        a tentative run: its results are of use when its caller says so, else dropped

A run that was started goes on while its caller does other work. `read` gives the caller bytes that
the run changes: a tile that is not written yet is copied from its buffer when it is computed, any
other is read from disk (RunRead).

After an error, the program cancels reads in flight and waits for writes, then raises the error. So
no buffer is given back while the kernel may still use it, and no computed tile is partly written.
The program knows no optimizer: the caller defines the tiles.
"""

from __future__ import annotations

import contextlib
import copy
import errno
import functools
import itertools
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Generic, TypeVar

import numpy as np

from tiermem.swap.base.native import BACKGROUND, NORMAL, Workers, run_steps
from tiermem.swap.base.ranges import ByteRange
from tiermem.swap.base.side_threads import SideThreads, Task
from tiermem.swap.base.tile_program import (
    AWAITED,
    ONE_READ,
    ONE_WRITE,
    Taken,
    TileProgram,
)
from tiermem.swap.memory.arena import Pool, Slot
from tiermem.swap.program.run_read import SLICE_S, Running, RunRead
from tiermem.swap.program.table import StepTable, TileRow, TileWork, tell
from tiermem.swap.store.checksum import Range
from tiermem.swap.store.move import Move
from tiermem.swap.store.store import TensorStore

T = TypeVar("T")

_CHUNK = 64  # tiles that are given at a time while others run
_FIRST = 4  # and when a run starts


class Program(Generic[T]):
    """Runs tiles of one store. For one thread at a time.

    Args:
        store: of the bytes that are read and written.
        pool: lends the buffers, from the first read until the end of the run; None: every tile
            rests in memory.
        workers: threads that the kernels share; None: no tile has native steps.
    """

    def __init__(self, store: TensorStore, pool: Pool | None, workers: Workers | None) -> None:
        self._store = store
        self._pool = pool
        self._workers = workers
        self._native: TileProgram | None = None  # opened when it is needed
        self._slots: list[Slot] = []  # buffers that are lent
        self._table = StepTable[T](store)
        self._begun: list[TileRow[T]] = []
        self._running: Running[T] | None = None
        self._tentative: Running[T] | None = None
        self._helper: SideThreads | None = None  # made when it is needed
        self._brought: Task[None] | None = None  # serves the run under way
        # work on tiles of that run, in other threads
        self._left: dict[Task[None], int] = {}
        self._taken = Taken()  # by a caller of `next`, until `done`
        # the last `attempt`, in another thread
        self._attempting = Task(lambda: False)
        # held while a read begins, perhaps in another thread, and while a run ends
        self._reading = threading.RLock()
        self.num_native = 0  # tiles so far whose work was native steps
        self.num_called = 0  # those for which `compute` was called
        self.dropped_bytes = 0  # that tiles wrote in tentative runs which were dropped

    def use(self, pool: Pool | None) -> None:
        """Goes on with other buffers, after `drop`; tiles may have been replaced."""
        self._pool = pool
        self._table.forget()

    @property
    def begun(self) -> list[T]:
        """The tiles whose reads have been started before their run, in order."""
        return [each.tile for each in self._begun]

    def begin(self, tiles: Iterable[T], work: TileWork[T]) -> None:
        """Starts to read the first tiles, one for each buffer, behind all other transfers; the run
        raises errors of the reads.

        Does nothing if it has been done already. A caller that changes these tiles at home must
        call `drop`; the run then reads them again. Raises OSError.
        """
        self._end_attempt()
        if self._begun or self._running is not None or self._tentative is not None:
            return
        try:
            self._take_slots()
            first = itertools.islice(tiles, len(self._slots))
            for row in self._table.rows(first, work, self._first_slot, is_early=True):
                self._begun.append(row)
            if self._begun:
                self._program().begin(self._buffers(), [each.struct for each in self._begun])
            else:
                self._give_slots_back()
        except BaseException:
            self.drop()  # native code may have begun before an interrupt
            raise

    def drop(self) -> None:
        """Ends what was begun or started early, and gives the buffers back: tiles of a run are then
        old or new.

        All tiles of a tentative run are old. Blocks for transfers in flight; never raises OSError.
        An interrupt leaves the rest to the next call.
        """
        self._end_attempt()
        self._drop()

    def _drop(self) -> None:
        with self._reading:
            if (native := self._native) is not None:
                if self._taken.is_mine:
                    native.give_up(self._taken.tile[0])
                for task, index in list(self._left.items()):
                    if task.cancel():  # its thread has not begun, or was not told to
                        native.give_up(index)
                native.stop()
                if (running := self._running) is not None:
                    if not running.state.is_over:
                        running.state.end(self._error(running, False))
                    self._report(running, False)
                elif self._tentative is not None:
                    self._report(self._tentative, True)
            # the first ends with the run
            for left in filter(None, (self._brought, *self._left)):
                if not left.cancel():
                    left.wait()
            self._running = self._tentative = self._brought = None
            self._taken = Taken()
            self._left.clear()
            self._begun.clear()
            self._give_slots_back()

    def run(
        self,
        tiles: Sequence[T],
        work: TileWork[T],
        read_ahead: bool = True,
        write_behind: bool = True,
        lane: str = "",
    ) -> None:
        """Reads, computes and writes every tile. Blocks until the last write has ended; an
        interrupt ends the run early.

        Without a pool this thread computes the tiles, one after the other, unless it can call
        `compute` beside native work.
        """
        if self._pool is None:
            self.drop()
            rows = list(self._table.rows(tiles, work, None))
            if sum(row.is_native for row in rows) in (0, len(rows)):
                self._compute_here(rows, work, lane)
                return
        flags = AWAITED | ONE_READ * (not read_ahead) | ONE_WRITE * (not write_behind)
        self.start(tiles, work, flags, NORMAL, lane)
        try:
            self.finish()
        finally:
            self.drop()

    def start(
        self,
        tiles: Sequence[T],
        work: TileWork[T],
        flags: int = 0,
        priority: int = BACKGROUND,
        lane: str = "",
    ) -> None:
        """Starts to read, compute and write every tile; `finish` ends it, in any case. Does not
        block for transfers.

        Tiles are planned while earlier ones run. They, what they point at and the buffers are the
        program's until the end. Tiles of `begin` go first; without read-ahead they are dropped and
        read again.

        Args:
            flags: ONE_READ, ONE_WRITE and AWAITED of swap/base/tile_program.py, or-ed.
            priority: of the reads; the default is behind all other transfers.
            lane: of the recorder, for native work.

        Raises RuntimeError when the pool has no free buffer, what `work` raises, NoSlotError and
        OSError as a write does. Then the run has been ended early.
        """
        self._end_attempt()
        is_all_begun = {id(tile) for tile in self.begun} <= {id(tile) for tile in tiles}
        if (
            flags & ONE_READ
            or self._tentative is not None
            or self._running is not None
            or not is_all_begun
        ):
            self.drop()
        is_begun = {id(tile) for tile in self.begun}
        plans = self._plan(
            [*self.begun, *(tile for tile in tiles if id(tile) not in is_begun)], work
        )
        try:
            planned = list(itertools.islice(plans, max(len(is_begun), _FIRST)))
            self._program().run(
                self._buffers(),
                [each.struct for each in planned],
                len(tiles),
                flags,
                priority,
            )
            self._running = Running(planned, work, lane, bool(flags & AWAITED))
            self._add(self._running, plans)
            self._begun.clear()
            self._serve_aside(self._running)
        except BaseException:
            self.drop()
            raise

    def attempt(self, tiles: Iterable[T], work: TileWork[T], total: int, lane: str = "") -> bool:
        """Gives tiles to a tentative run, which begins with the first of them. Does not block for
        transfers.

        Its tiles are read, computed and written as those of a run, beside the bytes that they
        replace. Until `commit` no read finds the results. `drop`, `start` and `run` discard them.
        Tiles that need their caller are left out. Later tiles run first, in the order of the next
        forward. Tiles whose gradients are copied from an accelerator run in the order given, behind
        all others.

        total: the number of tiles of the run that it may become. Raises what `work` raises,
            NoSlotError and OSError as a write does; then nothing is given. False: the run has
            failed, or another one is under way.
        """
        self._end_attempt()
        if self._running is not None:
            return False
        self._attempting = Task(functools.partial(self._attempt, tiles, work, total, lane))
        try:
            # The C library gives each thread its own part of the heap: plans would fill the holes
            # that gradients leave here.
            return self._help().give(self._attempting).result()
        finally:
            self._end_attempt()  # also after an interrupt

    def _end_attempt(self) -> None:
        """Waits for an attempt that its caller has left at an interrupt; one whose thread has not
        begun never does."""
        if not self._attempting.cancel():
            self._attempting.wait()

    @property
    def attempted(self) -> list[T]:
        """The tiles of the tentative run, in order."""
        self._end_attempt()
        return (
            [] if self._tentative is None else [each.tile for each in self._given(self._tentative)]
        )

    def commit(self, tiles: Sequence[T], work: TileWork[T]) -> None:
        """Makes the tentative run the run of these tiles: adds those that it does not have, each
        behind those of the units before it in this order. `finish` ends it, in any case.

        work: does with its tiles what they were given for, to the bit. Raises as `start`.
        """
        self._end_attempt()
        running = self._tentative
        self._tentative = None
        assert running is not None
        running.work = work
        self._running = running
        added, turns = self._left_by(running, tiles, work)
        try:
            self._add(running, self._plan(added, work), turns)
            self._serve_aside(running)
        except BaseException:
            self.drop()
            raise

    def forget(self, unit: int) -> None:
        """Before memory changes that `TileWork.cached` has named for a unit: on return no run reads
        it. Does not block."""
        if self._native is not None:
            self._native.forget(unit)

    @property
    def is_running(self) -> bool:
        """Whether a run is under way: `finish` has not returned since its `start`."""
        return self._running is not None

    @property
    def is_native(self) -> bool:
        """Whether no tile of the run under way is computed by `compute`, so that it goes on without
        its caller."""
        return self._running is None or self._running.is_native

    @property
    def has_failed(self) -> bool:
        """Whether the run under way, or the last one, has failed."""
        return self._native is not None and self._native.failure() is not None

    def is_stepped(self, unit: int) -> bool:
        """Whether every tile of a unit has been computed, or no run is under way. Does not
        block."""
        return self._running is None or self._program().wait(unit, False, 0.0) is True

    def wait(self, unit: int) -> None:
        """Blocks until every tile of a unit has been computed; they go before all others. Raises
        the error of the run."""
        self._wait(lambda timeout_s: self._program().wait(unit, False, timeout_s))

    def computed(self, unit: int) -> Iterator[T]:
        """The tiles of a unit that the run under way changes, each when it has been computed:
        `wait`, piece by piece."""
        running = self._running
        if running is None:
            return
        for index in running.of_unit(unit):
            self._wait(functools.partial(self._program().await_tile, index))
            yield running.planned[index].tile

    def _wait(self, look: Callable[[float], bool | None]) -> None:
        """Blocks until `look` is True; it is given the seconds that it may take. Raises the error
        of the run if it is False."""
        running = self._running
        found = None
        while running is not None and not found:
            if not running.is_native and self._brought is None:
                self._call_next(running, 0.0)
            found = look(SLICE_S if running.is_native else SLICE_S / 100)
            if found is False or running.is_cut:
                raise self._error(running, True)

    def read(
        self, ranges: Sequence[Range], name: str, unit: int, priority: int = NORMAL
    ) -> Move | RunRead:
        """Starts reading ranges of entries, as `TensorStore.read`; of bytes that a run changes, the
        new ones. Does not block.

        Each tile of the run that changes an entry lies inside one of the ranges of it. May be
        called from any thread. If the run has failed before it had the bytes, `wait` raises its
        error.

        Args:
            unit: the number of the unit whose bytes these are; the run goes on to its tiles first
                when `wait` is called.
        """
        with self._reading:
            running = self._running
            if running is None or not (
                running.is_cut or any(running.shown(each[0]) for each in ranges)
            ):
                return self._store.read(ranges, name, priority)
            return self._read(running, ranges, name, unit, priority)

    def _read(
        self, running: Running[T], ranges: Sequence[Range], name: str, unit: int, priority: int
    ) -> RunRead:
        taken = list[int]()
        on_disk = list[Range]()
        move: Move | None = None
        try:
            has_all = not running.is_cut and all(
                self._take(running, each, taken, on_disk) for each in ranges
            )
            if has_all and on_disk:
                move = self._store.read(on_disk, name, priority)
        except BaseException:
            has_all = False
            raise
        finally:
            for tile in () if has_all else taken:
                self._program().take(tile, 0)

        waited = functools.partial(self._store.recorder.add, "wait", f"step of {name}")
        error = functools.partial(self._error, running)
        return RunRead(
            self._program(), running.state, unit, taken if has_all else None, move, error, waited
        )

    def finish(self) -> None:
        """Blocks until the last write of a run has ended. Does nothing when none is under way.

        It does the work of tiles that is not native, unless a thread serves the run. Raises the
        run's error, unless `wait` or a read has raised it: OSError when a transfer or the thread's
        work failed, and the error of `compute`. An interrupt leaves a run of native tiles under
        way, unless this thread was bringing what one of them needs.
        """
        running = self._running
        if running is None:
            return
        start_ns = time.monotonic_ns()
        try:
            while not self._call_next(running, SLICE_S):
                pass
        except BaseException:
            if not running.is_native or self._taken.is_mine:
                self.drop()
            raise
        if not running.is_awaited:
            self._store.recorder.add("wait", "the rest of a step", start_ns, time.monotonic_ns())
        with self._reading:
            running.state.end(self._error(running, False) if self.has_failed else None)
            self.drop()
        if running.state.error is not None and not running.state.is_told:
            raise self._error(running, True)

    def close(self) -> None:
        """Ends a run early, drops what was begun, and ends the thread."""
        self.drop()
        if self._helper is not None:
            self._helper.close()
        if self._native is not None:
            self._native.close()

    # ---- planning --------------------------------------------------------------------------------

    def _plan(self, tiles: Sequence[T], work: TileWork[T]) -> Iterator[TileRow[T]]:
        """The tiles of a run, one by one."""
        begun = {id(each.tile): each for each in self._begun}
        if not self._slots:
            self._take_slots()
        if self._pool is not None and not self._slots:
            raise RuntimeError(
                f"none of the {self._pool.count} buffers of {self._pool.slot_bytes} bytes is free"
            )
        self._store.plans.check_writable()
        yield from self._table.rows(tiles, work, self._first_slot, begun)

    def _attempt(self, tiles: Iterable[T], work: TileWork[T], total: int, lane: str) -> bool:
        """`attempt`, in the program's thread."""
        is_first = self._tentative is None
        if is_first:
            self._drop()
            self._take_slots()
        try:
            self._store.plans.check_writable()
            rows = self._table.rows(tiles, work, self._first_slot, is_apart=True)
            plans = [each for each in rows if each.is_native]
            if is_first and plans:
                self._program().run(self._buffers(), [], total, 0, BACKGROUND)
                self._tentative = Running([], work, lane, False)
        except BaseException:
            if is_first:
                self._drop()
            raise
        if self._tentative is None:
            self._give_slots_back()
            return True
        num_given = len(self._given(self._tentative))
        is_given = self._give(
            self._tentative, plans, [total - num_given * (not each.is_brought) for each in plans]
        )
        self._serve_aside(self._tentative)
        return is_given and not self.has_failed

    def _left_by(
        self, running: Running[T], tiles: Sequence[T], work: TileWork[T]
    ) -> tuple[list[T], list[int]]:
        """The tiles that `attempt` has not given to a run, and their turns: behind those of the
        units before them."""
        planned = self._given(running)
        given = {id(each.tile) for each in planned}
        first_of: dict[int, int] = {}  # by unit
        for number, row in enumerate(planned):
            if not row.is_brought:
                first_of.setdefault(row.unit, number)
        left, turns = [], []
        turn = len(tiles) - len(planned)  # before all that `attempt` has given
        for tile in tiles:
            turn = max(turn, len(tiles) - first_of.get(work.unit(tile), len(planned)))
            if id(tile) not in given:
                left.append(tile)
                turns.append(turn)
        return left, turns

    def _add(
        self, running: Running[T], plans: Iterator[TileRow[T]], turns: Sequence[int] = ()
    ) -> None:
        """Gives a run its other tiles, while it is under way."""
        for start in itertools.count(0, _CHUNK):
            if not (chunk := list(itertools.islice(plans, _CHUNK))):
                break
            if not self._give(running, chunk, turns[start : start + _CHUNK]):
                running.is_cut = True
                break  # it has failed: `finish` raises the error
        running.is_shown = True

    def _give(
        self, running: Running[T], plans: Sequence[TileRow[T]], turns: Sequence[int] = ()
    ) -> bool:
        """Adds tiles to a run, which may be brought before this returns. False: it has failed, and
        does not have them."""
        running.add(plans)
        is_given = self._program().add([each.struct for each in plans], turns)
        if not is_given:
            self._given(running)
        return is_given

    def _given(self, running: Running[T]) -> Sequence[TileRow[T]]:
        """The tiles of a run that native code was given. An interrupt may have left others behind
        them, which are removed."""
        del running.planned[self._program().num_tiles :]
        return running.planned

    def _help(self) -> SideThreads:
        """Threads of the program, for what is not to be done in its caller's: one plans, one ends
        work on tiles, one serves a run."""
        self._helper = self._helper or SideThreads(3, "tiermem-program")
        return self._helper

    # ---- running ---------------------------------------------------------------------------------

    def _compute_here(self, rows: Sequence[TileRow[T]], work: TileWork[T], lane: str) -> None:
        """Computes tiles that rest in memory, in this thread. All are planned before: a kernel
        leaves nothing in the caches."""
        for row in rows:
            start_ns = time.monotonic_ns()
            if not row.is_native:
                self.num_called += 1
                work.compute(row.tile, None)
                continue
            assert self._workers is not None
            run_steps(self._workers, row.steps, f"stepping {row.name!r}")
            self.num_native += 1
            if lane:
                self._store.recorder.add(lane, row.name, start_ns, time.monotonic_ns())

    def _call_next(self, running: Running[T], timeout_s: float) -> bool:
        """Does or brings what the next tile needs beside native work, unless a thread does. True:
        the run has ended."""
        program = self._program()
        if self._brought is not None:
            return program.wait(-1, True, timeout_s) is not None
        self._taken = Taken()
        found = program.next(timeout_s, self._taken)
        if not isinstance(found, tuple):
            return found
        index, buffer = found
        has_failed = True
        is_left = False
        try:
            if (rest := self._begin_work(running, index, buffer)) is not None:
                task = Task(functools.partial(self._end_work, running, index, rest))
                self._left[task] = index
                self._taken = Taken()  # from here on `drop` ends what the thread does not
                is_left = True
                self._help().give(task)
            has_failed = False
        except Exception as error:
            running.causes.append(error)  # before the run ends
            raise
        finally:
            if not is_left:
                program.done(index, has_failed)
                self._taken = Taken()
        return False

    def _begin_work(
        self, running: Running[T], index: int, buffer: int
    ) -> Callable[[], object] | None:
        """Does the work on a tile that needs its caller's thread. Returns the rest, which may block
        in any thread."""
        each = running.planned[index]
        if each.is_native:  # and brought: its native steps follow
            return functools.partial(running.work.bring, each.tile, self._slots[buffer])
        self.num_called += 1
        return running.work.compute(each.tile, None if buffer < 0 else self._slots[buffer])

    def _serve_aside(self, running: Running[T]) -> None:
        """Brings what the tiles of a run need, in a thread, if nothing else is to be done for
        them."""
        if self._brought is None and running.is_brought:
            serve = functools.partial(
                _serve, self._program(), weakref.ref(self), weakref.ref(running)
            )
            self._brought = Task(serve)
            self._help().give(self._brought)

    def serve(self, running: Running[T]) -> bool:
        """Does what the next tile of a run needs beside native work. Blocks up to SLICE_S. True:
        the run has ended."""
        found = self._program().next(SLICE_S, Taken())
        if isinstance(found, tuple):
            self._end_work(running, found[0], functools.partial(self._work_on, running, *found))
        return found is True

    def _work_on(self, running: Running[T], index: int, buffer: int) -> None:
        """All the work on a tile that is not native. Blocks."""
        if (rest := self._begin_work(running, index, buffer)) is not None:
            rest()

    def _end_work(self, running: Running[T], index: int, rest: Callable[[], object]) -> None:
        """Ends the work on a tile with the rest of it. In a thread of the program."""
        has_failed = True
        try:
            rest()
            has_failed = False
        except Exception as error:
            running.causes.append(error)  # before the run ends
        finally:
            self._program().done(index, has_failed)

    def _take(
        self, running: Running[T], wanted: Range, taken: list[int], rest: list[Range]
    ) -> bool:
        """Asks for the tiles of a run that change a range: adds those that will be copied to
        `taken`, other bytes to `rest`.

        False: a write has failed, perhaps that of these bytes.
        """
        entry, offset, data = wanted
        at = offset
        end = offset + data.numel()
        written = list[int]()
        for index, start, num_bytes in running.shown(entry):
            assert offset <= start and start + num_bytes <= end, f"a range of {entry!r} cuts a tile"
            if self._program().take(index, data.data_ptr() + start - offset):
                taken.append(index)
                if at < start:
                    rest.append((entry, at, data[at - offset : start - offset]))
                at = start + num_bytes
            else:
                written.append(index)
        if written and self.has_failed:
            return False
        for index in written:
            self._note(running, index, False)
        if at < end:
            rest.append((entry, at, data[at - offset :]))
        return True

    def _note(self, running: Running[T], index: int, has_failed: bool) -> None:
        """Tells the store once that the writes of a tile have been made, or that they failed."""
        each = running.planned[index]
        if index not in running.noted:
            self._table.note(each, has_failed)
            running.noted.add(index)  # after an interrupt it is noted again

    def _error(self, running: Running[T], is_raised: bool) -> OSError:
        """The error of a run that ended early; if it is raised, `finish` does not raise it
        again."""
        if is_raised:
            running.state.is_told = True
        if running.state.error is not None:
            error = copy.copy(running.state.error)
            error.__cause__ = running.state.error.__cause__
            return error
        failure = self._program().failure()
        if failure is None:
            return OSError(errno.ECANCELED, "the step was ended before this part of it")
        each = running.planned[failure.tile]
        return each.error_of(failure, running.causes, self._store)

    def _report(self, running: Running[T], is_dropped: bool) -> None:
        """Tells the store of the writes of a run, and the recorder what became of its tiles.

        is_dropped: the run was tentative, and its writes are dropped.
        """
        planned = self._given(running)
        times = self._program().times()
        is_writing = times["is_writing"] != 0
        is_ended = times["is_ended"] != 0
        if is_dropped:
            self.dropped_bytes += int(times["written_bytes"][is_writing].sum())
        else:
            self._table.settle(planned)
            changes = np.array([each.changes_slots for each in planned], np.bool_)
            for index in np.flatnonzero(is_writing & (changes | ~is_ended)).tolist():
                self._note(running, index, not is_ended[index])
        is_native = np.array([each.is_native for each in planned], np.bool_)
        self.num_native += int(np.count_nonzero(is_native & is_ended))
        tell(planned, times, self._store.recorder, running.lane, running.is_awaited)

    # ---- buffers ---------------------------------------------------------------------------------

    def _program(self) -> TileProgram:
        if self._native is None:
            self._native = TileProgram(self._workers)
            # the queues and the arena outlive what it has under way
            self._store.programs.append(self._native)
        return self._native

    def _buffers(self) -> list[ByteRange]:
        return [ByteRange(slot.tensor.data_ptr(), slot.num_bytes) for slot in self._slots]

    def _take_slots(self) -> None:
        """Takes every free buffer."""
        if self._pool is not None:
            self._pool.take_all(self._slots)

    @property
    def _first_slot(self) -> Slot | None:
        return self._slots[0] if self._slots else None

    def _give_slots_back(self) -> None:
        if self._pool is not None:
            self._pool.give_back_all(self._slots)


def _serve(
    native: TileProgram,
    program_of: Callable[[], Program[T] | None],
    running_of: Callable[[], Running[T] | None],
) -> None:
    """Serves a run until it ends, in a thread. A run that is never committed is stopped with its
    program, or the process."""
    while threading.main_thread().is_alive():
        program = program_of()
        running = running_of()
        if program is None or running is None:
            break
        if program.serve(running):
            return
        del program, running
    with contextlib.suppress(RuntimeError):  # it is closed
        native.stop()
