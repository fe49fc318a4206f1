"""Activations: the inputs of checkpointed blocks rest on HOST or NVMe between forward and backward.

    forward     a checkpoint saves its block's input --> a copy leaves for its home; the next block computes meanwhile
                the next block's input is saved      --> the input before it is let go
    backward    a checkpoint asks for its input      --> the input that is needed next starts to come back

torch.utils.checkpoint, reentrant or not, saves the inputs of a block through `saved_tensors_hooks`,
which are in force during the outermost forward of a sharded model. Only what a checkpoint saves
moves; a model without checkpoints keeps its activations. These stay where they are: parameters,
buffers, parts of a larger tensor, small tensors, and a tensor that several checkpoints save (a
mask), which is one tensor whatever the depth. The bytes come back as they left, with the same shape
and strides.

One input is on its way out, or one ahead on its way back, so the memory where the maths runs holds
at most one input beside the one in use, whatever the number of blocks. A home is freed when the
graph lets its input go: after its backward, or when an exception or the caller drops the graph.

torch looks at no version of a tensor that hooks saved. What is saved here keeps its version: a
tensor that was changed in place before it had left, or that stayed, is an error in backward, as
without hooks.
"""

from __future__ import annotations

import collections
import contextlib
import functools
import logging
import os
import sys
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from tiermem.plans.plan import ACTIVATION_CHUNK_BYTES, Plan
from tiermem.policy import OffloadPolicy, Tier
from tiermem.swap.base.ranges import round_up
from tiermem.swap.base.side_threads import SideThreads, Task
from tiermem.swap.memory.accelerator import (
    activate,
    current_stream,
    is_accelerator,
    new_stream,
    on,
    record,
)
from tiermem.swap.memory.arena import Arena, BudgetError, Pool, Slot
from tiermem.swap.store.checksum import Pieces
from tiermem.swap.store.move import Move
from tiermem.swap.store.store import TensorStore
from tiermem.units import registry
from tiermem.weights.absent import Owner, RestingParameter
from tiermem.weights.unit_state import LiveUnit

logger = logging.getLogger("tiermem")

_LEAST_BYTES = 1 << 16
"""Smaller tensors stay: the latency of their transfers would take longer than their bytes."""
_CHUNKS_AT_ONCE = 16
"""Chunks of HOST memory that are carved and pinned in one call, where there is room."""
_PAGE = 4096
_FRAMES = 3
"""A hook of a tensor that a checkpoint saves is called at most so many frames below
torch.utils.checkpoint."""


# ---- homes ---------------------------------------------------------------------------------------


