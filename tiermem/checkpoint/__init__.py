"""Checkpoint: durable steps of a sharded model, which are the store's own files, and complete copies of them.

Rooms, lowest first; each says what is in it:

    together     a stage that all ranks go through, and an end that all come to alike
    format/      the files: specified, read strictly, written, found
    saving/      what a rank saves, commits, copies
    opening/     a saved step, verified, put where a model rests
    space        what the files of runs take on the disk
    survey       runs and steps of a place, left alone
    interchange/ other systems' checkpoints, in and out
    zero_to_fp32 the reference's functions that take weights out
"""

from __future__ import annotations

import importlib
from typing import Any

_HOMES = {
    "Beside": "tiermem.checkpoint.saving.saver",
    "DamagedState": "tiermem.checkpoint.opening.damage",
    "Loaded": "tiermem.checkpoint.opening.loading",
    "ManifestError": "tiermem.checkpoint.format.fields",
    "Source": "tiermem.checkpoint.opening.source",
    "decode": "tiermem.checkpoint.format.plain",
    "load": "tiermem.checkpoint.opening.loading",
    "make_durable": "tiermem.checkpoint.saving.saver",
    "save": "tiermem.checkpoint.saving.saver",
    "wait": "tiermem.checkpoint.saving.saver",
}

__all__ = list(_HOMES)


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(importlib.import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'tiermem.checkpoint' has no attribute {name!r}")
