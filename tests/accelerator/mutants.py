"""Mutants: the mistakes that the parity tests must see. Each takes one wait, event, stream, pin or copy out of the library.

    MUTANTS[name] = Mutant(where the line is, the line, what it becomes, the program and the homes that see it)

`applied` rebuilds one function from its source, in the layout of `ast.unparse`, with the line
changed, for as long as a test lasts.
"""

from __future__ import annotations

import ast
import contextlib
import inspect
import sys
import textwrap
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from tiermem.gradients import gradients
from tiermem.gradients.gradient_link import GradientLink
from tiermem.gradients.gradient_norms import BlockSums
from tiermem.gradients.gradient_store import GradientStore
from tiermem.gradients.gradients import GradientHomes
from tiermem.optim.sharded import ShardedModel
from tiermem.optim.tile_step import TilePass
from tiermem.optim.tile_stream import TileStream
from tiermem.optim.tiles import StateTiles
from tiermem.run import shards
from tiermem.run.activations import _DiskRoom, _HostRoom, _Input, _Passing
from tiermem.run.hooks import Hooks
from tiermem.swap.memory.accelerator import PageLock, ToHost
from tiermem.swap.memory.arena import Arena
from tiermem.swap.memory.device_memory import DeviceMemory
from tiermem.swap.program.program import Program
from tiermem.weights.step_run import StepRun
from tiermem.weights.unit_memory import Passage, StagedRead, StagingBuffers, UnitMemory, UnitSlots
from tiermem.weights.unit_state import LiveUnit
from tiermem.weights.values import Values
from tiermem.wires.gather import UnitGather
from tiermem.wires.packed import PackedGather
from tiermem.wires.reduce import Reducer


class Mutant(NamedTuple):
    owner: Any  # a class or a module
    function: str
    line: str
    becomes: str
    program: str
    home: str


