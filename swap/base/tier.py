"""Tier: the kind of memory that bytes rest in.

    DEVICE   memory of the device that computes: an accelerator's, or without one this process's own memory
    HOST     the arena: page-aligned memory of an exact size, counted in the budget; memory that is copied to an accelerator
             is pinned
    NVME     preallocated files on one or several paths, read and written with O_DIRECT

A tensor's *home* is the tier that it returns to after use. move.py and store.py move the bytes.
"""

from __future__ import annotations

import enum
from collections.abc import Collection


class Tier(enum.Enum):
    """A kind of memory that bytes rest in; the value is its name in configs and reports.

    DEVICE: memory of the device that computes; HOST: the arena in this machine's memory; NVME:
        files on disks.
    """

    DEVICE = "none"
    HOST = "cpu"
    NVME = "nvme"

    __hash__ = (
        object.__hash__
    )  # of one that there is once; Enum's own takes as long as a search's sum


def check_tier(name: str, given: object, allowed: Collection[Tier] = tuple(Tier)) -> None:
    """Raises ValueError for what is none of the tiers that an argument may name."""
    if given not in allowed:
        raise ValueError(f"{name} is {given!r}; allowed are {', '.join(map(str, allowed))}")
