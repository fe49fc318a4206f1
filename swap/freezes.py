"""Freezes: what every freeze of a store holds until it is thawed, also of entries that were dropped since.

The store's lock guards it. What a freeze is to those who have asked for it: freeze.py.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path

from tiermem.swap.entry import Entry
from tiermem.swap.freeze import Freeze
from tiermem.swap.home import NvmeHome


class Freezes:
    """None at first."""

    def __init__(self) -> None:
        self._homes: dict[int, list[NvmeHome]] = {}  # by the freeze's number
        self._numbers = itertools.count(1)

    def hold(self, entries: Sequence[Entry], files: Sequence[Path]) -> Freeze:
        """Holds what is current of entries that rest on NVME; `files` are the segments of the paths."""
        number = next(self._numbers)
        homes = {entry.name: entry.nvme for entry in entries if entry.nvme is not None}
        parts = {name: home.freeze(number) for name, home in homes.items()}
        self._homes[number] = list(homes.values())
        return Freeze(number, tuple(files), parts)

    def let_go(self, freeze: Freeze) -> None:
        """Holds nothing for it any more. Twice does nothing."""
        for home in self._homes.pop(freeze.number, ()):
            home.thaw(freeze.number)

    def clear(self) -> None:
        """Forgets everything: the files are closed."""
        self._homes.clear()