class _Passing:
    """A tensor where the maths runs, while its bytes are copied out of it or into it."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor
        # of a helper thread that moves the bytes
        self.work: Task[None] | None = None
        # the end of the accelerator's copies; valid after `work`
        self.ended: torch.Event | None = None
        self.stream: torch.Stream | None = None  # of these copies

    @property
    def pieces(self) -> Iterator[tuple[int, torch.Tensor]]:
        """(offset in bytes, bytes of one chunk) from the first byte of the tensor's storage to the
        last."""
        flat = self.tensor.as_strided((self.tensor.numel(),), (1,)).view(torch.uint8)
        for start in range(0, flat.numel(), ACTIVATION_CHUNK_BYTES):
            yield start, flat[start : start + ACTIVATION_CHUNK_BYTES]

    def wait(self) -> None:
        """Lets the current stream wait for the copies. Blocks for a helper thread, not for the
        accelerator. Raises OSError."""
        work = self.work
        self.work = None
        if work is not None:
            work.result()
        if self.ended is not None:
            current_stream(self.tensor.device).wait_event(self.ended)
            self.ended = None

    def __del__(self) -> None:
        # dropped with its graph: nothing waits for the copies
        if self.ended is not None and self.stream is not None:
            self.tensor.record_stream(self.stream)


class _HostRoom:
    """Chunks of pinned HOST memory, for an accelerator. One stream copies in both directions, which
    orders a chunk's uses.

    Args:
        device: the accelerator.
        arena: has the chunks.
        owns_arena: whether `close` closes it.
    """

    def __init__(self, device: torch.device, arena: Arena, owns_arena: bool) -> None:
        self._device = device
        self._arena = arena
        self._owns_arena = owns_arena
        self._stream = new_stream(device)
        self._free: collections.deque[torch.Tensor] = collections.deque()

    def take(self, num_bytes: int) -> list[torch.Tensor]:
        count = -(-num_bytes // ACTIVATION_CHUNK_BYTES)
        while len(self._free) < count:
            self._grow(count - len(self._free))
        return [self._free.pop() for _ in range(count)]

    def give_back(self, home: list[torch.Tensor]) -> None:
        self._free.extend(home)

    def send(self, passing: _Passing, home: list[torch.Tensor]) -> None:
        with self._copying(passing):
            for chunk, (_, piece) in zip(home, passing.pieces, strict=True):
                chunk[: piece.numel()].copy_(piece, non_blocking=True)

    def bring(self, passing: _Passing, home: list[torch.Tensor]) -> None:
        with self._copying(passing):
            for chunk, (_, piece) in zip(home, passing.pieces, strict=True):
                piece.copy_(chunk[: piece.numel()], non_blocking=True)

    def close(self) -> None:
        record(self._stream).synchronize()
        self._free.clear()
        if self._owns_arena:
            self._arena.close()

    @contextlib.contextmanager
    def _copying(self, passing: _Passing) -> Iterator[None]:
        self._stream.wait_stream(current_stream(self._device))
        with on(self._stream):
            yield
        passing.stream, passing.ended = self._stream, record(self._stream)

    def _grow(self, count: int) -> None:
        what = "an input of a checkpointed block, resting on HOST,"
        try:
            slot = self._arena.take(
                max(count, _CHUNKS_AT_ONCE) * ACTIVATION_CHUNK_BYTES, what, crosses_link=True
            )
        except BudgetError:
            slot = self._arena.take(ACTIVATION_CHUNK_BYTES, what, crosses_link=True)
        self._arena.pin(self._device)
        self._free.extend(slot.tensor.split(ACTIVATION_CHUNK_BYTES))


class _Extent:
    """The home of one input on NVMe."""

    def __init__(self, name: str, num_bytes: int) -> None:
        self.name = name
        self.num_bytes = num_bytes
        self.writes: list[Move] = []
        # the last that a helper thread was given
        self.work: Task[None] | None = None

    @property
    def is_idle(self) -> bool:
        """Whether the helper thread has no more work with it."""
        return self.work is None or self.work.is_set


class _DiskRoom:
    """Files of the store. One helper thread moves the bytes through a ring of buffers, which bounds
    memory.

    Args:
        device: where the inputs are.
        store: has the files.
        pool: the ring's buffers, of one chunk each; all belong to the room until the end.
    """

    def __init__(self, device: torch.device, store: TensorStore, pool: Pool) -> None:
        self._device = device
        self._store = store
        self._stream = new_stream(device) if is_accelerator(device) else None
        activates = functools.partial(activate, device)
        self._thread = SideThreads(1, "tiermem-activations", activates)
        # Each buffer with the transfer that last used it. Used by the helper thread alone.
        self._ring: collections.deque[tuple[Slot, Move | torch.Event | None]] = collections.deque()
        for _ in range(pool.count):
            slot = pool.take()
            assert slot is not None
            self._ring.append((slot, None))
        self._released: collections.deque[_Extent] = collections.deque()
        self._free: list[_Extent] = []
        self._num_made = 0

    def take(self, num_bytes: int) -> _Extent:
        size = round_up(num_bytes, _PAGE)
        for _ in range(len(self._released)):
            extent = self._released.popleft()
            (self._free if extent.is_idle else self._released).append(extent)
        alike = next((extent for extent in self._free if extent.num_bytes == size), None)
        if alike is not None:
            self._free.remove(alike)
            return alike
        while self._free:  # of other sizes, which this forward may not need
            self._store.drop(self._free.pop().name)
        self._num_made += 1
        extent = _Extent(f"activation.{self._num_made}", size)
        self._store.reserve(extent.name, (size,), torch.uint8, Tier.NVME, is_durable=False)
        starts = np.arange(0, size, ACTIVATION_CHUNK_BYTES)
        self._store.sums.protect(extent.name, Pieces(starts, np.append(starts[1:], size)))
        return extent

    def give_back(self, home: _Extent) -> None:
        self._released.append(home)

    def send(self, passing: _Passing, home: _Extent) -> None:
        self._start(self._write, passing, home)

    def bring(self, passing: _Passing, home: _Extent) -> None:
        self._start(self._read, passing, home)

    def close(self) -> None:
        self._thread.close()
        while self._ring:
            self._next()

    def _start(
        self,
        work: Callable[[_Passing, _Extent, torch.Event | None], None],
        passing: _Passing,
        home: _Extent,
    ) -> None:
        ready = None if self._stream is None else record(current_stream(self._device))
        # the thread takes it out: its queue must not hold the tensor after the result is there
        given = [passing]
        passing.work = home.work = self._thread.submit(lambda: work(given.pop(), home, ready))

    def _next(self) -> Slot:
        """The buffer that was used longest ago. Blocks until its transfer has ended."""
        slot, last = self._ring.popleft()
        if isinstance(last, Move):
            last.outcome()  # the caller who needs the bytes asks for the error
        elif last is not None:
            last.synchronize()
        return slot

    def _write(self, passing: _Passing, home: _Extent, ready: torch.Event | None) -> None:
        self._await_writes(home)  # of the input that rested there before
        for start, piece in passing.pieces:
            slot = self._next()
            write = None
            try:
                self._copy(slot.tensor[: piece.numel()], piece, ready)
                data = slot.tensor[: round_up(piece.numel(), _PAGE)]
                write = self._store.write([(home.name, start, data)], home.name)
                home.writes.append(write)
            finally:
                self._ring.append((slot, write))

    def _copy(self, into: torch.Tensor, piece: torch.Tensor, ready: torch.Event | None) -> None:
        """Copies a piece to a buffer. Blocks until the bytes are there."""
        if self._stream is None or ready is None:
            into.copy_(piece)
            return
        with on(self._stream):
            self._stream.wait_event(ready)
            into.copy_(piece, non_blocking=True)
            copied = record(self._stream)
        copied.synchronize()

    def _read(self, passing: _Passing, home: _Extent, ready: torch.Event | None) -> None:
        self._await_writes(home)
        reading: collections.deque[tuple[Slot, Move, torch.Tensor]] = collections.deque()
        try:
            for start, piece in passing.pieces:
                if not self._ring:
                    self._end_read(passing, reading, ready)
                slot = self._next()
                data = slot.tensor[: round_up(piece.numel(), _PAGE)]
                reading.append(
                    (slot, self._store.read([(home.name, start, data)], home.name), piece)
                )
            while reading:
                self._end_read(passing, reading, ready)
        finally:
            self._ring.extend((slot, move) for slot, move, _ in reading)

    def _end_read(
        self,
        passing: _Passing,
        reading: collections.deque[tuple[Slot, Move, torch.Tensor]],
        ready: torch.Event | None,
    ) -> None:
        """Waits for the oldest read, and copies its bytes to their place."""
        reading[0][1].wait()
        slot, _, piece = reading.popleft()
        if self._stream is None or ready is None:
            piece.copy_(slot.tensor[: piece.numel()])
            self._ring.append((slot, None))
            return
        with on(self._stream):
            self._stream.wait_event(ready)
            piece.copy_(slot.tensor[: piece.numel()], non_blocking=True)
            passing.stream, passing.ended = self._stream, record(self._stream)
        self._ring.append((slot, passing.ended))

    def _await_writes(self, home: _Extent) -> None:
        """Waits for the writes of a home. Raises OSError."""
        writes = home.writes
        home.writes = []
        for write in writes:
            write.wait()


_Room = _HostRoom | _DiskRoom
"""Where inputs rest. `give_back` may be called in any thread, and by the garbage collector."""


# ---- inputs --------------------------------------------------------------------------------------


class Saved(NamedTuple):
    """A tensor that stays where it is, and its version when it was saved."""

    tensor: torch.Tensor
    version: int

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Saved:
        """A tensor as it is now."""
        return cls(tensor, tensor._version)

    @property
    def is_changed(self) -> bool:
        """Whether the tensor was changed in place since."""
        return self.tensor._version != self.version

    def take(self) -> torch.Tensor:
        """The tensor. Raises RuntimeError for one that was changed."""
        if self.is_changed:
            of = f"of shape {tuple(self.tensor.shape)} in {self.tensor.dtype}"
            raise RuntimeError(
                f"a tensor {of} that backward needs was changed in place after it was saved: "
                "change a copy"
            )
        return self.tensor


class _Input:
    """What a graph keeps of a tensor that moves.

    LEAVING --(the next input is saved)--> AWAY --(backward comes near)--> COMING --(backward
    asks)--> AWAY

    A tensor that is asked for while it is LEAVING is taken as it is. One that several checkpoints
    save stays.
    """

    def __init__(
        self, room: _Room, home: Any, tensor: torch.Tensor, before: Callable[[], _Input | None]
    ) -> None:
        self._room = room
        self._home = home
        self._before = before  # the input that was saved before it, which backward needs after it
        # its address is not used again while this lives
        self._source = StorageWeakRef(tensor.untyped_storage())
        self._layout = tensor.size(), tensor.stride()
        self._like = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
        self._here: Saved | None = Saved.of(tensor.detach())  # until it has left
        self._passing: _Passing | None = _Passing(self._here.tensor)  # None: AWAY
        self._stays = False
        self._was_taken = False
        room.send(self._passing, home)

    def __del__(self) -> None:
        self._room.give_back(self._home)

    def stay(self, tensor: torch.Tensor) -> None:
        """Keeps the tensor where it is: it is saved once more."""
        if not self._stays:
            self._here = self._here or Saved.of(tensor.detach())
            self._stays, self._passing = True, self._passing or _Passing(self._here.tensor)

    def let_go(self) -> None:
        """LEAVING -> AWAY, unless it stays. Blocks for a helper thread. Raises OSError; then it
        stays."""
        if self._passing is not None and not self._stays:
            self._stays = True
            self._passing.wait()
            # else what has left may be changed too
            if self._here is not None and not self._here.is_changed:
                self._here = None
            self._stays = False
            self._passing = None

    def take(self) -> torch.Tensor:
        """The tensor; the one that is needed next starts to come. Blocks for a helper thread.
        Raises OSError, RuntimeError."""
        if self._here is not None:
            self._here.take()
        self._was_taken = True
        passing = self._bring()
        before = self._before()
        if before is not None and not before._was_taken:
            before._bring()
        passing.wait()
        if not self._stays:
            self._here = self._passing = None
        return passing.tensor

    def _bring(self) -> _Passing:
        if self._passing is None:
            self._passing = _Passing(self._like.new_empty_strided(*self._layout))
            self._room.bring(self._passing, self._home)
        return self._passing


Kept = Saved | _Input
"""A tensor that is needed again."""


def _moving(kept: Kept | None) -> _Input | None:
    return kept if isinstance(kept, _Input) else None


class Activations:
    """Moves the inputs of checkpointed blocks during the forwards of one model. Used by the thread
    that computes.

    Args:
        room: where they rest.
        device: where the maths runs.
        kept: the storages that never move, by their address (`_cdata`): weights and buffers.
    """

    def __init__(self, room: _Room, device: torch.device, kept: Callable[[], set[int]]) -> None:
        self._room = room
        self._device = device
        self._find_kept = kept
        self._kept: set[int] = set()
        self._hooks: torch.autograd.graph.saved_tensors_hooks | None = None
        self._last: Callable[[], _Input | None] = lambda: None  # the input that was saved last
        self._known: weakref.WeakValueDictionary[tuple[Any, ...], _Input] = (
            weakref.WeakValueDictionary()
        )
        self._has_warned = False

    def begin(self) -> None:
        """Begins an outermost forward. Ends one that an interrupt has ended.

        Inside hooks of another, such as those of a checkpoint around this forward, nothing moves:
        torch would call these hooks in place of the others.
        """
        self.end()
        if torch._C._autograd._top_saved_tensors_default_hooks(True) is not None:
            return
        self._kept = self._find_kept()
        self._hooks = torch.autograd.graph.saved_tensors_hooks(self._pack, _unpack)
        self._hooks.__enter__()

    def end(self) -> None:
        """Ends an outermost forward, also one that raised. Twice does nothing."""
        hooks = self._hooks
        self._hooks = None
        if hooks is not None:
            hooks.__exit__()

    def keep(self, tensor: torch.Tensor, following: Callable[[], Kept | None]) -> Kept:
        """Sends a tensor home that no graph saves; `take` brings it back. One that is too small to
        move stays.

        following: the tensor that is taken after this one, which starts to come when this one is
            taken.
        """
        if not self._may_move(tensor):
            return Saved.of(tensor)
        return self._send(tensor, lambda: _moving(following()))

    def close(self) -> None:
        """Ends transfers. Blocks. What graphs still keep is lost."""
        self.end()
        self._room.close()

    def _pack(self, tensor: torch.Tensor) -> torch.Tensor | Saved | _Input:
        if type(tensor) is RestingParameter:
            return tensor
        if not (_is_checkpoints_input() and self._may_move(tensor)):
            # not the tensor itself: an operation that saves its output would never be freed
            return Saved.of(tensor.detach())
        storage = tensor.untyped_storage()
        key = storage._cdata, tensor.size(), tensor.stride(), tensor.dtype, tensor._version
        known = self._known.get(key)
        if known is not None:
            known.stay(tensor)
            return known
        if isinstance(sent := self._send(tensor, self._last), _Input):
            self._known[key] = sent
        return sent

    def _send(self, tensor: torch.Tensor, following: Callable[[], _Input | None]) -> Saved | _Input:
        """Sends a tensor home; one for which there is no room stays."""
        try:
            home = self._room.take(tensor.nbytes)
        except (BudgetError, OSError) as error:
            self._warn(tensor, error)
            return Saved.of(tensor)
        last = self._last()
        if last is not None:
            last.let_go()
        moved = _Input(self._room, home, tensor, following)
        self._last = weakref.ref(moved)
        return moved

    def _may_move(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor is large, no weight, and all of its storage."""
        if (
            type(tensor) is not torch.Tensor
            or tensor.nbytes < _LEAST_BYTES
            or tensor.layout is not torch.strided
        ):
            return False
        storage = tensor.untyped_storage()
        is_whole = storage.nbytes() == tensor.nbytes and tensor.storage_offset() == 0
        is_plain = not (tensor.is_conj() or tensor.is_neg())
        return (
            is_whole
            and is_plain
            and tensor.device == self._device
            and storage._cdata not in self._kept
        )

    def _warn(self, tensor: torch.Tensor, error: Exception) -> None:
        if not self._has_warned:
            self._has_warned = True
            logger.warning(
                "an input of a checkpointed block, of %d bytes, stays on %s, and so do others: %s. "
                "Raise activation_bytes or the budget of its home",
                tensor.nbytes,
                self._device,
                error,
            )