MUTANTS = {
    "a wait for the copy is removed": Mutant(
        UnitMemory, "use", "stream.wait_event(self._filled)", "pass", "plain", "host"
    ),
    "the copy does not wait for the memory that it fills": Mutant(
        UnitMemory, "begin_filling", "stream.wait_event(self._allocated)", "pass", "two_streams_one_backward", "host"
    ),
    "memory is freed while compute uses it": Mutant(
        UnitMemory, "free", "self._owner.wait_event(self._ends[number])", "pass", "plain", "host"
    ),
    "memory is freed while a stream uses it that has said no end": Mutant(
        UnitMemory, "free", "self._owner.wait_stream(stream)", "pass", "held_until_backward_ends", "host, gradients on device"
    ),
    "the end of an earlier use is taken for that of this one": Mutant(
        UnitMemory, "use", "self._ends.pop(stream.stream_id, None)", "pass", "held_until_backward_ends",
        "host, gradients on device",
    ),
    "memory is freed while a stream fills it": Mutant(
        UnitMemory, "begin_filling", "self._users[stream.stream_id] = stream", "pass", "held_and_let_go", "host"
    ),
    "a slot is filled before its last users have ended": Mutant(
        UnitMemory, "allocate", "self._allocated = record(self._owner)",
        "self._allocated = record(current_stream(self._owner.device))", "two_streams_one_backward", "host"
    ),
    "the stream of a second use is forgotten": Mutant(
        LiveUnit, "use", "self.memory.use()", "pass", "on_side_streams", "host"
    ),
    "gradients of another stream are not waited for": Mutant(
        Hooks, "answer", "live.memory.join()", "pass", "two_streams_one_backward", "host"
    ),
    "the stream that gradients are accumulated on is not noted": Mutant(
        Hooks, "watch_gradients", "live.memory.note_gradient()", "None", "two_streams_one_backward", "host"
    ),
    "a home is overwritten while it is read, by a step": Mutant(
        TilePass, "_params", "tile.live.await_home()", "pass", "evaluated_between", "host"
    ),
    "a home is overwritten while it is read, by load_state_dict": Mutant(
        Values, "put_elements", "live.await_home()", "pass", "loaded_while_copies_are_pending", "host"
    ),
    "a home's last event does not hold its writer": Mutant(
        UnitMemory, "await_home", "self._home_read.synchronize()", "pass", "loaded_while_copies_are_pending", "host"
    ),
    "the last event of a copy is forgotten": Mutant(
        LiveUnit, "copy", "self.memory.note_home_read(record(self.passage.copies))", "pass",
        "loaded_while_copies_are_pending", "host"
    ),
    "a buffer is given back while it is copied": Mutant(
        StagedRead, "_begin", "self._after.synchronize()", "pass", "plain", "nvme"
    ),
    "the event of a copy out of a buffer is forgotten": Mutant(
        StagingBuffers, "give_back", "read = read or buffer.read", "read = None", "plain", "nvme"
    ),
    "a copy begins before its read has ended": Mutant(
        StagedRead, "_finish", "if move.outcome() is None and not move.was_cancelled:", "if True:", "plain", "nvme"
    ),
    "the end of a copy out of a buffer is not noted": Mutant(
        LiveUnit, "_end_staged", "self.memory.end_filling(reading.copied)", "pass", "plain", "nvme"
    ),
    "the copy's event is recorded on another stream": Mutant(
        LiveUnit, "_start_copies", "return record(copies)", "return record(self.passage.owner)", "plain", "host"
    ),
    "a gradient is read before it has come": Mutant(
        GradientLink, "_take", "copied.synchronize()", "pass", "plain", "host"
    ),
    "a gradient leaves before it is computed": Mutant(
        GradientLink, "send", "self._stream.wait_stream(current_stream(self._device))", "pass", "plain", "host"
    ),
    "a gradient is let go while it leaves": Mutant(
        GradientLink, "send", "part.data.record_stream(self._stream)", "pass", "plain", "host"
    ),
    "a buffer of gradients is filled again while it is read": Mutant(
        GradientLink, "_take", "copied.synchronize()", "self._free.put(slot); copied.synchronize()", "plain", "nvme"
    ),
    "resident weights are overwritten while they are copied": Mutant(
        Values, "regather", "memory.note_home_read(record(current_stream(self.device)))", "pass",
        "loaded_while_copies_are_pending", "states on host"
    ),
    "a factor is read before it is there": Mutant(
        ToHost, "wait", "self._copied.synchronize()", "pass", "clipped_by_torch", "host"
    ),
    "a gradient is added before it has come": Mutant(
        GradientStore, "_at_home", "self._stream.wait_stream(current_stream(self._stream.device))", "pass", "plain", "device"
    ),
    "a gradient is let go while it is added": Mutant(
        GradientStore, "_at_home", "data.record_stream(self._stream)", "pass", "plain", "device"
    ),
    "a step does not wait for the last gradients": Mutant(
        GradientStore, "join", "current_stream(self._stream.device).wait_stream(self._stream)", "pass",
        "two_streams_one_backward", "device",
    ),
    "resident weights are not brought from the step": Mutant(
        ShardedModel, "_regather", "self._shards.values.regather(live.unit, live.shard, live.memory)", "pass", "plain",
        "states on host",
    ),
    "a step does not wait for tiles that were sent": Mutant(
        TilePass, "finish", "copied.synchronize()", "pass", "read_after_steps", "host, most sent"
    ),
    "a buffer is written before the device has stepped what it holds": Mutant(
        TilePass, "compute", "return ended.synchronize if slot is not None and ended is not None else None", "return None",
        "plain", "nvme, half of the states",
    ),
    "a tile is sent to a buffer whose last tile has not left": Mutant(
        TileStream, "begin", "self._down.wait_event(left)", "pass", "plain", "host, most sent"
    ),
    "a tile that is sent is stepped before it has come": Mutant(
        TileStream, "arrive", "current_stream(self._device).wait_event(self._come)", "pass", "plain", "host, most sent"
    ),
    "the gradients of a tile that is sent are read before they have come": Mutant(
        TileStream, "bring", "self._is_coming = True", "pass", "plain", "host, most sent"
    ),
    "a tile that is sent leaves before it is stepped": Mutant(
        TileStream, "send_back", "self._up.wait_event(self._stepped)", "pass", "plain", "nvme, sent"
    ),
    "a step does not wait until the tiles that are sent have come back": Mutant(
        TileStream, "join", "(self._down, self._up)", "(self._down,)", "read_after_steps", "host, most sent"
    ),
    "a buffer is written before a tile that is sent has come back": Mutant(
        Program, "_end_work", "rest()", "pass", "plain", "nvme, sent"
    ),
    "weights are read before the device has brought what it stepped": Mutant(
        StepRun, "finish", "copied.synchronize()", "pass", "read_after_steps", "host, half of the states"
    ),
    "gradients become zeros before the device has read them": Mutant(
        GradientHomes, "write_zeros", "self._steps.finish()", "pass", "zeroed", "host, half of the states"
    ),
    "a tile is stepped before its gradients are there": Mutant(
        TilePass, "bring", "record(self._link).synchronize()", "pass", "plain", "host, gradients on device"
    ),
    "gradients come to a tile before they are zeros": Mutant(
        StateTiles, "step", "self._link.wait_stream(current_stream(shards.device))", "pass", "zeroed",
        "host, gradients on device",
    ),
    "a tile is stepped under backward before its gradients are there": Mutant(
        GradientStore, "await_end", "wait_event(self._ends[unit])", "query()", "plain", "host, stepped early"
    ),
    "the end of gradients on the device is recorded on another stream": Mutant(
        GradientStore, "_end", "record(self._stream)", "record(current_stream(self._stream.device))", "plain",
        "host, stepped early",
    ),
    "what backward has stepped takes the place of weights alone": Mutant(
        StateTiles, "_accept", "self._store.exchange(entry, slot)", "slot", "plain", "host, stepped early"
    ),
    "a second copy is written while the device reads it as a home": Mutant(
        LiveUnit, "exchange", "self.await_home()", "pass", "evaluated_aside", "host, stepped early"
    ),
    "weights are stepped by the CPU before they have come from the device": Mutant(
        TilePass, "bring", "record(self._link).synchronize()", "pass", "widened", "states on host"
    ),
    "a forward reads weights that the CPU has stepped before they are back": Mutant(
        TilePass, "_step_fetched_weights", "record(self._link).synchronize()", "pass", "widened", "states on host"
    ),
    "weights that the CPU has stepped go back while the old ones are read": Mutant(
        TilePass, "_step_fetched_weights", "tile.live.await_home()", "pass", "evaluated_aside", "states on host"
    ),
    "a buffer of gradients is filled again while a step in backward reads it": Mutant(
        GradientStore, "open", "self._read.synchronize()", "pass", "branches_stepped_in_backward", "host, states on device"
    ),
    "what backward has stepped is forgotten": Mutant(
        StateTiles, "_accept", "live.exchange(second.weights)", "pass", "plain", "host, stepped early"
    ),
    "what the device has stepped stays there": Mutant(
        TilePass, "_send_back", "original.copy_(copy, non_blocking=is_accelerator(copy.device))", "pass", "plain",
        "host, half of the states",
    ),
    "norms leave out the factors that are on the device": Mutant(
        gradients, "with_factors", "found = _scaled(found, numbers, factor.abs())", "pass", "scaled_by_torch", "host"
    ),
    "norms on the device are sums of squares": Mutant(
        GradientHomes, "norms", "squares.sqrt() *", "squares *", "clipped_by_torch", "device"
    ),
    "sums of squares on the device are added to those of other parameters": Mutant(
        BlockSums, "squares_there", "found[number] = sum_of", "found[numbers[0]] = sum_of", "clipped_by_torch", "device"
    ),
    "an overflow on the device is not told": Mutant(
        GradientHomes, "tell_nonfinite", "found_inf.masked_fill_(", "found_inf.clone().masked_fill_(", "scaled_by_torch",
        "device",
    ),
    "two tiles have one place on the device": Mutant(
        DeviceMemory, "take", "slab.free.take(size) if slab.kind == kind else None", "0 if slab.kind == kind else None",
        "plain", "device",
    ),
    "slots are filled before what their memory held has been used": Mutant(
        UnitSlots, "__init__", "owner.wait_stream(current_stream(owner.device))", "pass", "sharded_again", "host"
    ),
    "memory of a closed model is still filled": Mutant(
        Passage, "close", "current_stream(self.device).wait_stream(self.copies)", "pass", "sharded_again", "device"
    ),
    "units are held in memory that is not there yet": Mutant(
        LiveUnit, "keep", "self.memory.begin_filling()", "pass", "kept_present", "host"
    ),
    "memory is unregistered while what leaves is copied to it": Mutant(
        DeviceMemory, "leave", "self._await_copies()", "pass", "left_and_closed", "host"
    ),
    "buffers are let go while they are copied": Mutant(
        StagingBuffers, "wait", ".synchronize()", "", "inference", "nvme"
    ),
    "a buffer is let go with a unit that is dropped while it is copied": Mutant(
        LiveUnit, "drop", "read = coming.copied if isinstance(coming, StagedRead) else None", "read = None",
        "after_exceptions", "nvme"
    ),
    "weights on the device are widened before the step has written them": Mutant(
        LiveUnit, "outdate", "self.passage.note_outdated()", "pass", "widened", "device"
    ),
    "an input that is dropped while it comes is let go": Mutant(
        _Passing, "__del__", "self.tensor.record_stream(self.stream)", "pass", "activations_of_reentrant_blocks", "host"
    ),
    "what left comes back to other places": Mutant(
        DeviceMemory, "come_back", "slab.memory.copy_(bytes_of, non_blocking=True)", "pass", "slept", "device"
    ),
    "memory is unregistered while what left comes back": Mutant(
        DeviceMemory, "come_back", "self._await_copies()", "pass", "slept", "device"
    ),
    "memory is unregistered while it is copied": Mutant(
        shards, "release", "live.await_home()", "pass", "plain", "host"
    ),
    "a copy spans two registrations": Mutant(
        PageLock, "__init__", "in _chunks(slots)", "in [[ByteRange(a + i, 4096)] for a, n in slots for i in range(0, n, 4096)]",
        "inference", "host",
    ),
    "an input is read before it has come back": Mutant(
        _Passing, "wait", "current_stream(self.tensor.device).wait_event(self.ended)", "pass", "activations_on_host", "host"
    ),
    "an input leaves before it is computed": Mutant(
        _HostRoom, "_copying", "self._stream.wait_stream(current_stream(self._device))", "pass", "activations_on_host", "host"
    ),
    "the end of an input's copy is recorded on another stream": Mutant(
        _HostRoom, "_copying", "record(self._stream)", "record(current_stream(self._device))", "activations_on_host", "host"
    ),
    "an input is let go before it has left": Mutant(
        _Input, "let_go", "self._passing.wait()", "self._passing.ended = None", "activations_on_host", "host"
    ),
    "two inputs have one home": Mutant(
        _HostRoom, "take", "self._free.pop()", "self._free[-1]", "activations_on_host", "host"
    ),
    "an input is written before it is in the buffer": Mutant(
        _DiskRoom, "_copy", "copied.synchronize()", "pass", "activations_on_nvme", "host"
    ),
    "an input leaves for the disk before it is computed": Mutant(
        _DiskRoom, "_copy", "self._stream.wait_event(ready)", "pass", "activations_on_nvme", "host"
    ),
    "an input comes from the disk into memory that is in use": Mutant(
        _DiskRoom, "_end_read", "self._stream.wait_event(ready)", "pass", "activations_on_nvme", "host"
    ),
    "a buffer of inputs is filled again while it is read": Mutant(
        _DiskRoom, "_next", "last.synchronize()", "pass", "activations_on_nvme", "host"
    ),
    "the end of an input's copy from the disk is not noted": Mutant(
        _DiskRoom, "_end_read", "passing.stream, passing.ended = self._stream, record(self._stream)",
        "passing.stream = self._stream", "activations_on_nvme", "host"
    ),
    "weights that are about to change are not noted": Mutant(
        Passage, "note_outdated", "self._is_outdated = True", "pass", "widened", "device"
    ),
    "an input is copied to the device before the disk has read it": Mutant(
        _DiskRoom, "_end_read", "reading[0][1].wait()", "pass", "activations_on_nvme", "host"
    ),
    "nothing is pinned": Mutant(Arena, "pin", "if slots:", "if False:", "pageable_copies", "host"),
}  # fmt: skip


