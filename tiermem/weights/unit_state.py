"""LiveUnit: a unit of a living model: its state machine, its memory, and the transfers of its
values."""

from __future__ import annotations

import contextlib
import enum
import functools
import time
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import nn
from torch.autograd.graph import increment_version

from tiermem.ranks.collectives import Pending
from tiermem.swap.base.native import NORMAL, URGENT
from tiermem.swap.base.ranges import ALIGNMENT, round_up
from tiermem.swap.memory.accelerator import is_accelerator, on, record
from tiermem.swap.program.run_read import RunRead
from tiermem.swap.store.move import Move
from tiermem.units.compute import widen
from tiermem.units.registry import is_gathered
from tiermem.units.unit import Unit
from tiermem.weights import absent
from tiermem.weights.absent import ZeroParamStatus, mark
from tiermem.weights.pages import UnitPages
from tiermem.weights.unit_memory import Passage, StagedRead, StagingBuffer, UnitMemory
from tiermem.wires.gather import Gather

# ---- the state machine ---------------------------------------------------------------------------


class UnitState(enum.IntEnum):
    """The memory that a unit occupies beside its place at rest (its home); see the diagram of
    LiveUnit."""

    HOME = enum.auto()  # none
    READING = enum.auto()  # a buffer; the shard is being read into it from NVMe
    GATHERING = enum.auto()  # its full layout; the parts of all ranks are being received in it
    COPYING = enum.auto()  # its full layout on the accelerator; the shard is being copied into it
    PRESENT = enum.auto()  # its full layout, which the parameters show


_COPIED_NUMEL = 1 << 24
"""A shard is copied to an accelerator in pieces of so many elements, so that what is needed sooner
passes between them."""

_STATUS = {
    UnitState.HOME: ZeroParamStatus.NOT_AVAILABLE,
    UnitState.PRESENT: ZeroParamStatus.AVAILABLE,
}


_Read = Move | RunRead | StagedRead
"""A read of a shard from NVMe, under way."""


class _Gathering(NamedTuple):
    """The exchange under way, and when it began."""

    pending: Pending
    start_ns: int


class UnitAtRest(NamedTuple):
    """Where a unit rests, and the memory of its full layout."""

    name: str  # of its shard in the store
    memory: UnitMemory
    shard: torch.Tensor | None  # flat, when it rests in memory; None: on NVMe
    gather: Gather | None
    """Brings the parts together; None: the unit is present in the form in which it rests."""


