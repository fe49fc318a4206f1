"""Checkpoint: durable steps of a sharded model, which are the store's own files, and complete copies of them.

Rooms and files in order: each imports only files before it.

    format/      kinds       how elements are stored                 fields     strict readers of JSON files
                 manifest    the files of a durable step             finding    the durable steps of a folder
    together     a stage that all ranks go through; an error on one rank is an error on all
    saving/      pieces      the file ranges that a rank saves       capture    which elements, and where they lie
                 publish     a manifest made known; old steps go     commit     a step made durable where it rests
                 copies      a complete copy elsewhere               saver      both, for shards and optimizer
    opening/     verified    bytes compared with their checksums     source     an opened step
                 restore     put where a model's states rest         loading    for `load_checkpoint` and resume
    survey       runs and steps of a place, read only
    interchange/ other systems' checkpoints, in and out
    zero_to_fp32 the reference's functions that take weights out
"""

from __future__ import annotations

import importlib
from typing import Any

_HOMES = {
    "Beside": "tiermem.checkpoint.saving.saver",
    "DamagedState": "tiermem.checkpoint.opening.verified",
    "Loaded": "tiermem.checkpoint.opening.loading",
    "ManifestError": "tiermem.checkpoint.format.fields",
    "Source": "tiermem.checkpoint.opening.source",
    "decode": "tiermem.checkpoint.format.fields",
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
