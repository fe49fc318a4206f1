"""Tier: a place bytes can rest.

    DEVICE   where the maths of the model runs: an accelerator, or without one this process's own memory
    HOST     the arena: page-aligned memory of an exact size, counted in the budget; what crosses the link to an accelerator is
             pinned
    NVME     preallocated files on one or several paths, read and written with O_DIRECT

A tensor's *home* is the tier it returns to. Nothing here moves a byte; see move.py and store.py.
"""

from __future__ import annotations

import enum

ALIGNMENT = 4096
"""Of offsets, lengths and memory on the way to and from NVME: what every file system with O_DIRECT accepts here."""


class Tier(enum.Enum):
    """A place bytes can rest; the value is the name used in configs and reports."""

    DEVICE = "none"
    HOST = "cpu"
    NVME = "nvme"
