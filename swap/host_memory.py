"""HostMemory: slots of a store's arena, for which write-backs under way are waited for when the budget is full.

The store's lock is held for moments only, never while a move is waited for.
"""

from __future__ import annotations

import threading

from tiermem.swap.arena import Arena, BudgetError, Slot
from tiermem.swap.move import wait_for_any
from tiermem.swap.under_way import UnderWay


class HostMemory:
    """The arena of a store, the moves that may give memory back to it, and the lock that guards them."""

    def __init__(self, arena: Arena, under_way: UnderWay, lock: threading.RLock) -> None:
        self._arena = arena
        self._under_way = under_way
        self._lock = lock

    def take(self, num_bytes: int, what: str, crosses_link: bool = False) -> Slot:
        """A slot, when need be after write-backs have given theirs back. Raises BudgetError."""
        while True:
            try:
                return self._arena.take(num_bytes, what, crosses_link)
            except BudgetError:
                if not self.await_some():
                    raise

    def await_some(self) -> bool:
        """Waits until a write-back under way has ended; False when there is none whose end could free memory."""
        carved = self._arena.carved_bytes
        with self._lock:
            writes = self._under_way.unfinished(is_write=True)
        if writes and self._arena.carved_bytes >= carved:
            wait_for_any([[move] for move in writes])  # whichever path is faster
        return bool(writes) or self._arena.carved_bytes < carved