ON_RANKS = {
    "a gather is not waited for": Mutant(LiveUnit, "_await_gather", "gathering.pending.wait()", "pass", "", ""),
    "a gather does not wait for the memory that it fills": Mutant(
        UnitMemory, "begin_filling", "stream.wait_event(self._allocated)", "pass", "", ""
    ),
    "a home is overwritten while a gather reads it": Mutant(
        LiveUnit, "gather", "self.memory.note_home_read(read)", "pass", "", ""
    ),
    "the end of a gather's reads is recorded before them": Mutant(
        LiveUnit, "gather",
        """self._gather.put(self._at_home())
        read = record(copies) if copies is not None else None""",
        """read = record(copies) if copies is not None else None
        self._gather.put(self._at_home())""",
        "", "",
    ),
    "device memory that a model leaves is lent before its streams have ended": Mutant(
        DeviceMemory, "_end", "slab.memory.record_stream(current_stream(self._device))", "pass", "", "closed aside"
    ),
    "a gather's end is recorded before it": Mutant(
        LiveUnit, "_await_gather", "record(self.passage.copies)", "record(self.passage.owner)", "", ""
    ),
    "a reduction does not wait for its gradients": Mutant(
        Reducer, "start", "self._stream.wait_stream(current_stream(self._stream.device))", "pass", "", ""
    ),
    "gradients are let go while they are packed": Mutant(
        Reducer, "start", "grad.record_stream(self._stream)", "pass", "", ""
    ),
    "sums are overwritten while they are read": Mutant(
        Reducer, "_take", "self._stream.wait_event(read)", "pass", "", "stage 3"
    ),
    "the end of additions of sums is not noted": Mutant(
        GradientStore, "end_of_reads", "record(self._stream)", "None", "", "stage 3"
    ),
    "the end of copies of sums is recorded on another stream": Mutant(
        GradientLink, "end_of_reads", "record(self._stream)", "record(current_stream(self._device))", "", "stage 3, host, cut"
    ),
    "blocks are unpacked before they have come": Mutant(
        PackedGather, "start", "pending = self._exchange(what, wire)",
        "self._exchange(what, wire); pending = Pending(self._topology, what, [], [])", "", "qwZ",
    ),
    "parts of parameters are gathered as lists in a coalesced group": Mutant(
        UnitGather, "_all_gathers", "[partial(_gather_flat, group, each.me, rows)]",
        "[partial(dist.all_gather, row, row[each.me], group, True) for row in rows], partial("
        "dist._coalescing_manager, group, self._full.device, async_ops=True)",
        "", "stage 1, gathers cut",
    ),
    "a gather reads weights before the step has written them": Mutant(
        Passage, "await_written", "self.copies.wait_event(self._written)", "pass", "", "stage 3, all streamed"
    ),
}  # fmt: skip
"""Those of several ranks (parity_on_ranks.py)."""


def canonical(code: str) -> str:
    """Code as `ast` writes it, whatever its layout: a statement, an expression or the head of a block."""
    with contextlib.suppress(SyntaxError):
        return ast.unparse(ast.parse(code))
    with contextlib.suppress(SyntaxError):
        return ast.unparse(ast.parse(f"{code}\n    pass")).rpartition("\n")[0]
    return code


@contextlib.contextmanager
def applied(mutant: Mutant) -> Iterator[None]:
    """The library with one line changed. Raises AssertionError when the line is not there exactly once."""
    original: Callable[..., Any] = inspect.getattr_static(mutant.owner, mutant.function)
    source = canonical(textwrap.dedent(inspect.getsource(original)))
    line = canonical(mutant.line)
    assert source.count(line) == 1, f"{mutant.function} has {source.count(line)} of {line!r}"
    made: dict[str, Any] = {}
    changed = source.replace(line, mutant.becomes)
    code = compile(changed, f"<mutant of {mutant.function}>", "exec")
    exec(code, vars(sys.modules[original.__module__]), made)
    setattr(mutant.owner, mutant.function, made[mutant.function])
    try:
        yield
    finally:
        setattr(mutant.owner, mutant.function, original)
