"""DeviceMemory: the memory of the tier DEVICE, carved from few allocations (slabs), which can go to
HOST memory for a while.

torch's allocator rounds each allocation up, CUDA's to multiples of 2 MiB. Tensors of one kind
therefore share a slab, so that the device holds their bytes and one rounding. A slab may leave: its
bytes are copied to HOST memory and its device memory is freed, for another program. When it comes
back, its tensors are views of the same storage, at another address.

    reserve, for each slot of a kind --first take--> one slab for all, or several where free memory
    is in pieces --take--> Slot --give_back--> free a slab without slots goes back to torch

    a kind:  THERE --leave--> AWAY --come_back--> THERE

A `DevicePool` lends equal slots of a kind that it has taken at once.
"""

from __future__ import annotations

import threading
from collections.abc import Collection

import torch

from tiermem.swap.base.ranges import ALIGNMENT, FreeRanges, round_up
from tiermem.swap.memory.accelerator import current_stream, is_accelerator, record
from tiermem.swap.memory.arena import Arena, Pool, Slot


class _Slab:
    """One allocation of torch."""

    def __init__(self, kind: str, memory: torch.Tensor) -> None:
        self.kind = kind
        self.memory = memory
        self.free = FreeRanges()
        self.free.add(0, memory.numel())
        self.num_slots = 0  # in use

    def has(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor lies in it."""
        mine, its = (each.untyped_storage()._cdata for each in (self.memory, tensor))
        return bool(mine == its)


def take_pieces(num_bytes: int, least_bytes: int, device: torch.device) -> list[torch.Tensor]:
    """So many bytes of a device in as few pieces as its free memory allows, each of `least_bytes`
    or more. Raises torch's OutOfMemoryError."""
    pieces: list[torch.Tensor] = []
    left = num_bytes
    size = max(num_bytes, least_bytes)
    while left > 0:
        try:
            pieces.append(torch.empty(size, dtype=torch.uint8, device=device))
        except torch.OutOfMemoryError:
            if size == least_bytes:
                raise
            size = max(least_bytes, round_up(size // 2, ALIGNMENT))
            continue
        left -= size
        size = max(least_bytes, min(size, left))
    return pieces


class DeviceMemory:
    """Slots of the device's memory, by kind: the part of an entry's name before its first slash.
    Thread-safe.

    Args:
        device: where the memory is; may be the CPU.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._slabs: list[_Slab] = []
        # bytes of announced slots that no slab has room for yet, by kind
        self._due: dict[str, int] = {}
        self._kinds_away: set[str] = set()
        # what has left, each with its bytes in HOST memory
        self._away: list[tuple[_Slab, torch.Tensor | None]] = []
        self._arena: Arena | None = None  # has those bytes
        # guards everything above; an interrupt may leave it to this thread
        self._lock = threading.RLock()

    def reserve(self, name: str, num_bytes: int) -> None:
        """Announces a slot of the kind of this name: the next slab of the kind has room for it.
        Allocates nothing."""
        kind = _kind_of(name)
        with self._lock:
            self._due[kind] = self._due.get(kind, 0) + round_up(num_bytes, ALIGNMENT)

    def take(self, name: str, num_bytes: int) -> Slot:
        """A slot, content undefined, of a slab of its kind, or of a new one. Raises torch's
        OutOfMemoryError.

        The memory is that of the stream that is current when its slab is made: other streams have
        to wait for it.
        """
        size = round_up(num_bytes, ALIGNMENT)
        kind = _kind_of(name)
        with self._lock:
            for slab in self._slabs:
                start = slab.free.take(size) if slab.kind == kind else None
                if start is not None:
                    break
            else:
                due = max(size, self._due.pop(kind, 0))
                made = [_Slab(kind, each) for each in take_pieces(due, size, self._device)]
                self._slabs += made
                slab = made[0]
                start = 0
                slab.free.take(size)
            slab.num_slots += 1
            return Slot(start, slab.memory[start : start + num_bytes])

    def give_back(self, slot: Slot) -> None:
        """Frees a slot. Raises RuntimeError when it is given back twice."""
        with self._lock:
            slab = next(each for each in self._slabs if each.has(slot.tensor))
            slab.free.add(slot.offset, round_up(slot.num_bytes, ALIGNMENT))
            slab.num_slots -= 1
            if not slab.num_slots:
                self._slabs.remove(slab)
                self._end(slab)

    def leave_to(self, tensor: torch.Tensor) -> None:
        """Makes the slab of a tensor that of its users: it lasts as long as they do, also when this
        memory is closed."""
        with self._lock:
            for slab in [each for each in self._slabs if each.has(tensor)]:
                self._slabs.remove(slab)
                self._end(slab)

    def num_bytes(self, kinds: Collection[str]) -> int:
        """Bytes of the slabs of these kinds that are there."""
        return sum(slab.memory.numel() for slab in self._there(kinds))

    def leave(self, kinds: Collection[str], without_bytes: Collection[str] = ()) -> None:
        """Copies the slabs of these kinds to HOST memory, pinned if there is a driver, and frees
        their memory. Blocks.

        without_bytes: kinds that leave, too, and whose content is undefined when they have come
            back. Work on other streams must be waited for by the current stream. Raises
            RuntimeError for a second call, OSError when there is no HOST memory; then nothing has
            left. Until `come_back` tensors of these kinds have no memory: `check_there` says so.
        """
        if self._kinds_away:
            raise RuntimeError("device memory has left already: let it come back first")
        due = self._there(kinds)
        copies: list[torch.Tensor] = []
        if due:
            total = sum(slab.memory.numel() for slab in due)
            arena = Arena(total, total)
            try:
                slots = [
                    arena.take(each.memory.numel(), "memory that leaves", crosses_link=True)
                    for each in due
                ]
                if is_accelerator(self._device):
                    arena.pin(self._device)
                for each, slot in zip(due, slots, strict=True):
                    copies.append(slot.tensor.copy_(each.memory, non_blocking=True))
                self._await_copies()
            except BaseException:
                arena.close()
                raise
            self._arena = arena
        self._away = [(slab, None) for slab in self._there(without_bytes)] + list(
            zip(due, copies, strict=True)
        )
        self._kinds_away = {*kinds, *without_bytes}
        for slab, _ in self._away:
            slab.memory.untyped_storage().resize_(0)

    def come_back(self) -> None:
        """Brings back what has left. Blocks until it is there, for every stream. Does nothing when
        nothing has left.

        Raises torch's OutOfMemoryError; what did not fit is still in HOST memory then, and a later
        call goes on.
        """
        if not self._kinds_away:
            return
        while self._away:
            slab, bytes_of = self._away[-1]
            slab.memory.untyped_storage().resize_(slab.memory.numel())
            if bytes_of is not None:
                slab.memory.copy_(bytes_of, non_blocking=True)
            self._away.pop()
        self._await_copies()
        self._kinds_away.clear()
        arena = self._arena
        self._arena = None
        if arena is not None:
            arena.close()

    def check_there(self, name: str) -> None:
        """Raises RuntimeError while the memory of this kind of names has left."""
        if _kind_of(name) in self._kinds_away:
            raise RuntimeError(
                f"{name!r} has left the device (offload_states): call reload_states first"
            )

    def check_all_there(self) -> None:
        """Raises RuntimeError while memory of any names has left."""
        for kind in self._kinds_away:
            self.check_there(kind)

    def _there(self, kinds: Collection[str]) -> list[_Slab]:
        away = [slab for slab, _ in self._away]
        return [slab for slab in self._slabs if slab.kind in kinds and slab not in away]

    def _await_copies(self) -> None:
        if is_accelerator(self._device):
            record(current_stream(self._device)).synchronize()

    def _end(self, slab: _Slab) -> None:
        """Before a slab goes back to torch, which lends its memory again when the current stream
        has come here."""
        if is_accelerator(self._device):
            slab.memory.record_stream(current_stream(self._device))

    def close(self) -> None:
        """Frees all memory, also what has left and what others still refer to, in the order of the
        current stream, which has waited for its users."""
        with self._lock:
            for slab in self._there({each.kind for each in self._slabs}):
                self._end(slab)
                slab.memory.untyped_storage().resize_(0)
            self._slabs.clear()
            self._away.clear()
        arena = self._arena
        self._arena = None
        if arena is not None:
            arena.close()


class DevicePool(Pool):
    """Equal buffers of the device's memory, carved from one slab of a kind until the pool is
    closed.

    Streams wait as for `DeviceMemory.take`, and for those that used a buffer before. Raises torch's
    OutOfMemoryError.
    """

    def __init__(self, memory: DeviceMemory, slot_bytes: int, count: int, kind: str) -> None:
        for _ in range(count):
            memory.reserve(kind, slot_bytes)
        self._give_up = memory.give_back
        self._set([memory.take(kind, slot_bytes) for _ in range(count)], slot_bytes)

    def take(self) -> Slot | None:
        """The slot that has been free for longest, in which other streams have ended soonest; None
        when all are lent."""
        return self._free.pop(0) if self._free else None


def _kind_of(name: str) -> str:
    return name.partition("/")[0]