class LiveUnit:
    """One unit: its state, and the number of its users.

        parts on several ranks, or blocks          HOME --read--> READING --gather--> GATHERING --land--> PRESENT
        one shard, CPU                             HOME --read--> READING --land--> PRESENT
        one shard in memory, CPU                   HOME --copy--> COPYING --land--> PRESENT    widened, or in place: no copy
        one shard on NVMe, accelerator             HOME --read--> READING --land--> PRESENT
        one shard on HOST, accelerator             HOME --copy--> COPYING --land--> PRESENT
        from any state                             --drop--> HOME

    A shard that rests in memory needs no `read`. Ranks may call `read` at different times. `gather`
    is collective: every rank calls it for the same units in the same order, so it waits for the
    read if need be. It copies the shard into the full layout (in the dtype that the maths sees). On
    a CPU the shard's buffer is free before the exchange begins. After an error the caller has to
    drop the unit. The prefetcher decides which units are fetched.

    Outside PRESENT a parameter's data is a zero-stride NaN expanded to the true shape: shape and
    numel stay right, and writes raise (absent.py).

    On an accelerator copies and gathers run on a stream of their own, which waits only for the
    memory that it fills; the stream that computes waits for their end. A helper thread waits for
    the read of a shard on NVMe and starts the copy (StagedRead). The unit keeps the event of the
    last read from its place at rest until a writer asks (`await_home`). A buffer is given back with
    the event of the copy out of it.

    at_rest: where it rests; `move_to` sets another place.
    """

    def __init__(self, unit: Unit, passage: Passage, at_rest: UnitAtRest) -> None:
        self.unit = unit
        self.passage = passage
        self._set_place(at_rest)
        self.state = UnitState.PRESENT if unit.is_resident else UnitState.HOME
        self.num_users = 0  # modules in forward, and uses in backward, that need it now
        self._is_kept = False  # present outside the prefetcher's buffers
        # holds the shard on its way to a gather or to the accelerator
        self._staging: StagingBuffer | None = None
        self._coming: _Read | _Gathering | None = None  # the transfer of READING or GATHERING
        self.recalled: set[int] = set()  # rows that backwards to come need
        self._params = [shard.param for shard in unit.shards]
        self._index = {id(param): index for index, param in enumerate(self._params)}
        # their class shows whether the unit has users
        self._changing = [] if unit.is_resident else self._params
        self._out: set[int] = set()  # parameters that hold their own copy (access.py)
        self._uncounted: set[int] = set()  # gathered parameters that were changed meanwhile
        self.num_changes = 0  # how often its values were changed, but by the user's writes
        # by parameter: weights before the user writes them (`remember`)
        self._before: dict[int, torch.Tensor] = {}
        # of each parameter, when it was shown: address and version
        self._seen: list[tuple[int, int]] = []
        # takes over what was written while the unit was in use, before it is let go
        self.take_writes: Callable[[LiveUnit], None] = lambda live: None
        # parameters whose `data` was taken since their values were compared
        self._data_taken: set[int] = set()
        self._datas: dict[int, list[weakref.ref[torch.Tensor]]] = {}  # by parameter: these `data`
        absent.wake(self._params if unit.is_resident else ())
        self._point()
        # not before the parameters have moved to the device, which resets their gradients' dtype
        self.enable_training()

    def _set_place(self, at_rest: UnitAtRest) -> None:
        name, memory, shard, gather = at_rest
        self.name = name
        self.memory = memory
        self.shard = shard
        self._gather = gather
        # when the shard rests on NVMe
        self.entry = name if shard is None else None
        # from the shards of all ranks, or from blocks
        self.is_gathered = gather is not None
        unit = self.unit
        passage = self.passage
        is_near = shard is not None and passage.copies is None
        is_there = shard is not None and is_accelerator(shard.device)
        may_part = passage.copies is not None or passage.may_swap
        may_part &= not (
            gather is not None or unit.is_resident or unit.is_widened or is_near or is_there
        )
        # None: it is fetched whole
        self.pages = UnitPages(unit) if may_part and any(s.num_rows for s in unit.shards) else None

    def move_to(self, at_rest: UnitAtRest) -> None:
        """HOME: rests elsewhere from now on, where its bytes are already."""
        self._check(UnitState.HOME, UnitState.HOME)
        self._set_place(at_rest)
        self._point()

    def enable_training(self) -> None:
        """Lets autograd accumulate a trainable unit's gradients in the dtype at rest, whatever
        dtype forward sees."""
        if self.unit.full_dtype != self.unit.dtype and self.unit.is_trainable:
            with torch._C.DisableTorchFunctionSubclass():
                for param in self._params:
                    param.grad_dtype = self.unit.dtype

    @property
    def is_streamed(self) -> bool:
        """Whether it is fetched and evicted."""
        return not (self.unit.is_resident or self._is_kept)

    @property
    def is_present(self) -> bool:
        """Whether the parameters show the full layout."""
        return self.state is UnitState.PRESENT

    @property
    def reads(self) -> bool:
        """Whether fetching it begins with a read from NVMe: its shard rests there (the plan's
        `unit_homes`), and its gather needs the shard."""
        return self.entry is not None and (self._gather is None or self._gather.needs_shard)

    @property
    def is_staged(self) -> bool:
        """Whether its read goes into a staging buffer rather than straight into the full layout."""
        return self._gather is not None or self.passage.slots is None

    @property
    def holds_staging(self) -> bool:
        """Whether it occupies a staging buffer now."""
        return self._staging is not None

    @property
    def move(self) -> _Read | None:
        """The read under way, or None."""
        return None if isinstance(self._coming, _Gathering) else self._coming

    @property
    def is_stepped(self) -> bool:
        """Whether its weights at rest are those of the last step, so that a copy of them need not
        wait."""
        return self.passage.steps.is_stepped(self.unit.index)

    # ---- transitions -----------------------------------------------------------------------------

    def read(self, is_urgent: bool) -> None:
        """HOME -> READING: starts the read of the shard. The caller ensures that a buffer is free.
        Does not block."""
        self._check(UnitState.READING, UnitState.HOME)
        assert self.entry is not None
        num_bytes = round_up(self.unit.shard_bytes, ALIGNMENT)
        passage = self.passage
        slot = self._take_staging().slot if self.is_staged else self.memory.take_slot()
        if passage.copies is None:
            first = (
                0
                if self.is_staged or not self.unit.is_widened
                else self.unit.full_bytes - self.unit.shard_bytes
            )
            ranges = [(self.entry, 0, slot.tensor[first : first + num_bytes])]
            if self.pages is not None:
                ranges = [(self.entry, each.start, slot.tensor[each]) for each in self._due()]
            priority = URGENT if is_urgent else NORMAL
            if passage.steps.is_under_way:
                self._coming = passage.steps.read(ranges, self.entry, self.unit.index, priority)
            else:
                self._coming = passage.store.read(ranges, self.entry, priority)
        else:
            assert self._staging is not None
            if self._gather is None:
                self.memory.allocate()
            if self.pages is None:
                self._stage_read(
                    [slice(0, num_bytes)],
                    is_urgent,
                    # a gather takes the bytes out of the staging buffer itself
                    self._copy if self._gather is None else lambda: None,
                )
            else:
                found = self._due()
                self._stage_read(found, is_urgent, functools.partial(self._copy_pages, found))
        self._become(UnitState.READING)

    def _due(self) -> list[slice]:
        """The bytes that a fetch brings now: without rows that are not recalled, if experts are
        expected to come by rows. A run of a step gives whole tiles."""
        assert self.pages is not None
        is_stepped = self.unit.is_trainable and self.passage.steps.is_under_way
        found = self.pages.missing(
            self.recalled if self.passage.by_rows and not is_stepped else None
        )
        self.pages.note(found)
        return found

    def _stage_read(
        self, parts: Sequence[slice], is_urgent: bool, then: Callable[[], torch.Event | None]
    ) -> None:
        assert self._staging is not None and self.entry is not None
        self._coming = StagedRead(
            self.passage, self.unit.index, self.entry, self._staging, parts, is_urgent, then
        )

    def use(self) -> None:
        """PRESENT: the current stream uses the unit from now on."""
        self.memory.use()

    def promote(self) -> None:
        """READING: raises the priority of the read, which is needed at once. Other states: does
        nothing."""
        if (move := self.move) is not None:
            move.promote()

    def gather(self) -> None:
        """HOME or READING -> GATHERING: starts the exchange. Collective; waits for the read, or for
        the step of the shard.

        Raises OSError, RankLost.
        """
        self._check(UnitState.GATHERING, UnitState.HOME, UnitState.READING)
        assert self._gather is not None
        self._await_read()
        start_ns = time.monotonic_ns()
        copies = self.passage.copies
        if self.shard is not None:
            self.passage.steps.await_unit(self.unit.index)
            self.passage.await_written(self.shard)
        with self.passage.filling():
            self.memory.allocate_slot()
            self._gather.put(self._at_home())
            read = record(copies) if copies is not None else None
            pending = self._gather.start()
        if read is not None and self.shard is not None:
            self.memory.note_home_read(read)
        self._give_staging_back(read)
        self._coming = _Gathering(pending, start_ns)
        self._become(UnitState.GATHERING)

    def copy(self) -> None:
        """HOME -> COPYING: starts the copy of a unit that rests in host memory to the accelerator.
        Waits until it is stepped.

        What is stepped is copied while the rest is stepped. On a CPU it widens a shard that rests
        in memory, and blocks. A unit in place is there once it is stepped.
        """
        self._check(UnitState.COPYING, UnitState.HOME)
        assert self.shard is not None
        if self.passage.copies is None or self.unit.is_in_place:
            self.passage.steps.await_unit(self.unit.index)
        if self.passage.copies is None:
            self.memory.allocate_slot()
            self.memory.full.copy_(self.shard)  # of a unit in place to itself, which does nothing
        else:
            self.passage.await_written(self.shard)
            self.memory.allocate()
            try:
                found = [] if self.pages is None else self._due()
                if self.unit.is_in_place:
                    copied = record(self.passage.copies)
                elif self.pages is not None and not self.pages.is_whole:
                    copied = self._copy_pages(found)
                else:
                    copied = self._copy(self.passage.steps.stepped(self.unit.index))
            finally:
                self.memory.note_home_read(record(self.passage.copies))
            self.memory.end_filling(copied)
        self._become(UnitState.COPYING)

    def land(self) -> None:
        """READING, GATHERING or COPYING -> PRESENT: waits for the bytes and shows them. Blocks;
        raises OSError, RankLost."""
        self._check(UnitState.PRESENT, UnitState.READING, UnitState.GATHERING, UnitState.COPYING)
        if isinstance(self._coming, _Gathering):
            self._await_gather(self._coming)
            self._coming = None
        elif isinstance(self._coming, StagedRead):
            self._end_staged()
        elif self.state is UnitState.READING and self.passage.copies is None:
            self._await_read()
            self.memory.allocate_slot()
            widen(self.memory.full, self.memory.travels)
        self.memory.use()
        self._show()
        if self.is_partial:
            absent.rest(self._of_experts())

    @property
    def is_partial(self) -> bool:
        """Whether it is PRESENT without some rows of its experts, whose parameters rest."""
        return self.pages is not None and self.is_present and not self.pages.is_whole

    def bring(self, rows: Collection[int] | None) -> None:
        """PRESENT: reads rows of its experts that are not there; None: all of them. Blocks; raises
        OSError."""
        if self.pages is None or not self.is_partial:
            return
        if self.unit.is_trainable:
            self.passage.steps.finish_tiles()
        if found := self.pages.missing(rows):
            if self.passage.copies is not None:
                self._bring_across(found)
            else:
                assert self.entry is not None
                data = self.memory.take_slot().tensor
                ranges = [(self.entry, each.start, data[each]) for each in found]
                self.passage.store.read(ranges, self.entry, URGENT).wait()
            self.pages.note(found)
        if self.pages.is_whole and self.num_users:
            absent.wake(self._changing)

    def _bring_across(self, found: Sequence[slice]) -> None:
        """Copies bytes to an accelerator, from HOST or through a staging buffer; the current stream
        waits for them."""
        if self.shard is None:
            self._take_staging()
            self._stage_read(found, True, functools.partial(self._copy_pages, found))
            self._end_staged()
        else:
            self.passage.await_written(self.shard)
            copied = self._copy_pages(found)
            self.memory.note_home_read(copied)
            self.memory.end_filling(copied)
        self.memory.await_filled()

    @contextlib.contextmanager
    def with_experts(self) -> Iterator[None]:
        """A block in which the parameters of its experts are ordinary ones, for code that reads only
        rows that are there."""
        absent.wake(self._of_experts())
        try:
            yield
        finally:
            if self.is_partial:
                absent.rest(self._of_experts())

    def _of_experts(self) -> list[nn.Parameter]:
        """The parameters that hold rows of experts, but for those that hold their own copy."""
        fused = () if self.pages is None else self.pages.fused
        return [self._params[index] for index in fused if index not in self._out]

    def drop(self) -> None:
        """Any state -> HOME. Cancels a read under way; waits for an exchange under way. Raises
        RankLost."""
        coming = self._coming
        read = None
        try:
            if isinstance(coming, _Gathering):
                self._await_gather(coming)
            elif coming is not None:
                coming.cancel()
                read = coming.copied if isinstance(coming, StagedRead) else None
        finally:
            self._coming = None
            before = self.state
            self._become(UnitState.HOME)
            if self.pages is not None:
                self.pages.clear()
            if before is UnitState.PRESENT:
                self._point()
            self._give_staging_back(read)
            self.memory.free()

    def reset(self) -> None:
        """Any state, also one that an interrupt has left half-way -> HOME without users; a second
        call completes the first.

        Blocks for transfers. Its buffers are the caller's to take back.
        """
        if self.unit.is_resident:
            self.num_users = 0
            return
        if isinstance(self._coming, _Gathering):
            self._coming.pending.end()
        elif self._coming is not None:
            self._coming.cancel()
        self._coming = self._staging = None
        if self.pages is not None:
            self.pages.clear()
        self.recalled.clear()
        self._is_kept = False
        self.num_users = 0
        self._become(UnitState.HOME)
        self._point()
        self._changing = [
            param for index, param in enumerate(self._params) if index not in self._out
        ]
        absent.rest(self._changing)
        for index in [each for each in self._out if not is_gathered(self._params[each])]:
            self.put_back(index)
        self.memory.reset()

    def keep(self, fill: Callable[[UnitMemory], None]) -> None:
        """HOME -> PRESENT: `fill` fills it in torch's own memory. It is not streamed until
        `end_keeping`."""
        self._check(UnitState.PRESENT, UnitState.HOME)
        self.memory.allocate(outside=True)
        self.memory.begin_filling()
        fill(self.memory)
        if self.pages is not None:
            self.pages.note(self.pages.missing(None))
        self._is_kept = True
        self._show()

    def end_keeping(self) -> None:
        """Ends a `keep`, also one that failed: the unit returns to HOME. Raises RuntimeError if it
        was written meanwhile."""
        is_written = len(self.written()) > 0
        self._is_kept = False
        self.drop()
        self.let_all_go()
        if is_written:
            raise RuntimeError(
                f"weights of unit {self.unit.name!r} were written while the whole model was kept "
                "in memory (EMA.applied, "
                "unwrap_model_for_generation), and the writes are dropped: write after the block"
            )

    # ---- the place at rest -----------------------------------------------------------------------

    def await_home(self) -> None:
        """Blocks until the accelerator has read the shard where it rests. Call it before the shard
        is written."""
        self.memory.await_home()

    @property
    def may_exchange(self) -> bool:
        """Whether `exchange` is possible: the shard rests in the CPU's memory, and this torch
        can."""
        is_near = self.shard is not None and not is_accelerator(self.shard.device)
        return is_near and self.passage.may_exchange

    def exchange(self, values: torch.Tensor) -> None:
        """Gives the shard other values and the tensor those of the shard, without copies. values: a
        result of `apart`.

        Blocks until the accelerator has read the shard, since the tensor's memory is written next.
        """
        assert self.shard is not None
        self.await_home()
        self.shard.untyped_storage()._swap_data_ptr_(values.untyped_storage())  # type: ignore[attr-defined]

    def outdate(self) -> None:
        """Notes that the weights are about to change where they rest: a second copy of them is not
        used again."""
        self.passage.note_outdated()
        if self._gather is not None:
            self._gather.outdate()

    def renew(self) -> None:
        """Notes that what the user has written to its parameters has changed the weights where they
        rest: a second copy becomes what they show."""
        self.passage.note_outdated()
        if self._gather is not None:
            self._gather.renew(self.memory.full)

    # ---- users -----------------------------------------------------------------------------------

    def hold(self) -> None:
        """Adds a user. The parameters are ordinary ones until every `hold` is let go."""
        self.num_users += 1
        if self.num_users == 1:
            absent.wake(self._changing)
            if self.is_partial:
                absent.rest(self._of_experts())
            self._widen_view()

    def let_go(self) -> None:
        """Removes a user."""
        if self.num_users > 1:
            self.num_users -= 1
        else:
            self.let_all_go()

    def let_all_go(self) -> None:
        """Removes all users: the parameters rest (absent.py). Values that a module has written are
        taken over first."""
        if self.num_users:
            if self.is_streamed and self.written():
                self.take_writes(self)
            self.memory.end_use()
        self.num_users = 0
        self._widen_view()
        absent.rest(self._changing)

    # ---- what the user writes --------------------------------------------------------------------

    def written(self) -> list[int]:
        """The numbers of the parameters that were written since they were shown, that show other
        memory, or may be written.

        The last are those whose `data` was taken. Writes through NumPy, and through a `data` that
        was taken before the last comparison, leave no trace. Raises RuntimeError for a parameter
        whose memory was replaced by one of another dtype, shape or device.
        """
        if not self._is_shown or len(self._seen) != len(self._params):
            return []
        with torch._C.DisableTorchFunctionSubclass():
            if not self._data_taken and self._marks() == self._seen:
                return []
            return [index for index in range(len(self._params)) if self._is_written(index)]

    def is_written(self, param: nn.Parameter) -> bool:
        """Whether a parameter is among those of `written`."""
        return (
            self._is_shown
            and len(self._seen) == len(self._params)
            and self._is_written(self._index[id(param)])
        )

    def _is_written(self, index: int) -> bool:
        param = self._params[index]
        is_changed = (param.data_ptr(), param._version) != self._seen[index]
        if (not is_changed and index not in self._data_taken) or index in self._out:
            return False
        if self.is_partial and self.unit.shards[index].num_rows:
            raise RuntimeError(
                f"{self.unit.shards[index].name} was written in a forward that fetched only the "
                "rows of the experts in use. Write it under tiermem.zero.GatheredParameters("
                "parameter, modifier_rank=0), or through Shards.replace"
            )
        absent.check_like(param, self.memory.views[index])
        return True

    def note_data(self, param: nn.Parameter, data: torch.Tensor) -> None:
        """Notes that the user has taken a parameter's `data`, and may write it."""
        index = self._index[id(param)]
        self._data_taken.add(index)
        if self.memory.sees(data):
            self._datas[index] = [each for each in self._datas.get(index, ()) if each() is not None]
            self._datas[index].append(weakref.ref(data))

    def remember(self, index: int) -> None:
        """Keeps a copy of a parameter's present values until `forget`, so that each element that is
        written next is known.

        Needed where the unit rests in the memory that its parameters show, beside split masters.
        """
        with torch._C.DisableTorchFunctionSubclass():
            self._before[index] = self._params[index].detach().clone()

    def forget(self, index: int) -> None:
        """Ends a `remember`."""
        self._before.pop(index, None)

    def before(self, index: int) -> torch.Tensor | None:
        """The values that `remember` kept, or None."""
        return self._before.get(index)

    def note_step(self) -> None:
        """Notes that a step has written the unit: what was kept or counted before is counted
        anew."""
        for index in self._before:
            self.remember(index)

    def note_change(self, params: Collection[nn.Parameter]) -> None:
        """Notes that other values than a user's write come into its parameters. Torch then refuses
        the backward of an earlier forward, where that needs the old ones.

        A gathered parameter counts it in `put_back`: before, GatheredParameters would take it for a
        write.
        """
        self.num_changes += 1
        due = {self._index[id(each)] for each in params if is_gathered(each)}
        self._uncounted |= due
        self._count({self._index[id(each)] for each in params} - due)

    def _count(self, indices: Collection[int]) -> None:
        """Counts one more version of parameters, which is no write of the user."""
        with torch._C.DisableTorchFunctionSubclass():
            increment_version([self._params[index] for index in indices])
        if self._seen:
            for index in indices:
                address, version = self._seen[index]
                self._seen[index] = address, version + 1

    def forget_writes(self) -> None:
        """What was written to the unit until now is not taken over: the call that wrote it
        raised."""
        if self.num_users == 1:
            if self._is_shown:
                self._see()
            self._data_taken.clear()

    def part_from(self, memories: Collection[int]) -> None:
        """Gives parameters that were set to the memory of others copies of it, because memory at
        these addresses is about to be written."""
        for index in self.written():
            param = self._params[index]
            with torch._C.DisableTorchFunctionSubclass():
                is_own = param.data_ptr() == self.memory.views[index].data_ptr()
                if not is_own and param.untyped_storage().data_ptr() in memories:
                    absent.set_data(param, param.detach().clone())

    def show_again(self, index: int) -> None:
        """Notes that a parameter's values have been taken over; the parameter shows the unit's
        memory again, with them."""
        param = self._params[index]
        view = self.memory.views[index]
        with torch._C.DisableTorchFunctionSubclass():
            if param.data_ptr() != view.data_ptr():
                view.copy_(param.detach())
                _point([param], [view])
            self._seen[index] = param.data_ptr(), param._version
        self._data_taken.discard(index)

    def check_alone(self, index: int) -> None:
        """Raises RuntimeError where a parameter shows other memory while the user holds a `data` of
        it, which would change."""
        param = self._params[index]
        view = self.memory.views[index]
        with torch._C.DisableTorchFunctionSubclass():
            is_shown = param.data_ptr() == view.data_ptr()
        if is_shown or all(taken() is None for taken in self._datas.get(index, ())):
            return
        raise RuntimeError(
            "`p.data = x` has put values in place of a parameter whose old memory is still held, "
            "perhaps to put it back "
            "(backup = p.data). A step or a save writes that memory. Put it back before, or keep a "
            "copy: "
            "backup = p.data.clone()"
        )

    def is_home(self, values: torch.Tensor) -> bool:
        """Whether a tensor lies in the memory in which the unit rests."""
        at_home = self.shard
        return (
            at_home is not None
            and values.untyped_storage().data_ptr() == at_home.untyped_storage().data_ptr()
        )

    def take_out(self, index: int, value: torch.Tensor) -> None:
        """Gives one parameter its own copy of the values until `put_back`, whatever the state of
        the unit."""
        param = self._params[index]
        self._out.add(index)
        self._changing = [each for each in self._changing if each is not param]
        absent.wake([param])
        _point([param], [value])
        mark([param], ZeroParamStatus.AVAILABLE)

    @property
    def taken_out(self) -> list[int]:
        """The numbers of the parameters that hold their own copy."""
        return sorted(self._out)

    def put_back(self, index: int) -> None:
        """Ends a `take_out`; does nothing for a parameter that was not taken out."""
        if index in self._uncounted:
            self._uncounted.remove(index)
            self._count([index])
        if index not in self._out:
            return
        param = self._params[index]
        self._out.remove(index)  # first: after an interrupt `reset` does the rest
        self._data_taken.discard(index)
        is_shown = self._is_shown
        _point([param], [(self.memory.views if is_shown else self.memory.absent)[index]])
        if is_shown:
            self._see()
        self._mark([param])
        self._changing = [*(each for each in self._changing if each is not param), param]
        if not self.num_users:
            absent.rest([param])

    def part_with(self) -> None:
        """Makes the unit's parameters ordinary ones for good."""
        absent.part_with(self._params)
        self._changing = []

    def leave_to_parent(self) -> None:
        """PRESENT -> HOME in a forked child, which has no arena. In any state the parameters rest,
        so that calls are refused.

        A graph that the parent made reads zeros, which take no memory, until a hook refuses its
        backward.
        """
        self.shard = None
        if self.is_present:
            self._become(UnitState.HOME)
            self._point()
            if self.passage.may_swap:
                zeros = torch.from_numpy(np.zeros(self.unit.full_bytes, np.uint8)).untyped_storage()
                self.memory.full.untyped_storage()._swap_data_ptr_(zeros)  # type: ignore[attr-defined]
        absent.rest(self._params)

    # ---- steps of transitions --------------------------------------------------------------------

    def _check(self, to: UnitState, *states: UnitState) -> None:
        if self.state not in states:
            raise RuntimeError(
                f"unit {self.unit.name!r} cannot go from {self.state.name} to {to.name}"
            )

    def _become(self, state: UnitState) -> None:
        self.state = state
        self._mark(
            [p for i, p in enumerate(self._params) if i not in self._out]
            if self._out
            else self._params
        )

    def _mark(self, params: Sequence[nn.Parameter]) -> None:
        mark(params, _STATUS.get(self.state, ZeroParamStatus.INFLIGHT))

    def _show(self) -> None:
        """Makes the parameters show the full layout; its bytes are complete, on an accelerator in
        stream order."""
        self._become(UnitState.PRESENT)
        self._point()

    @property
    def _is_shown(self) -> bool:
        """Whether the parameters show the full layout. Widened ones do while a module holds them,
        else their dtype at rest."""
        is_present = self.state is UnitState.PRESENT
        return is_present and (not self.unit.is_widened or self._is_kept or self.num_users > 0)

    def _widen_view(self) -> None:
        """After a change of users: widened parameters that are present show the dtype of the maths,
        or that at rest."""
        if self.unit.is_widened and self.is_present:
            self._point()

    def _point(self) -> None:
        """Points the parameters at the full layout, or at NaN; skips parameters that hold their own
        copy."""
        params = self._params
        is_shown = self._is_shown
        tensors = self.memory.views if is_shown else self.memory.absent
        if self._out:
            inside = [i for i in range(len(params)) if i not in self._out]
            params = [params[i] for i in inside]
            tensors = [tensors[i] for i in inside]
        _point(params, tensors)
        if is_shown:
            self._see()

    def _see(self) -> None:
        """Notes what the parameters show: the full layout, or their own copies."""
        with torch._C.DisableTorchFunctionSubclass():
            self._seen = self._marks()

    def _marks(self) -> list[tuple[int, int]]:
        """Address and version of each parameter."""
        return [(param.data_ptr(), param._version) for param in self._params]

    def _await_read(self) -> None:
        if (read := self.move) is not None:
            read.wait()
            self._coming = None

    def _await_gather(self, gathering: _Gathering) -> None:
        wait_ns = time.monotonic_ns()
        with self.passage.filling():
            gathering.pending.wait()
            end_ns = time.monotonic_ns()
            widen(self.memory.full, self.memory.travels)
            if self.passage.copies is not None:
                self.memory.end_filling(record(self.passage.copies))
        name = self.unit.name
        recorder = self.passage.store.recorder
        recorder.add("wait", f"gather {name}", wait_ns, end_ns)
        recorder.add("gather", name, gathering.start_ns, end_ns, self.unit.full_bytes)

    def _copy(self, ranges: Iterable[slice] = ()) -> torch.Event:
        """Starts the copy of the shard to the accelerator; returns its end. Also called on a helper
        thread.

        ranges: of its elements. Each is copied before the next one is asked for, and the rest at
            the end.
        """
        return self._start_copies(self._with_rest(ranges))

    def _with_rest(self, parts: Iterable[slice]) -> Iterator[slice]:
        """Ranges of the shard's elements as they are asked for, then what lies between them."""
        shard = self._at_home()
        assert shard is not None
        taken = []
        for part in parts:
            yield part
            taken.append(part)
        done = 0
        for part in [*sorted(taken, key=lambda part: part.start), slice(shard.numel(), None)]:
            yield slice(done, part.start)
            done = part.stop

    def _copy_pages(self, parts: Sequence[slice]) -> torch.Event:
        """Starts the copy of bytes of the shard to the accelerator; returns its end. Also called on a
        helper thread."""
        size = self.unit.dtype.itemsize
        return self._start_copies(slice(p.start // size, p.stop // size) for p in parts)

    def _start_copies(self, parts: Iterable[slice]) -> torch.Event:
        """Starts the copies of elements of the shard, each range before the next one is asked for;
        returns their end."""
        shard = self._at_home()
        copies = self.passage.copies
        assert copies is not None and shard is not None
        with on(copies):
            self.memory.begin_filling()
        for part in parts:
            self._fill(shard, part, copies)
        with on(copies):
            widen(self.memory.full, self.memory.travels)
            return record(copies)

    def _fill(self, shard: torch.Tensor, part: slice, copies: torch.Stream) -> None:
        with on(copies):
            for start in range(part.start, part.stop, _COPIED_NUMEL):
                piece = slice(start, min(start + _COPIED_NUMEL, part.stop))
                self.memory.travels[piece].copy_(shard[piece], non_blocking=True)

    def _end_staged(self) -> None:
        """Waits until the helper thread has started the copy out of the staging buffer, and gives
        the buffer back."""
        assert isinstance(self._coming, StagedRead)
        reading = self._coming
        reading.wait()
        assert reading.copied is not None
        self.memory.end_filling(reading.copied)
        self._give_staging_back(reading.copied)
        self._coming = None

    def _take_staging(self) -> StagingBuffer:
        assert self.passage.staging is not None and self._staging is None
        self._staging = self.passage.staging.take()
        return self._staging

    def _give_staging_back(self, read: torch.Event | None) -> None:
        """Gives the buffer of the shard back, out of which the accelerator copies until `read`."""
        if self._staging is not None:
            assert self.passage.staging is not None
            buffer = self._staging
            self._staging = None
            self.passage.staging.give_back(buffer, read)

    def _at_home(self) -> torch.Tensor | None:
        """The shard: where it rests in memory, or in the staging buffer that it is read into."""
        if self._staging is None:
            return self.shard
        return self._staging.slot.tensor[: self.unit.shard_bytes].view(self.unit.rests_as)


def _point(params: Sequence[nn.Parameter], tensors: Sequence[torch.Tensor]) -> None:
    # a resting parameter would ask its owner (absent.py)
    with torch._C.DisableTorchFunctionSubclass():
        for param, tensor in zip(params, tensors, strict=True):
            absent.set_data(param, tensor)


def reset_all(units: Sequence[LiveUnit]) -> None:
    """Makes every unit absent after an interrupt, and all their buffers free. Blocks; a second call
    completes the first."""
    for live in units:
        live.reset()
    for live in units[:1]:
        live.passage.reset()


def needed_by_module(
    root: nn.Module, triggers: dict[nn.Module, list[LiveUnit]], by_param: dict[int, LiveUnit]
) -> dict[nn.Module, list[LiveUnit]]:
    """The modules that get hooks, each with the units that its forward needs: see hooks.py."""
    found: dict[nn.Module, list[LiveUnit]] = {}

    def visit(module: nn.Module) -> bool:
        """Whether a module or one of its inner modules triggers units."""
        is_around = sum(visit(child) for child in module.children()) > 0  # every child is visited
        if module in triggers:
            found[module] = list(triggers[module])
        else:
            own = module.parameters(recurse=not is_around)
            units = {by_param[id(param)]: None for param in own if id(param) in by_param}
            streamed = [live for live in units if live.is_streamed]
            if streamed or is_around:
                found[module] = streamed
        return is_around or module in triggers

    visit(root)
    found.setdefault(root, [])
    return {module: found[module] for module in root.modules() if module in found}