def _unpack(saved: torch.Tensor | Saved | _Input) -> torch.Tensor:
    if isinstance(saved, (Saved, _Input)):
        return saved.take()
    # torch gives the checkpoint a plain tensor of its memory, with absent values
    if type(saved) is RestingParameter:
        owner: Owner | None = registry.owner_of(saved)
        if owner is not None and owner.may_lend:
            owner.take_out(saved)  # in backward: present until its end
    return saved


def _is_checkpoints_input() -> bool:
    """Whether the hook that calls this is called because torch.utils.checkpoint saves a tensor."""
    frame = sys._getframe(2)
    for _ in range(_FRAMES):
        if frame.f_globals.get("__name__") == "torch.utils.checkpoint":
            return True
        if frame.f_back is None:
            return False
        frame = frame.f_back
    return False


def make_activations(
    model: nn.Module,
    units: Sequence[LiveUnit],
    plan: Plan,
    policy: OffloadPolicy,
    store: TensorStore,
    pool: Pool | None,
) -> Activations | None:
    """What a policy asks for; None where activations stay: without a home for them, and on HOST
    where the maths runs there.

    pool: the plan's buffers for activations.
    """
    device = store.device
    room: _Room
    if policy.activations is Tier.NVME:
        assert pool is not None
        room = _DiskRoom(device, store, pool)
    elif policy.activations is Tier.HOST and is_accelerator(device):
        # addresses alone, until pages are carved
        memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        own = None if plan.activation_bytes else Arena(memory, memory if policy.pin_memory else 0)
        room = _HostRoom(device, own or store.arena, owns_arena=own is not None)
    else:
        return None

    def kept() -> set[int]:
        buffers = [each for each in model.buffers() if each.layout is torch.strided]
        return {
            each.untyped_storage()._cdata
            for each in (*(live.memory.full for live in units), *buffers)
        }

    return Activations(room, device, kept)
