"""Entry: one named tensor of a store, and the state machine that it goes through.

What a state says is where the bytes occupy memory:

    HOME      nowhere but at home
    COMING    at home, and a slot of HOST memory that is being filled
    PRESENT   a slot of HOST memory (and, unless changed, at home)
    LEAVING   a slot that is being written back
    LOST      nowhere: the write-back failed, and what is at home is not what was written

       HOME --come--> COMING --arrive--> PRESENT --rest---------------> HOME
                        |                PRESENT --leave--> LEAVING --end_leaving--> HOME or LOST
                        +--turn_back--> where it came from: HOME, LEAVING or LOST
       LEAVING --come--> COMING      the fetch follows the write and sees the new bytes
       LOST    --come--> COMING      the fetch fails with the write's error

An entry whose home is HOST or DEVICE is always PRESENT. One method per arrow; another arrow raises and names both states. The
caller holds the store's lock.
"""

from __future__ import annotations

import enum
import errno
from collections.abc import Sequence

import torch

from tiermem.swap.arena import Slot
from tiermem.swap.direct import ALIGNMENT
from tiermem.swap.home import NvmeHome
from tiermem.swap.move import Move
from tiermem.swap.tier import Tier


class EntryState(enum.Enum):
    """Where an entry's bytes occupy memory; see the diagram above."""

    HOME = enum.auto()
    COMING = enum.auto()
    PRESENT = enum.auto()
    LEAVING = enum.auto()
    LOST = enum.auto()


class Entry:
    """A tensor's name, form, home and whereabouts."""

    def __init__(self, name: str, home: Tier, dtype: torch.dtype, shape: Sequence[int]) -> None:
        self.name = name
        self.home = home
        self.dtype = dtype
        self.shape = tuple(shape)
        self.num_bytes = dtype.itemsize
        for size in self.shape:
            self.num_bytes *= size
        self.padded_bytes = max(ALIGNMENT, -(-self.num_bytes // ALIGNMENT) * ALIGNMENT)
        self.state = EntryState.HOME
        self.nvme: NvmeHome | None = None  # where it rests, when home is NVME
        self.slot: Slot | None = None  # while COMING or PRESENT; the home itself when home is HOST or DEVICE
        self.owns_slot = True  # False: the caller lent it and takes it back
        self.coming: Move | None = None  # the fetch under way
        self.leaving: Move | None = None  # the write-back under way, or the one that failed

    def tensor(self, slot: Slot) -> torch.Tensor:
        """A slot's bytes, typed and shaped."""
        return slot.tensor[: self.num_bytes].view(self.dtype).view(self.shape)

    def occupy(self, slot: Slot) -> None:
        """HOME -> PRESENT: its first bytes are put into memory."""
        self.expect("put", EntryState.HOME)
        self.slot, self.owns_slot, self.state = slot, True, EntryState.PRESENT

    def come(self, move: Move, slot: Slot, owns_slot: bool) -> None:
        """HOME, LEAVING or LOST -> COMING."""
        self.expect("fetched", EntryState.HOME, EntryState.LEAVING, EntryState.LOST)
        self.coming, self.slot, self.owns_slot, self.state = move, slot, owns_slot, EntryState.COMING

    def arrive(self) -> None:
        """COMING -> PRESENT."""
        self.expect("present", EntryState.COMING)
        self.coming, self.state = None, EntryState.PRESENT

    def turn_back(self) -> None:
        """COMING -> HOME, LEAVING or LOST: the fetch failed or was cancelled."""
        self.expect("given up", EntryState.COMING)
        self.coming, self.slot, self.state = None, None, self._without_slot()

    def rest(self) -> None:
        """PRESENT -> HOME, nothing written."""
        self.expect("released", EntryState.PRESENT)
        self.slot, self.state = None, EntryState.HOME

    def leave(self, move: Move) -> None:
        """PRESENT -> LEAVING; the slot is the move's until it ends."""
        self.expect("released", EntryState.PRESENT)
        self.slot, self.leaving, self.state = None, move, EntryState.LEAVING

    def end_leaving(self, arrived: bool) -> None:
        """LEAVING -> HOME or LOST; an entry that is being fetched again already stays COMING."""
        self.expect("home", EntryState.LEAVING, EntryState.COMING)
        if arrived:
            self.leaving = None
        if self.state is EntryState.LEAVING:
            self.state = EntryState.HOME if arrived else EntryState.LOST

    def expect(self, wish: str, *allowed: EntryState) -> None:
        """Raises RuntimeError, naming both states, unless the entry is in one of those allowed."""
        if self.state not in allowed:
            names = " or ".join(state.name for state in allowed)
            raise RuntimeError(f"{self.name!r} is {self.state.name}; only what is {names} can be {wish}")

    def check_written(self, freeze: int) -> None:
        """Raises OSError when what a freeze holds of it is not what was last written, because that write failed."""
        if self.leaving is not None and self.leaving.has_failed:
            self.leaving.wait()
        for _, start, stop in self.nvme.slots.lost(freeze) if self.nvme is not None else ():
            raise OSError(
                errno.EIO,
                f"bytes {start} to {stop} of {self.name!r} are lost: the last write of them failed. Write them again, or drop "
                "the entry, before it is frozen",
            )

    def _without_slot(self) -> EntryState:
        if self.leaving is None:
            return EntryState.HOME
        return EntryState.LOST if self.leaving.has_failed else EntryState.LEAVING
