"""Strips of a size that cuts the small tiles of tests too."""

import tiermem.units.state_layout

NUMEL = 2048
"""Elements of a strip: a page of 16-bit weights."""


def cut_small_tiles() -> None:
    """From now on this process steps tiles in such strips."""
    tiermem.units.state_layout.STRIP_NUMEL = NUMEL
    tiermem.units.state_layout.AT_ONCE_BYTES = 0
